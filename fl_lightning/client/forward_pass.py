"""Around a learner's forward pass: the Trainer's precision, and the conversion of its batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from fl_lightning.client.batch_callbacks import START, changed
from fl_lightning.client.flat_learner import Convert
from fl_lightning.learner.modules import TRANSFER, overrides
from fl_lightning.machine.lightning import Precision


def forward_context(
    trainer: Any, device: torch.device
) -> Callable[[], AbstractContextManager[Any]]:
    """What the Trainer's precision puts around the learner's forward passes."""
    if trainer.precision == "bf16-mixed":
        return partial(in_bfloat16, device.type)
    return torch.enable_grad


def in_bfloat16(device: str) -> AbstractContextManager[Any]:
    """Gradients on and autocast, only around the learner."""
    stack = ExitStack()
    stack.enter_context(torch.enable_grad())
    stack.enter_context(torch.autocast(device, dtype=torch.bfloat16, cache_enabled=False))
    return stack


def in_full_precision(device: str) -> AbstractContextManager[Any]:
    """No graph and no autocast, around a round.

    A learner may use autocast itself, and its weights move between its steps. An outer context with
    a cache would keep their first values in low precision until the round is over.
    """
    stack = ExitStack()
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch.autocast(device, enabled=False, cache_enabled=False))
    return stack


def conversion(trainer: Any, learner: Any, data: Any, hook: str = START) -> Convert | None:
    """How a client's batch becomes what the learner gets.

    Its own transfer hooks, the Trainer's precision and callbacks change it. Where the data module
    has such a hook too, that is called in its place, as Lightning does.

    Args:
        hook: of callbacks that may change the batch.
    """
    precision, device = trainer.precision_plugin, trainer.strategy.root_device
    of_data = getattr(data, "transfer_hooks", ())
    transfers = [hook for hook in TRANSFER if overrides(learner, hook) and hook not in of_data]
    change = changed(trainer, hook)
    converts = type(precision).convert_input is not Precision.convert_input
    if not transfers and change is None and not converts:
        return None

    def convert(learner: Any, batch: Any) -> Any:
        for hook in transfers:
            extra = (device, 0) if hook == "transfer_batch_to_device" else (0,)
            batch = getattr(learner, hook)(batch, *extra)
        batch = precision.convert_input(batch)
        return batch if change is None else change(learner, batch)

    return convert
