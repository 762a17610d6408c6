"""The engine: drives a handoff over anything that can share and adopt and anything that can prefill.

The order of things, for one request of n tokens:

1. `Policy` decides by what it has measured: are enough tokens uncached, is a slot free, would the
   decoder itself be faster?
2. The decoder shares a clean slot with the provider, the provider prefills the first n-1 tokens, the
   decoder adopts them. The last token is left to the request: it has to be evaluated for its logits.
3. The request runs on that slot.

Whatever goes wrong, the request goes on as it came, on a decoder that is as it was: the share is
released, and the `Record` says why. A request that is cancelled takes its job and its share along.

Decisions (`Policy`, `choose_slot`, `reason_of`, `Memory`) touch no socket and no clock of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import math
import os
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvshare import fds, wire
from kvshare.errors import (
    AdoptError,
    DeadlineExceededError,
    ExpiredError,
    KvshareError,
    LedgerError,
    LedgerIncompleteError,
    LocalProtocolError,
    NotShareableError,
    PeerClosedError,
    PeerRefusedError,
    RemoteProtocolError,
    ReplayError,
)
from kvshare.server import AdoptedInSlot, Shared, Slot

_log = logging.getLogger(__name__)

DEFAULT_THRESHOLD = 512
DEFAULT_PREFILL_TIMEOUT_S = 3600.0
DEFAULT_SILENCE_S = 60.0
CLEANUP_TIMEOUT_S = 5.0
SHARE_TIMEOUT_S = 15.0

_LENGTH = struct.Struct("<I")
_MIN_SAMPLE = 32  # tokens; the time of fewer says little about the speed
T = TypeVar("T")


# -- who takes part --------------------------------------------------------------------------


class SharingDecoder(Protocol):
    """What can share and adopt: `kvshare.server.ServerClient`, `InProcessDecoder`."""

    async def slots(self) -> Sequence[Slot]:
        """Return all slots."""

    async def share(
        self, id_slot: int, socket: str, *, n_tokens: int | None = None, expires_ms: int | None = None
    ) -> Shared:
        """Send the descriptors of a clean slot to the provider at a socket."""

    async def adopt(self, id_slot: int, share_id: int, tokens: Sequence[int]) -> AdoptedInSlot:
        """Make the cells that the provider filled the slot's own."""

    async def release(self, id_slot: int, share_id: int) -> None:
        """End a share; idempotent."""

    async def erase(self, id_slot: int) -> None:
        """Empty an idle slot."""


class Prefiller(Protocol):
    """What can prefill: `ProviderClient`.

    Attributes:
        socket: path where it takes the descriptors of a share.
    """

    socket: str

    async def prefill(self, share_id: int, tokens: Sequence[int], *, deadline: float) -> None:
        """Prefill into a share; return when the ledger vouches for it. A cancelled call stops it.

        Args:
            share_id: the share.
            tokens: from position 0.
            deadline: `time.monotonic()` value.
        """


# -- what came of it -------------------------------------------------------------------------


class Route(str, enum.Enum):
    """The path that a request took."""

    HANDOFF = "handoff"  # its prompt was prefilled by the provider
    LOCAL = "local"  # understood, and left to the decoder
    FORWARDED = "forwarded"  # not looked at, or not understood


class Reason(str, enum.Enum):
    """Why a request took its path."""

    HANDED_OVER = "handed-over"
    # left to the decoder by decision
    SHORT = "short"
    CACHED = "cached"
    NO_CLEAN_SLOT = "no-clean-slot"
    LOCAL_FASTER = "local-faster"
    PROBE_LOCAL = "probe-local"
    PAUSED = "paused"
    # left to the decoder because something failed
    NOT_SHAREABLE = "not-shareable"
    SHARE_REFUSED = "share-refused"
    PROVIDER_ABSENT = "provider-absent"
    PROVIDER_DIED = "provider-died"
    PROVIDER_FAILED = "provider-failed"
    PROVIDER_SLOW = "provider-slow"
    ADOPT_REFUSED = "adopt-refused"
    EXPIRED = "expired"
    SERVER_SLOW = "server-slow"
    SERVER_GONE = "server-gone"
    ERROR = "error"
    # forwarded
    ROUTE = "route"
    NOT_UNDERSTOOD = "not-understood"
    NOT_TOKENIZED = "not-tokenized"
    MULTIMODAL = "multimodal"
    SEVERAL_PROMPTS = "several-prompts"
    SEVERAL_ANSWERS = "several-answers"
    OWN_SLOT = "own-slot"
    NO_CACHE = "no-cache"
    ADAPTERS = "adapters"


