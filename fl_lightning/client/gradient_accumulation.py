"""A local step over several batches, whose gradients are accumulated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.machine.device_memory import to_device
from fl_lightning.machine.lightning import MisconfigurationException, extract_batch_size


class StepBatches(NamedTuple):
    """The batches of one local step; ``first``: the number of the first of them in the round."""

    batches: list[Any]
    first: int


def steps_in(batches: int, accumulate: int) -> int:
    """Return the local steps of an epoch of so many batches; the last may have fewer batches."""
    return -(-batches // accumulate)


def batches_in(steps: int, per_epoch: int, accumulate: int) -> int:
    """Return the batches of so many local steps; a step does not take batches of the next epoch.

    >>> [batches_in(steps, per_epoch=5, accumulate=2) for steps in (1, 2, 3, 4)]
    [2, 4, 5, 7]
    """
    epochs, steps = divmod(steps, steps_in(per_epoch, accumulate))
    return epochs * per_epoch + min(steps * accumulate, per_epoch)


def by_step(batches: Iterator[Any], per_epoch: int, accumulate: int) -> Iterator[StepBatches]:
    """Yield batches in the groups that local steps take.

    >>> [step.batches for step in by_step(iter("abcdefg"), per_epoch=5, accumulate=2)]
    [['a', 'b'], ['c', 'd'], ['e'], ['f', 'g']]
    """
    own: list[Any] = []
    for number, batch in enumerate(batches, 1):
        own.append(batch)
        in_epoch = number % per_epoch
        if in_epoch == 0 or in_epoch % accumulate == 0:
            yield StepBatches(own, number - len(own))
            own = []
    if own:
        yield StepBatches(own, number - len(own))


def count_of(learner: str, output: Any, batch: Any, device: torch.device) -> Tensor:
    """Return the weight of a batch in its step, as a float64 scalar.

    The weight is ``count`` if ``training_step`` returns ``{"loss": …, "count": …}``, else the
    number of samples of the batch.

    Raises:
        UserError: it is not a number of at least 0, or the samples of the batch cannot be counted.
    """
    if not isinstance(output, dict) or "count" not in output:
        try:
            number = float(extract_batch_size(batch))
            return torch.full((), number, dtype=torch.float64, device=device)
        except MisconfigurationException:
            raise UserError(
                f"model.accumulate: the number of samples in a batch of {learner} cannot be read "
                "from the batch, but the run weights the batches of a step by that number. Let "
                "training_step "
                'return {"loss": loss, "count": number}, where loss is a mean over that number.'
            ) from None
    count = output["count"]
    try:
        count = torch.as_tensor(count).detach().double().reshape(())
    except (TypeError, ValueError, RuntimeError):
        count = torch.tensor(float("nan"))
    # Reading a value that lies on a GPU would wait for the device.
    if count.device.type == "cpu" and not 0 <= float(count) < float("inf"):
        raise UserError(
            f"model.accumulate: training_step of {learner} returned count={output['count']!r}. It "
            "is the number of samples or targets over which the loss of the batch is a mean: give "
            "one number from 0, or leave it out for the number of samples."
        )
    return to_device(count, device)
