"""Ranking metrics of samples that lack some classes, as one client's often do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torchmetrics import classification
from torchmetrics.utilities.data import dim_zero_cat

KINDS = ("Binary", "Multiclass", "Multilabel")


def _classes(*names: str) -> tuple[Any, ...]:
    """The classes of torchmetrics for these metrics; older versions lack some of them."""
    full = [kind + name for kind, name in product(KINDS, names)]
    return tuple(vars(classification)[name] for name in full if name in vars(classification))


AVERAGE_PRECISIONS = _classes("AveragePrecision")
EQUAL_ERROR_RATES = _classes("EER")
RANKINGS = (*_classes("AUROC", "LogAUC"), *EQUAL_ERROR_RATES, *AVERAGE_PRECISIONS)


def leave_out_absent_classes(metrics: Any) -> None:
    """Let these metrics compute over the classes that their samples define, permanently."""
    for metric in metrics:
        if isinstance(metric, RANKINGS):
            metric.compute = OfDefinedClasses(metric)


class OfDefinedClasses:
    """The ``compute`` of a ranking metric, over the classes that its samples define.

    Samples define a class if some belong to it and some do not; an average precision needs only the
    former. torchmetrics counts 0 for the other classes, which is the worst ranking. Here a mean
    leaves them out, and a value per class is NaN for them. So is a mean without any defined class.
    """

    def __init__(self, metric: Any) -> None:
        found = metric.compute
        self.metric = metric
        self.compute: Callable[[], Any]
        self.compute = found.compute if isinstance(found, OfDefinedClasses) else found
        # The parent class of LogAUC uses `average` for the average of curves.
        self._name = "average2" if hasattr(metric, "average2") else "average"

    def __call__(self) -> Any:
        average = "micro" if isinstance(self.metric, _BINARY) else self._average()
        positives, negatives = self._counts(average)
        if average == "micro":
            positives, negatives = positives.sum(), negatives.sum()
        defined = positives > 0
        if not isinstance(self.metric, AVERAGE_PRECISIONS):
            defined = defined & (negatives > 0)
        if bool(defined.all()):
            return self.compute()
        if isinstance(self.metric, EQUAL_ERROR_RATES) and average == "macro":
            # It is the rate of an average curve, to which an absent class has no curve to give.
            defined = torch.zeros_like(defined)
        if not bool(defined.any()):
            one_number = average in ("micro", "macro", "weighted")
            return torch.full_like(
                positives.sum() if one_number else positives, torch.nan, dtype=torch.float32
            )
        values = torch.where(defined, self._of_each_class(), torch.nan)
        if average not in ("macro", "weighted"):
            return values
        weights = torch.ones_like(values) if average == "macro" else positives.to(values)
        return (values * weights)[defined].sum() / weights[defined].sum()

    def _average(self) -> str | None:
        return getattr(self.metric, self._name, None)

    def _of_each_class(self) -> Tensor:
        metric = self.metric
        average = self._average()
        if average in (None, "none"):
            values: Tensor = self.compute()
            return values
        setattr(metric, self._name, None)
        metric._computed = None
        try:
            values = self.compute()
        finally:
            setattr(metric, self._name, average)
            metric._computed = None
        return values

    def _counts(self, average: str | None) -> tuple[Tensor, Tensor]:
        """Return the numbers of samples in each class, and outside it."""
        metric = self.metric
        if metric.thresholds is not None:
            counts = metric.confmat[0].sum(-1)
            return counts[..., 1], counts[..., 0]
        target = dim_zero_cat(metric.target)
        if isinstance(metric, _MULTICLASS) and average != "micro":
            counts = torch.bincount(target.flatten(), minlength=metric.num_classes)
            return counts, counts.sum() - counts
        return (target == 1).sum(0), (target == 0).sum(0)


_BINARY = tuple(kind for kind in RANKINGS if kind.__name__.startswith("Binary"))
_MULTICLASS = tuple(kind for kind in RANKINGS if kind.__name__.startswith("Multiclass"))
