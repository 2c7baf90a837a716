"""The networks' sizes and functions, what the learners log, what importing costs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from fl_lightning.datamodules.loaders import Batches
from fl_lightning.errors import UserError
from fl_lightning.models import (
    LSTM,
    MLP,
    VGG11,
    Classifier,
    FedAvgCNN,
    LeNet,
    NextToken,
    ResNet18,
    ResNet18GN,
    ResNet20,
)
from fl_lightning.models.resnet18gn import LiveTaps
from tests.helpers.learners import trainer


@pytest.mark.parametrize(
    ("network", "shape", "parameters"),
    [
        (lambda: MLP(), (1, 28, 28), 199_210),
        (lambda: LeNet(10), (3, 32, 32), 797_962),
        (lambda: LeNet(7, in_channels=1, input_size=28), (1, 28, 28), 572_999),
        (lambda: ResNet18GN(10), (3, 32, 32), 11_181_642),
        (lambda: ResNet18(10), (3, 32, 32), 11_173_962),
        (lambda: FedAvgCNN(10), (1, 28, 28), 582_026),
        (lambda: FedAvgCNN(10, in_channels=3, input_size=32), (3, 32, 32), 878_538),
        (lambda: VGG11(10), (3, 32, 32), 9_750_922),
        (lambda: ResNet20(10), (3, 32, 32), 269_722),  # He et al.: 0.27 M
        (lambda: ResNet20(10, norm="group"), (3, 32, 32), 269_722),
        (lambda: ResNet20(10, depth=110), (3, 8, 8), 1_727_962),  # 1.7 M
        (lambda: ResNet20(10, width=32), (3, 32, 32), 1_073_962),
        (lambda: ResNet20(10, in_channels=1), (1, 17, 17), 269_722 - 2 * 9 * 16),
        (lambda: VGG11(10, in_channels=1), (1, 28, 28), 9_750_922 - 2 * 9 * 64),
    ],
)
def test_parameters_and_shapes(network, shape, parameters):
    net = network()
    assert sum(p.numel() for p in net.parameters()) == parameters
    out = net(torch.randn(2, *shape))
    assert out.shape[0] == 2 and out.ndim == 2 and torch.isfinite(out).all()
    out.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_resnet18_is_torchvision_s_apart_from_its_stem():
    from torchvision.models import resnet18

    theirs, mine = resnet18(num_classes=5), ResNet18(5, stem="imagenet")
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 3, 64, 64)
    torch.testing.assert_close(mine(x), theirs(x))
    small = ResNet18(5, in_channels=1)
    assert small.conv1.weight.shape == (64, 1, 3, 3) and small.conv1.stride == (1, 1)
    theirs.conv1, theirs.maxpool = small.conv1, torch.nn.Identity()
    theirs.load_state_dict(small.state_dict())
    x = torch.randn(4, 1, 32, 32)
    torch.testing.assert_close(small(x), theirs(x))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LeNet(10, channels=0), "channels=0"),
        (lambda: Classifier(MLP([3, 1]), 1), "num_classes=1"),
        (lambda: ResNet20(10, norm="grop"), "ResNet20: norm='grop'"),
        (lambda: ResNet20(10, depth=21), "ResNet20: depth=21"),
        (lambda: ResNet20(10, depth=2), "ResNet20: depth=2"),
        (lambda: ResNet20(10, width=3), "ResNet20: .*width=3"),
    ],
)
def test_refusals(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("side", [1, 2, 3, 4])
def test_the_convolution_without_dead_taps_is_the_same_function(side: int, stride: int) -> None:
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


def test_sizes_are_those_of_the_papers() -> None:
    stackoverflow = LSTM(10_004, None, 96, 670, 1, 96, "each")
    # Reddi et al. (2020) have 4,050,748; torch's LSTM has two biases a gate, Keras's one.
    assert sum(p.numel() for p in stackoverflow.parameters()) == 4_050_748 + 4 * 670


def test_what_comes_after_a_text_does_not_count() -> None:
    torch.manual_seed(0)
    network = LSTM(9, 3, 4, 5)
    short = torch.tensor([[4, 1]])
    padded = torch.tensor([[4, 1, -1, -1]])
    assert torch.equal(network(short), network(padded))
    learner = NextToken(LSTM(9, None, 4, 5, outputs="each"))
    loss = learner.predict_step((padded, None), 0)
    assert torch.equal(loss, learner.predict_step((short, None), 0)) and loss.shape == (1,)


def test_learner_trains_and_logs_under_the_published_names():
    torch.manual_seed(0)
    x = torch.randn(90, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    batches = [(x[i : i + 40], y[i : i + 40]) for i in (0, 40, 80)]
    loader = Batches(lambda: iter(batches), 3, keep=False)
    learner = Classifier(MLP([4, 32, 3]), 3, lr=0.5, weight_decay=1e-4)
    run: Any = trainer(40)
    run.fit(learner, loader, loader)
    assert {"train/loss", "train/acc", "val/loss", "val/acc"} <= run.callback_metrics.keys()
    with torch.no_grad():
        logits = learner(x)
    assert run.callback_metrics["val/acc"] == pytest.approx((logits.argmax(1) == y).float().mean())
    loss = torch.nn.functional.cross_entropy(logits, y)
    assert run.callback_metrics["val/loss"] == pytest.approx(float(loss), rel=1e-4)
    assert run.callback_metrics["val/acc"] > 0.9
    tested = run.test(learner, loader, verbose=False)[0]
    assert tested.keys() == {"test/loss", "test/acc"}
    predicted = torch.cat(run.predict(learner, loader))
    torch.testing.assert_close(predicted.sum(1), torch.ones(90))
    rates = {"lr": 0.5, "weight_decay": 1e-4, "momentum": 0.0}
    expected = {"num_classes": 3, "label_smoothing": 0.0, "metrics": (), **rates}
    assert dict(learner.hparams) == expected
    assert rates.items() <= learner.configure_optimizers().param_groups[0].items()


def test_importing_a_small_network_is_light():
    code = (
        "import sys; from fl_lightning.models import MLP; "
        "print('torchvision' in sys.modules, 'pytorch_lightning' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
    with pytest.raises(ImportError):
        from fl_lightning.models import ResNet19  # noqa: F401
