"""HDF5 files with a group per client, as TFF and pfl distribute them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.accepted import PositiveInt
from fl_lightning.datamodules.formats.file_index import Arrays, indexed, texts, texts_of
from fl_lightning.datamodules.sources.file_data_module import (
    FileDataModule,
    Side,
    ascending,
    missing_package,
    no_class,
    not_finite,
)
from fl_lightning.errors import UserError
from fl_lightning.machine.processes import opened_in_each

# The names of a client's datasets in the file, by kind.
NAMES = {
    "pixels": ("pixels", "label"),
    "image": ("image", "label"),
    "snippets": ("snippets", ""),
    "tokens": ("inputs", "targets"),
}
# TFF numbers Shakespeare's characters in this order, starting at 1.
CHARACTERS = (
    "dhlptx@DHLPTX $(,048cgkoswCGKOSW[_#'/37;?bfjnrvzBFJNRVZ\"&*.26:\naeimquyAEIMQUY]!%)-159\r"
)
NUMBERS = {ord(letter): place for place, letter in enumerate(CHARACTERS, 1)}
OTHER = 87
BEGIN = 88
END = 89


class FromHDF5(FileDataModule):
    """Federated data from HDF5 files, in which each client is a group.

    TFF's files have the groups ``examples/<client>``; one file of pfl has the partitions ``train``,
    ``val`` and ``test``. The kind follows from the datasets' names: ``pixels`` and ``label`` →
    float32 ``(1, 28, 28)``; ``image`` and ``label`` → float32 ``(3, H, W)`` in [0, 1]; ``snippets``
    → TFF's windows of characters, int64 ``(length + 1,)``; ``inputs`` and ``targets`` → int64 ``(L
    + 1,)``, −1 after the end of a text. For texts y is −1, as in ``LanguageModelling``.

    The first run stores an index in ``.fl_lightning/`` beside the data.

    Args:
        train: the file; for pfl the only one.
        test, val: other files.
        x, y: names of the datasets in other files; for texts y may be left out.
        group: the group that holds the clients.
        kind: recognised from the names with ``"auto"``; ``"arrays"`` for ``x`` and ``y``.
        length: for ``snippets``, characters of a window minus one.

    Raises:
        UserError: by file and group: numbers of rows that differ, another shape or kind of number
            than the first client's, a negative label, a file that is cut off.
    """

    def __init__(
        self,
        train: str | Path,
        test: str | Path | None = None,
        val: str | Path | None = None,
        x: str | None = None,
        y: str | None = None,
        group: str | None = None,
        kind: Literal["auto", "pixels", "image", "snippets", "tokens", "arrays"] = "auto",
        tests: Literal["own", "common"] | None = None,
        length: PositiveInt = 80,
        **arguments: Any,
    ) -> None:
        super().__init__(tests=tests, **arguments)
        if (x is None) != (y is None):
            raise UserError(f"data.x is {x!r} and data.y {y!r}: give both names, or neither.")
        self.paths = {"train": Path(train).expanduser()}
        for name, path in (("test", test), ("val", val)):
            if path is not None:
                self.paths[name] = Path(path).expanduser()
        self.x = x
        self.y = y
        self.group = group
        self.kind = kind
        self.length = length

    def read(self) -> tuple[Side, Side | None, Side | None]:
        h5py()
        for name, path in self.paths.items():
            if not path.is_file():
                raise UserError(f"data.{name} is {str(path)!r}, and there is no such file.")
        self._files = list(self.paths.values())
        options: dict[str, Any] = {"reader": "hdf5", "x": self.x, "y": self.y, "group": self.group}
        options |= {"kind": self.kind, "length": self.length, "sides": sorted(self.paths)}
        beside = self.paths["train"].parent
        index = indexed(beside, self._files, options, self._index, self.tell)
        sides = {name: self._side(index, name) for name in texts_of(index["sides"])}
        return sides["train"], sides.get("test"), sides.get("val")

    def _index(self) -> Arrays:
        found: dict[str, tuple[Path, str]] = {}
        for side, path in self.paths.items():
            found |= self._groups(side, path)
        made: Arrays = {"sides": texts(list(found))}
        like: dict[str, Any] = {}
        for side, (path, group) in found.items():
            made |= self._index_of(side, path, group, like)
        (x, y, kind) = like["names"]
        pad = like.get("pad", -1)
        return {**made, "names": texts([x, y, kind]), "pad": np.array(pad)}

    def _groups(self, side: str, path: Path) -> dict[str, tuple[Path, str]]:
        """Return the group that holds the clients of each side, in one file."""
        file = opened(path)
        if self.group is not None:
            if self.group not in file:
                raise UserError(
                    f"The file {str(path)!r} has no group {self.group!r} (data.group); it has "
                    f"{', '.join(file)[:200]}."
                )
            return {side: (path, self.group)}
        if "examples" in file:
            return {side: (path, "examples")}
        partitions = [name for name in ("train", "test", "val") if name in file]
        if side == "train" and "train" in partitions:
            return {name: (path, name) for name in partitions if name not in self.paths} | {
                "train": (path, "train")
            }
        if side in partitions:
            return {side: (path, side)}
        raise UserError(
            f"The file {str(path)!r} has neither a group 'examples', as TFF's files, nor 'train', "
            f"as pfl's; it has {', '.join(file)[:200]}. Give data.group, the group that holds the "
            "clients."
        )

    def _index_of(self, side: str, path: Path, group: str, like: dict[str, Any]) -> Arrays:
        """Return names, numbers of samples and labels of one side's clients."""
        file = opened(path)
        if "pad" not in like and "metadata/pad_symbol" in file:
            like["pad"] = int(np.asarray(file["metadata/pad_symbol"]))
        clients = file[group]
        names = [name for name in clients if name != "metadata"]
        names = [names[i] for i in ascending(names)]
        if not names and not like:
            raise UserError(f"The file {str(path)!r} has no clients in its group {group!r}.")
        labels = [self._checked(clients, name, path, like) for name in names]
        sizes = np.array([len(own) for own in labels], np.int64)
        every = np.concatenate([*labels, np.zeros(0, np.int64)])
        return {
            f"{side} clients": texts(names),
            f"{side} sizes": sizes,
            f"{side} labels": every,
            f"{side} place": texts([str(path), group]),
        }

    def _checked(
        self, clients: Any, name: str, path: Path, like: dict[str, Any]
    ) -> NDArray[np.int64]:
        """Return a client's labels; errors of h5py become errors that name file and group."""
        where = f"The file {str(path)!r}, group {clients.name.strip('/') + '/' + name!r}"
        try:
            return self._labels(clients[name], where, like)
        except UserError:
            raise
        except Exception as error:  # h5py raises many kinds of errors for damaged files
            raise UserError(
                f"{where} cannot be read ({str(error)[:120]}): the file may be cut off; copy it "
                "again."
            ) from None

    def _labels(self, client: Any, where: str, like: dict[str, Any]) -> NDArray[np.int64]:
        """Return a client's labels; refuse datasets that do not fit."""
        if "names" not in like:
            like["names"] = self._names(client, where)
        (x, y, kind) = like["names"]
        for name in (x, y):
            if name and name not in client:
                raise UserError(
                    f"{where} has no dataset {name!r}; it has {', '.join(client)[:200]}."
                )
        rows = client[x]
        if kind == "snippets":
            # The windows of each snippet: its characters, a start and an end, cut into pieces.
            ends = [-(-(len(raw_of(one)) + 2) // (self.length + 1)) for one in rows[()]]
            return np.full(sum(ends), -1, np.int64)
        shape = like.setdefault("shape", rows.shape[1:])
        if rows.shape[1:] != shape:
            raise UserError(
                f"{where}: a row of {x!r} has the shape {rows.shape[1:]}, and {shape} in the first "
                "client. All rows need the same shape."
            )
        if len(rows) != len(client[y]):
            raise UserError(f"{where} has {len(rows)} rows of {x!r} and {len(client[y])} of {y!r}.")
        if kind == "tokens":
            return np.full(len(rows), -1, np.int64)
        if rows.dtype.kind not in "iufb":
            raise UserError(f"{where}: {x!r} holds {rows.dtype}, but x has to be numbers.")
        if rows.dtype == np.uint8 and len(shape) == 3 and shape[2] > 4 and kind != "pixels":
            raise UserError(
                f"{where}: {x!r} holds bytes of the shape {shape}, which are taken for pictures "
                "(height, width, channels), with 1 to 4 channels: store the channels last."
            )
        first = like.setdefault("type", rows.dtype)
        # Bytes may be pictures, which are scaled.
        if first.kind != rows.dtype.kind or (first == np.uint8) != (rows.dtype == np.uint8):
            raise UserError(
                f"{where}: {x!r} holds {rows.dtype}, and {first} in the first client. All need the "
                "same, since the type says how x is scaled."
            )
        labels = np.asarray(client[y][()])
        labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
        needed = f"the labels {y!r} have to be whole numbers from 0, one per row"
        if labels.ndim != 1 or labels.dtype.kind not in "iubf":
            raise UserError(f"{where}: {needed}, and are {labels.dtype} {labels.shape}.")
        wrong = no_class(labels)
        if wrong is not None:
            raise UserError(f"{where}: {needed}, and row {wrong} has {labels[wrong]}.")
        beyond = not_finite(np.asarray(rows[()]))
        if beyond is not None:
            raise UserError(
                f"{where}: sample {beyond} of {x!r} has a number that is not finite in single "
                "precision. Mend the sample, or leave it out."
            )
        return labels.astype(np.int64)

    def _names(self, client: Any, where: str) -> tuple[str, str, str]:
        """Return the names of x and y, and the kind."""
        if not hasattr(client, "keys"):
            raise UserError(f"{where} is not a group: each client needs a group with its datasets.")
        if self.x is not None and self.y is not None:
            return self.x, self.y, "arrays"
        for kind, (x, y) in NAMES.items():
            if self.kind in ("auto", kind) and x in client and (not y or y in client):
                return x, y, kind
        raise UserError(
            f"{where} has the datasets {', '.join(client)[:200]}, but TFF and pfl use other names: "
            "give data.x and data.y."
        )

    def _side(self, index: Arrays, side: str) -> Side:
        names = texts_of(index[f"{side} clients"])
        place = texts_of(index[f"{side} place"])
        kind = texts_of(index["names"])
        read = partial(x_of, place, names, kind, int(index["pad"]), self.length)
        return Side.of_clients(names, index[f"{side} sizes"], read, index[f"{side} labels"])


def h5py() -> Any:
    try:
        import h5py as package
    except ImportError:
        raise missing_package("h5py", "hdf5") from None
    return package


# The open files of each process: a forked process opens its own.
_OPEN: dict[tuple[int, str], Any] = {}


def opened(path: Path) -> Any:
    """Return a file, which is opened once per process.

    Raises:
        UserError: it is not an HDF5 file, or is cut off.
    """
    stat = path.stat()
    key = (os.getpid(), f"{path} {stat.st_size} {stat.st_mtime_ns}")
    if key not in _OPEN:
        try:
            _OPEN[key] = h5py().File(path, "r")
            _keep_small(_OPEN[key])
            opened_in_each.add(os.path.realpath(path))
        except OSError as error:
            raise UserError(
                f"The file {str(path)!r} cannot be read as HDF5 ({str(error)[:160]}): it may be "
                "cut off; copy it again."
            ) from None
    return _OPEN[key]


def _keep_small(file: Any) -> None:
    """Keep HDF5's cache of groups at its first size, except for the names of all clients.

    The cache grows while clients are read, to 32 MiB by its own count and 200 MiB of memory. The
    names of a group lie in one piece, which is needed for every client. For this piece the cache
    may still grow, because otherwise it would be read again for each client.
    """
    config = file.id.get_mdc_config()
    config.incr_mode = 0
    config.max_size = 128 * 2**20
    file.id.set_mdc_config(config)


def x_of(
    place: Sequence[str],
    names: Sequence[str],
    kind: Sequence[str],
    pad: int,
    length: int,
    client: int,
) -> Tensor:
    """The x of a client's samples."""
    (path, group) = place
    (x, y, what) = kind
    own = opened(Path(path))[group][names[client]]
    if what == "snippets":
        rows = torch.from_numpy(windows(own[x][()], length))
    elif what == "tokens":
        inputs = np.asarray(own[x][()], np.int64)
        tokens = np.concatenate([inputs[:, :1], np.asarray(own[y][()], np.int64)], axis=1)
        rows = torch.from_numpy(np.where(tokens == pad, -1, tokens))
    else:
        rows = tensor(np.asarray(own[x][()]), what)
    return rows


def tensor(rows: NDArray[Any], kind: str) -> Tensor:
    """A client's x ``(n, …)``."""
    if kind == "pixels":
        scale = 255 if rows.dtype == np.uint8 else 1
        return torch.from_numpy(rows.astype(np.float32)).unsqueeze(1) / scale
    if rows.dtype == np.uint8 and rows.ndim == 4:
        return torch.from_numpy(rows).permute(0, 3, 1, 2).float() / 255
    if rows.dtype.kind in "iub":
        return torch.from_numpy(rows.astype(np.int64))
    return torch.from_numpy(rows.astype(np.float32))


def raw_of(snippet: Any) -> bytes:
    return snippet.encode() if isinstance(snippet, str) else bytes(snippet)


def windows(snippets: Any, length: int) -> NDArray[np.int64]:
    """Return TFF's windows of characters ``(n, length + 1)``, −1 after the end of a snippet.

    >>> windows([b"dh"], 3).tolist()
    [[88, 1, 2, 89]]
    """
    found = []
    for snippet in snippets:
        row = [BEGIN, *(NUMBERS.get(byte, OTHER) for byte in raw_of(snippet)), END]
        row += [-1] * (-len(row) % (length + 1))
        found.append(np.array(row, np.int64).reshape(-1, length + 1))
    return np.concatenate(found) if found else np.zeros((0, length + 1), np.int64)
