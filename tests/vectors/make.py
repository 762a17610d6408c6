"""Write `wire.json` and `ledger.json`, the examples that every implementation must reproduce.

Run it as `python -m tests.vectors.make` after a deliberate change of a format, and look at the
difference: bytes that peers depend on have changed.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from kvshare import wire
from kvshare.ledger import HEADER_NBYTES, Ledger, tokens_digest

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


def ledger_vectors() -> list[dict[str, Any]]:
    vectors = []
    for name in ("issued", "filling", "complete", "complete, no blob", "failed"):
        blob = b"metadata" if name == "complete" else b""
        with Ledger.create(SHARE_ID, LAYOUT, SEMANTICS) as ledger:
            if name != "issued":
                ledger.begin()
                ledger.advance(2 if name in ("filling", "failed") else len(TOKENS))
            if name.startswith("complete"):
                ledger.complete(tokens_digest(TOKENS), len(TOKENS), hashlib.sha256(b"rows").digest(), blob)
            elif name == "failed":
                ledger.fail("0 € übrig")
            record = ledger.snapshot()
            vectors.append(
                {
                    "name": name,
                    "tokens": TOKENS,
                    "record": {
                        "share_id": record.share_id,
                        "layout": record.layout,
                        "semantics": record.semantics,
                        "state": record.state,
                        "n_filled": record.n_filled,
                        "n_tokens": record.n_tokens,
                        "vouched_share_id": record.vouched_share_id,
                        "tokens_sha256": record.tokens_sha256.hex(),
                        "sample_digest": record.sample_digest.hex(),
                        "blob": record.blob.hex(),
                        "error": record.error,
                    },
                    "bytes": ledger.view()[: HEADER_NBYTES + len(blob)].hex(),
                }
            )
    return vectors


if __name__ == "__main__":
    for file, vectors in (("wire.json", wire_vectors()), ("ledger.json", ledger_vectors())):
        (HERE / file).write_text(json.dumps(vectors, indent=1, ensure_ascii=False) + "\n")
