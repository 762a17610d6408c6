"""`kvshare provider`: the reference provider as a service."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvshare.cli import Subparsers

_EPILOG = """\
examples:
  kvshare provider --model M.gguf --listen /run/user/1000/kvshare/provider.sock
  kvshare provider --model M.gguf --listen p.sock --cpus 4-7 --max-jobs 4 --json

Decoders send shares to the socket, engines send jobs; the service pairs them by share_id, fills one
after the other, and tells the engine how far it is and how it ended. It keeps the model, and its
context on the decoder's memory as long as the same memory is shared again.

SIGTERM or SIGINT end it at the next graph: what it has then fails, its peers are told, the socket is
removed, and the exit status is 0.

With --json each event is one line: listening, share, job, begun, progress, done, failed, dropped,
cold, stopped.
"""

_PLAIN_SECONDS = 15


def register(subparsers: Subparsers) -> None:
    """Add the parser of `kvshare provider`."""
    from kvshare.cli import add_command, provider_options

    parser = add_command(
        subparsers,
        "provider",
        "prefill for decoders, one job after the other, until it is stopped",
        epilog=_EPILOG,
        json_help="print each event as one JSON line",
    )
    parser.add_argument(
        "--listen", type=Path, required=True, metavar="SOCKET", help="where shares and jobs arrive"
    )
    parser.add_argument(
        "--pair-timeout",
        type=provider_options.seconds,
        default=30.0,
        metavar="S",
        help="seconds that a share and its job may be apart (default: %(default)g)",
    )
    parser.add_argument(
        "--max-jobs",
        type=provider_options.positive,
        default=16,
        metavar="N",
        help="jobs at a time, the one at work included; more are refused (default: %(default)s)",
    )
    provider_options.add(parser, context_help="what a decoder's must be, except --n-batch and --n-ubatch")


def run(args: argparse.Namespace) -> int:
    """Run `kvshare provider`."""
    from kvshare import fds
    from kvshare.cli import progress, provider_options, serving
    from kvshare.provider import WarmProvider
    from kvshare.service import Service

    report = serving.report_json if args.json else _Lines()
    with contextlib.ExitStack() as stack:
        with progress.shown() as show:
            show(f"loading {args.model.name}", 0, None)
            model = stack.enter_context(provider_options.open_model(args))
        filler = stack.enter_context(
            WarmProvider(
                model,
                n_threads=args.threads,
                allow_other_semantics=args.allow_other_semantics,
                **provider_options.context(args),
            )
        )
        listener = stack.enter_context(fds.listening(args.listen))
        service = Service(
            listener,
            filler,
            pair_timeout_s=args.pair_timeout,
            max_jobs=args.max_jobs,
            report=report,
        )
        with serving.stopped_by_signals(service):
            report("listening", socket=str(args.listen), pid=os.getpid())
            service.run()
    report("stopped")
    return 0


class _Lines:
    """One line an event; progress every 15 s."""

    def __init__(self) -> None:
        self._shown = 0.0

    def __call__(self, event: str, /, **fields: Any) -> None:
        now = time.monotonic()
        if event == "progress":
            if now - self._shown < _PLAIN_SECONDS:
                return
        elif event not in _TEXTS:
            return
        self._shown = now
        who = f"share {fields['share_id']}: " if fields.get("share_id") else ""
        n_new = fields.get("n_tokens", 0) - fields.get("n_prefix", 0)
        fields |= {"as": "warm" if fields.get("warm") else "cold", "n_new": n_new}
        print(f"{time.strftime('%H:%M:%S')} {who}{_TEXTS[event].format(**fields)}", flush=True)


_TEXTS = {
    "listening": "listening at {socket}",
    "begun": "prefilling {n_new:,} tokens behind {n_prefix:,}, {as}",
    "progress": "{n_filled:,} of {n_tokens:,} tokens",
    "done": "done, {n_new:,} tokens in {fill_ms:,.0f} ms",
    "failed": "failed: {error}",
    "dropped": "dropped: {error}",
    "cold": "gave the context back: {reason}",
    "stopped": "stopped",
}
