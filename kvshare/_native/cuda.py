"""The CUDA driver through ctypes: which GPUs there are, and memory of a GPU that came as a descriptor.

The driver, `libcuda.so.1`, is looked for when it is needed first. It is not the one that a framework may
have brought along: there is only one, and its *primary context* of a GPU is what frameworks compute in. What
is mapped here has therefore an address that all kernels of this process can use.

Theory of operation, as of memory that another process made with `cuMemCreate` and sent as a descriptor: the
descriptor becomes a *handle*, a *range* of addresses is reserved, the handle is mapped into the range, and
access is granted. Undone in the opposite order, by `Imported.close`, and by the kernel for a process that
dies. The memory lives as long as any process has a handle, a mapping or a descriptor of it.

*Source*: the CUDA driver API; its names and numbers are stable.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvshare._native.signatures import Function
from kvshare.errors import (
    LibraryError,
    LibraryNotFoundError,
    LocalProtocolError,
    NativeError,
    NotShareableError,
    RemoteProtocolError,
)

LIBRARY = "libcuda.so.1"
MIN_VERSION = 11040  # cuDeviceGetUuid_v2

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

# enum CUdevice_attribute
_COMPUTE_CAPABILITY = (75, 76)
_VMM_SUPPORTED = 102
_POSIX_FD_SUPPORTED = 103
_DMA_BUF_SUPPORTED = 124

_HANDLE_TYPE_POSIX_FD = 1  # of enum CUmemAllocationHandleType, a mask
_LOCATION_TYPE_DEVICE = 1
_ACCESS_READ_WRITE = 3
_MEMORY_HOST, _MEMORY_DEVICE = 1, 2  # enum CUmemorytype


class _Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", c_int)]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        *(("src_x", c_size_t), ("src_y", c_size_t), ("src_memory_type", c_int), ("src_host", c_void_p)),
        *(("src_device", c_ulonglong), ("src_array", c_void_p), ("src_pitch", c_size_t)),
        *(("dst_x", c_size_t), ("dst_y", c_size_t), ("dst_memory_type", c_int), ("dst_host", c_void_p)),
        *(("dst_device", c_ulonglong), ("dst_array", c_void_p), ("dst_pitch", c_size_t)),
        *(("width", c_size_t), ("height", c_size_t)),
    ]


_Uuid = ctypes.c_ubyte * 16


def _status(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """Raise for a CUresult that is not CUDA_SUCCESS; see `Driver`, which puts itself on each function."""
    if result != 0:
        raise NativeError(str(function.__name__), result, function.driver.describe(result))
    return result


def _function(*argtypes: Any) -> Function:
    return Function(c_int, list(argtypes), _status)


# a CUdevice is an int, a CUcontext a pointer, a CUdeviceptr and a CUmemGenericAllocationHandle are u64
FUNCTIONS: dict[str, Function] = {
    # CUresult cuInit(unsigned int Flags);
    "cuInit": _function(c_uint),
    # CUresult cuDriverGetVersion(int * driverVersion);
    "cuDriverGetVersion": _function(POINTER(c_int)),
    # CUresult cuDeviceGetCount(int * count);
    "cuDeviceGetCount": _function(POINTER(c_int)),
    # CUresult cuDeviceGet(CUdevice * device, int ordinal);
    "cuDeviceGet": _function(POINTER(c_int), c_int),
    # CUresult cuDeviceGetName(char * name, int len, CUdevice dev);
    "cuDeviceGetName": _function(c_char_p, c_int, c_int),
    # CUresult cuDeviceGetUuid_v2(CUuuid * uuid, CUdevice dev);
    "cuDeviceGetUuid_v2": _function(POINTER(_Uuid), c_int),
    # CUresult cuDeviceGetAttribute(int * pi, CUdevice_attribute attrib, CUdevice dev);
    "cuDeviceGetAttribute": _function(POINTER(c_int), c_int, c_int),
    # CUresult cuDeviceTotalMem_v2(size_t * bytes, CUdevice dev);
    "cuDeviceTotalMem_v2": _function(POINTER(c_size_t), c_int),
    # CUresult cuDevicePrimaryCtxRetain(CUcontext * pctx, CUdevice dev);
    "cuDevicePrimaryCtxRetain": _function(POINTER(c_void_p), c_int),
    # CUresult cuDevicePrimaryCtxRelease_v2(CUdevice dev);
    "cuDevicePrimaryCtxRelease_v2": _function(c_int),
    # CUresult cuCtxPushCurrent_v2(CUcontext ctx);
    "cuCtxPushCurrent_v2": _function(c_void_p),
    # CUresult cuCtxPopCurrent_v2(CUcontext * pctx);
    "cuCtxPopCurrent_v2": _function(POINTER(c_void_p)),
    # CUresult cuCtxSynchronize(void);
    "cuCtxSynchronize": _function(),
    # CUresult cuMemImportFromShareableHandle(
    #     CUmemGenericAllocationHandle * handle, void * osHandle, CUmemAllocationHandleType shHandleType);
    "cuMemImportFromShareableHandle": _function(POINTER(c_ulonglong), c_void_p, c_int),
    # CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
    "cuMemRelease": _function(c_ulonglong),
    # CUresult cuMemAddressReserve(
    #     CUdeviceptr * ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags);
    "cuMemAddressReserve": _function(POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    # CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size);
    "cuMemAddressFree": _function(c_ulonglong, c_size_t),
    # CUresult cuMemMap(
    #     CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
    #     unsigned long long flags);
    "cuMemMap": _function(c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    # CUresult cuMemUnmap(CUdeviceptr ptr, size_t size);
    "cuMemUnmap": _function(c_ulonglong, c_size_t),
    # CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc * desc, size_t count);
    "cuMemSetAccess": _function(c_ulonglong, c_size_t, POINTER(_AccessDesc), c_size_t),
    # CUresult cuMemcpyDtoH_v2(void * dstHost, CUdeviceptr srcDevice, size_t ByteCount);
    "cuMemcpyDtoH_v2": _function(c_void_p, c_ulonglong, c_size_t),
    # CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D * pCopy);
    "cuMemcpy2D_v2": _function(POINTER(_Copy2D)),
}


@dataclass(frozen=True)
class Device:
    """A GPU that this process sees.

    Attributes:
        ordinal: its number in this process, which `CUDA_VISIBLE_DEVICES` decides: of no use to another one.
        uuid: its name for every process, `GPU-` and 36 characters.
        name: what the vendor calls it.
        compute_capability: `9.0`.
        memory_nbytes: its memory.
        vmm: whether memory can be made and mapped in two steps, which is what sharing needs.
        posix_fd: whether such memory can be exported as a descriptor, likewise.
        dma_buf: whether it can be exported as a dma-buf for other drivers.
    """

    ordinal: int
    uuid: str
    name: str
    compute_capability: str
    memory_nbytes: int
    vmm: bool
    posix_fd: bool
    dma_buf: bool


class Driver:
    """The loaded driver. Made by `driver`.

    Attributes:
        version: the CUDA version that it supports, `12.4`.
        lib: the ctypes handle.
    """

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        for name in ("cuGetErrorName", "cuGetErrorString"):
            # CUresult cuGetErrorName(CUresult error, const char ** pStr);
            function = getattr(lib, name)
            function.restype, function.argtypes = c_int, [c_int, POINTER(c_char_p)]
        self._bind("cuDriverGetVersion")
        number = c_int()
        lib.cuDriverGetVersion(byref(number))
        self.version = _version(number.value)
        if number.value < MIN_VERSION:
            raise LibraryError(
                f"the CUDA driver supports CUDA {self.version}, kvshare needs {_version(MIN_VERSION)}",
                hint="update the NVIDIA driver",
            )
        for name in FUNCTIONS:
            self._bind(name)
        lib.cuInit(0)

    def _bind(self, name: str) -> None:
        function = getattr(self.lib, name, None)
        if function is None:
            raise LibraryError(f"the CUDA driver has no {name}", hint="update the NVIDIA driver")
        function.restype, function.argtypes, errcheck = FUNCTIONS[name]
        function.driver = self
        function.errcheck = errcheck

    def describe(self, result: int) -> str:
        """Return what a CUresult means."""
        texts = []
        for function in (self.lib.cuGetErrorString, self.lib.cuGetErrorName):
            text = c_char_p()
            function(result, byref(text))
            texts.append((text.value or b"unknown").decode(errors="replace"))
        return f"{texts[0]}, {texts[1]}"

    def devices(self) -> list[Device]:
        """Return the GPUs that this process sees, in its order."""
        count = c_int()
        self.lib.cuDeviceGetCount(byref(count))
        return [self._device(ordinal) for ordinal in range(count.value)]

    def device(self, uuid: str) -> Device:
        """Return the GPU of a UUID.

        Raises:
            RemoteProtocolError: it is no UUID.
            NotShareableError: this process does not see it.
        """
        wanted, found = _hex(uuid), self.devices()
        for each in found:
            if _hex(each.uuid) == wanted:
                return each
        raise NotShareableError(
            f"the memory lies on GPU {uuid}, which this process does not see; it sees "
            f"{', '.join(each.uuid for each in found) or 'none'}",
            hint="let CUDA_VISIBLE_DEVICES name it for this process as well",
        )

    def _device(self, ordinal: int) -> Device:
        handle = self.handle(ordinal)
        name, uuid, size = ctypes.create_string_buffer(256), _Uuid(), c_size_t()
        self.lib.cuDeviceGetName(name, len(name), handle)
        self.lib.cuDeviceGetUuid_v2(byref(uuid), handle)
        self.lib.cuDeviceTotalMem_v2(byref(size), handle)
        return Device(
            ordinal=ordinal,
            uuid=uuid_text(bytes(uuid)),
            name=name.value.decode(errors="replace"),
            compute_capability=".".join(str(self._attribute(each, handle)) for each in _COMPUTE_CAPABILITY),
            memory_nbytes=size.value,
            vmm=self._supports(_VMM_SUPPORTED, handle),
            posix_fd=self._supports(_POSIX_FD_SUPPORTED, handle),
            dma_buf=self._supports(_DMA_BUF_SUPPORTED, handle),
        )

    def handle(self, ordinal: int) -> int:
        """Return the CUdevice of an ordinal."""
        handle = c_int()
        self.lib.cuDeviceGet(byref(handle), ordinal)
        return handle.value

    def _attribute(self, attribute: int, handle: int) -> int:
        value = c_int()
        self.lib.cuDeviceGetAttribute(byref(value), attribute, handle)
        return value.value

    def _supports(self, attribute: int, handle: int) -> bool:
        with contextlib.suppress(NativeError):  # an older driver does not know what it does not support
            return self._attribute(attribute, handle) != 0
        return False


_lock = threading.Lock()
_drivers: dict[str, Driver] = {}


def driver() -> Driver:
    """Load the CUDA driver, or return it if it is loaded.

    Raises:
        LibraryNotFoundError: there is none.
        LibraryError: it is too old.
        NotShareableError: there is no GPU, or this process sees none.
        NativeError: it does not work.
    """
    with _lock:
        if LIBRARY not in _drivers:
            try:
                lib = ctypes.CDLL(LIBRARY)
            except OSError as error:
                raise LibraryNotFoundError(
                    f"there is no CUDA driver: {error}",
                    hint="install the NVIDIA driver; a container gets it with its GPUs (--gpus all)",
                ) from error
            try:
                _drivers[LIBRARY] = Driver(lib)
            except NativeError as error:
                if error.status == _NO_DEVICE:
                    raise NotShareableError(
                        "the CUDA driver finds no GPU", hint="look at CUDA_VISIBLE_DEVICES, run `nvidia-smi`"
                    ) from error
                error.hint = error.hint or "run `nvidia-smi`: driver and kernel module have to fit"
                raise
        return _drivers[LIBRARY]


def kernel_module_version() -> str | None:
    """Return the version of NVIDIA's kernel module, `550.54.15`, or None if there is none."""
    with contextlib.suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    return None


