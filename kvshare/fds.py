"""Descriptors: owning them, making sealed memfds, and moving them over unix sockets.

The rules that everything here keeps:

- A descriptor has exactly one owner, an `OwnedFd`, from the moment the kernel hands it over. What
  was received is owned before anything about it is checked, so a refusal never leaks.
- Every descriptor is close-on-exec from birth. `socket.recv_fds` is not used: it drops the flags it
  is given, so descriptors become inheritable and truncation goes unnoticed.
- A message is a 4-byte little-endian length and that many bytes; its descriptors travel with its
  first byte. A read never goes past the end of a message, because descriptors of the next one would
  come along.
- Nothing waits for ever: a `deadline` is a value of `time.monotonic()`, and None means
  `DEFAULT_TIMEOUT_S` from now. Sockets keep the blocking mode their owner gave them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import secrets
import select
import socket
import stat
import struct
import tempfile
import time
import warnings
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from kvshare.errors import (
    DeadlineExceededError,
    DescriptorError,
    LocalProtocolError,
    PeerClosedError,
    PeerRefusedError,
    RemoteProtocolError,
)

MAX_PAYLOAD_NBYTES = 1 << 20
MAX_FDS = 253  # SCM_MAX_FD of the kernel
MAX_PATH_NBYTES = 107  # sun_path holds 108 bytes with its NUL
DEFAULT_TIMEOUT_S = 10.0

MFD_CLOEXEC = 0x0001
MFD_ALLOW_SEALING = 0x0002
MFD_NOEXEC_SEAL = 0x0008  # Linux 6.3; older kernels answer EINVAL

F_SEAL_SEAL = 0x0001
F_SEAL_SHRINK = 0x0002
F_SEAL_GROW = 0x0004
F_SEAL_WRITE = 0x0008
F_SEAL_FUTURE_WRITE = 0x0010  # Linux 5.1
F_SEAL_EXEC = 0x0020  # Linux 6.3; set by MFD_NOEXEC_SEAL
SIZE_SEALS = F_SEAL_SHRINK | F_SEAL_GROW  # what is required of memory that a peer sends
FIXED_SEALS = SIZE_SEALS | F_SEAL_SEAL  # what is put on memory made here

_SEAL_NAMES = {
    F_SEAL_SEAL: "F_SEAL_SEAL",
    F_SEAL_SHRINK: "F_SEAL_SHRINK",
    F_SEAL_GROW: "F_SEAL_GROW",
    F_SEAL_WRITE: "F_SEAL_WRITE",
    F_SEAL_FUTURE_WRITE: "F_SEAL_FUTURE_WRITE",
    F_SEAL_EXEC: "F_SEAL_EXEC",
}

_LENGTH = struct.Struct("<I")
_UCRED = struct.Struct("=iII")
_SEND_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_RECEIVE_FLAGS = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
_LONGEST_POLL_S = 3600.0  # poll takes an int of milliseconds, deadlines may be infinite


# -- owning ----------------------------------------------------------------------------------


class OwnedFd:
    """Own one file descriptor until it is closed or detached.

    States: open, then closed or detached. Any use after that raises `LocalProtocolError`, because
    the number may by then belong to something else. An object that is collected while open closes
    its descriptor and emits a `ResourceWarning`.

    Args:
        fd: an open descriptor.

    Ownership: takes `fd`; nobody else may close it from here on.
    """

    __slots__ = ("_fd", "_state")

    def __init__(self, fd: int) -> None:
        self._state = "unset"  # what __del__ finds when the check below raises
        if fd < 0:
            raise LocalProtocolError(f"{fd} is not a file descriptor")
        self._fd = fd
        self._state = "open"

    def __repr__(self) -> str:
        return f"<OwnedFd {self._fd} {self._state}>"

    def __enter__(self) -> OwnedFd:
        self.fileno()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._state == "open":
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
            self.close()

    def fileno(self) -> int:
        """Return the descriptor's number.

        Raises:
            LocalProtocolError: it was closed or detached.

        Ownership: stays here.
        """
        if self._state != "open":
            raise LocalProtocolError(f"file descriptor {self._fd} was {self._state} and cannot be used")
        return self._fd

    def close(self) -> None:
        """Close the descriptor; nothing happens if it was closed or detached before."""
        if self._state == "open":
            # Linux frees the number even when close() fails, so a second try would hit a stranger's.
            self._state = "closed"
            os.close(self._fd)

    def detach(self) -> int:
        """Give the descriptor away.

        Returns:
            its number.

        Raises:
            LocalProtocolError: it was closed or detached.

        Ownership: passes to the caller.
        """
        fd = self.fileno()
        self._state = "detached"
        return fd


def pidfd_open(pid: int) -> OwnedFd | None:
    """Open a descriptor that becomes readable when the process dies.

    Returns:
        the pidfd, or None where the kernel (before 5.3) or a sandbox has no pidfds.

    Raises:
        ProcessLookupError: no such process.

    Ownership: the caller closes it.
    """
    try:
        return OwnedFd(os.pidfd_open(pid))
    except OSError as exc:
        if exc.errno in (errno.ENOSYS, errno.EPERM):
            return None
        raise


# -- memfds ----------------------------------------------------------------------------------


def memfd_create(name: str, size: int, *, seal: bool = True) -> OwnedFd:
    """Make anonymous shared memory of a fixed size.

    Args:
        name: what `/proc/self/fd` shows after `memfd:`.
        size: bytes; every page reads as zero and costs nothing until it is touched.
        seal: seal it against shrink and grow, so that no peer can turn a mapping into a SIGBUS, and
            against more seals, so that none can keep the next one from mapping it writable. Memory that
            is to be frozen later has to be made without, and to be sealed by its maker.

    Raises:
        LocalProtocolError: `size` is out of range.
        OSError: the kernel or a sandbox forbids it.

    Ownership: the caller closes it.
    """
    if not 0 < size < 1 << 63:
        raise LocalProtocolError(f"a memfd cannot have {size} bytes")
    flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
    try:
        fd = OwnedFd(os.memfd_create(name, flags | MFD_NOEXEC_SEAL))
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        fd = OwnedFd(os.memfd_create(name, flags))
    try:
        os.fchmod(fd.fileno(), 0o600)  # an older kernel makes it executable
        os.ftruncate(fd.fileno(), size)
        if seal:
            fcntl.fcntl(fd.fileno(), fcntl.F_ADD_SEALS, FIXED_SEALS)
    except BaseException:
        fd.close()
        raise
    return fd


def memfd_supported() -> tuple[bool, str]:
    """Try whether this process may make sealed memfds.

    Returns:
        the answer, and a line that says what the kernel knows or why it refused.
    """
    try:
        with memfd_create("kvshare-probe", 4096) as fd:
            noexec = bool(seals(fd.fileno()) & F_SEAL_EXEC)
    except OSError as exc:
        return False, f"memfd refused: {exc.strerror}"
    return True, f"memfd with size seals, {'with' if noexec else 'without'} MFD_NOEXEC_SEAL (Linux 6.3)"


def seals(fd: int) -> int:
    """Return the seals of a memfd, a mask of `F_SEAL_*`.

    Raises:
        DescriptorError: the descriptor is of a kind that has no seals.
    """
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as exc:
        if exc.errno != errno.EINVAL and not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH:
            raise
        raise DescriptorError(f"descriptor {fd} is no memfd: it cannot carry seals") from exc


def require_seals(fd: int, wanted: int = SIZE_SEALS) -> None:
    """Check that a descriptor carries all the seals of a mask.

    Raises:
        DescriptorError: it lacks one, or is no memfd.
    """
    missing = wanted & ~seals(fd)
    if missing:
        names = ", ".join(name for bit, name in _SEAL_NAMES.items() if bit & missing) or hex(missing)
        raise DescriptorError(f"descriptor {fd} is not sealed with {names}")


def fd_size(fd: int) -> int:
    """Return the size of the file behind a descriptor in bytes.

    Raises:
        DescriptorError: it is a socket, pipe, device or the like, which has none.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise DescriptorError(f"descriptor {fd} is no memory file (mode {status.st_mode:o})")
    return status.st_size


