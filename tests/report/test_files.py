"""The files of a report: one page that asks nothing of the network, tables in three forms, figures;
and what the tables say."""

from __future__ import annotations

import csv
import html
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml
from folders import make_arm, make_run, report
from scipy import stats

from fl_lightning.__main__ import main
from fl_lightning.datamodules import InMemoryDataModule
from fl_lightning.lab.report import figures, report_tables
from fl_lightning.lab.report.cells import Table
from fl_lightning.lab.report.report_files import breakable, contents, tex, widths
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.scores import views
from fl_lightning.lab.report.summary import Summary, summarise

LEVELS = {0: 0.70, 1: 0.72, 2: 0.69}


def columns(level: float, rounds: int = 20, vectors: int = 1) -> dict[str, list[float]]:
    return {
        "val/acc": [min(level, 0.2 + 0.1 * t) for t in range(rounds)],
        "train/loss": [2.0 / (t + 1) for t in range(rounds)],
        "communication/total_bytes": [800.0 * vectors * (t + 1) for t in range(rounds)],
        "cost/gradients": [10.0] * rounds,
        "time/round": [0.5] * rounds,
        "consensus/total": [0.3] * rounds,
        "consensus/conv": [0.1 * (1 + t % 2) for t in range(rounds)],
        "consensus/fc": [0.2] * rounds,
    }


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Two arms, three seeds; the second arm sends twice as much, one of its runs diverged, another
    still runs."""
    folder = tmp_path / "s"
    for seed, level in LEVELS.items():
        make_run(folder / f"fedavg/seed-{seed}", "fedavg", seed, columns(level))
        status = "done" if seed < 2 else "diverged"
        more = columns(level + 0.05, vectors=2)
        make_run(folder / f"fed<smoo>/seed-{seed}", "fed<smoo>", seed, more, status)
    make_run(folder / "fed<smoo>/seed-3", "fed<smoo>", 3, columns(0.5, 7), "running")
    return folder


def summary_of(*folders: Path, **given: Any) -> Summary:
    return summarise(find(folders), **given)


def cells(table: Table, column: str) -> list[str]:
    place = list(table.columns).index(column)
    return [row[place].text for row in table.rows]


class Page(HTMLParser):
    """Which elements a page has, which of their ids, and whether they close as they open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id" and value]
        if tag not in ("meta", "input", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_asks_nothing_of_the_network(sweep: Path, tmp_path: Path) -> None:
    report(tmp_path / "out", sweep, "--targets", "0.6", figures="svg")
    text = (tmp_path / "out/report.html").read_text()
    page = Page(text)
    assert page.open == [] and len(page.ids) == len(set(page.ids))
    assert not re.search(r'(src|href)="(?!#|data:)', text) and "http" not in text
    assert page.tags.count("img") == len(list((tmp_path / "out/figures").iterdir()))
    assert "fed&lt;smoo&gt; diverged with seed 2" in text
    assert "fed&lt;smoo&gt;, seed 3: running" in text


def test_figures_tables_and_rows_lie_beside_it(sweep: Path, tmp_path: Path) -> None:
    found = report(tmp_path / "out", sweep, "--targets", "0.6", figures="png,svg,pdf")
    drawn = sorted((tmp_path / "out/figures").iterdir())
    names = {path.stem for path in drawn}
    curves = {f"curves-{axis}" for axis in ("rounds", "gradients", "bytes", "seconds")}
    assert names == {"intervals", "measurements", *curves} and len(drawn) == 3 * len(names)
    for path in drawn:
        data = path.read_bytes()
        if path.suffix == ".svg":
            assert ElementTree.fromstring(data).tag.endswith("svg")
        else:
            assert data.startswith({".png": b"\x89PNG", ".pdf": b"%PDF"}[path.suffix])
    markdown, latex = ((tmp_path / f"out/report.{kind}").read_text() for kind in ("md", "tex"))
    assert "| fedavg | **70.33 ± 1.53** |" in markdown
    assert set(re.findall(r"\]\(figures/([\w-]+)\.png\)", markdown)) == names
    rows = markdown[markdown.index(r"| layer | fed&lt;smoo> | fedavg |") :].splitlines()[2:4]
    assert rows == ["| conv | 0.15 | 0.15 |", "| fc | 0.2 | 0.2 |"]
    made = len(re.findall(r"^\|---", markdown, re.MULTILINE))
    assert latex.count(r"\begin{table}") == latex.count(r"\bottomrule") == made > 4
    plain = re.sub(r"\\label\{.*?\}", "", latex).replace(r"\_", "")
    assert not re.search(r"[±×−–≥_](?<!\\_)", plain)
    lines = list(csv.DictReader((tmp_path / "out/report.csv").read_text().splitlines()))
    scores = found["arms"]["fed<smoo>"]["scores"]["last10"]["values"]
    assert len(lines) == 7 and lines[0]["last10"] == repr(scores["0"])


@pytest.mark.slow
def test_two_reports_are_the_same_bytes(tmp_path: Path) -> None:
    """In two processes, whose hashes of texts differ, and at another time."""
    for arm, level in (("a", 0.6), ("b", 0.7)):
        for seed in range(2):
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, columns(level + seed / 100))
    code = "import sys; from fl_lightning.__main__ import main\n"
    code += "main(['report', 's', '--out', sys.argv[1], '--style', 'paper'])\n"
    for out in ("one", "two"):
        env = {**os.environ, "PYTHONHASHSEED": str(len(out) + ord(out[0]))}
        command = [sys.executable, "-c", code, out]
        subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True)
    names = sorted(p.relative_to(tmp_path / "one") for p in (tmp_path / "one").rglob("*.*"))
    assert {name.suffix for name in names} >= {".png", ".svg", ".pdf", ".html", ".tex"}
    for name in names:
        one, two = ((tmp_path / out / name).read_bytes() for out in ("one", "two"))
        assert one == two, name


