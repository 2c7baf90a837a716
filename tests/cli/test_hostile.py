"""Command lines and files that nobody should write: each ends in its paragraph, before training.

No folder is left.
"""

from __future__ import annotations

import os

import pytest

from fl_lightning.lab.cli.compose import plain_yaml
from tests.helpers.commands import typed
from tests.helpers.zygote import Cli, Result

FIT = typed("fit -c base -c trainer/cpu -c debug/tiny --trainer.enable_progress_bar false")
FOLDER = ("--trainer.default_root_dir", "x")


def said(cli: Cli, result: Result, *words: str) -> None:
    """Status 2, one line with all ``words`` in it, and nothing new in the folder."""
    assert result.returncode == 2 and "Traceback" not in result.stderr, (
        result.stdout + result.stderr
    )
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("fl-lightning: ")]
    assert len(line) <= 600, line
    for word in words:
        assert word in line, f"{word!r} is not in: {line}"
    assert set(os.listdir(cli.folder)) <= {"mine.yaml"}


OPTIONS = {
    "a negative seed": (("--seed_everything", "-1"), "--seed_everything -1", "0 to 4294967295"),
    "a seed of 33 bits": (
        ("--seed_everything", 2**32),
        "--seed_everything 4294967296",
        "0 to 4294967295",
    ),
    "no validation ever": (
        ("--trainer.check_val_every_n_epoch", 0),
        "check_val_every_n_epoch=0",
        "limit_val_batches",
    ),
    "validation before": (
        ("--trainer.check_val_every_n_epoch", -1),
        "check_val_every_n_epoch=-1",
        "from 1",
    ),
    "a TPU": (("--trainer.accelerator", "tpu"), "accelerator tpu", "torch_xla"),
    "transformer-engine": (
        ("--trainer.precision", "transformer-engine"),
        "precision transformer-engine",
        "install",
    ),
    "ddp_notebook": (
        ("--trainer.strategy", "ddp_notebook"),
        "--trainer.strategy ddp_notebook",
        "auto, federated",
    ),
    "ddp_spawn": (
        ("--trainer.strategy", "ddp_spawn"),
        "--trainer.strategy ddp_spawn",
        "auto, federated",
    ),
    "BackboneFinetuning": (
        ("--trainer.callbacks", "BackboneFinetuning"),
        "BackboneFinetuning",
        "unfreezes",
    ),
    "LearningRateFinder": (
        ("--trainer.callbacks", "LearningRateFinder"),
        "LearningRateFinder",
        "of the server",
    ),
    "BatchSizeFinder": (
        ("--trainer.callbacks", "BatchSizeFinder"),
        "BatchSizeFinder",
        "data.batch_size",
    ),
    "RichProgressBar": (("--trainer.callbacks", "RichProgressBar"), "RichProgressBar"),
    "a long folder": (
        ("--trainer.default_root_dir", "a" * 300),
        "--trainer.default_root_dir",
        "too long",
    ),
    "a long path": (
        ("--trainer.default_root_dir", "/".join(["b" * 200] * 30)),
        "default_root_dir",
        "too long",
    ),
    "a zero byte": (
        ("--trainer.default_root_dir", "a\0b"),
        "--trainer.default_root_dir",
        "zero byte",
    ),
    "no text": (("--trainer.default_root_dir", "\udc80"), "--trainer.default_root_dir", "no text"),
    "a point for a slash": (("-c", "data.digits"), "-c data.digits", "Did you mean data/digits?"),
    "a class for a config": (("-c", "mine.Mine"), "-c mine.Mine", "--method mine.Mine"),
    "a long config": (("-c", "a" * 5000), "-c aaa", "neither a file"),
    "a long checkpoint": (("--ckpt_path", "a" * 5000), "--ckpt_path aaa", "no such file"),
    "an open bracket": (("--method", "[{"), "--method", "not valid YAML"),
    "an open list": (
        ("-c", "method/fedprox", "--method.mu", "[1"),
        "--method.mu",
        "not valid YAML",
    ),
    "a date": (
        ("-c", "method/fedprox", "--method.mu", "2020-01-01"),
        "--method.mu",
        "date",
        "quotes",
    ),
    "a set": (("-c", "method/fedprox", "--method.mu", "!!set {a}"), "--method.mu", "set"),
    "a batch size of 24 digits": (
        ("--data.batch_size", "1" * 24),
        "--data.batch_size 111",
        "63 bits",
    ),
    "a method's argument of 24 digits": (
        ("-c", "method/ifca", "--method.k", "1" * 24),
        "--method.0.k 111",
        "63 bits",
    ),
    "devices of 24 digits": (("--trainer.devices", "1" * 24), "trainer:", "cannot fit"),
    "weights that are a folder": (("--model.init_from", "."), "init_from='.'", "is a folder"),
    "weights that are none": (
        ("--model.init_from", "mine.yaml"),
        "init_from='mine.yaml'",
        "cannot be loaded",
    ),
    "a participation that is open": (
        ("--model.participation", "[1"),
        "--model.participation",
        "not valid YAML",
    ),
}

