"""The ledger: a small sealed memfd in which a provider vouches for what it filled.

The decoder makes it and sends its descriptor along with the regions. A provider in any language can
write it. All integers are little-endian, all offsets are bytes from the start:

====== ==== ================ ======= ==========================================================
offset size field            written meaning
====== ==== ================ ======= ==========================================================
     0    8 magic            issue   the bytes ``KVSLEDG1``
     8    4 version          issue   u32, 1
    12    4 header_size      issue   u32, 512 and the prefix blob, up to a multiple of 8; a blob
                                     starts at or behind it
    16    8 share_id         issue   u64, the nonce of the share, as in the wire header
    24   32 layout           issue   layout digest, raw; a provider may overwrite it with its own
    56   32 semantics        issue   semantics digest, likewise
    88    4 state            both    u32: 0 issued, 1 filling, 2 complete, 3 failed
    92    4 flags            issue   u32, 0; ignore
    96    8 n_filled         filling u64, watermark: tokens whose K and V are in memory; at
                                     issue it is n_prefix
   104    8 n_tokens         end     u64, tokens that the provider vouches for, the prefix among them
   112    8 vouched_share_id end     u64, the share_id of the wire header, copied by the provider
   120   32 tokens_sha256    end     sha256 of these n_tokens token ids as little-endian int32
   152   32 sample_digest    end     digest over the metadata and sampled K and V rows
   184    8 blob_offset      end     u64, where the metadata blob starts
   192    8 blob_size        end     u64, its size; 0: there is none
   200  256 error            failed  UTF-8, padded with NUL
   456    8 n_prefix         issue   u64, tokens that the sequence holds already; 0: it is empty
   464   32 prefix_sha256    issue   sha256 of these token ids, 0 if there are none; a provider
                                     overwrites it with that of the tokens that it continued from
   496    8 prefix_offset    issue   u64, where the metadata blob of the prefix starts: 512
   504    8 prefix_size      issue   u64, its size; 0: there is none
   512    - prefix blob      issue   ends at or before header_size
     -    - blob             end     up to the end of the memfd
====== ==== ================ ======= ==========================================================

How to fill it:

1. Map the memfd shared and writable. Go on only if magic and version are right, share_id is that of
   the wire header, and state is 0; and if the first n_prefix tokens of the prompt are those of
   prefix_sha256: their K and V are there, the provider fills what comes behind.
2. Store state 1.
3. After every batch, once its K and V are really in memory (synchronise a GPU first), store n_filled.
4. At the end write the blob, not before header_size, and every field marked "end". Store state 2
   last, with release order: who sees state 2 may read all the rest. If anything fails, write
   vouched_share_id and error, then state 3.
5. Never write again after state 2 or 3.

vouched_share_id is there because a ledger can be issued anew: a late provider of the share before
then stores its own, old nonce, and what it vouches for is not taken for the new share's.

A reader never trusts the mapping. It copies the header once, and the blob once by that copy's bounds,
and works on the copies: the writer may still be writing, or mean harm.
"""

from __future__ import annotations

import enum
import hashlib
import mmap
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from kvshare import fds
from kvshare.errors import (
    DescriptorError,
    LedgerDigestError,
    LedgerError,
    LedgerIncompleteError,
    LedgerPendingError,
    LocalProtocolError,
    ReplayError,
)

MAGIC = b"KVSLEDG1"
VERSION = 1
HEADER_NBYTES = 512
ERROR_NBYTES = 256
DIGEST_NBYTES = 32
DEFAULT_CAPACITY_NBYTES = 1 << 20  # a blob has about 12 bytes a token
MAX_PREFIX_NBYTES = 64 << 20  # what a provider copies because a decoder says so

_HEADER = struct.Struct("<8sIIQ32s32sIIQQQ32s32sQQ256sQ32sQQ")
_END = struct.Struct("<QQ32s32sQQ")  # n_tokens up to blob_size
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SHARE_ID = slice(16, 24)
_LAYOUT = slice(24, 56)
_SEMANTICS = slice(56, 88)
_STATE = slice(88, 92)
_N_FILLED = slice(96, 104)
_END_OFFSET = 104
_VOUCHED = slice(112, 120)
_ERROR = slice(200, 456)
_PREFIX_SHA256 = slice(464, 496)

_ALIGNMENT = 8  # of what comes behind a prefix

_UINT64_END = 1 << 64


