"""The ledger, byte by byte, and what a decoder believes."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import struct
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshare import errors, fds
from kvshare.ledger import (
    HEADER_NBYTES,
    MAX_PREFIX_NBYTES,
    Ledger,
    LedgerPrefix,
    LedgerRecord,
    LedgerState,
    tokens_digest,
)
from tests.vectors import make

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "ledger.json").read_text())
LAYOUT = hashlib.sha256(b"layout").hexdigest()
SEMANTICS = hashlib.sha256(b"semantics").hexdigest()
OTHER = hashlib.sha256(b"other").hexdigest()
SAMPLE = hashlib.sha256(b"rows").digest()
TOKENS = [1, 22, 333, 49151]
SHARE_ID = 0x0001_2345_6789_ABCD
PREFIX = LedgerPrefix.of(TOKENS[:2], b"what is there")  # 13 bytes, which is no multiple of 8


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    with Ledger.create(SHARE_ID, LAYOUT, SEMANTICS, capacity=4096) as made:
        yield made


def duplicate(ledger: Ledger) -> fds.OwnedFd:
    return fds.OwnedFd(os.dup(ledger.fileno()))


@pytest.fixture
def provider(ledger: Ledger) -> Iterator[Ledger]:
    """The same ledger as a provider sees it."""
    with Ledger.open(duplicate(ledger), ledger.size) as opened:
        yield opened


def fill(provider: Ledger, tokens: list[int] | None = None, blob: bytes = b"metadata") -> None:
    tokens = TOKENS if tokens is None else tokens
    provider.begin()
    provider.advance(len(tokens))
    provider.complete(tokens_digest(tokens), len(tokens), SAMPLE, blob)


def verify(record: LedgerRecord, **changes: Any) -> None:
    known: dict[str, Any] = {
        "share_id": SHARE_ID,
        "layout": LAYOUT,
        "semantics": SEMANTICS,
        "tokens": TOKENS,
        "sample_digest": SAMPLE,
    }
    record.verify(**(known | changes))


# -- bytes -----------------------------------------------------------------------------------


def test_the_table_of_the_documentation(ledger: Ledger, provider: Ledger) -> None:
    """Written here with offsets as numbers, as a provider in another language would."""
    header = bytearray(512)
    header[0:8] = b"KVSLEDG1"
    header[8:12] = (1).to_bytes(4, "little")
    header[12:16] = (512).to_bytes(4, "little")
    header[16:24] = SHARE_ID.to_bytes(8, "little")
    header[24:56] = bytes.fromhex(LAYOUT)
    header[56:88] = bytes.fromhex(SEMANTICS)
    with ledger.view() as view:
        assert view[:512] == header
        provider.begin()
        provider.advance(4)
        header[88:92] = (1).to_bytes(4, "little")
        header[96:104] = (4).to_bytes(8, "little")
        assert view[:512] == header
        provider.complete(tokens_digest(TOKENS), 4, SAMPLE, b"metadata")
        header[88:92] = (2).to_bytes(4, "little")
        header[104:112] = (4).to_bytes(8, "little")
        header[112:120] = SHARE_ID.to_bytes(8, "little")
        header[120:152] = hashlib.sha256(struct.pack("<4i", *TOKENS)).digest()
        header[152:184] = SAMPLE
        header[184:192] = (512).to_bytes(8, "little")
        header[192:200] = (8).to_bytes(8, "little")
        assert view[:520] == header + b"metadata"


def test_a_foreign_provider(ledger: Ledger) -> None:
    with ledger.view() as view:
        view[24:88] = bytes.fromhex(OTHER) * 2
        view[600:604] = b"blob"
        struct.pack_into("<QQQ", view, 96, 4, 4, SHARE_ID)
        view[120:152] = tokens_digest(TOKENS)
        view[152:184] = SAMPLE
        struct.pack_into("<QQ", view, 184, 600, 4)
        struct.pack_into("<I", view, 88, 2)
    record = ledger.snapshot()
    verify(record, layout=OTHER, semantics=OTHER)
    assert record.blob == b"blob"


def test_the_table_of_the_documentation_with_a_prefix() -> None:
    with Ledger.create(SHARE_ID, LAYOUT, SEMANTICS, capacity=4096, prefix=PREFIX) as ledger:
        fields = bytearray(56)
        fields[0:8] = (2).to_bytes(8, "little")
        fields[8:40] = hashlib.sha256(struct.pack("<2i", *TOKENS[:2])).digest()
        fields[40:48] = (512).to_bytes(8, "little")
        fields[48:56] = (13).to_bytes(8, "little")
        behind = fields + b"what is there" + bytes(3)
        with ledger.view() as view:
            assert view[12:16] == (528).to_bytes(4, "little")
            assert view[96:104] == (2).to_bytes(8, "little")
            assert view[456:528] == behind
            with Ledger.open(duplicate(ledger), ledger.size) as provider:
                fill(provider)
            assert view[456:536] == behind + b"metadata"
            assert view[184:200] == struct.pack("<QQ", 528, 8)
        verify(ledger.snapshot(), prefix=PREFIX)
        assert ledger.snapshot().blob == b"metadata"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vector_read(vector: dict[str, Any]) -> None:
    expected = vector["expected"]
    prefix = LedgerPrefix(expected["n_prefix"], bytes.fromhex(expected["prefix_sha256"]))
    assert make.read_ledger(bytes.fromhex(vector["bytes"]), prefix) == (vector["record"], vector["verdict"])


@pytest.mark.parametrize("name", ["issued", "issued, with a prefix"])
def test_vector_issue(name: str) -> None:
    """What is issued is all in `expected`."""
    (vector,) = [vector for vector in VECTORS if vector["name"] == name]
    expected = vector["expected"]
    prefix = LedgerPrefix(
        expected["n_prefix"],
        bytes.fromhex(expected["prefix_sha256"]),
        bytes.fromhex(expected["prefix_blob"]),
    )
    issued = bytes.fromhex(vector["bytes"])
    arguments = (expected["share_id"], expected["layout"], expected["semantics"])
    with Ledger.create(*arguments, prefix=prefix) as ledger, ledger.view() as view:
        assert view[: len(issued)] == issued


def test_vectors_are_what_is_written() -> None:
    assert json.loads(json.dumps(make.ledger_vectors())) == VECTORS


# -- filling ---------------------------------------------------------------------------------


def test_a_share_from_issue_to_complete(ledger: Ledger, provider: Ledger) -> None:
    assert ledger.snapshot().state is LedgerState.ISSUED
    provider.begin()
    for n in (0, 1, 1, 3, 4):
        provider.advance(n)
        assert (ledger.snapshot().state, ledger.snapshot().n_filled) == (LedgerState.FILLING, n)
    provider.complete(tokens_digest(TOKENS), 4, SAMPLE, memoryview(array("I", [1, 2])))
    record = ledger.snapshot()
    verify(record)
    assert record.blob == struct.pack("=2I", 1, 2)


def test_order_of_states(ledger: Ledger, provider: Ledger) -> None:
    def complete() -> None:
        provider.complete(tokens_digest(TOKENS), 0, SAMPLE)

    too_early: list[Callable[[], None]] = [lambda: provider.advance(1), complete]
    for early in too_early:
        with pytest.raises(errors.LocalProtocolError, match="state differs: expected filling, found 0"):
            early()
    provider.begin()
    with pytest.raises(errors.LocalProtocolError, match="expected issued, found 1"):
        provider.begin()
    provider.advance(4)
    with pytest.raises(errors.LocalProtocolError, match="from 4 to 3"):
        provider.advance(3)
    with pytest.raises(errors.LocalProtocolError, match="4 tokens are filled, cannot vouch for 0"):
        complete()
    with pytest.raises(errors.LocalProtocolError, match="tokens_sha256 has 31 bytes"):
        provider.complete(bytes(31), 4, SAMPLE)
    with pytest.raises(errors.LocalProtocolError, match="sample_digest has 0 bytes"):
        provider.complete(tokens_digest(TOKENS), 4, b"")
    assert ledger.snapshot().state is LedgerState.FILLING
    provider.complete(tokens_digest(TOKENS), 4, SAMPLE)
    too_late: list[Callable[[], None]] = [
        provider.begin,
        lambda: provider.advance(4),
        complete,
        lambda: provider.fail("x"),
    ]
    for late in too_late:
        with pytest.raises(errors.LocalProtocolError, match="found 2"):
            late()


def test_blob_and_capacity(ledger: Ledger, provider: Ledger) -> None:
    assert ledger.capacity == 2 * 4096 - HEADER_NBYTES  # rounded up to whole pages
    provider.begin()
    provider.advance(4)
    with pytest.raises(
        errors.LedgerError, match="7681 bytes exceeds the ledger's capacity of 7680"
    ) as caught:
        provider.complete(tokens_digest(TOKENS), 4, SAMPLE, bytes(7681))
    assert caught.value.hint is not None
    assert ledger.snapshot().state is LedgerState.FILLING
    provider.complete(tokens_digest(TOKENS), 4, SAMPLE, b"x" * 7680)
    assert ledger.snapshot().blob == b"x" * 7680


def test_failure_is_told(ledger: Ledger, provider: Ledger) -> None:
    provider.begin()
    provider.fail("no \x1b[31mroom")
    with pytest.raises(errors.LedgerIncompleteError, match=r"the provider failed: 'no \\x1b\[31mroom'"):
        verify(ledger.snapshot())


@pytest.mark.parametrize(
    ("message", "kept"),
    [("", ""), ("x" * 300, "x" * 256), ("x" + "€" * 100, "x" + "€" * 85), ("\ud800", "?")],
)
def test_failure_is_cut_between_characters(ledger: Ledger, message: str, kept: str) -> None:
    ledger.fail(message)
    assert ledger.snapshot().error == kept


def test_a_provider_states_its_own_digests(ledger: Ledger, provider: Ledger) -> None:
    with pytest.raises(errors.LocalProtocolError, match="layout has 1 bytes"):
        provider.begin(layout="00")
    provider.begin(layout=LAYOUT, semantics=OTHER)
    provider.advance(4)
    provider.complete(tokens_digest(TOKENS), 4, SAMPLE)
    with pytest.raises(errors.LedgerDigestError, match="semantics"):
        verify(ledger.snapshot())
    verify(ledger.snapshot(), semantics=None)


# -- believing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"share_id": 5}, errors.ReplayError, f"share_id differs: expected 5, found {SHARE_ID}"),
        ({"layout": OTHER}, errors.LedgerDigestError, f"layout differs: expected {OTHER}, found {LAYOUT}"),
        ({"semantics": OTHER}, errors.LedgerDigestError, "semantics differs"),
        ({"tokens": TOKENS[:3]}, errors.LedgerIncompleteError, "n_tokens differs: expected 3, found 4"),
        ({"tokens": [*TOKENS, 1]}, errors.LedgerIncompleteError, "n_tokens differs: expected 5, found 4"),
        ({"tokens": [1, 22, 333, 0]}, errors.LedgerDigestError, "tokens_sha256 differs"),
        ({"sample_digest": bytes(32)}, errors.LedgerDigestError, "sample_digest differs"),
    ],
)
def test_what_differs_is_named(
    ledger: Ledger, provider: Ledger, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    fill(provider)
    verify(ledger.snapshot())
    verify(ledger.snapshot(), sample_digest=None)
    with pytest.raises(error, match=says):
        verify(ledger.snapshot(), **changes)


def test_half_filled_is_not_complete(ledger: Ledger, provider: Ledger) -> None:
    with pytest.raises(errors.LedgerIncompleteError, match="expected complete, found issued at 0 tokens"):
        verify(ledger.snapshot())
    provider.begin()
    provider.advance(2)
    with pytest.raises(errors.LedgerIncompleteError, match="expected complete, found filling at 2 tokens"):
        verify(ledger.snapshot())
    with ledger.view() as view:  # a liar
        view[88:92] = (2).to_bytes(4, "little")
        view[104:120] = struct.pack("<QQ", 4, SHARE_ID)
    with pytest.raises(errors.LedgerIncompleteError, match="n_filled differs: expected 4, found 2"):
        verify(ledger.snapshot())


def test_a_snapshot_does_not_change(ledger: Ledger, provider: Ledger) -> None:
    fill(provider)
    record = ledger.snapshot()
    with ledger.view() as view:
        view[:] = bytes(len(view))
    verify(record)
    assert record.blob == b"metadata"


# -- a prefix --------------------------------------------------------------------------------


@pytest.fixture
def continued() -> Iterator[Ledger]:
    """A ledger of a sequence that holds something."""
    with Ledger.create(SHARE_ID, LAYOUT, SEMANTICS, capacity=4096, prefix=PREFIX) as made:
        yield made


def test_a_provider_reads_the_prefix(ledger: Ledger, continued: Ledger) -> None:
    with Ledger.open(duplicate(continued), continued.size) as opened:
        assert (opened.prefix, opened.n_prefix) == (PREFIX, 2)
        assert opened.capacity == continued.capacity == opened.size - 528
    with Ledger.open(duplicate(ledger), ledger.size) as opened:
        assert (opened.prefix, opened.n_prefix) == (LedgerPrefix(), 0)
    assert LedgerPrefix.of([]) == LedgerPrefix()


def test_a_prefix_without_metadata() -> None:
    """As a decoder has it whose provider needs none."""
    prefix = LedgerPrefix.of(TOKENS[:2])
    with Ledger.create(SHARE_ID, LAYOUT, SEMANTICS, prefix=prefix) as ledger:
        assert ledger.prefix == prefix
        with ledger.view() as view:
            assert view[496:512] == bytes(16)
            assert view[12:16] == (512).to_bytes(4, "little")
        fill(ledger)
        verify(ledger.snapshot(), prefix=prefix)


def test_the_watermark_begins_behind_the_prefix(continued: Ledger) -> None:
    assert continued.snapshot().n_filled == 2
    continued.begin()
    with pytest.raises(errors.LocalProtocolError, match="from 2 to 1"):
        continued.advance(1)
    continued.advance(2)
    continued.advance(4)


def test_a_blob_never_reaches_the_prefix(continued: Ledger) -> None:
    continued.begin()
    continued.advance(4)
    with pytest.raises(errors.LedgerError, match="exceeds the ledger's capacity of 7664"):
        continued.complete(tokens_digest(TOKENS), 4, SAMPLE, bytes(7665))
    continued.complete(tokens_digest(TOKENS), 4, SAMPLE, b"x" * 7664)
    assert continued.prefix == PREFIX
    with continued.view() as view:
        view[184:192] = (520).to_bytes(8, "little")
    with pytest.raises(errors.LedgerError, match="7664 bytes of blob at 520"):
        continued.snapshot()


@pytest.mark.parametrize(
    ("prefix", "says"),
    [
        (None, "n_prefix differs: expected 0, found 2"),
        (LedgerPrefix.of(TOKENS[:3]), "n_prefix differs: expected 3, found 2"),
        (LedgerPrefix.of([1, 23]), "prefix_sha256 differs"),
    ],
)
def test_another_prefix_is_refused(continued: Ledger, prefix: LedgerPrefix | None, says: str) -> None:
    fill(continued)
    verify(continued.snapshot(), prefix=PREFIX)
    verify(continued.snapshot(), prefix=LedgerPrefix.of(TOKENS[:2]))
    with pytest.raises(errors.LedgerDigestError, match=says):
        verify(continued.snapshot(), prefix=prefix)


def test_tokens_that_begin_otherwise_are_refused(continued: Ledger) -> None:
    """By the digest of the prefix, also if the provider had vouched for them."""
    other = [9, *TOKENS[1:]]
    fill(continued, other)
    with pytest.raises(errors.LedgerDigestError, match="prefix_sha256 differs"):
        verify(continued.snapshot(), tokens=other, prefix=PREFIX)


def test_a_provider_says_what_it_continued_from(continued: Ledger) -> None:
    with pytest.raises(errors.LocalProtocolError, match="prefix_sha256 has 1 bytes"):
        continued.begin(prefix_sha256=b"x")
    continued.begin(prefix_sha256=tokens_digest([9, 9]))
    continued.advance(4)
    continued.complete(tokens_digest(TOKENS), 4, SAMPLE)
    with pytest.raises(errors.LedgerDigestError, match="prefix_sha256 differs"):
        verify(continued.snapshot(), prefix=PREFIX)


def test_a_prompt_that_does_not_begin_with_the_prefix() -> None:
    PREFIX.require_start_of(TOKENS)
    LedgerPrefix().require_start_of([1])
    with pytest.raises(errors.LocalProtocolError, match="the first 2 tokens are not") as caught:
        PREFIX.require_start_of([1, 23, 333])
    for digest in (PREFIX.sha256, tokens_digest([1, 23])):
        assert digest.hex() in str(caught.value)
    for prefix, tokens in ((PREFIX, TOKENS[:2]), (PREFIX, []), (LedgerPrefix(), [])):
        with pytest.raises(errors.LocalProtocolError, match="no more than"):
            prefix.require_start_of(tokens)


@pytest.mark.parametrize(
    ("offset", "data", "says"),
    [
        (496, struct.pack("<QQ", 511, 1), "1 bytes of prefix at 511"),
        (496, struct.pack("<QQ", 512, 17), r"17 bytes of prefix at 512 are outside of \[512, 528\)"),
        (496, struct.pack("<QQ", 2**64 - 1, 2**64 - 1), "outside"),
        (12, struct.pack("<I", 512), r"13 bytes of prefix at 512 are outside of \[512, 512\)"),
    ],
)
def test_a_prefix_that_lies_elsewhere(continued: Ledger, offset: int, data: bytes, says: str) -> None:
    with continued.view() as view:
        view[offset : offset + len(data)] = data
    with pytest.raises(errors.LedgerError, match=says):
        Ledger.open(duplicate(continued), continued.size)
    with pytest.raises(errors.LedgerError, match=says):
        _ = continued.prefix


def test_a_prefix_that_no_memory_holds(ledger: Ledger) -> None:
    """Holes cost a decoder nothing, and are not copied."""
    size = MAX_PREFIX_NBYTES + 1
    with pytest.raises(errors.LedgerError, match="exceeds the limit"):
        Ledger.create(1, LAYOUT, SEMANTICS, prefix=LedgerPrefix(1, SAMPLE, bytes(size)))
    with fds.memfd_create("large", 1 << 32) as fd, ledger.view() as view:
        os.pwrite(fd.fileno(), view[:512], 0)
        os.pwrite(fd.fileno(), struct.pack("<I", (1 << 32) - 8), 12)
        os.pwrite(fd.fileno(), struct.pack("<QQ", 512, size), 496)
        with pytest.raises(errors.LedgerError, match=f"{size} bytes of prefix exceed the limit"):
            Ledger.open(fds.OwnedFd(os.dup(fd.fileno())), 1 << 32)


def test_a_prefix_that_changes_under_a_provider(continued: Ledger) -> None:
    with Ledger.open(duplicate(continued), continued.size) as opened:
        with continued.view() as view:
            view[456] = 3
        with pytest.raises(errors.LedgerError, match="n_prefix differs: expected 2, found 3"):
            _ = opened.prefix
        continued.reissue(99, LAYOUT, SEMANTICS, prefix=PREFIX)
        with pytest.raises(errors.ReplayError):
            _ = opened.prefix
    assert continued.prefix == PREFIX


def test_reissue_with_another_prefix(ledger: Ledger, continued: Ledger) -> None:
    continued.reissue(99, LAYOUT, SEMANTICS)
    assert (continued.prefix, continued.n_prefix) == (LedgerPrefix(), 0)
    assert continued.capacity == continued.size - 512
    fill(continued)
    verify(continued.snapshot(), share_id=99)
    ledger.reissue(99, LAYOUT, SEMANTICS, prefix=PREFIX)
    assert ledger.prefix == PREFIX
    with pytest.raises(errors.LedgerError, match="no room for a prefix"):
        ledger.reissue(99, LAYOUT, SEMANTICS, prefix=LedgerPrefix.of(TOKENS, bytes(8192)))
    with pytest.raises(errors.LocalProtocolError, match="-1 tokens"):
        ledger.reissue(99, LAYOUT, SEMANTICS, prefix=LedgerPrefix(-1))


# -- again -----------------------------------------------------------------------------------


def test_reissue(ledger: Ledger, provider: Ledger) -> None:
    fill(provider)
    ledger.reissue(99, OTHER, LAYOUT)
    record = ledger.snapshot()
    assert (record.share_id, record.layout, record.semantics) == (99, OTHER, LAYOUT)
    assert (record.state, record.n_filled, record.n_tokens) == (LedgerState.ISSUED, 0, 0)
    assert (record.blob, record.tokens_sha256, record.vouched_share_id) == (b"", bytes(32), 0)
    with Ledger.open(duplicate(ledger), ledger.size) as again:
        fill(again)
    verify(ledger.snapshot(), share_id=99, layout=OTHER, semantics=LAYOUT)


def test_a_late_provider_notices(ledger: Ledger, provider: Ledger) -> None:
    provider.begin()
    ledger.reissue(99, LAYOUT, SEMANTICS)
    calls: list[Callable[[], None]] = [
        provider.begin,
        lambda: provider.advance(1),
        lambda: provider.complete(tokens_digest([]), 0, SAMPLE),
        lambda: provider.fail("late"),
    ]
    for call in calls:
        with pytest.raises(errors.ReplayError, match=f"share_id differs: expected {SHARE_ID}, found 99"):
            call()
    assert ledger.snapshot().state is LedgerState.ISSUED


def test_a_late_provider_that_does_not_look_is_not_believed(ledger: Ledger, provider: Ledger) -> None:
    """The same tokens once more: only the nonce tells the late write from the new provider's."""
    fill(provider)
    with ledger.view() as view:
        late = bytes(view[88:512])
        ledger.reissue(99, LAYOUT, SEMANTICS)
        view[88:512] = late
    with pytest.raises(errors.ReplayError, match=f"vouched_share_id differs: expected 99, found {SHARE_ID}"):
        verify(ledger.snapshot(), share_id=99)


