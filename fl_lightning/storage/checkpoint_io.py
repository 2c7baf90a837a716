"""Checkpoints that are written whole or not at all, and are proven before they are loaded."""

from __future__ import annotations

import os
import pickle
import zipfile
import zlib
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_lightning.plugins.io import TorchCheckpointIO

from fl_lightning.errors import UserError
from fl_lightning.storage.files import written_aside


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's checkpoint files on a local disk, written aside and renamed; damage is found on loading.

    Use it as ``Trainer(plugins=[AtomicCheckpointIO()])``. Lightning's own writer goes through /tmp and does not
    fsync; its reader loads flipped bits silently.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write ``checkpoint``.

        Raises:
            UserError: the folder cannot be written to, or the checkpoint could not be read back.
        """
        target = Path(path)
        if where := _not_plain(checkpoint):
            raise UserError(
                f"The checkpoint {target} would not load again: {where}, and only plain data is read back. Save "
                "tensors, numbers, text, lists and dicts (a NumPy scalar as float(value))."
            )
        with suppress(OSError):
            for stale in target.parent.glob(".*.ckpt.tmp"):  # of a process that was killed while it wrote
                stale.unlink()
        with written_aside(target) as file:
            torch.save(checkpoint, file)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable[..., Any] | None = lambda storage, _: storage,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """The checkpoint, loaded with ``weights_only=True`` whatever is asked for.

        Raises:
            UserError: the file is missing, damaged (each of its checksums is verified) or not a Lightning checkpoint of
                plain data.
        """
        source = Path(path)
        if not source.is_file():
            raise _error(source, "it does not exist" if not source.exists() else "it is not a file")
        try:
            _verify(source)
            checkpoint = torch.load(source, map_location=map_location, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error))
            raise _error(source, f"it holds more than plain data: {reason.strip()[:160]}") from error
        except PermissionError as error:
            raise _error(source, "permission denied") from error
        except (OSError, EOFError, RuntimeError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise _error(source, f"it is damaged ({str(error)[:100]})") from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise _error(source, "it is not a checkpoint of Lightning (no 'state_dict' in it)")
        return checkpoint


def _not_plain(value: Any, where: str = "checkpoint") -> str:
    """Where something lies that ``weights_only=True`` refuses, and its type; empty if nowhere."""
    if isinstance(value, dict):
        return next(filter(None, (_not_plain(v, f"{where}[{k!r}]") for k, v in value.items())), "")
    if type(value) in (list, tuple, set):
        return next(filter(None, (_not_plain(v, f"{where}[{i}]") for i, v in enumerate(value))), "")
    refused = (np.ndarray, np.generic, Path, range, slice, Enum, deque, frozenset, Decimal, timedelta)
    return f"{where} is a {type(value).__name__}" if isinstance(value, refused) else ""


def _verify(path: Path) -> None:
    """Read every byte and compare with the checksums of the file; raises an error that says what is wrong."""
    if path.stat().st_size == 0:
        raise EOFError("the file is empty")
    if not zipfile.is_zipfile(path):
        raise EOFError("it is cut short, or no checkpoint at all")
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
    except (NotImplementedError, IndexError, UnicodeDecodeError, zlib.error) as error:
        raise EOFError(f"its table of contents makes no sense: {error}") from error
    if bad is not None:
        raise EOFError(f"the checksum of {bad} does not match")


def _error(path: Path, what: str) -> UserError:
    others = sorted(
        (p for p in path.parent.glob("*.ckpt") if p.name != path.name and p.is_file()),
        key=lambda p: (p.name != "best.ckpt", -p.stat().st_mtime),
    )
    way_out = f"Another one is there: --ckpt_path {others[0]}." if others else "No other lies beside it."
    return UserError(f"The checkpoint {path} cannot be loaded: {what}. {way_out}")


def is_plain(value: object) -> bool:
    """Whether ``torch.load(weights_only=True)`` can read a hyper-parameter back."""
    if isinstance(value, (list, tuple)):
        return all(is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str)


def use_atomic_checkpoints(trainer: Any) -> None:
    """Write the Trainer's checkpoints aside and rename them, unless the user chose another CheckpointIO."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
