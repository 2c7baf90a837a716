"""A learner's trainable parameters as one flat vector, and its layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import chain

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError, suggest
from fl_lightning.learner.adapters import adapters_of, trained_factors

LAYERS = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.Bilinear,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
)
# The end of its class name identifies a normalisation layer, torch's and users' alike.
NORM = re.compile(r"norm(base|\dd)?$", re.IGNORECASE)


class Layout(dict[str, tuple[slice, torch.Size]]):
    """``{parameter name: (slice into the flat vector, shape)}`` of the trainable parameters.

    The parameters are in the order of ``named_parameters()``, each in C order whatever its memory
    format.

    >>> layout = Layout(nn.Linear(3, 2))
    >>> layout.size, layout["bias"]
    (8, (slice(6, 8, None), torch.Size([2])))

    ``layers``: the names of each layer's parameters by the layer's path, from :func:`layers_of`;
    ``norms``: those of normalisation layers; ``adapters``: the low-rank adapters (LoRA), in the
    order of the layout; ``factors``: their parameters by the groups ``"lora_A"`` and ``"lora_B"``.
    """

    def __init__(self, learner: nn.Module) -> None:
        super().__init__()
        start = 0
        for name, parameter in trainable(learner):
            self[name] = (slice(start, start + parameter.numel()), parameter.shape)
            start += parameter.numel()
        self.size = start
        # A frozen layer has no parameter in the vector, and is listed as an empty layer.
        self.layers: dict[str, list[str]] = {}
        for path, names in layers_of(learner).items():
            self.layers[path] = [name for name in names if name in self]
        self.norms = [name for name in norms_of(learner) if name in self]
        self.adapters = adapters_of(learner, self)
        self.factors = trained_factors(learner, self)

    def named(self, which: str | Sequence[str], asking: str) -> list[str]:
        """Return parameters by a pattern of names (``fnmatch``), a group, or several of these.

        Groups are ``"last"`` (the last layer), ``"norms"``, ``"all"``, and ``"lora_A"`` and
        ``"lora_B"``, the factors of all adapters.

        Raises:
            UserError: there are none; ``asking`` is the option's name in the error.
        """
        if isinstance(which, list | tuple) and which:
            return list(chain.from_iterable(self.named(pattern, asking) for pattern in which))
        groups = {"last": list(self.layers.values())[-1], "norms": self.norms, "all": list(self)}
        groups |= self.factors
        which = str(which)
        names = groups.get(which) or [name for name in self if fnmatchcase(name, which)]
        if names:
            return names
        reason = f"no parameter is called {which!r}"
        if which == "norms":
            reason = "the learner has no normalisation layer"
        elif which == "last":
            reason = f"the last layer, {list(self.layers)[-1]}, is frozen"
        elif which in self.factors:
            reason = f"the learner has no trainable {which} (an adapter's factor)"
        hint = "" if which in groups else suggest(which, [*self, *groups])
        raise UserError(
            f"{asking}: {reason}: there are {', '.join(self)[:200]}.{hint} 'last' (layer), "
            "'norms', 'all', 'lora_A' and 'lora_B' name groups."
        )

    def mask(self, names: Sequence[str]) -> Tensor:
        """Return ``(D,)`` bool: the coordinates of these parameters."""
        mask = torch.zeros(self.size, dtype=torch.bool)
        for name in names:
            mask[self[name][0]] = True
        return mask

    def views(self, vector: Tensor) -> list[Tensor]:
        """Return the parameters' views into ``vector`` ``(D,)``, in layout order."""
        return [vector[where].view(shape) for where, shape in self.values()]


def trainable(learner: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Return names and parameters with ``requires_grad``, in registration order."""
    return ((name, p) for name, p in learner.named_parameters() if p.requires_grad)


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Return tensors one after the other, each in C order, as ``(D,)``."""
    return torch.cat([t.reshape(-1) for t in tensors])


def fill(views: list[Tensor], tensors: Sequence[Tensor]) -> None:
    dense = [t.to_dense() if t.is_sparse else t for t in tensors]
    if views[0].is_cuda:
        torch._foreach_copy_(views, dense)
        return
    # On a CPU this takes half the time of torch.cat(out=…).
    for view, t in zip(views, dense, strict=True):
        view.copy_(t)


def all_finite(v: Tensor) -> bool:
    # If the sum is finite, which is quick to check, every entry is. The sum of finite numbers may
    # still overflow.
    return math.isfinite(v.sum()) or bool(torch.isfinite(v).all())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def tie(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view


def check_trainable(learner: nn.Module, layout: Layout) -> None:
    """Refuse trainable parameters if they are not those with which the run began.

    Raises:
        UserError: ``requires_grad`` of some has changed since then.
    """
    now = {name for name, _ in trainable(learner)}
    if now == layout.keys():
        return
    changes = []
    for names, change in ((layout.keys() - now, "frozen"), (now - layout.keys(), "unfrozen")):
        if names:
            more = ", …" if len(names) > 1 else ""
            changes.append(f"{min(names)}{more} {change}")
    raise UserError(
        f"learner {type(learner).__name__}: {' and '.join(changes)} since the run began "
        "(requires_grad was changed, by a hook or a callback such as BaseFinetuning). The set of "
        "trainable parameters is fixed at the start of a fit: set requires_grad in __init__, "
        "setup or configure_model; for another set, begin another fit with init_from."
    )


def layers_of(learner: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each layer by its module's path.

    Parameters of other modules belong to the last layer registered before them, else to the first.
    A learner without layers is one layer, called "".
    """
    layers: dict[str, list[str]] = {}
    early: list[str] = []
    latest = early
    # No module's name begins with a zero byte, so this means: inside no layer.
    inside = "\0"
    for name, module in learner.named_modules():
        prefix = name + "." if name else ""
        if name.startswith(inside):
            continue
        is_layer = isinstance(module, LAYERS) and next(module.parameters(), None) is not None
        parameters = [prefix + p for p, _ in module.named_parameters(recurse=is_layer)]
        if is_layer:
            latest = layers[name] = parameters if layers else early + parameters
            inside = prefix or "\0"
        else:
            latest.extend(parameters)
    return layers or {"": early}


def last_of(learner: nn.Module) -> str:
    """Path of the last module with its own parameters, not counting norms; a layer is one."""
    last = ""
    inside = "\0"
    for name, module in learner.named_modules():
        if name.startswith(inside) or is_norm(module):
            continue
        if next(module.parameters(recurse=False), None) is not None:
            last = name
        if isinstance(module, LAYERS):
            last = name
            inside = f"{name}." if name else "\0"
    return last


def is_norm(module: nn.Module) -> bool:
    """Return whether it is a normalisation layer, torch's or the user's, by its class's name."""
    return any(NORM.search(kind.__name__) for kind in type(module).__mro__)


def norms_of(learner: nn.Module) -> list[str]:
    """Names of parameters of torch's normalisation layers, and of classes called …Norm."""
    names: list[str] = []
    for path, module in learner.named_modules():
        if is_norm(module):
            prefix = f"{path}." if path else ""
            names += [prefix + name for name, _ in module.named_parameters(recurse=False)]
    return names
