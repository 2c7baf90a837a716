"""What a learner asks its Trainer of batches and samples in a local step is its client's own, in
every engine."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning import UserError
from tests.helpers.learners import Lit, blobs, federated, trainer

SIZES = [24, 22, 20, 18, 16] * 2  # of the clients of blobs(), in batches of 8
EPOCHS = 2


def term(learner: Lit, batches: Any) -> Tensor:
    """As a KL term: divided by the number of batches of an epoch."""
    squares = [parameter.square().sum() for parameter in learner.parameters()]
    total: Tensor = sum(squares) / batches  # type: ignore[assignment]
    return total


class Told(Lit):
    """Weighs a term by hand, by the batches of the client that its samples show."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        client = next(i for i, own in enumerate(self.first) if (own == batch[0][0]).all(1).any())
        return super().training_step(batch, batch_idx) + term(self, -(-SIZES[client] // 8))


class Asking(Lit):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + term(
            self, self.trainer.num_training_batches
        )


def fitted(kind: type[Lit], engine: str, callbacks: Any = (), **arguments: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    learner = kind()
    module, data = federated(learner, engine=engine, local_epochs=EPOCHS, **arguments), blobs()
    if isinstance(learner, Told):
        learner.first = [torch.cat([x for (x, _), _ in data.full_batches(i)]) for i in range(10)]
    run = trainer(3, callbacks)
    run.fit(module, data)
    return module, run


@pytest.mark.parametrize(
    ("engine", "capture"),
    [
        ("sequential", False),
        ("concurrent", True),
        ("concurrent", False),
        ("stacked", False),
        ("auto", True),
    ],
)
@pytest.mark.filterwarnings("ignore:engine=", "ignore:local steps are not captured")
def test_a_term_divided_by_the_clients_batches_trains_the_same_model(
    engine: str, capture: bool
) -> None:
    """The clients' numbers differ, and a step recorded with one of them is not replayed for
    another."""
    told, _ = fitted(Told, "sequential")
    asking, _ = fitted(Asking, engine, capture=capture)
    torch.testing.assert_close(asking.global_vector, told.global_vector, rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:engine=", "ignore:local steps are not captured")
@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_all_that_is_asked_of_batches_and_samples_is_the_clients(engine: str) -> None:
    class Looking(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            now: Any = self.trainer
            assert isinstance(now, pl.Trainer) and isinstance(
                now.datamodule, pl.LightningDataModule
            )
            samples, batches = len(now.train_dataloader.dataset), len(now.train_dataloader)
            assert (
                batches == now.num_training_batches == now.fit_loop.max_batches == -(-samples // 8)
            )
            for loader in (now.datamodule.train_dataloader(), self.train_dataloader()):
                assert len(loader) == batches and len(loader.dataset) == samples
                assert loader.batch_size == 8 and not loader.drop_last
            x, y = now.train_dataloader.dataset[samples - 1]
            whole = list(now.train_dataloader)
            assert sum(len(b[0]) for b in whole) == samples and torch.equal(whole[-1][0][-1], x)
            assert int(y) == int(whole[-1][1][-1])
            assert now.fit_loop.batch_idx == now.fit_loop.epoch_loop.batch_idx == batch_idx
            last = now.fit_loop.epoch_loop.batch_progress.is_last_batch
            assert last == now.is_last_batch
            self.log("last", float(last))
            assert now.max_epochs == 3 and now.current_epoch == self.current_epoch
            self.log("samples", float(samples))
            return super().training_step(batch, batch_idx)

    module, run = fitted(Looking, engine, capture=False)
    sizes = [SIZES[i] for i in module.participants(2)]
    assert float(run.callback_metrics["samples"]) == pytest.approx(sum(sizes) / len(sizes))
    assert float(run.callback_metrics["last"]) == pytest.approx(
        sum(1 / -(-n // 8) for n in sizes) / len(sizes)
    )
    assert run.num_training_batches == 1 and "train_dataloader" not in vars(module.learner)


class Measuring(pl.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        w, data, evaluator = (
            pl_module.global_vector.detach(),
            trainer.datamodule,
            pl_module.evaluator(),
        )
        ids = {i: data.client_indices(i) for i in range(10)}
        told = Lit().double()
        told.load_state_dict(pl_module.export().state_dict())
        for i, indices in ids.items():
            loss = evaluator.client(w, i, indices)["loss"]
            batch = (torch.cat([b[k] for b, _ in data.full_batches(i)]) for k in (0, 1))
            expected = told.training_step(tuple(batch), 0) + term(told, -(-SIZES[i] // 8))
            assert loss == pytest.approx(float(expected.detach()))
        with pytest.raises(
            UserError,
            match=r"reads how many batches its client has .*several clients are .*measured",
        ):
            evaluator.mean(w, ids)


def test_a_measurement_of_each_client_has_its_numbers_and_one_of_all_says_that_there_are_none() -> (
    None
):
    fitted(Asking, "sequential", [Measuring()])
