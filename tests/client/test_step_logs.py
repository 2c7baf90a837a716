"""What a learner logs in its steps is reduced as plain Lightning reduces it over the client's
epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor
from torchmetrics.wrappers import Running

from fl_lightning import UserError
from fl_lightning.callback import ClientState, FederatedCallback
from fl_lightning.callbacks import LocallyEstimatedPerturbation, SharpnessAwareMinimization
from tests.helpers.learners import Lit, as_batches, blobs, client_rows, federated, trainer

ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential"},
    {"engine": "concurrent", "workers": 2, "capture": True},
    {"engine": "stacked"},
]


class Reducing(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        own = {"on_step": False, "on_epoch": True}
        self.log("sum", loss, reduce_fx="sum", **own)
        self.log("max", loss, reduce_fx=max, **own)
        self.log("min", loss, reduce_fx=torch.min, **own)
        self.log("mean", loss, reduce_fx="AVG", **own)
        self.log("both", loss, on_step=True, on_epoch=True, reduce_fx="max")
        self.log("forked", loss, on_epoch=True)
        self.log_dict({"one": loss, "two": 2 * loss}, on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


class Moving(Lit):
    """Metrics whose states of several clients cannot be merged. And one that can, by step and
    epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.running = Running(torchmetrics.MeanMetric(), window=2)
        self.own = CountsAndResets()
        self.label = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.running(loss.detach())
        self.own.update(loss.detach())
        self.label(batch[1].double())
        self.log("running", self.running, on_step=False, on_epoch=True)
        self.log("own", self.own, on_step=False, on_epoch=True)
        self.log("label", self.label, on_step=True, on_epoch=True)
        return loss


class CountsAndResets(torchmetrics.Metric):
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.seen = 0

    def update(self, value: Tensor) -> None:
        self.total += value.double()
        self.seen += 1

    def compute(self) -> Tensor:
        return self.total / self.seen

    def reset(self) -> None:
        super().reset()
        self.seen = 0


class Counts(CountsAndResets):
    def reset(self) -> None:
        torchmetrics.Metric.reset(self)


def of_lightning(learner: Lit, data: Any, client: int, steps: int) -> dict[str, float]:
    """Plain Lightning's numbers of one client's epoch."""
    run = trainer(1, limit_val_batches=0)
    run.fit(learner, as_batches(list(data.client_batches(client, 0, steps))))
    return {name: float(value) for name, value in run.callback_metrics.items()}


@pytest.mark.parametrize("learner", [Reducing, Moving])
@pytest.mark.parametrize("arguments", ENGINES, ids=lambda given: given["engine"])
@pytest.mark.filterwarnings("ignore")
def test_numbers_are_the_mean_over_clients_of_plain_lightnings(
    learner: type[Lit], arguments: dict[str, Any]
) -> None:
    # 24 and 22 samples: the second client's batches are alike
    data, run = blobs(clients=2, batch_size=11), trainer(1)
    module = federated(
        learner(), participation="all", local_epochs=None, local_steps=2, **arguments
    )
    start = {name: value.clone() for name, value in module.learner.state_dict().items()}
    run.fit(module, data)
    found = []
    for client in range(2):
        alone = learner().double()
        alone.load_state_dict(start)
        found.append(of_lightning(alone, data, client, 2))
    names = found[0].keys() - {"train/loss"}
    assert names >= (
        {"both_step", "both_epoch", "forked_step", "one"} if learner is Reducing else {"label_step"}
    )
    for name in names:
        mean = sum(each[name] for each in found) / 2
        assert float(run.callback_metrics[name]) == pytest.approx(mean, rel=1e-6), name


class Odd(Lit):
    def __init__(self, logs: Any) -> None:
        super().__init__()
        self.odd = Counts()
        self.logs = logs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.logs(self, loss, batch_idx)
        return loss


ODD = r"Odd: self.log\('odd', "


@pytest.mark.parametrize("engine", ["auto", "sequential", "stacked"])
@pytest.mark.parametrize(
    ("logs", "said", "before"),
    [
        (
            lambda own, loss, k: own.log("odd", loss, reduce_fx=torch.median),
            rf"{ODD}reduce_fx=.*median.*'mean', 'sum', 'max' or 'min'",
            True,
        ),
        (
            lambda own, loss, k: own.log_dict({"odd": loss}, on_step=False),
            rf"{ODD}on_step=False\) .* Add on_epoch=True",
            True,
        ),
        (
            lambda own, loss, k: (own.odd(loss.detach()), own.log("odd", own.odd)),
            "Odd: its metric Counts counts in the attribute seen",
            True,
        ),
        (
            lambda own, loss, k: own.log("odd", loss, reduce_fx="sum" if k else "max"),
            rf"{ODD}reduce_fx='sum'\), but another call gave reduce_fx='max'",
            False,
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_what_cannot_be_reduced_is_refused_by_name(
    logs: Any, said: str, before: bool, engine: str
) -> None:
    module = federated(Odd(logs), engine=engine)
    with pytest.raises(UserError, match=said):
        trainer(1).fit(module, blobs())
    assert not before or (module.run.state.rounds == 0 and module.run.loop is None), (
        "before round 0"
    )


def test_an_argument_that_lightning_does_not_know_is_an_error() -> None:
    class Misspelt(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("a", 1.0, False, True, None, None, "mean", False, False, rank_zero_only=True)
            self.log("odd", 1.0, on_epochs=True)
            return super().training_step(batch, batch_idx)

    with pytest.raises(TypeError, match="'on_epochs'"):
        trainer(1).fit(federated(Misspelt()), blobs())


class Losses(FederatedCallback):
    mean = ClientState(shape=(1,))

    def on_local_end(self, clients: Any, loss: Tensor) -> None:
        self.mean[clients] = loss


@pytest.mark.parametrize("method", [SharpnessAwareMinimization, LocallyEstimatedPerturbation])
def test_the_loss_of_local_steps_is_that_of_the_first_pass_in_each_engine(method: Any) -> None:
    """With SAM it is the loss at the model; a method with one pass has it at its own point."""
    found = []
    for engine in ENGINES:
        torch.manual_seed(0)
        module = federated(Lit(), participation=1.0, local_epochs=2, **engine)
        losses = Losses()
        trainer(2, [method(0.5), losses]).fit(module, blobs())
        found.append(torch.cat([row for _, row in sorted(client_rows(module).items())]))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], found[2], rtol=1e-9, atol=0)


@pytest.mark.parametrize("arguments", ENGINES, ids=lambda given: given["engine"])
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_a_number_counts_as_it_was_when_it_was_logged(arguments: dict[str, Any]) -> None:
    class Cooling(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("tau", torch.ones(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.log("tau", self.tau)
            self.tau.mul_(0.5)
            return super().training_step(batch, batch_idx)

    run = trainer(1)
    run.fit(federated(Cooling(), local_epochs=None, local_steps=2, **arguments), blobs())
    assert float(run.callback_metrics["tau"]) == pytest.approx((1 + 0.5) / 2)
