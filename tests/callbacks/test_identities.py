"""Where methods are one another: to the bit where nothing is computed otherwise, else to 1e-12.
Partial participation, clients of unequal size, decaying rate, weight decay, clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import InMemoryDataModule
from fl_lightning import callbacks as c
from fl_lightning.errors import Diverged
from fl_lightning.lab.contracts.federation import Learner, quiet
from fl_lightning.lab.contracts.federation import fit as tiny
from tests.engines.test_every_method import config
from tests.helpers.federation import BATCH, Network, Run, fit, network, samples
from tests.oracles.oracle import TwoLayer
from tests.oracles.problems import Vector

ROUNDS = 10
GIVEN: dict[str, Any] = {"lr_decay": 0.9, "clip_norm": 0.9}


def run(*methods: Any, rounds: int = ROUNDS, **options: Any) -> Run:
    return network(list(methods), rounds, **{**GIVEN, **options})


def same(ours: Run, theirs: Run, tolerance: float = 0.0, evaluated: bool = True) -> None:
    for t in range(len(theirs.record.w)):
        assert np.abs(ours.record.w[t] - theirs.record.w[t]).max() <= tolerance, f"w, round {t}"
        away = np.abs(ours.record.evaluated[t] - theirs.record.evaluated[t]).max()
        assert not evaluated or away <= tolerance, f"evaluated, round {t}"


def gradients(of: Run) -> list[float]:
    return [metrics["cost/gradients"] for metrics in of.record.metrics]


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_fedlesam_costs_one_gradient_a_step(engine: str) -> None:
    options = {"engine": engine}
    fedavg, lesam = run(**options), run(c.LocallyEstimatedPerturbation(0.2), **options)
    steps = [sum(map(len, table.values())) for table in fedavg.schedule.rounds]
    assert gradients(lesam) == gradients(fedavg) == steps
    sam = run(c.SharpnessAwareMinimization(0.2), rounds=2, **options)
    assert gradients(sam) == [2 * k for k in steps[:2]]
    assert (lesam.record.w[0] == fedavg.record.w[0]).all(), "in round 0 nobody has an older model"
    assert (lesam.record.w[-1] != fedavg.record.w[-1]).all()


def test_a_client_receives_its_own_previous_model_or_everybody_the_last() -> None:
    """With everybody there the two are one, also if clients are given another model than w."""
    full = {"participation": "all"}
    for beside in ([], [c.LookaheadMomentum(0.85)]):
        received = run(*beside, c.LocallyEstimatedPerturbation(0.2), **full)
        last = run(*beside, c.LocallyEstimatedPerturbation(0.2, "last"), **full)
        same(received, last)
    apart = run(c.LocallyEstimatedPerturbation(0.2, "last"))
    assert (run(c.LocallyEstimatedPerturbation(0.2)).record.w[-1] != apart.record.w[-1]).any()


def test_fedlesam_s_and_d_are_compositions() -> None:
    for name, beside in (("s", c.ControlVariates()), ("d", c.DynamicRegularization(0.1))):
        packaged, options = config(f"method/fedlesam_{name}")
        given = {key: value for key, value in options.items() if value is not None}
        same(run(*packaged, **given), run(beside, c.LocallyEstimatedPerturbation(0.1)), 1e-12)


def feddc(of: Run, alpha: float) -> list[Vector]:
    """FedDC as its authors write it, with drift variables, from our run's batches."""
    net, m, w = TwoLayer(3, 4, 3), len(of.schedule.sizes), of.start
    zeros = np.zeros_like(w)
    h, c_i, server_c = [zeros] * m, [zeros] * m, zeros
    models = []
    for t, table in enumerate(of.schedule.rounds):
        eta, ends, change = 0.3 * 0.9**t, [], zeros
        for i, batches in sorted(table.items()):
            x = w
            for batch in batches:
                g = net.gradient(x, i, batch) + alpha * (x - w + h[i]) + (server_c - c_i[i])
                g = g * min(1.0, 0.9 / np.linalg.norm(g)) + 0.01 * x
                x = x - eta * g
            h[i] = h[i] + x - w
            new = c_i[i] - server_c + (w - x) / (eta * len(batches))
            change, c_i[i] = change + new - c_i[i], new
            ends.append(x)
        w = np.mean(ends, axis=0) + np.sum(h, axis=0) / m
        server_c = server_c + change / m
        models.append(w)
    return models


def test_feddc_is_scaffold_and_feddyn() -> None:
    packaged, _ = config("method/feddc")
    ours = run(*packaged, rounds=6)
    same(ours, run(c.DynamicRegularization(0.01), c.ControlVariates(), rounds=6), 1e-12)
    for t, theirs in enumerate(feddc(ours, 0.01)):
        scale = np.abs(theirs).max()
        assert np.abs(ours.record.w[t] - theirs).max() <= 1e-9 * scale, f"round {t}"


# ---------------------------------------------------------------- directions, rates


