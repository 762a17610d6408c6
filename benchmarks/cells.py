"""What the operations of `llama_kv_cells` cost, as the pin has them and as the series makes them.

    python -m benchmarks.cells [--repetitions N] [--json]

Both versions of the class are compiled into one program (tests/patches/kv_cells.cpp), which does the same
with them in turn, 20,480 cells and 12,722 tokens, alone and among 4 sequences whose cells alternate.
Figures are nanoseconds an operation, medians of the repetitions; `ratio` is pin / series, so that more
than 1 is a gain. The tests show with the same program that the results are equal.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from kvshare import build, patches
from kvshare.cli import progress
from kvshare.errors import BuildError, KvshareError
from kvshare.fetch import Progress

PROGRAM = Path(__file__).parent.parent / "tests" / "patches" / "kv_cells.cpp"
HEADER = "src/llama-kv-cells.h"
INCLUDES = ("include", "src", "ggml/include")
DEFAULT_REPETITIONS = 21


def measure_all(repetitions: int, show: Progress) -> list[dict[str, Any]]:
    """Return `{"operation", "pin_ns", "series_ns", "ratio"}` of each operation.

    Raises:
        BuildError: there is no compiler, or it refuses.
    """
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError("no C++ compiler", hint="install g++")
    with tempfile.TemporaryDirectory(prefix="kvshare-cells-") as scratch:
        pin = Path(scratch) / "pin"
        show("unpacking llama.cpp", 0, None)
        build.unpack_tree(build.fetch_sdist(show), pin)
        series = shutil.copytree(pin / "src", Path(scratch) / "series") / Path(HEADER).name
        contents, _ = patches.place(
            patches.load_series(), lambda path: (pin / path).read_bytes() if (pin / path).exists() else None
        )
        series.write_bytes(contents[HEADER] or b"")
        program = Path(scratch) / "kv_cells"
        show("compiling", 0, None)
        command = [compiler, "-std=c++17", "-O3", "-DNDEBUG", *(f"-I{pin / each}" for each in INCLUDES)]
        command += [f"-DORIGINAL=<{pin / HEADER}>", f"-DOTHER=<{series}>", str(PROGRAM), "-o", str(program)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BuildError(f"{PROGRAM.name} does not compile: {done.stderr[-500:]}")
        show("measuring", 0, None)
        said = subprocess.run(
            [program, "bench", str(repetitions)], capture_output=True, text=True, check=True
        ).stdout
    rows = []
    for line in said.splitlines():
        name, before, after = line.split("\t")
        ratio = round(float(before) / float(after), 2)
        rows.append({"operation": name, "pin_ns": float(before), "series_ns": float(after), "ratio": ratio})
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cells", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--repetitions", type=int, default=DEFAULT_REPETITIONS, metavar="N", help="default: %(default)s"
    )
    args = parser.parse_args(argv)
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    try:
        with progress.shown() as show:
            rows = measure_all(args.repetitions, show)
    except KvshareError as error:
        return measure.complain("cells", error)
    if args.json:
        print(json.dumps({"repetitions": args.repetitions, "operations": rows}, indent=1))
        return 0
    table = Table(title=f"llama_kv_cells, ns an operation, medians of {args.repetitions}")
    table.add_column("operation")
    for column in ("pin", "series", "pin / series"):
        table.add_column(column, justify="right")
    for row in rows:
        costs = (f"{row[name]:,.1f}" for name in ("pin_ns", "series_ns"))
        table.add_row(row["operation"], *costs, f"{row['ratio']:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
