"""The provider process of `kvshare demo`."""

from __future__ import annotations

import contextlib
import json
import time

from kvshare import fds
from kvshare._native.context import Model
from kvshare.cli.demo_events import emit, main, prompt, wait_for_go
from kvshare.provider import serving

TIMEOUT_S = 600.0


def process(arguments: list[str]) -> None:
    """Serve a share for each prompt; keep each mapping until the next one, so that memory is comparable."""
    model_path, socket_path, lengths, n_threads, n_gpu_layers, _ = arguments
    with (
        Model.open(model_path, n_gpu_layers=int(n_gpu_layers), main_gpu=0) as model,
        fds.listen_unix(socket_path) as listener,
    ):
        emit("listening")
        with contextlib.ExitStack() as last:
            for n_tokens in json.loads(lengths):
                wait_for_go()
                last.close()
                emit("step", text=f"{n_tokens:,} tokens: the provider prefills", total=n_tokens)
                provider = last.enter_context(
                    serving(
                        listener,
                        model,
                        prompt(model, n_tokens)[:-1],
                        deadline=time.monotonic() + TIMEOUT_S,
                        progress=lambda n: emit("progress", n=n),
                        n_threads=int(n_threads) or None,
                    )
                )
                emit("prefilled", ms=provider.prefill_ms)
            wait_for_go()


if __name__ == "__main__":
    main(process)
