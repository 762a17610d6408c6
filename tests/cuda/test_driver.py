"""The driver's binding: what GPUs there are, imports and their end, and every call that can fail."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshare import fds
from kvshare._native import cuda
from kvshare._native.cuda import Imported
from kvshare.errors import (
    LibraryError,
    LibraryNotFoundError,
    LocalProtocolError,
    NativeError,
    NotShareableError,
    RemoteProtocolError,
)
from tests.cuda.fake import FakeDriver, Memory

GRANULE = 65536

# one example runs after the other in one fake driver
same_driver = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


# -- devices -----------------------------------------------------------------------------------


def test_what_a_device_says(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_ATTRIBUTES", "124=0")
    driver = cuda.driver()
    (device,) = driver.devices()
    assert driver.version == "12.4"
    assert device.uuid == "GPU-40414243-4445-4647-4849-4a4b4c4d4e4f"
    assert (device.ordinal, device.name, device.compute_capability) == (0, "Fake GPU 0", "9.0")
    assert device.memory_nbytes == 1 << 30
    assert (device.vmm, device.posix_fd, device.dma_buf) == (True, True, False)
    assert cuda.driver() is driver


@pytest.mark.parametrize("order", ["0,1", "1,0", "1", "GPU-50515253-5455-5657-5859-5a5b5c5d5e5f,0"])
def test_a_uuid_finds_its_device_in_every_order(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", order)
    second = "GPU-50515253-5455-5657-5859-5a5b5c5d5e5f"
    found = cuda.driver().device(second)
    assert (found.name, found.uuid) == ("Fake GPU 1", second)
    assert found.ordinal == (1 if order == "0,1" else 0)
    assert cuda.driver().device(second.removeprefix("GPU-").upper()) == found


def test_a_device_that_is_not_visible(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(NotShareableError, match=r"GPU-404142.*it sees GPU-505152") as error:
        cuda.driver().device("GPU-40414243-4445-4647-4849-4a4b4c4d4e4f")
    assert "CUDA_VISIBLE_DEVICES" in (error.value.hint or "")


@pytest.mark.parametrize("uuid", ["", "0", "GPU-", "GPU-40414243-4445-4647-4849-4a4b4c4d4e4g", "é" * 32])
def test_what_is_no_uuid(fake: FakeDriver, uuid: str) -> None:
    with pytest.raises(RemoteProtocolError, match="UUID"):
        cuda.driver().device(uuid)


# -- a driver that is not there, too old, or broken ---------------------------------------------


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-nobody-has.so.1")
    with pytest.raises(LibraryNotFoundError, match="no CUDA driver") as error:
        cuda.driver()
    assert "NVIDIA driver" in (error.value.hint or "")


def test_an_old_driver(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_VERSION", "10020")
    with pytest.raises(LibraryError, match=r"supports CUDA 10\.2, kvshare needs 11\.4") as error:
        cuda.driver()
    assert error.value.hint == "update the NVIDIA driver"


def test_a_driver_without_a_function(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cuda.FUNCTIONS, "cuOfTomorrow", cuda.FUNCTIONS["cuInit"])
    with pytest.raises(LibraryError, match="has no cuOfTomorrow"):
        cuda.driver()


def test_no_device(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NotShareableError, match="no GPU") as error:
        cuda.driver()
    assert "CUDA_VISIBLE_DEVICES" in (error.value.hint or "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(cuda.driver().devices()) == 1  # a failure is not kept


def test_a_driver_that_does_not_fit_its_kernel_module(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", "cuInit=999")
    with pytest.raises(
        NativeError, match=r"cuInit: unknown error, CUDA_ERROR_UNKNOWN \(status 999\)"
    ) as error:
        cuda.driver()
    assert "nvidia-smi" in (error.value.hint or "")


# -- importing ---------------------------------------------------------------------------------


def test_what_one_writes_the_other_reads(fake: FakeDriver) -> None:
    with Memory(3 * GRANULE) as memory:
        imported = Imported(memory.fd.fileno(), memory.nbytes, memory.device.uuid)
        assert imported.address != memory.address
        memory.write(b"decoder", 2 * GRANULE)
        host = ctypes.create_string_buffer(b"provider", 8)
        imported.copy(ctypes.addressof(host), 8, 7, 8, 8, 1, to_device=True)
        assert imported.read([(2 * GRANULE, 7), (7, 8), (0, 0)]) == [b"decoder", b"provider", b""]
        assert memory.read(7, 8) == b"provider"
        imported.close()
        imported.close()
        for use in (imported.synchronize, lambda: imported.read([(0, 1)])):
            with pytest.raises(LocalProtocolError, match="closed"):
                use()


def test_the_host_cannot_read_it(library: Path) -> None:
    """As with a real GPU: what takes an address of the device for one of the host does not pass here."""
    script = """
