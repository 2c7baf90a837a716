"""Every kind of method over Flower's own processes leaves the bits of ``fit``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.deploy.flower_keys import KeyedFederation
from tests.deploy.flower_processes import Federation
from tests.deploy.flower_runs import THREE, Study

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("flwr") is None or os.environ.get("FL_LIGHTNING_FLOWER") != "all",
        reason="each takes minutes: make test-flower-all runs them",
    ),
]
ONE_EACH = {"north": "0", "south": "1", "west": "2"}
SAMPLES = {"--model.weighting": "samples"}
# Each client's own model, on samples of its own, after every round and again after fine-tuning.
PERSONAL = {
    "--method.periods": '{"last": "never", "*": 2}',
    "--data.client_test_fraction": "0.3",
    "--data.init_args.batch_size": "5",
    "--trainer.callbacks+": "PerClientEvaluation",
    "--trainer.callbacks.every_n_rounds": "1",
    "--trainer.callbacks.finetune_epochs": "1",
}
FEW = {"--data.num_clients": "3", "--model.participation": "all"}
CASES = {
    "fedavg": ("fedavg", {}, None),
    "scaffold": ("scaffold", {}, None),
    "fedinit": ("fedinit", {}, None),
    "fedsmoo": ("fedsmoo", {}, None),
    "fedals": ("fedper", PERSONAL, None),
    "top-k": ("topk", {}, None),
    "median": ("median", {}, None),
    "samples": ("fedavg", SAMPLES, None),
    "scaffold, a client a site": ("scaffold", FEW, ONE_EACH),
    "top-k, a client a site": ("topk", FEW, ONE_EACH),
}


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("name", CASES)
def test_nine_clients_on_three_nodes_leave_the_bits_of_the_simulation(
    name: str, tmp_path: Path, federation: Federation
) -> None:
    method, options, sites = CASES[name]
    study = Study(tmp_path, federation, [f"method/{method}"], 5, options)
    if sites is not None:
        study.sites = sites
    study.write()
    study.open()
    over = study.go_on()
    study.simulate()
    study.finish(over)


@pytest.mark.parametrize("where", ["training", "update"])
def test_node_link_and_server_that_are_killed_leave_them_too(
    where: str, tmp_path: Path, federation: Federation
) -> None:
    """In the middle of a site's training, or while the server has its reply and no commit yet."""
    study = Study(tmp_path, federation, ["method/scaffold"], 4)
    study.write()
    study.simulate()
    study.gates([f"{where}.1", f"{where}.2", f"{where}.3"], "north")
    study.open()
    study.go_on("run0")
    reached = study.at(f"{where}.1")
    federation.crash("north")
    reached.unlink()
    study.node("north")
    reached = study.at(f"{where}.2")
    federation.kill_server()
    reached.unlink()
    study.go_on("run1")
    reached = study.at(f"{where}.3")
    federation.crash("link")
    reached.unlink()
    federation.link()
    # A link that is started again does not know the nodes of the one before.
    for site in study.sites:
        federation.end(site)
        study.node(site)
    study.finish(study.go_on("run2"), "run2")


def test_a_killed_link_with_a_database_knows_its_nodes_and_they_come_back(tmp_path: Path) -> None:
    """Without their being started again; with TLS, keys and the proxy."""
    keyed = KeyedFederation(tmp_path, THREE)
    try:
        study = Study(tmp_path, keyed, ["method/scaffold"], 3)
        study.write()
        study.simulate()
        study.gates(["training.1"], "north")
        study.open()
        study.go_on()
        reached = study.at("training.1")
        keyed.crash("link")
        reached.unlink()
        keyed.link()
        study.finish(study.go_on("again"), "again")
    finally:
        keyed.close()


def test_what_is_killed_after_the_sites_have_measured_leaves_clients_tables_too(
    tmp_path: Path, federation: Federation
) -> None:
    """The server before its checkpoint of the round, and a site before it is asked again."""
    study = Study(tmp_path, federation, ["method/fedper"], 4, PERSONAL)
    study.write()
    study.simulate()
    study.gates(["measured.1", "measured.2"], "north")
    study.open()
    study.go_on("run0")
    reached = study.at("measured.1")
    federation.kill_server()
    reached.unlink()
    study.go_on("run1")
    reached = study.at("measured.2")
    federation.crash("north")
    reached.unlink()
    study.node("north")
    study.finish(federation.processes["run1"], "run1")
