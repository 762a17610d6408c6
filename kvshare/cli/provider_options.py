"""The options that `kvshare prefill` and `kvshare provider` have in common."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvshare.errors import LocalProtocolError

if TYPE_CHECKING:
    from kvshare._native.context import Model

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")

_CONTEXT = ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "type_k", "type_v", "flash_attn")
_FLAGS = ("kv_unified", "swa_full")


def add(parser: argparse.ArgumentParser, *, context_help: str) -> None:
    """Add them.

    Args:
        parser: of the command.
        context_help: what the parameters of the context are for.
    """
    parser.add_argument("--model", type=Path, required=True, metavar="GGUF", help="the decoder's model")
    add_compute(parser)
    parser.add_argument(
        "--allow-other-semantics",
        action="store_true",
        help="accept a decoder of another model of the same shape, such as another quantization",
    )
    group = parser.add_argument_group("parameters of the context", context_help)
    group.add_argument("--n-ctx", type=positive, metavar="N", help="cells")
    group.add_argument("--n-batch", type=positive, metavar="N", help="most tokens of one call")
    group.add_argument("--n-ubatch", type=positive, metavar="N", help="most tokens of one graph")
    group.add_argument("--n-seq-max", type=positive, metavar="N", help="sequences")
    group.add_argument("--type-k", choices=CACHE_TYPES, help="type of the keys")
    group.add_argument("--type-v", choices=CACHE_TYPES, help="type of the values")
    group.add_argument("--flash-attn", choices=("auto", "on", "off"))
    group.add_argument("--kv-unified", action="store_true", help="one stream of cells for all sequences")
    group.add_argument("--swa-full", action="store_true", help="a sliding window's cache of the full size")


def add_compute(parser: argparse.ArgumentParser) -> None:
    """Add those of `open_model`: what computes."""
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="compute threads (default: one for each usable CPU)"
    )
    parser.add_argument(
        "--cpus", type=cpus, metavar="LIST", help="run on these CPUs only, such as 1,3 or 4-7"
    )
    parser.add_argument(
        "--n-gpu-layers",
        type=int,
        default=0,
        metavar="N",
        help="layers on devices, -1 for all (default: %(default)s)",
    )
    parser.add_argument(
        "--main-gpu",
        type=int,
        metavar="N",
        help="the device that has these (default: spread over all)",
    )


def context(args: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters of the context that were given."""
    given = {name: getattr(args, name) for name in _CONTEXT if getattr(args, name) is not None}
    return given | {name: True for name in _FLAGS if getattr(args, name)}


def open_model(args: argparse.Namespace) -> Model:
    """Pin the process to its CPUs, and load the model.

    Raises:
        LocalProtocolError: the CPUs are not there.
        ModelError: the file is no model.
    """
    if args.cpus:
        try:
            os.sched_setaffinity(0, args.cpus)
        except OSError as error:
            usable = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            raise LocalProtocolError(
                f"--cpus: cannot run on {','.join(map(str, sorted(args.cpus)))}: {error.strerror}",
                hint=f"usable are {usable}",
            ) from error
        found = os.sched_getaffinity(0)
        if found != args.cpus:  # the kernel leaves out those that are not there
            missing = ",".join(map(str, sorted(args.cpus - found)))
            raise LocalProtocolError(f"--cpus: there is no CPU {missing} for this process")
    # after that: the library starts its threads
    from kvshare._native.context import Model

    return Model.open(args.model, n_gpu_layers=args.n_gpu_layers, main_gpu=args.main_gpu)


def positive(text: str) -> int:
    """Parse an integer that is at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def seconds(text: str) -> float:
    """Parse a time in seconds, more than 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def cpus(text: str) -> set[int]:
    """Read a list of CPUs, such as `1,3` or `4-7`; a `ValueError` is argparse's to report."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        part_cpus = range(int(first), int(last or first) + 1)
        if not part_cpus or part_cpus.start < 0 or part_cpus.stop > 1 << 16:
            raise ValueError
        found.update(part_cpus)
    return found
