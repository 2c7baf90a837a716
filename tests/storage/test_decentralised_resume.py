"""Decentralised runs have the same bits on 1, 2 and 4 processes, and killed and resumed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.record.metrics_csv import MetricsCSV
from fl_lightning.topologies import ErdosRenyi, ExponentialGraph, Ring
from tests.helpers.learners import Lit, blobs, federated, last_checkpoint, trainer
from tests.helpers.processes import launched
from tests.storage.test_resume import ending, leave

ROUNDS, KILLED_IN = 5, 2


class Normalised(Lit):
    """With buffers, and death in the middle of a round's local steps where it is told to."""

    def __init__(self, fatal: bool) -> None:
        super().__init__()
        self.fatal = fatal
        self.net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fatal and self.current_epoch == KILLED_IN and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class KilledAtTheEnd(FederatedCallback):
    """Dies after a round's exchange, before the round is kept."""

    def __init__(self, fatal: bool) -> None:
        super().__init__()
        self._fatal = fatal

    def on_round_end(self, server: Any) -> None:
        if self._fatal and server.round == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)


# Callbacks, participation, momentum kept.
CASES: dict[str, tuple[Callable[[], list[Any]], Any, bool]] = {
    "oledfl": (
        lambda: [c.Gossip(Ring(), gossip_steps=2), c.RelaxedInitialization(0.5)],
        "all",
        True,
    ),
    "kgt": (
        lambda: [
            c.GradientTracking(),
            c.SharpnessAwareMinimization(0.05),
            c.Gossip(ErdosRenyi(0.5, varying=True), keeps="last"),
            c.SystemHeterogeneity(dropout=0.2),
        ],
        7,
        False,
    ),
    "sgp": (lambda: [c.PushSum(ExponentialGraph()), c.SystemHeterogeneity(min_work=0.5)], 6, True),
}


def run(folder: Path, name: str, dies: str, rank: int, world: int) -> None:
    callbacks, participation, kept = CASES[name]
    module = federated(
        Normalised(dies == "local step" and rank == world - 1),
        participation=participation,
        local_epochs=1.5,
        lr_decay=0.9,
        buffers="own",
        on_nonfinite="skip" if participation != "all" else "stop",
        keep_optimizer_state=kept,
        client_optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    )
    spread = {"strategy": "federated", "devices": world} if world > 1 else {}
    fit = trainer(
        ROUNDS,
        [
            *callbacks(),
            c.CommunicationLogger(),
            KilledAtTheEnd(dies == "end"),
            last_checkpoint(folder),
        ],
        default_root_dir=folder,
        logger=MetricsCSV(folder),
        enable_checkpointing=True,
        **spread,
    )
    fit.fit(module, blobs(batch_size=10), ckpt_path="last")
    leave(folder, rank, module)


def finished(folder: Path, name: str, world: int = 1) -> tuple[dict[Any, Tensor], list[Any]]:
    """What a run leaves that goes on to its end, and what it logged but for times."""
    folder.mkdir(exist_ok=True)
    assert launched(run, world, folder, name, "") == [0] * world
    return ending(folder)


def same(ours: tuple[dict[Any, Tensor], list[Any]], theirs: Any, logged: bool = True) -> None:
    assert ours[0].keys() == theirs[0].keys()
    for key, value in theirs[0].items():
        assert ours[0][key].numpy().tobytes() == value.numpy().tobytes(), key
    for row, other in zip(ours[1], theirs[1], strict=True):
        assert not logged or row == other
        of_gossip = [key for key in other if key.startswith(("gossip/", "communication/"))]
        assert of_gossip and all(row[key] == other[key] for key in of_gossip)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each case a run on one process that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    return {name: finished(folder / name, name) for name in CASES}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world"), [("oledfl", 2), ("sgp", 2), ("kgt", 4)])
def test_several_processes_have_the_bits_of_one(
    tmp_path: Path, whole: Any, name: str, world: int
) -> None:
    same(finished(tmp_path, name, world), whole[name], logged=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dies"),
    [("oledfl", "end"), ("kgt", "local step"), ("kgt", "end"), ("sgp", "local step")],
)
def test_killed_and_resumed_on_one_process(
    tmp_path: Path, whole: Any, name: str, dies: str
) -> None:
    assert launched(run, 1, tmp_path, name, dies) == [-signal.SIGKILL]
    assert (tmp_path / "checkpoints/last.ckpt").exists() and not (tmp_path / "end-0.pt").exists()
    same(finished(tmp_path, name), whole[name])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "then"), [("oledfl", 2), ("kgt", 2), ("sgp", 1)])
def test_killed_on_two_processes_and_resumed(
    tmp_path: Path, whole: Any, name: str, then: int
) -> None:
    codes = launched(run, 2, tmp_path, name, "local step")
    assert -signal.SIGKILL in codes and 0 not in codes
    assert (tmp_path / "checkpoints/last.ckpt").exists()
    same(finished(tmp_path, name, world=then), whole[name], logged=False)
