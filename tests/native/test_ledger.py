"""The library reads a ledger as `kvshare.ledger` does, whatever stands in it."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare import (
    Decoder,
    KvshareError,
    LedgerDigestError,
    LedgerError,
    LedgerIncompleteError,
    ReplayError,
    Share,
)
from kvshare.ledger import HEADER_NBYTES, LedgerPrefix, LedgerState, tokens_digest
from kvshare.testing.faults import LEDGER_FIELDS
from tests.native.handoff import random_tokens

pytestmark = pytest.mark.native

N_PROMPT = 40
N_CASES = 400
VERDICTS = (ReplayError, LedgerIncompleteError, LedgerDigestError, LedgerError)  # the special ones first


@pytest.fixture
def decoder(tiny_path: Path) -> Iterator[Decoder]:
    with Decoder.open(tiny_path, n_ctx=512, flash_attn="on") as decoder:
        yield decoder


def verdict(error: BaseException | None) -> str:
    return next((kind.__name__ for kind in VERDICTS if isinstance(error, kind)), repr(error))


def change(share: Share, rng: random.Random) -> None:
    """Change some bytes of the header: the state often, other fields to what they may well be."""
    with share.ledger.view() as view:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            field = rng.choice([*LEDGER_FIELDS, "state", "state"])
            offset, size = LEDGER_FIELDS[field]
            if field == "state" or (size <= 8 and rng.random() < 0.5):
                value = rng.choice((0, 1, 2, 3, 4, N_PROMPT, HEADER_NBYTES, len(view), 2 ** (8 * size) - 1))
                view[offset : offset + size] = value.to_bytes(size, "little")
            else:
                view[offset + rng.randrange(size)] ^= 1 << rng.randrange(8)


@pytest.mark.parametrize("seed", range(2))
def test_both_readers_agree(decoder: Decoder, seed: int) -> None:
    """On what is in order, and on why the rest is not."""
    rng = random.Random(seed)
    prompt = random_tokens(decoder.context.model, N_PROMPT)
    tokens = (ctypes.c_int32 * N_PROMPT)(*prompt)
    seen: Counter[str] = Counter()
    for _ in range(N_CASES):
        with decoder.share(n_tokens=N_PROMPT) as share:
            share.ledger.begin()
            share.ledger.advance(N_PROMPT)
            share.ledger.complete(tokens_digest(prompt), N_PROMPT, bytes(32), b"metadata")
            change(share, rng)
            by_python: Exception | None = None
            by_library: Exception | None = None
            try:
                share.ledger.snapshot().verify(
                    share_id=share.share_id,
                    layout=share.header.layout,
                    semantics=share.header.semantics,
                    tokens=prompt,
                    sample_digest=None,
                    prefix=LedgerPrefix(),
                )
            except (LedgerError, ReplayError) as error:
                by_python = error
            try:
                decoder._lib.llama_kv_share_check(decoder.context.handle, 0, tokens, N_PROMPT, False)
            except (LedgerError, ReplayError) as error:
                by_library = error
            assert verdict(by_library) == verdict(by_python), (by_library, by_python)
            seen[verdict(by_library)] += 1
    assert set(seen) == {"None", *(kind.__name__ for kind in VERDICTS)}


@pytest.mark.parametrize("state", [LedgerState.ISSUED, LedgerState.FILLING])
def test_a_share_lives_on_while_its_provider_is_at_it(decoder: Decoder, state: LedgerState) -> None:
    prompt = random_tokens(decoder.context.model, N_PROMPT)
    with decoder.share(n_tokens=N_PROMPT) as share:
        if state is LedgerState.FILLING:
            share.ledger.begin()
            share.ledger.advance(7)
        for _ in range(2):
            with pytest.raises(LedgerIncompleteError, match=f"not done: {state.name.lower()} at [07] of 40"):
                decoder.adopt(share, prompt)
        assert share.state.live


def test_whatever_is_refused_gives_its_cells_back(decoder: Decoder) -> None:
    """Without anybody who calls `llama_kv_share_release`."""
    prompt = random_tokens(decoder.context.model, N_PROMPT)
    lib, handle = decoder._lib, decoder.context.handle
    decoder.share(n_tokens=N_PROMPT)
    assert lib.llama_kv_share_lease(handle, 0, None, 0) == 1
    decoder.context.decode(prompt[:3], position=0)
    with pytest.raises(KvshareError):
        lib.llama_kv_share_adopt(handle, 0, N_PROMPT, b"metadata", 8, None, None)
    assert lib.llama_kv_share_lease(handle, 0, None, 0) == 0
    assert decoder.context.n_past() == 3


def test_more_tokens_than_there_is_room_for(decoder: Decoder) -> None:
    """A provider may vouch for them all the same."""
    prompt = random_tokens(decoder.context.model, N_PROMPT)
    with decoder.share(n_tokens=N_PROMPT - 1) as share:
        share.ledger.begin()
        share.ledger.advance(N_PROMPT)
        share.ledger.complete(tokens_digest(prompt), N_PROMPT, bytes(32), b"metadata")
        with pytest.raises(LedgerError, match="40 tokens, but the share is of 39"):
            decoder.adopt(share, prompt)
        assert not share.state.live
    assert decoder.context.n_past() == 0
