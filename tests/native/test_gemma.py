"""A real sliding-window model past its window of 512.

There llama.cpp's own save and restore is not exact: it leaves out the cells that the window masks,
so the cell array is smaller, `find_slot` starts over at cell 0, later tokens land in other cells than
in the run that was saved, and attention sums in another order. A handoff enters every cell at the
place where it lies, masked ones included, together with the write head, and is exact.

*Source*: `llama_kv_cache::state_write`, `llama_kv_cache::find_slot` at the pinned commit.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare import Context, Decoder, Model, Offer, Provider
from tests.native.handoff import ProviderProcess, decode_each, handoff, random_tokens

pytestmark = [pytest.mark.native, pytest.mark.gemma, pytest.mark.slow]

N_REST = 4
N_SWA = 512
PARAMS: dict[str, Any] = {"n_ctx": 2048}


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> Iterator[Model]:
    with Model.open(gemma_path) as model:
        yield model


def test_the_cache_is_a_ring(gemma: Model) -> None:
    with Decoder.open(gemma, **PARAMS) as decoder:
        by_window = {cache.get("n_swa"): cache for cache in decoder.layout.caches}
        assert set(by_window) == {0, N_SWA}
        assert by_window[0].size == 2048
        assert by_window[N_SWA].size < 1196  # so that the longer prompts go round


@pytest.mark.parametrize("n_tokens", [400, 700, 1196, 1900])
def test_a_handoff_is_exact_and_a_restored_file_is_not(gemma: Model, tmp_path: Path, n_tokens: int) -> None:
    """Three ways to go on from the same prefilled prompt, beside the one that prefilled it."""
    tokens = random_tokens(gemma, n_tokens + N_REST)
    prompt, rest = tokens[:n_tokens], tokens[n_tokens:]
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, Context.create(gemma, **PARAMS) as local:
        local.decode(prompt, position=0)
        local.save(tmp_path / "state", prompt)
        here = [logits.tobytes() for logits in decode_each(local, rest, position=n_tokens)]

        with Decoder.open(gemma, **PARAMS) as decoder, decoder.share(n_tokens=n_tokens) as share:
            share.send(near)
            with Offer.receive(far) as offer, Provider(offer, gemma) as provider:
                provider.prefill(prompt)
                provider.publish()
            adopted = decoder.adopt(share, prompt)
            there = decode_each(decoder.context, rest, position=n_tokens)
        assert [logits.tobytes() for logits in there] == here
        assert adopted.bytes_moved == 0

    with Context.create(gemma, **PARAMS) as restored:
        assert restored.restore(tmp_path / "state") == prompt
        from_file = [logits.tobytes() for logits in decode_each(restored, rest, position=n_tokens)]
    assert (from_file == here) == (n_tokens < N_SWA)


def test_two_processes(provider: ProviderProcess, gemma: Model, gemma_path: Path) -> None:
    tokens = random_tokens(gemma, 700 + N_REST)
    outcome = handoff(provider, gemma, gemma_path, tokens[:700], tokens[700:], PARAMS)
    assert outcome.identical
    assert outcome.adopted.bytes_moved == 0


@pytest.mark.parametrize("n_tokens", [1, 300, 1200, 2304, 3000])
def test_a_share_leaves_the_window_of_others(gemma: Model, n_tokens: int) -> None:
    """In a unified cache the lease takes no more than leaves the others their windows, and a batch."""
    tokens = random_tokens(gemma, 400)
    with Decoder.open(gemma, n_ctx=16384, n_seq_max=4, kv_unified=True) as decoder:
        size = next(cache.size for cache in decoder.layout.caches if cache.get("n_swa"))
        decoder.context.decode(tokens[:200], position=0, seq_id=0)
        with decoder.share(1, n_tokens=n_tokens) as share:
            window = share.header.cells[[cache.get("n_swa") for cache in decoder.layout.caches].index(N_SWA)]
            assert size - sum(end - start for start, end in window) >= N_SWA + decoder.context.n_ubatch
            decoder.context.decode(tokens[200:], position=200, seq_id=0)  # raises where no cell is free
