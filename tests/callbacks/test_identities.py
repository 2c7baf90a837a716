"""Where methods are one another: to the bit where nothing is computed otherwise, else to 1e-12.

Partial participation, clients of unequal size, decaying rate, weight decay, clipping.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.schedules import Steps
from fl_lightning.systems import Constant, Devices, SystemHeterogeneity, VirtualClock
from tests.engines.test_every_method import config
from tests.helpers.federation import Run, network, quadratics
from tests.oracles.cases import quadratics as quadratic_problem
from tests.oracles.oracle import TwoLayer
from tests.oracles.problems import Vector

ROUNDS = 10
GIVEN: dict[str, Any] = {"lr_decay": 0.9, "clip_norm": 0.9}


def run(*methods: Any, rounds: int = ROUNDS, **options: Any) -> Run:
    return network(list(methods), rounds, **{**GIVEN, **options})


def same(ours: Run, theirs: Run, tolerance: float = 0.0, evaluated: bool = True) -> None:
    for t in range(len(theirs.record.w)):
        assert np.abs(ours.record.w[t] - theirs.record.w[t]).max() <= tolerance, f"w, round {t}"
        away = np.abs(ours.record.evaluated[t] - theirs.record.evaluated[t]).max()
        assert not evaluated or away <= tolerance, f"evaluated, round {t}"


def gradients(of: Run) -> list[float]:
    return [metrics["cost/gradients"] for metrics in of.record.metrics]


ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "concurrent": {"workers": 2},
    "stacked": {"clients_at_once": 2},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_fedlesam_costs_one_gradient_a_step(engine: str) -> None:
    options = {"engine": engine, **ENGINES[engine]}
    fedavg, lesam = run(**options), run(c.LocallyEstimatedPerturbation(0.2), **options)
    steps = [sum(map(len, table.values())) for table in fedavg.schedule.rounds]
    assert gradients(lesam) == gradients(fedavg) == steps
    sam = run(c.SharpnessAwareMinimization(0.2), rounds=2, **options)
    assert gradients(sam) == [2 * k for k in steps[:2]]
    assert (lesam.record.w[0] == fedavg.record.w[0]).all(), "in round 0 nobody has an older model"
    assert (lesam.record.w[-1] != fedavg.record.w[-1]).all()


def test_a_client_receives_its_own_previous_model_or_everybody_the_last() -> None:
    """With everybody there the two are one, also if clients are given another model than w."""
    full = {"participation": "all"}
    for beside in ([], [c.LookaheadMomentum(0.85)]):
        received = run(*beside, c.LocallyEstimatedPerturbation(0.2), **full)
        last = run(*beside, c.LocallyEstimatedPerturbation(0.2, "last"), **full)
        same(received, last)
    apart = run(c.LocallyEstimatedPerturbation(0.2, "last"))
    assert (run(c.LocallyEstimatedPerturbation(0.2)).record.w[-1] != apart.record.w[-1]).any()


@pytest.mark.parametrize("estimate", ["displacement", "gradient"])
def test_at_rate_0_scaffold_learns_nothing_of_its_clients(estimate: Any) -> None:
    rates = {"participation": "all", "lr_decay": Steps({0: 1.0, 2: 0.0})}
    two, four = (run(c.ControlVariates(estimate), rounds=t, **rates).record for t in (2, 4))
    kept = [of.rows[-1]["ControlVariates.c_i"] for of in (two, four)]
    assert all((kept[1][client] == row).all() for client, row in kept[0].items())
    assert (kept[0][0] != 0).any()


def test_fedlesam_s_and_d_are_compositions() -> None:
    for name, beside in (("s", c.ControlVariates()), ("d", c.DynamicRegularization(0.1))):
        packaged, options = config(f"method/fedlesam_{name}")
        given = {key: value for key, value in options.items() if value is not None}
        same(run(*packaged, **given), run(beside, c.LocallyEstimatedPerturbation(0.1)), 1e-12)


def test_fedspeed_as_its_authors_code_has_it_is_feddyn_and_fedsam() -> None:
    ours = run(c.MixedAscent(0.1, 1.0, 0.05))
    theirs = run(c.DynamicRegularization(0.1), c.SharpnessAwareMinimization(0.05))
    same(ours, theirs, 1e-12)
    for t, rows in enumerate(theirs.record.rows):
        for i, row in rows["DynamicRegularization.lambda_i"].items():
            assert np.abs(ours.record.rows[t]["MixedAscent.dual"][i] - row).max() <= 1e-12
    assert gradients(ours) == gradients(theirs)


def test_fedspeed_as_printed_is_the_same_where_everybody_takes_part() -> None:
    full, printed = {"participation": "all"}, {"aggregate": "participants"}
    ours, code = (run(c.MixedAscent(0.1, 0.75, **kind), **full) for kind in (printed, {}))
    same(ours, code, 1e-12)
    apart = np.abs(
        run(c.MixedAscent(0.1, **printed)).record.w[0] - run(c.MixedAscent()).record.w[0]
    )
    assert apart.max() > 1e-3, "in round 0 twice the mean, or 1 + n/m times"


def test_fedspeed_takes_two_gradients_for_every_alpha_and_radius() -> None:
    steps = gradients(run(rounds=1))
    for alpha, radius in ((0.0, 0.1), (1.0, 0.0), (0.5, 0.1)):
        assert gradients(run(c.MixedAscent(0.1, alpha, radius), rounds=1)) == [2 * steps[0]]


def test_scaffnew_with_probability_one_is_gradient_descent_on_the_mean() -> None:
    """K = 1 in every round, and the control variates add up to 0."""
    problem, w = quadratic_problem(), np.ones(4)
    ours = quadratics(
        problem, w, [c.RandomSkips(1.0)], 8, lr=0.2, lr_decay=0.9, participation="all"
    )
    m = len(problem.centre)
    for t in range(8):
        w = w - 0.2 * 0.9**t * np.mean([problem.gradient(w, i, None) for i in range(m)], axis=0)
        assert np.abs(ours.record.w[t] - w).max() < 1e-12
        h = ours.record.rows[t]["RandomSkips.h"]
        assert np.abs(sum(h.values())).max() < 1e-12 and len(h) == m
    assert max(np.abs(row).max() for row in h.values()) > 0.1


def test_scaffnew_reaches_the_optimum_and_fedavg_does_not() -> None:
    problem = quadratic_problem()
    methods, options = [c.RandomSkips(0.25)], {"lr": 0.3, "participation": "all"}
    ours = quadratics(problem, np.ones(4), methods, 120, **options)
    fedavg = quadratics(problem, np.ones(4), [], 60, local_steps=4, **options)
    optimum = problem.optimum()
    assert np.abs(ours.record.w[-1] - optimum).max() < 1e-6
    assert np.abs(fedavg.record.w[-1] - optimum).max() > 1e-3


@pytest.mark.parametrize(
    "options, says",
    [
        ({"participation": 3}, "3 of 8.*participation='all'"),
        ({"sampling": "poisson"}, "sampling='poisson'"),
        ({"weighting": "samples"}, "weighting='uniform'"),
        ({"clip_norm": 10.0}, "clip_norm=None"),
        ({"momentum": 0.9}, "without momentum"),
        ({"server_optimizer": lambda w: torch.optim.SGD(w, 0.5)}, "rate 1"),
        ({"server_optimizer": lambda w: torch.optim.SGD(w, 1.0, momentum=0.5)}, "rate 1"),
        ({"server_lr_decay": 0.9}, "rate 1"),
        ({"on_nonfinite": "skip"}, "every client to finish"),
        ({"beside": SystemHeterogeneity(min_work=0.5)}, "SystemHeterogeneity cannot run together"),
        ({"beside": VirtualClock(Devices(Constant(1.0)), deadline=9.0)}, "no deadline"),
        ({"beside": c.QuantizedUpdate()}, "QuantizedUpdate cannot run together.*the clients' mean"),
        ({"beside": c.QuantizedBroadcast()}, "QuantizedBroadcast cannot run together"),
        ({"beside": c.ByzantineClients("sign_flip", 0.2)}, "ByzantineClients cannot run together"),
        ({"beside": c.ExtrapolatedStep()}, "ExtrapolatedStep cannot run together"),
        ({"beside": c.DynamicRegularization()}, "DynamicRegularization cannot run together"),
        ({"beside": c.MixedAscent()}, "MixedAscent cannot run together"),
        ({"beside": c.AdamDirection()}, "AdamDirection cannot run together.*times the rate"),
        ({"beside": c.GlobalDirection(0.4, "mix")}, "GlobalDirection cannot run together"),
    ],
)
def test_scaffnew_is_refused_where_its_rule_is_not_defined(
    options: dict[str, Any], says: str
) -> None:
    given = {"participation": "all", "clip_norm": None, **options}
    beside = [given.pop("beside")] if "beside" in given else []
    with pytest.raises(UserError, match=f"RandomSkips.*{says}"):
        run(c.RandomSkips(), *beside, rounds=1, **given)


def test_fedexp_of_one_client_is_fedavg() -> None:
    """n = 1: the ratio is a half, so the rate is 1, and w is FedAvg's to the bit."""
    one = {"participation": 1}
    ours, fedavg = run(c.ExtrapolatedStep(1e-3), **one), run(**one)
    same(ours, fedavg, evaluated=False)
    w = [ours.start, *ours.record.w]
    means = [w[1], *((new + old) / 2 for old, new in pairwise(w[1:]))]
    assert all((a == b).all() for a, b in zip(ours.record.evaluated, means, strict=True))
    same(run(c.ExtrapolatedStep(float("inf"), average=False)), run())


