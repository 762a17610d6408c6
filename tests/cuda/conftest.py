"""A fake CUDA driver in the place of the real one, and a check that everything is given back to it."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare._native import cuda
from tests.cuda.fake import FakeDriver, compile_driver


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to compile the fake CUDA driver with")
    return compile_driver(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def fake(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    for name in ("DEVICES", "GRANULARITY", "MEMORY", "VERSION", "ATTRIBUTES", "FAIL"):
        monkeypatch.delenv(f"FAKE_CUDA_{name}", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FAKE_CUDA_GRANULARITY", "65536")
    # by its path, not its name: the real one, where there is one, is not looked for by this process
    monkeypatch.setattr(cuda, "LIBRARY", str(library))
    monkeypatch.setattr(cuda, "_drivers", {})
    driver = FakeDriver(library)
    driver.reset()
    yield driver
    monkeypatch.delenv("FAKE_CUDA_FAIL", raising=False)
    if driver.live():
        gc.collect()
    left = driver.live()
    driver.reset()
    assert not left, f"left on the GPU: {left}"
