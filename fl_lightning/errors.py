"""What a user did that cannot work, said in one paragraph."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something to mend in a setting or a file: the message names it, its value and what is
    accepted.

    The command line prints the message alone and exits with status 2.
    """


class Diverged(RuntimeError):
    """A client's model or the server's became non-finite; the command line exits with status 3."""


def suggest(name: str, accepted: Iterable[str]) -> str:
    """``" Did you mean 'x'?"`` for a near miss, else an empty string.

    >>> suggest("bernouli", ["uniform", "bernoulli"])
    " Did you mean 'bernoulli'?"
    """
    close = difflib.get_close_matches(str(name), list(accepted), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def out_of_memory(error: BaseException) -> str:
    """What to say where memory did not suffice, the machine's or a GPU's; of another error:
    nothing.
    """
    text = " ".join(str(error).split())
    kinds = {kind.__name__ for kind in type(error).__mro__}
    told = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc")
    if not kinds & {"MemoryError", "OutOfMemoryError"} and not any(words in text for words in told):
        return ""
    return (
        f"out of memory: {text[:200] or type(error).__name__}. Let fewer clients train side by "
        "side (--model.engine sequential, --model.workers, --model.clients_at_once), or give a "
        "smaller data.batch_size or network; a run that had begun goes on from its last round by "
        "--ckpt_path last."
    )
