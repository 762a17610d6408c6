"""Which libllama a process gets, and what it is told when that is the wrong one.

Every case runs in a process of its own, because a process cannot get rid of a library again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvshare._native import signatures
from kvshare._native.loader import Library
from tests.native.handoff import ROOT

pytestmark = pytest.mark.native

SYMBOL = b"llama_kv_share_get_abi"


def run(script: str, *, cwd: Path = ROOT, **env: str) -> dict[str, Any]:
    """Run a script in a process that knows of no library but through `env`; return `answer`.

    The script may raise a `KvshareError`: its type, text and hint are in the answer then.
    """
    program = f"""
import json, sys
answer = {{}}
try:
    import kvshare
{"".join(f"    {line}" + chr(10) for line in script.strip().splitlines())}
except kvshare.KvshareError as error:
    answer |= {{"error": type(error).__name__, "message": str(error), "hint": error.hint,
               "exit_code": error.exit_code}}
with open("/proc/self/maps") as maps:
    files = {{line.split()[-1] for line in maps if "/lib" in line}}
answer["libllama"] = sorted(file for file in files if "/libllama.so" in file)
answer["libggml"] = sorted(file for file in files if "/libggml-base.so" in file)
answer["llama_cpp"] = "llama_cpp" in sys.modules
print(json.dumps(answer))
"""
    hidden = {"KVSHARE_LIBRARY", "LLAMA_CPP_LIB_PATH", "KVSHARE_CACHE"}
    clean = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def patched(library: Library) -> Path:
    """The folder of the patched library."""
    return library.path.parent


@pytest.fixture(scope="module")
def make(patched: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Copy the folder of the patched library, and change the copy of libllama."""

    def make(name: str, change: Callable[[bytes], bytes]) -> Path:
        folder = tmp_path_factory.mktemp(name)
        for source in patched.glob("lib*.so*"):
            if source.name.startswith(("libggml", "libllama.so")):
                shutil.copy2(source, folder / source.name, follow_symlinks=False)
        file = (folder / "libllama.so").resolve()
        file.write_bytes(change(file.read_bytes()))
        return folder

    return make


@pytest.fixture(scope="module")
def stock(make: Callable[..., Path]) -> Path:
    """A real libllama that lacks our first symbol, as a stock one does: the name is another one."""

    def rename(content: bytes) -> bytes:
        assert b"\0" + SYMBOL + b"\0" in content
        return content.replace(SYMBOL, b"llama_kv_sharX_get_abi")

    return make("stock", rename)


LOAD = "library = kvshare.load()\nanswer |= {'path': str(library.path), 'found_by': library.found_by}"

# -- with a stock llama_cpp ----------------------------------------------------------------------


def test_a_stock_llama_cpp_was_first(stock: Path, patched: Path) -> None:
    """Also with the patched one named: a process holds one libllama, and it has one already."""
    for named in ("", str(patched)):
        answer = run("import llama_cpp\n" + LOAD, LLAMA_CPP_LIB_PATH=str(stock), KVSHARE_LIBRARY=named)
        assert answer["error"] == "LibraryUnpatchedError"
        assert f"`import llama_cpp` has loaded a stock libllama already: {stock}" in answer["message"]
        assert "before the first `import llama_cpp`" in answer["hint"]
        assert len(answer["libllama"]) == 1  # ours was not loaded beside it
        assert answer["libllama"][0].startswith(str(stock))


def test_a_stock_llama_cpp_goes_on_after_the_refusal(stock: Path, tiny_path: Path) -> None:
    script = f"""
import llama_cpp
try:
    kvshare.load()
except kvshare.LibraryUnpatchedError:
    answer["refused"] = True
llama_cpp.llama_backend_init()
params = llama_cpp.llama_model_default_params()
model = llama_cpp.llama_model_load_from_file({os.fsencode(tiny_path)!r}, params)
answer["model"] = bool(model)
"""
    answer = run(script, LLAMA_CPP_LIB_PATH=str(stock))
    assert (answer["refused"], answer["model"]) == (True, True)


def test_kvshare_was_first(stock: Path, patched: Path) -> None:
    """Then `import llama_cpp` gets the same handle, whatever its own variable says."""
    script = f"""{LOAD}
import llama_cpp
from llama_cpp import llama_cpp as bindings
answer["same"] = bindings._lib is library.lib and library.llama is bindings
answer["variable"] = __import__("os").environ["LLAMA_CPP_LIB_PATH"]
"""
    answer = run(script, KVSHARE_LIBRARY=str(patched), LLAMA_CPP_LIB_PATH=str(stock))
    assert answer["same"]
    assert answer["variable"] == str(stock)
    assert len(answer["libllama"]) == 1
    assert answer["libllama"][0].startswith(str(patched))
    assert len(answer["libggml"]) == 1


