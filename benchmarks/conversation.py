"""A conversation of ten turns, with a stream beside it: time to first token, worst stall, tokens prefilled.

Each prompt is the whole conversation so far, with what the model itself has answered, and some hundred
new tokens of the user. Through llama-server there are three routes:

- `stock`: the patched llama-server without `--kv-share`, which behaves as upstream's, on all CPUs and
  with as many threads. It has the conversation in its cache, and prefills what is new itself.
- `restart`: a handoff that starts over: the slot is erased before each turn.
- `kvshare`: a handoff of what is new. For both, the server has half of the CPUs, the provider the other.

In process there are `local`, `restart` and `kvshare`: the same with a `kvshare.Decoder` in this program,
whose sequence 1 generates while sequence 0 has the conversation. `local` prefills on the decoder's CPUs.

    python -m benchmarks.conversation [--turns N] [--tokens N] [--repetitions N] [--model GGUF] [--json]

A turn that is not what its route is about ends the benchmark: `kvshare` has to prefill exactly what is
new in the provider, move no byte, and reuse all but the last token. A gap of the stream counts, as a
whole, if its middle lies between the arrival of the prompt and its first token.

`identical` says on how many turns everything was the same as in a plain run: in process the logits of
every token of the answers, bit for bit, against `local`; through the server text and logprobs, in a pass
without the stream, against the same server without an engine, in the same graphs: first all but the
last token, then the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure, stall
from kvshare import build, fds, fetch, models, processes
from kvshare._native.context import Model
from kvshare.cli import progress
from kvshare.decoder import Decoder
from kvshare.engine import Engine, InProcessDecoder, ProviderClient
from kvshare.errors import KvshareError, RemoteProtocolError
from kvshare.policy import Policy, Route

SERVER_ROUTES = ("stock", "restart", "kvshare")
PROCESS_ROUTES = ("local", "restart", "kvshare")
MODELS = ("smollm2", "gemma3-270m")
DEFAULT_TURNS = 10
DEFAULT_TOKENS = 300
DEFAULT_REPETITIONS = 3
N_ANSWER = 16
N_STREAM = 4096  # tokens that the stream has room for
STEADY_S = 1.0  # of the stream, before a turn arrives
THRESHOLD = 64
PATIENCE = 1000.0  # the routes are given: the engine must not choose another one


@dataclass(frozen=True)
class Turn:
    """What one turn measured.

    Attributes:
        ttft_ms: from the arrival of the prompt to its first token.
        max_gap_ms: longest time between two tokens of the stream meanwhile.
        n_tokens: of the prompt.
        n_prefilled: tokens that were prefilled for it, by the provider, or by the server itself.
    """

    ttft_ms: float
    max_gap_ms: float
    n_tokens: int
    n_prefilled: int

    @classmethod
    def of(cls, times: Sequence[float], sent: float, first: float, n_tokens: int, n_prefilled: int) -> Turn:
        """Evaluate the times of a stream's tokens, seconds."""
        window = stall.gaps(times, sent, first)
        if not window or times[-1] <= first:
            raise RemoteProtocolError("the stream did not run all the time")
        return cls((first - sent) * 1000, max(gap for _, gap in window), n_tokens, n_prefilled)


def summary(runs: Mapping[str, Sequence[Sequence[Turn]]]) -> dict[str, Any]:
    """Return the medians over the repetitions, turn by turn, and what the routes cost against `kvshare`."""
    report: dict[str, Any] = {}
    for route, repetitions in runs.items():
        turns = list(zip(*repetitions, strict=True))

        def medians(name: str, turns: Sequence[Sequence[Turn]] = turns) -> list[float]:
            return [round(statistics.median(getattr(turn, name) for turn in each), 1) for each in turns]

        report[route] = {
            **{name: medians(name) for name in ("ttft_ms", "max_gap_ms", "n_tokens", "n_prefilled")},
            "worst_gap_ms": round(
                statistics.median(max(t.max_gap_ms for t in turns) for turns in repetitions), 1
            ),
            "total_ttft_ms": round(
                statistics.median(sum(t.ttft_ms for t in turns) for turns in repetitions), 1
            ),
            "total_prefilled": statistics.median(sum(t.n_prefilled for t in turns) for turns in repetitions),
            "runs": [[vars(turn) for turn in turns] for turns in repetitions],
        }
    ours = report["kvshare"]
    for route in runs:
        if route != "kvshare":
            report[f"{route}_over_kvshare"] = {
                "ttft_last_turn": round(report[route]["ttft_ms"][-1] / ours["ttft_ms"][-1], 2),
                "total_ttft": round(report[route]["total_ttft_ms"] / ours["total_ttft_ms"], 2),
                "worst_gap": round(report[route]["worst_gap_ms"] / ours["worst_gap_ms"], 2),
                "total_prefilled": round(report[route]["total_prefilled"] / ours["total_prefilled"], 2),
            }
    return report


