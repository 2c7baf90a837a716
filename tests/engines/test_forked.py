"""Clients side by side in forked processes: the bits of one after the other, random numbers too,
and one paragraph for whatever ends a worker."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import FederatedModule
from fl_lightning.callback import ClientState, FederatedCallback, Upload
from fl_lightning.callbacks import ControlVariates, DivergenceLogger, QuantizedUpdate
from fl_lightning.engines import forked
from fl_lightning.engines.forked import Forked, WorkerEnded
from tests.helpers.learners import Dropping, Lit, blobs, client_rows, federated, momentum, trainer
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
    """Keeps, logs and uploads something of each client."""

    seen = ClientState(shape=(2,), synchronised=False)
    moved = Upload(shape=())

    def on_local_end(self, clients: Any) -> None:
        self.seen[clients] = self.seen[clients] + clients.sizes
        self.moved[clients] = clients.norm(clients.x - clients.start)[:, 0]
        clients.log("counting/steps", clients.steps[:, 0])

    def on_server_update(self, server: Any) -> None:
        server.log("counting/moved", self.moved.mean())


CASES: dict[str, Any] = {
    "fedavg": ({}, lambda: []),
    "scaffold": ({}, lambda: [ControlVariates(), DivergenceLogger(), Counting()]),
    "full gradients": ({}, lambda: [ControlVariates(estimate="gradient")]),
    "coded": ({"clip_norm": 0.5}, lambda: [QuantizedUpdate()]),
    "momentum kept": ({"client_optimizer": momentum, "keep_optimizer_state": True}, lambda: []),
}


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


@pytest.mark.parametrize("name", CASES)
def test_same_bits_for_any_number_of_processes(name: str) -> None:
    arguments, callbacks = CASES[name]
    reference = ran("sequential", callbacks=callbacks(), **arguments)
    for workers in (1, 2, 3):
        forked_run = ran("concurrent", callbacks=callbacks(), workers=workers, **arguments)
        assert forked_run[0].engine_facts["workers"] == f"{workers} processes"
        require_same(forked_run, reference)


def test_a_round_without_clients_goes_by_after_rounds_with_some() -> None:
    trained: list[int] = []

    class Number(FederatedCallback):
        def on_round_end(self, server: Any) -> None:
            trained.append(server.round)

    options: dict[str, Any] = {"rounds": 8, "sampling": "poisson", "participation": 0.1}
    reference = ran("sequential", callbacks=[Number()], **options)
    assert set(range(trained[0], 8)) - set(trained)  # in which no round ended with clients
    require_same(ran("concurrent", workers=2, **options), reference)


def test_auto_takes_processes_where_clients_draw_and_their_steps_take_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fl_lightning.engines.auto.FORK_SECONDS", 0.0)
    reference = ran("sequential")
    module, logged = ran("auto", workers=2)
    assert str(module.run.plan) == "concurrent × 2 processes"
    assert "each process has its own generators" in module.engine_facts["why"]
    require_same((module, logged), reference)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    whole = ran("concurrent", rounds=4, callbacks=[ControlVariates()], workers=2)
    torch.manual_seed(3)
    options: dict[str, Any] = {"engine": "concurrent", "participation": 0.5, "local_epochs": 1.5}
    first = trainer(2, [ControlVariates()], enable_checkpointing=True, default_root_dir=tmp_path)
    first.fit(federated(Drawing(), workers=2, **options), blobs())
    first.save_checkpoint(tmp_path / "two.ckpt")
    second = trainer(4, [ControlVariates()], default_root_dir=tmp_path)
    module = federated(Drawing(), workers=3, **options)
    second.fit(module, blobs(), ckpt_path=tmp_path / "two.ckpt")
    assert torch.equal(module.global_vector, whole[0].global_vector)


class Failing(Drawing):
    """Does something in the second step of round 1, in a worker or wherever it trains."""

    def act(self) -> None:
        raise ValueError("a broken learner")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 1 and batch_idx == 1:
            self.act()
        return super().training_step(batch, batch_idx)


def test_an_error_names_round_client_and_step_and_ends_the_round() -> None:
    with pytest.raises(ValueError, match="a broken learner") as caught:
        ran("concurrent", learner=Failing, workers=2)
    notes = " ".join(getattr(caught.value, "__notes__", ["round 1, client, local step 1"]))
    assert "round 1, client" in notes and "local step 1" in notes
    assert not children()


def refuse() -> None:
    raise OSError("no forked process may use this")


def exhaust_memory() -> None:
    """Ask for more than the process may have, as in a container that is too small."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    bytearray(256 << 20)


@pytest.mark.parametrize(
    ("act", "said"), [(refuse, "no forked process may use this"), (exhaust_memory, "MemoryError")]
)
def test_what_fails_in_a_worker_alone_is_trained_in_the_run_itself(act: Any, said: str) -> None:
    run_itself = os.getpid()

    class Refusing(Failing):
        def act(self) -> None:
            if os.getpid() != run_itself:
                act()

    module, logged = ran("concurrent", learner=Refusing, workers=2)
    require_same((module, logged), ran("sequential", learner=Drawing))
    assert sum(said in note for note in module.notes) == 1


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


def test_a_worker_that_ends_within_a_message_is_reported() -> None:
    """A client's result is larger than what a pipe holds, so its worker may die while it sends."""
    ours, theirs = Pipe()
    worker = subprocess.Popen(["sleep", "100"])
    worker.kill()
    os.write(theirs.fileno(), (1000).to_bytes(4, "big") + b"half a message")
    theirs.close()
    module = federated(Drawing(), engine="concurrent", workers=2)
    caught: list[str] = []

    class Take(FederatedCallback):
        def on_round_start(self, server: Any) -> None:
            engine = module.run.engine
            child = forked.Child(worker.pid, ours, tasks=deque([(0, 3)]))
            engine._children.append(child)
            with pytest.raises(WorkerEnded, match="client 3 in round 0 was ended by SIGKILL") as e:
                engine._take(child, SimpleNamespace(t=0), None)
            caught.append(str(e.value))

    trainer(1, [Take()]).fit(module, blobs())
    assert len(caught) == 1


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


