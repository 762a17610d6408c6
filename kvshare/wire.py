"""The messages of a share: what they hold, their bytes, and the states that a share goes through.

Nothing here touches a socket; `fds` moves the bytes. A message is one JSON object, UTF-8. The
decoder sends a `ShareHeader` together with descriptors. An engine sends a `JobHeader` on a
connection of its own and reads `Progress` and one `Outcome` there; the two meet by `share_id`.

A frozen prefix travels as a `FrozenHeader` together with descriptors. A server that keeps some takes
these, and answers a `PrefixRequest` with one of them, with a `PrefixList`, or with an `Outcome`.

`encode` is deterministic (sorted keys, no spaces, no escapes beyond what JSON demands), so that
every sender produces the same bytes; `tests/vectors/wire.json` holds examples. It refuses with
`LocalProtocolError` what `decode` would refuse with `RemoteProtocolError`: the rules are one set of
functions. Keys that are not known are ignored, so that later versions can add some.
"""

from __future__ import annotations

import enum
import json
import math
import re
import reprlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NoReturn

from kvshare.errors import DescriptorError, LocalProtocolError, RemoteProtocolError

PROTOCOL = 1
MAX_NBYTES = 1 << 20
MAX_FDS = 253
KINDS = ("memfd", "cuda-vmm", "dma-buf")
PREFIX_OPS = ("get", "list", "drop")

_SHARE_ID_END = 1 << 53  # a double, and so every JSON reader, holds integers below this exactly
_CELL_END = 1 << 32
_TOKEN_END = 1 << 31
_INT64_END = 1 << 63
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DIGEST = re.compile("[0-9a-f]{64}")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

BUSY = "busy"
"""How the error of an outcome begins that says nothing of the share: the peer has enough to do for now."""

# the key that says what a message is
_BODIES = ("regions", "job", "progress", "outcome", "frozen", "prefix", "prefixes")

Scalar = str | int | float | bool | None


# -- messages --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegionEntry:
    """A contiguous range of one descriptor that backs cache tensors.

    Attributes:
        fd: index into the descriptors of the message.
        offset: where the region starts in it, bytes.
        size: bytes, at least 1.
        layout: JSON value that describes the tensors inside; of kind `cuda-vmm` it also says where they lie,
            see `device.DevicePlace`.
        kind: one of `KINDS`.
    """

    fd: int
    offset: int
    size: int
    layout: object
    kind: str


@dataclass(frozen=True)
class LedgerEntry:
    """The memfd of a ledger, or of token ids.

    Attributes:
        fd: index into the descriptors of the message; nothing else uses the same.
        size: bytes.
    """

    fd: int
    size: int


@dataclass(frozen=True, kw_only=True)
class ShareHeader:
    """What the decoder sends along with the descriptors of its cache.

    Attributes:
        share_id: random, single use, in [1, 2**53).
        layout: layout digest, 64 hexadecimal digits.
        semantics: semantics digest, likewise.
        params: what a provider must reproduce to build an equal context, by name.
        regions: the memory.
        ledger: where the provider vouches for what it filled.
        cells: for every cache the half-open cell ranges of the lease, ascending.
        expires_ms: how long the share lives, from its issue, in milliseconds.
        protocol: version of the message.
    """

    share_id: int
    layout: str
    semantics: str
    params: Mapping[str, Scalar]
    regions: tuple[RegionEntry, ...]
    ledger: LedgerEntry
    cells: tuple[tuple[tuple[int, int], ...], ...]
    expires_ms: int
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class JobHeader:
    """What an engine asks of a warm provider: prefill `tokens` into the share `share_id`."""

    share_id: int
    tokens: tuple[int, ...]
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a job has come: `n_filled` of `n_tokens`."""

    share_id: int
    n_filled: int
    n_tokens: int
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a job ended; `error` is None exactly if it ended well."""

    share_id: int
    ok: bool
    error: str | None = None
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class FrozenHeader:
    """A prefix that nobody can change any more; it comes with the descriptors of its memory.

    Attributes:
        name: 1 to 128 of `A-Z a-z 0-9 . _ -`.
        prefix_id: random, in [1, 2**53); the `share_id` of its ledger.
        n_tokens: how many tokens it holds.
        layout: layout digest, 64 hexadecimal digits.
        semantics: semantics digest, likewise.
        params: what a reader must reproduce to build an equal context, by name.
        regions: the memory.
        ledger: a complete ledger, with the metadata of the cells and all digests.
        tokens: the token ids, little-endian int32.
        protocol: version of the message.
    """

    name: str
    prefix_id: int
    n_tokens: int
    layout: str
    semantics: str
    params: Mapping[str, Scalar]
    regions: tuple[RegionEntry, ...]
    ledger: LedgerEntry
    tokens: LedgerEntry
    protocol: int = PROTOCOL


