"""The users of a LEAF file, each with its place in bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError

DECODER = json.JSONDecoder()
BLANK = re.compile(r"[ \t\r\n]*")


@dataclass
class User:
    """A user whose samples lie in the bytes ``start`` to ``stop`` of ``file``."""

    file: Path
    name: str
    x: list[Any]
    y: list[Any]
    start: int
    stop: int

    def wrong(self, what: str) -> UserError:
        return UserError(
            f"The file {str(self.file)!r}: user {self.name!r} (byte {self.start}) {what}. Mend the "
            "file, or make it again with LEAF's scripts."
        )


class _Text:
    """A JSON text that is read object by object, so that the places of objects are known."""

    def __init__(self, file: Path) -> None:
        self.file = file
        raw = file.read_bytes()
        try:
            self.text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"The file {str(file)!r} is not UTF-8 text: byte {error.start} cannot be read. "
                "Save it as UTF-8."
            ) from None
        self._plain = len(raw) == len(self.text)
        self._at = (0, 0)

    def byte(self, place: int) -> int:
        """Return the byte at which a character begins; places have to ascend from call to call."""
        if self._plain:
            return place
        (character, byte) = self._at if self._at[0] <= place else (0, 0)
        byte += len(self.text[character:place].encode())
        self._at = (place, byte)
        return byte

    def wrong(self, place: int, what: str) -> UserError:
        return UserError(
            f"The file {str(self.file)!r} is broken at byte {self.byte(place)}: {what}. The file "
            "may be cut off; copy it again, or make it again with LEAF's scripts."
        )

    def past(self, place: int) -> int:
        """Return the next place that is not blank."""
        blank = BLANK.match(self.text, place)
        assert blank is not None
        return blank.end()

    def value(self, place: int) -> tuple[Any, int]:
        try:
            return DECODER.raw_decode(self.text, place)
        except json.JSONDecodeError as error:
            raise self.wrong(error.pos, error.msg) from None
        except RecursionError:
            raise self.wrong(place, "it is nested too deeply") from None

    def members(self, place: int) -> Iterator[tuple[str, int]]:
        """Yield keys of the object at ``place``, each with the place of its value.

        The caller sends back the place after the value.
        """
        place = self._expect("{", place)
        if self.text[place : place + 1] == "}":
            self.end = place + 1
            return
        while True:
            key, place = self.value(place)
            if not isinstance(key, str):
                raise self.wrong(place, "a key has to be a text")
            start = self._expect(":", self.past(place))
            yield key, start
            place = self.past(self.end)
            if self.text[place : place + 1] == "}":
                self.end = place + 1
                return
            place = self._expect(",", place)

    def _expect(self, sign: str, place: int) -> int:
        place = self.past(place)
        if self.text[place : place + 1] != sign:
            raise self.wrong(place, f"{sign!r} is expected")
        return self.past(place + 1)


def users_of(file: Path, notes: list[str]) -> Iterator[User]:
    """Return the users of a file, in its order; odd but harmless findings are added to ``notes``.

    Raises:
        UserError: the file is broken, lists users without data, or has none.
    """
    text = _Text(file)
    listed: list[Any] | None = None
    numbers: list[Any] = []
    found: dict[str, int] = {}
    has_data = False
    for key, start in text.members(0):
        if key == "user_data":
            has_data = True
            for name, place in text.members(start):
                value, text.end = text.value(place)
                fits = isinstance(value, dict)
                x, y = (value.get("x"), value.get("y")) if fits else (None, None)
                if not isinstance(x, list) or not isinstance(y, list):
                    raise text.wrong(place, f"user {name!r} needs the lists x and y")
                found[name] = len(x)
                yield User(file, name, x, y, text.byte(place), text.byte(text.end))
            continue
        value, text.end = text.value(start)
        if key == "users":
            listed = value
        if key == "num_samples":
            numbers = value
    if text.past(text.end) != len(text.text):
        raise text.wrong(text.past(text.end), "nothing is expected after the object")
    if not has_data:
        raise UserError(
            f"The file {str(file)!r} has no key user_data: LEAF's files have users, num_samples "
            "and user_data."
        )
    if not isinstance(listed, list | None) or not isinstance(numbers, list):
        raise UserError(
            f"The file {str(file)!r} has users or num_samples that are not lists. Mend the file, "
            "or "
            "make it again with LEAF's scripts."
        )
    for name in listed or []:
        if not isinstance(name, str) or name not in found:
            raise UserError(
                f"The file {str(file)!r} lists the user {name!r}, and user_data has no data of "
                "this user. Mend the file, or make it again with LEAF's scripts."
            )
    if listed is not None and (unlisted := sorted(set(found) - set(listed))):
        notes.append(
            f"{file.name}: {len(unlisted)} users have data and are not listed in users "
            f"({', '.join(unlisted[:5])}); they are clients, too"
        )
    pairs = zip(listed or [], numbers, strict=False)
    differ = [name for name, number in pairs if found[name] != number]
    if differ:
        notes.append(
            f"{file.name}: num_samples differs from the samples of {len(differ)} users "
            f"({', '.join(map(str, differ[:5]))}); the samples count"
        )
