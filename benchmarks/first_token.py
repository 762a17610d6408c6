"""Time to first token on a real model: one process against a decoder and a provider, and where it went.

    python -m benchmarks.first_token [--json] [--plot DIR] [--model GGUF] [--tokens N ...] [--repetitions N]

Every process has the model loaded and holds its CPUs; none runs while another one is measured, except
provider and decoder, of which one waits for the other. The routes take turns, in another order each time:

- `one`: one process with a private cache, on the CPUs that the provider has on the other routes, and with
  as many threads. It decodes the prompt in one call, as programs do.
- `all`: the same on the CPUs of both, with as many threads.
- `warm`: the decoder has one half of the CPUs, the provider the other. The provider has the context of
  the last handoff.
- `cold`: the same, but the provider has to build its context, and to map the decoder's memory.

All figures are medians over the repetitions, in milliseconds; `quartiles` has the first and the third one.
A first run of each process is left out, so that the decoder's memory was touched before. Of each length:

- `ttft_ms`: from the prompt to its first token. It is the sum of these, which only `cold` and `warm` have:
  `share_ms` to issue the share, `send_ms` to connect and to send it, `receive_ms` until the provider has
  received and checked it, `setup_ms` until its context is ready, `prefill_ms` for all tokens but the last
  one, by its own report, `publish_ms` until it has vouched for them, `wait_ms` until the decoder has heard
  of that, `adopt_ms`, and `first_decode_ms` for the last token of the prompt.
- `handoff_ms`: share, send and adopt.
- `steady_token_ms`: median of the tokens behind the first one. `ratio_first_decode`: the decode behind an
  adoption against them.
- `ratio_one`: `ttft_ms` / (that of `one` + `handoff_ms`): what a second process costs with equal compute.
  The decode of the last token is part of it: the other route needs none of its own.
- `ratio_all`: `ttft_ms` / that of `all`: what it costs to leave one half of the CPUs to the decoder.

`context` says what it costs that a context can be shared, in a process of its own on all these CPUs:
`private` and `shared` are its contexts, of which one is exported. They prefill the prompt in turn
(`prefill_ms`), then decode tokens in turn (`token_ms`); `ratio_prefill` and `ratio_token` are shared /
private. A ratio is taken in each repetition, and the median is of these.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import fanout, measure, stall
from kvshare import fds, fetch, models, wire
from kvshare._native import loader
from kvshare._native.context import Context, Model
from kvshare.cli import progress
from kvshare.decoder import Decoder
from kvshare.errors import KvshareError, RemoteProtocolError
from kvshare.provider import Offer, WarmProvider

ROUTES = ("one", "all", "cold", "warm")
HANDOFFS = ("cold", "warm")
STEPS = ("share", "send", "receive", "setup", "prefill", "publish", "wait", "adopt", "first_decode")
DEFAULT_TOKENS = (251, 1024)
DEFAULT_REPETITIONS = 5
MIN_TOKENS = 2
N_STEADY = 8
N_PAIRS = 16  # tokens that each context decodes behind a prefill
TIMEOUT_S = 600.0

Figures = dict[str, float]
Job = Mapping[str, Any]


# -- the processes -----------------------------------------------------------------------------


def _n_ctx(n_tokens: int) -> int:
    return -(-(n_tokens + max(N_STEADY, N_PAIRS) + 1) // 256) * 256


def _decode(context: Context, tokens: Sequence[int], position: int) -> int:
    """Decode; return the most likely next token."""
    context.decode(tokens, position=position, logits=True)
    return int(context.logits().argmax())


def _milliseconds(function: Any, *arguments: Any) -> tuple[float, Any]:
    start = time.monotonic()
    result = function(*arguments)
    return (time.monotonic() - start) * 1000, result


def _steady_ms(context: Context, token: int, position: int) -> float:
    """Generate some tokens; return the median of their times."""
    times = []
    for i in range(N_STEADY):
        elapsed, token = _milliseconds(_decode, context, [token], position + i)
        times.append(elapsed)
    return statistics.median(times)


def _alone(model: Model, n_ctx: int, _: Path) -> None:
    with Context.create(model, n_ctx=n_ctx) as context:

        def handle(job: Job) -> Figures:
            tokens = fanout.prompt_of(model, job["n_tokens"])
            context.clear()
            elapsed, token = _milliseconds(_decode, context, tokens, 0)
            return {"ttft_ms": elapsed, "steady_token_ms": _steady_ms(context, token, len(tokens))}

        measure.answer_jobs(handle)


def _decoder(model: Model, n_ctx: int, socket: Path) -> None:
    with Decoder.open(model, n_ctx=n_ctx) as decoder:
        context = decoder.context

        def handle(job: Job) -> dict[str, Any]:
            tokens = fanout.prompt_of(model, job["n_tokens"])
            context.clear()
            times = [time.monotonic()]
            with decoder.share(n_tokens=len(tokens) - 1, expires_ms=int(TIMEOUT_S * 1000)) as share:
                times.append(time.monotonic())
                share.send(socket)
                times.append(time.monotonic())
                share.wait()
                times.append(time.monotonic())
                adopted = decoder.adopt(share, tokens[:-1])
            times.append(time.monotonic())
            token = _decode(context, tokens[-1:], len(tokens) - 1)
            times.append(time.monotonic())
            steady = _steady_ms(context, token, len(tokens))
            return {"times": times, "steady_token_ms": steady, "bytes_moved": adopted.bytes_moved}

        measure.answer_jobs(handle)


def _provider(model: Model, _: int, socket: Path) -> None:
    with fds.listening(socket) as listener, WarmProvider(model) as warm:

        def handle(job: Job) -> dict[str, Any]:
            tokens = fanout.prompt_of(model, job["n_tokens"])[:-1]
            if job["cold"]:
                warm.forget()
            print("{}", flush=True)  # ready
            with fds.accept_unix(listener, deadline=time.monotonic() + TIMEOUT_S) as connection:
                begun: list[tuple[float, bool]] = []
                with Offer.receive(connection) as offer:
                    received = time.monotonic()
                    warm.fill(
                        offer,
                        tokens,
                        begun=lambda is_warm: begun.append((time.monotonic(), is_warm)),
                        progress=lambda _: None,
                    )
                    published = time.monotonic()
                    outcome = wire.Outcome(share_id=offer.header.share_id, ok=True)
                    fds.send_message(connection, wire.encode(outcome))
            assert warm.provider is not None
            ((at, is_warm),) = begun
            return {
                "times": [received, at, at + warm.provider.prefill_ms / 1000, published],
                "cold": not is_warm,
            }

        print("{}", flush=True)
        measure.answer_jobs(handle)


def _contexts(model: Model, n_ctx: int, _: Path) -> None:
    with (
        Context.create(model, n_ctx=n_ctx) as private,
        Decoder.open(model, n_ctx=n_ctx) as decoder,
    ):
        both = {"private": private, "shared": decoder.context}
        names = itertools.cycle(("private", "shared"))

        def handle(job: Job) -> Figures:
            tokens = fanout.prompt_of(model, job["n_tokens"])
            found: Figures = {}
            next(names)  # who begins changes from job to job
            for name in itertools.islice(names, 2):
                both[name].clear()
                found[f"{name}_prefill_ms"], _ = _milliseconds(_decode, both[name], tokens, 0)
            token_ms: dict[str, list[float]] = {name: [] for name in both}
            for i in range(N_PAIRS):
                for name in both if i % 2 else reversed(both):
                    elapsed, _ = _milliseconds(_decode, both[name], tokens[-1:], len(tokens) + i)
                    token_ms[name].append(elapsed)
            return found | {f"{name}_token_ms": statistics.median(each) for name, each in token_ms.items()}

        measure.answer_jobs(handle)


ROLES = {"alone": _alone, "decoder": _decoder, "provider": _provider, "contexts": _contexts}


# -- the measurement ---------------------------------------------------------------------------


class Bench:
    """All processes, started.

    Args:
        model: GGUF file.
        n_ctx: cells of each context.
        ours: CPUs of the decoder.
        theirs: as many, of the provider.

    *Ownership*: leaving the block ends them.
    """

    def __init__(self, model: Path, n_ctx: int, ours: Collection[int], theirs: Collection[int]) -> None:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(fds.private_directory())
            environment = {loader.ENVIRONMENT: str(loader.find())}

            def child(role: str, cpus: Collection[int]) -> measure.Child:
                options = {"role": role, "model": model, "n-ctx": n_ctx, "socket": folder / "p.sock"}
                words = [f"--{name}={value}" for name, value in options.items()]
                # started there: a process and its threads stay on these CPUs
                with stall.pinned(cpus):
                    started = measure.Child("benchmarks.first_token", *words, environment=environment)
                return stack.enter_context(started)

            self._alone = {"one": child("alone", theirs), "all": child("alone", [*ours, *theirs])}
            self._contexts = child("contexts", [*ours, *theirs])
            self._provider = child("provider", theirs)
            self._provider.answer()
            self._decoder = child("decoder", ours)
            self._stack = stack.pop_all()

    def first_token(self, route: str, n_tokens: int) -> Figures:
        """Measure a route once.

        Raises:
            KvshareError: a process failed, or did not do what this route is about.
        """
        if route in self._alone:
            return self._alone[route].ask(n_tokens=n_tokens)
        self._provider.ask(n_tokens=n_tokens, cold=route == "cold")
        done = self._decoder.ask(n_tokens=n_tokens)
        filled = self._provider.answer()
        if filled["cold"] != (route == "cold") or done["bytes_moved"]:
            raise RemoteProtocolError(f"a handoff was not {route}, or moved bytes: {filled}, {done}")
        # one clock: CLOCK_MONOTONIC is that of the host
        times = [*done["times"][:3], *filled["times"], *done["times"][3:]]
        steps = {
            f"{step}_ms": (after - before) * 1000
            for step, (before, after) in zip(STEPS, itertools.pairwise(times), strict=True)
        }
        return {
            "ttft_ms": (times[-1] - times[0]) * 1000,
            **steps,
            "handoff_ms": steps["share_ms"] + steps["send_ms"] + steps["adopt_ms"],
            "steady_token_ms": done["steady_token_ms"],
            "ratio_first_decode": steps["first_decode_ms"] / done["steady_token_ms"],
        }

    def contexts(self, n_tokens: int) -> Figures:
        """Measure a private and a shared context once."""
        found = self._contexts.ask(n_tokens=n_tokens)
        for name in ("prefill", "token"):
            found[f"ratio_{name}"] = found[f"shared_{name}_ms"] / found[f"private_{name}_ms"]
        return found

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def halves() -> tuple[list[int], list[int]]:
    """Return CPUs for the decoder, and as many for the provider.

    Raises:
        LocalProtocolError: there is one CPU only.
    """
    ours, theirs = stall.split(stall.usable_cores())
    n = min(len(ours), len(theirs))
    return ours[:n], theirs[:n]


def measure_all(
    model: Path, lengths: Sequence[int], repetitions: int, show: fetch.Progress = fetch.silent
) -> dict[str, Any]:
    """Run the benchmark; return the report that `--json` prints.

    Args:
        model: GGUF file.
        lengths: of the prompts, tokens.
        repetitions: of each route and length.
        show: told about the steps.

    Raises:
        KvshareError: a process failed, or did not do what is measured.
    """
    ours, theirs = halves()
    runs = []
    with Bench(model, _n_ctx(max(lengths)), ours, theirs) as bench:
        show("a first run of each process", 0, None)
        for route in ROUTES:
            bench.first_token(route, max(lengths))
        bench.contexts(max(lengths))
        for n in lengths:
            found: dict[str, list[Figures]] = {route: [] for route in ROUTES}
            contexts = []
            for i in range(repetitions):
                show(f"{n:,} tokens", i, repetitions)
                turn = i % len(ROUTES)
                for route in ROUTES[turn:] + ROUTES[:turn]:
                    found[route].append(bench.first_token(route, n))
                for route in HANDOFFS:
                    last = found[route][-1]
                    last["ratio_one"] = last["ttft_ms"] / (found["one"][-1]["ttft_ms"] + last["handoff_ms"])
                    last["ratio_all"] = last["ttft_ms"] / found["all"][-1]["ttft_ms"]
                contexts.append(bench.contexts(n))
            runs.append(
                {
                    "n_tokens": n,
                    **{route: _summary(each) for route, each in found.items()},
                    "context": _summary(contexts),
                }
            )
    return {
        "model": model.name,
        "repetitions": repetitions,
        "cpus": {"one": theirs, "all": [*ours, *theirs], "decoder": ours, "provider": theirs},
        "runs": runs,
    }


def _summary(measured: Sequence[Figures]) -> dict[str, Any]:
    return {**measure.medians(measured), "quartiles": measure.quartiles(measured)}


# -- what is shown -----------------------------------------------------------------------------


def _tables(report: Mapping[str, Any]) -> Iterator[Table]:
    for run in report["runs"]:
        table = Table(
            title=f"{run['n_tokens']:,} tokens, ms: medians of {report['repetitions']} repetitions, quartiles"
        )
        table.add_column("")
        n_cpus = {route: len(report["cpus"].get(route, report["cpus"]["provider"])) for route in ROUTES}
        for route in ROUTES:
            where = f"two processes, {route}" if route in HANDOFFS else "one process"
            n = n_cpus[route]
            table.add_column(f"{where},\n{n} CPU{'s'[: n != 1]} prefill{'s'[: n == 1]}", justify="right")
        names = [(f"{step}_ms", step.replace("_", " ")) for step in STEPS]
        names += [("ttft_ms", "first token"), ("handoff_ms", "share + send + adopt")]
        names += [("steady_token_ms", "steady token"), ("ratio_first_decode", "first decode / steady")]
        names += [("ratio_one", "/ (one process + handoff)"), ("ratio_all", "/ one process, all CPUs")]
        for name, text in names:
            cells = (_cell(run[route], name) for route in ROUTES)
            style = "bold" if name in ("ttft_ms", "ratio_one") else None
            table.add_row(text, *cells, style=style, end_section=name in ("first_decode_ms", "ttft_ms"))
        yield table
    table = Table(title="a context that can be shared, against a private one of the same process")
    for column in ("tokens", "", "private (ms)", "shared (ms)", "shared / private"):
        table.add_column(column, justify="right" if column else "left")
    for run in report["runs"]:
        for name in ("prefill", "token"):
            each = (f"private_{name}_ms", f"shared_{name}_ms", f"ratio_{name}")
            table.add_row(f"{run['n_tokens']:,}", name, *(_cell(run["context"], key) for key in each))
    yield table


def _cell(figures: Mapping[str, Any], name: str) -> str:
    if name not in figures:
        return ""
    digits = 3 if name.startswith("ratio") else 0 if figures[name] >= 100 else 2
    low, high = (f"{value:,.{digits}f}" for value in figures["quartiles"][name])
    return f"{figures[name]:,.{digits}f} [{low} {high}]"


def plot(report: Mapping[str, Any], folder: Path) -> None:
    """Draw what the time to the first token consists of on each route, a part of the picture a length."""
    pyplot = measure.pyplot()
    runs = report["runs"]
    figure, places = pyplot.subplots(
        len(runs), 1, figsize=(8, 0.8 + 2.1 * len(runs)), squeeze=False, layout="constrained"
    )
    for place, run in zip(places.flat, runs, strict=True):
        for y, route in enumerate(ROUTES):
            if route not in HANDOFFS:
                place.barh(
                    y, run[route]["ttft_ms"], color="0.7", label="prefill, in one process" if not y else None
                )
            left = 0.0
            for i, step in enumerate(STEPS if route in HANDOFFS else ()):
                ms = run[route][f"{step}_ms"]
                label = step.replace("_", " ") if route == HANDOFFS[0] else None
                place.barh(y, ms, left=left, color=f"C{i}", label=label)
                left += ms
            low, high = run[route]["quartiles"]["ttft_ms"]
            place.plot([low, high], [y, y], "|-", color="black", linewidth=1)
        place.set_yticks(range(len(ROUTES)), ROUTES)
        place.invert_yaxis()
        place.set(
            title=f"{run['n_tokens']:,} tokens", xlabel="ms to the first token, medians; lines: quartiles"
        )
        place.grid(axis="x", alpha=0.3)
        place.set_axisbelow(True)
    figure.legend(*places[0][0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    measure.save_figure(figure, folder, "first_token")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_token", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture; needs matplotlib")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=DEFAULT_TOKENS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--repetitions", type=int, default=DEFAULT_REPETITIONS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--n-ctx", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if min(args.tokens) < MIN_TOKENS:
        parser.error(f"--tokens must be at least {MIN_TOKENS}")
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    try:
        if args.role:
            with Model.open(args.model) as model:
                ROLES[args.role](model, args.n_ctx, args.socket)
            return 0
        if args.plot:
            measure.pyplot()
        with progress.shown() as show:
            halves()  # before anything is fetched
            path = args.model or models.fetch("smollm2", show)
            models.check_gguf(path)
            report = measure_all(path, args.tokens, args.repetitions, show)
    except KvshareError as error:
        return measure.complain("first_token", error)
    if args.plot:
        plot(report, args.plot)
    measure.present(report, _tables(report), as_json=args.json, width=120)
    return 0


if __name__ == "__main__":
    sys.exit(main())
