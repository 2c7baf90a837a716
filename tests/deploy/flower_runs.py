"""A run over sites by Flower's processes, and the simulation of the same config beside it."""

from __future__ import annotations

import csv
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from fl_lightning.__main__ import main
from fl_lightning.deploy.site_rows import SiteRows
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import parse_yaml
from fl_lightning.storage import lock
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.rows_on_disk import KEY, index_in
from tests.deploy.flower_processes import Federation

THREE = {"north": "0,3,8", "south": "1,2,7", "west": "4,5,6"}
# With batch statistics and unequal clients, of whom seven take part; seconds a round.
OPTIONS = {
    "--data.num_clients": "9",
    "--data.init_args.samples": "300",
    "--data.partition": "Dirichlet",
    "--data.partition.alpha": "1.0",
    "--model.participation": "7",
    "--model.local_epochs": "1",
    "--model.engine": "sequential",
}
NETWORK = {
    "--model.learner.init_args.network.class_path": "ResNet20",
    "--model.learner.init_args.network.init_args.depth": "8",
    "--model.learner.init_args.network.init_args.width": "4",
}


@dataclass
class Study:
    """One run, over sites and simulated.

    Args:
        folder: of the test; ``app``, ``over`` and ``simulated`` are below it.
        configs: after the digits', such as ``method/scaffold``.
        options: besides :data:`OPTIONS`, or in place of them.
        learner: options that say what is trained.
        sites: clients by site.
    """

    folder: Path
    federation: Federation
    configs: list[str]
    rounds: int
    options: Mapping[str, str] = field(default_factory=dict)
    sites: Mapping[str, str] = field(default_factory=lambda: THREE)
    learner: Mapping[str, str] = field(default_factory=lambda: NETWORK)

    def write(self) -> Path:
        """The app's folder, as ``fl-lightning deploy flower`` writes it."""
        options = {
            **OPTIONS,
            **self.learner,
            "--trainer.max_epochs": str(self.rounds + 2),  # `flwr run` gives the run's number
            **self.options,
        }
        words = [word for pair in options.items() for word in pair]
        made = self.folder / "app"
        configs = ["base", "data/digits", *self.configs]
        assert main(["deploy", "flower", *configs, *words, "--out", str(made)]) == 0
        return made

    def gates(self, names: list[str], site: str) -> None:
        """Have this site, or the server, stay at these places of ``gate.py``."""
        places = self.folder / "gates"
        places.mkdir()
        for name in names:
            (places / name).touch()
        app = self.folder / "app"
        shutil.copy(Path(__file__).with_name("gate.py"), app / "gate.py")
        clients = [int(client) for client in self.sites[site].split(",")]
        gate = {"folder": str(places), "clients": clients}
        config = parse_yaml((app / "config.yaml").read_text("utf-8"))
        behind = config["trainer"]["callbacks"] or config["method"]
        behind.append({"class_path": "gate.Gate", "init_args": gate})
        # Patterns of parts count in their order.
        (app / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")

    def at(self, name: str) -> Path:
        """Wait until somebody stays there; they go on when the file is removed."""
        reached = self.folder / "gates" / f"{name}.reached"
        self.federation.wait(name, reached.exists, 600)
        return reached

    def simulate(self) -> None:
        config = str(self.folder / "app" / "config.yaml")
        place = str(self.folder / "simulated")
        options = ["--trainer.max_epochs", str(self.rounds)]
        assert main(["fit", "-c", config, "--trainer.default_root_dir", place, *options]) == 0

    def open(self) -> None:
        """Start the link and a node for each site."""
        self.federation.link()
        for name in self.sites:
            self.node(name)

    def node(self, name: str) -> None:
        self.federation.node(name, f'clients="{self.sites[name]}"')

    def go_on(self, name: str = "run") -> subprocess.Popen[bytes]:
        """``flwr run``, which begins the run or goes on with it."""
        settings = {"folder": "over", "rounds": self.rounds, "min_sites": len(self.sites)}
        return self.federation.run(self.folder / "app", name, **settings)

    def rounds_done(self) -> int:
        """Rounds whose checkpoint is there, as far as the metrics tell."""
        over = self.folder / "over"
        return len(metrics(over)) if (over / "metrics.csv").is_file() else 0

    def finish(self, over: subprocess.Popen[bytes], name: str = "run") -> None:
        """Wait for the run, end everything and compare."""
        self.federation.wait("the end of the run", lambda: over.poll() is not None, 600)
        assert self.rounds_done() == self.rounds, self.federation.log(name)
        self.federation.close()
        for site in self.sites:
            free = partial(is_free, self.folder / site)
            self.federation.wait("the end of a site's process", free)
        sites = [self.folder / site for site in self.sites]
        check_same(self.folder / "simulated", self.folder / "over", sites)


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def global_vector(checkpoint: dict[str, Any]) -> Tensor:
    """w, which under partial averaging lies beside the model that is evaluated."""
    beside: Tensor | None = checkpoint[KEY]["w"]
    if beside is not None:
        return beside
    states = checkpoint["state_dict"].items()
    # The frozen weights under adapters are no part of w.
    names = {key for key, _ in states if key.replace("lora_A", "weight") != key}
    frozen = {key.replace("lora_A", "weight") for key in names}
    vectors = {key: value for key, value in states if key not in frozen}
    return torch.cat([v.flatten() for key, v in vectors.items() if not key.endswith(BUFFERS)])


def check_same(simulated: Path, over: Path, sites: list[Path]) -> None:
    """Model, buffers, server states, metrics, clients' rows and values are the same bits."""
    ours = torch.load(simulated / "checkpoints" / "last.ckpt", weights_only=True)
    theirs = torch.load(over / "checkpoints" / "last.ckpt", weights_only=True)
    assert torch.equal(global_vector(ours), global_vector(theirs))
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    for key, value in ours["state_dict"].items():
        same = torch.equal(value, theirs["state_dict"][key])
        # What needs a part that stays at the sites is evaluated there alone.
        assert same or (ours[KEY]["w"] is not None and not key.endswith(BUFFERS)), key
    states = {k: v for k, v in ours[KEY]["server"].items() if not k.startswith("Divergence")}
    assert states.keys() == theirs[KEY]["server"].keys()
    for key, value in states.items():
        assert torch.equal(value, theirs[KEY]["server"][key]), key
    rows = {k: row for k, row in rows_in(simulated).items() if not k[0].startswith("Divergence")}
    held = rows_at(sites)
    assert rows.keys() == held.keys()
    assert not [key for key, row in rows.items() if not torch.equal(row, held[key])]
    away = AWAY if ours[KEY]["w"] is None else (*AWAY, "val/")
    assert metrics(simulated, away) == metrics(over, away)
    for name in ("clients.csv", "clients_rounds.csv", "clients.png"):
        mine, sent = simulated / name, over / name
        assert mine.exists() == sent.exists() == ("clients/loss" in metrics(simulated)[-1])
        assert not mine.exists() or mine.read_bytes() == sent.read_bytes(), name


# Times are the machine's; distances between layers of clients need these at the server.
AWAY = ("time/", "divergence/")


def metrics(run: Path, away: tuple[str, ...] = AWAY) -> list[dict[str, str]]:
    with open(run / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: v for k, v in row.items() if not k.startswith(away)} for row in rows]


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


def rows_in(run: Path) -> dict[tuple[str, int], Tensor]:
    """A simulated run's rows of its methods."""
    store = ClientStore()
    checkpoint = run / "checkpoints" / "last.ckpt"
    store.load(index_in(checkpoint), run / "state")
    return rows_of(store)


def is_free(site: Path) -> bool:
    """Whether no process holds the site's rows; it ends a moment after its node."""
    try:
        lock.hold(site).release()
    except UserError:
        return False
    return True
