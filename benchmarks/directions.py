"""``python -m benchmarks.directions``: what a local step along Adam's or Muon's direction costs.

Rounds of two clients of W1 on one thread, one client after the other: a plain PyTorch loop with
torch's own optimizer (AdamW fused; Muon on matrices, with AdamW on the rest), and ours with the
same optimizer at the clients, or with AdamDirection and MuonDirection over SGD. All take turns;
medians, and ratios to the plain loop of the same round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.bare import prepared
from benchmarks.workloads import WORKLOADS, Ours, Workload
from fl_lightning.callbacks import AdamDirection, MuonDirection

RATE, DECAY = 1e-3, 0.01
# A round of 100 steps: Muon's take tens of milliseconds each.
WORK = dataclasses.replace(WORKLOADS["W1"], clients=2)
Parameters = Iterable[nn.Parameter]


class Both(torch.optim.Optimizer):
    """torch's Muon takes matrices only, so AdamW takes the other parameters."""

    def __init__(self, parameters: Parameters) -> None:
        held = list(parameters)
        super().__init__(held, {"lr": RATE})
        matrices = [p for p in held if p.ndim == 2]
        rest = [p for p in held if p.ndim != 2]
        self.parts = [torch.optim.Muon(matrices, lr=RATE, weight_decay=DECAY), adamw(rest)]

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


def adamw(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, weight_decay=DECAY, fused=True)


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, weight_decay=DECAY)


def with_optimizer(kind: Callable[[Parameters], torch.optim.Optimizer]) -> Workload:
    """W1 with another optimizer at its clients."""

    class Other(Workload):
        def optimizer(self, parameters: Parameters) -> torch.optim.Optimizer:
            return kind(parameters)

    return Other(**{f.name: getattr(WORK, f.name) for f in dataclasses.fields(WORK)})


def plain(kind: Callable[[Parameters], torch.optim.Optimizer]) -> Callable[[], object]:
    return prepared(with_optimizer(kind), "cpu")


def ours(kind: Callable[[Parameters], torch.optim.Optimizer], *methods: Any) -> Any:
    return Ours(with_optimizer(kind), "sequential", methods).round


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.directions", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("directions.json"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, dict[str, Callable[[], object]]] = {
        "AdamW": {
            "plain loop, torch's AdamW, fused": plain(adamw),
            "ours, torch's AdamW, fused": ours(adamw),
            "ours, AdamDirection": ours(sgd, AdamDirection()),
        },
        "Muon": {
            "plain loop, torch's Muon and AdamW": plain(Both),
            "ours, MuonDirection": ours(sgd, MuonDirection()),
        },
    }
    steps = sum(-(-size // WORK.batch_size) for size in WORK.sizes()) * WORK.epochs
    found: dict[str, list[float]] = {}
    for repetition in range(given.repetitions + 1):
        for group in runs.values():
            for name, play in group.items():
                began = time.perf_counter()
                play()
                # The first round prepares what later ones use.
                if repetition:
                    found.setdefault(name, []).append(time.perf_counter() - began)
    print(f"{'':38}µs a step   × the plain loop's, round by round")
    for group in runs.values():
        base, *_ = group
        for name in group:
            pairs = zip(found[name], found[base], strict=True)
            ratio = statistics.median(own / plain for own, plain in pairs)
            print(f"{name:38}{statistics.median(found[name]) / steps * 1e6:9.0f}{ratio:10.2f}")
    given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
