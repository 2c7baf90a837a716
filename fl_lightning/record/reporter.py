"""Passes what a fit measures to its loggers and callbacks."""

from __future__ import annotations

import time
from typing import Any

import torch

from fl_lightning.record.description import facts, log_to, settings


class Reporter:
    """Passes the rounds' metrics of a fit to the Trainer's loggers and callbacks."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._validation_began = 0.0
        self._logged = False  # whether this fit has logged a round

    def begin(self, run: Any) -> None:
        """Give loggers the run's settings and first round, before this fit's first round."""
        # Make a logger drop later rounds before it gets new values.
        for logger in self.trainer.loggers:
            if hasattr(logger, "resume"):
                logger.resume(run.state.rounds)
        log_to(self.trainer.loggers, settings(run, self.trainer) | facts(run, self.trainer))

    def log(self, metrics: dict[str, float], t: int) -> None:
        """Log metrics of round t to every logger, and where monitoring callbacks find them."""
        if not self._logged:
            self._call("on_later_rounds_dropped")
            self._logged = True
        self.trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})
        for logger in self.trainer.loggers:
            logger.log_metrics(metrics, step=t)

    def client_ended(self, done: int, of: int) -> None:
        self._call("on_client_end", done, of)

    def _call(self, hook: str, *arguments: int) -> None:
        for callback in self.trainer.callbacks:
            if hasattr(callback, hook):
                getattr(callback, hook)(self.trainer, self.trainer.lightning_module, *arguments)

    def validation_starts(self) -> None:
        self._validation_began = time.perf_counter()

    def validation_ends(self, trainer: Any) -> None:
        """Log how long validation took, if it belongs to this fit."""
        of_fit = trainer is self.trainer and trainer.state.fn == "fit"
        if of_fit and not trainer.sanity_checking:
            seconds = time.perf_counter() - self._validation_began
            self.log({"time/validation": seconds}, self.trainer.current_epoch)
