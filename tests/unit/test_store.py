"""The store and the server of prefixes: names, bounds, many readers, peers that dawdle or lie."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare import fds, wire
from kvshare.errors import KvshareError, PeerClosedError, PeerRefusedError, RemoteProtocolError
from kvshare.prefix import Prefix, drop_prefix, list_prefixes
from kvshare.store import PrefixServer, PrefixStore
from kvshare.testing.faults import cut_messages, send_framed
from tests.unit.prefixes import TOKENS, duplicates, frozen_prefix

WAIT_S = 10.0
OTHER_UID = 65534


def sized(name: str, nbytes: int) -> Prefix:
    """Make a prefix that takes so much memory, and a little more."""
    return frozen_prefix(name, content=bytes(nbytes))


def names(store: PrefixStore) -> list[str]:
    return [entry.name for entry in store.entries()]


# -- the store ---------------------------------------------------------------------------------


@pytest.fixture
def store() -> Iterator[PrefixStore]:
    with PrefixStore() as made:
        yield made


def test_names(store: PrefixStore) -> None:
    for name in ("one", "two"):
        assert store.put(frozen_prefix(name)) == []
    assert names(store) == ["one", "two"]
    with store.use("one") as prefix:
        assert prefix.name == "one"
    assert names(store) == ["two", "one"]  # the one that was used last is at the end
    with store.use(None) as prefix:
        assert prefix.name == "one"
    assert [entry.n_reads for entry in store.entries()] == [0, 2]
    store.drop("one")
    for attempt in (lambda: store.drop("one"), store.use("one").__enter__):
        with pytest.raises(PeerRefusedError, match="no prefix one"):
            attempt()
    assert names(store) == ["two"]


def test_an_empty_store(store: PrefixStore) -> None:
    assert store.entries() == ()
    with pytest.raises(PeerRefusedError, match="no prefix yet"), store.use(None):
        pytest.fail("there was one")


def test_a_name_that_is_taken(store: PrefixStore) -> None:
    """The newer one takes the place of the older, which whoever uses it still has."""
    old, new = frozen_prefix("one"), frozen_prefix("one", tokens=TOKENS[:2])
    store.put(old)
    with store.use("one") as prefix:
        store.put(new)
        assert prefix is old
        assert os.pread(prefix._fds[0].fileno(), 4, 0) == b"keys"
        assert [entry.prefix_id for entry in store.entries()] == [new.prefix_id]
    with pytest.raises(Exception, match="closed"):
        old._fds[0].fileno()


@pytest.mark.parametrize("end", ["drop", "close", "evict"])
def test_a_prefix_goes_when_its_last_user_does(end: str) -> None:
    with PrefixStore(max_prefixes=1) as store:
        prefix = frozen_prefix("one")
        store.put(prefix)
        with store.use("one"), store.use("one"):
            if end == "drop":
                store.drop("one")
            elif end == "close":
                store.close()
            else:
                assert [entry.name for entry in store.put(frozen_prefix("two"))] == ["one"]
            assert "one" not in names(store)
            prefix._fds[0].fileno()
        with pytest.raises(Exception, match="closed"):
            prefix._fds[0].fileno()


def test_what_was_not_used_for_the_longest_time_goes_first() -> None:
    each = 1 << 16
    with sized("one", each) as prefix:
        nbytes = prefix.nbytes
    with PrefixStore(max_nbytes=3 * nbytes) as store:
        for name in ("one", "two", "three"):
            assert store.put(sized(name, each)) == []
        with store.use("one"):
            pass
        assert [entry.name for entry in store.put(sized("four", each))] == ["two"]
        assert names(store) == ["three", "one", "four"]
        # one that is larger takes the place of several
        evicted = store.put(sized("large", 2 * each))
        assert [(entry.name, entry.nbytes) for entry in evicted] == [("three", nbytes), ("one", nbytes)]
        assert sum(entry.nbytes for entry in store.entries()) <= 3 * nbytes


def test_one_that_is_too_large() -> None:
    with PrefixStore(max_nbytes=1 << 16) as store:
        store.put(frozen_prefix("one"))
        large = sized("two", 1 << 17)
        with pytest.raises(PeerRefusedError, match=r"two takes \d+ bytes, all together may take 65536"):
            store.put(large)
        assert names(store) == ["one"]
        with pytest.raises(Exception, match="closed"):
            large._fds[0].fileno()


def test_what_a_prefix_says_of_itself_is_not_kept_in_memory() -> None:
    """How much that is decides its maker, and no bound counts it."""
    with PrefixStore() as store:
        prefix = sized("one", 4096)
        tokens = prefix.tokens
        store.put(prefix)
        assert {"tokens", "_record"}.isdisjoint(vars(prefix))
        with store.use("one") as used:
            assert used.tokens == tokens


def test_how_many() -> None:
    with PrefixStore(max_prefixes=2) as store:
        evicted = [entry.name for i in range(5) for entry in store.put(frozen_prefix(f"{i}"))]
        assert evicted == ["0", "1", "2"]
        assert names(store) == ["3", "4"]


# -- the server --------------------------------------------------------------------------------


class Running:
    """A server in a thread of this process.

    *Ownership*: `close` stops it.
    """

    def __init__(self, folder: Path, *, max_nbytes: int = 1 << 24, **options: Any) -> None:
        self.path = folder / "p.sock"
        self.events: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._stack = contextlib.ExitStack()
        listener = self._stack.enter_context(fds.listening(self.path))
        self.store = self._stack.enter_context(PrefixStore(max_nbytes=max_nbytes))
        self.server = PrefixServer(listener, self.store, **{"report": self._take, **options})
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except ZeroDivisionError as error:
            self.failure = error

    def _take(self, event: str, /, **fields: Any) -> None:
        with self._changed:
            self.events.append({"event": event, **fields})
            self._changed.notify_all()

    def wait_for(self, event: str, n: int = 1) -> dict[str, Any]:
        """Wait for the n-th event of this kind."""

        def found() -> list[dict[str, Any]]:
            return [each for each in self.events if each["event"] == event]

        with self._changed:
            assert self._changed.wait_for(lambda: len(found()) >= n, WAIT_S), self.events
            return found()[n - 1]

    def close(self) -> None:
        self.server.stop()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        self._stack.close()


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Running]]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Running:
            running = Running(folder, **options)
            stack.callback(running.close)
            return running

        yield make


def assert_serves(running: Running, name: str = "fine") -> None:
    """It takes a prefix, and gives it."""
    with frozen_prefix(name) as prefix:
        prefix.put(running.path)
        with Prefix.get(running.path, name) as found:
            assert found.header == prefix.header


def test_put_get_list_drop(start: Callable[..., Running]) -> None:
    running = start()
    with pytest.raises(PeerRefusedError, match="no prefix yet"):
        Prefix.get(running.path)
    assert list_prefixes(running.path) == ()
    for name in ("one", "two"):
        with frozen_prefix(name) as prefix:
            prefix.put(running.path)
    with Prefix.get(running.path) as found:
        assert found.name == "two"
    with Prefix.get(running.path, "one") as found:
        assert list(found.tokens) == TOKENS
    one = list_prefixes(running.path)[-1]
    assert (one.name, one.prefix_id, one.n_tokens, one.n_reads) == ("one", found.prefix_id, 4, 1)
    assert (one.layout, one.semantics) == (found.header.layout, found.semantics)
    assert 0 < one.nbytes < 1 << 16
    drop_prefix(running.path, "one")
    for attempt in (drop_prefix, Prefix.get):
        with pytest.raises(PeerRefusedError, match="no prefix one"):
            attempt(running.path, "one")
    assert [entry.name for entry in list_prefixes(running.path)] == ["two"]
    running.wait_for("refused", 3)
    said = [each for each in running.events if each["event"] != "refused"]
    assert [each["event"] for each in said] == ["put", "put", "get", "get", "drop"]
    assert {key: said[0][key] for key in ("name", "n_tokens")} == {"name": "one", "n_tokens": 4}


def test_eviction_is_said(start: Callable[..., Running]) -> None:
    running = start(max_nbytes=3 << 16)
    for name in ("one", "two", "three"):
        with sized(name, 1 << 16) as prefix:
            prefix.put(running.path)
    assert running.wait_for("evicted")["name"] == "one"
    assert [entry.name for entry in list_prefixes(running.path)] == ["two", "three"]
    with (
        sized("large", 1 << 18) as prefix,
        pytest.raises(PeerRefusedError, match="large takes"),
    ):
        prefix.put(running.path)
    assert [entry.name for entry in list_prefixes(running.path)] == ["two", "three"]


def test_many_readers_at_once(start: Callable[..., Running]) -> None:
    running = start()
    with frozen_prefix() as prefix:
        prefix.put(running.path)
        found: list[wire.FrozenHeader] = []

        def read() -> None:
            for _ in range(5):
                with Prefix.get(running.path, "one") as mine:
                    found.append(mine.header)

        threads = [threading.Thread(target=read) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [prefix.header] * 80
    assert list_prefixes(running.path)[0].n_reads == 80


def test_readers_outlive_the_server(start: Callable[..., Running]) -> None:
    running = start()
    with frozen_prefix() as prefix:
        prefix.put(running.path)
    with Prefix.get(running.path) as found:
        running.close()
        assert os.pread(found._fds[0].fileno(), 4, 0) == b"keys"
        near, far = socket.socketpair(socket.AF_UNIX)
        with near, far:
            found.send(near)
            with Prefix.receive(far) as handed_on:
                assert handed_on.header == found.header


def test_readers_that_dawdle(start: Callable[..., Running]) -> None:
    """As many as there are places: the next one is served as soon as they are hung up on."""
    running = start(timeout_s=0.2)
    with contextlib.ExitStack() as stack:
        dawdlers = [stack.enter_context(fds.connect_unix(running.path)) for _ in range(70)]
        dawdlers[0].send(b"\1")
        assert_serves(running)
        for each in dawdlers:
            each.settimeout(WAIT_S)
        assert dawdlers[0].recv(4096) == b""
        assert "deadline passed" in running.wait_for("refused", 70)["error"]


def test_a_reader_that_does_not_read(start: Callable[..., Running]) -> None:
    """Its socket is full before the answer is through: it costs its connection."""
    running = start(timeout_s=0.2)
    with frozen_prefix(params={"seq_id": 0, "note": "x" * 500_000}) as prefix:
        prefix.put(running.path)
    with fds.connect_unix(running.path) as connection:
        send_framed(connection, wire.encode(wire.PrefixRequest(op="get")), [])
        assert "bytes were sent" in running.wait_for("refused")["error"]
        drop_prefix(running.path, "one")
        assert_serves(running)


def test_peers_that_hang_up(start: Callable[..., Running]) -> None:
    running = start()
    with frozen_prefix() as prefix:
        n = 0
        for begun in cut_messages(wire.encode(prefix.header)):
            with fds.connect_unix(running.path) as connection:
                if begun:
                    socket.send_fds(connection, [begun], [owned.fileno() for owned in prefix._fds])
            n += 1
        running.wait_for("refused", n)
        assert list_prefixes(running.path) == ()
        with fds.connect_unix(running.path) as connection:
            send_framed(connection, wire.encode(prefix.header), [owned.fileno() for owned in prefix._fds])
        running.wait_for("put")  # whole, although nobody waits for the outcome
    assert_serves(running)


@pytest.mark.parametrize(
    ("payload", "n_fds", "says"),
    [
        (b"no", 0, "header"),
        (b"no", 3, "header"),
        (wire.encode(wire.PrefixRequest(op="list")), 3, "3 descriptors came with a request"),
        (wire.encode(wire.Outcome(share_id=1, ok=True)), 0, "expected a prefix or a request"),
        (wire.encode(wire.JobHeader(share_id=1, tokens=(1,))), 1, "expected a prefix or a request"),
    ],
    ids=range(5),
)
def test_peers_that_lie(start: Callable[..., Running], payload: bytes, n_fds: int, says: str) -> None:
    running = start()
    with frozen_prefix() as prefix, fds.connect_unix(running.path) as connection:
        send_framed(connection, payload, [owned.fileno() for owned in prefix._fds][:n_fds])
        answer, _ = fds.receive_message(connection)
        message = wire.decode(answer)
        assert isinstance(message, wire.Outcome)
        assert not message.ok
        assert says in str(message.error)
    assert says in running.wait_for("refused")["error"]
    assert_serves(running)


def test_a_prefix_that_can_be_written_to(start: Callable[..., Running]) -> None:
    running = start()
    with frozen_prefix() as prefix, fds.connect_unix(running.path) as connection:
        sent = duplicates(prefix)
        sent[0].close()
        sent[0] = fds.memfd_create("kvshare-fault", prefix.layout.regions[0].size)
        send_framed(connection, wire.encode(prefix.header), [owned.fileno() for owned in sent])
        for owned in sent:
            owned.close()
        message = wire.decode(fds.receive_message(connection)[0])
        assert isinstance(message, wire.Outcome)
        assert "not sealed with F_SEAL_WRITE" in str(message.error)
    assert list_prefixes(running.path) == ()


def test_another_user(start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch) -> None:
    running = start()
    with monkeypatch.context() as patch:
        peer = fds.PeerCredentials(1, os.geteuid() + 1, 0)
        patch.setattr(fds, "peer_credentials", lambda sock: peer)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(running.path))
            assert other.recv(1) == b""
    assert "expected uid" in running.wait_for("refused")["error"]
    assert_serves(running)


AS_ANOTHER_USER = """
import os, socket, sys
end = socket.socket(socket.AF_UNIX)
if sys.argv[2] == "reads":
    end.connect(sys.argv[1])
    data, fds, _, _ = socket.recv_fds(end, 4096, 16)
    print(len(data), len(fds))
