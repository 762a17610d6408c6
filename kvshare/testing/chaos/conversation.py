"""What is said to a slot, and a provider without a fault that hands over what comes before and after one."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshare import fds, wire
from kvshare.errors import KvshareError, PeerClosedError
from kvshare.testing.chaos import child
from kvshare.testing.chaos.targets import Target

EXPIRES_MS = 60_000


@dataclass(frozen=True)
class Exchange:
    """A prompt and its answer.

    Attributes:
        held: what the slot holds before; the prompt begins with it.
        prompt: all tokens.
        answer: that of a decoder to which nothing has happened.
    """

    held: list[int]
    prompt: list[int]
    answer: Any = None

    @property
    def given(self) -> list[int]:
        """What is handed over: all but the last token."""
        return self.prompt[:-1]

    def answered(self, answer: Any) -> Exchange:
        """Return it with an answer.

        Raises:
            KvshareError: it is none.
        """
        if "tokens" not in answer:
            raise KvshareError(f"the decoder does not answer: {answer}")
        return dataclasses.replace(self, answer=answer)

    def then(self, tokens: Sequence[int]) -> Exchange:
        """Return the next one: all that was said, and some tokens more.

        The slot holds what was said, except the last token, which was generated and not evaluated.
        """
        said = self.prompt + self.answer["tokens"]
        return Exchange(said[:-1], [*said, *tokens])


def service(model: Path, path: Path) -> list[str]:
    """Return the command line of a provider that stays."""
    options = ["--json", "--threads", "1", "--model", str(model), "--listen", str(path)]
    return [sys.executable, "-m", "kvshare", "provider", *options]


@contextlib.contextmanager
def engine(path: Path, share_id: int, tokens: Sequence[int]) -> Iterator[socket.socket]:
    """Give a job to a provider that stays; hang up at the end of the block."""
    with fds.connect_unix(path) as connection:
        fds.send_message(connection, wire.encode(wire.JobHeader(share_id=share_id, tokens=tuple(tokens))))
        yield connection


def share(target: Target, slot: int, path: Path, exchange: Exchange, **options: Any) -> int:
    """Offer what is new of a prompt to the provider that listens there; return the share's number.

    Raises:
        Refused: the decoder said no.
        KvshareError: it believes that the slot holds something else.
    """
    asked = {"tokens": exchange.given} if exchange.held else {}
    options = {"n_tokens": len(exchange.prompt), "expires_ms": EXPIRES_MS, **asked, **options}
    answer = target.do("share", slot, socket=str(path), **options)
    if answer["n_prefix"] != len(exchange.held):
        raise KvshareError(f"the share goes on behind {answer['n_prefix']} tokens, not {len(exchange.held)}")
    return int(answer["share_id"])


class SteadyProvider:
    """A provider that stays, and keeps its context from turn to turn.

    *Ownership*: `close` ends the process.
    """

    def __init__(self, model: Path, path: Path, log: Path) -> None:
        self._path = path
        self._child = child.Child(service(model, path), log, by_signal=True)
        self._until("listening")

    def hand_over(self, target: Target, slot: int, exchange: Exchange) -> None:
        """Hand over what is new of a prompt.

        Raises:
            KvshareError: it failed, or was refused.
        """
        share_id = share(target, slot, self._path, exchange)
        with engine(self._path, share_id, exchange.given):
            self._until("done")
        target.do("adopt", slot, share_id=share_id, tokens=exchange.given)

    def close(self) -> None:
        """End it; idempotent."""
        self._child.close()

    def _until(self, wanted: str) -> None:
        event: dict[str, Any] = {}
        while event.get("event") != wanted:
            event = self._child.receive()
            if event is None:
                raise PeerClosedError("the provider without a fault is gone", hint=self._child.tail())
            if event.get("event") in (None, "failed", "dropped"):  # None: why it did not start
                raise KvshareError(f"the provider without a fault has failed: {event}")
