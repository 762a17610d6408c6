"""A provider in a process of its own.

    python -m tests.native.provider_process SOCKET MODEL TOKENS [OPTIONS]

serves one share; TOKENS is a JSON list, OPTIONS a JSON object of keywords of `kvshare.Provider`.
Without arguments it reads jobs from standard input, one JSON object `{"socket", "model", "tokens",
"options"}` a line. After each share it writes one line: `{"ok": true}`, or what went wrong.
`exit_after: N` in the options ends the process without a word after N tokens, as a crash would;
`n_gpu_layers` is of the model.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import kvshare


def main() -> int:
    if len(sys.argv) > 1:
        socket, model, tokens, *options = sys.argv[1:]
        job = {
            "socket": socket,
            "model": model,
            "tokens": json.loads(tokens),
            "options": json.loads(options[0]) if options else {},
        }
        answer = _serve(job, {})
        print(json.dumps(answer), flush=True)
        return 0 if answer["ok"] else 1
    models: dict[tuple[str, int], kvshare.Model] = {}
    for line in sys.stdin:
        print(json.dumps(_serve(json.loads(line), models)), flush=True)
    return 0


def _serve(job: dict[str, Any], models: dict[tuple[str, int], kvshare.Model]) -> dict[str, Any]:
    options = dict(job["options"])
    exit_after = options.pop("exit_after", None)
    key = job["model"], options.pop("n_gpu_layers", 0)

    def progress(n_done: int) -> None:
        if exit_after is not None and n_done >= exit_after:
            os._exit(1)

    try:
        if key not in models:
            models[key] = kvshare.Model.open(key[0], n_gpu_layers=key[1])
        kvshare.serve(job["socket"], models[key], job["tokens"], progress=progress, **options)
    except kvshare.KvshareError as error:
        answer = {"ok": False, "error": type(error).__name__, "message": str(error)}
        if isinstance(error, kvshare.MismatchError):
            answer |= {"field": error.field, "expected": error.expected, "found": error.found}
        return answer
    return {"ok": True}


if __name__ == "__main__":
    sys.exit(main())
