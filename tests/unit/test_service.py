"""The service without a model: pairing, order, deadlines, bounds, cancelling, broken peers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvshare import fds, wire
from kvshare.errors import LedgerIncompleteError, PeerRefusedError
from kvshare.ledger import LedgerState
from kvshare.provider import Offer
from kvshare.service import Service
from kvshare.testing import FakeDecoder, FakeProvider
from kvshare.testing.fakes import FakeShare
from kvshare.testing.faults import cut_messages, send_framed

TOKENS = tuple(range(40))
STEP = 8
WAIT_S = 10.0


class FakeFiller:
    """Fills with the fake model; `hold` stops it before each step until it is set."""

    def __init__(self) -> None:
        self.filled: list[tuple[int, ...]] = []
        self.n_forgotten = 0
        self.hold = threading.Event()
        self.hold.set()
        self.before: Callable[[Offer], None] = lambda offer: None
        self.threads: set[str] = set()

    def fill(
        self,
        offer: Offer,
        tokens: tuple[int, ...],
        *,
        begun: Callable[[bool], None],
        progress: Callable[[int], None],
    ) -> None:
        self.threads.add(threading.current_thread().name)
        self.before(offer)
        begun(bool(self.filled))
        provider = FakeProvider(offer, step=STEP, before_rows=lambda *_: self._wait())
        provider.prefill(tokens, progress=progress)
        provider.publish()
        self.filled.append(tokens)

    def _wait(self) -> None:
        assert self.hold.wait(WAIT_S)

    def forget(self) -> None:
        self.n_forgotten += 1


class Running:
    """A service in a thread of this process.

    *Ownership*: `close` stops it.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.path = folder / "p.sock"
        self.filler = FakeFiller()
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._stack = contextlib.ExitStack()
        listener = self._stack.enter_context(fds.listening(self.path))
        self.service = Service(listener, self.filler, report=self._take, **options)
        self._thread = threading.Thread(target=self.service.run, name="model")
        self._thread.start()

    def _take(self, event: str, /, **fields: Any) -> None:
        with self._changed:
            self.events.append({"event": event, **fields})
            self._changed.notify_all()

    def wait_for(self, event: str, n: int = 1, **fields: Any) -> dict[str, Any]:
        """Wait for the n-th event of this kind."""
        wanted = {"event": event, **fields}

        def found() -> list[dict[str, Any]]:
            return [each for each in self.events if wanted.items() <= each.items()]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= n, WAIT_S), self.events
            return found()[n - 1]

    def close(self) -> None:
        self.filler.hold.set()
        self.service.stop()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        self._stack.close()


class Job:
    """An engine's connection."""

    def __init__(self, path: Path, share_id: int, tokens: Sequence[int] = TOKENS) -> None:
        self.connection = fds.connect_unix(path)
        header = wire.JobHeader(share_id=share_id, tokens=tuple(tokens))
        fds.send_message(self.connection, wire.encode(header))
        self.share_id = share_id
        self.progress: list[int] = []

    def outcome(self) -> wire.Outcome:
        """Read until the end."""
        while True:
            payload, _ = fds.receive_message(self.connection, deadline=time.monotonic() + WAIT_S, max_fds=0)
            message = wire.decode(payload)
            assert isinstance(message, (wire.Progress, wire.Outcome))
            assert message.share_id == self.share_id
            if isinstance(message, wire.Outcome):
                assert self.connection.recv(1) == b""  # the provider hangs up
                return message
            assert message.n_tokens == len(TOKENS)
            self.progress.append(message.n_filled)

    def close(self) -> None:
        self.connection.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def run(**options: Any) -> Running:
            running = Running(stack.enter_context(fds.private_directory()), **options)
            stack.callback(running.close)
            return running

        yield run


@pytest.fixture
def decoder() -> Iterator[FakeDecoder]:
    with FakeDecoder() as made:
        yield made


@contextlib.contextmanager
def shared(
    decoder: FakeDecoder, path: Path | None, *, seq_id: int = 0, **options: Any
) -> Iterator[FakeShare]:
    with decoder.share(seq_id, n_tokens=len(TOKENS), **options) as share:
        if path is not None:
            share.send(path)
        yield share


