"""Answers that come late, twice, or not at all: they change no number of the run."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.callbacks import CommunicationLogger
from fl_lightning.deploy.transport import InMemoryTransport, Message
from tests.deploy import test_adapters as adapters
from tests.deploy.liars import Without
from tests.deploy.test_evaluation import CASES, OPTIONS, measured_by, same_files
from tests.deploy.test_in_memory import SHARES, Restarted, check_same, losing, over_sites, trained

pytestmark = pytest.mark.slow


class Twice(InMemoryTransport):
    """Every answer to a question about clients comes twice, with the next one's, too."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.before: dict[str, Message] = {}

    def receive(self, timeout: float) -> list[Message]:
        came = []
        for answer in super().receive(timeout):
            if "round" in answer.numbers:
                came += [self.before.get(answer.site, answer), answer, answer]
                self.before[answer.site] = answer
            else:
                came.append(answer)
        return came


class TwiceRestarted(Twice, Restarted):
    """Also where sites have to ask for the whole model."""


@pytest.mark.parametrize(("name", "carrier"), [("fedals", Twice), ("own buffers", TwiceRestarted)])
def test_answers_that_come_again_change_nothing(
    name: str, carrier: type[InMemoryTransport], tmp_path: Path
) -> None:
    methods, given = CASES[name]
    options = {**OPTIONS, **given}
    simulated = trained(methods(), 3, [], root=tmp_path / "simulated", **options)
    sites, run = tmp_path / "sites", tmp_path / "over"
    more = {"carrier": carrier, "rounds": 3, "timeout": 60, "root": run, **options}
    over, _, _ = over_sites(methods, sites, **more)
    same_files(tmp_path / "simulated", run)
    check_same(simulated, over, sites, whole=name != "fedals")


def test_where_nobody_answers_after_the_last_round_nothing_is_damaged(tmp_path: Path) -> None:
    methods = measured_by(lambda: [])
    run = tmp_path / "over"
    unasked = losing(lambda m: m.what == "evaluate" and m.numbers["round"] == 1)
    given = {"timeout": 2, "rounds": 2, "carrier": unasked, "root": run, **OPTIONS}
    over_sites(methods, tmp_path / "sites", **given)
    assert (run / "clients.csv").read_text("utf-8") == "client,samples\n"
    header, *rows = csv.reader((run / "clients_rounds.csv").read_text("utf-8").splitlines())
    assert header[:4] == ["round", "client", "samples", "loss"]
    assert {row[0] for row in rows} == {"0"} and len(rows) == 9


def test_a_deadline_that_is_just_over_brings_no_answer() -> None:
    """As where a neighbour held the processor between the look at the clock and the wait."""
    assert InMemoryTransport({}).receive(-1e-5) == []


class Losing(InMemoryTransport):
    """Site south is silent in round 1: what it is sent or what it answers is lost, or it is away
    from then on.
    """

    lost = ""
    trained = 0

    def sites(self) -> list[str]:
        away = self.lost == "away" and self.trained >= len(SHARES)
        return [site for site in super().sites() if not (away and site == "south")]

    def send(self, messages: list[Message]) -> None:
        super().send([m for m in messages if not (self.lost == "down" and self._silent(m))])

    def receive(self, timeout: float) -> list[Message]:
        came = super().receive(timeout)
        self.trained += sum(message.what == "trained" for message in came)
        return [m for m in came if not (self.lost == "up" and self._silent(m))]

    def _silent(self, message: Message) -> bool:
        return message.site == "south" and message.numbers.get("round") == 1


def silent(where: str) -> type[Losing]:
    return type("Lost", (Losing,), {"lost": where})


@pytest.mark.parametrize(("name", "lost"), [("fedavg", "up"), ("flora", "down")])
def test_a_client_that_does_not_answer_was_sent_the_model_and_that_is_counted(
    name: str, lost: str, tmp_path: Path
) -> None:
    shares, options = SHARES, {"participation": "all"}
    if name == "flora":
        shares, options = adapters.SHARES, {**adapters.OPTIONS, **options}

    def methods() -> list[Any]:
        return [*(adapters.METHODS[name]() if name == "flora" else ()), CommunicationLogger()]

    simulated: list[dict[str, float]] = []
    trained([*methods(), Without([1], shares["south"])], 3, simulated, **options)
    given: dict[str, Any] = {"shares": shares, "carrier": silent(lost), "timeout": 1.5, **options}
    module, over, _ = over_sites(methods, tmp_path, rounds=3, **given)
    assert any(f"clients {shares['south']} dropped" in note for note in module.notes)
    assert [bytes_in(metrics) for metrics in over] == [bytes_in(metrics) for metrics in simulated]


def bytes_in(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k.startswith("communication/")}


def test_a_client_whose_site_is_away_is_sent_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"carrier": silent("away"), "timeout": 1.5, "participation": "all"}
    over, metrics, _ = over_sites(lambda: [CommunicationLogger()], tmp_path, rounds=2, **given)
    assert any("round 1: clients [1, 2, 7] dropped" in note for note in over.notes)
    assert "waiting for clients [1, 2, 7], at most 1 s more" in capfd.readouterr().out
    before, then = (bytes_in(each) for each in metrics)
    for name in ("down_bytes", "up_bytes", "buffers_bytes"):  # sums over the rounds
        one, both = (each[f"communication/{name}"] for each in (before, then))
        assert both == one + one * 6 / 9
