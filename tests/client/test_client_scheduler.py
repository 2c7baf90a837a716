"""The learner's lr scheduler: rates as they were given, or stepped by rounds or by local steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from fl_lightning import UserError
from fl_lightning.callback import Clients, FederatedCallback
from fl_lightning.callbacks import ControlVariates, NormalizedAveraging
from tests.helpers.learners import Lit, blobs, federated, trainer

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


@pytest.mark.parametrize("schedule", [warm_up, one_cycle])
@pytest.mark.filterwarnings("ignore:the learner's lr scheduler is ignored")
def test_an_ignored_scheduler_leaves_the_rate_that_the_user_gave(schedule: Any) -> None:
    module = federated(Scheduled(schedule))
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
        for k, (x, y) in enumerate(data.client_batches(0, t, 3)):
            optimizer.param_groups[0]["lr"] = rate_of(t, k)
            optimizer.zero_grad()
            nn.functional.cross_entropy(learner.net(x), y).backward()
            optimizer.step()
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
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(
            module.export().state_dict()[name], value, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_rates_reach_to_the_last_step_of_the_client_with_most_steps(engine: str) -> None:
    data = blobs(clients=5)  # 3, 3, 3, 3 and 2 batches
    settings: dict[str, Any] = {
        "client_scheduler": "local_steps",
        "local_epochs": 2,
        "weighting": "uniform",
    }
    module = federated(Scheduled(), **settings, participation=1.0, engine=engine)
    weights, start = copy.deepcopy(module.learner.state_dict()), module.global_vector.clone()
    trainer(1).fit(module, data)
    ends = list[torch.Tensor]()
    for client, steps in enumerate((6, 6, 6, 6, 4)):
        learner = Lit().double()
        learner.load_state_dict(weights)
        for k, (x, y) in enumerate(data.client_batches(client, 0, steps)):
            optimizer = torch.optim.SGD(learner.parameters(), lr=0.1 * RATES[k])
            nn.functional.cross_entropy(learner.net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(nn.utils.parameters_to_vector(learner.parameters()).detach())
    torch.testing.assert_close(
        module.global_vector - start, torch.stack(ends).mean(0) - start, rtol=1e-10, atol=1e-12
    )


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
    (optimizer, scheduler) = (
        (given := alone.configure_optimizers())["optimizer"],
        given["lr_scheduler"]["scheduler"],
    )
    for x, y in data.client_batches(0, 0, 6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(alone.net(x), y).backward()
        optimizer.step()
        scheduler.step()
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(
            module.export().state_dict()[name], value, rtol=1e-12, atol=1e-12
        )


@pytest.mark.fast
@pytest.mark.parametrize("unit", ["rounds", "local_steps"])
def test_captured_steps_have_the_bits_of_others(unit: str) -> None:
    given: dict[str, Any] = {
        "client_scheduler": unit,
        "local_steps": 9,
        "engine": "concurrent",
        "participation": 1.0,
    }
    captured, alone = (
        federated(Scheduled(), **given, capture=capture, workers=1) for capture in (True, False)
    )
    rounds_of(captured, 3)
    rounds_of(alone, 3)
    assert torch.equal(captured.global_vector, alone.global_vector)
    told = [note for note in captured.notes if "changes the learning rate in each step" in note]
    assert bool(told) == (unit == "local_steps")


@pytest.mark.parametrize("unit", ["rounds", "local_steps"])
def test_a_run_with_a_scheduler_resumes_to_the_same_bits_and_as_it_was(
    unit: str, tmp_path: Path
) -> None:
    def made(unit: str = unit) -> Any:
        return federated(Scheduled(), client_scheduler=unit, local_steps=3, participation=1.0)

    whole, half, resumed = made(), made(), made()
    rounds_of(whole, 4, [ControlVariates()])
    run = rounds_of(half, 2, [ControlVariates()], default_root_dir=tmp_path)  # rows lie there
    run.save_checkpoint(tmp_path / "half.ckpt")
    rounds_of(resumed, 4, [ControlVariates()], tmp_path / "half.ckpt")
    assert torch.equal(whole.global_vector, resumed.global_vector)
    with pytest.raises(UserError, match=r"client_scheduler.*ignore now"):
        rounds_of(made("ignore"), 4, [ControlVariates()], tmp_path / "half.ckpt")


def in_sequence(inner: float, milestone: int = 3) -> Any:
    def made(optimizer: Any) -> Any:
        parts = [
            lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            lr_scheduler.StepLR(optimizer, 1, inner),
        ]
        return lr_scheduler.SequentialLR(optimizer, parts, [milestone])

    return made


def chained(inner: float) -> Any:
    def made(optimizer: Any) -> Any:
        sequence = in_sequence(inner)(optimizer)
        return lr_scheduler.ChainedScheduler([sequence, lr_scheduler.ConstantLR(optimizer, 0.1)])

    return made


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (in_sequence(0.5), in_sequence(0.25), r"'gamma': 0\.5.* then, .*'gamma': 0\.25.* now"),
        (in_sequence(0.5), in_sequence(0.5, 4), r"\[3\].* then, .*\[4\].* now"),
        (chained(0.5), chained(0.25), r"'gamma': 0\.5.* then, .*'gamma': 0\.25.* now"),
        (
            lambda o: lr_scheduler.MultiStepLR(o, [4, 3]),
            lambda o: lr_scheduler.MultiStepLR(o, [5, 3]),
            r"3.*4.* then, .*3.*5.* now",
        ),
        (
            lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
            lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, pct_start=0.5),
            r"5\.0.* then, .*9\.0.* now",
        ),
    ],
)
def test_another_scheduler_is_refused_whatever_differs_in_it(
    then: Any, now: Any, words: str, tmp_path: Path
) -> None:
    def made(schedule: Any) -> Any:
        return federated(Scheduled(schedule), client_scheduler="rounds")

    rounds_of(made(then), 1).save_checkpoint(path := tmp_path / "one.ckpt")
    rounds_of(made(then), 2, start=path)
    with pytest.raises(UserError, match=words):
        rounds_of(made(now), 2, start=path)
    # A checkpoint of an earlier version does not say it.
    old = torch.load(path, weights_only=True)
    del old["federated"]["arguments"]["client_scheduler, inside"]
    torch.save(old, path)
    rounds_of(made(now), 2, start=path)


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


@pytest.mark.parametrize("given", [lambda s: s, lambda s: {"scheduler": s, "frequency": 1}])
def test_one_scheduler_beside_a_list_of_optimizers(given: Any) -> None:
    """Lightning accepts it without a list."""

    class Beside(Scheduled):
        def configure_optimizers(self) -> Any:
            both = super().configure_optimizers()
            return [both["optimizer"]], given(both["lr_scheduler"]["scheduler"])

    rounds_of(ours := federated(Beside(), client_scheduler="rounds"), 2)
    rounds_of(theirs := federated(Scheduled(), client_scheduler="rounds"), 2)
    assert torch.equal(ours.global_vector, theirs.global_vector)


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
            lambda: Scheduled(one_cycle),
            {"local_steps": 30},
            "OneCycleLR cannot be stepped to 30 local steps",
        ),
        (
            lambda: Scheduled(lambda o: lr_scheduler.LambdaLR(o, lambda k: -k)),
            {},
            "gives the rate -0.1",
        ),
    ],
)
def test_what_cannot_be_stepped_is_refused(learner: Any, arguments: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        rounds_of(federated(learner(), client_scheduler="local_steps", **arguments), 2)


def test_a_method_that_needs_one_rate_is_refused_by_name() -> None:
    module = federated(Scheduled(), client_scheduler="local_steps", local_steps=3)
    with pytest.raises(
        UserError, match=r"client_scheduler='local_steps'.*NormalizedAveraging needs one rate"
    ):
        rounds_of(module, 1, [NormalizedAveraging()])


def test_groups_of_several_weight_decays_are_refused_for_what_they_are() -> None:
    def two(p: Any) -> Any:
        first, *rest = p
        return torch.optim.SGD(
            [{"params": [first], "weight_decay": 0.0}, {"params": rest}], lr=0.1, weight_decay=0.01
        )

    with pytest.raises(
        UserError,
        match=r"several values of weight_decay \(0, 0\.01\), and ControlVariates needs a single",
    ):
        rounds_of(federated(client_optimizer=two), 1, [ControlVariates()])


class Decaying(Lit):
    """Its scheduler sets the weight decay."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)

        class Schedule(lr_scheduler.LRScheduler):
            def get_lr(self) -> Any:
                for group in self.optimizer.param_groups:
                    group["weight_decay"] = 0.1 * self.last_epoch
                return [group["lr"] for group in self.optimizer.param_groups]

        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": Schedule(optimizer)}}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("unit", ["rounds", "local_steps"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_scheduler_may_set_the_weight_decay(engine: str, unit: str, momentum: float) -> None:
    data = blobs(clients=1)
    module = federated(
        Decaying(momentum), client_scheduler=unit, participation=1.0, engine=engine, capture=False
    )
    learner = copy.deepcopy(module.learner)
    seen = []

    class Reading(FederatedCallback):
        def on_local_start(self, clients: Clients) -> None:
            seen.append(clients.weight_decay)

    trainer(3, [Reading()]).fit(module, data)
    assert seen[-3:] == pytest.approx([0, 0.1, 0.2] if unit == "rounds" else [0, 0, 0])
    for t in range(3):
        optimizer = torch.optim.SGD(learner.parameters(), lr=0.1, momentum=momentum)
        for k, (x, y) in enumerate(data.client_batches(0, t, 3)):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (t if unit == "rounds" else k)
            optimizer.zero_grad()
            nn.functional.cross_entropy(learner.net(x), y).backward()
            optimizer.step()
    for name, value in learner.state_dict().items():
        torch.testing.assert_close(
            module.export().state_dict()[name], value, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ({"nesterov": True}, {}, "nesterov=True"),
        ({"dampening": 0.5}, {}, "dampening=0.5"),
        ({}, {"keep_optimizer_state": True}, "keep_optimizer_state=True"),
    ],
)
def test_momentum_of_another_kind_is_refused_to_what_computes_with_it(
    options: dict[str, Any], settings: dict[str, Any], words: str
) -> None:
    module = federated(
        client_optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, **options), **settings
    )
    with pytest.raises(
        UserError, match=f"momentum with {words}, and NormalizedAveraging needs plain momentum"
    ):
        trainer(1, [NormalizedAveraging()]).fit(module, blobs())


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
            for k, (x, y) in enumerate(data.client_batches(client, t, number)):
                learner.zero_grad()
                nn.functional.cross_entropy(learner.net(x), y).backward()
                with torch.no_grad():
                    for p in learner.parameters():
                        p.sub_(0.1 * (1 - k / number) * p.grad)
            ends.append(nn.utils.parameters_to_vector(learner.parameters()).detach())
        w = torch.stack(ends).mean(0)
    assert len(numbers) == (1 if "local_steps" in given else 2)
    torch.testing.assert_close(module.global_vector.detach(), w, rtol=1e-9, atol=1e-9)
    assert not any("learning rate of 0" in note for note in module.notes)


@pytest.mark.parametrize("unit", ["local_steps", "rounds"])
def test_a_rate_of_nothing_is_told(unit: str) -> None:
    module = federated(Scheduled(warm_up), client_scheduler=unit, local_steps=3)
    with pytest.warns(UserWarning, match=rf"{unit}.*LambdaLR gives a learning rate of 0 in 1 of 3"):
        trainer(3).fit(module, blobs())
