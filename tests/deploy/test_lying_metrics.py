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
from tests.deploy.liars import OPTIONS, with_liar
from tests.deploy.test_evaluation import OPTIONS as TESTED
from tests.deploy.test_evaluation import measured_by
from tests.deploy.test_in_memory import SHARES as PLACES
from tests.deploy.test_in_memory import Learner, trained

pytestmark = pytest.mark.slow
SKIP = {"on_nonfinite": "skip"}
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


class Mean(pl.LightningModule):
    """Logs the mean of a metric whose states are single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 3)
        self.net.weight.data = torch.eye(3)
        self.seen = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.seen(loss)
        self.log("train/mean", self.seen)
        return loss


class Late(Learner):
    """Logs a metric of its own from the second batch on, which no first step shows."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx:
            self.log("late", loss.detach())
        return loss


class LateMean(Mean):
    """Updates its metric from the second batch on."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx:
            return super().training_step(batch, batch_idx)
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


@pytest.mark.parametrize("rounds", [(0,), (1,)])
def test_a_name_about_which_sites_disagree_has_no_value_in_that_round(
    rounds: tuple[int, ...], tmp_path: Path
) -> None:
    """The server's own step does not log it, so no site is known to be wrong."""

    @in_rounds(*rounds)
    def lie(answer: Message) -> None:
        answer.numbers.pop("0/log/late")
        answer.numbers["0/name/late"] = 0

    given = {"learner": Late, **SKIP}
    simulated: list[dict[str, float]] = []
    expected = trained([], 2, simulated, **OPTIONS, **given)
    over, metrics = with_liar(lie, tmp_path, liar=FIRST, **given)
    assert torch.equal(over.global_vector, expected.global_vector)
    for t, (ours, theirs) in enumerate(zip(metrics, simulated, strict=True)):
        assert "late" in theirs
        if t in rounds:
            del theirs["late"]
            assert ours.pop("late", simulated[0].get("late")) == simulated[0].get("late")
        assert ours == theirs
    told = [note for note in over.notes if "do not agree what late is" in note]
    assert [note[:8] for note in told] == [f"round {t}:" for t in rounds]


def test_a_shape_about_which_sites_disagree_leaves_the_metric_out_of_that_round(
    tmp_path: Path,
) -> None:
    over, metrics = with_liar(a_shape, tmp_path, liar=FIRST, learner=LateMean)
    assert "train/mean" not in metrics[0] and math.isfinite(metrics[1]["train/mean"])
    assert any("round 0: sites do not agree what train/mean is" in note for note in over.notes)


def test_an_honest_run_with_late_names_has_the_simulation_s_values(tmp_path: Path) -> None:
    simulated: list[dict[str, float]] = []
    expected = trained([], 2, simulated, **OPTIONS, learner=Late)
    over, metrics = with_liar(lambda answer: None, tmp_path, learner=Late)
    assert torch.equal(over.global_vector, expected.global_vector)
    assert metrics == simulated and not over.notes


@pytest.mark.parametrize("value", [math.nan, math.inf, -1e308])
def test_a_logged_value_without_a_bound_is_left_out_of_the_mean(
    value: float, tmp_path: Path
) -> None:
    """A simulation's client may log NaN, so the answer is not wrong."""

    @in_rounds(0)
    def lie(answer: Message) -> None:
        answer.numbers["1/log/train/loss"] = value

    simulated: list[dict[str, float]] = []
    expected = trained([], 2, simulated, **OPTIONS)
    over, metrics = with_liar(lie, tmp_path)
    assert torch.equal(over.global_vector, expected.global_vector)
    assert abs(metrics[0].pop("train/loss") - simulated[0].pop("train/loss")) < 0.5
    assert metrics == simulated
    (told,) = over.notes
    assert told.startswith("site south: the value in 1/log/train/loss is left out, because it is")


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


@pytest.mark.parametrize("name", ["epoch", "step", "global_step", "lr-SGD"])
def test_names_that_loggers_and_checkpoints_read_are_the_server_s(
    name: str, tmp_path: Path
) -> None:
    def lie(answer: Message) -> None:
        if answer.what == "trained":
            answer.numbers[f"1/log/{name}"] = 7.5

    simulated: list[dict[str, float]] = []
    trained([], 2, simulated, **OPTIONS)
    over, metrics = with_liar(lie, tmp_path)
    assert metrics == simulated
    (told,) = over.notes
    assert told.startswith(f"site south: the value in 1/log/{name} is left out")


@pytest.mark.parametrize("liar", ["north", "south"])
@pytest.mark.parametrize(("name", "value"), [("mystery", 3.0), ("loss", math.inf)])
def test_measurements_of_another_name_or_without_a_bound_are_left_out(
    name: str, value: float, liar: str, tmp_path: Path
) -> None:
    """Also of the site that is asked first, before round 0, which metrics there are."""

    def lie(answer: Message) -> None:
        for field in [*answer.numbers] if answer.what == "evaluated" else []:
            if field.endswith("/before/loss"):
                answer.numbers[field.removesuffix("loss") + name] = value

    methods = measured_by(list)
    over, metrics = with_liar(lie, tmp_path, methods, liar, shares=PLACES, **TESTED)
    assert any(
        note.startswith(f"site {liar}: the value in") and f"/before/{name} is" in note
        for note in over.notes
    )
    assert math.isfinite(metrics[-1]["clients/loss"]) and "clients/mystery" not in metrics[-1]
    assert math.isfinite(metrics[-1]["clients/share"])


class AnyAbove(torchmetrics.Metric):
    """Whether any loss was above 0, a truth value."""

    any_above: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("any_above", torch.tensor(False), dist_reduce_fx="max")

    def update(self, loss: torch.Tensor) -> None:
        self.any_above = self.any_above | (loss.detach() > 0)

    def compute(self) -> torch.Tensor:
        return self.any_above.float()


class Truth(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.seen = AnyAbove()  # type: ignore[assignment]


def test_a_state_that_is_a_truth_value_is_accepted(tmp_path: Path) -> None:
    over, metrics = with_liar(lambda answer: None, tmp_path, learner=Truth, **SKIP)
    assert not [note for note in over.notes if "the field" in note]
    assert metrics[0]["train/mean"] == 1.0
