"""The engine: what it decides, what it learns, and that no failure ever reaches a request."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvshare import (
    DeadlineExceededError,
    ExpiredError,
    KvshareError,
    LedgerDigestError,
    LedgerIncompleteError,
    LocalProtocolError,
    NativeError,
    NoFreeCellsError,
    NotShareableError,
    PeerClosedError,
    PeerRefusedError,
    RemoteProtocolError,
    ReplayError,
    SequenceInUseError,
    fds,
)
from kvshare.engine import Engine, InProcessDecoder, ProviderClient
from kvshare.policy import (
    FAILURES,
    REFUSALS,
    Estimate,
    Evict,
    Held,
    Memory,
    Policy,
    Reason,
    Record,
    Route,
    Stage,
    Timings,
    choose_slot,
    common_prefix,
    reason_of,
)
from kvshare.server import AdoptedInSlot, ServerBusyError, ServerClient, Shared, Slot
from kvshare.testing import FakeDecoder
from kvshare.testing.fakes import plain_layout
from kvshare.testing.http import FakeServer, FakeService

TOKENS = tuple(range(100, 400))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def until(condition: Callable[[], bool]) -> None:
    """Wait, for a bounded time, until something holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in time")


# -- decisions ---------------------------------------------------------------------------------


def policy(
    *, provider: float | None = None, local: float | None = None, fixed: float | None = None, **options: Any
) -> Policy:
    """Return a policy that has measured these speeds, milliseconds a token."""
    made = Policy(**{"threshold": 100, **options})
    made._warm = True
    made.provider_ms.value, made.local_ms.value, made.fixed_ms.value = provider, local, fixed
    return made


@pytest.mark.parametrize(
    ("n_tokens", "n_cached", "expected"),
    [
        (0, 0, Reason.SHORT),
        (99, 0, Reason.SHORT),
        (100, 0, Reason.HANDED_OVER),
        (1000, 0, Reason.HANDED_OVER),
        (1000, 901, Reason.CACHED),
        (1000, 900, Reason.HANDED_OVER),
        (1000, 1000, Reason.CACHED),
    ],
)
def test_threshold(n_tokens: int, n_cached: int, expected: Reason) -> None:
    verdict = policy().decide(n_tokens, n_cached=n_cached, now=0)
    assert verdict.reason is expected
    assert verdict.hand_over is (expected is Reason.HANDED_OVER)


def test_a_single_token_is_never_handed_over() -> None:
    assert policy(threshold=1).decide(1, now=0).reason is Reason.SHORT


@pytest.mark.parametrize(
    ("provider", "local", "fixed", "options", "expected"),
    [
        (1.0, 2.0, 0, {}, Reason.HANDED_OVER),
        (2.0, 1.0, 0, {}, Reason.LOCAL_FASTER),
        (1.0, 1.0, 5, {}, Reason.LOCAL_FASTER),  # the fixed cost decides
        (None, 1.0, 0, {}, Reason.HANDED_OVER),  # nothing is known of the provider yet
        (1.0, None, 0, {}, Reason.HANDED_OVER),
        (3.0, 1.0, 0, {"others_run": True}, Reason.HANDED_OVER),  # slower, but nobody stalls
        (5.0, 1.0, 0, {"others_run": True}, Reason.LOCAL_FASTER),
        (1.0, 2.0, 0, {"n_queued": 900}, Reason.HANDED_OVER),
        (1.0, 2.0, 0, {"n_queued": 1100}, Reason.LOCAL_FASTER),  # others wait before it
        (1.0, 2.0, 0, {"n_cached": 400}, Reason.HANDED_OVER),
        (1.0, 2.0, 0, {"n_cached": 600}, Reason.LOCAL_FASTER),  # the decoder has most of it
    ],
)
def test_the_faster_one_wins(
    provider: float | None, local: float | None, fixed: float, options: dict[str, Any], expected: Reason
) -> None:
    found = policy(provider=provider, local=local, fixed=fixed).decide(1000, now=0, **options)
    assert found.reason is expected


def test_a_slow_provider_is_probed_now_and_then() -> None:
    tried = policy(provider=2.0, local=1.0, probe_every=4)
    found = [tried.decide(1000, now=0).hand_over for _ in range(8)]
    assert found == [False, False, False, True] * 2


def test_the_decoder_is_probed_if_nothing_is_known_of_it() -> None:
    tried = policy(probe_every=3)
    for _ in range(3):
        assert tried.decide(1000, now=0).hand_over
        tried.handed_over(1000, prefill_ms=1000, other_ms=1)
    assert tried.decide(1000, others_run=True, now=0).hand_over  # never at the cost of a stream
    assert tried.decide(1000, now=0).reason is Reason.PROBE_LOCAL
    tried.prefilled_locally(1000, 3000)
    assert tried.decide(1000, now=0).hand_over


def test_speeds_are_learned_and_followed() -> None:
    learned = policy()
    learned.handed_over(1000, prefill_ms=2000, other_ms=1)
    learned.prefilled_locally(1000, 1000)
    assert learned.decide(1000, now=0).reason is Reason.LOCAL_FASTER
    assert learned.expected_ms(500) == pytest.approx(1001)
    for _ in range(10):  # another core became free
        learned.handed_over(1000, prefill_ms=500, other_ms=1)
    assert learned.decide(1000, now=0).hand_over


def test_a_cold_provider_teaches_nothing() -> None:
    learned = Policy(threshold=100)
    learned.handed_over(1000, prefill_ms=9000, other_ms=9)
    assert learned.provider_ms.value is None
    learned.handed_over(1000, prefill_ms=1000, other_ms=1)
    assert learned.provider_ms.value == 1
    learned.failed(0)
    learned.handed_over(1000, prefill_ms=9000, other_ms=9)
    assert learned.provider_ms.value == 1


def test_short_prompts_teach_nothing() -> None:
    learned = policy()
    learned.prefilled_locally(3, 100)
    learned.prefilled_locally(1000, 0)
    assert learned.local_ms.value is None


def test_failures_pause_longer_and_longer() -> None:
    tried = policy(max_pause_s=5)
    now, pauses = 0.0, []
    for _ in range(5):
        tried.failed(now)
        start = now
        while tried.decide(1000, now=now).reason is Reason.PAUSED:
            now += 0.5
        pauses.append(now - start)
    assert pauses == [1, 2, 4, 5, 5]
    tried.handed_over(10, prefill_ms=1, other_ms=1)
    tried.failed(now)
    assert tried.decide(1000, now=now + 1).hand_over


def test_very_many_failures_do_not_overflow() -> None:
    tried = policy()
    for _ in range(5000):
        tried.failed(0)
    assert tried.decide(1000, now=61).hand_over


def test_estimate() -> None:
    estimate = Estimate(0.5)
    assert estimate.value is None
    for sample in (10.0, math.nan, math.inf, -1.0, 20.0):
        estimate.add(sample)
    assert estimate.value == 15