# -- messages --------------------------------------------------------------------------------


def send_message(
    sock: socket.socket, payload: bytes, fds: Sequence[int] = (), *, deadline: float | None = None
) -> None:
    """Send one framed message and its descriptors with one `sendmsg`.

    Where the kernel takes only a part, plain sends carry the rest; the descriptors went with the
    first byte.

    Args:
        sock: a connected unix stream socket.
        payload: at most `MAX_PAYLOAD_NBYTES` bytes.
        fds: at most `MAX_FDS` open descriptors.
        deadline: see the module.

    Raises:
        LocalProtocolError: a limit is exceeded; nothing was sent.
        PeerClosedError: the peer is gone.
        DeadlineExceededError: the peer did not read in time. As after every error here, a part may
            have been sent and the socket is good for nothing but closing.

    Ownership: the caller keeps its descriptors; the peer gets duplicates.
    """
    if len(payload) > MAX_PAYLOAD_NBYTES:
        raise LocalProtocolError(f"message of {len(payload)} bytes exceeds the limit of {MAX_PAYLOAD_NBYTES}")
    if len(fds) > MAX_FDS:
        raise LocalProtocolError(f"{len(fds)} descriptors exceed the limit of {MAX_FDS} in one message")
    deadline = _resolve(deadline)
    message = memoryview(_LENGTH.pack(len(payload)) + payload)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    n_sent = 0
    while True:
        try:
            n_sent += sock.sendmsg([message[n_sent:]], ancillary, _SEND_FLAGS)
            ancillary = []
            if n_sent == len(message):
                return
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError) as exc:
            done = f"{n_sent} of {len(message)} bytes were sent"
            raise PeerClosedError(f"the peer closed the connection when {done}") from exc
        _wait(sock, select.POLLOUT, deadline, f"{n_sent} of {len(message)} bytes were sent")


