"""A server that asks for more than the site's file and the config allow is refused."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
from torch import nn

from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.deploy.progress import SiteProgress
from fl_lightning.deploy.site import AtSite, Ended
from fl_lightning.deploy.transport import Message, said
from tests.deploy.liars import OPTIONS, data
from tests.deploy.test_in_memory import Learner, trained


class Questions:
    """A site that holds client 1 in a thread, and the server's end of its post."""

    def __init__(self, folder: Path, callbacks: list[Any], learner: type[Learner]) -> None:
        self.asked: queue.Queue[Message | None] = queue.Queue()
        self.told: queue.Queue[Message] = queue.Queue()
        self.take, self.give = self.asked.get, self.told.put

        def tested() -> Any:
            made = data()
            made.client_test_fraction = 0.25
            return made

        def serve() -> None:
            given = {**OPTIONS, "data": tested, "learner": learner}
            with suppress(Ended):
                at = AtSite(self, [1], folder, most_rounds=2)
                trained([*callbacks, at], 1, [], **given)

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()

    def ask(self, what: str, mine: list[int], **numbers: Any) -> Message:
        own = {"run": 7, "whole": 1, "m": 3, "round": 0, "epoch": 0, "steps": 0, "max_epochs": 2}
        message = Message(what, "", {**own, "total_weight": 3.0, "tests": 0, **numbers})
        message.arrays = {"mine": np.asarray(mine), "counted": np.full(len(mine), -1)}
        message.arrays |= {"w": np.zeros(57, "f4"), "shape": np.asarray([3])}
        buffers = {"running_mean": np.zeros(6, "f4"), "running_var": np.ones(6, "f4")}
        buffers["num_batches_tracked"] = np.asarray(0)
        message.arrays |= {f"buffer/net.1.{name}": value for name, value in buffers.items()}
        self.asked.put(message)
        return self.told.get(timeout=60)


class Scaled(Learner):
    """It names four numbers, one of them behind a property and two that it does not have yet."""

    sent_to_sites = ("factor", "_heat", "count", "cold", "seen", "training", "forward", "heat")
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5
        self._heat = 1.0
        self.drop = nn.Dropout(0.5)

    @property
    def heat(self) -> float:
        return self._heat

    @heat.setter
    def heat(self, value: float) -> None:
        self._heat = value


@pytest.fixture
def site(request: Any, tmp_path: Path) -> Iterator[Questions]:
    callbacks = [PerClientEvaluation(1, finetune_epochs=1)] if request.param else []
    questions = Questions(tmp_path, callbacks, Scaled)
    assert questions.ask("hello", [1]).what == "here"
    yield questions
    questions.asked.put(None)
    questions.thread.join()


def refused(answer: Message) -> str:
    assert answer.what == "failed" and answer.numbers["user"] == 1
    return said(answer.arrays["text"])


@pytest.mark.parametrize("site", [False], indirect=True)
def test_a_site_trains_only_clients_that_it_holds(
    site: Questions, capsys: pytest.CaptureFixture[str]
) -> None:
    for mine in ([0, 1, 2], [0], [1, 1]):
        assert "the server asks for clients" in refused(site.ask("round", mine))
        assert "this site holds [1]" in capsys.readouterr().err
    answer = site.ask("round", [1])
    assert answer.what == "trained" and "1/update" in answer.arrays


