"""Starts the processes of a run on GPUs and nodes, and ends them together.

Which participants each process trains is in `aggregation/over_processes.py`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
from datetime import timedelta
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveFloat, check
from fl_lightning.machine.lightning import DDPStrategy, StrategyRegistry, _sync_module_states
from fl_lightning.machine.processes import default_timeout, set_timeout

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
        timeout: how long a process waits for another before the run ends, a timedelta or seconds;
            None: half an hour. It is at least half an hour before round 0, with its downloads and
            trials. With torch before 2.14 it always is, because its gloo may keep the timeout with
            which it began.
        **kwargs: arguments of Lightning's DDPStrategy.
    """

    strategy_name = "federated"

    def __init__(self, timeout: timedelta | float | None = None, **kwargs: Any) -> None:
        if timeout is not None and not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        if timeout is not None:
            check("FederatedStrategy: timeout", timeout.total_seconds(), PositiveFloat)
        self.timeout_in_rounds = timeout or default_timeout()
        # Processes start slowly, so the first wait is at least half an hour.
        self._at_first = max(self.timeout_in_rounds, default_timeout())
        super().__init__(timeout=self._at_first, **kwargs)
        self._begun = False
        self._lost: BaseException | None = None

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
            # Otherwise NCCL aborts this process at a timeout, without an error.
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        try:
            super().setup_distributed()
        except RuntimeError as error:
            if "connectfullmesh" not in str(error).lower():
                raise
            raise UserError(self._no_way(str(error))) from error
        self._begun = False
        set_timeout(self._at_first)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one round."""
        if not self._begun:
            self._begun = True
            set_timeout(self.timeout_in_rounds)
        return super().training_step(*args, **kwargs)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        broken = any(word in str(exception).lower() for word in _BROKEN)
        if isinstance(exception, RuntimeError) and self.world_size > 1 and broken:
            self._lost = exception

    def teardown(self) -> None:
        super().teardown()
        if self._lost is None:
            return
        lost = self._lost
        self._lost = None
        # Processes that this one started cannot go on without it, and would wait.
        kill = getattr(self.launcher, "kill", None)
        if kill is not None:
            kill(signal.SIGKILL)
        raise UserError(
            f"rank {self.global_rank} (process {os.getpid()} on {socket.gethostname()}) lost "
            "another process, which was stopped, has ended or is too slow; or its machine is "
            "lost. The run goes on from its last checkpoint, on any number of processes: "
            "--ckpt_path last. If a process needs longer than "
            f"{self.timeout_in_rounds.total_seconds():g} s, give FederatedStrategy(timeout=…) more "
            "seconds, --trainer.strategy.timeout at the command line."
        ) from lost

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


StrategyRegistry.register(
    FederatedStrategy.strategy_name,
    FederatedStrategy,
    description="federated rounds over many processes",
)
