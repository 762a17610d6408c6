"""Regions on a GPU at a provider that is not llama.cpp: views, their life, and what it vouches for."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvshare import fds, wire
from kvshare._native import cuda
from kvshare.device import DevicePlace, DeviceView
from kvshare.errors import (
    DescriptorError,
    KvshareError,
    LedgerDigestError,
    LibraryNotFoundError,
    LocalProtocolError,
    NativeError,
    NotShareableError,
    RemoteProtocolError,
)
from kvshare.layout import Layout, RegionLayout
from kvshare.mapping import layer_views, map_regions, plain_sample
from kvshare.provider import Offer
from kvshare.testing import FakeDecoder, FakeProvider
from kvshare.testing.fakes import FakeShare, fake_rows, plain_layout
from kvshare.testing.faults import send_framed
from tests.cuda.fake import FakeDriver, Memory

TOKENS = list(range(20))
GRANULE = 65536


class Gpu:
    """A decoder whose one region lies on the fake GPU; what it adopts is copied to a host decoder first.

    *Ownership*: owns the memory and the decoder until `close`.
    """

    def __init__(self, layout: Layout, ordinal: int = 0) -> None:
        self.decoder = FakeDecoder(layout=layout)
        self.size = layout.regions[0].size
        self.memory = Memory(self.size, ordinal)

    def entry(self, entry: wire.RegionEntry, **changes: Any) -> wire.RegionEntry:
        """Return the entry of a region on the GPU in place of the host's."""
        place = self.memory.place(entry.layout).to_json()
        return dataclasses.replace(entry, kind="cuda-vmm", layout=place | changes)

    def header(self, share: FakeShare, **changes: Any) -> wire.ShareHeader:
        """Return the header of a share, with changes to the `layout` of its region."""
        return dataclasses.replace(share.header, regions=(self.entry(share.header.regions[0], **changes),))

    def offer(self, share: FakeShare, **changes: Any) -> Offer:
        """Send a share and receive it."""
        near, far = socket.socketpair(socket.AF_UNIX)
        with near, far:
            sent = [self.memory.fd.fileno(), share.ledger.fileno()]
            send_framed(near, wire.encode(self.header(share, **changes)), sent)
            return Offer.receive(far)

    def adopt(self, share: FakeShare, tokens: list[int]) -> int:
        """Adopt what lies on the GPU."""
        os.pwrite(self.decoder._region.fileno(), self.memory.read(0, self.size), 0)
        return self.decoder.adopt(share, tokens).n_adopted

    def close(self) -> None:
        self.decoder.close()
        self.memory.close()

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def gpu(fake: FakeDriver) -> Iterator[Gpu]:
    with Gpu(plain_layout(n_layer=2, n_embd=64, kv_size=100)) as made:
        assert made.memory.nbytes != made.size  # whole granules are more than the region
        yield made


@pytest.fixture
def share(gpu: Gpu) -> Iterator[FakeShare]:
    with gpu.decoder.share(n_tokens=len(TOKENS)) as made:
        yield made


# -- the whole way -----------------------------------------------------------------------------


@pytest.mark.parametrize("v_trans", [False, True])
def test_a_provider_that_computes_on_the_host(fake: FakeDriver, v_trans: bool) -> None:
    """The one that fills host memory, unchanged."""
    with Gpu(plain_layout(n_embd=32, kv_size=300, v_trans=v_trans)) as gpu:
        with gpu.decoder.share(n_tokens=len(TOKENS)) as share, gpu.offer(share) as offer:
            assert offer.devices == [gpu.memory.device.uuid]
            FakeProvider(offer).serve(TOKENS)
            assert gpu.adopt(share, TOKENS) == len(TOKENS)
        given = gpu.decoder.logits()
        gpu.decoder.clear()
        gpu.decoder.prefill(TOKENS)
        assert gpu.decoder.logits() == given


