"""The learner's own hooks, run as if it were alone, on the global model."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.data import extract_batch_size
from torchmetrics import Metric

from fl_lightning.learner import lightning_modules
from fl_lightning.round.global_model import GlobalModel

HOOKS = [
    "on_fit_end",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_start",
    "on_test_end",
    "on_test_epoch_start",
    "on_test_epoch_end",
    "on_test_batch_start",
    "on_test_batch_end",
    "on_predict_start",
    "on_predict_end",
    "on_predict_epoch_start",
    "on_predict_epoch_end",
    "on_predict_batch_start",
    "on_predict_batch_end",
]
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STEPS = ("validation_step", "test_step", "predict_step")


class LearnerHooks(pl.LightningModule):
    """Base of FederatedModule: every hook of :data:`HOOKS` and :data:`STEPS` goes to ``self.learner``."""

    learner: Any
    model: GlobalModel
    _evaluated_batch_size: int = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.learner(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The learner's own, under its own names."""
        return self.learner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        strict = strict and self.learner.strict_loading
        return self.learner.load_state_dict(state_dict, strict=strict)

    def adopt(self, learner: Any) -> None:
        """Hide steps that the learner does not have, so that Lightning skips their loops; take its transfer hooks."""
        base: Any = next(c for c in reversed(type(learner).__mro__) if c.__name__ == "LightningModule")
        for step in STEPS[:2]:
            if getattr(type(learner), step) is getattr(base, step):
                object.__setattr__(self, step, types.MethodType(getattr(pl.LightningModule, step), self))
        self.transfers = [hook for hook in TRANSFER if getattr(type(learner), hook) is not getattr(base, hook)]
        for hook in self.transfers:
            object.__setattr__(self, hook, self._in_evaluation(getattr(learner, hook)))

    def _in_evaluation(self, transfer: Callable[..., Any]) -> Callable[..., Any]:
        """The learner's hook, for its own batches: Lightning's batch in training is the round's token."""

        def hook(batch: Any, *args: Any) -> Any:
            return batch if self.trainer.training else transfer(batch, *args)

        return hook

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle keeps: the learner is the model's copy, hooks are taken from it anew."""
        kept = {**super().__getstate__(), "_modules": {k: v for k, v in self._modules.items() if k != "learner"}}
        return {name: value for name, value in kept.items() if name not in (*STEPS, *TRANSFER)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch has no types for it
        self.learner = self.model.learner
        self.adopt(self.learner)

    def connect_learner(self) -> None:
        """Give the learner and LightningModules in it this run's trainer; what they log in evaluation arrives here."""
        world = self.trainer.world_size

        def over_processes(kwargs: dict[str, Any]) -> dict[str, Any]:
            # Lightning divides the number of samples by W in integers: W times as many come out exact
            size = kwargs.get("batch_size") or self._evaluated_batch_size
            return kwargs if world == 1 else {**kwargs, "sync_dist": True, "batch_size": size * world}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            self.log(name, value, *args, **(kwargs if isinstance(value, Metric) else over_processes(kwargs)))

        def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
            self.log_dict(dictionary, *args, **over_processes(kwargs))

        for part in lightning_modules(self.learner):
            part._trainer = self._trainer
            object.__setattr__(part, "log", log)
            object.__setattr__(part, "log_dict", log_dict)

    def release_learner(self) -> None:
        """Undo :meth:`connect_learner`."""
        for part in lightning_modules(self.learner):
            part._trainer = None
            for name in ("log", "log_dict"):
                part.__dict__.pop(name, None)


def _forwarded(name: str) -> Callable[..., Any]:
    def hook(self: LearnerHooks, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.learner, name)(*args, **kwargs)

    hook.__name__ = name
    return hook


def _step(name: str) -> Callable[..., Any]:
    def step(self: LearnerHooks, *args: Any) -> Any:
        own = getattr(self.learner, name)
        code = own.__code__
        variadic = bool(code.co_flags & 0x04)
        if self.trainer.world_size > 1:
            self._evaluated_batch_size = extract_batch_size(args[0])
        return own(*(args if variadic else args[: code.co_argcount - 1]))

    step.__name__ = name
    return step


for _name in HOOKS:
    setattr(LearnerHooks, _name, _forwarded(_name))
for _name in STEPS:
    setattr(LearnerHooks, _name, _step(_name))
