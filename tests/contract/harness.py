"""Decoders and providers as the contract checks want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from kvshare import Context, Decoder, Model, Offer, Provider, wire
from kvshare.testing import FakeDecoder, FakeProvider

NO_HEADERS: Mapping[int, wire.ShareHeader] = MappingProxyType({})


class FakeHarness:
    """What needs no library."""

    def __init__(self) -> None:
        self.decoder: Any = FakeDecoder()

    def tokens(self, n: int, seed: int = 0) -> list[int]:
        return [(7 * i + 31 * seed) % 100 for i in range(n)]

    def provider(self, offer: Offer) -> AbstractContextManager[Any]:
        return FakeProvider(offer)

    def answer(self, seq_id: int) -> bytes:
        found: bytes = self.decoder.logits(seq_id)
        return found

    def go_on(self, seq_id: int, tokens: Sequence[int]) -> None:
        self.decoder.extend(tokens, seq_id)

    def n_past(self, seq_id: int) -> int:
        found: int = self.decoder.n_past(seq_id)
        return found

    def expected(
        self,
        tokens: Sequence[int],
        seq_id: int,
        header: wire.ShareHeader,
        *,
        cuts: Sequence[int] = (),
        headers: Mapping[int, wire.ShareHeader] = NO_HEADERS,
    ) -> bytes:
        with FakeDecoder() as local:
            local.prefill(tokens)
            return local.logits()

    def touch(self, seq_id: int, offer: Offer) -> None:
        for layer in offer.views():
            for view in (layer.k, layer.v):
                assert view is not None
                for cells in self.decoder._sequences[seq_id].cells:
                    view[cells.rows] += 1

    def clear(self, seq_id: int) -> None:
        self.decoder.clear(seq_id)

    def close(self) -> None:
        self.decoder.close()


PARAMS: dict[str, Any] = {
    "n_ctx": 1024,
    "n_batch": 512,
    "n_ubatch": 16,
    "n_seq_max": 2,
    "kv_unified": True,
    "n_threads": 1,
}


class NativeHarness:
    """llama.cpp on a tiny model; the caller keeps the model, and all contexts share it."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.decoder: Any = None

    def open(self, flash_attn: str) -> NativeHarness:
        self.params = {**PARAMS, "flash_attn": flash_attn}
        self.decoder = Decoder.open(self.model, **self.params)
        return self

    def tokens(self, n: int, seed: int = 0) -> list[int]:
        return [(7 * i + 31 * seed) % 100 for i in range(n)]

    def provider(self, offer: Offer) -> AbstractContextManager[Any]:
        return Provider(offer, self.model, n_threads=1)

    def answer(self, seq_id: int) -> bytes:
        return self._next(self.decoder.context, seq_id)

    def go_on(self, seq_id: int, tokens: Sequence[int]) -> None:
        n_past = self.n_past(seq_id)
        for i, token in enumerate(tokens):
            self.decoder.context.decode([token], position=n_past + i, seq_id=seq_id)

    def n_past(self, seq_id: int) -> int:
        found: int = self.decoder.context.n_past(seq_id)
        return found

    def expected(
        self,
        tokens: Sequence[int],
        seq_id: int,
        header: wire.ShareHeader,
        *,
        cuts: Sequence[int] = (),
        headers: Mapping[int, wire.ShareHeader] = NO_HEADERS,
    ) -> bytes:
        from kvshare._native import signatures

        headers = {0: header, **headers}
        with Context.create(self.model, **self.params) as local:
            confine = local.library.lib.llama_kv_share_confine
            for start, end in pairwise((0, *cuts, len(tokens))):
                if start in headers:
                    cells = enumerate(headers[start].cells)
                    ranges = [signatures.Range(i, a, b) for i, cache in cells for a, b in cache]
                    confine(local.handle, seq_id, (signatures.Range * len(ranges))(*ranges), len(ranges))
                elif headers.keys() > {0}:  # an answer, where the sequence goes on by itself
                    confine(local.handle, seq_id, None, 0)
                local.decode(tokens[start:end], position=start, seq_id=seq_id)
            return self._next(local, seq_id)

    def _next(self, context: Context, seq_id: int) -> bytes:
        """Decode a token behind the sequence, and take it back."""
        from kvshare._native import signatures

        n_past = context.n_past(seq_id)
        # at a cell that is free in either context, wherever their write heads are
        cell = (signatures.Range * 1)(signatures.Range(0, 1000, 1001))
        context.library.lib.llama_kv_share_confine(context.handle, seq_id, cell, 1)
        context.decode([1], position=n_past, seq_id=seq_id, logits=True)
        logits = context.logits().tobytes()
        context.library.llama.llama_memory_seq_rm(context.memory, seq_id, n_past, -1)
        context.library.lib.llama_kv_share_confine(context.handle, seq_id, None, 0)
        return logits

    def touch(self, seq_id: int, offer: Offer) -> None:
        ((first, last),) = offer.header.cells[0]  # all else is the sequence's, or free
        for layer in offer.views():
            for view in (layer.k, layer.v):
                assert view is not None
                view[:first] += 1
                view[last:] += 1

    def clear(self, seq_id: int) -> None:
        self.decoder.context.clear(seq_id)

    def close(self) -> None:
        self.decoder.close()
