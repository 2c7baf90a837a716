"""Takes a client's steps on copies of the learner before round 0: do they work, and what state do
they leave?

It is impossible to find all state of a Python object. So the results decide: a client that trains
after another one has to give the same bits and the same attributes as before it. A value that each
step writes before it reads it (a cache) passes. A value that continues from client to client does
not pass, wherever it is stored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.aggregation import metric_states
from fl_lightning.client.client_trainer import add_error_note
from fl_lightning.client.step_hooks import clear
from fl_lightning.engines.engine import intra_op_threads
from fl_lightning.engines.engine_context import LearnerCopies
from fl_lightning.engines.trials.batch_check import check_batch_sizes, first_line
from fl_lightning.engines.trials.dry_run import DryRun
from fl_lightning.errors import UserError
from fl_lightning.learner.attributes import Attributes
from fl_lightning.learner.layout import same_bits, trainable
from fl_lightning.learner.modules import lightning_modules
from fl_lightning.machine.random_state import RandomState

SIZES = re.compile(
    r"shape|size|channel|out of bounds|out of range|dimension|must match", re.IGNORECASE
)
# Number of a client's steps that are tried if frozen parameters may be written, and if clients are
# to train in parallel. It is a number and not a time, because the result decides about bits.
FROZEN_STEPS = 20
PROOF_STEPS = 30
# Prefixes of the names of hooks that run on the global model, between clients' steps.
BETWEEN = (
    *("on_train_epoch_", "on_train_start", "on_train_end", "on_fit_", "on_save_checkpoint"),
    *("on_validation_", "on_test_", "on_predict_", "validation_", "test_", "predict_"),
)
DRAWS = "its training_step draws random numbers (dropout, say)"
READS = "its data set draws random numbers when a batch is read"
UNSEEDED = (
    "the data give another batch when the same one is read again: they draw from something that "
    "the run cannot seed, so a resumed run does not have the bits of one that was never "
    "interrupted. Let the dataset and its collate function draw from torch's, NumPy's or Python's "
    "global generator, or keep a torch.Generator, numpy.random.Generator or random.Random"
)
PACKAGE = __name__.split(".")[0]


@dataclass(frozen=True)
class Reason:
    """Why clients cannot train side by side.

    Args:
        keeps: the learner keeps state from client to client, which a buffer could hold.
        draws: steps or data draw random numbers, and nothing else was found. Clients may then train
            in parallel in separate processes, because each process has its own generators.
        note: note for the user, even if clients do not train in parallel.
    """

    text: str
    keeps: bool = False
    note: str = ""
    draws: bool = False


@dataclass(frozen=True)
class FirstSteps:
    """The findings of a client's first steps.

    Args:
        one_by_one: why clients have to train one after the other, if they have to.
        untried: why no step could be taken, if none could.
        buffers: names of buffers that changed.
        untrained: whether the loss gave no gradient to any trainable parameter.
    """

    one_by_one: Reason | None = None
    untried: str = ""
    buffers: tuple[str, ...] = ()
    untrained: bool = False


def take_first_steps(copies: LearnerCopies) -> FirstSteps:
    """Take a step of round 0's first client before and after another client's; more steps for
    frozen weights.

    Frozen parameters that the steps write count as buffers of ``copies`` from now on. The number of
    steps is the same in every engine and machine. So a learner whose copies share some state (a
    global, a closure, its class) begins each run in the same way.

    Raises:
        UserError: the batch is too small, a packaged network does not fit the data, or the step
            assigns to a trainable parameter's ``data``.
        Exception: from the learner or the data, with a note about the place.
    """
    context = copies.context
    client = context.cohort.tried(0)[0]
    name = type(context.learner).__name__
    try:
        trial = DryRun(copies)
    except Exception as error:
        return FirstSteps(untried=f"{name} cannot be copied ({type(error).__name__}: {error})")
    before = RandomState(context.w)
    batch = first_batch(copies, client)
    drawn = READS if before.drawn_since() else ""
    # Reading again gives the same batch if the generators start from the same state.
    before.restore()
    if not same_batch(batch, first_batch(copies, client)):
        text = "its data set gives another batch when the same one is read again"
        return FirstSteps(Reason(text, note=UNSEEDED))
    clear([p for _, p in trainable(context.learner)])
    try:
        with intra_op_threads(1):
            if any(not p.requires_grad for p in trial.copy.learner.parameters()):
                trial.run(client, min(context.cohort.steps(client), FROZEN_STEPS))
                written = frozen_that_changed(context.learner, trial.copy.learner)
                copies.treat_as_buffers(tuple(dict.fromkeys((*copies.as_buffers, *written))))
                trial = DryRun(copies)
            one_by_one = what_first_steps_keep(trial, before, drawn)
    except UserError:
        raise
    except Exception as error:
        if context.hooks_first:
            text = f"a step before round 0 fails ({type(error).__name__}: {error})"
            return FirstSteps(untried=text)
        check_batch_sizes(copies, failed=True)
        raise explained(error, context.learner, client, batch) from (
            error if explains(error, context.learner) else None
        )
    finally:
        before.restore()
        trial.copy.reset()
    check_tied(trial)
    check_metrics(trial)
    check_apart(context.learner)
    if held_once := context.held_once(trial.copy.learner):
        one_by_one = Reason(held_once)
    untrained = len(trial.copy.missing) == len(trial.copy.parameters)
    return FirstSteps(one_by_one, buffers=buffers_that_changed(trial), untrained=untrained)


def first_batch(copies: LearnerCopies, client: int) -> Any:
    context = copies.context
    # `list` reads to the end, so that a loader that reads ahead has nothing left to read.
    batches = context.work.data.client_batches(client, 0, 1, device=context.w.device)
    return next(iter(list(batches)))


def what_first_steps_keep(trial: DryRun, before: RandomState, drawn: str) -> Reason | None:
    """Take a client's first step before and after another client's, and compare.

    ``drawn``: what is known to draw random numbers; empty: nothing so far.
    """
    if drawn:
        trial = DryRun(trial.copies, draws=True)
    ids = trial.context.cohort.tried(0)
    at_first = Attributes(trial.copy.learner)
    bits = trial.run(ids[0], 1)
    after_one = Attributes(trial.copy.learner)
    trial.run(ids[-1], 1)
    bits_again = trial.run(ids[0], 1)
    if not drawn and before.drawn_since():
        before.restore()
        return what_first_steps_keep(trial, before, DRAWS)
    if trial.wrote:
        return writes(trial.copy.learner, trial.wrote)
    kept = after_one.changed(Attributes(trial.copy.learner))
    kept += read_between_rounds(trial.copy.learner, at_first.changed(after_one))
    if kept:
        return carried_over(kept[0])
    # GPU kernels need not repeat their bits, so other bits there say nothing about the learner.
    if not trial.context.w.is_cuda and not same(bits, bits_again):
        return Reason("a client's step leaves other bits when another client comes first", True)
    return Reason(drawn, draws=True) if drawn else None


def compare_two_copies(copies: LearnerCopies, drawn: str = "") -> Reason | None:
    """Return why steps on two copies rule out parallel training; None: they allow it.

    ``drawn``: what is known to draw random numbers; empty: nothing so far.
    """
    context = copies.context
    ids = context.cohort.tried(0)
    steps = min(context.cohort.steps(ids[0]), PROOF_STEPS)
    before = RandomState(context.w)
    one = DryRun(copies, 0, draws=bool(drawn))
    at_first = Attributes(one.copy.learner)
    trials = [one]
    try:
        with intra_op_threads(1):
            first = one.run(ids[0], steps)
            after_one = Attributes(one.copy.learner)
            changed = at_first.changed(after_one)
            late = set(frozen_that_changed(context.learner, one.copy.learner))
            if late := late - set(copies.as_buffers):
                return Reason(f"its training_step changes {min(late)}, but not from the start")
            # The second copy shares the frozen parameters with the learner, so it runs after that
            # check.
            two = DryRun(copies, 1, draws=bool(drawn))
            trials.append(two)
            two.run(ids[-1], 1)
            # If something happens late in a round, it happens to the client with the most steps.
            largest = context.largest()
            two.run(largest, min(context.cohort.steps(largest), PROOF_STEPS))
            second = two.run(ids[0], steps)
        if not drawn and before.drawn_since():
            before.restore()
            return compare_two_copies(copies, DRAWS)
        if wrote := one.wrote or two.wrote:
            return writes(one.copy.learner, wrote)
        kept = set(after_one.changed(Attributes(two.copy.learner))) & set(changed)
        kept.update(read_between_rounds(one.copy.learner, changed))
        if kept:
            return carried_over(min(kept))
        if not same(first, second):
            text = "a client's steps leave other bits when another client comes first"
            return Reason(text, keeps=True)
        return Reason(drawn, draws=True) if drawn else None
    finally:
        before.restore()
        for trial in trials:
            trial.copy.reset()


def carried_over(name: str) -> Reason:
    text = f"its training_step changes {name}, which goes on from client to client"
    return Reason(text, keeps=True)


def writes(learner: object, place: str) -> Reason:
    """Return the reason of a step that writes to an object of the run through its Trainer."""
    text = f"its training_step writes to {place}"
    return Reason(
        text,
        note=f"learner {type(learner).__name__}: {text}, so clients train one after the other in "
        "the run's own process. If the run has several processes, each writes only of its own "
        "clients",
    )


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(same_bits, one, other))


def read_between_rounds(learner: Any, names: list[str]) -> list[str]:
    """Return those attributes that a hook uses which runs on the global model, and not in a
    step.
    """
    spoken: set[str] = set()
    for part in lightning_modules(learner):
        for kind in type(part).__mro__:
            for function in vars(kind).values():
                if isinstance(function, FunctionType) and function.__name__.startswith(BETWEEN):
                    spoken.update(function.__code__.co_names)
    return [name for name in names if name.rpartition(".")[2] in spoken]


def same_batch(one: Any, other: Any) -> bool:
    """Return whether the numbers in two batches' tensors and arrays are the same."""
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=False):
        if type(a) is not type(b) or not isinstance(a, Tensor | np.ndarray):
            continue
        if isinstance(a, np.ndarray):
            # Arrays of text or objects hold no numbers to compare.
            if a.dtype.kind in "biufc" and not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc"):
                return False
        elif not same_bits(a, b):
            return False
    return True


