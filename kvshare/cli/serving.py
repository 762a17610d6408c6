"""What the commands that stay have in common: events as JSON lines, and an ordinary end by signals."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any, Protocol


class Stoppable(Protocol):
    """What serves until it is told to stop."""

    def stop(self) -> None:
        """End soon; may be called from a signal handler."""


@contextlib.contextmanager
def stopped_by_signals(server: Stoppable) -> Iterator[None]:
    """Let SIGTERM and SIGINT set a flag: an exception in the middle would leave peers without a word."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: server.stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report_json(event: str, /, **fields: Any) -> None:
    """Print an event as one JSON line."""
    print(json.dumps({"event": event, **fields}, default=str), flush=True)
