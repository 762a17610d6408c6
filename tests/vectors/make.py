"""Write `wire.json` and `ledger.json`, the examples that every implementation must reproduce.

Run it as `python -m tests.vectors.make` after a deliberate change of a format, and look at the
difference: bytes that peers depend on have changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

from kvshare import fds, wire
from kvshare._native import cuda
from kvshare.device import DevicePlace
from kvshare.errors import KvshareError
from kvshare.ledger import Ledger, LedgerPrefix, tokens_digest
from kvshare.server import KINDS

HERE = Path(__file__).parent
LAYOUT = hashlib.sha256(b"layout").hexdigest()
SEMANTICS = hashlib.sha256(b"semantics").hexdigest()
SHARE_ID = (1 << 53) - 1
TOKENS = (1, 22, 333, 49151)
PREFIX = LedgerPrefix.of(TOKENS[:3], b"metadata of the prefix")  # not a multiple of 8
NO_PREFIX = LedgerPrefix()
WITH_PREFIX = ", with a prefix"

GPU = cuda.uuid_text(bytes(range(16)))
TENSOR = {"name": "cache_k_l0", "type": "f16", "ne": [128, 256, 1, 1], "nb": [2, 256, 65536, 65536]}

MESSAGES: dict[str, wire.Message] = {
    "share, one region": wire.ShareHeader(
        share_id=1,
        layout=LAYOUT,
        semantics=SEMANTICS,
        params={},
        regions=(wire.RegionEntry(fd=0, offset=0, size=4096, layout=[], kind="memfd"),),
        ledger=wire.LedgerEntry(fd=1, size=1052672),
        cells=(((0, 256),),),
        expires_ms=30000,
    ),
    "share, everything": wire.ShareHeader(
        share_id=SHARE_ID,
        layout=LAYOUT,
        semantics=SEMANTICS,
        params={
            "n_ctx": 4096,
            "flash_attn": True,
            "type_k": "f16",
            "rope_freq_base": 10000.5,
            "note": 'ä€𝄞 "quoted" \\ / \n\t\x01\x7f',
            "nothing": None,
            "lowest": -(1 << 63),
        },
        regions=(
            wire.RegionEntry(fd=0, offset=0, size=65536, layout=[TENSOR], kind="memfd"),
            wire.RegionEntry(fd=0, offset=65536, size=65536, layout=[], kind="memfd"),
            wire.RegionEntry(fd=2, offset=0, size=(1 << 63) - 1, layout={}, kind="cuda-vmm"),
            wire.RegionEntry(fd=3, offset=4096, size=1, layout=None, kind="dma-buf"),
        ),
        ledger=wire.LedgerEntry(fd=1, size=512),
        cells=(((0, 256), (512, 1 << 32)), ()),
        expires_ms=0,
    ),
    "share, on a GPU": wire.ShareHeader(
        share_id=SHARE_ID,
        layout=LAYOUT,
        semantics=SEMANTICS,
        params={"n_ctx": 256, "exposes_all": True},
        regions=(
            wire.RegionEntry(
                fd=0,
                offset=0,
                size=65536,
                layout=DevicePlace(GPU, 2 << 20, SHARE_ID, [TENSOR]).to_json(),
                kind="cuda-vmm",
            ),
            wire.RegionEntry(fd=1, offset=0, size=65536, layout=[TENSOR], kind="memfd"),
        ),
        ledger=wire.LedgerEntry(fd=2, size=512),
        cells=(((0, 256),),),
        expires_ms=30000,
    ),
    "job": wire.JobHeader(share_id=SHARE_ID, tokens=(0, *TOKENS, (1 << 31) - 1)),
    "progress": wire.Progress(share_id=SHARE_ID, n_filled=0, n_tokens=12722),
    "outcome, well": wire.Outcome(share_id=SHARE_ID, ok=True),
    "outcome, failed": wire.Outcome(share_id=SHARE_ID, ok=False, error="0 € übrig"),
    "frozen prefix": wire.FrozenHeader(
        name="system-prompt_v1.2",
        prefix_id=SHARE_ID,
        n_tokens=len(TOKENS),
        layout=LAYOUT,
        semantics=SEMANTICS,
        params={"n_ctx": 4096, "flash_attn": True},
        regions=(
            wire.RegionEntry(fd=0, offset=0, size=65536, layout=[TENSOR], kind="memfd"),
            wire.RegionEntry(fd=1, offset=0, size=4096, layout=[], kind="memfd"),
        ),
        ledger=wire.LedgerEntry(fd=2, size=4096),
        tokens=wire.LedgerEntry(fd=3, size=4 * len(TOKENS)),
    ),
    "prefix, get": wire.PrefixRequest(op="get", name="system-prompt_v1.2"),
    "prefix, get the last": wire.PrefixRequest(op="get"),
    "prefix, list": wire.PrefixRequest(op="list"),
    "prefix, drop": wire.PrefixRequest(op="drop", name="a" * 128),
    "prefixes, none": wire.PrefixList(prefixes=()),
    "prefixes, two": wire.PrefixList(
        prefixes=tuple(
            wire.PrefixEntry(
                name=name,
                prefix_id=prefix_id,
                n_tokens=len(TOKENS),
                nbytes=nbytes,
                layout=LAYOUT,
                semantics=SEMANTICS,
                n_reads=n_reads,
            )
            for name, prefix_id, nbytes, n_reads in (("-", 1, 0, 0), ("B_2", SHARE_ID, (1 << 63) - 1, 7))
        )
    ),
}


def wire_vectors() -> list[dict[str, Any]]:
    vectors = []
    for name, message in MESSAGES.items():
        payload = wire.encode(message)
        vectors.append(
            {
                "name": name,
                "header": json.loads(payload),
                "payload": payload.hex(),
                "framed": (struct.pack("<I", len(payload)) + payload).hex(),
            }
        )
    return vectors


def _prefix(name: str) -> LedgerPrefix:
    """Return what the sequence held before the share of this name."""
    return PREFIX if WITH_PREFIX in name else NO_PREFIX


def _ledger(name: str) -> bytes:
    """Write a ledger as `name` says; return its bytes up to the end of its blobs."""
    prefix = _prefix(name)
    kind = name.replace(WITH_PREFIX, "")
    blob = b"metadata" if kind == "complete" else b""
    with Ledger.create(SHARE_ID, LAYOUT, SEMANTICS, prefix=prefix) as ledger:
        if kind != "issued":
            ledger.begin()
            n_filled = 2 if prefix is NO_PREFIX else 3
            ledger.advance(n_filled if kind in ("filling", "failed") else len(TOKENS))
        if kind.startswith("complete"):
            ledger.complete(tokens_digest(TOKENS), len(TOKENS), hashlib.sha256(b"rows").digest(), blob)
        elif kind == "failed":
            ledger.fail("0 € übrig")
        with ledger.view() as view:
            return bytes(view[: ledger.size - ledger.capacity + len(blob)])


def _damaged(name: str) -> dict[str, bytes]:
    """Ledgers that a decoder must refuse, made from a complete one."""
    good = _ledger(name)

    def with_(offset: int, data: bytes) -> bytes:
        return good[:offset] + data + good[offset + len(data) :]

    u32, u64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
    if WITH_PREFIX in name:
        return {
            "other number of tokens before": with_(456, u64(2)),
            "no tokens before": with_(456, u64(0)),
            "continued from other tokens": with_(464, b"\0"),
            "continued from no tokens": with_(464, bytes(32)),
            "fewer tokens": with_(104, u64(3)),
            "nothing filled": with_(96, u64(3)),
            "other tokens": with_(120, b"\0"),
            "blob in the prefix": with_(184, u64(512)),
        }
    return {
        "no header": good[:511],
        "other magic": with_(0, b"KVSLEDG2"),
        "other version": with_(8, u32(2)),
        "header too small": with_(12, u32(511)),
        "header too large": with_(12, u32(len(good) + 1)),
        "unknown state": with_(88, u32(4)),
        "blob in the header": with_(184, u64(511)),
        "blob outside": with_(184, u64(513)),
        "blob offset overflows": with_(184, u64((1 << 64) - 1)),
        "blob size overflows": with_(192, u64((1 << 64) - 1)),
        "of another share": with_(16, u64(SHARE_ID - 1)),
        "vouched for another share": with_(112, u64(SHARE_ID - 1)),
        "other layout": with_(24, b"\0"),
        "other semantics": with_(56, b"\0"),
        "fewer tokens": with_(104, u64(len(TOKENS) - 1)),
        "more tokens": with_(104, u64(len(TOKENS) + 1)),
        "half filled": with_(96, u64(2)),
        "other tokens": with_(120, b"\0"),
        "continued from tokens": with_(456, u64(3) + PREFIX.sha256),
    }


def ledger_vectors() -> list[dict[str, Any]]:
    kinds = ("issued", "filling", "complete", "complete, no blob", "failed")
    ledgers = {name: _ledger(name) for name in kinds} | _damaged("complete")
    for kind in kinds:
        ledgers[kind + WITH_PREFIX] = _ledger(kind + WITH_PREFIX)
    for kind, data in _damaged("complete" + WITH_PREFIX).items():
        ledgers[kind + WITH_PREFIX] = data
    vectors = []
    for name, data in ledgers.items():
        prefix = _prefix(name)
        record, verdict = read_ledger(data, prefix)
        vectors.append(
            {
                "name": name,
                "expected": {
                    "share_id": SHARE_ID,
                    "layout": LAYOUT,
                    "semantics": SEMANTICS,
                    "tokens": TOKENS,
                    "n_prefix": prefix.n_tokens,
                    "prefix_sha256": prefix.sha256.hex(),
                    "prefix_blob": prefix.blob.hex(),
                },
                "bytes": data.hex(),
                "record": record,
                "verdict": verdict,
            }
        )
    return vectors


def read_ledger(data: bytes, prefix: LedgerPrefix) -> tuple[dict[str, Any] | None, str]:
    """Return what a decoder reads, None if the ledger is malformed, and its verdict, empty if it adopts."""
    found = None
    try:
        fd = fds.memfd_create("vector", len(data))
        os.pwrite(fd.fileno(), data, 0)
        with Ledger.open(fd, len(data)) as ledger:
            record = ledger.snapshot()
        fields = dataclasses.asdict(record).items()
        found = {name: value.hex() if isinstance(value, bytes) else value for name, value in fields}
        record.verify(
            share_id=SHARE_ID,
            layout=LAYOUT,
            semantics=SEMANTICS,
            tokens=TOKENS,
            sample_digest=None,
            prefix=prefix,
        )
    except KvshareError as error:
        kinds = {each: kind for kind, each in KINDS.items()}
        return found, next(kinds[each] for each in type(error).__mro__ if each in kinds)
    return found, ""


if __name__ == "__main__":
    for file, vectors in (("wire.json", wire_vectors()), ("ledger.json", ledger_vectors())):
        (HERE / file).write_text(json.dumps(vectors, indent=1, ensure_ascii=False) + "\n")
