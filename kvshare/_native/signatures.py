"""Structs and functions of `llama-kv-share.h`, one table.

Each entry carries its C declaration; `loader` applies the table with errno-free ctypes calls and the
error checkers of `errcheck`. llama.h itself is bound by `llama_cpp`, on the same handle.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import (
    POINTER,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, NamedTuple

from kvshare._native import errcheck

ABI = 3
"""LLAMA_KV_SHARE_ABI that this package speaks."""

KIND_MEMFD = 0
"""LLAMA_KV_SHARE_KIND_MEMFD."""


class Context(ctypes.Structure):
    """struct llama_context, opaque."""


ContextPointer = POINTER(Context)
Digest = c_uint8 * 32
Uuid = c_uint8 * 16


class Abi(ctypes.Structure):
    """struct llama_kv_share_abi."""

    _fields_ = [
        ("abi", c_uint32),
        ("sizeof_abi", c_uint32),
        ("sizeof_cparams", c_uint32),
        ("sizeof_region", c_uint32),
        ("sizeof_range", c_uint32),
        ("sizeof_adopted", c_uint32),
        ("sizeof_issued", c_uint32),
        ("sizeof_model_params", c_uint32),
        ("sizeof_context_params", c_uint32),
        ("sizeof_batch", c_uint32),
        ("upstream", c_char * 44),
        ("series", c_char * 68),
    ]


class ContextParams(ctypes.Structure):
    """struct llama_kv_share_cparams."""

    _fields_ = [
        ("n_ctx", c_uint32),
        ("n_batch", c_uint32),
        ("n_ubatch", c_uint32),
        ("n_seq_max", c_uint32),
        ("n_rs_seq", c_uint32),
        ("seq_id", c_int32),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("flash_attn_type", c_int32),
        ("flash_attn", c_int32),
        ("kv_unified", c_int32),
        ("swa_full", c_int32),
        ("offload_kqv", c_int32),
        ("exposes_all", c_int32),
        ("rope_scaling_type", c_int32),
        ("yarn_orig_ctx", c_uint32),
        ("rope_freq_base", c_float),
        ("rope_freq_scale", c_float),
        ("yarn_ext_factor", c_float),
        ("yarn_attn_factor", c_float),
        ("yarn_beta_fast", c_float),
        ("yarn_beta_slow", c_float),
    ]


class Region(ctypes.Structure):
    """struct llama_kv_share_region."""

    _fields_ = [("fd", c_int32), ("kind", c_int32), ("offset", c_uint64), ("size", c_uint64)]


class Range(ctypes.Structure):
    """struct llama_kv_share_range."""

    _fields_ = [("cache", c_uint32), ("from_", c_uint32), ("to", c_uint32)]


class Adopted(ctypes.Structure):
    """struct llama_kv_share_adopted."""

    _fields_ = [("n_tokens", c_uint64), ("bytes_in_place", c_uint64), ("bytes_moved", c_uint64)]


class Issued(ctypes.Structure):
    """struct llama_kv_share_issued."""

    _fields_ = [("ledger_fd", c_int32), ("ledger_size", c_uint64), ("semantics", Digest)]


class Function(NamedTuple):
    """A C function: its result type, argument types and error checker."""

    restype: Any
    argtypes: list[Any]
    errcheck: Callable[..., Any] | None


FUNCTIONS: dict[str, Function] = {
    # void llama_kv_share_get_abi(struct llama_kv_share_abi * abi);
    "llama_kv_share_get_abi": Function(None, [POINTER(Abi)], None),
    # const char * llama_kv_share_last_error(void);
    "llama_kv_share_last_error": Function(c_char_p, [], None),
    # int32_t llama_kv_share_export_begin(void);
    "llama_kv_share_export_begin": Function(c_int32, [], errcheck.status),
    # int32_t llama_kv_share_import_begin(
    #     const struct llama_kv_share_region * regions, size_t n_regions, const uint8_t layout[32]);
    "llama_kv_share_import_begin": Function(c_int32, [POINTER(Region), c_size_t, c_char_p], errcheck.status),
    # int32_t llama_kv_share_fork_begin(
    #     const struct llama_kv_share_region * regions, size_t n_regions, const uint8_t layout[32]);
    "llama_kv_share_fork_begin": Function(c_int32, [POINTER(Region), c_size_t, c_char_p], errcheck.status),
    # int32_t llama_kv_share_end(void);
    "llama_kv_share_end": Function(c_int32, [], errcheck.status),
    # int64_t llama_kv_share_import_layout(char * text, size_t size);
    "llama_kv_share_import_layout": Function(c_int64, [c_char_p, c_size_t], errcheck.status),
    # int32_t llama_kv_share_supported(struct llama_context * ctx);
    "llama_kv_share_supported": Function(c_int32, [ContextPointer], errcheck.status),
    # int32_t llama_kv_share_params(
    #     struct llama_context * ctx, llama_seq_id seq_id, struct llama_kv_share_cparams * cparams);
    "llama_kv_share_params": Function(
        c_int32, [ContextPointer, c_int32, POINTER(ContextParams)], errcheck.status
    ),
    # int64_t llama_kv_share_regions(
    #     struct llama_context * ctx, llama_seq_id seq_id,
    #     struct llama_kv_share_region * regions, size_t n_max);
    "llama_kv_share_regions": Function(
        c_int64, [ContextPointer, c_int32, POINTER(Region), c_size_t], errcheck.status
    ),
    # int32_t llama_kv_share_device(
    #     struct llama_context * ctx, llama_seq_id seq_id, uint32_t i_region,
    #     uint8_t uuid[16], uint64_t * mapped, uint64_t * memory);
    "llama_kv_share_device": Function(
        c_int32,
        [ContextPointer, c_int32, c_uint32, POINTER(Uuid), POINTER(c_uint64), POINTER(c_uint64)],
        errcheck.status,
    ),
    # int32_t llama_kv_share_dma_buf(struct llama_context * ctx, llama_seq_id seq_id, uint32_t i_region);
    "llama_kv_share_dma_buf": Function(c_int32, [ContextPointer, c_int32, c_uint32], errcheck.status),
    # int64_t llama_kv_share_layout(
    #     struct llama_context * ctx, llama_seq_id seq_id, char * text, size_t size, uint8_t digest[32]);
    "llama_kv_share_layout": Function(
        c_int64, [ContextPointer, c_int32, c_char_p, c_size_t, POINTER(Digest)], errcheck.status
    ),
    # int64_t llama_kv_share_semantics(struct llama_context * ctx, char * text, size_t size,
    #     uint8_t digest[32]);
    "llama_kv_share_semantics": Function(
        c_int64, [ContextPointer, c_char_p, c_size_t, POINTER(Digest)], errcheck.status
    ),
    # int32_t llama_kv_share_reserve(
    #     struct llama_context * ctx, llama_seq_id seq_id, uint32_t n_tokens, uint32_t n_prefix);
    "llama_kv_share_reserve": Function(
        c_int32, [ContextPointer, c_int32, c_uint32, c_uint32], errcheck.status
    ),
    # int64_t llama_kv_share_issue_ledger(
    #     struct llama_context * ctx, llama_seq_id seq_id, uint64_t share_id, uint32_t n_tokens,
    #     const llama_token * prefix, uint32_t n_prefix, bool strict,
    #     struct llama_kv_share_issued * issued, struct llama_kv_share_range * ranges, size_t n_max);
    "llama_kv_share_issue_ledger": Function(
        c_int64,
        [
            ContextPointer,
            c_int32,
            c_uint64,
            c_uint32,
            c_void_p,
            c_uint32,
            c_bool,
            POINTER(Issued),
            POINTER(Range),
            c_size_t,
        ],
        errcheck.status,
    ),
    # int32_t llama_kv_share_prepare(struct llama_context * ctx);
    "llama_kv_share_prepare": Function(c_int32, [ContextPointer], errcheck.status),
    # int32_t llama_kv_share_look(
    #     struct llama_context * ctx, llama_seq_id seq_id, uint64_t * n_filled, char * error, size_t size);
    "llama_kv_share_look": Function(
        c_int32, [ContextPointer, c_int32, POINTER(c_uint64), c_char_p, c_size_t], errcheck.status
    ),
    # int32_t llama_kv_share_check(
    #     struct llama_context * ctx, llama_seq_id seq_id, const llama_token * tokens, uint32_t n_tokens,
    #     bool any_semantics);
    "llama_kv_share_check": Function(
        c_int32, [ContextPointer, c_int32, c_void_p, c_uint32, c_bool], errcheck.status
    ),
    # int32_t llama_kv_share_settle(
    #     struct llama_context * ctx, llama_seq_id seq_id, const llama_token * tokens, uint32_t n_tokens,
    #     bool any_semantics, struct llama_kv_share_adopted * adopted);
    "llama_kv_share_settle": Function(
        c_int32,
        [ContextPointer, c_int32, c_void_p, c_uint32, c_bool, POINTER(Adopted)],
        errcheck.status,
    ),
    # int64_t llama_kv_share_lease(
    #     struct llama_context * ctx, llama_seq_id seq_id,
    #     struct llama_kv_share_range * ranges, size_t n_max);
    "llama_kv_share_lease": Function(
        c_int64, [ContextPointer, c_int32, POINTER(Range), c_size_t], errcheck.status
    ),
    # int32_t llama_kv_share_release(struct llama_context * ctx, llama_seq_id seq_id, bool renew);
    "llama_kv_share_release": Function(c_int32, [ContextPointer, c_int32, c_bool], errcheck.status),
    # int32_t llama_kv_share_adopt(
    #     struct llama_context * ctx, llama_seq_id seq_id, uint32_t n_tokens, const uint8_t * metadata,
    #     size_t metadata_size, const uint8_t sample[32], struct llama_kv_share_adopted * adopted);
    "llama_kv_share_adopt": Function(
        c_int32,
        [ContextPointer, c_int32, c_uint32, c_char_p, c_size_t, c_char_p, POINTER(Adopted)],
        errcheck.status,
    ),
    # int32_t llama_kv_cells_adopt(
    #     struct llama_context * ctx, llama_seq_id seq_id, uint32_t first, uint32_t n_tokens, llama_pos p0,
    #     const llama_token * tokens, const uint8_t sample[32], struct llama_kv_share_adopted * adopted);
    "llama_kv_cells_adopt": Function(
        c_int32,
        [
            ContextPointer,
            c_int32,
            c_uint32,
            c_uint32,
            c_int32,
            POINTER(c_int32),
            c_char_p,
            POINTER(Adopted),
        ],
        errcheck.status,
    ),
    # int32_t llama_kv_share_scrub(struct llama_context * ctx, llama_seq_id seq_id);
    "llama_kv_share_scrub": Function(c_int32, [ContextPointer, c_int32], errcheck.status),
    # int32_t llama_kv_share_enter(
    #     struct llama_context * ctx, llama_seq_id seq_id, uint32_t n_tokens, const uint8_t * metadata,
    #     size_t metadata_size, const uint8_t sample[32], struct llama_kv_share_adopted * adopted);
    "llama_kv_share_enter": Function(
        c_int32,
        [ContextPointer, c_int32, c_uint32, c_char_p, c_size_t, c_char_p, POINTER(Adopted)],
        errcheck.status,
    ),
    # int32_t llama_kv_share_confine(
    #     struct llama_context * ctx, llama_seq_id seq_id,
    #     const struct llama_kv_share_range * ranges, size_t n_ranges);
    "llama_kv_share_confine": Function(
        c_int32, [ContextPointer, c_int32, POINTER(Range), c_size_t], errcheck.status
    ),
    # int64_t llama_kv_share_publish(
    #     struct llama_context * ctx, llama_seq_id seq_id, uint8_t * metadata, size_t size,
    #     uint8_t sample[32]);
    "llama_kv_share_publish": Function(
        c_int64, [ContextPointer, c_int32, c_char_p, c_size_t, POINTER(Digest)], errcheck.status
    ),
    # int32_t llama_kv_share_copy(
    #     struct llama_context * ctx, llama_seq_id seq_id,
    #     const struct llama_kv_share_region * regions, size_t n_regions);
    "llama_kv_share_copy": Function(
        c_int32, [ContextPointer, c_int32, POINTER(Region), c_size_t], errcheck.status
    ),
}
