"""A round's participants spread over processes, GPUs and nodes, with torch.distributed underneath."""

from __future__ import annotations

from typing import Any

from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry


class FederatedStrategy(DDPStrategy):
    """``Trainer(strategy="federated", devices=2)``: launchers, torchrun, SLURM and backends are Lightning's own.

    The module is not wrapped in DistributedDataParallel: clients' gradients stay with the client; what is summed over
    processes is summed by the round, in a fixed order.
    """

    strategy_name = "federated"

    def configure_ddp(self) -> None:
        assert self.model is not None
        _sync_module_states(self.model)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Loaders are not split by Lightning: every process reads the round's token, evaluation shards itself."""
        return {"num_replicas": 1, "rank": 0}


StrategyRegistry.register(
    FederatedStrategy.strategy_name, FederatedStrategy, description="federated rounds over many processes"
)
