"""The run's progress as a learner reads it: a site shows it the same values as the server.

The server runs the hooks of rounds and of validation, and a site does not. If those hooks set
numbers in attributes that the learner's class names in ``sent_to_sites``, the numbers are sent with
each message. Another number of the learner is refused, and a note names attributes that cannot be
sent.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.deploy.transport import Number
from fl_lightning.errors import UserError
from fl_lightning.learner.attributes import Attributes, of_framework, of_library
from fl_lightning.learner.modules import keeps_frozen, lightning_base

ATTRIBUTE = "learner/"  # prefix of an attribute's name among a message's numbers
BOOL = ":bool"  # suffix of the name of an attribute that is True or False
FOREVER = -1  # for max_epochs=None
ABSENT = object()  # in place of the value of an attribute that a module itself does not have
NUMBERS = bool | int | float | None
FUNCTIONS = (FunctionType, staticmethod, classmethod, property)


class ServerProgress:
    """The run's progress, and the numbers that the learner's hooks change at the server.

    Args:
        trainer: the server's Trainer.
        learner: the learner when the fit begins, before any of its hooks ran.
        note: function that reports a text to the user.
        changed: names of attributes that were changed before the run was resumed. The learner may
            have restored them, so they do not differ from ``first``.
    """

    def __init__(
        self,
        trainer: Any,
        learner: nn.Module,
        note: Callable[[str], None],
        changed: Collection[str] = (),
    ) -> None:
        self.trainer = trainer
        self.learner = learner
        self.note = note
        self.first = Attributes(learner)
        self.frozen = _marks(learner)
        # frozen parameters whose changes are sent
        self.sent: Collection[str] = ()
        self._changed = dict.fromkeys(changed)

    def changed(self) -> list[str]:
        """Return the names of the attributes that have changed so far."""
        # A value may return to its first one, so every value that changed once is sent from then
        # on.
        self._changed |= dict.fromkeys(self.first.changed(Attributes(self.learner)))
        return list(self._changed)

    def numbers(self, epoch: int, steps: int) -> dict[str, Number]:
        """Return the numbers that each message of a round has.

        Args:
            epoch: ``current_epoch`` as the learner reads it.
            steps: ``global_step`` as the learner reads it.

        Raises:
            UserError: a hook changed a frozen parameter, which is not sent, or a number that its
                class does not name.
        """
        self._refuse_changed_parameters()
        limit = self.trainer.max_epochs
        numbers: dict[str, Number] = {"epoch": epoch, "steps": steps}
        numbers["max_epochs"] = FOREVER if limit is None else limit
        modules = dict(self.learner.named_modules())
        for full in self.changed():
            part, _, name = full.rpartition(".")
            if part not in modules:
                # An attribute of a class is stored under the name of the class.
                if self._is_of_class(full):
                    self._note_left(full, "It belongs to the class")
                continue
            if of_framework(modules[part], name):
                continue
            value = getattr(modules[part], name, None)
            if not isinstance(value, int | float):
                if name in names_of(modules[part], "sent_to_sites"):
                    raise UserError(
                        f"learner {type(self.learner).__name__}: sent_to_sites names {name}, but "
                        f"its value is a {type(value).__name__}. Only Python's int, float and bool "
                        f"are sent: write self.{name} = float(…)."
                    )
                self._note_left(full, "It is not a number")
            elif of_library(type(modules[part])) and lightning_base(modules[part]) is None:
                self._note_left(full, "It belongs to a module of a library")
            elif not may_be_sent(self.learner, full):
                kind = type(modules[part]).__name__
                raise UserError(
                    f"learner {type(self.learner).__name__}: its hooks change {full} at the "
                    "server, and sites would train with its first value. Write sent_to_sites = "
                    f'("{name}",) in the class {kind}, and each message to a site has the number; '
                    "or simulate with `fl-lightning fit`."
                )
            elif isinstance(value, bool):
                numbers[ATTRIBUTE + full + BOOL] = int(value)
            else:
                numbers[ATTRIBUTE + full] = value
        return numbers

    def _is_of_class(self, full: str) -> bool:
        """Return whether it is a value in a class of the learner's modules, and no function."""
        kind, _, name = full.rpartition(".")
        above: set[type] = set()
        for module in self.learner.modules():
            above.update(type(module).__mro__)
        values = [vars(each).get(name) for each in above if each.__name__ == kind]
        return any(not isinstance(value, FUNCTIONS) for value in values)

    def _note_left(self, full: str, why: str) -> None:
        self.note(
            f"learner {type(self.learner).__name__}: its hooks change {full} at the server. {why}, "
            "so the server does not send it to the sites. If training_step reads it, keep it in a "
            "buffer (self.register_buffer): buffers are sent"
        )

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


