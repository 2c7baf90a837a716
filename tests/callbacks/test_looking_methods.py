"""MOON, FedNTD and FedLC: identities, loops by hand around a plain network, their edges."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import FederatedModule, InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.machine.random_state import seed_client
from fl_lightning.schedules import Steps
from tests.helpers.federation import Network, fit, network, samples
from tests.helpers.learners import blobs, federated, trainer

METHODS: dict[str, Callable[..., Any]] = {
    "mu": c.ModelContrast,
    "strength": c.NotTrueDistillation,
    "tau": c.LogitCalibration,
}


def same(ours: Any, theirs: Any, tolerance: float = 0.0) -> bool:
    pairs = zip(ours.record.w, theirs.record.w, strict=True)
    return max(np.abs(one - other).max() for one, other in pairs) <= tolerance


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
@pytest.mark.parametrize("name", METHODS)
def test_the_neutral_value_is_fedavg_to_the_bit_and_another_is_not(name: str, engine: str) -> None:
    average = network([], 4, engine=engine)
    assert same(network([METHODS[name](**{name: 0.0})], 4, engine=engine), average)
    later = METHODS[name](**{name: Steps({0: 0.0, 3: 0.5})})
    scheduled = network([later], 4, engine=engine)
    assert np.array_equal(scheduled.record.w[2], average.record.w[2])
    assert not np.array_equal(scheduled.record.w[3], average.record.w[3])


def test_moon_in_every_clients_first_round_is_fedavg() -> None:
    """Until a client comes for the second time, whenever it came first; then it no longer is."""
    alone = {"participation": 1, "local_epochs": 3}
    ours, average = network([c.ModelContrast(5.0)], 7, **alone), network([], 7, **alone)
    seen: set[int] = set()
    for t, cohort in enumerate(ours.schedule.rounds):
        away = np.abs(ours.record.w[t] - average.record.w[t]).max()
        if seen & set(cohort):
            assert away > 1e-4
            break
        assert away < 1e-12
        seen |= set(cohort)
    assert len(seen) > 2 and t == len(seen)


def test_fedntd_with_one_step_is_fedavg_but_not_from_another_start() -> None:
    one = {"local_steps": 1}
    strong = c.NotTrueDistillation(10.0, 2.0)
    assert same(network([strong], 4, **one), network([], 4, **one), 1e-12)
    relaxed = [c.RelaxedInitialization(0.5)]
    assert not same(network([strong, *relaxed], 4, **one), network(relaxed, 4, **one), 1e-6)


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
            (x, y),
            clients=[range(len(labels)), range(len(labels), 2 * len(labels))],
            batch_size=3,
        )
        rate = {"client_optimizer": lambda p: torch.optim.SGD(p, 0.3)}
        return fit(learner, data, methods, 4, participation=2, local_epochs=3, **rate, **given)

    return run


def test_fedntd_of_two_classes_is_fedavg() -> None:
    run = classes([0, 1, 1, 0, 1], 2)
    assert same(run(c.NotTrueDistillation(10.0, 0.5)), run(), 1e-12)
    run = classes([0, 1, 2, 0, 1], 3)
    assert not same(run(c.NotTrueDistillation(10.0, 0.5)), run(), 1e-3)


def test_fedlc_of_balanced_classes_is_fedavg() -> None:
    run = classes([0, 1, 2, 2, 1, 0], 3)
    assert same(run(c.LogitCalibration(3.0)), run(), 1e-12)
    run = classes([0, 1, 2, 2, 2, 2], 3)
    assert not same(run(c.LogitCalibration(3.0)), run(), 1e-3)


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


def test_fedlc_printed_has_no_bound_and_the_usual_one_has() -> None:
    batch = torch.zeros(4, dtype=torch.int64)
    z = torch.randn(4, 3, requires_grad=True)

    class OneClient:
        label_counts = torch.tensor([[4, 2, 0]])

    method = c.LogitCalibration(0.7, exclude_true=True)
    clients: Any = OneClient()
    calibrated = method.local_output(clients, "logits", z, (None, batch))
    assert bool(torch.isneginf(calibrated[:, 2]).all())
    loss = method.without_true(
        clients, F.cross_entropy(calibrated, batch), {"logits": z}, (None, batch)
    )
    margins = 0.7 * torch.tensor([4.0, 2.0]) ** -0.25
    by_hand = ((z[:, 1] - margins[1]) - (z[:, 0] - margins[0])).mean()
    assert float(loss) == pytest.approx(float(by_hand), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, z)
    assert torch.allclose(gradient, torch.tensor([[-0.25, 0.25, 0.0]]).expand(4, 3))


def wrong(value: Any) -> Any:
    return value


@pytest.mark.parametrize(
    "make, says",
    [
        (lambda: c.ModelContrast(temperature=0.0), "temperature=0.0"),
        (lambda: c.ModelContrast(mu=float("nan")), "mu=nan"),
        (lambda: c.NotTrueDistillation(temperature=-1.0), "temperature=-1.0"),
        (lambda: c.NotTrueDistillation(strength=wrong("much")), "strength='much'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make()


class Plain(nn.Module):
    """With dropout and batch normalisation; float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)
        return z, self.head(z)


