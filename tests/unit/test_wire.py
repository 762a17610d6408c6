"""The codec, field by field, the vectors, and the states of a share."""

from __future__ import annotations

import copy
import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kvshare import errors, fds, wire
from kvshare.wire import ShareState

VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "wire.json").read_text())
DIGEST = "0123456789abcdef" * 4
MISSING = object()

SHARE: dict[str, Any] = {
    "protocol": 1,
    "share_id": 7,
    "layout": DIGEST,
    "semantics": DIGEST,
    "params": {"n_ctx": 512},
    "regions": [
        {"fd": 0, "offset": 0, "size": 4096, "layout": [], "kind": "memfd"},
        {"fd": 0, "offset": 4096, "size": 4096, "layout": [], "kind": "memfd"},
        {"fd": 2, "offset": 0, "size": 4096, "layout": [], "kind": "memfd"},
    ],
    "ledger": {"fd": 1, "size": 1024},
    "cells": [[[0, 256], [512, 768]], []],
    "expires_ms": 1000,
}
JOB: dict[str, Any] = {"protocol": 1, "job": {"share_id": 7, "tokens": [1, 2, 3]}}
PROGRESS: dict[str, Any] = {"protocol": 1, "progress": {"share_id": 7, "n_filled": 1, "n_tokens": 3}}
OUTCOME: dict[str, Any] = {"protocol": 1, "outcome": {"share_id": 7, "ok": False, "error": "why"}}
FROZEN: dict[str, Any] = {
    "protocol": 1,
    "frozen": {
        "name": "a.Prefix_1-",
        "prefix_id": 7,
        "n_tokens": 3,
        **{key: SHARE[key] for key in ("layout", "semantics", "params", "regions", "ledger")},
        "tokens": {"fd": 3, "size": 12},
    },
}
REQUEST: dict[str, Any] = {"protocol": 1, "prefix": {"op": "get", "name": "a.Prefix_1-"}}
LIST: dict[str, Any] = {
    "protocol": 1,
    "prefixes": [
        {
            "name": name,
            "prefix_id": 7,
            "n_tokens": 3,
            "nbytes": 0,
            "layout": DIGEST,
            "semantics": DIGEST,
            "n_reads": 2,
        }
        for name in ("one", "two")
    ],
}
ALL = (SHARE, JOB, PROGRESS, OUTCOME, FROZEN, REQUEST, LIST)


def share(**changes: Any) -> wire.ShareHeader:
    message = wire.decode(json.dumps(SHARE).encode())
    assert isinstance(message, wire.ShareHeader)
    return dataclasses.replace(message, **changes)


def frozen() -> wire.FrozenHeader:
    return wire.FrozenHeader(
        name="a.Prefix_1-",
        prefix_id=7,
        n_tokens=3,
        layout=DIGEST,
        semantics=DIGEST,
        params={"n_ctx": 512},
        regions=share().regions,
        ledger=wire.LedgerEntry(1, 1024),
        tokens=wire.LedgerEntry(3, 12),
    )


def changed(document: dict[str, Any], path: tuple[str | int, ...], value: object) -> bytes:
    document = copy.deepcopy(document)
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    if value is MISSING:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return json.dumps(document).encode()


# -- vectors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_vector(vector: dict[str, Any]) -> None:
    payload = bytes.fromhex(vector["payload"])
    assert json.loads(payload) == vector["header"]
    message = wire.decode(payload)
    assert wire.encode(message) == payload
    left, right = socket.socketpair()
    with left, right:
        fds.send_message(left, payload)
        assert right.recv(1 << 20).hex() == vector["framed"]


def test_limits_are_those_of_the_socket() -> None:
    assert (wire.MAX_NBYTES, wire.MAX_FDS) == (fds.MAX_PAYLOAD_NBYTES, fds.MAX_FDS)


# -- good messages ---------------------------------------------------------------------------


