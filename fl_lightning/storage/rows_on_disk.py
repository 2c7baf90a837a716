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
from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.storage.segments import Index, merge_indices, segment_name

KEY = "federated"  # key of the run's part in a checkpoint
# A file beside the rows: a checkpoint that needs them lies elsewhere, so none is ever deleted.
NEEDED = "needed-elsewhere"


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
        """Write changed rows, and return each one's place, and the folder; in every process."""
        store = rows.store
        if store.names():
            store.flush(self.folder)
        index = merge_indices(gathered(store.index())) if rows.world > 1 else store.index()
        # The checkpoint that is being written is not a file yet.
        self._collect(rows, chain([index], self._indices()))
        folders = [str(self.folder.resolve())]
        if self.checkpoints:
            folders.insert(0, os.path.relpath(str(self.folder), str(self.checkpoints[0])))
        return index, folders

    def tidy(self, rows: ClientRows) -> None:
        """Delete what only earlier checkpoints needed, after the last; in every process."""
        self._collect(rows, self._indices(), last=True)

    def _collect(self, rows: ClientRows, keep: Iterable[Index], last: bool = False) -> None:
        """Delete segments that no checkpoint needs, if what each one needs is known."""
        elsewhere = (self.folder / NEEDED).exists()
        # The first process writes this file, and a network disk may show it to others later.
        if rows.world > 1:
            elsewhere = any(gathered(elsewhere))
        # Another writer, such as AsyncCheckpointIO, writes a checkpoint later, and does not note
        # its place.
        notes = getattr(self.trainer.strategy.checkpoint_io, "notes_places", False)
        if elsewhere or not notes or not rows.store.names():
            return
        try:
            rows.store.collect(self.folder, keep, last)
        except Unreadable as error:
            rank_zero_warn(f"{error}, so this run keeps all client rows in {self.folder}")

    def _indices(self) -> Iterator[Index]:
        """Return the indices of the checkpoints beside the rows, and of the one that was resumed;
        each file is opened once.
        """
        known, self._known = self._known, {}
        places = sorted(_beside(self.folder))
        if self.trainer.ckpt_path:
            places.append(Path(self.trainer.ckpt_path))
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


def note_place(saved: dict[str, Any], path: Path) -> None:
    """Before a checkpoint is written to ``path``: put the way from there to its rows into it. If it
    does not lie beside them, no later process deletes any.
    """
    held = saved.get(KEY)
    if not isinstance(held, Mapping) or not held.get("folders"):
        return
    rows = Path(held["folders"][-1])  # the absolute path
    folder = path.parent.resolve()
    way = os.path.relpath(rows, folder)
    saved[KEY] = {**held, "folders": list(dict.fromkeys([way, *held["folders"]]))}
    aside = path.suffix != ".ckpt" or folder not in _beside(rows)
    if aside and held.get("clients") and rows.is_dir():
        (rows / NEEDED).touch()


def _beside(rows: Path) -> set[Path]:
    return {rows.parent.resolve(), (rows.parent / "checkpoints").resolve()}


def index_in(path: Path) -> Index:
    """Return a checkpoint's index of rows, copied out of the file; empty if it is damaged or
    not from a run.

    Raises:
        Unreadable: it holds objects, which torch reads only if it may run code.
    """
    # You may keep any files there, and each kind fails with its own error.
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        index: Index = loaded[KEY]["clients"]
        copied: Index = {}
        for name, columns in index.items():
            copied[name] = {column: tensor.clone() for column, tensor in columns.items()}
        return copied
    except pickle.UnpicklingError as error:
        raise Unreadable(f"{path} holds objects, which are not read") from error
    except Exception:
        return {}


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
