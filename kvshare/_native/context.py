"""Models and contexts of llama.cpp, as thin as the handoff needs them.

Source: `llama_model_load_from_file`, `llama_init_from_model`, `llama_decode` of llama.h.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvshare import models
from kvshare._native import loader, signatures
from kvshare.errors import LocalProtocolError, ModelError, NativeError

FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
"""Names of enum llama_flash_attn_type."""

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
"""Names of the enum ggml_type values that a cache may have."""

_VOCAB_TYPE_NONE = 0  # enum llama_vocab_type

Logits = npt.NDArray[np.float32]


class Model:
    """A llama.cpp model.

    *Ownership*: contexts keep their model alive; `close` refuses while one is open.
    """

    def __init__(self, library: loader.Library, pointer: Any, *, owned: bool, owner: Any = None) -> None:
        self.library = library
        self._pointer = pointer
        self._owned = owned
        self._owner = owner
        self._contexts: weakref.WeakSet[Context] = weakref.WeakSet()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        n_gpu_layers: int = 0,
        main_gpu: int | None = None,
        library: loader.Library | None = None,
    ) -> Model:
        """Load a GGUF file.

        Args:
            path: the file.
            n_gpu_layers: layers to put on devices, -1 for all; 0 keeps all on the host.
            main_gpu: the device that all of these go to, by llama.cpp's number; None spreads them over all
                devices that this process sees.
            library: a loaded library; None loads the default one.

        Raises:
            ModelError: missing, not a GGUF, truncated, or refused by llama.cpp.
        """
        models.check_gguf(Path(path))
        library = library or loader.load()
        params = library.llama.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        if main_gpu is not None:
            params.split_mode = library.llama.LLAMA_SPLIT_MODE_NONE
            params.main_gpu = main_gpu
        pointer = library.llama.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise ModelError(
                f"llama.cpp cannot load {path}",
                hint="its log says why: --log-level debug, or logging for `kvshare.llama`",
            )
        return cls(library, pointer, owned=True)

    @property
    def pointer(self) -> Any:
        """The llama_model pointer, of `llama_cpp`'s type."""
        if self._pointer is None or _is_closed(self._owner):
            raise LocalProtocolError("this model is closed")
        return self._pointer

    @property
    def _vocab(self) -> Any:
        return self.library.llama.llama_model_get_vocab(self.pointer)

    @property
    def n_vocab(self) -> int:
        """Number of tokens in the vocabulary."""
        return int(self.library.llama.llama_vocab_n_tokens(self._vocab))

    @property
    def has_encoder(self) -> bool:
        """Whether prompts go through an encoder first."""
        return bool(self.library.llama.llama_model_has_encoder(self.pointer))

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Check that there are tokens, and that the model has all of them.

        Raises:
            LocalProtocolError: there are none, or one is not in `[0, n_vocab)`.
        """
        if len(tokens) == 0:
            raise LocalProtocolError("there are no tokens")
        n_vocab = self.n_vocab
        for i, token in enumerate(tokens):
            if not 0 <= token < n_vocab:
                raise LocalProtocolError(f"token {i} is {token}, which is not in [0, {n_vocab})")

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Return the token ids of a text.

        Raises:
            ModelError: the model has no tokenizer.
        """
        # llama.cpp would end the process
        if self.library.llama.llama_vocab_type(self._vocab) == _VOCAB_TYPE_NONE:
            raise ModelError("this model has no tokenizer", hint="give the prompt as token ids")
        data = text.encode()
        size = len(data) + 16
        for _ in range(2):
            buffer = (ctypes.c_int32 * size)()
            n = self.library.llama.llama_tokenize(
                self._vocab, data, len(data), buffer, size, add_special, parse_special
            )
            if n >= 0:
                return list(buffer[:n])
            size = -n
        raise NativeError("llama_tokenize", n, "the text cannot be tokenized")

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        size = 16 * len(tokens) + 64
        for _ in range(2):
            buffer = ctypes.create_string_buffer(size)
            n = self.library.llama.llama_detokenize(self._vocab, ids, len(tokens), buffer, size, False, True)
            if n >= 0:
                return buffer.raw[:n].decode(errors="replace")
            size = -n
        raise NativeError("llama_detokenize", n, "the tokens have no text")

    def close(self) -> None:
        """Free the model; idempotent.

        Raises:
            LocalProtocolError: a context of it is still open.
        """
        if self._pointer is None:
            return
        if self._owned:
            if any(not context.closed for context in self._contexts):
                raise LocalProtocolError("close the contexts of a model before the model")
            self.library.llama.llama_model_free(self._pointer)
        self._pointer = None

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_closed(owner: Any) -> bool:
    """Whether a `llama_cpp.Llama` has freed what it had."""
    context = getattr(owner, "_ctx", None)
    return context is not None and context.ctx is None


