"""Checkpoints that earlier versions wrote still load, and a run goes on from them.

``old_checkpoints/`` holds three runs after two of three rounds, each with its ``state/``, as they
were written before the checkpoint had one schema (version 1 of the format). Never write them anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from fl_lightning import load
from fl_lightning.callbacks import ControlVariates, PartialAveraging, PowerOfChoice
from fl_lightning.systems import Buffered, Constant, Devices
from tests.helpers.learners import Normed, blobs, client_rows, federated, momentum, trainer

OLD = Path(__file__).with_name("old_checkpoints")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def control_variates(**options: Any) -> tuple[Any, list[Any]]:
    """Rows, server states, a server optimizer with state, buffers, and chosen clients."""
    module = federated(Normed(), server_optimizer=adam, **options)
    return module, [ControlVariates(), PowerOfChoice(candidates=6)]


def kept_parts(**options: Any) -> tuple[Any, list[Any]]:
    """A head that is never averaged, so w beside what is evaluated, and kept optimizer states."""
    kept = {"client_optimizer": momentum, "keep_optimizer_state": True, "buffers": "own"}
    module = federated(Normed(), **kept, **options)
    return module, [PartialAveraging(periods={"net.3.*": "never"})]


def buffered(**options: Any) -> tuple[Any, list[Any]]:
    """An asynchronous run, with the earlier models from which clients still train."""
    devices = Devices(compute=Constant(0.1))
    asynchronous = Buffered(devices=devices, size=2, concurrency=5)
    return federated(Normed(), asynchronous=asynchronous, **options), []


RUNS: dict[str, Callable[..., tuple[Any, list[Any]]]] = {
    "control_variates": control_variates,
    "kept_parts": kept_parts,
    "buffered": buffered,
}


def fit(folder: Path, run: str, rounds: int, **options: Any) -> Any:
    torch.manual_seed(0)
    module, methods = RUNS[run](engine="sequential")
    last = ModelCheckpoint(
        folder / "checkpoints", "last", enable_version_counter=False, save_on_train_epoch_end=True
    )
    callbacks = [*methods, last]
    lightning = trainer(rounds, callbacks, enable_checkpointing=True, default_root_dir=folder)
    lightning.fit(module, blobs(), **options)
    return module


@pytest.mark.parametrize("run", RUNS)
def test_a_run_goes_on_from_a_checkpoint_of_an_earlier_version(tmp_path: Path, run: str) -> None:
    shutil.copytree(OLD / run, tmp_path / "old")
    resumed = fit(tmp_path / "old", run, 3, ckpt_path=tmp_path / "old/checkpoints/last.ckpt")
    whole = fit(tmp_path / "new", run, 3)
    assert resumed.current_epoch == 3
    # Another machine wrote the checkpoints, whose last digits are others.
    assert torch.allclose(resumed.global_vector, whole.global_vector, atol=1e-6)
    rows = client_rows(whole)
    there = client_rows(resumed)
    assert there.keys() == rows.keys()
    assert all(torch.allclose(there[key], row, atol=1e-6) for key, row in rows.items())


def test_rows_of_a_run_of_an_earlier_version_are_read() -> None:
    run = load(OLD / "control_variates")
    row = run.client_state(
        "ControlVariates.c_i", int(run.checkpoint["federated"]["chosen"]["clients"][0])
    )
    assert row is not None and bool(row.isfinite().all())
