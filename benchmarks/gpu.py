"""Everything that a cache on a GPU has to show, on a machine that has one.

Two processes, decoder and provider, both on the GPU, whose caches are one memory of it. `scripts/gpu_check`
compiles what is needed and runs this; by itself it needs a patched libllama with CUDA (`kvshare build
--cmake-arg=-DGGML_CUDA=ON --target test-llama-archs`, or KVSHARE_LIBRARY).

    python -m benchmarks.gpu [--json] [--only PART ...] [--repetitions N] [--cycles N] [--archs FOLDER]

The parts:

- `handoff`: prompts of 251, 3,189 and 12,722 tokens on a cache of 2,240 MiB (`benchmarks.geometry`). The
  logits of each handoff are compared with a local run, bit for bit. `share_us`, `send_us` and `adopt_us`
  are the steps of the decoder; `prefill_ms` is the provider's. `first_token_ms` is the first token after the
  adoption, `local_first_token_ms` that after a prefill of its own, `steady_token_ms` the median of the next
  ones. Beside it, from the same state: a file in memory (`save_ms`, `restore_ms`), and a copy to the host and
  back (`to_host_ms`, `to_device_ms`). Medians.
- `kinds`: one handoff between two processes for each kind of cache, and for sizes that are no multiples of
  what the driver gives memory in.
- `architectures`: `benchmarks.architectures` with all layers on the GPU.
- `life`: a provider that is killed while its kernels run, a decoder that is killed while a provider has its
  memory, and many cycles of sharing, adopting and releasing. Memory of the GPU and descriptors are as
  before afterwards.
- `devices`: providers that count their GPUs otherwise, see another one, or none.
- `views`: a provider that is PyTorch, if that is installed.
- `dma_buf`: the memory of a cache as a dma-buf. That another driver can import it is not tried.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import architectures, geometry, measure
from benchmarks.gpu_child import ALL_LAYERS, ChildProcess, open_model, prompt
from kvshare import fds
from kvshare._native import cuda, loader
from kvshare._native.context import Context, Model
from kvshare.cli import progress
from kvshare.decoder import Adopted, Decoder, Share
from kvshare.errors import KvshareError, LibraryError, LocalProtocolError
from kvshare.ledger import LedgerState
from kvshare.testing import architectures as generated

LENGTHS = (251, 3189, 12722)
N_STEADY = 5
N_WARM_UP = 10  # cycles: kernels, pools and caches are there after these
KINDS = {
    "plain": "llama-dense",
    "sliding window": "gemma3-dense",
    "hybrid": "jamba-dense",
    "recurrent": "mamba-dense",
    "latent": "deepseek2-moe",
    "compressed": "deepseek4-moe",
}
MIXED = ("llama-dense", "gemma3-dense", "jamba-dense")
N_MIXED = 2  # layers on the GPU: the output is one
SIZES: tuple[dict[str, Any], ...] = (
    {"n_ctx": 256},
    {"n_ctx": 2816},
    {"n_ctx": 1024, "type_k": "q8_0", "type_v": "q8_0"},
)
CASES = ("short", "long", "long-no-fa", "q8_0", "seq-2-of-4", "seq-2-of-4-unified", "turns", "turns-no-fa")
N_SHORT = 216
MIN_HELD_MIB = 2000  # of the cache of 2,240
SAME, NONE = "the same by UUID", "none"
GPU = 1  # GGML_BACKEND_DEVICE_TYPE_GPU

Report = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What the parts have in common.

    Attributes:
        archs: folder of the models of `test-llama-archs`.
        repetitions: of each length.
        cycles: of `life`.
    """

    archs: Path
    repetitions: int
    cycles: int


