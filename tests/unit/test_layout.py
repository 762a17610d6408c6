"""Layouts: what they are made of, and what is said when two differ."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest

from kvshare.errors import LayoutMismatchError, RemoteProtocolError, SemanticsMismatchError
from kvshare.layout import CacheLayout, Layout, canonical_json, require_equal_semantics
from kvshare.testing.fakes import plain_layout

LAYOUT = plain_layout()

# Written by hand from the description in the C header; the digest is the one of these bytes.
TEXT = (
    b'{"abi":1,"byte_order":"little","caches":[{"kind":"kv","n_stream":1,"n_swa":0,"rot_k":false,'
    b'"rot_v":false,"size":4,"swa_type":0,"v_trans":true}],"regions":[{"size":32,"tensors":['
    b'{"name":"cache_k_l0","nb":[2,4,16,16],"ne":[2,4,1,1],"offset":0,"type":"f16"},'
    b'{"name":"cache_v_l0","nb":[2,4,16,16],"ne":[2,4,1,1],"offset":16,"type":"f16"}]}]}'
)


def test_the_canonical_text() -> None:
    layout = plain_layout(n_layer=1, n_embd=2, kv_size=4, v_trans=True)
    assert layout.canonical() == TEXT
    assert layout.digest() == hashlib.sha256(TEXT).hexdigest()
    assert Layout.parse(TEXT.decode()) == layout


@pytest.mark.parametrize("value", [{"b": 1, "a": [True, None, "é", 1.5]}, [], "\ud7ff", 0])
def test_canonical_json_has_one_form(value: object) -> None:
    text = canonical_json(value)
    assert text == canonical_json(json.loads(text))
    assert text.isascii()
    assert b" " not in text


def test_canonical_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical_json(float("nan"))


def test_what_a_plain_cache_is() -> None:
    assert LAYOUT.caches[0].is_plain
    for change in ({"n_stream": 2}, {"swa_type": 1}):
        attributes = {**dict(LAYOUT.caches[0].attributes), **change}
        assert not CacheLayout("kv", 512, tuple(sorted(attributes.items()))).is_plain
    assert not CacheLayout("recurrent", 4, (("n_rs_seq", 0),)).is_plain
    assert LAYOUT.caches[0].get("nothing") is None


def test_nbytes() -> None:
    tensor = LAYOUT.regions[0].tensors[0]
    assert tensor.nbytes == 64 * 2 * 512
    assert dataclasses.replace(tensor, ne=(0, 512, 1, 1)).nbytes == 0


# -- differences ---------------------------------------------------------------------------------


def changed(path: str, value: object) -> Layout:
    """Return the layout with one value of its JSON replaced."""
    document = json.loads(LAYOUT.canonical())
    *where, last = path.replace("[", ".[").split(".")
    at = document
    for step in where:
        at = at[int(step[1:-1])] if step.startswith("[") else at[step]
    at[int(last[1:-1]) if last.startswith("[") else last] = value
    return Layout.parse(json.dumps(document))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("abi", 2),
        ("byte_order", "big"),
        ("caches[0].kind", "recurrent"),
        ("caches[0].size", 1024),
        ("caches[0].n_stream", 4),
        ("caches[0].rot_k", True),
        ("caches[0].v_trans", True),
        ("regions[0].size", 1),
        ("regions[0].tensors[0].name", "cache_k_l9"),
        ("regions[0].tensors[3].type", "q8_0"),
        ("regions[0].tensors[1].ne[0]", 128),
        ("regions[0].tensors[1].nb[3]", 8),
        ("regions[0].tensors[2].offset", 4096),
    ],
)
def test_a_difference_is_named(path: str, value: object) -> None:
    found = changed(path, value)
    with pytest.raises(LayoutMismatchError) as error:
        LAYOUT.require_equal(found)
    assert (error.value.field, error.value.found) == (path, value)
    assert error.value.expected not in (value, None)
    assert path in str(error.value)
    assert error.value.hint
    assert found.digest() != LAYOUT.digest()


def test_a_missing_tensor_is_named() -> None:
    region = LAYOUT.regions[0]
    shorter = dataclasses.replace(LAYOUT, regions=(dataclasses.replace(region, tensors=region.tensors[:-1]),))
    with pytest.raises(LayoutMismatchError) as error:
        LAYOUT.require_equal(shorter)
    assert (error.value.field, error.value.expected, error.value.found) == ("len(regions[0].tensors)", 4, 3)


def test_a_missing_attribute_is_named() -> None:
    cache = LAYOUT.caches[0]
    fewer = dataclasses.replace(cache, attributes=tuple(a for a in cache.attributes if a[0] != "rot_k"))
    with pytest.raises(LayoutMismatchError) as error:
        LAYOUT.require_equal(dataclasses.replace(LAYOUT, caches=(fewer,)))
    assert (error.value.field, error.value.expected, error.value.found) == ("caches[0].rot_k", False, None)


def test_what_is_named_first() -> None:
    """The cause (a cache's own size), not one of its many consequences."""
    with pytest.raises(LayoutMismatchError) as error:
        LAYOUT.require_equal(plain_layout(kv_size=1024))
    assert error.value.field == "caches[0].size"


def test_true_is_not_one() -> None:
    with pytest.raises(LayoutMismatchError):
        LAYOUT.require_equal(changed("caches[0].rot_k", 0))


def test_equal_layouts() -> None:
    LAYOUT.require_equal(plain_layout())


# -- from a peer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        "{}",
        "[" * 100_000,
        "1" * 5_000,
        '{"abi":' + "1" * 5_000 + "}",
        TEXT.decode().replace('"abi":1', '"abi":true'),
        TEXT.decode().replace('"abi":1', '"abi":-1'),
        TEXT.decode().replace('"abi":1', '"abi":9223372036854775808'),
        TEXT.decode().replace('"abi":1', '"abi":1.0'),
        TEXT.decode().replace('"ne":[2,4,1,1]', '"ne":[2,4,1]'),
        TEXT.decode().replace('"ne":[2,4,1,1]', '"ne":[2,4,1,"1"]'),
        TEXT.decode().replace('"rot_k":false', '"rot_k":null'),
        TEXT.decode().replace('"rot_k":false', '"rot_k":[]'),
        TEXT.decode().replace('"kind":"kv"', '"kind":1'),
        TEXT.decode().replace('"tensors":', '"other":'),
    ],
    ids=range(18),
)
def test_a_broken_text(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        Layout.parse(text)


def test_the_parts_of_a_header() -> None:
    params: dict[str, object] = {
        "abi": 1,
        "byte_order": "little",
        "caches": canonical_json([cache.to_json() for cache in LAYOUT.caches]).decode(),
    }
    regions = [(region.size, [tensor.to_json() for tensor in region.tensors]) for region in LAYOUT.regions]
    assert Layout.from_parts(params, regions, LAYOUT.digest()) == LAYOUT
    with pytest.raises(RemoteProtocolError, match="digest"):
        Layout.from_parts(params, regions, "0" * 64)
    for name in params:
        with pytest.raises(RemoteProtocolError, match=name):
            Layout.from_parts({k: v for k, v in params.items() if k != name}, regions, LAYOUT.digest())
    with pytest.raises(RemoteProtocolError, match="caches"):
        Layout.from_parts({**params, "caches": "["}, regions, LAYOUT.digest())


# -- semantics -----------------------------------------------------------------------------------


def test_semantics() -> None:
    text = '{"arch":"llama","model":{"hparams":"a","weights":"b"},"upstream":"c"}'
    require_equal_semantics(text, text)
    for old, new, field in (
        ('"b"', '"x"', "model.weights"),
        ('"c"', '"x"', "upstream"),
        ('"llama"', '"qwen2"', "arch"),
    ):
        with pytest.raises(SemanticsMismatchError) as error:
            require_equal_semantics(text, text.replace(old, new))
        assert error.value.field == field
        assert error.value.hint


def test_the_architecture_is_named_first() -> None:
    with pytest.raises(SemanticsMismatchError) as error:
        require_equal_semantics('{"adapters":[],"arch":"a"}', '{"adapters":[1],"arch":"b"}')
    assert error.value.field == "arch"


def test_other_text_of_the_same_semantics_is_refused() -> None:
    """The digests differ, so something does; never an equality that was not shown."""
    with pytest.raises(SemanticsMismatchError):
        require_equal_semantics('{"a": 1}', '{"a":1}')


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 5_000])
def test_semantics_that_are_no_json(text: str) -> None:
    with pytest.raises((RemoteProtocolError, SemanticsMismatchError)):
        require_equal_semantics(text, "{}")


def test_parts_that_came_before() -> None:
    """The last layout is kept; what differs from it is looked at as if nothing had come before."""
    other = dataclasses.replace(LAYOUT, abi=LAYOUT.abi + 1)

    def parts(layout: Layout) -> tuple[dict[str, object], list[tuple[int, Any]], str]:
        caches = canonical_json([cache.to_json() for cache in layout.caches]).decode()
        params = {"abi": layout.abi, "byte_order": layout.byte_order, "caches": caches}
        regions = [(each.size, [tensor.to_json() for tensor in each.tensors]) for each in layout.regions]
        return params, regions, layout.digest()

    for _ in range(2):
        first = Layout.from_parts(*parts(LAYOUT))
        assert first == LAYOUT
        assert Layout.from_parts(*parts(LAYOUT)) is first
        params, regions, digest = parts(LAYOUT)
        with pytest.raises(RemoteProtocolError):
            Layout.from_parts(params, regions, other.digest())
        with pytest.raises(RemoteProtocolError):
            Layout.from_parts(params | {"abi": other.abi}, regions, digest)
        assert Layout.from_parts(*parts(other)) == other
