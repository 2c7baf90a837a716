"""Federated data modules: data sets, partitions over clients, biases."""

from __future__ import annotations

if __name__ == "datamodules":
    raise ImportError("this is fl_lightning.datamodules: import it by that name")

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.biases import Bias, CategoryBias, ClientBias
from fl_lightning.datamodules.digits import Digits
from fl_lightning.datamodules.existing import FromDataModule, FromDatasets
from fl_lightning.datamodules.flower_splits import (
    ByValue,
    Grouped,
    InnerDirichlet,
    LabelBuckets,
    Shards,
)
from fl_lightning.datamodules.folders import FromFolders
from fl_lightning.datamodules.generated_domains import GeneratedDomains
from fl_lightning.datamodules.hdf5 import FromHDF5
from fl_lightning.datamodules.hugging_face import FromHuggingFace
from fl_lightning.datamodules.human_activity import HumanActivity
from fl_lightning.datamodules.images import CIFAR10, CIFAR100, MNIST, SVHN, FashionMNIST
from fl_lightning.datamodules.instruction_tuning import InstructionTuning
from fl_lightning.datamodules.label_skew import Dirichlet, Pathological
from fl_lightning.datamodules.language_modelling import LanguageModelling
from fl_lightning.datamodules.leaf import FromLEAF
from fl_lightning.datamodules.memory import InMemoryDataModule
from fl_lightning.datamodules.own_splits import Imported, LabelShares, Mixed
from fl_lightning.datamodules.partitions import (
    IID,
    ByGroup,
    Contiguous,
    Partition,
    QuantitySkew,
    Saved,
    SortedShards,
)
from fl_lightning.datamodules.pfllib import FromPFLlib
from fl_lightning.datamodules.published import DirichletByClass, LabelsPerClient
from fl_lightning.datamodules.size_rules import Sizes
from fl_lightning.datamodules.table import FromTable
from fl_lightning.datamodules.text_classification import TextClassification

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "IID",
    "MNIST",
    "SVHN",
    "Bias",
    "ByGroup",
    "ByValue",
    "CategoryBias",
    "ClientBias",
    "Contiguous",
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
