"""Run the benchmarks one after the other, and write one report: Markdown and JSON.

    python -m benchmarks.all [--json] [--plot DIR] [--out DIR] [--quick] [--only NAME ...]

DIR/report.json has `machine` (CPU, cores, memory, kernel, load when it began), `versions`, `commit` of the
checkout (null if it is none, and `-dirty` if it was changed), `date`, and of each benchmark its `command`,
`repetitions`, `status` (`ok` or `failed`), `seconds`, `error`, and `report`: the JSON that it printed.
`targets` says what was to be reached and what was; `met` is null where that was not measured in full.
DIR/report.md says the same for people, with pictures if matplotlib is there: in DIR, or where `--plot` says.
Both are written anew after each benchmark. `--json` prints what report.json has.

All of it takes an hour and a quarter on two cores. `--quick` takes few repetitions and short prompts: it
shows that the benchmarks work, and its figures mean little. The exit status is 1 if a benchmark failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

import kvshare
from benchmarks import stall
from benchmarks.handoff import IN_PROCESS, ROUTES, SERVER, TITLES
from kvshare import patches
from kvshare._native import loader

ROOT = Path(__file__).parent.parent
DEFAULT_OUT = Path("benchmark-report")
NOISE = "Machines are shared and noisy: read the ratios, which compare what ran in turn in one run."

Report = Mapping[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """What is run.

    Attributes:
        name: in the report.
        options: for a whole run.
        quick: for trying it out.
        module: of this folder; empty if it is the name.
        plots: it takes `--plot`.
    """

    name: str
    options: str = ""
    quick: str = ""
    module: str = ""
    plots: bool = False

    def command(self, quick: bool, pictures: Path | None) -> list[str]:
        """Return the arguments of Python."""
        command = ["-m", f"benchmarks.{self.module or self.name}", "--json"]
        command += (self.quick if quick else self.options).split()
        if self.plots and pictures is not None:
            command += ["--plot", str(pictures)]
        return command


BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark("cells", quick="--repetitions 3"),
        Benchmark("handoff", quick="--tokens 251 --repetitions 2", plots=True),
        Benchmark("scaling", quick="--repetitions 2", plots=True),
        Benchmark("memory", quick="--tokens 100 --providers 1", plots=True),
        Benchmark("architectures", quick="--arch ^(llama|gemma3|mamba2)-dense$ --case short", plots=True),
        Benchmark("first_token", quick="--tokens 64 --repetitions 1", plots=True),
        Benchmark("stall", "--streams 1 2 4", "--tokens 600 --repetitions 1", plots=True),
        Benchmark(
            "stall_lengths",
            "--tokens 1000 2000 4000 8000 --repetitions 1",
            "--tokens 600 800 --repetitions 1",
            module="stall",
            plots=True,
        ),
        Benchmark(
            "conversation", "--repetitions 1", quick="--turns 2 --tokens 128 --repetitions 1 --model smollm2"
        ),
        Benchmark("fanout", "--repetitions 2", quick="--workers 1 2 --tokens 200 --repetitions 1"),
    )
}


# -- targets -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """What is to be reached.

    Attributes:
        figure: what it is about.
        target: what it should be.
        benchmark: that measures it.
        reached: takes the report of that; returns what was reached, and whether it is enough, or None if
            that was not measured in full.
    """

    figure: str
    target: str
    benchmark: str
    reached: Callable[[Report], tuple[str, bool | None]]


LONGEST = 12_722  # of the prompts that targets are about, tokens
N_STALL = 3300
N_ARCHITECTURES = 124


def _verdict(ok: bool, complete: bool) -> bool | None:
    """Say that a target was met only if all of it was measured."""
    return ok and (True if complete else None)


def _has_longest(runs: Sequence[Report]) -> bool:
    return any(run["n_tokens"] == LONGEST for run in runs)


def _runs(report: Report, route: str) -> list[Report]:
    return [run for run in report["runs"] if run["route"] == route]


def _n_tokens(run: Report) -> int:
    return int(run["n_tokens"])


def _at(runs: Sequence[Report], text: Callable[[Report], str]) -> str:
    return ", ".join(f"{text(run)} at {run['n_tokens']:,} tokens" for run in runs)


def _handoff(route: str, limit_ms: float) -> Callable[[Report], tuple[str, bool | None]]:
    def reached(report: Report) -> tuple[str, bool | None]:
        runs = _runs(report, route)
        text = _at(runs, lambda run: f"{run['handoff_us'] / 1000:.3f} ms")
        if len(runs) > 1:
            longest, shortest = (max(runs, key=_n_tokens), min(runs, key=_n_tokens))
            text += f"; longest / shortest {longest['handoff_us'] / shortest['handoff_us']:.2f}"
        ok = all(run["handoff_us"] <= limit_ms * 1000 for run in runs)
        return text, _verdict(ok, _has_longest(runs))

    return reached


def _file(report: Report) -> tuple[str, bool | None]:
    runs = [run for run in _runs(report, IN_PROCESS) if run["ratio_vs_file_memory"]]
    found = [run["ratio_vs_file_memory"] >= 1000 for run in runs if run["n_tokens"] == LONGEST]
    return _at(runs, lambda run: f"{run['ratio_vs_file_memory']:,.0f} times"), found[0] if found else None


def _first_decode(report: Report) -> tuple[str, bool | None]:
    texts = []
    for route in ROUTES:
        runs = _runs(report, route)
        cells = _at(
            runs, lambda run: f"{run['ratio_first_token']:.2f} (cold {run['cold']['ratio_first_token']:.2f})"
        )
        texts += [f"{TITLES[route]} {cells}"] if runs else []
    ok = all(run["ratio_first_token"] <= 1.05 for run in report["runs"])
    return "; ".join(texts), _verdict(ok, _has_longest(report["runs"]))


def _two_processes(report: Report) -> tuple[str, bool | None]:
    runs = report["runs"]
    text = _at(runs, lambda run: f"{run['warm']['ratio_one']:.3f} (cold {run['cold']['ratio_one']:.3f})")
    return text, all(run["warm"]["ratio_one"] <= 1.02 for run in runs)


def _context(report: Report) -> tuple[str, bool | None]:
    runs = report["runs"]
    ratios = [run["context"][name] for run in runs for name in ("ratio_prefill", "ratio_token")]
    text = _at(
        runs,
        lambda run: (
            f"prefill {run['context']['ratio_prefill']:.3f}, token {run['context']['ratio_token']:.3f}"
        ),
    )
    return text, max(ratios) <= 1.01


def _stall(report: Report) -> tuple[str, bool | None]:
    text = "; ".join(
        f"{point['kvshare']['spread']['max_gap_ms'][1]:,.0f} ms (stock {point['stock']['max_gap_ms']:,.0f})"
        f" at {point['n_tokens']:,} tokens, {stall.plural(point['n_streams'])}"
        for point in report["points"]
    )
    found = [
        point["kvshare"]["spread"]["max_gap_ms"][1] <= 60
        for point in report["points"]
        if (point["n_tokens"], point["n_streams"]) == (N_STALL, 1)
    ]
    return text, found[0] if found else None


def _memory(report: Report) -> tuple[str, bool | None]:
    shared = report["shared"]
    text = ", ".join(
        f"{each['ratio_pss']:.3f} with {n} provider{'s'[: n != '1']}" for n, each in shared.items()
    )
    return text, shared["1"]["ratio_pss"] <= 1.15 if "1" in shared else None


def _architectures(report: Report) -> tuple[str, bool | None]:
    n = min(report[name] for name in ("served", "bit_identical", "zero_moved"))
    of = report["total"] - report["without_memory"]
    return f"{n} of {of}", _verdict(n == of, of >= N_ARCHITECTURES)


TARGETS = (
    Target("share and adopt in process", "<= 0.15 ms, flat in tokens", "handoff", _handoff(IN_PROCESS, 0.15)),
    Target("share and adopt through llama-server", "<= 1 ms", "handoff", _handoff(SERVER, 1)),
    Target(
        "against the restore of a file in memory", f">= 1,000 times at {LONGEST:,} tokens", "handoff", _file
    ),
    Target("first token after adoption / steady token", "<= 1.05", "handoff", _first_decode),
    Target(
        "time to first token, two processes / (one process + the handoff)",
        "<= 1.02",
        "first_token",
        _two_processes,
    ),
    Target("a context that can be shared / a private one", "<= 1.01", "first_token", _context),
    Target(
        "worst stall of a running stream while a prompt is prefilled",
        f"<= 60 ms at {N_STALL:,} tokens",
        "stall",
        _stall,
    ),
    Target("proportional memory of both processes / one process", "<= 1.15", "memory", _memory),
    Target(
        "architectures served bit-identically with zero bytes moved",
        f"{N_ARCHITECTURES} of {N_ARCHITECTURES}",
        "architectures",
        _architectures,
    ),
)


def targets(results: Mapping[str, Result]) -> list[dict[str, Any]]:
    """Return of each target what was reached, as far as its benchmark has run."""
    rows = []
    for target in TARGETS:
        result = results.get(target.benchmark)
        met: bool | None = None
        if result is None:
            reached = f"{target.benchmark} did not run"
        elif result.report is None:
            reached = f"{target.benchmark} failed"
        else:
            reached, met = target.reached(result.report)
        rows.append(
            {
                "figure": target.figure,
                "target": target.target,
                "benchmark": target.benchmark,
                "reached": reached or f"{target.benchmark} did not measure it",
                "met": met,
            }
        )
    return rows


# -- running -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """What came of a benchmark; the attributes are those of the report."""

    command: str
    repetitions: int
    status: str
    seconds: float
    error: str | None
    report: Any


def run(command: Sequence[str]) -> Result:
    """Run a benchmark; what it says on stderr goes there."""
    start = time.monotonic()
    last = ""
    with tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(
            [sys.executable, *command], stdout=output, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                # a hint follows what went wrong
                if line.strip() and not line.startswith("hint: "):
                    last = line.strip()
        output.seek(0)
        printed = output.read()
    try:
        report = json.loads(printed)
    except ValueError:
        report = None
    ok = process.returncode == 0 and report is not None
    return Result(
        command=" ".join(["python", *command]),
        repetitions=report.get("repetitions", 1) if report else 0,
        status="ok" if ok else "failed",
        seconds=round(time.monotonic() - start, 1),
        error=None if ok else last or f"exit status {process.returncode}",
        report=report,
    )


# -- where it ran ------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "cpu": _cpu_model(),
        "n_cpus": len(os.sched_getaffinity(0)),
        "n_cores": psutil.cpu_count(logical=False),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()  # not every architecture says it


def versions() -> dict[str, Any]:
    """Return the versions of what is measured."""
    return {
        "kvshare": kvshare.__version__,
        "llama-cpp-python": loader.bindings_version(),
        "patch_series": patches.series_id(),
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Return the commit of the checkout, or None if this is none."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# -- the report --------------------------------------------------------------------------------


def markdown(report: Report, pictures: Mapping[str, Sequence[str]]) -> str:
    """Return the report for people.

    Args:
        report: as in the JSON.
        pictures: files, by the name of their benchmark.
    """
    machine, versions = report["machine"], report["versions"]
    lines = [
        "# Benchmarks of kvshare",
        "",
        f"- {report['date']}{', a quick run: its figures mean little' if report['quick'] else ''}",
        f"- {machine['cpu']}, {machine['n_cores']} cores, {machine['n_cpus']} CPUs usable,"
        f" {machine['memory_gib']} GiB, {machine['kernel']}; load {machine['load']} when it began",
        f"- kvshare {versions['kvshare']}, llama-cpp-python {versions['llama-cpp-python']},"
        f" patch series {versions['patch_series'][:12]}, Python {versions['python']}",
        f"- commit {report['commit'] or 'unknown: no checkout'}",
        "",
        NOISE,
        "",
        "## Targets",
        "",
        "| figure | target | reached | met |",
        "|---|---|---|---|",
    ]
    words = {True: "yes", False: "no", None: "open"}
    for row in report["targets"]:
        cells = (row["figure"], row["target"], row["reached"], words[row["met"]])
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Runs", "", "| benchmark | repetitions | seconds | status |", "|---|---|---|---|"]
    for name, result in report["benchmarks"].items():
        status = result["status"]
        if result["error"]:
            status += ": " + result["error"].replace("|", "\\|")
        lines.append(f"| {name} | {result['repetitions'] or ''} | {result['seconds']:,.0f} | {status} |")
    for name, result in report["benchmarks"].items():
        lines += ["", f"## {name}", "", f"    {result['command']}"]
        for picture in pictures.get(name, ()):
            lines += ["", f"![{picture}]({picture})"]
        if result["report"] is not None:
            lines += ["", "<details><summary>all figures</summary>", "", "```json"]
            lines += [json.dumps(result["report"], indent=1), "```", "", "</details>"]
    return "\n".join(lines) + "\n"


def write(out: Path, report: Report, pictures: Mapping[str, Sequence[str]]) -> None:
    """Write both files."""
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "report.md").write_text(markdown(report, pictures))


def main(argv: list[str] | None = None) -> int:
    """Run the benchmarks; exit status 0 only if none failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.all", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="DIR",
        help="for the pictures, needs matplotlib (default: that of the report)",
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="for the report (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="few repetitions, short prompts")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=BENCHMARKS,
        default=list(BENCHMARKS),
        metavar="NAME",
        help=f"some of {', '.join(BENCHMARKS)}",
    )
    args = parser.parse_args(argv)
    out: Path = args.out
    plots = importlib.util.find_spec("matplotlib") is not None
    if args.plot and not plots:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    out.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": machine(),
        "versions": versions(),
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": args.quick,
    }
    chosen = [each for name, each in BENCHMARKS.items() if name in args.only]
    results: dict[str, Result] = {}
    pictures: dict[str, list[str]] = {}
    for i, each in enumerate(chosen, start=1):
        print(f"[{i}/{len(chosen)}] {each.name}", file=sys.stderr, flush=True)
        folder = (args.plot or out) / each.name  # of its pictures
        results[each.name] = result = run(each.command(args.quick, folder if plots else None))
        if result.status == "ok":
            pictures[each.name] = sorted(os.path.relpath(path, out) for path in folder.glob("*.png"))
        ended = f"{result.status}, {result.seconds:,.0f} s"
        print(f"[{i}/{len(chosen)}] {each.name}: {ended}", file=sys.stderr, flush=True)
        found = {name: asdict(result) for name, result in results.items()}
        report = {**about, "targets": targets(results), "benchmarks": found}
        write(out, report, pictures)
    if args.json:
        print(json.dumps(report, indent=1))
    print(out / "report.md", file=sys.stderr if args.json else sys.stdout)
    return 0 if all(result.status == "ok" for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
