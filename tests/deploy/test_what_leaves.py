"""The data that a site sends: the fields of its answers, its record of them, its error texts."""

from __future__ import annotations

import csv
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.__main__ import main
from fl_lightning.callback import Clients, FederatedCallback, Upload
from fl_lightning.datamodules import FromTable
from fl_lightning.deploy import what_leaves
from fl_lightning.deploy.flower.app import NodeSettings
from fl_lightning.deploy.flower.client import UNNOTED, Resident, failure
from fl_lightning.deploy.flower.serve_site import own_data
from fl_lightning.deploy.round_messages import check_names
from fl_lightning.deploy.transport import InMemoryTransport, Message, Post, packed, said, words
from fl_lightning.deploy.what_leaves import EACH, FIELDS, WHEN, fields_in, listed, told
from fl_lightning.errors import CellError
from fl_lightning.lab.cli.compose import Command
from tests.deploy import test_adapters as adapters
from tests.deploy.liars import OPTIONS, SHARES, data_with_tests
from tests.deploy.test_evaluation import OPTIONS as TESTED
from tests.deploy.test_in_memory import SIZES, Learner, Restarted, over_sites, trained

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


class Joined(torchmetrics.Metric):
    """A state that is no list, and grows with the samples all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(0), dist_reduce_fx="cat")

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.seen = torch.cat([self.seen, y.float()])

    def compute(self) -> Tensor:
        return self.seen.mean()


AUROC = partial(torchmetrics.AUROC, "multiclass", num_classes=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric, told",
    [
        (AUROC, r"its metric seen \(MulticlassAUROC\) .* in its states preds, target"),
        (Joined, r"its metric seen \(Joined\) .* in its states seen"),
    ],
)
def test_a_metric_that_keeps_single_samples_is_refused_before_they_leave_a_site(
    metric: Any, told: str, spy: type[Spy], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"learner Learner: {told}"):
        over_sites(list, tmp_path, rounds=1, carrier=spy, learner=partial(Learner, metric()))
    assert [answer.what for answer in spy.up][-1] == "failed"
    assert not [name for answer in spy.up for name in answer.arrays if "state/" in name]


@pytest.mark.slow
def test_a_metric_with_counts_in_place_of_samples_runs_over_sites(tmp_path: Path) -> None:
    metrics: list[dict[str, float]] = []
    learner = partial(Learner, AUROC(thresholds=5))
    trained([], 2, metrics, learner=learner)
    _, over, _ = over_sites(list, tmp_path, rounds=2, learner=learner)
    assert metrics == over and "train/acc" in over[-1]


class Shares(FederatedCallback):
    def on_local_end(self, clients: Clients) -> None:
        clients.log("share", clients.weights)


@pytest.mark.slow
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
    """It has a list of samples that stays empty, and a state that is a truth value."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("samples", [])
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")
        self.add_state("any", torch.tensor(False), dist_reduce_fx="max")

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.number += len(y)
        self.any = self.any | (y >= 0).any()

    def compute(self) -> Tensor:
        return self.number * self.any


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
    left: list[Spy] = []

    def carrier(serving: Any) -> Spy:
        left.append(left[0] if left else spy(serving))
        return left[0]

    path = folder / "last.ckpt"
    given = {"shares": {"site": [*range(7)]}, "carrier": carrier, "close": False, **ADAPTED}
    over_sites(BASE, folder / "base", rounds=2, save=path, **given)
    over_sites(BASE, folder / "base", rounds=3, resume=path, **given)
    left[0].close()


def fields_sent(spy: type[Spy], folder: Path) -> dict[str, set[str]]:
    """The fields that left sites in runs that send all there are, by the kind of the answer."""

    def methods() -> list[Any]:
        return [c.ControlVariates(), Sometimes(), c.FairAggregation()]

    def measured() -> list[Any]:
        return [c.QuantizedUpdate(7), c.PerClientEvaluation(1, finetune_epochs=1, modes=MODES)]

    adapted: dict[str, Any] = {**ADAPTED, "shares": adapters.SHARES}
    over, _, _ = over_sites(methods, folder / "methods", rounds=2, carrier=spy, learner=Many)
    assert not [note for note in over.notes if "the field" in note]
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


@pytest.mark.slow
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


def test_the_readme_of_an_app_shows_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", "flower", "base", "--out", "app"]) == 0
    assert f"\n\n{listed()}\n\n" in Path("app", "README.md").read_text("utf-8")
    assert {*WHEN} == {*FIELDS}
    for kind, fields in FIELDS.items():
        assert WHEN[kind] in " ".join(listed().split("\n")), kind
        assert all(f"- `{name}`: " in listed() for name in fields)


