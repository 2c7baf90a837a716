"""Instructions with their answers, and conversations, as tokens and what of them is learned."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.datamodules.base import FederatedDataModule
from fl_lightning.datamodules.biases import Bias
from fl_lightning.datamodules.language_modelling import no_pixels
from fl_lightning.datamodules.partitions import IID, ByGroup, Partition
from fl_lightning.datamodules.samples import TensorSamples
from fl_lightning.datamodules.tokens import NO_TOKEN, Bytes, Folder, padded, read_text, tokenizer_of
from fl_lightning.errors import UserError

# Stanford Alpaca's prompts, without and with an input.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
OUTPUT = ("output", "response", "answer")
INPUT = ("input", "context")
Pair = tuple[list[int], list[bool]]  # tokens, and which of them are learned


class InstructionTuning(FederatedDataModule):
    """Records ``{instruction, input, output}`` or ``{messages: [{role, content}, …]}``.

    x ``(L,)`` are tokens, -1 where a text has ended; y ``(L,)`` is the token where it is learned,
    else -1. With ``response_only`` these are the tokens of the answers and their ends. L is the
    longest text of the set. ``CausalLanguageModel`` takes such batches.

    Args:
        root: the folder that holds the files.
        train, test: JSON lines, or one JSON list. ``input`` may be absent; ``response`` and
            ``answer`` stand for ``output``, ``context`` for ``input``.
        template: ``"alpaca"``, or a prompt with ``{instruction}`` and, if wanted, ``{input}``.
        length: tokens of a record; longer ones are cut at the end, and left out if none is left to
            learn.
        tokenizer: a local folder with a tokenizer of transformers, whose chat template is used for
            messages; None: bytes are the tokens.
        response_only: learn answers only; False: all tokens but the first.
        group: the field that names the client; None: a ``partition``.
        augment, biases, download: have to be False and empty: there are none of text.
        arguments: as ``FederatedDataModule`` has them.

    Raises:
        UserError: a file is missing or holds other records; a template without its fields.
    """

    texts = True  # and not images: so the command line knows

    def __init__(
        self,
        root: str | Path,
        train: str,
        test: str | None = None,
        template: str = "alpaca",
        length: int = 512,
        tokenizer: str | Path | None = None,
        response_only: bool = True,
        group: str | None = None,
        partition: Partition | None = None,
        biases: Sequence[Bias] = (),
        batch_size: int | None = 16,
        augment: bool = False,
        download: bool = False,
        eval_batch_size: int | None = 16,
        **arguments: Any,
    ) -> None:
        super().__init__(
            partition=partition or (IID() if group is None else ByGroup()),
            biases=biases,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            **arguments,
        )
        no_pixels("InstructionTuning", augment, biases)
        if download:
            raise UserError(
                "InstructionTuning's download is true, but records are your own: put them into "
                "data.root."
            )
        if template != "alpaca" and "{instruction}" not in template:
            raise UserError(
                f"InstructionTuning's template is {template!r}: it needs {{instruction}}, and may "
                "have {input}; or 'alpaca'."
            )
        if length < 2:
            raise UserError(f"InstructionTuning's length is {length}: give at least 2 tokens.")
        self.root = Path(root)
        self.train = train
        self.test = test
        self.template = template
        self.length = length
        self.tokenizer = tokenizer
        self.response_only = response_only
        self.group = group
        self.vocabulary: int | None = None  # numbers of tokens, once the data are loaded

    def load(self) -> None:
        tokenizer = tokenizer_of(self.tokenizer)
        self.train_set, groups = self._samples(self.train, tokenizer)
        if self.group is not None:
            names, self.groups = np.unique(groups, return_inverse=True)
            if isinstance(self.partition, ByGroup):
                self.client_names = [str(name) for name in names]
        self.test_set = None
        if self.test is not None:
            self.test_set, _ = self._samples(self.test, tokenizer)
        self.vocabulary = tokenizer.size

    def _samples(self, file: str, tokenizer: Bytes | Folder) -> tuple[TensorSamples, list[str]]:
        path = self.root / file
        texts: list[list[int]] = []
        targets: list[list[int]] = []
        groups: list[str] = []
        records = read_records(path)
        for number, record in enumerate(records, 1):
            place = f"{str(path)!r}, record {number},"
            tokens, learned = self._encoded(record, tokenizer, place)
            tokens, learned = tokens[: self.length], learned[: self.length]
            wanted = [t if yes else NO_TOKEN for t, yes in zip(tokens, learned, strict=True)]
            # The first token is predicted from nothing.
            if all(target == NO_TOKEN for target in wanted[1:]):
                continue
            texts.append(tokens)
            targets.append([NO_TOKEN, *wanted[1:]])
            if self.group is not None:
                if self.group not in record:
                    raise UserError(f"{place} has no {self.group!r}, which data.group names.")
                groups.append(str(record[self.group]))
        if not texts:
            raise UserError(
                f"{str(path)!r} has no record with an answer within data.length {self.length} "
                "tokens. Give a larger length, or other records."
            )
        if left_out := len(records) - len(texts):
            warnings.warn(
                f"{str(path)!r}: {left_out} of {len(records)} records have no answer within "
                f"data.length {self.length} tokens, and are left out.",
                stacklevel=2,
            )
        longest = max(map(len, texts))
        x, y = padded(texts, longest), padded(targets, longest)
        return TensorSamples(x, y), groups

    def _encoded(self, record: Mapping[str, Any], tokenizer: Bytes | Folder, place: str) -> Pair:
        """A record's tokens, and which of them are learned."""
        if "messages" in record:
            tokens, answers = conversation(record["messages"], tokenizer, place)
        else:
            prompt, output = self._prompt(record, place)
            asked = tokenizer.whole(prompt).tolist()
            answer = [*tokenizer.whole(output).tolist(), end_of(tokenizer)]
            tokens = asked + answer
            answers = [False] * len(asked) + [True] * len(answer)
        return tokens, answers if self.response_only else [True] * len(tokens)

    def _prompt(self, record: Mapping[str, Any], place: str) -> tuple[str, str]:
        """A record's prompt and its answer."""
        instruction = record.get("instruction")
        output = next((record[name] for name in OUTPUT if name in record), None)
        given = next((record[name] for name in INPUT if record.get(name)), "")
        if not isinstance(instruction, str) or not isinstance(output, str):
            raise UserError(
                f"{place} has {', '.join(map(str, record))[:200]}; accepted are texts called "
                "instruction and output (or response, answer), with input (or context) if there "
                "is one, or messages."
            )
        template = self.template
        if template == "alpaca":
            template = ALPACA_INPUT if given else ALPACA
        # Not str.format: texts have braces of their own.
        before, _, after = template.partition("{instruction}")
        before, after = before.replace("{input}", given), after.replace("{input}", given)
        return f"{before}{instruction}{after}", output


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, or of one JSON list.

    Raises:
        UserError: it holds something else.
    """
    text = read_text(path, "InstructionTuning's file")
    expected = "one JSON object per line, or one JSON list of objects"
    try:
        if text.lstrip().startswith("["):
            records = json.loads(text)
        else:
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise UserError(f"{str(path)!r} is no JSON ({error}): {expected} is expected.") from None
    if not records or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{str(path)!r} has no records: {expected} is expected.")
    return list(records)


def end_of(tokenizer: Bytes | Folder) -> int:
    """The token that ends a text."""
    number = tokenizer.end
    if number is None:
        raise UserError(
            "data.tokenizer has no token for the end of a text (eos_token). Set one in its folder."
        )
    return number


def conversation(messages: Any, tokenizer: Bytes | Folder, place: str) -> Pair:
    """The tokens of a conversation; the assistant's words and their ends are learned."""
    fits = isinstance(messages, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("role"), str)
        and isinstance(each.get("content"), str)
        for each in messages
    )
    if not fits or not messages:
        raise UserError(f"{place} has messages that are no list of {{role, content}}.")
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
    """The tokens up to the last message, and where its words begin; ``before``: without it."""
    last = messages[-1]
    rendered = tokenizer.chat(messages)
    if rendered is None:
        header = [*before, *tokenizer.whole(f"<|{last['role']}|>\n").tolist()]
        words: NDArray[np.int32] = tokenizer.whole(last["content"])
        return [*header, *words.tolist(), end_of(tokenizer)], len(header)
    if rendered[: len(before)] != before:
        raise UserError(
            f"{place} cannot be cut into messages: the tokenizer's chat template renders "
            f"{len(messages)} messages otherwise than {len(messages) - 1} and one more. Use "
            "another template, or records of instructions."
        )
    header = before
    if last["role"] == "assistant" and len(messages) > 1:
        asked = tokenizer.chat(messages[:-1], asks=True) or []
        header = asked if rendered[: len(asked)] == asked else before
    return rendered, max(len(header), len(before))
