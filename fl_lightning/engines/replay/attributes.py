"""Whether any Python attribute of a learner's modules has changed."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection


class Attributes:
    """What a learner's modules hold besides parameters, buffers and, unless ``metrics``, the states of metrics.

    Without ``in_place`` a tensor whose values changed counts as unchanged.
    """

    SKIPPED = ("_parameters", "_buffers", "_trainer", "training")
    ITEMS = 100  # of longer containers only the length is compared

    def __init__(self, learner: nn.Module, metrics: bool = False, in_place: bool = True) -> None:
        self.learner, self.metrics, self.in_place = learner, metrics, in_place
        self._kept: list[Any] = []  # so that no other object gets the id of one of them
        self.before = self._now()

    def changed(self) -> str:
        """The name of the first attribute that is no longer what it was, or an empty string."""
        now = self._now()
        names = [*self.before, *(name for name in now if name not in self.before)]
        return next((n for n in names if (self.before.get(n, ""),) != (now.get(n, ""),)), "")

    def _now(self) -> dict[str, Any]:
        return {
            f"{prefix}.{name}" if prefix else name: self._state(value, 3)
            for prefix, module in self.learner.named_modules()
            if self.metrics or not isinstance(module, (Metric, MetricCollection))
            for name, value in vars(module).items()
            if name not in self.SKIPPED
        }

    def _state(self, value: Any, depth: int) -> Any:
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
            return value
        self._kept.append(value)
        if isinstance(value, Tensor):
            return id(value), value._version if self.in_place and not value.is_inference() else 0
        if isinstance(value, np.ndarray):
            return id(value), value.tobytes()
        if isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            items = value.values() if isinstance(value, dict) else value
            short = depth > 0 and len(value) <= self.ITEMS and not isinstance(value, (set, frozenset))
            return len(value), [self._state(item, depth - 1) for item in items] if short else None
        own = type(value).__module__.split(".")[0] not in ("torch", "pytorch_lightning", "lightning", "torchmetrics")
        if depth > 0 and own and not callable(value) and hasattr(value, "__dict__"):  # an average meter, say
            return id(value), [(name, self._state(item, depth - 1)) for name, item in vars(value).items()]
        return id(value)
