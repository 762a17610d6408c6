"""Hypothesis strategies for what travels: layouts, share headers, what a ledger says.

Needs hypothesis, which is in the extra `test`; nothing else of this package imports this module.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvshare.layout import CacheLayout, Layout, RegionLayout, TensorLayout
from kvshare.testing.fakes import plain_layout
from kvshare.wire import LedgerEntry, RegionEntry, ShareHeader

__all__ = [
    "caches",
    "digests",
    "json_values",
    "layouts",
    "plain_layouts",
    "regions",
    "share_headers",
    "share_ids",
    "tensors",
    "token_lists",
]

_SIZES = st.integers(0, 2**63 - 1)
_NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
_FOUR = st.tuples(_SIZES, _SIZES, _SIZES, _SIZES)

share_ids = st.integers(1, 2**53 - 1)
"""What a decoder may draw."""

digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
"""Digests as they travel, 64 hexadecimal digits."""

token_lists = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=64)
"""Prompts."""

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=20,
)
"""Any JSON value."""

tensors = st.builds(
    TensorLayout,
    name=_NAMES,
    type=st.sampled_from(["f32", "f16", "bf16", "q8_0", "q4_0"]) | _NAMES,
    ne=_FOUR,
    nb=_FOUR,
    offset=_SIZES,
)
"""One tensor, not necessarily one that fits anywhere."""

regions = st.builds(RegionLayout, size=_SIZES, tensors=st.lists(tensors, max_size=4).map(tuple))
"""One region, likewise."""


def _cache(kind: str, size: int, attributes: dict[str, int | bool]) -> CacheLayout:
    return CacheLayout(kind, size, tuple(sorted(attributes.items())))


caches = st.builds(
    _cache,
    kind=st.sampled_from(["kv", "recurrent"]) | _NAMES,
    size=_SIZES,
    attributes=st.dictionaries(
        _NAMES.filter(lambda name: name not in ("kind", "size")), st.booleans() | st.integers(), max_size=6
    ),
)
"""The cell array of one cache."""

layouts = st.builds(
    Layout,
    abi=_SIZES,
    byte_order=st.sampled_from(["little", "big"]),
    caches=st.lists(caches, max_size=3).map(tuple),
    regions=st.lists(regions, max_size=3).map(tuple),
)
"""Layouts that can be written and read, whatever they describe."""

plain_layouts = st.builds(
    plain_layout,
    n_layer=st.integers(1, 3),
    n_embd=st.sampled_from([1, 2, 32, 64, 128]),
    kv_size=st.sampled_from([1, 2, 256, 512]),
    type=st.sampled_from(["f32", "f16", "bf16"]),
    v_trans=st.booleans(),
)
"""Layouts of caches that can be mapped and viewed."""

_CELLS = st.lists(st.integers(1, 2**16), max_size=6, unique=True).map(
    lambda ends: tuple(zip(*[iter(sorted(ends))] * 2, strict=False))
)


@st.composite
def share_headers(draw: st.DrawFn) -> ShareHeader:
    """Draw headers that `kvshare.wire.encode` takes."""
    n = draw(st.integers(1, 3))
    return ShareHeader(
        share_id=draw(share_ids),
        layout=draw(digests),
        semantics=draw(digests),
        params=draw(
            st.dictionaries(
                _NAMES, st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _NAMES, max_size=5
            )
        ),
        regions=tuple(
            RegionEntry(
                fd=i,
                offset=4096 * draw(st.integers(0, 2**20)),
                size=draw(st.integers(1, 2**40)),
                layout=draw(json_values),
                kind=draw(st.sampled_from(["memfd", "cuda-vmm", "dma-buf"])),
            )
            for i in range(n)
        ),
        ledger=LedgerEntry(fd=n, size=draw(st.integers(1, 2**40))),
        cells=tuple(draw(st.lists(_CELLS, max_size=3))),
        expires_ms=draw(st.integers(0, 2**53 - 1)),
    )
