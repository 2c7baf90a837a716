"""What is measured of the model after a round.

That it is right, when it is, and that the run does not see it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning import callbacks as c
from fl_lightning.datamodules.batches.biases import CategoryBias, ClientBias
from fl_lightning.models import ImageClassifier
from tests.helpers.learners import Lit, Normed, blobs, client_rows, federated, trainer
from tests.helpers.processes import launched

LOGGERS = (
    c.GlobalLossLogger,
    c.HessianLogger,
    c.ConsensusDistanceLogger,
    c.DriftLogger,
    c.CommunicationLogger,
)


class Drawing(Normed):
    """Draws random numbers of the process, and moves the buffers of its norm, in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(3, nn.Dropout(0.5))


class Rounds(pl.Callback):
    """What there was after each round."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.w: list[Tensor] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.w.append(pl_module.global_vector.detach().clone())


def run(
    *callbacks: Any, learner: type[Lit] = Drawing, rounds: int = 3, **arguments: Any
) -> tuple[Any, Rounds]:
    torch.manual_seed(3)
    module, seen = federated(learner(), **arguments), Rounds()
    trainer(rounds, [*callbacks, seen]).fit(module, blobs())
    return module, seen


@pytest.mark.parametrize(
    "arguments", [{"engine": "sequential"}, {"engine": "concurrent", "keep_optimizer_state": True}]
)
def test_no_bit_of_the_training_changes(arguments: Any) -> None:
    learner = Drawing if arguments["engine"] == "sequential" else Normed
    methods = lambda: [c.ControlVariates(), c.PartialAveraging({"net.0.*": 2})]  # noqa: E731
    plain, ours = run(*methods(), learner=learner, **arguments)
    loggers = [kind(1) if issubclass(kind, c.GlobalLossLogger) else kind() for kind in LOGGERS]
    loggers[1] = c.HessianLogger(1, samples=40, probes=3)
    module, seen = run(*methods(), *loggers, learner=learner, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(ours.w, seen.w, strict=True))
    rows, theirs = client_rows(plain), client_rows(module)
    assert rows.keys() == theirs.keys() and all(torch.equal(rows[key], theirs[key]) for key in rows)
    for name, buffer in plain.learner.named_buffers():
        assert torch.equal(buffer, module.learner.get_buffer(name))
    for a, b in zip(ours.logged, seen.logged, strict=True):
        assert {k: v for k, v in a.items() if "time/" not in k} == {
            k: b[k] for k in a if "time/" not in k
        }
        assert {"global/train_loss", "hessian/trace", "consensus/total"} <= b.keys() - a.keys()


def images(seed: int) -> tuple[Tensor, Tensor, list[Any]]:
    rng = np.random.default_rng(seed)
    y = torch.from_numpy(rng.integers(0, 3, 60))
    x = torch.from_numpy(rng.integers(0, 256, (60, 3, 4, 4), dtype=np.uint8))
    return x, y, [list(range(0, 20)), list(range(15, 40)), list(range(40, 60)) * 2]


def test_global_loss_is_that_of_the_exported_model_on_all_clients_samples() -> None:
    x, y, clients = images(0)
    biases = [ClientBias(0.5), CategoryBias(0.2)]
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(48, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    )
    data = InMemoryDataModule(
        (x, y), test=(x[:30], y[:30]), clients=clients, biases=biases, batch_size=7
    )
    module = FederatedModule(ImageClassifier(network, 3), participation=2, local_epochs=1, seed=5)
    seen, parts = Rounds(), c.PartialAveraging({"network.1.*": 3, "network.4.*": "never"})
    trainer(5, [parts, c.GlobalLossLogger(1), seen]).fit(module, data)
    assert not torch.equal(module.global_vector, module.evaluated_vector)
    model = module.export().eval().double()
    losses, right = [], []
    for i, own in enumerate(clients):
        pixels = x[own] / 255
        for bias in biases:
            pixels = bias(pixels, y[own], i, 5)
        out = model(pixels.double())
        losses.append(cross_entropy(out, y[own], reduction="none"))
        right.append(out.argmax(1) == y[own])
    loss = torch.cat(losses).mean()
    gradient = torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(loss, list(model.parameters()))]
    )
    logged = seen.logged[-1]
    assert logged["global/train_loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert logged["global/train_acc"] == pytest.approx(
        float(torch.cat(right).double().mean()), abs=1e-6
    )
    assert logged["global/grad_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert logged["global/gap"] == pytest.approx(
        logged["val/loss"] - logged["global/train_loss"], rel=1e-9
    )


def test_it_is_measured_where_asked_and_after_the_last_round() -> None:
    def where(
        logger: Any, rounds: int, *others: Any, name: str = "global/train_loss", **settings: Any
    ) -> list[int]:
        seen = Rows()
        every: Any = {"logger": seen, **settings}
        trainer(rounds, [logger, *others], **every).fit(federated(), blobs())
        return [t for t, row in sorted(seen.rows.items()) if name in row]

    assert where(c.GlobalLossLogger(2), 5) == [1, 3, 4] and where(c.GlobalLossLogger(None), 3) == [
        2
    ]
    assert where(c.GlobalLossLogger(1), 4, name="global/gap", check_val_every_n_epoch=2) == [1, 3]
    bored = EarlyStopping("val/loss", patience=1, min_delta=10.0)
    assert where(c.GlobalLossLogger(None), 9, bored) == [1]
    bored = EarlyStopping("val/loss", patience=1, min_delta=10.0)
    assert where(c.GlobalLossLogger(None), 9, bored, name="global/gap") == [1]
    assert where(c.GlobalLossLogger(None), 9, Stopping()) == []  # by a signal: it will go on


class Stopping(pl.Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.stop_requested = True


class Rows(pl.loggers.Logger):
    """What was logged, by round."""

    name, version = "", ""

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.setdefault(step, {}).update(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_a_fixed_subset_and_an_accuracy_that_validation_alone_logs() -> None:
    _, seen = run(c.GlobalLossLogger(1, samples=30), learner=Lit)
    every, _ = run(
        c.GlobalLossLogger(1, samples=10**6), c.HessianLogger(1, 50, probes=4), learner=Lit
    )
    assert seen.logged[-1]["global/train_loss"] != float(
        every.trainer.callback_metrics["global/train_loss"]
    )
    x, y = blobs()._given_sets["train"]
    own = np.concatenate([blobs().client_indices(i) for i in range(10)])
    right = (every.export().net(x[own]).argmax(1) == y[own]).double().mean()
    assert float(every.trainer.callback_metrics["global/train_acc"]) == pytest.approx(
        float(right), abs=1e-6
    )


def _on_ranks(folder: Path, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    module = federated(Normed())
    callbacks = [c.GlobalLossLogger(1), c.HessianLogger(1, samples=60, probes=5)]
    several: Any = {"strategy": "federated", "devices": world} if world > 1 else {}
    run = trainer(2, callbacks, **several)
    run.fit(module, blobs())
    if rank == 0:
        logged = {
            k: float(v)
            for k, v in run.callback_metrics.items()
            if k.startswith(("global", "hessian"))
        }
        torch.save(logged, folder / f"{world}.pt")


@pytest.mark.slow
def test_two_processes_log_the_same(tmp_path: Path) -> None:
    for world in (1, 2):
        assert launched(_on_ranks, world, tmp_path) == [0] * world
    one, two = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert len(one) == 9 and {k: v for k, v in one.items() if k != "global/gap"} == pytest.approx(
        {k: v for k, v in two.items() if k != "global/gap"}, rel=1e-12
    )
    assert one["global/gap"] == pytest.approx(two["global/gap"], rel=1e-6)
