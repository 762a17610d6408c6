"""Frozen prefixes and their forks: identical logits, and no fork changes anything but itself.

The oracle is a context that has prefilled the prompt itself, with equal settings: the cells are at the
same places, so the logits are equal bit for bit.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest

from kvshare import (
    Context,
    Decoder,
    KvshareError,
    LayoutMismatchError,
    LedgerDigestError,
    LedgerError,
    LocalProtocolError,
    Model,
    NativeError,
    NotShareableError,
    Offer,
    PeerError,
    PeerRefusedError,
    Prefix,
    PrefixServer,
    PrefixStore,
    Provider,
    SemanticsMismatchError,
    SequenceInUseError,
    fds,
    forking,
)
from kvshare.prefix import FROZEN_SEALS, drop_prefix
from tests.native.handoff import ROOT, decode_each, environment, random_tokens
from tests.native.test_embedding import build, eval_each

pytestmark = pytest.mark.native

N_PROMPT = 200
PARAMS: dict[str, Any] = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 128, "flash_attn": "on"}
WAIT_S = 60.0


def hashed(logits: Sequence[Any]) -> list[str]:
    return [hashlib.sha256(each.tobytes()).hexdigest() for each in logits]


def bytes_of(prefix: Prefix) -> list[str]:
    """Return digests of all memory of a prefix."""
    found = []
    for owned in prefix._fds:
        digest, fd = hashlib.sha256(), owned.fileno()
        for offset in range(0, os.fstat(fd).st_size, 1 << 24):
            digest.update(os.pread(fd, 1 << 24, offset))
        found.append(digest.hexdigest())
    return found


def freeze(
    model: Model, prompt: Sequence[int], params: dict[str, Any], *, seq_id: int = 0, name: str = "one"
) -> Prefix:
    """Prefill a prompt in a decoder of its own, and freeze it."""
    with Decoder.open(model, **params) as decoder:
        if model.has_encoder:
            decoder.context.encode(prompt)
        decoder.context.decode(prompt, position=0, seq_id=seq_id)
        return Prefix.freeze(decoder, prompt, seq_id, name=name)


def local_logits(
    model: Model,
    prompt: Sequence[int],
    rests: Sequence[Sequence[int]],
    params: dict[str, Any],
    *,
    seq_id: int = 0,
) -> list[list[str]]:
    """Return the digests of the logits that contexts of their own give, one for each continuation."""
    found = []
    for rest in rests:
        with Context.create(model, **params) as local:
            if model.has_encoder:
                local.encode(prompt)
            local.decode(prompt, position=0, seq_id=seq_id)
            found.append(hashed(decode_each(local, rest, position=len(prompt), seq_id=seq_id)))
    return found


class Reader:
    """`tests.native.prefix_reader`. Leaving the block ends it."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.native.prefix_reader"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **job: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job, default=str) + "\n")
        self.process.stdin.flush()
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def fork(self, path: Path, model: Path, *, id: str = "a", name: str = "one", **options: Any) -> Any:
        return self.ask(fork=id, socket=path, name=name, model=model, options=options)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def serving() -> Iterator[Path]:
    """Serve prefixes in a thread; yield the socket."""
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(fds.private_directory()) / "p.sock"
        listener = stack.enter_context(fds.listening(path))
        server = PrefixServer(listener, stack.enter_context(PrefixStore()))
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield path
        finally:
            server.stop()
            thread.join()


@contextlib.contextmanager
def served_by_a_process() -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    with fds.private_directory() as folder:
        path = folder / "p.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "kvshare", "prefix", "serve", "--listen", str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert "listening" in process.stdout.readline()
            yield path, process
        finally:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def prompt(tiny: Model) -> list[int]:
    return random_tokens(tiny, N_PROMPT)


@pytest.fixture
def prefix(tiny: Model, prompt: list[int]) -> Iterator[Prefix]:
    with freeze(tiny, prompt, PARAMS) as made:
        yield made


@pytest.fixture(scope="module")
def rests(tiny: Model) -> list[list[int]]:
    """Four continuations that have nothing in common."""
    return [random_tokens(tiny, 4, seed=seed) for seed in range(10, 14)]


# -- freezing ----------------------------------------------------------------------------------


