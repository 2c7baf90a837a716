"""Forged and damaged checkpoints are refused by name; what is no file among them is passed over."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from fl_lightning import load
from fl_lightning.callbacks import ControlVariates, PartialAveraging
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.run_folder import checkpoints
from tests.helpers.learners import blobs, federated, trainer


def fit(folder: Path, rounds: int, method: Any = ControlVariates, **options: Any) -> Any:
    last = ModelCheckpoint(
        folder / "checkpoints", "last", enable_version_counter=False, save_on_train_epoch_end=True
    )
    run = trainer(rounds, [method(), last], enable_checkpointing=True, default_root_dir=folder)
    module = federated()
    run.fit(module, blobs(), **options)
    return module


def personal() -> Any:
    return PartialAveraging(periods={"net.2.*": "never"})


def weights(name: str, tensor: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def forge(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"][name] = tensor(checkpoint["state_dict"][name])

    return forge


def spoilt(value: torch.Tensor, by: float) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[0] = by
    return value


FORGED = {
    "integers": (
        weights("net.0.weight", torch.Tensor.long),
        r"net\.0\.weight holds torch\.int64 there",
    ),
    "complex": (
        weights("net.0.weight", lambda v: v.to(torch.complex64)),
        r"holds torch\.complex64",
    ),
    "NaN": (
        weights("net.2.bias", lambda v: spoilt(v, float("nan"))),
        r"the weights net\.2\.bias hold values.*finite",
    ),
    "infinite": (
        weights("net.2.bias", lambda v: spoilt(v, float("-inf"))),
        r"net\.2\.bias hold values.*finite",
    ),
    "text": (weights("net.2.bias", lambda v: "hello"), r"net\.2\.bias is a str there"),
    "no dict": (lambda c: c.update(state_dict=[1]), r"its state_dict is a list"),
    "newer": (lambda c: c["federated"].update(version=99), r"version 99 .* newer fl-lightning"),
}


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_weights_are_refused_by_name(tmp_path: Path, forgery: str) -> None:
    fit(tmp_path, 1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    forge, message = FORGED[forgery]
    forge(checkpoint)
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match=message):
        fit(tmp_path, 2, ckpt_path="last")


@pytest.mark.parametrize("by", ["NaN", "integers", "shape"])
def test_a_forged_server_model_is_refused(tmp_path: Path, by: str) -> None:
    """Under partial averaging the server's w lies beside the weights that are evaluated."""
    fit(tmp_path, 1, personal)
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    w = checkpoint["federated"]["w"]
    forged = {"NaN": spoilt(w, float("nan")), "integers": w.long(), "shape": w[1:]}
    checkpoint["federated"]["w"] = forged[by]
    torch.save(checkpoint, path)
    with pytest.raises(UserError, match="the server's model"):
        fit(tmp_path, 2, personal, ckpt_path="last")


class Hung(Exception):
    pass


def test_pipes_and_links_to_nothing_among_checkpoints_are_passed_over(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    os.mkfifo(folder / "pipe.ckpt")
    (folder / "gone.ckpt").symlink_to(tmp_path / "nowhere.ckpt")
    (folder / "circle.ckpt").symlink_to(folder / "circle.ckpt")
    (folder / "folder.ckpt").mkdir()

    def hung(*_: Any) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(60)
    try:
        fit(tmp_path, 3, ckpt_path=str(folder / "last.ckpt"))
        assert [path.name for path in checkpoints(tmp_path)] == ["last.ckpt"]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


STRANGERS: dict[str, Any] = {
    "a bare tensor": torch.zeros(3),
    "a list": [1, 2],
    "another server's": {"federated": {"server": 3}},
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


IN_PLACE_OF_THE_LAST: dict[str, Any] = {
    "a bare tensor": torch.zeros(3),
    "a list": [1, 2],
    "a number": 3,
}
IN_PLACE_OF_FEDERATED: dict[str, Any] = {
    "another server's": {"server": 3},
    "a tensor": torch.zeros(3),
    "a number": 3,
    "a version that is none": {"version": "1"},
}
READS: dict[str, Callable[[Path], Any]] = {
    "resumed": lambda folder: fit(folder, 2, ckpt_path=str(folder / "checkpoints" / "last.ckpt")),
    "its rows": lambda folder: load(folder).client_state("ControlVariates.c_i", 0),
    "its data": lambda folder: load(folder, data=blobs()).data,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize(
    "content",
    [*IN_PLACE_OF_THE_LAST.values(), *IN_PLACE_OF_FEDERATED.values()],
    ids=[*IN_PLACE_OF_THE_LAST, *(f"federated: {name}" for name in IN_PLACE_OF_FEDERATED)],
)
def test_whatever_lies_in_place_of_a_checkpoint_is_refused_in_a_paragraph(
    tmp_path: Path, content: Any, read: Callable[[Path], Any]
) -> None:
    fit(tmp_path, 1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    if any(content is each for each in IN_PLACE_OF_FEDERATED.values()):
        content = {**torch.load(path, weights_only=True), "federated": content}
    torch.save(content, path)
    with pytest.raises(UserError) as refused:
        read(tmp_path)
    assert "\n" not in str(refused.value) and "checkpoint" in str(refused.value)


@pytest.mark.parametrize("weights", ["all", "others", "a number"])
def test_a_file_of_weights_is_no_checkpoint_to_resume(tmp_path: Path, weights: str) -> None:
    fit(tmp_path, 1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    own = torch.load(path, weights_only=True)["state_dict"]
    others = {"net.0.weight": torch.zeros(2)}
    torch.save({"state_dict": {"all": own, "others": others, "a number": 3}[weights]}, path)
    with pytest.raises(UserError, match=r"not written by a federated run|of another model"):
        fit(tmp_path, 2, ckpt_path=str(path))


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


def test_what_a_checkpoint_lacks_is_named_where_rows_are_read(tmp_path: Path) -> None:
    fit(tmp_path, 1)
    path = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    torch.save({**checkpoint, "federated": {"server": 3}}, path)
    with pytest.raises(UserError, match=r"damaged: federated\.\w+ in it"):
        load(tmp_path).client_state("ControlVariates.c_i", 0)
