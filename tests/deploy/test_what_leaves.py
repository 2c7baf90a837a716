"""What the messages between a server and its sites hold."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor

from fl_lightning import UserError
from fl_lightning.__main__ import main
from fl_lightning.callback import Clients, FederatedCallback, Upload
from fl_lightning.callbacks import (
    ControlVariates,
    FairAggregation,
    PerClientEvaluation,
    QuantizedUpdate,
)
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.transport import InMemoryTransport, Message
from fl_lightning.deploy.what_leaves import EACH, FIELDS, WHEN, fields_in, listed
from tests.deploy import test_adapters as adapters
from tests.deploy.test_evaluation import OPTIONS as TESTED
from tests.deploy.test_in_memory import SIZES, Learner, over_sites, site, trained

pytestmark = pytest.mark.slow
ADAPTED, RANKS, BASE = adapters.OPTIONS, adapters.METHODS["hetlora"], adapters.METHODS["fedex"]
MODES = {"quality": "max"}


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


class Sometimes(FederatedCallback):
    """An upload that a client has in round 1 only."""

    moved = Upload()

    def on_local_end(self, clients: Clients) -> None:
        if clients.round == 1:
            self.moved[clients] = clients.x - clients.w


class Counts(torchmetrics.Metric):
    """A metric that counts outside its states: each client's value stands for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.steps += 1

    def compute(self) -> Tensor:
        return torch.tensor(float(self.steps))

    def reset(self) -> None:
        super().reset()
        self.steps = 0


class Unused(torchmetrics.Metric):
    """It has a list of samples that stays empty."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("samples", [])
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.number += len(y)

    def compute(self) -> Tensor:
        return self.number


class Many(Learner):
    """Metrics of each kind, and a buffer of which the server keeps its own."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.unused = Counts(), Unused()
        self.register_buffer("memory", torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        for name, metric in (("steps", self.counts), ("number", self.unused)):
            metric(logits, y)
            self.log(name, metric)
        if self.current_epoch:  # so that the trial before round 0 does not show it
            self.memory += 1
        return super().training_step(batch, batch_idx)


class Fails(FederatedCallback):
    def on_local_end(self, clients: Clients) -> None:
        raise ValueError


def two_servers(spy: type[Spy], folder: Path) -> None:
    """A site outlives its server, and so has a base that the next server does not know of."""
    serve = partial(site, [*range(7)], folder / "base", BASE, ADAPTED)
    transport = spy({"site": serve})
    path = folder / "last.ckpt"
    for rounds, files in ((2, {"save": path}), (3, {"resume": path})):
        at = AtServer(transport, run=7, timeout=60)
        trained([*BASE(), at], rounds, [], **files, **ADAPTED)
    transport.close()


def fields_sent(spy: type[Spy], folder: Path) -> dict[str, set[str]]:
    """The fields that left sites in runs that send all there are, by the kind of the answer."""

    def methods() -> list[Any]:
        return [ControlVariates(), Sometimes(), FairAggregation()]

    def measured() -> list[Any]:
        return [QuantizedUpdate(7), PerClientEvaluation(1, finetune_epochs=1, modes=MODES)]

    adapted: dict[str, Any] = {**ADAPTED, "shares": adapters.SHARES}
    over_sites(methods, folder / "methods", rounds=2, carrier=spy, learner=Many)
    over_sites(methods, folder / "few", rounds=1, carrier=spy, fewest_samples=100)
    over_sites(measured, folder / "measured", rounds=1, carrier=spy, **TESTED)
    over_sites(RANKS, folder / "ranks", rounds=1, carrier=spy, **adapted)
    two_servers(spy, folder)
    with pytest.raises(UserError, match="ValueError in"):
        over_sites(lambda: [Fails()], folder / "fails", rounds=1, carrier=spy)
    found: dict[str, set[str]] = {}
    for answer in spy.up:
        found.setdefault(answer.what, set()).update(fields_in(answer))
    return found


def test_the_list_has_each_field_that_leaves_a_site_and_no_other(
    spy: type[Spy], tmp_path: Path
) -> None:
    found = fields_sent(spy, tmp_path)
    each = FIELDS[EACH].keys()
    assert set().union(*found.values()) >= each
    for kind, fields in FIELDS.items():
        if kind != EACH:
            assert found[kind] - each == fields.keys(), kind
    assert found.keys() == FIELDS.keys() - {EACH}


def test_the_page_and_the_readme_of_an_app_show_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", "flower", "base", "--out", "app"]) == 0
    page = Path(__file__).parents[2] / "docs" / "sites.md"
    for path in (tmp_path / "app" / "README.md", page):
        assert f"\n\n{listed()}\n\n" in path.read_text("utf-8"), path
    assert {*WHEN} == {*FIELDS}
    for kind, fields in FIELDS.items():
        assert WHEN[kind] in " ".join(listed().split("\n")), kind
        assert all(f"- `{name}`: " in listed() for name in fields)
