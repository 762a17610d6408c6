"""What holds for every test: it gives back each descriptor that it opened."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kvshare import fds

# machines are shared: how long an example takes says nothing
settings.register_profile("kvshare", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvshare")

_FDS = Path("/proc/self/fd")


def _open_fds() -> dict[str, str]:
    """Map descriptor numbers to what they refer to."""
    found = {}
    for entry in list(_FDS.iterdir()):
        # The descriptor that listed the folder is in the list, and closed by now.
        with contextlib.suppress(FileNotFoundError):
            found[entry.name] = str(entry.readlink())
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder for sockets: their paths may have 107 bytes, and those of `tmp_path` can be longer."""
    with fds.private_directory() as made:
        yield made


@pytest.fixture(autouse=True)
def no_leaked_fds() -> Iterator[None]:
    """Fail a test that leaves a descriptor open, even if no name refers to it any more."""
    before = _open_fds().items()
    yield
    if _open_fds().items() - before:
        gc.collect()  # garbage in cycles is no leak; collecting after every test would be slow
    if leaked := dict(_open_fds().items() - before):
        pytest.fail(f"leaked descriptors: {leaked}")
