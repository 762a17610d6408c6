"""A client of the patched llama-server: its slot actions, and what an engine asks of a server besides.

The actions are `POST /slots/<id>?action=share|adopt|release`. A status that is not 200 becomes the
error of this package that means the same; its text is the server's own:

====== =====================================================================================
status error
====== =====================================================================================
   400 `ReplayError` if the share is unknown or used, else `LocalProtocolError`
   401 `PeerRefusedError`, as 403
   409 `NoFreeCellsError`, `LedgerIncompleteError`, `LedgerDigestError` or `SequenceInUseError`
   410 `ExpiredError`
   501 `NotShareableError`
   502 `PeerRefusedError`: the provider is not there, or is somebody else's
   503 `ServerBusyError`: the server loads its model, or has no slot
   504 `DeadlineExceededError`
====== =====================================================================================

Which of several errors a status means stands in `error.kind` of the answer, one of `KINDS`; where a
server does not say it, the words of its message decide. Anything else is a `RemoteProtocolError`.

Needs aiohttp, which is in the extra `engine`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvshare.errors import (
    AdoptError,
    DeadlineExceededError,
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
    PeerRefusedError,
    RemoteProtocolError,
    ReplayError,
    SequenceInUseError,
)

if TYPE_CHECKING:
    import aiohttp  # what needs it imports it: an engine over an in-process decoder has no HTTP

DEFAULT_TIMEOUT_S = 30.0
MAX_ANSWER_NBYTES = 64 << 20

KINDS: Mapping[str, type[KvshareError]] = {
    "no_free_cells": NoFreeCellsError,
    "slot_in_use": SequenceInUseError,
    "ledger_incomplete": LedgerIncompleteError,
    "ledger_digest": LedgerDigestError,
    "ledger_malformed": LedgerError,
    "provider_connected": DeadlineExceededError,
    "unknown_share": ReplayError,
}
"""What `error.kind` of an answer may say, and the error that it becomes."""

_KIND_BY_WORDS = (
    (re.compile(r"digest|differ", re.I), LedgerDigestError),
    (re.compile(r"ledger|incomplete|not complete|provider failed", re.I), LedgerIncompleteError),
    (re.compile(r"free cells|no .*cells|cells .*not free", re.I), NoFreeCellsError),
)
_UNKNOWN_SHARE = re.compile(r"share.*(unknown|used|mismatch|another|no such|not live)|unknown share", re.I)


class ServerBusyError(PeerError):
    """The server or provider is there, but loads its model, or takes no more for now."""


@dataclass(frozen=True)
class Slot:
    """A slot of a server, or a sequence of an in-process decoder.

    Attributes:
        id_slot: its id.
        idle: whether nothing is processed there.
        n_tokens: tokens in its cache; 0 if it is clean.
        n_ctx: tokens that it can hold.
        id_task: id of the last task there, -1 if there was none or it is not known.
    """

    id_slot: int
    idle: bool
    n_tokens: int
    n_ctx: int
    id_task: int = -1


@dataclass(frozen=True)
class Shared:
    """Answer to `share`: the descriptors are with the provider.

    Attributes:
        id_slot: the slot.
        share_id: what `adopt` and `release` need.
        expires_ms: how long the share lives, from its issue.
        t_us: time that it took on the decoder's thread, microseconds.
        layout: layout digest.
        semantics: semantics digest.
        params: what a provider has to reproduce.
        n_prefix: tokens that the slot holds; the provider goes on behind them.
    """

    id_slot: int
    share_id: int
    expires_ms: int
    t_us: float
    layout: str
    semantics: str
    params: Mapping[str, Any]
    n_prefix: int = 0


@dataclass(frozen=True)
class AdoptedInSlot:
    """Answer to `adopt`.

    Attributes:
        id_slot: the slot.
        n_adopted: tokens that are in the slot now.
        n_usable: tokens that the next request can reuse.
        bytes_moved: bytes that were moved inside the regions.
        t_us: time that it took on the decoder's thread, microseconds.
    """

    id_slot: int
    n_adopted: int
    n_usable: int
    bytes_moved: int
    t_us: float


def error_of(status: int, body: bytes, action: str = "") -> KvshareError:
    """Return the error that an answer means.

    Args:
        status: HTTP status, not 200.
        body: the answer's body.
        action: what was asked for, for the text.
    """
    kind, message = _error_body(body)
    text = f"{action}: {message or f'status {status}'}" if action else message or f"status {status}"
    if kind in KINDS and status in (400, 409):
        return KINDS[kind](text)
    if status == 400:
        return ReplayError(text) if _UNKNOWN_SHARE.search(message) else LocalProtocolError(text)
    if status in (401, 403):
        return PeerRefusedError(text, hint="the server wants an API key")
    if status == 409:
        for pattern, error in _KIND_BY_WORDS:
            if pattern.search(message):
                return error(text)
        return SequenceInUseError(text)
    simple: dict[int, type[KvshareError]] = {
        410: ExpiredError,
        501: NotShareableError,
        502: PeerRefusedError,
        503: ServerBusyError,
        504: DeadlineExceededError,
    }
    if status in simple:
        return simple[status](text)
    return RemoteProtocolError(f"{text} (unexpected status {status})")


def _error_body(body: bytes) -> tuple[str, str]:
    """Return kind and message of an error answer, empty where it has none."""
    try:
        error = json.loads(body)["error"]
        if isinstance(error, str):
            return "", error
        return str(error.get("kind") or ""), str(error.get("message") or "")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "", body[:200].decode(errors="replace").strip()


class ServerClient:
    """One server; opens its connections when they are needed.

    Args:
        url: where it is, `http://127.0.0.1:8080`.
        api_key: key that every request carries; None sends none.
        headers: further headers of every request, for a client's own credentials.
        timeout_s: how long one request may take.
        strict: ask for strict shares; see `kvshare.Decoder.share`.
        session: connections to use; they stay open at the end.

    *Ownership*: `close`, or the end of an `async with`, closes the connections that it opened.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        strict: bool = False,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        if not re.fullmatch(r"https?://[^/?#]+(/[^?#]*)?", url):
            raise LocalProtocolError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:8080")
        self.url = url.rstrip("/")
        self._headers = dict(headers or {})
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._strict = strict
        self._session = session
        self._owns_session = session is None

    async def __aenter__(self) -> ServerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; idempotent."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections, for requests that this class knows nothing of."""
        if self._session is None:
            import aiohttp

            # a server may close a connection that waits just when it is used, and a POST is not sent twice
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        return self._session

    def with_headers(self, headers: Mapping[str, str]) -> ServerClient:
        """Return a client of the same server, over the same connections, with other credentials."""
        return ServerClient(
            self.url,
            headers={**self._headers, **headers},
            timeout_s=self._timeout_s,
            strict=self._strict,
            session=self.session,
        )

    # -- what a server is asked --

    async def health(self) -> bool:
        """Return whether the server is ready; False while it loads its model."""
        try:
            await self._request("GET", "/health")
        except ServerBusyError:
            return False
        return True

    async def props(self) -> Mapping[str, Any]:
        """Return the server's properties."""
        return _object(await self._request("GET", "/props"), "props")

    async def slots(self) -> list[Slot]:
        """Return all slots.

        Raises:
            NotShareableError: the server does not tell (`--no-slots`).
        """
        answer = await self._request("GET", "/slots")
        if not isinstance(answer, list):
            raise RemoteProtocolError("slots: the answer is no list")
        return [
            Slot(
                id_slot=_integer(entry, "id"),
                idle=not _object(entry, "slot").get("is_processing", True),
                # a slot that never had a task does not have the field
                n_tokens=_integer(entry, "n_prompt_tokens", default=0),
                n_ctx=_integer(entry, "n_ctx"),
                id_task=_integer(entry, "id_task", default=-1),
            )
            for entry in answer
        ]

    async def tokenize(
        self, content: str | Sequence[int | str], *, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """Return the tokens of a prompt, as the server itself would make them for a completion."""
        body = {"content": content, "add_special": add_special, "parse_special": parse_special}
        answer = _object(await self._request("POST", "/tokenize", body), "tokenize")
        tokens = answer.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise RemoteProtocolError("tokenize: the answer has no list of tokens")
        return tokens

    async def apply_template(self, body: Mapping[str, Any]) -> str:
        """Return the prompt that the body of a chat completion becomes."""
        answer = _object(await self._request("POST", "/apply-template", body), "apply-template")
        prompt = answer.get("prompt")
        if not isinstance(prompt, str):
            raise RemoteProtocolError("apply-template: the answer has no prompt")
        return prompt

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for something that has no method of its own here, and return the answer's object."""
        return _object(await self._request("POST", path, body), path)

    # -- slot actions --

    async def share(
        self,
        id_slot: int,
        socket: str,
        *,
        n_tokens: int | None = None,
        expires_ms: int | None = None,
        tokens: Sequence[int] | None = None,
    ) -> Shared:
        """Send the descriptors of a slot's memory to the provider that listens at a socket.

        Args:
            id_slot: an idle slot.
            socket: a path directly inside the folder that the server was given with `--kv-share`.
            n_tokens: tokens to make room for, those that it holds included; None leaves it to the server.
            expires_ms: milliseconds after which the share is dead; None leaves it to the server.
            tokens: the whole prompt. The slot keeps what it holds as far as all of these but the last one
                begin so, and drops the rest. None keeps all.
        """
        body: dict[str, Any] = {"socket": socket}
        if n_tokens is not None:
            body["n_tokens"] = n_tokens
        if expires_ms is not None:
            body["expires_ms"] = expires_ms
        if tokens is not None:
            body["tokens"] = list(tokens)
        if self._strict:
            body["strict"] = True
        answer = await self._action(id_slot, "share", body)
        return Shared(
            id_slot=_integer(answer, "id_slot"),
            share_id=_integer(answer, "share_id"),
            expires_ms=_integer(answer, "expires_ms"),
            t_us=_number(answer, "t_us"),
            layout=_string(answer, "layout"),
            semantics=_string(answer, "semantics"),
            params=_object(answer.get("params"), "share.params"),
            n_prefix=_integer(answer, "n_prefix", default=0),
        )

    async def adopt(self, id_slot: int, share_id: int, tokens: Sequence[int]) -> AdoptedInSlot:
        """Make the cells that a provider has filled the slot's own."""
        answer = await self._action(id_slot, "adopt", {"tokens": list(tokens), "share_id": share_id})
        return AdoptedInSlot(
            id_slot=_integer(answer, "id_slot"),
            n_adopted=_integer(answer, "n_adopted"),
            n_usable=_integer(answer, "n_usable"),
            bytes_moved=_integer(answer, "bytes_moved"),
            t_us=_number(answer, "t_us"),
        )

    async def release(self, id_slot: int, share_id: int) -> None:
        """End a share, if it is still there."""
        await self._action(id_slot, "release", {"share_id": share_id})

    async def erase(self, id_slot: int) -> None:
        """Empty an idle slot."""
        await self._action(id_slot, "erase", {})

    async def _action(self, id_slot: int, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        answer = await self._request("POST", f"/slots/{id_slot}?action={action}", body, action)
        return _object(answer, action)

    # -- HTTP --

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, action: str | None = None
    ) -> Any:
        import aiohttp

        action = action or path.strip("/")
        headers = {**self._headers, **({} if body is None else {"Content-Type": "application/json"})}
        async with (
            _translated(action, self.url),
            self.session.request(
                method,
                self.url + path,
                data=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s),
                allow_redirects=False,
            ) as answer,
        ):
            payload = await _bounded(answer, action)
            if answer.status != 200:
                raise error_of(answer.status, payload, action)
        try:
            return json.loads(payload)
        except (ValueError, RecursionError) as exc:
            raise RemoteProtocolError(f"{action}: the answer is no JSON: {exc}") from exc


