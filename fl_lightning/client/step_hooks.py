"""The learner's own hooks of a local step, run on the copy that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.errors import UserError, WrongKind
from fl_lightning.learner.layout import Layout, fill
from fl_lightning.learner.modules import overrides

AROUND_BATCHES = ("on_train_batch_start", "on_train_batch_end")
OF_GRADIENTS = (
    "on_before_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
)
# One tensor per parameter; None for a parameter that the loss does not depend on.
Gradients = tuple[Tensor | None, ...]


class StepHooks:
    """The hooks that a learner overrides, called in Lightning's order; they may change ``.grad``.

    The hooks of the backward pass get each gradient of the loss. Those before the optimizer's step
    get the gradient of the step, before methods correct it and ``clip_norm`` limits it.

    Args:
        names: the hooks that it overrides.
        parameters: parameters of the layout, in its order.
        optimizer: function that returns the clients' optimizer over the learner's parameters, to
            read.
    """

    def __init__(
        self,
        learner: Any,
        names: list[str],
        parameters: list[nn.Parameter],
        layout: Layout,
        optimizer: Callable[[], Optimizer | None],
    ) -> None:
        self.learner = learner
        self.names = names
        self.parameters = parameters
        self.layout = layout
        self.optimizer = optimizer
        self.of_gradients = [name for name in names if name in OF_GRADIENTS]
        self.before_step = [name for name in names if name in OF_GRADIENTS[-2:]]
        self._batch: tuple[Any, Any, Any] | None = None
        self._gradient: Any = None  # the step's gradient, for `on_train_batch_end`

    @classmethod
    def of(cls, learner: Any, *rest: Any) -> StepHooks | None:
        """Return the learner's hooks; None if it has none, so that its steps cost nothing."""
        names = [name for name in (*AROUND_BATCHES, *OF_GRADIENTS) if overrides(learner, name)]
        return cls(learner, names, *rest) if names else None

    def batch_start(self, batch: Any, index: Any) -> None:
        if "on_train_batch_start" not in self.names:
            return
        if self.learner.on_train_batch_start(batch, index) == -1:
            raise UserError(
                f"learner {type(self.learner).__name__}: on_train_batch_start returned -1, which "
                "ends an epoch in plain training. In a federated run a client's number of local "
                "steps is fixed before the round. Set local_steps or local_epochs instead."
            )

    def backward(self, loss: Tensor, first: bool) -> Gradients:
        """Return ∇ℓ by parameter, after the hooks; ``first``: it is the first of this step."""
        learner = self.learner
        parameters = self.parameters
        if first and "on_before_zero_grad" in self.names:
            learner.on_before_zero_grad(self.optimizer())
        if not self.of_gradients:
            return differentiated(loss, parameters)
        clear(parameters)
        try:
            with torch.enable_grad():
                if "on_before_backward" in self.names:
                    learner.on_before_backward(loss)
                if "backward" in self.names:
                    learner.backward(loss)
                else:
                    loss.backward()
                if "on_after_backward" in self.names:
                    learner.on_after_backward()
            return taken(parameters)
        finally:
            clear(parameters)

    def before_optimizer_step(
        self, gradient: Any, missing: Sequence[int]
    ) -> tuple[Any, Sequence[int]]:
        """Return the gradient of the step ``(1, D)``, or one tensor per parameter, after the
        hooks, and the places of the parameters that have none.

        ``missing``: these places before the hooks.
        """
        if self.before_step:
            gradient, missing = self._after_hooks(gradient, missing)
        if "on_train_batch_end" in self.names:
            self._gradient = gradient
        return gradient, missing

    def _after_hooks(self, gradient: Any, missing: Sequence[int]) -> tuple[Any, Sequence[int]]:
        is_vector = isinstance(gradient, Tensor)
        gradients = self.layout.views(gradient.view(-1)) if is_vector else gradient
        try:
            for j, (parameter, g) in enumerate(zip(self.parameters, gradients, strict=True)):
                parameter.grad = None if j in missing else g
            with torch.enable_grad():
                if "on_before_optimizer_step" in self.names:
                    self.learner.on_before_optimizer_step(self.optimizer())
                if "configure_gradient_clipping" in self.names:
                    self.learner.configure_gradient_clipping(self.optimizer(), None, None)
            found = list(taken(self.parameters))
        finally:
            clear(self.parameters)
        # A hook may hold a parameter in this step by setting its gradient to None.
        without = [j for j, g in enumerate(found) if g is None]
        for j in set(without).intersection(missing):
            found[j] = gradients[j]
        changed = dense(tuple(found), self.parameters)
        if not is_vector:
            return changed, without
        # Views that were changed in place have changed the vector already.
        if any(new is not old for new, old in zip(changed, gradients, strict=True)):
            fill(gradients, changed)
        return gradient, without

    def batch_done(self, outputs: Any, loss: Tensor, batch: Any, index: Any) -> None:
        """Remember the arguments of ``on_train_batch_end``, which follows the optimizer's step."""
        if "on_train_batch_end" in self.names:
            results = dict(outputs) if isinstance(outputs, dict) else {}
            results["loss"] = loss.detach().clone()
            self._batch = (results, batch, index)

    def batch_end(self, missing: Sequence[int]) -> None:
        """Call ``on_train_batch_end`` with the ``.grad`` of the step.

        ``missing``: parameters without a gradient, by place.
        """
        if self._batch is None:
            return
        (*arguments,) = self._batch
        gradient = self._gradient
        self._batch = self._gradient = None
        is_vector = isinstance(gradient, Tensor)
        gradients = self.layout.views(gradient.view(-1)) if is_vector else gradient
        # If more batches of this step follow, the step has not been taken yet.
        gradients = [None] * len(self.parameters) if gradients is None else gradients
        try:
            for j, (parameter, g) in enumerate(zip(self.parameters, gradients, strict=True)):
                parameter.grad = None if j in missing else g
            self.learner.on_train_batch_end(*arguments)
        finally:
            clear(self.parameters)


