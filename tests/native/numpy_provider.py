"""A provider that computes nothing and loads no libllama: it copies K and V rows from a file.

    python -m tests.native.numpy_provider SOCKET ROWS TOKENS

ROWS is an .npz with `k0`, `v0`, `k1`, ... of shape `[n_tokens, n_embd]`, TOKENS a JSON list. It
writes one JSON line: what it is, and how it went.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from kvshare import KvshareError, fds
from kvshare.provider import Offer


def main() -> int:
    socket, rows_path, tokens_text = sys.argv[1:]
    tokens = json.loads(tokens_text)
    answer: dict[str, object] = {"ok": True}
    try:
        with (
            fds.listen_unix(socket) as listener,
            fds.accept_unix(listener) as connection,
            Offer.receive(connection) as offer,
            np.load(rows_path) as rows,
        ):
            offer.ledger.begin()
            cells = slice(offer.first_cell, offer.first_cell + len(tokens))
            for layer in offer.views():
                layer.k[cells] = rows[f"k{layer.il}"]
                if layer.v is not None:
                    layer.v[cells] = rows[f"v{layer.il}"]
            offer.complete(tokens)
            del layer
            answer |= {"first_cell": offer.first_cell, "exposes_all": offer.exposes_all}
    except KvshareError as error:
        answer = {"ok": False, "error": type(error).__name__, "message": str(error)}
    maps = Path("/proc/self/maps").read_text()
    answer["libraries"] = [name for name in ("libllama", "libggml") if name in maps]
    answer["modules"] = [name for name in ("llama_cpp", "numpy") if name in sys.modules]
    print(json.dumps(answer), flush=True)
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