@pytest.mark.parametrize(
    ("a", "b", "n"),
    [
        ((), (), 0),
        ((1,), (), 0),
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2, 3), (1, 2), 2),
        ((1, 2, 3), (1, 9, 3), 1),
        ((1,), (2,), 0),
    ],
)
def test_common_prefix(a: tuple[int, ...], b: tuple[int, ...], n: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == n


def test_memory_is_bounded_and_forgets() -> None:
    memory = Memory(2)
    memory.add((1, 2, 3), None)
    memory.add((1, 2, 4, 5), 7)
    assert memory.n_cached((1, 2, 4, 9)) == 3
    memory.forget(7)
    assert memory.n_cached((1, 2, 4, 9)) == 2
    memory.add((8,), None)
    memory.add((9,), None)
    assert memory.n_cached((1, 2, 3)) == 0
    memory.forget()
    assert memory.n_cached((8,)) == 0


@pytest.mark.parametrize(
    ("prompt", "n_cached", "is_history"),
    [
        ((1, 2, 3, 4, 9, 9, 9, 9), 6, True),  # the prompt, and then perhaps the answer
        ((1, 2, 3, 4), 4, True),
        ((1, 2, 3, 9, 9, 9), 3, False),  # keeps a half
        ((1, 9), 1, False),
        ((9, 1, 2, 3, 4), 0, False),
        ((), 0, False),
    ],
)
def test_what_a_prompt_goes_on_behind(prompt: tuple[int, ...], n_cached: int, is_history: bool) -> None:
    held = Held((1, 2, 3, 4), 0, 6)
    assert held.n_cached(prompt) == n_cached
    assert held.is_history_of(prompt) is is_history


@pytest.mark.parametrize(
    ("n_tokens", "in_slot", "fits"),
    [
        (6, 6, True),
        (6, 0, True),  # cleared, and saved elsewhere
        (6, 7, False),
        (6, 4, False),
        (None, 3, True),  # adopted, and nothing has run there
        (None, 9, True),  # its client hung up at some point
        (None, 2, False),
    ],
)
def test_a_slot_says_whether_it_is_the_one(n_tokens: int | None, in_slot: int, fits: bool) -> None:
    slot = Slot(0, idle=True, n_tokens=in_slot, n_ctx=1000)
    assert Held((1, 2, 3, 4), 0, n_tokens).fits(slot) is fits


def test_memory_keeps_the_newest_of_a_slot_and_of_a_chat() -> None:
    memory = Memory()
    memory.add((1, 2), 0, 3)
    memory.add((7, 8), 0, 3)
    assert memory.n_cached((1, 2)) == 0
    memory.add((1, 2), None, 3)
    memory.add((1, 2, 3, 4), None, 5)
    assert [held.tokens for held in memory._held] == [(7, 8), (1, 2, 3, 4)]
    assert memory.history((1, 2, 3, 4, 5, 6)) == Held((1, 2, 3, 4), None, 5)
    memory.vacate(0)
    assert memory.history((7, 8, 9)) == Held((7, 8), None, 3)


def test_a_slot_that_was_not_named_is_found_by_what_it_holds() -> None:
    memory = Memory()
    slots = [Slot(i, idle=True, n_tokens=n, n_ctx=1000) for i, n in enumerate([12, 0, 9, 12])]
    prompt = tuple(range(1, 20))
    memory.add((1, 2, 3), None, 9)
    held = memory.history(prompt)
    assert held is not None
    home = memory.home(held, slots)
    assert home is not None
    assert home.id_slot == 2
    memory.add((5, 6), None, 9)  # it might be this one's
    assert memory.home(held, slots) is None
    memory.forget()
    memory.add((1, 2, 3), None, 12)  # two hold as much
    held = memory.history(prompt)
    assert held is not None
    assert memory.home(held, slots) is None
    memory.add((7,), 0, 12)  # one of these is somebody else's
    home = memory.home(held, slots)
    assert home is not None
    assert home.id_slot == 3


SLOTS = [
    Slot(0, idle=True, n_tokens=50, n_ctx=1000),
    Slot(1, idle=False, n_tokens=0, n_ctx=1000),
    Slot(2, idle=True, n_tokens=0, n_ctx=1000),
    Slot(3, idle=True, n_tokens=0, n_ctx=4000),
]


@pytest.mark.parametrize(
    ("n_tokens", "reserved", "evictable", "expected"),
    [
        (100, (), (), (2, False)),
        (100, (2,), (), (3, False)),
        (2000, (), (), (3, False)),
        (1000, (), (), (3, False)),  # no room for an answer in the others
        (4000, (), (0,), None),
        (100, (2, 3), (), None),
        (100, (2, 3), (0,), (0, True)),
        (100, (2, 3), (1,), None),  # busy
        (100, (), (0,), (2, False)),  # a clean one first
    ],
)
def test_choose_slot(
    n_tokens: int, reserved: tuple[int, ...], evictable: tuple[int, ...], expected: tuple[int, bool] | None
) -> None:
    slot, occupied = choose_slot(SLOTS, n_tokens, reserved=reserved, evictable=evictable)
    assert (slot and (slot.id_slot, occupied)) == expected


@pytest.mark.parametrize(
    ("stage", "error", "expected"),
    [
        (Stage.SLOTS, PeerClosedError(""), Reason.SERVER_GONE),
        (Stage.SLOTS, NotShareableError(""), Reason.NOT_SHAREABLE),
        (Stage.SLOTS, DeadlineExceededError(""), Reason.SERVER_SLOW),
        (Stage.SHARE, NotShareableError(""), Reason.NOT_SHAREABLE),
        (Stage.SHARE, SequenceInUseError(""), Reason.SHARE_REFUSED),
        (Stage.SHARE, NoFreeCellsError(""), Reason.SHARE_REFUSED),
        (Stage.SHARE, LocalProtocolError(""), Reason.SHARE_REFUSED),
        (Stage.SHARE, PeerRefusedError(""), Reason.PROVIDER_ABSENT),
        (Stage.SHARE, DeadlineExceededError(""), Reason.SERVER_SLOW),
        (Stage.PREFILL, PeerRefusedError(""), Reason.PROVIDER_ABSENT),
        (Stage.PREFILL, PeerClosedError(""), Reason.PROVIDER_DIED),
        (Stage.PREFILL, DeadlineExceededError(""), Reason.PROVIDER_SLOW),
        (Stage.PREFILL, LedgerIncompleteError(""), Reason.PROVIDER_FAILED),
        (Stage.PREFILL, RemoteProtocolError(""), Reason.ERROR),
        (Stage.PREFILL, LocalProtocolError(""), Reason.PROMPT_TOO_LONG),
        (Stage.PREFILL, ServerBusyError(""), Reason.PROVIDER_BUSY),
        (Stage.ADOPT, LedgerDigestError(""), Reason.ADOPT_REFUSED),
        (Stage.ADOPT, ReplayError(""), Reason.ADOPT_REFUSED),
        (Stage.ADOPT, SequenceInUseError(""), Reason.ADOPT_REFUSED),
        (Stage.ADOPT, ExpiredError(""), Reason.EXPIRED),
        (Stage.ADOPT, PeerClosedError(""), Reason.SERVER_GONE),
        (Stage.ADOPT, NativeError("f", 1, ""), Reason.ERROR),
        (Stage.ADOPT, OSError(), Reason.ERROR),
    ],
)
def test_reason_of(stage: Stage, error: Exception, expected: Reason) -> None:
    assert reason_of(stage, error) is expected
    assert expected in FAILURES


def test_refusals_are_failures() -> None:
    assert REFUSALS < FAILURES


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        {},
        {"cache_n": 1, "prompt_n": 2},
        {"cache_n": "1", "prompt_n": 2, "prompt_ms": 3},
        {"cache_n": True, "prompt_n": 2, "prompt_ms": 3},
        {"cache_n": 1, "prompt_n": 2, "prompt_ms": math.nan},
    ],
)
def test_timings_that_are_none(value: object) -> None:
    assert Timings.from_json(value) is None


