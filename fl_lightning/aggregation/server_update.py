"""The server's part of a round: the aggregated update, the step, the evaluated model, buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.aggregation.over_processes import TreeSum, visiting_order
from fl_lightning.callback_list import CallbackList, checked_rows
from fl_lightning.errors import Diverged
from fl_lightning.learner.layout import all_finite
from fl_lightning.machine.processes import world_size
from fl_lightning.round.client_sums import Total
from fl_lightning.round.context import Round
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.round.server import Server
from fl_lightning.round.transaction import RoundTransaction


def aggregated(transaction: RoundTransaction, methods: CallbackList, server: Server) -> Tensor:
    """The weighted mean ``(D,)`` of transmitted updates, or a method's ``aggregate``."""
    round = transaction.round
    total = transaction.total
    if methods.gathering:
        # `on_updates` may change the gathered updates, so they are summed after it.
        transaction.gathered = gather(transaction)
        if transaction.finished:
            methods.run("on_updates", server)
        add_up(transaction, transaction.gathered)
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
    """Weighted mean of the transmitted updates, over the clients that trained a coordinate."""
    holders, rule = total.holders, methods.partial_training.averaged_over
    if holders is not None and rule == "holders":
        assert total.weighted is not None
        divisor = torch.where(holders > 0, holders, 1.0).to(round.wide)
        return torch.where(holders > 0, total.weighted / divisor, 0.0)
    mean = total.mean(total.weighted, round.wide)
    if holders is None or rule == "all":
        return mean
    share = total.mean(holders, holders.dtype).to(mean)
    return mean + (share * server.given.to(mean) - round.w.to(mean))


def masked(server: Server) -> Tensor:
    """Return the update with zeros on parts that are not averaged.

    Raises:
        Diverged: it is not finite.
    """
    update = server.update
    if server.moves is not None:
        update = torch.where(server.moves, update, 0.0)
    # Masked coordinates may have any value, so only the others have to be finite.
    check_finite(update, server.round, "the server's update")
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

    def begin(self, factor: float) -> None:
        """Set this round's learning rates, multiplied by ``factor``."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor

    def step(self, w: Tensor, update: Tensor, moves: Tensor | None) -> None:
        """Step with gradient ``-update``.

        ``moves`` ``(D,)``: the coordinates at which w and (D,)-shaped state may change; None: all.
        """
        before: dict[str, Tensor] = {}
        if moves is not None:
            before = {name: value.clone() for name, value in self._by_coordinate(w)}
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
        for name, value in self._by_coordinate(w):
            old = before[name] if name in before else torch.zeros_like(value)
            value.copy_(torch.where(moves, value, old))

    def _by_coordinate(self, w: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Return w, under no name, and state with one number per coordinate, by its name."""
        for name, value in {"": w.detach(), **self.optimizer.state.get(w, {})}.items():
            if isinstance(value, Tensor) and value.shape == w.shape:
                yield name, value

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
    """Make a checkpoint saved within a round hold model and optimizer of its start."""
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


def check_finite(values: Tensor, t: int, what: str) -> None:
    """End the run if a vector of round t is not finite.

    Raises:
        Diverged: it names ``what`` and the round.
    """
    if not all_finite(values):
        raise Diverged(diverged_text(t, what))


def diverged_text(t: int, what: str) -> str:
    return (
        f"the run diverged: {what} in round {t} is not finite. If the data are finite, lower the "
        "client learning rate, set clip_norm (10 is common), or leave such clients out with "
        "on_nonfinite='skip'."
    )


def gather(transaction: RoundTransaction) -> Tensor:
    """Return the updates ``(n, D)`` of the clients that finished, ascending, in every process."""
    round = transaction.round
    world = world_size()
    rows = round.w.new_empty(len(transaction.finished), round.w.numel(), dtype=round.wide)
    leaf = {client: j for j, client in enumerate(round.ids)}
    for row, client in zip(rows, transaction.finished, strict=True):
        # An update is removed from the transaction when it is copied into its row, so that there
        # are never two copies of all updates.
        if client in transaction.updates:
            row.copy_(transaction.updates.pop(client))
        # Process (leaf mod W) trained this client, so it has the client's update.
        if world > 1:
            dist.broadcast(row, src=leaf[client] % world)
    return rows


def add_up(transaction: RoundTransaction, rows: Tensor) -> None:
    round = transaction.round
    uniform = all(weight == 1 for weight in round.weights.values())
    row_of = dict(zip(transaction.finished, rows, strict=True))
    # Summing in the same tree gives the same bits as a run that gathers nothing.
    tree: TreeSum[Total] = TreeSum(len(round.ids))
    for leaf in visiting_order(len(round.ids)):
        client = round.ids[leaf]
        row = row_of.get(client)
        if row is None:
            tree.add(leaf, None)
        elif uniform:
            tree.add(leaf, Total(weighted=row), ["weighted"])
        else:
            weighted = row * round.weights[client]
            tree.add(leaf, Total(update=row, weighted=weighted), ["update"])
    if tree.total is not None:
        transaction.total.update = tree.total.update
        transaction.total.weighted = tree.total.weighted


def memory(who: str, most: int, w: Tensor) -> str:
    """Return as text how much memory it takes to gather the updates of ``most`` clients."""
    wide = torch.promote_types(w.dtype, torch.float32)
    size = most * w.numel() * wide.itemsize
    text = f"{size} bytes"
    for factor, unit in ((2**10, "KiB"), (2**20, "MiB"), (2**30, "GiB")):
        if size >= factor:
            text = f"{size / factor:.3g} {unit}"
    return (
        f"{who}: the updates of all participants are held at once, {most:,} × {w.numel():,} "
        f"numbers, {text} of memory in each process"
    )
