"""Peers of a real server that go away, wait, or lie: nothing stays leased, and the next request is right."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvshare import Model, Offer, fds
from tests.server.conftest import Provider, Server, running
from tests.server.test_slots import adopt, hand_over, share

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def server(program: Path, model_path: Path) -> Iterator[Server]:
    with running(program, model_path, "--ctx-size", "2048", "-np", "1") as server:
        yield server


@pytest.fixture
def tokens(model: Model, request: pytest.FixtureRequest) -> list[int]:
    """A prompt of its own for each test."""
    return model.tokenize(f"{request.node.name}: the lamp was lit at dusk and put out at dawn. " * 4)


@contextlib.contextmanager
def receiving(server: Server, name: str) -> Iterator[socket.socket]:
    """Listen in the server's folder."""
    with fds.listening(server.share_dir / name) as listener:
        yield listener


def receive(listener: socket.socket) -> Offer:
    deadline = time.monotonic() + 10
    with fds.accept_unix(listener, deadline=deadline) as connection:
        return Offer.receive(connection, deadline=deadline)


def test_restart_between_share_and_adopt(
    program: Path, model_path: Path, model: Model, tokens: list[int]
) -> None:
    """The share is unknown to the server that came after, and the provider sees no fault."""
    options = ("--ctx-size", "1024", "-np", "1")
    with running(program, model_path, *options) as first, receiving(first, "restart.sock") as listener:
        status, offer = share(first, 0, "restart.sock")
        assert status == 200, offer
        received = receive(listener)
    with received:  # the server is gone, its memory is not
        assert sum(region.size for region in received.header.regions) > 0
        with running(program, model_path, *options) as second:
            assert adopt(second, 0, offer["share_id"], tokens)[0] == 400
            hand_over(second, model, 0, tokens[:-1])
            assert second.completion(tokens, id_slot=0)["timings"]["cache_n"] == len(tokens) - 1


def test_client_hangs_up_during_a_share(server: Server, model: Model, tokens: list[int]) -> None:
    """Whoever asked is gone before the slot was free: no lease is left."""
    long = threading.Thread(target=server.completion, args=(tokens,), kwargs={"n_predict": 48, "id_slot": 0})
    with receiving(server, "hangup.sock"):
        long.start()
        time.sleep(0.2)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        body = json.dumps({"socket": str(server.share_dir / "hangup.sock")})
        connection.request("POST", "/slots/0?action=share", body, {"Content-Type": "application/json"})
        time.sleep(0.1)
        connection.close()
        long.join()
        server.slot(0, "erase", {})
    hand_over(server, model, 0, tokens[:-1])
    assert server.completion(tokens, id_slot=0)["timings"]["cache_n"] == len(tokens) - 1


def test_a_waiting_request_goes_on_when_the_share_expires(server: Server, tokens: list[int]) -> None:
    """The only slot is leased, its provider silent, and nothing else happens at the server."""
    server.slot(0, "erase", {})
    with receiving(server, "silent.sock"):
        status, offer = share(server, 0, "silent.sock", expires_ms=1500)
        assert status == 200, offer
        assert offer["expires_ms"] == 1500
        assert server.completion(tokens)["timings"]["cache_n"] == 0
        assert server.slot(0, "adopt", {"share_id": offer["share_id"], "tokens": tokens})[0] == 410


def test_what_a_failed_provider_says_is_passed_on(server: Server, model: Model, tokens: list[int]) -> None:
    """Even if it is no text."""
    server.slot(0, "erase", {})
    with receiving(server, "fails.sock") as listener:
        status, offer = share(server, 0, "fails.sock")
        assert status == 200, offer
        with receive(listener) as received:
            received.fail("out of paper")
            with received.ledger.view() as view:
                view[200:204] = b"\xff\xfe\xfd\xfc"
        status, answer = server.slot(0, "adopt", {"share_id": offer["share_id"], "tokens": tokens})
        assert status == 409
        assert "paper" in answer["error"]["message"]
        assert answer["error"]["kind"] == "ledger_incomplete"
    hand_over(server, model, 0, tokens[:-1])


@pytest.mark.parametrize("options", [(), ("-np", "4", "--no-kv-unified"), ("-np", "1")])
def test_a_lease_without_a_number_is_most_of_a_slot(
    program: Path, model_path: Path, model: Model, options: tuple[str, ...]
) -> None:
    """And in a unified cache a stream of another slot goes on beside it."""
    with running(program, model_path, "--ctx-size", "4096", *options) as server:
        n_ctx = server.call("GET", "/slots")[1][0]["n_ctx"]
        with receiving(server, "lease.sock") as listener:
            status, offer = share(server, 0, "lease.sock")
            assert status == 200, offer
            with receive(listener) as received:
                n_cells = sum(p1 - p0 for p0, p1 in received.header.cells[0])
            assert n_cells >= n_ctx - n_ctx // 8
            if options != ("-np", "1"):
                other = model.tokenize("Once upon a time there was a keeper who")
                answer = server.completion(other, id_slot=1, n_predict=64, ignore_eos=True)
                assert answer["tokens_predicted"] == 64


def test_requests_beside_the_fd_of_another_provider(server: Server, model: Model, tokens: list[int]) -> None:
    """A provider that still has the share of before does not disturb the next handoff."""
    server.slot(0, "erase", {})
    with receiving(server, "late.sock") as listener:
        status, offer = share(server, 0, "late.sock")
        assert status == 200, offer
        with receive(listener) as late:
            assert server.slot(0, "release", {"share_id": offer["share_id"]})[0] == 200
            with Provider(server.share_dir / "next.sock", model, tokens[:-1]) as provider:
                status, offer = share(server, 0, "next.sock")
                assert status == 200, offer
                late.ledger.begin()
                late.complete(tokens[:-1])  # into its own, old ledger
                assert adopt(server, 0, offer["share_id"], tokens[:-1])[0] == 200
            assert provider.error is None
    assert server.completion(tokens, id_slot=0)["timings"]["cache_n"] == len(tokens) - 1
