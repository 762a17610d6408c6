"""`kvshare prefix serve|put|list|drop`: prefixes that are prefilled once and forked by many."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshare.errors import LocalProtocolError

if TYPE_CHECKING:
    from kvshare.cli import Subparsers
    from kvshare.decoder import Decoder

_EPILOG = """\
examples:
  kvshare prefix serve --listen /run/user/1000/prefixes.sock
  kvshare prefix put /run/user/1000/prefixes.sock --name system -m M.gguf --prompt-file system.txt -c 8192
  kvshare prefix list /run/user/1000/prefixes.sock
  kvshare prefix drop /run/user/1000/prefixes.sock system

`put` prefills a prompt, freezes it, and gives it to the server. Programs then fork it, many at once and
without a prefill: kvshare.Prefix.get(SOCKET, NAME).fork(MODEL). Each of these commands has --json, and
--log-level, and a --help of its own.
"""

_SERVE_EPILOG = """\
examples:
  kvshare prefix serve --listen /run/user/1000/prefixes.sock
  kvshare prefix serve --listen p.sock --max-bytes 500M --json

The prefixes that were not used for the longest time go when there is no room for another. Who has one
keeps it, also when this server has ended. SIGTERM or SIGINT end it: the socket is removed, and the exit
status is 0.

With --json each event is one line: listening, put, get, drop, evicted, refused, stopped.
"""

_PUT_EPILOG = """\
examples:
  kvshare prefix put p.sock --name system -m M.gguf --prompt "You are a helpful assistant."
  kvshare prefix put p.sock --name document -m M.gguf --prompt-file document.txt -c 16384
  echo "Once upon a time" | kvshare prefix put p.sock --name story -m M.gguf

