"""An app's settings, and its messages inside Flower's: one array of bytes, never unpickled.

The settings are ``flwr run --run-config`` and ``flower-supernode --node-config``.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np

from fl_lightning.deploy.transport import Message, damaged, unpacked
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import AtLeast, check

KEY = "fl_lightning"  # of our array in Flower's records


class AppSettings:
    """``--run-config`` of an app's run."""

    def __init__(self, given: Any) -> None:
        self.folder = str(given.get("folder", "runs/sites"))
        self.rounds = int(_number(given, "rounds", 1))
        self.timeout = float(_number(given, "timeout", 600))
        self.min_sites = int(_number(given, "min-sites", 1))


def _number(given: Any, name: str, default: int) -> int | float:
    value: int | float = given.get(name, default)
    check(f"--run-config {name}", value, Annotated[float, AtLeast(1)])
    return value


class NodeSettings:
    """``--node-config`` of a site's SuperNode."""

    def __init__(self, given: Any) -> None:
        self.clients = str(given.get("clients", ""))  # a single client may be a number
        self.site = str(given.get("site", ""))
        self.folder = str(given.get("folder", ""))
        if not self.folder or bool(self.clients) == bool(self.site):
            raise UserError(
                '--node-config: give folder="…", where no other site keeps its clients\' rows, '
                'and either clients="0,3" (clients of the config\'s partition) or '
                'site="site.yaml" (data of the site\'s own). '
                f"Given are folder={self.folder!r}, clients={self.clients!r}, site={self.site!r}."
            )


def content(data: bytes) -> Any:
    """Return Flower's record that holds a message's bytes."""
    from flwr.app import Array, ArrayRecord, RecordDict

    return RecordDict({KEY: ArrayRecord({KEY: Array(np.frombuffer(data, np.uint8))})})


def bytes_in(record: Any) -> bytes:
    """Return a message's bytes; the record of another app raises an error."""
    # Flower reads the array with NumPy, and does not allow pickles.
    return bytes(record[KEY][KEY].numpy().astype(np.uint8, copy=False))


def message_in(record: Any, site: str) -> Message:
    """Return the message in a record; ``damaged``, with the reason, if there is none."""
    try:
        return unpacked(bytes_in(record), site)
    except Exception as error:
        return damaged(site, error)
