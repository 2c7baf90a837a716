"""The lines of code that the pages of methods show beside the equations are the ones that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fl_lightning.testing import check_method
from tests.helpers import clipped_median

ROOT = Path(__file__).parents[2]
PAGES = [
    path.read_text(encoding="utf-8")
    for path in [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/methods").glob("*.md")]
]
BLOCKS = [
    block for page in PAGES for block in re.findall(r"```python (\S+)\n(.*?)```", page, re.DOTALL)
]


@pytest.mark.parametrize("path, code", BLOCKS, ids=[path for path, _ in BLOCKS])
def test_lines_shown_are_lines_of_the_file(path: str, code: str) -> None:
    lines = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
    missing = [line for line in code.splitlines() if line.strip() not in lines]
    assert not missing


def test_the_method_that_the_docs_write_out_is_short_and_keeps_the_contracts() -> None:
    assert len(Path(clipped_median.__file__).read_text(encoding="utf-8").splitlines()) <= 50
    report = check_method(clipped_median.ClippedMedian)
    assert report.ok, f"{report}"
