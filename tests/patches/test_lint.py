"""What every patch of the series owes its reader."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import pytest

from kvshare import patches

DIRECTORY = patches.patches_dir()
NAMES = [line for line in (DIRECTORY / "series").read_text().split("\n") if line and not line.startswith("#")]
FIELDS = ("Subject", "Why", "Why not from outside", "Obsolete when", "Origin", "Forwarded", "Last-Update")


def test_series_lists_every_patch_once() -> None:
    assert sorted(NAMES) == sorted(path.name for path in DIRECTORY.glob("*.patch"))
    assert len(NAMES) == len(set(NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_header(name: str) -> None:
    header = patches.read_patch(DIRECTORY / name).header
    fields = dict(re.findall(r"^([A-Z][A-Za-z -]*): (.+)$", header, re.MULTILINE))
    assert [field for field in FIELDS if field not in fields] == []
    assert "TODO" not in header
    assert re.fullmatch(r"[a-z0-9, -]+ : \S.*", fields["Subject"])
    assert fields["Forwarded"].startswith("no (")
    assert datetime.date.fromisoformat(fields["Last-Update"]) <= datetime.date.today()


@pytest.mark.parametrize("name", NAMES)
def test_bytes(name: str) -> None:
    raw = (DIRECTORY / name).read_bytes()
    assert b"\r" not in raw
    assert raw.endswith(b"\n")
    assert not re.search(rb"(?m)^index [0-9a-f]+\.\.", raw), "blob ids are left out; run scripts/patch-export"


@pytest.mark.parametrize("name", NAMES)
def test_added_lines(name: str) -> None:
    """New lines follow upstream's .editorconfig: no tabs in C++, no blanks at the end of a line."""
    for file in patches.read_patch(DIRECTORY / name).files:
        for hunk in file.hunks:
            old = set(hunk.old)
            added = [line for line in hunk.new if line not in old]
            assert [line for line in added if line.rstrip(b"\n").endswith((b" ", b"\t"))] == [], file.path
            if file.path.endswith((".cpp", ".h")):
                assert [line for line in added if b"\t" in line] == [], file.path


def test_embedded_id_is_the_series_id() -> None:
    assert patches.embedded_series_id() == patches.series_id(), "run scripts/patch-export"


def test_pin_is_said_once() -> None:
    """The dependency in pyproject.toml is the release of `patches/UPSTREAM`."""
    pin = patches.pin()
    assert re.fullmatch(r"[0-9a-f]{40}", pin.commit)
    assert re.fullmatch(r"[0-9a-f]{64}", pin.sdist_sha256)
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"{pin.package}=={pin.version}"' in project
