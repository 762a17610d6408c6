"""What the caller of a handoff does, right or wrong: one function a fault."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvshare.testing.chaos import child
from kvshare.testing.chaos.conversation import EXPIRES_MS, engine
from kvshare.testing.chaos.faults import BEFORE_PUBLISH, FAULTS
from kvshare.testing.chaos.handoff import OTHER, SLOT, Handoff, until_stopped
from kvshare.testing.chaos.targets import Refused

SHORT_MS = 3000
CHANGED = ("SequenceInUseError", "slot_in_use")


def _provider_fault(handoff: Handoff) -> None:
    """What the provider does is the fault; the decoder is asked as ever."""
    handoff.share()
    handoff.wait()
    handoff.adopt()
    if handoff.step == "adopt":
        handoff.go_on()
        handoff.wait()


def _right(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("published")
    handoff.adopt()


def _pauses(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("waits")
    until_stopped(handoff.provider.pid)
    if handoff.step in BEFORE_PUBLISH:
        handoff.must_refuse(handoff.adopt, "an adopt while the provider is stopped")
    handoff.resume()
    handoff.expect("published")
    handoff.adopt()


def _replays(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("waits")
    handoff.release()
    handoff.go_on()
    handoff.share()
    handoff.wait()
    handoff.adopt()


def _late(end: Callable[[Handoff], None], expires_ms: int = EXPIRES_MS) -> Callable[[Handoff], None]:
    """The provider writes when its share has ended in this way."""

    def drive(handoff: Handoff) -> None:
        handoff.share(expires_ms=expires_ms)
        handoff.expect("published")
        end(handoff)
        handoff.go_on()
        handoff.expect("shown")
        raise Refused(handoff.case.reason or "released")

    return drive


def _refuse(handoff: Handoff) -> None:
    handoff.must_refuse(lambda: handoff.adopt(handoff.given[:-1]), "an adopt with other tokens")


def _expire(handoff: Handoff) -> None:
    time.sleep(SHORT_MS / 1000 + 0.1)
    handoff.must_refuse(handoff.adopt, "an adopt after the end")


def _trespasses(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("published")
    handoff.provider.close()
    handoff.adopt()


def _holds_on(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("published")
    handoff.must_refuse(handoff.adopt, "an adopt while the provider holds on to the memory")
    handoff.provider.kill()
    handoff.adopt()


def _late_prefill(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("waits")
    until_stopped(handoff.provider.pid)
    handoff.release()
    handoff.fill(len(handoff.given) - handoff.n_held)
    handoff.resume()
    handoff.wait()
    raise Refused("released")


def _adopts_twice(handoff: Handoff) -> None:
    handoff.published()
    handoff.adopt()
    handoff.must_refuse(handoff.adopt, "a second adopt")


def _adopts_early(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("waits")
    handoff.must_refuse(handoff.adopt, "an adopt before the end")
    handoff.go_on()
    handoff.expect("published")
    handoff.adopt()


def _adopts_late(handoff: Handoff) -> None:
    shared = time.monotonic()
    handoff.share(expires_ms=SHORT_MS)
    handoff.expect("waits")
    handoff.go_on()
    handoff.expect("published")
    time.sleep(max(0.0, shared + SHORT_MS / 1000 + 0.1 - time.monotonic()))
    handoff.adopt()


def _adopts(tokens: Callable[[list[int]], list[int]]) -> Callable[[Handoff], None]:
    def drive(handoff: Handoff) -> None:
        handoff.published()
        handoff.adopt(tokens(handoff.given))

    return drive


def _adopts_unknown(handoff: Handoff) -> None:
    handoff.published()
    handoff.adopt(other=1)


def _adopts_elsewhere(handoff: Handoff) -> None:
    handoff.published()
    handoff.adopt(slot=OTHER)


def _adopts_released(handoff: Handoff) -> None:
    handoff.published()
    handoff.release()
    handoff.adopt()


def _shares_twice(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("waits")
    share_id = handoff.share_id
    handoff.must_refuse(handoff.share, "a second share of the slot")
    handoff.share_id = share_id
    handoff.go_on()
    handoff.expect("published")
    handoff.adopt()


def _releases_twice(handoff: Handoff) -> None:
    handoff.published()
    handoff.release()
    handoff.release()
    raise Refused("released")


def _releases_adopted(handoff: Handoff) -> None:
    handoff.published()
    handoff.adopt()
    handoff.release()


def _touches(handoff: Handoff) -> None:
    """Nothing of what the slot held can be believed then."""
    handoff.n_held = 0
    _provider_fault(handoff)


def _request_between(handoff: Handoff) -> None:
    handoff.published()
    is_turn = handoff.n_held > 0
    handoff.go_ahead(len(handoff.given) - handoff.n_held)
    try:
        _adopt_changed(handoff)
    finally:
        if not is_turn:
            handoff.release()
            handoff.target.do("erase", SLOT)
            handoff.n_held = 0


def _goes_on(handoff: Handoff) -> None:
    """As a stream does that generates: one token at a time."""
    handoff.share()
    handoff.expect("waits")
    handoff.go_ahead(1)
    handoff.go_on()
    handoff.wait()
    _adopt_changed(handoff)


def _erase_between(handoff: Handoff) -> None:
    handoff.published()
    handoff.target.do("erase", SLOT)
    if handoff.n_held:
        handoff.n_held = 0
        _adopt_changed(handoff)
    handoff.adopt()


def _adopt_changed(handoff: Handoff) -> None:
    """Adopt into a slot that is not what it was when it was shared."""
    try:
        handoff.adopt()
    except Refused as error:
        if error.why not in CHANGED:
            handoff.case.wrong.append(f"refused as {error.why}, not as one of {CHANGED}: {error}")
        raise


def _job_hangs_up(handoff: Handoff) -> None:
    """An engine that hangs up cancels its job; the next one is served."""
    for hangs_up in (True, False):
        handoff.share()
        assert handoff.share_id is not None
        with engine(handoff.socket, handoff.share_id, handoff.given):
            event = "" if hangs_up and handoff.step == "connect" else handoff.wait()
            while event in ("begun", "progress") and not hangs_up:
                event = handoff.wait()
        while hangs_up and event not in ("failed", "dropped", "done"):
            event = handoff.wait()
        if hangs_up and event != "done":  # a fast one may be
            handoff.must_refuse(handoff.adopt, "an adopt after the engine has hung up")
        if hangs_up:
            handoff.release()
    handoff.adopt()


def _decoder_dies(handoff: Handoff) -> None:
    handoff.share()
    handoff.expect("waits")
    handoff.target.kill()
    handoff.go_on()
    handoff.provider.process.stdin.close()  # type: ignore[union-attr]
    handoff.wait()
    status = handoff.provider.process.wait(child.TIMEOUT_S)
    if status == 0 and handoff.fault.name == "decoder-dies-unseen":
        handoff.case.wrong.append("the provider ended with success, its decoder was killed before")
    raise Refused(f"the decoder is gone; the provider ended with status {status}")


DRIVERS: dict[str, Callable[[Handoff], None]] = {
    **{fault.name: _provider_fault for fault in FAULTS if fault.by == "provider"},
    "none": _right,
    "pauses": _pauses,
    "replays": _replays,
    "late-nan": _late(Handoff.release),
    "late-refused": _late(_refuse),
    "late-expired": _late(_expire, SHORT_MS),
    "trespasses": _trespasses,
    "holds-on": _holds_on,
    "late-prefill": _late_prefill,
    "adopts-other-tokens": _adopts(lambda tokens: [*tokens[:-1], tokens[-1] ^ 1]),
    "adopts-fewer-tokens": _adopts(lambda tokens: tokens[:-1]),
    "adopts-more-tokens": _adopts(lambda tokens: [*tokens, tokens[0]]),
    "adopts-no-tokens": _adopts(lambda tokens: []),
    "adopts-unknown": _adopts_unknown,
    "adopts-twice": _adopts_twice,
    "adopts-early": _adopts_early,
    "adopts-late": _adopts_late,
    "adopts-released": _adopts_released,
    "adopts-elsewhere": _adopts_elsewhere,
    "shares-twice": _shares_twice,
    "releases-twice": _releases_twice,
    "releases-adopted": _releases_adopted,
    "touches-prefix": _touches,
    "swaps-prefix": _touches,
    "request-between": _request_between,
    "goes-on": _goes_on,
    "erase-between": _erase_between,
    "job-hangs-up": _job_hangs_up,
    "decoder-dies": _decoder_dies,
    "decoder-dies-unseen": _decoder_dies,
}
