"""Wrong answers: the site and the field are named, and the model is that without the site."""

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

from fl_lightning import Diverged, UserError
from fl_lightning import callbacks as c
from fl_lightning.deploy.sites_engine import MOST_AGAIN
from fl_lightning.deploy.transport import InMemoryTransport, Message, packed, unpacked, words
from tests.deploy.liars import LIAR, OPTIONS, SHARES, SKIP, Without, data_with_tests, with_liar
from tests.deploy.replayed import Left, Place, Recording, joined, parts_of, same_model
from tests.deploy.test_in_memory import over_sites, trained

RUNS: dict[str, Any] = {
    "fedavg": list,
    "scaffold": lambda: [c.ControlVariates()],
    "qsgd, evaluated": lambda: [c.QuantizedUpdate(7), c.PerClientEvaluation(1)],
    "reported": lambda: [c.FairAggregation()],
    "top-k": lambda: [c.TopKCompression(0.25)],
    "own data": list,
}
SENDING: dict[str, Any] = {
    "signs": lambda: [c.SignUpdate()],
    "adam": lambda: [c.AdamDirection(second="averaged")],
    "nova": lambda: [c.NormalizedAveraging()],
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


@cache
def recording(name: str) -> Recording:
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"data": data_with_tests} if "evaluated" in name else {}
        if name == "own data":
            return Recording(RUNS[name], Path(folder), weighting="samples").own_data()
        return Recording({**RUNS, **SENDING}[name], Path(folder), **options)


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
    """The answers of other sites to this question, and the site's own in other rounds."""
    found = {}
    for (site, other), answer in record.answers.items():
        if (site == LIAR) != (other == place) and other[0] == place[0]:
            message = unpacked(answer, site)
            if "place" in message.numbers:
                own = unpacked(record.answers[LIAR, place], LIAR)
                message.numbers["place"] = own.numbers["place"]
            found[f"that of {site} in {other}"] = packed(message)
    return found


def of_others(record: Recording, place: Place, field: str) -> dict[str, Any]:
    """The field in answers of other sites, and of other rounds."""
    found = {}
    for way, answer in others(record, place).items():
        theirs = unpacked(answer, "")
        client = {"north": "0/", "west": "2/"}.get(way.split()[2], "1/")
        key = field.replace("1/", client, 1) if field.startswith("1/") else field
        for kind in (theirs.numbers, theirs.arrays):
            if key in kind:
                found[way] = kind[key]
    return found


def instead(answer: bytes, **numbers: int) -> Callable[[bytes], bytes]:
    """Another answer in place of this one, as if it answered this question."""

    def change(data: bytes) -> bytes:
        message = unpacked(answer, "")
        message.numbers |= {"question": unpacked(data, "").numbers["question"], **numbers}
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
    message = unpacked(data, "")
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
    answer = unpacked(record.answers[LIAR, place], LIAR)
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


