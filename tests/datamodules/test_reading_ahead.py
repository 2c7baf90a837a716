"""num_workers: the same bits for any number, side by side, interrupted, failing and killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from fl_lightning.datamodules import IID, FromDataModule, FromDatasets
from fl_lightning.errors import UserError
from tests.helpers.learners import Lit, Loads, federated, trainer


class Samples(Dataset):
    """x, label, and which process read it; ``draws``: with noise of three generators."""

    def __init__(self, n=24, draws=False):
        self.n, self.draws = n, draws
        self.x = torch.randn(n, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = self.x[i]
        if self.draws:
            x = x + torch.rand(()) + np.random.rand() + random.random()
        return x, i % 4, str(os.getpid())  # text, since numbers of a batch have to repeat


class Triples(Lit):
    """The learner takes no notice of who read its samples."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[:2], batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch[:2], batch_idx)


def federate(workers, draws=False, **options):
    val = Samples(10, draws)
    options = {"partition": IID(), "num_clients": 3, "batch_size": 3, "seed": 4, **options}
    return FromDatasets(Samples(draws=draws), val=val, num_workers=workers, **options)


def everything(data):
    """All that a run would read, without the processes' ids."""
    for client, round in ((2, 0), (0, 3)):
        yield from (batch[:2] for batch in data.client_batches(client, round, 7))
    yield from (batch[:2] for batch, _ in data.full_batches(1))
    yield from (batch[:2] for batch in data.val_dataloader())


def same(one, other):
    pairs = list(zip(one, other, strict=True))
    return all(
        torch.equal(a, b) for first, second in pairs for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("draws", [False, True])
def test_the_same_bits_for_any_number_of_workers(draws):
    alone = federate(1, draws, eval_batch_size=4)
    expected = list(everything(alone))
    alone.teardown("fit")
    for number in (2, 3, *([] if draws else [0])):
        data = federate(number, draws, eval_batch_size=4)
        before = torch.get_rng_state(), random.getstate()
        assert same(everything(data), expected)
        assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
        pids = {int(pid) for batch in data.client_batches(0, 0, 8) for pid in batch[2]}
        assert (os.getpid() in pids) == (number == 0)
        data.teardown("fit")


def test_side_by_side_and_interrupted():
    before = multiprocessing.active_children()
    data = federate(2, draws=True)
    expected = {i: [b[0] for b in data.client_batches(i, 0, 9)] for i in range(3)}
    for client in range(3):
        next(iter(data.client_batches(client, 0, 9)))  # and no more of it
    with ThreadPoolExecutor(3) as pool:
        found = list(
            pool.map(lambda i: [b[0] for b in data.client_batches(i % 3, 0, 9)], range(12))
        )
    assert all(same([f], [expected[i % 3]]) for i, f in enumerate(found))
    # in turns, as the stacked engine asks
    others = [iter(data.client_batches(i, 0, 9)) for i in range(3)]
    turns = [[next(one)[0] for one in others] for _ in range(9)]
    assert all(torch.equal(turns[k][i], expected[i][k]) for k in range(9) for i in range(3))
    assert len(multiprocessing.active_children()) == len(before) + 2
    data.teardown("fit")
    assert multiprocessing.active_children() == before


def test_runs_are_the_same_in_every_engine_and_leave_no_process():
    vectors, before = [], multiprocessing.active_children()
    for workers, engine in ((0, "sequential"), (2, "sequential"), (2, "concurrent"), (1, "auto")):
        torch.manual_seed(0)
        module = federated(Triples(), participation="all", engine=engine)
        trainer(2).fit(module, federate(workers))
        vectors.append(module.global_vector)
        assert multiprocessing.active_children() == before
    assert all(torch.equal(vector, vectors[0]) for vector in vectors)


def wrapped(dataset, **options):
    return Loads(DataLoader(dataset, batch_size=3, **options))


class Told(Samples):
    def __getitem__(self, i):
        return get_worker_info().id, get_worker_info().num_workers, os.environ.get("TOLD", "")


def tell(worker):
    os.environ["TOLD"] = f"worker {worker} of {type(get_worker_info().dataset).__name__}"


def test_the_loaders_workers_are_honoured():
    given = {"num_workers": 2, "prefetch_factor": 1, "multiprocessing_context": "fork"}
    inner = wrapped(Told(), worker_init_fn=tell, **given)
    data = FromDataModule(inner, num_clients=2, collate=list)
    answers = {answer for batch in data.client_batches(0, 0, 20) for answer in batch}
    assert answers <= {(i, 2, f"worker {i} of Told") for i in (0, 1)} and answers
    data.teardown("fit")
    here = FromDataModule(wrapped(Samples(), num_workers=2), num_clients=2, num_workers=0)
    assert all(
        int(pid) == os.getpid() for batch in here.client_batches(0, 0, 4) for pid in batch[2]
    )


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(one)


class Failing(Samples):
    def __getitem__(self, i):
        if i == 5:
            raise KeyError("five")
        if i == 6:
            raise Odd("six", 2)
        if i == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return i


def test_failures_are_told_and_reading_goes_on():
    clients = [[i] for i in range(24)]
    data = FromDatasets(Failing(), num_clients=24, partition=IID(), num_workers=2, collate=list)
    data._given = [np.array(c) for c in clients]
    for bad, error, words in (
        (5, KeyError, "five"),
        (6, RuntimeError, "six"),
        (7, RuntimeError, "smaller num_workers"),
    ):
        with pytest.raises(error, match=words):
            list(data.client_batches(bad, 0, 1))
        assert list(data.client_batches(3, 0, 1)) == [[3]]
    data.teardown("fit")


class Moody(Samples):
    def __init__(self):
        super().__init__()
        self.parts = {"noise": [np.random.default_rng(0)]}


def test_a_generator_of_the_datasets_own_cannot_be_shared():
    told = r"num_workers is 2.*Moody\.parts\['noise'\]\[0\].*num_workers=0"
    with pytest.raises(UserError, match=told):
        FromDatasets(Moody(), num_clients=2, num_workers=2)
    with pytest.raises(UserError, match="Moody"):
        FromDataModule(wrapped(Moody()), num_clients=2, num_workers=1).setup()
    data = FromDataModule(wrapped(Moody(), num_workers=2), num_clients=2)
    pids = {int(pid) for batch in data.client_batches(0, 0, 4) for pid in batch[2]}
    assert pids == {os.getpid()}


KILLED = """
import sys, time
sys.path.insert(0, {folder!r})
from test_reading_ahead import federate
data = federate(2)
pids = set()
for batch in data.client_batches(0, 0, 40):
    pids |= set(map(int, batch[2]))
print(*[p.pid for p in __import__("multiprocessing").active_children()], flush=True)
time.sleep(600)
"""


def test_a_killed_run_leaves_no_worker_behind(python):
    folder = os.path.dirname(__file__)
    paths = os.pathsep.join(
        [os.getcwd(), os.path.dirname(folder), os.environ.get("PYTHONPATH", "")]
    )
    command = [python, "-c", KILLED.format(folder=folder)]
    env = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert len(workers) == 2
    run.kill()
    run.wait()
    deadline = time.monotonic() + 60
    while (alive := [pid for pid in workers if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive


def running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return not stat.exists() or ") Z " not in stat.read_text()  # ended, but nobody has looked
