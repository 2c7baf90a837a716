"""Nine methods for adapters on one small text: ``python -m studies.adapters_table
{prepare,run,keep,table}``.

``prepare`` reads tinyshakespeare, cuts it into passages and pretrains a small transformer on those
of training: ``fl-lightning fit`` and ``fl-lightning export --pretrained``. Clients differ in the
tenth of the text that their passages come from (about four plays), and learn each next character.
``run`` makes the runs of ``configs/experiment/adapters/shakespeare.yaml``, whose claims were frozen
before. ``keep`` packs what has ended into ``studies/adapters_results/``, and ``table`` prints it.
Data: FL_LIGHTNING_DATA, else ``data``; below it ``tinyshakespeare/input.txt``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.__main__ import main as command
from fl_lightning.errors import UserError
from studies.kept import pack, unpacked

NAME = "shakespeare"
SWEEP = f"experiment/adapters/{NAME}"
MADE = Path("data/adapters")
OUT = Path("runs/adapters")
KEPT = Path("studies/adapters_results")
LENGTH = 64  # bytes of a passage
TENTHS = 10
NETWORK = {
    "num_hidden_layers": 2,
    "max_position_embeddings": LENGTH,
}
ROUNDS = 6  # of 200 steps each


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.adapters_table")
    parser.add_argument("what", choices=["prepare", "run", "keep", "table"])
    what = parser.parse_args(argv).what
    try:
        if what == "prepare":
            return prepare(Path(os.environ.get("FL_LIGHTNING_DATA", "data")))
        if what == "run":
            return int(command(["sweep", SWEEP, "--out", str(OUT / NAME), "--jobs", "1"]) or 0)
        if what == "keep":
            return keep()
        return table()
    except UserError as error:
        print(f"studies.adapters_table: {error}", file=sys.stderr)
        return 1


def prepare(root: Path) -> int:
    """Write passages with their classes, and a network that was pretrained on them.

    Raises:
        UserError: the text is not there.
    """
    file = root / "tinyshakespeare/input.txt"
    if not file.is_file():
        raise UserError(
            f"{file} is not there. Put tinyshakespeare's input.txt (1,115,394 bytes) there by hand,"
            " or name the folder above it: FL_LIGHTNING_DATA=/your/data python -m "
            "studies.adapters_table prepare."
        )
    text = file.read_text("utf-8")
    passages = [text[j : j + LENGTH] for j in range(0, len(text) - LENGTH, LENGTH)]
    rows = [
        {"text": passage, "label": str(j * TENTHS // len(passages))}
        for j, passage in enumerate(passages)
    ]
    # Of twenty neighbours the last one is tested on, and twelve are trained on.
    parts = {
        "train": [row for j, row in enumerate(rows) if j % 5 in (0, 1, 2)],
        "test": [row for j, row in enumerate(rows) if j % 20 == 19],
    }
    MADE.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (MADE / f"{name}.jsonl").write_text(lines, "utf-8")
    (MADE / "pretraining.txt").write_text("".join(row["text"] for row in parts["train"]), "utf-8")
    run = str(OUT / "pretrained")
    options = {
        "--data.init_args.root": str(MADE),
        "--data.init_args.file": "pretraining.txt",
        "--data.init_args.length": str(LENGTH),
        "--data.init_args.num_clients": "1",
        "--data.init_args.batch_size": "32",
        "--model.local_epochs": "null",
        "--model.local_steps": "200",
        "--model.learner.init_args.lr": "0.003",
        "--trainer.max_epochs": str(ROUNDS),
        "--trainer.enable_progress_bar": "false",
        "--trainer.default_root_dir": run,
    }
    words = [word for pair in options.items() for word in pair]
    for key, value in NETWORK.items():
        words += [f"--model.learner.init_args.config.{key}", str(value)]
    done = command(["fit", "-c", "base", "-c", "data/text", "-c", "logger/csv", *words])
    return int(done or command(["export", run, "--pretrained", str(MADE / "network")]) or 0)


def keep() -> int:
    """Pack the sweep's runs into one table of runs and one of curves."""
    pack(OUT, KEPT)
    return 0


def table() -> int:
    """Print the report of what is kept."""
    with unpacked(KEPT) as folder:
        return int(command(["report", str(folder / NAME), "--out", str(OUT / "report")]) or 0)


if __name__ == "__main__":
    sys.exit(main())
