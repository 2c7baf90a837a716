"""The learner's own hooks happen where Lightning calls them."""

from __future__ import annotations

import types
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from torch import Tensor, nn

from fl_lightning.callbacks import ControlVariates, SharpnessAwareMinimization
from fl_lightning.checks.refusals import REFUSED_HOOKS
from tests.helpers.learners import (
    Lit,
    Normed,
    as_batches,
    assert_trained_as,
    blobs,
    by_lightning,
    federated,
    trainer,
)

# the latter is not called, because each local step computes a new gradient
REFUSED = {*REFUSED_HOOKS, "optimizer_zero_grad"}
NOT_CALLED = {
    "train_dataloader": "the data module has the clients' samples",
    "lr_scheduler_step": "the scheduler is ignored, or stepped by client_scheduler",
}
# what a learner uses, and Lightning does not call on it
NO_HOOKS = """
optimizers lr_schedulers print log log_dict all_gather forward manual_backward toggle_optimizer
untoggle_optimizer toggled_optimizer clip_gradients freeze unfreeze to_onnx to_torchscript
to_tensorrt load_from_checkpoint
"""


def hooks() -> set[str]:
    """What Lightning calls on a LightningModule, by its own classes."""
    of = (ModelHooks, DataHooks, CheckpointHooks, pl.LightningModule)
    named = {
        name
        for cls in of
        for name, value in vars(cls).items()
        if callable(value) and name[0] != "_"
    }
    return {name for name in named if name.islower()} - {*NO_HOOKS.split()}


def recording(called: set[str]) -> Lit:
    """A learner that has each hook, does what Lightning does in it, and notes that it was
    called."""

    def noting(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return getattr(Lit, name)(self, *args, **kwargs)

        return hook

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        called.add("training_step")
        return Lit.training_step(self, batch, batch_idx)

    loaders = [name for name in hooks() if name.endswith("dataloader")]
    names = (
        hooks()
        - REFUSED
        - {"training_step", "validation_step", "test_step", "predict_step", *loaders}
    )
    body = {name: noting(name) for name in names}
    learner: type[Lit] = type("Recording", (Lit,), {**body, "training_step": step})
    return learner().double()


def all_stages(module: Any, run: Any, data: Any, folder: Any) -> None:
    run.fit(module, data)
    run.save_checkpoint(folder / "run.ckpt")
    run.validate(module, data, verbose=False)
    run.test(module, data, verbose=False)
    run.predict(module, data)


def test_every_hook_of_lightning_is_called_on_the_learner_or_known_not_to_be(tmp_path: Any) -> None:
    plainly, here = set[str](), set[str]()
    data = blobs()
    data.setup("fit")
    batches = as_batches([b for b, _ in data.full_batches(0)])
    plain = pl.LightningDataModule()
    for name in ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"):
        setattr(plain, name, lambda: batches)
    all_stages(recording(plainly), trainer(1), plain, tmp_path)
    all_stages(federated(recording(here)), trainer(1), blobs(), tmp_path)
    assert plainly - here == set(), "Lightning calls these, and a federated run does not"
    # other tests see them run
    asked = {"validation_step", "test_step", "predict_step", "on_load_checkpoint"}
    loaders = {"val_dataloader", "test_dataloader", "predict_dataloader"}
    assert hooks() - here - REFUSED - NOT_CALLED.keys() - asked - loaders == set()


def test_the_modes_that_a_learner_sets_for_evaluation_are_its_own(tmp_path: Any) -> None:
    class Training(Normed):
        """As a learner that scales its targets in training mode alone, and evaluates part of it in
        that mode."""

        def on_validation_model_eval(self) -> None:
            self.eval()
            self.net[1].train()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("trains", float(self.net[1].training) + 2 * float(self.net[0].training))

    class Back(Training):
        def on_validation_model_train(self) -> None:
            self.train()
            self.came_back = True

    run = trainer(1)
    run.fit(module := federated(Back()), blobs())
    assert run.callback_metrics["trains"] == 1 and module.learner.came_back


def test_loaders_of_the_learner_are_used_without_a_data_module() -> None:
    class Loading(Lit):
        def test_dataloader(self) -> Any:
            return as_batches([(torch.zeros(2, 20).double(), torch.zeros(2).long())])

    (scores,) = trainer(1).test(federated(Loading()), verbose=False)
    assert "test/acc" in scores


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_hooks_of_gradients_do_what_they_do_alone(engine: str, momentum: float) -> None:
    """Those that change the step's gradients, in place or not, and see the weights after the
    step."""

    class Plain(Lit):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=momentum)

    class Hooked(Plain):
        def on_after_backward(self) -> None:
            self.net[0].weight.grad.mul_(0.5)
            self.net[0].bias.grad = None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {
                id(p) for p in self.parameters()
            }
            nn.utils.clip_grad_norm_(self.parameters(), 0.3)
            self.log(
                "norm",
                nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None]),
            )

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.log(
                "after", nn.functional.cross_entropy(self.net(batch[0]), batch[1]) - outputs["loss"]
            )

    torch.manual_seed(3)
    module = federated(Hooked(), engine=engine, participation="all")
    alone = Hooked().double()
    alone.load_state_dict(module.learner.state_dict())
    run, data = trainer(1), blobs(clients=1)
    run.fit(module, data)
    assert_trained_as(module, by_lightning(alone, data.client_batches(0, 0, 3)), 1e-12)
    assert run.callback_metrics["norm"] <= 0.3 + 1e-6 and run.callback_metrics["after"] < 0
    assert all(p.grad is None for p in module.learner.parameters())


class Transferring(Lit):
    """Scales what arrives, by the hook that Lightning calls after a batch was moved."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return 2 * x, y


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_the_learners_transfer_hooks_see_its_batches_in_training_and_in_evaluation(
    engine: str,
) -> None:
    class Scaled(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((2 * batch[0], batch[1]), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step((2 * batch[0], batch[1]), batch_idx)

    class Late(Lit):  # on the instance, and only from setup on
        def setup(self, stage: str) -> None:
            hook = Transferring.on_after_batch_transfer
            object.__setattr__(self, "on_after_batch_transfer", types.MethodType(hook, self))

    found = []
    for learner in (Scaled, Transferring, Late):
        torch.manual_seed(3)
        module, run = federated(learner(), engine=engine), trainer(2)
        run.fit(module, blobs())
        assert module.engine_facts["engine"] == engine
        found.append((module.global_vector.detach(), run.callback_metrics["val/loss"]))
    for w, loss in found[1:]:
        assert torch.equal(found[0][0], w) and torch.equal(found[0][1], loss)


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
def test_what_a_hook_takes_from_gradients_no_method_brings_back(engine: str) -> None:
    """Both gradients of SAM, and the full gradients of SCAFFOLD, are as the hook leaves them."""

    class Held(Lit):
        def on_after_backward(self) -> None:
            self.net[0].weight.grad = None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    methods = [SharpnessAwareMinimization(0.05), ControlVariates("gradient")]
    module = federated(Held(), engine=engine)
    before = {name: value.clone() for name, value in module.learner.state_dict().items()}
    trainer(2, methods).fit(module, blobs())
    after = module.learner.state_dict()
    assert torch.equal(before["net.0.weight"], after["net.0.weight"])
    assert not torch.equal(before["net.2.weight"], after["net.2.weight"])
