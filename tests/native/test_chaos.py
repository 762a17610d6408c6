"""The chaos kit: all cases against a decoder, a few against a server, and that it finds faults."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvshare import fds
from kvshare.testing.chaos import COUNTED, passed
from kvshare.testing.chaos.case import cases, summary
from kvshare.testing.chaos.drivers import DRIVERS
from kvshare.testing.chaos.faults import BY_NAME, FAULTS, STEPS
from kvshare.testing.chaos.provider import ACTIONS
from kvshare.testing.chaos.runner import Runner
from kvshare.testing.chaos.targets import InProcess, Usage
from tests.native.handoff import ROOT, environment

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("library")]

FEW = [
    *("none", "dies:half", "other-tokens", "claims-zeros", "seals:half", "late-nan", "late-refused"),
    *("late-expired", "trespasses", "holds-on", "adopts-twice", "decoder-dies-unseen:half"),
]
ADOPTED = {"none", "seals", "trespasses", "holds-on", "adopts-twice"}


def chaos(*arguments: str) -> tuple[int, Any, str]:
    """Run the command; return its status, its JSON, and what it says beside it."""
    done = subprocess.run(
        [sys.executable, "-m", "kvshare.testing.chaos", "--json", *arguments],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def check_passed(status: int, outcome: Any, progress: str) -> None:
    assert outcome is not None, progress
    assert {name: outcome[name] for name in COUNTED} == dict.fromkeys(COUNTED, 0), progress
    assert status == 0
    assert passed(outcome)
    assert len(progress.splitlines()) == outcome["cases"]


# -- what there is -------------------------------------------------------------------------------


def test_faults_are_what_they_say() -> None:
    assert len(BY_NAME) == len(FAULTS)
    assert set(DRIVERS) == set(BY_NAME)
    unknown = sum(not fault.known for fault in FAULTS)
    assert unknown >= 25
    for fault in FAULTS:
        assert fault.steps, fault
        assert set(fault.steps) <= set(STEPS), fault
        assert set(fault.adopted_at) <= set(fault.steps), fault
    assert {step for fault in FAULTS for step in fault.steps} == set(STEPS)
    assert set(ACTIONS) <= set(BY_NAME)


def test_list_hides_nothing() -> None:
    status, listed, _ = chaos("--list")
    assert status == 0
    assert [fault["name"] for fault in listed] == [fault.name for fault in FAULTS]
    assert {fault["name"] for fault in listed if fault["known"]} == {
        fault.name for fault in FAULTS if fault.known
    }


def test_all_leaves_out_what_is_known() -> None:
    for target in ("decoder", "server"):
        chosen = cases(None, target)
        assert len({fault.name for fault, _ in chosen}) >= 25
        assert not any(fault.known for fault, _ in chosen)


def test_an_unknown_fault() -> None:
    for name in ("no-such-fault", "dies:breakfast"):
        status, outcome, said = chaos("--run", name)
        assert (status, outcome) == (1, None)
        assert name in said
        assert "--list" in said


# -- what becomes of them ------------------------------------------------------------------------


@pytest.mark.slow
def test_all(tiny_path: Path) -> None:
    status, outcome, progress = chaos("--model", str(tiny_path), "--all")
    check_passed(status, outcome, progress)
    assert outcome["faults"] == sum("decoder" in fault.targets and not fault.known for fault in FAULTS)
    assert outcome["steps"] == len(STEPS)


@pytest.mark.slow
def test_a_few_with_the_server(smollm2_path: Path) -> None:
    status, outcome, progress = chaos("--model", str(smollm2_path), "--server", "--run", *FEW)
    check_passed(status, outcome, progress)
    assert outcome["cases"] == len(FEW)
    assert outcome["refused"] == sum(name.split(":")[0] not in ADOPTED for name in FEW)


def test_it_finds_what_is_wrong(tiny_path: Path) -> None:
    """A forgery cannot be refused, and its answer is another one: the kit has to see both."""
    status, outcome, progress = chaos("--model", str(tiny_path), "--run", "forges", "none")
    assert status == 1
    assert outcome["wrong_answers"] == 2, progress
    assert [case["fault"] for case in outcome["failures"]] == ["forges"]
    refusal, answer = outcome["failures"][0]["wrong"]
    assert "has to be refused" in refusal
    assert answer.startswith("the slot answers")


def test_it_sees_what_is_open() -> None:
    before = Usage.of(os.getpid())
    with fds.memfd_create("kvshare-test", 4096) as fd:
        mapped = mmap.mmap(fd.fileno(), 4096)
        now = Usage.of(os.getpid())
        mapped.close()
    assert now.fds >= before.fds + 1
    assert now.mappings == before.mappings + 1
    assert Usage.of(os.getpid()) == before


def test_it_counts_a_crash_and_goes_on(tiny_path: Path) -> None:
    with fds.private_directory() as folder, contextlib.closing(InProcess(tiny_path, folder)) as target:
        runner = Runner(target, tiny_path, folder, lambda case: None, deep=False)
        runner.start()
        os.kill(target.pid, signal.SIGSEGV)
        found = [runner.run(BY_NAME["none"], "publish") for _ in range(2)]
    assert len(found[0].crashes) == 1
    assert not found[0].ok
    assert found[1].ok
    assert summary(found)["crashes"] == 1
    assert not passed(summary(found))


def test_a_provider_of_somebody_else(tiny_path: Path) -> None:
    command = f"{sys.executable} -m kvshare prefill --model {{model}} --fds {{socket}} --threads 1"
    names = ["none", "dies:descriptors", "dies:adopt", "stops:half", "adopts-other-tokens"]
    status, outcome, progress = chaos(
        *("--model", str(tiny_path), "--provider", f"{command} --tokens-file {{tokens}}"),
        *("--run", *names),
    )
    check_passed(status, outcome, progress)
    assert outcome["cases"] == len(names)
