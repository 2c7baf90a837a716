"""An index of data files: a first run records in it what the files contain, so that later runs need
not read them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import UserError

# The content of an index may change from version to version.
FORMAT = 2
FOLDER = ".fl_lightning"

Arrays = dict[str, NDArray[Any]]


def state_of(files: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return name, size and time of modification (ns) of each file."""
    facts = []
    # Resolve each folder once, not each file: a folder may hold one file per client, and resolving
    # a path takes ten times as long as everything else here.
    parents = {file.parent for file in files}
    folders = {parent: os.path.realpath(parent) for parent in parents}
    for file in files:
        stat = file.stat()
        name = os.path.join(folders[file.parent], file.name)
        facts.append((name, stat.st_size, stat.st_mtime_ns))
    return facts


def indexed(
    beside: Path,
    files: Sequence[Path],
    options: dict[str, Any],
    make: Callable[[], Arrays],
    tell: Callable[[str], None],
) -> Arrays:
    """Return the index of ``files``: the existing one, or a new one, which is stored.

    If a file changes, it gets another index. A damaged index is made again.

    Args:
        beside: the folder of the data. If this folder cannot be written to, the index lies in the
            user's cache folder.
        options: the reader's options on which the index depends.
        make: function that reads the files.
        tell: function that reports where a new index lies.
    """
    key = json.dumps([FORMAT, state_of(files), options], sort_keys=True)
    name = f"index-{hashlib.sha256(key.encode()).hexdigest()[:24]}.npz"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fl_lightning"
    folders = [beside / FOLDER, cache]
    for folder in folders:
        found = _read(folder / name)
        if found is not None:
            return found
    made = make()
    if json.dumps([FORMAT, state_of(files), options], sort_keys=True) != key:
        raise UserError(
            f"The data in {str(beside)!r} changed while they were read. Start again when nothing "
            "writes to them."
        )
    for folder in folders:
        try:
            _write(folder / name, made)
        except OSError:
            continue
        tell(f"the index of these data is {str(folder / name)!r}; later runs begin with it")
        break
    return made


def _write(path: Path, made: Arrays) -> None:
    """Write an index whole or not at all; processes that start together do not disturb each other.

    A killed process leaves a file whose name begins with a dot; no later run reads it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Processes on two machines may have the same number.
    aside = path.with_name(f".{path.stem}-{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with open(aside, "wb") as file:
            np.savez(file, **made)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _read(path: Path) -> Arrays | None:
    """Return an index, verified by its archive's checksums; None: it does not exist, or is
    damaged.
    """
    if not path.is_file():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except Exception:  # NumPy and zipfile raise many kinds of errors for damaged files
        return None


def texts(values: Sequence[str]) -> NDArray[np.uint8]:
    """Return texts as bytes, for an index."""
    return np.frombuffer(json.dumps(list(values)).encode(), np.uint8)


def texts_of(array: NDArray[np.uint8]) -> list[str]:
    """The texts again."""
    found: list[str] = json.loads(array.tobytes().decode())
    return found
