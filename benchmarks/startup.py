"""``python -m benchmarks.startup``: what a command costs before its first round.

Processor seconds (user and system, with all threads and children) of whole commands, in turns with
the bare ``import torch, pytorch_lightning``: a round of the digits, and a typing error's paragraph.
Medians over the turns; a first turn, not counted, writes the byte code, which an installation has.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

OPTIONS = ["-m", "fl_lightning", "fit", "-c", "base", "-c", "data/digits"]
COMMANDS = {
    "import": ["-c", "import torch, pytorch_lightning"],
    "fit": [*OPTIONS, "--trainer.max_epochs", "1"],
    "error": [*OPTIONS, "--trainer.max_epoch", "1"],
    "help": ["-m", "fl_lightning", "fit", "--help"],
}
STATUS = {"error": 2}


def processor_seconds(name: str, cache: Path) -> float:
    """Of the command ``name``, run once."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, *COMMANDS[name]]
        if name == "fit":
            argv += ["--trainer.default_root_dir", f"{folder}/run"]
        status = subprocess.run(argv, env=environment, capture_output=True).returncode
    if status != STATUS.get(name, 0):
        raise SystemExit(f"{name} ended with status {status}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", type=Path, default=Path("startup.json"))
    given = parser.parse_args()
    if given.turns < 1:
        parser.error("--turns has to be at least 1")
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as cache:
        for turn in range(given.turns + 1):
            for name, taken in seconds.items():
                value = processor_seconds(name, Path(cache))
                if turn:
                    taken.append(value)
            given.json.write_text(json.dumps(seconds, indent=1) + "\n")
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, median in medians.items():
        print(f"{name:<8}{median:6.2f} s   {median / medians['import']:.2f} × the import")
    bound = 1.25 * medians["import"] + 1.0
    print(f"fit may take 1.25 × the import + 1 s = {bound:.2f} s; an error's paragraph 1.1 ×")


if __name__ == "__main__":
    main()
