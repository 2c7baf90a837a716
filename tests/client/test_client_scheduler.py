"""The learner's lr scheduler: rates as they were given, or stepped by rounds or by local steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from fl_lightning import UserError
from fl_lightning.callbacks import ControlVariates, NormalizedAveraging
from tests.helpers.learners import Lit, assert_trained_as, blobs, by_hand, federated, trainer

RATES = (0.25, 0.5, 1.0, 0.75, 0.3, 0.2, 0.1, 0.05, 0.02)
ENGINES = ["sequential", "concurrent", "stacked"]


def warm_up(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: step / 4)


def one_cycle(optimizer: Any) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


def table(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: RATES[step])


class Scheduled(Lit):
    def __init__(self, schedule: Any = table, momentum: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.schedule, self.momentum = schedule, momentum

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer)}}


def rounds_of(
    module: Any, rounds: int, callbacks: Any = (), start: Any = None, **settings: Any
) -> Any:
    run = trainer(rounds, callbacks, **settings)
    run.fit(module, blobs(clients=4), ckpt_path=start)
    return run


@pytest.mark.filterwarnings("ignore:the learner's lr scheduler is ignored")
def test_an_ignored_scheduler_leaves_the_rate_that_the_user_gave() -> None:
    with pytest.raises(UserError, match="client_scheduler='ignore': OneCycleLR replaces"):
        rounds_of(federated(Scheduled(one_cycle)), 1)
    module = federated(Scheduled(warm_up))
    run = rounds_of(module, 1)
    rounds_of(
        plain := federated(Scheduled(), client_optimizer=lambda p: torch.optim.SGD(p, 0.1)), 1
    )
    assert run.callback_metrics["client_lr"] == pytest.approx(0.1)
    assert torch.equal(module.global_vector, plain.global_vector)


def stepped(weights: Any, data: Any, momentum: float, rate_of: Any) -> nn.Module:
    """One client with all data, by a loop: the rate of each (round, step)."""
    learner = Lit().double()
    learner.load_state_dict(weights)
    for t in range(3):
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.1, momentum=momentum)
        for k, batch in enumerate(data.client_batches(0, t, 3)):
            optimizer.param_groups[0]["lr"] = rate_of(t, k)
            by_hand(learner, [batch], lambda _, own=optimizer: own)
    return learner


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("unit", ["rounds", "local_steps"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_scheduler_is_stepped_as_asked(engine: str, unit: str, momentum: float) -> None:
    data = blobs(clients=1)
    module = federated(
        Scheduled(momentum=momentum),
        client_scheduler=unit,
        local_steps=3,
        participation=1.0,
        engine=engine,
        capture=False,
    )
    weights, run = copy.deepcopy(module.learner.state_dict()), trainer(3)
    run.fit(module, data)
    expected = stepped(
        weights, data, momentum, lambda t, k: 0.1 * RATES[t if unit == "rounds" else k]
    )
    assert module.engine_facts["engine"] == engine
    assert run.callback_metrics["client_lr"] == pytest.approx(
        0.1 * RATES[2] if unit == "rounds" else 0.1
    )
    assert_trained_as(module, expected, 1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_scheduler_that_cycles_momentum_cycles_it_from_none_too(engine: str) -> None:
    data = blobs(clients=1)
    module = federated(
        Scheduled(one_cycle),
        client_scheduler="local_steps",
        local_steps=6,
        participation=1.0,
        engine=engine,
    )
    alone = Scheduled(one_cycle).double()
    alone.load_state_dict(module.learner.state_dict())
    trainer(1).fit(module, data)
    given = alone.configure_optimizers()
    for batch in data.client_batches(0, 0, 6):
        by_hand(alone, [batch], lambda _: given["optimizer"])
        given["lr_scheduler"]["scheduler"].step()
    assert_trained_as(module, alone, 1e-12)


def test_the_mean_gradient_counts_steps_by_their_rates() -> None:
    found = {}

    class Looking(ControlVariates):
        def on_local_end(self, clients: Any) -> None:
            found["elapsed"], found["steps"] = clients.elapsed.clone(), clients.steps.clone()
            super().on_local_end(clients)

    module = federated(
        Scheduled(),
        client_scheduler="local_steps",
        local_steps=4,
        participation=1,
        engine="sequential",
    )
    rounds_of(module, 1, [Looking()])
    torch.testing.assert_close(
        found["elapsed"], torch.full((1, 1), 0.1 * sum(RATES[:4]), dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("learner", "arguments", "words"),
    [
        (Lit, {}, "gives no lr scheduler"),
        (
            Scheduled,
            {"client_optimizer": lambda p: torch.optim.SGD(p, 0.1)},
            "Leave out one of the two",
        ),
        (
            lambda: Scheduled(lr_scheduler.ReduceLROnPlateau),
            {},
            "ReduceLROnPlateau steps by a metric",
        ),
        (
            lambda: Scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda k: -k)),
            {},
            "LambdaLR: lr=-0.1 is not accepted",
        ),
    ],
)
def test_what_cannot_be_stepped_is_refused(learner: Any, arguments: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rounds_of(federated(learner(), client_scheduler="local_steps", **arguments), 2)


def two_decays(p: Any) -> Any:
    first, *rest = p
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": rest}]
    return torch.optim.SGD(groups, lr=0.1, weight_decay=0.01)


def momentum(**options: Any) -> dict[str, Any]:
    return {"client_optimizer": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, **options)}


STEPPED: dict[str, Any] = {"client_scheduler": "local_steps", "local_steps": 3}


@pytest.mark.parametrize(
    ("settings", "method", "words"),
    [
        (momentum(nesterov=True), NormalizedAveraging, "momentum with nesterov=True, and Norm"),
        (momentum(dampening=0.5), NormalizedAveraging, "momentum with dampening=0.5, and Norm"),
        (
            {**momentum(), "keep_optimizer_state": True},
            NormalizedAveraging,
            "momentum with keep_optimizer_state=True, and NormalizedAveraging needs plain momentum",
        ),
        (
            {"client_optimizer": two_decays},
            ControlVariates,
            r"several values of weight_decay \(0, 0\.01\), and ControlVariates needs a single",
        ),
        (STEPPED, NormalizedAveraging, "'local_steps'.*NormalizedAveraging needs one rate"),
    ],
)
def test_rates_of_another_kind_are_refused_to_what_computes_with_them(
    settings: dict[str, Any], method: Any, words: str
) -> None:
    learner = Scheduled() if settings is STEPPED else Lit()
    with pytest.raises(UserError, match=words):
        rounds_of(federated(learner, **settings), 1, [method()])


class AsLongAsARound(Lit):
    """Its rate falls linearly over as many steps as its Trainer says that there are."""

    def configure_optimizers(self) -> Any:
        steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        fall = lr_scheduler.LambdaLR(optimizer, lambda k: max(0.0, 1 - k / steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": fall, "interval": "step"}}


@pytest.mark.parametrize("given", [{"local_epochs": 2}, {"local_steps": 5}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.filterwarnings("ignore:engine=")
def test_a_scheduler_finds_the_local_steps_of_each_client(
    engine: str, given: dict[str, Any]
) -> None:
    data = blobs(clients=4, batch_size=5)
    settings = {"participation": "all", "client_scheduler": "local_steps", "engine": engine}
    module = federated(AsLongAsARound(), **settings, **given)
    start = copy.deepcopy(module.learner)
    run = trainer(2, limit_val_batches=0)
    run.fit(module, data)
    w = nn.utils.parameters_to_vector(start.parameters()).detach()
    numbers = set()
    for t in range(2):
        ends = []
        for client in range(4):
            learner = copy.deepcopy(start)
            nn.utils.vector_to_parameters(w.clone(), learner.parameters())
            number = module.steps(t, client)
            numbers.add(number)
            for k, batch in enumerate(data.client_batches(client, t, number)):
                rate = 0.1 * (1 - k / number)
                by_hand(learner, [batch], lambda p, rate=rate: torch.optim.SGD(p, rate))
            ends.append(nn.utils.parameters_to_vector(learner.parameters()).detach())
        w = torch.stack(ends).mean(0)
    assert len(numbers) == (1 if "local_steps" in given else 2)
    torch.testing.assert_close(module.global_vector.detach(), w, rtol=1e-9, atol=1e-9)
    assert not any("learning rate of 0" in note for note in module.notes)
