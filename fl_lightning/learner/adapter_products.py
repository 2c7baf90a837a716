"""Measures what an adapter adds to its layer's output, by a forward pass of a copy of the layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.learner.adapters import Adapter, no_product
from fl_lightning.learner.modules import deep_copied, lent_logs, lightning_modules

# Layers with more numbers than these are tried in float32, or as they are: a copy in float64 would
# take seconds for each layer of a large network, or too much memory.
MOST_IN_DOUBLE = 2**21
MOST_CONVERTED = 2**28
# Relative differences up to this are rounding: some layers compute in float32 whatever they get.
TOLERANCE = 1e-5
# Shapes of the input, without its features: rows, and sequences if a layer takes no rows. Some
# layers run only on their device or in their precision, so a copy that fails in float64 on the CPU
# is tried as it is.
INPUTS = ((4,), (2, 3))
TRIALS = tuple(product((True, False), INPUTS))


def check_what_is_added(learner: nn.Module, layout: Any, asking: str, changes_base: bool) -> None:
    """Refuse adapters that add something other than scale · B A.

    Args:
        asking: the method that takes products.
        changes_base: whether it adds products to the frozen weights.

    Raises:
        UserError: it names the method and the layer.
    """
    of_layer: dict[str, list[Adapter]] = {}
    for adapter in layout.adapters:
        of_layer.setdefault(adapter.holder, []).append(adapter)
    for holder, adapters in of_layer.items():
        if why := why_other(learner.get_submodule(holder), adapters, changes_base):
            raise no_product(why, asking)


def why_other(layer: nn.Module, adapters: Sequence[Adapter], changes_base: bool) -> str:
    """Return how the output of the module that holds these adapters differs from what they should
    add, as a clause; empty: it does not.

    The layer itself and its random numbers are not touched: a copy gets random factors, because a
    B of 0 shows nothing, and other values of all else that is trainable.
    """
    named = f"the layer {adapters[0].holder or 'at the root'} ({type(layer).__name__})"
    errors: list[str] = []
    for converted, shape in TRIALS:
        try:
            trial = Trial(layer, adapters, shape, converted)
            added = trial.together - trial.without
            break
        except Exception as error:
            line = (str(error).splitlines() or [""])[0][:200]
            errors.append(f"{type(error).__name__}: {line}")
    else:
        return (
            f"{named} cannot be tried by itself, to see what it adds: its forward, given one "
            f"tensor of shape (4, {adapters[0].shapes[0][1]}), raises {errors[0]}"
        )
    if trial.differ(added, trial.expected()):
        return (
            f"{named} adds something else than {trial.factor} · B·A to its output"
            f"{trial.hint(added)}"
        )
    return trial.why_other_base() if changes_base else ""


class Trial:
    """A copy of a layer with random factors, and a random input.

    Args:
        layer: the module that holds the adapters.
        shape: of the input, without its features.
        converted: try it in float64 on the CPU, if it is not too large or quantised.
    """

    def __init__(
        self,
        layer: nn.Module,
        adapters: Sequence[Adapter],
        shape: tuple[int, ...],
        converted: bool,
    ) -> None:
        self.adapters = adapters
        self.layer = copy_of(layer)
        if converted:
            convert(self.layer)
        self.parameters = dict(self.layer.named_parameters(remove_duplicate=False))
        random = torch.Generator().manual_seed(0)
        for parameter in self.parameters.values():
            if parameter.requires_grad:
                moved = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
                parameter.data = parameter.data + moved.to(parameter) / 2
        self.names = list(chain.from_iterable((each.a, each.b) for each in adapters))
        self.factors = [self._of(name).data for name in self.names]
        size = (*shape, adapters[0].shapes[0][1])
        self.x = torch.randn(size, generator=random, dtype=torch.float64).to(self.factors[0])
        floats = [p.dtype for p in self.parameters.values() if p.is_floating_point()]
        quantised = len(floats) < len(self.parameters)
        least = (
            torch.bfloat16 if quantised else min(floats, key=lambda kind: torch.finfo(kind).bits)
        )
        self.tolerance = max(TOLERANCE, 4 * torch.finfo(least).eps)
        scales = {adapter.scale for adapter in adapters}
        self.factor = f"{scales.pop():g}" if len(scales) == 1 else "scale"
        self.together = self.output(*self.factors)
        self.without = self.output()

    def _of(self, name: str) -> nn.Parameter:
        """Return the copy's parameter by the name that it has in the learner."""
        holder = self.adapters[0].holder
        return self.parameters[name.removeprefix(f"{holder}." if holder else "")]

    @torch.no_grad()
    def output(self, *factors: Tensor) -> Tensor:
        """Return the layer's output with these values of A and B of each adapter; none: with 0."""
        for k, name in enumerate(self.names):
            self._of(name).data = factors[k] if factors else torch.zeros_like(self.factors[k])
        found: Tensor = self.layer(self.x)
        return found.clone()

    def expected(self) -> Tensor:
        """Return the sum of scale · x Aᵀ Bᵀ over the adapters."""
        pairs = zip(self.adapters, self.factors[::2], self.factors[1::2], strict=True)
        return sum(  # type: ignore[return-value]
            adapter.scale * self.x @ a.mT @ b.mT for adapter, a, b in pairs
        )

    def differ(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape:
            return True
        largest = torch.maximum(other.abs().max(), self.without.abs().max())
        return not bool((one - other).abs().max() <= self.tolerance * largest)

    def hint(self, added: Tensor) -> str:
        """Return what to do if only the scale differs."""
        expected = self.expected()
        if added.shape != expected.shape:
            return ""
        ratio = float((added * expected).sum() / expected.square().sum())
        if ratio == 0 or self.differ(added, ratio * expected) or len(self.adapters) > 1:
            return ""
        scale = ratio * self.adapters[0].scale
        return f", but {scale:.6g} · B·A: let the module's attribute scaling be that number"

    def why_other_base(self) -> str:
        """Return why a product that moves into the frozen weight gives another output; empty: it
        gives the same.
        """
        pairs = zip(self.adapters, self.factors[::2], self.factors[1::2], strict=True)
        for adapter, a, b in pairs:
            if not adapter.weight:
                return ""
            left, right = adapter.addition(b, a)
            weight = self._of(adapter.weight)
            if not weight.is_floating_point():
                return ""  # a method that changes it refuses its type
            whole = left @ right
            if weight.shape != whole.shape:
                return (
                    f"the frozen weight {adapter.weight} has shape {tuple(weight.shape)}, but "
                    f"{adapter.name} adds a product of shape {tuple(whole.shape)}"
                )
            weight.data += whole.to(weight)
        if self.differ(self.output(), self.together):
            return (
                f"{self.adapters[0].name} would add something else if its product were part of "
                f"the frozen weight {self.adapters[0].weight}"
            )
        return ""


def copy_of(layer: nn.Module) -> nn.Module:
    """Return a copy without dropout."""
    memo: dict[int, Any] = {
        id(part._trainer): None for part in lightning_modules(layer) if part._trainer is not None
    }
    copied: nn.Module = deep_copied(layer, {**memo, **lent_logs(layer)})
    for part in copied.modules():
        # Do not call eval(), in which some layers add the product to their weight (loralib).
        part.training = False
    return copied


def convert(copied: nn.Module) -> None:
    """Move a layer to the CPU and to float64, or float32; leave it if it is quantised."""
    parameters = list(copied.parameters())
    numbers = sum(parameter.numel() for parameter in parameters)
    if numbers <= MOST_CONVERTED and all(p.is_floating_point() for p in parameters):
        copied.to("cpu").to(torch.float64 if numbers <= MOST_IN_DOUBLE else torch.float32)
