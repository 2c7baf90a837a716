"""What a private run draws from: 32 bytes that nobody else knows, in a file of their own in the
run's ``state/``.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import UserError
from fl_lightning.sampling import generator
from fl_lightning.storage.files import written_aside

SIZE = 32  # bytes
KEY = "secret"  # in a checkpoint: the name of the secret, from which nothing follows
_NAME = re.compile("[0-9a-f]{16}")


class Secret:
    """Bytes that no copy, pickle or text of this object shows; ``name``: under which the file lies."""

    def __init__(self, name: str, value: bytes) -> None:
        self.name = name
        self._value = value

    def __repr__(self) -> str:
        return f"Secret({self.name})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a run's secret is not pickled: its file in the run's state/ is the only one that "
            "has it"
        )

    def __deepcopy__(self, memo: Any) -> None:
        """A copy has none."""

    def generator(self, purpose: str, t: int, onto: bytes = b"") -> np.random.Generator:
        """The generator for (secret, purpose, round t, digest of ``onto``).

        Raises:
            UserError: no fit has begun yet.
        """
        if not self._value:
            raise UserError(
                "participants: who takes part in a private run is drawn from a secret, which "
                "there is from on_fit_start on. Ask there, or later."
            )
        about = struct.pack(">q", t) + hashlib.blake2b(onto).digest() + purpose.encode()
        drawn = hashlib.blake2b(about, key=self._value, digest_size=40).digest()
        words = np.frombuffer(drawn, np.uint64)
        # its first word counts the numbers that are drawn
        counter = np.array([0, *words[2:]], np.uint64)
        return np.random.Generator(np.random.Philox(key=words[:2], counter=counter))

    def keep(self, content: dict[str, Any], folder: Path | None) -> None:
        """Put its name into a checkpoint's content, and the bytes into a folder, for their owner
        alone.

        Args:
            folder: None: another process does that.

        Raises:
            UserError: the folder cannot be written to.
        """
        if not self._value:
            return
        content[KEY] = self.name
        if folder is not None and _read(path := _path(folder, self.name)) != self._value:
            with written_aside(path, mode=0o600) as file:
                file.write(self._value)


NOT_YET = Secret("", b"")
Key = int | Secret
"""What privacy draws from: the run's secret, or a seed that is known."""


def drawn_from(key: Key, purpose: str, t: int, onto: bytes = b"") -> np.random.Generator:
    """The generator of a secret; of a seed, that for (seed, purpose, round t), as for all other
    draws.
    """
    if isinstance(key, Secret):
        return key.generator(purpose, t, onto)
    return generator(key, purpose, t)


def of_fit(trainer: Any, held: dict[str, Any] | None, note: Any) -> Secret:
    """The secret of the run that a checkpoint holds, else a new one; one process draws, or reads,
    and tells the others.

    Args:
        held: the run's part of the checkpoint that is resumed, or None.
        note: told where the checkpoint's cannot be had.
    """
    wanted = None if held is None else str(held.get(KEY) or "")
    told: tuple[str, bytes, str] = ("", b"", "")
    if trainer.is_global_zero:
        told = _found_or_drawn(wanted, _folders(trainer.ckpt_path, held))
    name, value, said = trainer.strategy.broadcast(told)
    if said:
        note(said)
    return Secret(name, value)


def _found_or_drawn(wanted: str | None, folders: list[Path]) -> tuple[str, bytes, str]:
    """Name and bytes, and what there is to say."""
    if wanted and _NAME.fullmatch(wanted):
        paths = [_path(folder, wanted) for folder in folders]
    else:
        paths = []
    for path in paths:
        value = _read(path)
        if value is not None and wanted is not None:
            return wanted, value, _closed(path)
    said = ""
    if wanted is not None:
        place = f" ({paths[0]})" if paths else ""
        said = (
            f"the secret that the run drew noise and coins from{place} is not there, so another "
            "is drawn: from here on the bits are others than those of a run that nothing "
            "happened to. If a round that is trained again now had been shown to anybody, it "
            "counts twice, and ε does not know"
        )
    return secrets.token_hex(8), secrets.token_bytes(SIZE), said


def _folders(ckpt_path: str | os.PathLike[str] | None, held: dict[str, Any] | None) -> list[Path]:
    """Where it may lie: beside the checkpoint, or where the run was."""
    if held is None or ckpt_path is None:
        named: Iterable[Any] = ()
    else:
        named = held.get("folders", ())
    # an absolute one stays what it is
    return [Path(str(ckpt_path)).parent / str(folder) for folder in named]


def _path(folder: Path, name: str) -> Path:
    return folder / f"secret-{name}"


def _read(path: Path) -> bytes | None:
    """The bytes; None where there is no such file, or it holds something else."""
    with suppress(OSError):
        if path.is_file() and path.stat().st_size == SIZE:  # reading a pipe would wait for ever
            return path.read_bytes()
    return None


def _closed(path: Path) -> str:
    """Let the owner alone read it; gives what there is to say where others could."""
    if os.name != "posix" or not path.stat().st_mode & 0o077:
        return ""
    with suppress(OSError):
        path.chmod(0o600)
    return f"others than its owner could read the run's secret, {path}: ε holds only if nobody did"
