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
from kvshare.testing.chaos.conversation import Exchange, SteadyProvider
from kvshare.testing.chaos.drivers import DRIVERS
from kvshare.testing.chaos.faults import PROMPT, TURN, Fault
from kvshare.testing.chaos.handoff import OTHER, SLOT, ForeignHandoff, Handoff
from kvshare.testing.chaos.targets import N_UBATCH, Refused, Target, Usage

N_TOKENS = 4 * N_UBATCH + 1  # four graphs, and the token that a handoff leaves out
N_USER = 4 * N_UBATCH  # of the next turn; the last one that was generated is prefilled with it
AT = {PROMPT: 0, TURN: 1}  # what of a conversation is handed over with the fault
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
        turns: the same of turns.
        provider: command line of a provider under test, with `{socket}`, `{model}` and `{tokens}`.

    *Ownership*: the target stays the caller's; `close` ends what was started beside it.
    """

    def __init__(
        self,
        target: Target,
        model: Path,
        folder: Path,
        report: Report,
        *,
        deep: bool = True,
        turns: bool = False,
        provider: Sequence[str] | None = None,
    ) -> None:
        self.target = target
        self.foreign = provider
        self._deep = deep
        self._turns = turns
        self.model = model
        self.folder = folder
        self._report = report
        self.names = itertools.count()
        draw = random.Random(4)
        self._prompt, self._other, self.decoy = (
            [draw.randrange(3, 100) for _ in range(N_TOKENS)] for _ in range(3)
        )
        self._users = [[draw.randrange(3, 100) for _ in range(N_USER)] for _ in range(2)]
        self._long = 2 * (self._prompt + self._other + self.decoy)  # reaches cells beyond any lease
        self._baseline: list[Exchange] = []
        self._talks: dict[int, list[Exchange]] = {}  # by the number of tokens that the decoder is ahead
        self._steady: SteadyProvider | None = None

    def start(self) -> None:
        """Start the target and take the baseline.

        Raises:
            KvshareError: two equal completions differ, so that nothing can be compared.
        """
        self.target.start()
        if self._turns and self._steady is None:
            path, log = self.target.folder / "steady.sock", self.folder / "steady.log"
            self._steady = SteadyProvider(self.model, path, log)
        if self._baseline:
            if self._ask_first() != self._baseline[:2]:
                raise KvshareError("the decoder answers otherwise after a restart")
        else:
            self._baseline, again = (self._ask_first() + self._ask_more() for _ in range(2))
            if again != self._baseline:
                raise KvshareError("equal completions differ, so nothing can be compared with them")

    def close(self) -> None:
        """End the provider of what comes before and after a turn; idempotent."""
        if self._steady is not None:
            self._steady.close()
            self._steady = None

    def _ask_first(self) -> list[Exchange]:
        """Ask a decoder to which nothing happens."""
        return [self._begin(OTHER, self._other), self._begin(SLOT, self._prompt)]

    def _ask_more(self) -> list[Exchange]:
        found = [self._begin(SLOT, self._long)] if self._deep else []
        if self._turns:
            self._talks = {n: self._talk(n) for n in (0, 1, N_USER)}
        return found + [each for talk in self._talks.values() for each in talk]

    def _begin(self, slot: int, prompt: list[int]) -> Exchange:
        self.target.do("erase", slot)
        return Exchange([], prompt).answered(self.target.complete(slot, prompt))

    def _talk(self, n_ahead: int) -> list[Exchange]:
        """Let a prompt and two turns be answered, the decoder ahead of a share by some tokens of the first.

        Then a decoder and a handoff find different places for the second one, and round differently.
        """
        first = self._begin(SLOT, self._prompt)
        turn = first.then(self._users[0])
        n_held = len(turn.held) + n_ahead
        if n_ahead:
            self.target.go_ahead(SLOT, turn.prompt[:n_held], len(turn.prompt))
        turn = turn.answered(self.target.complete(SLOT, turn.prompt, n_held=n_held))
        following = turn.then(self._users[1])
        if n_ahead:
            self._hand_over(following)
        else:
            self.target.prefill(SLOT, following.given)
        return [first, turn, following.answered(self.target.finish(SLOT, following.prompt))]

    def run(self, fault: Fault, step: str, kind: str = PROMPT) -> Case:
        """Run one case."""
        case = Case(self.target.name, fault.name, step, kind)
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
        usage = self._prepare(case.kind)
        exchange = self._conversation(case.kind)[AT[case.kind]]
        handoff = (ForeignHandoff if self.foreign else Handoff)(self, exchange, fault, step, case)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(handoff))
            try:
                DRIVERS[fault.name](handoff)
                case.outcome = "adopted"
                handoff.n_held = len(handoff.given)
            except Refused as error:
                case.reason = str(error)
                if handoff.share_id is None and step != "connect":
                    case.wrong.append("there was no share that the fault could be shown to")
            expected = "adopted" if step in fault.adopted_at else "refused"
            either = fault.either and case.kind == PROMPT
            either |= bool(self.foreign) and step in ("descriptors", "first-ubatch", "half")
            if case.outcome != expected and not either:
                case.wrong.append(f"{case.outcome}, but has to be {expected}: {case.reason}")
            if fault.by == "decoder":
                self.start()
                usage = self._prepare(case.kind)
            elif case.outcome == "refused":
                handoff.release()
            self._compare(case, handoff)
        if handoff.crashed:
            case.crashes.append(f"the provider ended with status {handoff.status}")
        case.leaked = self._leaked(usage)

    def _conversation(self, kind: str, *, n_ahead: int = 0) -> list[Exchange]:
        """Return what is said to the slot when nothing goes wrong."""
        return self._baseline[1:2] if kind == PROMPT else self._talks[n_ahead]

    def _compare(self, case: Case, handoff: Handoff) -> None:
        """Ask what was asked for the baseline, on both slots."""
        target = self.target
        said = self._conversation(case.kind, n_ahead=handoff.n_ahead)

        def same(name: str, answer: Any, exchange: Exchange) -> None:
            if answer != exchange.answer:
                case.wrong.append(f"{name} answers {_brief(answer)}, not {_brief(exchange.answer)}")

        now = said[AT[case.kind]]
        if handoff.n_held < len(now.held):  # the slot is empty: from the start
            same("the slot from the start", target.complete(SLOT, said[0].prompt), said[0])
            handoff.n_held = len(now.held)
        same("the slot", target.complete(SLOT, now.prompt, n_held=handoff.n_held), now)
        if case.kind == TURN:
            self._hand_over(said[2])
            same("the slot in the next turn", target.finish(SLOT, said[2].prompt), said[2])
        other = self._baseline[0]
        same("the other slot", target.finish(OTHER, other.prompt), other)
        if handoff.fault.deep:
            target.do("erase", SLOT)
            same("the slot with a long prompt", target.complete(SLOT, self._long), self._baseline[2])

    def _prepare(self, kind: str) -> Usage:
        """Empty the slot, whose cells hold something else then, and let a chat be on the other one.

        What an earlier case has left in its cells would be right by chance. A turn goes on behind a prompt
        that was handed over and answered.

        Returns:
            what the decoder has open before anything is handed over.
        """
        said = self._conversation(kind)
        decoy = (3 * self.decoy)[: len(said[AT[kind]].prompt)]
        for slot, tokens in ((SLOT, decoy), (OTHER, self._other[:-1])):
            self.target.do("erase", slot)
            self.target.prefill(slot, tokens)
        self.target.do("erase", SLOT)
        usage = self.target.usage()
        if kind == TURN:
            self._hand_over(said[0])
            if (answer := self.target.finish(SLOT, said[0].prompt)) != said[0].answer:
                raise KvshareError(f"the slot answers {_brief(answer)} before anything goes wrong")
        return usage

    def _hand_over(self, exchange: Exchange) -> None:
        assert self._steady is not None
        self._steady.hand_over(self.target, SLOT, exchange)

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
    chosen: Sequence[tuple[Fault, str, str]],
    report: Report,
    *,
    provider: Sequence[str] | None = None,
) -> Iterator[Case]:
    """Run cases against a target, which is started here and left running."""
    deep = any(fault.deep for fault, _, _ in chosen)
    turns = any(kind == TURN for _, _, kind in chosen)
    runner = Runner(target, model, folder, report, deep=deep, turns=turns, provider=provider)
    with contextlib.closing(runner):
        runner.start()
        for fault, step, kind in chosen:
            yield runner.run(fault, step, kind)