class Pair:
    """A decoder here and a provider in another process.

    Args:
        stack: closes them.
        path: of the model.
        environment: of the provider.
        n_gpu_layers: layers of both models on the GPU.
        context: parameters of the decoder.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        path: Path,
        environment: Mapping[str, str] | None = None,
        n_gpu_layers: int = ALL_LAYERS,
        **context: Any,
    ) -> None:
        socket = stack.enter_context(fds.private_directory()) / "provider.sock"
        self.model = stack.enter_context(open_model(path, n_gpu_layers))
        self.decoder = stack.enter_context(Decoder.open(self.model, n_threads=1, **context))
        self.provider = stack.enter_context(ChildProcess(socket, path, environment, n_gpu_layers))
        self.connection = stack.enter_context(self.provider.connect())

    def share(self, n_tokens: int) -> tuple[Share, Report]:
        """Share the sequence, and let it be prefilled; return what it cost, and what the provider says."""
        self.provider.tell(job="serve", n_tokens=n_tokens)
        times = [time.perf_counter()]
        share = self.decoder.share(n_tokens=n_tokens)
        times.append(time.perf_counter())
        share.send(self.connection)
        times.append(time.perf_counter())
        answer = self.provider.answer()
        return share, {"share_us": _us(times[:2]), "send_us": _us(times[1:]), **answer}

    def hand_over(self, n_tokens: int) -> tuple[Report, Adopted]:
        """Share and adopt."""
        share, steps = self.share(n_tokens)
        if "error" in steps:
            raise LocalProtocolError(f"the provider: {steps['error']}")
        start = time.perf_counter()
        done = self.decoder.adopt(share, prompt(self.model.n_vocab, n_tokens))
        return {**steps, "adopt_us": _us([start, time.perf_counter()])}, done


def _us(times: Sequence[float]) -> float:
    return (times[1] - times[0]) * 1e6


def _answers(context: Context, position: int) -> tuple[list[bytes], list[float]]:
    """Decode some tokens behind a prompt; return the logits of each, and its milliseconds."""
    logits, times = [], []
    for i in range(1 + N_STEADY):
        start = time.perf_counter()
        context.decode([1 + i], position=position + i, logits=True)
        context.synchronize()
        times.append((time.perf_counter() - start) * 1000)
        found = context.logits()
        logits.append(found.tobytes() if np.isfinite(found).all() else b"")
    return logits, times


def _local(model: Model, n_tokens: int, **context: Any) -> tuple[list[bytes], Report]:
    """Prefill in a context of this process only; return the logits behind it, and its milliseconds."""
    tokens = prompt(model.n_vocab, n_tokens)
    with Context.create(model, n_threads=1, **context) as plain:
        plain.decode(tokens, position=0)
        plain.synchronize()
        plain.clear()
        start = time.perf_counter()
        plain.decode(tokens, position=0)
        plain.synchronize()
        elapsed = (time.perf_counter() - start) * 1000
        logits, times = _answers(plain, n_tokens)
        return logits, {"local_prefill_ms": round(elapsed, 3), "local_first_token_ms": round(times[0], 3)}


def _is_same(found: Sequence[bytes], expected: Sequence[bytes]) -> bool:
    return list(found) == list(expected) and all(found)


# -- the parts ---------------------------------------------------------------------------------


def handoff(setup: Setup) -> Report:
    """Measure handoffs and what would be used in their place."""
    path = geometry.model()
    runs = []
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, path, n_ctx=geometry.N_CELLS)
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
            )
        )
        for n in LENGTHS:
            expected, local = _local(pair.model, n, n_ctx=geometry.N_CELLS)
            handoffs, peers, identical, moved, warm = [], [], True, 0, []
            pair.provider.ask(job="forget")  # the first one is cold
            for _ in range(setup.repetitions):
                pair.decoder.context.clear()
                steps, done = pair.hand_over(n)
                logits, times = _answers(pair.decoder.context, n)
                identical &= _is_same(logits, expected)
                moved += done.bytes_moved
                warm.append(steps.pop("warm"))
                handoffs.append(
                    {
                        **steps,
                        "adopt_library_us": done.t_us,
                        "first_token_ms": times[0],
                        "steady_token_ms": statistics.median(times[1:]),
                    }
                )
            for _ in range(max(3, setup.repetitions // 4)):
                peers.append(_peers(pair.decoder.context, prompt(pair.model.n_vocab, n), folder))
            runs.append(
                {
                    "n_tokens": n,
                    "identical": identical,
                    "bytes_moved": moved,
                    "cold": handoffs[0],
                    **local,
                    **measure.medians(handoffs[1:]),
                    **measure.medians(peers),
                    "quartiles": measure.quartiles(handoffs[1:]),
                    "warm": all(warm[1:]),
                }
            )
    ok = all(run["identical"] and not run["bytes_moved"] and run["warm"] for run in runs)
    return {"ok": ok, "geometry": geometry.LAYOUT, "repetitions": setup.repetitions, "runs": runs}


def _peers(context: Context, tokens: Sequence[int], folder: Path) -> dict[str, float]:
    """Take the state of the sequence through a file in memory, and through the host; return milliseconds."""
    path = folder / "state"
    llama = context.library.llama
    times = [time.perf_counter()]

    def lap() -> None:
        context.synchronize()
        times.append(time.perf_counter())

    context.save(path, tokens)
    lap()
    context.restore(path)
    lap()
    size = llama.llama_state_seq_get_size(context.pointer, 0)
    state = np.ones(size, np.uint8)  # touched, as the next one will be
    pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    times.append(time.perf_counter())
    done = [llama.llama_state_seq_get_data(context.pointer, pointer, size, 0)]
    lap()
    done.append(llama.llama_state_seq_set_data(context.pointer, pointer, size, 0))
    lap()
    if done != [size, size]:
        raise KvshareError(f"the state of {size} bytes was copied as {done}")
    path.unlink()
    ms = [(b - a) * 1000 for a, b in zip(times, times[1:])]  # noqa: B905, RUF007
    return {"save_ms": ms[0], "restore_ms": ms[1], "to_host_ms": ms[3], "to_device_ms": ms[4]}


def kinds(setup: Setup) -> Report:
    """Hand over each kind of cache between two processes, and odd sizes."""
    cases: list[tuple[str, str, dict[str, Any]]] = [
        (kind, name, {"n_ctx": 1024, "n_ubatch": 32}) for kind, name in KINDS.items()
    ]
    cases += [(f"size {i}", KINDS["plain"], context) for i, context in enumerate(SIZES)]
    cases += [("some layers on the host", name, {"n_ctx": 1024}) for name in MIXED]
    runs: list[Report] = []
    for kind, name, context in cases:
        path = setup.archs / f"{name}.gguf"
        n_gpu_layers = N_MIXED if "host" in kind else ALL_LAYERS
        with contextlib.ExitStack() as stack:
            pair = Pair(stack, path, n_gpu_layers=n_gpu_layers, **context)
            expected, _ = _local(pair.model, N_SHORT, **context)
            _, done = pair.hand_over(N_SHORT)
            logits, _ = _answers(pair.decoder.context, N_SHORT)
            share = pair.decoder.share(n_tokens=len(logits) + N_SHORT + 1, prefix=_held(pair, N_SHORT))
            regions = [
                {"kind": each.kind, "size": each.size, "mapped_size": _mapped_size(each)}
                for each in share.header.regions
            ]
            share.release()
            runs.append(
                {
                    "kind": kind,
                    "model": name,
                    "identical": _is_same(logits, expected),
                    "bytes_moved": done.bytes_moved,
                    "regions": regions,
                }
            )
    for run in runs:
        found = {each["kind"] for each in run["regions"]}
        run["on"] = " and ".join(sorted(found))
    as_asked = all(
        ("memfd" in run["on"]) == ("host" in run["kind"]) and "cuda-vmm" in run["on"] for run in runs
    )
    ok = as_asked and all(run["identical"] and not run["bytes_moved"] for run in runs)
    return {"ok": ok, "runs": runs}


def _held(pair: Pair, n_tokens: int) -> list[int]:
    return [*prompt(pair.model.n_vocab, n_tokens), *range(1, 2 + N_STEADY)]


def _mapped_size(region: Any) -> int | None:
    return region.layout.get("mapped_size") if isinstance(region.layout, dict) else None


def every_architecture(setup: Setup) -> Report:
    """Run the cases of `benchmarks.architectures` on the GPU."""
    paths = sorted(setup.archs.glob("*.gguf"))
    n_workers = min(8, len(os.sched_getaffinity(0)))
    results = list(architectures.run(paths, list(CASES), n_workers=n_workers, n_gpu_layers=ALL_LAYERS))
    report = architectures.summary(results)
    report.pop("forks_identical")
    return {"ok": bool(results) and not report["failures"], "cases": list(CASES), **report}


def life(setup: Setup) -> Report:
    """Kill providers and decoders, and cycle; compare memory and descriptors with before."""
    report: Report = {"ok": True}
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, geometry.model(), n_ctx=geometry.N_CELLS)
        n = LENGTHS[-1]
        expected, _ = _local(pair.model, LENGTHS[0], n_ctx=geometry.N_CELLS)
        # what ggml allocates once is there
        pair.hand_over(n)
        pair.decoder.context.clear()
        _after(pair, LENGTHS[0])
        pair.provider.ask(job="forget")
        for name, kill in (("provider_killed", _kill_provider), ("decoder_killed", _kill_decoder)):
            free = _free_memory()
            report[name] = kill(pair, n)
            logits = _after(pair, LENGTHS[0])
            report[name] |= {"lost_mib": _lost_mib(free), "identical_afterwards": _is_same(logits, expected)}
        report["cycles"] = _cycle(pair, setup.cycles)
    for each in ("provider_killed", "decoder_killed", "cycles"):
        report["ok"] &= abs(report[each]["lost_mib"]) < 1
    report["ok"] &= report["cycles"]["n_fds_more"] == [0, 0]
    report["ok"] &= all(
        report[each]["identical_afterwards"] for each in ("provider_killed", "decoder_killed")
    )
    report["ok"] &= bool(report["provider_killed"]["adopt"]) or report["provider_killed"]["was_complete"]
    # the provider had the memory when its decoder died, and went on
    report["ok"] &= report["decoder_killed"]["held_mib"] > MIN_HELD_MIB
    report["ok"] &= report["decoder_killed"]["provider"] == "served"
    return report


def _after(pair: Pair, n_tokens: int) -> list[bytes]:
    """Prefill locally in the decoder's context; return the logits behind it, and empty the context."""
    pair.decoder.context.decode(prompt(pair.model.n_vocab, n_tokens), position=0)
    logits, _ = _answers(pair.decoder.context, n_tokens)
    pair.decoder.context.clear()
    return logits


