"""`kvshare doctor` on a machine with GPUs, with broken ones, and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvshare._native import cuda
from kvshare.cli import doctor


def run(library: Path | None, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command; the library is found by its name, as the real one is."""
    path = {"LD_LIBRARY_PATH": str(library.parent)} if library else {}
    return subprocess.run(
        [sys.executable, "-m", "kvshare", "doctor", "--library", "/nowhere", *arguments],
        env={**os.environ, **path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def report(library: Path | None, **environment: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    document = json.loads(run(library, "--json", **environment).stdout)
    return document["gpu"], {check["name"]: check for check in document["checks"]}


def test_two_gpus(library: Path) -> None:
    gpu, checks = report(library, FAKE_CUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="1,0")
    assert (gpu["cuda"], gpu["error"]) == ("12.4", None)
    assert gpu["devices"][0] == {
        "ordinal": 0,
        "uuid": "GPU-50515253-5455-5657-5859-5a5b5c5d5e5f",
        "name": "Fake GPU 1",
        "compute_capability": "9.0",
        "memory_nbytes": 1 << 30,
        "vmm": True,
        "posix_fd": True,
        "dma_buf": True,
    }
    assert [device["name"] for device in gpu["devices"]] == ["Fake GPU 1", "Fake GPU 0"]
    found = checks["gpu 0"]["found"]
    for said in ("Fake GPU 1", "GPU-5051", "1.0 GiB", "can be shared (VMM, descriptors, dma-buf)"):
        assert said in found
    assert checks["cuda driver"]["found"].startswith("CUDA 12.4")


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ("102=0", "cannot be shared (no VMM, descriptors, dma-buf)"),
        ("103=0", "cannot be shared (VMM, no descriptors, dma-buf)"),
        ("124=-1", "can be shared (VMM, descriptors, no dma-buf)"),
        ("124=0", "can be shared (VMM, descriptors, no dma-buf)"),
    ],
)
def test_what_a_gpu_lacks(library: Path, attributes: str, said: str) -> None:
    _, checks = report(library, FAKE_CUDA_ATTRIBUTES=attributes)
    assert said in checks["gpu 0"]["found"]
    assert checks["gpu 0"]["ok"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"FAKE_CUDA_VERSION": "10020"}, "supports CUDA 10.2, kvshare needs 11.4"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "finds no GPU"),
        ({"FAKE_CUDA_FAIL": "cuInit=999"}, "unknown error"),
        ({"FAKE_CUDA_FAIL": "cuDeviceGetUuid_v2=101"}, "cuDeviceGetUuid_v2"),
    ],
)
def test_a_driver_of_no_use_is_information(library: Path, environment: dict[str, str], said: str) -> None:
    gpu, checks = report(library, **environment)
    assert said in gpu["error"]
    assert gpu["devices"] == []
    assert said in checks["gpu"]["found"]
    assert checks["gpu"]["ok"]


def test_no_driver_is_information(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-nobody-has.so.1")
    gpu, (check,) = doctor._gpu(None)
    assert check.ok
    assert check.found.startswith("there is no CUDA driver")
    assert gpu["error"] == check.found


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("backends", [["CPU (some)"], ["CUDA0 (Fake GPU)", "CPU (some)"]])
def test_a_library_without_cuda(backends: list[str]) -> None:
    _, checks = doctor._gpu({"backends": backends})
    said = [check.found for check in checks if check.name == "cuda backend"]
    assert len(said) == (len(backends) == 1)
    assert all("kvshare build --cmake-arg=-DGGML_CUDA=ON" in each for each in said)


def test_the_table(library: Path) -> None:
    done = run(library)
    assert done.returncode == 10  # there is no /nowhere
    text = " ".join(done.stdout.split())
    assert "ok cuda driver CUDA 12.4" in text
    assert "Fake GPU 0" in text
