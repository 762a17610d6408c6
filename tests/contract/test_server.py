"""The public checks of a server over HTTP, over the fake one."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvshare.testing.http import FakeServer, serving_once
from kvshare.testing.server_contract import Check, NotApplicable, ServerUnderTest, check_server


@contextlib.contextmanager
def fake(*, api_key: str | None = None) -> Iterator[ServerUnderTest]:
    with (
        tempfile.TemporaryDirectory(prefix="kvs-") as directory,
        FakeServer(directory=directory, api_key=api_key) as server,
    ):
        server.chunk_delay_s = 0.005
        yield ServerUnderTest(server.url, directory, server.n_slots, serving_once, api_key)


@pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in check_server(fake)])
def test_fake(check: Check) -> None:
    with contextlib.suppress(NotApplicable):  # the API key, which the test below shows
        check()


@pytest.mark.parametrize("name", ["wants_its_key", "hands_over", "describes_a_share"])
def test_fake_with_a_key(name: str) -> None:
    dict(check_server(partial(fake, api_key="secret")))[name]()


class Faulty(FakeServer):
    """A server with one fault, by its name."""

    fault = ""

    async def _adopt(self, slot: Any, body: dict[str, Any]) -> dict[str, Any]:
        found = await super()._adopt(slot, body)
        if self.fault == "boasts":
            found["n_usable"] += 1
        if self.fault == "forgets":
            slot.tokens = []
        return found

    def _socket_path(self, path: Any) -> str:
        return str(path) if self.fault == "goes anywhere" else super()._socket_path(path)

    def _keep(self, slot: Any, tokens: list[int]) -> None:
        if self.fault == "drops chats":
            self._empty(slot)
        if self.fault != "never cuts":
            super()._keep(slot, tokens)

    def _settle(self, slot: Any) -> None:
        had_share = slot.share_id is not None
        super()._settle(slot)
        if self.fault == "loses chats" and had_share and slot.share_id is None and not slot.busy:
            self._empty(slot)

    async def _take(self, id_slot: int, tokens: list[int]) -> Any:
        if self.fault == "gives slots away" and id_slot < 0:
            id_slot = 0
        return await super()._take(id_slot, tokens)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("boasts", "hands_over"),
        ("forgets", "hands_over"),
        ("forgets", "adopts_once"),
        ("goes anywhere", "refuses_sockets_elsewhere"),
        ("gives slots away", "does_not_give_a_shared_slot_away"),
        ("drops chats", "continues_a_chat"),
        ("never cuts", "cuts_what_differs"),
        ("never cuts", "leaves_the_last_token"),
        ("loses chats", "offers_what_a_slot_holds"),
        ("loses chats", "keeps_a_chat_that_is_not_adopted"),
    ],
)
def test_a_faulty_server_does_not_pass(fault: str, name: str) -> None:
    @contextlib.contextmanager
    def faulty() -> Iterator[ServerUnderTest]:
        with tempfile.TemporaryDirectory(prefix="kvs-") as directory:
            faulty_server = Faulty(directory=directory)
            faulty_server.fault = fault
            with faulty_server as server:
                yield ServerUnderTest(server.url, directory, server.n_slots, serving_once)

    with pytest.raises(AssertionError):
        dict(check_server(faulty))[name]()
