"""SIGKILL at several steps: whoever is left ends in the ordinary way, or goes on with the next one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvshare import (
    Context,
    Decoder,
    DescriptorError,
    LedgerIncompleteError,
    Model,
    PeerClosedError,
    Share,
    fds,
    wire,
)
from kvshare.ledger import LedgerState
from tests.native.handoff import ROOT, decode_each, environment, random_tokens

pytestmark = pytest.mark.native

WAIT_S = 60.0
KINDS = ("prefill", "provider")
PARAMS: dict[str, Any] = {"n_ctx": 512, "n_ubatch": 16, "n_threads": 1}
N_TOKENS = 320  # twenty graphs
N_REST = 3


class ProviderProcess:
    """`kvshare prefill --fds`, which serves one share, or `kvshare provider`, which stays.

    *Ownership*: leaving the block kills the process.
    """

    def __init__(self, kind: str, path: Path, model_path: Path, tokens: Sequence[int]) -> None:
        self.kind, self.path, self.tokens = kind, path, list(tokens)
        command = [sys.executable, "-m", "kvshare", kind, "--json", "--threads", "1"]
        command += ["--model", str(model_path)]
        if kind == "prefill":
            command += ["--fds", str(path), "--tokens", ",".join(map(str, tokens)), "--timeout", str(WAIT_S)]
        else:
            command += ["--listen", str(path)]
        self._log = path.with_suffix(".log")
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment(), stdout=subprocess.PIPE, stderr=log, umask=0
            )
        if kind == "provider":
            assert self.process.stdout is not None
            self.process.stdout.readline()  # it listens, and has opened what it needs for that
        until(lambda: path.exists() or self.process.poll() is not None)
        assert self.process.poll() is None, self.stderr()

    def open_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stderr(self) -> str:
        return self._log.read_text()

    def wait(self) -> int:
        """Wait for its end; return its exit status."""
        assert self.process.stdout is not None
        self.process.stdout.read()
        return self.process.wait(WAIT_S)

    @contextlib.contextmanager
    def job(self, share_id: int) -> Iterator[socket.socket | None]:
        """Tell a provider that wants to know what to prefill, as an engine does."""
        if self.kind == "prefill":
            yield None
            return
        with fds.connect_unix(self.path) as engine:
            header = wire.JobHeader(share_id=share_id, tokens=tuple(self.tokens))
            fds.send_message(engine, wire.encode(header))
            yield engine

    def __enter__(self) -> ProviderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self._log.unlink()
        self.path.unlink(missing_ok=True)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def outcome(engine: socket.socket) -> wire.Outcome:
    """Read what a job's connection says until its outcome."""
    while True:
        payload, _ = fds.receive_message(engine, deadline=time.monotonic() + WAIT_S, max_fds=0)
        found = wire.decode(payload)
        if isinstance(found, wire.Outcome):
            return found


@pytest.fixture(scope="module")
def tokens(smollm2: Model) -> list[int]:
    return random_tokens(smollm2, N_TOKENS + N_REST)


def assert_serves(provider: ProviderProcess, decoder: Decoder, tokens: list[int]) -> None:
    """A whole handoff, exact."""
    decoder.context.clear()
    model, n = decoder.context.model, len(provider.tokens)
    with decoder.share(n_tokens=n) as share:
        share.send(provider.path)
        with provider.job(share.share_id):
            share.wait()
        decoder.adopt(share, provider.tokens)
    there = decode_each(decoder.context, tokens[n : n + N_REST], position=n)
    with Context.create(model, **PARAMS) as local:
        local.decode(provider.tokens, position=0)
        here = decode_each(local, tokens[n : n + N_REST], position=n)
    assert [each.tobytes() for each in here] == [each.tobytes() for each in there]


# -- the provider --------------------------------------------------------------------------------


def reached(share: Share, step: str) -> bool:
    wanted = {"descriptors": 0, "half": N_TOKENS // 2}
    record = share.ledger.snapshot()
    return record.state is LedgerState.COMPLETE or (step in wanted and record.n_filled >= wanted[step])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["descriptors", "half", "publish"])
