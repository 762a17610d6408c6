"""What a share and an adoption cost against what may make them slower.

In process, with a second process that fills and vouches as in `benchmarks.handoff`, with metadata. Each
axis changes one thing; a straight line is fitted by least squares through the medians of its points.

- `tokens`: of the prompt, from 100 up to 100,000 in one cache of 100,352 cells.
- `context`: cells of the cache, a prompt of 1,000 tokens.
- `layers`: of the model, 8,192 cells, 1,000 tokens.
- `slots_unified`, `slots_streams`: sequences of a cache of 32,768 cells, 1,000 tokens for the last one;
  one stream for all, or one each.
- `shares_unified`, `shares_streams`: live shares of 1,000 tokens that others of 16 sequences have. They
  are issued, not sent, and right before, so that a share is warmer here than elsewhere.

    python -m benchmarks.scaling [--json] [--plot DIR] [--repetitions N] [--axis NAME ...]

The model is that of `benchmarks.geometry`, with as many layers as a point says. Its K and V are q4_0 here:
100,000 cells take 3 GB, in place of 11 as f16. Neither a share nor an adoption touches more of K and V than
their samples and marks.

Points of an axis take turns where they have one decoder; where they do not, the axis is gone through
there and back. `slope` is microseconds for one more of `unit`,
`intercept_us` what the line says of none.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import geometry, measure
from benchmarks.handoff_provider import ProviderProcess, prompt
from kvshare import fds, fetch
from kvshare.cli import progress
from kvshare.decoder import Decoder
from kvshare.errors import KvshareError

DEFAULT_REPETITIONS = 10
N_TOKENS = 1000  # where they are not what changes
N_CELLS = 32_768  # likewise
N_SLOTS = 16
STEPS = ("share_us", "send_us", "adopt_us")

Figures = dict[str, float]


@dataclass(frozen=True)
class Point:
    """One point of an axis.

    Attributes:
        x: its number there.
        n_tokens: of the prompt.
        n_issued: shares of other sequences that are issued before.
        n_shares: that are live of these; the rest is released.
        n_layer: of the model.
        context: parameters of the decoder's context.
    """

    x: int
    n_tokens: int = N_TOKENS
    n_layer: int = geometry.N_LAYER
    n_issued: int = 0
    n_shares: int = 0
    context: Mapping[str, Any] = field(default_factory=lambda: {"n_ctx": N_CELLS})


@dataclass(frozen=True)
class Axis:
    """What is changed.

    Attributes:
        name: for the command line and the report.
        unit: what a slope is for.
        per: how many of x a unit is.
        points: where it is measured.
    """

    name: str
    unit: str
    per: int
    points: Sequence[Point]


def _slots(n: int, *, unified: bool) -> dict[str, Any]:
    return {"n_ctx": N_CELLS, "n_seq_max": n, "kv_unified": unified}


AXES = {
    axis.name: axis
    for axis in (
        Axis(
            "tokens",
            "1,000 tokens",
            1000,
            [
                Point(n, n_tokens=n, context={"n_ctx": 100_352})
                for n in (100, 1000, 5000, 10_000, 20_000, 50_000, 100_000)
            ],
        ),
        Axis(
            "context",
            "1,000 cells",
            1000,
            [Point(n, context={"n_ctx": n}) for n in (2048, 8192, 20_480, 51_200, 100_352)],
        ),
        Axis(
            "layers",
            "layer",
            1,
            [Point(n, n_layer=n, context={"n_ctx": 8192}) for n in (7, 14, 28, 56, 112)],
        ),
        *(
            Axis(
                f"slots_{kind}",
                "slot",
                1,
                [Point(n, context=_slots(n, unified=kind == "unified")) for n in (1, 2, 4, 8, N_SLOTS)],
            )
            for kind in ("unified", "streams")
        ),
        *(
            Axis(
                f"shares_{kind}",
                "live share",
                1,
                [
                    Point(
                        n,
                        n_issued=N_SLOTS - 1,
                        n_shares=n,
                        context=_slots(N_SLOTS, unified=kind == "unified"),
                    )
                    for n in (0, 1, 3, 7, N_SLOTS - 1)
                ],
            )
            for kind in ("unified", "streams")
        ),
    )
}


class Bench:
    """A decoder that is ready, and a connection to its provider."""

    def __init__(self, decoder: Decoder, provider: ProviderProcess, connection: socket.socket) -> None:
        self._decoder = decoder
        self._provider = provider
        self._connection = connection
        self._seq_id = decoder.context.n_seq_max - 1

    def prepare(self, point: Point) -> None:
        """Hand over without metadata; let the provider vouch with them from now on."""
        self.measure(point, vouch=True)

    def measure(self, point: Point, *, vouch: bool = False) -> Figures:
        """Hand over once, and return what the steps cost."""
        with contextlib.ExitStack() as stack:
            self._decoder.context.clear(self._seq_id)
            # always as many, because the first share after a fill finds its code and data out of the caches
            others = [self._decoder.share(seq_id, n_tokens=N_TOKENS) for seq_id in range(point.n_issued)]
            for i, other in enumerate(others):
                if i < point.n_shares:
                    stack.enter_context(other)
                else:
                    other.release()
            share, steps = self._provider.hand_over(
                self._decoder, self._connection, point.n_tokens, self._seq_id
            )
            tokens = prompt(point.n_tokens)
            start = time.perf_counter()
            self._decoder.adopt(share, tokens)
            steps["adopt_us"] = (time.perf_counter() - start) * 1e6
            if vouch:
                self._provider.vouch_as(self._decoder, share, point.n_tokens)
            return steps


@contextlib.contextmanager
def bench(provider: ProviderProcess, point: Point) -> Iterator[Bench]:
    """Make a decoder for points with the same model and context."""
    with (
        Decoder.open(
            geometry.model(n_layer=point.n_layer),
            type_k="q4_0",
            type_v="q4_0",
            flash_attn="on",
            n_batch=64,
            n_ubatch=64,
            **point.context,
        ) as decoder,
        provider.connect() as connection,
    ):
        yield Bench(decoder, provider, connection)


def measure_axis(
    axis: Axis, provider: ProviderProcess, repetitions: int, show: fetch.Progress
) -> list[list[Figures]]:
    """Return the figures of all repetitions of each point."""
    found: dict[int, list[Figures]] = {point.x: [] for point in axis.points}
    groups = [
        list(points)
        for _, points in itertools.groupby(axis.points, key=lambda point: (point.n_layer, point.context))
    ]
    # there and back, so that a machine that becomes slower meanwhile does not look like a slope
    for turn, n in ((groups, repetitions - repetitions // 2), (groups[::-1], repetitions // 2)):
        for points in turn if n else ():
            with bench(provider, points[0]) as ready:
                for point in points:
                    show(axis.name, sum(map(len, found.values())), repetitions * len(axis.points))
                    ready.prepare(point)
                for _ in range(n):
                    for point in points:
                        found[point.x].append(ready.measure(point))
                        show(axis.name, sum(map(len, found.values())), repetitions * len(axis.points))
    return list(found.values())


def summary(axis: Axis, measured: Sequence[Sequence[Figures]]) -> dict[str, Any]:
    """Return medians, quartiles and the fitted lines of an axis."""
    medians = [measure.medians(each) for each in measured]
    xs = [point.x for point in axis.points]
    fits = {}
    for step in STEPS:
        slope, intercept = np.polyfit(xs, [each[step] for each in medians], 1)
        fits[step] = {"slope": round(float(slope) * axis.per, 3), "intercept_us": round(float(intercept), 3)}
    return {
        "unit": axis.unit,
        "points": [
            {"x": x, **each, "quartiles": measure.quartiles(all_of_it)}
            for x, each, all_of_it in zip(xs, medians, measured, strict=True)
        ],
        "fit": fits,
    }


def measure_all(
    names: Sequence[str], repetitions: int, show: fetch.Progress = fetch.silent
) -> dict[str, Any]:
    """Run the benchmark; return the report that `--json` prints.

    Args:
        names: of the axes.
        repetitions: of each point.
        show: told about the steps.

    Raises:
        KvshareError: a process failed, or did not do what is measured.
    """
    axes = [AXES[name] for name in AXES if name in names]
    longest = max(point.n_tokens for axis in axes for point in axis.points)
    report = {}
    for n_layer in sorted({point.n_layer for axis in axes for point in axis.points}):
        geometry.model(show, n_layer=n_layer)
    with (
        fds.private_directory() as folder,
        ProviderProcess(folder / "provider.sock", longest) as provider,
    ):
        for axis in axes:
            report[axis.name] = summary(axis, measure_axis(axis, provider, repetitions, show))
    return {
        "geometry": {**geometry.LAYOUT, "type": "q4_0", "n_cells": None, "mib": None},
        "repetitions": repetitions,
        "n_cpus": len(os.sched_getaffinity(0)),
        "axes": report,
    }


# -- what is shown -----------------------------------------------------------------------------


def _tables(report: Mapping[str, Any]) -> Iterator[Table]:
    for name, axis in report["axes"].items():
        table = Table(title=f"{name}: medians of {report['repetitions']} repetitions, quartiles (us)")
        table.add_column("")
        for step in STEPS:
            table.add_column(step.removesuffix("_us"), justify="right")
        for point in axis["points"]:
            cells = (
                f"{point[step]:,.0f} [{point['quartiles'][step][0]:,.0f} {point['quartiles'][step][1]:,.0f}]"
                for step in STEPS
            )
            table.add_row(f"{point['x']:,}", *cells)
        table.add_section()
        slopes = (f"{axis['fit'][step]['slope']:+,.2f}" for step in STEPS)
        table.add_row(f"for one more {axis['unit']}", *slopes, style="bold")
        yield table


def plot(report: Mapping[str, Any], folder: Path) -> None:
    """Draw all axes into one picture."""
    pyplot = measure.pyplot()
    axes = report["axes"]
    n_columns = min(len(axes), 3)
    n_rows = -(-len(axes) // n_columns)
    figure, places = pyplot.subplots(
        n_rows, n_columns, figsize=(5 * n_columns, 3.8 * n_rows), squeeze=False, layout="constrained"
    )
    for place in places.flat[len(axes) :]:
        place.remove()
    for place, (name, axis) in zip(places.flat, axes.items(), strict=False):
        xs = [point["x"] for point in axis["points"]]
        for step, color in zip(STEPS, ("C0", "C2", "C1"), strict=True):
            ys = [point[step] for point in axis["points"]]
            bars = [
                [max(abs(point[step] - point["quartiles"][step][i]), 0) for point in axis["points"]]
                for i in (0, 1)
            ]
            fit = axis["fit"][step]
            label = f"{step.removesuffix('_us')}: {fit['slope']:+,.1f} us a {axis['unit']}"
            place.errorbar(xs, ys, yerr=bars, fmt="o", capsize=3, color=color, label=label)
            rise = fit["slope"] / AXES[name].per
            ends = [xs[0], xs[-1]]
            place.plot(ends, [fit["intercept_us"] + rise * x for x in ends], "-", alpha=0.5, color=color)
        place.set(title=name.replace("_", ", "), ylabel="us, median and quartiles", ylim=(0, None))
        place.grid(alpha=0.3)
        place.legend(fontsize="small")
    measure.save_figure(figure, folder, "scaling")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write a picture; needs matplotlib")
    parser.add_argument(
        "--repetitions", type=int, default=DEFAULT_REPETITIONS, metavar="N", help="default: %(default)s"
    )
    parser.add_argument("--axis", nargs="+", choices=AXES, default=list(AXES), help="default: all")
    args = parser.parse_args(argv)
    if args.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    try:
        if args.plot:
            measure.pyplot()
        with progress.shown() as show:
            report = measure_all(args.axis, args.repetitions, show)
    except KvshareError as error:
        return measure.complain("scaling", error)
    if args.plot:
        plot(report, args.plot)
    measure.present(report, _tables(report), as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
