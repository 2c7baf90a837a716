"""Callbacks that look at a batch before its step, and may change it: they get the clients', not the round's token."""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable
from typing import Any

from fl_lightning.callback import FederatedCallback
from fl_lightning.engines.client_trainer import View
from fl_lightning.errors import UserError

OWN = ("pytorch_lightning", "lightning", "fl_lightning")  # whose callbacks know what they get
BASES = {"Callback", "LambdaCallback", "FederatedCallback"}  # what others make their own from
START, END = "on_train_batch_start", "on_train_batch_end"
BATCH = {START: 2, END: 3, "on_validation_batch_start": 2}  # which argument it is, behind self
Change = Callable[[Any, Any], Any]


def looks(callback: Any, hook: str) -> bool:
    """Whether a callback has this hook and reads the batch in it.

    Those of Lightning and ours do not count, nor do classes made from one of these, such as a progress bar.
    """
    called = getattr(callback, hook, None)
    made_from = {kind.__name__ for kind in type(callback).__mro__ if kind.__module__.split(".")[0] in OWN}
    if called is None or made_from - BASES:
        return False
    if (getattr(called, "__module__", None) or "").split(".")[0] in OWN:
        return False
    bound = inspect.ismethod(called)
    code = getattr(inspect.unwrap(called.__func__ if bound else called), "__code__", None)
    if code is None:
        return True  # nobody can tell
    place, named = BATCH[hook] + bound, code.co_argcount
    if place < named:
        name = code.co_varnames[place]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[named + code.co_kwonlyargcount]
    else:
        return False
    read = (i.argval for i in dis.get_instructions(code) if "LOAD_FAST" in i.opname)
    return name in code.co_cellvars or any(name in (a if isinstance(a, tuple) else (a,)) for a in read)


def original(callback: Any) -> Any:
    return callback._of if type(callback) is View else callback


def take_over(trainer: Any) -> None:
    """Keep the round's token from callbacks that look at their batch: :func:`changed` calls them with the clients'.

    Raises:
        UserError: a callback looks at a batch where it cannot be had.
    """
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if looks(callback, END):
            raise UserError(
                f"callback {name} looks at the batch in on_train_batch_end, which in a federated run is called once a "
                "round and has no batch of a client's. Look at it in on_train_batch_start, which is called with each "
                "client's batches, or in the learner's own on_train_batch_end."
            )
        if isinstance(callback, FederatedCallback) and looks(callback, START):
            raise UserError(
                f"callback {name} looks at the batch in on_train_batch_start, where a FederatedCallback has none: "
                "override local_batch(client, batch), which gives the batch that the client trains on."
            )
    trainer.callbacks = [View(c, **{START: _nothing}) if looks(c, START) else c for c in trainer.callbacks]


def give_back(trainer: Any) -> None:
    """Undo :func:`take_over`."""
    trainer.callbacks = [original(callback) for callback in trainer.callbacks]


def _nothing() -> Callable[..., None]:
    return lambda *_: None


def looking(trainer: Any, hook: str = START) -> list[Any]:
    """The callbacks that look at their batch in this hook."""
    return [c for c in map(original, trainer.callbacks) if looks(c, hook) and not isinstance(c, FederatedCallback)]


def changed(trainer: Any, hook: str = START) -> Change | None:
    """``(learner, batch) -> batch`` as these callbacks leave it, the one given untouched; None without any."""
    hooks = [getattr(callback, hook) for callback in looking(trainer, hook)]
    if not hooks:
        return None

    def change(learner: Any, batch: Any) -> Any:
        batch, now = copy.deepcopy(batch), learner._trainer or trainer
        for call in hooks:
            call(now, learner, batch, now.fit_loop.batch_idx)
        return batch

    return change
