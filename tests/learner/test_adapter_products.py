"""What an adapter's layer adds is measured before round 0, whatever its parameters are called."""

from __future__ import annotations

import copy
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
    """x Wᵀ + b + scaling · x Aᵀ Bᵀ, or what ``how`` makes of that product."""

    def __init__(self, how: Any = None, rank: int = 2) -> None:
        super().__init__(4, 4)
        self.weight.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, 4))
        self.lora_B = nn.Parameter(torch.zeros(4, rank))
        self.gate = nn.Parameter(torch.ones(()), requires_grad=how is gated)
        self.scaling = 2.0
        self.how = how

    def added(self, x: Tensor) -> Tensor:
        product = self.scaling * (x @ self.lora_A.T) @ self.lora_B.T
        return product if self.how is None else self.how(self, x, product)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.added(x)


def gated(layer: Low, x: Tensor, product: Tensor) -> Tensor:
    return layer.gate * product


class Dropped(Low):
    def added(self, x: Tensor) -> Tensor:
        return super().added(nn.functional.dropout(x, 0.5, self.training))


class TwoLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4), requires_grad=False)
        self.lora_A = nn.Linear(4, 2, bias=False)
        self.lora_B = nn.Linear(2, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x @ self.weight.T + self.lora_B(self.lora_A(x))
        return found


OTHERS: dict[str, Callable[[], nn.Module]] = {
    # x A B, where all shapes fit because all are square
    "square": lambda: Low(lambda layer, x, _: 2 * x @ layer.lora_A @ layer.lora_B, rank=4),
    "triple": lambda: Low(lambda layer, x, product: 3 * product),
    "gated": lambda: Low(gated),
    "bent": lambda: Low(lambda layer, x, _: torch.tanh(x @ layer.lora_A.T) @ layer.lora_B.T),
    "every second row": lambda: Low(
        lambda _, x, product: product * (torch.arange(len(x)) % 2)[:, None]
    ),
}


def refused(layer: nn.Module) -> str:
    return says(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3)))


def says(network: nn.Module) -> str:
    layout = Layout(network)
    try:
        check_products(layout, "Flex")
        check_what_is_added(network, layout, "Flex")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layer", [Low, Dropped, TwoLinear], ids=lambda c: c.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_plain_products_are_accepted(layer: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    assert refused(layer().to(dtype)) == ""


class Mixed(Low):
    def forward(self, x: Tensor) -> Tensor:
        base = nn.functional.linear(x.bfloat16(), self.weight.bfloat16())
        return base.to(x.dtype) + self.added(x)


def test_a_base_in_bfloat16_is_accepted() -> None:
    for how, said in ((None, ""), (lambda layer, x, product: 1.1 * product, "something else")):
        layer = Mixed(how)
        layer.weight.data = layer.weight.data.bfloat16()
        assert said in (text := refused(layer)) and bool(said) == bool(text)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_product_is_refused_by_the_layers_name(name: str) -> None:
    text = refused(OTHERS[name]())
    assert text.startswith("method: Flex computes with B·A")
    assert "the layer 0 (Low) adds something else than 2 · B·A" in text


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
    check_what_is_added(network, Layout(network), "Flex")
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


def test_an_adapter_that_is_not_active_adds_nothing(peft: Any) -> None:
    network = with_peft(peft)
    assert says(network) == ""
    network.add_adapter("other", peft.LoraConfig(r=1, target_modules=["0"]))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_("lora_" in name)
    assert "the layer base_model.model.0 (Linear) adds something else" in says(network)
    network.base_model.set_adapter(["default", "other"])
    assert says(network) == ""
