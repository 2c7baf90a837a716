"""``python -m benchmarks.formats``: CPU milliseconds of one gradient, images and weights in either memory format."""

from __future__ import annotations

import copy
import statistics
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.workloads import WORKLOADS


def milliseconds(network: nn.Module, x: torch.Tensor, y: torch.Tensor, repeats: int) -> float:
    parameters, taken = list(network.parameters()), []
    for _ in range(repeats + 1):
        began = time.thread_time()
        torch.autograd.grad(cross_entropy(network(x), y), parameters)
        taken.append(1000 * (time.thread_time() - began))
    return statistics.median(taken[1:])


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':6}{'contiguous':>12}{'images channels-last':>24}{'weights too':>14}   (one thread, CPU time)")
    for name, repeats in (("W2", 10), ("W3", 5), ("W5", 30)):
        work = WORKLOADS[name]
        x, y = work.arrays()
        x, y = x[: work.batch_size], y[: work.batch_size]
        network, images = work.network(), x.contiguous(memory_format=torch.channels_last)
        changed = copy.deepcopy(network).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        row = [milliseconds(*pair, y, repeats) for pair in ((network, x), (network, images), (changed, images))]
        print(f"  {name:4}{row[0]:12.1f}{row[1]:24.1f}{row[2]:14.1f}", flush=True)


if __name__ == "__main__":
    main()
