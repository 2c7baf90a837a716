"""``python -m benchmarks.soak`` (``make soak``): real runs are killed, started again, killed again,
and in the end each has to leave the bits of a run that nothing happened to.

Half of the kills come at random times from outside. The others are aimed: a phase of the run, the
number of its visit and a number of lines within it are drawn, and the process kills itself there,
so that phases of microseconds are hit, too. SIGKILL throughout. Compared are all tensors of the
last checkpoint, the clients' rows and metrics.csv but for times. The table has a row a setting and
a column a phase; it exits with 1 if bits differ, if a run does not go on, or if a phase is empty.
"""

from __future__ import annotations

import argparse
import csv
import gc
import hashlib
import json
import mmap
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from fl_lightning.__main__ import main as command
from fl_lightning.aggregation.update_accumulator import UpdateAccumulator
from fl_lightning.client.local_step import LocalStep
from fl_lightning.datamodules import FederatedDataModule
from fl_lightning.errors import UserError
from fl_lightning.loop import FederatedLoop
from fl_lightning.record.metrics_csv import MetricsCSV
from fl_lightning.storage import segments
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.rows_on_disk import index_in
from fl_lightning.storage.run_state import RunState

PHASES = (
    "start-up",
    "between rounds",
    "round",
    "reading",
    "training",
    "sum",
    "commit",
    "segment",
    "checkpoint",
    "metrics",
)
ROUNDS = 6
KILLS_OF_A_RUN = 8  # then it may end
PATIENCE = 120  # seconds after which a process counts as hung
COMMON = ["fit", "-c", "base", "-c", "data/digits", "-c", "trainer/cpu"]
COMMON += ["--trainer.max_epochs", str(ROUNDS), "--trainer.enable_progress_bar", "false"]
COMMON += ["--model.participation", "0.5", "--model.local_epochs", "1", "--ckpt_path", "last"]


class Dropping(nn.Sequential):
    """Draws random numbers, so that ``concurrent`` trains in worker processes."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))


SCAFFOLD = ["-c", "method/scaffold", "-c", "method/ri"]
DROPPING = ["--model.learner.init_args.network", "benchmarks.soak.Dropping"]
ONE_BY_ONE = ["--model.engine", "sequential"]
TWO_WORKERS = ["--model.engine", "concurrent", "--model.workers", "2"]
# A new graph in each round, and clients that are away.
GRAPHS = ["--method.topology", "ErdosRenyi", "--method.topology.p", "0.5"]
GRAPHS += ["--method.topology.varying", "true"]
SETTINGS: dict[str, tuple[list[str], int]] = {  # options, processes
    "SCAFFOLD with FedInit": ([*SCAFFOLD, *ONE_BY_ONE], 1),
    "FedALS": (["-c", "method/fedals", *ONE_BY_ONE], 1),
    "top-k": (["-c", "method/topk", *ONE_BY_ONE], 1),
    "K-GT on new graphs": (["-c", "method/kgt", *GRAPHS, *ONE_BY_ONE], 1),
    "two threads": ([*SCAFFOLD, *TWO_WORKERS], 1),
    "two worker processes": ([*SCAFFOLD, *TWO_WORKERS, *DROPPING], 1),
    "two processes": ([*SCAFFOLD, *ONE_BY_ONE], 2),
}


@dataclass(frozen=True)
class Aim:
    """Where a process kills itself: so many lines into this visit of a phase."""

    phase: str
    visit: int
    line: int


class Watch:
    """Says in shared memory which phase a process is in, and kills it where it is to be killed."""

    def __init__(self, shared: mmap.mmap, aim: Aim | None) -> None:
        self.shared = shared
        self.aim = aim
        self.visits: Counter[str] = Counter()
        self.lines = 0

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        before = self.shared[0]
        self.shared[0] = PHASES.index(phase)
        self.visits[phase] += 1
        aim = self.aim
        hit = aim is not None and (aim.phase, aim.visit) == (phase, self.visits[phase])
        if hit:
            sys.settrace(self._called)
        try:
            yield
        finally:
            # Its last moment, if it has fewer lines.
            if hit:
                kill(os.getpid())
            self.shared[0] = before

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        assert self.aim is not None
        self.lines += 1
        if self.lines >= self.aim.line:
            kill(os.getpid())
        return self._line

    def function(self, phase: str, owner: Any, name: str) -> None:
        """Count what this function does to a phase."""
        function: Callable[..., Any] = getattr(owner, name)

        def watched(*arguments: Any, **given: Any) -> Any:
            with self.within(phase):
                return function(*arguments, **given)

        setattr(owner, name, watched)

    def batches(self) -> None:
        made = FederatedDataModule.client_batches

        def watched(*arguments: Any, **given: Any) -> Iterator[Any]:
            batches = made(*arguments, **given)
            while True:
                with self.within("reading"):
                    batch = next(batches, None)
                if batch is None:
                    return
                yield batch

        FederatedDataModule.client_batches = watched  # type: ignore[method-assign]

    def all(self) -> None:
        self.batches()
        self.function("training", LocalStep, "__call__")
        self.function("sum", UpdateAccumulator, "total")
        self.function("sum", FederatedLoop, "update")
        self.function("sum", FederatedLoop, "exchange")
        self.function("commit", RunState, "commit")
        self.function("segment", segments, "write")
        self.function("checkpoint", AtomicCheckpointIO, "save_checkpoint")
        self.function("metrics", MetricsCSV, "log_metrics")
        run_round = FederatedLoop.run_round

        def watched(loop: FederatedLoop, t: int) -> Any:
            self.shared[0] = PHASES.index("between rounds")
            with self.within("round"):
                return run_round(loop, t)

        FederatedLoop.run_round = watched  # type: ignore[method-assign]


def kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


@dataclass
class Attempt:
    """A start of a run, in one or several processes, each with a page that says its phase."""

    processes: list[int]
    pages: list[mmap.mmap]
    began: float


def started(argv: list[str], number: int, log: Path, aim: Aim | None, rank: int) -> Attempt:
    """Start a run in forked processes; the one of this ``rank`` has the aim."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pages = [mmap.mmap(-1, 1) for _ in range(number)]
    children = []
    for own, page in enumerate(pages):
        child = os.fork()
        if not child:
            try:
                status = in_child(
                    argv, own, number, port, log, Watch(page, aim if own == rank else None)
                )
            except BaseException:
                status = 1
            finally:
                os._exit(status)
        children.append(child)
    return Attempt(children, pages, time.monotonic())


