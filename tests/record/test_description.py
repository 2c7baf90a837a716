"""Every logger is told what runs, once training starts; the card names learner and data."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import nn

from fl_lightning import FederatedCallback
from fl_lightning.callbacks import RelaxedInitialization, RunCard
from fl_lightning.schedules import Exponential
from fl_lightning.systems import Buffered, Constant, Devices, Polynomial
from fl_lightning.topologies import Ring
from tests.helpers.commands import typed
from tests.helpers.learners import Lit, blobs, federated, momentum, trainer
from tests.helpers.zygote import Cli


def plugin_data(folder: Path, tag: str) -> HParamsPluginData:
    events = EventAccumulator(str(folder))
    events.Reload()
    return HParamsPluginData.FromString(events.SummaryMetadata(tag).plugin_data.content)


def of_tensorboard(folder: Path) -> dict[str, Any]:
    found = plugin_data(folder, "_hparams_/session_start_info").session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


@pytest.mark.parametrize(
    ("given", "title", "rule"),
    [
        ({"size": 2}, "FedBuff", "size=2, concurrency=4, staleness='inverse_sqrt', mixing=None"),
        (
            {"mixing": 0.6, "staleness": Polynomial(0.5)},
            "FedAsync",
            "size=1, concurrency=4, stalen",
        ),
    ],
)
def test_the_card_of_an_asynchronous_run_names_it_with_its_coefficients(
    tmp_path: Path, given: dict[str, Any], title: str, rule: str
) -> None:
    rounds = Buffered(Devices(Constant(0.1)), concurrency=4, **given)
    run = trainer(1, [RunCard()], default_root_dir=tmp_path)
    run.fit(federated(asynchronous=rounds), blobs())
    card = (tmp_path / "card.md").read_text()
    assert card.startswith(f"# {title} (Lit) · ")
    assert re.search(rf"\| asynchronous \| Buffered\(devices=.*Constant.*, {re.escape(rule)}", card)


def test_every_logger_gets_one_flat_dict(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")]
    methods = [RelaxedInitialization(beta=Exponential(0.9)), RunCard()]
    run = trainer(1, methods, logger=loggers, default_root_dir=tmp_path)
    module = federated(
        Lit(hidden=6), client_optimizer=momentum, local_epochs=2, engine="sequential"
    )
    run.fit(module, blobs())
    told = yaml.safe_load((Path(loggers[0].log_dir) / "hparams.yaml").read_text())
    expected = {
        "learner": "Lit",
        "learner/hidden": 6,
        "learner/parameters": 154,
        "method": "FedInit",
        "method/RelaxedInitialization/beta": "Exponential(gamma=0.9)",
        "data": "InMemoryDataModule",
        "data/num_clients": 10,
        "data/batch_size": 8,
        "data/partition": "given",
        "seed": 1,
        "rounds": 1,
        "participation": 0.3,
        "local_epochs": 2,
        "client_optimizer": "SGD",
        "client_optimizer/momentum": 0.9,
        "server_optimizer": "SGD",
        "server_optimizer/lr": 1.0,
        "machine/engine": "sequential",
        "precision": "32-true",
        "machine/processes": 1,
    }
    assert {name: told.get(name) for name in expected} == expected
    assert {"versions/torch", "versions/fl-lightning", "data/partition_hash"} <= told.keys()
    assert all(isinstance(value, str | int | float | bool) for value in told.values())
    assert of_tensorboard(Path(loggers[1].log_dir))["learner"] == "Lit"
    card = (tmp_path / "card.md").read_text()
    assert "| learner | Lit, 154 trained parameters |" in card
    assert "| data | InMemoryDataModule |" in card


class Holding(FederatedCallback):
    def __init__(self, graph: object, nothing: object) -> None:
        super().__init__()
        self.graph = graph
        self.nothing = nothing


def test_an_argument_that_is_an_object_is_told_by_its_text(tmp_path: Path) -> None:
    csv = CSVLogger(tmp_path, "csv")
    trainer(1, [Holding(Ring(), [object()])], logger=csv).fit(federated(), blobs())
    told = yaml.safe_load((Path(csv.log_dir) / "hparams.yaml").read_text())
    own = {name: value for name, value in told.items() if "Holding" in name}
    assert own == {"method/Holding/graph": "Ring()"}


class MLFlowLogger(DummyLogger):
    """Keeps each hyper-parameter as MLflow's file store does."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        for name, value in params.items():
            assert re.fullmatch(r"[/\w.\- :]*", name) and posixpath.normpath(name) == name, name
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            assert not (self.folder / name).exists(), name
            (self.folder / name).write_text(str(value))


