"""The provider: maps a decoder's cache, fills the leased cells, and vouches for them.

An `Offer` is a share as it arrives: header, descriptors, ledger. There are two ways to serve it:

- `Provider` builds a llama.cpp context on the offered regions and decodes the prompt in it. The
  decoder's cells are the provider's cells, so this works for every kind of cache. `WarmProvider` keeps
  it for the next offer of the same memory.
- `Offer.views` shows K and V of every layer as numpy arrays, for a provider that computes in another
  way. It fills the rows of the leased cells and calls `Offer.complete`. This works for plain caches.

A sequence that is offered may hold a prefix of the prompt already, `Offer.n_prefix` tokens of it. A
provider takes the whole prompt, checks that it begins with these tokens, and fills what comes behind:
their K and V are in the memory that it got.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any

from kvshare import fds, mapping, wire
from kvshare._native import loader, signatures
from kvshare._native.context import FLASH_ATTN, TYPES, Context, Model
from kvshare.device import DevicePlace
from kvshare.errors import (
    DescriptorError,
    KvshareError,
    LayoutMismatchError,
    LedgerError,
    LocalProtocolError,
    NativeError,
    NotShareableError,
    PeerClosedError,
    RemoteProtocolError,
)
from kvshare.fds import OwnedFd
from kvshare.layout import Layout, require_equal_semantics
from kvshare.ledger import Ledger, LedgerPrefix, tokens_digest

_COUNT = range(1, 1 << 31)
_FLAG = range(2)

# fields of `params` that a provider asks llama.cpp for, and the integers that they may be, or None for
# any number: llama.cpp ends the process over a type that it does not know, and over a batch of nothing
_CONTEXT_PARAMS: dict[str, Collection[int] | None] = {
    "n_ctx": _COUNT,
    "n_batch": _COUNT,
    "n_ubatch": _COUNT,
    "n_seq_max": _COUNT,
    "n_rs_seq": range(1 << 31),
    "type_k": frozenset(TYPES.values()),
    "type_v": frozenset(TYPES.values()),
    "flash_attn_type": frozenset(FLASH_ATTN.values()),
    "kv_unified": _FLAG,
    "swa_full": _FLAG,
    "offload_kqv": _FLAG,
    "rope_scaling_type": range(-1, 4),  # enum llama_rope_scaling_type
    "yarn_orig_ctx": range(1 << 31),
    "rope_freq_base": None,
    "rope_freq_scale": None,
    "yarn_ext_factor": None,
    "yarn_attn_factor": None,
    "yarn_beta_fast": None,
    "yarn_beta_slow": None,
}

# those that size the cache or decide how it is laid out: named first when layouts differ
_LAYOUT_PARAMS = (
    "n_ctx",
    "n_seq_max",
    "n_rs_seq",
    "kv_unified",
    "type_k",
    "type_v",
    "flash_attn_type",
    "swa_full",
)

Progress = Callable[[int], None]
"""Called with the number of tokens that are done, those of a prefix among them."""

# how long a provider waits for a decoder that does not read the outcome
_TELL_S = 1.0

logger = logging.getLogger("kvshare.provider")


class Offer:
    """A share as a provider receives it.

    *Ownership*: owns the descriptors, the ledger and the mappings until `close`.

    Attributes:
        header: what the decoder says.
        layout: what the bytes of the regions are; its digest was checked against the header's.
        seq_id: the sequence that a llama.cpp provider decodes.
        n_prefix: tokens of the prompt that the sequence holds already; `ledger.prefix` says more.
        ledger: where the provider vouches.
    """

    def __init__(self, header: wire.ShareHeader, descriptors: Sequence[OwnedFd]) -> None:
        """Check a header against its descriptors.

        Raises:
            RemoteProtocolError: the header contradicts itself.
            DescriptorError: the descriptors are not what the header says.
            NotShareableError: a region is a dma-buf.
            LedgerError: the ledger is none.

        *Ownership*: takes the descriptors, and closes them if it raises.
        """
        self._mappings: list[mapping.AnyMapping] | None = None
        self._fds = list(descriptors)
        try:
            wire.check_descriptors(header, len(descriptors))
            self.header = header
            self._places = [_place(entry, descriptors[entry.fd].fileno()) for entry in header.regions]
            self._require_disjoint()
            parts = [
                (entry.size, entry.layout if place is None else place.tensors)
                for entry, place in zip(header.regions, self._places, strict=True)
            ]
            self.layout = Layout.from_parts(header.params, parts, header.layout)
            if len(header.cells) != len(self.layout.caches):
                raise RemoteProtocolError(
                    f"cells of {len(header.cells)} caches, the layout has {len(self.layout.caches)}"
                )
            self.seq_id = int(_param(header.params, "seq_id", range(1 << 31)))
            try:
                self.ledger = Ledger.open(descriptors[header.ledger.fd], header.ledger.size)
            except OSError as error:  # more than an address space has
                raise DescriptorError(f"the ledger cannot be mapped: {error.strerror}") from error
            self.n_prefix = self.ledger.n_prefix
        except BaseException:
            for owned in self._fds:
                owned.close()
            raise

    @classmethod
    def receive(cls, connection: socket.socket, *, deadline: float | None = None) -> Offer:
        """Receive a share from a connected unix socket.

        Args:
            connection: from `fds.accept_unix`, which checks the peer's uid.
            deadline: `time.monotonic()` value; None means 10 s from now.

        Raises:
            PeerError: closed, or too slow.
            ProtocolError: no share header.
            DescriptorError: truncated, or not what the header says. Everything is closed then.
        """
        payload, descriptors = fds.receive_message(connection, deadline=deadline)
        try:
            header = wire.decode(payload)
            if not isinstance(header, wire.ShareHeader):
                raise RemoteProtocolError(f"expected a share, got {type(header).__name__}")
        except BaseException:
            for owned in descriptors:
                owned.close()
            raise
        return cls(header, descriptors)

    @property
    def first_cell(self) -> int:
        """First leased cell of the first cache; the first token behind the prefix goes there."""
        return self.header.cells[0][0][0] if self.header.cells[0] else 0

    @property
    def exposes_all(self) -> bool:
        """Whether the regions hold other sequences of the decoder as well."""
        return bool(self.header.params.get("exposes_all"))

    @property
    def strict(self) -> bool:
        """Whether the decoder waits until the regions are unmapped and the connection is closed."""
        return bool(self.header.params.get("strict"))

    @property
    def devices(self) -> list[str]:
        """UUIDs of the GPUs that regions lie on, each once; empty if all lie on the host."""
        return list(dict.fromkeys(place.device for place in self._places if place is not None))

    def memory(self) -> list[tuple[object, int, int]]:
        """Return what tells the memory of each region from any other: what it lies in, offset, size."""
        found: list[tuple[object, int, int]] = []
        for entry, place in zip(self.header.regions, self._places, strict=True):
            whole = _inode(self._fds[entry.fd]) if place is None else place.identity
            found.append((whole, entry.offset, entry.size))
        return found

    def _require_disjoint(self) -> None:
        """Check that no byte is shared twice, whatever descriptors it is shared by."""
        places: dict[object, list[tuple[int, int]]] = {}
        for whole, offset, size in self.memory():
            places.setdefault(whole, []).append((offset, size))
        for each in places.values():
            for (start, size), (next_start, _) in pairwise(sorted(each)):
                if next_start < start + size:
                    raise RemoteProtocolError("two regions overlap in one memory")
        if _inode(self._fds[self.header.ledger.fd]) in places:
            raise RemoteProtocolError("the ledger lies in the memory of a region")

    def native_regions(self) -> Any:
        """Return the regions as the array of structs that an import takes."""
        array = (signatures.Region * len(self.header.regions))()
        for native, entry in zip(array, self.header.regions, strict=True):
            native.fd = self._fds[entry.fd].fileno()
            native.kind = wire.KINDS.index(entry.kind)
            native.offset = entry.offset
            native.size = entry.size
        return array

    def native_lease(self) -> Any:
        """Return the leased cells as the array of structs that a confinement takes."""
        ranges = [(i, a, b) for i, cache in enumerate(self.header.cells) for a, b in cache]
        return (signatures.Range * len(ranges))(*(signatures.Range(*each) for each in ranges))

    def views(self) -> list[mapping.LayerView]:
        """Return K and V of every layer; see `mapping.LayerView` for shapes.

        Write only the rows of the leased cells, `first_cell` on; call `ledger.begin` before the first.
        Views of a region on a GPU are `device.DeviceView`s: arrays for PyTorch, CuPy and the like.
        Synchronise the GPU before `ledger.advance`; `complete` does so itself.

        Raises:
            LibraryError: a region lies on a GPU, and there is no CUDA driver, or it is too old.
            NotShareableError: this process does not see the GPU.
            NativeError: the CUDA driver refuses.

        *Ownership*: a view keeps its mapping alive, as does an array that is made of it, and `close` raises
            while one exists.
        """
        return mapping.layer_views(self.layout, self._mapped())

    def complete(self, tokens: Sequence[int]) -> None:
        """Vouch for tokens whose rows were written through the views, from `first_cell` on.

        Args:
            tokens: the whole prompt; the rows are those of the tokens behind the prefix.

        Raises:
            NotShareableError: the cache is not a plain one.
            LocalProtocolError: `ledger.begin` was not called, or the tokens do not begin with the prefix.
        """
        prefix = self.ledger.prefix
        prefix.require_start_of(tokens)
        n_new = len(tokens) - prefix.n_tokens
        sample = mapping.plain_sample(self.layout, self._mapped(), self.first_cell, n_new)
        self.ledger.advance(len(tokens))
        self.ledger.complete(tokens_digest(tokens), len(tokens), sample)

    def fail(self, message: str) -> None:
        """Say in the ledger that the share will not be complete, if it is not decided yet."""
        with contextlib.suppress(KvshareError):
            self.ledger.fail(message)

    def close(self, *, leave_views: bool = False) -> None:
        """Unmap the regions and close the descriptors; idempotent.

        Args:
            leave_views: for a block that ends with an error of its own, which is the one to be seen: close
                the descriptors even if a view is still in use (the mapping then goes when the view does)
                or a GPU fails.

        Raises:
            LocalProtocolError: a view is still in use; regions without one are unmapped, nothing is closed.
                Close again when it is gone.
            NativeError: the CUDA driver failed to unmap a region; all the rest was closed.
        """
        failure: NativeError | None = None
        for each in self._mappings or ():
            try:
                each.close()
            except LocalProtocolError:
                if not leave_views:
                    raise
            except NativeError as error:
                failure = failure or error
        self._mappings = None
        self.ledger.close()
        for owned in self._fds:
            owned.close()
        if failure and not leave_views:
            raise failure

    def __enter__(self) -> Offer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        # an error's own frames may hold views
        self.close(leave_views=error is not None)

    def _mapped(self) -> list[mapping.AnyMapping]:
        if self._mappings is None:
            regions = [(self._fds[entry.fd], entry.offset) for entry in self.header.regions]
            self._mappings = mapping.map_regions(self.layout, regions, self._places)
        return self._mappings


def _inode(fd: OwnedFd) -> tuple[int, int]:
    status = os.fstat(fd.fileno())
    return status.st_dev, status.st_ino


def _place(entry: wire.RegionEntry, fd: int) -> DevicePlace | None:
    """Check a region's entry against its descriptor; return where it lies, None for the host."""
    if entry.kind == "cuda-vmm":
        place = DevicePlace.from_json(entry.layout)
        # the driver checks the rest: such a descriptor tells nothing
        if entry.offset + entry.size > place.mapped_size:
            raise RemoteProtocolError(
                f"region of {entry.size} bytes at {entry.offset} exceeds its allocation "
                f"of {place.mapped_size} bytes"
            )
        return place
    if entry.kind != "memfd":
        raise NotShareableError(
            f"regions of kind {entry.kind} are not for providers", hint="share the memory itself, as cuda-vmm"
        )
    fds.require_seals(fd)
    if entry.offset + entry.size > fds.fd_size(fd):
        raise RemoteProtocolError(
            f"region of {entry.size} bytes at {entry.offset} exceeds its descriptor "
            f"of {fds.fd_size(fd)} bytes"
        )
    return None