FAILURES = frozenset(
    {
        Reason.NOT_SHAREABLE,
        Reason.SHARE_REFUSED,
        Reason.PROVIDER_ABSENT,
        Reason.PROVIDER_DIED,
        Reason.PROVIDER_FAILED,
        Reason.PROVIDER_SLOW,
        Reason.ADOPT_REFUSED,
        Reason.EXPIRED,
        Reason.SERVER_SLOW,
        Reason.SERVER_GONE,
        Reason.ERROR,
    }
)
"""Reasons of a handoff that was begun, or would have been, and failed."""

REFUSALS = frozenset({Reason.NOT_SHAREABLE, Reason.SHARE_REFUSED, Reason.ADOPT_REFUSED, Reason.EXPIRED})
"""Failures in which the decoder said no."""


class Stage(enum.Enum):
    """Where a handoff stands."""

    SLOTS = "slots"
    SHARE = "share"
    PREFILL = "prefill"
    ADOPT = "adopt"


@dataclass
class Record:
    """What became of one request.

    Attributes:
        route: the path.
        reason: why.
        detail: the same in words; empty if the reason says all.
        id_slot: the slot to run the request on, exactly if it was handed over.
        n_tokens: tokens of the prompt; 0 if they are not known.
        n_cached: tokens that the decoder was thought to have already.
        n_handed: tokens that were adopted.
        n_reused: tokens that the decoder says it reused; None if it did not say.
        share_ms: time from asking for the share to its answer.
        prefill_ms: time that the provider took.
        adopt_ms: time from asking for the adoption to its answer.
    """

    route: Route = Route.LOCAL
    reason: Reason = Reason.ERROR
    detail: str = ""
    id_slot: int | None = None
    n_tokens: int = 0
    n_cached: int = 0
    n_handed: int = 0
    n_reused: int | None = None
    share_ms: float | None = None
    prefill_ms: float | None = None
    adopt_ms: float | None = None

    def stay(self, reason: Reason, detail: str = "") -> None:
        """Leave the request to the decoder."""
        self.route, self.reason, self.detail, self.id_slot = Route.LOCAL, reason, detail, None

    def to_json(self) -> dict[str, Any]:
        """Return the record for a log."""
        return {
            "path": self.route.value,
            "reason": self.reason.value,
            "detail": self.detail,
            "id_slot": self.id_slot,
            **{name: getattr(self, name) for name in ("n_tokens", "n_cached", "n_handed", "n_reused")},
            **{
                name: None if (value := getattr(self, name)) is None else round(value, 3)
                for name in ("share_ms", "prefill_ms", "adopt_ms")
            },
        }


