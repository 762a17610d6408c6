"""`kvshare demo --gpu` where it cannot run: what is missing, and the next step, before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvshare._native import cuda, loader
from kvshare.cli import demo, main
from kvshare.errors import KvshareError, LibraryError, LibraryNotFoundError, NotShareableError
from tests.cuda.fake import FakeDriver


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a build without CUDA."""
    (tmp_path / "libllama.so").touch()
    monkeypatch.setenv(loader.ENVIRONMENT, str(tmp_path))
    return tmp_path


def test_no_driver(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-nobody-has.so.1")
    with pytest.raises(LibraryNotFoundError, match="no CUDA driver") as error:
        demo._gpu()
    assert error.value.hint


@pytest.mark.parametrize("lacks", ["102=0", "103=0"])
def test_memory_that_cannot_be_shared(
    fake: FakeDriver, build: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_ATTRIBUTES", lacks)
    with pytest.raises(NotShareableError, match="memory of Fake GPU 0 cannot be shared") as error:
        demo._gpu()
    assert "kvshare doctor" in (error.value.hint or "")


def test_a_library_without_cuda(fake: FakeDriver, build: Path) -> None:
    with pytest.raises(LibraryError, match="built without CUDA") as error:
        demo._gpu()
    assert error.value.hint == "run `kvshare build --cmake-arg=-DGGML_CUDA=ON`"
    (build / "libggml-cuda.so").touch()
    assert demo._gpu() == {"name": "Fake GPU 0", "uuid": "GPU-40414243-4445-4647-4849-4a4b4c4d4e4f"}


def test_no_library(fake: FakeDriver, build: Path) -> None:
    (build / "libllama.so").unlink()
    with pytest.raises(KvshareError, match="no libllama"):
        demo._gpu()


def test_the_command(build: Path, library: Path) -> None:
    """Nothing is downloaded or started: there is not even a model."""
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library.parent),
        "KVSHARE_CACHE": str(build / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "kvshare", "demo", "--gpu", "--json"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["error"]["exit_code"]) == (10, 10)
    assert "built without CUDA" in answer["error"]["message"]
    assert "GGML_CUDA=ON" in answer["error"]["hint"]
    assert not (build / "cache").exists()


def test_one_or_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["demo", "--gpu", "--server"])
    assert end.value.code == 2
    assert "not allowed with" in capsys.readouterr().err
