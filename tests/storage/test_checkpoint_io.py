"""Checkpoints: whole or not at all, and damage is found before it does harm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO

torch.set_num_threads(1)
CHECKPOINT = {"state_dict": {"w": torch.arange(64.0)}, "epoch": 3, "callbacks": {}}


def saved(folder: Path, name: str = "last.ckpt") -> Path:
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, folder / name)
    return folder / name


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        AtomicCheckpointIO().load_checkpoint(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    return str(error.value)


def test_what_was_saved_is_loaded_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = saved(tmp_path / "checkpoints")
    back = AtomicCheckpointIO().load_checkpoint(path)
    assert torch.equal(back["state_dict"]["w"], torch.arange(64.0)) and back["epoch"] == 3
    assert os.listdir(path.parent) == ["last.ckpt"]


def test_every_flipped_bit_is_found_or_harmless(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    data = whole.index(torch.arange(64.0).numpy().tobytes())
    found = 0
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        try:
            back = AtomicCheckpointIO().load_checkpoint(path)
        except UserError as error:
            found += 1
            assert "damaged" in str(error) and str(path) in str(error)
        else:
            assert not data <= position < data + 256
            assert torch.equal(back["state_dict"]["w"], torch.arange(64.0)) and back["epoch"] == 3
    assert found >= 256


@pytest.mark.parametrize("share", [0.0, 0.999])
def test_a_cut_file_is_refused_and_the_best_one_offered(tmp_path: Path, share: float) -> None:
    path, best = saved(tmp_path), saved(tmp_path, "best.ckpt")
    saved(tmp_path, "newer.ckpt")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    message = refusal(path)
    assert "damaged" in message and f"--ckpt_path {best}" in message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.ckpt")


def test_a_file_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    torch.save(torch.zeros(3), tmp_path / "tensor.ckpt")
    assert "not a checkpoint of Lightning" in refusal(tmp_path / "tensor.ckpt")
    (tmp_path / "text.ckpt").write_text("hello " * 100)
    assert "incomplete, or not a checkpoint" in refusal(tmp_path / "text.ckpt")
    torch.save({"state_dict": {}, "where": Path("x")}, tmp_path / "objects.ckpt")
    assert "more than plain data" in refusal(tmp_path / "objects.ckpt")
    assert "not a file" in refusal(tmp_path)


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot write .*file"):
        saved(tmp_path / "file")


KILLED = """
import os, sys, torch
from pathlib import Path
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
setattr(os, sys.argv[1], lambda *a: os._exit(9))
checkpoint = {"state_dict": {"w": torch.zeros(9)}, "epoch": 4}
AtomicCheckpointIO().save_checkpoint(checkpoint, Path(sys.argv[2]))
"""


def test_killed_while_writing_the_old_one_stays_and_the_next_of_the_name_clears_up(
    python: str, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    command = [python, "-c", KILLED, "replace", str(tmp_path / "epoch=4.ckpt")]
    assert subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 9
    left = [name for name in os.listdir(tmp_path) if name != "last.ckpt"]
    assert len(left) == 1 and left[0].startswith(".")  # Lightning's 'last' does not take it
    assert AtomicCheckpointIO().load_checkpoint(path)["epoch"] == 3
    saved(tmp_path, "epoch=4.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["epoch=4.ckpt", "last.ckpt"]
