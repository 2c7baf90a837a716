"""Parameters without a gradient, or without an optimizer: as in plain training, they stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning.callbacks import MoreauEnvelope, ProximalPersonalModel, ProximalTerm
from tests.helpers.learners import Lit, as_batches, blobs, client_rows, federated, trainer

ENGINES: list[dict[str, Any]] = [
    {"engine": "sequential"},
    {"engine": "concurrent", "workers": 2, "capture": False},
    {"engine": "concurrent", "workers": 2, "capture": True},
    {"engine": "stacked"},
]
OPTIMIZERS = {
    "decay": lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    "groups": lambda p: torch.optim.AdamW([{"params": [each]} for each in p], 0.01),
}
pytestmark = pytest.mark.filterwarnings("ignore:engine=")


class TwoHeads(Lit):
    """The loss depends on one of two heads, by the batch's first label or always."""

    def __init__(self, by_batch: bool = False) -> None:
        super().__init__()
        self.other = nn.Linear(8, 4)
        self.by_batch = by_batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net[1](self.net[0](x))
        if self.by_batch and batch_idx % 2:
            return nn.functional.cross_entropy(self.other(hidden), y)
        return nn.functional.cross_entropy(self.net[2](hidden), y)


def by_hand(learner: Any, data: Any, optimizer: Any, steps: int = 3) -> dict[str, Tensor]:
    own = optimizer(list(learner.parameters()))
    for k, batch in enumerate(data.client_batches(0, 0, steps)):
        own.zero_grad()
        learner.training_step(batch, k).backward()
        own.step()
    return dict(learner.state_dict())


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("settings", ENGINES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_head_that_the_loss_does_not_depend_on_stays(optimizer: str, settings: Any) -> None:
    data = blobs(clients=1)
    learner = TwoHeads()
    module = federated(
        learner, participation="all", client_optimizer=OPTIMIZERS[optimizer], **settings
    )
    plain = copy.deepcopy(learner)
    plain.log = lambda *a, **k: None
    trainer(1).fit(module, data)
    assert_alike(module.export().state_dict(), by_hand(plain, data, OPTIMIZERS[optimizer]))


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", ["decay", "momentum"])
def test_a_head_stays_in_the_steps_that_do_not_use_it(optimizer: str, clip: float | None) -> None:
    data = blobs(clients=1)
    learner = TwoHeads(by_batch=True)
    module = federated(
        learner,
        participation="all",
        client_optimizer=OPTIMIZERS[optimizer],
        clip_norm=clip,
        engine="sequential",
    )
    plain = copy.deepcopy(learner)
    plain.log = lambda *a, **k: None

    class Clipped(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], clip)
            super().step()

    def clipped(parameters: Any) -> Any:
        (group,) = OPTIMIZERS[optimizer](parameters).param_groups
        options = {name: group[name] for name in ("lr", "momentum", "weight_decay")}
        return Clipped(parameters, **options)

    trainer(1).fit(module, data)
    found = module.export().state_dict()
    for name, value in by_hand(plain, data, clipped).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_head_that_a_method_pulls_is_stepped() -> None:
    data = blobs(clients=1)
    learner = TwoHeads(by_batch=True)
    module = federated(
        learner,
        participation="all",
        client_optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        engine="sequential",
    )
    start = learner.other.weight.detach().clone()
    trainer(1, [ProximalTerm(5.0)]).fit(module, data)
    assert not torch.equal(module.export().other.weight, start)


class HeadAlone(Lit):
    """Its optimizer holds the head; the body asks for gradients all the same."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


@pytest.mark.parametrize("personal", [ProximalPersonalModel, MoreauEnvelope])
def test_what_no_optimizer_holds_stays_in_personal_models_too(personal: Any) -> None:
    module = federated(HeadAlone(), participation="all", engine="sequential")
    trainer(2, [personal()]).fit(module, blobs(clients=2))
    body = module.layout["net.2.weight"][0].start
    models = [
        row
        for (key, _), row in client_rows(module).items()
        if row.shape == module.global_vector.shape
    ]
    assert models
    w = module.global_vector.detach()
    for model in models:
        assert torch.equal(model[:body], w[:body]) and not torch.equal(model[body:], w[body:])


def test_clipping_counts_what_the_optimizer_holds() -> None:
    data = blobs(clients=1)
    learner = HeadAlone()
    module = federated(learner, participation="all", clip_norm=0.05, engine="sequential")
    plain = copy.deepcopy(learner)
    trainer(1).fit(module, data)
    alone: pl.Trainer = trainer(1, gradient_clip_val=0.05, limit_val_batches=0)
    alone.fit(plain, as_batches(list(data.client_batches(0, 0, 3))))
    found = module.export().state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6, msg=name)
