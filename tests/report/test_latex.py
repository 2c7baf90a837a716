"""report.tex in a paper: it compiles, and no table is wider than the text."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from folders import make_arm

from fl_lightning.__main__ import main
from fl_lightning.lab.report.cells import Table
from fl_lightning.lab.report.latex import breakable, heading, tex, widths

LEVELS = {0: 0.5, 1: 0.6}
LABELS = (
    r"a=a_b & 50% $x$ #1 {y} ~^\ -- <b>é</b>",
    "b=β → ∞, γη² ≥ Ω, a long name of an arm indeed",
)
PAPER = r"""\documentclass{article}
\usepackage{booktabs}
\usepackage{graphicx}
\begin{document}
\input{report.tex}
\end{document}
"""


@pytest.fixture
def latex(tmp_path: Path) -> Path:
    for arm in "ab":
        make_arm(tmp_path / "s", arm, LEVELS)
    options = [option for label in LABELS for option in ("--label", label)]
    out = tmp_path / "out"
    asked = ["report", str(tmp_path / "s"), "--out", str(out), "--figures", "none", *options]
    assert main(asked) == 0
    return out / "report.tex"


@pytest.mark.skipif(
    not shutil.which("pdflatex"),
    reason="pdflatex is not installed (Debian: texlive-latex-recommended)",
)
def test_tables_with_any_label_compile_and_fit_the_page(latex: Path) -> None:
    (latex.parent / "paper.tex").write_text(PAPER)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=latex.parent, capture_output=True)
    said = done.stdout.decode("utf-8", "replace")
    assert done.returncode == 0, said[-2000:]
    assert "Overfull" not in said and "Undefined" not in said


def test_every_table_is_scaled_to_the_text_where_it_is_wider(latex: Path) -> None:
    lines = latex.read_text().splitlines()
    assert lines[0].startswith(r"% This file needs \usepackage{booktabs} and \usepackage{graphicx}")
    tables = [place for place, line in enumerate(lines) if r"\begin{tabular}" in line]
    ends = [line for line in lines if r"\end{tabular}" in line]
    assert len(tables) > 3 and ends == [r"\end{tabular}}"] * len(tables)
    for place in tables:
        assert lines[place - 1].startswith(r"\resizebox{\ifdim\width>\linewidth\linewidth\else")


def test_long_texts_are_broken_and_every_greek_letter_is_printed() -> None:
    table = Table("t", "", ["arm", "said", "n"], [["a", "many words " * 9, "5"]])
    assert widths(table) == ["l", r"p{0.3\linewidth}", "r"]
    assert (
        heading("runs") == "runs"
        and heading("a_b_of_one_long_word") == r"a\_b\_of\_one\_long\_word"
    )
    assert heading("smoothed, best of last 50") == r"\shortstack{smoothed, best\\of last 50}"
    assert breakable("runs/a/seed-1") == "runs/a/seed-1"
    said = breakable("in runs/of/many/names_of/fedavg/seed-1 a_b")
    assert said.split(r"\allowbreak{}") == [
        *("in runs/", "of/", "many/", r"names\_", "of/", "fedavg/", r"seed-1 a\_b")
    ]
    assert tex("ρ Ω λ² σ⁹") == r"$\rho$ $\Omega$ $\lambda$$^2$ $\sigma$$^9$"
