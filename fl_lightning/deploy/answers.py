"""Sites' answers, checked: a message's bytes become one of these classes, or a wrong answer.

Nothing behind this module sees a raw message of a site. Each function raises
:class:`~fl_lightning.deploy.fields.WrongField` if a field is missing, too many, or not what it has
to be.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fl_lightning.aggregation.update_accumulator import ClientResult
from fl_lightning.deploy.client_results import MOST_NAMES, UNFIT, Results
from fl_lightning.deploy.fields import (
    LARGEST,
    MOST,
    MOST_SAMPLES,
    Fields,
    check_name,
)
from fl_lightning.deploy.transport import Message, visible

MOST_CONFIG = 2**22  # bytes of a site's config, which has a checksum of each frozen parameter
MOST_ERROR = 2000  # bytes of the text of an error
# client → "" or "_finetuned" → metric → value, as evaluation.personal.measured gives them
Values = dict[int, dict[str, dict[str, float]]]
KINDS = {"before": "", "after": "_finetuned"}


@dataclass(frozen=True)
class Here:
    """The data and the config of a site.

    Args:
        place: a number that identifies the folder of its rows.
        own: whether it brought its data.
        sizes, batches, tests: of each of its clients: samples, batches of an epoch, and test
            samples; ``tests`` is empty if the server did not ask for it.
        config: as :func:`~fl_lightning.deploy.same_config.config_of`.
    """

    place: int
    own: bool
    clients: list[int]
    sizes: list[int]
    batches: list[int]
    tests: list[int]
    config: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Trained:
    """The results of each client of a round.

    ``changed``: buffers that clients changed although the server keeps its own. ``left``: fields
    whose values do not count, each with the reason.
    """

    clients: dict[int, ClientResult]
    changed: list[str]
    left: list[tuple[str, str]]


@dataclass(frozen=True)
class Evaluated:
    """Measurements of clients' own models, and each client's number of test samples.

    ``left``: as in :class:`Trained`.
    """

    samples: dict[int, int]
    values: Values
    left: list[tuple[str, str]]


def failed(message: Message) -> str:
    """Return why a site cannot go on, and whether its code failed."""
    fields = _about(message)
    of_code = "" if fields.flag("user") else " (an error of the code at that site)"
    text = visible(fields.text("text", MOST_ERROR), MOST_ERROR)
    fields.end()
    return text + of_code


def refusal(message: Message) -> str:
    """Return a transport's text about a site that does not run the app, or is not understood."""
    return visible(Fields.of(message).text("text", MOST_ERROR), MOST_ERROR)


def whole(message: Message, run: int) -> int:
    """Return the version of the base of a site that lacks a part of the model; 0: the first."""
    fields = _about(message)
    fields.integer("run", run, run)
    fields.integer("round", -1)
    base = fields.integer("base")
    fields.end()
    return base


def here(message: Message, run: int, m: int, asks_tests: bool) -> Here:
    """Return a site's data and config.

    Args:
        m: number of clients of the run.
        asks_tests: whether it was asked for its clients' numbers of test samples.
    """
    fields = _about(message)
    fields.integer("run", run, run)
    clients = fields.integers("clients", 0, m - 1, most=m)
    n = len(clients)
    if not clients or len(set(clients)) < n:
        fields.wrong("clients", "names no client, or one twice")
    sizes = fields.integers("sizes", 1, MOST_SAMPLES, n)
    batches = fields.integers("batches", 1, MOST_SAMPLES, n)
    if any(b > size for b, size in zip(batches, sizes, strict=True)):
        fields.wrong("batches", "says that a client has more batches than samples")
    found = Here(
        place=fields.integer("place"),
        own=fields.flag("own"),
        clients=clients,
        sizes=sizes,
        batches=batches,
        tests=fields.integers("tests", 0, MOST_SAMPLES, n) if asks_tests else [],
        config=_config(fields),
    )
    fields.end()
    return found


def _config(fields: Fields) -> dict[str, dict[str, Any]]:
    text = fields.text("config", MOST_CONFIG)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        fields.wrong("config", "is not JSON")
    kinds = {"arguments", "methods", "frozen"}
    parts = isinstance(config, dict) and config.keys() == kinds
    if not parts or not all(isinstance(part, dict) for part in config.values()):
        fields.wrong("config", f"does not hold {', '.join(sorted(kinds))}")
    found: dict[str, dict[str, Any]] = config
    return found


def trained(
    message: Message, clients: Collection[int], run: int, t: int, results: Results
) -> Trained:
    """Return what these clients bring from round t."""
    fields = _about(message)
    fields.integer("run", run, run)
    fields.integer("round", t, t)
    changed = fields.under("changed")
    names = [*changed.numbers]
    for name in names:
        if name not in results.round.buffers or not changed.flag(name):
            changed.wrong(name, "is not a buffer of the learner")
    changed.end()
    of_clients = fields.by_first([str(client) for client in clients])
    fields.end()
    results.left = []
    found = {client: results.of_client(of_clients[str(client)], client) for client in clients}
    results.accept(found.values())
    return Trained(found, names, results.left)


def evaluated(
    message: Message,
    run: int,
    t: int,
    tests: Mapping[int, int | None],
    tuned: bool,
    validated: Collection[str],
) -> Evaluated:
    """Return the measurements of clients.

    Args:
        t: the last round before them.
        tests: the clients that the site was asked about, each with the number of test samples that
            its site reported before; None: it reported none.
        tuned: whether to measure after fine-tuning, too.
        validated: the names that the validation of the server's own learner logs. The values of
            other names are left out. Empty: they are not known.
    """
    fields = _about(message)
    fields.integer("run", run, run)
    fields.integer("round", t, t)
    clients = fields.integers("clients", 0, LARGEST, len(tests))
    if set(clients) != set(tests):
        fields.wrong("clients", f"names {clients[:10]}, and asked for are {[*tests][:10]}")
    samples = fields.integers("tests", 0, MOST_SAMPLES, len(clients))
    counts = dict(zip(clients, samples, strict=True))
    for client, before in tests.items():
        if before not in (None, counts[client]):
            fields.wrong("tests", f"says {counts[client]} for client {client}, and {before} before")
    of_clients = fields.by_first([str(client) for client in clients])
    words = ["before", "after"][: 1 + tuned]
    values: Values = {}
    left: list[tuple[str, str]] = []
    for client in tests:
        own = of_clients[str(client)]
        here = own.by_first(words)
        values[client] = {}
        for word in words if counts[client] else []:
            values[client][KINDS[word]] = _measures(here[word], counts[client], validated, left)
        for each in (own, *here.values()):
            each.end()
    fields.end()
    return Evaluated(counts, values, left)


def _measures(
    fields: Fields, samples: int, validated: Collection[str], left: list[tuple[str, str]]
) -> dict[str, float]:
    values: dict[str, float] = {"samples": fields.integer("samples", samples, samples)}
    names = [*fields.numbers]
    if "loss" not in names or len(names) > MOST_NAMES:
        fields.wrong("loss", f"is missing, or there are more than {MOST_NAMES} metrics")
    for name in names:
        check_name(fields, name)
        value = fields.number(name)
        if validated and name not in validated:
            left.append((fields.within + name, "the server's validation logs no such metric"))
            continue
        # A client may have no value of a metric, which is NaN then.
        if not math.isnan(value) and abs(value) > MOST:
            left.append((fields.within + name, UNFIT))
            value = math.nan
        values[name] = value
    return values


def _about(message: Message) -> Fields:
    """Return a message's fields, without the number of the question."""
    fields = Fields.of(message)
    fields.numbers.pop("question", None)
    return fields
