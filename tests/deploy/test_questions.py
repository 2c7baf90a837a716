"""A site answers about its own clients, as its config says, or refuses a question with the field
named and stays as it was: named questions, and every field × whatever else could stand there.
"""

from __future__ import annotations

import io
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.deploy.site import AtSite, Ended
from fl_lightning.deploy.site_rows import SiteRows
from fl_lightning.deploy.transport import InMemoryTransport, Message, packed, said, unpacked
from fl_lightning.storage.client_store import ClientStore
from tests.deploy.liars import CLIENT, LIAR, OPTIONS, SHARES, data_with_tests
from tests.deploy.test_in_memory import Learner, over_sites, trained
from tests.deploy.test_wrong_answers import NUMBERS, WHOLE, changed, of_arrays

HELLO, ROUND, EVALUATE = 0, 1, 2  # the first questions of a run


class LiveSite:
    """The site ``south`` in a thread, which an honest server has greeted and asked for round 0."""

    def __init__(self, methods: Callable[[], list[Any]], folder: Path, **options: Any) -> None:
        recorded: dict[str, dict[str, Message]] = {}

        class Records(InMemoryTransport):
            def send(self, messages: list[Message]) -> None:
                for message in messages:
                    recorded.setdefault(message.site, {}).setdefault(message.what, message)
                super().send(messages)

        options = {**OPTIONS, **options}
        carried = {"shares": SHARES, "timeout": 60, "rounds": 1, "carrier": Records}
        over_sites(methods, folder / "run", **carried, **options)
        self.questions = {site: [*each.values()] for site, each in recorded.items()}
        self.folder = folder / "site"
        self.asked: queue.Queue[Message | None] = queue.Queue()
        self.told: queue.Queue[Message] = queue.Queue()
        self.take, self.give = self.asked.get, self.told.put

        def serve() -> None:
            with suppress(Ended):
                trained([*methods(), AtSite(self, [CLIENT], self.folder)], 1, [], **options)

        self.thread = threading.Thread(target=serve, daemon=True)
        self.thread.start()
        self.answers = [self.ask(question) for question in self.questions[LIAR]]

    def ask(self, question: Message | bytes) -> Message:
        data = question if isinstance(question, bytes) else packed(question)
        self.asked.put(unpacked(data, ""))
        return unpacked(packed(self.told.get(timeout=60)), "")

    def question(self, place: int = ROUND, what: str = "", **numbers: Any) -> Message:
        """An honest question with other numbers."""
        own = self.questions[LIAR][place]
        return replace(own, what=what or own.what, numbers={**own.numbers, **numbers})

    def refused(self, question: Message) -> str:
        """The text of the site's error."""
        answer = self.ask(question)
        assert answer.what == "failed" and answer.numbers["user"] == 1
        return said(answer.arrays["text"])

    def files(self) -> dict[str, bytes]:
        """The files of the site's rows."""
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        kept = [path for path in paths if path.name not in (".lock", "left.csv")]
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in kept}

    def close(self) -> None:
        self.asked.put(None)
        self.thread.join()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[LiveSite]:
    live = LiveSite(list, tmp_path, learner=Learner)
    yield live
    if live.thread.is_alive():
        live.close()


def test_a_site_trains_only_clients_that_it_holds_and_measures_only_if_its_config_does(
    site: LiveSite,
) -> None:
    for mine in ([0, 1, 2], [0], [1, 1]):
        question = site.question()
        question.arrays = {**question.arrays, "mine": np.asarray(mine)}
        question.arrays["counted"] = np.full(len(mine), -1)
        told = site.refused(question)
        assert f"the field mine asks for clients {mine}, and this site holds [1]" in told
    told = site.refused(site.question(what="evaluate", epochs=0))
    assert "the field epochs is not one of [], after which PerClientEvaluation measures" in told
    assert "tests" not in site.ask(site.question(HELLO, tests=1)).arrays


def test_a_hello_does_not_bind_a_folder_to_its_run(site: LiveSite) -> None:
    assert "rows of another run" in site.refused(site.question(HELLO, run=8))
    assert "rows of another run" in site.refused(site.question(run=8))
    site.close()
    fresh = SiteRows(site.folder.parent / "fresh", ClientStore())
    fresh.check(8)
    fresh.check(7)


