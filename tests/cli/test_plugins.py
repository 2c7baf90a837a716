"""``new``: a package of one's own, installed as a wheel, works like ours; ``check``: contracts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fl_lightning.__main__ import main
from fl_lightning.lab.cli import compose, plugins
from fl_lightning.lab.cli.compose import packaged, read

Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What ``new own-anchor`` writes."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "own-anchor"]) == 0
    return tmp_path / "own-anchor"


@pytest.fixture
def installed(written: Path, python: str, tmp_path: Path) -> Command:
    """Run ``python`` where the package's wheel is installed, in an empty folder."""
    quiet = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    wheels, site, work = (tmp_path / name for name in ("wheels", "site", "work"))
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", *quiet, "--no-build-isolation", "-w", str(wheels), str(written)]
    subprocess.run(wheel, capture_output=True, check=True)
    install = [*pip, "install", *quiet, "--target", str(site), *map(str, wheels.glob("*.whl"))]
    subprocess.run(install, capture_output=True, check=True)
    work.mkdir()

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [python, "-m", *argv]
        return subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True)

    return run


def test_what_a_new_package_tells_to_run_has_data_of_enough_clients(
    capsys: pytest.CaptureFixture[str], written: Path
) -> None:
    told = (capsys.readouterr().out + (written / "README.md").read_text()).splitlines()
    runs = [line for line in told if "fl-lightning fit" in line]
    # base alone has one client a round, of which methods show little.
    assert len(runs) == 4 and all("-c base -c data/digits " in line for line in runs)


@pytest.mark.slow
def test_a_new_package_works_like_ours(installed: Command, written: Path, tmp_path: Path) -> None:
    listed = installed("fl_lightning", "configs").stdout
    assert "method/own_anchor" in listed and "pulled to where it ended itself" in listed
    help_ = installed("fl_lightning", "fit", "--method.help", "OwnAnchor")
    assert "--method.mu" in help_.stdout, help_.stderr
    tiny = ("fl_lightning", "fit", "-c", "base", "-c", "debug/tiny")
    for method in (("-c", "method/own_anchor", "--method.mu", "0.1"), ("--method", "OwnAnchor")):
        run = installed(*tiny, *method)
        assert run.returncode == 0, run.stderr
    for name in ("own_anchor", "ownanchor"):
        record = (tmp_path / f"work/runs/digits-{name}-1/run.json").read_text()
        assert '"title": "OwnAnchor"' in record and '"done"' in record
    mistaken = installed(*tiny, "--method", "OwnAncor")
    assert mistaken.returncode == 2 and "Did you mean 'OwnAnchor'" in mistaken.stderr
    tests = ("pytest", "-q", "-p", "no:cacheprovider", str(written / "tests"))
    for command in (("fl_lightning", "check", "OwnAnchor"), tests):
        run = installed(*command)
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Own", "small letters"),
        ("class", "not a keyword of Python"),
        ("../own", "small letters"),
        ("scaffold", "a config or a module of Python has this name already"),
        ("json", "a config or a module of Python has this name already"),
        ("own-anchor", "exists already"),
        ("proximal-term", "its class would be ProximalTerm, which exists already"),
    ],
)
def test_names_that_no_package_can_have(
    written: Path, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(written.rglob("*"))
    assert main(["new", name]) == 2
    assert f"fl-lightning: new {name}: " in (told := capsys.readouterr().err) and reason in told
    assert sorted(written.rglob("*")) == before
    assert [path.name for path in written.parent.iterdir()] == ["own-anchor"]


def test_a_plugin_does_not_take_the_place_of_ours_nor_end_a_run_that_does_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "broken_plugin"
    (package / "configs/method").mkdir(parents=True)
    (package / "__init__.py").write_text("import a_package_that_is_not_there")
    (package / "configs/method/scaffold.yaml").write_text("# not SCAFFOLD\nmethod: []\n")
    (package / "configs/method/extra.yaml").write_text("# another\nmethod: []\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "packages", lambda: ("broken_plugin", "not_there"))
    assert read("method/scaffold") != {"method": []}
    assert read("method/extra") == {"method": []}
    assert compose.summary(packaged()["method/extra"].read_text("utf-8")) == "another"
    assert plugins.classes.__wrapped__() == {}
    told = capsys.readouterr().err
    assert "the plugin broken_plugin is left out: ModuleNotFoundError" in told
    assert "the plugin not_there is left out" in told


# --------------------------------------------------------------------------- check

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


@pytest.mark.slow
def test_the_readme_s_method_keeps_the_contracts_and_a_wrong_one_is_led_to_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_right_method.py").write_text(METHOD)
    assert main(["check", "my_right_method.OwnAnchor", "--mu", "0.2"]) == 0
    assert "OwnAnchor: all contracts hold" in capsys.readouterr().out
    wrong = METHOD.replace("last = ClientState(initial", "kept = ClientState(initial")
    wrong = wrong.replace("self.last[clients] = clients.x", "self.last = clients.x.clone()")
    wrong = wrong.replace("self.last[clients])", "getattr(self, 'last', clients.x))")
    Path("my_wrong_method.py").write_text(wrong)
    assert main(["check", "my_wrong_method.OwnAnchor"]) == 1
    out = capsys.readouterr().out
    assert "on_local_end set or changed self.last" in out and "ClientState" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("ControlVariate", "Did you mean 'ControlVariates'?"),
        ("ProximalTerm --nu 1", "check ProximalTerm: "),
        ("ProximalTerm --nu 1", "Its arguments: mu, anchor."),
        ("ProximalTerm --mu x", "--mu has to be a number, or a schedule."),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_paragraph(
    argv: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *argv.split()]) == 2
    assert says in capsys.readouterr().err
