"""Regions in the memory of a GPU: what their entry says, their mapping, and arrays over it.

A `DeviceView` is an array that this process's kernels can use and the host cannot: `torch.as_tensor`,
`cupy.asarray` and whatever else knows the CUDA array interface make their own array of it without a copy.
A provider that computes on the host assigns rows to a range of cells, as it would with a numpy view: they
are copied.

There is no DLPack here: its consumers call a C function when they are done, also while an exception passes
through, and a Python function in its place would swallow that.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvshare._native import cuda
from kvshare.errors import DescriptorError, LocalProtocolError, RemoteProtocolError
from kvshare.layout import Json

_UUID = re.compile("GPU(-[0-9a-f]{8})(-[0-9a-f]{4}){3}(-[0-9a-f]{12})")


@dataclass(frozen=True)
class DevicePlace:
    """Where a region of kind `cuda-vmm` lies: the `layout` of its entry on the wire.

    Attributes:
        device: UUID of the GPU, `GPU-` and 36 characters; its number means nothing to another process.
        mapped_size: bytes of the allocation: whole granules, all of which are mapped.
        memory: random, in [1, 2**53); the same number is the same allocation, which its descriptors do not
            tell. None if the decoder does not say it: then no two are the same.
        tensors: what is the whole `layout` of a region on the host. Only this is part of the layout digest.
    """

    device: str
    mapped_size: int
    memory: int | None
    tensors: Json

    def to_json(self) -> Json:
        """Return the `layout` of the region's entry."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, value: Json) -> DevicePlace:
        """Read the `layout` of a peer's entry; anything else raises `RemoteProtocolError`."""
        if not isinstance(value, dict):
            raise RemoteProtocolError("the layout of a region on a GPU is not an object")
        device, size, memory = value.get("device"), value.get("mapped_size"), value.get("memory")
        if not isinstance(device, str) or not _UUID.fullmatch(device):
            raise RemoteProtocolError("region.device is not the UUID of a GPU")
        if type(size) is not int or not 0 < size < 2**63:
            raise RemoteProtocolError("region.mapped_size is not a size")
        if memory is not None and (type(memory) is not int or not 0 < memory < 2**53):
            raise RemoteProtocolError("region.memory is not an integer in [1, 2**53)")
        if "tensors" not in value:
            raise RemoteProtocolError("region.tensors is missing")
        return cls(device, size, memory, value["tensors"])

    @property
    def identity(self) -> object:
        """What is equal for the same allocation, and for nothing else."""
        return object() if self.memory is None else (self.device, self.memory)


