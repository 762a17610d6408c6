"""Mappings and views: where a row lies, how long a view lives, what is not mapped at all."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from kvshare import fds, mapping
from kvshare.errors import (
    DescriptorError,
    LayoutMismatchError,
    LocalProtocolError,
    NotShareableError,
    RemoteProtocolError,
)
from kvshare.layout import CacheLayout, Layout, RegionLayout
from kvshare.mapping import Mapping, layer_views, map_regions, plain_sample
from kvshare.provider import Offer
from kvshare.testing import FakeDecoder, FakeProvider
from kvshare.testing.fakes import plain_layout
from kvshare.testing.faults import shorter_memfd, unsealed_memfd

PAGE = 4096


@pytest.fixture
def memory() -> Iterator[fds.OwnedFd]:
    with fds.memfd_create("test", 64 * PAGE) as fd:
        yield fd


def streams(layout: Layout, n_stream: int) -> Layout:
    """Return a layout of a plain cache with several streams of the same size."""
    tensors = []
    offset = 0
    for tensor in layout.regions[0].tensors:
        ne, nb = tensor.ne, tensor.nb
        size = nb[2] * n_stream
        tensors.append(
            dataclasses.replace(
                tensor, ne=(ne[0], ne[1], n_stream, 1), nb=(nb[0], nb[1], nb[2], size), offset=offset
            )
        )
        offset += size
    cache = layout.caches[0]
    attributes = tuple(sorted({**dict(cache.attributes), "n_stream": n_stream}.items()))
    return dataclasses.replace(
        layout,
        caches=(CacheLayout("kv", cache.size, attributes),),
        regions=(RegionLayout(offset, tuple(tensors)),),
    )


# -- views -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("type", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", np.uint16)])
@pytest.mark.parametrize("v_trans", [False, True])
def test_a_row_lies_where_the_layout_says(
    memory: fds.OwnedFd, type: str, dtype: type[np.generic], v_trans: bool
) -> None:
    """Written through a view, read back with plain offsets."""
    layout = plain_layout(n_layer=2, n_embd=8, kv_size=16, type=type, v_trans=v_trans)
    size = np.dtype(dtype).itemsize
    mappings = map_regions(layout, [(memory, 0)])
    views = layer_views(layout, mappings)
    assert [view.il for view in views] == [0, 1]
    for view in views:
        assert view.v is not None
        assert view.k.shape == view.v.shape == (16, 8)
        assert view.k.dtype == view.v.dtype == dtype
        assert view.k.strides == (8 * size, size)
        assert view.v.strides == ((size, 16 * size) if v_trans else (8 * size, size))
        assert view.k.flags.writeable
        for kind, array in (("k", view.k), ("v", view.v)):
            array[5] = np.arange(8) + 10 * view.il + (kind == "v")
    content = os.pread(memory.fileno(), layout.regions[0].size, 0)
    for tensor in layout.regions[0].tensors:
        transposed = v_trans and tensor.name.startswith("cache_v")
        at = [tensor.offset + ((j * 16 + 5) if transposed else (5 * 8 + j)) * size for j in range(8)]
        found = [np.frombuffer(content, dtype, 1, offset)[0] for offset in at]
        il, is_v = int(tensor.name[-1]), tensor.name.startswith("cache_v")
        assert [float(x) for x in found] == [j + 10 * il + is_v for j in range(8)]
    assert np.frombuffer(content, dtype).astype(bool).sum() <= 4 * 8  # and nowhere else
    del view, views, array
    for each in mappings:
        each.close()


@pytest.mark.parametrize(("type", "row"), [("q8_0", 34), ("q4_0", 18)])
def test_quantized_rows_are_bytes(memory: fds.OwnedFd, type: str, row: int) -> None:
    layout = plain_layout(n_layer=1, n_embd=32, kv_size=16, type=type, nbytes_per_row=row)
    [mapped] = map_regions(layout, [(memory, 0)])
    [view] = layer_views(layout, [mapped])
    assert view.v is not None
    assert view.k.shape == view.v.shape == (16, row)
    assert view.k.dtype == np.uint8
    assert view.k.strides == (row, 1)
    view.v[3] = 7
    del view
    mapped.close()
    content = os.pread(memory.fileno(), layout.regions[0].size, 0)
    assert content.index(7) == layout.regions[0].tensors[1].offset + 3 * row
    assert content.count(7) == row


@pytest.mark.parametrize("v_trans", [False, True])
def test_several_streams(memory: fds.OwnedFd, v_trans: bool) -> None:
    layout = streams(plain_layout(n_layer=1, n_embd=4, kv_size=8, v_trans=v_trans), 3)
    [mapped] = map_regions(layout, [(memory, 0)])
    [view] = layer_views(layout, [mapped])
    assert view.v is not None
    assert view.k.shape == view.v.shape == (3, 8, 4)
    view.v[2, 5, 1] = 1
    tensor = layout.regions[0].tensors[1]
    within = (1 * 8 + 5) if v_trans else (5 * 4 + 1)
    content = np.frombuffer(os.pread(memory.fileno(), layout.regions[0].size, 0), np.float16)
    assert np.flatnonzero(content).tolist() == [tensor.offset // 2 + 2 * 32 + within]
    del view
    mapped.close()


def test_a_model_without_v(memory: fds.OwnedFd) -> None:
    """MLA keeps one tensor a layer."""
    layout = plain_layout(n_layer=2, n_embd=8, kv_size=16)
    region = layout.regions[0]
    keys = tuple(tensor for tensor in region.tensors if "_k_" in tensor.name)
    layout = dataclasses.replace(layout, regions=(dataclasses.replace(region, tensors=keys),))
    [mapped] = map_regions(layout, [(memory, 0)])
    assert [(view.il, view.v) for view in layer_views(layout, [mapped])] == [(0, None), (1, None)]
    gc.collect()
    mapped.close()


def test_layers_come_in_order(memory: fds.OwnedFd) -> None:
    """Also with ten and more of them, and with other tensors between."""
    layout = plain_layout(n_layer=12, n_embd=2, kv_size=4)
    region = layout.regions[0]
    tensors = list(reversed(region.tensors))
    for i in (4, 5):  # a recurrent layer
        tensors[i] = dataclasses.replace(tensors[i], name=f"cache_{'rs'[i - 4]}_l9")
    layout = dataclasses.replace(layout, regions=(dataclasses.replace(region, tensors=tuple(tensors)),))
    [mapped] = map_regions(layout, [(memory, 0)])
    found = [view.il for view in layer_views(layout, [mapped])]
    assert found == [il for il in range(12) if il != 9]
    mapped.close()


def test_a_tensor_outside_of_its_region(memory: fds.OwnedFd) -> None:
    layout = plain_layout(n_layer=1, n_embd=8, kv_size=16)
    region = layout.regions[0]
    last = dataclasses.replace(region.tensors[-1], offset=region.size - 1)
    layout = dataclasses.replace(
        layout, regions=(dataclasses.replace(region, tensors=(region.tensors[0], last)),)
    )
    [mapped] = map_regions(layout, [(memory, 0)])
    with pytest.raises(LayoutMismatchError) as error:
        layer_views(layout, [mapped])
    assert error.value.field == "cache_v_l0.offset"
    del error
    gc.collect()
    mapped.close()


@pytest.mark.parametrize(
    ("ne", "nb"),
    [
        ((8, 16, 1, 1), (2, 16, 256, 128)),  # smaller than its elements
        ((8, 16, 1, 1), (2, 16, 256, 512)),  # larger
        ((8, 2**40, 1, 1), (2, 16, 256, 256)),
    ],
)
def test_a_tensor_that_contradicts_itself(
    memory: fds.OwnedFd, ne: tuple[int, int, int, int], nb: tuple[int, int, int, int]
) -> None:
    """A peer's layout is checked by its digest, not by its sense: views must not trust it."""
    layout = plain_layout(n_layer=1, n_embd=8, kv_size=16)
    region = layout.regions[0]
    odd = dataclasses.replace(region.tensors[0], ne=ne, nb=nb)
    layout = dataclasses.replace(
        layout, regions=(dataclasses.replace(region, tensors=(odd, *region.tensors[1:])),)
    )
    [mapped] = map_regions(layout, [(memory, 0)])
    with pytest.raises(RemoteProtocolError, match="contradict"):
        layer_views(layout, [mapped])
    gc.collect()
    mapped.close()


