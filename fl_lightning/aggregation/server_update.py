"""The server's part of a round: the aggregated update, the step, the evaluated model, buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.aggregation import all_updates
from fl_lightning.callback_list import CallbackList, checked_rows
from fl_lightning.errors import Diverged
from fl_lightning.learner.layout import all_finite
from fl_lightning.round import partial_training
from fl_lightning.round.client_sums import Total
from fl_lightning.round.context import Round
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.server import Server
from fl_lightning.round.transaction import RoundTransaction


def aggregated(transaction: RoundTransaction, methods: CallbackList, server: Server) -> Tensor:
    """The aggregated update ``(D,)``.

    Return the weighted mean of the transmitted updates, or the result of a method's ``aggregate``.
    """
    round = transaction.round
    total = transaction.total
    if methods.gathering:
        # `on_updates` may change the gathered updates, so they are summed after it.
        transaction.gathered = all_updates.gather(transaction)
        if transaction.finished:
            methods.run("on_updates", server)
        all_updates.add_up(transaction, transaction.gathered)
    server.update = torch.zeros_like(round.w)
    if transaction.finished:
        server.update = mean_of(total, methods, server, round).to(round.w.dtype)
        # The mean divides by the discounted weights, so a discount that all clients share would
        # cancel. Old updates must shrink the step, so this applies the discount to the mean.
        if transaction.scale != 1:
            server.update *= transaction.scale
    # A method that overrides `aggregate` finds the mean in `server.update`, and may use it.
    aggregate = methods.owner("aggregate")
    if aggregate is None:
        return server.update
    returned = methods.call(aggregate, server, *methods.asked(aggregate, server))
    update = checked_rows(aggregate, returned, round.w)
    # The method may still hold the tensor that it returned (a state, for example), and other
    # methods change the update in place.
    return update.to(round.w.dtype, copy=True)


def mean_of(total: Total, methods: CallbackList, server: Server, round: Round) -> Tensor:
    """Return the weighted mean of the transmitted updates, over the clients that trained a
    coordinate.
    """
    owner = methods.partial_training
    if owner is None or total.holders is None:
        return total.mean(total.weighted, round.wide)
    assert total.weighted is not None and total.weight is not None
    return partial_training.averaged(
        owner.averaged_over, total.weighted, total.holders, total.weight, server.given, round.w
    )


def masked(server: Server) -> Tensor:
    """Return the update with zeros on parts that are not averaged.

    Raises:
        Diverged: it is not finite.
    """
    update = server.update
    if server.averaged is not None:
        update = torch.where(server.averaged, update, 0.0)
    # Masked coordinates may have any value, so only the others have to be finite.
    if not all_finite(update):
        raise Diverged(diverged_text(server.round, "the server's update"))
    return update


class ServerStep:
    """The server optimizer over w, which it changes in place.

    Args:
        optimizer: Lightning's wrapper of it, which counts the step.
        rates: learning rates of its groups before any decay.
        progress: Lightning's count of steps.
    """

    def __init__(self, optimizer: Any, rates: list[float], progress: Any) -> None:
        self.lightning_optimizer = optimizer
        self.rates = rates
        self.progress = progress
        self.optimizer: Optimizer = optimizer.optimizer
        self._set: list[float] | None = None

    def begin(self, factor: float) -> bool:
        """Set this round's learning rates, multiplied by ``factor``.

        Returns:
            Whether something has changed the rates that were set before.
        """
        found = [float(group["lr"]) for group in self.optimizer.param_groups]
        changed = self._set is not None and found != self._set
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self._set = [float(group["lr"]) for group in self.optimizer.param_groups]
        return changed

    def step(self, w: Tensor, update: Tensor, moves: Tensor | None) -> None:
        """Step with gradient ``-update``.

        ``moves`` ``(D,)``: the coordinates at which w and (D,)-shaped state may change; None: all.
        """
        old_w = torch.empty(0)
        old_state: dict[str, Tensor] = {}
        if moves is not None:
            old_w = w.detach().clone()
            for name, value in self._state(w).items():
                if isinstance(value, Tensor):
                    old_state[name] = value.clone()
        # If no coordinate may move, the optimizer gets no gradient, so that it does not count a
        # step.
        w.grad = None if moves is not None and not bool(moves.any()) else update.neg()
        try:
            self.lightning_optimizer.step()
        finally:
            w.grad = None
        if moves is None:
            return
        # An optimizer with momentum moves coordinates whose gradient is 0, so these are restored.
        with torch.no_grad():
            w.copy_(torch.where(moves, w, old_w))
            for name, value in self._state(w).items():
                if isinstance(value, Tensor) and value.shape == w.shape:
                    old = old_state.get(name, torch.zeros_like(value))
                    value.copy_(torch.where(moves, value, old))

    def _state(self, w: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state.get(w, {})
        return state

    def snapshot(self, model: GlobalModel) -> tuple[Tensor, Callable[[], None]]:
        """Copy the values that the step changes in place: w^t, and the optimizer with its step
        count.

        A checkpoint that is saved before the commit also uses these copies.

        Returns:
            The copy of w^t ``(D,)``, and a function that restores w, the evaluated model, the
            buffers, the optimizer and the step count.
        """
        start = model.committed()
        w = start.w.clone()
        state = {p: _copied_values(values) for p, values in self.optimizer.state.items()}
        groups = [_copied_values(group) for group in self.optimizer.param_groups]
        for group in groups:
            del group["params"]
        steps = self.progress.state_dict()  # a copy
        in_checkpoint = {
            "state": dict(enumerate(state.values())),
            "param_groups": [{**group, "params": [0]} for group in groups],
        }
        model.round_start = replace(start, w=w, optimizer=in_checkpoint, steps=steps)

        def undo() -> None:
            model.move_to(w, start.evaluated, start.buffers)
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
            for group, old_group in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(old_group)
            self.progress.load_state_dict(steps)

        return w, undo


def save_round_start(saved: dict[str, Any], model: GlobalModel) -> None:
    """Make a checkpoint that is saved within a round hold the model and optimizer of the
    round's start.
    """
    start = model.round_start
    if start is None:
        return
    evaluated = start.w if start.evaluated is None else start.evaluated
    # WeightAveraging saves its averages under "state_dict", and the present model under a second
    # key. Only the present model changes within a round.
    key = "current_model_state" if "current_model_state" in saved else "state_dict"
    saved[key] = model.export(model=(evaluated, start.buffers)).state_dict()
    if start.optimizer is not None and start.steps is not None and saved.get("optimizer_states"):
        saved["optimizer_states"] = [start.optimizer]
        saved["global_step"] = start.steps["total"]["completed"]
        saved["loops"]["fit_loop"]["epoch_loop.manual_optimization.optim_step_progress"] = (
            start.steps
        )


def _copied_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of an optimizer's state or group; its parameters are not copied."""
    copies: dict[str, Any] = {}
    for name, value in values.items():
        if name == "params":
            copies[name] = value
        else:
            copies[name] = value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    return copies


