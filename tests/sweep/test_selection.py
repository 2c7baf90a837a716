"""What a sweep selects where candidates have lost: never one of them while another has a score; and
the closing table of a sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.run_queue import ProgressTable
from fl_lightning.lab.sweep.selection import Candidate, choose
from fl_lightning.lab.sweep.sweep_file import Selection
from fl_lightning.lab.sweep.sweep_folder import DIVERGED, DONE, WAITING
from tests.helpers.commands import table
from tests.report.folders import make_run

INF = float("inf")
NAN = float("nan")

# Name of a candidate → its runs, each with its status and its values.
Tried = Mapping[str, list[tuple[str, list[float]]]]


def chosen(folder: Path, metric: str, arms: Mapping[str, Tried]) -> dict[str, Any]:
    """Arm → the candidate that it chooses by its runs in ``folder``."""
    found = []
    states = {}
    for arm, tried in arms.items():
        for name, ended in tried.items():
            runs = []
            for seed, (status, values) in enumerate(ended):
                place = f"select/{arm}/{name}/seed-{seed}"
                if not (folder / place).exists():
                    make_run(folder / place, arm, seed, {metric: values}, status)
                runs.append(PlannedRun(folder, place, arm, seed, ()))
                states[runs[-1]] = status
            found.append(Candidate(arm, {"lr": name}, tuple(runs)))
    selection = Selection({"lr": ("x",)}, metric, 0.1, (0,), mode="max" if "my" in metric else None)
    return {arm: choice["lr"] for arm, choice in choose(folder, selection, found, states).items()}


ZEROS, HALVES, LATE = [(DONE, [0.0] * 3)], [(DONE, [0.5] * 3)], [0.1, 0.1, INF]
BELOW_0 = {"1e6": [(DIVERGED, [-9e9])], "1e-4": [(DONE, [-0.7] * 3)], "0": [(DIVERGED, [])]}


@pytest.mark.parametrize(
    "metric, tried, scores",
    [
        # what diverged, where the others are below 0
        ("val/r2", BELOW_0, {"1e6": "", "1e-4": "-0.7", "0": ""}),
        ("val/my_elbo", BELOW_0, {"1e6": "", "1e-4": "-0.7", "0": ""}),
        # a lost run is no equal of one that scores 0
        ("val/acc", {"1e6": [(DIVERGED, [0.4])], "1e-4": ZEROS}, {"1e6": "0.0", "1e-4": "0.0"}),
        ("val/loss", {"0.02": [(DONE, [NAN] * 3)], "1e-4": HALVES}, {"0.02": "", "1e-4": "0.5"}),
        ("val/loss", {"0.02": [(DONE, LATE)], "1e-4": HALVES}, {"0.02": "", "1e-4": "0.5"}),
    ],
)
def test_a_candidate_that_has_lost_is_not_chosen(
    tmp_path: Path, metric: str, tried: Tried, scores: dict[str, str]
) -> None:
    assert chosen(tmp_path, metric, {"arm": tried}) == {"arm": "1e-4"}
    rows = table(tmp_path / "select.csv")
    assert {row["lr"]: row[f"{metric} (tail)"] for row in rows} == scores


def test_an_arms_choice_stays_when_another_arm_measures_what_is_below_0(tmp_path: Path) -> None:
    own = {
        "half": [(DONE, [0.9] * 3), (DIVERGED, [0.9])],
        "whole": [(DONE, [0.3] * 3), (DONE, [0.3] * 3)],
    }
    first = chosen(tmp_path, "val/r2", {"first": own})
    later = {"x": [(DONE, [-0.5] * 3)]}
    both = chosen(tmp_path, "val/r2", {"first": own, "later": later})
    assert first == {"first": "half"} and both == {"first": "half", "later": "x"}


def ended(folder: Path, arm: str, shown: list[str]) -> PlannedRun:
    place = f"{arm}/seed-0"
    (folder / place).mkdir(parents=True)
    (folder / place / "run.json").write_text(json.dumps({"status": DONE, "shown": shown}))
    (folder / place / "metrics.csv").write_text("round,val/acc,clients/acc\n0,0.5,0.75\n")
    return PlannedRun(folder, place, arm, 0, ())


def test_each_number_is_named_where_arms_are_shown_by_different_metrics(tmp_path: Path) -> None:
    one = ended(tmp_path, "fedavg", ["val/acc"])
    own = ended(tmp_path, "ifca", ["clients/acc"])
    lines = ProgressTable("s", None).lines({one: DONE, own: DONE})
    named = ["seed 0", "fedavg val/acc 0.5000", "ifca clients/acc 0.7500"]
    assert [" ".join(line.split()) for line in lines[2:5]] == named
    assert "The arms show different metrics, which you cannot compare" in lines[5]
    lines = ProgressTable("s", None).lines({one: DONE, own: WAITING})
    waits = ["val/acc seed 0", "fedavg 0.5000", "ifca stopped after round 0"]
    assert [" ".join(line.split()) for line in lines[2:5]] == waits and not lines[5]
    (one.folder / "metrics.csv").write_text("round,val/acc\n0,\x1e.5\n")  # a damaged table
    assert ProgressTable("s", None).lines({one: DONE})[3].split() == ["fedavg", "done"]
