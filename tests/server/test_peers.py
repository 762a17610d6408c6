"""The wrong peer: it is refused, all that it sent is closed, and the next one is served.

Both providers as a user runs them, and a real server. Each has as many descriptors after a peer as before.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare import DeadlineExceededError, Model, Offer, PeerError, fds, wire
from kvshare.ledger import Ledger, LedgerState
from kvshare.provider import serving
from kvshare.testing.faults import send_framed, shorter_memfd, unsealed_memfd
from tests.native.test_killed import KINDS, WAIT_S, ProviderProcess, outcome, until
from tests.server.conftest import Server, running
from tests.server.test_slots import adopt, share

pytestmark = pytest.mark.native

NOBODY = 65534
O_CLOEXEC = 0o2000000  # as /proc shows it

# no skip, which CI does not allow: only root can become another user
as_root = pytest.mark.xfail(os.geteuid() != 0, reason="needs root to become another user", run=False)


@pytest.fixture(scope="module")
def server(program: Path, model_path: Path) -> Iterator[Server]:
    options = ("--ctx-size", "2048", "-np", "2", "--no-kv-unified", "-b", "64", "-ub", "32")
    with running(program, model_path, *options) as server:
        yield server


@pytest.fixture
def tokens(model: Model, request: pytest.FixtureRequest) -> list[int]:
    """A prompt of its own for each test."""
    return model.tokenize(f"{request.node.name}: nobody came to the lighthouse but the one who had to. " * 3)


def open_fds(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@contextlib.contextmanager
def shared(server: Server, name: str) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield the header and the descriptors of a real share."""
    assert server.slot(0, "erase", {})[0] == 200
    with fds.listening(server.share_dir / name) as listener:
        status, offer = share(server, 0, name)
        assert status == 200, offer
        with fds.accept_unix(listener) as connection, Offer.receive(connection) as received:
            header = json.loads(wire.encode(received.header))
            yield header, [owned.fileno() for owned in received._fds]
    assert server.slot(0, "release", {"share_id": offer["share_id"]})[0] == 200


def serve(server: Server, provider: ProviderProcess) -> None:
    """Hand over, as if nothing had happened before."""
    server.slot(0, "erase", {})
    prefix = provider.tokens
    status, offer = share(server, 0, provider.path.name, n_tokens=len(prefix) + 1)
    assert status == 200, (offer, provider.stderr())
    with provider.job(offer["share_id"]):
        status, adopted = adopt(server, 0, offer["share_id"], prefix)
    assert status == 200, (adopted, provider.stderr())
    answer = server.completion([*prefix, prefix[0]], id_slot=0)
    assert answer["timings"]["cache_n"] == len(prefix)


# -- what a decoder can send ---------------------------------------------------------------------

Send = Callable[[socket.socket, dict[str, Any], list[int]], None]