def test_share_header() -> None:
    assert share() == wire.ShareHeader(
        share_id=7,
        layout=DIGEST,
        semantics=DIGEST,
        params={"n_ctx": 512},
        regions=(
            wire.RegionEntry(0, 0, 4096, [], "memfd"),
            wire.RegionEntry(0, 4096, 4096, [], "memfd"),
            wire.RegionEntry(2, 0, 4096, [], "memfd"),
        ),
        ledger=wire.LedgerEntry(1, 1024),
        cells=(((0, 256), (512, 768)), ()),
        expires_ms=1000,
    )


def test_the_other_messages() -> None:
    assert wire.decode(json.dumps(JOB).encode()) == wire.JobHeader(share_id=7, tokens=(1, 2, 3))
    assert wire.decode(json.dumps(PROGRESS).encode()) == wire.Progress(share_id=7, n_filled=1, n_tokens=3)
    assert wire.decode(json.dumps(OUTCOME).encode()) == wire.Outcome(share_id=7, ok=False, error="why")


def test_messages_about_prefixes() -> None:
    assert wire.decode(json.dumps(FROZEN).encode()) == frozen()
    request = wire.PrefixRequest(op="get", name="a.Prefix_1-")
    assert wire.decode(json.dumps(REQUEST).encode()) == request
    entries = tuple(wire.PrefixEntry(name, 7, 3, 0, DIGEST, DIGEST, 2) for name in ("one", "two"))
    assert wire.decode(json.dumps(LIST).encode()) == wire.PrefixList(prefixes=entries)
    for message in (frozen(), request, wire.PrefixList(prefixes=entries), wire.PrefixList(prefixes=())):
        assert wire.decode(wire.encode(message)) == message


@pytest.mark.parametrize("op", wire.PREFIX_OPS)
@pytest.mark.parametrize("name", [None, "one"])
def test_which_requests_have_a_name(op: str, name: str | None) -> None:
    request = wire.PrefixRequest(op=op, name=name)
    if op == "get" or (op == "list") is (name is None):
        assert wire.decode(wire.encode(request)) == request
    else:
        with pytest.raises(errors.LocalProtocolError, match=r"prefix\.name"):
            wire.encode(request)


@pytest.mark.parametrize("document", ALL)
def test_unknown_keys_are_ignored(document: dict[str, Any]) -> None:
    extended = copy.deepcopy(document)
    extended["later"] = {"deep": [1]}
    for value in extended.values():
        if isinstance(value, dict) and value is not extended.get("params"):
            value["later"] = None
    for item in [*extended.get("regions", []), *extended.get("prefixes", [])]:
        item["later"] = 1
    assert wire.decode(json.dumps(extended).encode()) == wire.decode(json.dumps(document).encode())


def test_encoding_does_not_depend_on_order() -> None:
    one = share(params={"a": 1, "b": 2})
    other = share(params={"b": 2, "a": 1})
    assert wire.encode(one) == wire.encode(other)


# -- bad messages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "Expecting value"),
        (b"\xff\xfe", "utf-8"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b'{"protocol": 1', "delimiter"),
        (b"[]", "message is .* not an object"),
        (b"{}", "protocol is missing"),
        (b'{"protocol": 1}', "exactly one of"),
        (b'{"protocol": 1, "job": {}, "progress": {}}', "exactly one of"),
        (b'{"protocol": 1, "protocol": 1}', "'protocol' occurs twice"),
        (b'{"protocol": NaN}', "NaN is no JSON"),
        (b'{"protocol": -Infinity}', "-Infinity is no JSON"),
        (b'{"protocol": 1e999}', "1e999 is out of range"),
        (b'{"protocol": ' + b"9" * 5000 + b"}", "header: "),
        (b'{"protocol": "\\ud800"}', "surrogates not allowed"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b" " * (wire.MAX_NBYTES + 1), "1048577 bytes exceeds"),
    ],
)
def test_no_message_at_all(payload: bytes, says: str) -> None:
    with pytest.raises(errors.RemoteProtocolError, match=says):
        wire.decode(payload)


@pytest.mark.parametrize("document", ALL)
@pytest.mark.parametrize("version", [0, 2, 1 << 62])
def test_another_protocol(document: dict[str, Any], version: int) -> None:
    with pytest.raises(errors.RemoteProtocolError, match=f"protocol is {version}, this side speaks 1"):
        wire.decode(changed(document, ("protocol",), version))


