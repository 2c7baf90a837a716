"""What a command imports: nothing that its run does not use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.datamodules import Digits
from fl_lightning.lab.cli.commands import MODULES

# What some run, report or test needs, and a run of the digits does not. (torchmetrics itself
# imports transformers and matplotlib where they are installed.)
ELSEWHERE = {
    *("sklearn", "joblib", "narwhals", "pandas", "pyarrow", "peft", "safetensors"),
    *("dp_accounting", "opacus", "wandb", "mlflow", "hypothesis", "pytest"),
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
main([sys.argv[1], "--help"])
"""


def imported(folder: Path, *argv: str) -> tuple[int, set[str]]:
    """The exit status of a command in a new interpreter, and the modules that it has then."""
    here = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": here}
    command = [sys.executable, "-c", CODE, "fit", "-c", "base", "-c", "data/digits", *argv]
    subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=True)
    status, modules = json.loads((folder / "imported.json").read_text())
    return status, set(modules)


@pytest.mark.slow
def test_a_run_imports_nothing_that_it_does_not_use(tmp_path: Path) -> None:
    status, modules = imported(tmp_path, "-c", "debug/tiny", "-c", "logger/csv")
    assert status == 0
    assert not modules & (ELSEWHERE | {"tensorboard", "torch.utils.tensorboard"})


@pytest.mark.slow
def test_an_errors_paragraph_imports_no_more_than_the_parser(tmp_path: Path) -> None:
    status, modules = imported(tmp_path, "--trainer.max_epoch", "1")
    assert status == 2
    assert not modules & (ELSEWHERE | {"tensorboard", "matplotlib.backends.backend_agg"})


@pytest.mark.slow
@pytest.mark.parametrize("command", MODULES)
def test_what_a_command_takes_is_told_without_torch(command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", HELP, command],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
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
