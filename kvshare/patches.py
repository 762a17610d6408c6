"""The patch series: parse it, tell a tree's state, apply it, take it back, name it.

Rules:

- A tree is judged and changed by content, never by the exit status of a tool: `git apply` inside
  somebody else's repository exits 0 and changes nothing.
- Hunks are placed strictly: every old line must match, at the stated line or, if the file has
  moved, at the one other place where all of them match. There is no fuzz.
- The whole series is worked out in memory before the first change. Then all files are swapped by
  rename and read back; on any failure the originals are renamed into place again.

The series uses a small part of git's format: text changes and new files. Renames, deletions,
mode changes and binary hunks are refused by the parser, so nothing is half understood.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from kvshare.errors import PatchError

State = Literal["clean", "applied", "partial", "wrong"]
Kind = Literal["change", "create", "remove"]
Outcome = Literal["exact", "offset", "failed"]
Contents = dict[str, "bytes | None"]

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@.*")
_DIFF = re.compile(rb"diff --git a/(\S+) b/(\S+)")
_FOREIGN = (b"old mode", b"deleted file", b"similarity", b"rename", b"copy", b"Binary", b"GIT binary")
_SERIES_ID = re.compile(rb'(#define\s+LLAMA_KV_SHARE_SERIES\s+")([0-9a-f]{64})(")')


# -- the series --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """The upstream release that the series is made against (`patches/UPSTREAM`)."""

    package: str
    version: str
    sdist_sha256: str
    tree: str
    commit: str
    repository: str


@dataclass(frozen=True)
class Hunk:
    """One hunk; lines keep their newline, the last may lack it."""

    header: str
    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    new_start: int

    def inverted(self) -> Hunk:
        return replace(self, start=self.new_start, new_start=self.start, old=self.new, new=self.old)


@dataclass(frozen=True)
class FilePatch:
    """What one patch does to one file. A created file has exactly one hunk, without old lines."""

    path: str
    kind: Kind
    mode: int
    hunks: tuple[Hunk, ...]

    def inverted(self) -> FilePatch:
        kinds: dict[Kind, Kind] = {"change": "change", "create": "remove", "remove": "create"}
        return replace(self, kind=kinds[self.kind], hunks=tuple(hunk.inverted() for hunk in self.hunks))


@dataclass(frozen=True)
class Patch:
    """One file of the series: its name, the prose before the diff, and what it changes."""

    name: str
    header: str
    files: tuple[FilePatch, ...]
    raw: bytes

    def inverted(self) -> Patch:
        return replace(self, files=tuple(file.inverted() for file in reversed(self.files)))


@dataclass(frozen=True)
class Series:
    """The patches in the order in which they are applied."""

    patches: tuple[Patch, ...]

    def inverted(self) -> Series:
        return Series(tuple(patch.inverted() for patch in reversed(self.patches)))

    def paths(self) -> list[str]:
        """Return every path that the series touches, each once, in order."""
        return list(dict.fromkeys(file.path for patch in self.patches for file in patch.files))


def patches_dir() -> Path:
    """Return the folder of the series: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).parent
    installed = package / "_patches"
    return installed if installed.is_dir() else package.parent / "patches"


def pin(directory: Path | None = None) -> Pin:
    """Read the pinned upstream release.

    Args:
        directory: the folder of the series; by default `patches_dir()`.

    Raises:
        PatchError: `UPSTREAM` is missing or lacks a key.
    """
    path = (directory or patches_dir()) / "UPSTREAM"
    values = dict(_key_value(line, path) for line in _content_lines(path))
    try:
        return Pin(**values)
    except TypeError as error:
        raise PatchError(f"{path}: {error}") from error


def load_series(directory: Path | None = None) -> Series:
    """Read and parse the series.

    Args:
        directory: the folder of the series; by default `patches_dir()`.

    Raises:
        PatchError: a file is missing or is not in the format that the series uses.
    """
    directory = directory or patches_dir()
    return Series(tuple(read_patch(directory / name) for name in _content_lines(directory / "series")))


def read_patch(path: Path) -> Patch:
    """Read and parse one patch file.

    Raises:
        PatchError: the file is missing or is not in the format that the series uses.
    """
    try:
        return parse_patch(path.name, path.read_bytes())
    except OSError as error:
        raise PatchError(f"cannot read patch {path}: {error.strerror}") from error


