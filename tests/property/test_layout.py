"""Layouts: one form, one digest, and a name for whatever differs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvshare.errors import LayoutMismatchError, RemoteProtocolError, SemanticsMismatchError
from kvshare.layout import Layout, canonical_json, require_equal_semantics
from kvshare.testing import strategies


@given(strategies.layouts)
def test_round_trip(layout: Layout) -> None:
    text = layout.canonical()
    again = Layout.parse(text.decode())
    assert again == layout
    assert again.canonical() == text
    assert again.digest() == layout.digest()
    layout.require_equal(again)


@given(strategies.json_values)
def test_canonical_json_is_canonical(value: Any) -> None:
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text


def leaves(value: Any, path: str = "") -> list[tuple[str, list[Any]]]:
    """Return the dotted name and the steps of each leaf of a JSON value."""
    if isinstance(value, dict):
        children = [(f"{path}.{key}" if path else key, key, child) for key, child in value.items()]
    elif isinstance(value, list):
        children = [(f"{path}[{i}]", i, child) for i, child in enumerate(value)]
    else:
        return [(path, [])]
    found = []
    for name, step, child in children:
        found += [(at, [step, *steps]) for at, steps in leaves(child, name)]
    return found


@given(strategies.layouts | strategies.plain_layouts, st.data())
def test_one_changed_field_is_named(layout: Layout, data: st.DataObject) -> None:
    document = json.loads(layout.canonical())
    name, steps = data.draw(st.sampled_from(leaves(document)))
    at = document
    for step in steps[:-1]:
        at = at[step]
    old = at[steps[-1]]
    if isinstance(old, bool):
        new: Any = not old
    elif isinstance(old, int):
        new = data.draw(st.integers(0, 2**63 - 1).filter(lambda number: number != old))
    else:
        new = data.draw(st.text(st.characters(codec="utf-8"), max_size=5).filter(lambda text: text != old))
    at[steps[-1]] = new
    found = Layout.parse(json.dumps(document))
    assert found.digest() != layout.digest()
    with pytest.raises(LayoutMismatchError) as error:
        layout.require_equal(found)
    assert (error.value.field, error.value.expected, error.value.found) == (name, old, new)


@given(strategies.layouts, strategies.layouts)
def test_equal_digests_are_equal_layouts(a: Layout, b: Layout) -> None:
    assert (a.digest() == b.digest()) == (a.canonical() == b.canonical())
    if a.canonical() == b.canonical():
        a.require_equal(b)
    else:
        with pytest.raises(LayoutMismatchError) as error:
            a.require_equal(b)
        assert error.value.field


@given(st.text() | strategies.json_values.map(json.dumps))
@example("[" * 200_000)
@example('{"abi":' * 200_000)
@example("9" * 10_000)
@example('{"abi":' + "9" * 10_000 + "}")
@example('"\\ud800"')
@example("NaN")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        layout = Layout.parse(text)
    except RemoteProtocolError:
        return
    assert Layout.parse(layout.canonical().decode()) == layout


@given(strategies.layouts, st.data())
def test_a_part_of_a_layout_that_is_something_else(layout: Layout, data: st.DataObject) -> None:
    """Any value anywhere in an otherwise good document: read truthfully or refused."""
    document = json.loads(layout.canonical())
    _, steps = data.draw(st.sampled_from(leaves(document)))
    steps = steps[: data.draw(st.integers(1, len(steps)))]
    at = document
    for step in steps[:-1]:
        at = at[step]
    at[steps[-1]] = data.draw(strategies.json_values)
    try:
        read = Layout.from_json(document)
    except RemoteProtocolError:
        return
    assert Layout.parse(read.canonical().decode()) == read


@given(
    st.dictionaries(st.sampled_from(["abi", "byte_order", "caches", "x"]), strategies.json_values),
    st.lists(st.tuples(st.integers(), strategies.json_values), max_size=3),
    strategies.digests,
)
@example({"abi": 1, "byte_order": "little", "caches": "[" * 200_000}, [], "0" * 64)
@example({"abi": 1, "byte_order": "little", "caches": "9" * 10_000}, [], "0" * 64)
def test_any_header_parts_are_refused(
    params: dict[str, Any], regions: list[tuple[int, Any]], digest: str
) -> None:
    """A digest of 32 random bytes is never the right one."""
    with pytest.raises(RemoteProtocolError):
        Layout.from_parts(params, regions, digest)


@given(st.text(), strategies.json_values.map(lambda value: canonical_json(value).decode()))
@example("[" * 200_000, "{}")
@example("9" * 10_000, "{}")
@example("{}", "{}")
def test_any_semantics_are_equal_or_refused(expected: str, found: str) -> None:
    if expected == found:
        require_equal_semantics(expected, found)
        return
    with pytest.raises((RemoteProtocolError, SemanticsMismatchError)):
        require_equal_semantics(expected, found)


@given(strategies.json_values, strategies.json_values)
def test_semantics_that_differ_are_told_apart(a: Any, b: Any) -> None:
    expected, found = canonical_json(a).decode(), canonical_json(b).decode()
    assume(expected != found)
    with pytest.raises(SemanticsMismatchError):
        require_equal_semantics(expected, found)
