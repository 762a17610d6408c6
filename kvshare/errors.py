"""The errors of kvshare: one root, one family per cause, one CLI exit code per family.

Local misuse (a caller broke a rule of this package) and remote misbehaviour (a peer sent
something wrong) are different families, because only one of them is a bug in your program.
`OSError`s of the kernel pass through unless meaning is added, then they are the `__cause__`.
"""

from __future__ import annotations


class KvshareError(Exception):
    """Root of every error that kvshare raises on purpose.

    Attributes:
        exit_code: process exit status of the `kvshare` command for this family.
        hint: the next step for the user, one line, or None.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


# -- library ---------------------------------------------------------------------------------


class LibraryError(KvshareError):
    """The patched libllama is missing, wrong or in conflict."""

    exit_code = 10


class LibraryNotFoundError(LibraryError):
    """No libllama at the place that was named, or no cached build."""


class LibraryUnpatchedError(LibraryError):
    """A libllama without the kvshare patch series."""


class AbiMismatchError(LibraryError):
    """A patched libllama of another ABI, pin or patch series than this package."""


# -- identity --------------------------------------------------------------------------------


class MismatchError(KvshareError):
    """Two sides disagree; refused before a byte is written.

    Attributes:
        field: dotted name of the first field that differs.
        expected: its value on the side that shares.
        found: its value on this side.
    """

    exit_code = 11

    def __init__(self, field: str, expected: object, found: object, *, hint: str | None = None) -> None:
        super().__init__(f"{self.what} differs in {field}: expected {expected!r}, found {found!r}", hint=hint)
        self.field = field
        self.expected = expected
        self.found = found

    what = "identity"


class LayoutMismatchError(MismatchError):
    """The bytes of the two caches are laid out differently; never allowed."""

    what = "layout"


class SemanticsMismatchError(MismatchError):
    """The bytes would mean something else (another model, RoPE, adapter, ...)."""

    what = "semantics"


# -- protocol --------------------------------------------------------------------------------


class ProtocolError(KvshareError):
    """A rule of the wire protocol was broken."""

    exit_code = 12


class LocalProtocolError(ProtocolError):
    """This program broke it (a bug in the caller)."""


class RemoteProtocolError(ProtocolError):
    """The peer broke it."""


# -- peer ------------------------------------------------------------------------------------


class PeerError(KvshareError):
    """The peer is not there, not the right one, or gone."""

    exit_code = 13


class PeerRefusedError(PeerError):
    """Nobody listens, the peer has another uid, or it said no."""


class PeerClosedError(PeerError):
    """The peer closed the connection or died."""


class DeadlineExceededError(PeerError):
    """A wait ran past its deadline."""


# -- descriptors -----------------------------------------------------------------------------


class DescriptorError(KvshareError):
    """Descriptors that cannot be trusted: truncated, too many or few, wrong size or seals."""

    exit_code = 14


# -- ledger ----------------------------------------------------------------------------------


class LedgerError(KvshareError):
    """The provider's ledger does not vouch for what is to be adopted."""

    exit_code = 15


class LedgerIncompleteError(LedgerError):
    """The ledger is not in state complete, or covers fewer tokens."""


class LedgerPendingError(LedgerIncompleteError):
    """The provider is not done yet; the share lives on."""


class LedgerDigestError(LedgerError):
    """A digest in the ledger differs from what the decoder computed itself."""


# -- adopt -----------------------------------------------------------------------------------


class AdoptError(KvshareError):
    """The decoder cannot share or adopt; nothing was changed."""

    exit_code = 16


class NoFreeCellsError(AdoptError):
    """The cache has not enough free cells for the lease."""


class SequenceInUseError(AdoptError):
    """The sequence holds cells, or changed since the share was issued."""


class ReplayError(AdoptError):
    """The share is unknown, was used, released or belongs to another decoder."""


class ExpiredError(AdoptError):
    """The share ran past its deadline."""


class NotShareableError(AdoptError):
    """This context or memory cannot be shared; the message says why."""


# -- the rest --------------------------------------------------------------------------------


class NativeError(KvshareError):
    """A call into libllama failed.

    Attributes:
        function: name of the C function.
        status: value that it returned.
    """

    exit_code = 17

    def __init__(self, function: str, status: int, message: str, *, hint: str | None = None) -> None:
        super().__init__(f"{function}: {message} (status {status})", hint=hint)
        self.function = function
        self.status = status


class ModelError(KvshareError):
    """A model file that is missing, not a GGUF, truncated, or of the wrong hash."""

    exit_code = 18


class BuildError(KvshareError):
    """Fetching or compiling failed: network, hash, compiler, disk."""

    exit_code = 20


class PatchError(KvshareError):
    """The patch series does not fit the tree; the tree is as it was."""

    exit_code = 21
