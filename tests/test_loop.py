"""The end of a round is atomic."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint

from fl_lightning.callbacks import ControlVariates, PartialAveraging, RelaxedInitialization
from fl_lightning.checks.refusals import check_trainer
from fl_lightning.errors import UserError
from fl_lightning.optim import FedAdam
from tests.helpers.breaking import (
    AT_SERVER,
    BROKEN_IN,
    LOCAL,
    OF_LIGHTNING,
    PLACES,
    Case,
    Fuse,
    Interrupt,
    SavedOnException,
    broken,
    different,
    leavings,
)
from tests.helpers.commands import typed
from tests.helpers.learners import blobs
from tests.helpers.processes import launched


def kept(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adaptive(parameters: Any) -> torch.optim.Optimizer:
    return FedAdam(parameters, lr=0.1)


def heavy(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.5)


def moving() -> list[Any]:
    return [ControlVariates(), RelaxedInitialization(0.1)]


def partial() -> list[Any]:
    return [ControlVariates(), PartialAveraging(period=2)]


OPTIMIZERS = {"client_optimizer": kept, "keep_optimizer_state": True}
OPTIMIZERS |= dict.fromkeys(("lr_decay", "server_lr_decay"), 0.9)
CASES = {
    "sequential": Case(
        moving, engine="sequential", server_optimizer=adaptive, weighting="samples", **OPTIMIZERS
    ),
    "concurrent": Case(
        moving, engine="concurrent", workers=2, capture=True, server_optimizer=heavy, **OPTIMIZERS
    ),
    "stacked": Case(
        moving,
        normed=False,
        engine="stacked",
        clients_at_once=2,
        client_optimizer=plain,
        server_optimizer=adaptive,
    ),
    "partial": Case(
        partial, engine="sequential", client_optimizer=plain, server_optimizer=adaptive
    ),
}
FEW = typed("on_local_step_end on_round_end on_train_epoch_start on_validation_start")
FEW += ("second logger",)


@cache
def uninterrupted(case: str) -> dict[str, Any]:
    return CASES[case].uninterrupted()


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Lightning ignores it for good, once it has seen one."""
    yield
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_a_run_repeats_itself() -> None:
    assert not different(CASES["partial"].uninterrupted(), uninterrupted("partial"))


@pytest.mark.parametrize("place", PLACES)
def test_fitted_again_after_an_exception(place: str) -> None:
    assert not different(CASES["sequential"].fitted_again(Fuse(place)), uninterrupted("sequential"))


@pytest.mark.parametrize(
    "place", [*AT_SERVER, *LOCAL, "on_before_optimizer_step", "first logger", "second logger"]
)
def test_a_round_that_was_broken_off_never_began(place: str) -> None:
    module, run, logged = CASES["partial"].begun(Fuse(""), rounds=BROKEN_IN)
    run.fit(module, blobs())
    expected = leavings(module, run, logged)
    fuse = Fuse(place)
    module, run, logged = CASES["partial"].begun(fuse)
    broken(module, run, fuse)
    left = leavings(module, run, logged)
    loggers = {"monitored", *(name for name in left if name.startswith("logged"))}
    assert not set(different(left, expected)) - loggers


@pytest.mark.parametrize("place", PLACES)
def test_resumed_from_an_exceptions_checkpoint(tmp_path: Path, place: str) -> None:
    assert not different(
        CASES["sequential"].resumed(Fuse(place), tmp_path, False), uninterrupted("sequential")
    )


@pytest.mark.parametrize(
    "place", ["training_step", "on_round_end", "on_train_batch_end", "on_validation_epoch_end"]
)
def test_resumed_from_lightnings_checkpoint_of_an_exception(tmp_path: Path, place: str) -> None:
    assert not different(
        CASES["sequential"].resumed(Fuse(place), tmp_path, True), uninterrupted("sequential")
    )


@pytest.mark.parametrize("place", FEW)
@pytest.mark.parametrize("case", ["concurrent", "stacked", "partial"])
def test_in_each_engine_and_under_partial_averaging(tmp_path: Path, case: str, place: str) -> None:
    assert not different(CASES[case].fitted_again(Fuse(place)), uninterrupted(case))
    assert not different(CASES[case].resumed(Fuse(place), tmp_path, False), uninterrupted(case))


