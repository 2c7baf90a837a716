"""Numbers that cannot work are refused by name; what a method cannot mean is said once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.callback_list import CallbackList
from fl_lightning.optim import FedAdagrad, FedAdam, FedYogi
from fl_lightning.schedules import Linear
from fl_lightning.testing import tiny_run
from tests.helpers.federation import network


def test_bias_correction_is_adams() -> None:
    """With v from 0 the first step is lr · d/(|d| + τ), whatever the betas."""
    start = network(
        [], 1, server_optimizer=lambda w: FedAdam(w, 0.1, tau=1e-12, bias_correction=True)
    )
    moved = start.record.w[0] - start.start
    assert np.abs(np.abs(moved) - 0.1).max() < 1e-9


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda w: FedAdam(w, -1.0), "lr=-1.0"),
        (lambda w: FedYogi(w, 0.1, betas=(0.9, 1.0)), "beta2=1.0"),
        (lambda w: FedAdagrad(w, 0.1, tau=0.0), "tau=0.0"),
        (lambda w: c.DynamicRegularization(0.0), "penalty=0.0"),
        (lambda w: c.ProximalTerm("much"), "mu='much'"),
        (lambda w: c.ProximalTerm(-1.0), "mu=-1.0 is not accepted; it has to be from 0"),
        (
            lambda w: c.SharpnessAwareMinimization(1e300),
            r"radius=1e\+300 is not a number in single",
        ),
    ],
)
def test_numbers_that_cannot_work_are_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        make([torch.nn.Parameter(torch.zeros(2))])


def test_weights_that_a_method_does_not_take_are_said() -> None:
    weighted = network(
        [c.ControlVariates("gradient"), c.DynamicRegularization()], 1, weighting="samples"
    ).module.notes
    assert len(weighted) == 2 and all("uniform mean over clients" in note for note in weighted)


@pytest.mark.parametrize(
    "make, named",
    [
        (lambda: c.LogitCalibration(Linear(1.0, -1.0, 2)), "tau=.*, -1 in round 2, is not acc"),
        (
            lambda: c.GlobalDirection(Linear(0.0, 2.0, 2), "mix"),
            "in round 2, alpha=2.0 is not accepted",
        ),
    ],
)
def test_a_schedule_that_leaves_the_bounds_is_refused_in_that_round(make: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        tiny_run(make(), rounds=3)


def test_a_schedule_at_its_bounds_runs() -> None:
    tiny_run(c.GlobalDirection(Linear(0.0, 1.0, 2), "mix"), rounds=3)
    tiny_run(c.GlobalDirection(Linear(0.0, 2.0, 2), "add"), rounds=3)


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
