"""The lines of code that docs/methods.md shows beside the equations are the ones that run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python (\S+)\n(.*?)```", (ROOT / "docs/methods.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("path, code", BLOCKS, ids=[path for path, _ in BLOCKS])
def test_lines_shown_are_lines_of_the_file(path: str, code: str) -> None:
    lines = [line.strip() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
    missing = [line for line in code.splitlines() if line.strip() not in lines]
    assert not missing
