"""The learner's torchmetrics over a round: clients' states merged as torchmetrics merges those of
processes.

So a metric that is updated in ``training_step`` has, after the round, seen the samples of all
clients that finished.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean, dim_zero_sum

from fl_lightning.errors import UserError
from fl_lightning.learner import logged_of, same_bits
from fl_lightning.processes import world_size

OF_EVERY = frozenset(vars(SumMetric())) - {"sum_value"} | {"_computed", "_forward_cache"}
Values = dict[str, Any]  # a metric's states by name: tensors, or lists of them


@dataclass
class MetricStates:
    """What one client's steps left in the learner's metrics, each by its place among them.

    Args:
        states: how often each was updated, and its states.
        names: under which names each was logged.
        alone: by name, the client's values of those whose states cannot be merged.
    """

    states: dict[int, tuple[int, Values]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    alone: dict[str, Tensor] = field(default_factory=dict)


def metrics_of(learner: nn.Module) -> list[Metric]:
    """The metrics in a learner, in the order of its modules."""
    return [module for module in learner.modules() if isinstance(module, Metric)]


def tells_mode(learner: nn.Module) -> bool:
    """Whether any of its metrics says which way it is better."""
    return any(isinstance(metric.higher_is_better, bool) for metric in metrics_of(learner))


def alone(states: MetricStates | None) -> dict[str, Tensor]:
    """What a client logs of metrics whose states cannot be merged."""
    return {} if states is None else states.alone


def outside(metric: Metric) -> dict[str, Any]:
    """What a metric keeps beside its states, by value; what is no plain data is left out."""
    own = {
        name: value
        for name, value in vars(metric).items()
        if name not in OF_EVERY and name not in metric._defaults
    }
    return {name: by_value(value) for name, value in own.items() if is_data(value)}


def is_data(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(map(is_data, value))
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def by_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def alike(one: Any, other: Any) -> bool:
    """Whether two values are the same; one that was None is set once, as a number of classes is."""
    if one is None:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and same_bits(one, other.to(one.device))
        )
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    return bool(one == other or one != one)


def counting_outside(metrics: list[Metric], before: list[dict[str, Any]]) -> dict[int, str]:
    """Which metrics changed what they keep beside their states, and the name of it."""
    found = {}
    for j, metric in enumerate(metrics):
        now = outside(metric)
        changed = [
            name for name in before[j] if name in now and not alike(before[j][name], now[name])
        ]
        found.update({j: changed[0]} if changed else {})
    return found


def check_reset(learner: nn.Module, metric: Metric, name: str, before: dict[str, Any]) -> None:
    """Refuse a metric that goes on from client to client.

    Raises:
        UserError: ``reset`` leaves what it keeps beside its states.
    """
    metric.reset()
    if not alike(before[name], outside(metric).get(name)):
        kind = type(metric).__name__
        raise UserError(
            f"learner {type(learner).__name__}: its metric {kind} counts in {name}, which is no "
            f"state of it (add_state) and which {kind}.reset() leaves as it is, so it would go on "
            f"from client to client. Declare it with self.add_state({name!r}, "
            "default=torch.tensor(0), dist_reduce_fx='sum')."
        )


def taken(
    learner: nn.Module, metrics: list[Metric], names: dict[str, int], before: list[dict[str, Any]]
) -> MetricStates:
    """Copies of the states of those that were updated; ``before``: what each kept beside them at
    first.
    """
    for module in learner.modules():
        # of metrics with alike states only the first is updated
        if isinstance(module, MetricCollection):
            list(module.values(copy_state=False))
    on = "cpu" if world_size() > 1 else None
    apart = counting_outside(metrics, before)
    values = {
        n: torch.as_tensor(value_of(metrics[j])).double() for n, j in names.items() if j in apart
    }
    for j, name in apart.items():
        check_reset(learner, metrics[j], name, before[j])
    merged = {
        j: (m._update_count, copied(m, on))
        for j, m in enumerate(metrics)
        if m.update_called and j not in apart
    }
    return MetricStates(merged, {name: j for name, j in names.items() if j not in apart}, values)


def copied(metric: Metric, device: str | None = None) -> Values:
    """A metric's states by value."""

    def by_value(value: Any) -> Any:
        if isinstance(value, list):
            return [by_value(v) for v in value]
        if isinstance(value, Tensor):
            return value.detach().clone().to(device or value.device)
        return value

    return {name: by_value(getattr(metric, name)) for name in metric._defaults}


@contextmanager
def kept(metrics: list[Metric]) -> Iterator[None]:
    """Leave metrics as they were: a gradient for something else than the step's is not counted."""
    before = [
        (m, m._update_count, m._computed, m._forward_cache, {**outside(m), **copied(m)})
        for m in metrics
    ]
    try:
        yield
    finally:
        for metric, count, computed, latest, values in before:
            metric._update_count = count
            metric._computed = computed
            metric._forward_cache = latest
            for name, value in values.items():
                setattr(metric, name, value)


def merged_into(learner: nn.Module, of_clients: dict[int, MetricStates]) -> dict[str, float]:
    """Put all clients' states into the learner's metrics; gives the values of those that were
    logged.

    Args:
        of_clients: by client; merged in ascending order, so that neither engine nor processes
            decide the sum's order.
    """
    metrics = metrics_of(learner)
    names = dict[str, int]()
    together = world_size() > 1
    for j, metric in enumerate(metrics):
        given = [own.states[j] for _, own in sorted(of_clients.items()) if j in own.states]
        if not given:
            continue
        metric._update_count = sum(count for count, _ in given)
        metric._computed = None
        for name in metric._defaults:
            values = [(count, on_device(values[name], metric.device)) for count, values in given]
            setattr(metric, name, merged(metric._reductions[name], values))
        if together:  # its own compute would add up the processes, each of which has everything
            with suppress(Exception):  # the learner meets it again, if it asks
                value_of(metric)
    for own in of_clients.values():
        names.update(own.names)
    # of some clients: what others did not update counts for nothing
    for own in of_clients.values():
        names = {name: j for name, j in names.items() if name not in own.alone}
    for name, j in names.items():  # here, where every process knows them
        logged_of(learner).note(name, metrics[j])
    return {name: float(value_of(metrics[j])) for name, j in names.items()}


def merged(reduction: Any, values: list[tuple[int, Any]]) -> Any:
    """One state of several clients, given with the number of their updates, by the metric's own
    reduction.
    """
    states = [value for _, value in values]
    if isinstance(states[0], list):
        flat = [item for state in states for item in state]
        return flat if reduction is None or reduction is dim_zero_cat else reduction(flat)
    if len(states) == 1:
        return states[0]
    if reduction is dim_zero_cat:
        return torch.cat([state.reshape(1) if state.ndim == 0 else state for state in states])
    if reduction is dim_zero_sum:
        return torch.stack(states).sum(0)
    if reduction is dim_zero_mean:
        return torch.stack([count * state for count, state in values]).sum(0) / sum(
            count for count, _ in values
        )
    return torch.stack(states) if reduction is None else reduction(torch.stack(states))


def value_of(metric: Metric) -> Any:
    """What a metric says of its own states alone."""
    together = metric._to_sync
    metric._to_sync = False
    try:
        return metric.compute()
    finally:
        metric._to_sync = together


def on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [on_device(v, device) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value