def receive_message(
    sock: socket.socket, *, deadline: float | None = None, max_fds: int = MAX_FDS
) -> tuple[bytes, list[OwnedFd]]:
    """Receive one framed message and its descriptors, however the bytes arrive.

    Args:
        sock: a connected unix stream socket, without `SO_PASSCRED`.
        deadline: see the module.
        max_fds: how many descriptors to accept.

    Returns:
        the payload, and the descriptors in the sender's order, all close-on-exec.

    Raises:
        PeerClosedError: the connection ended before or inside the message.
        DeadlineExceededError: the message was not complete in time.
        RemoteProtocolError: the length exceeds `MAX_PAYLOAD_NBYTES`, or descriptors came with a later
            part than the first.
        DescriptorError: more than `max_fds` descriptors, or no room for them in this process.

    Ownership: the caller closes the descriptors. On an error all are closed, and the socket is good
    for nothing but closing.
    """
    deadline = _resolve(deadline)
    with Incoming(sock, max_fds=max_fds) as incoming:
        while True:
            _wait(sock, select.POLLIN, deadline, incoming.done)
            if incoming.read():
                return incoming.take()


class Incoming:
    """One message that arrives in parts, for a program that watches many sockets at once.

    Read whenever the socket is readable, until the message is complete, then take it.

    Args:
        sock: a connected unix stream socket, without `SO_PASSCRED`.
        max_fds: how many descriptors to accept.

    *Ownership*: the socket stays the caller's. Owns the descriptors until `take`; `close` closes them.
    """

    def __init__(self, sock: socket.socket, *, max_fds: int = MAX_FDS) -> None:
        self._sock = sock
        self._max_fds = max_fds
        self._fds: list[OwnedFd] = []
        self._buffer = bytearray(_LENGTH.size)
        self._n_before = 0  # bytes of the message in front of the buffer
        self._n_read = 0  # bytes in the buffer

    @property
    def done(self) -> str:
        """How far it is, for an error's text."""
        n, n_all = self._n_before + self._n_read, self._n_before + len(self._buffer)
        return f"{n} of {n_all} bytes were received"

    def read(self) -> bool:
        """Read a part that is there, without waiting; return whether the message is complete.

        Raises:
            PeerClosedError, RemoteProtocolError, DescriptorError: as `receive_message`; close it then.
        """
        try:
            # CMSG_LEN, not CMSG_SPACE: its padding would have room for one descriptor too many.
            n_new, ancillary, flags, _ = self._sock.recvmsg_into(
                [memoryview(self._buffer)[self._n_read :]],
                socket.CMSG_LEN(4 * self._max_fds),
                _RECEIVE_FLAGS,
            )
        except BlockingIOError:
            return False
        except ConnectionResetError as exc:
            raise PeerClosedError(f"the peer reset the connection when {self.done}") from exc
        n_owned = len(self._fds)
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(map(OwnedFd, array("i", data[: len(data) // 4 * 4])))
        if flags & socket.MSG_CTRUNC:
            raise DescriptorError(
                f"descriptors were lost: more than {self._max_fds} were sent, "
                "or this process may open no more",
                hint="compare `ulimit -n` with the number of open files",
            )
        if len(self._fds) > n_owned and self._n_before + self._n_read > 0:
            raise RemoteProtocolError(f"descriptors came when {self.done}; they belong to the first byte")
        if n_new == 0:
            raise PeerClosedError(f"the peer closed the connection when {self.done}")
        self._n_read += n_new
        if self._n_before == 0 and self._n_read == _LENGTH.size:
            (n,) = _LENGTH.unpack(self._buffer)
            if n > MAX_PAYLOAD_NBYTES:
                raise RemoteProtocolError(f"the peer announced {n} bytes, the limit is {MAX_PAYLOAD_NBYTES}")
            self._buffer, self._n_before, self._n_read = bytearray(n), _LENGTH.size, 0
        return self._n_before > 0 and self._n_read == len(self._buffer)

    def take(self) -> tuple[bytes, list[OwnedFd]]:
        """Return the payload and the descriptors of a complete message.

        *Ownership*: the descriptors pass to the caller.
        """
        owned, self._fds = self._fds, []
        return bytes(self._buffer), owned

    def close(self) -> None:
        """Close the descriptors that were not taken; idempotent."""
        owned, self._fds = self._fds, []
        for fd in owned:
            fd.close()

    def __enter__(self) -> Incoming:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _resolve(deadline: float | None) -> float:
    return time.monotonic() + DEFAULT_TIMEOUT_S if deadline is None else deadline


def _wait(sock: socket.socket, events: int, deadline: float, done: str) -> None:
    """Wait until a socket is ready; `done` says in the error how far the work had come."""
    poller = select.poll()
    poller.register(sock, events)
    while True:
        # Checked even if the socket is ready: a peer that drips bytes must not outlast the deadline.
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceededError(f"the deadline passed when {done}")
        if poller.poll(math.ceil(min(remaining, _LONGEST_POLL_S) * 1000)):
            return


def has_hung_up(sock: socket.socket) -> bool:
    """Whether the peer has closed its end; one that only has nothing more to say has not."""
    poller = select.poll()
    poller.register(sock, 0)
    return bool(poller.poll(0))


def wait_for_hangup(sock: socket.socket, *, deadline: float | None = None) -> None:
    """Wait until the peer has closed its end, as the kernel does for one that dies.

    A provider closes its connection when it has unmapped what it was sent.

    Args:
        sock: a connected unix stream socket; what the peer has said before stays there to be read.
        deadline: see the module.

    Raises:
        DeadlineExceededError: it holds on.
    """
    try:
        _wait(sock, 0, _resolve(deadline), "the provider had not let go of the memory")
    except DeadlineExceededError as exc:
        exc.hint = "it does when it closes its connection; end it, or share without strict"
        raise


# -- peers -----------------------------------------------------------------------------------


class PeerCredentials(NamedTuple):
    """Who was at the other end when the connection (or its listener) was made."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Ask the kernel who is at the other end of a connected unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return PeerCredentials(*_UCRED.unpack(raw))


def require_peer_uid(sock: socket.socket, uid: int | None = None) -> None:
    """Check that the peer runs as a certain user; not even root is let in instead.

    Args:
        uid: the user; None means this process's effective one.

    Raises:
        PeerRefusedError: it is another.
    """
    expected = os.geteuid() if uid is None else uid
    found = peer_credentials(sock)
    if found.uid != expected:
        raise PeerRefusedError(f"the peer (pid {found.pid}) runs as uid {found.uid}, expected uid {expected}")


class PeerProcess:
    """Tells whether the process at the other end of a connection is still there.

    It may hang up and live on. Where the kernel has no pidfds, or the peer is of another pid namespace,
    one that hangs up counts as gone.

    *Ownership*: the socket stays the caller's; `close` closes the pidfd.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        pid = peer_credentials(sock).pid
        self._pidfd: OwnedFd | None = None
        if pid:
            with contextlib.suppress(OSError):  # it has ended: its connection says so
                self._pidfd = pidfd_open(pid)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended."""
        if self._pidfd is None:
            return has_hung_up(self._sock)
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Close the pidfd; idempotent."""
        if self._pidfd is not None:
            self._pidfd.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Make a directory that only this user can enter, for sockets; remove it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvshare-") as name:
        yield Path(name)


def listen_unix(path: str | os.PathLike[str]) -> socket.socket:
    """Listen on a unix socket that only this user can connect to, in a folder that nobody else can change.

    Whoever sees the path can connect: it appears when the socket listens already. A socket file that
    nobody listens at any more is replaced.

    Returns:
        a non-blocking, close-on-exec listener for `accept_unix`; its `getsockname` is not the path.

    Raises:
        LocalProtocolError: the path is too long or is no socket, somebody listens there, or other users
            could put a socket of their own in its place.

    Ownership: the caller closes the listener and removes the path.
    """
    name = _socket_path(path)
    folder, base = os.path.split(name)
    with OwnedFd(os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as opened:
        here = opened.fileno()
        _require_private(here, folder or ".")
        _remove_stale(name)
        with contextlib.ExitStack() as undo:
            sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.setblocking(False)
            # bind() gives the file the mode of the socket's own inode (less the umask). Unlike a umask
            # of our own, this is neither late nor shared with other threads.
            os.fchmod(sock.fileno(), 0o600)
            # a path that is bound but does not listen yet refuses: it gets its name afterwards
            temporary = f".kvshare-{secrets.token_hex(8)}"
            sock.bind(f"/proc/self/fd/{here}/{temporary}")  # fits, however long the folder's name is
            try:
                sock.listen()
                os.link(temporary, base, src_dir_fd=here, dst_dir_fd=here, follow_symlinks=False)
            except FileExistsError as exc:
                raise _taken(name) from exc  # by another one that started at the same moment
            finally:
                os.unlink(temporary, dir_fd=here)
            undo.pop_all()
    return sock


@contextlib.contextmanager
def listening(path: str | os.PathLike[str]) -> Iterator[socket.socket]:
    """Listen as `listen_unix` does; close the listener and remove its socket file at the end.

    Yields:
        the listener.
    """
    with listen_unix(path) as listener:
        made = os.lstat(path)
        try:
            yield listener
        finally:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(path)
                if (found.st_dev, found.st_ino) == (made.st_dev, made.st_ino):  # not somebody else's by now
                    os.unlink(path)


def _require_private(folder: int, name: str) -> None:
    """Check that no other user can replace what this one puts into a folder; root always can."""
    status = os.fstat(folder)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0):
        problem = f"belongs to uid {status.st_uid}"
    elif mode & 0o022 and not mode & stat.S_ISVTX:
        problem = f"can be written by others (mode {mode:o})"
    else:
        return
    raise LocalProtocolError(
        f"the folder {name} {problem}, who could replace the socket",
        hint="choose a folder of your own: mkdir -m 700 FOLDER",
    )


def _remove_stale(name: str) -> None:
    try:
        found = os.lstat(name)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise LocalProtocolError(f"{name} exists and is no socket", hint="choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            if _unlink_same(name, found):
                return
        except BlockingIOError:
            pass  # a full backlog is a listener's, too
    raise _taken(name)


def _unlink_same(name: str, found: os.stat_result) -> bool:
    """Remove a file, unless another one has taken its place meanwhile."""
    aside = os.path.join(os.path.dirname(name), f".kvshare-{secrets.token_hex(8)}")
    try:
        os.rename(name, aside)
    except FileNotFoundError:
        return True
    status = os.lstat(aside)
    # the number of a file that is gone is given to the next one
    is_same = all(
        getattr(status, name) == getattr(found, name) for name in ("st_dev", "st_ino", "st_mtime_ns")
    )
    try:
        if not is_same:
            os.link(aside, name, follow_symlinks=False)
    finally:
        os.unlink(aside)
    return is_same


def _taken(name: str) -> LocalProtocolError:
    return LocalProtocolError(f"another process listens at {name}", hint="stop it, or choose another path")


def connect_unix(path: str | os.PathLike[str], *, deadline: float | None = None) -> socket.socket:
    """Connect to a listener of the same user.

    Returns:
        a blocking, close-on-exec socket.

    Raises:
        LocalProtocolError: the path is too long.
        PeerRefusedError: nobody listens, this user may not connect, or another one listens.
        DeadlineExceededError: the listener's backlog stayed full.

    Ownership: the caller closes it.
    """
    name = _socket_path(path)
    deadline = _resolve(deadline)
    with contextlib.ExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.setblocking(False)
        while True:
            try:
                sock.connect(name)
                break
            except BlockingIOError as exc:
                # A full backlog. A blocking connect() would know no deadline, and there is nothing to poll.
                if time.monotonic() >= deadline:
                    raise DeadlineExceededError(f"the deadline passed: {name} accepts no connection") from exc
                time.sleep(0.001)
            except (FileNotFoundError, ConnectionRefusedError) as exc:
                raise PeerRefusedError(
                    f"nobody listens at {name}", hint="start the provider first, or compare the paths"
                ) from exc
            except PermissionError as exc:
                raise PeerRefusedError(
                    f"uid {os.geteuid()} may not connect to {name}", hint="run both sides as one user"
                ) from exc
        require_peer_uid(sock)
        sock.setblocking(True)
        undo.pop_all()
    return sock


def accept_unix(listener: socket.socket, *, deadline: float | None = None) -> socket.socket:
    """Accept one connection of the same user.

    Returns:
        a blocking, close-on-exec socket.

    Raises:
        PeerRefusedError: another user connected; it was hung up on, the listener goes on.
        DeadlineExceededError: nobody came.

    Ownership: the caller closes it.
    """
    deadline = _resolve(deadline)
    while True:
        _wait(listener, select.POLLIN, deadline, "nobody had connected")
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            continue  # another thread or process took it
        try:
            require_peer_uid(sock)
        except BaseException:
            sock.close()
            raise
        return sock


def _socket_path(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path)
    n = len(os.fsencode(name))
    if n > MAX_PATH_NBYTES:
        raise LocalProtocolError(
            f"socket path of {n} bytes exceeds the limit of {MAX_PATH_NBYTES}: {name}",
            hint="put the socket in a shorter directory, for example with TMPDIR=/tmp",
        )
    if n == 0 or "\0" in name:
        raise LocalProtocolError(f"{name!r} is not a file's path")
    return name