@dataclass(frozen=True, kw_only=True)
class PrefixRequest:
    """What is asked of a server of prefixes.

    Attributes:
        op: one of `PREFIX_OPS`.
        name: of the prefix. None is the one that was used last for `get`, and a must for `list`.
        protocol: version of the message.
    """

    op: str
    name: str | None = None
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class PrefixEntry:
    """A prefix that a server keeps.

    Attributes:
        name: of the prefix.
        prefix_id: which one it is; a name may be used again, this is not.
        n_tokens: how many tokens it holds.
        nbytes: physical memory, bytes.
        layout: layout digest.
        semantics: semantics digest.
        n_reads: how often it was handed out.
    """

    name: str
    prefix_id: int
    n_tokens: int
    nbytes: int
    layout: str
    semantics: str
    n_reads: int


@dataclass(frozen=True, kw_only=True)
class PrefixList:
    """The prefixes that a server keeps, the one that was used last at the end."""

    prefixes: tuple[PrefixEntry, ...]
    protocol: int = PROTOCOL


Message = ShareHeader | JobHeader | Progress | Outcome | FrozenHeader | PrefixRequest | PrefixList


def encode(message: Message) -> bytes:
    """Turn a message into its bytes, the same for equal messages.

    Raises:
        LocalProtocolError: a field breaks a rule; the text names it.
    """
    try:
        document = _document(message)
        _message(document)
        payload = _ENCODER.encode(document).encode()
    except (ValueError, TypeError, RecursionError) as exc:
        raise LocalProtocolError(f"{type(message).__name__}: {exc}") from exc
    if len(payload) > MAX_NBYTES:
        raise LocalProtocolError(f"message of {len(payload)} bytes exceeds the limit of {MAX_NBYTES}")
    return payload


class ShareTemplate:
    """What all shares of a sequence have in common: checked and encoded once.

    Attributes:
        layout: as of `ShareHeader`, like the others.
        semantics: likewise.
        semantics_digest: the same, 32 bytes.
        params: likewise.
        regions: likewise.
        ledger: likewise.

    Raises:
        LocalProtocolError: a field breaks a rule; the text names it.
    """

    def __init__(
        self,
        *,
        layout: str,
        semantics: str,
        params: Mapping[str, Scalar],
        regions: tuple[RegionEntry, ...],
        ledger: LedgerEntry,
    ) -> None:
        self.layout = layout
        self.semantics = semantics
        self.params = params
        self.regions = regions
        self.ledger = ledger
        header = self.header(share_id=1, cells=(), expires_ms=0)
        encode(header)  # checks all of it
        self.semantics_digest = bytes.fromhex(semantics)
        # the order of the keys, as of every message, is ascending
        common = ("layout", "ledger", "params", "protocol", "regions", "semantics")
        self._common = _members(_document(header), *common)

    def header(
        self, *, share_id: int, cells: tuple[tuple[tuple[int, int], ...], ...], expires_ms: int
    ) -> ShareHeader:
        """Return the header of one share."""
        return ShareHeader(
            share_id=share_id,
            layout=self.layout,
            semantics=self.semantics,
            params=self.params,
            regions=self.regions,
            ledger=self.ledger,
            cells=cells,
            expires_ms=expires_ms,
        )

    def encode(self, share_id: int, cells: tuple[tuple[tuple[int, int], ...], ...], expires_ms: int) -> bytes:
        """Return what `wire.encode` returns for the header of one share, at less cost.

        Args:
            share_id: in range, as all of it: nothing is checked here but the length.
            cells: by cache, ranges [from, to).
            expires_ms: milliseconds.

        Raises:
            LocalProtocolError: the message is too long.
        """
        listed = ",".join(["[" + ",".join([f"[{a},{b}]" for a, b in cache]) + "]" for cache in cells])
        text = f'{{"cells":[{listed}],"expires_ms":{expires_ms},{self._common},"share_id":{share_id}}}'
        payload = text.encode()
        if len(payload) > MAX_NBYTES:
            raise LocalProtocolError(f"message of {len(payload)} bytes exceeds the limit of {MAX_NBYTES}")
        return payload


