"""The two ends of a Flower app: ``serve`` in its server_app.py, ``answer`` in its client_app.py.

Flower starts a process for each message of a site, so nothing here imports torch until it trains.
"""

from __future__ import annotations

from fl_lightning.deploy.flower.client import answer
from fl_lightning.deploy.flower.grid_server import serve

__all__ = ["answer", "serve"]
