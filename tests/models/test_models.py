"""Sizes of the networks, what the learner logs, what importing costs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.datamodules.loaders import Batches
from fl_lightning.errors import UserError
from fl_lightning.models import MLP, VGG11, ImageClassifier, LeNet, ResNet18GN, ResNet20


@pytest.mark.parametrize(
    ("network", "shape", "parameters"),
    [
        (lambda: MLP(), (1, 28, 28), 199_210),
        (lambda: MLP([12, 3]), (3, 2, 2), 39),
        (lambda: LeNet(10), (3, 32, 32), 797_962),
        (lambda: LeNet(7, in_channels=1, input_size=28), (1, 28, 28), 572_999),
        (lambda: LeNet(10, channels=16), (3, 32, 32), 237_466),
        (lambda: ResNet18GN(10), (3, 32, 32), 11_181_642),
        (lambda: VGG11(10), (3, 32, 32), 9_750_922),
    ],
)
def test_parameters_and_shapes(network, shape, parameters):
    net = network()
    assert sum(p.numel() for p in net.parameters()) == parameters
    out = net(torch.randn(2, *shape))
    assert out.shape[0] == 2 and out.ndim == 2 and torch.isfinite(out).all()
    out.sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_groups_and_shortcuts():
    norms = [m for m in ResNet18GN(10, groups=4).modules() if isinstance(m, torch.nn.GroupNorm)]
    assert len(norms) == 20 and all(n.num_groups == 4 for n in norms)
    assert not any(isinstance(m, torch.nn.BatchNorm2d) for m in ResNet18GN(10).modules())
    # 16 to 32 channels: with dead convolutions the shortcut alone is left
    block = ResNet20(10).blocks[3]
    for p in block.parameters():
        torch.nn.init.zeros_(p)
    x = torch.rand(1, 16, 8, 8)
    y = block(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2]) and not y[:, :8].any() and not y[:, 24:].any()


@pytest.mark.parametrize(
    "make",
    [
        lambda: LeNet(10, input_size=8),
        lambda: LeNet(10, channels=0),
        lambda: MLP([3]),
        lambda: MLP([3, 0]),
        lambda: ImageClassifier(MLP([3, 1]), 1),
    ],
)
def test_refusals(make):
    with pytest.raises(UserError, match=r"(input_size is 8|channels=0|sizes is \[3|num_classes=1)"):
        make()


def test_learner_trains_and_logs_under_the_published_names():
    pl.seed_everything(0)
    x = torch.randn(90, 4)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    batches = [(x[i : i + 40], y[i : i + 40]) for i in (0, 40, 80)]
    loader = Batches(lambda: iter(batches), 3, keep=False)
    learner = ImageClassifier(MLP([4, 32, 3]), 3, lr=0.5, weight_decay=1e-4)
    trainer = pl.Trainer(
        max_epochs=40,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(learner, loader, loader)
    assert {"train/loss", "train/acc", "val/loss", "val/acc"} <= trainer.callback_metrics.keys()
    with torch.no_grad():
        logits = learner(x)
    assert trainer.callback_metrics["val/acc"] == pytest.approx(
        (logits.argmax(1) == y).float().mean()
    )
    loss = torch.nn.functional.cross_entropy(logits, y)
    assert trainer.callback_metrics["val/loss"] == pytest.approx(float(loss), rel=1e-4)
    assert trainer.callback_metrics["val/acc"] > 0.9
    tested = trainer.test(learner, loader, verbose=False)[0]
    assert tested.keys() == {"test/loss", "test/acc"}
    predicted = torch.cat(trainer.predict(learner, loader))
    torch.testing.assert_close(predicted.sum(1), torch.ones(90))
    assert dict(learner.hparams) == {
        "num_classes": 3,
        "lr": 0.5,
        "weight_decay": 1e-4,
        "momentum": 0.0,
    }
    group = learner.configure_optimizers().param_groups[0]
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.5, 1e-4, 0)
    assert (
        ImageClassifier(learner.network, 3, momentum=0.9)
        .configure_optimizers()
        .param_groups[0]["momentum"]
        == 0.9
    )


def test_importing_a_small_network_is_light():
    code = (
        "import sys; from fl_lightning.models import MLP; "
        "print('torchvision' in sys.modules, 'pytorch_lightning' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
    with pytest.raises(ImportError):
        from fl_lightning.models import ResNet19  # noqa: F401


def test_a_classifier_refuses_numbers():
    learner = ImageClassifier(MLP([4, 3]), 3)
    with pytest.raises(UserError, match=r"the targets are torch\.float32 of shape \(5,\)"):
        learner.training_step((torch.randn(5, 4), torch.rand(5)), 0)
