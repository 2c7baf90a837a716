"""Rounds without a server: what clients get from their neighbours, who may be away, what it costs,
and what cannot run beside it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from fl_lightning import FederatedModule, UserError
from fl_lightning import callbacks as packaged
from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import (
    CommunicationLogger,
    ConsensusDistanceLogger,
    ControlVariates,
    FactorSchedule,
    Gossip,
    GradientTracking,
    PartialAveraging,
    ProximalTerm,
    PushSum,
    RelaxedInitialization,
    SharpnessAwareMinimization,
    TopKCompression,
)
from fl_lightning.datamodules import FromTable
from fl_lightning.lab.contracts.federation import fit
from fl_lightning.models import Classifier
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.systems import SystemHeterogeneity
from fl_lightning.testing import tiny_run
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
    links_of,
)
from tests.helpers.learners import trainer

M = 6  # clients of the tiny federation
OWN: dict[str, Any] = {"buffers": "own", "engine": "sequential"}


class Trained(FederatedCallback):
    """Keeps x_{i,K} of the latest round in a list of its own; of the sequential engine only."""

    role = "measurement"

    def __init__(self, kept: dict[int, dict[int, torch.Tensor]]) -> None:
        super().__init__()
        self.kept = kept

    def on_local_end(self, clients: Any) -> None:
        for i, x in zip(clients.client_ids, clients.x, strict=True):
            self.kept.setdefault(clients.round, {})[i] = x.clone()


def rows(run: Any, key: str, first: Any) -> np.ndarray:
    """Every client's row of a state; ``first`` for those that never wrote one."""
    found = [run.client_rows.read(key, i) for i in range(M)]
    return np.stack([np.asarray(first if row is None else row) for row in found])


def matrix(topology: Topology, t: int, rule: str) -> np.ndarray:
    """V by the definitions, pair by pair, from the edges alone."""
    a = np.zeros((M, M), dtype=bool)  # [receiver, sender]
    for i, j in topology.edges(M, t, seed=1).tolist():
        a[j, i] = True
        a[i, j] |= not topology.directed
    gets, sends = a.sum(1), a.sum(0)
    d = np.maximum(gets, sends)
    v = np.zeros((M, M))
    for i in range(M):
        for j in range(M):
            if a[i, j]:
                v[i, j] = {
                    "metropolis": 1 / (1 + max(d[i], d[j])),
                    "uniform": 1 / (1 + gets[i]),
                    "push": 1 / (1 + sends[j]),
                }[rule]
    return v + np.diag(1 - v.sum(0))


def with_away(v: np.ndarray, there: list[int]) -> np.ndarray:
    """V of a round with these clients: the weight of a message that is not sent stays."""
    away = np.ones(M, dtype=bool)
    away[there] = False
    v = v.copy()
    np.fill_diagonal(v, 0)
    v[away] = 0
    v[:, away] = 0
    return v + np.diag(1 - v.sum(0))


GRAPHS = [Ring(), Grid(), Torus(), FullyConnected(), Star(hub=2), RandomRegular(3)]
GRAPHS += [ErdosRenyi(0.5), RandomRegular(2, varying=True), FromEdges([[0, 1], [4, 2], [1, 2]])]


