"""Splits by shares, mixtures, imported lists and pooled data; what cannot work is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning.datamodules import (
    IID,
    ByGroup,
    ByValue,
    DirichletByClass,
    FromDatasets,
    Grouped,
    Imported,
    InnerDirichlet,
    LabelBuckets,
    LabelShares,
    LabelsPerClient,
    Mixed,
    Partition,
    Saved,
    Shards,
    Sizes,
)
from fl_lightning.datamodules.summaries.split_measures import (
    effective_classes,
    gini,
    total_variation,
)
from fl_lightning.sampling import generator

ANY: Any = str
Y = np.random.RandomState(0).randint(0, 4, 240)
X = np.arange(480, dtype=np.float32).reshape(240, 2)
TOLD = pytest.mark.filterwarnings("ignore:.*training samples belong to no client")


def data(partition: Partition, **given: Any) -> InMemoryDataModule:
    tests = (X[:60] + 1000, Y[:60])
    return InMemoryDataModule((X, Y), test=tests, partition=partition, seed=1, **given)


@TOLD
@pytest.mark.parametrize(
    "partition",
    [
        DirichletByClass(0.5),
        DirichletByClass([1.0, 2.0, 3.0, 1.0], "pfllib"),
        LabelsPerClient(2),
        LabelsPerClient(2, "niid-bench"),
        LabelsPerClient(2, "flwr"),
        Shards(2),
        Sizes([10, 20, 30, 40], shuffle=True),
        ByValue(X[:, 0].tolist(), strictness=0.5),
        LabelShares(np.full((4, 4), 0.25).tolist(), [40, 30, 20, 10]),
        LabelBuckets(np.ones((4, 2)).tolist(), 2),
        InnerDirichlet([20, 30, 40, 50], [[0.3] * 4] * 4),
        Mixed(0.5, LabelsPerClient(1)),
    ],
    ids=lambda partition: type(partition).__name__,
)
def test_a_split_is_a_function_of_the_seed_and_each_sample_has_one_client(
    partition: Partition,
) -> None:
    one, same = (partition.split(Y, 4, 5) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    other = partition.split(Y, 4, 6)
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True)) or isinstance(
        partition, LabelsPerClient | ByValue
    )
    every = np.concatenate(list(one))
    assert len(np.unique(every)) == len(every) and len(one) == 4
    assert eval(repr(partition).split("(")[0]) is type(partition)


def test_shares_give_their_numbers_of_each_class() -> None:
    shares = [[0.5, 0.5, 0, 0], [0, 0.1, 0.2, 0.7], [0.25, 0.25, 0.25, 0.25]]
    sizes = [21, 30, 7]
    clients = LabelShares(shares, sizes).split(Y, 3, 0)
    counts = [np.bincount(Y[own], minlength=4).tolist() for own in clients]
    # Remainders of one half: the lower class.
    assert counts == [[11, 10, 0, 0], [0, 3, 6, 21], [2, 2, 2, 1]]
    stock = generator(0, "partition-stock", 0).permutation(np.flatnonzero(Y == 0))
    assert clients[0][:11].tolist() == stock[:11].tolist()
    with pytest.raises(UserError, match=r"want 100 samples of class 0, and there are \d+"):
        LabelShares([[1, 0, 0, 0]], [100]).split(Y, 1, 0)


def test_a_mixture_has_both_parts() -> None:
    clients = Mixed(0.25, LabelsPerClient(1)).split(Y, 4, 3)
    even = generator(3, "partition-mixed").permutation(240)[:60]
    for i, own in enumerate(clients):
        assert own[-15:].tolist() == even[15 * i : 15 * (i + 1)].tolist()
        assert len(np.unique(Y[own[:-15]])) == 1
    assert [len(own) for own in Mixed(1, IID()).split(Y, 4, 3)] == [60] * 4


# ---- pooled


@pytest.mark.parametrize("kind", ["tensors", "datasets"])
def test_pooled_data_are_training_data_followed_by_test_data(kind: str) -> None:
    partition = DirichletByClass(1.0, "pfllib", tool_seed=1, test_share=0.25)
    made: Any
    if kind == "tensors":
        made = data(partition, num_clients=4, pooled=True)
    else:
        sets = [TensorDataset(torch.from_numpy(x), torch.from_numpy(Y[: len(x)])) for x in (X, X)]
        sets[1] = TensorDataset(torch.from_numpy(X[:60] + 1000), torch.from_numpy(Y[:60]))
        made = FromDatasets(
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
    made = data(IID(), num_clients=3, pooled=True, client_test_fraction=0.2)
    made.setup()
    assert made.client_sizes().tolist() == [80] * 3 and len(made.test_set or ()) == 60
    with pytest.raises(UserError, match=r"test_share=0.25 .*client_test_fraction=0.25"):
        data(IID(), num_clients=3, pooled=True).setup()
    with pytest.raises(UserError, match="InMemoryDataModule has no test data"):
        InMemoryDataModule((X, Y), pooled=True, num_clients=3).setup()
    split = DirichletByClass(1.0, "pfllib", test_share=0.25)
    with pytest.raises(UserError, match="Leave client_test_fraction"):
        data(split, num_clients=3, client_test_fraction=0.2).setup()


class Pairs(Partition):
    """Client i trains on every third sample, and is tested on one more."""

    needs_labels = False

    def split(self, labels: Any, num_clients: int, seed: int) -> Any:
        return [(np.arange(i, 200, 3), np.array([200 + i, 210 + i])) for i in range(num_clients)]


def test_a_partition_of_ones_own_gives_pairs_and_is_saved_with_them(tmp_path: Path) -> None:
    made = data(Pairs(), num_clients=3)
    assert made.client_test_indices(1).tolist() == [201, 211]
    made.save_partition(tmp_path / "split.npz")
    again = data(Saved(tmp_path / "split.npz"))
    assert again.client_test_indices(2).tolist() == [202, 212]
    assert again.partition_hash == made.partition_hash


# ---- groups and imported lists


def test_bunches_of_the_datas_groups_are_named_by_them() -> None:
    people = ["carl", "anna", "ben", "dora", "carl"] * 48
    made = data(Grouped(2, groups=people))
    made.setup()
    assert list(made.client_names) == ["carl+anna", "ben+dora"]
    assert made.client_indices(0)[:3].tolist() == [0, 4, 5]
    sorted_ones = data(Grouped(3, order="sorted", groups=people))
    sorted_ones.setup()
    assert list(sorted_ones.client_names) == ["anna+ben+carl", "dora"]
    with pytest.raises(UserError, match="1 are left over, and mode is 'strict'"):
        data(Grouped(3, "strict", groups=people)).setup()


def test_bunches_are_named_by_the_groups_that_are_left_beside_held_out_samples() -> None:
    people = np.array(["carl", "anna", "ben", "dora", "carl"] * 48)
    for seed in range(5):
        made = InMemoryDataModule(
            (X, Y), partition=Grouped(2, groups=people.tolist()), val_fraction=0.98, seed=seed
        )
        made.setup()
        for client, name in enumerate(made.client_names):
            assert set(name.split("+")) == set(people[made.client_indices(client)])


class OfThreePeople(InMemoryDataModule):
    """Data that bring their own clients."""

    def load(self) -> None:
        super().load()
        self.groups = np.arange(240) % 3


def test_a_mixture_takes_the_datas_own_clients() -> None:
    made = OfThreePeople((X, Y), partition=Mixed(0.25, ByGroup()))
    assert made.num_clients == 3
    for client in range(3):
        own = made.client_indices(client) % 3
        assert (own[:50] == client).all() and len(set(own)) == 3


LISTS = {"train": [[0, 1, 2], [3, 4]], "test": [[5], []]}


def written(path: Path, form: str) -> Path:
    train = LISTS["train"]
    file = path / f"lists.{form}"
    forms: dict[str, Any] = {
        "list.json": train,
        "map.json": {"1": train[1], "0": train[0]},
        "pairs.json": {"0": {"train": train[0], "test": [5]}, "1": {"train": train[1], "test": []}},
        "both.json": LISTS,
    }
    if form in forms:
        file.write_text(json.dumps(forms[form]))
    elif form == "npz":
        np.savez(file, *map(np.array, train))
    else:
        file.mkdir()
        for i, own in enumerate(train):
            if form == "npy":
                np.save(file / f"{i}.npy", own)
            else:
                (file / f"{i}.txt").write_text("\n".join(map(str, own)))
    return file


@pytest.mark.filterwarnings("ignore:.*belong to no client")
@pytest.mark.parametrize(
    "form", ["list.json", "map.json", "pairs.json", "both.json", "npz", "npy", "txt"]
)
def test_lists_of_another_tool_are_read(form: str, tmp_path: Path) -> None:
    made = data(Imported(written(tmp_path, form)))
    assert [made.client_indices(i).tolist() for i in range(2)] == LISTS["train"]
    tests = [made.client_test_indices(i).tolist() for i in range(2)]
    assert tests == (LISTS["test"] if form in ("pairs.json", "both.json") else [[], []])


@pytest.mark.parametrize(
    ("lists", "what"),
    [
        ([[0, 1], [240]], "client 1 has position 240, and there are 240 samples"),
        ([[0, -1]], "client 0 has position -1"),
        ([[0, 1.5]], "client 0 has positions of type float64"),
        ([[0, 1, 1]], "client 0 has position 1 twice in one list"),
        ([[0], []], "client 1 has no training samples"),
        ({"a": {"train": [1, 2], "test": [2]}}, "client a trains on position 2 and is tested"),
        ({"a": [[1, 2], [3, 4]]}, "client a has positions of type int64 and shape"),
        ({"train": [[0], [1]], "test": [[2]]}, "have 2 clients in train and 1 in test"),
        ({"train": [[0]], "test": [[2], [3]]}, "have 1 clients in train and 2 in test"),
        ({"train": {"a": [0]}, "test": {"b": [3]}}, "have 1 clients in train and 1 in test"),
        ({"arr_0": [0], "0": [1]}, "have clients with one name"),
        (7, "have no clients"),
        ({}, "have no clients"),
    ],
)
def test_lists_that_cannot_be_are_refused_by_file_and_client(
    lists: Any, what: str, tmp_path: Path
) -> None:
    path = tmp_path / "lists.json"
    path.write_text(json.dumps(lists))
    with pytest.raises(UserError, match=rf"lists\.json.*{what}"):
        data(Imported(path)).setup()


@pytest.mark.filterwarnings("ignore:.*are of no client")
def test_a_client_may_have_no_test_list(tmp_path: Path) -> None:
    path = tmp_path / "lists.json"
    forms: list[Any] = [
        {"a": {"train": [0], "test": [2]}, "b": {"train": [1]}, "c": [3]},
        {"train": {"a": [0], "b": [1], "c": [3]}, "test": {"a": [2]}},
    ]
    for lists in forms:
        path.write_text(json.dumps(lists))
        made = data(Imported(path))
        assert [made.client_indices(i).tolist() for i in range(3)] == [[0], [1], [3]]
        assert [made.client_test_indices(i).tolist() for i in range(3)] == [[2], [], []]


def test_two_files_of_one_client_are_refused(tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("1")
    np.save(tmp_path / "0.npy", [2])
    with pytest.raises(UserError, match="have two files of client 0"):
        Imported(tmp_path)


@pytest.mark.parametrize("place", [-1, 240])
def test_a_position_without_a_sample_is_refused_beside_held_out_samples(
    place: int, tmp_path: Path
) -> None:
    path = tmp_path / "lists.json"
    path.write_text(json.dumps([[0, 1, 2, place], list(range(3, 240))]))
    for partition in (Imported(path), Mixed(0.5, Imported(path))):
        with pytest.raises(UserError, match=f"client 0 has position {place}"):
            data(partition, val_fraction=0.25).setup()


def test_files_that_hold_no_lists_are_refused(tmp_path: Path) -> None:
    for name, what in (
        ("a.pkl", "are a pickle.*json.dump"),
        ("gone.json", "are not there"),
        ("b.json", "cannot be read"),
        ("b.csv", "unknown kind"),
    ):
        if name[0] == "b":
            (tmp_path / name).write_text("[[1, 2")
        with pytest.raises(UserError, match=what):
            Imported(tmp_path / name)


def test_what_is_held_out_leaves_imported_lists(tmp_path: Path) -> None:
    path = tmp_path / "lists.json"
    path.write_text(json.dumps([list(range(120)), list(range(120, 240))]))
    for partition in (Imported(path), Mixed(0.0, Imported(path))):
        made = data(partition, val_fraction=0.25)
        assert made.client_sizes().sum() == 180
        assert made.client_indices(0).max() < 120 <= made.client_indices(1).min()


# ---- refusals, measures


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: DirichletByClass(0.0), "alpha=0.0"),
        (lambda: DirichletByClass(1, ANY("pfllibs")), "source='pfllibs'.*mean 'pfllib'"),
        (lambda: DirichletByClass(1, test_share=0.2), "client_test_fraction=0.2"),
        (lambda: DirichletByClass(1, tool_seed=-1), "tool_seed=-1"),
        (lambda: DirichletByClass(0.01).split(Y, 40, 0), "in 11 tries with alpha=0.01"),
        (lambda: DirichletByClass([1, 2]).split(Y, 3, 0), "alpha has 2 numbers"),
        (lambda: LabelsPerClient(9).split(Y, 3, 0), "classes is 9, but .* have 4"),
        (lambda: Shards(None), "per_client and size are both None"),
        (lambda: Shards(2, 100).split(Y, 3, 0), "need 6 shards of 100 samples"),
        (lambda: Sizes([200, 100]).split(Y, 2, 0), "the sizes are 300 samples"),
        (lambda: Sizes([20, 10]).split(Y, 3, 0), "num_clients is 3, but"),
        (lambda: Sizes("exponential").split(Y, 9, 0), "leaves client 0 0 of 240"),
        (lambda: Sizes(ANY("linea")), "Did you mean 'linear'"),
        (lambda: ByValue(), "values, one number per training sample, or column"),
        (lambda: ByValue([1.0] * 240).split(Y, 2, 0), "all values are 1"),
        (lambda: ByValue([np.nan] * 240).split(Y, 2, 0), "value of training sample 0 is nan"),
        (lambda: data(ByValue(column="age"), num_clients=2).setup(), "has no columns"),
        (lambda: LabelShares([[0.5, 0.4]]), "with the sum 1"),
        (lambda: LabelBuckets([[1.0] * 2] * 4, 2).split(Y, 6, 0), "not a multiple of the 4"),
        (lambda: LabelBuckets([[1.0] * 3] * 4, 2).split(Y, 4, 0), r"need \(4, 2\)"),
        (lambda: InnerDirichlet([200, 100], 1.0).split(Y, 2, 0), "the sizes are 300"),
        (lambda: InnerDirichlet([20], [1.0]).split(Y, 1, 0), r"alpha has the shape \(1,\)"),
        (lambda: Mixed(1.5, IID()), "iid=1.5"),
        (lambda: Grouped(2).split(Y, 2, 0), "brings no groups"),
    ],
)
def test_splits_that_cannot_be_are_refused_by_name(make: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        make()


def test_measures_compare_two_splits() -> None:
    counts = np.array([[8, 2, 0], [0, 5, 5]])
    common = np.array([0.4, 0.35, 0.25])
    first = (abs(0.8 - 0.4) + abs(0.2 - 0.35) + 0.25) / 2
    second = (0.4 + abs(0.5 - common[1]) + abs(0.5 - common[2])) / 2
    assert total_variation(counts) == pytest.approx((first + second) / 2)
    entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.2))
    assert effective_classes(counts) == pytest.approx((np.exp(entropy) + 2) / 2)
    sizes = np.array([1, 2, 3, 10])
    every = np.abs(sizes[:, None] - sizes).sum() / (2 * 16 * sizes.mean())
    assert gini(sizes) == pytest.approx(every)
    made = data(LabelsPerClient(1), num_clients=4)
    measured = made.partition_measures()
    assert measured["effective_classes"] == 1.0 and measured["total_variation"] > 0.7
    assert "effective number of classes: 1.00 of 4" in made.partition_table()


def test_the_picture_has_sizes_and_names() -> None:
    given: Any = {"anna": list(range(100)), "ben": list(range(100, 240))}
    figure = InMemoryDataModule((X, Y), clients=given).plot_partition()
    axes, _, sizes, above = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["anna", "ben"]
    assert [bar.get_width() for bar in sizes.patches] == [100, 140]
    assert "classes each" in above.get_title(loc="left")


@pytest.mark.parametrize("partition", [Grouped(size=5), ByGroup()])
def test_groups_that_the_data_do_not_have_are_asked_for(partition: Partition) -> None:
    """It is no question of num_clients."""
    data = InMemoryDataModule((torch.zeros(6, 1), torch.arange(6) % 2), partition=partition)
    with pytest.raises(UserError, match=r"groups=None, but InMemoryDataModule brings no groups"):
        data.setup()


def test_positions_that_are_no_whole_numbers_are_named() -> None:
    data = InMemoryDataModule((torch.zeros(6, 1), torch.arange(6) % 2), clients=[[0, 2.5]])
    with pytest.raises(UserError, match=r"Client 0 .* type float64, such as 2.5"):
        data.setup()


def sizes_of(partition: Partition, clients: int = 4) -> list[int]:
    data = (torch.zeros(100, 1), torch.arange(100) % 10)
    return (
        InMemoryDataModule(data, partition=partition, num_clients=clients).client_sizes().tolist()
    )


def test_sizes_by_a_function_of_the_client_s_place() -> None:
    assert sizes_of(Sizes(np.sqrt)) == sizes_of(Sizes(math.sqrt)) == [16, 23, 28, 33]
    assert sizes_of(Sizes(lambda place: 1.0)) == [25] * 4
    assert repr(Sizes(np.sqrt)) == "Sizes(sizes=sqrt)" and "0x" not in repr(Sizes(lambda u: u))
    for wrong in (lambda u: np.ones(3), lambda u: "x"):
        with pytest.raises(UserError, match="for 4 clients: it needs one number for each place"):
            sizes_of(Sizes(wrong))


def test_the_first_dirichlet_split_is_taken_if_that_is_asked_for() -> None:
    """With enough samples for all it is what FL-bench draws first; a smaller one is refused."""
    first = DirichletByClass(100.0, "fl-bench", min_samples=0, tool_seed=3)
    other = DirichletByClass(100.0, "fl-bench", min_samples=1, tool_seed=3)
    assert sizes_of(first) == sizes_of(other)
    labels = np.arange(100) % 2
    r = np.random.RandomState(3)
    expected: list[list[int]] = [[] for _ in range(4)]
    for c in range(2):
        own = np.flatnonzero(labels == c)
        r.shuffle(own)
        cuts = (np.cumsum(r.dirichlet([0.5] * 4)) * len(own)).astype(int)[:-1]
        for client, piece in zip(expected, np.split(own, cuts), strict=True):
            client += piece.tolist()
    law = DirichletByClass(0.5, "fl-bench", min_samples=0, tool_seed=3)
    assert [list(own) for own in law.split(labels, 4, 0)] == expected
    with pytest.raises(
        UserError, match=r"min_samples=0 takes the first split, in which client \d+"
    ):
        sizes_of(DirichletByClass(0.01, "fl-bench", min_samples=0), clients=20)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: ByGroup(["b", None, "a"]), "ByGroup's groups have None for sample 1"),
        (lambda: Grouped(2, groups=[1.0, 2.0, np.nan]), "Grouped's groups have nan for sample 2"),
        (lambda: ByValue(values=["a", "b"]), "ByValue's values are not numbers .*'a'"),
    ],
)
def test_samples_without_a_group_or_a_number_are_named(made: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        made()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"train": 5, "test": [[1]]}', "have 5 as 'train': give a list of lists"),
        ('{"' + "9" * 5000 + '": [9], "1": [0]}', "client 9+ has position 9, and there are 6"),
    ],
)
def test_odd_index_lists_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "lists.json").write_text(text)
    with pytest.raises(UserError, match=words):
        made = (torch.zeros(6, 1), torch.arange(6))
        InMemoryDataModule(made, partition=Imported(tmp_path / "lists.json")).setup()


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        (torch.zeros(2, 1), ["a", "b"], "y is a list that does not become a tensor .*from 0"),
        (np.array([[1, None]] * 2), [0, 1], "x is a ndarray that does not become a tensor"),
        (torch.zeros(2, 1), torch.tensor(1), "y is the single number 1: give one per sample"),
    ],
)
def test_what_is_no_tensor_is_refused_by_name(x: Any, y: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        InMemoryDataModule((x, y), num_clients=1).setup()
