"""The learner's weights as the server's vector w, what is evaluated, and exporting it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.learner import (
    IN_STEPS,
    Layout,
    buffer_values,
    flatten,
    lent_logs,
    lightning_modules,
    tie,
    trainable,
    without_graphs,
)
from fl_lightning.parameters import (
    Slots,
    check_learner_parameters,
    check_same_parameters,
    slots_of_parameters,
)
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO


@dataclass(frozen=True)
class Found:
    """What a round found that is not committed yet.

    Args:
        w: ``(D,)``; ``evaluated``: what is evaluated, None: w; ``buffers``: the server's.
        optimizer: the server optimizer's state; None: as it is, since it took no step.
        steps: Lightning's count of its steps.
    """

    w: Tensor
    evaluated: Tensor | None
    buffers: Mapping[str, Tensor]
    optimizer: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None


class GlobalModel:
    """The learner, whose parameters are views into one vector: the one that is evaluated and saved.

    ``written``: frozen parameters that the learner's steps write, which are buffers to the run.
    ``found``: how the present round found it; None between rounds.
    ``config``: what ``load_from_checkpoint`` needs to build the learner anew; empty: its own
    hyper-parameters.
    """

    def __init__(self, learner: Any) -> None:
        self.learner: Any = learner
        self.config: dict[str, Any] = {}
        self.written: tuple[str, ...] = ()
        self.found: Found | None = None
        self._layout: Layout | None = None
        self._slots: Slots = []
        self._w: Tensor | None = None
        self._evaluated: Tensor | None = None

    @property
    def layout(self) -> Layout:
        """``{parameter name: (slice, shape)}`` of the global vector."""
        self.build()
        assert self._layout is not None
        return self._layout

    @property
    def w(self) -> Tensor:
        """The server's model ``(D,)``."""
        self.build()
        assert self._w is not None
        return self._w

    @property
    def evaluated(self) -> Tensor:
        """What is evaluated and exported ``(D,)``: w itself, except under partial averaging."""
        return self.w if self._evaluated is None else self._evaluated

    def hold(self, buffers: Mapping[str, Tensor]) -> None:
        """A round begins, which may change what it finds; ``buffers``: copies of them."""
        check_same_parameters(self.learner, self._slots)
        self.found = Found(self.w.detach(), self._evaluated, buffers)

    def committed(self) -> Found:
        """As the rounds that are over left it."""
        return self.found or Found(self.w.detach(), self._evaluated, self.buffers())

    def build(self, again: bool = False) -> None:
        """Lay the learner's parameters out in one vector and tie them to it; ``again``: they may
        lie elsewhere now.
        """
        if self._w is not None and not again:
            return
        parameters = [p for _, p in trainable(self.learner)]
        if self._layout is None or [s for _, s in self._layout.values()] != [
            p.shape for p in parameters
        ]:
            check_learner_parameters(self.learner)
            self._layout = Layout(self.learner)
            self._w = None
            self._evaluated = None
        first = parameters[0]
        views = [] if self._w is None else self._layout.views(self.evaluated.detach())
        tied = bool(views) and all(
            p.data_ptr() == v.data_ptr() for p, v in zip(parameters, views, strict=True)
        )
        if (
            not tied
            or self._w is None
            or self._w.device != first.device
            or self._w.dtype != first.dtype
        ):
            flat = flatten([p.detach() for p in parameters])
            if (
                self._w is not None
                and self._evaluated is not None
                and torch.equal(flat, self._evaluated.to(flat))
            ):
                # moved, to a GPU or from it
                self._w.data = self._w.detach().to(flat)
                self._evaluated = flat
            elif self._w is not None:
                self._w.data = flat
                self._evaluated = None
            else:
                self._w = flat.clone().requires_grad_(True)
        self._slots = slots_of_parameters(self.learner)
        tie(parameters, self._layout.views(self.evaluated.detach()))

    def evaluate_at(self, vector: Tensor | None) -> None:
        """Evaluate and export ``vector`` (None: w) from here on."""
        if vector is None and self._evaluated is None:
            return
        self._evaluated = vector
        tie([p for _, p in trainable(self.learner)], self.layout.views(self.evaluated.detach()))

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the learner's buffers by name."""
        return buffer_values(self.learner, self.written)

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the learner's buffers of these names."""
        set_buffers(self.learner, values, self.written)

    def move_to(self, w: Tensor, evaluated: Tensor | None, buffers: Mapping[str, Tensor]) -> None:
        """Set w, what is evaluated (None: w) and buffers, by value."""
        with torch.no_grad():
            self.w.copy_(w)
        self.evaluate_at(evaluated)
        self.set_buffers(buffers)

    def hyper_parameters(self, learner: Any = None) -> dict[str, Any]:
        """What ``load_from_checkpoint`` gives to the learner's class, under Lightning's keys of a
        checkpoint.
        """
        learner = self.learner if learner is None else learner
        if self.config:
            return {"hyper_parameters": dict(self.config)}
        hparams = learner.hparams
        if isinstance(hparams, dict):
            kept = {"hyper_parameters": dict(hparams)}
        else:
            kept = _of_omegaconf(hparams)
        name = getattr(learner, "_hparams_name", None)
        return kept if name is None else {"hparams_name": name, **kept}

    def export(
        self,
        path: str | Path | None = None,
        trainer: Any = None,
        model: tuple[Tensor, Mapping[str, Tensor]] | None = None,
    ) -> Any:
        """A copy of the learner with the evaluated weights and buffers; to ``path`` too, as a
        checkpoint.

        Args:
            trainer: what the learner's ``on_save_checkpoint`` finds as its own.
            model: weights ``(D,)`` and buffers in place of these.
        """
        learner = self.copied_learner()
        weights, buffers = (self.evaluated.detach(), {}) if model is None else model
        tie(
            [p for _, p in trainable(learner)],
            [v.clone() for v in self.layout.views(weights)],
        )
        set_buffers(learner, buffers, self.written)
        if path is not None:
            if trainer is None:
                done = {}
            else:
                done = {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
            saved = {
                **done,
                "pytorch-lightning_version": version("pytorch-lightning"),
                "state_dict": learner.state_dict(),
                **self.hyper_parameters(learner),
            }
            with _attached(learner, trainer):
                learner.on_save_checkpoint(saved)
            AtomicCheckpointIO().save_checkpoint(saved, path)
        return learner

    def __getstate__(self) -> dict[str, Any]:
        """A copy's learner, w and what is evaluated, each in memory of its own."""
        vectors = {"w": self._w, "evaluated": self._evaluated}
        if self.found is not None:
            vectors = {"w": self.found.w, "evaluated": self.found.evaluated}
        return {
            "learner": self.copied_learner(),
            "config": self.config,
            "buffers": {} if self.found is None else dict(self.found.buffers),
            **{
                name: None if vector is None else vector.detach().clone()
                for name, vector in vectors.items()
            },
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        GlobalModel.__init__(self, state["learner"])
        self.config = state["config"]
        if state["w"] is not None:
            self.move_to(state["w"], state["evaluated"], state["buffers"])

    def copied_learner(self) -> Any:
        """A copy that knows no Trainer and shares no memory."""
        trainers = {
            id(part._trainer): None
            for part in lightning_modules(self.learner)
            if part._trainer is not None
        }
        lent = lent_logs(self.learner)
        learner = copy.deepcopy(self.learner, {**trainers, **without_graphs(self.learner), **lent})
        for part in learner.modules() if lent else ():
            for name in [n for n in IN_STEPS if id(vars(part).get(n)) in lent]:
                del part.__dict__[name]
        for part in lightning_modules(learner):
            for name in IN_STEPS:
                part.__dict__.pop(name, None)
        return learner


def set_buffers(learner: Any, values: Mapping[str, Tensor], written: tuple[str, ...]) -> None:
    """Copy values into a learner's buffers of these names, and into the parameters ``written`` by
    its steps.
    """
    for name, buffer in learner.named_buffers():
        if name in values:
            buffer.copy_(values[name])
    for name, parameter in learner.named_parameters() if written else ():
        if name in written and name in values:
            parameter.data.copy_(values[name])


@contextmanager
def _attached(learner: Any, trainer: Any) -> Iterator[None]:
    """The learner and the LightningModules in it have this Trainer for a while."""
    before = [(part, part._trainer) for part in lightning_modules(learner)]
    for part, _ in before:
        part._trainer = trainer
    try:
        yield
    finally:
        for part, own in before:
            part._trainer = own


def _of_omegaconf(container: Any) -> dict[str, Any]:
    return {"hyper_parameters": container, "hparams_type": type(container)}
