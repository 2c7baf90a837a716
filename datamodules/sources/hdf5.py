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

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.sources.file_data_module import (
    Arrays,
    FileDataModule,
    Side,
    ascending,
    check_finite,
    indexed,
    indexed_side,
    texts,
    texts_of,
    whole_labels,
)
from fl_lightning.errors import UserError, optional
from fl_lightning.introspection.accepted import PositiveInt
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
        for path in self.paths.values():
            opened(path)  # names the file if it is not there
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
        return {**made, "names": texts(like["names"]), "pad": np.array(like.get("pad", -1))}

    def _groups(self, side: str, path: Path) -> dict[str, tuple[Path, str]]:
        file = opened(path)
        if self.group is not None or "examples" in file:
            return {side: (path, self.group or "examples")}
        partitions = [name for name in ("train", "test", "val") if name in file]
        if side not in partitions:
            raise UserError(
                f"The file {str(path)!r} has neither a group 'examples', as TFF's files, nor "
                f"'train', as pfl's; it has {', '.join(file)[:200]}. Give data.group, the group "
                "that holds the clients."
            )
        others = [name for name in partitions if side == "train" and name not in self.paths]
        return {name: (path, name) for name in [*others, side]}

    def _index_of(self, side: str, path: Path, group: str, like: dict[str, Any]) -> Arrays:
        """Return names, numbers of samples and labels of one side's clients."""
        file = opened(path)
        if "pad" not in like and "metadata/pad_symbol" in file:
            like["pad"] = int(np.asarray(file["metadata/pad_symbol"]))
        labels: list[NDArray[np.int64]] = []
        remedy = "The file may be cut off: copy it again."
        with refused(f"The file {str(path)!r}, group {group!r} cannot be read", remedy):
            names = [name for name in file[group] if name != "metadata"]
            names = [names[i] for i in ascending(names)]
        for name in names:
            where = f"The file {str(path)!r}, group {f'{group}/{name}'!r}"
            with refused(f"{where} cannot be read", remedy):
                labels.append(self._labels(file[group][name], where, like))
        made = indexed_side(side, names, labels)
        return {**made, f"{side} place": texts([str(path), group])}

    def _labels(self, client: Any, where: str, like: dict[str, Any]) -> NDArray[np.int64]:
        """Return a client's labels; refuse datasets that do not fit."""
        if "names" not in like:
            like["names"] = self._names(client, where)
        (x, y, kind) = like["names"]
        rows = client[x]
        if kind == "snippets":
            # The windows of each snippet: its characters, a start and an end, cut into pieces.
            ends = [-(-(len(raw_of(one)) + 2) // (self.length + 1)) for one in rows[()]]
            return np.full(sum(ends), -1, np.int64)
        # Bytes may be pictures, which are scaled.
        form = (rows.shape[1:], rows.dtype == np.uint8, rows.dtype.kind)
        first = like.setdefault("form", (form, rows.dtype))
        if len(rows) != len(client[y]):
            raise UserError(f"{where} has {len(rows)} rows of {x!r} and {len(client[y])} of {y!r}.")
        if form != first[0]:
            raise UserError(
                f"{where} has {x!r} of {rows.dtype} of the shape {form[0]}, and the first client "
                f"{first[1]} of the shape {first[0][0]}; the type says how x is scaled."
            )
        pictures = kind in ("image", "arrays") and form[1] and len(form[0]) == 3
        if pictures and form[0][2] > 4:
            raise UserError(
                f"{where} has bytes of the shape {form[0]}, which are taken for pictures (height, "
                "width, 1 to 4 channels): store the channels last."
            )
        if kind == "tokens":
            return np.full(len(rows), -1, np.int64)
        check_finite(np.asarray(rows[()]), where)
        return whole_labels(np.asarray(client[y][()]), where)

    def _names(self, client: Any, where: str) -> tuple[str, str, str]:
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
        names = texts_of(index[f"{side} names"])
        place = texts_of(index[f"{side} place"])
        kind = texts_of(index["names"])
        read = partial(x_of, place, names, kind, int(index["pad"]), self.length)
        return Side.of_index(index, side, read)


# The open files of each process: a forked process opens its own.
_OPEN: dict[tuple[int, str], Any] = {}


def opened(path: Path) -> Any:
    """Return a file, which is opened once per process.

    Raises:
        UserError: it is not an HDF5 file, or is cut off.
    """
    remedy = "Give the right path. A file may also be cut off: copy it again."
    with refused(f"The file {str(path)!r} cannot be read as HDF5", remedy):
        stat = path.stat()
        key = (os.getpid(), f"{path} {stat.st_size} {stat.st_mtime_ns}")
        if key not in _OPEN:
            _OPEN[key] = optional("h5py", "hdf5", "FromHDF5").File(path, "r")
            _keep_small(_OPEN[key])
            opened_in_each.add(os.path.realpath(path))
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