@contextlib.contextmanager
def importing(offer: Offer) -> Iterator[None]:
    """Build one context whose cache is the offered memory, inside the block.

    For programs that build their contexts themselves; `Provider` does it for you.

    Raises:
        LayoutMismatchError: the context's layout is another one; it was not created.
    """
    begin = loader.load().lib.llama_kv_share_import_begin
    with built_on(begin, offer.native_regions(), offer.layout, hint="build the context with n_seq_max 1"):
        yield


@contextlib.contextmanager
def built_on(begin: Any, regions: Any, layout: Layout, *, hint: str | None = None) -> Iterator[None]:
    """Build one context whose cache is some memory, inside the block.

    Args:
        begin: function of the library that says what to do with the memory.
        regions: the memory, an array of structs.
        layout: what the bytes of the memory are.
        hint: for a context that has more streams than the memory has regions.

    Raises:
        LayoutMismatchError: the context's layout is another one; it was not created.
    """
    lib = loader.load().lib
    begin(regions, len(regions), bytes.fromhex(layout.digest()))
    failure: Exception | None = None
    try:
        yield
    except NativeError as error:
        failure = error
    except BaseException:
        with contextlib.suppress(KvshareError):
            lib.llama_kv_share_end()
        raise
    try:
        lib.llama_kv_share_end()
    except NativeError as error:
        size = lib.llama_kv_share_import_layout(None, 0) + 1
        buffer = ctypes.create_string_buffer(size)
        lib.llama_kv_share_import_layout(buffer, size)
        if buffer.value:
            layout.require_equal(Layout.parse(buffer.value.decode()))
            # each stream is laid out as it should be, so there are more of them than regions
            raise LayoutMismatchError("n_stream", 1, "several", hint=hint) from failure
        raise error from failure
    if failure is not None:
        raise failure