def test_the_sample_covers_the_memory_of_the_gpu(gpu: Gpu, share: FakeShare) -> None:
    """What the decoder finds there is compared with what the provider vouched for."""
    with gpu.offer(share) as offer:
        FakeProvider(offer).serve(TOKENS)
    gpu.memory.write(b"\xff")
    with pytest.raises(LedgerDigestError, match="sample"):
        gpu.adopt(share, TOKENS)


def test_complete_waits_for_the_gpu(fake: FakeDriver, gpu: Gpu, share: FakeShare) -> None:
    with gpu.offer(share) as offer:
        offer.ledger.begin()
        offer.views()
        n_waits, n_copies = fake.calls("cuCtxSynchronize"), fake.calls("cuMemcpyDtoH_v2")
        offer.complete(TOKENS)
        assert fake.calls("cuCtxSynchronize") == n_waits + 1
        assert fake.calls("cuMemcpyDtoH_v2") > n_copies


def test_another_process_fills_it(gpu: Gpu, share: FakeShare, library: Path, tmp_path: Path) -> None:
    """The numpy provider of the tests with llama.cpp, which knows nothing of GPUs."""
    rows = {f"{kind}{il}": fake_rows(TOKENS, il, kind, 64) for il in range(2) for kind in ("k", "v")}
    np.savez(tmp_path / "rows.npz", **rows)  # type: ignore[arg-type]
    with fds.private_directory() as folder:
        path = folder / "p.sock"
        arguments = [str(path), str(tmp_path / "rows.npz"), json.dumps(TOKENS)]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.native.numpy_provider", *arguments],
            env={**os.environ, "LD_LIBRARY_PATH": str(library.parent)},
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            while not path.exists() and process.poll() is None:
                time.sleep(0.01)
            with fds.connect_unix(path) as connection:
                sent = [gpu.memory.fd.fileno(), share.ledger.fileno()]
                send_framed(connection, wire.encode(gpu.header(share)), sent)
                output, _ = process.communicate(timeout=60)
        assert json.loads(output)["ok"], output
    assert gpu.adopt(share, TOKENS) == len(TOKENS)


def test_regions_of_both_kinds(fake: FakeDriver) -> None:
    """Layer 0 on the host, layer 1 on the GPU; the digest is that of the same rows on the host."""
    whole = plain_layout(n_layer=2, n_embd=16, kv_size=50)
    tensors, size = whole.regions[0].tensors, whole.regions[0].size // 2
    moved = tuple(dataclasses.replace(tensor, offset=tensor.offset - size) for tensor in tensors[2:])
    layout = dataclasses.replace(whole, regions=(RegionLayout(size, tensors[:2]), RegionLayout(size, moved)))
    with (
        Memory(size) as memory,
        fds.memfd_create("host", size) as host,
        fds.memfd_create("copy", size) as copy,
    ):
        memory.write(bytes(size))
        place = memory.place()
        mappings = map_regions(layout, [(host, 0), (memory.fd, 0)], [None, place])
        first, second = layer_views(layout, mappings)
        assert isinstance(first.k, np.ndarray)
        assert isinstance(second.k, DeviceView)
        for layer in (first, second):
            for kind, view in (("k", layer.k), ("v", layer.v)):
                view[3:23] = fake_rows(TOKENS, layer.il, kind, 16)
        os.pwrite(copy.fileno(), memory.read(0, size), 0)
        copies = map_regions(layout, [(host, 0), (copy, 0)])
        expected = plain_sample(layout, copies, 3, 20)
        assert plain_sample(layout, mappings, 3, 20) == expected
        second.v[22:23] = 0
        assert plain_sample(layout, mappings, 3, 20) != expected
        del first, second, layer, view
        for each in (*mappings, *copies):
            each.close()


