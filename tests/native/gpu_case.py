"""A decoder whose cache lies on the fake GPU, in a process of its own: one process holds one libllama.

    python -m tests.native.gpu_case CASE ARGUMENTS

runs one of the functions below with the JSON object ARGUMENTS, and writes one JSON object: what it found,
and what is still in use on the GPU at the end, `live`. The libraries come from the environment.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshare import Context, Decoder, KvshareError, LedgerIncompleteError, Model, Offer, fds
from kvshare._native import cuda
from kvshare.device import DeviceView
from kvshare.provider import WarmProvider
from tests.cuda.fake import FakeDriver
from tests.native.handoff import ProviderProcess, confine, decode_each, handoff, random_tokens, unconfine


def whole(model: Path, n: int, n_gpu_layers: int, params: dict[str, Any], seq_id: int, n_other: int) -> Any:
    """A handoff between two processes, compared with a local prefill."""
    with (
        fds.private_directory() as folder,
        ProviderProcess(folder) as provider,
        Model.open(model, n_gpu_layers=n_gpu_layers) as opened,
    ):
        tokens = random_tokens(opened, n + 4)
        found = handoff(
            provider,
            opened,
            model,
            tokens[:n],
            tokens[n:],
            params,
            seq_id=seq_id,
            n_other=n_other,
            n_gpu_layers=n_gpu_layers,
        )
        with Decoder.open(opened, **params) as decoder, decoder.share(seq_id, n_tokens=n) as share:
            kinds = [entry.kind for entry in share.header.regions]
            assert bool(decoder.devices) == ("cuda-vmm" in kinds)
    return {"identical": found.identical, "bytes_moved": found.adopted.bytes_moved, "kinds": kinds}


def views(model: Path, n: int, params: dict[str, Any]) -> Any:
    """Rows that llama.cpp computed on the GPU, read and written back through views of another share."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, Model.open(model, n_gpu_layers=-1) as opened, Decoder.open(opened, **params) as decoder:
        tokens = random_tokens(opened, n + 4)
        with decoder.share(n_tokens=n) as share:
            share.send(near)
            with Offer.receive(far) as offer, WarmProvider(opened) as provider:
                provider.fill(offer, tokens[:n], begun=lambda _: None, progress=lambda _: None)
                first = offer.first_cell
                layers = offer.views()
                assert all(isinstance(view, DeviceView) for layer in layers for view in (layer.k, layer.v))
                rows = [(layer.k.read(first, first + n), layer.v.read(first, first + n)) for layer in layers]
                del layers
        # fresh memory takes the place of what was sent: the rows are nowhere
        with decoder.share(n_tokens=n) as share:
            share.send(near)
            with Offer.receive(far) as offer:
                offer.ledger.begin()
                cells = slice(offer.first_cell, offer.first_cell + n)
                fresh = True
                for layer, (k, v) in zip(offer.views(), rows, strict=True):
                    fresh &= int((layer.k.read(first, first + n) == k).sum()) < k.size // 2
                    layer.k[cells], layer.v[cells] = k, v
                del layer
                offer.complete(tokens[:n])
            adopted = decoder.adopt(share, tokens[:n])
            with Context.create(opened, **params) as local:
                confine(local, share)
                local.decode(tokens[:n], position=0)
                unconfine(local, 0)
                here = [row.tobytes() for row in decode_each(local, tokens[n:], position=n)]
            there = [row.tobytes() for row in decode_each(decoder.context, tokens[n:], position=n)]
    return {"identical": here == there, "fresh": fresh, "bytes_moved": adopted.bytes_moved}


def warm(model: Path, n: int, params: dict[str, Any]) -> Any:
    """A provider keeps its context as long as it is offered the same memory, and no longer."""
    begun: list[bool] = []
    near, far = socket.socketpair(socket.AF_UNIX)
    with (
        near,
        far,
        Model.open(model, n_gpu_layers=-1) as opened,
        Decoder.open(opened, **params) as decoder,
        WarmProvider(opened) as provider,
    ):
        tokens = random_tokens(opened, n)
        for adopts in (True, True, False, True):
            with decoder.share(n_tokens=n) as share:
                share.send(near)
                with Offer.receive(far) as offer:
                    provider.fill(offer, tokens, begun=begun.append, progress=lambda _: None)
                if adopts:
                    decoder.adopt(share, tokens)
                    decoder.context.clear()
    return {"begun": begun}


