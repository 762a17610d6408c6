"""What a provider can read: the descriptors of one slot, searched for what llama.cpp keeps of the others.

What is searched for comes from llama.cpp itself, which saves the K, V and states of a sequence without
knowing of regions: 16 bytes are 8 values of f16, too many to be found by chance. What is searched are all
bytes of all descriptors, not only those that the header speaks of.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvshare import Context, Decoder, Model, Offer, Provider, Share, fds, wire

pytestmark = pytest.mark.native

PARAMS: dict[str, Any] = {"n_ctx": 1536, "n_batch": 64, "n_ubatch": 64, "n_seq_max": 3, "n_threads": 1}
SHARED, OTHERS = 1, (0, 2)

# no token occurs in two prompts, because a V row of the first layer depends on nothing but its token; and
# all lie within the windows of these models, because llama.cpp does not save what has left its window
N_PROMPT = 32
PROMPTS = [list(range(N_PROMPT * seq_id, N_PROMPT * (seq_id + 1))) for seq_id in range(3)]

PIECE_NBYTES = 16
N_DISTINCT = 10  # bytes; zeros, counts and positions have fewer, and tell no sequence from another


def kept(context: Context, seq_id: int) -> set[bytes]:
    """Return, in pieces, what llama.cpp saves of a sequence."""
    llama = context.library.llama
    size = llama.llama_state_seq_get_size(context.pointer, seq_id)
    buffer = (ctypes.c_uint8 * size)()
    assert llama.llama_state_seq_get_data(context.pointer, buffer, size, seq_id) == size
    state = bytes(buffer)
    pieces = {state[i : i + PIECE_NBYTES] for i in range(0, size, PIECE_NBYTES)}
    return {piece for piece in pieces if len(set(piece)) >= N_DISTINCT}


def readable(descriptors: Sequence[fds.OwnedFd]) -> set[bytes]:
    """Return what can be read through descriptors: as many bytes as a piece has, from every offset."""
    found: set[bytes] = set()
    for owned in descriptors:
        fd, before = owned.fileno(), b""
        for offset in range(0, os.fstat(fd).st_size, 4096):
            page = os.pread(fd, 4096, offset)
            part, before = before + page, page[1 - PIECE_NBYTES :]
            if any(part):
                found.update(part[i : i + PIECE_NBYTES] for i in range(len(part) - PIECE_NBYTES + 1))
    return found


class Exposed:
    """A slot that was shared while the others held prompts, and what its provider could read.

    Attributes:
        exposes_all: as the share says.
        others: pieces of the other sequences.
        own: pieces of the shared sequence, after it was adopted.
        before: what the provider could read when it got its descriptors.
        after: what it could read when it had filled the slot.
    """

    def __init__(self, model: Model, **params: Any) -> None:
        with Decoder.open(model, **PARAMS, **params) as decoder:
            for seq_id in OTHERS:
                decoder.context.decode(PROMPTS[seq_id], position=0, seq_id=seq_id)
            self.others = {piece for seq_id in OTHERS for piece in kept(decoder.context, seq_id)}
            with received(decoder.share(SHARED, n_tokens=N_PROMPT)) as (share, header, descriptors):
                self.exposes_all = bool(header.params["exposes_all"])
                self.before = readable(descriptors)
                with Offer(header, descriptors) as offer:
                    with Provider(offer, model, n_threads=1) as provider:
                        provider.prefill(PROMPTS[SHARED])
                        provider.publish()
                    self.after = readable(descriptors)
                    decoder.adopt(share, PROMPTS[SHARED])
            self.own = kept(decoder.context, SHARED)
        # rows of some models differ in a few bits only: a piece of two sequences tells nothing
        common = self.own & self.others
        assert len(common) < 10
        self.own -= common
        self.others -= common
        assert min(len(self.others) / 2, len(self.own)) > 500


@contextlib.contextmanager
def received(share: Share) -> Iterator[tuple[Share, wire.ShareHeader, list[fds.OwnedFd]]]:
    """Send a share, and receive it as a provider does that looks at descriptors itself."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, share:
        share.send(near)
        payload, descriptors = fds.receive_message(far)
        with contextlib.ExitStack() as stack:
            for owned in descriptors:
                stack.callback(owned.close)
            header = wire.decode(payload)
            assert isinstance(header, wire.ShareHeader)
            yield share, header, descriptors


