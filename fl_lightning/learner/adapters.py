"""The low-rank adapters (LoRA) of a learner, found by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError

A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class Adapter:
    """A trainable pair of matrices that adds ``scale * B @ A`` to a frozen weight.

    Args:
        name: the path of the module that holds the pair, and the adapter's own name in it, if it
            has one: ``"encoder.query.default"``.
        a, b: names of the parameters A, ``(rank, in)``, and B, ``(out, rank)``.
        weight: name of the frozen weight; empty if there is none for the pair.
        rank: rows of A.
        scale: alpha / rank, or what else the module multiplies with.
        transposed: whether the weight is stored as ``(in, out)``, as GPT-2's ``Conv1D`` is. What is
            added to it is then ``scale * (B @ A).T``.
        shared_with: path of another module that uses the same frozen weight; empty: none does.
        shapes: of the parameters A and B.
        places: of A and B in a vector ``(D,)``.
        says_scale: whether the module that holds the pair has a number called ``scaling``.
    """

    name: str
    a: str
    b: str
    weight: str
    rank: int
    scale: float
    transposed: bool
    shared_with: str
    shapes: tuple[torch.Size, torch.Size]
    places: tuple[slice, slice]
    says_scale: bool = True

    def matrices(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return A ``(rank, in)`` and B ``(out, rank)``, views into a vector ``(D,)``."""
        a, b = (vector[place] for place in self.places)
        return a.view(self.rank, -1), b.view(-1, self.rank)

    def addition(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors of the addition to the stored weight if left @ right takes the place of B
        A.

        The addition is scale * left @ right, transposed if the weight is.
        """
        if self.transposed:
            return right.T, self.scale * left.T
        return self.scale * left, right

    @property
    def size(self) -> int:
        """Return the numbers per rank: in + out."""
        a, b = self.places
        return int(a.stop - a.start + b.stop - b.start) // self.rank


def adapters_of(
    learner: nn.Module, layout: Mapping[str, tuple[slice, torch.Size]]
) -> list[Adapter]:
    """Return the adapters among the trainable parameters, in the order of the layout.

    Two parameters are a pair if their names differ only in ``lora_A`` and ``lora_B``. The names of
    peft's adapters differ so, and modules of your own may use the same names.
    """
    pairs = [(name, name.replace(A, B)) for name in layout if A in name]
    pairs = [(a, b) for a, b in pairs if b in layout]
    if not pairs:
        return []
    modules = dict(learner.named_modules())
    parameters = dict(learner.named_parameters(remove_duplicate=False))
    users = users_of_parameters(learner)
    adapters = []
    for a, b in pairs:
        # "path.lora_A.default.weight" → "path", "default"
        path, _, rest = a.rpartition(A)
        path = path.rpartition(".")[0]
        own = rest.removesuffix(".weight").strip(".")
        weight = beside(path, parameters, (a, b))
        holder = modules.get(path)
        others: list[str] = []
        if weight:
            home = weight.rpartition(".")[0]
            others = [user for user in users[id(parameters[weight])] if user != home]
        adapters.append(
            Adapter(
                name=".".join(filter(None, (path, own))),
                a=a,
                b=b,
                weight=weight,
                rank=layout[a][1][0],
                scale=scale_in(holder, own),
                transposed=bool(getattr(holder, "fan_in_fan_out", False)),
                shared_with=others[0] if others else "",
                shapes=(layout[a][1], layout[b][1]),
                places=(layout[a][0], layout[b][0]),
                says_scale=scale_said(holder, own) is not None,
            )
        )
    return adapters


def beside(path: str, parameters: Mapping[str, nn.Parameter], pair: tuple[str, str]) -> str:
    """Return the name of the frozen weight that belongs to a pair; empty if there is none."""
    prefix = f"{path}." if path else ""
    for name in (f"{prefix}base_layer.weight", f"{prefix}weight"):
        parameter = parameters.get(name)
        if parameter is not None and not parameter.requires_grad and name not in pair:
            return name
    return ""


def scale_in(holder: nn.Module | None, adapter: str) -> float:
    """What the module that holds a pair multiplies B·A with; 1 if it does not say."""
    said = scale_said(holder, adapter)
    return 1.0 if said is None else said


def scale_said(holder: nn.Module | None, adapter: str) -> float | None:
    """The number ``scaling`` of the module that holds a pair; None: it has none."""
    scaling: Any = getattr(holder, "scaling", None)
    if isinstance(scaling, Mapping):
        scaling = scaling.get(adapter)
    if isinstance(scaling, Tensor) and scaling.numel() == 1:
        return float(scaling)
    is_number = isinstance(scaling, (int, float)) and not isinstance(scaling, bool)
    return float(scaling) if is_number else None


def scale_notes(layout: Any, methods: Any) -> list[str]:
    """The note about adapters that do not say their scale, where a method computes with it."""
    asking = [type(each).__name__ for each in methods.callbacks if each.needs_products]
    silent = [adapter.name for adapter in layout.adapters if not adapter.says_scale]
    if not asking or not silent:
        return []
    return [
        f"{' and '.join(asking)}: the adapter {silent[0]} has no number called scaling, so the "
        "method takes B·A as its product. If the adapter's module multiplies B·A by a number, "
        "store that number as the module's attribute scaling"
    ]


def users_of_parameters(learner: nn.Module) -> dict[int, list[str]]:
    """Return the paths of the modules that hold each parameter as their own, by the parameter's
    id.
    """
    users: dict[int, list[str]] = {}
    for path, module in learner.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(path)
    return users


def why_no_product(layout: Any) -> str:
    """Return why the adapters of a layout add something else than scale · B A; empty: they do not.

    The text that is returned names the parameter.
    """
    for name in layout:
        if "lora_embedding_" in name:
            return f"{name} is an adapter of an embedding"
        if "lora_magnitude_vector" in name:
            return f"{name} is DoRA's, which scales the sum of weight and adapter"
    for adapter in layout.adapters:
        if any(len(shape) != 2 for shape in adapter.shapes):
            return f"{adapter.a} is an adapter of a convolution"
        scaling = adapter.a.rpartition(A)[0] + "scaling"
        if scaling in layout:
            return f"{scaling}, which multiplies the product, is trained"
        bias = adapter.b.removesuffix("weight") + "bias"
        if bias != adapter.b and bias in layout:
            return f"{bias} is a bias within the adapter (lora_bias)"
    return ""


def check_products(layout: Any, asking: str) -> None:
    """Refuse adapters of which a method cannot take products.

    Raises:
        UserError: it names the method, ``asking``, and the parameter.
    """
    if why := why_no_product(layout):
        raise UserError(
            f"method: {asking} computes with B·A of each adapter, and {why}. Use LoRA on linear "
            "layers without these options, or a method that averages A and B separately, such as "
            "FedIT "
            "(--config method/fedit)."
        )


def check_untied(layout: Any, asking: str) -> None:
    """Refuse adapters whose frozen weight a method cannot change.

    Raises:
        UserError: it names the method, ``asking``, and the weight.
    """
    for adapter in layout.adapters:
        if not adapter.weight:
            raise UserError(
                f"method: {asking} adds to the frozen weight under each adapter, and "
                f"{adapter.name} has none: there is neither base_layer.weight nor weight beside "
                f"{adapter.a}. Use a method that leaves the base as it is, such as FedIT."
            )
        if adapter.shared_with:
            raise UserError(
                f"method: {asking} changes the frozen weight {adapter.weight}, and the module "
                f"{adapter.shared_with} uses the same one (tied weights), so it would change too. "
                "Leave this layer out of LoRA's target_modules, or untie the weights."
            )


def check_there(layout: Any, asking: str) -> None:
    """Refuse a learner without adapters.

    Raises:
        UserError: it names the method, ``asking``, and says how to add LoRA.
    """
    if not layout.adapters:
        raise UserError(
            f"method: {asking} is for adapters (LoRA), but the learner has none: no trainable "
            "parameters are called lora_A and lora_B. Wrap the network before it is "
            "given to the run: network = peft.get_peft_model(network, peft.LoraConfig(r=8, "
            "target_modules=[…])). CausalLanguageModel and TextClassifier do so by --model.learner."
            "lora '{r: 8, target_modules: […]}'."
        )