def assert_serves(running: Running, decoder: FakeDecoder, *, seq_id: int = 0) -> None:
    """A whole handoff, exact."""
    with shared(decoder, running.path, seq_id=seq_id) as share, Job(running.path, share.share_id) as job:
        assert job.outcome() == wire.Outcome(share_id=share.share_id, ok=True)
        assert decoder.adopt(share, TOKENS).n_adopted == len(TOKENS)
    with FakeDecoder() as local:
        local.prefill(TOKENS)
        assert decoder.logits(seq_id) == local.logits()
    decoder.clear(seq_id)


# -- pairing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share_first", [True, False])
def test_either_comes_first(start: Callable[..., Running], decoder: FakeDecoder, share_first: bool) -> None:
    running = start()
    with shared(decoder, running.path if share_first else None) as share:
        if share_first:
            running.wait_for("share")
        with Job(running.path, share.share_id) as job:
            if not share_first:
                running.wait_for("job")
                share.send(running.path)
            assert job.outcome().ok
            assert job.progress == [8, 16, 24, 32, 40]
            seen: list[tuple[int, int]] = []
            share.wait(progress=lambda *each: seen.append(each))  # the decoder hears the same
            assert seen == [(n, 40) for n in job.progress]
        decoder.adopt(share, TOKENS)
    done = running.wait_for("done", share_id=share.share_id)
    assert done["n_tokens"] == 40
    assert done["warm"] is False
    assert min(done["setup_ms"], done["fill_ms"]) >= 0
    assert [each["event"] for each in running.events if each["event"] != "progress"] in (
        ["share", "job", "begun", "done"],
        ["job", "share", "begun", "done"],
    )
    assert running.filler.threads == {"model"}


