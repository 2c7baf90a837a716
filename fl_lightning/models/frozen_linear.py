"""Frozen linear layers in fewer bits, on a processor that cannot compute in them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

# Number of entries of a weight that are in float32 at a time: 16 MB per worker.
WIDENED = 2**22


def blocks(weight: Tensor) -> Iterator[slice]:
    """Yield rows of a weight ``(out, in)``, some at a time."""
    rows = max(1, WIDENED // weight.shape[1])
    for start in range(0, len(weight), rows):
        yield slice(start, start + rows)


_scratch = threading.local()


def widened(rows: Tensor) -> Tensor:
    """Return these rows in float32, in memory that the thread's next call uses again."""
    # If the gradient is differentiated again, its graph keeps these rows, so they need their own
    # memory.
    if torch.is_grad_enabled():
        return rows.float()
    # New memory each time would stay with the thread's allocator, some 100 MB per worker.
    memory = getattr(_scratch, "memory", None)
    if memory is None or len(memory) < rows.numel():
        memory = _scratch.memory = torch.empty(max(rows.numel(), WIDENED))
    return memory[: rows.numel()].view(rows.shape).copy_(rows)


class Widened(torch.autograd.Function):
    """x Wᵀ + b with W in fewer bits, computed in float32, also in the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = x.float()
            parts = []
            for rows in blocks(weight):
                own = None if bias is None else bias[rows].float()
                # The product has the dtype of the stored weight, as in low precision.
                parts.append(linear(x, widened(weight[rows]), own).to(weight.dtype))
            return torch.cat(parts, -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, bias = inputs
        # Save the weight itself, which all workers share, and not its float32 values.
        ctx.save_for_backward(weight)
        ctx.dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor | None]:
        (weight,) = ctx.saved_tensors
        of_bias: Tensor | None = None
        with torch.autocast("cpu", enabled=False):
            gradient = gradient.float()
            products = [gradient[..., rows] @ widened(weight[rows]) for rows in blocks(weight)]
            if ctx.needs_input_grad[2]:
                of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype)
            return torch.stack(products).sum(0).to(ctx.dtype), None, of_bias


class FrozenLinear(nn.Linear):
    """A linear layer whose weight is not trained; its bias may be.

    On a processor without instructions for bfloat16, a product in bfloat16 takes a hundred times as
    long as in float32, and its gradient even longer. On such a processor the product is computed in
    float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        trained = self.weight.requires_grad or self.weight.dtype == torch.float32
        if input.device.type != "cpu" or trained or computes_in_bfloat16():
            return super().forward(input)
        apply: Any = Widened.apply
        product: Tensor = apply(input, self.weight, self.bias)
        return product


def computes_in_bfloat16() -> bool:
    """Return whether this processor has instructions for products in bfloat16."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def freeze_linears(model: nn.Module) -> None:
    """Replace linear layers whose weights are frozen by ``FrozenLinear``, in place."""
    for part in model.modules():
        if type(part) is nn.Linear and not part.weight.requires_grad:
            part.__class__ = FrozenLinear
