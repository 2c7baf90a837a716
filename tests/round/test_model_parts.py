"""Until when a client's copy of a part is good."""

from __future__ import annotations

import torch

from fl_lightning.round.model_parts import Parts

FIRST = torch.tensor([True, False, False])
LAST = torch.tensor([False, False, True])


def test_a_part_was_last_averaged_when_it_was_due_and_somebody_finished() -> None:
    """Of period 3: averaged at the ends of rounds 2 and 5, unless no client finishes them."""
    of = Parts([(FIRST, 3), (LAST, None)], 3, torch.device("cpu"))
    assert [of.last_averaged(t, {}) for t in range(7)] == [[-1, -1]] * 3 + [[2, -1]] * 3 + [[5, -1]]
    assert not of.after(2, {}, finished=True) and not of.after(3, {}, finished=False)
    missed = of.after(5, {}, finished=False)
    assert [of.last_averaged(t, missed) for t in (6, 8, 11)] == [[2, -1]] * 3
    assert not of.after(7, missed, finished=True)
    made_up = of.after(8, missed, finished=True)
    assert of.last_averaged(11, made_up) == [8, -1]


def test_a_part_averaged_every_round_or_empty_is_none() -> None:
    none = Parts([(FIRST, 1), (torch.zeros(3, dtype=torch.bool), 2)], 3, torch.device("cpu"))
    assert none.masks == [] and not none.kept.any() and bool(none.averaged(0).all())
