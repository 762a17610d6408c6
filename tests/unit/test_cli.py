"""The command's shell: exit codes, errors as text and as JSON, help."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from types import ModuleType

import pytest

import kvshare.cli.build
from kvshare import errors
from kvshare.cli import COMMANDS, main

FAMILIES = {
    errors.LibraryNotFoundError("gone"): 10,
    errors.LayoutMismatchError("k.type", "f16", "q8_0"): 11,
    errors.RemoteProtocolError("bad"): 12,
    errors.PeerClosedError("gone"): 13,
    errors.DescriptorError("short"): 14,
    errors.LedgerDigestError("differs"): 15,
    errors.NoFreeCellsError("full"): 16,
    errors.NativeError("f", -1, "no"): 17,
    errors.ModelError("cut"): 18,
    errors.BuildError("no compiler", hint="install one"): 20,
    errors.PatchError("wrong tree"): 21,
    PermissionError(13, "Permission denied", "/x"): 1,
}

FIELDS: dict[type[Exception], dict[str, str]] = {
    errors.LayoutMismatchError: {"field": "k.type", "expected": "f16", "found": "q8_0"}
}


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(kvshare.cli.build, "run", run)


@pytest.mark.parametrize("error", FAMILIES, ids=lambda error: type(error).__name__)
def test_error_is_one_line_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    fail_with(monkeypatch, error)
    assert main(["build"]) == FAMILIES[error]
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[0] == f"kvshare: error: {error}"
    hint = getattr(error, "hint", None)
    assert lines[1:] == ([f"hint: {hint}"] if hint else [])

    assert main(["build", "--json"]) == FAMILIES[error]
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out) == {
        "ok": False,
        "error": {
            "type": type(error).__name__,
            "message": str(error),
            "hint": hint,
            "exit_code": FAMILIES[error],
            **FIELDS.get(type(error), {}),
        },
    }


def test_every_family_has_a_code_of_its_own() -> None:
    families = [f for f in errors.KvshareError.__subclasses__() if f.__module__ == "kvshare.errors"]
    assert len({family.exit_code for family in families}) == len(families)
    assert {family.exit_code for family in families} == set(FAMILIES.values()) - {1}


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fail_with(monkeypatch, KeyboardInterrupt())
    assert main(["build"]) == 130
    assert capsys.readouterr().err == "kvshare: interrupted\n"


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["build"])


def test_broken_pipe_is_quiet() -> None:
    script = "import sys; from kvshare.cli import main; sys.exit(main(['patch', 'check', '/', '--json']))"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nope"],
        ["build", "--jobs", "0"],
        ["build", "--jobs", "x"],
        ["patch", "eat", "."],
        ["prefix", "serve", "--listen", "p.sock", "--max-bytes", "4GB"],
        ["prefill", "--model", "m.gguf", "--fds", "p.sock", "--tokens", "1,x"],
    ],
)
def test_wrong_usage(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "usage: kvshare" in said
    assert "invalid _" not in said


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_has_examples(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"] if command else ["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    for name in COMMANDS if command is None else ["--json", "--log-level"]:
        assert name in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"kvshare {kvshare.__version__}\n"


def test_every_command_module_has_the_two_functions() -> None:
    for name in COMMANDS:
        module = sys.modules[f"kvshare.cli.{name}"]
        assert isinstance(module, ModuleType)
        assert callable(module.register)
        assert callable(module.run)
