"""Descriptors over real sockets; each test would leak if an error path forgot one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import select
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvshare import errors, fds

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@contextlib.contextmanager
def memfds(n: int) -> Iterator[list[int]]:
    """Make memfds that hold their own index."""
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(fds.memfd_create(f"test-{i}", 4096)).fileno() for i in range(n)]
        for i, fd in enumerate(made):
            os.pwrite(fd, bytes([i]), 0)
        yield made


def contents(received: Sequence[fds.OwnedFd]) -> list[int]:
    return [os.pread(fd.fileno(), 1, 0)[0] for fd in received]


def close_all(received: Sequence[fds.OwnedFd]) -> None:
    for fd in received:
        fd.close()


def soon(seconds: float = 0.05) -> float:
    return time.monotonic() + seconds


def frame(payload: bytes) -> bytes:
    return struct.pack("<I", len(payload)) + payload


def send_raw(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    socket.send_fds(sock, [data], list(fds))


def is_open(fd: int) -> bool:
    return Path(f"/proc/self/fd/{fd}").is_symlink()


# -- owning ----------------------------------------------------------------------------------


def test_close_closes_once_and_only_its_own() -> None:
    owned = fds.OwnedFd(os.open("/dev/null", os.O_RDONLY))
    number = owned.fileno()
    owned.close()
    assert not is_open(number)
    stranger = os.open("/dev/null", os.O_RDONLY)
    try:
        assert stranger == number
        owned.close()
        assert is_open(stranger)
    finally:
        os.close(stranger)


def test_use_after_close_and_after_detach_is_local_misuse() -> None:
    closed = fds.OwnedFd(os.open("/dev/null", os.O_RDONLY))
    closed.close()
    with pytest.raises(errors.LocalProtocolError, match="closed"):
        closed.fileno()
    with pytest.raises(errors.LocalProtocolError, match="closed"), closed:
        pass
    detached = fds.OwnedFd(os.open("/dev/null", os.O_RDONLY))
    number = detached.detach()
    detached.close()
    assert is_open(number)
    os.close(number)
    with pytest.raises(errors.LocalProtocolError, match="detached"):
        detached.detach()


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(errors.LocalProtocolError):
        fds.OwnedFd(-1)


def test_context_manager_and_repr() -> None:
    with fds.OwnedFd(os.open("/dev/null", os.O_RDONLY)) as owned:
        number = owned.fileno()
        assert repr(owned) == f"<OwnedFd {number} open>"
    assert repr(owned) == f"<OwnedFd {number} closed>"
    assert not is_open(number)


def test_collected_open_warns_and_closes() -> None:
    owned = fds.OwnedFd(os.open("/dev/null", os.O_RDONLY))
    number = owned.fileno()
    holder = [owned]
    del owned
    with pytest.warns(ResourceWarning, match=f"unclosed <OwnedFd {number} open>"):
        holder.clear()
    assert not is_open(number)


def test_pidfd_is_readable_once_the_process_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    pidfd = fds.pidfd_open(child.pid)
    if pidfd is None:
        child.communicate()
        pytest.skip("this kernel or sandbox has no pidfds")
    with pidfd:
        assert select.select([pidfd], [], [], 0)[0] == []
        child.communicate()
        assert select.select([pidfd], [], [], 10)[0] == [pidfd]
    with pytest.raises(ProcessLookupError):
        fds.pidfd_open(child.pid)


def test_no_pidfds_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no pidfds")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert fds.pidfd_open(os.getpid()) is None


# -- memfds ----------------------------------------------------------------------------------


def test_a_memfd_keeps_its_size_and_its_seals() -> None:
    """Whoever holds it: a peer can neither take a seal away nor add one against the next provider."""
    with fds.memfd_create("test", 8192) as owned:
        fd = owned.fileno()
        assert fds.fd_size(fd) == 8192
        assert not os.get_inheritable(fd)
        fds.require_seals(fd, fds.FIXED_SEALS)
        for size in (0, 4096, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        for seal in (0, fds.F_SEAL_WRITE, fds.F_SEAL_FUTURE_WRITE):
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
        with mmap.mmap(fd, 8192) as mapped:
            mapped[0] = 1
        assert os.pread(fd, 1, 0) == b"\1"


def test_a_memfd_that_others_may_seal_further() -> None:
    """As other decoders make them: it has what is required."""
    with fds.memfd_create("test", 4096, seal=False) as owned:
        fcntl.fcntl(owned.fileno(), fcntl.F_ADD_SEALS, fds.SIZE_SEALS)
        fds.require_seals(owned.fileno())
        fcntl.fcntl(owned.fileno(), fcntl.F_ADD_SEALS, fds.F_SEAL_FUTURE_WRITE)
        with pytest.raises(errors.DescriptorError, match=r"with F_SEAL_SEAL, F_SEAL_WRITE$"):
            fds.require_seals(owned.fileno(), fds.FIXED_SEALS | fds.F_SEAL_WRITE | fds.F_SEAL_FUTURE_WRITE)


def assert_not_executable(fd: int) -> None:
    assert not os.fstat(fd).st_mode & 0o111
    assert not os.access(f"/proc/self/fd/{fd}", os.X_OK)
    os.pwrite(fd, b"#!/bin/true\n", 0)
    with pytest.raises(PermissionError):
        subprocess.run([f"/proc/self/fd/{fd}"], pass_fds=[fd], check=False)


def test_a_memfd_is_not_executable() -> None:
    with fds.memfd_create("test", 4096) as owned:
        assert_not_executable(owned.fileno())
        if fds.seals(owned.fileno()) & fds.F_SEAL_EXEC:
            with pytest.raises(PermissionError):
                os.fchmod(owned.fileno(), 0o700)
            assert_not_executable(owned.fileno())


def test_missing_seals_are_named() -> None:
    with fds.memfd_create("test", 4096, seal=False) as owned:
        with pytest.raises(errors.DescriptorError, match="F_SEAL_SHRINK, F_SEAL_GROW"):
            fds.require_seals(owned.fileno())
        os.ftruncate(owned.fileno(), 8192)
        fcntl.fcntl(owned.fileno(), fcntl.F_ADD_SEALS, fds.F_SEAL_SHRINK)
        with pytest.raises(errors.DescriptorError, match=r"with F_SEAL_GROW$"):
            fds.require_seals(owned.fileno())


def test_other_kinds_of_descriptor(tmp_path: Path) -> None:
    with (tmp_path / "plain").open("wb") as plain, pytest.raises(errors.DescriptorError, match="memfd"):
        fds.require_seals(plain.fileno())
    with socket.socket() as sock, pytest.raises(errors.DescriptorError, match="no memory file"):
        fds.fd_size(sock.fileno())
    with pytest.raises(OSError, match="Bad file descriptor"):
        fds.seals(10**6)


@pytest.mark.parametrize("size", [0, -1, 1 << 63])
def test_a_memfd_has_a_size(size: int) -> None:
    with pytest.raises(errors.LocalProtocolError, match=f"{size} bytes"):
        fds.memfd_create("test", size)


def test_a_memfd_that_cannot_grow_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        fds.memfd_create("test", 4096)


def test_kernel_without_noexec_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.memfd_create

    def before_6_3(name: str, flags: int) -> int:
        if flags & fds.MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "memfd_create", before_6_3)
    with fds.memfd_create("test", 4096) as owned:
        assert fds.seals(owned.fileno()) == fds.FIXED_SEALS
        assert_not_executable(owned.fileno())
    assert fds.memfd_supported() == (True, "memfd with size seals, without MFD_NOEXEC_SEAL (Linux 6.3)")


def test_memfd_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert fds.memfd_supported() == (False, "memfd refused: Operation not permitted")


def test_memfd_supported_here() -> None:
    supported, line = fds.memfd_supported()
    assert supported, line


# -- messages --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 5, fds.MAX_FDS])
def test_a_message_arrives_with_its_descriptors(pair: tuple[socket.socket, socket.socket], n: int) -> None:
    with memfds(n) as made:
        fds.send_message(pair[0], b"hello", made)
    payload, received = fds.receive_message(pair[1])
    assert payload == b"hello"
    assert contents(received) == [i % 256 for i in range(n)]
    close_all(received)


def test_the_message_on_the_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    fds.send_message(pair[0], "ä".encode())
    assert pair[1].recv(100) == b"\x02\0\0\0\xc3\xa4"


def test_an_empty_payload(pair: tuple[socket.socket, socket.socket]) -> None:
    fds.send_message(pair[0], b"")
    assert fds.receive_message(pair[1]) == (b"", [])


def test_received_memory_is_the_same_and_cannot_be_truncated(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with memfds(1) as made:
        fds.send_message(pair[0], b"x", made)
        _, received = fds.receive_message(pair[1])
        with received[0] as owned, mmap.mmap(made[0], 4096) as here:
            with pytest.raises(PermissionError):
                os.ftruncate(owned.fileno(), 0)
            with mmap.mmap(owned.fileno(), 4096) as there:
                there[100:105] = b"there"
                assert here[100:105] == b"there"


def test_received_descriptors_are_not_inherited(pair: tuple[socket.socket, socket.socket]) -> None:
    with memfds(1) as made:
        fds.send_message(pair[0], b"x", made)
        _, received = fds.receive_message(pair[1])
        with received[0] as owned:
            assert not os.get_inheritable(owned.fileno())
            listing = subprocess.run(
                ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True
            )
            assert "memfd" not in listing.stdout
            os.set_inheritable(owned.fileno(), True)
            listing = subprocess.run(
                ["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=True
            )
            assert "memfd:test-0" in listing.stdout  # the check above can tell


def test_one_byte_at_a_time(pair: tuple[socket.socket, socket.socket]) -> None:
    def drip(made: list[int]) -> None:
        data = frame(b"drip by drip")
        send_raw(pair[0], data[:1], made)
        for byte in data[1:]:
            time.sleep(0.001)
            pair[0].sendall(bytes([byte]))

    with memfds(3) as made:
        sender = threading.Thread(target=drip, args=(made,))
        sender.start()
        payload, received = fds.receive_message(pair[1])
        sender.join()
    assert payload == b"drip by drip"
    assert contents(received) == [0, 1, 2]
    close_all(received)


def test_cut_anywhere(pair: tuple[socket.socket, socket.socket]) -> None:
    data = frame(b"cut anywhere")
    with memfds(2) as made:
        for n in range(len(data)):
            left, right = socket.socketpair()
            with left, right:
                if n:
                    send_raw(left, data[:n], made)
                left.close()
                total = 4 if n < 4 else len(data)
                with pytest.raises(errors.PeerClosedError, match=f"{n} of {total} bytes were received"):
                    fds.receive_message(right)


def test_a_message_in_parts_without_waiting(pair: tuple[socket.socket, socket.socket]) -> None:
    """For a program that watches many sockets: each read takes what is there, and never waits."""
    near, far = pair
    message = frame(b"abc")
    with memfds(1) as made, fds.Incoming(far) as incoming:
        assert not incoming.read()
        assert incoming.done == "0 of 4 bytes were received"
        send_raw(near, message[:1], made)
        assert not incoming.read()
        for byte in message[1:-1]:
            send_raw(near, bytes([byte]))
            assert not incoming.read()
        assert incoming.done == "6 of 7 bytes were received"
        send_raw(near, message[-1:] + b"next")
        assert incoming.read()
        payload, received = incoming.take()
        assert payload == b"abc"
        assert contents(received) == [0]
        close_all(received)
        assert far.recv(16) == b"next"  # never past the end of a message


def test_a_message_that_is_given_up_closes_its_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    near, far = pair
    with memfds(2) as made:
        send_raw(near, frame(b"abc")[:5], made)
        before = len(os.listdir("/proc/self/fd"))
        incoming = fds.Incoming(far)
        assert not incoming.read()
        assert len(os.listdir("/proc/self/fd")) == before + 2
        incoming.close()
        incoming.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_two_messages_back_to_back_keep_their_descriptors(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    with memfds(5) as made:
        fds.send_message(pair[0], b"first", made[:2])
        fds.send_message(pair[0], b"second", made[2:])
        fds.send_message(pair[0], b"third")
    for payload, indices in ((b"first", [0, 1]), (b"second", [2, 3, 4]), (b"third", [])):
        got, received = fds.receive_message(pair[1])
        assert (got, contents(received)) == (payload, indices)
        close_all(received)


def test_the_largest_message_is_sent_in_parts(pair: tuple[socket.socket, socket.socket]) -> None:
    payload = os.urandom(fds.MAX_PAYLOAD_NBYTES)
    with memfds(2) as made:
        sender = threading.Thread(target=fds.send_message, args=(pair[0], payload, made))
        sender.start()
        got, received = fds.receive_message(pair[1])
        sender.join()
    assert got == payload
    assert contents(received) == [0, 1]
    close_all(received)


def test_limits_of_the_sender(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(errors.LocalProtocolError, match="1048577 bytes"):
        fds.send_message(pair[0], bytes(fds.MAX_PAYLOAD_NBYTES + 1))
    with pytest.raises(errors.LocalProtocolError, match="254 descriptors"):
        fds.send_message(pair[0], b"x", [0] * 254)
    with pytest.raises(BlockingIOError):
        pair[1].recv(1, socket.MSG_DONTWAIT)


def test_an_announced_length_over_the_limit(pair: tuple[socket.socket, socket.socket]) -> None:
    with memfds(1) as made:
        send_raw(pair[0], struct.pack("<I", fds.MAX_PAYLOAD_NBYTES + 1), made)
    with pytest.raises(errors.RemoteProtocolError, match="1048577"):
        fds.receive_message(pair[1])


@pytest.mark.parametrize(("n", "max_fds"), [(1, 0), (2, 1), (3, 2), (4, 1), (fds.MAX_FDS, 252)])
def test_more_descriptors_than_allowed(
    pair: tuple[socket.socket, socket.socket], n: int, max_fds: int
) -> None:
    with memfds(n) as made:
        fds.send_message(pair[0], b"x", made)
    with pytest.raises(errors.DescriptorError, match=f"more than {max_fds} were sent"):
        fds.receive_message(pair[1], max_fds=max_fds)


def test_no_room_for_descriptors_in_this_process(pair: tuple[socket.socket, socket.socket]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with memfds(8) as made:
        fds.send_message(pair[0], b"x", made)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 2, hard))
    try:
        with pytest.raises(errors.DescriptorError, match="this process may open no more"):
            fds.receive_message(pair[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("at", [4, 5, 8])
@pytest.mark.parametrize("first", [0, 1])
def test_descriptors_on_a_later_part(pair: tuple[socket.socket, socket.socket], at: int, first: int) -> None:
    data = frame(b"later")
    with memfds(3) as made:
        send_raw(pair[0], data[:at], made[:first])
        send_raw(pair[0], data[at:], made[first:])
    with pytest.raises(errors.RemoteProtocolError, match="belong to the first byte"):
        fds.receive_message(pair[1])


def test_a_second_batch_within_the_length(pair: tuple[socket.socket, socket.socket]) -> None:
    data = frame(b"x")
    with memfds(2) as made:
        send_raw(pair[0], data[:2], made[:1])
        send_raw(pair[0], data[2:], made[1:])
    with pytest.raises(errors.RemoteProtocolError, match="2 of 4 bytes"):
        fds.receive_message(pair[1])


def test_sending_to_a_peer_that_is_gone(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with memfds(1) as made, pytest.raises(errors.PeerClosedError, match="0 of 5 bytes were sent"):
        fds.send_message(pair[0], b"x", made)


def test_a_peer_that_dies_with_unread_data(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].sendall(b"unread")
    pair[0].close()
    with pytest.raises(errors.PeerClosedError, match="reset"):
        fds.receive_message(pair[1])


def test_receive_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    with memfds(1) as made:
        send_raw(pair[0], frame(b"half of it")[:9], made)
    start = time.monotonic()
    with pytest.raises(errors.DeadlineExceededError, match="9 of 14 bytes were received"):
        fds.receive_message(pair[1], deadline=start + 0.05)
    assert 0.05 <= time.monotonic() - start < 1


def test_a_dripping_peer_does_not_outlast_the_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(frame(b"all here"))
    with pytest.raises(errors.DeadlineExceededError):
        fds.receive_message(pair[1], deadline=time.monotonic() - 1)


def test_send_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(errors.DeadlineExceededError, match="of 1048580 bytes were sent"):
        fds.send_message(pair[0], bytes(fds.MAX_PAYLOAD_NBYTES), deadline=soon())


def test_an_endless_deadline(pair: tuple[socket.socket, socket.socket]) -> None:
    fds.send_message(pair[0], b"x", deadline=float("inf"))
    assert fds.receive_message(pair[1], deadline=float("inf")) == (b"x", [])


@pytest.mark.parametrize("timeout", [None, 0.0, 0.001])
def test_the_mode_of_the_socket_does_not_matter(
    pair: tuple[socket.socket, socket.socket], timeout: float | None
) -> None:
    def send_later() -> None:
        time.sleep(0.05)
        fds.send_message(pair[0], b"later")

    pair[1].settimeout(timeout)
    sender = threading.Thread(target=send_later)
    sender.start()
    assert fds.receive_message(pair[1]) == (b"later", [])
    sender.join()
    assert pair[1].gettimeout() == timeout


# -- peers -----------------------------------------------------------------------------------


def test_peer_credentials(pair: tuple[socket.socket, socket.socket]) -> None:
    assert fds.peer_credentials(pair[0]) == (os.getpid(), os.geteuid(), os.getegid())
    fds.require_peer_uid(pair[0])
    fds.require_peer_uid(pair[0], os.geteuid())
    with pytest.raises(errors.PeerRefusedError, match=f"expected uid {os.geteuid() + 1}"):
        fds.require_peer_uid(pair[0], os.geteuid() + 1)


def test_connect_and_accept() -> None:
    with (
        fds.private_directory() as folder,
        fds.listen_unix(folder / "s") as listener,
        fds.connect_unix(folder / "s") as client,
        fds.accept_unix(listener) as server,
    ):
        assert client.getblocking()
        assert server.getblocking()
        assert not any(os.get_inheritable(sock.fileno()) for sock in (listener, client, server))
        fds.send_message(client, b"hello")
        assert fds.receive_message(server) == (b"hello", [])
    assert not folder.exists()


def test_modes_do_not_depend_on_the_umask() -> None:
    before = os.umask(0)
    try:
        with fds.private_directory() as folder, fds.listen_unix(folder / "s"):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_path_length() -> None:
    with fds.private_directory() as folder:
        longest = folder / ("x" * (fds.MAX_PATH_NBYTES - len(str(folder)) - 1))
        with fds.listen_unix(longest) as listener, fds.connect_unix(longest):
            fds.accept_unix(listener).close()
        for call in (fds.listen_unix, fds.connect_unix):
            with pytest.raises(
                errors.LocalProtocolError, match="108 bytes exceeds the limit of 107"
            ) as caught:
                call(f"{longest}x")
            assert caught.value.hint is not None
            with pytest.raises(errors.LocalProtocolError, match="109 bytes"):
                call(f"{str(longest)[:-1]}€")  # bytes count, not characters


@pytest.mark.parametrize("name", ["", "\0abstract"])
def test_only_files(name: str) -> None:
    for call in (fds.listen_unix, fds.connect_unix):
        with pytest.raises(errors.LocalProtocolError, match="not a file's path"):
            call(name)


def test_a_stale_socket_is_replaced_and_nothing_else() -> None:
    with fds.private_directory() as folder:
        path = folder / "s"
        fds.listen_unix(path).close()
        assert path.is_socket()
        with fds.listen_unix(path):
            with pytest.raises(errors.LocalProtocolError, match="another process listens"):
                fds.listen_unix(path)
            assert path.is_socket()
        for other in (folder / "file", folder / "link", folder / "folder"):
            if other.name == "file":
                other.write_text("precious")
            elif other.name == "link":
                other.symlink_to(path)
            else:
                other.mkdir()
            with pytest.raises(errors.LocalProtocolError, match="no socket"):
                fds.listen_unix(other)
        assert (folder / "file").read_text() == "precious"


def test_a_stale_socket_that_was_replaced_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that start at once after a crash: the second one does not take the first one's socket away."""
    with fds.private_directory() as folder, contextlib.ExitStack() as stack:
        path = folder / "p.sock"
        fds.listen_unix(path).close()
        rename = os.rename

        def late(source: str, target: str) -> None:
            monkeypatch.setattr(os, "rename", rename)
            stack.enter_context(fds.listening(path))
            rename(source, target)

        monkeypatch.setattr(os, "rename", late)
        with pytest.raises(errors.LocalProtocolError, match="another process listens"):
            fds.listen_unix(path)
        assert os.listdir(folder) == ["p.sock"]
        fds.connect_unix(path).close()


