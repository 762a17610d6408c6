"""What the two processes of `kvshare demo` have in common: the prompt, events, errors."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvshare.errors import KvshareError

if TYPE_CHECKING:
    from kvshare._native.context import Model

N_GENERATE = 16

TEXT = (
    "The lighthouse keeper counted the ships that passed in the night and wrote their names into a "
    "book. In winter there were few, and the pages stayed white for weeks. He had learned to tell them "
    "by their lights, by the beat of their engines, and by the time they took to cross the bay. "
)


def prompt(model: Model, n_tokens: int) -> list[int]:
    """Return a prompt of exactly `n_tokens` tokens, the same in both processes."""
    tokens = model.tokenize(TEXT)
    part = model.tokenize(TEXT, add_special=False)
    while len(tokens) < n_tokens:
        tokens += part
    return tokens[:n_tokens]


def emit(event: str, **fields: Any) -> None:
    """Tell the command what happens, as one JSON line."""
    print(json.dumps({"event": event, **fields}), flush=True)


def wait_for_go() -> None:
    """Wait for the command's line; its end means that the demo is over."""
    if not sys.stdin.readline():
        raise SystemExit(0)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Call a function; return the milliseconds it took and its result."""
    start = time.perf_counter_ns()
    result = function()
    return (time.perf_counter_ns() - start) / 1e6, result


def main(process: Callable[[list[str]], None]) -> None:
    """Run one of the processes; its last argument is the log level, an error becomes an event."""
    logging.basicConfig(
        level=sys.argv[-1].upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    try:
        process(sys.argv[1:])
    except KvshareError as error:
        emit("error", message=str(error), exit_code=error.exit_code, hint=error.hint)
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
