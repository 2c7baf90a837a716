"""What a user did that cannot work, said in one paragraph."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something to mend in a setting or a file: the message names it, its value and what is accepted.

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
