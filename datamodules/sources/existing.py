"""Datasets and data modules that know no clients, divided by a partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.read_ahead import Workers, check_workers, own_generator
from fl_lightning.datamodules.batches.sample_labels import check_classes
from fl_lightning.datamodules.batches.samples import DatasetSamples
from fl_lightning.datamodules.loaders import overridden, say
from fl_lightning.datamodules.partitions.client_tests import OwnTests, check_test_clients
from fl_lightning.datamodules.partitions.split import by_name
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import NonNegativeInt, PositiveInt
from fl_lightning.machine.lightning import AttributeDict, pl

KNOWN = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)


@dataclass(frozen=True)
class LoaderFacts:
    """A DataLoader's ``dataset``; it uses ``positions`` and draws by ``weights`` (None: plainly).

    ``fetch`` is explained at ``Reading``.
    """

    dataset: Any
    collate: Any
    batch_size: int
    drop_last: bool
    fetch: Literal["sample", "list", "batch"]
    positions: NDArray[np.int64] | None
    weights: NDArray[np.float64] | None
    workers: Workers


def check_map_style(dataset: Any, what: str) -> None:
    """Refuse streams, which have no positions, even if they have a length.

    Raises:
        UserError: the loader cannot be used; the error says what to do instead.
    """
    mapped = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not mapped or isinstance(dataset, IterableDataset):
        raise UserError(
            f"{what} is a {type(dataset).__name__}, without positions that can be split over "
            "clients. Give map-style Datasets (with __len__ and __getitem__): one per client as "
            "FromDatasets(clients=[…]), or list(stream) if a stream fits into memory."
        )


def loader_facts(loader: DataLoader[Any], name: str) -> LoaderFacts:
    """Return the facts of the training loader of the data module ``name``.

    Raises:
        UserError: it is no plain DataLoader of a map-style dataset, or clients cannot use its
            sampler, which is named.
    """
    if getattr(type(loader), "__iter__", None) is not DataLoader.__iter__:
        raise UserError(
            f"The training loader of {name} is a {type(loader).__name__}, whose own __iter__ "
            "clients cannot use: their batches are made of the dataset's samples. Give one torch "
            "DataLoader (a collate_fn, the dataset or on_after_batch_transfer may do what __iter__ "
            "does), or the clients' Datasets to FromDatasets(clients=[…])."
        )
    dataset: Any = loader.dataset
    check_map_style(dataset, f"The training loader's dataset of {name}")
    sampler: Any = loader.sampler
    batches: Any = loader.batch_sampler
    size = loader.batch_size
    drop_last = loader.drop_last
    fetch: Literal["sample", "list", "batch"] = "sample"
    # With batch_size=None and a BatchSampler as sampler, the dataset takes lists of positions.
    if batches is None and isinstance(sampler, BatchSampler):
        batches = sampler
        fetch = "list"
    if batches is not None:
        if type(batches).__iter__ is not BatchSampler.__iter__:
            why = "a client's samples are shuffled and cut by batch_size"
            raise refused(batches, "batch sampler", name, why)
        sampler = batches.sampler
        size = batches.batch_size
        drop_last = batches.drop_last
    elif size is None:
        size = 1
        fetch = "batch"
    total = len(dataset)
    positions, weights = sampled(sampler, total, name)
    workers = Workers(
        loader.num_workers,
        loader.prefetch_factor or 2,
        loader.worker_init_fn,
        loader.multiprocessing_context,
        loader.timeout,
    )
    collate = loader.collate_fn
    return LoaderFacts(dataset, collate, size, drop_last, fetch, positions, weights, workers)


def sampled(
    sampler: Any, total: int, name: str
) -> tuple[NDArray[np.int64] | None, NDArray[np.float64] | None]:
    """Return the positions out of ``total`` that a sampler uses, and their weights.

    None: the sampler uses all positions, or each position once per epoch.
    """
    kind = next(
        (k for k in KNOWN if isinstance(sampler, k) and type(sampler).__iter__ is k.__iter__), None
    )
    given = sampler.indices if kind is SubsetRandomSampler else sampler
    if isinstance(given, list | tuple | range):
        return np.asarray(given, np.int64), None
    if sampler is not None and kind is None:
        why = "which samples a client sees, and in which order, is drawn from the run's seed"
        raise refused(sampler, "sampler", name, why)
    number = total if kind in (None, DistributedSampler) else len(sampler)
    if number != total:
        why = f"it gives {number} samples an epoch, and the dataset has {total}"
        raise refused(sampler, "sampler", name, why)
    if kind is WeightedRandomSampler:
        if not sampler.replacement:
            why = "with replacement=False an epoch has all samples once, so weights have no effect"
            raise refused(sampler, "sampler", name, why)
        return None, np.asarray(sampler.weights, np.float64)
    return None, np.ones(total) if kind is RandomSampler and sampler.replacement else None


def refused(sampler: Any, kind: str, name: str, why: str) -> UserError:
    return UserError(
        f"The training loader of {name} has the {kind} {type(sampler).__name__}, which clients "
        f"cannot use: {why}. Give the loader shuffle=True instead (the help of FromDataModule "
        "lists the samplers that work), or the samples as Datasets to FromDatasets."
    )


class FromDatasets(FederatedDataModule):
    """Federated data from map-style Datasets of any kind; samples are read and collated one by one.

    Args:
        train: the training data, which ``partition`` splits over ``num_clients``.
        val, test: evaluated whole; without ``val`` the run validates on the test set.
        test_clients: one Dataset per client, its own test set, which may be empty. Without ``test``
            all of them together are also the global test set. Give ``{name: Dataset}`` if
            ``clients`` has names; a client that it leaves out has no test samples.
        targets: labels of the training data ``(N,)``, for partitions that use classes; None: the
            dataset's attribute ``targets`` or ``labels``.
        clients: one Dataset per client, if the data are split already; give it instead of
            ``train``. ``{name: Dataset}`` names the clients. If data sets have ``classes``, as
            ImageFolder has, all of them need the same names in the same order.
        collate: turns a list of samples into a batch; None: torch's ``default_collate``.
        num_workers: processes that read ahead (0: none). The bits are the same for any number above
            0, and also for 0 if the datasets draw no random numbers. With processes the draws
            follow (seed, round, client, step).

    ``class_names``: names of the data sets' classes in the order of their labels, if they have
    names.
    """

    def __init__(
        self,
        # The command line's parser does not accept a subclass for Dataset[Any].
        train: Dataset | None = None,  # type: ignore[type-arg]
        val: Dataset | None = None,  # type: ignore[type-arg]
        test: Dataset | None = None,  # type: ignore[type-arg]
        targets: Sequence[int] | None = None,
        clients: Sequence[Dataset] | Mapping[str, Dataset] | None = None,  # type: ignore[type-arg]
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: NonNegativeInt = 0,
        test_clients: (
            Sequence[Dataset] | Mapping[str, Dataset] | None  # type: ignore[type-arg]
        ) = None,
        **arguments: Any,
    ) -> None:
        if (train is None) == (clients is None):
            raise UserError(
                "FromDatasets needs train, or clients (a list of one Dataset per client): give one "
                "of the two."
            )
        names, clients, test_clients = by_name(clients, test_clients)
        given: dict[Place, Any] = {("train", 0): train, ("val", 0): val, ("test", 0): test}
        many: Any
        for argument, many in (("clients", clients), ("test_clients", test_clients)):
            given |= {(argument, i): many[i] for i in range(len(many or ()))}
        sets = {key: one for key, one in given.items() if one is not None}
        for dataset in sets.values():
            check_workers(num_workers, dataset)
        self.class_names = _class_names(sets, names)
        own: Any = None
        if clients is not None:
            train, own = _joined([one for (name, _), one in sets.items() if name == "clients"])
            own = dict(zip(names, own, strict=True)) if names else own
        super().__init__(clients=own, **arguments)
        self._tested: tuple[Dataset[Any] | None, list[Any]] | None = None
        if test_clients is not None:
            check_test_clients(test_clients, self.client_test_fraction)
            tests = [one for (name, _), one in sets.items() if name == "test_clients"]
            self._tested = _joined(tests)
        self._datasets = (
            train if clients is not None else sets.get(("train", 0)),
            sets.get(("val", 0)),
            sets.get(("test", 0)),
        )
        self._targets = targets
        self._collate = collate
        self._workers = Workers(num_workers)

    def load(self) -> None:
        train, val, test = self._datasets
        if train is None or len(cast(Any, train)) == 0:
            raise UserError("FromDatasets' training data have no samples: give at least one.")
        given: dict[str, Any] = {"collate": self._collate, "workers": self._workers}
        self.train_set = compared(self.trainer, DatasetSamples(train, self._targets, **given))
        self.val_set = None if val is None else DatasetSamples(val, **given)
        self.test_set = None if test is None else DatasetSamples(test, **given)
        if self._pooled and self.test_set is not None:
            compared(self.trainer, self.test_set)
        if self._tested is not None:
            whole, indices = self._tested
            if whole is None:
                raise UserError("test_clients has no samples: give at least one client some.")
            tested = DatasetSamples(whole, **given)
            self.own_tests = OwnTests(tested, indices, len(self.train_set))
            self.test_set = self.test_set or tested


def compared(trainer: Any, samples: DatasetSamples) -> DatasetSamples:
    """Return the samples, after reporting if their data set gives them other labels."""
    if text := samples.compare_labels():
        say(trainer, text)
    return samples


MISSING = object()
# A data set's argument, and its place among the clients.
Place = tuple[str, int]


def _class_names(sets: dict[Place, Any], names: Sequence[str]) -> Sequence[str]:
    """Return the classes in the order of their labels, and check that all data sets agree on it."""
    places = {}
    for argument, i in sets:
        who = f": client {repr(names[i]) if names else i}" if "clients" in argument else ""
        places[argument, i] = f"FromDatasets' {argument}{who}"
        check_map_style(sets[argument, i], places[argument, i])
    return check_classes([(places[key], sets[key]) for key in sets])


def _joined(datasets: list[Any]) -> tuple[Dataset[Any] | None, list[Any]]:
    """Return clients' Datasets as one (None if they have no samples), and the positions of each."""
    ends = np.cumsum([len(cast(Any, one)) for one in datasets], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    indices = np.split(np.arange(total), ends[:-1])
    return (ConcatDataset(datasets) if total else None), indices


class Own:
    """FromDataModule's own attributes, of whose names the wrapped data module may have others."""

    def __init__(self, data: FromDataModule) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_data" not in self.__dict__:
            raise AttributeError(name)
        of_class = getattr(FederatedDataModule, name)
        if isinstance(of_class, property) and of_class.fget is not None:
            return of_class.fget(self._data)
        return of_class


class Theirs:
    """An attribute of FromDataModule: the wrapped data module's, if it has it, else its own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, data: Any, owner: type) -> Any:
        if data is None:
            return None
        theirs = getattr(data.__dict__.get("datamodule"), self.name, MISSING)
        return getattr(data._mine, self.name) if theirs is MISSING else theirs

    def __set__(self, data: Any, value: Any) -> None:
        setattr(data._mine, self.name, value)


class FromDataModule(FederatedDataModule):
    """Any LightningDataModule: its training data are split, and its other loaders do not change.

    The attributes of the wrapped data module stay as they are for a learner that reads them
    (``self.trainer.datamodule.num_classes``), also those that other data modules of this package
    have, such as ``batch_size`` and ``val_set``; those that this class hides are at
    ``self.trainer.datamodule.datamodule``.

    The wrapped module's transfer hooks (``on_after_batch_transfer``, …) get the clients' batches
    and those of evaluation, and find its ``trainer``. ``teardown``, ``state_dict``,
    hyper-parameters and other attributes are the data module's own.

    These options of its training loader are kept (``"loader"`` below means: as the loader has it):

    - ``batch_size``, ``drop_last``, ``collate_fn``, within a client; also a plain ``BatchSampler``.
    - ``batch_size=None``: with a ``BatchSampler`` as sampler, batches are lists of positions;
      otherwise each item is a batch, and one local step.
    - ``num_workers``, ``prefetch_factor``, ``timeout``, ``worker_init_fn`` and
      ``multiprocessing_context``: processes read ahead, and random draws are seeded for each batch
      by (seed, round, client, step).
    - ``WeightedRandomSampler``, and ``RandomSampler`` with replacement, within a client: N_i draws
      per epoch, by (seed, round, client, epoch).
    - ``SubsetRandomSampler``, a list of positions: these samples are split.

    ``shuffle``, ``generator`` and ``DistributedSampler`` are ignored, because each client's samples
    are reshuffled in every epoch. ``pin_memory`` and ``persistent_workers`` are treated as true.
    Other samplers and batch samplers, ``num_samples`` other than all, weights without replacement,
    ``IterableDataset``, a DataLoader with its own ``__iter__``, and several loaders are refused,
    and so is ``Trainer(reload_dataloaders_every_n_epochs=…)``.

    Args:
        datamodule: a LightningDataModule of ``pytorch_lightning`` or ``lightning.pytorch``.
        collate: makes a batch of the dataset's items; None: the loader's ``collate_fn``.
        batch_size, drop_last, num_workers: ``"loader"``, or as in ``FromDatasets``.
        eval_batch_size: batch size for samples held out by ``val_fraction``; the data module's own
            loaders keep theirs.

    The other arguments are those of ``FromDatasets``.
    """

    def __init__(
        self,
        datamodule: pl.LightningDataModule | Any,
        targets: Sequence[int] | None = None,
        batch_size: PositiveInt | Literal["loader"] | None = "loader",
        drop_last: bool | Literal["loader"] = "loader",
        num_workers: NonNegativeInt | Literal["loader"] = "loader",
        collate: Callable[[Any], Any] | None = None,
        **arguments: Any,
    ) -> None:
        if isinstance(datamodule, type | str):
            raise UserError(
                f"FromDataModule's datamodule is {datamodule!r}: give a LightningDataModule (an "
                "object, not its class; on the command line a class path that can be imported, "
                "from the current folder too)."
            )
        self.datamodule = datamodule
        super().__init__(
            batch_size=None if batch_size == "loader" else batch_size,
            drop_last=False if drop_last == "loader" else drop_last,
            **arguments,
        )
        self.prepare_data_per_node = getattr(datamodule, "prepare_data_per_node", True)
        self._targets = targets
        self._collate = collate
        self._workers = num_workers
        self._loader_size = batch_size == "loader"
        self._loader_drops = drop_last == "loader"
        self._torn_down = False
        self._named: dict[str, tuple[str, Any]] = {}

    # The wrapped data module's attributes of these names are what a learner and callbacks read.
    num_classes: Any = Theirs()
    class_names: Any = Theirs()
    mean: Any = Theirs()
    std: Any = Theirs()
    seed: Any = Theirs()
    batch_size: Any = Theirs()
    drop_last: Any = Theirs()
    train_set: Any = Theirs()
    val_set: Any = Theirs()
    test_set: Any = Theirs()

    @property
    def _mine(self) -> Any:
        return self.__dict__.setdefault("_own_attributes", Own(self))

    def _transfers(self) -> Any:
        return self.datamodule

    def prepare_data(self) -> None:
        self.datamodule.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        every = getattr(self.trainer, "reload_dataloaders_every_n_epochs", 0)
        if every and stage == "fit":
            raise UserError(
                f"The Trainer has reload_dataloaders_every_n_epochs={every}, but FromDataModule "
                f"reads the training loader of {type(self.datamodule).__name__} once, because the "
                "split over clients follows from its samples. Leave the option out; what changes "
                "from round to round can be drawn in the data set's __getitem__."
            )
        if stage not in (None, "fit"):
            self.datamodule.setup(stage)
        if self._torn_down:  # teardown has released its data
            self.train_set = None
            self._split_seed = None
            self._torn_down = False
        super().setup(stage)
        if self._weights is not None and not self._weights.all():
            for client in range(self.num_clients):
                self.order(client, 0, 0)  # report a wrong loader now, and not in a round

    def load(self) -> None:
        self.datamodule.setup("fit")
        facts = loader_facts(self.datamodule.train_dataloader(), type(self.datamodule).__name__)
        dataset = facts.dataset
        self._check_classes("training loader", dataset)
        fetch = facts.fetch
        targets = self._targets
        if facts.positions is not None:
            if self._given is not None:
                raise UserError(
                    "clients are given, and the training loader of "
                    f"{type(self.datamodule).__name__} uses {len(facts.positions)} of "
                    f"{len(dataset)} samples, so that it is not clear to which samples the "
                    "clients' indices refer. Give the loader all samples, and let clients choose "
                    "theirs; or give a partition in place of clients."
                )
            if targets is not None and len(targets) == len(dataset):
                targets = [targets[i] for i in facts.positions]
            dataset = Subset(dataset, facts.positions.tolist())
        if fetch == "batch" and not self._loader_size:
            fetch = "sample"  # you gave a batch_size: read single samples
        workers = facts.workers
        if self._workers != "loader":
            workers = replace(workers, number=self._workers)
            check_workers(workers.number, dataset)
        elif own_generator(dataset):
            # Each process would have a copy of the generator.
            workers = replace(workers, number=0)
        samples = DatasetSamples(dataset, targets, self._collate or facts.collate, workers, fetch)
        self.train_set = compared(self.trainer, samples)
        self._weights = facts.weights
        if self._loader_size:
            self.batch_size = facts.batch_size
        if self._loader_drops:
            self.drop_last = facts.drop_last

    def val_dataloader(self) -> Any:
        if self._who.held_out is not None:
            return super().val_dataloader()
        if not overridden(self.datamodule, "val_dataloader"):
            say(
                self.trainer,
                f"no validation: {type(self.datamodule).__name__} has no val_dataloader",
            )
            return []
        return self._of_same_classes("val_dataloader", self.datamodule.val_dataloader())

    def test_dataloader(self) -> Any:
        return self._of_same_classes("test_dataloader", self.datamodule.test_dataloader())

    def _of_same_classes(self, name: str, loaders: Any) -> Any:
        """Return the loaders, whose classes need the names of the training loader's."""
        for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
            self._check_classes(name, getattr(loader, "dataset", None))
        return loaders

    def _check_classes(self, name: str, dataset: Any) -> None:
        self._named[name] = (f"The {name} of {type(self.datamodule).__name__}", dataset)
        names = check_classes(self._named.values())
        self.class_names = self._mine.class_names or names

    def predict_dataloader(self) -> Any:
        return self.datamodule.predict_dataloader()

    # ---- everything else that Lightning, callbacks and learners read is the wrapped data module's

    @property
    def trainer(self) -> Any:
        return self.__dict__.get("_attached")

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.__dict__["_attached"] = trainer
        self.datamodule.trainer = trainer

    @property
    def hparams(self) -> Any:
        return AttributeDict(getattr(self.datamodule, "hparams", {}))

    @property
    def hparams_initial(self) -> Any:
        return AttributeDict(getattr(self.datamodule, "hparams_initial", {}))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.datamodule.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.datamodule.load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self.datamodule.teardown(stage)
        self._torn_down = overridden(self.datamodule, "teardown")

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if hasattr(self.datamodule, "on_exception"):
            self.datamodule.on_exception(exception)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "datamodule" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.datamodule, name)