def _members(document: dict[str, Any], *keys: str) -> str:
    """Encode some members of an object, without its braces."""
    return _ENCODER.encode({key: document[key] for key in keys})[1:-1]


def decode(payload: bytes) -> Message:
    """Turn bytes from a peer into a message.

    Raises:
        RemoteProtocolError: they are none, for whatever reason; the text names the field.
    """
    if len(payload) > MAX_NBYTES:
        raise RemoteProtocolError(f"a header of {len(payload)} bytes exceeds the limit of {MAX_NBYTES}")
    try:
        text = payload.decode()
        document = json.loads(
            text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant
        )
        if "\\u" in text:
            # Python reads an escaped lone surrogate into a str that no UTF-8 can carry.
            json.dumps(document, ensure_ascii=False).encode()
        return _message(document)
    except RecursionError as exc:
        raise RemoteProtocolError("header is nested too deeply") from exc
    except ValueError as exc:  # _Invalid, JSONDecodeError, UnicodeError, an int of too many digits
        raise RemoteProtocolError(f"header: {exc}") from exc


def check_descriptors(header: ShareHeader | FrozenHeader, n_fds: int) -> None:
    """Check that a header uses every descriptor that came with it, and no other.

    Raises:
        DescriptorError: it does not.
    """
    used = {region.fd for region in header.regions} | {header.ledger.fd}
    if isinstance(header, FrozenHeader):
        used.add(header.tokens.fd)
    if used != set(range(n_fds)):
        raise DescriptorError(f"header uses descriptors {sorted(used)}, but {n_fds} came with it")


# -- JSON both ways --------------------------------------------------------------------------


class _Invalid(ValueError):
    """A field that breaks a rule; who broke it depends on the direction."""


def _document(message: Message) -> dict[str, Any]:
    if isinstance(message, ShareHeader):
        return {
            "protocol": message.protocol,
            "share_id": message.share_id,
            "layout": message.layout,
            "semantics": message.semantics,
            "params": dict(message.params),
            "regions": [vars(region) for region in message.regions],
            "ledger": vars(message.ledger),
            "cells": [[list(pair) for pair in cache] for cache in message.cells],
            "expires_ms": message.expires_ms,
        }
    if isinstance(message, JobHeader):
        return {
            "protocol": message.protocol,
            "job": {"share_id": message.share_id, "tokens": list(message.tokens)},
        }
    if isinstance(message, Progress):
        return {
            "protocol": message.protocol,
            "progress": {
                "share_id": message.share_id,
                "n_filled": message.n_filled,
                "n_tokens": message.n_tokens,
            },
        }
    if isinstance(message, Outcome):
        return {
            "protocol": message.protocol,
            "outcome": {"share_id": message.share_id, "ok": message.ok, "error": message.error},
        }
    if isinstance(message, FrozenHeader):
        body = vars(message) | {
            "params": dict(message.params),
            "regions": [vars(region) for region in message.regions],
            "ledger": vars(message.ledger),
            "tokens": vars(message.tokens),
        }
        return {"protocol": body.pop("protocol"), "frozen": body}
    if isinstance(message, PrefixRequest):
        return {"protocol": message.protocol, "prefix": {"op": message.op, "name": message.name}}
    return {"protocol": message.protocol, "prefixes": [vars(entry) for entry in message.prefixes]}


