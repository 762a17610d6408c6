"""The engine's front: an HTTP server for clients that know nothing of kvshare.

It stands before a llama-server. Completions (`ROUTES`) are looked at: their prompt is templated and
tokenized by the server itself, and handed over by the `Engine` if that pays. All else, and each
completion that is not wholly understood, is forwarded as it came. Answers are passed on as they
arrive, byte for byte, with two headers more:

- `X-Kvshare-Path`: `handoff`, `local` or `forwarded`, see `kvshare.policy.Route`
- `X-Kvshare-Reason`: a word of `kvshare.policy.Reason`, and details

`GET /metrics` is the front's own. A client that hangs up takes its handoff and its request along.

Needs aiohttp and prometheus_client, which are in the extra `engine`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import prometheus_client
from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from kvshare.engine import Engine
from kvshare.errors import KvshareError
from kvshare.policy import FAILURES, REFUSALS, Reason, Record, Route, Timings
from kvshare.server import ServerClient

_log = logging.getLogger(__name__)

DEFAULT_MAX_BODY_NBYTES = 64 << 20

CHAT_ROUTES = frozenset({"/v1/chat/completions", "/chat/completions"})
ROUTES = CHAT_ROUTES | {"/v1/completions", "/completions", "/completion"}
"""Paths that are looked at; the second of a kind is llama-server's own short form."""

_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer"
    " transfer-encoding upgrade".split()
)
_CREDENTIALS = ("Authorization", "X-Api-Key")
_TAIL_NBYTES = 64 << 10
_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INT32_END = 1 << 31
# a key of the answer: inside of a text the quotes have backslashes before them
_ID_SLOT = re.compile(rb'"id_slot"\s{0,4}:\s{0,4}(\d{1,9})[\s,}]')
_ID_SLOT_NBYTES = 30


# -- what a request asks for -----------------------------------------------------------------


class NotUnderstoodError(Exception):
    """A completion that is forwarded as it came; holds the reason."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Completion:
    """A completion that can be handed over.

    Attributes:
        body: the JSON object.
        prompt: text or tokens; None for a chat, whose prompt the server's template makes.
    """

    body: dict[str, Any]
    prompt: str | list[int | str] | None

    @classmethod
    def parse(cls, path: str, payload: bytes) -> Completion:
        """Read a request.

        Args:
            path: one of `ROUTES`.
            payload: its body.

        Raises:
            NotUnderstoodError: it is not one that a handoff serves exactly as it came.
        """
        try:
            body = json.loads(payload, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as exc:
            raise NotUnderstoodError(Reason.NOT_UNDERSTOOD, "the body is no JSON") from exc
        if not isinstance(body, dict):
            raise NotUnderstoodError(Reason.NOT_UNDERSTOOD, "the body is no object")
        _require_plain(body)
        if path in CHAT_ROUTES:
            _require_text(body.get("messages"))
            return cls(body, None)
        return cls(body, _prompt(body.get("prompt")))

    def pinned(self, id_slot: int) -> bytes:
        """Return the body that runs on a slot and reuses what is there."""
        return json.dumps({**self.body, "id_slot": id_slot, "cache_prompt": True}).encode()


def _finite(text: str) -> float:
    """Read a number that can be written again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no JSON number")
    return value


def _require_plain(body: Mapping[str, Any]) -> None:
    """Refuse what concerns slots, caches, adapters or several answers."""
    if body.get("id_slot", -1) not in (-1, None):
        raise NotUnderstoodError(Reason.OWN_SLOT)
    if body.get("cache_prompt", True) is not True:
        raise NotUnderstoodError(Reason.NO_CACHE)
    if body.get("lora"):
        raise NotUnderstoodError(Reason.ADAPTERS)
    for name in ("n", "n_cmpl", "best_of"):
        if body.get(name, 1) not in (1, None):
            raise NotUnderstoodError(Reason.SEVERAL_ANSWERS)


def _require_text(messages: Any) -> None:
    """Refuse a chat that is more than text."""
    if not isinstance(messages, list) or not messages:
        raise NotUnderstoodError(Reason.NOT_UNDERSTOOD, "messages is no list")
    for message in messages:
        if not isinstance(message, dict):
            raise NotUnderstoodError(Reason.NOT_UNDERSTOOD, "a message is no object")
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise NotUnderstoodError(Reason.NOT_UNDERSTOOD, "the content of a message is no text")
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text":
                raise NotUnderstoodError(Reason.MULTIMODAL)