def test_what_is_frozen(tiny: Model, prefix: Prefix, prompt: list[int]) -> None:
    assert list(prefix.tokens) == prompt
    with Decoder.open(tiny, **PARAMS) as decoder:
        assert prefix.layout == decoder.layout
    row_nbytes = sum(t.nb[1] for region in prefix.layout.regions for t in region.tensors)
    used = N_PROMPT * row_nbytes
    # what is frozen takes a page more at both ends of each tensor, and ledger and tokens
    assert used <= prefix.nbytes < used + (1 << 17) < sum(r.size for r in prefix.layout.regions)


def test_the_source_goes_on(tiny: Model, prompt: list[int], rests: list[list[int]]) -> None:
    with Decoder.open(tiny, **PARAMS) as decoder:
        decoder.context.decode(prompt, position=0)
        with Prefix.freeze(decoder, prompt) as prefix:
            before = bytes_of(prefix)
            here = hashed(decode_each(decoder.context, rests[0], position=N_PROMPT))
            assert bytes_of(prefix) == before
    assert [here] == local_logits(tiny, prompt, rests[:1], PARAMS)


@pytest.mark.parametrize("n", [N_PROMPT - 1, N_PROMPT + 1])
def test_another_number_of_tokens(tiny: Model, n: int) -> None:
    tokens = random_tokens(tiny, n)
    with Decoder.open(tiny, **PARAMS) as decoder:
        decoder.context.decode(random_tokens(tiny, N_PROMPT), position=0)
        with pytest.raises(SequenceInUseError, match=f"holds {N_PROMPT} tokens, {n} are"):
            Prefix.freeze(decoder, tokens)
        for bad in ([], [-1], [tiny.n_vocab]):
            with pytest.raises(LocalProtocolError):
                Prefix.freeze(decoder, bad)


