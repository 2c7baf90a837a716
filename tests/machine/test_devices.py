"""Memory of freed tensors is kept for the next ones."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

FAULTS = """
import os, resource, threading, torch
from fl_lightning.machine.device_memory import keep_memory

def steps():
    torch.set_num_threads(1)
    network, x = torch.nn.Conv2d(3, 64, 5), torch.randn(30, 3, 32, 32)
    for step in range(15):
        if step == 5:
            began.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
        torch.autograd.grad(network(x).sum(), list(network.parameters()))

began = []
for keep in (True, False):
    child = os.fork()  # what the C library is told holds for the whole process
    if child:
        assert os.waitpid(child, 0)[1] == 0
        continue
    if keep:
        keep_memory()
    for run in (steps, lambda: [t.start() or t.join() for t in [threading.Thread(target=steps)]]):
        began.clear()
        run()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began[0], flush=True)
    os._exit(0)
"""
# of the layer's output, made anew in each step
PAGES = 30 * 64 * 28 * 28 * 4 // os.sysconf("SC_PAGE_SIZE")


def page_faults(**environment: str) -> list[tuple[int, int]]:
    """Of ten steps (with keep_memory, without it), in the main thread and in another."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_", "LD_PRE"))
    }
    env = {**ours, **environment}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, check=True
    )
    found = [int(line) for line in done.stdout.split()]
    pairs = list(zip(found[:2], found[2:], strict=True))
    if min(without for _, without in pairs) < PAGES:
        pytest.skip(
            "this glibc gives no freed memory back to the system, so there is nothing to keep"
        )
    return pairs


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is tuned")
def test_the_system_does_not_clear_the_same_memory_in_each_step() -> None:
    # A thread's memory may still grow once, as much as one step takes.
    for kept, without in page_faults():
        assert kept < without / 2
