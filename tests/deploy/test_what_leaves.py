"""What the messages between a server and its sites hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from fl_lightning import UserError
from fl_lightning.callback import Clients, FederatedCallback
from fl_lightning.deploy.transport import InMemoryTransport, Message
from tests.deploy.test_in_memory import SIZES, Learner, over_sites, trained

pytestmark = pytest.mark.slow


class Spy(InMemoryTransport):
    """It keeps the messages in both directions."""

    down: list[Message]
    up: list[Message]

    def send(self, messages: list[Message]) -> None:
        self.down += messages
        super().send(messages)

    def receive(self, timeout: float) -> list[Message]:
        came = super().receive(timeout)
        self.up += came
        return came


@pytest.fixture
def spy() -> type[Spy]:
    class Listens(Spy):
        down: list[Message] = []
        up: list[Message] = []

    return Listens


class Auc(Learner):
    """Its metric keeps the prediction and the label of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.AUROC("multiclass", num_classes=3)


class Joined(torchmetrics.Metric):
    """A state that is no list, and grows with the samples all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(0), dist_reduce_fx="cat")

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.seen = torch.cat([self.seen, y.float()])

    def compute(self) -> Tensor:
        return self.seen.mean()


class Labels(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.seen = Joined()


@pytest.mark.parametrize(
    "learner, told",
    [
        (Auc, r"learner Auc: its metric seen \(MulticlassAUROC\) .* in its states preds, target"),
        (Labels, r"learner Labels: its metric seen \(Joined\) .* in its states seen"),
    ],
)
def test_a_metric_that_keeps_single_samples_is_refused_before_they_leave_a_site(
    learner: type[Learner], told: str, spy: type[Spy], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        over_sites(list, tmp_path, rounds=1, carrier=spy, learner=learner)
    assert [answer.what for answer in spy.up][-1] == "failed"
    assert not [name for answer in spy.up for name in answer.arrays if "state/" in name]


class Bins(Learner):
    """It has such a metric too, which only validation updates."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torchmetrics.AUROC("multiclass", num_classes=3, thresholds=5)
        self.of_server = torchmetrics.AUROC("multiclass", num_classes=3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.of_server(self.net(batch[0]), batch[1])
        self.log("val/auroc", self.of_server)


def test_a_metric_with_counts_in_place_of_samples_runs_over_sites(tmp_path: Path) -> None:
    metrics: list[dict[str, float]] = []
    trained([], 2, metrics, learner=Bins)
    _, over, _ = over_sites(list, tmp_path, rounds=2, learner=Bins)
    assert metrics == over and "train/acc" in over[-1]


class Shares(FederatedCallback):
    def on_local_end(self, clients: Clients) -> None:
        clients.log("share", clients.weights)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_a_site_is_told_no_other_clients_and_no_other_numbers_of_samples(
    weighting: str, spy: type[Spy], tmp_path: Path
) -> None:
    metrics: list[dict[str, float]] = []
    options = {"participation": 7, "weighting": weighting}
    trained([Shares()], 2, metrics, **options)
    _, over, _ = over_sites(lambda: [Shares()], tmp_path, rounds=2, carrier=spy, **options)
    assert metrics == over
    rounds = [message for message in spy.down if message.what == "round"]
    for message in rounds:
        of_clients = {"mine", "counted", "weights"} & message.arrays.keys()
        assert "ids" not in message.arrays
        assert {len(message.arrays[name]) for name in of_clients} == {len(message.arrays["mine"])}
        if weighting == "samples":
            mine = [SIZES[client] for client in message.arrays["mine"]]
            assert message.arrays["weights"].tolist() == mine
    assert rounds
