"""A server and a warm provider without a model, in a folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare.testing.http import FakeServer, FakeService


@pytest.fixture
def server(folder: Path) -> Iterator[FakeServer]:
    with FakeServer(directory=folder) as running:
        yield running


@pytest.fixture
def service(folder: Path) -> Iterator[FakeService]:
    with FakeService(folder / "p.sock") as running:
        yield running