TWO = {"north": [0, 2], "south": [1]}
OF_TWO: dict[str, Any] = {"shares": TWO, "rounds": 2, "participation": "all", "timeout": 60}


def lines_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "left.csv", encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def sizes_of(line: dict[str, str]) -> dict[str, int]:
    """A line's fields, each with its bytes."""
    pairs = (field.rpartition(" ") for field in line["fields"].split("; "))
    return {name: int(size) for name, _, size in pairs}


class Reads:
    """A site's post that reads the file when an answer leaves."""

    def __init__(self, post: Any, folder: Path) -> None:
        self.take, self.post, self.folder = post.take, post, folder

    def give(self, answer: Message) -> None:
        last = lines_of(self.folder)[-1]
        assert (last["answer"], int(last["bytes"])) == (answer.what, len(packed(answer)))
        self.post.give(answer)


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
def test_each_answer_is_noted_before_it_leaves(restarted: bool, tmp_path: Path) -> None:
    """Also those of processes that have just started, after those of the processes before."""
    carrier = type("Both", (Spy, Restarted) if restarted else (Spy,), {"down": [], "up": []})

    def wrap(name: str, post: Post) -> Post:
        return Reads(post, tmp_path / name)

    def methods() -> list[Any]:
        return [c.ControlVariates(), c.PerClientEvaluation(1)]

    over_sites(methods, tmp_path, carrier=carrier, wrap=wrap, data=data_with_tests, **OF_TWO)
    for name, clients in TWO.items():
        lines = lines_of(tmp_path / name)
        answers = [answer for answer in carrier.up if answer.site == name]
        assert [line["answer"] for line in lines] == [answer.what for answer in answers]
        assert [int(line["bytes"]) for line in lines] == [len(packed(a)) for a in answers]
        for line, answer in zip(lines, answers, strict=True):
            sizes = sizes_of(line)
            arrays = {key for key in answer.arrays if "/" not in key}
            assert {**sizes, **{key: answer.arrays[key].nbytes for key in arrays}} == sizes
            about = clients if answer.what in ("here", "trained") else []
            if answer.what == "evaluated":
                about = sorted(answer.arrays["clients"].tolist())
            assert line["clients"].split() == [str(client) for client in about]
        rounds = [line for line in lines if line["answer"] == "trained"]
        expected = [("round", "0"), ("round", "1")]
        assert [(line["asked"], line["round"]) for line in rounds] == expected
        w = 4 * 57 * len(clients)
        for line in rounds:
            sizes = sizes_of(line)
            assert sizes["update"] == sizes["upload/ControlVariates.change"] == w
            assert {"log/train/loss", "state/0/tp", "counts", "question"} <= {*sizes}
        asked = {(line["asked"], line["answer"]) for line in lines}
        assert {("hello", "here"), ("evaluate", "evaluated")} <= asked


def test_what_came_from_outside_is_one_line_without_control_characters(tmp_path: Path) -> None:
    question = Message("=1+\x1b[2J\nround", numbers={"round": 1e308})
    answer = Message("trained", numbers={"0/log/a\x1b[2J\n\u202eb": 1.5})
    answer.arrays["0/counts"] = np.zeros(8, np.int64)
    before = os.umask(0o022)
    try:
        what_leaves.note(tmp_path, question, answer)
    finally:
        os.umask(before)
    assert (tmp_path / "left.csv").stat().st_mode & 0o777 == 0o600, "only its owner reads it"
    text = (tmp_path / "left.csv").read_text("utf-8")
    assert text.count("\n") == 2 and text.replace("\n", "").isprintable()
    (line,) = lines_of(tmp_path)
    assert line["asked"] == "something else" and line["round"] == "1e+308"
    assert sizes_of(line) == {"log/a�[2J��b": 3, "counts": 64}


@pytest.mark.slow
def test_nothing_leaves_that_cannot_be_noted(tmp_path: Path) -> None:
    for name in TWO:
        (tmp_path / name / "left.csv").mkdir(parents=True)
    carrier = type("Listens", (Spy,), {"down": [], "up": []})
    with pytest.raises(UserError, match=r"left\.csv cannot be written \(Is a directory\)"):
        over_sites(list, tmp_path, carrier=carrier, **OF_TWO)
    assert not carrier.up


def test_a_field_that_the_list_lacks_does_not_leave(tmp_path: Path) -> None:
    for name in ("0/extra", "0/update/x", "extra", "0/sizes"):
        with pytest.raises(RuntimeError, match=f"the field {name} of the answer 'trained'"):
            what_leaves.note(tmp_path, Message("round"), Message("trained", numbers={name: 1}))
    assert not [*tmp_path.iterdir()]


