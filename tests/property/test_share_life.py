"""A state machine over the life of shares: one decoder's ledger, honest, late and lying providers.

The model knows who wrote what. The rule that may never break: what `verify` accepts is what the
provider of this very share completed, for these tokens.
"""

from __future__ import annotations

import hashlib
import os
import struct

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvshare import errors, fds, wire
from kvshare.ledger import Ledger, LedgerState, tokens_digest
from kvshare.wire import ShareState

LAYOUT = hashlib.sha256(b"layout").hexdigest()
SEMANTICS = hashlib.sha256(b"semantics").hexdigest()
SAMPLE = hashlib.sha256(b"rows").digest()
TOKENS = [5, 6, 7, 8]

AS_SHARE = {
    LedgerState.ISSUED: ShareState.ISSUED,
    LedgerState.FILLING: ShareState.FILLING,
    LedgerState.COMPLETE: ShareState.COMPLETE,
    LedgerState.FAILED: ShareState.FAILED,
}


class ShareLife(RuleBasedStateMachine):
    """Drives a real ledger in real shared memory beside plain variables."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger.create(1, LAYOUT, SEMANTICS, capacity=0)
        self.late: Ledger | None = None
        self.issue(1)

    def issue(self, share_id: int) -> None:
        self.share_id = share_id
        self.provider = Ledger.open(fds.OwnedFd(os.dup(self.ledger.fileno())), self.ledger.size)
        self.expected = LedgerState.ISSUED
        self.n_filled = 0
        self.honest = False  # whether TOKENS were completed for this share
        self.stained = False  # whether a late provider left its digests in this share's ledger
        self.state = ShareState.ISSUED

    def observe(self) -> None:
        """Follow the ledger as a decoder does when it looks."""
        seen = AS_SHARE[self.ledger.snapshot().state]
        if self.state.live and seen is not self.state:
            self.state = wire.advance(self.state, seen)

    @initialize(n=st.integers(0, 3))
    def already_filled(self, n: int) -> None:
        if n:
            self.begin()
            self.progress(n)

    @precondition(lambda self: self.expected is LedgerState.ISSUED)
    @rule()
    def begin(self) -> None:
        self.provider.begin()
        self.expected = LedgerState.FILLING

    @precondition(lambda self: self.expected is LedgerState.FILLING)
    @rule(n=st.integers(0, 5))
    def progress(self, n: int) -> None:
        if n < self.n_filled:
            with pytest.raises(errors.LocalProtocolError):
                self.provider.advance(n)
        else:
            self.provider.advance(n)
            self.n_filled = n

    @precondition(lambda self: self.expected is LedgerState.FILLING)
    @rule(tokens=st.sampled_from([TOKENS, TOKENS[:3], [5, 6, 7, 9]]))
    def complete(self, tokens: list[int]) -> None:
        if len(tokens) != self.n_filled:
            with pytest.raises(errors.LocalProtocolError):
                self.provider.complete(tokens_digest(tokens), len(tokens), SAMPLE)
        else:
            self.provider.complete(tokens_digest(tokens), len(tokens), SAMPLE)
            self.expected = LedgerState.COMPLETE
            self.honest = tokens == TOKENS

    @precondition(lambda self: self.expected in (LedgerState.ISSUED, LedgerState.FILLING))
    @rule()
    def fail(self) -> None:
        self.provider.fail("out of memory")
        self.expected = LedgerState.FAILED

    @precondition(lambda self: self.expected in (LedgerState.COMPLETE, LedgerState.FAILED))
    @rule()
    def ended_twice(self) -> None:
        with pytest.raises(errors.LocalProtocolError):
            self.provider.fail("again")
        with pytest.raises(errors.LocalProtocolError):
            self.provider.complete(tokens_digest(TOKENS), self.n_filled, SAMPLE)

    @precondition(lambda self: not self.honest and not self.stained)
    @rule()
    def lie(self) -> None:
        """Claim to be complete, with everything right but the watermark and the tokens.

        Whoever writes those, too, or finds them there, is caught by nothing but the sample digest,
        which the decoder takes from the memory itself; here it is a constant.
        """
        with self.ledger.view() as view:
            struct.pack_into("<QQ", view, 104, len(TOKENS), self.share_id)
            struct.pack_into("<I", view, 88, LedgerState.COMPLETE)
        self.expected = LedgerState.COMPLETE

    @rule()
    def reissue(self) -> None:
        """Give the memory to a next share while the provider of this one is still there."""
        if self.late is not None:
            self.late.close()
        self.late = self.provider
        self.ledger.reissue(self.share_id + 1, LAYOUT, SEMANTICS)
        self.issue(self.share_id + 1)

    @precondition(lambda self: self.late is not None)
    @rule()
    def late_provider_looks(self) -> None:
        assert self.late is not None
        with pytest.raises(errors.ReplayError):
            self.late.begin()
        with pytest.raises(errors.ReplayError):
            self.late.advance(4)
        with pytest.raises(errors.ReplayError):
            self.late.fail("late")

    @precondition(lambda self: self.late is not None)
    @rule()
    def late_provider_does_not_look(self) -> None:
        """Everything that an honest provider of the share before would write, now."""
        with self.ledger.view() as view:
            struct.pack_into("<QQQ", view, 96, len(TOKENS), len(TOKENS), self.share_id - 1)
            view[120:152] = tokens_digest(TOKENS)
            view[152:184] = SAMPLE
            struct.pack_into("<I", view, 88, LedgerState.COMPLETE)
        self.expected = LedgerState.COMPLETE
        self.n_filled = len(TOKENS)
        self.honest = False
        self.stained = True

    @precondition(lambda self: self.state.live)
    @rule(end=st.sampled_from([ShareState.RELEASED, ShareState.EXPIRED]))
    def end(self, end: ShareState) -> None:
        self.state = wire.advance(self.state, end)

    @rule()
    def adopt(self) -> None:
        self.observe()
        try:
            self.ledger.snapshot().verify(
                share_id=self.share_id,
                layout=LAYOUT,
                semantics=SEMANTICS,
                tokens=TOKENS,
                sample_digest=SAMPLE,
            )
        except (errors.LedgerError, errors.ReplayError):
            assert not self.honest
        else:
            assert self.honest
            if self.state is ShareState.COMPLETE:
                self.state = wire.advance(self.state, ShareState.ADOPTED)
            with pytest.raises(errors.LocalProtocolError):
                wire.advance(self.state, ShareState.ADOPTED)  # single use

    @invariant()
    def the_ledger_says_what_was_written(self) -> None:
        record = self.ledger.snapshot()
        assert (record.share_id, record.state) == (self.share_id, self.expected)
        assert record.n_filled == self.n_filled

    def teardown(self) -> None:
        for ledger in (self.ledger, self.provider, self.late):
            if ledger is not None:
                ledger.close()


TestShareLife = ShareLife.TestCase
TestShareLife.settings = settings(max_examples=50, stateful_step_count=30)
