"""Methods for adapters over sites in threads leave the bits of the simulation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import Base, FederatedCallback, FederatedModule, InMemoryDataModule
from fl_lightning import callbacks as c
from fl_lightning.deploy.sent_model import ANY, BaseAtSite
from fl_lightning.deploy.transport import InMemoryTransport, Message
from tests.deploy.test_in_memory import (
    KilledOnce,
    Restarted,
    check_same,
    over_sites,
    sent_bytes,
    trained,
)
from tests.helpers.low_rank import Adapted, LowRank

SIZES = [5, 9, 4, 12, 7, 10, 3]
SHARES = {"north": [0, 3], "south": [1, 2, 6], "west": [4, 5]}
RANKS = [1, 2, 3, 2, 1, 3, 2]
ROUNDS = 4


def data() -> InMemoryDataModule:
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(sum(SIZES), 3)))
    y = torch.from_numpy(rng.integers(0, 4, sum(SIZES)))
    ends = np.cumsum(SIZES)
    clients = [np.arange(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    return InMemoryDataModule((x, y), val=(x[:9], y[:9]), clients=clients, batch_size=4)


OPTIONS: dict[str, Any] = {"participation": 3, "learner": Adapted, "data": data}
METHODS: dict[str, Callable[[], list[Any]]] = {
    "fedit": lambda: [],
    "ffa": lambda: [c.FactorSchedule(["B"])],
    "rolora": lambda: [c.FactorSchedule(["B", "A"])],
    "fedsa": lambda: [c.PartialAveraging({"*lora_B*": "never"})],
    "flexlora": lambda: [c.TruncatedProduct(RANKS)],
    "hetlora": lambda: [c.PaddedRanks(RANKS, gamma=0.5, penalty=0.1)],
    "flora": lambda: [c.StackedAdapters()],
    "flora, ranks and draws": lambda: [c.StackedAdapters(RANKS, draw="client")],
    "fedex": lambda: [c.ResidualMerge()],
    "fair": lambda: [c.CorrectedFactor()],
    "ffa, scaffold": lambda: [c.FactorSchedule(["B"]), c.ControlVariates()],
    "rolora, top-k": lambda: [c.FactorSchedule(["B", "A"]), c.TopKCompression(0.3)],
    "ffa, random k": lambda: [c.FactorSchedule(["B"]), c.RandomK(0.3)],
}


def both(
    methods: Callable[[], list[Any]], folder: Path, **options: Any
) -> tuple[FederatedModule, FederatedModule]:
    """The simulation and the run over sites, which have left the same bits and counts."""
    settings = {**OPTIONS, **options}
    rounds = settings.pop("rounds", ROUNDS)
    carried = {k: settings.pop(k) for k in ("carrier", "wrap", "shares") if k in settings}

    def counted() -> list[Any]:
        return [*methods(), c.CommunicationLogger()]

    ours: list[dict[str, float]] = []
    simulated = trained(counted(), rounds, ours, **settings)
    carried = {"shares": SHARES, "timeout": 60, **carried}
    over, theirs, _ = over_sites(counted, folder, rounds=rounds, **carried, **settings)
    fedsa = any(isinstance(method, c.PartialAveraging) for method in methods())
    check_same(simulated, over, folder, whole=not fedsa)
    for name, value in simulated.base.items():
        assert torch.equal(value, over.base[name]), name
    for one, other in zip(ours, theirs, strict=True):
        # B stays at the sites under FedSA-LoRA, and the server's model has none.
        away = "val/" if fedsa else "nothing"
        assert {k: v for k, v in one.items() if not k.startswith(away)} == {
            k: v for k, v in other.items() if not k.startswith(away)
        }
    return simulated, over


@pytest.mark.parametrize("name", METHODS)
def test_sites_leave_the_bits_of_the_simulation(name: str, tmp_path: Path) -> None:
    both(METHODS[name], tmp_path)


class Drawn(FederatedCallback):
    """Half of the coordinates, others for each client and round."""

    averaged_over = "all"

    def trained(self, clients: Any) -> torch.Tensor:
        draws = [np.random.default_rng([clients.round, i]) for i in clients.client_ids]
        rows = [draw.random(clients.layout.size) < 0.5 for draw in draws]
        return torch.from_numpy(np.stack(rows))


class Noise(FederatedCallback):
    """Adds a product of transposed views, and a dense tensor, to one weight."""

    base = Base("first.weight")

    def on_server_update(self, server: Any) -> None:
        drawn = torch.from_numpy(server.generator("noise").standard_normal((2, 8)))
        self.base.add("first.weight", drawn[:, :5].T, drawn[:, 5:])
        if server.round == 1:
            self.base.add("first.weight", torch.full((5, 3), 1e-3, dtype=torch.float64))


class InFloat64(LowRank):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.linear(x, self.weight.double(), self.bias)
        return out + self.scaling * (x @ self.lora_A.T) @ self.lora_B.T


class Half(Adapted):
    """Its frozen weight has fewer bits than the server keeps of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.data = self.first.weight.data.bfloat16()
        self.first.__class__ = InFloat64


