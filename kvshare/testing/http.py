"""A llama-server and a warm provider without llama.cpp, for tests of everything between them.

`FakeServer` speaks the HTTP contract of the patched llama-server: the slot actions with all their
status codes, and the part of its API that an engine needs. Behind it is a `FakeDecoder`, so that a
share really sends descriptors, and a wrong row in the shared memory gives a wrong answer.
`FakeService` is a warm provider: it takes shares and jobs on one socket. Each runs in threads of its
own, with hooks for what may go wrong.

Needs aiohttp, which is in the extras `engine` and `test`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import select
import socket
import stat
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvshare import fds, wire
from kvshare.errors import (
    DeadlineExceededError,
    DescriptorError,
    ExpiredError,
    KvshareError,
    LedgerDigestError,
    LedgerError,
    LedgerIncompleteError,
    LocalProtocolError,
    NoFreeCellsError,
    NotShareableError,
    PeerClosedError,
    PeerError,
    RemoteProtocolError,
    ReplayError,
    SequenceInUseError,
)
from kvshare.fds import OwnedFd
from kvshare.provider import Offer
from kvshare.testing.fakes import FakeDecoder, FakeProvider, FakeShare, plain_layout

N_VOCAB = 32_000
BOS = 1
_POLL_S = 0.005
_MAX_EXPIRES_MS = 24 * 3600 * 1000

# what the contract says about an error: status, `error.type` as llama-server spells it, `error.kind`
_ANSWERS: tuple[tuple[type[KvshareError], int, str, str], ...] = (
    (NoFreeCellsError, 409, "conflict_error", "no_free_cells"),
    (SequenceInUseError, 409, "conflict_error", "slot_in_use"),
    (ReplayError, 400, "invalid_request_error", "unknown_share"),
    (ExpiredError, 410, "expired_error", ""),
    (NotShareableError, 501, "not_supported_error", ""),
    (LedgerIncompleteError, 409, "conflict_error", "ledger_incomplete"),
    (LedgerDigestError, 409, "conflict_error", "ledger_digest"),
    (LedgerError, 409, "conflict_error", "ledger_malformed"),
    (DeadlineExceededError, 504, "timeout_error", ""),
    (PeerError, 502, "bad_gateway_error", ""),
    (KvshareError, 400, "invalid_request_error", ""),
)


def fake_tokens(content: str | Sequence[int | str], *, add_special: bool) -> list[int]:
    """Return the tokens of the fake server: one a word."""
    if isinstance(content, str):
        content = [content]
    found = [BOS] if add_special and content and isinstance(content[0], str) else []
    for part in content:
        if isinstance(part, str):
            found += [2 + zlib.crc32(word.encode()) % (N_VOCAB - 2) for word in part.split()]
        else:
            found.append(part)
    return found


def fake_template(messages: Sequence[dict[str, Any]]) -> str:
    """Return the prompt of the fake server's chat template."""
    found = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = " ".join(part["text"] for part in content)
        found.append(f"<|{message['role']}|> {content} <|end|> ")
    return "".join(found) + "<|assistant|> "


# -- the server ------------------------------------------------------------------------------


@dataclass
class _FakeSlot:
    """A slot; `tokens` are those in its cache: the prompt, and the answer but for its last one."""

    id_slot: int
    tokens: list[int] = field(default_factory=list)
    busy: bool = False
    id_task: int = -1
    share_id: int | None = None
    used: int = 0
    is_adopted: bool = False  # and no request has run there since


