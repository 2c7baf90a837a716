"""Datasets and data modules that know no clients: samplers, attributes, hooks and state."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fl_lightning import FederatedModule, InMemoryDataModule, UserError
from fl_lightning.datamodules import IID, ByGroup, Dirichlet, FromDataModule, FromDatasets
from tests.helpers.learners import Lit, Loads, federated, trainer


class Words(Dataset):
    """Samples that are no tensors, of which a dict of a batch is made."""

    def __init__(self, n=12, first=0):
        self.n, self.first = n, first
        self.targets = [i % 3 for i in range(n)]

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return {"number": self.first + i, "label": self.targets[i]}


def numbers(data, client, steps=1):
    return [n for batch in data.client_batches(client, 0, steps) for n in batch["number"].tolist()]


def test_a_dataset_is_split_collated_and_evaluated():
    test = Words(5, 100)
    data = FromDatasets(Words(), test=test, partition=Dirichlet(100.0), num_clients=3, batch_size=3)
    everything = chain(*(numbers(data, i, 2) for i in range(3)))
    assert sorted(everything) == list(range(12)) and data.num_classes == 3
    batches = list(data.full_batches(0))
    assert [n for _, n in batches] == [3, 1]
    assert [*chain(*(b["number"].tolist() for b, _ in batches))] == data.client_indices(0).tolist()
    assert [b["number"].tolist() for b in data.val_dataloader()] == [[100, 101, 102, 103, 104]]


def test_clients_that_exist_already():
    data = FromDatasets(clients=[Words(2), Words(3, 10)], batch_size=None)
    assert data.num_clients == 2 and data.client_sizes().tolist() == [2, 3]
    assert sorted(numbers(data, 1)) == [10, 11, 12]
    assert "given" in data.card().values() and data.val_dataloader() == []


def test_labels_are_found_or_asked_for():
    class Mute(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            return torch.tensor(i), i % 2

    half = Subset(ConcatDataset([Words(3), Words(3)]), [5, 0, 1])
    data = FromDatasets(half, num_clients=1)
    data.setup()
    assert data.train_set.labels.tolist() == [2, 0, 1]
    tensors = FromDatasets(
        TensorDataset(torch.zeros(4, 1), torch.tensor([0, 1, 2, 1])), num_clients=2
    )
    assert tensors.num_classes == 3
    assert FromDatasets(Mute(), num_clients=2).num_classes is None
    with pytest.raises(UserError, match=r"Dirichlet.*give targets"):
        FromDatasets(Mute(), num_clients=2, partition=Dirichlet(1.0)).setup()
    given = {"num_clients": 2, "partition": Dirichlet(1.0)}
    assert FromDatasets(Mute(), targets=[0, 1] * 3, **given).num_classes == 2
    groups = FromDatasets(Mute(), partition=ByGroup([1, 1, 2, 2, 2, 3]))
    assert groups.num_clients == 3 and "all samples" in groups.plot_partition().axes[0].get_xlabel()


class Ready(pl.LightningDataModule):
    def __init__(self, loader):
        super().__init__()
        self.loader, self.ready = loader, []

    def prepare_data(self):
        self.ready.append("prepare")

    def setup(self, stage):
        self.ready.append(stage)

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return "its own validation"


def test_a_data_module_is_federated():
    def doubled(samples):
        return {"number": torch.tensor([2 * s["number"] for s in samples])}

    inner = Ready(
        DataLoader(Words(), batch_size=5, shuffle=True, drop_last=True, collate_fn=doubled)
    )
    data = FromDataModule(inner, partition=IID(), num_clients=2, drop_last=False)
    assert sorted(numbers(data, 0, 2) + numbers(data, 1, 2)) == list(range(0, 24, 2))
    assert data.batch_size == 5 and inner.ready == ["prepare", "fit"]
    assert data.val_dataloader() == "its own validation"
    held = FromDataModule(inner, num_clients=2, val_fraction=0.5, batch_size=None)
    assert len(numbers(held, 0)) == 3 and sum(len(b["number"]) for b in held.val_dataloader()) == 6


class Numbers(Dataset):
    targets = [i % 3 for i in range(12)]

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.tensor(i)


def plain(dataset=None, **options):
    return Loads(DataLoader(dataset or Numbers(), **options))


class Doubled(DataLoader):
    def __iter__(self):
        return (2 * batch for batch in super().__iter__())


class Named(Sampler):
    def __init__(self, number=12):
        self.number = number

    def __len__(self):
        return self.number

    def __iter__(self):
        return iter(range(self.number))


class Pairs(BatchSampler):
    def __iter__(self):
        yield [0, 1]


class Stream(IterableDataset):
    def __len__(self):
        return 12

    def __iter__(self):
        return iter(range(12))


def federate(num_clients=2, partition=None, **loader):
    return FromDataModule(
        plain(**loader), partition=partition or IID(), num_clients=num_clients, seed=1
    )


def seen(data, client=0, round=0, steps=None):
    steps = data.batches_per_epoch(client) if steps is None else steps
    return [batch.tolist() for batch in data.client_batches(client, round, steps)]


def test_a_weighted_sampler_draws_within_each_client():
    weights = [0.0, *[1.0] * 10, 10.0]
    data = federate(batch_size=4, sampler=WeightedRandomSampler(weights, 12))
    drawn = Counter()
    for client in (0, 1):
        mine = set(data.client_indices(client).tolist())
        for round in range(200):
            epoch = [*chain(*seen(data, client, round))]
            assert len(epoch) == 6 and set(epoch) <= mine
            drawn.update(epoch)
    holder = next(i for i in (0, 1) if 11 in data.client_indices(i))
    others = [w for i, w in enumerate(weights) if i in data.client_indices(holder) and i != 11]
    assert drawn[0] == 0 and drawn[11] / 1200 == pytest.approx(10 / (10 + sum(others)), abs=0.05)
    again = federate(batch_size=4, sampler=WeightedRandomSampler(weights, 12))
    assert seen(again, 1, 7, 5) == seen(data, 1, 7, 5) != seen(data, 1, 8, 5)
    expected = sorted(data.client_indices(holder))
    assert sorted(chain(*(b.tolist() for b, _ in data.full_batches(holder)))) == expected


def test_drawing_with_replacement_is_honoured():
    data = federate(batch_size=6, sampler=RandomSampler(range(12), replacement=True))
    assert any(len(set(seen(data, 0, r)[0])) < 6 for r in range(10))


@pytest.mark.parametrize("sampler", [SubsetRandomSampler([3, 5, 7, 9]), [3, 5, 7, 9]])
def test_a_subset_sampler_leaves_the_rest_out(sampler):
    data = federate(sampler=sampler, batch_size=2)
    assert sorted(chain(*seen(data, 0), *seen(data, 1))) == [3, 5, 7, 9]
    assert data.num_classes == 3
    targets = [i // 3 for i in range(12)]
    labelled = FromDataModule(plain(sampler=sampler), targets=targets, num_clients=2)
    labelled.setup()
    assert labelled.train_set.labels.tolist() == [1, 1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 4, "shuffle": True},
        {"batch_size": 4, "sampler": DistributedSampler(Numbers(), 2, 0)},
        {"batch_sampler": BatchSampler(SequentialSampler(range(12)), 4, False)},
    ],
)
def test_what_only_orders_samples_changes_nothing(options):
    data = federate(**options)
    epochs = [data.client_indices(0)[data.order(0, 3, epoch)].tolist() for epoch in range(3)]
    assert seen(data, 0, 3, 5) == [part for epoch in epochs for part in (epoch[:4], epoch[4:])][:5]


def test_a_batch_sampler_says_size_and_drop_last():
    data = federate(batch_sampler=BatchSampler(SequentialSampler(range(12)), 4, True))
    assert (data.batches_per_epoch(0), data.batch_size, data.drop_last) == (1, 4, True)


def test_a_dataset_that_takes_lists_of_positions():
    class Lists(Numbers):
        def __getitem__(self, positions):
            assert isinstance(positions, list)
            return torch.tensor(positions)

    sampler = BatchSampler(RandomSampler(range(12)), 4, False)
    data = FromDataModule(
        plain(Lists(), batch_size=None, sampler=sampler), partition=IID(), num_clients=2, seed=1
    )
    assert seen(data, 1, 2, 5) == seen(federate(batch_size=4), 1, 2, 5)


def test_a_dataset_that_makes_its_batches_itself():
    class Batches(Numbers):
        def __getitem__(self, i):
            return {"x": np.full(10 + i, i)}

    data = FromDataModule(
        plain(Batches(), batch_size=None), partition=IID(), num_clients=2, val_fraction=0.5, seed=1
    )
    batches = list(data.client_batches(0, 0, 3))
    assert data.batches_per_epoch(0) == 3 and data.smallest_batch() is None
    assert all(len(b["x"]) == 10 + b["x"][0] for b in batches)  # tensors, of a batch each
    assert sorted(int(b["x"][0]) for b in batches) == sorted(data.client_indices(0))
    assert [n for _, n in data.full_batches(0)] == [1, 1, 1] and len(data.val_dataloader()) == 6
    assert len([*data.val_dataloader()]) == 6


def test_batches_of_items_can_still_be_asked_for():
    data = FromDataModule(
        plain(batch_size=None), num_clients=2, batch_size=4, collate=torch.stack, seed=1
    )
    assert seen(data, 0, 0, 2) == seen(federate(batch_size=4), 0, 0, 2)


def test_no_val_dataloader_is_no_validation_and_said_in_one_line():
    x = torch.randn(12, 20, dtype=torch.float64)
    samples = list(zip(x, torch.arange(12) % 4, strict=True))
    inner = Loads(DataLoader(samples, batch_size=4))
    module, fit = federated(Lit(), participation="all", engine="sequential"), trainer(2)
    fit.fit(module, FromDataModule(inner, num_clients=2))
    assert [n for n in module.notes if "val" in n] == ["no validation: Loads has no val_dataloader"]
    assert "val/acc" not in fit.callback_metrics and "train/loss" in fit.callback_metrics
    module = federated(Lit(), participation="all", engine="sequential")
    trainer(1).fit(module, FromDatasets(samples, num_clients=2))
    assert any("FromDatasets has neither validation nor test data" in note for note in module.notes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FromDataModule("my_data.Plain"), "datamodule is 'my_data.Plain': give a Light"),
        (lambda: FromDataModule(Loads), "not its class"),
        (lambda: FromDataModule(Loads(Doubled(Numbers()))), r"Doubled, whose own __iter__"),
        (lambda: federate(sampler=Named()), "sampler Named"),
        (lambda: federate(batch_sampler=Pairs(Named(), 2, False)), "batch sampler Pairs"),
        (lambda: federate(sampler=RandomSampler(range(12), num_samples=5)), "5 samples.*12"),
        (lambda: federate(sampler=WeightedRandomSampler([1.0] * 12, 12, False)), "replacement=F"),
        (lambda: federate(sampler=WeightedRandomSampler([1.0] * 12, 50)), "50 samples"),
        (
            lambda: federate(12, sampler=WeightedRandomSampler([0.0, *[1.0] * 11], 12)),
            r"Client \d+ has no sample",
        ),
        (lambda: FromDataModule(plain(Stream()), num_clients=2), "dataset of Loads is a Stream"),
        (lambda: FromDatasets(Stream(), num_clients=2), "train is a Stream.*clients=.*list"),
        (lambda: FromDatasets(clients=[Numbers(), Stream()]), "client 1 is a Stream"),
        (lambda: FromDatasets(), "one of the two"),
        (lambda: FromDatasets(Words(), clients=[Words()]), "one of the two"),
        (lambda: FromDatasets(Words(), targets=[0, 1], num_clients=2), r"\(2,\).*12 samples"),
        (lambda: FromDatasets(clients=[Words(2), Words(0)]), "Client 1"),
        (lambda: FromDatasets(clients=[]), "no samples|clients is empty"),
        (lambda: FromDatasets(Words(), num_clients=13), "num_clients is 13"),
        (lambda: FromDataModule(Ready([1]), num_clients=2), "is a list"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(UserError, match=words):
        make().setup()


def test_outside_of_a_step_the_loader_has_the_samples_of_all_clients() -> None:
    seen = {}

    class Counts(Lit):
        def on_fit_start(self):
            loader = self.trainer.datamodule.train_dataloader()
            seen.update(samples=len(loader.dataset), batch_size=loader.batch_size)
            seen["first"] = [int(loader.dataset[k][1]) for k in range(len(loader.dataset))]

    data = InMemoryDataModule(
        (torch.randn(30, 20).double(), torch.arange(30) % 4),
        clients=[range(10, 16), range(4)],
        batch_size=3,
    )
    trainer(1).fit(federated(Counts(), participation=1.0), data)
    assert (seen["samples"], seen["batch_size"]) == (10, 3)
    assert seen["first"] == [k % 4 for k in (*range(10, 16), *range(4))]
    with pytest.raises(IndexError):
        data.train_dataloader().dataset[10]


NAMES = ["num_classes", "class_names", "mean", "std", "seed", "batch_size", "drop_last"]
NAMES += ["train_set", "val_set", "test_set"]


class Mine(pl.LightningDataModule):
    """Has attributes of the names that this package's data modules have."""

    def __init__(self) -> None:
        super().__init__()
        self.num_classes = 5
        self.class_names = list("abcde")
        self.mean = (0.5,)
        self.std = (0.2,)
        self.batch_size = 16
        self.drop_last = True
        self.seed = 7
        self.val_fraction = 0.5

    def setup(self, stage: str) -> None:
        x, y = clean()
        self.train_set = self.val_set = TensorDataset(x.float(), y % 2)
        self.test_set = None

    def train_dataloader(self) -> Any:
        return DataLoader(self.train_set, batch_size=10)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val_set, batch_size=20)


