"""Metrics of classification by name; those per class are means over the classes with samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torchmetrics import classification as kinds

from fl_lightning.errors import UserError, suggest
from fl_lightning.evaluation.absent_classes import leave_out_absent_classes


class OverPresent:
    """Mixed into a metric of torchmetrics with a value per class: the mean over classes present."""

    def compute(self) -> Tensor:
        each: Tensor = super().compute()  # type: ignore[misc]
        counts: Any = self
        present = counts.tp + counts.fn > 0
        # Without samples there is no class, and the mean of nothing is NaN.
        return each[present].mean()


class BalancedAccuracy(OverPresent, kinds.MulticlassAccuracy):
    """The mean share of a class's samples that are right."""


class F1(OverPresent, kinds.MulticlassF1Score):
    """The mean F1 of a class."""


class Precision(OverPresent, kinds.MulticlassPrecision):
    """The mean share of right ones among the samples that are predicted to be of a class."""


NAMED: dict[str, Callable[[int], Any]] = {
    "auroc": kinds.MulticlassAUROC,
    "average_precision": kinds.MulticlassAveragePrecision,
    "balanced_acc": lambda classes: BalancedAccuracy(classes, average="none"),
    "calibration_error": kinds.MulticlassCalibrationError,
    "f1": lambda classes: F1(classes, average="none"),
    "kappa": kinds.MulticlassCohenKappa,
    "mcc": kinds.MulticlassMatthewsCorrCoef,
    "precision": lambda classes: Precision(classes, average="none"),
    "top3": lambda classes: kinds.MulticlassAccuracy(classes, top_k=3, average="micro"),
    "top5": lambda classes: kinds.MulticlassAccuracy(classes, top_k=5, average="micro"),
}


def check_classes(learner: str, num_classes: int, data: Any) -> None:
    """Refuse data with more classes than a learner has."""
    own = getattr(data, "num_classes", None)
    if isinstance(own, int) and own > num_classes:
        raise UserError(
            f"{learner}: num_classes is {num_classes}, but {type(data).__name__} has {own} "
            f"classes. Give num_classes={own}."
        )


def metrics_named(names: Sequence[str], num_classes: int) -> nn.ModuleDict:
    """Return these metrics by name, of probabilities ``(n, num_classes)`` and classes ``(n,)``.

    Raises:
        UserError: a name is not known, or there are too few classes for it.
    """
    made = nn.ModuleDict()
    for name in names:
        if name not in NAMED:
            raise UserError(
                f"model.learner.metrics has {name!r}; accepted are {', '.join(NAMED)}."
                f"{suggest(name, NAMED)}"
            )
        if name in ("top3", "top5") and num_classes <= int(name[3:]):
            raise UserError(
                f"model.learner.metrics: {name} is always 1 for {num_classes} classes. Leave it "
                "out."
            )
        made[name] = NAMED[name](num_classes)
    leave_out_absent_classes(made.values())
    return made


def update(metrics: nn.ModuleDict, logits: Tensor, classes: Tensor) -> None:
    """Count these predictions."""
    # Of logits that happen to lie in [0, 1] torchmetrics would think that they are probabilities.
    probabilities = logits.detach().softmax(1)
    metric: Any
    for metric in metrics.values():
        metric.update(probabilities, classes)
