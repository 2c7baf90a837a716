"""Decentralised runs agree with NumPy's to 1e-9: w, clients' models and states, what is counted.
After each round, on minibatches of clients of unequal sizes and steps. One matrix of methods,
graphs, who takes part, local steps, rates, momentum and what stands beside."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import InMemoryDataModule
from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.evaluation import personal_models
from fl_lightning.topologies import (
    ErdosRenyi,
    ExponentialGraph,
    FromEdges,
    FromFile,
    FullyConnected,
    Grid,
    OnePeerExponential,
    RandomRegular,
    Ring,
    Star,
    Topology,
    Torus,
)
from tests.helpers.compositions import MADE, Function, part
from tests.helpers.federation import BATCH, SIZES, Network, Run, fit, samples
from tests.oracles import decentralised as oracle
from tests.oracles.decentralised import Config, Graph, Round, as_given
from tests.oracles.events import draws
from tests.oracles.problems import Schedule, TwoLayer

SEED = 1  # of the runs
SIX, NINE = SIZES[:6], [*SIZES, 6]
FIRST = {"keeps": part("net.0.*")}
HEAD = {"keeps": part("net.2.weight", "net.2.bias")}
KEEPS: dict[int, Any] = {16: "net.0.*", 15: "last"}  # by the number of coordinates kept

# ---------------------------------------------------------------------------------- the graphs


class Chain(Topology):
    def edges(self, m: int, t: int, seed: int) -> Any:
        return np.stack([np.arange(m - 1), np.arange(1, m)], axis=1)


class Turning(Topology):
    """A user's own: each sends to the one that is t + 1 further."""

    directed = True
    varies = True

    def edges(self, m: int, t: int, seed: int) -> Any:
        here = np.arange(m)
        return np.stack([here, (here + 1 + t % (m - 1)) % m], axis=1)


def turning(m: int, t: int) -> oracle.Edges:
    return sorted((i, (i + 1 + t % (m - 1)) % m) for i in range(m))


# Weights between 0.05 and 0.3 on a graph that has no symmetry, its edges out of order.
ODD = [(3, 1), (0, 5), (4, 2), (1, 0), (2, 5), (6, 7), (7, 0), (3, 4), (6, 2)]
ODD_WEIGHTS = [0.3, 0.1, 0.25, 0.2, 0.15, 0.3, 0.05, 0.12, 0.22]
# Three permutations of eight clients, each with one weight: doubly stochastic, not symmetric.
CYCLES = [[(0, 3), (3, 5), (5, 0)], [(1, 4), (4, 7), (7, 2), (2, 1)], [(0, 6), (6, 1), (1, 0)]]
TURNS = [(edge, 0.1 + 0.2 * k) for k, cycle in enumerate(CYCLES) for edge in cycle]
WEIGHTED = ([edge for edge, _ in TURNS], [0.5 * weight for _, weight in TURNS])
# A directed graph of which no row sums to 1: for push-sum alone.
ONE_WAY = [(0, 1), (1, 2), (2, 0), (2, 3), (4, 3), (3, 4), (5, 6), (6, 7), (7, 5), (3, 5), (6, 0)]
ONE_WAY_WEIGHTS = [0.9, 0.5, 0.3, 0.3, 0.6, 0.2, 0.7, 0.4, 0.5, 0.35, 0.25]
APART = [(0, 1), (1, 2), (3, 4), (5, 6)]  # not connected, and client 7 has nobody


def drawn(topology: Topology) -> Graph:
    """A random graph: the rule does not say which, so its edges are taken as they are."""
    return Graph(lambda m, t: [(int(i), int(j)) for i, j in topology.edges(m, t, SEED)])


