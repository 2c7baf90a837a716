"""LEAF's JSON files (Caldas et al., 2018): FEMNIST, Shakespeare, Sent140, CelebA, synthetic."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.formats.pictures import Pictures
from fl_lightning.datamodules.formats.tokens import tokenizer_of
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
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveInt

DECODER = json.JSONDecoder()
USER_DATA = re.compile(r'"user_data"\s*:\s*\{\s*')
SEPARATOR = re.compile(r"\s*[:,]?\s*")


@dataclass(frozen=True)
class User:
    """A user whose samples lie in the bytes ``start`` to ``stop`` of a file."""

    where: str
    name: str
    samples: Any
    start: int
    stop: int


def users_of(file: Path) -> Iterator[User]:
    """Return the users of a file, in its order.

    Raises:
        UserError: the file is broken.
    """
    with refused(
        f"The file {str(file)!r} is broken",
        "The file may be cut off: copy it again, or make it again with LEAF's scripts.",
    ):
        text = file.read_bytes().decode("utf-8")
        begin = USER_DATA.search(text)
        if begin is None:
            raise ValueError("it has no key user_data")
        place = begin.end()
        before = len(text[:place].encode())  # bytes before this place
        while text[place : place + 1] != "}":
            name, end = DECODER.raw_decode(text, place)
            begins = _past(text, end)
            samples, ends = DECODER.raw_decode(text, begins)
            start = before + len(text[place:begins].encode())
            stop = start + len(text[begins:ends].encode())
            yield User(f"The file {str(file)!r}: user {name!r}", name, samples, start, stop)
            place = _past(text, ends)
            before = stop + len(text[ends:place].encode())


def _past(text: str, place: int) -> int:
    found = SEPARATOR.match(text, place)
    assert found is not None  # it matches nothing, too
    return found.end()


ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
PLACES = {letter: place for place, letter in enumerate(ALPHABET)}
WORDS = re.compile(r"[\w']+|[.,!?;]")
PICTURE = (".jpg", ".jpeg", ".png")
# The column with the text of a tweet in LEAF's Sent140.
TEXT = 4


def kind_of(x: Any) -> str:
    """Return the kind of data that has this x as its first."""
    if isinstance(x, str):
        return "celeba" if x.lower().endswith(PICTURE) else "shakespeare"
    if isinstance(x, list) and any(isinstance(part, str) for part in x):
        return "sent140"
    return "femnist" if isinstance(x, list) and len(x) == 784 else "numbers"


def labels_of(user: User, kind: str, unknown: bool, like: list[int]) -> NDArray[np.int64]:
    """Return the labels of a user's samples, after checking that all are of one kind.

    Args:
        unknown: characters outside of LEAF's alphabet are a class.
        like: the length of the first x of the data; empty before it.
    """
    with refused(
        f"{user.where} has samples that are not of kind={kind}",
        "data.unknown=true makes characters outside of the alphabet class 80."
        if kind == "shakespeare"
        else "Mend the file, or make it again with LEAF's scripts.",
    ):
        x = user.samples["x"]
        y = user.samples["y"]
        if len(x) != len(y):
            raise ValueError(f"{len(x)} x and {len(y)} y")
        of_texts = [one[TEXT] if kind == "sent140" else one for one in x]
        if kind not in ("femnist", "numbers") and not all(isinstance(one, str) for one in of_texts):
            raise ValueError("an x that is not a text")
        if kind not in ("celeba", "sent140"):
            like += [len(x[0])] if x and not like else []
            other = [place for place, one in enumerate(x) if len(one) != like[0]]
            if other:
                raise ValueError(f"sample {other[0]} has another length than the first, {like[0]}")
        if kind in ("femnist", "numbers") and x:
            check_finite(np.array(x, np.float32), user.where)
        if kind == "shakespeare":
            return np.array(
                [PLACES.get(one, len(ALPHABET)) if unknown else PLACES[one] for one in y]
            )
        return whole_labels(np.array(y).reshape(-1) if y else np.zeros(0), user.where)


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

    def read(self) -> tuple[Side, Side | None, Side | None]:
        sides = {side: sorted((self.path / side).glob("*.json")) for side in ("train", "test")}
        if not sides["train"]:
            raise UserError(
                f"data.path is {str(self.path)!r}, and there are no files train/*.json in it: give "
                "the folder in which LEAF's scripts wrote train and test, often data/, with "
                "unpacked files."
            )
        self._files = [*sides["train"], *sides["test"]]
        options = {"reader": "leaf", "kind": self.kind, "unknown": self.unknown}
        index = indexed(self.path, self._files, options, partial(self._index, sides), self.tell)
        name = str(texts_of(index["kind"])[0])
        if self.kind == "auto":
            self.tell(f"these are data of kind={name}, by their first sample")
        self._made = self._maker(name)
        if name == "femnist":
            self.class_names = list(string.digits + string.ascii_uppercase + string.ascii_lowercase)
        elif name == "shakespeare":
            self.class_names = [*ALPHABET, *(["other"] if self.unknown else [])]
        train = self._side(index, "train")
        return train, (self._side(index, "test") if sides["test"] else None), None

    def _index(self, sides: dict[str, list[Path]]) -> Arrays:
        """Return each user's place, number of samples and labels."""
        made: Arrays = {}
        kind: str = self.kind
        like: list[int] = []
        for side, files in sides.items():
            found: dict[str, tuple[tuple[int, int, int], NDArray[np.int64]]] = {}
            for number, file in enumerate(files):
                for user in users_of(file):
                    if user.name in found:
                        raise UserError(
                            f"{user.where} occurs twice in {str(file.parent)!r}, and the samples "
                            "of one of the two would be lost. Leave one of them out."
                        )
                    if kind == "auto" and isinstance(user.samples, dict) and user.samples.get("x"):
                        kind = kind_of(user.samples["x"][0])
                    labels = labels_of(user, kind, self.unknown, like)
                    found[user.name] = ((number, user.start, user.stop), labels)
            names = list(found)
            names = [names[i] for i in ascending(names)]
            made |= indexed_side(side, names, [found[name][1] for name in names])
            made[f"{side} places"] = np.array([found[name][0] for name in names], np.int64)
        return {**made, "kind": texts([kind])}

    def _side(self, index: Arrays, side: str) -> Side:
        files = [file for file in self._files if file.parent.name == side]
        read = partial(_x_of, files, index[f"{side} places"], self._made)
        return Side.of_index(index, side, read)

    def _maker(self, kind: str) -> Callable[[Any], Tensor]:
        """Return the function that makes an x of what the file has."""
        if kind == "celeba":
            if self.images is None:
                raise UserError(
                    "These are LEAF's CelebA data, whose samples are names of pictures: give "
                    "data.images, the folder that holds them (img_align_celeba)."
                )
            pictures = Pictures(size=(self.image_size, self.image_size), filter=None)
            return partial(_picture, self.images, pictures)
        if kind == "sent140" and self._vocabulary is not None:
            return partial(_places, self._vocabulary, self.words)
        if kind == "sent140":
            return partial(_tokens, tokenizer_of(self.tokenizer), self.length)
        if kind == "shakespeare":
            return _letters
        return partial(_numbers, (1, 28, 28) if kind == "femnist" else (-1,))


