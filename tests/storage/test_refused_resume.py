"""A resume that is refused leaves the module as it was, for its next fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedModule, UserError
from fl_lightning.callbacks import ControlVariates, PartialAveraging
from fl_lightning.systems import Buffered, Devices, LogNormal
from tests.helpers.learners import Normed, blobs, federated, trainer


class PartlyFrozen(Normed):
    def __init__(self, bias: float) -> None:
        super().__init__()
        self.get_parameter("net.0.bias").requires_grad_(False).fill_(bias)


def made(bias: float = 0.5, **arguments: Any) -> FederatedModule:
    torch.manual_seed(0)
    return federated(PartlyFrozen(bias), **arguments)


def adaptive(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.1)


def weights(module: FederatedModule) -> dict[str, torch.Tensor]:
    """Return copies of w, the evaluated model, and all weights and buffers."""
    values = {name: value.clone() for name, value in module.learner.state_dict().items()}
    evaluated = module.evaluated_vector.detach().clone()
    return {**values, "w": module.global_vector.detach().clone(), "evaluated": evaluated}


def assert_same(module: FederatedModule, before: dict[str, torch.Tensor]) -> None:
    now = weights(module)
    assert now.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(now[name], value), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "one.ckpt"
    run = trainer(1)
    run.fit(made(bias=-0.5), blobs())
    run.save_checkpoint(path)
    return path


class Refusing(pl.Callback):
    """Ends a fit after its weights were loaded and before the module begins it."""

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        raise ValueError("another callback")


BUFFERED = Buffered(Devices(LogNormal(median=0.1, sigma=1.0)), size=2, concurrency=3)


@pytest.mark.parametrize(
    ("arguments", "callbacks", "words"),
    [
        ({"lr_decay": 0.5}, [], "other settings"),
        ({"asynchronous": BUFFERED, "strict_resume": False}, [], "asynchronous"),
        ({}, [Refusing()], "another callback"),
    ],
    ids=["settings", "as the fit begins", "by a callback"],
)
def test_a_new_module_begins_as_if_it_had_never_been_refused(
    saved: Path, arguments: Any, callbacks: Any, words: str
) -> None:
    fresh, module = made(**arguments), made(**arguments)
    trainer(2).fit(fresh, blobs())
    before = weights(module)
    with pytest.raises((UserError, ValueError), match=words):
        trainer(2, callbacks).fit(module, blobs(), ckpt_path=saved)
    if not callbacks:
        assert_same(module, before)
    trainer(2).fit(module, blobs())
    assert_same(module, weights(fresh))


def test_a_run_goes_on_as_if_another_trainer_had_never_been_refused(saved: Path) -> None:
    def run(seed: int | None, refused: bool) -> FederatedModule:
        module = made(seed=seed, server_optimizer=adaptive)
        own = trainer(2, [ControlVariates(), PartialAveraging(period=2)])
        own.fit(module, blobs())
        before = weights(module)
        if refused:
            with pytest.raises(UserError, match="other settings"):
                trainer(2).fit(module, blobs(), ckpt_path=saved)
            assert_same(module, before)
        own.fit_loop.max_epochs = 4
        own.fit(module, blobs())
        assert own.current_epoch == 4
        return module

    disturbed = run(None, refused=True)
    assert_same(disturbed, weights(run(disturbed.run_seed, refused=False)))
