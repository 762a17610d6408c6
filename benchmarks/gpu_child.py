"""The other process of `benchmarks.gpu`, on the same GPU: a provider, or a decoder that is killed.

The jobs, each a line of JSON on standard input, answered with another:

- `connect`: take a connection, for offers.
- `serve`: take an offer and prefill the prompt of a length; the context is kept for the next one.
- `forget`: free what was kept.
- `copy`: take two offers, of a sequence that holds a prompt and of one that is to hold it; copy the rows
  from one to the other with PyTorch, and vouch.
- `offer`: be the decoder: share a sequence on a socket, and keep everything.
- `fds`: say how many descriptors are open.

    python -m benchmarks.gpu_child SOCKET MODEL N_GPU_LAYERS
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import measure
from kvshare import fds
from kvshare._native.context import Model
from kvshare.decoder import Decoder
from kvshare.errors import KvshareError
from kvshare.provider import Offer, WarmProvider

TIMEOUT_S = 120.0
ALL_LAYERS = 999


def prompt(n_vocab: int, n_tokens: int) -> list[int]:
    """Return the prompt of a length, the same in each process."""
    found: list[int] = np.random.default_rng(n_tokens).integers(0, n_vocab, n_tokens).tolist()
    return found


def open_model(path: Path, n_gpu_layers: int = ALL_LAYERS) -> Model:
    """Open a model on the first GPU that this process sees."""
    return Model.open(path, n_gpu_layers=n_gpu_layers, main_gpu=0)


class ChildProcess(measure.Child):
    """The other process, as the first one sees it.

    Args:
        socket: where it listens.
        model: what it opens, on the GPU.
        environment: such as CUDA_VISIBLE_DEVICES.
        n_gpu_layers: layers of the model on the GPU.
    """

    def __init__(
        self,
        socket: Path,
        model: Path,
        environment: Mapping[str, str] | None = None,
        n_gpu_layers: int = ALL_LAYERS,
    ) -> None:
        arguments = (str(socket), str(model), str(n_gpu_layers))
        super().__init__("benchmarks.gpu_child", *arguments, environment=environment)
        self.answer()
        self.socket = socket

    def connect(self) -> socket.socket:
        """Return a connection to send shares on."""
        connection = fds.connect_unix(self.socket)
        self.ask(job="connect")
        return connection


class Jobs:
    """What the child does.

    Args:
        listener: where connections arrive.
        model: the model.
    """

    def __init__(self, listener: socket.socket, model: Model) -> None:
        self._listener = listener
        self._model = model
        self._connection: socket.socket | None = None
        self._provider = WarmProvider(model, n_threads=1)
        self._kept: list[Decoder] = []

    def handle(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Do a job; an error is its answer."""
        try:
            answer: dict[str, Any] = getattr(self, f"_{job['job']}")(job)
        except KvshareError as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return answer

    def close(self) -> None:
        """Free all."""
        self._forget({})
        if self._connection is not None:
            self._connection.close()

    def _connect(self, _: Mapping[str, Any]) -> dict[str, Any]:
        if self._connection is not None:
            self._connection.close()
        self._connection = fds.accept_unix(self._listener, deadline=time.monotonic() + TIMEOUT_S)
        return {}

    def _receive(self) -> Offer:
        assert self._connection is not None
        return Offer.receive(self._connection, deadline=time.monotonic() + TIMEOUT_S)

    def _serve(self, job: Mapping[str, Any]) -> dict[str, Any]:
        times = [time.perf_counter()]
        warm = False

        def begun(is_warm: bool) -> None:
            nonlocal warm
            warm = is_warm
            times.append(time.perf_counter())

        with self._receive() as offer:
            times[0] = time.perf_counter()
            tokens = prompt(self._model.n_vocab, job["n_tokens"])
            self._provider.fill(offer, tokens, begun=begun, progress=lambda _: None)
        assert self._provider.provider is not None
        return {
            "build_ms": (times[1] - times[0]) * 1000,
            "prefill_ms": self._provider.provider.prefill_ms,
            "warm": warm,
        }

    def _forget(self, _: Mapping[str, Any]) -> dict[str, Any]:
        self._provider.forget()
        for each in self._kept:
            each.close()
        self._kept.clear()
        return {}

    def _copy(self, job: Mapping[str, Any]) -> dict[str, Any]:
        with self._receive() as source, self._receive() as target:
            target.ledger.begin()
            done = _copy_rows(source, target, job["n_tokens"])
            target.complete(prompt(self._model.n_vocab, job["n_tokens"]))
        return done

    def _offer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        decoder = Decoder.open(self._model, n_ctx=job["n_ctx"], n_threads=1)
        self._kept.append(decoder)  # closing it releases the share
        decoder.share(n_tokens=job["n_tokens"]).send(job["socket"])
        return {}

    def _fds(self, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"n": len(os.listdir("/proc/self/fd"))}


def _copy_rows(source: Offer, target: Offer, n_tokens: int) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    first = target.first_cell
    for theirs, mine in zip(_tensors(source), _tensors(target), strict=True):
        rows = torch.as_tensor(theirs, device="cuda")
        torch.as_tensor(mine, device="cuda")[first : first + n_tokens] = rows[:n_tokens]
    torch.cuda.synchronize()
    return {"torch": torch.__version__, "device": str(rows.device)}


def _tensors(offer: Offer) -> list[Any]:
    return [each for view in offer.views() for each in (view.k, view.v) if each is not None]


def main() -> int:
    """Serve until standard input is closed."""
    path, model, n_gpu_layers = sys.argv[1:]
    with fds.listening(Path(path)) as listener, open_model(Path(model), int(n_gpu_layers)) as opened:
        jobs = Jobs(listener, opened)
        print("{}", flush=True)
        measure.answer_jobs(jobs.handle)
        jobs.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
