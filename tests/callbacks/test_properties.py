"""What the papers prove, on quadratics through the real loop.

It would catch a rule misread twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fl_lightning import callbacks as c
from tests.helpers.federation import network, quadratics
from tests.oracles.problems import Quadratic

M, D = 6, 4


def problem() -> Quadratic:
    """Curvatures between 0.5 and 2: the mean optimum is not the mean of the centres."""
    rng = np.random.default_rng(0)
    rotations = [np.linalg.qr(rng.normal(size=(D, D)))[0] for _ in range(M)]
    curvature = np.stack([q @ np.diag(rng.uniform(0.5, 2.0, D)) @ q.T for q in rotations])
    return Quadratic(curvature, rng.normal(size=(M, D)))


START = np.full(D, 3.0)


def away(callbacks: list[Any], rounds: int, **options: Any) -> float:
    """How far the last w is from the optimum of the mean objective.

    Two of six clients a round, five steps.
    """
    given = problem()
    end = quadratics(
        given, START, callbacks, rounds, participation=2, local_steps=5, lr=0.1, **options
    ).record.w[-1]
    return float(np.abs(end - given.optimum()).max())


@pytest.mark.parametrize(
    "method",
    [
        c.ControlVariates,
        lambda: c.ControlVariates("gradient"),
        lambda: c.DynamicRegularization(1.25),
    ],
)
def test_corrected_methods_reach_the_optimum_under_partial_participation(method: Any) -> None:
    assert away([method()], 400) < 1e-8


def test_fedavg_does_not_reach_it() -> None:
    assert away([], 400) > 1e-2


@pytest.mark.parametrize(
    "method, of_clients, of_server",
    [
        (c.ControlVariates, "ControlVariates.c_i", "ControlVariates.c"),
        (
            lambda: c.DynamicRegularization(0.3),
            "DynamicRegularization.lambda_i",
            "DynamicRegularization.lambda_mean",
        ),
    ],
)
@pytest.mark.parametrize(
    "beside", [lambda: [], lambda: [c.RelaxedInitialization(0.1), c.ClientMomentum(0.5)]]
)
def test_the_servers_state_is_the_mean_of_the_clients_after_every_round(
    method: Any, of_clients: str, of_server: str, beside: Any
) -> None:
    record = network([method(), *beside()], 6, weighting="samples", clip_norm=0.9).record
    for rows, server in zip(record.rows, record.server, strict=True):
        mean = sum(rows[of_clients].values()) / 8
        assert np.abs(mean - server[of_server]).max() < 1e-14


def test_scaffold_with_one_full_step_and_everyone_is_gradient_descent() -> None:
    given, w = problem(), START.copy()
    ours = quadratics(
        given, START, [c.ControlVariates()], 20, participation="all", local_steps=1, lr=0.1
    )
    for _ in range(20):
        w -= 0.1 * np.mean([given.gradient(w, i, None) for i in range(M)], axis=0)
    assert np.abs(ours.record.w[-1] - w).max() < 1e-13


def test_fedals_with_period_one_is_fedavg() -> None:
    assert np.array_equal(
        network([c.PartialAveraging(period=1)], 5).record.w, network([], 5).record.w
    )


def test_fedals_with_one_part_is_fedavg_with_more_local_steps() -> None:
    """Full batches and participation, constant rate, plain SGD.

    Α rounds of τ steps are one of α τ.
    """
    options: dict[str, Any] = {"participation": "all", "lr": 0.1}
    als = quadratics(
        problem(), START, [c.PartialAveraging({"*": 3})], 12, local_steps=2, **options
    ).record
    avg = quadratics(problem(), START, [], 4, local_steps=6, **options).record
    assert np.abs(np.array(als.w[2::3]) - np.array(avg.w)).max() < 1e-13
    assert np.array_equal(als.w[0], START), "w stays between"
    assert np.abs(als.evaluated[0] - START).max() > 0.1, "what is evaluated does not"


@pytest.mark.parametrize(
    "method",
    [
        c.RelaxedInitialization,
        c.ProximalTerm,
        c.ClientMomentum,
        c.SharpnessAwareMinimization,
        c.GlobalSharpnessAwareMinimization,
        c.PartialAveraging,
        c.TopKCompression,
    ],
)
def test_neutral_settings_are_fedavg(method: Any) -> None:
    ours = network([method(**method.neutral)], 5, clip_norm=0.9).record
    assert np.abs(np.array(ours.w) - np.array(network([], 5, clip_norm=0.9).record.w)).max() < 1e-14


def test_fednova_with_equal_work_is_fedavg() -> None:
    ours, fedavg = (
        network(methods, 5, local_epochs=None, local_steps=3)
        for methods in ([c.NormalizedAveraging()], [])
    )
    assert np.abs(np.array(ours.record.w) - np.array(fedavg.record.w)).max() < 1e-14


def test_scaffolds_first_round_is_fedavgs() -> None:
    assert (
        np.abs(network([c.ControlVariates()], 1).record.w[0] - network([], 1).record.w[0]).max()
        < 1e-15
    )


def test_rounds_without_a_learning_rate_move_nothing_and_stay_finite() -> None:
    methods = [
        c.ControlVariates(),
        c.ClientMomentum(0.3),
        c.DynamicRegularization(),
        c.GlobalSharpnessAwareMinimization(),
    ]
    ours = network(methods, 3, lr=0.0).record
    assert np.array_equal(ours.w[-1], ours.w[0])
    assert all(np.isfinite(row).all() for rows in ours.rows[-1].values() for row in rows.values())
    assert (
        not ours.server[-1]["ControlVariates.c"].any()
        and not ours.server[-1]["ClientMomentum.delta"].any()
    )
