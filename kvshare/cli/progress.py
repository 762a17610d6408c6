"""Show the steps of a long command on stderr: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator

from kvshare.fetch import Progress

_PLAIN_SECONDS = 15


@contextlib.contextmanager
def shown() -> Iterator[Progress]:
    """Yield a `Progress` that shows each step with its time; everything is shown done at the end."""
    if sys.stderr.isatty():
        with _live() as progress:
            yield progress
    else:
        lines = _Lines()
        yield lines
        lines.finish()


@contextlib.contextmanager
def _live() -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def finish() -> None:
            for task in bars.tasks:
                if not task.finished:
                    bars.update(task.id, total=1, completed=1)

        def progress(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                finish()
                tasks[step] = bars.add_task(step, total=None)
            bars.update(tasks[step], total=total, completed=done if total else 0)

        yield progress
        finish()


class _Lines:
    """One line when a step starts, one every 15 s meanwhile, one with its time when it is done."""

    def __init__(self) -> None:
        self._step = ""
        self._start = self._shown = 0.0

    def __call__(self, step: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if step != self._step:
            self.finish()
            self._step, self._start, self._shown = step, now, now
            print(f"{step} ...", file=sys.stderr, flush=True)
        elif now - self._shown >= _PLAIN_SECONDS:
            self._shown = now
            counted = f"{done} of {total}, " if total else ""
            print(f"{step} ... {counted}{now - self._start:.0f} s", file=sys.stderr, flush=True)

    def finish(self) -> None:
        if self._step:
            elapsed = time.monotonic() - self._start
            print(f"{self._step}: done in {elapsed:.1f} s", file=sys.stderr, flush=True)
        self._step = ""