# -- rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize(
    ("type", "row", "dtype"),
    [
        ("f32", None, np.float32),
        ("f16", None, np.float16),
        ("bf16", None, np.uint16),
        ("q8_0", 34, np.uint8),
        ("q4_0", 18, np.uint8),
    ],
)
def test_a_row_lies_where_the_host_would_have_it(
    fake: FakeDriver, type: str, row: int | None, dtype: Any, v_trans: bool
) -> None:
    layout = plain_layout(n_layer=2, n_embd=32, kv_size=16, type=type, nbytes_per_row=row, v_trans=v_trans)
    size = layout.regions[0].size
    rng = np.random.default_rng(1)
    with Memory(size) as memory, fds.memfd_create("host", size) as host:
        memory.write(bytes(size))
        place = memory.place()
        mappings = [*map_regions(layout, [(host, 0)]), *map_regions(layout, [(memory.fd, 0)], [place])]
        for here, there in zip(*(layer_views(layout, [each]) for each in mappings), strict=True):
            for near, far in ((here.k, there.k), (here.v, there.v)):
                assert (near.shape, near.strides, near.dtype) == (far.shape, far.strides, far.dtype)
                assert far.dtype == dtype
                rows = rng.integers(0, 200, (5, near.shape[1])).astype(dtype)
                near[3:8] = far[3:8] = rows
                assert (far.read(3, 8) == rows).all()
                assert (far.read(0, 16) == near).all()
        assert memory.read(0, size) == os.pread(host.fileno(), size, 0)
        del here, there, near, far
        for each in mappings:
            each.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    n_embd=st.integers(1, 40),
    kv_size=st.integers(1, 70),
    type=st.sampled_from(["f32", "f16"]),
    v_trans=st.booleans(),
    granule=st.sampled_from([4096, 65536]),
    data=st.data(),
)
def test_rows_of_any_cache(
    fake: FakeDriver,
    n_embd: int,
    kv_size: int,
    type: str,
    v_trans: bool,
    granule: int,
    data: st.DataObject,
) -> None:
    """Written on the GPU and on the host: the same bytes and the same digest, whatever the granularity."""
    layout = plain_layout(n_layer=1, n_embd=n_embd, kv_size=kv_size, type=type, v_trans=v_trans)
    size = layout.regions[0].size
    first = data.draw(st.integers(0, kv_size - 1))
    n = data.draw(st.integers(1, kv_size - first))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("FAKE_CUDA_GRANULARITY", str(granule))
        with Memory(size) as memory, fds.memfd_create("host", size) as host:
            memory.write(bytes(memory.nbytes))
            place = memory.place()
            (near,), (far,) = (
                map_regions(layout, [(host, 0)]),
                map_regions(layout, [(memory.fd, 0)], [place]),
            )
            for mapped in (near, far):
                (layer,) = layer_views(layout, [mapped])
                for i, view in enumerate((layer.k, layer.v)):
                    view[first : first + n] = np.arange(n * n_embd).reshape(n, n_embd) % 999 + i
            assert memory.read() == os.pread(host.fileno(), size, 0) + bytes(memory.nbytes - size)
            assert plain_sample(layout, [near], first, n) == plain_sample(layout, [far], first, n)
            del layer, view
            near.close()
            far.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda view: view.__setitem__(3, 1), "in a row"),
        (lambda view: view.__setitem__(slice(0, 8, 2), 1), "in a row"),
        (lambda view: view.__setitem__(slice(-1, 3), 1), "not in"),
        (lambda view: view.__setitem__(slice(0, 101), 1), "not in"),
        (lambda view: view.__setitem__(slice(5, 4), 1), "not in"),
        (lambda view: view.__setitem__(slice(0, 2), np.zeros((3, 64))), "shape"),
        (lambda view: view.__setitem__(slice(0, 2), np.zeros((2, 63))), "shape"),
        (lambda view: view.read(0, 101), "not in"),
    ],
)
def test_rows_that_are_none(
    fake: FakeDriver, gpu: Gpu, share: FakeShare, change: Callable[[DeviceView], None], said: str
) -> None:
    before = gpu.memory.read()
    with gpu.offer(share) as offer, pytest.raises(LocalProtocolError, match=said):
        change(offer.views()[0].k)
    gc.collect()
    assert gpu.memory.read() == before


