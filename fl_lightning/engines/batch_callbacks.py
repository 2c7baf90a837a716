"""Callbacks that look at a batch before its step get the clients' ones, not the round's token."""

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

# packages whose callbacks expect the round's token as the batch
OWN = ("pytorch_lightning", "lightning", "fl_lightning")
# Others derive their own from these.
BASES = {"Callback", "Given", "Resting", "LambdaCallback", "FederatedCallback"}
START = "on_train_batch_start"
END = "on_train_batch_end"
# position of the batch among the hook's arguments, after self
BATCH = {START: 2, END: 3, "on_validation_batch_start": 2}
LOGS = ("log", "log_dict")  # names that Lightning lends to callbacks
Change = Callable[[Any, Any], Any]


def looks(callback: Any, hook: str) -> bool:
    """Tell whether a callback reads the batch in this hook.

    Giving it to the hook of the base class is no reading. Lightning's callbacks and ours do not
    count, nor do classes made from one of these, such as a progress bar.
    """
    made_from = {
        kind.__name__ for kind in type(callback).__mro__ if kind.__module__.split(".")[0] in OWN
    }
    if getattr(callback, hook, None) is None or made_from - BASES:
        return False
    # Follow the classes down, as long as each only passes the batch on to the next.
    of_object = vars(callback).get(hook)
    of_classes = (vars(kind).get(hook) for kind in type(callback).__mro__)
    for function in (of_object, *of_classes):
        if function is not None:
            bound = function is not of_object or inspect.ismethod(function)
            place = BATCH[hook] + bound
            read, passed_on = reads(getattr(function, "__func__", function), place, hook)
            if not passed_on:
                return read
    return False


def reads(called: Any, place: int, hook: str) -> tuple[bool, bool]:
    """Tell of a function's argument at ``place`` whether it is read, and whether only passed on.

    It is passed on where it is given to ``super().hook`` and to nothing else.
    """
    if (getattr(called, "__module__", None) or "").split(".")[0] in OWN:
        return False, False
    function = inspect.unwrap(called)
    code = getattr(function, "__code__", None)
    # A function without bytecode cannot be read, so assume that it reads batches.
    if code is None:
        return True, False
    positional = code.co_argcount
    if place < positional:
        name = code.co_varnames[place]
    elif code.co_flags & inspect.CO_VARARGS:
        name = code.co_varnames[positional + code.co_kwonlyargcount]
    else:
        return False, False
    if name not in code.co_cellvars and name not in loaded_names(code):
        return False, False
    return True, only_passed_on(function, name, hook)


def loaded_names(code: Any) -> set[str]:
    """The local variables that bytecode loads; one instruction may load two of them."""
    names: set[str] = set()
    for instruction in dis.get_instructions(code):
        if "LOAD_FAST" in instruction.opname:
            variables = instruction.argval
            names.update(variables if isinstance(variables, tuple) else (variables,))
    return names


def only_passed_on(function: Any, name: str, hook: str) -> bool:
    """Tell by its source whether a function only passes this argument to ``super().hook``."""
    try:
        nodes: list[Any] = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    except (OSError, TypeError, SyntaxError):  # no source
        return False
    passed_on: set[int] = set()
    for node in nodes:
        if calls_super(node, hook):
            for argument in (*node.args, *node.keywords):
                passed_on.add(id(getattr(argument, "value", argument)))  # of *args and keywords
    reading = [node for node in nodes if isinstance(node, ast.Name) and node.id == name]
    return all(id(node) in passed_on for node in reading)


def calls_super(node: Any, hook: str) -> bool:
    """Tell whether this is a call of ``super().hook(…)``."""
    if not isinstance(node, ast.Call):
        return False
    method = node.func
    if not isinstance(method, ast.Attribute) or method.attr != hook:
        return False
    base = method.value
    if not isinstance(base, ast.Call) or not isinstance(base.func, ast.Name):
        return False
    return base.func.id == "super"


def original(callback: Any) -> Any:
    return callback._of if type(callback) is View else callback


def take_over(trainer: Any) -> None:
    """Keep the round's token from callbacks that look at their batch.

    :func:`changed` calls them with the clients' batches.

    Raises:
        UserError: a callback looks at a batch where it cannot be had.
    """
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if looks(callback, END):
            raise UserError(
                f"callback {name} reads the batch in on_train_batch_end. In a federated run this "
                "hook is called once per round, without a client's batch. Read the batch in "
                "on_train_batch_start, which gets each client's batches, or in the "
                "learner's own on_train_batch_end."
            )
        if isinstance(callback, FederatedCallback) and looks(callback, START):
            raise UserError(
                f"callback {name} reads the batch in on_train_batch_start, but a FederatedCallback "
                "gets no batch there. Override local_batch(client, batch), which returns the batch "
                "that the client trains on."
            )
    trainer.callbacks = [
        View(c, **{START: partial(elsewhere, c)}) if looks(c, START) else c
        for c in trainer.callbacks
    ]


def give_back(trainer: Any) -> None:
    """Undo :func:`take_over`."""
    trainer.callbacks = [original(callback) for callback in trainer.callbacks]


def elsewhere(callback: Any) -> Callable[..., None]:
    """The hook in a federated run, where it does nothing, and elsewhere.

    After a fit that ended with an exception the Trainer may go on to train something else.
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