def _kill_provider(pair: Pair, n_tokens: int) -> Report:
    """Kill a provider of its own while its kernels run; its share is released."""
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(fds.private_directory()) / "provider.sock"
        victim = stack.enter_context(ChildProcess(socket, geometry.model()))
        connection = stack.enter_context(victim.connect())
        victim.tell(job="serve", n_tokens=n_tokens)
        share = pair.decoder.share(n_tokens=n_tokens)
        share.send(connection)
        deadline = time.monotonic() + 60
        while not (n_filled := share.ledger.snapshot(with_blob=False).n_filled):
            if time.monotonic() > deadline:
                raise LocalProtocolError("the provider does not begin")
        os.kill(victim.pid, signal.SIGKILL)
        fds.wait_for_hangup(connection, deadline=deadline)
        was_complete = share.ledger.snapshot(with_blob=False).state is LedgerState.COMPLETE
        refused = ""
        try:
            pair.decoder.adopt(share, prompt(pair.model.n_vocab, n_tokens))
        except KvshareError as error:
            refused = type(error).__name__
        share.release()
        pair.decoder.context.clear()  # it was faster than the signal
    return {"n_filled": n_filled, "of": n_tokens, "was_complete": was_complete, "adopt": refused}


def _kill_decoder(pair: Pair, n_tokens: int) -> Report:
    """Kill a decoder while the provider has its memory mapped; the provider lives on."""
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(fds.private_directory()) / "other.sock"
        victim = stack.enter_context(ChildProcess(socket, geometry.model()))
        pair.provider.tell(job="connect")
        offer = {"n_ctx": geometry.N_CELLS, "n_tokens": n_tokens, "socket": str(pair.provider.socket)}
        for answer in (victim.ask(job="offer", **offer), pair.provider.answer()):
            if "error" in answer:
                raise LocalProtocolError(f"a process of this benchmark: {answer['error']}")
        pair.provider.tell(job="serve", n_tokens=n_tokens)
        time.sleep(0.2)  # it has mapped it by then, and prefills
        os.kill(victim.pid, signal.SIGKILL)
        served = pair.provider.answer()
    held = _free_memory()
    pair.provider.ask(job="forget")
    returned = _lost_mib(held)
    pair.connection = pair.provider.connect()
    return {"provider": served.get("error", "served"), "held_mib": round(-returned, 1)}


