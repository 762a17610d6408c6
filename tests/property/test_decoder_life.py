"""A state machine over the life of shares: the fake decoder and a model of plain variables, in lockstep.

Several slots, each with requests of its own, a share and a provider; a clock; restarts of the decoder.
A slot that holds something is shared as well: its provider goes on behind that.
`tests/native/test_decoder_life.py` lets a real decoder go the same way step by step: the two agree on
every outcome then, error type for error type.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvshare import KvshareError, Offer, SequenceInUseError, fds, wire
from kvshare.ledger import LedgerState
from kvshare.testing.contract import Harness
from kvshare.testing.fakes import FakeDecoder, plain_layout
from kvshare.wire import ShareState
from tests.contract.harness import FakeHarness

N_SEQ = 3
N_LEASE = 24
N_LONGEST = 150  # tokens of a sequence that is shared once more
PROMPTS = [[1 + 7 * i % 90 for i in range(n)] for n in (1, 7, N_LEASE)] + [[5] * 7]

# Hours. Steps of the clock are whole ones and lifetimes are not, so that it does not matter how long the
# test itself takes.
STEPS = (4, 31, 101)
LIFETIMES = (29.5, 99.5)
TICK_S = 600.0  # of the clock of the machine: thirty are less than the longest life of a share

MISHAPS = st.sampled_from(["", "", "touch", "go on", "clear"])
MOSTLY = st.sampled_from([True, True, True, False])  # so that walks get far

# what a share that lives is, by what its ledger says; a failure is noticed when it is adopted
SEEN = {
    LedgerState.ISSUED: ShareState.ISSUED,
    LedgerState.FILLING: ShareState.FILLING,
    LedgerState.COMPLETE: ShareState.COMPLETE,
}


class Slots(Harness, Protocol):
    """A decoder with `N_SEQ` sequences, which somebody else uses as well."""

    def request(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Evaluate tokens in an empty sequence, as an ordinary request does."""

    def content(self, seq_id: int) -> bytes:
        """Return what tells whether a sequence has changed; nothing if it is empty."""

    def touch(self, seq_id: int, offer: Offer) -> None:
        """Change, as its provider, what a sequence held before its share, and nothing that others hold."""


