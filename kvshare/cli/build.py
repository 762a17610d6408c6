"""`kvshare build`: fetch, patch and compile the pinned llama.cpp, or compile a checkout."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshare.cli import Subparsers

_EPILOG = """\
examples:
  kvshare build                                 the pinned release, for this CPU
  kvshare build --cmake-arg GGML_CUDA=ON --cmake-arg CMAKE_CUDA_ARCHITECTURES=90
  kvshare build --server                        also the patched llama-server, about 8 minutes more
  kvshare build --target test-llama-archs       also one of llama.cpp's own programs
  kvshare build --source ~/llama.cpp            a checkout that has the patch series

Builds are kept in the user's cache folder ($KVSHARE_CACHE to choose another), by content: the
same release, series, options, compiler and CPU never compile twice. --source compiles what has
changed in the checkout since the last time. Interrupted builds go on where they stopped.
"""


def register(subparsers: Subparsers) -> None:
    """Add the parser of `kvshare build`."""
    from kvshare.cli import add_command

    parser = add_command(
        subparsers,
        "build",
        "fetch, patch and compile the pinned llama.cpp",
        epilog=_EPILOG,
        json_help="print one JSON object that describes the build",
    )
    parser.add_argument("--source", type=Path, metavar="DIR", help="compile this patched checkout instead")
    parser.add_argument("--server", action="store_true", help="build llama-server as well")
    parser.add_argument("--target", action="append", default=[], metavar="NAME", help="build this as well")
    parser.add_argument(
        "--cmake-arg", action="append", default=[], metavar="NAME=VALUE", help="CMake option, repeatable"
    )
    parser.add_argument(
        "--download-only", action="store_true", help="fetch the pinned source distribution, print its path"
    )
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="compilers at a time (default: one a CPU)"
    )


def run(args: argparse.Namespace) -> int:
    """Run `kvshare build`."""
    from kvshare.build import SERVER, build, fetch_sdist
    from kvshare.cli import progress

    start = time.monotonic()
    with progress.shown() as show:
        if args.download_only:
            path = fetch_sdist(show)
            print(json.dumps({"ok": True, "sdist": str(path)}) if args.json else path)
            return 0
        info = build(
            source=args.source,
            targets=[*args.target, *([SERVER] if args.server else [])],
            cmake_args=args.cmake_arg,
            jobs=args.jobs,
            progress=show,
        )
    seconds = time.monotonic() - start
    if args.json:
        values = asdict(info) | {"path": str(info.path), "lib_dir": str(info.lib_dir)}
        print(json.dumps({"ok": True, "seconds": round(seconds, 3), **values}))
    else:
        print(f"patched libllama, llama.cpp {info.commit[:9]}, series {info.series_id[:12]}: {info.lib_dir}")
    return 0


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
