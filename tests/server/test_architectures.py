"""Caches of every kind through the real server: what was adopted is what the next completion reuses.

llama.cpp's own `test-llama-archs` writes the tiny models. Their tokenizer writes a token as its number, so
two texts are equal only if their tokens are.

The local run beside a handoff has equal settings: the same slot of the same server, empty, prefills all but
the last token and then answers. Nothing but `n_ubatch` cuts that prefill: the server makes no checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvshare import Model, fds
from tests.native.conftest import archs_path, gemma_path
from tests.native.handoff import random_tokens
from tests.server.conftest import Server, running
from tests.server.test_slots import hand_over

__all__ = ["archs_path", "gemma_path"]

pytestmark = pytest.mark.native

N_PREDICT = 8
NO_CHECKPOINTS = ("--ctx-checkpoints", "0")


def erase(server: Server, id_slot: int) -> None:
    status, answer = server.slot(id_slot, "erase", {})
    assert status == 200, answer


def complete(server: Server, tokens: Sequence[int], **fields: Any) -> Any:
    return server.completion(tokens, n_predict=N_PREDICT, ignore_eos=True, return_tokens=True, **fields)


def plain(server: Server, id_slot: int, tokens: Sequence[int]) -> Any:
    """Return the answer to a prompt that the server prefills itself, in the same two steps as a handoff."""
    erase(server, id_slot)
    first = server.completion(tokens[:-1], id_slot=id_slot, n_predict=0)
    assert first["timings"]["prompt_n"] == len(tokens) - 1
    answer = complete(server, tokens, id_slot=id_slot)
    assert answer["timings"]["prompt_n"] == 1
    erase(server, id_slot)
    return answer


def assert_reused(answer: Any, n_tokens: int) -> None:
    """Check that all tokens of a prompt but the last came from the cache."""
    assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"]) == (n_tokens - 1, 1)


def assert_same(answer: Any, other: Any) -> None:
    """Check that two answers have the same text, and the same probabilities to the last bit."""
    assert answer["tokens"] == other["tokens"]
    assert answer["content"] == other["content"]
    assert len(answer["completion_probabilities"]) == N_PREDICT
    assert answer["completion_probabilities"] == other["completion_probabilities"]


def assert_close(answer: Any, other: Any) -> None:
    """Check that it is the same but for the order of sums, which goes by the place of the cells."""
    assert answer["content"] == other["content"]
    for one, two in zip(answer["completion_probabilities"], other["completion_probabilities"], strict=True):
        assert one["id"] == two["id"]
        assert one["logprob"] == pytest.approx(two["logprob"], abs=1e-3)


def assert_goes_on(server: Server, id_slot: int, tokens: Sequence[int], answer: Any, more: list[int]) -> None:
    """Check that a next turn reuses the adopted prompt and the answer to it."""
    # the last token of an answer was sampled, but never evaluated
    n_cached = len(tokens) + N_PREDICT - 1
    turn = complete(server, [*tokens, *answer["tokens"], *more], id_slot=id_slot)
    assert (turn["timings"]["cache_n"], turn["timings"]["prompt_n"]) == (n_cached, 1 + len(more))


# -- one tiny model of each kind -----------------------------------------------------------------

KINDS = {
    "llama-dense": "plain",
    "deepseek2-moe": "MLA",
    "deepseek32-moe": "sparse attention with an indexer",
    "deepseek4-moe": "compressed",
    "gemma3-dense": "sliding window",
    "cohere2-dense": "sliding window",
    "llama4-moe": "chunks",
    "mamba-dense": "recurrent",
    "mamba2-dense": "recurrent",
    "falcon-h1-dense": "recurrent and attention in each layer",
    "granitehybrid-dense": "recurrent or attention, by layer",
    "jamba-dense": "recurrent or attention, by layer",
    "qwen3next-moe": "recurrent or attention, by layer",
    "lfm2-dense": "convolution or attention with a window, by layer",
}
STREAMS = {
    "default": ("--ctx-size", "1024"),
    "np-4": ("--ctx-size", "1024", "-np", "4", "--no-kv-unified"),
    "np-1": ("--ctx-size", "256", "-np", "1"),
}
WINDOWED = {"gemma3-dense", "cohere2-dense", "lfm2-dense"}  # a unified cache that is sized for windows:
N_WINDOW_LEASE = 192  # of its 256 cells a share may take so many
N_TOKENS = (21, 37, 217)  # within, just past and far past the window of 32 that these models have


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("arch", KINDS)
def test_every_kind_of_cache(program: Path, archs_path: Path, arch: str, streams: str) -> None:
    path = archs_path / f"{arch}.gguf"
    options = (*STREAMS[streams], *NO_CHECKPOINTS, "--ubatch-size", "32", "--threads", "1")
    with Model.open(path) as model, running(program, path, *options) as server:
        for id_slot in (0,) if streams == "np-1" else (0, 2):
            for n_tokens in N_TOKENS:
                tokens = random_tokens(model, n_tokens, seed=n_tokens)
                local = plain(server, id_slot, tokens)
                hand_over(server, model, id_slot, tokens[:-1])
                answer = complete(server, tokens, id_slot=id_slot)
                assert_reused(answer, n_tokens)
                if arch in WINDOWED and streams == "default" and n_tokens > N_WINDOW_LEASE:
                    assert_close(answer, local)  # the lease leaves other slots their windows: other cells
                else:
                    assert_same(answer, local)
                assert_goes_on(server, id_slot, tokens, answer, [1, 2, 3])
                erase(server, id_slot)


@pytest.mark.parametrize("arch", ["dream-dense", "llada-dense"])
def test_a_model_without_a_cache(program: Path, archs_path: Path, arch: str) -> None:
    with running(program, archs_path / f"{arch}.gguf", "--ctx-size", "256") as server:
        path = server.share_dir / "p.sock"
        with fds.listening(path):
            status, answer = server.slot(0, "share", {"socket": str(path)})
        assert status == 501, answer
        assert answer["error"]["message"] == "this model has no cache"


# -- gemma3-270m, whose window is 512 tokens -----------------------------------------------------

SLOTS = {
    "default": ("--ctx-size", "4096"),
    "np-4": ("--ctx-size", "8192", "-np", "4", "--no-kv-unified"),
    "np-1": ("--ctx-size", "2048", "-np", "1"),
}


@pytest.fixture(scope="module")
def gemma(gemma_path: Path) -> Iterator[Model]:
    with Model.open(gemma_path) as model:
        yield model


@pytest.fixture(scope="module", params=SLOTS)
def server(request: pytest.FixtureRequest, program: Path, gemma_path: Path) -> Iterator[Server]:
    """A server as it comes, with checkpoints."""
    with running(program, gemma_path, *SLOTS[request.param]) as server:
        yield server


def words(model: Model, topic: str, n_tokens: int) -> list[int]:
    """Return a prompt of so many tokens."""
    text = f"{topic}: the keeper of the lighthouse wrote down every ship that passed. "
    return model.tokenize(text * (n_tokens // 8))[:n_tokens]


@pytest.mark.gemma
@pytest.mark.slow
@pytest.mark.parametrize("n_tokens", [300, 700, 1200])
def test_a_window_is_reused(server: Server, gemma: Model, n_tokens: int) -> None:
    erase(server, 0)
    tokens = words(gemma, "Reuse", n_tokens)
    hand_over(server, gemma, 0, tokens[:-1])
    answer = complete(server, tokens, id_slot=0)
    assert_reused(answer, n_tokens)
    assert_goes_on(server, 0, tokens, answer, gemma.tokenize("And then", add_special=False))


@pytest.mark.gemma
@pytest.mark.slow
def test_a_window_without_a_slot_id(server: Server, gemma: Model) -> None:
    erase(server, 0)
    tokens = words(gemma, "Anywhere", 600)
    hand_over(server, gemma, 0, tokens[:-1])
    answer = complete(server, tokens)
    assert answer["id_slot"] == 0
    assert_reused(answer, 600)


@pytest.mark.gemma
@pytest.mark.slow
def test_a_window_in_a_chat(server: Server, gemma: Model) -> None:
    erase(server, 0)
    chat: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Which ships passed the lighthouse? " * 90}],
        "max_tokens": N_PREDICT,
        "temperature": 0,
        "ignore_eos": True,
    }
    tokens = templated(server, chat)
    assert len(tokens) > 512
    hand_over(server, gemma, 0, tokens[:-1])
    status, answer = server.call("POST", "/v1/chat/completions", chat)
    assert status == 200, answer
    assert_reused(answer, len(tokens))
    chat["messages"] += [
        answer["choices"][0]["message"],
        {"role": "user", "content": "And then?"},
    ]
    status, turn = server.call("POST", "/v1/chat/completions", chat)
    assert status == 200, turn
    assert turn["timings"]["cache_n"] >= len(tokens)


def templated(server: Server, chat: Any) -> list[int]:
    """Return the tokens that the server makes of a chat."""
    status, prompt = server.call("POST", "/apply-template", {"messages": chat["messages"]})
    assert status == 200, prompt
    body = {"content": prompt["prompt"], "add_special": True, "parse_special": True}
    tokens: list[int] = server.call("POST", "/tokenize", body)[1]["tokens"]
    return tokens


@pytest.mark.gemma
@pytest.mark.slow
@pytest.mark.parametrize("slots", SLOTS)
def test_a_window_is_exact(program: Path, gemma_path: Path, gemma: Model, slots: str) -> None:
    with running(program, gemma_path, *SLOTS[slots], *NO_CHECKPOINTS) as server:
        for n_tokens in (300, 700, 1200):
            tokens = words(gemma, "Exact", n_tokens)
            local = plain(server, 0, tokens)
            hand_over(server, gemma, 0, tokens[:-1])
            answer = complete(server, tokens, id_slot=0)
            assert_reused(answer, n_tokens)
            assert_same(answer, local)
            erase(server, 0)