def test_of_a_provider(tiny: Model, prompt: list[int], rests: list[list[int]]) -> None:
    """A provider that has filled a share freezes it as well, whatever becomes of the share."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, Decoder.open(tiny, **PARAMS) as decoder, decoder.share(n_tokens=N_PROMPT) as share:
        share.send(near)
        with Offer.receive(far) as offer, Provider(offer, tiny) as provider:
            provider.prefill(prompt)
            provider.publish()
            prefix = Prefix.freeze(provider, prompt)
    with prefix, prefix.fork(tiny) as fork:
        found = hashed(decode_each(fork.context, rests[0], position=N_PROMPT))
    assert [found] == local_logits(tiny, prompt, rests[:1], PARAMS)


def test_of_a_fork(tiny: Model, prefix: Prefix, prompt: list[int], rests: list[list[int]]) -> None:
    """A fork that went on is frozen in turn: a tree of prefixes."""
    with prefix.fork(tiny) as fork:
        fork.context.decode(rests[0], position=N_PROMPT)
        longer = Prefix.freeze(fork, prompt + rests[0])
    with longer, longer.fork(tiny) as fork:
        found = hashed(decode_each(fork.context, rests[1], position=N_PROMPT + len(rests[0])))
    with Context.create(tiny, **PARAMS) as local:
        local.decode(prompt, position=0)
        local.decode(rests[0], position=N_PROMPT)
        expected = hashed(decode_each(local, rests[1], position=N_PROMPT + len(rests[0])))
    assert found == expected


# -- forking -----------------------------------------------------------------------------------


def test_four_forks_that_alternate(
    tiny: Model, prefix: Prefix, prompt: list[int], rests: list[list[int]]
) -> None:
    """No fork sees what another writes, and the memory stays as it was frozen."""
    before = bytes_of(prefix)
    with contextlib.ExitStack() as stack:
        forks = [stack.enter_context(prefix.fork(tiny)) for _ in rests]
        found: list[list[Any]] = [[] for _ in rests]
        for i in range(len(rests[0])):
            for fork, rest, logits in zip(forks, rests, found, strict=True):
                logits += decode_each(fork.context, rest[i : i + 1], position=N_PROMPT + i)
        late = stack.enter_context(prefix.fork(tiny))
        found.append(decode_each(late.context, rests[0], position=N_PROMPT))
    assert [hashed(each) for each in found] == local_logits(tiny, prompt, [*rests, rests[0]], PARAMS)
    assert bytes_of(prefix) == before
    assert prefix.entered is not None
    assert (prefix.entered.n_adopted, prefix.entered.bytes_moved) == (N_PROMPT, 0)
    assert prefix.entered.bytes_in_place > 0


def test_a_fork_outlives_the_prefix(tiny: Model, prompt: list[int], rests: list[list[int]]) -> None:
    with freeze(tiny, prompt, PARAMS) as prefix:
        fork = Decoder.fork(prefix, tiny)
    with fork:
        found = hashed(decode_each(fork.context, rests[0], position=N_PROMPT))
    assert [found] == local_logits(tiny, prompt, rests[:1], PARAMS)


def test_a_fork_that_writes_everywhere(tiny: Model, prefix: Prefix, prompt: list[int]) -> None:
    """It throws the prefix away and fills its cache: neither the memory nor the next fork sees it."""
    before = bytes_of(prefix)
    with prefix.fork(tiny) as fork, prefix.fork(tiny) as other:
        fork.context.clear()
        fork.context.forget()
        fork.context.decode(random_tokens(tiny, 512, seed=3), position=0)
        assert fork.context.n_past() == 512
        found = hashed(decode_each(other.context, [5, 6], position=N_PROMPT))
        assert bytes_of(prefix) == before
        with prefix.fork(tiny) as late:
            assert hashed(decode_each(late.context, [5, 6], position=N_PROMPT)) == found
    assert [found] == local_logits(tiny, prompt, [[5, 6]], PARAMS)


def test_a_fork_cannot_be_shared(tiny: Model, prefix: Prefix) -> None:
    with prefix.fork(tiny) as fork:
        with pytest.raises(NotShareableError):
            fork.share(n_tokens=300)
        decode_each(fork.context, [5], position=N_PROMPT)


@pytest.mark.parametrize(
    "arch",
    [
        "gemma3-dense",
        "mamba-dense",
        "mamba2-dense",
        "jamba-dense",
        "lfm2-dense",
        "deepseek2-moe",
        "deepseek4-moe",
    ],
)
def test_every_kind_of_memory(archs_path: Path, arch: str) -> None:
    """Windows, states, both, compressed: past every window of these models."""
    params = {"n_ctx": 1024, "n_ubatch": 32, "n_threads": 1}
    with Model.open(archs_path / f"{arch}.gguf") as model:
        prompt, rests = random_tokens(model, 216), [random_tokens(model, 3, seed=s) for s in (5, 6)]
        with freeze(model, prompt, params) as prefix, contextlib.ExitStack() as stack:
            before = bytes_of(prefix)
            forks = [stack.enter_context(prefix.fork(model, n_threads=1)) for _ in rests]
            found: list[list[Any]] = [[] for _ in rests]
            for i in range(3):
                for fork, rest, logits in zip(forks, rests, found, strict=True):
                    logits += decode_each(fork.context, rest[i : i + 1], position=216 + i)
            assert [hashed(each) for each in found] == local_logits(model, prompt, rests, params)
            assert bytes_of(prefix) == before
            assert prefix.entered is not None
            assert prefix.entered.bytes_moved == 0


@pytest.mark.parametrize(("unified", "n_other"), [(False, 20), (True, 0), (True, 20)])
def test_of_one_sequence_among_others(
    tiny: Model, prompt: list[int], rests: list[list[int]], unified: bool, n_other: int
) -> None:
    """A fork has that one sequence: its stream, or its cells of a unified cache; the others' are free.

    llama.cpp then puts the next token into a free cell in front, and attention sums in another order.
    """
    params = {**PARAMS, "n_ctx": 2048, "n_seq_max": 4, "kv_unified": unified}
    with Decoder.open(tiny, **params) as decoder:
        if n_other:
            decoder.context.decode(random_tokens(tiny, n_other, seed=9), position=0, seq_id=0)
        decoder.context.decode(prompt, position=0, seq_id=2)
        prefix = Prefix.freeze(decoder, prompt, 2)
        here = decode_each(decoder.context, rests[0], position=N_PROMPT, seq_id=2)
    with prefix, prefix.fork(tiny) as fork:
        assert prefix.seq_id == (2 if unified else 0)
        assert [fork.context.n_past(i) for i in range(fork.context.n_seq_max)].count(N_PROMPT) == 1
        assert fork.context.n_past(prefix.seq_id) == N_PROMPT
        there = decode_each(fork.context, rests[0], position=N_PROMPT, seq_id=prefix.seq_id)
    if unified and n_other:
        for a, b in zip(here, there, strict=True):
            assert float(np.abs(a - b).max()) < 1e-2 * float(np.abs(a).max())
            assert int(a.argmax()) == int(b.argmax())
    else:
        assert hashed(there) == hashed(here)


# -- processes ---------------------------------------------------------------------------------


def test_forks_in_other_processes(smollm2: Model, smollm2_path: Path) -> None:
    """One prefill, three processes: each goes on in its own way, exactly as if it had prefilled."""
    params = {"n_ctx": 1024, "n_threads": 1}
    text = "The lighthouse keeper wrote the same line into the book every evening. " * 8
    prompt = smollm2.tokenize(text)
    rests = [
        smollm2.tokenize(each, add_special=False)[:3] for each in (" Two ships", " Rain fell", " No one")
    ]
    with serving() as path, contextlib.ExitStack() as stack:
        with freeze(smollm2, prompt, params) as prefix:
            prefix.put(path)
        readers = [stack.enter_context(Reader()) for _ in rests]
        for reader in readers:
            answer = reader.fork(path, smollm2_path, n_threads=1)
            assert answer == {"ok": True, "n_tokens": len(prompt), "bytes_moved": 0}
        found: list[list[str]] = [[] for _ in rests]
        for i in range(3):
            for reader, rest, logits in zip(readers, rests, found, strict=True):
                logits += reader.ask(decode="a", tokens=rest[i : i + 1])["logits"]
    assert found == local_logits(smollm2, prompt, rests, params)


def test_a_server_that_is_killed_while_readers_read(
    tiny: Model, tiny_path: Path, prefix: Prefix, prompt: list[int], rests: list[list[int]]
) -> None:
    expected = local_logits(tiny, prompt, rests[:1], PARAMS)[0]
    with Reader() as reader:
        with served_by_a_process() as (path, process):
            prefix.put(path)
            assert reader.fork(path, tiny_path)["ok"]
            assert reader.ask(decode="a", tokens=rests[0][:2])["logits"] == expected[:2]
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert reader.ask(decode="a", tokens=rests[0][2:])["logits"] == expected[2:]
            answer = reader.fork(path, tiny_path, id="b")
            assert (answer["ok"], answer["error"]) == (False, "PeerRefusedError")
        with serving() as path:  # what the reader holds is as good as it ever was
            assert reader.ask(hand_on="a", socket=path)["ok"]
            assert reader.fork(path, tiny_path, id="c")["ok"]
            assert reader.ask(decode="c", tokens=rests[0])["logits"] == expected


def test_a_server_that_is_killed_in_the_middle_of_answers(tiny: Model, prefix: Prefix) -> None:
    """Each reader has a whole prefix, or an error; the whole ones can be forked."""
    found: dict[int, Prefix] = {}
    errors: list[BaseException] = []
    n_got = threading.Semaphore(0)

    def read(i: int) -> None:
        try:
            while True:
                with Prefix.get(path) as got:
                    assert got.header == prefix.header
                n_got.release()
                before, found[i] = found.get(i), Prefix.get(path)
                if before is not None:
                    before.close()
        except BaseException as error:
            errors.append(error)

    with served_by_a_process() as (path, process):
        prefix.put(path)
        threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            assert n_got.acquire(timeout=WAIT_S)
        process.send_signal(signal.SIGKILL)
        for thread in threads:
            thread.join()
    assert len(errors) == 8
    assert all(isinstance(error, PeerError) for error in errors), errors
    for each in found.values():
        with each, each.fork(tiny) as fork:
            decode_each(fork.context, [5], position=N_PROMPT)


def test_a_reader_that_is_killed(
    tiny: Model, tiny_path: Path, prefix: Prefix, prompt: list[int], rests: list[list[int]]
) -> None:
    with serving() as path, Reader() as one, Reader() as other:
        prefix.put(path)
        before = bytes_of(prefix)
        for reader in (one, other):
            assert reader.fork(path, tiny_path)["ok"]
        one.ask(decode="a", tokens=rests[1])
        one.process.kill()
        one.process.wait()
        expected = local_logits(tiny, prompt, rests[:1], PARAMS)[0]
        assert other.ask(decode="a", tokens=rests[0])["logits"] == expected
        assert bytes_of(prefix) == before


@pytest.mark.parametrize("how", ["dropped", "replaced"])
def test_a_name_that_goes_while_it_is_read(
    tiny: Model, tiny_path: Path, prefix: Prefix, prompt: list[int], rests: list[list[int]], how: str
) -> None:
    """Who has forked it goes on with what it was; who comes then gets what there is."""
    expected = local_logits(tiny, prompt, rests[:1], PARAMS)[0]
    other = random_tokens(tiny, N_PROMPT, seed=20)
    with serving() as path, Reader() as reader:
        with prefix:
            prefix.put(path)
        assert reader.fork(path, tiny_path)["ok"]
        assert reader.ask(decode="a", tokens=rests[0][:2])["logits"] == expected[:2]
        if how == "dropped":
            drop_prefix(path, "one")  # the server has closed it: the reader's mapping is all there is
            answer = reader.fork(path, tiny_path, id="b")
            assert (answer["ok"], answer["error"]) == (False, "PeerRefusedError")
        with freeze(tiny, other, PARAMS) as another:
            another.put(path)
        assert reader.fork(path, tiny_path, id="c")["ok"]
        found = [reader.ask(decode="c", tokens=rests[0])["logits"]]
        assert found == local_logits(tiny, other, rests[:1], PARAMS)
        assert reader.ask(decode="a", tokens=rests[0][2:])["logits"] == expected[2:]


def put(path: Path, model: Path, tokens: Sequence[int], *options: str) -> subprocess.CompletedProcess[str]:
    arguments = ["put", path, "--name", "cli", "-m", model, "--tokens", ",".join(map(str, tokens))]
    return subprocess.run(
        [sys.executable, "-m", "kvshare", "prefix", *map(str, arguments), *options],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command(tiny: Model, tiny_path: Path, rests: list[list[int]]) -> None:
    prompt = random_tokens(tiny, 30)
    options = ("-c", "512", "--n-batch", "512", "--n-ubatch", "128", "--flash-attn", "on")
    with serving() as path:
        done = put(path, tiny_path, prompt, *options, "--json")
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        with Prefix.get(path, "cli") as prefix, prefix.fork(tiny) as fork:
            assert (report["prefix_id"], report["n_tokens"]) == (prefix.prefix_id, 30)
            found = hashed(decode_each(fork.context, rests[0], position=30))
    assert [found] == local_logits(tiny, prompt, rests[:1], PARAMS)


def test_a_prompt_that_does_not_fit(tiny_path: Path) -> None:
    with serving() as path:
        done = put(path, tiny_path, [1] * 300, "-c", "256")
    assert done.returncode == LocalProtocolError.exit_code
    assert "300 tokens do not fit" in done.stderr


# -- refusals ----------------------------------------------------------------------------------


def assert_still_forks(tiny: Model, prefix: Prefix) -> None:
    """A refusal costs nothing: the next fork gives what a local prefill gives."""
    with prefix.fork(tiny) as fork:
        found = hashed(decode_each(fork.context, [5, 6], position=len(prefix.tokens)))
    assert [found] == local_logits(tiny, list(prefix.tokens), [[5, 6]], PARAMS)


@pytest.mark.parametrize(
    ("options", "field", "expected", "found"),
    [
        ({"n_ctx": 1024}, "n_ctx", 512, 1024),
        ({"type_k": "q8_0"}, "type_k", 1, 8),
        ({"flash_attn": "off"}, "flash_attn_type", 1, 0),
        ({"n_seq_max": 2}, "n_seq_max", 1, 2),
        ({"kv_unified": True}, "kv_unified", False, True),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_parameter_that_decides_the_layout(
    tiny: Model, prefix: Prefix, options: dict[str, Any], field: str, expected: object, found: object
) -> None:
    with pytest.raises(LayoutMismatchError) as error:
        prefix.fork(tiny, allow_other_semantics=True, **options)
    assert (error.value.field, error.value.expected, error.value.found) == (field, expected, found)
    assert_still_forks(tiny, prefix)


@pytest.mark.parametrize(
    ("options", "field", "expected", "found"),
    [
        ({"n_ctx": 1024}, "caches[0].size", 512, 1024),
        ({"type_k": "bf16"}, "regions[0].tensors[0].type", "f16", "bf16"),
        ({"flash_attn": "off"}, "caches[0].v_trans", False, True),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_context_of_another_layout(
    tiny: Model, prefix: Prefix, options: dict[str, Any], field: str, expected: object, found: object
) -> None:
    """A program that builds its own context: the real tensors are compared, not its flags."""
    before = bytes_of(prefix)
    with (
        pytest.raises(LayoutMismatchError) as error,
        forking(prefix),
        Context.create(tiny, **{**PARAMS, **options}),
    ):
        pytest.fail("a context was built on memory of another layout")
    assert (error.value.field, error.value.expected, error.value.found) == (field, expected, found)
    assert bytes_of(prefix) == before
    assert_still_forks(tiny, prefix)


def test_n_ubatch_is_a_readers_own(tiny: Model, prefix: Prefix) -> None:
    with prefix.fork(tiny, n_ubatch=64) as fork:
        assert fork.context.n_ubatch == 64
        decode_each(fork.context, [5], position=N_PROMPT)


@pytest.fixture(scope="module")
def other_weights(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shapes, some of whose weights are others."""
    path = tmp_path_factory.mktemp("models") / "other.gguf"
    shutil.copyfile(tiny_path, path)
    content = bytearray(path.read_bytes())
    # in the middle of the file are the weights; the low bytes of f32 numbers change them a little
    middle = len(content) // 2 // 4096 * 4096
    for offset in range(middle, middle + (1 << 20), 4):
        content[offset] ^= 0xFF
    path.write_bytes(content)
    return path


