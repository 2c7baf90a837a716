"""What a learner writes at its Trainer: loggers, callbacks and the data module. Only steps of the
run's own rounds count: trial steps and measurements write nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning.callbacks import GlobalLossLogger, PerClientEvaluation
from tests.helpers.learners import Dropping, Lit, blobs, federated, trainer

STEPS = 20  # of a round: ten clients, all take part
OPTIONS: dict[str, Any] = {"participation": "all", "local_epochs": None, "local_steps": 2}


class Kept(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    name = "kept"
    version = "0"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append(dict(metrics))

    def log_hyperparams(self, *arguments: Any, **options: Any) -> None:
        pass

    def of(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]


class Seen(pl.Callback):
    steps = 0


class Turning(InMemoryDataModule):
    _steps = 0

    @property
    def steps(self) -> int:
        return self._steps

    @steps.setter
    def steps(self, value: int) -> None:
        self._steps = value


class Counting(Lit):
    """Counts its steps at the place ``to``."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to = to

    def count(self) -> None:
        if self.to == "loggers":
            assert isinstance(self.logger, Logger) and self.logger.name in ("kept", "")
            self.logger.log_metrics({"mine": 1.0})
            return
        place: Any = self.trainer if self.to == "trainer" else self.trainer.datamodule
        if self.to == "callbacks":
            (place,) = [each for each in self.trainer.callbacks if isinstance(each, Seen)]
        place.steps = getattr(place, "steps", 0) + 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count()
        return super().training_step(batch, batch_idx)


def run(to: str, engine: str, *callbacks: Any, **options: Any) -> int:
    """Two rounds, and how many steps arrived at the place."""
    kept, seen, data = Kept(), Seen(), blobs()
    data.__class__ = Turning
    fit: Any = trainer(2, [seen, *callbacks], logger=kept)
    fit.fit(federated(Counting(to), engine=engine, **OPTIONS, **options), data)
    places = {"trainer": fit, "callbacks": seen, "data": data}
    return len(kept.of("mine")) if to == "loggers" else places[to].steps


PLACES = {
    "loggers": "the run's loggers",
    "callbacks": "the Trainer's callbacks",
    "data": "Turning.steps",
    "trainer": "Trainer.steps",
}


@pytest.mark.parametrize("engine", ["auto", "sequential", "debug", "stacked"])
@pytest.mark.parametrize("to", PLACES)
def test_each_step_of_the_run_counts_once(to: str, engine: str) -> None:
    assert run(to, engine, GlobalLossLogger(every_n_rounds=1)) == 2 * STEPS


@pytest.mark.parametrize("to", PLACES)
def test_parallel_clients_that_write_there_are_refused_by_name(to: str) -> None:
    with pytest.raises(UserError, match=rf"training_step writes to {PLACES[to]}"):
        run(to, "concurrent", workers=2)


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
    module = federated(FromRoundOne(), engine="concurrent", workers=2, **OPTIONS)
    logger = TensorBoardLogger(tmp_path)
    fit = trainer(4, [seen], logger=logger)
    fit.fit(module, blobs())
    assert fit.current_epoch == 2, "a step asked the Trainer to stop in round 1"
    logger.experiment.close()
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert len(events.Scalars("mine")) == STEPS and seen.steps == STEPS
    (note,) = [note for note in module.notes if "a worker process would lose" in note]
    assert "training_step writes to the run's loggers" in note


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
        assert self.logger is not None
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
