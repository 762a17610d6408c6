"""Hostile metadata: refused with the ledger's errors, and nobody else's answer changes.

A blob as a provider publishes it, of a plain cache, little-endian: u32 magic, u32 version, u64 number
of extents, u64 bytes of state; each extent u32 region, u32 0, u64 offset, u64 size; then the state:
u32 streams, u32 cells, u32 ranges, u32 head, each range u32 from, u32 to, each cell i32 position, u32
number of sequences, i32 sequence; then what upstream writes about types and sizes of the layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvshare import (
    Adopted,
    Context,
    Decoder,
    LedgerDigestError,
    LedgerError,
    LedgerIncompleteError,
    Model,
    Offer,
    Provider,
    Share,
)
from kvshare._native import signatures
from kvshare._native.context import Logits
from kvshare.ledger import tokens_digest
from tests.native.handoff import decode_each, random_tokens, unconfine

pytestmark = pytest.mark.native

N_PROMPT = 40
N_OTHER = 20
N_CELLS = 512
SEQ_ID = 1
PARAMS: dict[str, Any] = {"n_ctx": N_CELLS, "n_seq_max": 2, "kv_unified": True, "flash_attn": "on"}

_HEADER = struct.Struct("<IIQQ")
_EXTENT = struct.Struct("<IIQQ")


class Blob:
    """A published blob, taken apart."""

    def __init__(self, data: bytes) -> None:
        self.magic, self.version, self.n_extents, self.n_state = _HEADER.unpack_from(data)
        at = _HEADER.size
        self.extents = [list(_EXTENT.unpack_from(data, at + i * _EXTENT.size)) for i in range(self.n_extents)]
        self.state = bytearray(data[at + self.n_extents * _EXTENT.size :])
        assert self.n_state == len(self.state)

    def pack(self) -> bytes:
        head = _HEADER.pack(self.magic, self.version, self.n_extents, self.n_state)
        return head + b"".join(_EXTENT.pack(*extent) for extent in self.extents) + bytes(self.state)

    def u32(self, at: int, value: int) -> None:
        struct.pack_into("<I", self.state, at, value & 0xFFFFFFFF)


@contextlib.contextmanager
def placed(context: Context, seq_id: int, first: int, last: int) -> Iterator[None]:
    """Let decodes take these cells, wherever the write head is."""
    cells = (signatures.Range * 1)(signatures.Range(0, first, last))
    context.library.lib.llama_kv_share_confine(context.handle, seq_id, cells, 1)
    yield
    unconfine(context, seq_id)


def hashed(logits: list[Logits]) -> list[str]:
    return [hashlib.sha256(each.tobytes()).hexdigest()[:16] for each in logits]


class Target:
    """A decoder with a sequence of its own, and what an honest provider published for another one."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.tokens = random_tokens(model, N_PROMPT + 2)
        self.prompt, self.rest = self.tokens[:N_PROMPT], self.tokens[N_PROMPT:]
        self.other = random_tokens(model, N_OTHER + 1, seed=2)
        self.decoder = Decoder.open(model, **PARAMS)
        self.decoder.context.decode(self.other[:-1], position=0, seq_id=0)
        near, far = socket.socketpair(socket.AF_UNIX)
        with near, far, self.decoder.share(SEQ_ID, n_tokens=N_PROMPT) as share:
            self.cells = share.header.cells
            share.send(near)
            with Offer.receive(far) as offer, Provider(offer, model) as provider:
                provider.prefill(self.prompt)
                provider.publish()
            record = share.ledger.snapshot()
            self.blob, self.sample = record.blob, record.sample_digest
            self.memory = self._read(share)
            self.decoder.adopt(share, self.prompt)
        with Context.create(model, **PARAMS) as local:
            local.decode(self.other[:-1], position=0, seq_id=0)
            with placed(local, SEQ_ID, *self.cells[0][0]):
                local.decode(self.prompt, position=0, seq_id=SEQ_ID)
            self.expected = self.continued(local)
        self.check()
        self.decoder.context.clear(SEQ_ID)
        self.other_expected = self.other_logits()

    def _read(self, share: Share) -> list[bytes]:
        regions = zip(share.header.regions, share._descriptors, strict=False)
        return [os.pread(fd, entry.size, entry.offset) for entry, fd in regions]

    def adopt(self, blob: bytes, *, sample: bytes | None = None) -> Adopted:
        """Let the decoder adopt a blob over the memory as the honest provider left it."""
        self.decoder.context.clear(SEQ_ID)
        with self.decoder.share(SEQ_ID, n_tokens=N_PROMPT) as share:
            assert share.header.cells == self.cells
            for entry, fd, content in zip(
                share.header.regions, share._descriptors, self.memory, strict=False
            ):
                os.pwrite(fd, content, entry.offset)
            share.ledger.begin()
            share.ledger.advance(N_PROMPT)
            share.ledger.complete(
                tokens_digest(self.prompt), N_PROMPT, self.sample if sample is None else sample, blob
            )
            return self.decoder.adopt(share, self.prompt)

    def sample_of(self, blob: Blob) -> bytes:
        """Compute the digest that an attacker computes, who knows how."""
        digest = hashlib.sha256(blob.state)
        for region, _, offset, size in blob.extents[:: -(-len(blob.extents) // 1024) or 1]:
            digest.update(struct.pack("<IQQ", region, offset, size))
            data = self.memory[region][offset : offset + size]
            middle = size // 2 // 64 * 64
            whole = size <= 3 * 64
            digest.update(data if whole else data[:64] + data[middle : middle + 64] + data[-64:])
        return digest.digest()

    def check(self) -> None:
        """The sequence is there, and goes on as a local one."""
        assert self.continued(self.decoder.context) == self.expected

    def continued(self, context: Context) -> list[str]:
        """Decode what follows the prompt, right behind it."""
        ((first, last),) = self.cells[0]
        with placed(context, SEQ_ID, first + N_PROMPT, last):
            return hashed(decode_each(context, self.rest, position=N_PROMPT, seq_id=SEQ_ID))

    def other_logits(self) -> list[str]:
        """Decode a token of the other sequence, and take it back."""
        context = self.decoder.context
        with placed(context, 0, N_OTHER, N_OTHER + 1):
            found = hashed(decode_each(context, self.other[-1:], position=N_OTHER, seq_id=0))
        context.library.llama.llama_memory_seq_rm(context.memory, 0, N_OTHER, -1)
        return found

    def assert_unharmed(self) -> None:
        """After a refusal: nothing was entered, the other sequence answers as before."""
        assert self.decoder.context.n_past(SEQ_ID) == 0
        assert self.decoder.context.n_past(0) == N_OTHER
        assert self.other_logits() == self.other_expected


@pytest.fixture(scope="module")
def target(tiny: Model) -> Iterator[Target]:
    target = Target(tiny)
    yield target
    # whatever was tried before: the honest blob is still adopted, and right
    assert target.adopt(target.blob).bytes_moved == 0
    target.check()
    target.decoder.close()


def test_the_format_is_as_described(target: Target) -> None:
    blob = Blob(target.blob)
    assert blob.pack() == target.blob
    assert target.sample_of(blob) == target.sample
    ((first, last),) = target.cells[0]
    assert first == 256
    assert last - first >= N_PROMPT
    assert struct.unpack("<5I", blob.state) == (1, first + N_PROMPT, 0, first, N_PROMPT)


@pytest.mark.parametrize("kept", [1, 3, 4, 8, 16, 23, 24, 25, 47, 48, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, -4, -1])
def test_a_truncated_blob(target: Target, kept: float) -> None:
    n = int(len(target.blob) * kept) if isinstance(kept, float) else int(kept) % len(target.blob)
    with pytest.raises(LedgerError):
        target.adopt(target.blob[:n])
    target.assert_unharmed()


@pytest.mark.parametrize("n_more", [1, 4, 24, 4096])
def test_a_blob_with_more_behind_it(target: Target, n_more: int) -> None:
    with pytest.raises(LedgerError):
        target.adopt(target.blob + bytes(n_more))
    target.assert_unharmed()


def magic(blob: Blob) -> None:
    blob.magic ^= 1


def version(blob: Blob) -> None:
    blob.version += 1


def n_extents_less(blob: Blob) -> None:
    blob.n_extents -= 1


def n_extents_more(blob: Blob) -> None:
    blob.n_extents += 1


def n_extents_huge(blob: Blob) -> None:
    blob.n_extents = (1 << 64) - 1


def n_extents_wraps(blob: Blob) -> None:
    blob.n_extents = (1 << 64) // 24 + 1


def n_state_huge(blob: Blob) -> None:
    blob.n_state = (1 << 64) - 1


def extent_missing(blob: Blob) -> None:
    blob.extents.pop()
    blob.n_extents -= 1


def extent_twice(blob: Blob) -> None:
    blob.extents.append(blob.extents[-1])
    blob.n_extents += 1


def extent_in_no_region(blob: Blob) -> None:
    blob.extents[0][0] = 1


def extent_in_no_region_at_all(blob: Blob) -> None:
    blob.extents[0][0] = 0xFFFFFFFF


def extent_outside(blob: Blob) -> None:
    blob.extents[-1][2] = 1 << 40


def extent_wraps(blob: Blob) -> None:
    blob.extents[-1][2] = (1 << 64) - blob.extents[-1][3] // 2


def extent_over_the_end(blob: Blob) -> None:
    blob.extents[-1][2] += 1 << 19


def extent_huge(blob: Blob) -> None:
    blob.extents[0][3] = (1 << 64) - 1


def extent_empty(blob: Blob) -> None:
    blob.extents[0][3] = 0


def extent_shorter(blob: Blob) -> None:
    blob.extents[-1][3] -= 1


def extent_longer(blob: Blob) -> None:
    blob.extents[-1][3] += 1


def runs_none(blob: Blob) -> None:
    blob.u32(0, 0)


def runs_huge(blob: Blob) -> None:
    blob.u32(0, 0xFFFFFFFF)


def head_outside(blob: Blob) -> None:
    blob.u32(4, N_CELLS + 1)


def head_huge(blob: Blob) -> None:
    blob.u32(4, 0xFFFFFFFF)


def position_negative(blob: Blob) -> None:
    blob.u32(8, -1)


def position_outside(blob: Blob) -> None:
    blob.u32(8, 1)


def position_huge(blob: Blob) -> None:
    blob.u32(8, 0x7FFFFFFF)


def cells_outside(blob: Blob) -> None:
    blob.u32(12, N_CELLS - 1)


def cells_huge(blob: Blob) -> None:
    blob.u32(12, 0xFFFFFFFF)


def cells_of_the_other_sequence(blob: Blob) -> None:
    blob.u32(12, 0)


def cells_none(blob: Blob) -> None:
    blob.u32(16, 0)


def cells_less(blob: Blob) -> None:
    blob.u32(16, N_PROMPT - 1)


def cells_more(blob: Blob) -> None:
    blob.u32(16, N_PROMPT + 1)


def n_cells_huge(blob: Blob) -> None:
    blob.u32(16, 0xFFFFFFFF)


MUTATIONS = [
    magic,
    version,
    n_extents_less,
    n_extents_more,
    n_extents_huge,
    n_extents_wraps,
    n_state_huge,
    extent_missing,
    extent_twice,
    extent_in_no_region,
    extent_in_no_region_at_all,
    extent_outside,
    extent_wraps,
    extent_over_the_end,
    extent_huge,
    extent_empty,
    extent_shorter,
    extent_longer,
    runs_none,
    runs_huge,
    head_outside,
    head_huge,
    position_negative,
    position_outside,
    position_huge,
    cells_outside,
    cells_huge,
    cells_of_the_other_sequence,
    cells_none,
    cells_less,
    cells_more,
    n_cells_huge,
]


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_a_mutated_blob(target: Target, mutate: Callable[[Blob], None]) -> None:
    """With a sample digest that is right for what the blob says, where there is one."""
    blob = Blob(target.blob)
    mutate(blob)
    assert blob.pack() != target.blob
    try:
        sample = target.sample_of(blob)
    except IndexError:  # no such region: any digest will do
        sample = target.sample
    with pytest.raises(LedgerError) as refused:
        target.adopt(blob.pack(), sample=sample)
    assert type(refused.value) is not LedgerIncompleteError
    target.assert_unharmed()


def two_runs(blob: Blob, *words: int) -> None:
    blob.u32(0, 2)
    blob.state[8:20] = struct.pack("<6I", *words)
    blob.n_state = len(blob.state)


def position_twice(blob: Blob) -> None:
    """The second half of the cells begins with a position of the first, and nobody is the last one."""
    half, cell = N_PROMPT // 2, struct.unpack_from("<I", blob.state, 12)[0]
    two_runs(blob, 0, cell, half, half - 1, cell + half, half)


def cell_twice(blob: Blob) -> None:
    """Both halves of the positions lie in the same cells."""
    half, cell = N_PROMPT // 2, struct.unpack_from("<I", blob.state, 12)[0]
    two_runs(blob, 0, cell, half, half, cell, half)


def half_the_cells(blob: Blob) -> None:
    """Only the second half of the positions is there; the rest was never prefilled."""
    half, cell = N_PROMPT // 2, struct.unpack_from("<I", blob.state, 12)[0]
    blob.u32(8, half)
    blob.u32(12, cell + half)
    blob.u32(16, half)
    for extent in blob.extents:
        extent[2] += extent[3] // 2
        extent[3] //= 2


def cells_outside_of_the_lease(blob: Blob) -> None:
    """Free cells that nobody leased: what lies there is another sequence's past, or its future."""
    blob.u32(12, 32)
    row = blob.extents[0][3] // N_PROMPT
    for extent in blob.extents:
        extent[2] -= (256 - 32) * row


@pytest.mark.parametrize(
    "mutate",
    [position_twice, cell_twice, half_the_cells, cells_outside_of_the_lease],
    ids=lambda mutate: mutate.__name__,
)
def test_a_consistent_lie(target: Target, mutate: Callable[[Blob], None]) -> None:
    """All counts and digests are right; what it claims is not what the lease is for."""
    blob = Blob(target.blob)
    mutate(blob)
    with pytest.raises(LedgerError):
        target.adopt(blob.pack(), sample=target.sample_of(blob))
    target.assert_unharmed()


def test_bytes_that_are_moved_are_counted(target: Target) -> None:
    """Two layers claim the same rows: whoever may write them may say so, but not that nothing moved."""
    blob = Blob(target.blob)
    size = blob.extents[-1][3]
    blob.extents[-1] = list(blob.extents[0])
    adopted = target.adopt(blob.pack(), sample=target.sample_of(blob))
    assert adopted.bytes_moved == size
    assert adopted.bytes_in_place == sum(extent[3] for extent in blob.extents[:-1])
    target.decoder.context.clear(SEQ_ID)
    target.assert_unharmed()


def test_a_wrong_sample_digest(target: Target) -> None:
    with pytest.raises(LedgerDigestError):
        target.adopt(target.blob, sample=bytes(32))
    target.assert_unharmed()


def test_random_bytes(target: Target) -> None:
    """Single bytes of the blob are others; a byte that means nothing may be, and costs nothing."""
    rng = np.random.default_rng(1)
    n_refused = 0
    for at in rng.choice(len(target.blob), min(150, len(target.blob)), replace=False).tolist():
        data = bytearray(target.blob)
        data[at] ^= int(rng.integers(1, 256))
        try:
            sample = target.sample_of(Blob(bytes(data)))
        except (AssertionError, IndexError, struct.error):
            sample = target.sample
        try:
            adopted = target.adopt(bytes(data), sample=sample)
        except LedgerError:
            n_refused += 1
            target.assert_unharmed()
        else:
            assert adopted.n_adopted == N_PROMPT
            if not adopted.bytes_moved:  # else it named rows elsewhere, and those are there now
                target.check()
    assert n_refused > 75
