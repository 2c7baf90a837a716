"""What callbacks find at the module, and a learner at itself, while a run goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from fl_lightning import FederatedModule, UserError
from fl_lightning.callbacks import ControlVariates
from tests.helpers.learners import Lit, blobs, federated, trainer


class Seen(pl.Callback):
    """Notes what a callback written for a plain learner looks at."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        assert pl_module.net is pl_module.learner.net and pl_module.hparams.hidden == 8


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_a_callback_finds_the_learner_and_the_rounds_loss(engine: str) -> None:
    class Logging(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    seen, run = Seen(), trainer(3)
    run.callbacks.append(seen)
    logged: list[float] = []
    run.callbacks.append(
        pl.callbacks.LambdaCallback(
            on_train_epoch_end=lambda t, m: logged.append(float(t.callback_metrics["loss"]))
        )
    )
    run.fit(module := federated(Logging(), engine=engine), blobs())
    assert seen.losses == pytest.approx(logged) and len(seen.losses) == 3
    assert not [name for name in run.callback_metrics if "local steps" in name]
    with pytest.raises(AttributeError, match="'FederatedModule' object has no attribute 'nowhere'"):
        module.nowhere  # noqa: B018
    assert not hasattr(module, "_hparams_name_of_nothing")


class Looking(Lit):
    """Logs the rate of its optimizer, as plain learners do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        expected = {id(p) for p in self.parameters()}
        assert {id(p) for p in optimizer.param_groups[0]["params"]} == expected
        self.log("rate", optimizer.param_groups[0]["lr"])
        scheduler: Any = self.lr_schedulers()
        if scheduler is not None:
            self.log("last", scheduler.get_last_lr()[0])
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.optimizers()
        self.log("between", optimizer.param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (k + 1))]


class Warming(Lit):
    """Sets the rate of its optimizer in a hook, as one does who schedules it by hand."""

    def __init__(self, hook: str) -> None:
        super().__init__()
        setattr(self, hook, self.warm)

    def warm(self, *_: Any) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 + self.current_epoch)


@pytest.mark.parametrize(
    ("hook", "engine"),
    [
        *(("on_train_batch_start", engine) for engine in ("auto", "sequential", "stacked")),
        *(("on_train_epoch_start", engine) for engine in ("auto", "concurrent")),
    ],
)
def test_a_rate_that_a_hook_sets_is_refused(engine: str, hook: str) -> None:
    module = federated(Warming(hook), engine=engine)
    with pytest.raises(UserError, match=r"only to read: lr=0\.01 would have no effect"):
        trainer(2).fit(module, blobs())
    assert module.run.state.rounds == 0


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
@pytest.mark.filterwarnings("ignore:the learner's lr scheduler is ignored")
def test_the_learners_optimizer_is_the_clients(engine: str) -> None:
    given: dict[str, Any] = {"engine": engine, "lr_decay": 0.5, "local_steps": 2}
    expected = {
        "ignore": (0.05, 0.05, None),
        "rounds": (0.025, 0.025, 0.025),
        "local_steps": (0.0375, 0.05, 0.0375),
    }
    for unit, (rate, between, last) in expected.items():
        run = trainer(2)
        run.fit(federated(Looking(), client_scheduler=unit, **given), blobs())
        assert run.callback_metrics["rate"] == pytest.approx(rate)
        assert run.callback_metrics["between"] == pytest.approx(between)
        assert run.callback_metrics.get("last") == (None if last is None else pytest.approx(last))


def test_a_compiled_learner_is_refused_with_the_way_out() -> None:
    compiled: Any = torch.compile(Lit())
    told = r"torch\.compile\(Lit\(…\)\).*FederatedModule\(Lit\(…\), …\)"
    with pytest.raises(UserError, match=told):
        FederatedModule(compiled)
    with pytest.raises(UserError, match="Classifier"):
        FederatedModule(nn.Linear(2, 2))


def test_what_a_method_makes_of_another_optimizers_steps_is_said_of_that_optimizer() -> None:
    module = federated(client_optimizer=lambda p: torch.optim.Adam(p, lr=0.01))
    trainer(1, [ControlVariates()]).fit(module, blobs())
    (note,) = module.notes
    assert note.startswith("ControlVariates: it takes") and "a step of Adam" in note
    assert "momentum" not in note


class Monitored(pl.Callback):
    """Notes the validation loss that it finds in each round, and saves each round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.losses: dict[int, float] = {}

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        value = trainer.callback_metrics.get("val/loss", torch.tensor(-1.0))
        self.losses[trainer.current_epoch] = float(value)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize("same_trainer", [False, True])
def test_a_round_without_validation_finds_the_last_ones_values_after_a_resume(
    same_trainer: bool, tmp_path: Path
) -> None:
    def fitted(rounds: int, path: Path | None = None) -> tuple[Any, Any, Monitored]:
        seen, module = Monitored(tmp_path), federated()  # whose weights follow its seed
        run = trainer(rounds, [seen], check_val_every_n_epoch=3, default_root_dir=tmp_path)
        run.fit(module, blobs(), ckpt_path=path)
        return run, module, seen

    whole = fitted(6)[2].losses
    assert whole[3] != -1.0
    run, module, resumed = fitted(4)
    if same_trainer:
        run.fit_loop.max_epochs = 6
        run.fit(module, blobs())
    else:
        resumed = fitted(6, tmp_path / "3.ckpt")[2]
    assert [resumed.losses[t] for t in (4, 5)] == [whole[t] for t in (4, 5)]
