"""``engine="debug"``: sequential's bits, and errors that leave at hand what they are about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import callbacks as c
from fl_lightning.callback import Clients, ClientState, FederatedCallback, Server
from fl_lightning.engines.debug import At
from tests.helpers.learners import Lit, blobs, federated, trainer


def failed(method: FederatedCallback | None = None, learner: Any = None) -> Any:
    callbacks = [] if method is None else [method]
    module = federated(learner or Lit(), engine="debug", participation=2, local_steps=3)
    with pytest.raises(ZeroDivisionError) as raised:
        trainer(3, callbacks).fit(module, blobs(clients=5))
    return raised.value


@pytest.mark.parametrize(
    "method", [c.ControlVariates, c.SharpnessAwareMinimization, c.LocallyEstimatedPerturbation]
)
def test_it_leaves_the_bits_of_sequential(method: Any) -> None:
    ends = []
    for engine in ("debug", "sequential"):
        module = federated(engine=engine, participation=1.0)
        trainer(2, [method()]).fit(module, blobs())
        ends.append(module.global_vector)
    assert torch.equal(*ends)


class Faulty(FederatedCallback):
    """Doubles gradients in place, and fails in the second round at the last step."""

    seen = ClientState()

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> None:
        before = float(gradient.abs().sum())
        self.seen[clients] = gradient
        gradient.mul_(2)
        if clients.round == 1 and int(clients.step) == 2:
            self.before = before
            clients.x.zero_()
            _ = 1 / 0


def test_an_error_in_a_hook_has_its_arguments_as_they_were_and_the_batch() -> None:
    method = Faulty()
    error = failed(method)
    at: At = error.at
    assert (at.round, at.step, at.hook) == (1, 2, "Faulty.on_local_gradient")
    assert set(at.arguments) == {"clients", "gradient"} and at.client in range(5)
    assert float(at.arguments["gradient"].abs().sum()) == method.before, "not the doubled one"
    assert at.arguments["clients"]["x"].abs().sum() > 0, "not what the hook made of it"
    assert at.arguments["clients"]["Faulty.seen"].shape == at.arguments["gradient"].shape
    x, y = at.batch
    assert len(x) == len(y) > 0
    told = "\n".join(error.__notes__)
    assert "Faulty.on_local_gradient" in told
    assert f"in round 1, client {at.client}, local step 2" in told


class FaultyLearner(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            _ = 1 / 0
        return super().training_step(batch, batch_idx)


def test_an_error_in_the_learner_has_its_batch() -> None:
    error = failed(learner=FaultyLearner())
    assert (error.at.round, error.at.step, error.at.hook) == (0, 1, "training_step")
    assert len(error.at.batch) == 2 and error.at.arguments == {}


class FaultyServer(FederatedCallback):
    def on_server_update(self, server: Server) -> None:
        server.update.zero_()
        _ = 1 / 0


def test_an_error_at_the_server_has_the_update() -> None:
    at = failed(FaultyServer()).at
    assert (at.round, at.client, at.step, at.batch) == (0, None, None, None)
    assert at.hook == "FaultyServer.on_server_update"
    assert at.arguments["server"]["update"].abs().sum() > 0