def texts(seed: int, n_turns: int, n_tokens: int) -> list[str]:
    """Return what the user says: at least so many tokens each time."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(stall.WORDS, k=n_tokens)) for _ in range(n_turns)]


# -- through llama-server ----------------------------------------------------------------------


@dataclass(frozen=True)
class Front:
    """Where a route's prompts go.

    Attributes:
        route: its name.
        server: URL of the llama-server, where the stream runs.
        url: where prompts are sent.
        provider: log of the provider; None if there is none.
        cpus: CPUs for this program.
    """

    route: str
    server: str
    url: str
    provider: Path | None
    cpus: Collection[int]

    def erase(self, *slots: int) -> None:
        for id_slot in slots:
            stall.call(self.server, f"/slots/{id_slot}?action=erase", {})

    def converse(self, said: Sequence[Sequence[int]]) -> list[Turn]:
        """Measure a conversation, each turn beside a stream of its own."""
        self.erase(0, 1)
        tokens: list[int] = []
        turns = []
        for user in said:
            n_held = max(len(tokens) - 1, 0)
            tokens += user
            self.erase(0, *([1] if self.route == "restart" else []))
            with stall.pinned(self.cpus), stall.Stream(self.server) as stream:
                stream.wait_until(0)
                stream.wait_until(stream.times[0] + STEADY_S)
                with stall.Completion(self.url, request(tokens)) as completion:
                    events = list(completion)
                (first, _), (last, end) = events[0], events[-1]
                stream.wait_until(last)
            n_prefilled = self._prefilled(len(tokens), n_held, completion.headers, end["timings"])
            turns.append(Turn.of(stream.times, completion.sent, first, len(tokens), n_prefilled))
            tokens += generated(events)
        return turns

    def _prefilled(
        self, n_tokens: int, n_held: int, headers: Mapping[str, str], timings: Mapping[str, int]
    ) -> int:
        """Return how many tokens were prefilled; raise if it was not what the route is about."""
        if self.provider is None:
            return timings["prompt_n"]
        if headers.get("X-Kvshare-Path") != "handoff":
            path, reason = headers.get("X-Kvshare-Path"), headers.get("X-Kvshare-Reason")
            raise RemoteProtocolError(f"a turn was not handed over: it went {path}, {reason}")
        done = said_last(self.provider, "done")
        expected = 0 if self.route == "restart" else n_held
        if timings["cache_n"] != n_tokens - 1 or done["n_prefix"] != expected:
            raise RemoteProtocolError(
                f"{self.route}: {timings['cache_n']} of {n_tokens} tokens were reused, and the provider went"
                f" on behind {done['n_prefix']} instead of {expected}"
            )
        return int(done["n_tokens"] - done["n_prefix"])

    def answers(self, said: Sequence[Sequence[int]], *, plain: bool) -> list[Any]:
        """Return text and logprobs of each turn, without a stream; `plain` without the engine."""
        self.erase(0, 1)
        tokens: list[int] = []
        found = []
        for user in said:
            tokens += user
            where = {"id_slot": 0} if plain else {}
            if plain:
                body = {"prompt": tokens[:-1], "n_predict": 0, "cache_prompt": True, **where}
                stall.call(self.server, "/completion", body)
            body = {**request(tokens), "n_probs": 3, "temperature": 0, "ignore_eos": True, **where}
            answer = stall.call(self.server if plain else self.url, "/completion", body)
            if answer["timings"]["cache_n"] != len(tokens) - 1:
                raise RemoteProtocolError(
                    f"{answer['timings']['cache_n']} of {len(tokens)} tokens were reused"
                )
            found.append([answer["content"], answer["completion_probabilities"]])
            tokens += answer["tokens"]
        return found


def request(tokens: Sequence[int]) -> dict[str, Any]:
    return {"prompt": list(tokens), "n_predict": N_ANSWER, "return_tokens": True}


def generated(events: Sequence[tuple[float, Mapping[str, Any]]]) -> list[int]:
    """Return the tokens of a streamed answer."""
    found = [token for _, event in events if not event["stop"] for token in event["tokens"]]
    if len(found) != N_ANSWER:
        raise RemoteProtocolError(f"an answer has {len(found)} tokens instead of {N_ANSWER}")
    return found


def said_last(log: Path, event: str) -> dict[str, Any]:
    """Return the last event of a kind that a process has printed."""
    lines = [line for line in log.read_text().splitlines() if f'"event": "{event}"' in line]
    if not lines:
        raise RemoteProtocolError(f"the provider has not said {event!r}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def through_server(
    model: Path, n_turns: int, n_tokens: int, repetitions: int, show: fetch.Progress
) -> dict[str, Any]:
    """Measure the routes through llama-server."""
    ours, theirs = stall.split(stall.usable_cores())
    both = [*ours, *theirs]
    program = build.build_target(build.SERVER, progress=show)
    # one stream of cells for each slot: the conversation is alone in its own
    n_ctx = -(-(max(n_turns * (n_tokens + N_ANSWER), N_STREAM) + 512) // 256) * 256
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fds.private_directory())
        share, saved = folder / "share", folder / "saved"
        share.mkdir(mode=0o700)
        saved.mkdir()
        # a stock server erases slots only if it may save them
        options = [
            "-np",
            "2",
            "--no-kv-unified",
            "--ctx-size",
            str(2 * n_ctx),
            "--slot-save-path",
            str(saved),
        ]
        show("starting the processes", 0, None)
        stock = stack.enter_context(
            processes.llama_server(
                program, model, folder / "stock.log", *options, "--threads", str(len(both))
            )
        )
        # without a prompt cache, so that what is erased is gone; and without checkpoints, which split a
        # prompt into other graphs than those of a provider
        options += ["--cache-ram", "0", "--ctx-checkpoints", "0"]
        server = stack.enter_context(
            processes.llama_server(
                program,
                model,
                folder / "server.log",
                *options,
                *("--threads", str(len(ours))),
                share_dir=share,
                cpus=ours,
            )
        )
        listen = share / "provider.sock"
        provider = stack.enter_context(
            processes.provider(
                model, listen, folder / "provider.log", "--threads", str(len(theirs)), cpus=theirs
            )
        )

        def front(route: str) -> Front:
            if route == "stock":
                return Front(route, stock.url, stock.url, None, both)
            policy = ("--threshold", str(THRESHOLD), "--patience", str(PATIENCE))
            patient = ("--provider-timeout", f"{stall.TIMEOUT_S:.0f}")
            running = stack.enter_context(
                processes.engine(
                    server.url, listen, folder / f"{route}-engine.log", *policy, *patient, cpus=theirs
                )
            )
            return Front(route, server.url, running.url, provider.log, theirs)

        def said(seed: int) -> list[list[int]]:
            found = []
            for i, text in enumerate(texts(seed, n_turns, n_tokens)):
                body = {"content": text, "add_special": i == 0}
                found.append(stall.call(stock.url, "/tokenize", body)["tokens"][:n_tokens])
            return found

        quiet = front("quiet")
        show("a conversation without a stream, plain", 0, None)
        expected = quiet.answers(said(0), plain=True)
        show("a conversation without a stream, handed over", 0, None)
        identical = [a == b for a, b in zip(quiet.answers(said(0), plain=False), expected, strict=True)]
        fronts = [front(route) for route in SERVER_ROUTES]
        runs: dict[str, list[list[Turn]]] = {route: [] for route in SERVER_ROUTES}
        for i in range(repetitions):
            for each in fronts:
                show(f"server, repetition {i + 1} of {repetitions}, {each.route}", 0, None)
                runs[each.route].append(each.converse(said(i + 1)))
    return {**summary(runs), "identical": sum(identical), "cpus": {"server": ours, "provider": theirs}}


# -- in process --------------------------------------------------------------------------------


class Program:
    """A program with a decoder of its own: sequence 0 has the conversation, sequence 1 the stream."""

    def __init__(self, decoder: Decoder, listen: Path) -> None:
        self.context = decoder.context
        self.tokens: list[int] = []  # of the conversation
        self.held: list[int] = []  # those of them in the cache
        self.adapter = InProcessDecoder(decoder, history=lambda seq_id: self.held if seq_id == 0 else ())
        self._client = ProviderClient(listen, silence_s=stall.TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[list[float]]:
        """Generate in sequence 1; yield the list of the times of its tokens."""
        context, times = self.context, list[float]()
        start = context.model.tokenize(stall.STREAM_PROMPT)

        def begin() -> int:
            context.clear(1)
            context.decode(start, position=0, seq_id=1, logits=True)
            return int(context.logits().argmax())

        def step(token: int, position: int) -> int:
            context.decode([token], position=position, seq_id=1, logits=True)
            times.append(time.perf_counter())
            return int(context.logits().argmax())

        async def go_on() -> None:
            token, position = await self.adapter.run(begin), len(start)
            while position < N_STREAM:
                token = await self.adapter.run(step, token, position)
                position += 1
            raise RemoteProtocolError("the stream is full")

        task = asyncio.ensure_future(go_on())
        try:
            await until(task, lambda: bool(times))
            end = times[0] + STEADY_S
            await until(task, lambda: times[-1] > end)
            yield times
            end = time.perf_counter()
            await until(task, lambda: times[-1] > end)
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def converse(self, route: str, said: Sequence[Sequence[int]]) -> tuple[list[Turn], list[str]]:
        """Measure a conversation; return the digests of the logits of each turn as well."""
        engine = Engine(self.adapter, self._client, Policy(threshold=THRESHOLD, patience=PATIENCE))
        self.tokens, self.held = [], []
        await self.adapter.run(self.context.clear, 0)
        turns, digests = [], []
        for user in said:
            self.tokens += user
            n_tokens = len(self.tokens)
            if route == "restart":
                self.held = []
                await self.adapter.run(self.context.clear, 0)
            async with self.stream() as times:
                n_held, sent = len(self.held), time.perf_counter()
                if route == "local":
                    await self.adapter.run(self._prefill, n_held)
                    first, digest = await self._answer()
                else:
                    async with engine.prepared(self.tokens) as record:
                        expected = (Route.HANDOFF, 0, n_held, 0)
                        if (record.route, record.id_slot, record.n_prefix, record.bytes_moved) != expected:
                            raise RemoteProtocolError(f"a turn was not handed over as it should: {record}")
                        first, digest = await self._answer()
            turns.append(Turn.of(times, sent, first, n_tokens, n_tokens - 1 - n_held))
            digests.append(digest)
        await engine.close()
        return turns, digests

    def _prefill(self, n_held: int) -> None:
        self.context.decode(self.tokens[n_held:-1], position=n_held)
        self.context.synchronize()

    async def _answer(self) -> tuple[float, str]:
        """Generate; return when the first token was there, and a digest of all logits."""
        digest, first = hashlib.sha256(), 0.0

        def step() -> None:
            self.context.decode([self.tokens[-1]], position=len(self.tokens) - 1, logits=True)
            self.held = list(self.tokens)
            logits = self.context.logits()
            digest.update(logits.tobytes())
            self.tokens.append(int(logits.argmax()))

        for i in range(N_ANSWER):
            await self.adapter.run(step)
            first = first if i else time.perf_counter()
        return first, digest.hexdigest()


async def until(task: asyncio.Future[None], condition: Callable[[], bool]) -> None:
    """Wait until something holds; raise what a task raises that works for it."""
    deadline = time.monotonic() + stall.TIMEOUT_S
    while not condition():
        if task.done():
            task.result()
        if time.monotonic() > deadline:
            raise RemoteProtocolError("the stream does not go on")
        await asyncio.sleep(0.005)


def in_process(
    path: Path, n_turns: int, n_tokens: int, repetitions: int, show: fetch.Progress
) -> dict[str, Any]:
    """Measure the routes in process."""
    ours, theirs = stall.split(stall.usable_cores())
    n_ctx = -(-(max(n_turns * (n_tokens + N_ANSWER), N_STREAM) + 512) // 256) * 256
    runs: dict[str, list[list[Turn]]] = {route: [] for route in PROCESS_ROUTES}
    identical = [True] * n_turns
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fds.private_directory())
        listen = folder / "provider.sock"
        show("starting the provider", 0, None)
        threads = ("--threads", str(len(theirs)))
        stack.enter_context(processes.provider(path, listen, folder / "provider.log", *threads, cpus=theirs))
        stack.enter_context(stall.pinned(ours))
        model = stack.enter_context(Model.open(path))
        decoder = stack.enter_context(
            Decoder.open(model, n_ctx=2 * n_ctx, n_seq_max=2, kv_unified=False, n_threads=len(ours))
        )

        async def measure_turns() -> None:
            program = Program(decoder, listen)
            try:
                for i in range(repetitions):
                    await repeat(program, i)
            finally:
                await program.adapter.close()  # waits for a step of the stream that still runs

        async def repeat(program: Program, i: int) -> None:
            said = [
                model.tokenize(text, add_special=k == 0)[:n_tokens]
                for k, text in enumerate(texts(i + 1, n_turns, n_tokens))
            ]
            found: dict[str, list[str]] = {}
            for route in PROCESS_ROUTES:
                show(f"in process, repetition {i + 1} of {repetitions}, {route}", 0, None)
                turns, found[route] = await program.converse(route, said)
                runs[route].append(turns)
            for k in range(n_turns):
                identical[k] &= found["kvshare"][k] == found["local"][k]

        asyncio.run(measure_turns())
    return {**summary(runs), "identical": sum(identical), "cpus": {"decoder": ours, "provider": theirs}}


# -- the command -------------------------------------------------------------------------------


def _table(title: str, report: Mapping[str, Any], routes: Sequence[str]) -> Table:
    table = Table(title=title, box=None, padding=(0, 0, 0, 1))
    table.add_column("turn", justify="right")
    for name in ("tokens", "TTFT", "stall"):
        for route in routes:
            table.add_column(f"{name}\n{route}", justify="right", min_width=7)
    for i in range(len(report["kvshare"]["n_tokens"])):
        row = [str(i + 1)]
        for name in ("n_prefilled", "ttft_ms", "max_gap_ms"):
            row += [f"{report[route][name][i]:,.0f}" for route in routes]
        table.add_row(*row)
    row = ["all"]
    for name in ("total_prefilled", "total_ttft_ms", "worst_gap_ms"):
        row += [f"{report[route][name]:,.0f}" for route in routes]
    table.add_section()
    table.add_row(*row)
    return table


def _show(report: Mapping[str, Any], out: Console) -> None:
    for name, each in report["models"].items():
        for where, routes in (("server", SERVER_ROUTES), ("in_process", PROCESS_ROUTES)):
            found = each[where]
            title = (
                f"{name}, {where.replace('_', ' ')}: tokens prefilled, ms, medians of {report['repetitions']}"
            )
            out.print(_table(title, found, routes))
            for route in routes[:-1]:
                ratios = found[f"{route}_over_kvshare"]
                out.print(
                    f"{route} / kvshare: first token of the last turn {ratios['ttft_last_turn']:.2f},"
                    f" of all turns {ratios['total_ttft']:.2f}, worst stall {ratios['worst_gap']:.1f},"
                    f" tokens prefilled {ratios['total_prefilled']:.1f}",
                    highlight=False,
                )
            out.print(f"identical with a plain run: {found['identical']} of {report['n_turns']} turns\n")


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conversation", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--model",
        action="append",
        metavar="GGUF",
        help=f"a file, or one of {', '.join(MODELS)}; may be given more than once (default: these)",
    )
    for name, default, text in (
        ("--turns", DEFAULT_TURNS, "turns of the conversation"),
        ("--tokens", DEFAULT_TOKENS, "new tokens of the user in each"),
        ("--repetitions", DEFAULT_REPETITIONS, "of each route"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    args = parser.parse_args(argv)
    if args.tokens < 2 * THRESHOLD:
        parser.error(f"--tokens must be at least {2 * THRESHOLD}")
    if args.turns < 1 or args.repetitions < 1:
        parser.error("--turns and --repetitions must be at least 1")
    sizes = (args.turns, args.tokens, args.repetitions)
    report: dict[str, Any] = {"n_turns": args.turns, "n_user": args.tokens, "repetitions": args.repetitions}
    report["models"] = {}
    try:
        with progress.shown() as show:
            stall.split(stall.usable_cores())  # before anything is compiled
            for name in args.model or MODELS:
                path = models.fetch(name, show) if name in MODELS else Path(name)
                report["models"][path.name] = {
                    "server": through_server(path, *sizes, show),
                    "in_process": in_process(path, *sizes, show),
                }
    except KvshareError as error:
        return measure.complain("conversation", error)
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    _show(report, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
