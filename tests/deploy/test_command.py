"""``fl-lightning deploy flower`` writes an app; what is mistyped is one paragraph."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from multiprocessing import AuthenticationError
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.__main__ import main
from fl_lightning.deploy.flower import resident
from fl_lightning.deploy.flower.app import AppSettings, NodeSettings
from fl_lightning.deploy.flower.client import Resident
from fl_lightning.deploy.flower.serve_site import FEWEST_SAMPLES, own_data, serve
from fl_lightning.deploy.transport import Message, packed, said, unpacked, words
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import Command, parse_yaml


def test_an_app_has_the_composed_config_and_two_files_of_five_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--trainer.max_epochs", "3", "--method.beta", "0.2"]
    given = ["base", "data/digits", "method/fedinit", *options]
    assert main(["deploy", "flower", *given, "--out", "my-app"]) == 0
    folder = tmp_path / "my-app"
    config = parse_yaml((folder / "config.yaml").read_text("utf-8"))
    assert config["trainer"]["max_epochs"] == 3
    assert config["method"][0]["init_args"]["beta"] == 0.2
    assert "rounds = 3" in (folder / "pyproject.toml").read_text("utf-8")
    assert parse_yaml((folder / "site.yaml").read_text("utf-8"))["data"]
    for name, end in (("server_app", "serve"), ("client_app", "answer")):
        text = (folder / "sites_app" / f"{name}.py").read_text("utf-8")
        statements = [line for line in text.split("\n")[1:] if line]
        assert f"from fl_lightning.deploy.flower import {end}" in statements
        assert len(statements) == 6
    assert "@" not in (folder / "README.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["flowr", "base"],
            "deploy flowr: not a command. Did you mean 'flower'? Accepted: flower, keys.",
        ),
        (["flower"], "deploy flower: which configs?"),
        (["flower", "data/digit"], "-c data/digit: this is neither a file nor a packaged config."),
        (["flower", "base", "--out", "a b"], "--out 'a b': an app's name is letters"),
        (["flower", "base", "--out", "."], "--out '.': an app's name is letters"),
        (["flower", "base", "--out", "there"], "--out there: this folder exists already"),
        (["flower", "base", "--method", "HessianLogger"], "HessianLogger needs the clients'"),
        (["flower", "base", "--model.paticipation", "1"], "--model.paticipation"),
    ],
)
def test_what_is_mistyped_is_one_paragraph_and_writes_nothing(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    assert main(["deploy", *arguments]) == 2
    text = capsys.readouterr().err.strip()
    assert said in text
    assert "\n" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


@pytest.mark.parametrize(
    ("settings", "given", "said"),
    [
        (NodeSettings, {"folder": "a"}, "either clients="),
        (
            NodeSettings,
            {"clients": "0", "site": "s.yaml", "folder": "a"},
            "clients='0', site='s.yaml'",
        ),
        (NodeSettings, {"clients": "0,3"}, "Given are folder='', clients='0,3'"),
        (AppSettings, {"timeout": 0}, "timeout=0 is not accepted; it has to be a number from 1"),
        (
            AppSettings,
            {"min-sites": True},
            "min-sites=True is not accepted; it has to be a number from 1",
        ),
        (AppSettings, {"rounds": "3"}, "rounds='3' is not accepted; it has to be a number from 1"),
    ],
)
def test_settings_of_nodes_and_runs_are_checked(
    settings: Callable[[object], object], given: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        settings(given)


OWN = "client: 1\ndata:\n  class_path: Digits\n  init_args: {num_clients: 3, batch_size: 4}\n"


def test_a_site_with_data_of_its_own_is_one_client_of_them(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(OWN, "utf-8")
    prepared = Command(config={"data": {"class_path": "FromTable", "init_args": {"test": 0.5}}})
    assert own_data(prepared, path) == ([1], FEWEST_SAMPLES)
    assert prepared.config["data"] == {"class_path": "Digits", "init_args": {"batch_size": 4}}
    path.write_text(f"{OWN}fewest_samples: 0\n", "utf-8")
    assert own_data(prepared, path) == ([1], 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "this file cannot be read"),
        ("data: Digits", r"it needs two keys, and has data: client \(this site's number: 0, 1"),
        (OWN.replace("1", "one"), "client='one' is not accepted; it has to be an integer from 0"),
        (OWN.replace("1", "-1"), "client=-1 is not accepted"),
        (f"{OWN}fewest_samples: yes", "fewest_samples=True is not accepted"),
        (f"{OWN}fewest_sample: 3", "it needs two keys, and has .*fewest_sample"),
        ("- 3", "it needs two keys, and has none"),
    ],
)
def test_what_is_wrong_in_a_site_yaml_is_told(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(UserError, match=said) as error:
        own_data(Command(), path)
    assert str(path) in str(error.value)


class Asks:
    """A post with these messages, and the answers to them."""

    def __init__(self, *asked: Message) -> None:
        self.asked = [*asked]
        self.told: list[str] = []

    def take(self) -> Message | None:
        return self.asked.pop(0) if self.asked else None

    def give(self, answer: Message) -> None:
        self.told.append(said(answer.arrays["text"]) if "text" in answer.arrays else answer.what)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (
            "age,size",
            "this site's columns lack dose, which the server's have: the run identifies them by",
        ),
        (
            "age,size,dose,more",
            "columns have 1 that the server's do not: the run identifies them by their positions",
        ),
        ("age,pulse", "columns lack size, dose, which the server's have, and have 1 that"),
        ("age,dose,size", "columns are age, dose, size, and the server's age, size, dose: the run"),
    ],
)
def test_columns_that_a_site_lacks_or_has_too_many_are_named(
    columns: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not their number, nor the network's sizes, which the server's columns made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    table = "path: {}.csv, target: outcome, classes: [0, 1], batch_size: 4, num_clients: 3"
    for name, header in (("server", "age,size,dose"), ("site", columns)):
        row = ",".join("1" for _ in header.split(","))
        lines = [f"{header},outcome", *(f"{row},{i % 2}" for i in range(12))]
        Path(f"{name}.csv").write_text("\n".join(lines) + "\n", "utf-8")
    data = "data:\n  class_path: FromTable\n  init_args: {" + table + "}\n"
    Path("site.yaml").write_text("client: 1\n" + data.replace("{}", "site"), "utf-8")
    Path("study.yaml").write_text(data.replace("{}", "server"), "utf-8")
    assert main(["deploy", "flower", "base", "study.yaml", "--out", "app"]) == 0
    names = {"column_names": words("age\nsize\ndose"), "class_names": words("0\n1")}
    hello = Message("hello", "1", {"run": 1, "m": 3}, {"shape": np.asarray([3]), **names})
    with pytest.raises(UserError, match=said):
        serve(Path("app"), Path("rows"), "", Path("site.yaml"), 1, Asks(hello))


@pytest.mark.slow
def test_a_node_holds_the_clients_of_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["deploy", "flower", "base", "--data.num_clients", "3", "--out", "app"]) == 0
    own = {"run": 1, "round": 0, "epoch": 0, "steps": 0, "max_epochs": 2, "total_weight": 1.0}
    arrays = {"mine": np.asarray([1]), "counted": np.asarray([-1])}
    asked = [Message("round", "1", {**own, "question": 8}, arrays) for _ in range(2)]
    post = Asks(asked[0], Message("hello", "1", {"run": 1, "m": 3}), asked[1])
    Path("rows").mkdir()
    serve(Path("app"), Path("rows"), "1", None, 2, post)
    lost, here, model = post.told
    # Its data are not compared before it is greeted. The message has no model.
    assert (lost, here) == ("lost", "here") and "the field w is missing" in model
    with pytest.raises(UserError, match="clients='1;2': give client IDs with commas"):
        serve(Path("app"), Path("rows"), "1;2", None, 2, Asks(Message("hello")))


@pytest.mark.slow
def test_the_process_of_a_message_does_not_import_torch() -> None:
    code = "import sys, fl_lightning.deploy.flower; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_why_a_sites_process_ends_is_told_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: Digits\n", "utf-8")
    place = str(tmp_path / "away.yaml")
    settings = NodeSettings({"site": place, "folder": str(tmp_path / "rows")})
    asked = packed(Message("hello", numbers={"run": 1, "m": 3}))
    before = os.umask(0o022)
    try:
        with pytest.raises(UserError, match=r"UserError in compose\.py") as error:
            Resident(tmp_path, settings, 1).ask(asked)
    finally:
        os.umask(before)
    log = tmp_path / "rows" / "site.log"
    assert str(log) in str(error.value) and "\n" not in str(error.value)
    assert log.stat().st_mode & 0o777 == 0o600


NOTES_ROUNDS = """
from pathlib import Path
from fl_lightning.models import Classifier

class Noting(Classifier):
    def configure_optimizers(self):
        Path(__file__).with_name("noted").write_text(str(self.trainer.max_epochs))
        return super().configure_optimizers()
"""


@pytest.mark.slow
def test_a_schedule_at_a_site_has_the_rounds_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the config: `flwr run` may have given others, and later others again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "noting.py").write_text(NOTES_ROUNDS, "utf-8")
    given = ["base", "data/digits", "--model.learner", "noting.Noting", "--data.num_clients", "3"]
    assert main(["deploy", "flower", *given, "--out", "app"]) == 0
    shutil.move(tmp_path / "noting.py", tmp_path / "app")
    settings = NodeSettings({"clients": "0", "folder": str(tmp_path / "rows")})
    try:
        for rounds in (7, 9):
            asked = packed(Message("hello", numbers={"run": 1, "m": 3}))
            answer = Resident(tmp_path / "app", settings, rounds).ask(asked)
            assert unpacked(answer, "0").what == "here"
            assert (tmp_path / "app" / "noted").read_text() == str(rounds)
    finally:
        with pytest.raises((AuthenticationError, EOFError)):
            resident.connect(tmp_path / "rows", b"another's key ends the process")
