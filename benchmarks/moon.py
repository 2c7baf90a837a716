"""``python -m benchmarks.moon``: a round of MOON beside a plain loop with the same three passes.

The network is W2's, on one thread. Rounds are in turn, ratios are medians over pairs of them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, cross_entropy, logsigmoid

from benchmarks.bare import Bare
from benchmarks.workloads import LR, WORKLOADS, Ours
from fl_lightning.callbacks import ModelContrast


class Features:
    """What enters the last layer of a network, in its latest pass."""

    def __init__(self, network: nn.Module) -> None:
        *_, last = (part for part in network.modules() if isinstance(part, nn.Linear))
        last.register_forward_pre_hook(self.take)

    def take(self, module: nn.Module, inputs: Any) -> None:
        (self.z,) = inputs


class BareMoon(Bare):
    """MOON as one would write it: two teachers in evaluation mode, without a graph."""

    def train(
        self, model: nn.Module, x: Tensor, y: Tensor, correction: list[Tensor], losses: list[Tensor]
    ) -> int:
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        # In a client's first round both are the server's model.
        teachers = [copy.deepcopy(model).eval(), copy.deepcopy(model).eval()]
        seen, near, far = (Features(network) for network in (model, *teachers))
        steps = 0
        for _ in range(self.epochs):
            order = torch.randperm(len(x))
            for start in range(0, len(x), self.batch_size):
                chosen = order[start : start + self.batch_size]
                optimizer.zero_grad()
                loss = cross_entropy(model(x[chosen]), y[chosen])
                with torch.no_grad():
                    for teacher in teachers:
                        teacher(x[chosen])
                apart = cosine_similarity(seen.z, near.z) - cosine_similarity(seen.z, far.z)
                (loss - logsigmoid(apart / 0.5).mean()).backward()
                optimizer.step()
                losses.append(loss.detach())
                steps += 1
        return steps


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moon", description=__doc__)
    parser.add_argument("--engine", default="sequential", choices=["sequential", "auto"])
    parser.add_argument("--repetitions", type=int, default=10)
    given = parser.parse_args()
    work = WORKLOADS["W2"]
    ours = Ours(work, given.engine, [ModelContrast()])
    x, y = work.arrays()
    clients = list(zip(x.split(work.samples), y.split(work.samples), strict=True))
    torch.manual_seed(0)
    bare = BareMoon(work.others(), work.epochs, work.batch_size, LR, work.weight_decay)
    pairs = []
    for repetition in range(given.repetitions + 1):
        began = time.perf_counter()
        bare.round(clients)
        theirs = time.perf_counter() - began
        # The first round has all that is done once a run.
        if repetition:
            pairs.append((ours.round()[0], theirs))
        else:
            ours.round()
    ours.close()
    ratio = statistics.median(own / theirs for own, theirs in pairs)
    for name, place in (("ours", 0), ("plain loop", 1)):
        print(f"{name:12}{statistics.median(pair[place] for pair in pairs):8.3f} s a round")
    print(f"ours / plain loop, pair by pair: {ratio:.2f}")


if __name__ == "__main__":
    main()
