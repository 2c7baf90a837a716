"""The metrics of a round: what the learner, the clients' hooks and the server's hooks logged."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fl_lightning.aggregation import metric_states, traffic
from fl_lightning.round.client_group import LOSS
from fl_lightning.round.server import Server
from fl_lightning.round.transaction import RoundTransaction

RoundMetrics = dict[str, float]
TIMES = frozenset({"time/round", "time/cpu"})  # names that are logged when a round is over


def of_round(
    transaction: RoundTransaction,
    server: Server,
    learner: Any,
    disputed: Collection[str],
    note: Callable[[str], None],
) -> tuple[RoundMetrics, float | None]:
    """Return a round's metrics by name, and its loss.

    The loss is the mean over clients of their steps' losses; None if no callback reads it.

    Args:
        disputed: names about which the round's sites do not agree; they are left out.
        note: function that reports a text to the user.
    """
    means: dict[str, float] = {}
    for name, total in transaction.total.logs.items():
        # A client need not log every name, so each name has its own number of values.
        if name not in disputed:
            means[name] = float(total / transaction.total.logged[name])
    loss = means.pop(LOSS, None)
    logged = {name: float(value) for name, value in server.logs.items()}
    metrics = metric_states.merged_into(learner, transaction.metrics, note)
    logged["cost/gradients"] = traffic.gradients(transaction)
    logged["cost/forwards"] = traffic.forwards(transaction)
    logged["client_lr"] = float(transaction.round.rates.lr)
    if transaction.planned is not None:
        logged |= transaction.planned.metrics
    for name in sorted((means.keys() | metrics.keys()) & (logged.keys() | TIMES)):
        note(
            f"{name} is logged by the learner and by the run, and the run's value replaces the "
            "learner's. Log the learner's under another name"
        )
    return {**means, **metrics, **logged}, loss
