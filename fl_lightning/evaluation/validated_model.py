"""The model that Lightning validates: a method's evaluated one, or an average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.round.base_weights import declared_bases
from fl_lightning.round.global_model import GlobalModel


def check_averages(trainer: Any, methods: Sequence[Any]) -> None:
    """Refuse averages over rounds beside a method that changes the meaning of w's numbers.

    Raises:
        UserError: it names both.
    """
    for callback, method in product(trainer.callbacks, methods):
        kinds = ("WeightAveraging", "StochasticWeightAveraging")
        if not any(has_base(callback, kind) for kind in kinds):
            continue
        why = ""
        if declared_bases(method):
            why = "changes frozen weights, which the averages do not follow"
        elif method.restarts:
            why = (
                "gives adapters new factors in each round, and a mean of old and new factors has "
                "another product than any of them"
            )
        if why:
            raise UserError(
                f"callback {type(callback).__name__} averages the model over rounds, and "
                f"{type(method).__name__} {why}. Keep one of them."
            )


class Exchange:
    """A WeightAveraging's exchange; ``averages``: whether they are in the learner."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.averages = False

    def __call__(self, module: Any) -> None:
        type(self.callback)._swap_models(self.callback, module)
        self.averages = not self.averages


def follow(trainer: Any) -> None:
    """Know from now on when averages are in the learner; called when a fit has set up callbacks."""
    for callback in filter(averages_weights, trainer.callbacks):
        callback._swap_models = Exchange(callback)


def put_back(trainer: Any, module: Any) -> None:
    """Put the present model into the learner, if an exception in validation left averages there."""
    for callback in filter(averages_weights, trainer.callbacks):
        exchange = exchange_of(callback)
        if exchange is not None and exchange.averages:
            exchange(module)


def exchange_of(callback: Any) -> Exchange | None:
    exchange = vars(callback).get("_swap_models")
    return exchange if isinstance(exchange, Exchange) else None


@contextmanager
def in_learner(trainer: Any, averages: bool) -> Iterator[bool]:
    """Within this context averages are in the learner (False: the present model), as Lightning
    puts them there for a validation; yield whether a callback averages weights.

    Args:
        trainer: Trainer with the run's callbacks, or None.
    """
    module = getattr(trainer, "lightning_module", None)
    callbacks = [] if module is None else list(filter(averages_weights, trainer.callbacks))
    moved = []
    for callback in callbacks:
        exchange = exchange_of(callback)
        if (exchange is not None and exchange.averages) != averages:
            moved.append(callback)
    names = ["on_validation_epoch_start", "on_validation_epoch_end"]
    into, out = names if averages else reversed(names)
    for callback in moved:
        getattr(callback, into)(trainer, module)
    try:
        yield bool(callbacks)
    finally:
        for callback in reversed(moved):
            getattr(callback, out)(trainer, module)


def evaluated(model: GlobalModel, trainer: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the weights ``(D,)`` and buffers that Lightning validates, exports and saves.

    Args:
        trainer: Trainer with the run's callbacks, or None.
    """
    with in_learner(trainer, averages=True) as averages:
        vector = model.evaluated.detach()
        return vector.clone() if averages else vector, model.buffers()


def averaging_notes(callbacks: Sequence[Any]) -> list[str]:
    if not any(has_base(callback, "StochasticWeightAveraging") for callback in callbacks):
        return []
    return [
        "StochasticWeightAveraging puts its average in place after the last round. So what is "
        "validated and measured (val/…, clients/…, global/…, hessian/…) and the checkpoints of "
        "rounds, which test and export read, are of the server's model, and not of the "
        "average. Measure the average after the fit, with trainer.validate(module, data), and "
        "save it, with module.export(path). WeightAveraging's averages are validated and saved"
    ]


def averages_weights(callback: Any) -> bool:
    """Whether a callback is a ``WeightAveraging``, of either Lightning package, with averages."""
    has_averages = getattr(callback, "_average_model", None) is not None
    return has_averages and has_base(callback, "WeightAveraging")


def has_base(callback: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(callback).__mro__)