class FakeServer:
    """A decoder that speaks the HTTP contract, on loopback.

    Attributes:
        url: where it is.
        directory: what `--kv-share` would be.
        fail: route or action -> status and message to answer instead, `share`, `/tokenize`, ...
        delay_s: route or action -> seconds to wait before anything is done.
        chunk_delay_s: seconds between the parts of a streamed answer.
        local_ms_per_token: time that a local prefill takes, milliseconds.
        expires_ms: how long a share lives at most, milliseconds.
        clears_idle: whether idle slots are saved elsewhere and cleared when a request starts, as the slots
            of a llama-server with a unified cache.
        requests: method and path with query of every request.
        headers: headers of the last request of every path.
        n_cancelled: completions whose client hung up.
    """

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None,
        n_slots: int = 4,
        n_ctx: int = 1024,
        api_key: str | None = None,
        expires_ms: int = 60_000,
        busy_wait_s: float = 0.2,
        send_timeout_s: float = 0.5,
        local_ms_per_token: float = 0.0,
        clears_idle: bool = False,
    ) -> None:
        self.directory = None if directory is None else os.path.realpath(directory)
        self.n_slots = n_slots
        self.n_ctx = n_ctx
        self.api_key = api_key
        self.expires_ms = expires_ms
        self.busy_wait_s = busy_wait_s
        self.send_timeout_s = send_timeout_s
        self.fail: dict[str, tuple[int, str]] = {}
        self.delay_s: dict[str, float] = {}
        self.chunk_delay_s = 0.0
        self.local_ms_per_token = local_ms_per_token
        self.clears_idle = clears_idle
        self.requests: list[str] = []
        self.headers: dict[str, dict[str, str]] = {}
        self.n_cancelled = 0
        self.url = ""
        self._n_tasks = 0
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="kvshare-fake-server", daemon=True)
        self._reset()

    def _reset(self) -> None:
        # cells for a lease of all slots, with room for their alignment
        self.decoder = FakeDecoder(
            layout=plain_layout(n_layer=1, n_embd=16, kv_size=self.n_slots * self.n_ctx),
            n_seq_max=self.n_slots,
        )
        self._slots = [_FakeSlot(i) for i in range(self.n_slots)]
        self._shares: dict[int, FakeShare] = {}
        self._killed: set[int] = set()
        self._saved: list[list[int]] = []  # what idle slots held

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self._ready.wait()
        if self._failed:
            self._thread.join()
            raise self._failed
        return self

    def __exit__(self, *_: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self.decoder.close()

    def restart(self) -> None:
        """Forget everything, as a process that was started anew at the same address."""

        async def again() -> None:
            self.decoder.close()
            self._reset()

        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(again(), self._loop).result(10)

    def slot_tokens(self, id_slot: int) -> list[int]:
        """Return what a slot holds."""
        return list(self._slots[id_slot].tokens)

    @property
    def n_live_shares(self) -> int:
        """Shares that are neither adopted nor ended."""
        return sum(share._state.live for share in self._shares.values())

    # -- inside --

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failed = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application(middlewares=[self._middleware], client_max_size=64 << 20)
        app.router.add_get("/health", self._health)
        app.router.add_get("/props", self._props)
        app.router.add_get("/slots", self._get_slots)
        app.router.add_post("/slots/{id_slot}", self._post_slots)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/apply-template", self._apply_template)
        app.router.add_post("/completion", self._completion)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/v1/chat/completions", self._completion)
        app.router.add_route("*", "/echo/{path:.*}", self._echo)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            self._ready.set()
            await self._stop.wait()
        finally:
            await runner.cleanup()

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path_qs}")
        self.headers[request.path] = dict(request.headers)
        key = request.headers.get("Authorization", request.headers.get("X-Api-Key", ""))
        if self.api_key and key.removeprefix("Bearer ") != self.api_key and request.path != "/health":
            return _refuse(401, "Invalid API Key", "authentication_error")
        name = request.query.get("action", "") if request.path.startswith("/slots/") else ""
        name = name or request.path
        if name in self.delay_s:
            await asyncio.sleep(self.delay_s[name])
        if name in self.fail:
            return _refuse(*self.fail[name], "injected_error")
        try:
            answer: web.StreamResponse = await handler(request)
        except KvshareError as error:
            status, type_, kind = next(
                (status, type_, kind) for cls, status, type_, kind in _ANSWERS if isinstance(error, cls)
            )
            return _refuse(status, str(error), type_, kind)
        return answer

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _props(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"total_slots": self.n_slots, "default_generation_settings": {"n_ctx": self.n_ctx}}
        )

    async def _get_slots(self, _: web.Request) -> web.Response:
        found = []
        for slot in self._slots:
            entry = {"id": slot.id_slot, "n_ctx": self.n_ctx, "is_processing": slot.busy}
            if slot.id_task >= 0 or slot.tokens:
                entry |= {"id_task": slot.id_task, "n_prompt_tokens": len(slot.tokens)}
            found.append(entry)
        return web.json_response(found)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        tokens = fake_tokens(body.get("content", ""), add_special=body.get("add_special", False))
        return web.json_response({"tokens": tokens})

    async def _apply_template(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": fake_template((await _body(request))["messages"])})

    async def _echo(self, request: web.Request) -> web.Response:
        """Say what arrived, for tests of forwarding."""
        body = await request.read()
        answer = web.json_response(
            {
                "method": request.method,
                "path": request.raw_path,
                "headers": [[name, value] for name, value in request.headers.items()],
                "body": body.hex(),
            },
            status=int(request.query.get("status", "200")),
        )
        answer.headers.add("Set-Cookie", "a=1")
        answer.headers.add("Set-Cookie", "b=2")
        answer.headers["X-Own"] = "own"
        return answer

    # -- slot actions --

    async def _post_slots(self, request: web.Request) -> web.Response:
        action = request.query.get("action", "")
        actions = {
            "share": self._share,
            "adopt": self._adopt,
            "release": self._release,
            "erase": self._erase,
        }
        if action not in actions:
            raise LocalProtocolError("Invalid action")
        if self.directory is None:
            raise NotShareableError("This server does not share its cache. Start it with `--kv-share`")
        text = request.match_info["id_slot"]
        if not text.isascii() or not text.isdigit() or int(text) >= self.n_slots:
            raise LocalProtocolError(f"Invalid slot ID {text[:40]}")
        slot = self._slots[int(text)]
        return web.json_response(await actions[action](slot, await _body(request)))

    async def _share(self, slot: _FakeSlot, body: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter_ns()
        path = self._socket_path(body.get("socket"))
        tokens = self._token_list(body) if "tokens" in body else None
        n_tokens = body.get("n_tokens", self.n_ctx)
        if type(n_tokens) is not int or not 0 < n_tokens <= self.n_ctx:
            raise LocalProtocolError("n_tokens is out of range")
        expires_ms = body.get("expires_ms", self.expires_ms)
        if type(expires_ms) is not int or not 0 < expires_ms <= _MAX_EXPIRES_MS:
            raise LocalProtocolError("expires_ms is out of range")
        expires_ms = min(expires_ms, self.expires_ms)
        await self._wait_until_idle(slot)
        if slot.share_id is not None:
            _ = self._shares[slot.share_id].state  # looks at the clock
            self._settle(slot)
        if slot.share_id is not None:
            raise SequenceInUseError(f"slot {slot.id_slot} has a share")
        if tokens is not None:
            self._keep(slot, tokens[:-1])
        prefix = list(slot.tokens)
        if n_tokens <= len(prefix):
            raise LocalProtocolError(f"n_tokens is {n_tokens}, the slot holds {len(prefix)}")
        options: dict[str, Any] = {"prefix": prefix} if prefix else {}
        share = self.decoder.share(slot.id_slot, n_tokens=n_tokens, expires_ms=expires_ms, **options)
        self._shares[share.share_id] = share
        slot.share_id = share.share_id
        t_us = (time.perf_counter_ns() - start) / 1000
        try:
            await asyncio.to_thread(share.send, path, deadline=time.monotonic() + self.send_timeout_s)
        except KvshareError:
            share.release()
            self._settle(slot)
            raise
        return {
            "id_slot": slot.id_slot,
            "share_id": share.share_id,
            "n_prefix": len(prefix),
            "layout": share.header.layout,
            "semantics": share.header.semantics,
            "params": dict(share.header.params),
            "regions": [vars(each) for each in share.header.regions],
            "expires_ms": share.header.expires_ms,
            "t_us": t_us,
        }

    def _settle(self, slot: _FakeSlot) -> None:
        """Look whether the slot's share has ended; the slot is as it was before then, or empty."""
        if slot.share_id is not None and not self._shares[slot.share_id]._state.live:
            slot.share_id = None
            if self.decoder.n_past(slot.id_slot) == 0:
                slot.tokens = []

    def _keep(self, slot: _FakeSlot, tokens: list[int]) -> None:
        """Make a slot hold the longest start of some tokens that it has, or that was saved."""
        self._load(slot, tokens)
        n = _common(slot.tokens, tokens)
        if n < len(slot.tokens):
            self._hold(slot, slot.tokens[:n])

    def _hold(self, slot: _FakeSlot, tokens: list[int]) -> None:
        """Make a slot hold just these tokens; the rows of those that it had stay, unless it is cut."""
        self._end_share(slot)
        n = len(slot.tokens)
        if tokens[:n] != slot.tokens:
            self._empty(slot)
            n = 0
        if n < len(tokens):
            self.decoder.extend(tokens[n:], slot.id_slot)
        slot.tokens = list(tokens)

    def _load(self, slot: _FakeSlot, tokens: list[int]) -> None:
        """Put what was saved of an idle slot into this one, if it has more of some tokens.

        As llama-server, it leaves alone what would lose most of it.
        """
        worth = [saved for saved in self._saved if 4 * _common(saved, tokens) >= len(saved)]
        best = max(worth, key=lambda saved: _common(saved, tokens), default=[])
        if _common(best, tokens) > _common(slot.tokens, tokens):
            self._saved.remove(best)
            self._hold(slot, best)

    def _clear_idle(self) -> None:
        """Save what idle slots hold, and clear them."""
        for slot in self._slots:
            if slot.tokens and not slot.busy and slot.share_id is None and not slot.is_adopted:
                self._saved.append(slot.tokens)
                self._empty(slot)

    def _token_list(self, body: dict[str, Any]) -> list[int]:
        tokens = body.get("tokens")
        if (
            not isinstance(tokens, list)
            or not 0 < len(tokens) <= self.n_ctx
            or not all(type(token) is int and 0 <= token < N_VOCAB for token in tokens)
        ):
            raise LocalProtocolError('"tokens" must be a list of token ids')
        return tokens

    def _socket_path(self, path: Any) -> str:
        """Return a path directly inside the folder."""
        if not isinstance(path, str) or not path or "\0" in path:
            raise LocalProtocolError('"socket" must be a path')
        if len(os.fsencode(path)) > fds.MAX_PATH_NBYTES:
            raise LocalProtocolError("the socket's path is too long")
        folder, name = os.path.split(path)
        if not os.path.isabs(path) or name in ("", ".", "..") or os.path.realpath(folder) != self.directory:
            raise LocalProtocolError(f"{path} is not directly inside {self.directory}")
        with contextlib.suppress(FileNotFoundError):
            mode = os.lstat(path).st_mode
            if not stat.S_ISSOCK(mode):
                raise LocalProtocolError(f"{path} is no socket")
        return path

    async def _adopt(self, slot: _FakeSlot, body: dict[str, Any]) -> dict[str, Any]:
        share_id = _share_id(body)
        tokens = self._token_list(body)
        share = self._shares.get(share_id)
        if share is None or share.seq_id != slot.id_slot:
            raise ReplayError(f"share {share_id} of slot {slot.id_slot} is unknown")
        if share_id in self._killed:
            raise SequenceInUseError(f"slot {slot.id_slot} changed since it was shared")
        try:
            adopted = self.decoder.adopt(share, tokens)
        finally:
            self._settle(slot)
        slot.tokens = list(tokens)
        slot.is_adopted = True
        return {
            "id_slot": slot.id_slot,
            "n_adopted": adopted.n_adopted,
            "n_usable": adopted.n_adopted,
            "bytes_moved": adopted.bytes_moved,
            "t_us": adopted.t_us,
        }

    async def _release(self, slot: _FakeSlot, body: dict[str, Any]) -> dict[str, Any]:
        share_id = _share_id(body)
        share = self._shares.get(share_id)
        if share is not None and share.seq_id == slot.id_slot:
            share.release()
            self._settle(slot)
        return {"id_slot": slot.id_slot}

    async def _erase(self, slot: _FakeSlot, _: dict[str, Any]) -> dict[str, Any]:
        await self._wait_until_idle(slot)
        n = len(slot.tokens)
        self._empty(slot)
        return {"id_slot": slot.id_slot, "n_erased": n}

    def _empty(self, slot: _FakeSlot) -> None:
        """Empty a slot; a share of it is dead."""
        self._end_share(slot)
        self.decoder.clear(slot.id_slot)
        slot.tokens = []
        slot.is_adopted = False

    def _end_share(self, slot: _FakeSlot) -> None:
        if slot.share_id is not None:
            self._killed.add(slot.share_id)
            self._shares[slot.share_id].release()
            self._settle(slot)

    async def _wait_until_idle(self, slot: _FakeSlot) -> None:
        deadline = time.monotonic() + self.busy_wait_s
        while slot.busy:
            if time.monotonic() > deadline:
                raise SequenceInUseError(f"slot {slot.id_slot} is busy")
            await asyncio.sleep(_POLL_S)

    # -- completions --

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        chat = "chat" in request.path
        prompt = fake_template(body["messages"]) if chat else body.get("prompt", "")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
            prompt = prompt[0]  # of several, the first is answered
        tokens = fake_tokens(prompt, add_special=True)
        if not 0 < len(tokens) < self.n_ctx:
            raise LocalProtocolError(f"a prompt of {len(tokens)} tokens does not fit")
        slot = await self._take(body.get("id_slot", -1), tokens)
        slot.busy = True
        slot.is_adopted = False
        try:
            if self.clears_idle:
                self._clear_idle()
            n_cached = await self._prefill(slot, tokens, use_cache=body.get("cache_prompt", True))
            words = self._answer(slot, tokens, int(body.get("n_predict", body.get("max_tokens", 8))))
            self._hold(slot, [*tokens, *fake_tokens(words[:-1], add_special=False)])
            timings = {
                "cache_n": n_cached,
                "prompt_n": len(tokens) - n_cached,
                "prompt_ms": max(1e-3, (len(tokens) - n_cached) * self.local_ms_per_token),
                "predicted_n": len(words),
            }
            if not body.get("stream"):
                await asyncio.sleep(self.chunk_delay_s * len(words))
                whole = _whole(chat, slot.id_slot, words, timings)
                if body.get("return_tokens"):
                    whole["tokens"] = fake_tokens(words, add_special=False)
                return web.json_response(whole)
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for part in _parts(chat, slot.id_slot, words, timings):
                await response.write(part)
                await asyncio.sleep(self.chunk_delay_s)
            await response.write_eof()
            return response
        except (asyncio.CancelledError, ConnectionError):
            self.n_cancelled += 1
            raise
        finally:
            slot.busy = False

    async def _take(self, id_slot: int, tokens: list[int]) -> _FakeSlot:
        """Return the slot of a request: the one it names, the most similar, the least recently used."""
        while True:
            if id_slot >= 0:
                slot = self._slots[id_slot % self.n_slots]
                if not slot.busy:
                    return slot
            free = [slot for slot in self._slots if not slot.busy and slot.share_id is None]
            if id_slot < 0 and free:
                slot = max(free, key=lambda each: (_similarity(each.tokens, tokens), -each.used))
                self._load(slot, tokens)
                return slot
            await asyncio.sleep(_POLL_S)

    async def _prefill(self, slot: _FakeSlot, tokens: list[int], *, use_cache: bool) -> int:
        """Make a slot hold all tokens but the last; return how many it had."""
        n = min(_common(slot.tokens, tokens), len(tokens) - 1) if use_cache else 0
        if not n == len(tokens) - 1 == len(slot.tokens) or slot.share_id is not None:
            await asyncio.sleep((len(tokens) - n) * self.local_ms_per_token / 1000)
            self._hold(slot, tokens[:-1])
        slot.id_task = self._task()
        slot.used = slot.id_task
        return n

    def _answer(self, slot: _FakeSlot, tokens: list[int], n: int) -> list[str]:
        """Return words that the rows in memory and the last token decide."""
        digest = hashlib.sha256(str(tokens[-1]).encode())
        if len(tokens) > 1:
            digest.update(self.decoder.logits(slot.id_slot))
        return [f"w{digest.digest()[i % 32]}" for i in range(n)]

    def _task(self) -> int:
        self._n_tasks += 1
        return self._n_tasks


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


def _similarity(cached: Sequence[int], tokens: Sequence[int]) -> float:
    """Return how much of a prompt is cached; 0 for a tenth or less, as llama-server has it."""
    found = _common(cached, tokens) / len(tokens)
    return found if found > 0.1 else 0.0


def _share_id(body: dict[str, Any]) -> int:
    share_id = body.get("share_id")
    if type(share_id) is not int or not 1 <= share_id < 1 << 53:
        raise LocalProtocolError('"share_id" must be an integer')
    return share_id


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError) as exc:
        raise LocalProtocolError(f"the body is no JSON: {exc}") from exc
    if not isinstance(body, dict):
        raise LocalProtocolError("the body is no object")
    return body


def _refuse(status: int, message: str, type_: str, kind: str = "") -> web.Response:
    error = {"code": status, "message": message, "type": type_, **({"kind": kind} if kind else {})}
    return web.json_response({"error": error}, status=status)


def _whole(chat: bool, id_slot: int, words: list[str], timings: dict[str, Any]) -> dict[str, Any]:
    text = " ".join(words)
    if not chat:
        return {"index": 0, "content": text, "id_slot": id_slot, "stop": True, "timings": timings}
    message = {"role": "assistant", "content": text}
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "timings": timings,
    }


