"""Callbacks that look at a batch before its step, and may change it: they get the clients', not the
round's token.
"""

from __future__ import annotations

import ast
import copy
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fl_lightning.callback import FederatedCallback
from fl_lightning.engines.client_trainer import View
from fl_lightning.errors import UserError

OWN = ("pytorch_lightning", "lightning", "fl_lightning")  # whose callbacks know what they get
BASES = {"Callback", "LambdaCallback", "FederatedCallback"}  # what others make their own from
START = "on_train_batch_start"
END = "on_train_batch_end"
BATCH = {START: 2, END: 3, "on_validation_batch_start": 2}  # which argument it is, behind self
LOGS = ("log", "log_dict")  # which Lightning lends to callbacks
Change = Callable[[Any, Any], Any]


def looks(callback: Any, hook: str) -> bool:
    """Whether a callback has this hook and reads the batch in it, past giving it to the hook of its
    base class.

    Those of Lightning and ours do not count, nor do classes made from one of these, such as a
    progress bar.
    """
    called = getattr(callback, hook, None)
    made_from = {
        kind.__name__ for kind in type(callback).__mro__ if kind.__module__.split(".")[0] in OWN
    }
    if called is None or made_from - BASES:
        return False
    of_object = vars(callback).get(hook)
    of_classes = (vars(kind).get(hook) for kind in type(callback).__mro__)
    for called in (of_object, *of_classes):
        if called is not None:
            bound = called is not of_object or inspect.ismethod(called)
            read, passed_on = reads(getattr(called, "__func__", called), BATCH[hook] + bound, hook)
            if not passed_on:
                return read
    return False


def reads(called: Any, place: int, hook: str) -> tuple[bool, bool]:
    """Whether a function reads its argument at ``place``, and whether it only gives it to
    ``super().hook``.
    """
    if (getattr(called, "__module__", None) or "").split(".")[0] in OWN:
        return False, False
    function = inspect.unwrap(called)
    code = getattr(function, "__code__", None)
    if code is None:
        return True, False  # nobody can tell
    named = code.co_argcount
    if place < named:
        name = code.co_varnames[place]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[named + code.co_kwonlyargcount]
    else:
        return False, False
    loaded = (i.argval for i in dis.get_instructions(code) if "LOAD_FAST" in i.opname)
    if name not in code.co_cellvars and not any(
        name in (a if isinstance(a, tuple) else (a,)) for a in loaded
    ):
        return False, False
    return True, only_passed_on(function, name, hook)


def only_passed_on(function: Any, name: str, hook: str) -> bool:
    try:
        nodes: list[Any] = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    except (OSError, TypeError, SyntaxError):  # no source
        return False
    given = [
        each for node in nodes if calls_super(node, hook) for each in (*node.args, *node.keywords)
    ]
    names = [getattr(each, "value", each) for each in given]  # of *args and keywords
    own = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return all(any(node is each for each in names) for node in own)


def calls_super(node: Any, hook: str) -> bool:
    """Whether it is a call of ``super().hook(…)``."""
    method = node.func if isinstance(node, ast.Call) else None
    if isinstance(method, ast.Attribute) and method.attr == hook:
        base = method.value
    else:
        base = None
    return (
        isinstance(base, ast.Call) and isinstance(base.func, ast.Name) and base.func.id == "super"
    )


def original(callback: Any) -> Any:
    return callback._of if type(callback) is View else callback


def take_over(trainer: Any) -> None:
    """Keep the round's token from callbacks that look at their batch: :func:`changed` calls them
    with the clients'.

    Raises:
        UserError: a callback looks at a batch where it cannot be had.
    """
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if looks(callback, END):
            raise UserError(
                f"callback {name} looks at the batch in on_train_batch_end, which in a federated "
                "run is called once a round and has no batch of a client's. Look at it in "
                "on_train_batch_start, which is called with each client's batches, or in the "
                "learner's own on_train_batch_end."
            )
        if isinstance(callback, FederatedCallback) and looks(callback, START):
            raise UserError(
                f"callback {name} looks at the batch in on_train_batch_start, where a "
                "FederatedCallback has none: override local_batch(client, batch), which gives "
                "the batch that the client trains on."
            )
    trainer.callbacks = [
        View(c, **{START: partial(elsewhere, c)}) if looks(c, START) else c
        for c in trainer.callbacks
    ]


def give_back(trainer: Any) -> None:
    """Undo :func:`take_over`."""
    trainer.callbacks = [original(callback) for callback in trainer.callbacks]


def elsewhere(callback: Any) -> Callable[..., None]:
    """The hook where the Trainer goes on to train something else, after a fit that ended with an
    exception.
    """

    def called(trainer: Any, pl_module: Any, *rest: Any) -> None:
        if not hasattr(pl_module, "global_model"):
            getattr(callback, START)(trainer, pl_module, *rest)

    return called


def looking(trainer: Any, hook: str = START) -> list[Any]:
    """The callbacks that look at their batch in this hook."""
    return [
        c
        for c in map(original, trainer.callbacks)
        if looks(c, hook) and not isinstance(c, FederatedCallback)
    ]


def changed(trainer: Any, hook: str = START) -> Change | None:
    """``(learner, batch) -> batch`` as these callbacks leave it, the one given untouched; None
    without any.
    """
    callbacks = looking(trainer, hook)
    if not callbacks:
        return None

    def change(learner: Any, batch: Any) -> Any:
        batch = copy.deepcopy(batch)
        now = learner._trainer or trainer
        for callback in callbacks:
            with logging_for(learner, callback):
                getattr(callback, hook)(now, learner, batch, now.fit_loop.batch_idx)
        return batch

    return change


@contextmanager
def logging_for(learner: Any, callback: Any) -> Iterator[None]:
    """Within, what the callback logs is the client's, as what its learner logs."""
    before = {name: vars(callback)[name] for name in LOGS if name in vars(callback)}
    vars(callback).update({name: getattr(learner, name) for name in LOGS})
    try:
        yield
    finally:
        for name in LOGS:
            vars(callback).pop(name, None)
        vars(callback).update(before)
