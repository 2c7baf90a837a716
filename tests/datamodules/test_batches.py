"""Batches of clients and of evaluation: order, sizes, drop_last, augmentations, biases, seeds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import RandAugment, _apply_op

from fl_lightning import FederatedModule, UserError
from fl_lightning.datamodules import (
    CIFAR10,
    IID,
    MNIST,
    SVHN,
    CategoryBias,
    ClientBias,
    Digits,
    Dirichlet,
    FromDatasets,
    InMemoryDataModule,
)
from fl_lightning.datamodules.batches import samples
from fl_lightning.datamodules.batches.augmentations import (
    CropFlip,
    Pixels,
    all_operations,
    augmentations_of,
)
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.models import MLP, Classifier
from fl_lightning.sampling import generator
from tests.helpers.learners import trainer
from tests.helpers.zygote import Cli


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
        found = dict(zip(asked, pool.map(lambda key: seen(a, *key, 4), asked), strict=True))
        assert found == forward
    assert forward[0, 0] != forward[0, 1]
    assert seen(a, 0, 0, 2) == forward[0, 0][:2]


def test_small_clients_and_whole_clients():
    x = torch.arange(4.0).view(4, 1)
    data = InMemoryDataModule((x, torch.zeros(4)), clients=[[0], [1, 2, 3]], batch_size=50)
    assert [len(b) for b in seen(data, 0, 0, 3)] == [1, 1, 1] and data.batches_per_epoch(0) == 1
    whole = InMemoryDataModule((x, torch.zeros(4)), clients=[[0], [1, 2, 3]], batch_size=None)
    assert [sorted(b) for b in seen(whole, 1, 0, 2)] == [[1, 2, 3]] * 2
    assert [n for _, n in whole.full_batches(1)] == [3]


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
    assert x.dtype == torch.float32 and labels.dtype == torch.int64
    assert data.train_set.x.dtype == torch.uint8
    torch.testing.assert_close(x, images / 255)
    normalised = TensorSamples(images.expand(16, 2, 4, 4), y, 255.0, (0.5, 0.2), (0.25, 0.1))
    (x, _) = next(normalised.batches(np.arange(16), 16))
    torch.testing.assert_close(x[:, 1:], (images / 255 - 0.2) / 0.1)
    assert seen(numbered(), 0, 0, 1)
    assert next(numbered().client_batches(0, 0, 1))[0].dtype == torch.float64
    tokens = InMemoryDataModule(
        (torch.zeros(4, 3, dtype=torch.int64), torch.rand(4)), clients=[[0, 1]]
    )
    x, y = next(tokens.client_batches(0, 0, 1))
    assert x.dtype == torch.int64 and y.dtype == torch.float32 and tokens.num_classes is None


def test_transform_is_called_on_every_batch_training_and_evaluation():
    x = torch.arange(5.0).view(5, 1)
    test = (x, torch.zeros(5))
    data = InMemoryDataModule(
        (x, torch.zeros(5)), test=test, clients=[[1, 2]], transform=lambda b: b + len(b)
    )
    assert sorted(seen(data, 0, 0, 1)[0]) == [3, 4]
    assert next(iter(data.test_dataloader()))[0].flatten().tolist() == [5, 6, 7, 8, 9]


def test_crop_and_flip_of_whole_tensors_equal_a_slow_reference():
    x = torch.randint(0, 255, (40, 3, 8, 6), dtype=torch.uint8)
    crop = CropFlip(padding=4, flip=True)
    offsets, flips = crop.draw(generator(0, "augment"), 40)
    got = crop.apply(x, offsets, flips)
    assert flips.any() and not flips.all()
    assert set(offsets.flatten().tolist()) == set(range(9))
    for i in range(40):
        canvas = torch.zeros(3, 16, 14, dtype=torch.uint8)
        canvas[:, 4:12, 4:10] = x[i]
        row, column = offsets[i]
        image = canvas[:, row : row + 8, column : column + 6]
        assert torch.equal(got[i], image.flip(-1) if flips[i] else image)


def test_crops_without_flips_and_with_a_probability():
    x = torch.randint(0, 255, (400, 3, 8, 8), dtype=torch.uint8)
    always, never = CropFlip.of({"flip": False}), CropFlip.of({"flip": False, "probability": 0})
    assert not always.draw(generator(0, "augment"), 400)[1].any()
    assert torch.equal(never.apply(x, *never.draw(generator(0, "augment"), 400)), x)
    offsets, flips = CropFlip.of({"probability": 0.5}).draw(generator(0, "augment"), 400)
    others, same = CropFlip().draw(generator(0, "augment"), 400)
    assert np.array_equal(flips, same), "the same draws, of which some crops are left out"
    moved = (offsets != 4).any(1)
    assert 140 < moved.sum() < 260 and np.array_equal(offsets[moved], others[moved])


def test_augment_takes_a_mapping():
    assert CIFAR10(augment={"flip": False}).augmentation == CropFlip(padding=4, flip=False)
    assert CIFAR10(augment=False).augmentation is None and SVHN().augmentation is None
    assert SVHN(augment={"padding": 2}).augmentation == CropFlip(padding=2, flip=True)


def test_pixels_are_normalised_by_given_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    class Made:
        data, targets = torch.full((4, 28, 28), 51, dtype=torch.uint8), torch.arange(4)

    for given, expected in (({}, (0.2 - 0.1307) / 0.3081), ({"mean": [0.5], "std": [0.5]}, -0.6)):
        data = MNIST(partition=IID(), num_clients=1, **given)
        monkeypatch.setattr(data, "_open", lambda train: Made)
        data.setup()
        (x, _) = next(data.client_batches(0, 0, 1))
        assert torch.allclose(x, torch.full((4, 1, 28, 28), expected))
    for wrong in ({"mean": [0.5]}, {"std": [0.2, 0.2, 0.0]}, {"std": []}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))}( is .* 3 channels|=.* above 0)"):
            CIFAR10(**wrong)


def test_the_frame_of_a_crop_is_black_or_the_mean_colour() -> None:
    x = torch.full((60, 1, 4, 4), 2.0)
    pixels = Pixels([0.3], [0.1])
    for frame, value in (("black", -3.0), ("mean", 0.0)):
        (crop,) = augmentations_of([{"crop": {"padding": 2, "frame": frame}}])
        changed, _ = crop(x, x, generator(0, "crop"), pixels)
        assert torch.equal(changed.unique(), torch.tensor([value, 2.0]).to(x))


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
    biases = [ClientBias(0.5)]
    held = InMemoryDataModule((images, y), num_clients=2, client_test_fraction=0.5, biases=biases)
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
    assert not set(used) & set(digits._who.held_out)
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
        (lambda x, y: InMemoryDataModule((x, y)), r"num_clients .*clients=\["),
        (lambda x, y: InMemoryDataModule((x, y), clients=[[0], []]), "Client 1 has no samples"),
        (lambda x, y: InMemoryDataModule((x, y), clients=[]), "clients is empty"),
        (lambda x, y: InMemoryDataModule((x, y), clients=[[0]], num_clients=2), "num_clients is 2"),
        (lambda x, y: InMemoryDataModule((x, y), num_clients=7), "num_clients is 7.*from 1 to 6"),
        (lambda x, y: InMemoryDataModule((x, y[:5]), num_clients=2), "6 inputs x but 5 labels"),
        (lambda x, y: InMemoryDataModule((x[:0], y[:0]), num_clients=2), "have no samples"),
        (lambda x, y: InMemoryDataModule((x, y), test=x, num_clients=2), "test .*pair"),
        (lambda x, y: InMemoryDataModule((x, ["a"] * 6), num_clients=1), "y is a list that does"),
        (lambda x, y: InMemoryDataModule((x, y + 0.5), partition=Dirichlet(1.0)), "num_clients"),
        (
            lambda x, y: InMemoryDataModule((x, y), num_clients=2, biases=[ClientBias(0.1)]),
            "biases",
        ),
        (lambda x, y: Digits(val_fraction=1.0), "val_fraction=1.0.*below 1"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(UserError, match=words):
        make(torch.full((6, 2), 3.0), torch.arange(6)).setup()


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
    assert axes.images[0].get_array().shape == (200, 10)
    assert "first 200 of 5,000" in axes.get_title("left")
    assert "4,980 more clients" in many.partition_table()
    assert data.card()["partition"] == "Dirichlet(alpha=0.1)"
    assert data.partition_hash in data.card().values()


SIZES = [9, 8, 3, 1, 12]


def of_sizes(made="memory", **options):
    """Samples that are their own numbers, clients of SIZES, batches of four."""
    n = sum(SIZES)
    clients = np.split(np.arange(n), np.cumsum(SIZES)[:-1])
    x, y = torch.arange(n, dtype=torch.float64).view(n, 1), torch.arange(n) % 4
    options = {"batch_size": 4, "seed": 2, **options}
    if made == "memory":
        return InMemoryDataModule((x, y), test=(x, y), clients=clients, **options)
    test = TensorDataset(x, y)
    return FromDatasets(clients=[TensorDataset(x[c], y[c]) for c in clients], test=test, **options)


def lengths(data, client, steps):
    return [len(x) for x, _ in data.client_batches(client, 0, steps)]


@pytest.mark.parametrize("made", ["memory", "datasets"])
def test_drop_last_leaves_the_short_batch_out_and_counts_the_others(made):
    data = of_sizes(made, drop_last=True)
    assert [data.batches_per_epoch(i) for i in range(5)] == [2, 2, 1, 1, 3]
    expected = [[4, 4, 4], [4, 4, 4], [3, 3, 3], [1, 1, 1], [4, 4, 4]]
    assert [lengths(data, i, 3) for i in range(5)] == expected
    seen = [
        chain(*(x.flatten().tolist() for x, _ in data.client_batches(0, r, 2))) for r in range(20)
    ]
    left_out = {next(iter(set(range(9)) - set(one))) for one in seen}
    assert len(left_out) > 3  # another one each time
    kept = of_sizes(made)
    assert torch.equal(next(data.client_batches(0, 0, 1))[0], next(kept.client_batches(0, 0, 1))[0])


@pytest.mark.parametrize("made", ["memory", "datasets"])
def test_full_batches_keep_every_sample_and_none_is_short(made):
    data = of_sizes(made, drop_last=True)
    for client, expected in enumerate([[4, 5], [4, 4], [3], [1], [4, 4, 4]]):
        batches = list(data.full_batches(client))
        assert [n for _, n in batches] == [len(x) for (x, _), _ in batches] == expected
        everything = torch.cat([x for (x, _), _ in batches]).flatten().tolist()
        assert everything == data.client_indices(client).tolist()


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 4, 50, None])
def test_the_smallest_batch_is_the_smallest_that_clients_meet(batch_size, drop_last):
    data = of_sizes(batch_size=batch_size, drop_last=drop_last)
    for steps in (None, 1, 2, np.array([1, 2, 3, 4, 2])):
        whole = [data.batches_per_epoch(i) for i in range(5)]
        numbers = np.broadcast_to(whole if steps is None else steps, 5)
        met = [min(lengths(data, i, int(k))) for i, k in enumerate(numbers)]
        smallest, client = data.smallest_batch(steps)
        assert smallest == min(met) and client == met.index(smallest)


class Large(Dataset):
    """Samples of 8 MiB."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 20

    def __getitem__(self, i):
        self.read += 1
        return torch.full((2**20,), i + torch.rand(()).item(), dtype=torch.float64), i % 2