def test_another_model_of_the_same_shapes(
    tiny: Model, prefix: Prefix, other_weights: Path, tiny_path: Path
) -> None:
    with serving() as path, Reader() as reader:
        prefix.put(path)
        answer = reader.fork(path, other_weights)
        assert (answer["error"], answer["field"]) == ("SemanticsMismatchError", "model.weights")
        assert answer["expected"] != answer["found"]
        assert reader.fork(path, other_weights, allow_other_semantics=True)["ok"]  # if asked for
        assert reader.fork(path, tiny_path)["ok"]
    with (
        Model.open(other_weights) as other,
        pytest.raises(SemanticsMismatchError),
        forking(prefix) as fork,
        Context.create(other, **PARAMS) as context,
    ):
        fork.wrap(context)
    assert_still_forks(tiny, prefix)


def test_a_model_of_another_architecture(tiny: Model, prefix: Prefix, archs_path: Path) -> None:
    with (
        Model.open(archs_path / "qwen2-dense.gguf") as other,
        pytest.raises((LayoutMismatchError, SemanticsMismatchError)) as error,
    ):
        prefix.fork(other)
    assert error.value.field
    assert_still_forks(tiny, prefix)


def resealed(prefix: Prefix, index: int, change: Callable[[bytearray], object]) -> Prefix:
    """Return a prefix that passes every check of what arrives, but has other bytes in one memfd."""
    memory = [fds.OwnedFd(os.dup(owned.fileno())) for owned in prefix._fds]
    with memory[index] as fd:
        content = bytearray(os.pread(fd.fileno(), os.fstat(fd.fileno()).st_size, 0))
    change(content)
    memory[index] = fds.memfd_create("kvshare-fault", len(content), seal=False)
    os.pwrite(memory[index].fileno(), content, 0)
    fcntl.fcntl(memory[index].fileno(), fcntl.F_ADD_SEALS, FROZEN_SEALS)
    return Prefix(prefix.header, memory)


