"""A decoder and a provider without llama.cpp, for tests of everything around them.

Memory, descriptors, wire message and ledger are the real ones; only the model is missing. In its
place stands `fake_rows`: the K and V row of a position follow from the tokens up to it, so that a
cache with wrong rows gives wrong `FakeDecoder.logits`, as a real one would.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvshare import fds, mapping, wire
from kvshare.decoder import DEFAULT_EXPIRES_MS, Adopted
from kvshare.errors import (
    ExpiredError,
    KvshareError,
    LedgerDigestError,
    LedgerIncompleteError,
    LocalProtocolError,
    NoFreeCellsError,
    NotShareableError,
    RemoteProtocolError,
    ReplayError,
    SequenceInUseError,
)
from kvshare.layout import CacheLayout, Layout, RegionLayout, TensorLayout, canonical_json
from kvshare.ledger import Ledger, LedgerPrefix, LedgerRecord, LedgerState
from kvshare.provider import Offer
from kvshare.wire import ShareState

Rows = npt.NDArray[np.float16]

_ALIGNMENT = 256  # cells, as a real decoder aligns its leases
_STATES = {LedgerState.FILLING: ShareState.FILLING, LedgerState.COMPLETE: ShareState.COMPLETE}


def plain_layout(
    *,
    n_layer: int = 2,
    n_embd: int = 64,
    kv_size: int = 512,
    type: str = "f16",
    nbytes_per_row: int | None = None,
    v_trans: bool = False,
) -> Layout:
    """Describe a plain cache in one region, as the library does.

    Args:
        n_layer: layers.
        n_embd: elements of a K row and of a V row.
        kv_size: cells.
        type: ggml type name.
        nbytes_per_row: bytes of a row; None is right for f32, f16 and bf16.
        v_trans: whether V is transposed.
    """
    element = {"f32": 4, "f16": 2, "bf16": 2}.get(type, 1)
    row = n_embd * element if nbytes_per_row is None else nbytes_per_row
    size = row * kv_size
    tensors = []
    for index, (il, kind) in enumerate(itertools.product(range(n_layer), "kv")):
        tensors.append(
            TensorLayout(
                name=f"cache_{kind}_l{il}",
                type=type,
                ne=(n_embd, kv_size, 1, 1),
                nb=(element, row, size, size),
                offset=index * size,
            )
        )
    attributes = {
        "n_stream": 1,
        "n_swa": 0,
        "rot_k": False,
        "rot_v": False,
        "swa_type": 0,
        "v_trans": v_trans,
    }
    return Layout(
        abi=1,
        byte_order="little",
        caches=(CacheLayout("kv", kv_size, tuple(sorted(attributes.items()))),),
        regions=(RegionLayout(2 * n_layer * size, tuple(tensors)),),
    )


def fake_rows(tokens: Sequence[int], il: int, kind: str, n_embd: int) -> Rows:
    """Return the rows that the fake model computes: `[n_tokens, n_embd]`, float16.

    Each row depends on all tokens up to its own, as K and V behind the first layer do.
    """
    digest = hashlib.sha256(f"{kind}{il}".encode())
    rows = np.empty((len(tokens), n_embd), np.float16)
    for i, token in enumerate(tokens):
        digest.update(int(token).to_bytes(4, "little", signed=True))
        rng = np.random.default_rng(int.from_bytes(digest.digest()[:8], "little"))
        rows[i] = rng.standard_normal(n_embd, np.float32)
    return rows


@dataclass(frozen=True)
class _Cells:
    """Cells `[first, first + n)` of a sequence."""

    first: int
    n: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.n)


@dataclass
class _Sequence:
    """What a sequence holds: its tokens, and the runs of cells where they lie."""

    tokens: list[int]
    cells: list[_Cells]


class FakeShare:
    """A live offer of cells, as `kvshare.Share`."""

    def __init__(
        self,
        decoder: FakeDecoder,
        header: wire.ShareHeader,
        ledger: Ledger,
        seq_id: int,
        n_tokens: int,
        prefix: LedgerPrefix,
        rows: bytes,
        deadline: float,
        t_us: float,
    ) -> None:
        self.header = header
        self.ledger = ledger
        self.share_id = header.share_id
        self.seq_id = seq_id
        self.n_tokens = n_tokens
        self.n_prefix = prefix.n_tokens
        self.t_us = t_us
        self._prefix = prefix
        self._rows = rows  # digest of those of the prefix
        self._decoder = decoder
        self._deadline = deadline
        self._state = ShareState.ISSUED
        self._sent = False  # or tried to: somebody may have the descriptors
        self._connection: socket.socket | None = None
        self._own_connection: socket.socket | None = None

    @property
    def strict(self) -> bool:
        """Whether `FakeDecoder.adopt` waits until the provider has let go."""
        return bool(self.header.params["strict"])

    @property
    def state(self) -> ShareState:
        """Where the share stands, as the ledger and the clock say."""
        if self._state.live:
            if time.monotonic() > self._deadline:
                self._decoder._end(self, ShareState.EXPIRED)
            else:
                seen = _STATES.get(self.ledger.snapshot().state)
                if seen is not None and seen in wire.TRANSITIONS[self._state]:
                    self._state = seen
        return self._state

    def send(self, target: socket.socket | str | os.PathLike[str], *, deadline: float | None = None) -> None:
        """Send header and descriptors; as `kvshare.Share.send`."""
        if not self.state.live:
            raise LocalProtocolError(f"this share is {self._state.value}, it cannot be sent")
        if self._connection is not None:
            raise LocalProtocolError("this share was sent already")
        if isinstance(target, socket.socket):
            fds.require_peer_uid(target)
            connection = target
        else:
            connection = self._own_connection = fds.connect_unix(target, deadline=deadline)
        descriptors = [self._decoder._region.fileno(), self.ledger.fileno()]
        self._sent = True
        fds.send_message(connection, wire.encode(self.header), descriptors, deadline=deadline)
        self._connection = connection

    def wait(
        self, *, deadline: float | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Wait for the provider's word that it is done; as `kvshare.Share.wait`."""
        if self._connection is None:
            raise LocalProtocolError("send the share before you wait for its provider")
        deadline = self._deadline if deadline is None else min(deadline, self._deadline)
        while True:
            payload, _ = fds.receive_message(self._connection, deadline=deadline, max_fds=0)
            message = wire.decode(payload)
            if isinstance(message, wire.Outcome) and message.share_id == self.share_id:
                if not message.ok:
                    raise LedgerIncompleteError(f"the provider failed: {message.error}")
                return
            if not isinstance(message, wire.Progress) or message.share_id != self.share_id:
                raise RemoteProtocolError(f"unexpected {type(message).__name__} from the provider")
            if progress:
                progress(message.n_filled, message.n_tokens)

    def wait_until_let_go(self, *, deadline: float | None = None) -> None:
        """Wait until the provider has hung up; as `kvshare.Share.wait_until_let_go`."""
        if self._connection is None:
            raise LocalProtocolError("send the share before you wait for its provider")
        deadline = self._deadline if deadline is None else min(deadline, self._deadline)
        fds.wait_for_hangup(self._connection, deadline=deadline)

    def release(self) -> None:
        """Give the lease back, and the memory with it if it was sent; as `kvshare.Share.release`."""
        self._decoder._end(self, ShareState.RELEASED)

    def __enter__(self) -> FakeShare:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class FakeDecoder:
    """A decoder whose cells are kept in Python and whose memory is shared; as `kvshare.Decoder`.

    Attributes:
        layout: of its one region.
        before_adopt: hook, called with the share and a copy of its ledger before it is looked at.
    """

    def __init__(
        self,
        *,
        layout: Layout | None = None,
        n_seq_max: int = 4,
        semantics: str = "fake",
        before_adopt: Callable[[FakeShare, LedgerRecord], None] | None = None,
    ) -> None:
        self.layout = plain_layout() if layout is None else layout
        if len(self.layout.regions) != 1 or not self.layout.caches[0].is_plain:
            raise NotShareableError("the fake decoder has one plain cache in one region")
        self.before_adopt = before_adopt
        self.n_seq_max = n_seq_max
        self._semantics_text = canonical_json({"model": semantics}).decode()
        self._semantics = hashlib.sha256(self._semantics_text.encode()).hexdigest()
        self._region, self._mappings = self._fresh()
        self._sequences: dict[int, _Sequence] = {}
        self._leases: dict[int, _Cells] = {}
        self._withheld: list[_Cells] = []  # of leases that ended while others went on
        self._shares: dict[int, FakeShare] = {}
        self._closed = False

    @property
    def n_ctx_seq(self) -> int:
        """Cells that a sequence can use."""
        return self.layout.caches[0].size

    def n_past(self, seq_id: int = 0) -> int:
        """Return the number of positions that a sequence holds."""
        return len(self.tokens(seq_id))

    def tokens(self, seq_id: int = 0) -> list[int]:
        """Return the tokens that a sequence holds."""
        held = self._sequences.get(seq_id)
        return list(held.tokens) if held else []

    def clear(self, seq_id: int = 0) -> None:
        """Remove a sequence."""
        self._sequences.pop(seq_id, None)

    def prefill(self, tokens: Sequence[int], seq_id: int = 0) -> None:
        """Fill an empty sequence locally, with the rows that a provider has to compute.

        Its share, if it has one, cannot be adopted after this, as with a real decoder.
        """
        self._require_no_cells(seq_id)
        self.extend(tokens, seq_id)

    def extend(self, tokens: Sequence[int], seq_id: int = 0) -> None:
        """Go on behind what a sequence holds, as a decoder does that generates.

        Its share, if it has one, cannot be adopted after this, as with a real decoder.
        """
        self._require_sequence(seq_id)
        n_past = self.n_past(seq_id)
        whole = [*self.tokens(seq_id), *tokens]
        cells = self._take(len(tokens), seq_id)
        for layer in self._views():
            for kind, view in (("k", layer.k), ("v", layer.v)):
                assert view is not None
                view[cells.rows] = fake_rows(whole, layer.il, kind, view.shape[1])[n_past:]
        self._hold(seq_id, whole, cells)

    def logits(self, seq_id: int = 0) -> bytes:
        """Return something that all rows of a sequence decide."""
        if seq_id not in self._sequences:
            raise LocalProtocolError(f"sequence {seq_id} is empty")
        return self._digest(seq_id, self.n_past(seq_id))

    def share(
        self,
        seq_id: int = 0,
        *,
        n_tokens: int | None = None,
        prefix: Sequence[int] | None = None,
        expires_ms: int = DEFAULT_EXPIRES_MS,
        strict: bool = False,
    ) -> FakeShare:
        """Take cells for an empty sequence, or behind what it holds; as `kvshare.Decoder.share`."""
        start = time.perf_counter_ns()
        if self._closed:
            raise LocalProtocolError("this decoder is closed")
        for share in list(self._shares.values()):
            _ = share.state  # looks at the clock
        self._require_no_lease(seq_id)
        held = LedgerPrefix.of(prefix if prefix is not None else ())
        if held.n_tokens == 0:
            self._require_no_cells(seq_id)
        elif held.n_tokens != self.n_past(seq_id):
            raise SequenceInUseError(
                f"the prefix has {held.n_tokens} tokens, sequence {seq_id} holds {self.n_past(seq_id)}"
            )
        n_tokens = self.n_ctx_seq if n_tokens is None else n_tokens
        if n_tokens <= held.n_tokens:
            raise LocalProtocolError(f"n_tokens is {n_tokens}, the prefix has {held.n_tokens}")
        cells = self._take(n_tokens - held.n_tokens, seq_id)
        share_id = 1 + secrets.randbelow(2**53 - 1)
        ledger = Ledger.create(share_id, self.layout.digest(), self._semantics, capacity=1 << 16, prefix=held)
        try:
            header = wire.ShareHeader(
                share_id=share_id,
                layout=self.layout.digest(),
                semantics=self._semantics,
                params={
                    "abi": self.layout.abi,
                    "byte_order": self.layout.byte_order,
                    "caches": canonical_json([cache.to_json() for cache in self.layout.caches]).decode(),
                    "semantics": self._semantics_text,
                    "seq_id": seq_id,
                    "exposes_all": 1,
                    "strict": int(strict),
                },
                regions=(
                    wire.RegionEntry(
                        fd=0,
                        offset=0,
                        size=self.layout.regions[0].size,
                        layout=[tensor.to_json() for tensor in self.layout.regions[0].tensors],
                        kind="memfd",
                    ),
                ),
                ledger=wire.LedgerEntry(fd=1, size=ledger.size),
                cells=(((cells.first, cells.first + cells.n),),),
                expires_ms=expires_ms,
            )
        except BaseException:
            ledger.close()
            raise
        deadline = time.monotonic() + expires_ms / 1000
        t_us = (time.perf_counter_ns() - start) / 1000
        rows = self._digest(seq_id, held.n_tokens)
        made = FakeShare(self, header, ledger, seq_id, n_tokens, held, rows, deadline, t_us)
        self._leases[seq_id] = cells
        self._shares[share_id] = made
        return made

    def adopt(
        self,
        share: FakeShare,
        tokens: Sequence[int],
        *,
        allow_other_semantics: bool = False,
        deadline: float | None = None,
    ) -> Adopted:
        """Check the ledger and enter its cells into the sequence; as `kvshare.Decoder.adopt`."""
        start = time.perf_counter_ns()
        if share._decoder is not self:
            raise ReplayError(f"share {share.share_id} is not a share of this decoder")
        state = share.state
        if state is ShareState.EXPIRED:
            raise ExpiredError(f"share {share.share_id} has expired")
        if not state.live:
            raise ReplayError(f"share {share.share_id} is {state.value} already")
        record = share.ledger.snapshot()
        if self.before_adopt:
            self.before_adopt(share, record)
        known: dict[str, Any] = {
            "share_id": share.share_id,
            "layout": share.header.layout,
            "semantics": None if allow_other_semantics else share.header.semantics,
            "tokens": tokens,
            "prefix": share._prefix,
        }
        if record.state in (LedgerState.ISSUED, LedgerState.FILLING):
            record.verify(**{**known, "semantics": None}, sample_digest=None)
        cells = self._leases[share.seq_id]
        if share.strict and record.state is LedgerState.COMPLETE:
            share.wait_until_let_go(deadline=deadline)
            record = share.ledger.snapshot()
        try:
            record.verify(**known, sample_digest=None)
            self._require_unchanged(share)
            n_new = len(tokens) - share.n_prefix
            if n_new > cells.n:
                raise LedgerDigestError(f"{n_new} tokens are more than the {cells.n} cells of the lease")
            sample = mapping.plain_sample(self.layout, self._mappings, cells.first, n_new)
            record.verify(**known, sample_digest=sample)
            if self._is_touched(share):
                raise LedgerDigestError("the provider has changed the prefix")
        except BaseException:
            self._end(share, ShareState.FAILED)
            raise
        share._state = ShareState.ADOPTED
        self._hold(share.seq_id, tokens, _Cells(cells.first, n_new))
        self._forget(share)
        self._settle()
        return Adopted(
            n_adopted=len(tokens),
            bytes_in_place=sum(
                t.nb[1] * len(tokens) for region in self.layout.regions for t in region.tensors
            ),
            bytes_moved=0,
            t_us=(time.perf_counter_ns() - start) / 1000,
        )

    def close(self) -> None:
        """End all shares, give the memory back; idempotent."""
        for share in list(self._shares.values()):
            self._end(share, ShareState.RELEASED)
        self._closed = True
        self._drop_memory()

    def __enter__(self) -> FakeDecoder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- inside --

    def _views(self) -> list[mapping.LayerView]:
        return mapping.layer_views(self.layout, self._mappings)

    def _digest(self, seq_id: int, n_tokens: int) -> bytes:
        """Return what the rows of the first tokens of a sequence decide, wherever they lie."""
        digest = hashlib.sha256()
        runs = self._sequences[seq_id].cells if n_tokens else []
        for layer in self._views():
            for view in (layer.k, layer.v):
                assert view is not None
                rows = b"".join(view[cells.rows].tobytes() for cells in runs)
                digest.update(rows[: n_tokens * view[0].nbytes])
        return digest.digest()

    def _require_unchanged(self, share: FakeShare) -> None:
        if self.n_past(share.seq_id) != share.n_prefix or not self._has_prefix(share):
            raise SequenceInUseError(f"sequence {share.seq_id} changed since its cells were reserved")

    def _has_prefix(self, share: FakeShare) -> bool:
        """Whether a sequence begins with what it held when it was shared, as the decoder knows it."""
        tokens = self.tokens(share.seq_id)[: share.n_prefix]
        return LedgerPrefix.of(tokens) == share._prefix

    def _is_touched(self, share: FakeShare) -> bool:
        """Whether the bytes of the prefix are others than before."""
        return self._has_prefix(share) and self._digest(share.seq_id, share.n_prefix) != share._rows

    def _hold(self, seq_id: int, tokens: Sequence[int], cells: _Cells) -> None:
        """Let a sequence hold these tokens, the last of them in these cells."""
        before = self._sequences.get(seq_id)
        self._sequences[seq_id] = _Sequence(list(tokens), [*(before.cells if before else ()), cells])

    def _require_sequence(self, seq_id: int) -> None:
        if not 0 <= seq_id < self.n_seq_max:
            raise LocalProtocolError(f"sequence {seq_id} is out of range")

    def _require_no_cells(self, seq_id: int) -> None:
        self._require_sequence(seq_id)
        if seq_id in self._sequences:
            raise SequenceInUseError(f"sequence {seq_id} holds cells")

    def _require_no_lease(self, seq_id: int) -> None:
        self._require_sequence(seq_id)
        if seq_id in self._leases:
            raise SequenceInUseError(f"sequence {seq_id} has a share")

    def _take(self, n: int, seq_id: int) -> _Cells:
        """Find free cells: behind the sequence, else at a multiple of 256 if there is room."""
        if not 0 < n <= self.n_ctx_seq:
            raise NoFreeCellsError(f"there are no {n} cells in a cache of {self.n_ctx_seq}")
        runs = [cells for held in self._sequences.values() for cells in held.cells]
        taken = [*runs, *self._leases.values(), *self._withheld]
        held = self._sequences.get(seq_id)
        behind = [held.cells[-1].rows.stop] if held else []
        for first in (*behind, *range(0, self.n_ctx_seq, _ALIGNMENT), *range(self.n_ctx_seq)):
            if first + n <= self.n_ctx_seq and all(
                first + n <= each.first or each.first + each.n <= first for each in taken
            ):
                return _Cells(first, n)
        raise NoFreeCellsError(f"no {n} cells in a row are free")

    def _end(self, share: FakeShare, state: ShareState) -> None:
        if not share._state.live:
            return
        share._state = state
        if self._is_touched(share):
            self.clear(share.seq_id)
        if share._sent:
            self._withheld.append(self._leases[share.seq_id])
        self._forget(share)
        self._settle()

    def _settle(self) -> None:
        """Put fresh memory in the place of what providers got, when no share of it is live."""
        if not self._withheld or self._leases:
            return
        region, mappings = self._fresh()
        for old, new in zip(self._views(), mapping.layer_views(self.layout, mappings), strict=True):
            for cells in (cells for held in self._sequences.values() for cells in held.cells):
                new.k[cells.rows] = old.k[cells.rows]
                if old.v is not None and new.v is not None:
                    new.v[cells.rows] = old.v[cells.rows]
        del old, new
        self._drop_memory()
        self._region, self._mappings = region, mappings
        self._withheld.clear()

    def _fresh(self) -> tuple[fds.OwnedFd, list[mapping.Mapping]]:
        region = fds.memfd_create("kvshare-fake", self.layout.regions[0].size)
        try:
            return region, mapping.map_regions(self.layout, [(region, 0)])
        except BaseException:
            region.close()
            raise

    def _drop_memory(self) -> None:
        for each in self._mappings:
            each.close()
        self._region.close()

    def _forget(self, share: FakeShare) -> None:
        self._leases.pop(share.seq_id, None)
        self._shares.pop(share.share_id, None)
        share.ledger.close()
        if share._own_connection is not None:
            share._own_connection.close()


