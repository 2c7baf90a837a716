"""RAVAN's layer: several low-rank heads beside a frozen linear layer, of which cores are trained.

A. Raje, B. Askin, D. Jhunjhunwala, G. Joshi: Ravan: Multi-Head Low-Rank Adaptation for Federated
Fine-Tuning (2025), arXiv:2506.05568.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveInt, check_arguments


class MultiHead(nn.Module):
    """W x + b + Σ_h s_h B_h H_h A_h x, in which H_h and s_h are trained.

    ``heads_A`` ``(h, r, in)`` and ``heads_B`` ``(h, out, r)`` are frozen; the rows of all A_h, and
    the columns of all B_h, are orthonormal as far as h r of them fit. ``heads_H`` ``(h, r, r)``
    starts at 0, ``heads_s`` ``(h,)`` at 1.

    Args:
        linear: the layer W x + b, whose parameters are frozen.
        rank: r of each head; ``heads``: their number.

    Raises:
        UserError: rank or heads is below 1.

    >>> layer = MultiHead(nn.Linear(8, 3), rank=2, heads=3)
    >>> x = torch.ones(5, 8)
    >>> layer(x).equal(layer.linear(x)), layer.heads_H.shape
    (True, torch.Size([3, 2, 2]))
    """

    def __init__(self, linear: nn.Linear, rank: PositiveInt, heads: PositiveInt) -> None:
        check_arguments(MultiHead.__init__, locals())
        super().__init__()
        self.linear = linear.requires_grad_(False)
        # The weight may have fewer bits, in which nothing can be made orthogonal.
        w = linear.weight.new_empty(0, dtype=torch.promote_types(linear.weight.dtype, torch.float))
        into = nn.init.orthogonal_(w.new_empty(heads * rank, linear.in_features))
        out = nn.init.orthogonal_(w.new_empty(linear.out_features, heads * rank))
        heads_a = into.view(heads, rank, -1)
        heads_b = out.view(-1, heads, rank).transpose(0, 1).contiguous()
        self.heads_A = nn.Parameter(heads_a, requires_grad=False)
        self.heads_B = nn.Parameter(heads_b, requires_grad=False)
        self.heads_H = nn.Parameter(w.new_zeros(heads, rank, rank))
        self.heads_s = nn.Parameter(w.new_ones(heads))

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.einsum("hri,...i->...hr", self.heads_A, x)
        turned = torch.einsum("hqr,...hr->...hq", self.heads_H, inside)
        added = torch.einsum("hoq,...hq->...o", self.heads_B, turned * self.heads_s[:, None])
        result: Tensor = self.linear(x) + added
        return result

    def as_linear(self) -> nn.Linear:
        """Return the linear layer with the heads' products added to its weight, in place."""
        scaled = self.heads_H * self.heads_s[:, None, None]
        added = torch.einsum(
            "hoq,hqr,hri->oi", self.heads_B.to(scaled), scaled, self.heads_A.to(scaled)
        )
        with torch.no_grad():
            self.linear.weight += added.to(self.linear.weight)
        return self.linear


def with_heads(
    network: nn.Module, rank: int, heads: int, target_modules: str | Sequence[str]
) -> nn.Module:
    """Return the network, all frozen, with :class:`MultiHead` in place of linear layers.

    Args:
        rank, heads: of each layer.
        target_modules: ends of module paths, as in peft, or patterns (``fnmatch``).

    Raises:
        UserError: no linear layer has such a name.
    """
    wanted = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    network.requires_grad_(False)
    linear = {name: each for name, each in network.named_modules() if isinstance(each, nn.Linear)}
    found = []
    for each in wanted:
        found += [name for name in linear if f".{name}".endswith(f".{each}")]
        found += [name for name in linear if fnmatchcase(name, each)]
    if not found:
        raise UserError(
            f"heads: target_modules={wanted}: no linear layer has such a name. There are "
            f"{', '.join(list(linear)[:8])}{', …' if len(linear) > 8 else ''}."
        )
    for name in dict.fromkeys(found):
        path, _, own = name.rpartition(".")
        setattr(network.get_submodule(path), own, MultiHead(linear[name], rank, heads))
    return network
