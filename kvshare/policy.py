"""What an engine decides by, and what it says about it: touches no socket and no clock of its own.

A handoff pays if enough tokens are uncached, a slot is free, and the decoder itself would not be
faster; `Policy` learns the speeds from what was measured, and pauses after failures.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvshare.errors import (
    AdoptError,
    DeadlineExceededError,
    ExpiredError,
    LedgerError,
    LocalProtocolError,
    NotShareableError,
    PeerClosedError,
    PeerRefusedError,
)
from kvshare.server import ServerBusyError, Slot

DEFAULT_THRESHOLD = 512

_MIN_SAMPLE = 32  # tokens; the time of fewer says little about the speed


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
    PROVIDER_BUSY = "provider-busy"
    PROMPT_TOO_LONG = "prompt-too-long"
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
        Reason.PROVIDER_BUSY,
        Reason.PROMPT_TOO_LONG,
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

PASSING = frozenset({Reason.SHARE_REFUSED, Reason.PROVIDER_BUSY, Reason.PROMPT_TOO_LONG})
"""Failures that say nothing of the next prompt, and are followed by no pause."""


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
        id_slot: the slot to run the request on, because its prompt, or what came before, is there; None
            leaves it to the decoder.
        n_tokens: tokens of the prompt; 0 if they are not known.
        n_cached: tokens that the decoder was thought to have already.
        relied_on: what that was read from.
        n_prefix: tokens that the slot held when it was shared; the provider went on behind them.
        n_handed: tokens that were adopted, these included.
        bytes_moved: bytes that the adoption had to move; 0 in every known case.
        n_reused: tokens that the decoder says it reused; None if it did not say.
        n_held: tokens that a slot was left with, those of the answer included; None if that is not known.
        ran_on: the slot where the request ran, as far as that is known.
        answered: False if the request is known to have failed.
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
    relied_on: Held | None = None
    n_prefix: int = 0
    n_handed: int = 0
    bytes_moved: int | None = None
    n_reused: int | None = None
    n_held: int | None = None
    ran_on: int | None = None
    answered: bool = True
    share_ms: float | None = None
    prefill_ms: float | None = None
    adopt_ms: float | None = None

    def stay(self, reason: Reason, detail: str = "", *, id_slot: int | None = None) -> None:
        """Leave the request to the decoder, on a slot if that holds what came before."""
        self.route, self.reason, self.detail, self.id_slot = Route.LOCAL, reason, detail, id_slot

    def to_json(self) -> dict[str, Any]:
        """Return the record for a log."""
        return {
            "path": self.route.value,
            "reason": self.reason.value,
            "detail": self.detail,
            "id_slot": self.id_slot,
            **{
                name: getattr(self, name)
                for name in ("n_tokens", "n_cached", "n_prefix", "n_handed", "bytes_moved", "n_reused")
            },
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
        predicted_n: tokens that it generated; None if it does not say.
    """

    cache_n: int
    prompt_n: int
    prompt_ms: float
    predicted_n: int | None = None

    @property
    def n_held(self) -> int | None:
        """Tokens that are in the slot then: the last one that was generated is not."""
        if self.predicted_n is None:
            return None
        return self.cache_n + self.prompt_n + max(self.predicted_n - 1, 0)

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
        predicted = value.get("predicted_n")
        return cls(
            int(found[0]),
            int(found[1]),
            float(found[2]),
            predicted if type(predicted) is int and predicted >= 0 else None,
        )


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
    if isinstance(error, ServerBusyError) and not at_server:
        return Reason.PROVIDER_BUSY
    if isinstance(error, (AdoptError, LedgerError, LocalProtocolError)):
        if stage is Stage.SHARE:
            return Reason.SHARE_REFUSED
        if stage is Stage.ADOPT:
            return Reason.ADOPT_REFUSED
        if stage is Stage.PREFILL and isinstance(error, LedgerError):
            return Reason.PROVIDER_FAILED
        if stage is Stage.PREFILL and isinstance(error, LocalProtocolError):
            return Reason.PROMPT_TOO_LONG  # for one message
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


@dataclass(frozen=True)
class Held:
    """What one request has left in the decoder's cache.

    Attributes:
        tokens: its prompt.
        id_slot: where; None if that is not known, or not any more.
        n_tokens: how many there are in all: prompt and answer; None if that is not known.
    """

    tokens: tuple[int, ...]
    id_slot: int | None = None
    n_tokens: int | None = None

    def n_cached(self, tokens: Sequence[int]) -> int:
        """Return how many tokens of a prompt may be there: if it goes on behind this one, the answer too."""
        n = common_prefix(self.tokens, tokens)
        if n == len(self.tokens) and self.n_tokens is not None:
            n = max(n, self.n_tokens)
        return min(n, len(tokens))

    def is_history_of(self, tokens: Sequence[int]) -> bool:
        """Return whether a prompt goes on here: it keeps more than it drops."""
        return 2 * self.n_cached(tokens) > max(len(self.tokens), self.n_tokens or 0)

    def begins(self, tokens: Sequence[int]) -> bool:
        """Return whether a prompt goes on behind this one."""
        return common_prefix(self.tokens, tokens) == len(self.tokens)

    def fits(self, slot: Slot) -> bool:
        """Return whether a slot may be the one, by what it says: nobody else's request ran there.

        One that is empty now may have been: a server saves idle slots elsewhere and clears them.
        """
        if self.n_tokens is None:  # a client that hung up; the last token of a prompt may be missing
            return slot.n_tokens == 0 or slot.n_tokens >= len(self.tokens) - 1
        return slot.n_tokens in (0, self.n_tokens)


