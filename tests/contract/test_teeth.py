"""The checks themselves: a decoder or provider with one fault does not pass them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import pytest

from kvshare import Adopted, KvshareError, Offer, mapping
from kvshare.ledger import LedgerPrefix, LedgerRecord, tokens_digest
from kvshare.testing import FakeDecoder, FakeProvider, check_decoder, check_provider
from kvshare.testing.contract import Check
from kvshare.testing.fakes import FakeShare
from kvshare.wire import ShareState
from tests.contract.harness import FakeHarness


def failing(checks: Iterable[tuple[str, Check]], among: set[str] | None = None) -> set[str]:
    """Return the names of the checks that do not pass: of all, or among these."""
    found = set()
    for name, check in checks:
        try:
            if among is None or name in among:
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

    def _require_no_cells(self, seq_id: int) -> None:
        self._require_sequence(seq_id)


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


class Indifferent(FakeDecoder):
    """Believes that a provider continued from the right tokens."""

    def adopt(self, share: FakeShare, tokens: Sequence[int], **_options: Any) -> Adopted:
        verify = LedgerRecord.verify

        def careless(record: LedgerRecord, *, prefix: LedgerPrefix, **known: Any) -> None:
            right = dataclasses.replace(record, n_prefix=prefix.n_tokens, prefix_sha256=prefix.sha256)
            verify(right, prefix=prefix, **known)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedgerRecord, "verify", careless)
            return super().adopt(share, tokens)


class Lossy(FakeDecoder):
    """Drops a sequence together with its share."""

    def _end(self, share: FakeShare, state: ShareState) -> None:
        if share._state.live:
            self.clear(share.seq_id)
        super()._end(share, state)


class Blind(FakeDecoder):
    """Does not look whether a provider has changed the prefix."""

    def _is_touched(self, share: FakeShare) -> bool:
        return False


class Inattentive(FakeDecoder):
    """Does not look whether a sequence has changed since it was shared."""

    def _require_unchanged(self, share: FakeShare) -> None:
        pass


class Generous(FakeDecoder):
    """Shares what a sequence holds, whatever the caller says of it."""

    def share(self, seq_id: int = 0, *, prefix: Sequence[int] | None = None, **options: Any) -> FakeShare:
        if prefix:
            options["prefix"] = self.tokens(seq_id)
        return super().share(seq_id, **options)


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
        (Indifferent, {"refuses_who_continued_from_others"}),
        (
            Lossy,
            {
                "keeps_the_prefix_of_a_share_that_ends",
                "goes_on_after_a_share_that_ends",
                "refuses_another_prefix",
            },
        ),
        (Blind, {"refuses_a_prefix_that_was_touched"}),
        (Inattentive, {"refuses_a_sequence_that_went_on"}),
        (Generous, {"shares_all_that_a_sequence_holds"}),
    ],
)
def test_a_faulty_decoder(faulty: Callable[[], FakeDecoder], expected: set[str]) -> None:
    class Harness(FakeHarness):
        def __init__(self) -> None:
            self.decoder: Any = faulty()

    assert failing(check_decoder(Harness), expected) == expected


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


class Thorough(FakeProvider):
    """Writes the rows of the prefix as well."""

    def publish(self) -> None:
        first = self.offer.first_cell
        for layer in self.offer.views():
            layer.k[max(0, first - self.offer.n_prefix) : first] += 1
        super().publish()


class Unasked(FakeProvider):
    """Does not look what the prompt begins with."""

    def prefill(self, tokens: Sequence[int], *, progress: Callable[[int], None] | None = None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedgerPrefix, "require_start_of", lambda *_: None)
            super().prefill(tokens, progress=progress)


class Confused(FakeProvider):
    """Says that it continued from other tokens."""

    def publish(self) -> None:
        with self.offer.ledger.view() as view:
            view[464] ^= 1
        super().publish()


@pytest.mark.parametrize(
    ("faulty", "expected"),
    [
        (Hasty, {"moves_the_watermark_forward"}),
        (Careless, {"writes_into_its_lease_only"}),
        (Liar, {"vouches_for_its_tokens"}),
        (Thorough, {"fills_only_what_is_new"}),
        (Unasked, {"refuses_another_prefix", "refuses_a_prompt_without_anything_new"}),
        (Confused, {"fills_only_what_is_new"}),
    ],
)
def test_a_faulty_provider(faulty: Callable[[Offer], FakeProvider], expected: set[str]) -> None:
    class Harness(FakeHarness):
        def provider(self, offer: Offer) -> AbstractContextManager[Any]:
            return faulty(offer)

    assert failing(check_provider(Harness), expected) == expected


def test_the_fakes_pass() -> None:
    assert failing(check_decoder(FakeHarness)) == set()
    assert failing(check_provider(FakeHarness)) == set()
