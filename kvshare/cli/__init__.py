"""The `kvshare` command: one module a subcommand, listed in `COMMANDS`.

A command module has `register(subparsers)`, which adds its parser, and `run(args) -> int`. It
imports what it needs inside `run`, so that `kvshare --help` stays quick and needs no library.
Errors are one line on stderr and the exit code of their family; with `--json` they are an object
on stdout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from kvshare import __version__
from kvshare.errors import KvshareError, MismatchError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

COMMANDS = ("demo", "doctor", "prefill", "provider", "engine", "prefix", "build", "patch")

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_EPILOG = """\
examples:
  kvshare demo                      the handoff, in two processes, on a real model
  kvshare doctor                    is everything there?
  kvshare prefill --help            one prompt, into a decoder's memory or into a file
  kvshare provider --help           a provider that stays
  kvshare engine --help             a front for llama-server that hands long prompts over
  kvshare prefix --help             prefilled prompts that many processes go on from
  kvshare build                     fetch, patch and compile the pinned llama.cpp
  kvshare patch check ~/llama.cpp   does the series fit a tree of yours?

exit status:
  0 done; 2 wrong usage; 10 library; 11 mismatch; 12 protocol; 13 peer; 14 descriptors; 15 ledger;
  16 adopt; 17 native call; 18 model; 20 build; 21 patch; 129 hung up; 130 interrupted; 143 terminated;
  1 anything else
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; by default `sys.argv`.

    Returns:
        The exit status.
    """
    args = _parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s"
    )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # of `nohup` it is to be ignored
            signal.signal(signal.SIGHUP, _terminated)
    try:
        status = _run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the interpreter's own flush succeeds
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("kvshare: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return status


def add_command(
    subparsers: Subparsers, name: str, summary: str, *, epilog: str = "", json_help: str
) -> argparse.ArgumentParser:
    """Add a subcommand with the options that every command has."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help=json_help)
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="what goes to stderr beside the result (default: %(default)s)",
    )
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvshare",
        description="Share one llama.cpp KV cache between two processes by file descriptors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvshare {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"kvshare.cli.{name}").register(subparsers)
    return parser


def _terminated(number: int, _: object) -> NoReturn:
    """Unwind on a signal, so that compilers and providers that were started end as well."""
    raise SystemExit(128 + number)


def _run(args: argparse.Namespace) -> int:
    try:
        status: int = importlib.import_module(f"kvshare.cli.{args.command}").run(args)
    except BrokenPipeError:
        raise
    except (KvshareError, OSError) as error:
        return _report(error, as_json=args.json)
    return status


def _report(error: KvshareError | OSError, *, as_json: bool) -> int:
    hint = error.hint if isinstance(error, KvshareError) else None
    code = error.exit_code if isinstance(error, KvshareError) else KvshareError.exit_code
    if as_json:
        details: dict[str, object] = {
            "type": type(error).__name__,
            "message": str(error),
            "hint": hint,
            "exit_code": code,
        }
        if isinstance(error, MismatchError):
            details |= {"field": error.field, "expected": error.expected, "found": error.found}
        print(json.dumps({"ok": False, "error": details}, default=str))
    else:
        print(f"kvshare: error: {error}", file=sys.stderr)
        if hint:
            print(f"hint: {hint}", file=sys.stderr)
    return code