class Memory:
    """What the last requests have left in a decoder's cache, and where.

    It is a guess, corrected by what the decoder reports.
    """

    def __init__(self, n_prompts: int = 64) -> None:
        self._held: deque[Held] = deque(maxlen=n_prompts)

    def longest(self, tokens: tuple[int, ...], taken: Collection[int] = ()) -> Held | None:
        """Return what has the most tokens of a prompt, the newest of these.

        Args:
            tokens: the prompt.
            taken: slots that do not count.
        """
        found = [held for held in reversed(self._held) if held.id_slot is None or held.id_slot not in taken]
        longest = max(found, key=lambda held: held.n_cached(tokens), default=None)
        return longest if longest and longest.n_cached(tokens) else None

    def n_cached(self, tokens: tuple[int, ...]) -> int:
        """Return how many tokens of a prompt may be cached somewhere."""
        longest = self.longest(tokens)
        return longest.n_cached(tokens) if longest else 0

    def history(self, tokens: tuple[int, ...]) -> Held | None:
        """Return what a prompt goes on behind: the longest, and the newest of these."""
        found = [held for held in reversed(self._held) if held.is_history_of(tokens)]
        return max(found, key=lambda held: held.n_cached(tokens), default=None)

    def home(self, held: Held, slots: Sequence[Slot]) -> Slot | None:
        """Return the slot that holds something, if that can be told."""
        if held.id_slot is not None:
            return next((slot for slot in slots if slot.id_slot == held.id_slot and held.fits(slot)), None)
        if not held.n_tokens:
            return None
        # the server chose it, and did not say: a slot that holds just as much, and is nobody else's
        found = [
            slot
            for slot in slots
            if slot.n_tokens == held.n_tokens
            and not any(each.id_slot == slot.id_slot and each.fits(slot) for each in self._held)
        ]
        rivals = [each for each in self._held if each.id_slot is None and each.n_tokens == held.n_tokens]
        return found[0] if len(found) == len(rivals) == 1 else None

    def add(self, tokens: tuple[int, ...], id_slot: int | None, n_tokens: int | None = None) -> None:
        """Note what a request has left; `id_slot` is None where nobody knows the slot."""
        self._keep(
            lambda held: not (held.id_slot == id_slot if held.id_slot is not None else held.begins(tokens))
        )
        self._held.append(Held(tokens, id_slot, n_tokens))

    def vacate(self, id_slot: int) -> None:
        """Note that a slot was found empty: what was there may be where a server keeps idle prompts."""
        self._held = deque(
            (replace(held, id_slot=None) if held.id_slot == id_slot else held for held in self._held),
            maxlen=self._held.maxlen,
        )

    def discard(self, held: Held) -> None:
        """Forget what was left of a prompt."""
        self._keep(lambda each: each.tokens != held.tokens)

    def forget(self, id_slot: int | None = None) -> None:
        """Forget what was in a slot; None forgets all."""
        self._keep(lambda held: id_slot is not None and held.id_slot != id_slot)

    def _keep(self, wanted: Callable[[Held], bool]) -> None:
        self._held = deque(filter(wanted, self._held), maxlen=self._held.maxlen)


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
        n_prefix: int = 0,
        n_queued: int = 0,
        others_run: bool = False,
        now: float,
    ) -> Verdict:
        """Decide about one prompt.

        Args:
            n_tokens: its tokens.
            n_cached: tokens of it that the decoder has.
            n_prefix: tokens of it that a provider can go on behind.
            n_queued: tokens of handoffs that the provider has before it.
            others_run: whether other slots are generating.
            now: seconds of any steady clock, the same as for `failed`.
        """
        if verdict := self.too_short(n_tokens, n_cached):
            return verdict
        if now < self._paused_until:
            return Verdict(False, Reason.PAUSED, f"after {self._n_failed} failures in a row")
        handoff = self.expected_ms(n_tokens - n_prefix, n_queued)
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
        """Learn from a handoff: the provider's time for the tokens that it prefilled, and all the rest.

        The first one, and the first behind a failure, is not counted: the provider built its context and
        touched the memory for the first time.
        """
        if self._warm:
            if n_tokens >= _MIN_SAMPLE:
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
