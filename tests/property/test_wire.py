"""Round trips, hostile bytes and hostile pacing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare import errors, fds, wire

INT64 = 1 << 63

share_ids = st.integers(1, (1 << 53) - 1)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
scalars = st.none() | st.booleans() | st.integers(-INT64, INT64 - 1) | texts | st.floats(allow_nan=False)
finite = scalars.filter(lambda value: value not in (float("inf"), float("-inf")))
json_values = st.recursive(
    finite,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def cell_ranges(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    bounds = sorted(draw(st.sets(st.integers(0, 1 << 32), max_size=6)))
    return tuple(zip(bounds[::2], bounds[1::2], strict=False))


@st.composite
def headers(draw: st.DrawFn) -> wire.ShareHeader:
    """Headers whose regions share descriptors but no bytes."""
    n_fds = draw(st.integers(2, 5))
    ledger_fd = draw(st.integers(0, n_fds - 1))
    regions = []
    for fd in set(range(n_fds)) - {ledger_fd}:
        bounds = sorted(draw(st.sets(st.integers(0, INT64 - 1), min_size=2, max_size=6)))
        for offset, end in zip(bounds[::2], bounds[1::2], strict=False):
            kind = draw(st.sampled_from(wire.KINDS))
            regions.append(wire.RegionEntry(fd, offset, end - offset, draw(json_values), kind))
    return wire.ShareHeader(
        share_id=draw(share_ids),
        layout=draw(digests),
        semantics=draw(digests),
        params=draw(st.dictionaries(texts, finite, max_size=5)),
        regions=tuple(draw(st.permutations(regions))),
        ledger=wire.LedgerEntry(ledger_fd, draw(st.integers(1, INT64 - 1))),
        cells=tuple(draw(st.lists(cell_ranges(), max_size=3))),
        expires_ms=draw(st.integers(0, (1 << 53) - 1)),
    )


@st.composite
def progresses(draw: st.DrawFn) -> wire.Progress:
    n_tokens = draw(st.integers(1, (1 << 31) - 1))
    n_filled = draw(st.integers(0, n_tokens))
    return wire.Progress(share_id=draw(share_ids), n_filled=n_filled, n_tokens=n_tokens)


jobs = st.builds(
    wire.JobHeader,
    share_id=share_ids,
    tokens=st.lists(st.integers(0, (1 << 31) - 1), min_size=1).map(tuple),
)
outcomes = st.builds(wire.Outcome, share_id=share_ids, ok=st.just(True)) | st.builds(
    wire.Outcome, share_id=share_ids, ok=st.just(False), error=texts
)
names = st.from_regex("[A-Za-z0-9._-]{1,128}", fullmatch=True)


@st.composite
def frozen_headers(draw: st.DrawFn) -> wire.FrozenHeader:
    """Made of a share's header: the memory obeys the same rules."""
    header = draw(headers())
    n_fds = 1 + max(header.ledger.fd, *(region.fd for region in header.regions))
    return wire.FrozenHeader(
        name=draw(names),
        prefix_id=header.share_id,
        n_tokens=draw(st.integers(1, (1 << 31) - 1)),
        layout=header.layout,
        semantics=header.semantics,
        params=header.params,
        regions=header.regions,
        ledger=header.ledger,
        tokens=wire.LedgerEntry(n_fds, draw(st.integers(1, INT64 - 1))),
    )


requests = (
    st.builds(wire.PrefixRequest, op=st.just("get"), name=st.none() | names)
    | st.builds(wire.PrefixRequest, op=st.just("drop"), name=names)
    | st.just(wire.PrefixRequest(op="list"))
)
entries = st.builds(
    wire.PrefixEntry,
    name=names,
    prefix_id=share_ids,
    n_tokens=st.integers(1, (1 << 31) - 1),
    nbytes=st.integers(0, INT64 - 1),
    layout=digests,
    semantics=digests,
    n_reads=st.integers(0, INT64 - 1),
)
lists = st.builds(wire.PrefixList, prefixes=st.lists(entries, max_size=4).map(tuple))
messages = headers() | jobs | progresses() | outcomes | frozen_headers() | requests | lists


def accepted(payload: bytes) -> bool:
    """Say whether bytes are a message; anything but RemoteProtocolError fails the test."""
    try:
        wire.decode(payload)
    except errors.RemoteProtocolError:
        return False
    return True


@given(messages)
def test_round_trip(message: wire.Message) -> None:
    payload = wire.encode(message)
    decoded = wire.decode(payload)
    assert decoded == message
    assert wire.encode(decoded) == payload
    if isinstance(decoded, (wire.ShareHeader, wire.FrozenHeader)):
        used = {region.fd for region in decoded.regions} | {decoded.ledger.fd}
        used |= {decoded.tokens.fd} if isinstance(decoded, wire.FrozenHeader) else set()
        wire.check_descriptors(decoded, len(used))
        with pytest.raises(errors.DescriptorError):
            wire.check_descriptors(decoded, len(used) + 1)


def template_of(header: wire.ShareHeader) -> wire.ShareTemplate:
    """Return what this header has in common with others."""
    return wire.ShareTemplate(
        layout=header.layout,
        semantics=header.semantics,
        params=header.params,
        regions=header.regions,
        ledger=header.ledger,
    )


