"""Rates and optimizers that no run can use; test_errors.py types them."""

from __future__ import annotations

import pytest
import torch

from fl_lightning.accepted import PositiveFloat, check
from fl_lightning.checks import optimizers
from fl_lightning.errors import UserError
from fl_lightning.optim import FedAdagrad, FedAdam
from fl_lightning.schedules import Cosine, Exponential, Schedule, Steps


@pytest.mark.parametrize(
    "decay",
    [
        1,
        0.998,
        1.01,
        Exponential(0.0),
        Exponential(1.001),
        Cosine(5),
        Cosine(5, end=2.0),
        Steps({3: 0.0}),
    ],
)
def test_what_stays_finite_is_taken(decay: float | Schedule) -> None:
    check("lr_decay", decay, PositiveFloat | Schedule)
    optimizers.rates_over("lr_decay", decay, 500)


def test_optimizers_that_cannot_work() -> None:
    w = torch.nn.Parameter(torch.zeros(2))
    optimizers.check_optimizer("client_optimizer", torch.optim.SGD([w], lr=0.0))
    for wrong, says in (
        (torch.optim.SGD([w], lr=float("nan")), "SGD has lr=nan"),
        (torch.optim.LBFGS([w]), "LBFGS evaluates the loss several times"),
        (torch.optim.SparseAdam([w]), "SparseAdam takes only sparse gradients"),
        (torch.optim.Adam([w], capturable=True), "Adam has capturable=True"),
        (None, "it gives nothing"),
        ([torch.optim.SGD([w], lr=0.1)], "it gives a list"),
    ):
        with pytest.raises(UserError, match=f"^client_optimizer: {says}"):
            optimizers.check_optimizer("client_optimizer", wrong)
    for make in (FedAdam, FedAdagrad):
        with pytest.raises(UserError, match=r"lr=nan"):
            make([w], lr=float("nan"))
