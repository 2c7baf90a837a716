"""``python -m benchmarks.gpu_check``: what a GPU computes, then how fast, in one table each (``make
gpu-check``).

Correctness first: the compositions that the tests run on a make-believe GPU have to leave here what
they leave on a CPU. Then side by side on streams, captured or not, has to leave the bits of one
client after the other; stacked, and the CPU, the same to rounding. Then seconds a round, and where
they go. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import workloads
from benchmarks.bare import prepared
from benchmarks.gpu_compositions import COMMON, COMPOSITIONS
from benchmarks.speed import timed
from benchmarks.workloads import WORKLOADS, Ours, Workload
from fl_lightning import callbacks
from fl_lightning.lab.contracts.federation import fit, outcome, quiet, require_same

METHODS: dict[str, tuple[str, ...]] = {
    "FedAvg": (),
    **workloads.METHODS,
    "FedALS": ("PartialAveraging",),
}
# twelve steps, a short batch
SMALL = {"samples": 60, "batch_size": 25, "epochs": 4, "clients": 5, "registered": 10}
FREE = "auto, any kernels"
DOUBLE, HALF = 1e-9, 5e-2  # largest difference, relative to the largest entry


@dataclasses.dataclass
class Case:
    """Two settings of one workload, and how near their models have to be after two rounds."""

    what: str
    work: Workload
    methods: tuple[str, ...]
    one: dict[str, Any]
    other: dict[str, Any]
    tolerance: float


def cases(accelerator: str, works: list[str]) -> Iterator[Case]:
    """What is compared, of each workload made small."""
    there = {"accelerator": accelerator}
    for name in works:
        work = dataclasses.replace(WORKLOADS[name], **SMALL)
        if work.draws:
            alone = {**there, "engine": "sequential"}
            yield Case(f"{name} the same again", work, (), alone, {**there, "engine": "auto"}, 0)
            continue
        # Most methods are rules for SGD.
        methods = {"FedAvg": ()} if work.adam else METHODS
        for method, parts in methods.items():
            alone = {**there, "engine": "sequential"}
            for how, of in (
                ("captured", {"capture": True}),
                ("eager", {"capture": False}),
                ("two at once", {"workers": 2}),
            ):
                beside = {**there, "engine": "concurrent", "capture": True, **of}
                yield Case(f"{name} {method}, side by side, {how}", work, parts, alone, beside, 0)
            wide = {"precision": "64-true"}
            yield Case(
                f"{name} {method}, stacked in float64",
                work,
                parts,
                {**alone, **wide},
                {**there, **wide, "engine": "stacked"},
                DOUBLE,
            )
            yield Case(
                f"{name} {method}, as on a CPU in float64",
                work,
                parts,
                {**alone, **wide},
                {"accelerator": "cpu", **wide, "engine": "sequential"},
                DOUBLE,
            )
        captured, mixed = (
            {**there, "engine": "concurrent", "capture": True},
            {"precision": "bf16-mixed"},
        )
        half = {**there, **mixed, "engine": "sequential"}
        yield Case(f"{name} bf16, side by side, captured", work, (), half, {**captured, **mixed}, 0)
        yield Case(
            f"{name} bf16, near float32", work, (), half, {**there, "engine": "sequential"}, HALF
        )
        yield Case(f"{name} the same again", work, (), captured, captured, 0)


def started(work: Workload, methods: tuple[str, ...], settings: dict[str, Any]) -> Ours:
    return Ours(work, methods=[getattr(callbacks, m)() for m in methods], **copy.deepcopy(settings))


def model(
    work: Workload, methods: tuple[str, ...], settings: dict[str, Any], rounds: int = 2
) -> tuple[Tensor, str]:
    """The global vector after some rounds, and whether steps were captured."""
    run = started(work, methods, settings)
    for _ in range(rounds):
        run.round()
    facts = run.module.engine_facts
    run.close()
    return run.module.global_vector.detach().cpu().double(), facts.get("capture", "")


def check(case: Case) -> tuple[bool, str]:
    """Whether it holds, and how far apart the models are."""
    (one, _), (other, captured) = (
        model(case.work, case.methods, s) for s in (case.one, case.other)
    )
    apart = float((one - other).abs().max() / one.abs().max())
    asked = case.other.get("capture") is True
    told = f" ({captured})" if asked and captured != "yes" else ""
    return apart <= case.tolerance and not told, f"{apart:.1e}, at most {case.tolerance:g}{told}"


def composed(accelerator: str) -> Iterator[tuple[bool, str, str]]:
    """Whether each composition of the tests holds here, its name, and what was seen."""
    there = {"trainer": {"accelerator": accelerator, "devices": 1}}
    beside = {**there, "engine": "concurrent", "capture": True, "workers": 2}
    for name, (methods, settings) in COMPOSITIONS.items():
        try:
            with quiet():
                cpu, alone, together = (
                    fit(methods(), **COMMON, **settings, **how) for how in ({}, there, beside)
                )
                left = [outcome(module) for module in (cpu, alone, together)]
            require_same(left[1], left[0], DOUBLE, "not as on a CPU in float64", "")
            require_same(left[2], left[1], 0.0, "side by side it is not as one by one", "")
        except Exception as error:  # it is told, and the other compositions are tried
            yield False, name, f"{type(error).__name__}: {error}"
            continue
        captured = together.engine_facts["capture"]
        yield accelerator == "cpu" or captured == "yes", name, f"captured: {captured}"


def workload(name: str, small: bool) -> Workload:
    """As the table has it, with five epochs of W3."""
    work = WORKLOADS[name]
    if small:
        return dataclasses.replace(work, **SMALL)
    return dataclasses.replace(work, epochs=5) if name == "W3" else work


def speeds(
    accelerator: str, names: list[str], repetitions: int, small: bool
) -> dict[str, dict[str, list[float]]]:
    """Seconds a round of each contender, interleaved."""
    found = {}
    for name in names:
        work = workload(name, small)
        there = {"accelerator": accelerator}
        asked: dict[str, dict[str, Any]] = {
            "sequential": {"engine": "sequential"},
            "streams, eager": {"engine": "concurrent", "capture": False},
            **{
                f"{k} streams, captured": {"engine": "concurrent", "capture": True, "workers": k}
                for k in (1, 2, 5, 10)
            },
            "stacked": {"engine": "stacked"},
            "auto": {"engine": "auto"},
            "auto, bf16": {"engine": "auto", "precision": "bf16-mixed"},
            FREE: {"engine": "auto"},
        }
        if work.draws:
            # Streams would share a GPU's generator, so such clients train one after the other.
            asked = {who: asked[who] for who in ("sequential", "auto", "auto, bf16", FREE)}
        runs = {
            who: started(work, work.methods, {**there, **settings})
            for who, settings in asked.items()
        }
        rounds = {"bare": timed(prepared(work, "cpu" if accelerator == "cpu" else "cuda"))}
        rounds |= {who: run.round for who, run in runs.items()}
        rounds[FREE] = with_any_kernels(runs[FREE].round)
        seconds: dict[str, list[float]] = {who: [] for who in rounds}
        for repetition in range(repetitions + 2):
            for who, round in rounds.items():
                took, _ = round()
                if repetition > 1:
                    seconds[who].append(took)
        print(f"\n{name}{'':24}seconds a round   times as fast as bare")
        for who, taken in seconds.items():
            ratio = statistics.median(b / t for b, t in zip(seconds["bare"], taken, strict=True))
            facts = runs[who].module.engine_facts if who in runs else {}
            told = " ".join(
                f"{k}={facts[k]}" for k in ("engine", "workers", "memory", "capture") if k in facts
            )
            print(
                f"  {who:24}{statistics.median(taken):15.4f}{ratio:22.2f}   "
                f"{told if 'auto' in who else ''}".rstrip()
            )
        for run in runs.values():
            run.close()
        found[name] = seconds
    return found


def with_any_kernels(round: Callable[[], tuple[float, float]]) -> Callable[[], tuple[float, float]]:
    """A round whose kernels may sum in another order each time.

    What the reproducible flags cost.
    """

    def free() -> tuple[float, float]:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False):
            return round()

    return free


def waits(run: Ours) -> dict[str, int]:
    """Where in one round the host waits for the GPU, and how often."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.round()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(w.filename).name}:{w.lineno}" for w in told if "synchroniz" in str(w.message)
    )
    return dict(places.most_common())


