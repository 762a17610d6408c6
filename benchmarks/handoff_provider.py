"""A provider without a model: fills the rows of K and V from a template, and vouches for them.

`benchmarks.handoff` and `benchmarks.scaling` run it as a second process. It maps the regions of the first
offer once and keeps them mapped, as a warm provider does. The same prompt always gets the same rows. A
digest over them is taken once for each length: by `Offer.complete` the first time, and as the decoder's
library says it, with the metadata, from the job `vouch` on.

The jobs, each a line of JSON on standard input, answered with another:

- `connect`: take a connection, for offers.
- `fill`: take an offer, fill and vouch; `accept` says that it comes on a connection of its own.
- `vouch`: what to vouch with from now on for a length, in place of no metadata.
- `hold`: take a descriptor of state bytes, on a connection of its own.
- `send`: write these bytes to that connection.

    python -m benchmarks.handoff_provider SOCKET N_TOKENS
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import mmap
import socket
import sys
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from kvshare import fds, mapping
from kvshare._native import signatures
from kvshare.decoder import Decoder, Share
from kvshare.ledger import tokens_digest
from kvshare.provider import Offer

N_BYTES = 256  # token ids of the generated models that stand for bytes
TIMEOUT_S = 120.0


def prompt(n_tokens: int) -> array[int]:
    """Return the prompt of a length, the same in each process."""
    return array("i", np.random.default_rng(n_tokens).integers(0, N_BYTES, n_tokens, np.int32).tobytes())


class ProviderProcess(measure.Child):
    """The other process, as the decoder's sees it.

    Args:
        socket: where it listens from now on.
        n_tokens: of the longest prompt.
    """

    def __init__(self, socket: Path, n_tokens: int) -> None:
        super().__init__("benchmarks.handoff_provider", str(socket), str(n_tokens))
        self.answer()
        self.socket = socket

    def hand_over(
        self, decoder: Decoder, connection: socket.socket, n_tokens: int, seq_id: int = 0
    ) -> tuple[Share, dict[str, float]]:
        """Share a sequence and let it be filled; return the share, and what its steps cost.

        The share is there to be adopted.
        """
        times = [time.perf_counter()]
        share = decoder.share(seq_id, n_tokens=n_tokens)
        times.append(time.perf_counter())
        share.send(connection)
        times.append(time.perf_counter())
        decoder.prepare()  # as `Share.wait` does
        self.ask(job="fill", n_tokens=n_tokens, accept=False)
        return share, {"share_us": (times[1] - times[0]) * 1e6, "send_us": (times[2] - times[1]) * 1e6}

    def connect(self) -> socket.socket:
        """Return a connection to send shares on; the one before is closed there."""
        connection = fds.connect_unix(self.socket)
        self.ask(job="connect")
        return connection

    def vouch_as(self, decoder: Decoder, share: Share, n_tokens: int) -> None:
        """Let it vouch from now on as llama.cpp's own provider would, for a share that was adopted."""
        handle, lib = decoder.context.handle, decoder.context.library.lib
        sample = signatures.Digest()
        size = lib.llama_kv_share_publish(handle, share.seq_id, None, 0, None)
        blob = ctypes.create_string_buffer(size)
        lib.llama_kv_share_publish(handle, share.seq_id, blob, size, ctypes.byref(sample))
        said = {"sample": base64.b64encode(sample).decode(), "blob": base64.b64encode(blob.raw).decode()}
        self.ask(job="vouch", n_tokens=n_tokens, first_cell=share.header.cells[0][0][0], **said)


