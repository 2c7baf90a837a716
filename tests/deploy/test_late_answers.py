"""Answers that come late, twice, or not at all: they change no number of the run."""

from __future__ import annotations

import csv
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fl_lightning import FederatedModule
from fl_lightning.callbacks import (
    CommunicationLogger,
    PerClientEvaluation,
    ProximalPersonalModel,
    SystemHeterogeneity,
)
from fl_lightning.deploy.answers import evaluated
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.fields import WrongField
from fl_lightning.deploy.transport import InMemoryTransport, Message, Post
from tests.deploy import test_adapters as adapters
from tests.deploy.test_evaluation import CASES, OPTIONS, Methods, measured_by, same_files
from tests.deploy.test_in_memory import SHARES, Restarted, check_same, over_sites, site, trained

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


@pytest.mark.parametrize("carrier", [Twice, TwiceRestarted])
@pytest.mark.parametrize("name", ["fedals", "own buffers"])
def test_answers_that_come_again_change_nothing(
    name: str, carrier: type[InMemoryTransport], tmp_path: Path
) -> None:
    methods, given = CASES[name]
    options = {**OPTIONS, **given}
    simulated = trained(methods(), 3, [], root=tmp_path / "simulated", **options)
    sites, run = tmp_path / "sites", tmp_path / "over"
    over, _, _ = over_sites(
        methods, sites, carrier=carrier, rounds=3, timeout=60, root=run, **options
    )
    same_files(tmp_path / "simulated", run)
    check_same(simulated, over, sites, whole=name != "fedals")


class Late(InMemoryTransport):
    """Some answers of a site come when it is asked next, before the answer to that."""

    holds: Callable[[int], bool]

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen = 0
        self.kept: list[Message] = []
        self.due: list[Message] = []

    def send(self, messages: list[Message]) -> None:
        if any(message.site == "north" for message in messages):
            self.due, self.kept = self.kept, []
        super().send(messages)

    def receive(self, timeout: float) -> list[Message]:
        if self.due:
            came, self.due = self.due, []
            return came
        came = super().receive(timeout)
        late = []
        for answer in came:
            if (answer.what, answer.site) == ("evaluated", "north"):
                self.seen += 1
                late += [answer] * type(self).holds(self.seen)
        self.kept += late
        return [answer for answer in came if not any(answer is each for each in late)]


class FirstTwo(Late):
    """The questions before round 0, and after it; the next one is of one client again."""

    holds = staticmethod(lambda seen: seen <= 2)


def over(methods: Methods, transport: InMemoryTransport, root: Path | None) -> FederatedModule:
    at = AtServer(transport, run=7, timeout=2, min_sites=3)
    try:
        return trained([*methods(), at], 2, [], root=root, **OPTIONS)
    finally:
        transport.close()


def three(methods: Methods, folder: Path) -> dict[str, Callable[[Post], None]]:
    shares = {"north": [0, 3, 8], "south": [1, 2, 7], "west": [4, 5, 6]}

    def serve(name: str, post: Post) -> None:
        site(shares[name], folder / name, methods, OPTIONS, post)

    return {name: partial(serve, name) for name in shares}


def test_a_late_answer_about_other_clients_of_the_same_round_is_none(tmp_path: Path) -> None:
    methods = measured_by(lambda: [ProximalPersonalModel()])
    found = over(methods, FirstTwo(three(methods, tmp_path)), None)
    simulated = trained(methods(), 2, [], **OPTIONS)
    (ours, theirs) = (_table(module) for module in (simulated, found))
    assert ours == theirs


def _table(module: FederatedModule) -> Any:
    (found,) = (c for c in module.trainer.callbacks if isinstance(c, PerClientEvaluation))
    return found.table


