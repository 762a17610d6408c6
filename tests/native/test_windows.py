"""A share of a tiny sliding-window cache: the sequences beside it go on while it is open."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvshare import Decoder
from tests.native.handoff import random_tokens

pytestmark = pytest.mark.native


@pytest.mark.parametrize("arch", ["gemma2-dense", "gemma3-dense"])
def test_a_share_of_a_small_window_leaves_cells(archs_path: Path, arch: str) -> None:
    with Decoder.open(
        archs_path / f"{arch}.gguf", n_ctx=1024, n_batch=32, n_ubatch=32, n_seq_max=4, kv_unified=True
    ) as decoder:
        tokens = random_tokens(decoder.context.model, 64)
        with decoder.share(1, n_tokens=32):
            for seq_id in (0, 2):
                decoder.context.decode(tokens, position=0, seq_id=seq_id)  # raises where no cell is free
