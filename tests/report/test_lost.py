"""Runs that have lost: they diverged, or what they measured last is no number. None ever wins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from folders import make_arm, make_run, report

from fl_lightning.lab.report import report_tables
from fl_lightning.lab.report.budgets import views
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.scores import SCORES
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
    given = {"id": "A", "a": "ours", "b": "base", "direction": "less", "margin": 0.01, **claim}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump([given]))
    argv = [sweep, "--claims", tmp_path / "c.yaml", "--metric", given["metric"]]
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
    assert "A lost run has no score." in text and "diverged, so it has no score" in text
    runs = find([tmp_path / "s"])
    runs.directions.given[claim["metric"]] = "max"
    for view in views(runs.arms, claim["metric"]):
        assert set(view.values["ours"].values()) == {None} and view.values["base"] == pytest.approx(
            levels
        )


def test_what_diverged_before_it_measured_anything_scores_0_only_above_0(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "base", {0: 0.5, 1: 0.4}, "val/r2")
    make_run(tmp_path / "s/ours/seed-0", "ours", 0, {}, "diverged")
    values = report(tmp_path / "out", tmp_path / "s", "--metric", "val/r2")["arms"]["ours"]
    assert values["scores"]["tail"]["values"] == {"0": 0.0}
    make_arm(tmp_path / "s", "low", {1: -0.1}, "val/r2")
    values = report(tmp_path / "out", tmp_path / "s", "--metric", "val/r2")["arms"]["ours"]
    assert values["scores"]["tail"]["values"] == {"0": None}


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


def test_a_seed_that_both_arms_lose_decides_nothing(tmp_path: Path) -> None:
    for seed in SEEDS:
        for arm, level in (("ours", 0.6 + 0.01 * seed), ("base", 0.5)):
            status = "diverged" if seed == 0 else "done"
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, {"val/loss": [level]}, status)
    for direction in ("less", "greater"):
        found, _ = judged(tmp_path, tmp_path / "s", metric="val/loss", direction=direction)
        assert found["claims"][0]["verdict"] == "inconclusive"


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("end", [[INF, INF, NAN, INF], [NAN], [-INF, None]], ids=str)
def test_a_run_whose_last_value_is_no_number_has_lost(
    tmp_path: Path, end: list[float | None], score: str
) -> None:
    folder = sweep(tmp_path / "s", "val/loss", [*FALLING, *end])
    found, text = judged(tmp_path, folder, metric="val/loss", score=score)
    (said,) = found["claims"]
    assert (said["verdict"], said["n"], said["left_out"]) == ("inconclusive", 0, 6)
    assert found["arms"]["ours"]["scores"][score]["mean"] is None
    note = (
        "ours, seed 0, 1, 2, 3, 4, 5: val/loss is not finite in a round that counts. Each such run "
        "has lost, as if it had diverged, in tail, last10, smoothed, last, max."
    )
    assert note in text
    assert "A lost run has no score." in text
    runs = find([folder])
    for view in views(runs.arms, "val/loss"):
        assert set(view.values["ours"].values()) == {None}


def test_a_run_whose_last_value_is_no_number_scores_0_where_greater_is_better(
    tmp_path: Path,
) -> None:
    folder = sweep(tmp_path / "s", "val/f1", [3.0, 3.0, NAN])
    found, text = judged(tmp_path, folder, metric="val/f1", direction="greater")
    (said,) = found["claims"]
    assert said["verdict"] == "contradicted" and said["values"]["0"] == -1.0
    assert "A lost run scores 0." in text


@pytest.mark.parametrize(
    "direction, verdict", [("greater", "reproduced"), ("less", "contradicted")]
)
def test_what_is_no_number_at_the_end_diverges_and_reaches_no_target(
    tmp_path: Path, direction: str, verdict: str
) -> None:
    folder = sweep(tmp_path / "s", "val/loss", [*FALLING, INF])
    claim = {"kind": "diverges", "arm": "ours", "against": "base", "metric": "val/loss"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump([{"id": "D", "direction": direction, **claim}]))
    argv = ["--claims", tmp_path / "c.yaml", "--metric", "val/loss", "--targets", "0.9"]
    found = report(tmp_path / "out", folder, *argv)
    assert found["claims"][0]["verdict"] == verdict
    assert set(found["arms"]["ours"]["rounds_to"]["0.9"].values()) == {None}
    assert found["arms"]["base"]["rounds_to"]["0.9"]["0"] is None


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
    assert "seed 5 is left out, because a run has a score of 0 or below" in text


@pytest.mark.parametrize(
    "direction, verdict", [("greater", "inconclusive"), ("less", "contradicted")]
)
def test_a_calm_arm_beside_one_that_diverged_is_no_divergence(
    tmp_path: Path, direction: str, verdict: str
) -> None:
    for seed in range(4):
        calm = seed == 3
        for arm, lost in (("ours", not calm), ("base", calm)):
            status = "diverged" if lost else "done"
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, {"val/loss": [1.0] * 9}, status)
    claim = {"kind": "diverges", "arm": "ours", "against": "base", "metric": "val/loss"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump([{"id": "D", "direction": direction, **claim}]))
    (said,) = report(tmp_path / "out", tmp_path / "s", "--claims", tmp_path / "c.yaml")["claims"]
    assert (said["verdict"], said["n"], said["left_out"]) == (verdict, 3, 1)


def test_a_value_that_is_no_number_on_the_way_loses_the_means_that_it_is_in(
    tmp_path: Path,
) -> None:
    values: list[float | None] = [*[0.9] * 9, INF, None, 0.5, 0.5]  # eight rounds before the end
    folder = sweep(tmp_path / "s", "val/loss", values)
    found, text = judged(tmp_path, folder, metric="val/loss", score="last10")
    assert found["claims"][0]["n"] == 0
    scores = found["arms"]["ours"]["scores"]
    known = {score: scores[score]["values"]["0"] for score in ("last10", "last", "max")}
    assert known == {"last10": None, "last": 0.5, "max": 0.9}
    assert "Each such run has lost, as if it had diverged, in tail, last10." in text


def test_an_empty_cell_is_no_value_and_loses_nothing(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "s", "val/loss", [0.9, None, 0.6, None, 0.6, None, None])
    found, text = judged(tmp_path, folder, metric="val/loss", score="last")
    assert found["claims"][0]["verdict"] == "reproduced" and "not finite" not in text
    assert found["arms"]["ours"]["scores"]["tail"]["mean"] == 0.6


def test_at_equal_cost_a_value_that_is_no_number_loses_while_it_counts(tmp_path: Path) -> None:
    # The cheapest run has three rounds: of six it is the third alone that is infinite.
    make_run(tmp_path / "s/base/seed-0", "base", 0, {"val/loss": [0.9] * 3})
    make_run(tmp_path / "s/ours/seed-0", "ours", 0, {"val/loss": [0.5, 0.5, INF, *[0.5] * 3]})
    view = views(find([tmp_path / "s"]).arms, "val/loss")[0]
    assert view.values == {"base": {0: 0.9}, "ours": {0: None}}
    assert summarise(find([tmp_path / "s"]), "val/loss").arms["ours"].scores["tail"] == {0: 0.5}


def test_layers_that_end_as_no_number_show_no_trend(tmp_path: Path) -> None:
    columns = {f"consensus_relative/{layer}": [place] * 3 for place, layer in enumerate("abc")}
    for seed in SEEDS:
        end = {"consensus_relative/d": [4.0, 4.0, INF if seed == 5 else 4.0]}
        make_run(tmp_path / f"s/ours/seed-{seed}", "ours", seed, {**columns, **end})
    claim = {"kind": "trend", "arm": "ours", "over": "layers", "metric": "consensus_relative"}
    claim |= {"id": "T", "direction": "greater"}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump([claim]))
    (said,) = report(tmp_path / "o", tmp_path / "s", "--claims", tmp_path / "c.yaml")["claims"]
    assert (said["verdict"], said["n"], said["left_out"]) == ("inconclusive", 5, 1)


def test_a_claims_own_metric_is_noted_too(tmp_path: Path) -> None:
    for arm in ("base", "ours"):
        end = [INF] if arm == "ours" else [0.7]
        for seed in SEEDS:
            columns = {"val/acc": [0.5] * 4, "val/loss": [0.9, 0.8, 0.7, *end]}
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, columns)
    claim = {"id": "A", "a": "ours", "b": "base", "direction": "less", "margin": 0.01}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump([{**claim, "metric": "val/loss"}]))
    found = report(tmp_path / "out", tmp_path / "s", "--claims", tmp_path / "c.yaml")
    assert found["arms"]["ours"]["scores"]["last"]["mean"] == 0.5
    text = (tmp_path / "out/report.md").read_text()
    assert "ours, seed 0, 1, 2, 3, 4, 5: val/loss is not finite" in text
    note = "seeds 0, 1, 2, 3, 4, 5 are left out, because a run has a value that is not finite"
    assert note in text


@pytest.mark.parametrize("arms", [("ours",), ("ours", "base")], ids=str)
def test_runs_that_are_infinite_in_every_round_are_reported(
    tmp_path: Path, arms: tuple[str, ...]
) -> None:
    for arm in ("base", "ours"):
        values = [INF] * 4 if arm in arms else [0.7] * 4
        make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, {"val/loss": values})
    argv = [tmp_path / "s", "--metric", "val/loss", "--targets", "0.9"]
    found = report(tmp_path / "out", *argv, figures="png")
    assert found["arms"]["ours"]["scores"]["tail"]["values"] == {"0": None}
    assert json.dumps(found["arms"]["ours"]["rounds_to"]) == '{"0.9": {"0": null}}'


def test_smoothed_is_the_lowest_where_less_is_better(tmp_path: Path) -> None:
    values = [0.9, 0.3, 0.6, 0.5]  # too few to smooth
    columns = {"val/loss": values, "val/acc": values, "val/quality": values}
    make_run(tmp_path / "s/a/seed-0", "a", 0, columns)
    texts = []
    for metric, best in (("val/loss", 0.3), ("val/acc", 0.9)):
        arm = report(tmp_path / "out", tmp_path / "s", "--metric", metric)["arms"]["a"]
        assert arm["scores"]["smoothed"]["mean"] == best and arm["scores"]["max"]["mean"] == 0.9
        texts.append((tmp_path / "out/report.md").read_text())
    assert "Smoothed: the lowest of the last 50" in texts[0]
    assert "Smoothed: the highest of the last 50" in texts[1]
    unknown = summarise(find([tmp_path / "s"]), "val/quality").arms["a"]
    assert unknown.scores["smoothed"] == {0: 0.9}
    argv = ["--metric", "val/quality", "--mode", "min"]
    arm = report(tmp_path / "out", tmp_path / "s", *argv)["arms"]["a"]
    assert arm["scores"]["smoothed"]["mean"] == 0.3


def test_an_arm_with_lost_seeds_is_never_the_best_and_says_how_many_count(tmp_path: Path) -> None:
    """``wild`` is better in the seed that is left of it; ``good`` has all of them."""
    for seed in range(5):
        columns: dict[str, Any] = {"cost/gradients": [10] * 6, "communication/total_bytes": [9] * 6}
        for arm, loss in (("good", 0.5), ("fair", 0.6), ("wild", 0.4)):
            gone = arm == "wild" and seed > 0
            columns |= {"val/loss": [loss] * 6, "clients/loss": [loss] * 6}
            folder = tmp_path / f"s/{arm}/seed-{seed}"
            make_run(folder, arm, seed, columns, "diverged" if gone else "done")
            if not gone:
                (folder / "clients.csv").write_text(f"client,samples,loss\n0,10,{loss}\n")
    summary = summarise(find([tmp_path / "s"]), "val/loss", ("0.7",))
    for table in (t for t in report_tables.tables(summary) if t.key not in ("pairs", "runs")):
        marked = {row[0].text for row in table.rows for cell in row if cell.mark == "best"}
        assert "wild" not in marked and ("good" in marked or table.key == "communication"), (
            table.key
        )
        counted = [row[-1].text for row in table.rows]
        if table.key in ("fairness", "budgets"):
            assert table.columns[-1] == "runs" and counted == ["5 of 5", "5 of 5", "1 of 5"]
