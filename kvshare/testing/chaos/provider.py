"""A provider that shows one fault: `kvshare.provider.serving`, with a hook at each step.

    python -m kvshare.testing.chaos.provider JOB

serves one share; JOB is a JSON object with `socket`, `model`, `tokens`, `fault` and `step`. It writes one
JSON object a line: `{"listening": true}`; `{"waits": STEP}` before it waits for a line on standard input,
stops itself, or never does anything again; `{"published": true}`; `{"broke": TEXT}` if it could do what
it must not be able to. After it has published it waits for a line (the decoder has adopted), and for the
end of its input.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvshare import fds, mapping
from kvshare import provider as roles
from kvshare._native import signatures
from kvshare._native.context import Model
from kvshare.errors import KvshareError
from kvshare.ledger import HEADER_NBYTES, tokens_digest
from kvshare.provider import Offer, Provider
from kvshare.testing import faults

_DEADLINE_S = 60.0


class Ended(Exception):
    """The fault ends the work here."""


class Work:
    """What there is so far; the actions change it."""

    connection: socket.socket
    offer: Offer
    provider: Provider

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.asked: list[int] = job["tokens"]
        self.tokens = list(self.asked)  # what is prefilled and vouched for
        self.vouched: list[int] | None = None  # what is vouched for instead
        self.earlier = b""  # the ledger of an earlier share

    def reached(self, step: str) -> None:
        """Show the fault, if it is its step."""
        if step == self.job["step"]:
            ACTIONS[self.job["fault"]](self)

    @property
    def n_new(self) -> int:
        """Tokens that are to be prefilled, behind what the slot holds."""
        return len(self.asked) - self.offer.n_prefix

    @property
    def n_half(self) -> int:
        """Tokens of the prompt when half of the new ones are done."""
        return self.offer.n_prefix + self.n_new // 2

    @property
    def cells(self) -> slice:
        """The leased cells that the new tokens take."""
        return slice(self.offer.first_cell, self.offer.first_cell + self.n_new)

    @property
    def prefix_cells(self) -> slice:
        """The cells in front of the lease, where the slot has what it holds."""
        return slice(0, self.offer.first_cell)


def say(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def wait(work: Work) -> None:
    """Go on when the other side says so."""
    say(waits=work.job["step"])
    sys.stdin.readline()


def _idle() -> None:
    while sys.stdin.readline():
        pass


# -- the steps -----------------------------------------------------------------------------------


@contextlib.contextmanager
def hooked(work: Work) -> Iterator[None]:
    """Let `serving` use an offer and a provider that tell each step."""

    class HookedOffer(Offer):
        @classmethod
        def receive(cls, connection: socket.socket, *, deadline: float | None = None) -> Offer:
            work.connection = connection
            work.reached("connect")
            size = int.from_bytes(_peek(connection, 4), "little")
            _peek(connection, 4 + size // 2)
            work.reached("header")
            work.offer = super().receive(connection, deadline=deadline)
            work.reached("descriptors")
            return work.offer

    class HookedProvider(Provider):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            work.provider = self
            work.reached("map")

        def prefill(self, tokens: Sequence[int], *, progress: roles.Progress | None = None) -> None:
            seen: set[str] = set()

            def advance(n_filled: int) -> None:
                if progress:
                    progress(n_filled)
                for step, n in (
                    ("first-ubatch", work.offer.n_prefix + 1),
                    ("half", work.n_half),
                    ("last-ubatch", len(work.tokens)),
                ):
                    if n_filled >= n and step not in seen:
                        seen.add(step)
                        work.reached(step)

            super().prefill(work.tokens, progress=advance)

        def publish(self) -> None:
            self._tokens = work.vouched or self._tokens
            super().publish()
            work.reached("publish")

    before = roles.Offer, roles.Provider
    roles.Offer, roles.Provider = HookedOffer, HookedProvider  # type: ignore[misc]
    try:
        yield
    finally:
        roles.Offer, roles.Provider = before  # type: ignore[misc]


def _peek(connection: socket.socket, n: int) -> bytes:
    """Wait for the first bytes of a message, and leave them there with their descriptors."""
    deadline = time.monotonic() + _DEADLINE_S
    while len(data := connection.recv(n, socket.MSG_PEEK)) < n:
        if not data or time.monotonic() > deadline:
            raise Ended("the decoder has sent less than a header")
        time.sleep(0.001)
    return data


# -- what goes wrong -----------------------------------------------------------------------------


def die(work: Work) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(work: Work) -> None:
    say(waits=work.job["step"])
    os.kill(os.getpid(), signal.SIGSTOP)


def exit_0(work: Work) -> None:
    os._exit(0)


def hang_up(work: Work) -> None:
    work.connection.shutdown(socket.SHUT_RDWR)
    os._exit(1)


def be_silent(work: Work) -> None:
    say(waits=work.job["step"])
    _idle()
    os._exit(0)


def give_up(work: Work) -> None:
    raise Ended("out of paper")


def give_up_in_garbage(work: Work) -> None:
    work.offer.fail("out of paper")
    with work.offer.ledger.view() as view:
        view[200:456] = random.Random(1).randbytes(256)
    raise Ended


def prefill_others(work: Work) -> None:
    work.tokens = [*work.asked[:-1], work.asked[-1] ^ 1]


def forge(work: Work) -> None:
    prefill_others(work)
    work.vouched = work.asked


def prefill_fewer(work: Work) -> None:
    work.tokens = work.asked[: work.n_half]


def fill_own_memory(work: Work) -> None:
    for entry in work.offer.header.regions:
        original = work.offer._fds[entry.fd]
        work.offer._fds[entry.fd] = fds.memfd_create("kvshare-fault", fds.fd_size(original.fileno()))
        original.close()


def swap_layers(work: Work) -> None:
    first, second = work.offer.views()[:2]
    _swap(first.k[work.cells], second.k[work.cells])
    if first.v is not None and second.v is not None:
        _swap(first.v[work.cells], second.v[work.cells])


def swap_k_v(work: Work) -> None:
    _swap_k_v(work, work.cells)


def swap_prefix(work: Work) -> None:
    _swap_k_v(work, work.prefix_cells)


def _swap_k_v(work: Work, cells: slice) -> None:
    for layer in work.offer.views():
        if layer.v is not None:
            _swap(layer.k[cells], layer.v[cells])


def _swap(a: Any, b: Any) -> None:
    copy = a.copy()
    a[:], b[:] = b, copy


def write(value: float, work: Work, *, cells: slice | None = None) -> None:
    for layer in work.offer.views():
        for rows in (layer.k, layer.v):
            if rows is not None:
                rows[cells or work.cells] = value


def trespass(work: Work) -> None:
    leased = max(end for cache in work.offer.header.cells for _, end in cache)
    write(float("nan"), work, cells=slice(leased, None))


def touch_prefix(work: Work) -> None:
    write(float("nan"), work, cells=work.prefix_cells)


def write_all(work: Work) -> None:
    write(float("nan"), work, cells=slice(None))


def fill_other_cells(work: Work) -> None:
    first, n = work.offer.first_cell, work.n_new
    for layer in work.offer.views():
        for rows in (layer.k, layer.v):
            if rows is not None:
                rows[first + 1 : first + 1 + n] = rows[first : first + n].copy()
    del layer, rows
    sample = mapping.plain_sample(work.offer.layout, work.offer._mapped(), first + 1, n)
    work.offer.ledger.complete(tokens_digest(work.asked), len(work.asked), sample)
    raise Ended


def claim_all(work: Work) -> None:
    work.provider._tokens = work.asked
    work.offer.ledger.advance(len(work.asked))
    Provider.publish(work.provider)
    raise Ended


def claim_unwritten(work: Work) -> None:
    n = len(work.asked)
    work.offer.ledger.begin()
    work.offer.ledger.advance(n)
    work.offer.ledger.complete(tokens_digest(work.asked), n, bytes(32))
    raise Ended


def claim_zeros(work: Work) -> None:
    work.offer.ledger.begin()
    work.offer.complete(work.asked)
    raise Ended


def claim_unmapped(work: Work) -> None:
    corrupt("state", 2, work)
    raise Ended


def corrupt(field: str, value: int | None, work: Work) -> None:
    faults.corrupt_ledger(work.offer.ledger, field, value=value)


def _read(work: Work, field: str) -> int:
    offset, size = faults.LEDGER_FIELDS[field]
    with work.offer.ledger.view() as view:
        return int.from_bytes(view[offset : offset + size], "little")


def more(field: str, n: int, work: Work) -> None:
    corrupt(field, _read(work, field) + n, work)


def halve_blob(work: Work) -> None:
    corrupt("blob_size", _read(work, "blob_size") // 2, work)


def scribble(change: Callable[[bytes], bytes], work: Work) -> None:
    """Change the metadata in its place."""
    start = _read(work, "blob_offset")
    _change(work, start, start + _read(work, "blob_size"), change)


def garble_prefix(work: Work) -> None:
    """Change the metadata of what the slot held."""
    _change(work, HEADER_NBYTES, _header_nbytes(work.offer), _noise)


def _change(work: Work, start: int, end: int, change: Callable[[bytes], bytes]) -> None:
    with work.offer.ledger.view() as view:
        view[start:end] = change(bytes(view[start:end]))


def _header_nbytes(offer: Offer) -> int:
    """Return where a provider's own metadata begins, behind that of what the slot held."""
    return offer.ledger.size - offer.ledger.capacity


