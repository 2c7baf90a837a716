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
from fl_lightning.client.linear_factors import Gradients, Recorder, linear_layers
from fl_lightning.client.step_hooks import dense, differentiated
from fl_lightning.errors import UserError
from fl_lightning.learner.layout import fill
from fl_lightning.learner.parameters import check_same_parameters, slots_of_parameters
from fl_lightning.machine.lightning import MisconfigurationException, extract_batch_size
from fl_lightning.machine.random_state import RandomState
from fl_lightning.round.client_group import LOSS

# The gradients of a part of a step take at most so many bytes.
PART_BYTES = 2**28


class StepAsForward(nn.Module):
    """A learner's ``training_step`` as a ``forward``, for ``functional_call``."""

    def __init__(self, learner: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.learner = learner
        self.step = step
        self._parts = list(learner.named_modules())

    def forward(self, *arguments: Any) -> Any:
        slots = slots_of_parameters(self._parts)
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
        factored: whether the gradients of linear layers may come as factors.
    """

    def __init__(self, copy: FlatLearner, at_once: int | None, factored: bool = False) -> None:
        self.copy = copy
        if copy.factored is None and factored:
            copy.factored = linear_layers(copy.learner, copy.layout, copy.unheld)
        self.factored = factored
        self._step = StepAsForward(copy.learner, copy.step)
        fit = PART_BYTES // max(1, copy.x.nbytes)
        self.at_once = max(2, fit) if at_once is None else at_once

    def of(self, batch: Any, step: Any) -> Iterator[Gradients]:
        """Yield the gradients of the step's samples, in order; afterwards the step's numbers are
        logged. Without samples nothing is called. The next part reuses the memory.
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
    ) -> tuple[Gradients, dict[str, Tensor]]:
        """The gradient of one sample, and the numbers that it logs, each ``(1,)``."""
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
        return Gradients(flat, [slice(0, copy.layout.size)], []), self._logged()

    def _together(
        self, samples: Samples, leaves: list[Any], index: int
    ) -> tuple[Gradients, dict[str, Tensor]]:
        """The gradients of several samples, and the numbers that they log."""
        copy = self.copy
        layers = copy.factored if self.factored and copy.factored else []
        before = RandomState(copy.x) if layers else None
        while True:
            recorder = Recorder(layers)
            taken = self._pass(samples, leaves, index, recorder)
            if taken is not None:
                return taken
            # Take the pass again without the layers that did not fit, as later steps do.
            assert before is not None
            before.restore()
            missing = recorder.missing()
            layers = copy.factored = [each for j, each in enumerate(layers) if j not in missing]

    def _pass(
        self, samples: Samples, leaves: list[Any], index: int, recorder: Recorder
    ) -> tuple[Gradients, dict[str, Tensor]] | None:
        """As ``_together``, once; None if the pass uses one of the layers in another way."""
        copy = self.copy
        number = next(len(leaf) for leaf, cut in zip(leaves, samples.cut, strict=True) if cut)
        # The learner works on copies, so that what a pass writes is undone.
        point, views = copy.vector("samples")
        point.copy_(copy.x.detach())
        names = ["learner." + name for name in copy.layout]
        apart = recorder.places
        parameters = {name: views[j] for j, name in enumerate(names) if j not in apart}
        # Such a parameter is used by its layer only, or the loss requires a gradient out here.
        fixed = {names[j]: views[j].detach().requires_grad_() for j in apart}
        buffers = {
            "learner." + name: buffer.expand(number, *buffer.shape).clone()
            for name, buffer in copy.buffers.items()
        }
        zeros = [copy.x.new_zeros(number, 1, len(views[layer.weight])) for layer in recorder.layers]

        def loss(
            parameters: dict[str, Tensor],
            zeros: list[Tensor],
            buffers: dict[str, Tensor],
            leaves: list[Any],
        ) -> tuple[Tensor, tuple[Tensor, dict[str, Tensor], dict[int, Tensor]]]:
            copy.logged = {}
            sample = samples.one(leaves)
            arguments = (sample, index) if copy.takes_index else (sample,)
            recorder.begin(zeros)
            with copy.forward_context():
                output = functional_call(self._step, {**parameters, **fixed, **buffers}, arguments)
            value = copy.loss_in(output)
            if copy.keeps_loss:
                copy.logged[LOSS] = [value.detach()]
            return value, (value, self._logged(), recorder.inputs)

        in_dims = (None, 0, 0, [0 if cut else None for cut in samples.cut])
        derivative = grad(loss, argnums=(0, 1), has_aux=True)
        gradients_of = vmap(derivative, in_dims=in_dims, randomness="different")
        with torch.enable_grad(), recorder.on(views):
            gradients, (losses, logged, inputs) = gradients_of(parameters, zeros, buffers, leaves)
        if not apart:
            check_registered(losses)
        if losses.requires_grad or recorder.missing():
            recorder.unfit |= set(range(len(zeros))) if losses.requires_grad else set()
            return None
        values = {name: v.detach().reshape(-1) for name, v in logged.items()}
        pairs = [(inputs[j].detach(), g.detach()) for j, g in enumerate(gradients[1])]
        whole = [g.detach().reshape(number, -1) for g in gradients[0].values()]
        return self._joined(recorder, pairs, whole, number), values

    def _joined(
        self,
        recorder: Recorder,
        pairs: list[tuple[Tensor, Tensor]],
        whole: list[Tensor],
        number: int,
    ) -> Gradients:
        """Return gradients from the layers' inputs and output gradients, and from all others."""
        copy = self.copy
        where = [place for place, _ in copy.layout.values()]
        factors = []
        for layer, pair in zip(recorder.layers, pairs, strict=True):
            bias = None if layer.bias is None else where[layer.bias]
            a, g = (each.reshape(number, -1).double() for each in pair)
            factors.append((where[layer.weight], bias, a, g))
        rest = [j for j in range(len(where)) if j not in recorder.places]
        for j, gradient in zip(rest, whole, strict=True):
            if j in copy.unheld:
                gradient.zero_()
        memory = self._memory(number, sum(gradient.shape[1] for gradient in whole))
        if whole:
            torch.cat(whole, dim=1, out=memory)
        return Gradients(memory, [where[j] for j in rest], factors)

    def _memory(self, number: int, width: int) -> Tensor:
        """The same memory in each call: new memory would take longer than the gradients."""
        held = self.copy.sample_memory
        if held is None or held.shape[1] != width or len(held) < number:
            held = self.copy.sample_memory = self.copy.x.new_empty(number, width)
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


def check_registered(losses: Tensor) -> None:
    """Refuse a step that was differentiated by parameters of its own, and used others."""
    # Parameters passed to `grad` require no gradients outside of it.
    if losses.requires_grad:
        raise RuntimeError(
            "its training_step reads parameters that are not registered in its modules"
        )


def reduced(values: Tensor, kind: str | None) -> Tensor:
    """Several samples' numbers as the one that their batch logs: the mean, or the extreme."""
    values = values.double()
    if kind in ("max", "min"):
        return values.amax() if kind == "max" else values.amin()
    return values.mean()
