"""DLPack: an array in a GPU's memory for PyTorch, CuPy, JAX and the like, without a copy.

A capsule holds a `DLManagedTensor`. Whoever consumes it calls the tensor's deleter when done; until then
the array, and with it the mapping, is kept alive here. A capsule that nobody consumes does so itself.

*Source*: `DLManagedTensor` of dlpack.h, version 0.x, which every consumer takes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p, py_object
from typing import Any

CUDA = 2
"""kDLCUDA of enum DLDeviceType."""

# enum DLDataTypeCode and bits, by ggml type; rows of other types are bytes
_TYPES = {"f32": (2, 32), "f16": (2, 16), "bf16": (4, 16)}
_BYTES = (1, 8)

_NAME = b"dltensor"  # a consumer renames the capsule


class _Device(ctypes.Structure):
    """DLDevice."""

    _fields_ = [("device_type", c_int32), ("device_id", c_int32)]


class _DataType(ctypes.Structure):
    """DLDataType."""

    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", c_void_p),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = [("dl_tensor", _Tensor), ("manager_ctx", c_void_p), ("deleter", c_void_p)]


# what consumers hold: the struct and what keeps its memory, by its address
_held: dict[int, tuple[_ManagedTensor, object]] = {}


def _delete(managed: int) -> None:
    """End of a tensor; from any thread, at any time."""
    if _held is not None:  # else the interpreter ends
        _held.pop(managed, None)


# pointers here, not objects: the capsule is being destroyed
_is_valid = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


def _drop(capsule: int) -> None:
    """End of a capsule; one that was consumed has another name."""
    if _is_valid(capsule, _NAME):
        _held.pop(_pointer_of(capsule, _NAME), None)


# called from C, and so never collected
_deleter = ctypes.CFUNCTYPE(None, c_void_p)(_delete)
_destructor = ctypes.PYFUNCTYPE(None, c_void_p)(_drop)
_new_capsule = ctypes.PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", ctypes.pythonapi))


def capsule(
    owner: object, address: int, ordinal: int, shape: Sequence[int], strides: Sequence[int], type: str
) -> Any:
    """Return a capsule for an array in the memory of a GPU.

    Args:
        owner: kept alive until the consumer is done.
        address: of the first element.
        ordinal: of the GPU, in this process.
        shape: elements per dimension, the slowest first.
        strides: from one to the next, elements.
        type: ggml type name.
    """
    code, bits = _TYPES.get(type, _BYTES)
    dims = c_int64 * len(shape)
    arrays = dims(*shape), dims(*strides)
    managed = _ManagedTensor(
        _Tensor(address, _Device(CUDA, ordinal), len(shape), _DataType(code, bits, 1), *arrays, 0),
        None,
        ctypes.cast(_deleter, c_void_p),
    )
    at = ctypes.addressof(managed)
    _held[at] = managed, (owner, arrays)
    try:
        return _new_capsule(at, _NAME, ctypes.cast(_destructor, c_void_p))
    except BaseException:
        del _held[at]
        raise
