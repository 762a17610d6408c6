"""What every decoder and every provider has to keep, as small checks that need no pytest.

Write a `Harness` around your decoder and your provider, and run what `check_decoder` and
`check_provider` yield:

    for name, check in check_decoder(MyHarness):
        check()  # raises AssertionError, or an error that does not belong there

Each check makes a harness of its own, so that no failure hides another. With pytest, parametrize over
the list. After each check a fresh handoff has to work and to be exact, and no descriptor may be left.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from kvshare import wire
from kvshare.errors import (
    ExpiredError,
    KvshareError,
    LedgerDigestError,
    LedgerIncompleteError,
    LocalProtocolError,
    ReplayError,
    SequenceInUseError,
)
from kvshare.ledger import LedgerState, tokens_digest
from kvshare.provider import Offer
from kvshare.wire import ShareState

N_TOKENS = 40
N_ANSWER = 3


class Harness(Protocol):
    """A decoder and a provider that fit together, and a way to tell what a sequence answers.

    Attributes:
        decoder: with `share`, `adopt` and `close` as `kvshare.Decoder`, two empty sequences 0 and 1,
            and room for `4 * N_TOKENS` tokens in each.
    """

    decoder: Any

    def tokens(self, n: int, seed: int = 0) -> list[int]:
        """Return token ids; other ones for another seed."""

    def provider(self, offer: Offer) -> AbstractContextManager[Any]:
        """Return a provider with `prefill(tokens, progress=None)` and `publish()`."""

    def answer(self, seq_id: int) -> bytes:
        """Return what the sequence leads to, such as logits; leave it as it is."""

    def expected(
        self,
        tokens: Sequence[int],
        seq_id: int,
        header: wire.ShareHeader,
        *,
        cuts: Sequence[int] = (),
        headers: Mapping[int, wire.ShareHeader] = MappingProxyType({}),
    ) -> bytes:
        """Return what `answer` has to be after these tokens, from the first cell of this header on.

        Args:
            tokens: all tokens.
            seq_id: the sequence.
            header: of the first share of the sequence.
            cuts: positions where a decode call begins, besides 0: sums may run in another order.
            headers: of further shares, by the position where they began.
        """

    def go_on(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Decode tokens one by one behind what the sequence holds, as a decoder does that answers."""

    def n_past(self, seq_id: int) -> int:
        """Return how many tokens the sequence holds."""

    def clear(self, seq_id: int) -> None:
        """Empty a sequence."""

    def close(self) -> None:
        """Close the decoder, and all else."""


Check = Callable[[], None]


def check_decoder(factory: Callable[[], Harness]) -> Iterator[tuple[str, Check]]:
    """Yield the name of each check of a decoder, and the check."""
    yield from _checks("decoder_", factory)


def check_provider(factory: Callable[[], Harness]) -> Iterator[tuple[str, Check]]:
    """Yield the name of each check of a provider, and the check."""
    yield from _checks("provider_", factory)


def _checks(prefix: str, factory: Callable[[], Harness]) -> Iterator[tuple[str, Check]]:
    for name, function in list(globals().items()):
        if name.startswith(prefix):
            yield name.removeprefix(prefix), _runner(function, factory)


def _runner(function: Callable[[Harness], None], factory: Callable[[], Harness]) -> Check:
    def run() -> None:
        harness = factory()
        try:
            _handoff(harness)  # what is allocated once is allocated now
            before = _open_fds()
            function(harness)
            _handoff(harness)
            gc.collect()
            _require(_open_fds() == before, "descriptors were left open")
        finally:
            harness.close()

    run.__doc__ = function.__doc__
    return run


# -- helpers -----------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


