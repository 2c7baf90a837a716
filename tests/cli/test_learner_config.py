"""What a checkpoint says of the learner: read back without importing what a forged file names."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.models import MLP, ImageClassifier
from tests.helpers.commands import typed
from tests.helpers.zygote import Cli, Zygote

FIT = typed(
    "fit -c base -c trainer/cpu --trainer.enable_progress_bar false", "--model.participation 1"
)
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
    result = runner(*FIT, "--trainer.default_root_dir", "x", "--trainer.max_epochs", 1)
    assert result.returncode == 0, result.stderr
    return runner.folder / "x"


def test_an_image_classifiers_checkpoint_needs_no_instantiator(finished: Path) -> None:
    path = finished / "checkpoints" / "best.ckpt"
    saved = torch.load(path, weights_only=True)
    assert not [key for key in saved["hyper_parameters"] if key.startswith("_")]
    learner = ImageClassifier.load_from_checkpoint(path)
    assert isinstance(learner.network, MLP)
    assert all(torch.equal(v, saved["state_dict"][k]) for k, v in learner.state_dict().items())
    other = ImageClassifier.load_from_checkpoint(path, network=learner.network, lr=0.5)
    assert other.network is learner.network and other.lr == 0.5


def forged(path: Path, of: Path, class_path: str) -> Path:
    saved: dict[str, Any] = torch.load(of, weights_only=True)
    saved["hyper_parameters"] = {
        "_instantiator": "pytorch_lightning.cli.instantiate_module",
        "network": {
            "class_path": class_path,
            "init_args": dict(saved["hyper_parameters"]["network"]["init_args"]),
        },
        "num_classes": 10,
    }
    torch.save(saved, path)
    return path


def test_a_forged_checkpoint_runs_no_file_of_the_current_folder(
    finished: Path, tmp_path: Path, python: str
) -> None:
    forged(tmp_path / "x.ckpt", finished / "checkpoints/best.ckpt", "evil.Network")
    (tmp_path / "evil.py").write_text(
        "open('ran', 'w')\nfrom fl_lightning.models import MLP as Network\n"
    )
    load = "import sys; sys.path.insert(0, '')\nfrom fl_lightning.models import ImageClassifier\n"
    load += "ImageClassifier.load_from_checkpoint('x.ckpt')"
    result = subprocess.run([python, "-c", load], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1 and not (tmp_path / "ran").exists(), result.stderr
    assert "evil.Network, a class that has not been imported" in result.stderr


def test_a_checkpoint_of_before_loads_as_it_did(finished: Path, tmp_path: Path) -> None:
    path = forged(
        tmp_path / "old.ckpt", finished / "checkpoints/best.ckpt", "fl_lightning.models.MLP"
    )
    assert isinstance(ImageClassifier.load_from_checkpoint(path).network, MLP)


@pytest.mark.parametrize("name, plain", [("Plain", True), ("Sized", False)])
def test_only_a_learner_with_objects_needs_the_instantiator(
    cli: Cli, python: str, name: str, plain: bool
) -> None:
    (cli.folder / "mine.py").write_text(LEARNER)
    learner = ("--model.learner", f"mine.{name}", "--model.learner.hidden", 5)
    result = cli(*FIT, *learner, "--trainer.default_root_dir", "x", "--trainer.max_epochs", 1)
    assert result.returncode == 0, result.stderr
    saved = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)[
        "hyper_parameters"
    ]
    # a tuple is no plain data: YAML has lists
    assert ("_instantiator" not in saved) == plain and saved["hidden"] == 5
    load = (
        f"import mine; m = mine.{name}.load_from_checkpoint('x/checkpoints/last.ckpt'); "
        "print(m.net[1].out_features)"
    )
    result_ = subprocess.run([python, "-c", load], cwd=cli.folder, capture_output=True, text=True)
    assert result_.stdout.strip() == "5", result_.stderr


def test_objects_in_a_checkpoint_are_read_at_the_command_line_where_asked(cli: Cli) -> None:
    (cli.folder / "mine.py").write_text(LEARNER)
    run = ("--trainer.default_root_dir", "x", "--trainer.max_epochs", 1)
    assert cli(*FIT, "--model.learner", "mine.Saving", *run).returncode == 0
    result = cli("fit", "x", "--trainer.max_epochs", 2)
    assert result.returncode == 2 and "--weights_only false" in result.stderr
    result = cli("fit", "x", "--trainer.max_epochs", 2, "--weights_only", "false")
    assert result.returncode == 0 and "special: somewhere" in result.stdout, result.stderr
    assert "weights_only" not in (cli.folder / "x/config.yaml").read_text()
    assert cli("export", "x", "-o", "model.pt").returncode == 0
    exported = torch.load(cli.folder / "model.pt", weights_only=False)
    assert (
        exported["special"] == Path("somewhere")
        and "federated" not in exported
        and "loops" not in exported
    )