def killed(model: Path, n: int, params: dict[str, Any]) -> Any:
    """A provider that dies in the middle; the next one serves."""
    driver = FakeDriver(Path(cuda.LIBRARY))
    with Model.open(model, n_gpu_layers=-1) as opened, Decoder.open(opened, **params) as decoder:
        tokens = random_tokens(opened, n)
        before = driver.live()
        for exit_after in (n // 2, None):
            options = {"n_gpu_layers": -1, "n_ubatch": 16} | (
                {"exit_after": exit_after} if exit_after else {}
            )
            with fds.private_directory() as folder, ProviderProcess(folder) as provider:
                share = decoder.share(n_tokens=n)
                answer = provider.serve(share, str(model), tokens, **options)
                assert answer == ({} if exit_after else {"ok": True})
                try:
                    decoder.adopt(share, tokens)
                    adopted = True
                except LedgerIncompleteError:
                    share.release()
                    adopted = False
                assert adopted == (exit_after is None)
        return {"same": driver.live() == before}


def refused(model: Path, params: dict[str, Any]) -> Any:
    """The error of a decoder that cannot be made."""
    with Model.open(model, n_gpu_layers=-1) as opened:
        try:
            Decoder.open(opened, **params).close()
        except KvshareError as error:
            return {"type": type(error).__name__, "message": str(error)}
    return {}


def dma_buf(model: Path, n: int, params: dict[str, Any]) -> Any:
    """The memory as a dma-buf has what the views have; beside it, what cannot be had."""
    errors = []
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, Model.open(model, n_gpu_layers=2) as opened, Decoder.open(opened, **params) as decoder:
        decoder.context.decode(random_tokens(opened, n), position=0, seq_id=1)
        with decoder.share(n_tokens=n) as share:
            share.send(near)
            kinds = [entry.kind for entry in share.header.regions]
            with Offer.receive(far) as offer:
                on_gpu = kinds.index("cuda-vmm")
                (layer,) = (each for each in offer.views() if isinstance(each.k, DeviceView))
                (place,) = (
                    each
                    for each in offer.layout.regions[on_gpu].tensors
                    if each.name == f"cache_k_l{layer.il}"
                )
                with decoder.dma_buf(0, on_gpu) as fd:
                    found = os.pread(fd.fileno(), place.nbytes, place.offset)
                same = found == layer.k.read(0, layer.k.shape[0]).tobytes()
                del layer
            for region in (1 - on_gpu, 2):
                try:
                    decoder.dma_buf(0, region).close()
                except KvshareError as error:
                    errors.append(type(error).__name__)
    return {"same": same, "errors": errors, "some": any(found)}


def planted(model: Path, function: str, params: dict[str, Any]) -> Any:
    """Each call of a function of the driver fails once, in a life of a decoder and its provider.

    What it costs is an error of ours and what was under way; afterwards all is as before.
    """
    driver = FakeDriver(Path(cuda.LIBRARY))
    with Model.open(model, n_gpu_layers=-1) as opened:
        tokens = random_tokens(opened, 44)

        def life() -> list[bytes]:
            near, far = socket.socketpair(socket.AF_UNIX)
            with near, far, Decoder.open(opened, **params) as decoder, WarmProvider(opened) as provider:
                for adopts in (False, True):
                    with decoder.share(n_tokens=40) as share:
                        share.send(near)
                        with Offer.receive(far) as offer:
                            provider.fill(offer, tokens[:40], begun=lambda _: None, progress=lambda _: None)
                        if adopts:
                            decoder.adopt(share, tokens[:40])
                return [row.tobytes() for row in decode_each(decoder.context, tokens[40:], position=40)]

        wanted, before = life(), driver.live()
        n_before = driver.calls(function)
        assert life() == wanted
        n_calls = driver.calls(function) - n_before
        outcomes: dict[str, int] = {}
        for nth in range(1, n_calls + 1):
            target = driver.calls(function) + nth
            os.environ["FAKE_CUDA_FAIL"] = f"{function}=2@{target}"
            try:
                outcome = "right" if life() == wanted else "wrong"
            except KvshareError as error:
                outcome = type(error).__name__
            assert driver.calls(function) >= target, "nothing failed"
            del os.environ["FAKE_CUDA_FAIL"]
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            gc.collect()
            assert driver.live() == before, (nth, driver.live(), before)
            assert life() == wanted, nth
    return {"n_calls": n_calls, "outcomes": outcomes}


def elsewhere(model: Path, n: int, params: dict[str, Any], environment: dict[str, str]) -> Any:
    """A provider with an environment of its own."""
    with (
        fds.private_directory() as folder,
        ProviderProcess(folder, **environment) as provider,
        Model.open(model, n_gpu_layers=-1) as opened,
        Decoder.open(opened, **params) as decoder,
    ):
        tokens = random_tokens(opened, n)
        with decoder.share(n_tokens=n) as share:
            answer = provider.serve(share, str(model), tokens, n_gpu_layers=-1)
            adopted = decoder.adopt(share, tokens).n_adopted if answer.get("ok") else 0
            return {"answer": answer, "adopted": adopted, "devices": decoder.devices}


CASES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (whole, views, warm, killed, refused, elsewhere, dma_buf, planted)
}


def main() -> int:
    arguments = json.loads(sys.argv[2])
    arguments["model"] = Path(arguments["model"])
    found = CASES[sys.argv[1]](**arguments)
    gc.collect()
    found["live"] = FakeDriver(Path(cuda.LIBRARY)).live()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
