"""``python -m benchmarks.overhead``: each method's round of a workload against FedAvg's, on one
engine.

Each round is paired with one of FedAvg just before or after; ratios are medians over pairs. FedAvg
itself, in a run of its own, shows how far the machine's noise goes. ``--method my_module.MyMethod``
adds one of yours.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from pathlib import Path

from benchmarks.workloads import METHODS, WORKLOADS, Ours
from fl_lightning import callbacks


def paired(
    yardstick: Ours, runs: dict[str, Ours], repetitions: int
) -> dict[str, list[tuple[float, float]]]:
    """Return by run the pairs of seconds (the yardstick's, its own) of rounds that follow each
    other."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for repetition in range(repetitions + 1):
        for name, run in runs.items():
            first, second = (run, yardstick) if repetition % 2 else (yardstick, run)
            one, other = first.round()[0], second.round()[0]
            if repetition:  # the first is a warm-up
                seconds[name].append((other, one) if repetition % 2 else (one, other))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument(
        "--engine", default="concurrent", choices=["concurrent", "sequential", "stacked", "auto"]
    )
    parser.add_argument("--method", help="another, by its path, with its default arguments")
    parser.add_argument("--workload", default="W1", choices=list(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("overhead.json"))
    given = parser.parse_args()
    if given.repetitions < 1:
        parser.error("--repetitions has to be at least 1")
    work = WORKLOADS[given.workload]
    yardstick = Ours(work, given.engine)
    runs = {"FedAvg, again": Ours(work, given.engine)}
    for name, parts in METHODS.items():
        runs[name] = Ours(work, given.engine, [getattr(callbacks, part)() for part in parts])
    if given.method:
        module, _, name = given.method.rpartition(".")
        sys.path.insert(0, "")
        own = getattr(importlib.import_module(module), name)()
        runs[name] = Ours(
            work, given.engine, [own], capture=True if given.engine == "concurrent" else "auto"
        )
    seconds = paired(yardstick, runs, given.repetitions)
    print(
        f"{'':18}seconds a round   × FedAvg's time, pair by pair   ({given.workload}, "
        f"{given.engine})"
    )
    for name, pairs in seconds.items():
        ratio = statistics.median(own / fedavg for fedavg, own in pairs)
        print(f"  {name:16}{statistics.median(own for _, own in pairs):15.3f}{ratio:18.2f}")
        runs[name].close()
    yardstick.close()
    given.json.write_text(json.dumps(seconds, indent=1))
    print(f"All pairs: {given.json}")


if __name__ == "__main__":
    main()
