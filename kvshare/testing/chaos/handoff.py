"""One share and its provider, step by step."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from kvshare.errors import DeadlineExceededError, KvshareError
from kvshare.testing.chaos import child
from kvshare.testing.chaos.case import Case
from kvshare.testing.chaos.conversation import EXPIRES_MS, Exchange, service, share
from kvshare.testing.chaos.faults import Fault
from kvshare.testing.chaos.targets import Refused

if TYPE_CHECKING:
    from kvshare.testing.chaos.runner import Runner

SLOT, OTHER = 0, 1


class Handoff:
    """One share and its provider.

    Attributes:
        exchange: what is handed over, and what is said to it.
        n_held: tokens of its prompt that the slot holds afterwards.
        n_ahead: how many of them the decoder has evaluated by itself during the share.
    """

    def __init__(self, runner: Runner, exchange: Exchange, fault: Fault, step: str, case: Case) -> None:
        self.target = runner.target
        self.case, self.step, self.fault = case, step, fault
        self.exchange, self.given = exchange, exchange.given
        self.n_held = len(exchange.held)
        self.n_ahead = 0
        self.share_id: int | None = None
        name = next(runner.names)
        self.socket = self.target.folder / f"{name}.sock"
        self.provider = self._start(runner, name)
        self.crashed = False
        self.status: int | None = None
        try:
            self._listens()
        except BaseException:
            self.close()
            raise

    def _start(self, runner: Runner, name: int) -> child.Child:
        fault = self.fault
        tokens, held = self.given, self.exchange.held
        if fault.name == "late-prefill":
            tokens = held + runner.decoy[: len(tokens) - len(held)]
        job = {
            "socket": str(self.socket),
            "model": str(runner.model),
            "tokens": tokens,
            "fault": fault.name,
            "step": self.step,
        }
        command, by_signal = child.module("provider", json.dumps(job)), False
        if fault.name == "job-hangs-up":
            command, by_signal = service(runner.model, self.socket), True
        return child.Child(command, runner.folder / f"provider-{name}.log", by_signal=by_signal)

    def _listens(self) -> None:
        self.expect("listening")

    def close(self) -> None:
        """End the provider."""
        if self.provider.alive and _state(self.provider.pid) == "T":
            self.provider.kill()
        self.provider.close()
        self.crashed, self.status = self.provider.crashed, self.provider.process.returncode
        self.provider.log.unlink()

    # -- steps --

    def share(self, *, expires_ms: int = EXPIRES_MS) -> None:
        options = {"expires_ms": expires_ms, "strict": self.fault.strict}
        self.share_id = share(self.target, SLOT, self.socket, self.exchange, **options)

    def wait(self) -> str:
        """Wait until the provider waits, has published, has given up, or is gone; say which."""
        while (event := self.provider.receive()) is not None:
            if "broke" in event:
                self.case.wrong.append(event["broke"])
            elif event.get("event") not in ("share", "job", "cold"):  # of `kvshare provider`
                return str(event.get("event") or next(iter(event)))
        return "gone"

    def expect(self, event: str) -> None:
        found = self.wait()
        if found != event:
            raise KvshareError(f"the provider is {found}, expected {event}: {self.provider.tail()}")

    def go_on(self) -> None:
        self.provider.send("go on")

    def resume(self) -> None:
        os.kill(self.provider.pid, signal.SIGCONT)

    def fill(self, n: int) -> None:
        """Let the decoder evaluate so many tokens by itself."""
        found = self.target.prefill(SLOT, self.given[: self.n_held + n])
        if found != self.n_held:
            self.case.wrong.append(f"the slot held {found} tokens, not {self.n_held}")
        self.n_held += n

    def go_ahead(self, n: int) -> None:
        """Do the same during the share."""
        self.fill(n)
        self.n_ahead = n

    def adopt(self, tokens: Sequence[int] | None = None, *, slot: int = SLOT, other: int = 0) -> None:
        self.target.do(
            "adopt",
            slot,
            share_id=(self.share_id or 0) + other,
            tokens=self.given if tokens is None else list(tokens),
        )

    def release(self) -> None:
        if self.share_id is not None:
            self.target.do("release", SLOT, share_id=self.share_id)

    def must_refuse(self, action: Callable[[], None], what: str) -> None:
        """Do what has to be refused without harm to the rest."""
        try:
            action()
        except Refused as error:
            self.case.reason = str(error)
        else:
            self.case.wrong.append(f"{what} was not refused")

    def published(self) -> None:
        """Share, and wait until the provider has vouched."""
        self.share()
        self.expect("waits")
        self.go_on()
        self.expect("published")


class ForeignHandoff(Handoff):
    """The same with a provider of somebody else: the ledger says where it is, and signals reach it."""

    _SIGNALS: ClassVar = {"dies": signal.SIGKILL, "stops": signal.SIGSTOP}

    def _start(self, runner: Runner, name: int) -> child.Child:
        assert runner.foreign is not None
        tokens = runner.folder / f"tokens-{name}.json"
        tokens.write_text(json.dumps(self.given))
        places = {"socket": self.socket, "model": runner.model, "tokens": tokens}
        command = [part.format(**places) for part in runner.foreign]
        self._asked = False
        return child.Child(command, runner.folder / f"provider-{name}.log", by_signal=True)

    def _listens(self) -> None:
        self._until(self.socket.is_socket, "listen")

    def share(self, *, expires_ms: int = EXPIRES_MS) -> None:
        if self.step == "connect":
            self._signal()
        super().share(expires_ms=expires_ms)

    def wait(self) -> str:
        if self.step == "adopt" and not self._asked:
            self._asked = True
            self._reach("publish")
        else:
            self._reach(self.step)
            self._signal()
        return "waits"

    def expect(self, event: str) -> None:
        self._reach("publish" if event == "published" else self.step)

    def _signal(self) -> None:
        number = self._SIGNALS.get(self.fault.name)
        if number is not None and self.provider.alive:
            os.kill(self.provider.pid, number)
            if number == signal.SIGSTOP:
                until_stopped(self.provider.pid)

    def _reach(self, step: str) -> None:
        n_before, n_all = len(self.exchange.held), len(self.given)
        n = {"first-ubatch": n_before + 1, "half": (n_before + n_all) // 2}.get(step)
        if step in ("connect", "descriptors", "adopt") or self.share_id is None or not self.target.alive:
            return

        def reached() -> bool:
            found = self.target.do("progress", SLOT, share_id=self.share_id)
            if found["state"] == "FAILED":
                raise KvshareError(f"the provider has failed: {self.provider.tail()}")
            return found["state"] == "COMPLETE" or (n is not None and found["n_filled"] >= n)

        self._until(reached, f"reach {step}")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + child.TIMEOUT_S
        while not condition():
            if time.monotonic() > deadline or not (self.provider.alive or condition()):
                raise KvshareError(f"the provider does not {what}: {self.provider.tail()}")
            time.sleep(0.001)


def until_stopped(pid: int) -> None:
    deadline = time.monotonic() + child.TIMEOUT_S
    while _state(pid) != "T":
        if time.monotonic() > deadline:
            raise DeadlineExceededError(f"process {pid} does not stop")
        time.sleep(0.001)


def _state(pid: int) -> str:
    """Return the state letter of a process, as ps shows it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