@contextlib.contextmanager
def _raises(kind: type[BaseException], text: str = "") -> Iterator[None]:
    try:
        yield
    except kind as error:
        _require(text in str(error), f"{text!r} is not in {str(error)!r}")
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def _offered(harness: Harness, *, seq_id: int = 0, **options: Any) -> Iterator[tuple[Any, Offer]]:
    """Share and receive; the share is released at the end."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, harness.decoder.share(seq_id, **{"n_tokens": N_TOKENS, **options}) as share:
        share.send(near)
        with Offer.receive(far) as offer:
            yield share, offer


def _fill(harness: Harness, offer: Offer, tokens: Sequence[int]) -> None:
    with harness.provider(offer) as provider:
        provider.prefill(tokens)
        provider.publish()


def _require_exact(harness: Harness, tokens: Sequence[int], seq_id: int, header: wire.ShareHeader) -> None:
    _require(
        harness.answer(seq_id) == harness.expected(tokens, seq_id, header),
        "the adopted sequence answers otherwise than a local one",
    )


def _handoff(harness: Harness, *, seq_id: int = 0, seed: int = 99) -> None:
    """Hand over, check, and empty the sequence again."""
    tokens = harness.tokens(N_TOKENS, seed)
    harness.clear(seq_id)
    with _offered(harness, seq_id=seq_id) as (share, offer):
        _fill(harness, offer, tokens)
        adopted = harness.decoder.adopt(share, tokens)
    _require(adopted.n_adopted == N_TOKENS, f"{adopted.n_adopted} tokens were adopted")
    _require(adopted.bytes_moved == 0, f"{adopted.bytes_moved} bytes were moved")
    _require_exact(harness, tokens, seq_id, share.header)
    harness.clear(seq_id)


@dataclass
class _Chat:
    """A conversation: turns that the provider prefills, answers that the decoder generates.

    Attributes:
        seq_id: its sequence.
        tokens: what the sequence holds.
        cuts: where a decode call began.
        headers: of its shares, by the position where they began.
    """

    seq_id: int = 0
    tokens: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    headers: dict[int, wire.ShareHeader] = field(default_factory=dict)

    def asked(self, harness: Harness, seed: int) -> list[int]:
        """Return the tokens with those of the next turn behind them."""
        return [*self.tokens, *harness.tokens(N_TOKENS, seed)]

    @contextlib.contextmanager
    def offered(self, harness: Harness, **options: Any) -> Iterator[tuple[Any, Offer]]:
        """Share behind what the sequence holds, and receive."""
        options = {"prefix": self.tokens, "n_tokens": len(self.tokens) + N_TOKENS, **options}
        with _offered(harness, seq_id=self.seq_id, **options) as (share, offer):
            yield share, offer

    def adopted(self, tokens: Sequence[int], header: wire.ShareHeader) -> None:
        """Note that the sequence holds these tokens now."""
        self.cuts.append(len(self.tokens))
        self.headers[len(self.tokens)] = header
        self.tokens = list(tokens)

    def answer(self, harness: Harness, seed: int) -> None:
        """Let the decoder go on."""
        tokens = harness.tokens(N_ANSWER, seed)
        harness.go_on(self.seq_id, tokens)
        self.cuts += range(len(self.tokens), len(self.tokens) + N_ANSWER)
        self.tokens += tokens

    def turn(self, harness: Harness, seed: int) -> None:
        """Hand over one turn, and answer it."""
        tokens = self.asked(harness, seed)
        with self.offered(harness) as (share, offer):
            _fill(harness, offer, tokens)
            adopted = harness.decoder.adopt(share, tokens)
        _require(adopted.n_adopted == len(tokens), f"{adopted.n_adopted} tokens were adopted")
        _require(adopted.bytes_moved == 0, f"{adopted.bytes_moved} bytes were moved")
        self.adopted(tokens, share.header)
        self.answer(harness, seed + 50)

    def require_exact(self, harness: Harness) -> None:
        """Check what the sequence holds and answers; the last step of a check, or clear behind it."""
        n_past = harness.n_past(self.seq_id)
        _require(n_past == len(self.tokens), f"it holds {n_past} tokens, not {len(self.tokens)}")
        expected = harness.expected(
            self.tokens, self.seq_id, self.headers[0], cuts=self.cuts[1:], headers=self.headers
        )
        _require(
            harness.answer(self.seq_id) == expected, "the conversation goes on otherwise than a local one"
        )


def _chat(harness: Harness, *, seq_id: int = 0, n_turns: int = 1) -> _Chat:
    """Begin a conversation in a sequence that is emptied first."""
    harness.clear(seq_id)
    chat = _Chat(seq_id)
    for seed in range(n_turns):
        chat.turn(harness, 10 * seq_id + seed)
    return chat


def _overwrite(offer: Offer, rows: slice) -> None:
    """Write into rows of all layers."""
    for layer in offer.views():
        for view in (layer.k, layer.v):
            if view is not None:
                view[rows] = 7


def _prefix_rows(chat: _Chat) -> slice:
    """Return the rows where a conversation begins."""
    ((first, _),) = chat.headers[0].cells[0]
    return slice(first, first + N_TOKENS)


def _lease_bytes(offer: Offer) -> bytes:
    """Return K and V of the leased cells of a cache that can be viewed."""
    found = []
    ((first, last),) = offer.header.cells[0]
    for layer in offer.views():
        found += [view[first:last].tobytes() for view in (layer.k, layer.v) if view is not None]
    return b"".join(found)


def _other_bytes(offer: Offer) -> bytes:
    """Return K and V of all cells but the leased ones."""
    found = []
    ((first, last),) = offer.header.cells[0]
    for layer in offer.views():
        for view in (layer.k, layer.v):
            if view is not None:
                found += [view[:first].tobytes(), view[last:].tobytes()]
    return b"".join(found)


# -- a decoder ---------------------------------------------------------------------------------


def decoder_hands_over(harness: Harness) -> None:
    """Several times, in either sequence, with other tokens."""
    for seed in range(3):
        _handoff(harness, seq_id=seed % 2, seed=seed)


def decoder_keeps_sequences_apart(harness: Harness) -> None:
    """What is adopted into one leaves the answer of the other as it was."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        _fill(harness, offer, tokens)
        harness.decoder.adopt(share, tokens)
    before = harness.answer(0)
    _handoff(harness, seq_id=1, seed=5)
    _require(harness.answer(0) == before, "another sequence answers otherwise now")


