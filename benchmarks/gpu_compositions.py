"""Runs on the contracts' tiny federation that have to leave on a GPU what they leave on a CPU.

The tests run them on a make-believe GPU, and ``make gpu-check`` on a real one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fl_lightning import callbacks as c

SGD, Adam = torch.optim.SGD, torch.optim.Adam
# From eight steps per client on, steps are recorded.
COMMON: dict[str, Any] = {"local_steps": 9, "rounds": 2}
CallbackList = Callable[[], list[Any]]
COMPOSITIONS: dict[str, tuple[CallbackList, dict[str, Any]]] = {
    "FedAvg": (lambda: [], {"weighting": "samples"}),
    "kept momentum": (
        lambda: [],
        {
            "client_optimizer": lambda p: SGD(p, lr=0.05, momentum=0.9),
            "keep_optimizer_state": True,
        },
    ),
    "kept Adam": (
        lambda: [],
        {"client_optimizer": lambda p: Adam(p, lr=0.01), "keep_optimizer_state": True},
    ),
    "RMSprop": (lambda: [], {"client_optimizer": lambda p: torch.optim.RMSprop(p, lr=0.01)}),
    "Adam at the server": (lambda: [], {"server_optimizer": lambda p: Adam(p, lr=0.01)}),
    "SCAFFOLD": (lambda: [c.ControlVariates()], {}),
    "SAM": (lambda: [c.SharpnessAwareMinimization()], {"clip_norm": 0.5}),
    "FedSMOO": (lambda: [c.GlobalSharpnessAwareMinimization()], {}),
    "top-k": (lambda: [c.TopKCompression()], {}),
    "FedALA": (lambda: [c.AdaptiveLocalAggregation(), c.PerClientEvaluation()], {}),
}