NAMES: list[Any] = [None, 1, [], "", "a b", "a/b", "..\n", "\u00e4", "x" * 129]
INTEGERS = [True, 1.0, "1", None, [], -1]

BAD_FIELDS: list[tuple[dict[str, Any], tuple[str | int, ...], str, list[Any]]] = [
    (SHARE, ("protocol",), "protocol", INTEGERS),
    (SHARE, ("share_id",), "share_id", [*INTEGERS, 0, 1 << 53]),
    (SHARE, ("layout",), "layout", [None, 5, "", DIGEST[1:], DIGEST.upper(), DIGEST[:-1] + "\n", "g" * 64]),
    (SHARE, ("semantics",), "semantics", [None, DIGEST + "0"]),
    (SHARE, ("params",), "params", [None, [], 1]),
    (SHARE, ("params", "n_ctx"), "params.'n_ctx'", [[], {}, 1 << 63, -(1 << 63) - 1]),
    (SHARE, ("regions",), "regions", [None, {}, []]),
    (SHARE, ("regions", 1), r"regions\[1\]", [None, [], 1]),
    (SHARE, ("regions", 1, "fd"), r"regions\[1\].fd", [*INTEGERS, 253]),
    (SHARE, ("regions", 1, "offset"), r"regions\[1\].offset", [*INTEGERS, 1 << 63, (1 << 63) - 4096]),
    (SHARE, ("regions", 1, "size"), r"regions\[1\].size", [*INTEGERS, 0, 1 << 63]),
    (SHARE, ("regions", 1, "kind"), r"regions\[1\].kind", [None, [], "MEMFD", "shm"]),
    (SHARE, ("ledger",), "ledger", [None, [], 1]),
    (SHARE, ("ledger", "fd"), "ledger.fd", [*INTEGERS, 0, 2, 253]),
    (SHARE, ("ledger", "size"), "ledger.size", [*INTEGERS, 0, 1 << 63]),
    (SHARE, ("cells",), "cells", [None, {}]),
    (SHARE, ("cells", 1), r"cells\[1\]", [None, {}, 1]),
    (
        SHARE,
        ("cells", 0, 1),
        r"cells\[0\]\[1\]",
        [None, [], [1], [1, 2, 3], [600, 600], [255, 300], [600, 1 << 33], [True, 600], [512, 768.0]],
    ),
    (SHARE, ("expires_ms",), "expires_ms", [*INTEGERS, 1 << 53]),
    (JOB, ("job",), "job", [None, []]),
    (JOB, ("job", "share_id"), "job.share_id", [*INTEGERS, 0]),
    (JOB, ("job", "tokens"), "job.tokens", [None, [], {}, "1"]),
    (JOB, ("job", "tokens", 1), r"job.tokens\[1\]", [*INTEGERS, 1 << 31]),
    (PROGRESS, ("progress", "share_id"), "progress.share_id", [0]),
    (PROGRESS, ("progress", "n_filled"), "progress.n_filled", [*INTEGERS, 4]),
    (PROGRESS, ("progress", "n_tokens"), "progress.n_tokens", [*INTEGERS, 0]),
    (OUTCOME, ("outcome", "share_id"), "outcome.share_id", [0]),
    (OUTCOME, ("outcome", "ok"), "outcome.ok", [None, 1, "true"]),
    (OUTCOME, ("outcome", "error"), "outcome.error", [None, 1, []]),
    (FROZEN, ("frozen",), "frozen", [None, []]),
    (FROZEN, ("frozen", "name"), "frozen.name", NAMES),
    (FROZEN, ("frozen", "prefix_id"), "frozen.prefix_id", [*INTEGERS, 0, 1 << 53]),
    (FROZEN, ("frozen", "n_tokens"), "frozen.n_tokens", [*INTEGERS, 0, 1 << 31]),
    (FROZEN, ("frozen", "layout"), "frozen.layout", [None, DIGEST.upper()]),
    (FROZEN, ("frozen", "semantics"), "frozen.semantics", [None, DIGEST + "0"]),
    (FROZEN, ("frozen", "params"), "frozen.params", [None, [], 1]),
    (FROZEN, ("frozen", "params", "n_ctx"), "frozen.params.'n_ctx'", [[], 1 << 63]),
    (FROZEN, ("frozen", "regions"), "frozen.regions", [None, {}, []]),
    (FROZEN, ("frozen", "regions", 1, "size"), r"frozen.regions\[1\].size", [0, 1 << 63]),
    (FROZEN, ("frozen", "regions", 1, "offset"), r"frozen.regions\[1\] overlap", [4095]),
    (FROZEN, ("frozen", "ledger"), "frozen.ledger", [None, [], 1]),
    (FROZEN, ("frozen", "ledger", "fd"), "frozen.ledger.fd", [*INTEGERS, 0, 2, 253]),
    (FROZEN, ("frozen", "tokens"), "frozen.tokens", [None, [], [1]]),
    (FROZEN, ("frozen", "tokens", "fd"), "frozen.tokens.fd", [*INTEGERS, 0, 1, 2, 253]),
    (FROZEN, ("frozen", "tokens", "size"), "frozen.tokens.size", [*INTEGERS, 0]),
    (REQUEST, ("prefix",), "prefix", [None, []]),
    (REQUEST, ("prefix", "op"), "prefix.op", [None, [], "put", "GET"]),
    (REQUEST, ("prefix", "name"), "prefix.name", [name for name in NAMES if name is not None]),
    (LIST, ("prefixes",), "prefixes", [None, {}]),
    (LIST, ("prefixes", 1), r"prefixes\[1\]", [None, []]),
    (LIST, ("prefixes", 1, "name"), r"prefixes\[1\].name", NAMES),
    (LIST, ("prefixes", 1, "prefix_id"), r"prefixes\[1\].prefix_id", [*INTEGERS, 0]),
    (LIST, ("prefixes", 1, "n_tokens"), r"prefixes\[1\].n_tokens", [*INTEGERS, 0]),
    (LIST, ("prefixes", 1, "nbytes"), r"prefixes\[1\].nbytes", INTEGERS),
    (LIST, ("prefixes", 1, "layout"), r"prefixes\[1\].layout", [None, ""]),
    (LIST, ("prefixes", 1, "semantics"), r"prefixes\[1\].semantics", [None, ""]),
    (LIST, ("prefixes", 1, "n_reads"), r"prefixes\[1\].n_reads", INTEGERS),
]


