"""What an adapter's layer adds is measured before round 0, whatever its parameters are called."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import UserError
from fl_lightning.learner.adapter_products import check_what_is_added
from fl_lightning.learner.adapters import check_products
from fl_lightning.learner.layout import Layout


class Low(nn.Linear):
    """x Wᵀ + b + scaling · x Aᵀ Bᵀ; subclasses add something else."""

    def __init__(self, d_in: int = 4, out: int = 4, rank: int = 2) -> None:
        super().__init__(d_in, out)
        self.weight.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, d_in))
        self.lora_B = nn.Parameter(torch.zeros(out, rank))
        self.scaling = 2.0

    def added(self, x: Tensor) -> Tensor:
        return self.scaling * (x @ self.lora_A.T) @ self.lora_B.T

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.added(x)


class Dropped(Low):
    def added(self, x: Tensor) -> Tensor:
        return super().added(nn.functional.dropout(x, 0.5, self.training))


class InFloat32(Low):
    """As a layer that computes its adapter in float32 whatever the input is."""

    def added(self, x: Tensor) -> Tensor:
        low = x.float() @ self.lora_A.float().T
        return (self.scaling * low @ self.lora_B.float().T).to(x.dtype)


class Merging(Low):
    """As loralib's: eval() adds the product to the weight."""

    def train(self, mode: bool = True) -> Any:
        if not mode:
            self.weight.data += self.scaling * self.lora_B @ self.lora_A
            self.merged = True
        return super().train(mode)

    def added(self, x: Tensor) -> Tensor:
        return 0 * x if getattr(self, "merged", False) else super().added(x)


class TwoLinear(nn.Module):
    """Factors that are modules with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.lora_B = nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x @ self.weight.T + self.lora_B(self.lora_A(x))
        return found


class OnlySingle(Low):
    """Runs in float32 alone, as a layer whose kernel exists for its own precision."""

    def added(self, x: Tensor) -> Tensor:
        assert self.lora_A.dtype == torch.float32
        return super().added(x)


class OnlySequences(Low):
    """Takes (texts, tokens, features)."""

    def added(self, x: Tensor) -> Tensor:
        _, tokens, _ = x.shape
        return super().added(x) * (tokens > 0)


class Square(Low):
    """x A B, where all shapes fit because all are square."""

    def __init__(self) -> None:
        super().__init__(rank=4)

    def added(self, x: Tensor) -> Tensor:
        return self.scaling * x @ self.lora_A @ self.lora_B


class Triple(Low):
    def added(self, x: Tensor) -> Tensor:
        return 3 * super().added(x)


class Gated(Low):
    """Its gate is 1 at first, and trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(()))

    def added(self, x: Tensor) -> Tensor:
        return self.gate * super().added(x)


class Bent(Low):
    def added(self, x: Tensor) -> Tensor:
        return self.scaling * torch.tanh(x @ self.lora_A.T) @ self.lora_B.T


class Once(Low):
    """Adds the product to every second row."""

    def added(self, x: Tensor) -> Tensor:
        return super().added(x) * (torch.arange(len(x)) % 2)[:, None]


class Other(Low):
    """Takes two tensors."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) * mask


class Transposed(Low):
    """Its weight is stored as (in, out), and it does not say so."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.added(x)


class TransposedSaid(Transposed):
    fan_in_fan_out = True