def decoder_takes_fewer_tokens_than_it_leased(harness: Harness) -> None:
    """The lease is an upper bound."""
    tokens = harness.tokens(N_TOKENS // 2)
    with _offered(harness) as (share, offer):
        _fill(harness, offer, tokens)
        _require(harness.decoder.adopt(share, tokens).n_adopted == len(tokens), "tokens are missing")
    _require_exact(harness, tokens, 0, share.header)


def decoder_refuses_before_complete(harness: Harness) -> None:
    """Neither before the provider begins nor before it is done; the share lives on."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        with _raises(LedgerIncompleteError):
            harness.decoder.adopt(share, tokens)
        _require(share.state is ShareState.ISSUED, f"the share is {share.state}")
        with harness.provider(offer) as provider:
            provider.prefill(tokens)
            with _raises(LedgerIncompleteError):
                harness.decoder.adopt(share, tokens)
            _require(share.state is ShareState.FILLING, f"the share is {share.state}")
            provider.publish()
        _require(share.state is ShareState.COMPLETE, f"the share is {share.state}")
        harness.decoder.adopt(share, tokens)
        _require(share.state is ShareState.ADOPTED, f"the share is {share.state}")
    _require_exact(harness, tokens, 0, share.header)


def decoder_adopts_once(harness: Harness) -> None:
    """The second time is a replay, also after the sequence was emptied."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        _fill(harness, offer, tokens)
        harness.decoder.adopt(share, tokens)
        with _raises(ReplayError):
            harness.decoder.adopt(share, tokens)
        _require_exact(harness, tokens, 0, share.header)
        harness.clear(0)
        with _raises(ReplayError):
            harness.decoder.adopt(share, tokens)


def decoder_releases_once(harness: Harness) -> None:
    """Release is idempotent; nothing can be sent or adopted after it."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        _fill(harness, offer, tokens)
        for _ in range(2):
            share.release()
            _require(share.state is ShareState.RELEASED, f"the share is {share.state}")
        with _raises(ReplayError):
            harness.decoder.adopt(share, tokens)
        with _raises(LocalProtocolError):
            share.send("/nowhere")


def decoder_keeps_what_was_adopted(harness: Harness) -> None:
    """Release after adoption changes nothing."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        _fill(harness, offer, tokens)
        harness.decoder.adopt(share, tokens)
        share.release()
        _require(share.state is ShareState.ADOPTED, f"the share is {share.state}")
    _require_exact(harness, tokens, 0, share.header)


def decoder_takes_the_memory_of_what_nobody_adopted(harness: Harness) -> None:
    """Nothing of a refused prompt stays, and a late writer reaches neither the next share nor a sequence."""
    tokens, other = harness.tokens(N_TOKENS), harness.tokens(N_TOKENS, 1)
    with _offered(harness, seq_id=1) as (share, offer):
        _fill(harness, offer, other)
        harness.decoder.adopt(share, other)
    with _offered(harness) as (released, late):
        _fill(harness, late, tokens)
        rows = _lease_bytes(late)
        released.release()
        with _offered(harness) as (_, following):
            _require(_lease_bytes(following) != rows, "a released share leaves data behind")
            before = _lease_bytes(following)
            for layer in late.views():
                for view in (layer.k, layer.v):
                    if view is not None:
                        view[:] = 7
                del view
            del layer
            _require(_lease_bytes(following) == before, "a late writer reaches the next share")
        _require_exact(harness, other, 1, share.header)
    harness.clear(1)


def decoder_lets_shares_expire(harness: Harness) -> None:
    """Complete or not, and however often one asks."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness, expires_ms=30) as (share, offer):
        _fill(harness, offer, tokens)
        time.sleep(0.05)
        for _ in range(2):
            with _raises(ExpiredError):
                harness.decoder.adopt(share, tokens)
            _require(share.state is ShareState.EXPIRED, f"the share is {share.state}")
        with harness.decoder.share(0, n_tokens=N_TOKENS):  # the cells are free again
            pass


def decoder_refuses_other_tokens(harness: Harness) -> None:
    """One token of another prompt; the share has failed then."""
    tokens = harness.tokens(N_TOKENS)
    for at in (0, N_TOKENS // 2, N_TOKENS - 1):
        other = list(tokens)
        other[at] += 1
        with _offered(harness) as (share, offer):
            _fill(harness, offer, tokens)
            with _raises(LedgerDigestError, "tokens"):
                harness.decoder.adopt(share, other)
            _require(share.state is ShareState.FAILED, f"the share is {share.state}")
            with _raises(ReplayError):
                harness.decoder.adopt(share, tokens)


def decoder_refuses_another_number_of_tokens(harness: Harness) -> None:
    """Fewer and more than the provider vouches for."""
    tokens = harness.tokens(N_TOKENS)
    for claimed in (tokens[:-1], [*tokens, 1], []):
        with _offered(harness) as (share, offer):
            _fill(harness, offer, tokens)
            with _raises(LedgerIncompleteError):
                harness.decoder.adopt(share, claimed)


def decoder_shares_a_sequence_once(harness: Harness) -> None:
    """A second share is refused, and the first goes on; so is one of a sequence with tokens."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        with _raises(SequenceInUseError):
            harness.decoder.share(0, n_tokens=N_TOKENS)
        _fill(harness, offer, tokens)
        harness.decoder.adopt(share, tokens)
    with _raises(SequenceInUseError):
        harness.decoder.share(0, n_tokens=N_TOKENS)
    _require_exact(harness, tokens, 0, share.header)


def decoder_shares_two_sequences(harness: Harness) -> None:
    """Two shares at the same time, adopted the other way round."""
    first, second = harness.tokens(N_TOKENS, 1), harness.tokens(N_TOKENS, 2)
    with (
        _offered(harness, seq_id=0) as (share0, offer0),
        _offered(harness, seq_id=1) as (share1, offer1),
    ):
        _fill(harness, offer0, first)
        _fill(harness, offer1, second)
        harness.decoder.adopt(share1, second)
        harness.decoder.adopt(share0, first)
    _require_exact(harness, first, 0, share0.header)
    _require_exact(harness, second, 1, share1.header)
    harness.clear(1)


def decoder_reports_a_failure(harness: Harness) -> None:
    """The provider's own words are in the error."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        offer.fail("the accelerator is on fire")
        with _raises(LedgerIncompleteError, "the accelerator is on fire"):
            harness.decoder.adopt(share, tokens)
        _require(share.state is ShareState.FAILED, f"the share is {share.state}")


def decoder_refuses_a_lying_ledger(harness: Harness) -> None:
    """Complete for all tokens, half of the memory filled, and a digest of something else."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        with harness.provider(offer) as provider:
            provider.prefill(tokens[: N_TOKENS // 2])
        offer.ledger.advance(N_TOKENS)
        offer.ledger.complete(tokens_digest(tokens), N_TOKENS, bytes(32))
        with _raises(LedgerDigestError):
            harness.decoder.adopt(share, tokens)
        _require(share.state is ShareState.FAILED, f"the share is {share.state}")


def decoder_refuses_changed_memory(harness: Harness) -> None:
    """What the provider vouched for is not what is there any more."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        _fill(harness, offer, tokens)
        layer = offer.views()[0]
        layer.k[offer.first_cell] += 1
        del layer
        with _raises(LedgerDigestError):
            harness.decoder.adopt(share, tokens)


def decoder_refuses_other_digests(harness: Harness) -> None:
    """A provider that says itself that its layout or its model is another one."""
    tokens = harness.tokens(N_TOKENS)
    for name in ("layout", "semantics"):
        with _offered(harness) as (share, offer):
            _fill(harness, offer, tokens)
            at = {"layout": 24, "semantics": 56}[name]
            with offer.ledger.view() as view:
                view[at] ^= 1
            with _raises(LedgerDigestError, name):
                harness.decoder.adopt(share, tokens)


def decoder_refuses_the_ledger_of_another_share(harness: Harness) -> None:
    """All bytes of the ledger of the share before, copied into this one."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (_, offer):
        _fill(harness, offer, tokens)
        with offer.ledger.view() as view:
            old = bytes(view[:512])
    with _offered(harness) as (share, offer):
        _fill(harness, offer, tokens)
        with offer.ledger.view() as view:
            view[:512] = old
        with _raises(ReplayError):
            harness.decoder.adopt(share, tokens)


def decoder_outlives_its_shares(harness: Harness) -> None:
    """A share that nobody ends goes with its decoder; afterwards it says so."""
    share = harness.decoder.share(0, n_tokens=N_TOKENS)
    _require(share.state.live, "the share is dead at once")
    share.release()
    with _raises(ReplayError):
        harness.decoder.adopt(share, harness.tokens(N_TOKENS))


# -- a decoder that shares what a sequence holds -----------------------------------------------


def decoder_goes_on_with_a_conversation(harness: Harness) -> None:
    """Three turns, answered by the decoder, in either sequence."""
    for seq_id in (0, 1):
        _chat(harness, seq_id=seq_id, n_turns=3).require_exact(harness)
        harness.clear(seq_id)  # where another sequence is, answers may go to cells elsewhere


def decoder_goes_on_with_two_conversations(harness: Harness) -> None:
    """Both are shared at the same time, the second for nothing: it answers as before."""
    first, second = _chat(harness, seq_id=0), _chat(harness, seq_id=1)
    before = harness.answer(1)
    tokens = first.asked(harness, 7)
    with first.offered(harness) as (share, offer):
        with second.offered(harness) as (_, other):
            _fill(harness, other, second.asked(harness, 8))
        _fill(harness, offer, tokens)
        harness.decoder.adopt(share, tokens)
    first.adopted(tokens, share.header)
    first.require_exact(harness)
    n_past = harness.n_past(1)
    _require(n_past == len(second.tokens), f"the other holds {n_past} tokens, not {len(second.tokens)}")
    _require(harness.answer(1) == before, "the other conversation answers otherwise now")
    harness.clear(1)


def decoder_names_what_a_sequence_holds(harness: Harness) -> None:
    """In the share and in the ledger that the provider gets."""
    chat = _chat(harness)
    with chat.offered(harness) as (share, offer):
        n_prefix = len(chat.tokens)
        _require(share.n_prefix == offer.n_prefix == n_prefix, f"n_prefix is {share.n_prefix}")
        prefix = offer.ledger.prefix
        _require(prefix.n_tokens == n_prefix, f"the ledger has {prefix.n_tokens} tokens")
        _require(prefix.sha256 == tokens_digest(chat.tokens), "the ledger has other tokens")
        record = share.ledger.snapshot()
        _require(record.n_filled == n_prefix, f"{record.n_filled} tokens are filled")
    with harness.decoder.share(1, n_tokens=N_TOKENS) as share:
        _require(share.n_prefix == 0, f"n_prefix of an empty sequence is {share.n_prefix}")
        _require(share.ledger.prefix.sha256 == bytes(32), "an empty sequence has a digest")


def decoder_shares_all_that_a_sequence_holds(harness: Harness) -> None:
    """Not a part of it, nothing for it, and no room behind it."""
    chat = _chat(harness)
    n_tokens = len(chat.tokens) + N_TOKENS
    for prefix in (chat.tokens[:-1], [*chat.tokens, 1], [], None):
        with _raises(SequenceInUseError):
            harness.decoder.share(0, prefix=prefix, n_tokens=n_tokens)
    with _raises(SequenceInUseError):
        harness.decoder.share(1, prefix=chat.tokens, n_tokens=n_tokens)
    for n_tokens in (len(chat.tokens), 1):
        with _raises(LocalProtocolError):
            harness.decoder.share(0, prefix=chat.tokens, n_tokens=n_tokens)
    chat.turn(harness, 3)
    chat.require_exact(harness)


def decoder_keeps_the_prefix_of_a_share_that_ends(harness: Harness) -> None:
    """Released, failed, refused or expired: the sequence is as before, and out of the provider's reach."""

    def release(share: Any, offer: Offer, chat: _Chat) -> None:
        share.release()

    def fail(share: Any, offer: Offer, chat: _Chat) -> None:
        offer.fail("out of order")
        with _raises(LedgerIncompleteError):
            harness.decoder.adopt(share, chat.asked(harness, 2))

    def fill(share: Any, offer: Offer, chat: _Chat) -> None:
        _fill(harness, offer, chat.asked(harness, 2))
        share.release()

    def refuse(share: Any, offer: Offer, chat: _Chat) -> None:
        _fill(harness, offer, chat.asked(harness, 2))
        with _raises(LedgerDigestError):
            harness.decoder.adopt(share, chat.asked(harness, 3))

    def expire(share: Any, offer: Offer, chat: _Chat) -> None:
        _fill(harness, offer, chat.asked(harness, 2))
        time.sleep(0.06)
        with _raises(ExpiredError):
            harness.decoder.adopt(share, chat.asked(harness, 2))

    for end in (release, fail, fill, refuse, expire):
        chat = _chat(harness)
        options = {"expires_ms": 50} if end is expire else {}
        with chat.offered(harness, **options) as (share, offer):
            end(share, offer, chat)
            _require(not share.state.live, f"the share is {share.state}")
            _overwrite(offer, slice(None))
        chat.require_exact(harness)


def decoder_goes_on_after_a_share_that_ends(harness: Harness) -> None:
    """One that was never sent, one that was, and then one that is adopted."""
    chat = _chat(harness)
    n_tokens = len(chat.tokens) + N_TOKENS
    harness.decoder.share(0, prefix=chat.tokens, n_tokens=n_tokens).release()
    with chat.offered(harness) as (_, offer):
        _fill(harness, offer, chat.asked(harness, 2))
    chat.turn(harness, 3)
    chat.require_exact(harness)


def decoder_refuses_another_prefix(harness: Harness) -> None:
    """The tokens to adopt begin otherwise than those that were shared; the sequence stays."""
    for at in (0, N_TOKENS):
        chat = _chat(harness)
        tokens = chat.asked(harness, 2)
        with chat.offered(harness) as (share, offer):
            _fill(harness, offer, tokens)
            tokens[at] += 1
            with _raises(LedgerDigestError, "prefix_sha256"):
                harness.decoder.adopt(share, tokens)
            _require(share.state is ShareState.FAILED, f"the share is {share.state}")
        chat.require_exact(harness)


def decoder_refuses_who_continued_from_others(harness: Harness) -> None:
    """A provider that says itself that the tokens before its own, or their number, were others."""
    for at, text in ((456, "n_prefix"), (464, "prefix_sha256")):
        chat = _chat(harness)
        tokens = chat.asked(harness, 2)
        with chat.offered(harness) as (share, offer):
            _fill(harness, offer, tokens)
            with offer.ledger.view() as view:
                view[at] ^= 1
            with _raises(LedgerDigestError, text):
                harness.decoder.adopt(share, tokens)
        chat.require_exact(harness)


def decoder_refuses_a_prefix_that_was_touched(harness: Harness) -> None:
    """A provider that writes over what the sequence held: nothing of it is left."""
    for adopt in (True, False):
        chat = _chat(harness)
        tokens = chat.asked(harness, 2)
        with chat.offered(harness) as (share, offer):
            _overwrite(offer, _prefix_rows(chat))
            _fill(harness, offer, tokens)
            if adopt:
                with _raises(LedgerDigestError):
                    harness.decoder.adopt(share, tokens)
                _require(share.state is ShareState.FAILED, f"the share is {share.state}")
        _require(harness.n_past(0) == 0, "the sequence holds what the provider has changed")


def decoder_refuses_a_sequence_that_went_on(harness: Harness) -> None:
    """Decoded, or emptied, between share and adopt: it stays as whoever did that wants it."""
    for clear in (False, True):
        chat = _chat(harness)
        tokens = chat.asked(harness, 2)
        with chat.offered(harness) as (share, offer):
            _fill(harness, offer, tokens)
            if clear:
                harness.clear(0)
            else:
                harness.go_on(0, [1])
            with _raises(SequenceInUseError):
                harness.decoder.adopt(share, tokens)
            _require(share.state is ShareState.FAILED, f"the share is {share.state}")
        expected = 0 if clear else len(chat.tokens) + 1
        _require(harness.n_past(0) == expected, f"it holds {harness.n_past(0)} tokens, not {expected}")


# -- a provider --------------------------------------------------------------------------------


def provider_vouches_for_its_tokens(harness: Harness) -> None:
    """For these tokens, this share, and the digests that it was given."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer):
        _fill(harness, offer, tokens)
        record = share.ledger.snapshot()
        _require(record.state is LedgerState.COMPLETE, f"the ledger is {record.state}")
        _require(record.n_tokens == record.n_filled == N_TOKENS, "another number of tokens")
        _require(record.tokens_sha256 == tokens_digest(tokens), "other tokens")
        _require(record.share_id == record.vouched_share_id == share.share_id, "another share")
        _require(record.layout == share.header.layout, "another layout")
        _require(record.semantics == share.header.semantics, "other semantics")
        harness.decoder.adopt(share, tokens)
    _require_exact(harness, tokens, 0, share.header)


def provider_moves_the_watermark_forward(harness: Harness) -> None:
    """It never goes back, never exceeds what is done, and ends at all tokens."""
    tokens = harness.tokens(N_TOKENS)
    seen: list[int] = []
    with _offered(harness) as (share, offer), harness.provider(offer) as provider:

        def look(n_done: int) -> None:
            record = share.ledger.snapshot()
            _require(record.state is LedgerState.FILLING, f"the ledger is {record.state}")
            _require(record.n_filled == n_done, f"{record.n_filled} tokens filled, {n_done} are done")
            seen.append(record.n_filled)

        provider.prefill(tokens, progress=look)
        _require(seen == sorted(seen), f"the watermark went {seen}")
        _require(seen[-1:] == [N_TOKENS], f"the watermark went {seen}")
        record = share.ledger.snapshot()
        _require(record.state is LedgerState.FILLING, "complete before it was published")
        _require(record.tokens_sha256 == bytes(32), "vouched for tokens before it was published")
        provider.publish()


def provider_writes_into_its_lease_only(harness: Harness) -> None:
    """Every other cell keeps its bytes."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness, seq_id=1) as (share, offer):
        _fill(harness, offer, tokens)
        harness.decoder.adopt(share, tokens)
    with _offered(harness) as (share, offer):
        before = _other_bytes(offer)
        _fill(harness, offer, harness.tokens(N_TOKENS, 1))
        _require(_other_bytes(offer) == before, "cells outside of the lease were written")
        _require(any(_lease_bytes(offer)), "nothing was written")
    harness.clear(1)


def provider_refuses_too_many_tokens(harness: Harness) -> None:
    """More than the lease has cells: before a byte is written."""
    with _offered(harness, n_tokens=256) as (_, offer), harness.provider(offer) as provider:
        before = _other_bytes(offer), _lease_bytes(offer)
        ((first, last),) = offer.header.cells[0]
        with _raises(KvshareError):
            provider.prefill(harness.tokens(last - first + 1))
        _require((_other_bytes(offer), _lease_bytes(offer)) == before, "it wrote all the same")


def provider_is_not_complete_after_an_error(harness: Harness) -> None:
    """An error in the middle: the ledger is not complete, then says what failed."""
    tokens = harness.tokens(N_TOKENS)

    def fail(_: int) -> None:
        raise LocalProtocolError("the power went out")

    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, harness.decoder.share(0, n_tokens=N_TOKENS) as share:
        share.send(near)
        with (
            _raises(LocalProtocolError, "the power went out"),
            Offer.receive(far) as offer,
            harness.provider(offer) as provider,
        ):
            provider.prefill(tokens, progress=fail)
        record = share.ledger.snapshot()
        _require(record.state is LedgerState.FAILED, f"the ledger is {record.state}")
        _require("the power went out" in record.error, f"the ledger says {record.error!r}")
        with _raises(LedgerIncompleteError, "the power went out"):
            harness.decoder.adopt(share, tokens)


def provider_serves_one_share(harness: Harness) -> None:
    """What it does late, after its share was released, is not taken for the next share's."""
    tokens = harness.tokens(N_TOKENS)
    with _offered(harness) as (share, offer), harness.provider(offer) as provider:
        provider.prefill(tokens)
        share.release()
        with harness.decoder.share(0, n_tokens=N_TOKENS) as following:
            with contextlib.suppress(KvshareError):
                provider.publish()
            _require(following.state is ShareState.ISSUED, f"the next share is {following.state}")
            with _raises(LedgerIncompleteError):
                harness.decoder.adopt(following, tokens)


def provider_closes_everything(harness: Harness) -> None:
    """After it is closed nothing of it keeps the offer open, however often it is closed."""
    with _offered(harness) as (_, offer):
        before = _open_fds()
        for n in range(3):
            with harness.provider(offer) as provider:
                if n == 0:
                    provider.prefill(harness.tokens(N_TOKENS))
                    provider.publish()
            provider.close()
        offer.close()
        _require(_open_fds() < before, "descriptors are still open")


# -- a provider that goes on behind what a sequence holds --------------------------------------


def provider_fills_only_what_is_new(harness: Harness) -> None:
    """The watermark begins at the prefix, whose bytes stay; it vouches for all tokens."""
    chat = _chat(harness)
    tokens = chat.asked(harness, 2)
    n_prefix, n_tokens = len(chat.tokens), len(tokens)
    seen: list[int] = []
    with chat.offered(harness) as (share, offer):
        before = _other_bytes(offer)
        with harness.provider(offer) as provider:
            provider.prefill(tokens, progress=seen.append)
            provider.publish()
        _require(seen == sorted(seen) and seen[-1:] == [n_tokens], f"the watermark went {seen}")
        _require(seen[0] > n_prefix, f"the watermark went {seen} behind {n_prefix}")
        _require(provider.n_prefilled == N_TOKENS, f"it prefilled {provider.n_prefilled} tokens")
        _require(_other_bytes(offer) == before, "cells outside of the lease were written")
        record = share.ledger.snapshot()
        _require(record.n_tokens == record.n_filled == n_tokens, "another number of tokens")
        _require(record.tokens_sha256 == tokens_digest(tokens), "other tokens")
        _require(record.n_prefix == n_prefix, f"n_prefix is {record.n_prefix}")
        _require(record.prefix_sha256 == tokens_digest(chat.tokens), "continued from other tokens")
        harness.decoder.adopt(share, tokens)
    chat.adopted(tokens, share.header)
    chat.require_exact(harness)


def provider_refuses_another_prefix(harness: Harness) -> None:
    """A prompt that does not begin with what the sequence holds: before a byte is written."""
    chat = _chat(harness)
    tokens = chat.asked(harness, 2)
    for at in (0, N_TOKENS):
        other = list(tokens)
        other[at] += 1
        with chat.offered(harness) as (share, offer), harness.provider(offer) as provider:
            before = _other_bytes(offer), _lease_bytes(offer)
            with _raises(LocalProtocolError, tokens_digest(chat.tokens).hex()):
                provider.prefill(other)
            _require((_other_bytes(offer), _lease_bytes(offer)) == before, "it wrote all the same")
            _require(share.state is not ShareState.COMPLETE, "it is complete all the same")


def provider_refuses_a_prompt_without_anything_new(harness: Harness) -> None:
    """All that the sequence holds, or less."""
    chat = _chat(harness)
    for tokens in (chat.tokens, chat.tokens[:-1]):
        with chat.offered(harness) as (share, offer), harness.provider(offer) as provider:
            with _raises(LocalProtocolError):
                provider.prefill(tokens)
            _require(share.state is not ShareState.COMPLETE, "it is complete all the same")