# --------------------------------------------------------------------------------------- names


def test_arms_are_called_by_their_labels_where_a_reader_looks(tmp_path: Path) -> None:
    for arm, more in (("fedavg", 0.0), ("mine_2", 0.05)):
        make_arm(tmp_path / "s", arm, {seed: level + more for seed, level in LEVELS.items()})
    plain = report(tmp_path / "plain", tmp_path / "s")
    odd = r"$x_1^2$ 5% #1 & <b>\frac{a}{b}</b> ~`*|"
    options = ["--label", "mine_2=FedMine, β = 2", "--label", f"fedavg={odd}"]
    labelled = report(tmp_path / "out", tmp_path / "s", *options, figures="svg")
    assert labelled == plain, "report.json keeps the arms"
    assert (tmp_path / "out/report.csv").read_text() == (tmp_path / "plain/report.csv").read_text()
    for name in ("report.md", "report.html", "figures/curves-rounds.svg", "figures/intervals.svg"):
        text = (tmp_path / "out" / name).read_text()
        assert "FedMine, β = 2" in text and "mine_2 −" not in text, name
    page = (tmp_path / "out/report.html").read_text()
    assert odd in html.unescape(page) and "<b>" not in page
    assert odd in html.unescape((tmp_path / "out/figures/curves-rounds.svg").read_text())
    escaped = r"\$x\_1\textasciicircum{}2\$ 5\% \#1 \& $<$b$>$\textbackslash{}frac\{a\}\{b\}"
    assert escaped in (tmp_path / "out/report.tex").read_text()
    in_cell = r"\$x_1^2\$ 5% #1 & &lt;b>\\frac{a}{b}&lt;/b> \~\`\*\| |"
    assert in_cell in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("fedavg", "give ARM=TEXT"),
        ("fedavg=", "give ARM=TEXT"),
        ("fedagv=FedAvg", "Did you mean 'fedavg'"),
        ("fedavg=mine", "two arms would be called 'mine'"),
    ],
)
def test_labels_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], label: str, words: str
) -> None:
    for arm in ("fedavg", "mine"):
        make_arm(tmp_path / "s", arm, LEVELS)
    out = tmp_path / "out"
    assert main(["report", str(tmp_path / "s"), "--out", str(out), "--label", label]) == 2
    assert words in capsys.readouterr().err and not out.exists()


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
        ({}, "method: 3\ndata: 3\nmodel: []", "val/acc, %"),
    ],
)
def test_what_was_measured_on_the_test_set_is_called_so(
    record: dict[str, Any], config: str, shown: str, tmp_path: Path
) -> None:
    for arm in "ab":
        run = make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, {"val/acc": [0.4] * 9}, **record)
        (run / "config.yaml").write_text(config)
    summary = summary_of(tmp_path / "s", targets=["0.3"])
    assert report_tables.scores(summary).title == f"Scores: {shown}"
    assert figures.curves(summary)[0].figure.axes[0].get_ylabel() == shown
    name = shown.removesuffix(", %")
    assert report_tables.targets(summary)[0].title == f"Until {name} ≥ 0.3"
    assert summary.to_json()["metric"] == "val/acc"
    told = any("writes test acc for val/acc" in note for note in summary.notes)
    assert told == (name == "test acc")