class Reads(Lit):
    """Reads the data module, as many projects do to build their network."""

    def configure_model(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        self.seen = {name: getattr(data, name, "nothing") for name in NAMES}


def test_a_learner_reads_the_attributes_of_the_wrapped_data_module() -> None:
    plain, federated, mine = Reads(), Reads(), Mine()
    trainer(1).fit(plain, mine)
    module = FederatedModule(federated, seed=0, participation="all", local_epochs=1)
    trainer(1).fit(module, FromDataModule(mine, num_clients=2))
    for name in set(NAMES) - {"train_set", "val_set"}:
        assert federated.seen[name] == plain.seen[name], name
    assert federated.seen["train_set"] is mine.train_set
    assert federated.seen["val_set"] is mine.val_set


def test_the_clients_follow_the_loader_and_the_arguments() -> None:
    data = FromDataModule(Mine(), num_clients=2, seed=3, partition=Dirichlet(1.0))
    data.setup()
    other = FromDataModule(Mine(), num_clients=2, seed=4, partition=Dirichlet(1.0))
    other.setup()
    assert data.run_seed == 3 and data.partition_hash != other.partition_hash
    counts = data.client_label_counts(0)
    assert counts is not None and len(counts) == 2
    (x, _) = next(data.client_batches(0, 0, 1))
    assert len(x) == min(10, data.client_sizes()[0])
    assert not data.validates_on_test and "0   1" in data.partition_table().splitlines()[0]
    for again in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert again.run_seed == 3 and again.seed == 7


def test_a_loader_that_is_made_anew_in_later_rounds_is_refused() -> None:
    module = FederatedModule(Reads(), seed=0, participation="all", local_epochs=1)
    fit = trainer(1, reload_dataloaders_every_n_epochs=2)
    told = r"reload_dataloaders_every_n_epochs=2.* loader of Mine once"
    with pytest.raises(UserError, match=told):
        fit.fit(module, FromDataModule(Mine(), num_clients=2))


OFFSET, SPREAD = 1437.0, 250.0


def clean():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 20, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (60,), generator=generator)


