"""Each site's file of what left it."""

from __future__ import annotations

import csv
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning import UserError
from fl_lightning.callback import Clients, FederatedCallback
from fl_lightning.callbacks import ControlVariates, PerClientEvaluation
from fl_lightning.deploy import audit
from fl_lightning.deploy.flower.app_settings import NodeSettings
from fl_lightning.deploy.flower.client import UNNOTED, Resident, failure
from fl_lightning.deploy.flower.serve_site import serve
from fl_lightning.deploy.transport import Message, Post, packed, said
from tests.deploy.liars import data
from tests.deploy.test_in_memory import Restarted, over_sites
from tests.deploy.test_what_leaves import Spy

SHARES = {"north": [0, 2], "south": [1]}
OPTIONS: dict[str, Any] = {"shares": SHARES, "rounds": 2, "participation": "all", "timeout": 60}


def lines_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "left.csv", encoding="utf-8", newline="") as file:
        return [*csv.DictReader(file)]


def sizes_of(line: dict[str, str]) -> dict[str, int]:
    """A line's fields, each with its bytes."""
    pairs = (field.rpartition(" ") for field in line["fields"].split("; "))
    return {name: int(size) for name, _, size in pairs}


def with_tests() -> Any:
    made = data()
    made.client_test_fraction = 0.25
    return made


class ForwardHooks:
    """A site's post that reads the file when an answer leaves."""

    def __init__(self, post: Any, folder: Path, seen: list[tuple[str, int]]) -> None:
        self.post = post
        self.folder = folder
        self.seen = seen

    def take(self) -> Message | None:
        found: Message | None = self.post.take()
        return found

    def give(self, answer: Message) -> None:
        last = lines_of(self.folder)[-1]
        self.seen.append((last["answer"], int(last["bytes"])))
        assert self.seen[-1] == (answer.what, len(packed(answer)))
        self.post.give(answer)


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True])
def test_each_answer_is_noted_before_it_leaves(restarted: bool, tmp_path: Path) -> None:
    """Also those of processes that have just started, after those of the processes before."""
    carrier = type("Both", (Spy, Restarted) if restarted else (Spy,), {"down": [], "up": []})
    seen: dict[str, list[tuple[str, int]]] = {name: [] for name in SHARES}

    def wrap(name: str, post: Post) -> Post:
        return ForwardHooks(post, tmp_path / name, seen[name])

    def methods() -> list[Any]:
        return [ControlVariates(), PerClientEvaluation(1)]

    over_sites(methods, tmp_path, carrier=carrier, wrap=wrap, data=with_tests, **OPTIONS)
    for name, clients in SHARES.items():
        lines = lines_of(tmp_path / name)
        answers = [answer for answer in carrier.up if answer.site == name]
        assert [line["answer"] for line in lines] == [answer.what for answer in answers]
        assert [int(line["bytes"]) for line in lines] == [len(packed(a)) for a in answers]
        assert seen[name] == [(line["answer"], int(line["bytes"])) for line in lines]
        for line, answer in zip(lines, answers, strict=True):
            sizes = sizes_of(line)
            arrays = {key for key in answer.arrays if "/" not in key}
            assert {**sizes, **{key: answer.arrays[key].nbytes for key in arrays}} == sizes
            about = clients if answer.what in ("here", "trained") else []
            if answer.what == "evaluated":
                about = sorted(answer.arrays["clients"].tolist())
            assert line["clients"].split() == [str(client) for client in about]
        rounds = [line for line in lines if line["answer"] == "trained"]
        assert [(line["asked"], line["round"]) for line in rounds] == [
            ("round", "0"),
            ("round", "1"),
        ]
        w = 4 * 57 * len(clients)
        for line in rounds:
            sizes = sizes_of(line)
            assert sizes["update"] == sizes["upload/ControlVariates.change"] == w
            assert {"log/train/loss", "state/0/tp", "counts", "question"} <= {*sizes}
        asked = {(line["asked"], line["answer"]) for line in lines}
        assert {("hello", "here"), ("evaluate", "evaluated")} <= asked


CELL = "Meier, 47, HIV"


class Quotes(FederatedCallback):
    def on_local_end(self, clients: Clients) -> None:
        raise ValueError(CELL)


