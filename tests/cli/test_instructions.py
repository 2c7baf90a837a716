"""Instructions by the command line: the small config, and the experiment in FlowerTune's form."""

from __future__ import annotations

import csv
import json

import pytest
import yaml

from tests.helpers.zygote import Cli

pytest.importorskip("transformers", reason="texts need transformers")
pytest.importorskip("peft", reason="low-rank matrices need peft")

TINY = "experiment/flowertune/general-iid-20-tiny"
TWO = ("--trainer.max_epochs", 2, "-c", "trainer/cpu", "--trainer.default_root_dir", "run")


def rows(cli: Cli) -> list[dict[str, str]]:
    with open(cli.folder / "run/metrics.csv") as file:
        return list(csv.DictReader(file))


def test_the_small_config_runs_from_nothing(cli: Cli) -> None:
    steps = ("--model.local_steps", 1, "--model.accumulate", 2, "--data.batch_size", 2)
    done = cli("fit", "-c", "base", "-c", "data/instructions", *TWO, *steps)
    assert done.returncode == 0, done.stderr
    last = rows(cli)[-1]
    assert float(last["val/perplexity"]) > 1
    assert int(float(last["cost/gradients"])) == 5 * 2


def test_flowertunes_form(cli: Cli) -> None:
    """Own records, 2 of 20 clients, a rate that falls by rounds, a budget that ends it."""
    records = [
        {"instruction": f"say {k}", "input": "" if k % 2 else "loud", "response": str(k)}
        for k in range(200)
    ]
    (cli.folder / "own").mkdir()
    (cli.folder / "own/train.jsonl").write_text("\n".join(map(json.dumps, records)))
    own = ("--data.root", "own", "--data.train", "train.jsonl")
    asked = ("--model.local_steps", 1, "--data.batch_size", 2, "--trainer.limit_val_batches", 0)
    done = cli("fit", "-c", TINY, *own, *TWO, *asked)
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((cli.folder / "run/config.yaml").read_text())
    assert config["model"]["learner"]["init_args"]["lora"]["r"] == 32
    last = rows(cli)[-1]
    # Of two layers: two adapters of 32 (64 + 64) numbers each; float32; 2 clients, both ways.
    d = 2 * 2 * 32 * (64 + 64)
    assert float(last["communication/total_parameters"]) == 2 * 2 * 2 * d
    card = (cli.folder / "run/card.md").read_text()
    assert "209,715,200,000 bytes" in card
    assert f"{d:,} trained parameters" in card
    assert "32-true: trained weights in float32, frozen ones in bfloat16" in card

    # A budget of one round ends the run, as done; asked again it stays so.
    budget = f"{2 * 2 * d * 4} B"
    short = yaml.safe_dump(
        {
            "trainer": {
                "callbacks": [
                    {"class_path": "CommunicationLogger", "init_args": {"budget": budget}}
                ]
            }
        }
    )
    (cli.folder / "short.yaml").write_text(short)
    again = ("--trainer.default_root_dir", "short", "--trainer.max_epochs", 3)
    done = cli("fit", "-c", TINY, "-c", "short.yaml", *own, *asked, *again, "-c", "trainer/cpu")
    assert done.returncode == 0, done.stderr
    record = json.loads((cli.folder / "short/run.json").read_text())
    assert record["status"] == "done"
    assert len((cli.folder / "short/metrics.csv").read_text().splitlines()) == 2
    assert "reach the budget" in done.stderr + done.stdout
    assert cli("fit", "short").returncode == 0
    assert len((cli.folder / "short/metrics.csv").read_text().splitlines()) == 2
