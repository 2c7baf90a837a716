"""Checkpoints: whole or not at all, and damage is found before it does harm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.errors import UserError
from fl_lightning.storage.atomic_files import written_aside
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO

torch.set_num_threads(1)
CHECKPOINT = {"state_dict": {"w": torch.arange(64.0)}, "epoch": 3, "callbacks": {}}


def saved(folder: Path, name: str = "last.ckpt") -> Path:
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, folder / name)
    return folder / name


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        AtomicCheckpointIO().load_checkpoint(path)
    assert (
        str(path) in str(error.value)
        and "\n" not in str(error.value)
        and len(str(error.value)) < 600
    )
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


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_cut_file_is_refused_and_the_best_one_offered(tmp_path: Path, share: float) -> None:
    path, best = saved(tmp_path), saved(tmp_path, "best.ckpt")
    saved(tmp_path, "newer.ckpt")
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    message = refusal(path)
    assert "damaged" in message and ("empty" in message) == (share == 0.0)
    assert f"--ckpt_path {best}" in message


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
    python: str,
    tmp_path: Path,
) -> None:
    path = saved(tmp_path)
    command = [python, "-c", KILLED, "replace", str(tmp_path / "epoch=4.ckpt")]
    assert subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 9
    left = [name for name in os.listdir(tmp_path) if name != "last.ckpt"]
    assert len(left) == 1 and left[0].startswith(".")  # Lightning's 'last' does not take it
    assert AtomicCheckpointIO().load_checkpoint(path)["epoch"] == 3
    saved(tmp_path, "epoch=4.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["epoch=4.ckpt", "last.ckpt"]


def test_two_runs_write_into_one_folder_at_the_same_time(tmp_path: Path) -> None:
    with written_aside(tmp_path / "seed1.ckpt") as file:
        file.write(b"of the first run")
        saved(tmp_path, "seed2.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["seed1.ckpt", "seed2.ckpt"]


class Tiny(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)


def test_a_trainer_resumes_from_it(tmp_path: Path) -> None:
    def fit(epochs: int, ckpt_path: str | None) -> pl.Trainer:
        trainer = pl.Trainer(
            max_epochs=epochs,
            default_root_dir=tmp_path,
            logger=False,
            plugins=[AtomicCheckpointIO()],
            callbacks=[
                pl.callbacks.ModelCheckpoint(tmp_path, "last", enable_version_counter=False)
            ],
            accelerator="cpu",
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=1,
        )
        trainer.fit(Tiny(), ckpt_path=ckpt_path)
        return trainer

    fit(2, None)
    assert fit(3, "last").global_step == 3
    path = tmp_path / "last.ckpt"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match="damaged"):
        fit(4, "last")


class Quantised(torch.Tensor):
    """A tensor in eight bits, as torchao's: a subclass that wraps two tensors."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Quantised:
        made: Quantised = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)
        return made

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values_, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_, args[0].scale)
        given = [a.values_ * a.scale if isinstance(a, cls) else a for a in args]
        return func(*given, **(kwargs or {}))


def test_tensors_of_a_subclass_that_torch_may_load_are_loaded(tmp_path: Path) -> None:
    weight = Quantised(torch.tensor([1, -3], dtype=torch.int8), torch.tensor(0.5))
    path = tmp_path / "last.ckpt"
    saved = {"state_dict": {"weight": weight}, "pytorch-lightning_version": "2.6.0"}
    with torch.serialization.safe_globals([Quantised]):
        AtomicCheckpointIO().save_checkpoint(saved, path)
        found = AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["weight"]
    assert type(found) is Quantised and (found + 0).tolist() == [0.5, -1.5]


class Unloadable(Quantised):
    """Another version of its class cannot be made of what was saved."""

    newer = False

    def __setstate__(self, state: Any) -> None:
        if self.newer:
            raise AttributeError("'Unloadable' object has no attribute 'block_size'")
        vars(self).update(state)


def test_an_intact_checkpoint_of_an_unloadable_subclass_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = Unloadable(torch.tensor([1, -3], dtype=torch.int8), torch.tensor(0.5))
    saved = {"state_dict": {"weight": weight}, "pytorch-lightning_version": "2.6.0"}
    with torch.serialization.safe_globals([Unloadable]):
        for name in ("last.ckpt", "best.ckpt"):
            AtomicCheckpointIO().save_checkpoint(saved, tmp_path / name)
        monkeypatch.setattr(Unloadable, "newer", True)
        with pytest.raises(UserError, match=r"not damaged.*Unloadable.*no attribute") as error:
            AtomicCheckpointIO().load_checkpoint(tmp_path / "last.ckpt")
    assert "--ckpt_path" not in str(error.value)
