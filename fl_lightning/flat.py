"""A learner's trainable parameters as one flat vector: the layout, and tying parameters to a vector as views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError


class Layout(dict[str, tuple[slice, torch.Size]]):
    """``{parameter name: (slice into the flat vector, shape)}`` of the parameters with ``requires_grad``.

    In ``named_parameters()`` order, each in C order whatever its memory format.

    >>> layout = Layout(nn.Linear(3, 2))
    >>> layout.size, layout["bias"]
    (8, (slice(6, 8, None), torch.Size([2])))
    """

    def __init__(self, learner: nn.Module) -> None:
        super().__init__()
        start = 0
        for name, parameter in trainable(learner):
            self[name] = (slice(start, start + parameter.numel()), parameter.shape)
            start += parameter.numel()
        self.size = start

    def views(self, vector: Tensor) -> list[Tensor]:
        """The parameters' views into ``vector`` ``(D,)``, in layout order."""
        return [vector[where].view(shape) for where, shape in self.values()]


def trainable(learner: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters with ``requires_grad``, in registration order."""
    return ((name, p) for name, p in learner.named_parameters() if p.requires_grad)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one after the other, each in C order, as ``(D,)``."""
    return torch.cat([t.reshape(-1) for t in tensors])


def fill(views: list[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into views of a flat vector."""
    dense = [t.to_dense() if t.is_sparse else t for t in tensors]
    if views[0].is_cuda:
        torch._foreach_copy_(views, dense)
        return
    for view, t in zip(views, dense, strict=True):  # on a CPU half the time of torch.cat(out=…)
        view.copy_(t)


def all_finite(v: Tensor) -> bool:
    """Whether no entry is infinite or NaN; a finite sum, which is quick, says so."""
    return bool(torch.isfinite(v.sum())) or bool(torch.isfinite(v).all())


def tie(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Make the parameters share storage with views into a flat vector."""
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view


def check_learner_parameters(learner: nn.Module) -> None:
    """Refuse what has no place in one flat vector.

    Raises:
        UserError: lazy parameters, several dtypes, or nothing to train.
    """
    lazy = [n for n, p in learner.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UserError(
            f"learner {type(learner).__name__} has lazy parameters ({lazy[0]}, …), whose shape is not known yet. "
            "Run one batch through it first, or build it with the sizes written out (Linear, not LazyLinear)."
        )
    dtypes = {p.dtype for _, p in trainable(learner)}
    if len(dtypes) > 1:
        named = ", ".join(sorted(str(d) for d in dtypes))
        raise UserError(
            f"learner {type(learner).__name__} has trainable parameters of several dtypes ({named}); a federated run "
            "needs one. Convert it (learner.float()) or freeze the others (requires_grad_(False))."
        )
    if not dtypes:
        raise UserError(
            f"learner {type(learner).__name__} has no trainable parameters: nothing to average. Leave requires_grad "
            "on for at least one, and create them in __init__, setup or configure_model."
        )
