"""`fl-lightning check CLASS`.

The README's own method holds, a wrong variant of it leads to the fault.
"""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest

from fl_lightning.__main__ import main

METHOD = '''
from fl_lightning import ClientState, FederatedCallback

class OwnAnchor(FederatedCallback):
    """FedProx's pull to where this client itself ended: g + mu (x_i - last_i). 0 is FedAvg."""
    neutral = {"mu": 0.0}
    last = ClientState(initial="current_model", synchronised=False)

    def __init__(self, mu: float = 0.01):
        super().__init__()
        self.mu = mu

    def on_local_gradient(self, clients, gradient):
        return gradient + self.mu * (clients.x - self.last[clients])

    def on_local_end(self, clients):
        self.last[clients] = clients.x

    def on_server_update(self, server):
        server.log("anchor/step", server.update.norm())
'''


@pytest.fixture
def method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"my_method_{tmp_path.name}"  # modules are imported once
    (tmp_path / f"{name}.py").write_text(METHOD)
    return name


def test_the_readme_s_method_keeps_the_contracts(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", f"{method}.OwnAnchor", "--mu", "0.2"]) == 0
    assert "OwnAnchor: all contracts hold" in capsys.readouterr().out


def test_a_wrong_variant_leads_to_the_fault(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = METHOD.replace("last = ClientState(initial", "kept = ClientState(initial")
    wrong = wrong.replace("self.last[clients] = clients.x", "self.last = clients.x.clone()")
    wrong = wrong.replace("self.last[clients])", "getattr(self, 'last', clients.x))")
    Path(f"{method}.py").write_text(wrong)
    assert main(["check", f"{method}.OwnAnchor"]) == 1
    out = capsys.readouterr().out
    assert "on_local_end set or changed self.last" in out and "ClientState" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["ControlVariate"], "Did you mean 'ControlVariates'?"),
        (["ProximalTerm", "--nu", "1"], "--nu: ProximalTerm has no such argument. Accepted: mu"),
        (["ProximalTerm", "--mu", "x"], "mu"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_paragraph(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *argv]) == 2
    assert says in capsys.readouterr().err


def test_a_terminal_sees_at_once_that_the_command_has_begun(bare_python: str) -> None:
    ours, theirs = pty.openpty()
    command = [bare_python, "-m", "fl_lightning", "check", "ControlVariate"]
    process = subprocess.Popen(command, stderr=theirs, cwd=Path(__file__).parents[2])
    first = b""
    while not first.endswith(b"\n"):  # a terminal passes a line on in pieces
        first += os.read(ours, 1 << 16)
    begun = process.poll()
    process.wait()
    os.close(theirs)
    os.close(ours)
    assert first.decode() == "fl-lightning check: loading PyTorch …\r\n" and begun is None
