"""Methods that sites cannot run are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fl_lightning import UserError
from fl_lightning import callbacks as packaged
from fl_lightning.callback import FederatedCallback, ServerState
from fl_lightning.deploy.at_server import refuse_methods
from tests.deploy.test_in_memory import over_sites


class Unsent(FederatedCallback):
    pull = ServerState()

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return self.pulled(gradient)

    def pulled(self, gradient: Tensor) -> Tensor:
        return gradient + self.pull


class Sent(Unsent):
    pull = ServerState(sent=True)


class Noted(FederatedCallback):
    factor = 1.0

    def on_round_start(self, server: Any) -> None:
        self.factor = 0.5

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient * self.factor


class Watching(FederatedCallback):
    factor = 1.0

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.factor = float(trainer.callback_metrics["val/loss"])

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient * self.factor


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (Unsent, r"Unsent\.pull is read in a hook that takes clients.*sent=True"),
        (Noted, r"Noted sets self\.factor in a hook that only the server.*factor = ServerState"),
        (Watching, r"Watching sets self\.factor in a hook that only the server"),
    ],
)
def test_what_clients_hooks_read_has_to_be_at_the_sites(
    method: type[FederatedCallback], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        over_sites(lambda: [method()], tmp_path, rounds=1)


def test_a_state_that_is_sent_is_at_the_sites(tmp_path: Path) -> None:
    over_sites(lambda: [Sent()], tmp_path, rounds=1)


def test_all_packaged_methods_pass_or_are_named() -> None:
    refused = {"GlobalLossLogger", "HessianLogger", "ConsensusDistanceLogger", "QuantizedBroadcast"}
    for name in packaged.__all__:
        kind = getattr(packaged, name)
        if not isinstance(kind, type) or not issubclass(kind, FederatedCallback):
            continue
        try:
            method = kind()
        except TypeError:  # it has an argument without a default
            continue
        if name not in refused:
            refuse_methods([method])