class LedgerState(enum.IntEnum):
    """What the provider says about the share."""

    ISSUED = 0
    FILLING = 1
    COMPLETE = 2
    FAILED = 3


def tokens_digest(tokens: Sequence[int]) -> bytes:
    """Return the sha256 of token ids as little-endian int32.

    Args:
        tokens: `array("i")` and contiguous numpy int32 are hashed in place; anything else is copied.

    Raises:
        LocalProtocolError: an element is no int32.
    """
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
        in_place = view.format == "i" and view.c_contiguous and sys.byteorder == "little"
    except TypeError:
        in_place = False
    if in_place:
        return hashlib.sha256(view).digest()
    try:
        ids = array("i", list(tokens))
    except (TypeError, OverflowError) as exc:
        raise LocalProtocolError(f"tokens are not int32: {exc}") from exc
    if sys.byteorder == "big":
        ids.byteswap()
    return hashlib.sha256(ids).digest()


@dataclass(frozen=True)
class LedgerPrefix:
    """What a sequence holds before its share.

    Attributes:
        n_tokens: tokens, from position 0; 0 if it is empty.
        sha256: see `tokens_digest`; zeros if it is empty.
        blob: metadata of its cells; empty if there is none.
    """

    n_tokens: int = 0
    sha256: bytes = bytes(DIGEST_NBYTES)
    blob: bytes = b""

    @classmethod
    def of(cls, tokens: Sequence[int], blob: bytes = b"") -> LedgerPrefix:
        """Describe the prefix of these tokens.

        Raises:
            LocalProtocolError: an element is no int32.
        """
        return cls(len(tokens), tokens_digest(tokens), blob) if len(tokens) else cls()

    def require_start_of(self, tokens: Sequence[int]) -> None:
        """Check that a prompt begins with this prefix, and goes on behind it.

        Raises:
            LocalProtocolError: it does not; names both digests.
        """
        if len(tokens) <= self.n_tokens:
            raise LocalProtocolError(
                f"{len(tokens)} tokens are no more than the {self.n_tokens} that the sequence holds already"
            )
        if self.n_tokens:
            found = tokens_digest(tokens[: self.n_tokens])
            if found != self.sha256:
                raise LocalProtocolError(
                    f"the first {self.n_tokens} tokens are not those of the prefix: their sha256 is"
                    f" {found.hex()}, the ledger has {self.sha256.hex()}"
                )


