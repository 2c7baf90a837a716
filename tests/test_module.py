"""FederatedModule with learners that know nothing of it: what works, what is forwarded, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from learners import Lit, blobs, federated, trainer
from torch import Tensor, nn

from fl_lightning import Exponential, FederatedCallback, FederatedModule, UserError
from fl_lightning.callbacks import ControlVariates, RelaxedInitialization


def test_one_epoch_is_one_round_and_the_global_model_learns() -> None:
    module, run = federated(), trainer(8)
    run.fit(module, blobs())
    assert run.current_epoch == run.global_step == 8
    assert run.callback_metrics["val/acc"] > 0.9
    assert {"train/loss", "client_lr", "time/round", "val/loss"} <= set(run.callback_metrics)


def test_a_learner_of_the_other_namespace_is_trained_too() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="the `lightning` package is not installed")

    class Other(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(20, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any) -> None:
            self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    run = trainer(8)
    run.fit(federated(Other()), blobs())
    assert run.callback_metrics["accuracy"] > 0.9 and "loss" in run.callback_metrics


def test_one_client_with_everything_is_plain_training() -> None:
    """Full participation of one client, one step a batch: the same weights as a loop over its batches."""
    data = blobs(clients=1)
    module = federated(participation="all", local_epochs=3)
    before = {k: v.clone() for k, v in module.learner.state_dict().items()}
    trainer(1).fit(module, data)
    learner = Lit().double()
    learner.load_state_dict(before)
    optimizer = learner.configure_optimizers()
    for x, y in data.client_batches(0, 0, 9):
        optimizer.zero_grad()
        nn.functional.cross_entropy(learner.net(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, value in learner.state_dict().items():
        torch.testing.assert_close(module.export().state_dict()[name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW([{"params": list(p)[:2], "lr": 0.02}, {"params": []}], lr=0.01),
        lambda p: torch.optim.Muon([q for q in p if q.ndim == 2], lr=0.01),
    ],
)
def test_any_torch_optimizer_steps_clients_as_it_steps_a_network(optimizer: Any) -> None:
    if "Muon" in optimizer.__code__.co_names and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    data = blobs(clients=1)
    module = federated(participation="all", local_epochs=1, client_optimizer=lambda p: optimizer(list(p)))
    learner = Lit().double()
    learner.load_state_dict(module.learner.state_dict())
    trainer(1).fit(module, data)
    own = optimizer(list(learner.parameters()))
    for x, y in data.client_batches(0, 0, 3):
        own.zero_grad()
        nn.functional.cross_entropy(learner.net(x), y).backward()  # type: ignore[no-untyped-call]
        own.step()
    for name, value in learner.state_dict().items():
        torch.testing.assert_close(module.export().state_dict()[name], value, rtol=1e-12, atol=1e-12)


def test_participants_and_steps_are_known_before_the_round() -> None:
    module, data = federated(participation=0.25, local_epochs=1.1), blobs(clients=10, per_client=80)
    trainer(1).fit(module, data)
    assert [len(module.participants(t)) for t in range(5)] == [3] * 5  # 2.5, half up
    assert len({module.participants(t) for t in range(5)}) > 1
    assert all(list(p) == sorted(set(p)) for p in map(module.participants, range(5)))
    assert module.steps(0, 0) == 11  # 1.1 epochs of 10 batches, exactly


def test_bernoulli_sampling_varies_the_number_and_never_takes_nobody() -> None:
    module = federated(participation=0.1, sampling="bernoulli")
    trainer(1).fit(module, blobs())
    sizes = [len(module.participants(t)) for t in range(300)]
    assert min(sizes) == 1 and max(sizes) >= 3 and 0.9 < sum(sizes) / 300 < 1.7


def test_what_the_learner_hooks_do_happens() -> None:
    called: list[str] = []

    class Hooked(Lit):
        def setup(self, stage: str) -> None:
            called.append("setup fit" if stage == "fit" else "setup")

        def configure_model(self) -> None:
            called.append("configure_model")

        def on_train_epoch_start(self) -> None:
            called.append(f"epoch {self.current_epoch}")

        def on_validation_epoch_end(self) -> None:
            called.append("validated")

    trainer(2).fit(federated(Hooked()), blobs())
    assert called == ["setup fit", "configure_model", "epoch 0", "validated", "epoch 1", "validated"]


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


def test_checkpoints_load_as_the_learner_itself(tmp_path: Any) -> None:
    module = FederatedModule(Lit(hidden=6), participation=0.3, seed=1)
    run = trainer(2, default_root_dir=tmp_path, enable_checkpointing=True)
    run.fit(module, blobs(dtype=torch.float32))
    loaded = Lit.load_from_checkpoint(run.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    exported = module.export(tmp_path / "model.pt")
    again = Lit.load_from_checkpoint(tmp_path / "model.pt")
    for name, value in exported.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value) and torch.equal(again.state_dict()[name], value)
    assert loaded.hparams["hidden"] == 6


def test_test_and_predict_run_on_the_global_model() -> None:
    module, run, data = federated(), trainer(6), blobs()
    run.fit(module, data)
    (scores,) = run.test(module, data, verbose=False)
    predicted = run.predict(module, data)
    assert scores["test/acc"] > 0.9 and sum(len(p) for p in predicted) == 240  # type: ignore[arg-type, union-attr]


def test_init_from_starts_where_another_run_ended(tmp_path: Any) -> None:
    first = federated()
    trainer(3).fit(first, blobs())
    first.export(tmp_path / "model.pt")
    second = federated(init_from=str(tmp_path / "model.pt"), client_optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    trainer(1).fit(second, blobs())
    assert torch.equal(first.global_vector, second.global_vector)


def test_buffers_are_averaged_or_kept() -> None:
    class Normed(Lit):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    averaged, kept = federated(Normed()), federated(Normed(), buffers="keep")
    trainer(1).fit(averaged, blobs())
    trainer(1).fit(kept, blobs())
    assert averaged.learner.net[1].num_batches_tracked == 3  # the maximum over clients
    assert averaged.learner.net[1].running_mean.abs().sum() > 0
    assert kept.learner.net[1].num_batches_tracked == 0 and not kept.learner.net[1].running_mean.any()


def test_learning_rates_follow_their_schedules() -> None:
    seen: list[float] = []

    class See(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.extend([float(trainer.callback_metrics["client_lr"]), pl_module.optimizers().param_groups[0]["lr"]])

    trainer(3, [See()]).fit(federated(lr_decay=0.5, server_lr_decay=Exponential(0.1)), blobs())
    assert seen == pytest.approx([0.1, 1.0, 0.05, 0.1, 0.025, 0.01])


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true", "bf16-true"])
def test_precisions_train(precision: Any) -> None:
    torch.manual_seed(0)
    module = FederatedModule(Lit(), participation=0.3, local_epochs=3, seed=1)
    run = trainer(8, precision=precision)
    run.fit(module, blobs(dtype=torch.float64 if precision == "64-true" else torch.float32))
    assert run.callback_metrics["val/acc"] > 0.8
    expected = {"bf16-mixed": torch.float32, "64-true": torch.float64, "bf16-true": torch.bfloat16}
    assert module.global_vector.dtype == expected[precision]


class TwoOptimizers(Lit):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class OwnStep(Lit):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class GradientHook(Lit):
    def on_after_backward(self) -> None: ...


class Manual(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Lazy(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.LazyLinear(8)


class Mixed(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].double()


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (TwoOptimizers, ["TwoOptimizers", "2 optimizers", "client_optimizer"]),
        (OwnStep, ["OwnStep", "optimizer_step", "FederatedCallback"]),
        (GradientHook, ["on_after_backward", "on_local_gradient"]),
        (Manual, ["manual optimization", "training_step"]),
        (Lazy, ["lazy", "net.0.weight"]),
        (Mixed, ["several dtypes", "torch.float64"]),
    ],
)
def test_learners_that_cannot_be_honoured_are_refused(learner: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        trainer(1).fit(FederatedModule(learner(), participation=0.3, seed=1), blobs(dtype=torch.float32))
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"participation": 0}, ["participation=0", "'all'"]),
        ({"participation": 1.5}, ["participation=1.5", "up to 1.0"]),
        ({"participation": 11}, ["participation=11", "10 are registered"]),
        ({"participation": "al"}, ["participation='al'", "Did you mean 'all'"]),
        ({"sampling": "bernouli"}, ["sampling='bernouli'", "Did you mean 'bernoulli'"]),
        ({"local_steps": 1.5}, ["local_steps=1.5", "integer"]),
        ({"clip_norm": 0.0}, ["clip_norm=0.0", "above 0"]),
        ({"init_from": "/nowhere.ckpt"}, ["/nowhere.ckpt"]),
        ({"client_optimizer": torch.optim.LBFGS}, ["LBFGS", "torch.optim.SGD"]),
    ],
)
def test_arguments_are_refused_with_name_value_and_what_is_accepted(arguments: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        trainer(1).fit(federated(**arguments), blobs())
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_steps": 5}, ["max_steps=5", "max_epochs"]),
        ({"accumulate_grad_batches": 2}, ["accumulate_grad_batches=2", "batch_size"]),
        ({"gradient_clip_val": 1.0}, ["gradient_clip_val=1.0", "clip_norm"]),
        ({"val_check_interval": 0.5}, ["val_check_interval", "check_val_every_n_epoch"]),
        ({"limit_train_batches": 3}, ["limit_train_batches=3", "local_steps"]),
        ({"overfit_batches": 1}, ["overfit_batches=1"]),
    ],
)
def test_trainer_settings_without_meaning_are_refused(settings: Any, words: list[str]) -> None:
    with pytest.raises((UserError, ValueError)) as refused:
        trainer(1, **settings).fit(federated(), blobs())
    assert all(word in str(refused.value) for word in words), refused.value


def test_data_without_clients_is_refused_with_the_line_that_federates_it() -> None:
    class Plain(pl.LightningDataModule):
        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([0])

    with pytest.raises(UserError, match=r"FromDataModule\(Plain\(…\), num_clients=100\)"):
        trainer(1).fit(federated(), Plain())
    with pytest.raises(UserError, match="FromDatasets"):
        trainer(1).fit(federated(), torch.utils.data.DataLoader([0]))  # type: ignore[arg-type]


def test_fast_dev_run_works() -> None:
    module = federated()
    trainer(5, fast_dev_run=True).fit(module, blobs())
    assert torch.isfinite(module.global_vector).all()


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_clients_that_diverge_stop_the_run_or_are_left_out(policy: str) -> None:
    class Diverges(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if len(batch[1]) == 2 else loss  # the short last batch of some clients

    module = federated(Diverges(), on_nonfinite=policy, participation="all")
    if policy == "stop":
        with pytest.raises(RuntimeError, match=r"client \d+ in round 0"):
            trainer(2).fit(module, blobs())
    else:
        trainer(2).fit(module, blobs())
        assert torch.isfinite(module.global_vector).all() and any("left out" in note for note in module.notes)


def test_a_second_fit_goes_on_with_the_same_trainer_and_starts_afresh_with_another() -> None:
    def scaffold(rounds: int) -> pl.Trainer:
        return trainer(rounds, [ControlVariates(), RelaxedInitialization()])

    whole, halves = federated(), federated()
    scaffold(4).fit(whole, blobs())
    run = scaffold(2)
    run.fit(halves, blobs())
    run.fit_loop.max_epochs = 4
    run.fit(halves, blobs())
    assert torch.equal(whole.global_vector, halves.global_vector)

    exported = whole.export()
    scaffold(2).fit(whole, blobs())
    fresh = federated(exported)
    scaffold(2).fit(fresh, blobs())
    assert torch.equal(whole.global_vector, fresh.global_vector)


def test_a_misspelt_hook_is_refused_with_the_right_name() -> None:
    class Typo(FederatedCallback):
        def on_local_grad(self, clients: Any, gradient: Any) -> None: ...

    with pytest.raises(UserError, match=r"Typo\.on_local_grad is no hook.*Did you mean 'on_local_gradient'"):
        trainer(1, [Typo()]).fit(federated(), blobs())


class Transferring(Lit):
    """Scales what arrives, by the hook that Lightning calls after a batch was moved."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return 2 * x, y


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_the_learners_transfer_hooks_see_its_batches_in_training_and_in_evaluation(engine: str) -> None:
    class Scaled(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((2 * batch[0], batch[1]), batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step((2 * batch[0], batch[1]), batch_idx)

    found = []
    for learner in (Scaled, Transferring):
        torch.manual_seed(3)
        module, run = federated(learner(), engine=engine), trainer(2)
        run.fit(module, blobs())
        assert module.engine_facts["engine"] == engine
        found.append((module.global_vector.detach(), run.callback_metrics["val/loss"]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_what_hooks_log_is_read_and_not_changed(engine: str) -> None:
    class Telling(ControlVariates):
        def on_local_end(self, clients: Any) -> None:
            super().on_local_end(clients)
            clients.log("lr", clients.lr.expand(len(clients.ids)))

    found = []
    for method in (ControlVariates(), Telling()):
        torch.manual_seed(3)
        module, run = federated(engine=engine), trainer(3, [method])
        run.fit(module, blobs())
        found.append(module.global_vector.detach())
    assert torch.equal(*found) and float(run.callback_metrics["lr"]) == pytest.approx(0.1, abs=1e-7)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_a_method_that_says_it_does_not_move_starts_may_not(engine: str) -> None:
    class Moving(FederatedCallback):
        moves_start = False

        def on_local_start(self, clients: Any) -> None:
            clients.x.mul_(0.9)

    with pytest.raises(TypeError, match="moves_start = False"):
        trainer(1, [Moving()]).fit(federated(Lit(), engine=engine), blobs())
