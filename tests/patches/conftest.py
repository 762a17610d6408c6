"""A small tree that looks like llama.cpp, and a series of two patches for it."""

from __future__ import annotations

import difflib
import os
import subprocess
from pathlib import Path

import pytest

from kvshare import patches
from kvshare.build import unpack_tree
from kvshare.fetch import cache_dir

NUMBERED = "".join(f"line {n};\n" for n in range(1, 81))
BASE = {
    "include/llama.h": "// the public header\n",
    "ggml/CMakeLists.txt": "project(ggml)\n",
    "src/cache.cpp": NUMBERED,
    "src/memory.cpp": NUMBERED.replace("line", "row") + "no newline at the end",
    "src/untouched.cpp": "int untouched;\n",
}
FIRST = BASE | {
    "src/cache.cpp": NUMBERED.replace("line 10;\n", "line 10;\nhook one;\n").replace(
        "line 70;\n", "line 70;\nhook two;\n"
    ),
    "include/share.h": '#define LLAMA_KV_SHARE_SERIES "' + "0" * 64 + '"\nvoid share(void);\n',
    "src/share/share.cpp": "void share(void) {}",
}
SECOND = FIRST | {
    "src/cache.cpp": FIRST["src/cache.cpp"].replace("hook one;\n", "hook one;\nhook three;\n"),
    "src/memory.cpp": BASE["src/memory.cpp"].replace("no newline at the end", "still no newline"),
}


def diff(before: dict[str, str], after: dict[str, str]) -> str:
    """Write a diff in git's format, without blob ids."""
    text = ""
    for path in after:
        if before.get(path) == after[path]:
            continue
        text += f"diff --git a/{path} b/{path}\n"
        source = f"a/{path}" if path in before else "/dev/null"
        if path not in before:
            text += "new file mode 100644\n"
        old = before.get(path, "").splitlines(keepends=True)
        for line in difflib.unified_diff(old, after[path].splitlines(keepends=True), source, f"b/{path}"):
            text += line if line.endswith("\n") else line + "\n\\ No newline at end of file\n"
    return text


def make_series(*steps: dict[str, str]) -> patches.Series:
    """Return a series whose n-th patch goes from the n-th to the next state."""
    texts = [
        f"Subject: test : patch {n}\n\n{diff(steps[n], steps[n + 1])}".encode() for n in range(len(steps) - 1)
    ]
    return patches.Series(tuple(patches.parse_patch(f"p{n}.patch", text) for n, text in enumerate(texts)))


def write_tree(root: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content.encode())


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    """Return mode and content of every file, and mode of every folder, but for git's own."""
    return {
        str(path.relative_to(root)): (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(root.rglob("*"))
        if ".git" not in path.relative_to(root).parts
    }


@pytest.fixture
def series() -> patches.Series:
    return make_series(BASE, FIRST, SECOND)


@pytest.fixture
def plain_tree(tmp_path: Path) -> Path:
    """The base tree; `src/cache.cpp` has a mode of its own."""
    root = tmp_path / "llama.cpp"
    write_tree(root, BASE)
    (root / "src/cache.cpp").chmod(0o755)
    return root


@pytest.fixture
def git_tree(plain_tree: Path) -> Path:
    """The same as a git checkout."""
    git = ["git", "-C", str(plain_tree), "-c", "user.name=t", "-c", "user.email=t@localhost"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "base"]):
        subprocess.run([*git, *command], check=True)
    return plain_tree


@pytest.fixture(params=["plain_tree", "git_tree"])
def tree(request: pytest.FixtureRequest) -> Path:
    root: Path = request.getfixturevalue(request.param)
    return root


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree of the pin."""
    pin = patches.pin()
    archive = cache_dir() / "sdist" / f"{pin.package.replace('-', '_')}-{pin.version}.tar.gz"
    if not archive.is_file():
        reason = f"no {archive}; `kvshare build` fetches it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    tree = tmp_path_factory.mktemp("pinned") / "llama.cpp"
    unpack_tree(archive, tree)
    return tree
