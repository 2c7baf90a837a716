"""Clients by name: samples and test samples that are given as ``{name: …}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from unicodedata import normalize

from fl_lightning.errors import UserError, suggest


def trimmed(name: Any) -> str:
    """Return a name without blanks around it, and each accented letter as one character: macOS
    writes é as two.
    """
    return normalize("NFC", str(name)).strip()


def by_name(clients: Any, test_clients: Any) -> tuple[tuple[str, ...], Any, Any]:
    """Return the clients' names (none if they have none), and both arguments by number.

    A client's number is its place in ``clients``. A client without an entry in ``test_clients`` has
    an empty one.

    >>> by_name({"anna": [0], "ben": [1, 2]}, {"ben": [5]})
    (('anna', 'ben'), [[0], [1, 2]], [[], [5]])

    Raises:
        UserError: ``test_clients`` names clients that ``clients`` does not name.
    """
    names: tuple[str, ...] = ()
    if isinstance(clients, Mapping):
        names = tuple(str(name) for name in clients)
        refuse_alike(names)
        clients = list(clients.values())
    if isinstance(test_clients, Mapping):
        tests = {str(name): given for name, given in test_clients.items()}
        unknown = [name for name in tests if name not in names]
        if unknown:
            whose = f"clients names {', '.join(names[:20])}" if names else "clients has no names"
            raise UserError(
                f"test_clients names the client {unknown[0]!r}, and {whose}."
                f"{suggest(unknown[0], list(names))} Give clients={{name: …}} with the same names."
            )
        test_clients = [tests.get(name, []) for name in names]
    return names, clients, test_clients


def refuse_alike(names: Sequence[str]) -> None:
    """Refuse names that two clients share, or that are empty."""
    seen: set[str] = set()
    for name in names:
        if not name.strip() or name in seen:
            what = "is empty" if not name.strip() else "stands for two clients"
            raise UserError(f"clients: the name {name!r} {what}. Give each client its own name.")
        seen.add(name)
