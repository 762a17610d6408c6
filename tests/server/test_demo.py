"""`kvshare demo --server`, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.native.handoff import environment

pytestmark = pytest.mark.native

CONTRACT = {
    "n_tokens",
    "file_save_ms",
    "file_restore_ms",
    "share_us",
    "adopt_us",
    "bytes_moved",
    "cache_n",
    "text_identical",
}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvshare", "demo", "--server", *arguments]


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), env=environment(), capture_output=True, text=True, check=False)


def test_json(program: Path, model_path: Path) -> None:
    done = demo("--json", "--tokens", "2", "40", "300")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert set(report) == {"runs", "ok"}
    assert report["ok"] is True
    assert [run["n_tokens"] for run in report["runs"]] == [2, 40, 300]
    for run in report["runs"]:
        assert set(run) >= CONTRACT
        assert run["text_identical"] is run["logprobs_identical"] is True
        assert run["bytes_moved"] == 0
        assert run["cache_n"] == run["file_cache_n"] == run["n_tokens"] - 1
        assert min(run[name] for name in ("file_save_ms", "file_restore_ms", "share_us", "adopt_us")) > 0
        # the server's own time is a part of what the client saw
        assert run["share_us"] <= run["share_http_ms"] * 1000
        assert run["adopt_us"] <= run["adopt_http_ms"] * 1000
        assert run["file_save_ms"] <= run["file_save_http_ms"]
        assert run["file_restore_ms"] <= run["file_restore_http_ms"]
        assert run["file_nbytes"] > 0
        assert run["text"].strip()


def test_table(program: Path, model_path: Path) -> None:
    done = demo("--tokens", "10", "--model", str(model_path), "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert "identical, zero bytes moved" in done.stdout
    assert "10 tokens: llama-server prefills" in done.stderr
    assert "10 tokens: the provider prefills" in done.stderr


def test_too_long_for_the_model(program: Path, model_path: Path) -> None:
    done = demo("--tokens", "10", "8190")
    assert done.returncode == 12
    assert "--tokens 8190: with this model the server holds 8192 tokens" in done.stderr
    assert "hint: give at most 8176" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_llama_cpp_refuses(program: Path, model_path: Path, tmp_path: Path) -> None:
    """The hint is the end of the server's log."""
    content = bytearray(model_path.read_bytes()[: 8 << 20])
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content.replace(b"llama", b"lxxma"))
    with broken.open("ab") as file:
        file.truncate(model_path.stat().st_size)
    done = demo("--model", str(broken))
    assert done.returncode == 13
    assert "llama-server ended with status" in done.stderr
    assert "lxxma" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_everything_ends_with_it(
    program: Path, model_path: Path, folder: Path, number: int, status: int
) -> None:
    log = folder / "stderr"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command("--tokens", "600"),
            env=environment(TMPDIR=str(folder)),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
        )
        try:
            deadline = time.monotonic() + 120
            while "the provider prefills" not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
            assert len(children) == 2, "llama-server and the provider"
            os.kill(process.pid, number)  # only it, as a supervisor would
            assert process.wait(30) == status, log.read_text()
        finally:
            process.kill()
            process.wait()
    assert not psutil.wait_procs(children, timeout=10)[1], "a child is still there"
    assert list(folder.iterdir()) == [log]
    assert "Traceback" not in log.read_text()
