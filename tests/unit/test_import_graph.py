"""One direction of dependency between modules, and an `import kvshare` that loads nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvshare

PACKAGE = Path(kvshare.__file__).parent

# module -> modules of kvshare that it may import at the top or inside a function
MAY_IMPORT = {
    "errors": set(),
    "layout": {"errors"},
    "fds": {"errors"},
    "wire": {"errors", "layout"},
    "ledger": {"errors", "layout", "fds"},
    "device": {"errors", "layout", "_native"},
    "mapping": {"errors", "layout", "fds", "device"},
    "fetch": {"errors"},
    "patches": {"errors"},
    "models": {"errors", "fetch"},
    "build": {"errors", "fetch", "patches"},
    "_native": {"errors", "build", "fetch", "models", "patches"},
}
MAY_IMPORT["decoder"] = MAY_IMPORT["provider"] = {*MAY_IMPORT}
MAY_IMPORT["service"] = {"errors", "fds", "wire", "provider"}
MAY_IMPORT["prefix"] = {*MAY_IMPORT} - {"service"}
MAY_IMPORT["store"] = {"errors", "fds", "wire", "prefix"}
MAY_IMPORT["server"] = {"errors", "layout", "wire"}
MAY_IMPORT["processes"] = {"errors"}
MAY_IMPORT["policy"] = {"errors", "server"}
MAY_IMPORT["engine"] = {*MAY_IMPORT}
MAY_IMPORT["front"] = {*MAY_IMPORT}
MAY_IMPORT["testing"] = MAY_IMPORT["cli"] = {*MAY_IMPORT}
MAY_IMPORT["__main__"] = {"cli"}
MAY_IMPORT[""] = {*MAY_IMPORT} - {"cli", "testing"}


def modules() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def top(path: str) -> str:
    """Return the module of the table that a file belongs to; "" for the package itself."""
    first = Path(path).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def imported(path: str) -> set[str]:
    """Return the modules of kvshare that a file names in imports, "" for the package itself."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            if node.module == "kvshare":
                known = {alias.name for alias in node.names}
                found |= {
                    name if (PACKAGE / f"{name}.py").exists() or (PACKAGE / name).is_dir() else ""
                    for name in known
                }
            elif node.module and node.module.startswith("kvshare."):
                found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {
                (alias.name + ".").split(".")[1]
                for alias in node.names
                if alias.name.split(".")[0] == "kvshare"
            }
    return found


@pytest.mark.parametrize("path", modules())
def test_module_imports_only_what_it_may(path: str) -> None:
    module = top(path)
    assert module in MAY_IMPORT, f"{path} is not in the table of style.md"
    allowed = MAY_IMPORT[module] | {module} | ({""} if module in ("cli", "testing") else set())
    assert imported(path) - allowed == set()


def test_there_is_no_utils() -> None:
    assert not [path for path in modules() if "util" in path]


@pytest.mark.parametrize("statement", ["import kvshare", "import kvshare.cli; kvshare.cli._parser()"])
def test_import_loads_nothing(statement: str) -> None:
    script = f"""
{statement}
import sys
print([name for name in ("llama_cpp", "numpy", "psutil", "rich", "ctypes") if name in sys.modules])
print([line.split()[-1] for line in open("/proc/self/maps") if "llama" in line or "ggml" in line])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "[]"]


def test_public_names_exist() -> None:
    for name in kvshare.__all__:
        assert getattr(kvshare, name).__name__ == name
    assert set(kvshare.__all__) <= set(dir(kvshare))
    assert not hasattr(kvshare, "no_such_name")
