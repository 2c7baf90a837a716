"""A learner's trainable parameters as one flat vector, and its layers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

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
        """Return parameters by a pattern of names (``fnmatch``), by a group, or by several of
        these.

        Groups are ``"last"`` (the last layer), ``"norms"``, ``"all"``, and ``"lora_A"`` and
        ``"lora_B"``, the factors of all adapters.

        Raises:
            UserError: there are none; ``asking`` is the option's name in the error.
        """
        if not isinstance(which, str):
            return self._of_each(which, asking)
        groups = {"last": list(self.layers.values())[-1], "norms": self.norms, "all": list(self)}
        groups |= self.factors
        if which in groups:
            names = groups[which]
        else:
            names = [name for name in self if fnmatchcase(name, which)]
        self._check_factors(which, names, asking)
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

    def _check_factors(self, which: str, names: Sequence[str], asking: str) -> None:
        """Refuse a pattern such as ``"*lora_B*"`` if it names other parameters than the group.

        Raises:
            UserError: it names a parameter that makes the difference.
        """
        group = which.strip("*.")
        if group == which or group not in self.factors:
            return
        factors = self.factors[group]
        misses = [name for name in factors if name not in names]
        more = [name for name in names if name not in factors]
        if misses or more:
            what = f"misses {misses[0]}" if misses else f"also names {more[0]}"
            raise UserError(
                f"{asking}: the pattern {which!r} {what}, so it does not name the factors "
                f"{group[-1]} of the learner's adapters. Give the name of their group, {group!r}."
            )

    def _of_each(self, patterns: object, asking: str) -> list[str]:
        given = patterns if isinstance(patterns, list | tuple) else ()
        if not given or not all(isinstance(pattern, str) for pattern in given):
            raise UserError(
                f"{asking}: {patterns!r} names no parameter. Give a pattern such as 'head.*', a "
                "list of patterns, or a group: 'last' (layer), 'norms' or 'all'."
            )
        names: list[str] = []
        for pattern in given:
            names += self.named(pattern, asking)
        return names

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
    """Copy tensors into views of a flat vector."""
    dense = [t.to_dense() if t.is_sparse else t for t in tensors]
    if views[0].is_cuda:
        torch._foreach_copy_(views, dense)
        return
    # On a CPU this takes half the time of torch.cat(out=…).
    for view, t in zip(views, dense, strict=True):
        view.copy_(t)


def all_finite(v: Tensor) -> bool:
    """Return whether no entry is infinite or NaN."""
    # If the sum is finite, which is quick to check, every entry is. The sum of finite numbers may
    # still overflow.
    return math.isfinite(v.sum()) or bool(torch.isfinite(v).all())


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN equal to NaN."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def tie(parameters: Sequence[nn.Parameter], views: Sequence[Tensor]) -> None:
    """Make the parameters share storage with views into a flat vector."""
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
    """Return the path of the last module with its own parameters that is not a normalisation layer.

    A layer counts as one module.
    """
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
    """Return whether it is one of torch's normalisation layers, or its class is called …Norm."""
    is_torch_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return is_torch_norm or re.search(r"Norm(\dd)?$", type(module).__name__) is not None


def norms_of(learner: nn.Module) -> list[str]:
    """Return the names of the parameters of normalisation layers.

    The layers that count are torch's own, and classes whose names end in Norm.
    """
    names: list[str] = []
    for path, module in learner.named_modules():
        if is_norm(module):
            prefix = f"{path}." if path else ""
            names += [prefix + name for name, _ in module.named_parameters(recurse=False)]
    return names