def series_id(series: Series | None = None) -> str:
    """Return the content id of the series: 64 hex digits.

    It is a sha256 over every patch's name and bytes, in order. The id is itself written into the
    header that the series adds (`LLAMA_KV_SHARE_SERIES`), so that digits count as zeros.
    """
    digest = hashlib.sha256()
    for patch in (series or load_series()).patches:
        body = with_series_id(patch.raw, "0" * 64)
        digest.update(f"{patch.name}\n{len(body)}\n".encode())
        digest.update(body)
    return digest.hexdigest()


def embedded_series_id(series: Series | None = None) -> str:
    """Return the id that the series' C header carries, which a library built from it reports.

    Raises:
        PatchError: no patch, or more than one, defines it.
    """
    series = series or load_series()
    found = [match.group(2).decode() for patch in series.patches for match in _SERIES_ID.finditer(patch.raw)]
    if len(found) != 1:
        raise PatchError(f"the series defines LLAMA_KV_SHARE_SERIES {len(found)} times, not once")
    return found[0]


def with_series_id(content: bytes, value: str) -> bytes:
    """Return a patch or C header with the digits of its `LLAMA_KV_SHARE_SERIES` replaced."""
    return _SERIES_ID.sub(rb"\g<1>" + value.encode() + rb"\g<3>", content)


def _content_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PatchError(f"cannot read {path}: {error.strerror}") from error
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def _key_value(line: str, path: Path) -> tuple[str, str]:
    key, equals, value = line.partition("=")
    if not equals:
        raise PatchError(f"{path}: not `key = value`: {line!r}")
    return key.strip(), value.strip()


# -- parsing -----------------------------------------------------------------------------------


def parse_patch(name: str, raw: bytes) -> Patch:
    """Parse a patch in git's format.

    Raises:
        PatchError: it is malformed, leaves the tree, or uses more than text changes and new files.
    """
    start = raw.find(b"\ndiff --git ") + 1
    if start == 0 and not raw.startswith(b"diff --git "):
        raise PatchError(f"{name}: holds no `diff --git`")
    lines = io.BytesIO(raw[start:]).readlines()
    files = []
    at = 0
    while at < len(lines):
        file, at = _parse_file(name, lines, at)
        files.append(file)
    return Patch(name, raw[:start].decode("utf-8"), tuple(files), raw)


def _parse_file(name: str, lines: list[bytes], at: int) -> tuple[FilePatch, int]:
    match = _DIFF.fullmatch(lines[at].rstrip(b"\n"))
    if match is None or match.group(1) != match.group(2):
        raise PatchError(f"{name}: not a `diff --git` of one plain path: {_shown(lines[at])}")
    path = _safe_path(name, match.group(1).decode("utf-8"))
    kind: Kind = "change"
    mode = 0o644
    at += 1
    while at < len(lines) and not lines[at].startswith((b"@@ ", b"diff --git ")):
        line = lines[at]
        if line.startswith(b"new file mode 100"):
            kind, mode = "create", int(line[-4:], 8)
        elif line.startswith(_FOREIGN):
            raise PatchError(f"{name}: {path}: only text changes and new files are used, not {_shown(line)}")
        elif not line.startswith((b"index ", b"--- ", b"+++ ")):
            raise PatchError(f"{name}: {path}: cannot read {_shown(line)}")
        at += 1
    hunks = []
    while at < len(lines) and lines[at].startswith(b"@@ "):
        hunk, at = _parse_hunk(name, path, lines, at)
        hunks.append(hunk)
    if not hunks or (kind == "create" and (len(hunks) != 1 or hunks[0].old)):
        raise PatchError(f"{name}: {path}: hunks are missing or do not fit a new file")
    return FilePatch(path, kind, mode, tuple(hunks)), at


def _parse_hunk(name: str, path: str, lines: list[bytes], at: int) -> tuple[Hunk, int]:
    header = lines[at].rstrip(b"\n")
    match = _HUNK.fullmatch(header)
    if match is None:
        raise PatchError(f"{name}: {path}: not a hunk header: {_shown(header)}")
    start, new_start = int(match.group(1)), int(match.group(3))
    n_old, n_new = int(match.group(2) or 1), int(match.group(4) or 1)
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while at < len(lines) and (len(old) < n_old or len(new) < n_new or lines[at].startswith(b"\\")):
        tag, text = lines[at][:1], lines[at][1:]
        sides = {b" ": (old, new), b"-": (old,), b"+": (new,)}.get(tag)
        if tag == b"\\":
            previous = lines[at - 1][:1]
            for side in (old,) if previous == b"-" else (new,) if previous == b"+" else (old, new):
                side[-1] = side[-1].removesuffix(b"\n")
        elif sides is None:
            raise PatchError(f"{name}: {path}: not a hunk line: {_shown(lines[at])}")
        else:
            for side in sides:
                side.append(text)
        at += 1
    if len(old) != n_old or len(new) != n_new:
        raise PatchError(f"{name}: {path}: hunk is cut short: {_shown(header)}")
    return Hunk(header.decode("utf-8", "replace"), start, tuple(old), tuple(new), new_start), at