@dataclass(frozen=True)
class Timings:
    """What a llama-server says about a prompt it has processed, `timings` of its answers.

    Attributes:
        cache_n: tokens that it had already.
        prompt_n: tokens that it processed.
        prompt_ms: time for these, milliseconds.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float

    @classmethod
    def from_json(cls, value: Any) -> Timings | None:
        """Read the object of an answer; None if it is something else."""
        if not isinstance(value, Mapping):
            return None
        found = []
        for name in ("cache_n", "prompt_n", "prompt_ms"):
            each = value.get(name)
            if isinstance(each, bool) or not isinstance(each, (int, float)) or not math.isfinite(each):
                return None
            found.append(each)
        return cls(int(found[0]), int(found[1]), float(found[2]))


# -- decisions -------------------------------------------------------------------------------


def reason_of(stage: Stage, error: BaseException) -> Reason:
    """Return why a handoff failed, from where it stood and what was raised."""
    at_server = stage is not Stage.PREFILL
    if isinstance(error, NotShareableError):
        return Reason.NOT_SHAREABLE
    if isinstance(error, ExpiredError):
        return Reason.EXPIRED
    if isinstance(error, PeerRefusedError):
        return {Stage.SLOTS: Reason.ERROR, Stage.ADOPT: Reason.ADOPT_REFUSED}.get(
            stage, Reason.PROVIDER_ABSENT
        )
    if isinstance(error, PeerClosedError):
        return Reason.SERVER_GONE if at_server else Reason.PROVIDER_DIED
    if isinstance(error, DeadlineExceededError):
        return Reason.SERVER_SLOW if at_server else Reason.PROVIDER_SLOW
    if isinstance(error, (AdoptError, LedgerError, LocalProtocolError)):
        if stage is Stage.SHARE:
            return Reason.SHARE_REFUSED
        if stage is Stage.ADOPT:
            return Reason.ADOPT_REFUSED
        if stage is Stage.PREFILL and isinstance(error, LedgerError):
            return Reason.PROVIDER_FAILED
    return Reason.ERROR


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two token tuples have in common at their start."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # slices are compared in C
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Memory:
    """The prompts that were sent last: what a decoder may still have in its cache.

    It is a guess, corrected by what the decoder reports.
    """

    def __init__(self, n_prompts: int = 16) -> None:
        self._prompts: deque[tuple[tuple[int, ...], int | None]] = deque(maxlen=n_prompts)

    def n_cached(self, tokens: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt may be cached somewhere."""
        return max((common_prefix(known, tokens) for known, _ in self._prompts), default=0)

    def add(self, tokens: tuple[int, ...], id_slot: int | None) -> None:
        """Note a prompt that has run; `id_slot` is None where the decoder chose the slot."""
        self._prompts.append((tokens, id_slot))

    def forget(self, id_slot: int | None = None) -> None:
        """Forget what was in a slot; None forgets all."""
        kept = [] if id_slot is None else [each for each in self._prompts if each[1] != id_slot]
        self._prompts = deque(kept, maxlen=self._prompts.maxlen)


class Estimate:
    """A moving average that follows its newest samples."""

    def __init__(self, weight: float = 0.3) -> None:
        self._weight = weight
        self.value: float | None = None

    def add(self, sample: float) -> None:
        """Take a sample in; one that is no time is ignored."""
        if math.isfinite(sample) and sample >= 0:
            self.value = sample if self.value is None else self.value + self._weight * (sample - self.value)


@dataclass(frozen=True)
class Verdict:
    """A decision: whether to hand over, and if not, why."""

    hand_over: bool
    reason: Reason
    detail: str = ""


