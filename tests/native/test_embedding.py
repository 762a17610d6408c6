"""Programs that build their contexts themselves: `llama_cpp.Llama` inside `exporting()`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvshare import Decoder, LocalProtocolError, NativeError, NotShareableError, exporting
from kvshare._native import loader
from kvshare._native.context import Logits
from tests.native.handoff import ProviderProcess

pytestmark = pytest.mark.native

N_CTX = 512
TEXT = b"The lighthouse keeper wrote the same line into the book every evening: wind from the west, sea calm."


def build(path: Path, **options: Any) -> Any:
    """Build an ordinary Llama, as its own documentation says."""
    import llama_cpp  # after kvshare has loaded the library

    return llama_cpp.Llama(str(path), n_ctx=N_CTX, verbose=False, n_threads=2, n_threads_batch=2, **options)


@pytest.fixture
def opened(smollm2_path: Path) -> Iterator[Any]:
    """Return `build`, whose objects are closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_one(**options: Any) -> Any:
            llama = build(smollm2_path, **options)
            stack.callback(llama.close)
            return llama

        yield open_one


def last_logits(llama: Any) -> Logits:
    pointer = loader.load().llama.llama_get_logits_ith(llama._ctx.ctx, -1)
    logits: Logits = np.ctypeslib.as_array(pointer, shape=(llama.n_vocab(),)).copy()
    return logits


def eval_each(llama: Any, tokens: list[int]) -> list[bytes]:
    found = []
    for token in tokens:
        llama.eval([token])
        found.append(last_logits(llama).tobytes())
    return found


@pytest.mark.parametrize("flash_attn", [False, True])
def test_a_llama_goes_on_as_a_plain_one_does(
    provider: ProviderProcess, opened: Any, smollm2_path: Path, flash_attn: bool
) -> None:
    plain = opened(flash_attn=flash_attn)
    with exporting():
        llama = opened(flash_attn=flash_attn)
    prompt = plain.tokenize(TEXT)
    rest = plain.tokenize(b" Two ships", add_bos=False)
    with Decoder.wrap(llama) as decoder:
        with decoder.share(n_tokens=len(prompt)) as share:
            assert provider.serve(share, smollm2_path, prompt) == {"ok": True}
            adopted = decoder.adopt(share, prompt)
        assert (adopted.n_adopted, adopted.bytes_moved) == (len(prompt), 0)
        plain.eval(prompt)
        assert llama.n_tokens == plain.n_tokens == len(prompt)
        assert list(llama.input_ids[: len(prompt)]) == prompt
        assert eval_each(llama, rest) == eval_each(plain, rest)
        assert llama.n_tokens == len(prompt) + len(rest)
    # the wrapper was closed, the Llama is its owner's: it goes on
    assert eval_each(llama, rest) == eval_each(plain, rest)


def test_generate_goes_on_behind_the_prompt(
    provider: ProviderProcess, opened: Any, smollm2_path: Path
) -> None:
    """The high-level interface evaluates the tokens after the adopted ones only."""
    plain = opened()
    with exporting():
        llama = opened()
    prompt = plain.tokenize(TEXT)
    with Decoder.wrap(llama) as decoder, decoder.share(n_tokens=len(prompt) - 1) as share:
        assert provider.serve(share, smollm2_path, prompt[:-1]) == {"ok": True}
        decoder.adopt(share, prompt[:-1])
        plain.eval(prompt[:-1])
        evaluated: list[int] = []
        original = llama.eval

        def count(tokens: list[int]) -> None:
            evaluated.append(len(tokens))
            original(tokens)

        llama.eval = count
        found: list[int] = []
        expected: list[int] = []
        for tokens, each in ((found, llama), (expected, plain)):
            for token in each.generate(prompt, temp=0.0):
                tokens.append(token)
                if len(tokens) == 8:
                    break
        assert found == expected
        assert evaluated == [1] * len(evaluated)
        del llama.eval


def test_a_llama_that_was_built_outside(opened: Any) -> None:
    with pytest.raises(NotShareableError, match="not built while export or import was on"):
        Decoder.wrap(opened())


def test_two_llamas_in_one_block(provider: ProviderProcess, opened: Any, smollm2_path: Path) -> None:
    with exporting():
        llamas = [opened(), opened()]
    outside = opened()
    prompts = [llamas[0].tokenize(text) for text in (TEXT, TEXT[10:])]
    found = []
    for llama, prompt in zip(llamas, prompts, strict=True):
        with Decoder.wrap(llama) as decoder, decoder.share(n_tokens=len(prompt)) as share:
            assert provider.serve(share, smollm2_path, prompt) == {"ok": True}
            decoder.adopt(share, prompt)
    for llama, prompt in zip(llamas, prompts, strict=True):
        outside.reset()
        outside.eval(prompt)
        found.append(eval_each(llama, [5]))
        assert found[-1] == eval_each(outside, [5])
    assert found[0] != found[1]


def test_a_llama_that_holds_tokens(provider: ProviderProcess, opened: Any, smollm2_path: Path) -> None:
    """It says so; after a reset of the cache the handoff works, and drops nothing else."""
    with exporting():
        llama = opened()
    plain = opened()
    prompt = llama.tokenize(TEXT)
    llama.eval(prompt[:7])
    with Decoder.wrap(llama) as decoder:
        with pytest.raises(Exception, match="seq") as error:
            decoder.share(n_tokens=len(prompt))
        assert type(error.value).__name__ == "SequenceInUseError"
        assert decoder.context.n_past() == 7
        decoder.context.clear()
        with decoder.share(n_tokens=len(prompt)) as share:
            assert provider.serve(share, smollm2_path, prompt) == {"ok": True}
            decoder.adopt(share, prompt)
        plain.eval(prompt)
        assert eval_each(llama, [5, 6]) == eval_each(plain, [5, 6])


def test_blocks_do_not_nest(opened: Any) -> None:
    with exporting():
        with pytest.raises(NativeError), exporting():
            pytest.fail("a second block was entered")
        llama = opened()
    Decoder.wrap(llama).close()
    with pytest.raises(NotShareableError):  # and the block has ended
        Decoder.wrap(opened())


def test_an_error_ends_the_block(opened: Any) -> None:
    with pytest.raises(ZeroDivisionError), exporting():
        raise ZeroDivisionError
    with pytest.raises(NotShareableError):
        Decoder.wrap(opened())


def test_a_llama_that_its_program_has_closed(opened: Any) -> None:
    """What it had is freed: nothing here uses it any more, whatever is still live."""
    with exporting():
        llama = opened()
    with Decoder.wrap(llama) as decoder:
        share = decoder.share(n_tokens=16)
        llama.close()
        with pytest.raises(LocalProtocolError, match="closed"):
            decoder.share(n_tokens=16)
        with pytest.raises(LocalProtocolError, match="closed"):
            decoder.context.model.tokenize("a")
        share.release()


def test_a_model_that_was_closed_with_its_decoder(smollm2_path: Path) -> None:
    with Decoder.open(smollm2_path, n_ctx=N_CTX) as decoder:
        model = decoder.context.model
        tokens = model.tokenize("a word")
    for use in (
        lambda: model.tokenize("a word"),
        lambda: model.detokenize(tokens),
        lambda: model.check_tokens(tokens),
        lambda: model.n_vocab,
        lambda: model.has_encoder,
    ):
        with pytest.raises(LocalProtocolError, match="closed"):
            use()
