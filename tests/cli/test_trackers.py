"""What trackers hold of a run: every column, round and coefficient, in one run of theirs."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import said, table
from tests.helpers.zygote import Cli

TINY = ("-c", "base", "-c", "trainer/cpu", "-c", "debug/tiny", "-c", "method/fedprox")
TINY = (*TINY, "--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", "x")

pytestmark = pytest.mark.slow


def needs(package: str) -> pytest.MarkDecorator:
    """Skip where a tracker's package is not installed."""
    missing = find_spec(package) is None
    reason = f"{package} is not installed: pip install -e '.[trackers]'"
    return pytest.mark.skipif(missing, reason=reason)


def in_two_fits(cli: Cli, *argv: str) -> dict[str, dict[int, float]]:
    """Run two rounds, go on to the third, and give metrics.csv: column → round → value."""
    for command in ((*TINY, *argv), ("x", "--trainer.max_epochs", "3")):
        # A tracker's first start makes its tables, in minutes on a busy machine.
        result = cli("fit", *command, env={"WANDB_MODE": "offline"}, timeout=400)
        assert result.returncode == 0, result.stderr
    columns: dict[str, dict[int, float]] = {}
    for row in table(cli.folder / "x/metrics.csv"):
        for name, text in row.items():
            if name != "round" and text:
                columns.setdefault(name, {})[int(row["round"])] = float(text)
    assert len(columns) > 15 and set(columns["train/loss"]) == {0, 1, 2}
    return columns


def same(expected: dict[str, dict[int, float]], found: dict[str, Any], digits: float) -> None:
    """Every column with every round of it, to ``digits``."""
    assert expected.keys() <= found.keys()
    for name, values in expected.items():
        assert values.keys() == found[name].keys(), name
        for t, value in values.items():
            assert math.isclose(found[name][t], value, rel_tol=digits), (name, t)


def noted(folder: Path) -> dict[str, str]:
    ids: dict[str, str] = json.loads((folder / "run.json").read_text())["trackers"]
    return ids


def test_tensorboard_has_it_all_in_the_runs_folder(cli: Cli) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    expected = in_two_fits(cli)
    # Both fits' files are one run of TensorBoard's.
    events = EventAccumulator(str(cli.folder / "x"))
    events.Reload()
    found = {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }
    same(expected, found, 1e-6)
    assert noted(cli.folder / "x") == {}


@needs("mlflow")
def test_mlflow_has_it_all_in_one_run(cli: Cli) -> None:
    import mlflow

    expected = in_two_fits(cli, "-c", "logger/mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{cli.folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fl-lightning")
    (run,) = client.search_runs([experiment.experiment_id])
    found = {
        name: {
            point.step: point.value for point in client.get_metric_history(run.info.run_id, name)
        }
        for name in run.data.metrics
    }
    same(expected, found, 0)
    assert noted(cli.folder / "x") == {"MLFlowLogger": run.info.run_id}
    assert run.data.params["method.ProximalTerm.mu"] == "0.01"


@needs("wandb")
def test_wandb_has_it_under_one_id(cli: Cli) -> None:
    in_two_fits(cli, "-c", "logger/wandb")
    files = sorted((cli.folder / "wandb").glob("offline-run-*/run-*.wandb"))
    ids = noted(cli.folder / "x")
    # Each fit leaves a folder to be synchronised; both are of one run.
    assert {path.stem for path in files} == {f"run-{ids['WandbLogger']}"} and len(files) == 2


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_named(cli: Cli, package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed, and this test is of the error without it")
    said(cli("fit", *TINY, "-c", f"logger/{package}"), package, "install")
    assert not (cli.folder / "x").exists()
