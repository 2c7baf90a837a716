"""Splits of other tools, whose own code made the fingerprints that stand beside this file.

They were made by ``published_splits.py`` with flwr-datasets 0.6.1, PFLlib at d832e76f6a23,
FL-bench at 06e658bca5af and NIID-Bench at 61b901ab645e (NumPy 2.4.6, scikit-learn 1.9.1).
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning.datamodules import (
    ByValue,
    DirichletByClass,
    Grouped,
    InnerDirichlet,
    LabelBuckets,
    LabelsPerClient,
    Partition,
    Shards,
    Sizes,
)
from tests.datamodules.published_splits import (
    BUCKETS,
    CLIENTS,
    array_of,
    fingerprint,
    groups_of,
    labels_of,
    values_of,
)

PUBLISHED: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)
CASES = [(tool, case) for tool, cases in PUBLISHED.items() for case in cases]


def of_flwr(kind: str, name: str, seed: int) -> tuple[Partition, int]:
    """The same split in our words, and its number of clients."""
    (kind, _, mode) = kind.partition("-")
    classes = len(np.unique(labels_of(name)))
    sizes = [30 + i for i in range(CLIENTS)]
    of: dict[str, Any] = {"tool_seed": seed}
    if kind == "grouped":
        order: Any = "sorted" if mode == "sorted" else "seen"
        modes: Any = {"sorted": "allow-smaller", "drop-reminder": "drop-remainder"}
        made = Grouped(4, modes.get(mode, mode), order, groups_of(name))
        return made, made.clients or 0
    if kind == "buckets":
        return LabelBuckets(array_of(classes).tolist(), BUCKETS, 2, **of), 2 * classes
    if kind == "exponential":
        return Sizes("exponential"), CLIENTS // 2
    rules: dict[str, Partition] = {
        "dir": DirichletByClass(0.5, **of),
        "pat": LabelsPerClient(2, "flwr", **of),
        "shards": Shards(2, **of),
        "inner": InnerDirichlet(sizes, 0.3, **of),
        "values": ByValue(values_of(name).tolist(), strictness=0.6, **of),
        "linear": Sizes("linear"),
        "square": Sizes("square"),
        "sizes": Sizes(sizes),
    }
    if mode == "balanced":
        return DirichletByClass(0.3, balance=True, **of), CLIENTS
    if mode == "of-20":
        return Shards(None, 20, keep_incomplete=True, **of), CLIENTS
    if mode:
        given: Any = mode
        return LabelsPerClient(3, "flwr", mode=given, **of), CLIENTS
    return rules[kind], CLIENTS


def ours(tool: str, case: str) -> tuple[Partition, str, int]:
    (kind, name, seed, *tested) = case.split()
    of: dict[str, Any] = {"tool_seed": int(seed), "test_share": 0.25 if tested else 0.0}
    source: Any = tool
    if tool == "flwr":
        made, clients = of_flwr(kind, name, int(seed))
        return made, name, clients
    if tool == "niid-bench" and kind != "labeldir":
        return LabelsPerClient(int(kind[-1]), source, **of), name, 12
    if kind.startswith("pat"):
        return LabelsPerClient(2, balance=kind == "pat", **of), name, CLIENTS
    return DirichletByClass(0.5, source, **of), name, 12 if tool == "niid-bench" else CLIENTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tool", "case"), CASES, ids=[f"{t}-{c}" for t, c in CASES])
def test_lists_are_those_of_the_published_code(tool: str, case: str) -> None:
    partition, name, clients = ours(tool, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = partition.split(labels_of(name), clients, seed=99)
    assert fingerprint(found) == PUBLISHED[tool][case]
