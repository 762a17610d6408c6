"""How long a running stream stalls while a long prompt is prefilled for somebody else.

One stream runs on slot 0 of a llama-server. After a few seconds a long prompt arrives for another
slot, and the times between the tokens of the stream are taken:

- `stock`: the patched llama-server without `--kv-share`, which behaves as upstream's, on all CPUs and
  with as many threads. It prefills the prompt itself.
- `kvshare`: the server has half of the CPUs, `kvshare provider` the other half, each as many threads.
  `kvshare engine` takes the prompt and hands it over. It and this program share the provider's CPUs.

    python -m benchmarks.stall [--tokens N ...] [--streams N ...] [--repetitions N] [--model GGUF] [--json]
                               [--plot DIR]

The routes take turns. Every repetition has a prompt of its own and empty slots, and fails unless
exactly the tokens that should be were reused: none on the stock route, all but the last one on the
other. The window is from the arrival of the prompt, when its request is sent, to its first token; a
gap counts, as a whole, if its middle lies there. So the one in which the last token of the prompt is
evaluated beside the stream counts. `p99_gap_ms` is the nearest rank: the largest gap, where there are
few.

With `--streams` there are more streams, on slots 0 and up; the figures are those of the one that stalled
longest. Each length of `--tokens` is measured with each number of streams. The report has the first of
these points as ever, and all of them in `points`; `--plot` draws them.

Two fields say what is ordinary, for comparison with `max_gap_ms`. A stream slows down by itself as it
grows, and it grows where it goes on: `late_gap_ms` is the end of the window. And a step that evaluates
a token of each sequence, such as the one with the prompt's last token, costs what both cost:
`both_gap_ms` is the time behind the window, in which both generate.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import os
import random
import socket
import statistics
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import measure
from kvshare import build, fds, fetch, models, processes
from kvshare.cli import progress
from kvshare.errors import DeadlineExceededError, KvshareError, LocalProtocolError, RemoteProtocolError

ROUTES = ("stock", "kvshare")
DEFAULT_TOKENS = 3300
DEFAULT_STREAMS = 1
DEFAULT_REPETITIONS = 3
STEADY_S = 3.0  # of the stream, before the prompt arrives
TIMEOUT_S = 600.0  # one core takes minutes for 8,000 tokens
MIN_TOKENS = 600  # the engine leaves shorter prompts to the server
N_STREAM = 4096  # tokens that a stream has room for
N_SLOTS = 4  # of a llama-server that is not told otherwise; they share their cells
N_LATE = 20  # gaps at the end of the window
N_ANSWER = 12  # tokens of the answer to the long prompt

# its answer is ASCII: a character of several tokens would come as one event, and look like a gap
STREAM_PROMPT = "Count upwards without a word: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,"
WORDS = (
    "river stone copper window morning station letter garden winter engine harbour silver paper forest"
    " kitchen bridge market candle mountain summer teacher village signal blanket doctor island"
).split()


# -- numbers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What one repetition measured.

    Attributes:
        max_gap_ms: longest time between two tokens of the stream, in the window.
        p99_gap_ms: 99th percentile of these.
        median_gap_ms: median of these.
        late_gap_ms: median of the last ones, when the stream has grown and is slower by itself.
        both_gap_ms: median of those behind the window, until the answer to the prompt ends.
        n_gaps: how many there were in the window.
        max_gap_at_ms: when the longest one began, counted from the arrival of the prompt.
        idle_gap_ms: median time between two tokens before the prompt arrived.
        idle_max_gap_ms: longest of these.
        ttft_ms: from the arrival of the prompt to its first token.
    """

    max_gap_ms: float
    p99_gap_ms: float
    median_gap_ms: float
    late_gap_ms: float
    both_gap_ms: float
    n_gaps: int
    max_gap_at_ms: float
    idle_gap_ms: float
    idle_max_gap_ms: float
    ttft_ms: float

    @classmethod
    def of(cls, times: Sequence[float], arrival: float, first: float, last: float) -> Run:
        """Evaluate a stream.

        Args:
            times: when its tokens came, seconds.
            arrival: when the long prompt was sent.
            first: when its first token came.
            last: when its last token came.

        Raises:
            RemoteProtocolError: the stream did not run all the time.
        """
        idle = gaps(times, -math.inf, arrival)
        window = gaps(times, arrival, first)
        both = gaps(times, first, last)
        if not (idle and window and both) or times[-1] <= last:
            raise RemoteProtocolError("the stream did not run from before the prompt to behind its answer")
        at, longest = max(window, key=lambda gap: gap[1])
        return cls(
            max_gap_ms=longest,
            p99_gap_ms=percentile([gap for _, gap in window], 99),
            median_gap_ms=statistics.median(gap for _, gap in window),
            late_gap_ms=statistics.median(gap for _, gap in window[-N_LATE:]),
            both_gap_ms=statistics.median(gap for _, gap in both),
            n_gaps=len(window),
            max_gap_at_ms=(at - arrival) * 1000,
            idle_gap_ms=statistics.median(gap for _, gap in idle),
            idle_max_gap_ms=max(gap for _, gap in idle),
            ttft_ms=(first - arrival) * 1000,
        )


