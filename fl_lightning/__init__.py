"""Federated learning research inside PyTorch Lightning: one ``Trainer.fit`` is one run."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning.callback import (
        Base,
        ClientState,
        Coefficient,
        Exchanged,
        FederatedCallback,
        Scratch,
        ServerState,
        Upload,
    )
    from fl_lightning.datamodules import InMemoryDataModule
    from fl_lightning.errors import Diverged, UserError
    from fl_lightning.lab.analysis.results import load
    from fl_lightning.lab.cli.drop_in import FederatedCLI
    from fl_lightning.lab.cli.python_run import RunFolder
    from fl_lightning.machine.federated_strategy import FederatedStrategy
    from fl_lightning.module import FederatedModule
    from fl_lightning.record.metrics_csv import MetricsCSV
    from fl_lightning.schedules import Cosine, Exponential, Linear, Schedule, Steps

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(
        (
            "Base",
            "ClientState",
            "Coefficient",
            "Exchanged",
            "FederatedCallback",
            "Scratch",
            "ServerState",
            "Upload",
        ),
        "callback",
    ),
    **dict.fromkeys(("Cosine", "Exponential", "Linear", "Schedule", "Steps"), "schedules"),
    **dict.fromkeys(("Diverged", "UserError"), "errors"),
    "FederatedCLI": "lab.cli.drop_in",
    "FederatedModule": "module",
    "FederatedStrategy": "machine.federated_strategy",
    "InMemoryDataModule": "datamodules",
    "MetricsCSV": "record.metrics_csv",
    "RunFolder": "lab.cli.python_run",
    "load": "lab.analysis.results",
}

__all__ = [
    "Base",
    "ClientState",
    "Coefficient",
    "Cosine",
    "Diverged",
    "Exchanged",
    "Exponential",
    "FederatedCLI",
    "FederatedCallback",
    "FederatedModule",
    "FederatedStrategy",
    "InMemoryDataModule",
    "Linear",
    "MetricsCSV",
    "RunFolder",
    "Schedule",
    "Scratch",
    "ServerState",
    "Steps",
    "Upload",
    "UserError",
    "load",
]


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    # The command line's help must not wait until torch is imported.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    if name == "FederatedModule":
        # A run from Python also shows our progress bar. The module does not import this submodule:
        # set it here.
        bar = importlib.import_module(f"{__name__}.callbacks.loggers.progress_bar")
        value.own_bar = bar.FederatedProgressBar
    return value


def __dir__() -> list[str]:
    """Return the public names, so that they are completed before their first use."""
    return sorted({"__version__", *__all__})
