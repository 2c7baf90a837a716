"""Every mistake of issue's list, and what nobody should type or write.

Each ends, before training, in one paragraph that names option, value and what is accepted. Nothing
is written.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.errors import UserError
from fl_lightning.lab.cli.classes import method_class
from fl_lightning.lab.cli.compose import plain_yaml
from tests.helpers.commands import typed
from tests.helpers.zygote import Cli, Result

FIT = typed(
    "fit -c base -c trainer/cpu --trainer.max_epochs 1", "--trainer.enable_progress_bar false"
)


def said(result: Result, *words: str) -> None:
    """Status 2, and one paragraph of at most 6 lines of 100 characters with all ``words`` in it."""
    assert result.returncode == 2, result.stdout + result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("fl-lightning: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr and "usage:" not in result.stderr, (
        result.stderr
    )
    assert len(lines[0]) <= 600, lines[0]
    for word in words:
        assert word in lines[0], f"{word!r} is not in: {lines[0]}"


OPTIONS: list[tuple[Any, ...]] = [  # what is typed, as one text or as words, and what is said of it
    ("--data.test_clients 5", "data.test_clients", "'5'", "a list", "or null"),
    ("--data.biases 5", "data.biases", "'5'", "a list"),
    ("--trainer.max_epoch 3", "--trainer.max_epoch", "`--trainer.max_epochs`"),
    ("--data.num_client 3", "data.num_client", "`--data.num_clients`", "batch_size"),
    ("--model.learner.num_clases 3", "model.learner.num_clases", ".num_classes`"),
    ("--data Digitz", "data", "'Digitz'", "'Digits'", "CIFAR10"),
    ("--data.partition Dirichle", "data.partition", "'Dirichlet'", "Pathological"),
    ("--method FedInit", "method", "'FedInit'", "-c method/fedinit"),
    ("--method scafold", "method", "'scafold'", "Did you mean -c method/scaffold?"),
    (
        "--data.partiton.alpha 0.1",
        "data.partiton.alpha",
        "Did you mean `--data.partition.alpha`?",
        "batch_size",
    ),
    (
        "--model.learner.netwrk.sizes [64]",
        "model.learner.netwrk.sizes",
        "Did you mean `--model.learner.network.sizes`?",
    ),
    ("--model.lerner.lr 0.1", "--model.lerner.lr", "Did you mean `--model.learner.lr`?"),
    (
        "--data.alpha 0.3",
        "data.alpha",
        "`--data.partition.alpha`, of Dirichlet, DirichletByClass,",
        "batch_size",
    ),
    ("--model.lr 0.3", "--model.lr", "`--model.learner.lr`, of"),
    ("--model.client_optimizer SDG", "model.client_optimizer", "'SDG'", "'SGD'", "Adam"),
    ("--model.learner my.Net", "model.learner", "'my.Net'", "No module named 'my'"),
    ("--trainer.callbacks EarlyStoping", "trainer.callbacks", "'EarlyStopping'"),
    ("--model.learner collections.OrderedDict", "model.learner", "OrderedDict"),
    ("--model.local_epochs many", "model.local_epochs", "'many'", "a number"),
    ("--data.num_clients many", "data.num_clients", "'many'", "an integer from 1"),
    ("--model.participation some", "participation", "some", "all"),
    ("--data.num_clients 2000", "num_clients", "2000", "1438"),
    ("--trainer.strategy federate", "federate"),
    ("--trainer.precision 16-mixed", "precision", "16-mixed"),
    ("--trainer.precision bf16-true", "precision", "bf16-mixed"),
    ("--trainer.max_steps 5", "max_steps", "5"),
    (
        "--trainer.limit_val_batches {r:4,target_modules:[query]}",
        "lacks a blank",
        "'{r: 4,target_modules: [query]}'",
    ),
    ("--trainer.devices 2", "devices", "2", "federated"),
    ("--ckpt_path no.ckpt", "--ckpt_path", "no.ckpt", "last"),
    ("--method.beta", "--method.beta"),
    ("--data.batch_size 0", "batch_size=0", "an integer from 1"),
    (("--data.partition={class_path: Dirichlet, init_args: {alpha: 0}}",), "alpha=0.0", "above 0"),
    (
        ("--data.partition={class_path: Dirichlet, alpha: 0.1}",),
        "data.partition: alpha of Dirichlet",
        "init_args: {alpha: …}",
    ),
    (
        "--data.partition Dirichlet",
        "data.partition: Dirichlet needs alpha",
        "--data.partition.alpha",
    ),
    ("--model.participation true", "participation", "true", "fraction"),
    ("--model.learner.lr -1", "SGD", "learning rate: -1.0", "model.client_optimizer"),
    ("stray", "stray"),
    ("--model.workers 1.5", "model.workers: '1.5'", "an integer from 1, or 'auto'"),
    ("--model.workers many", "model.workers: 'many'", "an integer from 1, or 'auto'"),
    ("--seed_everything -1", "--seed_everything -1", "0 to 4294967295"),
    ("--seed_everything 4294967296", "--seed_everything 4294967296", "0 to 4294967295"),
    ("--trainer.check_val_every_n_epoch 0", "check_val_every_n_epoch=0", "limit_val_batches"),
    ("--trainer.check_val_every_n_epoch -1", "check_val_every_n_epoch=-1", "from 1"),
    ("--trainer.accelerator tpu", "accelerator tpu", "torch_xla"),
    ("--trainer.precision transformer-engine", "precision transformer-engine", "install"),
    ("--trainer.strategy ddp_notebook", "--trainer.strategy ddp_notebook", "auto, federated"),
    ("--trainer.strategy ddp_spawn", "--trainer.strategy ddp_spawn", "auto, federated"),
    ("--trainer.callbacks BackboneFinetuning", "BackboneFinetuning", "unfreezes"),
    ("--trainer.callbacks LearningRateFinder", "LearningRateFinder", "of the server"),
    ("--trainer.callbacks BatchSizeFinder", "BatchSizeFinder", "data.batch_size"),
    ("--trainer.callbacks RichProgressBar", "RichProgressBar"),
    (("--trainer.default_root_dir", "a" * 300), "--trainer.default_root_dir", "too long"),
    (("--trainer.default_root_dir", "/".join(["b" * 200] * 30)), "default_root_dir", "too long"),
    (("--trainer.default_root_dir", "a\x00b"), "--trainer.default_root_dir", "zero byte"),
    (("--trainer.default_root_dir", "\udc80"), "--trainer.default_root_dir", "no text"),
    ("--trainer.default_root_dir s3://b/run", "default_root_dir='s3://b/run'", "Mount the"),
    ("-c data.digits", "-c data.digits", "Did you mean data/digits?"),
    ("-c mine.Mine", "-c mine.Mine", "--method mine.Mine"),
    (("-c", "a" * 5000), "-c aaa", "neither a file"),
    (("--ckpt_path", "a" * 5000), "--ckpt_path aaa", "no such file"),
    ("--method [{", "--method", "not valid YAML"),
    ("-c method/fedprox --method.mu [1", "--method.mu", "not valid YAML"),
    ("-c method/fedprox --method.mu 2020-01-01", "--method.mu", "date", "quotes"),
    (("-c", "method/fedprox", "--method.mu", "!!set {a}"), "--method.mu", "set"),
    ("--data.batch_size 111111111111111111111111", "--data.batch_size 111", "63 bits"),
    ("-c method/ifca --method.k 111111111111111111111111", "--method.0.k 111", "63 bits"),
    ("--trainer.devices 111111111111111111111111", "--trainer.devices 111", "63 bits"),
    ("--model.init_from .", "init_from='.'", "is a folder"),
    ("--model.init_from mine.yaml", "init_from='mine.yaml'", "cannot be loaded"),
    ("--model.participation [1", "--model.participation", "not valid YAML"),
    # Rates that no run can use.
    ("--model.lr_decay -0.5", "lr_decay=-0.5", "above 0"),
    ("--model.lr_decay 0", "lr_decay=0", "above 0"),
    ("--model.server_lr_decay .nan", "server_lr_decay=nan", "above 0"),
    ("--model.server_lr_decay=.inf", "server_lr_decay=inf", "above 0"),
    (
        "--trainer.max_epochs 2 --model.server_lr_decay 1e308",
        "server_lr_decay=1e+308",
        "larger than any",
    ),
    ("--model.lr_decay=1.1 --trainer.max_epochs=1000", "lr_decay=1.1", "1000 rounds"),
    ("--model.lr_decay=1.1 --trainer.max_epochs=-1", "lr_decay=1.1", "max_epochs=-1"),
    ("--model.lr_decay Exponential --model.lr_decay.gamma=.nan", "gamma=nan", "finite"),
    (
        "--trainer.max_epochs 2 --model.lr_decay Exponential --model.lr_decay.gamma=-0.5",
        "gives -0.5 in round 1",
    ),
    (
        "--trainer.max_epochs 2 --model.lr_decay=Cosine --model.lr_decay.rounds=1 "
        "--model.lr_decay.end=-1",
        "Cosine",
        "gives -1",
    ),
    (
        (
            "--trainer.max_epochs=2",
            "--model.server_lr_decay={class_path: Steps, init_args: {values: {1: -3}}}",
        ),
        "Steps",
        "gives -3.0",
    ),
    ("--model.server_optimizer=FedAdam --model.server_optimizer.lr=.inf", "FedAdam: lr=inf"),
    ("--model.learner.lr .nan", "lr=nan", "finite"),
]


@pytest.mark.parametrize(("argv", "words"), [(argv, words) for argv, *words in OPTIONS])
def test_option(cli: Cli, argv: Any, words: list[str]) -> None:
    argv = typed(argv) if isinstance(argv, str) else argv
    said(cli(*FIT, "--trainer.default_root_dir=out", *argv), *words)
    assert os.listdir(cli.folder) == []


def test_unknown_config_and_command(cli: Cli) -> None:
    said(cli("fit", "-c", "bas"), "-c bas", "'base'")
    said(cli("fit", "-c", "data/cifar1"), "-c data/cifar1", "'data/cifar10'")
    (cli.folder / "base").mkdir()
    assert cli(*FIT, "--trainer.fast_dev_run", "true").returncode == 0, (
        "a directory is never a config"
    )
    (cli.folder / "mine").mkdir()
    said(cli("fit", "-c", "mine"), "-c mine", "a folder")
    said(cli("fitt", "-c", "base"), "fitt", "'fit'", "validate")
    said(cli("test", "nowhere"), "nowhere", "config.yaml")


FOLDER = "{class_path: torchvision.datasets.ImageFolder, init_args: {root: /nope%s}}"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (f"train: {FOLDER % ''}", ["data.train.root: there is no file or folder '/nope'"]),
        (f"clients: [{FOLDER % '/a'}]", ["data.clients[0].root: there is no", "'/nope/a'"]),
        ("clients: my_data.split", ["'my_data.split'", "clients: [{class_path: my_data.split"]),
    ],
)
def test_data_sets_that_are_not_there_are_named_with_their_option(
    cli: Cli, given: str, words: list[str]
) -> None:
    arguments = f"{given}, num_clients: 2" if given.startswith("train") else given
    text = f"data: {{class_path: FromDatasets, init_args: {{{arguments}}}}}"
    (cli.folder / "mine.yaml").write_text(text, "utf-8")
    said(cli(*FIT, "-c", "mine.yaml"), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("trainer: [1, 2", ["mine.yaml", "line 1", "YAML"]),
        ("trainer:\n  max_epochs: 3\n max_steps: 2\n", ["mine.yaml", "line 3", "YAML"]),
        ("- a\n- b\n", ["mine.yaml", "mapping", "trainer"]),
        ("trainr: {max_epochs: 3}", ["mine.yaml", "'trainr'", "'trainer'", "method"]),
        ("trainer: {max_epoch: 3}", ["trainer.max_epoch", "`--trainer.max_epochs`"]),
        ("model: {participationn: 3}", ["model.participationn", "`--model.participation`"]),
        ("data: {class_path: Digts}", ["data", "'Digts'", "'Digits'"]),
        ("data: {init_args: {num_clientz: 3}}", ["data.num_clientz", "`--data.num_clients`"]),
        (
            "method: [{class_path: RelaxedInitialisation}]",
            ["RelaxedInitialisation", "'RelaxedInitialization'"],
        ),
        (
            "method: [{class_path: RelaxedInitialization, init_args: {betta: 1}}]",
            ["method.betta", "'beta'"],
        ),
        (
            "method: [{class_path: RelaxedInitialization, init_args: {beta: abc}}]",
            ["method", "beta", "'abc'", "number"],
        ),
        ("method: [{class_path: collections.OrderedDict}]", ["OrderedDict", "FederatedCallback"]),
        (
            "method:\n- class_path: ProximalTerm\n  mu: 0.1",
            ["method: mu of ProximalTerm", "init_args: {mu: …}"],
        ),
        (
            "method:\n- class_path: ProximalTerm\n  init_args:\n  mu: 0.1",
            ["method: mu of ProximalTerm", "init_args: {mu: …}"],
        ),
        (
            "method: [{class_path: ProximalTerm, init_arg: {mu: 0.1}}]",
            ["method: 'init_arg'", "Did you mean 'init_args'?"],
        ),
        (
            "data: {class_path: Digits, num_clients: 5}",
            ["data: num_clients of Digits", "init_args"],
        ),
        (
            "data: {init_args: {partition: {class_path: Dirichlet, alpha: 0.1}}}",
            ["data.partition: alpha of Dirichlet", "init_args"],
        ),
        (
            "model: {learner: {class_path: ImageClassifier, num_classes: 10}}",
            ["model.learner: num_classes of ImageClassifier", "init_args"],
        ),
        (
            "trainer: {callbacks: [{class_path: EarlyStopping, monitor: val/acc}]}",
            ["trainer.callbacks: monitor of EarlyStopping", "init_args"],
        ),
    ],
)
def test_config(cli: Cli, text: str, words: list[str]) -> None:
    (cli.folder / "mine.yaml").write_text(text)
    said(cli(*FIT, "-c", "mine.yaml"), *words)
    assert os.listdir(cli.folder) == ["mine.yaml"]


ODD_CONFIGS = [
    ("trainer: {max_epochs: !!binary aGVsbG8=}", "mine.yaml: trainer.max_epochs", "bytes"),
    ("model: {participation: !!set {a, b}}", "mine.yaml: model.participation", "set"),
    ("trainer: {max_epochs: 2020-01-01}", "mine.yaml: trainer.max_epochs", "date '2020-01-01'"),
    ("monitor: 2020-99-99", "mine.yaml", "not valid YAML: month"),
    (
        "model: {participation: 0.5}\nmodel: {local_epochs: 2}",
        "mine.yaml, line 2, column 1",
        "the key 'model' stands twice",
    ),
    (
        "model: {local_epochs: 1, local_epochs: 2}",
        "mine.yaml, line 1, column 26",
        "the key 'local_epochs' stands twice",
    ),
    ("model:\n\tlocal_epochs: 1", "line 2, column 1", "YAML takes spaces"),
    (
        "model:\n   local_epochs: 1\n  participation: 1",
        "line 3, column 3",
        "indent it as the lines",
    ),
    ("monitor: x\n  monitor_mode: max", "line 2, column 15", "keys their indentation"),
    ("model: &a {learner: *a}", "mine.yaml: model.learner", "contains itself"),
    ("method: &a [*a]", "mine.yaml: method", "contains itself"),
    ("model: " + "[" * 3000 + "]" * 3000, "mine.yaml", "nested too deeply"),
    ("model: " + "{a: " * 60 + "1" + "}" * 60, "mine.yaml", "more than 50 deep"),
    ("trainer: {max_epochs: 1" + "0" * 5000 + "}", "mine.yaml", "digits"),
    ("trainer: [1]", "mine.yaml: trainer is list", "mapping"),
    ("trainer: 3", "mine.yaml: trainer is int", "mapping"),
    ("model: [1]", "mine.yaml: model is list", "mapping"),
    ("trainer+: 3", "mine.yaml: trainer+", "Accepted: trainer"),
    ("data: {class_path: 3}", "mine.yaml: data", "class_path '3'"),
    ("data: {class_path: }", "mine.yaml: data", "class_path 'None'"),
    ("data: {class_path: Digits, init_args: [1]}", "mine.yaml: data", "init_args '[1]'"),
    ("method: 3", "method: '3' names no class", "ProximalTerm"),
    ("method: [[a]]", "method: \"['a']\" names no class", "ProximalTerm"),
]


@pytest.mark.parametrize(("text", "words"), [(text, words) for text, *words in ODD_CONFIGS])
def test_config_that_nobody_should_write(cli: Cli, text: str, words: list[str]) -> None:
    (cli.folder / "mine.yaml").write_text(text)
    said(cli(*FIT, "--trainer.default_root_dir=out", "-c", "mine.yaml"), *words)
    assert os.listdir(cli.folder) == ["mine.yaml"]


def test_method_options(cli: Cli) -> None:
    fit = (*FIT, "-c", "method/fedinit")
    said(cli(*fit, "--method.beta", "abc"), "method.beta", "'abc'", "a number")
    said(
        cli(*fit, "--method.beta", "Exponential"),
        "method.beta: Exponential needs gamma",
        "--method.beta.gamma",
    )
    said(cli(*fit, "--method.betta", "0.2"), "--method.betta", "'beta'", "RelaxedInitialization")
    said(cli(*FIT, "--method.beta", "0.2"), "--method.beta", "no method")
    both = cli(
        *FIT, "--method", "[RelaxedInitialization, RelaxedInitialization]", "--method.beta", "0.2"
    )
    said(both, "--method.beta", "RelaxedInitialization and RelaxedInitialization")


def test_a_method_of_one_s_own_that_is_misspelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    program = "from fl_lightning import FederatedCallback\nclass SlowStep(FederatedCallback): ..."
    (tmp_path / "a_misspelt_method.py").write_text(program)
    with pytest.raises(UserError, match="Did you mean 'SlowStep'") as refused:
        method_class("a_misspelt_method.SlowStp")
    assert "Logger" not in str(refused.value) and len(str(refused.value)) <= 600
    with pytest.raises(UserError, match=r"my_module.MyClass of a file my_module.py here"):
        method_class("a_mispelt_method.SlowStep")


OWN = """
from fl_lightning import FederatedCallback
from fl_lightning.models import MLP, ImageClassifier


