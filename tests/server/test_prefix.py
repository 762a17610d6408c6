"""`--kv-prefix`: a llama-server whose slots begin with a frozen prompt, and one that cannot have it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare import Decoder, Model, Prefix, fds
from kvshare.store import PrefixServer, PrefixStore
from tests.server.conftest import Server, running

pytestmark = pytest.mark.native

N_CTX = 2048
OPTIONS = {
    "unified": ("--ctx-size", str(N_CTX), "-np", "4", "--kv-unified"),
    "streams": ("--ctx-size", str(2 * N_CTX), "-np", "2", "--no-kv-unified"),
    "one": ("--ctx-size", str(N_CTX), "-np", "1"),
}


@pytest.fixture(scope="module")
def tokens(model: Model) -> list[int]:
    return (model.tokenize("The lighthouse keeper has to answer every letter politely. ") * 60)[:500]


@pytest.fixture(scope="module")
def prefixes(model: Model, tokens: list[int]) -> Iterator[Path]:
    """A socket where the prefix `letters` is served."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fds.private_directory())
        path = folder / "prefixes.sock"
        decoder = stack.enter_context(Decoder.open(model, n_ctx=N_CTX))
        decoder.context.decode(tokens, position=0)
        store = stack.enter_context(PrefixStore())
        listener = stack.enter_context(fds.listening(path))
        server = PrefixServer(listener, store)
        thread = threading.Thread(target=server.run)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.stop)
        with Prefix.freeze(decoder, tokens, name="letters") as prefix:
            prefix.put(path)
        yield path


def begun(server: Server, tokens: list[int], more: list[int], **fields: int) -> tuple[int, str]:
    """Complete a prompt behind the prefix; return how much of it was cached, and the text."""
    answer = server.completion([*tokens, *more], **fields)
    return answer["timings"]["cache_n"], answer["content"]


@pytest.fixture(scope="module")
def plain(program: Path, model_path: Path) -> Iterator[Server]:
    with running(program, model_path, *OPTIONS["one"], share_dir=False) as server:
        yield server


@pytest.mark.parametrize("options", OPTIONS)
def test_every_slot_begins_with_it(
    options: str,
    program: Path,
    model_path: Path,
    model: Model,
    prefixes: Path,
    tokens: list[int],
    plain: Server,
) -> None:
    where = f"{prefixes}:letters" if options != "one" else str(prefixes)
    prompts = [model.tokenize(text, add_special=False) for text in ("Dear sir,", "Who sails by night?")]
    # computed in two parts as well, so that the sums run in the same order
    expected = []
    for prompt in prompts:
        begun(plain, tokens, [], n_predict=1, id_slot=0)
        expected.append(begun(plain, tokens, prompt)[1])
    with running(program, model_path, "--kv-prefix", where, *OPTIONS[options], share_dir=False) as server:
        _, slots = server.call("GET", "/slots")
        assert [slot["n_prompt_tokens"] for slot in slots] == [len(tokens)] * len(slots)
        found = [begun(server, tokens, prompts[i % 2], id_slot=i) for i in range(len(slots))]
        assert [cached for cached, _ in found] == [len(tokens)] * len(slots)
        assert [text for _, text in found] == [expected[i % 2] for i in range(len(slots))]
        # what one request has added, the next one does not see
        assert begun(server, tokens, prompts[0])[1] == expected[0]


def test_it_works_for_a_prompt_that_has_nothing_of_it(
    program: Path, model_path: Path, model: Model, prefixes: Path, plain: Server
) -> None:
    prompt = model.tokenize("A list of ships: ")
    with running(
        program, model_path, "--kv-prefix", str(prefixes), *OPTIONS["one"], share_dir=False
    ) as server:
        assert server.completion(prompt)["content"] == plain.completion(prompt)["content"]


@pytest.mark.parametrize(
    ("where", "options", "why"),
    [
        ("absent.sock", OPTIONS["one"], "nobody listens there"),
        ("prefixes.sock:other", OPTIONS["one"], "other"),
        ("prefixes.sock", ("--ctx-size", "1024", "-np", "1"), "n_ctx=2048"),
        ("prefixes.sock", (*OPTIONS["one"], "--rope-freq-base", "5000"), "another model"),
    ],
    ids=["no-server", "no-such-name", "other-layout", "other-semantics"],
)
def test_without_it_the_server_serves_all_the_same(
    where: str,
    options: tuple[str, ...],
    why: str,
    program: Path,
    model_path: Path,
    prefixes: Path,
    tokens: list[int],
) -> None:
    with running(
        program, model_path, "--kv-prefix", str(prefixes.parent / where), *options, share_dir=False
    ) as server:
        cached, text = begun(server, tokens, [], n_predict=4)
        assert cached == 0
        assert text
        log = server.log.read_text()
    assert "starting without --kv-prefix" in log
    assert why in log


def test_a_cache_that_begins_with_a_prefix_is_not_shared(
    program: Path, model_path: Path, prefixes: Path
) -> None:
    with running(program, model_path, "--kv-prefix", str(prefixes), *OPTIONS["one"]) as server:
        assert "leave out --kv-share" in server.log.read_text()