@pytest.mark.parametrize(
    ("document", "path", "name", "value"),
    [(document, path, name, value) for document, path, name, values in BAD_FIELDS for value in values],
)
def test_a_bad_field_is_named(
    document: dict[str, Any], path: tuple[str | int, ...], name: str, value: object
) -> None:
    with pytest.raises(errors.RemoteProtocolError, match=f"(?m)^header: .*{name}"):
        wire.decode(changed(document, path, value))


@pytest.mark.parametrize(
    ("document", "path"),
    [(document, (key,)) for document in (SHARE,) for key in SHARE]
    + [(SHARE, ("regions", 0, key)) for key in SHARE["regions"][0]]
    + [(SHARE, ("ledger", key)) for key in SHARE["ledger"]]
    + [(JOB, ("job", key)) for key in JOB["job"]]
    + [(PROGRESS, ("progress", key)) for key in PROGRESS["progress"]]
    + [(OUTCOME, ("outcome", key)) for key in OUTCOME["outcome"]]
    + [(FROZEN, ("frozen", key)) for key in FROZEN["frozen"]]
    + [(FROZEN, ("frozen", "tokens", key)) for key in FROZEN["frozen"]["tokens"]]
    + [(REQUEST, ("prefix", key)) for key in REQUEST["prefix"]]
    + [(LIST, ("prefixes", 1, key)) for key in LIST["prefixes"][1]],
)
def test_a_missing_field_is_named(document: dict[str, Any], path: tuple[str | int, ...]) -> None:
    with pytest.raises(errors.RemoteProtocolError, match=str(path[-1])):
        wire.decode(changed(document, path, MISSING))


