"""engine="auto": measured once, remembered, and the same on resume."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import FederatedModule, InMemoryDataModule
from fl_lightning.engines import auto, choice
from tests.helpers.learners import Lit, Normed, blobs, federated, trainer


class Waiting(Lit):
    """A step that gains from company: it waits without the interpreter lock."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.004)
        return super().training_step(batch, batch_idx)


@pytest.mark.fast
@pytest.mark.usefixtures("short_steps")
def test_auto_takes_what_is_faster_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, tiny = federated(Waiting(), workers=2), federated(Lit(), workers=2)
    trainer(1).fit(slow, blobs())
    monkeypatch.setattr(auto, "TINY_SECONDS", math.inf)
    trainer(1).fit(tiny, blobs(clients=4))
    assert slow.engine_facts["engine"] == "concurrent" and slow.engine_facts["workers"] == "2"
    assert "a step is captured: it takes" in slow.engine_facts["why"]
    assert "concurrent × 2" in slow.describe()
    assert tiny.engine_facts["engine"] == "sequential"


@pytest.mark.fast
@pytest.mark.usefixtures("short_steps")
def test_short_steps_train_side_by_side_where_they_are_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "TINY_SECONDS", 0.0)
    for capture in (True, False):
        module = federated(Lit(), workers=2, capture=capture, local_epochs=4)
        trainer(1).fit(module, blobs())
        assert module.engine_facts["engine"] == ("concurrent" if capture else "sequential")
        assert ("a step is captured: it takes" in module.engine_facts["why"]) == capture


@pytest.mark.fast
def test_choosing_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "TINY_SECONDS", 0.0)
    torch.manual_seed(3)
    one = federated(Normed(), engine="sequential")
    torch.manual_seed(3)
    two = federated(Normed(), workers=2)
    for module in (one, two):
        trainer(2).fit(module, blobs())
    assert two.engine_facts["engine"] == "concurrent"
    assert torch.equal(one.global_vector, two.global_vector)
    assert torch.equal(one.learner.net[1].running_var, two.learner.net[1].running_var)


def test_one_client_or_one_core_needs_no_measuring() -> None:
    module = federated(Waiting(), participation=1)
    with pytest.warns(UserWarning, match="participation=1 is one client"):
        trainer(1).fit(module, blobs())
    assert (
        module.engine_facts["engine"] == "sequential" and "one client" in module.engine_facts["why"]
    )


def test_a_resumed_run_goes_on_with_the_engine_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = federated(Waiting(), workers=2)
    run = trainer(1, default_root_dir=tmp_path, enable_checkpointing=True)
    run.fit(first, blobs())
    assert first.engine_facts["engine"] == "concurrent"
    monkeypatch.setattr(choice, "decided", lambda *_: pytest.fail("decided again"))
    callers: list[threading.Thread] = []
    monkeypatch.setattr(
        torch, "set_num_threads", lambda _: callers.append(threading.current_thread())
    )
    second = federated(Waiting())
    trainer(2, default_root_dir=tmp_path, enable_checkpointing=True).fit(
        second, blobs(), ckpt_path=run.checkpoint_callback.best_model_path
    )
    assert second.engine_facts["engine"] == "concurrent" and second.engine_facts["workers"] == "2"
    assert second.engine_facts["why"] == "as when the run began"
    # which would be left on the one thread of a worker
    assert threading.main_thread() not in callers


@pytest.mark.parametrize("first", [{"fast_dev_run": True}, {}])
def test_another_trainer_begins_another_run_and_decides_anew(first: dict[str, Any]) -> None:
    module = federated(Lit(), workers=2)
    trainer(1, **first).fit(module, blobs())
    drawing = blobs()
    drawing._transform = lambda x: x + 0.1 * torch.randn_like(x)
    trainer(1).fit(module, drawing)
    assert "draw random numbers" in module.engine_facts["why"]


def test_a_learner_that_cannot_be_copied_trains_one_client_after_the_other() -> None:
    class Locked(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.generator = (i for i in range(3))

    module = federated(Locked(), workers=2)
    trainer(1).fit(module, blobs())
    assert (
        module.engine_facts["engine"] == "sequential"
        and "cannot be copied" in module.engine_facts["why"]
    )


class Images(pl.LightningModule):
    """A small convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Asked(Images):
    """Its images have to lie in channels-last memory in each local step, or must not."""

    wanted = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch[0].is_contiguous(memory_format=torch.channels_last) == self.wanted
        return super().training_step(batch, batch_idx)


class AskedAndPreferring(Asked):
    wanted = prefers_channels_last = True


@pytest.mark.parametrize("kind", [Asked, AskedAndPreferring])
def test_a_networks_preference_is_followed_by_every_engine_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, kind: type[Asked]
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, 8, 8, generator=generator)
    y = torch.randint(0, 4, (80,), generator=generator)
    clients = [range(8 * i, 8 * i + 8) for i in range(10)]
    monkeypatch.setattr(auto, "TINY_SECONDS", 0.0)
    models = []
    for engine in ("auto", "concurrent", "sequential"):
        torch.manual_seed(1)
        module = FederatedModule(kind(), participation=0.4, seed=1, workers=2, engine=engine)
        trainer(2).fit(module, InMemoryDataModule((x, y), clients=clients, batch_size=4))
        assert (module.engine_facts.get("memory") == "channels_last") == kind.wanted
        models.append(module.global_vector.detach().clone())
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])
