"""Named prefixes on one unix socket, for many readers at once.

A connection carries one message and its answer: a prefix to keep (`Prefix.put`), or a request for one
(`Prefix.get`), for a list or for a name to be forgotten (`prefix.list_prefixes`, `prefix.drop_prefix`).

The rules:

- What is kept never changes. A name may be given to another prefix; who has the one before keeps it.
- There is a bound of memory. The prefixes that were not used for the longest time go first; their
  memory goes when the last of their forks does.
- Each connection has a thread and a deadline. A peer that dawdles, lies or hangs up costs its own
  connection; one of another uid gets nothing.
- Readers need the server for one message. They have descriptors of their own from then on.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from kvshare import fds, wire
from kvshare.errors import KvshareError, PeerRefusedError, RemoteProtocolError
from kvshare.fds import OwnedFd
from kvshare.prefix import Prefix

DEFAULT_MAX_NBYTES = 4 << 30
DEFAULT_MAX_PREFIXES = 256

# connections at a time; more have to wait in the listener's backlog
_MAX_CONNECTIONS = 64
# pause after an accept that the kernel refuses, such as for want of descriptors
_ACCEPT_PAUSE_S = 0.05
# of an outcome that belongs to no prefix
_NO_PREFIX = 1

logger = logging.getLogger("kvshare.store")


class Report(Protocol):
    """Told of everything that happens, by one thread at a time.

    The events, and their fields: `put` (`name`, `prefix_id`, `n_tokens`, `nbytes`), `get` and `drop`
    (`name`, `prefix_id`), `evicted` (the same, and `nbytes`), `refused` (`error`).
    """

    def __call__(self, event: str, /, **fields: Any) -> None:
        """Take an event."""


def _silent(event: str, /, **fields: Any) -> None:
    """Say nothing."""


@dataclass
class _Kept:
    """A prefix, and who uses it: its descriptors must not be closed while they are being sent."""

    prefix: Prefix
    n_reads: int = 0
    n_users: int = 0
    is_kept: bool = True

    def entry(self) -> wire.PrefixEntry:
        header = self.prefix.header
        return wire.PrefixEntry(
            name=header.name,
            prefix_id=header.prefix_id,
            n_tokens=header.n_tokens,
            nbytes=self.prefix.nbytes,
            layout=header.layout,
            semantics=header.semantics,
            n_reads=self.n_reads,
        )

    def close_if_unused(self) -> None:
        if not self.is_kept and self.n_users == 0:
            self.prefix.close()


class PrefixStore:
    """Prefixes by name, within a bound of memory. Any thread may call any method.

    *Ownership*: owns the prefixes until they are dropped or evicted, or until `close`.
    """

    def __init__(
        self, *, max_nbytes: int = DEFAULT_MAX_NBYTES, max_prefixes: int = DEFAULT_MAX_PREFIXES
    ) -> None:
        """Make an empty one.

        Args:
            max_nbytes: physical memory that the prefixes may take together, bytes.
            max_prefixes: how many there may be.
        """
        self._max_nbytes = max_nbytes
        self._max_prefixes = max_prefixes
        self._lock = threading.Lock()
        self._kept: dict[str, _Kept] = {}  # the one that was used last is at the end

    def put(self, prefix: Prefix) -> list[wire.PrefixEntry]:
        """Keep a prefix, in place of another of the same name.

        Returns:
            those that had to go for it.

        Raises:
            PeerRefusedError: it alone exceeds the bound; nothing has changed.

        *Ownership*: takes the prefix, and closes it if it raises.
        """
        prefix.forget()  # how much that takes is for its maker to say
        nbytes = prefix.nbytes
        if nbytes > self._max_nbytes:
            prefix.close()
            raise PeerRefusedError(
                f"prefix {prefix.name} takes {nbytes} bytes, all together may take {self._max_nbytes}"
            )
        with self._lock:
            if prefix.name in self._kept:
                self._remove(prefix.name)
            self._kept[prefix.name] = _Kept(prefix)
            return self._evict()

    @contextlib.contextmanager
    def use(self, name: str | None) -> Iterator[Prefix]:
        """Take a prefix for as long as the block lasts, whoever drops it meanwhile.

        Args:
            name: None takes the one that was used last.

        Raises:
            PeerRefusedError: there is none.
        """
        with self._lock:
            kept = self._find(next(reversed(self._kept), None) if name is None else name)
            self._kept[kept.prefix.name] = self._kept.pop(kept.prefix.name)
            kept.n_reads += 1
            kept.n_users += 1
        try:
            yield kept.prefix
        finally:
            with self._lock:
                kept.n_users -= 1
                kept.close_if_unused()

    def drop(self, name: str) -> wire.PrefixEntry:
        """Forget a prefix; return what it was.

        Raises:
            PeerRefusedError: there is none.
        """
        with self._lock:
            entry = self._find(name).entry()
            self._remove(name)
            return entry

    def entries(self) -> tuple[wire.PrefixEntry, ...]:
        """Return what is kept, the one that was used last at the end."""
        with self._lock:
            return tuple(kept.entry() for kept in self._kept.values())

    def close(self) -> None:
        """Forget all; idempotent."""
        with self._lock:
            for name in list(self._kept):
                self._remove(name)

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str | None) -> _Kept:
        if name is None:
            raise PeerRefusedError("there is no prefix yet")
        if name not in self._kept:
            raise PeerRefusedError(f"there is no prefix {name}")
        return self._kept[name]

    def _remove(self, name: str) -> None:
        kept = self._kept.pop(name)
        kept.is_kept = False
        kept.close_if_unused()

    def _evict(self) -> list[wire.PrefixEntry]:
        # counted anew each time: what forks read of a hole is memory as well
        entries = [kept.entry() for kept in self._kept.values()]
        nbytes = sum(entry.nbytes for entry in entries)
        evicted: list[wire.PrefixEntry] = []
        # the last one is the one that was just put
        for n_left, entry in zip(range(len(entries), 1, -1), entries, strict=False):
            if nbytes <= self._max_nbytes and n_left <= self._max_prefixes:
                break
            self._remove(entry.name)
            nbytes -= entry.nbytes
            evicted.append(entry)
        return evicted


class PrefixServer:
    """Serve a store at a listening socket, until somebody stops it."""

    def __init__(
        self,
        listener: socket.socket,
        store: PrefixStore,
        *,
        timeout_s: float = fds.DEFAULT_TIMEOUT_S,
        report: Report = _silent,
    ) -> None:
        """Make a server; `run` starts it.

        Args:
            listener: from `fds.listening`.
            store: what it keeps.
            timeout_s: how long a peer may take to say what it wants, and to take the answer, in seconds.
            report: told of everything that happens.

        *Ownership*: the listener and the store stay the caller's.
        """
        self._listener = listener
        self._store = store
        self._timeout_s = timeout_s
        self._report = report
        self._report_lock = threading.Lock()
        self._stopping = False
        self._failure: BaseException | None = None
        self._checking = threading.Lock()  # it takes memory, how much is for the peer to say
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)

    def stop(self) -> None:
        """End `run` soon. May be called from any thread, and from a signal handler."""
        self._stopping = True
        self._wake_up()

    def run(self) -> None:
        """Serve until `stop`; connections that are open then are closed.

        Raises:
            Exception: what `report` raised, or a bug.
        """
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        try:
            while not self._stopping:
                is_full = len(self._connections) >= _MAX_CONNECTIONS
                poller.register(self._listener, 0 if is_full else select.POLLIN)
                for fd, _ in poller.poll():
                    if fd == self._listener.fileno():
                        self._accept()
                    else:
                        with contextlib.suppress(BlockingIOError):
                            self._wake.recv(4096)
        finally:
            self._hang_up()
            self._wake.close()
            self._waker.close()
        if self._failure is not None:
            raise self._failure

    def _hang_up(self) -> None:
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the peer has hung up
                    connection.shutdown(socket.SHUT_RDWR)
            threads = list(self._connections.values())
        for thread in threads:
            thread.join()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # awake already, or closed
            self._waker.send(b"\0")

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._say("refused", error=f"cannot accept: {error.strerror}")
            time.sleep(_ACCEPT_PAUSE_S)
            return
        try:
            fds.require_peer_uid(connection)
        except PeerRefusedError as error:
            connection.close()
            self._say("refused", error=str(error))
            return
        thread = threading.Thread(target=self._serve, args=(connection,), name="kvshare-prefix", daemon=True)
        with self._lock:
            self._connections[connection] = thread
        thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._answer(connection)
        except (KvshareError, OSError) as error:
            self._say("refused", error=str(error))
        except Exception as error:
            logger.exception("a message that nobody thought of; the server goes on")
            self._say("refused", error=f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                del self._connections[connection]
                connection.close()
            self._wake_up()  # there may be somebody for whom there was no place

    def _answer(self, connection: socket.socket) -> None:
        deadline = time.monotonic() + self._timeout_s
        payload, owned = fds.receive_message(connection, deadline=deadline)
        deadline = time.monotonic() + self._timeout_s
        try:
            self._do(connection, payload, owned, deadline)
        except KvshareError as error:
            with contextlib.suppress(KvshareError, OSError):  # it may be what the error is about
                _tell(connection, _NO_PREFIX, deadline, error=str(error))
            raise
        finally:
            for each in owned:
                each.close()

    def _do(self, connection: socket.socket, payload: bytes, owned: list[OwnedFd], deadline: float) -> None:
        message = wire.decode(payload)
        if isinstance(message, wire.FrozenHeader):
            taken = owned[:]
            owned.clear()
            with self._checking:
                prefix = Prefix(message, taken)
            nbytes = prefix.nbytes
            evicted = self._store.put(prefix)
            self._say(
                "put",
                name=message.name,
                prefix_id=message.prefix_id,
                n_tokens=message.n_tokens,
                nbytes=nbytes,
            )
            for entry in evicted:
                self._say("evicted", name=entry.name, prefix_id=entry.prefix_id, nbytes=entry.nbytes)
            _tell(connection, message.prefix_id, deadline)
            return
        if not isinstance(message, wire.PrefixRequest):
            raise RemoteProtocolError(f"expected a prefix or a request, got {type(message).__name__}")
        if owned:
            raise RemoteProtocolError(f"{len(owned)} descriptors came with a request")
        if message.op == "list":
            answer = wire.PrefixList(prefixes=self._store.entries())
            fds.send_message(connection, wire.encode(answer), deadline=deadline)
        elif message.op == "get":
            with self._store.use(message.name) as prefix:
                prefix.send(connection, deadline=deadline)
            self._say("get", name=prefix.name, prefix_id=prefix.prefix_id)
        else:
            assert message.name is not None  # or `decode` had refused it
            entry = self._store.drop(message.name)
            self._say("drop", name=entry.name, prefix_id=entry.prefix_id)
            _tell(connection, entry.prefix_id, deadline)

    def _say(self, event: str, /, **fields: Any) -> None:
        """Report; what that raises ends the server in the ordinary way, and is raised by `run`."""
        with self._report_lock:
            if self._failure is not None:
                return
            try:
                self._report(event, **fields)
            except BaseException as error:
                self._failure = error
                self.stop()


def _tell(connection: socket.socket, share_id: int, deadline: float, *, error: str | None = None) -> None:
    outcome = wire.Outcome(share_id=share_id, ok=error is None, error=error)
    fds.send_message(connection, wire.encode(outcome), deadline=deadline)
