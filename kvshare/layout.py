"""What the bytes of a cache are, and what they mean: address-free descriptions and their digests.

A *layout* describes the caches of a context and the tensors in their regions. It comes from the
real tensors, never from flags, and two sides may share memory only if their layouts are equal.
*Semantics* describe the model, its adapters and the position encoding. Both have a canonical JSON
text (keys in ascending order, no white space); its SHA-256 is the digest that travels.

*Source*: `llama-kv-share-identity.cpp` of the patch series writes the same texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.errors import LayoutMismatchError, RemoteProtocolError, SemanticsMismatchError

Json = Any
"""A JSON value as `json.loads` returns it."""


def canonical_json(value: Json) -> bytes:
    """Serialize a JSON value the one way in which it is hashed."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    ).encode()


@dataclass(frozen=True)
class TensorLayout:
    """One cache tensor in a region.

    Attributes:
        name: as llama.cpp names it, `cache_k_l3`.
        type: ggml type name, `f16`.
        ne: elements per dimension in ggml order, for K `[n_embd_k_gqa, kv_size, n_stream, 1]`.
        nb: strides of the dimensions in bytes.
        offset: start in the region, in bytes.
    """

    name: str
    type: str
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.nb[3] * self.ne[3] if all(self.ne) else 0

    def to_json(self) -> Json:
        """Return the JSON object of the canonical text."""
        return {
            "name": self.name,
            "type": self.type,
            "ne": list(self.ne),
            "nb": list(self.nb),
            "offset": self.offset,
        }

    @classmethod
    def from_json(cls, value: Json) -> TensorLayout:
        """Read the JSON object of a peer; anything else raises `RemoteProtocolError`."""
        where = "tensor"
        return cls(
            name=_string(value, "name", where),
            type=_string(value, "type", where),
            ne=_four(value, "ne", where),
            nb=_four(value, "nb", where),
            offset=_count(value, "offset", where),
        )


@dataclass(frozen=True)
class RegionLayout:
    """The tensors in one region.

    Attributes:
        size: bytes of the region.
        tensors: in the order of their offsets.
    """

    size: int
    tensors: tuple[TensorLayout, ...]

    def to_json(self) -> Json:
        """Return the JSON object of the canonical text."""
        return {"size": self.size, "tensors": [tensor.to_json() for tensor in self.tensors]}


@dataclass(frozen=True)
class CacheLayout:
    """The cell array of one cache: a KV cache, or the states of recurrent layers.

    Attributes:
        kind: `kv` or `recurrent`.
        size: cells per stream; for `recurrent`, states.
        attributes: what else must agree: `n_stream`, `n_swa`, `swa_type`, `v_trans`, `rot_k`,
            `rot_v` of a KV cache, `n_rs_seq` of a recurrent one.
    """

    kind: str
    size: int
    attributes: tuple[tuple[str, int | bool], ...]

    @property
    def is_plain(self) -> bool:
        """Whether cells are positions: a KV cache with one stream and no sliding window."""
        return self.kind == "kv" and self.get("n_stream") == 1 and self.get("swa_type") == 0

    def get(self, name: str) -> int | bool | None:
        """Return an attribute, or None."""
        return dict(self.attributes).get(name)

    def to_json(self) -> Json:
        """Return the JSON object of the canonical text."""
        return {"kind": self.kind, "size": self.size, **dict(self.attributes)}

    @classmethod
    def from_json(cls, value: Json) -> CacheLayout:
        """Read the JSON object of a peer; anything else raises `RemoteProtocolError`."""
        kind, size = _string(value, "kind", "cache"), _count(value, "size", "cache")
        rest = {name: item for name, item in value.items() if name not in ("kind", "size")}
        for name, item in rest.items():
            if not isinstance(name, str) or not isinstance(item, int):
                raise RemoteProtocolError(f"cache.{name} is not a number")
        return cls(kind, size, tuple(sorted(rest.items())))


