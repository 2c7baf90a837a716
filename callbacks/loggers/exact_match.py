"""How often a language model writes the answer of a record word for word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fl_lightning.errors import UserError
from fl_lightning.evaluation.instruction_records import (
    check_messages,
    check_template,
    prompt_of,
    question_of,
)
from fl_lightning.evaluation.language import LanguageMeasurement, as_measured
from fl_lightning.introspection.accepted import PositiveInt


class ExactMatch(LanguageMeasurement):
    """Logs ``generation/exact_match``: the share of records whose answer is written exactly.

    Rows are records of instructions, ``{"instruction", "input", "output"}``, or conversations,
    ``{"messages": [{"role", "content"}, …]}``, whose last message is the answer. Prompts begin as
    those of ``InstructionTuning``. After the prompt the model takes the likeliest token again and
    again, up to the end of the text; its answer ends before the first special token. Bytes that are
    not UTF-8 are replaced, and blanks around both texts are removed. The measurement comes after
    the round, and changes no bit of the training.
    Sent and kept: nothing.

    Args:
        path: JSON lines, or one JSON list.
        max_new_tokens: the largest number of tokens of an answer.
        every_n_rounds: k: measure if (t + 1) mod k = 0, and after the last round; None: only after
            the last round.
        template: as ``InstructionTuning`` has it.

    Raises:
        UserError: a row is not such a record, or its last message is not the assistant's; the
            learner has no ``generate``; or the data have no tokenizer.

    Example:
        A record whose answer is one word.

        >>> import json
        >>> from tempfile import TemporaryDirectory
        >>> from fl_lightning.callbacks import ExactMatch
        >>> record = {"instruction": "Add.", "input": "2 + 2", "output": "4"}
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "records.json")
        ...     _ = path.write_text(json.dumps([record]))
        ...     len(ExactMatch(path, max_new_tokens=2).rows)
        1
    """

    asks = "generate"

    prefixes = ("generation/",)

    def __init__(
        self,
        path: str | Path,
        max_new_tokens: PositiveInt = 32,
        every_n_rounds: int | None = None,
        template: str = "alpaca",
    ) -> None:
        check_template("ExactMatch", template)
        self.max_new_tokens = int(max_new_tokens)
        self.template = template
        super().__init__(path, every_n_rounds)

    def checked(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, row in enumerate(rows):
            messages = row.get("messages")
            if messages is None:
                prompt_of(row, self.template, self.place(number))
                continue
            check_messages(messages, self.place(number))
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise UserError(
                    f"{self.place(number)} has no answer to compare with: the last of at least two "
                    "messages has to be the assistant's."
                )
        return rows

    def lengths(self, encoder: Any) -> list[int]:
        questions = [question_of(row, self.template, encoder)[0] for row in self.rows]
        return [len(asked) + self.max_new_tokens for asked in questions]

    def measure(self, module: Any) -> dict[str, float]:
        encoder = module.trainer.datamodule.encoder
        matches = 0
        with as_measured(module) as learner:
            for row in self.rows:
                asked, answer = question_of(row, self.template, encoder)
                prompt = torch.tensor(asked, device=module.device)
                written = learner.generate(prompt, self.max_new_tokens, encoder.end)
                matches += encoder.text(written.tolist()).strip() == answer.strip()
        return {"generation/exact_match": matches / len(self.rows)}
