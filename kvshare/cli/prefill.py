"""`kvshare prefill`: the reference provider, for one prompt."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshare.errors import LocalProtocolError

if TYPE_CHECKING:
    from kvshare._native.context import Model
    from kvshare.cli import Subparsers
    from kvshare.fetch import Progress

_EPILOG = """\
examples:
  kvshare prefill --model M.gguf --fds /run/user/1000/p.sock --file prompt.txt --all-but-last
  kvshare prefill --model M.gguf --fds /run/user/1000/p.sock --tokens 1,450,2 --cpus 1
  kvshare prefill --model M.gguf --out slot.bin --tokens-file tokens.json --type-k q8_0
  echo "Once upon a time" | kvshare prefill --model M.gguf --out slot.bin

--fds listens at SOCKET, receives one share there, and prefills into the decoder's own memory, with
the decoder's parameters. What is given here must agree, except --n-batch and --n-ubatch.

--out prefills in a context of its own and writes llama.cpp's state file of a sequence, as
llama-server's slot action `restore` reads it. The file appears when it is complete. The restoring
side needs the same --type-k, --type-v and --flash-attn; a server with -np 4 --no-kv-unified needs
--n-seq-max 4.

Exactly the tokens that are given are prefilled. A decoder has to evaluate at least one token itself
to get logits, so an engine hands over all but the last one: --all-but-last leaves it out.
"""


def register(subparsers: Subparsers) -> None:
    """Add the parser of `kvshare prefill`."""
    from kvshare.cli import add_command, prompt_options, provider_options

    parser = add_command(
        subparsers,
        "prefill",
        "prefill one prompt, into a decoder's memory or into a file",
        epilog=_EPILOG,
        json_help="print one JSON object at the end",
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--fds", type=Path, metavar="SOCKET", help="prefill into the share that comes here")
    where.add_argument("--out", type=Path, metavar="FILE", help="write a sequence state file")
    prompt_options.add(parser)
    parser.add_argument("--all-but-last", action="store_true", help="leave out the last token of the prompt")
    parser.add_argument(
        "--timeout",
        type=provider_options.seconds,
        default=60.0,
        metavar="S",
        help="seconds until a decoder must have connected and sent its share (default: %(default)g)",
    )
    provider_options.add(
        parser, context_help="with --out: of its context; with --fds: what the decoder's must be"
    )


def script() -> int:
    """Run `kvshare prefill` as a command of its own, `kvshare-prefill`."""
    from kvshare.cli import main

    return main(["prefill", *sys.argv[1:]])


def run(args: argparse.Namespace) -> int:
    """Run `kvshare prefill`."""
    from kvshare.cli import progress, prompt_options, provider_options

    if args.out is not None:
        _check_target(args.out)
    prompt = prompt_options.read(args)
    with progress.shown() as show:
        show(f"loading {args.model.name}", 0, None)
        with provider_options.open_model(args) as model:
            tokens = model.tokenize(prompt) if isinstance(prompt, str) else prompt
            if args.all_but_last:
                tokens = tokens[:-1]
            model.check_tokens(tokens)
            report = (_to_decoder if args.fds is not None else _to_file)(args, model, tokens, show)
    if args.json:
        print(json.dumps({"ok": True, "n_tokens": len(tokens), **report}))
    else:
        what = report["path"] if report["transport"] == "file" else f"share {report['share_id']}"
        print(f"{len(tokens):,} tokens in {report['prefill_ms']:,.0f} ms: {what}")
    return 0


# -- into a decoder's memory ---------------------------------------------------------------------


def _to_decoder(
    args: argparse.Namespace, model: Model, tokens: Sequence[int], show: Progress
) -> dict[str, Any]:
    from kvshare import fds
    from kvshare.cli import provider_options
    from kvshare.provider import serving

    with fds.listening(args.fds) as listener:
        show(f"waiting for a decoder at {args.fds}", 0, None)
        with serving(
            listener,
            model,
            tokens,
            deadline=time.monotonic() + args.timeout,
            progress=lambda n: show("prefilling", n, len(tokens)),
            n_threads=args.threads,
            allow_other_semantics=args.allow_other_semantics,
            **provider_options.context(args),
        ) as provider:
            return {
                "transport": "fds",
                "share_id": provider.offer.header.share_id,
                "seq_id": provider.offer.seq_id,
                "prefill_ms": provider.prefill_ms,
            }


# -- into a file -----------------------------------------------------------------------------------


def _to_file(args: argparse.Namespace, model: Model, tokens: Sequence[int], show: Progress) -> dict[str, Any]:
    from kvshare._native.context import Context
    from kvshare.cli import provider_options

    params = provider_options.context(args)
    if "n_ctx" not in params:
        n_seq = 1 if params.get("kv_unified") else params.get("n_seq_max", 1)
        params["n_ctx"] = -(-len(tokens) // 256) * 256 * n_seq
    with Context.create(model, n_threads=args.threads, **params) as context:
        if len(tokens) > context.n_ctx_seq:
            raise LocalProtocolError(
                f"{len(tokens)} tokens do not fit into a context of {context.n_ctx_seq} cells",
                hint="give a larger --n-ctx",
            )
        start = time.perf_counter()
        if model.has_encoder:
            context.encode(tokens)
        context.decode(tokens, position=0, progress=lambda n: show("prefilling", n, len(tokens)))
        saving = time.perf_counter()
        show(f"saving {args.out}", 0, None)
        nbytes = _save(context, args.out, tokens)
        end = time.perf_counter()
    return {
        "transport": "file",
        "path": str(args.out),
        "nbytes": nbytes,
        "prefill_ms": (saving - start) * 1000,
        "save_ms": (end - saving) * 1000,
    }


def _check_target(path: Path) -> None:
    """Refuse before the work what cannot be written after it."""
    if path.is_dir():
        raise LocalProtocolError(f"--out {path} is a folder, not a file")
    if not path.parent.is_dir():
        raise LocalProtocolError(f"--out {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise LocalProtocolError(f"--out {path}: cannot write to {path.parent}")


def _save(context: Any, path: Path, tokens: Sequence[int]) -> int:
    """Save to a file beside it, which only this user can read, and put that in its place."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        nbytes: int = context.save(name, tokens)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    return nbytes
