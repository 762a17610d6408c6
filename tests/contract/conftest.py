"""The library and a tiny model, as for the native tests."""

from __future__ import annotations

import pytest

from kvshare import Model
from tests.contract.harness import NativeHarness
from tests.native.conftest import (
    archs_path,
    library,
    pytest_make_collect_report,
    pytest_runtest_makereport,
    tiny,
    tiny_path,
)

__all__ = [
    "archs_path",
    "library",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "tiny",
    "tiny_path",
]


@pytest.fixture
def native(tiny: Model) -> NativeHarness:
    return NativeHarness(tiny)
