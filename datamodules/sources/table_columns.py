"""Conversions of a table's columns: rows left out, texts as numbers, scales, test rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.formats.tables import FileTable, as_numbers, codes, places_of
from fl_lightning.datamodules.partitions.partition import Indices
from fl_lightning.errors import UserError, suggest

SMALL = 1e-9
# A column of texts with more values than this, and than half of the rows, is not made one-hot.
MANY_COLUMNS = 1000
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
        together = set().union(*texts)
        tables = [read(path, sorted(together)) for path in paths.values()]
    whole = pandas.concat([table.frame for table in tables])
    names = np.repeat(list(paths), [len(table.frame) for table in tables])
    whole[column] = pandas.array(names.tolist(), dtype=pandas.ArrowDtype(pyarrow.string()))
    return replace(first, frame=whole)


def without_gaps(table: FileTable, used: Sequence[str], tell: Callable[[str], None]) -> FileTable:
    """Return a table without the rows that lack a value in a column that is used."""
    gaps = table.frame[list(dict.fromkeys(used))].isna()
    lack = gaps.any(axis=1)
    if not lack.any():
        return table
    if lack.all():
        most = gaps.sum().idxmax()
        raise UserError(
            f"{table.where}: each of the {len(gaps)} rows lacks a value, most often in the column "
            f"{most!r} ({gaps[most].sum()} rows), so data.missing=drop leaves none: leave such "
            "columns out of data.features, or fill them in."
        )
    tell(f"{table.where}: {lack.sum()} of {len(gaps)} rows lack a value, and are left out")
    return replace(table, frame=table.frame[~lack])


@dataclass
class Encoding:
    """Converts texts to numbers, by the categories of the training rows.

    Args:
        given: ``"one-hot"`` or ``"codes"`` for all columns of texts, or a kind by column; None:
            texts are refused.
        drop_first: leave out the first one-hot column of each.
    """

    given: Kind | Mapping[str, Kind] | None
    drop_first: bool = False
    categories: dict[str, list[str]] = field(default_factory=dict)

    def kind(self, column: str) -> str | None:
        """Return how a column is encoded, if it is."""
        if isinstance(self.given, Mapping):
            return self.given.get(column)
        return self.given if column in self.categories else None

    def check(self, features: Sequence[str]) -> None:
        """Refuse to encode a column that is not a part of x."""
        for name in self.given if isinstance(self.given, Mapping) else ():
            if name not in features:
                raise UserError(
                    f"data.encode has {name!r}, which is not among the columns of x: "
                    f"{', '.join(features)[:300]}.{suggest(name, features)}"
                )

    def learn(
        self,
        table: FileTable,
        features: Sequence[str],
        rows: Indices,
        tell: Callable[[str], None],
    ) -> None:
        """Note the categories of the training rows."""
        for name in features:
            values = table.present(name)
            named = isinstance(self.given, Mapping) and name in self.given
            if named or (isinstance(self.given, str) and name in table.texts()):
                _, self.categories[name] = codes(values.iloc[rows])
                self._refuse_names_of_rows(table, name, len(rows))
                if not named:
                    self._tell_of_numbers(table, name, values, tell)

    def _refuse_names_of_rows(self, table: FileTable, name: str, rows: int) -> None:
        """Refuse to make a column of each row's own name, which would fill the memory."""
        count = len(self.categories[name])
        if self.kind(name) == "one-hot" and count > max(MANY_COLUMNS, rows / 2):
            raise UserError(
                f"{table.where}: data.encode=one-hot makes {count} columns of {name!r}, which has "
                f"{count} values in {rows} training rows: leave it out of data.features, or give "
                f"data.encode={{{name}: codes}}."
            )

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
            if self.kind(name) == "one-hot":
                found += [f"{name}={one}" for one in self._shown(name)]
            else:
                found.append(name)
        return found

    def _shown(self, name: str) -> list[str]:
        return self.categories[name][1 if self.drop_first else 0 :]

    def numbers(
        self, table: FileTable, features: Sequence[str], tell: Callable[[str], None]
    ) -> NDArray[np.float64]:
        """x ``(N, columns)``."""
        parts = []
        for name in features:
            kind = self.kind(name)
            if kind is None:
                parts.append(table.numbers([name]))
                continue
            count = len(self.categories[name])
            places = places_of(table.present(name), self.categories[name])
            places[places < 0] = count
            unseen = int((places == count).sum())
            if unseen:
                tell(f"{table.where}: {unseen} values of {name!r} occur in no training row")
            if kind == "codes":
                parts.append(places[:, None].astype(np.float64))
            else:
                shown = np.arange(1 if self.drop_first else 0, count)
                parts.append((places[:, None] == shown).astype(np.float64))
        return np.concatenate(parts, axis=1)


