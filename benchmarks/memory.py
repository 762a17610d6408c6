"""What sharing a cache costs in memory: a decoder and its providers against one process.

The cache is that of `benchmarks.geometry`. Every process is a Python of its own that maps the model file:

- `one`: has a private cache, prefills a prompt into it and decodes a token.
- `shared`: a decoder and 1, 2 or 4 providers. One provider after the other is offered the sequence,
  prefills the prompt, and keeps its context, as a warm provider does; the decoder adopts and decodes a
  token. In the end all of them have mapped the whole cache; a provider has touched the rows of the prompt.

    python -m benchmarks.memory [--json] [--plot DIR] [--tokens N] [--providers N ...]

Figures are taken from the kernel once all is done, in MiB. `pss_mib` is the proportional memory: what
several processes map, the cache and the model's file above all, counts in parts that add up to one.
`shmem_mib` and `file_mib` are what of it is shared memory and files. `rss_mib` counts it in full for each
process, `page_tables_mib` (VmPTE) is what the kernel needs to map it, and is in neither. `ratio_pss` is all
processes against the one, `ratio_with_page_tables` is the same with these added.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import geometry, measure
from benchmarks.handoff_provider import prompt
from kvshare import fds, fetch
from kvshare._native import loader
from kvshare._native.context import Context, Model
from kvshare.cli import progress
from kvshare.decoder import Decoder, Share
from kvshare.errors import KvshareError
from kvshare.provider import Offer, WarmProvider

DEFAULT_TOKENS = 1000
DEFAULT_PROVIDERS = (1, 2, 4)
MAX_TOKENS = geometry.N_CELLS - 1
TIMEOUT_S = 600.0
COLUMNS = ("pss_mib", "shmem_mib", "file_mib", "rss_mib", "page_tables_mib")

Figures = dict[str, float]


# -- the processes -----------------------------------------------------------------------------


def _alone(model: Model, n_tokens: int, _: Path) -> None:
    tokens = prompt(n_tokens)
    with Context.create(model, n_ctx=geometry.N_CELLS) as context:
        context.decode(tokens, position=0)
        _decode_one(context, n_tokens)
        measure.answer_jobs(lambda _: {})


def _decoder(model: Model, n_tokens: int, _: Path) -> None:
    tokens = prompt(n_tokens)
    with Decoder.open(model, n_ctx=geometry.N_CELLS) as decoder:
        share: Share | None = None

        def handle(job: Mapping[str, Any]) -> dict[str, Any]:
            nonlocal share
            if job["job"] == "share":
                decoder.context.clear()
                share = decoder.share(n_tokens=n_tokens, expires_ms=int(TIMEOUT_S * 1000))
                share.send(job["socket"])
            else:
                assert share is not None
                decoder.adopt(share, tokens)
                _decode_one(decoder.context, n_tokens)
            return {}

        measure.answer_jobs(handle)


def _provider(model: Model, n_tokens: int, socket: Path) -> None:
    tokens = prompt(n_tokens)
    with fds.listening(socket) as listener, WarmProvider(model) as provider:

        def handle(_: Mapping[str, Any]) -> dict[str, Any]:
            with (
                fds.accept_unix(listener, deadline=time.monotonic() + TIMEOUT_S) as connection,
                Offer.receive(connection) as offer,
            ):
                provider.fill(offer, tokens, begun=lambda _: None, progress=lambda _: None)
            return {}

        print("{}", flush=True)
        measure.answer_jobs(handle)


ROLES = {"alone": _alone, "decoder": _decoder, "provider": _provider}


def _decode_one(context: Context, position: int) -> None:
    context.decode([0], position=position, logits=True)
    context.synchronize()


def _child(role: str, model: Path, n_tokens: int, socket: Path = Path()) -> measure.Child:
    arguments = ("--role", role, "--model", str(model), "--tokens", str(n_tokens), "--socket", str(socket))
    # found here, and loaded only there: what this process maps would count in part
    return measure.Child(
        "benchmarks.memory", *arguments, environment={loader.ENVIRONMENT: str(loader.find())}
    )


# -- the measurement ---------------------------------------------------------------------------


def memory_of(pid: int) -> Figures:
    """Return what the kernel says of the memory of a process, MiB."""
    kib = {}
    for name in ("smaps_rollup", "status"):
        for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
            key, _, value = line.partition(":")
            if value.endswith(" kB"):
                kib[key] = int(value.removesuffix(" kB"))
    names = ("Pss", "Pss_Shmem", "Pss_File", "Rss", "VmPTE")
    return {column: kib[name] / 1024 for column, name in zip(COLUMNS, names, strict=True)}


def measure_one(model: Path, n_tokens: int) -> Figures:
    """Return the memory of a process with a private cache."""
    with _child("alone", model, n_tokens) as child:
        child.ask()
        return memory_of(child.pid)


def measure_shared(model: Path, n_tokens: int, n_providers: int) -> dict[str, Any]:
    """Return the memory of a decoder and its providers, of each and of all."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fds.private_directory())
        decoder = stack.enter_context(_child("decoder", model, n_tokens))
        providers = []
        for i in range(n_providers):
            socket = folder / f"{i}.sock"
            provider = stack.enter_context(_child("provider", model, n_tokens, socket))
            provider.answer()
            decoder.ask(job="share", socket=str(socket))
            provider.ask(job="fill")
            decoder.ask(job="adopt")
            providers.append(provider)
        of_each = [memory_of(child.pid) for child in (decoder, *providers)]
    return {
        **{column: sum(each[column] for each in of_each) for column in COLUMNS},
        "decoder": of_each[0],
        "providers": of_each[1:],
    }


