"""A provider that goes on after the end of its share changes no answer; one that wrote nothing is refused.

The oracle: two decoders do the same, step by step, and somebody writes NaN into all that the provider of
one of them ever got. Whatever they answer afterwards is equal, bit for bit.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvshare import Context, Decoder, Model, Offer, Provider, Share
from kvshare.errors import (
    DeadlineExceededError,
    ExpiredError,
    KvshareError,
    LedgerDigestError,
    LedgerError,
    LedgerIncompleteError,
    SequenceInUseError,
)
from kvshare.mapping import Mapping
from tests.native.handoff import random_tokens, shared_bytes

pytestmark = pytest.mark.native

N_PROMPT = 40
PARAMS: dict[str, Any] = {"n_batch": 64, "n_ubatch": 64, "n_threads": 1}
CACHES: dict[str, dict[str, Any]] = {
    "alone": {"n_ctx": 512, "n_seq_max": 1},
    "streams": {"n_ctx": 3 * 512, "n_seq_max": 3, "kv_unified": False},
    "unified": {"n_ctx": 1024, "n_seq_max": 3, "kv_unified": True},
}
SLOT = 0
OTHERS = (1, 2)


class Writer:
    """Writes NaN to all memory of an offer, again and again, in a thread of its own.

    *Ownership*: leaving the block ends the thread; the offer stays the caller's.
    """

    def __init__(self, offer: Offer) -> None:
        self._memory = [
            np.frombuffer(each.buffer, np.uint16) for each in offer._mapped() if isinstance(each, Mapping)
        ]
        self._stop = threading.Event()
        self._n_passes = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            for memory in self._memory:
                memory[:] = 0x7E00  # NaN as a half, and as two of them
            self._n_passes += 1

    def wait(self) -> None:
        """Wait until all has been written once more."""
        seen = self._n_passes
        while self._n_passes < seen + 2:
            time.sleep(0.001)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._memory.clear()


class Chats:
    """A decoder with a chat on every sequence but the shared one."""

    def __init__(self, model: Model, **params: Any) -> None:
        self.decoder = Decoder.open(model, **PARAMS, **params)
        self.prompts = {seq_id: random_tokens(model, N_PROMPT, seed=seq_id) for seq_id in (SLOT, *OTHERS)}
        self.others = [seq_id for seq_id in OTHERS if seq_id < params["n_seq_max"]]
        for seq_id in self.others:
            self.decoder.context.decode(self.prompts[seq_id], position=0, seq_id=seq_id)

    def answers(self) -> list[bytes]:
        """Go on with every chat in turn, in cells that nobody used before."""
        context, found = self.decoder.context, []
        for n in range(40):
            for seq_id in (SLOT, *self.others):
                position = context.n_past(seq_id)
                tokens = self.prompts[SLOT] if position == 0 else [n + seq_id]
                context.decode(tokens, position=position, seq_id=seq_id, logits=True)
                logits = context.logits()
                assert np.isfinite(logits).all()
                found.append(logits.tobytes())
        return found


@contextlib.contextmanager
def offered(decoder: Decoder, seq_id: int = SLOT, **options: Any) -> Iterator[tuple[Share, Offer]]:
    """Share, and receive the offer in this process; both ends stay open to the end of the block."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, decoder.share(seq_id, **{"n_tokens": N_PROMPT, **options}) as share:
        share.send(near)
        with Offer.receive(far) as offer:
            yield share, offer


def prefill(offer: Offer, model: Model, tokens: list[int]) -> None:
    with Provider(offer, model, n_threads=1) as provider:
        provider.prefill(tokens)
        provider.publish()


# -- the end of a share -------------------------------------------------------------------------


def releases(chats: Chats, share: Share, offer: Offer) -> None:
    share.release()


def is_refused(chats: Chats, share: Share, offer: Offer) -> None:
    with pytest.raises(LedgerError):
        chats.decoder.adopt(share, chats.prompts[SLOT][:-1])


def is_refused_in_the_library(chats: Chats, share: Share, offer: Offer) -> None:
    with offer.ledger.view() as view:
        view[152] ^= 1  # of the sample digest
    with pytest.raises(LedgerDigestError):
        chats.decoder.adopt(share, chats.prompts[SLOT])


def has_failed(chats: Chats, share: Share, offer: Offer) -> None:
    with offer.ledger.view() as view:
        view[:] = bytes(len(view))
    with pytest.raises(LedgerError):
        chats.decoder.adopt(share, chats.prompts[SLOT])


def expires(chats: Chats, share: Share, offer: Offer) -> None:
    share._deadline = time.monotonic() - 1
    with pytest.raises(ExpiredError):
        chats.decoder.adopt(share, chats.prompts[SLOT])