def test_fedexp_goes_further_where_updates_differ() -> None:
    rates = [metrics["fedexp/rate"] for metrics in run(c.ExtrapolatedStep(1e-3)).record.metrics]
    assert min(rates) >= 1 and max(rates) > 1.1


@pytest.mark.parametrize(
    "beside, options, says",
    [
        ([], {"server_optimizer": lambda w: torch.optim.SGD(w, 1.0, momentum=0.9)}, "momentum"),
        ([], {"server_optimizer": lambda w: torch.optim.SGD(w, 1.0, weight_decay=0.1)}, "decay"),
        ([], {"server_optimizer": lambda w: torch.optim.Adam(w, 0.1)}, "given is Adam"),
        ([c.PartialAveraging({"net.0.*": 2})], {}, "PartialAveraging cannot run together"),
        ([c.RobustAggregation("median")], {}, "both decide how updates are combined"),
    ],
)
def test_fedexp_is_refused_where_its_rule_is_not_defined(
    beside: Any, options: Any, says: str
) -> None:
    for average in (True, False):
        with pytest.raises(UserError, match=f"ExtrapolatedStep.*{says}"):
            run(c.ExtrapolatedStep(average=average), *beside, rounds=1, **options)


def feddc(of: Run, alpha: float) -> list[Vector]:
    """FedDC as its authors write it, with drift variables, from our run's batches."""
    net, m, w = TwoLayer(3, 4, 3), len(of.schedule.sizes), of.start
    zeros = np.zeros_like(w)
    h, c_i, server_c = [zeros] * m, [zeros] * m, zeros
    models = []
    for t, table in enumerate(of.schedule.rounds):
        eta, ends, change = 0.3 * 0.9**t, [], zeros
        for i, batches in sorted(table.items()):
            x = w
            for batch in batches:
                g = net.gradient(x, i, batch) + alpha * (x - w + h[i]) + (server_c - c_i[i])
                g = g * min(1.0, 0.9 / np.linalg.norm(g)) + 0.01 * x
                x = x - eta * g
            h[i] = h[i] + x - w
            new = c_i[i] - server_c + (w - x) / (eta * len(batches))
            change, c_i[i] = change + new - c_i[i], new
            ends.append(x)
        w = np.mean(ends, axis=0) + np.sum(h, axis=0) / m
        server_c = server_c + change / m
        models.append(w)
    return models


def test_feddc_is_scaffold_and_feddyn() -> None:
    packaged, _ = config("method/feddc")
    ours = run(*packaged, rounds=6)
    same(ours, run(c.DynamicRegularization(0.01), c.ControlVariates(), rounds=6), 1e-12)
    for t, theirs in enumerate(feddc(ours, 0.01)):
        scale = np.abs(theirs).max()
        assert np.abs(ours.record.w[t] - theirs).max() <= 1e-9 * scale, f"round {t}"
