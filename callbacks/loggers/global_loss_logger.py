"""The loss of the global model on all clients' samples, and its generalisation gap.

Y. Sun, L. Shen, D. Tao: Understanding How Consistency Works in Federated Learning via Stage-wise
Relaxed Initialization (NeurIPS 2023), arXiv:2306.05706, Fig. 3 and 4, and the excess risk of its
theorems.
"""

from __future__ import annotations

from typing import Any

from fl_lightning.evaluation.evaluator import Evaluator, drawn
from fl_lightning.evaluation.measurement import Measurement
from fl_lightning.introspection.accepted import PositiveInt
from fl_lightning.metrics import is_accuracy
from fl_lightning.round.quantization import ordered_norm


class GlobalLossLogger(Measurement):
    """Logs ``global/{train_loss,train_acc,gap,grad_norm}`` of the model that Lightning validates.

    Lightning validates the evaluated model, or in its place the averages of its
    ``WeightAveraging``, or the weights that the learner's ``on_validation_start`` sets.

    - train_loss: the mean loss over the clients' training samples, each counted as often as clients
      hold it. The loss is that of ``training_step`` in evaluation mode, with biases, without
      augmentation and weight decay. ``train/loss`` differs from it: that is the mean along the
      clients' local paths.
    - train_acc: the accuracy that the learner logs in ``training_step``, or else in
      ``validation_step``, over the same samples; not logged if the learner logs no accuracy.
    - gap: val/loss - train_loss, in rounds that were validated.
    - grad_norm: ‖∇f‖ of that loss.

    The measurement comes after the round, on a copy of the learner: it changes no bit of the
    training, and ``time/round`` does not include it.
    Sent and kept: nothing.

    Args:
        every_n_rounds: k: measure if (t + 1) mod k = 0, and after the last round; None: only after
            the last.
        samples: number of the clients' samples to measure on, drawn once from the run's seed; None:
            all samples.

    Example:
        >>> from fl_lightning.callbacks import GlobalLossLogger
        >>> from fl_lightning.testing import tiny_run
        >>> logged = tiny_run(GlobalLossLogger()).trainer.callback_metrics
        >>> sorted(name for name in logged if name.startswith("global/"))
        ['global/grad_norm', 'global/train_acc', 'global/train_loss']
    """

    not_over_sites = "the clients' samples"

    prefixes = ("global/",)

    def __init__(self, every_n_rounds: int | None = 10, samples: PositiveInt | None = None) -> None:
        super().__init__(every_n_rounds)
        self.samples = None if samples is None else int(samples)

    def measure(self, module: Any) -> dict[str, float]:
        trainer = module.trainer
        samples = drawn(trainer.datamodule, self.samples, module.run_seed, "global loss")
        evaluator, w = Evaluator.of_evaluated(module.run, trainer)
        measured = evaluator.mean(w, samples, gradient=True)
        accuracy = _accuracy(measured.logged)
        if accuracy is None:
            accuracy = _accuracy(evaluator.mean(w, samples, step="validation_step").logged)
        assert measured.gradient is not None
        values = {"train_loss": measured.loss, "grad_norm": float(ordered_norm(measured.gradient))}
        if accuracy is not None:
            values["train_acc"] = accuracy
        if self.validated(self._ended) and "val/loss" in trainer.callback_metrics:
            values["gap"] = float(trainer.callback_metrics["val/loss"]) - measured.loss
        return {f"global/{name}": value for name, value in values.items()}


def _accuracy(logged: dict[str, float]) -> float | None:
    """Return the first value whose name is that of an accuracy."""
    return next((value for name, value in logged.items() if is_accuracy(name)), None)