def _safe_path(name: str, path: str) -> str:
    parts = PurePosixPath(path).parts
    if path.startswith(("/", '"')) or ".." in parts or ".git" in parts or "\\" in path:
        raise PatchError(f"{name}: path leaves the tree: {path!r}")
    return path


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


# -- placing hunks -----------------------------------------------------------------------------


@dataclass(frozen=True)
class HunkReport:
    """Where one hunk went, or why it did not fit.

    Attributes:
        number: counts the hunks of one file in one patch, from 1.
        offset: lines between the stated and the actual place; 0 unless `outcome` is "offset".
        reason: why it failed; empty otherwise.
    """

    patch: str
    path: str
    number: int
    header: str
    outcome: Outcome
    offset: int = 0
    reason: str = ""


def place(series: Series, read: Callable[[str], bytes | None]) -> tuple[Contents, list[HunkReport]]:
    """Work a series out in memory, hunk by hunk; a hunk that does not fit is reported and left out.

    Args:
        series: what to place, in order; `Series.inverted` takes it back.
        read: returns a file's content in the tree, or None where there is none.

    Returns:
        The new content of every path that the series touches (None: no such file any more), and
        one report a hunk.
    """
    contents: Contents = {path: read(path) for path in series.paths()}
    reports: list[HunkReport] = []
    for patch in series.patches:
        for file in patch.files:
            contents[file.path], found = _place_file(patch.name, file, contents[file.path])
            reports += found
    return contents, reports


def _place_file(name: str, file: FilePatch, content: bytes | None) -> tuple[bytes | None, list[HunkReport]]:
    if file.kind == "change" and content is not None:
        return _place_hunks(name, file, content)
    if file.kind == "change":
        reason = "no such file"
    elif file.kind == "create":
        if content is None:
            return b"".join(file.hunks[0].new), [_report(name, file, 0, "exact")]
        reason = "the file exists already"
    else:
        if content == b"".join(file.hunks[0].old):
            return None, [_report(name, file, 0, "exact")]
        reason = "no such file" if content is None else "the file differs from what the patch adds"
    return content, [_report(name, file, i, "failed", reason=reason) for i in range(len(file.hunks))]


def _place_hunks(name: str, file: FilePatch, content: bytes) -> tuple[bytes, list[HunkReport]]:
    lines = io.BytesIO(content).readlines()
    reports = []
    floor = grown = drift = 0
    for i, hunk in enumerate(file.hunks):
        stated = hunk.start - 1 + grown
        found = _find(lines, hunk.old, stated + drift, floor)
        if isinstance(found, str):
            reports.append(_report(name, file, i, "failed", reason=found))
            continue
        lines[found : found + len(hunk.old)] = hunk.new
        floor = found + len(hunk.new)
        grown += len(hunk.new) - len(hunk.old)
        drift = found - stated
        reports.append(_report(name, file, i, "offset" if drift else "exact", offset=drift))
    return b"".join(lines), reports


def _find(lines: list[bytes], old: tuple[bytes, ...], expected: int, floor: int) -> int | str:
    """Return the index at which all old lines match, or why there is none."""

    def matches(at: int) -> bool:
        return at >= floor and tuple(lines[at : at + len(old)]) == old

    if matches(expected):
        return expected
    places = [at for at in range(floor, len(lines) - len(old) + 1) if matches(at)]
    if len(places) == 1:
        return places[0]
    if places:
        return f"its lines match at {len(places)} places"
    for at, wanted in enumerate(old, start=max(expected, 0)):
        actual = lines[at] if at < len(lines) else None
        if actual != wanted:
            shown = "the end of the file" if actual is None else _shown(actual)
            return f"line {at + 1} is {shown}, the patch expects {_shown(wanted)}"
    return "its lines overlap the hunk before it"


def _report(
    name: str, file: FilePatch, index: int, outcome: Outcome, *, offset: int = 0, reason: str = ""
) -> HunkReport:
    return HunkReport(name, file.path, index + 1, file.hunks[index].header, outcome, offset, reason)