def test_timings_say_how_much_is_held() -> None:
    value = {"cache_n": 100, "prompt_n": 20, "prompt_ms": 3.5, "predicted_n": 8}
    timings = Timings.from_json(value)
    assert timings == Timings(100, 20, 3.5, 8)
    assert timings.n_held == 127  # the last token that was generated was not evaluated
    assert Timings(100, 20, 3.5, 0).n_held == 120
    for bad in (None, -1, "8", 8.0, True):
        timings = Timings.from_json({**value, "predicted_n": bad})
        assert timings == Timings(100, 20, 3.5)
        assert timings.n_held is None


def test_timings() -> None:
    assert Timings.from_json({"cache_n": 1, "prompt_n": 2, "prompt_ms": 3.5}) == Timings(1, 2, 3.5)


# -- driving, with scripted partners -----------------------------------------------------------


class Scripted:
    """A decoder and a provider in one that do what they are told, and note what they are asked."""

    socket = "/scripted"

    def __init__(self, n_slots: int = 2) -> None:
        self.calls: list[str] = []
        self.raises: dict[str, BaseException] = {}
        self.waits: dict[str, float] = {}
        self.n_tokens = [0] * n_slots
        self.id_task = [-1] * n_slots
        self.live: dict[int, int] = {}
        self.expires_ms = 60_000
        self.n_shares = 0
        self.busy: set[int] = set()
        self.n_prefix: int | None = None  # what a share answers; None is what the slot holds
        self.prompts: list[tuple[int, ...]] = []  # of the shares

    async def _do(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(self.waits.get(name, 0))
        if name in self.raises:
            raise self.raises[name]

    async def slots(self) -> list[Slot]:
        await self._do("slots")
        return [
            Slot(i, idle=i not in self.busy, n_tokens=n, n_ctx=4096, id_task=self.id_task[i])
            for i, n in enumerate(self.n_tokens)
        ]

    async def share(
        self,
        id_slot: int,
        socket: str,
        *,
        n_tokens: int | None = None,
        expires_ms: int | None = None,
        tokens: Sequence[int] | None = None,
    ) -> Shared:
        assert socket == self.socket
        assert tokens is not None
        assert n_tokens == len(tokens)
        assert expires_ms is not None
        assert expires_ms > 0
        if id_slot in self.live.values():
            raise SequenceInUseError("leased")
        await self._do("share")
        self.n_shares += 1
        share_id = 1000 + self.n_shares
        self.live[share_id] = id_slot
        self.prompts.append(tuple(tokens))
        n_prefix = min(self.n_tokens[id_slot], len(tokens) - 1) if self.n_prefix is None else self.n_prefix
        return Shared(id_slot, share_id, self.expires_ms, 1.0, "", "", {}, n_prefix)

    async def prefill(self, share_id: int, tokens: Sequence[int], *, deadline: float) -> None:
        assert share_id in self.live
        assert tuple(tokens) == self.prompts[-1][:-1]
        assert deadline > time.monotonic()
        await self._do("prefill")

    async def adopt(self, id_slot: int, share_id: int, tokens: Sequence[int]) -> AdoptedInSlot:
        assert self.live[share_id] == id_slot
        await self._do("adopt")
        del self.live[share_id]
        self.n_tokens[id_slot] = len(tokens)
        return AdoptedInSlot(id_slot, len(tokens), len(tokens), 0, 1.0)

    async def release(self, id_slot: int, share_id: int) -> None:
        assert self.live.pop(share_id, id_slot) == id_slot
        await self._do("release")

    async def erase(self, id_slot: int) -> None:
        await self._do("erase")
        self.n_tokens[id_slot] = 0


def engine(partner: Scripted, **options: Any) -> Engine:
    return Engine(partner, partner, Policy(threshold=100), **options)


async def outcome(driven: Engine, tokens: Sequence[int] = TOKENS) -> Record:
    async with driven.prepared(tokens) as record:
        return record


def test_a_handoff() -> None:
    async def work() -> None:
        partner = Scripted()
        record = await outcome(engine(partner))
        assert partner.calls == ["slots", "share", "prefill", "adopt"]
        assert (record.route, record.reason) == (Route.HANDOFF, Reason.HANDED_OVER)
        assert (record.id_slot, record.n_tokens, record.n_handed, record.bytes_moved) == (0, 300, 299, 0)
        assert min(record.share_ms or 0, record.prefill_ms or 0, record.adopt_ms or 0) > 0
        assert record.to_json()["path"] == "handoff"

    run(work())


def test_a_short_prompt_asks_nobody() -> None:
    async def work() -> None:
        partner = Scripted()
        record = await outcome(engine(partner), TOKENS[:50])
        assert (record.route, record.reason, partner.calls) == (Route.LOCAL, Reason.SHORT, [])

    run(work())


@pytest.mark.parametrize(
    ("stage", "error", "expected", "released"),
    [
        ("slots", PeerClosedError("gone"), Reason.SERVER_GONE, False),
        ("share", NotShareableError("why"), Reason.NOT_SHAREABLE, False),
        ("share", SequenceInUseError("busy"), Reason.SHARE_REFUSED, False),
        ("share", PeerRefusedError("nobody"), Reason.PROVIDER_ABSENT, False),
        ("prefill", PeerClosedError("died"), Reason.PROVIDER_DIED, True),
        ("prefill", DeadlineExceededError("slow"), Reason.PROVIDER_SLOW, True),
        ("prefill", LedgerIncompleteError("failed"), Reason.PROVIDER_FAILED, True),
        ("adopt", LedgerDigestError("differs"), Reason.ADOPT_REFUSED, True),
        ("adopt", ExpiredError("late"), Reason.EXPIRED, True),
        ("adopt", PeerClosedError("gone"), Reason.SERVER_GONE, True),
        ("prefill", ValueError("a bug"), Reason.ERROR, True),
        ("slots", ValueError("a bug"), Reason.ERROR, False),
        ("share", OSError("a bug"), Reason.ERROR, False),
    ],
)
def test_no_failure_reaches_the_request(
    stage: str, error: Exception, expected: Reason, released: bool
) -> None:
    async def work() -> None:
        partner = Scripted()
        partner.raises[stage] = error
        driven = engine(partner)
        record = await outcome(driven)
        assert (record.route, record.reason, record.id_slot) == (Route.LOCAL, expected, None)
        assert str(error) in record.detail
        assert partner.calls.count("release") == released
        assert partner.live == {}
        assert not driven._reserved

    run(work())


def test_a_release_that_fails_is_told() -> None:
    async def work() -> None:
        partner = Scripted()
        partner.raises = {"prefill": PeerClosedError("died"), "release": PeerClosedError("restarted")}
        record = await outcome(engine(partner))
        assert record.reason is Reason.PROVIDER_DIED
        assert record.detail == "died; release: restarted"

    run(work())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_slot_is_reserved_until_a_busy_decoder_has_released_it(
    monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """A server that works on a batch answers late, and forgets what a client asked that hangs up."""
    monkeypatch.setattr("kvshare.engine.CLEANUP_TIMEOUT_S", 0.02)
    monkeypatch.setattr("kvshare.engine.RETRY_S", 0.01)

    async def work() -> None:
        partner = Scripted(n_slots=1)
        partner.raises = {"release": DeadlineExceededError("no answer")}
        partner.waits = {"prefill": 5} if cancelled else {}
        if not cancelled:
            partner.raises["prefill"] = LedgerIncompleteError("failed")
        driven = engine(partner)
        task = asyncio.ensure_future(outcome(driven))
        await until(lambda: "prefill" in partner.calls)
        if cancelled:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            assert "no answer yet" in (await task).detail
        await until(lambda: partner.calls.count("release") > 2)
        assert driven._reserved == {0}
        del partner.raises["release"]
        await until(lambda: not driven._reserved)
        assert not driven._cleaning

    run(work())


def test_a_release_ends_with_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvshare.engine.CLEANUP_TIMEOUT_S", 0.02)
    monkeypatch.setattr("kvshare.engine.RETRY_S", 0.01)

    async def work() -> None:
        partner = Scripted()
        partner.expires_ms = 100
        partner.raises = {
            "prefill": LedgerIncompleteError("failed"),
            "release": DeadlineExceededError("no answer"),
        }
        driven = engine(partner)
        await outcome(driven)
        assert driven._reserved
        await until(lambda: not driven._reserved)

    run(work())


@pytest.mark.parametrize("n_adopted", [0, 298, 300])
def test_another_number_of_tokens_is_no_handoff(n_adopted: int) -> None:
    async def work() -> None:
        partner = Scripted()

        async def adopt(id_slot: int, share_id: int, tokens: Sequence[int]) -> AdoptedInSlot:
            return AdoptedInSlot(id_slot, n_adopted, n_adopted, 0, 1.0)

        partner.adopt = adopt  # type: ignore[method-assign]
        record = await outcome(engine(partner))
        assert (record.route, record.reason, record.id_slot) == (Route.LOCAL, Reason.ERROR, None)
        assert f"{n_adopted} of 299 tokens" in record.detail

    run(work())


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LocalProtocolError("too many for a message"), Reason.PROMPT_TOO_LONG),
        (ServerBusyError("the provider is busy"), Reason.PROVIDER_BUSY),
    ],
)
def test_what_says_nothing_of_the_next_prompt_does_not_pause(error: Exception, reason: Reason) -> None:
    async def work() -> None:
        partner = Scripted()
        partner.raises["prefill"] = error
        driven = engine(partner)
        assert (await outcome(driven)).reason is reason
        driven.memory.forget()
        del partner.raises["prefill"]
        assert (await outcome(driven)).reason is Reason.HANDED_OVER

    run(work())