# -- life ------------------------------------------------------------------------------------------


def test_close_is_refused_while_a_view_lives(memory: fds.OwnedFd) -> None:
    layout = plain_layout(n_layer=1, n_embd=8, kv_size=16)
    [mapped] = map_regions(layout, [(memory, 0)])
    row = layer_views(layout, [mapped])[0].k[3]  # also a view of a view
    with pytest.raises(LocalProtocolError, match="still in use") as error:
        mapped.close()
    assert error.value.hint
    row[:] = 1.5  # nothing was closed: it is as good as before
    assert os.pread(memory.fileno(), 2, 3 * 16) == np.float16(1.5).tobytes()
    del row
    mapped.close()
    mapped.close()


def test_after_close_there_is_nothing_to_view(memory: fds.OwnedFd) -> None:
    layout = plain_layout(n_layer=1, n_embd=8, kv_size=16)
    [mapped] = map_regions(layout, [(memory, 0)])
    mapped.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        layer_views(layout, [mapped])
    with pytest.raises(LocalProtocolError, match="closed"):
        _ = mapped.buffer


def test_a_view_outlives_whoever_made_it() -> None:
    """The descriptor is closed, the mapping has no other name: the view keeps the memory."""
    layout = plain_layout(n_layer=1, n_embd=8, kv_size=16)
    fd = fds.memfd_create("test", PAGE)
    view = layer_views(layout, map_regions(layout, [(fd, 0)]))[0].k
    os.pwrite(fd.fileno(), np.float16(2).tobytes(), 0)
    fd.close()
    gc.collect()
    assert view[0, 0] == 2
    view[15] = 3
    assert view[15].tolist() == [3] * 8


