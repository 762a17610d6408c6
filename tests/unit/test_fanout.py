"""How the fan-out benchmark evaluates what it measured."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.fanout import OTHERS, ROUTES, Run, identical, summary


def run(scale: float = 1.0, logits: list[str] | None = None) -> Run:
    return Run(
        ready_ms=[5 * scale, 6 * scale, 10 * scale],
        first_token_ms=[10 * scale, 20 * scale, 60 * scale],
        pss_mib=100 * scale,
        added_mib=40 * scale,
        logits=["a", "b", "c"] if logits is None else logits,
    )


def test_medians_and_ratios() -> None:
    runs = {
        "fork": [run(), run(3), run(2)],
        "prefill": [run(10)],
        "restore": [run(4)],
    }
    report = summary(runs)
    assert set(report) == {*ROUTES, *(f"{route}_to_fork" for route in OTHERS)}
    fork = {name: value for name, value in report["fork"].items() if name != "runs"}
    assert fork == {
        "ready_ms": 12,
        "first_token_ms": 40,
        "last_ms": 120,
        "pss_mib": 200,
        "added_mib": 80,
    }
    assert report["prefill_to_fork"] == dict.fromkeys(fork, 5.0)
    assert report["restore_to_fork"] == dict.fromkeys(fork, 2.0)
    assert [each["pss_mib"] for each in report["fork"]["runs"]] == [100, 300, 200]
    assert report["prefill"]["runs"][0]["first_token_ms"] == [100, 200, 600]


OTHER = run(logits=["a", "b", "x"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"fork": True, "prefill": True, "restore": True}),
        ({"fork": [run(), OTHER]}, {"fork": False, "prefill": True, "restore": True}),
        ({"restore": [OTHER]}, {"fork": True, "prefill": True, "restore": False}),
        ({"prefill": [run(), OTHER]}, {"fork": True, "prefill": False, "restore": True}),
        ({"fork": [run(logits=["b", "a", "c"])]}, {"fork": False, "prefill": True, "restore": True}),
    ],
    ids=["all equal", "a fork", "a file", "a prefill", "exchanged"],
)
def test_each_worker_is_compared_with_itself(changes: dict[str, Any], expected: dict[str, bool]) -> None:
    routes = {route: [run(), run(2)] for route in ROUTES}
    one_worker = {route: [run(logits=["a"])] for route in ROUTES}
    assert identical([one_worker, routes | changes]) == expected
