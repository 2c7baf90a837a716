"""Instructions with answers, and conversations, as tokens and a mask of those to learn."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.batches.samples import TensorSamples
from fl_lightning.datamodules.formats.tokens import NO_TOKEN, Bytes, Folder, padded, tokenizer_of
from fl_lightning.datamodules.partitions.partition import ByGroup, Partition, own_or_grouped
from fl_lightning.datamodules.partitions.split import Split
from fl_lightning.errors import UserError
from fl_lightning.evaluation.instruction_records import (
    check_messages,
    check_template,
    prompt_of,
    read_records,
)
from fl_lightning.introspection.accepted import AtLeast

Pair = tuple[list[int], list[bool]]  # tokens, and for each whether it is learned


class RecordSamples(TensorSamples):
    """Texts and targets ``(N, L)`` in memory; a batch is as long as its longest text."""

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each text ``(N,)``."""
        return (self.x != NO_TOKEN).sum(1).numpy()

    def with_samples(self, x: Tensor, y: Tensor) -> TensorSamples:
        return RecordSamples(x, y)

    def batches(
        self, index: NDArray[np.int64], size: int, *rest: Any, **more: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        starts = range(0, len(index), size)
        for start, (x, y) in zip(starts, super().batches(index, size, *rest, **more), strict=True):
            # These sizes are known without the device, so nothing waits for it.
            longest = int(self.lengths[index[start : start + size]].max())
            yield x[:, :longest], y[:, :longest]


def samples_of(x: list[list[int]], y: list[list[int]]) -> RecordSamples:
    longest = max(map(len, x))
    return RecordSamples(padded(x, longest), padded(y, longest))


class InstructionTuning(FederatedDataModule):
    """Records ``{instruction, input, output}`` or ``{messages: [{role, content}, …]}``.

    x ``(L,)`` are tokens, -1 after the end of a text; y ``(L,)`` is the token if it is to be
    learned, else -1. With ``response_only`` only the tokens of the answers and their ends are
    learned. L is the longest text of the batch. ``CausalLanguageModel`` takes such batches.

    Args:
        root: the folder that holds the files; None if ``train`` and ``test`` are records.
        train, test: a file of JSON lines, or of one JSON list; or the records themselves, a list of
            dicts or a ``Dataset`` of the library ``datasets``. ``train`` None: 360 small sums for a
            first try, and 40 others to test on. ``input`` may be absent; ``response`` and
            ``answer`` stand for ``output``, ``context`` for ``input``.
        template: ``"alpaca"``, or a prompt with ``{instruction}``, ``{input}`` or both.
        length: tokens of a record; longer records are cut at the end, and left out if no token is
            left to learn.
        tokenizer: a local folder with a tokenizer of transformers, whose chat template is used for
            messages; None: the tokens are bytes.
        bos: begin records with the tokenizer's token for the beginning of a text; None: if the
            tokenizer puts one before a text. Messages have what the chat template writes.
        response_only: learn only answers; False: all tokens but the first.
        pack: join the training records of each client, in their order, and cut them into rows of
            ``length`` tokens; the last row may be shorter. No token of such a row is padding;
            positions continue, and a record can attend to the earlier records in its row. A sample
            is a row.
        group: the field that names the client; None: use a ``partition``.
        arguments: as in ``FederatedDataModule``.

    Raises:
        UserError: a file is missing or holds other records; or a template lacks its fields.
    """

    texts = True  # tells the command line that the samples are not images

    def __init__(
        self,
        root: str | Path | None = None,
        train: str | list[dict[str, Any]] | None = None,
        test: str | list[dict[str, Any]] | None = None,
        template: str = "alpaca",
        length: Annotated[int, AtLeast(2)] = 512,
        tokenizer: str | Path | None = None,
        response_only: bool = True,
        pack: bool = False,
        group: str | None = None,
        partition: Partition | None = None,
        batch_size: int | None = 16,
        eval_batch_size: int | None = 16,
        bos: bool | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(
            partition=own_or_grouped(partition, group, arguments),
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            **arguments,
        )
        check_template("InstructionTuning", template)
        held_out = (self.val_fraction, self.client_test_fraction, self._test_clients, self._pooled)
        if pack and any(held_out):
            raise UserError(
                "InstructionTuning's pack is true, which joins all records of a client. So "
                "val_fraction, client_test_fraction, test_clients and pooled cannot hold out any "
                "of them. Leave these options out (data.test takes a separate file), or leave pack "
                "out."
            )
        self.root = None if root is None else Path(root)
        self.train = train
        self.test = test
        self.template = template
        self.length = length
        self.tokenizer = tokenizer
        self.bos = bos
        self.response_only = response_only
        self.pack = pack
        self.group = group
        self.encoder: Bytes | Folder | None = None  # None until the data are loaded
        # Records that are packed: tokens and targets of each record, and all of them as samples.
        self._texts: list[tuple[list[int], list[int]]] = []
        self._unpacked: RecordSamples | None = None
        # number of tokens in the vocabulary; None until the data are loaded
        self.vocabulary: int | None = None

    def load(self) -> None:
        self.encoder = tokenizer = tokenizer_of(self.tokenizer, self.bos)
        train: Any = self.train
        test: Any = self.test
        if train is None:
            train, made = small_sums()
            test = made if test is None else test
        self.train_set, groups = self._samples(train, tokenizer, self.pack)
        if self.group is not None:
            names, self.groups = np.unique(groups, return_inverse=True)
            if isinstance(self.partition, ByGroup):
                self.client_names = [str(name) for name in names]
        self.test_set = None
        if test is not None:
            self.test_set, _ = self._samples(test, tokenizer)
        self.vocabulary = tokenizer.size

    def setup(self, stage: str | None = None) -> None:
        """Load once; split, and pack, once per seed."""
        split_before = self._split
        # Records are split, and not the rows of an earlier seed.
        if self._unpacked is not None and self._split_seed != self.run_seed:
            self.train_set = self._unpacked
        super().setup(stage)
        if self.pack and self._split is not split_before:
            self._join(self._split)

    def _join(self, split: Split | None) -> None:
        """Replace the records of each client by its rows."""
        assert split is not None
        x: list[list[int]] = []
        y: list[list[int]] = []
        clients: list[NDArray[np.int64]] = []
        for client in range(len(split.clients)):
            # Use the order of the file, in whatever order the records were drawn.
            texts = [self._texts[place] for place in sorted(split.indices(client).tolist())]
            tokens = list(chain.from_iterable(text for text, _ in texts))
            wanted = list(chain.from_iterable(targets for _, targets in texts))
            first = len(x)
            for start in range(0, len(tokens), self.length):
                x.append(tokens[start : start + self.length])
                # No token comes before a row's first token, so the first one is not predicted.
                y.append([NO_TOKEN, *wanted[start + 1 : start + self.length]])
            clients.append(np.arange(first, len(x)))
        self.train_set = samples_of(x, y)
        packed = Split(clients, len(x), by_partition=split.by_partition)
        # The hash must identify the records of each client: two splits may pack into equally many
        # rows.
        packed.hash = split.hash
        self._split = packed

    def _samples(
        self, given: Any, tokenizer: Bytes | Folder, pack: bool = False
    ) -> tuple[TensorSamples, list[str]]:
        name, records = self._records(given)
        texts: list[list[int]] = []
        targets: list[list[int]] = []
        groups: list[str] = []
        for number, record in enumerate(records, 1):
            place = f"{name}, record {number},"
            tokens, learned = self._encoded(record, tokenizer, place)
            if not pack:
                tokens, learned = tokens[: self.length], learned[: self.length]
            if self.group is not None and self.group not in record:
                raise UserError(f"{place} has no {self.group!r}, which data.group names.")
            wanted = [t if yes else NO_TOKEN for t, yes in zip(tokens, learned, strict=True)]
            # No token comes before the first one, so the first one is not predicted.
            if all(target == NO_TOKEN for target in wanted[1:]):
                continue
            texts.append(tokens)
            targets.append([NO_TOKEN, *wanted[1:]])
            if self.group is not None:
                groups.append(str(record[self.group]))
        if not texts:
            raise UserError(
                f"{name} has no record with an answer within data.length {self.length} "
                "tokens. Give a larger length, or other records."
            )
        if left_out := len(records) - len(texts):
            warnings.warn(
                f"{name}: {left_out} of {len(records)} records have no answer within "
                f"data.length {self.length} tokens, and are left out.",
                stacklevel=2,
            )
        samples = samples_of(texts, targets)
        if pack:
            self._texts = list(zip(texts, targets, strict=True))
            self._unpacked = samples
        return samples, groups

    def _records(self, given: Any) -> tuple[str, Sequence[Mapping[str, Any]]]:
        if not isinstance(given, str | Path):
            if not len(given) or not all(isinstance(record, Mapping) for record in given):
                raise UserError(
                    "InstructionTuning's train and test are a file or a list of dicts "
                    f"{{instruction, input, output}} or {{messages}}, and one is {given!r:.100}."
                )
            return "the list of records", given
        path = Path(given) if self.root is None else self.root / given
        return repr(str(path)), read_records(path, "InstructionTuning")

    def _encoded(self, record: Mapping[str, Any], tokenizer: Bytes | Folder, place: str) -> Pair:
        """Return a record's tokens, and which of them are to be learned."""
        if record.get("messages") is not None:
            tokens, answers = conversation(record["messages"], tokenizer, place)
        else:
            prompt, output = prompt_of(record, self.template, place)
            asked = [*tokenizer.start, *tokenizer.whole(prompt).tolist()]
            answer = [*tokenizer.whole(output).tolist(), tokenizer.end_of_text()]
            tokens = asked + answer
            answers = [False] * len(asked) + [True] * len(answer)
        return tokens, answers if self.response_only else [True] * len(tokens)


def small_sums() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return records to train on and to test on, always the same; ``digits`` names a group.

    >>> small_sums()[0][1]
    {'instruction': 'What is 0 + 1?', 'output': '1', 'digits': 1}
    """
    train: list[dict[str, Any]] = []
    test: list[dict[str, Any]] = []
    for number in range(400):
        a, b = divmod(number, 20)
        answer = str(a + b)
        record = {"instruction": f"What is {a} + {b}?", "output": answer, "digits": len(answer)}
        (test if number % 10 == 7 else train).append(record)
    return train, test


def conversation(messages: Any, tokenizer: Bytes | Folder, place: str) -> Pair:
    """Return a conversation's tokens; the assistant's words and their ends are learned."""
    check_messages(messages, place)
    tokens: list[int] = []
    answers: list[bool] = []
    for k, message in enumerate(messages):
        whole, header = _with_message(messages[: k + 1], tokens, tokenizer, place)
        says = message["role"] == "assistant"
        answers += [False] * (header - len(tokens)) + [says] * (len(whole) - header)
        tokens = whole
    return tokens, answers


def _with_message(
    messages: list[dict[str, str]], before: list[int], tokenizer: Bytes | Folder, place: str
) -> tuple[list[int], int]:
    """Return tokens up to the last message, and where it begins; ``before``: without it."""
    rendered = tokenizer.chat(messages)
    if rendered[: len(before)] != before:
        raise UserError(
            f"{place} cannot be cut into messages: the tokenizer's chat template renders the first "
            f"{len(messages) - 1} of {len(messages)} messages differently if the last one follows. "
            "Use another template, or records of instructions."
        )
    header = before
    if messages[-1]["role"] == "assistant":
        asked = tokenizer.chat(messages[:-1], asks=True)
        header = asked if rendered[: len(asked)] == asked else before
    return rendered, max(len(header), len(before))
