"""Optimizers that others wrote: what they keep beside their parameters' state is each client's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import UserError
from fl_lightning.engines.engine_context import EngineContext
from tests.helpers.learners import Lit, assert_trained_as, blobs, by_hand, federated, trainer


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

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["longest"] = max(group.get("longest", 0.0), 0.5 + group["k"] / 10)
            total = group.setdefault("total", torch.zeros((), dtype=torch.float64))
            total += 1
            for p in group["params"]:
                p.sub_(group["lr"] * group["longest"] / total * p.grad)


class Remembering(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.k = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.k += 1
        for p in self.param_groups[0]["params"]:
            p.sub_(self.param_groups[0]["lr"] / self.k * p.grad)


class OfLists(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = [1.0]


class Ahead(torch.optim.Optimizer):
    """Slow weights around another optimizer, as Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


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
        end = by_hand(copy.deepcopy(start), data.client_batches(client, 0, 3), kind)
        ends.append(nn.utils.parameters_to_vector(end.parameters()).detach())
    torch.testing.assert_close(
        module.global_vector.detach(), torch.stack(ends).mean(0), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (lambda p: Ahead(torch.optim.SGD(p, 0.1)), r"Ahead holds another optimizer \(inner: SGD\)"),
        (Counting, "Counting has of each parameter, but its steps change 'k' in a parameter group"),
        (Remembering, "Remembering has of each parameter, but its steps change 'k'"),
        (OfLists, "cannot keep OfLists's state 'history', a list"),
    ],
)
def test_an_optimizer_that_clients_would_share_or_cannot_keep_is_refused(
    optimizer: Any, told: str
) -> None:
    module = federated(client_optimizer=optimizer, keep_optimizer_state=True)
    with pytest.raises(UserError, match=told):
        trainer(1).fit(module, blobs())


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_an_optimizer_s_steps_are_refused(when: str) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(parameters, lr=0.1)
        getattr(made, f"register_step_{when}_hook")(lambda optimizer, args, kwargs: None)
        return made

    told = rf"AdamW has hooks of its steps \(register_step_{when}_hook\)"
    with pytest.raises(UserError, match=told):
        trainer(1).fit(federated(client_optimizer=optimizer), blobs())


@pytest.mark.parametrize("whose", ["client_optimizer", "server_optimizer"])
def test_an_optimizer_without_a_rate_is_refused(whose: str) -> None:
    """As transformers' Adafactor, whose rate is None unless one is given."""
    made = {whose: lambda p: Signs(p, lr=None)}  # type: ignore[arg-type]
    with pytest.raises(UserError, match=rf"{whose}: Signs has lr=None.*relative_step=False"):
        trainer(1).fit(federated(**made), blobs())


class Counted(torch.optim.Optimizer):
    """Made with its state, as some are: the k-th step is k times as long."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"scale": torch.ones_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            scale = self.state[p]["scale"]
            p.sub_(self.param_groups[0]["lr"] * scale * p.grad)
            scale += 1


def trained(
    kind: Any, rounds: int, save: Path | None = None, resume: Path | None = None, **options: Any
) -> Tensor:
    """The model after so many rounds of a run, which a checkpoint may begin or end."""
    module = federated(client_optimizer=lambda p: kind(p, lr=0.01, **options))
    run = trainer(rounds)
    run.fit(module, blobs(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return module.global_vector.detach().clone()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_takes_its_fused_kernel_unless_the_user_chose_one(kind: Any) -> None:
    with torch.profiler.profile() as called:
        usual = trained(kind, 2)
    assert fused_steps(called) > 0
    assert torch.equal(usual, trained(kind, 2, fused=True))
    with torch.profiler.profile() as called:
        own_choice = trained(kind, 2, foreach=False)
    assert fused_steps(called) == 0
    torch.testing.assert_close(usual, own_choice, rtol=1e-9, atol=1e-12)


def fused_steps(profile: torch.profiler.profile) -> int:
    return sum(each.count for each in profile.key_averages() if "_fused_adam" in each.key)


def test_a_run_that_began_without_the_fused_kernel_keeps_its_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = trained(torch.optim.Adam, 4, foreach=False)
    with monkeypatch.context() as before:
        before.setattr(EngineContext, "fuses", False)
        trained(torch.optim.Adam, 2, save=tmp_path / "old.ckpt")
    assert torch.equal(trained(torch.optim.Adam, 4, resume=tmp_path / "old.ckpt"), without)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: Counted(p, lr=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW([{"params": list(p)[:2], "lr": 0.02}, {"params": []}], lr=0.01),
        lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
    ],
)
def test_any_torch_optimizer_steps_clients_as_it_steps_a_network(optimizer: Any) -> None:
    if "Muon" in optimizer.__code__.co_names and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon, which came later")
    data = blobs(clients=1)
    module = federated(
        participation="all", local_epochs=1, client_optimizer=lambda p: optimizer(list(p))
    )
    alone = copy.deepcopy(module.learner)
    trainer(1).fit(module, data)
    assert_trained_as(module, by_hand(alone, data.client_batches(0, 0, 3), optimizer), 1e-12)


@pytest.mark.parametrize(
    ("options", "said"), [({"lr": 1e300}, "lr=1e"), ({"maximize": True}, "maximize.* negated loss")]
)
@pytest.mark.parametrize("whose", ["client_optimizer", "server_optimizer"])
def test_optimizers_that_no_step_can_be_taken_with_are_refused_by_name(
    whose: str, options: dict[str, Any], said: str
) -> None:
    """One that goes up would push the server away from its clients."""
    made = {whose: lambda p: torch.optim.SGD(p, **{"lr": 0.1, **options})}
    with pytest.raises(UserError, match=f"{whose}: SGD(:| has) {said}"):
        trainer(1).fit(federated(**made), blobs())