def test_runs_of_which_some_alone_were_on_the_test_set_are_told_apart(tmp_path: Path) -> None:
    for arm, on in (("a", "test"), ("b", "validation")):
        make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, {"val/acc": [0.4] * 9}, validated_on=on)
    summary = summary_of(tmp_path / "s")
    assert any("do not compare their val" in note for note in summary.notes)
    assert report_tables.scores(summary).title == "Scores: val/acc, %"


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
    assert InMemoryDataModule(pair, num_clients=2, **options).validates_on_test is on_test


# -------------------------------------------------------------------------------------- tables


def test_an_equivalence_is_shown_with_the_interval_of_its_two_one_sided_tests(
    tmp_path: Path,
) -> None:
    seeds = range(6)
    differences = [float(v) for v in np.random.default_rng(3).normal(0.001, 0.004, len(seeds))]
    make_arm(tmp_path / "s", "old", dict.fromkeys(seeds, 0.7))
    make_arm(tmp_path / "s", "new", {seed: 0.7 + differences[seed] for seed in seeds})
    alike = "- {id: X, kind: equivalence, a: new, b: old, metric: val/acc, margin: 0.01}\n"
    (tmp_path / "s/claims.yaml").write_text(alike)
    summary = summary_of(tmp_path / "s")
    inner = stats.ttest_1samp(differences, 0).confidence_interval(0.9)
    outer = stats.ttest_1samp(differences, 0).confidence_interval(0.95)
    claim = summary.to_json()["claims"][0]
    assert [claim["low_90"], claim["high_90"]] == pytest.approx(inner, abs=1e-12)
    assert [claim["low"], claim["high"]] == pytest.approx(outer, abs=1e-12)
    # p is below 0.05 exactly where this interval lies within the margin.
    assert (claim["p"] < 0.05) == (max(map(abs, inner)) < 0.01)
    shown = " to ".join(f"{100 * end:+.2f}".replace("-", "−") for end in inner) + " (90 %)"
    assert cells(report_tables.claims(summary), "95 % interval") == [shown]
    # The figure has both: thin to 95 %, thick to 90 %.
    lines = figures.intervals(summary)[0].figure.axes[0].lines
    drawn = {line.get_linewidth(): line.get_xdata() for line in lines if len(line.get_xdata()) == 2}
    assert drawn[2.6] == pytest.approx([100 * end for end in inner])
    assert drawn[1.0] == pytest.approx([100 * end for end in outer])


