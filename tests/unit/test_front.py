"""The front over real sockets: what is handed over, what is only forwarded, and that it is the same."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import io
import json
import math
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshare.engine import Engine, ProviderClient
from kvshare.front import ROUTES, Completion, Front, NotUnderstoodError, Tail, serve
from kvshare.policy import Policy, Reason, Record, Timings
from kvshare.server import ServerClient
from kvshare.testing.http import FakeServer, FakeService
from kvshare.testing.strategies import json_values

TEXT = " ".join(f"word{i}" for i in range(200))
COMPLETION = {"prompt": TEXT, "n_predict": 4}
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 4}


class Client:
    """A client of a front."""

    def __init__(self, url: str, session: aiohttp.ClientSession, front: Front) -> None:
        self.url = url
        self.session = session
        self.front = front
        self.records: list[Record] = []

    async def post(self, path: str, body: Any, **options: Any) -> tuple[Answer, bytes]:
        return await self.ask("POST", path, data=json.dumps(body), **options)

    async def ask(self, method: str, path: str, **options: Any) -> tuple[Answer, bytes]:
        async with self.session.request(method, self.url + path, **options) as answer:
            return answer, await answer.read()

    async def metrics(self) -> dict[str, float]:
        _, text = await self.ask("GET", "/metrics")
        lines = [line.rsplit(" ", 1) for line in text.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}


Answer = aiohttp.ClientResponse


@contextlib.asynccontextmanager
async def front_of(
    server: str, provider: Path, *, threshold: int = 100, timeout_s: float = 10, **options: Any
) -> AsyncIterator[Client]:
    async with ServerClient(server) as client:
        engine = Engine(
            client, ProviderClient(provider), Policy(threshold=threshold), prefill_timeout_s=timeout_s
        )
        records: list[Record] = []
        front = Front(engine, client, report=lambda _, record: records.append(record), **options)
        runner, url = await serve(front, "127.0.0.1", 0)
        try:
            async with aiohttp.ClientSession(auto_decompress=False) as session:
                made = Client(url, session, front)
                made.records = records
                yield made
        finally:
            await runner.cleanup()


def drive(
    server: FakeServer, folder: Path, work: Callable[[Client], Awaitable[None]], **options: Any
) -> None:
    async def main() -> None:
        async with front_of(server.url, folder / "p.sock", **options) as client:
            await work(client)

    asyncio.run(asyncio.wait_for(main(), 30))


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not happen in time")


# -- paths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [("/completion", COMPLETION), ("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_handed_over(
    server: FakeServer, service: FakeService, folder: Path, path: str, body: dict[str, Any], stream: bool
) -> None:
    body = {**body, "stream": stream}

    async def work(client: Client) -> None:
        async with client.session.post(server.url + path, json=body) as plain:
            expected = await plain.read()
        server.restart()
        answer, found = await client.post(path, body)
        assert answer.status == 200
        assert answer.headers["X-Kvshare-Path"] == "handoff"
        assert answer.headers["X-Kvshare-Reason"] == "handed-over"
        assert answer.headers["Content-Type"] == plain.headers["Content-Type"]
        n_handed = service.jobs[0][1]
        timings = f'"cache_n": {n_handed}, "prompt_n": 1, '.encode()
        assert timings in found
        # the same answer but for its timings: the adopted rows are right
        assert (
            found.replace(timings, b"").split(b'"prompt_ms"')[0]
            == expected.replace(f'"cache_n": 0, "prompt_n": {n_handed + 1}, '.encode(), b"").split(
                b'"prompt_ms"'
            )[0]
        )
        assert client.records[0].n_reused == n_handed

    drive(server, folder, work)


def test_the_last_token_is_left(server: FakeServer, service: FakeService, folder: Path) -> None:
    async def work(client: Client) -> None:
        tokens = list(range(10, 210))
        answer, _ = await client.post("/completion", {**COMPLETION, "prompt": tokens})
        assert answer.headers["X-Kvshare-Path"] == "handoff"
        assert service.jobs[0][1] == 199
        assert server.slot_tokens(0)[:200] == tokens

    drive(server, folder, work)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/completion", {"prompt": "short"}, "local short"),
        ("/completion", {**COMPLETION, "id_slot": 2}, "forwarded own-slot"),
        ("/completion", {**COMPLETION, "id_slot": -1}, "handoff handed-over"),
        ("/completion", {**COMPLETION, "cache_prompt": False}, "forwarded no-cache"),
        ("/completion", {**COMPLETION, "lora": [{"id": 0}]}, "forwarded adapters"),
        ("/completion", {**COMPLETION, "n": 2}, "forwarded several-answers"),
        ("/completion", {"prompt": [TEXT, TEXT]}, "forwarded several-prompts"),
        ("/completion", {"prompt": [TEXT]}, "handoff handed-over"),
        ("/completion", {"prompt": [5, TEXT, 7]}, "handoff handed-over"),
        ("/completion", {"prompt": [[1, 2]]}, "forwarded several-prompts"),
        ("/completion", {"prompt": {"prompt_string": TEXT, "multimodal_data": []}}, "forwarded multimodal"),
        ("/completion", {"prompt": [1, -1]}, "forwarded not-understood"),
        ("/completion", {"prompt": [1, 1.5]}, "forwarded not-understood"),
        ("/completion", {"prompt": []}, "forwarded not-understood"),
        ("/completion", {"prompt": None}, "forwarded not-understood"),
        ("/completion", {}, "forwarded not-understood"),
        ("/completion", {**COMPLETION, "temperature": math.inf}, "forwarded not-understood"),
        ("/v1/chat/completions", {**CHAT, "n": 1}, "handoff handed-over"),
        ("/v1/chat/completions", {**CHAT, "n": 3}, "forwarded several-answers"),
        ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "handoff handed-over"),
        ("/v1/chat/completions", {"messages": []}, "forwarded not-understood"),
        ("/v1/chat/completions", {"messages": ["x"]}, "forwarded not-understood"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]},
            "handoff handed-over",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "forwarded multimodal",
        ),
    ],
)
def test_what_is_understood(
    server: FakeServer, service: FakeService, folder: Path, path: str, body: dict[str, Any], reason: str
) -> None:
    async def work(client: Client) -> None:
        answer, _ = await client.post(path, body)
        said = f"{answer.headers['X-Kvshare-Path']} {answer.headers['X-Kvshare-Reason'].split(':')[0]}"
        assert said == reason
        assert [f"POST {path}"] == [each for each in server.requests if each.endswith(path)]

    drive(server, folder, work)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"7", b"[" * 100_000])
def test_bodies_that_are_none_are_the_servers_business(server: FakeServer, folder: Path, body: bytes) -> None:
    async def work(client: Client) -> None:
        answer, text = await client.ask("POST", "/completion", data=body)
        assert answer.status == 400
        assert answer.headers["X-Kvshare-Path"] == "forwarded"
        assert answer.headers["X-Kvshare-Reason"].startswith("not-understood")
        assert b"no JSON" in text or b"no object" in text

    drive(server, folder, work)


def test_a_second_request_is_cached(server: FakeServer, service: FakeService, folder: Path) -> None:
    async def work(client: Client) -> None:
        await client.post("/completion", COMPLETION)
        answer, text = await client.post("/completion", COMPLETION)
        assert answer.headers["X-Kvshare-Reason"].startswith("cached")
        assert json.loads(text)["timings"]["prompt_n"] == 1

    drive(server, folder, work)


@pytest.mark.parametrize("status", [400, 500])
def test_a_request_that_fails_is_not_cached(
    server: FakeServer, service: FakeService, folder: Path, status: int
) -> None:
    async def work(client: Client) -> None:
        client.front.engine.policy.max_pause_s = 0
        service.error = "no"
        server.fail["/completion"] = (status, "no")
        answer, _ = await client.post("/completion", COMPLETION)
        assert answer.status == status
        server.fail.clear()
        service.error = None
        answer, _ = await client.post("/completion", COMPLETION)
        assert answer.headers["X-Kvshare-Reason"] == "handed-over"

    drive(server, folder, work)


def test_slots_are_reused(server: FakeServer, service: FakeService, folder: Path) -> None:
    """More prompts than slots: those that the engine filled are emptied, the oldest first."""

    async def work(client: Client) -> None:
        for i in range(server.n_slots + 2):
            body = {**COMPLETION, "prompt": [5 + i, *range(10, 210)]}
            answer, _ = await client.post("/completion", body)
            assert answer.headers["X-Kvshare-Path"] == "handoff", answer.headers["X-Kvshare-Reason"]
        assert [server.slot_tokens(i)[0] for i in range(4)] == [9, 10, 7, 8]

    drive(server, folder, work)


# -- conversations -----------------------------------------------------------------------------


class Chat:
    """A conversation: the answers are part of the next turn's messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages: list[dict[str, str]] = []
        self.answers: list[str] = []

    def body(self, n_words: int) -> dict[str, Any]:
        """Return the body of the next turn."""
        words = " ".join(f"{self.name}{len(self.messages)}.{i}" for i in range(n_words))
        self.messages.append({"role": "user", "content": words})
        return {"messages": self.messages, "max_tokens": 8}

    def take(self, text: bytes) -> dict[str, int]:
        """Take the answer; return its timings."""
        answer = json.loads(text)
        self.messages.append(answer["choices"][0]["message"])
        self.answers.append(self.messages[-1]["content"])
        timings: dict[str, int] = answer["timings"]
        return timings


