"""Takes a client's steps on copies of the learner before round 0: do they work, and what state do
they leave?

It is impossible to find all state of a Python object. So the results decide: a client that trains
after another one has to give the same bits and the same attributes as before it. A value that each
step writes before it reads it (a cache) passes. A value that continues from client to client does
not pass, wherever it is stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fl_lightning.client.client_trainer import add_error_note
from fl_lightning.client.flat_learner import FlatLearner
from fl_lightning.client.step_hooks import clear
from fl_lightning.engines.engine import intra_op_threads
from fl_lightning.engines.engine_context import LearnerCopies
from fl_lightning.engines.trials.dry_run import DryRun
from fl_lightning.errors import UserError
from fl_lightning.learner.attributes import Attributes, of_framework
from fl_lightning.learner.buffers import buffer_values
from fl_lightning.learner.layout import same_bits, trainable
from fl_lightning.learner.modules import lightning_base
from fl_lightning.machine.random_state import RandomState

# Number of a client's steps that are tried if frozen parameters may be written, and if clients are
# to train in parallel. It is a number and not a time, because the result decides about bits.
FROZEN_STEPS = 20
PROOF_STEPS = 30
DRAWS = "its training_step draws random numbers (dropout, say)"
READS = "its data set draws random numbers when a batch is read"
UNSEEDED = (
    "the data give another batch when the same one is read again: they draw from something that "
    "the run cannot seed, so a resumed run does not have the bits of one that was never "
    "interrupted. Let the dataset and its collate function draw from torch's, NumPy's or Python's "
    "global generator, or keep a torch.Generator, numpy.random.Generator or random.Random"
)


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
        UserError: the step assigns to a trainable parameter's ``data``.
        Exception: from the learner or the data, with a note about the place.
    """
    context = copies.context
    client = context.cohort.tried(0)[0]
    learner = context.learner
    name = type(learner).__name__
    try:
        copy = DryRun(copies).copy
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
    before.restore()
    clear([p for _, p in trainable(learner)])
    try:
        if any(not p.requires_grad for p in copy.learner.parameters()):
            with intra_op_threads(1):
                DryRun(copies).run(client, min(context.cohort.steps(client), FROZEN_STEPS))
            written = frozen_that_changed(learner, copy.learner)
            copies.treat_as_buffers(tuple(dict.fromkeys((*copies.as_buffers, *written))))
            before.restore()
        one_by_one = what_clients_share(copies, drawn)
    except UserError:
        raise
    except Exception as error:
        if context.hooks_first:
            text = f"a step before round 0 fails ({type(error).__name__}: {error})"
            return FirstSteps(untried=text)
        add_error_note(error, where(error, client, batch))
        raise
    finally:
        before.restore()
        copy.reset()
    check_tied(copy)
    check_apart(learner)
    if held_once := context.held_once(copy.learner):
        one_by_one = Reason(held_once)
    untrained = len(copy.missing) == len(copy.parameters)
    return FirstSteps(one_by_one, buffers=buffers_that_changed(copies, copy), untrained=untrained)


def first_batch(copies: LearnerCopies, client: int) -> Any:
    context = copies.context
    # `list` reads to the end, so that a loader that reads ahead has nothing left to read.
    batches = context.work.data.client_batches(client, 0, 1, device=context.w.device)
    return next(iter(list(batches)))