# -- trees -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TreeReport:
    """The state of a llama.cpp tree with regard to the series.

    Attributes:
        state: "clean" (the series fits), "applied" (all of it is in), "partial" (some of it is
            in) or "wrong" (another version, or not a llama.cpp tree).
        reason: one line that says why; empty for "clean" and "applied".
        hint: the next step, one line; empty for "clean" and "applied".
        hunks: one report a hunk of the series, in order, for applying it to the tree.
        present: paths of which at least one hunk is in.
    """

    tree: Path
    state: State
    reason: str = ""
    hint: str = ""
    hunks: tuple[HunkReport, ...] = ()
    present: tuple[str, ...] = ()


def check(tree: Path, series: Series | None = None) -> TreeReport:
    """Tell the state of a tree without changing it.

    Args:
        tree: root of a llama.cpp source tree, a git checkout or a plain one.
        series: the series to look for; by default the one of this package.

    Raises:
        PatchError: the folder, or a file that the series touches, cannot be read.
    """
    return _examine(tree, series or load_series())[0]


def apply(tree: Path, series: Series | None = None) -> TreeReport:
    """Put the series into a tree; all of it, or nothing.

    Args:
        tree: root of a llama.cpp source tree, a git checkout or a plain one.
        series: the series; by default the one of this package.

    Returns:
        The report on the tree as it was found: "clean" (so it is applied now) or "applied".

    Raises:
        PatchError: the tree is partial or wrong, or cannot be written; it is as it was.
    """
    series = series or load_series()
    with _locked(tree):
        report, before, after = _examine(tree, series)
        if report.state == "applied":
            return report
        if report.state != "clean":
            raise PatchError(report.reason, hint=report.hint)
        modes = {file.path: file.mode for patch in series.patches for file in patch.files}
        _swap(tree, before, after, modes, lambda: check(tree, series).state == "applied")
    return report


def reverse(tree: Path, series: Series | None = None) -> TreeReport:
    """Take the series out of a tree; all of it, or nothing.

    Returns:
        The report on the tree as it was found: "applied" (so it is clean now) or "clean".

    Raises:
        PatchError: the tree is partial or wrong, or cannot be written; it is as it was.
    """
    series = series or load_series()
    with _locked(tree):
        report, before, _ = _examine(tree, series)
        if report.state == "clean":
            return report
        if report.state != "applied":
            raise PatchError(report.reason, hint=report.hint)
        after, _ = place(series.inverted(), before.__getitem__)
        _swap(tree, before, after, {}, lambda: check(tree, series).state == "clean")
    return report


def _examine(tree: Path, series: Series) -> tuple[TreeReport, Contents, Contents]:
    """Return the report, the present contents, and the contents with the series in."""
    if not tree.is_dir():
        raise PatchError(f"{tree} is not a folder")
    for landmark in ("include/llama.h", "ggml/CMakeLists.txt"):
        if not (tree / landmark).is_file():
            reason = f"{tree} is not the root of a llama.cpp tree: it has no {landmark}"
            hint = "name the folder that holds llama.cpp's top CMakeLists.txt"
            return TreeReport(tree, "wrong", reason, hint), {}, {}
    before: Contents = {path: _read(tree, path) for path in series.paths()}
    after, forward = place(series, before.__getitem__)
    _, backward = place(series.inverted(), before.__getitem__)
    backward.reverse()

    def report(state: State, reason: str = "", hint: str = "") -> tuple[TreeReport, Contents, Contents]:
        present = dict.fromkeys(hunk.path for hunk in backward if hunk.outcome != "failed")
        return TreeReport(tree, state, reason, hint, tuple(forward), tuple(present)), before, after

    crlf = [path for path, content in before.items() if content is not None and b"\r\n" in content]
    if crlf:
        reason = f"{tree}: {crlf[0]} has CRLF line endings; the series and upstream use LF"
        return report("wrong", reason, "check the tree out again with `git config core.autocrlf false`")
    absent = [hunk for hunk in backward if hunk.outcome == "failed"]
    if not absent:
        return report("applied")
    failed = [hunk for hunk in forward if hunk.outcome == "failed"]
    if not failed:
        return report("clean")
    if len(absent) < len(backward):
        reason = (
            f"{tree} is half patched: {len(backward) - len(absent)} of {len(backward)} hunks are in; "
            f"missing or changed: {_listed(absent)}"
        )
        hint = "restore the files that the series touches, then try again"
        if kept := sorted(tree.rglob(".*.kvshare-old")):  # of a run that was killed
            hint += f"; what {kept[0].name} and the like hold is what they were"
        return report("partial", reason, hint)
    reason = (
        f"{tree} is another version of llama.cpp: {len(failed)} of {len(forward)} hunks do not fit; "
        f"{failed[0].path} hunk {failed[0].number}: {failed[0].reason}"
    )
    release = pin()
    hint = f"the series is made for commit {release.commit[:9]} ({release.package} {release.version})"
    return report("wrong", reason, hint)


