"""ResNet20's other norms, depths, widths and channels.

Every network on images of other channels and sizes.
"""

from __future__ import annotations

import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.models import VGG11, ResNet18GN, ResNet20


@pytest.mark.parametrize(
    ("arguments", "parameters"),
    [
        ({}, 269_722),  # He et al.: 0.27 M
        ({"norm": "group"}, 269_722),
        ({"depth": 32}, 464_154),  # 0.46 M
        ({"depth": 110}, 1_727_962),  # 1.7 M
        ({"width": 32}, 1_073_962),
        ({"in_channels": 1}, 269_722 - 2 * 9 * 16),
    ],
)
def test_parameters(arguments: dict[str, object], parameters: int) -> None:
    network = ResNet20(10, **arguments)
    assert sum(p.numel() for p in network.parameters()) == parameters
    norms = (torch.nn.BatchNorm2d, torch.nn.GroupNorm)
    used = {type(m) for m in network.modules() if isinstance(m, norms)}
    assert used == {norms[arguments.get("norm") == "group"]}


def test_group_normalisation_does_not_look_at_the_batch() -> None:
    x = torch.randn(6, 3, 16, 16)
    network = ResNet20(4, norm="group")
    torch.testing.assert_close(network(x)[:1], network(x[:1]))
    assert not list(network.buffers())


@pytest.mark.parametrize("make", [ResNet20, ResNet18GN, VGG11])
@pytest.mark.parametrize("side", [8, 17, 28, 32])
def test_any_channels_and_size(make: type[torch.nn.Module], side: int) -> None:
    network = make(7, in_channels=2)
    out = network(torch.randn(3, 2, side, side))
    assert out.shape == (3, 7) and torch.isfinite(out).all()
    out.square().sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.parametrize(
    "wrong", [{"norm": "grop"}, {"depth": 21}, {"depth": 2}, {"width": 0}, {"width": 3}]
)
def test_refusals(wrong: dict[str, object]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(UserError, match=f"ResNet20('s {name} is |: {name}=){value!r}"):
        ResNet20(10, **wrong)
