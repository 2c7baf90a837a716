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
from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
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
    RandomRegular,
    Ring,
    Star,
    Topology,
    Torus,
)
from tests.helpers.learners import trainer

M = 6  # clients of the tiny federation
OWN: dict[str, Any] = {"buffers": "own", "engine": "sequential"}


def rows(run: Any, key: str, first: Any) -> np.ndarray:
    """Every client's row of a state; ``first`` for those that never wrote one."""
    found = [run.client_rows.read(key, i) for i in range(M)]
    return np.stack([np.asarray(first if row is None else row) for row in found])


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
@pytest.mark.parametrize("beside", [[], [c.RelaxedInitialization(0.3)]], ids=["fedavg", "fedinit"])
def test_fully_connected_it_is_the_central_method_bit_for_bit(engine, beside):
    options = {**OWN, "participation": "all", "engine": engine, "rounds": 3}
    # Clients take unequal numbers of steps.
    central = tiny_run(*beside, **options)
    for order in (1, -1):
        ours = tiny_run(*[c.Gossip(FullyConnected()), *beside][::order], **options)
        assert ours.global_vector.equal(central.global_vector)
        assert all(
            ours.client_rows.read("Gossip.x", i).equal(central.global_vector) for i in range(M)
        )


def ids(cases: list[Any]) -> list[str]:
    """Names of cases, by the message that each expects."""
    return [re.sub(r"[^\w ]", "", case[-1])[-30:] for case in cases]


