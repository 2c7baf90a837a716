"""``PerClientEvaluation`` over sites: each measures its own clients, and nothing at it changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

from fl_lightning import FederatedModule, InMemoryDataModule, UserError
from fl_lightning.callbacks import (
    ClusteredModels,
    CommunicationLogger,
    ControlVariates,
    PerClientEvaluation,
    ProximalPersonalModel,
    RelaxedInitialization,
)
from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.site import AtSite, Ended
from fl_lightning.deploy.site_data import as_one_client
from fl_lightning.deploy.transport import InMemoryTransport, Message, Post
from tests.deploy.test_in_memory import (
    SHARES,
    SIZES,
    Broken,
    Learner,
    Restarted,
    check_same,
    federated_als,
    over_sites,
    site,
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
        return [*methods(), PerClientEvaluation(1, modes={"quality": "max"}, **given)]

    return made


def evaluation_of(module: FederatedModule) -> PerClientEvaluation:
    (found,) = (c for c in module.trainer.callbacks if isinstance(c, PerClientEvaluation))
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
    "own buffers": (measured_by(lambda: [ControlVariates()], finetune_epochs=0.5), OWN),
    "ditto": (measured_by(lambda: [ProximalPersonalModel(), CommunicationLogger()]), {}),
    "ifca": (measured_by(lambda: [ClusteredModels(k=2)]), {}),
    "fedinit, five": (measured_by(lambda: [RelaxedInitialization(0.1)], clients=5), {}),
}
OPTIONS: dict[str, Any] = {"participation": 5, "learner": Scored, "data": data}


def test_a_client_s_own_model_is_not_made_of_the_server_s_alone(tmp_path: Path) -> None:
    over, _, _ = over_sites(federated_als, tmp_path, rounds=1, **OPTIONS)
    took_part = over.run.loop.latest[1][0]
    with pytest.raises(UserError, match=f"client {took_part}: its personal state is at its site"):
        over.export(client=took_part)


@pytest.mark.parametrize("carrier", [InMemoryTransport, Restarted])
@pytest.mark.parametrize("name", CASES)
def test_clients_are_measured_as_in_the_simulation(
    name: str, carrier: type[InMemoryTransport], tmp_path: Path
) -> None:
    """Also where each message finds a site that was started again."""
    methods, given = CASES[name]
    options = {**OPTIONS, **given}
    metrics: list[dict[str, float]] = []
    simulated = trained(methods(), 4, metrics, root=tmp_path / "simulated", **options)
    sites, run = tmp_path / "sites", tmp_path / "over"
    over, seen, _ = over_sites(
        methods, sites, carrier=carrier, rounds=4, timeout=60, root=run, **options
    )
    parts = name == "fedals"
    assert own_metrics(metrics, parts) == own_metrics(seen, parts)
    assert sum(name.startswith("clients/") for name in seen[-1]) >= 12
    assert evaluation_of(simulated).table == evaluation_of(over).table
    same_files(tmp_path / "simulated", run)
    assert simulated.logged.modes == over.logged.modes
    check_same(simulated, over, sites, whole=name != "fedals")


@pytest.mark.parametrize("name", ["fedals", "own buffers", "ditto"])
def test_a_resumed_run_goes_on_with_the_same_table(name: str, tmp_path: Path) -> None:
    methods, given = CASES[name]
    options = {**OPTIONS, **given}
    trained(methods(), 4, [], root=tmp_path / "simulated", **options)
    sites, run, path = tmp_path / "sites", tmp_path / "over", tmp_path / "over" / "last.ckpt"
    over_sites(methods, sites, rounds=3, root=run, save=path, **options)
    over_sites(methods, sites, rounds=4, root=run, resume=path, **options)
    same_files(tmp_path / "simulated", run)


@pytest.mark.parametrize("at", [1, 2])
def test_a_site_that_is_killed_while_it_measures_is_asked_again(at: int, tmp_path: Path) -> None:
    methods, options = CASES["fedals"][0], OPTIONS
    killed: list[str] = []

    def wrap(name: str, post: Post) -> Post:
        if name == "south" and not killed:
            killed.append(name)
            return Broken(post, at, "evaluated")
        return post

    simulated = trained(methods(), 4, [], root=tmp_path / "simulated", **options)
    sites, run = tmp_path / "sites", tmp_path / "over"
    over, _, carried = over_sites(methods, sites, rounds=4, wrap=wrap, root=run, **options)
    same_files(tmp_path / "simulated", run)
    check_same(simulated, over, sites, whole=False)
    asked = [what for way, to, what, _ in carried.array_bytes if (way, to) == ("down", "south")]
    assert killed == ["south"] and asked.count("hello") == 2


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

    def serve(name: str, post: Post) -> None:
        site(SHARES[name], sites / name, methods, options, post)

    transport = Kills({name: partial(serve, name) for name in SHARES})

    def fit(rounds: int, **more: Any) -> FederatedModule:
        at = AtServer(transport, run=7, timeout=60, min_sites=3)
        return trained([*methods(), at], rounds, [], root=run, **more, **options)

    def killed(t: int) -> None:
        transport.ends_at = "evaluated", t
        with pytest.raises(Gone):
            fit(4, resume=path)

    fit(2, save=path)
    killed(2)
    killed(2)
    fit(3, resume=path, save=path)
    killed(3)
    over = fit(4, resume=path)
    transport.close()
    same_files(tmp_path / "simulated", run)
    check_same(simulated, over, sites, whole=name != "fedals")


def test_clients_whose_site_is_away_are_left_out_of_the_round_and_told(tmp_path: Path) -> None:
    methods, _ = CASES["fedals"]

    def serve(name: str, post: Post) -> None:
        site(SHARES[name], tmp_path / name, methods, OPTIONS, post)

    transport = InMemoryTransport({name: partial(serve, name) for name in SHARES})
    asked = []

    def away(message: Message) -> bool:
        if message.what == "evaluate" and message.site == "south":
            asked.append(message.numbers["round"])
            return message.numbers["round"] == 1
        return False

    transport.swallows = away
    at = AtServer(transport, run=7, timeout=20, min_sites=3)
    over = trained([*methods(), at], 3, [], root=tmp_path / "over", **OPTIONS)
    transport.close()
    notes = [note for note in over.notes if "left out of clients/" in note]
    assert notes == [
        "round 1: clients [1, 2, 7] are left out of clients/…: their sites did not answer within "
        "timeout=20 s"
    ]
    lines = (tmp_path / "over" / "clients_rounds.csv").read_text("utf-8").split()[1:]
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


def all_data() -> InMemoryDataModule:
    """The same samples as three clients of one table; client 1 has none to test on."""
    trains, tests = [], []
    for client in range(3):
        made = own_data(client, client != 1)
        made.setup("fit")
        trains.append([part[made.client_indices(client)] for part in table_of(client)])
        own = made.client_test_indices(client)
        table = table_of(client) if client != 2 else table_of(5)
        tests.append([part[own - 20 * (client == 2)] for part in table])

    def joined(tables: list[Any]) -> tuple[Any, list[Any]]:
        ends = np.cumsum([len(y) for _, y in tables])
        lists = np.split(np.arange(ends[-1]), ends[:-1])
        return tuple(torch.cat(parts) for parts in zip(*tables, strict=True)), lists

    train, clients = joined(trains)
    test, test_clients = joined(tests)
    given = {"clients": clients, "test": test, "test_clients": test_clients}
    return InMemoryDataModule(train, batch_size=4, **given)


def over_own(
    methods: Methods, folder: Path, tested: Callable[[int], bool], **options: Any
) -> FederatedModule:
    """A run over three sites with data of their own."""

    def serve(client: int, post: Post) -> None:
        def own() -> InMemoryDataModule:
            return own_data(client, tested(client))

        with suppress(Ended):
            at = AtSite(post, [client], folder / str(client), own=True)
            trained([*methods(), at], 1, [], data=own, learner=Scored, participation="all")

    def others() -> InMemoryDataModule:
        # The server's own samples are nobody's.
        made = InMemoryDataModule((torch.zeros(30, 3), torch.arange(30) % 3), num_clients=3)
        made.client_names = ["a", "b", "c"]
        return made

    transport = InMemoryTransport({str(i): partial(serve, i) for i in range(3)})
    at = AtServer(transport, run=7, min_sites=3)
    given = {"data": others, "learner": Scored, "participation": "all", **options}
    try:
        return trained([*methods(), at], 2, [], **given)
    finally:
        transport.close()


def test_sites_with_data_of_their_own_test_on_what_they_hold_out(tmp_path: Path) -> None:
    methods = measured_by(lambda: [ProximalPersonalModel()])
    options = {"data": all_data, "learner": Scored, "participation": "all"}
    simulated = trained(methods(), 2, [], **options)
    over = over_own(methods, tmp_path, lambda client: client != 1)
    found = evaluation_of(over)
    assert found.samples == {0: 6, 1: 0, 2: 6}
    assert found.table == evaluation_of(simulated).table
    assert {*found.table["quality"]} == {0, 2}
    # Names of the server's clients are nobody's.
    assert found.csv().splitlines()[0] == "client,samples,loss,quality,share"


def test_a_run_without_test_samples_at_any_site_is_refused_before_round_0(tmp_path: Path) -> None:
    methods = measured_by(lambda: [])
    with pytest.raises(UserError, match="no client has test samples of its own at its site"):
        over_own(methods, tmp_path, lambda client: False)


def test_which_way_is_better_is_asked_before_round_0(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which way is better in quality is not known"):
        over_own(lambda: [PerClientEvaluation()], tmp_path, lambda client: True)
    assert not any("staged" in path.read_text("utf-8") for path in tmp_path.rglob("site.json"))
