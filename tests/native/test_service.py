"""`kvshare provider` as a user runs it: one process that serves one handoff after the other."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvshare import Context, Decoder, LedgerIncompleteError, Model, Share, fds, wire
from kvshare.ledger import LedgerState
from tests.native.handoff import decode_each, environment, random_tokens

pytestmark = pytest.mark.native

PARAMS: dict[str, Any] = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1}
N_REST = 3
WAIT_S = 60.0


class Usage(NamedTuple):
    n_fds: int
    n_mappings: int


class ServiceProcess:
    """The command with `--json`.

    *Ownership*: leaving the block ends the process.
    """

    def __init__(self, folder: Path, model: Path, *arguments: str) -> None:
        self.path = folder / "provider.sock"
        self._errors = folder / "stderr"
        with self._errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "kvshare", "provider", "--json"),
                    *("--model", str(model), "--listen", str(self.path), "--threads", "1", *arguments),
                ],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.wait_for("listening")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))
        self._lines.put(None)

    def wait_for(self, event: str) -> dict[str, Any]:
        """Return the next event of this kind; what comes before it is passed over."""
        seen: list[dict[str, Any]] = []
        while True:
            found = self._lines.get(timeout=WAIT_S)
            assert found is not None, (seen, self.stderr())
            if found["event"] == event:
                return found
            seen.append(found)

    def stderr(self) -> str:
        return self._errors.read_text()

    def usage(self) -> Usage:
        folder = Path(f"/proc/{self.process.pid}")
        n_mappings = len((folder / "maps").read_text().splitlines())
        return Usage(len(os.listdir(folder / "fd")), n_mappings)

    def close(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end; return its exit status."""
        assert self.process.stdout is not None
        self.process.send_signal(number)
        status = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        self.process.stdout.close()
        return status

    def __enter__(self) -> ServiceProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.close(signal.SIGKILL)


class Engine:
    """A job's connection."""

    def __init__(self, service: ServiceProcess, share_id: int, tokens: Sequence[int]) -> None:
        self.share_id = share_id
        self.connection = fds.connect_unix(service.path)
        fds.send_message(
            self.connection, wire.encode(wire.JobHeader(share_id=share_id, tokens=tuple(tokens)))
        )
        self.progress: list[int] = []

    def next(self) -> wire.Message:
        payload, _ = fds.receive_message(self.connection, deadline=time.monotonic() + WAIT_S, max_fds=0)
        return wire.decode(payload)

    def outcome(self) -> wire.Outcome:
        while not isinstance(message := self.next(), wire.Outcome):
            assert isinstance(message, wire.Progress)
            self.progress.append(message.n_filled)
        return message

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@pytest.fixture
def start() -> Iterator[Callable[..., ServiceProcess]]:
    with contextlib.ExitStack() as stack:

        def run(model: Path, *arguments: str) -> ServiceProcess:
            folder = stack.enter_context(fds.private_directory())
            return stack.enter_context(ServiceProcess(folder, model, *arguments))

        yield run


Start = Callable[..., ServiceProcess]


def send_and_hang_up(share: Share, path: Path) -> None:
    """As llama-server does."""
    with fds.connect_unix(path) as connection:
        share.send(connection)