def near(ours: Any, theirs: Any, what: str) -> None:
    assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() < 1e-9, what


def test_dilocos_first_step_goes_nearly_twice_as_far_as_its_rate() -> None:
    """b = -d in the first round, so that w moves by 0.7 (1 + 0.9) d."""

    def adamw(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)

    def nesterov(w: Any) -> Any:
        return torch.optim.SGD(w, lr=0.7, momentum=0.9, nesterov=True)

    options = {"local_steps": 5, "keep_optimizer_state": True}
    mean = fitted(adamw, 1, **options)
    ours = fitted(adamw, 1, server_optimizer=nesterov, **options)
    moved = mean.record.w[0] - mean.start
    near(ours.record.w[0], ours.start + 0.7 * 1.9 * moved, "w")


def fitted(optimizer: Any, rounds: int, **options: Any) -> Run:
    """Like ``network``, with another client optimizer and no methods."""
    x, y, clients = samples()
    data = InMemoryDataModule((x, y), clients=clients, batch_size=BATCH)
    return fit(Network(), data, [], rounds, participation=3, client_optimizer=optimizer, **options)


class Unlucky(Learner):
    """On batches whose inputs sum to more than 3 its loss is multiplied, in one of two modes."""

    def __init__(self, factor: float, training: bool = True) -> None:
        super().__init__()
        self.factor = torch.tensor(factor, dtype=torch.float64)
        self.when = training

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        unlucky = (batch[0].sum() > 3) & (self.training == self.when)
        return loss * torch.where(unlucky, self.factor, 1.0)


LMO: dict[str, Any] = {"nesterov": False, "start": "own", "variates": True}


UNLUCKY: dict[str, tuple[Any, Any]] = {
    "svd of NaN": (lambda: c.MuonDirection(orthogonaliser="svd", **LMO), (torch.nan, True)),
    # Its square is infinite, and the step along m/√v is 0.
    "squares of AdamW": (lambda: c.AdamDirection(second="averaged"), (1e170, True)),
    "loss that weighs": (lambda: c.FairAggregation(), (torch.nan, False)),
}


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("name", UNLUCKY)
def test_a_client_that_is_not_finite_is_left_out_or_stops_the_run(name: str, engine: str) -> None:
    make, given = UNLUCKY[name]
    settings: dict[str, Any] = {"participation": "all", "engine": engine}
    with quiet():
        module = tiny([make()], 2, Unlucky(*given), on_nonfinite="skip", **settings)
        assert any("were left out" in note for note in module.notes)
        for value in (module.global_vector, *module.server_states.values()):
            assert bool(value.isfinite().all())
        with pytest.raises(Diverged, match=r"client \d or a model that it keeps or sends"):
            tiny([make()], 2, Unlucky(*given), **settings)


@pytest.mark.parametrize("other", [c.LookaheadMomentum, c.DynamicRegularization])
def test_the_mean_over_all_clients_is_scaled_before_others_add_to_it(other: Any) -> None:
    def run(*methods: Any) -> Tensor:
        with quiet():
            return tiny(methods).global_vector

    def muon() -> Any:
        return c.MuonDirection(average="all", **LMO)

    assert torch.equal(run(other(), muon()), run(muon(), other()))


def classes(labels: list[int], number: int, **given: Any) -> Callable[..., Any]:
    """A network with so many outputs, on two clients that have these labels each."""
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(2 * len(labels), 3)))
    y = torch.tensor(labels * 2)

    def run(*methods: Any) -> Any:
        learner = Network()
        learner.net[2] = nn.Linear(4, number, dtype=torch.float64)
        torch.manual_seed(2)
        for parameter in learner.parameters():
            nn.init.normal_(parameter, std=0.5)
        data = InMemoryDataModule(
            (x, y), clients=[range(len(labels)), range(len(labels), 2 * len(labels))], batch_size=3
        )
        rate = {"client_optimizer": lambda p: torch.optim.SGD(p, 0.3)}
        return fit(learner, data, methods, 4, participation=2, local_epochs=3, **rate, **given)

    return run


@pytest.mark.parametrize("exclude_true", [False, True])
def test_fedlc_leaves_outputs_of_absent_classes_alone(exclude_true: bool) -> None:
    """Also those beyond the data's classes; a client of one class does not move at all."""
    run = classes([0, 2, 2, 0, 0, 2], 5)  # of which the data know three
    head = run(c.LogitCalibration(1.0, exclude_true)).module.learner.net[2]
    start = run().start[16:].reshape(-1)
    moved = torch.cat([head.weight.detach().reshape(-1), head.bias.detach()]).numpy() != start
    rows = moved[:20].reshape(5, 4).any(1) | moved[20:]
    assert rows.tolist() == [True, False, True, False, False]
    still = classes([1, 1, 1], 3)(c.LogitCalibration(1.0, exclude_true))
    assert np.array_equal(still.record.w[-1], still.start) and np.isfinite(still.start).all()
