"""Fingerprints of the lists that other tools' own code makes, which the tests hold fixed.

Nothing of those tools is in this repository. Where one is at hand, this prints its fingerprints:

    python tests/datamodules/published_splits.py flwr          # flwr-datasets is installed
    python tests/datamodules/published_splits.py pfllib     FOLDER/dataset/utils/dataset_utils.py
    python tests/datamodules/published_splits.py fl-bench   FOLDER/data/utils/schemes/dirichlet.py
    python tests/datamodules/published_splits.py niid-bench FOLDER/utils.py

It needs NumPy only, and runs in that tool's environment.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CLIENTS = 8
VALUES_SEED = 5
# Clients of four classes each, of the tool that needs a multiple of the classes.
BUCKETS = 4


def labels_of(name: str) -> Any:
    """One of three label vectors: alike classes, drawn ones, and skewed ones in mixed order."""
    r = np.random.RandomState(7)
    if name == "even":
        return np.arange(600) % 10
    if name == "drawn":
        return r.randint(0, 10, 1000)
    return (r.geometric(0.35, 900).clip(1, 6) - 1)[r.permutation(900)]


LABELS = ("even", "drawn", "skewed")


def values_of(name: str) -> Any:
    return np.random.RandomState(VALUES_SEED).normal(size=len(labels_of(name)))


def groups_of(name: str) -> list[str]:
    return [f"p{g}" for g in np.random.RandomState(3).randint(0, 19, len(labels_of(name)))]


def array_of(classes: int) -> Any:
    """Amounts of two clients a class with four classes each."""
    return np.random.RandomState(11).lognormal(0, 2, (classes, 2 * BUCKETS))


def fingerprint(clients: Any) -> str:
    """Sixteen hexadecimal digits of lists of positions, or of pairs of lists."""
    state = hashlib.sha256()
    for own in clients:
        for part in own if isinstance(own, tuple) else (own,):
            state.update(len(part).to_bytes(8, "little"))
            state.update(np.asarray(part, np.int64).tobytes())
    return state.hexdigest()[:16]


def function(path: str, name: str, beside: dict[str, Any]) -> Any:
    """One function of a file, with the names that it uses; its file's imports are not run."""
    tree = ast.parse(Path(path).read_text("utf-8"))
    (found,) = [node for node in tree.body if getattr(node, "name", "") == name]
    exec(compile(ast.Module([found], []), path, "exec"), beside)
    return beside[name]


def silent(*_: object, **__: object) -> None:
    pass


def of_pfllib(path: str) -> Iterator[tuple[str, str]]:
    """The positions stand for the samples themselves."""
    known: dict[str, Any] = {"np": np, "print": silent}
    known |= {"batch_size": 10, "train_ratio": 0.75, "alpha": 0.5}
    separate = function(path, "separate_data", known)
    from sklearn.model_selection import train_test_split

    known |= {"train_test_split": train_test_split}
    cut = function(path, "split_data", known)
    kinds = {
        "dir": {"partition": "dir", "balance": True},
        "pat": {"partition": "pat", "balance": True, "class_per_client": 2},
        "pat-drawn": {"partition": "pat", "balance": False, "class_per_client": 2},
    }
    for name in LABELS:
        y = labels_of(name)
        classes = len(np.unique(y))
        for kind, options in kinds.items():
            for seed in (1, 2):
                np.random.seed(seed)
                data = (np.arange(len(y)), y)
                lists, of, _ = separate(data, CLIENTS, classes, niid=True, **options)
                yield f"{kind} {name} {seed}", fingerprint(lists)
                train, test = cut(lists, of)
                pairs = [(a["x"], b["x"]) for a, b in zip(train, test, strict=True)]
                yield f"{kind} {name} {seed} tested", fingerprint(pairs)


