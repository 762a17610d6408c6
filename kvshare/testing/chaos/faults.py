"""The faults by name: who shows them, at which steps, and what has to become of the handoff."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

STEPS = (
    "connect",  # the decoder has connected
    "header",  # half of the header is there
    "descriptors",  # header and descriptors are there
    "map",  # the provider's context is built on them
    "first-ubatch",  # the first graph is done
    "half",  # half of the tokens are done
    "last-ubatch",  # all are, nothing is vouched for yet
    "publish",  # the ledger is complete
    "adopt",  # the decoder has adopted, or was asked to
)
"""The steps of a handoff, in their order; each is over when its fault is injected."""

BEFORE_PUBLISH = STEPS[:7]
FILLING = ("map", "first-ubatch", "half", "last-ubatch")

PROMPT, TURN = KINDS = ("prompt", "turn")
"""What is handed over: a prompt into an empty slot, or what goes on behind the slot's prompt and answer."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        name: what `--run` takes.
        summary: what happens, one line.
        by: who shows it: `provider`, `caller` (the engine or the program around the decoder), `decoder`.
        steps: at which steps it is injected, each a case.
        adopted_at: steps where the handoff is right all the same, and has to succeed.
        known: why it is known to fail, or cannot be told; left out of `--all` then.
        targets: what it can be shown to.
        foreign: whether a provider that is given by its command line can be put to it.
        either: whether it may be refused and may be adopted where the slot is empty; only the answers count.
        deep: whether a long prompt follows as well, which reaches cells that were not leased.
        strict: whether the share is a strict one, whose provider has to let go before an adopt.
        kinds: what has to be handed over so that it can be shown.
    """

    name: str
    summary: str
    by: str
    steps: tuple[str, ...]
    adopted_at: tuple[str, ...] = ()
    known: str = ""
    targets: tuple[str, ...] = ("decoder", "server")
    foreign: bool = False
    either: bool = False
    deep: bool = False
    strict: bool = False
    kinds: tuple[str, ...] = KINDS


def _provider(name: str, summary: str, *steps: str, adopted_at: Iterable[str] = (), **more: Any) -> Fault:
    return Fault(name, summary, "provider", steps, tuple(adopted_at), **more)


def _caller(
    name: str,
    summary: str,
    *steps: str,
    adopts: bool = False,
    either: bool = False,
    foreign: bool = True,
    targets: Sequence[str] = ("decoder", "server"),
    kinds: tuple[str, ...] = KINDS,
) -> Fault:
    return Fault(
        name,
        summary,
        "caller",
        steps or ("publish",),
        (steps or ("publish",)) if adopts else (),
        targets=tuple(targets),
        foreign=foreign,
        either=either,
        kinds=kinds,
    )


_LIE = "a provider that lies consistently cannot be told from a right one: run providers that you trust"

FAULTS: tuple[Fault, ...] = (
    _caller("none", "nothing goes wrong: the control that shows that the rest is refused for a reason",
            adopts=True),
    # -- a provider that goes away
    Fault("dies", "the provider is killed", "provider", STEPS, ("publish", "adopt"), foreign=True),
    Fault("stops", "the provider is stopped, and killed later without having gone on", "provider", STEPS,
          ("publish", "adopt"), foreign=True),
    Fault("pauses", "the provider is stopped, an adopt in the meantime refused, and it goes on", "provider",
          STEPS[:8], STEPS[:8]),
    _provider("exits-0", "the provider ends with success", *STEPS[:8], adopted_at=["publish"]),
    _provider("hangs-up", "the provider closes the connection and ends", *STEPS[:8], adopted_at=["publish"]),
    _provider("is-silent", "the provider does nothing more, and stays", *BEFORE_PUBLISH),
    _provider("gives-up", "the provider says in the ledger that it has failed",
              "descriptors", *FILLING),
    _provider("gives-up-in-garbage", "it says so in bytes that are no text", "descriptors", *FILLING),
    # -- a provider that is not there
    _provider("nobody-listens", "no socket is there", "connect"),
    _provider("stale-socket", "a socket is there whose listener is gone", "connect"),
    _provider("is-a-file", "a regular file is in the place of the socket", "connect"),
    _provider("never-accepts", "the listener's queue is full", "connect"),
    # -- a provider that does something else
    _provider("other-tokens", "the provider prefills other tokens than were asked for", "map"),
    _provider("fewer-tokens", "the provider prefills and vouches for half of the tokens", "map"),
    _provider("wrong-region", "the provider fills a memory of its own", "descriptors"),
    _provider("swaps-layers", "K and V of two layers are swapped", "publish"),
    _provider("swaps-k-v", "K and V of all layers are swapped", "publish"),
    _provider("zeroes", "what it filled is zeroed", "publish"),
    _provider("writes-nan", "NaN are in the cells when they are adopted", "publish"),
    _provider("foreign-cells", "the cells lie beside the leased ones, and there is no metadata",
              "last-ubatch"),
    _provider("trespasses", "writes NaN into cells of the slot that are not leased, and ends", "publish",
              adopted_at=["publish"], deep=True, strict=True),
    _provider("holds-on", "does not let go of a strict share: an adopt is refused until it is killed",
              "adopt", adopted_at=["adopt"], strict=True, foreign=False),
    # -- a provider that does not leave alone what the slot held before
    _provider("touches-prefix", "writes NaN over what the slot held, which is not leased", "descriptors",
              "half", "publish", kinds=(TURN,)),
    _provider("swaps-prefix", "swaps K and V of what the slot held", "descriptors", "publish", kinds=(TURN,)),
    _provider("other-prefix", "has gone on from other tokens, as its ledger says", "publish", kinds=(TURN,)),
    _provider("more-prefix", "the slot held one token more, its ledger says", "publish", kinds=(TURN,)),
    _provider("garbles-prefix", "writes noise over the decoder's metadata, which nobody reads after it",
              "publish", adopted_at=["publish"], kinds=(TURN,)),
    # -- a provider that claims too much
    _provider("claims-all", "vouches for all tokens when half of them are done", "half"),
    _provider("claims-unwritten", "vouches for all tokens without having written one", "descriptors"),
    _provider("claims-zeros", "the same with a sample of the memory as it is", "descriptors"),
    _provider("claims-unmapped", "sets state complete in a ledger that nobody has filled", "descriptors"),
    _provider("more-filled", "n_filled is larger", "publish"),
    _provider("fewer-filled", "n_filled is smaller", "publish"),
    _provider("more-tokens", "n_tokens is larger", "publish"),
    # -- a provider whose ledger is wrong
    _provider("replays", "the ledger of an earlier share of the same slot", "descriptors", "last-ubatch"),
    _provider("other-share-id", "the ledger's share_id is another", "publish"),
    _provider("other-vouched-id", "vouches for another share", "publish"),
    _provider("wrong-layout", "another layout digest", "publish"),
    _provider("wrong-semantics", "another semantics digest", "publish"),
    _provider("wrong-token-digest", "another digest of the tokens", "publish"),
    _provider("wrong-sample", "another digest of the samples", "publish"),
    _provider("wrong-magic", "the magic is another", "publish"),
    _provider("wrong-version", "the version is another", "publish"),
    _provider("wrong-header-size", "the header ends beyond the ledger", "publish"),
    _provider("wrong-state", "the state is 7", "publish", *FILLING),
    _provider("half-ledger", "the end of the ledger's header is zeroed", "publish"),
    _provider("zeroed-ledger", "all of the ledger's header is zeroed", "publish", *FILLING),
    # -- a provider whose metadata is wrong
    _provider("blob-truncated", "the metadata ends in the middle", "publish"),
    _provider("blob-garbage", "the metadata is noise", "publish"),
    _provider("blob-flipped", "a bit of each byte of the metadata is wrong", "publish"),
    _provider("blob-outside", "the metadata lies beyond the ledger", "publish"),
    _provider("blob-huge", "the metadata is 2**62 bytes long", "publish"),
    _provider("blob-of-another", "the metadata is that of a shorter prompt", "publish"),
    # -- a provider that lays hands on the descriptors
    _provider("truncates", "tries to shrink the regions and the ledger", "descriptors", "half", "publish",
              adopted_at=["descriptors", "half", "publish"]),
    _provider("grows", "tries to grow them", "descriptors", "half", "publish",
              adopted_at=["descriptors", "half", "publish"]),
    _provider("seals", "tries to seal them further, against their own decoder", "descriptors", "half",
              "publish", adopted_at=["descriptors", "half", "publish"]),
    _provider("keeps", "keeps descriptors and mappings, and touches nothing", "adopt", adopted_at=["adopt"]),
    # -- whoever drives the handoff
    _caller("adopts-other-tokens", "adopts with other tokens"),
    _caller("adopts-fewer-tokens", "adopts with fewer tokens"),
    _caller("adopts-more-tokens", "adopts with one token more"),
    _caller("adopts-no-tokens", "adopts with no tokens"),
    _caller("adopts-unknown", "adopts a share that never was"),
    _caller("adopts-twice", "adopts a second time, which is refused", adopts=True),
    _caller("adopts-early", "adopts before it is complete, which is refused, and afterwards", *FILLING,
            adopts=True, foreign=False),
    _caller("adopts-late", "adopts when the share has expired"),
    _caller("adopts-released", "adopts when the share was released"),
    _caller("adopts-elsewhere", "adopts on another slot", targets=["server"]),
    _caller("shares-twice", "shares the slot a second time, which is refused", "half", adopts=True),
    _caller("releases-twice", "releases twice instead of adopting"),
    _caller("releases-adopted", "releases what was adopted, which is nothing any more", adopts=True),
    _caller("request-between", "a request runs on the slot between share and adopt"),
    _caller("erase-between", "the slot is erased between share and adopt", either=True),
    _caller("goes-on", "the decoder decodes a token behind what the slot holds, and then it adopts",
            "descriptors", "half", "publish", kinds=(TURN,), foreign=False),
    Fault("job-hangs-up", "an engine hangs up on its job of `kvshare provider`; the next one is served",
          "caller", ("connect", "first-ubatch"), ("connect", "first-ubatch")),
    Fault("decoder-dies", "the decoder is killed: its provider does not crash", "decoder", STEPS[:8],
          foreign=True),
    Fault("decoder-dies-unseen", "the decoder is killed: its provider ends with an error", "decoder",
          BEFORE_PUBLISH, foreign=True),
    # -- a provider that goes on after the end of its share
    _provider("late-nan", "the provider writes NaN after its share was released", "adopt", deep=True),
    _provider("late-refused", "the same after an adopt that was refused", "adopt", deep=True),
    _provider("late-expired", "the same after its share has expired", "adopt", deep=True),
    _provider("late-prefill", "the provider is stopped, and goes on after the release", "half"),
    # -- known
    _provider("forges", "vouches for the right tokens and has prefilled others", "map", known=_LIE),
)  # fmt: skip
"""All of them; names are unique."""

BY_NAME = {fault.name: fault for fault in FAULTS}
