"""Figures for a page and for a paper, the values behind them, and what clients have of a run."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from folders import make_run
from scipy import stats

from fl_lightning.datamodules import InMemoryDataModule
from fl_lightning.lab.report import charts, curves, report_tables
from fl_lightning.lab.report.drawing import STYLES, in_style
from fl_lightning.lab.report.fairness import spread
from fl_lightning.lab.report.report_files import contents
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import summarise

CLIENTS = 25
ROUNDS = 7


def write(path: Path, header: list[str], rows: list[list[Any]]) -> None:
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def with_clients(parent: Path, arms: str = "ab", **record: Any) -> dict[tuple[str, int], Any]:
    """Runs that measured each client in two rounds; (arm, seed) → values after the last."""
    rng = np.random.default_rng(1)
    last = {}
    for arm in arms:
        for seed in range(2):
            values = rng.uniform(0.2, 0.9, (2, CLIENTS))
            columns = {
                "val/acc": [float(x) for x in rng.uniform(0.4, 0.6, ROUNDS)],
                "val/loss": [1.0 if t % 2 else None for t in range(ROUNDS)],
                "clients/acc": [None] * ROUNDS,
            }
            for t, of_round in zip((2, ROUNDS - 1), values, strict=True):
                columns["clients/acc"][t] = float(np.float32(of_round.mean()))
            folder = make_run(parent / f"{arm}/seed-{seed}", arm, seed, columns, **record)
            rows: list[list[Any]] = []
            for t, of_round in zip((2, ROUNDS - 1), values, strict=True):
                rows += [[t, client, 30, float(x)] for client, x in enumerate(of_round)]
            write(folder / "clients_rounds.csv", ["round", "client", "samples", "acc"], rows)
            ended = [row[1:] for row in rows if row[0] == ROUNDS - 1]
            # One client has no test samples.
            write(folder / "clients.csv", ["client", "samples", "acc"], [*ended, [CLIENTS, 0, ""]])
            last[arm, seed] = values[1]
    return last


def test_fairness_is_what_scipy_and_a_sum_over_pairs_give(tmp_path: Path) -> None:
    last = with_clients(tmp_path / "s")
    make_run(tmp_path / "s/c/seed-0", "c", 0, {"val/acc": [0.5]})
    summary = summarise(find([tmp_path / "s"]))
    arms = json.loads(json.dumps(summary.to_json()))["arms"]
    assert "fairness" not in arms["c"]
    for arm in "ab":
        found = arms[arm]["fairness"]
        for seed in range(2):
            x = np.sort(last[arm, seed])
            apart = float(np.abs(x[:, None] - x[None, :]).sum())
            wanted = {
                "mean": float(np.mean(x)),
                "worst10": float(np.mean(x[:3])),
                "best10": float(np.mean(x[-3:])),
                # Jain's index is 1 / (1 + the squared coefficient of variation).
                "jain": 1 / (1 + float(stats.variation(x)) ** 2),
                "gini": apart / (2 * CLIENTS**2 * float(np.mean(x))),
            }
            own = {measure: of["values"][str(seed)] for measure, of in found.items()}
            assert own == pytest.approx(wanted, abs=1e-12)
        both = [found["gini"]["values"][str(seed)] for seed in range(2)]
        assert found["gini"]["mean"] == pytest.approx(np.mean(both))
        assert found["gini"]["sd"] == pytest.approx(np.std(both, ddof=1))
    table = report_tables.fairness(summary)
    assert [row[0].text for row in table.rows] == ["a", "b"]
    assert table.title == "Fairness: acc of clients, %"
    lower = min("ab", key=lambda arm: arms[arm]["fairness"]["gini"]["mean"])
    assert [row[0].text for row in table.rows if row[5].mark == "best"] == [lower]


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("\n24,30,0.", "\n23,30,0.", "has two rows for one client"),
        ("\n24,30,0.", "\n24,30,0,0.", "has rows that are longer or shorter than its header"),
        ("\n24,30,0.", "\n24,30,O.", "holds a value that is not a number"),
        ("\n24,30,", "\n24,30,1", "as the mean of acc, but the run logged 0."),
        ("client,samples,acc", "client,samples,acd", "gives nothing as the mean of acc"),
    ],
)
def test_a_damaged_table_of_clients_is_said_and_counts_nowhere(
    tmp_path: Path, was: str, now: str, says: str
) -> None:
    with_clients(tmp_path / "s", "a")
    path = tmp_path / "s/a/seed-0/clients.csv"
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, now))
    summary = summarise(find([tmp_path / "s"]))
    assert list(summary.arms["a"].fairness["gini"]) == [1]
    (note,) = (note for note in summary.notes if str(path) in note)
    assert says in note


def test_what_is_made_of_all_clients_has_the_fairness_of_the_metric_itself(tmp_path: Path) -> None:
    with_clients(tmp_path / "s", "a")
    by_metric = [summarise(find([tmp_path / "s"]), f"clients/acc{end}") for end in ("", "_worst10")]
    gini = [summary.arms["a"].fairness["gini"] for summary in by_metric]
    assert gini[0] and gini[1] == gini[0]
    assert not [note for note in by_metric[1].notes if "clients.csv" in note]


def test_a_client_without_a_value_damages_nothing(tmp_path: Path) -> None:
    with_clients(tmp_path / "s", "a")
    folder = tmp_path / "s/a/seed-0"
    known = summarise(find([tmp_path / "s"])).arms["a"].fairness["worst10"]
    lines = (folder / "clients.csv").read_text().splitlines(keepends=True)
    (folder / "clients.csv").write_text("".join(lines) + "99,1,nan\n")
    summary = summarise(find([tmp_path / "s"]))
    assert not [note for note in summary.notes if str(folder / "clients.csv") in note]
    assert summary.arms["a"].fairness["worst10"] == known


@pytest.mark.parametrize("lost", ["all", "values", "header"])
def test_nobody_who_was_measured_after_the_last_round_is_no_damage(
    tmp_path: Path, lost: str
) -> None:
    """Over sites nobody may answer; a metric may be NaN everywhere. An empty file is damaged."""
    with_clients(tmp_path / "s", "a")
    folder = tmp_path / "s/a/seed-0"
    header, *rows = list(csv.reader((folder / "metrics.csv").read_text().splitlines()))
    if lost != "header":
        rows[-1][header.index("clients/acc")] = ""
        write(folder / "metrics.csv", header, rows)
    path = folder / "clients.csv"
    nobody = [[client, 30, ""] for client in range(CLIENTS)] if lost == "values" else []
    write(path, ["client", "samples", "acc"], nobody)
    summary = summarise(find([tmp_path / "s"]))
    notes = [note for note in summary.notes if str(path) in note]
    expected = {
        "all": [f"{path} has no rows: no client was measured after the last round."],
        "values": [],
    }
    if lost == "header":
        assert len(notes) == 1 and "The file is damaged" in notes[0]
    else:
        assert notes == expected[lost]
    assert list(summary.arms["a"].fairness["gini"]) == [1]


def test_values_that_overflowed_in_the_last_round_are_no_damage(tmp_path: Path) -> None:
    with_clients(tmp_path / "s", "a")
    folder = tmp_path / "s/a/seed-0"
    for name, at in (("metrics.csv", "clients/acc"), ("clients.csv", "acc")):
        header, *rows = list(csv.reader((folder / name).read_text().splitlines()))
        rows[-1 if at != "acc" else 0][header.index(at)] = "inf"
        write(folder / name, header, rows)
    notes = summarise(find([tmp_path / "s"])).notes
    assert not [note for note in notes if "damaged" in note and "clients.csv" in note]


def test_a_lost_row_of_a_round_is_said_and_the_round_is_not_drawn(tmp_path: Path) -> None:
    with_clients(tmp_path / "s", "a")
    path = tmp_path / "s/a/seed-0/clients_rounds.csv"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("2,7,")))
    summary = summarise(find([tmp_path / "s"]))
    (note,) = (note for note in summary.notes if str(path) in note)
    assert "in 1 of its rounds, first in round 2" in note
    (drawing,) = charts.clients(summary)
    (first, *_) = drawing.figure.axes[0].lines
    assert list(first.get_xdata()) == [ROUNDS]


def test_where_less_is_better_the_worst_are_the_greatest() -> None:
    values = np.array([3.0, 1.0, 2.0, 4.0])
    assert spread(values, greater=False)["worst10"] == 4.0
    assert spread(values, greater=True)["worst10"] == 1.0
    negative = spread(np.array([-1.0, 2.0]), greater=True)
    assert negative["jain"] is None and negative["gini"] is None


def test_curves_csv_has_every_value_that_is_drawn(tmp_path: Path) -> None:
    with_clients(tmp_path / "s")
    summary = summarise(find([tmp_path / "s"]))
    labels = {"a": "Method A"}
    written = contents(summary, "s", labels)
    rows = list(csv.DictReader(io.StringIO(written["curves.csv"].decode())))
    assert list(rows[0]) == ["arm", "seed", "round", "metric", "value"]
    found = {(r["arm"], r["seed"], r["round"], r["metric"]): float(r["value"]) for r in rows}
    wanted = {}
    for run in find([tmp_path / "s"]).runs:
        for metric in ("val/acc", "val/loss"):
            for t, value in enumerate(run.columns[metric]):
                if np.isfinite(value):
                    wanted[run.arm, str(run.seed), str(t), metric] = float(value)
    assert found == wanted and len(found) == len(rows)


def test_clients_are_drawn_over_time_a_panel_an_arm(tmp_path: Path) -> None:
    with_clients(tmp_path / "s", "abc")
    (drawing,) = charts.clients(summarise(find([tmp_path / "s"])))
    panels = drawing.figure.axes
    assert [panel.get_title(loc="left") for panel in panels] == ["a", "b", "c"]
    for panel in panels:
        *thin, median = panel.lines
        assert len(thin) == CLIENTS and list(median.get_xdata()) == [3, ROUNDS]
        assert len(panel.collections) == 2
    found = find([tmp_path / "s"])
    pooled = []
    for run in found.arms["a"]:
        rows = list(csv.DictReader((run.folder / "clients_rounds.csv").read_text().splitlines()))
        pooled += [float(row["acc"]) for row in rows if row["round"] == "2"]
    assert panels[0].lines[-1].get_ydata()[0] == pytest.approx(100 * np.median(pooled))


def test_rounds_have_whole_ticks(tmp_path: Path) -> None:
    for arm in "ab":
        make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, {"val/acc": [0.4, 0.5, 0.6]})
    (drawing,) = curves.curves(summarise(find([tmp_path / "s"])))
    ticks = drawing.figure.axes[0].get_xticks()
    assert np.array_equal(ticks, np.round(ticks)), ticks


def test_a_paper_needs_no_colour(tmp_path: Path) -> None:
    arms = "abcdefgh"
    for number, arm in enumerate(arms):
        level = 0.5 + number / 50
        make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, {"val/acc": [level] * 12})
    summary = summarise(find([tmp_path / "s"]))
    with in_style("paper"):
        (drawing,) = curves.curves(summary)
        shapes = charts.intervals(summary)[0].figure
    lines = [line for line in drawing.figure.axes[0].lines if len(line.get_xdata()) > 2]
    looks = {(line.get_marker(), str(line.get_linestyle())) for line in lines}
    assert len(lines) == len(arms) == len({marker for marker, _ in looks})
    assert all(line.get_markevery()[-1] == 11 for line in lines), "the last round is marked"
    assert drawing.figure.get_figwidth() == 3.4 and shapes.get_figwidth() == 6.9
    on_page = curves.curves(summary)[0].figure
    assert on_page.get_figwidth() == 9.2


@pytest.mark.slow
def test_two_reports_are_the_same_bytes(tmp_path: Path) -> None:
    """In two processes, whose hashes of texts differ, and at another time."""
    with_clients(tmp_path / "s")
    code = "import sys; from fl_lightning.__main__ import main\n"
    for style in STYLES:
        code += f"main(['report', 's', '--out', sys.argv[1] + '{style}', '--style', '{style}'])\n"
    for out in ("one", "two"):
        env = {**os.environ, "PYTHONHASHSEED": str(len(out) + ord(out[0]))}
        command = [sys.executable, "-c", code, f"{out}/"]
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    names = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*"))
    assert {name.suffix for name in names if name.parent.name == "figures"} == {
        ".png",
        ".svg",
        ".pdf",
    }
    for name in names:
        one, two = ((tmp_path / out / name).read_bytes() for out in ("one", "two"))
        assert one == two, name
        assert name.suffix != ".pdf" or (one.startswith(b"%PDF") and b"Date" not in one)


@pytest.mark.parametrize(
    ("record", "config", "shown"),
    [
        ({"validated_on": "test"}, "", "test acc, %"),
        ({"validated_on": "validation"}, "data: {class_path: x.MNIST}", "val/acc, %"),
        ({}, "data: {class_path: fl_lightning.datamodules.MNIST}", "test acc, %"),
        (
            {},
            "data: {class_path: fl_lightning.datamodules.MNIST, init_args: {val_fraction: 0.1}}",
            "val/acc, %",
        ),
        ({}, "data: {class_path: my.MNIST}", "val/acc, %"),
        ({}, "", "val/acc, %"),
    ],
)
def test_what_was_measured_on_the_test_set_is_called_so(
    record: dict[str, Any], config: str, shown: str, tmp_path: Path
) -> None:
    for arm in "ab":
        run = make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, {"val/acc": [0.4] * 9}, **record)
        (run / "config.yaml").write_text(config)
    summary = summarise(find([tmp_path / "s"]), targets=["0.3"])
    assert report_tables.scores(summary).title == f"Scores: {shown}"
    assert curves.curves(summary)[0].figure.axes[0].get_ylabel() == shown
    name = shown.removesuffix(", %")
    assert report_tables.targets(summary)[0].title == f"Until {name} ≥ 0.3"
    assert summary.to_json()["metric"] == "val/acc"
    told = any("writes test acc for val/acc" in note for note in summary.notes)
    assert told == (name == "test acc")


@pytest.mark.parametrize(
    ("given", "on_test"),
    [
        ({"test": True}, True),
        ({"test": True, "val_fraction": 0.2}, False),
        ({"test": True, "val": True}, False),
        ({}, False),
    ],
)
def test_data_say_whether_they_validate_on_the_test_set(
    given: dict[str, Any], on_test: bool
) -> None:
    pair = (torch.zeros(10, 2), torch.zeros(10, dtype=torch.long))
    options = {name: pair if value is True else value for name, value in given.items()}
    data = InMemoryDataModule(pair, num_clients=2, **options)
    assert data.validates_on_test is on_test


def test_a_logarithmic_axis_over_many_powers_has_numbers_at_powers_alone(tmp_path: Path) -> None:
    for name, most in (("few", 30.0), ("many", 1e6)):
        columns = {"val/acc": [0.5] * 9, "divergence/all": np.geomspace(1, most, 9).tolist()}
        make_run(tmp_path / f"{name}/a/seed-0", "a", 0, columns)
        (drawing,) = curves.measurements(summarise(find([tmp_path / name])))
        drawing.figure.draw_without_rendering()
        axis = drawing.figure.axes[0].yaxis
        shown = [label.get_text() for label in axis.get_minorticklabels() if label.get_text()]
        assert bool(shown) == (name == "few"), shown


def test_runs_of_which_some_alone_were_on_the_test_set_are_told_apart(tmp_path: Path) -> None:
    for arm, on in (("a", "test"), ("b", "validation")):
        make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, {"val/acc": [0.4] * 9}, validated_on=on)
    summary = summarise(find([tmp_path / "s"]))
    assert any("do not compare their val" in note for note in summary.notes)
    assert report_tables.scores(summary).title == "Scores: val/acc, %"


def test_each_sweep_has_a_panel_of_its_own(tmp_path: Path) -> None:
    """Fifty arms of eight sweeps in one panel would be no picture."""
    for sweep, arms in (("first", "ab"), ("second", "bcd"), ("short", "e")):
        rounds = 1 if sweep == "short" else 6
        for number, arm in enumerate(arms):
            columns = {
                "val/acc": np.linspace(0.1, 0.5 + number / 10, rounds).tolist(),
                "train/loss": np.linspace(2, 1 + number, rounds).tolist(),
                "hessian/trace": [*[None] * (rounds - 1), 7.0 + number],
            }
            make_run(tmp_path / f"{sweep}/{arm}/seed-0", arm, 0, columns)
        (tmp_path / sweep / "sweep.yaml").write_text(f"configs: [base]\n# {sweep}\n")
    summary = summarise(find([tmp_path / name for name in ("first", "second", "short")]))
    (drawing,) = curves.curves(summary)
    told = {}
    for axes in drawing.figure.axes:
        told[axes.get_title("left")] = [text.get_text() for text in axes.get_legend().get_texts()]
    # One round makes no curve.
    assert told == {"first": ["a", "first/b"], "second": ["second/b", "c", "d"]}
    titles = [each.title.partition(": ")[2] for each in curves.measurements(summary)]
    assert titles == ["first", "second", "short"]
    trace = curves.measurements(summary)[1].figure.axes[-1]
    assert "trace" in trace.get_title("left")
    assert [line.get_marker() for line in trace.lines] == ["o"] * 3, "one value is to be seen"


def test_clients_that_were_measured_once_have_no_course_to_draw(tmp_path: Path) -> None:
    with_clients(tmp_path / "s")
    for path in (tmp_path / "s").rglob("clients_rounds.csv"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.startswith("2,")))
    summary = summarise(find([tmp_path / "s"]))
    assert charts.clients(summary) == [] and summary.arms["a"].fairness


def test_the_axis_of_a_difference_names_its_arms(tmp_path: Path) -> None:
    for arm in ("fedavg", "ours"):
        for seed in (0, 1):
            make_run(tmp_path / "s" / arm / f"seed-{seed}", arm, seed, {"val/acc": [0.5, 0.6]})
    (drawing,) = charts.intervals(summarise(find([tmp_path / "s"])))
    label = drawing.figure.axes[0].get_xlabel()
    assert label.startswith("val/acc: ours minus fedavg, in percentage points"), label


def test_the_axis_of_a_cost_names_the_cost(tmp_path: Path) -> None:
    values = {"val/acc": [0.1, 0.5, 0.9], "communication/total_bytes": [1.0, 2.0, 3.0]}
    for arm in ("fedavg", "ours"):
        for seed in (0, 1):
            make_run(tmp_path / "s" / arm / f"seed-{seed}", arm, seed, values)
    shared = {"a": "ours", "b": "fedavg", "metric": "val/acc", "direction": "less", "margin": 0.0}
    claims = [
        {"id": "B", "kind": "to_target", "target": 0.4, "cost": "bytes", **shared},
        {"id": "R", "scale": "log_ratio", **shared},
    ]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(claims))
    summary = summarise(find([tmp_path / "s"]), claims=tmp_path / "c.yaml")
    (drawing,) = charts.intervals(summary)
    labels = [axes.get_xlabel() for axes in drawing.figure.axes]
    assert labels[0] == "bytes until the target in val/acc: log(a / b)"
    assert labels[1].startswith("val/acc: log(a / b) (mean over")
