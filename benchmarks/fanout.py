"""One prompt, many processes: fork a frozen prefix, prefill it in each, or restore it from a file.

Worker processes are started, each loads the model, and all are told to begin at one moment. Each makes
a context, gets the prompt into it, and decodes a token behind it:

- `fork`: gets the frozen prefix from a server, and forks it (copy-on-write).
- `prefill`: prefills the prompt itself.
- `restore`: reads a state file that llama.cpp has saved.

    python -m benchmarks.fanout [--workers N ...] [--tokens N] [--repetitions N] [--model GGUF] [--json]

The routes take turns, with fresh processes each time. `first_token_ms` is the median over the workers
of the time from that moment to a worker's first token, `last_ms` that of the slowest; `ready_ms` is the
median until its context holds the prompt. `pss_mib` is the proportional memory of all workers then,
`added_mib` what of it was not there when their models were loaded: the caches, and what contexts need to
compute. What is shared counts once, so the prefix itself is in both. Figures of several repetitions are
their medians. `made` says what the one prefill took, and the memory of the prefix before any fork and
behind all of them: a page that a fork is the first to touch becomes one of the prefix's as well.

Every worker has a continuation of its own, and decodes some tokens of it. `logits_identical` says of
each route whether all workers of all repetitions got, bit for bit, what the one that has prefilled for
itself got; the exit status is 1 if a fork did not.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks import measure
from kvshare import fds, fetch, models
from kvshare._native import loader
from kvshare._native.context import Context, Model
from kvshare.cli import progress
from kvshare.decoder import Decoder
from kvshare.errors import KvshareError
from kvshare.prefix import Prefix, list_prefixes
from kvshare.store import PrefixServer, PrefixStore

ROUTES = ("fork", "prefill", "restore")
OTHERS = ROUTES[1:]
DEFAULT_WORKERS = (1, 2, 4, 8)
DEFAULT_TOKENS = 3000
DEFAULT_REPETITIONS = 3
N_REST = 4  # tokens of each continuation
# sums in attention may depend on the number of threads, and eight workers have no more to spare
N_THREADS = 1
MIB = 1 << 20
FIGURES = ("ready_ms", "first_token_ms", "last_ms", "pss_mib", "added_mib")
NAME = "fanout"

WORDS = (
    "river stone copper window morning station letter garden winter engine harbour silver paper forest"
    " kitchen bridge market candle mountain summer teacher village signal blanket doctor island"
).split()


# -- a process ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a worker process is for.

    Attributes:
        route: one of `ROUTES`, or `make` for the one that makes prefix and file.
        model: GGUF file.
        n_tokens: length of the prompt.
        socket: of the server of prefixes.
        file: the saved state.
        index: which continuation is its own.
    """

    route: str
    model: str
    n_tokens: int
    socket: str
    file: str
    index: int = 0


def prompt_of(model: Model, n_tokens: int) -> list[int]:
    """Return a prompt of exactly so many tokens, the same in each process."""
    text = " ".join(random.Random(1).choices(WORDS, k=n_tokens))  # a word is at least a token
    return model.tokenize(text)[:n_tokens]


def rest_of(model: Model, index: int) -> list[int]:
    """Return the continuation of a worker."""
    rng = random.Random(100 + index)
    return [rng.randrange(model.n_vocab) for _ in range(N_REST)]


