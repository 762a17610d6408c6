"""`kvshare engine`: an OpenAI-compatible front that hands long prompts to a provider."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

from kvshare.errors import KvshareError

if TYPE_CHECKING:
    from kvshare.cli import Subparsers
    from kvshare.policy import Record

_EPILOG = """\
examples:
  llama-server -m model.gguf --kv-share $DIR --port 8080
  kvshare provider --model model.gguf --listen $DIR/provider.sock
  kvshare engine --decoder http://127.0.0.1:8080 --provider $DIR/provider.sock

Clients then use http://127.0.0.1:8090 as they would use the server. Answers say in X-Kvshare-Path and
X-Kvshare-Reason which path they took; /metrics is in Prometheus' format. Whatever fails, a request goes
on as it came. Credentials of clients are passed on, and checked by the server. SIGTERM and SIGINT stop it.
"""


def register(subparsers: Subparsers) -> None:
    """Add the parser of `kvshare engine`."""
    from kvshare.cli import add_command

    parser = add_command(
        subparsers,
        "engine",
        "serve clients of a llama-server, and have long prompts prefilled by a provider",
        epilog=_EPILOG,
        json_help="print one JSON object a line: where it listens, then each completion",
    )
    parser.add_argument("--decoder", metavar="URL", required=True, help="the patched llama-server")
    parser.add_argument(
        "--provider", metavar="SOCKET", required=True, help="socket of `kvshare provider`, in --kv-share"
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=_address,
        default=("127.0.0.1", 8090),
        help="where clients connect; port 0 takes a free one (default: 127.0.0.1:8090)",
    )
    parser.add_argument(
        "--threshold",
        metavar="N",
        type=_positive,
        default=512,
        help="uncached prompt tokens from which on a handoff is considered (default: %(default)s)",
    )
    parser.add_argument(
        "--provider-timeout",
        metavar="SECONDS",
        type=_seconds,
        default=60.0,
        help="how long the provider may be silent: no batch of any prompt done (default: %(default)s)",
    )
    parser.add_argument(
        "--patience",
        metavar="X",
        type=_seconds,
        default=4.0,
        help="how many times slower than the server a handoff may be while other slots generate, as it"
        " does not stall them (default: %(default)s)",
    )
    parser.add_argument(
        "--evict",
        choices=("none", "own", "idle"),
        default="own",
        help="which idle slots may be emptied if no clean one is left: none, those that the engine filled,"
        " any (default: %(default)s)",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="adopt only when the provider has let go of the memory; it keeps nothing warm then",
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("KVSHARE_API_KEY"),
        help="key for requests of clients that send none; $KVSHARE_API_KEY keeps it out of sight",
    )
    parser.add_argument(
        "--max-body",
        metavar="MIB",
        type=_positive,
        default=64,
        help="larger requests are refused, MiB (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Run `kvshare engine`."""
    try:
        import aiohttp
        import prometheus_client
    except ImportError as error:
        raise KvshareError(
            f"the engine needs {error.name}", hint="install the extra: pip install 'kvshare[engine]'"
        ) from error
    del aiohttp, prometheus_client
    return asyncio.run(_serve(args))


async def _serve(args: argparse.Namespace) -> int:
    from kvshare.engine import Engine, ProviderClient
    from kvshare.front import Front, serve
    from kvshare.policy import Evict, Policy
    from kvshare.server import ServerClient

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    broken: list[BrokenPipeError] = []

    def report(path: str, record: Record) -> None:
        if args.json:
            try:
                _print({"event": "completion", "route": path, **record.to_json()})
            except BrokenPipeError as error:  # not this request's fault
                broken.append(error)
                stop.set()
        else:
            logging.getLogger(__name__).info("%s: %s", path, json.dumps(record.to_json()))

    async with ServerClient(args.decoder, strict=args.strict) as server:
        engine = Engine(
            server,
            ProviderClient(os.path.abspath(args.provider), silence_s=args.provider_timeout),
            Policy(threshold=args.threshold, patience=args.patience),
            evict=Evict(args.evict),
        )
        front = Front(
            engine, server, api_key=args.api_key, max_body_nbytes=args.max_body << 20, report=report
        )
        runner, url = await serve(front, *args.listen)
        try:
            if args.json:
                _print({"event": "listening", "url": url, "decoder": server.url, "provider": args.provider})
            else:
                print(f"listening at {url} before {server.url}", flush=True)
            await stop.wait()
        finally:
            await runner.cleanup()
    if broken:
        raise broken[0]
    return 0


def _print(event: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return host, int(port)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
