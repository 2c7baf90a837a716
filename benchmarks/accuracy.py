"""Every packaged method on Fashion-MNIST, alone and with relaxed initialization: a table with means
over seeds.

    OMP_NUM_THREADS=1 python -m benchmarks.accuracy --data DIR

100 clients, Dirichlet(0.1) with replacement, 10 a round, 2 local epochs, batch 50; a 784-64-10
network. A run's score is its mean test accuracy over the last 10 rounds. Each run is an ordinary
``fl-lightning fit`` in a forked process.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# what is added to others, has no global model, or needs norms
APART = ("ri", "sam", "byzantine", "fedbn", "local")


def command(method: str, seed: int, data: str, rounds: int, folder: Path) -> list[str]:
    configs = [
        part
        for name in ("base", "data/fashionmnist", *(f"method/{m}" for m in method.split("+")))
        for part in ("-c", name)
    ]
    options = {
        "seed_everything": seed,
        "trainer.max_epochs": rounds,
        "trainer.default_root_dir": folder,
        "model.local_epochs": 2,
        "model.engine": "sequential",
        "model.learner.init_args.network.init_args.sizes": "[784,64,10]",
        "data.root": data,
        "data.partition": "Dirichlet",
        "data.partition.alpha": 0.1,
        "data.partition.replacement": "true",
    }
    return ["fit", *configs, *(f"--{name}={value}" for name, value in options.items())]


def run(arguments: list[str], folder: Path) -> float:
    """Mean accuracy of the last 10 rounds of one run, made unless its folder has it already.

    NaN where it failed.
    """
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        child = os.fork()
        if child == 0:
            log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            from fl_lightning.__main__ import main

            os._exit(main(arguments))
        _, status = os.waitpid(child, 0)
        if status:
            print(
                f"{folder.name}: exit status {os.waitstatus_to_exitcode(status)}, see {folder}.log",
                file=sys.stderr,
            )
            return float("nan")
        (folder / "done").touch()
    with (folder / "metrics.csv").open() as file:
        accuracy = [float(row["val/acc"]) for row in csv.DictReader(file)]
    return statistics.mean(accuracy[-10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True, help="folder with FashionMNIST/raw")
    parser.add_argument("--runs", type=Path, default=Path("runs/accuracy"))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="methods; all without it")
    options = parser.parse_args()
    import torch

    import fl_lightning.lab.cli.cli  # noqa: F401  (imported once, forked often)
    from fl_lightning.lab.cli.compose import packaged

    torch.set_num_threads(1)
    methods = options.only or sorted(n.split("/")[1] for n in packaged() if n.startswith("method/"))
    methods = [m for m in methods if m not in APART]
    names = [name for m in methods for name in (m, *([f"{m}+ri"] if m != "fedinit" else []))]
    jobs = {
        (name, seed): options.runs / f"{name}-{seed}"
        for name in names
        for seed in range(options.seeds)
    }

    def score(job: tuple[str, int]) -> float:
        return run(command(*job, options.data, options.rounds, jobs[job]), jobs[job])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        scores = dict(zip(jobs, pool.map(score, jobs), strict=True))

    def cell(name: str) -> str:
        values = (
            [100 * scores[name, seed] for seed in range(options.seeds)]
            if (name, 0) in scores
            else []
        )
        return (
            f"{statistics.mean(values):.1f} ± {statistics.pstdev(values):.1f}"
            if values
            else "(has it)"
        )

    print("| method | accuracy, % | with `-c method/ri` |\n|---|---|---|")
    for method in methods:
        print(f"| {method} | {cell(method)} | {cell(method + '+ri')} |")


if __name__ == "__main__":
    main()