def gaps(times: Sequence[float], start: float, end: float) -> list[tuple[float, float]]:
    """Return the times between neighbours whose middle lies in a window.

    Args:
        times: ascending, seconds.
        start: of the window.
        end: of the window.

    Returns:
        When each gap begins, seconds, and its length, milliseconds.
    """
    return [(a, (b - a) * 1000) for a, b in itertools.pairwise(times) if start < (a + b) / 2 <= end]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that at least so many percent of the values do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def summary(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Return the medians over the repetitions, their spread, and how much shorter the stall is."""
    report: dict[str, Any] = {}
    for route, measured in runs.items():
        each = [{name: round(value, 3) for name, value in asdict(run).items()} for run in measured]
        medians = {name: statistics.median(run[name] for run in each) for name in each[0]}
        spread = {name: [min(run[name] for run in each), max(run[name] for run in each)] for name in each[0]}
        report[route] = {**medians, "repetitions": len(each), "spread": spread, "runs": each}
    report["ratio_max_gap"] = round(report["stock"]["max_gap_ms"] / report["kvshare"]["max_gap_ms"], 1)
    return report


# -- CPUs --------------------------------------------------------------------------------------


def split(cores: Sequence[Collection[int]]) -> tuple[list[int], list[int]]:
    """Give one half of the CPUs to the server and the other to the provider.

    Args:
        cores: CPUs of each core. Cores stay whole, unless there is only one.

    Raises:
        LocalProtocolError: there is one CPU only.
    """
    if len(cores) == 1:
        cores = [{cpu} for cpu in cores[0]]
    if len(cores) < 2:
        raise LocalProtocolError(
            "this process may use one CPU only: server and provider would take turns on it, and the stream"
            " would wait for the provider instead of the server",
            hint="run it where at least two CPUs are usable",
        )
    ordered = sorted(sorted(core) for core in cores)
    half = len(ordered) // 2
    return (
        [cpu for core in ordered[:half] for cpu in core],
        [cpu for core in ordered[half:] for cpu in core],
    )


def usable_cores() -> list[set[int]]:
    """Return the CPUs that this process may use, those of one core together."""
    usable = os.sched_getaffinity(0)
    cores: dict[str, set[int]] = {}
    for cpu in usable:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            core = siblings.read_text().strip()
        except OSError:  # not told: it is a core
            core = str(cpu)
        cores.setdefault(core, set()).add(cpu)
    return list(cores.values())


@contextlib.contextmanager
def pinned(cpus: Collection[int]) -> Iterator[None]:
    """Run this thread, and those that it starts, on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- requests ----------------------------------------------------------------------------------


class Completion:
    """A streamed completion.

    *Ownership*: leaving the block closes the connection, and with it the request.

    Attributes:
        headers: of the answer.
    """

    def __init__(self, url: str, body: Mapping[str, Any]) -> None:
        where = urllib.parse.urlsplit(url)
        assert where.hostname
        self._connection = http.client.HTTPConnection(where.hostname, where.port, timeout=TIMEOUT_S)
        payload = json.dumps({"temperature": 0, "ignore_eos": True, "stream": True, **body})
        self._connection.connect()
        self._socket: socket.socket = self._connection.sock
        self.sent = time.perf_counter()
        try:
            self._connection.request("POST", "/completion", payload, {"Content-Type": "application/json"})
        except BaseException:
            self._connection.close()
            raise

    def __iter__(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the events of the answer as they come, and when."""
        answer = self._connection.getresponse()
        self.headers = dict(answer.headers)
        if answer.status != 200:
            raise RemoteProtocolError(f"completion: status {answer.status}: {answer.read(500)!r}")
        for line in answer:
            now = time.perf_counter()
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RemoteProtocolError(f"completion: {event['error']}")
                yield now, event

    def hang_up(self) -> None:
        """End the connection under a thread that reads it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Completion:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()


class Stream(threading.Thread):
    """The stream that is watched: notes when its tokens come.

    Attributes:
        times: of its tokens, seconds.
    """

    def __init__(self, url: str, id_slot: int = 0) -> None:
        super().__init__(name="stream", daemon=True)
        self.times: list[float] = []
        self._failure: BaseException | None = None
        self._hung_up = False
        body = {"prompt": STREAM_PROMPT, "n_predict": N_STREAM, "id_slot": id_slot}
        self._completion = Completion(url, body)

    def run(self) -> None:
        try:
            for i, (now, event) in enumerate(self._completion, start=1):
                if event["stop"]:
                    raise RemoteProtocolError(f"the stream ended after {event['tokens_predicted']} tokens")
                if event["tokens_predicted"] != i:
                    raise RemoteProtocolError("an event of the stream is not one token")
                self.times.append(now)
        except BaseException as error:
            self._failure = error

    def wait_until(self, t: float) -> None:
        """Let it run until a time, and one token longer.

        Raises:
            RemoteProtocolError: it ended before.
            DeadlineExceededError: no token comes any more.
        """
        deadline = time.perf_counter() + TIMEOUT_S
        while not self.times or self.times[-1] <= t:
            if not self.is_alive():
                raise self._failure or RemoteProtocolError("the stream ended too early")
            if time.perf_counter() > deadline:
                raise DeadlineExceededError("the stream does not go on")
            time.sleep(0.05)

    def __enter__(self) -> Stream:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._completion.hang_up()
        self.join()
        with self._completion:
            pass


def call(url: str, path: str, body: Mapping[str, Any]) -> Any:
    """Return the answer of a server."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with processes.open_url(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise RemoteProtocolError(f"{path}: status {error.code}: {error.read(500)!r}") from error


# -- the measurement ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """One route, ready to be measured.

    Attributes:
        route: its name.
        server: URL of the llama-server, where the streams run.
        front: URL that the long prompt is sent to.
        n_slots: slots of the server.
        cpus: CPUs for this program.
    """

    route: str
    server: str
    front: str
    n_slots: int
    cpus: Collection[int]

    @classmethod
    def at(cls, route: str, server: str, front: str, cpus: Collection[int]) -> Bench:
        """Ask the server for its slots."""
        with processes.open_url(f"{server}/props", timeout=TIMEOUT_S) as answer:
            return cls(route, server, front, json.load(answer)["total_slots"], cpus)

    def measure(self, prompt: Sequence[int], n_streams: int = 1) -> Run:
        """Run streams, send a prompt, and return what the one felt that stalled longest.

        Raises:
            RemoteProtocolError: it was not what this route is about, so that its numbers mean nothing.
        """
        for id_slot in range(self.n_slots):
            call(self.server, f"/slots/{id_slot}?action=erase", {})
        with pinned(self.cpus), contextlib.ExitStack() as stack:
            streams = [stack.enter_context(Stream(self.server, i)) for i in range(n_streams)]
            for stream in streams:
                stream.wait_until(0)  # its first token
            start = max(stream.times[0] for stream in streams)
            for stream in streams:
                stream.wait_until(start + STEADY_S)
            answer = {"prompt": list(prompt), "n_predict": N_ANSWER}
            with Completion(self.front, answer) as completion:
                events = list(completion)
            if not events or "timings" not in events[-1][1]:
                raise RemoteProtocolError("the answer to the long prompt is not whole")
            (first, _), (last, end) = events[0], events[-1]
            for stream in streams:
                stream.wait_until(last)
        self._check(len(prompt), completion.headers, end["timings"])
        # before all of them ran, it was not what is compared
        runs = [
            Run.of([t for t in stream.times if t >= start], completion.sent, first, last)
            for stream in streams
        ]
        return max(runs, key=lambda run: run.max_gap_ms)

    def _check(self, n_tokens: int, headers: Mapping[str, str], timings: Mapping[str, Any]) -> None:
        if self.route == "kvshare" and headers.get("X-Kvshare-Path") != "handoff":
            path, reason = headers.get("X-Kvshare-Path"), headers.get("X-Kvshare-Reason")
            raise RemoteProtocolError(f"the prompt was not handed over: it went {path}, {reason}")
        expected = n_tokens - 1 if self.route == "kvshare" else 0
        if timings["cache_n"] != expected or timings["cache_n"] + timings["prompt_n"] != n_tokens:
            raise RemoteProtocolError(
                f"{self.route}: {timings['cache_n']} of {n_tokens} tokens were reused and"
                f" {timings['prompt_n']} processed, expected were {expected} and {n_tokens - expected}"
            )


def prompts(server: str, n_tokens: int, n: int, seed: int = 1) -> list[list[int]]:
    """Return different prompts of exactly so many tokens, others for each seed."""
    rng = random.Random(seed)
    texts = [" ".join(rng.choices(WORDS, k=n_tokens)) for _ in range(n)]  # a word is at least a token
    return [call(server, "/tokenize", {"content": text})["tokens"][:n_tokens] for text in texts]


def measure_all(
    model: Path,
    lengths: Sequence[int],
    numbers: Sequence[int],
    repetitions: int,
    show: fetch.Progress = fetch.silent,
) -> dict[str, Any]:
    """Run the benchmark; return the report that `--json` prints.

    Args:
        model: GGUF file.
        lengths: of the long prompt, tokens.
        numbers: of streams.
        repetitions: of each route, for each length and number.
        show: told about the steps.

    Raises:
        KvshareError: a process failed, or a repetition was not what it should be.
    """
    cores = usable_cores()
    ours, theirs = split(cores)
    program = build.build_target(build.SERVER, progress=show)
    n_ctx = -(-(max(lengths) + max(numbers) * N_STREAM + 512) // 256) * 256
    points = []
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fds.private_directory())
        share, saved = folder / "share", folder / "saved"
        share.mkdir(mode=0o700)
        saved.mkdir()
        # a stock server erases slots only if it may save them
        options = ["--ctx-size", str(n_ctx), "--slot-save-path", str(saved)]
        if max(numbers) >= N_SLOTS:
            options += ["--parallel", str(max(numbers) + 1), "--kv-unified"]
        options.append("--threads")
        show("starting the processes", 0, None)
        stock = stack.enter_context(
            processes.llama_server(
                program, model, folder / "stock.log", *options, str(len(ours) + len(theirs))
            )
        )
        server = stack.enter_context(
            processes.llama_server(
                program,
                model,
                folder / "server.log",
                *options,
                str(len(ours)),
                share_dir=share,
                cpus=ours,
            )
        )
        listen = share / "provider.sock"
        threads = ("--threads", str(len(theirs)))
        patient = ("--provider-timeout", f"{TIMEOUT_S:.0f}")
        stack.enter_context(processes.provider(model, listen, folder / "provider.log", *threads, cpus=theirs))
        front = stack.enter_context(
            processes.engine(server.url, listen, folder / "engine.log", *patient, cpus=theirs)
        )
        benches = (
            Bench.at("stock", stock.url, stock.url, [*ours, *theirs]),
            Bench.at("kvshare", server.url, front.url, theirs),
        )
        for seed, (n_tokens, n_streams) in enumerate(itertools.product(lengths, numbers), start=1):
            what = f"{n_tokens:,} tokens, {plural(n_streams)}"
            runs: dict[str, list[Run]] = {route: [] for route in ROUTES}
            fresh = iter(prompts(stock.url, n_tokens, repetitions * len(benches), seed))
            for i in range(repetitions):
                for bench in benches:
                    show(f"{what}: repetition {i + 1} of {repetitions}, {bench.route}", 0, None)
                    runs[bench.route].append(bench.measure(next(fresh), n_streams))
            points.append({**summary(runs), "n_tokens": n_tokens, "n_streams": n_streams})
    return {
        **points[0],
        "model": model.name,
        "repetitions": repetitions,
        "cpus": {"stock": [*ours, *theirs], "server": ours, "provider": theirs},
        "points": points,
    }


def plural(n_streams: int) -> str:
    """Return how many streams there are, in words."""
    return "1 stream" if n_streams == 1 else f"{n_streams} streams"


def _table(report: Mapping[str, Any]) -> Table:
    who = "a stream" if report["n_streams"] == 1 else f"the slowest of {plural(report['n_streams'])}"
    table = Table(title=f"{who} while {report['n_tokens']:,} tokens are prefilled, medians (ms)")
    table.add_column("")
    for route in ROUTES:
        table.add_column(route, justify="right")
    for name, text in (
        ("idle_gap_ms", "gap before the prompt, median"),
        ("idle_max_gap_ms", "gap before the prompt, largest"),
        ("median_gap_ms", "gap meanwhile, median"),
        ("late_gap_ms", "gap at the end of it, median"),
        ("p99_gap_ms", "gap meanwhile, p99"),
        ("max_gap_ms", "gap meanwhile, largest"),
        ("both_gap_ms", "gap while both generate, median"),
        ("ttft_ms", "first token of the prompt"),
    ):
        table.add_row(text, *(f"{report[route][name]:,.0f}" for route in ROUTES))
    return table


def plot(report: Mapping[str, Any], folder: Path) -> None:
    """Draw the largest gap of both routes at each point."""
    pyplot = measure.pyplot()
    points = report["points"]
    figure, axes = pyplot.subplots(figsize=(max(4.5, 1.5 + 1.3 * len(points)), 4.5))
    for i, (route, text) in enumerate(
        (("stock", "stock llama-server, all CPUs"), ("kvshare", "kvshare, half of the CPUs each"))
    ):
        gaps_ms = [point[route]["max_gap_ms"] for point in points]
        spread = [point[route]["spread"]["max_gap_ms"] for point in points]
        bars = [
            [gap - low for gap, (low, _) in zip(gaps_ms, spread, strict=True)],
            [high - gap for gap, (_, high) in zip(gaps_ms, spread, strict=True)],
        ]
        drawn = axes.bar(
            [x + 0.4 * (i - 0.5) for x in range(len(points))], gaps_ms, 0.38, yerr=bars, capsize=3, label=text
        )
        axes.bar_label(drawn, [f"{gap:,.0f}" for gap in gaps_ms], padding=2, fontsize="small")
    ends = [gap for point in points for route in ROUTES for gap in point[route]["spread"]["max_gap_ms"]]
    axes.set_yscale("log")
    axes.set_ylim(min(ends) / 4, max(ends) * 5)  # room for the legend
    axes.set_ylabel("ms, median, smallest and largest")
    labels = [f"{point['n_tokens']:,} tokens\n{plural(point['n_streams'])}" for point in points]
    axes.set_xticks(range(len(points)), labels)
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_title("longest stall of a stream while a prompt is prefilled")
    axes.legend(fontsize="small")
    measure.save_figure(figure, folder, "stall")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stall", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture; needs matplotlib")
    for name, default, text in (
        ("tokens", DEFAULT_TOKENS, "length of the long prompt"),
        ("streams", DEFAULT_STREAMS, "streams that run meanwhile"),
    ):
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs="+",
            default=[default],
            metavar="N",
            help=f"{text} (default: {default})",
        )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=DEFAULT_REPETITIONS,
        metavar="N",
        help="of each route (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if min(args.tokens) < MIN_TOKENS:
        parser.error(f"--tokens must be at least {MIN_TOKENS}")
    if min(args.streams) < 1:
        parser.error("--streams must be at least 1")
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    try:
        if args.plot:
            measure.pyplot()
        with progress.shown() as show:
            split(usable_cores())  # before anything is compiled
            model = args.model or models.fetch("smollm2", show)
            report = measure_all(model, args.tokens, args.streams, args.repetitions, show)
    except KvshareError as error:
        return measure.complain("stall", error)
    if args.plot:
        plot(report, args.plot)
    if args.json:
        print(json.dumps(report, indent=1))
        return 0
    out = Console()
    for point in report["points"]:
        out.print(_table(point))
        out.print(f"largest gap, stock / kvshare: {point['ratio_max_gap']:,.0f}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
