"""The real series on the real pinned tree."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvshare import patches
from tests.patches.conftest import snapshot


@pytest.fixture
def tree(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "llama.cpp"))


def test_every_hunk_is_exact(pristine: Path) -> None:
    report = patches.check(pristine)
    assert report.state == "clean", report.reason
    assert {hunk.outcome for hunk in report.hunks} == {"exact"}


def test_apply_then_reverse_is_exact(tree: Path) -> None:
    before = snapshot(tree)
    patches.apply(tree)
    assert patches.apply(tree).state == "applied"
    patches.reverse(tree)
    assert snapshot(tree) == before


def test_every_patch_builds_on_its_own_prefix(tree: Path) -> None:
    """Each prefix of the series applies, and the whole is refused as half patched until it is in."""
    series = patches.load_series()
    for n in range(1, len(series.patches)):
        prefix = patches.Series(series.patches[:n])
        patches.apply(tree, prefix)
        assert patches.check(tree, series).state == "partial"
        patches.reverse(tree, prefix)
    assert patches.check(tree, series).state == "clean"


def test_git_apply_gives_the_same_tree(pristine: Path, tree: Path, tmp_path: Path) -> None:
    """People who keep their own checkout may use `git apply` instead."""
    theirs = Path(shutil.copytree(pristine, tmp_path / "theirs"))
    subprocess.run(["git", "init", "-q", str(theirs)], check=True)
    series = patches.load_series()
    for patch in series.patches:
        command = ["git", "-C", str(theirs), "apply", "--whitespace=error", "-"]
        subprocess.run(command, input=patch.raw, check=True)
    patches.apply(tree)
    assert snapshot(theirs) == snapshot(tree)
