"""The decoder under test, a `kvshare.Decoder` in a process of its own: it may crash, or be killed.

    python -m kvshare.testing.chaos.decoder MODEL SETTINGS

reads one JSON object `{"do": ACTION, ...}` a line and answers each with one; the actions are those of
`Host`, the settings a JSON object of `kvshare.Decoder.open`. It ends with its standard input.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvshare.decoder import Decoder, Share
from kvshare.errors import KvshareError, ReplayError

N_GENERATE = 8
SEND_TIMEOUT_S = 2.0
LET_GO_TIMEOUT_S = 2.0


class Host:
    """What can be asked for; `slot` is a sequence."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._share: Share | None = None  # the last one, also after its end

    def share(
        self,
        slot: int,
        socket: str,
        n_tokens: int,
        expires_ms: int,
        strict: bool = False,
        tokens: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Share what comes behind the slot's part of some tokens, or an empty slot."""
        held = tokens[: self._decoder.context.n_past(slot)]
        share = self._decoder.share(
            slot, n_tokens=n_tokens, prefix=held, expires_ms=expires_ms, strict=strict
        )
        try:
            share.send(socket, deadline=time.monotonic() + SEND_TIMEOUT_S)
        except BaseException:
            share.release()
            raise
        self._share = share
        return {"share_id": share.share_id, "n_prefix": share.n_prefix}

    def adopt(self, slot: int, share_id: int, tokens: list[int]) -> dict[str, Any]:
        deadline = time.monotonic() + LET_GO_TIMEOUT_S
        adopted = self._decoder.adopt(self._find(share_id), tokens, deadline=deadline)
        return {"n_adopted": adopted.n_adopted, "bytes_moved": adopted.bytes_moved}

    def progress(self, slot: int, share_id: int) -> dict[str, Any]:
        """Return what the ledger says, for a provider that tells nothing else."""
        record = self._find(share_id).ledger.snapshot()
        return {"state": record.state.name, "n_filled": record.n_filled}

    def release(self, slot: int, share_id: int) -> dict[str, Any]:
        self._find(share_id).release()
        return {}

    def erase(self, slot: int) -> dict[str, Any]:
        self._decoder.context.clear(slot)
        return {}

    def prefill(self, slot: int, tokens: list[int]) -> dict[str, Any]:
        """Evaluate those tokens that the slot does not hold; return how many it held."""
        n_held = self._decoder.context.n_past(slot)
        self._decoder.context.decode(tokens[n_held:], position=n_held, seq_id=slot)
        return {"n_held": n_held}

    def go_ahead(self, slot: int, tokens: list[int], n_tokens: int) -> dict[str, Any]:
        """Do the same while cells are taken for so many tokens, by a share that nobody gets."""
        held = tokens[: self._decoder.context.n_past(slot)]
        with self._decoder.share(slot, n_tokens=n_tokens, prefix=held):
            return self.prefill(slot, tokens)

    def finish(self, slot: int, tokens: list[int]) -> dict[str, Any]:
        """Evaluate the last token behind those that the slot holds, and generate."""
        context = self._decoder.context
        n_held = position = context.n_past(slot)
        if n_held != len(tokens) - 1:
            return {"n_held": n_held}
        token, digest, found = tokens[-1], hashlib.sha256(), []
        for _ in range(N_GENERATE):
            context.decode([token], position=position, seq_id=slot, logits=True)
            logits = context.logits()
            digest.update(logits.tobytes())
            position, token = position + 1, int(logits.argmax())
            found.append(token)
        return {"n_held": n_held, "tokens": found, "logits": digest.hexdigest()}

    def _find(self, share_id: int) -> Share:
        if self._share is None or self._share.share_id != share_id:
            raise ReplayError(f"share {share_id} is unknown")
        return self._share


def main(model: str, settings: str) -> int:
    """Serve standard input."""
    with Decoder.open(model, **json.loads(settings)) as decoder:
        host = Host(decoder)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = getattr(host, request.pop("do"))(**request)
            except KvshareError as error:
                answer = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
