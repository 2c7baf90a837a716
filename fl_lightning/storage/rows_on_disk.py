"""Client rows on disk beside a run's checkpoints, and which of them the checkpoints need."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch

from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import rank_zero_warn
from fl_lightning.machine.processes import gathered
from fl_lightning.storage.atomic_files import written_aside
from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.pickled_objects import read_plain
from fl_lightning.storage.schema import IDS, damaged, each
from fl_lightning.storage.segments import Index, merge_indices, segment_name

KEY = "federated"  # key of the run's part in a checkpoint
# A file beside the rows. It lists the other folders with checkpoints that need them, and those
# checkpoints whose names do not end in ".ckpt".
PLACES = "checkpoints.txt"


class RowsOnDisk:
    """The places of a run's client rows on disk, and which of them its checkpoints need.

    Args:
        folder: folder of their segments: ``state/`` of the run.
        checkpoints: the folders of the run's checkpoints.
        trainer: it may write checkpoints to other folders, too, or have resumed from one there.
    """

    def __init__(self, folder: Path, checkpoints: list[Path], trainer: Any) -> None:
        self.folder = folder
        self.checkpoints = checkpoints
        self.trainer = trainer
        self._known: dict[Any, Any] = {}  # indices of the checkpoint files that have been read

    @classmethod
    def of(cls, trainer: Any) -> RowsOnDisk:
        """Return the places beside the run's checkpoints."""
        root = Path(trainer.default_root_dir)
        folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        checkpoints = [Path(folder) for folder in folders if folder]
        # The run's own folder comes first: your checkpoints may lie in a logger's folder.
        own = (root / "checkpoints").resolve()
        checkpoints.sort(key=lambda folder: folder.resolve() != own)
        if not checkpoints:
            return cls(root / "state", [], trainer)
        first = checkpoints[0]
        beside = first.parent if first.name == "checkpoints" else first
        return cls(beside / "state", checkpoints, trainer)

    def flushed(self, rows: ClientRows) -> tuple[Index, list[str]]:
        """Write the rows that changed, and return the place of each, and its folder.

        Every process calls it.
        """
        store = rows.store
        if store.names():
            store.flush(self.folder)
        index = merge_indices(gathered(store.index())) if rows.world > 1 else store.index()
        # The checkpoint that is being written is not a file yet, so add its index to those of the
        # files.
        places = self._checkpoints(rows)
        self._collect(store, chain([index], self._indices(places)))
        folders = [str(self.folder.resolve())]
        if self.checkpoints:
            folders.insert(0, os.path.relpath(str(self.folder), str(self.checkpoints[0])))
        return index, folders

    def tidy(self, rows: ClientRows) -> None:
        """After the last checkpoint: delete segments that only earlier checkpoints needed.

        Every process calls it.
        """
        self._collect(rows.store, self._indices(self._checkpoints(rows)), last=True)

    def _collect(self, store: ClientStore, keep: Iterable[Index], last: bool = False) -> None:
        """Delete segments that no checkpoint needs, if what each one needs is known."""
        # Another writer, such as AsyncCheckpointIO, writes a checkpoint later, and does not note
        # its place.
        notes = getattr(self.trainer.strategy.checkpoint_io, "notes_places", False)
        if not notes or not store.names():
            return
        try:
            store.collect(self.folder, keep, last)
        except Unreadable as error:
            rank_zero_warn(f"{error}, so this run keeps all client rows in {self.folder}")

    def _checkpoints(self, rows: ClientRows) -> list[Path]:
        """Return the places of all checkpoints that need rows; every process calls it."""
        # Checkpoints of another Trainer, or of an earlier process, may need rows here, too.
        written = {*_beside(self.folder), *_places(self.folder)}
        # The first process notes places, and a network disk may show its file to others later.
        if rows.world > 1:
            written = set[Path]().union(*gathered(written))
        resumed = self.trainer.ckpt_path
        here = {folder.resolve() for folder in self.checkpoints}
        return sorted(written | here | ({place_of(Path(resumed))} if resumed else set()))

    def _indices(self, places: list[Path]) -> Iterator[Index]:
        """Return the indices of the checkpoints at these places; each file is opened once."""
        known, self._known = self._known, {}
        for place in places:
            for path in sorted(place.glob("*.ckpt")) if os.path.isdir(place) else [place]:
                # A dangling link or a pipe may have that name, too; or no file can have it; or
                # another run has just deleted its own checkpoint.
                try:
                    stat = path.stat()
                except OSError:
                    continue
                if not S_ISREG(stat.st_mode):
                    continue
                # A file that was written again has another inode, time or size.
                file = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                self._known[file] = known[file] if file in known else index_in(path)
        yield from self._known.values()


