"""The low-rank adapters (LoRA) of a learner, found by the modules that own their factors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.errors import UserError

# The names under which a module owns A and B: of a linear layer or a convolution, and of peft's
# embedding.
EMBEDDING = "lora_embedding_A"
FACTORS = (("lora_A", "lora_B"), (EMBEDDING, "lora_embedding_B"))
CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.ParameterDict, nn.ParameterList)


@dataclass(frozen=True)
class Adapter:
    """A trainable pair of matrices that adds ``scale * B @ A`` to a frozen weight.

    Args:
        name: the path of the module that holds the pair, and the adapter's own name in it, if it
            has one: ``"encoder.query.default"``.
        holder: the path of that module.
        a, b: names of the parameters A, ``(rank, in)``, and B, ``(out, rank)``.
        weight: name of the frozen weight; empty if there is none for the pair.
        rank: rows of A.
        scale: alpha / rank, or what else the module multiplies with.
        transposed: whether the weight is stored as ``(in, out)``, as GPT-2's ``Conv1D`` is. What is
            added to it is then ``scale * (B @ A).T``.
        shapes: of the parameters A and B.
        places: of A and B in a vector ``(D,)``.
        why_no_product: why the layer adds something other than ``scale * B @ A``, as a clause that
            begins with a parameter's name; empty if nothing in its structure says so.
    """

    name: str
    holder: str
    a: str
    b: str
    weight: str
    rank: int
    scale: float
    transposed: bool
    shapes: tuple[torch.Size, torch.Size]
    places: tuple[slice, slice]
    why_no_product: str = ""

    def matrices(self, vector: Tensor) -> tuple[Tensor, Tensor]:
        """Return A ``(rank, in)`` and B ``(out, rank)``, views into a vector ``(D,)``."""
        a, b = (vector[place] for place in self.places)
        return a.view(self.rank, -1), b.view(-1, self.rank)

    def addition(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """Return factors of what is added to the stored weight if left @ right replaces B A.

        The addition is scale * left @ right, transposed if the weight is.
        """
        if self.transposed:
            return right.T, self.scale * left.T
        return self.scale * left, right

    @property
    def size(self) -> int:
        a, b = self.places
        return int(a.stop - a.start + b.stop - b.start) // self.rank


def factors_of(learner: nn.Module) -> Iterator[tuple[str, str, str, str]]:
    """Yield each adapter's module path, its own name there, and the names of A and B.

    peft's layers own ``lora_A`` and ``lora_B``, and so may modules of your own: parameters, modules
    with a weight, or containers of either by the adapters' names.
    """
    for path, module in learner.named_modules():
        owned: dict[str, Any] = {**module._parameters, **module._modules}
        prefix = f"{path}." if path else ""
        for a, b in FACTORS:
            of_a, of_b = _by_name(owned.get(a)), _by_name(owned.get(b))
            for own in of_a:
                if own in of_b:
                    yield path, own, prefix + a + of_a[own], prefix + b + of_b[own]


def _by_name(held: Any) -> dict[str, str]:
    """Return the rest of the parameter's name by the adapter's own name, of one kind of factor."""
    if isinstance(held, nn.Parameter):
        return {"": ""}
    if isinstance(held, CONTAINERS):
        weights = {key: f".{key}.weight" for key, part in held._modules.items() if _weighs(part)}
        return {**{key: f".{key}" for key in held._parameters}, **weights}
    return {"": ".weight"} if _weighs(held) else {}


def _weighs(held: Any) -> bool:
    return isinstance(held, nn.Module) and held._parameters.get("weight") is not None


def trained_factors(learner: nn.Module, layout: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return ``{"lora_A": names, "lora_B": names}`` of the trainable factors and their biases
    (``lora_bias``), each in the order of the layout.

    Unlike the adapters of :func:`adapters_of`, a factor counts if the other one is frozen.
    """
    names = _names_in(layout, learner)
    found = list(factors_of(learner))
    return {
        "lora_A": _with_biases([a for _, _, a, _ in found], names, layout),
        "lora_B": _with_biases([b for *_, b in found], names, layout),
    }


def _with_biases(
    factors: list[str], names: Mapping[str, str], layout: Mapping[str, Any]
) -> list[str]:
    biases = [name.removesuffix("weight") + "bias" for name in factors if name.endswith(".weight")]
    own = {names.get(name) for name in (*factors, *biases)}
    return [name for name in layout if name in own]


def _names_in(layout: Mapping[str, Any], learner: nn.Module) -> dict[str, str]:
    every = list(learner.named_parameters(remove_duplicate=False))
    first = {id(parameter): name for name, parameter in every if name in layout}
    names = {name: first.get(id(parameter), "") for name, parameter in every}
    return {name: found for name, found in names.items() if found}


