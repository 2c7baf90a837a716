"""Every logger is told what runs, once training starts; the card names learner and data."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from pytorch_lightning.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from fl_lightning.callbacks import RelaxedInitialization, RunCard
from fl_lightning.record.description import as_paths
from fl_lightning.schedules import Exponential
from fl_lightning.systems import Buffered, Constant, Devices, Polynomial
from tests.helpers.commands import typed
from tests.helpers.learners import Lit, blobs, federated, momentum, trainer
from tests.helpers.zygote import Cli


def of_tensorboard(folder: Path) -> dict[str, Any]:
    events = EventAccumulator(str(folder))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


@pytest.mark.parametrize(
    ("given", "title", "rule"),
    [
        ({"size": 2}, "FedBuff", "size=2, concurrency=4, staleness='inverse_sqrt', mixing=None"),
        (
            {"mixing": 0.6, "staleness": Polynomial(0.5)},
            "FedAsync",
            "size=1, concurrency=4, staleness=Polynomial(a=0.5), mixing=0.6",
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
    assert re.search(rf"\| asynchronous \| devices=.*Constant.*, {re.escape(rule)}, ", card)


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
        "machine/precision": "32-true",
        "machine/processes": 1,
    }
    assert {name: told.get(name) for name in expected} == expected
    assert {"versions/torch", "versions/fl-lightning", "data/partition_hash"} <= told.keys()
    assert all(isinstance(value, str | int | float | bool) for value in told.values())
    assert of_tensorboard(Path(loggers[1].log_dir))["learner"] == "Lit"
    assert (
        yaml.safe_load((Path(loggers[1].log_dir) / "hparams.yaml").read_text()).items()
        >= told.items()
    )
    card = (tmp_path / "card.md").read_text()
    assert (
        "| learner | Lit, 154 trained parameters |" in card
        and "| data | InMemoryDataModule |" in card
    )


class MLFlowLogger(DummyLogger):
    """Keeps each hyper-parameter as MLflow's file store does.

    A file of its own, under a name that MLflow takes.
    """

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
    assert (tmp_path / "ml" / "learner.class").read_text() == "Lit"
    assert (tmp_path / "ml" / "learner" / "hidden").read_text() == "6"


def test_names_that_a_path_cannot_hold_stay_apart() -> None:
    names = {"a": 1, "a/b": 2, "a.class": 3, "../x": 4, "/y": 5, "f(1)": 6, "f[1]": 7, "a//c": 8}
    paths = as_paths(names)
    assert list(paths.values()) == list(names.values())
    assert not any(path.startswith(("/", "..")) or "//" in path for path in paths)


class Refusing(DummyLogger):
    """As MLflow's, where a value changed since the run that is resumed began."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Changing param values is not allowed")


def test_a_logger_that_refuses_them_does_not_end_the_run() -> None:
    run = trainer(1, logger=Refusing())
    with pytest.warns(
        UserWarning, match="Refusing did not take the hyper-parameters: Changing param"
    ):
        run.fit(federated(), blobs())
    assert run.current_epoch == 1


def test_the_run_folder_of_the_command_line_has_them_in_tensorboard(cli: Cli) -> None:
    fit = typed("fit -c base -c trainer/cpu --trainer.max_epochs 1 --model.participation 1")
    assert cli(*fit, "--trainer.default_root_dir", "x").returncode == 0
    told = of_tensorboard(cli.folder / "x")
    assert (
        told["learner"] == "ImageClassifier"
        and told["learner/network"] == "MLP"
        and told["data"] == "Digits"
    )
    events = EventAccumulator(str(cli.folder / "x"))
    events.Reload()
    content = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = HParamsPluginData.FromString(content).experiment
    first = {info.name for info in experiment.hparam_infos if info.differs}
    # what a reader asks
    assert first == {"method", "seed", "client_optimizer/lr", "data/partition", "participation"}
    (layout,) = events.Tensors("custom_scalars__config__")
    (category,) = Layout.FromString(layout.tensor_proto.string_val[0]).category
    patterns = {chart.title: list(chart.multiline.tag) for chart in category.chart}
    assert list(patterns) == ["accuracy", "loss", "divergence", "consensus", "communication, bytes"]
    logged = events.Tags()["scalars"]
    for title in set(patterns) - {"consensus"}:  # which nobody measures here
        assert any(re.match(pattern, tag) for pattern in patterns[title] for tag in logged), title
    assert "| learner | ImageClassifier (MLP), " in (cli.folder / "x/card.md").read_text()
