"""A round's participants spread over processes, GPUs and nodes, with torch.distributed underneath."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry


class FederatedStrategy(DDPStrategy):
    """``Trainer(strategy="federated", devices=2)``: launchers, torchrun, SLURM and backends are Lightning's own.

    The module is not wrapped in DistributedDataParallel: a client's gradients stay with that client, and the round
    itself sums over processes, in a fixed order.
    """

    strategy_name = "federated"

    def configure_ddp(self) -> None:
        assert self.model is not None
        _sync_module_states(self.model)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Lightning splits no loader: every process reads the round's token, and evaluation splits its own data."""
        return {"num_replicas": 1, "rank": 0}


StrategyRegistry.register(
    FederatedStrategy.strategy_name, FederatedStrategy, description="federated rounds over many processes"
)
