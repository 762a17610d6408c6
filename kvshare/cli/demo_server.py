"""`kvshare demo --server`: the same with a llama-server, over HTTP: one prompt on three routes.

Each route starts with the server's only slot empty, puts all but the last token of the prompt there,
and then asks for the same greedy completion:

- *plain*: the server prefills
- *file*: what the plain route has put there is saved to a file, forgotten, and restored
- *handoff*: `kvshare provider` prefills into the slot's own memory, and the server adopts

A run of the report has, besides those of the table:

- `share_us`, `adopt_us`, `file_save_ms`, `file_restore_ms`: time on the server's context thread, as the
  server reports it (`t_us`, `timings`): time in which no other slot goes on
- `*_http_ms`: the same as the client sees it, with HTTP, and for `share` with the sending of the
  descriptors to the provider
- `cache_n`, `file_cache_n`: tokens that the completion behind the handoff and behind the restore reused

The file is written and read by the same server in the same folder, so that nothing has to be transferred:
it is in the kernel's page cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvshare.cli.demo_events import N_GENERATE, TEXT
from kvshare.errors import KvshareError, LocalProtocolError

if TYPE_CHECKING:
    from kvshare.cli.demo import Rows
    from kvshare.engine import ProviderClient
    from kvshare.fetch import Progress
    from kvshare.server import ServerClient

TIMEOUT_S = 600.0

_SLOT = 0
_FILE = "slot.bin"
_LOG_LINES = 3  # in a hint

T = TypeVar("T")

TITLE = "one cache, a llama-server and a provider"
ROWS: Rows = (
    ("prefill by llama-server", "local_prefill_ms", "ms"),
    ("prefill by the provider", "provider_prefill_ms", "ms"),
    ("file save", "file_save_ms", "ms"),
    ("file restore", "file_restore_ms", "ms"),
    ("file, bytes", "file_nbytes", ""),
    ("share", "share_us", "us"),
    ("adopt", "adopt_us", "us"),
    ("K, V bytes moved", "bytes_moved", ""),
    ("file save over HTTP", "file_save_http_ms", "ms"),
    ("file restore over HTTP", "file_restore_http_ms", "ms"),
    ("share over HTTP", "share_http_ms", "ms"),
    ("adopt over HTTP", "adopt_http_ms", "ms"),
    ("cache_n after adopt", "cache_n", ""),
    ("first token after adopt", "first_token_ms", "ms"),
    ("steady token", "steady_token_ms", "ms"),
    ("text identical", "text_identical", ""),
    ("logprobs identical", "logprobs_identical", ""),
)


def measure(model: Path, n_tokens: Sequence[int], n_threads: int | None, show: Progress) -> dict[str, Any]:
    """Run a llama-server and a provider, and all prompts; return the report that `--json` prints.

    Args:
        model: GGUF file.
        n_tokens: lengths of the prompts.
        n_threads: compute threads of each process; None leaves it to them.
        show: called with the steps.

    Raises:
        KvshareError: a process failed, with the end of its log as the hint.
    """
    from kvshare import build, fds, processes

    _require_http()
    program = build.build_target(build.SERVER, progress=show)
    threads = () if n_threads is None else ("--threads", str(n_threads))
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(fds.private_directory())
        share_dir, files = folder / "share", folder / "files"
        share_dir.mkdir(mode=0o700)
        files.mkdir()
        show(f"loading {model.name} in two processes", 0, None)
        server = stack.enter_context(
            processes.llama_server(
                program,
                model,
                folder / "server.log",
                *("--ctx-size", str(_n_ctx(n_tokens)), "-np", "1", "--slot-save-path", str(files)),
                *("--cache-ram", "0", *threads),  # else a forgotten prompt comes back from memory
                share_dir=share_dir,
            )
        )
        socket = share_dir / "provider.sock"
        provider = stack.enter_context(processes.provider(model, socket, folder / "provider.log", *threads))
        with _hints_from({"llama-server": server.log, "provider": provider.log}):
            runs = asyncio.run(_run_all(server.url, socket, n_tokens, show))
    return {"runs": runs, "ok": all(map(is_right, runs))}


def is_right(run: Mapping[str, Any]) -> bool:
    """Return whether a run shows what it should: the same answers, nothing moved, all reused."""
    identical: bool = run["text_identical"] and run["logprobs_identical"]
    return identical and run["bytes_moved"] == 0 and run["cache_n"] == run["n_tokens"] - 1


def _require_http() -> None:
    try:
        import aiohttp
    except ImportError as error:
        raise KvshareError(
            f"the demo with a server needs {error.name}",
            hint="install the extra: pip install 'kvshare[engine]'",
        ) from error
    del aiohttp


def _n_ctx(n_tokens: Sequence[int]) -> int:
    return -(-(max(n_tokens) + N_GENERATE) // 256) * 256


@contextlib.contextmanager
def _hints_from(logs: Mapping[str, Path]) -> Iterator[None]:
    """Give an error that says no next step the end of the logs, which are gone with their folder."""
    try:
        yield
    except KvshareError as error:
        if error.hint is None:
            ends = []
            for name, log in logs.items():
                lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
                ends.append("\n  ".join([f"the log of {name} ends with:", *lines]))
            error.hint = "\n".join(ends)
        raise


# -- the three routes ------------------------------------------------------------------------------


async def _run_all(url: str, socket: Path, n_tokens: Sequence[int], show: Progress) -> list[dict[str, Any]]:
    from kvshare.engine import ProviderClient
    from kvshare.server import ServerClient

    async with ServerClient(url, timeout_s=TIMEOUT_S) as server:
        (slot,) = await server.slots()
        if max(n_tokens) + N_GENERATE > slot.n_ctx:
            raise LocalProtocolError(
                f"--tokens {max(n_tokens)}: with this model the server holds {slot.n_ctx} tokens",
                hint=f"give at most {slot.n_ctx - N_GENERATE}",
            )
        tokens = await server.tokenize(TEXT * (max(n_tokens) // 32 + 1))
        provider = ProviderClient(socket)
        return [await _run(server, provider, tokens[:n], show) for n in n_tokens]


async def _run(
    server: ServerClient, provider: ProviderClient, tokens: list[int], show: Progress
) -> dict[str, Any]:
    """Take one prompt on all routes."""
    n_tokens, prefix = len(tokens), tokens[:-1]

    await server.erase(_SLOT)
    show(f"{n_tokens:,} tokens: llama-server prefills", 0, None)
    prefilled = await _complete(server, prefix, 0)
    save_http_ms, saved = await _timed(_action(server, "save"))
    plain = await _generate(server, tokens)

    await server.erase(_SLOT)
    show(f"{n_tokens:,} tokens: restore from a file", 0, None)
    restore_http_ms, restored = await _timed(_action(server, "restore"))
    from_file = await _generate(server, tokens)

    await server.erase(_SLOT)
    step = f"{n_tokens:,} tokens: the provider prefills into the server's memory"
    show(step, 0, n_tokens - 1)
    share_http_ms, shared = await _timed(
        server.share(_SLOT, provider.socket, n_tokens=n_tokens, expires_ms=int(TIMEOUT_S * 1000))
    )
    provider_prefill_ms, _ = await _timed(
        provider.prefill(
            shared.share_id,
            prefix,
            deadline=time.monotonic() + shared.expires_ms / 1000,
            progress=lambda n_filled, n_all: show(step, n_filled, n_all),
        )
    )
    adopt_http_ms, adopted = await _timed(server.adopt(_SLOT, shared.share_id, prefix))
    handed_over = await _generate(server, tokens)

    return {
        "n_tokens": n_tokens,
        "local_prefill_ms": prefilled["timings"]["prompt_ms"],
        "provider_prefill_ms": provider_prefill_ms,
        "file_save_ms": saved["timings"]["save_ms"],
        "file_save_http_ms": save_http_ms,
        "file_restore_ms": restored["timings"]["restore_ms"],
        "file_restore_http_ms": restore_http_ms,
        "file_nbytes": saved["n_written"],
        "file_cache_n": from_file.cache_n,
        "share_us": shared.t_us,
        "share_http_ms": share_http_ms,
        "adopt_us": adopted.t_us,
        "adopt_http_ms": adopt_http_ms,
        "bytes_moved": adopted.bytes_moved,
        "cache_n": handed_over.cache_n,
        "first_token_ms": handed_over.first_token_ms,
        "steady_token_ms": handed_over.steady_token_ms,
        "text_identical": plain.text == from_file.text == handed_over.text,
        "logprobs_identical": plain.logprobs == from_file.logprobs == handed_over.logprobs,
        "text": handed_over.text,
    }


# -- what the server is asked ----------------------------------------------------------------------


@dataclass(frozen=True)
class _Generated:
    """What a greedy completion gave, and what of the prompt was there already."""

    text: str
    logprobs: Any
    cache_n: int
    first_token_ms: float
    steady_token_ms: float


async def _generate(server: ServerClient, tokens: list[int]) -> _Generated:
    """Complete the whole prompt, on top of what the slot holds of it."""
    answer = await _complete(server, tokens, N_GENERATE)
    timings = answer["timings"]
    return _Generated(
        answer["content"],
        answer["completion_probabilities"],
        timings["cache_n"],
        timings["prompt_ms"],
        timings["predicted_per_token_ms"],
    )


async def _complete(server: ServerClient, tokens: list[int], n_predict: int) -> Any:
    body = {"prompt": tokens, "n_predict": n_predict, "temperature": 0, "n_probs": 1, "id_slot": _SLOT}
    return await server.post("/completion", body)


async def _action(server: ServerClient, action: str) -> Any:
    return await server.post(f"/slots/{_SLOT}?action={action}", {"filename": _FILE})


async def _timed(awaitable: Awaitable[T]) -> tuple[float, T]:
    """Wait for something; return the milliseconds it took and its result."""
    start = time.perf_counter_ns()
    result = await awaitable
    return (time.perf_counter_ns() - start) / 1e6, result
