"""The bare PyTorch loop, in a process of its own as the others are.

A run's settings of the process are not its.
"""

from __future__ import annotations

from benchmarks.bare import prepared
from benchmarks.peers import Peer, Rounds
from benchmarks.workloads import Workload


def play(work: Workload, peer: Peer, rounds: Rounds) -> None:
    rounds(prepared(work, "cpu"))
