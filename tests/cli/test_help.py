"""What ``--help`` says, that there is what it says, and what a command imports for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.__main__ import main
from fl_lightning.datamodules import Digits
from fl_lightning.lab.cli.cli import CommandCLI
from fl_lightning.lab.cli.commands import MODULES
from fl_lightning.lab.cli.compose import prepare
from fl_lightning.lab.cli.help import asked

FIT = str(asked("fit", "train", ["--help"]))
HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def options() -> set[str]:
    """Every option that the parser of ``fit`` knows."""
    cli = CommandCLI("fit", prepare("fit", ["-c", "base"]))
    return {name for name in cli.parser._option_string_actions if name.startswith("--")}


def named(text: str) -> set[str]:
    """The options that a help names, ``--model.a, .b`` among them."""
    found = set(re.findall(r"--[a-z_]+(?:\.[a-z_]+)*", text))
    for line in text.splitlines():
        if first := re.search(r"--([a-z]+)\.[a-z_]+", line):
            found |= {f"--{first[1]}.{name}" for name in re.findall(r"(?<= )\.([a-z_]+)", line)}
    return found


def test_the_help_of_fit_is_one_screen_of_what_a_federated_run_takes(options: set[str]) -> None:
    assert len(FIT.splitlines()) <= 60 and max(map(len, FIT.splitlines())) <= 100
    of_rounds = {name for name in options if re.fullmatch(r"--model\.[a-z_]+", name)}
    own = {"--monitor", "--monitor_mode", "--ckpt_path", "--weights_only", "--seed_everything"}
    assert of_rounds | own <= named(FIT)
    # What it names exists.
    of_classes = ("--data.", "--model.learner.", "--method")
    elsewhere = ("--help", "--debug", "--print_config")
    for name in named(FIT) - options:
        assert name.endswith(".help") or name in elsewhere or name.startswith(of_classes), name


SHOWN = [  # what is typed → what is in it
    ("--data.help", r"\n  Digits +1,797 grey images"),
    ("--method.help", r"\n  ControlVariates +SCAFFOLD: "),
    ("--model.help", r"--model.participation PARTICIPATION"),
    ("--data.partition.help", r"\n  Dirichlet +Class proportions"),
    ("--model.server_optimizer.help", r"\n  FedAdam "),
    ("--model.lr_decay.help", r"\n  Exponential "),
    ("-c base --data.help Digits", r"--data.root ROOT +\(type: str \| Path, default: data\)"),
    ("-c base --data.help Digits", r"None: all samples of a client"),
    ("--method.help=RelaxedInitialization", r"--method.beta BETA"),
    ("--method.topology.help", r"\n  Ring +Client i and client i"),
    ("--method.topology.help RandomRegular", r"--method.topology.degree DEGREE"),
    ("--model.client_optimizer.help SGD", r"--model.client_optimizer.momentum"),
]


@pytest.mark.parametrize(("argv", "text"), SHOWN)
def test_an_option_tells_its_classes_and_a_class_its_arguments(
    argv: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *argv.split()]) == 0
    out = capsys.readouterr().out
    assert re.search(text, out), out
    assert "torch.nn" not in out and "pytorch_lightning.callbacks" not in out


def test_all_of_it_names_every_argument(
    capsys: pytest.CaptureFixture[str], options: set[str]
) -> None:
    assert main(["fit", "--help", "all"]) == 0
    text = capsys.readouterr().out
    arguments = {name for name in options if re.fullmatch(r"--(model|trainer)\.[a-z_]+", name)}
    assert not {name for name in arguments if f"{name} " not in text}
    assert main(["partition", "--help", "all"]) == 0
    assert "--data.partition CLASS" in capsys.readouterr().out


def test_a_class_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--data.help", "Digit"]) == 2
    assert "Did you mean 'Digits'? Accepted: CIFAR10" in capsys.readouterr().err
    for path in ("os.path", "math.pi", "."):
        assert main(["fit", "--method.help", path]) == 2
        assert f"--method.help {path}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status"),
    [(["configs"], 0), (["fit", "--help"], 0), (["sweep", "demo", "--dry_run"], 141)],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_whoever_reads_it_may_stop_early(argv: list[str], status: int, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "fl_lightning", *argv]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    run = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writer)
    assert (run.returncode, run.stderr) == (status, "")


# --------------------------------------------------------------------------- imports

# What some run, report or test needs, and a run of the digits does not. (torchmetrics itself
# imports transformers and matplotlib where they are installed.)
ELSEWHERE = {
    *("sklearn", "joblib", "narwhals", "pandas", "pyarrow", "peft", "safetensors"),
    *("dp_accounting", "opacus", "wandb", "mlflow", "hypothesis", "pytest", "tensorboard"),
    *("fl_lightning.lab.report", "fl_lightning.lab.sweep", "fl_lightning.lab.analysis"),
    *("fl_lightning.lab.contracts", "fl_lightning.testing"),
}
CODE = """
import json, sys
from fl_lightning.__main__ import main
status = main(sys.argv[1:])
json.dump([status, sorted(sys.modules)], open("imported.json", "w"))
"""
# Some parsers end the process once they have told.
HELP = """
import atexit, sys
from fl_lightning.__main__ import main
atexit.register(lambda: print("torch:", "torch" in sys.modules))
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_command_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    argv = ["fit", "-c", "base", "-c", "data/digits", "-c", "debug/tiny", "-c", "logger/csv"]
    command = [sys.executable, "-c", CODE, *argv]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    ended, modules = json.loads((tmp_path / "imported.json").read_text())
    assert ended == 0 and not set(modules) & (ELSEWHERE | {"torch.utils.tensorboard"})


@pytest.mark.slow
@pytest.mark.parametrize("command", [*MODULES, "fit", "test", "export", "partition"])
def test_what_a_command_takes_is_told_without_torch(command: str) -> None:
    argv = [sys.executable, "-c", HELP, command, "--help"]
    result = subprocess.run(argv, cwd=HERE, stdout=subprocess.PIPE, text=True)
    assert result.stdout.startswith("usage: ") and result.stdout.endswith("torch: False\n")


def test_the_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data = Digits(num_clients=2)
    data.load()
    pixels, labels = load_digits(return_X_y=True)
    sets = (data.train_set, data.test_set)
    ours = np.concatenate([np.asarray(part.x).reshape(len(part.x), 64) for part in sets])
    targets = np.concatenate([np.asarray(part.y) for part in sets])
    assert sorted(map(tuple, np.c_[ours, targets])) == sorted(map(tuple, np.c_[pixels, labels]))


def test_public_names_are_completed_before_their_first_use(bare_python: str) -> None:
    program = (
        "import fl_lightning, fl_lightning.models as models; "
        "assert {'__version__', *fl_lightning.__all__} == set(dir(fl_lightning)); "
        "assert set(models.__all__) <= set(dir(models)); "
        "assert 'FederatedModule' not in vars(fl_lightning)"
    )
    subprocess.run([bare_python, "-c", program], check=True)
