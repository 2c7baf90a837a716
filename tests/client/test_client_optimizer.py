"""Any optimizer of torch steps clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fl_lightning import UserError
from fl_lightning.engines.engine_context import EngineContext
from tests.helpers.learners import Lit, blobs, federated, trainer


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
    kind: Any,
    rounds: int,
    save: Path | None = None,
    resume: Path | None = None,
    **options: Any,
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
    learner = Lit().double()
    learner.load_state_dict(module.learner.state_dict())
    trainer(1).fit(module, data)
    own = optimizer(list(learner.parameters()))
    for x, y in data.client_batches(0, 0, 3):
        own.zero_grad()
        nn.functional.cross_entropy(learner.net(x), y).backward()
        own.step()
    for name, value in learner.state_dict().items():
        torch.testing.assert_close(
            module.export().state_dict()[name], value, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("options", [{"weight_decay": float("nan")}, {"lr": 1e300}])
@pytest.mark.parametrize("whose", ["client_optimizer", "server_optimizer"])
def test_numbers_that_no_step_can_be_taken_with_are_refused_by_name(
    whose: str, options: dict[str, float]
) -> None:
    made = {whose: lambda p: torch.optim.SGD(p, **{"lr": 0.1, **options})}
    (name,) = options
    with pytest.raises(UserError, match=f"{whose}: SGD has {name}="):
        trainer(1).fit(federated(**made), blobs())


@pytest.mark.parametrize("whose", ["client_optimizer", "server_optimizer"])
def test_an_optimizer_that_goes_up_is_refused(whose: str) -> None:
    """Methods would push it the other way, and the server away from its clients."""
    up = {whose: lambda p: torch.optim.SGD(p, 0.1, maximize=True)}
    with pytest.raises(UserError, match=f"{whose}: SGD has maximize=True.* negated loss"):
        trainer(1).fit(federated(**up), blobs())
