"""``python -m benchmarks.variants``: CPU milliseconds of one gradient on one thread, computed in
different ways.

Every variant but the first and bf16 is the same function to rounding. ``--compile`` adds
torch.compile, which needs a C++ compiler, and the seconds that its first call takes.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.workloads import WORKLOADS, Workload

Gradient = Callable[[], object]


def gradient(
    network: nn.Module, x: Tensor, y: Tensor, dtype: torch.dtype | None = None
) -> Gradient:
    parameters = list(network.parameters())

    def once() -> object:
        with torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False):
            loss = cross_entropy(network(x), y)
        return torch.autograd.grad(loss, parameters)

    return once


def variants(work: Workload, compiled: bool) -> Iterator[tuple[str, Gradient]]:
    """Names and what to time."""
    x, y = (array[: work.batch_size] for array in work.arrays())
    usual, ours, last = work.others(), work.network(), torch.channels_last
    yield "as usual", gradient(usual, x, y)
    if work.usual is not None:
        yield "live taps", gradient(ours, x, y)
    if x.shape[1] == 3:
        yield "images channels-last", gradient(ours, x.contiguous(memory_format=last), y)
        yield (
            "weights too",
            gradient(
                copy.deepcopy(ours).to(memory_format=last), x.contiguous(memory_format=last), y
            ),
        )
    yield "bf16", gradient(ours, x, y, torch.bfloat16)
    if compiled:
        yield "compiled", gradient(torch.compile(copy.deepcopy(ours)), x, y)


def milliseconds(call: Gradient, repeats: int) -> tuple[float, float]:
    """Of the first call, and the median of the others."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        call()
        taken.append(1000 * (time.perf_counter() - began))
    return taken[0], statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=__doc__)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name, repeats in (("W1", 100), ("W2", 10), ("W3", 5), ("W5", 30)):
        for what, call in variants(WORKLOADS[name], given.compile):
            first, others = milliseconds(call, repeats)
            note = f"   (first call {first / 1000:.0f} s)" if first > 1000 else ""
            print(f"  {name}  {what:22}{others:10.2f} ms{note}", flush=True)


if __name__ == "__main__":
    main()