def other_blob(work: Work) -> None:
    provider, n_prefix, n = work.provider, work.offer.n_prefix, work.n_half
    lib, handle, seq_id = provider._lib, provider.context.handle, work.offer.seq_id
    if n_prefix:
        provider._enter(work.offer.ledger.prefix)
    else:
        provider.context.clear(seq_id)
    provider.context.decode(work.asked[n_prefix:n], position=n_prefix, seq_id=seq_id)
    size = lib.llama_kv_share_publish(handle, seq_id, None, 0, None)
    buffer = ctypes.create_string_buffer(size)
    lib.llama_kv_share_publish(handle, seq_id, buffer, size, ctypes.byref(signatures.Digest()))
    start = _header_nbytes(work.offer)
    with work.offer.ledger.view() as view:
        view[start : start + size] = buffer.raw
    corrupt("blob_size", size, work)


def zero_ledger(n_left: int, work: Work) -> None:
    faults.half_written_ledger(work.offer.ledger, n_left)


def replay(work: Work) -> None:
    with work.offer.ledger.view() as view:
        view[: len(work.earlier)] = work.earlier
    raise Ended


def resize(factor: float, work: Work) -> None:
    for owned in work.offer._fds:
        size = int(fds.fd_size(owned.fileno()) * factor)
        try:
            os.ftruncate(owned.fileno(), size)
        except PermissionError:
            continue
        say(broke=f"a descriptor could be resized to {size} bytes")


