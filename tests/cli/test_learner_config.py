"""What a checkpoint says of the learner: read back without importing what a forged file names."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.models import MLP, Classifier
from tests.helpers.commands import QUIET_FIT, done, said
from tests.helpers.zygote import Cli, Zygote

FIT = (*QUIET_FIT, *["--model.participation", "1", "--trainer.default_root_dir", "x"])
ONE = ("--trainer.max_epochs", 1)
LEARNER = """
import pathlib, torch, pytorch_lightning as pl
class Sized(pl.LightningModule):
    def __init__(self, hidden: int = 8, rates: tuple[float, float] = (0.1, 0.2)):
        super().__init__(); self.save_hyperparameters()
        layers = torch.nn.Linear(64, hidden), torch.nn.Linear(hidden, 10)
        self.net = torch.nn.Sequential(torch.nn.Flatten(), *layers)
    def training_step(self, batch, i):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), self.hparams.rates[0])
class Plain(Sized):
    def __init__(self, hidden: int = 8, lr: float = 0.1):
        super().__init__(hidden); self.lr = lr
class Saving(Sized):
    def on_save_checkpoint(self, checkpoint): checkpoint["special"] = pathlib.Path("somewhere")
    def on_load_checkpoint(self, checkpoint):
        print("special:", checkpoint["special"].name, flush=True)
"""


@pytest.fixture(scope="module")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runner = Cli(zygote, tmp_path_factory.mktemp("learners"), tmp_path_factory.mktemp("files"))
    done(runner(*FIT, *ONE))
    return runner.folder / "x"


def test_an_image_classifiers_checkpoint_needs_no_instantiator(finished: Path) -> None:
    path = finished / "checkpoints" / "best.ckpt"
    saved = torch.load(path, weights_only=True)
    assert not [key for key in saved["hyper_parameters"] if key.startswith("_")]
    learner = Classifier.load_from_checkpoint(path)
    assert isinstance(learner.network, MLP)
    assert all(torch.equal(v, saved["state_dict"][k]) for k, v in learner.state_dict().items())
    other = Classifier.load_from_checkpoint(path, network=learner.network, lr=0.5)
    assert other.network is learner.network and other.lr == 0.5


def test_a_forged_checkpoint_runs_no_file_of_the_current_folder(
    finished: Path, tmp_path: Path, python: str
) -> None:
    saved: dict[str, Any] = torch.load(finished / "checkpoints/best.ckpt", weights_only=True)
    network = {**saved["hyper_parameters"]["network"], "class_path": "evil.Network"}
    instantiator = {"_instantiator": "pytorch_lightning.cli.instantiate_module"}
    saved["hyper_parameters"] = {**instantiator, "network": network, "num_classes": 10}
    torch.save(saved, tmp_path / "x.ckpt")
    evil = "open('ran', 'w')\nfrom fl_lightning.models import MLP as Network\n"
    (tmp_path / "evil.py").write_text(evil)
    load = "import sys; sys.path.insert(0, '')\nfrom fl_lightning.models import Classifier\n"
    load += "Classifier.load_from_checkpoint('x.ckpt')"
    result = subprocess.run([python, "-c", load], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1 and not (tmp_path / "ran").exists(), result.stderr
    assert "evil.Network, a class that has not been imported" in result.stderr


@pytest.mark.parametrize("name, plain", [("Plain", True), ("Sized", False)])
def test_only_a_learner_with_objects_needs_the_instantiator(
    cli: Cli, python: str, name: str, plain: bool
) -> None:
    (cli.folder / "mine.py").write_text(LEARNER)
    learner = ("--model.learner", f"mine.{name}", "--model.learner.hidden", 5)
    done(cli(*FIT, *ONE, *learner))
    saved = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    # A tuple is no plain data: YAML has lists.
    assert ("_instantiator" not in saved["hyper_parameters"]) == plain
    assert saved["hyper_parameters"]["hidden"] == 5
    load = f"import mine; m = mine.{name}.load_from_checkpoint('x/checkpoints/last.ckpt')"
    load += "; print(m.net[1].out_features)"
    read = subprocess.run([python, "-c", load], cwd=cli.folder, capture_output=True, text=True)
    assert read.stdout.strip() == "5", read.stderr


def test_objects_in_a_checkpoint_are_read_at_the_command_line_where_asked(cli: Cli) -> None:
    (cli.folder / "mine.py").write_text(LEARNER)
    done(cli(*FIT, *ONE, "--model.learner", "mine.Saving"))
    said(cli("fit", "x", "--trainer.max_epochs", 2), "--weights_only false")
    more = ("--trainer.max_epochs", 2, "--weights_only", "false")
    done(cli("fit", "x", *more), "special: somewhere")
    assert "weights_only" not in (cli.folder / "x/config.yaml").read_text()