def refused(layer: nn.Module, changes_base: bool = True) -> str:
    network = nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))
    layout = Layout(network)
    try:
        check_products(layout, "Flex")
        check_what_is_added(network, layout, "Flex", changes_base)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "layer", [Low, Dropped, InFloat32, Merging, TwoLinear, TransposedSaid], ids=lambda c: c.__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_products_are_accepted(layer: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    assert refused(layer().to(dtype)) == ""


def test_layers_of_one_precision_or_of_sequences_are_accepted() -> None:
    assert refused(OnlySingle()) == "" and refused(OnlySequences()) == ""


class Mixed(Low):
    """Its weight is bfloat16, its factors are float32."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.weight.data = self.weight.data.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        base = nn.functional.linear(x.to(self.weight.dtype), self.weight)
        return base.to(x.dtype) + self.factor * self.added(x)


class MixedOther(Mixed):
    factor = 1.1


def test_a_base_in_bfloat16_is_accepted() -> None:
    assert refused(Mixed()) == ""
    assert "but 2.2 · B·A" in refused(MixedOther())


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Square, "adds something else than 2 · B·A"),
        (Triple, "adds something else than 2 · B·A to its output, but 6 · B·A"),
        (Gated, "adds something else than 2 · B·A"),
        (Bent, "adds something else than 2 · B·A"),
        (Once, "adds something else than 2 · B·A"),
        (Other, r"cannot be tried by itself.*missing 1 required positional argument: 'mask'"),
    ],
)
def test_what_is_no_product_is_refused_by_the_layers_name(layer: Any, says: str) -> None:
    text = refused(layer(), changes_base=False)
    assert text.startswith("method: Flex computes with B·A")
    assert f"the layer 0 ({layer.__name__})" in text
    assert re.search(says, text), text


def test_a_weight_that_is_stored_transposed_is_refused_where_the_method_changes_it() -> None:
    assert refused(Transposed(), changes_base=False) == ""
    assert "if its product were part of the frozen weight 0.weight" in refused(Transposed())
    layer = Transposed(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 6), requires_grad=False)
    layer.lora_B = nn.Parameter(torch.zeros(6, 2))
    text = refused(layer)
    assert "0.weight has shape (4, 6), but 0 adds a product of shape (6, 4)" in text


def test_an_embedding_with_factors_of_its_own_is_refused() -> None:
    """As loralib's, whose product is transposed: a square one would fit."""
    table = nn.Embedding(4, 4)
    table.lora_A, table.lora_B = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.randn(4, 2))
    table.weight.requires_grad_(False)
    assert "0.lora_A is an adapter of an embedding" in refused(table)


def test_a_factor_of_two_layers_is_refused() -> None:
    network = nn.Sequential(Low(), Low())
    network[1].lora_A = network[0].lora_A
    layout = Layout(network)
    assert [(each.a, each.b) for each in layout.adapters] == [
        ("0.lora_A", "0.lora_B"),
        ("0.lora_A", "1.lora_B"),
    ]
    with pytest.raises(UserError, match=r"Flex.*0\.lora_A is a factor of several adapters"):
        check_products(layout, "Flex")


def test_learner_and_random_numbers_stay() -> None:
    layer = Dropped().train()
    before = copy.deepcopy(layer.state_dict())
    network, state = nn.Sequential(layer), torch.get_rng_state()
    check_what_is_added(network, Layout(network), "Flex", changes_base=True)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert layer.training


# --------------------------------------------------------------------------- with peft


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="pip install 'fl-lightning[lora]'")


def with_peft(peft: Any, **config: Any) -> nn.Module:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    given = {"r": 2, "lora_alpha": 6, "target_modules": ["0"], **config}
    made: nn.Module = peft.get_peft_model(network, peft.LoraConfig(**given))
    return made


def says(network: nn.Module) -> str:
    layout = Layout(network)
    try:
        check_products(layout, "Flex")
        check_what_is_added(network, layout, "Flex", changes_base=True)
    except UserError as error:
        return str(error)
    return ""


def test_an_adapter_that_is_not_active_adds_nothing(peft: Any) -> None:
    network = with_peft(peft)
    assert says(network) == ""
    network.add_adapter("other", peft.LoraConfig(r=1, target_modules=["0"]))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name)
    assert "the layer base_model.model.0 (Linear) adds something else" in says(network)
    network.base_model.set_adapter(["default", "other"])
    assert says(network) == ""


def test_merged_adapters_and_disabled_ones_add_nothing(peft: Any) -> None:
    for method in ("merge_adapter", "disable_adapter_layers"):
        network = with_peft(peft)
        getattr(network.base_model, method)()
        for name, parameter in network.named_parameters():
            parameter.requires_grad_("lora_" in name)
        assert "adds something else" in says(network), method
