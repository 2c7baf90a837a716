"""What a step on a copy meets ends the run before round 0: a learner's own error, or a batch that
is too small for it."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.errors import UserError
from fl_lightning.round.cohort import Cohort
from tests.helpers.learners import Dropping, Lit, Normed, blobs, federated, trainer

ENGINES = ("auto", "stacked")


class Comparing(Lit):
    """Compares samples with each other, and says how many it needs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(batch[0]) > 2, "compares at least three samples"
        return super().training_step(batch, batch_idx)


class Spread(Lit):
    """Its loss is not a number on one sample, and says nothing."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.net(batch[0]).std(0).sum()


def of_sizes(*sizes: int, **given: Any) -> InMemoryDataModule:
    n = sum(sizes)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(n, 20, generator=generator, dtype=torch.float64), torch.arange(n) % 4
    own = np.split(np.arange(n), np.cumsum(sizes)[:-1])
    return InMemoryDataModule((x, y), clients=own, **{"batch_size": 8, "seed": 2, **given})


def refusal(module: FederatedModule, data: InMemoryDataModule, rounds: int = 2) -> str:
    with pytest.raises(UserError) as caught:
        trainer(rounds).fit(module, data)
    assert module.run.loop is None
    return str(caught.value)


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
    assert f"A batch of client 2 has only {left} of its samples (in round 0)" in text
    assert f"a step of {learner.__name__} on so few fails" in text and says in text
    assert "Set drop_last=True or another batch_size" in text
    for way_out in ({"drop_last": True}, {"batch_size": 9}):
        module = federated(learner(), participation="all", engine=engine)
        trainer(1).fit(module, of_sizes(*sizes, **way_out))
        assert bool(module.global_vector.isfinite().all())


@pytest.mark.parametrize("batch_size", [8, None])
def test_a_client_of_one_sample_is_named(batch_size: int | None) -> None:
    data = of_sizes(16, 1, 16, batch_size=batch_size)
    text = refusal(federated(Normed(), participation="all", engine="sequential"), data)
    assert "A batch of client 1 has only 1 of its samples" in text


class Unknowing(InMemoryDataModule):
    def client_batches(self, *args: Any, **arguments: Any) -> Any:
        return super().client_batches(*args, **arguments)


@pytest.mark.parametrize("learner", [Lit, Dropping])
def test_what_can_train_on_one_sample_is_let_be_with_the_same_bits(learner: type[Lit]) -> None:
    ends = []
    for kind in (InMemoryDataModule, Unknowing):
        data = of_sizes(9, 16, 1, 17)
        data.__class__ = kind
        assert (data.smallest_batch() is None) == (kind is Unknowing)
        torch.manual_seed(4)
        module = federated(learner(), participation="all")
        trainer(2).fit(module, data)
        ends.append((module.global_vector.clone(), torch.rand(3)))
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_a_batch_that_no_round_meets_is_let_be_and_a_late_one_refused_with_its_round() -> None:
    data = of_sizes(*[16] * 19, 17)
    cohort = federated(Normed(), participation=1)
    drawn = [Cohort(data, 1, 1, "uniform", 1, None).participants(t) for t in range(200)]
    first = drawn.index((19,))
    assert first > 1
    trainer(first).fit(federated(Normed(), participation=1), data)
    assert f"(in round {first})" in refusal(cohort, data, first + 1)


@pytest.mark.parametrize("work", [{"local_epochs": 0.5}, {"local_steps": 2}])
def test_a_left_over_batch_that_no_round_reaches_is_none(work: dict[str, Any]) -> None:
    module = federated(Normed(), participation="all", **{"local_epochs": None, **work})
    trainer(1).fit(module, of_sizes(17, 17, 25))
    more = {"local_epochs": None, **{name: 1.5 * value for name, value in work.items()}}
    assert "has only 1 of its samples" in refusal(
        federated(Normed(), participation="all", **more), of_sizes(17, 17, 25)
    )


def test_clients_that_may_be_skipped_are_not_refused() -> None:
    module = federated(Spread(), participation="all", on_nonfinite="skip")
    trainer(1).fit(module, of_sizes(16, 17))
    assert bool(module.global_vector.isfinite().all())


class Broken(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[2] = nn.Linear(9, 4)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_that_fails_ends_the_run_before_it_begins(engine: str) -> None:
    module = federated(Broken(), engine=engine)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        trainer(1).fit(module, blobs())
    if sys.version_info >= (3, 11):  # before, errors have no notes
        notes = " ".join(caught.value.__notes__)
        assert "nothing was started" in notes and "(8, 20) float64" in notes and "client" in notes
    assert module.run.loop is None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_learner_that_hooks_make_ready_later_is_given_its_time(engine: str) -> None:
    class Readied(Lit):
        factor: Any = None

        def on_train_epoch_start(self) -> None:
            self.factor = 0.5

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * self.factor

    module = federated(Readied(), engine=engine)
    trainer(1).fit(module, blobs())
    assert bool(torch.isfinite(module.global_vector).all())
