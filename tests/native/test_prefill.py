"""`kvshare prefill` as a user runs it: into a decoder's memory, and into a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare import Context, Decoder, LedgerIncompleteError, Model, Share, fds
from kvshare.cli import provider_options
from kvshare.ledger import LedgerState
from tests.native.handoff import decode_each, environment, random_tokens, send

pytestmark = pytest.mark.native

TEXT = "The lighthouse keeper wrote the same line into the book every evening, in ink, in a small hand."
N_REST = 3


@contextlib.contextmanager
def prefill(*arguments: str, stdin: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start the command; kill it at the end if it still runs."""
    with subprocess.Popen(
        [sys.executable, "-m", "kvshare", "prefill", "--threads", "1", *arguments],
        env=environment(),
        stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        if stdin is not None:
            assert process.stdin is not None
            process.stdin.write(stdin)
            process.stdin.close()
            process.stdin = None
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: str, stdin: str | None = None) -> tuple[int, dict[str, Any], str]:
    """Run the command with `--json`; return its exit status, its object, and stderr."""
    with prefill("--json", *arguments, stdin=stdin) as process:
        out, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    return process.returncode, json.loads(out) if out else {}, err


def ids(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


def assert_continues_alike(
    decoder: Context, model: Model, tokens: list[int], rest: list[int], **params: Any
) -> None:
    with Context.create(model, **params) as local:
        local.decode(tokens, position=0)
        here = decode_each(local, rest, position=len(tokens))
    there = decode_each(decoder, rest, position=len(tokens))
    assert [each.tobytes() for each in here] == [each.tobytes() for each in there]


# -- into a decoder's memory ---------------------------------------------------------------------


def test_into_memory(tiny: Model, tiny_path: Path, folder: Path) -> None:
    params = {"n_ctx": 512, "n_ubatch": 64, "n_threads": 1}
    tokens = random_tokens(tiny, 300 + N_REST)
    path = folder / "p.sock"
    with (
        Decoder.open(tiny, **params) as decoder,
        decoder.share(n_tokens=300) as share,
        prefill(
            "--json", "--model", str(tiny_path), "--fds", str(path), "--tokens", ids(tokens[:300])
        ) as job,
    ):
        send(share, path, job)
        share.wait()
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0
        assert decoder.adopt(share, tokens[:300]).bytes_moved == 0
        assert_continues_alike(decoder.context, tiny, tokens[:300], tokens[300:], **params)
    report = json.loads(out)
    assert report.pop("prefill_ms") > 0
    assert report == {
        "ok": True,
        "transport": "fds",
        "share_id": share.share_id,
        "seq_id": 0,
        "n_tokens": 300,
    }
    assert "prefilling" in err
    assert not path.exists()


def test_a_text_on_standard_input(smollm2: Model, smollm2_path: Path, folder: Path) -> None:
    """As an engine wants it: all but the last token, for which the decoder computes the logits."""
    tokens = smollm2.tokenize(TEXT)
    path = folder / "p.sock"
    with (
        Decoder.open(smollm2, n_ctx=256, n_threads=1) as decoder,
        decoder.share(n_tokens=len(tokens)) as share,
        prefill("--model", str(smollm2_path), "--fds", str(path), "--all-but-last", stdin=TEXT) as job,
    ):
        send(share, path, job)
        share.wait()
        decoder.adopt(share, tokens[:-1])
        out, _ = job.communicate(timeout=60)
        assert job.returncode == 0
        assert f"{len(tokens) - 1} tokens in " in out
        assert_continues_alike(decoder.context, smollm2, tokens[:-1], tokens[-1:], n_ctx=256, n_threads=1)


def refused(decoder: Decoder, folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Share with a command that has to refuse; return its status and its error."""
    path = folder / "p.sock"
    with (
        decoder.share(n_tokens=8) as share,
        prefill("--json", "--fds", str(path), "--tokens", "1,2,3", *arguments) as job,
    ):
        send(share, path, job)
        with pytest.raises(LedgerIncompleteError, match="the provider failed"):
            share.wait()
        assert share.ledger.snapshot().state is LedgerState.FAILED
        out, _ = job.communicate(timeout=60)
    assert not path.exists()
    error: dict[str, Any] = json.loads(out)["error"]
    return job.returncode, error


@pytest.mark.parametrize(
    ("option", "field", "expected", "found"),
    [
        (("--n-ctx", "1024"), "n_ctx", 512, 1024),
        (("--type-k", "q8_0"), "type_k", 1, 8),
        (("--flash-attn", "off"), "flash_attn_type", 1, 0),
        (("--kv-unified",), "kv_unified", False, True),
    ],
)
def test_a_parameter_that_differs_is_named(
    tiny: Model, tiny_path: Path, folder: Path, option: tuple[str, ...], field: str, expected: Any, found: Any
) -> None:
    with Decoder.open(tiny, n_ctx=512, flash_attn="on") as decoder:
        status, error = refused(decoder, folder, "--model", str(tiny_path), *option)
    assert status == 11
    assert error["type"] == "LayoutMismatchError"
    assert (error["field"], error["expected"], error["found"]) == (field, expected, found)


def test_another_model_is_named(tiny: Model, archs_path: Path, folder: Path) -> None:
    with Decoder.open(tiny, n_ctx=512) as decoder:
        status, error = refused(decoder, folder, "--model", str(archs_path / "qwen2-dense.gguf"))
    assert status == 11
    assert error["field"]


def test_more_tokens_than_cells(tiny: Model, tiny_path: Path, folder: Path) -> None:
    path = folder / "p.sock"
    with (
        Decoder.open(tiny, n_ctx=1024) as decoder,
        decoder.share(n_tokens=200) as share,
        prefill("--model", str(tiny_path), "--fds", str(path), "--tokens", ids([1] * 600)) as job,
    ):
        send(share, path, job)
        _, err = job.communicate(timeout=60)
        assert job.returncode == 12
        assert "600 tokens do not fit into a lease of 2" in err


def test_nobody_comes(tiny_path: Path, folder: Path) -> None:
    path = folder / "p.sock"
    status, report, _ = run(
        "--model", str(tiny_path), "--fds", str(path), "--tokens", "1", "--timeout", "0.1"
    )
    assert status == 13
    assert "nobody had connected" in report["error"]["message"]
    assert not path.exists()


def test_a_socket_in_use(tiny_path: Path, folder: Path) -> None:
    with fds.listening(folder / "p.sock"):
        status, report, _ = run("--model", str(tiny_path), "--fds", str(folder / "p.sock"), "--tokens", "1")
        assert status == 12
        assert "another process listens" in report["error"]["message"]
        assert (folder / "p.sock").exists()  # it is the other one's


def wait_until_filling(share: Share, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 60
    while share.ledger.snapshot().n_filled == 0:
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_the_middle(
    smollm2: Model, smollm2_path: Path, folder: Path, number: signal.Signals, status: int
) -> None:
    tokens = (smollm2.tokenize(TEXT) * 200)[:3000]
    path = folder / "p.sock"
    with (
        Decoder.open(smollm2, n_ctx=3072, n_ubatch=16) as decoder,
        decoder.share(n_tokens=3000) as share,
        prefill("--model", str(smollm2_path), "--fds", str(path), "--tokens", ids(tokens)) as job,
    ):
        send(share, path, job)
        wait_until_filling(share, job)
        job.send_signal(number)
        with pytest.raises(LedgerIncompleteError, match="the provider was stopped"):
            share.wait()
        record = share.ledger.snapshot()
        assert record.state is LedgerState.FAILED
        assert 0 < record.n_filled < 3000
        job.communicate(timeout=60)
        assert job.returncode == status
        assert not path.exists()


def test_cpus(tiny_path: Path, folder: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    path = folder / "p.sock"
    with prefill("--model", str(tiny_path), "--fds", str(path), "--tokens", "1", "--cpus", str(cpu)) as job:
        end = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        for task in Path(f"/proc/{job.pid}/task").iterdir():
            assert os.sched_getaffinity(int(task.name)) == {cpu}
    status, report, _ = run(
        "--model", str(tiny_path), "--fds", str(path), "--tokens", "1", "--cpus", "0,4095"
    )
    assert status == 12
    assert "4095" in report["error"]["message"]


# -- into a file -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "params"),
    [
        ((), {}),
        (
            ("--type-k", "q8_0", "--type-v", "q8_0", "--flash-attn", "on"),
            {"type_k": "q8_0", "type_v": "q8_0"},
        ),
        (("--flash-attn", "off", "--n-seq-max", "4"), {"flash_attn": "off", "n_seq_max": 4}),
        (("--n-ctx", "1024", "--n-ubatch", "64"), {"n_ubatch": 64}),
    ],
)
def test_into_a_file(
    tiny: Model, tiny_path: Path, tmp_path: Path, options: tuple[str, ...], params: dict[str, Any]
) -> None:
    """It is the file that llama.cpp writes here, and goes on as llama.cpp goes on with it."""
    tokens = random_tokens(tiny, 300 + N_REST)
    prompt, rest = tokens[:300], tokens[300:]
    ours, own, out = tmp_path / "t.json", tmp_path / "own.bin", tmp_path / "out.bin"
    ours.write_text(json.dumps(prompt))
    out.write_bytes(b"what was there before")
    status, report, err = run(
        "--model", str(tiny_path), "--out", str(out), "--tokens-file", str(ours), *options
    )
    assert status == 0, err
    assert min(report.pop("prefill_ms"), report.pop("save_ms")) > 0
    assert report == {
        "ok": True,
        "transport": "file",
        "path": str(out),
        "nbytes": out.stat().st_size,
        "n_tokens": 300,
    }
    assert out.stat().st_mode & 0o777 == 0o600
    params = {"n_ctx": 512 * params.get("n_seq_max", 1), "n_threads": 1, **params}
    with Context.create(tiny, **params) as local:
        local.decode(prompt, position=0)
        local.save(own, prompt)
    assert out.read_bytes() == own.read_bytes()
    answers = []
    for file in (out, own):
        with Context.create(tiny, **params) as restored:
            assert restored.restore(file) == prompt
            answers.append([each.tobytes() for each in decode_each(restored, rest, position=300)])
    assert answers[0] == answers[1]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.bin", "own.bin", "t.json"]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (("--tokens", "1,99999999"), 12, "token 1 is 99999999, which is not in [0, "),
        (("--tokens", "-1"), 12, "token 0 is -1"),
        (("--tokens", "7", "--all-but-last"), 12, "there are no tokens"),
        (("--tokens-file", __file__), 12, "is not JSON"),
        (("--tokens-file", "/nonexistent"), 1, "No such file"),
        (("--file", "/nonexistent"), 1, "No such file"),
        (("--tokens", "1,2,3", "--n-ctx", "256", "--n-seq-max", "300"), 17, "llama_init_from_model"),
        (("--tokens", ids(list(range(90)) * 3), "--n-ctx", "256"), 12, "do not fit into a context"),
        (("--tokens", "1", "--model", "/nonexistent.gguf"), 18, "no such model file"),
        (("--tokens", "1", "--model", __file__), 18, "is not a GGUF file"),
        (("--tokens", "1", "--out", "/nonexistent/x"), 12, "there is no folder /nonexistent"),
        (("--tokens", "1", "--out", "/tmp"), 12, "is a folder"),
    ],
)
def test_what_is_refused_leaves_the_file_as_it_was(
    tiny_path: Path, tmp_path: Path, arguments: tuple[str, ...], status: int, text: str
) -> None:
    out = tmp_path / "out.bin"
    out.write_bytes(b"before")
    found, report, err = run("--model", str(tiny_path), "--out", str(out), *arguments)
    assert found == status, (report, err)
    assert text in report["error"]["message"]
    assert out.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [out]


def test_a_model_without_a_tokenizer(tiny_path: Path, tmp_path: Path) -> None:
    """llama.cpp itself would end the process."""
    key = b"tokenizer.ggml.model" + (8).to_bytes(4, "little") + (4).to_bytes(8, "little")
    content = tiny_path.read_bytes()
    assert content.count(key + b"test") == 1
    model = tmp_path / "none.gguf"
    model.write_bytes(content.replace(key + b"test", key + b"none"))
    status, report, _ = run("--model", str(model), "--out", str(tmp_path / "o"), "--prompt", "hello")
    assert status == 18
    assert report["error"]["message"] == "this model has no tokenizer"
    status, report, err = run("--model", str(model), "--out", str(tmp_path / "o"), "--tokens", "1,2")
    assert status == 0, (report, err)


def test_a_list_of_something_else(tiny_path: Path, tmp_path: Path) -> None:
    for content in ("{}", "[1.5]", "[true]", '["1"]', "1"):
        (tmp_path / "t.json").write_text(content)
        status, report, _ = run(
            "--model", str(tiny_path), "--out", str(tmp_path / "o"), "--tokens-file", str(tmp_path / "t.json")
        )
        assert status == 12
        assert "is not a list of integers" in report["error"]["message"]


def test_a_disk_that_is_full(tiny: Model) -> None:
    with Context.create(tiny, n_ctx=256) as context:
        context.decode([1, 2, 3], position=0)
        with pytest.raises(Exception, match="llama_state_seq_save_file") as error:
            context.save("/dev/full", [1, 2, 3])
        assert type(error.value).__name__ == "NativeError"


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--fds", "s", "--out", "f"),
        ("--out", "f", "--prompt", "a", "--tokens", "1"),
        ("--out", "f", "--tokens", "1,x"),
        ("--out", "f", "--cpus", "3-1"),
        ("--out", "f", "--timeout", "-1"),
        ("--out", "f", "--type-k", "f17"),
        ("--out", "f", "--threads", "0"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    with prefill("--model", "m.gguf", *arguments) as job:
        _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "usage: kvshare" in err


def test_types_are_those_of_the_library() -> None:
    from kvshare._native.context import TYPES

    assert set(provider_options.CACHE_TYPES) == set(TYPES)


def test_the_command_of_its_own() -> None:
    script = "import sys; from kvshare.cli.prefill import script; sys.exit(script())"
    done = subprocess.run(
        [sys.executable, "-c", script, "--help"], capture_output=True, text=True, check=True
    )
    assert "--fds SOCKET" in done.stdout