import ctypes
from kvshare._native.cuda import Imported
from tests.cuda.fake import Memory
memory = Memory(1)
imported = Imported(memory.fd.fileno(), memory.nbytes, memory.device.uuid)
imported.read([(0, 1)])
print("alive", flush=True)
ctypes.string_at(imported.address, 1)
"""
    done = run(library, script)
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGSEGV)


def test_memory_lives_as_long_as_its_last_user(fake: FakeDriver) -> None:
    memory = Memory(GRANULE)
    memory.write(b"still here")
    with fds.OwnedFd(os.dup(memory.fd.fileno())) as fd:
        imported = Imported(fd.fileno(), memory.nbytes, memory.device.uuid)
    memory.close()
    assert imported.read([(0, 10)]) == [b"still here"]
    imported.close()


def test_what_nobody_refers_to_is_given_back(fake: FakeDriver) -> None:
    with Memory(GRANULE) as memory:
        before = fake.live()
        imported = Imported(memory.fd.fileno(), memory.nbytes, memory.device.uuid)
        assert fake.live() != before
        del imported
        gc.collect()
        assert fake.live() == before


STEPS = [
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_an_import_that_fails(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    with Memory(GRANULE) as memory:
        before = fake.live()
        monkeypatch.setenv("FAKE_CUDA_FAIL", f"{step}=2")
        with pytest.raises(NativeError, match="out of memory") as error:
            Imported(memory.fd.fileno(), memory.nbytes, memory.device.uuid)
        assert (error.value.function, error.value.status) == (step, 2)
        monkeypatch.delenv("FAKE_CUDA_FAIL")
        assert fake.live() == before


@pytest.mark.parametrize("step", ["cuCtxSynchronize", "cuCtxPushCurrent_v2"])
def test_a_close_that_fails_gives_back_the_rest(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A kernel's fault: from then on the context answers everything with it."""
    with Memory(GRANULE) as memory:
        before = fake.live()
        imported = Imported(memory.fd.fileno(), memory.nbytes, memory.device.uuid)
        monkeypatch.setenv("FAKE_CUDA_FAIL", f"{step}=700")
        with pytest.raises(NativeError, match="illegal memory access"):
            imported.close()
        monkeypatch.delenv("FAKE_CUDA_FAIL")
        assert fake.live() == before
        imported.close()