def scaled(
    x: NDArray[np.float64], groups: NDArray[np.int64], trained: Indices, tell: Callable[[str], None]
) -> NDArray[np.float64]:
    """Return x ``(N, columns)`` as (x − mean) / (std + 1e-9), by the training rows of each group;
    std with n − 1.

    As in scikit-learn's StandardScaler, a column that is constant in these rows is not divided.

    Args:
        groups: group of each row ``(N,)``.
        trained: positions of the training rows.
    """
    left = np.zeros(len(x), bool)
    left[trained] = True
    found = np.empty_like(x)
    alone = 0
    for group in np.unique(groups):
        rows = groups == group
        own = x[rows & left]
        alone += len(own) == 1
        # Rows that belong to no training client are standardised by all training rows.
        own = own if len(own) else x[left]
        constant = (own == own[0]).all(axis=0)
        spread = own.std(axis=0, ddof=1) + SMALL if len(own) > 1 else np.ones(x.shape[1])
        found[rows] = (x[rows] - own.mean(axis=0)) / np.where(constant, 1, spread)
    if alone:
        tell(
            f"data.scale: {alone} of {len(np.unique(groups[trained]))} clients have one training "
            "row, which becomes 0 in every column: give data.scale=all, or leave these clients out"
        )
    return found


def single(
    x: NDArray[np.float64], columns: Sequence[str], tell: Callable[[str], None]
) -> NDArray[np.float32]:
    """Return x ``(N, columns)`` as float32; a note says where whole numbers lose digits."""
    found = x.astype(np.float32)
    for column, name in enumerate(columns):
        lost = np.flatnonzero((found[:, column] != x[:, column]) & (x[:, column] % 1 == 0))
        if len(lost):
            tell(
                f"x is float32, which does not hold all digits of the column {name!r}, such as "
                f"{x[lost[0], column]:.0f}: give data.scale, or smaller numbers, such as the days "
                "since the first"
            )
    return found


def check_rule(test: Mapping[str, Any]) -> None:
    """Refuse an unknown rule for test rows."""
    unknown = set(test) - {"share", "rule", "seed"}
    share = test.get("share")
    fits = isinstance(share, float) and 0 < share < 1
    if unknown or test.get("rule") != "sklearn" or not fits:
        raise UserError(
            f"data.test is of type dict, {dict(test)!r}: give a share, a file, or "
            "{'share': 0.34, 'rule': 'sklearn', 'seed': 43}, which splits as train_test_split does."
        )


def refuse_both(given: Mapping[str, Any], pairs: Sequence[tuple[str, str, str]]) -> None:
    """Refuse pairs of options that contradict each other; the third says what they decide."""
    for one, other, what in pairs:
        if given[one] not in (None, False) and given[other] not in (None, False):
            raise UserError(
                f"data.{one}={given[one]!r} and data.{other}={given[other]!r} both say {what}: "
                "give one of the two."
            )


def as_names(
    target: Any, client: Any, features: Sequence[Any] | None
) -> tuple[str, str | None, list[str] | None]:
    """Return names of columns as texts: a frame's may be numbers."""
    if isinstance(features, str):
        features = [features]
    of_client = None if client is None else str(client)
    return str(target), of_client, None if features is None else list(map(str, features))


def held_out(
    test: Mapping[str, Any], y: NDArray[Any], groups: NDArray[np.int64]
) -> tuple[Indices, Indices]:
    """Return rows to train on and to test on, within each group, by scikit-learn's
    train_test_split.

    Raises:
        UserError: a key or rule is not known, or a group is too small.
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
        try:
            left, held = train_test_split(rows, stratify=even, **options)
        except ValueError as error:
            raise UserError(
                f"data.test's share is {share:g}: {len(rows)} rows of one client cannot be split "
                f"so ({str(error)[:120]}). Give another share, or leave these rows out."
            ) from None
        trained.append(left)
        tested.append(held)
    return np.concatenate(trained), np.concatenate(tested)


def under(root: str | Path | None, path: Any) -> Any:
    """Return a path below ``root``, if it is relative."""
    if root is None or not isinstance(path, str | Path):
        return path
    return Path(root).expanduser() / path