def _cycle(pair: Pair, cycles: int) -> Report:
    """Share and adopt, every fourth time release; return what is more than after the first ones."""
    n = LENGTHS[0]
    before: tuple[int, list[int]] = 0, []
    start = 0.0
    for i in range(N_WARM_UP + cycles):
        if i == N_WARM_UP:
            before, start = (_free_memory(), _open_fds(pair)), time.perf_counter()
        pair.decoder.context.clear()
        if i % 4 == 3:
            share, _ = pair.share(n)
            share.release()  # fresh memory
        else:
            pair.hand_over(n)
    elapsed = time.perf_counter() - start
    more = [now - then for now, then in zip(_open_fds(pair), before[1], strict=True)]
    return {
        "n": cycles,
        "ms_each": round(elapsed * 1000 / cycles, 2),
        "lost_mib": _lost_mib(before[0]),
        "n_fds_more": more,
    }


def _open_fds(pair: Pair) -> list[int]:
    return [len(os.listdir("/proc/self/fd")), pair.provider.ask(job="fds")["n"]]


def _free_memory() -> int:
    """Return the free bytes of the first GPU, whoever uses the others."""
    lib = loader.load().lib
    lib.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    device = ctypes.c_void_p(lib.ggml_backend_dev_by_type(GPU))
    if not device:
        raise LibraryError("there is no GPU", hint="kvshare doctor says what is missing")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    lib.ggml_backend_dev_memory(device, ctypes.byref(free), ctypes.byref(total))
    return free.value


