"""The learner's torchmetrics over a round.

Clients' states are merged as torchmetrics merges those of processes. So a metric that is updated in
``training_step`` has seen, after the round, the samples of all clients that finished.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, SumMetric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_mean, dim_zero_sum

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import same_bits
from fl_lightning.learner.modules import logged_of
from fl_lightning.machine.processes import world_size

# Every metric has these attributes, whatever it measures.
OF_EVERY = frozenset(vars(SumMetric())) - {"sum_value"} | {"_computed", "_forward_cache"}
Values = dict[str, Any]  # a metric's states by name: tensors, or lists of them


@dataclass
class MetricStates:
    """The states that one client's steps left in the learner's metrics, each with its place.

    Args:
        states: for each metric how often it was updated, and its states.
        names: the names under which each was logged.
        alone: by name, the client's values of metrics whose states cannot be merged.
    """

    states: dict[int, tuple[int, Values]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    alone: dict[str, Tensor] = field(default_factory=dict)


def metrics_of(learner: nn.Module) -> list[Metric]:
    return [module for module in learner.modules() if isinstance(module, Metric)]


def tells_mode(learner: nn.Module) -> bool:
    return any(isinstance(metric.higher_is_better, bool) for metric in metrics_of(learner))


def alone(states: MetricStates | None) -> dict[str, Tensor]:
    return {} if states is None else states.alone


def outside(metric: Metric) -> dict[str, Any]:
    """Return copies of the plain data that a metric keeps outside its states."""
    attributes = {}
    for name, value in vars(metric).items():
        if name not in OF_EVERY and name not in metric._defaults and is_data(value):
            attributes[name] = by_value(value)
    return attributes


def is_data(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(map(is_data, value))
    if isinstance(value, dict):
        return all(map(is_data, value.values()))
    return value is None or isinstance(value, (bool, int, float, str, Tensor))


def by_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def alike(one: Any, other: Any) -> bool:
    # Metrics set some attributes only at their first update, such as the number of classes.
    if one is None:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other.to(one.device))
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return False
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[k], other[k]) for k in one)
    # NaN does not equal itself, but two NaNs are not a change.
    return bool(one == other or one != one)


def counting_outside(metrics: list[Metric], before: list[dict[str, Any]]) -> dict[int, str]:
    """First attribute outside its states that a metric changed, by the metric's place."""
    counters: dict[int, str] = {}
    for j, metric in enumerate(metrics):
        attributes = outside(metric)
        for name, earlier in before[j].items():
            if name in attributes and not alike(earlier, attributes[name]):
                counters.setdefault(j, name)
    return counters


def check_reset(learner: nn.Module, metric: Metric, name: str, before: dict[str, Any]) -> None:
    """Refuse a metric that continues from client to client.

    Raises:
        UserError: ``reset`` does not change data that the metric keeps outside its states.
    """
    metric.reset()
    if not alike(before[name], outside(metric).get(name)):
        kind = type(metric).__name__
        raise UserError(
            f"learner {type(learner).__name__}: its metric {kind} counts in the attribute {name}. "
            f"The attribute is not one of its states (add_state), and {kind}.reset() does not "
            "reset it, so one client's count would continue with the next client. Declare it with "
            f"self.add_state({name!r}, default=torch.tensor(0), dist_reduce_fx='sum')."
        )


def taken(
    learner: nn.Module, metrics: list[Metric], names: dict[str, int], before: list[dict[str, Any]]
) -> MetricStates:
    """States of metrics that were updated; ``before``: their attributes outside at first."""
    for module in learner.modules():
        # In a collection, metrics with equal states share those of the first. Asking for all
        # metrics makes the others refer to these states.
        if isinstance(module, MetricCollection):
            list(module.values(copy_state=False))
    device = "cpu" if world_size() > 1 else None
    apart = counting_outside(metrics, before)
    merged_names: dict[str, int] = {}
    values: dict[str, Tensor] = {}
    for name, j in names.items():
        if j in apart:
            value = torch.as_tensor(value_of(metrics[j])).double()
            values[name] = value.to(device or value.device)
        else:
            merged_names[name] = j
    # `check_reset` resets the metric, so its value is taken before.
    for j, name in apart.items():
        check_reset(learner, metrics[j], name, before[j])
    states: dict[int, tuple[int, Values]] = {}
    for j, metric in enumerate(metrics):
        if metric.update_called and j not in apart:
            states[j] = (metric._update_count, copied(metric, device))
    return MetricStates(states, merged_names, values)


def copied(metric: Metric, device: str | None = None) -> Values:
    return {name: on_device(getattr(metric, name), device, True) for name in metric._defaults}


def refuse_samples(learner: nn.Module, states: MetricStates) -> None:
    """Refuse to send the states of a metric that has values of single samples in them.

    Raises:
        UserError: it names the metric and the states.
    """
    metrics = metrics_of(learner)
    for j, (_, values) in states.states.items():
        metric = metrics[j]
        grow = [name for name, value in values.items() if _grows(metric, name) and len(value)]
        if not grow:
            continue
        name = next(name for name, module in learner.named_modules() if module is metric)
        raise UserError(
            f"learner {type(learner).__name__}: its metric {name} ({type(metric).__name__}) keeps "
            f"values of each training sample in its states {', '.join(grow)}, which a site would "
            "send to the server. Give the metric states of a fixed size (such as thresholds=100 "
            "for AUROC and AveragePrecision), update it only in validation_step, or log a number "
            "per step: self.log(name, torchmetrics.functional.auroc(…))."
        )


