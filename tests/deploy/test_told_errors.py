"""What a site tells the server of an error: never a cell, a label or a folder."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from fl_lightning import UserError
from fl_lightning.datamodules import FromTable
from fl_lightning.deploy.flower.serve_site import own_data
from fl_lightning.deploy.round_messages import check_names
from fl_lightning.deploy.told_errors import told
from fl_lightning.deploy.transport import words
from fl_lightning.errors import CellError
from fl_lightning.lab.cli.compose import Command
from tests.deploy.liars import OPTIONS, SHARES
from tests.deploy.test_in_memory import Learner, over_sites

CELL = "Jane Roe 1961-02-03"


def error_of(path: Path, cells: list[str]) -> UserError:
    """The error of a table with this row in its line 4."""
    rows = [["x0", "x1", "outcome"], ["0.5", "1.5", "0"], ["0.5", "1.5", "1"], cells]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([*rows, *rows[1:3]])
    given: Any = {"path": str(path), "target": "outcome", "classes": [0, 1], "batch_size": 2}
    data = FromTable(num_clients=2, **given)
    with pytest.raises(UserError) as error:
        data.prepare_data()
        data.setup("fit")
    return error.value


@pytest.mark.parametrize(
    ("cells", "secret", "place"),
    [
        ([CELL, "1", "1"], CELL, "column 1, line 4"),
        (["1e99", "1", "1"], "1e+99", "column 1, line 4"),
        (["1", "1", "HIV-positive"], "HIV-positive", "column 3, line 4"),
        (["1", "", "1"], "no value", "column 2, line 4"),
    ],
)
def test_the_place_of_a_cell_is_told_and_not_its_value(
    cells: list[str], secret: str, place: str, tmp_path: Path
) -> None:
    error = error_of(tmp_path / "patients.csv", cells)
    assert isinstance(error, CellError) and secret in str(error)
    text = told(error)
    assert place in text and secret not in text and str(tmp_path) not in text


@pytest.mark.parametrize("kind", ["column_names", "class_names"])
def test_names_that_only_the_site_has_are_counted_and_not_told(kind: str) -> None:
    """The classes may be cells of the target's column, and the columns the first row of a table."""
    data = SimpleNamespace(**{kind: ["a", "c", CELL, f"{CELL} HIV"]})
    with pytest.raises(UserError) as error:
        check_names({kind: words("a\nb")}, data)
    assert f"have c, {CELL}, {CELL} HIV, which the server's do not" in str(error.value)
    text = told(error.value)
    assert CELL not in text and "lack b, which the server's have, and have 3 that the" in text


def test_the_name_of_a_column_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "headless.csv"
    path.write_text(f"{CELL},51,1\nx,3,1\n4,4,0\n", "utf-8")
    data = FromTable(path, target="1", classes=[0, 1], num_clients=1)
    with pytest.raises(CellError, match=CELL) as error:
        data.prepare_data()
        data.setup("fit")
    assert CELL not in told(error.value) and "column 1, line 2" in told(error.value)


class Quotes(Learner):
    """Its step fails in round 1, and its error quotes a sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 0:
            return super().training_step(batch, batch_idx)
        raise ValueError(f"cannot use {CELL} in /data/{CELL}.csv")


def test_an_error_of_a_learner_is_told_with_its_place_and_stays_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**OPTIONS, "learner": Quotes}
    expected = r"site north: client 0: ValueError in test_told_errors\.py, line \d+; the text is in"
    with pytest.raises(UserError, match=expected) as error:
        over_sites(list, tmp_path, SHARES, rounds=2, **given)
    assert CELL not in str(error.value)
    assert f"ValueError: cannot use {CELL}" in capsys.readouterr().err


def test_folders_are_left_out_of_what_is_told(tmp_path: Path) -> None:
    (tmp_path / "north").mkdir()
    journal = '{"run": 9, "committed": {}, "staged": [], "rows": {}}'
    (tmp_path / "north" / "site.json").write_text(journal, "utf-8")
    with pytest.raises(UserError, match="rows of another run") as error:
        over_sites(list, tmp_path, SHARES, rounds=1, **OPTIONS)
    assert str(tmp_path) not in str(error.value) and "site folder …/north" in str(error.value)


def test_what_stands_in_a_sites_file_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"client: {CELL}\ndata: Digits\n", "utf-8")
    with pytest.raises(UserError, match=CELL) as error:
        own_data(Command(), path)
    assert CELL not in told(error.value) and "serve_site.py" in told(error.value)
