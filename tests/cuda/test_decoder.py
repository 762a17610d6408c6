"""What a decoder says of its regions on a GPU, where the library's answers are known."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from kvshare import wire
from kvshare.decoder import Decoder
from kvshare.device import DevicePlace
from kvshare.testing.fakes import plain_layout

UUID = bytes(range(16))
NAME = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


class Library:
    """The functions that a header is made from: region 0 lies on the host, region 1 on a GPU."""

    def __init__(self) -> None:
        self.memory = (1 << 60) + 5

    def llama_kv_share_regions(self, _context: Any, _seq_id: int, regions: Any, n_max: int) -> int:
        assert n_max >= 2
        for index in range(2):
            regions[index].fd, regions[index].kind = 10 + index, index
            regions[index].offset, regions[index].size = 0, 4096
        return 2

    def llama_kv_share_device(
        self, _context: Any, _seq_id: int, i_region: int, uuid: Any, mapped: Any, memory: Any
    ) -> int:
        assert i_region == 1
        memory._obj.value = self.memory
        if uuid is not None:
            ctypes.memmove(uuid, UUID, 16)
            mapped._obj.value = 65536
        return 0

    def llama_kv_share_params(self, _context: Any, _seq_id: int, _params: Any) -> int:
        return 0


def decoder(library: Library) -> Decoder:
    made = Decoder.__new__(Decoder)
    made.layout = plain_layout()
    made.devices = []
    made.context = SimpleNamespace(handle=None)  # type: ignore[assignment]
    made._lib = library
    made._semantics = SimpleNamespace(read=lambda: ("{}", "0" * 64))  # type: ignore[assignment]
    made._layout_digest, made._caches = "0" * 64, "[]"
    made._tensors, made._templates, made._descriptors = [["a"], ["b"]], {}, {}
    return made


def test_regions_of_both_kinds() -> None:
    made = decoder(Library())
    host, device = made._template(0, bytes(32), strict=False).regions
    assert (host.kind, host.layout) == ("memfd", ["a"])
    assert device == wire.RegionEntry(1, 0, 4096, DevicePlace(NAME, 65536, 5, ["b"]).to_json(), "cuda-vmm")
    assert made.devices == [NAME]
    assert made._descriptors[0] == (10, 11)


def test_fresh_memory_has_another_number() -> None:
    """It takes the place of what was sent, with the same descriptor number: the header has to change."""
    library = Library()
    made = decoder(library)
    first = made._template(0, bytes(32), strict=False)
    assert made._template(0, bytes(32), strict=False) is first
    library.memory += 1
    second = made._template(0, bytes(32), strict=False)
    assert second is not first
    assert second.regions[0] == first.regions[0]
    assert DevicePlace.from_json(second.regions[1].layout).memory == 6
    library.memory = 0  # it does not say
    assert DevicePlace.from_json(made._template(0, bytes(32), strict=False).regions[1].layout).memory is None
