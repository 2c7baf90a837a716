"""What a sweep selects where candidates have lost: never one of them while another has a score."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.selection import Candidate, choose
from fl_lightning.lab.sweep.sweep_file import Selection
from fl_lightning.lab.sweep.sweep_folder import DIVERGED, DONE
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


def scores(folder: Path) -> dict[str, str]:
    """Candidate → its score in select.csv."""
    with open(folder / "select.csv") as file:
        return {
            row["lr"]: next(v for k, v in row.items() if "tail" in k)
            for row in csv.DictReader(file)
        }


@pytest.mark.parametrize("metric", ["val/r2", "val/kappa", "val/my_elbo"])
def test_what_diverged_is_not_chosen_where_the_others_are_below_0(
    tmp_path: Path, metric: str
) -> None:
    tried = {"1e6": [(DIVERGED, [-9e9])], "1e-4": [(DONE, [-0.7] * 3)], "0": [(DIVERGED, [])]}
    assert chosen(tmp_path, metric, {"arm": tried}) == {"arm": "1e-4"}
    assert scores(tmp_path) == {"1e6": "", "1e-4": "-0.7", "0": ""}


def test_a_run_that_has_lost_is_no_equal_of_one_that_scores_0(tmp_path: Path) -> None:
    tried = {"1e6": [(DIVERGED, [0.4])], "1e-4": [(DONE, [0.0] * 3)]}
    assert chosen(tmp_path, "val/acc", {"arm": tried}) == {"arm": "1e-4"}


def test_an_arms_choice_stays_when_another_arm_measures_what_is_below_0(tmp_path: Path) -> None:
    own = {
        "half": [(DONE, [0.9] * 3), (DIVERGED, [0.9])],
        "whole": [(DONE, [0.3] * 3), (DONE, [0.3] * 3)],
    }
    first = chosen(tmp_path, "val/r2", {"first": own})
    later = {"x": [(DONE, [-0.5] * 3)]}
    both = chosen(tmp_path, "val/r2", {"first": own, "later": later})
    assert first == {"first": "half"} and both == {"first": "half", "later": "x"}


@pytest.mark.parametrize("values", [[INF] * 3, [NAN] * 3, [0.1, 0.1, INF]], ids=str)
def test_a_candidate_that_is_no_number_is_the_worst(tmp_path: Path, values: list[float]) -> None:
    tried = {"0.02": [(DONE, values)], "1e-4": [(DONE, [0.5] * 3)]}
    assert chosen(tmp_path, "val/loss", {"arm": tried}) == {"arm": "1e-4"}
    assert scores(tmp_path) == {"0.02": "", "1e-4": "0.5"}