def test_a_provider_that_is_killed(
    smollm2: Model, smollm2_path: Path, folder: Path, tokens: list[int], step: str, kind: str
) -> None:
    """Its decoder refuses what was not vouched for, has nothing open, and is served by the next one."""
    prompt = tokens[:N_TOKENS]
    with Decoder.open(smollm2, **PARAMS) as decoder:
        before = len(os.listdir("/proc/self/fd"))
        with (
            ProviderProcess(kind, folder / "dies.sock", smollm2_path, prompt) as provider,
            decoder.share(n_tokens=N_TOKENS) as share,
        ):
            share.send(provider.path)
            with provider.job(share.share_id):
                until(lambda: reached(share, step))
                provider.process.kill()
                provider.wait()
            if share.ledger.snapshot().state is LedgerState.COMPLETE:
                assert decoder.adopt(share, prompt).n_adopted == N_TOKENS
            else:
                assert step != "publish"
                with pytest.raises(PeerClosedError):
                    share.wait()
                with pytest.raises(LedgerIncompleteError):
                    decoder.adopt(share, prompt)
        decoder.prepare()  # has a ledger ready, as it had before
        assert len(os.listdir("/proc/self/fd")) == before
        with ProviderProcess("prefill", folder / "next.sock", smollm2_path, prompt) as provider:
            assert_serves(provider, decoder, tokens)


def test_descriptors_with_what_a_provider_says(smollm2: Model) -> None:
    """They are not even received."""
    with Decoder.open(smollm2, **PARAMS) as decoder:
        before = len(os.listdir("/proc/self/fd"))
        for kind in (wire.Progress, wire.Outcome):
            near, far = socket.socketpair()
            with near, far, decoder.share(n_tokens=8) as share, fds.memfd_create("test", 4096) as made:
                share.send(near)
                said: wire.Message
                if kind is wire.Progress:
                    said = wire.Progress(share_id=share.share_id, n_filled=1, n_tokens=8)
                else:
                    said = wire.Outcome(share_id=share.share_id, ok=True)
                fds.send_message(far, wire.encode(said), [made.fileno()])
                with pytest.raises(DescriptorError):
                    share.wait()
        assert len(os.listdir("/proc/self/fd")) == before
        with decoder.share(n_tokens=8) as share:
            assert share.state.live


# -- the decoder ---------------------------------------------------------------------------------

DECODER = """
import json, sys
import kvshare
with kvshare.Decoder.open(sys.argv[1], **json.loads(sys.argv[3])) as decoder:
    with decoder.share(n_tokens=int(sys.argv[4])) as share:
        share.send(sys.argv[2])
        print(share.share_id, flush=True)
        share.wait(progress=lambda n_filled, _: print(n_filled, flush=True))
        print("done", flush=True)
        sys.stdin.read()
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["descriptors", "half", "publish"])
def test_a_decoder_that_is_killed(
    smollm2: Model, smollm2_path: Path, folder: Path, tokens: list[int], step: str, kind: str
) -> None:
    """Its provider does not crash: the memory stays, at its full size, as long as somebody maps it."""
    wanted = {"descriptors": 0, "half": N_TOKENS // 2}
    prompt = tokens[:N_TOKENS]
    with ProviderProcess(kind, folder / "p.sock", smollm2_path, prompt) as provider:
        arguments = [str(smollm2_path), str(provider.path), json.dumps(PARAMS), str(N_TOKENS)]
        with subprocess.Popen(
            [sys.executable, "-c", DECODER, *arguments],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as decoder:
            assert decoder.stdout is not None
            with provider.job(int(decoder.stdout.readline())) as engine:
                for line in decoder.stdout if step != "descriptors" else ():
                    if line == "done\n" or (step in wanted and int(line) >= wanted[step]):
                        break
                decoder.kill()
                decoder.wait()
                if engine is not None:
                    answer = outcome(engine)
                    assert answer.ok if step == "publish" else "the decoder has ended" in str(answer.error)
                else:
                    status = provider.wait()
                    assert status == 0 if step == "publish" else status > 0, provider.stderr()  # by no signal
        assert "Traceback" not in provider.stderr()
        if kind == "provider":
            with Decoder.open(smollm2, **PARAMS) as following:
                assert_serves(provider, following, tokens)