KEPT: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict of lists": lambda: {"norm": []},
    "array": lambda: np.zeros(10),
    "filled list": lambda: [0.0] * 10,
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_a_method_keeps_in_an_attribute_is_not_lost(kind: str) -> None:
    """It should be declared; until it is, clients train in the run's own process."""

    class Keeping(FederatedCallback):
        def __init__(self) -> None:
            super().__init__()
            self.kept = KEPT[kind]()

        def on_local_end(self, clients: Any) -> None:
            norm = float(clients.norm(clients.x))
            if kind == "list":
                self.kept.append(norm)
            elif kind == "dict of lists":
                self.kept["norm"].append(norm)
            else:
                self.kept[clients.client_ids[0]] += norm

        def all(self) -> list[float]:
            kept = self.kept["norm"] if kind == "dict of lists" else self.kept
            return sorted(np.ravel(kept).tolist())

    beside, reference = Keeping(), Keeping()
    run = ran("concurrent", callbacks=[beside], workers=2)
    require_same(run, ran("sequential", callbacks=[reference]))
    assert beside.all() == pytest.approx(reference.all(), rel=1e-12)
    assert any("Keeping.kept is changed in a hook" in note for note in run[0].notes)


@pytest.mark.slow
def test_a_worker_killed_at_any_moment_leaves_a_run_that_resumes_to_the_same_bits(
    tmp_path: Path,
) -> None:
    options: dict[str, Any] = {"engine": "concurrent", "participation": 0.5, "local_epochs": 1.5}
    settings: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    reference = ran("concurrent", rounds=5, callbacks=[ControlVariates()], workers=2)
    draw = random.Random(1)
    ended = 0

    def fit(checkpoint: Path | None) -> FederatedModule:
        torch.manual_seed(3)
        module = federated(Drawing(), workers=2, **options)
        trainer(5, [ControlVariates()], **settings).fit(module, blobs(), ckpt_path=checkpoint)
        return module

    for moment in range(20):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        stop = threading.Event()
        killer = threading.Thread(target=kill_one, args=(draw.uniform(0.0, 0.4), stop))
        killer.start()
        try:
            module = fit(None)
        except WorkerEnded as error:
            ended += 1
            assert "was ended by SIGKILL" in str(error), moment
            held = sorted(tmp_path.rglob("*.ckpt"), key=os.path.getmtime)
            module = fit(held[-1] if held else None)
        finally:
            stop.set()
            killer.join()
        assert torch.equal(module.global_vector, reference[0].global_vector), moment
        assert client_rows(module).keys() == client_rows(reference[0]).keys()
        assert not children(), moment
    # Workers are there for the larger part of a run, if nothing else uses the cores.
    assert ended >= 4


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


def kill_one(seconds: float, stop: threading.Event) -> None:
    """Kill a worker of this process so many seconds after the first one was there."""
    while not children() and not stop.is_set():
        time.sleep(0.001)
    time.sleep(seconds)
    while not stop.is_set():
        for pid in children():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return


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


@pytest.mark.slow
def test_a_file_that_a_shell_has_left_open_is_not_the_runs(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    script = "from fl_lightning.engines.forked import open_files; print(open_files())"
    with (tmp_path / "lock").open("rb") as lock:
        run = [sys.executable, "-c", script]
        told = subprocess.run(run, pass_fds=[lock.fileno()], capture_output=True, text=True)
    assert (told.stdout, told.returncode) == ("[]\n", 0), told.stderr


def test_a_warning_of_a_worker_is_given_once() -> None:
    class Warning_(Drawing):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 1:
                warnings.warn("a step warns", stacklevel=1)
            return super().training_step(batch, batch_idx)

    forked.__dict__.pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        ran("concurrent", learner=Warning_, workers=2)
    # Two from trial steps before round 0, and one from the fifteen clients in workers.
    assert [str(w.message) for w in told].count("a step warns") <= 3


def test_the_engine_is_what_the_plan_says() -> None:
    module = federated(Drawing(), engine="concurrent", workers=2)
    engines = []

    class Watch(FederatedCallback):
        def on_round_start(self, server: Any) -> None:
            engines.append(type(module.run.engine))

    trainer(1, [Watch()]).fit(module, blobs())
    assert engines == [Forked]


def test_learners_that_draw_nothing_stay_on_threads() -> None:
    module, _ = ran("concurrent", learner=Lit, workers=2)
    assert module.engine_facts["workers"] == "2"


def children() -> list[int]:
    """The processes that this one has started and not waited for, but for those of pytest."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    found = []
    own = Path("/proc/self/cmdline").read_text()  # itself forked from the process that has imports
    for pid in " ".join(path.read_text() for path in tasks).split():
        with suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            if "zygote" not in command or command == own:
                found.append(int(pid))
    return found


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


def test_files_of_installed_packages_and_of_the_system_are_no_data() -> None:
    """A figure that was drawn leaves its font open; a thread may watch this process's memory."""
    import matplotlib

    font = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    with font.open("rb"), Path(os.__file__).open("rb"), open("/proc/self/status"):
        module, _ = ran("concurrent", rounds=1, workers=2)
    assert module.engine_facts["workers"] == "2 processes"


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
