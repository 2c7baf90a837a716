"""A learner whose trainable parameters are views into one client's vector, and the gradient of its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from fl_lightning.flat import Layout, flatten, tie, trainable


class Replica:
    """The learner at ``x`` ``(1, D)``: ``gradient(batch)`` there, and what the learner logs meanwhile.

    Args:
        learner: any LightningModule; its parameters are tied to ``x`` inside :meth:`tied`.
        precision: context for forward passes (autocast), and how a batch's floats are converted.
    """

    def __init__(
        self,
        learner: Any,
        layout: Layout,
        x: Tensor,
        forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        convert: Callable[[Any], Any] = lambda batch: batch,
    ) -> None:
        self.learner, self.layout, self.x = learner, layout, x
        self.g = torch.zeros_like(x)
        self.parameters = [p for _, p in trainable(learner)]
        self.buffers: dict[str, Tensor] = {n: b for n, b in learner.named_buffers() if b is not None}
        self._forward_context, self._convert = forward_context, convert
        accepted = inspect.signature(learner.training_step).parameters
        self._takes_index = "batch_idx" in accepted or len(accepted) > 1
        self.logging = False
        self.logged: dict[str, list[Tensor]] = {}
        self._batch_hooks = {
            hook: getattr(learner, hook)
            for hook in ("on_train_batch_start", "on_train_batch_end")
            if getattr(type(learner), hook).__qualname__.split(".")[0] not in ("ModelHooks", "LightningModule")
        }

    @contextmanager
    def tied(self, rest: Tensor) -> Iterator[None]:
        """Within, the learner's parameters are views into x, and its logs are collected; afterwards into ``rest``."""
        tie(self.parameters, self.layout.views(self.x.view(-1)))
        shims = {"log": self._log, "log_dict": self._log_dict}
        before = {name: self.learner.__dict__.get(name) for name in shims}
        for name, shim in shims.items():
            object.__setattr__(self.learner, name, shim)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del self.learner.__dict__[name]
                else:
                    object.__setattr__(self.learner, name, value)
            tie(self.parameters, self.layout.views(rest))
            for module in self.learner.modules():
                if isinstance(module, Metric):
                    module.reset()

    def gradient(self, batch: Any, step: int, log: bool = True) -> Tensor:
        """∇ℓ(x; batch) ``(1, D)``; parameters that got none have 0. The returned storage is reused by the next call."""
        self.logging = log
        batch = self._convert(batch)
        if log and "on_train_batch_start" in self._batch_hooks:
            self._batch_hooks["on_train_batch_start"](batch, step)
        with self._forward_context():
            output = self.learner.training_step(batch, step) if self._takes_index else self.learner.training_step(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{type(self.learner).__name__}.training_step returned {type(output).__name__}; it has to return the "
                "loss, a scalar tensor, or a dict with 'loss'"
            )
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True, materialize_grads=True)
        flatten(gradients, out=self.g.view(-1))
        if log and "on_train_batch_end" in self._batch_hooks:
            self._batch_hooks["on_train_batch_end"](output, batch, step)
        return self.g

    def take_logs(self) -> dict[str, Tensor]:
        """Means over the steps since the last call, float64 scalars."""
        means = {name: torch.stack(values).double().mean() for name, values in self.logged.items()}
        self.logged = {}
        return means

    def load_buffers(self, values: dict[str, Tensor]) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(values[name])

    def _log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self.logging:
            return
        if isinstance(value, Metric):
            value = value._forward_cache if value._forward_cache is not None else value.compute()
        if not isinstance(value, Tensor):
            value = torch.tensor(float(value), device=self.x.device)
        self.logged.setdefault(name, []).append(value.detach().reshape(()))

    def _log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        items = dictionary.items(keep_base=False) if isinstance(dictionary, MetricCollection) else dictionary.items()
        for name, value in items:
            self._log(name, value)


def buffer_values(learner: nn.Module) -> dict[str, Tensor]:
    """Copies of a learner's buffers by name."""
    return {n: b.detach().clone() for n, b in learner.named_buffers() if b is not None}
