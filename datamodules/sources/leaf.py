"""LEAF's JSON files (Caldas et al., 2018): FEMNIST, Shakespeare, Sent140, CelebA, synthetic."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.accepted import PositiveInt
from fl_lightning.datamodules.formats.file_index import Arrays, indexed, texts, texts_of
from fl_lightning.datamodules.formats.leaf_json import User, users_of
from fl_lightning.datamodules.formats.pictures import Pictures
from fl_lightning.datamodules.formats.tokens import padded, tokenizer_of
from fl_lightning.datamodules.sources.file_data_module import (
    SHOWN,
    FileDataModule,
    Side,
    ascending,
)
from fl_lightning.errors import UserError

ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
PLACES = {letter: place for place, letter in enumerate(ALPHABET)}
WORDS = re.compile(r"[\w']+|[.,!?;]")
PICTURE = (".jpg", ".jpeg", ".png")
# Number of classes, for those kinds of data whose labels have a known range.
CLASSES = {"femnist": 62}
# The column with the text of a tweet in LEAF's Sent140.
TEXT = 4


@dataclass(frozen=True)
class Kind:
    """How samples of one kind become tensors."""

    name: str
    unknown: bool = False

    def length(self, x: Any) -> int | None:
        """Return the length of an x, if all have the same; None: they differ."""
        return None if self.name in ("sent140", "celeba") else len(x)

    def right(self, x: Any) -> bool:
        """Return whether an x is of this kind."""
        if self.name in ("femnist", "numbers"):
            return isinstance(x, list) and (self.name == "numbers" or len(x) == 784)
        if self.name == "sent140":
            return isinstance(x, list) and len(x) > TEXT and isinstance(x[TEXT], str)
        return isinstance(x, str)

    def label(self, y: Any) -> int | None:
        """Return the class of a y; None if y is not a class."""
        if self.name == "shakespeare":
            one = y if isinstance(y, str) and len(y) == 1 else ""
            return PLACES.get(one, len(ALPHABET) if self.unknown and one else None)
        if isinstance(y, list) and len(y) == 1:
            (y,) = y
        if isinstance(y, bool) or not isinstance(y, int | float) or y < 0 or y % 1:
            return None
        most = CLASSES.get(self.name, np.iinfo(np.int64).max)
        return int(y) if y < most else None

    def check(self, user: User, first: Any) -> NDArray[np.int64]:
        """Return the labels of a user's samples, after checking that all are like the first
        sample of the data.
        """
        if len(user.x) != len(user.y):
            raise user.wrong(f"has {len(user.x)} x and {len(user.y)} y")
        labels = []
        for place, (x, y) in enumerate(zip(user.x, user.y, strict=True)):
            if not self.right(x) or self.length(x) != self.length(first):
                raise user.wrong(
                    f"has a sample {place} whose x is of another kind or length than the first "
                    f"sample's: it is {str(x)[:60]!r}"
                )
            label = self.label(y)
            if label is None:
                classes = CLASSES.get(self.name)
                known = f" ({self.name} has the classes 0 to {classes - 1})" if classes else ""
                if self.name == "shakespeare" and isinstance(y, str) and len(y) == 1:
                    known = ": LEAF's alphabet lacks it (data.unknown=true makes it class 80)"
                raise user.wrong(
                    f"has a sample {place} whose y is {y!r}, which is not a class{known}"
                )
            labels.append(label)
        if self.name in ("femnist", "numbers") and user.x:
            self._check_finite(user)
        return np.array(labels, np.int64)

    def _check_finite(self, user: User) -> None:
        for place, x in enumerate(user.x):
            try:
                found = np.asarray(x)
                # NumPy makes numbers of texts such as "1", and tensors are not made of them.
                number = found.dtype.kind not in "US"
                finite = number and bool(np.isfinite(found.astype(np.float32)).all())
            except (TypeError, ValueError, OverflowError):
                finite = False
            if not finite:
                raise user.wrong(
                    f"has a sample {place} with an x that is not a finite number: {_odd(x)[:60]}"
                )


def _odd(x: Any) -> str:
    """Return the first part of an x that is not a finite number in single precision, as text."""
    if isinstance(x, list):
        parts = [odd for part in x if (odd := _odd(part))]
        return parts[0] if parts else ""
    if isinstance(x, int | float) and abs(x) <= float(np.finfo(np.float32).max):
        return ""
    return repr(x)


def kind_of(x: Any) -> str:
    """Return the kind of data that has this x as its first."""
    if isinstance(x, str):
        return "celeba" if x.lower().endswith(PICTURE) else "shakespeare"
    if isinstance(x, list) and any(isinstance(part, str) for part in x):
        return "sent140"
    return "femnist" if isinstance(x, list) and len(x) == 784 else "numbers"


class FromLEAF(FileDataModule):
    """Federated data from LEAF's files: ``path/train/*.json`` and optionally ``path/test/*.json``.

    Clients are LEAF's users, in ascending order of their names. The first run reads the files once
    and stores an index of them in ``.fl_lightning/`` beside the data. Later runs read only the
    samples that they need.

    Args:
        path: the folder with ``train`` and ``test``.
        kind: ``"femnist"`` (x ``(1, 28, 28)``), ``"shakespeare"`` (x int64 ``(80,)``),
            ``"sent140"`` (x int64 ``(length,)`` or ``(words,)``), ``"celeba"`` (x ``(3, image_size,
            image_size)``), ``"numbers"`` (x ``(d,)``); ``"auto"`` recognises the kind from the
            first sample.
        images: for ``celeba``, the folder of the pictures.
        image_size: for ``celeba``.
        vocabulary: for ``sent140``, a JSON file with a list of words, or ``{"vocab": […]}``. x is
            then the place of each word; unknown words and padding get the number of words.
        words: for ``sent140`` with ``vocabulary``, the number of words of an x.
        length: for ``sent140`` without vocabulary, the number of tokens of an x, −1 after its end.
        tokenizer: for ``sent140``, a local folder with a tokenizer; None: the tokens are bytes.
        unknown: for ``shakespeare``, labels outside of the alphabet get the number 80; False: they
            are refused.
        tests: ``"own"`` or ``"common"``, as for all readers of files.

    Raises:
        UserError: a broken file, a user in two files, a NaN, or samples of different kinds; the
            error names file and place.
    """

    def __init__(
        self,
        path: str | Path,
        kind: Literal["auto", "femnist", "shakespeare", "sent140", "celeba", "numbers"] = "auto",
        images: str | Path | None = None,
        image_size: PositiveInt = 84,
        vocabulary: str | Path | None = None,
        words: PositiveInt = 25,
        length: PositiveInt = 128,
        tokenizer: str | None = None,
        unknown: bool = False,
        tests: Literal["own", "common"] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(tests=tests, **arguments)
        self.path = Path(path).expanduser()
        self.kind = kind
        self.images = None if images is None else Path(images).expanduser()
        self.image_size = image_size
        self.words = words
        self.length = length
        self.tokenizer = tokenizer
        self.unknown = unknown
        self._vocabulary = None if vocabulary is None else _words_of(Path(vocabulary).expanduser())

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """Return the shape of x, which follows from the kind or from the first sample."""
        size = arguments.get("image_size", 84)
        shapes = {"femnist": (1, 28, 28), "celeba": (3, size, size), "shakespeare": (80,)}
        known = shapes.get(str(arguments.get("kind")))
        return known or super().shape_of_samples(**arguments)

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the number of classes, which follows from the kind or from the labels."""
        letters = len(ALPHABET) + bool(arguments.get("unknown"))
        known = {**CLASSES, "shakespeare": letters}.get(str(arguments.get("kind")))
        return known or super().classes_of_samples(**arguments)

    def read(self) -> tuple[Side, Side | None, Side | None]:
        sides = {side: sorted((self.path / side).glob("*.json")) for side in ("train", "test")}
        if not sides["train"]:
            hint = ""
            if any(self.path.glob("*.json")):
                hint = f" Did you mean {str(self.path.parent)!r}?"
            if any((self.path / "train").glob("*.gz")):
                hint = " Its files are packed: unpack them (gunzip train/*.gz test/*.gz)."
            raise UserError(
                f"data.path is {str(self.path)!r}, and there are no files train/*.json in it: give "
                f"the folder in which LEAF's scripts wrote train and test, often data/.{hint}"
            )
        self._files = [*sides["train"], *sides["test"]]
        for file in self._files:
            if not file.is_file():
                raise UserError(
                    f"{str(file)!r} is not a file that can be read: it is a folder, or a link to a "
                    "file that is not there. Remove it, or copy the file again."
                )
        options = {"reader": "leaf", "kind": self.kind, "unknown": self.unknown}
        index = indexed(self.path, self._files, options, partial(self._index, sides), self.tell)
        name = str(texts_of(index["kind"])[0])
        if self.kind == "auto":
            self.tell(f"these are data of kind={name}, by their first sample")
        for note in texts_of(index["notes"]):
            self.tell(note)
        self._open(name)
        if name == "femnist":
            self.class_names = [*map(str, range(10)), *map(chr, range(65, 91))]
            self.class_names += [*map(chr, range(97, 123))]
        elif name == "shakespeare":
            self.class_names = [*ALPHABET, *(["other"] if self.unknown else [])]
        train = self._side(index, "train")
        return train, (self._side(index, "test") if sides["test"] else None), None

    def _index(self, sides: dict[str, list[Path]]) -> Arrays:
        """Return each user's place, number of samples and labels."""
        made: Arrays = {}
        notes: list[str] = []
        first: Any = None
        kind = Kind(self.kind, self.unknown)
        for side, files in sides.items():
            seen: dict[str, Path] = {}
            rows: list[tuple[int, int, int, int]] = []
            labels: list[NDArray[np.int64]] = []
            names: list[str] = []
            for number, file in enumerate(files):
                for user in users_of(file, notes):
                    if user.name in seen:
                        other = seen[user.name]
                        where = "twice" if other == file else f"in {str(other)!r}, too"
                        raise user.wrong(f"occurs {where}: one of the two would be lost")
                    seen[user.name] = file
                    if first is None and user.x:
                        first = user.x[0]
                        if self.kind == "auto":
                            kind = Kind(kind_of(first), self.unknown)
                    labels.append(kind.check(user, first))
                    names.append(user.name)
                    rows.append((number, user.start, user.stop, len(user.x)))
            order = ascending(names)
            made[f"{side} names"] = texts([names[i] for i in order])
            made[f"{side} rows"] = np.array([rows[i] for i in order], np.int64).reshape(-1, 4)
            parts = [labels[i] for i in order] or [np.zeros(0, np.int64)]
            made[f"{side} labels"] = np.concatenate(parts)
        if kind.name == "auto":
            raise UserError(f"data.path is {str(self.path)!r}, whose files have no samples.")
        return {**made, "kind": texts([kind.name]), "notes": texts(notes[:SHOWN])}

    def _side(self, index: Arrays, side: str) -> Side:
        names = texts_of(index[f"{side} names"])
        rows = index[f"{side} rows"]
        files = [file for file in self._files if file.parent.name == side]
        read = partial(_x_of, files, rows, self._made)
        return Side.of_clients(names, rows[:, 3], read, index[f"{side} labels"])

    def _open(self, kind: str) -> None:
        """Choose how an x becomes a tensor."""
        if kind == "celeba":
            if self.images is None:
                raise UserError(
                    "These are LEAF's CelebA data, whose samples are names of pictures: give "
                    "data.images, the folder that holds them (img_align_celeba)."
                )
            pictures = Pictures(size=(self.image_size, self.image_size), filter=None)
            self._made: Any = partial(_picture, self.images, pictures)
        elif kind == "sent140" and self._vocabulary is not None:
            self._made = partial(_places, self._vocabulary, self.words)
        elif kind == "sent140":
            self._made = partial(_tokens, tokenizer_of(self.tokenizer), self.length)
        else:
            self._made = {"femnist": _grey, "shakespeare": _letters, "numbers": _numbers}[kind]


