"""A reader of prefixes in a process of its own.

    python -m tests.native.prefix_reader

reads one JSON object a line and answers each with one, `{"ok": true, ...}` or what went wrong:
`{"fork": ID, "socket", "name", "model", "options"}` forks a prefix from a server;
`{"decode": ID, "tokens"}` goes on in a fork, and answers the SHA-256 of the logits of each token;
`{"hand_on": ID, "socket"}` puts the prefix of a fork to a server.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import kvshare


def main() -> None:
    models: dict[str, kvshare.Model] = {}
    prefixes: dict[str, kvshare.Prefix] = {}
    forks: dict[str, kvshare.Decoder] = {}
    for line in sys.stdin:
        job = json.loads(line)
        try:
            print(json.dumps({"ok": True, **_do(job, models, prefixes, forks)}), flush=True)
        except kvshare.KvshareError as error:
            answer = {"ok": False, "error": type(error).__name__, "message": str(error)}
            if isinstance(error, kvshare.MismatchError):
                answer |= {"field": error.field, "expected": error.expected, "found": error.found}
            print(json.dumps(answer, default=str), flush=True)


def _do(
    job: dict[str, Any],
    models: dict[str, kvshare.Model],
    prefixes: dict[str, kvshare.Prefix],
    forks: dict[str, kvshare.Decoder],
) -> dict[str, Any]:
    if "fork" in job:
        prefix = prefixes[job["fork"]] = kvshare.Prefix.get(job["socket"], job["name"])
        if job["model"] not in models:
            models[job["model"]] = kvshare.Model.open(job["model"])
        forks[job["fork"]] = prefix.fork(models[job["model"]], **job["options"])
        assert prefix.entered is not None
        return {"n_tokens": len(prefix.tokens), "bytes_moved": prefix.entered.bytes_moved}
    if "hand_on" in job:
        prefixes[job["hand_on"]].put(job["socket"])
        return {}
    context, found = forks[job["decode"]].context, []
    seq_id = prefixes[job["decode"]].seq_id
    for token in job["tokens"]:
        context.decode([token], position=context.n_past(seq_id), seq_id=seq_id, logits=True)
        found.append(hashlib.sha256(context.logits().tobytes()).hexdigest())
    return {"logits": found}


if __name__ == "__main__":
    main()
