"""What is shown of a run: what the learner shows, what is monitored, and of personal models their
own accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import callbacks as c
from fl_lightning.lab.cli.run_folder import RunCheckpoint, RunFolderWriter
from fl_lightning.lab.cli.run_record import RunRecord
from fl_lightning.machine.lightning import pl
from tests.callbacks.test_per_client_evaluation import data
from tests.helpers.learners import Lit, federated, trainer


class Showing(Lit):
    """Logs under names of its own, and shows two of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_hidden", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log_dict({"val_auc": 0.25 + self.current_epoch / 4, "val_far": 0.5}, prog_bar=True)
        self.log("val_loss", 3.0 - self.current_epoch)
        self.log("val_hidden", 1.0)


class Accurate(Lit):
    """As the packaged learners."""


def ran(
    folder: Path,
    learner: Any,
    *callbacks: Any,
    rounds: int = 2,
    folders: bool = True,
    **settings: Any,
) -> Any:
    """A run in ``folder`` as the command line makes it."""
    run = RunFolderWriter(folder, None, "{}", True)
    every: list[Any] = [c.FederatedProgressBar(), c.RunCard()]
    if folders:
        every = [run, *every, RunCheckpoint(run), RunRecord("{}", ["fl-lightning", "fit"])]
    shown = dict.fromkeys(("enable_progress_bar", "enable_checkpointing"), True)
    fit = trainer(rounds, [*every[:1], *callbacks, *every[1:]], default_root_dir=folder, **shown)
    fit.fit(module := federated(learner, **settings), data())
    return module


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("round ")]


def rows(text: str) -> dict[str, str]:
    """The closing table, spaces within it made one."""
    cells = [line.strip().split("  ", 1) for line in text.splitlines() if line.startswith("  ")]
    return {cell[0]: cell[1].strip() for cell in cells if len(cell) == 2}


@pytest.mark.parametrize("folders", [True, False])
def test_what_the_learner_shows_and_what_is_monitored(
    tmp_path: Path, capsys: Any, folders: bool
) -> None:
    ran(tmp_path, Showing(), pl.callbacks.EarlyStopping("val_loss", mode="min"), folders=folders)
    out, err = capsys.readouterr()
    told = [part.rpartition(" ")[0] for part in lines(err)[-1].split(" · ")[1:-1]]
    assert told == ["loss", "val_loss", "train_loss", "val_auc", "val_far"]
    assert "val_auc 0.5" in lines(err)[-1] and "hidden" not in err
    table = rows(out)
    assert table["val_auc"] == "last 0.5, best 0.5 (round 2)"
    assert table["val_loss"] == "last 2, best 2 (round 2)"
    assert table["val_far"] == "last 0.5"  # nothing says which way it is better
    assert "| val_auc | last 0.5, best 0.5 (round 2) |" in (tmp_path / "card.md").read_text()
    if folders:
        shown = json.loads((tmp_path / "run.json").read_text())["shown"]
        assert shown == ["val_loss", "train_loss", "val_auc", "val_far"]


@pytest.mark.parametrize("method", [c.PartialAveraging({"last": "never"}), c.AlternatingHead()])
def test_of_personal_models_their_own_accuracy_is_the_headline(
    tmp_path: Path, capsys: Any, method: Any
) -> None:
    module = ran(tmp_path, Accurate(), method, c.PerClientEvaluation(1))
    out, err = capsys.readouterr()
    own, of_nobody = (
        float(module.trainer.callback_metrics[name]) for name in ("clients/acc", "val/acc")
    )
    assert own != of_nobody
    assert f" · accuracy of clients {own:.4f} · " in lines(err)[-1] and " · accuracy 0" not in err
    table = rows(out)
    assert table["accuracy of clients"].startswith(f"last {own:.4f}, best ")
    assert "accuracy" not in table
    assert json.loads((tmp_path / "run.json").read_text())["shown"] == ["clients/acc"]


def test_until_personal_models_are_measured_the_console_has_the_models_accuracy(
    tmp_path: Path, capsys: Any
) -> None:
    ran(tmp_path, Accurate(), c.Gossip(), c.PerClientEvaluation(2), rounds=2, buffers="own")
    err = capsys.readouterr().err
    assert " · accuracy 0" in lines(err)[0] and "accuracy of clients" not in lines(err)[0]
    assert " · accuracy of clients 0" in lines(err)[1] and " · accuracy 0" not in lines(err)[1]


def test_of_one_model_for_all_it_is_the_servers(tmp_path: Path, capsys: Any) -> None:
    ran(tmp_path, Accurate(), c.PartialAveraging({"last": 2}), c.PerClientEvaluation(1), rounds=1)
    out, err = capsys.readouterr()
    assert " · accuracy 0" in err and "accuracy of clients" not in out + err
    assert "accuracy" in rows(out)
