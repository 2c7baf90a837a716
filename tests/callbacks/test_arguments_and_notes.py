"""Numbers that cannot work are refused by name; what a method cannot mean is said once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.methods import Methods
from fl_lightning.optim import FedAdagrad, FedAdam, FedYogi
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


def test_a_checkpoint_of_before_an_argument_was_there_is_of_the_same_method() -> None:
    assert (
        "offset" not in Methods([c.RelaxedInitialization()]).fingerprint()["RelaxedInitialization"]
    )
    assert (
        "offset='mean'"
        in Methods([c.RelaxedInitialization(offset="mean")]).fingerprint()["RelaxedInitialization"]
    )


def test_an_argument_that_is_called_like_a_hook_is_compared_too() -> None:
    (averaged,) = Methods([c.RelaxedInitialization(aggregate="updates")]).fingerprint().values()
    (others,) = Methods([c.RelaxedInitialization()]).fingerprint().values()
    assert averaged == f"{others}, aggregate='updates'"
