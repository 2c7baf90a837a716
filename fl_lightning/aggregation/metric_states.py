"""The learner's torchmetrics over a round: clients' states merged as torchmetrics merges those of processes.

So a metric that is updated in ``training_step`` has, after the round, seen the samples of all clients that finished.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean, dim_zero_sum

from fl_lightning.learner import logged_of
from fl_lightning.processes import world_size

Values = dict[str, Any]  # a metric's states by name: tensors, or lists of them


@dataclass
class MetricStates:
    """What one client's steps left in the learner's metrics, each by its place among them.

    Args:
        states: how often each was updated, and its states.
        names: under which names each was logged.
    """

    states: dict[int, tuple[int, Values]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)


def metrics_of(learner: nn.Module) -> list[Metric]:
    """The metrics in a learner, in the order of its modules."""
    return [module for module in learner.modules() if isinstance(module, Metric)]


def tells_mode(learner: nn.Module) -> bool:
    """Whether any of its metrics says which way it is better."""
    return any(isinstance(metric.higher_is_better, bool) for metric in metrics_of(learner))


def taken(learner: nn.Module, metrics: list[Metric], names: dict[str, int]) -> MetricStates:
    """Copies of the states of those that were updated."""
    for module in learner.modules():
        if isinstance(module, MetricCollection):  # of metrics with alike states only the first is updated
            list(module.values(copy_state=False))
    on = "cpu" if world_size() > 1 else None
    return MetricStates({j: (m._update_count, copied(m, on)) for j, m in enumerate(metrics) if m.update_called}, names)


def copied(metric: Metric, device: str | None = None) -> Values:
    """A metric's states by value."""

    def by_value(value: Any) -> Any:
        if isinstance(value, list):
            return [by_value(v) for v in value]
        return value.detach().clone().to(device or value.device) if isinstance(value, Tensor) else value

    return {name: by_value(getattr(metric, name)) for name in metric._defaults}


@contextmanager
def kept(metrics: list[Metric]) -> Iterator[None]:
    """Leave metrics as they were: a gradient for something else than the step's is not counted."""
    before = [(m, m._update_count, m._computed, m._forward_cache, copied(m)) for m in metrics]
    try:
        yield
    finally:
        for metric, count, computed, latest, values in before:
            metric._update_count, metric._computed, metric._forward_cache = count, computed, latest
            for name, value in values.items():
                setattr(metric, name, value)


def merged_into(learner: nn.Module, of_clients: dict[int, MetricStates]) -> dict[str, float]:
    """Put all clients' states into the learner's metrics; gives the values of those that were logged.

    Args:
        of_clients: by client; merged in ascending order, so that neither engine nor processes decide the sum's order.
    """
    metrics, names, together = metrics_of(learner), dict[str, int](), world_size() > 1
    for j, metric in enumerate(metrics):
        given = [own.states[j] for _, own in sorted(of_clients.items()) if j in own.states]
        if not given:
            continue
        metric._update_count, metric._computed = sum(count for count, _ in given), None
        for name in metric._defaults:
            values = [(count, on_device(values[name], metric.device)) for count, values in given]
            setattr(metric, name, merged(metric._reductions[name], values))
        if together:  # its own compute would add up the processes, each of which has everything
            with suppress(Exception):  # the learner meets it again, if it asks
                value_of(metric)
    for own in of_clients.values():
        names.update(own.names)
    for name, j in names.items():  # here, where every process knows them
        logged_of(learner).note(name, metrics[j])
    return {name: float(value_of(metrics[j])) for name, j in names.items()}


def merged(reduction: Any, values: list[tuple[int, Any]]) -> Any:
    """One state of several clients, given with the number of their updates, by the metric's own reduction."""
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
        return torch.stack([count * state for count, state in values]).sum(0) / sum(count for count, _ in values)
    return torch.stack(states) if reduction is None else reduction(torch.stack(states))


def value_of(metric: Metric) -> Any:
    """What a metric says of its own states alone."""
    together, metric._to_sync = metric._to_sync, False
    try:
        return metric.compute()
    finally:
        metric._to_sync = together


def on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [on_device(v, device) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value
