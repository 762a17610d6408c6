"""`kvshare demo`: the main job, in two separately started processes, on a real model."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshare.errors import (
    KvshareError,
    LibraryError,
    LocalProtocolError,
    NotShareableError,
    PeerClosedError,
)

if TYPE_CHECKING:
    from kvshare.cli import Subparsers

DEFAULT_TOKENS = (251, 512, 1024)
MAX_TOKENS = 100_000
CUDA_BACKEND = "libggml-cuda.so"

Rows = tuple[tuple[str, str, str], ...]  # of the table: name, key of a run, unit

_ROWS: Rows = (
    ("local prefill", "local_prefill_ms", "ms"),
    ("provider prefill (other process)", "provider_prefill_ms", "ms"),
    ("share", "share_us", "us"),
    ("adopt", "adopt_us", "us"),
    ("first token after adopt", "first_token_ms", "ms"),
    ("steady token", "steady_token_ms", "ms"),
    ("page faults, adopt to first token", "page_faults", ""),
    ("K, V bytes moved", "bytes_moved", ""),
    ("the same through a file: save", "file_save_ms", "ms"),
    ("the same through a file: restore", "file_restore_ms", "ms"),
    ("size of that file", "file_nbytes", "bytes"),
    ("logits identical to local run", "logits_identical", ""),
    ("text identical to local run", "text_identical", ""),
)

_EPILOG = """\
examples:
  kvshare demo                          prompts of 251, 512 and 1,024 tokens, about a minute
  kvshare demo --tokens 251 3189        lengths of your choice
  kvshare demo --model my.gguf --json   another model, for programs
  kvshare demo --gpu                    model and cache on a GPU, in both processes
  kvshare demo --server                 the same over HTTP, with a llama-server as the decoder

What happens: a decoder process prefills each prompt locally, saves and restores it through a file,
and forgets it (its cache is zeroed). Then a provider process, which was started on its own, maps the
decoder's cache and prefills the same prompt straight into it; the decoder adopts the cells and goes
on. Times are of this machine and this run.

With --gpu the cache lies in the memory of the first CUDA device, and so do the weights, once for each
process; it needs a libllama that was built with CUDA (`kvshare build --cmake-arg=-DGGML_CUDA=ON`).
Memory is that of the host, as ever.

With --server the decoder is the patched llama-server, which is compiled the first time (about 10
minutes on two cores), and the provider is `kvshare provider`. Save and restore are the server's own
slot actions, on a file in the page cache. Times of share, adopt, save and restore are what the server
says they took on the thread that decodes; the rows `over HTTP` are what a client sees. llama.cpp's
restore is not exact for models with a sliding window, so the routes may differ there.

