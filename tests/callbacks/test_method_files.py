"""A method's file is its paper: it is written with the method API alone, and its example runs (as a doctest)."""

from __future__ import annotations

import ast
import doctest
import sys
from pathlib import Path

import pytest

from fl_lightning import callbacks

FOLDER = Path(__file__).parents[2] / "callbacks"
FOR_LIGHTNING = {"progress_bar", "run_card"}  # they show a run, and belong to Lightning's side of it
FILES = {p.stem: p for p in sorted(FOLDER.glob("*.py")) if p.stem not in {"__init__", *FOR_LIGHTNING}}


def imported(path: Path) -> set[str]:
    """All modules that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or ""))
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_method_needs_the_method_api_alone(name: str) -> None:
    beside = {module for module in imported(FILES[name]) if module.partition(".")[0] not in sys.stdlib_module_names}
    assert beside <= {"fl_lightning.callback", "torch"}


@pytest.mark.parametrize("name", FILES)
def test_a_method_says_what_travels_and_shows_something_true(name: str) -> None:
    (cls,) = (c for c in vars(callbacks).values() if getattr(c, "__module__", "") == f"fl_lightning.callbacks.{name}")
    examples = doctest.DocTestParser().get_examples(cls.__doc__)
    assert ("Sent:" in cls.__doc__ and "Kept" in cls.__doc__) or "Sent and kept:" in cls.__doc__
    assert any(example.want for example in examples)