class Raw(pl.LightningDataModule):
    """Pixels as they come; normalised after the transfer, as torchgeo's data modules do."""

    def __init__(self, spread: float = SPREAD):
        super().__init__()
        self.save_hyperparameters()
        self.seen, self.asked, self.ended, self.counted, self.found = [], [], [], 3, None

    def setup(self, stage):
        x, y = clean()
        self.data = TensorDataset(x * self.hparams.spread + OFFSET, y)

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=6, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=25)

    test_dataloader = val_dataloader

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        self.seen.append((self.trainer.training, self.trainer.validating, len(x)))
        return (x - OFFSET) / self.hparams.spread, y

    def teardown(self, stage):
        self.ended.append(stage)
        del self.data

    def state_dict(self):
        return {"counted": self.counted}

    def load_state_dict(self, state_dict):
        self.found = state_dict["counted"]

    def on_exception(self, exception):
        self.asked.append(type(exception).__name__)


def around(learner, engine="sequential"):
    torch.manual_seed(0)
    return federated(learner(), participation="all", engine=engine)


def run(data, rounds=2, learner=Lit, engine="sequential", **settings):
    module = around(learner, engine)
    fit = trainer(rounds, **settings)
    fit.fit(module, data)
    return module, fit


def of_raw(inner):
    return FromDataModule(inner, partition=IID(), num_clients=3, seed=5)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_clients_train_on_what_the_transfer_hook_makes(engine):
    x, y = clean()
    x = (x * SPREAD + OFFSET - OFFSET) / SPREAD
    plain = InMemoryDataModule(
        (x, y), test=(x, y), partition=IID(), num_clients=3, batch_size=6, seed=5
    )
    expected, _ = run(plain, engine=engine)
    inner = Raw()
    module, fit = run(of_raw(inner), engine=engine)
    assert torch.equal(module.global_vector, expected.global_vector)
    tested = fit.test(module, of_raw(Raw()), verbose=False)[0]["test/acc"]
    assert tested == trainer().test(module, plain, verbose=False)[0]["test/acc"]
    evaluated = [entry for entry in inner.seen if entry[1]]
    # once a batch, and never the round's token
    assert evaluated == [(False, True, n) for n in (25, 25, 10)] * 2
    assert all(entry[0] and entry[2] in (6, 2) for entry in inner.seen if not entry[1])


