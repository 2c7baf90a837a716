"""A site that lies changes nothing: its answer is refused, with site and field named."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import Diverged, FederatedModule, UserError
from fl_lightning.callbacks import (
    AdamDirection,
    ControlVariates,
    NormalizedAveraging,
    PerClientEvaluation,
    QuantizedUpdate,
    SignUpdate,
)
from fl_lightning.deploy.transport import MAGIC, InMemoryTransport, Message, words
from tests.deploy.liars import OPTIONS, SHARES, Without, with_liar
from tests.deploy.test_evaluation import data as of_clients
from tests.deploy.test_in_memory import over_sites, trained

Methods = Callable[[], list[Any]]
SKIP = {"on_nonfinite": "skip"}
METHODS: dict[str, Methods] = {
    "fedavg": list,
    "scaffold": lambda: [ControlVariates()],
    "qsgd": lambda: [QuantizedUpdate(7)],
    "signs": lambda: [SignUpdate()],
    "adam": lambda: [AdamDirection(second="averaged")],
    "nova": lambda: [NormalizedAveraging()],
}


@cache
def simulated(name: str, without: tuple[int, ...]) -> FederatedModule:
    """Two rounds of the simulation in which the liar's client is left out of these."""
    options = {**OPTIONS, **SKIP}
    return trained([*METHODS[name](), Without(without)], 2, [], **options)


def array(name: str, value: Any) -> Callable[[Message], None]:
    """A lie: this array of the client is another one."""

    def change(answer: Message) -> None:
        answer.arrays[f"1/{name}"] = np.asarray(value)

    return change


def number(name: str, value: Any) -> Callable[[Message], None]:
    def change(answer: Message) -> None:
        answer.numbers[f"1/{name}"] = value

    return change


def missing(name: str) -> Callable[[Message], None]:
    def change(answer: Message) -> None:
        assert f"1/{name}" in answer.numbers.keys() | answer.arrays.keys()
        answer.numbers.pop(f"1/{name}", None)
        answer.arrays.pop(f"1/{name}", None)

    return change


def short(name: str) -> Callable[[Message], None]:
    def change(answer: Message) -> None:
        answer.arrays[f"1/{name}"] = answer.arrays[f"1/{name}"][:-1]

    return change


def below_zero(name: str) -> Callable[[Message], None]:
    def change(answer: Message) -> None:
        answer.arrays[f"1/{name}"] = -1 - answer.arrays[f"1/{name}"]

    return change


def deep(answer: Message) -> bytes:
    text = b"[" * 100_000
    return MAGIC + len(text).to_bytes(8, "little") + text


def another(**changes: Any) -> Callable[[Message], Message]:
    def change(answer: Message) -> Message:
        numbers = {"question": answer.numbers["question"], **changes.pop("numbers", {})}
        return Message(changes.pop("what", "trained"), "", numbers, changes)

    return change