# -- what frameworks see -----------------------------------------------------------------------


@pytest.mark.parametrize("v_trans", [False, True])
def test_the_cuda_array_interface(fake: FakeDriver, v_trans: bool) -> None:
    with (
        Gpu(plain_layout(n_layer=2, n_embd=64, kv_size=100, v_trans=v_trans)) as gpu,
        gpu.decoder.share(n_tokens=4) as share,
        gpu.offer(share) as offer,
    ):
        layer = offer.views()[1]
        (mapped,) = offer._mapped()
        base = mapped.memory.address  # type: ignore[union-attr]
        k, v = layer.k.__cuda_array_interface__, layer.v.__cuda_array_interface__
        tensors = offer.layout.regions[0].tensors
        assert k == {
            "shape": (100, 64),
            "typestr": "<f2",
            "data": (base + tensors[2].offset, False),
            "version": 3,
            "strides": (128, 2),
            "stream": None,
        }
        assert v["data"] == (base + tensors[3].offset, False)
        assert v["strides"] == ((2, 200) if v_trans else (128, 2))
        del layer


# -- life --------------------------------------------------------------------------------------


def test_close_is_refused_while_a_view_lives(fake: FakeDriver, gpu: Gpu, share: FakeShare) -> None:
    before = fake.live()
    offer = gpu.offer(share)
    view = offer.views()[0].k
    with pytest.raises(LocalProtocolError, match="still in use") as error:
        offer.close()
    assert error.value.hint
    view[0:1] = 1  # nothing was closed: it is as good as before
    del view
    offer.close()
    offer.close()
    assert fake.live() == before


def test_an_error_in_a_block_gives_everything_back(fake: FakeDriver, gpu: Gpu, share: FakeShare) -> None:
    before = fake.live()

    def body() -> None:
        with gpu.offer(share) as offer:
            view = offer.views()[0].k
            view[0:1] = 1
            raise ZeroDivisionError("a bug of the provider")

    with pytest.raises(ZeroDivisionError, match="a bug of the provider"):
        body()
    gc.collect()
    assert fake.live() == before
    assert "a bug of the provider" in share.ledger.snapshot().error


def test_a_gpu_that_fails_gives_the_rest_back(
    fake: FakeDriver, gpu: Gpu, share: FakeShare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kernel's fault: all descriptors are closed, and the block's own error is what is seen."""

    def body(error: Exception | None) -> None:
        with gpu.offer(share) as offer:
            offer.views()
            gc.collect()
            monkeypatch.setenv("FAKE_CUDA_FAIL", "cuCtxSynchronize=700")
            if error:
                raise error

    for error in (None, ZeroDivisionError("a bug of the provider")):
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(NativeError if error is None else ZeroDivisionError):
            body(error)
        monkeypatch.delenv("FAKE_CUDA_FAIL")
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


def test_an_unmap_that_fails_as_well(fake: FakeDriver, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was wrong first is what is seen."""
    region = RegionLayout(gpu.size, ())
    layout = dataclasses.replace(plain_layout(), regions=(region, region))
    place = gpu.memory.place()
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"cuMemMap=2@{fake.calls('cuMemMap') + 2},cuCtxSynchronize=700")
    with pytest.raises(NativeError, match="cuMemMap"):
        map_regions(layout, [(gpu.memory.fd, 0)] * 2, [place] * 2)


def test_a_second_region_that_cannot_be_mapped(
    fake: FakeDriver, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's mapping is gone as well."""
    region = RegionLayout(gpu.size, ())
    layout = dataclasses.replace(plain_layout(), regions=(region, region))
    place = gpu.memory.place()
    before = fake.live()
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"cuMemMap=2@{fake.calls('cuMemMap') + 2}")
    with pytest.raises(NativeError, match="cuMemMap"):
        map_regions(layout, [(gpu.memory.fd, 0)] * 2, [place] * 2)
    assert fake.live() == before


