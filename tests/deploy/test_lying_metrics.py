"""What a name stands for, and what a metric may be, is not one site's word."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torchmetrics
from torch import nn

from fl_lightning.deploy.client_results import MOST_NAMES
from fl_lightning.deploy.transport import Message
from tests.deploy.liars import OPTIONS, SKIP, with_liar
from tests.deploy.test_evaluation import OPTIONS as TESTED
from tests.deploy.test_evaluation import measured_by
from tests.deploy.test_in_memory import SHARES as PLACES
from tests.deploy.test_in_memory import Learner, trained

pytestmark = pytest.mark.slow
FIRST = "north"  # the site whose answer comes first; it has client 0
STATES = ("name", "metrics", "updates", "items", "state")


def forget_metrics(answer: Message) -> None:
    """Take out what the client's torchmetrics bring."""
    for fields in (answer.numbers, answer.arrays):
        for name in [*fields]:
            if name.split("/")[1:2] and name.split("/")[1] in STATES:
                del fields[name]


def in_rounds(*rounds: int) -> Callable[[Callable[[Message], Any]], Callable[[Message], Any]]:
    """A lie only in these rounds."""

    def only(lie: Callable[[Message], Any]) -> Callable[[Message], Any]:
        return lambda m: lie(m) if m.what == "trained" and m.numbers["round"] in rounds else None

    return only


class Mean(Learner):
    """Logs the mean of a metric whose states are single numbers."""

    def __init__(self) -> None:
        super().__init__(torchmetrics.MeanMetric())

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.seen(loss)
        self.log("train/mean", self.seen)
        return loss


class Late(Mean):
    """Updates its metric, and logs a number, from the second batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx:
            loss = super().training_step(batch, batch_idx)
            self.log("late", loss.detach())
            return loss
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


@in_rounds(0)
def a_number(answer: Message) -> None:
    forget_metrics(answer)
    answer.numbers["0/log/train/acc"] = 0.5


@in_rounds(0)
def a_shape(answer: Message) -> None:
    for name in [*answer.arrays]:
        if name.startswith("0/state/"):
            answer.arrays[name] = np.full(2, answer.arrays[name])


@in_rounds(0)
def by_itself(answer: Message) -> None:
    del answer.numbers["0/name/train/acc"]
    answer.arrays["0/alone/train/acc"] = np.asarray(123.0)


@pytest.mark.parametrize(
    ("lie", "learner", "field"),
    [
        (a_number, Learner, "0/log/train/acc"),
        (by_itself, Learner, "0/alone/train/acc"),
        (a_shape, Mean, "0/state/0/mean_value"),
    ],
)
def test_the_first_answer_does_not_decide_what_others_may_send(
    lie: Any, learner: type[pl.LightningModule], field: str, tmp_path: Path
) -> None:
    over, metrics = with_liar(lie, tmp_path, liar=FIRST, learner=learner, **SKIP)
    (told,) = [note for note in over.notes if "answer of site" in note]
    assert told.startswith(f"round 0: the answer of site {FIRST}: the field {field} ")
    kept = {"train/acc", "train/mean"} & metrics[0].keys()
    assert kept and all(math.isfinite(row[name]) for row in metrics for name in kept)


def test_a_thousand_names_of_one_site_leave_the_others_theirs(tmp_path: Path) -> None:
    def lie(answer: Message) -> None:
        if answer.what == "trained" and answer.numbers["round"] == 0:
            forget_metrics(answer)
            answer.numbers |= {f"0/log/x{i}": 0.5 for i in range(MOST_NAMES)}
        elif answer.what == "trained":
            answer.numbers["0/log/another"] = 0.5

    over, metrics = with_liar(lie, tmp_path, liar=FIRST, **SKIP)
    (told,) = [note for note in over.notes if "answer of site" in note]
    assert told.startswith(f"round 1: the answer of site {FIRST}: the field 0/log/… brings")
    assert "train/acc" in metrics[0] and "train/loss" in metrics[1]


def test_names_that_the_server_s_own_step_does_not_log(tmp_path: Path) -> None:
    """Numbers count. A metric of torchmetrics has no value, because any site could say what it is.

    The learner's metric is updated, and another name logged, from the second batch on.
    """
    simulated: list[dict[str, float]] = []
    expected = trained([], 2, simulated, **OPTIONS, learner=Late)
    over, metrics = with_liar(lambda answer: None, tmp_path, learner=Late)
    assert torch.equal(over.global_vector, expected.global_vector)
    for row in simulated:
        assert math.isfinite(row.pop("train/mean")) and "late" in row
    assert metrics == simulated
    told = "the value in 0/name/train/mean is left out, because the server's own step logs no such"
    assert any(told in note for note in over.notes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("train/loss", value) for value in (math.nan, -1e308)),
        *((name, 7.5) for name in ("epoch", "lr-SGD", "val/acc", "train/extra")),
    ],
)
def test_a_logged_value_without_a_bound_or_under_a_name_of_the_server_is_left_out(
    name: str, value: float, tmp_path: Path
) -> None:
    """Loggers and checkpoints read some names. The rest of the answer is not wrong."""

    @in_rounds(0)
    def lie(answer: Message) -> None:
        answer.numbers[f"1/log/{name}"] = value

    simulated: list[dict[str, float]] = []
    expected = trained([], 2, simulated, **OPTIONS)
    over, metrics = with_liar(lie, tmp_path)
    assert torch.equal(over.global_vector, expected.global_vector)
    if name == "train/extra":
        assert metrics[0].pop(name) == value and metrics[1].pop(name) == value and not over.notes
    else:
        (told,) = over.notes
        assert told.startswith(f"site south: the value in 1/log/{name} is left out, because ")
    if name == "train/loss":
        assert abs(metrics[0].pop(name) - simulated[0].pop(name)) < 0.5
    assert metrics == simulated


@pytest.mark.parametrize(
    ("name", "value"), [("weight", -1e6), ("weight", 1e30), ("mean_value", 1e30)]
)
def test_states_of_a_mean_have_bounds(name: str, value: float, tmp_path: Path) -> None:
    @in_rounds(0)
    def lie(answer: Message) -> None:
        answer.arrays[f"1/state/0/{name}"] = np.asarray(value, "f4")

    over, _ = with_liar(lie, tmp_path, learner=Mean, **SKIP)
    (told,) = over.notes
    assert told.startswith(f"round 0: the answer of site south: the field 1/state/0/{name} ")


@pytest.mark.parametrize(("name", "value"), [("mystery", 3.0), ("loss", math.inf)])
def test_measurements_of_another_name_or_without_a_bound_are_left_out(
    name: str, value: float, tmp_path: Path
) -> None:
    def lie(answer: Message) -> None:
        for field in [*answer.numbers] if answer.what == "evaluated" else []:
            if field.endswith("/before/loss"):
                answer.numbers[field.removesuffix("loss") + name] = value

    over, metrics = with_liar(lie, tmp_path, measured_by(list), shares=PLACES, **TESTED)
    told = [note for note in over.notes if note.startswith("site south: the value in")]
    assert any(f"/before/{name} is" in note for note in told)
    assert math.isfinite(metrics[-1]["clients/loss"]) and "clients/mystery" not in metrics[-1]
    assert math.isfinite(metrics[-1]["clients/share"])
