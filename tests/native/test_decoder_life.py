"""The state machine of a share's life, with a fake and a real decoder in lockstep."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvshare import Decoder, Model
from tests.contract.harness import PARAMS, NativeHarness
from tests.property.test_decoder_life import N_SEQ, DecoderLife, FakeSlots

pytestmark = [pytest.mark.native, pytest.mark.slow]


class NativeSlots(NativeHarness):
    """llama.cpp on a tiny model, with a stream for each sequence."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.params = {**PARAMS, "n_ctx": 1024 * N_SEQ, "n_seq_max": N_SEQ, "kv_unified": False}
        self.decoder = Decoder.open(model, **self.params)

    def request(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.decoder.context.decode(tokens, position=0, seq_id=seq_id)

    def content(self, seq_id: int) -> bytes:
        """Return the state that llama.cpp saves: positions, K and V."""
        context = self.decoder.context
        if not context.n_past(seq_id):
            return b""
        llama = context.library.llama
        size = llama.llama_state_seq_get_size(context.pointer, seq_id)
        buffer = (ctypes.c_uint8 * size)()
        assert llama.llama_state_seq_get_data(context.pointer, buffer, size, seq_id) == size
        return bytes(buffer)


def test_a_real_decoder_goes_the_same_way(tiny: Model) -> None:
    class Both(DecoderLife):
        factories = (FakeSlots, lambda: NativeSlots(tiny))

    run_state_machine_as_test(
        Both,
        settings=settings(
            max_examples=80,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
