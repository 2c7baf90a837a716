"""The error that a user can correct, and the error of a run that diverged."""

from __future__ import annotations

import difflib
import errno
import linecache
import os
import sysconfig
import traceback
from collections.abc import Iterable
from importlib import import_module
from typing import Any, NoReturn


class UserError(ValueError):
    """A setting or a file has to be corrected: the message names it, its value and what is
    accepted.

    The command line prints only the message and exits with status 2.
    """


class CellError(UserError):
    """A cell of a table has to be corrected.

    Args:
        place: the numbers of its column, counted from 1, and of its row.
    """

    def __init__(self, text: str, place: str = "") -> None:
        super().__init__(text)
        self.place = place


class WrongKind(UserError, TypeError):
    """A hook or a step of the user's returned a value of another kind or shape than it has to."""


class Diverged(RuntimeError):
    """A client's model or the server's became non-finite; the command line exits with status 3."""


def debugging() -> bool:
    """Return whether the environment asks for the tracebacks of errors: ``FL_DEBUG=1``."""
    return os.environ.get("FL_DEBUG", "") not in ("", "0")


def suggest(name: str, accepted: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for a near miss, else an empty string.

    >>> suggest("bernouli", ["uniform", "bernoulli"])
    " Did you mean 'bernoulli'?"
    """
    close = difflib.get_close_matches(str(name), list(accepted), n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def refuse_both(one: str, other: str, why: str) -> NoReturn:
    """Refuse two methods, because the second cannot run with the first."""
    raise UserError(f"method: {one} and {other} cannot run together: {why}. Keep one of them.")


def optional(library: str, extra: str, wanted_by: str) -> Any:
    """Import a library that comes with one of our extras.

    Raises:
        UserError: it is not installed; the error says how to install it.
    """
    try:
        return import_module(library)
    except ImportError as error:
        raise UserError(
            f"{wanted_by} needs {library}, which cannot be imported ({error}). Install it: pip "
            f"install 'fl-lightning[{extra}]'."
        ) from None


# What the system says if a disk takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def cannot_write(path: object, error: OSError) -> UserError:
    """The refusal of a file that the system does not let be written, with what to do."""
    advice = "Give a folder that can be written to."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "Make room there."
    # These errors of a disk can occur after a run has begun.
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO):
        advice += (
            " A run that had begun goes on from its last checkpoint if you start it again with "
            "--ckpt_path last."
        )
    return UserError(f"Cannot write {path}: {error.strerror or error}. {advice}")


def check_on_disk(option: str, folder: object) -> None:
    """Refuse the address of a remote storage as a run's folder."""
    if "://" in str(folder):
        raise UserError(
            f"{option}={str(folder)!r} is not a folder of a disk: a run locks and renames its "
            "checkpoints and its clients' states as files, and would write them to the local disk, "
            f"in {str(folder).partition('//')[0]}/. Mount the storage and give the folder of its "
            "mount, or give a folder of the disk and copy it after the run."
        )


def out_of_memory(error: BaseException) -> str:
    """Return the message if a machine's or GPU's memory was too small; empty for another error."""
    text = " ".join(str(error).split())
    # This must not import torch, and a CPU's allocator has no error class. So the class is
    # recognised by its name, or the error by its text.
    kinds = {kind.__name__ for kind in type(error).__mro__}
    words = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad_alloc")
    by_class = kinds & {"MemoryError", "OutOfMemoryError"}
    if not by_class and not any(phrase in text for phrase in words):
        return ""
    return (
        f"out of memory: {text[:200] or type(error).__name__}. Let fewer clients train side by "
        "side (--model.engine sequential, --model.workers, --model.clients_at_once), or give a "
        "smaller data.batch_size or network; a run that had begun goes on from its last round by "
        "--ckpt_path last."
    )


def in_own_code(error: BaseException) -> str:
    """Return an error of the user's own code in one paragraph, with the line; empty for another
    error.

    The line is the innermost one in a file that belongs neither to this package, nor to Python, nor
    to installed packages.
    """
    installed = tuple(
        os.path.join(folder, "")
        for key, folder in sysconfig.get_paths().items()
        if key in ("stdlib", "platstdlib", "purelib", "platlib")
    )
    # Under `python -m fl_lightning` the name of its main module is not the package's.
    installed += (os.path.join(os.path.dirname(__file__), ""),)
    own = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        package = str(frame.f_globals.get("__name__")).split(".")[0]
        others = package == __name__.split(".")[0] or code.co_filename.startswith(("<", *installed))
        if not others and "-packages" not in code.co_filename:
            own = code, line
    if own is None:
        return ""
    (code, line) = own
    text = linecache.getline(code.co_filename, line).strip()
    said = " ".join(str(error).split())[:400]
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    where = f"{code.co_filename}, line {line}, in {code.co_name}: {text}"
    return f"{type(error).__name__}: {said} [{where}]{notes}. --debug shows the whole traceback."