def test_full_gradients_see_the_hooks_too():
    data = of_raw(Raw())
    data.datamodule.trainer = data.trainer = trainer()
    whole = torch.cat([x for (x, _), _ in data.full_batches(1)])
    assert torch.allclose(whole, clean()[0][data.client_indices(1)])
    assert torch.allclose(data.one_batch(1, 2)[0], whole[:2])


def test_all_three_hooks_come_in_lightnings_order_and_replace_each_other():
    class Three(Raw):
        order = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [*batch, "before"]

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [*batch, device.type]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [*batch, "after"]

    batch = next(of_raw(Three()).client_batches(0, 0, 1))
    assert batch[2:] == ["before", "cpu", "after"]
    assert of_raw(Three()).transfer_hooks == Three.order
    assert of_raw(Raw()).transfer_hooks == Three.order[2:]


@pytest.mark.parametrize(
    "hook", ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
)
@pytest.mark.parametrize("made", ["memory", "datasets"])
def test_hooks_get_the_batch_where_lightning_would_give_it(made, hook):
    def see(self, batch, *rest):
        self.seen = batch[0].device.type
        return [part.to(rest[0]) for part in batch] if hook == "transfer_batch_to_device" else batch

    kind = type("Seeing", (InMemoryDataModule if made == "memory" else FromDatasets,), {hook: see})
    data = kind(clean() if made == "memory" else TensorDataset(*clean()), num_clients=2)
    (x, y), *_ = data.client_batches(0, 0, 1, device=torch.device("meta"))
    assert x.is_meta and y.is_meta
    assert data.seen == ("meta" if hook == "on_after_batch_transfer" else "cpu")


