"""Turns of a chat: engine, patched llama-server and provider as real processes, against a plain server.

Every turn is the whole conversation so far, with what the server itself has generated, and some new
tokens of the user. The provider prefills all of the new ones but the last. The plain server does the
same in the same graphs: first all but the last token without an answer, then the request itself, which
evaluates the last one; see `test_gate` for why. Text and logprobs are compared where the cells are the
same: without a unified cache. With one, new cells may be elsewhere, and rounding with them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvshare import fds, processes
from tests.native.conftest import gemma_path
from tests.server.test_gate import TIMEOUT_S, metric, post

__all__ = ["gemma_path"]

pytestmark = pytest.mark.native

N_TURNS = 4
N_USER = 100  # tokens of a turn
N_GENERATE = 12
N_UBATCH = 64  # so that a provider can be killed in the middle of a turn
ENGINE = ("--threshold", "64", "--patience", "1000")
BATCH = ("--n-batch", "2048", "--n-ubatch", str(N_UBATCH))
COMMON = ("-b", "2048", "-ub", str(N_UBATCH), "--ctx-size", "8192", "--ctx-checkpoints", "0")
OPTIONS = {"default": (), "streams": ("-np", "2", "--no-kv-unified")}
CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Setup:
    """The processes; `plain` is a server without an engine."""

    is_unified: bool
    plain: processes.Running
    server: processes.Running
    provider: processes.Running
    engine: processes.Running
    share_dir: Path

    def erase(self) -> None:
        for each in (self.plain, self.server):
            for id_slot in range(2):
                post(each, f"/slots/{id_slot}?action=erase", {})


@contextlib.contextmanager
def provider_and_engine(
    model: Path, server: processes.Running, socket: Path, folder: Path
) -> Iterator[tuple[processes.Running, processes.Running]]:
    with (
        processes.provider(model, socket, folder / f"{socket.stem}-provider.log", *BATCH) as provider,
        processes.engine(server.url, socket, folder / f"{socket.stem}-engine.log", *ENGINE) as engine,
    ):
        yield provider, engine


@contextlib.contextmanager
def set_up(program: Path, model: Path, options: Sequence[str]) -> Iterator[Setup]:
    with fds.private_directory() as folder, contextlib.ExitStack() as stack:
        share_dir = folder / "share"
        share_dir.mkdir(mode=0o700)
        everything = (*COMMON, "--slot-save-path", str(folder), *options)
        # it can share, so that it goes on behind a window as the other one does
        plain_dir = folder / "plain"
        plain_dir.mkdir(mode=0o700)
        plain = stack.enter_context(
            processes.llama_server(program, model, folder / "plain.log", *everything, share_dir=plain_dir)
        )
        server = stack.enter_context(
            processes.llama_server(program, model, folder / "server.log", *everything, share_dir=share_dir)
        )
        pair = stack.enter_context(provider_and_engine(model, server, share_dir / "turns.sock", folder))
        yield Setup("--no-kv-unified" not in options, plain, server, *pair, share_dir)


@pytest.fixture(scope="module", params=OPTIONS)
def processes_of(request: pytest.FixtureRequest, program: Path, model_path: Path) -> Iterator[Setup]:
    with set_up(program, model_path, OPTIONS[request.param]) as made:
        yield made


@pytest.fixture
def setup(processes_of: Setup, tmp_path: Path) -> Iterator[Setup]:
    """An engine of its own: it leaves a prompt to the server now and then, to learn how fast that is."""
    socket, log = processes_of.share_dir / "turns.sock", tmp_path / "engine.log"
    with processes.engine(processes_of.server.url, socket, log, *ENGINE) as engine:
        yield dataclasses.replace(processes_of, engine=engine)


# -- turns -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What came back; `text` and `logprobs` are compared."""

    text: str
    logprobs: Any
    tokens: list[int]
    cache_n: int
    headers: Mapping[str, str]

    @classmethod
    def of(cls, to: processes.Running, prompt: Sequence[int], **fields: Any) -> Answer:
        body = {"prompt": list(prompt), "n_predict": N_GENERATE, "temperature": 0, "n_probs": 3, **fields}
        headers, answer = post(to, "/completion", {**body, "return_tokens": True, "ignore_eos": True})
        assert len(answer["tokens"]) == N_GENERATE
        assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == len(prompt)
        logprobs = answer["completion_probabilities"]
        return cls(answer["content"], logprobs, answer["tokens"], answer["timings"]["cache_n"], headers)


