"""A provider that stays: takes shares and jobs on one socket, pairs them, fills one after the other.

Two kinds of connections arrive. A decoder sends a *share* (header and descriptors), and may hang up
then. An engine sends a *job* (`share_id` and tokens), stays, and reads progress and the outcome. The
two meet by `share_id`, whichever comes first; what finds no partner in time is dropped.

The rules:

- The thread that calls `Service.run` does the model's work and nothing else. A second thread accepts,
  receives and pairs; it never waits for a single peer. A connection belongs to one thread at a time:
  it changes hands together with its pair.
- Whatever ends a job is said three times: in the ledger, on the job's connection, and on the share's
  if that is still open. What a peer gets wrong costs its own connection, and nothing else.
- While a job is at work, those behind it hear that they wait (`n_filled` is 0), and are not given up.
- Between two graphs a job ends early if its engine has hung up, if the share has expired, if its
  decoder has ended, or if the service stops.
- A strict share's connection closes when nothing of it is mapped any more, done or not.
- Everything has a bound: jobs, unpaired shares, connections, and the time that each may take.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvshare import fds, wire
from kvshare.errors import (
    KvshareError,
    MismatchError,
    PeerError,
    PeerRefusedError,
    RemoteProtocolError,
)
from kvshare.fds import OwnedFd
from kvshare.provider import Offer

DEFAULT_PAIR_TIMEOUT_S = 30.0
DEFAULT_MAX_JOBS = 16

# connections whose message is not complete yet; more have to wait in the listener's backlog
_MAX_ARRIVALS = 64
# how long a peer may hold up the service that does not read what it is told
_TELL_S = 1.0
# how often an idle service looks whether the decoder that it is warm for has died
_IDLE_S = 1.0
# how often jobs that wait are told so
_WAIT_S = 1.0
# pause after an accept that the kernel refuses, such as for want of descriptors
_ACCEPT_PAUSE_S = 0.05

_STOPPING = "the provider stops"

logger = logging.getLogger("kvshare.service")


class Filler(Protocol):
    """What does the work, such as `kvshare.provider.WarmProvider`."""

    def fill(
        self,
        offer: Offer,
        tokens: tuple[int, ...],
        *,
        begun: Callable[[bool], None],
        progress: Callable[[int], None],
    ) -> None:
        """Fill the offered cells and vouch for them; see `WarmProvider.fill`.

        What `progress` raises has to come out again, soon, and leave the filler usable.
        """

    def forget(self) -> None:
        """Give back what is kept for a next offer; idempotent."""


class Report(Protocol):
    """Told of everything that happens, by one thread at a time.

    The events, and their fields beside `share_id`: `share` (`seq_id`, `nbytes`) and `job`
    (`n_tokens`) when they arrive; `begun` (`n_tokens`, `n_prefix`, `warm`), `progress` (`n_filled`,
    `n_tokens`), then `done` (`n_tokens`, `n_prefix`, `warm`, `setup_ms`, `fill_ms`) or `failed` (`error`,
    `type`, and `field`, `expected`, `found` of a mismatch); `dropped` (`error`; `share_id` may be None)
    for what never became a pair; `cold` (`reason`, no `share_id`) when a context is given back.

    `n_tokens` and `n_filled` count from position 0; the `n_prefix` that the decoder's sequence held are
    among them.
    """

    def __call__(self, event: str, /, **fields: Any) -> None:
        """Take an event."""


def _silent(event: str, /, **fields: Any) -> None:
    """Say nothing."""


class _Cancelled(Exception):
    """A job that ends between two graphs; the text says why."""


# -- what arrives ------------------------------------------------------------------------------


@dataclass
class _Arrival:
    """A connection whose message is not complete."""

    connection: socket.socket
    message: fds.Incoming
    deadline: float

    def close(self) -> None:
        self.message.close()
        self.connection.close()


@dataclass
class _Share:
    """A decoder's offer; the connection is there to tell it, if it listens."""

    offer: Offer
    connection: socket.socket
    arrived: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.decoder = fds.PeerProcess(self.connection)

    @property
    def share_id(self) -> int:
        return self.offer.header.share_id

    @property
    def expired(self) -> bool:
        # counted from the issue, which was earlier, but nobody knows how much
        return time.monotonic() > self.arrived + self.offer.header.expires_ms / 1000

    def refuse(self, error: str, *, in_ledger: bool = True) -> None:
        if in_ledger:
            self.offer.fail(error)
        _tell(self.connection, wire.Outcome(share_id=self.share_id, ok=False, error=error))

    def close(self) -> None:
        self.offer.close(leave_views=True)  # an error that is kept for later may hold some
        self.decoder.close()
        self.connection.close()  # the last: it says that the memory is let go of