def adapters_of(
    learner: nn.Module, layout: Mapping[str, tuple[slice, torch.Size]]
) -> list[Adapter]:
    """Return the adapters of which both factors are trainable, in the order of the layout."""
    names = _names_in(layout, learner)
    pairs = []
    for path, own, a, b in factors_of(learner):
        if a in names and b in names:
            pairs.append((path, own, names[a], names[b]))
    if not pairs:
        return []
    modules = dict(learner.named_modules())
    parameters = dict(learner.named_parameters(remove_duplicate=False))
    uses = Counter(chain.from_iterable(pair[2:] for pair in pairs))
    places = {name: k for k, name in enumerate(layout)}
    adapters = []
    for path, own, a, b in sorted(pairs, key=lambda pair: (places[pair[2]], places[pair[3]])):
        shared = [name for name in (a, b) if uses[name] > 1]
        why = f"{shared[0]} is a factor of several adapters" if shared else ""
        shapes = (layout[a][1], layout[b][1])
        adapters.append(
            Adapter(
                name=".".join(filter(None, (path, own))),
                holder=path,
                a=a,
                b=b,
                weight=beside(path, parameters, (a, b)),
                rank=shapes[0][0],
                scale=scale_in(modules[path], own),
                transposed=bool(getattr(modules[path], "fan_in_fan_out", False)),
                shapes=shapes,
                places=(layout[a][0], layout[b][0]),
                why_no_product=why or _why_no_product(modules[path], own, (a, b), layout),
            )
        )
    return adapters


def _why_no_product(
    holder: nn.Module, own: str, pair: tuple[str, str], layout: Mapping[str, Any]
) -> str:
    """Return why a pair adds something other than its scaled product, if its structure says so."""
    a, b = pair
    of_a, of_b = (layout[name][1] for name in pair)
    if EMBEDDING in a.split(".") or isinstance(holder, nn.Embedding):
        return f"{a} is an adapter of an embedding"
    if variant := _variant(holder, own):
        return f"{a} belongs to peft's variant {variant}, which does not add the plain product"
    if len(of_a) != 2 or len(of_b) != 2:
        return f"{a} is an adapter of a convolution"
    if of_a[0] != of_b[1]:
        shapes = f"{tuple(of_a)} and {tuple(of_b)}"
        return f"{a} and {b} have shapes {shapes}, which are not (rank, in) and (out, rank)"
    scaling = holder._parameters.get("scaling")
    if scaling is not None and scaling.requires_grad:
        return f"{a.rpartition('lora_A')[0]}scaling, which multiplies the product, is trained"
    bias = b.removesuffix("weight") + "bias"
    if bias != b and bias in layout:
        return f"{bias} is a bias within the adapter (lora_bias)"
    return ""


def _variant(holder: nn.Module, own: str) -> str:
    """Return the name of peft's variant of LoRA that computes an adapter; empty: plain LoRA."""
    variants = getattr(holder, "lora_variant", None)
    found = variants.get(own) if isinstance(variants, Mapping) else None
    if found is None:
        return ""
    kind = found if isinstance(found, type) else type(found)
    name = kind.__name__.removesuffix("Variant").removesuffix("Linear")
    return {"Dora": "DoRA"}.get(name, name)


def beside(path: str, parameters: Mapping[str, nn.Parameter], pair: tuple[str, str]) -> str:
    """Return the name of the frozen weight that belongs to a pair; empty if there is none."""
    prefix = f"{path}." if path else ""
    for name in (f"{prefix}base_layer.weight", f"{prefix}weight"):
        parameter = parameters.get(name)
        if parameter is not None and not parameter.requires_grad and name not in pair:
            return name
    return ""


def scale_in(holder: nn.Module, adapter: str) -> float:
    """Return the number ``scaling`` of the module that holds a pair; 1 if it has none."""
    scaling: Any = getattr(holder, "scaling", None)
    if isinstance(scaling, Mapping):
        scaling = scaling.get(adapter)
    if isinstance(scaling, Tensor) and scaling.numel() == 1:
        return float(scaling.detach())
    is_number = isinstance(scaling, (int, float)) and not isinstance(scaling, bool)
    return float(scaling) if is_number else 1.0


def users_of_parameters(learner: nn.Module) -> dict[int, list[str]]:
    """Paths of the modules that hold each parameter as their own, by the parameter's id."""
    users: dict[int, list[str]] = {}
    for path, module in learner.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(path)
    return users


def check_products(layout: Any, asking: str) -> None:
    """Refuse adapters of which a method cannot take products, as far as their structure says so.

    Raises:
        UserError: it names the method, ``asking``, and the parameter.
    """
    for adapter in layout.adapters:
        if adapter.why_no_product:
            raise no_product(adapter.why_no_product, asking)


def no_product(why: str, asking: str) -> UserError:
    return UserError(
        f"method: {asking} computes with B·A of each adapter, and {why}. Use LoRA on linear "
        "layers without such options, or a method that averages A and B separately, such as "
        "FedIT (--config method/fedit)."
    )


def check_weights(layout: Any, asking: str) -> None:
    """Refuse adapters without a frozen weight, which a method would change.

    Raises:
        UserError: it names the method, ``asking``, and the adapter.
    """
    for adapter in layout.adapters:
        if not adapter.weight:
            raise UserError(
                f"method: {asking} adds to the frozen weight under each adapter, and "
                f"{adapter.name} has none: the module {adapter.holder} has no parameter "
                "base_layer.weight or weight that is frozen (requires_grad=False). Freeze it, or "
                "use a method that leaves the base as it is, such as FedIT."
            )


def check_there(layout: Any, asking: str) -> None:
    """Refuse a learner without adapters.

    Raises:
        UserError: it names the method, ``asking``, and says how to add LoRA.
    """
    if not layout.adapters:
        raise UserError(
            f"method: {asking} is for adapters (LoRA), but the learner has none: no module "
            "has trainable parameters lora_A and lora_B. Wrap the network before it is "
            "given to the run: network = peft.get_peft_model(network, peft.LoraConfig(r=8, "
            "target_modules=[…])). CausalLanguageModel and TextClassifier do so by --model.learner."
            "lora '{r: 8, target_modules: […]}'."
        )
