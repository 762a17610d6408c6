"""Whatever is in the memory: the ledger is read truthfully or refused."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvshare import errors, fds
from kvshare.ledger import HEADER_NBYTES, Ledger, LedgerPrefix, LedgerState, tokens_digest

LAYOUT = hashlib.sha256(b"layout").hexdigest()
SEMANTICS = hashlib.sha256(b"semantics").hexdigest()
SAMPLE = hashlib.sha256(b"rows").digest()
TOKENS = [1, 22, 333]

# Fields that a decoder ignores: flags, what only state failed has, where the prefix lies.
IGNORED = frozenset([*range(92, 96), *range(200, 456), *range(496, 512)])
FIELDS = (*range(184), *range(456, 512))

share_ids = st.integers(1, (1 << 53) - 1)
digests = st.binary(min_size=32, max_size=32)
tokens_lists = st.lists(st.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=50)


@pytest.fixture(scope="module")
def ledger() -> Iterator[Ledger]:
    with Ledger.create(1, LAYOUT, SEMANTICS, capacity=4096) as made:
        yield made


def filled(ledger: Ledger, share_id: int, tokens: list[int], blob: bytes) -> None:
    ledger.reissue(share_id, LAYOUT, SEMANTICS)
    ledger.begin()
    ledger.advance(len(tokens))
    ledger.complete(tokens_digest(tokens), len(tokens), SAMPLE, blob)


def adopt(ledger: Ledger, share_id: int = 1) -> None:
    ledger.snapshot().verify(
        share_id=share_id, layout=LAYOUT, semantics=SEMANTICS, tokens=TOKENS, sample_digest=SAMPLE
    )


@given(share_ids, digests, digests, tokens_lists, digests, st.binary(max_size=2000), st.binary(), st.data())
def test_round_trip(
    ledger: Ledger,
    share_id: int,
    layout: bytes,
    semantics: bytes,
    tokens: list[int],
    sample: bytes,
    blob: bytes,
    metadata: bytes,
    data: st.DataObject,
) -> None:
    n_prefix = data.draw(st.integers(0, len(tokens) - 1))
    prefix = LedgerPrefix.of(tokens[:n_prefix], metadata)
    ledger.reissue(share_id, layout.hex(), semantics.hex(), prefix=prefix)
    assert ledger.prefix == prefix
    ledger.begin()
    watermarks = data.draw(st.lists(st.integers(n_prefix, len(tokens)), max_size=5).map(sorted))
    for n_filled in [*watermarks, len(tokens)]:
        ledger.advance(n_filled)
        assert ledger.snapshot().n_filled == n_filled
    ledger.complete(tokens_digest(tokens), len(tokens), sample, blob)
    record = ledger.snapshot()
    assert (record.state, record.blob) == (LedgerState.COMPLETE, blob)
    assert ledger.prefix == prefix
    record.verify(
        share_id=share_id,
        layout=layout.hex(),
        semantics=semantics.hex(),
        tokens=tokens,
        sample_digest=sample,
        prefix=prefix,
    )


@given(st.binary(min_size=HEADER_NBYTES, max_size=HEADER_NBYTES), st.integers(0, HEADER_NBYTES))
@example(bytes(HEADER_NBYTES), 16)
def test_any_header(ledger: Ledger, header: bytes, n_kept: int) -> None:
    """A good start and then garbage, at every boundary."""
    filled(ledger, 1, TOKENS, b"metadata")
    with ledger.view() as view:
        good = bytes(view[:HEADER_NBYTES])
        view[n_kept:HEADER_NBYTES] = header[n_kept:]
        different = any(good[i] != view[i] for i in range(HEADER_NBYTES) if i not in IGNORED)
    try:
        adopt(ledger)
    except (errors.LedgerError, errors.ReplayError):
        assert different
    else:
        # Only where the blob lies is not vouched for twice; the native side checks what is in it.
        with ledger.view() as view:
            assert all(good[i] == view[i] for i in FIELDS if i >= 16 and i not in IGNORED)
    with fds.OwnedFd(os.dup(ledger.fileno())) as fd, contextlib.suppress(errors.LedgerError):
        Ledger.open(fd, ledger.size).close()


@given(st.sampled_from([i for i in FIELDS if i not in IGNORED]), st.integers(1, 255))
@example(at=12, flip=1)
def test_one_flipped_byte_is_refused(ledger: Ledger, at: int, flip: int) -> None:
    filled(ledger, 1, TOKENS, b"")
    adopt(ledger)
    with ledger.view() as view:
        view[at] ^= flip
    if at in range(12, 16) and HEADER_NBYTES <= int.from_bytes(ledger.view()[12:16], "little") <= ledger.size:
        adopt(ledger)  # a larger header of a later minor change; without a blob nothing else moves
    else:
        with pytest.raises((errors.LedgerError, errors.ReplayError)):
            adopt(ledger)


@given(st.text(max_size=300))
def test_any_failure_message(ledger: Ledger, message: str) -> None:
    ledger.reissue(1, LAYOUT, SEMANTICS)
    ledger.fail(message)
    found = ledger.snapshot().error
    expected = message.encode(errors="replace").decode().partition("\0")[0]
    assert expected.startswith(found)
    assert len(found.encode()) > 252 or found == expected


@given(tokens_lists, tokens_lists)
def test_other_tokens_have_another_digest(one: list[int], other: list[int]) -> None:
    assert (tokens_digest(one) == tokens_digest(other)) is (one == other)