class Unreadable(Exception):
    """Names a checkpoint that torch does not read, because it holds objects."""


def place_of(path: Path) -> Path:
    """Return where a run finds the checkpoint at ``path`` again: its folder, or the file itself if
    its name does not end in ``.ckpt``.
    """
    folder = path.parent.resolve()
    return folder if path.suffix == ".ckpt" else folder / path.name


def note_place(saved: dict[str, Any], path: Path) -> None:
    """Before a checkpoint is written to ``path``: put the way from there to its rows into it, and
    note its place beside the rows, so that no later process deletes them.
    """
    held = saved.get(KEY)
    if not isinstance(held, Mapping) or not held.get("folders"):
        return
    rows = Path(held["folders"][-1])  # the absolute path
    way = os.path.relpath(rows, path.parent.resolve())
    saved[KEY] = {**held, "folders": list(dict.fromkeys([way, *held["folders"]]))}
    place = place_of(path)
    known = {*_beside(rows), *_places(rows)}
    if not held.get("clients") or not rows.is_dir() or place in known:
        return
    # The run's folder may be moved as a whole.
    inside = place.is_relative_to(rows.parent)
    lines = [*_lines(rows), os.path.relpath(place, rows) if inside else str(place)]
    with written_aside(rows / PLACES) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def _beside(rows: Path) -> set[Path]:
    """Return the folders beside which :meth:`RowsOnDisk.of` places the rows in ``rows``."""
    return {rows.parent.resolve(), (rows.parent / "checkpoints").resolve()}


def _places(rows: Path) -> set[Path]:
    """Return the other places of checkpoints that need rows in ``rows``."""
    return {(rows / line).resolve() for line in _lines(rows)}


def _lines(rows: Path) -> list[str]:
    path = rows / PLACES
    lines = path.read_text("utf-8", "replace").splitlines() if path.is_file() else []
    # After a crash of the machine the file may contain zero bytes, which no path may have.
    return [line for line in lines if "\0" not in line]


def index_read(value: Any, place: str) -> Index:
    """The kind of an index of client rows."""
    index: Index = each(each(IDS))(value, place)
    parts = []
    for key, entry in index.items():
        if not {"clients", "segments"} <= entry.keys():
            raise damaged(place)
        if len(entry["clients"]) != len(entry["segments"]):
            raise damaged(place)
        if key.startswith("parts."):
            parts.append(entry["clients"].sort().values)
    # A client that keeps parts of the model has four rows, which round/clients.py writes together.
    if len(parts) not in (0, 4) or not all(torch.equal(ids, parts[0]) for ids in parts):
        raise damaged(place)
    return index


def index_in(path: Path) -> Index:
    """Return a checkpoint's index of rows, copied out of the file; empty if it is damaged or
    not from a run.

    Raises:
        Unreadable: it holds objects, which torch reads only if it may run code.
    """
    # Reading a pipe would wait forever.
    if not path.is_file():
        return {}
    # You may keep any files there, and each kind fails with its own error.
    try:
        loaded = read_plain(path, map_location="cpu", mmap=True)
        index: Index = index_read(loaded[KEY]["clients"], KEY) if isinstance(loaded, dict) else {}
    except pickle.UnpicklingError as error:
        raise Unreadable(f"{path} holds objects, which are not read") from error
    except Exception:
        return {}
    copied: Index = {}
    for name, columns in index.items():
        copied[name] = {column: tensor.clone() for column, tensor in columns.items()}
    return copied


def find_folder(ckpt_path: str | Path | None, folders: Iterable[str], index: Index) -> Path:
    """Return the folder of the segments of ``index``: the one beside the checkpoint, else their
    earlier place.

    Another run's checkpoint may have been put beside this run's segments.
    """
    beside = Path(ckpt_path).parent if ckpt_path else Path()
    tried = [beside / folder for folder in folders]  # an absolute one stays as it is
    present = [folder for folder in tried if folder.is_dir()]
    if not present:
        raise UserError(
            f"the checkpoint's client state should be in {tried[0]}, which does not exist. Move "
            "the run's folder as a whole (checkpoints/ and state/ together), or put it back."
        )
    needed: set[str] = set()
    for entry in index.values():
        needed.update(map(segment_name, entry["segments"].unique().tolist()))
    for folder in present:
        if needed <= {path.name for path in folder.iterdir()}:
            return folder
    return present[0]
