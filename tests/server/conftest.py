"""A real llama-server with the patch series, on loopback, one per set of options."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvshare import Model, build, fds, models, processes
from kvshare.errors import BuildError
from kvshare.provider import serving

# the library, and the rule that CI skips nothing
from tests.native.conftest import library, pytest_make_collect_report, pytest_runtest_makereport

__all__ = ["library", "pytest_make_collect_report", "pytest_runtest_makereport"]

START_S = 60.0
SERVE_S = 120.0  # a prefill, on a busy machine
_CONNECT_S = 30.0


class Server:
    """llama-server with `--kv-share`.

    *Ownership*: leaving the block ends the process.
    """

    def __init__(
        self, program: Path, model: Path, folder: Path, options: Sequence[str], share_dir: bool
    ) -> None:
        with socket.socket() as probe:  # a port that was free a moment ago
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.share_dir = folder / "share"
        self.share_dir.mkdir(mode=0o700)
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(self.port)),
                    *(("--kv-share", str(self.share_dir)) if share_dir else ()),
                    *("--threads", "2", *options),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={key: value for key, value in os.environ.items() if not key.startswith("LLAMA_")},
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.call("GET", "/health")[0] == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return the status and the JSON of an answer."""
        data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=data,
            method=method,
            headers={"Content-Type": "application/json", **(headers or {})},
        )
        try:
            with processes.open_url(request, timeout=120) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            content = error.read()
            return error.code, json.loads(content) if content else None

    def slot(self, id_slot: int | str, action: str, body: Any) -> tuple[int, Any]:
        return self.call("POST", f"/slots/{id_slot}?action={action}", body)

    def completion(self, prompt: Sequence[int] | str, **fields: Any) -> Any:
        status, answer = self.call(
            "POST",
            "/completion",
            {"prompt": prompt, "n_predict": 16, "temperature": 0, "n_probs": 3, **fields},
        )
        assert status == 200, answer
        return answer

    def maps(self) -> list[str]:
        """Return the process's mappings, a line each."""
        return Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()

    def __enter__(self) -> Server:
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Provider(threading.Thread):
    """A provider in this process that serves one share on a socket; it listens when the block begins."""

    def __init__(self, path: Path, model: Model, tokens: Sequence[int]) -> None:
        super().__init__()
        self.path, self.model, self.tokens = path, model, list(tokens)
        self.error: Exception | None = None
        self._listening = contextlib.ExitStack()

    def run(self) -> None:
        deadline = time.monotonic() + _CONNECT_S
        try:
            with serving(self._listener, self.model, self.tokens, deadline=deadline):
                pass
        except Exception as error:
            self.error = error

    def __enter__(self) -> Provider:
        self._listener = self._listening.enter_context(fds.listening(self.path))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.join(SERVE_S)
        self._listening.close()
        assert not self.is_alive()


@pytest.fixture(scope="session")
def program(library: Any) -> Path:
    try:
        return build.build_target(build.SERVER)
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def model_path(library: Any) -> Path:
    return models.fetch("smollm2")


@pytest.fixture(scope="session")
def model(model_path: Path) -> Iterator[Model]:
    with Model.open(model_path) as model:
        yield model


@contextlib.contextmanager
def running(program: Path, model: Path, *options: str, share_dir: bool = True) -> Iterator[Server]:
    with fds.private_directory() as folder, Server(program, model, folder, options, share_dir) as server:
        yield server