def plain_answers(folder: Path, lengths: Sequence[int], name: str) -> list[str]:
    """Return what a server without an engine answers."""

    async def work() -> list[str]:
        chat = Chat(name)
        async with aiohttp.ClientSession() as session:
            for n_words in lengths:
                async with session.post(
                    server.url + "/v1/chat/completions", json=chat.body(n_words)
                ) as answer:
                    chat.take(await answer.read())
        return chat.answers

    with FakeServer(directory=folder) as server:
        return asyncio.run(asyncio.wait_for(work(), 30))


@pytest.mark.parametrize("clears_idle", [False, True])
def test_a_conversation(server: FakeServer, service: FakeService, folder: Path, clears_idle: bool) -> None:
    server.clears_idle = clears_idle
    lengths = [120, 110, 5, 110, 7, 9, 130]
    expected = plain_answers(folder, lengths, "u")

    async def work(client: Client) -> None:
        chat = Chat("u")
        n_held = 0
        for n_words in lengths:
            answer, text = await client.post("/v1/chat/completions", chat.body(n_words))
            record, timings = client.records[-1], chat.take(text)
            n_tokens = timings["cache_n"] + timings["prompt_n"]
            assert record.id_slot == 0
            if n_words > 100:
                assert answer.headers["X-Kvshare-Path"] == "handoff", answer.headers["X-Kvshare-Reason"]
                assert timings["cache_n"] == record.n_handed == n_tokens - 1
                assert record.n_prefix == n_held
                assert service.prefilled[-1] == n_tokens - 1 - n_held
            else:
                assert answer.headers["X-Kvshare-Reason"].startswith("cached")
                assert timings["cache_n"] == n_held
            n_held = n_tokens + 7
        assert chat.answers == expected
        assert service.n_done == 4
        found = await client.metrics()
        assert found['kvshare_prompt_tokens_total{kind="handed_over"}'] == sum(service.prefilled)
        assert found['kvshare_prompt_tokens_total{kind="continued"}'] == sum(
            record.n_prefix for record in client.records
        )

    drive(server, folder, work)
    assert service.refused == []


