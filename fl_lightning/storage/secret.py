"""A private run draws from a secret: 32 bytes that only the run knows.

The 32 bytes lie in their own file in the run's ``state/``.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.errors import UserError
from fl_lightning.sampling import generator
from fl_lightning.storage.atomic_files import written_aside

SIZE = 32  # bytes
_NAME = re.compile("[0-9a-f]{16}")


class Secret:
    """Bytes that no copy, pickle or text of this object shows.

    ``name``: the file's name, which a checkpoint holds; the bytes cannot be derived from it.
    """

    def __init__(self, name: str, value: bytes) -> None:
        self.name = name
        self._value = value

    def __repr__(self) -> str:
        return f"Secret({self.name})"

    def __reduce__(self) -> Any:
        raise TypeError("a run's secret is not pickled: only its file in the run's state/ holds it")

    def __deepcopy__(self, memo: Any) -> None:
        """A copy has none."""

    def generator(
        self, purpose: str, *counters: int, onto: bytes | memoryview = b""
    ) -> np.random.Generator:
        """Return the generator for (secret, purpose, counters, digest of ``onto``).

        Raises:
            UserError: no fit has begun yet.
        """
        if not self._value:
            raise UserError(
                "participants: a private run draws its participants from a secret, which exists "
                "from on_fit_start on. Ask for participants in that hook or later."
            )
        counted = struct.pack(f">{len(counters)}q", *counters)
        # With the processor's own SHA-256 it takes half the time of BLAKE2; a sum is megabytes.
        about = counted + hashlib.sha256(onto).digest() + purpose.encode()
        drawn = hashlib.blake2b(about, key=self._value, digest_size=40).digest()
        words = np.frombuffer(drawn, np.uint64)
        # Philox uses the first word of its counter to count draws.
        counter = np.array([0, *words[2:]], np.uint64)
        return np.random.Generator(np.random.Philox(key=words[:2], counter=counter))

    def keep(self, folder: Path) -> None:
        """Write the bytes to a file that only its owner can read.

        Raises:
            UserError: the folder cannot be written to.
        """
        if not self._value:
            return
        path = _path(folder, self.name)
        if _read(path) != self._value:
            with written_aside(path, mode=0o600) as file:
                file.write(self._value)


NOT_YET = Secret("", b"")
# Draws for privacy use the run's secret, or a public seed.
Key = int | Secret


def drawn_from(
    key: Key, purpose: str, *counters: int, onto: bytes | memoryview = b""
) -> np.random.Generator:
    """Generator of a secret or a seed for (purpose, counters), up to three, such as (round, client,
    step); a secret's also for ``onto``.
    """
    if isinstance(key, Secret):
        return key.generator(purpose, *counters, onto=onto)
    return generator(key, purpose, *counters)


def of_fit(trainer: Any, wanted: str | None, folders: Sequence[str], note: Any) -> Secret:
    """Return the secret of the run that is resumed, else a new one.

    Args:
        wanted: its name in the checkpoint; None: no run is resumed.
        folders: folders of that checkpoint in which the file may lie.
        note: called with a text if the checkpoint's secret is not available.
    """
    # One process reads or draws the secret and sends it to the others, so that all draw the same
    # participants and noise.
    answer: tuple[str, bytes, str] = ("", b"", "")
    if trainer.is_global_zero:
        answer = _found_or_drawn(wanted, _folders(trainer.ckpt_path, folders))
    name, value, warning = trainer.strategy.broadcast(answer)
    if warning:
        note(warning)
    return Secret(name, value)


def _found_or_drawn(wanted: str | None, folders: list[Path]) -> tuple[str, bytes, str]:
    """Return name and bytes of a secret, and a warning; the warning is empty if there is none."""
    paths: list[Path] = []
    # The name comes from a checkpoint, which may be forged: it must not lead to any other file.
    if wanted and _NAME.fullmatch(wanted):
        paths = [_path(folder, wanted) for folder in folders]
    for path in paths:
        value = _read(path)
        if value is not None and wanted is not None:
            return wanted, value, _closed(path)
    warning = ""
    if wanted is not None:
        place = f" ({paths[0]})" if paths else ""
        warning = (
            f"the secret that the run drew noise and coins from{place} is not there, so another "
            "is drawn: from here on the bits are others than those of a run that nothing "
            "happened to. If a round that is trained again now had been shown to anybody, it "
            "counts twice, and ε does not know"
        )
    return secrets.token_hex(8), secrets.token_bytes(SIZE), warning


def _folders(ckpt_path: str | os.PathLike[str] | None, folders: Sequence[str]) -> list[Path]:
    """Folders in which the file may lie: beside the checkpoint, or at the run's earlier place."""
    if ckpt_path is None:
        return []
    # Joining an absolute folder to another leaves it unchanged.
    beside = Path(str(ckpt_path)).parent
    return [beside / folder for folder in folders]


def _path(folder: Path, name: str) -> Path:
    return folder / f"secret-{name}"


def _read(path: Path) -> bytes | None:
    # Read only regular files: reading a pipe would wait forever.
    with suppress(OSError):
        if path.is_file() and path.stat().st_size == SIZE:
            return path.read_bytes()
    return None


def _closed(path: Path) -> str:
    """Let only the owner read the file, and return a warning if others could."""
    if os.name != "posix" or not path.stat().st_mode & 0o077:
        return ""
    with suppress(OSError):
        path.chmod(0o600)
    return f"others than its owner could read the run's secret, {path}: ε holds only if nobody did"
