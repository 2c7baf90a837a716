"""Tables in which a row is a sample, and a column may name its client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.accepted import Above, Below, FiniteFloat, check
from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.formats.frames import located
from fl_lightning.datamodules.formats.tables import (
    FileTable,
    all_but,
    coded,
    codes,
    labels,
    places_of,
    read_table,
    refuse_answers,
    refuse_twice,
    require,
)
from fl_lightning.datamodules.loaders import say
from fl_lightning.datamodules.partitions.client_tests import GroupTests
from fl_lightning.datamodules.partitions.partition import ByGroup, Partition
from fl_lightning.datamodules.sources.file_data_module import before_the_run
from fl_lightning.datamodules.sources.table_columns import (
    Encoding,
    Kind,
    as_names,
    check_rule,
    held_out,
    read_joined,
    refuse_both,
    scaled,
    single,
    under,
    without_gaps,
)
from fl_lightning.errors import UserError
from fl_lightning.sampling import generator

# If a target has more distinct whole numbers than this, a note says that they count as classes.
MANY_CLASSES = 50
CONTRADICTIONS = (
    ("client", "partition", "whose each row is"),
    ("above", "classes", "what the classes are"),
    ("above", "regression", "whether the target is a class"),
    ("classes", "regression", "whether the target is a class"),
)


class FromTable(FederatedDataModule):
    """Federated data from a CSV or Parquet file, or a frame in memory; a row is a sample.

    x ``(N, features)`` are numbers, float32. y ``(N,)`` are classes 0, 1, … in the order of the
    target's values, by number if all are numbers. A target with fractions, or any target with
    ``regression``, is a float32 number. Nothing is scaled.

    Args:
        path: the training data, ``.csv``, ``.csv.gz`` or ``.parquet``, or a frame of pandas or
            polars; they are read by pandas and pyarrow (the extra ``tables``). The first line of a
            CSV names its columns. ``{name: file}`` gives a file per client.
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
        separator: between a CSV's columns.
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

    def __init__(
        self,
        path: str | Path | Any,
        target: str,
        client: str | None = None,
        features: Sequence[str] | None = None,
        test: float | str | Path | Any = None,
        num_clients: int | None = None,
        partition: Partition | None = None,
        separator: str = ",",
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
        **arguments: Any,
    ) -> None:
        if isinstance(path, Mapping):
            client = client or "client"
        target, client, features = as_names(target, client, features)
        given = {"client": client, "partition": partition, "above": above}
        refuse_both({**given, "classes": classes, "regression": regression}, CONTRADICTIONS)
        refuse_answers(features or (), {"target": target, "client": client})
        refuse_twice("data.features", features or ())
        refuse_twice("data.classes", classes or ())
        # The column gives the number of clients, even if a config such as `base` has one.
        if client is not None:
            partition, num_clients = ByGroup(), None
        if isinstance(test, (int, float)):
            check("data.test", test, Annotated[float, Above(0), Below(1)])
        elif isinstance(test, Mapping):
            check_rule(test)
        elif test is not None:
            located("test", under(root, test))
        super().__init__(num_clients=num_clients, partition=partition, **arguments)
        self._per_client = isinstance(path, Mapping)
        paths = path if isinstance(path, Mapping) else {"": path}
        self._paths = {str(name): located("path", under(root, one)) for name, one in paths.items()}
        self.path = next(iter(self._paths.values()))
        self.columns = None if columns is None else list(columns)
        self.encoding = Encoding(encode, drop_first)
        self.missing = missing
        self.missing_marks = list(map(str, missing_marks))
        self.above = above
        self.scale = scale
        self.target = target
        self.client = client
        self.features = features
        self.test = test if isinstance(test, Mapping) else under(root, test)
        self.separator = separator
        self.classes = None if classes is None else [str(name) for name in classes]
        self.regression = regression
        self.client_names: Sequence[str] = []
        self.column_names: Sequence[str] = []
        self.class_names: Sequence[str] = []

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
        data = cls._first_read(arguments)
        return None if data is None else (len(data.column_names),)

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the number of the training rows' classes; None if y are numbers to predict."""
        data = None if arguments.get("regression") else cls._first_read(arguments)
        return len(data.class_names) or None if data is not None else None

    @classmethod
    def _first_read(cls, arguments: Mapping[str, Any]) -> FromTable | None:
        """Return the table, read before the run; None if an argument is wrong, which the parser
        reports.

        Raises:
            UserError: the file is wrong.
        """
        try:
            data: FromTable = before_the_run(cls, arguments)
        except Exception:  # arguments are not checked yet
            return None
        try:
            data.load()
        except UserError:
            raise
        except Exception:  # pyarrow raises many kinds
            return None
        return data

    @property
    def num_classes(self) -> int | None:
        """Return the classes of the training file, even if all rows of one class are held out
        to test on.
        """
        if self.classes is not None:
            return len(self.classes)
        self._ready()
        return len(self.class_names) or None

    def load(self) -> None:
        table = self._read_training()
        others = [name for name in (self.target, self.client) if name is not None]
        features = self.features
        if features is None:
            features = all_but(table.path, table.columns, others)
        require(table, {"target": [self.target], "client": others[1:], "features": features})
        if not features:
            raise UserError(
                f"{table.where} has no columns besides {', '.join(map(repr, others))}, so x is "
                "empty: give it columns of numbers."
            )
        self.encoding.check(features)
        table = self._without_gaps(table, [*features, *others])
        y, classes = self._targets(table)
        self.class_names = classes or []
        if self.client is not None:
            self.groups, self.client_names = codes(table.present(self.client))
        rows = self._rows(y)
        self.encoding.learn(table, features, rows[0], self.tell)
        x = self.encoding.numbers(table, features, self.tell)
        self.column_names = self.encoding.names(features)
        if not self.column_names:
            raise UserError(
                f"{table.where}: data.drop_first leaves out the only value of "
                f"{', '.join(features)[:200]}, so x is empty: give drop_first=False, or more "
                "columns."
            )
        self._table = (table, rows[0])
        if not isinstance(self.test, (int, float, Mapping)) and self.test is not None:
            self._with_file(table, features, x, y, classes)
            return
        if self.scale is not None:
            x = scaled(x, self._scaled_by(len(y)), rows[0], self.tell)
        self._set_rows(single(x, self.column_names, self.tell), y, *rows)

    def tell(self, text: str) -> None:
        say(self.trainer, text)

    def _read(self, path: Path | Any, texts: Sequence[str] = ()) -> FileTable:
        return read_table(path, self.separator, self.columns, self.missing_marks, texts)

    def _read_training(self) -> FileTable:
        """Return the training file, or all clients' files, as one table."""
        if not self._per_client:
            return self._read(self.path)
        assert self.client is not None
        return read_joined(self._paths, self.client, self._read)

    def _without_gaps(self, table: FileTable, used: list[str]) -> FileTable:
        return without_gaps(table, used, self.tell) if self.missing == "drop" else table

    def _targets(self, table: FileTable) -> tuple[NDArray[Any], list[str] | None]:
        """Return y ``(N,)``, and the classes' names."""
        if self.above is not None:
            exceeds = table.target_numbers(self.target) > self.above
            return exceeds.astype(np.int64), ["0", "1"]
        if self.regression:
            return table.target_numbers(self.target).astype(np.float32), None
        if self.classes is None:
            y, classes = labels(table, self.target)
            self._say_of_whole_numbers(table, classes or [])
            return y, classes
        return coded(table, self.target, self.classes, "data.classes"), self.classes

    def _scaled_by(self, rows: int) -> NDArray[np.int64]:
        """Return the group by whose mean and deviation each row is scaled."""
        if self.scale == "client" and self.groups is None:
            raise UserError(
                "data.scale is 'client', and data.client names no column of clients: give the "
                "column, or data.scale=all."
            )
        by_client = self.scale == "client"
        return np.asarray(self.groups) if by_client else np.zeros(rows, np.int64)

    def _rows(self, y: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return rows to train on and to test on."""
        if isinstance(self.test, Mapping):
            groups = np.zeros(len(y), np.int64) if self.groups is None else self.groups
            return held_out(self.test, y, groups)
        if isinstance(self.test, (int, float)):
            return self._share(len(y), float(self.test))
        return np.arange(len(y)), np.zeros(0, np.int64)

    def _with_file(
        self,
        table: FileTable,
        features: list[str],
        x: NDArray[Any],
        y: NDArray[Any],
        classes: list[str] | None,
    ) -> None:
        """Make this table the training set, and the file ``test`` the test set."""
        other = self._read(located("test", self.test), sorted(table.texts()))
        require(other, {"target": [self.target], "features": features})
        named = self.client is not None and self.client in other.columns
        used = [*features, self.target, *([str(self.client)] if named else [])]
        other = self._without_gaps(other, used)
        held = self.encoding.numbers(other, features, self.tell)
        of_tests = None
        if named:
            of_tests = places_of(other.present(str(self.client)), self.client_names)
        if self.scale is not None:
            groups = self._scaled_by(len(x))
            tests = np.zeros(len(held), np.int64)
            if self.scale == "client":
                tests = np.full(len(held), -1) if of_tests is None else of_tests
            whole = np.concatenate([x, held])
            of = np.concatenate([groups, tests])
            (x, held) = np.split(scaled(whole, of, np.arange(len(x)), self.tell), [len(x)])
        rounded = single(np.concatenate([x, held]), self.column_names, self.tell)
        self.train_set = TensorSamples(rounded[: len(x)], y)
        tested = self._targets(other)[0] if self.above is not None else None
        if tested is None:
            tested = coded(other, self.target, classes)
        self.test_set = TensorSamples(rounded[len(x) :], tested)
        if of_tests is not None:
            assert self.groups is not None
            self.own_tests = GroupTests.of(self.test_set, self.groups, of_tests)
            self._say_of_nobodys_rows(other, of_tests)

    def column_values(self, column: str) -> NDArray[np.float64]:
        """Return a column's numbers in the training rows, for ``ByValue``."""
        table, rows = self._table
        require(table, {"partition.column": [column]})
        remedy = "convert the column to numbers, or give another data.partition.column"
        found: NDArray[np.float64] = table.numbers([column], remedy)[rows, 0]
        return found

    def _say_of_whole_numbers(self, table: FileTable, names: list[str]) -> None:
        """Report if classes are whole numbers that look like amounts."""
        rows = len(table.frame)
        if self.target in table.texts():
            return
        if len(names) > MANY_CLASSES or len(names) > max(2, rows / 2):
            self.tell(
                f"data.target={self.target!r}: {len(names)} whole numbers in {rows} rows are taken "
                f"for classes ({names[0]} is class 0, {names[-1]} class {len(names) - 1}); where "
                "it is an amount, data.regression=true makes y the number itself, and where they "
                "are classes, data.classes names them",
            )

    def _say_of_nobodys_rows(self, table: FileTable, of_tests: NDArray[np.int64]) -> None:
        """Report how many test rows belong to no client that trains."""
        assert self.client is not None
        nobodys = table.frame[self.client][of_tests < 0]
        if len(nobodys):
            names = [str(name) for name in nobodys.unique()]
            self.tell(
                f"{table.where}: {len(nobodys)} of {len(of_tests)} rows to test on are of no "
                f"client of the training data (column {self.client!r}: "
                f"{', '.join(names)[:100]}), and are tested on in common alone",
            )

    @staticmethod
    def _share(rows: int, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of a share to test on, and the other rows."""
        count = math.floor(share * rows + 0.5)
        if not 0 < count < rows:
            raise UserError(
                f"data.test={share:g} leaves {count} of {rows} rows to test on, and the others "
                "to train on: give a share that leaves both some."
            )
        shuffled = generator(0, "rows to test on").permutation(rows)
        return np.sort(shuffled[count:]), np.sort(shuffled[:count])

    def _set_rows(
        self,
        x: NDArray[Any],
        y: NDArray[Any],
        trained: NDArray[np.int64],
        tested: NDArray[np.int64],
    ) -> None:
        """Train on some rows, and test on others."""
        self.train_set = TensorSamples(x[trained], y[trained])
        if not len(tested):
            return
        self.test_set = TensorSamples(x[tested], y[tested])
        if self.groups is not None:
            of_tests = self.groups[tested]
            self.groups = self.groups[trained]
            self.own_tests = GroupTests.of(self.test_set, self.groups, of_tests)
            kept = set(self.groups.tolist())
            self.client_names = [name for i, name in enumerate(self.client_names) if i in kept]