Exit status 0 only if all logits (with --server: logprobs) and texts are identical, no byte was moved,
and, with --server, the request reused all tokens that were handed over.
"""


def register(subparsers: Subparsers) -> None:
    """Add the parser of `kvshare demo`."""
    from kvshare.cli import add_command

    parser = add_command(
        subparsers,
        "demo",
        "run the handoff between two processes and show what it cost",
        epilog=_EPILOG,
        json_help="print one JSON object with all runs",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--server", action="store_true", help="let a llama-server be the decoder, and compare over HTTP"
    )
    where.add_argument("--gpu", action="store_true", help="put model and cache on the first GPU")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=list(DEFAULT_TOKENS),
        metavar="N",
        help=f"prompt lengths (default: {' '.join(map(str, DEFAULT_TOKENS))})",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="compute threads of each process (default: all CPUs)"
    )


def run(args: argparse.Namespace) -> int:
    """Run `kvshare demo`."""
    for n_tokens in args.tokens:
        if not 2 <= n_tokens <= MAX_TOKENS:
            raise LocalProtocolError(f"--tokens {n_tokens} is not in [2, {MAX_TOKENS}]")
    gpu = _gpu() if args.gpu else None
    model = _model(args.model)
    if args.server:
        from kvshare.cli import demo_server, progress

        with progress.shown() as show:
            report = demo_server.measure(model, args.tokens, args.threads, show)
        title, rows = demo_server.TITLE, demo_server.ROWS
    else:
        report = measure(model, args.tokens, args.threads, args.log_level, gpu=gpu is not None)
        title, rows = "one cache, two processes", _ROWS
        if gpu is not None:
            report["gpu"] = gpu
            title = f"one cache on {gpu['name']}, two processes"
    if args.json:
        print(json.dumps(report))
    else:
        _print(report, title, rows)
    return 0 if report["ok"] else 1


def _gpu() -> dict[str, str]:
    """Return what the first GPU is, which has the model and the cache.

    Raises:
        KvshareError: there is none, or its memory cannot be shared, or libllama cannot use it.
    """
    from kvshare._native import cuda, loader

    device, *_ = cuda.driver().devices()
    if not (device.vmm and device.posix_fd):
        raise NotShareableError(
            f"the memory of {device.name} cannot be shared", hint="see what it lacks: `kvshare doctor`"
        )
    library = loader.find()
    if not (library.parent / CUDA_BACKEND).is_file():
        raise LibraryError(
            f"{library} was built without CUDA", hint="run `kvshare build --cmake-arg=-DGGML_CUDA=ON`"
        )
    return {"name": device.name, "uuid": device.uuid}


def measure(
    model: Path,
    n_tokens: list[int],
    n_threads: int | None = None,
    log_level: str = "warning",
    *,
    gpu: bool = False,
) -> dict[str, Any]:
    """Run both processes; return the report that `--json` prints.

    Raises:
        KvshareError: a process failed, with its own message.
    """
    from kvshare import fds
    from kvshare._native import loader

    library = str(loader.find())  # the children load it; this process only watches
    with contextlib.ExitStack() as stack:
        show = stack.enter_context(_bars(n_tokens))
        folder = stack.enter_context(fds.private_directory())
        arguments = [
            str(model),
            str(folder / "provider.sock"),
            json.dumps(n_tokens),
            str(n_threads or 0),
            "-1" if gpu else "0",  # layers on the GPU; -1 is all
            log_level,
        ]
        environment = {**os.environ, loader.ENVIRONMENT: library}
        decoder = stack.enter_context(_Child("decoder", arguments, environment))
        provider: _Child | None = None
        runs: list[dict[str, Any]] = []
        while True:
            event = decoder.next()
            if event["event"] == "provide":
                if provider is None:  # not earlier: the decoder has measured itself alone
                    provider = stack.enter_context(_Child("provider", arguments, environment))
                    provider.wait_for("listening", show)
                decoder.say("go")
                provider.say("go")
                prefilled = provider.wait_for("prefilled", show, beside=decoder)
            elif event["event"] == "run":
                runs.append({**event["run"], "provider_prefill_ms": prefilled["ms"]})
            elif event["event"] == "done":
                return _report(runs, event["pss_mib"])
            else:
                show(event)


def _report(runs: list[dict[str, Any]], pss_mib: dict[str, float]) -> dict[str, Any]:
    ok = all(run["logits_identical"] and run["text_identical"] and not run["bytes_moved"] for run in runs)
    return {"runs": runs, "pss_mib": pss_mib, "ok": ok}


class _Child:
    """One of the two processes: events come as JSON lines, a line to it lets it go on."""

    def __init__(self, role: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.role = role
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"kvshare.cli.demo_{role}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what was not read yet can be polled for
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._stdin, self.stdout = self.process.stdin, self.process.stdout
        self._early: deque[dict[str, Any]] = deque()

    def say(self, line: str) -> None:
        try:
            self._stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            while True:  # until it has said why, or its output ends
                self._read()

    def next(self) -> dict[str, Any]:
        return self._early.popleft() if self._early else self._read()

    def _read(self) -> dict[str, Any]:
        line = self.stdout.readline()
        if not line:
            raise PeerClosedError(
                f"the {self.role} process ended with status {self.process.wait()}",
                hint="run `kvshare demo --log-level debug`",
            )
        event: dict[str, Any] = json.loads(line)
        if event["event"] == "error":
            raise _ChildError(f"{self.role}: {event['message']}", event["exit_code"], event["hint"])
        return event

    def wait_for(self, name: str, show: Any, *, beside: _Child | None = None) -> dict[str, Any]:
        """Wait for an event; a child beside it may fail meanwhile, which raises what it says."""
        files = [self.stdout] if beside is None else [self.stdout, beside.stdout]
        while True:
            ready, _, _ = select.select(files, [], [])
            if beside is not None and beside.stdout in ready:
                beside._early.append(beside._read())
            if self.stdout in ready:
                event = self.next()
                if event["event"] == name:
                    return event
                show(event)

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()
        self.stdout.close()


class _ChildError(KvshareError):
    """An error of a child process, with its exit code."""

    def __init__(self, message: str, exit_code: int, hint: str | None) -> None:
        super().__init__(message, hint=hint)
        self.exit_code = exit_code


def _model(path: Path | None) -> Path:
    from kvshare import models
    from kvshare.cli import progress

    if path is not None:
        models.check_gguf(path)
        return path
    with progress.shown() as show:
        return models.fetch("smollm2", show)


@contextlib.contextmanager
def _bars(n_tokens: list[int]) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)
        total, step = len(n_tokens), ""

        def show(event: dict[str, Any]) -> None:
            nonlocal step
            if event["event"] == "step" and event["text"] != step:
                step = event["text"]
                progress.reset(task, description=step, total=event.get("total"))
                if not console.is_terminal:
                    console.print(f"  {step}", highlight=False)
            elif event["event"] == "progress":
                progress.update(task, completed=event["n"])

        show({"event": "step", "text": f"loading the model in two processes, {total} prompts to go"})
        yield show


def _print(report: dict[str, Any], title: str, rows: Rows) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=title, caption="times of this machine and this run")
    table.add_column("prompt tokens")
    for run_ in report["runs"]:
        table.add_column(f"{run_['n_tokens']:,}", justify="right")
    for name, key, unit in rows:
        table.add_row(name, *(_cell(run_[key], unit) for run_ in report["runs"]))
    console.print(table)
    if pss := report.get("pss_mib"):
        console.print(
            f"memory (PSS): one process {pss['one_process']:.0f} MiB; decoder {pss['decoder']:.0f} MiB "
            f"+ provider {pss['provider']:.0f} MiB = {pss['ratio']:.2f} times one process",
            highlight=False,
        )
    for run_ in report["runs"]:
        console.print(f"{run_['n_tokens']:,} tokens -> {run_['text']!r}", highlight=False, markup=False)
    console.print(
        "[green]identical, zero bytes moved[/green]"
        if report["ok"]
        else "[red]NOT as it should be, see the table[/red]"
    )


def _cell(value: Any, unit: str) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    text = f"{value:,.2f}" if isinstance(value, float) and unit == "ms" and value < 100 else f"{value:,.0f}"
    return f"{text} {unit}".rstrip()
