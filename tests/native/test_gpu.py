"""Caches on a GPU, by libllama's own code; the driver and the CUDA backend are the fakes of `tests/cuda`."""

from __future__ import annotations

import ctypes.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvshare._native import loader
from tests.cuda.fake import compile_library
from tests.native.handoff import ROOT, environment

pytestmark = pytest.mark.native

N = 300
PARAMS: dict[str, Any] = {"n_ctx": 1024, "n_threads": 1}
UUIDS = ("GPU-40414243-4445-4647-4849-4a4b4c4d4e4f", "GPU-50515253-5455-5657-5859-5a5b5c5d5e5f")


@pytest.fixture(scope="session")
def gpu_library(library: loader.Library, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the other tests, with a CUDA backend."""
    lib_dir = library.path.parent
    if not (lib_dir.parent / "CMakeCache.txt").is_file():
        pytest.skip(f"{lib_dir} does not say where its source is")
    return compile_library(lib_dir, tmp_path_factory.mktemp("gpu"))


def fake_gpu(gpu_library: Path, **changes: str) -> dict[str, str]:
    return environment(
        **{loader.ENVIRONMENT: str(gpu_library), "LD_LIBRARY_PATH": str(gpu_library), **changes}
    )


def run(gpu_library: Path, case: str, arguments: dict[str, Any], **env: str) -> dict[str, Any]:
    """Run a case in a process; check that it left nothing on the GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.native.gpu_case", case, json.dumps(arguments, default=str)],
        cwd=ROOT,
        env=fake_gpu(gpu_library, **env),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    # the series keeps the context of a device, and pinned memory, as long as the process lives
    left = {name: n for name, n in found.pop("live").items() if name not in ("contexts", "pinned")}
    assert left == {}
    return found


@pytest.mark.parametrize(
    ("arch", "params"),
    [
        ("llama-dense", {}),
        ("llama-dense", {"flash_attn": "off"}),
        ("llama-dense", {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}),
        ("gemma3-dense", {"n_ubatch": 32}),
        ("mamba-dense", {}),
        ("falcon-h1-dense", {}),
        ("deepseek2-moe", {}),
    ],
)
def test_kinds_of_caches(gpu_library: Path, archs_path: Path, arch: str, params: dict[str, Any]) -> None:
    model = archs_path / f"{arch}.gguf"
    if not model.is_file():
        pytest.fail(f"no {model.name}; there are {sorted(each.stem for each in archs_path.glob('*.gguf'))}")
    arguments = {"model": model, "n": N, "n_gpu_layers": -1, "params": PARAMS | params}
    found = run(gpu_library, "whole", {**arguments, "seq_id": 0, "n_other": 0})
    assert (found["identical"], found["bytes_moved"]) == (True, 0)
    assert set(found["kinds"]) == {"cuda-vmm"}


@pytest.mark.parametrize("kv_unified", [True, False])
def test_one_sequence_of_several(gpu_library: Path, tiny_path: Path, kv_unified: bool) -> None:
    params = PARAMS | {"n_seq_max": 4, "kv_unified": kv_unified}
    arguments = {"model": tiny_path, "n": 200, "n_gpu_layers": -1, "params": params}
    found = run(gpu_library, "whole", {**arguments, "seq_id": 2, "n_other": 20})
    assert (found["identical"], found["bytes_moved"], found["kinds"]) == (True, 0, ["cuda-vmm"])


def test_layers_on_both_sides(gpu_library: Path, tiny_path: Path) -> None:
    """The output layer counts as one: with two, one of the layers with a cache is on the GPU."""
    arguments = {"model": tiny_path, "n": N, "n_gpu_layers": 2, "params": PARAMS}
    found = run(gpu_library, "whole", {**arguments, "seq_id": 0, "n_other": 0})
    assert (found["identical"], found["bytes_moved"]) == (True, 0)
    assert sorted(found["kinds"]) == ["cuda-vmm", "memfd"]


@pytest.mark.parametrize("granularity", ["4096", "65536", "2097152"])
def test_any_granularity(gpu_library: Path, tiny_path: Path, granularity: str) -> None:
    arguments = {"model": tiny_path, "n": 100, "n_gpu_layers": -1, "params": PARAMS}
    arguments |= {"seq_id": 0, "n_other": 0}
    found = run(gpu_library, "whole", arguments, FAKE_CUDA_GRANULARITY=granularity)
    assert (found["identical"], found["bytes_moved"]) == (True, 0)


@pytest.mark.parametrize("flash_attn", ["on", "off"], ids=["v", "v_trans"])
@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_a_provider_that_is_not_llama_cpp(
    gpu_library: Path, tiny_path: Path, flash_attn: str, type_k: str
) -> None:
    params = PARAMS | {"flash_attn": flash_attn, "type_k": type_k}
    found = run(gpu_library, "views", {"model": tiny_path, "n": N, "params": params})
    assert (found["identical"], found["fresh"], found["bytes_moved"]) == (True, True, 0)


def test_a_warm_provider(gpu_library: Path, tiny_path: Path) -> None:
    """Cold, warm, warm; the third share ends without adoption, and takes its memory with it."""
    found = run(gpu_library, "warm", {"model": tiny_path, "n": 100, "params": PARAMS})
    assert found["begun"] == [False, True, True, False]


def test_a_provider_that_dies(gpu_library: Path, tiny_path: Path) -> None:
    found = run(gpu_library, "killed", {"model": tiny_path, "n": 100, "params": PARAMS})
    assert found["same"]


@pytest.mark.parametrize("order", ["1", UUIDS[1]])
def test_another_order_of_devices(gpu_library: Path, tiny_path: Path, order: str) -> None:
    """Both processes see the second GPU only, each in its way."""
    arguments = {
        "model": tiny_path,
        "n": 100,
        "params": PARAMS,
        "environment": {"CUDA_VISIBLE_DEVICES": order},
    }
    found = run(gpu_library, "elsewhere", arguments, FAKE_CUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="1")
    assert (found["answer"], found["adopted"], found["devices"]) == ({"ok": True}, 100, [UUIDS[1]])


def test_a_provider_that_does_not_see_the_gpu(gpu_library: Path, tiny_path: Path) -> None:
    arguments = {"model": tiny_path, "n": 100, "params": PARAMS, "environment": {"CUDA_VISIBLE_DEVICES": "0"}}
    found = run(gpu_library, "elsewhere", arguments, FAKE_CUDA_DEVICES="2", CUDA_VISIBLE_DEVICES="1")
    assert not found["answer"]["ok"]
    assert "CUDA_VISIBLE_DEVICES" in found["answer"]["message"]


def test_a_dma_buf(gpu_library: Path, tiny_path: Path) -> None:
    params = PARAMS | {"n_seq_max": 2, "kv_unified": True}
    found = run(gpu_library, "dma_buf", {"model": tiny_path, "n": 100, "params": params})
    assert (found["same"], found["some"]) == (True, True)
    assert len(found["errors"]) == 2


STAYS_MAPPED = pytest.mark.xfail(
    reason="~llama_kv_share_buffer: where the device cannot be waited for, as after a kernel's fault, the"
    " memory stays mapped until the process ends"
)


@pytest.mark.parametrize(
    "function",
    [
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemGetAllocationPropertiesFromHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemsetD8_v2",
        "cuLaunchKernel",
        "cuStreamSynchronize",
        pytest.param("cuCtxSynchronize", marks=STAYS_MAPPED),
        pytest.param("cuCtxPushCurrent_v2", marks=STAYS_MAPPED),
    ],
)
def test_a_call_of_the_driver_that_fails(gpu_library: Path, tiny_path: Path, function: str) -> None:
    """Wherever it is: no crash, nothing wrong that passes for right, nothing left behind."""
    params = PARAMS | {"n_ctx": 256}
    found = run(gpu_library, "planted", {"model": tiny_path, "function": function, "params": params})
    assert found["n_calls"] > 0
    assert "wrong" not in found["outcomes"]
    assert sum(found["outcomes"].values()) == found["n_calls"]


@pytest.mark.parametrize(
    "function",
    [
        "cuInit",
        "cuDeviceGetByPCIBusId",
        "cuDeviceGetUuid_v2",
        "cuDevicePrimaryCtxRetain",
        "cuStreamCreate",
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuMemHostAlloc",
        "cuMemGetAllocationGranularity",
    ],
)
def test_a_device_that_does_not_start(gpu_library: Path, tiny_path: Path, function: str) -> None:
    """The first call of the series in this process; a libllama without a cache on a GPU does not need it."""
    nth = 2 if function == "cuInit" else 1  # the backend starts the driver first
    found = run(
        gpu_library, "refused", {"model": tiny_path, "params": PARAMS}, FAKE_CUDA_FAIL=f"{function}=2@{nth}"
    )
    assert found["type"] in ("NotShareableError", "NativeError")
    assert "offload_kqv" in found["message"]


def test_a_backend_without_the_series(gpu_library: Path, tiny_path: Path) -> None:
    """Its memory is refused, with how to get one that is not; nothing is copied instead."""
    found = run(gpu_library, "refused", {"model": tiny_path, "params": PARAMS}, FAKE_CUDA_BACKEND="stock")
    assert found["type"] == "NotShareableError"
    assert "GGML_CUDA=ON" in found["message"]
    assert "offload_kqv" in found["message"]


def test_a_machine_without_the_driver(gpu_library: Path, tmp_path: Path) -> None:
    """A build with CUDA cannot even be loaded there."""
    if ctypes.util.find_library("cuda"):
        pytest.skip("this machine has the driver")
    for file in gpu_library.iterdir():
        if file.name != "libcuda.so.1" and file.is_file():
            (tmp_path / file.name).symlink_to(file.resolve())
    done = subprocess.run(
        [sys.executable, "-m", "kvshare", "doctor", "--json"],
        env=environment(**{loader.ENVIRONMENT: str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 10
    (check,) = (each for each in json.loads(done.stdout)["checks"] if each["name"] == "library")
    assert "libcuda.so.1" in check["found"]
    assert "install the NVIDIA driver" in check["advice"]


def test_the_demo(gpu_library: Path, smollm2_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvshare", "demo", "--gpu", "--json", "--tokens", "40"],
        env=fake_gpu(gpu_library),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["gpu"] == {"name": "Fake GPU 0", "uuid": UUIDS[0]}
    (found,) = report["runs"]
    assert (found["logits_identical"], found["text_identical"], found["bytes_moved"]) == (True, True, 0)


def test_the_demo_where_the_cache_stays_on_the_host(library: loader.Library, gpu_library: Path) -> None:
    """A build that has the backend's file, but not the backend."""
    folder = gpu_library / "without"
    folder.mkdir(exist_ok=True)
    for file in library.path.parent.glob("lib*.so*"):
        if not (folder / file.name).exists():
            os.symlink(file, folder / file.name)
    (folder / "libggml-cuda.so").touch()
    env = fake_gpu(
        gpu_library, **{loader.ENVIRONMENT: str(folder), "LD_LIBRARY_PATH": f"{folder}:{gpu_library}"}
    )
    done = subprocess.run(
        [sys.executable, "-m", "kvshare", "demo", "--gpu", "--tokens", "10"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 16
    assert "did not put the cache on a GPU" in done.stderr