class Lossless(ImageClassifier):
    def training_step(self, batch, batch_idx):
        return None


class Short(FederatedCallback):
    def on_local_gradient(self, clients, gradient):
        return gradient[:, 1:]
"""


def test_what_a_user_s_step_or_hook_returns_wrongly_is_one_paragraph(cli: Cli) -> None:
    (cli.folder / "my_own.py").write_text(OWN)
    fit = (*FIT, "-c", "data/digits")
    step = cli(*fit, "--model.learner", "my_own.Lossless")
    said(step, "Lossless.training_step returned NoneType", "in round 0, client 0, local step 0")
    hook = cli(*fit, "--method", "my_own.Short")
    said(hook, "Short.on_local_gradient returned a tensor of shape", "in round 0, client 0")


@pytest.mark.parametrize("callback", ["EarlyStopping", "ModelCheckpoint"])
def test_a_monitor_that_no_metric_has_is_one_paragraph(cli: Cli, callback: str) -> None:
    watched = ("--trainer.callbacks+", callback, "--trainer.callbacks.monitor", "val/nothing")
    said(cli(*FIT, "-c", "data/digits", *watched), callback[:5], "val/nothing")


def test_a_plain_data_module_is_refused_with_the_line_that_wraps_it(cli: Cli) -> None:
    (cli.folder / "my_data.py").write_text(
        "import pytorch_lightning as pl\nclass Plain(pl.LightningDataModule): ...\n"
    )
    line = "--data FromDataModule --data.datamodule my_data.Plain"
    said(cli(*FIT, "--data", "my_data.Plain"), "my_data.Plain", line)


def test_data_files(cli: Cli) -> None:
    said(cli(*FIT, "-c", "data/mnist", "--data.root", "nowhere"), "nowhere", "download")
    raw = cli.folder / "corrupt" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (raw / f"{part}-{kind}-ubyte").write_bytes(b"\x00\x00\x08")
    said(
        cli(*FIT, "-c", "data/mnist", "--data.root", "corrupt"),
        "corrupt",
        "train-images-idx3-ubyte",
    )
    assert os.listdir(cli.folder) == ["corrupt"]


def test_folder(cli: Cli) -> None:
    (cli.folder / "file").write_text("")
    said(
        cli(*FIT, "--trainer.default_root_dir", "file/run"),
        "--trainer.default_root_dir",
        "file/run",
        "not a folder",
    )
    if os.geteuid() != 0:
        (cli.folder / "locked").mkdir(mode=0o500)
        said(cli(*FIT, "--trainer.default_root_dir", "locked/run"), "locked/run", "not writable")


@pytest.fixture(scope="module")
def a_run(zygote: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runner = Cli(zygote, tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("files"))
    result = runner(*FIT, "--trainer.default_root_dir", "x")
    assert result.returncode == 0, result.stderr
    return runner.folder / "x"


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def test_checkpoint(cli: Cli, a_run: Path) -> None:
    run = cli.folder / "x"
    shutil.copytree(a_run, run)
    before = snapshot(run)
    said(
        cli(*FIT, "--trainer.default_root_dir", "x"),
        "--trainer.default_root_dir x",
        "Go on with it by fl-lightning fit x",
        "new run with these settings: --trainer.default_root_dir DIR",
    )
    said(
        cli("fit", "x", "--trainer.max_epochs", 2, "--model.learner.network.sizes", "[64,32,10]"),
        "checkpoint",
        "64",
    )
    assert snapshot(run) == before

    last = run / "checkpoints" / "last.ckpt"
    whole = last.read_bytes()
    for damaged in (
        b"",
        whole[: len(whole) // 2],
        whole[:2000] + bytes([whole[2000] ^ 255]) + whole[2001:],
    ):
        last.write_bytes(damaged)
        for command in ("fit", "test", "export"):
            said(cli(command, "x"), "last.ckpt")
    last.unlink()
    said(cli("test", "x"), "last.ckpt", "--ckpt_path x/checkpoints/best.ckpt")
    (run / "checkpoints" / "best.ckpt").unlink()
    said(cli("test", "x"), "last.ckpt", "no checkpoint")


@pytest.mark.parametrize("text", ["trainer:", "model:", "data: {class_path: Digits, init_args: }"])
def test_an_empty_section_is_none(cli: Cli, text: str) -> None:
    (cli.folder / "mine.yaml").write_text(text)
    assert (
        cli(
            *FIT, "-c", "debug/tiny", "--trainer.fast_dev_run", "true", "-c", "mine.yaml"
        ).returncode
        == 0
    )


def test_the_defaults_of_lightning_s_timer_go_into_the_config_and_back(cli: Cli) -> None:
    result = cli(
        *FIT, "-c", "debug/tiny", "--trainer.default_root_dir", "x", "--trainer.callbacks", "Timer"
    )
    assert result.returncode == 0, result.stderr
    assert "interval: step" in (cli.folder / "x/config.yaml").read_text()
    result = cli("fit", "x", "--trainer.max_epochs", 2)
    assert result.returncode == 0, result.stderr


def test_a_mapping_that_takes_in_another_may_itself_be_taken_in() -> None:
    text = """
    first: {of: [&a {x: 1, y: 2}, &b {<<: *a, x: 3}]}
    second: [{<<: *b, x: 4}, {<<: [*a, *b], z: 5}]
    """
    read = plain_yaml(text, "here")
    assert read["first"] == {"of": [{"x": 1, "y": 2}, {"x": 3, "y": 2}]}
    assert read["second"] == [{"x": 4, "y": 2}, {"x": 1, "y": 2, "z": 5}]