@dataclass
class Conversation:
    """What was said until now, as tokens; `held` of them are in the cache of whoever generated them."""

    name: str
    tokens: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    n_turns: int = 0

    def prompt(self, to: processes.Running, n_user: int = N_USER) -> list[int]:
        """Return the prompt of the next turn."""
        text = f"{self.name}, turn {self.n_turns}: the keeper of the lighthouse wrote down what he saw. "
        body = {"content": text * (1 + n_user // 10), "add_special": not self.tokens}
        said = post(to, "/tokenize", body)[1]["tokens"]
        assert len(said) >= n_user
        self.n_turns += 1
        return [*self.tokens, *said[:n_user]]

    def take(self, prompt: Sequence[int], answer: Answer) -> None:
        self.tokens = [*prompt, *answer.tokens]
        self.held = self.tokens[:-1]  # the last one that was generated was not evaluated


def plain_turn(to: processes.Running, prompt: Sequence[int]) -> Answer:
    """Run a turn on the plain server's first slot, in the graphs of a handoff."""
    post(to, "/completion", {"prompt": prompt[:-1], "n_predict": 0, "id_slot": 0})
    return Answer.of(to, prompt, id_slot=0)


def events(log: Path, event: str) -> list[dict[str, Any]]:
    """Return what a process has said, one event a line."""
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == event]


def told(log: Path, event: str, n_tokens: int) -> dict[str, Any]:
    """Return the last event, which is about a prompt of so many tokens; it may be written a bit later."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        said = events(log, event)
        if said and said[-1]["n_tokens"] == n_tokens:
            return said[-1]
        assert time.monotonic() < deadline, said[-1:]
        time.sleep(0.01)


def check_turn(setup: Setup, prompt: Sequence[int], answer: Answer, n_held: int) -> None:
    """Check that a turn was handed over, and that only what is new was prefilled."""
    assert answer.headers["X-Kvshare-Path"] == "handoff", answer.headers["X-Kvshare-Reason"]
    assert answer.cache_n == len(prompt) - 1
    record = told(setup.engine.log, "completion", len(prompt))
    assert record["n_handed"] == len(prompt) - 1
    assert record["n_prefix"] == n_held
    assert record["bytes_moved"] == 0
    done = told(setup.provider.log, "done", len(prompt) - 1)
    assert done["n_prefix"] == n_held
    first = next(
        event["n_filled"]
        for event in events(setup.provider.log, "progress")
        if event["share_id"] == done["share_id"]
    )
    assert first == n_held + min(N_UBATCH, len(prompt) - 1 - n_held)  # after the first graph


def converse(setup: Setup, name: str, n_turns: int) -> tuple[list[Answer], list[Answer], list[int]]:
    """Run a conversation; return the answers, those of the plain server, and the slots."""
    setup.erase()
    ours, plain = Conversation(name), Conversation(name)
    answers, expected = [], []
    for _ in range(n_turns):
        prompt = ours.prompt(setup.server)
        n_held = len(ours.held)
        answers.append(Answer.of(setup.engine, prompt))
        check_turn(setup, prompt, answers[-1], n_held)
        ours.take(prompt, answers[-1])
        plain_prompt = plain.prompt(setup.plain)
        expected.append(plain_turn(setup.plain, plain_prompt))
        plain.take(plain_prompt, expected[-1])
    slots = [record["id_slot"] for record in events(setup.engine.log, "completion")[-n_turns:]]
    return answers, expected, slots


def require_same(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for answer, wanted in zip(answers, expected, strict=True):
        assert answer.text == wanted.text
        assert answer.logprobs == wanted.logprobs


@pytest.mark.slow
def test_turns(setup: Setup) -> None:
    answers, expected, slots = converse(setup, "turns", N_TURNS)
    assert len(set(slots)) == 1
    warm = [event["warm"] for event in events(setup.provider.log, "begun")[-N_TURNS:]]
    assert all(warm[1:])
    assert any(answer.text.strip() for answer in answers)
    if not setup.is_unified:
        require_same(answers, expected)


@pytest.mark.slow
def test_two_conversations_take_turns(setup: Setup) -> None:
    """In a default server each turn has cleared the other one's slot: it is loaded again from there."""
    setup.erase()
    chats = [Conversation("one"), Conversation("two")]
    expected = [Conversation("one"), Conversation("two")]
    for _ in range(3):
        for id_slot, (chat, plain) in enumerate(zip(chats, expected, strict=True)):
            prompt = chat.prompt(setup.server)
            answer = Answer.of(setup.engine, prompt)
            check_turn(setup, prompt, answer, len(chat.held))
            chat.take(prompt, answer)
            if not setup.is_unified:
                prompt = plain.prompt(setup.plain)
                post(setup.plain, "/completion", {"prompt": prompt[:-1], "n_predict": 0, "id_slot": id_slot})
                wanted = Answer.of(setup.plain, prompt, id_slot=id_slot)
                plain.take(prompt, wanted)
                require_same([answer], [wanted])


def test_a_short_turn_goes_to_its_slot(setup: Setup) -> None:
    """It is left to the server, and evaluates what is new there; the next long one is handed over again."""
    setup.erase()
    chat = Conversation("short turns")
    for n_user in (N_USER, 20, N_USER):
        prompt = chat.prompt(setup.server, n_user)
        n_held = len(chat.held)
        answer = Answer.of(setup.engine, prompt)
        if n_user == N_USER:
            check_turn(setup, prompt, answer, n_held)
        else:
            assert answer.headers["X-Kvshare-Reason"].startswith("cached")
            assert answer.cache_n == n_held
            told(setup.engine.log, "completion", len(prompt))
        chat.take(prompt, answer)
    slots = [record["id_slot"] for record in events(setup.engine.log, "completion")[-3:]]
    assert len(set(slots)) == 1


def test_a_turn_that_differs_is_cut(setup: Setup) -> None:
    """The user has changed the last message: what is the same is kept."""
    setup.erase()
    chat = Conversation("cut")
    prompt = chat.prompt(setup.server)
    chat.take(prompt, Answer.of(setup.engine, prompt))
    n = len(prompt) - 10
    said = Conversation("another end").prompt(setup.server)
    changed = [*prompt[:n], *(token for token in said if token != prompt[n])]
    answer = Answer.of(setup.engine, changed)
    check_turn(setup, changed, answer, n)
    if not setup.is_unified:
        plain_turn(setup.plain, prompt)
        require_same([answer], [plain_turn(setup.plain, changed)])


def test_messages(setup: Setup) -> None:
    """In OpenAI's form, where the server's template and tokenizer make the prompt of the answer's text."""
    setup.erase()
    messages: list[dict[str, str]] = []
    n_before = 0
    for n in range(3):
        content = f"Turn {n}: " + "what did the keeper of the lighthouse see? " * 12
        messages.append({"role": "user", "content": content})
        body = {"messages": messages, "max_tokens": N_GENERATE, "temperature": 0}
        headers, answer = post(setup.engine, CHAT, body)
        assert headers["X-Kvshare-Path"] == "handoff", headers["X-Kvshare-Reason"]
        usage = answer["timings"]
        record = told(setup.engine.log, "completion", usage["cache_n"] + usage["prompt_n"])
        assert usage["cache_n"] == record["n_tokens"] - 1
        assert record["n_prefix"] >= n_before
        assert record["bytes_moved"] == 0
        n_before = record["n_tokens"]  # all of the last prompt is in this one
        messages.append(answer["choices"][0]["message"])


@pytest.mark.slow
def test_a_failed_turn_leaves_the_history(setup: Setup, model_path: Path, tmp_path: Path) -> None:
    """The provider dies in the middle of a turn: the server goes on behind what it had."""
    setup.erase()
    chat, plain = Conversation("dies"), Conversation("dies")
    with (
        provider_and_engine(model_path, setup.server, setup.share_dir / "dies.sock", tmp_path) as (
            provider,
            engine,
        ),
        ThreadPoolExecutor(1) as pool,
    ):
        prompt = chat.prompt(setup.server)
        answer = Answer.of(engine, prompt)
        assert answer.headers["X-Kvshare-Path"] == "handoff", answer.headers["X-Kvshare-Reason"]
        chat.take(prompt, answer)
        wanted = plain_turn(setup.plain, plain.prompt(setup.plain))
        plain.take(prompt, wanted)
        n_before = len(events(provider.log, "progress"))
        prompt = chat.prompt(setup.server, 1500)
        asked = pool.submit(Answer.of, engine, prompt)
        deadline = time.monotonic() + TIMEOUT_S
        while len(events(provider.log, "progress")) == n_before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(provider.pid, signal.SIGKILL)
        answer = asked.result(TIMEOUT_S)
        assert answer.headers["X-Kvshare-Reason"].startswith("provider-died")
        assert answer.cache_n == len(chat.held)
        assert metric(engine, "kvshare_handoffs_total") == 1
        chat.take(prompt, answer)
        if not setup.is_unified:
            wanted = Answer.of(setup.plain, plain.prompt(setup.plain, 1500), id_slot=0)
            require_same([answer], [wanted])
        # and the turn after it, still without a provider
        prompt = chat.prompt(setup.server)
        answer = Answer.of(engine, prompt)
        assert answer.headers["X-Kvshare-Path"] == "local"
        assert answer.cache_n == len(chat.held)


@pytest.mark.slow
@pytest.mark.gemma
def test_a_sliding_window(program: Path, gemma_path: Path) -> None:
    """Past the window."""
    with set_up(program, gemma_path, OPTIONS["streams"]) as setup:
        answers, expected, _ = converse(setup, "window", N_TURNS)
        require_same(answers, expected)