def test_traffic_and_targets_are_compared_with_the_first_arm_of_the_sweep(tmp_path: Path) -> None:
    """Two sweeps whose rounds send very different numbers of bytes."""
    sent = {"small": {"fedavg": 10, "topk": 5}, "large": {"fedavg": 1000, "topk": 100}}
    for sweep, arms in sent.items():
        for arm, number in arms.items():
            for seed in range(2):
                values = {
                    "val/acc": [0.5, 0.6, 0.7],
                    "communication/total_bytes": [number * (t + 1) for t in range(3)],
                }
                make_run(tmp_path / sweep / arm / f"seed-{seed}", arm, seed, values, axes={})
        (tmp_path / sweep / "sweep.yaml").write_text(f"# {sweep}\n")
    joint = summary_of(*(tmp_path / sweep for sweep in sent), targets=["0.6"])
    expected = ["1.00 ×", "0.50 ×", "1.00 ×", "0.10 ×"]
    assert cells(report_tables.communication(joint), "× first arm") == expected
    assert cells(report_tables.communication(joint), "sent per round")[2:] == ["1 kB", "100 B"]
    assert cells(report_tables.targets(joint)[0], "sent, × first arm") == expected
    # All have three rounds, so at equal rounds there is nothing to compare.
    small, large = report_tables.budgets(joint)
    assert list(small.columns) == ["arm", "15 B sent"]
    # In large, 300 bytes are what top-k spends in all, and no whole round of FedAvg.
    assert cells(large, "300 B sent") == ["–", "70.00 ± 0.00"]


def test_equal_cost_scores_the_last_third_of_what_the_cheapest_run_spent(tmp_path: Path) -> None:
    """20 rounds of 10 gradients against 30 of 5."""
    rising = [0.01 * t for t in range(30)]
    machine = {"processor": "One", "cores": 2, "threads": 1, "memory": 2**33, "gpu": None}
    for arm, rounds, gradients in (("a", 20, 10.0), ("b", 30, 5.0)):
        values = {
            "val/acc": rising[:rounds],
            "cost/gradients": [gradients] * rounds,
            "communication/total_bytes": [800.0 * (t + 1) for t in range(rounds)],
            "time/cpu": [0.25 if arm == "a" else 0.5] * rounds,
            "time/round": [2.0] * rounds,
            # The clock of simulated devices is logged as the time since the beginning.
            "time/virtual": [(3.0 if arm == "a" else 1.0) * (t + 1) for t in range(rounds)],
        }
        for seed in (0, 1):
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, values, machine=machine)
    found = find([tmp_path / "s"])
    made = {view.axis: view for view in views(found.arms, "val/acc")}
    wanted = {  # the budget, and the rounds whose cost lies in (2/3, 1] of it
        "rounds": (20.0, range(13, 20), range(13, 20)),
        "gradients": (150.0, range(10, 15), range(20, 30)),
        "bytes": (16000.0, range(13, 20), range(13, 20)),
        "virtual": (30.0, range(6, 10), range(20, 30)),
        "seconds": (5.0, range(13, 20), range(6, 10)),
    }
    assert made.keys() == wanted.keys()
    for axis, (budget, *rows) in wanted.items():
        assert made[axis].budget == budget
        for arm, rounds in zip("ab", rows, strict=True):
            mean = sum(rising[t] for t in rounds) / len(rounds)
            assert made[axis].values[arm] == pytest.approx({0: mean, 1: mean}, abs=1e-12), axis
    summary = summarise(found, targets=["0.1"])
    heads = "20 rounds|150 gradients|16 kB sent|30.0 s of simulated devices|5 s of processor time"
    assert list(report_tables.budgets(summary)[0].columns)[1:] == heads.split("|")
    note = report_tables.runs(summary).note
    assert note == "4 runs were made on One, 2 cores, 1 thread, 8 GiB."
    summary.timed = False
    written = contents(summary, "s")
    assert "figures/curves-seconds.png" not in written and "figures/curves-rounds.png" in written
    text = written["report.md"].decode()
    assert "of processor time" not in text and "| time |" not in text
    # Seconds of several machines, or of one that is not known, are not compared.
    make_run(tmp_path / "s/a/seed-2", "a", 2, values)
    found = find([tmp_path / "s"])
    assert "seconds" not in {view.axis for view in views(found.arms, "val/acc")}
    note = report_tables.runs(summarise(found)).note
    assert note.endswith("1 run was made on a machine that was not recorded.")


