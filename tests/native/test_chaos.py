"""The chaos kit: all faults against a decoder, a few against a server, and that it finds what is wrong."""

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
from kvshare.testing.chaos.faults import BY_NAME, FAULTS, KINDS, PROMPT, STEPS, TURN, Fault
from kvshare.testing.chaos.provider import ACTIONS
from kvshare.testing.chaos.runner import Runner
from kvshare.testing.chaos.targets import InProcess, Usage
from tests.native.handoff import ROOT, environment

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("library")]

FEW = [
    *("none", "dies:half", "seals:half", "late-nan", "trespasses", "adopts-twice"),
    "decoder-dies-unseen:half",
]
FEW_TURNS = ["none", "touches-prefix:half", "goes-on:half", "erase-between"]
ADOPTED = {"none", "seals", "trespasses", "holds-on", "adopts-twice"}


def turns_of(fault: Fault) -> list[str]:
    """Return the steps of a turn that are tried: of what a prompt shows at all steps, one."""
    if TURN not in fault.kinds or fault.known or "decoder" not in fault.targets:
        return []
    steps = fault.steps
    if PROMPT in fault.kinds:
        steps = ("half",) if "half" in steps else steps[-1:]
    return [f"{fault.name}:{step}" for step in steps]


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
        assert set(fault.kinds) <= set(KINDS), fault
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
        assert len({fault.name for fault, _, _ in chosen}) >= 25
        assert not any(fault.known for fault, _, _ in chosen)
        # whatever can be shown with a prompt can be shown with a turn
        prompts, turns = ({each[:2] for each in chosen if each[2] == kind} for kind in KINDS)
        assert prompts < turns


def test_an_unknown_fault() -> None:
    for name in ("no-such-fault", "dies:breakfast"):
        status, outcome, said = chaos("--run", name)
        assert (status, outcome) == (1, None)
        assert name in said
        assert "--list" in said


# -- what becomes of them ------------------------------------------------------------------------


@pytest.mark.slow
def test_all(tiny_path: Path) -> None:
    status, outcome, progress = chaos("--model", str(tiny_path), "--kind", "prompt", "--all")
    check_passed(status, outcome, progress)
    shown = [fault for fault in FAULTS if "decoder" in fault.targets and PROMPT in fault.kinds]
    assert outcome["faults"] == sum(not fault.known for fault in shown)
    assert (outcome["steps"], outcome["turns"]) == (len(STEPS), 0)


@pytest.mark.slow
def test_turns(tiny_path: Path) -> None:
    """Every fault behind a prompt that was handed over and answered."""
    names = [name for fault in FAULTS for name in turns_of(fault)]
    status, outcome, progress = chaos("--model", str(tiny_path), "--kind", "turn", "--run", *names)
    check_passed(status, outcome, progress)
    assert outcome["cases"] == outcome["turns"] == len(names)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names"), [(PROMPT, FEW), (TURN, FEW_TURNS)])
def test_a_few_with_the_server(smollm2_path: Path, kind: str, names: list[str]) -> None:
    arguments = ("--server", "--kind", kind, "--run", *names)
    status, outcome, progress = chaos("--model", str(smollm2_path), *arguments)
    check_passed(status, outcome, progress)
    assert outcome["cases"] == len(names)
    assert outcome["refused"] == sum(name.split(":")[0] not in ADOPTED for name in names)


def test_it_finds_what_is_wrong(tiny_path: Path) -> None:
    """A forgery cannot be refused, and its answer is another one: the kit has to see both."""
    status, outcome, progress = chaos("--model", str(tiny_path), "--run", "forges", "none")
    assert status == 1
    assert [(case["fault"], case["kind"]) for case in outcome["failures"]] == [
        ("forges", kind) for kind in KINDS
    ], progress
    said = ["adopted, but has to be refused", "the slot answers", "the slot in the next turn answers"]
    for case, n in zip(outcome["failures"], (2, 3), strict=True):
        for wrong, begin in zip(case["wrong"], said[:n], strict=True):
            assert wrong.startswith(begin)


class Forgetful(InProcess):
    """A decoder that keeps nothing of a share that ends badly, not even what was there before."""

    def do(self, action: str, slot: int, **fields: Any) -> dict[str, Any]:
        answer = super().do(action, slot, **fields)
        if action == "release":
            super().do("erase", slot)
        return answer


def test_it_finds_a_prefix_that_is_lost(tiny_path: Path) -> None:
    with (
        fds.private_directory() as folder,
        contextlib.closing(Forgetful(tiny_path, folder)) as target,
        contextlib.closing(Runner(target, tiny_path, folder, print, deep=False, turns=True)) as runner,
    ):
        runner.start()
        found = [runner.run(BY_NAME[name], "publish", TURN) for name in ("wrong-sample", "none")]
    assert [case.ok for case in found] == [False, True]
    assert '"n_held": 0, "expected": 72' in found[0].wrong[0]


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
        runner = Runner(target, tiny_path, folder, print, deep=False)
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
    assert outcome["cases"] == len(KINDS) * len(names)
