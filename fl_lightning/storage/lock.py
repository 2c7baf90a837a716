"""Only one run at a time writes in a folder.

The kernel's lock on ``.lock`` ends with the process that holds it, however it ends. The file says
who holds it. A file system without locks does not protect the folder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError, cannot_write

NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: dict[Path, RunLock] = {}  # folder → the lock that this process holds


class RunLock:
    """A folder in which this process writes; :func:`hold` makes it.

    ``descriptor``: of the locked file; None: the first process of the run has locked it. ``used``:
    whether a run has written in the folder.
    """

    def __init__(self, folder: Path, descriptor: int | None, used: bool) -> None:
        self.folder = folder
        self.descriptor = descriptor
        self.used = used

    def use(self) -> None:
        """Note that writing begins: the file stays when the lock is released."""
        self.used = True

    def release(self) -> None:
        """Release the folder; a file that is new goes, if nothing was written."""
        if _held.get(self.folder) is not self:
            return
        del _held[self.folder]
        if self.descriptor is not None:
            if not self.used:
                with suppress(OSError):
                    (self.folder / NAME).unlink()
            os.close(self.descriptor)


def hold(folder: Path) -> RunLock:
    """Lock the folder for this process.

    Raises:
        UserError: another process holds it; the error names the process.
    """
    folder = folder.resolve()
    # An earlier run of this process that ended with an exception may still hold the folder.
    earlier = _held.pop(folder, None)
    used = True
    descriptor = None if earlier is None else earlier.descriptor
    if descriptor is None:
        descriptor, used = _locked(folder)
    lock = _held[folder] = RunLock(folder, descriptor, used)
    return lock


def _locked(folder: Path) -> tuple[int, bool]:
    """Return a locked descriptor of the folder's file, and whether the file was there before."""
    path = folder / NAME
    try:
        while True:
            used = path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    time.sleep(0.1)  # by then the other one has written who it is
                    who = _who(os.pread(descriptor, 1000, 0))
                    os.close(descriptor)
                    raise UserError(
                        f"{folder}: {who} is writing in this folder, and two at once would spoil "
                        "it. Wait for it or end it, and then go on; or give another folder."
                    ) from None
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
            # A run that ends removes its lock file. If that happened between our opening and our
            # locking, we locked a deleted file, so begin again.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
                    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, json.dumps(about).encode() + b"\n", 0)
                    return descriptor, used
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from error


def _who(written: bytes) -> str:
    with suppress(ValueError, TypeError, KeyError):
        about = json.loads(written)
        return f"process {about['pid']} on {about['host']} (since {about['since']})"
    return "another process"


def _in_child() -> None:
    """Release the lock in a forked child, which must not keep it when its parent dies."""
    for lock in _held.values():
        if lock.descriptor is not None:
            os.close(lock.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_in_child)


def held_by_all(folder: Path, trainer: Any) -> RunLock:
    """Lock the folder for the run: the first process holds the lock, and the others write in the
    folder, too.

    Raises:
        UserError: in all of them, if another run holds it.
    """
    lock = RunLock(folder.resolve(), None, True)
    refusal = ""
    if trainer.is_global_zero:
        # Send a refusal to the other processes before raising it: they would wait forever
        # otherwise.
        try:
            lock = hold(folder)
        except UserError as error:
            refusal = str(error)
    if refusal := trainer.strategy.broadcast(refusal):
        raise UserError(refusal)
    return lock