def _message(document: object) -> Message:
    top = _object(document, "message")
    # The version comes first: all that follows is what this version means.
    protocol = _integer(top, "protocol", "", 0, _INT64_END)
    if protocol != PROTOCOL:
        raise _Invalid(f"protocol is {protocol}, this side speaks {PROTOCOL}")
    kinds = [key for key in _BODIES if key in top]
    if len(kinds) != 1:
        raise _Invalid(f"needs exactly one of {', '.join(_BODIES)}; found {kinds}")
    kind = kinds[0]
    if kind == "regions":
        return _share_header(top)
    if kind == "prefixes":
        items = enumerate(_list(top, "prefixes", ""))
        return PrefixList(prefixes=tuple(_prefix_entry(item, f"prefixes[{i}]") for i, item in items))
    body = _object(top[kind], kind)
    if kind == "frozen":
        return _frozen_header(body)
    if kind == "prefix":
        return _prefix_request(body)
    where = kind + "."
    share_id = _integer(body, "share_id", where, 1, _SHARE_ID_END)
    if kind == "job":
        tokens = _list(body, "tokens", where)
        if not tokens:
            raise _Invalid("job.tokens is empty")
        for i, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < _TOKEN_END:
                raise _Invalid(f"job.tokens[{i}] is {_shown(token)}, not a token id")
        return JobHeader(share_id=share_id, tokens=tuple(tokens))
    if kind == "progress":
        n_tokens = _integer(body, "n_tokens", where, 1, _TOKEN_END)
        n_filled = _integer(body, "n_filled", where, 0, n_tokens + 1)
        return Progress(share_id=share_id, n_filled=n_filled, n_tokens=n_tokens)
    ok, error = _member(body, "ok", where), _member(body, "error", where)
    if not isinstance(ok, bool):
        raise _Invalid(f"outcome.ok is {_shown(ok)}, not true or false")
    if not (error is None if ok else isinstance(error, str)):
        raise _Invalid(f"outcome.error is {_shown(error)}; it must be null if ok, else a string")
    return Outcome(share_id=share_id, ok=ok, error=error)


def _share_header(top: dict[str, Any]) -> ShareHeader:
    regions = _regions(top, "")
    return ShareHeader(
        share_id=_integer(top, "share_id", "", 1, _SHARE_ID_END),
        layout=_digest(top, "layout", ""),
        semantics=_digest(top, "semantics", ""),
        params=_params(top, ""),
        regions=regions,
        ledger=_apart(top, "ledger", "", regions),
        cells=tuple(_cells(item, f"cells[{i}]") for i, item in enumerate(_list(top, "cells", ""))),
        expires_ms=_integer(top, "expires_ms", "", 0, _SHARE_ID_END),
    )


def _frozen_header(body: dict[str, Any]) -> FrozenHeader:
    where = "frozen."
    regions = _regions(body, where)
    ledger, tokens = (_apart(body, key, where, regions) for key in ("ledger", "tokens"))
    if ledger.fd == tokens.fd:
        raise _Invalid(f"frozen.tokens.fd is {tokens.fd}, which the ledger uses")
    return FrozenHeader(
        name=_name(body, where),
        prefix_id=_integer(body, "prefix_id", where, 1, _SHARE_ID_END),
        n_tokens=_integer(body, "n_tokens", where, 1, _TOKEN_END),
        layout=_digest(body, "layout", where),
        semantics=_digest(body, "semantics", where),
        params=_params(body, where),
        regions=regions,
        ledger=ledger,
        tokens=tokens,
    )


