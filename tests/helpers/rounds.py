"""A round made by hand, of four parameters.

What it stages, shows and counts can be worked out on paper.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.learner.layout import Layout
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.context import ClientRates, Round
from fl_lightning.round.model_parts import Parts

D = 4
FIRST, LAST = torch.tensor([True, False, False, False]), torch.tensor([False, False, True, True])


def parts(*given: tuple[Tensor, int | None]) -> Parts:
    return Parts(list(given), D, torch.device("cpu"))


def a_round(t: int = 0, rows: dict[tuple[str, int], Tensor] | None = None, **given: Any) -> Round:
    """Clients 3 and 5 of 10, from w = 1, 2, 3, 4 at a rate of 0.5.

    ``rows``: committed, by (key, client).
    """
    w = torch.arange(1.0, D + 1, dtype=torch.float64)
    facts: dict[str, Any] = {
        "ids": [3, 5],
        "steps": {3: 2, 5: 4},
        "sizes": {3: 10, 5: 30},
        "weights": {3: 10.0, 5: 30.0},
        "num_clients": 10,
        "w": w,
        "w0": -w,
        "evaluated": w,
        "buffers": {},
        "layout": Layout(nn.Linear(3, 1)),
        "rates": ClientRates(1.0, torch.tensor(0.5, dtype=torch.float64)),
        "read": lambda key, client: (rows or {}).get((key, client)),
        "server_states": {},
    }
    return Round(t=t, **{**facts, **given})


def a_group(round: Round, ids: list[int] | None = None) -> ClientGroup:
    """Clients of the round that train together, at w, their starts final."""
    ids = round.ids if ids is None else ids
    group = ClientGroup(round, ids, round.w.repeat(len(ids), 1))
    group.take_kept_parts()
    group.begin(own_starts=True)
    return group
