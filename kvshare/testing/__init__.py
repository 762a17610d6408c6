"""What somebody needs who writes a decoder or a provider of their own, without pytest.

- `fakes`: a decoder and a provider that need no llama.cpp, over real shared memory.
- `contract`: checks that every decoder and every provider has to pass.
- `http`, `server_contract`: the same for a llama-server; need aiohttp, and are imported by their names.
- `faults`: what a broken peer sends and writes.
- `fuzz`, `fuzz_blob`: mutation fuzzers for header, ledger and metadata, as a program as well.
- `chaos`: named faults at named steps of a handoff, `python -m kvshare.testing.chaos --list`.
- `strategies`: hypothesis strategies for layouts, headers and ledgers; needs the extra `test`.
"""

from __future__ import annotations

from kvshare.testing.contract import check_decoder, check_provider
from kvshare.testing.fakes import FakeDecoder, FakeProvider

__all__ = ["FakeDecoder", "FakeProvider", "check_decoder", "check_provider"]
