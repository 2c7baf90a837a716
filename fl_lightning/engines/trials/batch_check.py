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

# A trial batch has at most this many samples, or twice the usual: a step on it shows whether the
# size is what fails.
ENOUGH = 32
# Number of rounds that are searched for a client with a small batch.
MOST_ROUNDS = 10_000


def check_batch_sizes(copies: LearnerCopies, failed: bool = False) -> str:
    """Take a step on as few samples as the run's smallest batch has, if that is not the usual size.

    Returns:
        A note for the user: such a batch fails, but no client of this run's rounds has one, or a
        hook may still prepare the learner for it. Empty if there is no note.

    Args:
        failed: whether a step on a usual batch has failed, which may be because of its size.

    Raises:
        UserError: the step fails, and would fail in a later round.
    """
    context = copies.context
    smallest = context.cohort.smallest_batch()
    first = context.cohort.tried(0)[0]
    if smallest is None:
        return ""
    data = context.work.data
    usual = data.smallest_batch(1, [first])[0]
    works = (first, usual)
    if failed:
        sizes = context.cohort.data.client_sizes()
        largest = int(sizes.argmax())
        works = (largest, min(int(sizes[largest]), max(2 * usual, ENOUGH)))
    if smallest[0] >= works[1]:
        return ""
    # The size is the reason only if a step on a usual batch works.
    says = failure(copies, first, smallest[0])
    if not says or failure(copies, *works):
        return ""
    # A first step may fail on any copy, if a hook keeps what the step reads in the learner itself.
    if failed and not failure(copies, first, smallest[0]):
        return ""
    # If the size is the reason, the other client's step fails with it, too.
    if failed and not failure(copies, works[0], smallest[0]):
        return ""
    met = first_met(context, smallest[0])
    # No client of these rounds has the smallest batch, but another one may also be too small.
    if met.samples > smallest[0]:
        said = failure(copies, first, met.samples) if met.samples < usual else ""
        if not said:
            client = smallest[1]
            told = paragraph(context, Met(*smallest), says)
            return f"{told} Client {client} takes part in none of this run's rounds, so it goes on"
        says = said
    text = paragraph(context, met, says)
    if context.hooks_first:
        return (
            f"{text} The run goes on, as a hook at the start of training or of a round may ready "
            "the learner for it"
        )
    raise UserError(f"{text} Nothing was started.")


@dataclass(frozen=True)
class Met:
    """A batch of so many samples, of this client, in this round first; -1: in no round."""

    samples: int
    client: int
    round: int = -1


def first_met(context: EngineContext, fewest: int) -> Met:
    """Return the smallest batch of the run's rounds; the first one with ``fewest`` samples ends
    the search.
    """
    found = Met(2**63, 0)
    rounds = MOST_ROUNDS if context.rounds < 0 else min(context.rounds, MOST_ROUNDS)
    for t in range(max(1, rounds)):
        of_round = context.cohort.smallest_batch(context.cohort.tried(t))
        if of_round is not None and of_round[0] < found.samples:
            found = Met(*of_round, t)
            if found.samples <= fewest:
                break
    return found


def failure(copies: LearnerCopies, client: int, samples: int) -> str:
    """Return the error of a step on a client's first samples, on a copy; empty if the step
    works.
    """
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


def paragraph(context: EngineContext, met: Met, says: str) -> str:
    """Return which batch is too small for the learner, and what to do."""
    holds, ways_out = context.work.data.told_of_batch(met.client, met.samples)
    when = f" (met in round {met.round})" if met.round >= 0 else ""
    few = f"{met.samples} sample{'s' if met.samples > 1 else ''}"
    name = type(context.learner).__name__
    step = f"a step of {name} on {few} fails: {says}"
    return f"{holds}{when}, and {step}. Ways out: {ways_out}."
