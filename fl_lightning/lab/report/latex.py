"""Texts and tables in the form that LaTeX prints."""

from __future__ import annotations

import re

from fl_lightning.lab.report.cells import Table
from fl_lightning.machine.escaping import plain

GREEK = "αβγδεζηθικλμνξπρςστυφχψωΓΔΘΛΞΠΣΦΨΩ"
GREEK_NAMES = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi pi rho varsigma "
    "sigma tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega"
)
# Characters that LaTeX would not print literally.
_TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        **{character: f"\\{character}" for character in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": r"\textendash{}",
        "±": r"$\pm$",
        "×": r"$\times$",
        "−": "$-$",
        "<": "$<$",
        ">": "$>$",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "·": r"$\cdot$",
        "‖": r"$\|$",
        "→": r"$\to$",
        "∞": r"$\infty$",
        "≈": r"$\approx$",
        **{sign: f"$\\{name}$" for sign, name in zip(GREEK, GREEK_NAMES.split(), strict=True)},
        **{raised: f"$^{number}$" for number, raised in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    }
)
# Break longer texts into lines, and also longer words in them and longer column names.
LONG_TEXT = 40
LONG_WORD = 25
LONG_NAME = 15


def tex(text: str) -> str:
    """Return text that LaTeX prints unchanged.

    >>> print(tex("val/acc, 75.95 ± 0.19 % of fedinit_0.1"))
    val/acc, 75.95 $\\pm$ 0.19 \\% of fedinit\\_0.1
    """
    # LaTeX would turn two hyphens of a name into one dash.
    return plain(text).translate(_TEX).replace("--", "-{}-")


def widths(table: Table) -> list[str]:
    """Return LaTeX's columns of a table: long texts, such as claims' sentences, are broken into
    lines.
    """
    columns = []
    for place in range(len(table.columns)):
        longest = max((len(row[place].text) for row in table.rows), default=0)
        narrow = "r" if place else "l"
        columns.append("p{0.3\\linewidth}" if longest > LONG_TEXT else narrow)
    return columns


def heading(name: str) -> str:
    """Return a column's name, in two lines if it is long.

    >>> print(heading("last third of gradients"))
    \\shortstack{last third\\\\of gradients}
    """
    words = name.split()
    if len(name) <= LONG_NAME or len(words) < 2:
        return tex(name)
    halves = []
    for number in range(1, len(words)):
        halves.append((" ".join(words[:number]), " ".join(words[number:])))
    above, below = min(halves, key=lambda half: max(map(len, half)))
    return rf"\shortstack{{{tex(above)}\\{tex(below)}}}"


def breakable(text: str) -> str:
    """Return the text of a cell, in which long words, such as a run's folder, may continue on
    the next line.
    """
    words = []
    for word in text.split(" "):
        parts = re.split("(?<=[/=,_])(?=.)", word) if len(word) > LONG_WORD else [word]
        words.append(r"\allowbreak{}".join(map(tex, parts)))
    return " ".join(words)