@given(headers(), st.lists(st.tuples(share_ids, st.lists(cell_ranges(), max_size=3), share_ids), max_size=3))
def test_a_template_encodes_what_encode_does(
    header: wire.ShareHeader, others: list[tuple[int, list[tuple[tuple[int, int], ...]], int]]
) -> None:
    template = template_of(header)
    assert template.semantics_digest.hex() == header.semantics
    for share_id, cells, expires_ms in [(header.share_id, header.cells, header.expires_ms), *others]:
        other = template.header(share_id=share_id, cells=tuple(cells), expires_ms=expires_ms)
        expected = dataclasses.replace(header, share_id=share_id, cells=tuple(cells), expires_ms=expires_ms)
        assert other == expected
        assert template.encode(share_id, tuple(cells), expires_ms) == wire.encode(other)


@given(headers(), st.data())
def test_a_template_refuses_what_encode_refuses(header: wire.ShareHeader, data: st.DataObject) -> None:
    wrong: dict[str, Any] = data.draw(
        st.sampled_from(
            [
                {"layout": "0"},
                {"semantics": "g" * 64},
                {"params": {"list": []}},
                {"ledger": wire.LedgerEntry(fd=header.regions[0].fd, size=4096)},
                {"ledger": wire.LedgerEntry(fd=header.ledger.fd, size=0)},
            ]
        )
    )
    bad = dataclasses.replace(header, **wrong)
    with pytest.raises(errors.LocalProtocolError) as by_encode:
        wire.encode(bad)
    with pytest.raises(errors.LocalProtocolError) as by_template:
        template_of(bad)
    assert str(by_template.value) == str(by_encode.value)


@given(st.binary(max_size=200) | texts.map(str.encode) | json_values.map(json.dumps).map(str.encode))
def test_any_bytes(payload: bytes) -> None:
    assert not accepted(payload)


@given(messages.map(wire.encode), st.data())
def test_damaged_bytes(payload: bytes, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(payload)))
    n = data.draw(st.integers(0, 3))
    accepted(payload[:at] + data.draw(st.binary(max_size=3)) + payload[at + n :])


@given(messages, finite, st.data())
def test_a_field_of_any_value(message: wire.Message, value: Any, data: st.DataObject) -> None:
    """What one side refuses to send is what the other refuses to read."""
    containers = ("params", "regions", "ledger", "cells", "tokens", "prefixes")
    names = [field.name for field in dataclasses.fields(message) if field.name not in containers]
    name = data.draw(st.sampled_from(names))
    document: dict[str, Any] = json.loads(wire.encode(message))
    body = document if name in document else next(v for v in document.values() if isinstance(v, dict))
    body[name] = value
    try:
        wire.encode(dataclasses.replace(message, **{name: value}))
    except errors.LocalProtocolError:
        assert not accepted(json.dumps(document).encode())
    else:
        assert accepted(json.dumps(document).encode())


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 3)), min_size=1, max_size=4),
    st.data(),
)
def test_messages_in_any_pieces(sent: list[tuple[bytes, int]], data: st.DataObject) -> None:
    """However a stream is cut, each message comes out with its own descriptors."""
    with contextlib.ExitStack() as stack:
        left, right = (stack.enter_context(sock) for sock in socket.socketpair())
        memory = [stack.enter_context(fds.memfd_create("test", 64)).fileno() for _ in range(3)]
        pieces: list[tuple[bytes, list[int]]] = []
        for payload, n_fds in sent:
            frame = struct.pack("<I", len(payload)) + payload
            cuts = sorted(data.draw(st.sets(st.integers(1, len(frame) - 1), max_size=5)))
            for start, end in zip([0, *cuts], [*cuts, len(frame)], strict=True):
                pieces.append((frame[start:end], memory[:n_fds] if start == 0 else []))

        def send() -> None:
            for piece, descriptors in pieces:
                socket.send_fds(left, [piece], descriptors)

        sender = threading.Thread(target=send)
        sender.start()
        for payload, n_fds in sent:
            got, received = fds.receive_message(right)
            for fd in received:
                stack.callback(fd.close)
            assert got == payload
            assert [os.fstat(fd.fileno()).st_ino for fd in received] == [
                os.fstat(fd).st_ino for fd in memory[:n_fds]
            ]
        sender.join()


@settings(max_examples=50)
@given(st.binary(max_size=64), st.integers(0, 3), st.integers(0, 3))
def test_any_stream(stream: bytes, n_fds: int, max_fds: int) -> None:
    """Garbage on the socket raises only our errors; the leak fixture watches the rest."""
    with contextlib.ExitStack() as stack:
        left, right = (stack.enter_context(sock) for sock in socket.socketpair())
        if stream:
            memory = stack.enter_context(fds.memfd_create("test", 64)).fileno()
            socket.send_fds(left, [stream], [memory] * n_fds)
        left.close()
        while True:
            try:
                _, received = fds.receive_message(right, max_fds=max_fds)
            except errors.KvshareError:
                break
            for fd in received:
                fd.close()
