"""The decoder process of `kvshare demo`."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from kvshare._native.context import Context, Logits, Model
from kvshare.cli.demo_events import N_GENERATE, emit, main, prompt, timed, wait_for_go
from kvshare.decoder import Decoder
from kvshare.errors import NotShareableError

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class _Generated:
    """What greedy decoding gave, and what it cost; `n_faults` was read after the first token."""

    logits: list[bytes]
    text: str
    times_ms: list[float]
    n_faults: int


@dataclass(frozen=True)
class _Local:
    """A run in this process only: its part of the report, and what it generated."""

    report: dict[str, Any]
    generated: _Generated


def process(arguments: list[str]) -> None:
    """Run all prompts: first locally and through a file, then with the provider."""
    model_path, socket_path, lengths, n_threads, n_gpu_layers, _ = arguments
    all_lengths: list[int] = json.loads(lengths)
    n_ctx = -(-(max(all_lengths) + N_GENERATE) // 256) * 256
    with (
        Model.open(model_path, n_gpu_layers=int(n_gpu_layers), main_gpu=0) as model,
        Decoder.open(model, n_ctx=n_ctx, n_threads=int(n_threads) or None) as decoder,
    ):
        if int(n_gpu_layers) and not decoder.devices:
            raise NotShareableError(
                "llama.cpp did not put the cache on a GPU", hint="its log says why: --log-level debug"
            )
        folder = Path(socket_path).parent
        local = [_run_locally(model, decoder.context, n, folder) for n in all_lengths]
        pss: dict[str, float] = {"one_process": _pss_mib(os.getpid())}
        for n_tokens, each in zip(all_lengths, local, strict=True):
            emit("run", run=_handoff(model, decoder, n_tokens, socket_path, each, pss))
        pss["ratio"] = (pss["decoder"] + pss["provider"]) / pss["one_process"]
        emit("done", pss_mib=pss)


def _run_locally(model: Model, context: Context, n_tokens: int, folder: Path) -> _Local:
    """Prefill and generate in this process, and take the state through a file; forget all of it."""
    tokens = prompt(model, n_tokens)
    emit("step", text=f"{n_tokens:,} tokens: local prefill", total=n_tokens)
    prefill_ms, _ = timed(
        lambda: context.decode(tokens[:-1], position=0, progress=lambda n: emit("progress", n=n))
    )
    file = folder / "state.bin"
    save_ms, nbytes = timed(lambda: context.save(file, tokens[:-1]))
    generated = _generate(model, context, tokens)
    context.forget()
    restore_ms, _ = timed(lambda: context.restore(file))
    file.unlink()
    context.forget()
    report = {
        "local_prefill_ms": prefill_ms,
        "file_save_ms": save_ms,
        "file_restore_ms": restore_ms,
        "file_nbytes": nbytes,
    }
    return _Local(report, generated)


def _handoff(
    model: Model,
    decoder: Decoder,
    n_tokens: int,
    socket_path: str,
    local: _Local,
    pss: dict[str, float],
) -> dict[str, Any]:
    tokens = prompt(model, n_tokens)
    emit("provide")
    wait_for_go()
    emit("step", text=f"{n_tokens:,} tokens: share, and wait for the provider")
    with decoder.share(n_tokens=n_tokens, expires_ms=int(TIMEOUT_S * 1000)) as share:
        share.send(socket_path)
        share.wait(deadline=time.monotonic() + TIMEOUT_S)
        provider_pid = share.provider_pid
        n_faults = _n_faults()
        adopted = decoder.adopt(share, tokens[:-1])
    generated = _generate(model, decoder.context, tokens)
    pss.update(decoder=_pss_mib(os.getpid()), provider=_pss_mib(provider_pid))
    decoder.context.forget()
    return {
        "n_tokens": n_tokens,
        **local.report,
        "share_us": share.t_us,
        "adopt_us": adopted.t_us,
        "first_token_ms": generated.times_ms[0],
        "steady_token_ms": statistics.median(generated.times_ms[1:]),
        "page_faults": generated.n_faults - n_faults,
        "bytes_moved": adopted.bytes_moved,
        "logits_identical": generated.logits == local.generated.logits,
        "text_identical": generated.text == local.generated.text,
        "text": generated.text,
    }


def _generate(model: Model, context: Context, tokens: list[int]) -> _Generated:
    """Decode the last token of the prompt and go on greedily."""
    position, token = len(tokens) - 1, tokens[-1]
    ids: list[int] = []
    logits: list[bytes] = []
    times_ms: list[float] = []
    n_faults = 0
    for _ in range(N_GENERATE):
        ms, row = timed(partial(_decode_one, context, token, position))
        times_ms.append(ms)
        n_faults = n_faults or _n_faults()
        logits.append(row.tobytes())
        token, position = int(row.argmax()), position + 1
        ids.append(token)
    return _Generated(logits, model.detokenize(ids), times_ms, n_faults)


def _decode_one(context: Context, token: int, position: int) -> Logits:
    context.decode([token], position=position, logits=True)
    return context.logits()


def _n_faults() -> int:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt + usage.ru_majflt


def _pss_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().pss) / 2**20


if __name__ == "__main__":
    main(process)
