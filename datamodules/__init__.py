"""Federated data modules: data sets, partitions over clients, biases."""

from __future__ import annotations

if __name__ == "datamodules":
    raise ImportError("this is fl_lightning.datamodules: import it by that name")

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.biases import Bias, CategoryBias, ClientBias
from fl_lightning.datamodules.partitions.dealt_by_shares import DealtByShares
from fl_lightning.datamodules.partitions.flower_splits import (
    ByValue,
    Grouped,
    InnerDirichlet,
    LabelBuckets,
    Shards,
    Sizes,
)
from fl_lightning.datamodules.partitions.label_skew import Dirichlet, Pathological
from fl_lightning.datamodules.partitions.other_tools import DirichletByClass, LabelsPerClient
from fl_lightning.datamodules.partitions.own_splits import Imported, LabelShares, Mixed
from fl_lightning.datamodules.partitions.partition import (
    IID,
    ByGroup,
    Contiguous,
    Partition,
    QuantitySkew,
    Saved,
    SortedShards,
)
from fl_lightning.datamodules.sources.existing import FromDataModule, FromDatasets
from fl_lightning.datamodules.sources.folders import FromFolders
from fl_lightning.datamodules.sources.hdf5 import FromHDF5
from fl_lightning.datamodules.sources.hugging_face import FromHuggingFace
from fl_lightning.datamodules.sources.human_activity import HumanActivity
from fl_lightning.datamodules.sources.images import (
    CIFAR10,
    CIFAR100,
    MNIST,
    SVHN,
    Digits,
    FashionMNIST,
    MedMNIST,
)
from fl_lightning.datamodules.sources.instruction_tuning import InstructionTuning
from fl_lightning.datamodules.sources.leaf import FromLEAF
from fl_lightning.datamodules.sources.memory import GeneratedDomains, InMemoryDataModule
from fl_lightning.datamodules.sources.pfllib import FromPFLlib
from fl_lightning.datamodules.sources.table import FromTable
from fl_lightning.datamodules.sources.text_classification import (
    GLUE,
    LanguageModelling,
    TextClassification,
)

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "GLUE",
    "IID",
    "MNIST",
    "SVHN",
    "Bias",
    "ByGroup",
    "ByValue",
    "CategoryBias",
    "ClientBias",
    "Contiguous",
    "DealtByShares",
    "Digits",
    "Dirichlet",
    "DirichletByClass",
    "FashionMNIST",
    "FederatedDataModule",
    "FromDataModule",
    "FromDatasets",
    "FromFolders",
    "FromHDF5",
    "FromHuggingFace",
    "FromLEAF",
    "FromPFLlib",
    "FromTable",
    "GeneratedDomains",
    "Grouped",
    "HumanActivity",
    "Imported",
    "InMemoryDataModule",
    "InnerDirichlet",
    "InstructionTuning",
    "LabelBuckets",
    "LabelShares",
    "LabelsPerClient",
    "LanguageModelling",
    "MedMNIST",
    "Mixed",
    "Partition",
    "Pathological",
    "QuantitySkew",
    "Saved",
    "Shards",
    "Sizes",
    "SortedShards",
    "TextClassification",
]
