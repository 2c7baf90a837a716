"""Each example runs as its user runs it, and says what it is there to say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_scaffold_by_hand_has_the_bits_of_the_callback(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "scaffold_by_hand.py"), run_name="__main__")
    assert "2,410 numbers, bit for bit" in capsys.readouterr().out
