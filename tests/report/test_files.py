"""What a reader opens: one page that asks nothing of the network, tables in three forms, figures,
published numbers."""

from __future__ import annotations

import csv
import html
import re
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from folders import make_arm, make_run, report

from fl_lightning.__main__ import main
from fl_lightning.lab.report import charts
from fl_lightning.lab.report.budgets import views
from fl_lightning.lab.report.drawing import GRID, INK
from fl_lightning.lab.report.report_tables import communication, targets
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import summarise

LEVELS = {0: 0.70, 1: 0.72, 2: 0.69}


def columns(
    level: float, rounds: int = 20, vectors: int = 1, gradients: int = 10
) -> dict[str, list[float]]:
    return {
        "val/acc": [min(level, 0.2 + 0.1 * t) for t in range(rounds)],
        "train/loss": [2.0 / (t + 1) for t in range(rounds)],
        "communication/total_bytes": [800.0 * vectors * (t + 1) for t in range(rounds)],
        "communication/up_parameters": [100.0 * vectors * (t + 1) for t in range(rounds)],
        "cost/gradients": [float(gradients)] * rounds,
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
        make_run(
            folder / f"fed<smoo>/seed-{seed}",
            "fed<smoo>",
            seed,
            columns(level + 0.05, vectors=2),
            status,
        )
    make_run(folder / "fed<smoo>/seed-3", "fed<smoo>", 3, columns(0.5, 7), "running")
    for arm, methods in (
        ("fedavg", []),
        ("fed<smoo>", ["DynamicRegularization", "GlobalSharpnessAwareMinimization"]),
    ):
        for run in (folder / arm).iterdir():
            config = {
                "method": [{"class_path": f"fl_lightning.callbacks.x.{name}"} for name in methods]
            }
            (run / "config.yaml").write_text(
                yaml.safe_dump({"model": {"participation": 0.1}, **config})
            )
    return folder


class Page(HTMLParser):
    """Ids, references and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.asked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(str(value))
            if name in ("src", "href", "xlink:href", "action", "srcset") or tag in (
                "link",
                "iframe",
                "object",
            ):
                self.asked.append(str(value))


def test_the_page_is_whole_by_itself(sweep: Path, tmp_path: Path) -> None:
    report(tmp_path / "out", sweep, "--targets", "0.6", figures="svg")
    text = (tmp_path / "out/report.html").read_text()
    page = Page(text)
    assert all(place.startswith("#") for place in page.asked), page.asked
    assert not re.findall(r"@import|url\((?!#)|fetch\(|https?://(?!www\.w3\.org/)", text)
    assert len(page.ids) == len(set(page.ids)) and {place[1:] for place in page.asked} <= set(
        page.ids
    )
    assert "fed<smoo>" not in text and "fed&lt;smoo&gt;" in text
    # Ink and grid of the figures follow the page's light or dark theme.
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert INK not in drawn and GRID not in drawn and "currentColor" in drawn
    # 4 curves, intervals, heat map, layers, measurements
    assert text.count("<figure>") == text.count("<svg") == 8
    assert "smoothed by a Hanning window of 3 values" in text  # of 20
    assert (
        "70.00" in text
        and "diverged with seed 2" in text
        and "fed&lt;smoo&gt;, seed 3: running" in text
    )


def test_figures_tables_and_rows_lie_beside_it(sweep: Path, tmp_path: Path) -> None:
    found = report(tmp_path / "out", sweep, "--targets", "0.6", figures="png,svg,pdf")
    figures = sorted((tmp_path / "out/figures").iterdir())
    names = {path.stem for path in figures}
    curves = {f"curves-{axis}" for axis in ("rounds", "gradients", "bytes", "seconds")}
    assert names == {"intervals", "heatmap", "consensus", "measurements", *curves}
    assert len(figures) == 3 * len(names)
    for path in figures:
        data = path.read_bytes()
        if path.suffix == ".svg":
            assert ElementTree.fromstring(data).tag.endswith("svg")
        else:
            assert data.startswith({".png": b"\x89PNG", ".pdf": b"%PDF"}[path.suffix])
    markdown, latex = ((tmp_path / f"out/report.{kind}").read_text() for kind in ("md", "tex"))
    assert "| fedavg | **70.33 ± 1.53** |" in markdown
    assert set(re.findall(r"\]\(figures/([\w-]+)\.png\)", markdown)) == names
    made = len(re.findall(r"^\|---", markdown, re.MULTILINE))
    assert latex.count(r"\begin{table}") == latex.count(r"\bottomrule") == made > 4
    assert not re.search(
        r"[±×−–≥_](?<!\\_)", re.sub(r"\\label\{.*?\}", "", latex).replace(r"\_", "")
    )
    with open(tmp_path / "out/report.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 7 and rows[0]["last10"] == repr(
        found["arms"]["fed<smoo>"]["scores"]["last10"]["values"]["0"]
    )


def test_both_conventions_of_communication(sweep: Path) -> None:
    """FedSMOO sends 2 vectors up and down: twice by messages, twice by the papers' count.

    The target halves it.
    """
    summary = summarise(find([sweep / "fedavg", sweep / "fed<smoo>"]), targets=["0.55"])
    first, second = communication(summary).rows
    assert [cell.text for cell in first] == ["fedavg", "800 B", "1.00 ×", "1", "1.00 ×"]
    assert [cell.text for cell in second] == ["fed<smoo>", "1.6 kB", "2.00 ×", "2", "2.00 ×"]
    (until,) = targets(summary)
    assert [cell.text for cell in until.rows[1]][4:] == ["2 of 3", "2.00 ×", "2.00 ×"]


@pytest.mark.parametrize("beside", ["", "PartialAveraging", "ControlVariates"])
def test_what_papers_would_count_of_a_method_of_ones_own_is_not_known(
    tmp_path: Path, beside: str
) -> None:
    """Not even where it has the name of one of ours."""
    ours = "fl_lightning.callbacks.x"
    own = ["mine.DynamicRegularization", *([f"{ours}.{beside}"] if beside else [])]
    for arm, paths in (("a", [f"{ours}.ControlVariates"]), ("own", own)):
        folder = make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, columns(0.7, vectors=2))
        config = {"method": [{"class_path": path} for path in paths]}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    report(tmp_path / "out", tmp_path / "s", "--targets", "0.6")
    for kind in ("md", "tex", "html"):
        text = html.unescape((tmp_path / f"out/report.{kind}").read_text())
        text = text.replace("*", "").replace(r"$\times$", "×").replace(r"\textendash{}", "–")
        text = re.sub(r"</t[dh]><t[dh][^>]*>| & ", " | ", text)
        assert "a | 1.6 kB | 1.00 × | 2 | 1.00 ×" in text, kind
        assert "own | 1.6 kB | 1.00 × | – | –" in text, kind
        assert "| 1 of 1 | 1.00 × | –" in text and "| 1 of 1 | 1.00 × | 1.00 ×" in text, kind
        said = "does not know the papers' count for a method that is not part of this package"
        assert text.count(said) == 2, kind


def test_consensus_by_layer_is_averaged_over_rounds_and_seeds(sweep: Path, tmp_path: Path) -> None:
    report(tmp_path / "out", sweep)
    text = (tmp_path / "out/report.md").read_text()
    rows = text[text.index(r"| layer | fed&lt;smoo> | fedavg |") :].splitlines()[2:4]
    assert rows == ["| conv | 0.15 | 0.15 |", "| fc | 0.2 | 0.2 |"]


def test_the_gap_is_drawn_over_the_training_loss_of_the_rounds_that_measured_both(
    sweep: Path, tmp_path: Path
) -> None:
    assert charts.generalisation(summarise(find([sweep]))) == []
    for seed, status in ((0, "done"), (1, "done"), (2, "diverged")):
        measured = {
            "val/acc": [0.5] * 4,
            "global/train_loss": [None, 0.8, None, 0.4 - 0.2 * seed],
            "global/gap": [None, 0.1, None, 0.3 + 0.2 * seed],
        }
        make_run(tmp_path / f"g/a/seed-{seed}", "a", seed, measured, status)
    make_run(tmp_path / "g/b/seed-0", "b", 0, {"val/acc": [0.5] * 4})
    (drawing,) = charts.generalisation(summarise(find([tmp_path / "g"])))
    (line,) = drawing.figure.axes[0].lines
    np.testing.assert_allclose(line.get_xydata(), [[0.8, 0.1], [0.3, 0.4]])

    far = {"val/acc": [0.5], "global/train_loss": [9.0], "global/gap": [90.0]}
    make_run(tmp_path / "g/c/seed-0", "c", 0, far)
    assert (
        len(charts.generalisation(summarise(find([tmp_path / "g"])))[0].figure.axes[0].lines) == 2
    )
    claim = "- {id: X, a: a, b: b, metric: global/gap, direction: less, margin: 0}\n"
    (tmp_path / "g/claims.yaml").write_text(claim)
    claimed = summarise(find([tmp_path / "g"]), "val/acc", [], None)
    assert len(charts.generalisation(claimed)[0].figure.axes[0].lines) == 1


def test_figures_are_written_as_asked(tmp_path: Path) -> None:
    make_arm(tmp_path / "s", "a", LEVELS)
    report(tmp_path / "out", tmp_path / "s", figures="svg")
    written = {path.name for path in (tmp_path / "out/figures").iterdir()}
    assert written and all(name.endswith(".svg") for name in written)
    shown = re.findall(r"\]\(figures/([\w.-]+)\)", (tmp_path / "out/report.md").read_text())
    assert set(shown) == written
    report(tmp_path / "none", tmp_path / "s", figures="none")
    assert not (tmp_path / "none/figures").exists()
    assert "<svg" not in (tmp_path / "none/report.html").read_text()
    said = (tmp_path / "out/report.json").read_bytes()
    assert (tmp_path / "none/report.json").read_bytes() == said


def test_another_form_of_figures_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path), "--figures", "png,gif"]) == 2
    assert (
        "'gif' is not one of png, svg, pdf. Accepted: one or more of these"
        in capsys.readouterr().err
    )


def test_the_page_shows_every_figure_that_is_written(tmp_path: Path) -> None:
    measured = {
        **columns(0.7),
        "global/train_loss": [1.0 / (t + 1) for t in range(20)],
        "global/gap": [0.1] * 20,
    }
    for arm in ("a", "b"):
        for seed in (0, 1):
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, measured)
    report(tmp_path / "out", tmp_path / "s", figures="svg")
    page = (tmp_path / "out/report.html").read_text()
    written = {path.stem for path in (tmp_path / "out/figures").glob("*.svg")}
    assert "generalisation" in written and page.count("<figure>") == len(written)


def test_equal_cost_scores_the_last_third_of_what_the_cheapest_run_spent(tmp_path: Path) -> None:
    """20 rounds of 10 gradients against 30 of 5.

    Nothing that a run did later than the budget counts.
    """
    rising = [0.01 * t for t in range(30)]
    for seed in (0, 1):
        spent = {
            "started": f"2026-01-0{seed + 1}T00:00:00+00:00",
            "ended": f"2026-01-0{seed + 1}T01:00:00+00:00",
        }
        for arm, rounds, gradients in (("a", 20, 10.0), ("b", 30, 5.0)):
            columns = {
                "val/acc": rising[:rounds],
                "cost/gradients": [gradients] * rounds,
                "communication/total_bytes": [800.0 * (t + 1) for t in range(rounds)],
                "time/round": [0.5] * rounds,
                "time/cpu": [0.25 if arm == "a" else 0.5] * rounds,
                # The clock of simulated devices is logged as the time since the beginning.
                "time/virtual": [(3.0 if arm == "a" else 1.0) * (t + 1) for t in range(rounds)],
            }
            make_run(tmp_path / f"s/{arm}/seed-{seed}", arm, seed, columns, **spent)
    found = {view.axis: view for view in views(find([tmp_path / "s"]).arms, "val/acc")}
    budgets = {axis: view.budget for axis, view in found.items()}
    assert budgets == {
        "rounds": 20.0,
        "gradients": 150.0,
        "bytes": 16000.0,
        "virtual": 30.0,
        "seconds": 5.0,
    }
    wanted = {  # rounds whose cost lies in (2/3, 1] of the budget
        "rounds": (range(13, 20), range(13, 20)),
        "gradients": (range(10, 15), range(20, 30)),
        "bytes": (range(13, 20), range(13, 20)),
        "virtual": (range(6, 10), range(20, 30)),
        "seconds": (range(13, 20), range(6, 10)),
    }
    for axis, rows in wanted.items():
        for arm, rounds in zip("ab", rows, strict=True):
            mean = sum(rising[t] for t in rounds) / len(rounds)
            assert found[axis].values[arm] == pytest.approx({0: mean, 1: mean}, abs=1e-12), (
                axis,
                arm,
            )
    report(tmp_path / "out", tmp_path / "s")
    columns = "20 rounds | 150 gradients | 16 kB sent | 30.0 s of simulated devices | "
    columns += "5 s of processor time |"
    assert f"| arm | {columns}" in (tmp_path / "out/report.md").read_text()


@pytest.mark.parametrize("overlap", [False, True])
def test_seconds_of_the_clock_are_compared_of_runs_that_were_alone(
    tmp_path: Path, overlap: bool
) -> None:
    for number, arm in enumerate("ab"):
        began, ended = (
            f"2026-01-01T0{hour}:00:00+00:00" for hour in (number, number + 1 + overlap)
        )
        columns = {"val/acc": [0.5] * 9, "time/round": [1.0] * 9}
        make_run(tmp_path / f"s/{arm}/seed-0", arm, 0, columns, started=began, ended=ended)
    found = [view.axis for view in views(find([tmp_path / "s"]).arms, "val/acc")]
    assert found == (["rounds"] if overlap else ["rounds", "seconds"])


def test_a_grid_of_two_axes_is_drawn_as_one(tmp_path: Path) -> None:
    for arm in ("iid_0", "iid_0.1", "skew_0", "skew_0.1"):
        make_arm(tmp_path / "s", arm, LEVELS)
    report(tmp_path / "out", tmp_path / "s", figures="svg")
    drawn = (tmp_path / "out/figures/heatmap.svg").read_text()
    assert (
        all(f">{name}<" in drawn for name in ("iid", "skew", "0", "0.1")) and "seed 0" not in drawn
    )


@pytest.mark.parametrize(
    "grid, rows, columns",
    [
        ({"method": "ab", "data.partition.alpha": ["0.1", "1.0"]}, "", "partition alpha"),
        ({"method.beta": ["0", "0.1"], "data.n_k": ["1", "2"]}, "method beta", "data n_k"),
        # An axis of one value does not stand in an arm's name.
        ({"method": "a", "data.partition.alpha": ["0.1", "1.0"]}, "partition alpha", ""),
        ({"method": "ab", "seeds": ["0"]}, "", ""),
        ({"x": "ab", "y": "cd", "z": "ef"}, "x × y", "z"),
    ],
)
def test_a_heat_map_names_the_axes_of_the_grid(
    tmp_path: Path, grid: dict[str, Any], rows: str, columns: str
) -> None:
    several = [axis for axis, values in grid.items() if len(values) > 1]
    for values in product(*grid.values()):
        axes = dict(zip(grid, values, strict=True))
        make_arm(tmp_path / "s", "_".join(axes[axis] for axis in several), LEVELS, axes=axes)
    (drawing,) = charts.heat_map(summarise(find([tmp_path / "s"])))
    (drawn,) = drawing.figure.axes
    assert (drawn.get_ylabel(), drawn.get_xlabel()) == (rows, columns)


def test_a_heat_map_over_sweeps_of_other_axes_names_none(tmp_path: Path) -> None:
    for arm, axes in (("a", {"method": "a"}), ("b", {"method": "b"}), ("1", {"data.n": "1"})):
        make_arm(tmp_path / "s", arm, LEVELS, axes=axes)
    make_arm(tmp_path / "s", "2", LEVELS, axes={"data.n": "2"})
    (drawing,) = charts.heat_map(summarise(find([tmp_path / "s"])))
    (drawn,) = drawing.figure.axes
    assert (drawn.get_ylabel(), drawn.get_xlabel()) == ("", "")


def test_arms_are_called_by_their_labels_where_a_reader_looks(tmp_path: Path) -> None:
    for arm, more in (("fedavg", 0.0), ("mine_2", 0.05)):
        make_arm(tmp_path / "s", arm, {seed: level + more for seed, level in LEVELS.items()})
    plain = report(tmp_path / "plain", tmp_path / "s")
    options = ["--label", "mine_2=FedMine, β = 2", "--label", "fedavg=FedAvg"]
    labelled = report(tmp_path / "out", tmp_path / "s", *options, figures="svg")
    assert labelled == plain, "report.json keeps the arms"
    for name in ("report.csv", "report.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    for name in ("report.md", "report.html", "figures/curves-rounds.svg", "figures/intervals.svg"):
        text = (tmp_path / "out" / name).read_text()
        assert "FedMine, β = 2" in text and "mine_2 −" not in text, name
    assert "| FedMine, β = 2 − FedAvg |" in (tmp_path / "out/report.md").read_text()


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


def test_nothing_of_an_earlier_report_stays_beside_a_new_one(sweep: Path) -> None:
    report(sweep, sweep, figures="png,svg")
    figures = sweep / "figures"
    assert (figures / "consensus.png").is_file()
    (figures / "own.png").write_bytes(b"mine")
    (sweep / "pivot.csv").write_text("of other settings")
    report(sweep, sweep, figures="svg")
    names = {path.name for path in figures.iterdir()}
    assert "consensus.svg" in names and not (sweep / "pivot.csv").exists()
    assert {name for name in names if name.endswith(".png")} == {"own.png"}


def test_a_label_with_any_character_is_shown_as_it_is(tmp_path: Path) -> None:
    label = r"$x_1^2$ 5% #1 & <b>\frac{a}{b}</b> ~`*|"
    make_arm(tmp_path / "s", "a", LEVELS)
    make_arm(tmp_path / "s", "b", LEVELS)
    report(tmp_path / "out", tmp_path / "s", "--label", f"a={label}", figures="svg")
    page = (tmp_path / "out/report.html").read_text()
    assert label in html.unescape(page) and "<b>" not in page
    figures = [path.read_text() for path in (tmp_path / "out/figures").glob("*.svg")]
    assert any(label in html.unescape(figure) for figure in figures)
    latex = (tmp_path / "out/report.tex").read_text()
    escaped = r"\$x\_1\textasciicircum{}2\$ 5\% \#1 \& $<$b$>$\textbackslash{}frac\{a\}\{b\}"
    assert escaped in latex
    in_cell = r"| \$x_1^2\$ 5% #1 & &lt;b>\\frac{a}{b}&lt;/b> \~\`\*\| |"
    assert in_cell in (tmp_path / "out/report.md").read_text()
