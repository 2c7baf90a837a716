"""A learner that cannot train on the run's smallest batch is told so before round 0.

One that can is not refused.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedCallback, FederatedModule, InMemoryDataModule
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.errors import UserError
from fl_lightning.round.cohort import Cohort
from tests.helpers.learners import Lit, Normed, federated, trainer

ENGINES = ("auto", "sequential", "concurrent", "stacked")


class Comparing(Lit):
    """Compares samples with each other, and says how many it needs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(batch[0]) > 2, "compares at least three samples"
        return super().training_step(batch, batch_idx)


class Spread(Lit):
    """Its loss is not a number on one sample, and says nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.net(batch[0]).std(0).sum()


class Keeping(Lit):
    """A hook keeps an output in the learner, also where it is a copy's."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].register_forward_hook(lambda module, given, out: setattr(self, "out", out))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.out.square().mean()


class Begun(FederatedCallback):
    def __init__(self) -> None:
        super().__init__()
        self.rounds = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.rounds += 1


def of_sizes(*sizes: int, **given: Any) -> InMemoryDataModule:
    n = sum(sizes)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 20, generator=generator, dtype=torch.float64), torch.arange(n) % 4
    own = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    return InMemoryDataModule((x, y), clients=own, **{"batch_size": 8, "seed": 2, **given})


def refusal(module: FederatedModule, data: InMemoryDataModule, rounds: int = 2) -> str:
    """What ends the run, before anything began."""
    begun, before = Begun(), {k: v.clone() for k, v in module.learner.state_dict().items()}
    with pytest.raises(UserError) as caught:
        trainer(rounds, [begun]).fit(module, data)
    assert begun.rounds == 0
    assert all(torch.equal(v, before[k]) for k, v in module.learner.state_dict().items())
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("learner", "left", "says"),
    [
        (Normed, 1, "Expected more than 1 value per channel"),
        (Comparing, 2, "compares at least three"),
        (Spread, 1, "not finite"),
    ],
)
def test_a_batch_that_is_too_small_is_said_before_round_0(
    learner: type[Lit], left: int, says: str, engine: str
) -> None:
    sizes = (16, 24, 16 + left, 24)
    text = refusal(federated(learner(), participation="all", engine=engine), of_sizes(*sizes))
    assert (
        f"client 2 has {16 + left} samples, of which batch_size=8 leaves {left} for the last batch"
        in text
    )
    assert (
        f"(met in round 0), and a step of {learner.__name__} on {left} sample" in text
        and says in text
    )
    assert text.endswith("Nothing was started.")
    other = re.search(r"batch_size=(\d+), with", text)
    assert "drop_last=True" in text and other is not None
    for way_out in ({"drop_last": True}, {"batch_size": int(other[1])}):
        module = federated(learner(), participation="all", engine=engine)
        trainer(1).fit(module, of_sizes(*sizes, **way_out))
        assert bool(module.global_vector.isfinite().all())


@pytest.mark.parametrize("engine", ENGINES[1:3])
@pytest.mark.parametrize(
    ("sizes", "batch_size", "words"),
    [
        ((16, 1, 16), 8, "client 1 has 1 sample in all"),
        ((1, 16, 16), 8, "client 0 has 1 sample in all"),  # the first that is tried
        ((16, 1, 16), None, r"client 1 has 1 sample in all \(batch_size=None\)"),
        ((16, 9, 16), 1, "client 0 has 16 samples, of which batch_size=1 takes 1 at a time"),
        ((9, 16, 16), 8, "client 0 has 9 samples, of which batch_size=8 leaves 1"),
    ],
)
def test_clients_and_batches_of_one_are_told_apart(
    sizes: tuple[int, ...], batch_size: int | None, words: str, engine: str
) -> None:
    data = of_sizes(*sizes, batch_size=batch_size)
    text = refusal(federated(Normed(), participation="all", engine=engine), data)
    assert re.search(words, text) and "more than 1 value" in text
    assert ("drop_last=True" in text) == (9 in sizes and batch_size == 8)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_fails_on_any_copy_does_not_fail_for_its_size(engine: str) -> None:
    with pytest.raises(AttributeError, match="no attribute 'out'") as caught:
        trainer(1).fit(federated(Keeping(), engine=engine), of_sizes(8, 9))
    reason = "A lambda or a closure that refers to the learner"
    assert reason in getattr(caught.value, "__notes__", [reason])[-1]