@pytest.mark.parametrize("clears_idle", [False, True])
def test_several_conversations(
    server: FakeServer, service: FakeService, folder: Path, clears_idle: bool
) -> None:
    """Each keeps what it has, also where a server clears idle slots."""
    server.clears_idle = clears_idle
    names, lengths = ("a", "b", "c"), [120, 110, 6, 130]
    expected = {name: plain_answers(folder, lengths, name) for name in names}

    async def work(client: Client) -> None:
        chats = [Chat(name) for name in names]
        n_held = dict.fromkeys(names, 0)
        for n_words in lengths:
            for chat in chats:
                _, text = await client.post("/v1/chat/completions", chat.body(n_words))
                timings = chat.take(text)
                n_tokens = timings["cache_n"] + timings["prompt_n"]
                if n_words > 100:
                    assert service.prefilled[-1] == n_tokens - 1 - n_held[chat.name]
                    assert timings["prompt_n"] == 1
                else:
                    assert timings["cache_n"] == n_held[chat.name]
                n_held[chat.name] = n_tokens + 7
        assert {chat.name: chat.answers for chat in chats} == expected

    drive(server, folder, work)
    assert service.n_done == 9


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/completion"])
def test_a_conversation_that_began_without_a_handoff(
    server: FakeServer, service: FakeService, folder: Path, path: str
) -> None:
    """Its slot is found all the same, whether the answer names it or not."""

    async def work(client: Client) -> None:
        service_path, client.front.engine.prefiller.socket = service.path, str(folder / "absent.sock")
        prompt = TEXT

        def body() -> dict[str, Any]:
            messages = [{"role": "user", "content": prompt}]
            return {"messages": messages, "max_tokens": 8} if "chat" in path else {"prompt": prompt}

        await client.post("/completion", {"prompt": "another one", "n_predict": 1})
        answer, text = await client.post(path, body())
        assert answer.headers["X-Kvshare-Reason"].startswith("provider-absent")
        client.front.engine.prefiller.socket = service_path
        client.front.engine.policy._paused_until = 0
        (held,) = (slot for slot in server._slots if len(slot.tokens) > 200)
        if "chat" not in path:
            prompt += " " + json.loads(text)["content"]
        prompt += " " + " ".join(f"more{i}" for i in range(120))
        answer, _ = await client.post(path, body())
        assert answer.headers["X-Kvshare-Path"] == "handoff", answer.headers["X-Kvshare-Reason"]
        assert client.records[-1].id_slot == held.id_slot
        assert client.records[-1].n_prefix >= 200

    drive(server, folder, work)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_began_with_a_word(
    server: FakeServer, service: FakeService, folder: Path, stream: bool
) -> None:
    """It was too short to be looked at before it ran; it is known all the same."""

    async def work(client: Client) -> None:
        await client.post("/completion", {"prompt": "another one", "n_predict": 3})
        body = {"prompt": "hello there", "n_predict": 8, "stream": stream}
        answer, _ = await client.post("/completion", body)
        assert answer.headers["X-Kvshare-Reason"] == "short"
        (held,) = (slot for slot in server._slots if len(slot.tokens) == 10)
        prompt = [*held.tokens, 5, *range(10, 210)]
        await client.post("/completion", {"prompt": prompt})
        assert (client.records[-1].id_slot, client.records[-1].n_prefix) == (held.id_slot, 10)
        assert service.prefilled == [200]

    drive(server, folder, work)