def test_hooks_of_a_subclass_of_ours_are_honoured_and_spared_the_token():
    class Doubled(InMemoryDataModule):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            x, y = batch
            return x.mul_(2), y  # in place, as batches of a DataLoader allow

    x, y = clean()
    made = [cls((z, y), test=(z, y), num_clients=3, batch_size=6, seed=5)
            for cls, z in ((Doubled, x), (InMemoryDataModule, 2 * x))]  # fmt: skip
    (ours, fit), (expected, other) = (run(data, rounds=3) for data in made)
    assert torch.equal(ours.global_vector, expected.global_vector)
    assert fit.callback_metrics["val/loss"] == other.callback_metrics["val/loss"]


def test_a_learner_may_change_its_evaluation_batch_in_place():
    class Careless(Lit):
        def validation_step(self, batch, batch_idx):
            batch[0].mul_(0.5)
            super().validation_step(batch, batch_idx)

    class Careful(Lit):
        def validation_step(self, batch, batch_idx):
            super().validation_step([0.5 * batch[0], batch[1]], batch_idx)

    x, y = clean()
    losses = []
    for learner in (Careless, Careful):
        data = InMemoryDataModule((x, y), test=(x, y), num_clients=3, seed=5)
        _, fit = run(data, rounds=3, learner=learner)
        losses.append(fit.callback_metrics["val/loss"])
    assert losses[0] == losses[1]