GRAPHS: dict[str, tuple[Callable[[], Topology], Graph]] = {
    "ring": (Ring, Graph(oracle.ring)),
    "grid": (Grid, Graph(oracle.grid())),
    "torus": (Torus, Graph(oracle.torus())),
    "full": (FullyConnected, Graph(oracle.fully_connected)),
    "star": (Star, Graph(oracle.star())),
    "star at 3": (lambda: Star(3), Graph(oracle.star(3))),
    "exponential": (ExponentialGraph, Graph(oracle.exponential, directed=True)),
    "one peer": (OnePeerExponential, Graph(oracle.one_peer, directed=True)),
    "regular": (lambda: RandomRegular(3), drawn(RandomRegular(3))),
    "new regular": (lambda: RandomRegular(4, True), drawn(RandomRegular(4, True))),
    "random": (lambda: ErdosRenyi(0.4), drawn(ErdosRenyi(0.4))),
    "new random": (lambda: ErdosRenyi(0.3, True), drawn(ErdosRenyi(0.3, True))),
    "chain": (Chain, Graph(lambda m, t: [(i, i + 1) for i in range(m - 1)])),
    "turning": (Turning, Graph(turning, directed=True)),
    "odd": (lambda: FromEdges(ODD), as_given(ODD)),
    "weighted": (lambda: FromEdges(ODD, ODD_WEIGHTS), as_given(ODD, ODD_WEIGHTS)),
    "cycles": (lambda: FromEdges(*WEIGHTED, directed=True), as_given(*WEIGHTED, directed=True)),
    "one way": (lambda: FromEdges(ONE_WAY, directed=True), as_given(ONE_WAY, directed=True)),
    "one way, weighted": (
        lambda: FromEdges(ONE_WAY, ONE_WAY_WEIGHTS, directed=True),
        as_given(ONE_WAY, ONE_WAY_WEIGHTS, directed=True),
    ),
    "apart": (lambda: FromEdges(APART), as_given(APART)),
}


# ----------------------------------------------------------------------------------- the cases


class Spoils(FederatedCallback):
    def __init__(self, at: set[tuple[int, int]]) -> None:
        super().__init__()
        self._at = at

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        lost = torch.tensor([(clients.round, i) in self._at for i in clients.client_ids])
        return torch.where(lost[:, None], torch.nan, gradient)


@dataclass
class Case:
    """A run of ours and NumPy's. ``given``: fields of the oracle's Config; ``how``: arguments."""

    graph: str
    given: dict[str, Any] = field(default_factory=dict)
    how: dict[str, Any] = field(default_factory=dict)
    sizes: Sequence[int] = tuple(SIZES)
    rounds: int = 4
    dropout: float = 0.0
    min_work: float = 1.0
    spoilt: frozenset[tuple[int, int]] = frozenset()  # (round, client)
    first: bool = False  # Gossip before what stands beside it, or after


def config(case: Case) -> Config:
    return Config(GRAPHS[case.graph][1], **case.given)


def ours_of(case: Case, topology: Topology | None, no_gossip: bool) -> list[Any]:
    """The callbacks that a case stands for; ``no_gossip``: those of a run with a server."""
    cfg, topology = config(case), topology or GRAPHS[case.graph][0]()
    keeps = () if cfg.keeps is None else KEEPS[int(cfg.keeps.sum())]
    mixing: list[Any] = []
    if no_gossip:
        pass
    elif cfg.push_sum:
        mixing.append(c.PushSum(topology, keeps))
    else:
        mixing.append(c.Gossip(topology, cfg.weights, cfg.gossip_steps, keeps))
    beside: list[Any] = [c.CommunicationLogger(), c.ConsensusDistanceLogger()]
    if cfg.tracking:
        beside.append(c.GradientTracking())
    if cfg.beta is not None:
        beside.append(c.RelaxedInitialization(coefficient(cfg.beta)))
    if cfg.sam is not None:
        beside.append(c.SharpnessAwareMinimization(coefficient(cfg.sam)))
    if cfg.mu is not None:
        beside.append(c.ProximalTerm(coefficient(cfg.mu), anchor="start"))
    if cfg.within is not None:
        beside.append(c.DecayWithinRound(cfg.within))
    if cfg.calibration is not None:
        beside.append(c.LogitCalibration(*cfg.calibration))
    beside += [MADE[name](value) for name, value in cfg.modern.items()]
    if case.dropout or case.min_work < 1:
        beside.append(c.SystemHeterogeneity(case.dropout, case.min_work))
    if case.spoilt:
        beside.append(Spoils(set(case.spoilt)))
    return [*mixing, *beside] if case.first else [*beside[::-1], *mixing]


def coefficient(value: Any) -> Any:
    return Function(value) if callable(value) else value


