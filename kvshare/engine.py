"""The engine: drives a handoff over anything that can share and adopt and anything that can prefill.

The order of things, for one request of n tokens:

1. `Policy` decides by what it has measured: are enough tokens uncached, is a slot free, would the
   decoder itself be faster?
2. The decoder shares a slot with the provider: the one that holds what came before, if there is such
   a one, else a clean one. The provider prefills what is new of the first n-1 tokens, the decoder
   adopts them. The last token is left to the request: it has to be evaluated for its logits.
3. The request runs on that slot.

A conversation stays where it is: `Memory` knows what each slot was left with, and turns that are too
short for a handoff are sent there as well, unless they had to wait for it. It only guesses: what a
slot really goes on behind is what the answer to the share says.

Whatever goes wrong, the request goes on as it came, on a decoder that is as it was: the share is
released, and the `Record` says why. A request that is cancelled takes its job and its share along.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import struct
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvshare import fds, wire
from kvshare.errors import (
    DeadlineExceededError,
    KvshareError,
    LedgerIncompleteError,
    NotShareableError,
    PeerClosedError,
    RemoteProtocolError,
    ReplayError,
)
from kvshare.policy import (
    PASSING,
    Evict,
    Memory,
    Policy,
    Reason,
    Record,
    Route,
    Stage,
    Timings,
    Verdict,
    choose_slot,
    reason_of,
)
from kvshare.server import AdoptedInSlot, ServerBusyError, Shared, Slot

_log = logging.getLogger(__name__)

DEFAULT_PREFILL_TIMEOUT_S = 3600.0
DEFAULT_SILENCE_S = 60.0
CLEANUP_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
RETRY_S = 1.0  # pause before a share is released once more
SHARE_TIMEOUT_S = 15.0
LET_GO_TIMEOUT_S = 2.0  # for a provider of a strict share that is done, as llama-server gives it

_LENGTH = struct.Struct("<I")
T = TypeVar("T")


# -- who takes part --------------------------------------------------------------------------


class SharingDecoder(Protocol):
    """What can share and adopt: `kvshare.server.ServerClient`, `InProcessDecoder`."""

    async def slots(self) -> Sequence[Slot]:
        """Return all slots."""

    async def share(
        self,
        id_slot: int,
        socket: str,
        *,
        n_tokens: int | None = None,
        expires_ms: int | None = None,
        tokens: Sequence[int] | None = None,
    ) -> Shared:
        """Send the descriptors of an idle slot to the provider at a socket.

        Of what the slot holds, that stays with which `tokens` begin; `Shared.n_prefix` says how much.
        """

    async def adopt(self, id_slot: int, share_id: int, tokens: Sequence[int]) -> AdoptedInSlot:
        """Make the cells that the provider filled the slot's own."""

    async def release(self, id_slot: int, share_id: int) -> None:
        """End a share; idempotent."""

    async def erase(self, id_slot: int) -> None:
        """Empty an idle slot."""


class Prefiller(Protocol):
    """What can prefill: `ProviderClient`.

    Attributes:
        socket: path where it takes the descriptors of a share.
    """

    socket: str

    async def prefill(self, share_id: int, tokens: Sequence[int], *, deadline: float) -> None:
        """Prefill into a share; return when the ledger vouches for it. A cancelled call stops it.

        Args:
            share_id: the share.
            tokens: from position 0, what the slot holds already included.
            deadline: `time.monotonic()` value.
        """


# -- the engine ------------------------------------------------------------------------------


@dataclass
class _Owned:
    """A slot that a handoff has filled."""

    used: float
    id_task: int | None = None  # of the request that ran there; None until it was seen


