"""The common part of loggers of language models: the network, its tokens, and files of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fl_lightning.errors import UserError
from fl_lightning.evaluation.instruction_records import read_records
from fl_lightning.evaluation.measurement import Measurement
from fl_lightning.evaluation.validated_model import in_learner
from fl_lightning.learner.modules import modes
from fl_lightning.machine.random_state import random_state_kept


class LanguageMeasurement(Measurement):
    """Base class of loggers that ask a language model about the rows of a file, after some rounds.

    Args:
        path: JSON lines, or one JSON list.
    """

    of_samples = False
    asks = ""  # the learner's method that this logger calls

    def __init__(self, path: str | Path, every_n_rounds: int | None = None) -> None:
        super().__init__(every_n_rounds)
        self.path = Path(path)
        self.rows = self.checked(read_records(self.path, type(self).__name__))

    @abstractmethod
    def checked(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the rows, after checking that all have the required fields.

        Raises:
            UserError: it names the first row that lacks them.
        """

    def place(self, number: int) -> str:
        return f"{type(self).__name__}: {str(self.path)!r}, record {number + 1},"

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        name = type(self).__name__
        if not hasattr(pl_module.learner, self.asks):
            raise UserError(
                f"{name} needs a learner with the method {self.asks}, such as CausalLanguageModel, "
                f"but the learner is {type(pl_module.learner).__name__}. Leave "
                f"{name} out, or give the learner that method."
            )
        if getattr(trainer.datamodule, "encoder", None) is None:
            raise UserError(
                f"{name} uses the tokenizer of the data, but "
                f"{type(trainer.datamodule).__name__} has no tokenizer (attribute `encoder`). Use "
                "InstructionTuning, LanguageModelling or TextClassification."
            )
        longest = getattr(pl_module.learner, "longest", None)
        lengths = self.lengths(trainer.datamodule.encoder)
        if longest is not None and max(lengths) > longest:
            raise UserError(
                f"{self.place(lengths.index(max(lengths)))} has {max(lengths)} tokens, but the "
                f"network takes at most {longest} (config.max_position_embeddings). Shorten the "
                "record, or leave it out."
            )

    @abstractmethod
    def lengths(self, encoder: Any) -> list[int]:
        """Return the largest number of tokens that each row gives to the network."""


@contextmanager
def as_measured(module: Any) -> Iterator[Any]:
    """Within this context the learner has the validated weights, in evaluation mode."""
    learner = module.learner
    training = [part for part, mode in modes(learner) if mode]
    vector = module.global_vector.detach()
    learner.eval()
    try:
        with (
            in_learner(module.trainer, averages=True),
            torch.no_grad(),
            random_state_kept(vector),
            module.trainer.precision_plugin.val_step_context(),
        ):
            yield learner
    finally:
        for part in training:
            part.training = True
