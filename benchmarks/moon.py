"""``python -m benchmarks.moon``: a round of MOON beside a plain loop with the same three passes.

The network is W2's, on one thread. Rounds are in turn, ratios are medians over pairs of them.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity, logsigmoid

from benchmarks.bare import Bare
from benchmarks.workloads import WORKLOADS, Ours
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
        self, model: nn.Module, samples: Any, correction: list[Tensor], losses: list[Tensor]
    ) -> int:
        # In a client's first round both are the server's model.
        self.teachers = [copy.deepcopy(model).eval(), copy.deepcopy(model).eval()]
        self.features = [Features(network) for network in (model, *self.teachers)]
        return super().train(model, samples, correction, losses)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(model, x, y)
        with torch.no_grad():
            for teacher in self.teachers:
                teacher(x)
        z, near, far = (features.z for features in self.features)
        apart = cosine_similarity(z, near) - cosine_similarity(z, far)
        return loss - logsigmoid(apart / 0.5).mean()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.moon", description=__doc__)
    parser.add_argument("--engine", default="sequential", choices=["sequential", "auto"])
    parser.add_argument("--repetitions", type=int, default=10)
    given = parser.parse_args()
    # Two clients of one epoch: the ratio is of steps, and the whole takes a minute or two.
    work = replace(WORKLOADS["W2"], clients=2, registered=2, epochs=1)
    ours = Ours(work, given.engine, [ModelContrast()])
    torch.manual_seed(0)
    bare = BareMoon(work)
    pairs = []
    for repetition in range(given.repetitions + 1):
        began = time.perf_counter()
        bare.round(bare.clients)
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