def test_a_turn_whose_provider_dies_keeps_its_history(
    server: FakeServer, service: FakeService, folder: Path
) -> None:
    lengths = [120, 110, 110]
    expected = plain_answers(folder, lengths, "u")

    async def work(client: Client) -> None:
        chat = Chat("u")
        for i, n_words in enumerate(lengths):
            service.die_at = 16 if i == 1 else None
            client.front.engine.policy._paused_until = 0
            answer, text = await client.post("/v1/chat/completions", chat.body(n_words))
            record, timings = client.records[-1], chat.take(text)
            assert record.id_slot == 0
            if i == 1:
                assert answer.headers["X-Kvshare-Reason"].startswith("provider-died")
                assert timings["cache_n"] == record.n_prefix > 120
        assert chat.answers == expected
        assert service.prefilled[-1] < 130

    drive(server, folder, work)


# -- failures ----------------------------------------------------------------------------------


def failing_service(service: FakeService, name: str) -> None:
    if name == "provider-died":
        service.die_at = 64
    elif name == "provider-failed":
        service.error = "line\r\none: \u00e9"
    elif name == "provider-slow":
        service.step_s = 5.0
    else:
        service.before_complete = lambda provider: provider.tokens.reverse()


@pytest.mark.parametrize("name", ["provider-died", "provider-failed", "provider-slow", "adopt-refused"])
def test_a_failure_is_no_failure_for_the_client(
    server: FakeServer, service: FakeService, folder: Path, name: str
) -> None:
    failing_service(service, name)

    async def work(client: Client) -> None:
        answer, text = await client.post("/completion", COMPLETION)
        assert answer.status == 200
        assert answer.headers["X-Kvshare-Path"] == "local"
        assert answer.headers["X-Kvshare-Reason"].startswith(name + ": ")
        assert json.loads(text)["timings"]["prompt_n"] == 201
        assert server.n_live_shares == 0
        assert (await client.metrics())[f'kvshare_fallbacks_total{{reason="{name}"}}'] == 1

    drive(server, folder, work, timeout_s=0.2)


def test_no_provider(server: FakeServer, folder: Path) -> None:
    async def work(client: Client) -> None:
        answer, _ = await client.post("/completion", COMPLETION)
        assert (answer.status, answer.headers["X-Kvshare-Path"]) == (200, "local")
        assert answer.headers["X-Kvshare-Reason"].startswith("provider-absent: ")

    drive(server, folder, work)


