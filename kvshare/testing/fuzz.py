"""Mutation fuzzers for what comes from a peer: the wire header, the ledger, the metadata blob.

    python -m kvshare.testing.fuzz [--seconds S] [--inputs N] [--seed N] [--target NAME ...]
                                   [--corpus DIR] [--failures DIR] [--models DIR] [--json]

Each target runs in a child process, which gets one input at a time and a deadline for it. A child that
dies or does not answer is a failure of the input that it has; the fuzzer goes on with a new child.

- `header`: any bytes into `wire.decode`. Only a `RemoteProtocolError` may come out; what is accepted
  encodes to something that decodes to the same.
- `ledger`: any bytes in a memfd into `Ledger.open`, `snapshot`, `prefix` and `verify`. Only the errors
  that these name may come out; what is accepted vouches for everything, read a second time in another way.
- `blob`: any metadata into `llama_kv_share_adopt` of a real context. A refusal leaves the sequence
  empty and all else as it was; an adoption gives the state of the blob that was not mutated. See
  `fuzz_blob`.

Under AddressSanitizer and UndefinedBehaviorSanitizer, with a library that is built for it (what they find
ends the child, which is a failure of its input):

    kvshare build --cmake-arg LLAMA_SANITIZE_ADDRESS=ON --cmake-arg LLAMA_SANITIZE_UNDEFINED=ON \\
        --cmake-arg CMAKE_BUILD_TYPE=RelWithDebInfo
    KVSHARE_LIBRARY=THE_FOLDER_THAT_IT_PRINTS \\
        LD_PRELOAD="$(cc -print-file-name=libasan.so) $(cc -print-file-name=libstdc++.so)" \\
        ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1 \\
        python -m kvshare.testing.fuzz --target blob --seconds 600
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import random
import re
import secrets
import select
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from kvshare import fds, wire
from kvshare.errors import DescriptorError, LedgerError, RemoteProtocolError, ReplayError
from kvshare.ledger import HEADER_NBYTES, Ledger, LedgerPrefix, LedgerState, tokens_digest
from kvshare.testing.faults import LEDGER_FIELDS

DEADLINE_S = 20.0
"""How long one input may take; machines are shared, and a hang is one at any limit."""

_START_S = 300.0  # for a child to be ready: the blob target may generate its models first
_SERVE = "import sys; from kvshare.testing.fuzz import serve; serve(sys.argv[1], sys.argv[2:])"
_MAX_REPRODUCERS = 2  # of failures that look the same


class Finding(Exception):
    """What a target did with an input is wrong, though nothing crashed."""


class Check(Protocol):
    """The part of a target that runs in the child."""

    def seeds(self) -> list[bytes]:
        """Return inputs that are right."""

    def __call__(self, data: bytes) -> str:
        """Try an input; return the kind of outcome, or raise what is to be a failure."""


Mutator = Callable[[random.Random, bytes, Sequence[bytes]], bytes]
"""Make an input from one, and from the others, with a source of randomness."""


@dataclass(frozen=True)
class Target:
    """What is fuzzed.

    Attributes:
        name: for the command line, the corpus and the report.
        check: `module:function` that returns a `Check`, imported in the child.
        mutate: makes inputs.
        arguments: of that function.
    """

    name: str
    check: str
    mutate: Mutator
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """An input that must not do what it did.

    Attributes:
        kind: `crash`, `hang` or `error`.
        error: what was seen.
        reproducer: the file that holds the input.
    """

    kind: str
    error: str
    reproducer: str


@dataclass
class Report:
    """What came of one target.

    Attributes:
        target: its name.
        seed: of the random inputs.
        inputs: how many were tried.
        seconds: how long it took, without the start of the first child.
        outcomes: how often each kind came.
        failures: those that differ, with a few reproducers each.
        n_failures: all of them.
    """

    target: str
    seed: int
    inputs: int = 0
    seconds: float = 0.0
    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[Failure] = field(default_factory=list)
    n_failures: int = 0


# -- the loop ------------------------------------------------------------------------------------


def fuzz(
    target: Target,
    *,
    seed: int,
    seconds: float | None = None,
    inputs: int | None = None,
    corpus: Path | None = None,
    failures: Path,
    deadline_s: float = DEADLINE_S,
    progress: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Try the corpus, then mutations of it and of the target's own seeds.

    Args:
        target: what is fuzzed.
        seed: the same seed and corpus give the same inputs.
        seconds: time for mutations; None means no limit.
        inputs: number of mutations; None means no limit.
        corpus: folder with a folder of inputs for each target.
        failures: folder that gets a folder of reproducers for each target; it can serve as a corpus.
        deadline_s: for one input.
        progress: called now and then.
    """
    rng = random.Random(seed)
    report = Report(target.name, seed)
    fixed = [path.read_bytes() for path in sorted((corpus / target.name).glob("*"))] if corpus else []
    with _Child(target, deadline_s) as child:
        right = child.seeds()
        start = shown = time.monotonic()
        for data in _inputs(target, rng, right, fixed, inputs):
            now = time.monotonic()
            if report.inputs >= len(fixed) and seconds is not None and now - start >= seconds:
                break
            if now - shown > 1:
                progress(report)
                shown = now
            report.inputs += 1
            outcome, failure = child.run(data)
            if failure is None:
                report.outcomes[outcome] += 1
            else:
                report.outcomes[failure[0]] += 1
                _record(report, failures, failure, data)
        report.seconds = time.monotonic() - start
    progress(report)
    return report


