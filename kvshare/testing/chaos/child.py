"""A child process that speaks JSON lines: the decoder under test, and each provider."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from kvshare.errors import DeadlineExceededError, PeerClosedError

TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 5.0
_LOG_NBYTES = 2000  # of a log, in an error


def module(name: str, *arguments: str) -> list[str]:
    """Return the command line of a module of this package."""
    return [sys.executable, "-m", f"kvshare.testing.chaos.{name}", *arguments]


class Child:
    """A process, its lines, and how it ended.

    Args:
        command: what to run.
        log: file for its standard error.
        by_signal: whether `close` ends it with SIGTERM, not with the end of its input.

    *Ownership*: `close` ends the process.
    """

    def __init__(self, command: Sequence[str], log: Path, *, by_signal: bool = False) -> None:
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self.log = log
        self._buffer = b""
        self._killed = False
        self._by_signal = by_signal

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def send(self, message: object) -> None:
        """Write one line; a process that is gone does not read it."""
        with contextlib.suppress(BrokenPipeError):
            stream = _pipe(self.process.stdin)
            stream.write(json.dumps(message).encode() + b"\n")
            stream.flush()

    def receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        """Return its next line, None if it has ended.

        Raises:
            DeadlineExceededError: it says nothing.
        """
        stream = _pipe(self.process.stdout)
        poller = select.poll()
        poller.register(stream, select.POLLIN)
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise DeadlineExceededError(f"process {self.pid} says nothing", hint=self.tail())
            data = os.read(stream.fileno(), 1 << 16)
            if not data:
                return None
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def ask(self, message: object) -> Any:
        """Send a line and return the answer.

        Raises:
            PeerClosedError: the process has ended instead.
        """
        self.send(message)
        answer = self.receive()
        if answer is None:
            status = self.process.wait(TIMEOUT_S)
            raise PeerClosedError(f"process {self.pid} ended with status {status}", hint=self.tail())
        return answer

    def kill(self) -> None:
        """Kill it."""
        self._killed = True
        self.process.kill()
        self.process.wait()

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def crashed(self) -> bool:
        """Whether a signal has ended it that nobody sent on purpose."""
        status = self.process.poll()
        return status is not None and status < 0 and status != -signal.SIGKILL and not self._killed

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_bytes()[-_LOG_NBYTES:].decode(errors="replace")

    def close(self) -> None:
        """Let it end by itself with its input, or ask it to; kill it if it does not; idempotent."""
        with contextlib.suppress(BrokenPipeError):
            _pipe(self.process.stdin).close()
        if self._by_signal and self.alive:
            self.process.terminate()
            self._killed = True
        try:
            self.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        _pipe(self.process.stdout).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
