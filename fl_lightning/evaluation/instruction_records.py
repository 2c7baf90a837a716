"""Records of instructions: read from files, and converted to prompts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning.errors import UserError

# The prompts of Stanford Alpaca, without and with an input.
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
FIELD = re.compile(r"\{(instruction|input)\}")
OUTPUT = ("output", "response", "answer")
INPUT = ("input", "context")


def read_records(path: Path, wanted_by: str) -> list[dict[str, Any]]:
    """Read the records of a file of JSON lines, or of one JSON list.

    Raises:
        UserError: the file does not exist, or holds something else than records.
    """
    expected = "one JSON object per line, or one JSON list of objects"
    text = path.read_text(encoding="utf-8-sig")
    lines = [text] if text.lstrip().startswith("[") else text.split("\n")
    records: list[Any] = []
    for number, line in enumerate(lines, 1):
        try:
            records += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise UserError(
                f"{str(path)!r}, line {number}, is not JSON ({error}): {expected} is expected."
            ) from None
    if len(records) == 1 and isinstance(records[0], list):
        (records,) = records
    if not records or not all(isinstance(record, dict) for record in records):
        raise UserError(f"{str(path)!r} has no records: {expected} is expected.")
    return records


def check_template(wanted_by: str, template: str) -> None:
    if template != "alpaca" and not FIELD.search(template):
        raise UserError(
            f"{wanted_by}'s template is {template!r}: it needs {{instruction}} or {{input}}, or "
            "both; or 'alpaca'."
        )


def check_messages(messages: Any, place: str) -> None:
    """Refuse messages that are not a list of ``{role, content}``."""
    fits = isinstance(messages, list) and all(
        isinstance(each, dict)
        and isinstance(each.get("role"), str)
        and isinstance(each.get("content"), str)
        for each in messages
    )
    if not fits or not messages:
        raise UserError(f"{place} has messages that are not a list of {{role, content}}.")


def question_of(record: Mapping[str, Any], template: str, encoder: Any) -> tuple[list[int], str]:
    """Return the tokens that ask for a record's answer, and the answer.

    Args:
        encoder: the data module's tokenizer.
    """
    messages = record.get("messages")
    if messages is None:
        prompt, answer = prompt_of(record, template, "")
        return [*encoder.start, *encoder.whole(prompt).tolist()], answer
    return encoder.chat(messages[:-1], asks=True), str(messages[-1]["content"])


def prompt_of(record: Mapping[str, Any], template: str, place: str) -> tuple[str, str]:
    """Return a record's prompt and its answer.

    Args:
        place: place of the record, for the message.

    Raises:
        UserError: it has no instruction or no output, or two of one kind that differ.
    """
    instruction = record.get("instruction")
    # A table has None where a record lacks one of its columns.
    output = _only({name: record[name] for name in OUTPUT if record.get(name) is not None}, place)
    given = _only({name: record[name] for name in INPUT if record.get(name)}, place) or ""
    texts = (instruction, output, given)
    if not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"{place} has {', '.join(map(str, record))[:200]}; accepted are texts called "
            "instruction and output (or response, answer), with input (or context) if there "
            "is one, or messages."
        )
    if template == "alpaca":
        template = ALPACA_INPUT if given else ALPACA
    # str.format would fail, because texts may contain braces.
    fields = {"instruction": str(instruction), "input": given}
    return FIELD.sub(lambda found: fields[found[1]], template), str(output)


def _only(texts: Mapping[str, Any], place: str) -> Any:
    """Return the text that a record has under one or several names; None if it has none."""
    first, *others = texts or [""]
    if any(texts[name] != texts[first] for name in others):
        raise UserError(
            f"{place} has {' and '.join(texts)}, which are names for the same text, but differ. "
            "Remove all but the one to use."
        )
    return texts.get(first)