# -- hostile and broken ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "data", "says"),
    [
        (0, b"KVSLEDG2", "not a ledger: magic"),
        (8, struct.pack("<I", 2), "version differs: expected 1, found 2"),
        (12, struct.pack("<I", 511), "header_size 511"),
        (12, struct.pack("<I", 8193), "header_size 8193"),
        (88, struct.pack("<I", 4), "state 4"),
        (184, struct.pack("<QQ", 511, 1), "1 bytes of blob at 511"),
        (184, struct.pack("<QQ", 8192, 1), "1 bytes of blob at 8192"),
        (184, struct.pack("<QQ", 512, 8192), "8192 bytes of blob at 512"),
        (184, struct.pack("<QQ", 2**64 - 1, 2**64 - 1), "outside"),
        (12, struct.pack("<I", 1024), "8 bytes of blob at 512"),
    ],
)
def test_malformed(ledger: Ledger, provider: Ledger, offset: int, data: bytes, says: str) -> None:
    fill(provider)
    with ledger.view() as view:
        view[offset : offset + len(data)] = data
    with pytest.raises(errors.LedgerError, match=says):
        ledger.snapshot()
    with pytest.raises(errors.LedgerError, match=says):
        Ledger.open(duplicate(ledger), ledger.size)


def test_open_checks_the_memfd(ledger: Ledger) -> None:
    with pytest.raises(errors.DescriptorError, match="8192 bytes, its header says 8193"):
        Ledger.open(duplicate(ledger), 8193)
    for size in (-1, 0, 511):
        with pytest.raises(errors.LedgerError, match="no room"):
            Ledger.open(duplicate(ledger), size)
    with pytest.raises(errors.DescriptorError, match="F_SEAL_SHRINK"):
        Ledger.open(fds.memfd_create("unsealed", 4096, seal=False), 4096)
    with pytest.raises(errors.DescriptorError, match="memfd"):
        Ledger.open(fds.OwnedFd(os.open("/dev/null", os.O_RDWR)), 4096)


