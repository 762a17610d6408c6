"""The decoder: exports its cache, shares it, and adopts what a provider has filled.

The order of things, for one share:

1. `share` takes cells (a lease) for an empty sequence, or behind what a sequence holds (its prefix),
   and issues a ledger. Nobody else gets these cells, and attention does not see them.
2. `Share.send` hands descriptors of the cache and of the ledger to a provider, `Share.wait` waits for it.
3. The provider fills the cells, and vouches in the ledger for what it did.
4. `adopt` copies the ledger, checks the copy against what the decoder knows itself, and enters the
   cells into the sequence. No byte of K and V is copied.

What goes wrong ends the share: the sequence is as it was before, and fresh memory takes the place of
the regions that the provider got. Whatever it still writes, nobody reads. A sequence that held a prefix
ends empty if that cannot be trusted any more: the provider has changed it, or the sequence has windows
or a recurrent state and was decoded meanwhile. `context.n_past` says which.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare import fds, wire
from kvshare._native import cuda, loader, signatures
from kvshare._native.context import Context, Model
from kvshare.device import DevicePlace
from kvshare.errors import (
    ExpiredError,
    KvshareError,
    LedgerError,
    LedgerIncompleteError,
    LedgerPendingError,
    LocalProtocolError,
    NativeError,
    NotShareableError,
    RemoteProtocolError,
    ReplayError,
    SequenceInUseError,
)
from kvshare.layout import Layout, canonical_json
from kvshare.ledger import HEADER_NBYTES, Ledger, LedgerState
from kvshare.wire import ShareState

DEFAULT_EXPIRES_MS = 60_000
MAX_EXPIRES_MS = 24 * 3600 * 1000

# as the library makes it: room for the largest metadata; only the pages that are written cost memory
_LEDGER_NBYTES = HEADER_NBYTES + (64 << 20)

_N_SHARE_IDS = 2**53 - 1  # JSON-safe, from 1 on
_NO_TOKENS = array.array("i")

Cells = tuple[tuple[tuple[int, int], ...], ...]  # by cache, ranges [from, to)


# what the ledger says, as a state of the share; the rest is decided here
_SEEN = {LedgerState.FILLING: ShareState.FILLING, LedgerState.COMPLETE: ShareState.COMPLETE}


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """Build contexts whose cache can be shared: those that this thread creates inside the block.

    The caches live in sealed memfds instead of anonymous memory, and on a GPU in memory that can be exported
    as well; nothing else about them differs.
    For programs that build their contexts themselves, such as `llama_cpp.Llama`.

    Raises:
        LibraryError: the patched libllama is not there.
        NativeError: export or import is on in this thread already.
    """
    lib = loader.load().lib
    lib.llama_kv_share_export_begin()
    try:
        yield
    except BaseException:
        with contextlib.suppress(KvshareError):
            lib.llama_kv_share_end()
        raise
    lib.llama_kv_share_end()


@dataclass(frozen=True)
class Adopted:
    """What an adoption did.

    Attributes:
        n_adopted: tokens that are in the sequence now, those of the prefix among them.
        bytes_in_place: K, V and state bytes that were where they have to be.
        bytes_moved: bytes that had to be moved inside the regions; 0 in every known case.
        t_us: time in the library, microseconds.
    """

    n_adopted: int
    bytes_in_place: int
    bytes_moved: int
    t_us: float


class Share:
    """A live offer of cells to one provider. Made by `Decoder.share`.

    As a context manager it releases the lease if nobody adopted it.

    Attributes:
        share_id: random, single use.
        seq_id: the sequence that will hold the cells.
        n_tokens: tokens that there is room for, those of the prefix among them.
        n_prefix: tokens that the sequence held when it was shared.
        strict: whether `Decoder.adopt` waits until the provider has let go.
        t_us: time that issuing it took, microseconds.
    """

    def __init__(
        self,
        decoder: Decoder,
        template: wire.ShareTemplate,
        *,
        share_id: int,
        seq_id: int,
        n_tokens: int,
        prefix: array.array[int],
        strict: bool,
        cells: Cells,
        ledger_fd: int,
        descriptors: tuple[int, ...],
        expires_ms: int,
    ) -> None:
        self.share_id = share_id
        self.seq_id = seq_id
        self.n_tokens = n_tokens
        self.n_prefix = len(prefix)
        self.strict = strict
        self.t_us = 0.0
        self._decoder = decoder
        self._template = template
        self._prefix = prefix
        self._cells = cells
        self._ledger_fd = ledger_fd
        self._descriptors = descriptors
        self._expires_ms = expires_ms
        self._deadline = time.monotonic() + expires_ms / 1000
        self._state = ShareState.ISSUED
        self._header: wire.ShareHeader | None = None
        self._ledger: Ledger | None = None
        self._sent = False  # or tried to: somebody may have the descriptors
        self._connection: socket.socket | None = None
        self._own_connection: socket.socket | None = None

    @property
    def state(self) -> ShareState:
        """Where the share stands, as the ledger and the clock say.

        A provider that has failed shows at `wait` and `adopt`, which say why; until then the share is as live
        as it was.
        """
        self._look_at_the_clock()
        if self._state.live:
            decoder = self._decoder
            with contextlib.suppress(LedgerError):  # a broken ledger says nothing; adopt refuses it
                look = decoder._lib.llama_kv_share_look(decoder.context.handle, self.seq_id, None, None, 0)
                seen = _SEEN.get(LedgerState(look))
                if seen in wire.TRANSITIONS[self._state]:
                    self._state = seen
        return self._state

    @property
    def header(self) -> wire.ShareHeader:
        """What is sent."""
        if self._header is None:
            self._header = self._template.header(
                share_id=self.share_id, cells=self._cells, expires_ms=self._expires_ms
            )
        return self._header

    @property
    def ledger(self) -> Ledger:
        """The ledger that is sent, mapped when it is first asked for.

        *Ownership*: closed when the share ends.
        """
        if self._ledger is None:
            if not self._state.live:
                raise LocalProtocolError(f"this share is {self._state.value}, its ledger is closed")
            descriptor = fds.OwnedFd(os.dup(self._ledger_fd))
            self._ledger = Ledger.open(descriptor, self._template.ledger.size)
        return self._ledger

    def _look_at_the_clock(self) -> None:
        if self._state.live and time.monotonic() > self._deadline:
            self._decoder._end(self, ShareState.EXPIRED)

    def send(self, target: socket.socket | str | os.PathLike[str], *, deadline: float | None = None) -> None:
        """Send the header and the descriptors with one `sendmsg`.

        Args:
            target: a connected unix socket, or the path of one that a provider listens on.
            deadline: `time.monotonic()` value; None means 10 s from now.

        Raises:
            PeerError: nobody listens, another uid, closed, too slow.
            LocalProtocolError: the share has ended.

        *Ownership*: the provider gets descriptors of its own. A connection made here is closed when the
            share ends; a socket that was given stays the caller's.
        """
        self._look_at_the_clock()
        if not self._state.live:
            raise LocalProtocolError(f"this share is {self._state.value}, it cannot be sent")
        if self._connection is not None:
            raise LocalProtocolError("this share was sent already")
        if isinstance(target, socket.socket):
            self._decoder._require_own_user(target)
            connection = target
        else:
            connection = self._own_connection = fds.connect_unix(target, deadline=deadline)
        self._sent = True
        payload = self._template.encode(self.share_id, self._cells, self._expires_ms)
        fds.send_message(connection, payload, (*self._descriptors, self._ledger_fd), deadline=deadline)
        self._connection = connection

    def wait(
        self, *, deadline: float | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """Wait for the provider's word that it is done, on the connection that the share was sent on.

        `adopt` looks at the ledger, not at this word.

        Args:
            deadline: `time.monotonic()` value; None means when the share expires.
            progress: called with the number of tokens that are done, and of all.

        Raises:
            PeerClosedError: the provider closed the connection, or died, before it was done.
            DeadlineExceededError: it was not done in time.
            LedgerIncompleteError: it says that it has failed, and why.
            LocalProtocolError: the share was not sent.
        """
        if self._connection is None:
            raise LocalProtocolError("send the share before you wait for its provider")
        deadline = self._deadline if deadline is None else min(deadline, self._deadline)
        self._decoder.prepare()  # there is time
        while True:
            payload, descriptors = fds.receive_message(self._connection, deadline=deadline, max_fds=0)
            assert not descriptors
            message = wire.decode(payload)
            if isinstance(message, wire.Outcome) and message.share_id == self.share_id:
                if not message.ok:
                    raise LedgerIncompleteError(f"the provider failed: {message.error}")
                return
            if isinstance(message, wire.Progress) and message.share_id == self.share_id:
                if progress:
                    progress(message.n_filled, message.n_tokens)
                continue
            raise RemoteProtocolError(f"unexpected {type(message).__name__} from the provider")

    def wait_until_let_go(self, *, deadline: float | None = None) -> None:
        """Wait until the provider has closed its connection, as it does after it has unmapped the regions.

        The kernel closes it for a provider that dies. `adopt` of a strict share waits by itself.

        Args:
            deadline: `time.monotonic()` value; None means when the share expires.

        Raises:
            DeadlineExceededError: it holds on to them.
            LocalProtocolError: the share was not sent, or the socket that was given for it is closed.
        """
        if self._connection is None:
            raise LocalProtocolError("send the share before you wait for its provider")
        if self._connection.fileno() < 0:
            raise LocalProtocolError("the socket that the share was sent on is closed here")
        deadline = self._deadline if deadline is None else min(deadline, self._deadline)
        fds.wait_for_hangup(self._connection, deadline=deadline)

    @property
    def provider_pid(self) -> int:
        """Process id of the provider, as the kernel says.

        Raises:
            LocalProtocolError: the share was not sent.
        """
        if self._connection is None:
            raise LocalProtocolError("this share was not sent")
        return fds.peer_credentials(self._connection).pid

    def release(self) -> None:
        """Give the lease back; idempotent.

        If the share was sent, fresh memory takes the place of what the provider can write to. The
        sequence holds its prefix, unless that has changed; see the top of this module.
        """
        self._decoder._end(self, ShareState.RELEASED)

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Decoder:
    """A context whose cache can be shared.

    Attributes:
        context: the context; decode with it as ever.
        layout: what the bytes of its cache are.
        devices: UUIDs of the GPUs that its cache lies on; empty if all of it lies on the host.
    """

    def __init__(
        self, context: Context, *, owns_model: bool = False, llama: Any = None, forked: bool = False
    ) -> None:
        """Take a context that was built inside `exporting`; `open` and `wrap` do it for you.

        Args:
            context: the context.
            owns_model: close the model with the decoder.
            llama: the `llama_cpp.Llama` whose context it is.
            forked: it was built on private mappings of a prefix; such a context cannot be shared.

        Raises:
            NotShareableError: its memory cannot be shared, with the reason.
        """
        self.context = context
        self._owns_model = owns_model
        self._llama = llama
        self._lib = context.library.lib
        self._n_seq_max = context.n_seq_max
        self._n_ctx_seq = context.n_ctx_seq
        if not forked:
            self._lib.llama_kv_share_supported(context.handle)
        text, self._layout_digest = describe(self._lib.llama_kv_share_layout, context.handle, 0)
        self.layout = Layout.parse(text)
        self._semantics = Text(self._lib.llama_kv_share_semantics, context.handle)
        self._caches = canonical_json([cache.to_json() for cache in self.layout.caches]).decode()
        self._tensors = [[tensor.to_json() for tensor in each.tensors] for each in self.layout.regions]
        self.devices: list[str] = []
        self._templates: dict[tuple[int, bool], wire.ShareTemplate] = {}
        self._descriptors: dict[int, tuple[int, ...]] = {}
        self._issued = signatures.Issued()
        self._ranges = (signatures.Range * 32)()
        self._checked: Callable[[], socket.socket | None] = lambda: None
        if not forked:  # once, here: what is the same for all shares
            self.prepare()
            semantics = bytes.fromhex(self._semantics.read()[1])
            for seq_id in range(self._n_seq_max):
                self._template(seq_id, semantics, strict=False)
        self._shares: dict[int, Share] = {}
        self._withheld: set[int] = set()  # sequences whose lease could not be given back

    @classmethod
    def open(cls, model: str | os.PathLike[str] | Model, **context: Any) -> Decoder:
        """Load a model and create a context that can be shared.

        Args:
            model: a GGUF file, or a model that is open.
            context: as for `Context.create`: `n_ctx`, `n_batch`, `n_ubatch`, `n_seq_max`, `kv_unified`,
                `type_k`, `type_v`, `flash_attn`, `swa_full`, `n_threads`, ...

        Raises:
            ModelError: the file is no model.
            NotShareableError: the memory of this model cannot be shared, with the reason.

        *Ownership*: `close` frees the context, and the model if it was loaded here.
        """
        owns_model = not isinstance(model, Model)
        loaded = model if isinstance(model, Model) else Model.open(model)
        try:
            with exporting():
                created = Context.create(loaded, **context)
            try:
                return cls(created, owns_model=owns_model)
            except BaseException:
                created.close()
                raise
        except BaseException:
            if owns_model:
                loaded.close()
            raise

    @classmethod
    def fork(cls, prefix: Any, model: str | os.PathLike[str] | Model, **context: Any) -> Decoder:
        """Create a context that holds a frozen prefix, on private (copy-on-write) mappings of it.

        Args:
            prefix: a `kvshare.Prefix`.
            model: a GGUF file, or a model that is open.
            context: as for `Context.create`; what the layout depends on has to be as the prefix has it.

        Raises:
            KvshareError: as `kvshare.Prefix.fork`.

        *Ownership*: as of `open`; the prefix stays the caller's, and may be closed after this.
        """
        forked: Decoder = prefix.fork(model, **context)
        return forked

    @classmethod
    def wrap(cls, llama: Any) -> Decoder:
        """Wrap a `llama_cpp.Llama` that was built inside `exporting()`.

        After `adopt`, `llama` knows the tokens as well: `llama.generate` goes on behind them.

        Raises:
            NotShareableError: it was built outside, or its memory cannot be shared.

        *Ownership*: the context stays the one of `llama`, which is kept alive by this object.
        """
        library = loader.load()
        model = Model(library, llama._model.model, owned=False, owner=llama)
        return cls(Context(model, llama._ctx.ctx, owner=llama), llama=llama)

    def share(
        self,
        seq_id: int = 0,
        *,
        n_tokens: int | None = None,
        prefix: Sequence[int] | None = None,
        expires_ms: int = DEFAULT_EXPIRES_MS,
        strict: bool = False,
    ) -> Share:
        """Take cells for an empty sequence, or behind what it holds, and offer them.

        Do not decode the sequence before the share has ended.

        Args:
            seq_id: the sequence.
            n_tokens: tokens to make room for, those of the prefix among them; None takes all that a
                sequence can have.
            prefix: the tokens that the sequence holds, all of them: the provider goes on behind them.
                None or empty if it holds none.
            expires_ms: milliseconds from now after which the share is dead, at most a day.
            strict: trust no provider after its end, and show it nothing of earlier prompts. The share is
                made in fresh memory, unless it exposes all sequences. `adopt` waits until the provider has
                let go of the memory, and zeroes what is free there, which takes about as long as to write
                the cache once. A provider keeps nothing warm for the next share.

        Raises:
            LocalProtocolError: a number is out of range.
            SequenceInUseError: the sequence holds other cells than those of the prefix, or has a share.
            NoFreeCellsError: no run of free cells is long enough.
            NotShareableError: more regions than descriptors fit into a message.

        *Ownership*: the share holds the lease until it is adopted, released or expired.
        """
        start = time.perf_counter_ns()
        n_tokens = self._n_ctx_seq if n_tokens is None else n_tokens
        ids = _int32(prefix) if prefix is not None else _NO_TOKENS
        _require_in("seq_id", seq_id, 0, self._n_seq_max)
        _require_in("n_tokens", n_tokens, len(ids) + 1, self._n_ctx_seq + 1)
        _require_in("expires_ms", expires_ms, 1, MAX_EXPIRES_MS + 1)
        self._expire()
        if ids and (n_past := self.context.n_past(seq_id)) != len(ids):
            raise SequenceInUseError(f"the prefix has {len(ids)} tokens, sequence {seq_id} holds {n_past}")
        share_id = 1 + int.from_bytes(os.urandom(7), "little") % _N_SHARE_IDS
        cells = self._issue(seq_id, share_id, n_tokens, ids, strict=strict)
        try:
            template = self._template(seq_id, bytes(self._issued.semantics), strict=strict)
        except BaseException:
            self._lib.llama_kv_share_release(self.context.handle, seq_id, False)
            raise
        share = Share(
            self,
            template,
            share_id=share_id,
            seq_id=seq_id,
            n_tokens=n_tokens,
            prefix=ids,
            strict=strict,
            cells=cells,
            ledger_fd=self._issued.ledger_fd,
            descriptors=self._descriptors[seq_id],
            expires_ms=expires_ms,
        )
        self._shares[share_id] = share
        share.t_us = (time.perf_counter_ns() - start) / 1000
        return share

    def _issue(
        self, seq_id: int, share_id: int, n_tokens: int, prefix: array.array[int], *, strict: bool
    ) -> Cells:
        """Take the lease and make its ledger; return the cells, by cache."""
        n = self._lib.llama_kv_share_issue_ledger(
            self.context.handle,
            seq_id,
            share_id,
            n_tokens,
            prefix.buffer_info()[0],
            len(prefix),
            strict,
            ctypes.byref(self._issued),
            self._ranges,
            len(self._ranges),
        )
        ranges: Any = self._ranges
        if n > len(ranges):
            ranges = _array(self._lib.llama_kv_share_lease, signatures.Range, self.context.handle, seq_id)
        cells: list[list[tuple[int, int]]] = [[] for _ in self.layout.caches]
        for i in range(n):
            cells[ranges[i].cache].append((ranges[i].from_, ranges[i].to))
        return tuple(map(tuple, cells))

    def _require_own_user(self, connection: socket.socket) -> None:
        """Check the user at the other end; it stays the same one as long as the socket is connected."""
        if self._checked() is not connection:
            fds.require_peer_uid(connection)
            self._checked = weakref.ref(connection)

    def _template(self, seq_id: int, semantics: bytes, *, strict: bool) -> wire.ShareTemplate:
        """Return what the shares of a sequence have in common.

        It changes with adapters, and, on a GPU, when fresh memory takes the place of what was sent.
        """
        template = self._templates.get((seq_id, strict))
        if template is None or template.semantics_digest != semantics or self._is_moved(template, seq_id):
            semantics_text, semantics_hex = self._semantics.read()
            regions = self._entries(seq_id)
            template = wire.ShareTemplate(
                layout=self._layout_digest,
                semantics=semantics_hex,
                params={
                    **params(self._lib, self.context.handle, seq_id),
                    "abi": self.layout.abi,
                    "byte_order": self.layout.byte_order,
                    "caches": self._caches,
                    "semantics": semantics_text,
                    "strict": int(strict),
                },
                regions=regions,
                ledger=wire.LedgerEntry(fd=len(regions), size=_LEDGER_NBYTES),
            )
            self._templates[seq_id, strict] = template
        return template

    def prepare(self) -> None:
        """Make ready what the next share needs, in a moment that is not short of time; `Share.wait` does it.

        A share that nothing was prepared for takes some 0.05 ms longer.
        """
        with contextlib.suppress(NativeError):  # whoever shares will say why
            self._lib.llama_kv_share_prepare(self.context.handle)

    def _entries(self, seq_id: int) -> tuple[wire.RegionEntry, ...]:
        """Return what the header says of the regions of a sequence; note their descriptors."""
        regions = _array(self._lib.llama_kv_share_regions, signatures.Region, self.context.handle, seq_id)
        if len(regions) + 1 > fds.MAX_FDS:
            raise NotShareableError(
                f"{len(regions)} regions and the ledger exceed the {fds.MAX_FDS} descriptors of a message"
            )
        self._descriptors[seq_id] = tuple(region.fd for region in regions)
        return tuple(
            wire.RegionEntry(
                fd=index,
                offset=region.offset,
                size=region.size,
                layout=self._tensors[index] if kind == "memfd" else self._place(seq_id, index).to_json(),
                kind=kind,
            )
            for index, region in enumerate(regions)
            for kind in (wire.KINDS[region.kind],)
        )

    def _place(self, seq_id: int, index: int) -> DevicePlace:
        """Return where a region on a GPU lies."""
        uuid, mapped = signatures.Uuid(), ctypes.c_uint64()
        memory = self._memory(seq_id, index, ctypes.byref(uuid), ctypes.byref(mapped))
        device = cuda.uuid_text(bytes(uuid))
        if device not in self.devices:
            self.devices.append(device)
        return DevicePlace(device, mapped.value, memory, self._tensors[index])

    def _memory(self, seq_id: int, index: int, uuid: Any = None, mapped: Any = None) -> int | None:
        """Return the number that a region's allocation on a GPU has; ask for the rest as well, if wanted."""
        memory = ctypes.c_uint64()
        handle = self.context.handle
        self._lib.llama_kv_share_device(handle, seq_id, index, uuid, mapped, ctypes.byref(memory))
        return memory.value % 2**53 or None

    def _is_moved(self, template: wire.ShareTemplate, seq_id: int) -> bool:
        """Whether a region on a GPU has another allocation than the template says."""
        if not self.devices:
            return False
        return any(
            isinstance(entry.layout, dict) and entry.layout["memory"] != self._memory(seq_id, index)
            for index, entry in enumerate(template.regions)
        )

    def dma_buf(self, seq_id: int = 0, region: int = 0) -> fds.OwnedFd:
        """Return the memory of a region on a GPU as a dma-buf, for a driver of something else.

        A network card, for example; providers do not need one. When a share that was sent ends without
        adoption, fresh memory takes the place of the region: the dma-buf is that of the old one.

        Args:
            seq_id: the sequence.
            region: which of the regions of its shares.

        Raises:
            NotShareableError: the CUDA driver makes no dma-bufs.
            NativeError: there is no such region, it lies on the host, or the CUDA driver refuses.

        *Ownership*: the caller closes it; the memory lives at least as long.
        """
        return fds.OwnedFd(self._lib.llama_kv_share_dma_buf(self.context.handle, seq_id, region))

    def adopt(
        self,
        share: Share,
        tokens: Sequence[int],
        *,
        allow_other_semantics: bool = False,
        deadline: float | None = None,
    ) -> Adopted:
        """Check what the provider vouches for, and enter its cells into the sequence.

        Args:
            share: a share of this decoder.
            tokens: the prompt from position 0: the prefix, and the tokens that were to be prefilled.
            allow_other_semantics: accept a provider of other semantics, such as another quantization
                of the same weights.
            deadline: of a strict share, until when its provider has to have let go, a `time.monotonic()`
                value; None means when the share expires.

        Returns:
            What was done; the next decode of the sequence goes on at position `len(tokens)`.

        Raises:
            ReplayError: the share is not of this decoder, or was used or released already.
            ExpiredError: it ran past its deadline.
            LedgerPendingError: the provider is not done; the share lives on.
            LedgerIncompleteError: it failed, or vouches for fewer tokens, or for cells that were never
                written; the share has failed.
            DeadlineExceededError: the provider of a strict share holds on to the memory; the share lives on.
            LedgerError: the ledger, its metadata or a digest is wrong, or the tokens do not begin with the
                prefix; the share has failed.
            SequenceInUseError: the sequence or its cells changed since the share; it has failed.

        What a sequence holds behind a failure is said at the top of this module.
        """
        start = time.perf_counter_ns()
        ids = _int32(tokens)
        if share._decoder is not self:
            raise ReplayError(f"share {share.share_id} is not a share of this decoder")
        share._look_at_the_clock()
        if share._state is ShareState.EXPIRED:
            raise ExpiredError(f"share {share.share_id} has expired")
        if not share._state.live:
            raise ReplayError(f"share {share.share_id} is {share._state.value} already")
        adopted = signatures.Adopted()
        vouched = (self.context.handle, share.seq_id, ids.buffer_info()[0], len(ids), allow_other_semantics)
        if share.strict:
            self._vouch(share, self._lib.llama_kv_share_check, *vouched)  # before anybody waits for nothing
            share.wait_until_let_go(deadline=deadline)
        self._vouch(share, self._lib.llama_kv_share_settle, *vouched, ctypes.byref(adopted))
        share._state = ShareState.ADOPTED
        self._forget(share)
        if share.strict:
            self._lib.llama_kv_share_scrub(self.context.handle, share.seq_id)
        if self._llama is not None and share.seq_id == 0:
            # llama_cpp.Llama keeps the tokens of its sequence beside the cache
            self._llama.input_ids[: len(ids)] = ids
            self._llama.n_tokens = len(ids)
        return Adopted(
            n_adopted=adopted.n_tokens,
            bytes_in_place=adopted.bytes_in_place,
            bytes_moved=adopted.bytes_moved,
            t_us=(time.perf_counter_ns() - start) / 1000,
        )

    def _vouch(self, share: Share, function: Any, *arguments: Any) -> None:
        """Call a function that looks at the ledger; what it refuses ends the share."""
        try:
            function(*arguments)
        except LedgerPendingError:
            raise
        except BaseException:
            self._end(share, ShareState.FAILED)
            raise

    def close(self) -> None:
        """End all shares, free what was created here; idempotent."""
        for share in list(self._shares.values()):
            self._end(share, ShareState.RELEASED)
        model = self.context.model
        self.context.close()
        if self._owns_model:
            model.close()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, share: Share, state: ShareState) -> None:
        if not share._state.live:
            return
        share._state = state
        self._forget(share)
        if not self.context.closed:
            self._give_back(share.seq_id, renew=share._sent)
            if self._llama is not None and share.seq_id == 0 and share.n_prefix:
                # the prefix may be gone, and what llama_cpp.Llama believes to be there with it
                self._llama.n_tokens = min(self._llama.n_tokens, self.context.n_past())

    def _give_back(self, seq_id: int, *, renew: bool) -> None:
        self._withheld.discard(seq_id)
        try:
            self._lib.llama_kv_share_release(self.context.handle, seq_id, renew)
        except NativeError:  # no memory now to put in its place; its cells stay taken until there is
            self._withheld.add(seq_id)

    def _forget(self, share: Share) -> None:
        self._shares.pop(share.share_id, None)
        if share._ledger is not None:
            share._ledger.close()
        if share._own_connection is not None:
            share._own_connection.close()

    def _expire(self) -> None:
        if not self._shares and not self._withheld:
            return
        for share in list(self._shares.values()):
            share._look_at_the_clock()
        for seq_id in list(self._withheld):
            self._give_back(seq_id, renew=True)