class DeviceView:
    """K or V of one layer in the memory of a GPU.

    *Ownership*: keeps its mapping alive, as does every array that a framework makes of it.

    Attributes:
        shape: as of the numpy view of a region on the host, see `mapping.LayerView`.
        strides: bytes from one to the next, likewise.
        dtype: numpy's; bfloat16 is seen as uint16.
        device: the GPU.
    """

    def __init__(
        self,
        mapping: DeviceMapping,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.device = mapping.memory.device
        self._mapping = mapping
        self._offset = offset

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3 of the protocol; nothing is pending on any stream."""
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "version": 3,
            "strides": self.strides,
            "stream": None,
        }

    def __setitem__(self, cells: slice, rows: npt.ArrayLike) -> None:
        """Copy rows from the host into some cells, and wait until they are there.

        Args:
            cells: `first:last`.
            rows: of the host, or what numpy can make `[last - first, n_embd]` of; of a quantized cache, the
                bytes of the rows.

        Raises:
            LocalProtocolError: not such a range, several streams, other dimensions, or closed.
        """
        first, last = self._range(cells)
        shape = (last - first, self.shape[1])
        try:
            data = np.broadcast_to(np.asarray(rows, self.dtype), shape)
        except ValueError as error:
            raise LocalProtocolError(f"these rows do not have the shape {shape}: {error}") from error
        self._copy(first, np.ascontiguousarray(data.T if self._is_transposed else data), to_device=True)

    def read(self, first: int, last: int) -> npt.NDArray[Any]:
        """Copy the rows of the cells `[first, last)` to the host.

        Raises:
            LocalProtocolError: not such a range, several streams, or closed.
        """
        first, last = self._range(slice(first, last))
        shape = (last - first, self.shape[1])
        data = np.empty(shape[::-1] if self._is_transposed else shape, self.dtype)
        self._copy(first, data, to_device=False)
        return data.T if self._is_transposed else data

    @property
    def _address(self) -> int:
        return self._mapping.memory.address + self._offset

    @property
    def _is_transposed(self) -> bool:
        return self.strides[-1] != self.dtype.itemsize

    def _copy(self, first: int, data: npt.NDArray[Any], *, to_device: bool) -> None:
        """Copy lines of what lies in the order of the memory: rows, or what all rows have in one place."""
        n_lines, n = data.shape
        width = n * self.dtype.itemsize
        self._mapping.memory.copy(
            data.ctypes.data,
            width,
            self._offset + first * self.strides[0],
            self.strides[1] if self._is_transposed else width,  # rows lie one behind the other
            width,
            n_lines,
            to_device=to_device,
        )

    def _range(self, cells: slice) -> tuple[int, int]:
        if len(self.shape) != 2:
            raise LocalProtocolError("a cache of several streams has no rows")
        if not isinstance(cells, slice) or cells.step not in (None, 1):
            raise LocalProtocolError("only cells in a row can be copied", hint="use view[first:last] = rows")
        first, last = cells.start or 0, self.shape[0] if cells.stop is None else cells.stop
        if not 0 <= first <= last <= self.shape[0]:
            raise LocalProtocolError(f"cells [{first}, {last}) are not in [0, {self.shape[0]})")
        return first, last


class DeviceMapping:
    """A region on a GPU, mapped for reading and writing.

    *Ownership*: owns the mapping, not the descriptor, which may be closed after this.

    Attributes:
        memory: the mapped memory.
    """

    def __init__(self, fd: int, offset: int, size: int, place: DevicePlace) -> None:
        """Map a region.

        Args:
            fd: exported by the CUDA driver of the decoder.
            offset: start of the region in bytes.
            size: bytes.
            place: where it lies.

        Raises:
            DescriptorError: the region does not lie in what is mapped.
            KvshareError: it cannot be mapped, see `_native.cuda.Imported`.
        """
        if offset + size > place.mapped_size:
            raise DescriptorError(
                f"a region of {size} bytes at {offset} does not lie in an allocation "
                f"of {place.mapped_size} bytes"
            )
        self.memory = cuda.Imported(fd, place.mapped_size, place.device)
        self._offset = offset
        self._size = size
        self._views: weakref.WeakSet[DeviceView] = weakref.WeakSet()

    def view(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> DeviceView:
        """Return an array over the region; see `DeviceView` for the arguments, `offset` in bytes.

        Raises:
            LocalProtocolError: closed.
        """
        self.memory.require_open()
        view = DeviceView(self, self._offset + offset, shape, strides, dtype)
        self._views.add(view)
        return view

    def read(self, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """Copy pieces `(offset, size)` of the region to the host, when the GPU has done what it was given.

        Raises:
            LocalProtocolError: closed.
            RemoteProtocolError: a piece does not lie in the region.
        """
        for offset, size in pieces:
            if offset + size > self._size:
                raise RemoteProtocolError(
                    f"{size} bytes at {offset} do not lie in a region of {self._size} bytes"
                )
        self.memory.synchronize()
        return self.memory.read([(self._offset + offset, size) for offset, size in pieces])

    def close(self) -> None:
        """Unmap, when the GPU has done what it was given; idempotent.

        Raises:
            LocalProtocolError: a view into the mapping still exists; nothing was closed.
            NativeError: the CUDA driver failed; what could be given back was.
        """
        if self._views:
            raise LocalProtocolError(
                "a view of this mapping, or an array made of it, is still in use",
                hint="drop the arrays (del, end of scope) first",
            )
        self.memory.close()

    def __enter__(self) -> DeviceMapping:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
