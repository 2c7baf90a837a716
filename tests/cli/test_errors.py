"""What newcomers, and careless scripts, type and write: a command line → what is said of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.classes import method_class
from fl_lightning.lab.cli.compose import plain_yaml
from tests.helpers.commands import QUIET_FIT, done, said, snapshot, typed
from tests.helpers.zygote import Cli

FIT = (*QUIET_FIT, *typed("--trainer.max_epochs 1"))
OUT = ("--trainer.default_root_dir", "out")

OPTIONS: list[tuple[Any, ...]] = [  # what is typed, as one text or as words, and what is said of it
    ("--data.test_clients 5", "data.test_clients", "'5'", "a list", "or null"),
    ("--trainer.max_epoch 3", "--trainer.max_epoch", "`--trainer.max_epochs`"),
    ("--data.num_client 3", "data.num_client", "`--data.num_clients`", "batch_size"),
    ("--method FedInit", "method", "'FedInit'", "-c method/fedinit"),
    ("--method scafold", "method", "'scafold'", "-c method/scaffold"),
    ("--model.lerner.lr 0.1", "--model.lerner", "Did you mean `--model.learner`?"),
    ("--data.alpha 0.3", "data.alpha", "`--data.partition.alpha`, of DealtByShares, Dirichlet,"),
    ("--model.lr 0.3", "--model.lr", "`--model.learner.lr`, of"),
    ("--model.client_optimizer SDG", "model.client_optimizer", "'SDG'", "'SGD'", "Adam"),
    ("--model.learner my.Net", "model.learner", "'my.Net'", "No module named 'my'"),
    ("--model.learner collections.OrderedDict", "model.learner", "OrderedDict"),
    ("--data.num_clients many", "data.num_clients", "'many'", "an integer from 1"),
    ("--model.participation some", "participation", "some", "all"),
    ("--data.num_clients 2000", "num_clients", "2000", "1438"),
    ("--trainer.precision 16-mixed", "precision", "16-mixed"),
    ("--trainer.max_steps 5", "max_steps", "5"),
    ("--trainer.devices 2", "devices", "2", "federated"),
    ("--ckpt_path no.ckpt", "--ckpt_path", "no.ckpt", "last"),
    ("--method.beta 0.2", "--method.beta", "no method"),
    ("-c method/fedinit --method.beta abc", "method.beta", "'abc'", "a number"),
    ("-c method/fedinit --method.beta Exponential", "method.beta: Exponential needs gamma"),
    ("-c method/fedinit --method.betta 0.2", "--method.betta", "'beta'", "RelaxedInitialization"),
    ("-c method/sam --method+ GlobalSharpnessAwareMinimization --method.radius 1", "several meth"),
    ("--data.batch_size 0", "batch_size=0", "an integer from 1"),
    (("--data.partition={class_path: Dirichlet, init_args: {alpha: 0}}",), "alpha=0.0", "above 0"),
    (("--data.partition={class_path: Dirichlet, alpha: 0.1}",), "data.partition: alpha of Diri"),
    ("--data.partition Dirichlet", "Dirichlet needs alpha", "--data.partition.alpha"),
    ("--data.partition.classes 2", "data.partition.classes", "give the class of data.partition"),
    ("--model.learner.lr -1", "SGD", "learning rate: -1.0", "model.client_optimizer"),
    ("stray", "stray"),
    ("-x 3", "-x", "two hyphens"),
    ("--model.workers 1.5", "model.workers: 1.5", "an integer from 1, or 'auto'"),
    ("--seed_everything -1", "--seed_everything: -1", "0 to 4294967295"),
    ("--trainer.accelerator tpu", "torch_xla"),
    ("--trainer.strategy ddp_spawn", "--trainer.strategy ddp_spawn", "auto, federated"),
    ("--trainer.callbacks LearningRateFinder", "LearningRateFinder", "of the server"),
    (("--trainer.default_root_dir", "a" * 300), "--trainer.default_root_dir", "too long"),
    (("--trainer.default_root_dir", "a\x00b"), "--trainer.default_root_dir", "null byte"),
    ("--trainer.default_root_dir s3://b/run", "default_root_dir='s3://b/run'", "Mount the"),
    ("-c data/cifar1", "-c data/cifar1", "'data/cifar10'"),
    ("-c mine.Mine", "-c mine.Mine", "--method mine.Mine"),
    (("-c", "a" * 5000), "-c aaa", "neither a file"),
    ("--method [{", "--method", "not valid YAML"),
    ("-c method/fedprox --method.mu 2020-01-01", "--method.mu", "date", "quotes"),
    (("-c", "method/fedprox", "--method.mu", "!!set {a}"), "--method.mu", "set"),
    ("--model.init_from .", "init_from='.'", "it is not a file"),
    ("--model.init_from mine.yaml", "init_from='mine.yaml'", "cannot be loaded"),
    ("--model.lr_decay=1.1 --trainer.max_epochs=-1", "lr_decay=1.1", "max_epochs=-1"),
    ("--model.lr_decay Exponential --model.lr_decay.gamma=.nan", "gamma=nan", "finite"),
    ("-c data/mnist --data.root nowhere", "nowhere", "download"),
]


@pytest.mark.parametrize(("argv", "words"), [(argv, words) for argv, *words in OPTIONS])
def test_option(cli: Cli, argv: Any, words: list[str]) -> None:
    argv = typed(argv) if isinstance(argv, str) else argv
    said(cli(*FIT, *OUT, *argv), *words)
    assert os.listdir(cli.folder) == []


ImageFolder = "class_path: torchvision.datasets.ImageFolder, init_args: {root: /nope}"
ALIKE = "{class_path: ProximalTerm, init_args"
CONFIGS = [  # what a file holds, and what is said of it
    ("trainer: [1, 2", "mine.yaml", "line 1", "YAML"),
    ("trainer:\n  max_epochs: 3\n max_steps: 2\n", "mine.yaml", "line 3", "YAML"),
    ("- a\n- b\n", "mine.yaml", "mapping"),
    ("trainr: {max_epochs: 3}", "mine.yaml", "'trainr'", "'trainer'", "method"),
    ("method: [{class_path: RelaxedInitialisation}]", "'RelaxedInitialization'"),
    (f"method: [{ALIKE}: {{nu: 1}}}}]", "--method.nu: ProximalTerm has", "Accepted in method: mu"),
    (f"method: [{ALIKE}: {{mu: abc}}}}]", "method", "mu", "'abc'", "number"),
    ("method: [{class_path: collections.OrderedDict}]", "OrderedDict", "FederatedCallback"),
    ("method:\n- class_path: ProximalTerm\n  mu: 0.1", "mu of ProximalTerm", "init_args: {mu: …}"),
    ("method: [{class_path: ProximalTerm, init_arg: {mu: 1}}]", "Did you mean 'init_args'?"),
    ("data: {class_path: Digits, num_clients: 5}", "data: num_clients of Digits", "init_args"),
    ("trainer: {callbacks: [{class_path: EarlyStopping, monitor: x}]}", "monitor of EarlyStopping"),
    ("trainer: {max_epochs: 2020-01-01}", "mine.yaml", "date"),
    ("monitor: 2020-99-99", "mine.yaml", "month"),
    ("model: {local_epochs: 1, local_epochs: 2}", "line 1, column 26", "stands twice"),
    ("model:\n\tlocal_epochs: 1", "line 2, column 1", "YAML takes spaces"),
    ("model:\n   local_epochs: 1\n  participation: 1", "line 3, column 3", "indent it as the lin"),
    ("model: &a {learner: *a}", "mine.yaml", "Circular"),
    ("model: " + "[" * 3000 + "]" * 3000, "mine.yaml", "recursion"),
    ("trainer: {max_epochs: 1" + "0" * 5000 + "}", "mine.yaml", "digits"),
    ("trainer+: 3", "mine.yaml", "'trainer+'", "'trainer'"),
    ("data: {class_path: 3}", "mine.yaml", "class_path=3"),
    ("data: {class_path: Digits, init_args: [1]}", "mine.yaml", "init_args=[1]"),
    ("method: 3", "method: there is no class '3'"),
    (
        f"data: {{class_path: FromDatasets, init_args: {{train: {{{ImageFolder}}}}}}}\n"
        "model: {learner: {init_args: {num_classes: 2, network: {init_args: {sizes: [4, 2]}}}}}",
        "No such file or directory: '/nope'",
    ),
]


@pytest.mark.parametrize(("text", "words"), [(text, words) for text, *words in CONFIGS])
def test_config(cli: Cli, text: str, words: list[str]) -> None:
    (cli.folder / "mine.yaml").write_text(text)
    said(cli(*FIT, *OUT, "-c", "mine.yaml"), *words)
    assert os.listdir(cli.folder) == ["mine.yaml"]


@pytest.mark.parametrize("text", ["trainer:", "model:", "data: {class_path: Digits, init_args: }"])
def test_an_empty_section_is_none(cli: Cli, text: str) -> None:
    (cli.folder / "mine.yaml").write_text(text)
    (cli.folder / "base").mkdir()  # a directory is never a config
    done(cli(*FIT, "-c", "debug/tiny", "--trainer.fast_dev_run", "true", "-c", "mine.yaml"))


OWN = """
import pytorch_lightning as pl
from fl_lightning import FederatedCallback
from fl_lightning.models import Classifier

