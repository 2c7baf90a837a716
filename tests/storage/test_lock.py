"""The lock of a folder, between real processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint

from fl_lightning import RunFolder
from fl_lightning.errors import UserError
from fl_lightning.storage import lock
from fl_lightning.storage.atomic_files import written_aside
from tests.helpers.learners import blobs, federated, last_checkpoint, trainer

FORK = multiprocessing.get_context("fork")


def in_another_process(target: Any, *arguments: Any) -> int:
    child = FORK.Process(target=target, args=arguments)
    child.start()
    deadline = time.monotonic() + 60
    # Joining it would wait for its own children, too.
    while child.exitcode is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return child.exitcode if child.exitcode is not None else -1


def try_to_hold(folder: Path) -> None:
    try:
        lock.hold(folder).use()
    except UserError:
        os._exit(2)


def test_held_by_one_process_until_it_gives_it_back(tmp_path: Path) -> None:
    held = lock.hold(tmp_path)
    assert in_another_process(try_to_hold, tmp_path) == 2
    held.release()
    assert not (tmp_path / ".lock").exists(), "nothing was written, so nothing is left"
    assert in_another_process(try_to_hold, tmp_path) == 0


def test_this_process_may_hold_it_anew_after_a_fit_that_failed(tmp_path: Path) -> None:
    failed = lock.hold(tmp_path)
    again = lock.hold(tmp_path)
    failed.release()
    assert in_another_process(try_to_hold, tmp_path) == 2
    again.release()
    assert in_another_process(try_to_hold, tmp_path) == 0


def hold_and_die(folder: Path) -> None:
    lock.hold(folder).use()
    if os.fork() == 0:  # a worker that outlives its parent
        (folder / "writing").write_text(str(os.getpid()))
        (folder / "writing").rename(folder / "worker")
        time.sleep(60)
        os._exit(0)
    while not (folder / "worker").exists():
        time.sleep(0.005)
    os.kill(os.getpid(), 9)


def test_a_child_does_not_keep_it_when_its_parent_is_killed(tmp_path: Path) -> None:
    assert in_another_process(hold_and_die, tmp_path) == -9
    worker = int((tmp_path / "worker").read_text())
    assert in_another_process(try_to_hold, tmp_path) == 0
    os.kill(worker, 9)  # It was still there.


def test_what_a_frozen_process_has_open_is_not_what_the_other_writes(tmp_path: Path) -> None:
    with open(tmp_path / ".a.tmp", "wb") as stale:  # it was frozen in the middle of writing a
        with written_aside(tmp_path / "a") as file:
            file.write(b"whole")
        stale.write(b"torn torn torn")
        stale.flush()
        assert (tmp_path / "a").read_bytes() == b"whole"


def fit(folder: Path, rounds: int = 2) -> None:
    run = trainer(
        rounds, [last_checkpoint(folder)], enable_checkpointing=True, default_root_dir=folder
    )
    try:
        run.fit(federated(), blobs(), ckpt_path="last")
    except UserError:
        os._exit(2)


def test_a_run_from_python_holds_its_checkpoints_folder_as_it_trains(tmp_path: Path) -> None:
    held = lock.hold(tmp_path)
    assert in_another_process(fit, tmp_path) == 2 and not (tmp_path / "checkpoints").exists()
    held.release()
    assert in_another_process(fit, tmp_path) == 0
    fit(tmp_path, 3)
    assert in_another_process(fit, tmp_path, 4) == 0, "given back after the fit"


class Failing(pl.Callback):
    """Fails in the first validation, and after later rounds tries to take the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failed = False
        self.statuses: list[int] = []

    def on_validation_batch_end(self, *arguments: Any) -> None:
        if not self.failed:
            self.failed = True
            raise ValueError("of the user's")

    def on_train_epoch_end(self, *arguments: Any) -> None:
        self.statuses.append(in_another_process(try_to_hold, self.folder))


@pytest.mark.parametrize("kind", ["checkpoint", "run folder"])
def test_a_failed_fit_gives_the_folder_back_and_takes_it_again(tmp_path: Path, kind: str) -> None:
    writer = RunFolder(tmp_path) if kind == "run folder" else ModelCheckpoint(tmp_path)
    failing = Failing(tmp_path)
    run = trainer(2, [writer, failing], enable_checkpointing=True, default_root_dir=tmp_path.parent)
    module = federated()
    with pytest.raises(ValueError, match="of the user's"):
        run.fit(module, blobs())
    assert in_another_process(try_to_hold, tmp_path) == 0
    run.fit(module, blobs())
    assert run.current_epoch == 2 and failing.statuses == [2, 2]
    assert in_another_process(try_to_hold, tmp_path) == 0
