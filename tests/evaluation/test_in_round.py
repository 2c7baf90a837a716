"""``clients.evaluate`` in the middle of a round.

What it gives in every engine, and that the run sees nothing of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import InMemoryDataModule
from fl_lightning.callback import ClientState, FederatedCallback
from fl_lightning.testing import check_method
from tests.helpers.learners import Dropping, InPlace, Lit, blobs, client_rows, federated, trainer


class Evaluating(FederatedCallback):
    """Keeps what each client's loss and accuracy were at w, and its loss where it ended."""

    neutral = {}
    before, after, right = (ClientState(shape=(), synchronised=False) for _ in range(3))

    def on_local_start(self, clients: Any) -> None:
        at_w = clients.evaluate(clients.w)
        self.before[clients], self.right[clients] = at_w["loss"][:, 0], at_w["acc"][:, 0]

    def on_local_end(self, clients: Any) -> None:
        self.after[clients] = clients.evaluate(clients.x)["loss"][:, 0]


class LossAlone(FederatedCallback):
    neutral = {}
    last = ClientState(shape=(), synchronised=False)

    def on_local_end(self, clients: Any) -> None:
        self.last[clients] = clients.evaluate(clients.x)["loss"][:, 0]


def ran(
    learner: type[Lit], callbacks: Any, rounds: int = 2, data: Any = None, **arguments: Any
) -> Any:
    torch.manual_seed(3)
    module, run = (
        federated(learner(), **{"engine": "sequential", **arguments}),
        trainer(rounds, callbacks),
    )
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


class Following(Lit):
    """Has a frozen teacher, which follows the student in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(20, 4).requires_grad_(False)
        self.student = nn.Linear(20, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.teacher.weight.data.mul_(0.5).add_(0.5 * self.student.weight.detach())
        apart = self.student(batch[0]) - self.teacher(batch[0])
        return super().training_step(batch, batch_idx) + apart.square().mean()


@pytest.mark.parametrize("learner", [Lit, Dropping, InPlace, Following])
def test_the_run_sees_nothing_of_it(learner: type[Lit]) -> None:
    plain, watched = ran(learner, []), ran(learner, [Evaluating()])
    assert torch.equal(plain.global_vector, watched.global_vector)
    named = watched.learner.state_dict()
    assert all(
        torch.equal(value, named[name]) for name, value in plain.learner.state_dict().items()
    )
    shown = [
        watched.trainer.callback_metrics[k]
        for k in ("train/loss", "val/loss")
        if learner is not InPlace
    ]
    assert shown == [
        plain.trainer.callback_metrics[k]
        for k in ("train/loss", "val/loss")
        if learner is not InPlace
    ]


def test_engines_leave_the_same_bits() -> None:
    rows = [
        client_rows(ran(Lit, [Evaluating()], engine=e, workers=2))
        for e in ("sequential", "concurrent")
    ]
    assert rows[0].keys() == rows[1].keys() and all(
        torch.equal(rows[0][k], rows[1][k]) for k in rows[0]
    )


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


def test_the_contracts_know_it() -> None:
    report = check_method(LossAlone)
    assert report.ok, f"{report}"


@pytest.mark.fast
def test_a_step_that_asks_for_it_is_not_captured_and_says_why() -> None:
    class InSteps(FederatedCallback):
        def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
            return gradient * (1 + 0 * clients.evaluate(clients.w)["loss"])

    with pytest.warns(UserWarning, match="not captured"):
        captured = ran(
            Lit, [InSteps()], rounds=1, engine="concurrent", workers=1, capture=True, local_epochs=8
        )
    plain = ran(Lit, [InSteps()], rounds=1, engine="sequential", local_epochs=8)
    assert torch.equal(captured.global_vector, plain.global_vector)