@pytest.mark.parametrize("site", [False], indirect=True)
def test_a_site_takes_part_in_as_many_rounds_as_its_file_says(
    site: Questions, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "the server asks for round 2" in refused(site.ask("round", [1], round=2))
    assert "takes part in 2 rounds (most_rounds)" in capsys.readouterr().err
    assert site.ask("round", [1], round=0).what == "trained"


@pytest.mark.parametrize("site", [False], indirect=True)
def test_a_site_measures_only_if_the_config_does(site: Questions) -> None:
    told = refused(site.ask("evaluate", [1], epochs=0))
    assert "has a config without PerClientEvaluation" in told


@pytest.mark.parametrize("site", [False, True], indirect=True)
def test_a_site_counts_test_samples_only_if_the_config_measures(
    site: Questions, request: pytest.FixtureRequest
) -> None:
    measures = request.node.callspec.params["site"]
    assert ("tests" in site.ask("hello", [1], tests=1).arrays) == measures


@pytest.mark.parametrize("site", [False], indirect=True)
def test_a_hello_does_not_bind_a_folder_to_its_run(site: Questions) -> None:
    assert site.ask("hello", [1], run=8).what == "here"
    assert site.ask("hello", [1]).what == "here"
    assert site.ask("round", [1]).what == "trained"
    assert "rows of another run" in refused(site.ask("hello", [1], run=8))


@pytest.mark.parametrize("site", [False], indirect=True)
def test_a_long_question_writes_little_into_the_log(
    site: Questions, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = site.ask("x\u202e" * 10**6, [1])
    assert "is not known" in refused(answer)
    assert len(capsys.readouterr().err) < 1000
    refused(site.ask("round", [1], **{"learner/" + "x" * 10**6: 1}))
    refused(site.ask("round", [1], **{"round": "x" * 10**6}))
    assert len(capsys.readouterr().err) < 30_000


@pytest.mark.parametrize("site", [True], indirect=True)
def test_a_site_fine_tunes_as_long_as_the_config_says(site: Questions) -> None:
    assert "3000 epochs of fine-tuning" in refused(site.ask("evaluate", [1], epochs=3000))
    assert "the server asks for clients" in refused(site.ask("evaluate", [0], epochs=1))
    assert site.ask("evaluate", [1], epochs=1).what == "evaluated"


@pytest.mark.parametrize("site", [False], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        *("_modules", "training", "net._parameters", "forward", "__class__", "nets.a", "a b"),
        # what is not named, what a library's module has, a new name, a property
        *("rate", "seen.ignore_index", "seen.num_classes", "net.1.eps", "net.1.momentum"),
        *("drop.p", "brand_new", "frozen_stay", "current_epoch", "heat", "net.factor"),
    ],
)
def test_only_numbers_that_the_learner_names_are_set(name: str, site: Questions) -> None:
    told = refused(site.ask("round", [1], **{f"learner/{name}": 1, "learner/factor": 9.0}))
    assert f"the server asks for another {name}, which is refused" in told
    scheduled = {"learner/factor": 2.0, "learner/_heat": 3.0, "learner/count": 4, "learner/cold": 5}
    assert site.ask("round", [1], **scheduled).what == "trained"


class Refuses(Scaled):
    """It refuses a number after another one was set."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_heat" and value == 7:
            raise ValueError("too hot")
        super().__setattr__(name, value)


def test_a_message_sets_all_of_its_numbers_or_none() -> None:
    learner = Refuses()
    trainer: Any = pl.Trainer(logger=False, enable_checkpointing=False)
    progress = SiteProgress(trainer, learner)
    own = {"epoch": 1, "steps": 3, "max_epochs": 5}
    progress.take({**own, "learner/factor": 2.0, "learner/count": 1})
    with pytest.raises(ValueError, match="too hot"):
        progress.take({**own, "epoch": 4, "learner/factor": 3.0, "learner/_heat": 7})
    assert (learner.factor, learner.heat, learner.count) == (2.0, 1.0, 1)
    assert trainer.current_epoch == 1
    progress.take(own)  # of a server that has restarted
    assert learner.factor == 1.0 and not {"factor", "count"} & {*vars(learner)}


@pytest.mark.parametrize("site", [False], indirect=True)
@pytest.mark.parametrize(
    ("name", "value"),
    [("round", 0.5), ("epoch", -1), ("total_weight", float("nan")), ("whole", 2), ("run", 10**400)],
)
def test_a_question_with_a_wrong_number_is_refused(name: str, value: Any, site: Questions) -> None:
    told = refused(site.ask("round", [1], **{name: value}))
    assert f"the server's question is refused: the field {name} " in told
    assert site.ask("round", [1]).what == "trained"
