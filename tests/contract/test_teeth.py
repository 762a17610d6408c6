"""The checks themselves: a decoder or provider with one fault does not pass them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from kvshare import Adopted, KvshareError, Offer, SequenceInUseError, mapping
from kvshare.ledger import LedgerRecord, tokens_digest
from kvshare.testing import FakeDecoder, FakeProvider, check_decoder, check_provider
from kvshare.testing.contract import Check
from kvshare.testing.fakes import FakeShare
from kvshare.wire import ShareState
from tests.contract.harness import FakeHarness


def failing(checks: Iterable[tuple[str, Check]]) -> set[str]:
    """Return the names of the checks that do not pass."""
    found = set()
    for name, check in checks:
        try:
            check()
        except (AssertionError, KvshareError):
            found.add(name)
    return found


class Credulous(FakeDecoder):
    """Believes every ledger that says complete."""

    def adopt(self, share: FakeShare, tokens: Sequence[int], **_options: Any) -> Adopted:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedgerRecord, "verify", lambda *_, **__: None)
            return super().adopt(share, tokens)


class Untidy(FakeDecoder):
    """Leaves the rows of an ended share in memory."""

    def _end(self, share: FakeShare, state: ShareState) -> None:
        if share._state.live:
            share._state = state
            self._forget(share)


class Forgetful(FakeDecoder):
    """Does not look whether a sequence holds tokens."""

    def _require_empty(self, seq_id: int) -> None:
        if seq_id in self._leases:
            raise SequenceInUseError(f"sequence {seq_id} has a share")


class Leaky(FakeDecoder):
    """Keeps the descriptor of every ledger."""

    def _forget(self, share: FakeShare) -> None:
        self.__dict__.setdefault("kept", []).append(share.ledger)
        self._leases.pop(share.seq_id, None)
        self._shares.pop(share.share_id, None)

    def close(self) -> None:
        super().close()
        for ledger in self.__dict__.get("kept", []):
            ledger.close()


@pytest.mark.parametrize(
    ("faulty", "expected"),
    [
        (
            Credulous,
            {
                "refuses_before_complete",
                "refuses_other_tokens",
                "refuses_a_lying_ledger",
                "refuses_changed_memory",
                "refuses_the_ledger_of_another_share",
                "reports_a_failure",
            },
        ),
        (Untidy, {"takes_the_memory_of_what_nobody_adopted"}),
        (Forgetful, {"shares_a_sequence_once"}),
        (Leaky, {"hands_over"}),
    ],
)
def test_a_faulty_decoder(faulty: Callable[[], FakeDecoder], expected: set[str]) -> None:
    class Harness(FakeHarness):
        def __init__(self) -> None:
            self.decoder: Any = faulty()

    assert failing(check_decoder(Harness)) >= expected


class Hasty(FakeProvider):
    """Vouches before it is asked to."""

    def prefill(self, tokens: Sequence[int], *, progress: Callable[[int], None] | None = None) -> None:
        super().prefill(tokens, progress=progress)
        self.offer.complete(tokens)

    def publish(self) -> None:
        pass


class Careless(FakeProvider):
    """Writes one row too many."""

    def publish(self) -> None:
        for layer in self.offer.views():
            layer.k[self.offer.header.cells[0][0][1]] = 1
        super().publish()


class Liar(FakeProvider):
    """Vouches for other tokens."""

    def publish(self) -> None:
        sample = mapping.plain_sample(
            self.offer.layout, self.offer._mapped(), self.offer.first_cell, len(self.tokens)
        )
        self.offer.ledger.complete(tokens_digest([*self.tokens[:-1], 0]), len(self.tokens), sample)


@pytest.mark.parametrize(
    ("faulty", "expected"),
    [
        (Hasty, {"moves_the_watermark_forward"}),
        (Careless, {"writes_into_its_lease_only"}),
        (Liar, {"vouches_for_its_tokens"}),
    ],
)
def test_a_faulty_provider(faulty: Callable[[Offer], FakeProvider], expected: set[str]) -> None:
    class Harness(FakeHarness):
        def provider(self, offer: Offer) -> AbstractContextManager[Any]:
            return faulty(offer)

    assert failing(check_provider(Harness)) >= expected


def test_the_fakes_pass() -> None:
    assert failing(check_decoder(FakeHarness)) == set()
    assert failing(check_provider(FakeHarness)) == set()
