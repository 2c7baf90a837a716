"""Whole runs of texts: without a network, killed and resumed, by other engines, as the published
experiment has it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.commands import table
from tests.helpers.texts import opt, opt_layer, opt_rest, text_file

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
    rows = table(tmp_path / "x/metrics.csv")
    losses = [float(row["train/loss"]) for row in rows]
    assert len(losses) == ROUNDS and losses[-1] <= 0.9 * losses[0]

    extractor, head = 10 * opt_layer(), 2 * opt_layer() + opt_rest()
    for k, row in enumerate(rows, 1):
        down = CLIENTS * (k * head + -(-k // PERIOD) * extractor)
        up = CLIENTS * (k * head + k // PERIOD * extractor)
        counted = [
            int(float(row[f"communication/{way}_parameters"])) for way in ("down", "up", "total")
        ]
        assert counted == [down, up, down + up], f"after {k} rounds"

    assert not (tmp_path / "y").exists()
    (paragraph,) = [line for line in done.stderr.splitlines() if line.startswith("fl-lightning:")]
    assert "path is 'facebook/opt-125m', which is not a folder" in paragraph
    assert "Traceback" not in done.stderr