def test_what_clients_have_is_what_the_run_logged_of_them(tmp_path: Path) -> None:
    for arm, level in (("a", 0.5), ("b", 0.6)):
        values = {
            "val/acc": [0.5] * 3,
            "clients/acc": [0.1, level, None],
            "clients/acc_worst10": [0.1, level - 0.2, None],
            "clients/acc_std": [0.3, level - 0.4, None],
            "domains/acc_worst": [0.1, 0.2, 0.3],
        }
        for seed in (0, 1):
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, values)
    make_run(tmp_path / "s/c/seed-0", "c", 0, {"val/acc": [0.5]})
    for metric in ("val/acc", "clients/acc_worst10"):
        arms = summary_of(tmp_path / "s", metric=metric).to_json()["arms"]
        assert "fairness" not in arms["c"]
        means = {name: of["mean"] for name, of in arms["b"]["fairness"].items()}
        wanted = {"mean": 0.6, "worst10": 0.4, "std": 0.2, "worst_domain": 0.3}
        assert means == pytest.approx(wanted)
    table = report_tables.clients(summary_of(tmp_path / "s"))
    assert table.title == "Fairness: acc of clients, %"
    best = {row[0].text: [cell.mark for cell in row[1:4]] for row in table.rows}
    assert best == {"a": ["", "best", ""], "b": ["best", "", "best"]}


def test_the_best_is_that_of_its_own_sweep(tmp_path: Path) -> None:
    for sweep, more in (("s", 0.0), ("t", 0.2)):
        for arm, level in (("a", 0.5), ("b", 0.6)):
            make_arm(tmp_path / sweep, f"{sweep}-{arm}", {0: level + more, 1: level + more})
    folders = [tmp_path / "s", tmp_path / "t"]

    def best() -> list[str]:
        table = report_tables.scores(summary_of(*folders))
        return [row[0].text for row in table.rows if row[1].mark == "best"]

    # Folders of runs that no sweep made are looked at together.
    assert best() == ["t-b"]
    for folder in folders:
        (folder / "sweep.yaml").write_text("configs: [base]\n")
    assert best() == ["s-b", "t-b"]


# ------------------------------------------------------------------------------------- figures


def test_each_sweep_has_a_panel_of_its_own(tmp_path: Path) -> None:
    """Fifty arms of eight sweeps in one panel would be no picture."""
    for sweep, arms in (("first", "ab"), ("second", "bcd"), ("short", "e")):
        rounds = 1 if sweep == "short" else 6
        for number, arm in enumerate(arms):
            values = {
                "val/acc": np.linspace(0.1, 0.5 + number / 10, rounds).tolist(),
                "train/loss": np.linspace(2, 1 + number, rounds).tolist(),
                "hessian/trace": [*[None] * (rounds - 1), 7.0 + number],
            }
            make_run(tmp_path / f"{sweep}/{arm}/seed-0", arm, 0, values)
        (tmp_path / sweep / "sweep.yaml").write_text(f"configs: [base]\n# {sweep}\n")
    summary = summary_of(*(tmp_path / name for name in ("first", "second", "short")))
    (drawing,) = figures.curves(summary)
    told = {}
    for axes in drawing.figure.axes:
        told[axes.get_title("left")] = [text.get_text() for text in axes.get_legend().get_texts()]
        ticks = axes.get_xticks()
        assert np.array_equal(ticks, np.round(ticks)), "rounds have whole ticks"
    # One round makes no curve.
    assert told == {"first": ["a", "first/b"], "second": ["second/b", "c", "d"]}
    titles = [each.title.partition(": ")[2] for each in figures.measurements(summary)]
    assert titles == ["first", "second", "short"]
    trace = figures.measurements(summary)[1].figure.axes[-1]
    assert "trace" in trace.get_title("left")
    assert [line.get_marker() for line in trace.lines] == ["o"] * 3, "one value is to be seen"