class Text:
    """A canonical text that the library writes, and its digest; to read it again costs little."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._function = function
        self._arguments = arguments
        self._digest = signatures.Digest()
        self._buffer = ctypes.create_string_buffer(1 << 16)
        self._last = ("", b"")

    def read(self) -> tuple[str, str]:
        """Return the text and its digest as 64 hexadecimal digits."""
        size = len(self._buffer)
        n = self._function(*self._arguments, self._buffer, size, ctypes.byref(self._digest))
        if n >= size:
            self._buffer = ctypes.create_string_buffer(n + 1)
            return self.read()
        digest = bytes(self._digest)
        if digest != self._last[1]:
            self._last = self._buffer.value.decode(), digest
        return self._last[0], digest.hex()


def describe(function: Any, *arguments: Any) -> tuple[str, str]:
    """Call a function that writes a canonical text; return it and its digest as 64 hexadecimal digits."""
    return Text(function, *arguments).read()


def _require_in(name: str, value: int, start: int, stop: int) -> None:
    if not start <= value < stop:
        raise LocalProtocolError(f"{name} is {value}, which is not in [{start}, {stop})")


def _int32(tokens: Sequence[int]) -> array.array[int]:
    if isinstance(tokens, array.array) and tokens.typecode == "i":
        return tokens
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
        if view.format == "i" and view.ndim == 1:
            return array.array("i", view.tobytes())  # numpy: as fast as it gets
    except TypeError:
        pass
    try:
        return array.array("i", tokens)
    except (TypeError, OverflowError) as error:
        raise LocalProtocolError(f"tokens are not int32: {error}") from error


def _array(function: Any, kind: Any, *arguments: Any) -> list[Any]:
    """Call a function that fills an array, with one that is large enough."""
    size = 32
    while True:
        array = (kind * size)()
        n = function(*arguments, array, size)
        if n <= size:
            return list(array[:n])
        size = n


def params(lib: Any, handle: Any, seq_id: int) -> dict[str, wire.Scalar]:
    """Return what a provider of a sequence must reproduce, by name."""
    found = signatures.ContextParams()
    lib.llama_kv_share_params(handle, seq_id, ctypes.byref(found))
    return {name: getattr(found, name) for name, *_ in found._fields_}