@contextlib.asynccontextmanager
async def _translated(action: str, url: str) -> AsyncIterator[None]:
    """Turn aiohttp's errors into those of this package."""
    import aiohttp

    try:
        yield
    except (asyncio.TimeoutError, TimeoutError) as exc:
        raise DeadlineExceededError(f"{action}: the server did not answer in time") from exc
    except aiohttp.ClientConnectorError as exc:
        raise PeerClosedError(f"{action}: no server at {url}: {exc.strerror or exc}") from exc
    except aiohttp.ClientError as exc:
        raise PeerClosedError(f"{action}: the server hung up: {exc!r}") from exc


async def _bounded(answer: aiohttp.ClientResponse, action: str) -> bytes:
    payload = bytearray()
    async for part in answer.content.iter_any():
        payload += part
        if len(payload) > MAX_ANSWER_NBYTES:
            raise RemoteProtocolError(f"{action}: an answer of more than {MAX_ANSWER_NBYTES} bytes")
    return bytes(payload)


def is_refusal(error: KvshareError) -> bool:
    """Return whether the decoder said no, in contrast to being away or broken."""
    return isinstance(error, (AdoptError, LedgerError, PeerRefusedError))


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RemoteProtocolError(f"{name}: the answer is no object")
    return value


def _integer(entry: Any, key: str, *, default: int | None = None) -> int:
    value = _object(entry, key).get(key, default)
    if type(value) is not int:
        raise RemoteProtocolError(f"{key} is {value!r:.40}, not an integer")
    return value


def _number(entry: dict[str, Any], key: str) -> float:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RemoteProtocolError(f"{key} is {value!r:.40}, not a number")
    return float(value)


def _string(entry: dict[str, Any], key: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str):
        raise RemoteProtocolError(f"{key} is {value!r:.40}, not a string")
    return value