def test_a_long_question_writes_little_into_the_log(
    site: LiveSite, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "is not known" in site.refused(site.question(what="x\u202e" * 10**6))
    assert len(capsys.readouterr().err) < 1000


def test_a_question_of_a_lost_round_leaves_the_rows_of_others(tmp_path: Path) -> None:
    rows = SiteRows(tmp_path, ClientStore())
    rows.stage(7, 0, {"a": {0: torch.ones(1), 1: torch.ones(1)}}, [0, 1])
    with pytest.raises(UserError, match="the server resumes client 1 after round 5"):
        rows.settle({0: 0, 1: 5})
    rows.settle({0: -1, 1: -1})  # the server's checkpoint is of the round before
    assert rows.store.read("a", 0) is None


RUNS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "scaffold": (lambda: [c.ControlVariates()], {"weighting": "samples"}),
    "evaluated": (
        lambda: [c.QuantizedUpdate(7), c.PerClientEvaluation(1, finetune_epochs=1)],
        {"data": data_with_tests},
    ),
    "parts": (
        lambda: [
            c.PartialAveraging(periods={"net.3.*": "never", "net.0.*": 2}),
            c.PerClientEvaluation(1),
        ],
        {"data": data_with_tests},
    ),
    "initial": (lambda: [c.RelaxedInitialization(beta=0.1)], {}),
}
ANSWERS = {"hello": "here", "round": "trained", "evaluate": "evaluated"}
# A server may say anything of these, in the right type, shape and range.
FREE = ("run", "round", "epoch", "steps", "max_epochs", "epochs", "total_weight", "tests")
FREE += ("question", "model", "w", "w0", "state/", "buffer/", "weights", "evaluated", "changed")
# What names a field in other words.
NAMED = {
    "mine": ["the field counted has the shape"],
    "m": ["the server's run has "],
    "run": ["of another run "],
    "since": ["the field w has the shape "],
    "changed": ["the field w has the shape "],
    "weights": ["the field total_weight is "],
}
EXTRA = {
    f"{at}extra": value
    for at in ("", "1/", "buffer/", "state/", "base/", "base/0/")
    for value in (3, np.ones(3, "f4"))
}


@cache
def live(run: str) -> LiveSite:
    methods, options = RUNS[run]
    return LiveSite(methods, Path(mkdtemp()), **options)


@dataclass(frozen=True)
class Wrong:
    """One change of one question. ``free``: a server may say so."""

    run: str
    place: int
    field: str
    way: str
    change: Callable[[bytes], bytes] = field(repr=False, compare=False)
    free: bool = False


@st.composite
def wrong_questions(draw: st.DrawFn, run: str) -> Wrong:
    site = live(run)
    place = draw(st.integers(0, len(site.answers) - 1))
    question = site.questions[LIAR][place]
    theirs = {site: each[place] for site, each in live(run).questions.items() if site != LIAR}
    # The reset to before a question needs the round that counted last to be the honest one.
    names = [name for name in (*question.numbers, *question.arrays) if name != "counted"]
    name = draw(st.sampled_from([*names, "the message", "an extra one"]))
    if name == "the message":
        whole: dict[str, Callable[[bytes], bytes]] = {**WHOLE}
        for way, message in theirs.items():
            whole[f"that of {way}"] = lambda data, message=message: packed(message)
        way = draw(st.sampled_from([*whole]))
        free = way.startswith(("that of", "what is")) or way.endswith("question")
        return Wrong(run, place, name, way, whole[way], free)
    if name == "an extra one":
        name = draw(st.sampled_from([*EXTRA]))
        return Wrong(run, place, name, "extra", lambda data: changed(data, name, EXTRA[name]))
    if name in question.numbers:
        ways: dict[str, Any] = {str(each): each for each in NUMBERS}
        ways |= {way: message.numbers.get(name) for way, message in theirs.items()}
    else:
        ways = of_arrays(question.arrays[name])
        ways |= {way: message.arrays.get(name) for way, message in theirs.items()}
    way = draw(st.sampled_from([*ways]))
    free = name.startswith(FREE)
    return Wrong(run, place, name, way, lambda data: changed(data, name, ways[way]), free)


def check(wrong: Wrong) -> None:
    """The site refuses the question and stays as it was, or answers about its own client only."""
    site = live(wrong.run)
    honest = site.questions[LIAR]
    for question in honest[: max(wrong.place, ROUND + 1)]:
        site.ask(question)  # which puts it back to before
    files, log = site.files(), io.StringIO()
    with redirect_stderr(log):
        answer = site.ask(wrong.change(packed(honest[wrong.place])))
    if answer.what not in ANSWERS.values():
        assert site.files() == files, wrong
        if answer.what == "failed":
            text = said(answer.arrays["text"])
            assert answer.numbers["user"] == 1, (wrong, log.getvalue())
            assert log.getvalue().strip() and "Traceback" not in log.getvalue(), wrong
            named = wrong.field in text or any(each in text for each in NAMED.get(wrong.field, ()))
            damaged = "the message 'damaged' is not known" in text
            assert named or damaged or wrong.field == "the message", (wrong, text)
        assert packed(site.ask(honest[wrong.place])) == packed(site.answers[wrong.place]), wrong
        return
    clients = {name.split("/")[0] for name in (*answer.numbers, *answer.arrays) if "/" in name}
    assert clients <= {str(CLIENT), "changed"}, (wrong, clients)
    assert wrong.free or packed(answer) == packed(site.answers[wrong.place]), (wrong, answer)


@given(st.sampled_from([*RUNS]).flatmap(wrong_questions))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_no_field_of_a_question_changes_a_site_that_refuses_it(wrong: Wrong) -> None:
    check(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_no_field_of_a_question_in_many_more_tries(run: str, data: st.DataObject) -> None:
    check(data.draw(wrong_questions(run)))
