"""Clients side by side in forked processes: the bits of one after the other, random numbers too,
and one paragraph for whatever ends a worker."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning.callback import ClientState, FederatedCallback, Upload
from fl_lightning.callbacks import ControlVariates
from fl_lightning.engines import forked
from fl_lightning.engines.forked import WorkerEnded
from tests.helpers.learners import Dropping, blobs, client_rows, federated, trainer
from tests.helpers.processes import same_models_on_one_and_two

pytestmark = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="only Linux forks worker processes"
)


class Drawing(Dropping):
    """Draws from torch's, NumPy's and Python's generators, has buffers and a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))
        self.accuracy = MulticlassAccuracy(num_classes=4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        noise = torch.as_tensor(np.random.standard_normal(x.shape), dtype=x.dtype)
        out = self.net(x + 0.01 * noise)
        self.accuracy.update(out.detach().float(), y)
        self.log("train/acc", self.accuracy, on_step=False, on_epoch=True)
        loss = nn.functional.cross_entropy(out, y)
        self.log("train/loss", loss)
        return loss


class Counting(FederatedCallback):
    seen = ClientState(shape=(2,), synchronised=False)
    moved = Upload(shape=())

    def on_local_end(self, clients: Any) -> None:
        self.seen[clients] = self.seen[clients] + clients.sizes
        self.moved[clients] = clients.norm(clients.x - clients.start)[:, 0]
        clients.log("counting/steps", clients.steps[:, 0])

    def on_server_update(self, server: Any) -> None:
        server.log("counting/moved", self.moved.mean())


def ran(engine: str, rounds: int = 3, callbacks: Any = (), learner: Any = Drawing, **more: Any):
    torch.manual_seed(3)
    more = {"participation": 0.5, "local_epochs": 1.5, **more}
    module = federated(learner(), engine=engine, **more)
    run = trainer(rounds, callbacks)
    run.fit(module, blobs())
    logged = {k: float(v) for k, v in run.callback_metrics.items() if not k.startswith("time/")}
    return module, logged


def require_same(one: Any, other: Any) -> None:
    assert torch.equal(one[0].global_vector, other[0].global_vector)
    rows = client_rows(other[0])
    assert client_rows(one[0]).keys() == rows.keys()
    assert all(torch.equal(row, rows[key]) for key, row in client_rows(one[0]).items())
    named = dict(other[0].learner.named_buffers())
    assert all(torch.equal(b, named[name]) for name, b in one[0].learner.named_buffers())
    assert one[1] == other[1]


def test_auto_takes_processes_where_clients_draw_and_their_steps_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fl_lightning.engines.auto.FORK_SECONDS", 0.0)
    reference = ran("sequential", callbacks=[ControlVariates(), Counting()])
    module, logged = ran("auto", callbacks=[ControlVariates(), Counting()], workers=2)
    assert str(module.run.plan) == "concurrent × 2 processes"
    assert "each process has its own generators" in module.engine_facts["why"]
    require_same((module, logged), reference)


class Failing(Drawing):
    """Does something in the second step of round 1, in a worker or wherever it trains."""

    def act(self) -> None:
        raise ValueError("a broken learner")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 1 and batch_idx == 1:
            self.act()
        return super().training_step(batch, batch_idx)


def test_what_fails_in_a_worker_alone_is_trained_in_the_run_itself() -> None:
    run_itself = os.getpid()

    class Refusing(Failing):
        def act(self) -> None:
            if os.getpid() != run_itself:
                raise OSError("no forked process may use this")

    module, logged = ran("concurrent", learner=Refusing, workers=2)
    require_same((module, logged), ran("sequential", learner=Drawing))
    (note,) = [note for note in module.notes if "no forked process may use this" in note]
    assert "in round 1" in note and not children()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_is_ended_leaves_one_paragraph_and_no_round(number: int) -> None:
    run_itself = os.getpid()
    rounds: list[Tensor] = []

    class Ending(Failing):
        def act(self) -> None:
            assert os.getpid() != run_itself
            os.kill(os.getpid(), number)

        def on_train_epoch_end(self) -> None:
            rounds.append(torch.cat([p.detach().view(-1) for p in self.parameters()]).clone())

    torch.manual_seed(3)
    module = federated(Ending(), engine="concurrent", participation=0.5, workers=2)
    with pytest.raises(WorkerEnded, match=f"in round 1 was ended by {signal.Signals(number).name}"):
        trainer(3).fit(module, blobs())
    assert len(rounds) == 1 and torch.equal(rounds[0], module.global_vector)
    assert not children()


def test_a_worker_that_waits_for_what_it_does_not_have_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lock that a thread of the run holds while the worker is forked is never given back."""
    monkeypatch.setattr(forked, "STUCK", 1.0)
    monkeypatch.setattr(forked, "LOOK", 0.2)
    lock = threading.Lock()

    class Waiting(Failing):
        def act(self) -> None:
            with lock:
                pass

    with lock, pytest.raises(WorkerEnded, match="has not used the processor"):
        ran("concurrent", learner=Waiting, workers=2)
    assert not children()


@pytest.mark.parametrize("make", [list, lambda: np.zeros(10)], ids=["list", "array"])
def test_what_a_method_keeps_in_an_attribute_is_not_lost(make: Any) -> None:
    """It should be declared; until it is, clients train in the run's own process."""

    class Keeping(FederatedCallback):
        def __init__(self) -> None:
            super().__init__()
            self.kept = make()

        def on_local_end(self, clients: Any) -> None:
            norm = float(clients.norm(clients.x))
            if isinstance(self.kept, list):
                self.kept.append(norm)
            else:
                self.kept[clients.client_ids[0]] += norm

    beside, reference = Keeping(), Keeping()
    run = ran("concurrent", callbacks=[beside], workers=2)
    require_same(run, ran("sequential", callbacks=[reference]))
    assert sorted(beside.kept) == pytest.approx(sorted(reference.kept), rel=1e-12)
    assert any("Keeping.kept is changed in a hook" in note for note in run[0].notes)


def test_a_worker_killed_after_its_last_client_leaves_the_run_whole() -> None:
    class Killer(pl.Callback):
        killed = 0

        def on_client_end(self, trainer: Any, pl_module: Any, done: int, total: int) -> None:
            if done < total:
                return
            for pid in children():
                os.kill(pid, signal.SIGKILL)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                self.killed += 1

    killer = Killer()
    reference = ran("concurrent", rounds=3, workers=2)
    module = ran("concurrent", rounds=3, callbacks=[killer], workers=2)[0]
    # How many workers a round has depends on measured time; each round has at least one.
    assert killer.killed >= 3
    assert torch.equal(module.global_vector, reference[0].global_vector)
    assert not children()


def test_an_interrupted_round_ends_its_workers() -> None:
    class Interrupt(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, done: int, total: int) -> None:
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        ran("concurrent", callbacks=[Interrupt()], workers=2)
    assert not children()


def test_a_file_that_is_open_for_reading_keeps_clients_in_the_run(tmp_path: Path) -> None:
    """Forked processes would share its position: each would read what another one skipped."""
    (tmp_path / "samples.bin").write_bytes(b"1234")
    with (tmp_path / "samples.bin").open("rb"):
        module, logged = ran("auto", workers=2)
    assert module.run.plan.engine == "sequential"
    assert "samples.bin is open for reading" in module.engine_facts["why"]
    torch.set_num_threads(1)
    require_same((module, logged), ran("sequential"))


EARLIER: set[int] = set()


@pytest.fixture(autouse=True)
def processes_of_earlier_tests_do_not_count() -> None:
    EARLIER.update(children())


def children() -> list[int]:
    """The processes that this test has started and not waited for."""
    found: list[int] = []
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += map(int, task.read_text().split())
    return [pid for pid in found if pid not in EARLIER]


@pytest.mark.slow
def test_two_processes_of_two_workers_have_the_bits_of_one(tmp_path: Path) -> None:
    same_models_on_one_and_two(on_ranks, tmp_path)


def on_ranks(folder: Path, rank: int, world: int) -> None:
    given = {} if world == 1 else {"strategy": "federated", "devices": world}
    torch.manual_seed(3)
    module = federated(Drawing(), engine="concurrent", participation=4, workers=2)
    trainer(2, [ControlVariates()], default_root_dir=folder, **given).fit(module, blobs())
    assert module.run.plan is not None and module.run.plan.processes
    if rank == 0:
        torch.save(module.export().state_dict(), folder / f"{world}.pt")


def test_a_file_that_is_opened_between_rounds_is_not_shared(tmp_path: Path) -> None:
    (tmp_path / "samples.bin").write_bytes(b"1234")
    opened: list[Any] = []

    class Opening(FederatedCallback):
        def on_round_end(self, server: Any) -> None:
            if not opened:
                opened.append((tmp_path / "samples.bin").open("rb"))

    module, logged = ran("concurrent", callbacks=[Opening()], workers=2)
    opened[0].close()
    require_same((module, logged), ran("sequential"))
    assert any("from round 1 on" in note and "samples.bin" in note for note in module.notes)
