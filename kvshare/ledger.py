"""The ledger: a small sealed memfd in which a provider vouches for what it filled.

The decoder makes it and sends its descriptor along with the regions. A provider in any language can
write it. All integers are little-endian, all offsets are bytes from the start:

====== ==== ================ ======= ==========================================================
offset size field            written meaning
====== ==== ================ ======= ==========================================================
     0    8 magic            issue   the bytes ``KVSLEDG1``
     8    4 version          issue   u32, 1
    12    4 header_size      issue   u32, 512; a blob starts at or behind it
    16    8 share_id         issue   u64, the nonce of the share, as in the wire header
    24   32 layout           issue   layout digest, raw; a provider may overwrite it with its own
    56   32 semantics        issue   semantics digest, likewise
    88    4 state            both    u32: 0 issued, 1 filling, 2 complete, 3 failed
    92    4 flags            issue   u32, 0; ignore
    96    8 n_filled         filling u64, watermark: tokens whose K and V are in memory
   104    8 n_tokens         end     u64, tokens that the provider vouches for
   112    8 vouched_share_id end     u64, the share_id of the wire header, copied by the provider
   120   32 tokens_sha256    end     sha256 of the token ids as little-endian int32
   152   32 sample_digest    end     digest over the metadata and sampled K and V rows
   184    8 blob_offset      end     u64, where the metadata blob starts
   192    8 blob_size        end     u64, its size; 0: there is none
   200  256 error            failed  UTF-8, padded with NUL
   456   56 reserved         issue   0
   512    - blob             end     up to the end of the memfd
====== ==== ================ ======= ==========================================================

How to fill it:

1. Map the memfd shared and writable. Go on only if magic and version are right, share_id is that of
   the wire header, and state is 0.
2. Store state 1.
3. After every batch, once its K and V are really in memory (synchronise a GPU first), store n_filled.
4. At the end write the blob and every field marked "end". Store state 2 last, with release order: who
   sees state 2 may read all the rest. If anything fails, write vouched_share_id and error, then
   state 3.
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
    LocalProtocolError,
    ReplayError,
)

MAGIC = b"KVSLEDG1"
VERSION = 1
HEADER_NBYTES = 512
ERROR_NBYTES = 256
DIGEST_NBYTES = 32
DEFAULT_CAPACITY_NBYTES = 1 << 20  # a blob has about 12 bytes a token

_HEADER = struct.Struct("<8sIIQ32s32sIIQQQ32s32sQQ256s56x")
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

    def verify(
        self,
        *,
        share_id: int,
        layout: str,
        semantics: str | None,
        tokens: Sequence[int],
        sample_digest: bytes | None,
    ) -> None:
        """Check everything that the ledger vouches for against what the decoder knows itself.

        Args:
            share_id: the share that is to be adopted.
            layout: the decoder's layout digest.
            semantics: its semantics digest; None allows any, when the caller asked for that.
            tokens: the tokens that are to be adopted.
            sample_digest: digest that the decoder took from the memory itself; None only if it
                samples by other means.

        Raises:
            ReplayError: the ledger, or its provider, speaks of another share.
            LedgerIncompleteError: not complete, or not for all the tokens.
            LedgerDigestError: other layout, semantics, tokens or bytes.
        """
        if self.share_id != share_id:
            raise ReplayError(_differs("share_id", share_id, self.share_id))
        if self.state in (LedgerState.COMPLETE, LedgerState.FAILED) and self.vouched_share_id != share_id:
            raise ReplayError(_differs("vouched_share_id", share_id, self.vouched_share_id))
        if self.state is LedgerState.FAILED:
            raise LedgerIncompleteError(f"the provider failed: {self.error!r}")
        if self.state is not LedgerState.COMPLETE:
            raise LedgerIncompleteError(
                _differs("state", "complete", f"{self.state.name.lower()} at {self.n_filled} tokens")
            )
        for field in ("n_tokens", "n_filled"):
            if getattr(self, field) != len(tokens):
                raise LedgerIncompleteError(_differs(field, len(tokens), getattr(self, field)))
        if self.layout != layout:
            raise LedgerDigestError(_differs("layout", layout, self.layout))
        if semantics is not None and self.semantics != semantics:
            raise LedgerDigestError(_differs("semantics", semantics, self.semantics))
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

    @classmethod
    def create(
        cls, share_id: int, layout: str, semantics: str, *, capacity: int = DEFAULT_CAPACITY_NBYTES
    ) -> Ledger:
        """Make a ledger in state issued.

        Args:
            share_id: nonce of the share.
            layout: layout digest, 64 hexadecimal digits.
            semantics: semantics digest, likewise.
            capacity: bytes that a blob may have at least; only those that are written cost memory.

        Raises:
            LocalProtocolError: an argument is out of range.
            OSError: no memfd.

        Ownership: the caller closes it.
        """
        header = _issued(share_id, layout, semantics)
        if capacity < 0:
            raise LocalProtocolError(f"a capacity of {capacity} bytes is negative")
        size = -(-(HEADER_NBYTES + capacity) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = fds.memfd_create("kvshare-ledger", size)
        try:
            ledger = cls(fd, size)
        except BaseException:
            fd.close()
            raise
        ledger._map[:HEADER_NBYTES] = header
        ledger._share_id = share_id
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
                ledger._share_id = ledger.snapshot(with_blob=False).share_id
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
    def size(self) -> int:
        """Size in bytes, for the wire header."""
        return len(self._mapping())

    @property
    def capacity(self) -> int:
        """The largest blob, in bytes."""
        return self.size - HEADER_NBYTES

    def fileno(self) -> int:
        """Return the memfd, to send it. Ownership: stays here."""
        return self._fd.fileno()

    def view(self) -> memoryview:
        """Return the mapped bytes, for native code that reads or writes the ledger in place.

        Ownership: the ledger cannot be closed until the caller released it.
        """
        return memoryview(self._mapping())

    # -- the decoder's side --

    def reissue(self, share_id: int, layout: str, semantics: str) -> None:
        """Reset the ledger for a next share, without a new memfd.

        Whoever holds the descriptor keeps it: bytes of the last blob stay readable behind the header,
        and a provider that is late is told apart by its nonce only.

        Args: as for `create`.
        """
        self._mapping()[:HEADER_NBYTES] = _issued(share_id, layout, semantics)
        self._share_id = share_id

    def snapshot(self, *, with_blob: bool = True) -> LedgerRecord:
        """Copy the ledger once and parse the copy.

        Args:
            with_blob: copy the blob as well, if there is one; otherwise the record has none.

        Raises:
            LedgerError: it is malformed.
        """
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
        return LedgerRecord(
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
        )

    # -- the provider's side --

    def begin(self, *, layout: str | None = None, semantics: str | None = None) -> None:
        """Say that filling begins.

        Args:
            layout: digest of the context that this provider really built, so that the decoder
                compares it with its own; None leaves the one that was issued.
            semantics: likewise.

        Raises:
            LocalProtocolError: the ledger is not in state issued.
            ReplayError: it was issued anew since it was opened.
        """
        mapping = self._own(LedgerState.ISSUED)
        if layout is not None:
            mapping[_LAYOUT] = _digest("layout", layout)
        if semantics is not None:
            mapping[_SEMANTICS] = _digest("semantics", semantics)
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
            n_tokens: how many tokens that digest covers; the watermark must have come so far.
            sample_digest: digest over the metadata and sampled K and V rows.
            blob: metadata of the filled cells.

        Raises:
            LocalProtocolError: not filling, a digest is not 32 bytes, or the watermark is elsewhere.
            LedgerError: the blob exceeds the capacity.
            ReplayError: the ledger was issued anew.
        """
        mapping = self._own(LedgerState.FILLING)
        for name, digest in (("tokens_sha256", tokens_sha256), ("sample_digest", sample_digest)):
            if len(digest) != DIGEST_NBYTES:
                raise LocalProtocolError(f"{name} has {len(digest)} bytes, not {DIGEST_NBYTES}")
        (n_filled,) = _U64.unpack(mapping[_N_FILLED])
        if n_filled != n_tokens:
            raise LocalProtocolError(f"{n_filled} tokens are filled, cannot vouch for {n_tokens}")
        data = memoryview(blob).cast("B")
        if len(data) > self.capacity:
            raise LedgerError(
                f"a blob of {len(data)} bytes exceeds the ledger's capacity of {self.capacity}",
                hint="let the decoder make a ledger with a larger capacity",
            )
        mapping[HEADER_NBYTES : HEADER_NBYTES + len(data)] = data
        end = (n_tokens, self._share_id, tokens_sha256, sample_digest, HEADER_NBYTES, len(data))
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


def _issued(share_id: int, layout: str, semantics: str) -> bytes:
    if not 0 < share_id < _UINT64_END:
        raise LocalProtocolError(f"share_id {share_id} is out of range")
    return _HEADER.pack(
        MAGIC,
        VERSION,
        HEADER_NBYTES,
        share_id,
        _digest("layout", layout),
        _digest("semantics", semantics),
        LedgerState.ISSUED,
        0,  # flags
        0,  # n_filled
        0,  # n_tokens
        0,  # vouched_share_id
        bytes(DIGEST_NBYTES),
        bytes(DIGEST_NBYTES),
        0,  # blob_offset
        0,  # blob_size
        b"",
    )


def _digest(name: str, text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError as exc:
        raise LocalProtocolError(f"{name} {text!r} is no hexadecimal digest") from exc
    if len(digest) != DIGEST_NBYTES:
        raise LocalProtocolError(f"{name} has {len(digest)} bytes, not {DIGEST_NBYTES}")
    return digest


def _differs(field: str, expected: object, found: object) -> str:
    return f"ledger: {field} differs: expected {expected}, found {found}"
