"""Every field of every question × whatever else could stand there: the site answers, or refuses it
with the field named and stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
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
from fl_lightning.callbacks import (
    ControlVariates,
    PartialAveraging,
    PerClientEvaluation,
    QuantizedUpdate,
    RelaxedInitialization,
)
from fl_lightning.deploy.site_rows import SiteRows
from fl_lightning.deploy.transport import Message, opened, packed, said
from fl_lightning.storage.client_store import ClientStore
from tests.deploy.held_sites import HeldSite, Reply
from tests.deploy.liars import CLIENT, LIAR
from tests.deploy.test_fuzzed_answers import NUMBERS, WHOLE, changed, data_with_tests, of_arrays

RUNS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "scaffold": (lambda: [ControlVariates()], {"weighting": "samples"}),
    "evaluated": (
        lambda: [QuantizedUpdate(7), PerClientEvaluation(1, finetune_epochs=1)],
        {"data": data_with_tests},
    ),
    "parts": (
        lambda: [PartialAveraging(periods={"net.3.*": "never", "net.0.*": 2})],
        {},
    ),
    "initial": (lambda: [RelaxedInitialization(beta=0.1)], {}),
}
ANSWERS = {"hello": "here", "round": "trained", "evaluate": "evaluated"}
# A server may say anything of these, in the right type, shape and range.
FREE_NUMBERS = ("run", "round", "epoch", "steps", "max_epochs", "epochs", "total_weight")
FREE_NUMBERS += ("tests", "question")
FREE_ARRAYS = (
    "w",
    "w0",
    "state/",
    "buffer/",
    "weights",
    "evaluated",
    "parts",
    "changed",
    "counted",
)
# What names a field in other words.
NAMED = {
    "mine": ["the server asks for clients [", "the field counted has the shape"],
    "counted": ["the server resumes client 1 after round "],
    "m": ["the server's run has "],
    "epochs": ["epochs of fine-tuning"],
    "run": ["of another run "],
    "whole": ["the field w has the shape "],
    "weights": ["the field total_weight is "],
}
EXTRA = {
    f"{at}extra": value
    for at in ("", "1/", "buffer/", "state/", "base/", "base/0/", "learner/net.0.", "learner/")
    for value in (3, np.ones(3, "f4"))
}


@cache
def held(run: str) -> HeldSite:
    methods, options = RUNS[run]
    return HeldSite(methods, Path(mkdtemp()), **options)


@cache
def honest(run: str, place: int) -> Reply:
    site = held(run)
    site.put_back(site.places[place])
    return site.ask(site.places[place].question)


@dataclass(frozen=True)
class Wrong:
    """One change of one question. ``free``: a server may say so."""

    run: str
    place: int
    field: str
    way: str
    change: Callable[[bytes], bytes] = field(repr=False, compare=False)
    free: bool = False


def others(run: str, place: int) -> dict[str, Message]:
    """The questions to other sites of this kind, and those to this site in other rounds."""
    site = held(run)
    own = opened(site.places[place].question, "")
    found = {}
    for name, questions in site.questions.items():
        for number, data in enumerate(questions):
            message = opened(data, name)
            if message.what == own.what and (name, number) != (LIAR, place):
                found[f"that of {name}, number {number}"] = message
    return found


@st.composite
def wrong_questions(draw: st.DrawFn, run: str) -> Wrong:
    site = held(run)
    place = draw(st.integers(0, len(site.places) - 1))
    question = opened(site.places[place].question, "")
    names = [*question.numbers, *question.arrays, "the message", "an extra one"]
    name = draw(st.sampled_from(names))
    if name == "the message":
        whole: dict[str, Callable[[bytes], bytes]] = {**WHOLE}
        for way, message in others(run, place).items():
            whole[way] = lambda data, message=message: packed(message)
        way = draw(st.sampled_from([*whole]))
        free = way.startswith(("that of", "what is")) or way.endswith("question")
        return Wrong(run, place, name, way, whole[way], free)
    if name == "an extra one":
        name = draw(st.sampled_from([*EXTRA]))
        free = name.startswith("learner/")
        return Wrong(run, place, name, "extra", lambda data: changed(data, name, EXTRA[name]), free)
    theirs = others(run, place).items()
    if name in question.numbers:
        ways: dict[str, Any] = {str(each): each for each in NUMBERS}
        ways |= {way: message.numbers.get(name) for way, message in theirs}
        free = name in FREE_NUMBERS
    else:
        ways = of_arrays(question.arrays[name])
        ways |= {way: message.arrays.get(name) for way, message in theirs}
        free = name.startswith(FREE_ARRAYS)
    way = draw(st.sampled_from([*ways]))
    return Wrong(run, place, name, way, lambda data: changed(data, name, ways[way]), free)


def check(wrong: Wrong) -> None:
    """The site refuses the question and stays as it was, or answers about its own client only."""
    site = held(wrong.run)
    place = site.places[wrong.place]
    expected = honest(wrong.run, wrong.place)
    site.put_back(place)
    reply = site.ask(wrong.change(place.question))
    message = reply.message
    if message.what not in ANSWERS.values():
        assert reply.files == place.files, wrong
        if message.what == "failed":
            text = said(message.arrays["text"])
            assert message.numbers["user"] == 1, (wrong, reply.log)
            assert reply.log.strip() and "Traceback" not in reply.log, wrong
            named = wrong.field in text or wrong.field.removeprefix("learner/") in text
            named |= any(each in text for each in NAMED.get(wrong.field, ()))
            damaged = "the message 'damaged' is not known" in text
            assert named or damaged or wrong.field == "the message", (wrong, text)
        again = site.ask(place.question)
        assert again.data == expected.data, wrong
        return
    clients = {name.split("/")[0] for name in (*message.numbers, *message.arrays) if "/" in name}
    assert clients <= {str(CLIENT), "changed"}, (wrong, clients)
    assert wrong.free or reply.data == expected.data, (wrong, message)


def test_a_question_that_names_a_lost_round_leaves_the_rows_of_other_clients(
    tmp_path: Path,
) -> None:
    rows = SiteRows(tmp_path, ClientStore())
    rows.begin(7)
    rows.stage(0, {"a": {0: torch.ones(1), 1: torch.ones(1)}}, [0, 1])
    with pytest.raises(UserError, match="the server resumes client 1 after round 5"):
        rows.settle({0: 0, 1: 5})
    rows.settle({0: -1, 1: -1})  # the server's checkpoint is of the round before
    assert rows.store.read("a", 0) is None


@given(st.sampled_from([*RUNS]).flatmap(wrong_questions))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_no_field_of_a_question_changes_a_site_that_refuses_it(wrong: Wrong) -> None:
    check(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@given(data=st.data())
@settings(max_examples=500, deadline=None, derandomize=True, database=None)
def test_no_field_of_a_question_in_many_more_tries(run: str, data: st.DataObject) -> None:
    check(data.draw(wrong_questions(run)))