def test_a_listener_removes_its_socket_and_no_other() -> None:
    with fds.private_directory() as folder:
        path = folder / "s"
        with fds.listening(path):
            assert path.is_socket()
        assert not path.exists()
        with fds.listening(path):
            path.unlink()
        with fds.listening(path):
            path.unlink()
            with fds.listen_unix(path):
                pass  # somebody else's by now
        assert path.is_socket()


def test_nobody_listens() -> None:
    with fds.private_directory() as folder:
        with pytest.raises(errors.PeerRefusedError, match=r"nobody listens at .*/s"):
            fds.connect_unix(folder / "s")
        fds.listen_unix(folder / "s").close()
        with pytest.raises(errors.PeerRefusedError, match=r"nobody listens at .*/s"):
            fds.connect_unix(folder / "s")


def test_accept_deadline() -> None:
    with (
        fds.private_directory() as folder,
        fds.listen_unix(folder / "s") as listener,
        pytest.raises(errors.DeadlineExceededError, match="nobody had connected"),
    ):
        fds.accept_unix(listener, deadline=soon())


def test_connect_waits_for_a_full_backlog_until_the_deadline() -> None:
    with fds.private_directory() as folder, fds.listen_unix(folder / "s") as listener:
        listener.listen(0)
        with fds.connect_unix(folder / "s"):
            with pytest.raises(errors.DeadlineExceededError, match="accepts no connection"):
                fds.connect_unix(folder / "s", deadline=soon())
            with pytest.raises(errors.LocalProtocolError, match="another process listens"):
                fds.listen_unix(folder / "s")
            room = threading.Timer(0.05, lambda: fds.accept_unix(listener).close())
            room.start()
            fds.connect_unix(folder / "s").close()
            room.join()


