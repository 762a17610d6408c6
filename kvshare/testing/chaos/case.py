"""A case, which cases there are, and what becomes of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvshare.errors import KvshareError
from kvshare.testing.chaos.faults import BY_NAME, FAULTS, KINDS, TURN, Fault
from kvshare.testing.chaos.targets import Usage

FOREIGN_STEPS = ("connect", "descriptors", "first-ubatch", "half", "publish", "adopt")
"""Steps that can be told from outside, by the ledger. A provider may be further when that is seen."""


@dataclass
class Case:
    """What became of a fault at a step.

    Attributes:
        target: `decoder` or `server`.
        fault: its name.
        step: where it was injected.
        kind: `prompt` or `turn`: what was handed over.
        outcome: `refused` or `adopted`.
        reason: what the refusal says.
        wrong: answers that are not the baseline's, and successes that are none.
        crashes: processes that a signal has ended.
        leaked: what the decoder's process has open more than before.
        t_ms: time that it took, milliseconds.
    """

    target: str
    fault: str
    step: str
    kind: str
    outcome: str = "refused"
    reason: str = ""
    wrong: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    leaked: dict[str, int] = field(default_factory=dict)
    t_ms: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything is as it has to be."""
        return not (self.wrong or self.crashes or self.leaked)


def cases(
    names: Sequence[str] | None, target: str, *, kinds: Sequence[str] = KINDS, foreign: bool = False
) -> list[tuple[Fault, str, str]]:
    """Return the faults, steps and kinds to run on a target.

    Args:
        names: faults, or `FAULT:STEP`; None takes all that are not known to fail.
        target: `decoder` or `server`.
        kinds: what is handed over.
        foreign: only what a provider that is given by its command line can be put to.

    Raises:
        KvshareError: no such fault or step.
    """
    if names is None:
        chosen = [(fault, step) for fault in FAULTS if not fault.known for step in fault.steps]
    else:
        chosen = []
        for name in names:
            fault_name, _, step = name.partition(":")
            fault = BY_NAME.get(fault_name)
            if fault is None or (step and step not in fault.steps):
                raise KvshareError(f"no fault {name!r}", hint="--list shows the faults and their steps")
            chosen += [(fault, each) for each in fault.steps if step in ("", each)]
    return [
        (fault, step, kind)
        for kind in kinds
        for fault, step in chosen
        if target in fault.targets
        and kind in fault.kinds
        and (not foreign or (fault.foreign and step in FOREIGN_STEPS))
    ]


def summary(found: Sequence[Case]) -> dict[str, Any]:
    """Return what `--json` prints.

    Returns:
        `faults`, `steps`, `cases`, `turns`, `refused`, `wrong_answers`, `crashes`, `leaked_fds`,
        `leaked_mappings` and `leaked_threads` as numbers, and lists: `failures`, cases, and `known`,
        names of the faults that are known to fail.
    """
    leaked = {name: sum(case.leaked.get(name, 0) for case in found) for name in Usage._fields}
    return {
        "faults": len({case.fault for case in found}),
        "steps": len({case.step for case in found}),
        "cases": len(found),
        "turns": sum(case.kind == TURN for case in found),
        "refused": sum(case.outcome == "refused" for case in found),
        "wrong_answers": sum(len(case.wrong) for case in found),
        "crashes": sum(len(case.crashes) for case in found),
        **{f"leaked_{name}": n for name, n in leaked.items()},
        "failures": [dataclasses.asdict(case) for case in found if not case.ok],
        "known": [fault.name for fault in FAULTS if fault.known],
    }