def test_llama_cpp_was_first_with_the_patched_library(patched: Path, tiny_path: Path) -> None:
    """A host program that sets the variable itself; nothing else has to be said."""
    script = f"""
import llama_cpp
{LOAD}
with kvshare.Model.open({str(tiny_path)!r}) as model, kvshare.Decoder.open(model, n_ctx=512) as decoder:
    with decoder.share(n_tokens=1) as share:
        answer["live"] = share.state.live
"""
    answer = run(script, LLAMA_CPP_LIB_PATH=str(patched))
    assert (answer["found_by"], answer["live"]) == ("llama_cpp", True)
    assert len(answer["libllama"]) == 1


def test_two_patched_libraries(patched: Path, make: Callable[..., Path]) -> None:
    """Another patched library than the one that is loaded is no reason to load a second."""
    other = make("copy", lambda content: content)
    answer = run("import llama_cpp\n" + LOAD, LLAMA_CPP_LIB_PATH=str(patched), KVSHARE_LIBRARY=str(other))
    assert answer["error"] == "LibraryError"
    assert str(patched) in answer["message"]
    assert str(other) in answer["message"]
    answer = run(f"kvshare.load({str(patched)!r})\nkvshare.load({str(other)!r})")
    assert answer["error"] == "LibraryError"
    assert "this process uses" in answer["message"]
    assert len(answer["libllama"]) == 1


# -- where it is looked for ----------------------------------------------------------------------


def test_the_order(patched: Path, stock: Path, make: Callable[..., Path], tmp_path: Path) -> None:
    """Argument, environment, cached build."""
    argument = make("argument", lambda content: content)
    script = f"library = kvshare.load({str(argument / 'libllama.so')!r})"
    script += "\nanswer |= {'path': str(library.path), 'found_by': library.found_by}"
    answer = run(script, KVSHARE_LIBRARY=str(patched), KVSHARE_CACHE=str(tmp_path))
    assert answer["found_by"] == "argument"
    assert Path(answer["path"]).parent == argument

    answer = run(LOAD, KVSHARE_LIBRARY=str(patched), KVSHARE_CACHE=str(tmp_path))
    assert answer["found_by"] == "environment"
    assert Path(answer["path"]).parent == patched

    cached = f"""
from kvshare import build
from kvshare._native import loader
from pathlib import Path
class Found:
    lib_dir = Path({str(argument)!r})
build.find_build = lambda: Found
{LOAD}
"""
    answer = run(cached, KVSHARE_CACHE=str(tmp_path))
    assert answer["found_by"] == "build"
    assert Path(answer["path"]).parent == argument
    # a wrong variable is an error, not a reason to look further
    answer = run(cached, KVSHARE_LIBRARY=str(stock), KVSHARE_CACHE=str(tmp_path))
    assert answer["error"] == "LibraryUnpatchedError"


def test_no_library_at_all(tmp_path: Path) -> None:
    answer = run(LOAD, KVSHARE_CACHE=str(tmp_path))
    assert answer["error"] == "LibraryNotFoundError"
    assert "kvshare build" in answer["hint"]
    assert answer["libllama"] == []
    assert not answer["llama_cpp"]


def test_import_loads_nothing(patched: Path) -> None:
    answer = run("answer['names'] = len(kvshare.__all__)", KVSHARE_LIBRARY=str(patched))
    assert answer["names"] > 10
    assert (answer["libllama"], answer["libggml"], answer["llama_cpp"]) == ([], [], False)


# -- a wrong one -------------------------------------------------------------------------------


def text_file(folder: Path, _make: Callable[..., Path]) -> Path:
    (folder / "libllama.so").write_text("this is no library\n")
    return folder


def empty_file(folder: Path, _make: Callable[..., Path]) -> Path:
    (folder / "libllama.so").touch()
    return folder


def header_only(_folder: Path, make: Callable[..., Path]) -> Path:
    return make("header", lambda content: content[:64] + b"\0" + SYMBOL + b"\0")


def unpatched(_folder: Path, make: Callable[..., Path]) -> Path:
    return make("unpatched", lambda content: content.replace(SYMBOL, b"llama_kv_sharX_get_abi"))


def other_series(_folder: Path, make: Callable[..., Path]) -> Path:
    from kvshare import patches

    series = patches.series_id().encode()

    def change(content: bytes) -> bytes:
        assert series in content
        return content.replace(series, series[::-1])

    return make("series", change)


WRONG: list[tuple[Callable[[Path, Callable[..., Path]], Path], str, str]] = [
    (lambda folder, make: folder / "nowhere", "LibraryNotFoundError", "no libllama at"),
    (lambda folder, make: folder, "LibraryNotFoundError", "no libllama at"),
    (text_file, "LibraryError", "is not a shared library"),
    (empty_file, "LibraryError", "is not a shared library"),
    (header_only, "LibraryError", "is truncated"),
    (unpatched, "LibraryUnpatchedError", "does not carry the kvshare patch series"),
    (other_series, "AbiMismatchError", "carries patch series"),
]


