"""What plain Lightning saves and loads, a run's checkpoints and exports do too.

Objects are read only where asked.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from fl_lightning import FederatedModule
from fl_lightning.callbacks import ControlVariates
from fl_lightning.errors import UserError
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from tests.helpers.learners import Lit, blobs, client_rows, federated, trainer


class Head:
    """An object as learners take them: no module, no plain data."""

    def __init__(self, size: int) -> None:
        self.size, self.weight = size, torch.full((size,), 3.0)


class WithObjects(Lit):
    """Takes a network and an object, and saves more of its own."""

    def __init__(self, head: Head, extra: nn.Module, kind: type = Lit, hidden: int = 8) -> None:
        super().__init__(hidden)
        self.save_hyperparameters()
        self.extra, self.head = extra, head

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["special"] = {"head": self.head, "numbers": [1, torch.ones(2)]}


class Reading(WithObjects):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored = checkpoint["special"]["head"].size


def learner(kind: type[WithObjects] = WithObjects) -> WithObjects:
    torch.manual_seed(0)
    return kind(Head(5), nn.Linear(20, 2))


def fit(
    folder: Path, of: Any, rounds: int = 2, **options: Any
) -> tuple[FederatedModule, pl.Trainer]:
    last = ModelCheckpoint(
        folder, "last", enable_version_counter=False, save_on_train_epoch_end=True
    )
    run = trainer(
        rounds, [ControlVariates(), last], enable_checkpointing=True, default_root_dir=folder
    )
    module = federated(of)
    run.fit(module, blobs(), **options)
    return module, run


def test_load_from_checkpoint_gives_the_learner_back_from_checkpoint_and_export(
    tmp_path: Path,
) -> None:
    module, _ = fit(tmp_path, learner())
    module.export(tmp_path / "model.pt")
    for name in ("last.ckpt", "model.pt"):
        again = WithObjects.load_from_checkpoint(tmp_path / name, weights_only=False)
        assert (
            again.head.size == 5
            and isinstance(again.extra, nn.Linear)
            and again.hparams.kind is Lit
        )
        expected = module.learner.state_dict()
        assert all(
            torch.equal(v.float(), expected[k].float()) for k, v in again.state_dict().items()
        )
        content = torch.load(tmp_path / name, weights_only=False)
        assert torch.equal(content["special"]["head"].weight, torch.full((5,), 3.0))
        assert content["special"]["numbers"][0] == 1


def test_a_resume_needs_no_trust_where_nobody_reads_the_objects(tmp_path: Path) -> None:
    fit(tmp_path, learner())
    module, run = fit(tmp_path, learner(), rounds=3, ckpt_path="last")
    assert run.current_epoch == 3
    whole, _ = fit(tmp_path / "whole", learner(), rounds=3)
    assert torch.equal(module.global_vector, whole.global_vector)
    assert all(
        torch.equal(row, client_rows(whole)[key]) for key, row in client_rows(module).items()
    )


def test_rows_of_a_checkpoint_with_objects_are_kept(tmp_path: Path) -> None:
    """A run looks into the checkpoints beside it for the rows they need.

    One with objects counts.
    """
    _, run = fit(tmp_path, learner())
    run.save_checkpoint(tmp_path / "kept.ckpt")
    fit(tmp_path, learner(), rounds=6, ckpt_path="last")
    _, again = fit(tmp_path, learner(), rounds=3, ckpt_path=str(tmp_path / "kept.ckpt"))
    assert again.current_epoch == 3


def test_who_reads_the_objects_has_to_be_trusted(tmp_path: Path) -> None:
    fit(tmp_path, learner(Reading))
    with pytest.raises(UserError, match=r"checkpoint\['special'\]\['head'\].*weights_only=False"):
        fit(tmp_path, learner(Reading), rounds=3, ckpt_path="last")
    of: Any = learner(Reading)
    _, run = fit(tmp_path, of, rounds=3, ckpt_path="last", weights_only=False)
    assert run.current_epoch == 3 and of.restored == 5


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def test_nothing_runs_that_the_file_names(tmp_path: Path) -> None:
    io, fuse = AtomicCheckpointIO(), tmp_path / "ran"
    with pytest.warns(UserWarning, match=r"checkpoint\['mine'\] is a Bomb"):
        io.save_checkpoint({"state_dict": {}, "mine": Bomb(str(fuse))}, tmp_path / "x.ckpt")
    assert "mine" in io.load_checkpoint(tmp_path / "x.ckpt") and "mine" in io.load_checkpoint(
        tmp_path / "x.ckpt", weights_only=True
    )
    # as an export does
    io.save_checkpoint(io.load_checkpoint(tmp_path / "x.ckpt"), tmp_path / "y.ckpt")
    assert not fuse.exists()
    io.load_checkpoint(tmp_path / "y.ckpt", weights_only=False)
    assert fuse.exists()


class Counting(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": np.arange(3)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["seen"].sum() == 3


def test_a_callback_with_an_array_trains_on_and_resumes_with_trust(tmp_path: Path) -> None:
    def run(rounds: int, **options: Any) -> int:
        last = ModelCheckpoint(
            tmp_path, "last", enable_version_counter=False, save_on_train_epoch_end=True
        )
        of = trainer(
            rounds, [Counting(), last], enable_checkpointing=True, default_root_dir=tmp_path
        )
        of.fit(federated(), blobs(), **options)
        return of.current_epoch

    with pytest.warns(UserWarning, match="seen.*ndarray"):
        assert run(2) == 2
    with pytest.raises(UserError, match=r"seen.*--weights_only false"):
        run(3, ckpt_path="last")
    assert run(3, ckpt_path="last", weights_only=False) == 3


class Locked(Lit):
    def __init__(self, hidden: int = 8, guard: Any = None) -> None:
        super().__init__(hidden)
        self.save_hyperparameters()


def test_what_cannot_be_pickled_is_left_out_of_hyper_parameters_and_refused_elsewhere(
    tmp_path: Path,
) -> None:
    of = Locked(6)
    of.hparams["guard"] = threading.Lock()
    of.hparams["nested"] = {"lock": [threading.Lock()]}
    with pytest.warns(UserWarning, match="the hyper-parameter 'guard' is a lock"):
        AtomicCheckpointIO().save_checkpoint(
            {"state_dict": {}, "hyper_parameters": dict(of.hparams)}, tmp_path / "a"
        )
    kept = AtomicCheckpointIO().load_checkpoint(tmp_path / "a")["hyper_parameters"]
    assert kept["hidden"] == 6 and "guard" not in kept and "nested" not in kept
    with pytest.raises(UserError, match=r"checkpoint\['mine'\]\[0\] is a lock"):
        AtomicCheckpointIO().save_checkpoint(
            {"state_dict": {}, "mine": [threading.Lock()]}, tmp_path / "b"
        )


class Hooked(Lit):
    """Asks its Trainer while it is saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rounds"] = self.trainer.current_epoch


def test_an_export_after_the_fit_runs_on_save_checkpoint_with_the_trainer(tmp_path: Path) -> None:
    run, module = trainer(2), federated(Hooked())
    run.fit(module, blobs())
    exported = module.export(tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["rounds"] == 2
    assert exported._trainer is None