def test_the_ledger_cannot_be_truncated(ledger: Ledger) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(ledger.fileno(), 0)


@pytest.mark.parametrize(
    "arguments",
    [
        (0, LAYOUT, SEMANTICS),
        (2**64, LAYOUT, SEMANTICS),
        (1, "x" * 64, SEMANTICS),
        (1, LAYOUT, SEMANTICS[2:]),
    ],
)
def test_create_checks_its_arguments(ledger: Ledger, arguments: tuple[int, str, str]) -> None:
    with pytest.raises(errors.LocalProtocolError):
        Ledger.create(*arguments)
    with pytest.raises(errors.LocalProtocolError):
        ledger.reissue(*arguments)
    with pytest.raises(errors.LocalProtocolError, match="-1 bytes"):
        Ledger.create(1, LAYOUT, SEMANTICS, capacity=-1)


# -- closing ---------------------------------------------------------------------------------


def test_close_is_idempotent_and_final() -> None:
    ledger = Ledger.create(1, LAYOUT, SEMANTICS)
    assert ledger.share_id == 1
    ledger.close()
    ledger.close()
    calls: list[Callable[[], object]] = [
        ledger.snapshot,
        ledger.view,
        ledger.begin,
        ledger.fileno,
        lambda: ledger.size,
        lambda: ledger.reissue(1, LAYOUT, SEMANTICS),
    ]
    for call in calls:
        with pytest.raises(errors.LocalProtocolError, match="closed"):
            call()