def test_evaluation_batches_of_datasets_go_by_memory():
    data = FromDatasets(Large(), test=Large(), num_clients=2)
    before = torch.get_rng_state()
    loader = data.val_dataloader()
    assert torch.equal(before, torch.get_rng_state()) and len(loader) == 3
    assert [len(y) for _, y in loader] == [7, 7, 6]  # a label more than 8 MiB each
    whole = FromDatasets(Large(), test=Large(), num_clients=2, eval_batch_size=20)
    assert len(whole.val_dataloader()) == 1
    held = FromDatasets(Large(), num_clients=2, val_fraction=0.5)
    assert [len(y) for _, y in held.val_dataloader()] == [7, 3]


def test_evaluation_batches_are_an_option_and_a_thousand_samples_by_default():
    x = torch.arange(2300.0).view(-1, 1)
    for options, expected in (({}, [1000, 1000, 300]), ({"eval_batch_size": 1500}, [1500, 800])):
        for data in (
            InMemoryDataModule((x, x), test=(x, x), clients=[[0]], **options),
            FromDatasets(TensorDataset(x), test=TensorDataset(x), num_clients=1, **options),
        ):
            assert [len(batch[0]) for batch in data.test_dataloader()] == expected
    assert [len(b[1]) for b in Digits(eval_batch_size=200).test_dataloader()] == [200, 159]


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 3, 1.0, True, "1"])
def test_seeds_that_would_collide_are_refused_by_name(seed):
    with pytest.raises(UserError, match=r"data\.seed is .*2\*\*63 - 1"):
        Digits(seed=seed)
    with pytest.raises(UserError, match="seed is"):
        generator(seed, "order")


