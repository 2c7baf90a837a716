"""Personal models on the digits: a table of accuracies by client, means over seeds
(studies/compared.md).

    OMP_NUM_THREADS=1 python -m studies.personal

20 clients, Dirichlet(0.1), a quarter of each client's samples held out, 10 clients a round, 2 local
epochs, batch 10, SGD 0.1, 64-64-10 with layer normalisation, 20 rounds. No method is tuned to this
setting.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.workloads import quiet_trainer
from fl_lightning import FederatedModule
from fl_lightning import callbacks as c
from fl_lightning.callbacks.loggers.per_client_evaluation import summary
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.evaluation.evaluator import Evaluator
from fl_lightning.models import Classifier

METHODS: dict[str, Callable[[], list[Any]]] = {
    "FedAvg": list,
    "FedPer": lambda: [c.PartialAveraging({"last": "never"})],
    "FedRep": lambda: [c.AlternatingHead()],
    "FedBN": lambda: [c.PartialAveraging({"norms": "never"})],
    "Ditto": lambda: [c.ProximalPersonalModel()],
    "pFedMe": lambda: [c.MoreauEnvelope()],
    "local": lambda: [c.PartialAveraging({"all": "never"})],
}
WHAT = ("", "_std", "_worst10")  # all clients have as many samples


def digits(seed: int) -> Any:
    data = Digits(
        num_clients=20,
        partition=Dirichlet(0.1),
        batch_size=10,
        client_test_fraction=0.25,
        seed=seed,
    )
    data.setup()
    return data


def trained(data: Any, callbacks: list[Any], seed: int, rounds: int, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10)
    )
    given = {
        "participation": 0.5,
        "local_epochs": 2,
        "seed": seed,
        "engine": "sequential",
        **arguments,
    }
    module = FederatedModule(Classifier(network, 10, lr=0.1), **given)
    without_validation = {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    quiet_trainer(rounds, callbacks, **without_validation).fit(module, data)
    return module


def at_one_model(module: Any, data: Any) -> dict[str, float]:
    """The evaluated model on each client's own test samples."""
    evaluator = Evaluator(module.export(), module.layout, data)
    owned = {i: data.client_test_indices(i) for i in range(data.num_clients)}
    accuracy = {
        i: evaluator.client(module.evaluated_vector.detach(), i, own, "validation_step")["val/acc"]
        for i, own in owned.items()
        if len(own)
    }
    return summary(accuracy, {i: len(own) for i, own in owned.items()}, greater=True)


def scores(seed: int, rounds: int) -> dict[str, dict[str, float]]:
    """``{row of the table: {"": mean over clients, …}}`` of one seed."""
    found = {}
    for name, methods in METHODS.items():
        seen = c.PerClientEvaluation(finetune_epochs=1 if name == "FedAvg" else 0)
        module = trained(digits(seed), [*methods(), seen], seed, rounds)
        for metric, values in seen.table.items():
            if metric.startswith("acc"):
                row = name + ", 1 epoch of fine-tuning" * metric.endswith("_finetuned")
                found[row] = summary(values, seen.samples, greater=True)
        if name in ("FedPer", "FedRep"):
            found[f"{name}, the mean of the heads"] = at_one_model(
                module, module.trainer.datamodule
            )
    data = digits(seed)
    pooled = np.concatenate([data.client_indices(i) for i in range(data.num_clients)])
    alone = Digits(clients=[pooled], batch_size=10, seed=seed)
    found["central"] = at_one_model(trained(alone, [], seed, rounds, participation="all"), data)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        runs = pool.starmap(
            scores, [(seed, options.rounds) for seed in range(options.seeds)], chunksize=1
        )
    print("| | mean over clients, % | deviation over clients | worst 10 % |\n|---|---|---|---|")
    for row in sorted(runs[0], key=lambda row: -sum(run[row][""] for run in runs)):
        values = [[100 * run[row][what] for run in runs] for what in WHAT]
        cells = [f"{statistics.mean(v):.1f} ± {statistics.pstdev(v):.1f}" for v in values]
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
