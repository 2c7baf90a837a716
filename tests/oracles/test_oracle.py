"""The oracle against what is known without it: finite differences, closed forms, and theorems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.oracles.cases import FIRST, D, M, constant, learning, quadratics, sampled
from tests.oracles.oracle import Config, Schedule, run


def test_gradient_agrees_with_finite_differences() -> None:
    net, w, schedule = learning()
    x, y = schedule.data[4]
    gradient = net.loss_and_gradient(w, x, y)[1]
    h = 1e-6 * np.eye(net.size)
    differences = [
        net.loss_and_gradient(w + e, x, y)[0] - net.loss_and_gradient(w - e, x, y)[0] for e in h
    ]
    assert np.allclose(np.array(differences) / 2e-6, gradient, atol=1e-9)


@pytest.mark.parametrize(
    "method", [{"scaffold": "displacement"}, {"scaffold": "gradient"}, {"feddyn": 1.0}]
)
def test_corrected_methods_reach_the_optimum_under_partial_participation(
    method: dict[str, Any],
) -> None:
    problem, w0 = quadratics(), np.full(D, 3.0)
    schedule = sampled(1000, 2, [5, 3, 8, 4, 6, 5])
    end = run(problem, Config(lr=0.05, **method), 1000, w0, schedule)[-1]
    assert np.abs(end.w - problem.optimum()).max() < 1e-8
    fedavg = run(problem, Config(lr=0.05), 1000, w0, schedule)[-1]
    assert np.abs(fedavg.w - problem.optimum()).max() > 1e-2


@pytest.mark.parametrize(
    ("rule", "m", "v"),
    [
        ("adam", 0.2, 0.99 * 0.01 + 0.01 * 4),
        ("yogi", 0.2, 0.01 + 0.01 * 4),
        ("adagrad", 0.2, 0.01 + 4),
    ],
)
def test_adaptive_servers_by_hand(rule: str, m: float, v: float) -> None:
    cfg = Config(lr=1.0, server=(rule, 0.5, 0.9, 0.99, 0.1))
    after = run(constant([-2.0]), cfg, 1, np.zeros(1), sampled(1, 1, [1]))[0]
    assert np.allclose([after.server["m"][0], after.server["v"][0]], [m, v])
    assert np.isclose(after.w[0], 0.5 * m / (np.sqrt(v) + 0.1))


def test_relaxed_initialization_has_the_speed_that_theory_gives() -> None:
    m, n, beta, rounds = 50, 5, 0.05, 400
    schedule = sampled(rounds, n, [1] * m)
    moved = {
        rule: run(
            constant([-1.0] * m), Config(beta=beta, aggregate=rule), rounds, np.zeros(1), schedule
        )
        for rule in ("models", "updates")
    }
    speed = (moved["models"][-1].w[0] - moved["models"][rounds // 4 - 1].w[0]) / (
        0.1 * 0.75 * rounds
    )
    assert speed == pytest.approx(1 / (1 - beta * 0.9 / 0.1), rel=0.05)
    assert moved["updates"][-1].w[0] == pytest.approx(0.1 * rounds)


def test_fednova_removes_the_bias_of_unequal_work() -> None:
    problem, steps = quadratics(), [2, 20, 4, 8, 2, 10]
    schedule = sampled(600, M, steps)
    nova, plain = (
        run(problem, Config(lr=0.002, fednova=use), 600, np.ones(D), schedule)[-1].w
        for use in (True, False)
    )
    error, bias = np.abs(nova - problem.optimum()).max(), np.abs(plain - problem.optimum()).max()
    assert error < 0.01 and bias > 20 * error


def test_topk_loses_nothing_and_breaks_ties_by_index() -> None:
    history = run(constant([1.0]), Config(lr=1.0, topk=0.3), 5, np.zeros(40), sampled(5, 1, [1]))
    assert np.array_equal(history[0].w, [-1.0] * 12 + [0.0] * 28)
    for t, after in enumerate(history):
        assert after.up == {0: 12} and after.down == {0: 40}
        assert np.allclose(after.w + after.clients["e_i"][0], -(t + 1.0))
    uneven = np.tile([1.0, 2.0], 200)
    largest = run(
        constant([uneven]), Config(lr=1.0, topk=0.3), 1, np.zeros(400), sampled(1, 1, [1])
    )[0]
    assert np.array_equal(np.flatnonzero(largest.w), np.arange(1, 240, 2))


def test_clipping_acts_on_the_corrected_gradient_before_weight_decay() -> None:
    cfg = Config(lr=1.0, clip_norm=0.5, weight_decay=0.1, mu=1.0)
    after = run(constant([3.0]), cfg, 1, np.full(4, 2.0), sampled(1, 1, [2]))[0]
    first = 2 - 0.25 - 0.2  # the norm of four equal numbers is twice one of them
    second = 3.0 + first - 2.0
    assert after.clipped_steps == 2 and np.allclose(
        after.w, first - 0.25 * np.sign(second) - 0.1 * first
    )


def test_fedsmoo_by_hand() -> None:
    # One number, a constant gradient 1 and radius 2, so that e is 2 or -2 with the sign of q = 1 -
    # mu_i - s.
    rounds = [{0: [None] * 2}, {0: [None]}, {0: [None]}]  # e: 2, -2; -2; 2
    history = run(constant([1.0]), Config(fedsmoo=2.0), 3, np.zeros(1), Schedule(rounds, [1]))
    assert [after.clients["mu_i"][0][0] for after in history] == [0.0, -4.0, 0.0]
    assert [after.server["s"][0] for after in history] == [2.0, -2.0, -2.0]


def test_feddyn_and_fedprox_pull_to_the_server_model_under_relaxed_initialization() -> None:
    rounds = [{0: [None]}, {1: [None]}, {0: [None]}]
    methods: list[dict[str, Any]] = [{"feddyn": 0.5}, {"mu": 0.5}]
    for method in methods:
        cfg = Config(lr=1.0, beta=0.1, **method)
        first, second, third = run(
            constant([1.0, 2.0]), cfg, 3, np.zeros(1), Schedule(rounds, [1, 1])
        )
        start = second.w + 0.1 * (second.w - first.x[0])
        assert abs(second.w[0] - first.x[0][0]) > 0.5 and third.start[0] == pytest.approx(start)
        dual = -0.5 * first.x[0] if "feddyn" in method else 0.0
        assert third.x[0] == pytest.approx(start - (1.0 - dual + 0.5 * (start - second.w)))
        if "feddyn" in method:
            assert third.clients["lambda_i"][0] == pytest.approx(
                dual - 0.5 * (third.x[0] - second.w)
            )
            assert third.w == pytest.approx(third.x[0] - third.server["lambda"] / 0.5)


def test_parts_keep_only_copies_written_since_their_last_average() -> None:
    # Clients 0 and 1 move by -1 and -2 a round; the first half is averaged at the end of rounds 1
    # and 3.
    rounds = [{0: [None]}, {1: [None]}, {0: [None]}, {0: [None], 1: [None]}]
    cfg = Config(lr=1.0, parts=[(FIRST, 2)])
    history = run(constant([1.0, 2.0]), cfg, 4, np.zeros(D), Schedule(rounds, [3, 1]))
    # Round 0 never reaches the server, round 1 does; round 2 begins at the server's -2, round 3 at
    # 0's own -3.
    assert [after.w[0] for after in history] == [0.0, -2.0, -2.0, -4.0]
    assert [after.w[3] for after in history] == [-1.0, -3.0, -4.0, -5.5]
    assert [after.evaluated[0] for after in history] == [-1.0, -2.0, -3.0, -4.0]
    assert [after.start[min(after.start)][0] for after in history] == [0.0, 0.0, -2.0, -3.0]
    assert [after.down for after in history] == [{0: 4}, {1: 4}, {0: 4}, {0: 2, 1: 4}]
    assert [after.up for after in history] == [{0: 2}, {1: 4}, {0: 2}, {0: 4, 1: 4}]
