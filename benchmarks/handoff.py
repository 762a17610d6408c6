"""What a handoff costs, against everything that would be used in its place.

A decoder shares a cache of the size that 7B-class models have (`benchmarks.geometry`), a second process
fills the rows of a prompt, and the decoder adopts them. The rows come from a template: nothing here is
about prefill. That process maps the cache once and keeps it mapped; see `benchmarks.handoff_provider`.

    python -m benchmarks.handoff [--json] [--plot DIR] [--repetitions N] [--tokens N ...]
                                 [--route in-process server]

Two routes, one after the other. In process, the provider vouches as llama.cpp's own does, with metadata
and a digest from `llama_kv_share_publish`. Through llama-server (`--kv-share`) it vouches without metadata
(`Offer.complete`), and the decoder makes them from the tokens.

In each repetition every length has its handoff and its peers, in another order each time. All figures are
medians; `quartiles` has the first and the third one. Of each length:

- `share_us`: until the share is issued and sent, `adopt_us`; `handoff_us` is their sum. In process, the
  connection is there already, and `send_us` is what of `share_us` it takes to send. Through the server, they
  are what a client sees that is connected and has its body ready; `share_server_us` and `adopt_server_us` is
  what the server says itself, `server_us` their sum.
- `first_token_ms`: decoding one token after the adoption. `steady_token_ms`: the median of the next ones.
  Through the server, by its own clock; `first_token_http_ms` is from the request to its first event.
- `page_faults`: of the decoder, from the beginning of the adoption to that first token.
- `bytes_moved`: K and V that the adoption had to move.
- `cold`: the same of the very first handoff of this length, when neither process has touched the rows.
  Lengths go upwards, so what a shorter prompt has touched is not cold.

The peers get the same state into the decoder. What it takes to make it is not in `peers_ms`; `saves_ms`
has it, taken once:

- `file_memory`, `file_disk`: llama.cpp reads a state file, in /dev/shm if that is memory, and on a disk,
  with nothing of it in the page cache.
- `socket_copy`: another process writes the state bytes to a unix socket, the decoder reads and enters them.
- `shm_copy`: the decoder enters them from shared memory: one copy.
- `slot_restore`: llama-server's slot restore over HTTP, from a file in memory if there is such a place.

The first four are measured in process, the last one through the server, and stand in the runs of both
routes. What cannot be measured here, or is of a route that was not run, is null.

`ratio_vs_file_memory` is how many handoffs fit into the restore of a file in memory; `ratio_first_token` is
the first token against a steady one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import itertools
import json
import mmap
import os
import statistics
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from rich.table import Table

from benchmarks import geometry, measure
from benchmarks.handoff_provider import ProviderProcess, prompt
from kvshare import build, fds, fetch, processes
from kvshare.cli import progress
from kvshare.decoder import Decoder, Share
from kvshare.errors import KvshareError, RemoteProtocolError

IN_PROCESS, SERVER = ROUTES = ("in-process", "server")
TITLES = {IN_PROCESS: "in process", SERVER: "through llama-server"}
PEERS = ("file_memory", "file_disk", "socket_copy", "shm_copy", "slot_restore")
DEFAULT_TOKENS = (251, 3189, 12722)
DEFAULT_REPETITIONS = 20
N_STEADY = 5
MAX_TOKENS = geometry.N_CELLS - N_STEADY - 2
TIMEOUT_S = 120.0
SHM = Path("/dev/shm")
ANSWER = ord("a")  # the token that the server is told to say: any other byte may be half a character

Figures = dict[str, float]


def nothing() -> None:
    """Do nothing after an adoption."""


class Bench(Protocol):
    """A route that is ready to be measured.

    Attributes:
        peers: what is measured beside handoffs, by name; each takes a length and returns seconds.
        saves_ms: what it took to make the states for them, by name and length.
    """

    peers: dict[str, Callable[[int], float]]
    saves_ms: dict[str, dict[int, float]]

    def handoff(self, n_tokens: int, adopted: Callable[[], None] = nothing) -> Figures:
        """Hand a prompt over, decode some tokens, and return the figures; `adopted` is called between."""

    def keep(self, n_tokens: int) -> None:
        """Save what the decoder holds, for the peers."""


# -- in process --------------------------------------------------------------------------------


class InProcess:
    """A decoder in this process."""

    def __init__(self, decoder: Decoder, provider: ProviderProcess, folders: Mapping[str, Path]):
        self._decoder = decoder
        self._provider = provider
        self._connection = provider.connect()
        self._share: Share | None = None  # the last one
        self._folders = folders
        self._states = {name: dict[int, Any]() for name in ("bytes", "connections")}
        self._received = np.zeros(0, np.uint8)
        self.peers = {name: self._file_peer(folder) for name, folder in folders.items()}
        self.peers |= {"socket_copy": self._socket_copy, "shm_copy": self._shm_copy}
        self.saves_ms = {name: dict[int, float]() for name in self.peers}

    def handoff(self, n_tokens: int, adopted: Callable[[], None] = nothing) -> Figures:
        """Hand a prompt over; see `Bench`."""
        context, tokens = self._decoder.context, prompt(n_tokens)
        context.clear()
        share, steps = self._provider.hand_over(self._decoder, self._connection, n_tokens)
        share_us = steps["share_us"] + steps["send_us"]
        faults = measure.page_faults(os.getpid())
        start = time.perf_counter()
        done = self._decoder.adopt(share, tokens)
        adopt_us = (time.perf_counter() - start) * 1e6
        self._share = share
        adopted()
        tokens_ms = []
        for i in range(1 + N_STEADY):
            start = time.perf_counter()
            context.decode([ANSWER], position=n_tokens + i, logits=True)
            context.synchronize()
            tokens_ms.append((time.perf_counter() - start) * 1000)
            if i == 0:
                faults = measure.page_faults(os.getpid()) - faults
        return {
            "share_us": share_us,
            "send_us": steps["send_us"],
            "adopt_us": adopt_us,
            "handoff_us": share_us + adopt_us,
            "first_token_ms": tokens_ms[0],
            "steady_token_ms": statistics.median(tokens_ms[1:]),
            "ratio_first_token": tokens_ms[0] / statistics.median(tokens_ms[1:]),
            "page_faults": faults,
            "bytes_moved": done.bytes_moved,
        }

    def keep(self, n_tokens: int) -> None:
        """Save what the decoder holds, for the peers; let the provider vouch with its metadata."""
        assert self._share is not None
        self._provider.vouch_as(self._decoder, self._share, n_tokens)
        context, tokens = self._decoder.context, prompt(n_tokens)
        for name, folder in self._folders.items():
            start = time.perf_counter()
            context.save(folder / str(n_tokens), tokens)
            with (folder / str(n_tokens)).open("rb") as file:
                if name == "file_disk":
                    os.fsync(file.fileno())
            self.saves_ms[name][n_tokens] = (time.perf_counter() - start) * 1000
        llama = context.library.llama
        size = llama.llama_state_seq_get_size(context.pointer, 0)
        with fds.memfd_create("kvshare-state", size) as fd:
            state = np.frombuffer(mmap.mmap(fd.fileno(), size), np.uint8)
            start = time.perf_counter()
            llama.llama_state_seq_get_data(context.pointer, _pointer(state), size, 0)
            elapsed = (time.perf_counter() - start) * 1000
            self.saves_ms["socket_copy"][n_tokens] = self.saves_ms["shm_copy"][n_tokens] = elapsed
            connection = fds.connect_unix(self._provider.socket)
            self._provider.tell(job="hold", n_tokens=n_tokens)
            fds.send_message(connection, b"{}", [fd.fileno()])
            self._provider.answer()
        connection.setblocking(True)
        self._states["bytes"][n_tokens] = state
        self._states["connections"][n_tokens] = connection
        if size > self._received.nbytes:
            self._received = np.ones(size, np.uint8)

    def close(self) -> None:
        """Close the connections."""
        for connection in (self._connection, *self._states["connections"].values()):
            connection.close()

    def _file_peer(self, folder: Path) -> Callable[[int], float]:
        def restore(n_tokens: int) -> float:
            path = folder / str(n_tokens)
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self._decoder.context.clear()
            start = time.perf_counter()
            self._decoder.context.restore(path)
            return time.perf_counter() - start

        return restore

    def _socket_copy(self, n_tokens: int) -> float:
        connection = self._states["connections"][n_tokens]
        state = self._received[: self._states["bytes"][n_tokens].nbytes]
        left = memoryview(state.data)
        self._decoder.context.clear()
        start = time.perf_counter()
        self._provider.tell(job="send", n_tokens=n_tokens)
        while left:
            left = left[connection.recv_into(left) :]
        self._enter(state)
        elapsed = time.perf_counter() - start
        self._provider.answer()
        return elapsed

    def _shm_copy(self, n_tokens: int) -> float:
        self._decoder.context.clear()
        start = time.perf_counter()
        self._enter(self._states["bytes"][n_tokens])
        return time.perf_counter() - start

    def _enter(self, state: Any) -> None:
        context = self._decoder.context
        n = context.library.llama.llama_state_seq_set_data(context.pointer, _pointer(state), state.nbytes, 0)
        if n != state.nbytes:
            raise RemoteProtocolError(f"llama.cpp took {n} of {state.nbytes} bytes of a state")


def _pointer(data: Any) -> Any:
    return data.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@contextlib.contextmanager
def in_process(model: Path, lengths: Sequence[int], show: fetch.Progress) -> Iterator[Bench]:
    """Make a decoder in this process, and a provider in another."""
    with contextlib.ExitStack() as stack:
        show("loading the model", 0, None)
        decoder = stack.enter_context(Decoder.open(model, n_ctx=geometry.N_CELLS))
        socket = stack.enter_context(fds.private_directory()) / "provider.sock"
        provider = stack.enter_context(ProviderProcess(socket, max(lengths)))
        folders = {name: stack.enter_context(folder) for name, folder in _folders().items()}
        bench = InProcess(decoder, provider, folders)
        stack.callback(bench.close)
        yield bench


def _folders() -> dict[str, contextlib.AbstractContextManager[Path]]:
    """Return folders for the files, by the name of the peer; of memory and disk only those that are here."""
    places = {"file_memory": [SHM], "file_disk": [Path(tempfile.gettempdir()), Path("/var/tmp")]}
    found: dict[str, contextlib.AbstractContextManager[Path]] = {}
    for name, each in places.items():
        fits = [
            place
            for place in each
            if place.is_dir() and measure.is_in_memory(place) == (name == "file_memory")
        ]
        if fits:
            found[name] = _folder(fits[0])
    return found


@contextlib.contextmanager
def _folder(place: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvshare-", dir=place) as name:
        yield Path(name)


# -- through llama-server ----------------------------------------------------------------------


class Client:
    """A client of a server."""

    def __init__(self, url: str) -> None:
        where = urllib.parse.urlsplit(url)
        assert where.hostname
        self._connection = http.client.HTTPConnection(where.hostname, where.port, timeout=TIMEOUT_S)

    def post(self, path: str, **body: Any) -> tuple[dict[str, Any], float]:
        """Ask on an open connection, with a body that is made before; return the answer and its seconds."""
        payload = json.dumps(body)
        self._connection.close()  # servers hang up on clients that wait
        self._request("GET", "/health").read()
        start = time.perf_counter()
        content = self._request("POST", path, payload).read()
        elapsed = time.perf_counter() - start
        found: dict[str, Any] = json.loads(content)
        return found, elapsed

    def events(self, path: str, **body: Any) -> Iterator[tuple[dict[str, Any], float]]:
        """Ask for a stream; yield each event and when it came, seconds since the request."""
        payload = json.dumps({**body, "stream": True})
        self._connection.close()
        start = time.perf_counter()
        for line in self._request("POST", path, payload):
            if line.startswith(b"data: {"):
                yield json.loads(line[6:]), time.perf_counter() - start

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _request(self, method: str, path: str, payload: str | None = None) -> http.client.HTTPResponse:
        self._connection.request(method, path, payload, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise RemoteProtocolError(f"{path}: status {answer.status}: {answer.read(500)!r}")
        return answer


class Server:
    """A llama-server; its slot 0."""

    def __init__(self, server: processes.Running, provider: ProviderProcess) -> None:
        self._pid = server.pid
        self._client = Client(server.url)
        self._provider = provider
        self.peers: dict[str, Callable[[int], float]] = {"slot_restore": self._slot_restore}
        self.saves_ms = {"slot_restore": dict[int, float]()}

    def handoff(self, n_tokens: int, adopted: Callable[[], None] = nothing) -> Figures:
        """Hand a prompt over; see `Bench`."""
        tokens = list(prompt(n_tokens))
        self._slot("erase")
        shared, share_s = self._slot("share", socket=str(self._provider.socket), n_tokens=n_tokens)
        self._provider.ask(job="fill", n_tokens=n_tokens, accept=True)
        faults = measure.page_faults(self._pid)
        done, adopt_s = self._slot("adopt", share_id=shared["share_id"], tokens=tokens)
        adopted()
        timings: list[dict[str, float]] = []
        first_s = 0.0
        for event, at in self._client.events(
            "/completion",
            prompt=[*tokens, ANSWER],
            id_slot=0,
            n_predict=1 + N_STEADY,
            temperature=0,
            ignore_eos=True,
            logit_bias=[[ANSWER, 1000.0]],
            timings_per_token=True,
        ):
            if not timings:
                first_s = at
                faults = measure.page_faults(self._pid) - faults
            timings.append(event["timings"])
        first, last = timings[0], timings[-1]
        if last["cache_n"] != n_tokens or last["prompt_n"] != 1 or last["predicted_n"] != 1 + N_STEADY:
            raise RemoteProtocolError(f"of {n_tokens} adopted tokens the server made: {last}")
        # the first answered token is of the step that evaluated the prompt's last one
        steady = statistics.median(
            after["predicted_ms"] - before["predicted_ms"]
            for before, after in itertools.pairwise(timings)
            if after["predicted_n"] == before["predicted_n"] + 1
        )
        return {
            "share_us": share_s * 1e6,
            "adopt_us": adopt_s * 1e6,
            "handoff_us": (share_s + adopt_s) * 1e6,
            "share_server_us": shared["t_us"],
            "adopt_server_us": done["t_us"],
            "server_us": shared["t_us"] + done["t_us"],
            "first_token_ms": first["prompt_ms"],
            "first_token_http_ms": first_s * 1000,
            "steady_token_ms": steady,
            "ratio_first_token": first["prompt_ms"] / steady,
            "page_faults": faults,
            "bytes_moved": done["bytes_moved"],
        }

    def keep(self, n_tokens: int) -> None:
        """Save what the slot holds."""
        _, elapsed = self._slot("save", filename=str(n_tokens))
        self.saves_ms["slot_restore"][n_tokens] = elapsed * 1000

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _slot_restore(self, n_tokens: int) -> float:
        self._slot("erase")
        answer, elapsed = self._slot("restore", filename=str(n_tokens))
        if answer["n_restored"] != n_tokens:
            raise RemoteProtocolError(f"{answer['n_restored']} of {n_tokens} tokens were restored")
        return elapsed

    def _slot(self, action: str, **body: Any) -> tuple[dict[str, Any], float]:
        return self._client.post(f"/slots/0?action={action}", **body)


@contextlib.contextmanager
def through_server(model: Path, lengths: Sequence[int], show: fetch.Progress) -> Iterator[Bench]:
    """Start a llama-server that shares its cache, and a provider."""
    program = build.build_target(build.SERVER, progress=show)
    with contextlib.ExitStack() as stack:
        show("starting the server", 0, None)
        share = stack.enter_context(fds.private_directory())
        saved = stack.enter_context(_folders().get("file_memory", _folder(None)))
        options = {
            "--ctx-size": geometry.N_CELLS,
            "--parallel": 1,
            "--cache-ram": 0,  # it would copy what is erased
            "--slot-save-path": saved,
        }
        server = stack.enter_context(
            processes.llama_server(
                program,
                model,
                share / "server.log",
                *(str(word) for option in options.items() for word in option),
                share_dir=share,
            )
        )
        provider = stack.enter_context(ProviderProcess(share / "provider.sock", max(lengths)))
        bench = Server(server, provider)
        stack.callback(bench.close)
        yield bench


BENCHES = {IN_PROCESS: in_process, SERVER: through_server}


# -- the measurement ---------------------------------------------------------------------------


def measure_route(
    bench: Bench, route: str, lengths: Sequence[int], repetitions: int, show: fetch.Progress
) -> list[dict[str, Any]]:
    """Measure all lengths on one route; return its part of the report.

    Raises:
        KvshareError: a process failed, or did not do what is measured.
    """
    cold: dict[int, Figures] = {}
    for n in lengths:
        show(f"{route}: first handoff of {n:,} tokens", 0, None)
        cold[n] = bench.handoff(n)
    for n in lengths:
        show(f"{route}: saving {n:,} tokens for the peers", 0, None)
        bench.handoff(n, adopted=lambda n=n: bench.keep(n))  # type: ignore[misc]
    handoffs: dict[int, list[Figures]] = {n: [] for n in lengths}
    peers: dict[int, list[Figures]] = {n: [] for n in lengths}
    names = list(bench.peers)
    for i in range(repetitions):
        for n in lengths:
            show(f"{route}: repetitions", i, repetitions)
            turn = i % (len(names) + 1)
            found = {name: bench.peers[name](n) * 1000 for name in names[turn:]}
            handoffs[n].append(bench.handoff(n))
            found |= {name: bench.peers[name](n) * 1000 for name in names[:turn]}
            peers[n].append({name: found[name] for name in names})
    return [
        {
            "n_tokens": n,
            "route": route,
            **measure.medians(handoffs[n]),
            "peers_ms": measure.medians(peers[n]),
            "saves_ms": {name: round(saves[n], 3) for name, saves in bench.saves_ms.items()},
            "quartiles": {**measure.quartiles(handoffs[n]), "peers_ms": measure.quartiles(peers[n])},
            "cold": {name: round(value, 3) for name, value in cold[n].items()},
        }
        for n in lengths
    ]


def measure_all(
    lengths: Sequence[int], routes: Sequence[str], repetitions: int, show: fetch.Progress = fetch.silent
) -> dict[str, Any]:
    """Run the benchmark; return the report that `--json` prints.

    Args:
        lengths: of the prompts, tokens.
        routes: of `ROUTES`.
        repetitions: of each length.
        show: told about the steps.

    Raises:
        KvshareError: a process failed, or did not do what is measured.
    """
    model = geometry.model(show)
    lengths = sorted(set(lengths))  # what is longer is cold where it is longer
    runs = []
    for route in ROUTES:
        if route in routes:
            with BENCHES[route](model, lengths, show) as bench:
                runs += measure_route(bench, route, lengths, repetitions, show)
    for n in lengths:
        mine = [run for run in runs if run["n_tokens"] == n]
        for part in ("peers_ms", "saves_ms"):
            found: dict[str, float | None] = dict.fromkeys(PEERS)
            for run in mine:
                found |= run[part]
            for run in mine:
                run[part] = found
        spread = {name: ends for run in mine for name, ends in run["quartiles"]["peers_ms"].items()}
        for run in mine:
            run["quartiles"]["peers_ms"] = spread
            restore = run["peers_ms"]["file_memory"]
            run["ratio_vs_file_memory"] = restore and round(restore * 1000 / run["handoff_us"], 1)
    return {
        "geometry": geometry.LAYOUT,
        "repetitions": repetitions,
        "n_cpus": len(os.sched_getaffinity(0)),
        "runs": runs,
    }


# -- what is shown -----------------------------------------------------------------------------


def _tables(report: Mapping[str, Any]) -> Iterator[Table]:
    for route in ROUTES:
        runs = [run for run in report["runs"] if run["route"] == route]
        if not runs:
            continue
        table = Table(title=f"{TITLES[route]}: medians of {report['repetitions']} repetitions, quartiles")
        table.add_column("")
        for run in runs:
            table.add_column(f"{run['n_tokens']:,} tokens", justify="right")
        for name, text in (
            ("share_us", "share (us)"),
            ("send_us", "of that, sending"),
            ("adopt_us", "adopt"),
            ("handoff_us", "handoff"),
            ("server_us", "by the server's clock"),
            ("page_faults", "page faults"),
            ("bytes_moved", "bytes moved"),
            ("first_token_ms", "first token (ms)"),
            ("steady_token_ms", "steady token"),
            ("ratio_first_token", "first / steady"),
        ):
            if name in runs[0]:
                table.add_row(text, *(_cell(run[name], run["quartiles"][name]) for run in runs))
        table.add_row("first / steady, cold", *(f"{run['cold']['ratio_first_token']:,.2f}" for run in runs))
        table.add_section()
        for name in PEERS:
            if runs[0]["peers_ms"][name] is not None:
                cells = (_cell(run["peers_ms"][name], run["quartiles"]["peers_ms"][name]) for run in runs)
                table.add_row(f"{name.replace('_', ' ')} (ms)", *cells)
        ratios = [run["ratio_vs_file_memory"] for run in runs]
        if all(ratios):
            table.add_row("file in memory / handoff", *(f"{ratio:,.0f}" for ratio in ratios), style="bold")
        yield table


def _cell(median: float, quartiles: Sequence[float]) -> str:
    digits = 0 if median >= 100 or median == int(median) else 2
    low, high = (f"{value:,.{digits}f}" for value in quartiles)
    return f"{median:,.{digits}f} [{low} {high}]"


def plot(report: Mapping[str, Any], folder: Path) -> None:
    """Draw handoffs and their peers over the length, one picture for each route."""
    pyplot = measure.pyplot()
    for route in ROUTES:
        runs = [run for run in report["runs"] if run["route"] == route]
        if not runs:
            continue
        lengths = [run["n_tokens"] for run in runs]
        lines = {"handoff": ([run["handoff_us"] / 1000 for run in runs], "o-")}
        spread = {"handoff": [[q / 1000 for q in run["quartiles"]["handoff_us"]] for run in runs]}
        for name in PEERS:
            if runs[0]["peers_ms"][name] is not None:
                lines[name] = [run["peers_ms"][name] for run in runs], "s--"
                spread[name] = [run["quartiles"]["peers_ms"][name] for run in runs]
        figure, axes = pyplot.subplots(figsize=(7, 4.5))
        for name, (ms, style) in lines.items():
            bars = [
                [max(y - low, 0) for y, (low, _) in zip(ms, spread[name], strict=True)],
                [max(high - y, 0) for y, (_, high) in zip(ms, spread[name], strict=True)],
            ]
            label = "share + adopt" if name == "handoff" else name.replace("_", " ")
            axes.errorbar(lengths, ms, yerr=bars, fmt=style, capsize=3, label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="ms, median and quartiles")
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_title(
            f"a prompt's state into the decoder, {TITLES[route]}, {report['geometry']['mib']:,.0f} MiB cache"
        )
        axes.legend()
        measure.save_figure(figure, folder, f"handoff-{route}")
        pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write pictures; needs matplotlib")
    for name, default in (("tokens", DEFAULT_TOKENS), ("repetitions", DEFAULT_REPETITIONS)):
        parser.add_argument(
            f"--{name}",
            type=int,
            nargs="+" if name == "tokens" else None,
            default=default,
            metavar="N",
            help="default: %(default)s",
        )
    parser.add_argument("--route", nargs="+", choices=ROUTES, default=ROUTES, help="default: both")
    args = parser.parse_args(argv)
    if min(args.tokens) < 1 or max(args.tokens) > MAX_TOKENS:
        parser.error(f"--tokens must be from 1 to {MAX_TOKENS}")
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    try:
        if args.plot:
            measure.pyplot()
        with progress.shown() as show:
            report = measure_all(args.tokens, args.route, args.repetitions, show)
    except KvshareError as error:
        return measure.complain("handoff", error)
    if args.plot:
        plot(report, args.plot)
    measure.present(report, _tables(report), as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
