"""A tiny model of every architecture that llama.cpp supports, written by its own `test-llama-archs`."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

from kvshare import build, fetch
from kvshare.errors import BuildError

TARGET = "test-llama-archs"


def models(*, jobs: int | None = None) -> Path:
    """Return the folder with one GGUF per architecture, generated the first time.

    Args:
        jobs: compile jobs, if the program is not there yet.

    Raises:
        BuildError: the program cannot be built, or it failed.
    """
    program = build.build_target(TARGET, jobs=jobs)
    folder = fetch.cache_dir() / "models" / f"architectures-{fetch.sha256_of(program)[:16]}"
    if folder.is_dir():
        return folder
    with fetch.locked(folder.with_name(f"{folder.name}.lock")), fetch.disk_errors(folder):
        if folder.is_dir():
            return folder
        prefix = f".{folder.name}-"
        fetch.remove_left(folder.parent, prefix)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=prefix) as scratch:
            made = Path(scratch) / "made"
            made.mkdir()
            done = subprocess.run([program, "-o", made], capture_output=True, text=True, check=False)
            if done.returncode:
                said = "\n".join((done.stdout + done.stderr).splitlines()[-5:])
                raise BuildError(f"{program} ended with status {done.returncode}: {said}")
            os.replace(made, folder)
    return folder