@pytest.mark.slow
def test_the_file_quotes_no_cell(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ValueError in"):
        over_sites(lambda: [Quotes()], tmp_path, **OPTIONS)
    line = lines_of(tmp_path / "north")[-1]
    assert (line["asked"], line["answer"]) == ("round", "failed")
    assert {*sizes_of(line)} == {"user", "text", "question"}
    assert "Meier" not in (tmp_path / "north" / "left.csv").read_text("utf-8")


def test_a_line_that_was_cut_off_leaves_the_next_ones_whole(tmp_path: Path) -> None:
    note = partial(audit.note, tmp_path, Message("hello"), Message("whole", numbers={"base": 1}))
    path = tmp_path / "left.csv"
    for cut in (0, 1, 9, 30):
        note()
        path.write_text(path.read_text("utf-8")[: -cut or None], "utf-8")
    note()
    header, *lines, end = path.read_text("utf-8").split("\n")
    assert header.startswith("time,asked") and not end
    whole = lines[-1]
    assert whole.startswith("20") and whole.endswith(",hello,,whole,,71,base 1")
    assert [len(line) - len(whole) for line in lines] == [0, 0, -8, -29, 0]


def test_what_came_from_outside_is_one_line_without_control_characters(tmp_path: Path) -> None:
    question = Message("=1+\x1b[2J\nround", numbers={"round": 1e308})
    answer = Message("trained", numbers={"0/log/a\x1b[2J\n\u202eb": 1.5})
    answer.arrays["0/counts"] = np.zeros(8, np.int64)
    audit.note(tmp_path, question, answer)
    text = (tmp_path / "left.csv").read_text("utf-8")
    assert text.count("\n") == 2 and text.replace("\n", "").isprintable()
    (line,) = lines_of(tmp_path)
    assert line["asked"] == "something else" and line["round"] == "1e+308"
    assert sizes_of(line) == {"log/a�[2J��b": 3, "counts": 64}


@pytest.mark.slow
def test_nothing_leaves_that_cannot_be_noted(tmp_path: Path) -> None:
    for name in SHARES:
        (tmp_path / name / "left.csv").mkdir(parents=True)
    carrier = type("Listens", (Spy,), {"down": [], "up": []})
    with pytest.raises(UserError, match=r"left\.csv cannot be written \(Is a directory\)"):
        over_sites(list, tmp_path, carrier=carrier, **OPTIONS)
    assert not carrier.up


def test_a_field_that_the_list_lacks_does_not_leave(tmp_path: Path) -> None:
    for name in ("0/extra", "0/update/x", "extra", "0/sizes"):
        with pytest.raises(RuntimeError, match=f"the field {name} of the answer 'trained'"):
            audit.note(tmp_path, Message("round"), Message("trained", numbers={name: 1}))
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


def test_only_the_owner_reads_the_files_of_a_site(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        audit.note(tmp_path, Message("hello"), Message("whole", numbers={"base": 1}))
        (tmp_path / "config.yaml").write_text("data: Digits\n", "utf-8")
        settings = NodeSettings({"site": "away.yaml", "folder": str(tmp_path)})
        with pytest.raises(UserError):
            Resident(tmp_path, settings, 1).ask(packed(Message("hello", numbers={"m": 3})))
    finally:
        os.umask(before)
    modes = {name: (tmp_path / name).stat().st_mode & 0o777 for name in ("left.csv", "site.log")}
    assert modes == {"left.csv": 0o600, "site.log": 0o600}


class Early:
    """A post whose first message is for a process that was greeted."""

    def __init__(self) -> None:
        self.due = [Message("round", numbers={"round": 3, "question": 8})]
        self.given: list[Message] = []

    def take(self) -> Message | None:
        return self.due.pop() if self.due else None

    def give(self, answer: Message) -> None:
        self.given.append(answer)


def test_the_answer_of_a_process_that_was_not_greeted_is_noted(tmp_path: Path) -> None:
    post = Early()
    serve(tmp_path / "app", tmp_path, "0", None, 1, post)
    assert [answer.what for answer in post.given] == ["lost"]
    (line,) = lines_of(tmp_path)
    assert (line["asked"], line["round"], line["answer"]) == ("round", "3", "lost")
    assert line["fields"] == "question 1"
