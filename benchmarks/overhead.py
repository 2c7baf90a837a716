"""``python -m benchmarks.overhead``: each method's round of a workload against FedAvg's, on one engine, interleaved."""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.workloads import WORKLOADS, Ours
from fl_lightning import callbacks

METHODS = {
    "FedAvg": [],
    "FedInit": ["RelaxedInitialization"],
    "FedProx": ["ProximalTerm"],
    "FedDyn": ["DynamicRegularization"],
    "FedCM": ["ClientMomentum"],
    "SCAFFOLD": ["ControlVariates"],
    "FedSAM": ["SharpnessAwareMinimization"],
    "FedSMOO": ["GlobalSharpnessAwareMinimization", "DynamicRegularization"],
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--engine", default="concurrent")
    parser.add_argument("--workload", default="W1", choices=list(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path("overhead.json"))
    given = parser.parse_args()
    runs = {
        name: Ours(WORKLOADS[given.workload], given.engine, [getattr(callbacks, part)() for part in parts])
        for name, parts in METHODS.items()
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}  # FedAvg's just before or after, own
    for repetition in range(given.repetitions + 1):
        for name, run in runs.items():
            first, second = (run, runs["FedAvg"]) if repetition % 2 else (runs["FedAvg"], run)
            one, other = first.round()[0], second.round()[0]
            if repetition:
                seconds[name].append((other, one) if repetition % 2 else (one, other))
    print(f"{'':12}seconds a round   × FedAvg's time   ({given.workload}, {given.engine})")
    for name, pairs in seconds.items():
        ratio = statistics.median(own / fedavg for fedavg, own in pairs)
        print(f"  {name:10}{statistics.median(own for _, own in pairs):15.3f}{ratio:18.2f}")
        runs[name].close()
    given.json.write_text(json.dumps(seconds, indent=1))


if __name__ == "__main__":
    main()