class FakeSlots(FakeHarness):
    """What needs no library."""

    def __init__(self) -> None:
        self.decoder = FakeDecoder(layout=plain_layout(kv_size=512 * N_SEQ), n_seq_max=N_SEQ)

    def request(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.decoder.prefill(tokens, seq_id)

    def content(self, seq_id: int) -> bytes:
        return self.answer(seq_id) if self.decoder.n_past(seq_id) else b""


class Peer:
    """A provider: what it holds of one share."""

    def __init__(self, far: socket.socket) -> None:
        self.far = far
        self.provider: Any = None
        self.offer = Offer.receive(far)

    def die(self) -> None:
        """Let go of everything, as the kernel does for a process."""
        if self.provider is not None:
            self.provider.close()
        self.offer.close()
        self.far.close()


class Side:
    """One decoder with its providers; a stranger beside it, and shares that others have followed."""

    def __init__(self, factory: Callable[[], Slots]) -> None:
        self.factory = factory
        self.slots = factory()
        self.stranger: Slots | None = None
        self.shares: dict[int, Any] = {}
        self.peers: dict[int, Peer] = {}
        self.sockets: dict[int, socket.socket] = {}  # the decoder's ends
        self.contents: dict[int, bytes] = {}
        self.first: dict[int, wire.ShareHeader] = {}  # of the share that a sequence began with
        self.old: list[Any] = []

    def share(self, seq_id: int, expires_ms: int, prefix: Sequence[int] = ()) -> None:
        n_tokens = len(prefix) + N_LEASE
        share = self.slots.decoder.share(seq_id, prefix=prefix, n_tokens=n_tokens, expires_ms=expires_ms)
        self.drop(seq_id)
        if seq_id in self.shares:
            self.old.append(self.shares[seq_id])
        self.shares[seq_id] = share

    def send(self, seq_id: int, *, gone: bool) -> None:
        with contextlib.ExitStack() as undo:
            near, far = socket.socketpair(socket.AF_UNIX)
            undo.callback(near.close)
            undo.callback(far.close)
            if gone:
                far.close()
            self.shares[seq_id].send(near)
            self.peers[seq_id] = Peer(far)
            self.sockets[seq_id] = near
            undo.pop_all()

    def fill(self, seq_id: int, tokens: list[int]) -> None:
        peer = self.peers[seq_id]
        peer.provider = self.slots.provider(peer.offer)
        peer.provider.prefill(tokens)

    def publish(self, seq_id: int) -> None:
        self.peers[seq_id].provider.publish()

    def fail(self, seq_id: int) -> None:
        self.peers[seq_id].offer.ledger.fail("broken")

    def say(self, seq_id: int, *, ok: bool) -> None:
        outcome = wire.Outcome(
            share_id=self.shares[seq_id].share_id, ok=ok, error=None if ok else "out of order"
        )
        fds.send_message(self.peers[seq_id].far, wire.encode(outcome), [])

    def die(self, seq_id: int) -> None:
        self.peers.pop(seq_id).die()

    def wait(self, seq_id: int, patience_s: float) -> None:
        self.shares[seq_id].wait(deadline=time.monotonic() + patience_s)

    def adopt(self, seq_id: int, tokens: list[int]) -> None:
        share = self.shares[seq_id]
        assert self.slots.decoder.adopt(share, tokens).n_adopted == len(tokens)
        self.contents[seq_id] = self.slots.content(seq_id)
        if share.n_prefix == 0:
            self.first[seq_id] = share.header

    def adopt_elsewhere(self, seq_id: int, tokens: list[int]) -> None:
        if self.stranger is None:
            self.stranger = self.factory()
        self.stranger.decoder.adopt(self.shares[seq_id], tokens)

    def release(self, seq_id: int) -> None:
        self.shares[seq_id].release()

    def request(self, seq_id: int, tokens: list[int]) -> None:
        self.slots.request(seq_id, tokens)
        self.contents[seq_id] = self.slots.content(seq_id)

    def go_on(self, seq_id: int, tokens: list[int]) -> None:
        self.slots.go_on(seq_id, tokens)
        self.contents[seq_id] = self.slots.content(seq_id)

    def touch(self, seq_id: int) -> None:
        self.slots.touch(seq_id, self.peers[seq_id].offer)
        self.contents[seq_id] = self.slots.content(seq_id)

    def clear(self, seq_id: int) -> None:
        self.slots.clear(seq_id)
        self.contents.pop(seq_id, None)

    def stop(self) -> None:
        """Close the decoder; its providers are still there."""
        self.slots.close()
        self.old += self.shares.values()
        self.contents.clear()

    def start(self) -> None:
        for seq_id in self.shares:
            self.drop(seq_id)
        self.shares.clear()
        self.slots = self.factory()

    def drop(self, seq_id: int) -> None:
        """End the provider of the last share of a sequence, and the connection to it."""
        if seq_id in self.peers:
            self.die(seq_id)
        if seq_id in self.sockets:
            self.sockets.pop(seq_id).close()

    def close(self) -> None:
        for seq_id in self.shares:
            self.drop(seq_id)
        self.slots.close()
        if self.stranger is not None:
            self.stranger.close()


@dataclass
class Known:
    """What the model knows of a share.

    Attributes:
        deadline: hours of the model's clock.
        state: as whoever looked last has seen it.
        sent: whether a provider has received it.
        peer: whether that provider is there.
        ledger: what the provider wrote.
        prefix: what the sequence held when it was shared.
        touched: whether the provider has written over that.
        filled: the tokens that it prefilled, behind those.
        said: what it told over the connection and nobody has read.
    """

    deadline: float
    state: ShareState = ShareState.ISSUED
    sent: bool = False
    peer: bool = False
    ledger: LedgerState = LedgerState.ISSUED
    prefix: list[int] = field(default_factory=list)
    touched: bool = False
    filled: list[int] | None = None
    said: list[bool] = field(default_factory=list)

    def write(self, ledger: LedgerState) -> None:
        self.ledger = ledger
        if self.state.live:
            self.state = SEEN.get(ledger, self.state)

    @property
    def replay(self) -> str:
        """What it gives who adopts it after its end."""
        return "ExpiredError" if self.state is ShareState.EXPIRED else "ReplayError"

    @property
    def undecided(self) -> bool:
        return self.ledger in (LedgerState.ISSUED, LedgerState.FILLING)

    @property
    def may_fill(self) -> bool:
        return self.peer and self.ledger is LedgerState.ISSUED and self.state.live

    @property
    def may_publish(self) -> bool:
        """Also when the share has ended: a provider that is late."""
        return self.peer and self.ledger is LedgerState.FILLING


class DecoderLife(RuleBasedStateMachine):
    """Every rule runs on all sides; the sides must say the same."""

    factories: tuple[Callable[[], Slots], ...] = (FakeSlots,)

    def __init__(self) -> None:
        super().__init__()
        self.shares: dict[int, Known] = {}  # the last one of each sequence
        self.held: dict[int, list[int]] = {}
        self.cuts: dict[int, list[int]] = {}  # where decode calls began, of those that came by a share
        self.old: list[str] = []  # what each older share gives who adopts it
        self.n_steps = 0  # of this decoder
        self.now = 0.0
        self.ahead = 0.0  # hours that pass before somebody looks at the clock again
        self.sides = [Side(factory) for factory in self.factories]
        real = time.monotonic
        self.clock = pytest.MonkeyPatch()
        self.clock.setattr(time, "monotonic", lambda: real() + TICK_S * self.now)

    # -- helpers --

    def all(self, step: Callable[[Side], object]) -> str:
        """Run a step on every side; return the one outcome that all have: `ok`, or the error."""
        self.n_steps += 1
        outcomes = []
        for side in self.sides:
            try:
                step(side)
                outcomes.append("ok")
            except KvshareError as error:
                outcomes.append(type(error).__name__)
        assert len(set(outcomes)) == 1, outcomes
        return outcomes[0]

    def which(self, condition: Callable[[Known], bool] = lambda _: True) -> list[int]:
        return sorted(seq_id for seq_id, known in self.shares.items() if condition(known))

    def tick(self) -> None:
        self.now, self.ahead = self.now + self.ahead, 0.0

    def expire(self, seq_id: int) -> Known:
        """Let a share look at the clock."""
        known = self.shares[seq_id]
        if known.state.live and self.now > known.deadline:
            self.end(seq_id, ShareState.EXPIRED)
        return known

    def end(self, seq_id: int, state: ShareState) -> None:
        """A share ends without being adopted: the sequence stays, unless its provider has changed it."""
        known = self.shares[seq_id]
        known.state = state
        if known.touched and self.held.get(seq_id, [])[: len(known.prefix)] == known.prefix:
            self.drop(seq_id)

    def drop(self, seq_id: int) -> None:
        """A sequence is empty now."""
        del self.held[seq_id]
        self.cuts.pop(seq_id, None)
        for side in self.sides:
            side.contents.pop(seq_id, None)

    # -- the decoder --

    @rule(
        data=st.data(),
        of_free=MOSTLY,
        behind=st.booleans(),
        lifetime=st.sampled_from(LIFETIMES),
        sent=MOSTLY,
    )
    def share(self, data: st.DataObject, of_free: bool, behind: bool, lifetime: float, sent: bool) -> None:
        """Of an empty sequence, or behind what one holds."""
        self.tick()
        live = {seq_id for seq_id in self.shares if self.expire(seq_id).state.live}
        idle = [seq_id for seq_id in range(N_SEQ) if seq_id not in live]
        free = [seq_id for seq_id in idle if (seq_id in self.held) == behind]
        seq_id = data.draw(st.sampled_from((of_free and free) or range(N_SEQ)))
        prefix = self.held.get(seq_id, []) if behind else []
        busy = seq_id in live or (not behind and seq_id in self.held)
        self.share_in(seq_id, prefix, lifetime, busy=busy)
        if sent and not busy:
            self.send_to(seq_id, gone=False)

    def share_in(self, seq_id: int, prefix: list[int], lifetime: float, *, busy: bool = False) -> None:
        outcome = self.all(lambda side: side.share(seq_id, int(lifetime * TICK_S * 1000), prefix))
        assert outcome == ("SequenceInUseError" if busy else "ok")
        if not busy:
            if seq_id in self.shares:
                self.old.append(self.shares[seq_id].replay)
            self.shares[seq_id] = Known(self.now + lifetime, prefix=prefix)

    @precondition(lambda self: not self.which(lambda known: known.state.live))
    @rule(data=st.data(), tokens=st.sampled_from(PROMPTS), mishap=MISHAPS)
    def turn(self, data: st.DataObject, tokens: list[int], mishap: str) -> None:
        """A whole handoff behind what a sequence holds, if it holds something, and an answer."""
        self.tick()
        seq_id = data.draw(st.sampled_from(range(N_SEQ)))
        prefix = self.held.get(seq_id, [])
        if len(prefix) > N_LONGEST:
            return
        self.share_in(seq_id, prefix, LIFETIMES[0])
        self.send_to(seq_id, gone=False)
        self.fill_for(seq_id, prefix + tokens)
        if mishap == "touch" and prefix:
            self.touch_in(seq_id)
        self.publish_for(seq_id)
        if mishap == "go on" and prefix:
            self.go_on_in(seq_id, PROMPTS[0])
        elif mishap == "clear" and prefix:
            assert self.all(lambda side: side.clear(seq_id)) == "ok"
            self.drop(seq_id)
        self.adopt_from(seq_id, prefix + tokens)
        if seq_id in self.held:
            self.go_on_in(seq_id, PROMPTS[1])

    @precondition(lambda self: self.shares)
    @rule(data=st.data(), again=st.booleans(), gone=st.booleans())
    def send(self, data: st.DataObject, again: bool, gone: bool) -> None:
        unsent = self.which(lambda known: not known.sent)
        seq_id = data.draw(st.sampled_from((not again and unsent) or self.which()))
        self.tick()
        self.send_to(seq_id, gone=gone)

    def send_to(self, seq_id: int, *, gone: bool) -> None:
        """Send to a provider that receives it, or to one that has hung up already."""
        known = self.expire(seq_id)
        outcome = self.all(lambda side: side.send(seq_id, gone=gone))
        if not known.state.live or known.sent:
            assert outcome == "LocalProtocolError"
        elif gone:
            assert outcome == "PeerClosedError"
        else:
            assert outcome == "ok"
            known.sent = known.peer = True

    @precondition(lambda self: self.shares)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(self.which()))
        self.tick()
        known = self.shares[seq_id]
        silent = known.peer and not known.said
        outcome = self.all(lambda side: side.wait(seq_id, 0.001 if silent else 60))
        if not known.sent:
            assert outcome == "LocalProtocolError"
        elif silent or self.now > known.deadline:
            assert outcome == "DeadlineExceededError"
        elif known.said:
            assert outcome == ("ok" if known.said.pop(0) else "LedgerIncompleteError")
        else:
            assert outcome == "PeerClosedError"

    @precondition(lambda self: self.which(lambda known: known.state is ShareState.COMPLETE))
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(self.which(lambda known: known.state is ShareState.COMPLETE)))
        self.adopt_from(seq_id, self.shares[seq_id].filled or [])

    @precondition(lambda self: self.shares)
    @rule(data=st.data(), tokens=st.sampled_from(PROMPTS), behind=MOSTLY, elsewhere=st.booleans())
    def adopt_anything(self, data: st.DataObject, tokens: list[int], behind: bool, elsewhere: bool) -> None:
        """By another decoder with the same model first, perhaps, which changes nothing."""
        seq_id = data.draw(st.sampled_from(self.which()))
        if behind:
            tokens = self.shares[seq_id].prefix + tokens
        if elsewhere:
            assert self.all(lambda side: side.adopt_elsewhere(seq_id, tokens)) == "ReplayError"
        self.adopt_from(seq_id, tokens)

    def adopt_from(self, seq_id: int, tokens: list[int]) -> None:
        self.tick()
        known = self.expire(seq_id)
        outcome = self.all(lambda side: side.adopt(seq_id, tokens))
        if not known.state.live:
            assert outcome == known.replay
        elif known.ledger is not LedgerState.COMPLETE:
            if known.ledger is LedgerState.FAILED:
                assert outcome == "LedgerIncompleteError"
                self.end(seq_id, ShareState.FAILED)
            else:
                assert outcome == "LedgerPendingError"  # it lives on
        elif tokens != known.filled:
            same_length = known.filled is not None and len(tokens) == len(known.filled)
            assert outcome == ("LedgerDigestError" if same_length else "LedgerIncompleteError")
            self.end(seq_id, ShareState.FAILED)
        elif self.held.get(seq_id, []) != known.prefix:
            assert outcome == "SequenceInUseError"
            self.end(seq_id, ShareState.FAILED)
        elif known.touched:
            assert outcome == "LedgerDigestError"
            self.end(seq_id, ShareState.FAILED)
        else:
            assert outcome == "ok"
            known.state = ShareState.ADOPTED
            self.held[seq_id] = tokens
            if not known.prefix:
                self.cuts[seq_id] = []
            elif seq_id in self.cuts:
                self.cuts[seq_id].append(len(known.prefix))

    @precondition(lambda self: len(self.which(lambda known: known.state.live)) > 1)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Who releases does not look at the clock."""
        seq_id = data.draw(st.sampled_from(self.which()))
        self.tick()
        assert self.all(lambda side: side.release(seq_id)) == "ok"
        if self.shares[seq_id].state.live:
            self.end(seq_id, ShareState.RELEASED)

    @precondition(lambda self: self.n_steps >= 20)
    @rule()
    def restart(self) -> None:
        """Another decoder takes the place of this one; no provider notices."""
        self.tick()
        assert self.all(Side.stop) == "ok"
        assert self.all(lambda side: side.share(0, 60_000)) == "LocalProtocolError"
        for seq_id, known in self.shares.items():
            assert self.all(partial(Side.adopt, seq_id=seq_id, tokens=PROMPTS[0])) == known.replay
        assert self.all(Side.start) == "ok"
        self.old = ["ReplayError"] * (len(self.old) + len(self.shares))
        self.shares.clear()
        self.held.clear()
        self.cuts.clear()
        self.n_steps = 0

    @precondition(lambda self: self.old and self.shares)
    @rule(data=st.data())
    def use_an_older_share(self, data: st.DataObject) -> None:
        """Of this decoder or of one before it: it is worth nothing, and does no harm to its successor."""
        n = data.draw(st.integers(0, len(self.old) - 1))
        outcome = self.all(lambda side: side.slots.decoder.adopt(side.old[n], PROMPTS[0]))
        assert outcome == self.old[n]
        assert self.all(lambda side: side.old[n].send("/nowhere")) == "LocalProtocolError"
        assert self.all(lambda side: side.old[n].release()) == "ok"
        assert not any(side.old[n].state.live for side in self.sides)

    # -- its providers --

    @precondition(lambda self: self.which(lambda known: known.may_fill))
    @rule(data=st.data(), tokens=st.sampled_from(PROMPTS), whole=MOSTLY)
    def fill(self, data: st.DataObject, tokens: list[int], whole: bool) -> None:
        seq_id = data.draw(st.sampled_from(self.which(lambda known: known.may_fill)))
        self.fill_for(seq_id, self.shares[seq_id].prefix + tokens)
        if whole:
            self.publish_for(seq_id)

    def fill_for(self, seq_id: int, tokens: list[int]) -> None:
        assert self.all(lambda side: side.fill(seq_id, tokens)) == "ok"
        self.shares[seq_id].write(LedgerState.FILLING)
        self.shares[seq_id].filled = tokens

    @precondition(lambda self: self.which(lambda known: known.may_publish))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.publish_for(data.draw(st.sampled_from(self.which(lambda known: known.may_publish))))

    def publish_for(self, seq_id: int) -> None:
        assert self.all(lambda side: side.publish(seq_id)) == "ok"
        self.shares[seq_id].write(LedgerState.COMPLETE)

    @precondition(lambda self: self.which(lambda known: known.peer))
    @rule(data=st.data(), what=st.sampled_from(["fail", "die", "say it is done", "say it failed"]))
    def trouble(self, data: st.DataObject, what: str) -> None:
        """A provider gives up, dies, or says how it went, true or not: nobody adopts on this word."""
        seq_id = data.draw(st.sampled_from(self.which(lambda known: known.peer)))
        known = self.shares[seq_id]
        if what == "die":
            assert self.all(lambda side: side.die(seq_id)) == "ok"
            known.peer = False
        elif what == "fail":
            outcome = self.all(lambda side: side.fail(seq_id))
            assert outcome == ("ok" if known.undecided else "LocalProtocolError")
            if known.undecided:
                known.write(LedgerState.FAILED)
        else:
            ok = what == "say it is done"
            assert self.all(lambda side: side.say(seq_id, ok=ok)) == "ok"
            known.said.append(ok)

    @precondition(lambda self: self.touchable())
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        """A provider writes over what the sequence held before its share."""
        self.touch_in(data.draw(st.sampled_from(self.touchable())))

    def touch_in(self, seq_id: int) -> None:
        assert self.all(lambda side: side.touch(seq_id)) == "ok"
        self.shares[seq_id].touched = True
        self.cuts.pop(seq_id, None)  # it answers otherwise now

    def touchable(self) -> list[int]:
        live = self.which(lambda known: known.peer and known.state.live and bool(known.prefix))
        return [seq_id for seq_id in live if self.held.get(seq_id) == self.shares[seq_id].prefix]

    # -- everybody else --

    @precondition(lambda self: self.which(lambda known: known.state.live))
    @rule(hours=st.sampled_from(STEPS))
    def time_passes(self, hours: float) -> None:
        """Nobody looks at the clock before the next step."""
        self.ahead = hours

    @initialize(seq_id=st.integers(0, N_SEQ - 1), tokens=st.sampled_from(PROMPTS))
    def somebody_is_there_already(self, seq_id: int, tokens: list[int]) -> None:
        self.request_in(seq_id, tokens)

    @precondition(lambda self: self.shares and len(self.held) < N_SEQ - 1)
    @rule(data=st.data(), tokens=st.sampled_from(PROMPTS), between=st.booleans())
    def request(self, data: st.DataObject, tokens: list[int], between: bool) -> None:
        """A request goes to an empty slot, also to one that is shared."""
        # what takes the place of a prefix that is shared, and what a provider writes there, look the same
        behind = self.which(lambda known: known.state.live and bool(known.prefix))
        empty = [seq_id for seq_id in range(N_SEQ) if seq_id not in self.held and seq_id not in behind]
        if not empty:
            return
        shared = [seq_id for seq_id in self.which(lambda known: known.state.live) if seq_id in empty]
        self.request_in(data.draw(st.sampled_from((between and shared) or empty)), tokens)

    def request_in(self, seq_id: int, tokens: list[int]) -> None:
        assert self.all(lambda side: side.request(seq_id, tokens)) == "ok"
        self.held[seq_id] = tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data(), tokens=st.sampled_from(PROMPTS[:2]))
    def go_on(self, data: st.DataObject, tokens: list[int]) -> None:
        """A decoder answers, also behind what is shared: nobody adopts that share then."""
        seq_id = data.draw(st.sampled_from(sorted(self.held)))
        self.tick()
        self.go_on_in(seq_id, tokens)

    def go_on_in(self, seq_id: int, tokens: list[int]) -> None:
        shared = seq_id in self.shares and self.expire(seq_id).state.live
        if seq_id not in self.held:
            return  # that was the end of a share whose provider had changed it
        assert self.all(lambda side: side.go_on(seq_id, tokens)) == "ok"
        n_past = len(self.held[seq_id])
        self.held[seq_id] = self.held[seq_id] + tokens
        if shared:  # not where a local run goes on
            self.cuts.pop(seq_id, None)
        elif seq_id in self.cuts:
            self.cuts[seq_id] += range(n_past, n_past + len(tokens))

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        """Which leaves a share and its cells alone."""
        seq_id = data.draw(st.sampled_from(sorted(self.held)))
        assert self.all(lambda side: side.clear(seq_id)) == "ok"
        self.drop(seq_id)

    @precondition(lambda self: self.cuts)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """What was adopted answers as a local prefill at the same place does."""
        seq_id = data.draw(st.sampled_from(sorted(self.cuts)))
        for side in self.sides:
            expected = side.slots.expected(
                self.held[seq_id], seq_id, side.first[seq_id], cuts=self.cuts[seq_id]
            )
            assert side.slots.answer(seq_id) == expected
        del self.cuts[seq_id]  # what comes behind goes on where this answer was, not where a local run does

    # -- after each step --

    @invariant()
    def shares_are_as_the_model_says(self) -> None:
        live = {seq_id for seq_id in self.shares if self.expire(seq_id).state.live}
        for side in self.sides:
            for seq_id, known in self.shares.items():
                assert side.shares[seq_id].state is known.state
            assert {share.seq_id for share in side.slots.decoder._shares.values()} == live
            for seq_id in live:  # its cells are not free
                with pytest.raises(SequenceInUseError):
                    side.slots.decoder.share(seq_id, n_tokens=1)

    @invariant()
    def slots_hold_what_was_put_there(self) -> None:
        for side in self.sides:
            for seq_id in range(N_SEQ):
                content = side.slots.content(seq_id)
                assert content == side.contents.get(seq_id, b"")
                assert bool(content) == (seq_id in self.held)

    def teardown(self) -> None:
        try:
            for side in self.sides:
                side.close()
        finally:
            self.clock.undo()


TestFakeDecoderLife = DecoderLife.TestCase
TestFakeDecoderLife.settings = settings(stateful_step_count=30)
