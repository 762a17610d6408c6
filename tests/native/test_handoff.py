"""Two processes, one cache: what the decoder goes on with equals a local prefill, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvshare import Context, Decoder, Model, NativeError, fds
from tests.native.handoff import (
    ROOT,
    Outcome,
    ProviderProcess,
    decode_each,
    environment,
    handoff,
    random_tokens,
    send,
)

pytestmark = pytest.mark.native

N_REST = 4
TEXT = (
    "The lighthouse keeper wrote the same line into the book every evening: wind from the west, sea calm, "
    "two ships passing, light burning. On the last day of the year he added a second one. "
)

# Graphs of another size sum in another order. Measured on SmolLM2 Q4_1 with the prompt of the test and
# n_ubatch 512 against 64: the largest difference of a logit is 0.48, of logits up to 31; the best token
# leads by 5 or more. One wrong token in the middle of the prompt gives 2.2.
N_UBATCH_TOLERANCE = 1.0


def assert_handed_over(outcome: Outcome, n_tokens: int) -> None:
    assert outcome.identical, f"logits differ by {outcome.max_difference}"
    assert outcome.adopted.n_adopted == n_tokens
    assert outcome.adopted.bytes_moved == 0
    assert outcome.adopted.bytes_in_place > 0


def text_tokens(model: Model, n: int) -> list[int]:
    """Return the first n tokens of a text that is long enough."""
    return (model.tokenize(TEXT) * (1 + n // 20))[:n]


# -- a real model ------------------------------------------------------------------------------


@pytest.mark.parametrize("n_tokens", [1, 513])
def test_real_model(provider: ProviderProcess, smollm2: Model, smollm2_path: Path, n_tokens: int) -> None:
    tokens = text_tokens(smollm2, n_tokens + N_REST)
    outcome = handoff(provider, smollm2, smollm2_path, tokens[:n_tokens], tokens[n_tokens:], {"n_ctx": 1024})
    assert_handed_over(outcome, n_tokens)


@pytest.mark.parametrize(
    "params",
    [
        {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"},
        {"flash_attn": "off"},
        {"n_seq_max": 4, "kv_unified": True},
    ],
    ids=lambda params: "-".join(map(str, params.values())),
)
def test_real_model_otherwise(
    provider: ProviderProcess, smollm2: Model, smollm2_path: Path, params: dict[str, Any]
) -> None:
    tokens = text_tokens(smollm2, 96 + N_REST)
    other = {"seq_id": 2, "n_other": 30} if "n_seq_max" in params else {}
    outcome = handoff(
        provider,
        smollm2,
        smollm2_path,
        tokens[:96],
        tokens[96:],
        {"n_ctx": 512 * params.get("n_seq_max", 1), **params},
        **other,
    )
    assert_handed_over(outcome, 96)


def test_other_n_ubatch(provider: ProviderProcess, smollm2: Model, smollm2_path: Path) -> None:
    """Graphs of another size sum in another order, which costs exactness, and little of it."""
    tokens = text_tokens(smollm2, 200 + N_REST)
    outcome = handoff(
        provider, smollm2, smollm2_path, tokens[:200], tokens[200:], {"n_ctx": 1024}, n_ubatch=64
    )
    assert not outcome.identical  # otherwise the option went nowhere
    assert outcome.max_difference <= N_UBATCH_TOLERANCE
    assert outcome.same_choice
    assert outcome.adopted.bytes_moved == 0


def test_the_command_line(smollm2: Model, smollm2_path: Path) -> None:
    """A provider that is started for one share, with its prompt as an argument."""
    tokens = text_tokens(smollm2, 64 + N_REST)
    prompt, rest = tokens[:64], tokens[64:]
    with (
        fds.private_directory() as folder,
        Decoder.open(smollm2, n_ctx=512) as decoder,
        Context.create(smollm2, n_ctx=512) as local,
        decoder.share(n_tokens=64) as share,
    ):
        command = [sys.executable, "-m", "tests.native.provider_process", str(folder / "one.sock")]
        command += [str(smollm2_path), json.dumps(prompt)]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            send(share, folder / "one.sock", process)
            output, _ = process.communicate(timeout=60)
        assert (process.returncode, json.loads(output)) == (0, {"ok": True})
        decoder.adopt(share, prompt)
        local.decode(prompt, position=0)
        for a, b in zip(
            decode_each(local, rest, position=64),
            decode_each(decoder.context, rest, position=64),
            strict=True,
        ):
            assert a.tobytes() == b.tobytes()


# -- the matrix, on a tiny model -----------------------------------------------------------------

FLASH_ATTN = ("on", "off", "auto")
TYPES = [
    (type_k, type_v, flash_attn)
    for type_k in ("f16", "q8_0", "q4_0")
    for type_v in ("f16", "q8_0", "q4_0")
    for flash_attn in FLASH_ATTN
    if type_v == "f16" or flash_attn != "off"  # llama.cpp quantizes V only with flash attention
]
SEQUENCES = [
    ({"n_seq_max": 1}, 0, 0),
    ({"n_seq_max": 1, "kv_unified": True}, 0, 0),
    ({"n_seq_max": 4}, 0, 0),
    ({"n_seq_max": 4}, 2, 20),
    ({"n_seq_max": 4, "kv_unified": True}, 0, 0),
    ({"n_seq_max": 4, "kv_unified": True}, 2, 20),
    ({"n_seq_max": 4, "kv_unified": True}, 3, 300),
]
LENGTHS = (1, 2, 255, 256, 257, 511, 512, 513)


@pytest.mark.parametrize(("type_k", "type_v", "flash_attn"), TYPES)
def test_types(
    provider: ProviderProcess, tiny: Model, tiny_path: Path, type_k: str, type_v: str, flash_attn: str
) -> None:
    params = {"n_ctx": 1024, "type_k": type_k, "type_v": type_v, "flash_attn": flash_attn}
    tokens = random_tokens(tiny, 300 + N_REST)
    outcome = handoff(provider, tiny, tiny_path, tokens[:300], tokens[300:], params)
    assert_handed_over(outcome, 300)


@pytest.mark.parametrize("flash_attn", FLASH_ATTN)
@pytest.mark.parametrize(("params", "seq_id", "n_other"), SEQUENCES)
def test_sequences(
    provider: ProviderProcess,
    tiny: Model,
    tiny_path: Path,
    params: dict[str, Any],
    seq_id: int,
    n_other: int,
    flash_attn: str,
) -> None:
    params = {"n_ctx": 1024 * params["n_seq_max"], "flash_attn": flash_attn, **params}
    tokens = random_tokens(tiny, 300 + N_REST)
    outcome = handoff(
        provider, tiny, tiny_path, tokens[:300], tokens[300:], params, seq_id=seq_id, n_other=n_other
    )
    assert_handed_over(outcome, 300)
    # what the decoder has of its own is not in the way: a unified cache leases behind it
    assert (outcome.first_cell > 0) == (n_other > 0 and params.get("kv_unified", False))


@pytest.mark.parametrize("flash_attn", FLASH_ATTN)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_lengths(
    provider: ProviderProcess, tiny: Model, tiny_path: Path, n_tokens: int, flash_attn: str
) -> None:
    params = {"n_ctx": 1024, "n_ubatch": 128, "flash_attn": flash_attn}
    tokens = random_tokens(tiny, n_tokens + N_REST)
    outcome = handoff(provider, tiny, tiny_path, tokens[:n_tokens], tokens[n_tokens:], params)
    assert_handed_over(outcome, n_tokens)


@pytest.mark.parametrize("flash_attn", FLASH_ATTN)
@pytest.mark.parametrize("seq_id", [0, 1])
def test_a_full_cache(
    provider: ProviderProcess, tiny: Model, tiny_path: Path, flash_attn: str, seq_id: int
) -> None:
    """All cells but one: the last token is as it would be. All: none follows, as in llama.cpp."""
    params = {"n_ctx": 512 * (seq_id + 1), "n_seq_max": seq_id + 1, "flash_attn": flash_attn}
    tokens = random_tokens(tiny, 512)
    outcome = handoff(provider, tiny, tiny_path, tokens[:-1], tokens[-1:], params, seq_id=seq_id)
    assert_handed_over(outcome, 511)
    with Decoder.open(tiny, **params) as decoder, decoder.share(seq_id, n_tokens=512) as share:
        assert provider.serve(share, tiny_path, tokens) == {"ok": True}
        assert decoder.adopt(share, tokens).n_adopted == 512
        with pytest.raises(NativeError, match="no free cells") as refused:
            decoder.context.decode([1], position=512, seq_id=seq_id, logits=True)
        assert refused.value.status == 1
        decoder.context.clear(seq_id)  # and the refusal has broken nothing
        decoder.context.decode(tokens[:8], position=0, seq_id=seq_id, logits=True)


def test_one_decoder_many_shares(provider: ProviderProcess, tiny: Model, tiny_path: Path) -> None:
    """The cells of one handoff are those of the next, with another prompt in them."""
    with Decoder.open(tiny, n_ctx=512) as decoder, Context.create(tiny, n_ctx=512) as local:
        for seed, n_tokens in enumerate((300, 7, 300, 128)):
            tokens = random_tokens(tiny, n_tokens + 2, seed=seed)
            prompt, rest = tokens[:-2], tokens[-2:]
            with decoder.share(n_tokens=n_tokens) as share:
                assert provider.serve(share, tiny_path, prompt) == {"ok": True}
                decoder.adopt(share, prompt)
            local.decode(prompt, position=0)
            here = decode_each(local, rest, position=n_tokens)
            there = decode_each(decoder.context, rest, position=n_tokens)
            assert [x.tobytes() for x in here] == [x.tobytes() for x in there]
            for context in (decoder.context, local):
                context.clear()


def test_a_decoder_that_does_not_read_progress(
    provider: ProviderProcess, tiny: Model, tiny_path: Path
) -> None:
    """More graphs than its socket holds messages; the provider does not wait for it."""
    params = {"n_ctx": 1024, "n_ubatch": 2}
    tokens = random_tokens(tiny, 600 + N_REST)
    outcome = handoff(provider, tiny, tiny_path, tokens[:600], tokens[600:], params)
    assert_handed_over(outcome, 600)


def test_a_decoder_that_waits(provider: ProviderProcess, tiny: Model, tiny_path: Path) -> None:
    """It hears of every graph, and of the end."""
    tokens = random_tokens(tiny, 300)
    seen: list[tuple[int, int]] = []
    with Decoder.open(tiny, n_ctx=512, n_ubatch=64) as decoder, decoder.share(n_tokens=300) as share:
        job = provider.start(share, tiny_path, tokens)
        share.wait(progress=lambda n_filled, n_tokens: seen.append((n_filled, n_tokens)))
        assert share.provider_pid == provider.process.pid
        assert decoder.adopt(share, tokens).n_adopted == 300
        assert job() == {"ok": True}
    assert seen == [(64, 300), (128, 300), (192, 300), (256, 300), (300, 300)]