@contextlib.contextmanager
def before_listening(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> Iterator[None]:
    """Do something at the moment when a socket is bound and does not listen yet."""
    real = socket.socket.listen

    def listen(self: socket.socket, *backlog: int) -> None:
        monkeypatch.undo()
        action()
        real(self, *backlog)

    monkeypatch.setattr(socket.socket, "listen", listen)
    yield
    monkeypatch.undo()


@pytest.mark.parametrize("stale", [False, True])
def test_a_path_that_is_there_listens(monkeypatch: pytest.MonkeyPatch, stale: bool) -> None:
    """Whoever waits for it to appear need not try twice. Its mode is never another one."""
    with fds.private_directory() as folder:
        if stale:
            fds.listen_unix(folder / "s").close()
        seen: list[tuple[bool, str]] = []

        def look() -> None:
            seen.extend(
                (each == folder / "s", stat.filemode(each.lstat().st_mode)) for each in folder.iterdir()
            )

        with before_listening(monkeypatch, look), fds.listening(folder / "s"):
            assert seen == [(False, "srw-------")]
            assert os.listdir(folder) == ["s"]
            fds.connect_unix(folder / "s").close()
        assert os.listdir(folder) == []


def test_nothing_is_left_where_listening_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.ENOBUFS, "No buffer space available")

    with fds.private_directory() as folder:
        with before_listening(monkeypatch, fail), pytest.raises(OSError, match="No buffer space"):
            fds.listen_unix(folder / "s")
        assert os.listdir(folder) == []


