"""What a learner writes at its Trainer: loggers, callbacks and the data module.

Only steps of the run's own rounds count: trial steps and measurements write nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor
from torchmetrics import SumMetric

from fl_lightning import FederatedModule, InMemoryDataModule, UserError
from fl_lightning.callbacks import GlobalLossLogger, PerClientEvaluation
from tests.helpers.learners import Dropping, Lit, blobs, federated, trainer

FOLDER = tempfile.mkdtemp(prefix="logged-")
STEPS = 20  # of a round: ten clients, all take part


class Kept(Logger):
    """Keeps in memory what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    name = "kept"
    version = "0"

    @property
    def log_dir(self) -> str:
        return FOLDER

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        pass

    def of(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


class Seen(pl.Callback):
    """Counts the steps of which a learner tells it."""

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[float] = []


class ToLogger(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert isinstance(self.logger, Kept) and self.logger.log_dir == FOLDER
        loss = super().training_step(batch, batch_idx)
        self.logger.log_metrics({"mine": 1.0})
        return loss


class ToCallback(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (seen,) = [each for each in self.trainer.callbacks if isinstance(each, Seen)]
        seen.steps += 1
        seen.losses.append(1.0)
        return super().training_step(batch, batch_idx)


class ToData(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        data = self.trainer.datamodule
        data.steps = getattr(data, "steps", 0) + 1
        return super().training_step(batch, batch_idx)


class ToTrainer(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.steps = getattr(self.trainer, "steps", 0) + 1
        return super().training_step(batch, batch_idx)


def run(learner: Lit, engine: str, **options: Any) -> tuple[FederatedModule, dict[str, int]]:
    """Two rounds, and how many steps arrived at each place."""
    kept = Kept()
    seen = Seen()
    data = blobs()
    options = {"participation": "all", "local_epochs": None, "local_steps": 2, **options}
    module = federated(learner, engine=engine, **options)
    fit = trainer(2, [seen], logger=kept)
    fit.fit(module, data)
    found = {
        "ToTrainer": getattr(fit, "steps", 0),
        "ToLogger": len(kept.of("mine")),
        "ToCallback": seen.steps,
        "ToData": getattr(data, "steps", 0),
    }
    assert len(seen.losses) == seen.steps
    return module, found


@pytest.mark.parametrize("engine", ["auto", "sequential", "debug", "stacked"])
@pytest.mark.parametrize("kind", [ToLogger, ToCallback, ToData, ToTrainer])
def test_each_step_of_the_run_counts_once(kind: type[Lit], engine: str) -> None:
    _, found = run(kind(), engine)
    assert found[kind.__name__] == 2 * STEPS


@pytest.mark.parametrize("kind", [ToLogger, ToCallback, ToData, ToTrainer])
def test_parallel_clients_that_write_there_are_refused_by_name(kind: type[Lit]) -> None:
    places = {
        "ToLogger": "loggers",
        "ToCallback": "Seen.steps",
        "ToData": "DataModule.steps",
        "ToTrainer": "Trainer.steps",
    }
    with pytest.raises(UserError, match=rf"training_step writes to .*{places[kind.__name__]}"):
        run(kind(), "concurrent", workers=2)


class FromRoundOne(Dropping):
    """Draws, so clients train in processes; writes only in a round that no trial step sees."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch:
            self.logger.experiment.add_scalar("mine", 1.0, batch_idx)
            (seen,) = [each for each in self.trainer.callbacks if isinstance(each, Seen)]
            seen.steps += 1
            self.trainer.should_stop = self.current_epoch == 1
        return super().training_step(batch, batch_idx)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux forks processes")
def test_what_a_worker_process_would_lose_is_written_by_the_run_itself(tmp_path: Path) -> None:
    seen = Seen()
    module = federated(
        FromRoundOne(),
        engine="concurrent",
        workers=2,
        participation="all",
        local_epochs=None,
        local_steps=2,
    )
    logger = TensorBoardLogger(tmp_path)
    fit = trainer(4, [seen], logger=logger)
    fit.fit(module, blobs())
    assert fit.current_epoch == 2, "a step asked the Trainer to stop in round 1"
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert len(events.Scalars("mine")) == STEPS and seen.steps == STEPS
    (note,) = [note for note in module.notes if "a worker process would lose" in note]
    assert "the run's loggers is changed in training_step" in note


class Drawing(Lit):
    """Writes a figure at the end of a validation, and augments only in the training stage."""

    seen = 0

    def on_validation_epoch_start(self) -> None:
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((x + 3 * self.trainer.training, y), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.trainer.validating and not self.trainer.training
        self.seen += len(batch[1])
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        assert isinstance(self.logger, Kept)
        self.logger.log_metrics({"figure": self.seen})


def test_a_measurement_writes_nothing_and_is_not_the_training_stage() -> None:
    kept = Kept()
    x = torch.randn(200, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].argmax(1)
    data = InMemoryDataModule(
        (x, y), test=(x[:50], y[:50]), num_clients=10, batch_size=8, client_test_fraction=0.25
    )
    module = federated(Drawing(), participation="all")
    measures = [PerClientEvaluation(every_n_rounds=1), GlobalLossLogger(every_n_rounds=1)]
    trainer(2, measures, logger=kept).fit(module, data)
    assert kept.of("figure") == [50, 50]
    loss = sum(
        float(torch.nn.functional.cross_entropy(module.export().net(x), y, reduction="sum"))
        for i in range(10)
        for (x, y), _ in data.full_batches(i)
    )
    expected = loss / sum(data.client_sizes())
    assert kept.of("global/train_loss")[-1] == pytest.approx(expected, rel=1e-6)


class Experiment:
    """As the objects of W&B, MLflow and Neptune: mappings, values, and methods that return some."""

    def __init__(self) -> None:
        self.summary: dict[str, int] = {"steps": 0}
        self.config = {"lr": 2.0}
        self.dir = FOLDER

    def get_logdir(self) -> str:
        return FOLDER

    def span(self, name: str) -> Any:
        return nullcontext()


class WithExperiment(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.experiment = Experiment()
        self.count = 0


class ToExperiment(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for logger in self.loggers:
            assert isinstance(logger, WithExperiment)
            run = logger.experiment
            assert isinstance(run, Experiment) and run.config["lr"] / 2 == 1.0
            os.path.join(run.dir, run.get_logdir(), "picture.png")
            with run.span("a step"):
                run.summary["steps"] = run.summary["steps"] + 1
            logger.rows.append({"mine": 1.0})
            logger.count += 1
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["auto", "sequential", "stacked"])
def test_a_trial_step_reads_a_logger_and_does_not_write_it(engine: str) -> None:
    loggers = [WithExperiment(), WithExperiment()]
    module = federated(
        ToExperiment(), engine=engine, participation="all", local_epochs=None, local_steps=2
    )
    trainer(2, logger=loggers).fit(module, blobs())
    for logger in loggers:
        counts = logger.experiment.summary["steps"], len(logger.of("mine")), logger.count
        assert counts == (2 * STEPS,) * 3


class Meter:
    def __init__(self) -> None:
        self.seen: list[int] = []


class Holder(pl.Callback):
    """Holds what changes in place, a slot, and objects of the run."""

    __slots__ = ("slot",)

    def __init__(self, rows: list[int]) -> None:
        self.slot = 0
        self.rows = rows
        self.meter = Meter()
        self.counts: dict[str, int] = defaultdict(int)
        self.array = np.zeros(3)
        self.tensor = torch.zeros(3)
        self.metric = SumMetric()
        self.held: list[Any] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.held = [trainer]

    def numbers(self) -> set[float]:
        lengths = {len(self.rows), len(self.meter.seen), len(self.held) - 1}
        values = {self.array[0].item(), self.tensor[0].item(), self.metric.compute().item()}
        return {*lengths, *values, self.slot, self.counts["steps"]}


class ToHolder(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (holder,) = [each for each in self.trainer.callbacks if isinstance(each, Holder)]
        holder.slot += 1
        for values in (holder.rows, holder.meter.seen, holder.held):
            values.append(1)
        holder.counts["steps"] += 1
        holder.array += 1
        holder.tensor.add_(1)
        holder.metric.update(1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("engine", ["auto", "sequential"])
def test_a_trial_step_leaves_no_change_in_place_at_a_callback(engine: str) -> None:
    rows: list[int] = []
    holder = Holder(rows)
    meter = holder.meter
    module = federated(
        ToHolder(), engine=engine, participation="all", local_epochs=None, local_steps=2
    )
    fit = trainer(2, [holder])
    fit.fit(module, blobs())
    assert holder.numbers() == {2 * STEPS}
    assert holder.rows is rows and holder.meter is meter and holder.held[0] is fit


class Turning(InMemoryDataModule):
    """Keeps a value under a private name."""

    _turn = 0

    @property
    def turn(self) -> int:
        return self._turn

    @turn.setter
    def turn(self, value: int) -> None:
        self._turn = value


class ToTurn(Dropping):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        data: Any = self.trainer.datamodule
        data.turn += 1
        self.trainer.latest = batch_idx
        del self.trainer.latest
        return super().training_step(batch, batch_idx)


def turning() -> Any:
    data = blobs()
    data.__class__ = Turning
    return data


def test_what_a_step_assigns_to_the_data_module_counts_under_a_private_name_too() -> None:
    options: Any = {"participation": "all", "local_epochs": None, "local_steps": 2}
    data = turning()
    trainer(2).fit(federated(ToTurn(), engine="sequential", **options), data)
    assert data.turn == 2 * STEPS
    with pytest.raises(UserError, match=r"training_step writes to Turning\.turn"):
        module = federated(ToTurn(), engine="concurrent", workers=2, **options)
        trainer(2).fit(module, turning())


class Reading(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        data: Any = self.trainer.datamodule
        assert data.num_clients == 10
        return super().training_step(batch, batch_idx)


def test_a_large_array_of_the_data_module_is_not_copied() -> None:
    data = blobs()
    pickled: list[int] = []

    class Watched(np.ndarray[Any, Any]):
        def __reduce__(self) -> Any:
            pickled.append(self.nbytes)
            return super().__reduce__()

    data.raw = np.zeros(2**17).view(Watched)
    trainer(1).fit(federated(Reading(), participation="all"), data)
    assert not pickled


class ToAll(Lit):
    """Counts its steps at a callback, the data and the Trainer."""

    def count(self) -> None:
        (seen,) = [each for each in self.trainer.callbacks if isinstance(each, Seen)]
        for each in (seen, self.trainer.datamodule, self.trainer):
            place: Any = each
            place.steps = getattr(each, "steps", 0) + 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count()
        super().validation_step(batch, batch_idx)


def test_a_measurement_writes_nothing_to_callbacks_data_and_the_trainer() -> None:
    seen = Seen()
    x = torch.randn(200, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, :4].argmax(1)
    data: Any = InMemoryDataModule((x, y), num_clients=10, batch_size=8, client_test_fraction=0.25)
    module = federated(ToAll(), participation="all", local_epochs=None, local_steps=2)
    measures = [PerClientEvaluation(every_n_rounds=1), GlobalLossLogger(every_n_rounds=1)]
    fit: Any = trainer(2, [seen, *measures])
    fit.fit(module, data)
    assert {seen.steps, data.steps, fit.steps} == {2 * STEPS}
