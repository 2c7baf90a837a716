"""What a reviewer asks of a table: the interval of the test, whose seconds, what was printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from folders import make_arm, make_run
from scipy import stats

from fl_lightning.__main__ import main
from fl_lightning.lab.report import report_files, report_tables
from fl_lightning.lab.report.budgets import views
from fl_lightning.lab.report.cells import LONG, Table
from fl_lightning.lab.report.charts import intervals
from fl_lightning.lab.report.report_files import contents
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import Summary, summarise
from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.selection import Candidate, choose
from fl_lightning.lab.sweep.sweep_file import Selection
from fl_lightning.lab.sweep.sweep_folder import DONE

ALIKE = "- {id: X, kind: equivalence, a: new, b: old, metric: val/acc, margin: 0.01}\n"
SEEDS = range(6)


@pytest.fixture
def likeness(tmp_path: Path) -> tuple[Summary, list[float]]:
    """A claim of likeness, and its differences."""
    rng = np.random.default_rng(3)
    differences = [float(value) for value in rng.normal(0.001, 0.004, len(SEEDS))]
    make_arm(tmp_path / "s", "old", dict.fromkeys(SEEDS, 0.7))
    make_arm(tmp_path / "s", "new", {seed: 0.7 + differences[seed] for seed in SEEDS})
    (tmp_path / "s/claims.yaml").write_text(ALIKE)
    return summarise(find([tmp_path / "s"])), differences


def cells(table: Table, column: str) -> list[str]:
    place = list(table.columns).index(column)
    return [row[place].text for row in table.rows]


def test_an_equivalence_is_shown_with_the_interval_of_its_two_one_sided_tests(
    likeness: tuple[Summary, list[float]],
) -> None:
    summary, differences = likeness
    inner = stats.ttest_1samp(differences, 0).confidence_interval(0.9)
    outer = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    claim = summary.to_json()["claims"][0]
    assert [claim["low_90"], claim["high_90"]] == pytest.approx(inner, abs=1e-12)
    assert [claim["low"], claim["high"]] == pytest.approx(outer, abs=1e-12)
    # p is below 0.05 exactly where this interval lies within the margin.
    assert (claim["p"] < 0.05) == (max(map(abs, inner)) < 0.01)
    shown = " to ".join(f"{100 * end:+.2f}".replace("-", "−") for end in inner) + " (90 %)"
    for table in (report_tables.claims(summary), report_tables.pairs(summary)):
        assert cells(table, "95 % interval") == [shown]
    written = contents(summary, "s")
    assert f"90 % interval {shown.removesuffix(' (90 %)')}" in written["report.html"].decode()
    # The figure has both: thin to 95 %, thick to 90 %.
    lines = intervals(summary)[0].figure.axes[0].lines
    drawn = {line.get_linewidth(): line.get_xdata() for line in lines if len(line.get_xdata()) == 2}
    assert drawn[2.6] == pytest.approx([100 * end for end in inner])
    assert drawn[1.0] == pytest.approx([100 * end for end in outer])


def test_seconds_are_left_out_where_asked_and_of_runs_on_several_machines(tmp_path: Path) -> None:
    columns = {"val/acc": [0.5] * 9, "time/cpu": [1.0] * 9, "time/round": [2.0] * 9}
    machine = {"processor": "One", "cores": 2, "threads": 1, "memory": 2**33, "gpu": None}
    for seed in (0, 1):
        make_run(tmp_path / f"s/a/seed-{seed}", "a", seed, columns, machine=machine)
    found = find([tmp_path / "s"])
    assert "seconds" in {view.axis for view in views(found.arms, "val/acc")}
    summary = summarise(found, targets=["0.4"])
    table = report_tables.runs(summary)
    assert table.note == "2 runs were made on One, 2 cores, 1 thread, 8 GiB."
    summary.timed = False
    written = contents(summary, "s")
    for name in ("figures/curves-seconds.svg", "figures/curves-seconds.png"):
        assert name not in written and "figures/curves-rounds.png" in written
    text = written["report.md"].decode()
    assert "of processor time" not in text and "| time |" not in text
    assert json.loads(written["report.json"])["arms"]["a"]["seconds_to"]["0.4"] == {
        "0": 2.0,
        "1": 2.0,
    }
    make_run(tmp_path / "s/a/seed-2", "a", 2, columns, machine={**machine, "processor": "Two"})
    make_run(tmp_path / "s/a/seed-3", "a", 3, columns)
    found = find([tmp_path / "s"])
    assert "seconds" not in {view.axis for view in views(found.arms, "val/acc")}
    note = report_tables.runs(summarise(found)).note
    assert "1 run was made on Two, 2 cores" in note and note.endswith(
        "1 run was made on a machine that was not recorded."
    )


def test_long_tables_are_folded_and_none_is_lost(tmp_path: Path) -> None:
    for number in range(LONG + 1):
        make_arm(tmp_path / "s", f"arm-{number:02}", {0: 0.5})
    summary = summarise(find([tmp_path / "s"]))
    tables = {table.key: table for table in report_tables.tables(summary)}
    assert tables["scores"].folded and tables["runs"].folded
    page = report_files._sections(list(tables.values()), [])
    assert {table.key for section in page for table in section.tables} == set(tables)
    text = contents(summary, "s")["report.md"].decode()
    assert text.count("<details>") == text.count("</details>") == 3
    _, _, below = text.partition("## Runs\n\n<details><summary>17 rows</summary>\n\n| arm |")
    assert below.index("| arm-16 |") < below.index("\n\n</details>\n")


def test_what_opens_a_table_does_not_say_its_heading_again(tmp_path: Path) -> None:
    for number in range(LONG + 1):
        make_arm(tmp_path / "s", f"arm-{number:02}", {0: 0.5})
    page = contents(summarise(find([tmp_path / "s"])), "s")["report.html"].decode()
    headings = set(re.findall("<h2>(.*?)</h2>", page))
    opening = re.findall("<summary>(.*?)</summary>", page)
    assert opening == ["17 rows"] * 3 and "Runs" in headings


def test_the_best_is_that_of_its_own_sweep(tmp_path: Path) -> None:
    for sweep, more in (("s", 0.0), ("t", 0.2)):
        for arm, level in (("a", 0.5), ("b", 0.6)):
            make_arm(tmp_path / sweep, f"{sweep}-{arm}", {0: level + more, 1: level + more})
    folders = [tmp_path / "s", tmp_path / "t"]

    def best() -> list[str]:
        table = report_tables.scores(summarise(find(folders)))
        return [row[0].text for row in table.rows if row[1].mark == "best"]

    # Folders of runs that no sweep made are looked at together.
    assert best() == ["t-b"]
    for folder in folders:
        (folder / "sweep.yaml").write_text("configs: [base]\n")
    assert best() == ["s-b", "t-b"]


def test_a_choice_at_the_end_of_its_grid_is_said(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "tuned", {0: 0.5})
    head = "arm,model.learner.init_args.lr,method.beta,val/acc (tail),runs,chosen\n"
    rows = "tuned,0.05,0.1,0.6,2,\ntuned,0.1,0.1,0.7,2,yes\ntuned,1.0,0.1,0.5,2,\n"
    (tmp_path / "s/select.csv").write_text(head + rows)
    (tmp_path / "s/sweep.yaml").write_text("configs: [base]\n")
    table = report_tables.chosen(summarise(find([tmp_path / "s"])))
    assert cells(table, "chosen") == ["learner lr 0.1; method beta 0.1"]
    assert cells(table, "at an end") == ["no"] and cells(table, "candidates") == ["3"]
    moved = rows.replace("yes", "").replace("0.5,2,", "0.9,2,yes")
    (tmp_path / "s/select.csv").write_text(head + moved)
    table = report_tables.chosen(summarise(find([tmp_path / "s"])))
    assert cells(table, "at an end") == ["learner lr"]


def test_a_choice_without_a_value_or_an_end_is_shown_as_it_is(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "tuned", {0: 0.5})
    (tmp_path / "s/sweep.yaml").write_text("configs: [base]\n")
    options = ("clip_norm", "nesterov", "lr", "beta")
    tried = [(None, True, 0.1, 1), (10.0, False, 0.3, 2), (5.0, True, 0.3, 3)]
    found = []
    states = {}
    for number, values in enumerate(tried):
        choice = {f"model.{option}": value for option, value in zip(options, values, strict=True)}
        place = f"select/tuned/{number}/seed-9"
        make_run(tmp_path / "s" / place, "tuned", 9, {"val/acc": [0.9 - 0.1 * number] * 3})
        run = PlannedRun(tmp_path / "s", place, "tuned", 9, ())
        states[run] = DONE
        found.append(Candidate("tuned", choice, (run,)))
    choose(tmp_path / "s", Selection({}, "val/acc", 0.1, (9,)), found, states)
    table = report_tables.chosen(summarise(find([tmp_path / "s"])))
    chosen = "model clip_norm null; model nesterov True; model lr 0.1; model beta 1"
    assert cells(table, "chosen") == [chosen]
    assert "model clip_norm 5.0, 10.0, null" in cells(table, "tried")[0]
    # Only of three numbers or more one is at an end; 0.1 is one of two.
    assert cells(table, "at an end") == ["model beta"]


def test_a_choice_on_the_clients_test_samples_is_said(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "tuned", {0: 0.5})
    (tmp_path / "s/sweep.yaml").write_text("configs: [base]\n")
    for metric, seen in (("clients/acc", True), ("domains/acc_mean", True), ("val/acc", False)):
        head = f"arm,method.beta,{metric} (tail),runs,chosen\n"
        (tmp_path / "s/select.csv").write_text(f"{head}tuned,0.1,0.7,2,yes\ntuned,0.2,0.5,2,\n")
        summary = summarise(find([tmp_path / "s"]))
        table = report_tables.chosen(summary)
        noted = [note for note in summary.notes if "chose by" in note]
        assert bool(noted) == seen and ("held-out" not in table.title) == seen
        assert ("clients' test samples" in table.note) == seen
        assert all(f"chose by {metric}" in note and "test samples" in note for note in noted)


def test_arms_whose_mean_of_models_means_nothing_are_headed_by_their_clients(
    tmp_path: Path,
) -> None:
    warned = "what is validated is the mean of 2 clusters' models, which is not a useful model"
    columns = {"val/acc": [0.5] * 3, "clients/acc": [0.75] * 3}
    for seed in (0, 1):
        given = {"shown": ["clients/acc"], "notes": [warned, f"seed={seed} was drawn"]}
        make_run(tmp_path / f"s/ifca/seed-{seed}", "ifca", seed, columns, **given)
        make_run(tmp_path / f"s/a/seed-{seed}", "a", seed, columns, shown=["val/acc"])
    assert main(["report", str(tmp_path / "s"), "--figures", "none"]) == 0
    written = json.loads((tmp_path / "s/report.json").read_text())
    assert written["metric"] == "clients/acc"
    text = (tmp_path / "s/report.md").read_text()
    assert f"ifca: {warned}." in text and "was drawn" not in text
