"""The public checks of a decoder, over the fake one and over llama.cpp."""

from __future__ import annotations

import pytest

from kvshare.testing.contract import Check, check_decoder
from tests.contract.harness import FakeHarness, NativeHarness


@pytest.mark.parametrize(
    "check", [pytest.param(check, id=name) for name, check in check_decoder(FakeHarness)]
)
def test_fake(check: Check) -> None:
    check()


@pytest.mark.native
@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("name", [name for name, _ in check_decoder(FakeHarness)])
def test_native(native: NativeHarness, name: str, flash_attn: str) -> None:
    dict(check_decoder(lambda: native.open(flash_attn)))[name]()