def _grows(metric: Metric, state: str) -> bool:
    is_list = isinstance(metric._defaults[state], list)
    return is_list or metric._reductions[state] is dim_zero_cat


@contextmanager
def kept(metrics: list[Metric]) -> Iterator[None]:
    """Restore metrics afterwards: a gradient for another purpose must not be counted."""
    snapshots: list[dict[str, Any]] = []
    for metric in metrics:
        snapshot = {**outside(metric), **copied(metric)}
        # torchmetrics sets these itself, so `outside` does not include them.
        for name in ("_update_count", "_computed", "_forward_cache"):
            snapshot[name] = getattr(metric, name)
        snapshots.append(snapshot)
    try:
        yield
    finally:
        for metric, snapshot in zip(metrics, snapshots, strict=True):
            for name, value in snapshot.items():
                setattr(metric, name, value)


def merged_into(
    learner: nn.Module,
    of_clients: dict[int, MetricStates],
    failed: Callable[[str], None] | None = None,
) -> dict[str, float]:
    """Put all clients' states into the learner's metrics, and return the values of the logged ones.

    Args:
        of_clients: states by client.
        failed: called with a text for each metric whose states cannot be merged, or which cannot be
            computed from them; its value is then NaN. None: the first one raises an error.

    Raises:
        UserError: it names the metric.
    """
    metrics = metrics_of(learner)
    errors: dict[int, Exception] = {}
    for j, metric in enumerate(metrics):
        # Ascending order, so that the sum does not depend on the engine or on the number of
        # processes.
        states = [own.states[j] for _, own in sorted(of_clients.items()) if j in own.states]
        try:
            _merge(metric, states)
        except Exception as error:
            errors[j] = error
    names: dict[str, int] = {}
    for own in of_clients.values():
        names.update(own.names)
    # If the states of one client cannot be merged, the metric's value is the mean over clients.
    for own in of_clients.values():
        for name in own.alone:
            names.pop(name, None)
    # Every process has merged the same names, so all processes make the same notes here.
    for name, j in names.items():
        logged_of(learner).note(name, metrics[j])
    found: dict[str, float] = {}
    for name, j in names.items():
        try:
            if j in errors:
                raise errors[j]
            found[name] = number_of(metrics[j])
        except Exception as error:
            text = uncomputed(learner, name, metrics[j], error)
            if failed is None:
                raise UserError(f"{text}.") from error
            failed(f"{text}, so the round has no value of it")
            found[name] = math.nan
    return found


def _merge(metric: Metric, states: list[tuple[int, Values]]) -> None:
    if not states:
        return
    metric._update_count = sum(count for count, _ in states)
    metric._computed = None
    for name in metric._defaults:
        values = [(count, on_device(state[name], metric.device)) for count, state in states]
        setattr(metric, name, merged(metric._reductions[name], values))
    # The metric's own `compute` would add up the processes, although each of them has all states.
    # So its value is computed here and kept. If `compute` fails, the learner meets the error when
    # it asks for the value.
    if world_size() > 1:
        with suppress(Exception):
            value_of(metric)


def number_of(metric: Metric) -> float:
    """Return the value of a metric, from only its own states.

    Raises:
        ValueError: it has several numbers.
    """
    value = value_of(metric)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (int, float)):
        return float(value)
    shape = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.80}"
    raise ValueError(f"its value is {shape}, and one number can be logged under a name")


def uncomputed(learner: nn.Module, name: str, metric: Metric, error: Exception) -> str:
    """Return what is said of a logged metric that has no value."""
    kind = type(metric).__name__
    return (
        f"learner {type(learner).__name__}: its metric {kind}, logged as {name}, cannot be "
        f"computed ({type(error).__name__}: {error})"
    )


def logged_in(learner: nn.Module, of_clients: dict[int, MetricStates]) -> list[Metric]:
    metrics = metrics_of(learner)
    places: set[int] = set()
    for own in of_clients.values():
        places.update(own.names.values())
    return [metrics[j] for j in sorted(places)]


def merged(reduction: Any, values: list[tuple[int, Any]]) -> Any:
    """Return one state of several clients, merged by the metric's own reduction.

    ``values``: each client's value, with the number of its updates.
    """
    states = [value for _, value in values]
    if isinstance(states[0], list):
        items = list(itertools.chain.from_iterable(states))
        return items if reduction is None or reduction is dim_zero_cat else reduction(items)
    if len(states) == 1:
        return states[0]
    if reduction is dim_zero_cat:
        return torch.cat([state.reshape(1) if state.ndim == 0 else state for state in states])
    if reduction is dim_zero_sum:
        return torch.stack(states).sum(0)
    if reduction is dim_zero_mean:
        updates = sum(count for count, _ in values)
        return torch.stack([count * state for count, state in values]).sum(0) / updates
    return torch.stack(states) if reduction is None else reduction(torch.stack(states))


def value_of(metric: Metric) -> Any:
    """Return a metric's value from only its own states, without those of other processes."""
    together = metric._to_sync
    metric._to_sync = False
    try:
        return metric.compute()
    finally:
        metric._to_sync = together


def on_device(value: Any, device: torch.device | str | None, copy: bool = False) -> Any:
    if isinstance(value, list):
        return [on_device(v, device, copy) for v in value]
    if not isinstance(value, Tensor):
        return value
    return value.detach().to(device or value.device, copy=copy)
