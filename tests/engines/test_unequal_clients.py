"""Clients of one group that are not alike: more steps than others, diverged, logging at times. And
their learners."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.datamodules import FromDatasets
from tests.helpers.agreement import CLIPPED, EveryHook, Logged, in_memory, near, same_bits, trained
from tests.helpers.federation import BATCH
from tests.helpers.learners import Lit, blobs, federated, trainer

ENGINES = ("sequential", "concurrent", "stacked")
BESIDE = [c.ControlVariates, c.GlobalSharpnessAwareMinimization, EveryHook]
OPTIMIZERS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.05, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clients_that_finish_early_keep_what_they_have(name: str) -> None:
    """One to eight steps in one group, with state in the client optimizer, rows, uploads, logs and
    moving hooks."""
    options = {
        "participation": "all",
        "local_epochs": 2,
        "client_optimizer": OPTIMIZERS[name],
        **CLIPPED,
    }
    for beside in (BESIDE[2:], BESIDE):
        reference = trained(([made() for made in beside], {}), "sequential", rounds=2, **options)
        same_bits(
            trained(
                ([made() for made in beside], {}), "concurrent", rounds=2, workers=3, **options
            ),
            reference,
        )
        run = trained(([made() for made in beside], {}), "stacked", rounds=2, **options)
        assert run.module.engine_facts == {
            **run.module.engine_facts,
            "engine": "stacked",
            "clients": "6",
        }
        near(run, reference)


class Attributes(FederatedCallback):
    """Sets attributes of the clients in each step, and reads them after the last one."""

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        if not hasattr(clients, "k"):
            clients.k = torch.zeros_like(clients.sizes)
            clients.total = torch.zeros_like(gradient)
        clients.k = clients.k + 1
        clients.total += gradient

    def on_local_end(self, clients: Any) -> None:
        clients.log("k", clients.k[:, 0])
        clients.log("total", clients.norm(clients.total)[:, 0])
        clients.scale = clients.k / (1 + clients.k)

    def transmit(self, clients: Any, update: Tensor) -> Tensor:
        return update * clients.scale


def test_attributes_of_clients_are_each_client_s_own() -> None:
    options: dict[str, Any] = {"participation": "all", "local_epochs": 2, "rounds": 2}
    reference = trained(([Attributes()], {}), "sequential", **options)
    run = trained(([Attributes()], {}), "stacked", **options)
    assert run.module.engine_facts["engine"] == "stacked"
    near(run, reference)


@pytest.mark.parametrize("client", [0, 4])
def test_a_client_that_diverges_leaves_the_others_alone(client: int) -> None:
    """Of one step, and of the most steps."""

    def poisoned(x: Tensor, y: Tensor, clients: list[Any]) -> Any:
        x[clients[client]] = torch.nan
        return in_memory(x, y, clients)

    options = {
        "participation": "all",
        "on_nonfinite": "skip",
        "data": poisoned,
        "rounds": 2,
        **CLIPPED,
    }
    runs = [trained(([made() for made in BESIDE], {}), e, **options) for e in ENGINES]
    assert all(client not in rows for rows in runs[0].record.rows[-1].values())
    same_bits(runs[1], runs[0])
    near(runs[2], runs[0])


class Wordy(Logged):
    """Logs twice in short batches, and what is not a number for one client."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for _ in range(1 + (len(batch[1]) < BATCH)):
            self.log("x", batch[0].mean())
        self.log("odd", torch.where(batch[0].mean() > 0.5, torch.nan, 1.0))
        self.log_dict({"number": float(batch_idx)})
        return super().training_step(batch, batch_idx)


class Dicts(Logged):
    """Batches are dicts, whose keys do not always come in the same order."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        aside = (self.net[0](batch["x"])[:, :3] - batch["target"]).square().mean()
        return {"loss": super().training_step((batch["x"], batch["y"]), batch_idx) + aside}


def dicts(x: Tensor, y: Tensor, clients: list[Any]) -> FromDatasets:
    """A batch has the order of its first sample."""
    orders = (("x", "target", "y"), ("target", "x", "y"))
    rows = [{"x": a, "target": a.flip(0), "y": b} for a, b in zip(x, y, strict=True)]
    sets: list[Any] = [
        [{key: rows[k][key] for key in orders[int(y[k]) % 2]} for k in own] for own in clients
    ]
    return FromDatasets(clients=sets, batch_size=BATCH)


class Normed(Logged):
    """Convolution and group norm, tied weights, a frozen layer, buffers of integers and of -inf."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)
        )
        self.tied = nn.Linear(3, 4)
        self.tied.weight = self.net[0].weight
        self.body[4].requires_grad_(False)
        self.register_buffer("order", torch.tensor([2, 0, 1]))
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.net(self.body(x[:, None])[:, self.order]) + self.net[2](self.tied(x))
        loss = nn.functional.cross_entropy(out + 0.1 * torch.softmax(out + self.mask, 1), y)
        return loss + 0.01 * sum(p.square().sum() for p in self.parameters())


@pytest.mark.parametrize(
    ("learner", "data"), [(Wordy, in_memory), (Dicts, dicts), (Normed, in_memory)]
)
def test_learners(learner: type[Logged], data: Any) -> None:
    options = {"learner": learner, "data": data, "workers": 2}
    runs = [
        trained(([c.SharpnessAwareMinimization(0.05)], {}), engine, **options) for engine in ENGINES
    ]
    assert runs[2].module.engine_facts["engine"] == "stacked"
    same_bits(runs[1], runs[0])
    near(runs[2], runs[0])


class Elsewhere(Logged):
    """Reads a parameter past its module, where a stacked one cannot be put."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = [self.net[0].weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.aside[0].square().sum()


class Branching(Logged):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) > 1 else 2 * loss


@pytest.mark.parametrize("learner", [Elsewhere, Branching])
def test_learners_that_stacking_would_change_are_not_stacked(learner: type[Logged]) -> None:
    reference, run = (
        trained(([], {}), engine, learner=learner) for engine in ("sequential", "stacked")
    )
    assert run.module.engine_facts["engine"] == "sequential"
    same_bits(run, reference)


class Bounded(Lit):
    """An embedding of bounded norm, and weights clipped as a step begins: both in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4, max_norm=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            self.net[2].weight.clamp_(-0.2, 0.2)
        return nn.functional.cross_entropy(self.net(x) + self.table((x[:, 0] > 0).long()), y)


@pytest.mark.filterwarnings("ignore:.*performance drop:UserWarning")
def test_what_a_step_changes_in_place_stays_where_batches_differ_in_size() -> None:
    found = []
    for engine in ("sequential", "stacked"):
        torch.manual_seed(3)
        module = federated(Bounded(), participation="all", engine=engine)
        trainer(2).fit(module, blobs(clients=3, per_client=14))
        assert module.engine_facts["engine"] == engine
        found.append(module.global_vector.detach())
    torch.testing.assert_close(*found, rtol=0, atol=1e-12)