def test_overlapping_regions() -> None:
    with pytest.raises(
        errors.RemoteProtocolError, match=r"regions\[0\] and regions\[1\] overlap in descriptor 0"
    ):
        wire.decode(changed(SHARE, ("regions", 1, "offset"), 4095))
    apart = changed(SHARE, ("regions", 1, "fd"), 3)
    assert isinstance(wire.decode(apart), wire.ShareHeader)


def test_an_error_without_failure() -> None:
    with pytest.raises(errors.RemoteProtocolError, match=r"outcome\.error"):
        wire.decode(changed(OUTCOME, ("outcome", "ok"), True))


def test_a_huge_value_makes_a_small_message() -> None:
    with pytest.raises(errors.RemoteProtocolError) as caught:
        wire.decode(changed(SHARE, ("layout",), "x" * 1_000_000))
    assert len(str(caught.value)) < 200


# -- what is not sent ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"share_id": 0}, "share_id"),
        ({"protocol": 2}, "protocol is 2"),
        ({"layout": DIGEST.upper()}, "layout"),
        ({"params": {"x": float("nan")}}, "params.'x'"),
        ({"params": {"x": "\ud800"}}, "surrogates"),
        ({"params": {"x": 1 << 100_000}}, "digits|params"),
        ({"regions": ()}, "regions is empty"),
        ({"ledger": wire.LedgerEntry(0, 512)}, "which a region uses"),
        ({"cells": (((1, 1),),)}, r"cells\[0\]\[0\]"),
        ({"regions": (wire.RegionEntry(0, 0, 1, {1, 2}, "memfd"),)}, "not JSON serializable"),
        ({"regions": (wire.RegionEntry(0, 0, 1, float("inf"), "memfd"),)}, "not JSON compliant"),
        ({"regions": (wire.RegionEntry(0, 0, 1, "x" * wire.MAX_NBYTES, "memfd"),)}, "bytes exceeds"),
    ],
)
def test_local_misuse(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(errors.LocalProtocolError, match=says):
        wire.encode(share(**changes))


def test_what_is_nested_too_deeply_is_not_sent() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(errors.LocalProtocolError, match="recursion"):
        wire.encode(share(regions=(wire.RegionEntry(0, 0, 1, nested, "memfd"),)))


# -- descriptors -----------------------------------------------------------------------------


def test_descriptors_match_the_header() -> None:
    wire.check_descriptors(share(), 3)
    for n_fds in (0, 2, 4):
        with pytest.raises(errors.DescriptorError, match=rf"\[0, 1, 2\], but {n_fds} came"):
            wire.check_descriptors(share(), n_fds)
    wire.check_descriptors(frozen(), 4)
    for n_fds in (3, 5):
        with pytest.raises(errors.DescriptorError, match=rf"\[0, 1, 2, 3\], but {n_fds} came"):
            wire.check_descriptors(frozen(), n_fds)
    gap = share(ledger=wire.LedgerEntry(3, 512))
    for n_fds in (3, 4):
        with pytest.raises(errors.DescriptorError):
            wire.check_descriptors(gap, n_fds)


# -- states ----------------------------------------------------------------------------------


def test_the_usual_life() -> None:
    state = ShareState.ISSUED
    for new in (ShareState.FILLING, ShareState.COMPLETE, ShareState.ADOPTED):
        assert state.live
        state = wire.advance(state, new)
    assert not state.live


@pytest.mark.parametrize("state", ShareState)
@pytest.mark.parametrize("new", ShareState)
def test_transitions(state: ShareState, new: ShareState) -> None:
    order = [ShareState.ISSUED, ShareState.FILLING, ShareState.COMPLETE, ShareState.ADOPTED]
    ends = {ShareState.FAILED, ShareState.RELEASED, ShareState.EXPIRED}
    live = state in order[:3]
    forward = state in order and new in order and order.index(new) > order.index(state)
    allowed = live and (new in ends or forward) and (new is not ShareState.ADOPTED or state is order[2])
    assert state.live is live
    if allowed:
        assert wire.advance(state, new) is new
    else:
        with pytest.raises(errors.LocalProtocolError, match=f"{state.value} cannot become {new.value}"):
            wire.advance(state, new)
