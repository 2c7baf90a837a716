"""Simulated systems from the command line: their configs run, and say what they did."""

from __future__ import annotations

import csv
import json

import pytest

from tests.helpers.zygote import Cli

COLUMNS = {
    "system/constant": {"time/virtual", "system/late"},
    "system/tiers": {"time/virtual", "system/seconds_per_step"},
    "system/flaky": {"system/dropped"},
    "method/fedbuff": {"time/virtual", "staleness/max", "system/running"},
    "method/fedasync": {"time/virtual", "staleness/max", "system/running"},
}
TITLES = {"method/fedbuff": "FedBuff", "method/fedasync": "FedAsync + FedProx"}


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_config_of_a_system_runs_and_logs_its_columns(cli: Cli, name: str) -> None:
    short = ("--trainer.max_epochs", 2, "--model.local_steps", 1)
    done = cli("fit", "-c", "base", "-c", "data/digits", "-c", name, *short)
    assert done.returncode == 0, done.stderr
    (folder,) = (cli.folder / "runs").iterdir()
    rows = list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))
    assert len(rows) == 2 and COLUMNS[name] <= {key for key, value in rows[1].items() if value}
    assert json.loads((folder / "run.json").read_text())["title"] == TITLES.get(name, "FedAvg")


@pytest.mark.slow
def test_the_sweep_of_the_docs_is_what_it_says(cli: Cli) -> None:
    done = cli("sweep", "experiment/systems/fashionmnist-lognormal", "--dry_run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("fl-lightning fit") == 15
