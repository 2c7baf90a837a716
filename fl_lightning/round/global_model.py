"""The learner's weights as the server's vector w, the evaluated model, and export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.errors import UserError
from fl_lightning.learner.buffers import buffer_values
from fl_lightning.learner.layout import Layout, flatten, tie, trainable
from fl_lightning.learner.modules import (
    REPLACED_IN_STEPS,
    deep_copied,
    lent_logs,
    lightning_modules,
    modes,
    overrides,
)
from fl_lightning.learner.parameters import (
    Slots,
    check_learner_parameters,
    check_precision,
    check_same_parameters,
    slots_of_parameters,
)
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO


@dataclass(frozen=True)
class RoundStart:
    """The model at the start of a round, until the round is committed.

    Args:
        w: ``(D,)``.
        evaluated: the evaluated model; None: w.
        buffers: the server's.
        optimizer: the server optimizer's state; None: unchanged, because it took no step.
        steps: Lightning's count of its steps.
    """

    w: Tensor
    evaluated: Tensor | None
    buffers: Mapping[str, Tensor]
    optimizer: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None


class GlobalModel:
    """The learner, whose parameters are views into one vector: the model that is evaluated and
    saved.

    ``as_buffers``: frozen parameters that the learner's steps write, which count as buffers.
    ``round_start``: the model at the start of the present round; None between rounds. ``config``:
    the arguments that ``load_from_checkpoint`` needs to build the learner again; empty: its own
    hyper-parameters.
    """

    def __init__(self, learner: Any) -> None:
        self.learner: Any = learner
        self.config: dict[str, Any] = {}
        self.as_buffers: tuple[str, ...] = ()
        self.round_start: RoundStart | None = None
        self._layout: Layout | None = None
        self._slots: Slots = []
        self._w: Tensor | None = None
        self._evaluated: Tensor | None = None

    @property
    def layout(self) -> Layout:
        self.build()
        assert self._layout is not None
        return self._layout

    @property
    def w(self) -> Tensor:
        self.build()
        assert self._w is not None
        return self._w

    @property
    def evaluated(self) -> Tensor:
        """The model ``(D,)`` that is evaluated and exported: w, unless a method changes that."""
        return self.w if self._evaluated is None else self._evaluated

    def hold(self, buffers: Mapping[str, Tensor]) -> None:
        """Begin a round, and remember the model that it may change; ``buffers``: copies of them."""
        check_same_parameters(self.learner, self._slots)
        self.round_start = RoundStart(self.w.detach(), self._evaluated, buffers)

    def committed(self) -> RoundStart:
        return self.round_start or RoundStart(self.w.detach(), self._evaluated, self.buffers())

    def build(self, again: bool = False) -> None:
        """Tie the parameters to one vector; ``again``: Lightning may have moved them."""
        if self._w is not None and not again:
            return
        parameters = [p for _, p in trainable(self.learner)]
        # The learner of an existing layout has been checked; a lazy parameter has no shape to
        # compare.
        if self._layout is None or [shape for _, shape in self._layout.values()] != [
            p.shape for p in parameters
        ]:
            check_learner_parameters(self.learner)
            self._layout = Layout(self.learner)
            self._w = None
            self._evaluated = None
        check_precision(self.learner)  # Lightning or a hook may have converted the parameters since
        if self._w is None or not self._is_tied(parameters):
            self._take_over(flatten([p.detach() for p in parameters]))
        self._slots = slots_of_parameters(self.learner.named_modules())
        tie(parameters, self._layout.views(self.evaluated.detach()))

    def _is_tied(self, parameters: Sequence[Tensor]) -> bool:
        assert self._layout is not None and self._w is not None
        first = parameters[0]
        if self._w.device != first.device or self._w.dtype != first.dtype:
            return False
        views = self._layout.views(self.evaluated.detach())
        return all(p.data_ptr() == v.data_ptr() for p, v in zip(parameters, views, strict=True))

    def _take_over(self, flat: Tensor) -> None:
        """Make the parameters' values ``(D,)`` the vector w."""
        if self._w is None:
            self._w = flat.clone().requires_grad_(True)
        elif self._evaluated is not None and torch.equal(flat, self._evaluated.to(flat)):
            # The parameters were moved to another device but not changed. The parameters hold the
            # evaluated model, which differs from w under partial averaging. So move w, too.
            self._w.data = self._w.detach().to(flat)
            self._evaluated = flat
        else:
            # Other code has assigned new weights to the learner; they are the model from now on.
            # The optimizer knows w by identity, so w stays and its data change.
            self._w.data = flat
            self._evaluated = None

    def outputs(self, vector: Tensor, x: Any, buffers: Mapping[str, Tensor]) -> Any:
        """Return what the learner's forward gives for ``x`` with the parameters ``vector`` ``(D,)``
        and these buffers, in evaluation mode; nothing of the learner changes.

        Raises:
            UserError: the learner has no forward.
        """
        if not overrides(self.learner, "forward"):
            raise UserError(
                f"server.outputs: {type(self.learner).__name__} has no forward. Write "
                "forward(self, x), which returns what the method needs, such as logits."
            )
        views: list[Any] = [_DenseGradient.apply(view) for view in self.layout.views(vector)]
        values = dict(zip(self.layout, views, strict=True))
        # Copies, because a forward may write its buffers.
        values |= {name: buffer.clone() for name, buffer in buffers.items()}
        if isinstance(x, Tensor):
            x = x.to(vector) if x.is_floating_point() else x.to(vector.device)
        before = modes(self.learner)
        self.learner.eval()
        try:
            return functional_call(self.learner, values, (x,))
        finally:
            for part, training in before:
                part.training = training

    def evaluate_at(self, vector: Tensor | None) -> None:
        if vector is None and self._evaluated is None:
            return
        self._evaluated = vector
        tie(self._laid_out(self.learner), self.layout.views(self.evaluated.detach()))

    def _laid_out(self, learner: nn.Module) -> list[nn.Parameter]:
        named = dict(learner.named_parameters())
        return [named[name] for name in self.layout]

    def buffers(self) -> dict[str, Tensor]:
        return buffer_values(self.learner, self.as_buffers)

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        set_buffers(self.learner, values, self.as_buffers)

    def move_to(self, w: Tensor, evaluated: Tensor | None, buffers: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            self.w.copy_(w)
        self.evaluate_at(evaluated)
        self.set_buffers(buffers)

    @property
    def described(self) -> dict[str, Any]:
        """Return the learner as its config describes it; empty: no config made it."""
        path = f"{type(self.learner).__module__}.{type(self.learner).__qualname__}"
        return {"class_path": path, "init_args": self.config} if self.config else {}

    def hyper_parameters(self, learner: Any = None) -> dict[str, Any]:
        """Return the arguments that ``load_from_checkpoint`` gives to the learner's class.

        The arguments have the keys that Lightning reads from a checkpoint.
        """
        learner = self.learner if learner is None else learner
        if self.config:
            return {"hyper_parameters": dict(self.config)}
        entries = {"hyper_parameters": dict(learner.hparams)}
        name = getattr(learner, "_hparams_name", None)
        return entries if name is None else {"hparams_name": name, **entries}

    def export(
        self,
        path: str | Path | None = None,
        trainer: Any = None,
        model: tuple[Tensor, Mapping[str, Tensor]] | None = None,
    ) -> Any:
        """Return a copy of the learner with the evaluated weights and buffers.

        Args:
            path: file to which the copy is also saved, as a checkpoint; None: it is not saved.
            trainer: the Trainer that the learner's ``on_save_checkpoint`` finds.
            model: weights ``(D,)`` and buffers, instead of the evaluated ones.
        """
        learner = self.copied_learner()
        weights, buffers = (self.evaluated.detach(), {}) if model is None else model
        views = [view.clone() for view in self.layout.views(weights)]
        tie(self._laid_out(learner), views)
        set_buffers(learner, buffers, self.as_buffers)
        if path is None:
            return learner
        saved: dict[str, Any] = {}
        if trainer is not None:
            saved |= {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
        saved |= {
            "pytorch-lightning_version": version("pytorch-lightning"),
            "state_dict": learner.state_dict(),
            **self.hyper_parameters(learner),
        }
        # The learner's own hook comes last, as in Lightning, so that it may change every entry.
        with _attached(learner, trainer):
            learner.on_save_checkpoint(saved)
        AtomicCheckpointIO().save_checkpoint(saved, path)
        return learner

    def __getstate__(self) -> dict[str, Any]:
        """Return learner, w and the evaluated model for a copy, each in its own memory."""
        w = self._w
        evaluated = self._evaluated
        buffers: dict[str, Tensor] = {}
        # A copy made within a round gets the model from the start of the round, which is not
        # committed yet.
        if self.round_start is not None:
            w = self.round_start.w
            evaluated = self.round_start.evaluated
            buffers = dict(self.round_start.buffers)
        return {
            "learner": self.copied_learner(),
            "config": self.config,
            "as_buffers": self.as_buffers,
            "buffers": buffers,
            "w": None if w is None else w.detach().clone(),
            "evaluated": None if evaluated is None else evaluated.detach().clone(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        GlobalModel.__init__(self, state["learner"])
        self.config = state["config"]
        self.as_buffers = state["as_buffers"]
        if state["w"] is not None:
            self.move_to(state["w"], state["evaluated"], state["buffers"])

    def copied_learner(self) -> Any:
        trainers = {
            id(part._trainer): None
            for part in lightning_modules(self.learner)
            if part._trainer is not None
        }
        # deepcopy does not copy the objects in its memo: a Trainer becomes None. Objects that an
        # engine lent to the learner for its steps are carried over, and removed below.
        lent = lent_logs(self.learner)
        learner = deep_copied(self.learner, {**trainers, **lent})
        for part in learner.modules() if lent else ():
            for name in [n for n in REPLACED_IN_STEPS if id(vars(part).get(n)) in lent]:
                del part.__dict__[name]
        for part in lightning_modules(learner):
            for name in REPLACED_IN_STEPS:
                part.__dict__.pop(name, None)
        return learner


class _DenseGradient(torch.autograd.Function):
    """The identity; an embedding's gradient may be sparse, which a view cannot pass on."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.to_dense()


def set_buffers(learner: Any, values: Mapping[str, Tensor], as_buffers: tuple[str, ...]) -> None:
    """Copy values into a learner's buffers, and into frozen parameters ``as_buffers``, by name."""
    for name, buffer in learner.named_buffers():
        if name in values:
            buffer.copy_(values[name])
    for name, parameter in learner.named_parameters() if as_buffers else ():
        if name in as_buffers and name in values:
            parameter.data.copy_(values[name])


@contextmanager
def _attached(learner: Any, trainer: Any) -> Iterator[None]:
    parts = [(part, part._trainer) for part in lightning_modules(learner)]
    for part, _ in parts:
        part._trainer = trainer
    try:
        yield
    finally:
        for part, own_trainer in parts:
            part._trainer = own_trainer
