"""The public checks of a server over HTTP, over the real one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvshare import Model, fds
from kvshare.provider import serving
from kvshare.testing.server_contract import ServerUnderTest, check_server
from tests.server.conftest import Server, running

pytestmark = pytest.mark.native

NAMES = [name for name, _ in check_server(lambda: contextlib.nullcontext())]  # type: ignore[arg-type,return-value]
KEY = "secret"


@pytest.fixture(scope="module")
def server(program: Path, model_path: Path) -> Iterator[Server]:
    options = ("--ctx-size", "4096", "--api-key", KEY)
    with running(program, model_path, *options) as server:
        yield server


@pytest.fixture
def under_test(server: Server, model: Model) -> ServerUnderTest:
    @contextlib.contextmanager
    def provide(path: str, tokens: Sequence[int]) -> Iterator[Callable[[], None]]:
        failed: list[Exception] = []
        with fds.listening(path) as listener:

            def work() -> None:
                try:
                    with serving(listener, model, tokens, deadline=time.monotonic() + 20):
                        pass
                except Exception as error:
                    failed.append(error)

            thread = threading.Thread(target=work)
            thread.start()

            def wait() -> None:
                thread.join(60)
                if failed:
                    raise failed[0]

            yield wait
        thread.join(60)

    slots = server.call("GET", "/slots", headers={"Authorization": f"Bearer {KEY}"})[1]
    return ServerUnderTest(
        f"http://127.0.0.1:{server.port}", str(server.share_dir), len(slots), provide, KEY, exact=False
    )


@pytest.mark.parametrize("name", NAMES)
def test_contract(under_test: ServerUnderTest, name: str) -> None:
    checks = dict(check_server(lambda: contextlib.nullcontext(under_test)))
    checks[name]()
