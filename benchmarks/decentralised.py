"""``python -m benchmarks.decentralised``: what a round without a server costs beside FedAvg's, and
how long graphs take.

Rounds of the sequential engine, each paired with one of FedAvg just before or after; medians of the
ratios. FedAvg itself, in a run of its own, shows how far the machine's noise goes. The bare loop
beside: ``python -m benchmarks.speed G1 --engines auto --without-peers``.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from functools import partial

from benchmarks.overhead import paired
from benchmarks.workloads import Ours, Workload
from fl_lightning.callbacks import Gossip
from fl_lightning.models import MLP
from fl_lightning.topologies import (
    ErdosRenyi,
    ExponentialGraph,
    FullyConnected,
    Grid,
    OnePeerExponential,
    RandomRegular,
    Ring,
    Star,
    Topology,
    Torus,
    links_of,
)

SMALL = partial(Workload, partial(MLP, [64, 64, 10]), (64,), 100, 1, 10)
ALL = SMALL(clients=1_000, registered=1_000)
FEW = SMALL(clients=10, registered=30_000)
# How many times FedAvg's round a round may take.
BOUNDS: list[tuple[str, Workload, dict[Topology, float]]] = [
    (
        "1,000 clients, all take part",
        ALL,
        {Ring(): 1.5, Torus(): 1.5, FullyConnected(): 1.5, RandomRegular(10): 2.0},
    ),
    (
        "30,000 clients, 10 take part",
        FEW,
        {Ring(): 3.0, FullyConnected(): 3.0, RandomRegular(10): 3.0},
    ),
]
MANY = 200_000
GRAPHS: list[Topology] = [Ring(), Grid(), Torus(), Star(), ExponentialGraph()]
GRAPHS += [OnePeerExponential(), RandomRegular(10), ErdosRenyi(5e-5)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decentralised", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args().repetitions
    for title, work, bounds in BOUNDS:
        yardstick = Ours(work, "sequential")
        runs = {"FedAvg, again": Ours(work, "sequential")}
        runs |= {str(each): Ours(work, "sequential", [Gossip(each)]) for each in bounds}
        print(f"{title:34}seconds a round   × FedAvg's time   at most")
        most = {str(topology): bound for topology, bound in bounds.items()}
        for name, pairs in paired(yardstick, runs, repetitions).items():
            ratio = statistics.median(own / fedavg for fedavg, own in pairs)
            line = f"  {name:32}{statistics.median(own for _, own in pairs):15.3f}{ratio:17.2f}"
            print(line + (f"{most[name]:10.1f}" if name in most else ""), flush=True)
            runs[name].close()
        yardstick.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of these runs: {peak:.1f} GiB")
    print(f"edges and messages of {MANY:,} clients{'':7}seconds        edges")
    for graph in GRAPHS:
        began = time.perf_counter()
        edges = links_of(graph, MANY, 0, 1).edges
        print(f"  {graph!s:32}{time.perf_counter() - began:15.1f}{edges:13,}", flush=True)


if __name__ == "__main__":
    main()
