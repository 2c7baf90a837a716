"""The model that Lightning validates: the one that a method evaluates, or averages of
WeightAveraging.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.round.base_weights import declared_bases
from fl_lightning.round.global_model import GlobalModel


def check_averages(trainer: Any, methods: Sequence[Any]) -> None:
    """Refuse averages over rounds beside a method after whose rounds numbers of w mean something
    else.

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
    """A WeightAveraging's exchange of model and averages, which knows what is in the learner.

    ``averages``: whether the averages are in the learner; ``kept``: the averages of a fit that has
    not ended, else None; ``anew``: whether this fit has begun new ones; ``last``: parameters and
    buffers of the present model when training ended, for later checkpoints.
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        self.averages = False
        self.kept: Any = None
        self.anew = True
        self.last: list[Tensor] = []

    def __call__(self, module: Any) -> None:
        type(self.callback)._swap_models(self.callback, module)
        self.averages = not self.averages

    def end(self, module: Any) -> None:
        """Make the averages the model, as Lightning does when training ends."""
        self.last = copies_of(module)
        type(self.callback)._copy_average_to_current(self.callback, module)

    @contextmanager
    def at_last(self, module: Any) -> Iterator[bool]:
        """Within this context the learner has the present model of the last round; yield whether
        it has.

        It has not before training ends, and not after other code has changed the weights.
        """
        averages = self.callback._average_model.module.parameters()
        pairs = zip(module.parameters(), averages, strict=True)
        if not self.last or not all(torch.equal(own, value.to(own)) for own, value in pairs):
            yield False
            return
        ended = copies_of(module)
        put_in(module, self.last)
        try:
            yield True
        finally:
            put_in(module, ended)


def copies_of(module: Any) -> list[Tensor]:
    """Return copies of a module's parameters and buffers."""
    return [value.detach().clone() for value in chain(module.parameters(), module.buffers())]


def put_in(module: Any, copies: list[Tensor]) -> None:
    """Set what :func:`copies_of` returned."""
    for own, value in zip(chain(module.parameters(), module.buffers()), copies, strict=True):
        own.data.copy_(value)


def follow(trainer: Any, continues: bool) -> None:
    """Know from now on when averages are in the learner; called when a fit has set up callbacks.

    ``continues``: another fit of the same run, which goes on with the averages of a fit that an
    exception ended. Lightning's callback itself would begin new ones.
    """
    for callback in filter(averages_weights, trainer.callbacks):
        exchange = exchange_of(callback)
        if exchange is None:
            callback._swap_models = exchange = Exchange(callback)
            callback._copy_average_to_current = exchange.end
        exchange.last = []
        exchange.anew = not continues or exchange.kept is None
        if not exchange.anew:
            callback._average_model = exchange.kept
        exchange.kept = callback._average_model


def put_back(trainer: Any, module: Any) -> None:
    """Put the present model into the learner, if an exception in validation left averages there."""
    for callback in filter(averages_weights, trainer.callbacks):
        exchange = exchange_of(callback)
        if exchange is not None and exchange.averages:
            exchange(module)


def end(trainer: Any) -> None:
    """Forget the averages of a fit that has ended: the callback has made them the model."""
    for callback in filter(averages_weights, trainer.callbacks):
        if exchange := exchange_of(callback):
            exchange.kept = None


def exchange_of(callback: Any) -> Exchange | None:
    """Return the exchange of a callback that is followed."""
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


@contextmanager
def saving(trainer: Any, saved: dict[str, Any]) -> Iterator[None]:
    """Within this context a checkpoint is written of the present model, also in a validation.

    WeightAveraging calls what is in the learner the present model, and its own copy the averages.
    In a validation it is the other way round. After training both are the averages, and the
    checkpoint gets the last present model, from which a resume goes on.
    """
    module = trainer.lightning_module
    found = map(exchange_of, filter(averages_weights, trainer.callbacks))
    exchanges = [exchange for exchange in found if exchange is not None]
    exchanged = any(exchange.averages for exchange in exchanges)
    if exchanged and "current_model_state" in saved:
        present = saved["state_dict"]
        saved["state_dict"] = saved["current_model_state"]
        saved["current_model_state"] = present
    with ExitStack() as stack:
        for exchange in exchanges:
            if stack.enter_context(exchange.at_last(module)) and "current_model_state" in saved:
                saved["current_model_state"] = deepcopy(module.state_dict())
        stack.enter_context(in_learner(trainer, averages=False))
        yield


def evaluated(model: GlobalModel, trainer: Any) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the weights ``(D,)`` and buffers that Lightning validates, exports and saves in a
    checkpoint.

    Args:
        trainer: Trainer with the run's callbacks, or None.
    """
    with in_learner(trainer, averages=True) as averages:
        vector = model.evaluated.detach()
        return vector.clone() if averages else vector, model.buffers()


def averaging_notes(callbacks: Sequence[Any], again: bool) -> list[str]:
    """Return the notes about Lightning's callbacks that average weights.

    ``again``: this is another fit by the same Trainer, for which such a callback begins anew,
    unless an exception ended the fit before.
    """
    notes = []
    stochastic = [c for c in callbacks if has_base(c, "StochasticWeightAveraging")]
    if stochastic:
        notes.append(
            "StochasticWeightAveraging puts its average in place after the last round. So what is "
            "validated and measured (val/…, clients/…, global/…, hessian/…) and the checkpoints of "
            "rounds, which test and export read, are of the server's model, and not of the "
            "average. Measure the average after the fit, with trainer.validate(module, data), and "
            "save it, with module.export(path). WeightAveraging's averages are validated and saved"
        )
    for callback in callbacks if again else ():
        exchange = exchange_of(callback)
        if callback in stochastic or (exchange is not None and exchange.anew):
            notes.append(
                f"{type(callback).__name__} begins its averages anew in another fit by the same "
                "Trainer. To go on with them, resume from a checkpoint with a new Trainer"
            )
    return notes


def averages_weights(callback: Any) -> bool:
    """Return whether a callback is a ``WeightAveraging``, of either Lightning package, with
    averages.
    """
    has_averages = getattr(callback, "_average_model", None) is not None
    return has_averages and has_base(callback, "WeightAveraging")


def has_base(callback: Any, name: str) -> bool:
    """Return whether a callback has a class of this name, of either Lightning package."""
    return any(kind.__name__ == name for kind in type(callback).__mro__)
