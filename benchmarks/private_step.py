"""``python -m benchmarks.private_step``: a local step of W1's network on 50 samples, without and
with privacy of single samples, and Opacus's, if it is installed.

Medians over rounds of 100 steps, interleaved, on one thread; making the batches is not counted.
CPU time, so that other programs on the machine count little. Ratios are to the step without
privacy, round by round. ``--parts`` also prints how long the parts
of one private step take.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.workloads import WORKLOADS, Ours, local_steps_timed
from fl_lightning.callbacks import RecordPrivacy
from fl_lightning.client.linear_factors import Gradients
from fl_lightning.client.sample_gradients import SampleGradients

WORK = replace(WORKLOADS["W1"], epochs=1)
STEPS = WORK.clients * WORK.samples // WORK.batch_size
CLIP = SIGMA = 1.0
# Seconds per step of the next round.
Round = Callable[[], float]


def ours(*methods: Any) -> Round:
    run = Ours(WORK, "sequential", methods, buffers="keep")

    def round() -> float:
        with local_steps_timed(time.process_time) as watched:
            watched.steps = 0.0
            run.round()
        return watched.steps / STEPS

    return round


def opacus(mode: str) -> Round:
    """Opacus's step: ``"hooks"`` stores the gradients of single samples, ``"ghost"`` does not."""
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    torch.manual_seed(0)
    network = WORK.others()
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP}
    settings["expected_batch_size"] = WORK.batch_size
    criterion: Any = nn.CrossEntropyLoss()
    optimizer: Any
    if mode == "hooks":
        model: Any = GradSampleModule(network)
        optimizer = DPOptimizer(WORK.optimizer(model.parameters()), **settings)
    else:
        model = GradSampleModuleFastGradientClipping(network, max_grad_norm=CLIP)
        optimizer = DPOptimizerFastGradientClipping(WORK.optimizer(model.parameters()), **settings)
        criterion = DPLossFastGradientClipping(model, optimizer, criterion)
    x, y = WORK.arrays()
    batches = list(zip(x.split(WORK.batch_size), y.split(WORK.batch_size), strict=True))

    def round() -> float:
        began = time.process_time()
        for x, y in batches:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
        return (time.process_time() - began) / len(batches)

    return round


def contenders() -> dict[str, Round]:
    found = {
        "without privacy": ours(),
        "without privacy, again": ours(),
        "RecordPrivacy": ours(RecordPrivacy(CLIP, SIGMA)),
        "RecordPrivacy, σ = 0": ours(RecordPrivacy(CLIP, 0.0)),
    }
    with suppress(ImportError):
        found["Opacus"] = opacus("hooks")
        found["Opacus, ghost clipping"] = opacus("ghost")
    return found


def parts(rounds: int) -> dict[str, float]:
    """Seconds of the parts of a private step."""
    spent: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def around(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return call(*arguments, **named)
            finally:
                spent[name] = spent.get(name, 0.0) + time.process_time() - began

        return around

    with (
        patch.object(SampleGradients, "_pass", timed("pass", SampleGradients._pass)),
        patch.object(Gradients, "norms", timed("norms", Gradients.norms)),
        patch.object(Gradients, "add", timed("clipped sum", Gradients.add)),
        patch.object(
            RecordPrivacy,
            "on_samples_reduced",
            timed("noise", RecordPrivacy.on_samples_reduced),
        ),
    ):
        round = ours(RecordPrivacy(CLIP, SIGMA))
        round()
        spent.clear()
        whole = sum(round() for _ in range(rounds)) / rounds
    found = {name: seconds / rounds / STEPS for name, seconds in spent.items()}
    return {**found, "all else": whole - sum(found.values())}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.private_step", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--parts", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rounds = contenders()
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for repetition in range(given.repetitions + 1):
        for name, round in rounds.items():
            took = round()
            if repetition:  # the first is a warm-up
                seconds[name].append(took)
    plain = seconds["without privacy"]
    print(f"{'':26}ms a step   × without privacy")
    for name, own in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(own, plain, strict=True))
        print(f"  {name:24}{1e3 * statistics.median(own):9.2f}{ratio:20.1f}")
    if given.parts:
        print("parts of a step of RecordPrivacy, ms")
        for name, took in parts(given.repetitions).items():
            print(f"  {name:24}{1e3 * took:9.2f}")


if __name__ == "__main__":
    main()