def both(
    case: Case, topology: Topology | None = None, no_gossip: bool = False
) -> tuple[Run, list[Round]]:
    cfg = config(case)
    x, y, clients = samples(case.sizes)
    how: dict[str, Any] = {"participation": "all", "local_epochs": 1.5, "buffers": "own"}
    how |= {"server_optimizer": None} | case.how
    if case.spoilt:
        how["on_nonfinite"] = "skip"
    ours = fit(
        Network(),
        InMemoryDataModule((x, y), clients=clients, batch_size=BATCH),
        ours_of(case, topology, no_gossip),
        case.rounds,
        client_optimizer=lambda p: torch.optim.SGD(
            p, cfg.lr, weight_decay=cfg.weight_decay, momentum=cfg.momentum
        ),
        lr_decay=coefficient(cfg.lr_decay),
        clip_norm=cfg.clip_norm,
        keep_optimizer_state=cfg.keep_momentum,
        **how,
    )
    finished = [
        {i: batches for i, batches in table.items() if not lost(case, t, i)}
        for t, table in enumerate(ours.schedule.rounds)
    ]
    schedule = Schedule(finished, ours.schedule.sizes, ours.schedule.data)
    return ours, oracle.run(TwoLayer(3, 4, 3), cfg, case.rounds, ours.start, schedule)


def lost(case: Case, t: int, i: int) -> bool:
    drops = bool(draws(SEED, "dropout", t, i).random() < case.dropout)
    return drops or (t, i) in case.spoilt


# Our name of a state: the oracle's.
STATES = {
    "Gossip.x": "x",
    "PushSum.x": "x",
    "PushSum.weight": "weight",
    "GradientTracking.c_i": "c_i",
    "RelaxedInitialization.last": "last",
    "optimizer.0.momentum_buffer": "momentum",
}


def states_of(cfg: Config) -> set[str]:
    expected = {"PushSum.x", "PushSum.weight"} if cfg.push_sum else {"Gossip.x"}
    expected |= {"GradientTracking.c_i"} if cfg.tracking else set()
    expected |= {"RelaxedInitialization.last"} if cfg.beta is not None else set()
    return expected | ({"optimizer.0.momentum_buffer"} if cfg.keep_momentum else set())


def agree(ours: Run, theirs: list[Round], cfg: Config, relative: float = 1e-7) -> None:
    """Every round, every quantity that both have; ``relative``: of what Lightning logs, by default
    in float32."""
    record, m = ours.record, len(ours.schedule.sizes)
    written: set[int] = set()
    last: dict[str, float] = {}
    for t, expected in enumerate(theirs):
        written |= set(expected.finished)
        near(record.w[t], expected.w, f"w in round {t}")
        near(record.evaluated[t], expected.w, f"the evaluated model in round {t}")
        kept = {name for name in record.rows[t] if name in STATES}
        assert kept == (states_of(cfg) if written else set()), f"states in round {t}"
        for name in kept:
            rows, table = record.rows[t][name], expected.rows[STATES[name]]
            assert set(rows) == written, f"clients that have {name} in round {t}"
            for i, row in rows.items():
                near(row, table[i], f"{name} of {i} in round {t}")
        if not cfg.push_sum:
            near(expected.rows["x"].mean(axis=0), expected.w, "the mean of all models")
        near(expected.rows["c_i"].sum(axis=0), 0.0, "the sum of all c_i")
        near(expected.rows["weight"].sum(), m, "the sum of push-sum's weights")
        last |= expected.metrics  # without anybody the last logged values stay
        for name, number in last.items():
            logged_as = record.metrics[t][name]
            assert logged_as == pytest.approx(number, rel=relative, abs=1e-9), f"{name} in {t}"
        logged = {name for name in record.metrics[t] if name.startswith("gossip/")}
        assert logged == {name for name in last if name.startswith("gossip/")}
    models = personal_models.of_run(ours.module.run, ours.module.trainer)
    for i in range(m):
        near(models.of(i)[0].numpy(), theirs[-1].models[i], f"the model of client {i}")
        if i not in written:
            near(theirs[-1].models[i], ours.start, "w^0 of who never finished")


def near(ours: Any, theirs: Any, what: str) -> None:
    assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() < 1e-9, what


