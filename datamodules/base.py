"""The base of all federated data modules: split, batches by client, evaluation on global sets."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from fl_lightning.datamodules.batches import batch_sizes
from fl_lightning.datamodules.batches.augmentations import (
    MIXING,
    CropFlip,
    Pixels,
    augmentations_of,
    augmented,
    augmented_batches,
)
from fl_lightning.datamodules.batches.biases import Bias, biased, check_biases
from fl_lightning.datamodules.batches.samples import (
    CPU,
    Batch,
    Change,
    DatasetSamples,
    Samples,
    TensorSamples,
    drawing_apart,
    makes_batches,
    one_by_one,
)
from fl_lightning.datamodules.loaders import RoundToken, Transfer, evaluation_loader, say
from fl_lightning.datamodules.partitions.client_tests import (
    ClientTests,
    GroupTests,
    HeldOut,
    OwnTests,
    check_test_clients,
)
from fl_lightning.datamodules.partitions.partition import IID, ByGroup, Indices, Partition
from fl_lightning.datamodules.partitions.split import (
    Split,
    What,
    by_name,
    check_apart,
    check_given,
    global_test,
    joined,
    split_samples,
)
from fl_lightning.datamodules.partitions.split_summary import (
    card,
    partition_figure,
    partition_measures,
    partition_table,
    save_partition,
)
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import BelowOne, PositiveInt
from fl_lightning.introspection.init_args import Given
from fl_lightning.machine.lightning import pl
from fl_lightning.sampling import check_seed, generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FederatedDataModule(Given, pl.LightningDataModule, ABC):
    """Training samples that are split over clients; validation and test sets stay whole.

    Subclasses override ``load``. It sets ``train_set`` and, if such data exist, ``val_set`` and
    ``test_set`` (``TensorSamples`` or ``DatasetSamples``), and optionally ``groups`` ``(N,)`` for
    ``ByGroup``. If a subclass has the attributes ``sample_shape`` (of x) and ``num_classes``, the
    command line builds networks that fit.

    Args:
        num_clients: None: the number that the partition or the data set has.
        partition: None: ``IID()``, or the data set's own clients if it has them.
        biases: applied to the clients' training images.
        batch_size: None: all samples of a client in one batch. A client with fewer samples trains
            on all that it has.
        samples: take only that many training samples, of each class alike, before anything else;
            None: all.
        val_fraction: share of the training data that is held out for validation before the split;
            with ``clients``, a share of each client's own list.
        client_test_fraction: share of its samples, of each class alike, that each client holds out
            to test on.
        clients: the clients' index arrays themselves, instead of a partition; ``{name: array}``
            names the clients.
        test_clients: each client's own test set, as positions in the test data, instead of
            ``client_test_fraction``; any sequence, also a lazy one, or ``{name: array}``.
        pooled: join training and test data to one pool, which is split, as PFLlib and FL-bench do.
            Clients' test samples are then those that the partition gives, or
            ``client_test_fraction``; all of them together are the test set.
        seed: seed of the split, the order of samples and the augmentation; None: the run's.
        drop_last: leave out an epoch's last batch if it is shorter (each epoch leaves out other
            samples); K_i counts the rest.
        augment: changes of the clients' training batches of pictures, by name and in this order:
            ``crop``, ``flip``, ``randaugment``, ``mixup``, ``cutmix``, each with arguments where
            needed: ``[crop, {randaugment: {magnitude: 5}}]``. The random draws depend on (seed,
            round, client, step). With ``mixup`` or ``cutmix`` y becomes shares of the classes
            ``(n, classes)``.
        eval_batch_size: number of samples per batch in evaluation; None: 1,000, and with Datasets
            at most as many as take 64 MiB.

    The subclass's own transfer hooks (``on_after_batch_transfer``, …) get the clients' batches and
    those of evaluation.
    """

    default_clients: int | None = None
    default_partition: Partition = IID()
    name: str | None = None
    # Mean and deviation that normalise pixels in [0, 1], one number per channel; empty: no
    # normalisation.
    mean: Sequence[float] = ()
    std: Sequence[float] = ()
    sample_shape: tuple[int, ...] | None = None

    def __init__(
        self,
        *,
        num_clients: PositiveInt | None = None,
        partition: Partition | None = None,
        biases: Sequence[Bias] = (),
        batch_size: PositiveInt | None = 50,
        val_fraction: BelowOne = 0.0,
        client_test_fraction: BelowOne = 0.0,
        clients: Sequence[Any] | Mapping[str, Any] | None = None,
        seed: int | None = None,
        samples: PositiveInt | None = None,
        drop_last: bool = False,
        eval_batch_size: PositiveInt | None = None,
        test_clients: Sequence[Any] | Mapping[str, Any] | None = None,
        pooled: bool = False,
        augment: Literal[False] | str | Sequence[str | dict[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        names, given, tests = by_name(clients, test_clients)
        check_given(given, num_clients, partition)
        check_test_clients(tests, client_test_fraction)
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.eval_batch_size = eval_batch_size
        self.biases = tuple(biases)
        self.val_fraction = val_fraction
        self.client_test_fraction = client_test_fraction
        self.seed = None if seed is None else check_seed("data.seed", seed)
        self._wanted_samples = samples
        self.partition = partition or (self.default_partition if given is None else IID())
        self.augmentation: CropFlip | None = None
        self._named_augmentations = augmentations_of(augment or ())
        self.train_set: Samples | None = None
        self.val_set: Samples | None = None
        self.test_set: Samples | None = None
        self.groups: NDArray[Any] | None = None
        self._wanted_clients = num_clients
        self._given: Sequence[Any] | None = given
        self._test_clients: Sequence[Any] | None = tests
        self._names_given = names
        self._pooled = pooled
        if names:
            self.client_names = names
        # ``load`` sets this if clients come with their own test sets.
        self.own_tests: OwnTests | GroupTests | None = None
        self._split: Split | None = None
        self._split_seed: int | None = None
        # The names of all groups in the data, ascending; None: not loaded.
        self._group_names: tuple[str, ...] | None = None
        # The weights ``(N,)`` of the samples from a WeightedRandomSampler.
        self._weights: NDArray[np.float64] | None = None
        self._transfer = Transfer(self, self._transfers())

    def _transfers(self) -> Any:
        return self

    @property
    def transfer_hooks(self) -> tuple[str, ...]:
        """Return the data module's transfer hooks, which replace the learner's."""
        return tuple(self._transfer.hooks)

    @property
    def _mine(self) -> FederatedDataModule:
        """Return what holds this class's own attributes, which others may hide."""
        return self

    # ---- loading and splitting

    @abstractmethod
    def load(self) -> None:
        """Set ``train_set``, ``val_set``, ``test_set`` and ``groups``; called once."""

    @property
    def run_seed(self) -> int:
        """Return ``seed``, else the attached run's seed, else Lightning's global seed, else 0."""
        if self._mine.seed is not None:
            return self._mine.seed
        of_run = getattr(getattr(self.trainer, "lightning_module", None), "run_seed", None)
        return int(os.environ.get("PL_GLOBAL_SEED", 0) if of_run is None else of_run)

    def setup(self, stage: str | None = None) -> None:
        """Load once, and split once per seed."""
        if self._mine.train_set is None:
            self.load()
            if self._names_given:
                self.client_names = self._names_given
            self._pool()
            check_biases(self.biases, self._mine.train_set)
        seed = self.run_seed
        count = (self._wanted_clients, self.default_clients)
        if self._split_seed != seed:
            assert self._mine.train_set is not None
            tests = self._tests(self._mine.train_set, seed)
            given = (self._given, self.val_fraction, tests, self._wanted_samples)
            partition = self.partition.bound(self)
            self._split = split_samples(self._mine.train_set, partition, count, *given, seed)
            check_apart(self._split, self._pooled)
            if self._pooled:
                self.test_set = global_test(self._mine.train_set, self._split)
            if isinstance(self.own_tests, OwnTests):
                self.own_tests.check_number(len(self._split.clients))
            self._split_seed = seed
            self._name_clients(self._split, partition)

    def _pool(self) -> None:
        """With ``pooled``, make one set of the training and the test data."""
        if not self._pooled:
            return
        assert self._mine.train_set is not None
        self.train_set = joined(type(self).__name__, self._mine.train_set, self._mine.test_set)
        self.test_set = None
        self.own_tests = None

    def _name_clients(self, split: Split, partition: Partition) -> None:
        """Name each client of ``ByGroup`` after the group of its samples, if groups have names.

        With another seed all samples of a group may be held out; its name then belongs to no
        client.
        """
        if self._group_names is None:
            self._group_names = tuple(self.client_names)
        if not isinstance(partition, ByGroup) and split.by_partition:
            used = partition if split.kept is None else partition.restrict(split.kept)
            self.client_names = used.names or self.client_names
        if not isinstance(self.partition, ByGroup) or not split.by_partition:
            return
        given = self.partition.groups
        groups = np.asarray(self.groups if given is None else given)
        distinct = np.unique(groups)
        names = self._group_names
        if given is not None or len(names) != len(distinct):
            names = tuple(ByGroup(groups.tolist()).names)
        if names:
            left = distinct if split.kept is None else np.unique(groups[split.kept])
            self.client_names = [names[place] for place in np.searchsorted(distinct, left)]

    def _tests(self, train: Samples, seed: int) -> ClientTests | None:
        if self.client_test_fraction > 0:
            return HeldOut(self.client_test_fraction, train.labels, seed)
        if self._test_clients is not None:
            if self._mine.test_set is None:
                raise UserError(
                    f"test_clients gives positions in the test data, and {type(self).__name__} has "
                    "none here: give test data, or FromDatasets with test_clients, one Dataset per "
                    "client."
                )
            self.own_tests = OwnTests(self._mine.test_set, self._test_clients, len(train))
        return self.own_tests

    def _ready(self) -> None:
        if self._split_seed is None:
            self.prepare_data()
            self.setup()

    @property
    def _train(self) -> Samples:
        self._ready()
        assert self._mine.train_set is not None
        return self._mine.train_set

    # ---- who holds what

    @property
    def _who(self) -> Split:
        self._ready()
        assert self._split is not None
        return self._split

    @property
    def num_clients(self) -> int:
        if self._given is not None:
            return len(self._given)
        if self._split is not None:
            return len(self._split.clients)
        own_groups = getattr(self.partition, "groups", ()) is None
        count = self._wanted_clients or self.partition.clients or self.default_clients
        # The number of the data set's own groups is known only after it is loaded.
        return len(self._who.clients) if count is None or own_groups else count

    # The clients' names, if the data have names; ``load`` gives one for each of ``groups``,
    # ascending.
    client_names: Sequence[str] = ()
    # The classes' names in the order of their labels, if the data have names.
    class_names: Sequence[str] = ()

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """Return the shape of x for a class with these arguments; None: it depends on the data."""
        return cls.sample_shape

    @classmethod
    def own_clients(cls, **arguments: Any) -> bool:
        """Return whether the data decide how many clients there are."""
        return False

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the number of classes with these arguments; None: it depends on the data."""
        # Packaged sets have a class attribute, others a property.
        return cls.num_classes if isinstance(cls.num_classes, int) else None

    @property
    def num_classes(self) -> int | None:
        """Return the training data's largest label plus one; None without class labels."""
        # Packaged data sets override this with a class attribute, which is known without the data.
        labels = self._train.labels
        return None if labels is None else int(labels.max()) + 1

    def one_sample(self) -> Batch:
        """Return the first training sample as a batch of one, without drawing random numbers."""
        first = np.zeros(1, np.int64)
        if isinstance(self._train, TensorSamples):
            return next(self._train.batches(first, 1))
        with drawing_apart():
            return self._train.read(first)

    def client_sizes(self) -> NDArray[np.int64]:
        """Return the clients' numbers of samples ``(m,)``, read-only if they are all the same."""
        return self._who.sizes

    def client_indices(self, client: int) -> Indices:
        """Return the positions ``(N_i,)`` of the training samples that a client trains on."""
        return self._who.indices(client)

    def client_label_counts(self, client: int) -> NDArray[np.int64] | None:
        """Return a client's training samples per class ``(C,)``; None without classes."""
        labels = self._train.labels
        classes = self._mine.num_classes
        if labels is None or classes is None:
            return None
        return np.bincount(labels[self.client_indices(client)], minlength=classes)

    def client_test_indices(self, client: int) -> Indices:
        """Return the positions of a client's test samples; there may be none.

        A position below the number N of training samples is a training sample that was held out.
        Position N + j is sample j of the test data, in the given order, if clients have their own
        test sets.
        """
        return self._who.test_indices(client)

    @property
    def tests_clients(self) -> bool:
        """Return whether clients have their own test samples."""
        return self.client_test_fraction > 0 or self._who.test is not None

    def client_dataset(self, client: int) -> Dataset[Any]:
        """Return the samples that a client trains on, one by one, without augmentation."""
        return one_by_one(self._train, self.client_indices(client), self._bias(client))

    @property
    def partition_hash(self) -> str:
        """Return sixteen hexadecimal digits, which are the same for the same split."""
        return self._who.hash

    @property
    def label_hash(self) -> str:
        """Return sixteen hexadecimal digits of all training labels; empty without classes."""
        return self._who.label_hash

    def partition_table(self) -> str:
        """Return samples and classes of the first clients as text."""
        return partition_table(self)

    def partition_measures(self) -> dict[str, float]:
        """Return ``total_variation`` (mean over clients, from all clients' labels, 0 to 1),
        ``effective_classes`` (mean of exp(entropy)) and ``gini`` of sizes; without labels ``gini``.
        """
        return partition_measures(self)

    def plot_partition(self) -> Figure:
        """Return a heat map of clients and classes (the first 200 clients)."""
        return partition_figure(self)

    def save_partition(self, path: str | Path) -> None:
        """Write the split as ``.npz``, for ``partition=Saved(path)``."""
        save_partition(Path(path), self._who, self._train.labels)

    def card(self) -> dict[str, str]:
        """Return the entries about the data for a run's card: title → text."""
        return card(self, self._who)

    # ---- batches of a client

    def batches_per_epoch(self, client: int) -> int:
        return batch_sizes.epoch_batches(
            int(self.client_sizes()[client]), self._mine.batch_size, self._mine.drop_last
        )

    def smallest_batch(
        self, steps: ArrayLike | None = None, clients: Sequence[int] | None = None
    ) -> tuple[int, int] | None:
        """Return the smallest batch size that any of ``clients`` trains on, and the first such one.

        If ``clients`` is None, all clients count; this costs O(m). The result is None if the
        dataset, or a subclass's own ``client_batches``, makes the batches.

        Args:
            steps: local steps of a round, for all clients or for each ``(m,)``; None: an epoch or
                more.
        """
        own_batches = type(self).client_batches is not FederatedDataModule.client_batches
        if own_batches or makes_batches(self._train):
            return None
        return batch_sizes.smallest_batch(
            self.client_sizes(), self._mine.batch_size, self._mine.drop_last, steps, clients
        )

    def order(self, client: int, round: int, epoch: int) -> Indices:
        """Return positions into ``client_indices(client)`` in an epoch's order, in that round."""
        return self._order(client, round, epoch, self.client_indices(client))

    def _order(
        self, client: int, round: int, epoch: int, indices: Indices, purpose: str = ""
    ) -> Indices:
        if self._weights is None:
            shuffle = generator(self.run_seed, purpose or "order", round, client, epoch)
            return shuffle.permutation(len(indices))
        draw = generator(self.run_seed, purpose + "weighted", round, client, epoch)
        return batch_sizes.drawn_by_weight(self._weights[indices], draw, client)

    def client_batches(
        self, client: int, round: int, steps: int, device: torch.device = CPU, purpose: str = ""
    ) -> Iterator[Batch]:
        """Yield exactly ``steps`` batches; every epoch is shuffled again.

        ``purpose`` is the name of the draws; local steps have their own.
        """
        data = self._train
        indices = self.client_indices(client)
        device = torch.device(device)
        size = self._mine.batch_size or len(indices)
        source = self._transfer.source(device)
        per_epoch = batch_sizes.epoch_batches(len(indices), size, self._mine.drop_last)

        def epochs() -> Iterator[tuple[int, Indices]]:
            for epoch in range(-(-steps // per_epoch)):
                batches = min(per_epoch, steps - epoch * per_epoch)
                order = indices[self._order(client, round, epoch, indices, purpose)]
                yield epoch, order[: batches * size]

        def cut() -> Iterator[Indices]:
            for _, order in epochs():
                for start in range(0, len(order), size):
                    yield order[start : start + size]

        def made() -> Iterator[Batch]:
            assert isinstance(data, TensorSamples)
            for epoch, order in epochs():
                augment: Change | None = None
                if self.augmentation is not None:
                    rng = generator(self.run_seed, purpose + "augment", round, client, epoch)
                    augment = augmented(self.augmentation, rng, len(indices))
                yield from data.batches(order, size, source, self._bias(client), augment)

        # Take all epochs at once, so that processes that read ahead need not wait at the end of an
        # epoch.
        if isinstance(data, DatasetSamples):
            draws = self._draws(purpose + "samples", round, client)
            batches = data.each(cut(), draws, source)
        else:
            batches = made()
        if self._named_augmentations:
            batches = augmented_batches(
                batches,
                self._named_augmentations,
                lambda k: generator(self.run_seed, purpose + "augment step", round, client, k),
                Pixels(self.mean, self.std),
                self.num_classes,
            )
        yield from self._transfer.batches(batches, device)

    def sampled_batches(
        self,
        client: int,
        round: int,
        positions: Iterable[Sequence[int]],
        device: torch.device = CPU,
    ) -> Iterator[Batch | None]:
        """Yield a batch of these samples for each step; None for a step without samples.

        Args:
            positions: of each step's samples, into ``client_indices(client)``.
        """
        self._check_samples_apart()
        data = self._train
        indices = self.client_indices(client)
        device = torch.device(device)
        source = self._transfer.source(device)
        draws = self._draws("samples", round, client)

        def of(step: int, chosen: Indices) -> Iterator[Batch]:
            def draw(purpose: str) -> np.random.Generator:
                return generator(self.run_seed, purpose, round, client, step)

            batches: Iterator[Batch]
            if isinstance(data, DatasetSamples):
                batches = data.each([chosen], lambda k: draws(step), source)
            else:
                augment: Change | None = None
                if self.augmentation is not None:
                    augment = augmented(self.augmentation, draw("augment"), len(chosen))
                size = len(chosen)
                batches = data.batches(chosen, size, source, self._bias(client), augment)
            if self._named_augmentations:
                named = (self._named_augmentations, lambda k: draw("augment step"))
                pixels = Pixels(self.mean, self.std)
                batches = augmented_batches(batches, *named, pixels, self.num_classes)
            return self._transfer.batches(batches, device)

        for step, places in enumerate(positions):
            chosen = indices[np.asarray(places, np.int64)]
            yield next(of(step, chosen)) if len(chosen) else None

    def _check_samples_apart(self) -> None:
        """Refuse data whose samples cannot be chosen one by one.

        Raises:
            UserError: it names the data and the reason.
        """
        why = self.samples_together
        if why:
            raise UserError(
                f"data {type(self).__name__}: {why}, so a method cannot choose each step's samples."
            )

    @property
    def most_in_batch(self) -> int | None:
        """Return how many samples a full batch has; None: all of a client."""
        size: int | None = self._mine.batch_size
        return size

    @property
    def samples_together(self) -> str:
        """Return why a step's samples cannot be chosen one by one; empty: they can."""
        if type(self).client_batches is not FederatedDataModule.client_batches:
            return "its own client_batches makes the batches"
        if makes_batches(self._train):
            return "its data set makes whole batches"
        if self._weights is not None:
            return "its sampler draws samples by weight"
        mixing = [one for one in self._named_augmentations if isinstance(one, MIXING)]
        return f"{type(mixing[0]).__name__.lower()} mixes samples" if mixing else ""

    @property
    def computed_from_samples(self) -> str:
        """Return the values that all samples are computed with and that depend on training samples,
        such as means; empty: there are none.
        """
        return ""

    def full_batches(
        self, client: int, device: torch.device = CPU, what: What = "train", size: int | None = None
    ) -> Iterator[tuple[Batch, int]]:
        """Yield a client's samples once, in order, not augmented, in batches with their sizes.

        ``what``: the samples that the client trains on or is tested on, or positions. With
        ``drop_last`` the last batch also has the samples that are left.
        """
        data = self._train
        device = torch.device(device)
        indices = self._who.asked(client, what)
        bias = self._bias(client)
        if not len(indices):
            return
        if self.own_tests is not None and indices[0] >= len(data):
            indices = indices - len(data)
            data = self.own_tests.samples
            bias = None  # only training samples are biased
        drop_last = self._mine.drop_last
        if not size or makes_batches(data):
            batch_size = self._mine.batch_size
        else:
            batch_size = size
            drop_last = False
        cut = [indices[part] for part in batch_sizes.slices(len(indices), batch_size, drop_last)]
        source = self._transfer.source(device)
        size = len(cut[0])
        if isinstance(data, DatasetSamples):
            batches = data.each(cut, self._draws("full", client), source)
        elif len(cut[-1]) > size:
            # The last batch is larger than the others, so make it separately.
            parts = (indices[: -len(cut[-1])], size), (cut[-1], len(cut[-1]))
            batches = chain.from_iterable(data.batches(*part, source, bias) for part in parts)
        else:
            batches = data.batches(indices, size, source, bias)
        yield from zip(self._transfer.batches(batches, device), map(len, cut), strict=False)

    def one_batch(self, client: int, samples: int, device: torch.device = CPU) -> Batch:
        """Return a client's first samples as one batch, to try a learner on."""
        indices = self.client_indices(client)[:samples]
        ((batch, _), *_) = self.full_batches(client, device, indices, samples)
        return batch

    @property
    def reads_ahead(self) -> bool:
        """Return whether processes read training batches ahead (``num_workers``)."""
        return isinstance(self._train, DatasetSamples) and self._train.reads_ahead

    def _draws(self, purpose: str, *counters: int) -> Callable[[int], int]:
        """Return the seeds for random draws of processes that read ahead, in the k-th batch."""
        return lambda k: int(generator(self.run_seed, purpose, *counters, k).integers(2**63))

    def _bias(self, client: int) -> Change | None:
        return biased(self.biases, client, self.run_seed) if self.biases else None

    # ---- loaders for Lightning

    def train_dataloader(self) -> RoundToken:
        return RoundToken.of(self)

    def val_dataloader(self) -> Any:
        if self._who.held_out is not None:
            return self._evaluated(self._train, self._who.held_out)
        found = self._mine.val_set or self._mine.test_set
        if found is None and self.trainer is not None:
            name = type(self).__name__
            say(self.trainer, f"no validation: {name} has neither validation nor test data")
        return self._evaluated(found)

    @property
    def validates_on_test(self) -> bool:
        """Return whether validation uses the test set, as the only samples for it."""
        held_out = self._who.held_out
        return held_out is None and self._mine.val_set is None and self._mine.test_set is not None

    def test_dataloader(self) -> Any:
        self._ready()
        return self._evaluated(self._mine.test_set)

    def predict_dataloader(self) -> Any:
        self._ready()
        return self._evaluated(self._mine.test_set)

    def _evaluated(self, data: Samples | None, index: Indices | None = None) -> Any:
        size = self.eval_batch_size
        source = self._transfer.source
        return evaluation_loader(self.trainer, data, index, size, source, self.run_seed)

    # ---- processes that read ahead

    def teardown(self, stage: str) -> None:
        self._close()

    def on_exception(self, exception: BaseException) -> None:
        self._close(wait=False)

    def _close(self, wait: bool = True) -> None:
        own = None if self.own_tests is None else self.own_tests.samples
        for samples in (self._mine.train_set, self._mine.val_set, self._mine.test_set, own):
            if isinstance(samples, DatasetSamples):
                samples.close(wait)
