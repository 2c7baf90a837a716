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
USER_DATA = re.compile(r'"user_data"\s*:\s*\{\s*')
COLON = re.compile(r"\s*:?\s*")
COMMA = re.compile(r"\s*,?\s*")


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


def users_of(file: Path, notes: list[str]) -> Iterator[User]:
    """Return the users of a file, in its order; odd but harmless findings are added to ``notes``.

    Raises:
        UserError: the file is broken, lists users without data, or has none.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"The file {str(file)!r} is not UTF-8 text: byte {error.start} cannot be read. "
            "Save it as UTF-8."
        ) from None
    begin = USER_DATA.search(text)
    if begin is None:
        raise UserError(
            f"The file {str(file)!r} has no key user_data: LEAF's files have users, num_samples "
            "and user_data."
        )
    found: dict[str, int] = {}
    place = begin.end()
    stop = stop_byte = 0
    while text[place : place + 1] != "}":
        name, end = _decoded(file, text, place)
        start = _past(COLON, text, end)
        start_byte = stop_byte + len(text[stop:start].encode())
        value, stop = _decoded(file, text, start)
        stop_byte = start_byte + len(text[start:stop].encode())
        x, y = (value.get("x"), value.get("y")) if isinstance(value, dict) else (None, None)
        user = User(file, str(name), x or [], y or [], start_byte, stop_byte)
        if not isinstance(x, list) or not isinstance(y, list):
            raise user.wrong("needs the lists x and y")
        found[user.name] = len(x)
        yield user
        place = _past(COMMA, text, stop)
    # Everything but the users' data, in whose place are blanks.
    rest = text[: begin.end()] + " " * (place - begin.end()) + text[place:]
    others, end = _decoded(file, rest, len(text) - len(text.lstrip()))
    if text[end:].strip():
        raise _broken(file, text, end, "nothing is expected here")
    _check_listed(file, others.get("users"), others.get("num_samples", []), found, notes)


def _past(sign: re.Pattern[str], text: str, place: int) -> int:
    found = sign.match(text, place)
    return place if found is None else found.end()


def _decoded(file: Path, text: str, place: int) -> tuple[Any, int]:
    """Return the value at a place, and where it ends."""
    try:
        return DECODER.raw_decode(text, place)
    except json.JSONDecodeError as error:
        raise _broken(file, text, error.pos, error.msg) from None
    except RecursionError:
        raise _broken(file, text, place, "it is nested too deeply") from None


def _broken(file: Path, text: str, place: int, what: str) -> UserError:
    return UserError(
        f"The file {str(file)!r} is broken at byte {len(text[:place].encode())}: {what}. The file "
        "may be cut off; copy it again, or make it again with LEAF's scripts."
    )


def _check_listed(
    file: Path, listed: Any, numbers: Any, found: dict[str, int], notes: list[str]
) -> None:
    """Refuse users without data; note users that are not listed, and wrong numbers."""
    if not isinstance(listed, list | None) or not isinstance(numbers, list):
        raise UserError(
            f"The file {str(file)!r} has users or num_samples that are not lists. Mend the file, "
            "or make it again with LEAF's scripts."
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