def test_state_hyper_parameters_and_teardown_are_the_wrapped_ones(tmp_path):
    inner = Raw(spread=100.0)
    checkpoints = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    module, fit = run(of_raw(inner), **checkpoints)
    assert inner.ended == ["fit"]
    path = fit.checkpoint_callback.best_model_path
    assert Raw.load_from_checkpoint(path, map_location="cpu").hparams.spread == 100.0
    later = Raw(spread=100.0)
    trainer(3, **checkpoints).fit(around(Lit), of_raw(later), ckpt_path=path)
    assert later.found == 3
    trainer(1).fit(module, of_raw(inner))
    again = of_raw(inner)
    for _ in range(2):  # teardown gave its data back: setup makes them anew
        trainer(1).fit(around(Lit), again)
    assert inner.ended == ["fit"] * 4 and again.counted == 3 and again.hparams.spread == 100.0
    with pytest.raises(AttributeError, match="nothing"):
        _ = again.nothing


def test_an_exception_reaches_it():
    class Broken(Lit):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("broken")

    inner = Raw()
    with pytest.raises(RuntimeError, match="broken"):
        run(of_raw(inner), learner=Broken)
    assert inner.asked == ["RuntimeError"]


def test_a_data_module_of_lightning_pytorch_and_a_copy():
    lightning = pytest.importorskip("lightning.pytorch")

    class Other(lightning.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(*clean()), batch_size=6)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + 1, batch[1]

    data = of_raw(Other())
    first = next(data.client_batches(0, 0, 1))[0]
    assert torch.equal(first, clean()[0][data.client_indices(0)[data.order(0, 0, 0)][:6]] + 1)
    twin = copy.deepcopy(data)
    assert torch.equal(next(twin.client_batches(0, 0, 1))[0], first)
    assert twin.on_after_batch_transfer([first, None], 0)[0].equal(first + 1)
    ours = pickle.loads(pickle.dumps(of_raw(Raw())))
    assert ours.datamodule is not None and ours.num_clients == 3
