"""`kvshare patch apply|check|reverse`: the patch series in a llama.cpp tree of your own."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvshare.cli import Subparsers
    from kvshare.patches import TreeReport

_EPILOG = """\
examples:
  kvshare patch check ~/llama.cpp     is the series in, would it go in, or why not?
  kvshare patch apply ~/llama.cpp     put it in: all of it, or nothing
  kvshare patch reverse ~/llama.cpp   take it out again

Works on a git checkout and on a plain tree, by content; git's index is left alone. `check` exits
with 0 if the series is in or goes in. A wrong or half-patched tree is refused, exit status 21,
and stays as it was.
"""


def register(subparsers: Subparsers) -> None:
    """Add the parser of `kvshare patch`."""
    from kvshare.cli import add_command

    parser = add_command(
        subparsers,
        "patch",
        "put the patch series into a llama.cpp tree, or take it out",
        epilog=_EPILOG,
        json_help="print one JSON object with the tree's state, hunk by hunk",
    )
    parser.add_argument("action", choices=("apply", "check", "reverse"))
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT", help="root of a llama.cpp source tree")


def run(args: argparse.Namespace) -> int:
    """Run `kvshare patch`."""
    from kvshare import patches
    from kvshare.errors import PatchError

    act = {"apply": patches.apply, "check": patches.check, "reverse": patches.reverse}[args.action]
    report = act(args.checkout)
    fits = report.state in ("clean", "applied")
    if args.json:
        print(json.dumps(_as_json(report, ok=fits)))
    elif fits:
        print(f"{args.checkout}: {_said(args.action, report)}")
    else:
        for hunk in report.hunks:
            if hunk.outcome == "failed":
                print(f"{hunk.patch}: {hunk.path} hunk {hunk.number} does not fit: {hunk.reason}")
        raise PatchError(report.reason, hint=report.hint)
    return 0 if fits else PatchError.exit_code


def _said(action: str, report: TreeReport) -> str:
    moved = sum(hunk.outcome == "offset" for hunk in report.hunks)
    placed = f"{len(report.hunks)} hunks" + (f", {moved} of them at another line" if moved else "")
    return {
        ("apply", "clean"): f"applied the series ({placed})",
        ("apply", "applied"): "already applied",
        ("check", "clean"): f"clean; the series applies ({placed})",
        ("check", "applied"): "the series is applied",
        ("reverse", "clean"): "the series is not in it; nothing to take out",
        ("reverse", "applied"): "took the series out",
    }[action, report.state]


def _as_json(report: TreeReport, *, ok: bool) -> dict[str, object]:
    return {
        "ok": ok,
        "tree": str(report.tree),
        "state": report.state,
        "reason": report.reason,
        "hint": report.hint,
        "present": report.present,
        "hunks": [vars(hunk) for hunk in report.hunks],
    }
