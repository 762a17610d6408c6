"""A tiny model of every architecture that llama.cpp supports, written by its own `test-llama-archs`."""

from __future__ import annotations

import subprocess
from pathlib import Path

from kvshare import build, fetch

TARGET = "test-llama-archs"


def models(*, jobs: int | None = None) -> Path:
    """Return the folder with one GGUF per architecture, generated the first time.

    Args:
        jobs: compile jobs, if the program is not there yet.

    Raises:
        BuildError: the program cannot be built.
    """
    program = build.build_target(TARGET, jobs=jobs)
    folder = fetch.cache_dir() / "models" / f"archs-{fetch.sha256_of(program)[:16]}"
    complete = folder / "complete"
    if not complete.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [program, "-o", folder], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        complete.touch()
    return folder