def test_a_site_that_cannot_note_its_answer_sends_a_fixed_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = NodeSettings({"site": "/data/Meier.yaml", "folder": str(tmp_path / "rows")})
    site = Resident(tmp_path, settings, 1)
    why = UserError("site.yaml of Meier is damaged")
    assert said(failure(site, why).arrays["text"]) != UNNOTED
    (tmp_path / "rows" / "left.csv").unlink()
    (tmp_path / "rows" / "left.csv").mkdir()
    for place in (site, None):
        answer = failure(place, why)
        assert answer.numbers == {"user": 1} and {*answer.arrays} == {"text"}
        assert said(answer.arrays["text"]) == UNNOTED
    printed = capsys.readouterr().err
    assert "left.csv cannot be written (Is a directory)" in printed and "Meier" in printed


CELL = "Jane Roe 1961-02-03"


def error_of(path: Path, cells: list[str]) -> UserError:
    """The error of a table with this row in its row 4."""
    rows = [["x0", "x1", "outcome"], ["0.5", "1.5", "0"], ["0.5", "1.5", "1"], cells]
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([*rows, *rows[1:3]])
    given: Any = {"path": str(path), "target": "outcome", "classes": [0, 1], "batch_size": 2}
    data = FromTable(num_clients=2, **given)
    with pytest.raises(UserError) as error:
        data.prepare_data()
        data.setup("fit")
    return error.value


@pytest.mark.parametrize(
    ("cells", "secret", "place"),
    [
        ([CELL, "1", "1"], CELL, "column 1, row 4"),
        (["1e99", "1", "1"], "1e+99", "column 1, row 4"),
        (["1", "1", "HIV-positive"], "HIV-positive", "column 3, row 4"),
        (["1", "", "1"], "no value", "column 2, row 4"),
        ([CELL, "", "1"], CELL, "column 1, row 4; column 2, row 4"),
    ],
)
def test_the_place_of_a_cell_is_told_and_not_its_value(
    cells: list[str], secret: str, place: str, tmp_path: Path
) -> None:
    error = error_of(tmp_path / "patients.csv", cells)
    assert isinstance(error, CellError) and secret in str(error)
    text = told(error)
    assert place in text and secret not in text and str(tmp_path) not in text


@pytest.mark.parametrize("kind", ["column_names", "class_names"])
def test_names_that_only_the_site_has_are_counted_and_not_told(kind: str) -> None:
    """The classes may be cells of the target's column, and the columns the first row of a table."""
    data = SimpleNamespace(**{kind: ["a", "c", CELL, f"{CELL} HIV"]})
    with pytest.raises(UserError) as error:
        check_names({kind: words("a\nb")}, data)
    text = told(error.value)
    assert CELL not in text and "lack b, which the server's have, and have 3 that the" in text


def test_the_name_of_a_column_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "headless.csv"
    path.write_text(f"{CELL},51,1\nx,3,1\n4,4,0\n", "utf-8")
    data = FromTable(path, target="1", classes=[0, 1], num_clients=1)
    with pytest.raises(CellError, match=CELL) as error:
        data.prepare_data()
        data.setup("fit")
    assert CELL not in told(error.value) and "column 1, row 2" in told(error.value)


class Quotes(Learner):
    """Its step fails in round 1, and its error quotes a sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch == 0:
            return super().training_step(batch, batch_idx)
        raise ValueError(f"cannot use {CELL} in /data/{CELL}.csv")


def test_an_error_of_a_learner_is_told_with_its_place_and_stays_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**OPTIONS, "learner": Quotes}
    expected = r"site north: client 0: ValueError in test_what_leaves\.py, line \d+; the text is in"
    with pytest.raises(UserError, match=expected) as error:
        over_sites(list, tmp_path, SHARES, rounds=2, **given)
    line = lines_of(tmp_path / "north")[-1]
    assert (line["asked"], line["answer"]) == ("round", "failed")
    assert {*sizes_of(line)} == {"user", "text", "question"}
    assert CELL not in str(error.value)
    assert CELL not in (tmp_path / "north" / "left.csv").read_text("utf-8")
    assert f"ValueError: cannot use {CELL}" in capsys.readouterr().err


def test_what_stands_in_a_sites_file_is_not_told(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"client: {CELL}\ndata: Digits\n", "utf-8")
    with pytest.raises(UserError, match=CELL) as error:
        own_data(Command(), path)
    assert CELL not in told(error.value) and "accepted.py" in told(error.value)
