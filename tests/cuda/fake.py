"""The fake CUDA driver, as tests use it: what it counts, and memory as a decoder would make it."""

from __future__ import annotations

import ctypes
import re
import secrets
import subprocess
from ctypes import byref, c_char_p, c_int, c_long, c_size_t, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

from kvshare import fds
from kvshare._native import cuda
from kvshare.device import DevicePlace

SOURCE = Path(__file__).with_name("fake_driver.c")
BACKEND = Path(__file__).with_name("fake_backend.cpp")
KINDS = ("handles", "allocations", "ranges", "mappings", "pinned", "contexts", "current", "bytes")


def compile_driver(folder: Path) -> Path:
    """Compile it; return the library, which has the name that the real one is looked for by."""
    library = folder / "libcuda.so.1"
    subprocess.run(
        ["cc", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", SOURCE, "-o", library],
        check=True,
    )
    return library


def compile_library(lib_dir: Path, folder: Path) -> Path:
    """Make a libllama that has a CUDA backend, on the fake driver, of one that was built without.

    Args:
        lib_dir: of the build; its CMake folder is the one above, and names the source.
        folder: an empty one, where everything goes, the driver too.

    Returns:
        `folder`, for `KVSHARE_LIBRARY` and `LD_LIBRARY_PATH`.
    """
    cache = (lib_dir.parent / "CMakeCache.txt").read_text(encoding="utf-8")
    (source,) = re.findall(r"^CMAKE_HOME_DIRECTORY:INTERNAL=(.*)$", cache, re.MULTILINE)
    ggml = Path(source) / "ggml"
    compile_driver(folder)
    for name in ("libllama", "libggml-base", "libggml-cpu"):
        for file in lib_dir.glob(f"{name}.so*"):
            (folder / file.name).symlink_to(file.resolve())
    compiler = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{ggml}/include", f"-I{ggml}/src"]
    compiler += ["-DGGML_SHARED", "-DGGML_BACKEND_SHARED", f"-L{folder}", "-Wl,-rpath,$ORIGIN"]

    def link(name: str, *arguments: str) -> None:
        subprocess.run([*compiler, *arguments, f"-Wl,-soname,{name}", "-o", str(folder / name)], check=True)

    libraries = ("-lggml-cpu", "-lggml-base", "-l:libcuda.so.1", "-ldl")
    link("libggml-cuda.so", "-Wall", "-Wextra", "-Werror", str(BACKEND), *libraries)
    # the registry is compiled for the backends that it has
    registry = [str(ggml / "src" / f"ggml-backend-{name}.cpp") for name in ("reg", "dl")]
    backends = ("-DGGML_BUILD", "-DGGML_USE_CPU", "-DGGML_USE_CUDA")
    link("libggml.so.0", *backends, *registry, "-lggml-cuda", *libraries)
    return folder


class FakeDriver:
    """The library, loaded into this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lib = ctypes.CDLL(str(path))
        self.lib.fake_cuda_live.restype, self.lib.fake_cuda_live.argtypes = c_long, [c_char_p]
        self.lib.fake_cuda_calls.argtypes = [c_char_p]

    def live(self) -> dict[str, int]:
        """Count what has not been given back, what there is none of left out."""
        counts = {name: self.lib.fake_cuda_live(name.encode()) for name in KINDS}
        return {name: n for name, n in counts.items() if n}

    def calls(self, function: str) -> int:
        """Return how often a function was called."""
        return int(self.lib.fake_cuda_calls(function.encode()))

    def reset(self) -> None:
        self.lib.fake_cuda_reset()


class _AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", cuda._Location),
        ("win32_handle_meta_data", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Memory:
    """Memory of a GPU as a decoder makes it: created, mapped, exported.

    *Ownership*: owns all of it until `close`.
    """

    def __init__(self, nbytes: int, ordinal: int = 0) -> None:
        driver = cuda.driver()
        lib = self._lib = driver.lib
        self.device = driver.devices()[ordinal]
        prop = _AllocationProp(type=1, requested_handle_types=1, location=cuda._Location(1, ordinal))
        granularity = c_size_t()
        check(lib.cuMemGetAllocationGranularity(byref(granularity), byref(prop), 0))
        self.nbytes = -(-nbytes // granularity.value) * granularity.value
        self._context, self._handle, address, fd = c_void_p(), c_ulonglong(), c_ulonglong(), c_int()
        lib.cuDevicePrimaryCtxRetain(byref(self._context), ordinal)
        check(lib.cuMemCreate(byref(self._handle), c_size_t(self.nbytes), byref(prop), c_ulonglong(0)))
        lib.cuMemAddressReserve(byref(address), self.nbytes, 0, 0, 0)
        self.address = address.value
        lib.cuMemMap(self.address, self.nbytes, 0, self._handle, 0)
        access = cuda._AccessDesc(cuda._Location(1, ordinal), 3)
        lib.cuMemSetAccess(self.address, self.nbytes, byref(access), 1)
        check(lib.cuMemExportToShareableHandle(byref(fd), self._handle, 1, c_ulonglong(0)))
        self.fd = fds.OwnedFd(fd.value)
        self._number = 1 + secrets.randbelow(2**53 - 1)

    def place(self, tensors: Any = None) -> DevicePlace:
        """Return what its decoder says of it."""
        return DevicePlace(self.device.uuid, self.nbytes, self._number, tensors)

    def read(self, offset: int = 0, size: int | None = None) -> bytes:
        """Return bytes of it."""
        buffer = ctypes.create_string_buffer(self.nbytes - offset if size is None else size)
        self._lib.cuCtxPushCurrent_v2(self._context)
        self._lib.cuMemcpyDtoH_v2(buffer, self.address + offset, len(buffer))
        self._lib.cuCtxPopCurrent_v2(None)
        return buffer.raw

    def write(self, content: bytes, offset: int = 0) -> None:
        """Change bytes of it."""
        self._lib.cuCtxPushCurrent_v2(self._context)
        check(self._lib.cuMemcpyHtoD_v2(c_ulonglong(self.address + offset), content, c_size_t(len(content))))
        self._lib.cuCtxPopCurrent_v2(None)

    def close(self) -> None:
        self.fd.close()
        self._lib.cuMemUnmap(self.address, self.nbytes)
        self._lib.cuMemAddressFree(self.address, self.nbytes)
        self._lib.cuMemRelease(self._handle)
        self._lib.cuDevicePrimaryCtxRelease_v2(self.device.ordinal)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check(result: Any) -> None:
    """Of functions that the package does not use, and which are called as they are."""
    assert result == 0, result
