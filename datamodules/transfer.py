"""The transfer hooks of a data module: the run calls them in training, and Lightning in
evaluation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from fl_lightning.datamodules.batches.samples import Batch, batch_to_device

HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# clients train on threads and share the attributes that hooks set on the data module
ONE_AT_A_TIME = threading.Lock()


def overridden(owner: Any, method: str) -> bool:
    """Return whether a data module, of either Lightning or of neither, overrides a method."""
    base = next(
        (c for c in reversed(type(owner).__mro__) if c.__name__ == "LightningDataModule"), None
    )
    own = getattr(owner, method, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(base, method, None)


class Transfer:
    """The transfer hooks that ``owner`` overrides, for batches of the clients of ``data``.

    The hooks become attributes of ``data``, so Lightning calls them in evaluation. In training
    Lightning's batch is only the round's token, and the hooks return it unchanged. There
    :meth:`batches` applies the hooks to each local batch.
    """

    def __init__(self, data: Any, owner: Any) -> None:
        self.hooks: dict[str, Callable[..., Batch]] = {
            h: getattr(owner, h) for h in HOOKS if overridden(owner, h)
        }
        # a `partial` can be copied and pickled, and Lightning finds the hook in it
        for name, hook in self.hooks.items():
            setattr(data, name, partial(outside_training, data, hook))

    def source(self, device: torch.device) -> torch.device:
        """Return the device on which batches have to be made so that the hooks move them to
        ``device``.
        """
        moves = any(name in self.hooks for name in HOOKS[:2])
        return torch.device("cpu") if moves else device

    def batches(self, batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
        """Yield each batch after the hooks, on ``device``."""
        for batch in batches:
            if self.hooks:
                with ONE_AT_A_TIME:
                    batch = self._through(batch, device)
            yield batch

    def _through(self, batch: Batch, device: torch.device) -> Batch:
        before, move, after = (self.hooks.get(name) for name in HOOKS)
        if before is not None:
            batch = before(batch, 0)
        batch = batch_to_device(batch, device) if move is None else move(batch, device, 0)
        return batch if after is None else after(batch, 0)


def outside_training(data: Any, hook: Callable[..., Batch], batch: Batch, *rest: Any) -> Batch:
    """Call ``hook``, except in training, because the batch is then the round's token."""
    if data.trainer is not None and data.trainer.training:
        return batch
    return hook(batch, *rest)
