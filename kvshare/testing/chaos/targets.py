"""What faults are injected against: a `kvshare.Decoder`, or a llama-server, in a process of its own.

Both have two slots with a stream each, and the same small vocabulary of actions. An answer is what can
be compared bit for bit: the logits of some greedy tokens, or the server's text and logprobs. Always on
two steps, all tokens but the last and then the last one, because that is what follows a handoff.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvshare import processes
from kvshare.errors import KvshareError, PeerClosedError, RemoteProtocolError
from kvshare.testing.chaos import child

N_CTX = 1024
N_SLOTS = 2
N_BATCH = 512
N_UBATCH = 16
TIMEOUT_S = 120.0


class Refused(KvshareError):
    """The decoder said no.

    Attributes:
        why: the name of an error of `kvshare`, or the kind of one of the server's.
    """

    def __init__(self, message: str, *, why: str = "") -> None:
        super().__init__(message)
        self.why = why


class Usage(NamedTuple):
    """What a process has open."""

    fds: int
    mappings: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Look at a process: descriptors, mapped memfds, threads.

        Raises:
            PeerClosedError: it has ended.
        """
        process = Path(f"/proc/{pid}")
        try:
            maps = (process / "maps").read_text().splitlines()
            return cls(
                fds=len(os.listdir(process / "fd")),
                mappings=sum("memfd:" in line for line in maps),
                threads=len(os.listdir(process / "task")),
            )
        except OSError as error:
            raise PeerClosedError(f"process {pid} is gone: {error}") from error


class Target(ABC):
    """A decoder under test.

    *Ownership*: `close` ends its process.
    """

    name: str
    folder: Path  # where providers listen

    @abstractmethod
    def start(self) -> None:
        """Start it, or start it again."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Its process id."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the process is there."""

    @abstractmethod
    def do(self, action: str, slot: int, **fields: Any) -> dict[str, Any]:
        """Share, adopt, release or erase.

        Raises:
            Refused: it said no, and why.
            PeerClosedError: it is gone.
        """

    @abstractmethod
    def prefill(self, slot: int, tokens: Sequence[int]) -> int:
        """Evaluate those tokens that a slot does not hold; return how many it held.

        After a completion it holds what was generated as well, except the last one.
        """

    def go_ahead(self, slot: int, tokens: Sequence[int], n_tokens: int) -> int:
        """Do the same where it is done during a share of so many tokens.

        Sums in attention depend on the place. What writes to a server's slot ends its share before.
        """
        return self.prefill(slot, tokens)

    @abstractmethod
    def finish(self, slot: int, tokens: Sequence[int]) -> Any:
        """Return the answer to a prompt of which all but the last token are in the slot.

        Its `tokens` are those that were generated. Not an answer, but something that says so, if the
        slot holds anything else.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill it."""

    @abstractmethod
    def close(self) -> None:
        """End it; idempotent."""

    def complete(self, slot: int, tokens: Sequence[int], *, n_held: int = 0) -> Any:
        """Return the answer to a prompt in a slot that has to hold that many of its tokens."""
        if n_held < len(tokens) - 1 and (found := self.prefill(slot, tokens[:-1])) != n_held:
            return {"n_held": found, "expected": n_held}
        return self.finish(slot, tokens)

    def usage(self) -> Usage:
        """Return what it has open."""
        return Usage.of(self.pid)


