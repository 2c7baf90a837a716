"""metrics.csv: exact, one row a round, the same after a kill."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.errors import UserError
from fl_lightning.metrics import read_rows
from fl_lightning.record.metrics_csv import MetricsCSV

torch.set_num_threads(1)


def text(folder: Path) -> str:
    return (folder / "metrics.csv").read_text()


def test_calls_of_one_round_make_one_row_and_columns_come_as_they_come(tmp_path: Path) -> None:
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"b": 0.1, "epoch": 0}, step=0)
    assert text(tmp_path) == "round,b\n0,0.1\n"  # on disk at once
    logger.log_metrics({"a": 2}, step=0)
    logger.log_metrics({"a": 3, "b": 1 / 3}, step=1)
    logger.log_metrics({"c,d": 4.0}, step=2)
    logger.log_metrics({"b": 0.2}, step=1)
    logger.log_metrics({"a": 1 / 3}, step=2)
    logger.log_metrics({"a": 5}, step=2)
    logger.log_metrics({"a": 6})
    assert text(tmp_path) == 'round,b,a,"c,d"\n0,0.1,2,\n1,0.2,3,\n2,,6,4.0\n'


def test_numbers_read_back_exactly(tmp_path: Path) -> None:
    draw = random.Random(0)
    floats = [draw.uniform(-1, 1) * 10 ** draw.randint(-300, 300) for _ in range(200)]
    logger = MetricsCSV(tmp_path)
    for step, value in enumerate(floats):
        both = {"t": torch.tensor(value), "n": np.float64(value)}
        logger.log_metrics({"x": value, **both, "i": 2**60 + step}, step)
    lines = [line.split(",") for line in text(tmp_path).splitlines()[1:]]
    assert [float(line[1]) for line in lines] == floats == [float(line[3]) for line in lines]
    assert [torch.tensor(float(line[2])) for line in lines] == list(map(torch.tensor, floats))
    assert [int(line[4]) for line in lines] == [2**60 + step for step in range(200)]
    logger.log_metrics({"x": float("nan"), "t": float("inf")}, 200)
    assert text(tmp_path).splitlines()[-1] == "200,nan,inf,,"


def rounds(logger: MetricsCSV, first: int, last: int) -> None:
    for t in range(first, last):
        logger.log_metrics({"train/loss": 1 / (t + 3), "comm": 10 * t}, t)
        if t % 2:
            logger.log_metrics({"val/acc": t / 7}, t)
        if t > 4:
            logger.log_metrics({f"late/{t // 6}": t / 9}, t)
        logger.save()


@pytest.mark.parametrize("resumed", range(12))
def test_a_kill_at_any_byte_and_a_resume_leave_the_same_file(tmp_path: Path, resumed: int) -> None:
    rounds(MetricsCSV(tmp_path / "whole"), 0, 14)
    rounds(MetricsCSV(tmp_path / "killed"), 0, 12)
    path = tmp_path / "killed" / "metrics.csv"
    written = path.read_bytes()
    last_line = written.rindex(b"\n", 0, -1) + 1
    for cut in {len(written), last_line + 3, last_line}:
        path.write_bytes(written[:cut])
        again = MetricsCSV(tmp_path / "killed")
        if resumed == 11 and cut != len(written):
            continue  # that row was lost, so no checkpoint of round 11 can be there
        again.resume(resumed)
        rounds(again, resumed, 14)
        assert text(tmp_path / "killed") == text(tmp_path / "whole")


def test_a_file_that_is_none_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("round,x\n0,1,2\n1,3\n")
    with pytest.raises(UserError, match=r"metrics.csv, line 2"):
        MetricsCSV(tmp_path).resume(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*file"):
        MetricsCSV(tmp_path / "file").log_metrics({"x": 1.0}, 0)


def written(folder: Path, rest: bytes) -> str:
    """Leave three rounds and this rest in the file; return the file of four rounds."""
    path = folder / "metrics.csv"
    path.unlink(missing_ok=True)
    rounds(MetricsCSV(folder), 0, 3)
    path.write_bytes(path.read_bytes() + rest)
    rounds(MetricsCSV(folder / "whole"), 0, 4)
    return text(folder / "whole")


def going_on(folder: Path) -> None:
    before = (folder / "metrics.csv").read_bytes()
    logger = MetricsCSV(folder)
    logger.resume(3)
    assert (folder / "metrics.csv").read_bytes() == before, "unchanged until a round is logged"
    rounds(logger, 3, 4)


TORN = [b"3,0.", b"3\n", b"3,0.1,7,8,9\n", b"\0\0\0\0,0.3\n", b"3,0.1,\xff\xfe", b'"3,0.\n', b"\n"]


@pytest.mark.parametrize("torn", TORN)
def test_a_torn_last_line_never_blocks_a_resume(tmp_path: Path, torn: bytes) -> None:
    whole = written(tmp_path, torn)
    assert read_rows(tmp_path / "metrics.csv")[1][-1]["round"] == "2"
    going_on(tmp_path)
    assert text(tmp_path) == whole


class Learner(pl.LightningModule):
    """One batch an epoch; logs as the federated module does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for logger in self.loggers:
            logger.log_metrics({"train/loss": 0.5}, step=self.current_epoch)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", 0.1 * self.current_epoch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)

    val_dataloader = train_dataloader


def test_a_trainer_writes_training_and_validation_in_one_row(tmp_path: Path) -> None:
    pl.Trainer(
        max_epochs=2,
        logger=MetricsCSV(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        accelerator="cpu",
        default_root_dir=tmp_path,
    ).fit(Learner())
    lines = text(tmp_path).splitlines()
    assert lines[0] == "round,train/loss,val/acc" and len(lines) == 3 and lines[1] == "0,0.5,0.0"
    assert (tmp_path / "checkpoints").is_dir()  # Lightning's checkpoints find their way beside it
