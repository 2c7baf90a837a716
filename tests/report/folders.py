"""Folders of runs made by hand: what ``fl-lightning report`` reads, with numbers that are known."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Values = Sequence[float | None]


def make_run(
    folder: Path,
    arm: str | None,
    seed: int,
    columns: Mapping[str, Values],
    status: str = "done",
    partition: str | None = None,
    rounds: Sequence[int] | None = None,
    **record: Any,
) -> Path:
    """A run with these ``columns``; None is an empty cell."""
    folder.mkdir(parents=True)
    length = max(map(len, columns.values()), default=0)
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["round", *columns])
        for t in range(length):
            cells = [column[t] if t < len(column) else None for column in columns.values()]
            writer.writerow(
                [t if rounds is None else rounds[t], *("" if c is None else repr(c) for c in cells)]
            )
    content = {
        "status": status,
        "seed": seed,
        "arm": arm,
        "title": "FedAvg",
        "partition_hash": partition or f"split-{seed}",
        "config_hash": "c",
        "claims_hash": None,
        "rounds": length,
        "command": ["fl-lightning", "fit"],
        "versions": {},
    }
    (folder / "run.json").write_text(json.dumps({**content, **record}))
    return folder


def make_arm(
    parent: Path, arm: str, levels: Mapping[int, float], metric: str = "val/acc", **record: Any
) -> list[Path]:
    """Runs of one arm whose metric is ``levels[seed]`` in each of 20 rounds."""
    return [
        make_run(parent / arm / f"seed-{seed}", arm, seed, {metric: [level] * 20}, **record)
        for seed, level in levels.items()
    ]


def report(out: Path, *argv: object, figures: str = "none") -> dict[str, Any]:
    """report.json that the command writes to ``out``. Drawing takes longest: who needs it asks."""
    from fl_lightning.__main__ import main

    words = [*map(str, argv), "--figures", figures, "--out", str(out)]
    assert main(["report", *words]) == 0
    found: dict[str, Any] = json.loads((out / "report.json").read_text())
    return found
