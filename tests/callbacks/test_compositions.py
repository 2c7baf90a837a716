"""Methods together: their order does not matter, what is sent is counted, and what a method cannot
mean is said once."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning import callbacks as c
from fl_lightning.callback_list import CallbackList
from fl_lightning.optim import FedAdam
from fl_lightning.testing import tiny_run
from tests.helpers.federation import network, quadratics
from tests.helpers.learners import blobs, federated, trainer
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
    kept = record.record.rows[0]["TopKCompression.error"][0]
    assert kept.tolist() == [0.0, 0.0, 0.0, 0.0, 0.5, -1.0]
    assert record.record.w[1].tolist() == [1.0, -2.0, 1.0, 0.0, 1.0, -2.0]


def test_a_budget_of_bytes_ends_the_run_after_the_round_that_reaches_it(tmp_path: Path) -> None:
    def fitted(budget: Any, path: Path | None = None) -> Any:
        run = trainer(6, [c.CommunicationLogger(budget=budget)])
        run.fit(federated(), blobs(), ckpt_path=path)
        return run

    each = int(fitted(None).callback_metrics["communication/total_bytes"]) // 6
    for budget, rounds in ((2 * each, 2), (2 * each + 1, 3), (each, 1)):
        run = fitted(budget)
        assert run.current_epoch == rounds
        assert int(run.callback_metrics["communication/total_bytes"]) == rounds * each
        assert any("budget" in note for note in run.lightning_module.notes)
    path = tmp_path / "x.ckpt"
    run.save_checkpoint(path)
    given = (float(each), 3 * each, None)
    assert [fitted(budget, path).current_epoch for budget in given] == [1, 3, 6]


def test_bias_correction_is_adams() -> None:
    """With v from 0 the first step is lr · d/(|d| + τ), whatever the betas."""
    start = network(
        [], 1, server_optimizer=lambda w: FedAdam(w, 0.1, tau=1e-12, bias_correction=True)
    )
    moved = start.record.w[0] - start.start
    assert np.abs(np.abs(moved) - 0.1).max() < 1e-9


def test_weights_that_a_method_does_not_take_are_said() -> None:
    weighted = network(
        [c.ControlVariates("gradient"), c.DynamicRegularization()], 1, weighting="samples"
    ).module.notes
    assert len(weighted) == 2 and all("uniform mean over clients" in note for note in weighted)


MEAN_GRADIENT = "for the mean gradient of its steps; "


@pytest.mark.parametrize("direction", [c.AdamDirection, c.MuonDirection])
@pytest.mark.parametrize(
    "reader", [c.ControlVariates, c.ClientMomentum, c.MomentumGuidedPerturbation]
)
def test_a_mean_direction_that_is_added_to_gradients_is_noted(direction: Any, reader: Any) -> None:
    """The displacement is then a mean of directions, which have another scale than gradients."""
    for others in ([], [c.GlobalDirection()]):
        (said,) = [
            note for note in tiny_run(direction(), *others, reader()).notes if MEAN_GRADIENT in note
        ]
        assert said.startswith(reader.__name__) and direction.__name__ in said
        assert ("estimate='gradient'" in said) is (reader is c.ControlVariates)


@pytest.mark.parametrize(
    "methods",
    [
        lambda: [c.AdamDirection(), c.ControlVariates("gradient")],
        # It adds the mean direction to directions.
        lambda: [c.AdamDirection(), c.GlobalDirection()],
        lambda: [c.ControlVariates(), c.GlobalDirection()],
    ],
)
def test_a_mean_gradient_or_a_mean_direction_in_its_place_gets_no_note(methods: Any) -> None:
    assert not [note for note in tiny_run(*methods()).notes if MEAN_GRADIENT in note]


@pytest.mark.parametrize("direction", [c.AdamDirection, c.MuonDirection])
def test_a_momentum_that_sees_zeros_where_a_part_rests_is_noted(direction: Any) -> None:
    notes = tiny_run(direction(), c.AlternatingHead(), local_epochs=2).notes
    assert any(f"{direction.__name__} gets a gradient of 0" in note for note in notes)


@pytest.mark.parametrize("pull", [c.ProximalTerm, c.DynamicRegularization, c.MixedAscent])
def test_a_pull_that_fednovas_work_does_not_count_is_noted(pull: Any) -> None:
    (said,) = [n for n in tiny_run(c.NormalizedAveraging(), pull()).notes if "τ_i" in n]
    assert said.startswith(f"NormalizedAveraging: {pull.__name__} pulls")
    assert not any("τ_i" in n for n in tiny_run(c.NormalizedAveraging()).notes)


def test_an_argument_that_is_called_like_a_hook_is_compared_too() -> None:
    (averaged,) = CallbackList([c.MixedAscent(aggregate="participants")]).fingerprint().values()
    (others,) = CallbackList([c.MixedAscent()]).fingerprint().values()
    assert averaged == f"{others}, aggregate='participants'"


def test_methods_that_step_by_the_rounds_rate_are_noted() -> None:
    run = network([c.DecayWithinRound(), c.ProximalPersonalModel()], 1)
    assert any("steps of its own at the round's learning" in note for note in run.module.notes)
