"""Flower's processes on loopback: a link, nodes and ``flwr run`` in a folder of their own, with TLS
and keys by the commands that ``fl-lightning deploy keys`` writes, and a run beside its simulation.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from packaging.version import Version
from torch import Tensor

from fl_lightning.__main__ import main
from fl_lightning.deploy.site_rows import SiteRows
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import parse_yaml
from fl_lightning.storage import lock
from fl_lightning.storage.client_store import ClientStore
from fl_lightning.storage.rows_on_disk import KEY, index_in

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]
# It is not in the path of every user.
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on at present."""
    held = [socket.socket() for _ in range(number)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Federation:
    """What a user starts, started; all of it ends with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "flwr-home"
        self.home.mkdir(parents=True)
        self.port, self.fleet = free_ports(2)
        # Before, nodes had an address of their own at the link.
        self.one_port = Version(version("flwr")) >= Version("1.41")
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "sites"\n\n[superlink.sites]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n',
            "utf-8",
        )
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def link(self) -> None:
        command = [str(BIN / "flower-superlink"), "--insecure", f"--port={self.port}"]
        if not self.one_port:
            command += [f"--fleet-api-address=127.0.0.1:{self.fleet}"]
        self.start("link", *command, "--disable-runtime-dependency-installation")
        self.wait("the link's port", lambda: listens(self.port))

    def node(self, name: str, config: str) -> None:
        """A site's SuperNode, whose rows are in the folder ``name``."""
        (port,) = free_ports(1)
        self.start(
            name,
            str(BIN / "flower-supernode"),
            "--insecure",
            f"--superlink=127.0.0.1:{self.port if self.one_port else self.fleet}",
            f"--port={port}",
            "--node-config",
            f'{config} folder="{name}"',
        )

    def run(self, app: Path, name: str = "run", **config: Any) -> subprocess.Popen[bytes]:
        pairs = [f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in config.items()]
        settings = " ".join(pairs).replace("min_sites", "min-sites")
        command = ["run", str(app), "sites", "--stream", "--run-config", settings]
        return self.start(name, str(BIN / "flwr"), *command)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text("utf-8", errors="replace")

    def wait(self, what: str, there: Callable[[], bool], seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not there():
            if time.monotonic() > until:
                logs = {path.name: path.read_text("utf-8") for path in self.folder.glob("*.log")}
                raise AssertionError(f"{what} did not come: {logs}")
            time.sleep(0.05)

    def end(self, name: str, number: int = signal.SIGKILL) -> None:
        """End what was started under this name, with all that it started in its session."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.wait()

    def kill_server(self) -> None:
        """Kill the process of the server's app."""
        self.kill("--runtime-api-address", f"127.0.0.1:{self.port}", "--token")

    def kill(self, *words: str) -> None:
        """Kill the process that was started here by others and whose command has these words."""
        mine = {process.pid for process in self.processes.values()}
        for place in Path("/proc").glob("[0-9]*"):
            # Others end meanwhile, or are not ours to look at.
            with suppress(OSError):
                command = (place / "cmdline").read_text().split("\0")
                environment = (place / "environ").read_text()
                here = f"FLWR_HOME={self.home}" in environment.split("\0")
                if here and int(place.name) not in mine and set(words) <= set(command):
                    os.kill(int(place.name), signal.SIGKILL)
                    return
        raise AssertionError(f"no process of {words}")

    def close(self) -> None:
        for name in list(self.processes):
            self.end(name)


def commands(page: Path, program: str) -> list[list[str]]:
    """The page's commands that begin with these words."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [shlex.split(line) for line in lines if line.startswith(program)]
    assert found, f"{page} has no {program}"
    return found


class KeyedFederation(Federation):
    """A link, a proxy if nginx is installed, and nodes with keys, as the written pages say."""

    def __init__(self, folder: Path, sites: Iterable[str] = ("north",)) -> None:
        super().__init__(folder)
        self.site_of = {name: f"site-{number}" for number, name in enumerate(sites, start=1)}
        self.keys = folder / "keys"
        self.page = self.keys / "README.md"
        self.door = self.fleet if NGINX else self.port  # the port that the sites reach
        ports = ["--port", str(self.fleet), "--link-port", str(self.port)]
        given = ["--sites", str(len(self.site_of)), "--address", "127.0.0.1"]
        given += ["--out", str(self.keys)]
        assert main(["deploy", "keys", *given, *ports]) == 0
        (written,) = re.findall(r"^```toml\n(.*?)^```$", self.page.read_text("utf-8"), re.S | re.M)
        stranger = (
            f'[superlink.stranger]\naddress = "127.0.0.1:{self.door}"\n'
            f'root-certificates = "{self.keys / "site-1" / "ca.pem"}"\n'
        )
        default = '[superlink]\ndefault = "sites"\n\n'
        (self.home / "config.toml").write_text(f"{default}{written}\n{stranger}", "utf-8")
        self.numbers: dict[str, str] = {}  # of the nodes at the link, by site

    def link(self) -> None:
        """Start the link; the first time also the proxy, and register the sites' keys."""
        (command,) = commands(self.page, "flower-superlink")
        self.start("link", str(BIN / command[0]), *command[1:])
        self.wait("the link's port", lambda: listens(self.port))
        if self.numbers:
            return
        if NGINX:
            (command,) = commands(self.page, "nginx")
            self.start("proxy", NGINX, *command[1:])
            self.wait("the proxy's port", lambda: listens(self.door))
        for command in commands(self.page, "flwr supernode register"):
            told = self.flwr(*command[1:], "--format", "json")
            assert told.returncode == 0, told.stderr
            self.numbers[Path(command[3]).stem] = str(json.loads(told.stdout)["node-id"])

    def node(self, name: str, config: str) -> None:
        self.node_with(name, config)

    def node_with(self, name: str, config: str, **options: Path | None) -> None:
        """Start a node by the command of the site ``name``, or of the first one.

        Args:
            name: of the process, and of the folder with its rows.
            config: what it holds, such as ``clients="0"``.
            options: values in place of the page's; None leaves the option out.
        """
        site = self.site_of.get(name, "site-1")
        (command,) = commands(self.keys / site / "README.md", "flower-supernode")
        given: dict[str, object] = dict(zip(command[1::2], command[2::2], strict=True))
        for option in ("--root-certificates", "--auth-supernode-private-key"):
            given[option] = self.keys / str(given[option])
        given["--port"] = free_ports(1)[0]
        given["--node-config"] = f'{config} folder="{name}"'
        if not NGINX:
            given["--superlink"] = f"127.0.0.1:{self.door}"
        given |= {f"--{option.replace('_', '-')}": value for option, value in options.items()}
        pairs = [(option, str(value)) for option, value in given.items() if value is not None]
        self.start(name, str(BIN / command[0]), *(word for pair in pairs for word in pair))

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``flwr`` to its end."""
        return subprocess.run(
            [str(BIN / "flwr"), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def nodes(self) -> dict[str, str]:
        """What the link says of each node that it knows: its status, by its number."""
        told = self.flwr("supernode", "list", "sites", "--format", "json")
        assert told.returncode == 0, told.stderr
        return {node["node-id"]: node["status"] for node in json.loads(told.stdout)["nodes"]}

    def runs(self) -> int:
        """How many runs the link knows."""
        told = self.flwr("list", "sites", "--format", "json")
        assert told.returncode == 0, told.stderr
        return len(json.loads(told.stdout)["runs"])

    def ended(self, name: str) -> int:
        """Wait until a process ends by itself, and return its status."""
        process = self.processes[name]
        self.wait(f"the end of {name}", lambda: process.poll() is not None)
        return int(process.returncode)

    def post(self, port: int, path: str) -> int:
        """Send an empty request whose path is written as it is, and return the answer's status."""
        context = ssl.create_default_context(cafile=self.keys / "site-1" / "ca.pem")
        asked = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            secured.sendall(asked.encode())
            return int(secured.makefile("rb").readline().split()[1])


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


def check_same(simulated: Path, over: Path, sites: list[Path]) -> None:
    """Model, buffers, server states, metrics and clients' rows are the same bits."""
    ours = torch.load(simulated / "checkpoints" / "last.ckpt", weights_only=True)
    theirs = torch.load(over / "checkpoints" / "last.ckpt", weights_only=True)
    states = {k: v for k, v in ours[KEY]["server"].items() if not k.startswith("Divergence")}
    rows = {k: row for k, row in rows_in(simulated).items() if not k[0].startswith("Divergence")}
    for one, other in (
        (ours["state_dict"], theirs["state_dict"]),
        (states, theirs[KEY]["server"]),
        (rows, rows_at(sites)),
    ):
        assert one.keys() == other.keys()
        assert not [key for key, value in one.items() if not torch.equal(value, other[key])]
    assert metrics(simulated) == metrics(over)


def metrics(run: Path) -> list[dict[str, str]]:
    """Without times, and distances for which the server lacks the clients' models."""
    with open(run / "metrics.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    away = ("time/", "divergence/")
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