@pytest.fixture
def model(archs_path: Path) -> Iterator[Callable[[str], Model]]:
    with contextlib.ExitStack() as stack:
        yield lambda name: stack.enter_context(Model.open(archs_path / f"{name}.gguf"))


@pytest.mark.parametrize(
    ("name", "flash_attn"),
    [
        ("llama-dense", "on"),
        ("llama-dense", "off"),  # V lies transposed
        ("gemma3-dense", "on"),  # a sliding window
        ("deepseek2-moe", "on"),  # K only
    ],
)
def test_a_stream_per_slot_exposes_no_other(
    model: Callable[[str], Model], name: str, flash_attn: str
) -> None:
    exposed = Exposed(model(name), flash_attn=flash_attn)
    assert not exposed.exposes_all
    assert not exposed.before & (exposed.own | exposed.others)
    assert not exposed.after & exposed.others
    # the search does find what is there: nearly all that does not cross the end of a row
    assert len(exposed.after & exposed.own) > len(exposed.own) / 2


@pytest.mark.parametrize(
    ("name", "kv_unified"),
    [
        ("llama-dense", True),
        ("gemma3-dense", True),
        ("falcon-h1-dense", False),  # a recurrent state beside a cache
        ("mamba-dense", False),
    ],
)
def test_a_share_that_exposes_all_says_so(model: Callable[[str], Model], name: str, kv_unified: bool) -> None:
    """And this is what the search finds then."""
    exposed = Exposed(model(name), kv_unified=kv_unified)
    assert exposed.exposes_all
    assert not exposed.before & exposed.own
    for found in (exposed.before, exposed.after):
        assert len(found & exposed.others) > len(exposed.others) / 2
    assert len(exposed.after & exposed.own) > len(exposed.own) / 2


@pytest.mark.parametrize("name", ["llama-dense", "gemma3-dense"])
def test_a_descriptor_cannot_be_opened_wider(model: Callable[[str], Model], name: str) -> None:
    """Opened again by its path in /proc it is the same file, which ends where the region does."""
    with (
        Decoder.open(model(name), **PARAMS) as decoder,
        received(decoder.share(SHARED, n_tokens=N_PROMPT)) as (_, header, descriptors),
    ):
        expected = {entry.fd: (entry.offset, entry.size) for entry in header.regions}
        expected[header.ledger.fd] = (0, header.ledger.size)
        assert len(expected) == len(descriptors) == len(header.regions) + 1
        for index, owned in enumerate(descriptors):
            path = f"/proc/self/fd/{owned.fileno()}"
            opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                there, here = os.fstat(owned.fileno()), os.fstat(opened)
                assert (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
                assert expected[index] == (0, here.st_size)
                assert os.pread(opened, 1, here.st_size) == b""
                for size in (0, here.st_size - 4096, here.st_size + 4096):
                    with pytest.raises(PermissionError):
                        os.ftruncate(opened, size)
                with pytest.raises(PermissionError):
                    os.open(path, os.O_RDWR | os.O_TRUNC)
                assert os.fstat(opened).st_size == there.st_size
            finally:
                os.close(opened)


@pytest.mark.parametrize(
    ("name", "kv_unified"), [("llama-dense", False), ("gemma3-dense", False), ("llama-dense", True)]
)
def test_a_file_holds_one_stream(model: Callable[[str], Model], name: str, kv_unified: bool) -> None:
    """No two slots are in the same file, unless the cache is unified; their ledgers never are."""
    with (
        contextlib.ExitStack() as stack,
        Decoder.open(model(name), **PARAMS, kv_unified=kv_unified) as decoder,
    ):
        files: list[set[int]] = []
        for seq_id in range(3):
            share = decoder.share(seq_id, n_tokens=N_PROMPT)
            _, header, descriptors = stack.enter_context(received(share))
            inodes = [os.fstat(owned.fileno()).st_ino for owned in descriptors]
            assert not any(inodes[header.ledger.fd] in each for each in files)
            files.append(set(inodes))
        shared = files[0] & files[1], files[0] & files[2], files[1] & files[2]
        assert all(shared) if kv_unified else not any(shared)
