"""Fuzz `llama_kv_share_adopt`: mutated metadata of real handoffs, adopted by a real context.

The blob, little-endian (Source: src/llama-kv-share-state.cpp, as patched):

====================== =====================================================================
u32 magic, u32 version 0x5353564b, 2
u64 n_extents          where the tensor data lies, in the order in which it is read
u64 n_state            bytes of the rest
n_extents times        u32 region, u32 reserved, u64 offset, u64 size
n_state bytes          what the memory modules write, in words of 4 bytes: counts, types, row
                       sizes, and
                       of a KV cache: u32 n_runs, u32 head,
                       n_runs times {i32 pos, u32 cell, u32 n},
                       (for each cell {i32 x, i32 y, i32 token})
                       of a recurrent state: u32 1, u32 row, i32 pos, u32 0
====================== =====================================================================

An input of `blob` begins with a line that says what it is for: the name of a `Case`, and `sampled` or
`unsampled`. With `sampled`, adopt compares the sample digest of the real handoff, as it does for a
ledger; extents that differ do not get past it. `unsampled` stands for a peer that takes the digest over
what it likes: adopt compares none, and the sequence itself may then get other contents, but nothing else.

What is looked at after each input: the sequence, the bytes of every region, and for both sequences beside
it the state that llama.cpp saves and the metadata that this library publishes. Now and then, and after
every adoption of another state, tokens are decoded; now and then the right blob is adopted again.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import mmap
import os
import random
import re
import socket
import struct
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvshare._native import signatures
from kvshare.decoder import Decoder
from kvshare.errors import LedgerError
from kvshare.provider import Offer, Provider
from kvshare.testing.fuzz import Finding, Target, changed_number, get, mutate_bytes, put

_HEAD = struct.Struct("<IIQQ")
_EXTENT = struct.Struct("<IIQQ")

_SEQ_ID = 1  # the one that is shared; both neighbours hold something
_N_SEQ = 3
_OTHERS = {0: 20, 2: 7}
_MAX_CELLS = 4096  # of a case
_MAX_EXTENTS = 8192  # mutations of mutations would grow without end
_N_NEXT = 2  # tokens that are decoded behind an adoption that is looked at closely
_EVERY = 50  # inputs between two handoffs of the blob as it is


@dataclass(frozen=True)
class Case:
    """A handoff whose blob is mutated.

    Attributes:
        name: of the kind of memory.
        model: a model of `test-llama-archs`.
        n_tokens: length of the prompt.
        context: parameters of the context.
    """

    name: str
    model: str
    n_tokens: int = 40
    context: dict[str, Any] = field(default_factory=dict)


_SMALL = {"n_ubatch": 32}  # and a prompt past the window

CASES = (
    Case("plain", "llama-dense"),
    Case("plain-unified", "llama-dense", context={"kv_unified": True}),
    Case("transposed", "llama-dense", context={"flash_attn": "off"}),
    Case("window", "gemma3-dense", 300, _SMALL),
    Case("window-unified", "gemma3-dense", 216, {**_SMALL, "kv_unified": True}),
    Case("chunked", "llama4-moe", 216, _SMALL),
    Case("recurrent", "mamba-dense"),
    Case("hybrid", "jamba-dense"),
    Case("hybrid-unified", "qwen3next-moe", context={"kv_unified": True}),
    Case("latent", "deepseek2-moe"),
    Case("indexed", "deepseek32-moe"),
    Case("compressed", "deepseek4-moe", 216, _SMALL),
    Case("positions", "qwen2vl-dense"),
    Case("tokens", "qwen4exp-moe"),
)
"""One for each kind of memory."""


def parse_input(data: bytes) -> tuple[str, bool, bytes]:
    """Split an input of the blob target into case, whether the sample digest is compared, and blob."""
    line, _, blob = data.partition(b"\n")
    name, _, word = line.decode(errors="replace").partition(" ")
    return name, word == "sampled", blob


def make_input(name: str, sampled: bool, blob: bytes) -> bytes:
    """Put an input of the blob target together."""
    return f"{name} {'sampled' if sampled else 'unsampled'}\n".encode() + blob


@functools.lru_cache(maxsize=32)
def blob_fields(blob: bytes) -> dict[str, list[tuple[int, int]]]:
    """Find the fields of a blob: by name, the offset and size of each, in bytes.

    Lists of cells are found by their look. What is not a field of its own is a word of `state`.
    """
    fields: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
    if len(blob) < _HEAD.size:
        return fields
    fields |= {"magic": [(0, 4)], "version": [(4, 4)], "n_extents": [(8, 8)], "n_state": [(16, 8)]}
    n_extents = min(get(blob, 8, 8), (len(blob) - _HEAD.size) // _EXTENT.size)
    for at in range(_HEAD.size, _HEAD.size + n_extents * _EXTENT.size, _EXTENT.size):
        for name, offset, size in (("region", 0, 4), ("reserved", 4, 4), ("offset", 8, 8), ("size", 16, 8)):
            fields[f"extent.{name}"].append((at + offset, size))
    at = _HEAD.size + n_extents * _EXTENT.size
    while at + 4 <= len(blob):
        size = _cells(blob, at, fields)
        if not size:
            fields["state"].append((at, 4))
            size = 4
        at += size
    return fields


def _cells(blob: bytes, at: int, fields: dict[str, list[tuple[int, int]]]) -> int:
    """Enter the fields of the runs of cells, or the state, that start here; return the size, or 0."""

    def word(i: int) -> int:
        return get(blob, at + 4 * i, 4)

    n_words = (len(blob) - at) // 4
    n_runs = word(0)
    if not 1 <= n_runs <= min(_MAX_CELLS, (n_words - 2) // 3):
        return 0
    runs = [(word(2 + 3 * i), word(3 + 3 * i), word(4 + 3 * i)) for i in range(n_runs)]
    if any(not 1 <= n <= _MAX_CELLS or max(pos, cell) > _MAX_CELLS for pos, cell, n in runs):
        if n_runs != 1 or word(3) != 0:
            return 0
        names = ["states.n", "states.row", "state.pos", "state.n_seq_id"]
    else:
        names = ["runs.n", "runs.head"] + ["run.pos", "run.cell", "run.n"] * n_runs
        n_cells = sum(n for _, _, n in runs)
        if n_cells > 8 and n_words - len(names) >= 3 * n_cells:  # nothing else is as long
            names += ["cell.x", "cell.y", "cell.token"] * n_cells
    for i, name in enumerate(names):
        fields[name].append((at + 4 * i, 4))
    return 4 * len(names)


def mutate_blob(rng: random.Random, data: bytes, pool: Sequence[bytes]) -> bytes:
    """Change fields of a blob: alone, against each other, or their number."""
    name, _, blob = parse_input(data)
    others = [parse_input(each)[2] for each in pool if parse_input(each)[0] == name]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        way = rng.randrange(8)
        if way == 0:
            blob = mutate_bytes(rng, blob, others)
        elif way == 1:
            blob = _mutate_size(rng, blob)
        elif way == 2:
            blob = _mutate_extents(rng, blob)
        else:
            blob = _mutate_field(rng, blob)
    return make_input(name, rng.random() < 0.5, blob)


def _mutate_field(rng: random.Random, blob: bytes) -> bytes:
    fields = blob_fields(blob)
    if not fields:
        return blob
    places = fields[rng.choice(sorted(fields))]
    (a, size), (b, _) = rng.choice(places), rng.choice(places)
    way = rng.randrange(4)
    if way == 0:  # out of order
        x, y = get(blob, a, size), get(blob, b, size)
        return put(put(blob, a, size, y), b, size, x)
    if way == 1:  # there twice
        return put(blob, a, size, get(blob, b, size))
    return put(blob, a, size, changed_number(rng, get(blob, a, size), size))


def _mutate_size(rng: random.Random, blob: bytes) -> bytes:
    """Leave words of the state out, or put some in, with the right count of bytes."""
    if len(blob) < _HEAD.size:
        return blob
    start = min(len(blob), _HEAD.size + _EXTENT.size * get(blob, 8, 8))
    at = start + 4 * rng.randint(0, (len(blob) - start) // 4)
    n = rng.choice((1, 1, 2, 3, 6, 20))
    part = (
        b"" if rng.random() < 0.5 else rng.choice((blob[at : at + 4 * n], bytes(4 * n), rng.randbytes(4 * n)))
    )
    changed = blob[:at] + part + blob[at if part else at + 4 * n :]
    return put(changed, 16, 8, len(changed) - start)


def _mutate_extents(rng: random.Random, blob: bytes) -> bytes:
    """Split, join, move, repeat or leave out extents, with the right count of them."""
    if len(blob) < _HEAD.size:
        return blob
    n = min(get(blob, 8, 8), (len(blob) - _HEAD.size) // _EXTENT.size)
    end = _HEAD.size + n * _EXTENT.size
    extents = [list(each) for each in _EXTENT.iter_unpack(blob[_HEAD.size : end])]
    if not extents:
        return blob
    i, j = rng.randrange(n), rng.randrange(n)
    region, reserved, offset, size = extents[i]
    way = rng.randrange(8)
    if way == 0 and size > 1:
        cut = rng.randrange(1, size)
        extents[i : i + 1] = [[region, reserved, offset, cut], [region, reserved, offset + cut, size - cut]]
    elif way == 1 and i + 1 < n:
        extents[i : i + 2] = [[region, reserved, offset, size + extents[i + 1][3]]]
    elif way == 2:
        extents[i][2] = rng.choice((offset + rng.randint(-size, size), extents[j][2] + 1, 0)) % (1 << 64)
    elif way == 3:
        extents.insert(j, list(extents[i]))
    elif way == 4:
        del extents[i]
    elif way == 5:
        extents[i], extents[j] = extents[j], extents[i]
    elif way == 6 and i != j:  # bytes of one counted to the other
        k = rng.randint(0, size)
        extents[i][3] -= k
        extents[j][3] = (extents[j][3] + k) % (1 << 64)
    else:
        extents = (extents * rng.choice((2, 3, 300)))[:_MAX_EXTENTS]
    table = b"".join(_EXTENT.pack(a, b, c % (1 << 64), d % (1 << 64)) for a, b, c, d in extents)
    return put(blob[: _HEAD.size] + table + blob[end:], 8, 8, len(extents))


class BlobCheck:
    """`llama_kv_share_adopt` on a context of each case.

    Args:
        models: folder with the models of `test-llama-archs`.
        names: cases; all if there are none.
    """

    def __init__(self, models: str, *names: str) -> None:
        self._models = Path(models)
        self._cases = {case.name: case for case in CASES if not names or case.name in names}
        self._open: dict[str, _Handoff] = {}

    def seeds(self) -> list[bytes]:
        return [make_input(name, True, self._handoff(name).blob) for name in self._cases]

    def __call__(self, data: bytes) -> str:
        name, sampled, blob = parse_input(data)
        if name not in self._cases:
            return "of another case"
        handoff = self._handoff(name)
        try:
            return handoff.check(blob, sampled=sampled)
        except BaseException:  # who knows what state it is in
            self._open.pop(name).close()
            raise

    def close(self) -> None:
        """Free the contexts; idempotent."""
        while self._open:
            self._open.popitem()[1].close()

    def _handoff(self, name: str) -> _Handoff:
        if name in self._open and self._open[name].drifted:
            self._open.pop(name).close()
        if name not in self._open:
            self._open[name] = _Handoff(self._cases[name], self._models)
        return self._open[name]


class _Handoff:
    """A context that has adopted once, and what it looked like before and after.

    Attributes:
        blob: the metadata that it adopted.
        drifted: another lease would be given by now, to which the blob does not belong.
    """

    def __init__(self, case: Case, models: Path) -> None:
        self.drifted = False
        self._case = case
        self._n_checks = 0
        with contextlib.ExitStack() as stack:
            n_ctx = 512 * (1 if case.context.get("kv_unified") else _N_SEQ)
            params: dict[str, Any] = {"n_ctx": n_ctx, "n_seq_max": _N_SEQ, "n_threads": 1, **case.context}
            decoder = stack.enter_context(Decoder.open(models / f"{case.model}.gguf", **params))
            self._context = context = decoder.context
            self._lib = context.library.lib
            rng = random.Random(case.name)
            n_vocab = context.model.n_vocab
            for seq_id, n in _OTHERS.items():
                context.decode([rng.randrange(n_vocab) for _ in range(n)], position=0, seq_id=seq_id)
            tokens = [rng.randrange(n_vocab) for _ in range(case.n_tokens)]
            self._next = [rng.randrange(n_vocab) for _ in range(_N_NEXT)]
            near, far = socket.socketpair(socket.AF_UNIX)
            with near, far, decoder.share(_SEQ_ID, n_tokens=case.n_tokens) as share:
                self._lease = self._leased()
                share.send(near)
                with (
                    Offer.receive(far) as offer,
                    Provider(offer, context.model, n_threads=1) as provider,
                ):
                    provider.prefill(tokens)
                    provider.publish()
                record = share.ledger.snapshot()
                self.blob, self._sample = record.blob, record.sample_digest
                self._regions = stack.enter_context(contextlib.ExitStack())
                self._map()
                self._filled = self._bytes()
                decoder.adopt(share, tokens)
            self._saved = {seq_id: self._save(seq_id) for seq_id in _OTHERS}
            self._adopted = self._published(_SEQ_ID)
            self._logits = self._decode()
            self._refused: list[bytes] = []
            self._refuse()
            self._close = stack.pop_all().close

    def close(self) -> None:
        self._close()

    def check(self, blob: bytes, *, sampled: bool) -> str:
        """Adopt a blob, and look at everything.

        Raises:
            Finding: something is not as it was before, or not as it has to be now.
            KvshareError: of a kind that adopt has no reason for.
        """
        outcome = self._adopt(blob, sampled=sampled)
        self._n_checks += 1
        if self._n_checks % _EVERY == 0 and not self.drifted:
            again = self._adopt(self.blob, sampled=True)
            if again not in ("same", "of another lease"):
                raise Finding(f"a right handoff afterwards: {again}")
        return outcome

    def _adopt(self, blob: bytes, *, sampled: bool) -> str:
        handle = self._context.handle
        self._lib.llama_kv_share_reserve(handle, _SEQ_ID, self._case.n_tokens, 0)
        if self._leased() != self._lease:
            self._lib.llama_kv_share_release(handle, _SEQ_ID, True)
            self.drifted = True
            return "of another lease"
        self._map()
        self._fill()
        before = {seq_id: self._published(seq_id) for seq_id in _OTHERS}
        sample = self._sample if sampled else None
        n = self._case.n_tokens
        try:
            self._lib.llama_kv_share_adopt(handle, _SEQ_ID, n, blob, len(blob), sample, None)
        except LedgerError as error:
            self._require_refused(before)
            return f"{type(error).__name__}: {re.sub('[0-9a-fx]*[0-9][0-9a-fx]*', 'N', str(error))}"
        self._require(before, but={"runs.head", "sample"})  # the next cell of a stream that they share
        return self._require_adopted(sampled)

    def _require(self, before: dict[int, bytes], *, but: Set[str] = frozenset()) -> None:
        """Check that the other sequences are as they were, but for fields of their stream."""
        for seq_id, expected in before.items():
            found = self._published(seq_id)
            what = _difference(found, expected)
            if what - but:
                raise Finding(f"the metadata of sequence {seq_id} changed: {', '.join(sorted(what))}")
            if self._save(seq_id) != self._saved[seq_id]:
                raise Finding(f"the state of sequence {seq_id} changed")

    def _require_refused(self, before: dict[int, bytes]) -> None:
        llama, memory = self._context.library.llama, self._context.memory
        ends = (
            llama.llama_memory_seq_pos_min(memory, _SEQ_ID),
            llama.llama_memory_seq_pos_max(memory, _SEQ_ID),
        )
        if ends != (-1, -1):
            raise Finding(f"refused, but the sequence holds positions {ends}")
        old = self._memory_ids
        self._map()
        if old & self._memory_ids:
            raise Finding("refused, but the provider's memory is still the one in use")
        for i, found in enumerate(self._bytes()):
            if found == self._refused[i]:
                continue
            # what has no cells, such as rows that are indexed by position, may be as it was, or zeroed
            now, filled, zeroed = (
                np.frombuffer(each, np.uint8) for each in (found, self._filled[i], self._refused[i])
            )
            if now[filled != zeroed].any():
                raise Finding(f"refused, but region {i} still holds something in the lease")
            if not ((now == filled) | (now == 0)).all():
                raise Finding(f"refused, but region {i} was written to")
        self._require(before)

    def _require_adopted(self, sampled: bool) -> str:
        if self._context.n_past(_SEQ_ID) != self._case.n_tokens:
            raise Finding(f"adopted {self._context.n_past(_SEQ_ID)} of {self._case.n_tokens} tokens")
        found = self._published(_SEQ_ID)
        moved = self._bytes() != self._filled
        same = found == self._adopted and not moved
        if not same or self._n_checks % _EVERY == 0:
            logits = self._decode()
            if same and logits != self._logits:
                raise Finding("adopted, but the next logits differ")
        self._context.clear(_SEQ_ID)
        if same:
            return "same"
        what = ", ".join([*sorted(_difference(found, self._adopted)), *(["tensor data"] if moved else [])])
        if sampled:
            raise Finding(f"adopted, but another state: {what}")
        return f"adopted other {what}"

    def _refuse(self) -> None:
        """Learn what a refusal leaves in the regions: what other sequences hold."""
        self._context.clear(_SEQ_ID)
        self._lib.llama_kv_share_reserve(self._context.handle, _SEQ_ID, self._case.n_tokens, 0)
        if self._leased() != self._lease:
            raise Finding("a share after the first one gets another lease")
        self._map()
        self._fill()
        self._lib.llama_kv_share_release(self._context.handle, _SEQ_ID, True)
        self._map()
        self._refused = self._bytes()

    def _decode(self) -> bytes:
        position = self._context.n_past(_SEQ_ID)
        self._context.decode(self._next, position=position, seq_id=_SEQ_ID, logits=True)
        return self._context.logits().tobytes()

    def _map(self) -> None:
        """Map the regions that the library uses now; a refusal replaces them."""
        self._regions.close()
        n = self._lib.llama_kv_share_regions(self._context.handle, _SEQ_ID, None, 0)
        regions = (signatures.Region * n)()
        self._lib.llama_kv_share_regions(self._context.handle, _SEQ_ID, regions, n)
        self._memory = [_map(self._regions, region) for region in regions]
        self._fds = [region.fd for region in regions]
        self._memory_ids = {os.fstat(fd).st_ino for fd in self._fds}

    def _fill(self) -> None:
        """Write what the provider wrote."""
        for memory, filled in zip(self._memory, self._filled, strict=True):
            memory[:] = filled

    def _bytes(self) -> list[bytes]:
        return [bytes(memory) for memory in self._memory]

    def _leased(self) -> bytes:
        n = self._lib.llama_kv_share_lease(self._context.handle, _SEQ_ID, None, 0)
        ranges = (signatures.Range * n)()
        self._lib.llama_kv_share_lease(self._context.handle, _SEQ_ID, ranges, n)
        return bytes(ranges)

    def _published(self, seq_id: int) -> bytes:
        """Return metadata and sample digest of a sequence, as this library publishes them."""
        sample = signatures.Digest()
        size = self._lib.llama_kv_share_publish(self._context.handle, seq_id, None, 0, None)
        buffer = ctypes.create_string_buffer(size)
        self._lib.llama_kv_share_publish(self._context.handle, seq_id, buffer, size, ctypes.byref(sample))
        return buffer.raw + bytes(sample)

    def _save(self, seq_id: int) -> bytes:
        """Return the state of a sequence, with its tensor data, as llama.cpp saves it."""
        llama, pointer = self._context.library.llama, self._context.pointer
        size = llama.llama_state_seq_get_size(pointer, seq_id)
        buffer = (ctypes.c_uint8 * size)()
        n = llama.llama_state_seq_get_data(pointer, buffer, size, seq_id)
        return bytes(buffer)[:n]


def _difference(found: bytes, expected: bytes) -> Set[str]:
    """Return the names of the fields that differ between two published states."""
    if found == expected:
        return set()
    if len(found) != len(expected):
        return {"size"}
    fields = {"sample": [(len(found) - 32, 32)], **blob_fields(expected[:-32])}
    return {
        name
        for name, places in fields.items()
        if any(get(found, *place) != get(expected, *place) for place in places)
    }


def _map(stack: contextlib.ExitStack, region: Any) -> memoryview:
    mapping = mmap.mmap(region.fd, region.size, offset=region.offset)
    stack.callback(mapping.close)
    view = memoryview(mapping)
    stack.callback(view.release)
    return view


def blob_target(models: Path, *names: str) -> Target:
    """Return the target that adopts blobs of the cases of these names, or of all."""
    return Target("blob", "kvshare.testing.fuzz_blob:BlobCheck", mutate_blob, (str(models), *names))
