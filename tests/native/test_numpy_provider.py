"""A provider without llama.cpp: rows that were computed elsewhere come in through numpy views."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshare import Context, Decoder, LedgerDigestError, Model, Offer, Provider, Share, fds
from kvshare.mapping import View
from tests.native.handoff import ROOT, confine, decode_each, random_tokens, send, unconfine

pytestmark = pytest.mark.native

N_PROMPT = 300


def rows_of(
    model: Model, params: dict[str, Any], prompt: Sequence[int], other: Sequence[int], seq_id: int
) -> dict[str, View]:
    """Compute K and V with llama.cpp in a context of its own; return them by layer."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, Decoder.open(model, **params) as source:
        source.context.decode(other, position=0, seq_id=0)
        with source.share(seq_id, n_tokens=len(prompt)) as share:
            share.send(near)
            with Offer.receive(far) as offer, Provider(offer, model) as provider:
                provider.prefill(prompt)
                cells = slice(offer.first_cell, offer.first_cell + len(prompt))
                rows = {}
                for layer in offer.views():
                    assert layer.v is not None
                    rows[f"k{layer.il}"], rows[f"v{layer.il}"] = layer.k[cells].copy(), layer.v[cells].copy()
                del layer
                return rows


def serve(share: Share, folder: Path, rows: dict[str, View], tokens: Sequence[int]) -> dict[str, Any]:
    """Let a new process serve a share from a file of rows; return what it says."""
    np.savez(folder / "rows.npz", allow_pickle=False, **rows)
    command = [sys.executable, "-m", "tests.native.numpy_provider"]
    command += [str(folder / "numpy.sock"), str(folder / "rows.npz"), json.dumps(list(tokens))]
    # without the library's path in its environment, as it needs none
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        send(share, folder / "numpy.sock", process)
        output, _ = process.communicate(timeout=60)
    answer: dict[str, Any] = json.loads(output)
    assert answer.pop("libraries") == []
    assert answer.pop("modules") == ["numpy"]
    return answer


@pytest.mark.parametrize("type_k", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("flash_attn", ["on", "off"], ids=["v", "v_trans"])
@pytest.mark.parametrize("n_other", [0, 20], ids=["from_0", "from_256"])
def test_copied_rows_are_adopted(tiny: Model, type_k: str, flash_attn: str, n_other: int) -> None:
    """The oracle is a local prefill at the same cells."""
    params: dict[str, Any] = {"n_ctx": 1024, "type_k": type_k, "flash_attn": flash_attn}
    if n_other:
        params |= {"n_seq_max": 4, "kv_unified": True}
    seq_id = 2 if n_other else 0
    tokens = random_tokens(tiny, N_PROMPT + 4)
    prompt, rest = tokens[:N_PROMPT], tokens[N_PROMPT:]
    other = random_tokens(tiny, n_other, seed=2)
    rows = rows_of(tiny, params, prompt, other, seq_id)
    with (
        fds.private_directory() as folder,
        Decoder.open(tiny, **params) as decoder,
        Context.create(tiny, **params) as local,
    ):
        for context in (decoder.context, local):
            context.decode(other, position=0, seq_id=0)
        with decoder.share(seq_id, n_tokens=N_PROMPT) as share:
            answer = serve(share, folder, rows, prompt)
            first_cell = 256 if n_other else 0
            assert answer == {"ok": True, "first_cell": first_cell, "exposes_all": bool(n_other)}
            assert share.ledger.snapshot().blob == b""
            adopted = decoder.adopt(share, prompt)
        assert (adopted.n_adopted, adopted.bytes_moved) == (N_PROMPT, 0)
        assert adopted.bytes_in_place == sum(row.nbytes for row in rows.values())
        confine(local, share)
        local.decode(prompt, position=0, seq_id=seq_id)
        unconfine(local, seq_id)
        for each, sequence in ((rest, seq_id), ([1], 0)) if n_other else ((rest, 0),):
            position = len(prompt) if sequence == seq_id else n_other
            here = decode_each(local, each, position=position, seq_id=sequence)
            there = decode_each(decoder.context, each, position=position, seq_id=sequence)
            assert [x.tobytes() for x in here] == [x.tobytes() for x in there]


def test_other_rows_give_other_logits(tiny: Model) -> None:
    """The rows are really what is attended to: with one of them changed, the answer changes."""
    params: dict[str, Any] = {"n_ctx": 512, "flash_attn": "on"}
    tokens = random_tokens(tiny, 41)
    prompt, rest = tokens[:40], tokens[40:]
    rows = rows_of(tiny, params, prompt, [], 0)
    found = []
    with fds.private_directory() as folder, Decoder.open(tiny, **params) as decoder:
        for change in (0, 1):
            rows["v1"][20] += change
            with decoder.share(n_tokens=40) as share:
                assert serve(share, folder, rows, prompt)["ok"]
                decoder.adopt(share, prompt)
            found.append(decode_each(decoder.context, rest, position=40)[0])
            decoder.context.clear()
    assert found[0].tobytes() != found[1].tobytes()


def test_rows_that_change_after_they_were_vouched_for(tiny: Model) -> None:
    """The sample digest covers the first row of each layer; what is written behind it is refused."""
    params: dict[str, Any] = {"n_ctx": 512, "flash_attn": "on"}
    prompt = random_tokens(tiny, 40)
    rows = rows_of(tiny, params, prompt, [], 0)
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, Decoder.open(tiny, **params) as decoder, decoder.share(n_tokens=40) as share:
        share.send(near)
        with Offer.receive(far) as offer:
            offer.ledger.begin()
            for layer in offer.views():
                assert layer.v is not None
                layer.k[:40], layer.v[:40] = rows[f"k{layer.il}"], rows[f"v{layer.il}"]
            offer.complete(prompt)
            layer.k[0] += 1
            del layer
        with pytest.raises(LedgerDigestError):
            decoder.adopt(share, prompt)
        assert decoder.context.n_past() == 0
