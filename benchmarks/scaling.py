"""``python -m benchmarks.scaling``: SCAFFOLD's round against registered clients, participants or parameters.

Each point runs in its own process, so that its peak memory is its own. State rows lie on disk beyond the budget.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.workloads import Learner, quiet_trainer
from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.callbacks import ControlVariates
from fl_lightning.models import MLP


class Slices:
    """Client i's samples, made when asked for."""

    def __init__(self, clients: int, each: int, total: int) -> None:
        self.clients, self.each, self.total = clients, each, total
        self.sizes = np.broadcast_to(np.int64(each), (clients,))

    def __len__(self) -> int:
        return self.clients

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < self.clients:
            raise IndexError(i)
        return (np.arange(self.each) + i * self.each) % self.total


def point(registered: int, participants: int, hidden: int, rounds: int) -> dict[str, float]:
    """Seconds a round (median), parameters, and the process's peak memory in bytes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, y = torch.randn(2000, 64), torch.randint(0, 10, (2000,))
    data = InMemoryDataModule((x, y), clients=Slices(registered, 50, 2000), batch_size=10)
    module = FederatedModule(
        Learner(MLP([64, hidden, 10]), 0.0), participation=participants, local_epochs=1, seed=1, engine="sequential"
    )
    seconds: list[float] = []

    class Clock(ControlVariates):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            seconds.append(float(trainer.callback_metrics["time/round"]))

    began = time.perf_counter()
    quiet_trainer(rounds, [Clock()]).fit(module, data)
    return {
        "registered": registered,
        "participants": participants,
        "parameters": module.layout.size,
        "seconds": statistics.median(seconds[1:] or seconds),
        "start": time.perf_counter() - began - sum(seconds),
        "bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def plot(points: list[dict[str, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.5), sharey=True)
    for axis, along in zip(axes, ("registered", "participants", "parameters"), strict=True):
        chosen = sorted((p for p in points if p["along"] == along), key=lambda p: p[along])
        axis.loglog([p[along] for p in chosen], [p["seconds"] for p in chosen], "o-")
        axis.set_xlabel(along)
    axes[0].set_ylabel("seconds a round")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, default=Path("scaling.json"))
    parser.add_argument("--point", type=int, nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print(json.dumps(point(*given.point, given.rounds)))
        return
    wanted = [("registered", 10**k, 10, 128) for k in range(2, 7)]
    wanted += [("participants", 10_000, n, 128) for n in (10, 100)]
    wanted += [("parameters", 1000, 10, hidden) for hidden in (16, 128, 1024, 8192)]
    points = []
    print("  registered  participants  parameters   seconds a round   peak MB  start s")
    for along, registered, participants, hidden in wanted:
        command = [sys.executable, "-m", "benchmarks.scaling", "--rounds", str(given.rounds), "--point"]
        command += [str(n) for n in (registered, participants, hidden)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(output.strip().splitlines()[-1])
        points.append({"along": along, **found})
        print(
            f"{registered:12,}{participants:14,}{found['parameters']:12,}{found['seconds']:18.4f}"
            f"{found['bytes'] / 2**20:10.0f}{found['start']:9.1f}",
            flush=True,
        )
    given.json.write_text(json.dumps(points, indent=1))
    plot(points, given.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
