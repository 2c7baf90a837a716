"""docs/which_method.md says nothing that another table of the docs does not say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "which_method.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S))
COSTS = {"down": 4, "up": 5, "client keeps": 6, "gradients": 8}  # columns of docs/methods.md


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def costs() -> dict[str, list[str]]:
    """The cells of the table of costs by config; of several rows the one of its defaults."""
    found: dict[str, list[str]] = {}
    for row in (DOCS / "methods.md").read_text("utf-8").splitlines():
        if named := re.match(r"\| [^|]+ \| `(\w+)` \|", row):
            found.setdefault(named[1], cells(row))
    return found


@pytest.mark.parametrize("title", [t for t, text in SECTIONS.items() if "\n|---" in text])
def test_each_number_stands_in_the_table_that_its_section_links_to(title: str) -> None:
    text = SECTIONS[title]
    (linked,) = re.findall(r"\(\[[^]]+\]\(([\w./]+\.md)", text)[:1]
    source = (DOCS / linked).read_text("utf-8")
    header, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    known = costs()
    for row in rows:
        for name, cell in zip(cells(header)[1:], cells(row)[1:], strict=True):
            if name in COSTS:
                assert cell == known[cells(row)[0].strip("`")][COSTS[name]], (row, name)
            else:
                assert cell.removesuffix(" %") in source, (row, name)
    # What is said below the table, too; a paper's setting stands in whole words.
    for number in re.findall(r"[+−]?\d+\.\d\d", "".join(text.split("\n\n- ")[1:])):
        assert number in source, number
