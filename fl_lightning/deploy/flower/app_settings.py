"""The settings of ``flwr run --run-config`` and ``flower-supernode --node-config`` for an app."""

from __future__ import annotations

from typing import Any

from fl_lightning.errors import UserError


class AppSettings:
    """``--run-config`` of an app's run.

    Raises:
        UserError: a value has another type.
    """

    def __init__(self, given: Any) -> None:
        self.folder = str(_checked(given, "folder", str, "runs/sites"))
        self.rounds = int(_checked(given, "rounds", int, 1))
        self.timeout = float(_checked(given, "timeout", (int, float), 600))
        self.min_sites = int(_checked(given, "min-sites", int, 1))
        if self.timeout <= 0:
            raise UserError(f"--run-config timeout={self.timeout:g}: give seconds above 0.")
        for name, value in (("rounds", self.rounds), ("min-sites", self.min_sites)):
            if value < 1:
                raise UserError(f"--run-config {name}={value}: give at least 1.")


def _checked(given: Any, name: str, kind: Any, default: Any) -> Any:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, kind):
        accepted = {"folder": "a folder's name", "timeout": "seconds"}.get(name, "a whole number")
        raise UserError(f"--run-config {name}={value!r}: accepted is {accepted}.")
    return value


class NodeSettings:
    """``--node-config`` of a site's SuperNode.

    Raises:
        UserError: a value is missing, or has another type.
    """

    def __init__(self, given: Any) -> None:
        for name in ("clients", "site", "folder"):
            value = given.get(name, "")
            # You may write a single client as a number.
            if isinstance(value, bool) or not isinstance(value, str | int):
                raise UserError(f"--node-config {name}={value!r}: give text, in quotes.")
        self.clients = str(given.get("clients", ""))
        self.site = str(given.get("site", ""))
        self.folder = str(given.get("folder", ""))
        if bool(self.clients) == bool(self.site):
            raise UserError(
                '--node-config: give either clients="0,3" (clients of the config\'s partition) or '
                'site="site.yaml" (data of the site\'s own); '
                f"given are clients={self.clients!r} and site={self.site!r}."
            )
        if not self.folder:
            raise UserError(
                '--node-config: folder="…" is missing: where the site keeps its clients\' rows, a '
                "folder that other sites do not use."
            )