ALL = ["crop", {"flip": {"probability": 0.5}}, "randaugment", "mixup", "cutmix"]


def data(x: Tensor, y: Tensor, augment: Any, **arguments: Any) -> InMemoryDataModule:
    return InMemoryDataModule((x, y), num_clients=1, augment=augment, **arguments)


def batch_of(made: InMemoryDataModule, round: int = 0) -> tuple[Tensor, Tensor]:
    (x, y) = next(iter(made.client_batches(0, round, 1)))
    return x, y


def classes_as_levels(n: int = 12) -> tuple[Tensor, Tensor]:
    """Pictures whose channel c is 1 where the class is c: means of a channel are shares."""
    y = torch.arange(n) % 3
    return nn.functional.one_hot(y, 3).float()[:, :, None, None].expand(n, 3, 6, 8), y


@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
def test_operations_are_torchvisions(magnitude: int) -> None:
    picture = torch.randint(0, 256, (3, 20, 23), generator=torch.Generator().manual_seed(1))
    picture = picture.to(torch.uint8)
    table = RandAugment()._augmentation_space(31, (20, 23))
    for (name, (levels, signed)), own in zip(table.items(), all_operations(), strict=True):
        level = float(levels[magnitude]) if levels.ndim else 0.0
        for sign in (1, -1) if signed else (1,):
            theirs = _apply_op(picture, name, sign * level, InterpolationMode.NEAREST, None)
            ours = own(picture, sign * magnitude / 30)
            # Its levels are single precision, which moves some pixels by one.
            assert (ours.int() - theirs.int()).abs().max() <= 1, (name, sign)