def _prefix_request(body: dict[str, Any]) -> PrefixRequest:
    op, name = _member(body, "op", "prefix."), _member(body, "name", "prefix.")
    if op not in PREFIX_OPS:
        raise _Invalid(f"prefix.op is {_shown(op)}, known are {', '.join(PREFIX_OPS)}")
    if op == "drop" or (op == "get" and name is not None):
        name = _name(body, "prefix.")
    elif name is not None:
        raise _Invalid(f"prefix.name is {_shown(name)}; it must be null for {op}")
    return PrefixRequest(op=op, name=name)


def _prefix_entry(item: object, name: str) -> PrefixEntry:
    entry, where = _object(item, name), name + "."
    return PrefixEntry(
        name=_name(entry, where),
        prefix_id=_integer(entry, "prefix_id", where, 1, _SHARE_ID_END),
        n_tokens=_integer(entry, "n_tokens", where, 1, _TOKEN_END),
        nbytes=_integer(entry, "nbytes", where, 0, _INT64_END),
        layout=_digest(entry, "layout", where),
        semantics=_digest(entry, "semantics", where),
        n_reads=_integer(entry, "n_reads", where, 0, _INT64_END),
    )


def _name(entry: dict[str, Any], where: str) -> str:
    value = _member(entry, "name", where)
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _Invalid(f"{where}name is {_shown(value)}, not 1 to 128 characters out of A-Z a-z 0-9 . _ -")
    return value


def _params(entry: dict[str, Any], where: str) -> dict[str, Scalar]:
    params = _object(_member(entry, "params", where), f"{where}params")
    for key, value in params.items():
        if not _is_scalar(value):
            raise _Invalid(f"{where}params.{_shown(key)} is {_shown(value)}, not a scalar")
    return params


def _regions(entry: dict[str, Any], where: str) -> tuple[RegionEntry, ...]:
    items = enumerate(_list(entry, "regions", where))
    regions = tuple(_region(item, f"{where}regions[{i}]") for i, item in items)
    if not regions:
        raise _Invalid(f"{where}regions is empty")
    _check_disjoint(regions, where)
    return regions


def _apart(entry: dict[str, Any], key: str, where: str, regions: Sequence[RegionEntry]) -> LedgerEntry:
    """Read a descriptor and a size; no region may use the same."""
    name = where + key
    inner = _object(_member(entry, key, where), name)
    fd = _integer(inner, "fd", name + ".", 0, MAX_FDS)
    if any(region.fd == fd for region in regions):
        raise _Invalid(f"{name}.fd is {fd}, which a region uses")
    return LedgerEntry(fd=fd, size=_integer(inner, "size", name + ".", 1, _INT64_END))


def _region(item: object, name: str) -> RegionEntry:
    entry, where = _object(item, name), name + "."
    kind = _member(entry, "kind", where)
    if kind not in KINDS:
        raise _Invalid(f"{where}kind is {_shown(kind)}, known are {', '.join(KINDS)}")
    offset = _integer(entry, "offset", where, 0, _INT64_END)
    size = _integer(entry, "size", where, 1, _INT64_END)
    if offset + size >= _INT64_END:
        raise _Invalid(f"{where}offset + size is {offset + size}, beyond 2**63 - 1")
    return RegionEntry(
        fd=_integer(entry, "fd", where, 0, MAX_FDS),
        offset=offset,
        size=size,
        layout=_member(entry, "layout", where),
        kind=kind,
    )


def _check_disjoint(regions: Sequence[RegionEntry], where: str) -> None:
    ranges: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for i, region in enumerate(regions):
        ranges[region.fd].append((region.offset, region.offset + region.size, i))
    for of_one_fd in ranges.values():
        for (_, end, i), (start, _, j) in pairwise(sorted(of_one_fd)):
            if start < end:
                raise _Invalid(
                    f"{where}regions[{i}] and {where}regions[{j}] overlap in descriptor {regions[i].fd}"
                )


