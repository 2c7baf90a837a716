"""Killed anywhere and resumed, on one process and on two."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from fl_lightning import FederatedModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.record.metrics_csv import MetricsCSV
from tests.helpers.commands import table
from tests.helpers.learners import Lit, blobs, client_rows, federated, last_checkpoint, trainer
from tests.helpers.processes import launched

ROUNDS, KILLED_IN = 4, 2
PHASES = ["local step", "commit", "segment", "checkpoint", "after checkpoint", "validation"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Fragile(Lit):
    """Normalisation, dropout, and death where it is told to."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase, self.taken = phase, 0
        self.net = nn.Sequential(
            nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.phase == "local step" and self.current_epoch == KILLED_IN and batch_idx == 2:
            die()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.phase == "validation" and self.current_epoch == KILLED_IN:
            die()
        super().validation_step(batch, batch_idx)


class KilledAtCommit(FederatedCallback):
    def __init__(self, phase: str) -> None:
        super().__init__()
        self._phase = phase

    def on_round_end(self, server: Any) -> None:
        if self._phase == "commit" and server.round == KILLED_IN:
            die()


def killed_at_replace(suffix: str, after: bool, number: int) -> None:
    """Die at (or right after) the n-th file of this kind being renamed into place."""
    replace, seen = os.replace, [0]

    def fatal(source: Any, target: Any, **kwargs: Any) -> None:
        if str(target).endswith(suffix):
            seen[0] += 1
            if seen[0] == number and not after:
                die()
        replace(source, target, **kwargs)
        if str(target).endswith(suffix) and seen[0] == number and after:
            die()

    os.replace = fatal


def run(folder: Path, phase: str, rank: int, world: int) -> None:
    if phase == "segment":
        killed_at_replace(".safetensors", after=False, number=KILLED_IN + 1)
    elif phase.endswith("checkpoint") and rank == 0:
        killed_at_replace("last.ckpt", after=phase.startswith("after"), number=KILLED_IN + 1)
    module = federated(
        Fragile(phase),
        participation=0.5,
        local_epochs=1.5,
        clip_norm=1.0,
        lr_decay=0.9,
        weighting="samples",
        keep_optimizer_state=True,
        client_optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        server_optimizer=lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5),
    )
    methods = [
        c.RelaxedInitialization(0.1),
        c.ControlVariates(),
        c.DivergenceLogger(),
        c.CommunicationLogger(),
    ]
    spread = {"strategy": "federated", "devices": world} if world > 1 else {}
    fit = trainer(
        ROUNDS,
        [*methods, KilledAtCommit(phase), last_checkpoint(folder)],
        default_root_dir=folder,
        logger=MetricsCSV(folder),
        enable_checkpointing=True,
        **spread,
    )
    fit.fit(module, blobs(batch_size=10), ckpt_path="last")
    leave(folder, rank, module)


def leave(folder: Path, rank: int, module: FederatedModule) -> None:
    """Write w, the learner's weights and buffers, and the clients' rows of this process."""
    weights = {("learner", key): value for key, value in module.learner.state_dict().items()}
    left = {"w": module.global_vector.detach().clone(), **weights, **client_rows(module)}
    torch.save(left, folder / f"end-{rank}.pt")


def launch(folder: Path, world: int = 1, phase: str = "") -> list[int]:
    return launched(run, world, folder, phase)


