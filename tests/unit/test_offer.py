"""What arrives at a provider: broken messages, wrong descriptors, damaged ledgers. Nothing is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare import fds, wire
from kvshare.errors import (
    DescriptorError,
    KvshareError,
    LedgerDigestError,
    LedgerError,
    LedgerIncompleteError,
    LocalProtocolError,
    NotShareableError,
    PeerClosedError,
    ProtocolError,
    RemoteProtocolError,
    ReplayError,
)
from kvshare.ledger import HEADER_NBYTES, LedgerPrefix, LedgerState, tokens_digest
from kvshare.provider import Offer
from kvshare.testing import FakeDecoder, FakeProvider
from kvshare.testing.fakes import FakeShare
from kvshare.testing.faults import (
    LEDGER_FIELDS,
    corrupt_ledger,
    cut_messages,
    half_written_ledger,
    send_framed,
    shorter_memfd,
    unsealed_memfd,
)

TOKENS = list(range(20))


@pytest.fixture
def decoder() -> Iterator[FakeDecoder]:
    with FakeDecoder() as made:
        yield made


@pytest.fixture
def share(decoder: FakeDecoder) -> Iterator[FakeShare]:
    with decoder.share(n_tokens=len(TOKENS)) as made:
        yield made


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        yield near, far


def descriptors(decoder: FakeDecoder, share: FakeShare) -> list[int]:
    return [decoder._region.fileno(), share.ledger.fileno()]


def soon() -> float:
    return time.monotonic() + 5


Link = tuple[socket.socket, socket.socket]


def test_a_whole_message(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    send_framed(link[0], wire.encode(share.header), descriptors(decoder, share))
    with Offer.receive(link[1]) as offer:
        FakeProvider(offer).serve(TOKENS)
    assert decoder.adopt(share, TOKENS).n_adopted == len(TOKENS)


def test_a_message_that_ends_early(decoder: FakeDecoder, share: FakeShare) -> None:
    """At any byte; the descriptors, which came with the first one, are closed."""
    n_before = len(os.listdir("/proc/self/fd"))
    for start in cut_messages(wire.encode(share.header)):
        near, far = socket.socketpair(socket.AF_UNIX)
        with far:
            with near:
                if start:
                    socket.send_fds(near, [start], descriptors(decoder, share))
            with pytest.raises(PeerClosedError):
                Offer.receive(far, deadline=soon())
        assert len(os.listdir("/proc/self/fd")) == n_before


@pytest.mark.parametrize("n", [0, 1, 3])
def test_another_number_of_descriptors(decoder: FakeDecoder, share: FakeShare, link: Link, n: int) -> None:
    sent = (descriptors(decoder, share) * 2)[:n]
    send_framed(link[0], wire.encode(share.header), sent)
    with pytest.raises(DescriptorError, match="descriptors"):
        Offer.receive(link[1], deadline=soon())


def test_a_region_that_is_shorter_than_it_says(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    with shorter_memfd(decoder._region.fileno(), 4096) as shorter:
        send_framed(link[0], wire.encode(share.header), [shorter.fileno(), share.ledger.fileno()])
    with pytest.raises(KvshareError, match="exceeds its descriptor"):
        Offer.receive(link[1], deadline=soon())


@pytest.mark.parametrize("missing", ["F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SHRINK, F_SEAL_GROW"])
@pytest.mark.parametrize("which", ["region", "ledger"])
def test_memory_that_can_shrink_or_grow(
    decoder: FakeDecoder, share: FakeShare, link: Link, which: str, missing: str
) -> None:
    """A SIGBUS in waiting."""
    sent = descriptors(decoder, share)
    at = ["region", "ledger"].index(which)
    seals = fds.SIZE_SEALS & ~sum(getattr(fds, name) for name in missing.split(", "))
    with unsealed_memfd(sent[at]) as unsealed:
        fcntl.fcntl(unsealed.fileno(), fcntl.F_ADD_SEALS, seals)
        sent[at] = unsealed.fileno()
        send_framed(link[0], wire.encode(share.header), sent)
    with pytest.raises(DescriptorError, match=f"{missing}$"):
        Offer.receive(link[1], deadline=soon())


def test_memory_that_may_be_sealed_further(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    """It has the seals that are required, and that is enough."""
    sent = descriptors(decoder, share)
    with unsealed_memfd(sent[0]) as region:
        fcntl.fcntl(region.fileno(), fcntl.F_ADD_SEALS, fds.SIZE_SEALS)
        send_framed(link[0], wire.encode(share.header), [region.fileno(), sent[1]])
    with Offer.receive(link[1], deadline=soon()) as offer:
        offer.views()[0].k[0] = 1


@pytest.mark.parametrize(
    ("size", "said", "error"),
    [
        (4096, 4097, "has 4096 bytes, its header says 4097"),
        (4096, (1 << 63) - 1, "has 4096 bytes"),
        (100, 100, "no room for its header"),
        (1 << 62, 1 << 62, "cannot be mapped: Cannot allocate memory"),  # sparse, it costs its maker nothing
    ],
)
def test_a_ledger_of_another_size(
    decoder: FakeDecoder, share: FakeShare, link: Link, size: int, said: int, error: str
) -> None:
    header = dataclasses.replace(share.header, ledger=wire.LedgerEntry(fd=1, size=said))
    with fds.memfd_create("kvshare-fault", size) as made:
        send_framed(link[0], wire.encode(header), [decoder._region.fileno(), made.fileno()])
    with pytest.raises(KvshareError, match=error):
        Offer.receive(link[1], deadline=soon())


def test_a_ledger_with_a_blob_that_no_memory_holds(
    decoder: FakeDecoder, share: FakeShare, link: Link
) -> None:
    """It is sparse at its maker, and is not copied here."""
    size = 1 << 42
    header = dataclasses.replace(share.header, ledger=wire.LedgerEntry(fd=1, size=size))
    with fds.memfd_create("kvshare-fault", size) as made:
        os.pwrite(made.fileno(), os.pread(share.ledger.fileno(), HEADER_NBYTES, 0), 0)
        for field, value in (
            ("state", 2),
            ("blob_offset", HEADER_NBYTES),
            ("blob_size", size - HEADER_NBYTES),
        ):
            offset, n = LEDGER_FIELDS[field]
            os.pwrite(made.fileno(), value.to_bytes(n, "little"), offset)
        send_framed(link[0], wire.encode(header), [decoder._region.fileno(), made.fileno()])
    with Offer.receive(link[1], deadline=soon()) as offer, pytest.raises(LocalProtocolError):
        offer.ledger.begin()


@pytest.mark.parametrize("kind", ["a file", "a folder", "a pipe", "a device", "a path"])
def test_other_things_in_place_of_memory(
    decoder: FakeDecoder, share: FakeShare, link: Link, kind: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        if kind == "a pipe":
            made = [fds.OwnedFd(end) for end in os.pipe()]
        else:
            (tmp_path / "file").write_bytes(bytes(1 << 20))
            name = {"a folder": tmp_path, "a device": Path("/dev/zero")}.get(kind, tmp_path / "file")
            made = [fds.OwnedFd(os.open(name, os.O_PATH if kind == "a path" else os.O_RDONLY))]
        for each in made:
            stack.enter_context(each)
        for sent in (
            [made[0].fileno(), share.ledger.fileno()],
            [decoder._region.fileno(), made[0].fileno()],
        ):
            send_framed(link[0], wire.encode(share.header), sent)
            with pytest.raises(DescriptorError):
                Offer.receive(link[1], deadline=soon())


def test_memory_that_cannot_be_written_to(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    with fds.OwnedFd(os.open(f"/proc/self/fd/{decoder._region.fileno()}", os.O_RDONLY)) as region:
        send_framed(link[0], wire.encode(share.header), [region.fileno(), share.ledger.fileno()])
        with Offer.receive(link[1], deadline=soon()) as offer, pytest.raises(DescriptorError, match="mapped"):
            offer.views()


@pytest.mark.parametrize("seq_id", [-1, 1 << 31, 1 << 62, 0.0, 1e300, "0", None])
def test_a_sequence_that_is_none(
    decoder: FakeDecoder, share: FakeShare, link: Link, seq_id: wire.Scalar
) -> None:
    header = dataclasses.replace(share.header, params={**share.header.params, "seq_id": seq_id})
    send_framed(link[0], wire.encode(header), descriptors(decoder, share))
    with pytest.raises(RemoteProtocolError, match=r"params\.seq_id"):
        Offer.receive(link[1], deadline=soon())


def test_the_descriptors_in_the_other_order(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    send_framed(link[0], wire.encode(share.header), descriptors(decoder, share)[::-1])
    with pytest.raises(KvshareError):
        Offer.receive(link[1], deadline=soon())


def test_one_memory_twice(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    """By two descriptors, which the header alone cannot tell."""
    region, ledger = share.header.regions[0], share.header.ledger
    twice = dataclasses.replace(
        share.header, regions=(region, dataclasses.replace(region, fd=2)), ledger=ledger
    )
    send_framed(link[0], wire.encode(twice), [*descriptors(decoder, share), decoder._region.fileno()])
    with pytest.raises(RemoteProtocolError, match="overlap"):
        Offer.receive(link[1], deadline=soon())
    own = dataclasses.replace(share.header, ledger=dataclasses.replace(ledger, size=4096))
    send_framed(link[0], wire.encode(own), [decoder._region.fileno(), decoder._region.fileno()])
    with pytest.raises(RemoteProtocolError, match="the ledger lies"):
        Offer.receive(link[1], deadline=soon())


def test_a_socket_in_place_of_memory(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    send_framed(link[0], wire.encode(share.header), [link[0].fileno(), share.ledger.fileno()])
    with pytest.raises(DescriptorError):
        Offer.receive(link[1], deadline=soon())


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [("dma-buf", NotShareableError, "dma-buf"), ("cuda-vmm", RemoteProtocolError, "not an object")],
)
def test_a_region_of_another_kind_than_it_has(
    decoder: FakeDecoder, share: FakeShare, link: Link, kind: str, error: type[KvshareError], said: str
) -> None:
    """A dma-buf is for other drivers; a memfd says nothing of a GPU."""
    region = dataclasses.replace(share.header.regions[0], kind=kind)
    header = dataclasses.replace(share.header, regions=(region,))
    send_framed(link[0], wire.encode(header), descriptors(decoder, share))
    with pytest.raises(error, match=said):
        Offer.receive(link[1], deadline=soon())


@pytest.mark.parametrize("n_fds", [0, 2])
@pytest.mark.parametrize(
    "message",
    [
        wire.JobHeader(share_id=1, tokens=(1,)),
        wire.Progress(share_id=1, n_filled=1, n_tokens=2),
        wire.Outcome(share_id=1, ok=True),
    ],
    ids=lambda message: type(message).__name__,
)
def test_another_message(
    decoder: FakeDecoder, share: FakeShare, link: Link, message: wire.Message, n_fds: int
) -> None:
    """Alone, or with descriptors that would fit a share."""
    send_framed(link[0], wire.encode(message), descriptors(decoder, share)[:n_fds])
    with pytest.raises(RemoteProtocolError, match=type(message).__name__):
        Offer.receive(link[1], deadline=soon())


@pytest.mark.parametrize(
    "change",
    [
        lambda h: dataclasses.replace(h, layout="0" * 64),
        lambda h: dataclasses.replace(h, params={**h.params, "abi": 2}),
        lambda h: dataclasses.replace(h, params={**h.params, "abi": "1"}),
        lambda h: dataclasses.replace(h, params={**h.params, "caches": "[" * 100_000}),
        lambda h: dataclasses.replace(h, params={**h.params, "caches": "9" * 10_000}),
        lambda h: dataclasses.replace(h, params={**h.params, "caches": "[1]"}),
        lambda h: dataclasses.replace(h, params={}),
        lambda h: dataclasses.replace(
            h, regions=(dataclasses.replace(h.regions[0], layout={"tensors": None}),)
        ),
        lambda h: dataclasses.replace(h, regions=(dataclasses.replace(h.regions[0], layout=[[]]),)),
    ],
    ids=range(9),
)
def test_a_header_that_contradicts_itself(
    decoder: FakeDecoder,
    share: FakeShare,
    link: Link,
    change: Callable[[wire.ShareHeader], wire.ShareHeader],
) -> None:
    send_framed(link[0], wire.encode(change(share.header)), descriptors(decoder, share))
    with pytest.raises(ProtocolError):
        Offer.receive(link[1], deadline=soon())


def test_a_ledger_that_is_none(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    half_written_ledger(share.ledger, 0)
    send_framed(link[0], wire.encode(share.header), descriptors(decoder, share))
    with pytest.raises(LedgerError, match="not a ledger"):
        Offer.receive(link[1], deadline=soon())
    decoder._shares.clear()  # the decoder's own look at this ledger fails as well
    share.ledger.close()
    share._state = wire.ShareState.FAILED


EXPECTED: dict[str, type[KvshareError]] = {
    "magic": LedgerError,
    "version": LedgerError,
    "header_size": LedgerError,
    "share_id": ReplayError,
    "layout": LedgerDigestError,
    "semantics": LedgerDigestError,
    "state": LedgerIncompleteError,
    "n_filled": LedgerIncompleteError,
    "n_tokens": LedgerIncompleteError,
    "vouched_share_id": ReplayError,
    "tokens_sha256": LedgerDigestError,
    "sample_digest": LedgerDigestError,
    "blob_size": LedgerError,
    "n_prefix": LedgerDigestError,
    "prefix_sha256": LedgerDigestError,
}


@pytest.mark.parametrize("field", EXPECTED)
def test_a_corrupt_ledger_is_refused(decoder: FakeDecoder, share: FakeShare, link: Link, field: str) -> None:
    """One field at a time; then a fresh share works."""
    values: dict[str, Any] = {"header_size": 1, "state": 1, "blob_size": 1 << 40}
    share.send(link[0])
    with Offer.receive(link[1]) as offer:
        FakeProvider(offer).serve(TOKENS)
        corrupt_ledger(offer.ledger, field, value=values.get(field))
        with pytest.raises(EXPECTED[field]) as error:
            decoder.adopt(share, TOKENS)
        assert str(error.value)
        offer.close()
    assert decoder.n_past() == 0
    share.release()
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, decoder.share(n_tokens=len(TOKENS)) as following:
        following.send(near)
        with Offer.receive(far) as offer:
            FakeProvider(offer).serve(TOKENS)
        assert decoder.adopt(following, TOKENS).n_adopted == len(TOKENS)


def test_every_field_that_matters_is_tried() -> None:
    assert set(LEDGER_FIELDS) - set(EXPECTED) == {"blob_offset"}  # means nothing without a blob


def test_close_while_a_view_is_used(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    send_framed(link[0], wire.encode(share.header), descriptors(decoder, share))
    offer = Offer.receive(link[1])
    views = offer.views()
    with pytest.raises(LocalProtocolError, match="still in use"):
        offer.close()
    offer.close(leave_views=True)
    views[0].k[0] = 1  # the mapping goes with the last view
    del views
    offer.close()


# -- a sequence that holds something already -------------------------------------------------------


@pytest.fixture
def continued(decoder: FakeDecoder) -> Iterator[FakeShare]:
    """A share of a sequence that holds the first half of the tokens."""
    decoder.prefill(TOKENS[:10])
    with decoder.share(prefix=TOKENS[:10], n_tokens=len(TOKENS)) as made:
        yield made


def test_an_offer_says_what_is_there(decoder: FakeDecoder, continued: FakeShare, link: Link) -> None:
    continued.send(link[0])
    with Offer.receive(link[1]) as offer:
        assert (offer.n_prefix, offer.ledger.prefix) == (10, LedgerPrefix.of(TOKENS[:10]))
        assert offer.first_cell == 10
        provider = FakeProvider(offer)
        provider.serve(TOKENS)
        assert provider.n_prefilled == 10
    assert decoder.adopt(continued, TOKENS).n_adopted == len(TOKENS)
    with FakeDecoder() as local:
        local.prefill(TOKENS)
        assert decoder.logits() == local.logits()


def test_a_foreign_provider_goes_on_behind_the_prefix(
    decoder: FakeDecoder, continued: FakeShare, link: Link
) -> None:
    """As the README has it: rows from `first_cell` on, then `complete` with the whole prompt."""
    other = [9, *TOKENS[1:]]
    continued.send(link[0])
    with Offer.receive(link[1]) as offer:
        offer.ledger.begin()
        for wrong in (other, TOKENS[:10], TOKENS[:9]):
            with pytest.raises(LocalProtocolError):
                offer.complete(wrong)
        assert offer.ledger.snapshot().state is LedgerState.FILLING
        with FakeDecoder() as local:
            local.prefill(TOKENS)
            for mine, theirs in zip(offer.views(), local._views(), strict=True):
                for view, rows in ((mine.k, theirs.k), (mine.v, theirs.v)):
                    assert view is not None
                    assert rows is not None
                    view[offer.first_cell : offer.first_cell + 10] = rows[10:20]
            expected = local.logits()
            del mine, theirs, view, rows
        offer.complete(TOKENS)
        record = offer.ledger.snapshot()
        assert (record.n_filled, record.n_tokens) == (20, 20)
        assert record.tokens_sha256 == tokens_digest(TOKENS)
    decoder.adopt(continued, TOKENS)
    assert decoder.logits() == expected


@pytest.mark.parametrize(("offset", "size"), [(511, 1), (512, 8), (1 << 62, 1 << 62)])
def test_a_prefix_that_lies_outside_of_its_ledger(
    decoder: FakeDecoder, continued: FakeShare, link: Link, offset: int, size: int
) -> None:
    with continued.ledger.view() as view:
        view[496:504], view[504:512] = (n.to_bytes(8, "little") for n in (offset, size))
    continued.send(link[0])
    with pytest.raises(LedgerError, match="of prefix at"):
        Offer.receive(link[1], deadline=soon())


@pytest.mark.parametrize(("at", "error"), [(456, "n_prefix"), (464, "prefix_sha256")])
def test_a_provider_that_continued_from_elsewhere(
    decoder: FakeDecoder, continued: FakeShare, link: Link, at: int, error: str
) -> None:
    before = decoder.logits()
    continued.send(link[0])
    with Offer.receive(link[1]) as offer:
        FakeProvider(offer).serve(TOKENS)
        with offer.ledger.view() as view:
            view[at] ^= 1
        with pytest.raises(LedgerDigestError, match=error):
            decoder.adopt(continued, TOKENS)
    assert (decoder.n_past(), decoder.logits()) == (10, before)