class Imported:
    """Memory of a GPU that another process made, mapped for reading and writing.

    *Ownership*: owns the handle, the range of addresses and a reference to the GPU's primary context until
    `close`; one that is collected closes itself. The descriptor stays the caller's, who may close it.

    Attributes:
        device: the GPU.
        address: where the memory starts, for kernels of this process.
        nbytes: how much is mapped.
    """

    def __init__(self, fd: int, nbytes: int, uuid: str) -> None:
        """Import a descriptor and map what it stands for.

        Args:
            fd: exported with `cuMemExportToShareableHandle`.
            nbytes: size to map, a multiple of the granularity.
            uuid: of the GPU that the memory lies on.

        Raises:
            LibraryError: there is no CUDA driver, or it is too old.
            RemoteProtocolError: that is no UUID.
            NotShareableError: this process does not see the GPU.
            NativeError: the driver refuses; nothing stays behind.
        """
        self._undo = contextlib.ExitStack()
        self._driver = driver()
        self.device = self._driver.device(uuid)
        self.nbytes = nbytes
        lib = self._driver.lib
        handle = self._driver.handle(self.device.ordinal)
        context, memory, address = c_void_p(), c_ulonglong(), c_ulonglong()
        with contextlib.ExitStack() as undo:  # in the opposite order, if a step fails
            lib.cuDevicePrimaryCtxRetain(byref(context), handle)
            undo.callback(lib.cuDevicePrimaryCtxRelease_v2, handle)
            self._context = context
            with self._current():
                lib.cuMemImportFromShareableHandle(byref(memory), fd, _HANDLE_TYPE_POSIX_FD)
                undo.callback(lib.cuMemRelease, memory)
                lib.cuMemAddressReserve(byref(address), nbytes, 0, 0, 0)
                undo.callback(lib.cuMemAddressFree, address, nbytes)
                lib.cuMemMap(address, nbytes, 0, memory, 0)
                undo.callback(lib.cuMemUnmap, address, nbytes)
                access = _AccessDesc(_Location(_LOCATION_TYPE_DEVICE, handle), _ACCESS_READ_WRITE)
                lib.cuMemSetAccess(address, nbytes, byref(access), 1)
            self._undo = undo.pop_all()
        self.address = address.value
        self._closed = False

    _closed = True  # until it is made

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """Make the GPU's primary context that of this thread, and give it back its own afterwards."""
        lib = self._driver.lib
        lib.cuCtxPushCurrent_v2(self._context)
        try:
            yield
        finally:
            lib.cuCtxPopCurrent_v2(byref(c_void_p()))

    def synchronize(self) -> None:
        """Wait until the GPU has done all that this process gave it, whatever framework did."""
        self.require_open()
        with self._current():
            self._driver.lib.cuCtxSynchronize()

    def read(self, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """Copy pieces `(offset, size)` to the host.

        Raises:
            LocalProtocolError: it is closed, or a piece does not lie inside.
        """
        self.require_open()
        for offset, size in pieces:
            self._require_inside(offset, size)
        buffer = ctypes.create_string_buffer(max((size for _, size in pieces), default=0) or 1)
        found = []
        with self._current():
            for offset, size in pieces:
                if size:
                    self._driver.lib.cuMemcpyDtoH_v2(buffer, self.address + offset, size)
                found.append(ctypes.string_at(buffer, size))
        return found

    def copy(
        self, host: int, host_pitch: int, offset: int, pitch: int, width: int, n_rows: int, *, to_device: bool
    ) -> None:
        """Copy rows between the host and the GPU, when it has done what it was given, and wait for it.

        Args:
            host: address of the first one on the host.
            host_pitch: bytes from one to the next there.
            offset: of the first one in this memory.
            pitch: bytes from one to the next here.
            width: bytes of a row.
            n_rows: how many.
            to_device: the direction.

        Raises:
            LocalProtocolError: it is closed, or a row does not lie inside.
        """
        self.require_open()
        if not width or not n_rows:
            return
        self._require_inside(offset, (n_rows - 1) * pitch + width)
        ends: dict[str, Any] = {}
        for end, is_device in (("src", not to_device), ("dst", to_device)):
            ends[f"{end}_memory_type"] = _MEMORY_DEVICE if is_device else _MEMORY_HOST
            ends[f"{end}_device" if is_device else f"{end}_host"] = (
                self.address + offset if is_device else host
            )
            ends[f"{end}_pitch"] = pitch if is_device else host_pitch
        lib = self._driver.lib
        with self._current():
            lib.cuCtxSynchronize()  # the streams of frameworks do not wait for this copy, nor it for them
            lib.cuMemcpy2D_v2(byref(_Copy2D(width=width, height=n_rows, **ends)))
            lib.cuCtxSynchronize()  # it returns when the host's memory may be used again

    def close(self) -> None:
        """Wait for the GPU, unmap, give everything back; idempotent.

        Raises:
            NativeError: a step failed, as they all do after a kernel's fault; the others were done.
        """
        if self._closed:
            return
        self._closed = True
        with self._undo, self._current():
            self._driver.lib.cuCtxSynchronize()  # what is computing here would fault

    def __del__(self) -> None:
        # the driver may be gone when the interpreter ends; the kernel gives everything back then
        with contextlib.suppress(NativeError, TypeError, AttributeError):
            self.close()

    def require_open(self) -> None:
        """Raise `LocalProtocolError` if it is closed."""
        if self._closed:
            raise LocalProtocolError("this mapping is closed")

    def _require_inside(self, offset: int, size: int) -> None:
        # an address that is not mapped would end the context, and every kernel in it
        if offset < 0 or size < 0 or offset + size > self.nbytes:
            raise LocalProtocolError(
                f"{size} bytes at {offset} do not lie in a mapping of {self.nbytes} bytes"
            )


def uuid_text(uuid: bytes) -> str:
    """Return 16 bytes as the name of a GPU."""
    digits = uuid.hex()
    return "-".join(("GPU", digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _hex(uuid: str) -> str:
    """Return the 32 digits of a UUID, which may begin with `GPU-` or `MIG-`."""
    digits = uuid.removeprefix("GPU-").removeprefix("MIG-").replace("-", "").lower()
    if len(digits) != 32 or not set(digits) <= set("0123456789abcdef"):
        raise RemoteProtocolError(f"{uuid[:80]!r} is not the UUID of a GPU")
    return digits