ENDS = (releases, is_refused, is_refused_in_the_library, has_failed, expires)


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_a_late_writer_changes_no_answer(
    tiny: Model, end: Callable[[Chats, Share, Offer], None], cache: str, flash_attn: str
) -> None:
    found = []
    for writes in (False, True):
        chats = Chats(tiny, flash_attn=flash_attn, **CACHES[cache])
        with chats.decoder, offered(chats.decoder) as (share, offer), contextlib.ExitStack() as stack:
            prefill(offer, tiny, chats.prompts[SLOT])
            end(chats, share, offer)
            if writes:
                stack.enter_context(Writer(offer)).wait()
            found.append(chats.answers())
    assert found[0] == found[1]


@pytest.mark.parametrize("cache", CACHES)
def test_a_late_writer_would_change_them(tiny: Model, cache: str) -> None:
    """The control: if the memory stayed, no answer would be finite."""
    chats = Chats(tiny, flash_attn="off", **CACHES[cache])
    with chats.decoder as decoder, offered(decoder) as (share, offer):
        share._sent = False
        share.release()
        with Writer(offer) as writer:
            writer.wait()
            with pytest.raises(AssertionError):
                chats.answers()


def test_a_late_writer_beside_a_live_share(tiny: Model) -> None:
    """Of a unified cache: the memory stays until the other share is over, and its cells are taken."""
    found = []
    for writes in (False, True):
        chats = Chats(tiny, flash_attn="on", **CACHES["unified"])
        decoder = chats.decoder
        with decoder, contextlib.ExitStack() as stack:
            decoder.context.clear(1)
            late, late_offer = stack.enter_context(offered(decoder))
            good, good_offer = stack.enter_context(offered(decoder, 1))
            n_free = n_free_cells(decoder)
            late.release()
            assert n_free_cells(decoder) == n_free
            if writes:
                for layer in late_offer.views():
                    for rows in (layer.k, layer.v):
                        assert rows is not None
                        rows[slice(*late.header.cells[0][0])] = np.nan
                    del layer, rows
            prefill(good_offer, tiny, chats.prompts[1])
            assert decoder.adopt(good, chats.prompts[1]).bytes_moved == 0
            assert n_free_cells(decoder) > n_free
            if writes:
                stack.enter_context(Writer(late_offer)).wait()
            found.append(chats.answers())
    assert found[0] == found[1]


def test_a_plain_provider_beside_a_share_that_failed(tiny: Model) -> None:
    """Its rows, which no metadata tells llama.cpp of, are there when the memory of the other is renewed."""
    with Decoder.open(tiny, **PARAMS, flash_attn="on", **CACHES["alone"]) as decoder:
        tokens = random_tokens(tiny, N_PROMPT, seed=1)
        with offered(decoder) as (share, offer):
            prefill(offer, tiny, tokens)
            cells = slice(offer.first_cell, offer.first_cell + N_PROMPT)
            rows = [(np.array(layer.k[cells]), np.array(layer.v[cells])) for layer in offer.views()]
            decoder.adopt(share, tokens)
        decoder.context.decode([1], position=N_PROMPT, logits=True)
        expected = decoder.context.logits()

    with (
        Decoder.open(tiny, **PARAMS, flash_attn="on", **CACHES["unified"]) as decoder,
        contextlib.ExitStack() as stack,
    ):
        late, _ = stack.enter_context(offered(decoder))
        good, offer = stack.enter_context(offered(decoder, 1))
        late.release()
        offer.ledger.begin()
        cells = slice(offer.first_cell, offer.first_cell + N_PROMPT)
        for layer, (k, v) in zip(offer.views(), rows, strict=True):
            layer.k[cells], layer.v[cells] = k, v
        del layer
        offer.complete(tokens)
        assert decoder.adopt(good, tokens).bytes_moved == 0
        decoder.context.decode([1], position=N_PROMPT, seq_id=1, logits=True)
        # the cells lie elsewhere: only the rounding differs
        assert np.abs(decoder.context.logits() - expected).max() < 1e-4 < np.abs(expected).max()