def frozen_that_changed(learner: Any, copied: Any) -> tuple[str, ...]:
    """Return the names of frozen parameters of a copy that differ from the learner's."""
    own = dict(copied.named_parameters())
    frozen = ((name, p) for name, p in learner.named_parameters() if not p.requires_grad)
    return tuple(name for name, p in frozen if not same_bits(p.data, own[name].data))


def buffers_that_changed(trial: DryRun) -> tuple[str, ...]:
    """Return the names of buffers that differ from the trial's start."""
    before = trial.buffers
    changed = []
    for name, value in trial.copy.buffers.items():
        known = name in before and same_bits(value, before[name])
        if not known and name not in trial.copy.as_buffers:
            changed.append(name)
    return tuple(changed)


def check_tied(trial: DryRun) -> None:
    """Refuse a learner whose step replaces the tensor of a trainable parameter.

    Raises:
        UserError: it names the parameter.
    """
    copy = trial.copy
    views = copy.layout.views(copy.x.view(-1))
    for name, parameter, view in zip(copy.layout, copy.parameters, views, strict=True):
        if parameter.data_ptr() != view.data_ptr():
            raise UserError(
                f"learner {type(copy.learner).__name__}: its training_step assigns a new tensor to "
                f"the data of the trainable parameter {name}, so the parameter would no longer be "
                "trained. Change it in place (…data.copy_(…), …data.clamp_(…)), or freeze it "
                "(requires_grad_(False)) if only your code moves it."
            )