def test_the_nth_call_fails(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the fake itself."""
    with Memory(GRANULE) as memory, Memory(GRANULE) as other:
        n = fake.calls("cuMemMap")
        assert n == 2
        monkeypatch.setenv("FAKE_CUDA_FAIL", f"cuMemCreate=1,cuMemMap=2@{n + 2}")
        Imported(memory.fd.fileno(), memory.nbytes, memory.device.uuid).close()
        with pytest.raises(NativeError):
            Imported(other.fd.fileno(), other.nbytes, other.device.uuid)
        Imported(other.fd.fileno(), other.nbytes, other.device.uuid).close()


def test_what_is_no_memory_of_a_gpu(fake: FakeDriver) -> None:
    uuid = cuda.driver().devices()[0].uuid
    near, far = socket.socketpair()
    with near, far, fds.memfd_create("host", GRANULE) as memfd:
        near.send(b"hello")
        for fd in (memfd.fileno(), far.fileno()):
            with pytest.raises(NativeError, match="cuMemImportFromShareableHandle"):
                Imported(fd, GRANULE, uuid)


@pytest.mark.parametrize("nbytes", [1, GRANULE - 1, GRANULE + 4096, 3 * GRANULE])
def test_a_size_that_is_not_the_allocations(fake: FakeDriver, nbytes: int) -> None:
    with Memory(2 * GRANULE) as memory, pytest.raises(NativeError, match="invalid argument"):
        Imported(memory.fd.fileno(), nbytes, memory.device.uuid)


def test_the_thread_keeps_its_own_context(fake: FakeDriver) -> None:
    """What a framework has made current stays so."""
    with Memory(GRANULE) as memory:
        lib, current = cuda.driver().lib, ctypes.c_void_p()
        lib.cuCtxPushCurrent_v2(memory._context)
        imported = Imported(memory.fd.fileno(), memory.nbytes, memory.device.uuid)
        imported.read([(0, 1)])
        imported.close()
        assert lib.cuCtxPopCurrent_v2(ctypes.byref(current)) == 0
        assert current.value == memory._context.value
        assert "current" not in fake.live()


@same_driver
@given(
    n_granules=st.integers(1, 8),
    granule=st.sampled_from([4096, 16384, 65536, 1 << 21]),
    data=st.data(),
)
def test_any_size_any_granularity(
    fake: FakeDriver, n_granules: int, granule: int, data: st.DataObject
) -> None:
    """What does not fit is refused before the GPU sees it; what fits is what was written."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("FAKE_CUDA_GRANULARITY", str(granule))
        nbytes = n_granules * granule - data.draw(st.integers(0, granule - 1))
        with Memory(nbytes) as memory:
            assert memory.nbytes == n_granules * granule
            imported = Imported(memory.fd.fileno(), memory.nbytes, memory.device.uuid)
            offset = data.draw(st.integers(-1, memory.nbytes + 1))
            size = data.draw(st.integers(0, memory.nbytes + 1))
            content = os.urandom(64)
            memory.write(content, memory.nbytes - 64)
            if 0 <= offset <= offset + size <= memory.nbytes:
                assert imported.read([(offset, size)]) == [memory.read(offset, size)] or not size
            else:
                with pytest.raises(LocalProtocolError, match="do not lie in"):
                    imported.read([(0, 1), (offset, size)])
            assert imported.read([(memory.nbytes - 64, 64)]) == [content]
            imported.close()


# -- other processes ---------------------------------------------------------------------------


def run(
    library: Path, script: str, *arguments: str, pass_fds: Sequence[int] = ()
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(library.parent),
        "FAKE_CUDA_GRANULARITY": str(GRANULE),
    }
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        pass_fds=pass_fds,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


IMPORT = """
import ctypes, os, signal, sys
from kvshare._native.cuda import Imported, driver
fd, nbytes, uuid, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
imported = Imported(fd, nbytes, uuid)
host = ctypes.create_string_buffer(b"from the other process")
imported.copy(ctypes.addressof(host), 22, 100, 22, 22, 1, to_device=True)
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
print(imported.device.ordinal)
"""


@pytest.mark.parametrize("end", ["closed", "killed"])
def test_another_process(fake: FakeDriver, library: Path, end: str) -> None:
    """By the name of the library, as the real one is found."""
    with Memory(GRANULE) as memory:
        fd = memory.fd.fileno()
        done = run(library, IMPORT, str(fd), str(memory.nbytes), memory.device.uuid, end, pass_fds=[fd])
        assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
        assert memory.read(100, 22) == b"from the other process"


def test_another_process_with_another_order(
    fake: FakeDriver, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    with Memory(GRANULE, ordinal=1) as memory:
        fd = memory.fd.fileno()
        for order, ordinal in (("0,1", "1"), ("1,0", "0"), ("1", "0")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", order)
            arguments = [str(fd), str(memory.nbytes), memory.device.uuid, "closed"]
            done = run(library, IMPORT, *arguments, pass_fds=[fd])
            assert done.stdout.strip() == ordinal, done.stderr
