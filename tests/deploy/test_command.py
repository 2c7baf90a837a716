"""``fl-lightning deploy flower`` writes an app; what is mistyped is one paragraph."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fl_lightning.__main__ import main
from fl_lightning.deploy.flower import link
from fl_lightning.deploy.flower.app_settings import AppSettings, NodeSettings
from fl_lightning.deploy.flower.client import Resident
from fl_lightning.deploy.flower.serve_site import SiteLimits, own_data, serve
from fl_lightning.deploy.transport import Message, packed, said, unpacked, words
from fl_lightning.errors import UserError
from fl_lightning.lab.cli.compose import Command, parse_yaml
from fl_lightning.models import ImageClassifier


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


def test_an_app_keeps_strict_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["base", "data/digits", "--model.strict_resume", "false"]
    assert main(["deploy", "flower", *given, "--out", "app"]) == 0
    config = parse_yaml((tmp_path / "app" / "config.yaml").read_text("utf-8"))
    assert config["model"]["strict_resume"] is False


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
    ("given", "said"),
    [
        ({"folder": "a"}, "give either clients="),
        ({"clients": "0", "site": "s.yaml", "folder": "a"}, "given are clients='0' and site="),
        ({"clients": "0,3"}, "folder=.* is missing"),
        ({"clients": True, "folder": "a"}, "clients=True: give text"),
    ],
)
def test_settings_of_a_node_are_checked(given: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        NodeSettings(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"timeout": 0}, "timeout=0: give seconds above 0"),
        ({"min-sites": 0}, "min-sites=0: give at least 1"),
        ({"rounds": "3"}, "rounds='3': accepted is a whole number"),
        ({"folder": 3}, "folder=3: accepted is a folder's name"),
    ],
)
def test_settings_of_a_run_are_checked(given: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        AppSettings(given)


OWN = "client: 1\ndata:\n  class_path: Digits\n  init_args: {num_clients: 3, batch_size: 4}\n"


def test_a_site_with_data_of_its_own_is_one_client_of_them(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(OWN, "utf-8")
    prepared = Command(config={"data": {"class_path": "FromTable", "init_args": {"test": 0.5}}})
    assert own_data(prepared, path) == (1, SiteLimits())
    assert prepared.config["data"] == {"class_path": "Digits", "init_args": {"batch_size": 4}}
    path.write_text(f"{OWN}fewest_samples: 0\n", "utf-8")
    assert own_data(prepared, path) == (1, SiteLimits(fewest_samples=0))
    path.write_text(f"{OWN}most_rounds: 5\n", "utf-8")
    assert own_data(prepared, path) == (1, SiteLimits(most_rounds=5))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "this file cannot be read"),
        (
            "data: Digits",
            r"it holds data; accepted are two keys: client \(this site's number\) and data",
        ),
        (OWN.replace("1", "one"), "client is 'one'; give this site's number"),
        (OWN.replace("1", "-1"), "client is -1; give this site's number"),
        (f"{OWN}fewest_samples: -1", "fewest_samples is -1; give a whole number"),
        (f"{OWN}fewest_samples: yes", "fewest_samples is True; give a whole number"),
        (f"{OWN}most_rounds: 0", "most_rounds is 0; give the number of rounds"),
        (f"{OWN}fewest_sample: 3", "it holds client, data, fewest_sample; accepted are two keys"),
        ("- 3", "it holds something else"),
    ],
)
def test_what_is_wrong_in_a_site_yaml_is_told(text: str | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    if text is not None:
        path.write_text(text, "utf-8")
    with pytest.raises(UserError, match=said) as error:
        own_data(Command(), path)
    assert str(path) in str(error.value)


class Asked:
    """A post with one message: the server's first, whose table has three columns."""

    def take(self) -> Message | None:
        names = {"column_names": words("age\nsize\ndose"), "class_names": words("0\n1")}
        shape = np.asarray([3], np.int64)
        return Message("hello", "1", {"run": 1, "m": 3}, {"shape": shape, **names})

    def give(self, answer: Message) -> None:
        raise AssertionError(answer)


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
            "columns have more, which the server's do not: the run identifies them",
        ),
        ("age,pulse", "columns lack size, dose, which the server's have, and have pulse, which"),
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
    with pytest.raises(UserError, match=said):
        serve(Path("app"), Path("rows"), "", Path("site.yaml"), 1, Asked())


class Asks:
    """A post with a hello and two rounds, each of which sets one number of the learner."""

    def __init__(self) -> None:
        own = {"run": 1, "round": 0, "epoch": 0, "steps": 0, "max_epochs": 2, "whole": 1}
        arrays = {"mine": np.asarray([1]), "counted": np.asarray([-1])}
        self.asked = [Message("hello", "1", {"run": 1, "m": 3})]
        for name in ("heat", "cold"):
            numbers = {**own, "total_weight": 1.0, f"learner/{name}": 2.0}
            self.asked.append(Message("round", "1", numbers, arrays))
        self.told: list[str] = []

    def take(self) -> Message | None:
        return self.asked.pop(0) if self.asked else None

    def give(self, answer: Message) -> None:
        self.told.append(said(answer.arrays["text"]) if "text" in answer.arrays else answer.what)


@pytest.mark.slow
def test_a_number_that_the_learner_s_class_names_may_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ImageClassifier, "sent_to_sites", ("heat",), raising=False)
    assert main(["deploy", "flower", "base", "--data.num_clients", "3", "--out", "app"]) == 0
    post = Asks()
    serve(Path("app"), Path("rows"), "1", None, 2, post)
    here, heat, cold = post.told
    assert here == "here"
    # The message has no model, which the site checks after the learner's numbers.
    assert "the field w " in heat and "the server asks for another cold" in cold


@pytest.mark.slow
def test_the_process_of_a_message_does_not_import_torch() -> None:
    code = "import sys, fl_lightning.deploy.flower; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.slow
def test_why_the_process_of_a_site_ends_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: Digits\n", "utf-8")
    place = str(tmp_path / "away.yaml")
    settings = NodeSettings({"site": place, "folder": str(tmp_path / "rows")})
    asked = packed(Message("hello", numbers={"run": 1, "m": 3}))
    with pytest.raises(UserError, match=r"UserError in serve_site\.py") as error:
        Resident(tmp_path, settings, 1).ask(asked)
    assert str(tmp_path / "rows" / "site.log") in str(error.value)
    assert "\n" not in str(error.value)


NOTES_ROUNDS = """
from pathlib import Path
from fl_lightning.models import ImageClassifier

class Noting(ImageClassifier):
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
        with link.connect(tmp_path / "rows") as connection:
            connection.sendall(bytes(link.KEY_BYTES))  # another's key ends the process