DECAY = {"lr_decay": 0.9}
HEAVY = {"momentum": 0.9, "lr": 0.1}
KEPT = {"momentum": 0.8, "lr": 0.1, "keep_momentum": True}
PUSH = {"push_sum": True}
TRACK = {"tracking": True}
SOME = {"participation": 3}
ONE = {"local_epochs": None, "local_steps": 1}
FIVE = {"local_epochs": None, "local_steps": 5}
THREADS = {"engine": "concurrent", "workers": 2}
STACKED = {"engine": "stacked"}
SAM, INIT, PULL = {"sam": 0.05}, {"beta": 0.5}, {"mu": 0.3}
CATA = {"beta": 0.9, "mu": 0.05}


ADAM: dict[str, Any] = {"modern": {"adam": {"epsilon": 1e-3}}, "lr": 0.05}
MUON: dict[str, Any] = {"modern": {"muon": {}}, "lr": 0.05}
FREE: dict[str, Any] = {"modern": {"meta": (0.1, "free", 1e-2)}}
CALIBRATED = {"calibration": (1.0, False)}


def silent(t: int) -> float:
    return 0.0 if t == 1 else 0.9**t


CASES = {
    # graphs, all clients
    "ring": Case("ring", DECAY),
    "ring of two": Case("ring", DECAY, sizes=SIX[1:3]),
    "one client": Case("ring", DECAY, sizes=[9]),
    "grid": Case("grid", DECAY, STACKED),
    "torus, double edges": Case("torus", DECAY, THREADS),
    "torus of nine, uniform": Case("torus", {"weights": "uniform"}, sizes=NINE),
    "full": Case("full", DECAY, STACKED),
    "star at 3": Case("star at 3", DECAY, THREADS),
    "exponential": Case("exponential", DECAY),
    "one peer": Case("one peer", DECAY, STACKED, rounds=6),
    "regular, uniform": Case("regular", {"weights": "uniform"}),
    "new regular": Case("new regular", DECAY, sizes=NINE),
    "random": Case("random", DECAY, THREADS),
    "new random, some": Case("new random", DECAY, SOME),
    "turning": Case("turning", DECAY),
    "odd": Case("odd", DECAY, STACKED),
    "weighted": Case("weighted", DECAY),
    "cycles": Case("cycles", DECAY),
    "apart": Case("apart", DECAY),
    # who takes part
    "ring, some": Case("ring", DECAY, SOME, rounds=6),
    "full, some": Case("full", DECAY, SOME | STACKED, rounds=6),
    "weighted, some": Case("weighted", DECAY, {"participation": 5} | THREADS, rounds=6),
    "torus, poisson": Case("torus", DECAY, {"sampling": "poisson", "participation": 0.2}, rounds=8),
    "ring, dropped, part of the work": Case("ring", DECAY, {}, dropout=0.3, min_work=0.4, rounds=6),
    "random, spoilt": Case(
        "random", DECAY, THREADS, spoilt=frozenset({(1, 2), (1, 3), (3, 0)}), first=True
    ),
    "full, all spoilt once": Case(
        "full", DECAY, STACKED, spoilt=frozenset((1, i) for i in range(8))
    ),
    "ring, all spoilt at first": Case(
        "ring", DECAY, rounds=3, spoilt=frozenset((0, i) for i in range(8))
    ),
    "sgp, all spoilt once": Case(
        "one peer", PUSH | DECAY, STACKED, spoilt=frozenset((1, i) for i in range(8)), rounds=5
    ),
    # steps, rates, momentum, clipping
    "dpsgd": Case("ring", DECAY, ONE),
    "dfedavgm": Case("torus", DECAY | HEAVY, FIVE),
    "clipped, stronger weight decay": Case("grid", {"clip_norm": 0.4, "weight_decay": 0.1}),
    "a silent round": Case("ring", {"lr_decay": silent}),
    "slower within a round": Case("star", {"within": 0.2}, SOME, first=True),
    # gossip_steps, keeps
    "four steps": Case("ring", DECAY | {"gossip_steps": 4}),
    "two steps, some, new": Case("new random", {"gossip_steps": 2}, {"participation": 5}, rounds=6),
    "three steps, cycles": Case("cycles", {"gossip_steps": 3}, STACKED),
    "keeps the first layer": Case("ring", DECAY | FIRST, SOME, rounds=6),
    "keeps the head, two steps": Case("full", DECAY | HEAD | {"gossip_steps": 2}, STACKED),
    # beside others
    "dfedsam_mgs": Case("grid", SAM | HEAVY | {"gossip_steps": 4}, STACKED),
    "oledfl, some, full": Case("full", INIT | DECAY, SOME, rounds=8),
    "oledfl, dropped, keeps": Case("torus", INIT | HEAD, {}, dropout=0.3, rounds=6, first=True),
    "dfedcata, some, momentum": Case("ring", CATA | KEPT, {"participation": 4}, rounds=6),
    "pulled, clipped, SAM": Case("star", PULL | SAM | {"clip_norm": 0.5}, STACKED, first=True),
    "all beside": Case("odd", CATA | SAM | DECAY | HEAVY, SOME | THREADS, rounds=6),
    # gradient tracking
    "kgt": Case("ring", TRACK | DECAY),
    "dsgt": Case("exponential", TRACK, ONE | THREADS, rounds=6),
    "kgt, some": Case("ring", TRACK | DECAY, {"participation": 4}, rounds=8),
    "kgt, dropped, clipped": Case(
        "random", TRACK | {"clip_norm": 0.6}, dropout=0.3, min_work=0.4, rounds=6
    ),
    "kgt, spoilt": Case("star", TRACK, {}, spoilt=frozenset({(0, 0), (2, 5)}), rounds=5),
    "kgt, a silent round": Case("ring", TRACK | {"lr_decay": silent}, THREADS),
    "kgt, slower within": Case("grid", TRACK | {"within": 0.3}, SOME, rounds=6),
    "kgt, keeps, three steps": Case("ring", TRACK | HEAD | {"gossip_steps": 3}, STACKED),
    "kgt + everything": Case(
        "weighted", TRACK | CATA | SAM | KEPT | DECAY, {"participation": 5}, rounds=6
    ),
    "kgt + RI + SAM": Case("full", TRACK | INIT | SAM | FIRST, SOME | STACKED, rounds=6),
    # other losses and optimizers
    "AdamW, kgt": Case("torus", ADAM | TRACK, STACKED, first=True),
    "AdamW, sgp, SAM": Case("one way", ADAM | PUSH | SAM, {"participation": 6} | THREADS),
    "Muon, kgt, pulled": Case("ring", MUON | TRACK | PULL, SOME | THREADS, rounds=6, first=True),
    "Per-FedAvg, Hessian-free, kgt": Case("star", FREE | TRACK | INIT, SOME, rounds=6),
    "FedLC, kgt + RI": Case("full", CALIBRATED | TRACK | INIT, SOME, rounds=6),
    "FedLC, sgp": Case("one way, weighted", CALIBRATED | PUSH | DECAY, SOME, first=True),
    # push-sum
    "sgp": Case("one peer", PUSH | DECAY, rounds=6),
    "sgp of one": Case("one peer", PUSH, sizes=[5]),
    "sgp, star": Case("star", PUSH | DECAY, STACKED),
    "sgp, one way": Case("one way", PUSH | DECAY, rounds=6),
    "sgp, one way, weighted, some": Case("one way, weighted", PUSH, {"participation": 5}, rounds=8),
    "sgp, turning, dropped": Case(
        "turning", PUSH, {}, dropout=0.4, min_work=0.5, rounds=8, first=True
    ),
    "sgp, chain, spoilt": Case("chain", PUSH, spoilt=frozenset({(0, 3), (1, 4), (2, 3)}), rounds=5),
    "sgp, random, momentum": Case("new random", PUSH | HEAVY, {"participation": 5}, rounds=6),
    "sgp, keeps the first layer": Case("one way", PUSH | FIRST | DECAY, THREADS, rounds=6),
    "sgp + everything": Case(
        "one way, weighted", PUSH | CATA | SAM | KEPT | DECAY, {"participation": 6}, rounds=8
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_agrees_with_the_oracle(name: str) -> None:
    case = CASES[name]
    agree(*both(case), config(case))


@pytest.fixture
def in_double() -> Iterator[None]:
    """Lightning keeps what is logged in torch's default type."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.mark.parametrize("name", ["full, some", "kgt + everything", "sgp + everything"])
def test_what_is_logged_agrees_in_double_precision(name: str, in_double: None) -> None:
    case = CASES[name]
    agree(*both(case), config(case), relative=1e-9)


# ----------------------------------------------------------------------------- the graphs alone


def listed(topology: Topology, m: int, t: int = 0, seed: int = SEED) -> oracle.Edges:
    """A topology's edges, which have to be as the rule says: int64, sorted, each once, no loops."""
    edges = np.asarray(topology.edges(m, t, seed))
    assert edges.dtype == np.int64 and edges.shape == (len(edges), 2), (topology, m)
    found = [(int(i), int(j)) for i, j in edges]
    assert found == sorted(set(found)), (topology, m)
    assert all(0 <= i < m and 0 <= j < m and i != j for i, j in found)
    assert topology.directed or all(i < j for i, j in found)
    return found


@pytest.mark.parametrize("name", ["ring", "full", "star", "star at 3", "exponential", "one peer"])
def test_the_edges_are_those_of_the_definition(name: str) -> None:
    make, graph = GRAPHS[name]
    topology = make()
    assert topology.directed == graph.directed and topology.varies == (name == "one peer")
    for m in range(4 if name == "star at 3" else 1, 34):
        for t in range(8):
            assert listed(topology, m, t) == graph.edges(m, t), (m, t)


@pytest.mark.parametrize(("kind", "by_hand"), [(Grid, oracle.grid), (Torus, oracle.torus)])
def test_the_edges_of_rectangles(kind: Any, by_hand: Any) -> None:
    for m in range(4, 65):
        whole = [r for r in range(2, m // 2 + 1) if m % r == 0]
        for rows in whole:
            assert listed(kind(rows), m) == by_hand(rows)(m, 0), (m, rows)
        if whole:
            assert listed(kind(), m) == by_hand()(m, 0), m


def test_random_graphs_are_what_they_are_called() -> None:
    for m, degree in ((8, 3), (9, 4), (30, 5), (6, 5)):
        fixed, new = RandomRegular(degree), RandomRegular(degree, varying=True)
        assert not fixed.varies and new.varies
        for t in range(4):
            for topology in (fixed, new):
                ends = np.bincount(np.ravel(listed(topology, m, t)), minlength=m)
                assert (ends == degree).all()
            assert listed(fixed, m, t) == listed(fixed, m)
            assert listed(new, m, t) == listed(RandomRegular(degree, varying=True), m, t)
    assert len({str(listed(RandomRegular(4, True), 30, t)) for t in range(5)}) == 5
    assert len({str(listed(RandomRegular(4), 30, 0, seed)) for seed in range(5)}) == 5
    assert listed(ErdosRenyi(1.0), 7) == oracle.fully_connected(7)
    number = len(listed(ErdosRenyi(0.3), 200))
    assert abs(number - 0.3 * 19_900) < 5 * (0.3 * 0.7 * 19_900) ** 0.5
    varying = [listed(ErdosRenyi(0.3, True), 20, t) for t in range(5)]
    assert len({str(edges) for edges in varying}) == 5
    assert varying == [listed(ErdosRenyi(0.3, True), 20, t) for t in range(5)]


@pytest.mark.parametrize("directed", [False, True])
def test_a_file_is_a_list_of_edges(tmp_path: Path, directed: bool) -> None:
    edges, weights = WEIGHTED if directed else (ODD, ODD_WEIGHTS)
    lines = [f"{i},{j},{weight!r}" for (i, j), weight in zip(edges, weights, strict=True)]
    file = tmp_path / "graph.csv"
    file.write_text("\n".join(["sender,receiver,weight", *lines]) + "\n")
    case = Case("cycles" if directed else "weighted", DECAY, rounds=3)
    of_edges, theirs = both(case)
    agree(of_edges, theirs, config(case))
    read = both(case, topology=FromFile(str(file), directed))[0]
    assert [w.tobytes() for w in read.record.w] == [w.tobytes() for w in of_edges.record.w]
    assert listed(FromFile(str(file), directed), 8) == listed(GRAPHS[case.graph][0](), 8)


# --------------------------------------------------------------- equalities that the rule states


def test_the_gap_is_logged_up_to_512_clients() -> None:
    for m in (512, 513):
        case = Case("ring", DECAY, {"participation": 40}, sizes=[1 + i % 3 for i in range(m)])
        case.rounds = 2
        ours, theirs = both(case)
        for expected in theirs if m > 512 else ():
            del expected.metrics["gossip/spectral_gap"]
        agree(ours, theirs, config(case))