def test_a_slot_that_was_refused_comes_last() -> None:
    """The share of somebody else may be there."""

    async def work() -> None:
        partner = Scripted(n_slots=3)
        partner.live[7] = 0
        driven = engine(partner)
        assert (await outcome(driven)).reason is Reason.SHARE_REFUSED
        driven.memory.forget()
        record = await outcome(driven)
        assert (record.reason, record.id_slot) == (Reason.HANDED_OVER, 1)

    run(work())


def test_a_request_that_was_not_answered_leaves_nothing() -> None:
    async def work() -> None:
        partner = Scripted()
        partner.busy = {0, 1}
        driven = engine(partner)
        async with driven.prepared(TOKENS) as record:
            assert record.reason is Reason.NO_CLEAN_SLOT
            record.answered = False
        partner.busy = set()
        assert (await outcome(driven)).reason is Reason.HANDED_OVER

    run(work())


def test_one_miss_forgets_one_prompt() -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        other = tuple(range(5000, 5300))
        await outcome(driven)
        await outcome(driven, other)
        async with driven.prepared(TOKENS) as record:
            assert (record.reason, record.id_slot) == (Reason.CACHED, 0)
            driven.observe(record, Timings(cache_n=0, prompt_n=300, prompt_ms=30))
        assert (await outcome(driven, other)).reason is Reason.CACHED
        async with driven.prepared(TOKENS) as record:  # it ran somewhere else: nothing is wrong
            driven.observe(record, Timings(cache_n=0, prompt_n=300, prompt_ms=30), id_slot=7)
            assert driven.memory.n_cached(TOKENS) == 300

    run(work())


def test_failures_pause_the_engine() -> None:
    async def work() -> None:
        partner = Scripted()
        now = [0.0]
        driven = engine(partner, clock=lambda: now[0])
        partner.raises["prefill"] = PeerClosedError("died")
        assert (await outcome(driven)).reason is Reason.PROVIDER_DIED
        assert (await outcome(driven)).reason in (Reason.PAUSED, Reason.CACHED)
        driven.memory.forget()
        assert (await outcome(driven)).reason is Reason.PAUSED
        driven.memory.forget()
        now[0] = 1.0
        del partner.raises["prefill"]
        assert (await outcome(driven)).reason is Reason.HANDED_OVER

    run(work())


def test_a_refused_share_does_not_pause() -> None:
    async def work() -> None:
        partner = Scripted()
        partner.raises["share"] = SequenceInUseError("busy")
        driven = engine(partner)
        await outcome(driven)
        driven.memory.forget()
        del partner.raises["share"]
        assert (await outcome(driven)).reason is Reason.HANDED_OVER

    run(work())


def test_the_share_bounds_the_prefill() -> None:
    async def work() -> None:
        partner = Scripted()
        partner.expires_ms = 500
        found: list[float] = []

        async def prefill(share_id: int, tokens: Sequence[int], *, deadline: float) -> None:
            found.append(deadline - time.monotonic())

        partner.prefill = prefill  # type: ignore[method-assign]
        await outcome(engine(partner, prefill_timeout_s=60))
        assert found[0] <= 0.5

    run(work())


@pytest.mark.parametrize("stage", ["slots", "share", "prefill", "adopt"])
def test_cancelling_cleans_up(stage: str) -> None:
    async def work() -> None:
        partner = Scripted()
        partner.waits[stage] = 0.05
        driven = engine(partner)
        task = asyncio.ensure_future(outcome(driven))
        await until(lambda: stage in partner.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await driven.close()
        assert partner.live == {}
        assert not driven._reserved
        assert driven._n_queued == 0
        assert ("release" in partner.calls) == (stage != "slots")

    run(work())


def test_a_slot_is_reserved_until_it_is_clean() -> None:
    async def work() -> None:
        partner = Scripted(n_slots=1)
        partner.waits = {"prefill": 5, "release": 0.1}
        driven = engine(partner)
        task = asyncio.ensure_future(outcome(driven))
        await until(lambda: "prefill" in partner.calls)
        assert (await outcome(driven)).reason is Reason.NO_CLEAN_SLOT
        driven.memory.forget()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await outcome(driven)).reason is Reason.NO_CLEAN_SLOT
        driven.memory.forget()
        await driven.close()
        partner.waits = {}
        assert (await outcome(driven)).reason is Reason.HANDED_OVER

    run(work())


def test_two_requests_take_two_slots() -> None:
    async def work() -> None:
        partner = Scripted()
        partner.waits = {"slots": 0.01, "prefill": 0.02}
        driven = engine(partner)
        records = await asyncio.gather(*(outcome(driven) for _ in range(3)))
        taken = sorted(record.id_slot for record in records if record.id_slot is not None)
        assert taken == [0, 1]
        assert [record.reason for record in records].count(Reason.NO_CLEAN_SLOT) == 1

    run(work())


