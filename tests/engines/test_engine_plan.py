"""The plan of who trains the clients, as a checkpoint holds it and a card tells it."""

from __future__ import annotations

from typing import Any

import pytest

from fl_lightning.engines.engine_plan import AS_BEFORE, EnginePlan


def test_a_plan_comes_back_from_a_checkpoint() -> None:
    plan = EnginePlan(
        "concurrent",
        "measured",
        workers=3,
        threads=1,
        server_threads=2,
        channels_last=True,
        fused=True,
    )
    back = EnginePlan.from_dict(plan.as_dict())
    assert back == EnginePlan(
        "concurrent",
        AS_BEFORE,
        workers=3,
        threads=1,
        server_threads=2,
        channels_last=True,
        fused=True,
    )
    stacked = EnginePlan.from_dict(EnginePlan("stacked", at_once=8).as_dict())
    assert stacked is not None and stacked.at_once == 8 and not stacked.channels_last


@pytest.mark.parametrize("held", [{}, {"engine": ""}])
def test_a_checkpoint_may_hold_none(held: dict[str, Any]) -> None:
    assert EnginePlan.from_dict(held) is None


def test_a_card_tells_what_belongs_to_the_engine() -> None:
    beside = EnginePlan("concurrent", "measured", workers=2, captured=True, at_once=5)
    assert beside.card() == {
        "engine": "concurrent",
        "threads": "1",
        "server_threads": "1",
        "workers": "2",
        "capture": "yes",
        "why": "measured",
    }
    assert (
        EnginePlan("sequential", as_buffers=("teacher.w", "queue")).card()["as buffers"]
        == "teacher.w, queue"
    )
    assert EnginePlan("concurrent", not_captured="few steps").card()["capture"] == "no: few steps"
    stacked = EnginePlan("stacked", at_once=5, workers=2, channels_last=True).card()
    assert (
        stacked["clients"] == "5"
        and stacked["memory"] == "channels_last"
        and not {"workers", "capture"} & set(stacked)
    )
    assert not {"clients", "memory", "workers"} & set(EnginePlan("sequential").card())
    assert (str(beside), str(EnginePlan("sequential"))) == ("concurrent × 2", "sequential")
