"""Losses, logs and gradients of clients' samples at any vector, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import InMemoryDataModule
from fl_lightning.evaluation.evaluator import Evaluator, samples_of
from fl_lightning.learner.layout import Layout
from tests.helpers.learners import InPlace, Lit, blobs, federated, trainer
from tests.helpers.processes import grouped


class Rated(Lit):
    """Logs accuracy as a metric of torchmetrics, in training as in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.acc = MulticlassAccuracy(4, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.acc(self.net(batch[0]), batch[1])
        self.log("train/acc", self.acc)
        return super().training_step(batch, batch_idx)


class Penalised(Lit):
    """Takes a gradient of its own in each step, as a gradient penalty does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        (g,) = torch.autograd.grad(loss, [self.net[0].weight], create_graph=True)
        return loss + (g**2).sum()


def evaluator(learner: Any, data: Any, **arguments: Any) -> tuple[Evaluator, Tensor]:
    learner.double()
    x = torch.cat([p.detach().reshape(-1) for p in learner.parameters()])
    return Evaluator(learner, Layout(learner), data, **arguments), x


def held(data: Any, clients: Any = range(10)) -> tuple[Tensor, Tensor]:
    x, y = data._given_sets["train"]
    own = np.concatenate([data.client_indices(i) for i in clients])
    return x[own], y[own]


def test_mean_loss_logs_and_gradient_are_those_of_all_samples_at_once() -> None:
    torch.manual_seed(0)
    data, learner = blobs(), Rated()
    found, w = evaluator(learner, data)
    measured = found.mean(w, samples_of(data), gradient=True)
    x, y = held(data)
    out = learner.net(x)
    loss = cross_entropy(out, y)
    gradient = torch.cat(
        [g.reshape(-1) for g in torch.autograd.grad(loss, list(learner.parameters()))]
    )
    loss = loss.detach()
    assert measured.samples == len(y) and measured.loss == pytest.approx(float(loss), rel=1e-12)
    expected = float((out.argmax(1) == y).double().mean())
    assert measured.logged["train/acc"] == pytest.approx(expected, abs=1e-7)
    assert measured.logged["train/loss"] == pytest.approx(float(loss), rel=1e-12)
    assert measured.gradient is not None
    assert torch.allclose(measured.gradient, gradient, rtol=1e-11, atol=1e-14)
    elsewhere = found.mean(w + 0.1, samples_of(data)).loss
    assert abs(elsewhere - measured.loss) > 1e-3
    assert found.mean(w, samples_of(data)).loss == measured.loss


def test_samples_that_several_clients_hold_count_as_often() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, 20, dtype=torch.float64), torch.arange(6) % 4
    data = InMemoryDataModule((x, y), clients=[[0, 1, 1], [1, 2, 3, 4, 5], [5]], batch_size=2)
    learner = Lit()
    found, w = evaluator(learner, data)
    own = torch.tensor([0, 1, 1, 1, 2, 3, 4, 5, 5])
    expected = cross_entropy(learner.net(x[own]), y[own])
    assert found.mean(w, samples_of(data)).loss == pytest.approx(
        float(expected.detach()), rel=1e-12
    )


def test_each_client_at_its_own_model_with_what_validation_logs() -> None:
    torch.manual_seed(0)
    data, learner = blobs(), Lit()
    found, w = evaluator(learner, data)
    models = w + 0.1 * torch.randn(3, len(w), dtype=w.dtype)
    samples = {i: data.client_indices(i) for i in (7, 2)} | {4: np.empty(0, np.int64)}
    measured = enumerate(samples.items())
    each = [found.client(models[j], c, own, step="validation_step") for j, (c, own) in measured]
    assert [one["samples"] for one in each] == [len(samples[7]), len(samples[2]), 0]
    for j, client in enumerate((7, 2)):
        x, y = held(data, [client])
        torch.nn.utils.vector_to_parameters(models[j], learner.parameters())
        out = learner.net(x)
        assert float(each[j]["loss"]) == pytest.approx(
            float(cross_entropy(out, y).detach()), rel=1e-12
        )
        expected = float((out.argmax(1) == y).double().mean())
        assert float(each[j]["val/acc"]) == pytest.approx(expected, rel=1e-6)
    assert np.isnan(each[2]["loss"]) and "train/loss" not in each[0]


def test_a_step_that_writes_buffers_or_takes_gradients_itself() -> None:
    torch.manual_seed(0)
    data, moving = blobs(), InPlace()
    found, w = evaluator(moving, data)
    first = found.mean(w, samples_of(data)).loss
    assert not moving.running_mean.any() and found.mean(w, samples_of(data)).loss == first
    found, w = evaluator(Penalised(), data)
    assert (
        found.mean(w, samples_of(data)).loss > found.mean(w, samples_of(data)).logged["train/loss"]
    )


def test_batches_fit_into_memory() -> None:
    torch.manual_seed(0)
    data = blobs()
    found, w = evaluator(Lit(hidden=64), data)
    samples = samples_of(data)
    sizes = [found.size(w, samples, graph_bytes) for graph_bytes in (0, 2**18, 2**17)]
    assert sizes[0] == 1000 and 1 < sizes[2] < sizes[1] < 1000
    assert sizes[1] == pytest.approx(2 * sizes[2], abs=1)
    batches = [n for share in found.shares(samples, 50) for _, n in share()]
    assert batches[:-1] == [50] * (len(batches) - 1) and sum(batches) == data.client_sizes().sum()


def _share(path: Any, rank: int, world: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, samples = blobs(), samples_of(blobs())
    found, w = evaluator(Rated(), data)
    shares = found.shares(samples, 17)
    total = found.sum(w, shares, found._term(True, "training_step"))
    mean = found.mean(w, samples)
    if rank == 0:
        sums = {"gradient": total.gradient, "loss": total.loss}
        torch.save({**sums, "mean": mean}, path / f"{world}.pt")


def test_processes_share_the_work_to_the_same_bits(tmp_path: Any) -> None:
    for world in (1, 2):
        grouped(_share, world, tmp_path)
    one, two = (torch.load(tmp_path / f"{world}.pt", weights_only=False) for world in (1, 2))
    assert torch.equal(one["gradient"], two["gradient"]) and torch.equal(one["loss"], two["loss"])
    assert one["mean"].logged == two["mean"].logged


def test_a_run_sees_nothing_of_it() -> None:
    torch.manual_seed(0)
    module = federated(Rated())
    trainer().fit(module, data := blobs())
    state = {k: v.clone() for k, v in module.learner.state_dict().items()}
    metric, drawn_before = module.learner.acc.tp.clone(), torch.get_rng_state()
    logged = dict(module.trainer.callback_metrics)
    module.evaluator().mean(module.evaluated_vector + 1, samples_of(data), gradient=True)
    assert all(torch.equal(v, state[k]) for k, v in module.learner.state_dict().items())
    assert torch.equal(metric, module.learner.acc.tp)
    assert torch.equal(drawn_before, torch.get_rng_state())
    assert logged == dict(module.trainer.callback_metrics) and module.learner.training