class FakeProvider:
    """A provider that computes with `fake_rows` and writes through views.

    Attributes:
        offer: what it serves; stays the caller's.
        n_prefilled: tokens whose rows the last prefill wrote: those behind the prefix.
        before_complete: hook, called with the provider when all rows are written and the ledger is
            still filling: change memory or the ledger there, raise, or sleep.
        before_rows: hook, called with the provider and the number of rows that are done, before each
            step.
    """

    def __init__(
        self,
        offer: Offer,
        *,
        step: int = 16,
        before_rows: Callable[[FakeProvider, int], None] | None = None,
        before_complete: Callable[[FakeProvider], None] | None = None,
    ) -> None:
        self.offer = offer
        self.step = step
        self.before_rows = before_rows
        self.before_complete = before_complete
        self.tokens: list[int] = []
        self.n_prefilled = 0

    def prefill(self, tokens: Sequence[int], *, progress: Callable[[int], None] | None = None) -> None:
        """Write the rows of all tokens behind the prefix; the watermark follows.

        Raises:
            LocalProtocolError: more tokens than the lease has cells, or they do not begin with the prefix.
        """
        prefix = self.offer.ledger.prefix
        prefix.require_start_of(tokens)
        n_prefix, n_new = prefix.n_tokens, len(tokens) - prefix.n_tokens
        ((first, last),) = self.offer.header.cells[0]
        if n_new > last - first:
            raise LocalProtocolError(f"{n_new} tokens do not fit into a lease of {last - first} cells")
        self.tokens = list(tokens)
        self.offer.ledger.begin(prefix_sha256=prefix.sha256)
        views = self.offer.views()
        rows = {
            (layer.il, kind): fake_rows(tokens, layer.il, kind, layer.k.shape[1])[n_prefix:]
            for layer in views
            for kind in "kv"
        }
        for start in range(0, n_new, self.step):
            if self.before_rows:
                self.before_rows(self, start)
            end = min(start + self.step, n_new)
            for layer in views:
                for kind, view in (("k", layer.k), ("v", layer.v)):
                    if view is not None:
                        view[first + start : first + end] = rows[layer.il, kind][start:end]
            self.offer.ledger.advance(n_prefix + end)
            if progress:
                progress(n_prefix + end)
        self.n_prefilled = n_new

    def publish(self) -> None:
        """Vouch for what was written."""
        if self.before_complete:
            self.before_complete(self)
        self.offer.complete(self.tokens)

    def serve(self, tokens: Sequence[int]) -> None:
        """Prefill and publish; what fails stands in the ledger.

        Raises:
            KvshareError: what failed.
        """
        try:
            self.prefill(tokens)
            self.publish()
        except KvshareError as error:
            self.offer.fail(f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Nothing to free: the offer is the caller's."""

    def __enter__(self) -> FakeProvider:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
