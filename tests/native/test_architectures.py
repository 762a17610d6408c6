"""Every architecture that llama.cpp supports, through the benchmark that counts them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import architectures

pytestmark = [pytest.mark.native, pytest.mark.slow]

# left to the benchmark, as others say the same or almost
LEFT_OUT = {
    "short-no-fa",
    "turns-no-fa",
    "turns-short",
    "turns-seq-2-of-4",
    "forks-no-fa",
    "forks-seq-2-of-4",
}
CASES = [case.name for case in architectures.CASES if case.name not in LEFT_OUT]

# llama.cpp itself cannot quantize their cache: a head does not divide into blocks of 32
N_REFUSED_Q8_0 = 2


def test_all_architectures(archs_path: Path) -> None:
    paths = sorted(archs_path.glob("*.gguf"))
    results = list(architectures.run(paths, CASES))
    report = architectures.summary(results)
    assert report.pop("failures") == []
    times = report.pop("times")
    assert len(times) == 124
    assert all(each["share_us"] > 0 and each["adopt_us"] > 0 for each in times.values())
    assert report == {
        "total": 128,
        "without_memory": 4,
        "served": 124,
        "bit_identical": 124,
        "zero_moved": 124,
        "turns_identical": 124,
        "forks_identical": 124,
    }
    refused = [result for each in results for result in each if result.status == "refused"]
    assert {result.case for result in refused} == {"q8_0"}
    assert len(refused) == N_REFUSED_Q8_0


def test_the_models_are_of_many_kinds(archs_path: Path) -> None:
    """What makes the figure above worth something: these caches are not all plain ones."""
    names = {re.sub(r"-(dense|moe)$", "", path.stem) for path in archs_path.glob("*.gguf")}
    assert {"llama", "gemma3", "deepseek2", "deepseek4", "mamba", "jamba", "falcon-h1", "lfm2"} <= names
