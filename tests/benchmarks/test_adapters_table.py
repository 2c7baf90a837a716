"""The small table of methods for adapters: its sweep, its claims, and a text that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import adapters_table
from fl_lightning.cli.compose import packaged, parse_yaml
from fl_lightning.sweep.grid import arms
from fl_lightning.sweep.spec import read_spec


def test_the_sweep_has_every_arm_that_a_claim_is_about() -> None:
    spec = read_spec(adapters_table.SWEEP)
    names = [arm.name for arm in arms(spec)]
    assert len(names) == 12 and len(spec.seeds) == 5
    file = Path(str(packaged()[adapters_table.SWEEP])).with_suffix(".claims.yaml")
    claims = parse_yaml(file.read_text("utf-8"))
    assert len(claims) == 8
    for claim in claims:
        assert {claim["a"], claim["b"]} <= set(names)


def test_a_text_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FL_LIGHTNING_DATA", str(tmp_path))
    assert adapters_table.main(["prepare"]) == 1
    said = capsys.readouterr().err
    assert "tinyshakespeare/input.txt is not there" in said and "FL_LIGHTNING_DATA=" in said
