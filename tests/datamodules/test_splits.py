"""Splits of other tools, by shares, mixed, imported and of pooled data.

The fingerprints beside this file were made by the tools' own code (flwr-datasets 0.6.1, PFLlib at
d832e76f6a23, FL-bench at 06e658bca5af and NIID-Bench at 61b901ab645e, NumPy 2.4.6, scikit-learn
1.9.1), with ``published_splits.py`` of this repository's history (bfc259b7); FL-Simulator's at
502bec655701, by its ``DatasetObject`` with these labels in place of MNIST's.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning import datamodules as dm
from fl_lightning.datamodules.partitions.split_summary import gini
from fl_lightning.sampling import generator

CLIENTS = 8
VALUES_SEED = 5
# Clients of four classes each, of the tool that needs a multiple of the classes.
BUCKETS = 4


def labels_of(name: str) -> Any:
    """One of two label vectors: drawn classes, and skewed ones in mixed order."""
    r = np.random.RandomState(7)
    if name == "drawn":
        return r.randint(0, 10, 1000)
    return (r.geometric(0.35, 900).clip(1, 6) - 1)[r.permutation(900)]


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


PUBLISHED: dict[str, dict[str, str]] = json.loads(
    Path(__file__).with_suffix(".json").read_text("utf-8")
)
CASES = [(tool, case) for tool, cases in PUBLISHED.items() for case in cases]


def of_flwr(kind: str, name: str, seed: int) -> tuple[dm.Partition, int]:
    """The same split in our words, and its number of clients."""
    (kind, _, mode) = kind.partition("-")
    classes = len(np.unique(labels_of(name)))
    sizes = [30 + i for i in range(CLIENTS)]
    of: dict[str, Any] = {"tool_seed": seed}
    if kind == "grouped":
        order: Any = "sorted" if mode == "sorted" else "seen"
        modes: Any = {"sorted": "allow-smaller", "drop-reminder": "drop-remainder"}
        made = dm.Grouped(4, modes.get(mode, mode), order, groups_of(name))
        return made, made.clients or 0
    if kind == "buckets":
        return dm.LabelBuckets(array_of(classes).tolist(), BUCKETS, 2, **of), 2 * classes
    if kind == "exponential":
        return dm.Sizes("exponential"), CLIENTS // 2
    rules: dict[str, dm.Partition] = {
        "dir": dm.DirichletByClass(0.5, **of),
        "pat": dm.LabelsPerClient(2, "flwr", **of),
        "shards": dm.Shards(2, **of),
        "inner": dm.InnerDirichlet(sizes, 0.3, **of),
        "values": dm.ByValue(values_of(name).tolist(), strictness=0.6, **of),
        "linear": dm.Sizes("linear"),
        "square": dm.Sizes("square"),
        "sizes": dm.Sizes(sizes),
    }
    if mode == "balanced":
        return dm.DirichletByClass(0.3, balance=True, **of), CLIENTS
    if mode == "of-20":
        return dm.Shards(None, 20, keep_incomplete=True, **of), CLIENTS
    if mode:
        given: Any = mode
        return dm.LabelsPerClient(3, "flwr", mode=given, **of), CLIENTS
    return rules[kind], CLIENTS


def ours(tool: str, case: str) -> tuple[dm.Partition, str, int]:
    (kind, name, seed, *tested) = case.split()
    of: dict[str, Any] = {"tool_seed": int(seed), "test_share": 0.25 if tested else 0.0}
    source: Any = tool
    if tool == "flwr":
        made, clients = of_flwr(kind, name, int(seed))
        return made, name, clients
    if tool == "fl-simulator":
        rule: Any = {"dir": {"alpha": 0.3}, "dir-small": {"alpha": 0.05}, "pat": {"classes": 3}}
        dealt = dm.DealtByShares(**rule[kind], tool_seed=int(seed))
        return dealt, name, 7 if kind == "dir-small" else CLIENTS
    if tool == "niid-bench" and kind != "labeldir":
        return dm.LabelsPerClient(int(kind[-1]), source, **of), name, 12
    if kind.startswith("pat"):
        return dm.LabelsPerClient(2, balance=kind == "pat", **of), name, CLIENTS
    return dm.DirichletByClass(0.5, source, **of), name, 12 if tool == "niid-bench" else CLIENTS


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tool", "case"), CASES, ids=[f"{t}-{c}" for t, c in CASES])
def test_lists_are_those_of_the_published_code(tool: str, case: str) -> None:
    partition, name, clients = ours(tool, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = partition.split(labels_of(name), clients, seed=99)
    assert fingerprint(found) == PUBLISHED[tool][case]


ANY: Any = str
Y = np.random.RandomState(0).randint(0, 4, 240)
X = np.arange(480, dtype=np.float32).reshape(240, 2)
TOLD = pytest.mark.filterwarnings("ignore:.*training samples belong to no client")


def data(partition: dm.Partition, **given: Any) -> InMemoryDataModule:
    tests = (X[:60] + 1000, Y[:60])
    return InMemoryDataModule((X, Y), test=tests, partition=partition, seed=1, **given)


@TOLD
@pytest.mark.parametrize(
    "partition",
    [
        dm.DirichletByClass(0.5),
        dm.DirichletByClass([1.0, 2.0, 3.0, 1.0], "pfllib"),
        dm.LabelsPerClient(2),
        dm.LabelsPerClient(2, "niid-bench"),
        dm.LabelsPerClient(2, "flwr"),
        dm.Shards(2),
        dm.Sizes([10, 20, 30, 40], shuffle=True),
        dm.ByValue(X[:, 0].tolist(), strictness=0.5),
        dm.LabelShares(np.full((4, 4), 0.25).tolist(), [40, 30, 20, 10]),
        dm.LabelBuckets(np.ones((4, 2)).tolist(), 2),
        dm.InnerDirichlet([20, 30, 40, 50], [[0.3] * 4] * 4),
        dm.Mixed(0.5, dm.LabelsPerClient(1)),
    ],
    ids=lambda partition: type(partition).__name__,
)
def test_a_split_follows_its_seed_and_each_sample_has_one_client(partition: dm.Partition) -> None:
    one, same = (partition.split(Y, 4, 5) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    other = partition.split(Y, 4, 6)
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True)) or isinstance(
        partition, dm.LabelsPerClient | dm.ByValue
    )
    every = np.concatenate(list(one))
    assert len(np.unique(every)) == len(every) and len(one) == 4


def test_a_class_that_is_dealt_begins_again_and_all_clients_have_equal_numbers() -> None:
    made = dm.DealtByShares(classes=1)
    one, same, other = (made.split(Y, 7, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert [len(own) for own in one] == [36] + [34] * 6
    held = np.bincount(np.concatenate(one), minlength=len(Y))
    for label in range(4):
        # Each sample of a class has its turn before any of them has a second one.
        times = held[label == Y]
        assert times.max() - times.min() <= 1
    assert all(len(np.unique(Y[own])) == 1 for own in one)


def test_shares_give_their_numbers_of_each_class() -> None:
    shares = [[0.5, 0.5, 0, 0], [0, 0.1, 0.2, 0.7], [0.25, 0.25, 0.25, 0.25]]
    sizes = [21, 30, 7]
    clients = dm.LabelShares(shares, sizes).split(Y, 3, 0)
    counts = [np.bincount(Y[own], minlength=4).tolist() for own in clients]
    # Remainders of one half: the lower class.
    assert counts == [[11, 10, 0, 0], [0, 3, 6, 21], [2, 2, 2, 1]]
    stock = generator(0, "partition-stock", 0).permutation(np.flatnonzero(Y == 0))
    assert clients[0][:11].tolist() == stock[:11].tolist()
    with pytest.raises(UserError, match=r"want 100 samples of class 0, and there are \d+"):
        dm.LabelShares([[1, 0, 0, 0]], [100]).split(Y, 1, 0)


def test_a_mixture_has_both_parts() -> None:
    clients = dm.Mixed(0.25, dm.LabelsPerClient(1)).split(Y, 4, 3)
    even = generator(3, "partition-mixed").permutation(240)[:60]
    for i, own in enumerate(clients):
        assert own[-15:].tolist() == even[15 * i : 15 * (i + 1)].tolist()
        assert len(np.unique(Y[own[:-15]])) == 1
    assert [len(own) for own in dm.Mixed(1, dm.IID()).split(Y, 4, 3)] == [60] * 4


# ---- pooled


@pytest.mark.parametrize("kind", ["tensors", "datasets"])
def test_pooled_data_are_training_data_followed_by_test_data(kind: str) -> None:
    partition = dm.DirichletByClass(1.0, "pfllib", tool_seed=1, test_share=0.25)
    made: Any
    if kind == "tensors":
        made = data(partition, num_clients=4, pooled=True)
    else:
        sets = [TensorDataset(torch.from_numpy(x), torch.from_numpy(Y[: len(x)])) for x in (X, X)]
        sets[1] = TensorDataset(torch.from_numpy(X[:60] + 1000), torch.from_numpy(Y[:60]))
        made = dm.FromDatasets(
            sets[0], test=sets[1], partition=partition, num_clients=4, pooled=True, seed=1
        )
    expected = partition.split(np.concatenate([Y, Y[:60]]), 4, 1)
    for i, (train, test) in enumerate(expected):
        assert made.client_indices(i).tolist() == train.tolist()
        assert made.client_test_indices(i).tolist() == test.tolist()
    every = np.sort(np.concatenate([test for _, test in expected]))
    pool = np.concatenate([X, X[:60] + 1000])
    (batch,) = list(made.test_dataloader())
    assert np.array_equal(batch[0].numpy(), pool[every])
    assert len(made.client_dataset(0)) == len(expected[0][0])
    held, _ = next(iter(made.full_batches(0, what="test", size=1000)))
    assert np.array_equal(held[0].numpy(), pool[expected[0][1]])
    assert "pooled" in made.card()["data"] and made.card()["test samples"] == "by the split"


def test_pooled_data_may_hold_a_share_out() -> None:
    made = data(dm.IID(), num_clients=3, pooled=True, client_test_fraction=0.2)
    made.setup()
    assert made.client_sizes().tolist() == [80] * 3 and len(made.test_set or ()) == 60
    with pytest.raises(UserError, match=r"test_share=0.25 .*client_test_fraction=0.25"):
        data(dm.IID(), num_clients=3, pooled=True).setup()
    with pytest.raises(UserError, match="InMemoryDataModule has no test data"):
        InMemoryDataModule((X, Y), pooled=True, num_clients=3).setup()
    split = dm.DirichletByClass(1.0, "pfllib", test_share=0.25)
    with pytest.raises(UserError, match="Leave client_test_fraction"):
        data(split, num_clients=3, client_test_fraction=0.2).setup()


class Pairs(dm.Partition):
    """Client i trains on every third sample, and is tested on one more."""

    needs_labels = False

    def split(self, labels: Any, num_clients: int, seed: int) -> Any:
        return [(np.arange(i, 200, 3), np.array([200 + i, 210 + i])) for i in range(num_clients)]


def test_a_partition_of_ones_own_gives_pairs_and_is_saved_with_them(tmp_path: Path) -> None:
    made = data(Pairs(), num_clients=3)
    assert made.client_test_indices(1).tolist() == [201, 211]
    made.save_partition(tmp_path / "split.npz")
    again = data(dm.Saved(tmp_path / "split.npz"))
    assert again.client_test_indices(2).tolist() == [202, 212]
    assert again.partition_hash == made.partition_hash


# ---- groups and imported lists


def test_bunches_of_the_datas_groups_are_named_by_them() -> None:
    people = ["carl", "anna", "ben", "dora", "carl"] * 48
    made = data(dm.Grouped(2, groups=people))
    made.setup()
    assert list(made.client_names) == ["carl+anna", "ben+dora"]
    assert made.client_indices(0)[:3].tolist() == [0, 4, 5]
    sorted_ones = data(dm.Grouped(3, order="sorted", groups=people))
    sorted_ones.setup()
    assert list(sorted_ones.client_names) == ["anna+ben+carl", "dora"]
    with pytest.raises(UserError, match=r"4 groups cannot be divided .* mode='strict'"):
        data(dm.Grouped(3, "strict", groups=people)).setup()


class OfThreePeople(InMemoryDataModule):
    """Data that bring their own clients."""

    def load(self) -> None:
        super().load()
        self.groups = np.arange(240) % 3


def test_a_mixture_takes_the_datas_own_clients() -> None:
    made = OfThreePeople((X, Y), partition=dm.Mixed(0.25, dm.ByGroup()))
    assert made.num_clients == 3
    for client in range(3):
        own = made.client_indices(client) % 3
        assert (own[:50] == client).all() and len(set(own)) == 3


FORMS: dict[str, Any] = {
    "list": [[0, 1, 2], [3, 4], [6]],
    "map": {"10": [6], "9": [3, 4], "1": [0, 1, 2]},
    "pairs": {"0": {"train": [0, 1, 2], "test": [5]}, "1": {"train": [3, 4]}, "2": [6]},
    "npz": [[0, 1, 2], [3, 4], [6]],
}


@pytest.mark.filterwarnings("ignore:.*belong to no client")
@pytest.mark.parametrize("form", FORMS)
def test_lists_of_another_tool_are_read(form: str, tmp_path: Path) -> None:
    path = tmp_path / ("lists.npz" if form == "npz" else "lists.json")
    if form == "npz":
        np.savez(path, *map(np.array, FORMS[form]))
    else:
        path.write_text(json.dumps(FORMS[form]))
    made = data(dm.Imported(path))
    assert [made.client_indices(i).tolist() for i in range(3)] == [[0, 1, 2], [3, 4], [6]]
    tests = [made.client_test_indices(i).tolist() for i in range(3)]
    assert tests == ([[5], [], []] if form == "pairs" else [[], [], []])


@pytest.mark.parametrize(
    ("lists", "what"),
    [
        ([[0, 1], [240]], r"client 1 has \[240\] and None of 240 samples"),
        ([[0, -1]], r"client 0 has \[0, -1\]"),
        ([[0, 1.5]], "client 0 has"),
        ([[0, 1, 1]], "client 0 has position 1 twice"),
        ({"a": {"train": [1, 2], "test": [2]}}, "client a has position 2 twice"),
        ({"a": [[1, 2], [3, 4]]}, "client a has"),
        ([[0], []], "cannot be read .*no training samples"),
        (7, "cannot be read"),
    ],
)
def test_lists_that_cannot_be_are_refused_by_file_and_client(
    lists: Any, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "lists.json"
    path.write_text(json.dumps(lists))
    with pytest.raises(UserError, match=rf"lists\.json.*{what}"):
        data(dm.Imported(path)).setup()
    for name, words in (("a.pkl", "are a pickle.*json.dump"), ("gone.json", "cannot be read")):
        with pytest.raises(UserError, match=words):
            dm.Imported(tmp_path / name)


@pytest.mark.parametrize("place", [-1, 240])
def test_a_position_without_a_sample_is_refused_beside_held_out_samples(
    place: int, tmp_path: Path
) -> None:
    path = tmp_path / "lists.json"
    path.write_text(json.dumps([[0, 1, 2, place], list(range(3, 240))]))
    for partition in (dm.Imported(path), dm.Mixed(0.5, dm.Imported(path))):
        with pytest.raises(UserError, match=r"client 0 has .* of 240 samples"):
            data(partition, val_fraction=0.25).setup()


def test_what_is_held_out_leaves_imported_lists(tmp_path: Path) -> None:
    path = tmp_path / "lists.json"
    path.write_text(json.dumps([list(range(120)), list(range(120, 240))]))
    for partition in (dm.Imported(path), dm.Mixed(0.0, dm.Imported(path))):
        made = data(partition, val_fraction=0.25)
        assert made.client_sizes().sum() == 180
        assert made.client_indices(0).max() < 120 <= made.client_indices(1).min()


# ---- refusals, measures


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: dm.DirichletByClass(0.0), "alpha=0.0"),
        (lambda: dm.DirichletByClass(1, ANY("pfllibs")), "source='pfllibs'.*mean 'pfllib'"),
        (lambda: dm.DirichletByClass(1, test_share=0.2), "client_test_fraction=0.2"),
        (lambda: dm.DirichletByClass(1, tool_seed=-1), "tool_seed=-1"),
        (lambda: dm.DirichletByClass(0.01).split(Y, 40, 0), "in 11 tries with alpha=0.01"),
        (lambda: dm.DirichletByClass([1, 2]).split(Y, 3, 0), "alpha has 2 numbers"),
        (lambda: dm.LabelsPerClient(9).split(Y, 3, 0), "classes is 9, but .* have 4"),
        (lambda: dm.DealtByShares(), "needs one of .* alpha and classes: give exactly one"),
        (lambda: dm.DealtByShares(0.1, 2), "needs one of .* alpha and classes: give exactly one"),
        (lambda: dm.DealtByShares(classes=9).split(Y, 3, 0), "classes is 9, but .* have 4"),
        (lambda: dm.Shards(None), "per_client and size are both None"),
        (lambda: dm.Shards(2, 100).split(Y, 3, 0), "need 6 shards of 100 samples"),
        (lambda: dm.Sizes([200, 100]).split(Y, 2, 0), "the sizes are 300 samples"),
        (lambda: dm.Sizes([20, 10]).split(Y, 3, 0), "num_clients is 3, but"),
        (lambda: dm.Sizes("exponential").split(Y, 9, 0), "leaves client 0 0 of 240"),
        (lambda: dm.Sizes(ANY("linea")), "Did you mean 'linear'"),
        (lambda: dm.ByValue(), "ByValue needs one of .* values and column: give exactly one"),
        (lambda: dm.ByValue([1.0] * 240).split(Y, 2, 0), "values are from 1.0 to 1.0"),
        (lambda: dm.ByValue([np.nan] * 240).split(Y, 2, 0), "values are from nan to nan"),
        (lambda: dm.ByValue(values=["a", "b"]), "ByValue's values are not numbers .*'a'"),
        (lambda: dm.ByGroup(["b", None, "a"]), "ByGroup's groups have None for sample 1"),
        (lambda: dm.Grouped(2, groups=[1.0, np.nan]), "Grouped's groups have nan for sample 1"),
        (
            lambda: data(dm.ByGroup()).setup(),
            "groups=None, but InMemoryDataModule brings no groups",
        ),
        (lambda: dm.Sizes(lambda u: 0.0).split(Y, 4, 0), "leaves client"),
        (
            lambda: dm.DirichletByClass(0.01, "fl-bench", min_samples=0).split(Y, 40, 0),
            r"min_samples=0 takes the first split, in which client \d+",
        ),
        (lambda: data(dm.ByValue(column="age"), num_clients=2).setup(), "has no columns"),
        (lambda: dm.LabelShares([[0.5, 0.4]]), "with the sum 1"),
        (
            lambda: dm.LabelBuckets([[1.0] * 2] * 4, 2).split(Y, 6, 0),
            "4 classes need a multiple of 4 clients",
        ),
        (lambda: dm.LabelBuckets([[1.0] * 3] * 4, 2).split(Y, 4, 0), r"an array \(4, 2\)"),
        (lambda: dm.InnerDirichlet([200, 100], 1.0).split(Y, 2, 0), "the sizes are 300"),
        (lambda: dm.InnerDirichlet([20], [1.0]).split(Y, 1, 0), r"alpha has the shape \(1,\)"),
        (lambda: dm.Mixed(1.5, dm.IID()), "iid=1.5"),
        (lambda: dm.Grouped(2).split(Y, 2, 0), "brings no groups"),
    ],
)
def test_splits_that_cannot_be_are_refused_by_name(make: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        make()


def test_sizes_follow_a_function_of_the_client_s_place() -> None:
    sizes = [len(own) for own in dm.Sizes(math.sqrt).split(np.arange(100), 4, 0)]
    assert sizes == [16, 23, 28, 33]
    assert repr(dm.Sizes(math.sqrt)) == "Sizes(sizes=sqrt)" and "0x" not in repr(
        dm.Sizes(lambda u: u)
    )


def test_measures_compare_two_splits() -> None:
    sizes = np.array([1, 2, 3, 10])
    every = np.abs(sizes[:, None] - sizes).sum() / (2 * 16 * sizes.mean())
    assert gini(sizes) == pytest.approx(every)
    made = data(dm.LabelsPerClient(1), num_clients=4)
    measured = made.partition_measures()
    assert measured["effective_classes"] == 1.0 and measured["total_variation"] > 0.7
    assert "effective number of classes: 1.00 of 4" in made.partition_table()


def test_the_picture_has_sizes_and_names() -> None:
    given: Any = {"anna": list(range(100)), "ben": list(range(100, 240))}
    figure = InMemoryDataModule((X, Y), clients=given).plot_partition()
    axes, _, sizes = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["anna", "ben"]
    assert [bar.get_width() for bar in sizes.patches] == [100, 140]