class Engine:
    """Drives handoffs to one decoder and one provider.

    Args:
        decoder: the decoder.
        prefiller: the provider.
        policy: what decides; it learns.
        prefill_timeout_s: how long the provider may take for one prompt, in seconds; shares live as
            long. A provider that hangs is noticed much earlier, see `ProviderClient`.
        evict: which slots may be emptied.
        clock: steady seconds, for the policy.

    *Ownership*: `close` waits for what cancelled requests have left to be cleaned up.
    """

    def __init__(
        self,
        decoder: SharingDecoder,
        prefiller: Prefiller,
        policy: Policy | None = None,
        *,
        prefill_timeout_s: float = DEFAULT_PREFILL_TIMEOUT_S,
        evict: Evict = Evict.OWN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decoder = decoder
        self.prefiller = prefiller
        self.policy = policy or Policy()
        self.memory = Memory()
        self._prefill_timeout_s = prefill_timeout_s
        self._evict = evict
        self._clock = clock
        self._reserved: set[int] = set()
        self._owned: dict[int, _Owned] = {}
        self._refused_at: dict[int, float] = {}  # slots that could not be shared
        self._keeps_idle = True  # whether the decoder has what it has cleared, as far as was seen
        self._n_queued = 0
        self._cleaning: set[asyncio.Future[Any]] = set()

    async def close(self) -> None:
        """Wait, for a bounded time, until the shares of cancelled requests are released."""
        if self._cleaning:
            _, left = await asyncio.wait(self._cleaning, timeout=2 * CLEANUP_TIMEOUT_S)
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def prepared(
        self, tokens: Sequence[int], *, decoder: SharingDecoder | None = None
    ) -> AsyncIterator[Record]:
        """Try to hand a prompt over; run the request inside the block.

        Args:
            tokens: the whole prompt.
            decoder: the same decoder with a client's own credentials; None is that of the engine.

        Yields:
            What came of it. If `id_slot` is set, the request has to run there; else it goes as it came.
            Failures do not raise. Who knows what the request has left says so in `n_held` and `ran_on`,
            or by `observe`; who knows that it was not answered, in `answered`.
        """
        ids = tuple(tokens)
        record = Record(n_tokens=len(ids))
        reserved: list[int] = []
        try:
            try:
                await self._prepare(decoder or self.decoder, ids, record, reserved)
            except Exception as error:  # whatever it is, the request goes on
                _log.exception("a handoff failed in an unexpected way")
                self._fail(record, Reason.ERROR, f"{type(error).__name__}: {error}")
            try:
                yield record
            except BaseException:
                record.answered = False
                raise
            finally:
                # what was there, or was adopted, is there all the same
                if record.answered or record.id_slot is not None:
                    self.note(ids, record)
        finally:
            self._reserved.difference_update(reserved)

    def observe(self, record: Record, timings: Timings, *, id_slot: int | None = None) -> None:
        """Learn from what the decoder reports about a request.

        Args:
            record: of the request.
            timings: what it reports.
            id_slot: the slot where it ran; None if it does not say.
        """
        record.n_reused, record.n_held = timings.cache_n, timings.n_held
        record.ran_on = record.ran_on if id_slot is None else id_slot
        if record.route is Route.HANDOFF:
            if timings.cache_n < record.n_handed:
                _log.warning("%d tokens were adopted, %d reused", record.n_handed, timings.cache_n)
        else:
            self.policy.prefilled_locally(timings.prompt_n, timings.prompt_ms)
        relied_on = record.relied_on
        if (
            relied_on is not None
            and timings.cache_n < record.n_cached // 2
            and (relied_on.id_slot is None or record.ran_on in (None, relied_on.id_slot))
        ):
            self.memory.discard(relied_on)  # the decoder was restarted, or has made room

    def note(self, tokens: Sequence[int], record: Record) -> None:
        """Note what a request has left in the decoder's cache; `prepared` does so for its own."""
        id_slot = record.ran_on if record.id_slot is None else record.id_slot
        self.memory.add(tuple(tokens), id_slot, record.n_held)
        if id_slot is not None and (record.route is Route.HANDOFF or id_slot in self._owned):
            self._owned[id_slot] = _Owned(self._clock())

    async def _prepare(
        self, decoder: SharingDecoder, tokens: tuple[int, ...], record: Record, reserved: list[int]
    ) -> None:
        self._rely(record, tokens)
        short = self.policy.too_short(len(tokens), record.n_cached)
        history = self.memory.history(tokens)
        is_somewhere = record.relied_on is None or record.relied_on.id_slot is None  # and nobody knows where
        if short and history is None and (short.reason is Reason.SHORT or is_somewhere):
            return record.stay(short.reason, short.detail)
        try:
            slots = await decoder.slots()
        except KvshareError as error:
            if short:
                return record.stay(short.reason, short.detail)
            return self._fail(record, reason_of(Stage.SLOTS, error), str(error))
        # from here to the reservation nothing waits, so that two requests cannot take one slot
        home = self.memory.home(history, slots) if history else None
        if home and not (home.idle and home.n_ctx > len(tokens) and home.id_slot not in self._reserved):
            home = history = None  # somewhere else it is not
        # what a slot has that is at work is nobody else's
        self._rely(record, tokens, {each.id_slot for each in slots if not each.idle} | self._reserved)
        if short := self.policy.too_short(len(tokens), record.n_cached):
            return self._stay(record, short, home, reserved)
        slot, occupied = (home, False) if home else self._choose(slots, len(tokens))
        if slot is None:
            return record.stay(Reason.NO_CLEAN_SLOT)
        is_there = home is not None and home.n_tokens > 0
        n_prefix = history.n_cached(tokens) if history and (is_there or self._keeps_idle) else 0
        verdict = self.policy.decide(
            len(tokens),
            n_cached=record.n_cached,
            n_prefix=n_prefix,
            n_queued=self._n_queued,
            others_run=any(not each.idle for each in slots),
            now=self._clock(),
        )
        if not verdict.hand_over:
            return self._stay(record, verdict, home, reserved)
        self._reserve(slot, reserved)
        if home is None and (trouble := await self._empty(decoder, slot, occupied, reserved)):
            return record.stay(Reason.NO_CLEAN_SLOT, trouble)
        n_new = len(tokens) - n_prefix
        self._n_queued += n_new
        try:
            await self._hand_over(decoder, slot.id_slot, tokens, record, reserved)
        finally:
            self._n_queued -= n_new
            if history and not is_there and record.share_ms is not None:
                self._keeps_idle = record.n_prefix > 0

    def _choose(self, slots: Sequence[Slot], n_tokens: int) -> tuple[Slot | None, bool]:
        # those that were refused come last: the share of somebody else may be there
        slots = sorted(slots, key=lambda slot: self._refused_at.get(slot.id_slot, -math.inf))
        return choose_slot(slots, n_tokens, reserved=self._reserved, evictable=self._evictable(slots))

    def _rely(self, record: Record, tokens: tuple[int, ...], taken: Collection[int] = ()) -> None:
        """Note what the decoder is thought to have of a prompt, in slots that are not taken."""
        record.relied_on = self.memory.longest(tokens, taken)
        record.n_cached = record.relied_on.n_cached(tokens) if record.relied_on else 0

    async def _empty(self, decoder: SharingDecoder, slot: Slot, occupied: bool, reserved: list[int]) -> str:
        """Make a slot somebody else's; return what went wrong, else nothing."""
        if not occupied:
            self._owned.pop(slot.id_slot, None)
            self.memory.vacate(slot.id_slot)
            return ""
        erasing = self._later(self._erase(decoder, slot.id_slot))
        try:
            await asyncio.shield(erasing)
        except asyncio.CancelledError:
            self._keep(reserved, erasing)
            raise
        except KvshareError as error:
            self._evict = Evict.NONE if isinstance(error, NotShareableError) else self._evict
            if owned := self._owned.get(slot.id_slot):
                owned.used = self._clock()  # another one first, the next time
            return str(error) or type(error).__name__
        return ""

    async def _erase(self, decoder: SharingDecoder, id_slot: int) -> None:
        await decoder.erase(id_slot)
        self._owned.pop(id_slot, None)
        self.memory.forget(id_slot)

    def _reserve(self, slot: Slot, reserved: list[int]) -> None:
        self._reserved.add(slot.id_slot)
        reserved.append(slot.id_slot)

    def _stay(self, record: Record, verdict: Verdict, home: Slot | None, reserved: list[int]) -> None:
        """Leave a request to the decoder, on the slot that holds what came before.

        Not on one that was cleared: the decoder looks where it keeps idle prompts if it may choose.
        """
        if home is None or home.n_tokens == 0:
            return record.stay(verdict.reason, verdict.detail)
        self._reserve(home, reserved)
        return record.stay(verdict.reason, verdict.detail, id_slot=home.id_slot)

    async def _hand_over(
        self,
        decoder: SharingDecoder,
        id_slot: int,
        tokens: tuple[int, ...],
        record: Record,
        reserved: list[int],
    ) -> None:
        prefix = tokens[:-1]
        stage, shared = Stage.SHARE, None
        try:
            start = time.monotonic()
            shared = await self._share(decoder, id_slot, tokens, reserved)
            begun = time.monotonic()
            if not 0 <= shared.n_prefix < len(tokens):
                raise RemoteProtocolError(
                    f"the slot goes on behind {shared.n_prefix} of {len(tokens)} tokens"
                )
            record.share_ms, record.n_prefix = (begun - start) * 1000, shared.n_prefix
            if shared.n_prefix == len(prefix):  # more was there than anybody knew
                trouble = await self._released(decoder, shared, reserved)
                record.stay(Reason.CACHED, trouble, id_slot=None if trouble else id_slot)
                return
            stage = Stage.PREFILL
            await self.prefiller.prefill(
                shared.share_id,
                prefix,
                deadline=begun + min(self._prefill_timeout_s, shared.expires_ms / 1000),
            )
            done = time.monotonic()
            record.prefill_ms = (done - begun) * 1000
            stage = Stage.ADOPT
            adopted = await decoder.adopt(id_slot, shared.share_id, prefix)
            record.adopt_ms = (time.monotonic() - done) * 1000
            if adopted.n_adopted != len(prefix):
                raise RemoteProtocolError(f"{adopted.n_adopted} of {len(prefix)} tokens were adopted")
        except asyncio.CancelledError:
            if shared is not None:
                self._keep(reserved, self._later(self._release(decoder, shared)))
            raise
        except Exception as error:
            reason = reason_of(stage, error)
            if not isinstance(error, KvshareError):
                _log.exception("%s failed in an unexpected way", stage.value)
            detail, trouble = str(error) or type(error).__name__, ""
            if shared is not None:
                # the request must not find the slot leased
                trouble = await self._released(decoder, shared, reserved)
                detail += f"; release: {trouble}" if trouble else ""
            elif reason is Reason.SHARE_REFUSED:
                self._refused_at[id_slot] = self._clock()
            self._fail(record, reason, detail)
            if record.n_prefix and not trouble:  # the slot is as it was
                record.id_slot = id_slot
            return
        self.policy.handed_over(
            len(prefix) - record.n_prefix,
            prefill_ms=record.prefill_ms,
            other_ms=record.share_ms + record.adopt_ms,
        )
        record.route, record.reason, record.detail = Route.HANDOFF, Reason.HANDED_OVER, ""
        record.id_slot, record.n_handed, record.bytes_moved = id_slot, adopted.n_adopted, adopted.bytes_moved

    async def _share(
        self, decoder: SharingDecoder, id_slot: int, tokens: tuple[int, ...], reserved: list[int]
    ) -> Shared:
        """Share; if this is cancelled meanwhile, what comes of it is released."""
        expires_ms = math.ceil((self._prefill_timeout_s + CLEANUP_TIMEOUT_S) * 1000)
        sharing = asyncio.ensure_future(
            decoder.share(
                id_slot,
                self.prefiller.socket,
                n_tokens=len(tokens),
                expires_ms=expires_ms,
                tokens=tokens,
            )
        )
        try:
            return await asyncio.shield(sharing)
        except asyncio.CancelledError:
            self._keep(reserved, self._later(self._release_when_shared(decoder, sharing)))
            raise

    async def _release_when_shared(self, decoder: SharingDecoder, sharing: asyncio.Future[Shared]) -> None:
        try:
            shared = await asyncio.wait_for(sharing, SHARE_TIMEOUT_S)
        except (KvshareError, asyncio.TimeoutError):
            return
        await self._release(decoder, shared)

    async def _released(self, decoder: SharingDecoder, shared: Shared, reserved: list[int]) -> str:
        """Release a share; return what went wrong, else nothing.

        A decoder that is busy is not waited for: its slot stays reserved until it has answered.
        """
        releasing = self._later(self._release(decoder, shared))
        try:
            await asyncio.wait([releasing], timeout=CLEANUP_TIMEOUT_S)
        finally:
            if not releasing.done():
                self._keep(reserved, releasing)
        return releasing.result() if releasing.done() else "no answer yet"

    async def _release(self, decoder: SharingDecoder, shared: Shared) -> str:
        """Release a share, as often as it takes, while it lives; return what went wrong, else nothing.

        A server that works on a batch answers later, and forgets the question of a client that hangs up.
        """
        end = time.monotonic() + shared.expires_ms / 1000
        while True:
            try:
                await decoder.release(shared.id_slot, shared.share_id)
            except DeadlineExceededError as error:
                if time.monotonic() > end:
                    return str(error)
            except Exception as error:  # a server that restarted has no share any more
                return str(error) or type(error).__name__
            else:
                return ""
            await asyncio.sleep(RETRY_S)

    def _later(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run something that a cancelled request must not take along."""
        task = asyncio.ensure_future(work)
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)
        return task

    def _keep(self, reserved: list[int], cleaning: asyncio.Future[Any]) -> None:
        """Keep the slots of a request reserved until they are clean, however long it lives."""
        kept = tuple(reserved)
        reserved.clear()

        def done(cleaned: asyncio.Future[Any]) -> None:
            self._reserved.difference_update(kept)
            if not cleaned.cancelled() and (trouble := cleaned.exception() or cleaned.result()):
                _log.warning("a slot was not cleaned: %s", trouble)

        cleaning.add_done_callback(done)

    def _fail(self, record: Record, reason: Reason, detail: str) -> None:
        if reason not in PASSING:
            self.policy.failed(self._clock())
        record.stay(reason, detail)

    def _evictable(self, slots: Sequence[Slot]) -> list[int]:
        """Return slots that may be emptied, the one that was not used for longest first."""
        if self._evict is Evict.NONE:
            return []
        if self._evict is Evict.IDLE:
            return [slot.id_slot for slot in sorted(slots, key=lambda slot: slot.id_task)]
        found = []
        for slot in slots:
            owned = self._owned.get(slot.id_slot)
            if owned is None or not slot.idle:
                continue
            if owned.id_task is None:
                owned.id_task = slot.id_task
            if owned.id_task == slot.id_task:
                found.append((owned.used, slot.id_slot))
            else:
                del self._owned[slot.id_slot]  # somebody else's request ran there
        return [id_slot for _, id_slot in sorted(found)]


# -- a provider's socket ---------------------------------------------------------------------


class ProviderClient:
    """Sends jobs to a warm provider, on a connection each.

    Args:
        socket: where it listens, for shares and for jobs.
        silence_s: how long it may say nothing, in seconds: nothing of any job, as it does one after
            the other.
    """

    def __init__(self, socket: str | os.PathLike[str], *, silence_s: float = DEFAULT_SILENCE_S) -> None:
        self.socket = os.fspath(socket)
        self._silence_s = silence_s
        self._heard = 0.0

    async def prefill(
        self,
        share_id: int,
        tokens: Sequence[int],
        *,
        deadline: float,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Prefill into a share; a cancelled call hangs up, and the provider stops.

        Args:
            share_id: the share whose descriptors it has, or will get.
            tokens: from position 0.
            deadline: `time.monotonic()` value.
            progress: called with the number of tokens that are done, and of all.

        Raises:
            PeerRefusedError: nobody listens, or somebody else does.
            PeerClosedError: the provider hung up, or died.
            DeadlineExceededError: it was not done in time, or it was silent for too long.
            LedgerIncompleteError: it says that it has failed, and why.
            ServerBusyError: it has as many jobs as it takes.
            RemoteProtocolError: it says something that is no answer.
            LocalProtocolError: too many tokens for one message.
        """
        job = wire.encode(wire.JobHeader(share_id=share_id, tokens=tuple(tokens)))
        try:
            await asyncio.wait_for(
                self._run(share_id, job, deadline, progress), max(0.0, deadline - time.monotonic())
            )
        except asyncio.TimeoutError as exc:
            raise DeadlineExceededError("the provider was not done in time") from exc

    async def _run(
        self, share_id: int, job: bytes, deadline: float, progress: Callable[[int, int], None] | None
    ) -> None:
        reader, writer = await self._connect(deadline)
        self._heard = time.monotonic()
        try:
            writer.write(_LENGTH.pack(len(job)) + job)
            await writer.drain()
            while True:
                message = wire.decode(await self._hear(reader))
                if not isinstance(message, (wire.Progress, wire.Outcome)) or message.share_id != share_id:
                    raise RemoteProtocolError(f"unexpected {type(message).__name__} from the provider")
                if isinstance(message, wire.Outcome):
                    if not message.ok and (message.error or "").startswith(wire.BUSY):
                        raise ServerBusyError(f"the provider is {message.error}")
                    if not message.ok:
                        raise LedgerIncompleteError(f"the provider failed: {message.error}")
                    return
                if progress:
                    progress(message.n_filled, message.n_tokens)
        except (asyncio.IncompleteReadError, OSError) as exc:
            raise PeerClosedError("the provider closed the connection before it was done") from exc
        finally:
            writer.transport.abort()

    async def _hear(self, reader: asyncio.StreamReader) -> bytes:
        """Read the next message, unless the provider is silent for too long."""
        reading = asyncio.ensure_future(_frame(reader))
        try:
            while not reading.done():
                left = self._heard + self._silence_s - time.monotonic()
                if left <= 0:
                    raise DeadlineExceededError(f"the provider was silent for {self._silence_s:g} s")
                await asyncio.wait([reading], timeout=left)
        except BaseException:
            reading.cancel()
            raise
        self._heard = time.monotonic()
        return await reading

    async def _connect(self, deadline: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        deadline = min(deadline, time.monotonic() + CONNECT_TIMEOUT_S)
        connecting = asyncio.ensure_future(
            asyncio.to_thread(fds.connect_unix, self.socket, deadline=deadline)
        )
        try:
            sock = await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(
                lambda done: done.result().close() if not done.cancelled() and not done.exception() else None
            )
            raise
        try:
            return await asyncio.open_unix_connection(sock=sock)
        except BaseException:
            sock.close()
            raise


async def _frame(reader: asyncio.StreamReader) -> bytes:
    """Read one framed message; descriptors would be dropped by the kernel."""
    (n,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if n > fds.MAX_PAYLOAD_NBYTES:
        raise RemoteProtocolError(f"the provider announced {n} bytes")
    return await reader.readexactly(n)


# -- a decoder in this process ---------------------------------------------------------------


class InProcessDecoder:
    """A `kvshare.Decoder` of this process as an engine wants it; its sequences are the slots.

    Args:
        decoder: the decoder.
        executor: where its calls run, one at a time: the thread that decodes as well. None makes one.
        strict: make strict shares; see `kvshare.Decoder.share`.
        history: says which tokens a sequence holds, on the decoder's thread: the library does not keep
            them. If they are not as many as its positions, they count as unknown. None knows what was
            adopted here, until something else is decoded there.

    *Ownership*: the decoder stays the caller's; `close` ends the shares and an executor of its own.
    """

    def __init__(
        self,
        decoder: Any,
        executor: Executor | None = None,
        *,
        strict: bool = False,
        history: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.decoder = decoder
        self._strict = strict
        self._adopted: dict[int, list[int]] = {}  # by sequence
        self._history = history or (lambda seq_id: self._adopted.get(seq_id, ()))
        self.executor = executor or ThreadPoolExecutor(1, thread_name_prefix="kvshare-decoder")
        self._owns_executor = executor is None
        self._cache = getattr(decoder, "context", decoder)
        self._shares: dict[int, Any] = {}

    async def close(self) -> None:
        """Release all shares; idempotent."""
        shares = list(self._shares.values())
        self._shares.clear()
        for share in shares:
            await self.run(share.release)
        if self._owns_executor:
            self._owns_executor = False
            # what was cancelled may still run there, and the decoder must outlive it
            await asyncio.to_thread(self.executor.shutdown)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run something on the decoder's thread, such as a decode."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, function, *arguments)

    async def slots(self) -> list[Slot]:
        """Return all sequences; which of them a program decodes right now, it knows itself."""

        def look() -> list[Slot]:
            return [
                Slot(
                    id_slot=seq_id,
                    idle=True,
                    n_tokens=self._cache.n_past(seq_id),
                    n_ctx=self._cache.n_ctx_seq,
                )
                for seq_id in range(self._cache.n_seq_max)
            ]

        return await self.run(look)

    async def share(
        self,
        id_slot: int,
        socket: str,
        *,
        n_tokens: int | None = None,
        expires_ms: int | None = None,
        tokens: Sequence[int] | None = None,
    ) -> Shared:
        """Share a sequence; as `kvshare.Decoder.share` and `Share.send`.

        It keeps what it holds if all tokens but the last begin so, or if there are none; else it is emptied.
        """
        options: dict[str, Any] = {"strict": True} if self._strict else {}
        if expires_ms is not None:
            options["expires_ms"] = expires_ms

        def issue() -> Any:
            if prefix := self._kept(id_slot, tokens):
                options["prefix"] = prefix
            return self.decoder.share(id_slot, n_tokens=n_tokens, **options)

        share = await self.run(issue)
        n_prefix = len(options.get("prefix", ()))
        self._shares[share.share_id] = share
        sending = asyncio.ensure_future(asyncio.to_thread(share.send, socket))
        try:
            await asyncio.shield(sending)
        except BaseException:
            await asyncio.wait([sending])  # bounded by the deadline of `send`
            await self.release(id_slot, share.share_id)
            raise
        return Shared(
            id_slot=id_slot,
            share_id=share.share_id,
            expires_ms=share.header.expires_ms,
            t_us=share.t_us,
            layout=share.header.layout,
            semantics=share.header.semantics,
            params=share.header.params,
            n_prefix=n_prefix,
        )

    def _kept(self, id_slot: int, tokens: Sequence[int] | None) -> list[int]:
        """Return the tokens that a sequence holds, if a prompt goes on behind them; else empty it."""
        held = list(self._history(id_slot))
        # it is not cut: a window may lack what is in front of a cut, a recurrent state has only its end
        if len(held) == self._cache.n_past(id_slot) and (
            tokens is None or held == list(tokens[: min(len(held), len(tokens) - 1)])
        ):
            return held
        self._cache.clear(id_slot)
        return []

    async def adopt(self, id_slot: int, share_id: int, tokens: Sequence[int]) -> AdoptedInSlot:
        """Adopt; as `kvshare.Decoder.adopt`."""
        share = self._shares.get(share_id)
        if share is None or share.seq_id != id_slot:
            raise ReplayError(f"share {share_id} of sequence {id_slot} is unknown")
        if self._strict:  # not on the thread that decodes
            deadline = time.monotonic() + LET_GO_TIMEOUT_S
            await asyncio.to_thread(share.wait_until_let_go, deadline=deadline)
        adopted = await self.run(self.decoder.adopt, share, list(tokens))
        self._shares.pop(share_id, None)
        self._adopted[id_slot] = list(tokens)
        return AdoptedInSlot(
            id_slot=id_slot,
            n_adopted=adopted.n_adopted,
            n_usable=adopted.n_adopted,
            bytes_moved=adopted.bytes_moved,
            t_us=adopted.t_us,
        )

    async def release(self, id_slot: int, share_id: int) -> None:
        """End a share; idempotent."""
        share = self._shares.get(share_id)
        if share is not None:
            await self.run(share.release)
            self._shares.pop(share_id, None)

    async def erase(self, id_slot: int) -> None:
        """Empty a sequence."""
        await self.run(self._cache.clear, id_slot)
