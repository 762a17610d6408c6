"""Shares beside everything else that a server does: other requests, adapters, sleep, providers that die."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvshare import Model, SemanticsMismatchError
from tests.server.conftest import Provider, Server, running
from tests.server.test_slots import adopt, hand_over, listening, share

pytestmark = pytest.mark.native

SENTENCE = "the keeper of the lighthouse wrote down every ship that passed, number {} of them. "
N = 200


@pytest.fixture(scope="module")
def prompts(model: Model) -> list[list[int]]:
    """Prompts that have next to nothing in common."""
    return [model.tokenize(f"{i} " + SENTENCE.format(i) * 20)[:N] for i in range(3)]


class Request(threading.Thread):
    """A completion in a thread of its own."""

    def __init__(self, server: Server, prompt: Sequence[int], **fields: Any) -> None:
        super().__init__()
        self._arguments = (server, prompt, fields)
        self.answer: Any = None
        self.start()

    def run(self) -> None:
        server, prompt, fields = self._arguments
        self.answer = server.completion(prompt, ignore_eos=True, **fields)

    def result(self) -> Any:
        self.join(120)
        assert self.answer is not None
        return self.answer


def until_processing(server: Server, id_slot: int = 0) -> None:
    deadline = time.monotonic() + 60
    while not server.call("GET", "/slots")[1][id_slot]["is_processing"]:
        assert time.monotonic() < deadline
        time.sleep(0.005)


# -- who gets which slot -----------------------------------------------------------------------


def test_a_request_for_a_busy_slot_changes_nothing_there(
    program: Path, model_path: Path, prompts: list[list[int]]
) -> None:
    """It waits; the prompt that it would reuse is not loaded over the one that runs."""
    with running(program, model_path, "--ctx-size", "2048", "-np", "1") as server:
        options = {"id_slot": 0, "n_predict": 48, "cache_prompt": False}
        alone = Request(server, prompts[0], **options).result()["content"]
        Request(server, prompts[1], id_slot=0).result()
        Request(server, prompts[2], id_slot=0).result()  # the one before is in the prompt cache now
        first = Request(server, prompts[0], **options)
        until_processing(server)
        second = Request(server, prompts[1], id_slot=0)
        assert first.result()["content"] == alone
        assert second.result()["timings"]["cache_n"] == N - 1


def test_an_adopted_prompt_waits_for_its_request(
    program: Path, model_path: Path, model: Model, prompts: list[list[int]]
) -> None:
    """A request that was there before does not get the slot with it."""
    with running(program, model_path, "--ctx-size", "2048", "-np", "1", "--cache-ram", "0") as server:
        with Provider(server.share_dir / "p.sock", model, prompts[0][:-1]) as provider:
            status, offer = share(server, 0, "p.sock", n_tokens=N)
            assert status == 200, offer
            other = Request(server, prompts[1])
            provider.join()
            time.sleep(0.5)
            status, answer = adopt(server, 0, offer["share_id"], prompts[0][:-1])
            assert status == 200, answer
        time.sleep(0.3)
        answer = Request(server, prompts[0]).result()
        assert answer["timings"]["cache_n"] == N - 1
        assert other.result()["timings"]["cache_n"] < 10


def test_an_adopted_prompt_does_not_wait_for_ever(
    program: Path, model_path: Path, model: Model, prompts: list[list[int]]
) -> None:
    with running(program, model_path, "--ctx-size", "2048", "-np", "1") as server:
        hand_over(server, model, 0, prompts[0][:-1])
        start = time.monotonic()
        assert Request(server, prompts[1]).result()["content"]
        assert time.monotonic() - start < 30


def test_who_waits_goes_on_if_the_request_is_refused(
    program: Path, model_path: Path, model: Model, prompts: list[list[int]]
) -> None:
    """The one that the prompt was adopted for, when it does not even begin."""
    with running(program, model_path, "--ctx-size", "2048", "-np", "1") as server:
        hand_over(server, model, 0, prompts[0][:-1])
        other = Request(server, prompts[1])
        time.sleep(0.2)
        body = {"prompt": prompts[0], "id_slot": 0, "grammar": "root ::= nowhere"}
        status, answer = server.call("POST", "/completion", body)
        assert status == 400, answer
        assert other.result()["content"]


def test_who_runs_gets_the_cells_of_a_share(
    program: Path, model_path: Path, prompts: list[list[int]]
) -> None:
    """Of a unified cache: a share only reserves them."""
    with (
        running(program, model_path, "--ctx-size", "1024", "-np", "2", "--kv-unified") as server,
        listening(server, "p.sock"),
    ):
        status, offer = share(server, 0, "p.sock", n_tokens=800)
        assert status == 200, offer
        answer = Request(server, prompts[0], id_slot=1, n_predict=150).result()
        assert answer["timings"]["predicted_n"] == 150
        status, answer = server.slot(0, "adopt", {"share_id": offer["share_id"], "tokens": prompts[1]})
        assert (status, answer["error"]["kind"]) == (409, "slot_in_use")


# -- a server that sleeps ----------------------------------------------------------------------


def test_a_server_with_a_live_share_does_not_sleep(
    program: Path, model_path: Path, model: Model, prompts: list[list[int]]
) -> None:
    options = ("--ctx-size", "2048", "-np", "1", "--sleep-idle-seconds", "1")
    with running(program, model_path, *options) as server:
        with contextlib.ExitStack() as stack:
            stack.enter_context(listening(server, "p.sock"))
            status, offer = share(server, 0, "p.sock", n_tokens=N, expires_ms=5000)
            assert status == 200, offer
            waiting = Request(server, prompts[1])  # there is no other slot
            time.sleep(3.5)
            body = {"share_id": offer["share_id"], "tokens": prompts[0]}
            status, answer = server.slot(0, "adopt", body)
            assert (status, answer["error"]["kind"]) == (409, "ledger_incomplete"), answer
            assert waiting.answer is None
        assert waiting.result()["content"]  # when the share has expired
        deadline = time.monotonic() + 60
        while not server.call("GET", "/props")[1]["is_sleeping"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        hand_over(server, model, 0, prompts[0][:-1])  # wakes it
        assert Request(server, prompts[0]).result()["timings"]["cache_n"] == N - 1


def test_a_share_alone_keeps_a_server_awake(program: Path, model_path: Path) -> None:
    options = ("--ctx-size", "2048", "-np", "1", "--sleep-idle-seconds", "1")
    with running(program, model_path, *options) as server, listening(server, "p.sock"):
        status, offer = share(server, 0, "p.sock", n_tokens=N, expires_ms=8000)
        assert status == 200, offer
        for _ in range(2):
            time.sleep(2)
            assert not server.call("GET", "/props")[1]["is_sleeping"]
        deadline = time.monotonic() + 60
        while not server.call("GET", "/props")[1]["is_sleeping"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def test_a_server_wakes_up_without_its_folder(
    program: Path, model_path: Path, prompts: list[list[int]]
) -> None:
    options = ("--ctx-size", "2048", "-np", "1", "--sleep-idle-seconds", "1")
    with running(program, model_path, *options) as server:
        deadline = time.monotonic() + 60
        while not server.call("GET", "/props")[1]["is_sleeping"]:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        server.share_dir.rmdir()
        assert Request(server, prompts[0]).result()["content"]
        assert share(server, 0, "p.sock")[0] == 400


# -- providers that die ------------------------------------------------------------------------

_TAKES_A_SHARE = """
import sys, time
from kvshare import fds
from kvshare.provider import Offer
with fds.listening(sys.argv[1]) as listener:
    print("listening", flush=True)
    connection = fds.accept_unix(listener, deadline=time.monotonic() + 60)
    offer = Offer.receive(connection)
    offer.ledger.begin()
    print("begun", flush=True)
    time.sleep(600)
