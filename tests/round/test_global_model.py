"""The global vector: of which parameters it is made, and what it leaves as the learner."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fl_lightning import FederatedModule
from tests.helpers.learners import Lit, blobs, federated, trainer


def test_layers_made_in_configure_model_are_trained() -> None:
    class Late(Lit):
        def configure_model(self) -> None:
            if not hasattr(self, "head"):
                self.head = nn.Linear(4, 4).double()
                inner = self.net
                self.net = nn.Sequential(inner, self.head)

    module = federated(Late())
    trainer(1).fit(module, blobs())
    assert module.layout.size == sum(p.numel() for p in module.learner.parameters())


def test_frozen_parameters_are_outside_and_never_change() -> None:
    learner = Lit().double()
    learner.net[0].requires_grad_(False)
    before = learner.net[0].weight.clone()
    module = federated(learner)
    trainer(2).fit(module, blobs())
    assert list(module.layout) == ["net.2.weight", "net.2.bias"]
    assert torch.equal(module.export().net[0].weight, before)


def test_a_learner_whose_last_step_froze_a_layer_is_exported() -> None:
    class Alternating(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.net[0].requires_grad_(batch_idx % 2 == 0)
            return super().training_step(batch, batch_idx)

    module = federated(Alternating(), engine="sequential", local_steps=2)
    trainer(1).fit(module, blobs())
    weights = torch.cat([p.detach().view(-1) for p in module.export().parameters()])
    assert torch.equal(weights, module.global_vector)


def test_checkpoints_load_as_the_learner_itself(tmp_path: Any) -> None:
    module = FederatedModule(Lit(hidden=6), participation=0.3, seed=1)
    run = trainer(2, default_root_dir=tmp_path, enable_checkpointing=True)
    run.fit(module, blobs(dtype=torch.float32))
    loaded = Lit.load_from_checkpoint(run.checkpoint_callback.best_model_path)
    exported = module.export(tmp_path / "model.pt")
    again = Lit.load_from_checkpoint(tmp_path / "model.pt")
    for name, value in exported.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value) and torch.equal(
            again.state_dict()[name], value
        )
    assert loaded.hparams["hidden"] == 6
