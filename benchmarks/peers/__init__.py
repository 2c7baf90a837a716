"""Other systems doing the same rounds (extra ``bench``), each in processes of its own.

A peer is a function ``play(work, peer, rounds)`` in a module of its name: it prepares the
workload and calls ``rounds`` with a function that does one round and gives the mean training loss
over its local steps. Imports, data, processes and compilation are before the first round, or in it;
seconds are taken around that function alone.
"""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import socket
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.workloads import WORKLOADS, Workload

Rounds = Callable[[Callable[[], float]], None]


class Missing(Exception):
    """The peer does not have this network or method; the message says which."""


@dataclass(frozen=True)
class Peer:
    """A row of the table: a module here, intra-op threads of each process, and processes that train
    together. ``workers`` is how many clients the peer itself trains at once: in threads, or in
    processes of its own if they are ``apart``."""

    module: str
    threads: int = 1
    processes: int = 1
    workers: int = 1
    apart: bool = False


PEERS = {
    "pfl, 1 thread": Peer("pfl"),
    "pfl, 2 threads": Peer("pfl", threads=2),
    "pfl, 2 processes": Peer("pfl", processes=2),
    "FedLab, 1 thread": Peer("fedlab"),
    "FedLab, 2 threads": Peer("fedlab", threads=2),
    "BlazeFL, 2 threads": Peer("blazefl", workers=2),
    "BlazeFL, 2 processes": Peer("blazefl", workers=2, apart=True),
    "Flower, 2 workers": Peer("flower"),
    "fedjax, jit": Peer("fedjax"),
}


def peers(work: Workload, asked: dict[str, Peer]) -> dict[str, Running]:
    """Those that are installed and have this workload, ready for their first round.

    A line for each of the others.
    """
    started = {name: Running(name, peer, work) for name, peer in asked.items()}
    found = {}
    for name, running in started.items():
        if why := running.refusal():
            running.close()
            print(f"{name} is left out: {why}")
        else:
            found[name] = running
    return found


class Running:
    """A peer's processes: a call does one round, and gives its seconds and mean training loss.

    They end when this is closed or forgotten.
    """

    def __init__(self, name: str, peer: Peer, work: Workload) -> None:
        self.name = name
        workload = next(n for n, known in WORKLOADS.items() if known is work)
        spawn = multiprocessing.get_context("spawn")
        address = f"localhost:{_free_port()}"
        self._connections: list[Connection] = []
        processes = []
        for rank in range(peer.processes):
            ours, theirs = spawn.Pipe()
            # the name: pfl starts its distributed context only in what looks like a main process
            process = spawn.Process(
                target=_serve, args=(theirs, peer, workload, rank, address), name="MainProcess"
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            processes.append(process)
        self.close = weakref.finalize(self, _end, self._connections, processes)

    def refusal(self) -> str:
        """Why it cannot do this workload; empty when it is ready."""
        return next((why for why in [self._receive(c) for c in self._connections] if why), "")

    def __call__(self) -> tuple[float, float]:
        for connection in self._connections:
            connection.send("round")
        answers = [self._receive(connection) for connection in self._connections]
        return max(took for took, _ in answers), sum(loss for _, loss in answers) / len(answers)

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except EOFError:
            raise RuntimeError(f"{self.name}'s process ended; its traceback is above") from None


def _serve(connection: Connection, peer: Peer, workload: str, rank: int, address: str) -> None:
    """Run by a peer's process: ready (or why not), then a round for each request until the other
    end is closed."""
    torch.set_num_threads(peer.threads)
    torch.manual_seed(rank)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if peer.processes > 1:
        os.environ["PFL_WORKER_RANK"] = str(rank)
        os.environ["PFL_WORKER_ADDRESSES"] = ",".join([address] * peer.processes)

    def rounds(run: Callable[[], float]) -> None:
        connection.send("")
        try:
            while connection.recv():
                began = time.perf_counter()
                loss = run()
                connection.send((time.perf_counter() - began, loss))
        except (EOFError, KeyboardInterrupt):
            return

    try:
        importlib.import_module(f"benchmarks.peers.{peer.module}").play(
            WORKLOADS[workload], peer, rounds
        )
    except ImportError as error:
        connection.send(f"not installed ({error})")
    except Missing as why:
        connection.send(str(why))


def _end(connections: list[Connection], processes: list[Any]) -> None:
    for connection in connections:
        connection.close()
    for process in processes:
        process.join(20)
        if process.is_alive():
            process.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