def n_free_cells(decoder: Decoder) -> int:
    """Count by trying: leases of one token each take what is free, 256 cells at a time, then less."""
    lib, handle = decoder.context.library.lib, decoder.context.handle
    n, seq_id = 0, 2
    decoder.context.clear(seq_id)
    for size in (512, 256, 128, 64, 32, 16, 8, 4, 2, 1):
        with contextlib.suppress(KvshareError):
            lib.llama_kv_share_reserve(handle, seq_id, size, 0)
            lib.llama_kv_share_release(handle, seq_id, False)
            n = max(n, size)
    return n


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Let this process open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_cells_stay_taken_until_there_is_other_memory(tiny: Model) -> None:
    with Decoder.open(tiny, **PARAMS, **CACHES["streams"]) as decoder, offered(decoder) as (share, offer):
        with no_descriptors():
            share.release()
            with pytest.raises(SequenceInUseError):
                decoder.share(SLOT)
        before = shared_bytes(share)
        with Writer(offer) as writer:
            writer.wait()
        assert shared_bytes(share) != before  # it is the memory that the provider has
        with decoder.share(SLOT):
            now = shared_bytes(share)
            with Writer(offer) as writer:
                writer.wait()
            assert shared_bytes(share) == now


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_what_a_sequence_holds_meanwhile_is_its_own(tiny: Model, flash_attn: str) -> None:
    """Memory that cannot be renewed at once is renewed later, whatever lies in the sequence by then."""
    params = {**PARAMS, **CACHES["streams"], "flash_attn": flash_attn}
    with Decoder.open(tiny, **params) as decoder, Context.create(tiny, **params) as local:
        before, after = random_tokens(tiny, 20, seed=3), random_tokens(tiny, 30, seed=4)
        decoder.context.decode(before, position=0)
        with offered(decoder, prefix=before) as (share, offer):
            with no_descriptors():
                share.release()
            decoder.context.clear(SLOT)
            decoder.context.decode(after, position=0)  # somebody else's, in the same cells
            decoder.context.library.lib.llama_kv_share_release(decoder.context.handle, SLOT, True)
            assert decoder.context.n_past() == len(after)
            with Writer(offer) as writer:
                writer.wait()
        local.decode(after, position=0)
        for context in (decoder.context, local):
            context.decode([7], position=len(after), logits=True)
        # its cells lie around those of the lease: only the rounding differs
        assert np.abs(decoder.context.logits() - local.logits()).max() < 1e-4


# -- strict shares ------------------------------------------------------------------------------


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("cache", CACHES)
def test_a_strict_share_waits_until_the_provider_lets_go(tiny: Model, cache: str, flash_attn: str) -> None:
    """And what it left beside the lease is gone, NaN in every free cell that it could reach."""
    found = []
    for trespasses in (False, True):
        chats = Chats(tiny, flash_attn=flash_attn, **CACHES[cache])
        near, far = socket.socketpair(socket.AF_UNIX)
        with chats.decoder as decoder, near, far:
            with decoder.share(SLOT, n_tokens=N_PROMPT, strict=True) as share:
                share.send(near)
                with Offer.receive(far) as offer:
                    prefill(offer, tiny, chats.prompts[SLOT])
                    if trespasses:
                        for layer in offer.views():
                            for rows in (layer.k, layer.v):
                                assert rows is not None
                                rows[share.header.cells[0][0][0] + N_PROMPT :][:100] = np.nan
                                rows[-100:] = np.nan
                            del layer, rows
                with pytest.raises(DeadlineExceededError):
                    decoder.adopt(share, chats.prompts[SLOT], deadline=time.monotonic() + 0.1)
                assert share.state.live
                threading.Timer(0.1, far.close).start()
                decoder.adopt(share, chats.prompts[SLOT])
            found.append(chats.answers())
    assert found[0] == found[1]


# -- what was never written ---------------------------------------------------------------------


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("what", ["all", "k", "v", "layer", "first", "half", "last"])
def test_what_is_vouched_for_has_to_be_written(tiny: Model, what: str, flash_attn: str) -> None:
    """The sample is right: it is taken of what lies there."""
    chats = Chats(tiny, flash_attn=flash_attn, **CACHES["streams"])
    with chats.decoder as decoder, offered(decoder) as (share, offer):
        offer.ledger.begin()
        first = offer.first_cell
        for layer in offer.views():
            for name, rows in (("k", layer.k), ("v", layer.v)):
                assert rows is not None
                cells = np.arange(first, first + N_PROMPT)
                if what in ("all", name) or (what == "layer" and layer.il == 1):
                    continue
                left_out = {"first": cells[:1], "half": cells[N_PROMPT // 2 :], "last": cells[-1:]}
                rows[np.setdiff1d(cells, left_out.get(what, cells[:0]))] = 1
            del layer, rows
        offer.complete(chats.prompts[SLOT])
        with pytest.raises(LedgerIncompleteError, match="never written"):
            decoder.adopt(share, chats.prompts[SLOT])


@pytest.mark.parametrize("flash_attn", ["on", "off"])
def test_what_is_written_is_adopted(tiny: Model, flash_attn: str) -> None:
    """The control."""
    chats = Chats(tiny, flash_attn=flash_attn, **CACHES["streams"])
    with chats.decoder as decoder, offered(decoder) as (share, offer):
        offer.ledger.begin()
        for layer in offer.views():
            for rows in (layer.k, layer.v):
                assert rows is not None
                rows[offer.first_cell : offer.first_cell + N_PROMPT] = 0
            del layer, rows
        offer.complete(chats.prompts[SLOT])
        assert decoder.adopt(share, chats.prompts[SLOT]).n_adopted == N_PROMPT


def test_a_share_that_nobody_got_leaves_the_memory(tiny: Model) -> None:
    with Decoder.open(tiny, **PARAMS, **CACHES["streams"]) as decoder:
        share = decoder.share(SLOT)
        before = [os.fstat(fd).st_ino for fd in share._descriptors[:-1]]
        share.release()
        with decoder.share(SLOT) as again:
            assert [os.fstat(fd).st_ino for fd in again._descriptors[:-1]] == before