def profile(accelerator: str, name: str, small: bool) -> None:
    """The kernels that one captured round spends its time in."""
    work = workload(name, small)
    run = started(work, work.methods, {"accelerator": accelerator, "engine": "concurrent"})
    run.round()
    run.round()
    with torch.profiler.profile() as profiled:
        run.round()
    if accelerator == "gpu":
        print(f"\n{name}: the host waits for the GPU in one round at", waits(run) or "no place")
    run.close()
    order = "self_cpu_time_total" if accelerator == "cpu" else "self_cuda_time_total"
    averages = profiled.key_averages()
    table = averages.table(sort_by=order, row_limit=20, max_name_column_width=60)
    print(f"\n{name}, one round\n{table}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument(
        "--accelerator",
        default="gpu",
        choices=["gpu", "cpu"],
        help="cpu: to try this command itself",
    )
    parser.add_argument(
        "--check",
        nargs="*",
        default=["W1", "W2", "W3", "X6", "X7", "X8", "X10", "X11"],
        help="workloads whose results are compared",
    )
    parser.add_argument(
        "--speed", nargs="*", default=list(WORKLOADS), help="workloads that are timed"
    )
    parser.add_argument("--profile", nargs="*", default=["W3"], help="workloads that are profiled")
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument(
        "--small", action="store_true", help="time and profile few samples, to try this command"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"))
    given = parser.parse_args()
    if given.accelerator == "gpu" and not torch.cuda.is_available():
        print("no CUDA GPU is here; --accelerator cpu tries the command itself")
        return 2
    device = torch.cuda.get_device_name() if given.accelerator == "gpu" else "CPU"
    print(
        f"{device}, torch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN "
        f"{torch.backends.cudnn.version()}\n"
    )
    for method in set(METHODS) - set(given.methods):
        METHODS.pop(method)
    failed = 0
    for holds, name, told in composed(given.accelerator):
        failed += not holds
        print(f"  {'ok    ' if holds else 'FAILED'} {name} (tests): {told}", flush=True)
    for case in cases(given.accelerator, given.check):
        holds, told = check(case)
        failed += not holds
        print(f"  {'ok    ' if holds else 'FAILED'} {case.what}: {told}", flush=True)
    print(f"\n{failed} comparisons failed")
    given.json.write_text(
        json.dumps(speeds(given.accelerator, given.speed, given.repetitions, given.small), indent=1)
    )
    for name in given.profile:
        profile(given.accelerator, name, given.small)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
