"""Datasets and data modules that know no clients, divided by a partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset

from fl_lightning.accepted import NonNegativeInt, PositiveInt
from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.read_ahead import Workers, check_workers, own_generator
from fl_lightning.datamodules.batches.samples import DatasetSamples
from fl_lightning.datamodules.loaders import say
from fl_lightning.datamodules.partitions.client_names import by_name
from fl_lightning.datamodules.partitions.client_tests import OwnTests, check_test_clients
from fl_lightning.datamodules.partitions.partition import check_sequence
from fl_lightning.datamodules.sources.class_names import check_classes, relabelled
from fl_lightning.datamodules.sources.loader_facts import check_map_style, loader_facts
from fl_lightning.datamodules.transfer import overridden
from fl_lightning.errors import UserError
from fl_lightning.machine.lightning import AttributeDict, pl


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
            ImageFolder has, all of them need the same names in the same order, unless you give the
            argument ``classes``.
        classes: names of all classes, in the order of their numbers. Each data set's labels are
            then numbered by its own names; samples have to be pairs (x, label).
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
        classes: Sequence[str] | None = None,
        **arguments: Any,
    ) -> None:
        if (train is None) == (clients is None):
            raise UserError(
                "FromDatasets needs train, or clients (a list of one Dataset per client): give one "
                "of the two."
            )
        if classes is not None and targets is not None:
            raise UserError(
                "FromDatasets: classes numbers the labels by name, and targets gives numbers: give "
                "one of the two."
            )
        names, clients, test_clients = by_name(clients, test_clients)
        given: _Given = {
            "clients": _listed("clients", clients),
            "train": None if train is None else [train],
            "test_clients": _listed("test_clients", test_clients),
            "val": None if val is None else [val],
            "test": None if test is None else [test],
        }
        self.class_names = _numbered(given, names, classes)
        indices = None
        if given["clients"] is not None:
            whole, indices = _joined(given["clients"])
            train = whole or train
        elif given["train"] is not None:
            (train,) = given["train"]
        named = indices if not names or indices is None else dict(zip(names, indices, strict=True))
        super().__init__(clients=named, **arguments)
        self._tested: tuple[Dataset[Any] | None, list[Any]] | None = None
        if given["test_clients"] is not None:
            check_test_clients(given["test_clients"], self.client_test_fraction)
            self._tested = _joined(given["test_clients"])
            check_workers(num_workers, self._tested[0])
        val, test = (None if given[name] is None else given[name][0] for name in ("val", "test"))
        for dataset in (train, val, test):
            if dataset is not None:
                check_workers(num_workers, dataset)
        self._datasets = (train, val, test)
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
# The data sets of each argument; None if the argument was not given.
_Given = dict[str, Any]
MANY = ("clients", "test_clients")


def _listed(name: str, given: Any) -> list[Any] | None:
    """Return the clients' Datasets of an argument, each of which can be read by position."""
    if given is None:
        return None
    check_sequence(f"FromDatasets' {name}", given, "each client's Dataset")
    return [given[i] for i in range(len(given))]


def _numbered(given: _Given, names: Sequence[str], classes: Sequence[str] | None) -> Sequence[str]:
    """Check that one label means one class in all data sets; replace them by ``classes``, if given.

    Returns:
        The names of the classes, in the order of their labels.
    """
    places: list[tuple[str, int, str]] = []
    for name, datasets in given.items():
        for i, dataset in enumerate(datasets or ()):
            place = f"FromDatasets' {name}"
            check_map_style(dataset, f"{place.removesuffix('s')} {i}" if name in MANY else place)
            if name in MANY:
                place += f": client {repr(names[i]) if names else i}"
            places.append((name, i, place))
    if classes is None:
        return check_classes(((place, given[name][i]) for name, i, place in places), "classes")
    if len(set(classes)) < len(classes):
        raise UserError(f"FromDatasets' classes is {list(classes)!r}: give each name once.")
    for name, i, place in places:
        given[name][i] = relabelled(place, given[name][i], classes)
    return list(classes)


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


def alike(theirs: Any, own: Any) -> bool:
    """Return whether both are lists of the same values."""
    both = isinstance(theirs, list | tuple) and isinstance(own, list | tuple)
    return both and list(theirs) == list(own)


def their_names(datamodule: Any) -> set[str]:
    """Return the public attributes that a data module has besides Lightning's."""
    names = set(vars(datamodule))
    for one in type(datamodule).__mro__:
        if one.__name__ == "LightningDataModule":
            return {name for name in names - {*dir(one), *vars(one())} if name[0] != "_"}
        names |= set(vars(one))
    return set()


class FromDataModule(FederatedDataModule):
    """Any LightningDataModule: the dataset behind its training loader is split, and its other
    loaders do not change.

    The attributes of the wrapped data module stay as they are for a learner that reads them
    (``self.trainer.datamodule.num_classes``), also those that other data modules of this package
    have, such as ``batch_size`` and ``val_set``.

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
        if isinstance(datamodule, type) or not callable(
            getattr(datamodule, "train_dataloader", None)
        ):
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
        self._told = False
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
        if not self._told:
            self._told = True
            self._say_of_attributes()
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
        if self._workers == "loader":
            workers = facts.workers
        else:
            workers = replace(facts.workers, number=self._workers)
        if self._workers != "loader":
            check_workers(workers.number, dataset)
        # Each process would have a copy of the generator.
        elif workers.number and (where := own_generator(dataset)):
            workers = replace(workers, number=0)
            say(
                self.trainer,
                "num_workers of the training loader is not used: its dataset keeps a generator "
                f"({where})",
            )
        samples = DatasetSamples(dataset, targets, self._collate or facts.collate, workers, fetch)
        self.train_set = compared(self.trainer, samples)
        self._weights = facts.weights
        if self._loader_size:
            self.batch_size = facts.batch_size
        if self._loader_drops:
            self.drop_last = facts.drop_last

    def _say_of_attributes(self) -> None:
        """Report which attributes the wrapped data module and this one both have."""
        name = type(self.datamodule).__name__
        other = []
        for one in ("num_classes", "class_names", "batch_size", "drop_last", "seed"):
            own = getattr(self._mine, one)
            theirs = getattr(self.datamodule, one, MISSING)
            known = theirs is not MISSING and own not in (None, ())
            if known and str(theirs) != str(own) and not alike(theirs, own):
                other.append(f"{one} {str(theirs)[:60]} (clients: {str(own)[:60]})")
        if other:
            say(
                self.trainer,
                f"a learner that reads self.trainer.datamodule gets {name}'s own "
                f"{', '.join(other)}",
            )
        hidden = sorted(their_names(self.datamodule) & {*dir(type(self)), *vars(self)} - THEIRS)
        if hidden:
            say(
                self.trainer,
                f"FromDataModule has attributes of its own with these names of {name}'s: "
                f"{', '.join(hidden)}; a learner reads {name}'s by "
                f"self.trainer.datamodule.datamodule.{hidden[0]}",
            )

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
        """Return the loaders, after checking that their datasets' classes have the same names
        as those of the training loader's.
        """
        for loader in loaders if isinstance(loaders, list | tuple) else [loaders]:
            self._check_classes(name, getattr(loader, "dataset", None))
        return loaders

    def _check_classes(self, name: str, dataset: Any) -> None:
        """Compare the names of classes with those of the training loader's dataset."""
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


THEIRS = {name for name, one in vars(FromDataModule).items() if isinstance(one, Theirs)}
