"""Every field of every answer × whatever else could stand there: never a traceback or another
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.callbacks import (
    ControlVariates,
    FairAggregation,
    PerClientEvaluation,
    QuantizedUpdate,
    TopKCompression,
)
from fl_lightning.deploy.transport import opened, packed
from tests.deploy.liars import data
from tests.deploy.replayed import Left, Place, Recording, joined, parts_of, same_model

LIAR = "south"
RUNS: dict[str, Any] = {
    "scaffold": lambda: [ControlVariates()],
    "qsgd, evaluated": lambda: [QuantizedUpdate(7), PerClientEvaluation(1)],
    "reported": lambda: [FairAggregation()],
    "top-k": lambda: [TopKCompression(0.25)],
    "own data": list,
}
# Numbers of these fields that are finite, of the right type and shape, are plausible lies.
PLAUSIBLE = ("update", "upload/", "buffer/", "row/", "code/", "maximum/")
PLAUSIBLY = ("as ", "negative", "huge", "that of")
NUMBERS = [
    *(0.5, -1, -(2**62), 2**62, 10**400, float("nan"), float("inf"), -float("inf"), 1e308, -1e308),
    *(0, 1, 2, True, "null", "text", "", [1], {"a": {"b": 1}}, [[[[[[[[1]]]]]]]], None),
]
DTYPES = ["<f2", "<f4", "<f8", "<i8", "<i4", "<u8", "|u1", "|b1", "<c8", "<c16"]
# What a site with its own data says of them cannot be compared with anything.
OF_OWN_DATA = ("sizes", "batches")


def data_with_tests() -> Any:
    made = data()
    made.client_test_fraction = 0.25
    return made


@cache
def recording(name: str) -> Recording:
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"data": data_with_tests} if "evaluated" in name else {}
        if name == "own data":
            return Recording(RUNS[name], Path(folder), weighting="samples").own_data()
        return Recording(RUNS[name], Path(folder), **options)


@cache
def without(name: str, place: Place) -> Left:
    """The run in which the liar's answer is no message at all."""
    return recording(name).run(LIAR, place, lambda data: b"")


def of_arrays(value: np.ndarray) -> dict[str, Any]:
    """What could stand in place of an array."""
    flat = value.reshape(-1)
    found: dict[str, Any] = {
        f"all {x}": np.full(value.shape, x) for x in (np.nan, np.inf, -np.inf, 1e308, -1e308)
    }
    with np.errstate(all="ignore"):
        found |= {f"as {dtype}": value.astype(dtype) for dtype in DTYPES}
    return {
        **found,
        "an axis more": value[None],
        "no axis": value.reshape(-1)[:1].reshape(()) if value.size else value,
        "none": flat[:0],
        "long": np.concatenate([flat, flat, flat[:1]]),
        "short": flat[:-1],
        "large": np.zeros(10**6, value.dtype),
        "negative": (-1 - value.astype("f8")).astype(value.dtype),
        "huge": np.full(value.shape, 3e38 if value.dtype.kind == "f" else 2**62),
        "missing": None,
    }


def others(record: Recording, place: Place) -> dict[str, bytes]:
    """The answers of other sites to this question, and the site's own in other rounds.

    They have the random number of the site's own folder: no site knows that of another.
    """
    found = {}
    for (site, other), answer in record.answers.items():
        if (site == LIAR) != (other == place) and other[0] == place[0]:
            message = opened(answer, site)
            if "place" in message.numbers:
                own = opened(record.answers[LIAR, place], LIAR)
                message.numbers["place"] = own.numbers["place"]
            found[f"that of {site} in {other}"] = packed(message)
    return found


def of_others(record: Recording, place: Place, field: str) -> dict[str, Any]:
    """The field in answers of other sites, and of other rounds."""
    found = {}
    for way, answer in others(record, place).items():
        theirs = opened(answer, "")
        client = {"north": "0/", "west": "2/"}.get(way.split()[2], "1/")
        key = field.replace("1/", client, 1) if field.startswith("1/") else field
        for kind in (theirs.numbers, theirs.arrays):
            if key in kind:
                found[way] = kind[key]
    return found


def instead(answer: bytes, **numbers: int) -> Callable[[bytes], bytes]:
    """Another answer in place of this one, as if it answered this question."""

    def change(data: bytes) -> bytes:
        message = opened(answer, "")
        message.numbers |= {"question": opened(data, "").numbers["question"], **numbers}
        return packed(message)

    return change


def answers_of_others(record: Recording, place: Place) -> dict[str, Callable[[bytes], bytes]]:
    """Whole answers of other sites, and of other rounds: as they were, and as if they were of this
    question.
    """
    found: dict[str, Callable[[bytes], bytes]] = {}
    for way, answer in others(record, place).items():
        found[way] = lambda data, answer=answer: answer
        found[f"{way}, asked now"] = instead(answer)
        if LIAR in way:
            found[f"{way}, as of now"] = instead(answer, round=place[1])
    return found


def deep(data: bytes) -> bytes:
    return data[:8] + (10**5).to_bytes(8, "little") + b"[" * 10**5


