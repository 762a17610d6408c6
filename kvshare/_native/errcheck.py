"""Return codes of `llama-kv-share.h` as exceptions, applied through ctypes' `errcheck`."""

from __future__ import annotations

from typing import Any

from kvshare.errors import (
    KvshareError,
    LedgerDigestError,
    LedgerError,
    LedgerIncompleteError,
    LedgerPendingError,
    NativeError,
    NoFreeCellsError,
    NotShareableError,
    ReplayError,
    SequenceInUseError,
)

INVALID = -1
MISMATCH = -3

# LLAMA_KV_SHARE_ERR_*; what is not listed is a NativeError
_FAMILIES: dict[int, type[KvshareError]] = {
    -2: NotShareableError,
    -4: NoFreeCellsError,
    -5: SequenceInUseError,
    -6: SequenceInUseError,
    -7: LedgerError,
    -8: LedgerDigestError,
    -11: LedgerIncompleteError,
    -12: LedgerPendingError,
    -13: ReplayError,
    -14: LedgerError,
}


def status(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    """Return a result that is not negative, raise for one that is.

    Raises:
        KvshareError: of the family of the status, with the library's own message.
    """
    if result >= 0:
        return result
    name = str(function.__name__)
    message = function.library.llama_kv_share_last_error().decode(errors="replace")
    family = _FAMILIES.get(result)
    if family is not None:
        raise family(message)
    raise NativeError(name, result, message)
