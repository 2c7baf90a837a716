"""The table of ``auto``: each row, with what is found out given; and what a reader sees of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_lightning.engines import auto, fast_switch
from fl_lightning.engines.auto import TABLE
from fl_lightning.engines.trials.trial_steps import FirstSteps, Reason

KEEPS = Reason("it counts", keeps=True)
GPU = SimpleNamespace(device=torch.device("cuda"), nbytes=8)
DOCS = Path(__file__).parents[2] / "docs" / "engines.md"


def copies(**given: Any) -> Any:
    """Four clients at once on four cores, as far as the table looks at it."""
    context = {
        "workers": "auto",
        "w": torch.zeros(4),
        "usable_cores": 4,
        "most_at_once": 4,
        "lengths": lambda: [2, 3],
    }
    return SimpleNamespace(context=SimpleNamespace(**{**context, **given}))


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What was found out: by default nothing that speaks against side by side."""
    found = SimpleNamespace(seconds=0.05, uncaptured="", one_by_one=None)
    found.closed = found.not_forked = ""
    ways = SimpleNamespace(why_not_captured=lambda _: found.uncaptured)
    monkeypatch.setattr(auto, "step_seconds", lambda _: found.seconds)
    monkeypatch.setattr(auto, "compare_two_copies", lambda *_: found.one_by_one)
    for module in (auto, fast_switch):
        monkeypatch.setattr(module, "why_off", lambda: found.closed)
    monkeypatch.setattr(auto, "fast_package", lambda: ways)
    monkeypatch.setattr(auto, "why_not_forked", lambda _: found.not_forked)
    return found


def decided(first_steps: FirstSteps | None = None, **given: Any) -> tuple[int, Any, Any]:
    """The number of the row that applied, from 1, the plan, and why clients train in order."""
    plan, alone = auto.decide(copies(**given), first_steps or FirstSteps())
    (row,) = [row for row in TABLE if plan.why.startswith(f"{row.when}: ")]
    assert plan.engine == row.engine
    assert plan.threads == (torch.get_num_threads() if row.threads == "all" else 1)
    return TABLE.index(row) + 1, plan, alone


def test_side_by_side_where_nothing_speaks_against_it(found: Any) -> None:
    row, plan, alone = decided()
    assert (row, plan.workers, plan.captured, plan.not_captured) == (15, 4, True, "")
    assert alone is None and "50 ms" in plan.why
    found.uncaptured = "it branches"
    row, plan, _ = decided()
    assert (row, plan.captured, plan.not_captured) == (16, False, "it branches")


@pytest.mark.parametrize(
    ("given", "workers"),
    [
        ({"most_at_once": 2}, 2),
        ({"workers": 3}, 3),
        ({"workers": 1}, 1),
        ({"usable_cores": 1}, 1),
        ({"usable_cores": 1, "most_at_once": 1}, 1),
    ],
)
def test_as_many_workers_as_asked_for_or_cores_or_clients(
    found: Any, given: dict[str, Any], workers: int
) -> None:
    row, plan, _ = decided(**given)
    assert (row, plan.workers) == (15 if workers > 1 else 12, workers)


@pytest.mark.parametrize("asked", ["auto", 2])
def test_one_client_on_several_cores_has_them_all(found: Any, asked: Any) -> None:
    row, _, alone = decided(FirstSteps(KEEPS), workers=asked, most_at_once=1)
    assert (row, alone) == (2, KEEPS)


def test_other_devices_train_one_client_after_the_other(found: Any) -> None:
    row, _, alone = decided(FirstSteps(KEEPS), w=torch.zeros(4, device="meta"))
    assert (row, alone) == (1, KEEPS)


def test_a_gpu_takes_streams_also_for_one_client_and_short_steps(found: Any) -> None:
    found.seconds = 0.0
    row, plan, _ = decided(w=GPU, most_at_once=1)
    assert row == 10 and plan.captured
    found.closed = "they are switched off"
    row, plan, _ = decided(w=GPU)
    assert row == 9 and "they are switched off" in plan.why


def test_what_could_not_be_tried_or_is_not_proven_trains_one_by_one(found: Any) -> None:
    row, plan, alone = decided(FirstSteps(KEEPS, untried="it cannot be copied"))
    assert row == 3 and alone is None and plan.why.endswith("it cannot be copied")
    row, plan, alone = decided(FirstSteps(KEEPS))
    assert row == 4 and alone == KEEPS and "it counts, so clients train one" in plan.why
    found.one_by_one = Reason("a client's end depends on its copy")
    found.seconds = 0.0  # a short round is no reason where there is a better one
    row, plan, alone = decided()
    assert row == 5 and alone == found.one_by_one


def test_a_round_that_is_over_soon_is_not_worth_threads(found: Any) -> None:
    found.seconds = 0.0041  # of five steps, so just not too short
    assert decided()[0] == 15
    found.seconds = 0.0039
    assert decided()[0] == 11


@pytest.mark.parametrize(("seconds", "row"), [(0.0019, 14), (0.0021, 16)])
def test_short_steps_of_python_are_taken_in_order(found: Any, seconds: float, row: int) -> None:
    found.uncaptured = "it branches"
    found.seconds = seconds
    assert decided(lengths=lambda: [100])[0] == row
    found.uncaptured = ""
    found.closed = "they are switched off"
    assert decided(lengths=lambda: [100])[0] == row


def test_a_long_round_of_short_steps_takes_processes(found: Any) -> None:
    found.uncaptured = "it branches"
    found.seconds = 0.0019
    row, plan, _ = decided(lengths=lambda: [106])
    assert (row, plan.workers, plan.processes) == (13, 4, True)
    found.not_forked = "a file is open"
    assert decided(lengths=lambda: [106])[0] == 14


def test_clients_that_draw_train_in_processes(found: Any) -> None:
    draws = Reason("it draws", draws=True)
    found.one_by_one = draws
    row, plan, alone = decided(FirstSteps(draws))
    assert (row, plan.workers, plan.processes, alone) == (8, 4, True, draws)
    assert plan.why.endswith("it draws, and each process has its own generators")
    assert decided(FirstSteps(draws), workers=1)[0] == 7
    found.seconds = 0.0399  # of five steps, so just too short
    assert decided(FirstSteps(draws))[0] == 7
    found.not_forked = "a file is open"
    row, plan, _ = decided(FirstSteps(draws))
    assert row == 6 and plan.why.endswith("it draws, and a file is open")
    found.one_by_one = KEEPS
    assert decided(FirstSteps(draws))[0] == 5


def test_what_fails_in_a_trial_is_left_to_the_first_round(
    found: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "step_seconds", lambda _: 1 / 0)
    plan, _ = auto.decide(copies(), FirstSteps())
    assert plan.engine == "sequential" and "failed (ZeroDivisionError" in plan.why


def test_timings_choose_only_among_ways_with_the_same_bits(found: Any) -> None:
    for found.uncaptured in ("", "it branches"):
        for found.one_by_one in (None, Reason("it draws", draws=True)):
            for found.seconds in (0.0, 0.001, 0.0021, 1.0):
                assert decided()[1].threads == 1


def test_the_table_in_the_docs_is_the_table() -> None:
    text = DOCS.read_text("utf-8")
    for number, row in enumerate(TABLE, start=1):
        assert f"| {number} | {row.when} | `{row.engine}` | {row.threads} |" in text
    assert f"| {len(TABLE) + 1} |" not in text
