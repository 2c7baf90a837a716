"""Two hosts on this machine: namespaces with a network address and a host name of their own."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class TwoHosts:
    """host-0 and host-1, on one wire; both see this machine's files."""

    def __init__(self) -> None:
        name = secrets.token_hex(3)
        self.names = [f"fl-{name}-{host}" for host in (0, 1)]
        self._started: list[subprocess.Popen[str]] = []

    def set_up(self) -> None:
        """Make them; where that is not allowed the test is skipped."""
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.names
            wire = ["type", "veth", "peer", "name", "wire", "netns", second]
            _ip("-n", first, "link", "add", "wire", *wire)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                for device in ("lo", "wire"):
                    _ip("-n", name, "link", "set", device, "up")
                # A sandbox may let namespaces be made and not be entered.
                enter = ["ip", "netns", "exec", name, "unshare", "--uts", "hostname", "host"]
                subprocess.run(enter, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"network namespaces cannot be made here: {said.strip()}")

    def start(
        self, host: int, command: list[str], environment: Mapping[str, str], folder: Path
    ) -> subprocess.Popen[str]:
        """Start a command on a host; what it says comes back as one text."""
        named = f'hostname host-{host}; exec "$@"'
        enter = ["ip", "netns", "exec", self.names[host], "unshare", "--uts", "sh", "-c", named]
        process = subprocess.Popen(
            [*enter, "sh", *command],
            cwd=folder,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "wire", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def kill(self, host: int) -> None:
        """Kill all that runs there."""
        listed = _ip("netns", "pids", self.names[host])
        for pid in listed.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def cut(self) -> None:
        """Take the wire away."""
        _ip("-n", self.names[1], "link", "set", "wire", "down")

    def close(self) -> None:
        for host, name in enumerate(self.names):
            if Path("/run/netns", name).exists():
                self.kill(host)
                _ip("netns", "delete", name)
        for process in self._started:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