def test_a_view_of_a_closed_decoder() -> None:
    """Over the whole chain: an offer refuses to close, and a decoder that closed takes nothing away."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, FakeDecoder() as decoder, decoder.share(n_tokens=4) as share:
        share.send(near)
        offer = Offer.receive(far)
        view = offer.views()[0].k
        with pytest.raises(LocalProtocolError, match="still in use"):
            offer.close()
        decoder.close()
        view[0] = 1
        assert view[0].all()
        del view
        offer.close()


def test_an_error_in_a_block_is_the_one_that_is_raised() -> None:
    """Also if the frames of the error hold views, so that the offer cannot unmap yet."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, FakeDecoder() as decoder, decoder.share(n_tokens=4) as share:
        share.send(near)
        n_before = len(os.listdir("/proc/self/fd"))

        def body() -> None:
            with Offer.receive(far) as offer:
                view = offer.views()[0].k
                view[0] = 1
                raise ZeroDivisionError("a bug of the provider")

        with pytest.raises(ZeroDivisionError, match="a bug of the provider"):
            body()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == n_before
        assert "a bug of the provider" in share.ledger.snapshot().error


# -- what is not mapped ----------------------------------------------------------------------------


def test_the_region_has_to_lie_in_the_descriptor(memory: fds.OwnedFd) -> None:
    for offset, size in ((0, 64 * PAGE + 1), (PAGE, 64 * PAGE), (64 * PAGE, PAGE), (2**62, PAGE)):
        with pytest.raises(DescriptorError, match="does not lie in"):
            Mapping(memory.fileno(), offset, size)
    Mapping(memory.fileno(), 63 * PAGE, PAGE).close()


def test_the_region_has_to_start_at_a_page(memory: fds.OwnedFd) -> None:
    with pytest.raises(DescriptorError, match="page"):
        Mapping(memory.fileno(), 512, PAGE)


def test_an_unsealed_descriptor_is_refused(memory: fds.OwnedFd) -> None:
    with unsealed_memfd(memory.fileno()) as unsealed, pytest.raises(DescriptorError, match="F_SEAL_SHRINK"):
        Mapping(unsealed.fileno(), 0, PAGE)


def test_what_is_no_memfd_is_refused() -> None:
    with open("/dev/zero", "r+b") as file, pytest.raises(DescriptorError):
        Mapping(file.fileno(), 0, PAGE)


def test_nothing_stays_mapped_after_a_refusal(memory: fds.OwnedFd) -> None:
    """The second region is too short; the first one's mapping is gone as well."""
    region = RegionLayout(64 * PAGE, ())
    layout = dataclasses.replace(plain_layout(), regions=(region, region))

    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("memfd:test" in line for line in maps)

    with shorter_memfd(memory.fileno(), PAGE) as shorter:
        with pytest.raises(DescriptorError):
            map_regions(layout, [(memory, 0), (shorter, 0)])
        assert mapped() == 0


# -- the sample digest -------------------------------------------------------------------------------


