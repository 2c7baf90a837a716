"""How often a language model gives the largest likelihood to the right one of several texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fl_lightning.errors import UserError
from fl_lightning.evaluation.language import LanguageMeasurement, as_measured

BATCH = 16  # number of texts in one forward pass


class MultipleChoice(LanguageMeasurement):
    """Logs ``choice/acc`` and ``choice/acc_norm``: shares of rows with the right choice.

    A row is ``{"prompt": text, "choices": [text, …], "answer": index}``. Prompt and choice are
    tokenized separately, and then joined. ``acc`` takes the choice of the largest log-likelihood
    after the prompt, ``acc_norm`` that of the largest log-likelihood per character of the choice;
    among equal choices the first counts. The measurement comes after the round, and changes no bit
    of the training.
    Sent and kept: nothing.

    Args:
        path: JSON lines, or one JSON list.
        every_n_rounds: k: measure if (t + 1) mod k = 0, and after the last round; None: only after
            the last round.

    Raises:
        UserError: a row has another form; the learner has no ``log_likelihood``; or the data have
            no tokenizer.

    Example:
        A question with two choices, of which the first one is right.

        >>> import json
        >>> from tempfile import TemporaryDirectory
        >>> from fl_lightning.callbacks import MultipleChoice
        >>> question = {"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "questions.json")
        ...     _ = path.write_text(json.dumps([question]))
        ...     len(MultipleChoice(path).rows)
        1
    """

    asks = "log_likelihood"

    prefixes = ("choice/",)

    def __init__(self, path: str | Path, every_n_rounds: int | None = None) -> None:
        super().__init__(path, every_n_rounds)

    def checked(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for number, row in enumerate(rows):
            choices: Any = row.get("choices")
            answer: Any = row.get("answer")
            texts = isinstance(choices, list) and all(c and isinstance(c, str) for c in choices)
            known = isinstance(answer, int) and not isinstance(answer, bool)
            fits = isinstance(row.get("prompt"), str) and texts and known
            if not fits or not 0 <= answer < len(choices):
                raise UserError(
                    f"{self.place(number)} is not a question: it needs prompt (a text), choices "
                    "(texts that are not empty) and answer (the place of the right one, from 0)."
                )
        return rows

    def lengths(self, encoder: Any) -> list[int]:
        found = []
        for row in self.rows:
            longest = max(len(encoder.whole(choice)) for choice in row["choices"])
            found.append(len(encoder.start) + len(encoder.whole(row["prompt"])) + longest)
        return found

    def measure(self, module: Any) -> dict[str, float]:
        right = plain = 0
        scores = iter(self._likelihoods(module))
        for row in self.rows:
            own = [next(scores) for _ in row["choices"]]
            per_character = [s / len(c) for s, c in zip(own, row["choices"], strict=True)]
            plain += own.index(max(own)) == row["answer"]
            right += per_character.index(max(per_character)) == row["answer"]
        n = len(self.rows)
        return {"choice/acc": plain / n, "choice/acc_norm": right / n}

    def _likelihoods(self, module: Any) -> list[float]:
        """Return the log-likelihood of each choice of each row, in their order."""
        encoder = module.trainer.datamodule.encoder
        texts: list[list[int]] = []
        starts: list[int] = []
        for row in self.rows:
            asked = [*encoder.start, *(int(token) for token in encoder.whole(row["prompt"]))]
            for choice in row["choices"]:
                texts.append([*asked, *(int(token) for token in encoder.whole(choice))])
                starts.append(len(asked))
        found: list[float] = []
        with as_measured(module) as learner:
            for first in range(0, len(texts), BATCH):
                some = texts[first : first + BATCH]
                length = max(map(len, some))
                rows = [text + [-1] * (length - len(text)) for text in some]
                tokens = torch.tensor(rows, device=module.device)
                start = torch.tensor(starts[first : first + BATCH], device=module.device)
                found += learner.log_likelihood(tokens, start).tolist()
        return found
