"""Conversations: the provider goes on behind what the decoder's sequence holds, turn by turn.

The oracle: a plain context that decodes the same tokens in the same calls. It prefills every turn for
itself, behind the answers that it gave itself; its logits are those of the shared one, bit for bit.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshare import (
    Context,
    Decoder,
    LedgerDigestError,
    LedgerIncompleteError,
    LocalProtocolError,
    Model,
    Offer,
    PeerClosedError,
    SequenceInUseError,
    Share,
    WarmProvider,
    exporting,
    fds,
)
from kvshare._native import loader
from kvshare.mapping import Mapping
from kvshare.wire import ShareState
from tests.native.handoff import ProviderProcess, random_tokens
from tests.native.test_service import Engine, ServiceProcess
from tests.native.test_warm import KINDS, receive

pytestmark = pytest.mark.native

N_TURNS = 10
N_USER = 130  # tokens of a user's turn; ten of them go round in the window of gemma3-270m
N_ANSWER = 5
PARAMS: dict[str, Any] = {"n_ctx": 2048}
TINY: dict[str, Any] = {"n_ctx": 1024, "n_ubatch": 32, "n_threads": 1}
TEXT = (
    "The keeper wrote the same line into the book every evening: wind from the west, sea calm, two ships "
    "passing, light burning. On day {} of the year he added a second one, about {} gulls. "
)

# models whose caches a provider that goes on writes over: none of its bytes is known to be right
WRITTEN_OVER = {KINDS["recurrent"], KINDS["compressed"]}

Provide = Callable[[Share, Sequence[int]], int]
"""Let a provider fill a share; return how many tokens it prefilled."""


class Conversation:
    """A decoder that gets the turns of a user from a provider, and a plain context beside it.

    Attributes:
        transcript: all tokens; the last one is not in the cache.
        n_cached: tokens that the sequence holds.
        rounding: how far logits may be from those of the plain run; 0 where cells lie at the same place.
    """

    def __init__(self, model: Model, *, seq_id: int = 0, rounding: float = 0.0, **params: Any) -> None:
        self.model = model
        self.rounding = rounding
        self.seq_id = seq_id
        self.plain = Context.create(model, **params)
        self.decoder = Decoder.open(model, **params)
        self.transcript: list[int] = []
        self.n_cached = 0

    @property
    def held(self) -> list[int]:
        return self.transcript[: self.n_cached]

    def ask(self, tokens: Sequence[int]) -> list[int]:
        """Add a turn; return the tokens that the sequence is to hold."""
        self.transcript += tokens
        return self.transcript[:-1]

    @contextlib.contextmanager
    def shared(self, n_tokens: int, **options: Any) -> Iterator[Share]:
        with self.decoder.share(self.seq_id, n_tokens=n_tokens, prefix=self.held, **options) as share:
            assert share.n_prefix == self.n_cached
            yield share

    def turn(self, tokens: Sequence[int], provide: Provide, **options: Any) -> None:
        """Hand over what is new, answer, and compare."""
        prompt = self.ask(tokens)
        with self.shared(len(prompt), **options) as share:
            assert provide(share, prompt) == len(prompt) - self.n_cached
            adopted = self.decoder.adopt(share, prompt)
        assert (adopted.n_adopted, adopted.bytes_moved) == (len(prompt), 0)
        assert adopted.bytes_in_place > 0
        self.follow(prompt)
        self.answer()

    def local_turn(self, tokens: Sequence[int]) -> None:
        """The same without a provider."""
        prompt = self.ask(tokens)
        new = prompt[self.n_cached :]
        self.decoder.context.decode(new, position=self.n_cached, seq_id=self.seq_id)
        self.follow(prompt)
        self.answer()

    def follow(self, prompt: Sequence[int]) -> None:
        """Let the plain context hold the same."""
        assert self.decoder.context.n_past(self.seq_id) == len(prompt)
        self.plain.decode(prompt[self.n_cached :], position=self.n_cached, seq_id=self.seq_id)
        self.n_cached = len(prompt)

    def answer(self) -> None:
        for _ in range(N_ANSWER):
            found = []
            for context in (self.decoder.context, self.plain):
                context.decode(self.transcript[-1:], position=self.n_cached, seq_id=self.seq_id, logits=True)
                found.append(context.logits())
            difference = float(np.abs(found[0] - found[1]).max())
            assert difference <= self.rounding if self.rounding else found[0].tobytes() == found[1].tobytes()
            assert np.isfinite(found[0]).all()
            self.n_cached += 1
            self.transcript.append(int(found[0].argmax()))

    def lost(self) -> None:
        """The sequence is empty; the plain context begins anew as well."""
        assert self.decoder.context.n_past(self.seq_id) == 0
        self.plain.clear(self.seq_id)
        self.n_cached = 0

    def close(self) -> None:
        self.decoder.close()
        self.plain.close()

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def user(model: Model, turn: int, n: int = N_USER) -> list[int]:
    """Return the tokens of a turn."""
    text = "".join(TEXT.format(turn, i) for i in range(n))
    return model.tokenize(text, add_special=turn == 0)[:n]


def warm(provider: WarmProvider, seen: list[bool] | None = None) -> Provide:
    """Provide in this process."""

    def provide(share: Share, prompt: Sequence[int]) -> int:
        begun = seen.append if seen is not None else (lambda _: None)
        watermarks: list[int] = []
        with receive(share) as offer:
            provider.fill(offer, prompt, begun=begun, progress=watermarks.append)
        assert watermarks == sorted(watermarks)
        assert watermarks[0] > share.n_prefix
        assert watermarks[-1] == len(prompt)
        return provider.n_prefilled

    return provide


# -- real models -------------------------------------------------------------------------------


@pytest.fixture(params=["smollm2", pytest.param("gemma3-270m", marks=[pytest.mark.gemma, pytest.mark.slow])])
def real_path(request: pytest.FixtureRequest, library: loader.Library) -> Path:
    fixture = {"smollm2": "smollm2_path", "gemma3-270m": "gemma_path"}[request.param]
    path: Path = request.getfixturevalue(fixture)
    return path


@pytest.fixture
def real(real_path: Path) -> Iterator[Model]:
    with Model.open(real_path) as model:
        yield model


@pytest.mark.slow
def test_ten_turns(real: Model) -> None:
    seen: list[bool] = []
    with Conversation(real, **PARAMS) as chat, WarmProvider(real) as provider:
        for turn in range(N_TURNS):
            chat.turn(user(real, turn), warm(provider, seen))
        assert len(chat.held) == N_TURNS * (N_USER + N_ANSWER) - 1
    assert seen == [False] + [True] * (N_TURNS - 1)


@pytest.mark.slow
def test_ten_turns_of_two_processes(real: Model, real_path: Path) -> None:
    """The provider is the command; it keeps its context from turn to turn."""
    params = {**PARAMS, "n_ubatch": 64, "n_threads": 1}
    with (
        fds.private_directory() as folder,
        ServiceProcess(folder, real_path) as service,
        Conversation(real, **params) as chat,
    ):

        def provide(share: Share, prompt: Sequence[int]) -> int:
            share.send(service.path)
            with Engine(service, share.share_id, prompt) as engine:
                outcome = engine.outcome()
                assert outcome.ok, outcome.error
                watermarks = [share.n_prefix, *engine.progress]
            # it goes on behind the prefix, in graphs of n_ubatch tokens, to the end
            assert np.diff(watermarks).max() <= params["n_ubatch"]
            assert watermarks[1] == min(share.n_prefix + params["n_ubatch"], len(prompt))
            assert watermarks[-1] == len(prompt)
            done = service.wait_for("done")
            assert done["warm"] == (share.n_prefix > 0)
            return watermarks[-1] - watermarks[0]

        for turn in range(N_TURNS):
            chat.turn(user(real, turn), provide)


def test_a_provider_is_killed_in_a_turn(real: Model, real_path: Path) -> None:
    """The sequence holds its prefix, and the decoder prefills the turn itself."""
    with (
        fds.private_directory() as folder,
        ProviderProcess(folder) as process,
        Conversation(real, **PARAMS, n_ubatch=64) as chat,
        WarmProvider(real) as provider,
    ):
        for turn in range(2):
            chat.turn(user(real, turn, 300), warm(provider))
        provider.forget()
        tokens = user(real, 2)
        n_tokens = chat.n_cached + 1 + len(tokens)
        with chat.shared(n_tokens) as share:
            prompt = [*chat.transcript, *tokens][:-1]
            answer = process.serve(share, real_path, prompt, exit_after=share.n_prefix + 64)
            assert answer == {}, process.stderr()
            with pytest.raises(PeerClosedError):
                share.wait()
            assert share.ledger.snapshot().n_filled == share.n_prefix + 64
            with pytest.raises(LedgerIncompleteError):
                chat.decoder.adopt(share, prompt)
        assert share.state is ShareState.RELEASED
        assert chat.decoder.context.n_past() == chat.n_cached
        chat.local_turn(tokens)
        with WarmProvider(real) as another:
            chat.turn(user(real, 3), warm(another))


# -- every kind of cache -------------------------------------------------------------------------


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def kind(request: pytest.FixtureRequest, archs_path: Path) -> Iterator[Model]:
    with Model.open(archs_path / f"{request.param}.gguf") as model:
        yield model


def begin(chat: Conversation, provider: WarmProvider, n_turns: int = 2) -> None:
    """Some turns, past the windows of these models."""
    for turn in range(n_turns):
        chat.turn(random_tokens(chat.model, 150, seed=10 + turn), warm(provider))


def test_strict_turns(kind: Model) -> None:
    """Each in fresh memory, to which the prefix comes along; nothing is warm."""
    seen: list[bool] = []
    with (
        contextlib.ExitStack() as sockets,
        Conversation(kind, **TINY) as chat,
        WarmProvider(kind, n_threads=1) as provider,
    ):

        def provide(share: Share, prompt: Sequence[int]) -> int:
            near, far = socket.socketpair(socket.AF_UNIX)
            sockets.enter_context(near)  # the decoder waits until its peer hangs up
            with far:
                share.send(near)
                with Offer.receive(far) as offer:
                    provider.fill(offer, prompt, begun=seen.append, progress=lambda _: None)
            return provider.n_prefilled

        for turn in range(3):
            chat.turn(random_tokens(kind, 150, seed=turn), provide, strict=True)
    assert seen == [False] * 3


@pytest.mark.parametrize("how", ["unsent", "sent", "half", "filled", "refused", "expired"])
def test_a_share_that_ends_leaves_the_prefix(kind: Model, how: str) -> None:
    """Windows and states, over which the provider has gone on, are what they were."""
    with Conversation(kind, **TINY) as chat, WarmProvider(kind, n_threads=1) as provider:
        begin(chat, provider)
        tokens = random_tokens(kind, 150, seed=3)
        prompt = [*chat.transcript, *tokens][:-1]
        options = {"expires_ms": 200} if how == "expired" else {}

        def interrupt(n_done: int) -> None:
            if n_done > chat.n_cached + 64:
                raise InterruptedError

        with chat.shared(len(prompt), **options) as share:
            if how != "unsent":
                with receive(share) as offer:
                    if how == "half":
                        with pytest.raises(InterruptedError):
                            provider.fill(offer, prompt, begun=lambda _: None, progress=interrupt)
                    elif how != "sent":
                        provider.fill(offer, prompt, begun=lambda _: None, progress=lambda _: None)
            if how == "refused":
                with pytest.raises(LedgerDigestError):
                    chat.decoder.adopt(share, [*prompt[:-1], prompt[-1] ^ 1])
            if how == "expired":
                time.sleep(0.25)
                assert share.state is ShareState.EXPIRED
        provider.forget()
        assert chat.decoder.context.n_past() == chat.n_cached
        chat.local_turn(tokens)
        begin(chat, provider)


def test_a_decoder_that_went_on(kind: Model) -> None:
    """It is refused. What a window or a state holds then is worth nothing; a plain cache keeps it."""
    with Conversation(kind, **TINY) as chat, WarmProvider(kind, n_threads=1) as provider:
        begin(chat, provider)
        is_plain = all(cache.is_plain for cache in chat.decoder.layout.caches)
        prompt = [*chat.transcript, *random_tokens(kind, 150, seed=3)][:-1]
        with chat.shared(len(prompt)) as share:
            chat.decoder.context.decode(chat.transcript[-1:], position=chat.n_cached)
            assert warm(provider)(share, prompt) == len(prompt) - chat.n_cached
            with pytest.raises(SequenceInUseError):
                chat.decoder.adopt(share, prompt)
            assert share.state is ShareState.FAILED
        provider.forget()
        if is_plain:
            assert chat.decoder.context.n_past() == chat.n_cached + 1
            chat.decoder.context.clear()
        chat.lost()
        begin(chat, provider, 1)


def test_a_decoder_that_forgot(kind: Model) -> None:
    """An emptied sequence stays empty, whatever its share does."""
    with Conversation(kind, **TINY) as chat, WarmProvider(kind, n_threads=1) as provider:
        begin(chat, provider)
        prompt = [*chat.transcript, *random_tokens(kind, 150, seed=3)][:-1]
        with chat.shared(len(prompt)) as share:
            warm(provider)(share, prompt)
            chat.decoder.context.clear()
            with pytest.raises(SequenceInUseError):
                chat.decoder.adopt(share, prompt)
        provider.forget()
        chat.lost()
        begin(chat, provider, 1)


def touch(offer: Offer) -> None:
    """Change every byte of the memory."""
    for mapping in offer._mapped():
        assert isinstance(mapping, Mapping)
        data = np.frombuffer(mapping.buffer, np.uint8)
        data ^= 1
        del data


@pytest.mark.parametrize("adopt", [True, False], ids=["adopted", "released"])
def test_a_provider_that_touched_the_prefix(request: pytest.FixtureRequest, kind: Model, adopt: bool) -> None:
    """Nothing of the sequence is believed then; but what a provider writes over anyway is restored."""
    is_state = request.node.callspec.params["kind"] in WRITTEN_OVER
    with Conversation(kind, **TINY) as chat, WarmProvider(kind, n_threads=1) as provider:
        begin(chat, provider)
        prompt = [*chat.transcript, *random_tokens(kind, 150, seed=3)][:-1]
        with chat.shared(len(prompt)) as share, receive(share) as offer:
            touch(offer)
            provider.fill(offer, prompt, begun=lambda _: None, progress=lambda _: None)
            if adopt and not is_state:
                with pytest.raises(LedgerDigestError):
                    chat.decoder.adopt(share, prompt)
                assert share.state is ShareState.FAILED
        provider.forget()
        if not is_state:
            chat.lost()
        begin(chat, provider, 1)


def test_another_sequence_goes_on_meanwhile(kind: Model) -> None:
    """In a unified cache, where the provider sees both; the first holds what it held."""
    params = {**TINY, "n_ctx": 4096, "n_seq_max": 2, "kv_unified": True}
    other = random_tokens(kind, 60, seed=77)
    with (
        # a window goes round in fewer cells than the plain run has: the other sequence needs some
        Conversation(kind, rounding=1e-4, **params) as chat,
        WarmProvider(kind, n_threads=1) as provider,
    ):
        contexts = (chat.decoder.context, chat.plain)
        begin(chat, provider)
        for context in contexts:
            context.decode(other[:20], position=0, seq_id=1)
        prompt = [*chat.transcript, *random_tokens(kind, 150, seed=3)][:-1]
        with chat.shared(len(prompt)) as share:
            for i in range(20, 40):
                chat.decoder.context.decode(other[i : i + 1], position=i, seq_id=1)
            warm(provider)(share, prompt)
            adopted = chat.decoder.adopt(share, prompt)
        assert (adopted.n_adopted, adopted.bytes_moved) == (len(prompt), 0)
        assert chat.decoder.context.n_past(1) == 40
        for i in range(40, 60):
            chat.decoder.context.decode(other[i : i + 1], position=i, seq_id=1, logits=True)
            assert np.isfinite(chat.decoder.context.logits()).all()


# -- what is refused -------------------------------------------------------------------------------


def test_numbers_and_prefixes_that_are_none(tiny: Model) -> None:
    with Conversation(tiny, **TINY) as chat, WarmProvider(tiny, n_threads=1) as provider:
        begin(chat, provider, 1)
        share = chat.decoder.share
        for prefix in (chat.held[:-1], [*chat.held, 1], [], None):
            with pytest.raises(SequenceInUseError):
                share(prefix=prefix, n_tokens=600)
        for n_tokens in (0, chat.n_cached, 1025):
            with pytest.raises(LocalProtocolError):
                share(prefix=chat.held, n_tokens=n_tokens)
        with pytest.raises(LocalProtocolError, match="int32"):
            share(prefix=[1 << 40] * chat.n_cached)
        begin(chat, provider, 1)


def test_a_full_cache(tiny: Model) -> None:
    """The last cell is the provider's; behind it nothing can be shared."""
    with Conversation(tiny, **{**TINY, "n_ctx": 512}) as chat, WarmProvider(tiny, n_threads=1) as provider:
        begin(chat, provider, 1)
        prompt = chat.ask(random_tokens(tiny, 512 - len(chat.transcript) + 1, seed=5))
        with chat.shared(512) as share:
            warm(provider)(share, prompt)
            assert chat.decoder.adopt(share, prompt).n_adopted == 512
        with pytest.raises(LocalProtocolError, match="n_tokens"):
            chat.decoder.share(prefix=prompt)