def test_mixed_labels_are_the_shares_of_the_pictures() -> None:
    x, y = classes_as_levels()
    seen = set()
    for augment in (["mixup"], [{"cutmix": {"alpha": 1.0}}], ["mixup", "cutmix"]):
        for round in range(6):
            mixed, shares = batch_of(data(x, y, augment), round)
            torch.testing.assert_close(mixed.mean((2, 3)), shares)
            torch.testing.assert_close(shares.sum(1), torch.ones(12))
            seen.add("cutmix" if bool(((mixed == 0) | (mixed == 1)).all()) else "mixup")
    assert seen == {"mixup", "cutmix"}


def test_crops_are_windows_in_a_black_frame_of_normalised_pictures() -> None:
    made = Digits(num_clients=1, augment=[{"crop": {"padding": 2}}], batch_size=40)
    plain = Digits(num_clients=1, batch_size=40)
    ((x, _), (whole, _)) = (next(iter(one.client_batches(0, 3, 1))) for one in (made, plain))
    framed = nn.functional.pad(whole, (2, 2, 2, 2), value=-0.3053 / 0.3760)
    places = set()
    for one, own in zip(x, framed, strict=True):
        fits = [(a, b) for a in range(5) for b in range(5)]
        fits = [at for at in fits if torch.allclose(own[:, at[0] :][:, :8, at[1] :][:, :, :8], one)]
        assert fits
        places.add(fits[0])
    assert len(places) > 10


