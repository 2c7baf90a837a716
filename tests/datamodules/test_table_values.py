"""Large integers, columns of one name, and truth values in tables of either kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning.datamodules import FromTable

BIG = 2**53


def table(path: Path, columns: dict[str, list[Any]]) -> Path:
    """A CSV or a Parquet file of these columns, by the ending of ``path``."""
    if path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
        return path
    rows = zip(*columns.values(), strict=True)
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_integers_beyond_the_reach_of_floats_are_told_apart(ending: str, tmp_path: Path) -> None:
    columns = {"who": [BIG + 1, BIG, BIG, BIG + 1], "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 1, 0]}
    data = FromTable(table(tmp_path / f"t.{ending}", columns), target="y", client="who")
    data.setup()
    assert list(data.client_names) == [str(BIG), str(BIG + 1)]
    assert data.client_indices(0).tolist() == [1, 2]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_truth_values_are_numbers(ending: str, tmp_path: Path) -> None:
    columns = {"smokes": [True, False, True, False], "x": [1.0, 2.0, 3.0, 4.0], "y": [0, 1, 1, 0]}
    data = FromTable(table(tmp_path / f"t.{ending}", columns), target="y", num_clients=2)
    data.setup()
    assert data.train_set is not None
    x: Any = data.train_set
    assert x.x[:, 0].tolist() == [1, 0, 1, 0]


def test_two_columns_of_one_name_in_parquet_are_told_as_in_csv(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "t.parquet"
    columns = [arrow.array([1.0, 2.0])] * 2 + [arrow.array([0, 1])]
    twice = arrow.Table.from_arrays(columns, names=["x", "x", "y"])
    pytest.importorskip("pyarrow.parquet").write_table(twice, path)
    with pytest.raises(UserError, match="has two columns 'x': name each once"):
        FromTable(path, target="y", num_clients=2).setup()


class Frame:
    """As much of a frame of pandas or polars as is asked for."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def to_numpy(self) -> Any:
        return np.asarray(self.values)

    def __len__(self) -> int:
        return len(self.values)


def test_frames_are_taken_in_memory_and_named_as_a_path() -> None:
    given: Any = (Frame([[1.0, 2.0], [3.0, 4.0]]), Frame([0, 1]))
    data = InMemoryDataModule(given, num_clients=2)
    data.setup()
    assert data.client_sizes().tolist() == [1, 1] and data.num_classes == 2
    frame: Any = Frame([[1.0]])
    with pytest.raises(UserError, match=r"path is a Frame.*InMemoryDataModule\(\(df"):
        FromTable(frame, target="y")
