"""What the server sends and reads is what this package reads and writes, byte for byte."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvshare import build
from kvshare.errors import BuildError

pytestmark = pytest.mark.native

VECTORS = Path(__file__).parents[1] / "vectors"


@pytest.fixture(scope="module")
def program(library: Any) -> Path:
    try:
        return build.build_target("test-kv-share-format")
    except BuildError as error:
        pytest.skip(str(error))


def run(program: Path, wire: Path, ledger: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, wire, ledger], capture_output=True, text=True, timeout=60)


def test_vectors(program: Path) -> None:
    done = run(program, VECTORS / "wire.json", VECTORS / "ledger.json")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["wire.json", "ledger.json"])
def test_other_bytes_are_noticed(program: Path, tmp_path: Path, name: str) -> None:
    """One byte of the first example is another one."""
    for each in ("wire.json", "ledger.json"):
        (tmp_path / each).write_text((VECTORS / each).read_text())
    text = (tmp_path / name).read_text()
    start = text.index('"payload": "' if name == "wire.json" else '"bytes": "') + 40
    (tmp_path / name).write_text(text[:start] + ("0" if text[start] != "0" else "1") + text[start + 1 :])
    done = run(program, tmp_path / "wire.json", tmp_path / "ledger.json")
    assert done.returncode == 1
    assert "FAIL" in done.stderr
