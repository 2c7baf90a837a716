"""The parameters of a method's hooks, by which it also asks for values that cost something."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from fl_lightning.errors import UserError

# Values of clients and server that cost something, each with the class attribute by which a method
# asks for it.
ASKED_BY = {"loss": "reads_loss", "updates": "gathers", "evaluated": "reads_evaluated"}
# Hooks that a method may define with one more parameter, each with its name. By that parameter a
# method asks for the value. The decorator `may_take` fills it.
MAY_TAKE: dict[str, str] = {}
Result = TypeVar("Result")


def may_take(value: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Mark a hook of the base class that methods may define with one more parameter."""

    def marked(hook: Callable[..., Result]) -> Callable[..., Result]:
        MAY_TAKE[hook.__name__] = value
        return hook

    return marked


def takes(hook: Callable[..., Any], value: str) -> bool:
    """Return whether a method's hook has a parameter of this name."""
    try:
        return value in inspect.signature(hook).parameters
    except (TypeError, ValueError):  # for example a function that is written in C
        return False


def asks_for(callback: Any, value: str) -> bool:
    """Return whether a callback asks for a value, by a hook's parameter or a class attribute.

    For the updates, the hook ``on_updates`` says it, too.
    """
    if getattr(callback, ASKED_BY[value]) or (value == "updates" and callback.has("on_updates")):
        return True
    hooks = [hook for hook, name in MAY_TAKE.items() if name == value and callback.has(hook)]
    return any(takes(getattr(callback, hook), value) for hook in hooks)


def unasked(callback: Any, value: str, hook: Callable[..., Any]) -> UserError:
    """Return the error of a callback whose hook reads a value for which it does not ask.

    It shows the line to write.
    """
    name = type(callback).__name__
    called = getattr(hook, "__name__", "")
    line = f"{ASKED_BY[value]} = True in the class {name}"
    for taking in (each for each, more in MAY_TAKE.items() if more == value):
        if getattr(callback, taking) == hook:
            given = ", ".join(["self", *inspect.signature(hook).parameters, value])
            line = f"def {called}({given}), or {line}"
    subject = "server" if value == "updates" else "clients"
    return UserError(
        f"method: {name} reads {subject}.{value} in {called}, but the run has it only for methods "
        f"that ask for it, because it costs memory, time or messages. Write {line}."
    )


def refuse_other_arguments(callback: Any, base: type, names: Iterable[str]) -> None:
    """Refuse a hook that does not take the arguments with which it is called.

    ``base`` has these hooks with their arguments.

    Raises:
        UserError: it shows the arguments of both.
    """
    for name in filter(callback.has, names):
        hook = getattr(callback, name)
        expected = list(inspect.signature(getattr(base, name)).parameters)
        more = MAY_TAKE.get(name)
        longer = [*expected, more] if more else expected
        given = longer if more and takes(hook, more) else expected
        if wrong := misfit(hook, given[1:]):
            calls = f"{name}({', '.join(expected)})"
            if more:
                calls += f" or {name}({', '.join(longer)})"
            raise UserError(
                f"method: {type(callback).__name__} defines {name}({wrong}), but the run calls "
                f"{calls}. Give the hook these arguments, in this order."
            )


def misfit(hook: Callable[..., Any], given: list[str]) -> str:
    """Return a bound hook's parameters if it cannot be called with arguments of these names, in
    this order; empty if it can.

    >>> class Own:
    ...     def on_end(self, gradient, clients): ...
    >>> misfit(Own().on_end, ["clients", "gradient"])
    'self, gradient, clients'
    """
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # for example a function that is written in C
        return ""
    names = list(signature.parameters)
    try:
        signature.bind(*given)
        if names == given or set(names) != set(given):
            return ""
    except TypeError:
        pass
    taken = [str(p.replace(annotation=p.empty)) for p in signature.parameters.values()]
    return ", ".join(["self", *taken])
