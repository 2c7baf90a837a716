"""Fits that stop before their first round and are put back there, for many short runs in turn.

A whole fit takes some five times as long as its rounds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.storage.client_store import ClientStore
from tests.deploy.test_in_memory import trained


class Stopped(Exception):
    """The fit is where it has to stop."""


class Stop(pl.Callback):
    """The last callback of a fit, which ends it before its first round."""

    trainer: Any
    module: Any

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer, self.module = trainer, pl_module
        raise Stopped


class HeldFit:
    """A fit of two rounds with these callbacks, before the first of them.

    ``trainer``, ``module``, ``loop``: its Trainer, module, and loop of rounds.
    """

    def __init__(self, callbacks: Sequence[Any], **options: Any) -> None:
        stop = Stop()
        with suppress(Stopped):
            trained([*callbacks, stop], 2, [], **options)
        self.trainer, self.module = stop.trainer, stop.module
        self.loop = self.module.run.loop
        self.callbacks = list(self.trainer.callbacks)
        self.put_back = self.put_back_to()

    def put_back_to(self) -> Callable[[], None]:
        """Return a function that puts the fit back to the present place, without clients' rows."""
        run, model = self.module.run, self.loop.model
        objects = [run, self.loop, self.loop.state, self.loop.cohort, self.module.logged]
        kept = [(each, _copied(vars(each))) for each in [*objects, *run.methods.callbacks]]
        start = model.copied([])

        def put_back() -> None:
            for each, values in kept:
                vars(each).clear()
                vars(each).update(_copied(values))
            self.loop.state.rows = ClientRows(ClientStore())
            model.put_back(start)
            self.trainer.callbacks = [*self.callbacks]
            self.trainer.callback_metrics.clear()

        return put_back


def _copied(values: dict[str, Any]) -> dict[str, Any]:
    """Return attributes of an object: its collections and tensors are copied, and the rest not."""
    found = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            value = value.detach().clone()
        elif type(value) in (list, dict, set):
            value = copy.copy(value)
        found[name] = value
    return found
