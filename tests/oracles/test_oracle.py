"""The oracle against what is known without it: finite differences, closed forms, and theorems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.oracles.cases import REAL, D, M, constant, learning, quadratics, same, sampled
from tests.oracles.oracle import Config, Schedule, local_steps, run


def test_gradient_agrees_with_finite_differences() -> None:
    net, w, schedule = learning()
    x, y = schedule.data[4]
    gradient = net.loss_and_gradient(w, x, y)[1]
    h = 1e-6 * np.eye(net.size)
    differences = [
        net.loss_and_gradient(w + e, x, y)[0] - net.loss_and_gradient(w - e, x, y)[0] for e in h
    ]
    assert np.allclose(np.array(differences) / 2e-6, gradient, atol=1e-9)


def test_steps_are_counted_in_exact_decimals() -> None:
    assert local_steps(100, 10, 1.1) == 11
    assert local_steps(101, 10, 2) == 22
    assert local_steps(3, 10, 0.1) == 1


@pytest.mark.parametrize(
    "neutral",
    [
        {"beta": 0.0},
        {"mu": 0.0},
        {"alpha": 1.0},
        {"sam": 0.0},
        {"parts": [(np.arange(31) < 9, 1)]},
        {"topk": 1.0},
        {"clip_norm": 1e9},
        {"server": ("sgdm", 1.0, 0.0)},
    ],
)
def test_neutral_settings_are_fedavg(neutral: dict[str, Any]) -> None:
    net, w, schedule = learning()
    assert same(run(net, REAL, 7, w, schedule), run(net, replace(REAL, **neutral), 7, w, schedule))


def test_fedsmoo_with_radius_zero_is_feddyn_and_its_first_step_is_fedsam() -> None:
    net, w, schedule = learning()
    dyn = replace(REAL, feddyn=0.1)
    assert same(run(net, dyn, 7, w, schedule), run(net, replace(dyn, fedsmoo=0.0), 7, w, schedule))
    one = Schedule([{i: batches[:1] for i, batches in schedule.rounds[0].items()}], schedule.sizes)
    smoo = run(net, replace(dyn, fedsmoo=0.1), 1, w, one)
    assert same(run(net, replace(dyn, sam=0.1), 1, w, one), smoo)
    assert not same(run(net, dyn, 1, w, one), smoo, 1e-6)
    assert np.isclose(
        np.linalg.norm(run(net, replace(dyn, fedsmoo=0.1), 7, w, schedule)[-1].server["s"]), 0.1
    )


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
    "extra",
    [
        {},
        {"beta": 0.1},
        {"beta": 0.1, "aggregate": "updates"},
        {"clip_norm": 0.2, "momentum": 0.9},
        {"weighting": "samples", "lr_decay": lambda t: float(t != 2)},
        {"alpha": 0.3, "sam": 0.1},
        {"parts": [(np.arange(31) < 9, 2), (np.arange(31) > 25, None)], "beta": 0.1},
    ],
)
@pytest.mark.parametrize("estimate", ["displacement", "gradient"])
def test_server_variables_are_the_means_of_the_clients(
    extra: dict[str, Any], estimate: str
) -> None:
    net, w, schedule = learning()
    for after in run(net, replace(REAL, scaffold=estimate, feddyn=0.1, **extra), 7, w, schedule):
        assert np.allclose(after.server["c"], sum(after.clients["c_i"].values()) / M, atol=1e-13)
        assert np.allclose(
            after.server["lambda"], sum(after.clients["lambda_i"].values()) / M, atol=1e-13
        )
        assert np.isfinite(after.w).all() and np.abs(after.server["c"]).max() > 0


@pytest.mark.parametrize("estimate", ["displacement", "gradient"])
def test_scaffold_with_one_full_step_is_gradient_descent(estimate: str) -> None:
    problem, w = quadratics(), np.ones(D)
    for after in run(problem, Config(lr=0.2, scaffold=estimate), 8, w, sampled(8, M, [1] * M)):
        w = w - 0.2 * np.mean([problem.gradient(w, i, None) for i in range(M)], axis=0)
        assert np.allclose(after.w, w, atol=1e-14)


def test_scaffold_estimates_the_mean_gradient_from_the_real_start_and_count() -> None:
    slopes = [0.5, -1.0, 2.0, 0.3, 1.0, -2.0]
    cfg = Config(lr=0.1, lr_decay=0.9, scaffold="displacement", beta=0.3)
    history = run(constant(slopes), cfg, 9, np.ones(2), sampled(9, 2, [5, 3, 8, 4, 6, 5]))
    for i, row in history[-1].clients["c_i"].items():
        assert np.allclose(row, slopes[i], atol=1e-13)


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


def test_fedprox_solves_its_proximal_problem() -> None:
    problem, w0 = quadratics(m=1), np.full(D, 2.0)
    after = run(problem, Config(lr=0.2, mu=0.7), 1, w0, sampled(1, 1, [400]))[0]
    pulled = problem.curvature[0] + 0.7 * np.eye(D)
    assert np.allclose(
        after.w, np.linalg.solve(pulled, problem.curvature[0] @ problem.centre[0] + 0.7 * w0)
    )


def test_fedcm_with_one_full_step_is_gradient_descent_with_momentum() -> None:
    problem, w, direction = quadratics(), np.ones(D), np.zeros(D)
    for after in run(problem, Config(lr=0.2, alpha=0.1), 8, w, sampled(8, M, [1] * M)):
        gradient = np.mean([problem.gradient(w, i, None) for i in range(M)], axis=0)
        direction = 0.1 * gradient + 0.9 * direction
        w = w - 0.2 * direction
        assert np.allclose(after.w, w) and np.allclose(after.server["Delta"], direction)


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


def test_relaxed_initialization_cancels_when_all_take_part() -> None:
    problem, schedule = constant([0.5, -1.0, 2.0]), sampled(6, 3, [2, 3, 4])
    relaxed = run(problem, Config(beta=0.4), 6, np.zeros(1), schedule)
    assert same(run(problem, Config(), 6, np.zeros(1), schedule), relaxed)
    assert relaxed[-1].start[0] != pytest.approx(relaxed[-2].w)


def test_fednova_removes_the_bias_of_unequal_work() -> None:
    problem, steps = quadratics(), [2, 20, 4, 8, 2, 10]
    schedule = sampled(600, M, steps)
    nova, plain = (
        run(problem, Config(lr=0.002, fednova=use), 600, np.ones(D), schedule)[-1].w
        for use in (True, False)
    )
    error, bias = np.abs(nova - problem.optimum()).max(), np.abs(plain - problem.optimum()).max()
    assert error < 0.01 and bias > 20 * error
    equal = sampled(5, 3, [4] * M)
    for momentum in (0.0, 0.9):
        cfg = Config(momentum=momentum)
        assert same(
            run(problem, cfg, 5, np.ones(D), equal),
            run(problem, replace(cfg, fednova=True), 5, np.ones(D), equal),
        )


def test_fednova_with_momentum_divides_by_the_weight_of_each_gradient() -> None:
    # With a constant gradient g, a client moves -lr g ||a_i||_1: all normalised updates are equal.
    cfg = Config(lr=0.1, momentum=0.9, fednova=True)
    after = run(constant([1.0, 1.0]), cfg, 1, np.zeros(1), sampled(1, 2, [1, 2]))[0]
    assert after.w[0] == pytest.approx(-0.1 * (1 + 2.9) / 2)
    assert after.x[1][0] == pytest.approx(-0.1 * 2.9)


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


def test_momentum_is_fresh_or_kept() -> None:
    for keep, expected in ((False, -2.0), (True, -2.9)):
        cfg = Config(lr=1.0, momentum=0.9, keep_momentum=keep)
        assert run(constant([1.0]), cfg, 2, np.zeros(1), sampled(2, 1, [1]))[-1].w[
            0
        ] == pytest.approx(expected)


def test_weights_are_of_the_participants() -> None:
    rounds = [{0: [None], 2: [None]}]
    cfg = Config(lr=1.0, weighting="samples", scaffold="displacement")
    after = run(constant([1.0, 9.0, 5.0]), cfg, 1, np.zeros(1), Schedule(rounds, [3, 100, 1]))[0]
    assert after.w[0] == pytest.approx(-2.0)
    assert after.server["c"][0] == pytest.approx(2.0)  # (2 / 3) of the uniform mean 3


def test_a_round_without_learning_rate_or_without_clients_moves_nothing() -> None:
    net, w, schedule = learning()
    schedule = replace(schedule, rounds=[*schedule.rounds[:3], {}, *schedule.rounds[4:]])
    cfg = replace(
        REAL, lr_decay=lambda t: float(t != 2), scaffold="displacement", alpha=0.3, feddyn=0.1
    )
    history = run(net, replace(cfg, feddyn=None), 7, w, schedule)
    assert np.array_equal(history[2].w, history[1].w) and np.array_equal(history[3].w, history[1].w)
    assert np.array_equal(history[2].server["c"], history[1].server["c"])
    assert not history[2].server["Delta"].any()
    assert all(np.isfinite(after.w).all() for after in run(net, cfg, 7, w, schedule))


def test_divergences() -> None:
    net, w, schedule = learning()
    last = {i: w for i in range(M)}
    for after in run(net, replace(REAL, beta=0.1), 7, w, schedule):
        last |= after.x
        everyone = np.mean([np.sum((row - after.w) ** 2) for row in last.values()])
        assert after.metrics["divergence/all"] == pytest.approx(everyone)
        spread = np.mean([np.sum((row - after.w) ** 2) for row in after.x.values()])
        assert after.metrics["divergence/participants"] == pytest.approx(spread)
        assert after.metrics["divergence/update"] == pytest.approx(np.sum((after.w - w) ** 2))
        w = after.w


def test_clipping_begins_at_the_norm() -> None:
    for clip, expected in ((0.9, -0.9), (1.0, -1.0), (1.1, -1.0)):
        after = run(
            constant([1.0]), Config(lr=1.0, clip_norm=clip), 1, np.zeros(1), sampled(1, 1, [1])
        )[0]
        assert after.w[0] == pytest.approx(expected) and after.clipped_steps == (clip < 1)


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


def test_scaffold_gradient_is_of_the_whole_objective_with_weight_decay() -> None:
    net, w, schedule = learning(1)
    after = run(net, replace(REAL, scaffold="gradient"), 1, w, schedule)[0]
    for i, row in after.clients["c_i"].items():
        assert np.allclose(row, net.gradient(w, i, schedule.data[i]) + 0.01 * w)


def test_server_momentum_and_decay_by_hand() -> None:
    cfg = Config(lr=1.0, server=("sgdm", 0.5, 0.9), server_lr_decay=0.1)
    history = run(constant([1.0]), cfg, 2, np.zeros(1), sampled(2, 1, [1]))
    assert [after.w[0] for after in history] == pytest.approx([-0.5, -0.5 - 0.05 * 1.9])