def add_seals(work: Work) -> None:
    for owned in work.offer._fds:
        for seal in (fds.F_SEAL_WRITE, fds.F_SEAL_FUTURE_WRITE, fds.F_SEAL_SEAL):
            try:
                fcntl.fcntl(owned.fileno(), fcntl.F_ADD_SEALS, seal)
            except OSError:
                continue
            say(broke=f"a descriptor could be sealed with {seal:#x}")


def nothing(work: Work) -> None:
    pass


def _invert(data: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in data)


def _noise(data: bytes) -> bytes:
    return random.Random(1).randbytes(len(data))


ACTIONS: dict[str, Callable[[Work], None]] = {
    "none": nothing,
    "dies": die,
    "stops": stop,
    "pauses": stop,
    "exits-0": exit_0,
    "hangs-up": hang_up,
    "is-silent": be_silent,
    "gives-up": give_up,
    "gives-up-in-garbage": give_up_in_garbage,
    "other-tokens": prefill_others,
    "fewer-tokens": prefill_fewer,
    "wrong-region": fill_own_memory,
    "swaps-layers": swap_layers,
    "swaps-k-v": swap_k_v,
    "zeroes": partial(write, 0.0),
    "writes-nan": partial(write, float("nan")),
    "foreign-cells": fill_other_cells,
    "trespasses": trespass,
    "touches-prefix": touch_prefix,
    "swaps-prefix": swap_prefix,
    "other-prefix": partial(corrupt, "prefix_sha256", None),
    "more-prefix": partial(more, "n_prefix", 1),
    "garbles-prefix": garble_prefix,
    "claims-all": claim_all,
    "claims-unwritten": claim_unwritten,
    "claims-zeros": claim_zeros,
    "claims-unmapped": claim_unmapped,
    "more-filled": partial(more, "n_filled", 1),
    "fewer-filled": partial(more, "n_filled", -1),
    "more-tokens": partial(more, "n_tokens", 1),
    "replays": replay,
    "other-share-id": partial(corrupt, "share_id", None),
    "other-vouched-id": partial(corrupt, "vouched_share_id", None),
    "wrong-layout": partial(corrupt, "layout", None),
    "wrong-semantics": partial(corrupt, "semantics", None),
    "wrong-token-digest": partial(corrupt, "tokens_sha256", None),
    "wrong-sample": partial(corrupt, "sample_digest", None),
    "wrong-magic": partial(corrupt, "magic", None),
    "wrong-version": partial(corrupt, "version", 2),
    "wrong-header-size": partial(corrupt, "header_size", 1 << 31),
    "wrong-state": partial(corrupt, "state", 7),
    "half-ledger": partial(zero_ledger, HEADER_NBYTES // 4),
    "zeroed-ledger": partial(zero_ledger, 0),
    "blob-truncated": halve_blob,
    "blob-garbage": partial(scribble, _noise),
    "blob-flipped": partial(scribble, _invert),
    "blob-outside": partial(corrupt, "blob_offset", 1 << 40),
    "blob-huge": partial(corrupt, "blob_size", 1 << 62),
    "blob-of-another": other_blob,
    "truncates": partial(resize, 0.5),
    "grows": partial(resize, 2.0),
    "seals": add_seals,
    "keeps": nothing,
    "late-nan": write_all,
    "late-refused": write_all,
    "late-expired": write_all,
    "holds-on": nothing,
    "late-prefill": stop,
    "forges": forge,
}
"""What the provider does; a fault of somebody else lets it wait at its step."""


# -- instead of a provider -----------------------------------------------------------------------


def _no_provider(fault: str, path: Path) -> bool:
    """Put something else at the path, for the faults that have nobody there."""
    with contextlib.ExitStack() as stack:
        if fault == "stale-socket":
            fds.listen_unix(path).close()
        elif fault == "is-a-file":
            path.write_bytes(b"no socket")
        elif fault == "never-accepts":
            listener = stack.enter_context(fds.listening(path))
            listener.listen(0)
            with contextlib.suppress(BlockingIOError):
                while True:
                    waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                    waiting.setblocking(False)
                    waiting.connect(str(path))
        elif fault != "nobody-listens":
            return False
        say(listening=True)
        _idle()
    return True


def main(text: str) -> int:
    """Serve one share."""
    work = Work(json.loads(text))
    path, fault = Path(work.job["socket"]), work.job["fault"]
    if _no_provider(fault, path):
        return 0
    if fault not in ACTIONS:
        ACTIONS[fault] = wait
    with contextlib.ExitStack() as stack:
        model = stack.enter_context(Model.open(work.job["model"]))
        listener = stack.enter_context(fds.listening(path))
        deadline = time.monotonic() + _DEADLINE_S
        say(listening=True)
        if fault == "replays":
            with roles.serving(listener, model, work.asked, deadline=deadline, n_threads=1) as earlier:
                ledger = earlier.offer.ledger
                end = _header_nbytes(earlier.offer) + len(ledger.snapshot().blob)
                work.earlier = os.pread(ledger.fileno(), end, 0)
            wait(work)
        stack.enter_context(hooked(work))
        try:
            with roles.serving(listener, model, work.asked, deadline=deadline, n_threads=1):
                say(published=True)
                sys.stdin.readline()
                work.reached("adopt")
                if work.job["step"] == "adopt":
                    say(shown=True)
                _idle()
        except (KvshareError, Ended) as error:
            say(ended=f"{type(error).__name__}: {error}")
            _idle()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
