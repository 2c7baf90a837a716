"""``python -m benchmarks.frozen_base``: LoRA over a base of real size, in seconds and memory.

Decoders of OPT-125M's shape and of about a billion parameters, random weights, base in bfloat16,
LoRA of rank 8 beside the query and value projections, clients that take one step of one text. For
each number of workers a process of its own prints D, the size of the base, the seconds of a round,
and the most memory of the whole fit, with what is tried before round 0. A page that n processes
share counts as 1/n of it in each (PSS), and threads share all, so a base that is held once counts
once. ``--dropout`` gives the adapters dropout, which draws random numbers: workers are processes
then.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from benchmarks.cores import Memory
from benchmarks.workloads import quiet_trainer
from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.models import CausalLanguageModel

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "opt125m": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "dropout": 0.0,
    },
    # TinyLlama's.
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}


class Clock(pl.Callback):
    """Seconds of each round, by the clock and of all processors."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.of_processors: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self.began = time.perf_counter()
        self.used = sum(os.times()[:4])

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.began)
        self.of_processors.append(sum(os.times()[:4]) - self.used)


def measured(shape: str, workers: int, given: dict[str, Any]) -> dict[str, Any]:
    """A fit of few rounds with so many workers, in this process."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    clients = max(given["clients"], workers)
    lora = {"r": 8, "target_modules": ["q_proj", "v_proj"], "lora_dropout": given["dropout"]}
    config = {"model_type": "llama", **SHAPES[shape]}
    with Memory() as memory:
        learner = CausalLanguageModel(config=config, lora=lora, base_dtype=given["base_dtype"])
        base = [p for p in learner.parameters() if not p.requires_grad]
        tokens = torch.randint(3, 1000, (clients, given["length"] + 1))
        data = InMemoryDataModule(
            (tokens, torch.full((clients,), -1)), num_clients=clients, batch_size=1
        )
        module = FederatedModule(
            learner,
            participation="all",
            local_steps=1,
            seed=0,
            engine="concurrent",
            workers=workers,
        )
        clock = Clock()
        trainer = quiet_trainer(given["rounds"], [clock])
        built = memory.most_mb
        trainer.fit(module, data)
    return {
        "D": module.layout.size,
        "parameters": sum(p.numel() for p in base),
        "base MB": sum(p.numel() * p.element_size() for p in base) / 2**20,
        "clients": clients,
        "seconds": statistics.median(clock.seconds[1:] or clock.seconds),
        "processor seconds": statistics.median(clock.of_processors[1:] or clock.of_processors),
        "built MB": built,
        "MB": memory.most_mb,
        "forked": memory.workers,
        "engine": module.engine_facts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frozen_base", description=__doc__)
    parser.add_argument("shapes", nargs="*", default=["opt125m", "1b"])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clients", type=int, default=2, help="at least; one for each worker")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--base_dtype", default="bfloat16")
    parser.add_argument("--json", type=Path, default=Path("frozen_base.json"))
    given = parser.parse_args()
    if unknown := sorted(set(given.shapes) - set(SHAPES)):
        parser.error(f"unknown shape {unknown[0]}; known are {', '.join(SHAPES)}")
    options = {
        name: getattr(given, name)
        for name in ("clients", "length", "rounds", "dropout", "base_dtype")
    }
    results: dict[str, Any] = {}
    alone = multiprocessing.get_context("spawn")
    columns = ("D", "base, MB", "workers", "clients", "seconds a round", "of processors")
    print(f"| | {' | '.join(columns)} | memory, MB | forked |")
    print("|---|---|---|---|---|---|---|---|---|")
    for shape in given.shapes:
        for workers in given.workers:
            with alone.Pool(1) as pool:
                facts = pool.apply(measured, (shape, workers, options))
            results[f"{shape}, {workers}"] = facts
            print(
                f"| {shape} | {facts['D']:,} | {facts['base MB']:,.0f} | {workers} "
                f"| {facts['clients']} | {facts['seconds']:.2f} "
                f"| {facts['processor seconds']:.1f} | {facts['MB']:,.0f} "
                f"| {facts['forked']} |",
                flush=True,
            )
            given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
