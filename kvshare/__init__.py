"""Two processes on one host share one llama.cpp KV cache by file descriptors.

`import kvshare` loads no library and no numpy: the names below are imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvshare.errors import (
    AbiMismatchError,
    AdoptError,
    BuildError,
    DeadlineExceededError,
    DescriptorError,
    ExpiredError,
    KvshareError,
    LayoutMismatchError,
    LedgerDigestError,
    LedgerError,
    LedgerIncompleteError,
    LedgerPendingError,
    LibraryError,
    LibraryNotFoundError,
    LibraryUnpatchedError,
    LocalProtocolError,
    MismatchError,
    ModelError,
    NativeError,
    NoFreeCellsError,
    NotShareableError,
    PatchError,
    PeerClosedError,
    PeerError,
    PeerRefusedError,
    ProtocolError,
    RemoteProtocolError,
    ReplayError,
    SemanticsMismatchError,
    SequenceInUseError,
)

if TYPE_CHECKING:
    from kvshare._native.context import Context, Model
    from kvshare._native.loader import load
    from kvshare.build import find_build
    from kvshare.decoder import Adopted, Decoder, Share, exporting
    from kvshare.models import check_gguf
    from kvshare.prefix import Prefix, drop_prefix, forking, list_prefixes
    from kvshare.provider import Offer, Provider, WarmProvider, importing, serve
    from kvshare.service import Service
    from kvshare.store import PrefixServer, PrefixStore

__version__ = "0.1.0"

# name -> module that defines it, imported at first use (PEP 562)
_LAZY = {
    "Adopted": "kvshare.decoder",
    "Context": "kvshare._native.context",
    "Decoder": "kvshare.decoder",
    "Model": "kvshare._native.context",
    "Offer": "kvshare.provider",
    "Prefix": "kvshare.prefix",
    "PrefixServer": "kvshare.store",
    "PrefixStore": "kvshare.store",
    "Provider": "kvshare.provider",
    "Service": "kvshare.service",
    "Share": "kvshare.decoder",
    "WarmProvider": "kvshare.provider",
    "drop_prefix": "kvshare.prefix",
    "exporting": "kvshare.decoder",
    "forking": "kvshare.prefix",
    "importing": "kvshare.provider",
    "list_prefixes": "kvshare.prefix",
    "load": "kvshare._native.loader",
    "serve": "kvshare.provider",
    "check_gguf": "kvshare.models",
    "find_build": "kvshare.build",
}

__all__ = [
    "AbiMismatchError",
    "AdoptError",
    "Adopted",
    "BuildError",
    "Context",
    "DeadlineExceededError",
    "Decoder",
    "DescriptorError",
    "ExpiredError",
    "KvshareError",
    "LayoutMismatchError",
    "LedgerDigestError",
    "LedgerError",
    "LedgerIncompleteError",
    "LedgerPendingError",
    "LibraryError",
    "LibraryNotFoundError",
    "LibraryUnpatchedError",
    "LocalProtocolError",
    "MismatchError",
    "Model",
    "ModelError",
    "NativeError",
    "NoFreeCellsError",
    "NotShareableError",
    "Offer",
    "PatchError",
    "PeerClosedError",
    "PeerError",
    "PeerRefusedError",
    "Prefix",
    "PrefixServer",
    "PrefixStore",
    "ProtocolError",
    "Provider",
    "RemoteProtocolError",
    "ReplayError",
    "SemanticsMismatchError",
    "SequenceInUseError",
    "Service",
    "Share",
    "WarmProvider",
    "check_gguf",
    "drop_prefix",
    "exporting",
    "find_build",
    "forking",
    "importing",
    "list_prefixes",
    "load",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
