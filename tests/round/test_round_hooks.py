"""Hooks at the ends of a round: what clients get as w, and what is evaluated. Perturbations without
a gradient, and draws by the seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning.callback import ClientState, FederatedCallback, ServerState
from fl_lightning.callbacks import ClusteredModels, CommunicationLogger, ExtrapolatedStep
from fl_lightning.errors import Diverged
from fl_lightning.lab.contracts.federation import fit, outcome, quiet, require_same
from fl_lightning.schedules import Steps
from fl_lightning.testing import tiny_run
from tests.helpers.learners import Lit, blobs, federated, trainer


class Delta(FederatedCallback):
    """EF21-P with a half as compressor: what clients get follows w, and only changes travel."""

    given = ServerState(initial="initial_model", synchronised=False)
    seen = ClientState(synchronised=False)

    def broadcast(self, server: Any) -> Tensor:
        self.given += 0.5 * (server.w - self.given)
        server.sent(parameters=3, bytes=5)
        return self.given

    def on_local_end(self, clients: Any) -> None:
        self.seen[clients] = clients.w


class Looking(FederatedCallback):
    def on_local_start(self, clients: Any) -> None:
        assert torch.equal(clients.x, clients.w.expand_as(clients.x))


class Smoothed(FederatedCallback):
    mean = ServerState(initial="initial_model", synchronised=False)

    def evaluated(self, server: Any) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * server.w
        return self.mean


def models(*callbacks: Any, rounds: int = 3, **options: Any) -> list[Any]:
    """w^0 … w^T and the module, by ascending round."""
    found: list[Any] = []
    with quiet():
        module = fit(
            list(callbacks),
            rounds,
            started=lambda m: found.append(m.global_vector.detach().clone()),
            ended=lambda m: found.append(m.global_vector.detach().clone()),
            **options,
        )
    return [*found, module]


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_clients_start_at_what_is_broadcast_and_updates_are_measured_from_it(engine: str) -> None:
    """Without learning nobody moves, so w rests, whatever clients are given."""
    *w, module = models(Delta(), Looking(), engine=engine)
    given = w[0]
    for w_t in w[1:3]:
        given = given + 0.5 * (w_t - given)
    rows = [module.client_rows.read("Delta.seen", i) for i in module.participants(2)]
    assert rows and all(torch.equal(row, given) for row in rows)
    assert torch.equal(module.server_states["Delta.given"], given)
    options = {"engine": engine, "lr_decay": Steps({0: 1.0, 1: 0.0})}
    *w, _ = models(Delta(), rounds=2, **options)
    # Round 0 gives w^0 itself, so it is FedAvg's.
    assert torch.equal(w[1], models(rounds=1, engine=engine)[1]) and not torch.equal(w[0], w[1])
    assert torch.equal(w[1], w[2])


def test_an_update_is_the_way_from_what_was_given() -> None:
    """w^{t+1} = w^t + mean(x_K - what was given), not the mean of what clients end with."""

    class Shifted(FederatedCallback):
        ends = ServerState()

        def broadcast(self, server: Any) -> Tensor:
            return server.w + 1.0

        def on_server_update(self, server: Any) -> None:
            self.ends = server.update

    w0, w1, module = models(Shifted(), rounds=1, lr_decay=1.0, local_steps=1, local_epochs=None)
    update = module.server_states["Shifted.ends"]
    assert torch.equal(w1, w0 + update) and update.abs().max() < 1.0


def test_what_is_broadcast_is_counted_in_place_of_the_model() -> None:
    logged = tiny_run(Delta(), CommunicationLogger(), rounds=2).trainer.callback_metrics
    assert logged["communication/down_parameters"] == 2 * 3 * 3
    assert logged["communication/down_bytes"] == 2 * 3 * 5
    assert logged["communication/up_parameters"] == 2 * 3 * 31


def test_a_model_that_is_not_finite_is_not_sent() -> None:
    class Broken(FederatedCallback):
        def broadcast(self, server: Any) -> Tensor:
            return server.w / 0.0

    with pytest.raises(Diverged, match="sent to clients in round 0"):
        tiny_run(Broken())


def test_what_is_evaluated_is_exported_and_training_goes_on_from_w(tmp_path: Path) -> None:
    *w, module = models(Smoothed(), folder=str(tmp_path))
    mean = w[0]
    for each in w[1:]:
        mean = 0.5 * mean + 0.5 * each
    assert torch.equal(module.evaluated_vector, mean)
    assert all(torch.equal(a, b) for a, b in zip(w, models()[:-1], strict=True)), "w is FedAvg's"
    exported = torch.cat([p.detach().flatten() for p in module.export().parameters()])
    assert torch.equal(exported, mean)
    with quiet():
        resumed = fit([Smoothed()], 5, folder=str(tmp_path), resume=True)
        whole = fit([Smoothed()], 5)
    require_same(outcome(whole), outcome(resumed), 0.0, "resumed", "")


@pytest.mark.parametrize("method", [Delta, Smoothed, ExtrapolatedStep, ClusteredModels])
def test_where_nobody_takes_part_states_and_w_stay(method: Any) -> None:
    """Rounds 0 and 3 are empty."""
    options: dict[str, Any] = {"sampling": "poisson", "participation": 0.15}
    runs = [tiny_run(method(), rounds=t, **options) for t in (1, 3, 4)]
    assert [len(runs[-1].participants(t)) for t in range(4)] == [0, 1, 2, 0]
    assert not runs[0].server_states
    before, after = runs[1:]
    assert torch.equal(before.global_vector, after.global_vector)
    for name, value in before.server_states.items():
        assert torch.equal(value, after.server_states[name]), name


class Blind(FederatedCallback):
    def perturbation(self, clients: Any) -> Tensor:
        return torch.full_like(clients.x, 0.1)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_a_blind_perturbation_is_seen_by_the_only_gradient(engine: str) -> None:
    """f(x) = x²/2 has the gradient x + e; buffers and logs are of that pass."""

    class Squares(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1, bias=False)
            self.net.weight.data.fill_(1.0)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = (self.net.weight**2).sum() / 2
            self.log("train/loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    module = federated(
        Squares(),
        engine=engine,
        participation="all",
        local_steps=2,
        local_epochs=None,
        client_optimizer=lambda p: torch.optim.SGD(p, 0.5),
    )
    of = trainer(1, [Blind()])
    of.fit(module, blobs(clients=2))
    assert module.global_vector.tolist() == pytest.approx([0.175, 0.175])
    assert float(of.callback_metrics["train/loss"]) == pytest.approx((1.1**2 + 0.55**2) / 2)
    assert float(of.callback_metrics["cost/gradients"]) == 4