def _cells(item: object, name: str) -> tuple[tuple[int, int], ...]:
    if not isinstance(item, list):
        raise _Invalid(f"{name} is {_shown(item)}, not a list")
    end = 0
    for i, pair in enumerate(item):
        if not (
            isinstance(pair, list)
            and len(pair) == 2
            and all(type(cell) is int for cell in pair)
            and end <= pair[0] < pair[1] <= _CELL_END
        ):
            raise _Invalid(f"{name}[{i}] is {_shown(pair)}, not a [from, to) range beyond the one before")
        end = pair[1]
    return tuple((first, last) for first, last in item)


def _is_scalar(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return -_INT64_END <= value < _INT64_END
    return value is None or isinstance(value, str)


def _member(entry: dict[str, Any], key: str, where: str) -> Any:
    if key not in entry:
        raise _Invalid(f"{where}{key} is missing")
    return entry[key]


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Invalid(f"{name} is {_shown(value)}, not an object")
    return value


def _list(entry: dict[str, Any], key: str, where: str) -> list[Any]:
    value = _member(entry, key, where)
    if not isinstance(value, list):
        raise _Invalid(f"{where}{key} is {_shown(value)}, not a list")
    return value


def _integer(entry: dict[str, Any], key: str, where: str, low: int, end: int) -> int:
    value = _member(entry, key, where)
    # type(), because bool is an int to isinstance().
    if type(value) is not int or not low <= value < end:
        raise _Invalid(f"{where}{key} is {_shown(value)}, not an integer in [{low}, {end})")
    return value


def _digest(entry: dict[str, Any], key: str, where: str) -> str:
    value = _member(entry, key, where)
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _Invalid(f"{where}{key} is {_shown(value)}, not 64 lower-case hexadecimal digits")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) != len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise _Invalid(f"key {_shown(twice)} occurs twice")
    return entry


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _Invalid(f"number {text[:40]} is out of range")
    return value


def _no_constant(text: str) -> NoReturn:
    raise _Invalid(f"{text} is no JSON")


def _shown(value: object) -> str:
    return reprlib.repr(value)  # a peer's value may be a megabyte long


# -- the life of a share ---------------------------------------------------------------------


class ShareState(enum.Enum):
    """Where a share stands, as its decoder sees it."""

    ISSUED = "issued"
    FILLING = "filling"
    COMPLETE = "complete"
    ADOPTED = "adopted"
    FAILED = "failed"
    RELEASED = "released"
    EXPIRED = "expired"

    @property
    def live(self) -> bool:
        """Whether the share still holds its cells: something can follow."""
        return self is ShareState.ISSUED or self is ShareState.FILLING or self is ShareState.COMPLETE


_ENDS = frozenset({ShareState.FAILED, ShareState.RELEASED, ShareState.EXPIRED})

TRANSITIONS: Mapping[ShareState, frozenset[ShareState]] = {
    # A decoder looks at the ledger now and then, and may find a fast provider complete already.
    ShareState.ISSUED: _ENDS | {ShareState.FILLING, ShareState.COMPLETE},
    ShareState.FILLING: _ENDS | {ShareState.COMPLETE},
    ShareState.COMPLETE: _ENDS | {ShareState.ADOPTED},
    ShareState.ADOPTED: frozenset(),
    ShareState.FAILED: frozenset(),
    ShareState.RELEASED: frozenset(),
    ShareState.EXPIRED: frozenset(),
}


def advance(state: ShareState, new: ShareState) -> ShareState:
    """Return `new`, if a share may go there from `state`.

    Raises:
        LocalProtocolError: it may not.
    """
    if new not in TRANSITIONS[state]:
        raise LocalProtocolError(f"a share that is {state.value} cannot become {new.value}")
    return new