def header(**changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        found, payload = parts_of(data)
        return joined({**found, **changes}, payload)

    return change


def retyped(kind: Any, shape: Any = None) -> Callable[[bytes], bytes]:
    """The first array is said to be of this type, or shape."""

    def change(data: bytes) -> bytes:
        found, payload = parts_of(data)
        name, (old_kind, old_shape) = next(iter(found["arrays"].items()))
        new = [kind or old_kind, old_shape if shape is None else shape]
        return joined({**found, "arrays": {**found["arrays"], name: new}}, payload)

    return change


# kinds of answers, objects in memory, numbers of 16 bytes, shapes that are none
WHOLE: dict[str, Callable[[bytes], bytes]] = {
    "no bytes": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "more": lambda data: data + b"x",
    "deep": deep,
    "a list": lambda data: joined([1], b""),
    "no numbers": header(numbers=None),
    "numbers in a list": header(numbers=[1]),
    "no arrays": header(arrays={}),
    **{
        f"what is {what}": header(what=what) for what in ("here", "round", "whole", "failed", "", 3)
    },
    **{f"arrays of {kind}": retyped(kind) for kind in ("|O8", "<g", "<f3", "3f4", "f4,i4", 7)},
    **{f"shape {s}": retyped(None, s) for s in ([-1], [2**62, 2**62], [1.5], "a", {}, [[1]])},
    "another question": lambda data: changed(data, "question", 5),
    "no question": lambda data: changed(data, "question", None),
}
EXTRA = {
    f"{at}extra": value
    for at in ("", "1/", "0/", "1/row/", "1/upload/", "1/log/val/", "1/state/9/", "changed/")
    for value in (3, np.ones(3, "f4"))
}


def changed(data: bytes, field: str, value: Any) -> bytes:
    """The message with another value of a field; None: without the field."""
    found, payload = parts_of(data)
    if not isinstance(value, np.ndarray) and field not in found["arrays"]:
        found["numbers"].pop(field, None)
        if value is not None:
            found["numbers"][field] = None if value == "null" else value
        return joined(found, payload)
    message = opened(data, "")
    message.numbers.pop(field, None)
    message.arrays.pop(field, None)
    if value is not None:
        message.arrays[field] = value
    return packed(message)


@dataclass(frozen=True)
class Lie:
    """One change of one answer. ``plausible``: what it says could be true."""

    run: str
    place: Place
    field: str
    way: str
    change: Callable[[bytes], bytes] = field(repr=False, compare=False)
    plausible: bool = False


@st.composite
def lies(draw: st.DrawFn, run: str) -> Lie:
    record = recording(run)
    place = draw(st.sampled_from(sorted(place for site, place in record.answers if site == LIAR)))
    answer = opened(record.answers[LIAR, place], LIAR)
    name = draw(st.sampled_from([*answer.numbers, *answer.arrays, "the message", "an extra one"]))
    if name == "the message":
        changes = {**WHOLE, **answers_of_others(record, place)}
        way = draw(st.sampled_from([*changes]))
        return Lie(run, place, name, way, changes[way], way.endswith("as of now"))
    if name == "an extra one":
        name = draw(st.sampled_from([*EXTRA]))
        return Lie(run, place, name, "extra", lambda data: changed(data, name, EXTRA[name]))
    if name in answer.numbers:
        numbers = {**{str(each): each for each in NUMBERS}, **of_others(record, place, name)}
        way = draw(st.sampled_from([*numbers]))
        return Lie(run, place, name, way, lambda data: changed(data, name, numbers[way]))
    ways = {**of_arrays(answer.arrays[name]), **of_others(record, place, name)}
    way = draw(st.sampled_from([*ways]))
    model = name.removeprefix("1/").startswith(PLAUSIBLE) and way.startswith(PLAUSIBLY)
    model |= run == "own data" and name in OF_OWN_DATA
    return Lie(run, place, name, way, lambda data: changed(data, name, ways[way]), model)


def check(lie: Lie) -> None:
    """The run ends with a finite model: that without the site's clients, or its honest one."""
    found = recording(lie.run).run(LIAR, lie.place, lie.change)
    assert all(bool(torch.isfinite(each).all()) for each in found.tensors.values()), lie
    refused = [note for note in found.notes if LIAR in note]
    # The server cannot know which of two sites has a client. The first that says so keeps it.
    if any(note.startswith("clients: two sites, ") for note in found.notes):
        return
    others = [note for note in found.notes if "site north" in note or "site west" in note]
    assert not others, (lie, others)
    if same_model(found, recording(lie.run).honest) or (lie.plausible and not refused):
        return
    assert same_model(found, without(lie.run, lie.place)), (lie, found.notes)
    assert refused, (lie, found.notes)
    # The text of a wrong hello names the setting, or what differs in the data.
    of_field = lie.place[0] == "here" or lie.field == "the message"
    assert of_field or any("the field " in note for note in refused), (lie, refused)


FAST, WHOLE_TIER = 100, 600  # examples in the fast tier; in the whole tier, per run


@given(st.sampled_from([*RUNS]).flatmap(lies))
@settings(max_examples=FAST, deadline=None, derandomize=True, database=None)
def test_no_field_of_an_answer_changes_another_site_s_part_of_the_model(lie: Lie) -> None:
    check(lie)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
@given(data=st.data())
@settings(max_examples=WHOLE_TIER, deadline=None, derandomize=True, database=None)
def test_no_field_of_an_answer_in_many_more_tries(run: str, data: st.DataObject) -> None:
    check(data.draw(lies(run)))


@pytest.mark.parametrize("run", RUNS)
def test_a_held_run_leaves_what_a_whole_run_leaves(run: str) -> None:
    for _ in range(2):
        recording(run).run(LIAR, ("here", -2), lambda data: b"")
        assert same_model(recording(run).run(), recording(run).honest)
