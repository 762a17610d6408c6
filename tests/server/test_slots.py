"""Share, adopt and release over HTTP: what was handed over is what the next completion reuses."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare import Model, fds
from tests.server.conftest import Provider, Server, running

pytestmark = pytest.mark.native

OPTIONS = {
    "default": ("--ctx-size", "4096"),
    "np-4": ("--ctx-size", "4096", "-np", "4", "--no-kv-unified"),
    "np-1": ("--ctx-size", "2048", "-np", "1"),
}


@pytest.fixture(scope="module", params=OPTIONS)
def server(request: pytest.FixtureRequest, program: Path, model_path: Path) -> Iterator[Server]:
    with running(program, model_path, "--slot-save-path", "/tmp", *OPTIONS[request.param]) as server:
        yield server


@pytest.fixture
def tokens(model: Model, request: pytest.FixtureRequest) -> list[int]:
    """A prompt of its own for each test: nothing of it is in a cache."""
    text = f"{request.node.name}: the keeper of the lighthouse wrote down every ship that passed. "
    return (model.tokenize(text) * 20)[:300]


@pytest.fixture
def slot(server: Server) -> int:
    """A slot that holds nothing."""
    status, answer = server.slot(0, "erase", {})
    assert status == 200, answer
    return 0


def share(server: Server, id_slot: int, name: str, **fields: Any) -> tuple[int, Any]:
    return server.slot(id_slot, "share", {"socket": str(server.share_dir / name), **fields})


@contextlib.contextmanager
def listening(server: Server, name: str) -> Iterator[None]:
    """A provider that takes shares and does nothing."""
    with fds.listening(server.share_dir / name) as listener:
        listener.listen(1000)
        yield


def adopt(server: Server, id_slot: int, share_id: Any, tokens: list[int]) -> tuple[int, Any]:
    """Adopt, waiting for the provider."""
    deadline = time.monotonic() + 60
    while True:
        status, answer = server.slot(id_slot, "adopt", {"share_id": share_id, "tokens": tokens})
        if status != 409 or "not done" not in answer["error"]["message"] or time.monotonic() > deadline:
            return status, answer
        time.sleep(0.02)


def hand_over(server: Server, model: Model, id_slot: int, tokens: list[int]) -> Any:
    with Provider(server.share_dir / f"{id_slot}-{tokens[2]}.sock", model, tokens) as provider:
        status, offer = share(server, id_slot, provider.path.name, n_tokens=len(tokens) + 1)
        assert status == 200, offer
        status, adopted = adopt(server, id_slot, offer["share_id"], tokens)
        assert status == 200, adopted
    assert provider.error is None
    assert adopted["n_adopted"] == adopted["n_usable"] == len(tokens)
    assert adopted["bytes_moved"] == 0
    return offer


# -- what is handed over is reused ---------------------------------------------------------------


def test_the_next_completion_reuses_it(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    offer = hand_over(server, model, slot, tokens[:-1])
    assert set(offer) == {
        "id_slot",
        "share_id",
        "layout",
        "semantics",
        "params",
        "regions",
        "expires_ms",
        "n_prefix",
        "t_us",
    }
    answer = server.completion(tokens, id_slot=slot)
    assert answer["timings"]["cache_n"] == len(tokens) - 1
    assert answer["timings"]["prompt_n"] == 1
    server.slot(slot, "erase", {})
    plain = server.completion(tokens, id_slot=slot, cache_prompt=False)
    assert plain["timings"]["cache_n"] == 0
    assert plain["content"] == answer["content"]


def test_without_a_slot_id(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    hand_over(server, model, slot, tokens[:-1])
    answer = server.completion(tokens)
    assert (answer["id_slot"], answer["timings"]["cache_n"]) == (slot, len(tokens) - 1)


def test_chat(server: Server, model: Model, slot: int) -> None:
    messages = [{"role": "user", "content": "Which ships passed the lighthouse? " * 20}]
    status, templated = server.call("POST", "/apply-template", {"messages": messages})
    assert status == 200
    tokens = server.call("POST", "/tokenize", {"content": templated["prompt"], "add_special": True})[1][
        "tokens"
    ]
    hand_over(server, model, slot, tokens[:-1])
    status, answer = server.call(
        "POST",
        "/v1/chat/completions",
        {"messages": messages, "max_tokens": 8, "temperature": 0, "id_slot": slot},
    )
    assert status == 200, answer
    assert answer["timings"]["cache_n"] == len(tokens) - 1


def test_other_slots_go_on(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    """A stream on another slot gives the same text while a share is open."""
    if len(server.call("GET", "/slots")[1]) == 1:
        return
    other = model.tokenize("Once upon a time there was a keeper who")
    alone = server.completion(other, id_slot=1, cache_prompt=False, n_predict=24)["content"]
    found: list[str] = []

    def stream() -> None:
        found.append(server.completion(other, id_slot=1, cache_prompt=False, n_predict=24)["content"])

    thread = threading.Thread(target=stream)
    thread.start()
    hand_over(server, model, slot, tokens[:-1])
    thread.join()
    assert found == [alone]


# -- the life of a share -------------------------------------------------------------------------


def test_a_chat_goes_on(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    """The slot offers all it holds; what is adopted is behind it."""
    server.completion(tokens[:100], id_slot=slot, n_predict=1)
    with Provider(server.share_dir / "chat.sock", model, tokens[:-1]) as provider:
        status, offer = share(server, slot, "chat.sock")
        assert status == 200, offer
        assert offer["n_prefix"] == 100
        status, answer = adopt(server, slot, offer["share_id"], tokens[:-1])
        assert status == 200, answer
        assert (answer["n_adopted"], answer["bytes_moved"]) == (len(tokens) - 1, 0)
    assert provider.error is None
    answer = server.completion(tokens, id_slot=slot)
    assert answer["timings"]["cache_n"] == len(tokens) - 1


def test_a_chat_stays_when_its_turn_fails(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    server.completion(tokens[:100], id_slot=slot, n_predict=1)
    for name in ("release", "refuse"):
        with Provider(server.share_dir / f"{name}.sock", model, tokens[:-1]) as provider:
            status, offer = share(server, slot, f"{name}.sock", tokens=tokens)
            assert status == 200, offer
            assert offer["n_prefix"] == 100
            if name == "release":
                assert server.slot(slot, "release", {"share_id": offer["share_id"]})[0] == 200
            else:
                # other tokens than those that the slot held
                provider.join()
                others = [*tokens[1:101], *tokens[100:-1]]
                status, answer = server.slot(slot, "adopt", {"share_id": offer["share_id"], "tokens": others})
                assert (status, answer["error"]["kind"]) == (409, "ledger_digest"), answer
    answer = server.completion(tokens[:110], id_slot=slot)
    assert answer["timings"]["cache_n"] == 100


def test_an_erase_kills_the_share(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    with Provider(server.share_dir / "erase.sock", model, tokens[:40]):
        status, offer = share(server, slot, "erase.sock")
        assert status == 200, offer
        server.slot(slot, "erase", {})
        status, answer = server.slot(slot, "adopt", {"share_id": offer["share_id"], "tokens": tokens[:40]})
        assert status == 409, answer
    assert server.completion(tokens[:40], id_slot=slot)["timings"]["cache_n"] == 0


def test_a_request_kills_the_share(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    with Provider(server.share_dir / "request.sock", model, tokens[:40]):
        status, offer = share(server, slot, "request.sock", n_tokens=256)
        assert status == 200, offer
        server.completion(tokens[100:140], id_slot=slot)
        status, answer = server.slot(slot, "adopt", {"share_id": offer["share_id"], "tokens": tokens[:40]})
        assert status == 409, answer


@pytest.mark.parametrize("end", ["erase", "refuse", "restore"])
def test_who_waits_for_the_slot_gets_it(
    server: Server, model: Model, slot: int, tokens: list[int], end: str
) -> None:
    """A request that found no slot goes on when a share ends, however that is."""
    if len(server.call("GET", "/slots")[1]) > 1:
        return
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(server.completion(tokens[200:220])))
    with Provider(server.share_dir / "waits.sock", model, tokens[:40]) as provider:
        status, offer = share(server, slot, "waits.sock")
        assert status == 200, offer
        provider.join()
        waiting.start()
        time.sleep(0.5)
        assert not found
        if end == "refuse":
            body = {"share_id": offer["share_id"], "tokens": tokens[1:41]}
            assert server.slot(slot, "adopt", body)[0] == 409
        else:
            server.slot(slot, end, {"filename": "a-file-that-is-not-there"})
    waiting.join(60)
    assert found
    assert found[0]["content"]


def test_a_slot_with_a_share_is_not_saved(server: Server, slot: int, tokens: list[int]) -> None:
    """Its provider may be writing over what it holds."""
    server.completion(tokens[:40], id_slot=slot, n_predict=1)
    file = {"filename": f"kvshare-{server.port}.bin"}
    with listening(server, "saved.sock"):
        status, offer = share(server, slot, "saved.sock")
        assert status == 200, offer
        status, answer = server.slot(slot, "save", file)
        assert status == 503
        assert "live share" in answer["error"]["message"]
        assert server.slot(slot, "release", {"share_id": offer["share_id"]})[0] == 200
    assert server.slot(slot, "save", file)[0] == 200
    Path("/tmp", file["filename"]).unlink()


def test_slots_are_read_while_shares_end(server: Server, slot: int, tokens: list[int]) -> None:
    """Which happens between two graphs: a stream on another slot gives the same text."""
    if len(server.call("GET", "/slots")[1]) == 1:
        return
    options = {"id_slot": 1, "cache_prompt": False, "n_predict": 24, "ignore_eos": True}
    alone = server.completion(tokens[50:80], **options)["content"]
    found: list[str] = []
    stream = threading.Thread(
        target=lambda: found.append(server.completion(tokens[50:80], **options)["content"])
    )
    stream.start()
    n_shares = 0
    with listening(server, "ends.sock"):
        while stream.is_alive():
            n_shares += share(server, slot, "ends.sock", expires_ms=1)[0] == 200
            for _ in range(5):
                time.sleep(0.02)
                server.call("GET", "/slots")
    stream.join()
    assert found == [alone]
    assert n_shares


def test_a_context_shift_ends_shares(program: Path, model_path: Path, model: Model) -> None:
    """It writes to the keys of all cells."""
    options = ("--ctx-size", "512", "-np", "2", "--no-kv-unified", "--context-shift")
    with running(program, model_path, *options) as server, listening(server, "shift.sock"):
        status, offer = share(server, 0, "shift.sock")
        assert status == 200, offer
        prompt = (model.tokenize("the keeper of the lighthouse wrote down every ship that passed. ") * 20)[
            :240
        ]
        answer = server.completion(prompt, id_slot=1, n_predict=40, ignore_eos=True)
        assert answer["truncated"]
        status, refused = server.slot(0, "adopt", {"share_id": offer["share_id"], "tokens": prompt})
        assert (status, refused["error"]["kind"]) == (409, "slot_in_use")


def test_adopt_twice(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    offer = hand_over(server, model, slot, tokens[:50])
    status, answer = server.slot(slot, "adopt", {"share_id": offer["share_id"], "tokens": tokens[:50]})
    assert status == 400, answer


def test_other_tokens(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    with Provider(server.share_dir / "other.sock", model, tokens[:50]) as provider:
        status, offer = share(server, slot, "other.sock")
        assert status == 200, offer
        provider.join(60)
        wrong = [*tokens[:49], tokens[49] + 1]
        status, answer = server.slot(slot, "adopt", {"share_id": offer["share_id"], "tokens": wrong})
        assert status == 409, answer
        assert "tokens_sha256" in answer["error"]["message"]
    assert server.completion(tokens[:50], id_slot=slot)["timings"]["cache_n"] == 0


def test_release_is_idempotent(server: Server, model: Model, slot: int, tokens: list[int]) -> None:
    with Provider(server.share_dir / "release.sock", model, tokens[:10]):
        status, offer = share(server, slot, "release.sock")
        assert status == 200, offer
        for _ in range(3):
            assert server.slot(slot, "release", {"share_id": offer["share_id"]})[0] == 200
        assert server.slot(slot, "adopt", {"share_id": offer["share_id"], "tokens": tokens[:10]})[0] == 400
    assert server.completion(tokens[:50], id_slot=slot)["timings"]["cache_n"] == 0


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("share_id", [0, -1, 2**63, 2**53, "1", 1.5, None, True, [1], 12345])
@pytest.mark.parametrize("action", ["adopt", "release"])
def test_share_ids(server: Server, action: str, share_id: Any) -> None:
    status, _ = server.slot(0, action, {"share_id": share_id, "tokens": [1, 2]})
    assert status == (200 if action == "release" and share_id == 12345 else 400)


@pytest.mark.parametrize("tokens", [None, [], [1.5], ["1"], [-1], [2**31], [10**9], "1", {"a": 1}, [None]])
def test_tokens(server: Server, tokens: Any) -> None:
    assert server.slot(0, "adopt", {"share_id": 1, "tokens": tokens})[0] == 400


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ('"tokens": [1 ,\n2, 3\t]', "unknown share"),
        ('"x": "tokens", "tokens": [3]', "unknown share"),
        ('"x": "\\"tokens\\": [1]", "tokens": [3]', "unknown share"),
        ('"tokens": [1.5], "tokens": [1]', "unknown share"),
        ('"tokens": [-0]', "unknown share"),
        ('"tokens": [1], "tokens": [1.5]', "not an integer"),
        ('"a": {"tokens": [1]}, "tokens": []', "missing, not an array, or empty"),
        ('"a": {"tokens": [1]}', "missing, not an array, or empty"),
        ('"tokens": [1.0]', "not an integer"),
        ('"tokens": [1e2]', "not an integer"),
        ('"tokens": [-1]', "out of range"),
        ('"tokens": [4294967296]', "out of range"),
        ('"tokens": [99999999999999999999]', "not an integer"),
        ('"tokens": [01]', "not a JSON object"),
        ('"tokens": [1,]', "not a JSON object"),
        ('"tokens": [1 2]', "not a JSON object"),
        ('"tokens": [1', "not a JSON object"),
        ('"tokens": [1]]', "not a JSON object"),
        ('"tokens": [1], "tokens": [-1]', "out of range"),
        ('"a": {"tokens": [1]}, "tokens": [-1]', "out of range"),
        ('"a\\"tokens": [1], "tokens": [-1]', "out of range"),
        ('"tokens": [1], "tok\\u0065ns": [-1.0]', "not an integer"),
    ],
)
def test_tokens_are_read_as_json_is(server: Server, members: str, says: str) -> None:
    """They are taken out of the body before the rest is parsed."""
    status, answer = server.slot(0, "adopt", f'{{"share_id": 1, {members}}}'.encode())
    assert status == 400
    assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"socket": 1}', b"\xff\xfe", b'{"socket": ""}']
)
def test_bodies(server: Server, body: bytes) -> None:
    assert server.slot(0, "share", body)[0] == 400


def test_sockets(server: Server, slot: int, tmp_path: Path) -> None:
    inside = server.share_dir
    (inside / "file").write_text("")
    (inside / "link.sock").symlink_to("/tmp/nothing.sock")
    (inside / "sub").mkdir(exist_ok=True)
    for path, status in [
        (str(tmp_path / "outside.sock"), 400),
        (f"{inside}/../outside.sock", 400),
        (f"{inside}/sub/below.sock", 400),
        (f"{inside}/" + "x" * 120, 400),
        ("relative.sock", 400),
        (f"{inside}/", 400),
        (f"{inside}/..", 400),
        (f"{inside}/file", 400),
        (f"{inside}/link.sock", 400),
        (f"{inside}/nobody.sock", 502),
    ]:
        found, answer = server.slot(slot, "share", {"socket": path})
        assert found == status, (path, answer)
    for left in inside.iterdir():
        if left.is_dir() and not left.is_symlink():
            left.rmdir()
        else:
            left.unlink()


@pytest.mark.parametrize("id_slot", ["99", "-1", "x"])
def test_unknown_slots(server: Server, id_slot: str) -> None:
    assert server.slot(id_slot, "release", {"share_id": 1})[0] == 400


def test_without_kv_share(program: Path, model_path: Path) -> None:
    """A server that was not asked to share says how to ask, and serves as ever."""
    with running(program, model_path, "--ctx-size", "1024", "-np", "1", share_dir=False) as server:
        status, answer = server.slot(0, "share", {"socket": "/tmp/x"})
        assert status == 501
        assert "--kv-share" in answer["error"]["message"]
        status, answer = server.slot(0, "erase", {})
        assert status == 501
        assert "--slot-save-path" in answer["error"]["message"]
        assert not any("memfd" in line for line in server.maps())
        assert server.completion([1, 2, 3], id_slot=0)["content"]


def test_with_an_api_key(program: Path, model_path: Path, model: Model) -> None:
    with running(program, model_path, "--ctx-size", "1024", "-np", "1", "--api-key", "secret") as server:
        assert server.slot(0, "release", {"share_id": 1})[0] == 401
        key = {"Authorization": "Bearer secret"}
        assert server.call("POST", "/slots/0?action=release", {"share_id": 1}, headers=key)[0] == 200