else:
    end.bind(sys.argv[1])
    os.chmod(sys.argv[1], 0o666)
    end.listen()
    print("listens", flush=True)
    peer = end.accept()[0]
    print(len(peer.recv(4096)))
"""


@pytest.fixture
def as_another_user(folder: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process of another uid that reads from, or listens at, a socket in an open folder."""
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another uid")
    folder.chmod(0o1777)
    with contextlib.ExitStack() as stack:

        def start(role: str) -> subprocess.Popen[str]:
            # not of a virtual environment, which may lie where nobody else can read
            command = ["/usr/bin/env", "-i", "python3", "-c", AS_ANOTHER_USER, str(folder / "p.sock"), role]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, user=OTHER_UID, cwd="/")
            stack.callback(process.wait)
            stack.callback(process.kill)
            assert process.stdout is not None
            stack.enter_context(process.stdout)
            return process

        yield start


def test_a_reader_of_another_uid(
    start: Callable[..., Running], as_another_user: Callable[[str], subprocess.Popen[str]]
) -> None:
    """It gets neither a byte nor a descriptor, even where the socket's permissions let it connect."""
    running = start()
    running.path.chmod(0o666)
    assert_serves(running)
    assert as_another_user("reads").communicate(timeout=WAIT_S)[0] == "0 0\n"
    assert f"uid {OTHER_UID}, expected uid {os.geteuid()}" in running.wait_for("refused")["error"]
    assert_serves(running)


