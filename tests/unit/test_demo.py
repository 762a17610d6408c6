"""`kvshare demo` when one of its processes fails: what that one says is what the user reads."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from kvshare.cli.demo import _Child
from kvshare.errors import KvshareError, PeerClosedError

ERROR = json.dumps({"event": "error", "message": "no cells", "exit_code": 16, "hint": None})
Make = Callable[[str], _Child]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a child process that runs some Python."""
    python = sys.executable

    def made(code: str) -> _Child:
        program = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        program.write_text(f"#!{python}\nimport time\n{textwrap.dedent(code)}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        return _Child("decoder", [], dict(os.environ))

    return made


def test_a_decoder_that_fails_while_the_provider_waits(make: Make) -> None:
    with make("input()") as provider, make(f"print('''{ERROR}''')") as decoder:
        with pytest.raises(KvshareError, match="decoder: no cells") as caught:
            provider.wait_for("prefilled", print, beside=decoder)
        assert caught.value.exit_code == 16


def test_a_decoder_that_dies_while_the_provider_waits(make: Make) -> None:
    with (
        make("input()") as provider,
        make("raise SystemExit(9)") as decoder,
        pytest.raises(PeerClosedError, match="ended with status 9"),
    ):
        provider.wait_for("prefilled", print, beside=decoder)


def test_a_child_that_died_before_it_was_told_to_go_on(make: Make) -> None:
    with make(f"print('''{ERROR}''')") as child:
        child.process.wait()
        with pytest.raises(KvshareError, match="no cells"):
            child.say("go")


def test_what_a_child_says_early_is_not_lost(make: Make) -> None:
    decoder_says = """
        print('{"event": "step", "n": 1}', flush=True)
        print('{"event": "run", "n": 2}', flush=True)
        input()
    """
    provider_says = """
        input()
        for n in range(3):
            print('{"event": "progress", "n": %d}' % n)
        print('{"event": "prefilled"}', flush=True)
        input()
    """
    shown: list[object] = []
    with make(provider_says) as provider, make(decoder_says) as decoder:
        while not decoder._early:
            decoder._early.append(decoder._read())
        provider.say("go")
        assert provider.wait_for("prefilled", shown.append, beside=decoder) == {"event": "prefilled"}
        assert [decoder.next()["n"], decoder.next()["n"]] == [1, 2]
        assert len(shown) == 3
        for child in (provider, decoder):
            child.say("end")
