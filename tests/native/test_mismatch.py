"""Whatever differs between two sides is refused by name, before a byte is written."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from kvshare import (
    Context,
    Decoder,
    LayoutMismatchError,
    LedgerIncompleteError,
    Model,
    Offer,
    Provider,
    SemanticsMismatchError,
    fds,
    importing,
    wire,
)
from kvshare._native import signatures
from kvshare.ledger import LedgerState
from kvshare.wire import ShareHeader, ShareTemplate
from tests.native.handoff import ProviderProcess, decode_each, random_tokens, shared_bytes

pytestmark = pytest.mark.native

N_PROMPT = 40
PARAMS: dict[str, Any] = {"n_ctx": 512, "n_batch": 512, "n_ubatch": 128, "flash_attn": "on"}


@pytest.fixture
def decoder(tiny: Model) -> Iterator[Decoder]:
    with Decoder.open(tiny, **PARAMS) as opened:
        yield opened


def assert_still_shares(
    decoder: Decoder, provider: ProviderProcess, path: Path, params: dict[str, Any]
) -> None:
    """A refusal costs that share and nothing else: the next one gives what a local prefill gives."""
    tokens = random_tokens(decoder.context.model, N_PROMPT + 2)
    with decoder.share(n_tokens=N_PROMPT) as share:
        assert provider.serve(share, path, tokens[:N_PROMPT]) == {"ok": True}
        decoder.adopt(share, tokens[:N_PROMPT])
    with Context.create(decoder.context.model, **params) as local:
        local.decode(tokens[:N_PROMPT], position=0)
        here = decode_each(local, tokens[N_PROMPT:], position=N_PROMPT)
    there = decode_each(decoder.context, tokens[N_PROMPT:], position=N_PROMPT)
    assert [x.tobytes() for x in here] == [x.tobytes() for x in there]


class ChangedTemplate:
    """Encodes other headers than the share has."""

    def __init__(self, template: Any, change: Callable[[ShareHeader], ShareHeader]) -> None:
        self._template = template
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._template, name)

    def encode(self, share_id: int, cells: Any, expires_ms: int) -> bytes:
        header = self._template.header(share_id=share_id, cells=cells, expires_ms=expires_ms)
        return wire.encode(self._change(header))


def refused(
    decoder: Decoder,
    provider: ProviderProcess,
    path: Path,
    *,
    change: Callable[[ShareHeader], ShareHeader] = lambda header: header,
    **options: Any,
) -> dict[str, Any]:
    """Share with a provider that has to refuse; return what it says."""
    prompt = random_tokens(decoder.context.model, N_PROMPT)
    with decoder.share(n_tokens=N_PROMPT) as share:
        before = shared_bytes(share)
        share._template = cast("ShareTemplate", ChangedTemplate(share._template, change))
        answer = provider.serve(share, path, prompt, **options)
        record = share.ledger.snapshot()
        assert record.state is LedgerState.FAILED
        assert answer["field"] in record.error
        assert shared_bytes(share) == before
        with pytest.raises(LedgerIncompleteError, match="the provider failed"):
            decoder.adopt(share, prompt)
    assert decoder.context.n_past() == 0
    return answer


# -- layout ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field", "expected", "found"),
    [
        ({"n_ctx": 1024}, "n_ctx", 512, 1024),
        ({"type_k": "q8_0"}, "type_k", 1, 8),
        ({"type_v": "q8_0"}, "type_v", 1, 8),
        ({"flash_attn": "off"}, "flash_attn_type", 1, 0),
        ({"n_seq_max": 2}, "n_seq_max", 1, 2),
        ({"kv_unified": True}, "kv_unified", False, True),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
@pytest.mark.parametrize("allow", [False, True])
def test_a_parameter(
    decoder: Decoder,
    provider: ProviderProcess,
    tiny_path: Path,
    options: dict[str, Any],
    field: str,
    expected: object,
    found: object,
    allow: bool,
) -> None:
    """Also if other semantics are allowed: another layout never is."""
    answer = refused(decoder, provider, tiny_path, allow_other_semantics=allow, **options)
    assert answer["error"] == "LayoutMismatchError"
    assert (answer["field"], answer["expected"], answer["found"]) == (field, expected, found)
    assert_still_shares(decoder, provider, tiny_path, PARAMS)


@pytest.mark.parametrize(
    ("options", "field", "expected", "found"),
    [
        ({"n_ctx": 1024}, "caches[0].size", 512, 1024),
        ({"type_k": "q8_0"}, "caches[0].rot_k", False, True),
        ({"type_k": "bf16"}, "regions[0].tensors[0].type", "f16", "bf16"),
        ({"type_v": "bf16"}, "regions[0].tensors[1].type", "f16", "bf16"),
        ({"flash_attn": "off"}, "caches[0].v_trans", False, True),
        ({"n_seq_max": 2, "n_ctx": 1024}, "n_stream", 1, "several"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_context_of_another_layout(
    decoder: Decoder, tiny: Model, options: dict[str, Any], field: str, expected: object, found: object
) -> None:
    """A program that builds its own context: the real tensors are compared, not its flags."""
    near, far = socket.socketpair(socket.AF_UNIX)
    with near, far, decoder.share(n_tokens=N_PROMPT) as share:
        before = shared_bytes(share)
        share.send(near)
        with Offer.receive(far) as offer:
            with (
                pytest.raises(LayoutMismatchError) as error,
                importing(offer),
                Context.create(tiny, **{**PARAMS, **options}),
            ):
                pytest.fail("a context was built on memory of another layout")
            assert (error.value.field, error.value.expected, error.value.found) == (field, expected, found)
            with Provider(offer, tiny):  # the offer itself is as good as before
                pass
        assert shared_bytes(share) == before


def test_rotation_is_off_over_there(tiny: Model, tiny_path: Path, provider: ProviderProcess) -> None:
    """An environment variable that changes what the bytes of a quantized cache mean."""
    params = {**PARAMS, "type_k": "q8_0", "type_v": "q8_0"}
    with (
        fds.private_directory() as folder,
        ProviderProcess(folder, LLAMA_ATTN_ROT_DISABLE="1") as other,
        Decoder.open(tiny, **params) as decoder,
    ):
        answer = refused(decoder, other, tiny_path)
        assert answer["error"] == "LayoutMismatchError"
        assert (answer["field"], answer["expected"], answer["found"]) == ("caches[0].rot_k", True, False)
        assert_still_shares(decoder, provider, tiny_path, params)


def test_another_abi(decoder: Decoder, provider: ProviderProcess, tiny_path: Path) -> None:
    """A header as a decoder of a later ABI sends it, right in itself."""

    def change(header: ShareHeader) -> ShareHeader:
        layout = dataclasses.replace(decoder.layout, abi=signatures.ABI + 1)
        return dataclasses.replace(
            header, layout=layout.digest(), params={**header.params, "abi": signatures.ABI + 1}
        )

    answer = refused(decoder, provider, tiny_path, change=change)
    assert answer["error"] == "LayoutMismatchError"
    assert (answer["field"], answer["expected"], answer["found"]) == (
        "abi",
        signatures.ABI + 1,
        signatures.ABI,
    )
    assert_still_shares(decoder, provider, tiny_path, PARAMS)


# -- semantics ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_weights(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shapes, some of whose weights are others."""
    path = tmp_path_factory.mktemp("models") / "other.gguf"
    shutil.copyfile(tiny_path, path)
    with path.open("r+b") as file:
        # in the middle of the file are the weights; the low bytes of f32 numbers change them a little
        middle = path.stat().st_size // 2 // 4096 * 4096
        for offset in range(middle, middle + (1 << 20), 4):
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0xFF]))
    return path


