"""Gradients of single samples, for methods that reduce a step's samples themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from fl_lightning.client.flat_learner import FlatLearner
from fl_lightning.client.gradient_accumulation import StepBatches
from fl_lightning.client.step_hooks import dense, differentiated
from fl_lightning.errors import UserError
from fl_lightning.learner.layout import fill
from fl_lightning.learner.parameters import check_same_parameters, slots_of_parameters
from fl_lightning.machine.lightning import MisconfigurationException, extract_batch_size
from fl_lightning.round.client_group import LOSS

# The gradients of a part of a step take at most so many bytes.
PART_BYTES = 2**28


class StepAsForward(nn.Module):
    """A learner's ``training_step`` as a ``forward``, for ``functional_call``."""

    def __init__(self, learner: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.learner = learner
        self.step = step

    def forward(self, *arguments: Any) -> Any:
        slots = slots_of_parameters(self.learner)
        output = self.step(*arguments)
        # Check this here, because `functional_call` restores every replaced tensor afterwards.
        check_same_parameters(self.learner, slots)
        return output


class Samples:
    """A converted batch, cut into samples: tensors with one entry per sample in dimension 0.

    Everything else in the batch stays whole.
    """

    def __init__(self, learner: str, batch: Any) -> None:
        try:
            self.number = int(extract_batch_size(batch))
        except MisconfigurationException:
            raise UserError(
                f"learner {learner}: the number of samples in a batch cannot be read from the "
                "batch, and a method takes the gradient of each sample. Let a batch have tensors "
                "with one entry per sample in dimension 0."
            ) from None
        self.leaves, self.spec = tree_flatten(batch)
        self.cut = [
            isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == self.number
            for leaf in self.leaves
        ]

    def part(self, start: int, stop: int) -> list[Any]:
        """The leaves of these samples."""
        pairs = zip(self.leaves, self.cut, strict=True)
        return [leaf[start:stop] if cut else leaf for leaf, cut in pairs]

    def one(self, leaves: list[Any]) -> Any:
        """A batch of one sample, from the sample's own leaves without dimension 0."""
        pairs = zip(leaves, self.cut, strict=True)
        return tree_unflatten([leaf[None] if cut else leaf for leaf, cut in pairs], self.spec)


class SampleGradients:
    """Takes the gradients of single samples on a learner.

    Each pass begins with the buffers and the weights of the step, and what it writes to them is
    undone.

    Args:
        at_once: how many samples one call of ``vmap`` takes; 1: one after the other; None: as many
            as fit into memory.
    """

    def __init__(self, copy: FlatLearner, at_once: int | None) -> None:
        self.copy = copy
        self._step = StepAsForward(copy.learner, copy.step)
        fit = PART_BYTES // max(1, copy.x.nbytes)
        self.at_once = max(2, fit) if at_once is None else at_once

    def of(self, batch: Any, step: Any) -> Iterator[Tensor]:
        """Yield the gradients ``(1, b, D)`` of the step's samples, in order; afterwards the step's
        numbers are logged. Without samples nothing is called. The next part reuses the memory.
        """
        copy = self.copy
        copy.missing = sorted(copy.unheld)
        logged: dict[str, list[Tensor]] = {}
        batches, first = batch if isinstance(batch, StepBatches) else ([batch], step)
        for index, one in enumerate(batches, first):
            if one is None:
                continue
            copy.logging = True
            copy.present.index = index
            if copy.convert is not None:
                one = copy.convert(copy.learner, one)
            samples = Samples(type(copy.learner).__name__, one)
            for start in range(0, samples.number, self.at_once):
                stop = min(start + self.at_once, samples.number)
                leaves = samples.part(start, stop)
                if self.at_once == 1:
                    gradients, values = self._alone(samples, leaves, index)
                else:
                    gradients, values = self._together(samples, leaves, index)
                yield gradients
                for name, numbers in values.items():
                    logged.setdefault(name, []).append(numbers)
        for name, parts in logged.items():
            copy.logs.add(name, [reduced(torch.cat(parts), copy.logs.kinds.get(name))])

    def _alone(
        self, samples: Samples, leaves: list[Any], index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient ``(1, 1, D)`` of one sample, and the numbers that it logs, each ``(1,)``."""
        copy = self.copy
        pairs = zip(leaves, samples.cut, strict=True)
        sample = samples.one([leaf[0] if cut else leaf for leaf, cut in pairs])
        point = copy.x.clone()
        buffers = {name: buffer.clone() for name, buffer in copy.buffers.items()}
        _, loss = copy.loss(sample, index)
        gradients = differentiated(loss, copy.parameters)
        copy.x.data.copy_(point)
        copy.load_buffers(buffers)
        if copy.keeps_loss:
            copy.logged[LOSS] = [loss.detach()]
        held = [None if j in copy.unheld else g for j, g in enumerate(gradients)]
        flat = torch.empty_like(copy.x)
        fill(copy.layout.views(flat.view(-1)), dense(tuple(held), copy.parameters))
        return flat[None], self._logged()

    def _together(
        self, samples: Samples, leaves: list[Any], index: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradients ``(1, b, D)`` of several samples, and the numbers that they log."""
        copy = self.copy
        number = next(len(leaf) for leaf, cut in zip(leaves, samples.cut, strict=True) if cut)
        # The learner works on copies, so that what a pass writes is undone.
        point = copy.x.detach().clone().view(-1)
        views = zip(copy.layout, copy.layout.views(point), strict=True)
        parameters = {"learner." + name: view for name, view in views}
        buffers = {
            "learner." + name: buffer.expand(number, *buffer.shape).clone()
            for name, buffer in copy.buffers.items()
        }

        def loss(
            parameters: dict[str, Tensor], buffers: dict[str, Tensor], leaves: list[Any]
        ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor]]]:
            copy.logged = {}
            sample = samples.one(leaves)
            arguments = (sample, index) if copy.takes_index else (sample,)
            with copy.forward_context():
                output = functional_call(self._step, {**parameters, **buffers}, arguments)
            value = copy.loss_in(output)
            if copy.keeps_loss:
                copy.logged[LOSS] = [value.detach()]
            return value, (value, self._logged())

        in_dims = (None, 0, [0 if cut else None for cut in samples.cut])
        gradients_of = vmap(grad(loss, has_aux=True), in_dims=in_dims, randomness="different")
        with torch.enable_grad():
            gradients, (losses, logged) = gradients_of(parameters, buffers, leaves)
        # Parameters passed to the function require no gradients here. If the loss requires one, it
        # was computed from the learner's own parameters.
        if losses.requires_grad:
            raise RuntimeError(
                "its training_step reads parameters that are not registered in its modules"
            )
        flat = [g.reshape(number, -1) for g in gradients.values()]
        for j in copy.unheld:
            flat[j].zero_()
        torch.cat(flat, dim=1, out=self._memory(number))
        return self._memory(number)[None], {name: v.reshape(-1) for name, v in logged.items()}

    def _memory(self, number: int) -> Tensor:
        """The same memory in each call: new memory would take longer than the gradients."""
        held = self.copy.sample_memory
        if held is None or len(held) < number:
            held = self.copy.sample_memory = self.copy.x.new_empty(number, self.copy.x.shape[1])
        return held[:number]

    def _logged(self) -> dict[str, Tensor]:
        """Return the values that one sample's pass logged, ``(1,)`` each, by name."""
        copy = self.copy
        values: dict[str, Tensor] = {}
        for name, several in copy.logged.items():
            numbers = torch.stack([value.reshape(()) for value in several])
            values[name] = reduced(numbers, copy.logs.kinds.get(name)).reshape(1)
        copy.logged = {}
        return values


def reduced(values: Tensor, kind: str | None) -> Tensor:
    """Several samples' numbers as the one that their batch logs: the mean, or the extreme."""
    values = values.double()
    if kind in ("max", "min"):
        return values.amax() if kind == "max" else values.amin()
    return values.mean()