def measure_all(n_tokens: int, numbers: Sequence[int], show: fetch.Progress = fetch.silent) -> dict[str, Any]:
    """Run the benchmark; return the report that `--json` prints.

    Args:
        n_tokens: of the prompt.
        numbers: of providers.
        show: told about the steps.

    Raises:
        KvshareError: a process failed.
    """
    model = geometry.model(show)
    show("one process", 0, None)
    one = measure_one(model, n_tokens)
    shared = {}
    for n in numbers:
        show(f"a decoder and {n} providers", 0, None)
        found = measure_shared(model, n_tokens, n)
        found["ratio_pss"] = found["pss_mib"] / one["pss_mib"]
        found["ratio_with_page_tables"] = _with_page_tables(found) / _with_page_tables(one)
        shared[str(n)] = found
    report: dict[str, Any] = _rounded(
        {"geometry": geometry.LAYOUT, "n_tokens": n_tokens, "one": one, "shared": shared}
    )
    return report


def _with_page_tables(figures: Mapping[str, float]) -> float:
    return figures["pss_mib"] + figures["page_tables_mib"]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def _table(report: Mapping[str, Any]) -> Table:
    table = Table(title=f"memory with a cache of {report['geometry']['mib']:,.0f} MiB (MiB)")
    table.add_column("")
    for column in ("PSS", "of that shared memory", "files", "RSS", "page tables", "PSS / one"):
        table.add_column(column, justify="right")

    def add(name: str, figures: Mapping[str, float], ratio: float | None = None, **style: Any) -> None:
        cells = (f"{figures[column]:,.1f}" for column in COLUMNS)
        table.add_row(name, *cells, "" if ratio is None else f"{ratio:.3f}", **style)

    add("one process", report["one"], 1, end_section=True)
    for n, found in report["shared"].items():
        add("decoder", found["decoder"])
        for provider in found["providers"]:
            add("provider", provider)
        add(f"decoder, {n} of them", found, found["ratio_pss"], style="bold", end_section=True)
    return table


def plot(report: Mapping[str, Any], folder: Path) -> None:
    """Draw the proportional memory of all processes, and what it consists of."""
    pyplot = measure.pyplot()
    found = {"one process": report["one"]}
    found |= {f"decoder,\n{n} provider{'s'[: n != '1']}": each for n, each in report["shared"].items()}
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.5 * len(found), 4.5))
    parts = {
        "shared memory": [each["shmem_mib"] for each in found.values()],
        "files": [each["file_mib"] for each in found.values()],
        "private": [each["pss_mib"] - each["shmem_mib"] - each["file_mib"] for each in found.values()],
        "page tables": [each["page_tables_mib"] for each in found.values()],
    }
    below = np.zeros(len(found))
    for name, mib in parts.items():
        drawn = axes.bar(list(found), mib, 0.6, bottom=below, label=name)
        below += mib
    axes.bar_label(drawn, [f"{mib:,.0f}" for mib in below], padding=2, fontsize="small")
    axes.set(ylabel="MiB, of all processes", ylim=(0, 1.35 * max(below)))  # room for the legend
    axes.set_title(f"proportional memory with a cache of {report['geometry']['mib']:,.0f} MiB")
    axes.set_axisbelow(True)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    measure.save_figure(figure, folder, "memory")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture; needs matplotlib")
    parser.add_argument(
        "--tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--providers", type=int, nargs="+", default=DEFAULT_PROVIDERS, metavar="N")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--socket", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if not 0 < args.tokens <= MAX_TOKENS:
        parser.error(f"--tokens must be from 1 to {MAX_TOKENS}")
    if min(args.providers) < 1:
        parser.error("--providers must be at least 1")
    try:
        if args.role:
            with Model.open(args.model) as model:
                ROLES[args.role](model, args.tokens, args.socket)
            return 0
        if args.plot:
            measure.pyplot()
        with progress.shown() as show:
            report = measure_all(args.tokens, args.providers, show)
    except KvshareError as error:
        return measure.complain("memory", error)
    if args.plot:
        plot(report, args.plot)
    measure.present(report, [_table(report)], as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