def test_memory_that_is_not_what_was_frozen(tiny: Model, prefix: Prefix) -> None:
    """Sealed, of the right size, with all digests of the tokens: but other keys and values."""

    def change(content: bytearray) -> None:
        for tensor in prefix.layout.regions[0].tensors:
            content[tensor.offset] ^= 1

    def zero(content: bytearray) -> None:
        content[:] = bytes(len(content))

    with resealed(prefix, 0, change) as corrupt, pytest.raises(LedgerDigestError):
        corrupt.fork(tiny)
    with resealed(prefix, 0, zero) as empty, pytest.raises(KvshareError):
        empty.fork(tiny)
    assert_still_forks(tiny, prefix)


@pytest.mark.parametrize("at", [0, 8, 40, -1])
def test_metadata_that_is_not_what_was_frozen(tiny: Model, prefix: Prefix, at: int) -> None:
    n_regions = len(prefix.layout.regions)
    blob = prefix._record.blob

    def change(content: bytearray) -> None:
        content[content.index(blob) + at % len(blob)] ^= 0x55

    with resealed(prefix, n_regions, change) as corrupt, pytest.raises((LedgerError, LayoutMismatchError)):
        corrupt.fork(tiny)
    assert_still_forks(tiny, prefix)


def test_a_context_that_was_built_outside(tiny: Model, prefix: Prefix) -> None:
    with Context.create(tiny, **PARAMS) as context:
        with pytest.raises(KvshareError):
            prefix.wrap(context)
        assert context.n_past() == 0
    with Decoder.open(tiny, **PARAMS) as decoder, pytest.raises(NativeError):
        prefix.wrap(decoder.context)