def _inputs(
    target: Target, rng: random.Random, right: Sequence[bytes], fixed: Sequence[bytes], limit: int | None
) -> Iterator[bytes]:
    yield from fixed
    pool = [*right, *fixed]
    for _ in itertools.count() if limit is None else range(limit):
        # half of them from what is right: what is wrong already seldom gets far
        yield target.mutate(rng, rng.choice(rng.choice((right, pool))), pool)


def _record(report: Report, folder: Path, failure: tuple[str, str], data: bytes) -> None:
    report.n_failures += 1
    alike = _shape(failure)
    if sum(_shape((each.kind, each.error)) == alike for each in report.failures) >= _MAX_REPRODUCERS:
        return
    path = folder / report.target / f"{failure[0]}-{hashlib.sha256(data).hexdigest()[:16]}"
    if any(each.reproducer == str(path) for each in report.failures):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    report.failures.append(Failure(*failure, str(path)))


def _shape(failure: tuple[str, str]) -> str:
    return re.sub(r"[0-9]+", "N", f"{failure[0]} {failure[1]}")


class _Child:
    """The process that tries inputs; it is started again after it died.

    *Ownership*: leaving the block ends the process.
    """

    def __init__(self, target: Target, deadline_s: float) -> None:
        self._target = target
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed in __exit__
        self._seeds: list[bytes] = []

    def seeds(self) -> list[bytes]:
        """Return the target's own inputs that are right."""
        self._running()
        return list(self._seeds)

    def run(self, data: bytes) -> tuple[str, tuple[str, str] | None]:
        """Try an input; return its outcome, or kind and text of the failure."""
        process = self._running()
        try:
            self._send(process, data)
            answer = self._receive(process, self._deadline_s)
        except TimeoutError:
            self._end()
            return "", ("hang", f"no answer within {self._deadline_s:g} s")
        except (BrokenPipeError, EOFError):
            status = self._end()
            return "", ("crash", f"{_death(status)}: {self._said()}")
        if "failure" in answer:
            return "", ("error", answer["failure"])
        return answer["outcome"], None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._log.seek(0)
            self._log.truncate()
            self._process = subprocess.Popen(
                [sys.executable, "-c", _SERVE, self._target.check, *self._target.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                # ggml runs a debugger on itself when it aborts
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GGML_NO_BACKTRACE": "1"},
            )
            try:
                self._seeds = [
                    bytes.fromhex(each) for each in self._receive(self._process, _START_S)["seeds"]
                ]
            except (TimeoutError, EOFError) as error:
                status = self._end()
                raise RuntimeError(
                    f"the target {self._target.name} does not start: {_death(status)}: {self._said()}"
                ) from error
        return self._process

    @staticmethod
    def _send(process: subprocess.Popen[bytes], data: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(struct.pack("<I", len(data)) + data)
        process.stdin.flush()

    @staticmethod
    def _receive(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
        assert process.stdout is not None
        end = time.monotonic() + seconds
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                raise EOFError
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _said(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return " | ".join(line for line in lines if line.strip())[-1000:]

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with process:
            process.kill()  # nothing happens if it has ended
            status = process.wait()
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
        return status

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._log.close()


def _death(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def serve(check: str, arguments: Sequence[str]) -> None:
    """Be a child: answer inputs on standard input with lines of JSON on standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    module, _, name = check.partition(":")
    target: Check = getattr(importlib.import_module(module), name)(*arguments)

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    answer(seeds=[seed.hex() for seed in target.seeds()])
    while head := sys.stdin.buffer.read(4):
        data = sys.stdin.buffer.read(*struct.unpack("<I", head))
        try:
            answer(outcome=target(data))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            at = "" if isinstance(error, Finding) else f" at {Path(where.filename).name}:{where.lineno}"
            answer(failure=f"{type(error).__name__}: {error}"[:2000] + at)


# -- mutations -----------------------------------------------------------------------------------

_INTERESTING = (0, 1, 2, 3, 4, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31)
_HUGE = ((1 << 32) - 1, 1 << 32, (1 << 53) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def changed_number(rng: random.Random, old: int, n_nbytes: int) -> int:
    """Return another number: near the old one, a multiple of it, or one that breaks programs."""
    choices = [old + 1, old - 1, old * 2, old // 2, -old, ~old, old + 256, old - 256]
    choices += [old ^ (1 << rng.randrange(8 * n_nbytes)), rng.getrandbits(8 * n_nbytes)]
    choices += [rng.choice(_INTERESTING), rng.choice(_HUGE), (1 << 8 * n_nbytes) - rng.randint(1, 300)]
    return rng.choice(choices) % (1 << 8 * n_nbytes)


def put(data: bytes, offset: int, n_nbytes: int, value: int) -> bytes:
    return data[:offset] + value.to_bytes(n_nbytes, "little") + data[offset + n_nbytes :]


def get(data: bytes, offset: int, n_nbytes: int) -> int:
    return int.from_bytes(data[offset : offset + n_nbytes], "little")


def mutate_bytes(rng: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Change bytes without looking at what they mean."""
    i, j = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    way = rng.randrange(6)
    if way == 0:  # cut off
        return data[:i]
    if way == 1:  # leave out
        return data[:i] + data[j:]
    if way == 2:  # repeat
        return data[:j] + data[i : min(j, i + 4096)] + data[j:]
    if way == 3:  # go on as another one
        return data[:i] + rng.choice(pool)[i:]
    if way == 4:
        return data[:i] + rng.randbytes(rng.randint(1, 16)) + data[i:]
    for _ in range(rng.randint(1, 4)):
        if data:
            i = rng.randrange(len(data))
            data = put(data, i, 1, data[i] ^ (1 << rng.randrange(8)))
    return data


# -- header --------------------------------------------------------------------------------------


class HeaderCheck:
    """`wire.decode` and `wire.encode`."""

    def seeds(self) -> list[bytes]:
        digest = hashlib.sha256(b"fuzz").hexdigest()
        regions = (
            wire.RegionEntry(fd=0, offset=0, size=4096, layout=[{"name": "k", "ne": [64, 8]}], kind="memfd"),
            wire.RegionEntry(fd=0, offset=4096, size=4096, layout=None, kind="memfd"),
        )
        messages: list[wire.Message] = [
            wire.ShareHeader(
                share_id=1,
                layout=digest,
                semantics=digest,
                params={"n_ctx": 4096, "rope_freq_base": 1e4, "note": "ä\n\u2028", "none": None, "on": True},
                regions=regions,
                ledger=wire.LedgerEntry(fd=1, size=4096),
                cells=(((0, 256), (512, 768)), ()),
                expires_ms=1000,
            ),
            wire.JobHeader(share_id=1, tokens=(1, 2, 3)),
            wire.Progress(share_id=1, n_filled=1, n_tokens=3),
            wire.Outcome(share_id=1, ok=True),
            wire.Outcome(share_id=1, ok=False, error="it failed"),
            wire.FrozenHeader(
                name="system-prompt_1.0",
                prefix_id=1,
                n_tokens=3,
                layout=digest,
                semantics=digest,
                params={"n_ctx": 4096},
                regions=regions,
                ledger=wire.LedgerEntry(fd=1, size=4096),
                tokens=wire.LedgerEntry(fd=2, size=12),
            ),
            wire.PrefixRequest(op="get", name="system-prompt_1.0"),
            wire.PrefixRequest(op="list"),
            wire.PrefixList(
                prefixes=(
                    wire.PrefixEntry(
                        name="a",
                        prefix_id=1,
                        n_tokens=3,
                        nbytes=4096,
                        layout=digest,
                        semantics=digest,
                        n_reads=0,
                    ),
                )
            ),
        ]
        return [wire.encode(message) for message in messages]

    def __call__(self, data: bytes) -> str:
        try:
            message = wire.decode(data)
        except RemoteProtocolError:
            return "RemoteProtocolError"
        again = wire.decode(wire.encode(message))
        if again != message:
            raise Finding(f"decodes to {message!r}, and again to {again!r}"[:500])
        if isinstance(message, (wire.ShareHeader, wire.FrozenHeader)):
            with contextlib.suppress(DescriptorError):
                wire.check_descriptors(message, 2)
        return type(message).__name__


_JSON_VALUES = (
    *r'null true false 0 -0 -1 1.5 -0.0 1e308 1e309 1e-400 NaN Infinity [] {} [[]] "" "\ud800"'.split(),
    *(str(number) for number in (*_INTERESTING, *_HUGE)),
    "[" * 3000 + "]" * 3000,
    '{"a":' * 200 + "1" + "}" * 200,
    "9" * 5000,
    '"' + "x" * 70_000 + '"',
    '"\\u0000\\"\u2028"',
)


def _mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Change one value, key or nesting of a JSON text."""
    text = data.decode(errors="surrogateescape")
    # values and keys are found by their look; a miss is as good a mutation as a hit
    spans = [match.span() for match in re.finditer(r'"(?:[^"\\]|\\.)*"|-?[0-9.]+|true|false|null', text)]
    if not spans:
        return data
    start, end = rng.choice(spans)
    token = text[start:end]
    way = rng.randrange(6)
    if way == 0:
        other = text[slice(*rng.choice(spans))]
    elif way == 1 and re.fullmatch("-?[0-9]+", token):
        other = str(rng.choice((int(token[:30]) + 1, int(token[:30]) - 1, -int(token[:30]), token + "0")))
    elif way == 2:
        other = f"[{token}]"
    elif way == 3:  # the member or item twice, or without its neighbour
        comma = text.find(",", end)
        comma = len(text) if comma < 0 else comma
        other = rng.choice((text[start:comma] + "," + token, token + "," + token))
    elif way == 4:
        other = (
            token[: len(token) // 2] + rng.choice(("", "\\", '"', "\\u", "\x00", ",", ":", "{")) + token[1:]
        )
    else:
        other = rng.choice(_JSON_VALUES)
    return (text[:start] + other + text[end:]).encode(errors="surrogateescape")


def mutate_header(rng: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Change a header as JSON, or as bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = _mutate_json(rng, data) if rng.random() < 0.8 else mutate_bytes(rng, data, pool)
    return data[: wire.MAX_NBYTES + 1]


# -- ledger --------------------------------------------------------------------------------------

_LAYOUT = hashlib.sha256(b"layout").hexdigest()
_SEMANTICS = hashlib.sha256(b"semantics").hexdigest()
_SAMPLE = hashlib.sha256(b"sample").digest()
_SHARE_ID = (1 << 52) + 12345
_TOKENS = (1, 22, 333)
_PREFIX = LedgerPrefix.of(_TOKENS[:1], b"metadata")  # that the sequence held, in some of the ledgers


class LedgerCheck:
    """`Ledger.open`, `snapshot`, `prefix` and `verify`."""

    def seeds(self) -> list[bytes]:
        found = []
        for state in LedgerState:
            with Ledger.create(_SHARE_ID, _LAYOUT, _SEMANTICS, capacity=1024) as ledger:
                if state is not LedgerState.ISSUED:
                    ledger.begin()
                if state is LedgerState.COMPLETE:
                    ledger.advance(len(_TOKENS))
                    ledger.complete(tokens_digest(_TOKENS), len(_TOKENS), _SAMPLE, b"metadata" * 8)
                if state is LedgerState.FAILED:
                    ledger.fail("it failed")
                found.append(os.pread(ledger.fileno(), 2048, 0))
        with Ledger.create(_SHARE_ID, _LAYOUT, _SEMANTICS, capacity=1024, prefix=_PREFIX) as ledger:
            ledger.begin()
            ledger.advance(len(_TOKENS))
            ledger.complete(tokens_digest(_TOKENS), len(_TOKENS), _SAMPLE, b"metadata" * 8)
            found.append(os.pread(ledger.fileno(), 2048, 0))
        return found

    def __call__(self, data: bytes) -> str:
        size = max(len(data), 1)
        with fds.memfd_create("kvshare-fuzz", size) as memfd:
            os.pwrite(memfd.fileno(), data, 0)
            self._require_size(memfd, size + 1)
            try:
                with Ledger.open(fds.OwnedFd(os.dup(memfd.fileno())), len(data)) as ledger:
                    record = ledger.snapshot()
                    n_prefix = ledger.prefix.n_tokens
                    record.verify(
                        share_id=_SHARE_ID,
                        layout=_LAYOUT,
                        semantics=_SEMANTICS,
                        tokens=_TOKENS,
                        sample_digest=_SAMPLE,
                        prefix=_PREFIX if n_prefix else None,
                    )
            except (LedgerError, ReplayError) as error:
                return type(error).__name__
        self._require_true(data, record.blob)
        return "accepted"

    @staticmethod
    def _require_size(memfd: fds.OwnedFd, size: int) -> None:
        try:
            Ledger.open(fds.OwnedFd(os.dup(memfd.fileno())), size).close()
        except DescriptorError:
            return
        raise Finding(f"a ledger of {size} bytes is mapped over a smaller descriptor")

    @staticmethod
    def _require_true(data: bytes, blob: bytes) -> None:
        raw = {name: data[offset : offset + size] for name, (offset, size) in LEDGER_FIELDS.items()}
        number = {name: int.from_bytes(value, "little") for name, value in raw.items()}
        start, end = number["blob_offset"], number["blob_offset"] + number["blob_size"]
        has_blob = end > start
        wrong = [
            name
            for name, right in {
                "magic": raw["magic"] == b"KVSLEDG1",
                "version": number["version"] == 1,
                "header_size": HEADER_NBYTES <= number["header_size"] <= len(data),
                "share_id": number["share_id"] == _SHARE_ID,
                "layout": raw["layout"].hex() == _LAYOUT,
                "semantics": raw["semantics"].hex() == _SEMANTICS,
                "state": number["state"] == 2,
                "n_filled": number["n_filled"] == len(_TOKENS),
                "n_tokens": number["n_tokens"] == len(_TOKENS),
                "vouched_share_id": number["vouched_share_id"] == _SHARE_ID,
                "tokens_sha256": raw["tokens_sha256"]
                == hashlib.sha256(struct.pack("<3i", *_TOKENS)).digest(),
                "sample_digest": raw["sample_digest"] == _SAMPLE,
                "blob_offset": not has_blob or start >= number["header_size"],
                "blob_size": not has_blob or end <= len(data),
                "n_prefix": number["n_prefix"] in (0, 1),
                "prefix_sha256": raw["prefix_sha256"]
                == (hashlib.sha256(struct.pack("<i", 1)).digest() if number["n_prefix"] else bytes(32)),
                "blob": blob == (data[start:end] if has_blob else b""),
            }.items()
            if not right
        ]
        if wrong:
            raise Finding(f"accepted, but these are wrong: {', '.join(wrong)}")


def mutate_ledger(rng: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Change fields of a ledger, or bytes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        offset, size = rng.choice(list(LEDGER_FIELDS.values()))
        if rng.random() < 0.2 or offset + size > len(data):
            data = mutate_bytes(rng, data, pool)
        elif rng.random() < 0.1:  # from another one
            data = data[:offset] + rng.choice(pool)[offset : offset + size] + data[offset + size :]
        else:
            data = put(data, offset, size, changed_number(rng, get(data, offset, size), size))
    return data[: 1 << 16]


# -- command line --------------------------------------------------------------------------------

_HERE = "kvshare.testing.fuzz"
HEADER = Target("header", f"{_HERE}:HeaderCheck", mutate_header)
LEDGER = Target("ledger", f"{_HERE}:LedgerCheck", mutate_ledger)


def main(argv: list[str] | None = None) -> int:
    """Run the fuzzers; exit status 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {_HERE}", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, help="time for each target (20 if there is no --inputs)")
    parser.add_argument("--inputs", type=int, help="number of mutations for each target")
    parser.add_argument("--seed", type=int, help="of the mutations; a random one is drawn and shown")
    parser.add_argument(
        "--target", nargs="+", choices=["header", "ledger", "blob"], default=["header", "ledger", "blob"]
    )
    parser.add_argument("--corpus", type=Path, help="folder of inputs to begin with: DIR/TARGET/*")
    parser.add_argument(
        "--failures", type=Path, default=Path("fuzz-failures"), help="where reproducers go; can be a corpus"
    )
    parser.add_argument("--models", type=Path, help="models of test-llama-archs; built if it is not given")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args(argv)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    seconds = 20.0 if args.seconds is None and args.inputs is None else args.seconds
    reports = [
        fuzz(
            _target(name, args.models),
            seed=seed,
            seconds=seconds,
            inputs=args.inputs,
            corpus=args.corpus,
            failures=args.failures,
            progress=_show_progress,
        )
        for name in args.target
    ]
    if args.json:
        print(json.dumps(_summary(seed, reports), indent=1))
    else:
        _show(reports)
    return 1 if any(report.n_failures for report in reports) else 0


def _target(name: str, models: Path | None) -> Target:
    if name != "blob":
        return {"header": HEADER, "ledger": LEDGER}[name]
    from kvshare.testing import architectures, fuzz_blob  # the only one that needs the library

    return fuzz_blob.blob_target(models or architectures.models())


def _summary(seed: int, reports: Sequence[Report]) -> dict[str, Any]:
    return {
        "seed": seed,
        "inputs": sum(report.inputs for report in reports),
        "failures": sum(report.n_failures for report in reports),
        "targets": [
            {**vars(report), "failures": [dataclasses.asdict(failure) for failure in report.failures]}
            for report in reports
        ],
    }


def _show_progress(report: Report) -> None:
    print(
        f"{report.target}: {report.inputs} inputs, {len(report.outcomes)} outcomes, "
        f"{report.n_failures} failures (seed {report.seed})",
        file=sys.stderr,
        flush=True,
    )


def _show(reports: Sequence[Report]) -> None:
    for report in reports:
        print(f"{report.target}: {report.inputs} inputs in {report.seconds:.1f} s, seed {report.seed}")
        for outcome, n in report.outcomes.most_common():
            print(f"  {n:8} {outcome}")
        for failure in report.failures:
            print(f"  FAILED {failure.kind}: {failure.error}\n         {failure.reproducer}")


if __name__ == "__main__":
    sys.exit(main())
