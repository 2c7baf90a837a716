"""A method that changes nothing, and stays where a test wants to kill something; part of an app."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from fl_lightning.callback import Clients, FederatedCallback, Server


class Gate(FederatedCallback):
    """Stays in the first local step of round t where ``folder`` has ``training.t``.

    So does a server whose sites have all answered, where it has ``update.t``.

    Args:
        clients: of the site that stays.
    """

    title = "gate"

    def __init__(self, folder: str, clients: list[int]) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.clients = clients

    def on_local_step_end(self, clients: Clients) -> None:
        if set(clients.client_ids) & set(self.clients):
            self.stay(f"training.{clients.round}")

    def on_server_update(self, server: Server) -> None:
        self.stay(f"update.{server.round}")

    def stay(self, name: str) -> None:
        reached = self.folder / f"{name}.reached"
        # Once: who is started again goes on.
        with suppress(FileNotFoundError):
            os.rename(self.folder / name, reached)
        until = time.monotonic() + 300
        while reached.exists() and time.monotonic() < until:
            time.sleep(0.05)
