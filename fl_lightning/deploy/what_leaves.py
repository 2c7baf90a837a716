"""What leaves a site: every field that an answer to the server may have, with its meaning.

A site sends no field that this list lacks. The app's README and docs/sites.md show the list.
"""

from __future__ import annotations

import textwrap

from fl_lightning.deploy.transport import BFLOAT, Message

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
        "fewest_samples": "that number of `site.yaml`",
        "own": "whether the site brought its own data",
        "shape": "the shape of a sample's x",
        "classes": "how many classes the labels have",
        "parameters": "how many parameters the model has",
        "place": "a random number that identifies the site's folder",
        "version": "the version of fl-lightning",
        "config": "the run's settings and methods as text, and a checksum of each frozen parameter",
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
        "CLIENT/items/…": "0, in place of a metric's list that is empty",
        "CLIENT/name/…": "under which name a metric was logged",
        "CLIENT/alone/…": "the value of a metric whose states cannot be merged",
        "CLIENT/withheld": "that `log`, `metrics` and the five fields after it stay at the site, "
        "because they are of fewer samples than `fewest_samples`",
        "CLIENT/counts": "counts of the gradients and passes computed, and of what was sent",
        "CLIENT/kept": "how many numbers the client keeps until its next round",
        "CLIENT/reads/…": "which methods read the client's mean gradient",
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
    name = name.removesuffix(BFLOAT)
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
