"""A context that serves one offer after the other: as exact as a new one, on every kind of cache."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvshare import Context, Decoder, Model, Offer, Provider, Share, WarmProvider
from tests.native.handoff import confine, decode_each, random_tokens, unconfine

pytestmark = pytest.mark.native

N_REST = 2
KINDS = {
    "plain": "llama-dense",
    "sliding window": "gemma3-dense",
    "recurrent": "mamba-dense",
    "hybrid": "jamba-dense",
    "MLA": "deepseek2-moe",
    "compressed": "deepseek4-moe",
}


def receive(share: Share) -> Offer:
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        share.send(near)
        return Offer.receive(far)


class Handoffs:
    """One decoder, one warm provider, and what they did."""

    def __init__(self, model: Model, **params: Any) -> None:
        self.model = model
        self.params = {"n_ctx": 512, "n_ubatch": 32, "n_threads": 1, **params}
        self.decoder = Decoder.open(model, **self.params)
        self.warm: list[bool] = []

    def hand_over(self, provider: WarmProvider, n_tokens: int, *, seed: int, seq_id: int = 0) -> None:
        """Hand over, go on, compare with a local run; the sequence keeps what it has."""
        tokens = random_tokens(self.model, n_tokens + N_REST, seed=seed)
        prompt, rest = tokens[:n_tokens], tokens[n_tokens:]
        context = self.decoder.context
        context.clear(seq_id)
        with self.decoder.share(seq_id, n_tokens=n_tokens + N_REST) as share, receive(share) as offer:
            provider.fill(offer, prompt, begun=self.warm.append, progress=lambda n: None)
            assert self.decoder.adopt(share, prompt).bytes_moved == 0
            with Context.create(self.model, **self.params) as local:
                confine(local, share)
                local.decode(prompt, position=0, seq_id=seq_id)
                unconfine(local, seq_id)
                here = decode_each(local, rest, position=n_tokens, seq_id=seq_id)
        there = decode_each(context, rest, position=n_tokens, seq_id=seq_id)
        assert [each.tobytes() for each in here] == [each.tobytes() for each in there]

    def __enter__(self) -> Handoffs:
        return self

    def __exit__(self, *_: object) -> None:
        self.decoder.close()


@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_every_kind_of_cache(archs_path: Path, name: str) -> None:
    with (
        Model.open(archs_path / f"{name}.gguf") as model,
        Handoffs(model) as handoffs,
        WarmProvider(model, n_threads=1) as provider,
    ):
        for seed, n_tokens in enumerate((216, 40, 300)):
            handoffs.hand_over(provider, n_tokens, seed=seed)
        assert handoffs.warm == [False, True, True]


def test_another_sequence_of_a_plain_cache(tiny: Model) -> None:
    params = {"n_seq_max": 2, "kv_unified": True, "n_ctx": 1024}
    with Handoffs(tiny, **params) as handoffs, WarmProvider(tiny, n_threads=1) as provider:
        for seed, seq_id in enumerate((0, 1, 1, 0)):
            handoffs.hand_over(provider, 100 + seed, seed=seed, seq_id=seq_id)
            for other in (0, 1):
                handoffs.decoder.context.clear(other)
        assert handoffs.warm == [False, True, True, True]


def test_another_sequence_of_another_cache(archs_path: Path) -> None:
    """Emptying a sequence there would clear memory that is the decoder's."""
    params = {"n_seq_max": 2, "kv_unified": True, "n_ctx": 1024}
    with (
        Model.open(archs_path / "deepseek4-moe.gguf") as model,
        Handoffs(model, **params) as handoffs,
        WarmProvider(model, n_threads=1) as provider,
    ):
        context = handoffs.decoder.context
        handoffs.hand_over(provider, 100, seed=1, seq_id=0)
        context.clear(0)
        handoffs.hand_over(provider, 100, seed=2, seq_id=1)
        assert handoffs.warm == [False, False]


