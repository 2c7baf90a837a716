"""Batches of clients, evaluation loaders, augmentation, biases."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
import torch

from fl_lightning.datamodules import (
    CIFAR10,
    IID,
    SVHN,
    CategoryBias,
    ClientBias,
    Digits,
    Dirichlet,
    InMemoryDataModule,
)
from fl_lightning.datamodules.batches import samples
from fl_lightning.datamodules.batches.crop_flip import CropFlip
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator


def numbered(n=23, m=3, **options):
    """Each sample is its own number."""
    x = torch.arange(n, dtype=torch.float64).view(n, 1)
    return InMemoryDataModule(
        (x, torch.arange(n) % 5), num_clients=m, partition=IID(), seed=4, **options
    )


def seen(data, client, round, steps):
    return [x.flatten().long().tolist() for x, _ in data.client_batches(client, round, steps)]


def test_epochs_are_reshuffled_whole_and_keep_the_short_batch():
    data = numbered(batch_size=3)
    batches = seen(data, 0, 7, 8)  # 8 samples: batches of 3, 3, 2
    assert data.batches_per_epoch(0) == 3
    assert [len(b) for b in batches] == [3, 3, 2, 3, 3, 2, 3, 3]
    own = sorted(data.client_indices(0).tolist())
    first, second = [*chain(*batches[:3])], [*chain(*batches[3:6])]
    assert sorted(first) == sorted(second) == own and first != second
    expected = data.client_indices(0)[data.order(0, 7, 1)]
    assert second == expected.tolist()


def test_order_does_not_depend_on_what_was_asked_before():
    a, b = numbered(batch_size=3), numbered(batch_size=3)
    asked = [(c, r) for r in range(3) for c in range(3)]
    forward = {key: seen(a, *key, 4) for key in asked}
    assert {key: seen(b, *key, 4) for key in reversed(asked)} == forward
    with ThreadPoolExecutor(4) as pool:
        assert (
            dict(zip(asked, pool.map(lambda key: seen(a, *key, 4), asked), strict=True)) == forward
        )
    assert forward[0, 0] != forward[0, 1]
    assert seen(a, 0, 0, 2) == forward[0, 0][:2]


def test_small_clients_and_whole_clients():
    x = torch.arange(4.0).view(4, 1)
    data = InMemoryDataModule((x, torch.zeros(4)), clients=[[0], [1, 2, 3]], batch_size=50)
    assert [len(b) for b in seen(data, 0, 0, 3)] == [1, 1, 1] and data.batches_per_epoch(0) == 1
    whole = InMemoryDataModule((x, torch.zeros(4)), clients=[[0], [1, 2, 3]], batch_size=None)
    assert [sorted(b) for b in seen(whole, 1, 0, 2)] == [[1, 2, 3]] * 2
    assert [n for _, n in whole.full_batches(1)] == [3]


def test_full_batches_go_through_a_client_once_in_order():
    data = numbered(batch_size=3)
    batches = list(data.full_batches(1))
    assert [n for _, n in batches] == [len(x) for (x, _), _ in batches] == [3, 3, 2]
    assert (
        torch.cat([x for (x, _), _ in batches]).flatten().long().tolist()
        == data.client_indices(1).tolist()
    )


@pytest.mark.parametrize("biases", [[], [ClientBias(0.3), CategoryBias(0.2)]])
def test_gathering_in_chunks_changes_nothing(monkeypatch, biases):
    data = Digits(partition=Dirichlet(0.5), augment=True, biases=biases, batch_size=10, seed=0)
    once = list(data.client_batches(2, 1, 20))
    monkeypatch.setattr(samples, "CHUNK_BYTES", 30 * 64 * 4)
    for (x, y), (u, v) in zip(once, data.client_batches(2, 1, 20), strict=True):
        assert torch.equal(x, u) and torch.equal(y, v)


def test_types_and_scale():
    images = torch.arange(256, dtype=torch.uint8).view(16, 1, 4, 4)
    y = np.arange(16, dtype=np.int32)
    data = InMemoryDataModule((images, y), clients=[np.arange(16)], batch_size=16)
    (x, labels), _ = next(data.full_batches(0))
    assert (
        x.dtype == torch.float32
        and labels.dtype == torch.int64
        and data.train_set.x.dtype == torch.uint8
    )
    torch.testing.assert_close(x, images / 255)
    normalised = TensorSamples(images.expand(16, 2, 4, 4), y, 255.0, (0.5, 0.2), (0.25, 0.1))
    (x, _) = next(normalised.batches(np.arange(16), 16))
    torch.testing.assert_close(x[:, 1:], (images / 255 - 0.2) / 0.1)
    assert (
        seen(numbered(), 0, 0, 1)
        and next(numbered().client_batches(0, 0, 1))[0].dtype == torch.float64
    )
    tokens = InMemoryDataModule(
        (torch.zeros(4, 3, dtype=torch.int64), torch.rand(4)), clients=[[0, 1]]
    )
    x, y = next(tokens.client_batches(0, 0, 1))
    assert x.dtype == torch.int64 and y.dtype == torch.float32 and tokens.num_classes is None


def test_transform_is_called_on_every_batch_training_and_evaluation():
    x = torch.arange(5.0).view(5, 1)
    data = InMemoryDataModule(
        (x, torch.zeros(5)),
        test=(x, torch.zeros(5)),
        clients=[[1, 2]],
        transform=lambda b: b + len(b),
    )
    assert sorted(seen(data, 0, 0, 1)[0]) == [3, 4]
    assert next(iter(data.test_dataloader()))[0].flatten().tolist() == [5, 6, 7, 8, 9]


def test_crop_and_flip_of_whole_tensors_equal_a_slow_reference():
    x = torch.randint(0, 255, (40, 3, 8, 6), dtype=torch.uint8)
    crop = CropFlip(padding=4, flip=True)
    draws = crop.draw(generator(0, "augment"), 40)
    got = crop.apply(x, draws)
    assert draws.flips.any() and not draws.flips.all()
    assert set(draws.offsets.flatten().tolist()) == set(range(9))
    for i in range(40):
        canvas = torch.zeros(3, 16, 14, dtype=torch.uint8)
        canvas[:, 4:12, 4:10] = x[i]
        row, column = draws.offsets[i]
        image = canvas[:, row : row + 8, column : column + 6]
        assert torch.equal(got[i], image.flip(-1) if draws.flips[i] else image)


def test_crops_without_flips_and_with_a_probability():
    x = torch.randint(0, 255, (400, 3, 8, 8), dtype=torch.uint8)
    always, never = CropFlip.of({"flip": False}), CropFlip.of({"flip": False, "probability": 0})
    assert not always.draw(generator(0, "augment"), 400).flips.any()
    assert torch.equal(never.apply(x, never.draw(generator(0, "augment"), 400)), x)
    draws = CropFlip.of({"probability": 0.5}).draw(generator(0, "augment"), 400)
    same = CropFlip().draw(generator(0, "augment"), 400)
    assert np.array_equal(draws.flips, same.flips), (
        "the same draws, of which some crops are left out"
    )
    moved = (draws.offsets != 4).any(1)
    assert 140 < moved.sum() < 260 and np.array_equal(draws.offsets[moved], same.offsets[moved])


@pytest.mark.parametrize(
    "given",
    [
        {"paddding": 4},
        {"padding": -1},
        {"padding": 2.5},
        {"flip": 1},
        {"probability": 1.5},
        {"padding": True},
    ],
)
def test_what_augment_does_not_know_is_refused(given):
    with pytest.raises(UserError, match=r"data\.augment") as error:
        CIFAR10(augment=given)
    assert next(iter(given)) in str(error.value)


def test_augment_takes_a_mapping():
    assert CIFAR10(augment={"flip": False}).augmentation == CropFlip(padding=4, flip=False)
    assert CIFAR10(augment=False).augmentation is None and SVHN().augmentation is None
    assert SVHN(augment={"padding": 2}).augmentation == CropFlip(padding=2, flip=True)


def test_augmentation_is_for_training_alone_and_differs_between_epochs_and_rounds():
    data = Digits(partition=IID(), augment=True, batch_size=None, seed=0)
    plain = Digits(partition=IID(), batch_size=None, seed=0)
    first = next(data.client_batches(0, 0, 2))[0]
    again = next(data.client_batches(0, 0, 1))[0]
    assert torch.equal(first, again)
    alone = InMemoryDataModule((torch.rand(1, 3, 16, 16), torch.zeros(1)), clients=[[0]])
    alone.augmentation = CropFlip()
    drawn = [x for r in range(4) for x, _ in alone.client_batches(0, r, 4)]
    assert len({x.numpy().tobytes() for x in drawn}) > 10
    assert not torch.equal(first, next(plain.client_batches(0, 0, 1))[0])
    for ours, theirs in ((data, plain),):
        assert torch.equal(next(ours.full_batches(0))[0][0], next(theirs.full_batches(0))[0][0])
        assert torch.equal(
            next(iter(ours.val_dataloader()))[0], next(iter(theirs.val_dataloader()))[0]
        )


def test_biases_follow_their_formulas_on_training_data_alone():
    images = torch.randint(0, 256, (60, 3, 4, 4), dtype=torch.uint8)
    y = torch.arange(60) % 4
    data = InMemoryDataModule(
        (images, y),
        test=(images, y),
        clients=[np.arange(30), np.arange(30, 60)],
        biases=[ClientBias(0.5), CategoryBias(0.2)],
        seed=3,
    )
    shift = 0.2 * generator(3, "category-bias").standard_normal(4)
    for client in (0, 1):
        z = generator(3, "client-bias", client).standard_normal(3)
        factor = torch.tensor(np.maximum(0, 1 + 0.5 * z)).view(1, 3, 1, 1)
        own = slice(30 * client, 30 * client + 30)
        expected = (images[own].double() / 255 * factor).clamp(0, 1)
        expected = (expected + torch.tensor(shift)[y[own]].view(-1, 1, 1, 1)).clamp(0, 1)
        got = torch.cat([x for (x, _), _ in data.full_batches(client)])
        torch.testing.assert_close(got, expected.float())
    torch.testing.assert_close(next(iter(data.test_dataloader()))[0], images / 255)


def test_biases_leave_a_clients_own_test_set_as_it_is():
    images = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8)
    y = torch.arange(8) % 4
    data = InMemoryDataModule(
        (images, y),
        test=(images, y),
        clients=[[0, 1, 2, 3], [4, 5, 6, 7]],
        test_clients=[[0, 1], [2, 3]],
        biases=[ClientBias(0.5)],
    )
    (x, _), _ = next(data.full_batches(1, what="test"))
    torch.testing.assert_close(x, images[2:4] / 255)
    held = InMemoryDataModule(
        (images, y), num_clients=2, client_test_fraction=0.5, biases=[ClientBias(0.5)]
    )
    (x, _), _ = next(held.full_batches(0, what="test"))
    assert not torch.allclose(x, images[held.client_test_indices(0)] / 255, atol=0.01)


def test_biases_before_normalisation_and_clipped():
    x = torch.full((2, 1, 2, 2), 200, dtype=torch.uint8)
    bright = TensorSamples(x, torch.zeros(2), 255.0, (0.5,), (0.25,))
    batch, _ = next(bright.batches(np.arange(2), 2, biases=lambda p, y, part: (p + 1).clamp_(0, 1)))
    torch.testing.assert_close(batch, torch.full((2, 1, 2, 2), 2.0))


def test_validation_is_val_then_held_out_then_test():
    x, y = torch.arange(20.0).view(20, 1), torch.arange(20) % 2
    data = InMemoryDataModule((x, y), test=(x[:3], y[:3]), val=(x[5:7], y[5:7]), clients=[[0]])
    assert [b[0].flatten().tolist() for b in data.val_dataloader()] == [[5, 6]]
    data = InMemoryDataModule((x, y), test=(x[:3], y[:3]), clients=[[0]])
    assert [b[0].flatten().tolist() for b in data.val_dataloader()] == [[0, 1, 2]]
    digits = Digits(val_fraction=0.25, seed=1)
    held = sum(len(b[1]) for b in digits.val_dataloader())
    used = np.concatenate([digits.client_indices(i) for i in range(10)])
    assert held == round(0.25 * 1438) and len(np.unique(used)) == 1438 - held
    images = [batch[0] for batch in digits.val_dataloader()]
    images += [batch[0] for i in range(10) for batch, _ in digits.full_batches(i)]
    whole = next(iter(digits.train_set.batches(np.arange(1438), 1438)))[0]
    assert sorted(x.numpy().tobytes() for x in torch.cat(images)) == sorted(
        x.numpy().tobytes() for x in whole
    )
    assert sum(len(b[1]) for b in digits.test_dataloader()) == 359
    assert np.array_equal(
        digits.client_indices(0), Digits(val_fraction=0.25, seed=1).client_indices(0)
    )


class FakeTrainer:
    def __init__(self, rank, world, seed=None):
        self.global_rank, self.world_size = rank, world
        self.strategy = type("S", (), {"root_device": torch.device("cpu")})
        self.lightning_module = type("M", (), {"run_seed": seed})


@pytest.mark.parametrize("world", [2, 3, 8])
def test_evaluation_is_shared_in_as_many_batches_each_of_almost_equal_size(world):
    n = 4500
    data = numbered(n)
    data._given_sets["test"] = (torch.arange(float(n)).view(n, 1), torch.zeros(n))
    shares, sizes, counts = [], set(), set()
    for rank in range(world):
        data.trainer = FakeTrainer(rank, world)
        loader = data.test_dataloader()
        shares.append(torch.cat([x for x, _ in loader]).flatten().tolist())
        assert len(list(loader)) == len(loader)
        sizes |= {len(x) for x, _ in loader}
        counts.add(len(loader))
    assert sorted(chain(*shares)) == list(range(n))
    assert len(counts) == 1 and max(sizes) - min(sizes) <= 1


def test_seed_is_ones_own_else_the_runs(monkeypatch):
    data = Digits()
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert data.run_seed == 5
    before = data.partition_hash
    data.trainer = FakeTrainer(0, 1, seed=8)
    data.setup("fit")
    assert data.run_seed == 8 and data.partition_hash != before
    assert data.partition_hash == Digits(seed=8).partition_hash
    data.setup("fit")
    assert data.partition_hash == Digits(seed=8).partition_hash


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x, y: InMemoryDataModule((x, y)), ["num_clients", "clients=["]),
        (lambda x, y: InMemoryDataModule((x, y), clients=[[0], []]), ["Client 1", "no samples"]),
        (lambda x, y: InMemoryDataModule((x, y), clients=[[0], [6]]), ["Client 1", "from 0 to 5"]),
        (lambda x, y: InMemoryDataModule((x, y), clients=[[0.5]]), ["Client 0", "whole numbers"]),
        (lambda x, y: InMemoryDataModule((x, y), clients=[]), ["clients is empty"]),
        (
            lambda x, y: InMemoryDataModule((x, y), clients=[[0]], num_clients=2),
            ["clients", "num_clients is 2"],
        ),
        (
            lambda x, y: InMemoryDataModule((x, y), num_clients=0),
            ["num_clients=0", "from 1"],
        ),
        (
            lambda x, y: InMemoryDataModule((x, y), num_clients=7),
            ["num_clients is 7", "from 1 to 6"],
        ),
        (
            lambda x, y: InMemoryDataModule((x, y), num_clients=2, batch_size=0),
            ["batch_size=0", "null"],
        ),
        (lambda x, y: InMemoryDataModule((x, y[:5]), num_clients=2), ["6 inputs", "5 labels"]),
        (lambda x, y: InMemoryDataModule((x, y), test=x, num_clients=2), ["test", "pair"]),
        (
            lambda x, y: InMemoryDataModule((x, y + 0.5), num_clients=2, partition=Dirichlet(1.0)),
            ["Dirichlet", "IID"],
        ),
        (
            lambda x, y: InMemoryDataModule((x, y), num_clients=2, biases=[ClientBias(0.1)]),
            ["biases", "[0, 1]"],
        ),
        (lambda x, y: ClientBias(-1), ["std=-1", "from 0"]),
        (lambda x, y: Digits(val_fraction=1.0), ["val_fraction=1.0", "below 1"]),
    ],
)
def test_refusals(make, words):
    with pytest.raises(UserError) as caught:
        make(torch.full((6, 2), 3.0), torch.arange(6)).setup()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert len(str(caught.value)) <= 600


def test_lazy_clients_are_checked_when_asked_for():
    class Lazy:
        def __len__(self):
            return 3

        def __getitem__(self, i):
            if i > 2:
                raise IndexError
            return [np.array([0]), np.array([], int), np.array([9])][i]

    data = InMemoryDataModule((torch.zeros(4, 1), torch.zeros(4)), clients=Lazy())
    assert data.client_indices(0).tolist() == [0]
    for client in (1, 2):
        with pytest.raises(UserError, match=f"Client {client}"):
            data.client_indices(client)
    with pytest.raises(UserError, match="Client 1"):
        data.client_sizes()


def test_artefacts_show_clients_and_classes():
    data = Digits(partition=Dirichlet(0.1), num_clients=5, seed=0)
    data.setup()
    counts = np.bincount(data.train_set.labels[data.client_indices(2)], minlength=10)
    row = data.partition_table().splitlines()[3].split()
    assert row == ["2", "287", *[str(c) if c else "·" for c in counts]]
    image = data.plot_partition().axes[0].images[0].get_array()
    assert np.array_equal(image[2], counts)
    many = Digits(
        partition=Dirichlet(0.1, replacement=True, samples_per_client=3), num_clients=5000, seed=0
    )
    axes = many.plot_partition().axes[0]
    assert axes.images[0].get_array().shape == (200, 10) and "first 200 of 5,000" in axes.get_title(
        "left"
    )
    assert "4,980 more clients" in many.partition_table()
    assert (
        data.card()["partition"] == "Dirichlet(alpha=0.1)"
        and data.partition_hash in data.card().values()
    )
