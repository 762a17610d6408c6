"""`kvshare prefill --out`: a state file that the server's own slot action `restore` reads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvshare import Model
from tests.native.conftest import gemma_path
from tests.native.handoff import environment
from tests.server.conftest import Server, running

__all__ = ["gemma_path"]

pytestmark = pytest.mark.native

TEXT = "The keeper of the lighthouse wrote down every ship that passed, its flag and its bearing. " * 6
N_SWA = 512  # window of gemma3-270m
TOLERANCE = 0.01  # of a log probability; 0.00004 was seen
OPTIONS = {
    "default": ("--ctx-size", "4096"),
    "np-1": ("--ctx-size", "2048", "-np", "1"),
}


def prefill(model: Path, out: Path, *options: str, stdin: str = "") -> int:
    """Run the command; return how many tokens are in the file."""
    command = [sys.executable, "-m", "kvshare", "prefill", "--json", "--model", str(model), "--out", str(out)]
    done = subprocess.run(
        [*command, "--all-but-last", *options],
        env=environment(),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    report = json.loads(done.stdout)
    assert report["nbytes"] == out.stat().st_size
    n_tokens: int = report["n_tokens"]
    return n_tokens


def ids(tokens: Sequence[int]) -> str:
    return ",".join(map(str, tokens))


def restore(server: Server, file: Path) -> tuple[int, Any]:
    return server.slot(0, "restore", {"filename": file.name})


def erase(server: Server) -> None:
    status, answer = server.slot(0, "erase", {})
    assert status == 200, answer


def plain(server: Server, tokens: Sequence[int]) -> Any:
    """Return the answer to a prompt that the server prefills, all but the last token first as the command."""
    erase(server)
    first = server.completion(tokens[:-1], id_slot=0, n_predict=0)
    assert first["timings"]["cache_n"] == 0
    answer = server.completion(tokens, id_slot=0)
    assert answer["timings"]["cache_n"] == len(tokens) - 1
    erase(server)
    return answer


def assert_same(answer: Any, other: Any) -> None:
    """Check that two answers have the same text, and the same probabilities to the last bit."""
    assert answer["content"] == other["content"]
    assert len(answer["completion_probabilities"]) == answer["tokens_predicted"]
    assert answer["completion_probabilities"] == other["completion_probabilities"]


# -- SmolLM2 -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def tokens(model_path: Path) -> list[int]:
    with Model.open(model_path) as model:
        return model.tokenize(TEXT)


@pytest.fixture(scope="module")
def state(model_path: Path, folder: Path, tokens: list[int]) -> Path:
    """A file with all tokens of the text but the last."""
    file = folder / "state.bin"
    assert prefill(model_path, file, "--tokens", ids(tokens)) == len(tokens) - 1
    return file


@pytest.fixture(scope="module", params=OPTIONS)
def server(request: pytest.FixtureRequest, program: Path, model_path: Path, folder: Path) -> Iterator[Server]:
    options = ("--slot-save-path", str(folder), *OPTIONS[request.param])
    with running(program, model_path, *options) as server:
        yield server


def test_the_next_completion_reuses_it(server: Server, state: Path, tokens: list[int]) -> None:
    local = plain(server, tokens)
    status, restored = restore(server, state)
    assert status == 200, restored
    assert restored["n_restored"] == len(tokens) - 1
    answer = server.completion(tokens, id_slot=0)
    assert (answer["timings"]["cache_n"], answer["timings"]["prompt_n"]) == (len(tokens) - 1, 1)
    assert_same(answer, local)


def test_a_text_is_tokenized_as_the_server_does(server: Server, state: Path, tokens: list[int]) -> None:
    erase(server)
    assert restore(server, state)[0] == 200
    answer = server.completion(TEXT)
    assert (answer["id_slot"], answer["timings"]["cache_n"]) == (0, len(tokens) - 1)


@pytest.mark.parametrize("where", ["argument", "file", "standard input", "dash", "file of tokens"])
def test_where_the_prompt_is(
    model_path: Path, state: Path, tokens: list[int], tmp_path: Path, where: str
) -> None:
    """Whatever it is read from, the file is the one that the server restores above."""
    written, listed, out = tmp_path / "prompt.txt", tmp_path / "tokens.json", tmp_path / "out.bin"
    written.write_text(TEXT)
    listed.write_text(json.dumps(tokens))
    options, stdin = {
        "argument": (("--prompt", TEXT), ""),
        "file": (("--file", str(written)), ""),
        "standard input": ((), TEXT),
        "dash": (("--file", "-"), TEXT),
        "file of tokens": (("--tokens-file", str(listed)), ""),
    }[where]
    assert prefill(model_path, out, *options, stdin=stdin) == len(tokens) - 1
    assert out.read_bytes() == state.read_bytes()


@pytest.mark.parametrize("nbytes", [0, 3, 11, 12, 100, 0.5, -1])
def test_a_truncated_file(server: Server, state: Path, tokens: list[int], nbytes: float) -> None:
    """The server says so, holds nothing of it, and goes on.

    In the header, in the tokens, in the middle of K and V, before the last byte.
    """
    content = state.read_bytes()
    kept = int(len(content) * nbytes) if isinstance(nbytes, float) else nbytes
    broken = state.with_name("broken.bin")
    broken.write_bytes(content[:kept])
    erase(server)
    status, answer = restore(server, broken)
    assert status == 400, answer
    assert "Unable to restore slot" in answer["error"]["message"]
    answer = server.completion(tokens[:20], id_slot=0, n_predict=2)
    assert answer["timings"]["cache_n"] == 0
    assert answer["content"]
    assert restore(server, state)[0] == 200
    assert server.completion(tokens, id_slot=0, n_predict=2)["timings"]["cache_n"] == len(tokens) - 1


def test_streams_of_their_own(
    program: Path, model_path: Path, folder: Path, state: Path, tokens: list[int]
) -> None:
    """Without a unified cache the file has to have as many streams as the server."""
    many = folder / "four.bin"
    prefill(model_path, many, "--tokens", ids(tokens), "--n-seq-max", "4")
    options = ("--slot-save-path", str(folder), "--ctx-size", "4096", "-np", "4", "--no-kv-unified")
    with running(program, model_path, *options) as server:
        local = plain(server, tokens)
        assert restore(server, state)[0] == 400
        status, answer = restore(server, many)
        assert status == 200, answer
        answer = server.completion(tokens, id_slot=0)
        assert answer["timings"]["cache_n"] == len(tokens) - 1
        assert_same(answer, local)


# -- gemma3-270m ---------------------------------------------------------------------------------


@pytest.mark.gemma
@pytest.mark.slow
@pytest.mark.parametrize("n_tokens", [100, 700])  # within its window of 512, and past it
def test_a_sliding_window(program: Path, gemma_path: Path, folder: Path, n_tokens: int) -> None:
    with Model.open(gemma_path) as model:
        tokens = model.tokenize(TEXT * 8)[:n_tokens]
    assert len(tokens) == n_tokens
    file = folder / "gemma.bin"
    prefill(gemma_path, file, "--tokens", ids(tokens))
    # no checkpoints: to make them, the server would cut its own prefill into other batches
    options = ("--slot-save-path", str(folder), "--ctx-size", "2048", "-np", "1", "--ctx-checkpoints", "0")
    with running(program, gemma_path, *options) as server:
        local = plain(server, tokens)
        status, answer = restore(server, file)
        assert status == 200, answer
        answer = server.completion(tokens, id_slot=0)
    assert answer["timings"]["cache_n"] == n_tokens - 1
    if n_tokens <= N_SWA:
        assert_same(answer, local)
    else:  # the file lacks the masked cells: attention sums in another order
        found, expected = (each["completion_probabilities"][0] for each in (answer, local))
        assert found["id"] == expected["id"]
        assert found["logprob"] == pytest.approx(expected["logprob"], abs=TOLERANCE)