# -- llama_cpp.Llama ---------------------------------------------------------------------------


def test_a_forked_llama(smollm2_path: Path, smollm2: Model) -> None:
    """The high-level interface evaluates the tokens behind the prefix only, and says the same."""
    plain = build(smollm2_path)
    try:
        prompt = plain.tokenize(b"The lighthouse keeper wrote the same line into the book every evening:")
        with Decoder.open(smollm2, n_ctx=512, n_batch=512, flash_attn="off") as source:
            source.context.decode(prompt, position=0)
            prefix = Prefix.freeze(source, prompt)
        with prefix, forking(prefix) as fork:
            llama = build(smollm2_path, flash_attn=False)
        try:
            with prefix, fork.wrap(llama) as decoder:
                assert decoder.context.n_past() == llama.n_tokens == len(prompt)
                assert list(llama.input_ids[: len(prompt)]) == prompt
                evaluated: list[int] = []
                original = llama.eval

                def count(tokens: list[int]) -> None:
                    evaluated.extend(tokens)
                    original(tokens)

                llama.eval = count
                rest = plain.tokenize(b" wind from the west", add_bos=False)
                plain.eval(prompt)
                found: list[int] = []
                expected: list[int] = []
                for tokens, each in ((found, llama), (expected, plain)):
                    for token in each.generate(prompt + rest, temp=0.0):
                        tokens.append(token)
                        if len(tokens) == 8:
                            break
                assert found == expected
                assert evaluated == rest + found[:-1]
                del llama.eval
            # the decoder was closed, the Llama is its owner's: it goes on
            assert eval_each(llama, [5]) == eval_each(plain, [5])
        finally:
            llama.close()
    finally:
        plain.close()


