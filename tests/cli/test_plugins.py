"""``fl-lightning new``: a package of one's own, installed as a wheel, works like ours."""

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
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    built = [*options, "--no-build-isolation", "-w", str(tmp_path / "wheels"), str(written)]
    site = tmp_path / "site"
    for command in (["wheel", *built], ["install", *options, "--target", str(site)]):
        wheels = [str(path) for path in (tmp_path / "wheels").glob("*.whl")]
        argv = [sys.executable, "-m", "pip", *command]
        argv += wheels if command[0] == "install" else []
        made = subprocess.run(argv, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
    work = tmp_path / "work"
    work.mkdir()

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        return subprocess.run(
            [python, *argv], cwd=work, env=environment, capture_output=True, text=True
        )

    return run


def test_what_a_new_package_tells_to_run_has_data_of_enough_clients(
    capsys: pytest.CaptureFixture[str], written: Path
) -> None:
    told = (capsys.readouterr().out + (written / "README.md").read_text()).splitlines()
    runs = [line for line in told if "fl-lightning fit" in line]
    # base alone has one client a round, of which methods show little.
    assert len(runs) == 4 and all("-c base -c data/digits " in line for line in runs)


@pytest.mark.slow
def test_a_new_package_works_like_ours(installed: Command, tmp_path: Path) -> None:
    listed = installed("-m", "fl_lightning", "configs").stdout
    assert "method/own_anchor" in listed and "pulled to where it ended itself" in listed
    help_ = installed("-m", "fl_lightning", "fit", "--method.help", "OwnAnchor")
    assert "--method.mu" in help_.stdout, help_.stderr
    tiny = ("-m", "fl_lightning", "fit", "-c", "base", "-c", "debug/tiny")
    run = installed(*tiny, "-c", "method/own_anchor", "--method.mu", "0.1")
    assert run.returncode == 0, run.stderr
    by_name = installed(*tiny, "--method", "OwnAnchor")
    assert by_name.returncode == 0, by_name.stderr
    for name in ("own_anchor", "ownanchor"):
        record = (tmp_path / f"work/runs/digits-{name}-1/run.json").read_text()
        assert '"title": "OwnAnchor"' in record and '"done"' in record
    mistaken = installed(*tiny, "--method", "OwnAncor")
    assert mistaken.returncode == 2 and "Did you mean 'OwnAnchor'" in mistaken.stderr


@pytest.mark.slow
def test_a_new_package_passes_check_and_its_own_test(installed: Command, written: Path) -> None:
    check = installed("-m", "fl_lightning", "check", "OwnAnchor")
    assert check.returncode == 0, check.stdout + check.stderr
    own = installed("-m", "pytest", "-q", "-p", "no:cacheprovider", str(written / "tests"))
    assert own.returncode == 0, own.stdout + own.stderr


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Own", "small letters"),
        ("class", "not a keyword of Python"),
        ("own--anchor", "single hyphens"),
        ("../own", "small letters"),
        ("scaffold", "there is a config method/scaffold already"),
        ("json", "Python has a module json"),
        ("own-anchor", "exists already"),
        ("proximal-term", "a class of this name exists already"),
    ],
)
def test_names_that_no_package_can_have(
    written: Path, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(written.rglob("*"))
    assert main(["new", name]) == 2
    assert f"fl-lightning: new {name}: " in (said := capsys.readouterr().err) and reason in said
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
    said = capsys.readouterr().err
    assert "the plugin broken_plugin is left out: ModuleNotFoundError" in said
    assert "the plugin not_there is left out" in said
