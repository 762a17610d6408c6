"""The client of a llama-server's slot actions, against the fake server and against broken ones."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from kvshare import (
    DeadlineExceededError,
    ExpiredError,
    KvshareError,
    LedgerDigestError,
    LedgerIncompleteError,
    LocalProtocolError,
    NoFreeCellsError,
    NotShareableError,
    PeerClosedError,
    PeerRefusedError,
    RemoteProtocolError,
    ReplayError,
    SequenceInUseError,
)
from kvshare.server import ServerBusyError, ServerClient, error_of, is_refusal
from kvshare.testing.http import BOS, FakeServer, fake_template, fake_tokens, serving_once

T = TypeVar("T")
TOKENS = [5 + i for i in range(40)]


def ask(
    server: FakeServer | str, question: Callable[[ServerClient], Awaitable[T]], *, timeout_s: float = 20.0
) -> T:
    """Ask one question, in a loop of its own."""

    async def run() -> T:
        url = server if isinstance(server, str) else server.url
        async with ServerClient(url, timeout_s=timeout_s) as client:
            return await asyncio.wait_for(_coroutine(question(client)), 30)

    return asyncio.run(run())


async def _coroutine(awaitable: Awaitable[T]) -> T:
    return await awaitable


# -- what a server is asked --------------------------------------------------------------------


def test_reads_what_a_server_is(server: FakeServer) -> None:
    assert ask(server, lambda client: client.health())
    assert ask(server, lambda client: client.props())["total_slots"] == 4
    slots = ask(server, lambda client: client.slots())
    assert [slot.id_slot for slot in slots] == [0, 1, 2, 3]
    assert all(slot.idle and slot.n_tokens == 0 and slot.n_ctx == 1024 for slot in slots)


def test_loading_is_not_healthy(server: FakeServer) -> None:
    server.fail["/health"] = (503, "Loading model")
    assert not ask(server, lambda client: client.health())


def test_tokenizes_as_the_server(server: FakeServer) -> None:
    assert ask(server, lambda client: client.tokenize("a b")) == fake_tokens("a b", add_special=True)
    assert ask(server, lambda client: client.tokenize("a", add_special=False))[0] != BOS
    assert ask(server, lambda client: client.tokenize([3, "x", 4]))[0] == 3


def test_templates_as_the_server(server: FakeServer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    prompt = ask(server, lambda client: client.apply_template({"messages": messages}))
    assert prompt == fake_template(messages)


# -- slot actions ------------------------------------------------------------------------------


def test_a_handoff(server: FakeServer, folder: Path) -> None:
    path = str(folder / "p.sock")

    async def handoff(client: ServerClient) -> None:
        with serving_once(path, TOKENS) as wait:
            shared = await client.share(2, path, n_tokens=64)
            assert shared.id_slot == 2
            assert 0 < shared.share_id < 1 << 53
            assert shared.expires_ms == 60_000
            assert len(shared.layout) == len(shared.semantics) == 64
            assert shared.params["seq_id"] == 2
            assert shared.n_prefix == 0
            await asyncio.to_thread(wait)
            adopted = await client.adopt(2, shared.share_id, TOKENS)
        assert (adopted.n_adopted, adopted.n_usable, adopted.bytes_moved) == (40, 40, 0)
        assert [slot.n_tokens for slot in await client.slots()] == [0, 0, 40, 0]
        with pytest.raises(ReplayError):
            await client.adopt(2, shared.share_id, TOKENS)
        await client.release(2, shared.share_id)
        await client.erase(2)
        assert [slot.n_tokens for slot in await client.slots()] == [0, 0, 0, 0]

    ask(server, handoff)


@pytest.mark.parametrize(
    ("tokens", "n_prefix"),
    [
        (None, 40),
        ([*TOKENS, *range(100, 120)], 40),
        ([*TOKENS[:30], *range(100, 120)], 30),
        (TOKENS[:30], 29),
        (TOKENS, 39),
        ([7, 8], 0),
    ],
)
def test_a_slot_that_holds_something(
    server: FakeServer, folder: Path, tokens: list[int] | None, n_prefix: int
) -> None:
    """It keeps what the prompt begins with, whether the share is adopted or not."""
    path = str(folder / "p.sock")
    whole = [*TOKENS, 50] if tokens is None else tokens

    async def handoff(client: ServerClient) -> None:
        with serving_once(path, TOKENS) as wait:
            first = await client.share(2, path)
            await asyncio.to_thread(wait)
            await client.adopt(2, first.share_id, TOKENS)
        with serving_once(path, whole):
            shared = await client.share(2, path, tokens=tokens)
            assert shared.n_prefix == n_prefix
            await client.release(2, shared.share_id)
        assert server.slot_tokens(2) == whole[:n_prefix]
        with serving_once(path, whole) as wait:
            shared = await client.share(2, path, tokens=tokens)
            assert shared.n_prefix == n_prefix
            await asyncio.to_thread(wait)
            assert (await client.adopt(2, shared.share_id, whole)).n_adopted == len(whole)
        assert server.slot_tokens(2) == whole

    ask(server, handoff)


def test_the_contracts_refusals(server: FakeServer, folder: Path) -> None:
    path = str(folder / "p.sock")

    async def refusals(client: ServerClient) -> None:
        with pytest.raises(PeerRefusedError, match="nobody listens"):
            await client.share(0, path)
        with pytest.raises(LocalProtocolError, match="not directly inside"):
            await client.share(0, "/nowhere/p.sock")
        with pytest.raises(LocalProtocolError):
            await client.share(9, path)
        with pytest.raises(ReplayError):
            await client.adopt(0, 7, TOKENS)
        with serving_once(path, TOKENS[:-1]) as wait:
            shared = await client.share(0, path)
            await asyncio.to_thread(wait)
            with pytest.raises(LedgerIncompleteError):
                await client.adopt(0, shared.share_id, TOKENS)
        with serving_once(path, TOKENS) as wait:
            shared = await client.share(0, path)
            await asyncio.to_thread(wait)
            with pytest.raises(LedgerDigestError):
                await client.adopt(0, shared.share_id, TOKENS[::-1])

    ask(server, refusals)


def test_a_server_that_does_not_share() -> None:
    with FakeServer(directory=None) as server, pytest.raises(NotShareableError, match="--kv-share"):
        ask(server, lambda client: client.share(0, "/x/p.sock"))


def test_api_key(folder: Path) -> None:
    async def both(url: str) -> None:
        async with ServerClient(url) as client:
            with pytest.raises(PeerRefusedError, match="API Key"):
                await client.slots()
            assert await client.with_headers({"Authorization": "Bearer secret"}).slots()
            assert await client.with_headers({"X-Api-Key": "secret"}).slots()
        async with ServerClient(url, api_key="secret") as client:
            assert await client.slots()

    with FakeServer(directory=folder, api_key="secret") as server:
        asyncio.run(both(server.url))


# -- errors ------------------------------------------------------------------------------------


def body(message: str, kind: str | None = None) -> bytes:
    return json.dumps({"error": {"message": message, **({"kind": kind} if kind else {})}}).encode()


@pytest.mark.parametrize(
    ("status", "answer", "expected"),
    [
        (400, body("tokens must be a list"), LocalProtocolError),
        (400, body("share 7 is unknown"), ReplayError),
        (400, body("share_id 7 was already used"), ReplayError),
        (400, body("what", "unknown_share"), ReplayError),
        (401, body("Invalid API Key"), PeerRefusedError),
        (409, body("slot 0 is busy"), SequenceInUseError),
        (409, body("slot 0 changed since it was shared"), SequenceInUseError),
        (409, body("no free cells"), NoFreeCellsError),
        (409, body("the ledger is incomplete: filling at 3 tokens"), LedgerIncompleteError),
        (409, body("sample digest differs"), LedgerDigestError),
        (409, body("what", "no_free_cells"), NoFreeCellsError),
        (409, body("what", "ledger_digest"), LedgerDigestError),
        (409, body("what", "ledger_incomplete"), LedgerIncompleteError),
        (409, body("what", "slot_in_use"), SequenceInUseError),
        (409, body("what", "a later kind"), SequenceInUseError),
        (410, body("expired"), ExpiredError),
        (501, body("a recurrent cache on a GPU"), NotShareableError),
        (502, body("nobody listens"), PeerRefusedError),
        (503, body("Loading model"), ServerBusyError),
        (504, body("deadline"), DeadlineExceededError),
        (500, body("oops"), RemoteProtocolError),
        (302, b"", RemoteProtocolError),
        (400, b"", LocalProtocolError),
        (400, b'{"error": "plain text"}', LocalProtocolError),
        (409, b"<html>", SequenceInUseError),
        (409, b'{"error": {"message": 7}}', SequenceInUseError),
        (409, b"[" * 100_000, SequenceInUseError),
    ],
)
def test_status_becomes_error(status: int, answer: bytes, expected: type[KvshareError]) -> None:
    error = error_of(status, answer, "share")
    assert type(error) is expected
    assert str(error).startswith("share: ")


def test_the_servers_reason_is_in_the_error() -> None:
    assert "on a GPU" in str(error_of(501, body("a recurrent cache on a GPU")))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ExpiredError(""), True),
        (LedgerDigestError(""), True),
        (PeerRefusedError(""), True),
        (PeerClosedError(""), False),
        (DeadlineExceededError(""), False),
    ],
)
def test_refusals_are_told_from_failures(error: KvshareError, expected: bool) -> None:
    assert is_refusal(error) is expected


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://", "http://x?y", "unix:/x"])
def test_bad_url(url: str) -> None:
    with pytest.raises(LocalProtocolError):
        ServerClient(url)


# -- broken servers ----------------------------------------------------------------------------


class Scripted:
    """Answers every connection with the same bytes, and hangs up."""

    def __init__(self, answer: bytes | None) -> None:
        self.answer = answer
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.held: list[socket.socket] = []

    def run(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            self.held.append(connection)
            if self.answer is not None:
                connection.recv(65536)
                connection.sendall(self.answer)
                connection.close()

    def __enter__(self) -> Scripted:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
        for connection in self.held:
            connection.close()


def http(text: bytes, length: int | None = None) -> bytes:
    n = len(text) if length is None else length
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % n + text


def answer_to_share(**changed: object) -> bytes:
    good = {
        "id_slot": 0,
        "share_id": 7,
        "expires_ms": 1,
        "t_us": 1,
        "layout": "",
        "semantics": "",
        "params": {},
    }
    return json.dumps({**good, **changed}).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"nonsense",
        b"[]",
        b"null",
        b"{}",
        answer_to_share(share_id="7"),
        answer_to_share(t_us=True),
        answer_to_share(params=1),
        answer_to_share(layout=None),
        b"[" * 100_000,
    ],
)
def test_an_answer_that_is_none(text: bytes) -> None:
    with Scripted(http(text)) as server, pytest.raises(RemoteProtocolError):
        ask(server.url, lambda client: client.share(0, "/x"))


@pytest.mark.parametrize(
    "text", [b"{}", b"[7]", b'[{"id": "0"}]', b'[{"id": 0}]', b'[{"id": 0, "n_ctx": 1.5}]']
)
def test_slots_that_are_none(text: bytes) -> None:
    with Scripted(http(text)) as server, pytest.raises(RemoteProtocolError):
        ask(server.url, lambda client: client.slots())


@pytest.mark.parametrize("text", [b"{}", b'{"tokens": 7}', b'{"tokens": [1, "2"]}', b'{"tokens": [true]}'])
def test_tokens_that_are_none(text: bytes) -> None:
    with Scripted(http(text)) as server, pytest.raises(RemoteProtocolError):
        ask(server.url, lambda client: client.tokenize("x"))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nConte", http(b"{", length=100)])
def test_a_server_that_dies(answer: bytes) -> None:
    with Scripted(answer) as server, pytest.raises(PeerClosedError):
        ask(server.url, lambda client: client.slots())


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(PeerClosedError, match="no server"):
        ask(url, lambda client: client.slots())


def test_a_server_that_never_answers() -> None:
    with Scripted(None) as server, pytest.raises(DeadlineExceededError):
        ask(server.url, lambda client: client.slots(), timeout_s=0.2)