def test_metadata_that_is_none(tiny: Model) -> None:
    """A decoder's blob is a peer's input: a provider that cannot use it says so, and lives on."""
    with Conversation(tiny, **TINY) as chat, WarmProvider(tiny, n_threads=1) as provider:
        begin(chat, provider, 1)
        prompt = [*chat.transcript, *random_tokens(tiny, 50, seed=3)][:-1]
        for at in (0, 4, 20):
            with chat.shared(len(prompt)) as share, receive(share) as offer:
                with share.ledger.view() as view:
                    view[512 + at] ^= 0x7F
                with pytest.raises(Exception) as caught:  # noqa: PT011
                    provider.fill(offer, prompt, begun=lambda _: None, progress=lambda _: None)
                assert type(caught.value).__module__ == "kvshare.errors", caught.value
            assert chat.decoder.context.n_past() == chat.n_cached
        chat.turn(random_tokens(tiny, 50, seed=4), warm(provider))


# -- a llama_cpp.Llama ---------------------------------------------------------------------------


def test_a_llama_converses(smollm2: Model, smollm2_path: Path) -> None:
    """`generate` goes on behind every turn; a share that fails leaves it able to."""
    import llama_cpp

    def build() -> Any:
        return llama_cpp.Llama(str(smollm2_path), n_ctx=512, verbose=False, n_threads=2, n_threads_batch=2)

    def generate(llama: Any, tokens: list[int]) -> list[int]:
        found: list[int] = []
        for token in llama.generate(tokens, temp=0.0):
            found.append(token)
            if len(found) == 6:
                break
        return found

    with contextlib.ExitStack() as stack:
        plain = build()
        stack.callback(plain.close)
        with exporting():
            llama = build()
        stack.callback(llama.close)
        decoder = stack.enter_context(Decoder.wrap(llama))
        provider = stack.enter_context(WarmProvider(smollm2, n_threads=2))
        transcript: list[int] = []
        for turn in range(3):
            transcript += user(smollm2, turn, 60)
            prompt = transcript[:-1]
            held = llama.input_ids[: llama.n_tokens].tolist()
            assert held == transcript[: len(held)]
            with decoder.share(n_tokens=len(prompt), prefix=held) as share:
                assert warm(provider)(share, prompt) == len(prompt) - len(held)
                decoder.adopt(share, prompt)
            assert llama.n_tokens == len(prompt)
            plain.eval(prompt[len(held) :])
            answer = generate(plain, transcript)
            assert generate(llama, transcript) == answer
            transcript += answer
        # a provider that touches the prefix: the Llama knows that its cache is empty
        held = llama.input_ids[: llama.n_tokens].tolist()
        with decoder.share(n_tokens=len(held) + 50, prefix=held) as share, receive(share) as offer:
            touch(offer)
        assert llama.n_tokens == decoder.context.n_past() == 0
        plain.reset()
        loader.load().llama.llama_memory_clear(plain._ctx.memory, True)
        assert generate(llama, transcript) == generate(plain, transcript)
