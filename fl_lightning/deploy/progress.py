"""The run's progress as a learner reads it: a site shows it the same values as the server.

The server runs the hooks of rounds and of validation, and a site does not. If those hooks change a
number in an attribute of the learner, that raises an error, because sites train with the first
value; buffers are sent. A note names other attributes that they change.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.deploy.transport import Number
from fl_lightning.errors import UserError
from fl_lightning.learner.attributes import Attributes, of_framework, of_library
from fl_lightning.learner.modules import keeps_frozen, lightning_base

FOREVER = -1  # for max_epochs=None


class ServerProgress:
    """The run's progress, and the attributes that the learner's hooks change at the server.

    Args:
        trainer: the server's Trainer.
        learner: the learner when the fit begins, before any of its hooks ran.
        note: function that reports a text to the user.
    """

    def __init__(self, trainer: Any, learner: nn.Module, note: Callable[[str], None]) -> None:
        self.trainer = trainer
        self.learner = learner
        self.note = note
        self.first = Attributes(learner)
        self.frozen = _marks(learner)
        # frozen parameters whose changes are sent
        self.sent: Collection[str] = ()

    def numbers(self, epoch: int, steps: int) -> dict[str, Number]:
        """Return the numbers that each message of a round has.

        Args:
            epoch: ``current_epoch`` as the learner reads it.
            steps: ``global_step`` as the learner reads it.

        Raises:
            UserError: a hook changed a frozen parameter or a number, which are not sent.
        """
        self._refuse_changed_parameters()
        modules = dict(self.learner.named_modules())
        for full in self.first.changed(Attributes(self.learner)):
            part, _, name = full.rpartition(".")
            # An attribute of a class is stored under the name of the class.
            if part not in modules or of_framework(modules[part], name):
                continue
            value = getattr(modules[part], name, None)
            own = not of_library(type(modules[part])) or lightning_base(modules[part]) is not None
            changes = (
                f"learner {type(self.learner).__name__}: its hooks change {full} at the server"
            )
            if own and isinstance(value, int | float):
                raise UserError(
                    f"{changes} to a {type(value).__name__}, and sites would train with its first "
                    f'value. Make it a buffer: self.register_buffer("{name}", torch.tensor(…)) in '
                    f"__init__, and self.{name}.fill_(…) in the hook. Buffers are sent."
                )
            self.note(
                f"{changes}. If training_step reads it, keep it in a buffer "
                "(self.register_buffer): buffers are sent"
            )
        limit = self.trainer.max_epochs
        limit = FOREVER if limit is None else limit
        return {"epoch": epoch, "steps": steps, "max_epochs": limit}

    def _refuse_changed_parameters(self) -> None:
        for name, mark in _marks(self.learner, self.sent).items():
            if self.frozen.get(name, mark) != mark:
                last = name.rpartition(".")[2]
                raise UserError(
                    f"learner {type(self.learner).__name__}: a hook changes the frozen parameter "
                    f"{name} at the server, and sites do not get frozen parameters. Make it a "
                    f'buffer (self.register_buffer("{last}", …)), or simulate with `fl-lightning '
                    "fit`."
                )


def take(trainer: Any, numbers: Mapping[str, Number]) -> None:
    """Set a site's Trainer to the progress in a message, which has been checked."""
    loop = trainer.fit_loop
    for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
        progress.processed = progress.completed = int(numbers["epoch"])
    steps = loop.epoch_loop.manual_optimization.optim_step_progress
    steps.total.ready = steps.total.completed = int(numbers["steps"])
    limit = int(numbers["max_epochs"])
    loop.max_epochs = None if limit == FOREVER else limit


def _marks(learner: nn.Module, without: Collection[str] = ()) -> dict[str, int]:
    """Return a number of each frozen parameter, by name, that differs after a change."""
    # A learner that declares frozen_stay may be large. Then only in-place changes are found.
    if not keeps_frozen(learner):
        return checksums(learner, without)
    return {name: p._version for name, p in _frozen(learner, without)}


def checksums(learner: nn.Module, without: Collection[str] = ()) -> dict[str, int]:
    """Return a number of the bits of each frozen parameter, by name; ``without``: of all others."""
    return {name: _checksum(p) for name, p in _frozen(learner, without)}


def _frozen(learner: nn.Module, without: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in learner.named_parameters():
        if not parameter.requires_grad and name not in without:
            yield name, parameter


def _checksum(values: Tensor) -> int:
    # PyTorch does not count changes of a tensor's .data.
    flat = values.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