def evaluated(transaction: RoundTransaction, server: Server) -> Tensor | None:
    """Return the model to evaluate under partial averaging; None: w itself.

    The returned model is w with the clients' mean on the parts that were not averaged. If no client
    finished, such parts keep their last evaluated values.
    """
    round = transaction.round
    # The parts that stay at sites are not in this process, so w is evaluated.
    if round.parts is None or server.averaged is None or transaction.rows_elsewhere:
        return None
    if not server.n:
        return torch.where(round.parts.kept, round.evaluated, server.w.detach())
    # Coordinates that no client trained keep the value of w.
    if bool(server.averaged.all()):
        return None
    mean_change = transaction.total.mean(transaction.total.copies, round.wide)
    mean = server.given + mean_change.to(server.given)
    return torch.where(server.averaged, server.w.detach(), mean)


def averaged_buffers(round: Round, total: Total) -> dict[str, Tensor]:
    """Return new values of the server's buffers to which clients contributed, by name."""
    values = {}
    for name, buffer in round.buffers.items():
        if name in total.buffers:
            change = total.buffers[name]
            mean = total.mean(change, change.dtype)
            values[name] = (buffer.to(change) + mean).to(buffer)
        elif name in total.maxima:
            values[name] = total.maxima[name].to(buffer)
    return values


def diverged_text(t: int, what: str) -> str:
    return (
        f"the run diverged: {what} in round {t} is not finite. If the data are finite, lower the "
        "client learning rate, set clip_norm (10 is common), or leave such clients out with "
        "on_nonfinite='skip'."
    )
