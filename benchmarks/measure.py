"""What benchmarks have in common: children that take jobs, medians and quartiles, page faults, pictures."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from kvshare.errors import KvshareError, LocalProtocolError, PeerClosedError

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")
_STOP_TIMEOUT_S = 60.0

_Child = TypeVar("_Child", bound="Child")


class Child:
    """A Python module as a process that takes jobs, and answers them: one line of JSON each.

    *Ownership*: leaving the block ends it.

    Attributes:
        pid: its process id.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid

    def tell(self, **job: Any) -> None:
        """Give it a job.

        Raises:
            PeerClosedError: it has ended; its own words are on stderr.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerClosedError("a process of this benchmark has ended") from error

    def answer(self) -> dict[str, Any]:
        """Return its answer to the oldest job.

        Raises:
            PeerClosedError: it has ended; its own words are on stderr.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerClosedError("a process of this benchmark has ended without an answer")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, **job: Any) -> dict[str, Any]:
        """Give it a job, and return the answer."""
        self.tell(**job)
        return self.answer()

    def __enter__(self: _Child) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def answer_jobs(handle: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> None:
    """Be a child: answer each job, until there are no more."""
    for line in sys.stdin:
        print(json.dumps(handle(json.loads(line))), flush=True)


def medians(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the repetitions."""
    return {name: round(statistics.median(each[name] for each in measured), 3) for name in measured[0]}


def quartiles(measured: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the first and the third quartile of each figure over the repetitions."""
    return {
        name: [round(float(q), 3) for q in np.percentile([each[name] for each in measured], (25, 75))]
        for name in measured[0]
    }


def page_faults(pid: int) -> int:
    """Return the page faults of a process so far, of all its threads, minor and major."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]) + int(fields[9])


def is_in_memory(folder: Path) -> bool:
    """Return whether the file system of a folder lives in memory."""
    found = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    folder = folder.resolve()
    mounted = next(
        each for each in (folder, *folder.parents, Path("/")) if each in found or each == Path("/")
    )
    return found.get(mounted) in MEMORY_FILE_SYSTEMS


def pyplot() -> Any:
    """Return matplotlib's pyplot, which draws into files.

    Raises:
        LocalProtocolError: there is no matplotlib.
    """
    try:
        importlib.import_module("matplotlib").use("Agg")
        return importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise LocalProtocolError("--plot needs matplotlib", hint="pip install matplotlib") from error


def save_figure(figure: Any, folder: Path, name: str) -> None:
    """Write a picture into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=120, bbox_inches="tight")


def present(report: Mapping[str, Any], tables: Iterable[Table], *, as_json: bool, width: int = 100) -> None:
    """Print what was measured: as one JSON object, or as tables that may be wider than the terminal."""
    if as_json:
        print(json.dumps(report, indent=1))
        return
    out = Console(width=max(Console().width, width))
    for table in tables:
        out.print(table)


def complain(name: str, error: KvshareError) -> int:
    """Print what ended a benchmark; return its exit status."""
    print(f"{name}: error: {error}", file=sys.stderr)
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr)
    return error.exit_code
