"""What cannot be written is said in one paragraph, and what was there stays.

A full disk, devices, pipes, links.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from fl_lightning.errors import UserError, out_of_memory
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from fl_lightning.storage.files import named, writable_as_file, written_aside


def saved(path: Path, size: int) -> None:
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"w": torch.ones(size)}}, path)


def _on_a_full_disk(path: Path, limit: int, answer: multiprocessing.Queue[str]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        saved(path, 200_000)
        answer.put("written")
    except BaseException as error:
        answer.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("limit", [0, 1_000, 100_000, 800_000])
def test_a_disk_that_fills_while_a_checkpoint_is_written(limit: int, tmp_path: Path) -> None:
    """torch.save says `unexpected pos 768 vs 662`; the checkpoint of before stays."""
    path = tmp_path / "last.ckpt"
    saved(path, 10)
    before = path.read_bytes()
    context = multiprocessing.get_context("fork")
    answer = context.Queue()
    child = context.Process(target=_on_a_full_disk, args=(path, limit, answer))
    child.start()
    told = answer.get(timeout=100)
    child.join()
    assert told.startswith(f"UserError: Cannot write {path}: File too large"), told
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["last.ckpt"]


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match="it is a pipe, and not a file"):
            saved(tmp_path / name, 10)
        assert (tmp_path / name).is_fifo()


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


def test_what_is_no_file_is_refused_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name, kind in (("folder", "a folder"), ("loop", "a link that leads to itself")):
        with pytest.raises(UserError, match=kind), written_aside(tmp_path / name) as file:
            file.write(b"x")
    assert writable_as_file(tmp_path / "nothing") == tmp_path / "nothing"


def test_another_error_of_the_writer_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), written_aside(tmp_path / "x"):
        raise ZeroDivisionError
    assert not os.listdir(tmp_path)


def test_a_path_is_expanded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/$USER")
    monkeypatch.setenv("WHERE", "a")
    assert named("~/x") == Path("/home/$USER/x")
    assert named("$WHERE/${WHERE}") == Path("a/a") and named("$UNKNOWN_NAME") == Path(
        "$UNKNOWN_NAME"
    )


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
    assert out_of_memory(error).startswith(
        "out of memory: "
    ) and "--model.workers" in out_of_memory(error)
    assert not out_of_memory(RuntimeError("shapes differ"))
