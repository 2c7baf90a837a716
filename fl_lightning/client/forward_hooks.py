"""Losses that look at models: what methods make of the passes of one learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fl_lightning.callback_list import CallbackList, checked_loss
from fl_lightning.client.flat_learner import FlatLearner
from fl_lightning.errors import UserError
from fl_lightning.learner.taps import Seen, Tap, tapped, taps_of, versions
from fl_lightning.machine.random_state import PassDraws, drawn_again
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.clients import Clients

INDICES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class ForwardHooks:
    """Changes outputs and losses of one learner's passes, as methods say, for ``begin``'s client.

    Args:
        copy: the learner that trains.
        draws: whether it may draw from the process's generators.
    """

    clients: Clients
    buffers: Mapping[str, Tensor]
    passes: PassDraws
    latest: Any  # batch, step and random state at the start of the latest pass; None: not in a step
    versions: list[int] | None  # of a client's first batch before its pass; None: in later steps

    def __init__(self, methods: CallbackList, copy: FlatLearner, draws: bool) -> None:
        self.methods = methods
        self.copy = copy
        self.draws = draws
        self.taps: dict[str, list[Tap]] = {}
        for method in methods.callbacks:
            name = type(method).__name__
            self.taps[name] = taps_of(name, method.taps, copy.learner)
        self.every = list(chain.from_iterable(self.taps.values()))
        self.owners = {}
        for call in methods["local_output"]:
            self.owners[type(call.__self__).__name__] = call  # type: ignore[attr-defined]
        check_owners(self.owners, self.every)
        self.latest = None

    def begin(self, group: ClientGroup) -> None:
        """From here on passes are this client's, until its round ends."""
        self.clients = Clients(group)
        self.buffers = group.round.buffers_of(group.ids[0])
        self.latest = None
        self.passes = PassDraws(self.copy.x, self.draws)
        group.seen_at = self.seen_at

    def end(self) -> None:
        """The client's steps are over."""
        self.latest = None

    def loss(self, batch: Any, step: Any, place: int = 0) -> tuple[Any, Tensor, Tensor]:
        """The step's output, the loss in it, and the loss that methods make of it.

        ``place``: of the batch in its step.
        """
        copy = self.copy
        self.clients._group.place_in_step = place
        before = self.passes.now()
        first = self.latest is None
        self.versions = versions(batch) if first else None
        self.latest = (batch, step, before)

        def change(tap: Tap, output: Any) -> Any:
            owner = self.owners.get(tap.method)
            if owner is None:
                return output
            return self.methods.call(owner, self.clients, tap.name, output, batch)

        with tapped(copy.learner, self.every, change) as seen:
            output, loss = copy.loss(batch, step)
        self.passes.passed(before)
        if first:
            self.check(seen, batch)
        changed = loss
        with copy.forward_context():
            for call in self.methods["local_loss"]:
                name = type(call.__self__).__name__  # type: ignore[attr-defined]
                here = seen.of(self.taps[name])
                changed = checked_loss(
                    call, self.methods.call(call, self.clients, changed, here, batch), loss
                )
        return output, loss, changed

    def check(self, seen: Seen, batch: Any) -> None:
        """Refuse taps without a value, and batches without class indices that a method reads."""
        seen.of(self.every)
        for method in self.methods.callbacks:
            if method.needs_classes:
                check_classes(type(method).__name__, batch)

    def seen_at(self, method: str, x: Tensor, training: bool) -> dict[str, Any]:
        """What a method's taps give at x, on the present batch; nothing is left of the pass."""
        if self.latest is None:
            raise RuntimeError(
                "clients.seen_at may be called only in local_loss and in the hooks of a local step"
            )
        taps = self.taps.get(method)
        if not taps:
            raise RuntimeError(f"{method} calls clients.seen_at, and its class declares no `taps`")
        group = self.clients._group
        group.count_pass(method)
        # A client's own buffers differ from other clients', so this step must not be replayed for
        # others.
        group.looked_up = group.looked_up or bool(group.round.own_buffers)
        copy = self.copy
        batch, step, before = self.latest
        if self.versions is not None and versions(batch) != self.versions:
            raise UserError(
                f"method: {method} looks at each batch a second time, and training_step changes "
                "its batch in place (x.mul_(…), say). Change a copy: x = x.clone()."
            )
        with (
            drawn_again(before, copy.x),
            copy.aside(x, self.buffers, training) as own,
            tapped(copy.learner, taps) as seen,
            copy.forward_context(),
            torch.no_grad(),
        ):
            copy.take_step(batch, step)
            # The next call writes to the same memory.
            return {name: kept(own, value) for name, value in seen.of(taps).items()}


def check_owners(owners: Mapping[str, Callable[..., Any]], taps: list[Tap]) -> None:
    """Refuse two methods that both change what a module gives, and one that names no output.

    Raises:
        UserError: with the methods and the module.
    """
    by_path: dict[str, Tap] = {}
    for tap in taps:
        if tap.method not in owners or tap.entering:
            continue
        other = by_path.setdefault(tap.path, tap)
        if other is not tap:
            raise UserError(
                f"method: {other} and {tap} both replace the output of the module {tap.path!r} "
                "(the hook `local_output`), but only one tap of a run may do that. Keep one of "
                "them."
            )
    for method in owners:
        if all(tap.method != method for tap in by_path.values()):
            raise UserError(
                f"method: {method} has the hook `local_output`, but its `taps` do not name the "
                "output of a module, such as {'logits': 'last'}."
            )


def check_classes(method: str, batch: Any) -> None:
    """Refuse batches whose ``batch[1]`` is not a vector of class indices.

    Raises:
        UserError: naming the method.
    """
    labels = batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None
    if isinstance(labels, Tensor) and labels.ndim == 1 and labels.dtype in INDICES:
        return
    found = f"batch[1] is a {type(labels).__name__}"
    if labels is None:
        found = f"a batch is a {type(batch).__name__} without batch[1]"
    elif isinstance(labels, Tensor):
        found = f"batch[1] has the shape {tuple(labels.shape)} and is {labels.dtype}"
    raise UserError(
        f"method: {method} takes batches (x, y) whose labels y are class indices, one integer per "
        f"sample, but here {found}. Mixed or soft labels are not accepted; use another method."
    )


def kept(memory: set[int], value: Any) -> Any:
    """A value whose tensors lie elsewhere than in that memory."""

    def apart(leaf: Any) -> Any:
        shares = isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in memory
        return leaf.clone() if shares else leaf

    return tree_map(apart, value)
