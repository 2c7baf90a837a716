"""``python -m benchmarks.cores``: how many cores clients side by side can use, by counting.

Of each workload's local step on one core the part is measured in which Python's lock is held (the
step's time without its ATen calls, under torch's profiler), and how long a worker process takes to
fork. Threads wait for each other from 1 / that part on. Processes are forked one after the other:
n of them need S/n + f (n+1)/2 seconds for S seconds of local steps, f being a fork's. From these
the table says how much faster a round is on so many cores, with as many clients as cores at least.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.profiler import ProfilerActivity, profile

from benchmarks.scaling_point import memory_mb
from benchmarks.workloads import WORKLOADS, Ours
from fl_lightning.engines.local_step import LocalStep

CORES = (2, 16, 64, 192)


def counted(name: str) -> dict[str, Any]:
    """Of one workload: a round's clients and seconds, Python's part of a step, a fork's seconds."""
    work = WORKLOADS[name]
    run = Ours(work, "sequential")
    run.round()
    in_steps = 0.0
    step = LocalStep.__call__

    def timed_step(*arguments: Any) -> None:
        nonlocal in_steps
        began = time.perf_counter()
        step(*arguments)
        in_steps += time.perf_counter() - began

    with patch.object(LocalStep, "__call__", timed_step):
        run.round()
        seconds = in_steps
        in_steps = 0.0
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run.round()
    calls = (event for event in seen.key_averages() if event.key.startswith("aten::"))
    in_calls = sum(event.self_cpu_time_total for event in calls) / 1e6
    run.close()
    return {
        "clients": work.clients,
        "seconds": seconds,
        "python": max(0.0, 1 - in_calls / in_steps),
        "fork": fork_seconds(),
        "resident MB": memory_mb("VmRSS"),
    }


def fork_seconds() -> float:
    """The least of five forks of this process."""
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        pid = os.fork()
        if not pid:
            os._exit(0)
        taken.append(time.perf_counter() - began)
        os.waitpid(pid, 0)
    return min(taken)


def speed_up(facts: dict[str, Any], cores: int) -> dict[str, float]:
    """How much faster than one core a round of ``cores`` times its usual clients' work is."""
    rounds_work = facts["seconds"] * max(1, cores / facts["clients"])
    fork = facts["fork"]
    workers = max(1, min(cores, round(math.sqrt(2 * rounds_work / fork))))
    in_processes = rounds_work / workers + fork * (workers + 1) / 2
    return {
        "threads": min(cores, 1 / max(facts["python"], 1e-3)),
        "processes": rounds_work / in_processes,
        "workers": workers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["W1", "X6", "X7", "X8", "X10", "X11"])
    parser.add_argument("--json", type=Path, default=Path("cores.json"))
    given = parser.parse_args()
    if unknown := sorted(set(given.workloads) - set(WORKLOADS)):
        parser.error(f"unknown workload {unknown[0]}; known are {', '.join(WORKLOADS)}")
    results = {}
    print("| | a round | Python's part | a fork |", *(f" {n} cores |" for n in CORES))
    print("|---|---|---|---|" + "---|" * len(CORES))
    for name in given.workloads:
        facts = results[name] = counted(name)
        cells = []
        for cores in CORES:
            gain = speed_up(facts, cores)
            cells.append(f" {gain['threads']:.0f}, {gain['processes']:.0f} ({gain['workers']:.0f})")
        print(
            f"| {name} | {facts['seconds']:.2f} s | {100 * facts['python']:.0f} % "
            f"| {1000 * facts['fork']:.0f} ms |" + " |".join(cells) + " |",
            flush=True,
        )
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
