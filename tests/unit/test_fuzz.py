"""The fuzzers of what needs no library, and that a fuzzer notices what it is there for."""

from __future__ import annotations

import ctypes
import json
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvshare.testing import fuzz

CORPUS = Path(__file__).parents[1] / "corpus"
TARGETS = [fuzz.HEADER, fuzz.LEDGER]


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_corpus_and_mutations(target: fuzz.Target, tmp_path: Path) -> None:
    n_corpus = len(list((CORPUS / target.name).iterdir()))
    report = fuzz.fuzz(target, seed=4, inputs=1500, corpus=CORPUS, failures=tmp_path)
    assert report.failures == []
    assert report.inputs == n_corpus + 1500 == sum(report.outcomes.values())
    assert len(report.outcomes) >= 5


def test_mutations_are_accepted_and_refused(tmp_path: Path) -> None:
    """Neither side of a check is left out: mutations must not all be noise."""
    header = fuzz.fuzz(fuzz.HEADER, seed=1, inputs=1000, failures=tmp_path).outcomes
    assert {"ShareHeader", "JobHeader", "Progress", "Outcome", "RemoteProtocolError"} <= set(header)
    ledger = fuzz.fuzz(fuzz.LEDGER, seed=1, inputs=1000, failures=tmp_path).outcomes
    verdicts = {"Incomplete", "Pending", "Digest", ""}
    assert {"accepted", "ReplayError", *(f"Ledger{name}Error" for name in verdicts)} == set(ledger)


# -- planted faults: this module is imported in the child ----------------------------------------


class Planted:
    """A target that misbehaves when the first byte says so."""

    def seeds(self) -> list[bytes]:
        return [b"quiet"]

    def __call__(self, data: bytes) -> str:
        match data[:1]:
            case b"a":
                os.abort()
            case b"s":
                ctypes.string_at(0)
            case b"x":
                print("on standard output", flush=True)
                os._exit(3)
            case b"h":
                time.sleep(60)
            case b"e":
                raise ZeroDivisionError("planted")
            case b"f":
                raise fuzz.Finding("planted")
        print("on standard output", flush=True)
        return "fine"


FAULTS = {
    b"a": ("crash", "SIGABRT"),
    b"s": ("crash", "SIGSEGV"),
    b"x": ("crash", "exit status 3: on standard output"),
    b"h": ("hang", "no answer within 0.5 s"),
    b"e": ("error", "ZeroDivisionError: planted at test_fuzz.py:"),
    b"f": ("error", "Finding: planted"),
}


def planted(mutate: fuzz.Mutator) -> fuzz.Target:
    return fuzz.Target("planted", f"{__name__}:Planted", mutate)


@pytest.mark.parametrize("fault", list(FAULTS), ids=lambda fault: fault.decode())
def test_planted_fault_is_found_and_survived(fault: bytes, tmp_path: Path) -> None:
    inputs = iter([b"-before", fault + b"!", b"-after", b"-last"])
    report = fuzz.fuzz(
        planted(lambda rng, data, pool: next(inputs)), seed=1, inputs=4, failures=tmp_path, deadline_s=0.5
    )
    kind, error = FAULTS[fault]
    assert report.outcomes == {"fine": 3, kind: 1}
    (failure,) = report.failures
    assert failure.kind == kind
    assert error in failure.error
    assert Path(failure.reproducer).read_bytes() == fault + b"!"


def test_reproducers_are_a_corpus(tmp_path: Path) -> None:
    def mutate(rng: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
        return rng.choice((b"e", b"f", b"-")) + rng.randbytes(2)

    target = planted(mutate)
    first = fuzz.fuzz(target, seed=1, inputs=50, failures=tmp_path / "a")
    assert first.n_failures > len(first.failures) == 4  # two that look the same are enough
    again = fuzz.fuzz(target, seed=1, inputs=0, corpus=tmp_path / "a", failures=tmp_path / "b")
    assert again.inputs == again.n_failures == 4


def test_seed_decides_the_inputs(tmp_path: Path) -> None:
    tried: list[bytes] = []

    def mutate(rng: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
        tried.append(fuzz.mutate_bytes(rng, data, pool))
        return tried[-1].lower().replace(b"h", b"H")

    for seed in (1, 1, 2):
        fuzz.fuzz(planted(mutate), seed=seed, inputs=30, failures=tmp_path)
    assert tried[:30] == tried[30:60] != tried[60:]


def test_target_that_does_not_start(tmp_path: Path) -> None:
    target = fuzz.Target("none", f"{__name__}:NoSuchTarget", fuzz.mutate_bytes)
    with pytest.raises(RuntimeError, match="NoSuchTarget"):
        fuzz.fuzz(target, seed=1, inputs=1, failures=tmp_path)


def test_wrong_acceptance_is_a_finding() -> None:
    """The ledger's second reading does not believe the first."""
    check = fuzz.LedgerCheck()
    complete = check.seeds()[2]
    assert check(complete) == "accepted"
    with pytest.raises(fuzz.Finding, match=r"wrong: n_tokens, blob$"):
        check._require_true(fuzz.put(complete, 104, 8, 4), b"other")


# -- the command ---------------------------------------------------------------------------------


def test_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--inputs", "20", "--seed", "5", "--target", "header", "ledger", "--json"]
    assert fuzz.main([*arguments, "--corpus", str(CORPUS), "--failures", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["seed"], report["failures"]) == (5, 0)
    assert [each["target"] for each in report["targets"]] == ["header", "ledger"]
    assert report["inputs"] == sum(sum(each["outcomes"].values()) for each in report["targets"])
    assert "ledger: " in captured.err


def test_command_fails_with_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "HEADER", planted(lambda rng, data, pool: b"f"))
    assert fuzz.main(["--inputs", "1", "--target", "header", "--failures", str(tmp_path)]) == 1
    assert "FAILED error: Finding: planted" in capsys.readouterr().out