def test_many_cycles_leave_nothing(fake: FakeDriver, gpu: Gpu) -> None:
    before, n_fds = fake.live(), len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with gpu.decoder.share(n_tokens=len(TOKENS)) as share:
            with gpu.offer(share) as offer:
                FakeProvider(offer).serve(TOKENS)
            assert gpu.adopt(share, TOKENS) == len(TOKENS)
            gpu.decoder.clear()
        assert fake.live() == before
    assert len(os.listdir("/proc/self/fd")) == n_fds


# -- what is refused ---------------------------------------------------------------------------


def test_without_a_driver(gpu: Gpu, share: FakeShare, monkeypatch: pytest.MonkeyPatch) -> None:
    """The offer says so when its memory is needed, and can be declined."""
    with gpu.offer(share) as offer:
        monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-nobody-has.so.1")
        with pytest.raises(LibraryNotFoundError, match="no CUDA driver"):
            offer.views()


GPU = "GPU-50515253-5455-5657-5859-5a5b5c5d5e5f"


def test_a_gpu_that_this_process_does_not_see(gpu: Gpu, share: FakeShare) -> None:
    with (
        gpu.offer(share, device=GPU) as offer,
        pytest.raises(NotShareableError, match="does not see"),
    ):
        offer.views()


PLACES = {
    "no object": [],
    "no device": {"mapped_size": GRANULE, "tensors": []},
    "no size": {"device": GPU, "tensors": []},
    "no tensors": {"device": GPU, "mapped_size": GRANULE},
    "a device that is a number": {"device": 0, "mapped_size": GRANULE, "tensors": []},
    "a device of a few digits": {"device": "GPU-0", "mapped_size": GRANULE, "tensors": []},
    "a device in other letters": {"device": GPU.replace("5a", "5A"), "mapped_size": GRANULE, "tensors": []},
    "a device with more dashes": {"device": GPU + "-" * 9, "mapped_size": GRANULE, "tensors": []},
    "a size that is true": {"device": GPU, "mapped_size": True, "tensors": []},
    "a size that is negative": {"device": GPU, "mapped_size": -1, "tensors": []},
    "a memory of no number": {"device": GPU, "mapped_size": GRANULE, "tensors": [], "memory": 0},
    "a memory that is a double": {"device": GPU, "mapped_size": GRANULE, "tensors": [], "memory": 1.0},
    "a size that is huge": {"device": GPU, "mapped_size": 1 << 63, "tensors": []},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_place_that_is_none(place: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="region"):
        DevicePlace.from_json(place)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text() | st.just(GPU),
        lambda each: (
            st.lists(each)
            | st.dictionaries(st.sampled_from(["device", "mapped_size", "tensors", "memory"]), each)
        ),
    )
)
def test_any_json_is_a_place_or_an_error(value: Any) -> None:
    try:
        place = DevicePlace.from_json(value)
    except RemoteProtocolError:
        return
    assert place.to_json().items() <= value.items()


@given(st.binary(min_size=16, max_size=16), st.integers(1, 2**63 - 1), st.none() | st.integers(1, 2**53 - 1))
def test_a_place_comes_back(uuid: bytes, size: int, memory: int | None) -> None:
    place = DevicePlace(cuda.uuid_text(uuid), size, memory, [])
    assert DevicePlace.from_json(json.loads(json.dumps(place.to_json()))) == place


def test_an_allocation_that_is_smaller_than_its_region(gpu: Gpu, share: FakeShare) -> None:
    with pytest.raises(RemoteProtocolError, match="exceeds its allocation"):
        gpu.offer(share, mapped_size=gpu.size - 1)


