"""A SuperLink, SuperNodes and ``flwr run`` as processes on loopback, in a folder of their own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

BIN = Path(sys.executable).parent
ROOT = Path(__file__).parents[2]


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
        self.left: list[int] = []  # groups of processes whose first was killed

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

    def crash(self, name: str) -> None:
        """Kill one process, and none of those that it started."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()
        self.left.append(process.pid)

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
        for group in self.left:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
