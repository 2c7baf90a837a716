"""Errors of libraries that read files, in one paragraph that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fl_lightning.errors import UserError


@contextmanager
def refused(what: str, remedy: str) -> Iterator[None]:
    """Within this context, an error of any kind becomes a ``UserError``.

    Libraries raise many kinds of errors for files that are missing or damaged.

    Args:
        what: what is wrong, such as "The picture 'a.png' cannot be read"; the reason follows.
        remedy: what to do.

    >>> with refused("The file 'a.h5' cannot be read", "Copy it again."):
    ...     raise OSError("cut off")
    Traceback (most recent call last):
    fl_lightning.errors.UserError: The file 'a.h5' cannot be read (OSError: cut off). Copy it again.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError(f"{what} ({type(error).__name__}: {reason}). {remedy}") from error