class Provider:
    """A llama.cpp context over a decoder's cache.

    Attributes:
        offer: what it was built on.
        context: the context.
        prefill_ms: time of the last prefill.
        n_prefilled: tokens that the last prefill decoded: those behind the prefix.
    """

    prefill_ms = 0.0
    n_prefilled = 0

    def __init__(
        self,
        offer: Offer,
        model: Model,
        *,
        n_threads: int | None = None,
        allow_other_semantics: bool = False,
        **overrides: Any,
    ) -> None:
        """Build a context on an offer, with the parameters that the decoder names.

        Args:
            offer: a received share.
            model: the same model as the decoder's.
            n_threads: compute threads; None takes the CPUs that this process may run on.
            allow_other_semantics: accept other semantics, such as another quantization of the weights.
            overrides: parameters that differ from the decoder's on purpose, such as `n_ubatch`.

        Raises:
            LayoutMismatchError: the layout would differ; names the parameter or the tensor field.
            SemanticsMismatchError: model, adapters or RoPE differ; names the field.
            RemoteProtocolError: a parameter is missing, or is no number.

        *Ownership*: the offer and the model stay the caller's; `close` frees the context.
        """
        self.offer = offer
        self._lib = model.library.lib
        self._memory = offer.memory()  # while the context lives, no other memory gets this identity
        params = requested(offer.header.params, offer.layout, overrides)
        with importing(offer):
            self.context = Context.create(model, n_threads=n_threads, **params)
        try:
            self._require_semantics(allow_other=allow_other_semantics)
            self._confine()
        except BaseException:
            self.context.close()
            raise

    def _confine(self) -> None:
        lease = self.offer.native_lease()
        self._lib.llama_kv_share_confine(self.context.handle, self.offer.seq_id, lease, len(lease))

    def rebind(self, offer: Offer) -> bool:
        """Serve a next offer with the same context, if it offers the same memory.

        The same are descriptor, place and size of every region, layout, semantics and parameters. The
        sequence may be another one where the cache is plain; other caches keep it, because emptying a
        sequence may write to its memory, which is the decoder's again by now. What this context knows of
        the sequence gives way to the offer's prefix, if it has one, in `prefill`.

        Args:
            offer: a received share.

        Returns:
            Whether it is the same. If not, nothing has changed: close this provider, make another one.

        *Ownership*: the offer stays the caller's; the one before is not used any more.
        """
        before, now = self.offer.header, offer.header
        if (before.layout, before.semantics) != (now.layout, now.semantics):
            return False
        may_differ = {"seq_id"} if all(cache.is_plain for cache in offer.layout.caches) else set()
        if _without(before.params, may_differ) != _without(now.params, may_differ):
            return False
        if self._memory != offer.memory():
            return False
        if not offer.n_prefix or offer.seq_id != self.offer.seq_id:
            # not `forget`: that would zero the decoder's memory
            self.context.clear(self.offer.seq_id)
        self.offer = offer
        self._confine()
        return True

    def _require_semantics(self, *, allow_other: bool) -> None:
        size = 1 + self._lib.llama_kv_share_semantics(self.context.handle, None, 0, None)
        buffer = ctypes.create_string_buffer(size)
        digest = signatures.Digest()
        self._lib.llama_kv_share_semantics(self.context.handle, buffer, size, ctypes.byref(digest))
        self._semantics = bytes(digest).hex()
        if self._semantics != self.offer.header.semantics and not allow_other:
            expected = self.offer.header.params.get("semantics")
            require_equal_semantics(expected if isinstance(expected, str) else "{}", buffer.value.decode())

    def prefill(self, tokens: Sequence[int], *, progress: Progress | None = None) -> None:
        """Decode a prompt into the leased cells; the ledger's watermark follows each graph.

        Of an offer with a prefix only the tokens behind it are decoded. A model with an encoder encodes
        all tokens first, as its decoder has to.

        Args:
            tokens: token ids of the whole prompt, from position 0.
            progress: called after each graph with the number of tokens that are done. What it raises
                ends the prefill there; the ledger is left to the caller, and `rebind` works as ever.

        Raises:
            LocalProtocolError: no tokens, or more than the lease has cells, or one that the model
                does not have; or they do not begin with those of the prefix, or end with them.
            LedgerError: the metadata of the prefix is none of this memory.
            ReplayError: the share was issued anew meanwhile.
            NativeError: llama.cpp cannot decode.
        """
        self.context.model.check_tokens(tokens)
        ledger = self.offer.ledger
        prefix = ledger.prefix
        prefix.require_start_of(tokens)
        new = tokens[prefix.n_tokens :]
        self._require_room(len(new))

        def advance(n_done: int) -> None:
            ledger.advance(prefix.n_tokens + n_done)
            if progress:
                progress(prefix.n_tokens + n_done)

        start = time.perf_counter_ns()
        ledger.begin(layout=self.offer.header.layout, semantics=self._semantics, prefix_sha256=prefix.sha256)
        if prefix.n_tokens:
            self._enter(prefix)
        if self.context.model.has_encoder:
            self.context.encode(tokens)
        self.context.decode(new, position=prefix.n_tokens, seq_id=self.offer.seq_id, progress=advance)
        self._tokens = list(tokens)
        self.n_prefilled = len(new)
        self.prefill_ms = (time.perf_counter_ns() - start) / 1e6

    def _enter(self, prefix: LedgerPrefix) -> None:
        """Take over what the decoder's sequence holds in this memory, and go on in the lease."""
        if not prefix.blob:
            raise LedgerError("the ledger has no metadata of the prefix")
        self._lib.llama_kv_share_enter(
            self.context.handle,
            self.offer.seq_id,
            prefix.n_tokens,
            prefix.blob,
            len(prefix.blob),
            None,  # whatever the decoder's bytes are, they are the prefix
            ctypes.byref(signatures.Adopted()),
        )
        self._confine()

    def _require_room(self, n_tokens: int) -> None:
        for cache, cells in zip(self.offer.layout.caches, self.offer.header.cells, strict=True):
            # a window and a recurrent state go on in the cells that they have
            if cache.kind == "kv" and not cache.get("swa_type") and cells:
                room = sum(b - a for a, b in cells)
                if n_tokens > room:
                    raise LocalProtocolError(f"{n_tokens} tokens do not fit into a lease of {room} cells")

    def publish(self) -> None:
        """Vouch for what was prefilled: metadata, token digest, and a digest over samples of K and V.

        Raises:
            LedgerError: the metadata does not fit into the ledger.
        """
        sample = signatures.Digest()
        handle, seq_id = self.context.handle, self.offer.seq_id
        size = self._lib.llama_kv_share_publish(handle, seq_id, None, 0, None)
        buffer = ctypes.create_string_buffer(size)
        self._lib.llama_kv_share_publish(handle, seq_id, buffer, size, ctypes.byref(sample))
        self.offer.ledger.complete(
            tokens_digest(self._tokens), len(self._tokens), bytes(sample), memoryview(buffer).cast("B")
        )

    def close(self) -> None:
        """Free the context; idempotent. What was filled stays in the decoder's cache."""
        self.context.close()

    def __enter__(self) -> Provider:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def requested(
    params: Mapping[str, wire.Scalar], layout: Layout, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parameters of a context that is equal to the one that a header describes.

    Args:
        params: of the header.
        layout: of the header.
        overrides: parameters that differ on purpose, such as `n_ubatch`.

    Raises:
        LayoutMismatchError: an override would change the layout; names the parameter.
        RemoteProtocolError: a parameter is missing, or is no number.
    """
    overrides = dict(overrides)
    wanted: dict[str, Any] = {name: _param(params, name, known) for name, known in _CONTEXT_PARAMS.items()}
    # the largest has a cell for each position; llama.cpp allocates what is asked for, then it is compared
    n_cells = max((cache.size for cache in layout.caches if cache.kind == "kv"), default=0)
    if n_cells and wanted["n_ctx"] > n_cells * wanted["n_seq_max"]:
        raise RemoteProtocolError(f"params.n_ctx is {wanted['n_ctx']}, the layout has {n_cells} cells")
    # booleans travel as 0 and 1, as they are in the struct
    for name in ("kv_unified", "swa_full", "offload_kqv"):
        wanted[name] = bool(wanted[name])
    spelled = {key: overrides.pop(key) for key in ("flash_attn",) if key in overrides}
    if spelled:
        overrides["flash_attn_type"] = spelled["flash_attn"]
    for name, value in overrides.items():
        found = _number(name, value)
        if name in _LAYOUT_PARAMS and found != wanted.get(name):
            raise LayoutMismatchError(name, wanted.get(name), found)
        wanted[name] = found
    if wanted["n_batch"] < wanted["n_seq_max"]:
        # llama.cpp would end the process
        kind = LocalProtocolError if "n_batch" in overrides else RemoteProtocolError
        raise kind(f"n_batch is {wanted['n_batch']}, less than n_seq_max, {wanted['n_seq_max']}")
    wanted["flash_attn"] = wanted.pop("flash_attn_type")
    return wanted


class WarmProvider:
    """Fill one offer after the other; keep the context while they offer the same memory.

    Nothing of a strict share is kept.

    Attributes:
        provider: the context that is kept, or None.
        n_prefilled: tokens that the last `fill` decoded: those behind the prefix of its offer.
    """

    n_prefilled = 0

    def __init__(self, model: Model, **options: Any) -> None:
        """Make it; nothing is built before the first offer.

        Args:
            model: the decoders' model.
            options: as for `Provider`.
        """
        self.provider: Provider | None = None
        self._model = model
        self._options = options

    def fill(
        self, offer: Offer, tokens: Sequence[int], *, begun: Callable[[bool], None], progress: Progress
    ) -> None:
        """Prefill tokens into an offer, and vouch for them.

        Args:
            offer: a received share; stays the caller's, and may be closed after this.
            tokens: the whole prompt, that of a prefix among it.
            begun: called before the first graph; True says that the context of the last offer goes on.
            progress: as for `Provider.prefill`.

        Raises:
            KvshareError: as `Provider` and its methods; the ledger is left to the caller.
        """
        warm = self.provider is not None and self.provider.rebind(offer)
        if not warm:
            self.forget()
            self.provider = Provider(offer, self._model, **self._options)
        assert self.provider is not None
        begun(warm)
        self.provider.prefill(tokens, progress=progress)
        self.provider.publish()
        self.n_prefilled = self.provider.n_prefilled
        if offer.strict:
            self.forget()

    def forget(self) -> None:
        """Free the context, and with it the mappings of the decoder's memory; idempotent."""
        provider, self.provider = self.provider, None
        if provider is not None:
            provider.close()

    def __enter__(self) -> WarmProvider:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()


def _without(params: Mapping[str, wire.Scalar], names: set[str]) -> dict[str, wire.Scalar]:
    return {name: value for name, value in params.items() if name not in names}


def _param(params: Any, name: str, known: Collection[int] | None) -> int | float:
    """Return a number of a peer: one of the integers that are known, if there are such."""
    value = params.get(name)
    if not isinstance(value, (int, float)):
        raise RemoteProtocolError(f"params.{name} is {'missing' if value is None else 'not a number'}")
    # type(), because 1.0 is in a range of integers
    if known is not None and (type(value) is float or value not in known):
        raise RemoteProtocolError(f"params.{name} is {value}, which is not one that it can be")
    return value


def _number(name: str, value: Any) -> Any:
    if isinstance(value, str):
        table = FLASH_ATTN if name == "flash_attn_type" else TYPES
        if value not in table:
            raise LocalProtocolError(f"{name} cannot be {value!r}; known are {', '.join(table)}")
        return table[value]
    return value


def serve(
    path: str | os.PathLike[str],
    model: Model,
    tokens: Sequence[int],
    *,
    deadline: float | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> None:
    """Serve one share: listen, receive, prefill, publish.

    Args:
        path: of the unix socket to listen on, at most 107 bytes, in a directory of the user's own.
        model: the decoder's model.
        tokens: the prompt.
        deadline: `time.monotonic()` value until which a decoder must have connected and sent.
        progress: called with the number of tokens that are done.
        options: as for `Provider`.

    Raises:
        KvshareError: what went wrong; the decoder is told, and the ledger says it.
    """
    with (
        fds.listening(path) as listener,
        serving(listener, model, tokens, deadline=deadline, progress=progress, **options),
    ):
        pass


@contextlib.contextmanager
def serving(
    listener: socket.socket,
    model: Model,
    tokens: Sequence[int],
    *,
    deadline: float | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[Provider]:
    """Serve the next share that arrives at a listening socket; as `serve`.

    Who connects and sends none, or one that contradicts its descriptors, is hung up on; the wait goes on.

    Yields:
        The provider, after it has vouched and the decoder was told. Its context and mappings are
        there until the end of the block.
    """
    with contextlib.ExitStack() as stack:
        connection, offer = _next_share(listener, deadline)
        stack.enter_context(connection)
        decoder = stack.enter_context(fds.PeerProcess(connection))
        stack.enter_context(offer)
        writable = select.poll()
        writable.register(connection, select.POLLOUT)

        def tell(message: wire.Message) -> None:
            # a decoder that does not wait, or is gone, adopts by the ledger, or not at all
            with contextlib.suppress(KvshareError, OSError):
                fds.send_message(connection, wire.encode(message), deadline=time.monotonic() + _TELL_S)

        def require_decoder() -> None:
            if decoder.is_gone:
                raise PeerClosedError("the decoder has ended")

        def advance(n_filled: int) -> None:
            require_decoder()
            # never wait for a decoder that does not read: the watermark says the same
            if writable.poll(0):
                tell(wire.Progress(share_id=offer.header.share_id, n_filled=n_filled, n_tokens=len(tokens)))
            if progress:
                progress(n_filled)

        try:
            provider = stack.enter_context(Provider(offer, model, **options))
            provider.prefill(tokens, progress=advance)
            provider.publish()
            require_decoder()
        except BaseException as error:
            offer.fail(f"{type(error).__name__}: {error}")
            said = str(error) if isinstance(error, Exception) else "the provider was stopped"
            tell(wire.Outcome(share_id=offer.header.share_id, ok=False, error=said))
            raise
        tell(wire.Outcome(share_id=offer.header.share_id, ok=True))
        yield provider


def _next_share(listener: socket.socket, deadline: float | None) -> tuple[socket.socket, Offer]:
    """Wait for a whole share, whatever else arrives.

    Raises:
        DeadlineExceededError: none came in time; the hint says what was wrong with the last one.
    """
    deadline = time.monotonic() + fds.DEFAULT_TIMEOUT_S if deadline is None else deadline
    hint: str | None = None
    while True:
        try:
            with contextlib.ExitStack() as undo:
                connection = undo.enter_context(fds.accept_unix(listener, deadline=deadline))
                # who dawdles keeps the next one out
                soon = min(deadline, time.monotonic() + fds.DEFAULT_TIMEOUT_S)
                offer = Offer.receive(connection, deadline=soon)
                undo.pop_all()
                return connection, offer
        except KvshareError as error:
            if time.monotonic() >= deadline:
                error.hint = error.hint or hint
                raise
            logger.warning("refused a peer: %s", error)
            hint = f"the last one who connected was refused: {error}"
