"""A process of a run that is stopped: the others end, and the run goes on from its last
checkpoint."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedStrategy
from fl_lightning.callbacks import ControlVariates
from fl_lightning.errors import UserError
from fl_lightning.record.metrics_csv import MetricsCSV
from tests.helpers.commands import rounds
from tests.helpers.learners import blobs, federated, last_checkpoint, trainer
from tests.helpers.processes import started

ROUNDS, STOPPED_IN = 4, 2


class Stops(pl.Callback):
    def __init__(self, rank: int, folder: Path) -> None:
        self.rank, self.folder = rank, folder

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == STOPPED_IN and trainer.global_rank == self.rank:
            (self.folder / "stopped").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)


def run(folder: Path, stopped: int, rank: int, world: int) -> None:
    strategy = {"strategy": FederatedStrategy(timeout=3), "devices": world} if world > 1 else {}
    callbacks = [ControlVariates(), Stops(stopped, folder), last_checkpoint(folder)]
    given = {"logger": MetricsCSV(folder), "enable_checkpointing": True, **strategy}
    fit = trainer(ROUNDS, callbacks, default_root_dir=folder, **given)
    module = federated()
    try:
        fit.fit(module, blobs(), ckpt_path="last")
    except UserError as error:
        (folder / f"said-{rank}").write_text(str(error))
        sys.exit(2)
    torch.save(module.global_vector.detach(), folder / f"w-{rank}.pt")


@pytest.mark.skipif(
    not hasattr(torch.distributed, "set_timeout"),
    reason="before torch 2.14 a group keeps its first timeout, half an hour",
)
def test_a_run_without_a_stopped_rank_ends_and_resumes(tmp_path: Path) -> None:
    """Each rank in a run of its own; the runs wait side by side."""
    begun = {stopped: started(run, 2, tmp_path / str(stopped), stopped) for stopped in (0, 1)}
    for stopped, children in begun.items():
        folder = tmp_path / str(stopped)
        children[1 - stopped].join(100)
        os.kill(int((folder / "stopped").read_text()), signal.SIGCONT)
        children[stopped].join(60)
        assert [child.exitcode for child in children] == [2, 2]
        said = (folder / f"said-{1 - stopped}").read_text()
        assert f"rank {1 - stopped} (process " in said and "lost another process" in said
        assert "timeout" in said and "--ckpt_path last" in said and "\n" not in said
    resumed = [child for stopped in begun for child in started(run, 2, tmp_path / str(stopped), 9)]
    for child in [*resumed, *started(run, 2, tmp_path / "whole", 9)]:
        child.join(100)
        assert child.exitcode == 0
    whole = torch.load(tmp_path / "whole/w-0.pt")
    for stopped in begun:
        assert rounds(tmp_path / str(stopped)) == [str(t) for t in range(ROUNDS)]
        assert torch.equal(torch.load(tmp_path / f"{stopped}/w-0.pt"), whole)


@pytest.mark.parametrize("given", [0, -3.0, timedelta(0)])
def test_a_timeout_has_to_be_positive(given: Any) -> None:
    with pytest.raises(UserError, match="timeout="):
        FederatedStrategy(timeout=given)
