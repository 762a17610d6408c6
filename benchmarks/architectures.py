"""Share, prefill and adopt on every architecture that llama.cpp supports.

llama.cpp's own `test-llama-archs` writes one tiny model per architecture. On each of them, and in
each case below, a decoder shares its cache, a second context on the same memory prefills a prompt,
the decoder adopts it and goes on; a third context of its own does the same locally. The logits of
both must be equal bit for bit, and no byte may move.

The cases `turns...` are conversations: three times a provider prefills what is new behind what the
decoder's sequence holds, and the decoder answers. The cases `forks...` freeze what a sequence holds;
four contexts on private mappings of it go on in turn, each with tokens of its own.

    python -m benchmarks.architectures [--json] [--plot DIR] [--arch REGEX] [--case NAME ...]
                                       [--n-gpu-layers N]

With `--n-gpu-layers` models and caches are on a GPU. A fork needs memory of the host: it is not among the
cases then.

It prints how many architectures were `served`, `bit_identical` and `zero_moved` in all their cases of
one handoff, and in how many all conversations and all forks were: `turns_identical`, `forks_identical`.
`times` has of each that was served what a share (`share_us`, without sending it) and an adoption
(`adopt_us`) took: medians over its cases of one handoff, each of them once, beside other work of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import measure
from kvshare._native import loader
from kvshare._native.context import Context, Model
from kvshare.decoder import Decoder
from kvshare.errors import KvshareError, NativeError
from kvshare.prefix import Prefix
from kvshare.provider import Offer, Provider, WarmProvider
from kvshare.testing import architectures

N_SHORT = 36
N_LONG = 216  # past every window of these models
N_TURNS = (180, 20, 40)  # past the windows as well; with the answers no more than these models' 256
N_DECODE = 3
N_FORKS = 4
N_SLOWEST = 10  # in the table
TIMEOUT_S = 240.0

HANDOFF, TURNS, FORKS = "handoff", "turns", "forks"


@dataclass(frozen=True)
class Case:
    """One way to share.

    Attributes:
        name: for the command line and the report.
        n_tokens: length of the prompt.
        context: parameters of all three contexts.
        seq_id: sequence that is shared.
        n_other: tokens that sequence 0 holds before, if it is another one.
        may_refuse: upstream refuses these parameters for some models; not a failure.
        kind: one handoff, turns of a conversation, or forks of what a sequence holds.
    """

    name: str
    n_tokens: int
    context: dict[str, Any]
    seq_id: int = 0
    n_other: int = 0
    may_refuse: bool = False
    kind: str = HANDOFF


_LONG = {"n_ubatch": 32}
_LONG_NO_FA = {"n_ubatch": 32, "flash_attn": "off"}
_FOUR = {"n_ubatch": 32, "n_seq_max": 4}
_FOUR_UNIFIED = {"n_ubatch": 32, "n_seq_max": 4, "kv_unified": True}

CASES = (
    Case("short", N_SHORT, {}),
    Case("short-no-fa", N_SHORT, {"flash_attn": "off"}),
    Case("long", N_LONG, _LONG),
    Case("long-no-fa", N_LONG, _LONG_NO_FA),
    Case("q8_0", N_SHORT, {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}, may_refuse=True),
    Case("seq-2-of-4", N_LONG, _FOUR, seq_id=2, n_other=20),
    Case("seq-2-of-4-unified", N_LONG, _FOUR_UNIFIED, seq_id=2, n_other=20),
    Case("turns-short", N_SHORT, {}, kind=TURNS),
    Case("turns", N_TURNS[0], _LONG, kind=TURNS),
    Case("turns-no-fa", N_TURNS[0], _LONG_NO_FA, kind=TURNS),
    Case("turns-seq-2-of-4", N_TURNS[0], _FOUR, seq_id=2, n_other=20, kind=TURNS),
    # alone in its cache: glm5-next numbers the blocks of its indexer over all sequences, and a provider
    # knows no other one, so that sums run in another order
    Case("turns-seq-2-of-4-unified", N_TURNS[0], _FOUR_UNIFIED, seq_id=2, kind=TURNS),
    Case("forks", N_LONG, _LONG, kind=FORKS),
    Case("forks-no-fa", N_LONG, _LONG_NO_FA, kind=FORKS),
    Case("forks-seq-2-of-4", N_LONG, _FOUR, seq_id=2, kind=FORKS),
)
_KINDS = {case.name: case.kind for case in CASES}


@dataclass(frozen=True)
class Result:
    """What came of one case on one architecture.

    Attributes:
        arch: name of the model file without its ending.
        case: name of the case.
        status: `served`, `no-memory`, `refused` (by upstream) or `failed`.
        identical: the logits equal the local ones, bit for bit.
        bytes_moved: as `adopt` counted, over all turns or forks.
        share_us: time to issue the last share, or to freeze.
        adopt_us: time of the last adoption, or to enter the last fork.
        error: why it failed.
    """

    arch: str
    case: str
    status: str
    identical: bool = False
    bytes_moved: int = 0
    share_us: float = 0.0
    adopt_us: float = 0.0
    error: str = ""


def run_case(model: Model, arch: str, case: Case) -> Result:
    """Run one case on one model."""
    params = {"n_ctx": 1024 * case.context.get("n_seq_max", 1), "n_threads": 1, **case.context}
    try:
        local = Context.create(model, **params)
    except NativeError:
        return Result(arch, case.name, "refused" if case.may_refuse else "failed", error="no context")
    with local:
        if not local.memory:
            return Result(arch, case.name, "no-memory")
        run_it = {HANDOFF: _run_handoff, TURNS: _run_turns, FORKS: _run_forks}[case.kind]
        return run_it(model, local, arch, case, params)


def _run_handoff(model: Model, local: Context, arch: str, case: Case, params: dict[str, Any]) -> Result:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, model.n_vocab, case.n_tokens + N_DECODE).tolist()
    other = rng.integers(0, model.n_vocab, case.n_other + 1).tolist()
    prompt, rest = tokens[: case.n_tokens], tokens[case.n_tokens :]
    with contextlib.ExitStack() as stack:
        decoder = stack.enter_context(Decoder.open(model, **params))
        for context in (local, decoder.context):
            if case.n_other:
                context.decode(other[:-1], position=0, seq_id=0)
        near, far = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX))
        share = stack.enter_context(decoder.share(case.seq_id, n_tokens=case.n_tokens))
        share.send(near)
        with Offer.receive(far) as offer, Provider(offer, model, n_threads=1) as provider:
            provider.prefill(prompt)
            provider.publish()
            # the local run at the same place: sums in attention depend on it
            lease = offer.native_lease()
        local.library.lib.llama_kv_share_confine(local.handle, case.seq_id, lease, len(lease))
        adopted = decoder.adopt(share, prompt)
        if model.has_encoder:
            local.encode(prompt)
            decoder.context.encode(prompt)
        local.decode(prompt, position=0, seq_id=case.seq_id)
        local.library.lib.llama_kv_share_confine(local.handle, case.seq_id, None, 0)
        identical = True
        for i, token in enumerate(rest):
            identical &= _same(local, decoder.context, [token], case.n_tokens + i, case.seq_id)
        if case.n_other:
            identical &= _same(local, decoder.context, other[-1:], case.n_other, 0)
        return Result(arch, case.name, "served", identical, adopted.bytes_moved, share.t_us, adopted.t_us)


def _run_turns(model: Model, local: Context, arch: str, case: Case, params: dict[str, Any]) -> Result:
    rng = np.random.default_rng(1)
    seq_id = case.seq_id
    other = rng.integers(0, model.n_vocab, case.n_other + 1).tolist()
    held: list[int] = []
    identical, bytes_moved = True, 0
    with Decoder.open(model, **params) as decoder, WarmProvider(model, n_threads=1) as provider:
        contexts = (local, decoder.context)
        for context in contexts:
            if case.n_other:
                context.decode(other[:-1], position=0, seq_id=0)
        for n_new in (case.n_tokens, *N_TURNS[1:]):
            new = rng.integers(0, model.n_vocab, n_new).tolist()
            answer = rng.integers(0, model.n_vocab, N_DECODE).tolist()
            tokens = held + new
            with contextlib.ExitStack() as stack:
                near, far = (stack.enter_context(end) for end in socket.socketpair(socket.AF_UNIX))
                share = stack.enter_context(decoder.share(seq_id, n_tokens=len(tokens), prefix=held))
                share.send(near)
                with Offer.receive(far) as offer:
                    provider.fill(offer, tokens, begun=lambda _: None, progress=lambda _: None)
                    # among others, the local run at the same place: sums in attention depend on it
                    lease = offer.native_lease() if params.get("kv_unified") else ()
                adopted = decoder.adopt(share, tokens)
            identical &= provider.n_prefilled == n_new
            identical &= adopted.n_adopted == len(tokens)
            bytes_moved += adopted.bytes_moved
            if model.has_encoder:
                for context in contexts:
                    context.encode(tokens)
            if lease:
                local.library.lib.llama_kv_share_confine(local.handle, seq_id, lease, len(lease))
            local.decode(new, position=len(held), seq_id=seq_id)
            local.library.lib.llama_kv_share_confine(local.handle, seq_id, None, 0)
            for i, token in enumerate(answer):
                identical &= _same(*contexts, [token], len(tokens) + i, seq_id)
            held = tokens + answer
            if n_new == N_TURNS[1]:
                provider.forget()  # the last turn is that of a provider which knows nothing of the others
        if case.n_other:
            identical &= _same(*contexts, other[-1:], case.n_other, 0)
    return Result(arch, case.name, "served", identical, bytes_moved, share.t_us, adopted.t_us)


def _run_forks(model: Model, _local: Context, arch: str, case: Case, params: dict[str, Any]) -> Result:
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, model.n_vocab, case.n_tokens).tolist()
    rests = rng.integers(0, model.n_vocab, (N_FORKS, N_SHORT + N_DECODE)).tolist()
    expected = []
    for rest in rests:
        with Context.create(model, **params) as plain:
            _prefill(plain, prompt, case.seq_id)
            expected.append(list(_continue(plain, rest, len(prompt), case.seq_id)))
    with contextlib.ExitStack() as stack:
        with Decoder.open(model, **params) as decoder:
            _prefill(decoder.context, prompt, case.seq_id)
            start = time.perf_counter_ns()
            prefix = stack.enter_context(Prefix.freeze(decoder, prompt, case.seq_id))
            freeze_us = (time.perf_counter_ns() - start) / 1000
        before = _frozen(prefix)
        runs, bytes_moved, enter_us = [], 0, 0.0
        for rest in rests:
            fork = stack.enter_context(Decoder.fork(prefix, model, n_threads=1))
            assert prefix.entered is not None
            bytes_moved += prefix.entered.bytes_moved
            enter_us = prefix.entered.t_us
            if model.has_encoder:
                fork.context.encode(prompt)
            # of a stream of its own, a fork has only that one
            runs.append(_continue(fork.context, rest, len(prompt), prefix.seq_id))
        # each a step, then the next step of each
        found = list(zip(*zip(*runs, strict=True), strict=True))
        identical = found == [tuple(each) for each in expected] and all(map(all, found))
        identical &= _frozen(prefix) == before
        return Result(arch, case.name, "served", identical, bytes_moved, freeze_us, enter_us)


def _prefill(context: Context, prompt: list[int], seq_id: int) -> None:
    if context.model.has_encoder:
        context.encode(prompt)
    context.decode(prompt, position=0, seq_id=seq_id)


def _continue(context: Context, rest: list[int], position: int, seq_id: int) -> Iterator[bytes]:
    """Decode some tokens together, then each by itself; yield the logits of each step."""
    for tokens in (rest[:N_SHORT], *([token] for token in rest[N_SHORT:])):
        context.decode(tokens, position=position, seq_id=seq_id, logits=True)
        position += len(tokens)
        logits = context.logits()
        yield logits.tobytes() if np.isfinite(logits).all() else b""


def _frozen(prefix: Prefix) -> str:
    """Return a digest of all that a prefix holds."""
    digest = hashlib.sha256()
    for region in prefix.native_regions():
        digest.update(os.pread(region.fd, region.size, region.offset))
    return digest.hexdigest()


def _same(a: Context, b: Context, tokens: list[int], position: int, seq_id: int) -> bool:
    for context in (a, b):
        context.decode(tokens, position=position, seq_id=seq_id, logits=True)
    x, y = a.logits(), b.logits()
    return x.tobytes() == y.tobytes() and bool(np.isfinite(x).all())


def _worker() -> None:
    """Answer jobs on standard input, `{"path", "cases", "n_gpu_layers"}` a line, on standard output."""
    cases = {case.name: case for case in CASES}
    for line in sys.stdin:
        job = json.loads(line)
        path = Path(job["path"])
        results = []
        try:
            with Model.open(path, n_gpu_layers=job["n_gpu_layers"]) as model:
                for name in job["cases"]:
                    try:
                        results.append(run_case(model, path.stem, cases[name]))
                    except KvshareError as error:
                        results.append(
                            Result(path.stem, name, "failed", error=f"{type(error).__name__}: {error}")
                        )
        except KvshareError as error:
            results = [Result(path.stem, name, "failed", error=str(error)) for name in job["cases"]]
        print(json.dumps([asdict(result) for result in results]), flush=True)


class _Worker:
    """A child process that is started again after a model has killed it."""

    def __init__(self, n_gpu_layers: int) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.n_gpu_layers = n_gpu_layers

    def run(self, path: Path, cases: list[str]) -> list[Result]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.architectures", "--worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={
                    **os.environ,
                    loader.ENVIRONMENT: str(loader.load().path),
                    "GGML_NO_BACKTRACE": "1",  # a debugger would write to standard output
                },
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        job = {"path": str(path), "cases": cases, "n_gpu_layers": self.n_gpu_layers}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        if line:
            return [Result(**each) for each in json.loads(line)]
        self.process.kill()
        status = self.process.wait()
        self.process = None
        if len(cases) > 1:  # find out which one it was
            return [result for case in cases for result in self.run(path, [case])]
        return [Result(path.stem, cases[0], "failed", error=f"process ended with status {status}")]

    def close(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            self.process.wait()


def run(
    paths: list[Path], cases: list[str], *, n_workers: int | None = None, n_gpu_layers: int = 0
) -> Iterator[list[Result]]:
    """Run cases on models, in child processes; yield the results of each model as they come."""
    n_workers = n_workers or len(os.sched_getaffinity(0))
    workers = [_Worker(n_gpu_layers) for _ in range(n_workers)]
    free = list(workers)

    def one(path: Path) -> list[Result]:
        worker = free.pop()
        try:
            return worker.run(path, cases)
        finally:
            free.append(worker)

    try:
        with ThreadPoolExecutor(n_workers) as pool:
            yield from pool.map(one, paths)
    finally:
        for worker in workers:
            worker.close()


def summary(results: list[list[Result]]) -> dict[str, Any]:
    """Count architectures: one is served, identical or unmoved if it is in all its cases of that kind."""
    with_memory = [each for each in results if any(result.status != "no-memory" for result in each)]
    counted = [[result for result in each if result.status != "refused"] for each in with_memory]

    def count(kind: str, passes: Callable[[Result], bool]) -> int:
        of_kind = ([result for result in each if _KINDS[result.case] == kind] for each in counted)
        return sum(bool(mine) and all(map(passes, mine)) for mine in of_kind)

    return {
        "total": len(results),
        "without_memory": len(results) - len(with_memory),
        "served": count(HANDOFF, lambda result: result.status == "served"),
        "bit_identical": count(HANDOFF, lambda result: result.identical),
        "zero_moved": count(HANDOFF, lambda result: result.status == "served" and not result.bytes_moved),
        "turns_identical": count(TURNS, _passes),
        "forks_identical": count(FORKS, _passes),
        "times": {each[0].arch: found for each in counted if (found := _times(each))},
        "failures": [asdict(result) for each in counted for result in each if not _passes(result)],
    }


def _times(results: list[Result]) -> dict[str, float]:
    mine = [each for each in results if each.status == "served" and _KINDS[each.case] == HANDOFF]
    if not mine:
        return {}
    return {
        "share_us": round(statistics.median(each.share_us for each in mine), 1),
        "adopt_us": round(statistics.median(each.adopt_us for each in mine), 1),
    }


def _passes(result: Result) -> bool:
    return result.status == "served" and result.identical and not result.bytes_moved


def _table(results: list[list[Result]], cases: list[str]) -> Table:
    table = Table(title="architectures by case")
    for column in (
        "case",
        "served",
        "bit-identical",
        "zero moved",
        "refused upstream",
        "share us",
        "adopt us",
    ):
        table.add_column(column, justify="left" if column == "case" else "right")
    for name in cases:
        mine = [result for each in results for result in each if result.case == name]
        served = [result for result in mine if result.status == "served"]
        table.add_row(
            name,
            str(len(served)),
            str(sum(result.identical for result in served)),
            str(sum(not result.bytes_moved for result in served)),
            str(sum(result.status == "refused" for result in mine)),
            f"{np.median([result.share_us for result in served] or [0]):.0f}",
            f"{np.median([result.adopt_us for result in served] or [0]):.0f}",
        )
    return table


def _slowest(times: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title=f"the {N_SLOWEST} that are adopted slowest, medians over the cases")
    for column in ("architecture", "share us", "adopt us"):
        table.add_column(column, justify="left" if column == "architecture" else "right")
    for arch in sorted(times, key=lambda arch: -times[arch]["adopt_us"])[:N_SLOWEST]:
        table.add_row(arch, f"{times[arch]['share_us']:.0f}", f"{times[arch]['adopt_us']:.0f}")
    return table


def plot(times: Mapping[str, Mapping[str, float]], folder: Path) -> None:
    """Draw share and adoption of each architecture, the slowest adoption on top."""
    pyplot = measure.pyplot()
    names = sorted(times, key=lambda arch: times[arch]["adopt_us"])
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.15 * len(names)), layout="constrained")
    for step, marker in (("share", "s"), ("adopt", "o")):
        axes.plot([times[name][f"{step}_us"] for name in names], range(len(names)), marker, ms=4, label=step)
    axes.set_yticks(range(len(names)), names, fontsize=6)
    axes.set(xlabel="us, medians over the cases", xlim=(0, None), ylim=(-1, len(names)))
    axes.set_title("share and adoption, by architecture")
    axes.grid(alpha=0.3)
    axes.legend()
    measure.save_figure(figure, folder, "architectures")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 0 only if every architecture passes every case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.architectures", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture; needs matplotlib")
    parser.add_argument("--arch", default="", metavar="REGEX", help="only models whose name matches")
    parser.add_argument(
        "--case",
        nargs="+",
        choices=[case.name for case in CASES],
        metavar="NAME",
        help=f"some of {', '.join(case.name for case in CASES)} (default: all)",
    )
    parser.add_argument(
        "--n-gpu-layers", type=int, default=0, metavar="N", help="layers on a device (default: %(default)s)"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        _worker()
        return 0
    console = Console(stderr=True)
    start = time.monotonic()
    try:
        if args.plot:
            measure.pyplot()
        with console.status("building and generating the models"):
            loader.load()
            folder = architectures.models()
    except KvshareError as error:
        return measure.complain("architectures", error)
    paths = sorted(path for path in folder.glob("*.gguf") if re.search(args.arch, path.stem))
    if not paths:
        parser.error(
            f"--arch: no model of the {len(list(folder.glob('*.gguf')))} has a name like {args.arch!r}"
        )
    cases = args.case or [case.name for case in CASES if not args.n_gpu_layers or case.kind != FORKS]
    results: list[list[Result]] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("architectures", total=len(paths))
        for each in run(paths, cases, n_gpu_layers=args.n_gpu_layers):
            results.append(each)
            progress.advance(task)
    report = summary(results)
    if args.plot:
        plot(report["times"], args.plot)
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        out = Console()
        out.print(_table(results, cases))
        out.print(_slowest(report["times"]))
        out.print({name: value for name, value in report.items() if name not in ("times", "failures")})
        for failure in report["failures"]:
            out.print(
                f"{failure['arch']} {failure['case']}: {failure['status']} {failure['error']}",
                highlight=False,
            )
        out.print(f"{time.monotonic() - start:.0f} s")
    if report["failures"]:
        failed = sorted({failure["arch"] for failure in report["failures"]})
        print(f"architectures: error: not as they have to be: {', '.join(failed)}", file=sys.stderr)
    return 0 if report["total"] > report["without_memory"] and not report["failures"] else 1


if __name__ == "__main__":
    sys.exit(main())