NAN = float("nan")
TRAINED = ("trained", 0)
VARIANCE = "1/buffer/net.1.running_var"
SECOND, TAU = "1/upload/AdamDirection.second_sent", "1/upload/NormalizedAveraging.tau"
QSGD = "qsgd, evaluated"
# A run, a field of its liar's first answer, and what stands there; None: nothing.
NAMED: list[tuple[str, str, Any]] = [
    *(("fedavg", "1/update", np.full(57, x, "f4")) for x in (NAN, 3e38)),
    *(
        ("fedavg", "1/update", x)
        for x in (np.full(57, 1e308), np.ones(57, "c8"), np.ones(58, "f4"))
    ),
    ("fedavg", "1/update", None),
    ("scaffold", "1/upload/ControlVariates.change", np.full(57, NAN, "f4")),
    ("scaffold", "1/upload/ControlVariates.change", None),
    *((QSGD, "1/code/levels", x) for x in (np.zeros(3, "u1"), None)),
    (QSGD, "1/update", np.ones(57, "f4")),
    ("signs", "1/code/positive", np.zeros(3, "u1")),
    ("signs", "1/code/scales", -np.ones(6, "f4")),
    ("fedavg", "1/buffer/net.1.running_mean", np.full(6, NAN, "f4")),
    *(("fedavg", VARIANCE, x) for x in (np.full(6, -9, "f4"), np.full(6, 3.3e38, "f4"), None)),
    ("adam", SECOND, -np.ones(57, "f4")),
    ("nova", TAU, np.asarray(-100.0)),
    ("fedavg", "1/maximum/net.1.num_batches_tracked", np.asarray(2**62)),
    ("fedavg", "1/row/X.y", np.ones(10**6)),
    *(
        ("fedavg", "1/counts", x)
        for x in (np.zeros(3, "i8"), np.full(8, np.inf), -np.ones(8, "i8"))
    ),
    ("fedavg", "1/counts", np.full(8, 2**40)),
    *(("fedavg", "1/kept", x) for x in (float("inf"), 10**400)),
    ("fedavg", "1/log/x", 10**400),
    ("fedavg", "1/log/\ud800", 1.0),
    ("fedavg", "1/reads/Nobody", 1),
    ("fedavg", "changed/nothing", 1),
    ("fedavg", "1/name/x", 7),
    ("fedavg", "1/name/train/loss", 0),
    ("fedavg", "1/alone/x", np.asarray(1.0, "f4")),
    ("fedavg", "1/updates/7", 1),
    ("fedavg", "mode/val/loss", 1),
    *(("fedavg", "1/state/0/tp", x) for x in (None, np.ones((5, 3), "i8"), np.asarray([-5]))),
    ("fedavg", "0/update", np.ones(57, "f4")),
    ("fedavg", "round", 3),
    ("fedavg", "question", None),
]


@pytest.mark.parametrize("case", range(len(NAMED)))
def test_a_wrong_answer_is_left_out_and_site_and_field_are_named(case: int) -> None:
    run, name, value = NAMED[case]
    found = recording(run).run(LIAR, TRAINED, lambda data: changed(data, name, value))
    assert same_model(found, without(run, TRAINED))
    (told,) = [note for note in found.notes if "site south" in note]
    start = "1/code/…" if "/code/" in name else name
    start = start.encode(errors="replace").decode().rstrip("?")
    assert told.startswith(f"round 0: the answer of site south: the field {start}")
    assert told.isprintable()


def negative(answer: Message) -> None:
    answer.arrays[VARIANCE] = np.full(6, -9, "f4")


def not_finite(answer: Message) -> None:
    answer.arrays["1/update"] = np.full(57, NAN, "f4")


@pytest.mark.parametrize(
    ("lie", "kind", "name"), [(not_finite, Diverged, "1/update"), (negative, UserError, VARIANCE)]
)
def test_with_stop_a_wrong_answer_ends_the_run_and_only_its_site_is_named(
    lie: Callable[[Message], None], kind: type[Exception], name: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=rf"round 0: answers .*\(site south: the field {name}") as error:
        with_liar(lambda a: lie(a) if a.what == "trained" else None, tmp_path)
    assert "north" not in str(error.value)


def test_a_site_that_is_wrong_three_rounds_in_a_row_is_left_out(tmp_path: Path) -> None:
    asked: list[float] = []

    def lie(answer: Message) -> None:
        if answer.what == "trained":
            asked.append(answer.numbers["round"])
            if answer.numbers["round"] != 1:  # right once between
                negative(answer)

    over, _ = with_liar(lie, tmp_path, rounds=7, **SKIP)
    assert asked == [0, 1, 2, 3, 4]
    (told,) = [note for note in over.notes if "without this site" in note]
    assert told.startswith("site south: its answers were wrong in rounds 2, 3, 4 (site south: the")
    expected = trained([Without((0, 2, 3, 4, 5, 6))], 7, [], **OPTIONS, **SKIP)
    assert torch.equal(over.global_vector, expected.global_vector)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("sizes", np.asarray(each)) for each in ([-30], [0], [2**63 - 1], [2**40], [])),
        *(("clients", np.asarray(each)) for each in ([NAN], [[1]], [1, 1])),
        ("clients", np.zeros(2**20, np.int64)),
        ("batches", np.asarray([11])),
        *(("config", words(each)) for each in ("{", "{}", "[" * 100_000)),
        *((each, None) for each in ("config", "own")),
        *(("own", 0.5), ("place", -1), ("run", 8), ("more", 3)),
    ],
)
def test_a_wrong_hello_is_refused_and_site_and_field_are_named(
    name: str, value: Any, tmp_path: Path
) -> None:
    def lie(answer: Message) -> None:
        if answer.what != "here":
            return
        answer.numbers["own"] = 1
        answer.numbers.pop(name, None)
        answer.arrays.pop(name, None)
        if value is not None:
            (answer.arrays if isinstance(value, np.ndarray) else answer.numbers)[name] = value

    told = f"site south: its answer to the server's hello is wrong: the field {name} "
    with pytest.raises(UserError, match=told) as error:
        with_liar(lie, tmp_path, weighting="samples")
    assert "north" not in str(error.value)