def of_fl_bench(path: str) -> Iterator[tuple[str, str]]:
    typing = {"Any": Any, "Dict": dict, "Set": set}
    dirichlet = function(path, "dirichlet", {"np": np, "Counter": Counter, **typing})
    for name in LABELS:
        y = labels_of(name)
        for seed in (1, 2):
            np.random.seed(seed)
            found: dict[str, Any] = {}
            stats: dict[Any, Any] = {i: {"x": 0, "y": {}} for i in range(CLIENTS)}
            classes = set(range(len(np.unique(y))))
            dirichlet(y, np.arange(len(y)), classes, CLIENTS, 0.5, 10, found, stats)
            lists = found["data_indices"]
            yield f"dir {name} {seed}", fingerprint(lists)
            pairs = []
            # These three lines are the rule of its generate_data.py, with test_ratio 0.25.
            for own in lists:
                np.random.shuffle(own)
                pairs.append((own[int(len(own) * 0.25) :], own[: int(len(own) * 0.25)]))
            yield f"dir {name} {seed} tested", fingerprint(pairs)


def of_niid_bench(path: str) -> Iterator[tuple[str, str]]:
    """It has ten classes, whatever the data, each of which needs a client."""
    m = 12
    known: dict[str, Any] = {"np": np, "random": random, "mkdirs": silent, "print": silent}
    known["record_net_data_stats"] = silent
    for name in ("even", "drawn"):
        y = labels_of(name)
        known["load_mnist_data"] = lambda *_, y=y: (y, y, y, y)
        partition = function(path, "partition_data", known)
        for kind in ("noniid-labeldir", "noniid-#label2", "noniid-#label3"):
            for seed in (1, 2):
                np.random.seed(seed)
                random.seed(seed)
                found = partition("mnist", "", "", kind, m, beta=0.5)[4]
                lists = [found[i] for i in range(m)]
                yield f"{kind.removeprefix('noniid-')} {name} {seed}", fingerprint(lists)


def of_flwr(_: str) -> Iterator[tuple[str, str]]:
    import datasets
    from flwr_datasets import partitioner as flwr

    m = CLIENTS
    for name in LABELS:
        y = labels_of(name)
        classes = len(np.unique(y))
        columns = {"y": y, "v": values_of(name), "g": groups_of(name), "at": np.arange(len(y))}
        data = datasets.Dataset.from_dict(columns)
        for s in (1, 2):
            by = {"partition_by": "y", "seed": s}
            sizes = [30 + i for i in range(m)]
            kinds = {
                "dir": flwr.DirichletPartitioner(m, alpha=0.5, **by),
                "dir-balanced": flwr.DirichletPartitioner(m, alpha=0.3, self_balancing=True, **by),
                "pat": flwr.PathologicalPartitioner(m, num_classes_per_partition=2, **by),
                "shards": flwr.ShardPartitioner(m, num_shards_per_partition=2, **by),
                "shards-of-20": flwr.ShardPartitioner(
                    m, shard_size=20, keep_incomplete_shard=True, **by
                ),
                "inner": flwr.InnerDirichletPartitioner(sizes, alpha=0.3, **by),
                "values": flwr.ContinuousPartitioner(m, "v", strictness=0.6, seed=s),
                "buckets": flwr.DistributionPartitioner(
                    array_of(classes), 2 * classes, BUCKETS, "y", 2, seed=s
                ),
                "linear": flwr.LinearPartitioner(m),
                "square": flwr.SquarePartitioner(m),
                "exponential": flwr.ExponentialPartitioner(m // 2),
                "sizes": flwr.SizePartitioner(sizes),
            }
            for mode in ("deterministic", "first-deterministic"):
                kinds[f"pat-{mode}"] = flwr.PathologicalPartitioner(
                    m, num_classes_per_partition=3, class_assignment_mode=mode, **by
                )
            for mode in ("allow-smaller", "allow-bigger", "drop-reminder"):
                kinds[f"grouped-{mode}"] = flwr.GroupedNaturalIdPartitioner("g", 4, mode)
            kinds["grouped-sorted"] = flwr.GroupedNaturalIdPartitioner("g", 4, sort_unique_ids=True)
            for kind, made in kinds.items():
                made.dataset = data
                lists = [made.load_partition(i)["at"][:] for i in range(made.num_partitions)]
                yield f"{kind} {name} {s}", fingerprint(lists)


TOOLS = {
    "flwr": of_flwr,
    "pfllib": of_pfllib,
    "fl-bench": of_fl_bench,
    "niid-bench": of_niid_bench,
}

if __name__ == "__main__":
    print(json.dumps(dict(TOOLS[sys.argv[1]](*sys.argv[2:3] or [""])), indent=0))