class Wrapped(pl.LightningModule):
    def __init__(self, network: Plain) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.network(batch[0])[1], batch[1])


Batches = Callable[[int, int], Iterator[tuple[Tensor, Tensor]]]


def moon(network: Plain, batches: Batches, rounds: int, mu: float, tau: float) -> Plain:
    """MOON as one writes it: two clients, all take part; what the server has at the end."""
    last: dict[int, Plain] = {}
    for t in range(rounds):
        ends = []
        for i in (0, 1):
            student, received, negative = (copy.deepcopy(network) for _ in range(3))
            if i in last:
                weights = dict(last[i].named_parameters())
                for name, parameter in negative.named_parameters():
                    parameter.data.copy_(weights[name])
            received.eval(), negative.eval()
            optimizer = torch.optim.SGD(student.parameters(), lr=0.1, weight_decay=1e-3)
            seed_client(1, t, i)
            for x, y in batches(t, i):
                z, logits = student(x)
                with torch.no_grad():
                    positive, previous = received(x)[0], negative(x)[0]
                pair = torch.stack(
                    [F.cosine_similarity(z, positive), F.cosine_similarity(z, previous)], dim=1
                )
                contrast = F.cross_entropy(pair / tau, torch.zeros(len(y), dtype=torch.int64))
                loss = F.cross_entropy(logits, y) + mu * contrast
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            last[i] = student
            ends.append(student)
        network = averaged(ends)
    return network


def fedntd(network: Plain, batches: Batches, rounds: int, beta: float, tau: float) -> Plain:
    """FedNTD as one writes it: two clients, all take part; what the server has at the end."""
    for t in range(rounds):
        ends = []
        for i in (0, 1):
            student, teacher = copy.deepcopy(network), copy.deepcopy(network).eval()
            optimizer = torch.optim.SGD(student.parameters(), lr=0.1, weight_decay=1e-3)
            seed_client(1, t, i)
            for x, y in batches(t, i):
                logits = student(x)[1]
                with torch.no_grad():
                    known = teacher(x)[1]
                others = torch.ones_like(logits).scatter_(1, y[:, None], 0).bool()
                q = F.log_softmax(logits[others].view(len(y), -1) / tau, 1)
                q_known = F.softmax(known[others].view(len(y), -1) / tau, 1)
                apart = nn.KLDivLoss(reduction="batchmean")(q, q_known)
                loss = F.cross_entropy(logits, y) + beta * tau**2 * apart
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            ends.append(student)
        network = averaged(ends)
    return network


