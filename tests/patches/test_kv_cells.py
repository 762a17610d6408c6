"""kv-cells-runs.patch: its `llama_kv_cells` does what the one of the pin does, operation for operation."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshare import patches

SOURCE = Path(__file__).with_suffix("").parent / "kv_cells.cpp"
HEADER = "src/llama-kv-cells.h"

Compile = Callable[[str], Path]


@pytest.fixture(scope="module")
def compiled(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Return what compiles a program that compares a text of the header with the one of the pin."""
    folder = tmp_path_factory.mktemp("kv-cells")

    def compile_with(text: str) -> Path:
        header = folder / f"{abs(hash(text))}.h"
        program = header.with_suffix("")
        if program.exists():
            return program
        header.write_text(text)
        compiler = shutil.which("c++") or shutil.which("g++") or "clang++"
        includes = [f"-I{pristine / each}" for each in ("include", "src", "ggml/include")]
        headers = [f"-DORIGINAL=<{pristine / HEADER}>", f"-DOTHER=<{header}>"]
        command = [compiler, "-std=c++17", "-O1", *includes, *headers, str(SOURCE), "-o", str(program)]
        subprocess.run(command, check=True)
        return program

    return compile_with


@pytest.fixture(scope="module")
def patched(pristine: Path) -> str:
    """The header as the whole series makes it."""
    contents, _ = patches.place(
        patches.load_series(),
        lambda path: (pristine / path).read_bytes() if (pristine / path).exists() else None,
    )
    return (contents[HEADER] or b"").decode()


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_give_the_same(compiled: Compile, patched: str, seed: int) -> None:
    done = subprocess.run(
        [compiled(patched), "check", str(seed), "5000"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "no difference\n")


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("it->n--;\n        } else {", "} else {"),  # the first pair of a run is left out
        ("w_max = std::max(w_max, i/64);", ""),
        ("return i + (at(i).second <= v.second);", "return i + 1;"),
        ("prev->n += n + next->n;", "prev->n += n;"),
    ],
)
def test_a_fault_is_found(compiled: Compile, patched: str, right: str, wrong: str) -> None:
    assert right in patched
    done = subprocess.run(
        [compiled(patched.replace(right, wrong, 1)), "check", "1", "5000"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
