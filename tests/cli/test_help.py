"""What ``--help`` says, and that it says what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from fl_lightning.__main__ import main
from fl_lightning.lab.cli.cli import CommandCLI
from fl_lightning.lab.cli.compose import prepare
from fl_lightning.lab.cli.help import asked

FIT = str(asked("fit", "train", ["--help"]))


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command line prints."""
    assert main(argv) == 0
    return capsys.readouterr().out


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
    assert len(FIT.splitlines()) <= 60
    assert max(map(len, FIT.splitlines())) <= 100
    of_rounds = {name for name in options if re.fullmatch(r"--model\.[a-z_]+", name)}
    own = {"--monitor", "--monitor_mode", "--ckpt_path", "--weights_only", "--seed_everything"}
    assert of_rounds | own <= named(FIT)


def test_what_the_help_names_exists(options: set[str]) -> None:
    of_classes = ("--data.", "--model.learner.", "--method")
    elsewhere = ("--help", "--debug", "--print_config")
    for name in named(FIT):
        known = name in options or name.endswith(".help") or name in elsewhere
        assert known or name.startswith(of_classes), name


@pytest.mark.parametrize("command", ["fit", "test", "export", "partition"])
def test_it_is_there_at_once(command: str) -> None:
    code = (
        "import sys; from fl_lightning.__main__ import main; main(sys.argv[1:]); "
        "print('torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, command, "-c", "base", "--help"]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[0].startswith(f"usage: fl-lightning {command}")
    assert lines[-1] == "False"


def test_all_of_it_names_every_argument_and_our_classes_alone(
    capsys: pytest.CaptureFixture[str], options: set[str]
) -> None:
    text = shown(capsys, "fit", "--help", "all")
    missing = {
        name
        for name in options
        if re.fullmatch(r"--(model|trainer)\.[a-z_]+", name) and f"{name} " not in text
    }
    assert not missing
    assert "torch.nn" not in text and "pytorch_lightning.callbacks" not in text
    for name in ("Digits", "Dirichlet", "ControlVariates", "ImageClassifier", "MLP", "FedAdam"):
        assert re.search(rf"^  {name} ", text, re.M), name


def test_an_option_tells_its_classes_and_a_class_its_arguments(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert re.search(r"^  Digits +1,797 grey images", shown(capsys, "fit", "--data.help"), re.M)
    assert re.search(r"^  ControlVariates +SCAFFOLD: ", shown(capsys, "fit", "--method.help"), re.M)
    assert "--model.participation  int | float | str, default 0.1" in shown(
        capsys, "fit", "--model.help"
    )
    digits = shown(capsys, "fit", "-c", "base", "--data.help", "Digits")
    assert "--data.root  str | Path, default data" in digits
    size = "--data.batch_size  an integer from 1, or null, default 50\n"
    assert size + "        None: all samples of a client" in digits
    assert "--method.beta  float | Schedule" in shown(
        capsys, "fit", "--method.help=RelaxedInitialization"
    )


def test_a_class_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--data.help", "Digit"]) == 2
    assert "Did you mean 'Digits'? Accepted: CIFAR10" in capsys.readouterr().err
    for path in ("os.path", "math.pi", "."):
        assert main(["fit", "--method.help", path]) == 2
        assert f"--method.help {path}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["configs"], 0),
        (["fit", "--help"], 0),
        (["--help"], 0),
        (["sweep", "demo", "--dry_run"], 141),
        (["sweep", "--help"], 0),
    ],
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
