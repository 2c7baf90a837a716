"""The site is built without a warning, and a reader without a network misses nothing."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXTRA = ("sphinx", "furo", "myst_parser", "sphinx_gallery", "sphinx_copybutton")
ABSENT = [name for name in EXTRA if importlib.util.find_spec(name) is None]

# What a browser fetches of itself when it shows a page.
FETCHED = {"link": "href", "object": "data", "use": "href"}
FETCHED |= dict.fromkeys(("script", "img", "source", "iframe", "video"), "src")


class Fetched(HTMLParser):
    """The addresses that a page has fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == FETCHED.get(tag) and value:
                self.found.append(value)
            if name == "srcset" and value:
                self.found.extend(part.split()[0] for part in value.split(","))


def foreign(site: Path) -> Iterator[str]:
    """Everything in the pages and styles of `site` that is fetched from another host."""
    elsewhere = re.compile(r"(https?:)?//", re.IGNORECASE)
    for path in site.rglob("*.html"):
        page = Fetched()
        page.feed(path.read_text("utf-8"))
        yield from (f"{path.name}: {url}" for url in page.found if elsewhere.match(url))
    for path in [*site.rglob("*.css"), *site.rglob("*.html")]:
        text = path.read_text("utf-8")
        for url in re.findall(r"(?:@import\s+|url\()\s*[\"']?([^\"')\s]+)", text):
            if elsewhere.match(url):
                yield f"{path.name}: {url}"


@pytest.mark.slow
@pytest.mark.skipif(bool(ABSENT), reason=f"{ABSENT} not installed: pip install -e '.[docs]'")
def test_the_site_builds_without_warnings_and_fetches_nothing(python: str, tmp_path: Path) -> None:
    # What a build writes beside the pages must not meet another build's.
    for folder in ("docs", "examples", "configs", "studies"):
        passed = shutil.ignore_patterns("generated", "__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=passed)
    for page in ("CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / page, tmp_path)
    site = tmp_path / "site"
    command = [python, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [*command, str(tmp_path / "docs"), str(site)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert not list(foreign(site))
    assert "<math" in (site / "methods/drift.html").read_text("utf-8")
    llms = (site / "llms.txt").read_text("utf-8")
    listed = re.findall(r"\]\((_sources/\S+)\)", llms)
    assert len(listed) > 20 and all((site / path).is_file() for path in listed)


def test_what_a_page_fetches_from_elsewhere_is_seen(tmp_path: Path) -> None:
    page = '<link href="https://fonts.example/a.css"><a href="https://paper.example">paper</a>'
    (tmp_path / "a.html").write_text(page + '<img srcset="a.png, //b.example/c.png 2x">')
    (tmp_path / "b.css").write_text("@import 'http://c.example/d.css'; p {background: url(e.png)}")
    assert sorted(foreign(tmp_path)) == [
        "a.html: //b.example/c.png",
        "a.html: https://fonts.example/a.css",
        "b.css: http://c.example/d.css",
    ]


def test_every_example_has_its_picture_and_its_sentence() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert {path.stem for path in (DOCS / "gallery").glob("*.png")} == names
    assert {path.stem for path in (DOCS / "gallery").glob("*.txt")} == names


@pytest.mark.skipif(bool(ABSENT), reason=f"{ABSENT} not installed: pip install -e '.[docs]'")
def test_norms_beside_a_sum_stay_as_high_as_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    drawn = importlib.import_module("mathml").drawn
    norm = drawn(r"\sum_i \lVert u_i \rVert \; \left( \frac{1}{2} \right)", block=True)
    expected = [' stretchy="false" form="prefix"', ' stretchy="false" form="postfix"']
    assert re.findall(r"<mo([^>]*)>‖", norm) == expected
    assert "<mo>(</mo>" in norm and "<mo>)</mo>" in norm
    assert 'form="infix">‖' in drawn(r"\left( p \, \Vert \, q \right)", block=True)
    (rounded,) = re.findall(r"<mo([^>]*)>⌋", drawn(r"\lfloor r_j \rfloor", block=False))
    assert rounded == ' stretchy="false" form="postfix"'
