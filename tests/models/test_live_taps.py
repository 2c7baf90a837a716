"""The convolution without dead taps is the same function, and so are its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fl_lightning.models.padded_convolution import LiveTaps, leave_out_dead_taps


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_same_values_and_gradients(side: int, stride: int) -> None:
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 5, 3, stride, 1, bias=False).double()
    live = LiveTaps(3, 5, 3, stride, 1, bias=False).double()
    live.load_state_dict(plain.state_dict())
    x = torch.randn(4, 3, side, side, dtype=torch.float64)
    found = []
    for layer in (plain, live):
        given = x.clone().requires_grad_()
        out = layer(given)
        weights = torch.arange(out.numel(), dtype=out.dtype).view(out.shape)
        found.append([out, *torch.autograd.grad((out * weights).sum(), [given, layer.weight])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_network_keeps_its_names_and_can_be_stacked() -> None:
    network = nn.Sequential(
        nn.Conv2d(2, 3, 3, 2, 1, bias=False),
        nn.Conv2d(3, 3, 3, 1, 1, bias=False),
        nn.Conv2d(3, 2, 1),
    )
    names = list(network.state_dict())
    leave_out_dead_taps(network)
    assert list(network.state_dict()) == names
    assert [type(layer) for layer in network] == [LiveTaps, LiveTaps, nn.Conv2d]
    x = torch.randn(3, 4, 2, 2, 2)
    stacked = {
        name: torch.stack([p.detach() * k for k in (1, 2, 3)])
        for name, p in network.named_parameters()
    }

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return functional_call(network, parameters, (x,)).square().sum()

    together = vmap(grad(loss))(stacked, x)
    for row in range(3):
        alone = grad(loss)({name: value[row] for name, value in stacked.items()}, x[row])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][row], value)