def test_a_second_claimant_and_a_site_that_refuses_do_not_end_the_run(tmp_path: Path) -> None:
    """The other sites suffice."""

    class Refusing(InMemoryTransport):
        def receive(self, timeout: float) -> list[Message]:
            came = super().receive(timeout)
            why = {"text": words("Flower could not run the app there")}
            return [m if m.site != "odd" else Message("refused", "odd", arrays=why) for m in came]

    shares = {**SHARES, "odd": [0], "zealous": [0, 1, 2]}
    options = {"min_sites": 3, "rounds": 2, "carrier": Refusing, **OPTIONS}
    over, _, _ = over_sites(list, tmp_path, shares, **options)
    expected = trained([], 2, [], **OPTIONS)
    assert torch.equal(over.global_vector, expected.global_vector)
    told = [note for note in over.notes if "goes on without this site" in note]
    assert len(told) == 2
    assert any("site odd: Flower could not run the app there" in note for note in told)
    assert any("two sites, north and zealous, have client 0" in note for note in told)


@pytest.mark.slow
def test_measurements_that_always_lie_leave_the_site_out(tmp_path: Path) -> None:
    """Its right updates between them do not make up for them. It said its counts before."""

    def lie(answer: Message) -> None:
        if answer.what == "evaluated":
            answer.arrays["tests"] = answer.arrays["tests"] + answer.numbers["round"] + 1

    given = {"data": data_with_tests, "rounds": 5, **SKIP}
    over, _ = with_liar(lie, tmp_path, lambda: [c.PerClientEvaluation(1)], **given)
    assert any("round 0: the answer of site south: the field tests says" in n for n in over.notes)
    assert any("round 0: clients [1] are left out of clients/…" in note for note in over.notes)
    (told,) = [note for note in over.notes if "without this site" in note]
    assert told.startswith("site south: its answers were wrong in rounds 0, 1, 2")


@pytest.mark.slow
def test_a_site_that_loses_every_message_is_wrong_in_the_end(tmp_path: Path) -> None:
    """Each time it would draw the whole model again."""
    models = []

    class Loses(InMemoryTransport):
        def send(self, messages: list[Message]) -> None:
            models.extend(m.site for m in messages if m.what == "round")
            super().send(messages)

        def receive(self, timeout: float) -> list[Message]:
            came = super().receive(timeout)
            return [
                Message("lost", m.site, {"question": m.numbers["question"]})
                if m.site == LIAR and m.what == "trained"
                else m
                for m in came
            ]

    given = {**OPTIONS, **SKIP, "rounds": 1, "timeout": 60, "shares": SHARES}
    over, _, _ = over_sites(list, tmp_path, carrier=Loses, **given)
    expected = trained([Without([0])], 1, [], **OPTIONS, **SKIP)
    assert torch.equal(over.global_vector, expected.global_vector)
    assert models.count(LIAR) == MOST_AGAIN + 1
    (note,) = [note for note in over.notes if "answer of site" in note]
    assert note.startswith(
        "round 0: the answer of site south: the field what asks for the model, or"
    )


FAST, WHOLE_TIER = 100, 120  # examples in the fast tier; in the whole tier, per run


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
