"""A client's steps on copies of the learner before round 0: does it fit the data, what does it write and keep.

Nobody can find all state of a Python object. So that clients may train side by side is proven on the clients' real
steps: what can be reached from a copy is what it was, and a client that follows another one, on another copy, leaves
the same bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.engines.choice.batch_sizes import check_batch_sizes
from fl_lightning.engines.choice.caches import kept_among
from fl_lightning.engines.choice.trial import TRIED_STEPS, Trial, one_step, real_steps
from fl_lightning.engines.choice.workshop import Workshop
from fl_lightning.engines.random_state import RandomState
from fl_lightning.engines.replay.attributes import Attributes
from fl_lightning.engines.worker import tell_where
from fl_lightning.errors import UserError
from fl_lightning.learner import gradient_hook, lightning_modules, same_bits

SIZES = re.compile(
    r"shape|size|channel|out of bounds|out of range|dimension|must match", re.IGNORECASE
)
# of a client's steps, where a learner has frozen parameters that these might write
FROZEN_SECONDS = 1.0
UNSEEDED = (
    "the data give another batch when the same one is read again: they draw from something that the run cannot seed, "
    "so a resumed run does not have the bits of one that was never interrupted. Let the dataset draw from torch's, "
    "NumPy's or Python's global generator, or keep a torch.Generator, numpy.random.Generator or random.Random"
)
PACKAGE = __name__.split(".")[0]


@dataclass(frozen=True)
class Obstacle:
    """Why clients cannot train side by side; ``keeps``: the learner keeps something, which a buffer could.

    ``told``: what the user should know even where they do not.
    """

    reason: str
    keeps: bool = False
    told: str = ""


@dataclass(frozen=True)
class Rehearsal:
    """What a client's first steps showed.

    Args:
        written: frozen parameters that changed, by name.
        untried: why no step could be taken, where it could not.
        buffers: those that changed, by name.
    """

    obstacle: Obstacle | None = None
    written: tuple[str, ...] = ()
    untried: str = ""
    buffers: tuple[str, ...] = ()


def rehearse(workshop: Workshop) -> Rehearsal:
    """A step of round 0's first client; some more where the learner has frozen parameters.

    Raises:
        UserError: the batch is too small, a packaged network does not fit the data, or the step assigns to a trainable
            parameter's ``data``.
        Exception: from the learner or the data, with a note that says where.
    """
    setting, client = workshop.setting, workshop.setting.cohort.tried(0)[0]
    name = type(setting.learner).__name__
    try:
        trial = Trial(workshop)
    except Exception as error:
        return Rehearsal(untried=f"{name} cannot be copied ({type(error).__name__}: {error})")
    before, learner = RandomState(setting.w), trial.copy.learner
    batch = next(
        iter(list(setting.work.data.client_batches(client, 0, 1, device=setting.w.device)))
    )
    if before.drawn_since():
        return Rehearsal(Obstacle("its data set draws random numbers when a batch is read"))
    again = next(
        iter(list(setting.work.data.client_batches(client, 0, 1, device=setting.w.device)))
    )
    if not same_batch(batch, again):
        return Rehearsal(
            Obstacle(
                "its data set gives another batch when the same one is read again", told=UNSEEDED
            )
        )
    attributes = Attributes(learner)
    try:
        trial.run(client, 1)
        drew, changed = before.drawn_since(), attributes.changed()
        if changed:
            changed = kept_among(
                trial, attributes, client, min(setting.cohort.steps(client), TRIED_STEPS)
            )
        if any(not p.requires_grad for p in learner.parameters()):
            affordable = (
                int(FROZEN_SECONDS / one_step(workshop)) if setting.w.device.type == "cpu" else 0
            )
            trial.run(client, min(setting.cohort.steps(client), max(TRIED_STEPS, affordable)))
    except UserError:
        raise
    except Exception as error:
        if setting.hooks_first:
            return Rehearsal(
                untried=f"a step before round 0 fails ({type(error).__name__}: {error})"
            )
        check_batch_sizes(workshop, failed=True)
        raise explained(error, setting.learner, client, batch) from (
            error if explains(error, learner) else None
        )
    finally:
        before.restore()
        trial.copy.reset()
    check_tied(trial)
    written = frozen_that_changed(setting.learner, learner)
    buffers = buffers_that_changed(trial)
    if hooked := gradient_hook(setting.learner) or gradient_hook(learner):
        reason = f"its {hooked} has a hook on its gradient, which copies of the learner have not"
        return Rehearsal(Obstacle(reason), written, buffers=buffers)
    if setting.looking:
        callback = type(setting.looking[0]).__name__
        reason = f"the callback {callback} is called with each client's batch, and there is one of it for all"
        return Rehearsal(Obstacle(reason), written, buffers=buffers)
    if drew:
        return Rehearsal(
            Obstacle("its training_step draws random numbers (dropout, say)"),
            written,
            buffers=buffers,
        )
    if changed:
        reason = f"its training_step changes {changed}, which goes on from client to client"
        return Rehearsal(Obstacle(reason, keeps=True), written, buffers=buffers)
    return Rehearsal(written=written, buffers=buffers)


def unproven(workshop: Workshop) -> Obstacle | None:
    """What speaks against training clients side by side, over a client's steps on two copies; None: nothing does."""
    setting = workshop.setting
    ids = setting.cohort.tried(0)
    client, other = ids[0], ids[-1] if len(ids) > 1 else (ids[0] + 1) % setting.cohort.m
    one, two = Trial(workshop, 0), Trial(workshop, 1)
    steps, before = real_steps(workshop, client), RandomState(setting.w)
    attributes = Attributes(one.copy.learner)
    try:
        first = one.run(client, steps)
        two.run(other, min(2, setting.cohort.steps(other)))  # another order
        second = two.run(client, steps)
        if before.drawn_since():
            return Obstacle("its training_step draws random numbers (dropout, say)")
        if attributes.changed() and (changed := kept_among(one, attributes, client, steps)):
            return Obstacle(
                f"its training_step changes {changed}, which goes on from client to client",
                keeps=True,
            )
        if len(first) != len(second) or not all(map(same_bits, first, second)):
            return Obstacle(
                "a client's steps leave other bits when another client comes first", keeps=True
            )
        return None
    finally:
        before.restore()
        for trial in (one, two):
            trial.copy.reset()


