"""Optimizers that others wrote: what they keep beside their parameters' state is each client's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from fl_lightning import UserError
from tests.helpers.learners import Lit, blobs, federated, trainer


class Signs(torch.optim.Optimizer):
    """Like lion-pytorch, it keeps a setting as an attribute of its own."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.decoupled = 0.1
        self.held = [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.held:
            p.mul_(1 - self.decoupled * self.param_groups[0]["lr"])
            p.sub_(self.param_groups[0]["lr"] * p.grad.sign())


class Counting(torch.optim.Optimizer):
    """Like timm's Lamb and Prodigy, it counts its steps in the group, where the step adds it."""

    def __init__(self, params: Any, lr: float = 0.05, lists: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.lists = lists

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["longest"] = max(group.get("longest", 0.0), 0.5 + group["k"] / 10)
            total = group.setdefault("total", torch.zeros((), dtype=torch.float64))
            total += 1
            if self.lists:
                group["history"] = [*group.get("history", []), group["k"]]
            for p in group["params"]:
                p.sub_(group["lr"] * group["longest"] / total * p.grad)


class Remembering(torch.optim.Optimizer):
    """It counts in an attribute."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.k += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(self.param_groups[0]["lr"] / self.k * p.grad)


class Ahead(torch.optim.Optimizer):
    """Slow weights around another optimizer, as Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class Drawing(Signs):
    """With noise of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.noise = [torch.Generator().manual_seed(0)]


def by_hand(learner: Any, optimizer: Any, data: Any, client: int, steps: list[int]) -> Tensor:
    """The weights of a client's rounds of so many steps, with one optimizer throughout."""
    for round, number in enumerate(steps):
        for x, y in data.client_batches(client, round, number):
            learner.zero_grad()
            nn.functional.cross_entropy(learner.net(x), y).backward()
            optimizer.step()
    return nn.utils.parameters_to_vector(learner.parameters()).detach()


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
@pytest.mark.parametrize("kind", [Signs, Counting, Remembering])
def test_each_client_gets_the_optimizer_as_it_was_built(
    kind: Any, engine: str, scheduled: bool
) -> None:
    class Own(Lit):
        def configure_optimizers(self) -> Any:
            optimizer = kind(self.parameters())
            if not scheduled:
                return optimizer
            # A scheduler puts a `step` of its own upon the optimizer.
            return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)]

    data = blobs(clients=2)
    module = federated(Own(), participation="all", engine=engine)
    start = copy.deepcopy(module.learner)
    trainer(1, limit_val_batches=0).fit(module, data)
    ends = []
    for client in range(2):
        learner = copy.deepcopy(start)
        ends.append(by_hand(learner, kind(learner.parameters()), data, client, [3]))
    torch.testing.assert_close(
        module.global_vector.detach(), torch.stack(ends).mean(0), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("kind", [Counting, Remembering])
def test_a_client_that_keeps_its_state_keeps_groups_and_attributes_too(
    kind: Any, tmp_path: Path
) -> None:
    data = blobs(clients=1)
    settings = {"participation": "all", "keep_optimizer_state": True, "client_optimizer": kind}
    module = federated(**settings)
    learner = copy.deepcopy(module.learner)
    trainer(3, limit_val_batches=0).fit(module, data)
    expected = by_hand(learner, kind(learner.parameters()), data, 0, [3, 3, 3])
    torch.testing.assert_close(module.global_vector.detach(), expected, rtol=1e-12, atol=1e-12)

    saving = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    first = federated(**settings)
    trainer(2, [saving], limit_val_batches=0, enable_checkpointing=True).fit(first, blobs(1))
    resumed = federated(**settings)
    trainer(3, limit_val_batches=0).fit(resumed, blobs(1), ckpt_path=str(tmp_path / "last.ckpt"))
    assert torch.equal(resumed.global_vector, module.global_vector)


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    module = federated(
        keep_optimizer_state=True, client_optimizer=lambda p: Counting(p, lists=True)
    )
    with pytest.raises(UserError, match="cannot keep Counting's state 'history', a list"):
        trainer(1).fit(module, blobs())


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda p: Ahead(torch.optim.SGD(p, 0.1)), r"Ahead holds another optimizer \(inner: SGD\)"),
        (Drawing, r"Drawing holds a random generator \(noise: Generator\)"),
    ],
)
def test_an_optimizer_that_clients_would_share_is_refused(optimizer: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        trainer(1).fit(federated(client_optimizer=optimizer), blobs())


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_an_optimizer_s_steps_are_refused(kind: Any, when: str) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = kind(parameters, lr=0.1)
        getattr(made, f"register_step_{when}_hook")(lambda optimizer, args, kwargs: None)
        return made

    told = rf"{kind.__name__} has hooks of its steps \(register_step_{when}_hook\)"
    with pytest.raises(UserError, match=told):
        trainer(1).fit(federated(client_optimizer=optimizer), blobs())


class Reading(Lit):
    """Its hook reads an attribute of its optimizer."""

    def configure_optimizers(self) -> Any:
        return Signs(self.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("train/decoupled", self.optimizers().optimizer.decoupled)

    def on_train_epoch_start(self) -> None:
        assert self.optimizers().optimizer.decoupled == 0.1


def test_hooks_find_the_optimizer_s_own_attributes() -> None:
    module, run = federated(Reading()), trainer(1)
    run.fit(module, blobs())
    assert float(run.callback_metrics["train/decoupled"]) == pytest.approx(0.1)


@pytest.mark.parametrize("whose", ["client_optimizer", "server_optimizer"])
def test_an_optimizer_without_a_rate_is_refused(whose: str) -> None:
    """As transformers' Adafactor, whose rate is None unless one is given."""
    made = {whose: lambda p: Signs(p, lr=None)}  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"{whose}: Signs has lr=None.*relative_step=False"):
        trainer(1).fit(federated(**made), blobs())
