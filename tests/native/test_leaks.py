"""What is opened is closed: descriptors, mappings, threads and memory stay flat; who dies, dies alone."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvshare import (
    Context,
    Decoder,
    ExpiredError,
    KvshareError,
    LedgerIncompleteError,
    LocalProtocolError,
    Model,
    Offer,
    PeerClosedError,
    Provider,
    ReplayError,
    fds,
)
from kvshare.wire import ShareState
from tests.native.handoff import (
    ROOT,
    ProviderProcess,
    decode_each,
    environment,
    random_tokens,
    shared_bytes,
)

pytestmark = pytest.mark.native

PARAMS: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 64, "n_threads": 1}
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]

# An allocator keeps what it has: the resident size may grow by this in a whole test, but a leak of a
# single page in each of 500 cycles is more, and so are some hundred bytes in each of 10,000.
RSS_TOLERANCE_NBYTES = 500 * 4096


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps every record of llama.cpp's log, which looks like a leak."""
    monkeypatch.setattr(logging.getLogger("kvshare.llama"), "disabled", True)


class Usage(NamedTuple):
    n_fds: int
    n_mappings: int
    n_threads: int
    rss_nbytes: int


def usage() -> Usage:
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    n_mappings = len(Path("/proc/self/maps").read_text().splitlines())
    n_threads = len(os.listdir("/proc/self/task"))
    return Usage(len(os.listdir("/proc/self/fd")), n_mappings, n_threads, resident)


def assert_flat(cycle: Callable[[], None], n: int, *, n_warm: int) -> None:
    """Run a cycle often; nothing grows after the first few, which fill pools and caches."""
    for _ in range(n_warm):
        cycle()
    before = usage()
    for _ in range(n):
        cycle()
    after = usage()
    assert after.n_fds == before.n_fds
    assert after.n_threads == before.n_threads
    # glibc may map an arena or grow a heap once
    assert after.n_mappings <= before.n_mappings + 2, (before, after)
    assert after.rss_nbytes <= before.rss_nbytes + RSS_TOLERANCE_NBYTES, (before, after)


@contextlib.contextmanager
def offered(decoder: Decoder, n_tokens: int) -> Iterator[tuple[Any, Offer]]:
    """Share, and receive the offer in this process, so that both sides are measured."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, decoder.share(n_tokens=n_tokens) as share:
        share.send(near)
        with Offer.receive(far) as offer:
            yield share, offer


def test_500_handoffs(tiny: Model) -> None:
    with Decoder.open(tiny, **PARAMS) as decoder:

        def cycle() -> None:
            with offered(decoder, len(PROMPT)) as (share, offer):
                with Provider(offer, tiny, n_threads=1) as provider:
                    provider.prefill(PROMPT)
                    provider.publish()
                assert decoder.adopt(share, PROMPT).n_adopted == len(PROMPT)
            decoder.context.clear()

        assert_flat(cycle, 500, n_warm=20)


def fill(offer: Offer) -> None:
    """Write and vouch for all rows of the prompt, without llama.cpp."""
    cells = slice(offer.first_cell, offer.first_cell + len(PROMPT))
    offer.ledger.begin()
    for layer in offer.views():
        assert layer.v is not None
        layer.k[cells] = layer.v[cells] = 1
    offer.complete(PROMPT)


@pytest.mark.slow
def test_10000_handoffs_through_views(tiny: Model) -> None:
    with Decoder.open(tiny, **PARAMS) as decoder:

        def cycle() -> None:
            with offered(decoder, len(PROMPT)) as (share, offer):
                fill(offer)
                assert decoder.adopt(share, PROMPT).n_adopted == len(PROMPT)
            decoder.context.clear()

        assert_flat(cycle, 10_000, n_warm=50)


@pytest.mark.slow
def test_10000_aborts(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way in which a share ends without adoption, in turn; the next share finds the slot free."""
    now, ahead_s = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now() + ahead_s)

    with (
        fds.private_directory() as folder,
        fds.listen_unix(folder / "p.sock") as listener,
        Decoder.open(tiny, **PARAMS) as decoder,
    ):

        def released_before_it_is_sent() -> None:
            share = decoder.share(n_tokens=len(PROMPT))
            share.release()
            share.release()
            assert share.state is ShareState.RELEASED

        def released_when_it_is_filled() -> None:
            with offered(decoder, len(PROMPT)) as (share, offer):
                fill(offer)
                share.release()
                assert share.state is ShareState.RELEASED

        def the_provider_fails() -> None:
            with offered(decoder, len(PROMPT)) as (share, offer):
                offer.ledger.begin()
                offer.fail("no")
                with pytest.raises(LedgerIncompleteError):
                    decoder.adopt(share, PROMPT)
                assert share.state is ShareState.FAILED

        def the_provider_hangs_up() -> None:
            with decoder.share(n_tokens=len(PROMPT)) as share:
                share.send(folder / "p.sock")
                with fds.accept_unix(listener) as connection, Offer.receive(connection) as offer:
                    offer.ledger.begin()
                with pytest.raises(PeerClosedError):
                    share.wait()
            assert share.state is ShareState.RELEASED

        def it_expires() -> None:
            nonlocal ahead_s
            with offered(decoder, len(PROMPT)) as (share, offer):
                fill(offer)
                ahead_s += share.header.expires_ms / 1000
                with pytest.raises(ExpiredError):
                    decoder.adopt(share, PROMPT)
                assert share.state is ShareState.EXPIRED

        ways = itertools.cycle(
            [
                released_before_it_is_sent,
                released_when_it_is_filled,
                the_provider_fails,
                the_provider_hangs_up,
                it_expires,
            ]
        )
        assert_flat(lambda: next(ways)(), 10_000, n_warm=50)