def test_a_slot_stays_reserved_while_its_request_runs() -> None:
    async def work() -> None:
        partner = Scripted(n_slots=1)
        driven = engine(partner)
        async with driven.prepared(TOKENS) as record:
            assert record.id_slot == 0
            assert driven._reserved == {0}
        assert not driven._reserved

    run(work())


def test_a_request_that_fails_leaves_its_slot_evictable() -> None:
    async def work() -> None:
        driven = engine(Scripted(n_slots=1))
        with pytest.raises(ValueError, match="the client"):
            async with driven.prepared(TOKENS):
                raise ValueError("the client")
        assert not driven._reserved
        driven.memory.forget()
        assert (await outcome(driven)).reason is Reason.HANDED_OVER

    run(work())


def test_a_prompt_again_is_cached() -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await outcome(driven)
        record = await outcome(driven)
        assert (record.reason, record.n_cached) == (Reason.CACHED, 300)
        driven.observe(record, Timings(cache_n=0, prompt_n=300, prompt_ms=30))  # it was not
        assert driven.policy.local_ms.value == pytest.approx(0.1)
        assert (await outcome(driven)).reason is Reason.HANDED_OVER

    run(work())


# -- conversations -----------------------------------------------------------------------------


def turn(n: int) -> tuple[int, ...]:
    """Return the prompt of a turn: 300 tokens of the user each, and 20 of each answer."""
    return tuple(range(100, 100 + 320 * n + 300))


async def run_turn(driven: Engine, partner: Scripted, n: int, *, id_slot: int | None = None) -> Record:
    """Run a turn and its request; `id_slot` is where the request runs if the engine leaves that open."""
    async with driven.prepared(turn(n)) as record:
        where = id_slot if record.id_slot is None else record.id_slot
        assert where is not None
        n_cached = min(partner.n_tokens[where], len(turn(n)) - 1)
        partner.n_tokens[where] = len(turn(n)) + 19
        driven.observe(record, Timings(n_cached, len(turn(n)) - n_cached, 1e-3, 20))
    return record


def test_what_a_busy_slot_has_in_common_is_of_no_use() -> None:
    """Such as a system prompt: all of it would be prefilled in another slot."""

    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await outcome(driven, range(1000))
        other = (*range(400), *range(5000, 5050))
        partner.busy = {0}
        record = await outcome(driven, other)
        assert (record.reason, record.id_slot, record.n_cached) == (Reason.HANDED_OVER, 1, 0)

    run(work())


def test_every_turn_goes_to_the_slot_with_its_history() -> None:
    async def work() -> None:
        partner = Scripted(n_slots=3)
        partner.n_tokens[0] = 7  # somebody else's
        partner.waits["prefill"] = 0.03
        driven = engine(partner)
        for n in range(4):
            record = await run_turn(driven, partner, n)
            assert (record.reason, record.id_slot) == (Reason.HANDED_OVER, 1)
            assert record.n_handed == len(turn(n)) - 1
            assert record.n_prefix == (0 if n == 0 else len(turn(n - 1)) + 19)
            assert record.to_json()["n_prefix"] == record.n_prefix
        assert "erase" not in partner.calls
        assert driven._n_queued == 0
        # 300 tokens each took 30 ms, however long the conversation was
        assert driven.policy.provider_ms.value == pytest.approx(0.1, rel=0.5)

    run(work())


def test_only_what_is_new_counts() -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await run_turn(driven, partner, 0)
        # 319 tokens are there; with those of the answer 99 are new
        partner.calls.clear()
        async with driven.prepared(turn(1)[:418]) as record:
            assert (record.reason, record.n_cached) == (Reason.CACHED, 319)
            assert (record.route, record.id_slot) == (Route.LOCAL, 0)
            assert driven._reserved == {0}
        assert partner.calls == ["slots"]
        async with driven.prepared(turn(1)[:520]) as record:
            assert record.reason is Reason.HANDED_OVER

    run(work())


def test_a_short_turn_does_not_wait_for_its_slot() -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await run_turn(driven, partner, 0)
        short = turn(0) + (1,) * 30
        # what a slot has that is at work is of no use: all of it would be prefilled elsewhere
        partner.busy = {0}
        async with driven.prepared(short) as record:
            assert (record.reason, record.id_slot, record.n_cached) == (Reason.HANDED_OVER, 1, 0)
        partner.busy = set()
        partner.n_tokens[1] = 0
        driven.memory.forget()
        driven.memory.add(turn(0), 0, 319)
        async with driven.prepared(short) as first, driven.prepared(short) as second:  # reserved
            assert (first.reason, first.id_slot) == (Reason.CACHED, 0)
            assert (second.reason, second.id_slot) == (Reason.HANDED_OVER, 1)
        driven.memory.forget()
        driven.memory.add(turn(0), 0, 319)
        for n_tokens in (0, 318, 320):  # cleared: the server looks for it itself; or somebody else's
            partner.n_tokens[0] = n_tokens
            async with driven.prepared(short) as record:
                assert (record.reason, record.id_slot) == (Reason.CACHED, None)
            driven.memory.forget()
            driven.memory.add(turn(0), 0, 319)

    run(work())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_short_turn_leaves_its_slot_the_engines_own(cancelled: bool) -> None:
    async def work() -> None:
        partner = Scripted(n_slots=1)
        driven = engine(partner)
        await run_turn(driven, partner, 0)
        partner.id_task[0] = 5
        driven._evictable(await partner.slots())
        with contextlib.suppress(ConnectionError):
            async with driven.prepared(turn(0) + (1,) * 30) as record:
                assert record.id_slot == 0
                partner.id_task[0] = 6
                partner.n_tokens[0] = 340
                if cancelled:
                    raise ConnectionError
        # its history is known, whether the client has waited for all of the answer or not
        async with driven.prepared(turn(0) + (1,) * 60) as record:
            assert (record.reason, record.id_slot) == (Reason.CACHED, 0)
        record = await outcome(driven, range(1000, 1300))
        assert (record.reason, record.id_slot) == (Reason.HANDED_OVER, 0)
        assert "erase" in partner.calls

    run(work())


def test_a_short_turn_survives_a_server_that_does_not_tell() -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await run_turn(driven, partner, 0)
        partner.raises["slots"] = PeerClosedError("gone")
        record = await outcome(driven, turn(0) + (1,) * 30)
        assert (record.reason, record.id_slot) == (Reason.CACHED, None)
        assert driven.policy._n_failed == 0

    run(work())


@pytest.mark.parametrize("lost", ["busy", "reserved", "used"])
def test_a_turn_whose_slot_is_taken_goes_to_a_clean_one(lost: str) -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await run_turn(driven, partner, 0)
        partner.busy = {0} if lost == "busy" else set()
        driven._reserved = {0} if lost == "reserved" else set()
        partner.n_tokens[0] += 5 if lost == "used" else 0
        record = await outcome(driven, turn(1))
        assert (record.reason, record.id_slot, record.n_prefix) == (Reason.HANDED_OVER, 1, 0)
        assert "erase" not in partner.calls

    run(work())


