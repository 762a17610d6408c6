"""The leak fixture itself, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

CASES = """
import os

def test_clean():
    os.close(os.open("/dev/null", os.O_RDONLY))

def test_leak():
    os.open("/dev/null", os.O_RDONLY)
"""


def test_a_leak_is_reported_and_only_a_leak(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_cases.py").write_text(CASES)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed, 1 error" in done.stdout, done.stdout
    assert "ERROR at teardown of test_leak" in done.stdout
    assert "/dev/null" in done.stdout