def _x_of(
    files: Sequence[Path], places: NDArray[np.int64], made: Callable[[Any], Tensor], client: int
) -> list[Tensor]:
    (number, start, stop) = places[client].tolist()
    with open(files[number], "rb") as file:
        file.seek(start)
        found = json.loads(file.read(stop - start))
    return [made(x) for x in found["x"]]


def _numbers(shape: Sequence[int], x: list[float]) -> Tensor:
    return torch.tensor(x, dtype=torch.float32).view(*shape)


def _letters(x: str) -> Tensor:
    return torch.tensor([PLACES.get(letter, len(ALPHABET)) for letter in x])


def _tokens(tokenizer: Any, length: int, x: list[str]) -> Tensor:
    return torch.from_numpy(tokenizer.table([(x[TEXT],)], length)[0]).long()


def _places(vocabulary: dict[str, int], words: int, x: list[str]) -> Tensor:
    found = [vocabulary.get(word, len(vocabulary)) for word in WORDS.findall(x[TEXT])][:words]
    return torch.tensor(found + [len(vocabulary)] * (words - len(found)))


def _picture(folder: Any, pictures: Pictures, x: str) -> Tensor:
    return pictures.tensor(pictures.read(folder / x))


def _words_of(path: Path) -> dict[str, int]:
    found = json.loads(path.read_text("utf-8"))
    words = found["vocab"] if isinstance(found, dict) else found
    return {word: place for place, word in enumerate(words)}