def ending(folder: Path) -> tuple[dict[Any, Tensor], list[dict[str, str]]]:
    """What the processes of a run have left, and its rows of metrics.csv without times."""
    left: dict[Any, Tensor] = {}
    for path in sorted(folder.glob("end-*.pt")):
        left |= torch.load(path, weights_only=True)
    rows = table(folder / "metrics.csv")
    return left, [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert launch(folder) == [0]
    return ending(folder)


@pytest.fixture(scope="module")
def uninterrupted_on_two(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("two")
    assert launch(folder, world=2) == [0, 0]
    return ending(folder)


def assert_same(folder: Path, expected: Any, exact_metrics: bool = True) -> None:
    left, logged = ending(folder)
    assert left.keys() == expected[0].keys()
    assert not [key for key, value in expected[0].items() if not torch.equal(left[key], value)]
    assert logged == expected[1] or not exact_metrics
    assert [row["round"] for row in logged] == [str(t) for t in range(ROUNDS)]
    for row, other in zip(logged, expected[1], strict=True):
        found = {k: float(v) for k, v in row.items()}
        assert found == pytest.approx({k: float(v) for k, v in other.items()}, rel=1e-6)


@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_resumed_on_one_process(tmp_path: Path, uninterrupted: Any, phase: str) -> None:
    assert launch(tmp_path, phase=phase) == [-signal.SIGKILL]
    assert launch(tmp_path) == [0]
    assert_same(tmp_path, uninterrupted)


@pytest.mark.parametrize("phase", PHASES)
def test_killed_and_resumed_on_two_processes(
    tmp_path: Path, uninterrupted_on_two: Any, phase: str
) -> None:
    codes = launch(tmp_path, world=2, phase=phase)
    assert -signal.SIGKILL in codes and 0 not in codes
    assert launch(tmp_path, world=2) == [0, 0]
    assert_same(tmp_path, uninterrupted_on_two)


def test_two_processes_end_as_one_does(tmp_path: Path, uninterrupted: Any) -> None:
    assert launch(tmp_path, world=2) == [0, 0]
    assert_same(tmp_path, uninterrupted, exact_metrics=False)


def test_one_process_takes_up_what_two_began(tmp_path: Path, uninterrupted: Any) -> None:
    launch(tmp_path, world=2, phase="local step")
    assert launch(tmp_path) == [0]
    assert_same(tmp_path, uninterrupted, exact_metrics=False)


def odd_clients(folder: Path, rank: int, world: int) -> None:
    """Participants that the first process owns none of, with optimizer state and a state of their
    own."""
    module = federated(
        participation=0.4,
        keep_optimizer_state=True,
        client_optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    )
    object.__setattr__(module, "participants", lambda t: (1, 3, 5, 7))
    spread = {"strategy": "federated", "devices": world} if world > 1 else {}
    fit = trainer(3, [c.ControlVariates()], **spread)
    fit.fit(module, blobs(per_client=101))
    metrics = {k: float(v) for k, v in fit.callback_metrics.items() if not k.startswith("time/")}
    torch.save((module.global_vector.detach(), metrics), folder / f"odd-{world}-{rank}.pt")


def test_rows_reach_who_trains_and_evaluation_is_exact_over_processes(tmp_path: Path) -> None:
    assert launched(odd_clients, 1, tmp_path) == [0]
    w, metrics = torch.load(tmp_path / "odd-1-0.pt")
    for world in (2, 3):
        assert launched(odd_clients, world, tmp_path) == [0] * world
        for rank in range(world):
            other, theirs = torch.load(tmp_path / f"odd-{world}-{rank}.pt")
            torch.testing.assert_close(other, w, rtol=0, atol=0 if world == 2 else 1e-12)
            assert theirs == pytest.approx(metrics, rel=1e-6)


def test_a_run_in_double_precision_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """The learner is made in float32, as most are, and its checkpoint holds float64."""

    def run(rounds: int, start: Any = None, **arguments: Any) -> FederatedModule:
        torch.manual_seed(0)
        module = FederatedModule(Lit(), participation=0.3, seed=1, local_epochs=1, **arguments)
        keeping = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
        settings = {"precision": "64-true", "enable_checkpointing": True}
        trainer(rounds, [keeping], **settings).fit(module, blobs(), ckpt_path=start)
        return module

    whole = run(4).global_vector.detach().clone()
    halfway = run(2)
    assert halfway.global_vector.dtype == torch.float64
    halfway.export(tmp_path / "model.pt")
    assert torch.equal(run(4, tmp_path / "last.ckpt").global_vector, whole)
    stands = run(1, init_from=str(tmp_path / "model.pt"), client_optimizer=standing)
    assert torch.equal(stands.global_vector, halfway.global_vector)


def standing(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def test_after_a_refused_resume_the_module_is_made_anew(tmp_path: Path) -> None:
    run = trainer(1)
    run.fit(federated(), blobs())
    run.save_checkpoint(path := tmp_path / "one.ckpt")
    module = federated(lr_decay=0.5)
    with pytest.raises(UserError, match="other settings"):
        trainer(2).fit(module, blobs(), ckpt_path=path)
    with pytest.raises(UserError, match="Make the module anew"):
        trainer(2).fit(module, blobs())
