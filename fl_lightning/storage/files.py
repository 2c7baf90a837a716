"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fl_lightning.errors import UserError
from fl_lightning.storage import lock


@contextmanager
def written_aside(path: Path, durable: bool = True, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A file that becomes ``path``, whole and at once, when the block ends; after an error nothing has changed.

    ``mode``: who may read and write it, less what the process's umask takes away.

    What a killed process leaves behind is ``.<name>.tmp``, which the next write of the same name replaces.

    Raises:
        UserError: the folder cannot be written to, or has become another process's.
    """
    lock.check(path)
    aside = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)  # a frozen process may have it open, and would go on writing into ours
        with open(aside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        lock.check(path)
        os.replace(aside, path)
        if durable:
            _sync_folder(path.parent)
    except lock.TakenUp:  # what lies aside may be the other's by now
        raise
    except BaseException as error:
        with suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError):
            why = error.strerror or error
            raise UserError(f"Cannot write {path}: {why}. Give a folder that can be written to.") from error
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