def fitted(folder: Path | None, rounds: int, **arguments: Any) -> FederatedModule:
    torch.manual_seed(0)
    learner = Classifier(MLP([64, 8, 10]), num_classes=10, lr=0.1)
    module = FederatedModule(learner, participation="all", local_epochs=2, seed=1, **arguments)
    digits = Digits(num_clients=4, samples=120, batch_size=8, augment=ALL)
    one = trainer(rounds, default_root_dir=folder, enable_checkpointing=folder is not None)
    path = folder / "last.ckpt" if folder else None
    one.fit(module, digits, ckpt_path=path if path and path.is_file() else None)
    if path:
        one.save_checkpoint(path)
    return module


def test_engines_threads_processes_and_a_resume_have_the_same_bits(tmp_path: Path) -> None:
    expected = fitted(None, 4).global_vector
    for arguments in ({"engine": "sequential"}, {"engine": "concurrent", "workers": 3}):
        assert torch.equal(fitted(None, 4, **arguments).global_vector, expected)
    fitted(tmp_path, 2)
    assert torch.equal(fitted(tmp_path, 4).global_vector, expected)


def test_rounds_clients_and_steps_draw_differently() -> None:
    x = torch.rand(8, 3, 8, 8)
    y = torch.zeros(8, dtype=torch.int64)
    clients = [list(range(8)), list(range(8))]
    made = InMemoryDataModule((x, y), clients=clients, augment=["crop"], batch_size=None)
    batches = []
    for client, round in ((0, 0), (1, 0), (0, 1)):
        batches += [one.sort(0).values for one, _ in made.client_batches(client, round, 2)]
    assert len({one.numpy().tobytes() for one in batches}) == 6


@pytest.mark.parametrize(
    ("augment", "what"),
    [
        (["crops"], r"'crops', which is not an augmentation; .*Did you mean 'crop'"),
        ([{"crop": {"pad": 2}}], "crop has no argument 'pad'; it has padding, probability"),
        ([{"flip": {"probability": 2}}], "Flip: probability=2 is not accepted"),
        ({"paddding": 4}, r"data\.augment has no argument 'paddding'"),
        ({"flip": 1}, "CropFlip: flip=1"),
    ],
)
def test_what_is_unknown_is_refused(augment: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        CIFAR10(augment=augment)


PICTURES = torch.rand(4, 3, 6, 6)


@pytest.mark.parametrize(
    ("x", "y", "augment", "what"),
    [
        (torch.rand(4, 5), torch.arange(4), "crop", r"x is torch.float32 of shape \(4, 5\)"),
        (3 * PICTURES + 1, torch.arange(4), "randaugment", "changes pixels from 0 to 1, and x are"),
        (PICTURES, torch.rand(4), "mixup", "mix classes, but y are not class indices"),
    ],
)
def test_what_is_no_picture_is_refused(x: Tensor, y: Tensor, augment: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        batch_of(data(x, y, augment))


def test_it_is_given_in_yaml_and_methods_that_need_classes_refuse_shares(cli: Cli) -> None:
    fit = ("fit", "-c", "base", "-c", "trainer/cpu", "--trainer.max_epochs", 1)
    plain = ("--data.samples", 100, "--data.augment")
    run = cli(*fit, *plain, "[crop, {randaugment: {magnitude: 5}}, mixup]")
    assert run.returncode == 0, run.stderr
    refused = cli(*fit, "-c", "method/fedlc", *plain, "[mixup]")
    assert refused.returncode == 2 and "soft labels are not accepted" in refused.stderr
