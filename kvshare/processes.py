"""A llama-server, a provider and an engine as child processes: what the demo and the benchmarks run.

Each is a context manager that waits until the process is ready and ends it with the block.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshare.errors import DeadlineExceededError, PeerClosedError

START_TIMEOUT_S = 120.0

open_url = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""`urllib.request.urlopen` for servers of this machine: past the proxies of the environment."""

_STOP_TIMEOUT_S = 10.0
_LOG_NBYTES = 2000  # of a log, in an error


@dataclass(frozen=True)
class Running:
    """A child process that is ready.

    Attributes:
        pid: its process id.
        log: file with what it prints.
        url: where it serves HTTP; empty for a provider.
    """

    pid: int
    log: Path
    url: str = ""


@contextlib.contextmanager
def llama_server(
    program: Path,
    model: Path,
    log: Path,
    *options: str,
    share_dir: Path | None = None,
    cpus: Collection[int] | None = None,
) -> Iterator[Running]:
    """Run a llama-server on a free port of the loopback.

    Args:
        program: the executable.
        model: GGUF file.
        log: file for its output.
        options: further arguments.
        share_dir: folder for `--kv-share`; None starts it without.
        cpus: CPUs that it may use; None leaves it all.

    Raises:
        PeerClosedError: it ended instead of serving.
        DeadlineExceededError: it was not ready in time.
    """
    with socket.socket() as probe:  # a port that was free a moment ago
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), *options]
    if share_dir is not None:
        command += ["--kv-share", str(share_dir)]

    def is_ready() -> bool:
        try:
            with open_url(f"{url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # nobody listens yet, or 503 while the model loads
            return False

    with _child("llama-server", command, log, lambda: url if is_ready() else None, cpus) as running:
        yield running


@contextlib.contextmanager
def provider(
    model: Path, listen: Path, log: Path, *options: str, cpus: Collection[int] | None = None
) -> Iterator[Running]:
    """Run `kvshare provider` at a socket.

    Args:
        model: GGUF file.
        listen: the socket.
        log: file for its output, one event a line.
        options: further arguments.
        cpus: CPUs that it may use; None leaves it all.

    Raises:
        PeerClosedError: it ended instead of listening.
        DeadlineExceededError: it was not ready in time.
    """
    command = [*_kvshare("provider"), "--json", "--model", str(model), "--listen", str(listen), *options]
    with _child("kvshare provider", command, log, lambda: _listening(log), cpus) as running:
        yield running


@contextlib.contextmanager
def engine(
    decoder: str, provider: Path, log: Path, *options: str, cpus: Collection[int] | None = None
) -> Iterator[Running]:
    """Run `kvshare engine` on a free port of the loopback.

    Args:
        decoder: URL of a llama-server.
        provider: socket of a provider.
        log: file for its output, one event a line.
        options: further arguments.
        cpus: CPUs that it may use; None leaves it all.

    Raises:
        PeerClosedError: it ended instead of listening.
        DeadlineExceededError: it was not ready in time.
    """
    command = [*_kvshare("engine"), "--json", "--decoder", decoder, "--provider", str(provider)]
    command += ["--listen", "127.0.0.1:0", *options]
    with _child("kvshare engine", command, log, lambda: _listening(log), cpus) as running:
        yield running


def _kvshare(command: str) -> list[str]:
    return [sys.executable, "-m", "kvshare", command]


def _listening(log: Path) -> str | None:
    """Return the URL, or the empty string, of a process that has said that it listens."""
    for line in log.read_text(errors="replace").splitlines():
        event: Any = None
        with contextlib.suppress(ValueError):
            event = json.loads(line)
        if isinstance(event, dict) and event.get("event") == "listening":
            return str(event.get("url", ""))
    return None


@contextlib.contextmanager
def _child(
    name: str,
    command: Sequence[str],
    log: Path,
    ready: Callable[[], str | None],
    cpus: Collection[int] | None,
) -> Iterator[Running]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("LLAMA_ARG_")}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        if cpus is not None:  # before it has started threads that compute
            os.sched_setaffinity(process.pid, cpus)
        deadline = time.monotonic() + START_TIMEOUT_S
        while (url := ready()) is None:
            end = log.read_bytes()[-_LOG_NBYTES:].decode(errors="replace")
            if process.poll() is not None:
                raise PeerClosedError(f"{name} ended with status {process.returncode}", hint=end)
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"{name} was not ready in {START_TIMEOUT_S:.0f} s", hint=end)
            time.sleep(0.05)
        yield Running(process.pid, log, url)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