def test_500_refusals(tiny: Model) -> None:
    """Refused by the provider, and by the decoder."""
    with Decoder.open(tiny, **PARAMS) as decoder:

        def cycle() -> None:
            with offered(decoder, len(PROMPT)) as (share, offer):
                with pytest.raises(KvshareError):
                    Provider(offer, tiny, n_threads=1, rope_freq_base=7.0)
                offer.fail("no")
                with pytest.raises(LedgerIncompleteError):
                    decoder.adopt(share, PROMPT)

        assert_flat(cycle, 500, n_warm=20)


@pytest.mark.parametrize("n_seq_max", [1, 4])
def test_50_contexts(tiny: Model, n_seq_max: int) -> None:
    """Exported contexts, with as many regions as streams, and a share of each that nobody ends."""

    def cycle() -> None:
        with Decoder.open(tiny, **{**PARAMS, "n_ctx": 256 * n_seq_max, "n_seq_max": n_seq_max}) as decoder:
            decoder.share(n_seq_max - 1, n_tokens=len(PROMPT))
            decoder.context.decode(PROMPT[:1], position=0) if n_seq_max > 1 else None

    assert_flat(cycle, 50, n_warm=10)


def test_50_models(tiny_path: Path) -> None:
    def cycle() -> None:
        with Decoder.open(tiny_path, **PARAMS) as decoder:
            decoder.context.decode(PROMPT, position=0)

    assert_flat(cycle, 50, n_warm=10)


def test_a_context_that_cannot_be_created(tiny: Model) -> None:
    """llama.cpp refuses a quantized V without flash attention, half-way through."""

    def cycle() -> None:
        with pytest.raises(KvshareError):
            Decoder.open(tiny, **PARAMS, type_v="q8_0", flash_attn="off")

    assert_flat(cycle, 50, n_warm=10)


# -- who dies --------------------------------------------------------------------------------------


def test_a_decoder_is_freed_while_its_share_lives(tiny: Model) -> None:
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far:
        decoder = Decoder.open(tiny, **PARAMS)
        share = decoder.share(n_tokens=len(PROMPT))
        share.send(near)
        decoder.close()
        assert not share.state.live
        with pytest.raises(ReplayError):
            decoder.adopt(share, PROMPT)
        share.release()
        with pytest.raises(LocalProtocolError):
            share.send(near)
        # whoever holds the descriptors holds memory: writing there hurts nobody
        with Offer.receive(far) as offer, Provider(offer, tiny, n_threads=1) as provider:
            provider.prefill(PROMPT)
            provider.publish()


def test_a_provider_dies_in_the_middle(tiny: Model, tiny_path: Path) -> None:
    tokens = random_tokens(tiny, 202)
    prompt, rest = tokens[:200], tokens[200:]
    params = {**PARAMS, "n_ctx": 512}
    with Decoder.open(tiny, **params) as decoder, fds.private_directory() as folder:
        with ProviderProcess(folder) as dying:
            share = decoder.share(n_tokens=200)
            assert dying.serve(share, tiny_path, prompt, exit_after=128) == {}
            assert dying.process.wait(60) == 1
        with pytest.raises(PeerClosedError):
            share.wait()
        assert share.ledger.snapshot().n_filled == 128
        with pytest.raises(LedgerIncompleteError, match="128"):
            decoder.adopt(share, prompt)
        assert any(any(region) for region in shared_bytes(share))  # it had written, and that is zeroed
        regions = [(fd, entry) for fd, entry in zip(share._descriptors, share.header.regions, strict=False)]
        share.release()
        assert not any(any(os.pread(fd, entry.size, entry.offset)) for fd, entry in regions)
        assert decoder.context.n_past() == 0
        with ProviderProcess(folder) as provider, decoder.share(n_tokens=200) as share:
            assert provider.serve(share, tiny_path, prompt) == {"ok": True}
            decoder.adopt(share, prompt)
        there = decode_each(decoder.context, rest, position=200)
        with Context.create(tiny, **params) as local:
            local.decode(prompt, position=0)
            here = decode_each(local, rest, position=200)
        assert [x.tobytes() for x in here] == [x.tobytes() for x in there]


DECODER = """
import os, sys
import kvshare
with kvshare.Model.open(sys.argv[1]) as model:
    decoder = kvshare.Decoder.open(model, n_ctx=256, n_batch=64, n_ubatch=64, n_threads=1)
    decoder.share(n_tokens=8).send(sys.argv[2])
    print("sent", flush=True)
    sys.stdin.read()
"""


def test_a_decoder_is_killed(tiny: Model, tiny_path: Path) -> None:
    """The memory is there as long as somebody maps it, at its full size: no SIGBUS."""
    with (
        fds.private_directory() as folder,
        fds.listen_unix(folder / "p.sock") as listener,
        subprocess.Popen(
            [sys.executable, "-c", DECODER, str(tiny_path), str(folder / "p.sock")],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
        fds.accept_unix(listener) as connection,
        Offer.receive(connection) as offer,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        process.kill()
        process.wait()
        with pytest.raises(PeerClosedError):
            fds.receive_message(connection)
        with Provider(offer, tiny, n_threads=1) as provider:
            provider.prefill(PROMPT)
            provider.publish()
        layer = offer.views()[0]
        assert layer.k[: len(PROMPT)].any()
        layer.k[:] = 0
        del layer
