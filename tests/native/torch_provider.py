"""A provider in PyTorch on a GPU: it computes nothing, but copies K and V rows from a file, on the device.

    python -m tests.native.torch_provider SOCKET ROWS TOKENS

Arguments and answer are those of `numpy_provider`. It needs a GPU and a PyTorch for it, which no test has;
`memory` in the answer says whether PyTorch wrote to the decoder's memory and to no copy of it.
"""

from __future__ import annotations

import importlib
import json
import sys

import numpy as np

from kvshare import KvshareError, fds
from kvshare.provider import Offer


def main() -> int:
    socket, rows_path, tokens_text = sys.argv[1:]
    tokens = json.loads(tokens_text)
    torch = importlib.import_module("torch")
    answer: dict[str, object] = {"ok": True, "torch": torch.__version__}
    try:
        with (
            fds.listen_unix(socket) as listener,
            fds.accept_unix(listener) as connection,
            Offer.receive(connection) as offer,
            np.load(rows_path) as rows,
        ):
            offer.ledger.begin()
            first, last = offer.first_cell, offer.first_cell + len(tokens)
            same = True
            for layer in offer.views():
                for kind, view in (("k", layer.k), ("v", layer.v)):
                    device = torch.device("cuda", view.device.ordinal)
                    array = torch.as_tensor(view, device=device)
                    wanted = rows[f"{kind}{layer.il}"]
                    array[first:last] = torch.from_numpy(wanted).to(device)
                    torch.cuda.synchronize(device)
                    at = view.__cuda_array_interface__["data"][0]
                    same &= array.data_ptr() == at and bool((view.read(first, last) == wanted).all())
            del layer, view, array
            offer.complete(tokens)
            answer["memory"] = "shared" if same else "copied"
    except KvshareError as error:
        answer = {"ok": False, "error": type(error).__name__, "message": str(error)}
    print(json.dumps(answer), flush=True)
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