def test_the_axis_of_a_difference_names_its_arms_or_its_cost(tmp_path: Path) -> None:
    values = {"val/acc": [0.1, 0.5, 0.9], "communication/total_bytes": [1.0, 2.0, 3.0]}
    for arm in ("fedavg", "ours"):
        for seed in (0, 1):
            make_run(tmp_path / "s" / arm / f"seed-{seed}", arm, seed, values)
    (drawing,) = figures.intervals(summary_of(tmp_path / "s"))
    label = drawing.figure.axes[0].get_xlabel()
    assert label.startswith("val/acc: ours minus fedavg, in percentage points"), label
    shared = {"a": "ours", "b": "fedavg", "metric": "val/acc", "direction": "less", "margin": 0.0}
    claims = [
        {"id": "B", "kind": "to_target", "target": 0.4, "cost": "bytes", **shared},
        {"id": "R", "scale": "log_ratio", **shared},
    ]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(claims))
    (drawing,) = figures.intervals(summary_of(tmp_path / "s", claims=tmp_path / "c.yaml"))
    labels = [axes.get_xlabel() for axes in drawing.figure.axes]
    assert labels[0] == "bytes until the target in val/acc: log(a / b)"
    assert labels[1].startswith("val/acc: log(a / b) (mean over")


# --------------------------------------------------------------------------------------- LaTeX

PAPER = r"""\documentclass{article}
\usepackage{booktabs}
\usepackage{graphicx}
\begin{document}
\input{report.tex}
\end{document}
"""
NAMES = (r"a=a_b & 50% $x$ #1 {y} ~^\ -- <b>é</b>", "b=β → ∞, γη² ≥ Ω, a long name indeed")


@pytest.mark.skipif(
    not shutil.which("pdflatex"),
    reason="pdflatex is not installed (Debian: texlive-latex-recommended)",
)
def test_tables_with_any_label_compile_and_fit_the_page(tmp_path: Path) -> None:
    for arm in "ab":
        make_arm(tmp_path / "s", arm, LEVELS)
    options = [option for label in NAMES for option in ("--label", label)]
    report(tmp_path / "out", tmp_path / "s", *options)
    (tmp_path / "out/paper.tex").write_text(PAPER)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path / "out", capture_output=True)
    said = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, said[-2000:]
    assert "Overfull" not in said and "Undefined" not in said


def test_wide_tables_are_scaled_and_long_texts_broken(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", LEVELS)
    report(tmp_path / "out", tmp_path / "s")
    lines = (tmp_path / "out/report.tex").read_text().splitlines()
    assert lines[0].startswith(r"% This file needs \usepackage{booktabs} and \usepackage{graphicx}")
    tables = [place for place, line in enumerate(lines) if r"\begin{tabular}" in line]
    assert tables
    assert [line for line in lines if r"\end{tabular}" in line] == [r"\end{tabular}}"] * len(tables)
    for place in tables:
        assert lines[place - 1].startswith(r"\resizebox{\ifdim\width>\linewidth\linewidth\else")
    table = Table("t", "", ["arm", "said", "n"], [["a", "many words " * 9, "5"]])
    assert widths(table) == ["l", r"p{0.3\linewidth}", "r"]
    said = breakable("in runs/of/many/names_of/fedavg/seed-1 a_b")
    assert said.split(r"\allowbreak{}") == [
        *("in runs/", "of/", "many/", r"names\_", "of/", "fedavg/", r"seed-1 a\_b")
    ]
    assert tex("ρ Ω λ² σ⁹") == r"$\rho$ $\Omega$ $\lambda$$^2$ $\sigma$$^9$"
