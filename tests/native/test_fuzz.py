"""Mutated metadata into real contexts of every kind of memory, and that the fuzzer sees what goes wrong."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare.errors import LedgerError
from kvshare.testing import fuzz, fuzz_blob

CORPUS = Path(__file__).parents[1] / "corpus"

pytestmark = pytest.mark.native


@pytest.mark.slow
def test_mutations(archs_path: Path, tmp_path: Path) -> None:
    report = fuzz.fuzz(fuzz_blob.blob_target(archs_path), seed=11, inputs=700, failures=tmp_path)
    assert report.failures == []
    assert report.inputs == 700
    assert report.outcomes["same"] > 0
    refusals = [outcome for outcome in report.outcomes if outcome.startswith("Ledger")]
    assert len(refusals) > 10


def test_corpus(archs_path: Path, tmp_path: Path) -> None:
    """What is right, and what means the same, is adopted: else the corpus is of another layout."""
    same = [*CORPUS.glob("blob/*-right"), *CORPUS.glob("blob/*-same-*")]
    report = fuzz.fuzz(fuzz_blob.blob_target(archs_path), seed=1, inputs=0, corpus=CORPUS, failures=tmp_path)
    assert report.failures == []
    assert report.outcomes["same"] == len(same) > len(fuzz_blob.CASES)
    assert report.inputs == len([*CORPUS.glob("blob/*")]) > len(same)


def test_every_case_has_fields(archs_path: Path) -> None:
    """The structure of a blob is found: its extents and the cells of each cache."""
    check = fuzz_blob.BlobCheck(str(archs_path))
    try:
        seeds = {fuzz_blob.parse_input(seed)[0]: fuzz_blob.parse_input(seed)[2] for seed in check.seeds()}
    finally:
        check.close()
    for case in fuzz_blob.CASES:
        fields = fuzz_blob.blob_fields(seeds[case.name])
        values = {
            name: [fuzz.get(seeds[case.name], *place) for place in places] for name, places in fields.items()
        }
        has_states = case.name in ("recurrent", "hybrid", "hybrid-unified", "tokens")
        assert ("state.pos" in fields) == has_states
        assert set(values.get("state.pos", [])) <= {case.n_tokens - 1}
        if case.name != "recurrent":
            positions: set[int] = set()
            for first, n in zip(values["run.pos"], values["run.n"], strict=True):
                positions |= set(range(first, first + n))
            n_window = min(case.n_tokens, 256)
            assert set(range(case.n_tokens - n_window, case.n_tokens)) <= positions
        assert len(fields["extent.size"]) == fuzz.get(seeds[case.name], 8, 8) > 0
        assert ("cell.token" in fields) == (case.name in ("positions", "tokens"))


# -- planted faults: this module is imported in the child ----------------------------------------


class _Library:
    """The library, with an adopt of another kind."""

    def __init__(self, handoff: Any, adopt: Callable[..., Any]) -> None:
        self._real = handoff._lib
        self._handoff = handoff
        self._adopt = adopt

    def __getattr__(self, name: str) -> Any:
        if name == "llama_kv_share_adopt":
            return lambda *arguments: self._adopt(self._handoff, self._real.llama_kv_share_adopt, *arguments)
        return getattr(self._real, name)


def _believes(handoff: Any, adopt: Any, *arguments: Any) -> None:
    with contextlib.suppress(LedgerError):
        adopt(*arguments)


def _clears(handoff: Any, adopt: Any, *arguments: Any) -> None:
    try:
        adopt(*arguments)
    except LedgerError:
        handoff._context.clear(2)
        raise


def _writes(handoff: Any, adopt: Any, *arguments: Any) -> None:
    try:
        adopt(*arguments)
    except LedgerError:
        os.pwrite(handoff._fds[0], b"\7", 0)
        raise


def _leaves(handoff: Any, adopt: Any, *arguments: Any) -> None:
    try:
        adopt(*arguments)
    except LedgerError:
        handoff._context.decode([1], position=0, seq_id=1)
        raise


def _crashes(handoff: Any, adopt: Any, *arguments: Any) -> None:
    try:
        adopt(*arguments)
    except LedgerError:
        ctypes.string_at(0)


PLANTED: dict[str, tuple[Callable[..., None], str]] = {
    "believes": (_believes, "Finding: adopted 0 of 40 tokens"),
    "clears": (_clears, "sequence 2"),
    "writes": (_writes, "Finding: refused, but region 0 "),
    "leaves": (_leaves, "Finding: refused, but the sequence holds positions (0, 0)"),
    "crashes": (_crashes, "SIGSEGV"),
}


class Planted(fuzz_blob.BlobCheck):
    """A check of a library with a fault."""

    def __init__(self, fault: str, models: str) -> None:
        super().__init__(models, "plain")
        self._fault = fault

    def _handoff(self, name: str) -> Any:
        handoff = super()._handoff(name)
        if not isinstance(handoff._lib, _Library):
            handoff._lib = _Library(handoff, PLANTED[self._fault][0])
        return handoff


@pytest.fixture
def refused() -> Iterator[bytes]:
    return iter([b"plain sampled\n" + b"no blob at all, but long enough"] * 2)


@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_found_and_survived(
    fault: str, refused: Iterator[bytes], archs_path: Path, tmp_path: Path
) -> None:
    target = fuzz.Target(
        "blob", f"{__name__}:Planted", lambda rng, data, pool: next(refused), (fault, str(archs_path))
    )
    report = fuzz.fuzz(target, seed=1, inputs=2, failures=tmp_path)
    assert report.n_failures == 2
    (failure,) = report.failures
    assert PLANTED[fault][1] in failure.error
    assert Path(failure.reproducer).read_bytes().startswith(b"plain sampled\nno blob")
