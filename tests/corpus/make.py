"""Write the inputs that the fuzzers begin with: what is right, and the ways of being wrong, by name.

Run it as `python -m tests.corpus.make` after a deliberate change of a format, and look at what it prints:
the outcome of each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path

from kvshare.testing import architectures, fuzz, fuzz_blob
from kvshare.testing.fuzz import get, put

HERE = Path(__file__).parent
HUGE32 = (1 << 32) - 1
HUGE64 = (1 << 64) - 1


def headers() -> dict[str, bytes]:
    """Return headers by name."""
    share, job, progress, ok, failed, frozen, get_prefix, list_prefixes, prefixes = fuzz.HeaderCheck().seeds()

    def with_layout(text: bytes) -> bytes:
        return share.replace(b'"layout":null', b'"layout":' + text)

    return {
        "share": share,
        "job": job,
        "progress": progress,
        "outcome-ok": ok,
        "outcome-failed": failed,
        "frozen": frozen,
        "prefix-get": get_prefix,
        "prefix-list": list_prefixes,
        "prefixes": prefixes,
        "empty": b"",
        "truncated": share[:-1],
        "not-utf8": share.replace(b"n_ctx", b"n_\xff\xfe"),
        "key-twice": share.replace(b'{"cells"', b'{"protocol":1,"cells"'),
        "nested-deeply": with_layout(b"[" * 3000 + b"]" * 3000),
        "nested-to-the-limit": with_layout(b"[" * 900 + b"]" * 900),
        "many-digits": with_layout(b"9" * 4300),
        "too-many-digits": with_layout(b"9" * 4301),
        "surrogate": with_layout(rb'"\ud800"'),
        "surrogate-pair": with_layout(rb'"\ud83d\ude00"'),
        "infinite": with_layout(b"1e309"),
        "not-a-number": with_layout(b"NaN"),
        "negative-zero": with_layout(b"-0.0"),
        "size-overflows": share.replace(b'4096,"size":4096', b'4096,"size":9223372036854775807'),
        "regions-overlap": share.replace(b'"offset":4096,', b'"offset":4095,'),
        "cells-descend": share.replace(b"[512,768]", b"[128,768]"),
        "true-is-no-integer": share.replace(b'"share_id":1', b'"share_id":true'),
        "share-id-is-a-double": share.replace(b'"share_id":1', b'"share_id":1.0'),
        "frozen-name-is-a-path": frozen.replace(b"system-prompt_1.0", b"../1.0"),
        "frozen-ledger-is-tokens": frozen.replace(b'"fd":2', b'"fd":1'),
        "prefix-get-without-name": get_prefix.replace(b'"system-prompt_1.0"', b"null"),
        "prefix-op-unknown": get_prefix.replace(b'"get"', b'"put"'),
        "prefixes-none": b'{"prefixes":[],"protocol":1}',
    }


def ledgers() -> dict[str, bytes]:
    """Return ledgers by name, each with room for 128 bytes of a blob of 64."""
    issued, filling, complete, failed, continued = (seed[:640] for seed in fuzz.LedgerCheck().seeds())
    return {
        "issued": issued,
        "filling": filling,
        "complete": complete,
        "failed": failed,
        "continued": continued,
        "empty": b"",
        "header-cut": complete[:511],
        "blob-cut": complete[:575],
        "header-size-huge": put(complete, 12, 4, HUGE32),
        "header-size-small": put(complete, 12, 4, 511),
        "state-unknown": put(complete, 88, 4, 4),
        "watermark-behind": put(complete, 96, 8, 2),
        "vouches-for-another-share": put(complete, 112, 8, 1),
        "blob-in-header": put(complete, 184, 8, 448),
        "blob-overflows": put(put(complete, 184, 8, HUGE64 - 7), 192, 8, 16),
        "blob-to-the-end": put(complete, 192, 8, 128),
        "blob-beyond-the-end": put(complete, 192, 8, 129),
        "error-without-end": failed[:200] + b"\xc3" * 256 + failed[456:],
        "prefix-of-more": put(continued, 456, 8, 2),
        "prefix-of-none": put(continued, 456, 8, 0),
        "prefix-of-others": put(continued, 464, 1, 0),
        "prefix-behind-header": put(continued, 496, 8, 520),
        "prefix-overflows": put(put(continued, 496, 8, HUGE64 - 7), 504, 8, 16),
        "prefix-huge": put(continued, 504, 8, HUGE64),
        "blob-in-prefix": put(continued, 184, 8, 512),
    }


def blobs(seeds: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return inputs by name."""

    def changed(case: str, *changes: tuple[str, int, int]) -> bytes:
        """Set fields of the right blob: name, which one of them, value."""
        blob = seeds[case]
        for name, i, value in changes:
            offset, size = fuzz_blob.blob_fields(seeds[case])[name][i]
            blob = put(blob, offset, size, value % (1 << 8 * size))
        return blob

    def value(case: str, name: str, i: int) -> int:
        return get(seeds[case], *fuzz_blob.blob_fields(seeds[case])[name][i])

    plain = seeds["plain"]
    region, _, offset, size = struct.unpack_from("<IIQQ", plain, 24)
    halves = struct.pack("<IIQQIIQQ", region, 0, offset, 100, region, 0, offset + 100, size - 100)
    more = get(plain, 8, 8) + 1
    run = fuzz_blob.blob_fields(plain)["run.pos"][0][0]
    cell = value("plain", "run.cell", 0)

    def two_runs(*words: int) -> bytes:
        """Put two runs in the place of the one of the plain blob."""
        changed = plain[:run] + struct.pack("<6I", *words) + plain[run + 12 :]
        return put(put(changed, 16, 8, get(plain, 16, 8) + 12), run - 8, 4, 2)

    # with `unsampled`, what is refused is not refused for its digest
    wrong = {
        "plain-same-reserved": changed("plain", ("extent.reserved", 0, 77)),
        "plain-same-extent-split": put(plain[:24] + halves + plain[48:], 8, 8, more),
        "plain-short": plain[:23],
        "plain-n-extents-huge": put(plain, 8, 8, HUGE64),
        "plain-n-extents-wraps": put(put(plain, 8, 8, (1 << 64) // 24 + 1), 16, 8, len(plain) - 32),
        "plain-n-state-huge": put(plain, 16, 8, HUGE64),
        "plain-state-cut": put(plain[:-4], 16, 8, get(plain, 16, 8) - 4),
        "plain-state-longer": put(plain + bytes(4), 16, 8, get(plain, 16, 8) + 4),
        "plain-extent-wraps": changed("plain", ("extent.offset", 0, -64)),
        "plain-extent-size-wraps": changed("plain", ("extent.size", 0, HUGE64)),
        "plain-extent-empty": changed("plain", ("extent.size", 0, 0)),
        "plain-extent-region": changed("plain", ("extent.region", 0, 1)),
        "plain-extent-twice": put(plain[:48] + plain[24:48] + plain[48:], 8, 8, more),
        "plain-extents-overlap": changed("plain", ("extent.offset", 1, value("plain", "extent.offset", 0))),
        "plain-run-huge": changed("plain", ("run.n", 0, HUGE32)),
        "plain-run-empty": changed("plain", ("run.n", 0, 0)),
        "plain-run-less": changed("plain", ("run.n", 0, 39)),
        "plain-run-more": changed("plain", ("run.n", 0, 41)),
        "plain-runs-none": changed("plain", ("runs.n", 0, 0)),
        "plain-runs-huge": changed("plain", ("runs.n", 0, HUGE32)),
        "plain-head-huge": changed("plain", ("runs.head", 0, HUGE32)),
        "plain-cell-huge": changed("plain", ("run.cell", 0, HUGE32)),
        "plain-cell-beyond": changed("plain", ("run.cell", 0, 480)),
        "plain-cell-not-leased": changed("plain", ("run.cell", 0, 256)),
        "plain-position-negative": changed("plain", ("run.pos", 0, -1)),
        "plain-position-beyond": changed("plain", ("run.pos", 0, 1)),
        "plain-position-huge": changed("plain", ("run.pos", 0, (1 << 31) - 1)),
        "plain-position-twice": two_runs(0, cell, 20, 19, cell + 20, 20),
        "plain-cell-twice": two_runs(0, cell, 20, 20, cell, 20),
        "plain-same-two-runs": two_runs(0, cell, 20, 20, cell + 20, 20),
        "plain-unified-others-cells": changed("plain-unified", ("run.cell", 0, 0)),
        "window-cells-few": changed("window", ("run.n", 0, 2)),
        "recurrent-no-state": changed("recurrent", ("states.n", 0, 0)),
        "recurrent-other-row": changed("recurrent", ("states.row", 0, 0)),
        "recurrent-row-huge": changed("recurrent", ("states.row", 0, HUGE32)),
        "recurrent-two-rows": changed("recurrent", ("states.n", 0, 2)),
        "recurrent-position": changed("recurrent", ("state.pos", 0, 38)),
        "compressed-magic": changed("compressed", ("state", 0, 0)),
    }
    good = {f"{case}-right": fuzz_blob.make_input(case, True, blob) for case, blob in seeds.items()}
    good |= {name: fuzz_blob.make_input(_case(name, seeds), False, blob) for name, blob in wrong.items()}
    good["plain-of-another-model"] = fuzz_blob.make_input("plain", True, seeds["latent"])
    # the digest is that of the right metadata, or the metadata ends wrong when all of it was entered
    tampered = {
        "sampled-head": ("plain", True, changed("plain", ("runs.head", 0, 7))),
        "sampled-token": ("tokens", True, changed("tokens", ("cell.token", 39, (1 << 31) - 1))),
        "sampled-x": ("positions", True, changed("positions", ("cell.x", 39, 999))),
        "head-unified": ("plain-unified", False, changed("plain-unified", ("runs.head", 0, 12345))),
        "head-window": ("window-unified", False, changed("window-unified", ("runs.head", 0, 12345))),
    }
    return good | {name: fuzz_blob.make_input(*each) for name, each in tampered.items()}


def _case(name: str, seeds: Mapping[str, bytes]) -> str:
    return max((case for case in seeds if name.startswith(case + "-")), key=len)


def _write(folder: Path, inputs: Mapping[str, bytes], check: Callable[[bytes], str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, data in inputs.items():
        (folder / name).write_bytes(data)
        try:
            outcome = check(data)
        except fuzz.Finding as error:
            outcome = f"FINDING: {error}"
        print(f"{folder.relative_to(HERE)}/{name}: {outcome}")


def main() -> None:
    """Write all of them."""
    _write(HERE / "header", headers(), fuzz.HeaderCheck())
    _write(HERE / "ledger", ledgers(), fuzz.LedgerCheck())
    check = fuzz_blob.BlobCheck(str(architectures.models()))
    seeds = {case: blob for case, _, blob in map(fuzz_blob.parse_input, check.seeds())}
    _write(HERE / "blob", blobs(seeds), check)
    check.close()


if __name__ == "__main__":
    main()
