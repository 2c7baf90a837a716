"""Configs of files that users have, run by the command line on small files of their form."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
from PIL import Image

from tests.helpers.zygote import Cli

FIT = ("fit", "-c", "base", "-c", "trainer/cpu", "--trainer.max_epochs", 1)


def test_heart_disease(cli: Cli) -> None:
    (cli.folder / "data").mkdir()
    draw = random.Random(0)
    for name, count in (("cleveland", 60), ("hungarian", 50), ("switzerland", 30), ("va", 30)):
        rows = []
        for i in range(count):
            row = [draw.randint(30, 80), i % 2, 1.0 + i % 4, 120, 200, 0, float(i % 3), 150, 0, 1.5]
            rows.append(",".join(map(str, [*row, "?", "?", "?", i % 3])))
        rows[1] = rows[1].replace("120", "?")
        (cli.folder / "data" / f"processed.{name}.data").write_text("\n".join(rows) + "\n")
    run = cli(
        *(*FIT, "-c", "data/heart_disease", "--model.participation", "all"),
        *("--trainer.callbacks+", "PerClientEvaluation"),
    )
    assert run.returncode == 0, run.stderr
    (folder,) = (cli.folder / "runs").iterdir()
    rows_of = list(csv.DictReader((folder / "clients.csv").open()))
    assert [row["name"] for row in rows_of] == ["cleveland", "hungarian", "switzerland", "va"]
    assert [int(row["samples"]) for row in rows_of] == [21, 17, 10, 10]


def pictures(path: Path) -> None:
    draw = np.random.default_rng(0)
    for shift, domain in enumerate(("art", "photo")):
        for level, name in enumerate(("cat", "dog")):
            folder = path / domain / name
            folder.mkdir(parents=True)
            for i in range(8):
                pixels = draw.integers(0, 120, (8, 8, 3)) + 60 * level + 40 * shift
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")


def test_domains_are_measured_by_name(cli: Cli) -> None:
    pictures(cli.folder / "pets")
    run = cli(
        *(*FIT, "--data", "FromFolders", "--data.path", "pets", "--data.test", 0.25),
        *("--data.image_size", 8, "--data.clients_per_domain", 2),
        *("--model.participation", "all", "--trainer.callbacks+", "PerClientEvaluation"),
        *("--model.learner.network", "MLP", "--model.learner.network.sizes", "[192, 8, 2]"),
        *("--model.learner.num_classes", 2),
    )
    assert run.returncode == 0, run.stderr
    (folder,) = (cli.folder / "runs").iterdir()
    rows = {row["domain"]: row for row in csv.DictReader((folder / "domains.csv").open())}
    assert list(rows) == ["art", "photo", "mean", "worst"]
    assert [rows[name]["clients"] for name in ("art", "photo")] == ["2", "2"]
    each = [float(rows[name]["acc"]) for name in ("art", "photo")]
    assert float(rows["mean"]["acc"]) == sum(each) / 2 and float(rows["worst"]["acc"]) == min(each)
    losses = [float(rows[name]["loss"]) for name in ("art", "photo")]
    assert float(rows["worst"]["loss"]) == max(losses)
    logged = list(csv.DictReader((folder / "metrics.csv").open()))[-1]
    assert float(logged["domains/acc/art"]) == each[0]
    assert float(logged["domains/acc_worst"]) == min(each)
    report = cli("report", folder)
    assert report.returncode == 0, report.stderr