REFUSED = [
    (
        (c.ControlVariates(),),
        {},
        "Gossip and ControlVariates cannot run together: without a server",
    ),
    ((c.ProximalTerm(),), {}, "ProximalTerm uses clients.w"),
    ((c.PartialAveraging(),), {}, "Gossip and PartialAveraging cannot run together"),
    ((c.RelaxedInitialization(average="updates"),), {}, "both decide what clients send"),
    ((c.RelaxedInitialization(offset="mean"),), {}, "cannot run together: without a server"),
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
        tiny_run(c.Gossip(), *beside, **{**OWN, **options})


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
        tiny_run(c.Gossip(ExponentialGraph()), *beside, **OWN, **options)
    tiny_run(c.PushSum(ExponentialGraph()), *beside, **OWN, **options)


class Nudge(FederatedCallback):
    def on_server_update(self, server: Any) -> None:
        server.update *= 0.5


def test_a_method_that_moves_w_is_refused_in_round_0():
    with pytest.raises(UserError, match=r"Gossip and Nudge .*Nudge changes server\.update"):
        tiny_run(c.Gossip(), Nudge(), **OWN)


def test_gradient_tracking_needs_gossip():
    for beside in ((), (c.PushSum(),)):
        with pytest.raises(UserError, match="GradientTracking needs Gossip"):
            tiny_run(c.GradientTracking(), *beside, **OWN)


def test_a_pull_to_the_start_is_one_to_w_if_clients_start_there():
    a, b = (tiny_run(c.ProximalTerm(0.5, anchor=anchor)).global_vector for anchor in ("w", "start"))
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
    "ErrorFeedback21": (c.TopKCompression(0.5),),
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


@pytest.mark.parametrize("method", [c.Gossip, pytest.param(c.PushSum, marks=pytest.mark.slow)])
def test_the_page_says_of_each_packaged_callback_whether_it_composes_and_why_not(method):
    page = (Path(__file__).parents[2] / "docs/decentralised.md").read_text("utf-8")
    said = {
        name: line.split("|")[1].strip()
        for line in page.partition("| a callback that |")[2].splitlines()[2:6]
        for name in re.findall(r"`(\w+)`", line)
    }
    classes = [getattr(c, name) for name in c.__all__]
    apart = {"Gossip", "PushSum", *OF_TEXT}
    if method is c.PushSum:  # GradientTracking needs Gossip
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
        tiny_run(c.Gossip(), c.FactorSchedule(["B", "A"]), **OWN)


EDGES = [
    (lambda: FromEdges([[0, 0]]), "client 0 is given as its own neighbour"),
    (lambda: FromEdges([[0, 1], [1, 0]]), r"the edge \(0, 1\) is given twice"),
    (lambda: FromEdges([[0, 1]], [0.1, 0.2]), r"1 edges, and weights of shape \(2,\)"),
    (lambda: FromEdges([[0, 1.5]]), "whole numbers"),
    (lambda: FromEdges([[0, 1e30]]), "whole numbers from 0"),
    (lambda: FromEdges([["a", "b"]]), "numbers from 0"),  # type: ignore[list-item]
    (lambda: FromEdges([[0, 1, 2], [1, 2, 3]]), r"of shape \(E, 2\), and have shape \(2, 3\)"),
    (lambda: FromEdges([0, 1, 2, 3]), r"have shape \(4,\)"),  # type: ignore[list-item]
    (lambda: FromEdges([[0, 1]], [[0.1]]), r"weights of shape \(1, 1\)"),  # type: ignore[list-item]
    (lambda: RandomRegular(0), "degree=0"),
    (lambda: ErdosRenyi(0.0), "p=0.0"),
    (lambda: c.Gossip(gossip_steps=0), "gossip_steps=0"),
    (lambda: c.Gossip(FromEdges([[0, 1]], [0.1]), weights="uniform"), "Give one of the two"),
    (lambda: c.Gossip(Ring), "is not a topology"),
]
RUNS = [
    (c.Gossip(FromEdges([[0, 6]])), "client 6 does not exist: there are 6 clients"),
    (c.Gossip(Star(hub=6)), r"Star\(hub=6\): client 6 does not exist: there are 6 clients"),
    (c.Gossip(Grid(rows=4)), "Grid of 6 clients would have 4 rows of 1.5"),
    (c.Gossip(RandomRegular(6)), "no such graph of 6 clients"),
    (c.Gossip(Torus(rows=6)), "6 rows of 1, and both have to be whole numbers from 2"),
    (c.Gossip(Star(), weights="uniform"), "add up to .* and not to 1"),
    (c.Gossip(FromEdges([[0, 1]], [1.5])), "its own would be negative"),
    (c.Gossip(FromEdges([[0, 1]], [-0.5])), r"the weight of the edge \(1, 0\) is -0.5"),
    (c.PushSum(FromEdges([[0, 1], [0, 2]], [0.7, 0.7], directed=True)), "add up to 1.4"),
    (c.PushSum(FromEdges([[0, 1]], [float("nan")])), "add up to nan"),
    (c.Gossip(keeps="heads"), "Gossip.keeps: no parameter is called 'heads'"),
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


def alike(method: c.Gossip, names: list[Any]) -> set[tuple[str, str]]:
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
    method = c.Gossip(FromFile(str(path)))
    assert alike(method, ["ann", "bob", "zoe"]) == {("zoe", "ann")}
    assert alike(method, ["ann", "zoe", "zora"]) == {("zoe", "ann")}


@pytest.mark.parametrize(("names", "pair"), [([1, 2, 3], ("2", "1")), ([10, 1, 11], ("11", "10"))])
def test_numbers_in_a_graphs_file_are_names_if_all_of_them_are(tmp_path, names, pair):
    path = tmp_path / "graph.csv"
    path.write_text("sender,receiver\n1,2\n")
    method = c.Gossip(FromFile(str(path)))
    text = repr(method.topology)
    assert alike(method, names) == {pair}
    assert repr(method.topology) == text  # a resumed run compares it


class Pair(FullyConnected):
    def edges(self, m: int, t: int, seed: int) -> Any:
        return np.array([[0, 1]])


def test_a_class_that_extends_fully_connected_has_its_own_edges():
    ours, theirs = (
        tiny_run(c.Gossip(graph), rounds=1, participation="all", **OWN)
        for graph in (Pair(), FromEdges([[0, 1]]))
    )
    first = ours.run.state.initial_vector
    np.testing.assert_array_equal(rows(ours, "Gossip.x", first), rows(theirs, "Gossip.x", first))


class Listed(Topology):
    """A user's own, with weights in a list."""

    directed = True
    weights = [0.5] * M  # type: ignore[assignment]

    def edges(self, m: int, t: int, seed: int) -> Any:
        return np.stack([np.arange(m), (np.arange(m) + 1) % m], axis=1)


@pytest.mark.parametrize("method", [c.Gossip, c.PushSum])
def test_a_topology_of_ones_own_may_list_its_weights(method):
    run = tiny_run(method(Listed()), rounds=2, participation="all", **OWN)
    x = rows(run, f"{method.__name__}.x", run.run.state.initial_vector)
    np.testing.assert_allclose(x.mean(0), run.global_vector.detach(), rtol=0, atol=1e-12)


def test_a_graph_that_is_not_connected_gets_a_note():
    run = tiny_run(c.Gossip(FromEdges([[0, 1], [2, 3]])), **OWN)
    assert any("not connected: it falls into 4 components" in note for note in run.notes)
    assert not any("connected" in note for note in tiny_run(c.Gossip(), **OWN).notes)


def test_rows_beyond_the_memory_for_them_get_a_note(monkeypatch):
    size = 8 * len(tiny_run(**OWN).global_vector)
    for budget, noted in ((M * size, False), (M * size - 1, True)):
        monkeypatch.setattr("fl_lightning.run.ClientStore", partial(ClientStore, budget))
        notes = tiny_run(c.Gossip(), **OWN).notes
        assert noted == any("Gossip.x: the rows of 6 clients take up to" in each for each in notes)


@pytest.mark.parametrize(
    ("first", "then", "same"),
    [
        (c.Gossip(Torus()), c.Gossip(Torus()), True),
        (c.Gossip(Ring()), c.Gossip(Torus()), False),
        (c.Gossip(FromEdges([[0, 1]], [0.25])), c.Gossip(FromEdges([[0, 1]], [0.5])), False),
        (c.Gossip(Star()), c.Gossip(Star(), gossip_steps=2), False),
        (c.PushSum(RandomRegular(3)), c.PushSum(RandomRegular(3)), True),
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