def test_where_nobody_answers_after_the_last_round_nothing_is_damaged(tmp_path: Path) -> None:
    methods = measured_by(lambda: [])
    transport = InMemoryTransport(three(methods, tmp_path / "sites"))
    transport.swallows = lambda message: (
        message.what == "evaluate" and message.numbers["round"] == 1
    )
    run = tmp_path / "over"
    over(methods, transport, run)
    assert (run / "clients.csv").read_text("utf-8") == "client,samples\n"
    header, *rows = csv.reader((run / "clients_rounds.csv").read_text("utf-8").splitlines())
    assert header[:4] == ["round", "client", "samples", "loss"]
    assert {row[0] for row in rows} == {"0"} and len(rows) == 9


@pytest.mark.parametrize("change", ["huge", "negative", "unknown", "changed"])
def test_numbers_that_no_client_can_have_are_refused(change: str) -> None:
    numbers = {"run": 7, "round": 0, "0/before/samples": 3, "0/before/loss": 1.0}
    answer = Message("evaluated", "north", numbers)
    answer.arrays = {"clients": np.array([0]), "tests": np.array([3])}
    assert evaluated(answer, 7, 0, {0: 3}, tuned=False, validated={"loss"}).values == {
        0: {"": {"samples": 3, "loss": 1.0}}
    }
    if change == "huge":
        answer.numbers["0/before/loss"] = 10**400
    elif change == "negative":
        answer.arrays["tests"] = np.array([-3])
    elif change == "changed":
        answer.arrays["tests"] = np.array([4])
    else:
        answer.numbers["4/before/loss"] = 1.0
    field = {"huge": "0/before/loss", "unknown": "4/before/loss"}.get(change, "tests")
    with pytest.raises(WrongField, match=f"the field {field} "):
        evaluated(answer, 7, 0, {0: 3}, tuned=False, validated={"loss"})


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


class Flaky(SystemHeterogeneity):
    """In the simulation the clients of site south drop out of round 1."""

    def __init__(self, clients: list[int]) -> None:
        super().__init__(dropout=0.5)
        self.clients = clients

    def conditions(self, seed: int, m: int) -> Any:
        found = super().conditions(seed, m)
        vars(found)["drops"] = lambda version, client: version == 1 and client in self.clients
        return found


def losing(where: str) -> type[Losing]:
    return type("Lost", (Losing,), {"lost": where})


@pytest.mark.parametrize("lost", ["down", "up"])
@pytest.mark.parametrize("name", ["fedavg", "flora"])
def test_a_client_that_does_not_answer_was_sent_the_model_and_that_is_counted(
    name: str, lost: str, tmp_path: Path
) -> None:
    shares, options = SHARES, {"participation": "all"}
    if name == "flora":
        shares, options = adapters.SHARES, {**adapters.OPTIONS, **options}

    def methods() -> list[Any]:
        return [*(adapters.METHODS[name]() if name == "flora" else ()), CommunicationLogger()]

    simulated: list[dict[str, float]] = []
    trained([*methods(), Flaky(shares["south"])], 3, simulated, **options)
    given: dict[str, Any] = {"shares": shares, "carrier": losing(lost), "timeout": 1.5, **options}
    _, over, _ = over_sites(methods, tmp_path, rounds=3, **given)
    assert [bytes_in(metrics) for metrics in over] == [bytes_in(metrics) for metrics in simulated]


def bytes_in(metrics: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in metrics.items() if k.startswith("communication/")}


def test_a_client_whose_site_is_away_is_sent_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = {"carrier": losing("away"), "timeout": 1.5, "participation": "all"}
    over, metrics, _ = over_sites(lambda: [CommunicationLogger()], tmp_path, rounds=2, **given)
    assert any("round 1: clients [1, 2, 7] dropped" in note for note in over.notes)
    assert "waiting for clients [1, 2, 7], at most 1 s more" in capfd.readouterr().out
    before, then = (bytes_in(each) for each in metrics)
    for name in ("down_bytes", "up_bytes", "buffers_bytes"):  # sums over the rounds
        one, both = (each[f"communication/{name}"] for each in (before, then))
        assert both == one + one * 6 / 9