class Filler:
    """Fills one offer after the other.

    Args:
        listener: where offers arrive.
        n_tokens: of the longest prompt.
    """

    def __init__(self, listener: socket.socket, n_tokens: int) -> None:
        self._listener = listener
        self._n_tokens = n_tokens
        self._connection: socket.socket | None = None
        self._kept: Offer | None = None  # whose mappings stay
        self._views: list[mapping.LayerView] = []
        self._template: mapping.View = np.empty(0)
        self._vouched: dict[tuple[int, int], tuple[bytes, bytes]] = {}  # sample digest and metadata
        self._held: dict[int, tuple[socket.socket, mmap.mmap]] = {}

    def handle(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Do a job."""
        jobs = {
            "connect": self._connect,
            "fill": self._fill,
            "vouch": self._vouch,
            "hold": self._hold,
            "send": self._send,
        }
        return jobs[job["job"]](job)

    def _accept(self) -> socket.socket:
        return fds.accept_unix(self._listener, deadline=time.monotonic() + TIMEOUT_S)

    def _fill(self, job: Mapping[str, Any]) -> dict[str, Any]:
        if job["accept"]:
            self._connect(job)
        assert self._connection is not None
        offer = Offer.receive(self._connection)
        with contextlib.ExitStack() as stack:
            if self._kept is None or self._kept.memory() != offer.memory():
                self._keep(offer)
            else:
                stack.enter_context(offer)
            start = time.perf_counter()
            offer.ledger.begin()
            n, first = job["n_tokens"], offer.first_cell
            for i, view in enumerate(self._views):
                assert view.v is not None
                for j, rows in enumerate((view.k, view.v)):
                    begin = 2 * i + j  # no two tensors are alike
                    rows[first : first + n] = self._template[begin : begin + n]
            self._complete(offer, n)
            return {"fill_ms": (time.perf_counter() - start) * 1000}

    def _connect(self, _: Mapping[str, Any]) -> dict[str, Any]:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._accept()
        return {}

    def _complete(self, offer: Offer, n_tokens: int) -> None:
        tokens = prompt(n_tokens)
        key = n_tokens, offer.first_cell
        if key in self._vouched:
            sample, blob = self._vouched[key]
            offer.ledger.advance(n_tokens)
            offer.ledger.complete(tokens_digest(tokens), n_tokens, sample, blob)
        else:
            offer.complete(tokens)
            self._vouched[key] = offer.ledger.snapshot().sample_digest, b""

    def _keep(self, offer: Offer) -> None:
        self._views = []
        if self._kept is not None:
            self._kept.close()
        self._kept = offer
        self._vouched.clear()
        self._views = offer.views()
        rows = self._views[0].k
        shape = (self._n_tokens + 2 * len(self._views), rows.shape[-1])
        if (self._template.shape, self._template.dtype) == (shape, rows.dtype):
            return
        if rows.dtype == np.uint8:  # rows of a quantized type: bytes that are scales of 0.01 as well
            self._template = np.full(shape, 0x21, np.uint8)
        else:
            rng = np.random.default_rng(1)
            self._template = rng.standard_normal(shape, np.float32).astype(rows.dtype)

    def _vouch(self, job: Mapping[str, Any]) -> dict[str, Any]:
        key = job["n_tokens"], job["first_cell"]
        self._vouched[key] = base64.b64decode(job["sample"]), base64.b64decode(job["blob"])
        return {}

    def _hold(self, job: Mapping[str, Any]) -> dict[str, Any]:
        connection = self._accept()
        _, (fd,) = fds.receive_message(connection, max_fds=1)
        with fd:
            state = mmap.mmap(fd.fileno(), fds.fd_size(fd.fileno()), prot=mmap.PROT_READ)
        state.madvise(mmap.MADV_WILLNEED)
        self._held[job["n_tokens"]] = connection, state
        return {}

    def _send(self, job: Mapping[str, Any]) -> dict[str, Any]:
        connection, state = self._held[job["n_tokens"]]
        connection.setblocking(True)
        connection.sendall(state)
        return {}


def main() -> int:
    """Serve a benchmark until it closes standard input."""
    path, n_tokens = sys.argv[1:]
    with fds.listening(Path(path)) as listener:
        filler = Filler(listener, int(n_tokens))
        print("{}", flush=True)
        measure.answer_jobs(filler.handle)
    return 0


if __name__ == "__main__":
    sys.exit(main())