def in_child(argv: list[str], rank: int, world: int, port: int, log: Path, watch: Watch) -> int:
    os.setpgid(0, 0)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if world > 1:
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "soak"}
        common |= {"GROUP_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        os.environ |= {k: str(v) for k, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
    torch.set_num_threads(1)
    watch.all()
    return int(command(argv) or 0)


def waited(attempt: Attempt, until: float, patience: float = PATIENCE) -> list[int] | None:
    """The statuses of an attempt's processes; None if some still run at this time.

    A process that outlives another one by ``patience`` seconds is killed.
    """
    statuses: dict[int, int] = {}
    first = None
    while time.monotonic() < until:
        for process in attempt.processes:
            if process not in statuses:
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    statuses[process] = os.waitstatus_to_exitcode(status)
                    first = first or time.monotonic()
        if len(statuses) == len(attempt.processes):
            return [statuses[process] for process in attempt.processes]
        if first is not None and time.monotonic() - first > patience:
            for process in attempt.processes:
                kill(process)
        time.sleep(0.002)
    return None


def digests(folder: Path) -> dict[str, str]:
    """Hashes of what a run left, by name."""
    found: dict[str, str] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            content = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            kind = f"{value.dtype} {tuple(value.shape)} ".encode()
            found[name] = hashlib.sha256(kind + content).hexdigest()
        elif isinstance(value, dict):
            for key, held in value.items():
                add(f"{name}.{key}", held)
        elif isinstance(value, (list, tuple)):
            for key, held in enumerate(value):
                add(f"{name}.{key}", held)

    last = folder / "checkpoints/last.ckpt"
    saved = torch.load(last, weights_only=False)
    # Where rows lie: a run that was killed has written other segments. The rows follow below.
    del saved["federated"]["clients"]
    monitored = saved["federated"]["monitored"]
    for name in [name for name in monitored if name.startswith("time/")]:
        del monitored[name]
    add("checkpoint", saved)
    store = ClientStore()
    store.load(index_in(last), folder / "state")
    for name in store.names():
        for client in map(int, store.clients(name)):
            add(f"row {name} of {client}", store.read(name, client))
    with (folder / "metrics.csv").open(newline="") as file:
        for row, cells in enumerate(csv.DictReader(file)):
            for name, cell in cells.items():
                if not name.startswith("time/"):
                    found[f"metrics {row} {name}"] = cell
    return found


def in_a_process(folder: Path) -> dict[str, str]:
    """:func:`digests`, with its threads and memory in a process that ends.

    If something cannot be read, the only entry is the error's text.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        with os.fdopen(theirs, "w") as file:
            try:
                found = digests(folder)
            except UserError as error:
                found = {"refused": str(error)}
            json.dump(found, file)
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as file:
        text = file.read()
    os.waitpid(child, 0)
    return dict(json.loads(text))


class Soak:
    """The kills of one setting."""

    def __init__(self, name: str, folder: Path, draw: random.Random) -> None:
        options, self.processes = SETTINGS[name]
        self.name = name
        self.folder = folder
        self.draw = draw
        self.argv = [*COMMON, *options]
        if self.processes > 1:
            devices = ["--trainer.strategy", "federated", "--trainer.devices", str(self.processes)]
            self.argv += devices
        self.log = folder / "log.txt"
        began = time.monotonic()
        self.run(folder / "undisturbed", None, None)
        self.seconds = time.monotonic() - began
        self.expected = in_a_process(folder / "undisturbed")
        self.phases: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.runs = 0

    def run(self, folder: Path, aim: Aim | None, seconds: float | None) -> str:
        """Start or go on; the phase in which it was killed, or "" if it came to its end."""
        rank = self.draw.randrange(self.processes)
        argv = [*self.argv, "--trainer.default_root_dir", str(folder)]
        attempt = started(argv, self.processes, self.log, aim, rank)
        statuses = None
        if seconds is not None:
            statuses = waited(attempt, attempt.began + seconds)
            if statuses is None:
                kill(attempt.processes[rank])
        if statuses is None:
            statuses = waited(attempt, time.monotonic() + PATIENCE, patience=20)
        if statuses is None:
            for process in attempt.processes:
                kill(process)
            raise SystemExit(f"{self.name}: hung; see {self.log}")
        if statuses[rank] == -signal.SIGKILL:
            return PHASES[attempt.pages[rank][0]]
        if any(statuses):
            # A worker process was killed, or the other one of two, and the run said so.
            said = self.log.read_text(errors="replace")[-2000:]
            if (aim is None and seconds is None) or "Traceback" in said:
                raise SystemExit(f"{self.name}: ended with {statuses}: {said}")
            return PHASES[attempt.pages[rank][0]]
        return ""

    def killed(self, kills: int) -> None:
        """Kill runs of this setting so many times; each ends in between, and is compared."""
        while sum(self.phases.values()) < kills:
            folder = self.folder / f"run-{self.runs}"
            self.runs += 1
            for number in range(KILLS_OF_A_RUN + 1):
                left = number < KILLS_OF_A_RUN and sum(self.phases.values()) < kills
                aimed = left and sum(self.phases.values()) % 2 == 0
                aim = self.aim() if aimed else None
                seconds = self.draw.uniform(0, self.seconds) if left and not aimed else None
                phase = self.run(folder, aim, seconds)
                if not phase:
                    break
                self.phases[phase] += 1
            found = in_a_process(folder)
            differing = {k for k in found.keys() | self.expected.keys()}
            differing = {k for k in differing if found.get(k) != self.expected.get(k)}
            if differing:
                self.wrong.append(f"{self.name}, {folder.name}: {sorted(differing)[:3]}")
            else:
                shutil.rmtree(folder)

    def aim(self) -> Aim:
        """At the phase that was hit least, of those that lines of Python can be counted in."""
        phases = [phase for phase in PHASES if phase not in ("start-up", "between rounds")]
        least = min(phases, key=lambda phase: (self.phases[phase], self.draw.random()))
        return Aim(least, self.draw.randint(1, 3), int(self.draw.expovariate(1 / 40)) + 1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    gc.freeze()
    soaks = []
    for place, name in enumerate(given.only):
        own = folder / name.replace(" ", "-")
        own.mkdir()
        soak = Soak(name, own, random.Random(f"{given.seed} {name}"))
        share = len(range(place, given.kills, len(given.only)))
        soak.killed(share)
        soaks.append(soak)
        hits = ", ".join(f"{phase} {soak.phases[phase]}" for phase in PHASES)
        print(f"{name}: {share} kills of {soak.runs} runs: {hits}", flush=True)
    total = sum((soak.phases for soak in soaks), Counter[str]())
    empty = [phase for phase in PHASES if not total[phase]]
    wrong = [line for soak in soaks for line in soak.wrong]
    print(f"all: {sum(total.values())} kills: " + ", ".join(f"{p} {total[p]}" for p in PHASES))
    for line in [*wrong, *(f"no kill fell into {phase}" for phase in empty)]:
        print(line)
    if not wrong:
        print("every run left the bits of one that nothing happened to")
        shutil.rmtree(folder)
    return int(bool(wrong or empty))


if __name__ == "__main__":
    sys.exit(main())