class Lossless(Classifier):
    def training_step(self, batch, batch_idx):
        return None

class ShortStep(FederatedCallback):
    def on_local_gradient(self, clients, gradient):
        return gradient[:, 1:]

class Plain(pl.LightningDataModule): ...
"""
OF_OWN = [
    ("--model.learner my_own.Lossless", "Lossless.training_step returned NoneType", "in round 0"),
    ("--method my_own.ShortStep", "ShortStep.on_local_gradient returned a tensor of shape"),
    ("--method my_own.ShortStp", "Did you mean 'ShortStep'?"),
    ("--data my_own.Plain", "--data FromDataModule --data.datamodule my_own.Plain"),
    ("--trainer.callbacks+ EarlyStopping --trainer.callbacks.monitor val/nothing", "val/nothing"),
    ("--trainer.callbacks+ ModelCheckpoint --trainer.callbacks.monitor val/nothing", "val/nothing"),
    ("--trainer.default_root_dir my_own.py/run", "my_own.py/run", "not a folder"),
]


@pytest.mark.parametrize(("argv", "words"), [(argv, words) for argv, *words in OF_OWN])
def test_what_is_wrong_with_a_user_s_own_class_is_one_paragraph(
    cli: Cli, argv: str, words: list[str]
) -> None:
    (cli.folder / "my_own.py").write_text(OWN)
    said(cli(*FIT, "-c", "data/digits", *typed(argv)), *words)


def test_a_misspelt_module_of_a_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="cannot be used: No module named 'a_mispelt_method'"):
        method_class("a_mispelt_method.SlowStep")


def test_commands_and_folders(cli: Cli) -> None:
    said(cli("fitt", "-c", "base"), "fitt", "'fit'", "validate")
    said(cli("test", "nowhere"), "nowhere", "config.yaml")
    raw = cli.folder / "corrupt" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (raw / f"{name}-ubyte").write_bytes(b"\x00\x00\x08")
    damaged = cli(*FIT, "-c", "data/mnist", "--data.root", "corrupt")
    said(damaged, "corrupt")
    assert os.listdir(cli.folder) == ["corrupt"]


@pytest.fixture(scope="module")
def a_run(zygote: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runner = Cli(zygote, tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("files"))
    done(runner(*FIT, "--trainer.default_root_dir", "x"))
    return runner.folder / "x"


def test_checkpoint(cli: Cli, a_run: Path) -> None:
    run = cli.folder / "x"
    shutil.copytree(a_run, run)
    before = snapshot(run)
    taken = cli(*FIT, "--trainer.default_root_dir", "x")
    said(taken, "--trainer.default_root_dir x", "Go on with it by fl-lightning fit x")
    other = ("--model.learner.network.sizes", "[64,32,10]")
    said(cli("fit", "x", "--trainer.max_epochs", 2, *other), "checkpoint", "64")
    assert snapshot(run) == before

    last = run / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    flipped = whole[:2000] + bytes([whole[2000] ^ 255]) + whole[2001:]
    for damaged in (b"", whole[: len(whole) // 2], flipped):
        last.write_bytes(damaged)
        for command in ("fit", "test", "export"):
            said(cli(command, "x"), "last.ckpt")
    last.unlink()
    said(cli("test", "x"), "last.ckpt", "--ckpt_path x/checkpoints/best.ckpt")
    (run / "checkpoints" / "best.ckpt").unlink()
    said(cli("test", "x"), "last.ckpt", "no such file")


def test_a_mapping_that_takes_in_another_may_itself_be_taken_in() -> None:
    text = "{of: [&a {x: 1, y: 2}, &b {<<: *a, x: 3}], and: {<<: [*a, *b], z: 5}}"
    read = plain_yaml(text, "here")
    assert read == {"of": [{"x": 1, "y": 2}, {"x": 3, "y": 2}], "and": {"x": 1, "y": 2, "z": 5}}
