"""What arrives at a provider: broken messages, wrong descriptors, damaged ledgers. Nothing is kept."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvshare import wire
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


@pytest.mark.parametrize("which", ["region", "ledger"])
def test_memory_that_can_shrink(decoder: FakeDecoder, share: FakeShare, link: Link, which: str) -> None:
    """A SIGBUS in waiting."""
    sent = descriptors(decoder, share)
    at = ["region", "ledger"].index(which)
    with unsealed_memfd(sent[at]) as unsealed:
        sent[at] = unsealed.fileno()
        send_framed(link[0], wire.encode(share.header), sent)
    with pytest.raises(DescriptorError, match="F_SEAL_SHRINK"):
        Offer.receive(link[1], deadline=soon())


def test_the_descriptors_in_the_other_order(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    send_framed(link[0], wire.encode(share.header), descriptors(decoder, share)[::-1])
    with pytest.raises(KvshareError):
        Offer.receive(link[1], deadline=soon())


def test_a_socket_in_place_of_memory(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    send_framed(link[0], wire.encode(share.header), [link[0].fileno(), share.ledger.fileno()])
    with pytest.raises(DescriptorError):
        Offer.receive(link[1], deadline=soon())


def test_memory_that_nobody_can_import_yet(decoder: FakeDecoder, share: FakeShare, link: Link) -> None:
    region = dataclasses.replace(share.header.regions[0], kind="cuda-vmm")
    header = dataclasses.replace(share.header, regions=(region,))
    send_framed(link[0], wire.encode(header), descriptors(decoder, share))
    with pytest.raises(NotShareableError, match="cuda-vmm"):
        Offer.receive(link[1], deadline=soon())


def test_another_message(link: Link) -> None:
    send_framed(link[0], wire.encode(wire.JobHeader(share_id=1, tokens=(1,))), [])
    with pytest.raises(RemoteProtocolError, match="JobHeader"):
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