def test_streams_of_their_own(tiny: Model) -> None:
    """Every sequence has memory of its own, which is what a provider gets."""
    with Handoffs(tiny, n_seq_max=2, n_ctx=1024) as handoffs, WarmProvider(tiny, n_threads=1) as provider:
        for seed, seq_id in enumerate((0, 0, 1, 1)):
            handoffs.hand_over(provider, 100, seed=seed, seq_id=seq_id)
        assert handoffs.warm == [False, True, False, True]


def test_other_memory_is_not_taken_for_the_same(tiny: Model) -> None:
    """Another decoder of equal parameters, and the first one again."""
    with (
        Handoffs(tiny) as first,
        Handoffs(tiny) as second,
        WarmProvider(tiny, n_threads=1) as provider,
    ):
        for seed, handoffs in enumerate((first, first, second, second, first)):
            handoffs.hand_over(provider, 64, seed=seed)
        assert first.warm == [False, True, False]
        assert second.warm == [False, True]


def test_memory_that_came_back_at_the_same_numbers(tiny: Model) -> None:
    """A decoder that was closed, and a next one: its memfd may get the inode, unless it is mapped."""
    with WarmProvider(tiny, n_threads=1) as provider:
        for seed in range(3):
            with Handoffs(tiny) as handoffs:
                handoffs.hand_over(provider, 64, seed=seed)
                assert handoffs.warm == [False]


def test_rebind_refuses_and_changes_nothing(tiny: Model) -> None:
    params = {"n_ctx": 512, "n_threads": 1}
    prompt = random_tokens(tiny, 40)
    with Decoder.open(tiny, **params) as decoder, Decoder.open(tiny, **params) as other:
        with decoder.share(n_tokens=40) as share, receive(share) as offer:
            provider = Provider(offer, tiny, n_threads=1)
            with other.share(n_tokens=40) as foreign, receive(foreign) as wrong:
                assert not provider.rebind(wrong)
            assert provider.offer is offer
            provider.prefill(prompt)
            provider.publish()
            decoder.adopt(share, prompt)
        provider.close()


class Stop(Exception):
    pass


def test_a_prefill_that_is_cancelled(tiny: Model) -> None:
    """Between two graphs; the next offer is served as ever, in other memory: that of the end is given up."""
    prompt = random_tokens(tiny, 200)

    def stop(n_done: int) -> None:
        if n_done >= 64:
            raise Stop

    with Handoffs(tiny) as handoffs, WarmProvider(tiny, n_threads=1) as provider:
        handoffs.hand_over(provider, 100, seed=1)
        handoffs.decoder.context.clear()
        with handoffs.decoder.share(n_tokens=200) as share, receive(share) as offer:
            with pytest.raises(Stop):
                provider.fill(offer, prompt, begun=handoffs.warm.append, progress=stop)
            assert share.ledger.snapshot().n_filled == 64
        handoffs.hand_over(provider, 150, seed=2)
        assert handoffs.warm == [False, True, False]


def test_a_decode_that_is_cancelled(tiny: Model) -> None:
    tokens = random_tokens(tiny, 100)

    def stop(n_done: int) -> None:
        raise Stop

    params: dict[str, Any] = {"n_ctx": 256, "n_ubatch": 32}
    with Context.create(tiny, **params) as context, Context.create(tiny, **params) as other:
        with pytest.raises(Stop):
            context.decode(tokens, position=0, progress=stop)
        assert context.n_past() == 32
        context.clear()
        other.decode(tokens, position=0)
        context.decode(tokens, position=0)
        assert (
            decode_each(context, [1], position=100)[0].tobytes()
            == decode_each(other, [1], position=100)[0].tobytes()
        )


def test_descriptors_of_a_warm_context(tiny: Model) -> None:
    """It keeps mappings, not descriptors."""
    with Handoffs(tiny) as handoffs, WarmProvider(tiny, n_threads=1) as provider:
        before = len(os.listdir("/proc/self/fd"))
        for seed in range(5):
            handoffs.hand_over(provider, 64, seed=seed)
            handoffs.decoder.prepare()  # has a ledger ready, as it had before
            assert len(os.listdir("/proc/self/fd")) == before