@pytest.mark.parametrize("participation", ["all", 4])
@pytest.mark.parametrize("topology", GRAPHS, ids=str)
def test_gossip_takes_the_weighted_mean_of_its_neighbours(topology, participation):
    for rounds in (1, 2, 3):
        trained: dict[int, dict[int, torch.Tensor]] = {}
        run = tiny_run(
            Gossip(topology, gossip_steps=2),
            Trained(trained),
            rounds=rounds,
            participation=participation,
            **OWN,
        )
        first = run.run.state.initial_vector
        x = rows(run, "Gossip.x", first)
        t = rounds - 1
        there = sorted(trained[t])
        assert len(there) == (M if participation == "all" else 4)
        v = with_away(matrix(topology, t, "metropolis"), there)
        z = np.stack([np.asarray(trained[t].get(i, torch.zeros_like(first))) for i in range(M)])
        expected = (v @ v @ z)[there]
        np.testing.assert_allclose(x[there], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(x.mean(0), run.global_vector.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("participation", ["all", 4])
@pytest.mark.parametrize("topology", [OnePeerExponential(), ExponentialGraph(), Star()], ids=str)
def test_push_sum_keeps_the_sum_of_numerators_and_of_weights(topology, participation):
    trained: dict[int, dict[int, torch.Tensor]] = {}
    run = tiny_run(
        PushSum(topology), Trained(trained), rounds=4, participation=participation, **OWN
    )
    first = np.asarray(run.run.state.initial_vector)
    x, omega = np.tile(first, (M, 1)), np.ones(M)
    for t in range(4):
        there = sorted(trained[t])
        h = x.copy()
        for i in there:
            h[i] = x[i] + (np.asarray(trained[t][i]) - x[i] / omega[i])
        v = with_away(matrix(topology, t, "push"), there)
        for i in set(range(M)) - set(there):
            v[i] = np.eye(M)[i]
        x, omega = v @ h, v @ omega
    np.testing.assert_allclose(rows(run, "PushSum.x", first), x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(rows(run, "PushSum.weight", 1.0), omega, rtol=0, atol=1e-14)
    np.testing.assert_allclose(x.mean(0), run.global_vector.detach(), rtol=0, atol=1e-12)
    y = x / omega[:, None]
    consensus = ((y - x.mean(0)) ** 2).sum(1).mean()
    logged = run.trainer.callback_metrics["gossip/consensus"]
    np.testing.assert_allclose(logged, consensus, rtol=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
@pytest.mark.parametrize("beside", [[], [RelaxedInitialization(0.3)]], ids=["fedavg", "fedinit"])
def test_fully_connected_it_is_the_central_method_bit_for_bit(engine, beside):
    options = {**OWN, "participation": "all", "engine": engine, "rounds": 3}
    # Clients take unequal numbers of steps.
    central = tiny_run(*beside, **options)
    for order in (1, -1):
        ours = tiny_run(*[Gossip(FullyConnected()), *beside][::order], **options)
        assert ours.global_vector.equal(central.global_vector)
        assert all(
            ours.client_rows.read("Gossip.x", i).equal(central.global_vector) for i in range(M)
        )


@pytest.mark.parametrize("steps", [1, 3])
def test_the_trackers_add_up_to_0(steps):
    run = tiny_run(
        Gossip(Ring()), GradientTracking(), rounds=4, participation=4, local_steps=steps, **OWN
    )
    c = rows(run, "GradientTracking.c_i", np.zeros(len(run.global_vector)))
    assert np.abs(c).max() > 1e-3
    np.testing.assert_allclose(c.sum(0), 0, atol=1e-14)


def test_what_is_kept_is_not_exchanged():
    trained: dict[int, dict[int, torch.Tensor]] = {}
    run = tiny_run(
        Gossip(Ring(), keeps="last"),
        GradientTracking(),
        Trained(trained),
        CommunicationLogger(),
        rounds=2,
        participation="all",
        **OWN,
    )
    kept = run.layout.mask(run.layout.named("last", "test"))
    x = torch.as_tensor(rows(run, "Gossip.x", None))
    z = torch.stack([trained[1][i] for i in range(M)])
    assert x[:, kept].equal(z[:, kept])
    assert not x[:, ~kept].equal(z[:, ~kept])
    c = torch.as_tensor(rows(run, "GradientTracking.c_i", None))
    assert bool((c[:, kept] == 0).all()) and bool((c[:, ~kept] != 0).any())
    shared = int((~kept).sum())
    metrics = run.trainer.callback_metrics
    assert metrics["gossip/messages"] == 2 * M
    # The model and the mean gradient, to two neighbours, in two rounds, in float64.
    assert metrics["communication/up_parameters"] == 2 * 2 * 2 * M * shared
    assert metrics["communication/up_bytes"] == 8 * 2 * 2 * 2 * M * shared
    assert metrics["communication/down_bytes"] == 0


def test_a_round_that_nobody_finishes_changes_nothing():
    away = SystemHeterogeneity(dropout=0.9)
    run = tiny_run(Gossip(Ring()), away, rounds=1, participation=1, **OWN)
    assert run.global_vector.equal(run.run.state.initial_vector)
    assert not any("gossip" in name for name in run.trainer.callback_metrics)


def test_logs_are_those_of_the_matrix():
    run = tiny_run(Gossip(Ring()), rounds=3, participation=4, **OWN)
    x = rows(run, "Gossip.x", run.run.state.initial_vector)
    metrics = run.trainer.callback_metrics
    w = np.asarray(run.global_vector.detach())
    np.testing.assert_allclose(metrics["gossip/consensus"], ((x - w) ** 2).sum(1).mean(), rtol=1e-6)
    singular = np.linalg.svd(matrix(Ring(), 0, "metropolis"), compute_uv=False)
    np.testing.assert_allclose(metrics["gossip/spectral_gap"], 1 - singular[1], rtol=1e-6)


def test_a_client_is_evaluated_at_its_own_model():
    run = tiny_run(Gossip(Ring()), rounds=1, participation=2, **OWN)
    own = [run.export(client=i) for i in range(M)]
    written = set(run.client_rows.store.clients("Gossip.x"))
    assert len(written) == 2
    for i, model in enumerate(own):
        vector = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        row = run.client_rows.read("Gossip.x", i)
        assert vector.equal(run.run.state.initial_vector if row is None else row)


def ids(cases: list[Any]) -> list[str]:
    """Names of cases, by the message that each expects."""
    return [re.sub(r"[^\w ]", "", case[-1])[-30:] for case in cases]


REFUSED = [
    ((ControlVariates(),), {}, "Gossip and ControlVariates cannot run together: without a server"),
    ((ProximalTerm(),), {}, "ProximalTerm uses clients.w"),
    ((PartialAveraging(),), {}, "Gossip and PartialAveraging cannot run together"),
    ((RelaxedInitialization(average="updates"),), {}, "both decide what clients send"),
    ((RelaxedInitialization(offset="mean"),), {}, "cannot run together: without a server"),
    ((), {"weighting": "samples"}, "weighting='samples' has no meaning without a server"),
    ((), {"buffers": "average"}, r"buffers of the clients' learners \(running_mean, batches\)"),
    (
        (),
        {"server_optimizer": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5)},
        "server_optimizer is SGD",
    ),
    ((), {"server_optimizer": lambda p: torch.optim.SGD(p, lr=0.5)}, "learning rate is 0.5"),
    ((), {"server_lr_decay": 0.9}, "learning rate is not constant"),
]


@pytest.mark.parametrize(("beside", "options", "text"), REFUSED, ids=ids(REFUSED))
def test_what_needs_a_server_is_refused(beside, options, text):
    with pytest.raises(UserError, match=text):
        tiny_run(Gossip(), *beside, **{**OWN, **options})


@pytest.mark.parametrize(
    ("options", "beside"),
    [
        ({"participation": 4}, ()),
        ({"participation": "all", "on_nonfinite": "skip"}, ()),
        # The mean number of participants is 5.7, which rounds to all 6.
        ({"participation": 0.95, "sampling": "bernoulli", "rounds": 1}, ()),
        ({"participation": "all"}, (SystemHeterogeneity(dropout=0.1),)),
    ],
    ids=["participation", "skip", "bernoulli", "dropout"],
)
def test_a_directed_graph_needs_everybody_or_push_sum(options, beside):
    with pytest.raises(UserError, match=r"is directed.*Use PushSum"):
        tiny_run(Gossip(ExponentialGraph()), *beside, **OWN, **options)
    tiny_run(PushSum(ExponentialGraph()), *beside, **OWN, **options)


class Nudge(FederatedCallback):
    """Moves w away from the clients' mean."""

    def on_server_update(self, server: Any) -> None:
        server.update *= 0.5


def test_a_method_that_moves_w_is_refused_in_round_0():
    with pytest.raises(UserError, match=r"Gossip and Nudge .*Nudge changes server\.update"):
        tiny_run(Gossip(), Nudge(), **OWN)


def test_gradient_tracking_needs_gossip():
    for beside in ((), (PushSum(),)):
        with pytest.raises(UserError, match="GradientTracking needs Gossip"):
            tiny_run(GradientTracking(), *beside, **OWN)


def test_what_composes_does():
    beside = [SharpnessAwareMinimization(0.1), RelaxedInitialization(0.9)]
    pull = ProximalTerm(0.05, anchor="start")
    run = tiny_run(
        Gossip(Torus()), *beside, pull, ConsensusDistanceLogger(), participation=4, **OWN
    )
    alone = tiny_run(Gossip(Torus()), *beside, participation=4, **OWN)
    assert not run.global_vector.equal(alone.global_vector)


def test_a_pull_to_the_start_is_one_to_w_if_clients_start_there():
    a, b = (tiny_run(ProximalTerm(0.5, anchor=anchor)).global_vector for anchor in ("w", "start"))
    assert a.equal(b)


# What a callback is to a run without a server: the rows of the page's table, by what is said.
COMPOSES = "runs beside it"
WHY = {
    "without a server no values|what clients send|its server reads": "needs a server",
    "each client has its own model|what a client uses itself": "makes clients' own models",
    "uses clients.w": "uses the server's model in clients' steps",
}
NEED: dict[str, tuple[Any, ...]] = {  # arguments
    "DifferentialPrivacy": (1.0, 1.0),
    "ErrorFeedback21": (TopKCompression(0.5),),
    "PrototypePull": (3, 4),
    "RandomK": (0.5,),
    "RecordPrivacy": (1.0, 1.0),
}
OF_TEXT = {"ExactMatch", "MultipleChoice"}  # measure language models


def beside(method: FederatedCallback, callback: FederatedCallback) -> str:
    """The row of a callback beside a method without a server, which has to name both."""
    needs: dict[str, Any] = {}
    for note in callback.notes:
        needs |= getattr(note, "settings", {})
    try:
        tiny_run(method, callback, rounds=2, **{**needs, **OWN, "participation": "all"})
    except UserError as error:
        assert all(type(each).__name__ in str(error) for each in (method, callback)), error
        (row,) = [row for pattern, row in WHY.items() if re.search(pattern, str(error))]
        return row
    return COMPOSES


@pytest.mark.parametrize("method", [Gossip, pytest.param(PushSum, marks=pytest.mark.slow)])
def test_the_page_says_of_each_packaged_callback_whether_it_composes_and_why_not(method):
    page = (Path(__file__).parents[2] / "docs/decentralised.md").read_text("utf-8")
    said = {
        name: line.split("|")[1].strip()
        for line in page.partition("| a callback that |")[2].splitlines()[2:6]
        for name in re.findall(r"`(\w+)`", line)
    }
    classes = [getattr(packaged, name) for name in packaged.__all__]
    apart = {"Gossip", "PushSum", *OF_TEXT}
    if method is PushSum:  # GradientTracking needs Gossip
        apart.add("GradientTracking")
        del said["GradientTracking"]
    found = dict.fromkeys(OF_TEXT, COMPOSES)
    for cls in classes:
        name = cls.__name__
        if issubclass(cls, FederatedCallback) and name not in apart:
            found[name] = beside(method(), cls(*NEED.get(name, ())))
    assert found == said


def test_an_alternating_schedule_of_factors_is_refused():
    with pytest.raises(UserError, match="FactorSchedule and Gossip cannot run together"):
        tiny_run(Gossip(), FactorSchedule(["B", "A"]), **OWN)


EDGES = [
    (lambda: FromEdges([[0, 0]]), "client 0 is given as its own neighbour"),
    (lambda: FromEdges([[0, 1], [1, 0]]), r"the edge \(0, 1\) is given twice"),
    (lambda: FromEdges([[0, 1]], [0.1, 0.2]), "1 edges and 2 weights"),
    (lambda: FromEdges([[0, 1.5]]), "whole numbers"),
    (lambda: FromEdges([[0, 1e30]]), "whole numbers from 0"),
    (lambda: FromEdges([["a", "b"]]), "numbers from 0"),  # type: ignore[list-item]
    (lambda: FromEdges([[0, 1, 2], [1, 2, 3]]), r"of shape \(E, 2\), and have shape \(2, 3\)"),
    (lambda: FromEdges([0, 1, 2, 3]), r"have shape \(4,\)"),  # type: ignore[list-item]
    (lambda: FromEdges([[0, 1]], [[0.1]]), "one number per edge"),  # type: ignore[list-item]
    (lambda: RandomRegular(0), "degree=0"),
    (lambda: ErdosRenyi(0.0), "p=0.0"),
    (lambda: Gossip(gossip_steps=0), "gossip_steps=0"),
    (lambda: Gossip(FromEdges([[0, 1]], [0.1]), weights="uniform"), "Give one of the two"),
    (lambda: Gossip(Ring), "is not a topology"),
]
RUNS = [
    (Gossip(FromEdges([[0, 6]])), "client 6 does not exist: there are 6 clients"),
    (Gossip(Star(hub=6)), r"Star\(hub=6\): client 6 does not exist: there are 6 clients"),
    (Gossip(Grid(rows=4)), r"Grid\(rows=4\) needs a multiple of 4 clients, and has 6"),
    (Gossip(Torus(rows=6)), "6 rows of 1, and both have to be at least 2"),
    (Gossip(RandomRegular(6)), "6 clients have at most 5 neighbours"),
    (Gossip(Star(), weights="uniform"), "add up to .* and not to 1"),
    (Gossip(FromEdges([[0, 1]], [1.5])), "its own would be negative"),
    (Gossip(FromEdges([[0, 1]], [-0.5])), r"the weight of the edge \(1, 0\) is -0.5"),
    (PushSum(FromEdges([[0, 1], [0, 2]], [0.7, 0.7], directed=True)), "add up to 1.4"),
    (PushSum(FromEdges([[0, 1]], [float("nan")])), "add up to nan"),
    (Gossip(keeps="heads"), "Gossip.keeps: no parameter is called 'heads'"),
]


@pytest.mark.parametrize(("make", "text"), EDGES, ids=ids(EDGES))
def test_arguments_that_are_no_graph(make, text):
    with pytest.raises(UserError, match=text):
        make()


@pytest.mark.parametrize(("method", "text"), RUNS, ids=ids(RUNS))
def test_graphs_that_do_not_fit_the_run(method, text):
    with pytest.raises(UserError, match=text):
        tiny_run(method, participation="all", **OWN)


def test_a_graph_from_a_file(tmp_path):
    path = tmp_path / "graph.csv"
    path.write_text("sender,receiver,weight\n2,0,0.25\n0,1,0.5\n")
    graph = FromFile(str(path), directed=True)
    assert graph.edges(3, 0, 0).tolist() == [[0, 1], [2, 0]]
    assert graph.weights is not None and graph.weights.tolist() == [0.5, 0.25]
    path.write_text("sender,receiver\n0,1\n", "utf-8-sig")  # as spreadsheets do
    assert FromFile(str(path)).edges(2, 0, 0).tolist() == [[0, 1]]
    for text, told in [
        ("a,b\n0,1\n", r"graph.csv, line 1: it is 'a,b', and has to be sender,receiver"),
        ("sender,receiver,weight\n0,1,x\n", "line 2: the weight 'x' is not a number"),
        ("sender,receiver\n0\n", "line 2"),
    ]:
        path.write_text(text)
        with pytest.raises(UserError, match=told):
            FromFile(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        FromFile(str(tmp_path / "none.csv"))


def test_a_graph_from_a_file_with_the_clients_names(tmp_path):
    path = tmp_path / "graph.csv"
    path.write_text("sender,receiver,weight\nzoe,ann,0.5\nann, bob,0.25\n")
    graph = FromFile(str(path), directed=True)
    with pytest.raises(UserError, match="has names of clients"):
        graph.edges(3, 0, 0)
    for _ in range(2):  # in each fit
        graph.name_clients(["ann", "bob", "zoe"])
        assert graph.edges(3, 0, 0).tolist() == [[0, 1], [2, 0]]
        assert graph.weights is not None and graph.weights.tolist() == [0.25, 0.5]
    for names, told in [
        (["ann", "rob", "zoe"], r"graph.csv, line 3: no client has the name 'bob'.*ann, rob, zoe"),
        ([], r"line 2: 'zoe' is a name, and .* no names. Write each client's number from 0"),
    ]:
        with pytest.raises(UserError, match=told):
            FromFile(str(path)).name_clients(names)


def federation(names: list[Any]) -> FromTable:
    """Twelve rows of three clients, which have these names."""
    table = pandas.DataFrame({"a": range(12), "y": [0, 1] * 6, "who": names * 4})
    return FromTable(table, target="y", client="who", batch_size=4)


def alike(method: Gossip, names: list[Any]) -> set[tuple[str, str]]:
    """Pairs of clients, by name, that have equal models after a round."""
    module = FederatedModule(
        Classifier(torch.nn.Linear(1, 2), num_classes=2), seed=0, participation="all", **OWN
    )
    data = federation(names)
    trainer(1, [method]).fit(module, data)
    models = [module.client_rows.read("Gossip.x", i) for i in range(3)]
    return {
        (data.client_names[i], data.client_names[j])
        for i in range(3)
        for j in range(i)
        if torch.allclose(models[i], models[j], rtol=0, atol=1e-6)
    }


def test_a_graph_has_the_names_of_each_fit(tmp_path):
    path = tmp_path / "graph.csv"
    path.write_text("sender,receiver\nzoe,ann\n")
    method = Gossip(FromFile(str(path)))
    assert alike(method, ["ann", "bob", "zoe"]) == {("zoe", "ann")}
    assert alike(method, ["ann", "zoe", "zora"]) == {("zoe", "ann")}


@pytest.mark.parametrize(("names", "pair"), [([1, 2, 3], ("2", "1")), ([10, 1, 11], ("11", "10"))])
def test_numbers_in_a_graphs_file_are_names_if_all_of_them_are(tmp_path, names, pair):
    path = tmp_path / "graph.csv"
    path.write_text("sender,receiver\n1,2\n")
    method = Gossip(FromFile(str(path)))
    text = repr(method.topology)
    assert alike(method, names) == {pair}
    assert repr(method.topology) == text  # a resumed run compares it


class Pair(FullyConnected):
    """Extends another class, and has one edge."""

    def edges(self, m: int, t: int, seed: int) -> Any:
        return np.array([[0, 1]])


def test_a_class_that_extends_fully_connected_has_its_own_edges():
    ours, theirs = (
        tiny_run(Gossip(graph), rounds=1, participation="all", **OWN)
        for graph in (Pair(), FromEdges([[0, 1]]))
    )
    first = ours.run.state.initial_vector
    np.testing.assert_array_equal(rows(ours, "Gossip.x", first), rows(theirs, "Gossip.x", first))


def test_a_run_on_a_graph_with_the_clients_names(tmp_path):
    path = tmp_path / "graph.csv"
    path.write_text("sender,receiver\nzoe,ann\nann,bob\nzoe,bob\n")
    method = Gossip(FromFile(str(path)))
    learner = Classifier(torch.nn.Linear(1, 2), num_classes=2)
    module = FederatedModule(learner, seed=0, **OWN)
    run = trainer(1, [method])
    run.fit(module, federation(["bob", "zoe", "ann"]))
    assert "of 3 clients, 3 edges, degrees 2 to 2" in method.facts()["topology"]
    with pytest.raises(UserError, match=r"line 2: 'zoe' is a name"):
        tiny_run(Gossip(FromFile(str(path))), participation="all", **OWN)


class Listed(Topology):
    """A user's own, with weights in a list."""

    directed = True
    weights = [0.5] * M  # type: ignore[assignment]

    def edges(self, m: int, t: int, seed: int) -> Any:
        return np.stack([np.arange(m), (np.arange(m) + 1) % m], axis=1)


@pytest.mark.parametrize("method", [Gossip, PushSum])
def test_a_topology_of_ones_own_may_list_its_weights(method):
    run = tiny_run(method(Listed()), rounds=2, participation="all", **OWN)
    x = rows(run, f"{method.__name__}.x", run.run.state.initial_vector)
    np.testing.assert_allclose(x.mean(0), run.global_vector.detach(), rtol=0, atol=1e-12)


def test_a_graph_that_is_not_connected_gets_a_note():
    run = tiny_run(Gossip(FromEdges([[0, 1], [2, 3]])), **OWN)
    assert any("not connected: it falls into 4 components" in note for note in run.notes)
    assert not any("connected" in note for note in tiny_run(Gossip(), **OWN).notes)


def test_rows_beyond_the_memory_for_them_get_a_note(monkeypatch):
    size = 8 * len(tiny_run(**OWN).global_vector)
    for budget, noted in ((M * size, False), (M * size - 1, True)):
        monkeypatch.setattr("fl_lightning.run.ClientStore", partial(ClientStore, budget))
        notes = tiny_run(Gossip(), **OWN).notes
        assert noted == any("Gossip.x: the rows of 6 clients take up to" in each for each in notes)


@pytest.mark.parametrize("m", [1, 2, 3, 7, 12])
def test_edges_are_sorted_pairs_of_clients_each_once(m):
    graphs: list[Topology] = [Ring(), FullyConnected(), Star(), ExponentialGraph()]
    graphs += [OnePeerExponential(), ErdosRenyi(0.4, varying=True)]
    graphs += [RandomRegular(2)] if m > 2 else []
    graphs += [Grid(), Torus()] if m == 12 else []
    for graph in graphs:
        for t in range(3):
            edges = graph.edges(m, t, seed=3)
            assert edges.dtype == np.int64 and edges.shape[1:] == (2,)
            pairs = [tuple(pair) for pair in edges.tolist()]
            assert pairs == sorted(set(pairs))
            assert all(i != j and min(i, j) >= 0 and max(i, j) < m for i, j in pairs)
            assert graph.directed or all(i < j for i, j in pairs)
            assert len(links_of(graph, m, t, 3).senders) == len(pairs) * (2 - graph.directed)
    draws = [ErdosRenyi(0.4, varying=varying) for varying in (False, True)]
    if m == 12:
        same, other = ([graph.edges(m, t, 3).tolist() for t in (0, 1)] for graph in draws)
        assert same[0] == same[1] == other[0] != other[1]


@pytest.mark.parametrize(
    ("first", "then", "same"),
    [
        (Gossip(Torus()), Gossip(Torus()), True),
        (Gossip(Ring()), Gossip(Torus()), False),
        (Gossip(FromEdges([[0, 1]], [0.25])), Gossip(FromEdges([[0, 1]], [0.5])), False),
        (Gossip(Star()), Gossip(Star(), gossip_steps=2), False),
        (PushSum(RandomRegular(3)), PushSum(RandomRegular(3)), True),
    ],
    ids=["same", "topology", "weights", "steps", "push sum"],
)
def test_a_run_resumes_to_the_same_bits_on_the_same_graph_alone(tmp_path, first, then, same):
    options = {**OWN, "participation": 4}
    fit([first], 2, folder=str(tmp_path), **options)
    if not same:
        with pytest.raises(UserError, match=r"topology|gossip_steps"):
            fit([then], 4, folder=str(tmp_path), resume=True, **options)
        return
    resumed = fit([then], 4, folder=str(tmp_path), resume=True, **options)
    whole = fit([type(then)(then.topology)], 4, **options)
    assert resumed.global_vector.equal(whole.global_vector)
    assert torch.equal(
        *(each.trainer.callback_metrics["gossip/consensus"] for each in (resumed, whole))
    )
    key = f"{type(then).__name__}.x"
    for i in whole.client_rows.store.clients(key):
        assert resumed.client_rows.read(key, i).equal(whole.client_rows.read(key, i))
