"""Clients side by side: the same bits as one after the other, errors that say where, learners that
cannot."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning.callback import FederatedCallback
from tests.helpers.learners import Dropping, Lit, blobs, federated, trainer


def seeded(learner: type[Lit], **arguments: Any) -> Any:
    """A module around a learner that starts at the same weights each time."""
    torch.manual_seed(3)
    return federated(learner(), **arguments)


def test_clients_train_at_the_same_time() -> None:
    together = threading.Barrier(2, timeout=20)

    class Meeting(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 0 and threading.current_thread() is not threading.main_thread():
                together.wait()
            return super().training_step(batch, batch_idx)

    module = seeded(Meeting, engine="concurrent", workers=2, participation=4, local_steps=1)
    trainer(1).fit(module, blobs())
    assert torch.get_num_threads() == 1


class Failing(Lit):
    """Fails on the second batch of clients whose first label is 2, after the engine was built."""

    armed = False

    def on_train_epoch_start(self) -> None:
        self.armed = self.current_epoch == 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.armed and batch_idx == 1:
            raise ValueError("a broken learner")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
def test_an_error_names_round_client_and_step_and_ends_the_round(engine: str) -> None:
    module = seeded(Failing, engine=engine, workers=2)
    before: list[Tensor] = []

    class Watch(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            before.append(pl_module.global_vector.detach().clone())

    with pytest.raises(ValueError, match="a broken learner") as caught:
        trainer(3, [Watch()]).fit(module, blobs())
    if sys.version_info >= (3, 11):  # before, errors have no notes
        notes = " ".join(caught.value.__notes__)
        assert "round 1, client" in notes and "local step 1" in notes
    assert len(before) == 1 and torch.equal(before[0], module.global_vector.detach())
    for parameter in module.learner.parameters():  # tied to the global vector, not to a client's
        assert (
            module.global_vector.untyped_storage().data_ptr()
            == parameter.untyped_storage().data_ptr()
        )


class BreakingClients(FederatedCallback):
    """Breaks two clients in round 1; the first one, in the cohort's order, breaks later."""

    def on_local_end(self, clients: Any) -> None:
        (client,) = clients.client_ids
        if clients.round == 1 and client in (1, 3):
            time.sleep(0.5 if client == 1 else 0)
            raise ValueError(f"client {client} is broken")


@pytest.mark.parametrize("learner", [Lit, Dropping], ids=["threads", "processes"])
def test_the_error_of_the_first_client_of_the_cohort_is_raised(learner: type[Lit]) -> None:
    if learner is Dropping and sys.platform != "linux":
        pytest.skip("only Linux forks worker processes")
    module = seeded(learner, engine="concurrent", workers=2, participation="all")
    with pytest.raises(ValueError, match="client 1 is broken"):
        trainer(3, [BreakingClients()]).fit(module, blobs())


def test_interrupting_a_round_stops_its_threads() -> None:
    class Interrupt(pl.Callback):
        def on_client_end(self, trainer: Any, pl_module: Any, done: int, total: int) -> None:
            raise KeyboardInterrupt

    class Slow(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx > 0:
                time.sleep(0.005)
            return super().training_step(batch, batch_idx)

    module = seeded(Slow, engine="concurrent", workers=2, participation=1.0, local_steps=40)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer(1, [Interrupt()]).fit(module, blobs())
    assert not [t for t in threading.enumerate() if t.name.startswith("client")]


def test_a_run_that_failed_keeps_neither_threads_nor_workers() -> None:
    """Lightning calls no teardown then; garbage collection has to do."""

    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            raise ValueError("enough")

    kept = []
    for _ in range(2):
        module = seeded(Lit, engine="concurrent", workers=2, participation=4, local_steps=1)
        with pytest.raises(ValueError, match="enough"):
            trainer(1, [Stop()]).fit(module, blobs())
        kept += [weakref.ref(worker) for worker in module.run.engine.workers]
        del module
    assert len(kept) == 4
    deadline = time.monotonic() + 20
    while [w for w in kept if w() is not None] and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert [w() for w in kept] == [None] * 4
    assert not [t for t in threading.enumerate() if t.name.startswith("client")]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's threads")
def test_the_system_has_ended_the_threads_of_a_run_that_ended() -> None:
    """A thread that is about to end holds a lock of MKL's, which a process forked then inherits."""
    used: set[int] = set()
    left = []

    class Seen(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            used.add(threading.get_native_id())
            return super().training_step(batch, batch_idx)

    for _ in range(6):
        used.clear()
        module = seeded(Seen, engine="concurrent", workers=3, participation=6, local_steps=1)
        trainer(1).fit(module, blobs())
        assert len(used) > 1
        left.append({int(thread) for thread in os.listdir("/proc/self/task")} & used)
    main = {threading.get_native_id()}
    assert left == [main] * 6


def test_the_optimizer_alone_gives_the_bits_of_the_flat_gradient() -> None:
    class Neutral(FederatedCallback):
        def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
            return gradient

    for kind in (torch.float32, torch.float64):
        direct, flat = (seeded(Lit, engine="sequential").to(kind) for _ in range(2))
        trainer(2).fit(direct, blobs(dtype=kind))
        trainer(2, [Neutral()]).fit(flat, blobs(dtype=kind))
        assert np.array_equal(
            direct.global_vector.detach().numpy(), flat.global_vector.detach().numpy()
        )
