"""Starts the processes of a run on GPUs and nodes, and names the one that is lost.

Which participants each process trains is in `aggregation/over_processes.py`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fl_lightning.errors import UserError
from fl_lightning.machine import processes
from fl_lightning.machine.lightning import DDPStrategy, StrategyRegistry, _sync_module_states
from fl_lightning.machine.processes import default_timeout, set_timeout

_MARGIN = timedelta(minutes=10)  # beyond the longest round
# Seconds that the other processes have to answer. After a closed connection the other processes
# need fewer seconds, because one of them has gone.
_ANSWER = 10.0
_ANSWER_CLOSED = 2.0
# Errors of a broken connection have no class of their own, but contain one of these words.
_BROKEN = (
    "gloo",
    "timed out",
    "timeout",
    "connection closed",
    "connection reset",
    "nccl",
    "broken pipe",
)


class FederatedStrategy(DDPStrategy):
    """``Trainer(strategy="federated", devices=2)``: several processes for one run.

    Launchers, torchrun, SLURM and backends are Lightning's own. The module is not wrapped in
    DistributedDataParallel: clients' gradients stay with the client, and the round sums over
    processes, in a fixed order.

    Args:
        timeout: how long a process waits for another before the run ends, a timedelta or seconds.
            None: ten minutes beyond the longest round so far. It is at least half an hour before
            round 0, with its downloads and trials. With torch before 2.14 it always is, because its
            gloo may keep the timeout with which it began.
        **kwargs: arguments of Lightning's DDPStrategy.
    """

    strategy_name = "federated"

    def __init__(self, timeout: timedelta | float | None = None, **kwargs: Any) -> None:
        if timeout is not None and not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        if timeout is not None and timeout <= timedelta(0):
            raise UserError(
                f"FederatedStrategy: timeout={timeout} is not accepted; give seconds above 0."
            )
        # Processes start slowly, so the first wait is at least half an hour.
        at_first = max(timeout or default_timeout(), default_timeout())
        super().__init__(timeout=at_first, **kwargs)
        self.given_timeout = timeout
        self._longest = 0.0
        self._began: float | None = None  # the present round
        self._who: list[str] = []  # each rank's process and host
        self._lost: tuple[str, BaseException] | None = None

    def configure_ddp(self) -> None:
        assert self.model is not None
        _sync_module_states(self.model)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return the arguments with which Lightning splits no loader."""
        # Every process reads the round's token, and evaluation splits its data itself.
        return {"num_replicas": 1, "rank": 0}

    def setup_distributed(self) -> None:
        if self.root_device.type == "cuda":
            # Otherwise NCCL aborts this process at a timeout, before it can name the lost one.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        try:
            super().setup_distributed()
        except RuntimeError as error:
            if "connectfullmesh" not in str(error).lower():
                raise
            raise UserError(self._no_way(str(error))) from error
        self._began = None
        self._longest = 0.0
        set_timeout(max(self.given_timeout or default_timeout(), default_timeout()))
        store = dist.distributed_c10d._get_default_store()
        store.set(f"fl/who/{self.global_rank}", f"process {os.getpid()} on {socket.gethostname()}")
        self._who = [store.get(f"fl/who/{rank}").decode() for rank in range(self.world_size)]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one round; the longest round so far decides how long the others may take."""
        now = time.monotonic()
        if self._began is None:
            set_timeout(self.given_timeout or default_timeout())
        elif self.given_timeout is None and now - self._began > self._longest:
            self._longest = now - self._began
            set_timeout(timedelta(seconds=self._longest) + _MARGIN)
        self._began = now
        return super().training_step(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        text = str(exception).lower()
        if not isinstance(exception, RuntimeError) or not self._who:
            return
        if any(word in text for word in _BROKEN):
            closed = "closed" in text or "reset" in text
            silent = self._silent(_ANSWER_CLOSED if closed else _ANSWER)
            self._lost = (self._paragraph(silent), exception)

    def teardown(self) -> None:
        super().teardown()
        if self._lost is not None:
            (text, cause) = self._lost
            self._lost = None
            # Processes that this one started cannot go on without it, and would wait.
            kill = getattr(self.launcher, "kill", None)
            if kill is not None:
                kill(signal.SIGKILL)
            raise UserError(text) from cause

    def _silent(self, seconds: float) -> list[int]:
        """Return the ranks that do not answer within so many seconds."""
        others = [rank for rank in range(self.world_size) if rank != self.global_rank]
        silent = set(others)
        deadline = time.monotonic() + seconds

        def ask() -> None:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"fl/there/{self.global_rank}", "")
            for rank in others:
                left = max(deadline - time.monotonic(), 0.1)
                try:
                    store.wait([f"fl/there/{rank}"], timedelta(seconds=left))
                    silent.discard(rank)
                except RuntimeError as error:
                    # Any other error means that the store is gone, with the process that holds it.
                    if "timeout" not in str(error).lower():
                        return

        # If the process that holds the store is stopped, the store never answers. So a thread asks,
        # and the wait is limited.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(seconds + 2)
        ranks = sorted(silent)
        # If no rank answers, the first rank, which holds the store, is lost.
        if asking.is_alive() or len(ranks) == len(others):
            return ranks[:1]
        return ranks

    def _no_way(self, said: str) -> str:
        remote = re.search(r"remote=\[([^\]]+)\]", said)
        place = f" at {remote[1]}" if remote else ""
        return (
            f"rank {self.global_rank} (process {os.getpid()} on {socket.gethostname()}) does not "
            f"reach another process{place}. Processes take the address that their host's name "
            "stands for, which may be one of the host alone, such as 127.0.1.1; name the network "
            "between the hosts by its interface on each: GLOO_SOCKET_IFNAME=eth0, and for GPUs "
            "NCCL_SOCKET_IFNAME=eth0."
        )

    def _paragraph(self, lost: list[int]) -> str:
        own = f"rank {self.global_rank} ({self._who[self.global_rank]})"
        story = f"{own} lost the other processes, which ended the run: it was stopped, or too slow"
        if lost:
            silent = " and ".join(f"rank {rank} ({self._who[rank]})" for rank in lost)
            story = (
                f"{silent} does not answer, so {own} ends the run: it was stopped or has ended, "
                "or its machine is lost"
            )
        seconds = processes.timeout().total_seconds()
        return (
            f"{story}. The run goes on from its last checkpoint, on any number of processes: "
            f"--ckpt_path last. Where a process only needs longer than {seconds:g} s, give "
            "FederatedStrategy(timeout=…) more seconds, --trainer.strategy.timeout at the "
            "command line."
        )


StrategyRegistry.register(
    FederatedStrategy.strategy_name,
    FederatedStrategy,
    description="federated rounds over many processes",
)
