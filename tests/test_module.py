"""FederatedModule around learners that know nothing of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from fl_lightning import FederatedCallback, FederatedModule, UserError
from fl_lightning.callbacks import ControlVariates, RelaxedInitialization, RobustAggregation
from fl_lightning.datamodules import Dirichlet, InMemoryDataModule
from tests.helpers.learners import Lit, Normed, blobs, client_rows, federated, trainer


def test_one_epoch_is_one_round_and_the_global_model_learns() -> None:
    module, run = federated(), trainer(8)
    run.fit(module, blobs())
    assert run.current_epoch == run.global_step == 8
    assert run.callback_metrics["val/acc"] > 0.9
    assert {"train/loss", "client_lr", "time/round", "val/loss"} <= set(run.callback_metrics)


def test_a_learner_of_the_other_namespace_is_trained_too() -> None:
    lightning = pytest.importorskip(
        "lightning.pytorch", reason="the `lightning` package is not installed"
    )

    class Other(lightning.LightningModule):
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


def test_test_and_predict_run_on_the_global_model() -> None:
    module, run, data = federated(), trainer(6), blobs()
    run.fit(module, data)
    (scores,) = run.test(module, data, verbose=False)
    predicted = run.predict(module, data)
    assert scores["test/acc"] > 0.9 and sum(len(p) for p in predicted) == 240


class Sampling(Lit):
    """Draws where no client trains."""

    def on_train_epoch_start(self) -> None:
        self.scale = float(np.random.rand())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(
            (batch[0] + self.scale * torch.randn_like(batch[0]), batch[1]), batch_idx
        )


def test_what_is_drawn_in_validation_is_the_same_after_a_resume(tmp_path: Path) -> None:
    def fitted(seed: int, **options: Any) -> float:
        torch.manual_seed(seed)
        np.random.seed(seed)
        module = federated(Sampling())
        every_round = ModelCheckpoint(
            tmp_path / str(seed), "{epoch}", save_top_k=-1, save_on_train_epoch_end=True
        )
        run = trainer(4, [every_round], enable_checkpointing=True)
        before = torch.get_rng_state()
        run.fit(module, blobs(), **options)
        assert torch.equal(torch.get_rng_state(), before), "the script's own stream was moved"
        return float(run.callback_metrics["val/loss"])

    assert fitted(0) == fitted(7, ckpt_path=tmp_path / "0" / "epoch=1.ckpt")


def test_init_from_starts_where_another_run_ended(tmp_path: Any) -> None:
    first = federated()
    trainer(3).fit(first, blobs())
    first.export(tmp_path / "model.pt")
    init_from = str(tmp_path / "model.pt")
    second = federated(init_from=init_from, client_optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    trainer(1).fit(second, blobs())
    assert torch.equal(first.global_vector, second.global_vector)


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_precisions_train(precision: Any) -> None:
    torch.manual_seed(0)
    module = FederatedModule(Lit(), participation=0.3, local_epochs=3, seed=1)
    run = trainer(8, precision=precision)
    run.fit(module, blobs(dtype=torch.float64 if precision == "64-true" else torch.float32))
    assert run.callback_metrics["val/acc"] > 0.8
    expected = {"bf16-mixed": torch.float32, "64-true": torch.float64}
    assert module.global_vector.dtype == expected[precision]


class FrozenHalf(Lit):
    """A frozen base in bfloat16 below a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].bfloat16().requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.net[0](x.bfloat16()).float()
        return nn.functional.cross_entropy(self.net[2](hidden), y)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_frozen_parameters_may_be_in_half_precision(engine: str) -> None:
    module = FederatedModule(FrozenHalf(), participation=0.3, seed=1, engine=engine)
    start = module.global_vector.detach().clone()
    run = trainer(2, limit_val_batches=0)
    run.fit(module, blobs(dtype=torch.float32))
    assert module.global_vector.dtype == torch.float32
    assert not torch.equal(module.global_vector, start)
    assert module.export().net[0].weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("quick", "steps", "engine"),
    [(True, 1, "sequential"), (2, 2, "concurrent"), (2, 2, "stacked"), (100, 9, "sequential")],
)
@pytest.mark.filterwarnings("ignore:engine=")
def test_fast_dev_run_trains_so_many_batches_of_one_client(
    quick: Any, steps: int, engine: str
) -> None:
    """And no more than the client would."""
    module, run = federated(engine=engine, local_epochs=3), trainer(5, fast_dev_run=quick)
    run.callbacks.append(RobustAggregation(rule="krum", byzantine=0))
    run.fit(module, blobs())
    assert run.callback_metrics["cost/gradients"] == steps and run.current_epoch == 1
    assert len(module.participants(0)) == 1 and torch.isfinite(module.global_vector).all()
    other = federated(engine=engine, local_epochs=3)
    trainer(1).fit(other, blobs())
    assert other.participants(0)[:1] == module.participants(0), (
        "one of those that the run itself begins with"
    )