@dataclass
class Policy:
    """Decides by measured speeds whether a handoff pays.

    A handoff takes a fixed time, and the provider's time a token; a local prefill takes the decoder's
    time a token. As long as one of them is unknown, the prompt is handed over.

    Attributes:
        threshold: uncached tokens from which on a handoff is considered.
        patience: how many times slower than a local prefill a handoff may be while other slots run,
            because a local one would stall their streams.
        probe_every: every such decline is made a handoff all the same, because speeds change; and if the
            local speed is not known after so many handoffs, one prompt is left to the decoder.
        max_pause_s: failures are followed by a pause of 1, 2, 4, ... seconds, at most so many.
    """

    threshold: int = DEFAULT_THRESHOLD
    patience: float = 4.0
    probe_every: int = 16
    max_pause_s: float = 60.0
    provider_ms: Estimate = field(default_factory=Estimate)
    local_ms: Estimate = field(default_factory=Estimate)
    fixed_ms: Estimate = field(default_factory=Estimate)
    _warm: bool = False
    _n_declined: int = 0
    _n_blind: int = 0
    _n_failed: int = 0
    _paused_until: float = -math.inf

    def too_short(self, n_tokens: int, n_cached: int) -> Verdict | None:
        """Return the verdict for a prompt that is not worth a look at the slots, else None."""
        if n_tokens < max(self.threshold, 2):
            return Verdict(False, Reason.SHORT)
        if n_tokens - n_cached < self.threshold:
            return Verdict(False, Reason.CACHED, f"{n_cached} of {n_tokens} tokens are cached")
        return None

    def expected_ms(self, n_tokens: int, n_queued: int = 0) -> float | None:
        """Return what a handoff would take behind `n_queued` tokens of others; None if unknown."""
        if self.provider_ms.value is None:
            return None
        return (self.fixed_ms.value or 0.0) + self.provider_ms.value * (n_tokens + n_queued)

    def decide(
        self,
        n_tokens: int,
        *,
        n_cached: int = 0,
        n_queued: int = 0,
        others_run: bool = False,
        now: float,
    ) -> Verdict:
        """Decide about one prompt.

        Args:
            n_tokens: its tokens.
            n_cached: tokens of it that the decoder has.
            n_queued: tokens of handoffs that the provider has before it.
            others_run: whether other slots are generating.
            now: seconds of any steady clock, the same as for `failed`.
        """
        if verdict := self.too_short(n_tokens, n_cached):
            return verdict
        if now < self._paused_until:
            return Verdict(False, Reason.PAUSED, f"after {self._n_failed} failures in a row")
        handoff = self.expected_ms(n_tokens, n_queued)
        if self.local_ms.value is None:
            if self._n_blind >= self.probe_every and not others_run:
                self._n_blind = 0
                return Verdict(False, Reason.PROBE_LOCAL)
        elif handoff is not None:
            local = self.local_ms.value * (n_tokens - n_cached)
            if handoff > local * (self.patience if others_run else 1.0):
                self._n_declined += 1
                if self._n_declined % self.probe_every:
                    detail = f"{handoff:.0f} ms by handoff, {local:.0f} ms by the decoder"
                    return Verdict(False, Reason.LOCAL_FASTER, detail)
        return Verdict(True, Reason.HANDED_OVER)

    def handed_over(self, n_tokens: int, *, prefill_ms: float, other_ms: float) -> None:
        """Learn from a handoff: the provider's time, and all the rest.

        The first one, and the first behind a failure, is not counted: the provider built its context and
        touched the memory for the first time.
        """
        if self._warm:
            self.provider_ms.add(prefill_ms / n_tokens)
            self.fixed_ms.add(other_ms)
        self._warm = True
        self._n_failed = 0
        if self.local_ms.value is None:
            self._n_blind += 1

    def prefilled_locally(self, n_tokens: int, ms: float) -> None:
        """Learn from a prompt that the decoder has processed."""
        if n_tokens >= _MIN_SAMPLE and ms > 0:
            self.local_ms.add(ms / n_tokens)

    def failed(self, now: float) -> None:
        """Learn from a failure: pause, the longer the more of them came in a row."""
        self._n_failed += 1
        self._warm = False
        self._paused_until = now + min(2.0 ** min(self._n_failed - 1, 30), self.max_pause_s)


class Evict(str, enum.Enum):
    """Which idle slots an engine may empty when no clean one is left."""

    NONE = "none"
    OWN = "own"  # those that it filled itself, and nobody used since
    IDLE = "idle"  # any


@dataclass
class _Owned:
    """A slot that a handoff has filled."""

    used: float
    id_task: int | None = None  # of the request that ran there; None until it was seen


def choose_slot(
    slots: Sequence[Slot], n_tokens: int, *, reserved: Collection[int], evictable: Sequence[int] = ()
) -> tuple[Slot | None, bool]:
    """Choose a slot for a prompt and its answer.

    Args:
        slots: all slots.
        n_tokens: of the prompt.
        reserved: ids of slots that are not to be taken.
        evictable: ids of slots that may be emptied, in order of preference.

    Returns:
        The slot, None if there is none; and whether it has to be emptied first.
    """
    fit = {s.id_slot: s for s in slots if s.idle and s.n_ctx > n_tokens and s.id_slot not in reserved}
    for slot in fit.values():
        if slot.n_tokens == 0:
            return slot, False
    for id_slot in evictable:
        if id_slot in fit:
            return fit[id_slot], True
    return None, False


# -- the engine ------------------------------------------------------------------------------


