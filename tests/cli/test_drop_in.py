"""``FederatedCLI(MyLearner, MyDataModule)`` in place of LightningCLI."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedCLI, FederatedModule, UserError
from fl_lightning.callbacks import ControlVariates
from fl_lightning.datamodules import Digits, FromDataModule
from fl_lightning.machine.lightning import pl
from fl_lightning.models import MLP, Classifier

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Plain(pl.LightningDataModule):
    """Knows nothing about clients."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        x = torch.randn(40, features, generator=torch.Generator().manual_seed(0))
        self.train = TensorDataset(x, (x[:, 0] > 0).long())

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=5)

    def val_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=40)


class Linear(pl.LightningModule):
    def __init__(self, inputs: int, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(inputs, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return cross_entropy(self.layer(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", cross_entropy(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class Linked(FederatedCLI):
    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.link_arguments("data.features", "model.inputs")
        parser.add_argument("--greeting", default="none")


def parsed(*options: str, cli: Any = Linked, **arguments: Any) -> Any:
    """A CLI that has built everything and run nothing."""
    return cli(
        Linear,
        Plain,
        run=False,
        seed_everything_default=3,
        trainer_defaults={**QUIET, "max_epochs": 2},
        save_config_callback=None,
        args=["--split.num_clients=4", "--federated.participation=all", *options],
        **arguments,
    )


def test_it_trains_what_the_same_objects_train_in_python() -> None:
    options = ("--federated.local_epochs=2", "--method+=ControlVariates", "--data.features=5")
    cli = parsed(*options)
    # The link reached the learner.
    assert cli.learner.layer.in_features == 5
    cli.trainer.fit(cli.model, cli.datamodule)

    pl.seed_everything(3)
    module = FederatedModule(Linear(5), participation="all", local_epochs=2)
    data = FromDataModule(Plain(5), num_clients=4)
    trainer = pl.Trainer(max_epochs=2, callbacks=[ControlVariates()], **QUIET)
    trainer.fit(module, data)
    assert torch.equal(cli.model.global_vector, module.global_vector)
    # Its own options stand beside ours.
    assert parsed("--greeting=hello").config.greeting == "hello"


def test_fit_is_a_subcommand_and_its_config_runs_again(tmp_path: Path) -> None:
    def run(*args: str) -> Any:
        return Linked(
            Linear,
            Plain,
            trainer_defaults={**QUIET, "max_epochs": 1},
            save_config_kwargs={"overwrite": True},
            args=["fit", f"--trainer.default_root_dir={tmp_path}", *args],
        )

    first = run("--seed_everything=1", "--split.num_clients=4", "--federated.lr_decay=0.5")
    second = run(f"--config={tmp_path / 'config.yaml'}")
    assert "lr_decay: 0.5" in (tmp_path / "config.yaml").read_text()
    assert torch.equal(first.model.global_vector, second.model.global_vector)
    assert "val/loss" in second.trainer.callback_metrics


def test_each_client_has_an_optimizer_of_its_own() -> None:
    cli = parsed("--optimizer=SGD", "--optimizer.lr=0.05", "--optimizer.momentum=0.9")
    optimizers = [cli.model.settings.client_optimizer(cli.learner.parameters()) for _ in range(2)]
    assert optimizers[0] is not optimizers[1]
    for made in optimizers:
        assert type(made) is torch.optim.SGD
        assert (made.defaults["lr"], made.defaults["momentum"]) == (0.05, 0.9)


def test_data_that_has_clients_stay_as_they_are() -> None:
    args = [
        "--data.num_clients=7",
        "--model.num_classes=10",
        f"--model.network={MLP.__module__}.MLP",
        "--model.network.sizes=[64, 10]",
    ]
    cli = FederatedCLI(Classifier, Digits, run=False, trainer_defaults=QUIET, args=args)
    assert type(cli.datamodule) is Digits and cli.datamodule._wanted_clients == 7


REFUSED = [
    (
        "--optimizer=SGD --optimizer.lr=1 --lr_scheduler=ExponentialLR --lr_scheduler.gamma=0.9",
        "--lr_scheduler: .* --federated.lr_decay",
    ),
    ("--federated.participation=2.5", "participation"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(options: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parsed(*options.split())


@pytest.mark.slow
@pytest.mark.parametrize("debug", ["0", "1"])
def test_a_command_says_what_is_to_mend_in_one_paragraph(
    tmp_path: Path, python: str, debug: str
) -> None:
    program = tmp_path / "own.py"
    program.write_text(
        "from fl_lightning import FederatedCLI\n"
        "from fl_lightning.datamodules import Digits\n"
        "from fl_lightning.models import Classifier\n"
        "FederatedCLI(Classifier, Digits, save_config_callback=None)\n"
    )
    words = "fit --model.network=fl_lightning.models.MLP --model.network.sizes=[64,10]"
    words += " --model.num_classes=10 --federated.participation=2.5"
    command = [python, program, *words.split()]
    environment = {**os.environ, "FL_DEBUG": debug}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert "participation" in done.stderr
    assert ("own.py: " in done.stderr) == ("Traceback" not in done.stderr) == (debug == "0")
    assert done.returncode == (2 if debug == "0" else 1)