def same_batch(one: Any, other: Any) -> bool:
    """Whether floating-point numbers and pixels of two batches are the same; others may tell who read them, or when."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=False)
    known = [(a, b) for a, b in pairs if isinstance(a, Tensor | np.ndarray) and type(a) is type(b)]
    numbers = [
        (torch.as_tensor(a), torch.as_tensor(b))
        for a, b in known
        if isinstance(a, Tensor) or a.dtype.kind in "fu"
    ]
    return all(
        same_bits(a, b) for a, b in numbers if a.is_floating_point() or a.dtype == torch.uint8
    )


def frozen_that_changed(learner: Any, copied: Any) -> tuple[str, ...]:
    """Names of frozen parameters that are not the learner's in its copy."""
    own = dict(copied.named_parameters())
    frozen = ((name, p) for name, p in learner.named_parameters() if not p.requires_grad)
    return tuple(name for name, p in frozen if not same_bits(p.data, own[name].data))


def buffers_that_changed(trial: Trial) -> tuple[str, ...]:
    """Names of buffers that are no longer what the trial's steps began with."""
    before = trial.buffers
    now = (
        (name, value)
        for name, value in trial.copy.buffers.items()
        if name not in trial.copy.written
    )
    return tuple(
        name for name, value in now if name not in before or not same_bits(value, before[name])
    )


def check_tied(trial: Trial) -> None:
    """Refuse a learner whose step makes a trainable parameter another tensor.

    Raises:
        UserError: with the parameter.
    """
    copy = trial.copy
    views = copy.layout.views(copy.x.view(-1))
    for name, parameter, view in zip(copy.layout, copy.parameters, views, strict=True):
        if parameter.data_ptr() != view.data_ptr():
            raise UserError(
                f"learner {type(copy.learner).__name__}: its training_step assigns another tensor to the trainable "
                f"parameter {name} (its data), which would then no longer be trained. Change it in place "
                f"(…data.copy_(…), …data.clamp_(…)), or freeze it (requires_grad_(False)) if only your code moves it."
            )


def explains(error: Exception, learner: Any) -> bool:
    """Whether an error is that a packaged network does not fit the data's sizes or classes."""
    packaged = all(
        type(part).__module__.split(".")[0] == PACKAGE for part in lightning_modules(learner)
    )
    return (
        packaged
        and isinstance(error, (RuntimeError, IndexError, ValueError))
        and bool(SIZES.search(str(error)))
    )


def explained(error: Exception, learner: Any, client: int, batch: Any) -> Exception:
    """The learner's own error with a note, or a UserError where a packaged network does not fit the data."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    shapes = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
    where = f"client {client}'s first batch ({shapes})"
    if not explains(error, learner):
        tell_where(
            error,
            f"met before round 0, in a first local step on a copy: {where}; nothing was started",
        )
        return error
    network = type(getattr(learner, "network", learner)).__name__
    labels = [t for t in tensors if not t.is_floating_point() and t.numel()]
    told = f", labels from {int(labels[-1].min())} to {int(labels[-1].max())}" if labels else ""
    return UserError(
        f"the network {network} does not fit the data: a step on {where}{told} says: "
        f"{str(error).strip().splitlines()[0]}. Choose the network's sizes and num_classes, or the data, so that they "
        "fit. Nothing was started."
    )
