"""One handoff between two processes, and the same prompt prefilled locally beside it.

The oracle of every test that uses this: equal settings give logits that are equal bit for bit. The
local run is confined to the cells of the lease, because sums in attention depend on the place.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvshare import Adopted, Context, Decoder, Model, PeerRefusedError, Share
from kvshare._native import loader, signatures
from kvshare._native.context import Logits

ROOT = Path(__file__).parents[2]


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child that is to load the library that this process has loaded."""
    return {**os.environ, loader.ENVIRONMENT: str(loader.load().path), **changes}


def random_tokens(model: Model, n: int, *, seed: int = 1) -> list[int]:
    """Return token ids that any model can take."""
    found: list[int] = np.random.default_rng(seed).integers(0, model.n_vocab, n).tolist()
    return found


class ProviderProcess:
    """`tests.native.provider_process`, serving one share after the other.

    *Ownership*: leaving the block ends the process.
    """

    def __init__(self, folder: Path, **env: str) -> None:
        self._paths = (folder / f"{n}.sock" for n in itertools.count())
        self._errors = folder / f"stderr-{id(self)}"
        with self._errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.native.provider_process"],
                cwd=ROOT,
                env=environment(**env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def start(
        self, share: Share, model: Path | str, tokens: Sequence[int], **options: Any
    ) -> Callable[[], dict[str, Any]]:
        """Let it serve a share; return a function that waits for what it says at the end."""
        path = next(self._paths)
        job = {"socket": str(path), "model": str(model), "tokens": list(tokens), "options": options}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        send(share, path, self.process)

        def answer() -> dict[str, Any]:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            found: dict[str, Any] = json.loads(line) if line else {}
            return found

        return answer

    def serve(self, share: Share, model: Path | str, tokens: Sequence[int], **options: Any) -> dict[str, Any]:
        """Let it serve a share; return what it says at the end, `{}` if it died."""
        return self.start(share, model, tokens, **options)()

    def stderr(self) -> str:
        return self._errors.read_text()

    def __enter__(self) -> ProviderProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def send(share: Share, path: Path, process: subprocess.Popen[str]) -> None:
    """Send a share as soon as the process listens."""
    end = time.monotonic() + 60
    while True:
        try:
            share.send(path)
            return
        except PeerRefusedError:
            if time.monotonic() > end or process.poll() is not None:
                raise
            time.sleep(0.002)


def shared_bytes(share: Share) -> list[bytes]:
    """Return the bytes of all regions of a share, as whoever holds its descriptors sees them."""
    return [
        os.pread(share._descriptors[entry.fd], entry.size, entry.offset) for entry in share.header.regions
    ]


@dataclass(frozen=True)
class Outcome:
    """Logits of each following decode, and what the adoption did."""

    local: list[Logits]
    adopted_logits: list[Logits]
    adopted: Adopted
    first_cell: int

    @property
    def identical(self) -> bool:
        """Whether all are equal bit for bit, and logits at all."""
        return all(
            a.tobytes() == b.tobytes() and bool(np.isfinite(a).all()) and bool(a.any())
            for a, b in zip(self.local, self.adopted_logits, strict=True)
        )

    @property
    def max_difference(self) -> float:
        pairs = zip(self.local, self.adopted_logits, strict=True)
        return max(float(np.abs(a - b).max()) for a, b in pairs)

    @property
    def same_choice(self) -> bool:
        pairs = zip(self.local, self.adopted_logits, strict=True)
        return all(int(a.argmax()) == int(b.argmax()) for a, b in pairs)


def confine(context: Context, share: Share) -> None:
    """Keep a local context's next decode of the sequence at the place of a share."""
    ranges = [signatures.Range(i, a, b) for i, cache in enumerate(share.header.cells) for a, b in cache]
    lease = (signatures.Range * len(ranges))(*ranges)
    context.library.lib.llama_kv_share_confine(context.handle, share.seq_id, lease, len(lease))


def unconfine(context: Context, seq_id: int) -> None:
    context.library.lib.llama_kv_share_confine(context.handle, seq_id, None, 0)


def decode_each(context: Context, tokens: Sequence[int], *, position: int, seq_id: int = 0) -> list[Logits]:
    """Decode tokens one by one; return the logits of each."""
    found = []
    for i, token in enumerate(tokens):
        context.decode([token], position=position + i, seq_id=seq_id, logits=True)
        found.append(context.logits())
    return found


def handoff(
    provider: ProviderProcess,
    model: Model,
    path: Path,
    prompt: Sequence[int],
    rest: Sequence[int],
    params: Mapping[str, Any],
    *,
    seq_id: int = 0,
    n_other: int = 0,
    **options: Any,
) -> Outcome:
    """Hand a prompt over, decode `rest` after it, and do the same in a context of its own.

    Args:
        provider: where the prompt is prefilled.
        model: the model here.
        path: its file, for the provider.
        prompt: tokens that the provider prefills.
        rest: tokens that follow one by one.
        params: of both contexts here.
        seq_id: the sequence.
        n_other: tokens that sequence 0 holds already, if that is another one.
        options: of the provider, such as `n_ubatch`.
    """
    other = random_tokens(model, n_other + 1, seed=2)
    with Decoder.open(model, **params) as decoder, Context.create(model, **params) as local:
        contexts = (decoder.context, local) if n_other else ()
        for context in contexts:
            context.decode(other[:-1], position=0, seq_id=0)
        with decoder.share(seq_id, n_tokens=len(prompt)) as share:
            answer = provider.serve(share, path, prompt, **options)
            assert answer == {"ok": True}, (answer, provider.stderr())
            adopted = decoder.adopt(share, prompt)
        confine(local, share)
        local.decode(prompt, position=0, seq_id=seq_id)
        unconfine(local, seq_id)
        here = decode_each(local, rest, position=len(prompt), seq_id=seq_id)
        there = decode_each(decoder.context, rest, position=len(prompt), seq_id=seq_id)
        for context, logits in zip(contexts, (there, here), strict=False):
            logits += decode_each(context, other[-1:], position=n_other, seq_id=0)
        assert decoder.context.n_past(seq_id) == len(prompt) + len(rest)
        return Outcome(here, there, adopted, share.header.cells[0][0][0])
