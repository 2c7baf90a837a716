"""The callbacks of a run as one thing: who may have which hook, in what order, and what a hook may return."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_lightning import FederatedCallback, UserError
from fl_lightning.callbacks import ControlVariates
from tests.helpers.learners import Lit, blobs, federated, trainer


def test_a_misspelt_hook_is_refused_with_the_right_name() -> None:
    class Typo(FederatedCallback):
        def on_local_grad(self, clients: Any, gradient: Any) -> None: ...

    with pytest.raises(UserError, match=r"Typo\.on_local_grad is no hook.*Did you mean 'on_local_gradient'"):
        trainer(1, [Typo()]).fit(federated(), blobs())


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_what_hooks_log_is_read_and_not_changed(engine: str) -> None:
    class Telling(ControlVariates):
        def on_local_end(self, clients: Any) -> None:
            super().on_local_end(clients)
            clients.log("lr", clients.lr.expand(len(clients.ids)))

    found = []
    for method in (ControlVariates(), Telling()):
        torch.manual_seed(3)
        module, run = federated(engine=engine), trainer(3, [method])
        run.fit(module, blobs())
        found.append(module.global_vector.detach())
    assert torch.equal(*found) and float(run.callback_metrics["lr"]) == pytest.approx(0.1, abs=1e-7)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_a_method_that_says_it_does_not_move_starts_may_not(engine: str) -> None:
    class Moving(FederatedCallback):
        moves_start = False

        def on_local_start(self, clients: Any) -> None:
            clients.x.mul_(0.9)

    with pytest.raises(TypeError, match="moves_start = False"):
        trainer(1, [Moving()]).fit(federated(Lit(), engine=engine), blobs())
