"""The state machine of a share's life, with a fake and a real decoder in lockstep."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from kvshare import Model
from tests.contract.harness import FakeHarness, NativeHarness
from tests.property.test_decoder_life import DecoderLife

pytestmark = pytest.mark.native


def test_a_real_decoder_goes_the_same_way(tiny: Model) -> None:
    class Both(DecoderLife):
        factories = (FakeHarness, lambda: NativeHarness(tiny).open("on"))

    run_state_machine_as_test(
        Both,
        settings=settings(
            max_examples=20,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