def test_a_store_of_files_keeps_them_all(tmp_path: Path) -> None:
    """`learner` was a file where `learner/lr` wants a folder, so that one of some forty was
    kept."""
    csv = CSVLogger(tmp_path, "csv")
    run = trainer(1, logger=[csv, MLFlowLogger(tmp_path / "ml")], default_root_dir=tmp_path)
    run.fit(federated(Lit(hidden=6)), blobs())
    told = yaml.safe_load((Path(csv.log_dir) / "hparams.yaml").read_text())
    kept = [path for path in (tmp_path / "ml").rglob("*") if path.is_file()]
    assert len(kept) == len(told) > 30
    assert (tmp_path / "ml" / "learner").read_text() == "Lit"
    assert (tmp_path / "ml" / "learner.hidden").read_text() == "6"


class Refusing(DummyLogger):
    """As MLflow's, where a value changed since the run that is resumed began."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Changing param values is not allowed")


def test_a_logger_that_refuses_them_does_not_end_the_run() -> None:
    run = trainer(1, logger=Refusing())
    told = "Refusing did not take the hyper-parameters: Changing param"
    with pytest.warns(UserWarning, match=told):
        run.fit(federated(), blobs())
    assert run.current_epoch == 1


def test_the_run_folder_of_the_command_line_has_them_in_tensorboard(cli: Cli) -> None:
    words = "fit -c base -c trainer/cpu --trainer.max_epochs 1 --model.participation 1 --data.num_"
    words += "clients 4 --data.client_test_fraction 0.25 --trainer.callbacks+=PerClientEvaluation"
    words += " --model.client_optimizer AdamW --model.client_optimizer.lr 0.002"
    own = ("--data.augment", "[{crop: {padding: 2}}, mixup]", "--model.learner.metrics", "[f1]")
    sizes = ("--model.learner.network.sizes", "[null, 12, null]")
    made = cli(*typed(words), *own, *sizes, "--trainer.default_root_dir", "x")
    assert made.returncode == 0, made.stderr
    told = of_tensorboard(cli.folder / "x")
    expected = {
        "learner": "Classifier",
        "learner/network": "MLP",
        "learner/network/sizes": "[64, 12, 10]",
        "data": "Digits",
        "data/augment": "[{'crop': {'padding': 2}}, 'mixup']",
        "data/client_test_fraction": 0.25,
        "client_optimizer": "AdamW",
        "client_optimizer/lr": 0.002,
    }
    assert {name: told.get(name) for name in expected} == expected
    assert not {"learner/lr", "learner/momentum", "learner/weight_decay"} & told.keys()
    experiment = plugin_data(cli.folder / "x", "_hparams_/experiment").experiment
    first = {info.name for info in experiment.hparam_infos if info.differs}
    assert first == {"client_optimizer/lr", "data", "learner/network", "method", "seed"}
    compared = {info.name.tag for info in experiment.metric_infos}
    assert {"val/acc", "val/f1", "clients/f1", "clients/acc_worst10"} <= compared
    assert "clients/acc_weighted" in compared
    card = (cli.folder / "x/card.md").read_text()
    rows = [
        "learner | Classifier (MLP), ",
        r"network.sizes | \[64, 12, 10\] |",
        r"augment | \[{'crop': {'padding': 2}}, 'mixup'\] |",
        "client_optimizer | AdamW: lr=0.002, betas=(0.9, 0.999), eps=1e-08, ",
    ]
    assert [row for row in rows if f"| {row}" not in card] == []
    over_clients = r"\| acc per client \| 0\.\d{4} ± 0\.\d{4} over clients, worst tenth 0\.\d{4} \|"
    assert re.search(over_clients, card)
    settings = json.loads((cli.folder / "x/run.json").read_text())["settings"]
    assert settings["data/augment"] == expected["data/augment"] and "seed" not in settings


class LowRank(nn.Linear):
    """A linear layer of our own with an adapter of rank 3."""

    def __init__(self, inputs: int, outputs: int, rank: int = 3) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)
        self.rank = rank
        self.lora_A = nn.Parameter(torch.randn(rank, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Any) -> Any:
        return super().forward(x) + x @ self.lora_A.T @ self.lora_B.T


class OnAny(Lit):
    """Around a network that knows nothing of us."""

    def __init__(self, network: nn.Module, lr: float = 0.1) -> None:
        pl.LightningModule.__init__(self)
        self.save_hyperparameters(ignore=["network"])
        self.network = self.net = network
        self.lr = lr


def test_a_network_made_in_python_tells_the_arguments_that_it_has(tmp_path: Path) -> None:
    csv = CSVLogger(tmp_path, "csv")
    fit = trainer(1, [RunCard()], logger=csv, default_root_dir=tmp_path)
    fit.fit(federated(OnAny(LowRank(20, 4))), blobs())
    told = yaml.safe_load((Path(csv.log_dir) / "hparams.yaml").read_text())
    expected = {"learner/network": "LowRank", "learner/network/rank": 3, "learner/lora_rank": 3}
    expected |= {"learner/parameters": 72, "learner/frozen_parameters": 84, "method": "FedIT"}
    assert {name: told.get(name) for name in expected} == expected
    card = (tmp_path / "card.md").read_text()
    assert card.startswith("# FedIT (OnAny) · ") and "| lora_rank | 3 |" in card
