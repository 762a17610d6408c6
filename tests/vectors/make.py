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
from kvshare.errors import KvshareError
from kvshare.ledger import HEADER_NBYTES, Ledger, tokens_digest
from kvshare.server import KINDS

HERE = Path(__file__).parent
LAYOUT = hashlib.sha256(b"layout").hexdigest()
SEMANTICS = hashlib.sha256(b"semantics").hexdigest()
SHARE_ID = (1 << 53) - 1
TOKENS = (1, 22, 333, 49151)

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
    "job": wire.JobHeader(share_id=SHARE_ID, tokens=(0, *TOKENS, (1 << 31) - 1)),
    "progress": wire.Progress(share_id=SHARE_ID, n_filled=0, n_tokens=12722),
    "outcome, well": wire.Outcome(share_id=SHARE_ID, ok=True),
    "outcome, failed": wire.Outcome(share_id=SHARE_ID, ok=False, error="0 € übrig"),
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


def _ledger(name: str) -> tuple[bytes, bytes]:
    """Write a ledger as `name` says; return its header and its blob."""
    blob = b"metadata" if name == "complete" else b""
    with Ledger.create(SHARE_ID, LAYOUT, SEMANTICS) as ledger:
        if name != "issued":
            ledger.begin()
            ledger.advance(2 if name in ("filling", "failed") else len(TOKENS))
        if name.startswith("complete"):
            ledger.complete(tokens_digest(TOKENS), len(TOKENS), hashlib.sha256(b"rows").digest(), blob)
        elif name == "failed":
            ledger.fail("0 € übrig")
        with ledger.view() as view:
            return bytes(view[:HEADER_NBYTES]), blob


def _damaged() -> dict[str, bytes]:
    """Ledgers that a decoder must refuse, made from a complete one."""
    header, blob = _ledger("complete")

    def with_(offset: int, data: bytes) -> bytes:
        return header[:offset] + data + header[offset + len(data) :] + blob

    u32, u64 = struct.Struct("<I").pack, struct.Struct("<Q").pack
    return {
        "no header": header[:-1],
        "other magic": with_(0, b"KVSLEDG2"),
        "other version": with_(8, u32(2)),
        "header too small": with_(12, u32(511)),
        "header too large": with_(12, u32(len(header + blob) + 1)),
        "unknown state": with_(88, u32(4)),
        "blob in the header": with_(184, u64(511)),
        "blob outside": with_(184, u64(len(header) + 1)),
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
    }


def ledger_vectors() -> list[dict[str, Any]]:
    ledgers = {
        name: b"".join(_ledger(name))
        for name in ("issued", "filling", "complete", "complete, no blob", "failed")
    }
    vectors = []
    for name, data in (ledgers | _damaged()).items():
        record, verdict = read_ledger(data)
        vectors.append(
            {
                "name": name,
                "expected": {
                    "share_id": SHARE_ID,
                    "layout": LAYOUT,
                    "semantics": SEMANTICS,
                    "tokens": TOKENS,
                },
                "bytes": data.hex(),
                "record": record,
                "verdict": verdict,
            }
        )
    return vectors


def read_ledger(data: bytes) -> tuple[dict[str, Any] | None, str]:
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
            share_id=SHARE_ID, layout=LAYOUT, semantics=SEMANTICS, tokens=TOKENS, sample_digest=None
        )
    except KvshareError as error:
        return found, next(kind for kind, each in KINDS.items() if type(error) is each)
    return found, ""


if __name__ == "__main__":
    for file, vectors in (("wire.json", wire_vectors()), ("ledger.json", ledger_vectors())):
        (HERE / file).write_text(json.dumps(vectors, indent=1, ensure_ascii=False) + "\n")
