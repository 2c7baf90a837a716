"""Robust rules against NumPy's, what they refuse and say, and what they stand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning.callbacks import ByzantineClients, RobustAggregation
from fl_lightning.callbacks.robust.robust_aggregation import PIECE, mixed
from fl_lightning.testing import check_method, tiny_run
from tests.helpers.learners import blobs, federated, trainer
from tests.oracles.robust import aggregate


class Given:
    """A server that has these updates."""

    averaged = None

    def __init__(self, updates: Any) -> None:
        self.updates, self.said = torch.from_numpy(updates), list[str]()

    def note(self, text: str) -> None:
        self.said.append(text)


RULES: dict[str, dict[str, Any]] = {
    "median": {"rule": "median"},
    "trimmed": {"rule": "trimmed_mean", "trim": 0.3},
    "trimmed, exactly": {"rule": "trimmed_mean", "trim": 0.29},
    "Krum": {"rule": "krum", "byzantine": 2},
    "multi-Krum": {"rule": "multi_krum", "byzantine": 2},
    "multi-Krum, 3": {"rule": "multi_krum", "byzantine": 1, "keep": 3},
    "geometric": {"rule": "geometric_median"},
    "Bulyan": {"rule": "bulyan", "byzantine": 1},
    "Bulyan, 2": {"rule": "bulyan", "byzantine": 2},
    "mixed, median": {"rule": "median", "byzantine": 2, "mixing": True},
    "mixed, trimmed": {"rule": "trimmed_mean", "trim": 0.2, "mixing": True},
    "mixed, Krum": {"rule": "krum", "byzantine": 3, "mixing": True},
    "mixed, geometric": {"rule": "geometric_median", "byzantine": 2, "mixing": True},
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 10, 100])
@pytest.mark.parametrize("length", [1.0, 0.01])
def test_rules_agree_with_numpy(name: str, n: int, length: float) -> None:
    rng = np.random.default_rng(n)
    u = length * rng.normal(size=(n, 17)) * np.where(np.arange(n) % 4 == 3, 30.0, 1.0)[:, None]
    u[n // 2] = u[0]  # two alike, so that ties are met
    server: Any = Given(u)
    ours = RobustAggregation(**RULES[name]).aggregate(server, server.updates).numpy()
    assert np.abs(ours - aggregate(u, **RULES[name])).max() < 1e-9
    counts = "byzantine" in RULES[name] or "mixing" in RULES[name]
    times = 4 if RULES[name]["rule"] == "bulyan" else 2
    lowered = counts and n < times * RULES[name].get("byzantine", 1) + 3
    assert len(server.said) == lowered


@pytest.mark.parametrize(
    "rule", ["krum", "multi_krum", "median", "trimmed_mean", "geometric_median", "bulyan"]
)
def test_every_contract_holds(rule: str) -> None:
    report = check_method(partial(RobustAggregation, rule, trim=0.34, byzantine=0))
    assert report.ok, f"{report}"


@pytest.mark.parametrize(
    "rule", ["median", "trimmed_mean", "krum", "multi_krum", "geometric_median"]
)
def test_three_of_ten_that_send_the_opposite_carry_the_mean_away_and_no_robust_rule(
    rule: str,
) -> None:
    losses = []
    for methods in ([], [RobustAggregation(rule, trim=0.31, byzantine=3)]):
        run = trainer(8, [ByzantineClients("sign_flip", 0.3, 10.0), *methods])
        torch.manual_seed(0)
        run.fit(federated(participation="all", on_nonfinite="skip"), blobs())
        losses.append(float(run.callback_metrics["val/loss"]))
    clean = trainer(8)
    torch.manual_seed(0)
    clean.fit(federated(participation="all"), blobs())
    mean, robust = losses
    assert mean > 3 * robust and robust < 2 * float(clean.callback_metrics["val/loss"])


def test_mixing_keeps_honest_clients_that_are_far_from_each_other() -> None:
    """Of 13 rows 10 lie along axes of their own, and 3 send the opposite of the mean.

    No coordinate has a majority.
    """
    honest = np.eye(10)
    u = np.concatenate([honest, np.tile(-10 * honest.mean(0), (3, 1))])
    server: Any = Given(u)
    alone, mixed = (
        RobustAggregation("median", byzantine=3, mixing=mixing)
        .aggregate(server, server.updates)
        .numpy()
        for mixing in (False, True)
    )
    assert np.abs(alone).max() == 0.0, "the median of each coordinate forgets them all"
    assert np.allclose(mixed, honest.mean(0), atol=1e-12)


@pytest.mark.parametrize("sent", [float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("name", RULES)
def test_what_is_not_finite_carries_no_rule_away(name: str, sent: float) -> None:
    u = np.random.default_rng(0).normal(size=(9, 17))
    u[4] = sent
    server: Any = Given(u)
    d = RobustAggregation(**RULES[name]).aggregate(server, server.updates)
    assert d.isfinite().all() and d.abs().max() < 4


def test_distances_and_means_of_long_rows_are_those_of_numpy() -> None:
    u = np.random.default_rng(0).normal(size=(5, 2 * PIECE + 3))
    server: Any = Given(u)
    ours = (
        RobustAggregation("krum", byzantine=1, mixing=True)
        .aggregate(server, server.updates)
        .numpy()
    )
    assert np.abs(ours - aggregate(u, "krum", byzantine=1, mixing=True)).max() < 1e-9


@pytest.mark.parametrize("rule", ["krum", "multi_krum"])
def test_what_is_not_averaged_brings_no_update_nearer(rule: str) -> None:
    u, averaged = np.random.default_rng(0).normal(size=(9, 17)), np.arange(17) % 3 > 0
    u[:, ~averaged] *= 100
    server: Any = Given(u)
    server.averaged = torch.from_numpy(averaged)
    ours = RobustAggregation(rule, byzantine=2).aggregate(server, server.updates).numpy()
    assert np.abs(ours - aggregate(u * averaged, rule, byzantine=2)).max() < 1e-9


def test_too_few_participants_are_refused_before_training() -> None:
    for method, words in (
        (
            RobustAggregation("krum", byzantine=1),
            r"byzantine=1 needs .* = 5 clients per round, but participation gives 3",
        ),
        (RobustAggregation("multi_krum", byzantine=0, keep=4), "keep=4 is more than the 3 clients"),
        (RobustAggregation("median", mixing=True), "mixing with byzantine=1 needs"),
        (
            RobustAggregation("bulyan", byzantine=1),
            r"rule='bulyan' with byzantine=1 needs 4 · 1 \+ 3 = 7 clients per round",
        ),
    ):
        with pytest.raises(UserError, match=words):
            trainer(1, [method]).fit(federated(), blobs())
    for participation in (4, 5):
        module, run = (
            federated(participation=participation),
            trainer(1, [RobustAggregation("krum", byzantine=1)]),
        )
        if participation == 4:
            with pytest.raises(UserError, match="participation gives 4"):
                run.fit(module, blobs())
        else:
            run.fit(module, blobs())


def test_bulyan_takes_what_mixing_leaves() -> None:
    """Neighbours may be mixed to one row, so both see the same rounding here."""
    u = np.random.default_rng(0).normal(size=(11, 5))
    server: Any = Given(u)
    ours = (
        RobustAggregation("bulyan", byzantine=2, mixing=True)
        .aggregate(server, server.updates)
        .numpy()
    )
    rows = mixed(torch.from_numpy(u), 2).numpy()
    assert np.abs(ours - aggregate(rows, "bulyan", byzantine=2)).max() < 1e-9


def test_bulyan_without_attackers_is_the_uniform_mean() -> None:
    u = np.random.default_rng(0).normal(size=(6, 5))
    server: Any = Given(u)
    ours = RobustAggregation("bulyan", byzantine=0).aggregate(server, server.updates).numpy()
    assert np.abs(ours - u.mean(axis=0)).max() < 1e-12


def test_weights_play_no_part_which_is_said() -> None:
    runs = [
        tiny_run(RobustAggregation("median"), weighting=weighting)
        for weighting in ("uniform", "samples")
    ]
    assert torch.equal(runs[0].global_vector, runs[1].global_vector)
    assert any("weighting='samples' are not used" in note for note in runs[1].notes)
