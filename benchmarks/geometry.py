"""A model with the cache of a 7B-class model and next to no weights.

28 layers, 8 KV heads of size 128, and a hidden size of 256: at 20,480 cells of f16 K and V its cache has
2,240 MiB, its file about 60 MB. The weights are random, the tokenizer knows bytes: it is for measuring,
not for reading. It is written once, into the cache folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from kvshare import fetch
from kvshare.errors import LibraryError

N_LAYER = 28
N_HEAD_KV = 8
HEAD_SIZE = 128
N_EMBD = 256
N_FF = 512
N_CELLS = 20_480
N_CTX_TRAIN = 32_768

LAYOUT = {
    "n_layer": N_LAYER,
    "n_head_kv": N_HEAD_KV,
    "head_size": HEAD_SIZE,
    "type": "f16",
    "n_cells": N_CELLS,
    "mib": 2 * 2 * N_LAYER * N_HEAD_KV * HEAD_SIZE * N_CELLS / 2**20,
}

_VERSION = 1  # of what is written


def model(progress: fetch.Progress = fetch.silent, *, n_layer: int = N_LAYER) -> Path:
    """Return the model file; write it if it is not there.

    Raises:
        OSError: it cannot be written.
    """
    path = fetch.make_dir(fetch.cache_dir() / "models") / f"geometry-{n_layer}x{N_EMBD}-{_VERSION}.gguf"
    with fetch.locked(path.with_suffix(".lock")):
        if not path.exists():
            progress("write the model", 0, None)
            beside = path.with_suffix(".part")
            _write(beside, n_layer)
            os.replace(beside, path)
            progress("write the model", 1, 1)
    return path


def _byte_tokens() -> list[str]:
    """Return a character for each byte, as byte-level BPE names them."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    return [names[byte] for byte in range(256)]


def _write(path: Path, n_layer: int) -> None:
    try:
        import gguf
    except ImportError as error:
        raise LibraryError("the package gguf is missing", hint="pip install -e '.[bench]'") from error
    rng = np.random.default_rng(28)
    tokens = [*_byte_tokens(), "<|end|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("kvshare geometry")
    writer.add_block_count(n_layer)
    writer.add_context_length(N_CTX_TRAIN)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD_KV)
    writer.add_head_count_kv(N_HEAD_KV)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(256)

    def weights(name: str, *shape: int) -> None:
        writer.add_tensor(name, rng.normal(0, 0.02, shape).astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(N_EMBD, np.float32))

    n_inner = N_HEAD_KV * HEAD_SIZE
    weights("token_embd.weight", len(tokens), N_EMBD)
    weights("output.weight", len(tokens), N_EMBD)
    norm("output_norm.weight")
    for i in range(n_layer):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        for name in ("attn_q", "attn_k", "attn_v"):
            weights(f"blk.{i}.{name}.weight", n_inner, N_EMBD)
        weights(f"blk.{i}.attn_output.weight", N_EMBD, n_inner)
        weights(f"blk.{i}.ffn_gate.weight", N_FF, N_EMBD)
        weights(f"blk.{i}.ffn_up.weight", N_FF, N_EMBD)
        weights(f"blk.{i}.ffn_down.weight", N_EMBD, N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
