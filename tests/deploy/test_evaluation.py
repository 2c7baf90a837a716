"""``PerClientEvaluation`` over sites: each measures its own clients, and nothing at it changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from fl_lightning import FederatedModule, InMemoryDataModule, UserError, callbacks
from fl_lightning.deploy.site_data import as_one_client
from fl_lightning.deploy.transport import InMemoryTransport, Message
from tests.deploy.test_in_memory import (
    SHARES,
    SIZES,
    KilledOnce,
    Learner,
    Restarted,
    check_same,
    federated_als,
    losing,
    over_sites,
    trained,
)

pytestmark = pytest.mark.slow
FILES = ("clients.csv", "clients_rounds.csv", "clients.png")
Methods = Callable[[], list[Any]]


class Scored(Learner):
    """With metrics of which it is known, by torchmetrics and by the user, which way is better."""

    def __init__(self) -> None:
        super().__init__()
        self.right = torchmetrics.Accuracy("multiclass", num_classes=3)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, y = batch
        logits = self.net(x)
        self.right(logits, y)
        self.log("val/share", self.right)
        self.log("val/quality", nn.functional.cosine_similarity(x, logits).mean())


def data() -> InMemoryDataModule:
    """Every client is tested on samples of its own, but for client 6, which has none."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(sum(SIZES) + 40, 3))).float()
    y = torch.from_numpy(rng.integers(0, 3, len(x)))
    total = sum(SIZES)
    ends = np.cumsum(SIZES)
    lists = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return InMemoryDataModule(
        (x[:total], y[:total]),
        val=(x[:20], y[:20]),
        test=(x[total:], y[total:]),
        clients=lists,
        batch_size=4,
        test_clients=[[] if i == 6 else list(range(i, 40, 9)) for i in range(9)],
    )


def measured_by(methods: Methods, **given: Any) -> Methods:
    def made() -> list[Any]:
        return [*methods(), callbacks.PerClientEvaluation(1, modes={"quality": "max"}, **given)]

    return made


def evaluation_of(module: FederatedModule) -> callbacks.PerClientEvaluation:
    (found,) = (c for c in module.trainer.callbacks if isinstance(c, callbacks.PerClientEvaluation))
    return found


def own_metrics(rounds: list[dict[str, float]], parts: bool) -> list[dict[str, float]]:
    """Without what needs parts that stay at the sites (``parts``: whether any do)."""
    away = ("val/", "divergence/participants", "drift/") if parts else ("val/",)
    return [{k: v for k, v in row.items() if not k.startswith(away)} for row in rounds]


def same_files(ours: Path, theirs: Path) -> None:
    for name in FILES:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


OWN = {"buffers": "own"}
CASES: dict[str, tuple[Methods, dict[str, Any]]] = {
    "fedals": (measured_by(federated_als, finetune_epochs=1), {}),
    "own buffers": (measured_by(lambda: [callbacks.ControlVariates()], finetune_epochs=0.5), OWN),
    "ditto": (
        measured_by(lambda: [callbacks.ProximalPersonalModel(), callbacks.CommunicationLogger()]),
        {},
    ),
    "ifca": (measured_by(lambda: [callbacks.ClusteredModels(k=2)]), {}),
    "fedinit, five": (measured_by(lambda: [callbacks.RelaxedInitialization(0.1)], clients=5), {}),
}
OPTIONS: dict[str, Any] = {"participation": 5, "learner": Scored, "data": data}


def test_a_client_s_own_model_is_not_made_of_the_server_s_alone(tmp_path: Path) -> None:
    over, _, _ = over_sites(federated_als, tmp_path, rounds=1, **OPTIONS)
    took_part = over.run.loop.latest[1][0]
    with pytest.raises(UserError, match=f"client {took_part}: its personal state is at its site"):
        over.export(client=took_part)


@pytest.mark.parametrize("name", CASES)
def test_clients_are_measured_as_in_the_simulation(name: str, tmp_path: Path) -> None:
    """Each message finds a site that was started again."""
    methods, given = CASES[name]
    options = {**OPTIONS, **given}
    metrics: list[dict[str, float]] = []
    simulated = trained(methods(), 4, metrics, root=tmp_path / "simulated", **options)
    sites, run = tmp_path / "sites", tmp_path / "over"
    given = {"carrier": Restarted, "rounds": 4, "timeout": 60, "root": run, **options}
    over, seen, _ = over_sites(methods, sites, **given)
    parts = name == "fedals"
    assert own_metrics(metrics, parts) == own_metrics(seen, parts)
    assert sum(name.startswith("clients/") for name in seen[-1]) >= 12
    assert evaluation_of(simulated).table == evaluation_of(over).table
    same_files(tmp_path / "simulated", run)
    assert simulated.logged.modes == over.logged.modes
    check_same(simulated, over, sites, whole=name != "fedals")


def test_a_site_that_is_killed_while_it_measures_is_asked_again(tmp_path: Path) -> None:
    methods, options = CASES["fedals"][0], OPTIONS
    wrap = KilledOnce(2, "evaluated")
    simulated = trained(methods(), 4, [], root=tmp_path / "simulated", **options)
    sites, run = tmp_path / "sites", tmp_path / "over"
    over, _, carried = over_sites(methods, sites, rounds=4, wrap=wrap, root=run, **options)
    same_files(tmp_path / "simulated", run)
    check_same(simulated, over, sites, whole=False)
    wrap.check(carried)


class Gone(Exception):
    """The server is killed, as a test has it."""


