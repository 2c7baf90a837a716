"""Apps run by Flower's own processes on loopback leave the bits of ``fit`` of the same config."""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fl_lightning.__main__ import main
from fl_lightning.checkpoint import KEY, index_in
from fl_lightning.deploy.rows import SiteRows
from fl_lightning.errors import UserError
from fl_lightning.storage import lock
from fl_lightning.storage.store import ClientStore
from tests.deploy.flower_processes import Federation

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


def app(folder: Path, method: str) -> Path:
    options = [word for pair in OPTIONS.items() for word in pair]
    configs = ["base", "data/digits", f"method/{method}"]
    made = folder / "app"
    assert main(["deploy", "flower", *configs, *options, "--out", str(made)]) == 0
    return made


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


def start(federation: Federation, folder: Path, method: str) -> subprocess.Popen[bytes]:
    """Start a run over three nodes; its simulation is done when this returns."""
    made = app(folder, method)
    federation.link()
    for name, clients in SITES.items():
        federation.node(name, f'clients="{clients}"')
    over = go_on(federation, folder)
    config = str(made / "config.yaml")
    simulated = ["--trainer.default_root_dir", str(folder / "simulated")]
    assert main(["fit", "-c", config, *simulated]) == 0
    return over


def go_on(federation: Federation, folder: Path, name: str = "run") -> subprocess.Popen[bytes]:
    app = folder / "app"
    return federation.run(app, name, folder="over", rounds=ROUNDS, min_sites=len(SITES))


def finish(federation: Federation, over: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for the run, end everything and compare."""
    federation.wait("the end of the run", lambda: over.poll() is not None)
    assert rounds_in(folder / "over") == ROUNDS, federation.log("run")
    federation.close()
    for name in SITES:
        federation.wait("the end of a site's process", partial(is_free, folder / name))
    check_same(folder / "simulated", folder / "over", [folder / name for name in SITES])


def rounds_in(run: Path) -> int:
    """Rounds whose checkpoint is there, as far as the metrics tell."""
    return len(metrics(run)) if (run / "metrics.csv").is_file() else 0


def test_three_nodes_leave_the_bits_of_the_simulation(
    tmp_path: Path, federation: Federation
) -> None:
    finish(federation, start(federation, tmp_path, "fedavg"), tmp_path)


def test_site_node_and_server_that_are_killed_leave_them_too(
    tmp_path: Path, federation: Federation
) -> None:
    start(federation, tmp_path, "scaffold")
    federation.wait("round 0", lambda: rounds_in(tmp_path / "over") >= 1)
    federation.kill("site", str(tmp_path / "north"))
    # It comes back with another number while the link takes the one before to be there still.
    federation.end("west")
    federation.node("west", f'clients="{SITES["west"]}"')
    federation.wait("round 1", lambda: rounds_in(tmp_path / "over") >= 2)
    federation.kill("--runtime-api-address", f"127.0.0.1:{federation.port}", "--token")
    finish(federation, go_on(federation, tmp_path, "again"), tmp_path)