def test_a_server_of_another_uid(
    folder: Path, as_another_user: Callable[[str], subprocess.Popen[str]]
) -> None:
    """Nobody tells it a name, takes anything from it, or gives it anything."""
    with frozen_prefix() as prefix:
        for attempt in (Prefix.get, prefix.put, list_prefixes):
            process = as_another_user("listens")
            assert process.stdout is not None
            assert process.stdout.readline() == "listens\n"
            with pytest.raises(PeerRefusedError, match=f"uid {OTHER_UID}, expected"):
                attempt(folder / "p.sock")
            assert process.communicate(timeout=WAIT_S)[0] == "0\n"
            (folder / "p.sock").unlink()


def test_a_server_that_answers_something_else(folder: Path) -> None:
    with fds.listening(folder / "p.sock") as listener:

        def answer() -> None:
            for _ in range(3):
                with fds.accept_unix(listener) as connection:
                    fds.receive_message(connection)
                    fds.send_message(
                        connection, wire.encode(wire.Progress(share_id=1, n_filled=0, n_tokens=1))
                    )

        thread = threading.Thread(target=answer)
        thread.start()
        attempts: list[Callable[[], object]] = [
            lambda: Prefix.get(folder / "p.sock"),
            lambda: list_prefixes(folder / "p.sock"),
            lambda: drop_prefix(folder / "p.sock", "one"),
        ]
        for attempt in attempts:
            with pytest.raises(RemoteProtocolError, match="got Progress"):
                attempt()
        thread.join()