def _x_of(files: Sequence[Path], rows: NDArray[np.int64], made: Any, client: int) -> list[Tensor]:
    """Return the x of a user's samples, read from its place in its file."""
    (number, start, stop, _) = rows[client].tolist()
    with open(files[number], "rb") as file:
        file.seek(start)
        found = json.loads(file.read(stop - start))
    return [made(x) for x in found["x"]]


def _grey(x: list[float]) -> Tensor:
    return torch.tensor(x, dtype=torch.float32).view(1, 28, 28)


def _numbers(x: list[float]) -> Tensor:
    return torch.tensor(x, dtype=torch.float32)


def _letters(x: str) -> Tensor:
    return torch.tensor([PLACES.get(letter, len(ALPHABET)) for letter in x])


def _tokens(tokenizer: Any, length: int, x: list[str]) -> Tensor:
    return torch.from_numpy(padded(tokenizer.pairs([(x[TEXT],)], length), length)[0]).long()


def _places(vocabulary: dict[str, int], words: int, x: list[str]) -> Tensor:
    found = [vocabulary.get(word, len(vocabulary)) for word in WORDS.findall(x[TEXT])][:words]
    return torch.tensor(found + [len(vocabulary)] * (words - len(found)))


def _picture(folder: Path, pictures: Pictures, x: str) -> Tensor:
    file = folder / x
    if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
        raise UserError(
            f"A sample is the picture {x!r}, which is not in data.images={str(folder)!r}: give the "
            "folder that holds the pictures."
        )
    return pictures.tensor(pictures.read(file))


def _words_of(path: Path) -> dict[str, int]:
    """Return the words of a vocabulary and their places."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.vocabulary is {str(path)!r}, which cannot be read as JSON ({error})."
        ) from None
    words = found.get("vocab") if isinstance(found, dict) else found
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(
            f"data.vocabulary is {str(path)!r}: give a JSON file with a list of words, or with "
            '{"vocab": [words]}.'
        )
    return {word: place for place, word in enumerate(words)}