def hand_over(service: ServiceProcess, decoder: Decoder, n_tokens: int, *, seed: int) -> dict[str, Any]:
    """Hand over, go on, compare with a local run; return what the service says at the end."""
    model = decoder.context.model
    tokens = random_tokens(model, n_tokens + N_REST, seed=seed)
    prompt, rest = tokens[:n_tokens], tokens[n_tokens:]
    decoder.context.clear()
    with decoder.share(n_tokens=n_tokens) as share:
        send_and_hang_up(share, service.path)
        with Engine(service, share.share_id, prompt) as engine:
            assert engine.outcome() == wire.Outcome(share_id=share.share_id, ok=True)
            assert engine.progress[-1] == n_tokens
            assert len(engine.progress) == -(-n_tokens // 64)
        assert decoder.adopt(share, prompt).bytes_moved == 0
    with Context.create(model, **PARAMS) as local:
        local.decode(prompt, position=0)
        here = decode_each(local, rest, position=n_tokens)
    there = decode_each(decoder.context, rest, position=n_tokens)
    assert [each.tobytes() for each in here] == [each.tobytes() for each in there]
    done = service.wait_for("done")
    assert (done["share_id"], done["n_tokens"]) == (share.share_id, n_tokens)
    return done


def settled(service: ServiceProcess, wanted: int) -> Usage:
    """Return the usage as soon as that many descriptors are open, or after a while."""
    end = time.monotonic() + 5
    while service.usage().n_fds != wanted and time.monotonic() < end:
        time.sleep(0.01)
    return service.usage()


def test_five_handoffs_in_turn(start: Start, tiny: Model, tiny_path: Path) -> None:
    """The second needs no new context, no new mapping and no descriptor; another decoder does."""
    service = start(tiny_path)
    with Decoder.open(tiny, **PARAMS) as decoder, Decoder.open(tiny, **PARAMS) as other:
        done = [hand_over(service, decoder, 300, seed=1)]
        time.sleep(0.2)  # its connections are closed
        before = service.usage()
        done += [hand_over(service, decoder, n, seed=n) for n in (40, 300, 7, 450)]
        after = settled(service, before.n_fds)
        assert after.n_fds == before.n_fds
        assert after.n_mappings <= before.n_mappings + 2, (before, after)  # malloc may grow a heap
        assert [each["warm"] for each in done] == [False, True, True, True, True]
        assert hand_over(service, other, 100, seed=7)["warm"] is False
        assert hand_over(service, other, 100, seed=8)["warm"] is True
        assert hand_over(service, decoder, 100, seed=9)["warm"] is False
    assert service.close() == 0
    assert not service.path.exists()
    assert "Traceback" not in service.stderr()


def test_a_real_model(start: Start, smollm2: Model, smollm2_path: Path) -> None:
    service = start(smollm2_path)
    with Decoder.open(smollm2, **PARAMS) as decoder:
        assert [hand_over(service, decoder, n, seed=n)["warm"] for n in (60, 130)] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "field", "expected", "found"),
    [
        (("--n-ctx", "1024"), "n_ctx", 512, 1024),
        (("--type-v", "q8_0"), "type_v", 1, 8),
    ],
)
def test_a_parameter_that_differs_is_named(
    start: Start,
    tiny: Model,
    tiny_path: Path,
    arguments: tuple[str, ...],
    field: str,
    expected: int,
    found: int,
) -> None:
    service = start(tiny_path, *arguments)
    with Decoder.open(tiny, **PARAMS) as decoder, decoder.share(n_tokens=8) as share:
        share.send(service.path)
        with Engine(service, share.share_id, [1, 2]) as engine:
            error = engine.outcome().error
            assert error == (
                f"LayoutMismatchError: layout differs in {field}: expected {expected}, found {found}"
            )
            with pytest.raises(LedgerIncompleteError, match=field):
                share.wait()
            assert share.ledger.snapshot().error == error
    failed = service.wait_for("failed")
    assert (failed["field"], failed["expected"], failed["found"]) == (field, expected, found)


def test_another_model_is_named(start: Start, tiny: Model, tiny_path: Path, archs_path: Path) -> None:
    """And the service is there for the next, of its own model."""
    service = start(tiny_path)
    with (
        Model.open(archs_path / "qwen2-dense.gguf") as qwen,
        Decoder.open(qwen, **PARAMS) as decoder,
        decoder.share(n_tokens=8) as share,
    ):
        share.send(service.path)
        with Engine(service, share.share_id, [1, 2]) as engine:
            assert "differs in " in str(engine.outcome().error)
    assert service.wait_for("failed")["field"]
    with Decoder.open(tiny, **PARAMS) as decoder:
        hand_over(service, decoder, 20, seed=1)


def test_tokens_that_the_model_does_not_have(start: Start, tiny: Model, tiny_path: Path) -> None:
    service = start(tiny_path)
    with Decoder.open(tiny, **PARAMS) as decoder:
        with decoder.share(n_tokens=8) as share:
            share.send(service.path)
            with Engine(service, share.share_id, [1, 2**31 - 1]) as engine:
                assert "token 1 is 2147483647, which is not in [0, " in str(engine.outcome().error)
        hand_over(service, decoder, 20, seed=1)


# -- ends ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def long_prefill(service: ServiceProcess, model: Model, decoder: Decoder) -> Iterator[tuple[Share, Engine]]:
    """Yield in the middle of a prefill that takes many graphs."""
    tokens = random_tokens(model, 3000)
    with decoder.share(n_tokens=3000) as share:
        share.send(service.path)
        with Engine(service, share.share_id, tokens) as engine:
            assert isinstance(engine.next(), wire.Progress)
            yield share, engine


LONG: dict[str, Any] = {"n_ctx": 3072, "n_ubatch": 16, "n_threads": 1}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle(
    start: Start, smollm2: Model, smollm2_path: Path, number: signal.Signals
) -> None:
    service = start(smollm2_path)
    with (
        Decoder.open(smollm2, **LONG) as decoder,
        long_prefill(service, smollm2, decoder) as (share, engine),
        Engine(service, 77, [1]) as waiting,
    ):
        while service.wait_for("job")["share_id"] != waiting.share_id:
            pass
        assert service.close(number) == 0
        assert engine.outcome().error == "cancelled: the provider stops"
        assert waiting.outcome().error == "the provider stops"
        with pytest.raises(LedgerIncompleteError, match="the provider stops"):
            share.wait()
        record = share.ledger.snapshot()
        assert record.state is LedgerState.FAILED
        assert 0 < record.n_filled < 3000
        assert not service.path.exists()
    assert "Traceback" not in service.stderr()