def test_stop_hangs_up(start: Callable[..., Running]) -> None:
    """At once, whatever deadlines there are."""
    running = start(timeout_s=3600.0)
    with fds.connect_unix(running.path) as connection:
        connection.send(b"\1")
        assert_serves(running)  # it has a thread by now
        running.close()
        assert connection.recv(1) == b""
    with pytest.raises(PeerRefusedError, match="nobody listens"):
        list_prefixes(running.path)


def test_a_report_that_fails_ends_it(start: Callable[..., Running]) -> None:
    def report(event: str, /, **fields: Any) -> None:
        raise ZeroDivisionError

    running = start(report=report)
    with frozen_prefix() as prefix, contextlib.suppress(KvshareError, ConnectionError):
        prefix.put(running.path)
    running.thread.join(WAIT_S)
    assert isinstance(running.failure, ZeroDivisionError)


def test_nothing_leaks(start: Callable[..., Running]) -> None:
    """Descriptors are as many after all kinds of ends as before."""
    running = start(max_nbytes=3 << 16)

    def cycle() -> None:
        n = len([each for each in running.events if each["event"] == "refused"])
        assert_serves(running)
        for name in ("one", "two", "three"):
            with sized(name, 1 << 16) as prefix:
                prefix.put(running.path)
        with sized("large", 1 << 18) as prefix, pytest.raises(PeerRefusedError):
            prefix.put(running.path)
        with fds.connect_unix(running.path) as connection, frozen_prefix() as prefix:
            send_framed(connection, b"no", [owned.fileno() for owned in prefix._fds])
            fds.receive_message(connection)
        running.wait_for("refused", n + 2)
        for entry in list_prefixes(running.path):
            drop_prefix(running.path, entry.name)
        with pytest.raises(PeerRefusedError):
            Prefix.get(running.path)
        running.wait_for("refused", n + 3)

    def n_open() -> int:
        # the thread of the last connection closes it after it has said so
        deadline = time.monotonic() + WAIT_S
        while running.server._connections and time.monotonic() < deadline:
            time.sleep(0.001)
        return len(os.listdir("/proc/self/fd"))

    cycle()
    before = n_open()
    for _ in range(10):
        cycle()
    assert n_open() == before


