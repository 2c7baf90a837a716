"""Links between the repository's own files lead somewhere without the site, as on a code host."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!`)\[[^]]*\]\(([^)\s]+)\)")

# Texts of a generated page, which their links start from.
PART_OF = {"studies/results/findings.md": "studies/results.md"}


def tracked() -> set[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    return {ROOT / name for name in listed.stdout.split("\0") if name}


def anchors(page: str) -> set[str]:
    """The anchors that a code host gives the headings of ``page``."""
    headings = re.findall(r"^#+ +(.+?) *$", FENCED.sub("", page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def dead(page: Path, text: str, files: set[Path]) -> Iterator[str]:
    for target in LINK.findall(FENCED.sub("", text)):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if file not in files and not any(file in each.parents for each in files):
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(text if not path else file.read_text("utf-8")):
            yield f"{target}: no such heading"


def test_every_relative_link_leads_to_a_file_and_a_heading_of_the_repository() -> None:
    files = tracked()
    pages = [path for path in files if path.suffix == ".md" and path.is_file()]
    assert len(pages) > 40
    found = []
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        place = ROOT / PART_OF.get(name, name)
        found += [f"{name}: {link}" for link in dead(place, page.read_text("utf-8"), files)]
    assert not found


def test_dead_links_are_seen() -> None:
    page = ROOT / "docs/index.md"
    text = "# A b\n[a](#a-b) [b](#b) [c](generated/x.md) [d](first_run.md#no) [e](https://e.org)"
    assert list(dead(page, text, {page, ROOT / "docs/first_run.md"})) == [
        "#b: no such heading",
        "generated/x.md: no such file",
        "first_run.md#no: no such heading",
    ]
