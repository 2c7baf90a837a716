"""Callbacks that change batches get the clients', as in plain training. The round's token they
never see."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import LambdaCallback, LearningRateMonitor, Timer, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn

from fl_lightning import FederatedCallback, FederatedModule, UserError
from fl_lightning.callbacks import PerClientEvaluation, SharpnessAwareMinimization
from fl_lightning.introspection.attribute_view import View
from tests.helpers.learners import Lit, blobs, federated, trainer


class Scaling(nn.Module, pl.Callback):
    """A pre-processor: a part of its learner and a callback of it, which changes batches in
    place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(3.0))

    def change(self, batch: Any) -> None:
        batch[0].mul_(self.factor).add_(1)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        assert trainer.fit_loop.batch_idx == batch_idx and trainer.num_training_batches > 1
        self.change(batch)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.change(batch)


class Preprocessing(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.scaling = Scaling()

    def configure_callbacks(self) -> Any:
        return [self.scaling]


class Scaled(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step((3 * batch[0] + 1, batch[1]), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step((3 * batch[0] + 1, batch[1]), batch_idx)


def fitted(
    learner: type[Lit], callbacks: Any = (), rounds: int = 3, **arguments: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module, run = federated(learner(), buffers="keep", **arguments), trainer(rounds, callbacks)
    data = blobs()
    data.client_test_fraction = 0.25
    run.fit(module, data)
    return module, run


@pytest.mark.parametrize("engine", ["auto", "sequential", "stacked"])
@pytest.mark.filterwarnings("ignore:engine='stacked'")
def test_a_callback_of_the_learner_changes_the_clients_batches(engine: str) -> None:
    module, run = fitted(Preprocessing, engine=engine)
    plain, other = fitted(Scaled, engine="sequential")
    assert torch.equal(module.global_vector, plain.global_vector)
    assert run.callback_metrics["val/loss"] == other.callback_metrics["val/loss"]
    assert module.run.plan.engine == "sequential" and not any(
        type(c) is View for c in run.callbacks
    )


def test_a_batch_is_changed_once_in_each_pass_and_in_clients_evaluations() -> None:
    def callbacks() -> Any:
        return [SharpnessAwareMinimization(), PerClientEvaluation()]

    module, run = fitted(Preprocessing, callbacks(), engine="auto")
    plain, other = fitted(Scaled, callbacks(), engine="sequential")
    assert torch.equal(module.global_vector, plain.global_vector)
    own = {name for name in other.callback_metrics if name.startswith("clients/")}
    assert own and all(run.callback_metrics[name] == other.callback_metrics[name] for name in own)


def test_a_callback_of_the_trainer_does_too_and_side_by_side_is_refused_by_name() -> None:
    class Ours(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            batch[0].mul_(3).add_(1)

    lambdas = LambdaCallback(
        on_train_batch_start=lambda trainer, module, batch, index: batch[0].mul_(3).add_(1)
    )
    plain, _ = fitted(Scaled, engine="sequential")
    for callback in (Ours(), lambdas):
        module, run = fitted(Lit, [callback])
        assert torch.equal(module.global_vector, plain.global_vector) and callback in run.callbacks
    with pytest.raises(
        UserError,
        match=r"engine='concurrent' cannot train Lit: the callback Ours is called with each",
    ):
        fitted(Lit, [Ours()], engine="concurrent")


def test_a_second_fit_and_one_after_a_failure_have_each_callback_once() -> None:
    torch.manual_seed(0)
    module, run = federated(Preprocessing(), buffers="keep"), trainer(3)

    class Failing(pl.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            raise OSError

    run.callbacks.append(Failing())
    for _ in range(2):
        with pytest.raises(OSError):
            run.fit(module, blobs())
    assert [type(c).__name__ for c in run.callbacks].count("View") == 1
    run.callbacks = [c for c in run.callbacks if not isinstance(c, Failing)]
    run.validate(module, blobs(), verbose=False)
    assert [type(c) for c in run.callbacks if isinstance(c, nn.Module)] == [Scaling]


def test_foreign_callbacks_are_called_in_each_step_and_lightnings_own_once_a_round(
    tmp_path: Any,
) -> None:
    class Counting(pl.Callback):
        starts = 0
        ends = 0

        def on_train_batch_start(self, *_: Any) -> None:
            self.starts += 1

        def on_train_batch_end(self, *given: Any) -> None:
            super().on_train_batch_end(*given)
            self.ends += 1
            self.log("ends", 1.0)

    class Bar(TQDMProgressBar):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            assert isinstance(pl_module, FederatedModule)
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    class Method(FederatedCallback):
        starts = 0

        def on_train_batch_start(self, *_: Any) -> None:
            self.starts += 1

    counting, method, monitor = Counting(), Method(), LearningRateMonitor()
    standard = [Timer(), monitor, Bar()]
    run = trainer(
        2, [counting, method, *standard], logger=CSVLogger(tmp_path), enable_progress_bar=True
    )
    run.fit(federated(local_steps=3, participation=2), blobs())
    assert (counting.starts, counting.ends, method.starts) == (2 * 2 * 3, 2, 2)
    assert monitor.lrs and all(c in run.callbacks for c in standard)


def test_a_run_that_was_side_by_side_goes_on_one_after_the_other_with_such_a_callback(
    tmp_path: Any,
) -> None:
    keeping = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(2, [keeping], enable_checkpointing=True).fit(federated(engine="concurrent"), blobs())
    scaling, module = (
        LambdaCallback(on_train_batch_start=lambda t, m, batch, i: batch[0].mul_(3)),
        federated(),
    )
    with pytest.warns(UserWarning, match="'sequential' continues a run that 'concurrent' began"):
        trainer(2, [scaling]).fit(module, blobs(), ckpt_path=tmp_path / "epoch=0.ckpt")
    assert module.run.plan.engine == "sequential"


def test_what_a_callback_logs_of_the_clients_batches_is_the_clients() -> None:
    class Logging(pl.Callback):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            self.log("samples", float(len(batch[0])), reduce_fx="sum")
            self.log_dict({"batches": 1.0}, reduce_fx="sum")

    _, run = fitted(Lit, [Logging()], rounds=1, participation=1.0)
    sizes = run.datamodule.client_sizes()
    assert float(run.callback_metrics["samples"]) == pytest.approx(float(sizes.mean()))
    assert float(run.callback_metrics["batches"]) == pytest.approx(float((-(-sizes // 8)).mean()))
