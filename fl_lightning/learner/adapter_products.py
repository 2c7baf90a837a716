"""Measures what an adapter adds to its layer's output, by a forward pass of a copy of the layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.learner.adapters import Adapter, no_product
from fl_lightning.learner.modules import deep_copied, lent_logs, lightning_modules

# Relative differences up to this are rounding in float32.
TOLERANCE = 1e-4


def check_what_is_added(learner: nn.Module, layout: Any, asking: str) -> None:
    """Refuse adapters that add something other than scale · B A.

    ``asking``: the method that takes products.

    Raises:
        UserError: it names the method and the layer.
    """
    of_layer: dict[str, list[Adapter]] = {}
    for adapter in layout.adapters:
        of_layer.setdefault(adapter.holder, []).append(adapter)
    for holder, adapters in of_layer.items():
        if why := why_other(learner.get_submodule(holder), adapters):
            raise no_product(why, asking)


@torch.no_grad()
def why_other(layer: nn.Module, adapters: Sequence[Adapter]) -> str:
    """Return how the output of the module that holds these adapters differs from what they should
    add, as a clause; empty: it does not, or the module does not run with one tensor ``(4, in)``.

    The layer itself and its random numbers are not touched: a copy gets random factors, because a
    B of 0 shows nothing, and other values of all else that is trainable.
    """
    copied = copy_of(layer)
    parameters = dict(copied.named_parameters(remove_duplicate=False))
    random = torch.Generator().manual_seed(0)
    for parameter in parameters.values():
        if parameter.requires_grad:
            moved = torch.randn(parameter.shape, generator=random)
            parameter.data = parameter.data + moved.to(parameter) / 2
    prefix = f"{adapters[0].holder}." if adapters[0].holder else ""
    names = chain.from_iterable((each.a, each.b) for each in adapters)
    factors = [parameters[name.removeprefix(prefix)] for name in names]
    x = torch.randn((4, adapters[0].shapes[0][1]), generator=random).to(factors[0])
    expected: Any = sum(
        adapter.scale * x @ a.mT @ b.mT
        for adapter, a, b in zip(adapters, factors[::2], factors[1::2], strict=True)
    )
    try:
        together: Tensor = copied(x).clone()
        for factor in factors:
            factor.data = torch.zeros_like(factor)
        without: Tensor = copied(x)
    except Exception:  # a layer may need other arguments, and raise anything
        return ""
    added = together - without
    kinds = [p.dtype for p in parameters.values() if p.is_floating_point()]
    tolerance = max(TOLERANCE, *(4 * torch.finfo(kind).eps for kind in kinds))
    if added.shape == expected.shape:
        largest = torch.maximum(expected.abs().max(), without.abs().max())
        if bool((added - expected).abs().max() <= tolerance * largest):
            return ""
    scales = {adapter.scale for adapter in adapters}
    factor_text = f"{scales.pop():g}" if len(scales) == 1 else "scale"
    return (
        f"the layer {adapters[0].holder or 'at the root'} ({type(layer).__name__}) adds something "
        f"else than {factor_text} · B·A to its output (the module's attribute scaling says the "
        "factor)"
    )


def copy_of(layer: nn.Module) -> nn.Module:
    memo: dict[int, Any] = {
        id(part._trainer): None for part in lightning_modules(layer) if part._trainer is not None
    }
    copied: nn.Module = deep_copied(layer, {**memo, **lent_logs(layer)})
    for part in copied.modules():
        # Do not call eval(), in which some layers add the product to their weight (loralib).
        part.training = False
    return copied
