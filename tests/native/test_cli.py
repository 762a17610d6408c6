"""`kvshare demo` and `kvshare doctor`, as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.native.handoff import environment

pytestmark = pytest.mark.native

RUN_FIELDS = {
    "n_tokens",
    "local_prefill_ms",
    "share_us",
    "provider_prefill_ms",
    "adopt_us",
    "first_token_ms",
    "steady_token_ms",
    "page_faults",
    "file_save_ms",
    "file_restore_ms",
    "file_nbytes",
    "bytes_moved",
    "logits_identical",
    "text_identical",
    "text",
}


def kvshare(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvshare", *arguments],
        env=environment(**env),
        capture_output=True,
        text=True,
        check=False,
    )


def test_demo(smollm2_path: Path) -> None:
    done = kvshare("demo", "--json", "--tokens", "2", "40")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["ok"] is True
    assert [run["n_tokens"] for run in report["runs"]] == [2, 40]
    for run in report["runs"]:
        assert set(run) == RUN_FIELDS
        assert run["bytes_moved"] == 0
        assert run["logits_identical"] is run["text_identical"] is True
        assert run["text"].strip()
        assert run["file_nbytes"] > 0
    assert set(report["pss_mib"]) == {"one_process", "decoder", "provider", "ratio"}
    assert min(report["pss_mib"].values()) > 0


def test_demo_table(smollm2_path: Path) -> None:
    done = kvshare("demo", "--tokens", "10", "--model", str(smollm2_path))
    assert done.returncode == 0, done.stderr
    assert "identical, zero bytes moved" in done.stdout
    assert "WARNING" not in done.stderr
    assert "10 tokens: the provider prefills" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--model", "/nonexistent.gguf"], 18, "no such model file"),
        (["--model", __file__], 18, "is not a GGUF file"),
        (["--tokens", "1"], 12, "not in [2, "),
    ],
)
def test_demo_refuses(arguments: list[str], status: int, text: str) -> None:
    done = kvshare("demo", *arguments)
    assert done.returncode == status
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_with_a_model_that_llama_cpp_refuses(tiny_path: Path, tmp_path: Path) -> None:
    """A GGUF that is whole, but of no architecture: the child's error is the command's."""
    content = tiny_path.read_bytes()
    assert content.count(b"llama") > 0
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content.replace(b"llama", b"lxxma"))
    done = kvshare("demo", "--tokens", "10", "--model", str(broken))
    assert done.returncode == 18
    assert "llama.cpp cannot load" in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor(library: Any) -> None:
    done = kvshare("doctor", "--json")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert report["library"]["path"] == str(library.path)
    assert report["library"]["found_by"] == "environment"
    assert report["library"]["series"] == library.series
    assert report["library"]["upstream"] == library.upstream
    assert any(backend.startswith("CPU") for backend in report["library"]["backends"])
    assert {check["name"] for check in report["checks"]} >= {
        "memfd and seals",
        "bindings",
        "abi",
        "cache folder",
    }


def test_doctor_names_the_problem(tmp_path: Path) -> None:
    done = kvshare("doctor", "--library", str(tmp_path))
    assert done.returncode == 10
    assert "no libllama at" in " ".join(done.stdout.split())
    assert "kvshare build" in done.stdout
