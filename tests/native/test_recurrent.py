"""Recurrent states beside a share: sequences that are decoded together are moved, but not through its row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshare import Context, Decoder, Model, Offer, Provider
from tests.native.handoff import decode_each, random_tokens
from tests.native.test_late_writer import no_descriptors, offered

pytestmark = pytest.mark.native

PARAMS: dict[str, Any] = {"n_ctx": 2048, "n_seq_max": 4, "n_ubatch": 16, "n_threads": 1}
N_HELD = 20
N_PROMPT = 100  # some graphs, and so many steps of the others meanwhile
SHARED = 1
OTHERS = (0, 2)  # their rows lie on both sides of that of the shared one


def decode_together(context: Context, tokens: Sequence[int]) -> list[bytes]:
    """Decode a token of each of the other sequences in one batch; return the logits of each."""
    llama = context.library.llama
    batch = llama.llama_batch_init(len(OTHERS), 0, 1)
    try:
        batch.n_tokens = len(OTHERS)
        for i, (seq_id, token) in enumerate(zip(OTHERS, tokens, strict=True)):
            batch.token[i], batch.pos[i], batch.logits[i] = token, context.n_past(seq_id), True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
        assert llama.llama_decode(context.pointer, batch) == 0
        rows = [llama.llama_get_logits_ith(context.pointer, i) for i in range(len(OTHERS))]
        return [np.ctypeslib.as_array(row, (context.model.n_vocab,)).tobytes() for row in rows]
    finally:
        llama.llama_batch_free(batch)


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "streams"])
@pytest.mark.parametrize("name", ["mamba-dense", "jamba-dense", "lfm2-dense", "qwen3next-moe"])
def test_streams_beside_a_share_with_a_prefix(archs_path: Path, name: str, unified: bool) -> None:
    """They and the prompt are right, bit for bit, although the provider writes between their states."""
    with Model.open(archs_path / f"{name}.gguf") as model:
        prompt = random_tokens(model, N_PROMPT)
        rest = random_tokens(model, 4, seed=9)
        held = {seq_id: random_tokens(model, N_HELD, seed=seq_id) for seq_id in OTHERS} | {
            SHARED: prompt[:N_HELD]
        }
        steps = [random_tokens(model, len(OTHERS), seed=100 + i) for i in range(N_PROMPT)]
        params = {**PARAMS, "kv_unified": unified}
        with Decoder.open(model, **params) as decoder, Context.create(model, **params) as local:
            for context in (decoder.context, local):
                for seq_id in (0, 1, 2):  # their rows are in this order
                    context.decode(held[seq_id], position=0, seq_id=seq_id)
            found: list[list[bytes]] = []
            with offered(decoder, SHARED, prefix=held[SHARED], n_tokens=N_PROMPT) as (share, offer):
                fill(
                    offer,
                    model,
                    prompt,
                    lambda: found.append(decode_together(decoder.context, steps[len(found)])),
                )
                assert decoder.adopt(share, prompt).n_adopted == N_PROMPT
            there = decode_each(decoder.context, rest, position=N_PROMPT, seq_id=SHARED)
            assert len(found) > 3
            # a graph each, as while somebody writes between them
            expected = [
                [
                    decode_each(local, [token], position=N_HELD + i, seq_id=seq_id)[0].tobytes()
                    for seq_id, token in zip(OTHERS, step, strict=True)
                ]
                for i, step in enumerate(steps[: len(found)])
            ]
            local.decode(prompt[N_HELD:], position=N_HELD, seq_id=SHARED)
            here = decode_each(local, rest, position=N_PROMPT, seq_id=SHARED)
    assert found == expected
    assert [row.tobytes() for row in there] == [row.tobytes() for row in here]


def fill(offer: Offer, model: Model, prompt: Sequence[int], between: Any) -> None:
    with Provider(offer, model, n_threads=1, n_ubatch=16) as provider:
        provider.prefill(prompt, progress=lambda _: between())
        provider.publish()


def test_a_lease_takes_the_last_row(archs_path: Path) -> None:
    """So that it does not lie between those of sequences that come later."""
    with (
        Model.open(archs_path / "mamba-dense.gguf") as model,
        Decoder.open(model, **PARAMS, kv_unified=True) as decoder,
        decoder.share(SHARED, n_tokens=8) as share,
        decoder.share(2, n_tokens=8) as another,
    ):
        assert (share.header.cells, another.header.cells) == ((((3, 4),),), (((2, 3),),))


@pytest.mark.parametrize("name", ["mamba-dense", "jamba-dense", "gemma3-dense"])
def test_a_state_that_a_provider_may_write_to_stays_taken(archs_path: Path, name: str) -> None:
    """Also that of a prefix that was dropped, when there is no other memory for it yet."""
    with Model.open(archs_path / f"{name}.gguf") as model:
        before, after = random_tokens(model, N_HELD, seed=3), random_tokens(model, N_HELD, seed=4)
        params = {**PARAMS, "kv_unified": True, "flash_attn": "on"}
        with Decoder.open(model, **params) as decoder, Context.create(model, **params) as local:
            decoder.context.decode(before, position=0, seq_id=SHARED)
            with offered(decoder, SHARED, prefix=before, n_tokens=N_PROMPT) as (share, offer):

                def lose_patience(_: int) -> None:
                    if share.state.live:
                        with no_descriptors():
                            share.release()
                        assert decoder.context.n_past(SHARED) == 0
                        decoder.context.decode(after, position=0, seq_id=SHARED)

                with Provider(offer, model, n_threads=1, n_ubatch=16) as provider:
                    provider.prefill(before + random_tokens(model, N_PROMPT - N_HELD), progress=lose_patience)
                there = decode_each(decoder.context, [7, 8], position=N_HELD, seq_id=SHARED)
            local.decode(after, position=0, seq_id=SHARED)
            here = decode_each(local, [7, 8], position=N_HELD, seq_id=SHARED)
    for mine, theirs in zip(here, there, strict=True):
        assert np.abs(mine - theirs).max() < 1e-4