class Particular(Lit):
    """Fails on whatever a client has whose first feature is 7."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert not bool((batch[0][:, 0] == 7).any()), "another kind of sample"
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_fails_on_one_client_does_not_fail_for_its_size(engine: str) -> None:
    x, y = torch.randn(29, 20, dtype=torch.float64), torch.arange(29) % 4
    x[:9, 0] = 7  # of client 0, whose last batch has one sample
    own = [np.arange(9), np.arange(9, 29)]
    data = InMemoryDataModule((x, y), clients=own, batch_size=4)
    with pytest.raises(AssertionError, match="another kind of sample"):
        trainer(1).fit(federated(Particular(), participation="all", engine=engine), data)


class Unknowing(InMemoryDataModule):
    """Batches that come made, so that nobody knows their sizes."""

    def client_batches(self, *args: Any, **arguments: Any) -> Any:
        return super().client_batches(*args, **arguments)


class Drawing(Lit):
    """Draws from the process's generators, and counts its steps where no buffer holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = [0.0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps[0] += 1
        return super().training_step(batch, batch_idx) * (
            torch.rand(()) + np.random.rand() + 1 / self.steps[0]
        )


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("learner", [Lit, Drawing])
def test_what_can_train_on_one_sample_is_let_be_with_the_same_bits(
    learner: type[Lit], engine: str
) -> None:
    ends = []
    for kind in (InMemoryDataModule, Unknowing):
        data = of_sizes(9, 16, 1, 17)
        data.__class__ = kind
        assert (data.smallest_batch() is None) == (kind is Unknowing)
        torch.manual_seed(4)
        module = federated(learner(), participation="all", engine=engine)
        trainer(2).fit(module, data)
        ends.append((module.global_vector.clone(), torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_batch_that_no_round_meets_is_a_note_and_a_late_one_is_refused_with_its_round() -> None:
    data = of_sizes(*[16] * 19, 17)
    cohort = federated(Normed(), participation=1)
    drawn = [Cohort(data, 1, 1, "uniform", 1, None).participants(t) for t in range(200)]
    first = drawn.index((19,))
    assert first > 1
    module = federated(Normed(), participation=1)
    trainer(first).fit(module, data)
    (note,) = [note for note in module.notes if "batch_size=8 leaves 1" in note]
    assert note.endswith("Client 19 takes part in none of this run's rounds, so it goes on")
    assert f"(met in round {first})" in refusal(cohort, data, first + 1)


@pytest.mark.parametrize("work", [{"local_epochs": 0.5}, {"local_steps": 2}])
def test_a_left_over_batch_that_no_round_reaches_is_none(work: dict[str, Any]) -> None:
    module = federated(Normed(), participation="all", **{"local_epochs": None, **work})
    trainer(1).fit(module, of_sizes(17, 17, 25))
    assert not [note for note in module.notes if "batch_size" in note]
    more = {"local_epochs": None, **{name: 1.5 * value for name, value in work.items()}}
    assert "leaves 1" in refusal(
        federated(Normed(), participation="all", **more), of_sizes(17, 17, 25)
    )


def test_a_learner_that_a_hook_makes_ready_is_given_its_time() -> None:
    class Frozen(Normed):
        def on_train_start(self) -> None:
            self.net[1].eval()

    module = federated(Frozen(), participation="all")
    trainer(1).fit(module, of_sizes(16, 17))
    assert [note for note in module.notes if "The run goes on, as a hook" in note]


def test_clients_that_may_be_skipped_are_not_refused() -> None:
    module = federated(Spread(), participation="all", on_nonfinite="skip")
    trainer(1).fit(module, of_sizes(16, 17))
    assert bool(module.global_vector.isfinite().all())


@pytest.mark.parametrize("epochs", [1, 0.5])
def test_of_a_million_clients_none_is_asked(epochs: float) -> None:
    data: Any = Digits(
        partition=Dirichlet(0.5, replacement=True, samples_per_client=23),
        num_clients=10**6,
        batch_size=11,
    )
    data.setup()
    asked: list[int] = []
    own = data.batches_per_epoch
    data.batches_per_epoch = lambda i: (asked.append(i), own(i))[1]
    data._split.clients.draw = None  # nobody's samples are drawn
    cohort = Cohort(data, 1, 10, "uniform", epochs, None)
    assert cohort.smallest_batch() == ((1, 0) if epochs == 1 else (11, 0))
    assert cohort.smallest_batch([5, 7]) == ((1, 5) if epochs == 1 else (11, 5))
    assert len(asked) <= 2