def test_two_that_start_at_the_same_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The later one is refused, and takes nothing from the earlier one."""
    with fds.private_directory() as folder, contextlib.ExitStack() as stack:
        with (
            before_listening(monkeypatch, lambda: stack.enter_context(fds.listen_unix(folder / "s"))),
            pytest.raises(errors.LocalProtocolError, match="another process listens"),
        ):
            fds.listen_unix(folder / "s")
        assert os.listdir(folder) == ["s"]
        fds.connect_unix(folder / "s").close()


def test_a_path_in_the_folder_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with fds.private_directory() as folder:
        monkeypatch.chdir(folder)
        with fds.listening("s"):
            assert os.listdir(folder) == ["s"]
            fds.connect_unix(folder / "s").close()
        monkeypatch.undo()


def test_no_folder() -> None:
    with fds.private_directory() as folder:
        for name in ("none/s", "none/"):
            with pytest.raises(FileNotFoundError, match="none"):
                fds.listen_unix(f"{folder}/{name}")
        with pytest.raises(errors.LocalProtocolError, match="no socket"):
            fds.listen_unix(f"{folder}/")


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o770])
def test_a_folder_that_others_can_write(mode: int) -> None:
    """They could put a socket of their own in the place of this one."""
    with fds.private_directory() as folder:
        folder.chmod(mode)
        with pytest.raises(errors.LocalProtocolError, match=f"by others .mode {mode:o}.") as caught:
            fds.listen_unix(folder / "s")
        assert "mkdir -m 700" in str(caught.value.hint)
        assert os.listdir(folder) == []


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_a_folder_in_which_others_cannot_replace_it(mode: int) -> None:
    with fds.private_directory() as folder:
        folder.chmod(mode)
        with fds.listening(folder / "s"):
            assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o600
            fds.connect_unix(folder / "s").close()


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_the_folder_of_another_user(mode: int) -> None:
    with fds.private_directory() as folder:
        folder.chmod(mode)
        os.chown(folder, NOBODY, NOBODY)
        with pytest.raises(errors.LocalProtocolError, match=f"belongs to uid {NOBODY}"):
            fds.listen_unix(folder / "s")
        assert os.listdir(folder) == []


@contextlib.contextmanager
def another_user(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run Python code as nobody with `path` in argv; it ends when its stdin does."""
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); path = sys.argv[1]\n" + code
    with subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", code, str(path)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        yield child
        child.communicate("\n", timeout=10)
    assert child.returncode == 0