def test_a_view_keeps_the_ledger_open() -> None:
    with Ledger.create(1, LAYOUT, SEMANTICS) as ledger:
        view = ledger.view()
        with pytest.raises(errors.LocalProtocolError, match="still in use"):
            ledger.close()
        assert ledger.snapshot().share_id == 1
        assert bytes(view[:8]) == b"KVSLEDG1"
        view.release()


def test_a_forgotten_ledger_warns() -> None:
    holder = [Ledger.create(1, LAYOUT, SEMANTICS)]
    with pytest.warns(ResourceWarning, match="unclosed"):
        holder.clear()
    gc.collect()


# -- tokens ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[], [0], [1, 2, 3], [-1, 2**31 - 1, -(2**31)], list(range(5000))])
def test_tokens_digest_is_of_little_endian_int32(tokens: list[int]) -> None:
    expected = hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens)).digest()
    assert tokens_digest(tokens) == expected
    assert tokens_digest(tuple(tokens)) == expected
    assert tokens_digest(array("i", tokens)) == expected
    for dtype in ("i4", "i8", ">i4"):
        assert tokens_digest(np.array(tokens, dtype=dtype)) == expected  # type: ignore[arg-type]
    assert tokens_digest(np.repeat(np.array(tokens, dtype="i4"), 2)[::2]) == expected  # type: ignore[arg-type]


def test_bytes_are_a_sequence_of_small_integers() -> None:
    assert tokens_digest(b"\x01\x02") == tokens_digest([1, 2])


@pytest.mark.parametrize("tokens", [[2**31], [-(2**31) - 1], [1.0], ["1"], [None]])
def test_what_is_no_token(tokens: list[Any]) -> None:
    with pytest.raises(errors.LocalProtocolError, match="not int32"):
        tokens_digest(tokens)
