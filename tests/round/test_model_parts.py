"""Parts with periods of their own.

When they are averaged, and until when a client's copy of one is good.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_lightning.errors import UserError
from tests.helpers.rounds import FIRST, LAST, D, parts


def test_a_part_is_averaged_at_the_end_of_its_period() -> None:
    both = parts((FIRST, 3), (LAST, None))
    assert both.kept.tolist() == [True, False, True, True]
    averaged = [both.averaged(t).tolist() for t in range(6)]
    assert [a[0] for a in averaged] == [False, False, True, False, False, True]
    assert all(a[1] and not a[2] and not a[3] for a in averaged)


def test_a_part_was_last_averaged_when_it_was_due_and_somebody_finished() -> None:
    """Of period 3: averaged at the ends of rounds 2 and 5, unless nobody finishes them."""
    of = parts((FIRST, 3), (LAST, None))
    assert [of.last_averaged(t, {}) for t in range(7)] == [[-1, -1]] * 3 + [[2, -1]] * 3 + [[5, -1]]
    assert not of.after(2, {}, finished=True) and not of.after(3, {}, finished=False)
    missed = of.after(5, {}, finished=False)
    assert [of.last_averaged(t, missed) for t in (6, 8, 11)] == [[2, -1]] * 3
    assert not of.after(7, missed, finished=True)
    made_up = of.after(8, missed, finished=True)
    assert of.last_averaged(11, made_up) == [8, -1]


def test_a_part_averaged_every_round_or_empty_is_none() -> None:
    none = parts((FIRST, 1), (torch.zeros(D, dtype=torch.bool), 2))
    assert (
        none.masks == []
        and none.periods == []
        and not none.kept.any()
        and bool(none.averaged(0).all())
    )


@pytest.mark.parametrize(
    "given",
    [
        [(FIRST, 0)],
        [(FIRST, 1.5)],
        [(FIRST, 2), (FIRST | LAST, 3)],
        [(FIRST[:2], 2)],
    ],
    ids=["period 0", "period 1.5", "overlap", "shape"],
)
def test_what_is_no_part_is_refused(given: Any) -> None:
    with pytest.raises(UserError, match=r"^p(arts: |eriods=)"):
        parts(*given)


def test_parts_that_touch_do_not_overlap() -> None:
    assert len(parts((FIRST, 2), (LAST, 2)).masks) == 2
