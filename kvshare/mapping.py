"""Map shared regions, and see the K and V of every layer in them as arrays.

This is what a provider needs that does not use llama.cpp: rows that are written through a view are
in the decoder's cache. A view keeps its mapping alive, and `Mapping.close` refuses while one exists,
so there is no pointer into memory that is gone. Memory of the host is seen as numpy arrays, memory of a
GPU through `device.DeviceView`.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kvshare.device import DeviceMapping, DevicePlace
from kvshare.errors import (
    DescriptorError,
    KvshareError,
    LayoutMismatchError,
    LocalProtocolError,
    NotShareableError,
    RemoteProtocolError,
)
from kvshare.fds import OwnedFd, fd_size, require_seals
from kvshare.layout import Layout, TensorLayout

View = Any
"""A numpy array, or a `DeviceView` for memory of a GPU."""

# numpy has no bfloat16: its bits are seen as uint16; rows of a quantized type are seen as bytes
_DTYPES: dict[str, np.dtype[Any]] = {
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
}

_TENSOR_NAME = re.compile(r"cache_(?P<kind>[kv])_l(?P<il>\d+)")

_EXTENT = struct.Struct("<IQQ")
_MAX_SAMPLES = 1024
_PIECE_NBYTES = 64


class Mapping:
    """A region, mapped for reading and writing.

    *Ownership*: owns the mapping, not the descriptor, which may be closed after this.
    """

    def __init__(self, fd: int, offset: int, size: int) -> None:
        """Map a region.

        Args:
            fd: a memfd that is sealed against shrinking.
            offset: start of the region in bytes, a multiple of the page size.
            size: bytes.

        Raises:
            DescriptorError: not sealed, the region does not lie in the descriptor, or it cannot be mapped
                for reading and writing.
        """
        require_seals(fd)
        if offset + size > fd_size(fd):
            raise DescriptorError(
                f"a region of {size} bytes at {offset} does not lie in a descriptor of {fd_size(fd)} bytes"
            )
        if offset % mmap.ALLOCATIONGRANULARITY:
            raise DescriptorError(f"a region at {offset} does not start at a page")
        try:
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)
        except OSError as error:
            raise DescriptorError(f"a region of {size} bytes cannot be mapped: {error.strerror}") from error

    @property
    def buffer(self) -> mmap.mmap:
        """The mapped bytes."""
        if self._map.closed:
            raise LocalProtocolError("this mapping is closed")
        return self._map

    def view(
        self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
    ) -> npt.NDArray[Any]:
        """Return an array over the region: where it starts, its shape, and its strides in bytes."""
        ends = [(n - 1) * stride for n, stride in zip(shape, strides, strict=True)]
        nbytes = dtype.itemsize + sum(ends) if 0 not in shape else 0
        data = np.frombuffer(self.buffer, np.uint8, nbytes, offset)  # holds on to the mapping
        view: npt.NDArray[Any] = np.ndarray(shape, dtype, data, strides=strides)
        return view

    def read(self, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return pieces `(offset, size)` of the region."""
        return [self.buffer[offset : offset + size] for offset, size in pieces]

    def close(self) -> None:
        """Unmap; idempotent.

        Raises:
            LocalProtocolError: a view into the mapping still exists; nothing was closed.
        """
        try:
            self._map.close()
        except BufferError:
            raise LocalProtocolError(
                "a numpy view of this mapping is still in use",
                hint="drop the views (del, end of scope) first",
            ) from None

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


AnyMapping = Mapping | DeviceMapping


@dataclass(frozen=True)
class LayerView:
    """K and V of one layer, over the shared memory: numpy arrays, or `DeviceView`s if it is that of a GPU.

    Attributes:
        il: index of the layer in the model.
        k: keys, one row a cell: numpy shape `[kv_size, n_embd_k_gqa]`, `[n_stream, kv_size, n_embd_k_gqa]`
            with several streams (ggml order `[n_embd_k_gqa, kv_size, n_stream]`).
        v: values, the same shape with `n_embd_v_gqa`, also where they lie transposed (the strides tell);
            None for models that keep no V.

    The last dimension of a quantized cache is the bytes of a row, dtype uint8.
    """

    il: int
    k: View
    v: View


@overload
def map_regions(layout: Layout, regions: Sequence[tuple[OwnedFd | int, int]]) -> list[Mapping]: ...
@overload
def map_regions(
    layout: Layout, regions: Sequence[tuple[OwnedFd | int, int]], places: Sequence[DevicePlace | None]
) -> list[AnyMapping]: ...
def map_regions(
    layout: Layout,
    regions: Sequence[tuple[OwnedFd | int, int]],
    places: Sequence[DevicePlace | None] | None = None,
) -> Any:
    """Map all regions of a layout.

    Args:
        layout: describes them.
        regions: descriptor and offset in bytes of each.
        places: where each lies; None is the host, for one and for all.

    Raises:
        DescriptorError: a descriptor is not what its region needs; nothing stays mapped.
        KvshareError: memory of a GPU cannot be mapped, see `_native.cuda.Imported`.

    *Ownership*: the caller closes the mappings.
    """
    mappings: list[AnyMapping] = []
    places = [None] * len(layout.regions) if places is None else places
    try:
        for region, (fd, offset), place in zip(layout.regions, regions, places, strict=True):
            number = fd if isinstance(fd, int) else fd.fileno()
            if place is None:
                mappings.append(Mapping(number, offset, region.size))
            else:
                mappings.append(DeviceMapping(number, offset, region.size, place))
    except BaseException:
        for mapping in mappings:
            with contextlib.suppress(KvshareError):
                mapping.close()
        raise
    return mappings