class Kills(InMemoryTransport):
    """Its server is killed once all sites have answered this question."""

    ends_at: tuple[str, int] | None = None
    heard = 0

    def receive(self, timeout: float) -> list[Message]:
        came = super().receive(timeout)
        for answer in came:
            self.heard += (answer.what, answer.numbers.get("round")) == self.ends_at
        if self.heard == len(SHARES):
            self.heard, self.ends_at = 0, None
            raise Gone
        return came


@pytest.mark.parametrize("name", ["fedals", "own buffers"])
def test_a_server_that_is_killed_after_its_question_goes_on_from_the_round_before(
    name: str, tmp_path: Path
) -> None:
    """Sites live on, and have measured a round that the server then trains again."""
    methods, given = CASES[name]
    options = {**OPTIONS, **given, "participation": "all"}
    simulated = trained(methods(), 4, [], root=tmp_path / "simulated", **options)
    sites, run, path = tmp_path / "sites", tmp_path / "over", tmp_path / "over" / "last.ckpt"

    left: list[Kills] = []

    def carrier(serving: Any) -> Kills:
        """The sites of the first server, which live on."""
        left.append(left[0] if left else Kills(serving))
        return left[0]

    def fit(rounds: int, **more: Any) -> FederatedModule:
        given = {"carrier": carrier, "timeout": 60, "root": run, "close": False, **options}
        return over_sites(methods, sites, rounds=rounds, **given, **more)[0]

    def killed(t: int) -> None:
        left[0].ends_at = "evaluated", t
        with pytest.raises(Gone):
            fit(4, resume=path)

    fit(2, save=path)
    killed(2)
    killed(2)
    fit(3, resume=path, save=path)
    killed(3)
    over = fit(4, resume=path)
    left[0].close()
    same_files(tmp_path / "simulated", run)
    check_same(simulated, over, sites, whole=name != "fedals")


def deaf(message: Message) -> bool:
    """A site does not hear that it is to measure round 1."""
    asked = message.what == "evaluate" and message.site == "south"
    return asked and message.numbers["round"] == 1


def test_clients_whose_site_is_away_are_left_out_of_the_round_and_told(tmp_path: Path) -> None:
    methods, _ = CASES["fedals"]
    root = tmp_path / "over"
    options = {"timeout": 5, "rounds": 3, "carrier": losing(deaf), "root": root, **OPTIONS}
    over, _, _ = over_sites(methods, tmp_path / "sites", **options)
    notes = [note for note in over.notes if "left out of clients/" in note]
    assert notes == [
        "round 1: clients [1, 2, 7] are left out of clients/…: their sites did not answer within "
        "timeout=5 s"
    ]
    lines = (root / "clients_rounds.csv").read_text("utf-8").split()[1:]
    rows = [tuple(map(int, line.split(",")[:2])) for line in lines]
    there = [0, 3, 4, 5, 6, 8]
    expected = {(t, i) for t in (0, 2) for i in range(9)} | {(1, i) for i in there}
    assert len(rows) == len(expected) and set(rows) == expected


def table_of(client: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(client)
    return torch.from_numpy(rng.normal(size=(20, 3))).float(), torch.arange(20) % 3


def own_data(client: int, tested: bool = True) -> InMemoryDataModule:
    """A site's table, of which it holds some out where it is ``tested``."""
    given: dict[str, Any] = {"client_test_fraction": 0.3} if tested else {}
    if tested and client == 2:
        # Its test samples are a list of its own.
        x, y = table_of(5)
        given = {"test": (x, y), "test_clients": [[0, 3, 5, 6, 9, 17]]}
    made = InMemoryDataModule(table_of(client), batch_size=4, seed=1, **given)
    as_one_client(made, 3)
    return made


def over_own(methods: Methods, folder: Path, tested: Callable[[int], bool]) -> FederatedModule:
    """A run over three sites with data of their own."""

    def at_site(name: str) -> dict[str, Any]:
        return {"own": True, "data": lambda: own_data(int(name), tested(int(name)))}

    def others() -> InMemoryDataModule:
        # The server's own samples are nobody's.
        made = InMemoryDataModule((torch.zeros(30, 3), torch.arange(30) % 3), num_clients=3)
        made.client_names = ["a", "b", "c"]
        return made

    options = {"data": others, "learner": Scored, "participation": "all", "rounds": 2}
    shares = {str(i): [i] for i in range(3)}
    return over_sites(methods, folder, shares, at_site=at_site, **options)[0]


def test_sites_with_data_of_their_own_test_on_what_they_hold_out(tmp_path: Path) -> None:
    methods = measured_by(lambda: [callbacks.ProximalPersonalModel()])
    found = evaluation_of(over_own(methods, tmp_path, lambda client: client != 1))
    assert found.samples == {0: 6, 1: 0, 2: 6}
    assert {*found.table["quality"]} == {0, 2}
    # Names of the server's clients are nobody's.
    assert list(found.table) == ["loss", "quality", "share"] and not found.names


def test_a_run_without_test_samples_at_any_site_is_refused_before_round_0(tmp_path: Path) -> None:
    methods = measured_by(lambda: [])
    with pytest.raises(UserError, match="no client has test samples of its own at its site"):
        over_own(methods, tmp_path, lambda client: False)


def test_which_way_is_better_is_asked_before_round_0(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which way is better in quality is not known"):
        over_own(lambda: [callbacks.PerClientEvaluation()], tmp_path, lambda client: True)
    assert not any("staged" in path.read_text("utf-8") for path in tmp_path.rglob("site.json"))
