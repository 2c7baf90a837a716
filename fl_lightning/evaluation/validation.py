"""One validation epoch of a learner: its hooks, its steps, and its logs.

The order of the calls and the reductions of logged values are the same as Lightning's. So a
client's samples give the values that ``Trainer.validate`` would give on only these samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.aggregation.metric_states import number_of, uncomputed
from fl_lightning.client.flat_learner import Convert
from fl_lightning.client.step_logs import START, items_of, reduce_into, reduction
from fl_lightning.evaluation.absent_classes import leave_out_absent_classes
from fl_lightning.learner.modules import (
    called_with,
    check_loggable,
    lightning_modules,
    logged_of,
    overrides,
)
from fl_lightning.machine.lightning import MisconfigurationException, extract_batch_size

BEFORE = ("on_validation_model_eval", "on_validation_start", "on_validation_epoch_start")
OF_BATCHES = ("on_validation_batch_start", "on_validation_batch_end")
AFTER = ("on_validation_epoch_end", "on_validation_end", "on_validation_model_train")
Batches = Iterable[tuple[Any, int]]  # each batch with its number of samples


def hooks_of(learner: object) -> frozenset[str]:
    return frozenset(name for name in (*BEFORE, *OF_BATCHES, *AFTER) if overrides(learner, name))


class ValidationEpoch:
    """Calls a learner's validation hooks and steps as Lightning does for one loader.

    Args:
        learner: a copy whose parameters and buffers are set. The ``log`` and ``log_dict`` of this
            copy are replaced permanently.
        context: context manager around each call of the learner.
        convert: ``(learner, batch) -> batch``; None: batches stay as they are.
        seed: called with the number of each batch before the batch.
    """

    def __init__(
        self,
        learner: Any,
        context: Callable[[], AbstractContextManager[Any]],
        convert: Convert | None = None,
        seed: Callable[[int], None] = lambda index: None,
    ) -> None:
        self.learner = learner
        self.context = context
        self.convert = convert
        self.seed = seed
        self.hooks = hooks_of(learner)
        self.logs = EpochLogs(learner)
        for part in lightning_modules(learner):
            object.__setattr__(part, "log", self.logs.log)
            object.__setattr__(part, "log_dict", self.logs.log_dict)
        leave_out_absent_classes(learner.modules())

    def begin(self) -> None:
        self.seed(0)
        for name in BEFORE:
            self._call(name)

    def run(self, batches: Batches) -> dict[str, float]:
        """Return the learner's logs for these batches by name, after :meth:`begin`."""
        for index, (batch, samples) in enumerate(batches):
            self.seed(index)
            if self.convert is not None:
                batch = self.convert(self.learner, batch)
            self.logs.batch_starts(batch, samples)
            self._call("on_validation_batch_start", batch, index)
            output = self._step(batch, index)
            self._call("on_validation_batch_end", output, batch, index)
        # Values that steps put into a metric count, although the next hook may clear the metric.
        values = self.logs.take()
        for name in AFTER:
            self._call(name)
        return {**values, **self.logs.take()}

    def _step(self, batch: Any, index: int) -> Any:
        self.logs.hook = "validation_step"
        step = self.learner.validation_step
        with self.context():
            return step(*called_with(step, batch, index))

    def _call(self, name: str, *arguments: Any) -> None:
        if name not in self.hooks:
            return
        self.logs.hook = name
        if name in (*BEFORE, *AFTER):
            self.logs.batch_starts(None, 1)
        hook = getattr(self.learner, name)
        with self.context():
            hook(*called_with(hook, *arguments) if arguments else ())


class EpochLogs:
    """The learner's logs in one epoch of validation, reduced over its batches as in Lightning.

    ``hook``: the hook that is running. ``failures``: texts about metrics that have no value.
    """

    def __init__(self, learner: nn.Module) -> None:
        self.hook = ""
        self.failures: list[str] = []
        self._learner = learner
        self._name = type(learner).__name__
        self._told = logged_of(learner)
        self._collections = [m for m in learner.modules() if isinstance(m, MetricCollection)]
        self._batch: Any = None
        self._samples = 1
        self._size: int | None = None
        # (hook, name) → (reduction, total, weight), or the metric itself.
        self._numbers: dict[tuple[str, str], tuple[str, Tensor, float]] = {}
        self._metrics: dict[tuple[str, str], Metric] = {}

    def batch_starts(self, batch: Any, samples: int) -> None:
        """From now on weigh the means by the size of this batch; None: no batch is present."""
        self._batch = batch
        self._samples = samples
        self._size = None

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        *others: Any,
        batch_size: int | None = None,
        **flags: Any,
    ) -> None:
        check_loggable(self._name, name, value)
        self._told.note(name, value, prog_bar)
        key = self.hook, name
        if isinstance(value, Metric):
            self._metrics[key] = value
            return
        kind = reduction(self._name, name, reduce_fx)
        number = torch.as_tensor(value).detach().double().reshape(())
        weight = 1.0
        if kind == "mean":
            weight = float(batch_size or self._batch_size())
            number = number * weight
        start = torch.full_like(number, START[kind])
        _, total, weights = self._numbers.get(key, (kind, start, 0.0))
        reduce_into(total, number.to(total.device), kind)
        self._numbers[key] = kind, total, weights + weight

    def log_dict(self, dictionary: Any, *arguments: Any, **flags: Any) -> None:
        """As ``LightningModule.log_dict``."""
        for name, value in items_of(dictionary):
            self.log(name, value, *arguments, **flags)

    def take(self) -> dict[str, float]:
        """Return and forget the values by name; of several hooks' values the last counts."""
        # In a collection, metrics with equal states share those of the first. Asking for all
        # metrics makes the others refer to these states.
        for collection in self._collections:
            list(collection.values(copy_state=False))
        values: dict[str, float] = {}
        for (_, name), (kind, total, weight) in self._numbers.items():
            values[name] = float(total / weight if kind == "mean" else total)
        for (_, name), metric in self._metrics.items():
            try:
                values[name] = number_of(metric)
            except Exception as error:
                self.failures.append(uncomputed(self._learner, name, metric, error))
                values[name] = math.nan
        self._numbers.clear()
        self._metrics.clear()
        return values

    def _batch_size(self) -> int:
        """Return the batch's number of samples, as Lightning finds it."""
        if self._size is None:
            self._size = self._samples
            # Lightning cannot find the size of a batch without a tensor.
            with suppress(MisconfigurationException):
                if self._batch is not None:
                    self._size = extract_batch_size(self._batch)
        return self._size
