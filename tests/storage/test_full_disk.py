"""What cannot be written is said in one paragraph, and what was there stays."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fl_lightning.__main__ import main
from fl_lightning.errors import UserError, out_of_memory
from fl_lightning.machine.lightning import pl
from fl_lightning.storage.atomic_files import named, writable_as_file, written_aside
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO


def saved(path: Path, size: int) -> None:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(size)}}, path)


def no_larger(limit: int) -> None:
    """No file of this process may grow beyond so many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def _saved_on_a_full_disk(path: Path, limit: int, answer: multiprocessing.Queue[str]) -> None:
    no_larger(limit)
    try:
        saved(path, 200_000)
        answer.put("written")
    except BaseException as error:
        answer.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("limit", [1_000, 800_000])
def test_a_disk_that_fills_while_a_checkpoint_is_written(limit: int, tmp_path: Path) -> None:
    """torch.save says `unexpected pos 768 vs 662`; the checkpoint of before stays."""
    path = tmp_path / "last.ckpt"
    saved(path, 10)
    before = path.read_bytes()
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_saved_on_a_full_disk, args=(path, limit, answer))
    child.start()
    told = answer.get(timeout=100)
    child.join()
    assert told.startswith(f"UserError: Cannot write {path}: File too large"), told
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["last.ckpt"]


class FullAfterARound(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        no_larger(0)


def told_by(function: Callable[[Path], int], folder: Path) -> tuple[int | None, str]:
    """The status of a process of its own, and what it wrote into a pipe, which has no size."""
    ours, theirs = os.pipe()

    def call() -> None:
        # pytest's own are files, and would be full, too.
        with open(theirs, "w", buffering=1) as sys.stderr:
            sys.stdout = sys.stderr
            sys.exit(function(folder))

    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    os.close(theirs)
    with open(ours) as pipe:
        told = pipe.read()
    child.join()
    return child.exitcode, told


def _run(folder: Path) -> int:
    run = ["fit", "-c", "base", "-c", "data/digits", "-c", "method/scaffold", "-c", "trainer/cpu"]
    run += ["--model.engine", "sequential", "--model.local_epochs", "1"]
    run += ["--trainer.max_epochs", "2", "--trainer.default_root_dir", str(folder / "run")]
    full = f"{FullAfterARound.__module__}.{FullAfterARound.__qualname__}"
    return main([*run, "--trainer.enable_progress_bar", "false", f"--trainer.callbacks+={full}"])


def test_a_run_names_the_file_that_did_not_fit_first(tmp_path: Path) -> None:
    """And not those that it cannot write either when it ends."""
    status, told = told_by(_run, tmp_path)
    assert status == 2 and "Traceback" not in told, told
    assert told.count("Cannot write") == 1, told


def test_a_link_stays_and_what_it_leads_to_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, target in (("old", "there/old.pt"), ("new", "there/new.pt"), ("twice", "old")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "there" / "old.pt").write_text("before")
    for name in ("old", "new", "twice"):
        with written_aside(tmp_path / name) as file:
            file.write(name.encode())
        assert (tmp_path / name).is_symlink()
    assert (tmp_path / "there" / "old.pt").read_text() == "twice"
    assert sorted(os.listdir(tmp_path / "there")) == ["new.pt", "old.pt"]


def test_what_is_no_file_is_refused_and_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name, kind in (
        ("folder", "a folder"),
        ("loop", "a link"),
        ("pipe", "a pipe"),
        ("link", ""),
    ):
        with pytest.raises(UserError, match=f"it is .*{kind}"):
            saved(tmp_path / name, 10)
    assert (tmp_path / "pipe").is_fifo()
    assert writable_as_file(tmp_path / "nothing") == tmp_path / "nothing"


def test_a_path_is_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/$USER")
    monkeypatch.setenv("WHERE", "a")
    assert named("~/x") == Path("/home/$USER/x")
    assert named("$WHERE/${WHERE}") == Path("a/a")
    assert named("$UNKNOWN_NAME") == Path("$UNKNOWN_NAME")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate "
            "8 bytes."
        ),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_does_not_suffice_is_told(error: BaseException) -> None:
    assert out_of_memory(error).startswith("out of memory: ")
    assert "--model.workers" in out_of_memory(error)
    assert not out_of_memory(RuntimeError("shapes differ"))