@dataclass(frozen=True)
class LedgerRecord:
    """One moment of a ledger, copied and well-formed, but not believed until `verify`.

    Attributes:
        share_id: nonce that the ledger was issued for.
        layout: layout digest, 64 hexadecimal digits.
        semantics: semantics digest, likewise.
        state: what the provider says.
        n_filled: watermark, tokens.
        n_tokens: tokens that the provider vouches for.
        vouched_share_id: nonce that the provider vouches for.
        tokens_sha256: see `tokens_digest`.
        sample_digest: digest over the metadata and sampled K and V rows.
        blob: metadata of the filled cells; empty unless complete.
        error: why the provider failed; empty unless it did.
        n_prefix: tokens that the sequence held at issue.
        prefix_sha256: `tokens_digest` of the tokens that the provider continued from.
        prefix_offset: where the metadata of the prefix starts, bytes; see `Ledger.prefix`.
        prefix_size: its size, bytes.
    """

    share_id: int
    layout: str
    semantics: str
    state: LedgerState
    n_filled: int
    n_tokens: int
    vouched_share_id: int
    tokens_sha256: bytes
    sample_digest: bytes
    blob: bytes
    error: str
    n_prefix: int = 0
    prefix_sha256: bytes = bytes(DIGEST_NBYTES)
    prefix_offset: int = 0
    prefix_size: int = 0

    def verify(
        self,
        *,
        share_id: int,
        layout: str,
        semantics: str | None,
        tokens: Sequence[int],
        sample_digest: bytes | None,
        prefix: LedgerPrefix | None = None,
    ) -> None:
        """Check everything that the ledger vouches for against what the decoder knows itself.

        Args:
            share_id: the share that is to be adopted.
            layout: the decoder's layout digest.
            semantics: its semantics digest; None allows any, when the caller asked for that.
            tokens: the tokens that are to be adopted, those of the prefix among them.
            sample_digest: digest that the decoder took from the memory itself; None only if it
                samples by other means.
            prefix: what the sequence held at issue; None if it was empty. Its blob does not matter.

        Raises:
            ReplayError: the ledger, or its provider, speaks of another share.
            LedgerPendingError: not complete yet.
            LedgerIncompleteError: the provider failed, or it is not for all the tokens.
            LedgerDigestError: other layout, semantics, prefix, tokens or bytes.
        """
        prefix = prefix or LedgerPrefix()
        if self.share_id != share_id:
            raise ReplayError(_differs("share_id", share_id, self.share_id))
        if self.state in (LedgerState.COMPLETE, LedgerState.FAILED) and self.vouched_share_id != share_id:
            raise ReplayError(_differs("vouched_share_id", share_id, self.vouched_share_id))
        if self.state is LedgerState.FAILED:
            raise LedgerIncompleteError(f"the provider failed: {self.error!r}")
        if self.state is not LedgerState.COMPLETE:
            raise LedgerPendingError(
                _differs("state", "complete", f"{self.state.name.lower()} at {self.n_filled} tokens")
            )
        for field in ("n_tokens", "n_filled"):
            if getattr(self, field) != len(tokens):
                raise LedgerIncompleteError(_differs(field, len(tokens), getattr(self, field)))
        if self.layout != layout:
            raise LedgerDigestError(_differs("layout", layout, self.layout))
        if semantics is not None and self.semantics != semantics:
            raise LedgerDigestError(_differs("semantics", semantics, self.semantics))
        if self.n_prefix != prefix.n_tokens:
            raise LedgerDigestError(_differs("n_prefix", prefix.n_tokens, self.n_prefix))
        begins = tokens_digest(tokens[: prefix.n_tokens]) if prefix.n_tokens else prefix.sha256
        for found in (self.prefix_sha256, begins):
            if found != prefix.sha256:
                raise LedgerDigestError(_differs("prefix_sha256", prefix.sha256.hex(), found.hex()))
        expected = tokens_digest(tokens)
        if self.tokens_sha256 != expected:
            raise LedgerDigestError(_differs("tokens_sha256", expected.hex(), self.tokens_sha256.hex()))
        if sample_digest is not None and self.sample_digest != sample_digest:
            raise LedgerDigestError(_differs("sample_digest", sample_digest.hex(), self.sample_digest.hex()))