@as_root
def test_another_user_cannot_connect() -> None:
    code = """
try:
    s.connect(path)
except PermissionError:
    print("refused", flush=True)
"""
    with fds.private_directory() as folder, fds.listen_unix(folder / "s"):
        folder.chmod(0o755)  # leaves the mode of the socket itself
        with another_user(code, folder / "s") as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "refused\n"


@as_root
def test_another_user_who_connects_is_hung_up_on() -> None:
    with fds.private_directory() as folder, fds.listen_unix(folder / "s") as listener:
        folder.chmod(0o755)
        (folder / "s").chmod(0o666)
        with (
            another_user("s.connect(path); assert s.recv(1) == b''; input()", folder / "s"),
            pytest.raises(errors.PeerRefusedError, match=f"runs as uid {NOBODY}, expected uid 0"),
        ):
            fds.accept_unix(listener)
        with fds.connect_unix(folder / "s"):
            fds.accept_unix(listener).close()


@as_root
def test_another_user_who_listens_gets_nothing() -> None:
    code = """
s.bind(path)
s.listen()
print("up", flush=True)
connection, _ = s.accept()
assert connection.recv(1) == b""
input()
"""
    with fds.private_directory() as folder:
        folder.chmod(0o777)
        with another_user(code, folder / "s") as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            with pytest.raises(errors.PeerRefusedError, match=f"runs as uid {NOBODY}"):
                fds.connect_unix(folder / "s")


@as_root
def test_no_permission_to_connect() -> None:
    with fds.private_directory() as folder, fds.listen_unix(folder / "s"):
        child = os.fork()
        if child == 0:  # only what the call needs, then _exit: this is a copy of pytest
            status = 1
            try:
                os.setresuid(NOBODY, NOBODY, NOBODY)
                fds.connect_unix(folder / "s")
            except errors.PeerRefusedError as exc:
                status = 0 if "may not connect" in str(exc) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
