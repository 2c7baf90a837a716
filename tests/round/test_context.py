"""The facts of a round: rates after decay."""

from __future__ import annotations

import torch

from fl_lightning.round.client_schedule import ClientSchedule
from fl_lightning.round.context import ClientRates


def test_a_schedule_by_rounds_is_filled_as_far_as_the_round() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    given = [dict(group) for group in optimizer.param_groups]
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rates = ClientRates(
        1.0, torch.tensor(1.0), schedule=ClientSchedule(optimizer, [(halving, 1)], "rounds", given)
    )
    assert [float(rates.in_round(t, 3.0, 1).lr) for t in (0, 5, 2)] == [3.0, 3.0 / 32, 3.0 / 4]