class SiteProgress:
    """Sets a site's Trainer and learner to the values in a message.

    Args:
        trainer: the site's Trainer.
        learner: the learner when the fit begins, before any of its hooks ran.
    """

    def __init__(self, trainer: Any, learner: nn.Module) -> None:
        self.trainer = trainer
        self.learner = learner
        # this site's first values of the attributes that a message may set
        self.first: dict[str, Any] = {}
        for part, module in learner.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, NUMBERS):
                    self.first[f"{part}.{name}" if part else name] = value
        self.set: dict[str, None] = {}  # attributes that a message has set

    def take(self, numbers: Mapping[str, Number]) -> None:
        """Set the Trainer's progress and the learner's attributes, all or none.

        The message has been checked: sites let it set each of its attributes.
        """
        came: dict[str, Any] = {}
        for key, value in numbers.items():
            if key.startswith(ATTRIBUTE):
                full = key.removeprefix(ATTRIBUTE)
                flag = full.endswith(BOOL)
                came[full.removesuffix(BOOL)] = bool(value) if flag else value
        # After a restart the server has the first values again, so reset the attributes that its
        # message does not name.
        due = {full: self.first.get(full, ABSENT) for full in self.set} | came
        before = {full: self._value(full) for full in due}
        try:
            for full, value in due.items():
                self._give(full, value)
        except Exception:
            for full, value in before.items():
                self._give(full, value)
            raise
        self.set |= dict.fromkeys(came)
        loop = self.trainer.fit_loop
        for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
            progress.processed = progress.completed = int(numbers["epoch"])
        steps = loop.epoch_loop.manual_optimization.optim_step_progress
        steps.total.ready = steps.total.completed = int(numbers["steps"])
        limit = int(numbers["max_epochs"])
        loop.max_epochs = None if limit == FOREVER else limit

    def _value(self, full: str) -> Any:
        part, _, name = full.rpartition(".")
        return vars(self.learner.get_submodule(part)).get(name, ABSENT)

    def _give(self, full: str, value: Any) -> None:
        part, _, name = full.rpartition(".")
        module = self.learner.get_submodule(part)
        if value is not ABSENT:
            setattr(module, name, value)
        elif name in vars(module):
            delattr(module, name)


def may_be_sent(learner: nn.Module, full: str) -> bool:
    """Return whether a message may set the attribute of this name, such as ``"net.factor"``.

    The class of its module names it in ``sent_to_sites``, and it is a number or None, or not there
    yet.
    """
    part, _, name = full.rpartition(".")
    module = dict(learner.named_modules()).get(part)
    if full.startswith(".") or name not in names_of(module, "sent_to_sites"):
        return False
    assert module is not None
    # A property is not read, because it may compute anything.
    of_class = inspect.getattr_static(type(module), name, None)
    if of_framework(module, name) or not isinstance(of_class, NUMBERS):
        return False
    return isinstance(getattr(module, name, None), NUMBERS)


def names_of(module: object, declaration: str) -> tuple[str, ...]:
    """Return the names in ``sent_to_sites`` or ``at_sites`` of an object's class."""
    names = getattr(type(module), declaration, ())
    return (names,) if isinstance(names, str) else tuple(names)


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
