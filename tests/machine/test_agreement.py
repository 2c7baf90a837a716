"""What one process does and another does not, where all of them have to do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning import FederatedStrategy, UserError
from tests.helpers.learners import Lit, blobs, federated, trainer
from tests.helpers.processes import launched


class LogsSome(Lit):
    """Logs a metric only for batches of one process."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.trainer.global_rank == 0:
            self.log("val/rare", 1.0)


class LogsAtRankZero(Lit):
    """Logs for one process alone, which Lightning has an argument for."""

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("val/one", 1.0, rank_zero_only=True)


class OtherOrder(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        names = ["val/a", "val/b"]
        for name in names if self.trainer.global_rank else reversed(names):
            self.log(name, float(name == "val/a"))


class ChangesOne(pl.Callback):
    """Changes the weights of one process."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and trainer.current_epoch == 1:
            with torch.no_grad():
                next(pl_module.learner.parameters()).mul_(2)


class Counts(Lit):
    """Counts its steps in an attribute."""

    done = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.done += 1
        return super().training_step(batch, batch_idx) * (1 + self.done)


class EndsApart(Lit):
    """Logs a metric at the end of validation in one process alone."""

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.is_global_zero:
            self.log("val/end", 1.0)


def said(
    folder: Path, learner: Callable[[], Lit], callbacks: list[Any], rank: int, world: int
) -> None:
    strategy = {"strategy": FederatedStrategy(timeout=30), "devices": world} if world > 1 else {}
    fit = trainer(3, callbacks, default_root_dir=folder, **strategy)
    module = federated(learner())
    text = ""
    try:
        fit.fit(module, blobs())
    except UserError as error:
        text = str(error)
    (folder / f"{world}-{rank}").write_text("\n".join([text, *module.notes]))


def texts(folder: Path, learner: Callable[[], Lit], callbacks: list[Any] | None = None) -> set[str]:
    """What each of two processes says."""
    assert launched(said, 2, folder, learner, callbacks or []) == [0, 0]
    return {(folder / f"2-{rank}").read_text() for rank in (0, 1)}


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (LogsSome, "'val/rare' was logged in process 0 and not in process 1"),
        (OtherOrder, "in another order"),
        (EndsApart, "'val/end' was logged in process 1 and not in process 0"),
    ],
)
def test_metrics_that_one_process_logs_are_refused_by_name(
    tmp_path: Path, learner: Callable[[], Lit], words: str
) -> None:
    (text,) = texts(tmp_path, learner)
    assert words in text


def test_a_metric_of_rank_zero_alone_is_lightnings_own_option(tmp_path: Path) -> None:
    assert all(not text.startswith("'val/one'") for text in texts(tmp_path, LogsAtRankZero))


def test_weights_that_change_in_one_process_are_refused(tmp_path: Path) -> None:
    (text,) = texts(tmp_path, Lit, [ChangesOne()])
    assert "after round 1 the model in process 1 is not the one in process 0" in text


def test_a_count_of_steps_is_said_to_be_each_processs_own(tmp_path: Path) -> None:
    assert all("Each of the 2 processes has its own" in text for text in texts(tmp_path, Counts))
    said(tmp_path, Counts, [], 0, 1)
    alone = (tmp_path / "1-0").read_text()
    assert "keeps state outside its buffers" in alone and "processes" not in alone
