"""The gate: engine, patched llama-server and provider as real processes; three routes, one answer.

Of a prompt of n tokens, the first n-1 get into the slot on one of three routes:

- *fd*: the request goes to `kvshare engine`, which has `kvshare provider` fill the slot's own memory
- *file*: a `kvshare prefill --out` process writes a state file, which the server's `restore` reads
- *plain*: the server prefills them itself

Then the same request, byte for byte but for its slot, runs there. Text and all logprobs are compared,
as the JSON has them, and every route has to report that it reused exactly n-1 tokens.

Equal on all routes: the model, `n_batch` 2048 and `n_ubatch` 512, so the same graphs over the same
chunks of the first n-1 tokens; a graph of its own for the last one; and the place, because the only
slot is erased before each route and cells are taken from 0 on. Not compared is a plain request that
comes to an empty slot: it evaluates the last token in one graph with those before it, which gives the
same numbers only up to rounding. That one is what a failed handoff becomes, and is compared with itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvshare import fds, processes

pytestmark = pytest.mark.native

N_GENERATE = 16
TIMEOUT_S = 300.0
BATCH = ("--n-batch", "2048", "--n-ubatch", "512")
SERVER = ("-np", "1", "--ctx-size", "4096", "-b", "2048", "-ub", "512", "--cache-ram", "0")

CHAT = "/v1/chat/completions"
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "/completion": {"n_predict": N_GENERATE, "n_probs": 3},
    "/v1/completions": {"max_tokens": N_GENERATE, "logprobs": 3},
    CHAT: {"max_tokens": N_GENERATE, "logprobs": True, "top_logprobs": 3},
}


@dataclass(frozen=True)
class Gate:
    """The three processes.

    Attributes:
        model: what all have loaded.
        share_dir: folder of the sockets.
        files: folder of the server's state files.
        server, provider, engine: the processes.
    """

    model: Path
    share_dir: Path
    files: Path
    server: processes.Running
    provider: processes.Running
    engine: processes.Running

    def action(self, action: str, **body: Any) -> Any:
        return post(self.server, f"/slots/0?action={action}", body)[1]

    def tokenize(self, text: str) -> list[int]:
        tokens: list[int] = post(self.server, "/tokenize", {"content": text, "add_special": True})[1][
            "tokens"
        ]
        return tokens


@pytest.fixture(scope="module")
def gate(program: Path, model_path: Path) -> Iterator[Gate]:
    with fds.private_directory() as folder, contextlib.ExitStack() as stack:
        share_dir, files = folder / "share", folder / "files"
        share_dir.mkdir(mode=0o700)
        files.mkdir(mode=0o700)
        server = stack.enter_context(
            processes.llama_server(
                program,
                model_path,
                folder / "server.log",
                *SERVER,
                *("--slot-save-path", str(files)),
                share_dir=share_dir,
            )
        )
        pair = stack.enter_context(provider_and_engine(model_path, server, share_dir / "gate.sock", folder))
        yield Gate(model_path, share_dir, files, server, *pair)


@contextlib.contextmanager
def provider_and_engine(
    model: Path, server: processes.Running, socket: Path, folder: Path, *options: str
) -> Iterator[tuple[processes.Running, processes.Running]]:
    name = socket.stem
    with (
        processes.provider(model, socket, folder / f"{name}-provider.log", *BATCH) as provider,
        processes.engine(
            server.url, socket, folder / f"{name}-engine.log", "--threshold", "64", *options
        ) as engine,
    ):
        yield provider, engine


def post(to: processes.Running, path: str, body: Any) -> tuple[Mapping[str, str], Any]:
    """Return the headers and the JSON of an answer; a status that is no success raises."""
    request = urllib.request.Request(
        to.url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with processes.open_url(request, timeout=TIMEOUT_S) as answer:
        return answer.headers, json.loads(answer.read())


def metric(engine: processes.Running, name: str) -> float:
    """Return the value of one line of `/metrics`."""
    with processes.open_url(f"{engine.url}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[-1])


# -- requests ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """A greedy completion of 16 tokens with logprobs.

    Attributes:
        path: where it goes.
        body: JSON object.
        tokens: the prompt that the server makes of it.
    """

    path: str
    body: Mapping[str, Any]
    tokens: list[int]

    @classmethod
    def make(cls, gate: Gate, path: str, n_tokens: int) -> Request:
        """Make a request whose prompt has exactly so many tokens."""
        words = f"{path} with {n_tokens} tokens: ".split()
        words += "the keeper of the lighthouse wrote down every ship that passed in the night .".split() * 400

        def request(text: str) -> Request:
            common = {"temperature": 0, **FIELDS[path]}
            if path != CHAT:
                tokens = gate.tokenize(text)
                return cls(path, {"prompt": tokens, **common}, tokens)
            messages = [{"role": "user", "content": text}]
            prompt = post(gate.server, "/apply-template", {"messages": messages})[1]["prompt"]
            return cls(path, {"messages": messages, **common}, gate.tokenize(prompt))

        low, high = 1, len(words)  # the most words that fit, then short ones up to the length
        while low < high:
            middle = (low + high + 1) // 2
            fits = len(request(" ".join(words[:middle])).tokens) <= n_tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        text = " ".join(words[:low])
        text += " a" * (n_tokens - len(request(text).tokens))
        made = request(text)
        assert len(made.tokens) == n_tokens
        return made


@dataclass(frozen=True)
class Answer:
    """What came back, and what is compared of it: `text` and `logprobs`."""

    text: str
    logprobs: Any
    cache_n: int
    prompt_n: int
    headers: Mapping[str, str]

    @classmethod
    def of(cls, to: processes.Running, request: Request, **fields: Any) -> Answer:
        """Send a request; `fields` are added to it."""
        headers, answer = post(to, request.path, {**request.body, **fields})
        if request.path == "/completion":
            text, logprobs = answer["content"], answer["completion_probabilities"]
        else:
            choice = answer["choices"][0]
            text = choice["message"]["content"] if request.path == CHAT else choice["text"]
            logprobs = choice["logprobs"]["content"]
        assert len(logprobs) == answer["timings"]["predicted_n"] > 0
        assert all("logprob" in entry for entry in logprobs)
        return cls(text, logprobs, answer["timings"]["cache_n"], answer["timings"]["prompt_n"], headers)

    def check_same(self, other: Answer) -> None:
        assert self.text == other.text
        assert self.logprobs == other.logprobs


# -- three routes --------------------------------------------------------------------------------


def fd_route(gate: Gate, request: Request) -> Answer:
    answer = Answer.of(gate.engine, request)
    assert answer.headers["X-Kvshare-Path"] == "handoff", answer.headers["X-Kvshare-Reason"]
    assert answer.headers["X-Kvshare-Reason"] == "handed-over"
    return answer


def file_route(gate: Gate, request: Request) -> Answer:
    tokens, file = gate.files / "tokens.json", gate.files / "slot.bin"
    tokens.write_text(json.dumps(request.tokens))
    prefill = [sys.executable, "-m", "kvshare", "prefill", "--json", "--model", str(gate.model), *BATCH]
    done = subprocess.run(
        [*prefill, "--out", str(file), "--tokens-file", str(tokens), "--all-but-last"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    restored = gate.action("restore", filename=file.name)
    assert restored["n_restored"] == len(request.tokens) - 1
    assert restored["n_read"] == json.loads(done.stdout)["nbytes"] == file.stat().st_size
    return Answer.of(gate.server, request, id_slot=0)


def plain_route(gate: Gate, request: Request) -> Answer:
    prefix = {"prompt": request.tokens[:-1], "n_predict": 0, "id_slot": 0}
    timings = post(gate.server, "/completion", prefix)[1]["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (0, len(request.tokens) - 1)
    return Answer.of(gate.server, request, id_slot=0)


ROUTES: Mapping[str, Callable[[Gate, Request], Answer]] = {
    "fd": fd_route,
    "file": file_route,
    "plain": plain_route,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "n_tokens"), [("/completion", 251), ("/v1/completions", 251), (CHAT, 251), (CHAT, 3189)]
)
def test_three_routes_give_the_same(gate: Gate, path: str, n_tokens: int) -> None:
    request = Request.make(gate, path, n_tokens)
    counted = {
        name: metric(gate.engine, f"kvshare_{name}_total") for name in ("handoffs", "handoffs_reused_short")
    }
    answers = {}
    for name, route in ROUTES.items():
        gate.action("erase")
        answers[name] = route(gate, request)
        assert (answers[name].cache_n, answers[name].prompt_n) == (n_tokens - 1, 1), name
    assert answers["plain"].text.strip()
    for name in ("fd", "file"):
        answers[name].check_same(answers["plain"])
    assert metric(gate.engine, "kvshare_handoffs_total") == counted["handoffs"] + 1
    assert metric(gate.engine, "kvshare_handoffs_reused_short_total") == counted["handoffs_reused_short"]


# -- without a provider --------------------------------------------------------------------------


def test_a_dead_provider_costs_no_answer(gate: Gate, tmp_path: Path) -> None:
    request = Request.make(gate, CHAT, 251)
    alone = plain_from_empty(gate, request)
    with provider_and_engine(gate.model, gate.server, gate.share_dir / "dead.sock", tmp_path) as (
        provider,
        engine,
    ):
        os.kill(provider.pid, signal.SIGKILL)
        # until its sockets are closed the kernel lets callers in
        os.waitid(os.P_PID, provider.pid, os.WEXITED | os.WNOWAIT)
        answer = Answer.of(engine, request)
        check_fallback(engine, answer, "provider-absent")
    answer.check_same(alone)


@pytest.mark.slow
def test_a_provider_that_dies_at_work_costs_no_answer(gate: Gate, tmp_path: Path) -> None:
    """What it had filled by then leaves no trace."""
    request = Request.make(gate, "/completion", 1500)
    alone = plain_from_empty(gate, request)
    with (
        provider_and_engine(gate.model, gate.server, gate.share_dir / "dies.sock", tmp_path) as (
            provider,
            engine,
        ),
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(Answer.of, engine, request)
        wait_for_event(provider.log, "progress")
        os.kill(provider.pid, signal.SIGKILL)
        answer = asked.result(TIMEOUT_S)
        check_fallback(engine, answer, "provider-died")
    answer.check_same(alone)


@pytest.mark.slow
def test_a_strict_engine_hands_over_as_well(gate: Gate, tmp_path: Path) -> None:
    """The provider lets go of the memory after each, so that none is warm for the next."""
    socket = gate.share_dir / "strict.sock"
    with provider_and_engine(gate.model, gate.server, socket, tmp_path, "--strict") as (provider, engine):
        for n_tokens in (251, 300):
            request = Request.make(gate, "/completion", n_tokens)
            gate.action("erase")
            alone = plain_route(gate, request)
            gate.action("erase")
            answer = Answer.of(engine, request)
            assert answer.headers["X-Kvshare-Path"] == "handoff", answer.headers["X-Kvshare-Reason"]
            assert answer.cache_n == n_tokens - 1
            answer.check_same(alone)
            gate.action("erase")
        assert "memfd:llama-kv-share" not in Path(f"/proc/{provider.pid}/maps").read_text()
    events = [json.loads(line) for line in provider.log.read_text().splitlines() if line.startswith("{")]
    assert [event["warm"] for event in events if event["event"] == "begun"] == [False, False]


def plain_from_empty(gate: Gate, request: Request) -> Answer:
    """Return the server's own answer on an empty slot, and leave the slot empty."""
    gate.action("erase")
    answer = Answer.of(gate.server, request)
    assert answer.prompt_n == len(request.tokens)
    gate.action("erase")
    return answer


def check_fallback(engine: processes.Running, answer: Answer, reason: str) -> None:
    assert answer.headers["X-Kvshare-Path"] == "local"
    assert answer.headers["X-Kvshare-Reason"].split(":")[0] == reason
    assert metric(engine, f'kvshare_fallbacks_total{{reason="{reason}"}}') == 1
    assert metric(engine, "kvshare_handoffs_total") == 0


def wait_for_event(log: Path, event: str) -> None:
    """Wait until a provider has said something, one event a line."""
    deadline = time.monotonic() + TIMEOUT_S
    while f'"event": "{event}"' not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)