NAN = float("nan")
MEAN = np.full(6, NAN, "f4")
VARIANCE = "buffer/net.1.running_var"
LIES: dict[str, tuple[str, Callable[[Message], Any], str]] = {
    "NaN update": ("fedavg", array("update", np.full(57, NAN, "f4")), "1/update"),
    "1e308": ("fedavg", array("update", np.full(57, 1e308)), "1/update"),
    "3e38": ("fedavg", array("update", np.full(57, 3e38, "f4")), "1/update"),
    "complex": ("fedavg", array("update", np.ones(57, "c8")), "1/update"),
    "long": ("fedavg", array("update", np.ones(58, "f4")), "1/update"),
    "no update": ("fedavg", missing("update"), "1/update"),
    "NaN upload": (
        "scaffold",
        array("upload/ControlVariates.change", np.full(57, NAN, "f4")),
        "1/up",
    ),
    "no upload": ("scaffold", missing("upload/ControlVariates.change"), "1/upload/ControlV"),
    "short levels": ("qsgd", short("code/levels"), "1/code/…"),
    "short signs": ("signs", short("code/positive"), "1/code/…"),
    "negative scales": ("signs", array("code/scales", -np.ones(6, "f4")), "1/code/…"),
    "no code": ("qsgd", missing("code/scales"), "1/code/…"),
    "update beside code": ("qsgd", array("update", np.ones(57, "f4")), "1/update"),
    "NaN buffer": ("fedavg", array("buffer/net.1.running_mean", MEAN), "1/buffer/net.1.running_m"),
    "negative variance": ("fedavg", array(VARIANCE, np.full(6, -9, "f4")), f"1/{VARIANCE}"),
    "infinite variance": ("fedavg", array(VARIANCE, np.full(6, 3.3e38, "f4")), f"1/{VARIANCE}"),
    "negative squares": (
        *("adam", below_zero("upload/AdamDirection.second_sent")),
        "1/upload/AdamDirection.second_sent",
    ),
    "negative steps": (
        *("nova", array("upload/NormalizedAveraging.tau", np.asarray(-100.0))),
        "1/upload/NormalizedAveraging.tau",
    ),
    "buffer of one": ("fedavg", array(VARIANCE, np.ones(1, "f4")), f"1/{VARIANCE}"),
    "no buffer": ("fedavg", missing(VARIANCE), f"1/{VARIANCE}"),
    "maximum": (
        *("fedavg", array("maximum/net.1.num_batches_tracked", np.asarray(2**62))),
        "1/maximum/net.1",
    ),
    "undeclared row": ("fedavg", array("row/X.y", np.ones(10**6)), "1/row/X.y"),
    "counts of 3": ("fedavg", array("counts", np.zeros(3, "i8")), "1/counts"),
    "counts of infinity": ("fedavg", array("counts", np.full(8, np.inf)), "1/counts"),
    "negative counts": ("fedavg", array("counts", np.full(8, -1)), "1/counts"),
    "infinite kept": ("fedavg", number("kept", float("inf")), "1/kept"),
    "huge kept": ("fedavg", number("kept", 10**400), "1/kept"),
    "huge log": ("fedavg", number("log/x", 10**400), "1/log/x"),
    "surrogate": ("fedavg", number("log/\ud800", 1.0), "1/log/"),
    "validation": ("fedavg", number("log/val/acc", 0.999), "1/log/val/acc"),
    "place of a metric": ("fedavg", number("name/x", 7), "1/name/x"),
    "another's name": ("fedavg", number("name/train/loss", 0), "1/name/train/loss"),
    "direction": ("fedavg", lambda a: a.numbers.__setitem__("mode/val/loss", 1), "mode/val/loss"),
    "no state": ("fedavg", missing("state/0/tp"), "1/state/0/tp"),
    "shape of a state": ("fedavg", array("state/0/tp", np.ones((5, 3), "i8")), "1/state/0/tp"),
    "negative state": ("fedavg", array("state/0/tp", np.asarray([-5])), "1/state/0/tp"),
    "another's client": ("fedavg", lambda a: a.arrays.update({"0/update": MEAN}), "0/update"),
    "deep JSON": ("fedavg", deep, "…"),
    "long double": ("fedavg", array("update", np.ones(57, "longdouble")), "…"),
    "failed without text": ("fedavg", another(what="failed"), "user"),
    "failed": (
        *("fedavg", another(what="failed", numbers={"user": 0}, text=words("no \x1b[2J memory"))),
        "text",
    ),
    "no question": ("fedavg", lambda a: a.numbers.pop("question") * 0 or None, "question"),
    "another round": ("fedavg", lambda a: a.numbers.update(round=3), "round"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_wrong_answer_is_left_out_and_site_and_field_are_named(case: str, tmp_path: Path) -> None:
    name, lie, field = LIES[case]

    def once(answer: Message) -> Any:
        first = answer.what == "trained" and answer.numbers["round"] == 0
        return lie(answer) if first else None

    over, metrics = with_liar(once, tmp_path, METHODS[name], **SKIP)
    expected = simulated(name, (0,))
    assert torch.equal(over.global_vector, expected.global_vector)
    buffers = dict(expected.learner.named_buffers())
    for key, value in over.learner.named_buffers():
        assert torch.equal(value, buffers[key]), key
    for key, state in over.server_states.items():
        assert torch.equal(state, expected.server_states[key]), key
    (told,) = [note for note in over.notes if "site south: the field" in note]
    assert told.startswith(f"round 0: the answer of site south: the field {field}")
    assert told.isprintable()
    assert not any("north" in note or "west" in note for note in over.notes)
    assert "x" not in metrics[0] and metrics[0].get("val/acc", 0) != 0.999


@pytest.mark.parametrize("case", ["NaN upload", "undeclared row"])
def test_with_stop_a_wrong_answer_ends_the_run_and_only_its_site_is_named(
    case: str, tmp_path: Path
) -> None:
    name, lie, field = LIES[case]
    kind = Diverged if case.startswith("NaN") else UserError
    with pytest.raises(kind, match=rf"round 0: answers .*\(site south: the field {field}") as error:
        with_liar(lambda a: lie(a) if a.what == "trained" else None, tmp_path, METHODS[name])
    assert "north" not in str(error.value)


def test_a_site_that_is_wrong_three_rounds_in_a_row_is_left_out(tmp_path: Path) -> None:
    wrong = array("update", np.ones(3))
    asked: list[float] = []

    def lie(answer: Message) -> None:
        if answer.what == "trained":
            asked.append(answer.numbers["round"])
            if answer.numbers["round"] != 1:  # right once between
                wrong(answer)

    over, _ = with_liar(lie, tmp_path, rounds=7, **SKIP)
    assert asked == [0, 1, 2, 3, 4]
    (told,) = [note for note in over.notes if "without this site" in note]
    assert told.startswith("site south: its answers were wrong in rounds 2, 3, 4 (site south: the")
    expected = trained([Without((0, 2, 3, 4, 5, 6))], 7, [], **OPTIONS, **SKIP)
    assert torch.equal(over.global_vector, expected.global_vector)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sizes", np.asarray([-30])),
        ("sizes", np.asarray([0])),
        ("sizes", np.asarray([2**63 - 1])),
        ("sizes", np.zeros(0, "i8")),
        ("clients", np.asarray([NAN])),
        ("clients", np.asarray([[1]])),
        ("shape", np.asarray([-3])),
        ("config", words("{")),
        ("config", words("{}")),
        ("config", words("[" * 100_000)),
        ("config", None),
        ("own", None),
        ("own", 0.5),
        ("place", -1),
        ("run", 8),
        ("more", 3),
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
        if isinstance(value, np.ndarray):
            answer.arrays[name] = value
        elif value is not None:
            answer.numbers[name] = value

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
    over, _, _ = over_sites(
        list, tmp_path, shares, min_sites=3, rounds=2, carrier=Refusing, **OPTIONS
    )
    expected = trained([], 2, [], **OPTIONS)
    assert torch.equal(over.global_vector, expected.global_vector)
    told = [note for note in over.notes if "goes on without this site" in note]
    assert len(told) == 2
    assert any("site odd: Flower could not run the app there" in note for note in told)
    assert any("two sites, north and zealous, have client 0" in note for note in told)


def test_measurements_that_lie_are_left_out(tmp_path: Path) -> None:
    """Counts of test samples were said before; directions of metrics are the server's."""

    def methods() -> list[Any]:
        return [PerClientEvaluation(1)]

    def lie(answer: Message) -> None:
        if answer.what == "evaluated" and answer.numbers["round"] == 0:
            answer.arrays["tests"] = answer.arrays["tests"] + 1

    given = {"participation": "all", "data": of_clients, "local_epochs": 1}
    shares = {"north": [0, 3, 8], "south": [1, 2, 7], "west": [4, 5, 6]}
    over, _ = with_liar(lie, tmp_path, methods, shares=shares, **{**given, **SKIP})
    assert any("answer of site south: the field tests says" in note for note in over.notes)
    assert any("clients [1, 2, 7] are left out of clients/…" in note for note in over.notes)


def test_measurements_that_always_lie_leave_the_site_out(tmp_path: Path) -> None:
    """Its right updates between them do not make up for them."""

    def lie(answer: Message) -> None:
        if answer.what == "evaluated":
            answer.arrays["tests"] = answer.arrays["tests"] + answer.numbers["round"] + 1

    given = {"participation": "all", "data": of_clients, "local_epochs": 1, "rounds": 5}
    shares = {"north": [0, 3, 8], "south": [1, 2, 7], "west": [4, 5, 6]}
    methods = lambda: [PerClientEvaluation(1)]  # noqa: E731
    over, _ = with_liar(lie, tmp_path, methods, shares=shares, **{**given, **SKIP})
    (told,) = [note for note in over.notes if "without this site" in note]
    assert told.startswith("site south: its answers were wrong in rounds 0, 1, 2")
