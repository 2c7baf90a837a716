"""Apps run by Flower's own processes on loopback leave the bits of ``fit`` of the same config."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl_lightning.checkpoint import KEY, index_in
from fl_lightning.deploy.rows import SiteRows
from fl_lightning.errors import UserError
from fl_lightning.storage import lock
from fl_lightning.storage.store import ClientStore
from tests.deploy.flower_processes import ROOT, Federation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("flwr") is None,
        reason="flwr is not installed (its pins are narrow): make test-flower runs this",
    ),
]
SITES = {"north": "0,3,8", "south": "1,2,7", "west": "4,5,6"}
ROUNDS = 3
# With batch statistics and unequal clients, of whom seven take part; seconds a round.
OPTIONS = {
    "--data.num_clients": "9",
    "--data.init_args.samples": "300",
    "--data.partition": "Dirichlet",
    "--data.partition.alpha": "1.0",
    "--model.learner.init_args.network.class_path": "ResNet20",
    "--model.learner.init_args.network.init_args.depth": "8",
    "--model.learner.init_args.network.init_args.width": "4",
    "--model.participation": "7",
    "--model.local_epochs": "1",
    "--model.engine": "sequential",
    "--trainer.max_epochs": str(ROUNDS),
}


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    made = Federation(tmp_path)
    yield made
    made.close()


def run(folder: Path, *command: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", "fl_lightning", *command]
    return subprocess.Popen(arguments, cwd=folder, env=environment)


def app(folder: Path, method: str) -> Path:
    options = [word for pair in OPTIONS.items() for word in pair]
    configs = ["base", "data/digits", f"method/{method}"]
    made = run(folder, "deploy", "flower", *configs, *options, "--out", "app")
    assert made.wait() == 0
    return folder / "app"


def rows_of(store: ClientStore) -> dict[tuple[str, int], Tensor]:
    rows = {}
    for name in store.names():
        for client in map(int, store.clients(name)):
            row = store.read(name, client)
            assert row is not None
            rows[name, client] = row.clone()
    return rows


def rows_at(folders: list[Path]) -> dict[tuple[str, int], Tensor]:
    """What sites hold after the last round, which nobody has committed yet."""
    rows = {}
    for folder in folders:
        held = SiteRows(folder, ClientStore())
        held.settle({client: t for client, (t, _) in held.staged.items()})
        rows |= {k: row for k, row in rows_of(held.store).items() if not k[0].startswith("staged.")}
        held.lock.release()
    return rows


def is_free(site: Path) -> bool:
    """Whether no process holds the site's rows; it ends a moment after its node."""
    try:
        lock.hold(site).release()
    except UserError:
        return False
    return True


def rows_in(run: Path) -> dict[tuple[str, int], Tensor]:
    """A simulated run's rows of its methods."""
    store = ClientStore()
    checkpoint = run / "checkpoints" / "last.ckpt"
    store.load(index_in(checkpoint), run / "state")
    return rows_of(store)


def metrics(run: Path) -> list[dict[str, str]]:
    with open(run / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    # Distances between layers of clients need these at the server.
    away = ("time/", "divergence/")
    return [{k: v for k, v in row.items() if not k.startswith(away)} for row in rows]


def check_same(simulated: Path, over: Path, sites: list[Path]) -> None:
    """Model, buffers, server states, metrics and clients' rows are the same bits."""
    ours = torch.load(simulated / "checkpoints" / "last.ckpt", weights_only=True)
    theirs = torch.load(over / "checkpoints" / "last.ckpt", weights_only=True)
    for key, value in ours["state_dict"].items():
        assert torch.equal(value, theirs["state_dict"][key]), key
    states = {k: v for k, v in ours[KEY]["server"].items() if not k.startswith("Divergence")}
    assert states.keys() == theirs[KEY]["server"].keys()
    for key, value in states.items():
        assert torch.equal(value, theirs[KEY]["server"][key]), key
    rows = {k: row for k, row in rows_in(simulated).items() if not k[0].startswith("Divergence")}
    held = rows_at(sites)
    assert rows.keys() == held.keys()
    assert not [key for key, row in rows.items() if not torch.equal(row, held[key])]
    assert metrics(simulated) == metrics(over)


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_three_nodes_leave_the_bits_of_the_simulation(
    method: str, tmp_path: Path, federation: Federation
) -> None:
    made = app(tmp_path, method)
    federation.link()
    for name, clients in SITES.items():
        federation.node(name, f'clients="{clients}"')
    over = federation.run(made, folder="over", rounds=ROUNDS, min_sites=len(SITES))
    config = str(made / "config.yaml")
    simulated = run(tmp_path, "fit", "-c", config, "--trainer.default_root_dir", "simulated")
    assert simulated.wait() == 0
    federation.wait("the end of the run", lambda: over.poll() is not None)
    assert len(metrics(tmp_path / "over")) == ROUNDS, federation.log("run")
    federation.close()
    for name in SITES:
        federation.wait("the end of a site's process", partial(is_free, tmp_path / name))
    check_same(tmp_path / "simulated", tmp_path / "over", [tmp_path / name for name in SITES])