def context_of(n_tokens: int) -> dict[str, Any]:
    return {"n_ctx": -(-(n_tokens + N_REST) // 256) * 256, "n_threads": N_THREADS}


def work(job: Job) -> None:
    """Be a worker: say ready, wait for a line, and answer."""
    with Model.open(job.model) as model:
        prompt, rest = prompt_of(model, job.n_tokens), rest_of(model, job.index)
        print("{}", flush=True)
        start = json.loads(sys.stdin.readline())["start"]
        with _context(job, model, prompt) as context:
            context.synchronize()
            ready, first = time.monotonic(), 0.0
            digest = hashlib.sha256()
            for i, token in enumerate(rest):
                context.decode([token], position=len(prompt) + i, logits=True)
                digest.update(context.logits().tobytes())
                first = first or time.monotonic()
            answer = {
                "ready_ms": (ready - start) * 1000,
                "first_token_ms": (first - start) * 1000,
                "logits": digest.hexdigest(),
            }
            print(json.dumps(answer), flush=True)
            sys.stdin.read()  # stay until the memory was measured


@contextlib.contextmanager
def _context(job: Job, model: Model, prompt: Sequence[int]) -> Iterator[Context]:
    if job.route == "fork":
        with Prefix.get(job.socket, NAME) as prefix:
            decoder = prefix.fork(model, n_threads=N_THREADS)
        with decoder:
            yield decoder.context
        return
    with Context.create(model, **context_of(job.n_tokens)) as context:
        if job.route == "prefill":
            context.decode(prompt, position=0)
        else:
            context.restore(job.file)
        yield context


def make(job: Job) -> None:
    """Prefill the prompt once; put the prefix to the server, and write the file."""
    with Model.open(job.model) as model:
        prompt = prompt_of(model, job.n_tokens)
        with Decoder.open(model, **context_of(job.n_tokens)) as decoder:
            start = time.perf_counter()
            decoder.context.decode(prompt, position=0)
            decoder.context.synchronize()
            prefilled = time.perf_counter()
            with Prefix.freeze(decoder, prompt, name=NAME) as prefix:
                frozen = time.perf_counter()
                prefix.put(job.socket)
                nbytes = prefix.nbytes
            file_nbytes = decoder.context.save(job.file, prompt)
    answer = {
        "prefix_mib": nbytes / MIB,
        "file_mib": file_nbytes / MIB,
        "prefill_ms": (prefilled - start) * 1000,
        "freeze_ms": (frozen - prefilled) * 1000,
    }
    print(json.dumps(answer), flush=True)


def start_worker(job: Job) -> measure.Child:
    """Return a process that does a job; the caller ends it."""
    library = {loader.ENVIRONMENT: str(loader.load().path)}
    return measure.Child("benchmarks.fanout", "--job", json.dumps(asdict(job)), environment=library)


def _pss(worker: measure.Child) -> int:
    """Return its proportional memory, bytes."""
    return int(psutil.Process(worker.pid).memory_full_info().pss)


# -- the measurement ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one repetition of one route measured.

    Attributes:
        ready_ms: of each worker, until its context holds the prompt.
        first_token_ms: of each worker.
        pss_mib: proportional memory of all workers after that.
        added_mib: how much more it is than before.
        logits: digest of each worker's logits.
    """

    ready_ms: list[float]
    first_token_ms: list[float]
    pss_mib: float
    added_mib: float
    logits: list[str]


def measure_once(job: Job, n_workers: int) -> Run:
    """Run some workers side by side."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(start_worker(replace(job, index=i))) for i in range(n_workers)]
        for worker in workers:
            worker.answer()
        before = sum(_pss(worker) for worker in workers)
        start = time.monotonic()
        for worker in workers:
            worker.tell(start=start)
        answers = [worker.answer() for worker in workers]
        after = sum(_pss(worker) for worker in workers)
        return Run(
            ready_ms=[answer["ready_ms"] for answer in answers],
            first_token_ms=[answer["first_token_ms"] for answer in answers],
            pss_mib=after / MIB,
            added_mib=(after - before) / MIB,
            logits=[answer["logits"] for answer in answers],
        )


def summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return the medians of each route for one number of workers, and how they compare."""
    report: dict[str, Any] = {}
    for route, each in runs.items():
        report[route] = {
            "ready_ms": _median(statistics.median(run.ready_ms) for run in each),
            "first_token_ms": _median(statistics.median(run.first_token_ms) for run in each),
            "last_ms": _median(max(run.first_token_ms) for run in each),
            "pss_mib": _median(run.pss_mib for run in each),
            "added_mib": _median(run.added_mib for run in each),
            "runs": [
                {name: [round(ms, 3) for ms in getattr(run, name)] for name in ("ready_ms", "first_token_ms")}
                | {name: round(getattr(run, name), 3) for name in ("pss_mib", "added_mib")}
                for run in each
            ],
        }
    fork = report["fork"]
    for route in OTHERS:
        report[f"{route}_to_fork"] = {name: round(report[route][name] / fork[name], 2) for name in FIGURES}
    return report


def identical(runs: Sequence[Mapping[str, Sequence[Run]]]) -> dict[str, bool]:
    """Say of each route whether each worker got what the same one got that prefilled for itself."""
    expected: dict[int, str] = {}
    for of_routes in runs:
        for run in of_routes["prefill"]:
            expected |= {i: digest for i, digest in enumerate(run.logits) if i not in expected}
    return {
        route: all(
            digest == expected[i]
            for of_routes in runs
            for run in of_routes[route]
            for i, digest in enumerate(run.logits)
        )
        for route in ROUTES
    }


def _median(values: Iterator[float]) -> float:
    return round(statistics.median(values), 3)


@contextlib.contextmanager
def _serving(socket: Path) -> Iterator[None]:
    with fds.listening(socket) as listener, PrefixStore() as store:
        server = PrefixServer(listener, store)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield
        finally:
            server.stop()
            thread.join()


def measure_all(
    model: Path,
    n_tokens: int,
    numbers: Sequence[int],
    repetitions: int,
    show: fetch.Progress = fetch.silent,
) -> dict[str, Any]:
    """Run the benchmark; return the report that `--json` prints.

    Args:
        model: GGUF file.
        n_tokens: length of the prompt.
        numbers: of workers.
        repetitions: of each route, for each number.
        show: told about the steps.

    Raises:
        KvshareError: a process failed.
    """
    with fds.private_directory() as folder, _serving(folder / "p.sock"):
        job = Job("make", str(model), n_tokens, str(folder / "p.sock"), str(folder / "state"))
        show("prefilling once, for prefix and file", 0, None)
        with start_worker(job) as maker:
            made = maker.answer()
        runs: dict[int, dict[str, list[Run]]] = {n: {route: [] for route in ROUTES} for n in numbers}
        for n in numbers:
            for i in range(repetitions):
                for route in ROUTES[i % 3 :] + ROUTES[: i % 3]:  # none is always the first
                    show(f"{n} workers, repetition {i + 1} of {repetitions}, {route}", 0, None)
                    runs[n][route].append(measure_once(replace(job, route=route), n))
        made["prefix_mib_at_end"] = list_prefixes(job.socket)[0].nbytes / MIB
    return {
        "model": model.name,
        "n_tokens": n_tokens,
        "repetitions": repetitions,
        "n_cpus": len(os.sched_getaffinity(0)),
        "n_threads": N_THREADS,
        "made": {name: round(value, 3) for name, value in made.items()},
        "workers": {str(n): summary(runs[n]) for n in numbers},
        "logits_identical": identical(list(runs.values())),
    }


def _table(report: dict[str, Any]) -> Table:
    table = Table(title=f"workers on a prefix of {report['n_tokens']:,} tokens, medians")
    columns = ("workers", "route", "ready (ms)", "first token", "slowest", "PSS (MiB)", "of that added")
    for column in columns:
        table.add_column(column, justify="left" if column == "route" else "right")
    for n, measured in report["workers"].items():
        for route in ROUTES:
            each = measured[route]
            table.add_row(
                n if route == ROUTES[0] else "",
                route,
                *(f"{each[name]:,.1f}" for name in FIGURES),
                end_section=route == ROUTES[-1],
            )
    return table


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 0 only if forks have identical logits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fanout", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument("--workers", type=int, nargs="+", default=DEFAULT_WORKERS, metavar="N")
    for name, default in (("tokens", DEFAULT_TOKENS), ("repetitions", DEFAULT_REPETITIONS)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(args.tokens, args.repetitions, *args.workers) < 1:
        parser.error("numbers must be at least 1")
    try:
        if args.job:
            job = Job(**json.loads(args.job))
            (make if job.route == "make" else work)(job)
            return 0
        with progress.shown() as show:
            loader.load()
            model = args.model or models.fetch("smollm2", show)
            report = measure_all(model, args.tokens, args.workers, args.repetitions, show)
    except KvshareError as error:
        return measure.complain("fanout", error)
    same = report["logits_identical"]
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        out = Console()
        out.print(_table(report))
        for n, measured in report["workers"].items():
            compared = [
                f"{route} / fork: {ratio['first_token_ms']:,.1f} in time, {ratio['added_mib']:,.2f} in memory"
                for route in OTHERS
                for ratio in [measured[f"{route}_to_fork"]]
            ]
            out.print(f"{n} workers: {'; '.join(compared)}", highlight=False)
        out.print(f"logits as of a prefill of one's own: {same}", highlight=False)
    return 0 if same["fork"] and same["prefill"] else 1


if __name__ == "__main__":
    sys.exit(main())