@dataclass
class _Job:
    """An engine's wish; it takes one of the service's places until it is closed."""

    header: wire.JobHeader
    connection: socket.socket
    places: threading.BoundedSemaphore
    arrived: float = field(default_factory=time.monotonic)

    @property
    def share_id(self) -> int:
        return self.header.share_id

    @property
    def abandoned(self) -> bool:
        return fds.has_hung_up(self.connection)

    def refuse(self, error: str) -> None:
        _tell(self.connection, wire.Outcome(share_id=self.share_id, ok=False, error=error))

    def close(self) -> None:
        self.connection.close()
        self.places.release()


@dataclass
class _Pair:
    """A job and its share."""

    job: _Job
    share: _Share

    def fail(self, error: str) -> None:
        self.share.refuse(error)
        self.job.refuse(error)

    def tell(self, message: wire.Message) -> None:
        _tell(self.job.connection, message)
        _tell(self.share.connection, message)

    def close(self) -> None:
        self.job.close()
        self.share.close()


# -- the service -------------------------------------------------------------------------------


class Service:
    """Serve shares and jobs that arrive at a listening socket, until somebody stops it."""

    def __init__(
        self,
        listener: socket.socket,
        filler: Filler,
        *,
        pair_timeout_s: float = DEFAULT_PAIR_TIMEOUT_S,
        receive_timeout_s: float = fds.DEFAULT_TIMEOUT_S,
        max_jobs: int = DEFAULT_MAX_JOBS,
        report: Report = _silent,
    ) -> None:
        """Make a service; `run` starts it.

        Args:
            listener: from `fds.listening`.
            filler: does the work, in the thread that calls `run`.
            pair_timeout_s: how long a share or a job waits for the other, in seconds.
            receive_timeout_s: how long a peer may take to send its message, in seconds.
            max_jobs: how many jobs there may be at a time, the one at work included, and how many
                shares without a job.
            report: told of everything that happens.

        *Ownership*: the listener and the filler stay the caller's.
        """
        self._filler = filler
        self._report = report
        self._report_lock = threading.Lock()
        self._ready: queue.SimpleQueue[_Pair | None] = queue.SimpleQueue()
        self._waiting: deque[_Pair] = deque()  # taken from there
        self._told = -math.inf
        self._stopping = False
        self._failure: BaseException | None = None
        self._decoder: OwnedFd | None = None  # pidfd of the one that the filler is warm for
        self._reception = _Reception(
            listener,
            self._ready.put,
            self._say,
            pair_timeout_s=pair_timeout_s,
            receive_timeout_s=receive_timeout_s,
            max_jobs=max_jobs,
        )

    def stop(self) -> None:
        """End `run` soon: at the next graph, not at the end of a prefill.

        May be called from any thread, and from a signal handler.
        """
        self._stopping = True
        self._ready.put(None)
        self._reception.stop()

    def run(self) -> None:
        """Serve until `stop`; jobs that are not done then fail, and their peers are told.

        Raises:
            Exception: what `report` raised, or a bug.
        """
        thread = threading.Thread(target=self._receive, name="kvshare-service", daemon=True)
        thread.start()
        try:
            while not self._stopping:
                try:
                    pair = self._waiting.popleft() if self._waiting else self._ready.get(timeout=_IDLE_S)
                except queue.Empty:
                    self._look_at_decoder()
                    continue
                if pair is not None:
                    with contextlib.closing(pair):
                        self._serve(pair)
        finally:
            self.stop()
            thread.join()
            self._refuse_the_rest()
            self._watch(None)
            self._reception.close()
        if self._failure is not None:
            raise self._failure

    def _receive(self) -> None:
        try:
            self._reception.run()
        except BaseException as error:
            self._failure = self._failure or error
            self.stop()

    def _serve(self, pair: _Pair) -> None:
        job, share = pair.job, pair.share
        share_id, n_tokens, n_prefix = job.share_id, len(job.header.tokens), share.offer.n_prefix
        start = time.perf_counter()
        begun_at, is_warm = start, False

        def check() -> None:
            if self._stopping:
                raise _Cancelled(_STOPPING)
            if job.abandoned:
                raise _Cancelled("the engine has hung up")
            if share.expired:
                raise _Cancelled("the share has expired")
            if share.decoder.is_gone:
                raise _Cancelled("the decoder has ended")

        def begun(warm: bool) -> None:
            nonlocal begun_at, is_warm
            begun_at, is_warm = time.perf_counter(), warm
            self._watch(fds.peer_credentials(share.connection).pid)
            self._say("begun", share_id=share_id, n_tokens=n_tokens, n_prefix=n_prefix, warm=warm)

        def progress(n_filled: int) -> None:
            check()
            message = wire.Progress(share_id=share_id, n_filled=n_filled, n_tokens=n_tokens)
            for connection in (job.connection, share.connection):
                _tell_if_it_reads(connection, message)  # the watermark says the same
            self._say("progress", share_id=share_id, n_filled=n_filled, n_tokens=n_tokens)
            self._tell_waiting()

        try:
            check()
            self._filler.fill(share.offer, job.header.tokens, begun=begun, progress=progress)
        except _Cancelled as reason:
            text = f"cancelled: {reason}"
            self._forget()  # its memory is not offered again: the decoder takes other memory then
            pair.fail(text)
            self._say("failed", share_id=share_id, error=text, type="Cancelled")
        except Exception as error:
            self._forget()  # nobody knows what state it is in
            pair.fail(f"{type(error).__name__}: {error}")
            if not isinstance(error, KvshareError):
                logger.exception("share %d: a bug, the service goes on", share_id)
            self._say("failed", share_id=share_id, **_described(error))
        except BaseException:
            pair.fail(_STOPPING)
            raise
        else:
            pair.tell(wire.Outcome(share_id=share_id, ok=True))
            end = time.perf_counter()
            self._say(
                "done",
                share_id=share_id,
                n_tokens=n_tokens,
                n_prefix=n_prefix,
                warm=is_warm,
                setup_ms=(begun_at - start) * 1000,
                fill_ms=(end - begun_at) * 1000,
            )

    def _take_ready(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                pair = self._ready.get_nowait()
                if pair is not None:
                    self._waiting.append(pair)

    def _tell_waiting(self) -> None:
        if time.monotonic() < self._told + _WAIT_S:
            return
        self._told = time.monotonic()
        self._take_ready()
        for pair in self._waiting:
            header = pair.job.header
            message = wire.Progress(share_id=header.share_id, n_filled=0, n_tokens=len(header.tokens))
            _tell_if_it_reads(pair.job.connection, message)

    def _refuse_the_rest(self) -> None:
        self._take_ready()
        for pair in self._waiting:
            with contextlib.closing(pair):
                pair.fail(_STOPPING)
                self._say("failed", share_id=pair.job.share_id, error=_STOPPING, type="Cancelled")
        self._waiting.clear()

    # -- the decoder whose memory the filler keeps mapped --

    def _watch(self, pid: int | None) -> None:
        if self._decoder is not None:
            self._decoder.close()
            self._decoder = None
        if pid:  # 0 is a peer of another pid namespace
            with contextlib.suppress(OSError):
                self._decoder = fds.pidfd_open(pid)

    def _look_at_decoder(self) -> None:
        """Give back the memory of a decoder that has died: the mapping alone would keep it for ever."""
        if self._decoder is not None and _events(self._decoder, select.POLLIN):
            self._forget()
            self._say("cold", reason="the decoder has ended")

    def _forget(self) -> None:
        self._watch(None)
        self._filler.forget()

    def _say(self, event: str, /, **fields: Any) -> None:
        """Report; what that raises ends the service in the ordinary way, and is raised by `run`."""
        with self._report_lock:
            if self._failure is not None:
                return
            try:
                self._report(event, **fields)
            except BaseException as error:
                self._failure = error
                self.stop()


class _Reception:
    """Accepts, receives and pairs, in a thread of its own; `stop` may be called from anywhere."""

    def __init__(
        self,
        listener: socket.socket,
        ready: Callable[[_Pair], None],
        say: Report,
        *,
        pair_timeout_s: float,
        receive_timeout_s: float,
        max_jobs: int,
    ) -> None:
        self._listener = listener
        self._ready = ready
        self._say = say
        self._pair_timeout_s = pair_timeout_s
        self._receive_timeout_s = receive_timeout_s
        self._max_jobs = max_jobs
        self._places = threading.BoundedSemaphore(max_jobs)
        self._arrivals: dict[int, _Arrival] = {}  # by descriptor
        self._jobs: dict[int, _Job] = {}  # by share_id, without a share
        self._shares: dict[int, _Share] = {}  # by share_id, without a job
        self._stopping = False
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self._poller = select.poll()

    def stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(OSError):  # awake already, or closed
            self._waker.send(b"\0")

    def close(self) -> None:
        self._wake.close()
        self._waker.close()

    def run(self) -> None:
        self._poller.register(self._wake, select.POLLIN)
        try:
            while not self._stopping:
                # a peer that dawdles must not keep the others out for want of arrivals to watch
                is_full = len(self._arrivals) >= _MAX_ARRIVALS
                self._poller.register(self._listener, 0 if is_full else select.POLLIN)
                for fd, _ in self._poller.poll(self._patience_ms()):
                    self._handle(fd)
                self._drop_late()
        finally:
            self._drop_all()

    def _patience_ms(self) -> float | None:
        ends = [arrival.deadline for arrival in self._arrivals.values()]
        ends += [each.arrived + self._pair_timeout_s for each in self._waiting()]
        return max(0.0, (min(ends) - time.monotonic()) * 1000) + 1 if ends else None

    def _waiting(self) -> Iterator[_Job | _Share]:
        yield from self._jobs.values()
        yield from self._shares.values()

    def _handle(self, fd: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._arrivals:
            self._read(fd)
        else:
            # only a connection that ends is looked at while its job waits
            for job in [job for job in self._jobs.values() if job.connection.fileno() == fd]:
                self._drop_job(job, "the engine has hung up")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._say("dropped", share_id=None, error=f"cannot accept: {error.strerror}")
            time.sleep(_ACCEPT_PAUSE_S)
            return
        try:
            fds.require_peer_uid(connection)
        except PeerRefusedError as error:
            connection.close()
            self._say("dropped", share_id=None, error=str(error))
            return
        deadline = time.monotonic() + self._receive_timeout_s
        self._arrivals[connection.fileno()] = _Arrival(connection, fds.Incoming(connection), deadline)
        self._poller.register(connection, select.POLLIN)

    def _read(self, fd: int) -> None:
        arrival = self._arrivals[fd]
        try:
            if not arrival.message.read():
                return
            payload, owned = arrival.message.take()
        except (KvshareError, OSError) as error:
            self._drop_arrival(fd, str(error))
            return
        del self._arrivals[fd]
        self._poller.unregister(fd)
        self._take(arrival.connection, payload, owned)

    def _take(self, connection: socket.socket, payload: bytes, owned: list[OwnedFd]) -> None:
        """Take a whole message; whatever is wrong with it closes the connection."""
        share_id = None
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(connection.close)
                for each in owned:
                    undo.callback(each.close)
                message = wire.decode(payload)
                if isinstance(message, (wire.ShareHeader, wire.JobHeader)):
                    share_id = message.share_id
                try:
                    if isinstance(message, wire.ShareHeader):
                        self._take_share(_Share(Offer(message, owned), connection))
                    elif isinstance(message, wire.JobHeader):
                        if owned:
                            raise RemoteProtocolError(f"{len(owned)} descriptors came with a job")
                        self._take_job(message, connection)
                    else:
                        raise RemoteProtocolError(f"expected a share or a job, got {type(message).__name__}")
                except Exception as error:
                    if share_id is not None:
                        _tell(connection, wire.Outcome(share_id=share_id, ok=False, error=str(error)))
                    raise
                undo.pop_all()
        except Exception as error:
            if not isinstance(error, (KvshareError, OSError)):
                logger.exception("a message that nobody thought of; the service goes on")
            self._say("dropped", share_id=share_id, error=str(error))

    def _take_job(self, header: wire.JobHeader, connection: socket.socket) -> None:
        """Pair a job, or let it wait; raises if there is no place for it."""
        share_id = header.share_id
        if share_id in self._jobs:
            raise PeerError(f"a job for share {share_id} waits already")
        if not self._places.acquire(blocking=False):
            raise PeerError(f"{wire.BUSY}: there are {self._max_jobs} jobs already")
        job = _Job(header, connection, self._places)
        self._say("job", share_id=share_id, n_tokens=len(header.tokens))
        share = self._shares.pop(share_id, None)
        if share is not None:
            self._ready(_Pair(job, share))
        else:
            self._jobs[share_id] = job
            self._poller.register(connection, 0)  # reports its end, and nothing else

    def _take_share(self, share: _Share) -> None:
        """Pair a share, or let it wait; raises if there is no place for it."""
        share_id, header = share.share_id, share.offer.header
        try:
            if share_id in self._shares:
                raise PeerError(f"share {share_id} waits already")
            job = self._jobs.pop(share_id, None)
            if job is None and len(self._shares) >= self._max_jobs:
                error = f"{wire.BUSY}: there are {self._max_jobs} shares without a job already"
                share.offer.fail(error)
                raise PeerError(error)
        except PeerError:
            share.offer.close()  # the connection is there to say why
            share.decoder.close()
            raise
        nbytes = sum(region.size for region in header.regions)
        self._say("share", share_id=share_id, seq_id=share.offer.seq_id, nbytes=nbytes)
        if job is not None:
            self._poller.unregister(job.connection)
            self._ready(_Pair(job, share))
        else:
            self._shares[share_id] = share

    # -- dropping --

    def _drop_late(self) -> None:
        now = time.monotonic()
        for fd, arrival in list(self._arrivals.items()):
            if now > arrival.deadline:
                self._drop_arrival(fd, f"the deadline passed when {arrival.message.done}")
        within = f"within {self._pair_timeout_s:g} s"
        for job in list(self._jobs.values()):
            if now > job.arrived + self._pair_timeout_s:
                self._drop_job(job, f"no share {job.share_id} came {within}")
        for share in list(self._shares.values()):
            if now > share.arrived + self._pair_timeout_s:
                self._drop_share(share, f"no job for share {share.share_id} came {within}")

    def _drop_all(self) -> None:
        for fd in list(self._arrivals):
            self._drop_arrival(fd, _STOPPING)
        for job in list(self._jobs.values()):
            self._drop_job(job, _STOPPING)
        for share in list(self._shares.values()):
            self._drop_share(share, _STOPPING)

    def _drop_arrival(self, fd: int, error: str) -> None:
        self._poller.unregister(fd)
        self._arrivals.pop(fd).close()
        self._say("dropped", share_id=None, error=error)

    def _drop_job(self, job: _Job, error: str) -> None:
        self._poller.unregister(job.connection)
        del self._jobs[job.share_id]
        with contextlib.closing(job):
            job.refuse(error)
        self._say("dropped", share_id=job.share_id, error=error)

    def _drop_share(self, share: _Share, error: str) -> None:
        del self._shares[share.share_id]
        with contextlib.closing(share):
            share.refuse(error)
        self._say("dropped", share_id=share.share_id, error=error)


# -- helpers -----------------------------------------------------------------------------------


def _tell(connection: socket.socket, message: wire.Message) -> None:
    """Tell a peer, if it is there and reads; the ledger says the same."""
    with contextlib.suppress(KvshareError, OSError):
        fds.send_message(connection, wire.encode(message), deadline=time.monotonic() + _TELL_S)


def _tell_if_it_reads(connection: socket.socket, message: wire.Message) -> None:
    """Tell a peer, but never wait for one that does not read."""
    if _writable(connection):
        _tell(connection, message)


def _events(file: socket.socket | OwnedFd, wanted: int) -> int:
    poller = select.poll()
    poller.register(file, wanted)
    return next((events for _, events in poller.poll(0)), 0)


def _writable(connection: socket.socket) -> bool:
    return _events(connection, select.POLLOUT) == select.POLLOUT


def _described(error: Exception) -> dict[str, Any]:
    described: dict[str, Any] = {"error": str(error), "type": type(error).__name__}
    if isinstance(error, MismatchError):
        described |= {"field": error.field, "expected": error.expected, "found": error.found}
    return described