def _lost_mib(before: int) -> float:
    """Return how much less is free; the driver takes its time after a process has died."""
    deadline = time.monotonic() + 5
    while (lost := (before - _free_memory()) / 2**20) >= 1 and time.monotonic() < deadline:
        time.sleep(0.05)
    return round(lost, 2)


def devices(_setup: Setup) -> Report:
    """Let providers count and see the GPUs in other ways than the decoder."""
    path, n = geometry.model(), LENGTHS[1]
    context: dict[str, Any] = {"n_ctx": geometry.N_CELLS}
    runs = []
    with open_model(path) as model:
        expected, _ = _local(model, n, **context)
        with Decoder.open(model, n_threads=1, **context) as decoder:
            (mine,) = decoder.devices
    others = [each for each in _all_gpus() if each != mine]
    ways = {SAME: mine, NONE: ""}
    if others:
        # the first one computes, over the memory of the other
        ways |= {"another one, and this one": f"{others[0]},{mine}", "another one only": others[0]}
    for way, visible in ways.items():
        with contextlib.ExitStack() as stack:
            run: Report = {"provider_sees": way, "CUDA_VISIBLE_DEVICES": visible}
            pair = Pair(stack, path, {"CUDA_VISIBLE_DEVICES": visible}, **context)
            share, steps = pair.share(n)
            if "error" in steps:
                share.release()
                run |= {"refused": steps["error"]}
            else:
                done = pair.decoder.adopt(share, prompt(pair.model.n_vocab, n))
                logits, _ = _answers(pair.decoder.context, n)
                run |= {
                    "identical": _is_same(logits, expected),
                    "bytes_moved": done.bytes_moved,
                    "prefill_ms": steps["prefill_ms"],
                }
            # a provider that is refused leaves the decoder as it was
            pair.decoder.context.clear()
            run["decoder_identical"] = _is_same(_after(pair, n), expected)
            runs.append(run)
    refused = [run["provider_sees"] for run in runs if "refused" in run]
    ok = all(run["decoder_identical"] and ("refused" in run or run["identical"]) for run in runs)
    ok &= NONE in refused and SAME not in refused
    return {"ok": ok, "decoder_is_on": mine, "others": others, "runs": runs}