@pytest.mark.parametrize("by", ["argument", "environment"])
@pytest.mark.parametrize(
    ("prepare", "error", "message"),
    WRONG,
    ids=["no folder", "empty folder", "text", "empty file", "header only", "unpatched", "other series"],
)
def test_a_wrong_library(
    tmp_path: Path,
    make: Callable[..., Path],
    prepare: Callable[[Path, Callable[..., Path]], Path],
    error: str,
    message: str,
    by: str,
) -> None:
    folder = prepare(tmp_path, make)
    if by == "argument":
        answer = run(f"kvshare.load({str(folder)!r})")
    else:
        answer = run(LOAD, KVSHARE_LIBRARY=str(folder))
    assert answer["error"] == error
    assert message in answer["message"]
    assert str(folder) in answer["message"]
    assert "\n" not in answer["message"]
    assert answer["hint"]
    assert answer["exit_code"] == 10


@pytest.mark.parametrize("missing", [1, 1000, 0.5])
def test_a_truncated_library(make: Callable[..., Path], missing: float) -> None:
    """dlopen would end the process with a SIGBUS."""

    def cut(content: bytes) -> bytes:
        n = int(len(content) * missing) if missing < 1 else int(missing)
        return content[: len(content) - n]

    folder = make("truncated", cut)
    answer = run(LOAD, KVSHARE_LIBRARY=str(folder))
    assert answer["error"] == "LibraryError"
    assert f"{folder / 'libllama.so'} is truncated" in answer["message"]
    assert answer["libllama"] == []


@pytest.mark.parametrize("struct", ["Abi", "ContextParams", "Region", "Range", "Adopted", "Issued"])
def test_another_abi(patched: Path, struct: str) -> None:
    """This package with a struct of another size: the probe tells before the first real call."""
    script = f"""
import ctypes
from kvshare._native import signatures
class {struct}(ctypes.Structure):
    _fields_ = [*signatures.{struct}._fields_, ("more", ctypes.c_uint64)]
signatures.{struct} = {struct}
{LOAD}
"""
    answer = run(script, KVSHARE_LIBRARY=str(patched))
    assert answer["error"] == "AbiMismatchError"
    assert "sizeof_" in answer["message"]
    answer = run(
        f"from kvshare._native import signatures\nsignatures.ABI = 99\n{LOAD}", KVSHARE_LIBRARY=str(patched)
    )
    assert answer["error"] == "AbiMismatchError"
    assert f"abi is {signatures.ABI}, this kvshare needs 99" in answer["message"]
    assert str(patched) in answer["message"]


def test_another_upstream(patched: Path) -> None:
    script = f"""
import dataclasses
from kvshare import patches
found = patches.pin()
patches.pin = lambda: dataclasses.replace(found, commit="0" * 40)
{LOAD}
"""
    answer = run(script, KVSHARE_LIBRARY=str(patched))
    assert answer["error"] == "AbiMismatchError"
    assert "this kvshare needs 000000000000" in answer["message"]


def test_another_version_of_the_bindings(patched: Path) -> None:
    """llama.h's own structs are compared as well, before one of them crosses."""
    script = f"""
import os
os.environ["LLAMA_CPP_LIB_PATH"] = {str(patched)!r}
import ctypes, llama_cpp.llama_cpp as bindings
class Batch(ctypes.Structure):
    _fields_ = [*bindings.llama_batch._fields_, ("more", ctypes.c_uint64)]
bindings.llama_batch = Batch
{LOAD}
"""
    answer = run(script)
    assert answer["error"] == "AbiMismatchError"
    assert "sizeof_batch" in answer["message"]


def test_the_log_of_llama_cpp(patched: Path, tiny_path: Path, tmp_path: Path) -> None:
    """It goes through `logging` with llama.cpp's own levels, and nowhere else."""
    script = f"""
import logging
records = []
class Keep(logging.Handler):
    def emit(self, record):
        records.append((record.levelname, record.getMessage()))
logger = logging.getLogger("kvshare.llama")
logger.addHandler(Keep())
logger.setLevel(logging.DEBUG)
with kvshare.Model.open({str(tiny_path)!r}) as model, kvshare.Context.create(model, n_ctx=512):
    pass
answer["levels"] = sorted({{level for level, _ in records}})
answer["warnings"] = [text for level, text in records if level == "WARNING"]
answer["infos"] = [text for level, text in records if level == "INFO"]
answer["lines"] = all(text and not text.endswith(chr(10)) for _, text in records)
"""
    answer = run(script, KVSHARE_LIBRARY=str(patched))
    assert answer["lines"]
    assert "ERROR" not in answer["levels"]
    assert any("possible training context overflow" in text for text in answer["warnings"])
    assert any("constructing llama_context" in text for text in answer["infos"])
    assert len(answer["warnings"]) < len(answer["infos"])
