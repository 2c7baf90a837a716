"""Memory of freed tensors is kept for the next ones, in a process of its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, threading, torch
from fl_lightning.devices import keep_memory
from fl_lightning.models import LeNet
keep_memory()

def steps():
    torch.set_num_threads(1)
    network, x = LeNet(10), torch.randn(50, 3, 32, 32)
    for step in range(15):
        if step == 5:
            began.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        torch.autograd.grad(network(x).sum(), list(network.parameters()))

began = []
for run in (steps, lambda: [t.start() or t.join() for t in [threading.Thread(target=steps)]]):
    began.clear()
    run()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began[0])
"""


def page_faults(**environment: str) -> list[int]:
    """Of ten steps, in the main thread and in another."""
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS],
        env={**unset, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_the_system_does_not_clear_the_same_memory_in_each_step() -> None:
    assert max(page_faults()) < 4_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_what_the_environment_says_of_memory_stays() -> None:
    assert min(page_faults(MALLOC_TRIM_THRESHOLD_="131072")) > 40_000