def _all_gpus() -> list[str]:
    """Return the UUIDs of all GPUs of the machine; if that is not known, of those that this process sees."""
    if smi := shutil.which("nvidia-smi"):
        done = subprocess.run(
            [smi, "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        return [line for line in done.stdout.split() if line.startswith("GPU-")]
    return [each.uuid for each in cuda.driver().devices()]


def views(setup: Setup) -> Report:
    """Let PyTorch be the provider: it copies the rows of one cache to another one."""
    if importlib.util.find_spec("torch") is None:
        return {"ok": True, "skipped": "PyTorch is not installed"}
    path = setup.archs / f"{KINDS['plain']}.gguf"
    context: dict[str, Any] = {"n_ctx": 1024, "flash_attn": "on"}
    with contextlib.ExitStack() as stack:
        pair = Pair(stack, path, **context)
        tokens = prompt(pair.model.n_vocab, N_SHORT)
        expected, _ = _local(pair.model, N_SHORT, **context)
        source = stack.enter_context(Decoder.open(pair.model, n_threads=1, **context))
        source.context.decode(tokens, position=0)
        pair.provider.tell(job="copy", n_tokens=N_SHORT)
        held = stack.enter_context(source.share(n_tokens=N_SHORT + 1, prefix=tokens))
        held.send(pair.connection)
        share = pair.decoder.share(n_tokens=N_SHORT)
        share.send(pair.connection)
        answer = pair.provider.answer()
        if "error" in answer:
            return {"ok": False, **answer}
        done = pair.decoder.adopt(share, tokens)
        logits, _ = _answers(pair.decoder.context, N_SHORT)
        identical = _is_same(logits, expected)
    return {
        "ok": identical and not done.bytes_moved,
        "identical": identical,
        "bytes_moved": done.bytes_moved,
        **answer,
    }


def dma_buf(setup: Setup) -> Report:
    """Get the memory of a cache as a dma-buf."""
    with (
        open_model(setup.archs / f"{KINDS['plain']}.gguf") as model,
        Decoder.open(model, n_ctx=1024, n_threads=1) as decoder,
        decoder.share(n_tokens=1) as share,
        decoder.dma_buf() as fd,
    ):
        (region,) = share.header.regions
        found = {
            "is": os.readlink(f"/proc/self/fd/{fd.fileno()}"),
            "size": os.lseek(fd.fileno(), 0, os.SEEK_END),
            "mapped_size": _mapped_size(region),
        }
    return {"ok": "dmabuf" in str(found["is"]) and found["size"] == found["mapped_size"], **found}


PARTS: dict[str, Callable[[Setup], Report]] = {
    "kinds": kinds,
    "handoff": handoff,
    "devices": devices,
    "views": views,
    "dma_buf": dma_buf,
    "life": life,
    "architectures": every_architecture,
}


# -- what is shown -----------------------------------------------------------------------------


def _lines(value: Any, indent: str = "  ") -> Iterator[str]:
    """Yield a part of the report as plain lines."""
    for key, each in value.items():
        if isinstance(each, list) and each and isinstance(each[0], dict):
            for item in each:
                head, *rest = [
                    f"{name} {_short(found)}" for name, found in item.items() if name != "quartiles"
                ]
                yield f"{indent}{head}: {', '.join(rest)}"
        else:
            yield f"{indent}{key}: {_short(each)}"


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_short(each)}" for key, each in value.items()) + ")"
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def main(argv: list[str] | None = None) -> int:
    """Run the parts; exit status 0 only if all show what they have to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--repetitions", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--cycles", type=int, default=500, metavar="N", help="default: %(default)s")
    parser.add_argument("--archs", type=Path, metavar="FOLDER", help="models of test-llama-archs -o FOLDER")
    args = parser.parse_args(argv)
    if min(args.repetitions, args.cycles) < 2:
        parser.error("--repetitions and --cycles must be at least 2")
    report: Report = {}
    try:
        _free_memory()  # there is a GPU, before anything else
        with progress.shown() as show:
            setup = Setup(args.archs or generated.models(), args.repetitions, args.cycles)
            for name in args.only:
                show(name, 0, None)
                start = time.monotonic()
                try:
                    report[name] = PARTS[name](setup)
                except KvshareError as error:
                    report[name] = {
                        "ok": False,
                        "error": f"{type(error).__name__}: {error}",
                        "hint": error.hint,
                    }
                report[name]["seconds"] = round(time.monotonic() - start, 1)
    except KvshareError as error:
        return measure.complain("gpu", error)
    report["ok"] = all(each["ok"] for each in report.values())
    if args.json:
        print(json.dumps(report, indent=1))
    else:
        for name in args.only:
            print(f"{name}: {'ok' if report[name]['ok'] else 'FAILED'}")
            print("\n".join(_lines({key: each for key, each in report[name].items() if key != "ok"})))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