def test_a_chat_that_only_begins_alike_keeps_its_slot() -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await run_turn(driven, partner, 0)
        other = turn(0)[:150] + tuple(range(5000, 5300))
        record = await outcome(driven, other)
        assert (record.reason, record.id_slot) == (Reason.HANDED_OVER, 1)
        assert (await run_turn(driven, partner, 1)).id_slot == 0

    run(work())


@pytest.mark.parametrize("stage", ["prefill", "adopt"])
def test_a_failed_turn_stays_with_its_history(stage: str) -> None:
    async def work() -> None:
        partner = Scripted()
        now = [0.0]
        driven = engine(partner, clock=lambda: now[0])
        await run_turn(driven, partner, 0)
        partner.raises[stage] = LedgerIncompleteError("no")
        record = await run_turn(driven, partner, 1)
        assert (record.route, record.id_slot, record.n_prefix) == (Route.LOCAL, 0, 319)
        assert record.n_reused == 319
        assert partner.live == {}
        del partner.raises[stage]
        record = await run_turn(driven, partner, 2)  # in the pause: still on its slot
        assert (record.reason, record.id_slot) == (Reason.PAUSED, 0)
        now[0] = 60.0
        record = await run_turn(driven, partner, 3)
        assert (record.reason, record.id_slot) == (Reason.HANDED_OVER, 0)
        assert record.n_prefix == len(turn(2)) + 19

    run(work())


def test_a_failed_turn_whose_slot_is_stuck_goes_as_it_came() -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await run_turn(driven, partner, 0)
        partner.raises = {"prefill": PeerClosedError("died"), "release": PeerClosedError("busy")}
        assert (await outcome(driven, turn(1))).id_slot is None

    run(work())