"""


@contextlib.contextmanager
def provider_process(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _TAKES_A_SHARE, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_provider_that_is_killed_gives_the_slot_back(
    program: Path, model_path: Path, prompts: list[list[int]]
) -> None:
    with running(program, model_path, "--ctx-size", "2048", "-np", "1") as server:
        with provider_process(server.share_dir / "p.sock") as provider:
            status, offer = share(server, 0, "p.sock", n_tokens=N, expires_ms=24 * 3600 * 1000)
            assert status == 200, offer
            assert provider.stdout is not None
            assert provider.stdout.readline() == "begun\n"
            waiting = Request(server, prompts[1])
            time.sleep(2)
            assert waiting.answer is None
        assert waiting.result()["content"]
        status, answer = server.slot(0, "adopt", {"share_id": offer["share_id"], "tokens": prompts[0]})
        assert (status, answer["error"]["kind"]) == (409, "ledger_incomplete")
        assert "died" in answer["error"]["message"]


# -- adapters ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Path:
    """A LoRA adapter that changes the first layer's queries a lot."""
    path = tmp_path_factory.mktemp("adapter") / "adapter.gguf"
    rng = np.random.default_rng(1)
    n_embd, rank = 576, 4  # of SmolLM2-135M
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    for name, shape in (("lora_a", (rank, n_embd)), ("lora_b", (n_embd, rank))):
        writer.add_tensor(f"blk.0.attn_q.weight.{name}", rng.normal(0, 1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextlib.contextmanager
def with_adapter(program: Path, model: Path, adapter: Path) -> Iterator[Server]:
    """It is there, and switched off."""
    options = ("--ctx-size", "2048", "-np", "2", "--no-kv-unified", "--lora-scaled", f"{adapter}:0")
    with running(program, model, *options) as server:
        yield server


@contextlib.contextmanager
def refused(server: Server, model: Model, id_slot: int, tokens: list[int]) -> Iterator[None]:
    """A handoff by a provider that has no adapter, which is not the same model."""
    name = f"refused-{tokens[0]}-{time.monotonic_ns()}.sock"
    with Provider(server.share_dir / name, model, tokens) as provider:
        status, offer = share(server, id_slot, name, n_tokens=len(tokens) + 1)
        assert status == 200, offer
        provider.join()
        status, answer = server.slot(id_slot, "adopt", {"share_id": offer["share_id"], "tokens": tokens})
        assert status == 409, answer
    assert isinstance(provider.error, SemanticsMismatchError)
    yield


def test_adapters_that_are_switched_on_later(
    program: Path, model_path: Path, model: Model, adapter: Path, prompts: list[list[int]]
) -> None:
    """A share is of the model that requests are to be evaluated with, not of the one that a batch was."""
    with with_adapter(program, model_path, adapter) as server:
        hand_over(server, model, 0, prompts[0][:-1])
        plain = Request(server, prompts[0], id_slot=0).result()
        assert plain["timings"]["cache_n"] == N - 1

        assert server.call("POST", "/lora-adapters", [{"id": 0, "scale": 1.0}])[0] == 200
        with refused(server, model, 0, prompts[1][:-1]):
            adapted = Request(server, prompts[0], id_slot=1).result()
            assert adapted["completion_probabilities"] != plain["completion_probabilities"]

        # the last batch is one of another request's own adapters
        assert server.call("POST", "/lora-adapters", [{"id": 0, "scale": 0.0}])[0] == 200
        Request(server, prompts[2], id_slot=1, lora=[{"id": 0, "scale": 1.0}]).result()
        hand_over(server, model, 0, prompts[1][:-1])
        answer = Request(server, prompts[1], id_slot=0).result()
        assert answer["timings"]["cache_n"] == N - 1


def test_what_a_slot_holds_of_another_adapter_is_dropped(
    program: Path, model_path: Path, model: Model, adapter: Path, prompts: list[list[int]]
) -> None:
    with with_adapter(program, model_path, adapter) as server:
        with_it = {"id_slot": 0, "lora": [{"id": 0, "scale": 1.0}]}
        Request(server, prompts[0], **with_it).result()
        tokens = [*prompts[0], *prompts[1]]
        with listening(server, "p.sock"):
            status, offer = share(server, 0, "p.sock", n_tokens=2 * N, tokens=tokens)
            assert (status, offer["n_prefix"]) == (200, 0), offer
            server.slot(0, "release", {"share_id": offer["share_id"]})
        # and what was adopted without it is not reused with it
        hand_over(server, model, 0, prompts[0][:-1])
        assert Request(server, prompts[0], **with_it).result()["timings"]["cache_n"] == 0
