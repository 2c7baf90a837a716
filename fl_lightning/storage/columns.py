"""Entries of a checkpoint that are kept in columns, and how they are read and written.

They are an asynchronous run's earlier models, the clients that a method chose, and those that were
sent w.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fl_lightning.storage.run_state import Versions
from fl_lightning.storage.schema import IDS, TENSOR, damaged, each, entry, record, that, written


@dataclass(frozen=True)
class _Version:
    w: Tensor = entry(TENSOR)
    buffers: dict[str, Tensor] = entry(each(TENSOR))


@dataclass(frozen=True)
class _Chosen:
    """Choices of all rounds: the rounds, the number of clients in each, and the clients."""

    rounds: Tensor = entry(IDS)
    numbers: Tensor = entry(IDS)
    clients: Tensor = entry(IDS)


def versions_read(held: Any, place: str) -> Versions:
    """The kind of earlier models with their buffers, by the number of steps before them."""
    number = that(lambda key: isinstance(key, str) and key.isdecimal())
    read = each(record(_Version), number)(held, place)
    return {int(number): (version.w, version.buffers) for number, version in read.items()}


def versions_written(versions: Versions) -> dict[str, Any]:
    return {str(v): written(_Version(w, dict(buffers))) for v, (w, buffers) in versions.items()}


def chosen_read(held: Any, place: str) -> dict[int, tuple[int, ...]]:
    """The kind of the clients that a method chose, by round."""
    columns = record(_Chosen)(held, place)
    numbers = columns.numbers.tolist()
    if len(numbers) != len(columns.rounds) or sum(numbers) != len(columns.clients):
        raise damaged(place)
    clients = torch.split(columns.clients, numbers)
    rounds = zip(columns.rounds.tolist(), clients, strict=True)
    return {t: tuple(ids.tolist()) for t, ids in rounds}


def chosen_written(chosen: Mapping[int, tuple[int, ...]]) -> dict[str, Tensor]:
    rounds, numbers = list(chosen), [len(ids) for ids in chosen.values()]
    columns = (rounds, numbers, list(chain.from_iterable(chosen.values())))
    return written(_Chosen(*(torch.tensor(column, dtype=torch.int64) for column in columns)))


@dataclass(frozen=True)
class _Sent:
    """The clients that were sent w, and for each the last round in which it was."""

    clients: Tensor = entry(IDS)
    rounds: Tensor = entry(IDS)


def sent_read(held: Any, place: str) -> dict[int, int]:
    """The kind of the last round in which each client was sent w."""
    columns = record(_Sent)(held, place)
    if len(columns.clients) != len(columns.rounds):
        raise damaged(place)
    return dict(zip(columns.clients.tolist(), columns.rounds.tolist(), strict=True))


def sent_written(sent: Mapping[int, int]) -> dict[str, Tensor]:
    columns = (sorted(sent), [sent[client] for client in sorted(sent)])
    return written(_Sent(*(torch.tensor(column, dtype=torch.int64) for column in columns)))
