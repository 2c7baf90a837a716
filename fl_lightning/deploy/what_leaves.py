"""The data that a site sends: the fields of its answers, its record of them, and its error texts.

A site sends only the fields that FIELDS lists. The app's README and a page of the docs show this
list. Before a site sends an answer, it adds a line to its own file: the time, the server's
question, the round, the answer, its clients, its bytes, and each field's name and bytes, but no
field's value.

An error's text may quote a site's data. So a site sends only texts that this package makes without
that data: those about messages, states, and the journal of rows. Of every other error it sends only
the class and the place; the site's own log has the text.
"""

from __future__ import annotations

import csv
import json
import os
import re
import textwrap
import traceback
from datetime import datetime, timezone
from pathlib import Path

from fl_lightning.deploy.transport import Message, bytes_of, visible
from fl_lightning.errors import CellError, UserError

CLIENT = "CLIENT/"  # in place of a client's number, which such fields begin with

# The answers that have fields, in the order of a run; EACH: fields of several kinds of answers.
EACH = "each"
WHEN = {
    "here": "Once, when the server greets the site's process (`here`):",
    "trained": "After each round in which the site's clients train (`trained`); CLIENT stands for "
    "the number of a client:",
    "evaluated": "If `config.yaml` has `PerClientEvaluation`, after each round that it measures "
    "(`evaluated`):",
    "whole": "If the site lacks a part of the model (`whole`):",
    "failed": "If something fails (`failed`):",
    EACH: "In these answers, to say what they answer:",
}
FIELDS: dict[str, dict[str, str]] = {
    "here": {
        "clients": "the numbers of the site's clients",
        "sizes": "how many training samples each of them has",
        "batches": "how many batches an epoch of each of them has",
        "tests": "how many test samples each of them has; only if `config.yaml` has "
        "`PerClientEvaluation`; 0 if they are fewer than `fewest_samples`",
        "own": "whether the site brought its own data",
        "place": "a random number that identifies the site's folder",
        "config": "the run's settings and methods, the version of fl-lightning, the number of the "
        "model's parameters, the shape of a sample's x and the number of classes as text, and a "
        "checksum of each frozen parameter",
    },
    "trained": {
        "CLIENT/update": "the client's update of the model",
        "CLIENT/code/…": "in its place, the update as the method's `encode` wrote it",
        "CLIENT/holds": "which coordinates the client trained, if clients train different ones",
        "CLIENT/upload/…": "what the methods and loggers of `config.yaml` declare as `Upload`",
        "CLIENT/absent/…": "that the client has no value of an `Upload` in this round",
        "CLIENT/row/…": "the client's states that methods declare as reported, such as its loss",
        "CLIENT/buffer/…": "changes of the learner's buffers, such as batch statistics",
        "CLIENT/maximum/…": "the learner's buffers that count",
        "CLIENT/log/…": "means of what learner and methods log, such as the loss",
        "CLIENT/metrics": "that states of the learner's metrics follow",
        "CLIENT/updates/…": "how often a metric was updated",
        "CLIENT/state/…": "a metric's counts and sums; those of a macro metric are the number of "
        "samples of each label",
        "CLIENT/name/…": "under which name a metric was logged",
        "CLIENT/alone/…": "the value of a metric whose states cannot be merged",
        "CLIENT/withheld": "that `log`, `metrics` and the four fields after it stay at the site, "
        "because they are of fewer samples than `fewest_samples`",
        "CLIENT/counts": "counts of the gradients and passes computed, and of what was sent",
        "CLIENT/kept": "how many numbers the client keeps until its next round",
        "CLIENT/finished": "whether the client's numbers are finite",
        "changed/…": "which buffers clients changed although the server keeps its own",
    },
    "evaluated": {
        "clients": "the numbers of the clients that were asked for",
        "tests": "how many test samples each of them has; 0 as above",
        "CLIENT/before/…": "the loss and each metric that `validation_step` logs, of the client's "
        "own model on its test samples, and their number",
        "CLIENT/after/…": "the same after fine-tuning",
    },
    "whole": {"base": "which version of the frozen weights the site has"},
    "failed": {
        "text": "the kind of the error and its place: the numbers of the column and the line, or "
        "the place in the code; if columns or classes differ from the server's, the names of the "
        "server's that the site lacks and the number of the site's others; the whole text of an "
        "error about messages or folders, which holds no cell",
        "user": "whether a user has to correct something",
    },
    EACH: {
        "question": "the number of the server's question",
        "run": "the number of the run",
        "round": "the number of the round",
    },
}


def field_of(answer: str, name: str) -> str:
    """Return the name in the list of a field of an answer of this kind.

    Raises:
        RuntimeError: the list lacks it.

    >>> field_of("trained", "3/upload/ControlVariates.change")
    'CLIENT/upload/…'
    """
    client, rest = of_client(name)
    word, slash, _ = rest.partition("/")
    found = f"{CLIENT if client else ''}{word}{'/…' if slash else ''}"
    if found not in FIELDS.get(answer, {}) and found not in FIELDS[EACH]:
        raise RuntimeError(f"the field {name} of the answer {answer!r} is not in FIELDS")
    return found


def of_client(name: str) -> tuple[str, str]:
    """Return the client's number that a field's name begins with, or nothing, and the rest."""
    first, slash, rest = name.partition("/")
    return (first, rest) if slash and first.isdecimal() else ("", name)


def fields_in(message: Message) -> set[str]:
    """Return the names in the list of all fields of an answer.

    Raises:
        RuntimeError: the list lacks one.
    """
    return {field_of(message.what, name) for name in (*message.numbers, *message.arrays)}


def listed() -> str:
    """Return the list as Markdown."""
    lines: list[str] = []
    for kind, when in WHEN.items():
        lines += [*textwrap.wrap(when, 100), ""]
        for name, text in FIELDS[kind].items():
            lines += textwrap.wrap(f"- `{name}`: {text}", 100, subsequent_indent="  ")
        lines.append("")
    return "\n".join(lines).rstrip()


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
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with open(descriptor, "a", encoding="utf-8", errors="replace", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not os.fstat(descriptor).st_size:
            writer.writerow(COLUMNS)
        writer.writerow(line)


LOG = "site.log"
TOLD = "site.told"  # file with what the server is told of the error that ended a site's process
# Modules whose errors hold nothing of a site's samples, and one that quotes the site's file.
_OF_MESSAGES = ("fl_lightning.deploy.", "fl_lightning.aggregation.metric_states")
_OF_FILE = "fl_lightning.deploy.flower.serve_site"
# From the first slash to the last of a line: names of folders may have blanks.
_FOLDERS = re.compile(r"(?<![\w.])/[^\n]*/")
MOST = 1000  # characters
LOGGED = 10_000  # characters of an error in the site's own log


def told(error: BaseException) -> str:
    """Return what the server may know of an error at a site."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    if not frames:
        return f"{type(error).__name__}; the text is in the site's {LOG}"
    frame, line = frames[-1]
    module = str(frame.f_globals.get("__name__", ""))
    of_messages = module.startswith(_OF_MESSAGES) and module != _OF_FILE
    if isinstance(error, UserError) and of_messages:
        return visible(_FOLDERS.sub("…/", str(error)), MOST)
    place = f"{Path(frame.f_code.co_filename).name}, line {line}"
    if isinstance(error, CellError) and error.place:
        place = f"the site's data, {error.place}"
    return visible(f"{type(error).__name__} in {place}; the text is in the site's {LOG}", MOST)
