"""What every server that shares its slots over HTTP has to keep, as small checks that need no pytest.

Say how to reach your server, and run what `check_server` yields:

    for name, check in check_server(my_server):
        check()  # raises AssertionError; NotApplicable where the server cannot show it

A check asks for `my_server()`, a context manager that yields a `ServerUnderTest`; it may be the same
server every time. After each check the server has to answer an ordinary completion, and what the check
left in slots is erased. Bodies are sent as bytes, because most of these checks are about bad ones.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

N_WORDS = 48
TIMEOUT_S = 60.0
_EXPIRES_MS = 1500

Check = Callable[[], None]
Provide = Callable[[str, Sequence[int]], AbstractContextManager[Callable[[], None]]]
"""Called with a socket's path and the tokens: serves one share there, and yields what waits for it.

When the block is entered, the provider listens already; when it is left, it does not any more.
"""


class NotApplicable(Exception):
    """The server under test is not set up in a way that can show this."""


@dataclass(frozen=True)
class ServerUnderTest:
    """How to reach a server.

    Attributes:
        url: `http://HOST:PORT`.
        directory: its `--kv-share DIR`.
        n_slots: its slots, at least 2.
        provide: a provider that fits.
        api_key: its key; None if it wants none.
        exact: the same prompt always gives the same text. A real model may tip over by the rounding
            that another batch or another place in the cache brings.
    """

    url: str
    directory: str
    n_slots: int
    provide: Provide
    api_key: str | None = None
    exact: bool = True


def check_server(
    factory: Callable[[], AbstractContextManager[ServerUnderTest]],
) -> Iterator[tuple[str, Check]]:
    """Yield the name of each check of a server, and the check."""
    for name, function in list(globals().items()):
        if name.startswith("server_"):
            yield name.removeprefix("server_"), _runner(function, factory)


def _runner(
    function: Callable[[_Server], None], factory: Callable[[], AbstractContextManager[ServerUnderTest]]
) -> Check:
    def run() -> None:
        with factory() as under_test:
            server = _Server(under_test)
            server.tidy()
            try:
                function(server)
                server.require_answers()
            finally:
                server.tidy()

    run.__doc__ = function.__doc__
    return run


# -- helpers -----------------------------------------------------------------------------------


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


@dataclass(frozen=True)
class _Answer:
    status: int
    body: Any

    def require(self, *statuses: int) -> Any:
        """Return the body, if the status is one of these."""
        _require(
            self.status in statuses, f"status {self.status}, expected {statuses}: {str(self.body)[:300]}"
        )
        if self.status >= 400:
            message = self.body["error"]["message"]
            _require(isinstance(message, str) and bool(message), "a refusal has to say why")
        return self.body


class _Server:
    def __init__(self, under_test: ServerUnderTest) -> None:
        self.under_test = under_test
        self._address = urlsplit(under_test.url)

    # -- HTTP --

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=TIMEOUT_S)

    def headers(self) -> dict[str, str]:
        key = self.under_test.api_key
        return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> _Answer:
        """Send a request; bytes go as they are, None is no body, all else as JSON."""
        payload = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method, path, payload, self.headers() if headers is None else headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        try:
            return _Answer(answer.status, json.loads(text))
        except ValueError as error:
            raise AssertionError(f"status {answer.status}, and no JSON: {text[:300]!r}") from error

    def act(self, id_slot: object, action: str, body: Any) -> _Answer:
        return self.ask("POST", f"/slots/{id_slot}?action={action}", body)

    # -- what a check needs --

    def tokens(self, seed: int = 0, n_words: int = N_WORDS) -> list[int]:
        """Return the tokens of a text that no other call of this run has had."""
        found: list[int] = self.ask(
            "POST", "/tokenize", {"content": _text(seed, n_words), "add_special": True}
        ).require(200)["tokens"]
        return found

    def slots(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.ask("GET", "/slots").require(200)
        return found

    def tidy(self) -> None:
        """Empty all slots."""
        for id_slot in range(self.under_test.n_slots):
            self.act(id_slot, "erase", {}).require(200)

    def complete(self, tokens: Sequence[int], **options: Any) -> dict[str, Any]:
        """Run a greedy completion."""
        body = {"prompt": list(tokens), "n_predict": 8, "temperature": 0, "cache_prompt": True, **options}
        found: dict[str, Any] = self.ask("POST", "/completion", body).require(200)
        return found

    def require_answers(self) -> None:
        """Check that an ordinary completion is what it has to be, with and without a cache."""
        tokens = self.tokens(seed=987)
        whole = self.complete(tokens, cache_prompt=False)
        self.require_same(self.complete(tokens), whole, "an ordinary completion is wrong")

    def require_same(self, found: dict[str, Any], expected: dict[str, Any], message: str) -> None:
        """Check the text of a completion, as far as this server is exact."""
        texts = found["content"], expected["content"]
        _require(texts[0] == texts[1] if self.under_test.exact else all(texts), message)

    @contextlib.contextmanager
    def socket_path(self) -> Iterator[str]:
        """Yield a path inside the folder that is not used."""
        path = os.path.join(self.under_test.directory, f"check-{random.getrandbits(40):x}.sock")
        try:
            yield path
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    @contextlib.contextmanager
    def silent(self) -> Iterator[str]:
        """Yield the socket of a provider that takes everything and does nothing."""
        with self.socket_path() as path, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(16)
            yield path

    @contextlib.contextmanager
    def shared(self, id_slot: int = 0) -> Iterator[int]:
        """Share a slot with a provider that does nothing; yield the share id, release at the end."""
        with self.offered(id_slot) as offer:
            yield offer["share_id"]

    @contextlib.contextmanager
    def offered(self, id_slot: int = 0, **fields: Any) -> Iterator[dict[str, Any]]:
        """As `shared`, with further fields of the request; yield the answer."""
        with self.silent() as path:
            offer: dict[str, Any] = self.act(id_slot, "share", {"socket": path, **fields}).require(200)
            try:
                yield offer
            finally:
                self.act(id_slot, "release", {"share_id": offer["share_id"]}).require(200)

    @contextlib.contextmanager
    def filled(
        self, tokens: Sequence[int], id_slot: int = 0, *, prompt: Sequence[int] | None = None
    ) -> Iterator[int]:
        """Share a slot with a provider that prefills; yield the share id when it has vouched."""
        with self.socket_path() as path, self.under_test.provide(path, tokens) as wait:
            body = {"socket": path, **({} if prompt is None else {"tokens": list(prompt)})}
            share_id: int = self.act(id_slot, "share", body).require(200)["share_id"]
            try:
                wait()
                yield share_id
            finally:
                self.act(id_slot, "release", {"share_id": share_id}).require(200)

    def adopt(self, share_id: object, tokens: object, id_slot: int = 0) -> _Answer:
        return self.act(id_slot, "adopt", {"share_id": share_id, "tokens": tokens})

    def hand_over(self, tokens: Sequence[int], id_slot: int = 0, *, chat: bool = False) -> dict[str, Any]:
        """Hand all tokens but the last over, `chat` behind what is there; return the answer to adopt."""
        prefix = list(tokens[:-1])
        with self.filled(prefix, id_slot, prompt=tokens if chat else None) as share_id:
            found: dict[str, Any] = self.adopt(share_id, prefix, id_slot).require(200)
        return found

    def chat(self, id_slot: int = 0) -> tuple[list[int], list[int]]:
        """Run a first turn on a slot; return its prompt, and what the slot holds then."""
        tokens = self.tokens()
        answer = self.complete(tokens, id_slot=id_slot, return_tokens=True)
        generated = answer["tokens"]
        _require(
            answer["timings"]["predicted_n"] == len(generated) > 0, f"{len(generated)} tokens were generated"
        )
        return tokens, [*tokens, *generated[:-1]]  # the last one was not evaluated

    @contextlib.contextmanager
    def stream(self, id_slot: int, tokens: Sequence[int], n_predict: int) -> Iterator[Callable[[], int]]:
        """Run a stream on a slot; yield what waits for its end and returns its number of events."""
        events: list[bytes] = []
        failed: list[BaseException] = []
        began = threading.Event()
        body = {
            "prompt": list(tokens),
            "n_predict": n_predict,
            "stream": True,
            "temperature": 0,
            "ignore_eos": True,
            "id_slot": id_slot,
            "cache_prompt": True,
        }

        def read() -> None:
            connection = self.connect()
            try:
                connection.request("POST", "/completion", json.dumps(body).encode(), self.headers())
                answer = connection.getresponse()
                while line := answer.readline():
                    if line.startswith(b"data:"):
                        events.append(line)
                        began.set()
            except BaseException as error:
                failed.append(error)
            finally:
                began.set()
                connection.close()

        def wait() -> int:
            thread.join(TIMEOUT_S)
            _require(not thread.is_alive() and not failed, f"the stream broke off: {failed}")
            _require(b'"stop":true' in events[-1].replace(b" ", b""), "the stream has no end")
            return len(events)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            began.wait(TIMEOUT_S)
            yield wait
        finally:
            thread.join(TIMEOUT_S)


def _text(seed: int, n_words: int) -> str:
    chosen = random.Random(f"{seed} {time.monotonic_ns()}" if seed >= 0 else seed)
    syllables = ["ka", "lo", "mi", "ner", "po", "ru", "sel", "ta", "vin", "zo"]
    # a verse, over and over: a real model goes on with it for certain, and does not tip over by the
    # rounding that another batch or another place in the cache brings
    verse = ["".join(chosen.choices(syllables, k=2)) for _ in range(3)]
    return " ".join(verse[i % len(verse)] for i in range(n_words))


BAD_IDS: tuple[object, ...] = (0, -1, 1 << 63, "1", 1.5, None, True, [], {})
BAD_BODIES = (b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"[" * 5000)
BAD_NUMBERS: tuple[object, ...] = (0, -1, 1 << 32, 1 << 63, "1", 1.5, None, True, [])


# -- a handoff ---------------------------------------------------------------------------------


def server_hands_over(server: _Server) -> None:
    """The next request on the slot reuses what was adopted, and answers as without a handoff."""
    tokens = server.tokens()
    expected = server.complete(tokens, cache_prompt=False)
    server.tidy()
    for id_slot in (0, server.under_test.n_slots - 1):
        adopted = server.hand_over(tokens, id_slot)
        _require(adopted["id_slot"] == id_slot, f"id_slot is {adopted['id_slot']}")
        _require(adopted["n_adopted"] == len(tokens) - 1, f"n_adopted is {adopted['n_adopted']}")
        _require(adopted["n_usable"] == len(tokens) - 1, f"n_usable is {adopted['n_usable']}")
        _require(adopted["bytes_moved"] == 0, f"{adopted['bytes_moved']} bytes were moved")
        _require(adopted["t_us"] >= 0, f"t_us is {adopted['t_us']}")
        found = server.complete(tokens, id_slot=id_slot)
        _require(found["timings"]["cache_n"] == len(tokens) - 1, f"timings are {found['timings']}")
        server.require_same(found, expected, "another answer than without a handoff")
        server.tidy()


def server_reuses_without_a_slot_in_the_request(server: _Server) -> None:
    """The server finds the slot itself."""
    tokens = server.tokens()
    server.hand_over(tokens)
    found = server.complete(tokens)
    _require(found["timings"]["cache_n"] == len(tokens) - 1, f"timings are {found['timings']}")


def server_hands_over_a_chat(server: _Server) -> None:
    """Templated and tokenized by the server itself."""
    body = {
        "messages": [{"role": "user", "content": _text(1, N_WORDS)}],
        "max_tokens": 4,
        "temperature": 0,
    }
    prompt = server.ask("POST", "/apply-template", body).require(200)["prompt"]
    asked = {"content": prompt, "add_special": True, "parse_special": True}
    tokens = server.ask("POST", "/tokenize", asked).require(200)["tokens"]
    server.hand_over(tokens)
    found = server.ask("POST", "/v1/chat/completions", {**body, "id_slot": 0}).require(200)
    _require(found["timings"]["cache_n"] == len(tokens) - 1, f"timings are {found['timings']}")


def server_describes_a_share(server: _Server) -> None:
    """All fields of the contract are there, and the ids can be read by any JSON reader."""
    with server.silent() as path:
        found = server.act(1, "share", {"socket": path}).require(200)
        server.act(1, "release", {"share_id": found["share_id"]}).require(200)
    _require(found["id_slot"] == 1, f"id_slot is {found['id_slot']}")
    _require(
        type(found["share_id"]) is int and 0 < found["share_id"] < 1 << 53, f"share_id {found['share_id']}"
    )
    for name in ("layout", "semantics"):
        _require(len(bytes.fromhex(found[name])) == 32, f"{name} is {found[name]}")
    _require(isinstance(found["params"], dict) and bool(found["params"]), "params are missing")
    _require(isinstance(found["regions"], list) and bool(found["regions"]), "regions are missing")
    _require(found["expires_ms"] > 0, f"expires_ms is {found['expires_ms']}")
    _require(found["t_us"] >= 0, f"t_us is {found['t_us']}")


def server_draws_new_share_ids(server: _Server) -> None:
    """Never the same twice."""
    seen = set()
    for _ in range(4):
        with server.shared() as share_id:
            seen.add(share_id)
    _require(len(seen) == 4, "a share id came twice")


# -- share -------------------------------------------------------------------------------------


def server_refuses_bad_bodies(server: _Server) -> None:
    """Malformed JSON, and JSON that is no object, for each action."""
    for action in ("share", "adopt", "release"):
        for body in BAD_BODIES:
            server.act(0, action, body).require(400)


def server_refuses_bad_sockets(server: _Server) -> None:
    """Missing, of a wrong type, or empty."""
    bad: tuple[object, ...] = (None, 1, 1.5, True, [], {}, ["x"], "")
    server.act(0, "share", {}).require(400)
    for value in bad:
        server.act(0, "share", {"socket": value}).require(400)


def server_refuses_bad_numbers(server: _Server) -> None:
    """`n_tokens` and `expires_ms` of a share."""
    with server.socket_path() as path:
        for name in ("n_tokens", "expires_ms"):
            for value in BAD_NUMBERS:
                server.act(0, "share", {"socket": path, name: value}).require(400)


def server_refuses_sockets_elsewhere(server: _Server) -> None:
    """Only what is directly inside the folder is ever contacted."""
    folder = server.under_test.directory
    with tempfile.TemporaryDirectory(prefix="kvs-") as outside, socket.socket(socket.AF_UNIX) as listener:
        target = os.path.join(outside, "p.sock")
        listener.bind(target)
        listener.listen(4)
        listener.setblocking(False)
        inner = os.path.join(folder, "check-folder")
        link = os.path.join(folder, "check-link")
        os.mkdir(inner)
        os.symlink(outside, link)
        try:
            for path in (
                target,
                os.path.join(folder, "..", os.path.basename(folder), "..", "x.sock"),
                os.path.relpath(os.path.join(folder, "x.sock"), "/"),
                "x.sock",
                folder,
                folder + "/",
                folder + "/.",
                folder + "/..",
                os.path.join(inner, "x.sock"),
                os.path.join(link, "p.sock"),
                "@abstract",
                "\0abstract",
                os.path.join(folder, "x\0.sock"),
            ):
                server.act(0, "share", {"socket": path}).require(400)
            with contextlib.suppress(BlockingIOError):
                listener.accept()[0].close()
                raise AssertionError("a socket outside of the folder was contacted")
        finally:
            os.rmdir(inner)
            os.unlink(link)


def server_refuses_a_symbolic_link(server: _Server) -> None:
    """A link inside the folder to a socket outside of it."""
    with (
        tempfile.TemporaryDirectory(prefix="kvs-") as outside,
        server.socket_path() as path,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        target = os.path.join(outside, "p.sock")
        listener.bind(target)
        listener.listen(4)
        listener.setblocking(False)
        os.symlink(target, path)
        server.act(0, "share", {"socket": path}).require(400, 502)
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
            raise AssertionError("a socket outside of the folder was contacted")


def server_refuses_a_long_path(server: _Server) -> None:
    """Longer than the kernel takes, and much longer."""
    for n in (108, 5000, 100_000):
        path = os.path.join(server.under_test.directory, "x" * n)
        server.act(0, "share", {"socket": path}).require(400)


def server_says_that_nobody_listens(server: _Server) -> None:
    """No such file, and a socket whose listener has gone."""
    with server.socket_path() as path:
        server.act(0, "share", {"socket": path}).require(502)
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(path)
        server.act(0, "share", {"socket": path}).require(502)


def server_refuses_what_is_no_socket(server: _Server) -> None:
    """A file and a fifo."""
    with server.socket_path() as path:
        with open(path, "w") as file:
            file.write("x")
        server.act(0, "share", {"socket": path}).require(400, 502)
        os.unlink(path)
        os.mkfifo(path)
        server.act(0, "share", {"socket": path}).require(400, 502)


def server_gives_up_on_a_listener_that_does_not_accept(server: _Server) -> None:
    """The backlog is full: 504 in bounded time, and other slots answer meanwhile."""
    with server.socket_path() as path, contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        listener.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(64):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(path)
        answers: list[_Answer] = []
        thread = threading.Thread(
            target=lambda: answers.append(server.act(0, "share", {"socket": path})), daemon=True
        )
        thread.start()
        server.complete(server.tokens(), id_slot=1)
        thread.join(TIMEOUT_S)
        _require(bool(answers), "no answer in time")
        answers[0].require(504)


def server_refuses_slots_that_do_not_exist(server: _Server) -> None:
    """Ids that are too large, negative, or no numbers."""
    n_slots = server.under_test.n_slots
    with server.silent() as path:
        for id_slot in (n_slots, n_slots + 1, -1, 1 << 31, 1 << 63, "x", "0x0", "1.5", "1e0"):
            server.act(id_slot, "share", {"socket": path}).require(400, 404)
            server.act(id_slot, "adopt", {"share_id": 1, "tokens": [1]}).require(400, 404)
            server.act(id_slot, "release", {"share_id": 1}).require(400, 404)


def server_refuses_unknown_actions(server: _Server) -> None:
    """Nothing happens by a name that is nearly right."""
    for action in ("", "Share", "share2", "shared", "adopt%20"):
        server.act(0, action, {"socket": "x"}).require(400)


def server_refuses_a_busy_slot(server: _Server) -> None:
    """In bounded time, and the stream there goes on to its end."""
    for n_predict in (64, 256, 1024):  # a short one may end while the server waits for it
        with server.stream(0, server.tokens(), n_predict) as wait, server.silent() as path:
            answer = server.act(0, "share", {"socket": path})
            wait()
        if answer.status != 200:
            break
        server.act(0, "release", {"share_id": answer.body["share_id"]}).require(200)
    answer.require(409)


def server_shares_a_slot_once(server: _Server) -> None:
    """The second share is refused, the first goes on."""
    tokens = server.tokens()
    with server.filled(tokens) as share_id:
        with server.silent() as path:
            server.act(0, "share", {"socket": path}).require(409)
        server.adopt(share_id, tokens).require(200)


def server_keeps_other_slots_going(server: _Server) -> None:
    """A stream on another slot ends as ever while a share is open."""
    with server.stream(1, server.tokens(), 32) as wait, server.shared():
        _require(wait() >= 2, "the stream was not streamed")


def server_does_not_give_a_shared_slot_away(server: _Server) -> None:
    """Requests that name no slot go elsewhere, and the share stays adoptable."""
    tokens = server.tokens()
    with server.filled(tokens) as share_id:
        for _ in range(2 * server.under_test.n_slots):
            server.complete(server.tokens(), n_predict=1)
        server.adopt(share_id, tokens).require(200)


# -- a slot that holds something ----------------------------------------------------------------


def server_offers_what_a_slot_holds(server: _Server) -> None:
    """All of it if the request does not say otherwise; and it is there afterwards."""
    with server.offered() as offer:
        _require(offer["n_prefix"] == 0, f"n_prefix of an empty slot is {offer['n_prefix']}")
    tokens, held = server.chat()
    with server.offered() as offer:
        _require(offer["n_prefix"] == len(held), f"n_prefix is {offer['n_prefix']}, it held {len(held)}")
    again = server.complete(tokens, id_slot=0)
    _require(again["timings"]["cache_n"] == len(tokens) - 1, f"timings are {again['timings']}")


def server_continues_a_chat(server: _Server) -> None:
    """The second turn: only what is new is prefilled, and the answer is that without a handoff."""
    _, held = server.chat()
    prompt = [*held, *server.tokens(seed=1)]
    expected = server.complete(prompt, id_slot=1, cache_prompt=False)
    with server.offered(tokens=prompt) as offer:
        _require(offer["n_prefix"] == len(held), f"n_prefix is {offer['n_prefix']}, it held {len(held)}")
    adopted = server.hand_over(prompt, chat=True)
    _require(adopted["n_adopted"] == len(prompt) - 1, f"n_adopted is {adopted['n_adopted']}")
    _require(adopted["n_usable"] == len(prompt) - 1, f"n_usable is {adopted['n_usable']}")
    _require(adopted["bytes_moved"] == 0, f"{adopted['bytes_moved']} bytes were moved")
    found = server.complete(prompt, id_slot=0)
    _require(found["timings"]["cache_n"] == len(prompt) - 1, f"timings are {found['timings']}")
    server.require_same(found, expected, "another answer than without a handoff")


def server_cuts_what_differs(server: _Server) -> None:
    """A turn that goes on earlier than the slot: what is behind is dropped, or all, never kept."""
    _, held = server.chat()
    n = len(held) // 2
    prompt = [*held[:n], *(token for token in server.tokens(seed=1) if token != held[n])]
    expected = server.complete(prompt, id_slot=1, cache_prompt=False)
    with server.offered(tokens=prompt) as offer:
        _require(offer["n_prefix"] in (0, n), f"n_prefix is {offer['n_prefix']}, {n} tokens are the same")
    server.hand_over(prompt, chat=True)
    found = server.complete(prompt, id_slot=0)
    _require(found["timings"]["cache_n"] == len(prompt) - 1, f"timings are {found['timings']}")
    server.require_same(found, expected, "another answer than without a handoff")


def server_leaves_the_last_token(server: _Server) -> None:
    """What the slot holds may be the whole prompt; its last token is not offered as held."""
    _, held = server.chat()
    with server.offered(tokens=held) as offer:
        _require(offer["n_prefix"] in (0, len(held) - 1), f"n_prefix is {offer['n_prefix']} of {len(held)}")


def server_keeps_a_chat_that_is_not_adopted(server: _Server) -> None:
    """A share that is released, and one whose provider has filled other tokens: the chat goes on."""
    _, held = server.chat()
    prompt = [*held, *server.tokens(seed=1)]
    changed = [*prompt[:-1], prompt[0] if prompt[-1] != prompt[0] else prompt[1]]
    expected = server.complete(prompt, id_slot=1, cache_prompt=False)
    with server.offered(tokens=prompt):
        pass
    with server.filled(prompt, prompt=prompt) as share_id:
        server.adopt(share_id, changed).require(409)
    found = server.complete(prompt, id_slot=0)
    _require(found["timings"]["cache_n"] == len(held), f"timings are {found['timings']}")
    server.require_same(found, expected, "the chat goes on otherwise")


def server_keeps_a_chat_from_a_bad_request(server: _Server) -> None:
    """Tokens of a share that are none: the slot is not touched."""
    _, held = server.chat()
    bad_lists: tuple[object, ...] = ([], {}, "x", 7, [[1]])
    bad_tokens: tuple[object, ...] = (-1, 1 << 31, 1 << 63, "1", 1.5, None, True)
    with server.silent() as path:
        for bad in (*bad_lists, *([held[0], token] for token in bad_tokens)):
            server.act(0, "share", {"socket": path, "tokens": bad}).require(400)
    with server.offered() as offer:
        _require(offer["n_prefix"] == len(held), f"n_prefix is {offer['n_prefix']}, it held {len(held)}")


# -- adopt -------------------------------------------------------------------------------------


def server_refuses_bad_share_ids(server: _Server) -> None:
    """Of a wrong type or out of range, or missing; the real share lives on."""
    tokens = server.tokens()
    with server.filled(tokens) as share_id:
        for bad in (*BAD_IDS, str(share_id), float(share_id) + 0.5, -share_id, 1 << 53, 1 << 64, 1 << 200):
            server.adopt(bad, tokens).require(400)
        server.act(0, "adopt", {"tokens": tokens}).require(400)
        server.adopt(share_id, tokens).require(200)


def server_refuses_bad_tokens(server: _Server) -> None:
    """Of a wrong type or out of range, or missing; the share lives on."""
    tokens = server.tokens()
    bad_lists: tuple[object, ...] = (None, [], {}, "x", 7, [[1]])
    bad_tokens: tuple[object, ...] = (-1, 1 << 31, 1 << 63, 1 << 200, "1", 1.5, None, True)
    with server.filled(tokens) as share_id:
        for bad in bad_lists:
            server.adopt(share_id, bad).require(400)
        for token in bad_tokens:
            server.adopt(share_id, [*tokens[:-1], token]).require(400)
        server.act(0, "adopt", {"share_id": share_id}).require(400)
        server.adopt(share_id, tokens).require(200)


def server_refuses_unknown_shares(server: _Server) -> None:
    """An id that was never drawn, and that of another slot; the share lives on."""
    tokens = server.tokens()
    with server.filled(tokens) as share_id:
        server.adopt(share_id ^ 1, tokens).require(400)
        server.adopt(share_id, tokens, id_slot=1).require(400)
        server.adopt(share_id, tokens).require(200)


def server_adopts_once(server: _Server) -> None:
    """The second time is refused, and what was adopted stays."""
    tokens = server.tokens()
    prefix = tokens[:-1]
    with server.filled(prefix) as share_id:
        server.adopt(share_id, prefix).require(200)
        server.adopt(share_id, prefix).require(400)
    found = server.complete(tokens, id_slot=0)
    _require(found["timings"]["cache_n"] == len(prefix), f"timings are {found['timings']}")


def server_lets_one_of_two_adopts_win(server: _Server) -> None:
    """However many race for one id."""
    tokens = server.tokens()
    prefix = tokens[:-1]
    with server.filled(prefix) as share_id:
        answers: list[_Answer] = []
        threads = [
            threading.Thread(target=lambda: answers.append(server.adopt(share_id, prefix)), daemon=True)
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
    statuses = sorted(answer.status for answer in answers)
    _require(statuses == [200, 400, 400, 400], f"the answers were {statuses}")
    found = server.complete(tokens, id_slot=0)
    _require(found["timings"]["cache_n"] == len(prefix), f"timings are {found['timings']}")


def server_refuses_before_the_provider_is_done(server: _Server) -> None:
    """409, more than once, and the share can still be released."""
    tokens = server.tokens()
    with server.shared() as share_id:
        for _ in range(2):
            server.adopt(share_id, tokens).require(409)


def server_refuses_other_tokens(server: _Server) -> None:
    """One token of another prompt, fewer, more; the share is used up then, the slot empty."""
    tokens = server.tokens()
    changed = [*tokens[:-1], tokens[0]]
    if changed == tokens:
        changed[-1] = tokens[1]
    for other in (changed, tokens[:-1], [*tokens, tokens[-1]]):
        with server.filled(tokens) as share_id:
            server.adopt(share_id, other).require(409)
            server.adopt(share_id, tokens).require(400, 409)
        found = server.complete(tokens, id_slot=0, n_predict=1)
        _require(found["timings"]["cache_n"] <= 1, f"timings are {found['timings']}")
        server.tidy()


def server_refuses_after_a_request(server: _Server) -> None:
    """A request on the slot between share and adopt: the share is dead, the request is right."""
    tokens, other = server.tokens(), server.tokens()
    expected = server.complete(other, id_slot=1)
    with server.filled(tokens) as share_id:
        found = server.complete(other, id_slot=0)
        server.adopt(share_id, tokens).require(400, 409)
    server.require_same(found, expected, "the request got another answer")
    again = server.complete(other, id_slot=0)
    _require(again["timings"]["cache_n"] == len(other) - 1, f"timings are {again['timings']}")


def server_refuses_after_an_erase(server: _Server) -> None:
    """An erase between share and adopt: the share is dead."""
    tokens = server.tokens()
    with server.filled(tokens) as share_id:
        server.act(0, "erase", {}).require(200)
        server.adopt(share_id, tokens).require(400, 409)


def server_lets_shares_expire(server: _Server) -> None:
    """410 behind the time that was asked for; the slot is free again."""
    tokens = server.tokens()
    with server.socket_path() as path, server.under_test.provide(path, tokens) as wait:
        found = server.act(0, "share", {"socket": path, "expires_ms": _EXPIRES_MS}).require(200)
        _require(found["expires_ms"] == _EXPIRES_MS, f"expires_ms is {found['expires_ms']}")
        share_id = found["share_id"]
        wait()
        time.sleep(_EXPIRES_MS / 1000 + 0.1)
        server.adopt(share_id, tokens).require(410)
        server.act(0, "release", {"share_id": share_id}).require(200)
    server.hand_over(tokens)


# -- release -----------------------------------------------------------------------------------


def server_releases_as_often_as_one_likes(server: _Server) -> None:
    """Live, ended and adopted; after the end the id is worth nothing, and the slot can be shared."""
    tokens = server.tokens()
    with server.filled(tokens) as share_id:
        for _ in range(3):
            server.act(0, "release", {"share_id": share_id}).require(200)
        server.adopt(share_id, tokens).require(400)
    server.hand_over(tokens)
    found = server.complete(tokens, id_slot=0)
    _require(found["timings"]["cache_n"] == len(tokens) - 1, f"timings are {found['timings']}")


def server_keeps_what_was_adopted(server: _Server) -> None:
    """Release after adoption changes nothing."""
    tokens = server.tokens()
    with server.filled(tokens[:-1]) as share_id:
        server.adopt(share_id, tokens[:-1]).require(200)
        server.act(0, "release", {"share_id": share_id}).require(200)
    found = server.complete(tokens, id_slot=0)
    _require(found["timings"]["cache_n"] == len(tokens) - 1, f"timings are {found['timings']}")


def server_survives_bad_releases(server: _Server) -> None:
    """Ids that are none, and one of another slot: the live share stays."""
    tokens = server.tokens()
    with server.filled(tokens) as share_id:
        for bad in BAD_IDS:
            server.act(0, "release", {"share_id": bad}).require(400)
        server.act(0, "release", {"share_id": share_id ^ 1}).require(200)
        server.act(1, "release", {"share_id": share_id}).require(200)
        server.adopt(share_id, tokens).require(200)


# -- the rest ----------------------------------------------------------------------------------


def server_wants_its_key(server: _Server) -> None:
    """The slot actions follow the rules of all others."""
    if server.under_test.api_key is None:
        raise NotApplicable("this server has no API key")
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        for action in ("share", "adopt", "release"):
            path = f"/slots/0?action={action}"
            answer = server.ask("POST", path, {}, headers={"Content-Type": "application/json", **headers})
            answer.require(401)


def server_serves_two_shares_to_one_socket(server: _Server) -> None:
    """Two slots, one provider that serves once: one share is filled, neither harms the other."""
    tokens = server.tokens()
    with server.socket_path() as path, server.under_test.provide(path, tokens) as wait:
        answers = [server.act(id_slot, "share", {"socket": path}) for id_slot in (0, 1)]
        for answer in answers:
            answer.require(200, 502, 504)
        wait()
        won = 0
        for id_slot, answer in enumerate(answers):
            if answer.status == 200:
                share_id = answer.body["share_id"]
                won += server.adopt(share_id, tokens, id_slot).status == 200
                server.act(id_slot, "release", {"share_id": share_id}).require(200)
    _require(won == 1, f"{won} shares were adopted")
