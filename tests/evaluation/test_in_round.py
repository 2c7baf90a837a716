"""``clients.evaluate`` in the middle of a round."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning import InMemoryDataModule
from fl_lightning.callback import ClientState, FederatedCallback
from tests.helpers.learners import Lit, blobs, client_rows, federated, trainer


class Evaluating(FederatedCallback):
    """Keeps what each client's loss and accuracy were at w, and its loss where it ended."""

    neutral = {}
    before, after, right = (ClientState(shape=(), synchronised=False) for _ in range(3))

    def on_local_start(self, clients: Any) -> None:
        at_w = clients.evaluate(clients.w)
        self.before[clients], self.right[clients] = at_w["loss"][:, 0], at_w["acc"][:, 0]

    def on_local_end(self, clients: Any) -> None:
        self.after[clients] = clients.evaluate(clients.x)["loss"][:, 0]


def ran(
    learner: type[Lit], callbacks: Any, rounds: int = 2, data: Any = None, **arguments: Any
) -> Any:
    torch.manual_seed(3)
    module = federated(learner(), **{"engine": "sequential", **arguments})
    run = trainer(rounds, callbacks)
    run.fit(module, data or blobs())
    return module


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_it_is_each_clients_own_loss_and_accuracy(engine: str) -> None:
    torch.manual_seed(3)
    learner, data = Lit().double(), blobs()
    w0 = [p.detach().clone() for p in learner.parameters()]
    module = federated(learner, engine=engine, clients_at_once=2, workers=2)
    trainer(1, [Evaluating()]).fit(module, data)
    rows = client_rows(module)
    x, y = data._given_sets["train"]
    net = Lit().double()
    for p, value in zip(net.parameters(), w0, strict=True):
        p.data = value
    for i in module.participants(0):
        own = torch.as_tensor(data.client_indices(i))
        out = net.net(x[own])
        assert float(rows["Evaluating.before", i]) == pytest.approx(
            float(nn.functional.cross_entropy(out, y[own]))
        )
        assert float(rows["Evaluating.right", i]) == pytest.approx(
            float((out.argmax(1) == y[own]).double().mean())
        )
        assert float(rows["Evaluating.after", i]) < float(rows["Evaluating.before", i])


def test_held_out_samples_and_clients_without_any() -> None:
    seen: dict[int, Any] = {}

    class Held(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            seen[int(clients.ids)] = {
                k: float(v) for k, v in clients.evaluate(clients.w, "test").items()
            }
            seen[int(clients.ids)]["none"] = clients.evaluate(clients.w, "test").get("nothing")

    x, y = torch.randn(9, 20, dtype=torch.float64), torch.arange(9) % 4
    own = [[0], [1, 2, 3, 4, 5, 6, 7, 8]]
    data = InMemoryDataModule(
        (x, y), test=(x, y), clients=own, batch_size=4, client_test_fraction=0.25
    )
    ran(Lit, [Held()], rounds=1, data=data, participation="all")
    assert seen[0]["loss"] != seen[0]["loss"] and seen[1]["loss"] > 0 and 0 <= seen[1]["acc"] <= 1


def test_a_name_that_is_not_logged_is_said_and_without_samples_it_is_nan() -> None:
    class Wrong(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            assert bool(clients.evaluate(clients.w, "test")["whatever"].isnan().all())
            clients.evaluate(clients.w)["accuracy"]

    with pytest.raises(KeyError, match=r"clients\.evaluate gives 'acc', 'loss'"):
        ran(Lit, [Wrong()], rounds=1)