def _parts(chat: bool, id_slot: int, words: list[str], timings: dict[str, Any]) -> Iterator[bytes]:
    """Yield a streamed answer, event by event."""
    for word in words:
        text = word + " "
        if chat:
            yield _event(
                {
                    "object": "chat.completion.chunk",
                    "choices": [{"index": 0, "finish_reason": None, "delta": {"content": text}}],
                }
            )
        else:
            yield _event({"index": 0, "content": text, "id_slot": -1, "stop": False})  # as llama-server
    if chat:
        yield _event(
            {
                "object": "chat.completion.chunk",
                "choices": [{"index": 0, "finish_reason": "stop", "delta": {}}],
                "timings": timings,
            }
        )
        yield b"data: [DONE]\n\n"
    else:
        yield _event({"index": 0, "content": "", "id_slot": id_slot, "stop": True, "timings": timings})


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


# -- the provider ----------------------------------------------------------------------------


class _Died(Exception):
    """The fake provider was told to die."""


class FakeService:
    """A warm provider: takes shares and jobs on one socket, pairs them, prefills.

    It refuses a share that does not come with one readable descriptor for each region.

    Args:
        path: where it listens.

    Attributes:
        jobs: share id and number of tokens of every job that arrived.
        prefilled: how many tokens were prefilled for each, those that its slot held not included.
        n_shares: shares that arrived.
        n_done: jobs that ended well.
        n_cancelled: jobs whose engine hung up.
        refused: why shares were refused.
        step: tokens between two reports of progress.
        step_s: seconds that such a step takes.
        die_at: token at which it drops all its connections without a word; None never.
        error: what a job fails with; None nothing.
        before_complete: hook, called with the `FakeProvider` before it vouches.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.jobs: list[tuple[int, int]] = []
        self.prefilled: list[int] = []
        self.n_shares = 0
        self.n_done = 0
        self.n_cancelled = 0
        self.refused: list[str] = []
        self.step = 16
        self.step_s = 0.0
        self.die_at: int | None = None
        self.error: str | None = None
        self.before_complete: Callable[[FakeProvider], None] | None = None
        self._offers: dict[int, Offer] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def __enter__(self) -> FakeService:
        self._listener = fds.listen_unix(self.path)
        self._start(self._accept, self._listener)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for offer in self._offers.values():
            offer.close()
        assert self._listener is not None
        self._listener.close()
        os.unlink(self.path)

    def _start(self, function: Callable[[socket.socket], None], sock: socket.socket) -> None:
        thread = threading.Thread(target=function, args=(sock,), name="kvshare-fake-provider", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(DeadlineExceededError):
                self._start(self._serve, fds.accept_unix(listener, deadline=time.monotonic() + 0.05))

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                payload, descriptors = fds.receive_message(connection, deadline=time.monotonic() + 5)
                message = wire.decode(payload)
                if isinstance(message, wire.ShareHeader):
                    self._take(message, descriptors)
                elif isinstance(message, wire.JobHeader):
                    self._work(connection, message)
            except (KvshareError, OSError) as error:
                self.refused.append(f"{type(error).__name__}: {error}")

    def _take(self, header: wire.ShareHeader, descriptors: list[OwnedFd]) -> None:
        offer = Offer(header, require_regions(header, descriptors))
        with self._changed:
            self.n_shares += 1
            self._offers[header.share_id] = offer
            self._changed.notify_all()

    def _work(self, connection: socket.socket, job: wire.JobHeader) -> None:
        with self._changed:
            self.jobs.append((job.share_id, len(job.tokens)))
            self._changed.wait_for(lambda: job.share_id in self._offers or self._stop.is_set(), timeout=5)
            offer = self._offers.pop(job.share_id, None)
        outcome = wire.Outcome(share_id=job.share_id, ok=True)
        if offer is None:
            outcome = wire.Outcome(share_id=job.share_id, ok=False, error="no such share arrived")
        else:
            try:
                self._fill(connection, offer, job)
                self.n_done += 1
            except _Died:
                return
            except PeerClosedError as error:
                self.n_cancelled += 1
                offer.fail(str(error))
                return
            except KvshareError as error:
                offer.fail(str(error))
                outcome = wire.Outcome(share_id=job.share_id, ok=False, error=str(error))
            finally:
                offer.close()
        fds.send_message(connection, wire.encode(outcome))

    def _fill(self, connection: socket.socket, offer: Offer, job: wire.JobHeader) -> None:
        def before_rows(_: FakeProvider, n_done: int) -> None:
            if self.die_at is not None and n_done >= self.die_at:
                raise _Died
            if self.error is not None:
                raise RemoteProtocolError(self.error)
            _sleep_watching(connection, self.step_s, self._stop)

        def progress(n_done: int) -> None:
            message = wire.Progress(share_id=job.share_id, n_filled=n_done, n_tokens=len(job.tokens))
            fds.send_message(connection, wire.encode(message))

        provider = FakeProvider(
            offer, step=self.step, before_rows=before_rows, before_complete=self.before_complete
        )
        try:
            provider.prefill(job.tokens, progress=progress)
            self.prefilled.append(provider.n_prefilled)
            provider.publish()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they hold views, and the offer cannot be closed
            raise


def require_regions(header: wire.ShareHeader, descriptors: list[OwnedFd]) -> list[OwnedFd]:
    """Check that a share came with one readable descriptor for each region, and one for the ledger.

    Raises:
        DescriptorError: it did not.

    *Ownership*: returns the same descriptors; closes them if it raises.
    """
    try:
        wanted = len(header.regions) + 1
        if len(descriptors) != wanted:
            raise DescriptorError(f"{len(descriptors)} descriptors came, {wanted} are needed")
        for entry in header.regions:
            fd = descriptors[entry.fd].fileno()
            for offset in (entry.offset, entry.offset + entry.size - 1):
                if len(os.pread(fd, 1, offset)) != 1:
                    raise DescriptorError(f"descriptor {entry.fd} cannot be read at {offset}")
    except BaseException:
        for owned in descriptors:
            owned.close()
        raise
    return descriptors


def _sleep_watching(connection: socket.socket, seconds: float, stop: threading.Event) -> None:
    """Sleep; raise as soon as the peer hangs up or the service stops."""
    deadline = time.monotonic() + seconds
    poller = select.poll()
    poller.register(connection, select.POLLIN | select.POLLRDHUP)
    while True:
        if stop.is_set() or poller.poll(0):
            raise PeerClosedError("the engine hung up")
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        poller.poll(min(remaining, 0.02) * 1000)


@contextlib.contextmanager
def serving_once(path: str, tokens: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Serve one share with a `FakeProvider`: what `check_server` wants as a provider for a `FakeServer`.

    Args:
        path: socket to listen at, until the end of the block.
        tokens: what to prefill.

    Yields:
        A function that waits until the provider has vouched, and raises what it failed with.
    """
    listener = fds.listen_unix(path)
    failed: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                connection = fds.accept_unix(listener, deadline=time.monotonic() + 0.05)
            except DeadlineExceededError:
                continue
            try:
                with connection:
                    payload, descriptors = fds.receive_message(connection)
                    header = wire.decode(payload)
                    assert isinstance(header, wire.ShareHeader)
                    with Offer(header, require_regions(header, descriptors)) as offer:
                        FakeProvider(offer).serve(tokens)
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)
                failed.append(error)
            return

    def wait() -> None:
        thread.join(30)
        if thread.is_alive():
            raise DeadlineExceededError("no share came")
        if failed:
            raise failed[0]

    thread = threading.Thread(target=work, name="kvshare-fake-provider", daemon=True)
    thread.start()
    try:
        yield wait
    finally:
        stop.set()
        thread.join()
        listener.close()
        os.unlink(path)


__all__ = [
    "FakeServer",
    "FakeService",
    "fake_template",
    "fake_tokens",
    "require_regions",
    "serving_once",
]