def test_masks_and_bases_of_a_users_own(tmp_path: Path) -> None:
    simulated, over = both(lambda: [Drawn(), Noise()], tmp_path, learner=Half)
    assert over.base["first.weight"].dtype == torch.float32
    assert over.learner.first.weight.dtype == torch.bfloat16
    assert torch.equal(over.learner.first.weight, simulated.learner.first.weight)


class Larger(pl.LightningModule):
    """Its middle weight is larger than some rounds' additions, which then travel as factors."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first = LowRank(3, 40, 2, 0.7)
            self.middle = LowRank(40, 40, 1, 0.7)
            self.head = LowRank(40, 4, 2, 0.5)
        self.to(torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(torch.tanh(self.first(x)))))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x), y)


class Views(FederatedCallback):
    """Adds a product of transposed views."""

    base = Base("middle.weight")

    def on_server_update(self, server: Any) -> None:
        drawn = torch.from_numpy(server.generator("noise").standard_normal((80, 3)))
        self.base.add("middle.weight", drawn[:40], drawn[40:].T)


@pytest.mark.parametrize(
    "method", [c.StackedAdapters, c.ResidualMerge, Views], ids=lambda method: method.__name__
)
def test_factors_leave_the_bits_of_the_simulation(method: Any, tmp_path: Path) -> None:
    """Also where a site lacks those of several rounds."""
    shares = {str(i): [i] for i in range(len(SIZES))}
    simulated, _ = both(lambda: [method()], tmp_path, learner=Larger, shares=shares, rounds=5)
    before = Larger().middle.weight
    assert not torch.equal(simulated.base["middle.weight"], before)


NAMES = ["rolora", "flora", "fedex"]


@pytest.mark.parametrize("name", NAMES)
def test_sites_that_forget_everything_are_sent_what_they_lack(name: str, tmp_path: Path) -> None:
    """Each message starts its site's process anew, with the weights of its config."""
    both(METHODS[name], tmp_path, carrier=Restarted, learner=Larger)


@pytest.mark.parametrize("name", NAMES)
def test_a_site_that_is_killed_before_it_answers(name: str, tmp_path: Path) -> None:
    wrap = KilledOnce(at=1)
    both(METHODS[name], tmp_path, wrap=wrap, participation="all", learner=Larger)
    assert wrap.killed == ["south"]


def test_a_site_asks_for_the_base_where_additions_build_on_another_one() -> None:
    """Its process may have begun anew without the server's knowledge."""
    weights: Any = None  # which are not read
    site = BaseAtSite(weights)
    lacks = {
        mark: site.lacks(Message("train", "south", {"base_from": mark})) for mark in (ANY, 0, 7)
    }
    assert lacks == {ANY: False, 0: False, 7: True}


def test_a_second_server_does_not_take_the_sites_for_new(tmp_path: Path) -> None:
    """The sites' processes outlive the server, and know more of the base than its checkpoint."""
    options = {**OPTIONS, "participation": "all", "learner": Larger}
    path = tmp_path / "last.ckpt"
    methods = METHODS["fedex"]
    simulated = trained(methods(), 4, [], **options)
    left: list[InMemoryTransport] = []

    def carrier(serving: Any) -> InMemoryTransport:
        left.append(left[0] if left else InMemoryTransport(serving))
        return left[0]

    def server(rounds: int, **more: Any) -> FederatedModule:
        given = {"carrier": carrier, "shares": SHARES, "timeout": 60, "close": False, **options}
        return over_sites(methods, tmp_path / "sites", rounds=rounds, **given, **more)[0]

    server(2, save=path)
    server(3, resume=path)
    over = server(4, resume=path)
    left[0].close()
    assert torch.equal(simulated.global_vector, over.global_vector)
    for name, value in simulated.base.items():
        assert torch.equal(value, over.base[name]), name


class Wide(pl.LightningModule):
    """Factors of many numbers, so that messages' small arrays do not count."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first = LowRank(3, 40_000, 2, 0.5)
            self.head = LowRank(40_000, 4, 2, 0.5)
        self.first.bias.requires_grad_(False)
        self.to(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        logits = self.head(torch.tanh(self.first(x)))
        return torch.nn.functional.cross_entropy(logits / 100, y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedit", "rolora", "flora", "fedex"])
def test_messages_take_what_the_logger_counts(name: str, tmp_path: Path) -> None:
    def counted() -> list[Any]:
        return [*METHODS[name](), c.CommunicationLogger()]

    shares = {str(i): [i] for i in range(len(SIZES))}
    options = {**OPTIONS, "learner": Wide, "shares": shares}
    _, metrics, carried = over_sites(counted, tmp_path, rounds=4, **options)
    for way, sent in sent_bytes(carried).items():
        counts = metrics[-1][f"communication/{way}_bytes"]
        if (name, way) == ("rolora", "down"):
            # B is 0 at first, and zeros do not travel.
            assert 0.8 * counts < sent < 1.02 * counts
        else:
            assert sent == pytest.approx(counts, rel=0.02), way