def test_a_size_that_is_a_lie(fake: FakeDriver, gpu: Gpu, share: FakeShare) -> None:
    """More than was allocated: the driver refuses to map it."""
    before = fake.live()
    with gpu.offer(share, mapped_size=gpu.memory.nbytes + GRANULE) as offer, pytest.raises(NativeError):
        offer.views()
    assert fake.live() == before


def test_a_tensor_outside_of_its_region(fake: FakeDriver, gpu: Gpu) -> None:
    """Nothing outside is read, even if it is mapped: on a GPU that would be the end of the context."""
    layout = gpu.decoder.layout
    region = layout.regions[0]
    odd = dataclasses.replace(region.tensors[-1], offset=region.size - 100)
    layout = dataclasses.replace(
        layout, regions=(dataclasses.replace(region, tensors=(*region.tensors[:-1], odd)),)
    )
    place = gpu.memory.place()
    with map_regions(layout, [(gpu.memory.fd, 0)], [place])[0] as mapped:
        with pytest.raises(KvshareError, match="offset"):
            layer_views(layout, [mapped])
        n = fake.calls("cuMemcpyDtoH_v2")
        with pytest.raises(RemoteProtocolError, match="do not lie in a region"):
            plain_sample(layout, [mapped], 0, 10)
        assert fake.calls("cuMemcpyDtoH_v2") == n
        gc.collect()


def test_a_region_that_is_shared_twice(fake: FakeDriver, gpu: Gpu, share: FakeShare) -> None:
    """Through two descriptors of one allocation; two allocations are two, though no inode tells."""
    first = gpu.entry(share.header.regions[0])
    ledger = dataclasses.replace(share.header.ledger, fd=2)
    layout = dataclasses.replace(gpu.decoder.layout, regions=gpu.decoder.layout.regions * 2)
    header = dataclasses.replace(share.header, layout=layout.digest(), ledger=ledger)
    with Memory(gpu.size) as other:
        for memory in (gpu.memory, other):
            place = memory.place(first.layout["tensors"]).to_json()  # type: ignore[index]
            second = dataclasses.replace(first, fd=1, layout=place)
            near, far = socket.socketpair(socket.AF_UNIX)
            with near, far:
                sent = [gpu.memory.fd.fileno(), memory.fd.fileno(), share.ledger.fileno()]
                message = wire.encode(dataclasses.replace(header, regions=(first, second)))
                send_framed(near, message, sent)
                if memory is other:
                    Offer.receive(far).close()
                else:
                    with pytest.raises(RemoteProtocolError, match="overlap"):
                        Offer.receive(far)


def test_a_warm_provider_knows_the_memory(fake: FakeDriver, gpu: Gpu, share: FakeShare) -> None:
    """Sent again it is the same; another allocation is not, nor one that does not say which it is."""
    with gpu.offer(share) as offer, gpu.offer(share) as again, gpu.offer(share, memory=None) as unknown:
        assert offer.memory() == again.memory()
        assert offer.memory() != unknown.memory()
        assert unknown.memory() != unknown.memory()
    with Memory(gpu.size) as other:
        mine, gpu.memory = gpu.memory, other
        with gpu.offer(share) as another:
            assert offer.memory() != another.memory()
        gpu.memory = mine


def test_a_descriptor_of_the_host(fake: FakeDriver, gpu: Gpu, share: FakeShare) -> None:
    """A memfd that claims to be memory of a GPU, and memory of a GPU that claims to be a memfd."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        sent = [gpu.decoder._region.fileno(), share.ledger.fileno()]
        send_framed(near, wire.encode(gpu.header(share)), sent)
        with Offer.receive(far) as offer, pytest.raises(NativeError, match="Import"):
            offer.views()
        send_framed(near, wire.encode(share.header), [gpu.memory.fd.fileno(), share.ledger.fileno()])
        with pytest.raises(DescriptorError, match="no memfd"):
            Offer.receive(far)
