"""Flower's processes with TLS and keys, by the commands that `fl-lightning deploy keys` writes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterable
from pathlib import Path

from fl_lightning.__main__ import main
from tests.deploy.flower_processes import BIN, Federation, free_ports, listens

# It is not in the path of every user.
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")


def commands(page: Path, program: str) -> list[list[str]]:
    """The page's commands that begin with these words."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [shlex.split(line) for line in lines if line.startswith(program)]
    assert found, f"{page} has no {program}"
    return found


class KeyedFederation(Federation):
    """A link, a proxy if nginx is installed, and nodes with keys, as the written pages say.

    Without nginx the nodes reach the link itself.
    """

    def __init__(self, folder: Path, sites: Iterable[str] = ("north",)) -> None:
        super().__init__(folder)
        self.site_of = {name: f"site-{number}" for number, name in enumerate(sites, start=1)}
        self.keys = folder / "keys"
        self.page = self.keys / "README.md"
        self.door = self.fleet if NGINX else self.port  # the port that the sites reach
        ports = ["--port", str(self.fleet), "--link-port", str(self.port)]
        given = [
            "--sites",
            str(len(self.site_of)),
            "--address",
            "127.0.0.1",
            "--out",
            str(self.keys),
        ]
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