def _listed(hunks: list[HunkReport], most: int = 3) -> str:
    names = [f"{hunk.path} hunk {hunk.number}" for hunk in hunks]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _read(tree: Path, path: str) -> bytes | None:
    """Read one file of a tree; None where there is none. A link could lead out: refused."""
    target = tree / path
    links = [part for part in (target, *target.parents) if part != tree and tree in part.parents]
    if any(part.is_symlink() for part in links):
        raise PatchError(f"{target} is, or lies behind, a symbolic link")
    try:
        return target.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PatchError(f"cannot read {target}: {error.strerror}") from error


@contextlib.contextmanager
def _locked(tree: Path) -> Iterator[None]:
    """Hold the tree against a second kvshare; the lock ends with this process at the latest."""
    try:
        fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise PatchError(f"cannot open {tree}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _swap(
    tree: Path, before: Contents, after: Contents, modes: Mapping[str, int], proven: Callable[[], bool]
) -> None:
    """Replace files by rename, prove the result, and rename the originals back on any failure.

    The originals stay on disk under a second name until the result is proven, so going back
    needs no space.
    """
    changed = [path for path in after if after[path] != before[path]]
    old = {path: _beside(tree / path, "old") for path in changed if before[path] is not None}
    new = {path: _beside(tree / path, "new") for path in changed if after[path] is not None}
    added_dirs: list[Path] = []
    begun: list[str] = []

    try:
        try:
            for path, staged in new.items():
                added_dirs += _make_parents(staged)
                _stage(staged, after[path] or b"", tree / path, modes.get(path, 0o644))
            for path in changed:
                begun.append(path)
                if path in old:
                    _link(tree / path, old[path])
                if path in new:
                    os.replace(new[path], tree / path)
                else:
                    os.unlink(tree / path)
            if not proven():
                raise PatchError(f"{tree} reads back differently from what was written; it is as it was")
        except BaseException:
            try:
                _go_back(tree, {path: old.get(path) for path in reversed(begun)}, new)
            finally:
                for staged in new.values():
                    staged.unlink(missing_ok=True)
                _remove_empty(reversed(added_dirs))
            raise
    except OSError as error:
        where = error.filename or tree
        raise PatchError(f"cannot write {where}: {error.strerror}; the tree is as it was") from error
    for backup in old.values():
        backup.unlink()
    for path in changed:
        if path not in new:
            _remove_empty(parent for parent in (tree / path).parents if tree in parent.parents)


def _link(path: Path, backup: Path) -> None:
    """Give a file a second name; no name is ever missing."""
    backup.unlink(missing_ok=True)  # of a process that was killed
    try:
        os.link(path, backup)
    except OSError:  # a file system without links
        shutil.copy2(path, backup)


def _go_back(tree: Path, old: Mapping[str, Path | None], new: Mapping[str, Path]) -> None:
    """Give files their contents back, whatever was done to each.

    Raises:
        PatchError: some of them could not be given back; it names what they were.
    """
    left = []
    for path, backup in old.items():
        try:
            if backup is None:
                if path in new and not new[path].exists():  # it has its final name
                    (tree / path).unlink(missing_ok=True)
            elif backup.exists():
                os.replace(backup, tree / path)
                backup.unlink(missing_ok=True)  # two names of one file are left as they are
        except OSError as error:
            left.append(f"{tree / path} ({error.strerror}){f', kept as {backup.name}' if backup else ''}")
    if left:
        raise PatchError(f"the tree could not be given back: {'; '.join(left)}", hint="restore these files")


def _beside(path: Path, role: str) -> Path:
    return path.with_name(f".{path.name}.kvshare-{role}")


def _make_parents(path: Path) -> list[Path]:
    missing = [parent for parent in path.parents if not parent.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    return list(reversed(missing))


def _stage(staged: Path, content: bytes, target: Path, mode: int) -> None:
    staged.write_bytes(content)
    try:
        original = target.stat()
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        staged.chmod(mode & ~umask)
        return
    staged.chmod(original.st_mode & 0o7777)
    if (staged.stat().st_uid, staged.stat().st_gid) != (original.st_uid, original.st_gid):
        os.chown(staged, original.st_uid, original.st_gid)


def _remove_empty(directories: Iterable[Path]) -> None:
    for directory in directories:
        with contextlib.suppress(OSError):
            directory.rmdir()