def test_another_model_of_the_same_shapes(
    decoder: Decoder, provider: ProviderProcess, tiny_path: Path, other_weights: Path
) -> None:
    answer = refused(decoder, provider, other_weights)
    assert (answer["error"], answer["field"]) == ("SemanticsMismatchError", "model.weights")
    assert answer["expected"] != answer["found"]
    assert_still_shares(decoder, provider, tiny_path, PARAMS)


def test_other_weights_if_both_sides_allow_them(
    decoder: Decoder, provider: ProviderProcess, tiny: Model, other_weights: Path
) -> None:
    """The cells are those of the other model then, exactly."""
    tokens = random_tokens(tiny, N_PROMPT + 2)
    prompt, rest = tokens[:N_PROMPT], tokens[N_PROMPT:]
    for decoder_allows in (False, True):
        with decoder.share(n_tokens=N_PROMPT) as share:
            answer = provider.serve(share, other_weights, prompt, allow_other_semantics=True)
            assert answer == {"ok": True}
            if decoder_allows:
                decoder.adopt(share, prompt, allow_other_semantics=True)
            else:
                with pytest.raises(Exception, match="semantics") as error:
                    decoder.adopt(share, prompt)
                assert type(error.value).__name__ == "LedgerDigestError"
                assert decoder.context.n_past() == 0
    there = decode_each(decoder.context, rest, position=N_PROMPT)
    with Context.create(tiny, **PARAMS) as local:
        local.decode(prompt, position=0)
        here = decode_each(local, rest, position=N_PROMPT)
    assert all(a.tobytes() != b.tobytes() for a, b in zip(here, there, strict=True))