CONFIGS = {
    "binary": (
        "trainer: {max_epochs: !!binary aGVsbG8=}",
        "mine.yaml: trainer.max_epochs",
        "bytes",
    ),
    "a set": ("model: {participation: !!set {a, b}}", "mine.yaml: model.participation", "set"),
    "a date": (
        "trainer: {max_epochs: 2020-01-01}",
        "mine.yaml: trainer.max_epochs",
        "date '2020-01-01'",
    ),
    "no date": ("monitor: 2020-99-99", "mine.yaml", "not valid YAML: month"),
    "a key twice": (
        "model: {participation: 0.5}\nmodel: {local_epochs: 2}",
        "mine.yaml, line 2, column 1",
        "the key 'model' stands twice",
    ),
    "an argument twice": (
        "model: {local_epochs: 1, local_epochs: 2}",
        "mine.yaml, line 1, column 26",
        "the key 'local_epochs' stands twice",
    ),
    "a tab": ("model:\n\tlocal_epochs: 1", "line 2, column 1", "YAML takes spaces"),
    "a line too far left": (
        "model:\n   local_epochs: 1\n  participation: 1",
        "line 3, column 3",
        "indent it as the lines",
    ),
    "a line too far right": (
        "monitor: x\n  monitor_mode: max",
        "line 2, column 15",
        "keys their indentation",
    ),
    "a mapping in itself": (
        "model: &a {learner: *a}",
        "mine.yaml: model.learner",
        "contains itself",
    ),
    "a list in itself": ("method: &a [*a]", "mine.yaml: method", "contains itself"),
    "a deep list": ("model: " + "[" * 3000 + "]" * 3000, "mine.yaml", "nested too deeply"),
    "deep mappings": ("model: " + "{a: " * 60 + "1" + "}" * 60, "mine.yaml", "more than 50 deep"),
    "a long number": ("trainer: {max_epochs: 1" + "0" * 5000 + "}", "mine.yaml", "digits"),
    "trainer is a list": ("trainer: [1]", "mine.yaml: trainer is list", "mapping"),
    "trainer is a number": ("trainer: 3", "mine.yaml: trainer is int", "mapping"),
    "model is a list": ("model: [1]", "mine.yaml: model is list", "mapping"),
    "trainer is added to": ("trainer+: 3", "mine.yaml: trainer+", "Accepted: trainer"),
    "class_path is a number": ("data: {class_path: 3}", "mine.yaml: data", "class_path '3'"),
    "class_path is empty": ("data: {class_path: }", "mine.yaml: data", "class_path 'None'"),
    "init_args is a list": (
        "data: {class_path: Digits, init_args: [1]}",
        "mine.yaml: data",
        "init_args '[1]'",
    ),
    "a method is a number": ("method: 3", "method: '3' names no class", "ProximalTerm"),
    "a list of lists": ("method: [[a]]", "method: \"['a']\" names no class", "ProximalTerm"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_option(cli: Cli, case: str) -> None:
    argv, *words = OPTIONS[case]
    said(cli, cli(*FIT, *FOLDER, *argv), *words)


@pytest.mark.parametrize("case", CONFIGS)
def test_config(cli: Cli, case: str) -> None:
    text, *words = CONFIGS[case]
    (cli.folder / "mine.yaml").write_text(text)
    said(cli, cli(*FIT, *FOLDER, "-c", "mine.yaml"), *words)


@pytest.mark.parametrize("text", ["trainer:", "model:", "data: {class_path: Digits, init_args: }"])
def test_an_empty_section_is_none(cli: Cli, text: str) -> None:
    (cli.folder / "mine.yaml").write_text(text)
    assert cli(*FIT, "--trainer.fast_dev_run", "true", "-c", "mine.yaml").returncode == 0


def test_the_defaults_of_lightning_s_timer_go_into_the_config_and_back(cli: Cli) -> None:
    result = cli(*FIT, *FOLDER, "--trainer.max_epochs", 1, "--trainer.callbacks", "Timer")
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
