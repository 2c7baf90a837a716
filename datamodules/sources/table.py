"""Tables in which a row is a sample, and a column may name its client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.formats.tables import (
    FileTable,
    all_but,
    as_numbers,
    coded,
    codes,
    give_one,
    places_of,
    read_table,
    refuse_answers,
    refuse_twice,
    require,
)
from fl_lightning.datamodules.loaders import say
from fl_lightning.datamodules.partitions.client_tests import GroupTests
from fl_lightning.datamodules.partitions.partition import ByGroup, Indices, Partition
from fl_lightning.datamodules.sources.file_data_module import first_read
from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import Above, Below, FiniteFloat, check
from fl_lightning.sampling import generator

SMALL = 1e-9
Kind = Literal["one-hot", "codes"]


def read_joined(
    paths: Mapping[str, Any], column: str, read: Callable[[Any, Sequence[str]], FileTable]
) -> FileTable:
    """Return a table per client as one, with a column of the clients' names.

    Args:
        read: returns a table; the second argument names columns that hold texts.

    Raises:
        UserError: their columns differ, or one has the name of the new one.
    """
    import pandas
    import pyarrow

    tables = [read(path, ()) for path in paths.values()]
    first = tables[0]
    for other in tables:
        if other.columns != first.columns:
            raise UserError(
                f"{other.where} has the columns {', '.join(other.columns)[:200]}, and "
                f"{str(first.path)!r} has {', '.join(first.columns)[:200]}: all need the same, in "
                "the same order."
            )
    if column in first.columns:
        raise UserError(
            f"data.path gives a file per client, and {first.where} has a column {column!r}: name "
            "the clients by this column, data.client, and give one file; or leave data.client out."
        )
    # Texts that look like numbers in one file are texts if another file has others.
    texts = [table.texts() for table in tables]
    if any(other != texts[0] for other in texts):
        together = sorted(set().union(*texts))
        tables = [read(path, together) for path in paths.values()]
    whole = pandas.concat([table.frame for table in tables])
    names = np.repeat(list(paths), [len(table.frame) for table in tables])
    whole[column] = pandas.array(names.tolist(), dtype=pandas.ArrowDtype(pyarrow.string()))
    return FileTable(Path(", ".join(str(table.path) for table in tables)), whole)


@dataclass
class Encoding:
    """Converts texts to numbers, by the categories of the training rows.

    Args:
        given: ``"one-hot"`` or ``"codes"`` for all columns of texts, or a kind by column; None:
            texts are refused.
        drop_first: leave out the first one-hot column of each.

    ``kinds``: how each column is encoded; ``categories``: its values in the training rows.
    """

    given: Kind | Mapping[str, Kind] | None
    drop_first: bool = False
    kinds: dict[str, Kind] = field(default_factory=dict)
    categories: dict[str, list[str]] = field(default_factory=dict)

    def choose(self, table: FileTable, features: Sequence[str]) -> None:
        """Note how each column of the training table is encoded.

        Raises:
            UserError: a column that ``given`` names is not one of them.
        """
        if isinstance(self.given, Mapping):
            require(features, "x", {"encode": self.given})
            self.kinds = dict(self.given)
        elif self.given is not None:
            texts = table.texts()
            self.kinds = {name: self.given for name in features if name in texts}

    def learn(self, table: FileTable, rows: Indices, tell: Callable[[str], None]) -> None:
        """Note the categories of the training rows."""
        for name in self.kinds:
            values = table.present(name)
            _, self.categories[name] = codes(values.iloc[rows])
            if not isinstance(self.given, Mapping):
                self._tell_of_numbers(table, name, values, tell)

    def _tell_of_numbers(
        self, table: FileTable, name: str, values: Any, tell: Callable[[str], None]
    ) -> None:
        """Report a column that became categories, although most of its values look like numbers."""
        odd = np.flatnonzero(np.isnan(as_numbers(values)))
        like_numbers = ~np.isnan(as_numbers(values.str.replace(",", ".")))
        if len(odd) and 2 * like_numbers.sum() > len(values):
            tell(
                f"{table.has(name, int(odd[0]))}, which is not a number, so its "
                f"{len(self.categories[name])} values are categories (data.encode): if it holds "
                "numbers, write them with a point, and give the mark of a missing value as "
                "data.missing_marks"
            )

    def names(self, features: Sequence[str]) -> list[str]:
        """The columns of x."""
        found = []
        for name in features:
            if self.kinds.get(name) == "one-hot":
                found += [f"{name}={one}" for one in self.categories[name][self.drop_first :]]
            else:
                found.append(name)
        return found

    def numbers(
        self, table: FileTable, features: Sequence[str], tell: Callable[[str], None]
    ) -> NDArray[np.float64]:
        """x ``(N, columns)``."""
        parts = []
        for name in features:
            if name not in self.kinds:
                parts.append(table.numbers([name]))
                continue
            count = len(self.categories[name])
            places = places_of(table.present(name), self.categories[name])
            places[places < 0] = count
            unseen = int((places == count).sum())
            if unseen:
                tell(f"{table.where}: {unseen} values of {name!r} occur in no training row")
            if self.kinds[name] == "codes":
                parts.append(places[:, None].astype(np.float64))
            else:
                parts.append(places[:, None] == np.arange(self.drop_first, count))
        return np.concatenate(parts, axis=1).astype(np.float64)


def scaled(
    x: NDArray[np.float64], groups: NDArray[np.int64], trained: Indices
) -> NDArray[np.float64]:
    """Return x ``(N, columns)`` as (x − mean) / (std + 1e-9) by each group's training rows, n − 1.

    As in scikit-learn's StandardScaler, a column that is constant in these rows is not divided.

    Args:
        groups: group of each row ``(N,)``.
        trained: positions of the training rows.
    """
    left = np.zeros(len(x), bool)
    left[trained] = True
    found = np.empty_like(x)
    for group in np.unique(groups):
        rows = groups == group
        own = x[rows & left]
        # Rows that belong to no training client are standardised by all training rows.
        own = own if len(own) else x[left]
        constant = (own == own[0]).all(axis=0)
        spread = own.std(axis=0, ddof=1) + SMALL if len(own) > 1 else np.ones(x.shape[1])
        found[rows] = (x[rows] - own.mean(axis=0)) / np.where(constant, 1, spread)
    return found


def single(
    x: NDArray[np.float64], columns: Sequence[str], tell: Callable[[str], None]
) -> NDArray[np.float32]:
    """Return x ``(N, columns)`` as float32; a note says where whole numbers lose digits."""
    found = x.astype(np.float32)
    lost = (found != x) & (x % 1 == 0)
    for column in np.flatnonzero(lost.any(axis=0)).tolist():
        tell(
            f"x is float32, which does not hold all digits of the column {columns[column]!r}, such "
            f"as {x[lost[:, column].argmax(), column]:.0f}: give data.scale, or smaller numbers, "
            "such as the days since the first"
        )
    return found


def held_out(
    test: Mapping[str, Any], y: NDArray[Any], groups: NDArray[np.int64]
) -> tuple[Indices, Indices]:
    """Return rows to train on and to test on in each group, by scikit-learn's train_test_split.

    Raises:
        UserError: a group is too small.
    """
    from sklearn.model_selection import train_test_split

    share = float(test["share"])
    seed = int(test.get("seed", 0))
    trained = []
    tested = []
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        _, counts = np.unique(y[rows], return_counts=True)
        even = y[rows] if len(counts) > 1 and counts.min() > 2 else None
        options = {"train_size": 1 - share, "test_size": share, "random_state": seed}
        with refused(
            f"data.test's share is {share:g}: {len(rows)} rows of one client cannot be split so",
            "Give another share, or leave these rows out.",
        ):
            left, held = train_test_split(rows, stratify=even, **options)
        trained.append(left)
        tested.append(held)
    return np.concatenate(trained), np.concatenate(tested)


# If a target has more distinct whole numbers than this, a note says that they count as classes.
MANY_CLASSES = 50


def located(option: str, given: Any, root: str | Path | None) -> Path | Any:
    """Return a table's path, below ``root`` if it is relative, or the frame given in its place.

    Raises:
        UserError: it is neither of the two.
    """
    if isinstance(given, str | Path):
        return (Path() if root is None else Path(root).expanduser()) / Path(given).expanduser()
    if hasattr(given, "columns") and hasattr(given, "to_numpy"):
        return given
    raise UserError(
        f"data.{option} is of type {type(given).__name__}: give the path of a CSV or Parquet file, "
        "or a frame of pandas or polars. Arrays go to InMemoryDataModule((x, y), …)."
    )


class FromTable(FederatedDataModule):
    """Federated data from a CSV or Parquet file, or a frame in memory; a row is a sample.

    x ``(N, features)`` are numbers, float32. y ``(N,)`` are classes 0, 1, … in the order of the
    target's values, by number if all are numbers. A target with fractions, or any target with
    ``regression``, is a float32 number. Nothing is scaled.

    Args:
        path: the training data, ``.csv``, ``.tsv`` (or ``.csv.gz``, ``.tsv.gz``) or ``.parquet``,
            or a frame of pandas or polars; they are read by pandas and pyarrow (the extra
            ``tables``). The first line of a CSV names its columns. ``{name: file}`` gives a file
            per client.
        target: the column to predict.
        client: the column that names the clients; each name is one client. Clients are in ascending
            order, and ``client_names`` has their names. None: ``partition`` splits the rows.
        features: the columns of x, in this order. None: all columns but ``target`` and ``client``,
            in the file's order; a column that is a row index (without a name, as ``df.to_csv``
            writes it) is refused.
        test: another file or frame; ``{"share": 0.34, "rule": "sklearn", "seed": 43}`` (within each
            client, as scikit-learn's ``train_test_split``); or the share of rows that is held out
            to test on, the same rows for every seed. If test rows also name their ``client``, they
            are the client's own test set as well. Other test rows belong only to the global test
            set.
        num_clients, partition: how to split; not used if ``client`` names a column.
        separator: between a CSV's columns; None: a tab in ``.tsv``, else a comma.
        quotes: a cell may be in quotes, as in ``"a, b"``; False: a quote is a part of the text;
            None: False if a tab is the separator, else True.
        classes: the target's values, in the order of their numbers; None: those of the training
            rows. Give it for files that lack a class which others have, as at sites.
        regression: y is the target's number, float32, even if all are whole numbers. False: whole
            numbers are names of classes, so 30, 41, 67 become 0, 1, 2.
        encode: how texts become numbers: ``"one-hot"`` (columns such as ``colour=red``),
            ``"codes"`` (the place among the training rows' values), or a kind by column. None:
            refuse texts.
        drop_first: leave out the first one-hot column of each.
        missing: ``"refuse"``, or ``"drop"`` rows that lack a value in a column that is used.
        missing_marks: texts or numbers that mark a missing value, in addition to ``NA`` and the
            other texts that pandas' ``read_csv`` takes for one.
        columns: names of the columns, for a CSV whose first line has none.
        root: the folder to which paths are relative.
        above: y is 1 if the target exceeds this number, else 0.
        scale: x is (x − mean) / std, by the training rows of each ``"client"``, or of ``"all"``;
            a column that is constant in these rows is only centred.

    ``column_names`` and ``class_names`` have the names of x and y in their order, once the table is
    read.

    The other arguments are those of :class:`~fl_lightning.datamodules.FederatedDataModule`.

    Raises:
        UserError: a column does not exist, a value is missing or not a number, or no training row
            has a label of the test data; the error names it.
    """

    column_names: Sequence[str] = ()

    def __init__(
        self,
        path: str | Path | Any,
        target: str,
        client: str | None = None,
        features: Sequence[str] | None = None,
        test: float | str | Path | Any = None,
        num_clients: int | None = None,
        partition: Partition | None = None,
        separator: str | None = None,
        classes: Sequence[str | int] | None = None,
        regression: bool = False,
        encode: Kind | dict[str, Kind] | None = None,
        drop_first: bool = False,
        missing: Literal["refuse", "drop"] = "refuse",
        missing_marks: Sequence[str] = ("?",),
        columns: Sequence[str] | None = None,
        root: str | Path | None = None,
        above: FiniteFloat | None = None,
        scale: Literal["client", "all"] | None = None,
        quotes: bool | None = None,
        **arguments: Any,
    ) -> None:
        if isinstance(path, Mapping):
            client = client or "client"
        # A frame's columns may have numbers as names.
        target = str(target)
        client = None if client is None else str(client)
        features = None if features is None else list(map(str, features))
        give_one({"above": above, "classes": classes, "regression": regression or None})
        give_one({"client": client, "partition": partition})
        refuse_answers(features or (), {"target": target, "client": client})
        refuse_twice("data.features", features or ())
        refuse_twice("data.classes", classes or ())
        # The column gives the number of clients, even if a config such as `base` has one.
        if client is not None:
            partition, num_clients = ByGroup(), None
        share = test.get("share") if isinstance(test, Mapping) else test
        if share is None or isinstance(share, (int, float)):
            check("data.test", share, Annotated[float, Above(0), Below(1)] | None)
        super().__init__(num_clients=num_clients, partition=partition, **arguments)
        paths = path if isinstance(path, Mapping) else {"": path}
        self._paths = {str(name): located("path", one, root) for name, one in paths.items()}
        self._per_client = isinstance(path, Mapping)
        self.path = next(iter(self._paths.values()))
        self.encoding = Encoding(encode, drop_first)
        self.missing = missing
        self.above = above
        self.scale = scale
        self.target = target
        self.client = client
        self.features = features
        self.test = test
        self._test_table = None
        if not (test is None or isinstance(test, (int, float, Mapping))):
            self._test_table = located("test", test, root)
        self._form = (separator, quotes, columns and list(columns), list(map(str, missing_marks)))
        self.classes = None if classes is None else [str(name) for name in classes]
        self.regression = regression

    @classmethod
    def own_clients(cls, **arguments: Any) -> bool:
        """Return whether a column or the files' names give the clients."""
        return arguments.get("client") is not None or isinstance(arguments.get("path"), Mapping)

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """Return ``(features,)``."""
        features = arguments.get("features")
        if features is not None and arguments.get("encode") is None:
            return (len(features),)
        # Encoded texts may become several columns.
        data = first_read(cls, arguments)
        return None if data is None else (len(data.column_names),)

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the number of the training rows' classes; None if y are numbers to predict."""
        data = None if arguments.get("regression") else first_read(cls, arguments)
        return len(data.class_names) or None if data is not None else None

    @property
    def num_classes(self) -> int | None:
        """Return the training file's number of classes, those of held-out rows too."""
        if self.classes is not None:
            return len(self.classes)
        self._ready()
        return len(self.class_names) or None

    def load(self) -> None:
        if self._per_client:
            table = read_joined(self._paths, str(self.client), self._read)
        else:
            table = self._read(self.path)
        others = [name for name in (self.target, self.client) if name is not None]
        features = self.features
        if features is None:
            features = all_but(table.path, table.columns, others)
        chosen = {"target": [self.target], "client": others[1:], "features": features}
        require(table.columns, table.where, chosen)
        self.encoding.choose(table, features)
        table = self._without_gaps(table, features, others)
        y, classes = self._targets(table)
        self.class_names = classes or []
        groups = np.zeros(len(y), np.int64)
        if self.client is not None:
            groups, self.client_names = codes(table.present(self.client))
        elif self.scale == "client":
            raise UserError(
                "data.scale is 'client', and data.client names no column of clients: give the "
                "column, or data.scale=all."
            )
        trained, tested = self._rows(y, groups)
        self.encoding.learn(table, trained, self.tell)
        self.column_names = self.encoding.names(features)
        if not self.column_names:
            raise UserError(
                f"{table.where} leaves no columns for x besides {', '.join(map(repr, others))}: "
                "give it columns of numbers, or texts of several values with data.encode."
            )
        x = self.encoding.numbers(table, features, self.tell)
        self._table = (table, trained)
        if self._test_table is not None:
            held, held_y, held_groups = self._of_test_table(table, features, classes)
            tested = np.arange(len(x), len(x) + len(held))
            x = np.concatenate([x, held])
            y = np.concatenate([y, held_y])
            groups = np.concatenate([groups, held_groups])
        if self.scale is not None:
            x = scaled(x, groups if self.scale == "client" else np.zeros_like(groups), trained)
        rounded = single(x, self.column_names, self.tell)
        self.train_set = TensorSamples(rounded[trained], y[trained])
        if len(tested):
            self.test_set = TensorSamples(rounded[tested], y[tested])
        if self.client is None:
            return
        self.groups = groups[trained]
        self.client_names = [self.client_names[i] for i in np.unique(self.groups)]
        if self.test_set is not None and (groups[tested] >= 0).any():
            self.own_tests = GroupTests.of(self.test_set, self.groups, groups[tested])

    @property
    def computed_from_samples(self) -> str:
        found = ["the means and deviations of the columns"] if self.scale is not None else []
        found += ["the categories of the columns"] if self.encoding.categories else []
        return " and ".join(found)

    def tell(self, text: str) -> None:
        say(self.trainer, text)

    def _read(self, path: Path | Any, texts: Sequence[str] = ()) -> FileTable:
        return read_table(path, *self._form, texts)

    def _without_gaps(
        self, table: FileTable, features: Sequence[str], others: Sequence[str]
    ) -> FileTable:
        """Return the table with a value in each cell that is used, and numbers where x needs them.

        With ``missing="drop"`` rows that lack a value are left out; otherwise they are refused.
        """
        used = [*features, *others]
        lack = table.frame[list(dict.fromkeys(used))].isna().any(axis=1)
        if self.missing == "drop" and lack.any():
            self.tell(
                f"{table.where}: {lack.sum()} of {len(lack)} rows lack a value, and are left out"
            )
            table = replace(table, frame=table.frame[~lack])
        table.check(used, [name for name in features if name not in self.encoding.kinds])
        return table

    def _targets(self, table: FileTable) -> tuple[NDArray[Any], list[str] | None]:
        """Return y ``(N,)``, and the classes' names; None: y are numbers."""
        if self.above is not None:
            exceeds = table.target_numbers(self.target) > self.above
            return exceeds.astype(np.int64), ["0", "1"]
        if self.classes is not None:
            return coded(table, self.target, self.classes, "data.classes"), self.classes
        values = table.present(self.target)
        numbers = self.target not in table.texts()
        if self.regression or (numbers and (np.nan_to_num(as_numbers(values)) % 1).any()):
            return table.target_numbers(self.target).astype(np.float32), None
        y, classes = codes(values)
        rows = len(values)
        if numbers and (len(classes) > MANY_CLASSES or len(classes) > max(2, rows / 2)):
            last = len(classes) - 1
            self.tell(
                f"data.target={self.target!r}: {len(classes)} whole numbers in {rows} rows are "
                f"taken for classes ({classes[0]} is class 0, {classes[-1]} class {last}); where "
                "it is an amount, data.regression=true makes y the number itself, and where they "
                "are classes, data.classes names them"
            )
        return y, classes

    def _rows(
        self, y: NDArray[Any], groups: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of the table to train on, and to test on."""
        if isinstance(self.test, Mapping):
            return held_out(self.test, y, groups)
        if isinstance(self.test, (int, float)):
            count = math.floor(self.test * len(y) + 0.5)
            shuffled = generator(0, "rows to test on").permutation(len(y))
            return np.sort(shuffled[count:]), np.sort(shuffled[:count])
        return np.arange(len(y)), np.zeros(0, np.int64)

    def _of_test_table(
        self, table: FileTable, features: list[str], classes: list[str] | None
    ) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[np.int64]]:
        """Return x, y and the clients of the rows of the test file, -1 for no client."""
        other = self._read(self._test_table, sorted(table.texts()))
        require(other.columns, other.where, {"target": [self.target], "features": features})
        others = [self.target]
        if self.client is not None and self.client in other.columns:
            others.append(self.client)
        other = self._without_gaps(other, features, others)
        x = self.encoding.numbers(other, features, self.tell)
        groups = np.full(len(x), -1)
        if self.client in others:
            groups = places_of(other.present(str(self.client)), self.client_names)
            self._say_of_nobodys_rows(other, groups)
        if self.above is not None:
            return x, self._targets(other)[0], groups
        return x, coded(other, self.target, classes, "the training data"), groups

    def column_values(self, column: str) -> NDArray[np.float64]:
        """Return a column's numbers in the training rows, for ``ByValue``."""
        table, rows = self._table
        require(table.columns, table.where, {"partition.column": [column]})
        remedy = "convert the column to numbers, or give another data.partition.column"
        found: NDArray[np.float64] = table.numbers([column], remedy)[rows, 0]
        return found

    def _say_of_nobodys_rows(self, table: FileTable, of_tests: NDArray[np.int64]) -> None:
        assert self.client is not None
        nobodys = table.frame[self.client][of_tests < 0]
        if len(nobodys):
            names = [str(name) for name in nobodys.unique()]
            self.tell(
                f"{table.where}: {len(nobodys)} of {len(of_tests)} rows to test on are of no "
                f"client of the training data (column {self.client!r}: "
                f"{', '.join(names)[:100]}), and only the common test uses them"
            )
