"""Which client has which training samples."""

# Before data modules were sorted, config.yaml of a run named
# fl_lightning.datamodules.partitions.IID.
from fl_lightning.datamodules.partitions.partition import (
    IID,
    ByGroup,
    Contiguous,
    Partition,
    QuantitySkew,
    Saved,
    SortedShards,
)

__all__ = [
    "IID",
    "ByGroup",
    "Contiguous",
    "Partition",
    "QuantitySkew",
    "Saved",
    "SortedShards",
]
