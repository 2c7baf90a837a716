"""The two sides of a round, for imports: ``clients`` in local hooks, ``server`` in the others."""

from fl_lightning.round.clients import Clients
from fl_lightning.round.server import Server

__all__ = ["Clients", "Server"]