class Context:
    """A llama.cpp context with one cache.

    *Ownership*: frees the context in `close` if it was created here; a wrapped one stays its owner's,
    which is kept alive as long as the wrapper.
    """

    def __init__(self, model: Model, pointer: Any, *, owner: object = None) -> None:
        self.model = model
        self.library = model.library
        self._pointer = pointer
        self._handle = ctypes.cast(pointer, signatures.ContextPointer)
        self._owner = owner
        model._contexts.add(self)

    @classmethod
    def create(
        cls,
        model: Model,
        *,
        n_ctx: int = 4096,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        kv_unified: bool = False,
        type_k: str | int = "f16",
        type_v: str | int = "f16",
        flash_attn: str | int = "auto",
        swa_full: bool = False,
        offload_kqv: bool = True,
        n_threads: int | None = None,
        **others: Any,
    ) -> Context:
        """Create a context of a model.

        Args:
            model: the model, kept alive.
            n_ctx: cells of the cache, over all streams.
            n_batch: most tokens of one decode call.
            n_ubatch: most tokens of one graph.
            n_seq_max: number of sequences.
            kv_unified: one stream of cells for all sequences instead of one each.
            type_k: ggml type of the keys, by name or number.
            type_v: ggml type of the values.
            flash_attn: `auto`, `on` or `off`, or the number of enum llama_flash_attn_type.
            swa_full: give a sliding-window cache the full size.
            offload_kqv: keep the cache on the device of its layers.
            n_threads: compute threads; None takes the CPUs that this process may run on.
            others: further fields of llama_context_params.

        Raises:
            NativeError: llama.cpp refuses; its log says why.
        """
        llama = model.library.llama
        params = llama.llama_context_default_params()
        threads = n_threads or len(os.sched_getaffinity(0))
        fields: dict[str, Any] = {
            "n_ctx": n_ctx,
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "n_seq_max": n_seq_max,
            "kv_unified": kv_unified,
            "type_k": TYPES[type_k] if isinstance(type_k, str) else type_k,
            "type_v": TYPES[type_v] if isinstance(type_v, str) else type_v,
            "flash_attn_type": FLASH_ATTN[flash_attn] if isinstance(flash_attn, str) else flash_attn,
            "swa_full": swa_full,
            "offload_kqv": offload_kqv,
            "n_threads": threads,
            "n_threads_batch": threads,
            **others,
        }
        for name, value in fields.items():
            if not hasattr(params, name):
                raise LocalProtocolError(f"llama_context_params has no field {name}")
            setattr(params, name, value)
        pointer = llama.llama_init_from_model(model.pointer, params)
        if not pointer:
            raise NativeError(
                "llama_init_from_model",
                0,
                "llama.cpp cannot create a context with these parameters",
                hint="its log says why: --log-level debug, or logging for `kvshare.llama`",
            )
        return cls(model, pointer)

    @property
    def closed(self) -> bool:
        """Whether `close` was called, here or by the owner."""
        return self._pointer is None or _is_closed(self._owner)

    @property
    def pointer(self) -> Any:
        """The llama_context pointer, of `llama_cpp`'s type."""
        if self.closed:
            raise LocalProtocolError("this context is closed")
        return self._pointer

    @property
    def handle(self) -> Any:
        """The same pointer, of the type that our signature table wants."""
        if self.closed:
            raise LocalProtocolError("this context is closed")
        return self._handle

    @property
    def memory(self) -> Any:
        """The llama_memory_t of the context."""
        return self.library.llama.llama_get_memory(self.pointer)

    @property
    def n_batch(self) -> int:
        """Most tokens of one decode call."""
        return int(self.library.llama.llama_n_batch(self.pointer))

    @property
    def n_ubatch(self) -> int:
        """Most tokens of one graph."""
        return int(self.library.llama.llama_n_ubatch(self.pointer))

    @property
    def n_seq_max(self) -> int:
        """Number of sequences."""
        return int(self.library.llama.llama_n_seq_max(self.pointer))

    @property
    def n_ctx_seq(self) -> int:
        """Cells that one sequence can use."""
        return int(self.library.llama.llama_n_ctx_seq(self.pointer))

    def decode(
        self,
        tokens: Sequence[int],
        *,
        position: int,
        seq_id: int = 0,
        logits: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Decode tokens of one sequence.

        Args:
            tokens: token ids.
            position: position of the first one.
            seq_id: the sequence.
            logits: compute the logits of the last token.
            progress: called with the number of tokens that are done after each graph. What it raises
                ends the decode there: the sequence holds the tokens up to then, and the context goes
                on as ever.

        Raises:
            NativeError: llama.cpp refuses; status 1 means that no cells are free.
        """
        llama = self.library.llama
        # a batch of one graph at a time if somebody wants to see the progress
        step = self.n_ubatch if progress else self.n_batch
        size = min(step, max(len(tokens), 1))
        batch = llama.llama_batch_init(size, 0, 1)
        try:
            for i in range(size):
                batch.seq_id[i][0] = seq_id
            np.ctypeslib.as_array(batch.n_seq_id, shape=(size,))[:] = 1
            ids = np.ctypeslib.as_array(batch.token, shape=(size,))
            positions = np.ctypeslib.as_array(batch.pos, shape=(size,))
            outputs = np.ctypeslib.as_array(batch.logits, shape=(size,))
            for start in range(0, len(tokens), step):
                n = min(step, len(tokens) - start)
                batch.n_tokens = n
                ids[:n] = tokens[start : start + n]
                positions[:n] = np.arange(position + start, position + start + n)
                outputs[:n] = 0
                outputs[n - 1] = logits and start + n == len(tokens)
                status = llama.llama_decode(self.pointer, batch)
                if status != 0:
                    reason = "no free cells" if status == 1 else "decoding failed"
                    raise NativeError("llama_decode", status, reason)
                if progress:
                    self.synchronize()
                    progress(start + n)
        finally:
            llama.llama_batch_free(batch)

    def encode(self, tokens: Sequence[int]) -> None:
        """Run the encoder of an encoder-decoder model over tokens."""
        llama = self.library.llama
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        status = llama.llama_encode(self.pointer, llama.llama_batch_get_one(ids, len(tokens)))
        if status != 0:
            raise NativeError("llama_encode", status, "encoding failed")

    def logits(self) -> Logits:
        """Return a copy of the last logits, `[n_vocab]`."""
        pointer = self.library.llama.llama_get_logits_ith(self.pointer, -1)
        if not pointer:
            raise NativeError("llama_get_logits_ith", -1, "the last decode computed no logits")
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab,)).astype(np.float32, copy=True)

    def synchronize(self) -> None:
        """Wait until the device has finished what was decoded."""
        self.library.llama.llama_synchronize(self.pointer)

    def n_past(self, seq_id: int = 0) -> int:
        """Return the number of positions that a sequence holds."""
        return int(self.library.llama.llama_memory_seq_pos_max(self.memory, seq_id)) + 1

    def clear(self, seq_id: int = 0) -> None:
        """Remove a sequence from the cache."""
        self.library.llama.llama_memory_seq_rm(self.memory, seq_id, -1, -1)

    def forget(self) -> None:
        """Remove all sequences, and zero the memory of the cache."""
        self.library.llama.llama_memory_clear(self.memory, True)

    def save(self, path: str | os.PathLike[str], tokens: Sequence[int], *, seq_id: int = 0) -> int:
        """Save a sequence to a state file with llama.cpp's own function; return the bytes written.

        Raises:
            NativeError: it cannot be written, or not all of it.
        """
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        n = int(
            self.library.llama.llama_state_seq_save_file(
                self.pointer, os.fsencode(path), seq_id, ids, len(tokens)
            )
        )
        if n == 0:
            raise NativeError("llama_state_seq_save_file", 0, f"cannot save to {path}")
        # llama.cpp does not look at what closing the file says
        found = os.stat(path).st_size
        if found != n:
            raise NativeError("llama_state_seq_save_file", n, f"{path} has {found} bytes, is the disk full?")
        return n

    def restore(self, path: str | os.PathLike[str], *, seq_id: int = 0) -> list[int]:
        """Restore a sequence from a state file; return its tokens."""
        capacity = self.n_ctx_seq
        ids = (ctypes.c_int32 * capacity)()
        count = ctypes.c_size_t(0)
        n = self.library.llama.llama_state_seq_load_file(
            self.pointer, os.fsencode(path), seq_id, ids, capacity, ctypes.byref(count)
        )
        if n == 0:
            raise NativeError("llama_state_seq_load_file", 0, f"cannot restore from {path}")
        return list(ids[: count.value])

    def close(self) -> None:
        """Free the context if it was created here; idempotent."""
        pointer, self._pointer = self._pointer, None
        owner, self._owner = self._owner, None
        if pointer is not None and owner is None:
            self.library.llama.llama_free(pointer)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
