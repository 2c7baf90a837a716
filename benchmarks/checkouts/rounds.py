"""A worker of ``benchmarks.checkouts``: rounds that are timed one by one, or the memory of a run.

``rounds.py time WORKLOAD ENGINE TURNS`` runs rounds at the word of the process that started it:
each line on standard input begins a turn, each line on standard output tells the wall and CPU
seconds of the last. ``rounds.py memory METHOD ENGINE`` prints the peak of a run. Both with the
checkout as working directory and on PYTHONPATH.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

import fl_lightning
from fl_lightning import FederatedModule, InMemoryDataModule, callbacks

# The workloads are those beside this script, also for a checkout that has others.
sys.modules.pop("benchmarks", None)
sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.workloads import WORKLOADS, Learner, quiet_trainer  # noqa: E402

sys.path.pop(0)

ENGINES: dict[str, dict[str, Any]] = {
    "auto": {"engine": "auto"},
    "captured": {"engine": "concurrent", "workers": 2, "capture": True},
    "sequential": {"engine": "sequential"},
}
METHODS = {"FedAvg": (), "FedSMOO": ("GlobalSharpnessAwareMinimization", "DynamicRegularization")}
WIDTHS = (2000, 4000, 500)  # 10,004,500 parameters
TRIVIAL_ROUNDS = 200  # a turn


class Regression(pl.LightningModule):
    """Squares of what layers of these widths make of x."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self.layers(batch[0]) - batch[1]).square().mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Turns(pl.Callback):
    """Before each turn of so many rounds, and after the last.

    Say what the one before took, and wait for a line.
    """

    def __init__(self, rounds: int, tell: Any) -> None:
        self.rounds, self.tell, self.began = rounds, tell, _clocks()

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch % self.rounds == 0:
            taken = [now - began for now, began in zip(_clocks(), self.began, strict=True)]
            print(json.dumps(taken), file=self.tell, flush=True)
            sys.stdin.readline()
            self.began = _clocks()


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def workload(
    name: str, engine: dict[str, Any]
) -> tuple[FederatedModule, InMemoryDataModule, list[Any]]:
    """A workload of ``benchmarks.workloads``, or ``loop``.

    One weight and one step, so that the loop itself remains.
    """
    if name == "loop":
        x = torch.linspace(0, 1, 4).view(-1, 1)
        data = InMemoryDataModule((x, 2 * x), clients=[[i] for i in range(4)], batch_size=1)
        return (
            FederatedModule(Regression(1, 1), participation="all", local_steps=1, seed=1, **engine),
            data,
            [],
        )
    work = WORKLOADS[name]
    data = work.data()
    learner = Learner(work.network(), work.optimizer)
    module = FederatedModule(
        learner, participation=work.clients, local_epochs=work.epochs, seed=1, **engine
    )
    return module, data, [getattr(callbacks, method)() for method in work.methods]


def timed(name: str, engine: str, turns: int, tell: Any) -> dict[str, Any]:
    """Tells the seconds of each turn; gives who trained, the last loss and the model's hash."""
    module, data, methods = workload(name, ENGINES[engine])
    rounds = TRIVIAL_ROUNDS if name == "loop" else 1
    trainer = quiet_trainer(turns * rounds + 1, [*methods, Turns(rounds, tell)])
    trainer.fit(module, data)
    facts = module.engine_facts
    trained = [
        facts["engine"],
        facts.get("workers", ""),
        "captured" * (facts.get("capture") == "yes"),
    ]
    return {
        "engine": " ".join(filter(None, [*trained, facts.get("memory", "")])),
        "loss": float(trainer.callback_metrics["train/loss"]),
        "w": hashlib.sha256(module.global_vector.detach().numpy().tobytes()).hexdigest(),
    }


def memory(method: str, engine: str) -> dict[str, float]:
    """Peak resident memory of three rounds of ten clients, over that of a process that has trained
    something small."""

    def train(widths: tuple[int, ...]) -> int:
        x, y = torch.randn(20, widths[0]), torch.randn(20, widths[-1])
        data = InMemoryDataModule(
            (x, y), clients=[[2 * i, 2 * i + 1] for i in range(10)], batch_size=1
        )
        module = FederatedModule(
            Regression(*widths), participation="all", local_steps=2, seed=1, **ENGINES[engine]
        )
        quiet_trainer(3, [getattr(callbacks, part)() for part in METHODS[method]]).fit(module, data)
        return module.global_vector.numel()

    train((2, 3, 2))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _resident("VmRSS")
    size = train(WIDTHS)
    return {"parameters": size, "bytes": _resident("VmHWM") - before}


def _resident(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def main() -> None:
    if not Path(fl_lightning.__file__).resolve().is_relative_to(Path.cwd().resolve()):
        raise SystemExit(
            f"{fl_lightning.__file__} was imported, which does not lie in the checkout {Path.cwd()}"
        )
    tell = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not get between the answers
    torch.manual_seed(0)
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    if what == "time":
        found: dict[str, Any] = timed(arguments[0], arguments[1], int(arguments[2]), tell)
    else:
        found = memory(*arguments)
    print(json.dumps(found), file=tell, flush=True)


if __name__ == "__main__":
    main()
