"""`python -m kvshare.testing.chaos`."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from kvshare import build, fds, models
from kvshare.errors import KvshareError
from kvshare.testing import chaos
from kvshare.testing.chaos import case, runner, targets
from kvshare.testing.chaos.faults import FAULTS, KINDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.server and args.provider:
        parser.error("--provider is put to a kvshare.Decoder, whose ledger shows how far it is: no --server")
    try:
        return _list(as_json=args.json) if args.list else _run(args)
    except KvshareError as error:
        print(f"error: {error}" + (f"\n{error.hint}" if error.hint else ""), file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvshare.testing.chaos",
        description=chaos.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--list", action="store_true", help="show the faults and their steps")
    what.add_argument("--run", nargs="+", metavar="NAME", help="run these faults, FAULT or FAULT:STEP")
    what.add_argument("--all", action="store_true", help="run all that are not known to fail")
    parser.add_argument("--kind", choices=KINDS, help="hand over only prompts, or only turns")
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    parser.add_argument("--server", action="store_true", help="against the patched llama-server instead")
    parser.add_argument(
        "--provider", metavar="COMMAND", help="put this provider to the faults that can be shown from outside"
    )
    parser.add_argument(
        "--model", type=Path, help="GGUF file of a model with a plain cache (default: SmolLM2)"
    )
    return parser


def _list(*, as_json: bool) -> int:
    if as_json:
        keys = ("name", "summary", "by", "steps", "targets", "kinds", "foreign", "known")
        print(json.dumps([{key: getattr(fault, key) for key in keys} for fault in FAULTS]))
        return 0
    for fault in FAULTS:
        print(f"{fault.name:20} {fault.summary}")
        alone = "" if fault.kinds == KINDS else f", of a {' or a '.join(fault.kinds)}"
        print(f"{'':20} at {', '.join(fault.steps)}{alone}")
        if fault.known:
            print(f"{'':20} not in --all: {fault.known}")
    return 0


def _run(args: argparse.Namespace) -> int:
    names = None if args.all else args.run
    model = args.model or models.fetch("smollm2")
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fds.private_directory())
        target: targets.Target
        if args.server:
            target = targets.Server(build.build_target(build.SERVER), model, folder)
        else:
            target = targets.InProcess(model, folder)
        stack.enter_context(contextlib.closing(target))
        provider = shlex.split(args.provider) if args.provider else None
        kinds = (args.kind,) if args.kind else KINDS
        chosen = case.cases(names, target.name, kinds=kinds, foreign=provider is not None)
        found = list(runner.run(target, model, folder, chosen, _say, provider=provider))
    outcome = case.summary(found)
    if args.json:
        print(json.dumps(outcome))
    else:
        print("\n".join(f"{name:16} {n}" for name, n in outcome.items() if isinstance(n, int)))
    return 0 if chaos.passed(outcome) else 1


def _say(done: case.Case) -> None:
    state = done.outcome if done.ok else "FAILED"
    # what a provider says may be anything
    reason = "".join(letter if letter.isprintable() else "?" for letter in done.reason)
    where = f"{done.target:8} {done.kind:6} {done.fault:20} {done.step:13}"
    print(f"{where} {state:8} {reason:.120}", file=sys.stderr)
    for text in (*done.wrong, *done.crashes, *([f"leaked {done.leaked}"] if done.leaked else ())):
        print(f"{'':8} {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