Exactly the tokens that are given are prefilled. A reader needs the same model, and a context with the
same parameters; kvshare.Prefix.fork builds it so by itself. What takes the place of another prefix of
this name is for those who ask from then on.
"""

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def register(subparsers: Subparsers) -> None:
    """Add the parser of `kvshare prefix`."""
    summary = "keep prefilled prompts that many processes go on from"
    parser = subparsers.add_parser(
        "prefix",
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _register_serve(actions)
    _register_put(actions)
    _register_asking(actions)


def _register_serve(actions: Subparsers) -> None:
    from kvshare.cli import add_command

    parser = add_command(
        actions,
        "serve",
        "keep prefixes at a socket, until it is stopped",
        epilog=_SERVE_EPILOG,
        json_help="print each event as one JSON line",
    )
    parser.add_argument("--listen", type=Path, required=True, metavar="SOCKET", help="where to listen")
    parser.add_argument(
        "--max-bytes",
        type=_nbytes,
        default=_nbytes("4G"),
        metavar="N",
        help="physical memory of all prefixes, such as 500M (default: 4G)",
    )


def _register_put(actions: Subparsers) -> None:
    from kvshare.cli import add_command, prompt_options, provider_options

    parser = add_command(
        actions,
        "put",
        "prefill a prompt, freeze it, and give it to a server",
        epilog=_PUT_EPILOG,
        json_help="print one JSON object at the end",
    )
    positive = provider_options.positive
    parser.add_argument("socket", type=Path, metavar="SOCKET", help="of `kvshare prefix serve`")
    parser.add_argument("--name", required=True, help="1 to 128 characters out of A-Z a-z 0-9 . _ -")
    parser.add_argument("-m", "--model", type=Path, required=True, metavar="GGUF", help="the readers' model")
    prompt_options.add(parser, file_option="--prompt-file")
    provider_options.add_compute(parser)
    group = parser.add_argument_group("parameters of the context", "what a reader's have to be")
    group.add_argument("-c", "--n-ctx", type=positive, metavar="N", help="cells (default: 4096)")
    group.add_argument("--n-batch", type=positive, metavar="N", help="most tokens of one call")
    group.add_argument("--n-ubatch", type=positive, metavar="N", help="most tokens of one graph")
    group.add_argument("--n-seq-max", type=positive, metavar="N", help="sequences")
    group.add_argument("--type-k", choices=provider_options.CACHE_TYPES, help="type of the keys")
    group.add_argument("--type-v", choices=provider_options.CACHE_TYPES, help="type of the values")
    group.add_argument("--flash-attn", choices=("auto", "on", "off"))
    group.add_argument("--kv-unified", action="store_true", help="one stream of cells for all sequences")
    group.add_argument("--swa-full", action="store_true", help="a sliding window's cache of the full size")


def _register_asking(actions: Subparsers) -> None:
    from kvshare.cli import add_command

    for name, summary in (
        ("list", "show the prefixes of a server, the one that was used last at the end"),
        ("drop", "let a server forget a prefix; who has it keeps it"),
    ):
        parser = add_command(actions, name, summary, json_help="print one JSON object")
        parser.add_argument("socket", type=Path, metavar="SOCKET", help="of `kvshare prefix serve`")
        if name == "drop":
            parser.add_argument("name", metavar="NAME", help="of the prefix")


def run(args: argparse.Namespace) -> int:
    """Run `kvshare prefix`."""
    return {"serve": _serve, "put": _put, "list": _list, "drop": _drop}[args.action](args)


# -- the server ----------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    from kvshare import fds
    from kvshare.cli import serving
    from kvshare.store import PrefixServer, PrefixStore

    report = serving.report_json if args.json else _as_line
    with fds.listening(args.listen) as listener, PrefixStore(max_nbytes=args.max_bytes) as store:
        server = PrefixServer(listener, store, report=report)
        with serving.stopped_by_signals(server):
            report("listening", socket=str(args.listen), pid=os.getpid())
            server.run()
    report("stopped")
    return 0


def _as_line(event: str, /, **fields: Any) -> None:
    print(f"{time.strftime('%H:%M:%S')} {_TEXTS[event].format(**fields)}", flush=True)


_TEXTS = {
    "listening": "listening at {socket}",
    "put": "{name}: {n_tokens:,} tokens, {nbytes:,} bytes",
    "get": "{name}: handed out",
    "drop": "{name}: dropped",
    "evicted": "{name}: evicted, {nbytes:,} bytes",
    "refused": "refused: {error}",
    "stopped": "stopped",
}


# -- its clients ---------------------------------------------------------------------------------


def _put(args: argparse.Namespace) -> int:
    from kvshare import wire
    from kvshare.cli import progress, prompt_options, provider_options
    from kvshare.decoder import Decoder
    from kvshare.prefix import Prefix, list_prefixes

    # refuse before the work what would be refused after it
    wire.encode(wire.PrefixRequest(op="get", name=args.name))
    list_prefixes(args.socket)
    prompt = prompt_options.read(args)
    with progress.shown() as show:
        show(f"loading {args.model.name}", 0, None)
        with provider_options.open_model(args) as model:
            tokens = model.tokenize(prompt) if isinstance(prompt, str) else prompt
            model.check_tokens(tokens)
            params = provider_options.context(args)
            with Decoder.open(model, n_threads=args.threads, **params) as decoder:
                _require_room(decoder, tokens)
                start = time.perf_counter()
                if model.has_encoder:
                    decoder.context.encode(tokens)
                decoder.context.decode(
                    tokens, position=0, progress=lambda n: show("prefilling", n, len(tokens))
                )
                freezing = time.perf_counter()
                show("freezing", 0, None)
                with Prefix.freeze(decoder, tokens, name=args.name) as prefix:
                    end = time.perf_counter()
                    prefix.put(args.socket)
                    report = {
                        "name": prefix.name,
                        "prefix_id": prefix.prefix_id,
                        "n_tokens": len(tokens),
                        "nbytes": prefix.nbytes,
                        "prefill_ms": (freezing - start) * 1000,
                        "freeze_ms": (end - freezing) * 1000,
                    }
    if args.json:
        print(json.dumps({"ok": True, **report}))
    else:
        print("{name}: {n_tokens:,} tokens, {nbytes:,} bytes".format(**report))
    return 0


def _require_room(decoder: Decoder, tokens: list[int]) -> None:
    n_ctx = decoder.context.n_ctx_seq
    if len(tokens) > n_ctx:
        raise LocalProtocolError(
            f"{len(tokens)} tokens do not fit into a context of {n_ctx} cells", hint="give a larger --n-ctx"
        )


def _list(args: argparse.Namespace) -> int:
    from kvshare.prefix import list_prefixes

    entries = list_prefixes(args.socket)
    if args.json:
        print(json.dumps({"ok": True, "prefixes": [vars(entry) for entry in entries]}))
    for entry in () if args.json else entries:
        print(
            f"{entry.name}: {entry.n_tokens:,} tokens, {entry.nbytes:,} bytes,"
            f" handed out {entry.n_reads:,} times"
        )
    return 0


def _drop(args: argparse.Namespace) -> int:
    from kvshare.prefix import drop_prefix

    drop_prefix(args.socket, args.name)
    print(json.dumps({"ok": True, "name": args.name}) if args.json else f"{args.name}: dropped")
    return 0


def _nbytes(text: str) -> int:
    """Parse a number of bytes, such as 500M."""
    match = re.fullmatch(r"(\d+)([KMGT]?)", text)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, such as 500M or 4G")
    return int(match[1]) * _UNITS[match[2]]
