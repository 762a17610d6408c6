"""A state machine over the life of shares: the fake decoder and a model of plain variables, in lockstep.

`tests/native/test_decoder_life.py` lets a real decoder go the same way step by step: the two agree on
every outcome then, error type for error type.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvshare import KvshareError, Offer
from kvshare.testing.contract import Harness
from kvshare.wire import ShareState
from tests.contract.harness import FakeHarness

N_SEQ = 2
N_LEASE = 24
PROMPTS = [[1 + 7 * i % 90 for i in range(n)] for n in (1, 7, N_LEASE)] + [[5] * 7]


class Side:
    """One decoder with its provider, and what is open on it for each sequence."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.shares: dict[int, Any] = {}
        self.offers: dict[int, Offer] = {}
        self.providers: dict[int, Any] = {}
        self.stack = contextlib.ExitStack()

    def share(self, seq_id: int) -> None:
        share = self.harness.decoder.share(seq_id, n_tokens=N_LEASE)
        self.drop(seq_id)
        self.shares[seq_id] = share
        near, far = socket.socketpair(socket.AF_UNIX)
        with near, far:
            share.send(near)
            self.offers[seq_id] = Offer.receive(far)

    def fill(self, seq_id: int, tokens: list[int]) -> None:
        provider: Any = self.harness.provider(self.offers[seq_id])
        self.providers[seq_id] = provider
        provider.prefill(tokens)

    def publish(self, seq_id: int) -> None:
        self.providers[seq_id].publish()

    def fail(self, seq_id: int) -> None:
        self.offers[seq_id].ledger.fail("broken")

    def adopt(self, seq_id: int, tokens: list[int]) -> int:
        return int(self.harness.decoder.adopt(self.shares[seq_id], tokens).n_adopted)

    def release(self, seq_id: int) -> None:
        self.shares[seq_id].release()

    def state(self, seq_id: int) -> ShareState:
        found: ShareState = self.shares[seq_id].state
        return found

    def drop(self, seq_id: int) -> None:
        """Close what the provider of the last share of a sequence held."""
        for held in (self.providers.pop(seq_id, None), self.offers.pop(seq_id, None)):
            if held is not None:
                held.close()

    def close(self) -> None:
        for seq_id in list(self.offers):
            self.drop(seq_id)
        self.harness.close()


class DecoderLife(RuleBasedStateMachine):
    """Every rule runs on all sides; the sides must say the same."""

    factories: tuple[Callable[[], Harness], ...] = (FakeHarness,)

    def __init__(self) -> None:
        super().__init__()
        self.sides = [Side(factory()) for factory in self.factories]
        # the model: state of the last share, what was filled, what is in the sequence
        self.state: dict[int, ShareState] = {}
        self.filled: dict[int, list[int]] = {}
        self.held: dict[int, list[int]] = {}

    def all(self, step: Callable[[Side], object]) -> str:
        """Run a step on every side; return the one outcome that all have: `ok`, or the error."""
        outcomes = []
        for side in self.sides:
            try:
                step(side)
                outcomes.append("ok")
            except KvshareError as error:
                outcomes.append(type(error).__name__)
        assert len(set(outcomes)) == 1, outcomes
        return outcomes[0]

    @rule(seq_id=st.integers(0, N_SEQ - 1))
    def share(self, seq_id: int) -> None:
        busy = seq_id in self.held or self.is_live(seq_id)
        outcome = self.all(lambda side: side.share(seq_id))
        assert outcome == ("SequenceInUseError" if busy else "ok")
        if not busy:
            self.state[seq_id] = ShareState.ISSUED
            self.filled.pop(seq_id, None)

    def is_live(self, seq_id: int) -> bool:
        return seq_id in self.state and self.state[seq_id].live

    def of(self, *states: ShareState) -> list[int]:
        return sorted(seq_id for seq_id, state in self.state.items() if state in states)

    @precondition(lambda self: self.of(ShareState.ISSUED))
    @rule(data=st.data(), tokens=st.sampled_from(PROMPTS))
    def fill(self, data: st.DataObject, tokens: list[int]) -> None:
        seq_id = data.draw(st.sampled_from(self.of(ShareState.ISSUED)))
        assert self.all(lambda side: side.fill(seq_id, tokens)) == "ok"
        self.state[seq_id] = ShareState.FILLING
        self.filled[seq_id] = tokens

    @precondition(lambda self: self.of(ShareState.FILLING))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(self.of(ShareState.FILLING)))
        assert self.all(lambda side: side.publish(seq_id)) == "ok"
        self.state[seq_id] = ShareState.COMPLETE

    @precondition(lambda self: self.of(ShareState.ISSUED, ShareState.FILLING))
    @rule(data=st.data())
    def fail_and_adopt(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(self.of(ShareState.ISSUED, ShareState.FILLING)))
        assert self.all(lambda side: side.fail(seq_id)) == "ok"
        tokens = self.filled.get(seq_id, PROMPTS[0])
        assert self.all(lambda side: side.adopt(seq_id, tokens)) == "LedgerIncompleteError"
        self.state[seq_id] = ShareState.FAILED

    @precondition(lambda self: self.state)
    @rule(data=st.data(), honest=st.booleans(), tokens=st.sampled_from(PROMPTS))
    def adopt(self, data: st.DataObject, honest: bool, tokens: list[int]) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.state)))
        filled = self.filled.get(seq_id)
        if honest and filled is not None:
            tokens = filled
        outcome = self.all(lambda side: side.adopt(seq_id, tokens))
        state = self.state[seq_id]
        if not state.live:
            assert outcome == "ReplayError"
        elif state is not ShareState.COMPLETE:
            assert outcome == "LedgerIncompleteError"  # and it lives on
        elif tokens == filled:
            assert outcome == "ok"
            self.state[seq_id] = ShareState.ADOPTED
            self.held[seq_id] = tokens
        else:
            same_length = filled is not None and len(tokens) == len(filled)
            assert outcome == ("LedgerDigestError" if same_length else "LedgerIncompleteError")
            self.state[seq_id] = ShareState.FAILED

    @precondition(lambda self: self.state)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.state)))
        assert self.all(lambda side: side.release(seq_id)) == "ok"
        if self.state[seq_id].live:
            self.state[seq_id] = ShareState.RELEASED

    @rule(seq_id=st.integers(0, N_SEQ - 1))
    def clear(self, seq_id: int) -> None:
        if not self.is_live(seq_id):
            self.all(lambda side: side.harness.clear(seq_id))
            self.held.pop(seq_id, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """What was adopted answers as a local prefill at the same place does."""
        seq_id = data.draw(st.sampled_from(sorted(self.held)))
        for side in self.sides:
            expected = side.harness.expected(self.held[seq_id], seq_id, side.shares[seq_id].header)
            assert side.harness.answer(seq_id) == expected

    @invariant()
    def all_know_the_state(self) -> None:
        for side in self.sides:
            for seq_id, state in self.state.items():
                assert side.state(seq_id) is state

    def teardown(self) -> None:
        for side in self.sides:
            side.close()


TestFakeDecoderLife = DecoderLife.TestCase
TestFakeDecoderLife.settings = settings(max_examples=40, stateful_step_count=30)
