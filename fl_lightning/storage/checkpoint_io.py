"""Checkpoints that are written whole or not at all, and are verified before they are loaded."""

from __future__ import annotations

import os
import pickle
import re
import traceback
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import TorchCheckpointIO, pl, rank_zero_warn
from fl_lightning.storage import lock
from fl_lightning.storage.atomic_files import written_aside
from fl_lightning.storage.pickled_objects import CannotPickle, pickle_objects, places, read_plain
from fl_lightning.storage.rows_on_disk import note_place

HYPER_PARAMETERS = (
    "hyper_parameters",
    "hparams_name",
    "hparams_type",
    "datamodule_hyper_parameters",
)
_BROKEN = (OSError, EOFError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files on a local disk, written to a temporary file and renamed.

    Damage is found on loading. Use it as ``Trainer(plugins=[AtomicCheckpointIO()])``. Lightning's
    own writer goes through /tmp and does not fsync; its reader loads flipped bits silently.
    """

    _told = False
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
        """Write ``checkpoint``; objects that are not plain data are stored as bytes.

        Raises:
            UserError: the folder cannot be written to, or an object cannot be pickled.
        """
        target = Path(path)
        lock.check(target)
        checkpoint = self._all_readable(checkpoint)
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
        """Return the checkpoint; objects stored as bytes stay bytes, unless you pass
        ``weights_only=False``.

        Raises:
            UserError: the file is missing, damaged (each of its checksums is verified) or not a
                Lightning checkpoint of plain data.
        """
        source = Path(path)
        if not source.is_file():
            raise _error(source, "it does not exist" if not source.exists() else "it is not a file")
        try:
            _verify(source)
        except PermissionError as error:
            raise _error(source, "permission denied") from error
        except _BROKEN as error:
            raise _error(source, f"it is damaged ({str(error)[:100]})") from error
        try:
            if weights_only is False:
                checkpoint = torch.load(source, map_location=map_location, weights_only=False)
            else:
                checkpoint = read_plain(source, map_location=map_location)
        except pickle.UnpicklingError as error:
            # Torch prints much advice; the line that names the class is the reason.
            lines = [line for line in str(error).splitlines() if "GLOBAL" in line]
            reason = lines[0] if lines else str(error)
            raise _error(
                source, f"it holds more than plain data: {reason.strip()[:160]}"
            ) from error
        except Exception as error:
            raise _not_loaded(source, error) from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise _error(source, "it is not a checkpoint of Lightning (no 'state_dict' in it)")
        # Lightning requires a version, which a run's checkpoint has and an exported model does not.
        if "loops" not in checkpoint:
            checkpoint.setdefault("pytorch-lightning_version", vars(pl)["__version__"])
        version = checkpoint.get("pytorch-lightning_version")
        if not isinstance(version, str) or not re.match(r"v?\d+(\.\d+)*", version):
            raise _error(
                source,
                f"it is damaged: its pytorch-lightning_version is {str(version)[:100]!r}, which is "
                "not a version",
            )
        return checkpoint

    def _all_readable(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        moved: list[str] = []
        parts: dict[str, Any] = {}
        for key, part in checkpoint.items():
            try:
                # Only `load_from_checkpoint` restores hyper-parameters, so a run continues without
                # those that cannot be written.
                if key in HYPER_PARAMETERS:
                    parts[key] = _hyper_parameters(key, part)
                else:
                    parts[key] = pickle_objects(part, f"checkpoint[{key!r}]", moved)
            except CannotPickle as error:
                raise UserError(
                    f"The checkpoint cannot be written: {error}. Leave it out of the results of "
                    "on_save_checkpoint and state_dict."
                ) from error
        if moved and not self._told:
            self._told = True
            rank_zero_warn(
                f"{moved[0]}, which cannot be read without running code that the file names: if it "
                "has to be restored, give trainer.fit(…, weights_only=False), at the command line "
                "--weights_only false. Tensors, numbers, text, lists and dicts can be read without "
                "this option (a NumPy scalar as float(value))."
            )
        return parts


def _hyper_parameters(key: str, given: Any) -> Any:
    if not isinstance(given, dict):
        return pickle_objects(given, f"checkpoint[{key!r}]", [])
    parameters: dict[Any, Any] = {}
    for name, value in given.items():
        try:
            parameters[name] = pickle_objects(value, f"the hyper-parameter {name!r}", [])
        except CannotPickle as error:
            rank_zero_warn(
                f"{error}: checkpoints do not contain it, so pass it to load_from_checkpoint"
            )
    return parameters


def _verify(path: Path) -> None:
    """Read every byte and compare with the checksums of the file.

    Raises:
        EOFError: with the reason.
    """
    if path.stat().st_size == 0:
        raise EOFError("the file is empty")
    if not zipfile.is_zipfile(path):
        raise EOFError("it is incomplete, or not a checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (NotImplementedError, IndexError, UnicodeDecodeError, zlib.error) as error:
        raise EOFError(f"its table of contents is damaged: {error}") from error
    if bad is not None:
        raise EOFError(f"the checksum of {bad} does not match")


def _error(path: Path, what: str) -> UserError:
    others = [p for p in path.parent.glob("*.ckpt") if p.name != path.name and p.is_file()]
    way_out = "No other lies beside it."
    if others:
        best = min(others, key=lambda p: (p.name != "best.ckpt", -p.stat().st_mtime))
        way_out = f"Another one is there: --ckpt_path {best}."
    return UserError(f"The checkpoint {path} cannot be loaded: {what}. {way_out}")


def _not_loaded(path: Path, error: Exception) -> Exception:
    """Return the error for a file that torch cannot load, although its checksums are right."""
    kinds: list[type] = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        values = frame.f_locals.values()
        kinds += [value for value in values if isinstance(value, type) and is_subclass(value)]
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if kinds:
        # Do not suggest another checkpoint: each one of the run holds such a tensor.
        return UserError(
            f"The checkpoint {path} cannot be loaded: it is not damaged, but torch cannot make a "
            f"tensor of the class {kinds[-1].__name__} again, which it holds ({reason}). The run's "
            "other checkpoints hold such tensors, too. Load it with the versions of torch and of "
            "the package of that class that wrote it, or begin the run again with plain tensors "
            "as weights."
        )
    if isinstance(error, _BROKEN):
        return _error(path, f"it is damaged ({str(error)[:100]})")
    return error


def is_subclass(kind: type) -> bool:
    return issubclass(kind, torch.Tensor) and kind not in (torch.Tensor, torch.nn.Parameter)


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


def check_readable(saved: dict[str, Any], learner: Any, trainer: Any) -> None:
    """Refuse a checkpoint that cannot be restored without an object that is stored as bytes.

    Raises:
        UserError: it gives the object's place, and how to read it.
    """
    base: Any = next(c for c in reversed(type(learner).__mro__) if c.__name__ == "LightningModule")
    # A learner with its own hook may read any entry of the checkpoint.
    reads_all = type(learner).on_load_checkpoint is not base.on_load_checkpoint
    restored: tuple[str, ...] = ()
    if trainer.state.fn == "fit":
        restored = ("callbacks", type(trainer.datamodule).__qualname__)
    for key, part in saved.items():
        if key not in restored and (not reads_all or key in HYPER_PARAMETERS):
            continue
        place = next(places(part, f"checkpoint[{key!r}]"), None)
        if place is not None:
            raise UserError(
                f"ckpt_path: {place} is an object, which cannot be read without running code that "
                "the file names. If you trust the checkpoint, give trainer.fit(…, "
                "weights_only=False), at the command line --weights_only false."
            )
