"""What the native tests need, and: in CI a skipped one is a failure, so that none passes unrun."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from kvshare import fds, models
from kvshare._native import loader
from kvshare._native.context import Model
from kvshare.errors import BuildError, LibraryNotFoundError
from kvshare.testing import architectures
from tests.native.handoff import ProviderProcess

# -- what the tests run on ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def library() -> loader.Library:
    """The patched library, the one that every child process loads as well."""
    try:
        return loader.load()
    except LibraryNotFoundError as error:
        pytest.skip(f"{error}; {error.hint}")


@pytest.fixture(scope="session")
def smollm2_path(library: loader.Library) -> Path:
    try:
        return models.fetch("smollm2")
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def gemma_path(library: loader.Library) -> Path:
    try:
        return models.fetch("gemma3-270m")
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def archs_path(library: loader.Library) -> Path:
    """The folder with a tiny model of each architecture."""
    try:
        return architectures.models()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_path(archs_path: Path) -> Path:
    """A llama model of two layers: a plain cache, and a prefill of 500 tokens in 30 ms."""
    return archs_path / "llama-dense.gguf"


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Iterator[Model]:
    with Model.open(smollm2_path) as model:
        yield model


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Iterator[Model]:
    with Model.open(tiny_path) as model:
        yield model


@pytest.fixture(scope="module")
def provider(library: loader.Library) -> Iterator[ProviderProcess]:
    """A process that serves one share after the other."""
    with fds.private_directory() as folder, ProviderProcess(folder) as process:
        yield process


# -- no skips in CI ----------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure when the environment says `CI`."""
    report = yield
    if not hasattr(report, "wasxfail"):
        _refuse_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a module that skips itself as a whole."""
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and os.environ.get("CI"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped, which CI does not allow: {reason}"