def by_hand(layout: Layout, content: bytes, extents: Sequence[tuple[int, int]]) -> bytes:
    """Hash extents as the C header and `plain_sample` describe it."""
    digest = hashlib.sha256()
    for offset, size in extents:
        digest.update(struct.pack("<IQQ", 0, offset, size))
        data = content[offset : offset + size]
        if size <= 192:
            digest.update(data)
        else:
            middle = (size // 2) & ~63
            digest.update(data[:64] + data[middle : middle + 64] + data[-64:])
    return digest.digest()


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize(("first", "n"), [(0, 1), (2, 5), (0, 16)])
def test_the_sample_covers_these_bytes(memory: fds.OwnedFd, v_trans: bool, first: int, n: int) -> None:
    layout = plain_layout(n_layer=2, n_embd=32, kv_size=16, v_trans=v_trans)
    content = np.random.default_rng(1).bytes(layout.regions[0].size)
    os.pwrite(memory.fileno(), content, 0)
    k0, v0, k1, v1 = layout.regions[0].tensors
    extents = [(tensor.offset + first * 64, n * 64) for tensor in (k0, k1)]
    for tensor in (v0, v1):
        if not v_trans:
            extents.append((tensor.offset + first * 64, n * 64))
        elif n == 16:
            extents.append((tensor.offset, tensor.nbytes))
        else:
            extents += [(tensor.offset + (j * 16 + first) * 2, n * 2) for j in range(32)]
    with map_regions(layout, [(memory, 0)])[0] as mapped:
        assert plain_sample(layout, [mapped], first, n) == by_hand(layout, content, extents)


def test_many_extents_are_sampled(memory: fds.OwnedFd) -> None:
    """More than 1,024: every third here."""
    layout = plain_layout(n_layer=1, n_embd=2100, kv_size=16, v_trans=True)
    content = np.random.default_rng(1).bytes(layout.regions[0].size)
    os.pwrite(memory.fileno(), content, 0)
    k, v = layout.regions[0].tensors
    extents = [(k.offset, 3 * 4200)] + [(v.offset + j * 32, 6) for j in range(2100)]
    with map_regions(layout, [(memory, 0)])[0] as mapped:
        assert plain_sample(layout, [mapped], 0, 3) == by_hand(layout, content, extents[::3])


def test_the_sample_sees_the_first_and_the_last_row(memory: fds.OwnedFd) -> None:
    layout = plain_layout(n_layer=2, n_embd=64, kv_size=16)
    with map_regions(layout, [(memory, 0)])[0] as mapped:
        before = plain_sample(layout, [mapped], 0, 10)
        for tensor in layout.regions[0].tensors:
            for at in (0, 10 * 128 - 1):
                mapped.buffer[tensor.offset + at] = 1
                changed = plain_sample(layout, [mapped], 0, 10)
                assert changed != before
                before = changed
        mapped.buffer[10 * 128] = 1  # behind the last row
        assert plain_sample(layout, [mapped], 0, 10) == before


def test_only_plain_caches_have_a_plain_sample(memory: fds.OwnedFd) -> None:
    layout = streams(plain_layout(n_layer=1, n_embd=4, kv_size=8), 2)
    with (
        map_regions(layout, [(memory, 0)])[0] as mapped,
        pytest.raises(NotShareableError, match="plain") as error,
    ):
        plain_sample(layout, [mapped], 0, 1)
    assert error.value.hint


# -- hooks of the fakes ------------------------------------------------------------------------------


def test_the_hooks_of_the_fakes() -> None:
    """They are called when they say, with what they say."""
    near, far = socket.socketpair(socket.AF_UNIX)
    steps: list[object] = []
    with (
        near,
        far,
        FakeDecoder(before_adopt=lambda share, record: steps.append(record.n_filled)) as decoder,
        decoder.share(n_tokens=20) as share,
    ):
        share.send(near)
        with Offer.receive(far) as offer:
            provider = FakeProvider(
                offer,
                step=8,
                before_rows=lambda _, n: steps.append(n),
                before_complete=lambda provider: steps.append(len(provider.tokens)),
            )
            provider.serve(list(range(20)))
        decoder.adopt(share, list(range(20)))
    assert steps == [0, 8, 16, 20, 20]


def test_mapping_is_a_context_manager(memory: fds.OwnedFd) -> None:
    with mapping.Mapping(memory.fileno(), 0, PAGE) as mapped:
        mapped.buffer[0] = 1
    with pytest.raises(LocalProtocolError):
        _ = mapped.buffer
