"""``python -m benchmarks.cores``: how many cores clients side by side can use, by counting.

Of each workload's local step on one core the part is measured in which Python's lock is held (the
step's time without its ATen calls, under torch's profiler), and how long a worker process takes to
fork. Threads wait for each other from 1 / that part on. Processes are forked one after the other:
n of them need S/n + f (n+1)/2 seconds for S seconds of local steps, f being a fork's. From these
the table says how much faster a round is on so many cores, with as many clients as cores at least.

``--workers 1 2 4`` runs the workloads with so many worker processes and threads, and prints what
they really take: seconds a round, and memory. A page that n processes share counts as 1/n of it in
each (PSS), so that a model that all workers read counts once.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.scaling_point import memory_mb
from benchmarks.workloads import WORKLOADS, Ours, local_steps_timed

CORES = (2, 16, 64, 192)


def counted(name: str) -> dict[str, Any]:
    """Of one workload: a round's clients and seconds, Python's part of a step, a fork's seconds."""
    work = WORKLOADS[name]
    run = Ours(work, "sequential")
    run.round()
    with local_steps_timed() as watched:
        run.round()
        seconds = watched.steps
        watched.steps = 0.0
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run.round()
    calls = (event for event in seen.key_averages() if event.key.startswith("aten::"))
    in_calls = sum(event.self_cpu_time_total for event in calls) / 1e6
    run.close()
    return {
        "clients": work.clients,
        "seconds": seconds,
        "python": max(0.0, 1 - in_calls / watched.steps),
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


class Memory(threading.Thread):
    """Looks ten times a second at the memory of this process and its workers; keeps the most."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_mb = 0.0
        self.workers = 0
        self._ended = threading.Event()

    def run(self) -> None:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while not self._ended.wait(0.1):
            pids = children.read_text().split()
            self.workers = max(self.workers, len(pids))
            self.most_mb = max(self.most_mb, sum(map(proportional_mb, ["self", *pids])))

    def __enter__(self) -> Memory:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()


def proportional_mb(pid: str) -> float:
    """A process's memory in MiB (PSS); 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))


def with_workers(name: str, workers: int, rounds: int = 3) -> dict[str, float]:
    """A workload's median round with so many workers, and the memory of all its processes."""
    run = Ours(WORKLOADS[name], "concurrent", workers=workers)
    run.round()
    seconds = [run.round()[0] for _ in range(rounds)]
    with Memory() as memory:
        run.round()
    run.close()
    return {
        "seconds": statistics.median(seconds),
        "MB": memory.most_mb,
        "processes": memory.workers,
    }


def measure_workers(names: list[str], numbers: list[int], file: Path) -> None:
    """Print a line for each workload and number of workers, each in a process of its own."""
    results: dict[str, Any] = {}
    print("| | workers | seconds a round | MB in all | forked |")
    print("|---|---|---|---|---|")
    alone = multiprocessing.get_context("spawn")
    for name in names:
        for number in numbers:
            with alone.Pool(1) as pool:
                facts = results[f"{name}, {number}"] = pool.apply(with_workers, (name, number))
            print(
                f"| {name} | {number} | {facts['seconds']:.2f} | {facts['MB']:.0f} "
                f"| {facts['processes']} |",
                flush=True,
            )
            file.write_text(json.dumps(results, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cores", description=__doc__)
    parser.add_argument("workloads", nargs="*", default=["W1", "X6", "X7", "X8", "X10", "X11"])
    parser.add_argument("--workers", type=int, nargs="+", help="run with so many, in place of it")
    parser.add_argument("--json", type=Path, default=Path("cores.json"))
    given = parser.parse_args()
    if unknown := sorted(set(given.workloads) - set(WORKLOADS)):
        parser.error(f"unknown workload {unknown[0]}; known are {', '.join(WORKLOADS)}")
    if given.workers:
        measure_workers(given.workloads, given.workers, given.json)
        return
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