def check_metrics(trial: DryRun) -> None:
    """Refuse a metric of the learner that cannot be merged over clients, or be logged.

    Raises:
        UserError: it names the metric.
    """
    states = dict(enumerate(trial.metrics))
    learner = trial.copy.learner
    for name, value in metric_states.merged_into(learner, states).items():
        each = [alone(learner, state, name) for state in states.values()]
        if math.isnan(value) and not any(map(math.isnan, each)):
            metric = metric_states.metrics_of(learner)[states[0].names[name]]
            raise UserError(
                f"learner {type(learner).__name__}: its metric {type(metric).__name__}, logged as "
                f"{name}, is NaN after the states of two clients were merged, although each "
                "client's value is a number. Log a number per step, or a metric whose states can "
                "be merged."
            )


def alone(learner: Any, state: metric_states.MetricStates, name: str) -> float:
    """Return the value that a metric has of one client."""
    return metric_states.merged_into(learner, {0: state}, lambda text: None).get(name, math.nan)


def check_apart(learner: Any) -> None:
    """Refuse a learner whose copy took steps that computed with the learner's own parameters.

    The gradients of its copy's losses are then in these parameters, where no other step has run.

    Raises:
        UserError: it names the parameter.
    """
    for name, parameter in trainable(learner):
        if parameter.grad is not None:
            kind = type(learner).__name__
            raise UserError(
                f"learner {kind}: a step of a copy of it computes with {name} of the learner that "
                "was given, and the run trains and measures clients on copies. A function that "
                "was made of the learner refers to it (a lambda, a closure, "
                "torch.compile(self.forward)), or a global does. Write a method in the place of "
                "the function, and compile a module by self.net.compile()."
            )


