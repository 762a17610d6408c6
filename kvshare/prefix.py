"""Frozen prefixes: prefill once, and let any number of processes go on from there.

`Prefix.freeze` copies what a sequence holds into memory of its own, which nobody can write to from
then on, not even its maker: memfds that are sealed against writes. Along with it go the metadata of
the cells, the tokens, the digests, and what a reader needs to build an equal context.

Whoever gets a prefix forks it: a context whose cache is that memory, mapped privately. It reads the
one physical copy, and the pages that it writes to become its own (copy-on-write). So no fork sees
another, no fork changes the prefix, and a fork needs no server once it has the descriptors.

    with Prefix.get("prefixes.sock", "system") as prefix:
        decoder = prefix.fork("model.gguf")

A prefix is checked when it arrives: descriptors, seals, sizes, digests. What lies in its memory is
checked by its sample digest when it is forked, before anything is decoded.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import mmap
import os
import secrets
import socket
import sys
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from kvshare import fds, wire
from kvshare._native import loader, signatures
from kvshare._native.context import Context, Model
from kvshare.decoder import Adopted, Decoder, describe, params
from kvshare.errors import (
    DescriptorError,
    LedgerError,
    NotShareableError,
    PeerRefusedError,
    RemoteProtocolError,
    SequenceInUseError,
)
from kvshare.fds import OwnedFd
from kvshare.layout import Layout, canonical_json, require_equal_semantics
from kvshare.ledger import HEADER_NBYTES, Ledger, LedgerRecord, tokens_digest
from kvshare.provider import Provider, built_on, requested

FROZEN_SEALS = fds.FIXED_SEALS | fds.F_SEAL_WRITE
"""What every memfd of a prefix carries."""

# what a reader copies, so that a sparse file of any size costs its maker's victim nothing
_MAX_LEDGER_NBYTES = 65 << 20
_MAX_TOKENS_NBYTES = 64 << 20


class Prefix:
    """What a sequence held at one moment, in memory that never changes.

    *Ownership*: owns the descriptors until `close`. Forks and receivers have their own.

    Attributes:
        header: what is sent.
        layout: what the bytes of its memory are.
        entered: what the last fork or wrap did; None before the first. Nothing is moved in any known case.
    """

    def __init__(self, header: wire.FrozenHeader, descriptors: Sequence[OwnedFd]) -> None:
        """Check a header against its descriptors.

        Raises:
            RemoteProtocolError: the header contradicts itself, or what came with it.
            DescriptorError: the descriptors are not what the header says, or can be written to.
            LedgerError: the ledger is none, or does not vouch for these tokens and this memory.

        *Ownership*: takes the descriptors, and closes them if it raises.
        """
        self._fds = list(descriptors)
        self.header = header
        self.entered: Adopted | None = None
        try:
            wire.check_descriptors(header, len(descriptors))
            for entry in header.regions:
                if entry.kind != "memfd":
                    raise NotShareableError(
                        f"a prefix in memory of kind {entry.kind} cannot be forked, nothing there is"
                        " copy-on-write",
                        hint="prefixes lie on the host: keep the cache there (offload_kqv=False)",
                    )
                if entry.offset % mmap.PAGESIZE:
                    raise RemoteProtocolError(f"a region at {entry.offset} does not start at a page")
                self._require_frozen("a region", entry.fd, entry.offset + entry.size)
            self._require_frozen("the ledger", header.ledger.fd, header.ledger.size)
            self._require_frozen("the tokens", header.tokens.fd, header.tokens.size)
            self.layout = Layout.from_parts(
                header.params, [(entry.size, entry.layout) for entry in header.regions], header.layout
            )
            text = header.params.get("semantics")
            if not isinstance(text, str) or hashlib.sha256(text.encode()).hexdigest() != header.semantics:
                raise RemoteProtocolError("params.semantics does not have the digest that the header says")
            self._semantics_text = text
            self._record.verify(
                share_id=header.prefix_id,
                layout=header.layout,
                semantics=header.semantics,
                tokens=self.tokens,
                sample_digest=None,  # the library compares it, before the first use
            )
            if not self._record.blob:
                raise LedgerError("ledger: a prefix needs the metadata of its cells, there is none")
        except BaseException:
            self.close()
            raise

    # -- making ----------------------------------------------------------------------------------

    @classmethod
    def freeze(
        cls,
        source: Decoder | Provider | Context,
        tokens: Sequence[int],
        seq_id: int | None = None,
        *,
        name: str | None = None,
    ) -> Prefix:
        """Copy what a sequence holds, and seal the copy.

        Args:
            source: whose context holds it; it goes on as before.
            tokens: the token ids that the sequence holds, all of them.
            seq_id: the sequence; None takes 0, of a provider the one that it fills.
            name: 1 to 128 of `A-Z a-z 0-9 . _ -`; None takes the first digits of the token digest.

        Raises:
            SequenceInUseError: the sequence holds another number of tokens.
            LocalProtocolError: a token that the model does not have, or no name.
            NotShareableError: the memory of this model cannot be shared, with the reason.
            OSError: no memory.

        *Ownership*: the caller closes it.
        """
        context = source if isinstance(source, Context) else source.context
        if seq_id is None:
            seq_id = source.offer.seq_id if isinstance(source, Provider) else 0
        context.model.check_tokens(tokens)
        if context.n_past(seq_id) != len(tokens):
            raise SequenceInUseError(
                f"sequence {seq_id} holds {context.n_past(seq_id)} tokens, {len(tokens)} are to be frozen"
            )
        context.synchronize()
        lib, handle = context.library.lib, context.handle
        text, _ = describe(lib.llama_kv_share_layout, handle, seq_id)
        layout = Layout.parse(text)
        semantics, _ = describe(lib.llama_kv_share_semantics, handle)
        with contextlib.ExitStack() as undo:
            memory = [
                undo.enter_context(fds.memfd_create("kvshare-prefix", region.size, seal=False))
                for region in layout.regions
            ]
            native = _native_regions(
                (fd, 0, region.size) for fd, region in zip(memory, layout.regions, strict=True)
            )
            lib.llama_kv_share_copy(handle, seq_id, native, len(native))
            blob, sample = _publish(context, seq_id)
            undo.pop_all()
        return cls._seal(
            memory, layout, semantics, params(lib, handle, seq_id), tokens, blob, sample, name=name
        )

    @classmethod
    def _seal(
        cls,
        memory: Sequence[OwnedFd],
        layout: Layout,
        semantics: str,
        params: Mapping[str, wire.Scalar],
        tokens: Sequence[int],
        blob: bytes,
        sample: bytes,
        *,
        name: str | None,
    ) -> Prefix:
        """Vouch for filled memory, one memfd a region, and make all of it unchangeable.

        *Ownership*: takes the memory, and closes it if it raises.
        """
        with contextlib.ExitStack() as undo:
            owned = [undo.enter_context(fd) for fd in memory]
            n_regions = len(owned)
            if n_regions + 2 > fds.MAX_FDS:
                raise NotShareableError(
                    f"{n_regions} regions, ledger and tokens exceed the {fds.MAX_FDS} descriptors of a"
                    " message"
                )
            digest, prefix_id = tokens_digest(tokens), 1 + secrets.randbelow(2**53 - 1)
            layout_digest = layout.digest()
            semantics_digest = hashlib.sha256(semantics.encode()).hexdigest()
            with Ledger.create(prefix_id, layout_digest, semantics_digest, capacity=len(blob)) as ledger:
                ledger.begin()
                ledger.advance(len(tokens))
                ledger.complete(digest, len(tokens), sample, blob)
                with ledger.view() as view:
                    owned.append(undo.enter_context(_filled("kvshare-prefix-ledger", view)))
                ledger_nbytes = ledger.size
            owned.append(undo.enter_context(_filled("kvshare-prefix-tokens", _int32(tokens))))
            for fd in owned:
                fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, FROZEN_SEALS)
            header = wire.FrozenHeader(
                name=digest.hex()[:16] if name is None else name,
                prefix_id=prefix_id,
                n_tokens=len(tokens),
                layout=layout_digest,
                semantics=semantics_digest,
                params={
                    **params,
                    "abi": layout.abi,
                    "byte_order": layout.byte_order,
                    "caches": canonical_json([cache.to_json() for cache in layout.caches]).decode(),
                    "semantics": semantics,
                },
                regions=tuple(
                    wire.RegionEntry(
                        fd=index,
                        offset=0,
                        size=region.size,
                        layout=[tensor.to_json() for tensor in region.tensors],
                        kind="memfd",
                    )
                    for index, region in enumerate(layout.regions)
                ),
                ledger=wire.LedgerEntry(fd=n_regions, size=ledger_nbytes),
                tokens=wire.LedgerEntry(fd=n_regions + 1, size=4 * len(tokens)),
            )
            wire.encode(header)  # refuses a name that is none, before anybody gets it
            undo.pop_all()
        return cls(header, owned)

    # -- handing over ----------------------------------------------------------------------------

    def send(self, target: socket.socket | str | os.PathLike[str], *, deadline: float | None = None) -> None:
        """Send the header and the descriptors with one `sendmsg`.

        Args:
            target: a connected unix socket, or the path of one where somebody waits with `receive`. A
                server of prefixes answers: `put`.
            deadline: `time.monotonic()` value; None means 10 s from now.

        Raises:
            PeerError: nobody listens, another uid, closed, too slow.

        *Ownership*: the receiver gets descriptors of its own. A socket that was given stays the caller's.
        """
        if isinstance(target, socket.socket):
            fds.require_peer_uid(target)
            numbers = [owned.fileno() for owned in self._fds]
            fds.send_message(target, wire.encode(self.header), numbers, deadline=deadline)
        else:
            with fds.connect_unix(target, deadline=deadline) as connection:
                self.send(connection, deadline=deadline)

    @classmethod
    def receive(cls, connection: socket.socket, *, deadline: float | None = None) -> Prefix:
        """Receive a prefix, and check everything about it.

        Args:
            connection: a connected unix socket.
            deadline: `time.monotonic()` value; None means 10 s from now.

        Raises:
            PeerRefusedError: the peer is of another uid, or it has none to give, and says why.
            PeerError: closed, or too slow.
            ProtocolError: no prefix, or one that contradicts itself.
            DescriptorError: truncated, of another size, or not sealed. Everything is closed then.
            LedgerError: it does not vouch for these tokens and this memory.

        *Ownership*: the caller closes it.
        """
        fds.require_peer_uid(connection)
        payload, descriptors = fds.receive_message(connection, deadline=deadline)
        with contextlib.ExitStack() as undo:
            for owned in descriptors:
                undo.enter_context(owned)
            message = _answer(payload)
            if not isinstance(message, wire.FrozenHeader):
                raise RemoteProtocolError(f"expected a prefix, got {type(message).__name__}")
            undo.pop_all()
        return cls(message, descriptors)

    @classmethod
    def get(
        cls, path: str | os.PathLike[str], name: str | None = None, *, deadline: float | None = None
    ) -> Prefix:
        """Get a prefix from a server of prefixes.

        Args:
            path: of its socket.
            name: of the prefix; None takes the only one, or the one that was used last.
            deadline: `time.monotonic()` value; None means 10 s from now.

        Raises:
            PeerRefusedError: nobody listens, or there is none of this name.
            KvshareError: as `receive`.

        *Ownership*: the caller closes it. The server may end meanwhile.
        """
        deadline = time.monotonic() + fds.DEFAULT_TIMEOUT_S if deadline is None else deadline
        with fds.connect_unix(path, deadline=deadline) as connection:
            request = wire.encode(wire.PrefixRequest(op="get", name=name))
            fds.send_message(connection, request, deadline=deadline)
            return cls.receive(connection, deadline=deadline)

    def put(self, path: str | os.PathLike[str], *, deadline: float | None = None) -> None:
        """Give it to a server of prefixes, in place of another of the same name.

        Args:
            path: of its socket.
            deadline: `time.monotonic()` value; None means 10 s from now.

        Raises:
            PeerRefusedError: nobody listens, or it does not take it, and says why.
            PeerError: closed, or too slow.

        *Ownership*: the server gets descriptors of its own.
        """
        deadline = time.monotonic() + fds.DEFAULT_TIMEOUT_S if deadline is None else deadline
        with fds.connect_unix(path, deadline=deadline) as connection:
            self.send(connection, deadline=deadline)
            _require_done(connection, deadline)

    # -- forking ---------------------------------------------------------------------------------

    def fork(
        self,
        model: str | os.PathLike[str] | Model,
        *,
        n_threads: int | None = None,
        allow_other_semantics: bool = False,
        **overrides: Any,
    ) -> Decoder:
        """Build a context that goes on behind the prefix, with the parameters of the one it was made in.

        The next decode of sequence `seq_id` goes on at position `len(tokens)`. A model with an encoder
        has to encode the tokens first, as after an adoption.

        Args:
            model: the same model, a GGUF file or one that is open.
            n_threads: compute threads; None takes the CPUs that this process may run on.
            allow_other_semantics: accept other semantics, such as another quantization of the weights.
            overrides: parameters that differ on purpose, such as `n_ubatch`.

        Raises:
            LayoutMismatchError: the layout would differ; names the parameter or the tensor field.
            SemanticsMismatchError: model, adapters or RoPE differ; names the field.
            LedgerDigestError: the memory is not what the prefix vouches for.
            RemoteProtocolError: a parameter is missing, or is no number.

        *Ownership*: `close` of the decoder frees the context, and the model if it was loaded here. The
            prefix may be closed before.
        """
        params = requested(self.header.params, self.layout, overrides)
        owns_model = not isinstance(model, Model)
        loaded = model if isinstance(model, Model) else Model.open(model)
        with contextlib.ExitStack() as undo:
            if owns_model:
                undo.callback(loaded.close)
            with forking(self):
                context = undo.enter_context(Context.create(loaded, n_threads=n_threads, **params))
            decoder = Decoder(context, owns_model=owns_model, forked=True)
            self._enter(context, self.seq_id, allow_other=allow_other_semantics)
            undo.pop_all()
        return decoder

    def wrap(self, built: Any, seq_id: int = 0, *, allow_other_semantics: bool = False) -> Decoder:
        """Enter the prefix into a context that was built inside `forking`, before it decodes anything.

        A `llama_cpp.Llama` then knows the tokens as well: `llama.generate` goes on behind them.

        Args:
            built: a `llama_cpp.Llama`, or a `kvshare.Context`.
            seq_id: the sequence; a context with a stream for each may have the prefix in several.
            allow_other_semantics: as for `fork`.

        Raises:
            SemanticsMismatchError, LedgerDigestError: as for `fork`.
            NativeError: it was built outside.

        *Ownership*: the context stays its owner's; a Llama is kept alive by the decoder.
        """
        if isinstance(built, Context):
            context, llama = built, None
        else:
            model = Model(loader.load(), built._model.model, owned=False, owner=built)
            context, llama = Context(model, built._ctx.ctx, owner=built), built
        decoder = Decoder(context, llama=llama, forked=True)
        self._enter(context, seq_id, allow_other=allow_other_semantics)
        if llama is not None and seq_id == 0:
            # llama_cpp.Llama keeps the tokens of its sequence beside the cache
            llama.input_ids[: len(self.tokens)] = self.tokens
            llama.n_tokens = len(self.tokens)
        return decoder

    def _enter(self, context: Context, seq_id: int, *, allow_other: bool) -> None:
        """Check that a context means the same, and enter the cells, whose samples the library compares."""
        start = time.perf_counter_ns()
        lib, handle = context.library.lib, context.handle
        text, digest = describe(lib.llama_kv_share_semantics, handle)
        if digest != self.header.semantics and not allow_other:
            require_equal_semantics(self._semantics_text, text)
        context.model.check_tokens(self.tokens)
        blob, adopted = self._record.blob, signatures.Adopted()
        lib.llama_kv_share_enter(
            handle,
            seq_id,
            len(self.tokens),
            blob,
            len(blob),
            self._record.sample_digest,
            ctypes.byref(adopted),
        )
        self.entered = Adopted(
            n_adopted=adopted.n_tokens,
            bytes_in_place=adopted.bytes_in_place,
            bytes_moved=adopted.bytes_moved,
            t_us=(time.perf_counter_ns() - start) / 1000,
        )

    # -- what it is ------------------------------------------------------------------------------

    @cached_property
    def tokens(self) -> array[int]:
        """Its token ids."""
        entry, n = self.header.tokens, 4 * self.header.n_tokens
        if entry.size != n or n > _MAX_TOKENS_NBYTES:
            raise RemoteProtocolError(f"{self.header.n_tokens} tokens cannot have {entry.size} bytes")
        tokens = array("i", os.pread(self._fds[entry.fd].fileno(), n, 0))
        if sys.byteorder == "big":
            tokens.byteswap()
        return tokens

    @cached_property
    def _record(self) -> LedgerRecord:
        entry = self.header.ledger
        if not HEADER_NBYTES <= entry.size <= _MAX_LEDGER_NBYTES:
            raise LedgerError(f"a ledger of a prefix cannot have {entry.size} bytes")
        # nobody can map the sealed one writable, as a ledger in use is
        copy = fds.memfd_create("kvshare-ledger", entry.size)
        with copy:
            os.pwrite(copy.fileno(), os.pread(self._fds[entry.fd].fileno(), entry.size, 0), 0)
            with Ledger.open(copy, entry.size) as ledger:
                return ledger.snapshot()

    def forget(self) -> None:
        """Give back the copies of tokens and metadata; they are read again when they are needed."""
        self.__dict__.pop("tokens", None)
        self.__dict__.pop("_record", None)

    @property
    def name(self) -> str:
        """Its name, which another prefix may have later."""
        return self.header.name

    @property
    def prefix_id(self) -> int:
        """Which one it is; no other has the same."""
        return self.header.prefix_id

    @property
    def semantics(self) -> str:
        """What its bytes mean, 64 hexadecimal digits."""
        return self.header.semantics

    @property
    def seq_id(self) -> int:
        """The sequence that holds it in a fork with the same parameters."""
        found = self.header.params.get("seq_id")
        if type(found) is not int or not 0 <= found < 1 << 31:
            raise RemoteProtocolError(f"params.seq_id is {found}, which is not one that it can be")
        return found

    @property
    def nbytes(self) -> int:
        """Physical memory that it takes now, bytes; more when forks have read what was never written."""
        return sum(512 * os.fstat(owned.fileno()).st_blocks for owned in self._fds)

    def native_regions(self) -> Any:
        """Return the regions as the array of structs that a fork takes."""
        return _native_regions((self._fds[e.fd], e.offset, e.size) for e in self.header.regions)

    def close(self) -> None:
        """Close the descriptors; idempotent. Forks keep what they have mapped."""
        for owned in self._fds:
            owned.close()

    def __enter__(self) -> Prefix:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_frozen(self, what: str, index: int, end: int) -> None:
        fd = self._fds[index].fileno()
        fds.require_seals(fd, FROZEN_SEALS)
        found = fds.fd_size(fd)
        if end > found:
            raise DescriptorError(f"{what} that ends at {end} exceeds its descriptor of {found} bytes")


@contextlib.contextmanager
def forking(prefix: Prefix) -> Iterator[Prefix]:
    """Build one context over a prefix, inside the block; then enter it with `prefix.wrap`.

    For programs that build their contexts themselves, such as `llama_cpp.Llama`; `Prefix.fork` does it
    for you. A context with a stream for each sequence has the memory under every one of them.

    Yields:
        The prefix.

    Raises:
        LayoutMismatchError: the context's layout is another one; it was not created.
    """
    begin = loader.load().lib.llama_kv_share_fork_begin
    with built_on(begin, prefix.native_regions(), prefix.layout):
        yield prefix


# -- what a server of prefixes is asked ------------------------------------------------------------


def list_prefixes(
    path: str | os.PathLike[str], *, deadline: float | None = None
) -> tuple[wire.PrefixEntry, ...]:
    """Ask a server which prefixes it keeps, the one that was used last at the end.

    Raises:
        PeerError: nobody listens, another uid, closed, too slow.
    """
    deadline = time.monotonic() + fds.DEFAULT_TIMEOUT_S if deadline is None else deadline
    with fds.connect_unix(path, deadline=deadline) as connection:
        fds.send_message(connection, wire.encode(wire.PrefixRequest(op="list")), deadline=deadline)
        payload, _ = fds.receive_message(connection, deadline=deadline, max_fds=0)
        message = _answer(payload)
        if not isinstance(message, wire.PrefixList):
            raise RemoteProtocolError(f"expected a list of prefixes, got {type(message).__name__}")
        return message.prefixes


def drop_prefix(path: str | os.PathLike[str], name: str, *, deadline: float | None = None) -> None:
    """Let a server forget a prefix. Who has it keeps it.

    Raises:
        PeerRefusedError: nobody listens, or there is none of this name.
        PeerError: closed, too slow.
    """
    deadline = time.monotonic() + fds.DEFAULT_TIMEOUT_S if deadline is None else deadline
    with fds.connect_unix(path, deadline=deadline) as connection:
        request = wire.encode(wire.PrefixRequest(op="drop", name=name))
        fds.send_message(connection, request, deadline=deadline)
        _require_done(connection, deadline)


def _require_done(connection: socket.socket, deadline: float) -> None:
    payload, _ = fds.receive_message(connection, deadline=deadline, max_fds=0)
    message = _answer(payload)
    if not isinstance(message, wire.Outcome):
        raise RemoteProtocolError(f"expected an outcome, got {type(message).__name__}")


def _answer(payload: bytes) -> wire.Message:
    message = wire.decode(payload)
    if isinstance(message, wire.Outcome) and not message.ok:
        raise PeerRefusedError(f"the server of prefixes says: {message.error}")
    return message


# -- helpers ---------------------------------------------------------------------------------------


def _native_regions(regions: Any) -> Any:
    found = [
        signatures.Region(fd=fd.fileno(), kind=signatures.KIND_MEMFD, offset=offset, size=size)
        for fd, offset, size in regions
    ]
    return (signatures.Region * len(found))(*found)


def _publish(context: Context, seq_id: int) -> tuple[bytes, bytes]:
    """Return the metadata of what a sequence holds, and the digest over samples of it."""
    publish, sample = context.library.lib.llama_kv_share_publish, signatures.Digest()
    size = publish(context.handle, seq_id, None, 0, None)
    buffer = ctypes.create_string_buffer(size)
    publish(context.handle, seq_id, buffer, size, ctypes.byref(sample))
    return buffer.raw, bytes(sample)


def _int32(tokens: Sequence[int]) -> array[int]:
    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _filled(name: str, data: Any) -> OwnedFd:
    """Make a memfd that holds some bytes and can be sealed."""
    view = memoryview(data).cast("B")
    with contextlib.ExitStack() as undo:
        fd = undo.enter_context(fds.memfd_create(name, len(view), seal=False))
        os.pwrite(fd.fileno(), view, 0)
        undo.pop_all()
    return fd