def test_blocks_do_not_nest(tiny: Model, prefix: Prefix) -> None:
    with pytest.raises(NativeError), forking(prefix), forking(prefix):
        pytest.fail("a second block was entered")
    assert_still_forks(tiny, prefix)


def test_a_stream_for_each_sequence(tiny: Model, prefix: Prefix, prompt: list[int]) -> None:
    """A context with several streams has the memory under each, and the prefix where it was entered."""
    params = {**PARAMS, "n_ctx": 3 * 512, "n_seq_max": 3}
    found: list[list[Any]] = [[], []]
    with forking(prefix) as fork:
        context = Context.create(tiny, **params)
    with context:
        for seq_id in (0, 2):
            fork.wrap(context, seq_id)
        context.decode(prompt[:50], position=0, seq_id=1)
        assert [context.n_past(seq_id) for seq_id in range(3)] == [N_PROMPT, 50, N_PROMPT]
        for i in range(2):
            for seq_id, logits, rest in zip((0, 2), found, ([5, 6], [7, 8]), strict=True):
                logits += decode_each(context, rest[i : i + 1], position=N_PROMPT + i, seq_id=seq_id)
    assert [hashed(each) for each in found] == local_logits(tiny, prompt, [[5, 6], [7, 8]], PARAMS)


def test_nobody_has_it(prefix: Prefix) -> None:
    with serving() as path, pytest.raises(PeerRefusedError, match="no prefix yet"):
        Prefix.get(path)