def test_a_server_that_does_not_share(folder: Path, service: FakeService) -> None:
    async def work(client: Client) -> None:
        answer, _ = await client.post("/completion", COMPLETION)
        assert (answer.status, answer.headers["X-Kvshare-Path"]) == (200, "local")
        assert answer.headers["X-Kvshare-Reason"].startswith("not-shareable: ")
        assert (await client.metrics())['kvshare_refusals_total{reason="not-shareable"}'] == 1

    with FakeServer(directory=None) as server:
        drive(server, folder, work)


@pytest.mark.parametrize("route", ["/tokenize", "/apply-template", "/slots"])
def test_a_server_without_a_route(server: FakeServer, service: FakeService, folder: Path, route: str) -> None:
    server.fail[route] = (501, "This server does not support it")

    async def work(client: Client) -> None:
        answer, _ = await client.post("/v1/chat/completions", CHAT)
        assert answer.status == 200
        assert "does not support it" in answer.headers["X-Kvshare-Reason"]

    drive(server, folder, work)


def test_no_server(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def main() -> None:
        async with front_of(url, folder / "p.sock") as client:
            for path in ("/completion", "/health"):
                answer, text = await client.post(path, COMPLETION)
                assert answer.status == 502
                assert "does not answer" in json.loads(text)["error"]["message"]

    asyncio.run(asyncio.wait_for(main(), 30))


def test_an_answer_that_breaks_off_breaks_off(folder: Path) -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        upstream = await asyncio.start_server(half, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
        async with front_of(url, folder / "p.sock") as client:
            with pytest.raises(aiohttp.ClientPayloadError):
                await client.ask("GET", "/x")
        upstream.close()
        await upstream.wait_closed()

    asyncio.run(asyncio.wait_for(main(), 30))


# -- streaming and disconnects -----------------------------------------------------------------


def test_streams_are_not_buffered(server: FakeServer, service: FakeService, folder: Path) -> None:
    server.chunk_delay_s = 0.1

    async def work(client: Client) -> None:
        body = json.dumps({**COMPLETION, "n_predict": 6, "stream": True})
        times: list[float] = []
        async with client.session.post(client.url + "/completion", data=body) as answer:
            assert answer.headers["X-Kvshare-Path"] == "handoff"
            async for chunk in answer.content.iter_any():
                assert chunk.startswith(b"data: ")
                times.append(time.monotonic())
        assert len(times) == 7  # a part is passed on when it comes
        assert times[-1] - times[0] > 0.4

    drive(server, folder, work)


def test_a_disconnect_ends_the_stream(server: FakeServer, service: FakeService, folder: Path) -> None:
    server.chunk_delay_s = 0.05

    async def work(client: Client) -> None:
        body = json.dumps({**COMPLETION, "n_predict": 500, "stream": True})
        async with client.session.post(client.url + "/completion", data=body) as answer:
            await answer.content.readany()
            answer.close()
        await until(lambda: server.n_cancelled == 1)
        await until(lambda: not client.front.engine._reserved)

    drive(server, folder, work)


def test_a_disconnect_ends_the_handoff(server: FakeServer, service: FakeService, folder: Path) -> None:
    service.step_s = 1.0

    async def work(client: Client) -> None:
        asking = asyncio.ensure_future(client.post("/completion", COMPLETION))
        await until(lambda: len(service.jobs) == 1)
        asking.cancel()
        await until(lambda: service.n_cancelled == 1)
        await until(lambda: server.n_live_shares == 0)
        assert "POST /completion" not in server.requests

    drive(server, folder, work)


# -- forwarding --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_forwarded_as_it_is(server: FakeServer, folder: Path, method: str) -> None:
    path = "/echo/a%2Fb/%C3%A9;c?q=1&q=a%20b+c&empty="
    body = bytes(range(256)) if method in ("POST", "PUT", "PATCH") else None
    headers = {
        "X-Own": "1",
        "Authorization": "Bearer abc",
        "Cookie": "c=d",
        "Accept-Encoding": "x-none",
        "User-Agent": "test",
        "Content-Type": "application/x-test",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "no",
        "TE": "trailers",
    }

    async def work(client: Client) -> None:
        from yarl import URL

        async with client.session.request(
            method, URL(client.url + path, encoded=True), data=body, headers=headers
        ) as answer:
            found = json.loads(await answer.read())
        assert found["method"] == method
        assert found["path"] == path
        assert bytes.fromhex(found["body"]) == (body or b"")
        arrived = {name.lower(): value for name, value in found["headers"]}
        for name in ("X-Own", "Authorization", "Cookie", "Accept-Encoding", "User-Agent", "Content-Type"):
            assert arrived[name.lower()] == headers[name]
        assert "x-hop" not in arrived
        assert "te" not in arrived
        assert arrived["host"] == server.url.removeprefix("http://")
        assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
        assert answer.headers["X-Own"] == "own"
        assert answer.headers["X-Kvshare-Path"] == "forwarded"
        assert answer.headers["X-Kvshare-Reason"] == "route"

    drive(server, folder, work)


def test_nothing_is_added_to_a_request(server: FakeServer, folder: Path) -> None:
    """A raw client that sends no header but Host: the server gets none that concerns the request."""

    async def work(client: Client) -> None:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /echo/x HTTP/1.1\r\nHost: y\r\nConnection: close\r\n\r\n")
        text = await reader.read()
        writer.close()
        await writer.wait_closed()
        found = json.loads(text.partition(b"\r\n\r\n")[2])
        assert [name for name, _ in found["headers"]] == ["Host", "Connection"]

    drive(server, folder, work)


@pytest.mark.parametrize("target", ["@127.0.0.1:1/x", "http://127.0.0.1:1/x", "*", "x", ":80/x"])
def test_a_target_that_is_no_path(server: FakeServer, folder: Path, target: str) -> None:
    """It cannot make the front ask another server."""

    async def work(client: Client) -> None:
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"OPTIONS {target} HTTP/1.1\r\nHost: y\r\nConnection: close\r\n\r\n".encode())
        assert (await reader.read()).split()[1] in (b"400", b"404")
        writer.close()
        await writer.wait_closed()
        assert server.requests == []

    drive(server, folder, work)


@pytest.mark.parametrize("body", [b"", b"x", b"x" * 3_000_000])
def test_bodies_of_any_size(server: FakeServer, folder: Path, body: bytes) -> None:
    async def work(client: Client) -> None:
        _, text = await client.ask(
            "POST", "/echo/x", data=io.BytesIO(body), headers={"Content-Length": str(len(body))}
        )
        found = json.loads(text)
        assert bytes.fromhex(found["body"]) == body
        arrived = {name.lower(): value for name, value in found["headers"]}
        assert arrived["content-length"] == str(len(body))
        assert "transfer-encoding" not in arrived

    drive(server, folder, work)


def test_a_compressed_body_stays_compressed(server: FakeServer, service: FakeService, folder: Path) -> None:
    compressed = gzip.compress(json.dumps(COMPLETION).encode())

    async def work(client: Client) -> None:
        # the fake server would unpack it, as aiohttp does: what arrives is right if it can
        answer, text = await client.ask(
            "POST", "/completion", data=compressed, headers={"Content-Encoding": "gzip"}
        )
        assert answer.status == 200
        assert answer.headers["X-Kvshare-Path"] == "forwarded"
        assert json.loads(text)["timings"]["prompt_n"] == 201

    drive(server, folder, work)


@pytest.mark.parametrize("status", [201, 301, 404, 418, 500])
def test_any_status_is_passed_on(server: FakeServer, folder: Path, status: int) -> None:
    async def work(client: Client) -> None:
        answer, _ = await client.ask("GET", f"/echo/x?status={status}", allow_redirects=False)
        assert answer.status == status

    drive(server, folder, work)


def test_head_has_no_body(server: FakeServer, folder: Path) -> None:
    async def work(client: Client) -> None:
        answer, text = await client.ask("HEAD", "/health")
        assert (answer.status, text) == (200, b"")
        assert answer.headers["Content-Length"] == "16"

    drive(server, folder, work)


def test_too_large_a_body_is_refused(server: FakeServer, folder: Path) -> None:
    async def work(client: Client) -> None:
        for path in ("/completion", "/echo/x"):
            answer, _ = await client.ask("POST", path, data=b"x" * 5000)
            assert answer.status == 413
        assert server.requests == []

    drive(server, folder, work, max_body_nbytes=4096)


def test_credentials_are_the_clients(folder: Path, service: FakeService) -> None:
    """Who may not use the server cannot make it share either."""

    async def work(client: Client) -> None:
        answer, _ = await client.post("/completion", COMPLETION)
        assert answer.status == 401
        assert service.n_shares == 0
        for headers in ({"Authorization": "Bearer secret"}, {"X-Api-Key": "secret"}):
            guarded.restart()
            client.front.engine.memory.forget()
            answer, _ = await client.post("/completion", COMPLETION, headers=headers)
            assert (answer.status, answer.headers["X-Kvshare-Path"]) == (200, "handoff")

    with FakeServer(directory=folder, api_key="secret") as guarded:
        drive(guarded, folder, work)


def test_a_key_for_clients_that_have_none(folder: Path, service: FakeService) -> None:
    async def work(client: Client) -> None:
        answer, _ = await client.post("/completion", COMPLETION)
        assert (answer.status, answer.headers["X-Kvshare-Path"]) == (200, "handoff")
        answer, _ = await client.post("/completion", COMPLETION, headers={"Authorization": "Bearer x"})
        assert answer.status == 401

    with FakeServer(directory=folder, api_key="secret") as server:
        drive(server, folder, work, api_key="secret")


# -- metrics -----------------------------------------------------------------------------------


def test_metrics(server: FakeServer, service: FakeService, folder: Path) -> None:
    async def work(client: Client) -> None:
        before = await client.metrics()
        assert before["kvshare_handoffs_total"] == 0
        assert before['kvshare_fallbacks_total{reason="provider-died"}'] == 0
        await client.post("/completion", COMPLETION)
        await client.post("/completion", {"prompt": [7, 8]})
        await client.ask("GET", "/health")
        found = await client.metrics()
        assert found["kvshare_handoffs_total"] == 1
        assert found['kvshare_requests_total{path="handoff",reason="handed-over"}'] == 1
        assert found['kvshare_requests_total{path="local",reason="short"}'] == 1
        assert found['kvshare_requests_total{path="forwarded",reason="route"}'] == 1
        assert found['kvshare_prompt_tokens_total{kind="handed_over"}'] == 200
        assert found['kvshare_prompt_tokens_total{kind="reused"}'] == 200
        assert found["kvshare_handoffs_reused_short_total"] == 0
        for name in ("share", "prefill", "adopt"):
            assert found[f"kvshare_{name}_seconds_count"] == 1
            assert found[f'kvshare_{name}_seconds_bucket{{le="+Inf"}}'] == 1
        assert found["kvshare_first_byte_seconds_count"] == 2
        assert found["kvshare_request_seconds_count"] == 2
        assert not [name for name in found if not name.startswith("kvshare_")]
        assert "GET /metrics" not in server.requests

    drive(server, folder, work)


def test_local_speed_is_learned_from_answers(server: FakeServer, folder: Path) -> None:
    server.local_ms_per_token = 0.5

    async def work(client: Client) -> None:
        await client.post("/completion", {**COMPLETION, "stream": True})
        assert client.front.engine.policy.local_ms.value == pytest.approx(0.5)

    drive(server, folder, work)


# -- parts -------------------------------------------------------------------------------------


def test_pinned_changes_nothing_else() -> None:
    body = {"prompt": "x", "temperature": 0.1, "stop": ["é"], "id_slot": -1, "nested": {"a": [1, None]}}
    completion = Completion.parse("/completion", json.dumps(body).encode())
    assert json.loads(completion.pinned(3)) == {**body, "id_slot": 3, "cache_prompt": True}


@given(
    path=st.sampled_from(sorted(ROUTES)),
    body=st.binary(max_size=200)
    | st.dictionaries(st.sampled_from(["prompt", "messages", "n", "lora", "id_slot"]), json_values).map(
        lambda value: json.dumps(value).encode()
    ),
)
def test_any_body_is_understood_or_not(path: str, body: bytes) -> None:
    with contextlib.suppress(NotUnderstoodError):  # and nothing else
        completion = Completion.parse(path, body)
        again = json.loads(completion.pinned(1))
        assert again == {**json.loads(body), "id_slot": 1, "cache_prompt": True}


def test_not_understood_has_a_reason() -> None:
    with pytest.raises(NotUnderstoodError) as caught:
        Completion.parse("/completion", b"{")
    assert caught.value.reason is Reason.NOT_UNDERSTOOD


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", None),
        (b'{"timings": {"cache_n": 1, "prompt_n": 2, "prompt_ms": 3.0}}', Timings(1, 2, 3.0)),
        (
            b'data: {"timings":{"cache_n":1,"prompt_n":2,"prompt_ms":3.0}}\n\ndata: [DONE]\n\n',
            Timings(1, 2, 3.0),
        ),
        (b'{"timings": {"cache_n": 1, "prompt_n"', None),
        (b'{"timings": 7}', None),
        (b'"timings"', None),
        (b'\xff\xfe{"timings": {"cache_n": 1, "prompt_n": 2, "prompt_ms": 3}}', Timings(1, 2, 3.0)),
        (
            b'{"content": "\\"timings\\": {", "timings": {"cache_n": 4, "prompt_n": 2, "prompt_ms": 3}}',
            Timings(4, 2, 3.0),
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_timings_of_an_answer(text: bytes, expected: Timings | None, size: int) -> None:
    tail = Tail(256)
    for chunk in [b"x" * 1000, *(text[i : i + size] for i in range(0, len(text), size))]:
        tail.add(chunk)
    assert tail.timings() == expected
    assert len(tail._bytes) <= 1000 + len(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", None),
        (b'{"index":0,"content":"x","id_slot":3,"stop":true}', 3),
        (b'data: {"id_slot": 12 }\n\ndata: {"id_slot": 12}\n\n', 12),
        (b'{"content":"\\"id_slot\\": 7,","id_slot":2}', 2),
        (b'{"content":"\\"id_slot\\": 7,"}', None),
        (b'{"id_slot":-1}', None),
        (b'{"id_slot":"1"}', None),
        (b'{"id_slot":1.5}', None),
        (b'{"choices":[{"text":"x"}],"timings":{"cache_n":1}}', None),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_slot_of_an_answer(text: bytes, expected: int | None, size: int) -> None:
    tail = Tail(256)
    for i in range(0, len(text), size):
        tail.add(text[i : i + size])
    tail.add(b" " * 5000)
    assert tail.id_slot == expected


# -- the command -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command(server: FakeServer, service: FakeService, folder: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "kvshare", "engine", "--json", "--listen", "127.0.0.1:0"]
    command += ["--decoder", server.url, "--provider", service.path, "--threshold", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        listening = json.loads(process.stdout.readline())
        assert listening["event"] == "listening"

        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                answer = await session.post(listening["url"] + "/completion", json=COMPLETION)
                assert answer.headers["X-Kvshare-Path"] == "handoff"
                await answer.read()

        asyncio.run(asyncio.wait_for(ask(), 20))
        record = json.loads(process.stdout.readline())
        assert record["event"] == "completion"
        assert record["route"] == "/completion"
        assert record["path"] == "handoff"
        assert record["n_handed"] == record["n_reused"] == 200
        process.send_signal(number)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


def test_the_command_when_nobody_reads_what_it_prints(
    server: FakeServer, service: FakeService, folder: Path
) -> None:
    """It ends as other commands do; the request that it could not report is answered."""
    command = [sys.executable, "-m", "kvshare", "engine", "--json", "--listen", "127.0.0.1:0"]
    command += ["--decoder", server.url, "--provider", service.path, "--threshold", "100"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        listening = json.loads(process.stdout.readline())
        process.stdout.close()

        async def ask() -> None:
            async with aiohttp.ClientSession() as session:
                answer = await session.post(listening["url"] + "/completion", json=COMPLETION)
                assert answer.status == 200
                assert json.loads(await answer.read())["timings"]["cache_n"] == 200

        asyncio.run(asyncio.wait_for(ask(), 20))
        assert process.wait(20) == 141
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--decoder", "http://127.0.0.1:1"],
        ["--decoder", "http://127.0.0.1:1", "--provider", "/x", "--listen", "8090"],
        ["--decoder", "http://127.0.0.1:1", "--provider", "/x", "--listen", "x:99999"],
        ["--decoder", "http://127.0.0.1:1", "--provider", "/x", "--threshold", "0"],
        ["--decoder", "http://127.0.0.1:1", "--provider", "/x", "--provider-timeout", "-1"],
        ["--decoder", "http://127.0.0.1:1", "--provider", "/x", "--evict", "all"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from kvshare.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["engine", *arguments])
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_wrong_url(capsys: pytest.CaptureFixture[str]) -> None:
    from kvshare.cli import main

    assert main(["engine", "--decoder", "x", "--provider", "/x", "--listen", "127.0.0.1:0"]) == 12
    assert "not the URL of a server" in capsys.readouterr().err


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from kvshare.cli import main

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert main(["engine", "--decoder", "http://127.0.0.1:1", "--provider", "/x"]) == 1
    assert "kvshare[engine]" in capsys.readouterr().err