@pytest.mark.parametrize(
    ("options", "field", "found"),
    [
        ({"rope_freq_base": 20000.0}, "rope_freq_base", "20000"),
        ({"rope_freq_scale": 0.5}, "rope_freq_scale", "0.5"),
        ({"yarn_ext_factor": 1.0}, "yarn_ext_factor", "1"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_another_position_encoding(
    decoder: Decoder,
    provider: ProviderProcess,
    tiny_path: Path,
    options: dict[str, Any],
    field: str,
    found: str,
) -> None:
    answer = refused(decoder, provider, tiny_path, **options)
    assert (answer["error"], answer["field"], answer["found"]) == ("SemanticsMismatchError", field, found)
    assert answer["expected"] != found
    assert_still_shares(decoder, provider, tiny_path, PARAMS)


def test_another_llama_cpp(decoder: Decoder, provider: ProviderProcess, tiny_path: Path) -> None:
    """A header as a decoder of a later llama.cpp sends it, right in itself."""

    def change(header: ShareHeader) -> ShareHeader:
        semantics = json.loads(str(header.params["semantics"]))
        semantics["upstream"] = "f" * 40
        text = json.dumps(semantics, sort_keys=True, separators=(",", ":"))
        return dataclasses.replace(
            header,
            semantics=hashlib.sha256(text.encode()).hexdigest(),
            params={**header.params, "semantics": text},
        )

    answer = refused(decoder, provider, tiny_path, change=change)
    assert (answer["error"], answer["field"]) == ("SemanticsMismatchError", "upstream")
    assert answer["expected"] == "f" * 40
    assert_still_shares(decoder, provider, tiny_path, PARAMS)


def test_a_model_of_another_architecture(
    decoder: Decoder, provider: ProviderProcess, tiny_path: Path, archs_path: Path
) -> None:
    answer = refused(decoder, provider, archs_path / "qwen2-dense.gguf")
    assert answer["error"] in (LayoutMismatchError.__name__, SemanticsMismatchError.__name__)
    assert answer["field"]
    assert_still_shares(decoder, provider, tiny_path, PARAMS)


def test_a_control_vector_of_the_decoder(decoder: Decoder, tiny: Model) -> None:
    """What shares have in common is kept, but not the semantics of a context that has changed."""
    llama, context = decoder.context.library.llama, decoder.context.pointer
    n_embd = llama.llama_model_n_embd(tiny.pointer)
    n_layer = llama.llama_model_n_layer(tiny.pointer)
    vector = (ctypes.c_float * (n_embd * (n_layer - 1)))(*[0.5] * (n_embd * (n_layer - 1)))

    def semantics() -> str:
        with decoder.share(n_tokens=N_PROMPT) as share:
            text = str(share.header.params["semantics"])
            assert share.header.semantics == hashlib.sha256(text.encode()).hexdigest()
            return share.header.semantics

    plain = semantics()
    assert semantics() == plain
    assert llama.llama_set_adapter_cvec(context, vector, len(vector), n_embd, 1, n_layer) == 0
    assert semantics() != plain
    assert llama.llama_set_adapter_cvec(context, None, 0, n_embd, 1, n_layer) == 0
    assert semantics() == plain
