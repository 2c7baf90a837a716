"""A callback that stops one process of a run: all of them stop after the same round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedStrategy
from tests.helpers.learners import blobs, federated, trainer
from tests.helpers.processes import launched

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


@pytest.mark.parametrize("asks", [0, 1])
@pytest.mark.parametrize("hook", HOOKS)
def test_all_processes_stop_after_the_same_round(tmp_path: Path, hook: str, asks: int) -> None:
    assert launched(stopped, 2, tmp_path, hook, asks) == [0, 0]
    (first, other) = (torch.load(tmp_path / f"{hook}-{rank}.pt") for rank in (0, 1))
    assert first[0] == other[0] == 2 and torch.equal(first[1], other[1])


def test_a_run_that_is_stopped_as_a_round_begins_runs_that_round() -> None:
    fit = trainer(5, [StopsOne("on_train_epoch_start", 0)])
    fit.fit(federated(), blobs())
    assert fit.current_epoch == fit.global_step == 2
