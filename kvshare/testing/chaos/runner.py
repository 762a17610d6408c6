"""One case after the other: a handoff with a fault, then ordinary completions that must be as ever."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvshare.errors import KvshareError, PeerClosedError
from kvshare.testing.chaos.case import Case
from kvshare.testing.chaos.drivers import DRIVERS
from kvshare.testing.chaos.faults import Fault
from kvshare.testing.chaos.handoff import OTHER, SLOT, ForeignHandoff, Handoff
from kvshare.testing.chaos.targets import N_UBATCH, Refused, Target, Usage

N_TOKENS = 4 * N_UBATCH + 1  # four graphs, and the token that a handoff leaves out
_SETTLE_S = 5.0

Report = Callable[[Case], None]


class Runner:
    """Runs cases against one target.

    Args:
        target: the decoder; `start` was not called.
        model: GGUF file.
        folder: private folder for logs.
        report: told each case that is done.
        deep: whether cases may want a long prompt, which has to have a baseline then.
        provider: command line of a provider under test, with `{socket}`, `{model}` and `{tokens}`.

    *Ownership*: the target stays the caller's.
    """

    def __init__(
        self,
        target: Target,
        model: Path,
        folder: Path,
        report: Report,
        *,
        deep: bool = True,
        provider: Sequence[str] | None = None,
    ) -> None:
        self.target = target
        self.foreign = provider
        self._deep = deep
        self.model = model
        self.folder = folder
        self._report = report
        self.names = itertools.count()
        draw = random.Random(4)
        self.prompt, self.other, self.decoy = (
            [draw.randrange(3, 100) for _ in range(N_TOKENS)] for _ in range(3)
        )
        self.given = self.prompt[:-1]
        self.long = 2 * (self.prompt + self.other + self.decoy)  # reaches cells beyond any lease
        self._baseline: Any = None

    def start(self) -> None:
        """Start the target and take the baseline.

        Raises:
            KvshareError: two equal completions differ, so that nothing can be compared.
        """
        self.target.start()
        found = []
        for _ in range(1 if self._baseline else 2):
            answers = []
            asked = [(SLOT, self.prompt), (OTHER, self.other), (SLOT, self.long)]
            for slot, tokens in asked if self._deep else asked[:2]:
                self.target.do("erase", slot)
                answers.append(self.target.complete(slot, tokens))
            found.append(answers)
        if any("text" not in answer for answer in found[0]) or self._baseline not in (None, found[0]):
            raise KvshareError(f"the decoder answers otherwise after a restart: {_brief(found[0])}")
        if found[0] != found[-1]:
            raise KvshareError("equal completions differ, so nothing can be compared with them")
        self._baseline = found[0]

    def run(self, fault: Fault, step: str) -> Case:
        """Run one case."""
        case = Case(self.target.name, fault.name, step)
        start = time.monotonic()
        try:
            self._run(fault, step, case)
        except PeerClosedError as error:
            case.crashes.append(f"{error}; {error.hint}")
        except KvshareError as error:
            case.wrong.append(f"{type(error).__name__}: {error}")
        if not self.target.alive or not case.ok:
            self.start()  # a case starts with a decoder that nothing has happened to
        case.t_ms = (time.monotonic() - start) * 1000
        self._report(case)
        return case

    def _run(self, fault: Fault, step: str, case: Case) -> None:
        self._prepare()
        usage = self.target.usage()
        handoff = (ForeignHandoff if self.foreign else Handoff)(self, fault, step, case)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(handoff))
            try:
                DRIVERS[fault.name](handoff)
                case.outcome = "adopted"
                handoff.filled = True
            except Refused as error:
                case.reason = str(error)
                if handoff.share_id is None and step != "connect":
                    case.wrong.append("there was no share that the fault could be shown to")
            expected = "adopted" if step in fault.adopted_at else "refused"
            either = fault.either or (self.foreign and step in ("descriptors", "first-ubatch", "half"))
            if case.outcome != expected and not either:
                case.wrong.append(f"{case.outcome}, but has to be {expected}: {case.reason}")
            if fault.by == "decoder":
                self.start()
                self._prepare()
                usage = self.target.usage()
            elif case.outcome == "refused":
                handoff.release()
            self._compare(case, filled=handoff.filled, deep=fault.deep)
        if handoff.crashed:
            case.crashes.append(f"the provider ended with status {handoff.status}")
        case.leaked = self._leaked(usage)

    def _compare(self, case: Case, *, filled: bool, deep: bool) -> None:
        """Ask what was asked for the baseline, on both slots."""
        target = self.target
        ask = target.finish if filled else target.complete
        answers = [ask(SLOT, self.prompt), target.finish(OTHER, self.other)]
        if deep:
            target.do("erase", SLOT)
            answers.append(target.complete(SLOT, self.long))
        names = ("the slot", "the other slot", "the slot with a long prompt")
        for name, answer, expected in zip(names, answers, self._baseline, strict=False):
            if answer != expected:
                case.wrong.append(f"{name} answers {_brief(answer)}, not {_brief(expected)}")

    def _prepare(self) -> None:
        """Empty the slot, whose cells hold something else then, and let a chat be on the other one.

        What an earlier case has left in the cells would be right by chance.
        """
        for slot, tokens in ((SLOT, self.decoy), (OTHER, self.other[:-1])):
            self.target.do("erase", slot)
            self.target.prefill(slot, tokens)
        self.target.do("erase", SLOT)

    def _leaked(self, before: Usage) -> dict[str, int]:
        """Return what stays open; a server closes connections a moment after its answer."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            now = self.target.usage()
            more = {name: b - a for name, a, b in zip(Usage._fields, before, now, strict=True) if b > a}
            if not more or time.monotonic() > deadline:
                return more
            time.sleep(0.02)


def _brief(answer: Any) -> str:
    return json.dumps(answer)[-120:]


def run(
    target: Target,
    model: Path,
    folder: Path,
    chosen: Sequence[tuple[Fault, str]],
    report: Report,
    *,
    provider: Sequence[str] | None = None,
) -> Iterator[Case]:
    """Run cases against a target, which is started here and left running."""
    deep = any(fault.deep for fault, _ in chosen)
    runner = Runner(target, model, folder, report, deep=deep, provider=provider)
    runner.start()
    for fault, step in chosen:
        yield runner.run(fault, step)