def explains(error: Exception, learner: Any) -> bool:
    """Return whether an error shows that a packaged network does not fit the data's sizes or
    classes.
    """
    parts = lightning_modules(learner)
    packaged = all(type(part).__module__.split(".")[0] == PACKAGE for part in parts)
    of_sizes = isinstance(error, RuntimeError | IndexError | ValueError)
    return packaged and of_sizes and bool(SIZES.search(str(error)))


def described(batch: Any) -> str:
    """Return shape and type of a batch's tensors, with the keys of mappings.

    >>> import torch
    >>> described((torch.zeros(4, 2), {"mask": torch.ones(4, dtype=torch.bool)}))
    '(4, 2) float32, mask: (4,) bool'
    """
    if isinstance(batch, Tensor):
        return f"{tuple(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"
    if isinstance(batch, Mapping):
        parts = {key: described(value) for key, value in batch.items()}
        return ", ".join(f"{key}: {text}" for key, text in parts.items() if text)
    if isinstance(batch, list | tuple):
        return ", ".join(filter(None, map(described, batch)))
    return ""


def explained(error: Exception, learner: Any, client: int, batch: Any) -> Exception:
    """Return the learner's own error with a note, or a UserError if a packaged network is the
    cause.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    where = f"client {client}'s first batch ({described(batch)})"
    if not explains(error, learner):
        met = f"met before round 0, in a first local step on a copy: {where}; nothing was started"
        if isinstance(error, AttributeError):
            met += (
                ". A lambda or a closure that refers to the learner (a forward hook, say) does so "
                "in a copy too, so what it keeps is not the copy's: use a method in its place"
            )
        add_error_note(error, met)
        return error
    network = type(getattr(learner, "network", learner)).__name__
    labels = [t for t in tensors if not t.is_floating_point() and t.numel()]
    told = f", labels from {int(labels[-1].min())} to {int(labels[-1].max())}" if labels else ""
    return UserError(
        f"the network {network} does not fit the data: a step on {where}{told} says: "
        f"{first_line(error)}. Choose the network's sizes and num_classes, or the data, so that "
        "they fit. Nothing was started."
    )
