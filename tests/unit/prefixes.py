"""Prefixes without a library: real memory, ledger, tokens and seals over a plain layout."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence

from kvshare import fds, wire
from kvshare.fds import OwnedFd
from kvshare.prefix import FROZEN_SEALS, Prefix
from kvshare.testing.fakes import plain_layout

TOKENS = [1, 22, 333, 49151]
REGION_NBYTES = 1 << 18
SEMANTICS = '{"arch":"fake"}'
SAMPLE = bytes(range(32))


def frozen_prefix(
    name: str | None = "one",
    *,
    tokens: Sequence[int] = TOKENS,
    blob: bytes = b"metadata",
    content: bytes = b"keys and values",
    params: dict[str, wire.Scalar] | None = None,
) -> Prefix:
    layout = plain_layout()
    memory = fds.memfd_create("kvshare-prefix", layout.regions[0].size, seal=False)
    os.pwrite(memory.fileno(), content, 0)
    return Prefix._seal(
        [memory],
        layout,
        SEMANTICS,
        {"seq_id": 0} if params is None else params,
        tokens,
        blob,
        SAMPLE,
        name=name,
    )


def duplicates(prefix: Prefix) -> list[OwnedFd]:
    """Return descriptors of a prefix's memory: the region, the ledger, the tokens."""
    return [OwnedFd(os.dup(owned.fileno())) for owned in prefix._fds]


def altered(
    fd: OwnedFd,
    change: Callable[[bytearray], object] = lambda content: None,
    *,
    seals: int = FROZEN_SEALS,
) -> OwnedFd:
    """Return a copy of a memfd with other bytes or other seals, in place of the descriptor."""
    with fd:
        content = bytearray(os.pread(fd.fileno(), os.fstat(fd.fileno()).st_size, 0))
    change(content)
    copy = fds.memfd_create("kvshare-fault", len(content), seal=False)
    os.pwrite(copy.fileno(), content, 0)
    fcntl.fcntl(copy.fileno(), fcntl.F_ADD_SEALS, seals)
    return copy
