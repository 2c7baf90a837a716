"""What clients keep lies beside the run's own checkpoints, whatever logger or callback has others
elsewhere."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

from fl_lightning.callbacks import ControlVariates, DifferentialPrivacy
from fl_lightning.storage.segments import segment_number
from tests.helpers.commands import typed
from tests.helpers.learners import Lit, blobs, client_rows, federated, last_checkpoint, trainer
from tests.helpers.zygote import Cli

FIT = typed("fit -c base -c trainer/cpu -c method/scaffold", "--trainer.enable_progress_bar false")
USERS = typed(
    "--trainer.logger CSVLogger --trainer.logger.save_dir elsewhere",
    "--trainer.callbacks+ pytorch_lightning.callbacks.ModelCheckpoint",
    "--trainer.callbacks.filename mine",
)


def test_a_users_logger_and_checkpoints_leave_the_state_in_the_runs_folder(cli: Cli) -> None:
    run = ("--model.participation", 2, "--trainer.default_root_dir", "x")
    result = cli(*FIT, *run, *USERS, "--trainer.max_epochs", 1)
    assert result.returncode == 0, result.stderr
    assert list((cli.folder / "x/state").glob("*.safetensors"))
    assert list((cli.folder / "elsewhere").rglob("mine.ckpt"))
    assert not list((cli.folder / "elsewhere").rglob("state"))
    shutil.rmtree(cli.folder / "elsewhere")
    shutil.move(cli.folder / "x", cli.folder / "y")
    result = cli("fit", "y", "--trainer.max_epochs", 2)
    assert result.returncode == 0, result.stderr


def test_a_run_that_has_ended_keeps_what_its_checkpoints_name(cli: Cli) -> None:
    run = ("--model.participation", 1.0, "--trainer.default_root_dir", "x")
    result = cli(*FIT, "-c", "data/digits", *run, "--trainer.max_epochs", 3)
    assert result.returncode == 0, result.stderr
    needed: set[int] = set()
    for path in (cli.folder / "x/checkpoints").glob("*.ckpt"):
        for entry in torch.load(path, weights_only=True)["federated"]["clients"].values():
            needed.update(entry["segments"].tolist())
    present = {segment_number(path.name) for path in (cli.folder / "x/state").iterdir()}
    assert present == needed


def fit(rounds: int, folder: Path, elsewhere: Path, **options: Any) -> Any:
    mine = ModelCheckpoint(filename="mine", monitor="val/acc", enable_version_counter=False)
    callbacks = [ControlVariates(), mine, last_checkpoint(folder)]
    logger = CSVLogger(elsewhere)
    run = trainer(
        rounds, callbacks, logger=logger, enable_checkpointing=True, default_root_dir=folder
    )
    module = federated()
    run.fit(module, blobs(), **options)
    return module


def test_from_python_too_and_a_checkpoint_whose_state_lies_elsewhere_resumes(
    tmp_path: Path,
) -> None:
    run, logged = tmp_path / "x", tmp_path / "logged"
    fit(2, run, logged)
    assert list((run / "state").glob("*.safetensors")) and not list(logged.rglob("state"))
    whole = fit(3, tmp_path / "whole", tmp_path / "other")
    path = run / "checkpoints" / "last.ckpt"
    old = torch.load(path, weights_only=True)  # as they were: state beside the logger's checkpoints
    elsewhere = logged / "lightning_logs" / "version_0" / "state"
    (run / "state").rename(elsewhere)
    old["federated"]["folders"] = ["../state", str(elsewhere)]
    torch.save(old, path)
    again = fit(3, run, logged, ckpt_path=str(path))
    assert torch.equal(again.global_vector, whole.global_vector)
    assert list((run / "state").glob("*.safetensors"))
    assert all(torch.equal(row, client_rows(whole)[key]) for key, row in client_rows(again).items())


def test_another_trainer_writes_rows_beside_its_own_checkpoints(tmp_path: Path) -> None:
    module = federated()
    for name in ("a", "b"):
        last = ModelCheckpoint(tmp_path / name / "checkpoints", save_last=True)
        run = trainer(
            2, [ControlVariates(), last], enable_checkpointing=True, default_root_dir=tmp_path
        )
        run.fit(module, blobs())
    shutil.rmtree(tmp_path / "a")
    again = trainer(3, [ControlVariates()], default_root_dir=tmp_path)
    again.fit(federated(), blobs(), ckpt_path=tmp_path / "b/checkpoints/last.ckpt")
    assert again.current_epoch == 3


def test_a_run_that_goes_on_keeps_the_rows_of_checkpoints_elsewhere(tmp_path: Path) -> None:
    def run(rounds: int, start: Path | None = None) -> Any:
        last = last_checkpoint(tmp_path / "run")
        given = {"enable_checkpointing": True, "default_root_dir": tmp_path / "run"}
        found = trainer(rounds, [ControlVariates(), last], **given)
        found.fit(federated(participation="all"), blobs(), ckpt_path=start)
        return found

    first = run(1)
    places = [tmp_path / name for name in ("kept/first.ckpt", "kept/model.pt", "run/model")]
    for path in places:
        first.save_checkpoint(path)
    whole = run(3, tmp_path / "run/checkpoints/last.ckpt").model.global_vector.clone()
    for path in places:
        assert torch.equal(run(3, path).model.global_vector, whole)


SLASH = "{epoch}-{val/acc:.2f}"  # Lightning makes a folder of the part before the slash


def test_checkpoints_outside_the_first_folder_find_the_rows_when_the_run_is_moved(
    tmp_path: Path,
) -> None:
    second = ModelCheckpoint(tmp_path / "x" / "more" / "best", "second", monitor="val/acc")
    callbacks = [ControlVariates(), ModelCheckpoint(filename=SLASH, save_top_k=-1), second]
    run = trainer(2, callbacks, enable_checkpointing=True, default_root_dir=tmp_path / "x")
    run.fit(federated(participation="all"), blobs())
    whole = federated(participation="all")
    trainer(3, [ControlVariates()], default_root_dir=tmp_path / "whole").fit(whole, blobs())
    shutil.copytree(tmp_path / "x", tmp_path / "y")
    for segment in (tmp_path / "x" / "state").glob("*.safetensors"):
        segment.write_bytes(b"of a run that has gone on")
    found = sorted((tmp_path / "y").rglob("*.ckpt"))
    assert len({path.parent for path in found}) == len(found) == 3
    for path in found:
        again = federated(participation="all")
        resumed = trainer(3, [ControlVariates()], default_root_dir=tmp_path / "again")
        resumed.fit(again, blobs(), ckpt_path=path)
        assert torch.equal(again.global_vector, whole.global_vector)


def test_a_checkpoint_in_another_runs_folder_finds_its_own_rows(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        last = ModelCheckpoint(tmp_path / name / "checkpoints", "last")
        callbacks = [ControlVariates(), last]
        run = trainer(1, callbacks, enable_checkpointing=True, default_root_dir=tmp_path / name)
        run.fit(federated(seed=seed), blobs())
    run.save_checkpoint(tmp_path / "a" / "checkpoints" / "saved.ckpt")
    shutil.copy(tmp_path / "b/checkpoints/last.ckpt", tmp_path / "a/checkpoints/copied.ckpt")
    for name in ("saved", "copied"):
        again = trainer(2, [ControlVariates()], default_root_dir=tmp_path / "again")
        path = tmp_path / "a" / "checkpoints" / f"{name}.ckpt"
        again.fit(federated(seed=1), blobs(), ckpt_path=path)
        assert again.current_epoch == 2


def test_a_checkpoint_in_a_subfolder_finds_the_secret_when_the_run_is_moved(tmp_path: Path) -> None:
    def private() -> Any:
        return federated(sampling="poisson", participation=0.9, buffers="keep")

    callbacks = [DifferentialPrivacy(1.0, 1.0), ModelCheckpoint(filename=SLASH)]
    run = trainer(1, callbacks, enable_checkpointing=True, default_root_dir=tmp_path / "x")
    run.fit(private(), blobs())
    (tmp_path / "x").rename(tmp_path / "y")
    (path,) = (tmp_path / "y").rglob("*.ckpt")
    again = private()
    resumed = trainer(2, [DifferentialPrivacy(1.0, 1.0)], default_root_dir=tmp_path / "again")
    resumed.fit(again, blobs(), ckpt_path=path)
    assert not [note for note in again.notes if "another is drawn" in note]


class Slow(TorchCheckpointIO):
    """Has not written the earlier checkpoint when the next one is about to be written."""

    def save_checkpoint(self, *arguments: Any, **named: Any) -> None:
        time.sleep(0.1)
        super().save_checkpoint(*arguments, **named)


class Noted:
    """An object, which torch reads only if it may run code."""


class Noting(Lit):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["noted"] = Noted()


def with_writer(folder: Path, rounds: int, writer: Any = None, start: Path | None = None) -> Any:
    every = ModelCheckpoint(folder / "checkpoints", "{epoch}", save_top_k=-1)
    given = {"enable_checkpointing": True, "plugins": [writer] if writer else None}
    run = trainer(rounds, [ControlVariates(), every], default_root_dir=folder, **given)
    module = federated(Noting(), participation="all")
    run.fit(module, blobs(), ckpt_path=start, weights_only=False)
    return module


def test_another_writer_may_write_checkpoints_later(tmp_path: Path) -> None:
    whole = with_writer(tmp_path / "x", 3, AsyncCheckpointIO(Slow()))
    for t in range(2):
        again = with_writer(tmp_path / "again", 3, None, tmp_path / f"x/checkpoints/epoch={t}.ckpt")
        assert torch.equal(again.global_vector, whole.global_vector)


def test_a_run_keeps_the_rows_of_checkpoints_that_it_does_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    with_writer(folder, 2, Slow())
    first, second = sorted((folder / "checkpoints").iterdir())
    with pytest.warns(UserWarning, match=r"epoch=0.ckpt.*keeps all"):
        whole = with_writer(folder, 3, None, second)
    again = with_writer(tmp_path / "again", 3, None, first)
    assert torch.equal(again.global_vector, whole.global_vector)
