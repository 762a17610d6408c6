"""`scripts/patch-export` on a small repository: deterministic, proven, stamped."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvshare import patches
from tests.patches.conftest import FIRST, snapshot, write_tree

SCRIPT = Path(__file__).parents[2] / "scripts" / "patch-export"


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, which writes into a folder of its own."""
    loader = importlib.machinery.SourceFileLoader("patch_export", str(SCRIPT))
    spec = importlib.util.spec_from_loader("patch_export", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    directory = tmp_path / "patches"
    directory.mkdir()
    (directory / "series").write_text("small.patch\n")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "DIRECTORY", directory)
    return module


def run(export: ModuleType, monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["patch-export", *args])
    status: int = export.main()
    return status


def test_export_is_deterministic(
    git_tree: Path, export: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(git_tree, FIRST)
    index = (git_tree / ".git/index").read_bytes()
    before = snapshot(git_tree)
    path = tmp_path / "patches/small.patch"
    assert run(export, monkeypatch, str(git_tree), "HEAD", "--name", "small") == 0
    first = path.read_bytes()
    for option in ("diff.noprefix=true", "diff.context=9", "color.ui=always", "diff.algorithm=patience"):
        name, value = option.split("=")
        subprocess.run(["git", "-C", str(git_tree), "config", name, value], check=True)
    assert run(export, monkeypatch, str(git_tree), "HEAD", "--name", "small") == 0
    assert path.read_bytes() == first
    assert snapshot(git_tree) == before
    assert (git_tree / ".git/index").read_bytes() == index


def test_export_keeps_the_header_and_stamps(
    git_tree: Path, export: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(git_tree, FIRST)
    path = tmp_path / "patches/small.patch"
    args = (str(git_tree), "HEAD", "--name", "small")
    run(export, monkeypatch, *args)
    path.write_bytes(path.read_bytes().replace(b"Why: TODO", b"Why: because"))
    assert run(export, monkeypatch, *args, "--stamp-tree") == 0
    series = patches.load_series(path.parent)
    assert "Why: because" in series.patches[0].header
    assert patches.embedded_series_id(series) == patches.series_id(series)
    assert patches.check(git_tree, series).state == "applied"
    stamped = path.read_bytes()
    assert run(export, monkeypatch, *args) == 0
    assert path.read_bytes() == stamped
    patches.reverse(git_tree, series)
    assert (
        subprocess.run(["git", "-C", str(git_tree), "status", "--short"], capture_output=True).stdout == b""
    )


def test_wrong_base_is_one_line(
    git_tree: Path, export: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(export, monkeypatch, str(git_tree), "no-such-commit", "--name", "small") == 21
    assert capsys.readouterr().err.startswith("patch-export: error: git read-tree")