class Ledger:
    """A mapped ledger. The decoder makes one with `create`, a provider maps it with `open`.

    Ownership: owns its descriptor and its mapping until `close`. An object that is collected while
    open closes both, with the `ResourceWarning` of its `OwnedFd`.
    """

    def __init__(self, fd: fds.OwnedFd, size: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd.fileno(), size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._share_id = 0
        self._n_prefix = 0
        self._header_size = HEADER_NBYTES

    @classmethod
    def create(
        cls,
        share_id: int,
        layout: str,
        semantics: str,
        *,
        capacity: int = DEFAULT_CAPACITY_NBYTES,
        prefix: LedgerPrefix | None = None,
    ) -> Ledger:
        """Make a ledger in state issued.

        Args:
            share_id: nonce of the share.
            layout: layout digest, 64 hexadecimal digits.
            semantics: semantics digest, likewise.
            capacity: bytes that a blob may have at least; only those that are written cost memory.
            prefix: what the sequence holds; None if it is empty.

        Raises:
            LocalProtocolError: an argument is out of range.
            LedgerError: the blob of the prefix is larger than `MAX_PREFIX_NBYTES`.
            OSError: no memfd.

        Ownership: the caller closes it.
        """
        header = _issued(share_id, layout, semantics, prefix or LedgerPrefix())
        if capacity < 0:
            raise LocalProtocolError(f"a capacity of {capacity} bytes is negative")
        size = -(-(len(header) + capacity) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = fds.memfd_create("kvshare-ledger", size)
        try:
            ledger = cls(fd, size)
        except BaseException:
            fd.close()
            raise
        ledger._store(share_id, header, prefix)
        return ledger

    @classmethod
    def open(cls, fd: fds.OwnedFd, size: int) -> Ledger:
        """Map a ledger that came over the wire.

        Args:
            fd: the memfd.
            size: bytes, as the wire header says.

        Raises:
            DescriptorError: not sealed against a change of size, or smaller than `size`.
            LedgerError: too small for a header, or not a ledger of this version.

        Ownership: takes `fd`, and closes it on an error.
        """
        try:
            fds.require_seals(fd.fileno())
            found = fds.fd_size(fd.fileno())
            if found < size:
                raise DescriptorError(f"the ledger has {found} bytes, its header says {size}")
            if size < HEADER_NBYTES:
                raise LedgerError(f"a ledger of {size} bytes has no room for its header of {HEADER_NBYTES}")
            ledger = cls(fd, size)
            try:
                # without its blob, which may be of any size: pages that are holes cost a peer nothing
                record, ledger._header_size = ledger._read()
                ledger._share_id, ledger._n_prefix = record.share_id, record.n_prefix
                _prefix_range(record, ledger._header_size)
            except BaseException:
                ledger._map.close()
                raise
        except BaseException:
            fd.close()
            raise
        return ledger

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the ledger and close its descriptor; nothing happens the second time.

        Raises:
            LocalProtocolError: a `view` is still in use; the ledger stays open.
        """
        try:
            self._map.close()
        except BufferError as exc:
            raise LocalProtocolError("a view of the ledger is still in use: release it, then close") from exc
        self._fd.close()

    @property
    def share_id(self) -> int:
        """Nonce of the share that this object was made, opened or reissued for."""
        return self._share_id

    @property
    def n_prefix(self) -> int:
        """Tokens that the sequence held when this object was made, opened or reissued."""
        return self._n_prefix

    @property
    def size(self) -> int:
        """Size in bytes, for the wire header."""
        return len(self._mapping())

    @property
    def capacity(self) -> int:
        """The largest blob, in bytes."""
        return self.size - self._header_size

    def fileno(self) -> int:
        """Return the memfd, to send it. Ownership: stays here."""
        return self._fd.fileno()

    def view(self) -> memoryview:
        """Return the mapped bytes, for native code that reads or writes the ledger in place.

        Ownership: the ledger cannot be closed until the caller released it.
        """
        return memoryview(self._mapping())

    # -- the decoder's side --

    def reissue(
        self, share_id: int, layout: str, semantics: str, *, prefix: LedgerPrefix | None = None
    ) -> None:
        """Reset the ledger for a next share, without a new memfd.

        Whoever holds the descriptor keeps it: bytes of the last blob stay readable behind the header,
        and a provider that is late is told apart by its nonce only.

        Args: as for `create`.

        Raises:
            LocalProtocolError: an argument is out of range.
            LedgerError: the ledger has no room for the blob of the prefix.
        """
        header = _issued(share_id, layout, semantics, prefix or LedgerPrefix())
        if len(header) > self.size:
            raise LedgerError(f"a ledger of {self.size} bytes has no room for a prefix of {len(header)}")
        self._store(share_id, header, prefix)

    def snapshot(self, *, with_blob: bool = True) -> LedgerRecord:
        """Copy the ledger once and parse the copy.

        Args:
            with_blob: copy the blob as well, if there is one; otherwise the record has none.

        Raises:
            LedgerError: it is malformed.
        """
        return self._read(with_blob=with_blob)[0]

    def _read(self, *, with_blob: bool = False) -> tuple[LedgerRecord, int]:
        """Copy and parse; return the size of the header as well."""
        mapping = self._mapping()
        (
            magic,
            version,
            header_size,
            share_id,
            layout,
            semantics,
            state,
            _flags,
            n_filled,
            n_tokens,
            vouched_share_id,
            tokens_sha256,
            sample_digest,
            blob_offset,
            blob_size,
            error,
            n_prefix,
            prefix_sha256,
            prefix_offset,
            prefix_size,
        ) = _HEADER.unpack(mapping[:HEADER_NBYTES])
        if magic != MAGIC:
            raise LedgerError(f"not a ledger: magic is {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise LedgerError(_differs("version", VERSION, version))
        if not HEADER_NBYTES <= header_size <= len(mapping):
            raise LedgerError(f"ledger: header_size {header_size} is not within its {len(mapping)} bytes")
        try:
            state = LedgerState(state)
        except ValueError as exc:
            raise LedgerError(f"ledger: state {state} is unknown") from exc
        blob = b""
        if state is LedgerState.COMPLETE and blob_size:
            if blob_offset < header_size or blob_offset + blob_size > len(mapping):
                raise LedgerError(
                    f"ledger: {blob_size} bytes of blob at {blob_offset} are outside of the ledger's"
                    f" [{header_size}, {len(mapping)})"
                )
            if with_blob:
                blob = mapping[blob_offset : blob_offset + blob_size]
        record = LedgerRecord(
            share_id=share_id,
            layout=layout.hex(),
            semantics=semantics.hex(),
            state=state,
            n_filled=n_filled,
            n_tokens=n_tokens,
            vouched_share_id=vouched_share_id,
            tokens_sha256=tokens_sha256,
            sample_digest=sample_digest,
            blob=blob,
            error=error.partition(b"\0")[0].decode(errors="replace") if state is LedgerState.FAILED else "",
            n_prefix=n_prefix,
            prefix_sha256=prefix_sha256,
            prefix_offset=prefix_offset,
            prefix_size=prefix_size,
        )
        return record, header_size

    # -- the provider's side --

    @property
    def prefix(self) -> LedgerPrefix:
        """What the sequence holds already, copied.

        Raises:
            LedgerError: it does not lie between the fields and `header_size`, or has changed.
            ReplayError: the ledger was issued anew since it was opened.
        """
        record, header_size = self._read()
        if record.share_id != self._share_id:
            raise ReplayError(_differs("share_id", self._share_id, record.share_id))
        if record.n_prefix != self._n_prefix:
            raise LedgerError(_differs("n_prefix", self._n_prefix, record.n_prefix))
        start, end = _prefix_range(record, header_size)
        return LedgerPrefix(record.n_prefix, record.prefix_sha256, self._mapping()[start:end])

    def begin(
        self,
        *,
        layout: str | None = None,
        semantics: str | None = None,
        prefix_sha256: bytes | None = None,
    ) -> None:
        """Say that filling begins.

        Args:
            layout: digest of the context that this provider really built, so that the decoder
                compares it with its own; None leaves the one that was issued.
            semantics: likewise.
            prefix_sha256: `tokens_digest` of the tokens that the provider continues from; None leaves
                the one that was issued.

        Raises:
            LocalProtocolError: the ledger is not in state issued.
            ReplayError: it was issued anew since it was opened.
        """
        mapping = self._own(LedgerState.ISSUED)
        if layout is not None:
            mapping[_LAYOUT] = _digest("layout", layout)
        if semantics is not None:
            mapping[_SEMANTICS] = _digest("semantics", semantics)
        if prefix_sha256 is not None:
            mapping[_PREFIX_SHA256] = _raw_digest("prefix_sha256", prefix_sha256)
        mapping[_STATE] = _U32.pack(LedgerState.FILLING)

    def advance(self, n_filled: int) -> None:
        """Move the watermark, after the K and V of `n_filled` tokens are really in memory.

        Raises:
            LocalProtocolError: not filling, or the watermark would go back.
            ReplayError: the ledger was issued anew.
        """
        mapping = self._own(LedgerState.FILLING)
        (before,) = _U64.unpack(mapping[_N_FILLED])
        if not before <= n_filled < _UINT64_END:
            raise LocalProtocolError(f"the watermark cannot go from {before} to {n_filled} tokens")
        mapping[_N_FILLED] = _U64.pack(n_filled)

    def complete(
        self, tokens_sha256: bytes, n_tokens: int, sample_digest: bytes, blob: bytes | memoryview = b""
    ) -> None:
        """Vouch for all tokens; the state is stored last.

        Args:
            tokens_sha256: see `tokens_digest`.
            n_tokens: how many tokens that digest covers, with the prefix; the watermark must have come
                so far.
            sample_digest: digest over the metadata and sampled K and V rows.
            blob: metadata of the filled cells.

        Raises:
            LocalProtocolError: not filling, a digest is not 32 bytes, or the watermark is elsewhere.
            LedgerError: the blob exceeds the capacity.
            ReplayError: the ledger was issued anew.
        """
        mapping = self._own(LedgerState.FILLING)
        _raw_digest("tokens_sha256", tokens_sha256)
        _raw_digest("sample_digest", sample_digest)
        (n_filled,) = _U64.unpack(mapping[_N_FILLED])
        if n_filled != n_tokens:
            raise LocalProtocolError(f"{n_filled} tokens are filled, cannot vouch for {n_tokens}")
        data = memoryview(blob).cast("B")
        if len(data) > self.capacity:
            raise LedgerError(
                f"a blob of {len(data)} bytes exceeds the ledger's capacity of {self.capacity}",
                hint="let the decoder make a ledger with a larger capacity",
            )
        mapping[self._header_size : self._header_size + len(data)] = data
        end = (n_tokens, self._share_id, tokens_sha256, sample_digest, self._header_size, len(data))
        _END.pack_into(mapping, _END_OFFSET, *end)
        mapping[_STATE] = _U32.pack(LedgerState.COMPLETE)

    def fail(self, message: str) -> None:
        """Say that the share will never be complete, and why.

        Args:
            message: cut to `ERROR_NBYTES` bytes of UTF-8.

        Raises:
            LocalProtocolError: it is complete or failed already.
            ReplayError: the ledger was issued anew.
        """
        mapping = self._own(LedgerState.ISSUED, LedgerState.FILLING)
        # errors="ignore" on the way back drops a character that the cut went through.
        text = message.encode(errors="replace")[:ERROR_NBYTES].decode(errors="ignore").encode()
        mapping[_ERROR] = text.ljust(ERROR_NBYTES, b"\0")
        mapping[_VOUCHED] = _U64.pack(self._share_id)
        mapping[_STATE] = _U32.pack(LedgerState.FAILED)

    # -- inside --

    def _mapping(self) -> mmap.mmap:
        if self._map.closed:
            raise LocalProtocolError("the ledger is closed")
        return self._map

    def _store(self, share_id: int, header: bytes, prefix: LedgerPrefix | None) -> None:
        self._mapping()[: len(header)] = header
        self._share_id = share_id
        self._n_prefix = prefix.n_tokens if prefix else 0
        self._header_size = len(header)

    def _own(self, *states: LedgerState) -> mmap.mmap:
        """Return the mapping, if it is still this share's and in one of `states`."""
        mapping = self._mapping()
        (share_id,) = _U64.unpack(mapping[_SHARE_ID])
        if share_id != self._share_id:
            raise ReplayError(_differs("share_id", self._share_id, share_id))
        (state,) = _U32.unpack(mapping[_STATE])
        if state not in states:
            wanted = " or ".join(state.name.lower() for state in states)
            raise LocalProtocolError(_differs("state", wanted, state))
        return mapping


def _issued(share_id: int, layout: str, semantics: str, prefix: LedgerPrefix) -> bytes:
    """Return what stands before a blob: the fields, and the blob of the prefix."""
    if not 0 < share_id < _UINT64_END:
        raise LocalProtocolError(f"share_id {share_id} is out of range")
    if not 0 <= prefix.n_tokens < _UINT64_END:
        raise LocalProtocolError(f"a prefix of {prefix.n_tokens} tokens is out of range")
    if len(prefix.blob) > MAX_PREFIX_NBYTES:
        raise LedgerError(
            f"the metadata of the prefix, {len(prefix.blob)} bytes, exceeds the limit of {MAX_PREFIX_NBYTES}"
        )
    behind = prefix.blob + bytes(-len(prefix.blob) % _ALIGNMENT)
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_NBYTES + len(behind),
        share_id,
        _digest("layout", layout),
        _digest("semantics", semantics),
        LedgerState.ISSUED,
        0,  # flags
        prefix.n_tokens,  # n_filled
        0,  # n_tokens
        0,  # vouched_share_id
        bytes(DIGEST_NBYTES),
        bytes(DIGEST_NBYTES),
        0,  # blob_offset
        0,  # blob_size
        b"",
        prefix.n_tokens,
        _raw_digest("prefix_sha256", prefix.sha256),
        HEADER_NBYTES if prefix.blob else 0,
        len(prefix.blob),
    )
    return fields + behind


def _prefix_range(record: LedgerRecord, header_size: int) -> tuple[int, int]:
    """Return where the blob of a prefix lies, checked."""
    start, size = record.prefix_offset, record.prefix_size
    if size == 0:
        return 0, 0
    if start < HEADER_NBYTES or start + size > header_size:
        raise LedgerError(
            f"ledger: {size} bytes of prefix at {start} are outside of [{HEADER_NBYTES}, {header_size})"
        )
    if size > MAX_PREFIX_NBYTES:
        raise LedgerError(f"ledger: {size} bytes of prefix exceed the limit of {MAX_PREFIX_NBYTES}")
    return start, start + size


def _digest(name: str, text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError as exc:
        raise LocalProtocolError(f"{name} {text!r} is no hexadecimal digest") from exc
    return _raw_digest(name, digest)


def _raw_digest(name: str, digest: bytes) -> bytes:
    if len(digest) != DIGEST_NBYTES:
        raise LocalProtocolError(f"{name} has {len(digest)} bytes, not {DIGEST_NBYTES}")
    return digest


def _differs(field: str, expected: object, found: object) -> str:
    return f"ledger: {field} differs: expected {expected}, found {found}"