class InProcess(Target):
    """A `kvshare.Decoder`."""

    name = "decoder"

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self._model = model
        self._child: child.Child | None = None

    def start(self) -> None:
        self.close()
        settings = {
            "n_ctx": N_CTX,
            "n_batch": N_BATCH,
            "n_ubatch": N_UBATCH,
            "n_seq_max": N_SLOTS,
            "n_threads": 1,
            "flash_attn": "off",  # with it, attention does not even read what is masked: no NaN would show
        }
        command = child.module("decoder", str(self._model), json.dumps(settings))
        self._child = child.Child(command, self.folder / "decoder.log")
        if self._child.receive() is None:
            raise PeerClosedError("the decoder did not start", hint=self._child.tail())

    @property
    def _process(self) -> child.Child:
        if self._child is None:
            raise PeerClosedError("the decoder was not started")
        return self._child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    def do(self, action: str, slot: int, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._process.ask({"do": action, "slot": slot, **fields})
        if "error" in answer:
            raise Refused(f"{answer['error']}: {answer['message']}", why=answer["error"])
        return answer

    def prefill(self, slot: int, tokens: Sequence[int]) -> int:
        return int(self.do("prefill", slot, tokens=list(tokens))["n_held"])

    def go_ahead(self, slot: int, tokens: Sequence[int], n_tokens: int) -> int:
        return int(self.do("go_ahead", slot, tokens=list(tokens), n_tokens=n_tokens)["n_held"])

    def finish(self, slot: int, tokens: Sequence[int]) -> Any:
        return self.do("finish", slot, tokens=list(tokens))

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


class Server(Target):
    """A llama-server with `--kv-share`."""

    name = "server"
    _OPTIONS = (
        *("--ctx-size", str(N_CTX), "-np", str(N_SLOTS), "--no-kv-unified", "--cache-ram", "0"),
        *("-b", str(N_BATCH), "-ub", str(N_UBATCH), "-fa", "off", "--threads", "1"),
    )

    def __init__(self, program: Path, model: Path, folder: Path) -> None:
        self.folder = folder / "share"
        self.folder.mkdir(mode=0o700)
        self._program, self._model, self._log = program, model, folder / "server.log"
        self._stack = contextlib.ExitStack()
        self._running: processes.Running | None = None

    def start(self) -> None:
        self.close()
        self._running = self._stack.enter_context(
            processes.llama_server(
                self._program, self._model, self._log, *self._OPTIONS, share_dir=self.folder
            )
        )

    @property
    def pid(self) -> int:
        if self._running is None:
            raise PeerClosedError("the server was not started")
        return self._running.pid

    @property
    def alive(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state != "Z"  # it is our child, and not waited for yet

    def do(self, action: str, slot: int, **fields: Any) -> dict[str, Any]:
        return self._post(f"/slots/{slot}?action={action}", fields)

    def prefill(self, slot: int, tokens: Sequence[int]) -> int:
        body = {"prompt": list(tokens), "n_predict": 0, "id_slot": slot}
        return int(self._post("/completion", body)["timings"]["cache_n"])

    def finish(self, slot: int, tokens: Sequence[int]) -> Any:
        body = {"prompt": list(tokens), "n_predict": 8, "temperature": 0, "n_probs": 3, "id_slot": slot}
        body |= {"ignore_eos": True, "return_tokens": True}
        answer = self._post("/completion", body)
        n_held = answer["timings"]["cache_n"]
        if n_held != len(tokens) - 1:
            return {"n_held": n_held, "expected": len(tokens) - 1}
        return {"tokens": answer["tokens"], "logprobs": answer["completion_probabilities"]}

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        # until its last thread is gone: the first may be a zombie before that
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def close(self) -> None:
        self._stack.close()
        self._running = None

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        assert self._running is not None
        request = urllib.request.Request(
            self._running.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with processes.open_url(request, timeout=TIMEOUT_S) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                content = error.read()
            try:
                said = json.loads(content)["error"]
                message, why = said["message"], said.get("kind", "")
            except (ValueError, KeyError, TypeError):
                raise RemoteProtocolError(f"status {error.code} without a reason") from error
            if error.code == 500:  # a server that does not know what it refuses
                raise RemoteProtocolError(f"500: {message}") from error
            raise Refused(f"{error.code}: {message}", why=why) from error
        except OSError as error:
            raise PeerClosedError(f"the server is gone: {error}") from error
        if not isinstance(found, dict):
            raise RemoteProtocolError("the answer is no object")
        return found
