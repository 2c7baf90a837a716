"""The file in which a site notes each answer, before the answer leaves.

It has a line for each answer: when, what the server asked, the round, the answer, its clients, its
bytes, and its fields with the bytes of each. It holds no value of a field.
"""

from __future__ import annotations

import csv
import io
import json
import os
from datetime import datetime, timezone
from pathlib import Path

from fl_lightning.deploy.transport import Message, bytes_of, visible
from fl_lightning.deploy.what_leaves import fields_in, of_client
from fl_lightning.errors import UserError

FILE = "left.csv"
COLUMNS = ("time", "asked", "round", "answer", "clients", "bytes", "fields")
QUESTIONS = ("hello", "round", "evaluate")


def note(folder: Path, question: Message, answer: Message) -> None:
    """Add a line about an answer to the site's file; the answer may leave only after this.

    ``question``: the server's message, whose names and numbers are not checked yet.

    Raises:
        UserError: the file cannot be written.
        RuntimeError: the answer has a field that the list of what leaves lacks.
    """
    fields_in(answer)
    clients, sizes = _of_fields(answer)
    asked = question.what if question.what in QUESTIONS else "something else"
    line = [
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        asked,
        visible(question.numbers.get("round", ""), 20),
        answer.what,
        " ".join(map(str, sorted(clients))),
        bytes_of(answer),
        "; ".join(f"{visible(name, 1000)} {size}" for name, size in sizes.items()),
    ]
    try:
        _append(folder / FILE, line)
    except OSError as error:
        raise UserError(
            f"site folder {folder}: {FILE} cannot be written ({error.strerror or error}). The site "
            "sends nothing that it has not noted there. Make room for the file, and start again."
        ) from error


def _of_fields(answer: Message) -> tuple[set[int], dict[str, int]]:
    """Return the clients that an answer is about, and the bytes of its fields by name.

    Fields of several clients that differ only in the client's number are added up.
    """
    clients = set(answer.arrays["clients"].tolist()) if "clients" in answer.arrays else set()
    sizes: dict[str, int] = {}
    numbers = {name: len(json.dumps(number)) for name, number in answer.numbers.items()}
    for name, size in (*numbers.items(), *((n, a.nbytes) for n, a in answer.arrays.items())):
        client, rest = of_client(name)
        if client:
            clients.add(int(client))
        sizes[rest] = sizes.get(rest, 0) + size
    return clients, sizes


def _append(path: Path, line: list[object]) -> None:
    """Add a line in one write; a line that a killed process left unfinished is ended first."""
    text = io.StringIO()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "r+b", buffering=0) as file:
        end = os.fstat(descriptor).st_size
        if not end:
            csv.writer(text, lineterminator="\n").writerow(COLUMNS)
        elif os.pread(descriptor, 1, end - 1) != b"\n":
            text.write("\n")
        csv.writer(text, lineterminator="\n").writerow(line)
        data = text.getvalue().encode(errors="replace")
        if file.write(data) != len(data):
            raise OSError("the disk is full")