class Momentum(FederatedCallback):
    """Keeps its momentum where no checkpoint has it."""

    m: Any = None

    def on_server_update(self, server: Any) -> None:
        self.m = server.update if self.m is None else 0.9 * self.m + server.update
        server.update = self.m


class Annealed(Lit):
    """Goes on from round to round where no checkpoint has it, by a function."""

    rounds = 0

    def on_train_epoch_start(self) -> None:
        anneal(self)


def anneal(learner: Any) -> None:
    learner.rounds += 1


class Saved(Annealed):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rounds"] = self.rounds


def test_a_resumed_run_says_what_its_checkpoint_does_not_hold(tmp_path: Path) -> None:
    run = trainer(1, [Momentum()])
    run.fit(module := federated(Annealed()), blobs())
    run.save_checkpoint(path := tmp_path / "one.ckpt")
    told = ("Momentum sets self.m in a hook, ", "Annealed changes rounds from round to round, ")
    assert not any(note.startswith(told) for note in module.notes)
    resumed = federated(Annealed())
    trainer(3, [Momentum()]).fit(resumed, blobs(), ckpt_path=path)
    assert [sum(note.startswith(each) for note in resumed.notes) for each in told] == [1, 1]
    for learner in (Lit(), Saved()):
        trainer(2, [Momentum()]).fit(other := federated(learner), blobs(), ckpt_path=path)
        assert not any("from round to round" in note for note in other.notes)


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


def test_a_fit_that_ended_in_a_validation_goes_on_after_trainer_validate() -> None:
    class Ending(pl.Callback):
        def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            if trainer.state.fn == "fit" and self.ends:
                raise KeyError("in a validation")

    torch.manual_seed(0)
    whole, module = federated(Normed()), federated(Normed())
    trainer(3).fit(whole, blobs())
    ending = Ending()
    ending.ends = True
    run = trainer(3, [ending])
    with pytest.raises(KeyError):
        run.fit(module, blobs())
    run.validate(module, blobs(), verbose=False)
    ending.ends = False
    run.fit(module, blobs())
    for name, value in whole.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_a_run_that_drew_its_seed_resumes_with_it(tmp_path: Path) -> None:
    """The partition follows from the seed, and is there before a checkpoint is read."""
    x, y = torch.randn(200, 20, dtype=torch.float64), torch.arange(200) % 4
    split: dict[str, Any] = {"partition": Dirichlet(0.5), "num_clients": 10}

    def fitted(rounds: int, seed: int | None = None, start: Path | None = None) -> Any:
        module, data = federated(seed=seed), InMemoryDataModule((x, y), **split)
        run = trainer(rounds, [ControlVariates()], default_root_dir=tmp_path)
        run.fit(module, data, ckpt_path=start)
        return module

    with pytest.warns(UserWarning, match=r"no seed was given: seed=\d+ was drawn"):
        half = fitted(2)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    with pytest.warns(UserWarning, match=rf"seed={half.run_seed} is the checkpoint's"):
        resumed = fitted(4, start=tmp_path / "half.ckpt")
    assert sum("no seed was given" in note for note in resumed.notes) == 1
    assert torch.equal(fitted(4, seed=half.run_seed).global_vector, resumed.global_vector)
    with pytest.raises(UserError, match=rf"seed: {half.run_seed} then, 7 now"):
        fitted(4, seed=7, start=tmp_path / "half.ckpt")


def test_what_is_kept_for_clients_is_not_handed_to_clients_of_other_data() -> None:
    for methods, refused in (([ControlVariates()], True), ([], False)):
        module, run = federated(), trainer(2, methods)
        run.fit(module, blobs())
        w, rows = module.global_vector.clone(), len(client_rows(module))
        run.fit_loop.max_epochs = 3
        if refused:
            told = r"kept ControlVariates\.c_i for each client, and these data have other"
            with pytest.raises(UserError, match=told):
                run.fit(module, blobs(clients=7))
            assert torch.equal(module.global_vector, w) and len(client_rows(module)) == rows > 0
            run.fit(module, blobs())
        else:
            run.fit(module, blobs(clients=7))
        assert run.current_epoch == 3 and not torch.equal(module.global_vector, w)
