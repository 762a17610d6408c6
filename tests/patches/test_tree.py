"""Apply, check and reverse on small trees: all of it or nothing, and byte for byte."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshare import patches
from kvshare.cli import main
from kvshare.errors import PatchError
from tests.patches.conftest import BASE, FIRST, NUMBERED, SECOND, make_series, snapshot, write_tree


def contents(tree: Path) -> dict[str, str]:
    return {
        path: content.decode() for path, (_, content) in snapshot(tree).items() if (tree / path).is_file()
    }


def test_apply_then_reverse_is_exact(tree: Path, series: patches.Series) -> None:
    before = snapshot(tree)
    assert patches.check(tree, series).state == "clean"
    assert patches.apply(tree, series).state == "clean"
    assert contents(tree) == SECOND
    assert snapshot(tree)["src/cache.cpp"][0] == before["src/cache.cpp"][0]
    assert patches.check(tree, series).state == "applied"
    assert patches.reverse(tree, series).state == "applied"
    assert snapshot(tree) == before


def test_apply_twice_and_reverse_twice_change_nothing(tree: Path, series: patches.Series) -> None:
    patches.apply(tree, series)
    applied = snapshot(tree)
    assert patches.apply(tree, series).state == "applied"
    assert snapshot(tree) == applied
    patches.reverse(tree, series)
    clean = snapshot(tree)
    assert patches.reverse(tree, series).state == "clean"
    assert snapshot(tree) == clean


def test_git_applies_the_same(tmp_path: Path, git_tree: Path, series: patches.Series) -> None:
    for patch in series.patches:
        file = tmp_path / patch.name
        file.write_bytes(patch.raw)
        subprocess.run(["git", "-C", str(git_tree), "apply", str(file)], check=True)
    assert contents(git_tree) == SECOND
    assert patches.check(git_tree, series).state == "applied"


def test_git_index_is_left_alone(git_tree: Path, series: patches.Series) -> None:
    before = (git_tree / ".git/index").read_bytes()
    patches.apply(git_tree, series)
    assert (git_tree / ".git/index").read_bytes() == before


def test_moved_lines_are_found_and_said(tree: Path, series: patches.Series) -> None:
    (tree / "src/cache.cpp").write_text("// one more\n// and another\n" + NUMBERED)
    before = snapshot(tree)
    report = patches.apply(tree, series)
    assert [(hunk.outcome, hunk.offset) for hunk in report.hunks if hunk.path == "src/cache.cpp"][:2] == [
        ("offset", 2),
        ("offset", 2),
    ]
    patches.reverse(tree, series)
    assert snapshot(tree) == before


REFUSED = {
    "another version": (BASE | {"src/cache.cpp": NUMBERED.replace("line 9;", "line nine;")}, "wrong"),
    "ambiguous place": (BASE | {"src/cache.cpp": "// moved\n" + NUMBERED * 2}, "wrong"),
    "file gone": ({path: text for path, text in BASE.items() if path != "src/cache.cpp"}, "wrong"),
    "CRLF": ({path: text.replace("\n", "\r\n") for path, text in BASE.items()}, "wrong"),
    "CRLF, applied": ({path: text.replace("\n", "\r\n") for path, text in SECOND.items()}, "wrong"),
    "only the first patch": (FIRST, "partial"),
    "new file lost": ({path: text for path, text in SECOND.items() if path != "include/share.h"}, "partial"),
    "new file edited": (SECOND | {"include/share.h": "// edited\n"}, "partial"),
    "new file in the way": (BASE | {"include/share.h": "// mine\n"}, "wrong"),
    "one hunk lost": (
        SECOND | {"src/cache.cpp": SECOND["src/cache.cpp"].replace("hook two;\n", "")},
        "partial",
    ),
    "one file only": (BASE | {"src/memory.cpp": SECOND["src/memory.cpp"]}, "partial"),
    "not llama.cpp": ({"README": "hello\n"}, "wrong"),
    "empty": ({}, "wrong"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("action", [patches.apply, patches.reverse])
def test_refused_tree_stays_as_it_was(
    tmp_path: Path, series: patches.Series, case: str, action: Callable[[Path, patches.Series], object]
) -> None:
    files, state = REFUSED[case]
    tree = tmp_path / "tree"
    tree.mkdir()
    write_tree(tree, files)
    before = snapshot(tree)
    report = patches.check(tree, series)
    assert report.state == state
    assert "\n" not in report.reason
    with pytest.raises(PatchError) as caught:
        action(tree, series)
    assert str(tree) in str(caught.value)
    assert caught.value.hint
    assert snapshot(tree) == before


def test_partial_names_what_is_missing(tmp_path: Path, series: patches.Series) -> None:
    write_tree(tmp_path, SECOND | {"src/cache.cpp": SECOND["src/cache.cpp"].replace("hook two;\n", "")})
    report = patches.check(tmp_path, series)
    assert "4 of 6 hunks are in" in report.reason or "src/cache.cpp hunk 2" in report.reason


def test_no_such_tree(tmp_path: Path, series: patches.Series) -> None:
    for action in (patches.check, patches.apply, patches.reverse):
        with pytest.raises(PatchError, match="nowhere"):
            action(tmp_path / "nowhere", series)


@pytest.mark.parametrize("fail_at", range(4))  # two files changed, two files added
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("linked", [True, False])
def test_failing_rename_is_undone(
    tree: Path,
    series: patches.Series,
    monkeypatch: pytest.MonkeyPatch,
    fail_at: int,
    late: bool,
    linked: bool,
) -> None:
    before = snapshot(tree)
    replace, calls = os.replace, 0

    def failing(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls != fail_at + 1:
            replace(source, target)
            return
        if late:  # as an interrupt comes
            replace(source, target)
            raise KeyboardInterrupt
        raise OSError(28, "No space left on device", str(target))

    def no_link(*_: object) -> None:
        raise PermissionError(1, "a file system without links")

    monkeypatch.setattr(os, "replace", failing)
    if not linked:
        monkeypatch.setattr(os, "link", no_link)
    if late:
        with pytest.raises(KeyboardInterrupt):
            patches.apply(tree, series)
    else:
        with pytest.raises(PatchError, match="No space left on device; the tree is as it was"):
            patches.apply(tree, series)
    assert snapshot(tree) == before


def test_what_cannot_be_given_back_is_named(
    tree: Path, series: patches.Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are, and the one is kept under its second name."""
    before = contents(tree)
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if source.name.endswith("-old") and "cache.cpp" in target.name:
            raise OSError(30, "Read-only file system", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    monkeypatch.setattr(patches, "check", lambda *_: patches.TreeReport(tree, "wrong"))
    with pytest.raises(
        PatchError, match=r"cache\.cpp \(Read-only file system\), kept as \.cache\.cpp\.kvshare-old"
    ):
        patches.apply(tree, series)
    found = contents(tree)
    assert found.pop("src/.cache.cpp.kvshare-old") == before["src/cache.cpp"]
    assert {name for name in found if found[name] != before.get(name)} == {"src/cache.cpp"}


def test_no_file_is_ever_missing(tree: Path, series: patches.Series, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the process is killed: what it began with, or what it ends with, is there."""
    before = contents(tree)
    replace = os.replace

    def watching(source: Path, target: Path) -> None:
        for name in before:
            assert contents(tree)[name] in (before[name], SECOND[name])
        replace(source, target)

    monkeypatch.setattr(os, "replace", watching)
    patches.apply(tree, series)
    assert contents(tree) == SECOND


def test_failing_write_is_undone(tree: Path, series: patches.Series, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(tree)
    write_bytes = Path.write_bytes

    def failing(path: Path, data: bytes) -> int:
        if "share.cpp" in path.name:
            write_bytes(path, data[:3])
            raise OSError(28, "No space left on device", str(path))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", failing)
    with pytest.raises(PatchError, match="No space left"):
        patches.apply(tree, series)
    assert snapshot(tree) == before


def test_result_that_reads_back_differently_is_undone(
    tree: Path, series: patches.Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(tree)
    wrong = patches.TreeReport(tree, "wrong")
    monkeypatch.setattr(patches, "check", lambda *_: wrong)
    with pytest.raises(PatchError, match="reads back differently"):
        patches.apply(tree, series)
    assert snapshot(tree) == before


def test_symbolic_link_is_refused(tmp_path: Path, series: patches.Series) -> None:
    outside = tmp_path / "outside"
    tree = tmp_path / "tree"
    write_tree(tree, BASE)
    (tree / "src").rename(outside)
    (tree / "src").symlink_to(outside)
    before = snapshot(outside)
    with pytest.raises(PatchError, match="symbolic link"):
        patches.apply(tree, series)
    assert snapshot(outside) == before


def test_many_at_once_apply_once(tree: Path, series: patches.Series) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(patches.apply(tree, series).state)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == ["applied"] * 7 + ["clean"]
    assert contents(tree) == SECOND


def test_second_patch_builds_on_the_first(tree: Path) -> None:
    report = patches.check(tree, make_series(FIRST, SECOND))
    assert report.state == "wrong"
    assert [hunk.outcome for hunk in report.hunks] == ["failed", "exact"]


# -- the command -------------------------------------------------------------------------------


@pytest.fixture
def use_series(series: patches.Series, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "load_series", lambda *_: series)


@pytest.mark.usefixtures("use_series")
def test_command(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action, said in (
        ("check", "clean; the series applies (6 hunks)"),
        ("reverse", "nothing to take out"),
        ("apply", "applied the series (6 hunks)"),
        ("apply", "already applied"),
        ("check", "the series is applied"),
        ("reverse", "took the series out"),
    ):
        assert main(["patch", action, str(tree)]) == 0
        assert said in capsys.readouterr().out


@pytest.mark.usefixtures("use_series")
def test_command_refuses(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "src/cache.cpp").write_text("another file\n")
    for action in ("check", "apply", "reverse"):
        assert main(["patch", action, str(tree)]) == 21
        captured = capsys.readouterr()
        assert "another version of llama.cpp" in captured.err
        assert "hint: the series is made for commit" in captured.err
    assert main(["patch", "check", "--json", str(tree)]) == 21
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert report["state"] == "wrong"
    assert report["hunks"][0]["reason"]
