"""Who takes part, and how many steps each takes: functions of seed and round."""

from __future__ import annotations

from typing import Any

import pytest

from fl_lightning.round.cohort import Cohort
from tests.helpers.learners import blobs, federated, trainer


def test_participants_and_steps_are_known_before_the_round() -> None:
    module, data = federated(participation=0.25, local_epochs=1.1), blobs(clients=10, per_client=80)
    trainer(1).fit(module, data)
    assert [len(module.participants(t)) for t in range(5)] == [3] * 5  # 2.5, half up
    assert len({module.participants(t) for t in range(5)}) > 1
    assert all(list(p) == sorted(set(p)) for p in map(module.participants, range(5)))
    assert module.steps(0, 0) == 11  # 1.1 epochs of 10 batches, exactly


def test_bernoulli_sampling_varies_the_number_and_never_takes_nobody() -> None:
    module = federated(participation=0.1, sampling="bernoulli")
    trainer(1).fit(module, blobs())
    sizes = [len(module.participants(t)) for t in range(300)]
    assert min(sizes) == 1 and max(sizes) >= 3 and 0.9 < sum(sizes) / 300 < 1.7


def cohort(batches: int = 7, clients: int = 10, **given: Any) -> Cohort:
    class Data:
        num_clients = clients

        def batches_per_epoch(self, client: int) -> int:
            return batches + client

        def client_sizes(self) -> list[int]:
            return [10 * i for i in range(clients)]

    facts = {
        "participation": 3,
        "sampling": "uniform",
        "local_epochs": None,
        "local_steps": None,
        **given,
    }
    return Cohort(Data(), 1, **facts)


@pytest.mark.parametrize(
    ("epochs", "batches", "steps"),
    [
        (1.5, 7, 11),
        (1.5, 8, 12),
        (0.1, 3, 1),
        (2, 7, 14),
        (0.3, 10, 3),
        (1.1, 10, 11),
        (2.001, 10, 21),
        (None, 7, 35),
    ],
)
def test_a_started_share_of_an_epoch_is_rounded_up_in_exact_decimals(
    epochs: Any, batches: int, steps: int
) -> None:
    assert cohort(batches, local_epochs=epochs).steps(0) == steps


@pytest.mark.parametrize(("participation", "mean"), [(3, 3.0), (0.36, 3.6)])
def test_bernoulli_sampling_takes_each_client_with_its_probability(
    participation: Any, mean: float
) -> None:
    """A fraction is taken as it is, not rounded to whole clients: 3.6 of 10. Four standard errors
    of 4,000 rounds."""
    drawn = cohort(participation=participation, sampling="bernoulli")
    assert (
        abs(sum(len(drawn.participants(t)) for t in range(4000)) / 4000 - mean)
        < 4 * (mean * 0.7 / 4000) ** 0.5
    )


def test_poisson_sampling_may_take_nobody_and_bernoulli_takes_somebody_in_such_a_round() -> None:
    poisson, bernoulli = (
        cohort(participation=0.1, sampling=kind) for kind in ("poisson", "bernoulli")
    )
    sizes = [len(poisson.participants(t)) for t in range(200)]
    assert min(sizes) == 0 < max(sizes)
    empty = sizes.index(0)
    assert len(bernoulli.participants(empty)) == 1
    assert poisson.tried(empty) == (0,), "the first client's steps are tried where none was sampled"
    taken = sizes.index(max(sizes))
    assert poisson.tried(taken) == poisson.participants(taken)


@pytest.mark.parametrize("kind", ["uniform", "poisson", "bernoulli"])
def test_as_many_are_chosen_as_would_have_been_sampled(kind: str) -> None:
    drawn = cohort(participation=0.4, sampling=kind)
    assert [drawn.number(t) for t in range(50)] == [len(drawn.participants(t)) for t in range(50)]
