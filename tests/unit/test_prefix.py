"""Frozen prefixes as they are made and as they arrive: what is checked, and that nothing is kept."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import mmap
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
    PeerRefusedError,
    ProtocolError,
    RemoteProtocolError,
    ReplayError,
)
from kvshare.ledger import HEADER_NBYTES, Ledger, tokens_digest
from kvshare.prefix import FROZEN_SEALS, Prefix
from kvshare.testing.fakes import plain_layout
from kvshare.testing.faults import LEDGER_FIELDS, cut_messages, send_framed
from kvshare.wire import FrozenHeader
from tests.unit.prefixes import REGION_NBYTES, SAMPLE, SEMANTICS, TOKENS, altered, duplicates, frozen_prefix

REGION, LEDGER, TOKEN_IDS = range(3)


@pytest.fixture
def prefix() -> Iterator[Prefix]:
    with frozen_prefix() as made:
        yield made


@pytest.fixture
def link() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        yield near, far


Link = tuple[socket.socket, socket.socket]
Change = Callable[[FrozenHeader], FrozenHeader]


def soon() -> float:
    return time.monotonic() + 5


def put(content: bytearray, at: int, data: bytes) -> None:
    content[at : at + len(data)] = data


# -- making ------------------------------------------------------------------------------------


def test_what_is_made(prefix: Prefix) -> None:
    assert list(prefix.tokens) == TOKENS
    assert prefix.layout == plain_layout()
    assert (prefix.name, prefix.seq_id) == ("one", 0)
    assert prefix.header.layout == plain_layout().digest()
    assert prefix.header.params["semantics"] == SEMANTICS
    assert (prefix._record.blob, prefix._record.sample_digest) == (b"metadata", SAMPLE)
    # a page of the region, one of the ledger, one of the tokens; the rest is holes
    assert REGION_NBYTES > prefix.nbytes >= 3 * mmap.PAGESIZE


def test_two_are_never_the_same() -> None:
    with frozen_prefix() as one, frozen_prefix() as other:
        assert one.prefix_id != other.prefix_id
        assert one.header == dataclasses.replace(other.header, prefix_id=one.prefix_id)


def test_a_name_of_its_own() -> None:
    with frozen_prefix(name=None) as made:
        assert made.name == tokens_digest(TOKENS).hex()[:16]


@pytest.mark.parametrize("name", ["", "a b", "x" * 129])
def test_no_name(name: str) -> None:
    with pytest.raises(LocalProtocolError, match="name"):
        frozen_prefix(name=name)


def test_nobody_can_write(prefix: Prefix) -> None:
    """Not even who made it: no mapping, no write, no other size, no way back."""
    for owned in prefix._fds:
        fd = owned.fileno()
        assert fds.seals(fd) & FROZEN_SEALS == FROZEN_SEALS
        size = os.fstat(fd).st_size
        for attempt in (
            lambda: mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE),  # noqa: B023
            lambda: os.pwrite(fd, b"x", 0),  # noqa: B023
            lambda: os.ftruncate(fd, size // 2),  # noqa: B023
            lambda: os.ftruncate(fd, size * 2),  # noqa: B023
            lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fds.F_SEAL_FUTURE_WRITE),  # noqa: B023
        ):
            with pytest.raises(OSError, match="not permitted"):
                attempt()


def test_a_private_mapping_is_ones_own(prefix: Prefix) -> None:
    """Copy-on-write: what one writes, nobody else sees."""
    fd = prefix._fds[REGION].fileno()
    maps = [
        mmap.mmap(fd, REGION_NBYTES, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) for _ in range(2)
    ]
    maps[0][:4] = b"mine"
    assert maps[1][:4] == os.pread(fd, 4, 0) == b"keys"
    for each in maps:
        each.close()


def test_more_regions_than_descriptors_fit() -> None:
    layout = plain_layout()
    layout = dataclasses.replace(layout, regions=layout.regions * (fds.MAX_FDS - 1))
    memory = [fds.memfd_create("test", 4096, seal=False) for _ in layout.regions]
    with pytest.raises(NotShareableError, match="252 regions"):
        Prefix._seal(memory, layout, SEMANTICS, {}, TOKENS, b"x", SAMPLE, name=None)
    with pytest.raises(LocalProtocolError, match="closed"):
        memory[0].fileno()


def test_after_close(prefix: Prefix, link: Link) -> None:
    prefix.close()
    prefix.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        prefix.send(link[0])


# -- handing over ------------------------------------------------------------------------------


def test_over_a_socket(prefix: Prefix, link: Link) -> None:
    prefix.send(link[0])
    with Prefix.receive(link[1]) as found:
        prefix.close()  # the receiver has descriptors of its own
        assert found.header == prefix.header
        assert list(found.tokens) == TOKENS
        assert found._record == prefix._record
        assert os.pread(found._fds[REGION].fileno(), 4, 0) == b"keys"
        assert not any(os.get_inheritable(owned.fileno()) for owned in found._fds)


def test_to_a_path(prefix: Prefix, folder: Path) -> None:
    with fds.listening(folder / "p.sock") as listener:
        prefix.send(folder / "p.sock")
        with fds.accept_unix(listener) as connection, Prefix.receive(connection) as found:
            assert found.header == prefix.header


def test_a_chain_of_receivers(prefix: Prefix, link: Link) -> None:
    """Who received it hands it on as it is."""
    near, far = link
    with contextlib.ExitStack() as stack:
        found = prefix
        for _ in range(3):
            found.send(near)
            found = stack.enter_context(Prefix.receive(far))
        assert found.header == prefix.header


@pytest.mark.parametrize("end", [0, 1])
def test_another_user(prefix: Prefix, link: Link, monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    peer = fds.PeerCredentials(1, os.geteuid() + 1, 0)
    monkeypatch.setattr(fds, "peer_credentials", lambda sock: peer)
    attempt: Callable[..., object] = (prefix.send, Prefix.receive)[end]
    with pytest.raises(PeerRefusedError, match="expected uid"):
        attempt(link[end], deadline=soon())


def test_nobody_listens(prefix: Prefix, folder: Path) -> None:
    for attempt in (prefix.send, prefix.put, Prefix.get):
        with pytest.raises(PeerRefusedError, match="nobody listens"):
            attempt(folder / "p.sock")


# -- what arrives ------------------------------------------------------------------------------


def refused(
    prefix: Prefix,
    link: Link,
    kind: type[KvshareError],
    match: str | None,
    *,
    header: FrozenHeader | None = None,
    swap: dict[int, Callable[[fds.OwnedFd], fds.OwnedFd]] | None = None,
) -> None:
    """Send a prefix that is wrong somewhere; the receiver says so, and keeps nothing."""
    sent = duplicates(prefix)
    for index, make in (swap or {}).items():
        sent[index] = make(sent[index])
    send_framed(link[0], wire.encode(header or prefix.header), [owned.fileno() for owned in sent])
    for owned in sent:
        owned.close()
    n_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(kind, match=match):
        Prefix.receive(link[1], deadline=soon())
    assert len(os.listdir("/proc/self/fd")) == n_before


def test_a_message_that_ends_early(prefix: Prefix) -> None:
    for start in cut_messages(wire.encode(prefix.header)):
        near, far = socket.socketpair(socket.AF_UNIX)
        with far:
            with near:
                if start:
                    socket.send_fds(near, [start], [owned.fileno() for owned in prefix._fds])
            with pytest.raises(PeerClosedError):
                Prefix.receive(far, deadline=soon())


@pytest.mark.parametrize(
    "message",
    [wire.Outcome(share_id=1, ok=True), wire.PrefixRequest(op="list"), wire.PrefixList(prefixes=())],
    ids=lambda message: type(message).__name__,
)
@pytest.mark.parametrize("n_fds", [0, 3])
def test_another_message(prefix: Prefix, link: Link, message: wire.Message, n_fds: int) -> None:
    send_framed(link[0], wire.encode(message), [owned.fileno() for owned in prefix._fds][:n_fds])
    with pytest.raises(RemoteProtocolError, match=type(message).__name__):
        Prefix.receive(link[1], deadline=soon())


def test_a_server_that_says_no(link: Link) -> None:
    send_framed(link[0], wire.encode(wire.Outcome(share_id=1, ok=False, error="why")), [])
    with pytest.raises(PeerRefusedError, match="says: why"):
        Prefix.receive(link[1], deadline=soon())


@pytest.mark.parametrize("n", [0, 2, 4, 6])
def test_another_number_of_descriptors(prefix: Prefix, link: Link, n: int) -> None:
    send_framed(link[0], wire.encode(prefix.header), ([owned.fileno() for owned in prefix._fds] * 2)[:n])
    with pytest.raises(DescriptorError, match="descriptors"):
        Prefix.receive(link[1], deadline=soon())


@pytest.mark.parametrize("which", [REGION, LEDGER, TOKEN_IDS])
@pytest.mark.parametrize("missing", ["F_SEAL_WRITE", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL"])
def test_memory_that_can_change(prefix: Prefix, link: Link, which: int, missing: str) -> None:
    seals = FROZEN_SEALS & ~getattr(fds, missing)
    swap = {which: lambda fd: altered(fd, seals=seals)}
    refused(prefix, link, DescriptorError, f"not sealed with {missing}$", swap=swap)


@pytest.mark.parametrize("which", [REGION, LEDGER, TOKEN_IDS])
def test_memory_that_is_shorter_than_it_says(prefix: Prefix, link: Link, which: int) -> None:
    swap = {which: lambda fd: altered(fd, lambda content: content.pop())}
    refused(prefix, link, DescriptorError, "exceeds its descriptor", swap=swap)


@pytest.mark.parametrize("which", [REGION, LEDGER, TOKEN_IDS])
def test_other_things_in_place_of_memory(prefix: Prefix, link: Link, which: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(REGION_NBYTES))
    for name in (tmp_path / "file", tmp_path, Path("/dev/zero")):

        def opened(fd: fds.OwnedFd, name: Path = name) -> fds.OwnedFd:
            fd.close()
            return fds.OwnedFd(os.open(name, os.O_RDONLY))

        refused(prefix, link, DescriptorError, "descriptor", swap={which: opened})


def test_the_descriptors_in_another_order(prefix: Prefix, link: Link) -> None:
    send_framed(link[0], wire.encode(prefix.header), [owned.fileno() for owned in prefix._fds][::-1])
    with pytest.raises(KvshareError):
        Prefix.receive(link[1], deadline=soon())


def params(**changes: Any) -> Change:
    return lambda h: dataclasses.replace(h, params={**h.params, **changes})


def region(**changes: Any) -> Change:
    return lambda h: dataclasses.replace(h, regions=(dataclasses.replace(h.regions[0], **changes),))


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (lambda h: dataclasses.replace(h, layout="0" * 64), RemoteProtocolError, "digest"),
        (lambda h: dataclasses.replace(h, semantics="0" * 64), RemoteProtocolError, "params.semantics"),
        (lambda h: dataclasses.replace(h, prefix_id=h.prefix_id ^ 1), ReplayError, "share_id"),
        (lambda h: dataclasses.replace(h, n_tokens=3), RemoteProtocolError, "3 tokens cannot have 16"),
        (
            lambda h: dataclasses.replace(h, n_tokens=3, tokens=wire.LedgerEntry(2, 12)),
            LedgerIncompleteError,
            "n_tokens",
        ),
        (lambda h: dataclasses.replace(h, params={}), ProtocolError, "params"),
        (params(abi=2), RemoteProtocolError, "digest"),
        (params(abi="1"), RemoteProtocolError, "abi"),
        (params(caches="[1]"), RemoteProtocolError, "cache"),
        (params(caches="[" * 100_000), RemoteProtocolError, "not JSON"),
        (params(semantics=None), RemoteProtocolError, "params.semantics"),
        (params(semantics=SEMANTICS + " "), RemoteProtocolError, "params.semantics"),
        (region(offset=1, size=REGION_NBYTES - 1), RemoteProtocolError, "start at a page"),
        (region(size=REGION_NBYTES - 4096), RemoteProtocolError, "digest"),
        (region(offset=4096), DescriptorError, "exceeds its descriptor"),
        (region(size=1 << 62), DescriptorError, "exceeds its descriptor"),
        (region(kind="cuda-vmm"), NotShareableError, "cuda-vmm"),
        (region(layout=None), ProtocolError, None),
        (region(layout=[[]]), ProtocolError, None),
    ],
    ids=range(19),
)
def test_a_header_that_contradicts_itself(
    prefix: Prefix, link: Link, change: Change, kind: type[KvshareError], says: str | None
) -> None:
    refused(prefix, link, kind, says, header=change(prefix.header))


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
    "blob_size": LedgerError,
    "blob_offset": LedgerError,
    "n_prefix": LedgerDigestError,
    "prefix_sha256": LedgerDigestError,
}


@pytest.mark.parametrize("field", EXPECTED)
def test_a_ledger_that_is_wrong(prefix: Prefix, link: Link, field: str) -> None:
    at, n = LEDGER_FIELDS[field]
    values = {"header_size": 1, "state": 1, "blob_size": 1 << 40, "blob_offset": 1 << 40}

    def change(content: bytearray) -> None:
        if field in values:
            put(content, at, values[field].to_bytes(n, "little"))
        else:
            content[at] ^= 0xFF

    refused(prefix, link, EXPECTED[field], None, swap={LEDGER: lambda fd: altered(fd, change)})


def test_every_field_of_the_ledger_that_matters_is_tried() -> None:
    # the library compares the sample with the memory
    assert set(LEDGER_FIELDS) - set(EXPECTED) == {"sample_digest"}


def test_a_ledger_without_metadata() -> None:
    with pytest.raises(LedgerError, match="needs the metadata"):
        frozen_prefix(blob=b"")


def test_a_ledger_that_is_too_small(prefix: Prefix, link: Link) -> None:
    header = dataclasses.replace(prefix.header, ledger=wire.LedgerEntry(1, HEADER_NBYTES - 1))
    refused(prefix, link, LedgerError, "cannot have 511 bytes", header=header)


@pytest.mark.parametrize("which", [LEDGER, TOKEN_IDS])
def test_sparse_memory_that_no_reader_could_hold(prefix: Prefix, link: Link, which: int) -> None:
    """It costs its maker nothing; nobody copies it."""
    n_tokens, size = 1 << 30, 1 << 32

    def sparse(fd: fds.OwnedFd) -> fds.OwnedFd:
        fd.close()
        made = fds.memfd_create("kvshare-fault", size, seal=False)
        fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, FROZEN_SEALS)
        return made

    entry = wire.LedgerEntry(which, size)
    header = (
        dataclasses.replace(prefix.header, ledger=entry)
        if which == LEDGER
        else dataclasses.replace(prefix.header, n_tokens=n_tokens, tokens=entry)
    )
    refused(prefix, link, KvshareError, "cannot have 4294967296", header=header, swap={which: sparse})


def test_other_tokens(prefix: Prefix, link: Link) -> None:
    swap = {TOKEN_IDS: lambda fd: altered(fd, lambda content: put(content, 4, b"\1"))}
    refused(prefix, link, LedgerDigestError, "tokens_sha256", swap=swap)


def test_a_ledger_of_a_share(prefix: Prefix, link: Link) -> None:
    """Issued, and never complete."""

    def issued(fd: fds.OwnedFd) -> fds.OwnedFd:
        header = prefix.header
        made = Ledger.create(header.prefix_id, header.layout, header.semantics, capacity=8)
        with made as ledger, ledger.view() as view:
            data = bytes(view)
        return altered(fd, lambda content: put(content, 0, data))

    refused(prefix, link, LedgerIncompleteError, "issued at 0", swap={LEDGER: issued})


@pytest.mark.parametrize("seq_id", [-1, 1 << 31, 0.0, "0", None, True])
def test_a_sequence_that_is_none(seq_id: wire.Scalar) -> None:
    with (
        frozen_prefix(params={"seq_id": seq_id}) as made,
        pytest.raises(RemoteProtocolError, match=r"params\.seq_id"),
    ):
        _ = made.seq_id
