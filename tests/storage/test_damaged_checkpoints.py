"""Checkpoints that no run resumes from are refused; other files beside them are passed over."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.callbacks import ControlVariates
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.run_folder import checkpoints
from tests.helpers.learners import blobs, federated, last_checkpoint, trainer


def fit(folder: Path, rounds: int, method: Any = ControlVariates, **options: Any) -> Any:
    callbacks = [method(), last_checkpoint(folder)]
    run = trainer(rounds, callbacks, enable_checkpointing=True, default_root_dir=folder)
    module = federated()
    run.fit(module, blobs(), **options)
    return module


def test_pipes_and_links_to_nothing_among_checkpoints_are_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    os.mkfifo(folder / "pipe.ckpt")
    (folder / "gone.ckpt").symlink_to(tmp_path / "nowhere.ckpt")
    (folder / "circle.ckpt").symlink_to(folder / "circle.ckpt")
    (folder / "folder.ckpt").mkdir()

    fit(tmp_path, 3, ckpt_path=str(folder / "last.ckpt"))
    assert [path.name for path in checkpoints(tmp_path)] == ["last.ckpt"]


STRANGERS: dict[str, Any] = {
    "a list": [1, 2],
    "clients of another kind": {"federated": {"clients": {"server": 3}}},
    "a number": {"federated": 3},
}


@pytest.mark.parametrize("content", STRANGERS.values(), ids=STRANGERS)
def test_a_file_of_the_users_own_beside_the_checkpoints(tmp_path: Path, content: Any) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    torch.save(content, folder / "other.ckpt")
    (folder / "notes.ckpt").write_text("nothing of torch's")
    alone = fit(tmp_path / "alone", 2)
    beside = fit(tmp_path, 2)
    assert torch.equal(alone.global_vector, beside.global_vector)
    again = fit(tmp_path, 3, ckpt_path=str(folder / "last.ckpt"))
    assert again.current_epoch == 3 and (folder / "other.ckpt").is_file()


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (lambda c: c.pop("federated"), "not written by a federated run"),
        (lambda c: c["federated"].update(version=99), "version 99 .* that wrote it"),
        (lambda c: c["state_dict"].pop("net.0.bias"), r"another model than Lit:.*net\.0\.bias"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path, forge: Any, said: str) -> None:
    fit(tmp_path, 1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    forge(checkpoint)
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match=said):
        fit(tmp_path, 2, ckpt_path="last")


def test_a_checkpoint_of_weights_only_is_refused_by_that_and_its_weights_are_taken(
    tmp_path: Path,
) -> None:
    module, run = federated(), trainer(1)
    run.fit(module, blobs())
    run.save_checkpoint(path := str(tmp_path / "weights.ckpt"), weights_only=True)
    with pytest.raises(UserError, match=r"holds weights only.*give it as model\.init_from"):
        fit(tmp_path, 2, ckpt_path=path)
    begun = federated(init_from=path, client_optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    trainer(1).fit(begun, blobs())
    assert torch.equal(begun.global_vector, module.global_vector)