def differentiated(
    loss: Tensor, parameters: Sequence[nn.Parameter], recording: bool = False
) -> Gradients:
    """Return ∇ℓ by parameter, None if ℓ does not depend on it; hooks on parameters are called.

    Args:
        recording: the step's operations are recorded. `backward` copies a gradient that is held
            elsewhere, as the recording does, and each replay would repeat the copies. So where
            `torch.autograd.grad` reaches the same gradients, it takes them without copies.
    """
    if not loss.requires_grad:
        raise WrongKind(
            "the loss of a local step has no gradient: training_step, or a method's local_loss, "
            "computes it under torch.no_grad() or detaches it"
        )
    # `training_step` may have left gradients, which plain training clears, too.
    clear(parameters)
    if recording and is_followed(loss, parameters):
        return torch.autograd.grad(loss, parameters, allow_unused=True)
    try:
        # `torch.autograd.grad` follows only the paths that it sees from ℓ to the parameters. A
        # function whose backward calls `backward` itself, such as reentrant checkpointing, hides
        # the parameters that it uses: their gradients would be missing without an error.
        loss.backward()
        return taken(parameters)
    finally:
        clear(parameters)


def is_followed(loss: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    """Tell whether `torch.autograd.grad` gives what `backward` gives.

    It does if no function on the way has a backward in Python, and no parameter has a hook.
    """
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):
        return False
    waiting = [loss.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return False
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return True


def taken(parameters: Sequence[nn.Parameter]) -> Gradients:
    return tuple(p.grad for p in parameters)


def dense(gradients: Gradients, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    """Return gradients, with zeros for parameters that have none."""
    pairs = zip(gradients, parameters, strict=True)
    return tuple(torch.zeros_like(p) if g is None else g for g, p in pairs)


def clear(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
