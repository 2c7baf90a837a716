"""Rates follow their schedules."""

from __future__ import annotations

import math
from typing import Any

import pytest
import pytorch_lightning as pl

from fl_lightning import Exponential, Linear, UserError
from fl_lightning.schedules import Cosine, Steps, decay_factor
from tests.helpers.compositions import Function
from tests.helpers.learners import blobs, federated, trainer


def test_learning_rates_follow_their_schedules() -> None:
    seen: list[float] = []

    class See(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            seen.append(float(trainer.callback_metrics["client_lr"]))
            seen.append(pl_module.optimizers().param_groups[0]["lr"])

    trainer(3, [See()]).fit(federated(lr_decay=0.5, server_lr_decay=Exponential(0.1)), blobs())
    assert seen == pytest.approx([0.1, 1.0, 0.05, 0.1, 0.025, 0.01])


def test_a_cosine_falls_from_one_in_round_0_to_its_end_after_its_rounds() -> None:
    expected = [1, (2 + 2**0.5) / 4, 0.5, (2 - 2**0.5) / 4, 0, 0, 0]
    assert [Cosine(4)(t) for t in range(7)] == pytest.approx(expected)
    assert [Cosine(3, end=0.2)(t) for t in range(5)] == pytest.approx([1.0, 0.8, 0.4, 0.2, 0.2])
    assert [Cosine(1, end=0.3)(t) for t in range(2)] == [1.0, 0.3]


def test_steps_hold_from_their_round_on() -> None:
    assert [Steps({3: 0.1, 1: 0.5})(t) for t in range(5)] == [1.0, 0.5, 0.5, 0.1, 0.1]


def test_a_number_decays_geometrically_and_a_schedule_is_its_value() -> None:
    assert decay_factor(0.5, 0) == 1.0 and decay_factor(0.5, 3) == 0.125
    assert decay_factor(Steps({0: 0.3}), 2) == 0.3
    assert Exponential(2.0)(3) == 8.0 and Exponential(10.0)(400) == math.inf


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Cosine(0), "Cosine: rounds=0"),
        (lambda: Cosine(5, end=math.nan), "Cosine: end=nan"),
        (lambda: Linear(0.0, 1.0, rounds=math.nan), "Linear: rounds=nan"),  # type: ignore[arg-type]
        (lambda: Linear("0", 1.0, rounds=3), "Linear: start='0'"),  # type: ignore[arg-type]
        (lambda: Exponential(math.inf), "Exponential: gamma=inf"),
        (lambda: Steps({2: math.nan}), "Steps: values={2: nan}"),
    ],
)
def test_what_is_no_schedule_is_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()


def test_schedules_with_a_function_say_the_same_in_every_process() -> None:
    function = repr(Function(lambda t: 1.0))
    assert function == repr(Function(lambda t: 1.0)) == "Function()"
    assert repr(Steps({1: 0.5})) == "Steps(values={1: 0.5})"


def test_schedules_start_at_their_scale() -> None:
    assert [Exponential(0.9, scale=0.1)(t) for t in (0, 2)] == pytest.approx([0.1, 0.081])
    assert [Exponential(0.9)(t) for t in (0, 2)] == pytest.approx([1.0, 0.81])
    cosine = Cosine(4, end=0.5, scale=0.2)
    assert [cosine(t) for t in (0, 2, 4, 9)] == pytest.approx([0.2, 0.15, 0.1, 0.1])
    assert Exponential(2.0, scale=-1.0)(10_000) == -float("inf")
    assert Exponential(2.0, scale=0.0)(10_000) == 0