def test_a_job_that_goes_on_behind_a_prefix(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    """Progress begins there, and counts from position 0."""
    running = start()
    decoder.prefill(TOKENS[:20])
    with (
        shared(decoder, running.path, prefix=TOKENS[:20]) as share,
        Job(running.path, share.share_id) as job,
    ):
        assert job.outcome().ok
        assert job.progress == [28, 36, 40]
        seen: list[tuple[int, int]] = []
        share.wait(progress=lambda *each: seen.append(each))
        assert seen == [(n, 40) for n in job.progress]
        decoder.adopt(share, TOKENS)
    with FakeDecoder() as local:
        local.prefill(TOKENS)
        assert decoder.logits() == local.logits()
    for event in ("begun", "done"):
        said = running.wait_for(event, share_id=share.share_id)
        assert (said["n_tokens"], said["n_prefix"]) == (40, 20)


def test_a_job_that_goes_on_behind_another_prefix(
    start: Callable[..., Running], decoder: FakeDecoder
) -> None:
    """It fails, and the sequence is as it was."""
    running = start()
    decoder.prefill(range(100, 120))
    before = decoder.logits()
    with (
        shared(decoder, running.path, prefix=range(100, 120)) as share,
        Job(running.path, share.share_id) as job,
    ):
        outcome = job.outcome()
        assert not outcome.ok
        assert outcome.error
        assert "prefix" in outcome.error
    assert decoder.logits() == before
    decoder.clear()
    assert_serves(running, decoder)


def test_a_decoder_that_hangs_up_after_sending(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    with shared(decoder, None) as share:
        connection = fds.connect_unix(running.path)
        share.send(connection)
        connection.close()
        running.wait_for("share")
        with Job(running.path, share.share_id) as job:
            assert job.outcome().ok
        assert decoder.adopt(share, TOKENS).n_adopted == len(TOKENS)


def test_an_engine_that_has_nothing_more_to_say(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    """It closes its half for writing, as asyncio's `write_eof` does, and reads on."""
    running = start()
    with shared(decoder, None) as share, Job(running.path, share.share_id) as job:
        job.connection.shutdown(socket.SHUT_WR)
        running.wait_for("job")
        share.send(running.path)
        assert job.outcome().ok


def test_jobs_are_served_in_turn(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    running.filler.hold.clear()
    with contextlib.ExitStack() as stack:
        shares = [stack.enter_context(shared(decoder, running.path, seq_id=i)) for i in range(4)]
        running.wait_for("share", 4)
        order = [2, 0, 3, 1]
        jobs = []
        for n, i in enumerate(order):
            jobs.append(stack.enter_context(Job(running.path, shares[i].share_id)))
            running.wait_for("job", n + 1)
        running.filler.hold.set()
        assert all(job.outcome().ok for job in jobs)
        running.wait_for("done", 4)
        begun = [each["share_id"] for each in running.events if each["event"] == "begun"]
        assert begun == [shares[i].share_id for i in order]
        for share in shares:
            decoder.adopt(share, TOKENS)


def test_jobs_that_wait_hear_of_it(
    start: Callable[..., Running], decoder: FakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that hears nothing would take the provider for dead."""
    monkeypatch.setattr("kvshare.service._WAIT_S", 0.0)
    running = start()
    running.filler.hold.clear()
    with (
        shared(decoder, running.path) as first,
        shared(decoder, running.path, seq_id=1) as second,
        Job(running.path, first.share_id) as at_work,
    ):
        running.wait_for("begun")
        with Job(running.path, second.share_id) as waiting:
            running.wait_for("job", 2)
            running.filler.hold.set()
            assert at_work.outcome().ok
            assert waiting.outcome().ok
        assert 0 not in at_work.progress
        assert waiting.progress[0] == 0
        decoder.adopt(second, TOKENS)


def test_a_job_that_waits_when_the_service_stops(
    start: Callable[..., Running], decoder: FakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvshare.service._WAIT_S", 0.0)
    running = start()
    running.filler.hold.clear()
    report = running.service._report

    def hold(event: str, /, **fields: Any) -> None:
        if event == "progress":
            running.filler.hold.clear()  # one step, and no more
        report(event, **fields)

    running.service._report = hold
    with (
        shared(decoder, running.path) as first,
        shared(decoder, running.path, seq_id=1) as second,
        Job(running.path, first.share_id) as at_work,
        Job(running.path, second.share_id) as waiting,
    ):
        running.wait_for("job", 2)
        running.filler.hold.set()
        running.wait_for("progress")
        fds.receive_message(waiting.connection, deadline=time.monotonic() + WAIT_S, max_fds=0)
        running.service.stop()
        running.filler.hold.set()
        assert not at_work.outcome().ok
        assert waiting.outcome().error == "the provider stops"


def test_accepting_goes_on_behind_a_prefill(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start(pair_timeout_s=0.2)
    running.filler.hold.clear()
    with shared(decoder, running.path) as share, Job(running.path, share.share_id) as job:
        running.wait_for("begun")
        with Job(running.path, 77) as other:
            assert other.outcome().error == "no share 77 came within 0.2 s"
        running.filler.hold.set()
        assert job.outcome().ok


# -- deadlines and bounds ----------------------------------------------------------------------


def test_a_job_without_a_share(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start(pair_timeout_s=0.1)
    with Job(running.path, 5) as job:
        assert job.outcome() == wire.Outcome(share_id=5, ok=False, error="no share 5 came within 0.1 s")
    assert_serves(running, decoder)


def test_a_share_without_a_job(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start(pair_timeout_s=0.1)
    with shared(decoder, running.path) as share:
        with pytest.raises(LedgerIncompleteError, match="came within"):
            share.wait()
        record = share.ledger.snapshot()
        assert record.state is LedgerState.FAILED
        assert record.error == f"no job for share {share.share_id} came within 0.1 s"
    assert_serves(running, decoder)


def test_a_peer_that_dawdles(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start(receive_timeout_s=0.1)
    with fds.connect_unix(running.path) as connection:
        connection.send(b"\x08")
        with contextlib.suppress(ConnectionResetError):  # closed before its byte was read
            assert connection.recv(1) == b""
    dropped = running.wait_for("dropped")
    assert dropped["error"] == "the deadline passed when 1 of 4 bytes were received"
    assert_serves(running, decoder)


def test_a_share_that_expired_in_the_queue(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    """Its cells may be somebody else's by then."""
    running = start()
    running.filler.hold.clear()
    with (
        shared(decoder, running.path) as first,
        Job(running.path, first.share_id) as at_work,
        shared(decoder, running.path, seq_id=1, expires_ms=50) as second,
        Job(running.path, second.share_id) as job,
    ):
        running.wait_for("job", 2)
        time.sleep(0.06)
        running.filler.hold.set()
        assert at_work.outcome().ok
        assert job.outcome().error == "cancelled: the share has expired"
    assert running.filler.filled == [TOKENS]


def test_too_many_jobs(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start(max_jobs=2)
    running.filler.hold.clear()
    with shared(decoder, running.path) as share, Job(running.path, share.share_id) as at_work:
        running.wait_for("begun")
        with Job(running.path, 11) as waiting:
            running.wait_for("job", 2)
            with Job(running.path, 12) as refused:
                assert refused.outcome().error == "busy: there are 2 jobs already"
            waiting.close()  # gives its place back
            running.wait_for("dropped", share_id=11, error="the engine has hung up")
        with Job(running.path, 13):
            running.wait_for("job", share_id=13)
        running.filler.hold.set()
        assert at_work.outcome().ok
    assert_serves(running, decoder, seq_id=1)


def test_too_many_shares(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start(max_jobs=1)
    with shared(decoder, running.path) as first:
        running.wait_for("share")
        with shared(decoder, running.path, seq_id=1) as second:
            with pytest.raises(LedgerIncompleteError, match="busy: there are 1 shares without a job"):
                second.wait()
            assert second.ledger.snapshot().state is LedgerState.FAILED
        with Job(running.path, first.share_id) as job:
            assert job.outcome().ok


def test_a_second_job_and_a_second_share(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    """The first of each goes on."""
    running = start()
    with shared(decoder, None) as share, Job(running.path, share.share_id) as job:
        running.wait_for("job")
        with Job(running.path, share.share_id) as twice:
            assert twice.outcome().error == f"a job for share {share.share_id} waits already"
        share.send(running.path)
        assert job.outcome().ok
    with shared(decoder, running.path) as share:
        running.wait_for("share", share_id=share.share_id)
        with fds.connect_unix(running.path) as connection:
            descriptors = [decoder._region.fileno(), share.ledger.fileno()]
            fds.send_message(connection, wire.encode(share.header), descriptors)
            payload, _ = fds.receive_message(connection)
            assert wire.decode(payload) == wire.Outcome(
                share_id=share.share_id, ok=False, error=f"share {share.share_id} waits already"
            )
        with Job(running.path, share.share_id) as job:
            assert job.outcome().ok
        decoder.adopt(share, TOKENS)


def test_more_slow_peers_than_are_watched(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start(receive_timeout_s=0.3)
    with contextlib.ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(fds.connect_unix(running.path))
        assert_serves(running, decoder)


# -- ends ----------------------------------------------------------------------------------------


def test_an_engine_that_hangs_up_cancels(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    running.filler.hold.clear()
    with shared(decoder, running.path) as share:
        job = Job(running.path, share.share_id)
        running.wait_for("begun")
        job.close()
        running.filler.hold.set()
        with pytest.raises(LedgerIncompleteError, match="the engine has hung up"):
            share.wait()
        record = share.ledger.snapshot()
        assert record.state is LedgerState.FAILED
        assert record.error == "cancelled: the engine has hung up"
        assert record.n_filled == STEP  # between two steps, not at the end
    assert running.wait_for("failed")["type"] == "Cancelled"
    assert running.filler.n_forgotten == 1  # the decoder takes other memory now
    assert running.filler.filled == []
    assert_serves(running, decoder)


def test_an_engine_that_hangs_up_in_the_queue(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    running.filler.hold.clear()
    with (
        shared(decoder, running.path) as first,
        Job(running.path, first.share_id) as at_work,
        shared(decoder, running.path, seq_id=1) as second,
    ):
        job = Job(running.path, second.share_id)
        running.wait_for("job", 2)
        job.close()
        running.filler.hold.set()
        assert at_work.outcome().ok
        running.wait_for("failed", share_id=second.share_id)
        assert second.ledger.snapshot().error == "cancelled: the engine has hung up"
    begun = [each for each in running.events if each["event"] == "begun"]
    assert len(begun) == 1


def test_stop_in_the_middle(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    """Everybody is told: at work, in the queue, without a partner, half a message."""
    running = start()
    running.filler.hold.clear()
    with contextlib.ExitStack() as stack:
        shares = [stack.enter_context(shared(decoder, running.path, seq_id=i)) for i in range(3)]
        jobs = [stack.enter_context(Job(running.path, share.share_id)) for share in shares[:2]]
        jobs.append(stack.enter_context(Job(running.path, 99)))
        half = stack.enter_context(fds.connect_unix(running.path))
        half.send(b"\0")
        running.wait_for("begun")
        running.wait_for("share", 3)
        running.wait_for("job", 3)
        running.close()
        errors = [job.outcome().error for job in jobs]
        assert errors == ["cancelled: the provider stops", "the provider stops", "the provider stops"]
        assert [share.ledger.snapshot().error for share in shares] == [
            "cancelled: the provider stops",
            "the provider stops",
            "the provider stops",
        ]
        with contextlib.suppress(ConnectionResetError):  # closed before its byte was read
            assert half.recv(1) == b""
        assert not running.path.exists()
    running.service.stop()  # again, and late: nothing happens


def test_a_filler_that_refuses(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    many = tuple(range(len(TOKENS) + 1))
    with shared(decoder, running.path) as share, Job(running.path, share.share_id, many) as job:
        error = job.outcome().error
        assert error == "LocalProtocolError: 41 tokens do not fit into a lease of 40 cells"
        assert share.ledger.snapshot().error == error
    assert running.filler.n_forgotten == 1
    assert_serves(running, decoder)


def test_a_bug_in_the_filler(
    start: Callable[..., Running], decoder: FakeDecoder, caplog: pytest.LogCaptureFixture
) -> None:
    running = start()

    def fail(offer: Offer) -> None:
        raise ZeroDivisionError("oops")

    running.filler.before = fail
    with shared(decoder, running.path) as share, Job(running.path, share.share_id) as job:
        assert job.outcome().error == "ZeroDivisionError: oops"
        assert share.ledger.snapshot().state is LedgerState.FAILED
    assert "a bug, the service goes on" in caplog.text
    running.filler.before = lambda offer: None
    assert_serves(running, decoder)


@pytest.mark.parametrize("event", ["job", "begun", "progress", "done"])
def test_a_report_that_raises_ends_the_service(decoder: FakeDecoder, event: str) -> None:
    """Such as a pipe that nobody reads any more. The peers are told; `run` raises."""

    def report(found: str, /, **fields: Any) -> None:
        if found == event:
            raise BrokenPipeError("nobody reads")

    with fds.private_directory() as folder, fds.listening(folder / "p.sock") as listener:
        service = Service(listener, FakeFiller(), report=report)
        errors: list[BaseException] = []

        def run() -> None:
            try:
                service.run()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        with shared(decoder, folder / "p.sock") as share, Job(folder / "p.sock", share.share_id) as job:
            assert job.outcome().ok is (event == "done")
        thread.join(WAIT_S)
        assert [type(error) for error in errors] == [BrokenPipeError]


SENDER = """
import sys
from kvshare import fds
with fds.connect_unix(sys.argv[1]) as connection:
    fds.send_message(connection, sys.stdin.buffer.readline().strip(), [int(fd) for fd in sys.argv[2:]])
    sys.stdin.read()
"""


def test_a_decoder_that_has_died(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    """What is kept for its memory is given back, or that memory would stay for ever."""
    running = start()
    with shared(decoder, None) as share:
        descriptors = [decoder._region.fileno(), share.ledger.fileno()]
        with subprocess.Popen(
            [sys.executable, "-c", SENDER, str(running.path), *map(str, descriptors)],
            stdin=subprocess.PIPE,
            pass_fds=descriptors,
        ) as sender:
            assert sender.stdin is not None
            sender.stdin.write(wire.encode(share.header) + b"\n")
            sender.stdin.flush()
            with Job(running.path, share.share_id) as job:
                assert job.outcome().ok
            time.sleep(1.2)
            assert running.filler.n_forgotten == 0
            sender.kill()
        running.wait_for("cold")
        assert running.filler.n_forgotten == 1
    assert_serves(running, decoder)


# -- broken and hostile peers ------------------------------------------------------------------


def hostile() -> dict[str, bytes]:
    job = wire.encode(wire.JobHeader(share_id=7, tokens=(1, 2)))
    return {
        "no JSON": b"\xff\xfe",
        "empty": b"",
        "a list": b"[]",
        "another protocol": job.replace(b'"protocol":1', b'"protocol":2'),
        "no share_id": b'{"protocol":1,"job":{"tokens":[1]}}',
        "share_id 0": job.replace(b'"share_id":7', b'"share_id":0'),
        "share_id too large": job.replace(b'"share_id":7', b'"share_id":9007199254740992'),
        "share_id a string": job.replace(b'"share_id":7', b'"share_id":"7"'),
        "no tokens": job.replace(b"[1,2]", b"[]"),
        "a negative token": job.replace(b"[1,2]", b"[-1]"),
        "a fraction": job.replace(b"[1,2]", b"[1.5]"),
        "progress": wire.encode(wire.Progress(share_id=7, n_filled=1, n_tokens=2)),
        "an outcome": wire.encode(wire.Outcome(share_id=7, ok=True)),
        "deep": b"[" * 100_000,
    }


@pytest.mark.parametrize("name", hostile())
def test_messages_that_are_none(start: Callable[..., Running], decoder: FakeDecoder, name: str) -> None:
    running = start()
    with fds.connect_unix(running.path) as connection:
        send_framed(connection, hostile()[name], [])
        assert connection.recv(1) == b""
    assert running.wait_for("dropped")["error"]
    assert_serves(running, decoder)


def test_an_announced_length_over_the_limit(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    with fds.connect_unix(running.path) as connection:
        send_framed(connection, b"x", [], length=0xFFFFFFFF)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""
    assert "the limit is" in running.wait_for("dropped")["error"]
    assert_serves(running, decoder)


def test_a_message_that_ends_early(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    parts = list(cut_messages(wire.encode(wire.JobHeader(share_id=7, tokens=TOKENS))))
    for part in parts:
        with fds.connect_unix(running.path) as connection:
            connection.sendall(part)
    running.wait_for("dropped", len(parts))
    assert_serves(running, decoder)


def test_a_message_byte_by_byte(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    with shared(decoder, running.path) as share, fds.connect_unix(running.path) as connection:
        payload = wire.encode(wire.JobHeader(share_id=share.share_id, tokens=TOKENS))
        for byte in len(payload).to_bytes(4, "little") + payload:
            connection.sendall(bytes([byte]))
        running.wait_for("done")


def test_descriptors_with_a_job(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    running = start()
    with fds.memfd_create("kvshare-test", 4096) as made, fds.connect_unix(running.path) as connection:
        payload = wire.encode(wire.JobHeader(share_id=7, tokens=(1, 2)))
        fds.send_message(connection, payload, [made.fileno()] * 3)
        answer, _ = fds.receive_message(connection)
        assert wire.decode(answer) == wire.Outcome(
            share_id=7, ok=False, error="3 descriptors came with a job"
        )
    assert_serves(running, decoder)


@pytest.mark.parametrize("n_fds", [0, 1, 3])
def test_a_share_with_other_descriptors(
    start: Callable[..., Running], decoder: FakeDecoder, n_fds: int
) -> None:
    """The decoder hears why, and its ledger, if it came at all, was not touched."""
    running = start()
    with shared(decoder, None) as share, fds.connect_unix(running.path) as connection:
        descriptors = [decoder._region.fileno(), share.ledger.fileno(), decoder._region.fileno()][:n_fds]
        fds.send_message(connection, wire.encode(share.header), descriptors)
        payload, _ = fds.receive_message(connection)
        outcome = wire.decode(payload)
        assert isinstance(outcome, wire.Outcome)
        assert "descriptors" in str(outcome.error)
        assert share.ledger.snapshot().state is LedgerState.ISSUED
    assert running.wait_for("dropped")["share_id"] == share.share_id
    assert_serves(running, decoder)


def test_an_engine_that_does_not_read(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    """Its socket is full; the prefill goes on, and the service is there for the next."""
    running = start()
    with shared(decoder, running.path) as share, fds.connect_unix(running.path) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        fds.send_message(connection, wire.encode(wire.JobHeader(share_id=share.share_id, tokens=TOKENS)))
        running.wait_for("done")
        decoder.adopt(share, TOKENS)
    decoder.clear()
    assert_serves(running, decoder)


def test_another_user(
    start: Callable[..., Running], decoder: FakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    with monkeypatch.context() as patch:
        peer = fds.PeerCredentials(1, os.geteuid() + 1, 0)
        patch.setattr(fds, "peer_credentials", lambda sock: peer)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(running.path))
            assert other.recv(1) == b""
    assert "expected uid" in running.wait_for("dropped")["error"]
    assert_serves(running, decoder)


def test_nothing_leaks(start: Callable[..., Running], decoder: FakeDecoder) -> None:
    """Descriptors are as many after all kinds of ends as before."""
    running = start(pair_timeout_s=0.05)

    def cycle() -> None:
        n = len([each for each in running.events if each["event"] == "dropped"])
        assert_serves(running, decoder)
        with shared(decoder, running.path), Job(running.path, 5) as job:
            job.outcome()
            running.wait_for("dropped", n + 2)
        with fds.connect_unix(running.path) as connection:
            send_framed(connection, b"no", [decoder._region.fileno()])
            assert connection.recv(1) == b""
        running.wait_for("dropped", n + 3)

    cycle()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_client_after_the_end(start: Callable[..., Running]) -> None:
    running = start()
    running.close()
    with pytest.raises(PeerRefusedError, match="nobody listens"):
        fds.connect_unix(running.path)
