"""Runs that have lost: they diverged, or what they measured last is no number. None ever wins."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from folders import make_arm, make_run, report

from fl_lightning.lab.report import report_tables
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.scores import SCORES, views
from fl_lightning.lab.report.summary import summarise

NAN = float("nan")
INF = float("inf")
SEEDS = range(6)
BASE = {seed: 1.0 + 0.01 * seed for seed in SEEDS}
FALLING = [1.2, 1.0, 0.9, 0.8, 0.7, 0.6]


def sweep(folder: Path, metric: str, values: Sequence[float | None], status: str = "done") -> Path:
    """Six seeds of ``base``, whose values lie around 1, and of ``ours``."""
    make_arm(folder, "base", BASE, metric)
    for seed in SEEDS:
        make_run(folder / f"ours/seed-{seed}", "ours", seed, {metric: values}, status)
    return folder


def judged(tmp_path: Path, sweep: Path, **claim: Any) -> tuple[dict[str, Any], str]:
    """The report on one claim about ``ours`` and ``base``, and its text."""
    given = {"id": "A", "direction": "less", "metric": "val/loss"}
    if "arm" not in claim:
        given |= {"a": "ours", "b": "base", "margin": 0.01}
    given |= claim
    (tmp_path / "c.yaml").write_text(yaml.safe_dump([given]))
    argv = [sweep, "--claims", tmp_path / "c.yaml"]
    if "/" in given["metric"]:
        argv += ["--metric", given["metric"]]
    if "mode" in given:
        argv += ["--mode", given["mode"]]
    found = report(tmp_path / "out", *argv)
    return found, (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    "claim", [{"metric": "val/r2"}, {"metric": "val/reward", "mode": "max"}], ids=str
)
def test_a_diverged_run_has_no_score_where_a_metric_is_below_0(
    tmp_path: Path, claim: dict[str, Any], score: str
) -> None:
    levels = {seed: -0.5 + 0.01 * seed for seed in SEEDS}
    make_arm(tmp_path / "s", "base", levels, claim["metric"])
    make_arm(tmp_path / "s", "ours", dict.fromkeys(SEEDS, -0.6), claim["metric"], status="diverged")
    found, text = judged(tmp_path, tmp_path / "s", direction="greater", score=score, **claim)
    (said,) = found["claims"]
    assert (said["verdict"], said["n"], said["left_out"]) == ("inconclusive", 0, 6)
    assert set(found["arms"]["ours"]["scores"][score]["values"].values()) == {None}
    assert "left out, because a run diverged" in text
    runs = find([tmp_path / "s"])
    runs.directions.given[claim["metric"]] = "max"
    for view in views(runs.arms, claim["metric"]):
        assert set(view.values["ours"].values()) == {None}
        assert view.values["base"] == pytest.approx(levels)


@pytest.mark.parametrize("kind", ["difference", "to_target"])
@pytest.mark.parametrize("gone", ["ours", "base"])
@pytest.mark.parametrize("ours", [0.4, 0.6])
def test_a_seed_that_an_arm_loses_never_counts_for_it(
    tmp_path: Path, kind: str, gone: str, ours: float
) -> None:
    """Five seeds have both arms, and ``ours`` is a little better or worse; in three one is lost."""
    claim: dict[str, Any] = {"metric": "val/loss", "margin": 0.0}
    if kind == "to_target":
        claim |= {"kind": kind, "target": 0.1, "cost": "rounds"}
    for seed in range(8):
        for arm, level in (("ours", ours), ("base", 0.5)):
            rounds = round(10 * level + 0.3 * seed) if kind == "to_target" else 0
            end = 0.1 if rounds else level + 0.01 * seed * (arm == "ours")
            lost = arm == gone and seed > 4
            values = [0.9] * (rounds or 3) + [0.9 if lost else end] * 3
            status = "diverged" if lost and not rounds else "done"
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, {"val/loss": values}, status)
    (said,) = judged(tmp_path, tmp_path / "s", **claim)[0]["claims"]
    assert (said["n"], said["left_out"]) == (5, 3)
    better = "ours" if ours < 0.5 else "base"
    verdict = "reproduced" if better == "ours" else "contradicted"
    assert said["verdict"] == ("inconclusive" if gone == better else verdict)


@pytest.mark.parametrize("score", ["tail", "max"])
@pytest.mark.parametrize("end", [[INF, INF, NAN, INF], [NAN], [-INF, None]], ids=str)
def test_a_run_whose_last_value_is_no_number_has_lost(
    tmp_path: Path, end: list[float | None], score: str
) -> None:
    folder = sweep(tmp_path / "s", "val/loss", [*FALLING, *end])
    found, text = judged(tmp_path, folder, score=score)
    (said,) = found["claims"]
    assert (said["verdict"], said["n"], said["left_out"]) == ("inconclusive", 0, 6)
    assert found["arms"]["ours"]["scores"][score]["mean"] is None
    note = (
        "ours, seed 0, 1, 2, 3, 4, 5: val/loss is not finite in a round that counts. Each such run "
        "has lost, as if it had diverged, in tail, last10, smoothed, last, max."
    )
    assert note in text
    for view in views(find([folder]).arms, "val/loss"):
        assert set(view.values["ours"].values()) == {None}


def test_a_last_value_that_is_no_number_scores_0_if_greater_is_better(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", "val/f1", [3.0, 3.0, NAN])
    (said,) = judged(tmp_path, folder, metric="val/f1", direction="greater")[0]["claims"]
    assert said["verdict"] == "contradicted" and said["values"]["0"] == -1.0


@pytest.mark.parametrize(
    "direction, verdict", [("greater", "reproduced"), ("less", "contradicted")]
)
def test_what_is_no_number_at_the_end_diverges_and_reaches_no_target(
    tmp_path: Path, direction: str, verdict: str
) -> None:
    folder = sweep(tmp_path / "s", "val/loss", [*FALLING, INF])
    claim = {"kind": "diverges", "arm": "ours", "against": "base", "direction": direction}
    assert judged(tmp_path, folder, **claim)[0]["claims"][0]["verdict"] == verdict
    argv = ("--metric", "val/loss", "--targets", "0.9")
    found = report(tmp_path / "out", folder, *argv)["arms"]
    assert set(found["ours"]["rounds_to"]["0.9"].values()) == {None}
    assert found["base"]["rounds_to"]["0.9"]["0"] is None


def test_a_seed_that_has_no_ratio_cannot_help_a_claim(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    make_arm(folder, "ours", {seed: 0.5 + 0.01 * seed for seed in SEEDS}, "global/gap")
    make_arm(folder, "base", {seed: 0.8 + 0.02 * seed for seed in SEEDS}, "global/gap")
    claim: dict[str, Any] = {"metric": "global/gap", "scale": "log_ratio", "margin": 0.0}
    assert judged(tmp_path, folder, **claim)[0]["claims"][0]["verdict"] == "reproduced"
    shutil.rmtree(folder / "base/seed-5")
    make_arm(folder, "base", {5: -0.1}, "global/gap")  # here base is better
    found, text = judged(tmp_path, folder, **claim)
    assert found["claims"][0]["verdict"] == "inconclusive" and found["claims"][0]["n"] == 5
    assert "seed 5: left out, because a run" in text


def test_a_value_that_is_no_number_on_the_way_loses_the_means_that_it_is_in(tmp_path: Path) -> None:
    values: list[float | None] = [*[0.9] * 9, INF, None, 0.5, 0.5]  # eight rounds before the end
    folder = sweep(tmp_path / "s", "val/loss", values)
    found, text = judged(tmp_path, folder, score="last10")
    assert found["claims"][0]["n"] == 0
    scores = found["arms"]["ours"]["scores"]
    known = {score: scores[score]["values"]["0"] for score in ("last10", "last", "max")}
    assert known == {"last10": None, "last": 0.5, "max": 0.9}
    assert "Each such run has lost, as if it had diverged, in tail, last10." in text


def test_an_empty_cell_is_no_value_and_loses_nothing(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", "val/loss", [0.9, None, 0.6, None, 0.6, None, None])
    found, text = judged(tmp_path, folder, score="last")
    assert found["claims"][0]["verdict"] == "reproduced"
    assert "is not finite in a round" not in text
    assert found["arms"]["ours"]["scores"]["tail"]["mean"] == 0.6


def test_at_equal_cost_a_value_that_is_no_number_loses_while_it_counts(tmp_path: Path) -> None:
    # The cheapest run has three rounds: of six it is the third alone that is infinite.
    make_run(tmp_path / "s/base/seed-0", "base", 0, {"val/loss": [0.9] * 3})
    make_run(tmp_path / "s/ours/seed-0", "ours", 0, {"val/loss": [0.5, 0.5, INF, *[0.5] * 3]})
    view = views(find([tmp_path / "s"]).arms, "val/loss")[0]
    assert view.values == {"base": {0: 0.9}, "ours": {0: None}}
    assert summarise(find([tmp_path / "s"]), "val/loss").arms["ours"].scores["tail"] == {0: 0.5}


def test_where_less_is_better_the_smoothed_score_is_the_lowest(tmp_path: Path) -> None:
    columns = {name: [0.9, 0.3, 0.5] for name in ("val/loss", "val/acc", "val/quality")}
    make_run(tmp_path / "s/a/seed-0", "a", 0, columns)
    cases = (("val/loss", None, 0.3), ("val/acc", None, 0.9), ("val/quality", "min", 0.3))
    for metric, mode, best in cases:
        argv = ["--metric", metric, *(["--mode", mode] if mode else [])]
        arm = report(tmp_path / "out", tmp_path / "s", *argv)["arms"]["a"]
        assert arm["scores"]["smoothed"]["mean"] == best
        text = (tmp_path / "out/report.md").read_text()
        assert f"Smoothed: the {'lowest' if best < 0.5 else 'highest'} of the last 50" in text
    unknown = summarise(find([tmp_path / "s"]), "val/quality").arms["a"]
    assert unknown.scores["smoothed"] == {0: 0.9}


def test_an_arm_with_lost_seeds_is_never_the_best(tmp_path: Path) -> None:
    """``wild`` is better in the seed that is left of it; ``good`` has all of them."""
    for seed in range(5):
        columns: dict[str, Any] = {"cost/gradients": [10] * 6, "communication/total_bytes": [9] * 6}
        for arm, loss in (("good", 0.5), ("fair", 0.6), ("wild", 0.4)):
            gone = arm == "wild" and seed > 0
            columns |= {"val/loss": [loss] * 6, "clients/loss": [loss] * 6}
            folder = tmp_path / f"s/{arm}/seed-{seed}"
            make_run(folder, arm, seed, columns, "diverged" if gone else "done")
    summary = summarise(find([tmp_path / "s"]), "val/loss", ("0.7",))
    for table in (t for t in report_tables.tables(summary) if t.key not in ("pairs", "runs")):
        marked = {row[0].text for row in table.rows for cell in row if cell.mark == "best"}
        assert "wild" not in marked, table.key
        assert "good" in marked or table.key == "communication", table.key