def layer_views(layout: Layout, mappings: Sequence[AnyMapping]) -> list[LayerView]:
    """Return the K and V of every layer that has a KV cache, in the order of the layers.

    Raises:
        LayoutMismatchError: a tensor does not lie in its region.
        RemoteProtocolError: the layout contradicts itself.
    """
    v_trans = any(cache.get("v_trans") for cache in layout.caches)
    found: dict[int, dict[str, View]] = {}
    for region, mapping in zip(layout.regions, mappings, strict=True):
        for tensor in region.tensors:
            match = _TENSOR_NAME.fullmatch(tensor.name)
            if match:
                kind, il = match["kind"], int(match["il"])
                found.setdefault(il, {})[kind] = _view(
                    tensor, mapping, region.size, transposed=kind == "v" and v_trans
                )
    for il, each in found.items():
        if "k" not in each:
            raise RemoteProtocolError(f"the layout has a cache_v_l{il}, but no cache_k_l{il}")
    return [LayerView(il, each["k"], each.get("v")) for il, each in sorted(found.items())]


def _view(tensor: TensorLayout, mapping: AnyMapping, region_size: int, *, transposed: bool) -> View:
    n_embd, kv_size, n_stream, _ = tensor.ne
    if tensor.offset + tensor.nbytes > region_size:
        raise LayoutMismatchError(f"{tensor.name}.offset", f"<= {region_size - tensor.nbytes}", tensor.offset)
    dtype = _DTYPES.get(tensor.type, np.dtype(np.uint8))
    n_items = n_embd if tensor.type in _DTYPES else tensor.nb[1]  # of a row
    item, row = dtype.itemsize, n_items * dtype.itemsize
    if tensor.nbytes != row * kv_size * n_stream:
        raise RemoteProtocolError(f"{tensor.name}: ne {tensor.ne} and nb {tensor.nb} contradict each other")
    shape: tuple[int, ...] = (n_stream, kv_size, n_items)
    strides: tuple[int, ...] = (row * kv_size, row, item)
    if transposed and tensor.type in _DTYPES:
        strides = (row * kv_size, item, item * kv_size)
    if n_stream == 1:
        shape, strides = shape[1:], strides[1:]
    return mapping.view(tensor.offset, shape, strides, dtype)


def plain_sample(layout: Layout, mappings: Sequence[AnyMapping], first: int, n_tokens: int) -> bytes:
    """Return the digest that vouches for cells of a plain cache, for the ledger.

    The digest runs over extents `(region, offset, size)`: the K rows of every layer, then the V rows
    of every layer; where V is transposed, the values of each embedding dimension. Every
    `ceil(n_extents / 1024)`-th extent is hashed: region as u32, offset and size as u64, little-endian,
    then its bytes if there are up to 192, else 64 at its start, at `(size // 2) & ~63` and at its end.

    Args:
        layout: of the shared regions.
        mappings: of the regions, in their order.
        first: first filled cell.
        n_tokens: number of filled cells.

    Raises:
        NotShareableError: the cache is not a plain one.

    *Source*: `llama_kv_share_sample` of the patch series.
    """
    if len(layout.caches) != 1 or not layout.caches[0].is_plain:
        raise NotShareableError(
            "only a plain KV cache can be filled without llama.cpp",
            hint="use kvshare.Provider, which serves every kind of cache",
        )
    extents = list(_plain_extents(layout, first, n_tokens))
    sampled = extents[:: -(-len(extents) // _MAX_SAMPLES) or 1]
    pieces: list[list[tuple[int, int]]] = [[] for _ in mappings]
    for region, offset, size in sampled:
        pieces[region] += _pieces(offset, size)
    # all of a region at once: a GPU is waited for once
    data = [iter(mapping.read(each)) for mapping, each in zip(mappings, pieces, strict=True)]
    digest = hashlib.sha256()
    for region, offset, size in sampled:
        digest.update(_EXTENT.pack(region, offset, size))
        for _ in _pieces(offset, size):
            digest.update(next(data[region]))
    return digest.digest()


def _pieces(offset: int, size: int) -> list[tuple[int, int]]:
    """Return the pieces of an extent that are hashed, offset and size of each."""
    if size <= 3 * _PIECE_NBYTES:
        return [(offset, size)]
    middle = size // 2 // _PIECE_NBYTES * _PIECE_NBYTES
    return [(offset + start, _PIECE_NBYTES) for start in (0, middle, size - _PIECE_NBYTES)]


def _plain_extents(layout: Layout, first: int, n_tokens: int) -> Iterator[tuple[int, int, int]]:
    v_trans = layout.caches[0].get("v_trans")
    for kind in "kv":
        for index, region in enumerate(layout.regions):
            for tensor in region.tensors:
                match = _TENSOR_NAME.fullmatch(tensor.name)
                if not match or match["kind"] != kind:
                    continue
                n_embd, kv_size, _, _ = tensor.ne
                if kind == "k" or not v_trans:
                    yield index, tensor.offset + first * tensor.nb[1], n_tokens * tensor.nb[1]
                elif n_tokens == kv_size:
                    yield index, tensor.offset, tensor.nbytes  # neighbours grow together
                else:
                    for j in range(n_embd):
                        start = tensor.offset + (first + j * kv_size) * tensor.nb[0]
                        yield index, start, n_tokens * tensor.nb[0]
