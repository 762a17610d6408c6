"""The prompt of a command: a text, a file, or token ids."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvshare.errors import LocalProtocolError


def add(parser: argparse.ArgumentParser, *, file_option: str = "--file") -> None:
    """Add the options; at most one may be given."""
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt itself")
    prompt.add_argument(
        file_option,
        dest="file",
        type=Path,
        metavar="PATH",
        help="file with the prompt, UTF-8; - is standard input, the default",
    )
    prompt.add_argument("--tokens", type=_tokens, metavar="IDS", help="token ids, such as 1,450,2")
    prompt.add_argument("--tokens-file", type=Path, metavar="PATH", help="JSON file with a list of token ids")


def read(args: argparse.Namespace) -> str | list[int]:
    """Return the prompt that was given: a text, or token ids.

    Raises:
        LocalProtocolError: a file is no UTF-8, or no list of integers.
        OSError: it cannot be read.
    """
    if args.tokens is not None:
        found: list[int] = args.tokens
        return found
    if args.tokens_file is not None:
        return _read_tokens(args.tokens_file)
    if args.prompt is not None:
        text: str = args.prompt
        return text
    if args.file is None or str(args.file) == "-":
        return _utf8(sys.stdin.buffer.read(), "standard input")
    return _utf8(args.file.read_bytes(), str(args.file))


def _utf8(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise LocalProtocolError(f"{where} is not UTF-8: {error}") from error


def _read_tokens(path: Path) -> list[int]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise LocalProtocolError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, list) or any(type(token) is not int for token in found):
        raise LocalProtocolError(f"{path} is not a list of integers")
    return found


def _tokens(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} are not token ids, such as 1,450,2") from error
