"""Files that are written whole or not at all."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fl_lightning.errors import UserError, cannot_write


class _Remembering(io.FileIO):
    """Remembers why it could not be written; torch.save says only ``unexpected pos``."""

    failed: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.failed = error
            raise


@contextmanager
def written_aside(path: Path, durable: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a file that becomes ``path``, whole and at once, when the block ends.

    After an error nothing has changed. A link stays, and the file to which it leads is written. A
    killed process leaves ``.<name>.tmp`` behind, which the next write of the same name replaces.

    Args:
        mode: permissions, minus the process's umask.

    Raises:
        UserError: the folder cannot be written to; or a device or pipe has that name.
    """
    path = writable_as_file(path)
    aside = path.with_name(f".{path.name}.tmp")
    raw: _Remembering | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may still have an old temporary file open, and would write into ours.
        aside.unlink(missing_ok=True)
        raw = _Remembering(aside, "wb", opener=lambda name, flags: os.open(name, flags, mode))
        # Flush the content to disk before renaming, so that a power failure cannot leave an
        # incomplete file under the name. Flush the folder, which holds the name, last.
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(aside, path)
        if durable:
            _sync_folder(path.parent)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink()
        failed: object = error
        # Torch wraps the system's error in its own, which hides the reason.
        if isinstance(error, Exception) and not isinstance(error, OSError):
            failed = raw and raw.failed
        if isinstance(failed, OSError):
            raise cannot_write(path, failed) from error
        raise


def writable_as_file(path: Path) -> Path:
    """Return the place at which a file of this name is written: there, or the target of a link of
    this name.

    Raises:
        UserError: a device, a pipe or a folder has that name, and a file would replace it.
    """
    try:
        place = Path(os.path.realpath(path)) if path.is_symlink() else path
        mode = place.lstat().st_mode if os.path.lexists(place) else stat.S_IFREG
    except OSError as error:
        raise cannot_write(path, error) from error
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device, a pipe or a link to itself"
        raise UserError(f"Cannot write {path}: it is {kind}. Give the name of a file.")
    return place


def named(text: str) -> Path:
    """A path as a user writes it: with ``~`` for the home folder and ``$NAME`` for a variable."""
    return Path(os.path.expanduser(os.path.expandvars(text)))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