def what_clients_share(
    copies: LearnerCopies, drawn: str = "", proof: bool = False
) -> Reason | None:
    """Return why a client's steps before and after others' rule out parallel training; None: they
    allow it.

    Args:
        drawn: what is known to draw random numbers; empty: nothing so far.
        proof: take more steps, and the later ones on a second copy, as another worker would.
    """
    context = copies.context
    ids = context.cohort.tried(0)
    steps = min(context.cohort.steps(ids[0]), PROOF_STEPS) if proof else 1
    before = RandomState(context.w)
    one = two = DryRun(copies, 0, draws=bool(drawn))
    at_first = Attributes(one.copy.learner)
    try:
        with intra_op_threads(1):
            first = one.run(ids[0], steps)
            after_one = Attributes(one.copy.learner)
            changed = at_first.changed(after_one)
            if proof:
                late = set(frozen_that_changed(context.learner, one.copy.learner))
                if late := late - set(copies.as_buffers):
                    return Reason(f"its training_step changes {min(late)}, but not from the start")
                # The second copy shares the frozen parameters with the learner, so it runs after
                # that check.
                two = DryRun(copies, 1, draws=bool(drawn))
            two.run(ids[-1], 1)
            if proof:
                # If something happens late in a round, it happens to the client with the most
                # steps.
                largest = context.largest()
                two.run(largest, min(context.cohort.steps(largest), PROOF_STEPS))
            second = two.run(ids[0], steps)
        if not drawn and before.drawn_since():
            before.restore()
            return what_clients_share(copies, DRAWS, proof)
        if wrote := one.wrote or two.wrote:
            return writes(one.copy.learner, wrote)
        kept = after_one.changed(Attributes(two.copy.learner))
        if proof:  # two copies may differ in what no step changes
            kept = [name for name in kept if name in changed]
        if kept:
            text = f"its training_step changes {kept[0]}, which goes on from client to client"
            return Reason(text, keeps=True)
        if read := read_between_rounds(one.copy.learner, changed):
            text = f"its training_step changes {read[0]}, which hooks between rounds may read"
            return Reason(text, keeps=True)
        # GPU kernels need not repeat their bits, so other bits of one copy say nothing of it.
        if (proof or not context.w.is_cuda) and not same(first, second):
            text = "a client's steps leave other bits when another client comes first"
            return Reason(text, keeps=True)
        return Reason(drawn, draws=True) if drawn else None
    finally:
        before.restore()
        for trial in (one, two):
            trial.copy.reset()


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
    """Return those of these attributes that are a LightningModule's own.

    Its hooks between clients' steps, such as validation, have the global model, and would find
    there what no client's step has set.
    """
    parts = {place: part for place, part in learner.named_modules() if lightning_base(part)}
    found = []
    for full in names:
        place, _, name = full.rpartition(".")
        if place in parts and not of_framework(parts[place], name):
            found.append(full)
    return found


def same_batch(one: Any, other: Any) -> bool:
    """Return whether the numbers in two batches' tensors and arrays are the same."""
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=False)
    numbers = [pair for pair in pairs if all(map(is_numbers, pair))]
    return all(same_bits(torch.as_tensor(a), torch.as_tensor(b)) for a, b in numbers)


def is_numbers(leaf: object) -> bool:
    return isinstance(leaf, Tensor) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biufc")


def frozen_that_changed(learner: Any, copied: Any) -> tuple[str, ...]:
    """Return the names of frozen parameters of a copy that differ from the learner's."""
    own = dict(copied.named_parameters())
    frozen = ((name, p) for name, p in learner.named_parameters() if not p.requires_grad)
    return tuple(name for name, p in frozen if not same_bits(p.data, own[name].data))


def buffers_that_changed(copies: LearnerCopies, copy: FlatLearner) -> tuple[str, ...]:
    """Return the names of buffers that differ from the learner's."""
    before = buffer_values(copies.context.learner, copies.as_buffers)
    changed = []
    for name, value in copy.buffers.items():
        known = name in before and same_bits(value, before[name])
        if not known and name not in copy.as_buffers:
            changed.append(name)
    return tuple(changed)


def check_tied(copy: FlatLearner) -> None:
    """Refuse a learner whose step replaces the tensor of a trainable parameter.

    Raises:
        UserError: it names the parameter.
    """
    views = copy.layout.views(copy.x.view(-1))
    for name, parameter, view in zip(copy.layout, copy.parameters, views, strict=True):
        if parameter.data_ptr() != view.data_ptr():
            raise UserError(
                f"learner {type(copy.learner).__name__}: its training_step assigns a new tensor to "
                f"the data of the trainable parameter {name}, so the parameter would no longer be "
                "trained. Change it in place (…data.copy_(…), …data.clamp_(…)), or freeze it "
                "(requires_grad_(False)) if only your code moves it."
            )


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


def described(batch: Any) -> str:
    """Return shape and type of a batch's tensors, with the keys of mappings.

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


def where(error: Exception, client: int, batch: Any) -> str:
    """Return the note about the place of a learner's error before round 0."""
    met = (
        "met before round 0, in a first local step on a copy: "
        f"client {client}'s first batch ({described(batch)}); nothing was started"
    )
    if isinstance(error, AttributeError):
        met += (
            ". A lambda or a closure that refers to the learner (a forward hook, say) does so in a "
            "copy too, so what it keeps is not the copy's: use a method in its place"
        )
    return met
