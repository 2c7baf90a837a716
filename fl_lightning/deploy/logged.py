"""What the server knows of its clients' metrics: it takes a step of its own learner.

A site's word does not decide what a name stands for, or which shape a metric's state has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fl_lightning.aggregation.metric_states import MetricStates
from fl_lightning.callback_list import CallbackList
from fl_lightning.client.local_step import LocalTraining
from fl_lightning.engines.engine_context import LearnerCopies, engine_context_of
from fl_lightning.engines.trials.dry_run import DryRun, tried_apart
from fl_lightning.learner.attributes import Attributes
from fl_lightning.round.client_group import LOSS

ALONE = -1  # of a name: the value of a metric whose states cannot be merged
Kind = int | None  # of a name: the place of a metric in the learner, ALONE, or None: a mean
Shape = tuple[int, ...]


@dataclass
class KnownMetrics:
    """What the server knows of the metrics that clients log.

    Args:
        kinds: of each name that a step of the server's own learner logs.
        shapes: of each state that this step updates, by the metric's place and the state's name.
        heard: the names in all answers so far.
        others: by client, those of its names that are not among ``kinds``.
        changed: names of the learner's attributes that the step changed.
    """

    kinds: dict[str, Kind] = field(default_factory=lambda: {LOSS: None})
    shapes: dict[tuple[int, str], Shape] = field(default_factory=dict)
    heard: set[str] = field(default_factory=set)
    others: dict[int, set[str]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def try_step(self, run: Any, trainer: Any) -> None:
        """Take a step on the server's own samples, on a copy, which changes nothing of the run.

        If no step can be taken, nothing is known of what steps log.
        """
        cohort = run.cohort(trainer)
        settings = run.settings
        work = LocalTraining(
            trainer.datamodule, CallbackList([]), cohort.seed, accumulate=settings.accumulate
        )
        situation = engine_context_of(trainer, settings, run.model, run.optimizers, work, cohort)
        copies = LearnerCopies(situation)
        copies.treat_as_buffers(run.model.as_buffers)
        try:
            with tried_apart(situation):
                trial = DryRun(copies)
                before = Attributes(trial.copy.learner)
                trial.run(cohort.tried(0)[0], 1)
        except Exception:
            # The server's samples need not suffice for a step, and hooks may come later.
            return
        self.changed = before.changed_by_learner(trial.copy.learner)
        metrics = trial.metrics[-1] if trial.metrics else None
        self.kinds |= kinds_of(trial.logged, metrics)
        self.shapes |= shapes_of(metrics)


def kinds_of(logs: Mapping[str, Any], metrics: MetricStates | None) -> dict[str, Kind]:
    """Return what the names stand for that a client logs."""
    kinds: dict[str, Kind] = dict.fromkeys(logs)
    if metrics is not None:
        kinds |= metrics.names
        kinds |= dict.fromkeys(metrics.alone, ALONE)
    return kinds


def shapes_of(metrics: MetricStates | None) -> dict[tuple[int, str], Shape]:
    """Return the shapes of a client's states of metrics; a list has none."""
    shapes = {}
    for j, (_, states) in ({} if metrics is None else metrics.states).items():
        for name, value in states.items():
            shapes[j, name] = tuple(value.shape) if isinstance(value, Tensor) else ()
    return shapes
