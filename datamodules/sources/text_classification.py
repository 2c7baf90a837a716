"""Labelled texts, or pairs of texts, from JSON lines or tables; clients by a column."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.accepted import PositiveInt
from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.biases import Bias
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.formats.tables import (
    refuse_blanks,
    refuse_twice,
    refuse_two_of_a_name,
)
from fl_lightning.datamodules.formats.tokens import Bytes, Folder, padded, read_text, tokenizer_of
from fl_lightning.datamodules.partitions.flower_splits import Grouped
from fl_lightning.datamodules.partitions.partition import ByGroup, Partition, own_or_grouped
from fl_lightning.datamodules.sources.file_data_module import ascending
from fl_lightning.datamodules.sources.language_modelling import no_pixels
from fl_lightning.errors import UserError, suggest
from fl_lightning.evaluation.instruction_records import read_records
from fl_lightning.introspection.papers import Paper

# MultiNLI's mark for a text on which the annotators did not agree: such rows are left out, as is
# usual.
NO_LABEL = "-"
DELIMITERS = {".csv": ",", ".tsv": "\t"}


class TextClassification(FederatedDataModule):
    """Texts with a class each; by default MultiNLI (Williams et al., 2018), with its five genres as
    clients (multinli_1.0.zip of https://cims.nyu.edu/~sbowman/multinli/).

    x ``(length,)`` are tokens, -1 after the end of the text. Files are JSON lines (one object per
    line), or ``.csv`` or ``.tsv`` with a header; each row has the columns below.

    Args:
        root: the folder that holds the files.
        train, test: the files; without ``test`` there is no test set.
        text: the column of the text, or two for pairs.
        label: the column of the class; rows with ``-`` in it are left out.
        classes: the values of the label's column, in the order of their numbers; None: the values
            in the training data, sorted, by number if all are numbers.
        group: the column whose values are the clients, sorted in the same way; None: ``IID``,
            unless ``partition`` is given.
        length: number of tokens of a text; longer texts are cut.
        tokenizer: a local folder with a tokenizer of transformers; None: the tokens are bytes, 259
            numbers.
        augment, biases, download: have to be False and empty.
        eval_batch_size: texts per batch in evaluation.
        arguments: as in ``FederatedDataModule``.
    """

    paper = Paper("williams2018multinli")
    texts = True  # tells the command line that the samples are not images

    def __init__(
        self,
        root: str | Path = "data",
        train: str = "multinli_1.0_train.jsonl",
        test: str | None = "multinli_1.0_dev_matched.jsonl",
        text: str | Sequence[str] = ("sentence1", "sentence2"),
        label: str = "gold_label",
        classes: Sequence[str] | None = None,
        group: str | None = "genre",
        length: PositiveInt = 128,
        tokenizer: str | Path | None = None,
        partition: Partition | None = None,
        biases: Sequence[Bias] = (),
        batch_size: int | None = 16,
        augment: bool = False,
        download: bool = False,
        eval_batch_size: int | None = 64,
        **arguments: Any,
    ) -> None:
        super().__init__(
            partition=own_or_grouped(partition, group, arguments),
            biases=biases,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            **arguments,
        )
        no_pixels("TextClassification", augment, biases, download)
        refuse_twice("data.classes", classes or ())
        self.text = [text] if isinstance(text, str) else list(text)
        if not 1 <= len(self.text) <= 2:
            raise UserError(
                f"TextClassification's text is {self.text}: give one column, or two for pairs."
            )
        if length < 2 * len(self.text):
            raise UserError(
                f"TextClassification's length is {length}: give at least {2 * len(self.text)} "
                "tokens."
            )
        self.root = Path(root)
        self.train = train
        self.test = test
        self.label = label
        self.group = group
        self.classes = classes
        self.length = length
        self.tokenizer = tokenizer
        # number of tokens in the vocabulary; None until the data are loaded
        self.vocabulary: int | None = None
        self.encoder: Bytes | Folder | None = None  # likewise

    def load(self) -> None:
        self.encoder = tokenizer = tokenizer_of(self.tokenizer)
        groups: list[str] = []
        texts, labels = self._read(self.train, groups)
        where = f"The file {str(self.root / self.train)!r}"
        if self.classes is None:
            refuse_blanks(sorted(set(labels)), f"{where}, column {self.label!r},")
            self.classes = in_order(labels)
        self.class_names = [str(name) for name in self.classes]
        if self.group is not None:
            refuse_blanks(sorted(set(groups)), f"{where}, column {self.group!r},")
            names = in_order(groups)
            places = {name: place for place, name in enumerate(names)}
            self.groups = np.array([places[name] for name in groups], np.int64)
            if isinstance(self.partition, ByGroup | Grouped):
                self.client_names = names

        def samples(file: str, texts: list[list[str]], labels: list[str]) -> TensorSamples:
            return TensorSamples(
                padded(tokenizer.pairs(texts, self.length), self.length),
                self._numbers(file, labels),
            )

        self.train_set = samples(self.train, texts, labels)
        self.test_set = None
        if self.test is not None:
            self.test_set = samples(self.test, *self._read(self.test))
        self.vocabulary = tokenizer.size

    # ---- files

    def _read(
        self, file: str, groups: list[str] | None = None
    ) -> tuple[list[list[str]], list[str]]:
        """Return texts and labels of a file; add the groups to ``groups``."""
        texts = []
        labels = []
        columns = [*self.text, self.label]
        if groups is not None and self.group is not None:
            columns.append(self.group)
        for number, row in enumerate(_rows(self.root / file), 1):
            for place, column in enumerate(columns):
                value = row.get(column)
                if not isinstance(value, str | int) or (value == "" and place >= len(self.text)):
                    has = "no value" if value in (None, "") else repr(value)[:80]
                    raise UserError(
                        f"{str(self.root / file)!r}, row {number}, has {has} in the column "
                        f"{column!r}, which has to be a text or a whole number; its columns are "
                        f"{', '.join(map(str, row))[:200]}. Name the columns by data.text, "
                        "data.label and data.group, convert the value, or leave the row out."
                    )
            if row[self.label] == NO_LABEL:
                continue
            texts.append([str(row[column]) for column in self.text])
            labels.append(str(row[self.label]))
            if groups is not None and self.group is not None:
                groups.append(str(row[self.group]))
        if not texts:
            raise UserError(
                f"{str(self.root / file)!r} has no labelled texts: give at least one row."
            )
        return texts, labels

    def _numbers(self, file: str, labels: list[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
        assert self.classes is not None
        number = {name: i for i, name in enumerate(map(str, self.classes))}
        for label in labels:
            if label not in number:
                raise UserError(
                    f"{str(self.root / file)!r} has the class {label!r}, which is not one of "
                    f"{', '.join(number)[:200]} (data.classes; if not given, those of the training "
                    f"data).{suggest(label, number)}"
                )
        return np.asarray([number[label] for label in labels], np.int64)


def in_order(names: Sequence[str]) -> list[str]:
    """Return the distinct names, ascending; by number if all are whole numbers."""
    distinct = sorted(set(names))
    return [distinct[place] for place in ascending(distinct)]


def _rows(path: Path) -> Sequence[dict[str, Any]]:
    """Return the rows of JSON lines or of a table; in a tab-separated one a quote is a part of the
    text.

    Raises:
        UserError: a quote is not closed, or a row has more or fewer cells than the header; the
            error has the line.
    """
    delimiter = DELIMITERS.get(path.suffix.lower())
    if delimiter is None:
        return read_records(path, "TextClassification")
    # The limit is the process's, and other readers rely on it.
    limit = csv.field_size_limit(2**31 - 1)
    lines = io.StringIO(read_text(path, "TextClassification's file"), newline="")
    quoting: Any = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    reader = csv.DictReader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    rows = []
    try:
        refuse_two_of_a_name(path, list(reader.fieldnames or ()))
        for row in reader:
            if None in row or None in row.values():
                raise UserError(
                    f"{str(path)!r}, line {reader.line_num}, has another number of cells than the "
                    f"header ({', '.join(reader.fieldnames or ())[:200]}): mend the line."
                )
            rows.append(row)
    except csv.Error as error:
        raise UserError(
            f"{str(path)!r}, about line {reader.line_num}, cannot be read ({error}): close each "
            "quote, with nothing between it and the separator."
        ) from None
    finally:
        csv.field_size_limit(limit)
    return rows
