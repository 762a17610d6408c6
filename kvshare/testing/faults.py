"""What a broken or hostile peer sends and writes: small changes to things that are right.

Each is one function that changes one thing, so that a test says what it breaks.
"""

from __future__ import annotations

import os
import socket
import struct
from array import array
from collections.abc import Iterator, Sequence

from kvshare.fds import OwnedFd, memfd_create
from kvshare.ledger import HEADER_NBYTES, Ledger

LEDGER_FIELDS: dict[str, tuple[int, int]] = {
    "magic": (0, 8),
    "version": (8, 4),
    "header_size": (12, 4),
    "share_id": (16, 8),
    "layout": (24, 32),
    "semantics": (56, 32),
    "state": (88, 4),
    "n_filled": (96, 8),
    "n_tokens": (104, 8),
    "vouched_share_id": (112, 8),
    "tokens_sha256": (120, 32),
    "sample_digest": (152, 32),
    "blob_offset": (184, 8),
    "blob_size": (192, 8),
    "n_prefix": (456, 8),
    "prefix_sha256": (464, 32),
}
"""Offset and size in bytes of the fields that a reader of a complete ledger looks at."""


def corrupt_ledger(ledger: Ledger, field: str, *, value: int | None = None) -> None:
    """Change a field of a ledger in place, whoever has it mapped.

    Args:
        ledger: an open ledger.
        field: a key of `LEDGER_FIELDS`.
        value: what to write, little-endian; None inverts the lowest bit of the first byte.
    """
    offset, size = LEDGER_FIELDS[field]
    with ledger.view() as view:
        if value is None:
            view[offset] ^= 1
        else:
            view[offset : offset + size] = value.to_bytes(size, "little")


def cut_messages(payload: bytes) -> Iterator[bytes]:
    """Yield the starts of a framed message, from nothing to one byte less than all of it."""
    framed = struct.pack("<I", len(payload)) + payload
    step = max(1, len(framed) // 64)
    yield from (framed[:n] for n in range(0, len(framed), step))
    yield framed[:-1]


def send_framed(
    sock: socket.socket, payload: bytes, fds: Sequence[int], *, length: int | None = None
) -> None:
    """Send a message as `kvshare.fds.send_message` does, without its checks.

    Args:
        sock: a connected unix socket.
        payload: any bytes.
        fds: any number of descriptors that the kernel takes.
        length: what the frame claims; None is the truth.
    """
    framed = struct.pack("<I", len(payload) if length is None else length) + payload
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    n_sent = sock.sendmsg([framed], ancillary)
    if n_sent < len(framed):  # a peer that has read enough may be gone
        sock.sendall(framed[n_sent:])


def shorter_memfd(fd: int, n_missing: int) -> OwnedFd:
    """Return a sealed copy of a memfd that lacks its last bytes.

    *Ownership*: the caller closes it.
    """
    content = os.pread(fd, os.fstat(fd).st_size - n_missing, 0)
    copy = memfd_create("kvshare-fault", len(content))
    os.pwrite(copy.fileno(), content, 0)
    return copy


def unsealed_memfd(fd: int) -> OwnedFd:
    """Return a copy of a memfd that a peer can shrink while it is mapped.

    *Ownership*: the caller closes it.
    """
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    copy = memfd_create("kvshare-fault", len(content), seal=False)
    os.pwrite(copy.fileno(), content, 0)
    return copy


def half_written_ledger(ledger: Ledger, n_nbytes: int = HEADER_NBYTES // 2) -> None:
    """Zero the end of a ledger's header, as if its writer had been interrupted."""
    with ledger.view() as view:
        view[n_nbytes:HEADER_NBYTES] = bytes(HEADER_NBYTES - n_nbytes)
