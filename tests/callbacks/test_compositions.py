"""Methods together: their order does not matter, what cannot run together is refused, what is sent
is counted."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.models import ImageClassifier, ResNet20
from tests.helpers.federation import Run, fit, network, quadratics
from tests.oracles.problems import Quadratic

D = 31


def test_order_of_callbacks_does_not_matter() -> None:
    ends = []
    for order in permutations(range(3)):
        adding = [c.ControlVariates(), c.DynamicRegularization(0.2), c.ProximalTerm(0.1)]
        owning = [
            c.RelaxedInitialization(0.1),
            c.SharpnessAwareMinimization(0.05),
            c.ClientMomentum(0.3),
        ]
        methods = [method for j in order for method in (owning[j], adding[-j])]
        ends.append(network(methods, 4, clip_norm=0.9).record.w[-1])
    assert max(np.abs(end - ends[0]).max() for end in ends) < 1e-13


@pytest.mark.parametrize(
    "a, b",
    [
        (c.SharpnessAwareMinimization, c.GlobalSharpnessAwareMinimization),
        (c.TopKCompression, c.NormalizedAveraging),
        (c.PartialAveraging, c.GlobalSharpnessAwareMinimization),
        (c.PartialAveraging, c.NormalizedAveraging),
        (c.PartialAveraging, c.TopKCompression),
        (lambda: c.RelaxedInitialization(average="updates"), c.TopKCompression),
        (lambda: c.RelaxedInitialization(offset="mean"), c.PartialAveraging),
        (lambda: c.RelaxedInitialization(offset="centred"), c.PartialAveraging),
        (c.ClientMomentum, c.ClientMomentum),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_what_cannot_run_together_is_refused_with_both_names_and_the_reason(
    a: Any, b: Any, swapped: bool
) -> None:
    pair = [a(), b()][:: -1 if swapped else 1]
    with pytest.raises(UserError) as refused:
        network(pair, 1)
    assert all(type(callback).__name__ in str(refused.value) for callback in pair)
    assert (
        "both decide" in str(refused.value)
        or "cannot run together" in str(refused.value)
        or "once" in str(refused)
    )


def test_what_loggers_let_clients_keep_is_not_counted_their_optimizer_is() -> None:
    last = network(
        [c.DivergenceLogger(), c.CommunicationLogger()], 2, momentum=0.5, keep_optimizer_state=True
    )
    assert last.record.metrics[-1]["cost/kept_vectors"] == 1
    parts = network(
        [c.PartialAveraging(periods={"net.0.*": 5}), c.CommunicationLogger()], 2
    ).record.metrics[-1]
    # copy and origin; since when, and how far
    assert parts["cost/kept_vectors"] == pytest.approx((2 * 16 + 2) / D)


def test_largest_entries_are_sent_ties_by_lowest_index_and_the_rest_is_remembered() -> None:
    """One client whose step leads from anywhere to b."""
    b = np.array([1.0, -2.0, 1.0, 0.0, 0.5, -1.0])
    problem = Quadratic(np.eye(6)[None], b[None])
    record = quadratics(
        problem,
        np.zeros(6),
        [c.TopKCompression(0.5)],
        2,
        participation="all",
        lr=1.0,
        local_steps=1,
    )
    assert record.record.w[0].tolist() == [1.0, -2.0, 1.0, 0.0, 0.0, 0.0]
    assert record.record.rows[0]["TopKCompression.error"][0].tolist() == [
        0.0,
        0.0,
        0.0,
        0.0,
        0.5,
        -1.0,
    ]
    assert record.record.w[1].tolist() == [1.0, -2.0, 1.0, 0.0, 1.0, -2.0]


def resnet(callbacks: list[Any], rounds: int) -> Run:
    x, y = torch.zeros(2, 3, 8, 8), torch.tensor([0, 1])
    return fit(
        ImageClassifier(ResNet20(10), 10),
        InMemoryDataModule((x, y), clients=[[0], [1]], batch_size=None),
        callbacks,
        rounds,
        participation="all",
        local_steps=1,
        client_optimizer=lambda p: torch.optim.SGD(p, 0.0),
    )


@pytest.mark.parametrize("alpha", [1, 5, 10])
def test_sent_parameters_of_fedals_on_resnet20(alpha: int) -> None:
    """FedALS's Table 2, per client and round.

    The head's 650 always, the extractor's 269,072 every α-th round.
    """
    rounds, method = 10, c.PartialAveraging(period=alpha)
    last = resnet([method, c.CommunicationLogger()], rounds).record.metrics[-1]
    each = 650 + 269_072 / alpha
    assert last["communication/up_parameters"] == pytest.approx(2 * rounds * each)
    assert last["communication/down_parameters"] == pytest.approx(2 * rounds * each)
    published = {1: 2.344e9, 5: 0.473e9, 10: 0.239e9}[alpha]
    measured = 8690 * last["communication/up_parameters"] / (2 * rounds)
    assert measured == pytest.approx(published, rel=3e-3)
