"""Adapters are found by the modules that own both factors, with peft and without it."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import FederatedModule, UserError
from fl_lightning.learner.adapters import check_products, check_weights
from fl_lightning.learner.layout import Layout
from fl_lightning.round.base_weights import Base
from tests.helpers.low_rank import Adapted


def test_a_pair_is_lora_a_and_lora_b_of_one_module() -> None:
    learner = Adapted()
    layout = FederatedModule(learner).layout
    first, head = layout.adapters
    assert (first.name, head.name) == ("first", "head")
    assert (first.a, first.b) == ("first.lora_A", "first.lora_B")
    assert (first.weight, first.rank, first.scale) == ("first.weight", 3, 0.7)
    assert (head.weight, head.rank, head.scale) == ("head.weight", 2, 1.5)
    vector = torch.arange(layout.size, dtype=torch.float64)
    a, b = first.matrices(vector)
    assert a.shape == (3, 3) and b.shape == (5, 3) and first.size == 8
    assert a.reshape(-1).equal(vector[layout["first.lora_A"][0]])
    b.zero_()
    assert not vector[layout["first.lora_B"][0]].any()


def test_a_factor_that_is_frozen_is_no_half_of_a_pair() -> None:
    learner = Adapted()
    learner.first.lora_A.requires_grad_(False)
    assert [each.name for each in Layout(learner).adapters] == ["head"]


def test_without_scaling_and_without_a_weight() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lora_A = nn.Parameter(torch.zeros(2, 3))
            self.lora_B = nn.Parameter(torch.zeros(4, 2))

    (own,) = Layout(Bare()).adapters
    assert (own.name, own.weight, own.scale) == ("", "", 1.0)
    with pytest.raises(UserError, match=r"Flora adds to the frozen weight"):
        check_weights(Layout(Bare()), "Flora")


def test_a_weight_that_another_module_uses_is_told() -> None:
    learner = Adapted()
    learner.twin = nn.Linear(5, 4)
    learner.twin.weight = learner.head.weight
    with pytest.raises(UserError, match=r"Flora changes the frozen weight head\.weight.*twin"):
        Base().names(Layout(learner), learner, "Flora")


def test_a_network_that_is_reached_by_two_paths_is_not_tied() -> None:
    learner = Adapted()
    learner.also = learner.head
    assert "head.weight" in Base().names(Layout(learner), learner, "Flora")


def test_a_group_has_factors_whose_other_factor_is_frozen() -> None:
    learner = Adapted()
    learner.first.lora_A.requires_grad_(False)
    layout = Layout(learner)
    assert layout.named("lora_A", "Fedsa") == ["head.lora_A"]
    assert layout.named("lora_B", "Fedsa") == ["first.lora_B", "head.lora_B"]
    assert layout.named("*lora_B*", "Fedsa") == ["first.lora_B", "head.lora_B"]
    with pytest.raises(UserError, match="Fedsa: the learner has no trainable lora_B"):
        Layout(nn.Linear(3, 2)).named("lora_B", "Fedsa")


# --------------------------------------------------------------------------- with peft


@pytest.fixture
def peft() -> Any:
    return pytest.importorskip("peft", reason="pip install 'fl-lightning[lora]'")


class Own(pl.LightningModule):
    """A LightningModule of the user's own around a network with peft inside."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def test_pefts_are_found_inside_of_a_module_of_ones_own(peft: Any) -> None:
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0", "2"], rank_pattern={"2": 3})
    learner = Own(peft.get_peft_model(net(), config))
    one, two = Layout(learner).adapters
    assert one.name == "network.base_model.model.0.default"
    assert one.a == "network.base_model.model.0.lora_A.default.weight"
    assert one.weight == "network.base_model.model.0.base_layer.weight"
    assert (one.rank, one.scale, two.rank, two.scale) == (2, 3.0, 3, 2.0)
    check_products(Layout(learner), "Flex")
    check_weights(Layout(learner), "Flora")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"lora_bias": True}, "lora_bias"),
        ({"target_modules": ["table"]}, "embedding"),
        ({"target_modules": ["conv"]}, "convolution"),
    ],
)
def test_what_adds_something_else_is_refused_by_name(peft: Any, given: Any, says: str) -> None:
    network = net()
    network.table = nn.Embedding(3, 4)
    network.conv = nn.Conv2d(2, 2, 3)
    config = peft.LoraConfig(**{"r": 2, "target_modules": ["0"], **given})
    layout = Layout(Own(peft.get_peft_model(network, config)))
    with pytest.raises(UserError, match=rf"Flex computes with B·A.*lora_.*{says}"):
        check_products(layout, "Flex")


def test_a_scale_that_is_trained_is_refused_by_name() -> None:
    learner = Adapted()
    del learner.first.scaling
    learner.first.scaling = nn.Parameter(torch.tensor(0.7).double())
    with pytest.raises(UserError, match=r"Flex computes with B·A.*first\.scaling, .*is trained"):
        check_products(Layout(learner), "Flex")
