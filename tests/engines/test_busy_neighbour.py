"""What a run's bits depend on is chosen alike, whatever else the machine does.

Several starts, beside processes that never rest. Clients side by side or one after the other,
captured or not, is another matter: a stopwatch may choose there, and the bits are the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

STARTS, PROCESSES = 1, 2  # the first process is alone, the second beside the busy neighbours

CHOOSE = f"""
import torch, warnings
from torch import nn
from tests.helpers.learners import federated, trainer
from fl_lightning import InMemoryDataModule
import pytorch_lightning as pl
warnings.filterwarnings("ignore")


class Learner(pl.LightningModule):
    def __init__(self, net, optimizer):
        super().__init__()
        self.net, self.optimizer = net, optimizer

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.01)


class Chosen(pl.Callback):
    def on_train_start(self, *_):
        raise StopIteration  # no round is needed


def convolutions(width):
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * 4, 10))


def layers(width):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, width), nn.ReLU(), nn.Linear(width, width),
                         nn.ReLU(), nn.Linear(width, 10))


CASES = ((lambda: convolutions(32), torch.optim.SGD), (lambda: layers(16), torch.optim.Adam))
x, y = torch.randn(960, 3, 8, 8), torch.randint(0, 10, (960,))
for start in range({STARTS}):
    for case, (network, optimizer) in enumerate(CASES):
        clients = [range(80 * i, 80 * i + 80) for i in range(12)]
        data = InMemoryDataModule((x, y), clients=clients, batch_size=10)
        learner = Learner(network(), optimizer).float()
        module = federated(learner, participation=6, local_epochs=2, workers=2).float()
        try:
            trainer(1, [Chosen()]).fit(module, data)
        except StopIteration:
            pass
        facts = module.engine_facts
        of_bits = {{name: facts.get(name) for name in ("threads", "memory", "as buffers")}}
        print("chose", case, facts["engine"] == "stacked", of_bits, flush=True)
        print("why", case, facts["why"], facts, flush=True)
"""


@contextmanager
def busy_neighbour() -> Iterator[None]:
    """A process that never rests for every core."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_starts_beside_a_busy_neighbour_choose_alike(python: str) -> None:
    chosen: list[str] = []
    command = [python, "-c", CHOOSE]
    # With one thread for all there would be nothing to choose.
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "2"}
    for process in range(PROCESSES):
        if process % 2:
            with busy_neighbour():
                out = subprocess.run(
                    command, env=environment, capture_output=True, text=True, check=True
                ).stdout
        else:
            out = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=True
            ).stdout
        chosen += [line for line in out.splitlines() if line.startswith("chose")]
        print(out)
    assert len(chosen) == 2 * STARTS * PROCESSES
    assert len(set(chosen)) == 2, sorted(set(chosen))