class Engine:
    """Drives handoffs to one decoder and one provider.

    Args:
        decoder: the decoder.
        prefiller: the provider.
        policy: what decides; it learns.
        prefill_timeout_s: how long the provider may take for one prompt, in seconds; shares live as
            long. A provider that hangs is noticed much earlier, see `ProviderClient`.
        evict: which slots may be emptied.
        clock: steady seconds, for the policy.

    *Ownership*: `close` waits for what cancelled requests have left to be cleaned up.
    """

    def __init__(
        self,
        decoder: SharingDecoder,
        prefiller: Prefiller,
        policy: Policy | None = None,
        *,
        prefill_timeout_s: float = DEFAULT_PREFILL_TIMEOUT_S,
        evict: Evict = Evict.OWN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decoder = decoder
        self.prefiller = prefiller
        self.policy = policy or Policy()
        self.memory = Memory()
        self._prefill_timeout_s = prefill_timeout_s
        self._evict = evict
        self._clock = clock
        self._reserved: set[int] = set()
        self._owned: dict[int, _Owned] = {}
        self._n_queued = 0
        self._cleaning: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """Wait, for a bounded time, until the shares of cancelled requests are released."""
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=2 * CLEANUP_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def prepared(
        self, tokens: Sequence[int], *, decoder: SharingDecoder | None = None
    ) -> AsyncIterator[Record]:
        """Try to hand a prompt over; run the request inside the block.

        Args:
            tokens: the whole prompt.
            decoder: the same decoder with a client's own credentials; None is that of the engine.

        Yields:
            What came of it. If `id_slot` is set, the request has to run there; else it goes as it came.
            Failures do not raise.
        """
        ids = tuple(tokens)
        record = Record(n_tokens=len(ids))
        reserved: list[int] = []
        try:
            try:
                await self._prepare(decoder or self.decoder, ids, record, reserved)
            except Exception as error:  # whatever it is, the request goes on
                _log.exception("a handoff failed in an unexpected way")
                self._fail(record, Reason.ERROR, f"{type(error).__name__}: {error}")
            try:
                yield record
            except BaseException:
                if record.id_slot is not None:  # what was adopted is there all the same
                    self._ran(ids, record.id_slot)
                raise
            self._ran(ids, record.id_slot)
        finally:
            self._reserved.difference_update(reserved)

    def observe(self, record: Record, timings: Timings) -> None:
        """Learn from what the decoder reports about a request."""
        record.n_reused = timings.cache_n
        if record.route is Route.HANDOFF:
            if timings.cache_n < record.n_handed:
                _log.warning("%d tokens were adopted, %d reused", record.n_handed, timings.cache_n)
        else:
            self.policy.prefilled_locally(timings.prompt_n, timings.prompt_ms)
        if timings.cache_n < record.n_cached // 2:
            self.memory.forget()  # the decoder was restarted, or has made room

    def _ran(self, tokens: tuple[int, ...], id_slot: int | None) -> None:
        """Note what a decoder holds now."""
        self.memory.add(tokens, id_slot)
        if id_slot is not None:
            self._owned[id_slot] = _Owned(self._clock())

    async def _prepare(
        self, decoder: SharingDecoder, tokens: tuple[int, ...], record: Record, reserved: list[int]
    ) -> None:
        record.n_cached = self.memory.n_cached(tokens)
        if verdict := self.policy.too_short(len(tokens), record.n_cached):
            return record.stay(verdict.reason, verdict.detail)
        try:
            slots = await decoder.slots()
        except KvshareError as error:
            return self._fail(record, reason_of(Stage.SLOTS, error), str(error))
        # from here to the reservation nothing waits, so that two requests cannot take one slot
        slot, occupied = choose_slot(
            slots, len(tokens), reserved=self._reserved, evictable=self._evictable(slots)
        )
        if slot is None:
            return record.stay(Reason.NO_CLEAN_SLOT)
        verdict = self.policy.decide(
            len(tokens),
            n_cached=record.n_cached,
            n_queued=self._n_queued,
            others_run=any(not each.idle for each in slots),
            now=self._clock(),
        )
        if not verdict.hand_over:
            return record.stay(verdict.reason, verdict.detail)
        self._reserved.add(slot.id_slot)
        reserved.append(slot.id_slot)
        self._owned.pop(slot.id_slot, None)
        if occupied:
            try:
                await decoder.erase(slot.id_slot)
            except KvshareError as error:
                self._evict = Evict.NONE if isinstance(error, NotShareableError) else self._evict
                return record.stay(Reason.NO_CLEAN_SLOT, str(error))
        self.memory.forget(slot.id_slot)
        self._n_queued += len(tokens)
        try:
            await self._hand_over(decoder, slot.id_slot, tokens, record, reserved)
        finally:
            self._n_queued -= len(tokens)

    async def _hand_over(
        self,
        decoder: SharingDecoder,
        id_slot: int,
        tokens: tuple[int, ...],
        record: Record,
        reserved: list[int],
    ) -> None:
        prefix = tokens[:-1]
        stage, share_id = Stage.SHARE, None
        try:
            start = time.monotonic()
            shared = await self._share(decoder, id_slot, len(tokens), reserved)
            share_id = shared.share_id
            begun = time.monotonic()
            record.share_ms = (begun - start) * 1000
            stage = Stage.PREFILL
            await self.prefiller.prefill(
                share_id,
                prefix,
                deadline=begun + min(self._prefill_timeout_s, shared.expires_ms / 1000),
            )
            done = time.monotonic()
            record.prefill_ms = (done - begun) * 1000
            stage = Stage.ADOPT
            adopted = await decoder.adopt(id_slot, share_id, prefix)
            record.adopt_ms = (time.monotonic() - done) * 1000
        except asyncio.CancelledError:
            if share_id is not None:
                self._keep(reserved, self._later(self._release(decoder, id_slot, share_id)))
            raise
        except Exception as error:
            reason = reason_of(stage, error)
            if not isinstance(error, KvshareError):
                _log.exception("%s failed in an unexpected way", stage.value)
            detail = str(error) or type(error).__name__
            if share_id is not None:
                # the request must not find the slot leased; if it is cancelled now, this still ends
                trouble = await asyncio.shield(self._later(self._release(decoder, id_slot, share_id)))
                detail += f"; release: {trouble}" if trouble else ""
            self._fail(record, reason, detail)
            return
        self.policy.handed_over(
            len(prefix), prefill_ms=record.prefill_ms, other_ms=record.share_ms + record.adopt_ms
        )
        record.route, record.reason, record.detail = Route.HANDOFF, Reason.HANDED_OVER, ""
        record.id_slot, record.n_handed = id_slot, adopted.n_adopted

    async def _share(
        self, decoder: SharingDecoder, id_slot: int, n_tokens: int, reserved: list[int]
    ) -> Shared:
        """Share; if this is cancelled meanwhile, what comes of it is released."""
        expires_ms = math.ceil((self._prefill_timeout_s + CLEANUP_TIMEOUT_S) * 1000)
        sharing = asyncio.ensure_future(
            decoder.share(id_slot, self.prefiller.socket, n_tokens=n_tokens, expires_ms=expires_ms)
        )
        try:
            return await asyncio.shield(sharing)
        except asyncio.CancelledError:
            self._keep(reserved, self._later(self._release_when_shared(decoder, id_slot, sharing)))
            raise

    async def _release_when_shared(
        self, decoder: SharingDecoder, id_slot: int, sharing: asyncio.Future[Shared]
    ) -> None:
        try:
            shared = await asyncio.wait_for(sharing, SHARE_TIMEOUT_S)
        except (KvshareError, asyncio.TimeoutError):
            return
        await self._release(decoder, id_slot, shared.share_id)

    async def _release(self, decoder: SharingDecoder, id_slot: int, share_id: int) -> str:
        """Release a share; return what went wrong, else nothing."""
        try:
            await asyncio.wait_for(decoder.release(id_slot, share_id), CLEANUP_TIMEOUT_S)
        except asyncio.TimeoutError:
            return "no answer"
        except Exception as error:  # a server that restarted has no share any more
            return str(error) or type(error).__name__
        return ""

    def _later(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run something that a cancelled request must not take along."""
        task = asyncio.ensure_future(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        return task

    def _keep(self, reserved: list[int], cleaning: asyncio.Future[Any]) -> None:
        """Keep the slots of a cancelled request reserved until they are clean."""
        kept = tuple(reserved)
        reserved.clear()
        cleaning.add_done_callback(lambda _: self._reserved.difference_update(kept))

    def _fail(self, record: Record, reason: Reason, detail: str) -> None:
        if reason is not Reason.SHARE_REFUSED:  # another slot, or the next moment, may do
            self.policy.failed(self._clock())
        record.stay(reason, detail)

    def _evictable(self, slots: Sequence[Slot]) -> list[int]:
        """Return slots that may be emptied, the one that was not used for longest first."""
        if self._evict is Evict.NONE:
            return []
        if self._evict is Evict.IDLE:
            return [slot.id_slot for slot in sorted(slots, key=lambda slot: slot.id_task)]
        found = []
        for slot in slots:
            owned = self._owned.get(slot.id_slot)
            if owned is None or not slot.idle:
                continue
            if owned.id_task is None:
                owned.id_task = slot.id_task
            if owned.id_task == slot.id_task:
                found.append((owned.used, slot.id_slot))
            else:
                del self._owned[slot.id_slot]  # somebody else's request ran there
        return [id_slot for _, id_slot in sorted(found)]


# -- a provider's socket ---------------------------------------------------------------------


class ProviderClient:
    """Sends jobs to a warm provider, on a connection each.

    Args:
        socket: where it listens, for shares and for jobs.
        silence_s: how long it may say nothing, in seconds: nothing of any job, as it does one after
            the other.
    """

    def __init__(self, socket: str | os.PathLike[str], *, silence_s: float = DEFAULT_SILENCE_S) -> None:
        self.socket = os.fspath(socket)
        self._silence_s = silence_s
        self._heard = 0.0

    async def prefill(
        self,
        share_id: int,
        tokens: Sequence[int],
        *,
        deadline: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Prefill into a share; a cancelled call hangs up, and the provider stops.

        Args:
            share_id: the share whose descriptors it has, or will get.
            tokens: from position 0.
            deadline: `time.monotonic()` value.
            progress: called with the number of tokens that are done, and of all.

        Raises:
            PeerRefusedError: nobody listens, or somebody else does.
            PeerClosedError: the provider hung up, or died.
            DeadlineExceededError: it was not done in time, or it was silent for too long.
            LedgerIncompleteError: it says that it has failed, and why.
            RemoteProtocolError: it says something that is no answer.
            LocalProtocolError: too many tokens for one message.
        """
        job = wire.encode(wire.JobHeader(share_id=share_id, tokens=tuple(tokens)))
        try:
            await asyncio.wait_for(
                self._run(share_id, job, deadline, progress), max(0.0, deadline - time.monotonic())
            )
        except asyncio.TimeoutError as exc:
            raise DeadlineExceededError("the provider was not done in time") from exc

    async def _run(
        self, share_id: int, job: bytes, deadline: float, progress: Callable[[int, int], None] | None
    ) -> None:
        reader, writer = await self._connect(deadline)
        self._heard = time.monotonic()
        try:
            writer.write(_LENGTH.pack(len(job)) + job)
            await writer.drain()
            while True:
                message = wire.decode(await self._hear(reader))
                if not isinstance(message, (wire.Progress, wire.Outcome)) or message.share_id != share_id:
                    raise RemoteProtocolError(f"unexpected {type(message).__name__} from the provider")
                if isinstance(message, wire.Outcome):
                    if not message.ok:
                        raise LedgerIncompleteError(f"the provider failed: {message.error}")
                    return
                if progress:
                    progress(message.n_filled, message.n_tokens)
        except (asyncio.IncompleteReadError, OSError) as exc:
            raise PeerClosedError("the provider closed the connection before it was done") from exc
        finally:
            writer.transport.abort()

    async def _hear(self, reader: asyncio.StreamReader) -> bytes:
        """Read the next message, unless the provider is silent for too long."""
        reading = asyncio.ensure_future(_frame(reader))
        try:
            while not reading.done():
                left = self._heard + self._silence_s - time.monotonic()
                if left <= 0:
                    raise DeadlineExceededError(f"the provider was silent for {self._silence_s:g} s")
                await asyncio.wait([reading], timeout=left)
        except BaseException:
            reading.cancel()
            raise
        self._heard = time.monotonic()
        return await reading

    async def _connect(self, deadline: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connecting = asyncio.ensure_future(
            asyncio.to_thread(fds.connect_unix, self.socket, deadline=deadline)
        )
        try:
            sock = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(
                lambda done: done.result().close() if not done.cancelled() and not done.exception() else None
            )
            raise
        try:
            return await asyncio.open_unix_connection(sock=sock)
        except BaseException:
            sock.close()
            raise


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Read one framed message; descriptors would be dropped by the kernel."""
    (n,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if n > fds.MAX_PAYLOAD_NBYTES:
        raise RemoteProtocolError(f"the provider announced {n} bytes")
    return await reader.readexactly(n)


# -- a decoder in this process ---------------------------------------------------------------


class InProcessDecoder:
    """A `kvshare.Decoder` of this process as an engine wants it; its sequences are the slots.

    Args:
        decoder: the decoder.
        executor: where its calls run, one at a time: the thread that decodes as well. None makes one.

    *Ownership*: the decoder stays the caller's; `close` ends the shares and an executor of its own.
    """

    def __init__(self, decoder: Any, executor: Executor | None = None) -> None:
        self.decoder = decoder
        self.executor = executor or ThreadPoolExecutor(1, thread_name_prefix="kvshare-decoder")
        self._owns_executor = executor is None
        self._cache = getattr(decoder, "context", decoder)
        self._shares: dict[int, Any] = {}

    async def close(self) -> None:
        """Release all shares; idempotent."""
        shares = list(self._shares.values())
        self._shares.clear()
        for share in shares:
            await self.run(share.release)
        if self._owns_executor:
            self.executor.shutdown(wait=False)
            self._owns_executor = False

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run something on the decoder's thread, such as a decode."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)

    async def slots(self) -> list[Slot]:
        """Return all sequences; which of them a program decodes right now, it knows itself."""

        def look() -> list[Slot]:
            return [
                Slot(
                    id_slot=seq_id,
                    idle=True,
                    n_tokens=self._cache.n_past(seq_id),
                    n_ctx=self._cache.n_ctx_seq,
                )
                for seq_id in range(self._cache.n_seq_max)
            ]

        return await self.run(look)

    async def share(
        self, id_slot: int, socket: str, *, n_tokens: int | None = None, expires_ms: int | None = None
    ) -> Shared:
        """Share a sequence; as `kvshare.Decoder.share` and `Share.send`."""
        limits = {} if expires_ms is None else {"expires_ms": expires_ms}
        share = await self.run(lambda: self.decoder.share(id_slot, n_tokens=n_tokens, **limits))
        self._shares[share.share_id] = share
        sending = asyncio.ensure_future(asyncio.to_thread(share.send, socket))
        try:
            await asyncio.shield(sending)
        except BaseException:
            await asyncio.wait([sending])  # bounded by the deadline of `send`
            await self.release(id_slot, share.share_id)
            raise
        return Shared(
            id_slot=id_slot,
            share_id=share.share_id,
            expires_ms=share.header.expires_ms,
            t_us=share.t_us,
            layout=share.header.layout,
            semantics=share.header.semantics,
            params=share.header.params,
        )

    async def adopt(self, id_slot: int, share_id: int, tokens: Sequence[int]) -> AdoptedInSlot:
        """Adopt; as `kvshare.Decoder.adopt`."""
        share = self._shares.get(share_id)
        if share is None or share.seq_id != id_slot:
            raise ReplayError(f"share {share_id} of sequence {id_slot} is unknown")
        adopted = await self.run(self.decoder.adopt, share, list(tokens))
        self._shares.pop(share_id, None)
        return AdoptedInSlot(
            id_slot=id_slot,
            n_adopted=adopted.n_adopted,
            n_usable=adopted.n_adopted,
            bytes_moved=adopted.bytes_moved,
            t_us=adopted.t_us,
        )

    async def release(self, id_slot: int, share_id: int) -> None:
        """End a share; idempotent."""
        share = self._shares.pop(share_id, None)
        if share is not None:
            await self.run(share.release)

    async def erase(self, id_slot: int) -> None:
        """Empty a sequence."""
        await self.run(self._cache.clear, id_slot)
