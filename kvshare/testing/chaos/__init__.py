"""Chaos kit: what goes wrong in a handoff, one named fault at one named step at a time.

    python -m kvshare.testing.chaos --list
    python -m kvshare.testing.chaos --run dies:half wrong-sample --json
    python -m kvshare.testing.chaos --all [--server] [--kind turn]
    python -m kvshare.testing.chaos --all --provider 'my-provider --socket {socket} --tokens {tokens}'

Each case is a handoff between real processes: a decoder (a `kvshare.Decoder`, or with --server the
patched llama-server) and a provider (`kvshare.provider.serving`) that shows the fault. The provider really
dies, stops, or writes what it should not. After the case an ordinary request runs on the same slot, and
another one goes on with a chat that was on another slot all the time. Both answers have to be, bit for
bit, those that the decoder gave before anything went wrong, and its process has to have as many
descriptors, mapped memfds and threads as before the case.

There are two kinds of handoff. A *prompt* goes into an empty slot. A *turn* goes on behind a prompt that
was handed over and answered. After a turn that was refused the slot has to hold what it held before, bit
for bit; or nothing, if the provider has touched that, or it was erased. The next turn is handed over in
every case, and has to be right as well. --kind runs one of the two, otherwise both are run.

With --json the outcome is one object. Numbers: `faults`, `steps` and `cases` that were run, `turns` among
the cases; `refused`, cases in which the decoder did not adopt; `wrong_answers`, answers that differ,
refusals that are missing, and handoffs that are right and were refused; `crashes`, processes that a signal
has ended which nobody sent; `leaked_fds`, `leaked_mappings`, `leaked_threads`. The lists `failures` (cases,
with what was wrong) and `known` (faults that --all leaves out, because they are known to fail or cannot be
told). The exit status is 0 only if nothing is wrong, crashed or leaked; progress goes to standard error.

**For a provider of your own.** Give its command line with --provider; `{socket}`, `{model}` and `{tokens}`
stand for the path that it has to listen on, the GGUF file, and a file with a JSON list of token ids. It
prefills these tokens into the first share that arrives there, and stays until its standard input ends or
SIGTERM arrives, or ends by itself when it is done. In a turn they are the whole prompt, and the ledger
says how many of them the slot holds; --kind prompt is for a provider that always begins at the start. The
cells have to be what llama.cpp computes on one thread in graphs of 16 tokens, because the answers are
compared bit for bit. It is put to all that can be done to a provider from outside: it is killed and
stopped at steps, its decoder is killed, and its caller makes mistakes. For what it writes, see
`kvshare.testing.contract.check_provider`.
"""

from __future__ import annotations

from typing import Any

COUNTED = ("wrong_answers", "crashes", "leaked_fds", "leaked_mappings", "leaked_threads")
"""What has to be 0."""


def passed(outcome: dict[str, Any]) -> bool:
    """Return whether an outcome, as --json prints it, is what it has to be."""
    return bool(outcome["cases"]) and not any(outcome[name] for name in COUNTED)
