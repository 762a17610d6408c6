"""The parser takes the part of git's format that the series uses, and refuses the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvshare import patches
from kvshare.errors import PatchError
from tests.patches.conftest import BASE, FIRST, SECOND, diff

GOOD = f"Subject: a : b\n\n{diff(BASE, SECOND)}"
NEW = "diff --git a/{0} b/{0}\nnew file mode 100644\n--- /dev/null\n+++ b/{0}\n@@ -0,0 +1 @@\n+x\n"


def test_header_files_and_modes() -> None:
    patch = patches.parse_patch("p.patch", GOOD.encode())
    assert patch.header == "Subject: a : b\n\n"
    assert {file.path: (file.kind, len(file.hunks)) for file in patch.files} == {
        "src/cache.cpp": ("change", 2),
        "src/memory.cpp": ("change", 1),
        "include/share.h": ("create", 1),
        "src/share/share.cpp": ("create", 1),
    }
    script = patches.parse_patch("p.patch", NEW.format("run.sh").replace("100644", "100755").encode())
    assert script.files[0].mode == 0o755


def test_place_gives_the_new_content() -> None:
    series = patches.Series((patches.parse_patch("p.patch", GOOD.encode()),))
    contents, reports = patches.place(series, lambda path: BASE[path].encode() if path in BASE else None)
    assert {path: (content or b"").decode() for path, content in contents.items()} == {
        path: text for path, text in SECOND.items() if BASE.get(path) != text
    }
    assert {report.outcome for report in reports} == {"exact"}


@pytest.mark.parametrize(
    "path", ["../x", "/etc/x", "a/../../x", ".git/config", "a/.git/hooks/x", '"a', "a\\b"]
)
def test_path_out_of_the_tree_is_refused(path: str) -> None:
    with pytest.raises(PatchError, match="leaves the tree"):
        patches.parse_patch("p.patch", NEW.format(path).encode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just prose\n",
        "diff --git a/x b/y\n",
        "diff --git a/x b/x\n",
        "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n",
        "diff --git a/x b/x\ndeleted file mode 100644\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
        "diff --git a/x b/x\nsimilarity index 100%\nrename from x\nrename to y\n",
        "diff --git a/x b/x\nGIT binary patch\nliteral 0\n",
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ nonsense @@\n",
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,3 +1,4 @@\n a\n+b\n",
        "diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,2 +1,3 @@\n a\n+b\n\n",
        NEW.format("x") + "what is this\n",
        NEW.format("x") + "@@ -5,1 +6,1 @@\n-a\n+b\n",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(PatchError, match=r"^p\.patch: "):
        patches.parse_patch("p.patch", text.encode())


def test_every_cut_is_refused_or_still_whole() -> None:
    raw = GOOD.encode()
    for end in range(len(raw)):
        try:
            patch = patches.parse_patch("p.patch", raw[:end])
        except PatchError:
            continue
        assert sum(len(hunk.new) for file in patch.files for hunk in file.hunks) > 0


# -- the id ------------------------------------------------------------------------------------


def _series(text: str, name: str = "p.patch") -> patches.Series:
    return patches.Series((patches.parse_patch(name, text.encode()),))


def test_series_id_covers_everything_but_itself() -> None:
    text = diff(BASE, FIRST)
    plain = patches.series_id(_series(text))
    assert len(plain) == 64
    assert patches.embedded_series_id(_series(text)) == "0" * 64
    stamped = patches.with_series_id(text.encode(), plain).decode()
    assert patches.series_id(_series(stamped)) == plain
    assert patches.embedded_series_id(_series(stamped)) == plain
    assert patches.series_id(_series(text.replace("hook one", "hook 1"))) != plain
    assert patches.series_id(_series("Subject: other\n" + text)) != plain
    assert patches.series_id(_series(text, "q.patch")) != plain


def test_missing_id_is_an_error() -> None:
    with pytest.raises(PatchError, match="0 times"):
        patches.embedded_series_id(_series(NEW.format("x")))


def test_broken_series_folder(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="cannot read"):
        patches.load_series(tmp_path)
    (tmp_path / "series").write_text("gone.patch\n")
    with pytest.raises(PatchError, match=r"gone\.patch"):
        patches.load_series(tmp_path)
    shutil.copy(patches.patches_dir() / "UPSTREAM", tmp_path)
    assert patches.pin(tmp_path) == patches.pin()
    (tmp_path / "UPSTREAM").write_text("version = 1\n")
    with pytest.raises(PatchError, match="missing"):
        patches.pin(tmp_path)
    (tmp_path / "UPSTREAM").write_text("version 1\n")
    with pytest.raises(PatchError, match="key = value"):
        patches.pin(tmp_path)
