"""The learner's own hooks, called on the global model as in plain Lightning."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from itertools import product
from typing import Any

from torchmetrics import Metric

from fl_lightning.learner.modules import SHIMS, TRANSFER, lightning_modules, overrides
from fl_lightning.learner.parameters import load_state
from fl_lightning.machine.lightning import extract_batch_size, pl
from fl_lightning.metrics import Logged

_AROUND = ("epoch_start", "epoch_end", "batch_start", "batch_end", "model_eval")
HOOKS = [
    *("on_fit_end", "on_train_epoch_end", "on_validation_model_zero_grad"),
    *map("on_{0[0]}_{0[1]}".format, product(("test", "predict"), ("start", "end"))),
    *map("on_{0[0]}_{0[1]}".format, product(("validation", "test", "predict"), _AROUND)),
]
# Lightning behaves differently if a module overrides one of these hooks, so forward a hook only if
# the learner overrides it.
WHERE_OVERRIDDEN = [
    "on_validation_model_train",
    "on_test_model_train",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
]
STEPS = ("validation_step", "test_step", "predict_step")


class LearnerHooks(pl.LightningModule):
    """Base class of FederatedModule, which forwards :data:`HOOKS` and :data:`STEPS`."""

    learner: Any
    logged: Logged  # records the metrics that the learner logs
    _evaluated_batch_size: int = 1

    def __getattr__(self, name: str) -> Any:
        """Return the learner's attribute, if a callback reads one that this module lacks."""
        # Private names are not forwarded: code that reads one wants it from this module, and not
        # from the learner.
        try:
            return super().__getattr__(name)
        except AttributeError:
            learner = self.__dict__.get("_modules", {}).get("learner")
            if learner is None or name.startswith("_") or not hasattr(learner, name):
                raise
            return getattr(learner, name)

    @property
    def hparams(self) -> Any:
        return self.learner.hparams

    @property
    def hparams_initial(self) -> Any:
        return self.learner.hparams_initial

    @property
    def example_input_array(self) -> Any:
        return self.learner.example_input_array

    @example_input_array.setter
    def example_input_array(self, example: Any) -> None:
        self.learner.example_input_array = example

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.learner(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.learner.state_dict(*args, **kwargs)

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        self.logged.note(name, value, args[0] if args else kwargs.get("prog_bar"))
        super().log(name, value, *args, **kwargs)

    def prepare_data(self) -> None:
        if overrides(self.learner, "prepare_data"):
            self.connect_learner()
            self.learner.prepare_data()

    def configure_model(self) -> None:
        self.learner.configure_model()
        # The learner's setup may have registered hooks.
        self.adopt(self.learner)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        strict = strict and self.learner.strict_loading
        return load_state(self.learner, state_dict, strict, "ckpt_path")

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Load within another module, as WeightAveraging's model, by the learner's names."""
        for name in [name for name in state_dict if name.startswith(prefix)]:
            state_dict[f"{prefix}learner.{name[len(prefix) :]}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def adopt(self, learner: Any) -> None:
        """Show Lightning exactly the steps and hooks that the learner has."""
        self.learner = learner
        # If the learner lacks a step, use Lightning's own, so that Lightning skips its loop.
        for step in STEPS[:2]:
            if not overrides(learner, step):
                self._put(step, getattr(pl.LightningModule, step))
        for hook in TRANSFER:
            if overrides(learner, hook):
                self._put(hook, _transfer(hook))
        for hook in WHERE_OVERRIDDEN:
            if overrides(learner, hook):
                self._put(hook, _forwarded(hook))
        self.prepare_data_per_node = getattr(learner, "prepare_data_per_node", True)

    def _put(self, name: str, function: Callable[..., Any]) -> None:
        object.__setattr__(self, name, types.MethodType(function, self))

    def connect_learner(self) -> None:
        """Give this run's trainer to the learner's LightningModules, and collect their logs."""
        world = self.trainer.world_size

        def over_processes(kwargs: dict[str, Any]) -> dict[str, Any]:
            # Lightning divides the number of samples by the number of processes W as integers. W
            # times the number divides exactly.
            size = kwargs.get("batch_size") or self._evaluated_batch_size
            if world == 1:
                return kwargs
            return {**kwargs, "sync_dist": True, "batch_size": size * world}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            # A metric synchronises its states over processes itself.
            if not isinstance(value, Metric):
                kwargs = over_processes(kwargs)
            self.log(name, value, *args, **kwargs)

        def log_dict(dictionary: Any, *args: Any, **kwargs: Any) -> None:
            self.log_dict(dictionary, *args, **over_processes(kwargs))

        # FederatedModule knows the optimizer and the scheduler.
        def optimizers(use_pl_optimizer: bool = True) -> Any:
            return self.clients_optimizer()

        def lr_schedulers() -> Any:
            return self.clients_scheduler()

        for part in lightning_modules(self.learner):
            part._trainer = self._trainer
            for name, shim in zip(SHIMS, (log, log_dict, optimizers, lr_schedulers), strict=True):
                object.__setattr__(part, name, shim)

    def release_learner(self) -> None:
        for part in lightning_modules(self.learner):
            part._trainer = None
            for name in SHIMS:
                part.__dict__.pop(name, None)


def _forwarded(name: str) -> Callable[..., Any]:
    def hook(self: LearnerHooks, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.learner, name)(*args, **kwargs)

    hook.__name__ = name
    return hook


def _transfer(name: str) -> Callable[..., Any]:
    """Return a hook that passes batches to the learner's hook, but not the round's token."""

    def hook(self: LearnerHooks, batch: Any, *args: Any) -> Any:
        # In training, Lightning's batch is the round's token, which a learner does not expect.
        if self.trainer.training:
            return batch
        return getattr(self.learner, name)(batch, *args)

    hook.__name__ = name
    return hook


def _step(name: str) -> Callable[..., Any]:
    def step(self: LearnerHooks, *args: Any) -> Any:
        of_learner = getattr(self.learner, name)
        if self.trainer.world_size > 1:
            self._evaluated_batch_size = extract_batch_size(args[0])
        # Lightning passes as many arguments as a step accepts, and this one accepts all.
        code = of_learner.__code__
        if not code.co_flags & inspect.CO_VARARGS:
            args = args[: code.co_argcount - 1]
        return of_learner(*args)

    step.__name__ = name
    return step


for _name in HOOKS:
    setattr(LearnerHooks, _name, _forwarded(_name))
for _name in STEPS:
    setattr(LearnerHooks, _name, _step(_name))