# -- the command -------------------------------------------------------------------------------


class Command:
    """`kvshare prefix serve --json` as a process."""

    def __init__(self, path: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvshare", "prefix", "serve", "--listen", str(path), *options],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.first = self.process.stdout.readline()

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, out


def kvshare(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvshare", "prefix", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command(folder: Path, number: int) -> None:
    path = folder / "p.sock"
    command = Command(path, "--json")
    try:
        assert '"event": "listening"' in command.first
        with frozen_prefix() as prefix:
            prefix.put(path)
        assert kvshare("list", path)[1].startswith("one: 4 tokens, ")
        status, out = kvshare("list", path, "--json")
        assert status == 0
        assert '"name": "one"' in out
        assert kvshare("drop", path, "one") == (0, "one: dropped\n")
        status, out = kvshare("drop", path, "one")
        assert (status, out) == (
            PeerRefusedError.exit_code,
            "kvshare: error: the server of prefixes says: there is no prefix one\n",
        )
        status, out = command.end(number)
    finally:
        command.process.kill()
    assert status == 0
    assert [line.split('"')[3] for line in out.splitlines()] == ["put", "drop", "refused", "stopped"]
    assert not path.exists()


def test_lines_for_people(folder: Path) -> None:
    command = Command(folder / "p.sock", "--max-bytes", "100K")
    try:
        assert "listening at" in command.first
        with sized("large", 1 << 17) as prefix, pytest.raises(PeerRefusedError):
            prefix.put(folder / "p.sock")
        assert_command_serves(folder / "p.sock")
        _, out = command.end(signal.SIGTERM)
    finally:
        command.process.kill()
    texts = [line.split(" ", 1)[1] for line in out.splitlines()]
    assert texts[0].startswith("refused: prefix large takes")
    assert texts[1].startswith("one: 4 tokens, ")
    assert texts[2:] == ["one: handed out", "stopped"]


def assert_command_serves(path: Path) -> None:
    with frozen_prefix() as prefix:
        prefix.put(path)
        with Prefix.get(path) as found:
            assert found.header == prefix.header


def test_a_server_that_is_killed(folder: Path) -> None:
    """Who holds a prefix keeps it; who comes then hears that nobody listens; a new one takes the path."""
    path = folder / "p.sock"
    command = Command(path)
    with frozen_prefix() as prefix:
        prefix.put(path)
    with Prefix.get(path) as found, fds.connect_unix(path) as waiting:
        command.end(signal.SIGKILL)
        with pytest.raises(PeerClosedError):
            fds.receive_message(waiting)
        assert os.pread(found._fds[0].fileno(), 4, 0) == b"keys"
        with pytest.raises(PeerRefusedError, match="nobody listens"):
            Prefix.get(path)
        again = Command(path)
        found.put(path)
        with Prefix.get(path) as restored:
            assert restored.header == found.header
        again.end(signal.SIGTERM)


@pytest.mark.parametrize("argv", [(), ("eat",), ("serve",), ("list",), ("serve", "--max-bytes", "0")])
def test_wrong_usage(argv: tuple[str, ...]) -> None:
    status, out = kvshare(*argv)
    assert status == 2
    assert "usage: kvshare prefix" in out


@pytest.mark.parametrize("name", ["a b", ""])
def test_put_refuses_before_the_work(folder: Path, name: str) -> None:
    status, out = kvshare("put", folder / "p.sock", "--name", name, "-m", "no.gguf", "--tokens", "1")
    assert (status, "name" in out) == (12, True)
    status, out = kvshare("put", folder / "p.sock", "--name", "one", "-m", "no.gguf", "--tokens", "1")
    assert (status, "nobody listens" in out) == (13, True)
