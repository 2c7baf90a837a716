"""Labelled texts, or pairs of texts, from JSON lines or tables; clients by a column."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.formats.tables import refuse_twice, separator_of
from fl_lightning.datamodules.formats.tokens import Bytes, Folder, read_text, tokenizer_of
from fl_lightning.datamodules.partitions.flower_splits import Grouped
from fl_lightning.datamodules.partitions.partition import (
    ByGroup,
    Contiguous,
    Partition,
    own_or_grouped,
)
from fl_lightning.datamodules.sources.file_data_module import ascending
from fl_lightning.datamodules.sources.hugging_face import splits_of
from fl_lightning.errors import UserError, suggest
from fl_lightning.evaluation.instruction_records import read_records
from fl_lightning.introspection.accepted import BelowOne, PositiveInt
from fl_lightning.introspection.papers import Paper


class LanguageModelling(FederatedDataModule):
    """Windows of ``length`` + 1 tokens of a text file; the last token begins the next one.

    x ``(length + 1,)`` are tokens, of which a learner predicts all but the first; y is -1, because
    there are no classes. By default clients hold contiguous parts of the text with equal numbers of
    windows. The end of the text is the test set.

    Args:
        root: the folder that holds ``file``.
        file: a text in UTF-8, such as tinyshakespeare's ``input.txt``.
        length: number of tokens that a window predicts.
        tokenizer: a local folder with a tokenizer of transformers; None: the tokens are bytes, 259
            numbers.
        test_fraction: the share of the text, from its end, that is the test set.
        eval_batch_size: windows per batch in evaluation; a network's outputs have one number per
            possible token.
        arguments: as in ``FederatedDataModule``.
    """

    texts = True  # tells the command line that the samples are not images
    default_clients = 5
    default_partition = Contiguous()

    def __init__(
        self,
        root: str | Path = "data",
        file: str = "input.txt",
        length: PositiveInt = 64,
        tokenizer: str | Path | None = None,
        test_fraction: BelowOne = 0.1,
        batch_size: int | None = 16,
        eval_batch_size: int | None = 64,
        **arguments: Any,
    ) -> None:
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, **arguments)
        self.path = Path(root) / file
        self.length = length
        self.tokenizer = tokenizer
        self.test_fraction = test_fraction
        # number of tokens in the vocabulary; None until the data are loaded
        self.vocabulary: int | None = None
        self.encoder: Bytes | Folder | None = None  # likewise

    def load(self) -> None:
        self.encoder = tokenizer = tokenizer_of(self.tokenizer)
        tokens = tokenizer.whole(read_text(self.path, "LanguageModelling's text"))
        cut = len(tokens) - round(self.test_fraction * len(tokens))
        self.train_set = self._windows(tokens[:cut], "training")
        self.test_set = self._windows(tokens[cut:], "test") if self.test_fraction else None
        self.vocabulary = tokenizer.size

    def _windows(
        self, tokens: np.ndarray[tuple[int], np.dtype[np.int32]], what: str
    ) -> TensorSamples:
        count = (len(tokens) - 1) // self.length
        if count < 1:
            raise UserError(
                f"{str(self.path)!r} has {len(tokens)} tokens for the {what} set, fewer than a "
                f"window of data.length {self.length} and one more: give a longer text, a smaller "
                "length, or another test_fraction."
            )
        starts = np.arange(count)[:, None] * self.length
        return TensorSamples(tokens[starts + np.arange(self.length + 1)], torch.full((count,), -1))


# MultiNLI's mark for a text on which the annotators did not agree: such rows are left out, as is
# usual.
NO_LABEL = "-"


class TextClassification(FederatedDataModule):
    """Texts with a class each; by default MultiNLI (Williams et al., 2018), with its five genres as
    clients (multinli_1.0.zip of https://cims.nyu.edu/~sbowman/multinli/).

    x ``(length,)`` are tokens, -1 after the end of the text; or ``(2, length)``, tokens and their
    types, if the tokenizer marks the second text of a pair. Files are JSON lines (one object per
    line), or ``.csv`` or ``.tsv`` with a header; each row has the columns below. In ``.tsv`` a
    quote is a part of the text.

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
        eval_batch_size: texts per batch in evaluation.
        quotes: a cell may be in quotes, as in ``"a, b"``; None: in ``.csv``, and not in ``.tsv``.
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
        batch_size: int | None = 16,
        eval_batch_size: int | None = 64,
        quotes: bool | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(
            partition=own_or_grouped(partition, group, arguments),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            **arguments,
        )
        refuse_twice("data.classes", classes or ())
        self.text = [text] if isinstance(text, str) else list(text)
        if not (1 <= len(self.text) <= 2 and length >= 2 * len(self.text)):
            raise UserError(
                f"TextClassification's text is {self.text} and length {length}: give one column, "
                "or two for pairs, and at least 2 tokens for each."
            )
        self.root = Path(root)
        self.train = train
        self.test = test
        self.label = label
        self.group = group
        self.classes = classes
        self.length = length
        self.tokenizer = tokenizer
        self.quotes = quotes
        # number of tokens in the vocabulary; None until the data are loaded
        self.vocabulary: int | None = None
        self.encoder: Bytes | Folder | None = None  # likewise

    def load(self) -> None:
        self.encoder = tokenizer = tokenizer_of(self.tokenizer)
        rows = self._read(self.train, self.group)
        if self.classes is None:
            self.classes = in_order([row[self.label] for row in rows])
        self.class_names = [str(name) for name in self.classes]
        if self.group is not None:
            groups = [row[self.group] for row in rows]
            names = in_order(groups)
            places = {name: place for place, name in enumerate(names)}
            self.groups = np.array([places[name] for name in groups], np.int64)
            if isinstance(self.partition, ByGroup | Grouped):
                self.client_names = names
        self.train_set = self._samples(self.train, rows)
        self.test_set = None
        if self.test is not None:
            self.test_set = self._samples(self.test, self._read(self.test))
        self.vocabulary = tokenizer.size

    def _samples(self, file: str, rows: Sequence[Mapping[str, str]]) -> TensorSamples:
        assert self.encoder is not None
        places = {name: i for i, name in enumerate(self.class_names)}
        for row in rows:
            if row[self.label] not in places:
                raise UserError(
                    f"{str(self.root / file)!r} has the class {row[self.label]!r}, which is not "
                    f"one of {', '.join(places)[:200]} (data.classes; if not given, those of the "
                    f"training data).{suggest(row[self.label], places)}"
                )
        texts = [list(map(row.__getitem__, self.text)) for row in rows]
        y = np.array([places[row[self.label]] for row in rows], np.int64)
        return TensorSamples(self.encoder.table(texts, self.length), y)

    # ---- files

    def _rows(self, file: str) -> Sequence[Mapping[str, Any]]:
        return rows_of(self.root / file, self.quotes)

    def _read(self, file: str, group: str | None = None) -> list[dict[str, str]]:
        """Return the columns that are used, as texts, of the rows that have a label."""
        made = []
        columns = [*self.text, self.label, *([] if group is None else [group])]
        for number, row in enumerate(self._rows(file), 1):
            for place, column in enumerate(columns):
                value = row.get(column)
                if not isinstance(value, str | int) or (value == "" and place >= len(self.text)):
                    has = "no value" if value in (None, "") else repr(value)[:80]
                    raise UserError(
                        f"{str(self.root / file)!r}, row {number}, has {has} in the column "
                        f"{column!r}, which has to be a text or a whole number; its columns are "
                        f"{', '.join(map(str, row))[:200]} (data.text, data.label, data.group)."
                    )
            if row[self.label] != NO_LABEL:
                made.append({column: str(row[column]) for column in columns})
        return made


def in_order(names: Sequence[str]) -> list[str]:
    """Return the distinct names, ascending; by number if all are whole numbers."""
    distinct = sorted(set(names))
    return [distinct[place] for place in ascending(distinct)]


def rows_of(
    path: Path, quotes: bool | None, names: Sequence[str] | None = None
) -> Sequence[dict[str, Any]]:
    """Return the rows of JSON lines or of a table.

    Args:
        names: the columns' names, if the first line does not have them.

    Raises:
        UserError: a quote is not closed, or a row has more or fewer cells than the header.
    """
    if path.suffix.lower() not in (".csv", ".tsv"):
        return read_records(path, "TextClassification")
    text = read_text(path, "TextClassification's file")
    separator = separator_of(path)
    quotes = separator != "\t" if quotes is None else quotes
    quoting: Any = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
    # The limit is the process's, and other readers rely on it.
    limit = csv.field_size_limit(2**31 - 1)
    options: Any = {"delimiter": separator, "quoting": quoting, "strict": True}
    line = 0
    reader = csv.DictReader(io.StringIO(text, newline=""), names, **options)
    try:
        refuse_twice(f"{str(path)!r}, line 1,", list(reader.fieldnames or ()))
        rows = []
        line = reader.line_num
        for row in reader:
            # If a row has too many cells, None is a key; if it has too few, None is a value.
            if None in row or None in row.values():
                raise csv.Error("the row has another number of cells than there are columns")
            rows.append(row)
            line = reader.line_num
    except csv.Error as error:
        raise UserError(
            f"{str(path)!r} cannot be read after line {line}: {error}. The first line has to name "
            "the columns, each row needs a cell for each of them, and each quote has to be closed "
            "(data.quotes)."
        ) from None
    finally:
        csv.field_size_limit(limit)
    return rows


@dataclass(frozen=True)
class Task:
    """A task of GLUE.

    Args:
        text, label: columns of the .tsv files.
        classes: in the order of the numbers that the library datasets has.
        stored: the columns of texts in the library, if they have other names.
        names: all columns of the .tsv files, if the first line does not name them.
        metrics: the task's own, besides the accuracy.
        test: the files with known labels that no client trains on.
    """

    text: tuple[str, ...]
    label: str = "label"
    classes: tuple[str, ...] = ("0", "1")
    stored: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    metrics: tuple[str, ...] = ()
    test: tuple[str, ...] = ("dev",)


TASKS = {
    "cola": Task(("sentence",), names=("source", "label", "mark", "sentence"), metrics=("mcc",)),
    "sst2": Task(("sentence",)),
    "mrpc": Task(
        ("#1 String", "#2 String"), "Quality", stored=("sentence1", "sentence2"), metrics=("f1",)
    ),
    "qqp": Task(("question1", "question2"), "is_duplicate", metrics=("f1",)),
    "mnli": Task(
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        stored=("premise", "hypothesis"),
        test=("dev_matched", "dev_mismatched"),
    ),
    "qnli": Task(("question", "sentence"), classes=("entailment", "not_entailment")),
    "rte": Task(("sentence1", "sentence2"), classes=("entailment", "not_entailment")),
    "wnli": Task(("sentence1", "sentence2")),
}


class GLUE(TextClassification):
    """A task of GLUE (Wang et al., 2019): all but STS-B, whose y is not a class.

    The labels of GLUE's test files are not public, so the test set is the file ``dev``. MNLI has
    two: the run validates on the matched one, and tests on the mismatched one. ``TextClassifier``
    also logs the task's own metric: ``mcc`` for CoLA, ``f1`` for MRPC and QQP.

    Args:
        root: the task's folder with ``train.tsv`` and ``dev.tsv``; or a folder of the library
            ``datasets`` (``save_to_disk``).
        task: its name in the library.
        length: number of tokens of a text or pair; longer ones are cut.
        tokenizer: a local folder with a tokenizer of transformers; None: the tokens are bytes, 259
            numbers.
        arguments: as in ``FederatedDataModule``.
    """

    paper = Paper("wang2019glue")

    def __init__(
        self,
        root: str | Path = "data",
        task: Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte", "wnli"] = "sst2",
        length: PositiveInt = 128,
        tokenizer: str | Path | None = None,
        partition: Partition | None = None,
        batch_size: int | None = 16,
        eval_batch_size: int | None = 64,
        **arguments: Any,
    ) -> None:
        self.of = TASKS[task]
        self.metrics = self.of.metrics
        # The command line offers the arguments that are not given here by name.
        super().__init__(
            root=root,
            train="train",
            test=self.of.test[0],
            text=self.of.text,
            label=self.of.label,
            classes=self.of.classes,
            group=None,
            quotes=False,
            length=length,
            tokenizer=tokenizer,
            partition=partition,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            **arguments,
        )

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the task's number of classes."""
        task = TASKS.get(str(arguments.get("task", "sst2")))
        return None if task is None else len(task.classes)

    def load(self) -> None:
        super().load()
        for other in self.of.test[1:]:
            self.val_set = self.test_set
            self.test_set = self._samples(other, self._read(other))

    def _rows(self, file: str) -> Sequence[Mapping[str, Any]]:
        if not (self.root / "dataset_dict.json").is_file():
            return rows_of(self.root / f"{file}.tsv", False, self.of.names)
        classes = dict(enumerate(self.of.classes))
        found = splits_of(self.root)[file.replace("dev", "validation")]
        stored = self.of.stored or self.of.text
        rows = found.with_format(None).select_columns([*stored, "label"])
        made = []
        for row in rows:
            texts = dict(zip(self.of.text, map(row.get, stored), strict=True))
            made.append({**texts, self.of.label: classes.get(row["label"])})
        return made
