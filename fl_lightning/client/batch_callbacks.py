"""Callbacks of users that act before a batch: they get the clients' batches, not the round's token.

One rule: a callback that is not Lightning's or ours, and has the hook, is called with each client's
batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fl_lightning.introspection.attribute_view import View
from fl_lightning.machine.lightning import OWN, is_foreign

# Users derive their own callbacks from these classes of Lightning and of this package.
BASES = {"Callback", "LambdaCallback"}
START = "on_train_batch_start"
LOGS = ("log", "log_dict")  # names that Lightning lends to callbacks
Change = Callable[[Any, Any], Any]


def gets_batches(callback: Any, hook: str = START) -> bool:
    """Tell whether a callback's hook is called with the clients' batches.

    The callbacks of Lightning and of this package expect the round's token, and so do classes made
    from one of them, such as a progress bar. A FederatedCallback has ``local_batch``.
    """
    kinds = [kind for kind in type(callback).__mro__ if kind.__module__.split(".")[0] in OWN]
    made_from = {kind.__name__ for kind in kinds}
    return made_from <= BASES and is_foreign(getattr(callback, hook, None))


def original(callback: Any) -> Any:
    return callback._of if type(callback) is View else callback


def take_over(trainer: Any) -> None:
    """Keep the round's token from these callbacks: :func:`changed` gives them clients' batches."""
    trainer.callbacks = [
        View(c, None, **{START: lambda: _nothing}) if gets_batches(c) else c
        for c in trainer.callbacks
    ]


def _nothing(*given: Any) -> None:
    """Take the place of a hook."""


def give_back(trainer: Any) -> None:
    """Undo :func:`take_over`."""
    trainer.callbacks = [original(callback) for callback in trainer.callbacks]


def looking(trainer: Any, hook: str = START) -> list[Any]:
    """The callbacks whose hook is called with the clients' batches."""
    return [c for c in map(original, trainer.callbacks) if gets_batches(c, hook)]


def changed(trainer: Any, hook: str = START) -> Change | None:
    """``(learner, batch) -> batch`` as these callbacks leave it; None without any."""
    callbacks = looking(trainer, hook)
    if not callbacks:
        return None

    def change(learner: Any, batch: Any) -> Any:
        # Callbacks change a batch in place, and the data module may return the same batch again.
        batch = copy.deepcopy(batch)
        shown_trainer = learner._trainer or trainer
        for callback in callbacks:
            with logging_for(learner, callback):
                index = shown_trainer.fit_loop.batch_idx
                getattr(callback, hook)(shown_trainer, learner, batch, index)
        return batch

    return change


@contextmanager
def logging_for(learner: Any, callback: Any) -> Iterator[None]:
    """Within, the callback logs for the client, as its learner does."""
    own_logs = {name: vars(callback)[name] for name in LOGS if name in vars(callback)}
    vars(callback).update({name: getattr(learner, name) for name in LOGS})
    try:
        yield
    finally:
        for name in LOGS:
            vars(callback).pop(name, None)
        vars(callback).update(own_logs)