@pytest.mark.parametrize(
    ("round", "place"), [(0, "on_local_end"), (0, "on_train_epoch_start"), (3, "on_round_end")]
)
def test_in_the_first_and_the_last_round(tmp_path: Path, place: str, round: int) -> None:
    expected = uninterrupted("partial")
    assert not different(CASES["partial"].fitted_again(Fuse(place, round=round)), expected)
    assert not different(
        CASES["partial"].resumed(Fuse(place, round=round), tmp_path, False), expected
    )


@pytest.mark.parametrize("place", [*LOCAL[-2:], "on_before_optimizer_step", "on_server_update"])
def test_interrupted_by_ctrl_c_in_a_hook(place: str) -> None:
    case = "concurrent" if place in LOCAL else "sequential"
    assert not different(
        CASES[case].fitted_again(Fuse(place, KeyboardInterrupt)), uninterrupted(case)
    )


@pytest.mark.parametrize(("case", "first"), [("sequential", 1), ("partial", 24)])
def test_interrupted_by_ctrl_c_at_any_line_of_the_end(case: str, first: int) -> None:
    # Most lines are the same for both, which take turns; with a step of 1 it takes minutes.
    for line in range(first, 10_000, 46):
        fuse = Interrupt(line)
        try:
            left = CASES[case].fitted_again(fuse)
        except pytest.fail.Exception:  # fewer lines than that
            assert line > 200 and not fuse.blown
            break
        assert not different(left, uninterrupted(case)), line


@pytest.mark.parametrize("hook", [*OF_LIGHTNING[:2], *OF_LIGHTNING[4:]])
@pytest.mark.parametrize("given", [{}, {"limit_val_batches": 0}])
def test_resumed_from_a_checkpoint_that_was_saved_within_a_round(
    tmp_path: Path, hook: str, given: Any
) -> None:
    case, path = CASES["partial"], tmp_path / "within.ckpt"

    def save(run: Any, *_: Any) -> None:
        if run.current_epoch == 1:
            run.save_checkpoint(path)

    saving = Callback()
    setattr(saving, hook, save)
    module, run, before = case.begun(Fuse(""), saving, default_root_dir=tmp_path, **given)
    run.fit(module, blobs())
    if path.exists():
        expected = leavings(module, run, before)
        module, run, logged = case.begun(Fuse(""), default_root_dir=tmp_path, **given)
        run.fit(module, blobs(), ckpt_path=path)
        logged.add(before.table)
        assert not different(leavings(module, run, logged), expected)
    else:
        assert "validation" in hook and given


def on_two(folder: Path, failing: int, place: str, rank: int, world: int) -> None:
    """A run with a checkpoint a round; one process fails, the other finds out."""
    fuse = Fuse(place if rank == failing else "")
    last = ModelCheckpoint(
        folder, "last", save_top_k=1, enable_version_counter=False, save_on_train_epoch_end=True
    )
    given = {"default_root_dir": folder, "strategy": "federated", "devices": 2}
    never = SavedOnException(folder / "never.ckpt")
    module, run, logged = CASES["partial"].begun(fuse, last, never, **given)
    run.fit(module, blobs(), ckpt_path="last")
    torch.save(leavings(module, run, logged), folder / f"left-{rank}.pt")


def test_one_of_two_processes_fails(tmp_path: Path) -> None:
    def left(folder: Path) -> list[dict[str, Any]]:
        assert launched(on_two, 2, folder, -1, "") == [0, 0]
        return [torch.load(folder / f"left-{rank}.pt") for rank in (0, 1)]

    whole = left(tmp_path / "whole")
    for failing, place in ((0, "second logger"), (1, "on_round_end"), (1, "on_train_batch_end")):
        folder = tmp_path / f"{failing} {place}"
        assert 0 not in launched(on_two, 2, folder, failing, place)
        assert not (folder / "never.ckpt").exists()
        for resumed, expected in zip(left(folder), whole, strict=True):
            before = {name for name in expected if name.startswith("logged in round")}
            assert not set(different(resumed, expected)) - (before - set(resumed))


def test_several_processes_save_nothing_as_an_exception_passes(tmp_path: Path) -> None:
    _, run, _ = CASES["partial"].begun(
        Fuse(""), ModelCheckpoint(tmp_path, save_on_exception=True), strategy="federated", devices=2
    )
    with pytest.raises(UserError, match="save_on_exception"):
        check_trainer(run)