def averaged(ends: list[Plain]) -> Plain:
    """The mean of weights and statistics, and the largest count."""
    mean = copy.deepcopy(ends[0])
    states = [end.state_dict() for end in ends]
    for name, value in mean.state_dict().items():
        together = torch.stack([state[name] for state in states])
        counts = not value.is_floating_point()
        value.copy_(together.max(0).values if counts else together.mean(0))
    return mean


@pytest.mark.parametrize("engine", ["sequential", "debug"])
@pytest.mark.parametrize(
    "method, loop",
    [
        (lambda: c.ModelContrast(2.0, 0.3), lambda n, b, r: moon(n, b, r, 2.0, 0.3)),
        (lambda: c.NotTrueDistillation(2.0, 1.5), lambda n, b, r: fedntd(n, b, r, 2.0, 1.5)),
    ],
    ids=["MOON", "FedNTD"],
)
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_loop_by_hand_around_a_plain_network_agrees(
    method: Callable[[], Any], loop: Callable[..., Plain], rounds: int, engine: str
) -> None:
    x, y, _ = samples()
    data = InMemoryDataModule(
        (x.double(), y), clients=[range(12, 31), range(35, 61)], batch_size=8, seed=1
    )
    torch.manual_seed(4)
    start = Plain().double()
    module = FederatedModule(
        Wrapped(copy.deepcopy(start)),
        seed=1,
        participation="all",
        local_epochs=2,
        engine=engine,
        client_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3),
    )
    trainer(rounds, [method()]).fit(module, data)

    def batches(t: int, i: int) -> Iterator[tuple[Tensor, Tensor]]:
        return data.client_batches(i, t, module.steps(t, i), device=torch.device("cpu"))

    theirs = loop(start, batches, rounds).state_dict()
    ours = module.export().network.state_dict()
    plain = FederatedModule(
        Wrapped(copy.deepcopy(start)),
        seed=1,
        participation="all",
        local_epochs=2,
        engine=engine,
        client_optimizer=lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-3),
    )
    trainer(rounds).fit(plain, data)
    for name, value in theirs.items():
        assert torch.allclose(ours[name].double(), value.double(), rtol=0, atol=1e-12), name
    matters = rounds > 1 or isinstance(method(), c.NotTrueDistillation)
    away = (plain.global_vector - module.global_vector).abs().max()
    assert bool(away > 1e-4) == matters, "MOON's first round is FedAvg's"


@pytest.mark.parametrize("order", [1, -1])
def test_fedntd_beside_fedlc_distils_logits_without_margins(order: int) -> None:
    """By hand: CE(z - m_i, y) + β τ² KL(q̃(z of w) ‖ q̃(z of x))."""
    data = blobs(clients=2)
    methods = [c.NotTrueDistillation(0.7, 2.0), c.LogitCalibration(1.5)][::order]
    module = federated(participation="all", local_epochs=2)
    start = copy.deepcopy(module.learner)
    trainer(1, methods).fit(module, data)
    ends = []
    for client in range(2):
        learner = copy.deepcopy(start)
        optimizer = learner.configure_optimizers()
        margins = 1.5 * torch.as_tensor(data.client_label_counts(client)).double() ** -0.25
        for x, y in data.client_batches(client, 0, module.steps(0, client)):
            z = learner.net(x)
            others = y[:, None] != torch.arange(4)
            known, mine = (
                F.log_softmax(logits[others].view(len(y), 3) / 2.0, 1)
                for logits in (start.net(x).detach(), z)
            )
            apart = (known.exp() * (known - mine)).sum(1).mean()
            optimizer.zero_grad()
            (F.cross_entropy(z - margins, y) + 0.7 * 4.0 * apart).backward()
            optimizer.step()
        ends.append(nn.utils.parameters_to_vector(learner.parameters()).detach())
    torch.testing.assert_close(
        module.global_vector.detach(), torch.stack(ends).mean(0), rtol=1e-10, atol=1e-10
    )