def _prompt(prompt: Any) -> str | list[int | str]:
    """Return the one prompt of a completion, as the server would read it."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, dict):
        raise NotUnderstoodError(Reason.MULTIMODAL)
    if not isinstance(prompt, list) or not prompt:
        raise NotUnderstoodError(Reason.NOT_UNDERSTOOD, "prompt is neither text nor tokens")
    if any(type(part) is int for part in prompt):  # tokens, and texts between them
        if not all(
            isinstance(part, str) or (type(part) is int and 0 <= part < _INT32_END) for part in prompt
        ):
            raise NotUnderstoodError(Reason.NOT_UNDERSTOOD, "prompt is no list of tokens")
        return prompt
    if len(prompt) > 1 or not isinstance(prompt[0], str):
        raise NotUnderstoodError(Reason.SEVERAL_PROMPTS)
    return prompt[0]


# -- what an answer says ---------------------------------------------------------------------


class Tail:
    """Keeps the end of an answer, where a llama-server puts its timings, and the slot that it names.

    Attributes:
        id_slot: where the completion ran; None if the answer does not say, as those in OpenAI's form.
    """

    def __init__(self, n_nbytes: int = _TAIL_NBYTES) -> None:
        self._n_nbytes = n_nbytes
        self._bytes = bytearray()
        self.id_slot: int | None = None

    def add(self, chunk: bytes) -> None:
        """Take the next bytes."""
        start = max(0, len(self._bytes) - _ID_SLOT_NBYTES)  # it may lie across two chunks
        self._bytes += chunk
        if self.id_slot is None and (found := _ID_SLOT.search(self._bytes, start)):
            self.id_slot = int(found[1])
        if len(self._bytes) > 2 * self._n_nbytes:
            del self._bytes[: -self._n_nbytes]

    def timings(self) -> Timings | None:
        """Return the last timings; None if there are none."""
        text = self._bytes.decode(errors="replace")
        start = text.rfind('"timings"')
        if start < 0 or not (found := re.compile(r'"timings"\s*:\s*(?={)').match(text, start)):
            return None
        try:
            value, _ = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            return None
        return Timings.from_json(value)


# -- metrics ---------------------------------------------------------------------------------


class Metrics:
    """What happened, for Prometheus."""

    def __init__(self) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        self._requests = self._counter("requests", "Requests by path and reason.", "path", "reason")
        self._handoffs = self._counter("handoffs", "Prompts that the provider prefilled.")
        self._fallbacks = self._counter(
            "fallbacks", "Handoffs that failed; the request went on without.", "reason"
        )
        self._refusals = self._counter("refusals", "Handoffs that the decoder refused.", "reason")
        self._tokens = self._counter(
            "prompt_tokens",
            "Prompt tokens: handed over, continued by a handoff, and processed or reused by the decoder.",
            "kind",
        )
        self._short = self._counter(
            "handoffs_reused_short", "Handoffs after which the decoder reused fewer tokens than it adopted."
        )
        self._times = {
            name: prometheus_client.Histogram(
                f"kvshare_{name}_seconds", text, registry=self.registry, buckets=_BUCKETS
            )
            for name, text in (
                ("share", "Time until the provider had the descriptors."),
                ("prefill", "Time that the provider took."),
                ("adopt", "Time until the decoder had adopted."),
                ("first_byte", "Time from a completion's arrival to the first byte of its answer."),
                ("request", "Time from a completion's arrival to the end of its answer."),
            )
        }
        for each in Reason:  # so that a rate can be told from the first failure on
            if each in FAILURES:
                self._fallbacks.labels(each.value)
            if each in REFUSALS:
                self._refusals.labels(each.value)

    def _counter(self, name: str, text: str, *labels: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(f"kvshare_{name}", text, labels, registry=self.registry)

    def prepared(self, record: Record) -> None:
        """Count what became of a request, when that is known."""
        self._requests.labels(record.route.value, record.reason.value).inc()
        if record.route is Route.HANDOFF:
            self._handoffs.inc()
            self._tokens.labels("handed_over").inc(record.n_handed - record.n_prefix)
            self._tokens.labels("continued").inc(record.n_prefix)
        if record.reason in FAILURES:
            self._fallbacks.labels(record.reason.value).inc()
        if record.reason in REFUSALS:
            self._refusals.labels(record.reason.value).inc()
        for name in ("share", "prefill", "adopt"):
            ms = getattr(record, f"{name}_ms")
            if ms is not None:
                self._times[name].observe(ms / 1000)

    def answered(self, record: Record, timings: Timings) -> None:
        """Count the tokens that a decoder reports."""
        self._tokens.labels("reused").inc(max(0, timings.cache_n))
        self._tokens.labels("processed").inc(max(0, timings.prompt_n))
        if record.route is Route.HANDOFF and timings.cache_n < record.n_handed:
            self._short.inc()

    def took(self, name: str, seconds: float) -> None:
        """Note a time."""
        self._times[name].observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)


# -- the front -------------------------------------------------------------------------------


class Front:
    """An HTTP front for one engine and one server.

    Args:
        engine: what hands over.
        server: the server; its own credentials are added to requests that have none.
        api_key: key to add; None adds none.
        max_body_nbytes: larger requests are refused with 413.
        report: called with the path and the record of each completion, when it ends.
    """

    def __init__(
        self,
        engine: Engine,
        server: ServerClient,
        *,
        api_key: str | None = None,
        max_body_nbytes: int = DEFAULT_MAX_BODY_NBYTES,
        report: Callable[[str, Record], None] | None = None,
    ) -> None:
        self.engine = engine
        self.server = server
        self.metrics = Metrics()
        self._api_key = api_key
        self._report = report
        self._session: aiohttp.ClientSession | None = None
        self.app = web.Application(client_max_size=max_body_nbytes)
        self.app.cleanup_ctx.append(self._connections)
        self.app.router.add_get("/metrics", self._metrics)
        self.app.router.add_route("*", "/{path:.*}", self._handle)

    async def _connections(self, _: web.Application) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            # a server may close a connection that waits just when it is used, and a POST is not sent twice
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
        ) as self._session:
            yield
            await self.engine.close()

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=self.metrics.text(), headers={"Content-Type": prometheus_client.CONTENT_TYPE_LATEST}
        )

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        start = time.monotonic()
        if not request.raw_path.startswith("/"):  # else it could continue the server's name in its URL
            raise web.HTTPBadRequest(text="the target is no path")
        payload = await request.read()  # 413 if it is too large
        headers = self._to_server(request)
        if request.method != "POST" or request.path not in ROUTES:
            record = Record(Route.FORWARDED, Reason.ROUTE)
            self.metrics.prepared(record)
            return await self._pass_on(request, headers, payload, record, None)
        async with self._prepared(request.path, payload, headers) as (record, completion):
            self.metrics.prepared(record)
            try:
                if completion is not None and record.id_slot is not None:
                    payload = completion.pinned(record.id_slot)
                return await self._pass_on(request, headers, payload, record, start)
            finally:
                self.metrics.took("request", time.monotonic() - start)
                if self._report:
                    self._report(request.path, record)

    @contextlib.asynccontextmanager
    async def _prepared(
        self, path: str, payload: bytes, headers: CIMultiDict[str]
    ) -> AsyncIterator[tuple[Record, Completion | None]]:
        """Decide what to do with a completion, and hand it over if that is it."""
        # the client's own credentials: who may not use the server, may not make it share
        server = self.server.with_headers({k: headers[k] for k in _CREDENTIALS if k in headers})
        try:
            completion = Completion.parse(path, payload)
            if len(payload) < self.engine.policy.threshold:  # hardly a token has less than a byte
                record = Record(Route.LOCAL, Reason.SHORT)
                yield record, completion
                if record.n_held is not None:  # it was answered; its next turn may be a long one
                    with contextlib.suppress(NotUnderstoodError):
                        self.engine.note(await self._tokens(server, completion), record)
                return
            tokens = await self._tokens(server, completion)
        except NotUnderstoodError as error:
            yield Record(Route.FORWARDED, error.reason, error.detail), None
            return
        async with self.engine.prepared(tokens, decoder=server) as record:
            yield record, completion

    async def _tokens(self, server: ServerClient, completion: Completion) -> list[int]:
        """Return the tokens that the server will make of a completion."""
        try:
            prompt = completion.prompt
            if prompt is None:
                prompt = await server.apply_template(completion.body)
            return await server.tokenize(prompt, add_special=True, parse_special=True)
        except (KvshareError, RecursionError) as error:  # the server's answer to the request says it better
            raise NotUnderstoodError(Reason.NOT_TOKENIZED, str(error)) from error

    def _to_server(self, request: web.Request) -> CIMultiDict[str]:
        headers = _end_to_end(request.headers)
        for name in ("Host", "Content-Length", "Expect"):
            headers.popall(name, None)
        if self._api_key is not None and not any(name in headers for name in _CREDENTIALS):
            headers["Authorization"] = f"Bearer {self._api_key}"
        return headers

    async def _pass_on(
        self,
        request: web.Request,
        headers: CIMultiDict[str],
        payload: bytes,
        record: Record,
        start: float | None,
    ) -> web.StreamResponse:
        """Send a request to the server and its answer to the client, part by part.

        Args:
            start: when the completion arrived; None for anything else.
        """
        assert self._session is not None
        said = {
            "X-Kvshare-Path": record.route.value,
            "X-Kvshare-Reason": _header_text(record.reason.value, record.detail),
        }
        try:
            answer = await self._session.request(
                request.method,
                URL(self.server.url + request.raw_path, encoded=True),
                headers=headers,
                data=io.BytesIO(payload) if payload or "Content-Length" in request.headers else None,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                allow_redirects=False,
            )
        except aiohttp.ClientError as error:
            _log.warning("the server does not answer: %s", error)
            record.answered = False
            return _bad_gateway(f"the server does not answer: {error}", said)
        record.answered = answer.status == 200
        async with answer:
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers)
            )
            response.headers.update(said)
            await response.prepare(request)
            tail = Tail()
            first = True
            try:
                async for chunk in answer.content.iter_any():
                    if first and start is not None:
                        self.metrics.took("first_byte", time.monotonic() - start)
                    first = False
                    tail.add(chunk)
                    await response.write(chunk)
            except aiohttp.ClientError as error:
                _log.warning("the server hung up in the middle of its answer: %s", error)
                record.answered = False
                if request.transport is not None:
                    request.transport.abort()  # so that the client sees that it is not whole
                return response
            await response.write_eof()
        if start is not None and (timings := tail.timings()):
            self.engine.observe(record, timings, id_slot=tail.id_slot)
            self.metrics.answered(record, timings)
        return response


def _end_to_end(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Return the headers that concern more than one connection."""
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    kept: CIMultiDict[str] = CIMultiDict()
    for name, value in headers.items():
        if name.lower() not in _HOP_BY_HOP | named:
            kept.add(name, value)
    return kept


def _header_text(reason: str, detail: str) -> str:
    """Return a header value: one line, ASCII, not long."""
    text = f"{reason}: {detail}" if detail else reason
    return "".join(c if " " <= c <= "~" else " " for c in text)[:300].strip()


def _bad_gateway(message: str, headers: Mapping[str, str]) -> web.Response:
    error = {"error": {"code": 502, "message": message, "type": "server_error"}}
    return web.json_response(error, status=502, headers=headers)


async def serve(front: Front, host: str, port: int) -> tuple[web.AppRunner, str]:
    """Serve a front.

    Args:
        front: the front.
        host: address to listen at.
        port: port; 0 takes a free one.

    Returns:
        The runner, whose `cleanup` ends it, and the URL.

    Raises:
        OSError: the address is in use, or not this machine's.
    """
    # a client's disconnect cancels its handler, and with it the handoff
    runner = web.AppRunner(
        front.app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        shutdown_timeout=5.0,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
    except BaseException:
        await runner.cleanup()
        raise
    shown, bound = runner.addresses[0][:2]
    return runner, f"http://[{shown}]:{bound}" if ":" in shown else f"http://{shown}:{bound}"