def test_an_engine_that_hangs_up(start: Start, smollm2: Model, smollm2_path: Path) -> None:
    """Its job ends at the next graph; the next one is served in other memory, and as exact as ever."""
    service = start(smollm2_path)
    with Decoder.open(smollm2, **LONG) as decoder:
        with long_prefill(service, smollm2, decoder) as (share, engine):
            engine.connection.close()
            assert service.wait_for("failed")["error"] == "cancelled: the engine has hung up"
            record = share.ledger.snapshot()
            assert record.error == "cancelled: the engine has hung up"
            assert 0 < record.n_filled < 3000
        tokens = random_tokens(smollm2, 20)
        with decoder.share(n_tokens=20) as share:
            share.send(service.path)
            with Engine(service, share.share_id, tokens[:-1]) as engine:
                assert engine.outcome().ok
            decoder.adopt(share, tokens[:-1])
        assert service.wait_for("done")["warm"] is False
        with Context.create(smollm2, **LONG) as local:
            local.decode(tokens[:-1], position=0)
            here = decode_each(local, tokens[-1:], position=19)
        there = decode_each(decoder.context, tokens[-1:], position=19)
        assert here[0].tobytes() == there[0].tobytes()


DECODER = """
import sys, time
import kvshare
with kvshare.Decoder.open(sys.argv[1], n_ctx=512, n_ubatch=64, n_threads=1) as decoder:
    with decoder.share(n_tokens=8) as share:
        share.send(sys.argv[2])
        print(share.share_id, flush=True)
        share.wait()
        print("done", flush=True)
        sys.stdin.read()
"""


def test_a_decoder_that_is_killed(start: Start, tiny: Model, tiny_path: Path) -> None:
    """Its memory is given back soon: no mapping keeps it."""
    service = start(tiny_path)
    with subprocess.Popen(
        [sys.executable, "-c", DECODER, str(tiny_path), str(service.path)],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as decoder:
        assert decoder.stdout is not None
        share_id = int(decoder.stdout.readline())
        with Engine(service, share_id, [1, 2, 3]) as engine:
            assert engine.outcome().ok
        assert decoder.stdout.readline() == "done\n"
        maps = Path(f"/proc/{service.process.pid}/maps")
        assert "llama-kv-share" in maps.read_text()
        decoder.kill()
        decoder.wait()
        service.wait_for("cold")
        assert "llama-kv-share" not in maps.read_text()
    with Decoder.open(tiny, **PARAMS) as another:
        assert hand_over(service, another, 20, seed=1)["warm"] is False


def test_deadlines_and_bounds(start: Start, tiny: Model, tiny_path: Path) -> None:
    service = start(tiny_path, "--pair-timeout", "0.3", "--max-jobs", "1")
    with Engine(service, 5, [1]) as first:
        service.wait_for("job")
        with Engine(service, 6, [1]) as second:
            assert second.outcome().error == "busy: there are 1 jobs already"
        assert first.outcome().error == "no share 5 came within 0.3 s"
    with Decoder.open(tiny, **PARAMS) as decoder, decoder.share(n_tokens=8) as share:
        share.send(service.path)
        with pytest.raises(LedgerIncompleteError, match="no job for share"):
            share.wait()


# -- the command ---------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvshare", "provider", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
    )


def test_what_cannot_start(tiny_path: Path) -> None:
    with fds.private_directory() as folder, fds.listening(folder / "taken.sock"):
        done = command("--model", str(tiny_path), "--listen", str(folder / "taken.sock"))
        assert done.returncode == 12
        assert "another process listens" in done.stderr
        done = command("--model", "/nonexistent.gguf", "--listen", str(folder / "p.sock"))
        assert done.returncode == 18
        done = command("--model", str(tiny_path), "--listen", str(folder / ("x" * 200)))
        assert done.returncode == 12
        done = command("--model", str(tiny_path))
        assert done.returncode == 2
        assert os.listdir(folder) == ["taken.sock"]


def test_lines_to_read(tiny: Model, tiny_path: Path) -> None:
    with fds.private_directory() as folder:
        path = folder / "p.sock"
        with subprocess.Popen(
            [
                *(sys.executable, "-m", "kvshare", "provider"),
                *("--model", str(tiny_path), "--listen", str(path)),
            ],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert "listening at" in process.stdout.readline()
            with Decoder.open(tiny, **PARAMS) as decoder, decoder.share(n_tokens=8) as share:
                share.send(path)
                with fds.connect_unix(path) as connection:
                    job = wire.JobHeader(share_id=share.share_id, tokens=(1, 2, 3))
                    fds.send_message(connection, wire.encode(job))
                    share.wait()
                    assert (
                        f"share {share.share_id}: prefilling 3 tokens behind 0, cold"
                        in process.stdout.readline()
                    )
                    while "done, 3 tokens in" not in (line := process.stdout.readline()):
                        assert line
            process.terminate()
            assert process.stdout.read().endswith("stopped\n")
            assert process.wait(WAIT_S) == 0
