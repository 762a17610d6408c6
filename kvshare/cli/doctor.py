"""`kvshare doctor`: what is there, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvshare.errors import AbiMismatchError, KvshareError

if TYPE_CHECKING:
    from kvshare.cli import Subparsers

_EPILOG = """\
examples:
  kvshare doctor                                   check everything
  KVSHARE_LIBRARY=~/llama.cpp/build/bin kvshare doctor   check a library of your own
  kvshare doctor --json                            the same for programs

The library is searched in this order: --library, $KVSHARE_LIBRARY, the cached build.
GPUs are named with what sharing a cache in their memory needs: memory that is made and mapped in two steps
(VMM), and descriptors for it. No CUDA driver is no problem: caches on the host do not need one.

Exit status 0 if caches can be shared on this machine, else that of the first problem.
"""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: stable name.
        ok: whether it is as it should be.
        found: what was found.
        advice: what to do; empty if it is ok.
    """

    name: str
    ok: bool
    found: str
    advice: str = ""

    def __post_init__(self) -> None:
        if self.ok:
            object.__setattr__(self, "advice", "")


def register(subparsers: Subparsers) -> None:
    """Add the parser of `kvshare doctor`."""
    from kvshare.cli import add_command

    parser = add_command(
        subparsers,
        "doctor",
        "check the library, the machine and the cache folder",
        epilog=_EPILOG,
        json_help="print one JSON object with all checks",
    )
    parser.add_argument("--library", metavar="PATH", help="libllama.so, or the folder that holds it")


def run(args: argparse.Namespace) -> int:
    """Run `kvshare doctor`."""
    checks, library, status = _checks(args.library)
    gpu, seen = _gpu(library)
    checks += seen
    ok = all(check.ok for check in checks)
    if args.json:
        found = [asdict(check) for check in checks]
        print(json.dumps({"ok": ok, "library": library, "gpu": gpu, "checks": found}))
    else:
        _print(checks)
    return 0 if ok else status


def _print(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for check in checks:
        mark = "[green]ok[/green]" if check.ok else "[red]problem[/red]"
        table.add_row(mark, check.name, check.found)
        if check.advice:
            table.add_row("", "", f"-> {check.advice}")
    Console().print(table)


def _checks(path: str | None) -> tuple[list[Check], dict[str, Any] | None, int]:
    """Return all checks, the facts of the library, and the exit status if a check is not ok."""
    from kvshare import fds

    memfd, details = fds.memfd_supported()
    limit = _descriptor_limit()
    library, found, status = _library(path)
    return (
        [
            Check(
                "python",
                sys.version_info >= (3, 10),
                f"{platform.python_version()} at {sys.executable}",
                "use Python 3.10 or newer",
            ),
            Check(
                "system",
                sys.platform == "linux",
                f"{platform.system()} {platform.release()}",
                "kvshare needs Linux",
            ),
            Check("memfd and seals", memfd, details, "allow memfd_create (seccomp, container policy)"),
            Check("descriptors", limit >= 256, f"at most {limit} a process", "raise it: ulimit -n 1024"),
            *found,
            _cache(),
        ],
        library,
        status,
    )


def _library(path: str | None) -> tuple[dict[str, Any] | None, list[Check], int]:
    """Load the library for real: this process ends soon."""
    from kvshare import patches
    from kvshare._native import loader

    pin, version = patches.pin(), loader.bindings_version()
    bindings = Check(
        "bindings",
        version == pin.version,
        f"{pin.package} {version or 'is not installed'}",
        f'CMAKE_ARGS="-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF" pip install {pin.package}=={pin.version}',
    )
    if not bindings.ok:
        return None, [bindings], AbiMismatchError.exit_code
    try:
        found = loader.load(path)
    except KvshareError as error:
        return None, [bindings, Check("library", False, str(error), error.hint or "")], error.exit_code
    backends = loader.backends(found)
    facts: dict[str, Any] = {
        "path": str(found.path),
        "found_by": found.found_by,
        "abi": found.abi,
        "upstream": found.upstream,
        "series": found.series,
        "backends": backends,
    }
    checks = [
        bindings,
        Check("library", True, f"{found.path} (found by {found.found_by})"),
        Check("abi", True, str(found.abi)),
        Check(
            "upstream",
            found.upstream == pin.commit,
            f"{found.upstream[:12]} of {pin.package} {pin.version}",
            "run `kvshare build`",
        ),
        Check("patch series", True, found.series[:12]),
        Check("backends", bool(backends), ", ".join(backends) or "none", "build with a backend"),
    ]
    return facts, checks, KvshareError.exit_code


def _gpu(library: dict[str, Any] | None) -> tuple[dict[str, Any], list[Check]]:
    """Return the facts of the GPUs, and a line for each; none of it is a problem of the host.

    Args:
        library: the facts of the library, which may have been built without CUDA; None if there is none.
    """
    from kvshare._native import cuda

    facts: dict[str, Any] = {
        "cuda": None,
        "kernel_module": cuda.kernel_module_version(),
        "error": None,
        "devices": [],
    }
    try:
        driver = cuda.driver()
        devices = driver.devices()
    except KvshareError as error:
        facts["error"] = str(error)
        return facts, [Check("gpu", True, str(error))]
    facts |= {"cuda": driver.version, "devices": [asdict(device) for device in devices]}
    module = f", kernel module {facts['kernel_module']}" if facts["kernel_module"] else ""
    checks = [Check("cuda driver", True, f"CUDA {driver.version}{module}")]
    if library and not any(name.startswith("CUDA") for name in library["backends"]):
        found = "not in this library; for caches on a GPU: kvshare build --cmake-arg=-DGGML_CUDA=ON"
        checks.append(Check("cuda backend", True, found))
    for device in devices:
        support = {"VMM": device.vmm, "descriptors": device.posix_fd, "dma-buf": device.dma_buf}
        named = ", ".join(name if there else f"no {name}" for name, there in support.items())
        use = "can be shared" if device.vmm and device.posix_fd else "cannot be shared"
        size = f"{device.memory_nbytes / 2**30:.1f} GiB, compute {device.compute_capability}"
        found = f"{device.name}, {device.uuid}, {size}: its memory {use} ({named})"
        checks.append(Check(f"gpu {device.ordinal}", True, found))
    return facts, checks


def _descriptor_limit() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _cache() -> Check:
    import shutil

    from kvshare import fetch

    folder = fetch.cache_dir()
    hint = "choose another one with $KVSHARE_CACHE"
    place = folder
    try:
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
    except OSError as error:
        return Check("cache folder", False, f"{folder}: {error.strerror}", hint)
    writable = os.access(place, os.W_OK)
    return Check("cache folder", writable, f"{folder}, {free / 2**30:.1f} GiB free", hint)
