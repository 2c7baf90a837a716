"""``site.json``, which records the rows in a site's folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.segments import Index

JOURNAL = "site.json"
# What reading a damaged file raises.
_DAMAGE = (
    *(ArithmeticError, ValueError, LookupError, TypeError, AttributeError),
    RuntimeError,
)
STAGED = "staged."  # prefix of the names of the last round's rows, until that round counts


@dataclass
class Journal:
    """A site's rows, from before and after its last round.

    ``run``: the run's number; None: there is none yet. ``committed``: client → the round of its
    state. ``staged``: client → its last round, and the names of the rows that this round wrote.
    ``rows``: places of the rows. ``optimizer``: the account of the client optimizer whose states
    are among them; empty: not known.
    """

    run: int | None = None
    committed: dict[int, int] = field(default_factory=dict)
    staged: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    rows: Index = field(default_factory=dict)
    optimizer: str = ""


def read(folder: Path) -> Journal:
    """Return the folder's journal; an empty one if there is none.

    Raises:
        UserError: it is damaged.
    """
    path = folder / JOURNAL
    if not path.exists():
        return Journal()
    try:
        held = json.loads(path.read_text("utf-8"))
        rows: Index = {}
        for name, entry in held["rows"].items():
            rows[name] = {
                key: torch.tensor(entry[key], dtype=torch.int64) for key in ("clients", "segments")
            }
            clients, segments = rows[name].values()
            if clients.shape != segments.shape or bool((clients.diff() <= 0).any()):
                raise ValueError(f"the clients of {name[:50]} do not ascend, each with a segment")
        committed = {int(i): _whole(t) for i, t in held["committed"].items()}
        staged = {_whole(i): (_whole(t), _known(names, rows)) for i, (t, names) in held["staged"]}
        optimizer = str(held.get("optimizer", ""))
        return Journal(_whole(held["run"]), committed, staged, rows, optimizer)
    except (OSError, *_DAMAGE) as error:
        raise UserError(
            f"site folder {folder}: {JOURNAL} is damaged ({str(error)[:100]}), so the state of its "
            "clients cannot be read. Restore it from a copy, or begin another run with another "
            "folder."
        ) from error


def _whole(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{str(value)[:50]} is not a whole number")
    return value


def _known(names: list[str], rows: Index) -> list[str]:
    if lacking := [name for name in names if STAGED + name not in rows]:
        raise ValueError(f"it names rows {str(lacking[0])[:50]} that it does not hold")
    return list(names)


def latest(folder: Path) -> ClientStore:
    """Return the clients' rows after their last round, whether or not the server has counted it."""
    journal = read(folder)
    store = ClientStore()
    store.load(journal.rows, folder)
    rows: dict[str, dict[int, Tensor]] = {}
    for client, (_, names) in journal.staged.items():
        for name in names:
            row = store.read(STAGED + name, client)
            if row is not None:
                rows.setdefault(name, {})[client] = row.clone()
    store.commit(rows)
    return store