@dataclass(frozen=True)
class Layout:
    """What the bytes of the shared regions are.

    Attributes:
        abi: `LLAMA_KV_SHARE_ABI`.
        byte_order: `little` or `big`.
        caches: in the order in which the memory builds them.
        regions: in the order in which they are shared.
    """

    abi: int
    byte_order: str
    caches: tuple[CacheLayout, ...]
    regions: tuple[RegionLayout, ...]

    def canonical(self) -> bytes:
        """Return the text that is hashed."""
        return canonical_json(
            {
                "abi": self.abi,
                "byte_order": self.byte_order,
                "caches": [cache.to_json() for cache in self.caches],
                "regions": [region.to_json() for region in self.regions],
            }
        )

    def digest(self) -> str:
        """Return the SHA-256 of the canonical text, as 64 hex digits."""
        return hashlib.sha256(self.canonical()).hexdigest()

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read a canonical text.

        Raises:
            RemoteProtocolError: if it is something else.
        """
        return cls.from_json(_parse(text, "layout"))

    @classmethod
    def from_json(cls, value: Json) -> Layout:
        """Read the JSON object of the canonical text; anything else raises `RemoteProtocolError`."""
        regions = []
        for region in _list(value, "regions", "layout"):
            tensors = _list(region, "tensors", "region")
            regions.append(
                RegionLayout(
                    size=_count(region, "size", "region"),
                    tensors=tuple(TensorLayout.from_json(tensor) for tensor in tensors),
                )
            )
        return cls(
            abi=_count(value, "abi", "layout"),
            byte_order=_string(value, "byte_order", "layout"),
            caches=tuple(CacheLayout.from_json(cache) for cache in _list(value, "caches", "layout")),
            regions=tuple(regions),
        )

    @classmethod
    def from_parts(
        cls, params: Mapping[str, object], regions: Sequence[tuple[int, Json]], digest: str
    ) -> Layout:
        """Put the layout together that a share header carries in parts.

        Args:
            params: of the header; `abi`, `byte_order` and `caches` (a JSON text) are read.
            regions: size in bytes and tensor descriptions of each region.
            digest: of the header.

        Raises:
            RemoteProtocolError: the parts are malformed, or do not have this digest.
        """
        global _last
        parts = {
            "abi": _field(params, "abi", "params"),
            "byte_order": _field(params, "byte_order", "params"),
            "caches": _string(params, "caches", "params"),
            "regions": [{"size": size, "tensors": tensors} for size, tensors in regions],
        }
        if _last is not None and _last[:2] == (digest, parts):
            return _last[2]
        layout = cls.from_json(parts | {"caches": _parse(parts["caches"], "params.caches")})
        if layout.digest() != digest:
            raise RemoteProtocolError(
                f"the layout in the header has digest {layout.digest()}, the header says {digest}"
            )
        _last = digest, parts, layout
        return layout

    def require_equal(self, found: Layout) -> None:
        """Compare with the layout of this side, field by field.

        Args:
            found: the layout of this side; `self` is the one of the side that shares.

        Raises:
            LayoutMismatchError: naming the first field that differs.
        """
        difference = _first_difference(
            json.loads(self.canonical()), json.loads(found.canonical()), path="", order=("caches", "regions")
        )
        if difference is not None:
            raise LayoutMismatchError(
                *difference, hint="start both sides with the same cache parameters and the same model"
            )


# what was put together last: a warm provider gets the same parts with every share
_last: tuple[str, dict[str, Json], Layout] | None = None


def require_equal_semantics(expected: str, found: str) -> None:
    """Compare two canonical semantics texts, field by field.

    Args:
        expected: text of the side that shares, as it came from the peer.
        found: text of this side.

    Raises:
        SemanticsMismatchError: naming the first field that differs, `model.weights`.
        RemoteProtocolError: if the peer's text is not JSON.
    """
    if expected == found:
        return
    difference = _first_difference(_parse(expected, "semantics"), json.loads(found), path="", order=("arch",))
    field, expected_value, found_value = difference or ("text", expected, found)
    raise SemanticsMismatchError(
        field,
        expected_value,
        found_value,
        hint="use the same model file, adapters and RoPE settings on both sides",
    )


def _first_difference(
    expected: Json, found: Json, *, path: str, order: Sequence[str] = ()
) -> tuple[str, Json, Json] | None:
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted(expected.keys() | found.keys(), key=lambda key: (key not in order, key))
        for key in keys:
            name = f"{path}.{key}" if path else key
            if key not in expected or key not in found:
                return name, expected.get(key), found.get(key)
            difference = _first_difference(expected[key], found[key], path=name)
            if difference is not None:
                return difference
        return None
    if isinstance(expected, list) and isinstance(found, list):
        for index, (a, b) in enumerate(zip(expected, found, strict=False)):
            difference = _first_difference(a, b, path=f"{path}[{index}]")
            if difference is not None:
                return difference
        return None if len(expected) == len(found) else (f"len({path})", len(expected), len(found))
    # a JSON true is not a 1
    return None if type(expected) is type(found) and expected == found else (path, expected, found)


def _parse(text: str, where: str) -> Json:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"{where} is not JSON") from error


def _field(value: Json, name: str, where: str) -> Json:
    if not isinstance(value, Mapping) or name not in value:
        raise RemoteProtocolError(f"{where}.{name} is missing")
    return value[name]


def _string(value: Json, name: str, where: str) -> str:
    item = _field(value, name, where)
    if not isinstance(item, str):
        raise RemoteProtocolError(f"{where}.{name} is not a string")
    return item


def _list(value: Json, name: str, where: str) -> list[Json]:
    item = _field(value, name, where)
    if not isinstance(item, list):
        raise RemoteProtocolError(f"{where}.{name} is not a list")
    return item


def _is_count(item: Json) -> bool:
    return isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63


def _count(value: Json, name: str, where: str) -> int:
    item = _field(value, name, where)
    if not _is_count(item):
        raise RemoteProtocolError(f"{where}.{name} is not a size")
    return int(item)


def _four(value: Json, name: str, where: str) -> tuple[int, int, int, int]:
    item = _list(value, name, where)
    if len(item) != 4 or not all(_is_count(each) for each in item):
        raise RemoteProtocolError(f"{where}.{name} is not four sizes")
    return (item[0], item[1], item[2], item[3])
