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


def test_metrics_that_one_process_logs_are_refused_by_name(tmp_path: Path) -> None:
    (text,) = texts(tmp_path, LogsSome)
    assert "'val/rare' was logged in process 0 and not in process 1" in text


def test_weights_that_change_in_one_process_are_refused(tmp_path: Path) -> None:
    (text,) = texts(tmp_path, Lit, [ChangesOne()])
    assert "after round 1 the model in process 1 is not the one in process 0" in text


def test_a_count_of_steps_is_said_to_be_each_processs_own(tmp_path: Path) -> None:
    assert all("Each of the 2 processes has its own" in text for text in texts(tmp_path, Counts))
    said(tmp_path, Counts, [], 0, 1)
    alone = (tmp_path / "1-0").read_text()
    assert "keeps state outside its buffers" in alone and "processes" not in alone


HOOKS = ("on_train_epoch_start", "on_train_batch_end", "on_validation_end", "on_train_epoch_end")


class StopsOne(pl.Callback):
    """Stops one process in round 1, as a callback does that looks at its own clock."""

    def __init__(self, hook: str, rank: int) -> None:
        def stop(trainer: pl.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 1 and trainer.global_rank == rank:
                trainer.should_stop = True

        setattr(self, hook, stop)


def stopped(folder: Path, hook: str, asks: int, rank: int, world: int) -> None:
    fit = trainer(
        5,
        [StopsOne(hook, asks)],
        strategy=FederatedStrategy(timeout=20),
        devices=world,
        default_root_dir=folder,
        check_val_every_n_epoch=3 if hook == "on_train_batch_end" else 1,
    )
    module = federated()
    fit.fit(module, blobs())
    torch.save((fit.current_epoch, module.global_vector.detach()), folder / f"{hook}-{rank}.pt")


@pytest.mark.parametrize(("hook", "asks"), [(hook, k % 2) for k, hook in enumerate(HOOKS)])
def test_all_processes_stop_after_the_same_round(tmp_path: Path, hook: str, asks: int) -> None:
    assert launched(stopped, 2, tmp_path, hook, asks) == [0, 0]
    (first, other) = (torch.load(tmp_path / f"{hook}-{rank}.pt") for rank in (0, 1))
    assert first[0] == other[0] == 2 and torch.equal(first[1], other[1])


def test_a_run_that_is_stopped_as_a_round_begins_runs_that_round() -> None:
    fit = trainer(5, [StopsOne("on_train_epoch_start", 0)])
    fit.fit(federated(), blobs())
    assert fit.current_epoch == fit.global_step == 2
