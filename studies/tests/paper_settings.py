"""What the papers say of each experiment, key → value, written from them and not from the configs.

FedInit: Sun et al., NeurIPS 2023 (§ 5, B.1, Tables 6 and 7) and its journal version (§ 5.1).
FedSMOO: Sun et al., ICML 2023 (§ 5.1, B.4, Table 5). FedALS: Gholami & Seferoglu, 2024 (§ 7). Where
a paper gives no value, ours is held too. ``EXPERIMENTS``: packaged name → table. ``FRAGMENTS``:
paper → method → what it changes in a table of its paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

SGD = {"class_path": "SGD", "lr": 1.0}
SHARED = {  # what no paper says otherwise
    "data.drop_last": False,
    "data.val_fraction": 0.0,
    "method": [],
    "model.buffers": "average",
    "model.clip_norm": None,
    "model.client_optimizer": None,
    "model.sampling": "uniform",
    "model.server_lr_decay": 1.0,
    "model.server_optimizer": SGD,
    "model.weighting": "uniform",
    "seed_everything": 0,
}
NO_MOMENTUM = {"model.keep_optimizer_state": False, "model.learner.momentum": 0.0}
RESNET18 = {"class_path": "ResNet18GN", "groups": 2, "live_taps": True, "in_channels": 3}
PARTICIPATION = {100: 0.1, 200: 0.05}  # 10 % of 100 clients, 5 % of 200
CLASSES = {"CIFAR10": 10, "CIFAR100": 100, "SVHN": 10, "MNIST": 10}


def dirichlet(alpha: float) -> dict[str, Any]:
    of = {"alpha": alpha, "replacement": True, "samples_per_client": None, "prior": "uniform"}
    return {"class_path": "Dirichlet", **of}


def pathological(classes: int) -> dict[str, Any]:
    return {
        "class_path": "Pathological",
        "classes": classes,
        "replacement": True,
        "samples_per_client": None,
    }


def fedinit(data: str, alpha: float, clients: int, network: dict[str, Any]) -> dict[str, Any]:
    return {
        **SHARED,
        **NO_MOMENTUM,
        "data.augment": {"padding": 4, "flip": False, "probability": 1.0},
        "data.batch_size": 50,
        "data.biases": [
            {"class_path": "ClientBias", "std": 0.1},
            {"class_path": "CategoryBias", "std": 0.1},
        ],
        "data.class_path": data,
        "data.num_clients": clients,
        "data.partition": dirichlet(alpha),
        "model.learner.lr": 0.1,
        "model.learner.network": {**network, "num_classes": CLASSES[data]},
        "model.learner.weight_decay": 1e-3,
        "model.local_epochs": 5,
        "model.local_steps": None,
        "model.lr_decay": 0.998,
        "model.participation": PARTICIPATION[clients],
        "trainer.max_epochs": {"CIFAR10": 500, "CIFAR100": 800}[data],
    }


def fedsmoo(data: str, partition: dict[str, Any], clients: int) -> dict[str, Any]:
    batch, epochs = {"CIFAR10": (50, 5), "CIFAR100": (20, 2)}[data]
    return {
        **SHARED,
        **NO_MOMENTUM,
        "data.augment": False,
        "data.batch_size": batch,
        "data.biases": [],
        "data.class_path": data,
        "data.num_clients": clients,
        "data.partition": partition,
        "model.learner.lr": 0.1,
        "model.learner.network": {**RESNET18, "num_classes": CLASSES[data]},
        "model.learner.weight_decay": 1e-3,
        "model.local_epochs": epochs,
        "model.local_steps": None,
        "model.lr_decay": 0.998,
        "model.participation": PARTICIPATION[clients],
        "trainer.max_epochs": 800,
    }


def fedals(data: str, partition: str) -> dict[str, Any]:
    of = {"in_channels": 1 if data == "MNIST" else 3, "norm": "batch", "depth": 20, "width": 16}
    return {
        **SHARED,
        "data.augment": False,
        "data.batch_size": 64,
        "data.biases": [],
        "data.class_path": data,
        "data.num_clients": 5,
        "data.partition": {"class_path": partition},
        "model.keep_optimizer_state": True,
        "model.learner.lr": 0.1,
        "model.learner.momentum": 0.9,
        "model.learner.network": {"class_path": "ResNet20", "num_classes": CLASSES[data], **of},
        "model.learner.weight_decay": 1e-4,
        "model.local_epochs": None,
        "model.local_steps": 5,
        "model.lr_decay": 1.0,
        "model.participation": "all",
        "trainer.max_epochs": 8690,
    }


def multinli(partition: dict[str, Any]) -> dict[str, Any]:
    alike = {
        key: value
        for key, value in fedals("MNIST", "IID").items()
        if not key.startswith("model.learner.")
    }
    of = {
        "config": None,
        "lora": None,
        "lr": 5e-5,
        "path": "opt-125m",
        "trainable": None,
        "weight_decay": 0.01,
    }
    columns = {
        "text": ["sentence1", "sentence2"],
        "label": "gold_label",
        "group": "genre",
        "classes": None,
    }
    files = {"train": "multinli_1.0_train.jsonl", "test": "multinli_1.0_dev_matched.jsonl"}
    return {
        **alike,
        **{f"data.{key}": value for key, value in {**columns, **files}.items()},
        "data.batch_size": 16,
        "data.class_path": "TextClassification",
        "data.length": 128,
        "data.partition": partition,
        "data.tokenizer": "opt-125m",
        **{f"model.learner.{key}": value for key, value in of.items()},
        "trainer.max_epochs": 1000,
    }


def table() -> Iterator[tuple[str, dict[str, Any]]]:
    for data in ("CIFAR10", "CIFAR100"):
        for clients in PARTICIPATION:
            for alpha in (0.6, 0.1):
                name = f"table1-{data.lower()}-dir{alpha}-{clients}"
                vgg = {"class_path": "VGG11", "in_channels": 3}
                yield f"experiment/fedinit/{name}", fedinit(data, alpha, clients, RESNET18)
                yield f"experiment/fedinit/{name}-vgg11", fedinit(data, alpha, clients, vgg)
                yield f"experiment/fedsmoo/{name}", fedsmoo(data, dirichlet(alpha), clients)
            for classes in {"CIFAR10": (6, 3), "CIFAR100": (20, 10)}[data]:
                name = f"table1-{data.lower()}-path{classes}-{clients}"
                yield f"experiment/fedsmoo/{name}", fedsmoo(data, pathological(classes), clients)
    for data in ("SVHN", "CIFAR10", "CIFAR100", "MNIST"):
        yield f"experiment/fedals/table1-{data.lower()}-shards-5", fedals(data, "SortedShards")
        yield f"experiment/fedals/table1-{data.lower()}-iid-5", fedals(data, "IID")
    yield (
        "experiment/fedals/table1-multinli-genre-5",
        multinli({"class_path": "ByGroup", "groups": None}),
    )
    yield "experiment/fedals/table1-multinli-iid-5", multinli({"class_path": "IID"})


EXPERIMENTS = dict(table())

ADAM = {
    "class_path": "FedAdam",
    "lr": 0.1,
    "betas": [0.9, 0.99],
    "tau": 1e-3,
    "initial_v": None,
    "bias_correction": False,
}


def ri(beta: float) -> dict[str, Any]:
    return {
        "class_path": "RelaxedInitialization",
        "beta": beta,
        "average": "models",
        "offset": "own",
    }


def dyn(penalty: float) -> dict[str, Any]:
    return {"class_path": "DynamicRegularization", "penalty": penalty, "pull": True}


def sam(radius: float) -> dict[str, Any]:
    return {"class_path": "SharpnessAwareMinimization", "radius": radius}


def cm(alpha: float) -> dict[str, Any]:
    return {"class_path": "ClientMomentum", "alpha": alpha}


SCAFFOLD = {"class_path": "ControlVariates", "estimate": "displacement", "momentum": None}
COMMON = {"class_path": "GlobalSharpnessAwareMinimization", "radius": 0.1, "ignore_last": False}
ALS = {
    "class_path": "PartialAveraging",
    "periods": None,
    "period": 10,
    "extractor": None,
    "extractor_layers": None,
}
ALS_OPT = {**ALS, "extractor": ["*.layers.[0-9].*"]}
PROXY = {"model.lr_decay": 0.9995}
# what each changes in an experiment of its paper
FRAGMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "fedinit": {
        "fedavg": {},
        "fedadam": {"model.server_optimizer": ADAM},
        "fedsam": {"method": [sam(0.1)]},
        "fedsam-200": {"method": [sam(0.01)]},
        "scaffold": {"method": [SCAFFOLD]},
        "feddyn": {"method": [dyn(0.1)], **PROXY},
        "feddyn-cifar100": {"method": [dyn(0.01)], **PROXY},
        "fedcm": {"method": [cm(0.1)]},
        "fedcm-vgg11": {"method": [cm(0.5)]},
        "fedinit": {"method": [ri(0.1)]},
        "fedinit-200": {"method": [ri(0.01)]},
        "ri": {"method": [ri(0.1)]},
        "ri-200": {"method": [ri(0.01)]},
    },
    "fedsmoo": {
        "fedavg": {},
        "fedadam": {"model.server_optimizer": ADAM},
        "scaffold": {"method": [SCAFFOLD]},
        "fedcm": {"method": [cm(0.1)]},
        "feddyn": {"method": [dyn(0.1)], **PROXY},
        "feddyn-cifar100": {"method": [dyn(0.01)], **PROXY},
        "feddyn_sam": {"method": [dyn(0.1), sam(0.1)], **PROXY},
        "fedsam": {"method": [sam(0.01)]},
        "mofedsam": {"method": [sam(0.01), cm(0.1)]},
        "fedsmoo": {"method": [dyn(0.1), COMMON], **PROXY},
        "fedsmoo-cifar100": {"method": [dyn(0.01), COMMON], **PROXY},
    },
    "fedals": {
        "fedavg": {},
        "fedavg-tau50": {"model.local_steps": 50},
        "fedals": {"method": [ALS]},
        "scaffold": {"method": [SCAFFOLD]},
        "fedals_scaffold": {"method": [ALS, SCAFFOLD]},
        "fedals-opt": {"method": [ALS_OPT]},
        "fedals-opt4": {"method": [{**ALS, "extractor": ["*.layers.[0-2].*"]}]},
        "fedals_scaffold-opt": {"method": [ALS_OPT, SCAFFOLD]},
    },
}
