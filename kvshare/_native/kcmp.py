"""Whether two descriptors are one: the memory of a GPU has no inode of its own that would tell."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform

_F_DUPFD_QUERY = 1027  # F_LINUX_SPECIFIC_BASE + 3, Linux 6.10
_KCMP_FILE = 0
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}


def is_same_file(a: int, b: int) -> bool:
    """Whether two descriptors of this process refer to one open file, as one and its copy do.

    A copy may have come over a socket. Where the kernel does not tell (before 6.10 in a sandbox that forbids
    `kcmp`), they count as two.
    """
    with contextlib.suppress(OSError):
        return bool(fcntl.fcntl(a, _F_DUPFD_QUERY, b) == 1)
    if (number := _SYS_KCMP.get(platform.machine())) is None:
        return False
    arguments = (os.getpid(), os.getpid(), _KCMP_FILE, a, b)
    found: int = ctypes.CDLL(None).syscall(ctypes.c_long(number), *map(ctypes.c_ulong, arguments))
    return found == 0
