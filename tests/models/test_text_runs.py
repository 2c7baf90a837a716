"""Whole runs of texts: without a network, killed and resumed, by other engines, as the published
experiment has it."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.commands import typed
from tests.helpers.texts import multinli_files, opt, opt_layer, opt_rest, text_file
from tests.helpers.zygote import Cli

pytest.importorskip(
    "transformers", reason="texts need transformers: pip install 'fl-lightning[text]'"
)
pytestmark = pytest.mark.slow

CLIENTS, ROUNDS, PERIOD = 3, 10, 5
# The namespaces of users and of the network, as sched.h has them; 77 where nobody may make them.
APART = """
import ctypes, sys
if ctypes.CDLL(None).unshare(0x10000000 | 0x40000000):
    sys.exit(77)
"""


def config(folder: Path, **learner: Any) -> Path:
    """A run of FedALS with AdamW on 12 decoder layers, in ``folder/texts.yaml``."""
    text_file(folder)
    document = {
        "seed_everything": 0,
        "trainer": {"max_epochs": ROUNDS, "accelerator": "cpu", "enable_progress_bar": False},
        "model": {
            "learner": {
                "class_path": "CausalLanguageModel",
                "init_args": {"config": opt(12), "lr": 0.003, **learner},
            },
            "participation": "all",
            "local_steps": 2,
            "keep_optimizer_state": True,
        },
        "data": {
            "class_path": "LanguageModelling",
            "init_args": {
                "root": str(folder),
                "length": 16,
                "num_clients": CLIENTS,
                "batch_size": 4,
            },
        },
        "method": [
            {
                "class_path": "PartialAveraging",
                "init_args": {"period": PERIOD, "extractor": ["*.layers.[0-9].*"]},
            }
        ],
    }
    path = folder / "texts.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def metrics(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv") as file:
        return list(csv.DictReader(file))


def weights(run: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(run / "checkpoints/last.ckpt", weights_only=True)[
        "state_dict"
    ]
    return state


def test_without_a_network(tmp_path: Path, python: str) -> None:
    """In a network namespace of its own, where not even the machine itself can be reached."""
    fit = ["fit", "-c", str(config(tmp_path)), "--trainer.default_root_dir"]
    runs = [[*fit, "x"], [*fit, "y", "--model.learner.path", "facebook/opt-125m"]]
    code = f"{APART}from fl_lightning.__main__ import main; print(*map(main, {runs}))"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FL_", "PL_", "HF_"))} | {
        "OMP_NUM_THREADS": "1"
    }
    env["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [env.get("PYTHONPATH")])])
    env["HOME"] = str(tmp_path / "home")  # so that nothing comes from an earlier download
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    if done.returncode == 77:
        pytest.skip("this machine lets nobody make a network namespace (unshare)")
    assert done.stdout.splitlines()[-1:] == ["0 2"], done.stderr
    losses = [float(row["train/loss"]) for row in metrics(tmp_path / "x")]
    assert len(losses) == ROUNDS and losses[-1] <= 0.9 * losses[0]

    extractor, head = 10 * opt_layer(), 2 * opt_layer() + opt_rest()
    for k, row in enumerate(metrics(tmp_path / "x"), 1):
        down = CLIENTS * (k * head + -(-k // PERIOD) * extractor)
        up = CLIENTS * (k * head + k // PERIOD * extractor)
        counted = [
            int(float(row[f"communication/{way}_parameters"])) for way in ("down", "up", "total")
        ]
        assert counted == [down, up, down + up], f"after {k} rounds"

    assert not (tmp_path / "y").exists()
    (paragraph,) = [line for line in done.stderr.splitlines() if line.startswith("fl-lightning:")]
    assert (
        "path is 'facebook/opt-125m', which is not a folder" in paragraph
        and "Traceback" not in done.stderr
    )


def test_killed_and_resumed_it_leaves_the_same_bits(cli: Cli) -> None:
    """With dropout, AdamW's states and the clients' own copies of the extractor between two
    averages."""
    fit = ("fit", "-c", config(cli.folder, config=opt(12, dropout=0.1)), "--trainer.max_epochs", 5)
    assert cli(*fit, "--trainer.default_root_dir", "whole").returncode == 0
    killed = cli.start(*fit, "--trainer.default_root_dir", "x")
    killed.wait_for(cli.folder / "x/checkpoints/last.ckpt")
    killed.kill(group=True)
    assert killed.wait().returncode == -9
    done = len(metrics(cli.folder / "x"))
    assert 1 <= done < 5
    result = cli("fit", "x")
    assert result.returncode == 0, result.stderr
    same = [
        [
            {k: v for k, v in row.items() if not k.startswith("time/")}
            for row in metrics(cli.folder / run)
        ]
        for run in ("whole", "x")
    ]
    assert same[0] == same[1] and len(same[0]) == 5
    whole, x = weights(cli.folder / "whole"), weights(cli.folder / "x")
    assert whole.keys() == x.keys() and all(torch.equal(whole[name], x[name]) for name in whole)


def test_clients_side_by_side_leave_the_same_bits_and_with_dropout_the_reason_is_said(
    cli: Cli,
) -> None:
    fit = ("fit", "-c", config(cli.folder), "--trainer.max_epochs", 2)
    engines = {"sequential": (), "concurrent": ("--model.workers", 2), "auto": ()}
    for engine, options in engines.items():
        result = cli(*fit, "--model.engine", engine, *options, "--trainer.default_root_dir", engine)
        assert result.returncode == 0, result.stderr
    first, *others = (weights(cli.folder / engine) for engine in engines)
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)
    fit = ("fit", "-c", config(cli.folder, config=opt(2, dropout=0.1)), "--trainer.max_epochs", 1)
    result = cli(
        *fit, "--method", "[]", "--model.engine", "auto", "--trainer.default_root_dir", "dropout"
    )
    assert result.returncode == 0, result.stderr
    assert "| engine | sequential |" in (cli.folder / "dropout/card.md").read_text()
    assert "random" in (cli.folder / "dropout/card.md").read_text(), "dropout is the reason"


@pytest.mark.parametrize("split", ["genre", "iid"])
def test_the_published_experiment_on_a_small_folder(cli: Cli, split: str) -> None:
    """OPT of 12 layers from a folder, its tokenizer, MultiNLI's format.

    FedALS's setting but for the sizes.
    """
    from fl_lightning.models import CausalLanguageModel
    from tests.helpers.texts import tokenizer_folder

    folder = tokenizer_folder(cli.folder / "opt")
    tokens = {"vocab_size": 64, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    CausalLanguageModel(config=opt(12, **tokens)).network.save_pretrained(folder)
    multinli_files(cli.folder / "texts")
    experiment = (
        "-c",
        f"experiment/fedals/table1-multinli-{split}-5",
        "-c",
        "experiment/fedals/method/fedals-opt",
    )
    here = typed(
        "--model.learner.path opt --data.tokenizer opt --data.root texts", "--data.length 32"
    )
    small = typed(
        "--trainer.max_epochs 2 --model.local_steps 1 -c trainer/cpu", "--model.engine sequential"
    )
    result = cli("fit", *experiment, *here, *small, "--trainer.default_root_dir", "x")
    assert result.returncode == 0, result.stderr
    last = metrics(cli.folder / "x")[-1]
    rest = 64 * 16 + (64 + 2) * 16 + 2 * 16
    assert int(float(last["communication/up_parameters"])) == 2 * 5 * (rest + 2 * opt_layer())
    assert 0 < float(last["val/loss"]) < 10
    classified = typed(
        "--model.learner TextClassifier --model.learner.path opt", "--model.learner.num_classes 3"
    )
    result = cli("fit", *experiment, *here, *small, *classified, "--trainer.default_root_dir", "y")
    assert result.returncode == 0, result.stderr
    assert float(metrics(cli.folder / "y")[-1]["val/acc"]) >= 0
    result = cli("test", "y")
    assert result.returncode == 0 and "test/acc" in result.stdout, result.stderr
