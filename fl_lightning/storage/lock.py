"""Only one run at a time writes in a folder.

The kernel's lock on ``.lock`` ends with the process that holds it, however it ends. The file also
has a mark of its last writer, which is compared before every write. If a process was frozen while
another one continued its run (the lock file was removed, or the file system has no locks), it finds
another mark and does not touch the folder.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError, cannot_write

try:
    import fcntl
except ImportError:
    # On a system without file locks, only the mark in the folder protects it.
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_held: dict[Path, RunLock] = {}  # folder → the lock that this process holds


class TakenUp(UserError):
    """Another process has continued this run."""


class RunLock:
    """A folder in which this process writes; :func:`hold` and :func:`join` make it."""

    def __init__(
        self, folder: Path, descriptor: int | None, mark: str, before: bytes | None
    ) -> None:
        self.folder = folder
        self.mark = mark
        self._descriptor = descriptor
        self._before = before
        self.used = descriptor is None

    def use(self) -> None:
        """Note that writing begins: the mark stays when the lock is released."""
        self.used = True

    def check(self) -> None:
        """Raise TakenUp if another process has locked the folder."""
        try:
            written = (self.folder / NAME).read_bytes()
        except FileNotFoundError:
            if self._descriptor is None or not self.folder.is_dir():
                return
            # Somebody removed the lock file, and the lock with it. If another process holds a new
            # lock, locking is refused; otherwise we lock again.
            os.close(self._descriptor)
            self._descriptor = None
            self._descriptor, _ = _locked(self.folder)
            _write(self._descriptor, _about(self.mark))
            return
        if self.mark.encode() not in written:
            raise TakenUp(
                f"{self.folder}: {_who(written)} has continued this run in the meantime, so "
                f"process {os.getpid()} stops here and writes nothing more. The run is in that "
                "folder; nothing is left to do."
            )

    def release(self) -> None:
        """Release the folder; if nothing was written, the file is as before."""
        if _held.get(self.folder) is not self:
            return
        del _held[self.folder]
        if self._descriptor is None:
            return
        if not self.used and self._before is None:
            with suppress(OSError):
                (self.folder / NAME).unlink()
        elif not self.used:
            _write(self._descriptor, self._before or b"")
        os.close(self._descriptor)
        self._descriptor = None

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


def hold(folder: Path) -> RunLock:
    """Lock the folder for this process.

    Raises:
        UserError: another process holds it; the error names the process.
    """
    folder = folder.resolve()
    # An earlier run of this process that ended with an exception may still hold the folder.
    earlier = _held.pop(folder, None)
    descriptor = None if earlier is None else earlier._descriptor
    content: bytes | None = None
    if descriptor is None:
        descriptor, content = _locked(folder)
    mark = secrets.token_hex(8)
    _write(descriptor, _about(mark))
    lock = _held[folder] = RunLock(folder, descriptor, mark, content)
    lock.used = earlier is not None
    return lock


def join(folder: Path, mark: str) -> RunLock:
    """Write in a folder that the first process of the run has locked."""
    folder = folder.resolve()
    lock = _held[folder] = RunLock(folder, None, mark, None)
    return lock


def check(path: Path) -> None:
    """Raise TakenUp if ``path``, which is about to be written, lies in a folder that is no
    longer ours.
    """
    for folder, lock in list(_held.items()):
        place = path.resolve()
        if place == folder or folder in place.parents:
            lock.check()


def _locked(folder: Path) -> tuple[int, bytes | None]:
    """Return a locked descriptor of the folder's file, and the file's content; None: it is new."""
    path = folder / NAME
    try:
        while True:
            is_new = not path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if fcntl is not None:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    written = _holder(descriptor)
                    os.close(descriptor)
                    raise UserError(_refusal(folder, written)) from None
                if error.errno not in _NO_LOCKS:
                    os.close(descriptor)
                    raise
            # A run that ends removes its lock file. If that happened between our opening and our
            # locking, we locked a deleted file, so begin again.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor, None if is_new else os.pread(descriptor, 1000, 0)
            os.close(descriptor)
    except OSError as error:
        raise cannot_write(path, error) from error


def _holder(descriptor: int) -> bytes:
    """Return the text that the process with the lock wrote about itself, a moment after it locked
    the file.
    """
    deadline = time.monotonic() + 2
    while True:
        written = os.pread(descriptor, 1000, 0)
        if _read(written) or time.monotonic() > deadline:
            return written
        time.sleep(0.02)


def _about(mark: str) -> bytes:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    text = {"pid": os.getpid(), "host": socket.gethostname(), "since": since, "mark": mark}
    return json.dumps(text).encode() + b"\n"


def _write(descriptor: int, content: bytes) -> None:
    os.pwrite(descriptor, content, 0)
    os.ftruncate(descriptor, len(content))


def _read(written: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        about = json.loads(written)
        if isinstance(about, dict):
            return about
    return {}


def _who(written: bytes) -> str:
    about = _read(written)
    if not about:
        return "another process"
    return f"process {about.get('pid')} on {about.get('host')} (since {about.get('since')})"


def _refusal(folder: Path, written: bytes) -> str:
    about = _read(written)
    frozen = ""
    with suppress(OSError, IndexError):
        state = Path(f"/proc/{about.get('pid')}/stat").read_text().rpartition(")")[2].split()[0]
        if about.get("host") == socket.gethostname() and state == "T":
            frozen = (
                f" That process is stopped: kill -CONT {about['pid']} lets it go on, "
                "kill -KILL ends it."
            )
    return (
        f"{folder}: {_who(written)} is writing a run in this folder, and two at once would spoil "
        f"it.{frozen} Wait for it or end it, then go on with its run by --ckpt_path last; or give "
        "another folder."
    )


def _in_child() -> None:
    """Release the lock in a forked child (a loader's worker), which must not keep it when its
    parent dies.
    """
    for lock in _held.values():
        lock._forget()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def held_by_all(folder: Path, trainer: Any) -> RunLock:
    """Lock the folder for the run: the first process holds the lock, and the others write in the
    folder, too.

    Raises:
        UserError: in all of them, if another run holds it.
    """
    lock: RunLock | None = None
    answer = ("", "")
    if trainer.is_global_zero:
        # Send a refusal to the other processes before raising it: they would wait forever
        # otherwise.
        try:
            lock = hold(folder)
            answer = (lock.mark, "")
        except UserError as error:
            answer = ("", str(error))
    mark, refusal = trainer.strategy.broadcast(answer)
    if refusal:
        raise UserError(refusal)
    return lock or join(folder, mark)
