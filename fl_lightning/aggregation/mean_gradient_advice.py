"""When ``clients.mean_gradient`` is not the mean of a client's gradients, and what to do then."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fl_lightning.callback_list import CallbackList
from fl_lightning.round.context import ClientRates
from fl_lightning.round.transaction import RoundTransaction


def warn_of_mean_gradient(
    transaction: RoundTransaction,
    rates: ClientRates,
    methods: CallbackList,
    clip_norm: float | None,
    note: Callable[[str], None],
) -> None:
    """Say it if a method read ``clients.mean_gradient`` and it is not the mean of the gradients."""
    readers = sorted(transaction.mean_gradient_readers)
    direction = _owner_of("precondition", methods)
    if direction:
        # Its owner adds the mean of directions to directions.
        readers = [name for name in readers if name != _owner_of("on_direction", methods)]
    if not readers:
        return
    takes = "take" if readers[1:] else "takes"
    reading = (
        f"{' and '.join(readers)} {takes} a client's displacement / (Σ η) for the mean gradient "
        "of its steps"
    )
    if rates.optimizer == "SGD" and rates.momentum:
        note(
            f"{reading}; with momentum={rates.momentum:g} it is up to "
            f"{1 / (1 - rates.momentum):.3g} times that"
        )
    elif direction or not rates.plain_sgd:
        note(
            f"{reading}; a step of {direction or rates.optimizer} is not its gradient times the "
            "learning rate, so the method's state has another scale than the gradients to which "
            f"it is added. The method is made for SGD{_other_estimate(readers, methods)}"
        )
    # A limit on gradients does not limit a direction that is computed from them.
    if float(transaction.total.logs.get("clipped_steps", 0)) > 0 and not direction:
        note(f"{reading}; clipping is active (clip_norm={clip_norm:g}), so it is less than that")


def _owner_of(hook: str, methods: CallbackList) -> str:
    """Return the name of the class that owns a hook; empty if no callback has the hook."""
    return methods.name_of_owner(hook) if methods.owner(hook) else ""


def _other_estimate(readers: Sequence[str], methods: CallbackList) -> str:
    """Return how one of these methods takes gradients in place of displacements, as a clause;
    empty: none can.
    """
    for callback in methods.callbacks:
        name = type(callback).__name__
        if name in readers and getattr(callback, "estimate", "") == "displacement":
            return f". {name}(estimate='gradient') takes the gradient itself"
    return ""