def encoded(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()


def with_header(change: Callable[[dict[str, Any]], object]) -> Send:
    """Send a header that says something else."""

    def send(connection: socket.socket, header: dict[str, Any], descriptors: list[int]) -> None:
        change(header)
        send_framed(connection, encoded(header), descriptors)

    return send


def with_descriptors(change: Callable[[list[int]], list[int]]) -> Send:
    def send(connection: socket.socket, header: dict[str, Any], descriptors: list[int]) -> None:
        send_framed(connection, encoded(header), change(descriptors))

    return send


def with_memory(make: Callable[[int], fds.OwnedFd], at: int) -> Send:
    """Send something else in place of one descriptor."""

    def send(connection: socket.socket, header: dict[str, Any], descriptors: list[int]) -> None:
        with make(descriptors[at]) as made:
            sent = list(descriptors)
            sent[at] = made.fileno()
            send_framed(connection, encoded(header), sent)

    return send


def with_length(length: Callable[[int], int]) -> Send:
    def send(connection: socket.socket, header: dict[str, Any], descriptors: list[int]) -> None:
        payload = encoded(header)
        send_framed(connection, payload, descriptors, length=length(len(payload)))
        connection.shutdown(socket.SHUT_WR)

    return send


def message(body: dict[str, Any]) -> Send:
    """Send another message with the descriptors."""

    def send(connection: socket.socket, header: dict[str, Any], descriptors: list[int]) -> None:
        send_framed(connection, encoded({"protocol": 1, **body}), descriptors)

    return send


def cut(share_of: float) -> Send:
    def send(connection: socket.socket, header: dict[str, Any], descriptors: list[int]) -> None:
        payload = encoded(header)
        framed = struct.pack("<I", len(payload)) + payload
        socket.send_fds(connection, [framed[: int(share_of * (len(framed) - 1)) or 1]], descriptors)
        connection.shutdown(socket.SHUT_WR)

    return send


def in_two_parts(n_first: int) -> Send:
    """Send 254 descriptors, which takes two parts."""

    def send(connection: socket.socket, header: dict[str, Any], descriptors: list[int]) -> None:
        payload = encoded(header)
        framed = struct.pack("<I", len(payload)) + payload
        many = (descriptors * 254)[:254]
        socket.send_fds(connection, [framed[:4]], many[:n_first])
        with contextlib.suppress(BrokenPipeError):  # refused before
            socket.send_fds(connection, [framed[4:]], many[n_first:])

    return send


def region(**changes: Any) -> Send:
    return with_header(lambda header: header["regions"][0].update(changes))


def ledger(**changes: Any) -> Send:
    return with_header(lambda header: header["ledger"].update(changes))


def sealed(seals: int) -> Callable[[int], fds.OwnedFd]:
    """Return what makes a copy that has these seals and no others."""

    def make(fd: int) -> fds.OwnedFd:
        made = unsealed_memfd(fd)
        fcntl.fcntl(made.fileno(), fcntl.F_ADD_SEALS, seals)
        return made

    return make


def opened(name: str) -> Callable[[int], fds.OwnedFd]:
    return lambda fd: fds.OwnedFd(os.open(name, os.O_RDONLY))


HOSTILE: dict[str, Send] = {
    "nothing": lambda connection, header, descriptors: connection.shutdown(socket.SHUT_WR),
    **{f"cut at {part}": cut(part) for part in (0.0, 0.01, 0.5, 1.0)},
    "length too large": with_length(lambda n: 0xFFFFFFFF),
    "length over the limit": with_length(lambda n: (1 << 20) + 1),
    "length one more": with_length(lambda n: n + 1),
    "length one less": with_length(lambda n: n - 1),
    "length 0": with_length(lambda n: 0),
    "no descriptors": with_descriptors(lambda descriptors: []),
    "one descriptor missing": with_descriptors(lambda descriptors: descriptors[:-1]),
    "one descriptor too many": with_descriptors(lambda descriptors: [*descriptors, descriptors[0]]),
    "253 descriptors": with_descriptors(lambda descriptors: (descriptors * 253)[:253]),
    "254 descriptors": in_two_parts(253),
    "descriptors later": in_two_parts(1),
    "descriptors in the other order": with_descriptors(lambda descriptors: descriptors[::-1]),
    "the ledger twice": with_descriptors(lambda descriptors: descriptors[-1:] * len(descriptors)),
    "descriptors with a job": message({"job": {"share_id": 7, "tokens": [1]}}),
    "descriptors with progress": message({"progress": {"share_id": 7, "n_filled": 1, "n_tokens": 2}}),
    "descriptors with an outcome": message({"outcome": {"share_id": 7, "ok": True, "error": None}}),
    "descriptors with nothing": message({}),
    "the region twice": with_descriptors(lambda descriptors: descriptors[:1] * len(descriptors)),
    "size one more": with_header(lambda h: h["regions"][0].update(size=h["regions"][0]["size"] + 1)),
    "size 0": region(size=0),
    "size negative": region(size=-4096),
    "size overflows": region(size=(1 << 63) - 1),
    "size no integer": region(size=4096.5),
    "offset one page": region(offset=4096),
    "offset negative": region(offset=-4096),
    "offset overflows": region(offset=(1 << 63) - 4096),
    "kind unknown": region(kind="memfd2"),
    "kind not here": region(kind="cuda-vmm"),
    "kind a number": region(kind=0),
    "fd out of range": region(fd=7),
    "fd negative": region(fd=-1),
    "fd of the ledger": with_header(lambda h: h["regions"][0].update(fd=h["ledger"]["fd"])),
    "ledger larger": with_header(lambda h: h["ledger"].update(size=h["ledger"]["size"] + 1)),
    "ledger huge": ledger(size=1 << 62),
    "ledger too small": ledger(size=100),
    "regions twice": with_header(lambda h: h["regions"].append(dict(h["regions"][0]))),
    "no regions": with_header(lambda h: h["regions"].clear()),
    "cells of no cache": with_header(lambda h: h["cells"].clear()),
    "cells of two caches": with_header(lambda h: h["cells"].append([])),
    "cells backwards": with_header(lambda h: h["cells"][0].__setitem__(0, [256, 0])),
    "layout": with_header(lambda h: h.update(layout="0" * 64)),
    "tensors": with_header(lambda h: h["regions"][0]["layout"][0].update(offset=4096)),
    "protocol": with_header(lambda h: h.update(protocol=2)),
    "a region that can shrink": with_memory(sealed(fds.F_SEAL_GROW), 0),
    "a region that can grow": with_memory(sealed(fds.F_SEAL_SHRINK), 0),
    "a region without seals": with_memory(unsealed_memfd, 0),
    "a ledger that can shrink": with_memory(sealed(fds.F_SEAL_GROW), -1),
    "a ledger without seals": with_memory(unsealed_memfd, -1),
    "a region cut short": with_memory(lambda fd: shorter_memfd(fd, 4096), 0),
    "a ledger cut short": with_memory(lambda fd: shorter_memfd(fd, 4096), -1),
    "a ledger of zeros": with_memory(lambda fd: fds.memfd_create("kvshare-fault", os.fstat(fd).st_size), -1),
    "a device": with_memory(opened("/dev/zero"), 0),
    "a folder": with_memory(opened("/"), 0),
    "a file": with_memory(opened(sys.executable), 0),
    "a socket": with_memory(lambda fd: fds.OwnedFd(socket.socket().detach()), 0),
}


def hung_up_on(connection: socket.socket) -> None:
    """Read until the peer closes; what it says before is why."""
    connection.settimeout(WAIT_S)
    with contextlib.suppress(ConnectionResetError):  # it had not read everything
        while connection.recv(1 << 16):
            pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_decoder(server: Server, model_path: Path, tokens: list[int], kind: str) -> None:
    """One after the other, at one provider; the server's own share is served after all of them."""
    with ProviderProcess(kind, server.share_dir / f"{kind}.sock", model_path, tokens[:-1]) as provider:
        with shared(server, "hostile.sock") as (header, descriptors):
            before = provider.open_fds()
            for name, send in HOSTILE.items():
                with fds.connect_unix(provider.path) as connection:
                    send(connection, json.loads(encoded(header)), descriptors)
                    hung_up_on(connection)
                    until(lambda: provider.open_fds() <= before or provider.process.poll() is not None)
                    assert provider.process.poll() is None, (name, provider.stderr())
                    assert provider.open_fds() == before, (name, provider.stderr())
            assert server.slot(0, "adopt", {"share_id": header["share_id"], "tokens": tokens})[0] == 409
            maps = Path(f"/proc/{provider.process.pid}/maps").read_text()
            assert "memfd:llama-kv-share" not in maps
            assert "memfd:kvshare" not in maps
        serve(server, provider)
        if kind == "prefill":
            assert provider.wait() == 0
        assert "Traceback" not in provider.stderr()


def test_nobody_but_the_wrong_ones(model: Model) -> None:
    """A provider that serves one share gives up at its deadline, and says what it has seen."""
    with (
        fds.private_directory() as folder,
        fds.listening(folder / "p.sock") as listener,
        fds.connect_unix(folder / "p.sock") as connection,
    ):
        send_framed(connection, b"no JSON", [])
        with (
            pytest.raises(DeadlineExceededError, match="nobody had connected") as caught,
            serving(listener, model, [1], deadline=time.monotonic() + 0.2),
        ):
            pass
        assert str(caught.value.hint).startswith("the last one who connected was refused: header: ")
        assert connection.recv(1) == b""


LIES: dict[str, list[Any]] = {
    "n_ctx": [0, -1, 1.5, (1 << 31) - 256, 1 << 32, "512"],
    "n_batch": [0, 1, 1 << 32, 64.0],
    "n_ubatch": [0, -1],
    "n_seq_max": [0, 99, 257, 1 << 31],
    "type_k": [-1, 3, 99, 255, 65536, 1 << 32],
    "type_v": [-1, 99, 255],
    "flash_attn_type": [-2, 7],
    "rope_scaling_type": [-2, 99],
    "rope_freq_base": [None, "x", -1e300],
    "kv_unified": [2, 0.5],
    "seq_id": [-1, 1, 1 << 32, 0.0],
}


def test_a_decoder_that_lies_about_its_context(server: Server, model_path: Path, tokens: list[int]) -> None:
    """The numbers that llama.cpp is asked for: some of them would end the process."""
    prefix = tokens[:-1]
    cases = [(name, value) for name, values in LIES.items() for value in values]
    with (
        ProviderProcess("provider", server.share_dir / "lies.sock", model_path, prefix) as provider,
        shared(server, "lied.sock") as (header, descriptors),
    ):
        for share_id, (name, value) in enumerate(cases, 1):
            lie = json.loads(encoded(header))
            if name == "n_batch" and value == 1:
                lie["params"]["n_seq_max"] = 2
            lie["params"][name] = value
            lie["share_id"] = share_id
            with (  # a ledger of its own, because a share that fails writes there
                Ledger.create(share_id, lie["layout"], lie["semantics"], capacity=1 << 16) as own,
                fds.connect_unix(provider.path) as connection,
                fds.connect_unix(provider.path) as engine,
            ):
                lie["ledger"]["size"] = own.size
                send_framed(connection, encoded(lie), [*descriptors[:-1], own.fileno()])
                job = wire.JobHeader(share_id=share_id, tokens=tuple(prefix))
                if name == "seq_id" and value != 1:
                    hung_up_on(connection)  # no share at all
                    continue
                fds.send_message(engine, wire.encode(job))
                payload, _ = fds.receive_message(engine, deadline=time.monotonic() + WAIT_S, max_fds=0)
                answer = wire.decode(payload)
                assert isinstance(answer, wire.Outcome), (name, value)
                assert not answer.ok
                assert provider.process.poll() is None, (name, value)
        maps = Path(f"/proc/{provider.process.pid}/maps").read_text()
        assert "memfd:" not in maps
        assert "a bug" not in provider.stderr()


# -- who it is -----------------------------------------------------------------------------------


@contextlib.contextmanager
def open_to_all(server: Server, mode: int) -> Iterator[None]:
    """Let other users into the server's folder, as if its owner had made a mistake."""
    folders = (server.share_dir, server.share_dir.parent)
    for folder in folders:
        folder.chmod(mode)
    try:
        yield
    finally:
        for folder in folders:
            folder.chmod(0o700)


@contextlib.contextmanager
def another_user(code: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run Python code as nobody, with a socket `s` and `path`; it has to end well."""
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); path = sys.argv[1]\n" + code
    with subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", code, str(path)],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        yield child
        assert child.wait(WAIT_S) == 0


@as_root
@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_of_another_user(server: Server, model_path: Path, tokens: list[int], kind: str) -> None:
    """The mode of the socket keeps it out; if somebody has changed that, the provider does."""

    with ProviderProcess(kind, server.share_dir / f"{kind}.sock", model_path, tokens[:-1]) as provider:
        before = provider.open_fds()
        with open_to_all(server, 0o755):
            refused = "try: s.connect(path)\nexcept PermissionError: pass\nelse: sys.exit(1)"
            with another_user(refused, provider.path):
                pass
            provider.path.chmod(0o666)
            closed = "s.connect(path)\ntry: print(s.recv(1))\nexcept ConnectionResetError: print(b'')"
            with another_user(closed, provider.path) as child:
                assert child.stdout is not None
                assert child.stdout.read() == "b''\n"
        until(lambda: provider.open_fds() == before)
        serve(server, provider)


@as_root
def test_a_provider_of_another_user(server: Server, model_path: Path, tokens: list[int]) -> None:
    """It gets no byte and no descriptor of the server."""
    code = """
s.bind(path)
s.listen()
print("up", flush=True)
connection, _ = s.accept()
print(socket.recv_fds(connection, 100, 10)[:2], flush=True)
"""
    server.slot(0, "erase", {})
    path = server.share_dir / "nobody.sock"
    before = open_fds(server)
    with open_to_all(server, 0o1777), another_user(code, path) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        path.chmod(0o666)
        status, answer = share(server, 0, path.name)
        assert (status, answer["error"]["message"]) == (502, "the peer is of another user")
        assert child.stdout.readline() == "(b'', [])\n"
    path.unlink()
    until(lambda: open_fds(server) <= before)
    with ProviderProcess("prefill", server.share_dir / "right.sock", model_path, tokens[:-1]) as provider:
        serve(server, provider)


# -- what a provider can send --------------------------------------------------------------------


def test_a_provider_that_talks_back(server: Server, model_path: Path, tokens: list[int]) -> None:
    """Garbage, and descriptors with its messages: the server takes none of them, and goes on."""
    server.slot(0, "erase", {})
    before = open_fds(server)
    with fds.listening(server.share_dir / "talks.sock") as listener:
        status, offer = share(server, 0, "talks.sock")
        assert status == 200, offer
        done = wire.encode(wire.Outcome(share_id=offer["share_id"], ok=True))
        with fds.accept_unix(listener) as connection, Offer.receive(connection) as received:
            many = [received.ledger.fileno()] * fds.MAX_FDS
            with contextlib.suppress(PeerError, OSError):  # it has hung up, or its socket is full
                for payload in (done, b"no JSON", done * 100) * 20:
                    fds.send_message(connection, payload, many, deadline=time.monotonic() + 0.2)
            assert open_fds(server) < before + fds.MAX_FDS
            answer = server.completion(tokens, id_slot=1)
            assert answer["tokens_predicted"] > 0
            status, _ = server.slot(0, "adopt", {"share_id": offer["share_id"], "tokens": tokens})
            assert status == 409
        assert server.slot(0, "release", {"share_id": offer["share_id"]})[0] == 200
    until(lambda: open_fds(server) <= before)
    with ProviderProcess("prefill", server.share_dir / "right.sock", model_path, tokens[:-1]) as provider:
        serve(server, provider)


# -- what is open --------------------------------------------------------------------------------


def inheritable(pid: int) -> list[str]:
    """Return the memfds and unix sockets of a process that a program it starts would get."""
    unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            target = str(entry.readlink())
            flags = int(Path(f"/proc/{pid}/fdinfo/{entry.name}").read_text().split("flags:")[1].split()[0], 8)
            ours = "memfd:" in target or target.removeprefix("socket:[").removesuffix("]") in unix
            if ours and not flags & O_CLOEXEC:
                found.append(target)
    return found


def n_memfds(pid: int) -> int:
    return sum("memfd:" in os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir())


def test_no_program_inherits_them(server: Server, model_path: Path, tokens: list[int]) -> None:
    """On both sides of a live share, and where nobody has come yet."""
    server.slot(0, "erase", {})
    with ProviderProcess("provider", server.share_dir / "inherit.sock", model_path, tokens) as provider:
        assert inheritable(provider.process.pid) == []
        status, offer = share(server, 0, provider.path.name)
        assert status == 200, offer
        until(lambda: n_memfds(provider.process.pid) >= 2)  # the region and the ledger are there
        assert n_memfds(server.process.pid) >= 2
        assert inheritable(provider.process.pid) == []
        assert inheritable(server.process.pid) == []
        assert server.slot(0, "release", {"share_id": offer["share_id"]})[0] == 200
        os.set_inheritable(fd := os.memfd_create("kvshare-test"), True)
        assert inheritable(os.getpid()) == ["/memfd:kvshare-test (deleted)"]  # the check can tell
        os.close(fd)


# -- who is killed -------------------------------------------------------------------------------

SHARE_ID, STATE, N_FILLED = slice(16, 24), slice(88, 92), slice(96, 104)  # of the ledger


class Watch:
    """The ledger of a server's live share, seen through its descriptor."""

    def __init__(self, server: Server, share_id: int) -> None:
        (found,) = (
            entry
            for entry in Path(f"/proc/{server.process.pid}/fd").iterdir()
            if "memfd:kvshare-ledger" in os.readlink(entry) and self._is_of(entry, share_id)
        )
        self._fd = fds.OwnedFd(os.open(found, os.O_RDONLY))

    @staticmethod
    def _is_of(entry: Path, share_id: int) -> bool:
        with entry.open("rb") as ledger:  # there is one for the next share as well
            return int.from_bytes(ledger.read(SHARE_ID.stop)[SHARE_ID], "little") == share_id

    def _read(self, field: slice) -> int:
        return int.from_bytes(os.pread(self._fd.fileno(), field.stop - field.start, field.start), "little")

    def reached(self, step: str, n_tokens: int) -> bool:
        if self._read(STATE) == LedgerState.COMPLETE:
            return True
        wanted = {"descriptors": 0, "half": n_tokens // 2, "publish": n_tokens + 1}
        return self._read(N_FILLED) >= wanted[step]

    def close(self) -> None:
        self._fd.close()


def long_prompt(model: Model, step: str, kind: str) -> list[int]:
    """Return tokens that take ten graphs."""
    return (model.tokenize(f"{step} {kind}: the light went out, and nobody knew why. ") * 40)[:320]


@contextlib.contextmanager
def at_work(
    server: Server, provider: ProviderProcess, step: str
) -> Iterator[tuple[int, Watch, socket.socket | None]]:
    """Share with a provider and yield when it has come so far: share id, ledger, the job's connection."""
    status, offer = share(server, 0, provider.path.name, n_tokens=len(provider.tokens))
    assert status == 200, (offer, provider.stderr())
    share_id = offer["share_id"]
    with contextlib.closing(Watch(server, share_id)) as watch, provider.job(share_id) as engine:
        until(lambda: watch.reached(step, len(provider.tokens)))
        yield share_id, watch, engine


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["descriptors", "half", "publish"])
def test_a_provider_that_is_killed(
    server: Server, model: Model, model_path: Path, step: str, kind: str
) -> None:
    """The server goes on: what was not vouched for is refused, and the next provider is served."""
    tokens = long_prompt(model, step, kind)
    server.slot(0, "erase", {})
    before = open_fds(server)
    with (
        ProviderProcess(kind, server.share_dir / "dies.sock", model_path, tokens) as provider,
        at_work(server, provider, step) as (share_id, watch, _),
    ):
        provider.process.kill()
        provider.wait()
        complete = watch.reached("publish", len(tokens))
        status, answer = server.slot(0, "adopt", {"share_id": share_id, "tokens": tokens})
        assert status == (200 if complete else 409), answer
        assert complete or step != "publish"
        assert server.slot(0, "release", {"share_id": share_id})[0] == 200
    until(lambda: open_fds(server) <= before)
    answer = server.completion([*tokens, tokens[0]], id_slot=0)
    assert answer["timings"]["cache_n"] == (len(tokens) if complete else 0)
    with ProviderProcess("prefill", server.share_dir / "next.sock", model_path, tokens[:40]) as provider:
        serve(server, provider)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["descriptors", "half", "publish"])
def test_a_server_that_is_killed(program: Path, model: Model, model_path: Path, step: str, kind: str) -> None:
    """Its provider does not crash: the memory stays, at its full size, as long as somebody maps it."""
    tokens = long_prompt(model, step, kind)
    options = ("--ctx-size", "1024", "-np", "1", "-b", "64", "-ub", "32")
    with fds.private_directory() as folder:
        path = folder / "p.sock"
        with ProviderProcess(kind, path, model_path, tokens) as provider, contextlib.ExitStack() as stack:
            with running(program, model_path, *options) as first:
                (first.share_dir / "p.sock").hardlink_to(path)
                with at_work(first, provider, step) as (_, _, engine):
                    first.process.kill()
                    first.process.wait()
                    if engine is not None:
                        answer = outcome(engine)
                        assert (
                            answer.ok if step == "publish" else "the decoder has ended" in str(answer.error)
                        )
                    else:
                        status = provider.wait()
                        assert status == 0 if step == "publish" else status > 0, (
                            provider.stderr()
                        )  # no signal
            assert "Traceback" not in provider.stderr()
            if kind == "provider":
                second = stack.enter_context(running(program, model_path, *options))
                (second.share_dir / "p.sock").hardlink_to(path)
                serve(second, provider)
