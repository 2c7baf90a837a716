"""Other tools' splits by name: ``-c split/…``."""

from __future__ import annotations

import csv

import pytest

from fl_lightning.lab.cli.compose import packaged
from tests.helpers.zygote import Cli

SPLITS = sorted(name for name in packaged() if name.startswith("split/"))


@pytest.mark.parametrize("split", SPLITS)
def test_every_split_is_made(split: str, cli: Cli) -> None:
    run = cli("partition", "-c", "data/digits", "-c", split)
    assert run.returncode == 0, run.stderr
    assert "Gini of sizes" in run.stdout and (cli.folder / "partition.npz").is_file()


def test_pooled_clients_are_tested_on_their_own_samples_of_the_split(cli: Cli) -> None:
    run = cli(
        *("fit", "-c", "base", "-c", "trainer/cpu", "-c", "data/digits", "-c", "split/pfllib_dir"),
        *("--trainer.max_epochs", 1, "--model.participation", 4),
        *("--trainer.callbacks+", "PerClientEvaluation"),
    )
    assert run.returncode == 0, run.stderr
    (folder,) = (cli.folder / "runs").iterdir()
    rows = list(csv.DictReader((folder / "clients.csv").open()))
    assert len(rows) == 20 and sum(int(row["samples"]) for row in rows) > 400
    logged = list(csv.DictReader((folder / "metrics.csv").open()))
    assert float(logged[-1]["val/acc"]) > 0
