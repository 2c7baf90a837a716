"""Checkpoints that are written whole or not at all, and are verified before they are loaded."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import TorchCheckpointIO, pl
from fl_lightning.storage.atomic_files import written_aside
from fl_lightning.storage.rows_on_disk import note_place

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_BROKEN = (OSError, EOFError, RuntimeError, ValueError, LookupError, zipfile.BadZipFile, zlib.error)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files on a local disk, written to a temporary file and renamed.

    Damage is found on loading. Use it as ``Trainer(plugins=[AtomicCheckpointIO()])``. Lightning's
    own writer goes through /tmp and does not fsync; its reader loads flipped bits silently.
    """

    # RowsOnDisk reads this attribute, and deletes rows only beside such a writer.
    notes_places = True
    # After an exception Lightning calls no hook but this writer's `teardown`.
    at_teardown: Callable[[], None] | None = None

    def teardown(self) -> None:
        super().teardown()
        if self.at_teardown is not None:
            self.at_teardown()

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None = None,
    ) -> None:
        """Write ``checkpoint``, without hyper-parameters that are not plain data: they could be
        read only by running code that the file names.

        Raises:
            UserError: the folder cannot be written to.
        """
        target = Path(path)
        checkpoint = dict(checkpoint)
        for key in filter(checkpoint.__contains__, HYPER_PARAMETERS):
            given = dict(checkpoint[key])
            checkpoint[key] = {name: value for name, value in given.items() if is_plain(value)}
        note_place(checkpoint, target)
        with written_aside(target) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        # Lightning passes a function here; torch cannot rebuild tensor subclasses with one
        map_location: Any = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the checkpoint; one with objects only if you pass ``weights_only=False``.

        Raises:
            UserError: the file is missing, damaged (each of its checksums is verified) or not a
                Lightning checkpoint of plain data.
        """
        source = Path(path)
        if not source.is_file():
            raise _error(source, "it does not exist" if not source.exists() else "it is not a file")
        try:
            _verify(source)
            checkpoint = torch.load(
                source, map_location=map_location, weights_only=weights_only is not False
            )
        except pickle.UnpicklingError as error:
            # Torch prints much advice; the line that names the class is the reason.
            lines = [line for line in str(error).splitlines() if "GLOBAL" in line]
            reason = lines[0] if lines else str(error)
            raise _error(
                source,
                f"it holds more than plain data ({reason.strip()[:160]}), which is read only by "
                "running code that the file names. If you trust it, give trainer.fit(…, "
                "weights_only=False), at the command line --weights_only false",
            ) from error
        except PermissionError as error:
            raise _error(source, "permission denied") from error
        except _BROKEN as error:
            raise _error(source, f"it is damaged ({str(error)[:100]})") from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise _error(source, "it is not a checkpoint of Lightning (no 'state_dict' in it)")
        # Lightning requires a version, which a run's checkpoint has and an exported model does not.
        if "loops" not in checkpoint:
            checkpoint.setdefault("pytorch-lightning_version", vars(pl)["__version__"])
        return checkpoint


def _verify(path: Path) -> None:
    """Read every byte and compare with the checksums of the file.

    Raises:
        EOFError: they differ, or it is not a whole file of torch's.
    """
    if not zipfile.is_zipfile(path):
        raise EOFError("it is incomplete, or not a checkpoint")
    with zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
    if bad is not None:
        raise EOFError(f"the checksum of {bad} does not match")


def _error(path: Path, what: str) -> UserError:
    others = [p for p in path.parent.glob("*.ckpt") if p.name != path.name and p.is_file()]
    way_out = "No other lies beside it."
    if others:
        best = min(others, key=lambda p: (p.name != "best.ckpt", -p.stat().st_mtime))
        way_out = f"Another one is there: --ckpt_path {best}."
    return UserError(f"The checkpoint {path} cannot be loaded: {what}. {way_out}")


def use_atomic_checkpoints(trainer: Any, after_exception: Callable[[], None]) -> None:
    """Give the Trainer this writer of checkpoints, unless the user chose another one.

    ``after_exception``: called when a fit has failed, and its checkpoints have been written.
    """
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def at_teardown() -> None:
        if trainer.interrupted:
            after_exception()

    if isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO):
        trainer.strategy.checkpoint_io.at_teardown = at_teardown


def is_plain(value: object) -> bool:
    """Return whether a hyper-parameter consists of numbers, text, lists and dicts."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str)