def test_a_turn_that_is_cancelled_leaves_its_history() -> None:
    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        await run_turn(driven, partner, 0)
        partner.waits["prefill"] = 5
        task = asyncio.ensure_future(outcome(driven, turn(1)))
        await until(lambda: partner.calls.count("prefill") == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await driven.close()
        partner.waits.clear()
        record = await run_turn(driven, partner, 1)
        assert (record.reason, record.id_slot, record.n_prefix) == (Reason.HANDED_OVER, 0, 319)

    run(work())


def test_a_chat_that_began_locally_is_found() -> None:
    """In OpenAI's form the answer does not say where it ran."""

    async def work() -> None:
        partner = Scripted(n_slots=4)
        driven = engine(partner)
        driven.policy.threshold = 400
        assert (await run_turn(driven, partner, 0, id_slot=2)).reason is Reason.SHORT
        driven.policy.threshold = 100
        record = await run_turn(driven, partner, 1)
        assert (record.reason, record.id_slot, record.n_prefix) == (Reason.HANDED_OVER, 2, 319)

    run(work())


def test_an_answer_may_say_where_it_ran() -> None:
    async def work() -> None:
        partner = Scripted(n_slots=4)
        driven = engine(partner)
        driven.policy.threshold = 400
        async with driven.prepared(turn(0)) as record:
            partner.n_tokens[3] = 319
            driven.observe(record, Timings(0, 300, 1e-3, 20), id_slot=3)
        partner.n_tokens[2] = 319  # by chance
        driven.policy.threshold = 100
        assert (await run_turn(driven, partner, 1)).id_slot == 3
        assert 3 in driven._owned  # a handoff has filled it since
        assert 2 not in driven._owned

    run(work())


def test_a_slot_may_hold_more_than_anybody_knew() -> None:
    """After a restart of the engine, from where the server keeps idle prompts."""

    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        partner.n_prefix = 299
        record = await outcome(driven)
        assert (record.route, record.reason, record.id_slot) == (Route.LOCAL, Reason.CACHED, 0)
        assert partner.calls == ["slots", "share", "release"]
        partner.n_prefix = 150
        record = await outcome(driven, range(1000, 1300))
        assert (record.reason, record.n_prefix) == (Reason.HANDED_OVER, 150)

    run(work())


@pytest.mark.parametrize("n_prefix", [-1, 300, 1 << 40])
def test_an_impossible_prefix_is_no_handoff(n_prefix: int) -> None:
    async def work() -> None:
        partner = Scripted()
        partner.n_prefix = n_prefix
        record = await outcome(engine(partner))
        assert (record.route, record.reason, record.id_slot) == (Route.LOCAL, Reason.ERROR, None)
        assert partner.live == {}

    run(work())


@pytest.mark.parametrize("keeps", [True, False])
def test_it_is_learned_whether_what_was_cleared_is_kept(keeps: bool) -> None:
    """A turn whose slot was cleared: what the provider has to do for it is what the last one had."""

    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        for n in range(3):
            await run_turn(driven, partner, n)
            partner.n_tokens[0] = 0
            partner.n_prefix = len(turn(n)) + 19 if keeps else 0
        assert driven._keeps_idle is keeps
        # not so much faster that it could start over
        driven.policy = policy(provider=2.0, local=2.5, fixed=0)
        record = await outcome(driven, turn(5))
        assert record.reason is (Reason.HANDED_OVER if keeps else Reason.LOCAL_FASTER)

    run(work())


def test_more_chats_than_slots() -> None:
    """The one that was not used for longest makes room, and starts over when it comes back."""

    async def work() -> None:
        partner = Scripted()
        driven = engine(partner)
        chats = [tuple(range(k, k + 300)) for k in (1000, 2000, 3000)]
        for tokens in chats[:2]:
            await outcome(driven, tokens)
        await outcome(driven, chats[0] + tuple(range(300)))
        record = await outcome(driven, chats[2])
        assert (record.id_slot, record.n_prefix) == (1, 0)
        assert partner.calls.count("erase") == 1
        record = await outcome(driven, chats[1] + tuple(range(300)))
        assert (record.n_cached, record.n_prefix, record.id_slot) == (0, 0, 0)

    run(work())


@pytest.mark.parametrize(
    ("evict", "id_task", "expected"),
    [
        (Evict.NONE, 5, Reason.NO_CLEAN_SLOT),
        (Evict.OWN, 5, Reason.HANDED_OVER),
        (Evict.OWN, 6, Reason.NO_CLEAN_SLOT),  # somebody else's request ran there
        (Evict.IDLE, 6, Reason.HANDED_OVER),
    ],
)
def test_eviction(evict: Evict, id_task: int, expected: Reason) -> None:
    async def work() -> None:
        partner = Scripted(n_slots=1)
        driven = engine(partner, evict=evict)
        await outcome(driven)
        partner.id_task[0] = 5
        driven.memory.forget()
        driven._evictable(await partner.slots())
        partner.id_task[0] = id_task
        assert (await outcome(driven)).reason is expected
        assert ("erase" in partner.calls) == (expected is Reason.HANDED_OVER)

    run(work())


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_slot_that_was_not_emptied_stays_the_engines_own(cancelled: bool) -> None:
    async def work() -> None:
        partner = Scripted(n_slots=1)
        driven = engine(partner)
        await outcome(driven)
        driven.memory.forget()
        if cancelled:
            partner.waits["erase"] = 0.05
            task = asyncio.ensure_future(outcome(driven))
            await until(lambda: "erase" in partner.calls)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert driven._reserved == {0}
            await driven.close()
            assert partner.n_tokens == [0]
            assert not driven._reserved
        else:
            partner.raises["erase"] = SequenceInUseError("busy")
            assert (await outcome(driven)).reason is Reason.NO_CLEAN_SLOT
            driven.memory.forget()
            del partner.raises["erase"]
        assert (await outcome(driven)).reason is Reason.HANDED_OVER

    run(work())


def test_foreign_slots_are_left_alone() -> None:
    async def work() -> None:
        partner = Scripted(n_slots=1)
        partner.n_tokens[0] = 7
        assert (await outcome(engine(partner))).reason is Reason.NO_CLEAN_SLOT

    run(work())


def test_a_server_that_cannot_erase_is_asked_once() -> None:
    async def work() -> None:
        partner = Scripted(n_slots=1)
        partner.n_tokens[0] = 7
        partner.raises["erase"] = NotShareableError("start it with --slot-save-path")
        driven = engine(partner, evict=Evict.IDLE)
        for _ in range(2):
            assert (await outcome(driven)).reason is Reason.NO_CLEAN_SLOT
            driven.memory.forget()
        assert partner.calls.count("erase") == 1

    run(work())


# -- driving, over sockets ---------------------------------------------------------------------


def drive(
    server: FakeServer,
    path: Path,
    work: Callable[[Engine], Awaitable[None]],
    *,
    silence_s: float = 60,
    **options: Any,
) -> None:
    """Run something with an engine over sockets."""

    async def main() -> None:
        async with ServerClient(server.url) as client:
            provider = ProviderClient(path, silence_s=silence_s)
            driven = Engine(client, provider, Policy(threshold=100), **options)
            await work(driven)
            await driven.close()

    run(main())


def require_clean(server: FakeServer) -> None:
    assert server.n_live_shares == 0
    assert all(server.slot_tokens(i) == [] for i in range(server.n_slots))


def test_over_sockets(server: FakeServer, service: FakeService, folder: Path) -> None:
    async def work(driven: Engine) -> None:
        record = await outcome(driven)
        assert (record.reason, record.id_slot, record.n_handed) == (Reason.HANDED_OVER, 0, 299)

    drive(server, folder / "p.sock", work)
    assert server.slot_tokens(0) == list(TOKENS[:-1])
    assert service.jobs[0][1] == 299
    assert service.refused == []


def test_provider_absent(server: FakeServer, folder: Path) -> None:
    async def work(driven: Engine) -> None:
        record = await outcome(driven)
        assert (record.reason, record.route) == (Reason.PROVIDER_ABSENT, Route.LOCAL)

    drive(server, folder / "p.sock", work)
    require_clean(server)


def test_a_provider_that_does_not_accept(
    server: FakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backlog is full, as that of a process which was stopped."""
    monkeypatch.setattr("kvshare.engine.CONNECT_TIMEOUT_S", 0.1)

    async def work() -> None:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(fds.listening(folder / "p.sock"))
            listener.listen(0)
            stack.enter_context(fds.connect_unix(folder / "p.sock"))
            start = time.monotonic()
            with pytest.raises(KvshareError):
                await ProviderClient(folder / "p.sock").prefill(1, TOKENS, deadline=start + 60)
            assert time.monotonic() - start < 10

    run(work())


def test_provider_dies_midway(server: FakeServer, service: FakeService, folder: Path) -> None:
    service.die_at = 128

    async def work(driven: Engine) -> None:
        assert (await outcome(driven)).reason is Reason.PROVIDER_DIED

    drive(server, folder / "p.sock", work)
    require_clean(server)


def test_provider_fails(server: FakeServer, service: FakeService, folder: Path) -> None:
    service.error = "the accelerator is on fire"

    async def work(driven: Engine) -> None:
        record = await outcome(driven)
        assert record.reason is Reason.PROVIDER_FAILED
        assert "on fire" in record.detail

    drive(server, folder / "p.sock", work)
    require_clean(server)


def test_provider_is_slow(server: FakeServer, service: FakeService, folder: Path) -> None:
    service.step_s = 1.0

    async def work(driven: Engine) -> None:
        start = time.monotonic()
        assert (await outcome(driven)).reason is Reason.PROVIDER_SLOW
        assert time.monotonic() - start < 1.0
        await until(lambda: service.n_cancelled == 1)

    drive(server, folder / "p.sock", work, prefill_timeout_s=0.2)
    require_clean(server)


def test_provider_is_silent(server: FakeServer, service: FakeService, folder: Path) -> None:
    """It may take as long as it likes, as long as it goes on."""
    service.step_s = 0.1

    async def work(driven: Engine) -> None:
        assert (await outcome(driven)).reason is Reason.HANDED_OVER
        service.step_s = 5.0
        record = await outcome(driven, tokens=range(1000, 1300))
        assert record.reason is Reason.PROVIDER_SLOW
        assert "silent" in record.detail

    drive(server, folder / "p.sock", work, silence_s=1.0)
    assert server.n_live_shares == 0


def test_provider_lies(server: FakeServer, service: FakeService, folder: Path) -> None:
    service.before_complete = lambda provider: provider.tokens.reverse()

    async def work(driven: Engine) -> None:
        record = await outcome(driven)
        assert record.reason is Reason.ADOPT_REFUSED

    drive(server, folder / "p.sock", work)
    require_clean(server)


def test_server_restarts_midway(server: FakeServer, service: FakeService, folder: Path) -> None:
    service.before_complete = lambda _: server.restart()

    async def work(driven: Engine) -> None:
        assert (await outcome(driven)).reason is Reason.ADOPT_REFUSED

    drive(server, folder / "p.sock", work)
    require_clean(server)


def test_share_expires(folder: Path, service: FakeService) -> None:
    service.step_s = 0.05
    with FakeServer(directory=folder, expires_ms=100) as server:

        async def work(driven: Engine) -> None:
            assert (await outcome(driven)).reason is Reason.PROVIDER_SLOW

        drive(server, folder / "p.sock", work)
        require_clean(server)


@pytest.mark.parametrize("action", ["share", "adopt"])
@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, {Reason.SHARE_REFUSED, Reason.ADOPT_REFUSED}),
        (409, {Reason.SHARE_REFUSED, Reason.ADOPT_REFUSED}),
        (410, {Reason.EXPIRED}),
        (500, {Reason.ERROR}),
        (501, {Reason.NOT_SHAREABLE}),
        (502, {Reason.PROVIDER_ABSENT, Reason.ADOPT_REFUSED}),
        (504, {Reason.SERVER_SLOW}),
    ],
)
def test_every_status(
    server: FakeServer, service: FakeService, folder: Path, action: str, status: int, expected: set[Reason]
) -> None:
    server.fail[action] = (status, "injected")

    async def work(driven: Engine) -> None:
        record = await outcome(driven)
        assert record.route is Route.LOCAL
        assert record.reason in expected
        assert "injected" in record.detail

    drive(server, folder / "p.sock", work)
    require_clean(server)


def test_cancelled_while_the_provider_works(server: FakeServer, service: FakeService, folder: Path) -> None:
    service.step_s = 1.0

    async def work(driven: Engine) -> None:
        task = asyncio.ensure_future(outcome(driven))
        await until(lambda: len(service.jobs) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await driven.close()
        await until(lambda: service.n_cancelled == 1)

    drive(server, folder / "p.sock", work)
    require_clean(server)


def test_cancelled_while_the_server_shares(server: FakeServer, service: FakeService, folder: Path) -> None:
    server.delay_s["share"] = 0.2

    async def work(driven: Engine) -> None:
        task = asyncio.ensure_future(outcome(driven))
        await until(lambda: any("share" in each for each in server.requests))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await driven.close()

    drive(server, folder / "p.sock", work)
    require_clean(server)
    assert any("release" in each for each in server.requests)


# -- a provider's socket -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"", PeerClosedError),
        (b"\x05\0\0", PeerClosedError),
        (b"\xff\xff\xff\xff", RemoteProtocolError),
        (b"\x02\0\0\0{}", RemoteProtocolError),
        (b"\x04\0\0\0\xff\xff\xff\xff", RemoteProtocolError),
    ],
)
def test_a_provider_that_answers_nonsense(folder: Path, answer: bytes, expected: type[KvshareError]) -> None:
    async def work() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(10)
            writer.write(answer)
            writer.close()

        server = await asyncio.start_unix_server(serve, folder / "x.sock")
        with pytest.raises(expected):
            await ProviderClient(folder / "x.sock").prefill(7, [1, 2], deadline=time.monotonic() + 5)
        server.close()
        await server.wait_closed()

    run(work())


def test_a_provider_that_never_answers(folder: Path) -> None:
    async def work() -> None:
        done = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            done.set()

        server = await asyncio.start_unix_server(serve, folder / "x.sock")
        with pytest.raises(DeadlineExceededError):
            await ProviderClient(folder / "x.sock").prefill(7, [1], deadline=time.monotonic() + 0.1)
        await done.wait()  # it was hung up on
        server.close()
        await server.wait_closed()

    run(work())


def test_a_prompt_that_no_message_can_carry(folder: Path) -> None:
    async def work() -> None:
        with pytest.raises(LocalProtocolError):
            await ProviderClient(folder / "x.sock").prefill(
                7, [2**31 - 1] * 100_000, deadline=time.monotonic() + 5
            )

    run(work())


def test_a_service_reports_progress(server: FakeServer, service: FakeService, folder: Path) -> None:
    seen: list[tuple[int, int]] = []

    async def work(driven: Engine) -> None:
        shared = await driven.decoder.share(0, service.path)
        await ProviderClient(service.path).prefill(
            shared.share_id,
            TOKENS[:40],
            deadline=time.monotonic() + 5,
            progress=lambda done, of: seen.append((done, of)),
        )
        await driven.decoder.release(0, shared.share_id)

    drive(server, folder / "p.sock", work)
    assert seen == [(16, 40), (32, 40), (40, 40)]


# -- a decoder in this process -----------------------------------------------------------------


def test_in_process(service: FakeService, folder: Path) -> None:
    async def work() -> None:
        with FakeDecoder() as decoder:
            adapter = InProcessDecoder(decoder)
            driven = Engine(adapter, ProviderClient(service.path), Policy(threshold=100))
            record = await outcome(driven)
            assert (record.reason, record.n_handed) == (Reason.HANDED_OVER, 299)
            assert await adapter.run(decoder.n_past, 0) == 299
            with FakeDecoder() as local:
                local.prefill(TOKENS[:-1])
                assert decoder.logits(0) == local.logits()
            assert [slot.n_tokens for slot in await adapter.slots()] == [299, 0, 0, 0]
            with pytest.raises(ReplayError):
                await adapter.adopt(0, 7, [1])
            await adapter.erase(0)
            assert decoder.n_past(0) == 0
            await adapter.close()

    run(work())


def test_in_process_conversation(service: FakeService, folder: Path) -> None:
    """A program that says what its sequences hold."""

    async def work() -> None:
        with FakeDecoder(layout=plain_layout(kv_size=2048)) as decoder:
            adapter = InProcessDecoder(decoder, history=decoder.tokens)
            driven = Engine(adapter, ProviderClient(service.path), Policy(threshold=100))
            for n in range(3):
                async with driven.prepared(turn(n)) as record:
                    assert (record.reason, record.id_slot) == (Reason.HANDED_OVER, 0)
                    assert record.n_prefix == (0 if n == 0 else len(turn(n - 1)) + 19)
                    with FakeDecoder(layout=plain_layout(kv_size=2048)) as local:
                        local.prefill(turn(n)[:-1])
                        assert decoder.logits() == local.logits()
                    # the last token of the prompt, and all of the answer but its last
                    decoder.extend(turn(n + 1)[len(turn(n)) - 1 : len(turn(n)) + 19])
            assert service.prefilled == [299, 300, 300]
            await adapter.close()

    run(work())


@pytest.mark.parametrize(
    ("held", "prompt", "n_prefix"),
    [
        (range(40), range(60), 40),
        (range(40), None, 40),
        (range(40), range(41), 40),
        (range(40), range(40), 0),  # a token has to be left, and it is not cut
        (range(40), [*range(39), *range(100, 120)], 0),
        (range(39), range(60), 0),  # not what the sequence holds
        ((), range(60), 0),
    ],
)
def test_in_process_history(
    service: FakeService, held: Sequence[int], prompt: Sequence[int] | None, n_prefix: int
) -> None:
    async def work() -> None:
        with FakeDecoder() as decoder:
            decoder.prefill(range(40), 1)
            adapter = InProcessDecoder(decoder, history=lambda seq_id: held if seq_id == 1 else ())
            shared = await adapter.share(1, service.path, n_tokens=80, tokens=prompt)
            assert shared.n_prefix == decoder.n_past(1) == n_prefix
            await adapter.release(1, shared.share_id)
            assert decoder.n_past(1) == n_prefix
            await adapter.close()

    run(work())


def test_in_process_without_a_history(service: FakeService) -> None:
    """What was adopted is known, until something else is decoded there."""

    async def work() -> None:
        with FakeDecoder(layout=plain_layout(kv_size=2048)) as decoder:
            adapter = InProcessDecoder(decoder)
            driven = Engine(adapter, ProviderClient(service.path), Policy(threshold=100))
            for n, n_prefix in ((0, 0), (1, 299), (2, 0)):
                record = await outcome(driven, turn(n))
                assert (record.reason, record.n_prefix) == (Reason.HANDED_OVER, n_prefix)
                if n == 1:
                    decoder.extend([1, 2, 3])
            await adapter.close()

    run(work())


def test_in_process_close_waits_for_the_decoder() -> None:
    """What was cancelled still runs on its thread; the program may free the decoder afterwards."""

    async def work() -> None:
        with FakeDecoder() as decoder:
            adapter = InProcessDecoder(decoder)
            begun, done = threading.Event(), threading.Event()

            def step() -> None:
                begun.set()
                time.sleep(0.1)
                done.set()

            task = asyncio.ensure_future(adapter.run(step))
            await until(begun.is_set)
            task.cancel()
            await adapter.close()
            assert done.is_set()
            await adapter.close()

    run(work())


def test_in_process_failures_leave_no_share(service: FakeService, folder: Path) -> None:
    service.error = "no"

    async def work() -> None:
        with FakeDecoder() as decoder:
            adapter = InProcessDecoder(decoder)
            driven = Engine(adapter, ProviderClient(service.path), Policy(threshold=100))
            assert (await outcome(driven)).reason is Reason.PROVIDER_FAILED
            absent = Engine(adapter, ProviderClient(folder / "absent.sock"), Policy(threshold=100))
            assert (await outcome(absent)).reason is Reason.PROVIDER_ABSENT
            assert not decoder._leases
            await adapter.close()

    run(work())
