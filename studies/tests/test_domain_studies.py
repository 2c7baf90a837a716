"""Studies of domains: FedBN's, and each domain left out in turn; the worst domain in a report."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fl_lightning.lab.cli.compose import packaged, parse_yaml
from fl_lightning.lab.sweep.grid import arms
from fl_lightning.lab.sweep.sweep_file import read_spec
from tests.helpers.zygote import Cli

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
ARMS = ("fedavg", "fedbn", "fedprox", "local")


def test_a_round_of_fedbns_study_with_each_method_and_the_worst_domain(cli: Cli) -> None:
    for method in ARMS:
        run = cli(
            *("fit", "-c", "experiment/fedbn/domains-5", "-c", f"experiment/fedbn/method/{method}"),
            *("-c", "trainer/cpu", "--trainer.max_epochs", 1, "--data.samples", 40),
            *("--trainer.default_root_dir", f"runs/{method}"),
        )
        assert run.returncode == 0, run.stderr
    report = cli("report", "runs", "--metric", "val/acc")
    assert report.returncode == 0, report.stderr
    summary = json.loads((cli.folder / "runs/report.json").read_text())
    assert len(summary["arms"]) == len(ARMS)
    for arm in summary["arms"].values():
        (folder,) = arm["runs"]
        rows = list(csv.DictReader((cli.folder / folder / "domains.csv").open()))
        assert [row["domain"] for row in rows][5:] == ["mean", "worst"]
        (worst,) = arm["fairness"]["worst_domain"]["values"].values()
        assert worst == pytest.approx(float(rows[-1]["acc"]))
    assert "worst domain" in (cli.folder / "runs/report.html").read_text("utf-8")


def test_the_sweep_of_fedbns_study_has_claims_against_each_other_method() -> None:
    name = "experiment/fedbn/domains-5-small"
    assert tuple(arm.name for arm in arms(read_spec(name))) == ARMS
    path = Path(str(packaged()[name])).with_name("domains-5-small.claims.yaml")
    found = {(claim["b"], claim["metric"]) for claim in parse_yaml(path.read_text("utf-8"))}
    metrics = ("domains/acc_mean", "domains/acc_worst")
    assert found == {(other, metric) for other in ARMS if other != "fedbn" for metric in metrics}


def test_each_domain_is_left_out_in_turn(cli: Cli) -> None:
    draw = np.random.default_rng(0)
    for domain in DOMAINS:
        for label in range(7):
            folder = cli.folder / "pacs" / domain / f"class {label}"
            folder.mkdir(parents=True)
            for i in range(2):
                pixels = draw.integers(0, 255, (8, 8, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    sweep = ("sweep", "experiment/domains/pacs-leave-one-out", "data.init_args.path=pacs")
    planned = cli(*sweep, "--dry_run")
    assert planned.returncode == 0, planned.stderr
    assert all(f'leave_out=["{domain}"]' in planned.stdout for domain in DOMAINS)
    one = ("trainer.max_epochs=1", "seed_everything=[0]", "method=[method/fedavg]")
    run = cli(*sweep, *one, "data.init_args.leave_out=[[photo],[sketch]]", "--jobs", 1)
    assert run.returncode == 0, run.stdout + run.stderr
    cards = [card.read_text("utf-8") for card in (cli.folder / "runs").rglob("card.md")]
    assert len(cards) == 2 and all("3 of 3 clients" in card for card in cards)
