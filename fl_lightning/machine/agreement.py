"""Checks that all processes of a run do the same before their values are combined."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.machine.processes import gathered, world_size

# Two kinds of processors may round the server's step differently, by far less than this.
_TOLERANCE = 1e-4


def check_logged_alike(trainer: Any) -> None:
    """Refuse evaluation in which one process logs a metric and another one does not.

    Lightning combines the processes' values in the order in which they were logged, and not by
    their names.

    Raises:
        UserError: it names the metric and the processes.
    """
    if world_size() == 1:
        return
    results: Mapping[str, Any] = trainer._results or {}
    of_each = gathered([r.meta.name for r in results.values() if travels(r)])
    if all(names == of_each[0] for names in of_each):
        return
    for name in sorted(set().union(*of_each)):
        logs = [rank for rank, names in enumerate(of_each) if name in names]
        if len(logs) < len(of_each):
            missing = next(rank for rank in range(len(of_each)) if rank not in logs)
            raise UserError(
                f"{name!r} was logged in process {logs[0]} and not in process {missing}. Each "
                "process evaluates different samples, and all processes have to log the same "
                f"metrics. Call self.log({name!r}, …) for every batch and in every process: not "
                "only if a batch has certain samples, and not only if self.trainer.is_global_zero."
            )
    raise UserError(
        f"process 0 logged {of_each[0]} in evaluation, and another process logged these metrics in "
        "another order. Call self.log in the same order for every batch."
    )


def travels(result: Any) -> bool:
    """Return whether Lightning combines a logged value over processes."""
    sync = result.meta.sync
    return not sync.rank_zero_only and (sync.should or not result.is_tensor)


class Alike:
    """The state of one process at the end of a round, which has to be equal in all of them.

    Args:
        stops: whether this process was asked to stop the run after this round.
        w: the server's model ``(D,)``.
    """

    def __init__(self, stops: bool, w: Tensor) -> None:
        w = w.detach()
        one_of_many = world_size() > 1
        norm = float(torch.linalg.vector_norm(w, dtype=torch.float64)) if one_of_many else 0.0
        total = float(w.sum(dtype=torch.float64)) if one_of_many else 0.0
        self.of_each = gathered((stops, norm, total))
        self.scale = w.numel() ** 0.5

    @property
    def stops(self) -> bool:
        """Return whether a process was asked to stop the run."""
        return any(stops for stops, _, _ in self.of_each)

    def check_model(self, t: int) -> None:
        """Refuse to go on if the processes have different models.

        Raises:
            UserError: it names the round.
        """
        (_, norm, total) = self.of_each[0]
        limit = _TOLERANCE * norm
        for rank, (_, other, other_total) in enumerate(self.of_each):
            if abs(other - norm) > limit or abs(other_total - total) > limit * self.scale:
                raise UserError(
                    f"after round {t} the model in process {rank} is not the one in process 0. A "
                    "callback or a hook of the learner changes the weights in one process only, "
                    "for example if trainer.is_global_zero. Each process trains clients from its "
                    "own copy of the model, so change the weights in every process."
                )
