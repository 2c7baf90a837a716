"""Before round 0, finds out whether the learner can train on the smallest batch of the run.

BatchNorm cannot train on one value per channel, and neither can a loss that compares samples. The
run tries a step to find out whether the learner can train on such a batch, so it refuses only
learners that cannot. If no client of the run has such a batch, the run is not refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fl_lightning.engines.engine_context import EngineContext, LearnerCopies
from fl_lightning.engines.trials.dry_run import DryRun
from fl_lightning.errors import UserError
from fl_lightning.machine.random_state import RandomState

# Number of rounds that are searched for a client with a small batch.
MOST_ROUNDS = 10_000


def check_batch_sizes(copies: LearnerCopies) -> None:
    """Take a step on as few samples as the run's smallest batch has, if that is not the usual size.

    A hook that runs later may ready the learner for such a batch; then nothing is tried.

    Raises:
        UserError: the step fails, and would fail in a later round.
    """
    context = copies.context
    first = context.cohort.tried(0)[0]
    smallest = context.cohort.smallest_batch()
    if smallest is None or context.hooks_first:
        return
    usual = context.work.data.smallest_batch(1, [first])[0]
    if smallest[0] >= usual or not failure(copies, first, smallest[0]):
        return
    # The size is the reason only if a step on a usual batch works.
    if failure(copies, first, usual):
        return
    # If no client of the run's rounds has the smallest batch, another one may also be too small.
    met = first_met(context, smallest[0])
    says = failure(copies, first, met.samples) if met.samples < usual else ""
    if says:
        raise UserError(
            f"A batch of client {met.client} has only {met.samples} of its samples (in round "
            f"{met.round}), and a step of {type(context.learner).__name__} on so few fails: "
            f"{says}. Set drop_last=True or another batch_size, or give clients more samples. "
            "Nothing was started."
        )


@dataclass(frozen=True)
class Met:
    """A batch of so many samples, of this client, in this round first."""

    samples: int
    client: int
    round: int


def first_met(context: EngineContext, fewest: int) -> Met:
    """Return the smallest batch of the run's rounds, at least ``fewest`` samples."""
    found = Met(2**63, 0, 0)
    rounds = MOST_ROUNDS if context.rounds < 0 else min(context.rounds, MOST_ROUNDS)
    for t in range(max(1, rounds)):
        of_round = context.cohort.smallest_batch(context.cohort.tried(t))
        if of_round is not None and of_round[0] < found.samples:
            found = Met(*of_round, t)
            if found.samples <= fewest:
                break
    return found


def failure(copies: LearnerCopies, client: int, samples: int) -> str:
    """Return the error of a step on a client's first samples, on a copy; empty: it works."""
    context = copies.context
    try:
        batch = context.work.data.one_batch(client, samples, device=context.w.device)
    except Exception:  # an error of the data: the round that reads them will report where
        return ""
    before = RandomState(context.w)
    trial = DryRun(copies)
    trial.worker.work = replace(trial.worker.work, data=OneBatch(batch), accumulate=1)
    try:
        end, *_ = trial.run(client, 1)
        finite = context.skips_nonfinite or bool(end.isfinite().all())
        return "" if finite else "the weights are not finite after it"
    except Exception as error:
        copies.forget_trials()  # a trial may have stopped in the middle of a step
        return first_line(error).rstrip(".") or type(error).__name__
    finally:
        before.restore()
        trial.copy.reset()


def first_line(error: Exception) -> str:
    """Return an error's text in one line, or its class if the text is empty."""
    return (str(error).strip().splitlines() or [""])[0]


class OneBatch:
    """Replaces the data if a trial takes one step on a given batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def client_batches(
        self, client: int, round: int, steps: int, device: torch.device
    ) -> Iterator[Any]:
        return iter([self.batch])
