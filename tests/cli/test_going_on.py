"""A run is gone on with, or left as it was: no completed round is lost, no advice leads nowhere."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

from tests.helpers.commands import typed
from tests.helpers.zygote import Cli, Zygote

FIT = typed(
    "fit -c base -c trainer/cpu --trainer.enable_progress_bar false", "--model.participation 1"
)
X = ("--trainer.default_root_dir", "x")


@pytest.fixture(scope="module")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runner = Cli(zygote, tmp_path_factory.mktemp("finished"), tmp_path_factory.mktemp("files"))
    result = runner(*FIT, *X, "--trainer.max_epochs", 2)
    assert result.returncode == 0, result.stderr
    return runner.folder / "x"


@pytest.fixture
def run(cli: Cli, finished: Path) -> Path:
    """A run of two rounds in ``x``, the second its best."""
    shutil.copytree(finished, cli.folder / "x")
    last, best = (cli.folder / "x/checkpoints" / name for name in ("last.ckpt", "best.ckpt"))
    assert torch.load(last, weights_only=True)["callbacks"]["RunCheckpoint"]["best_round"] == 1
    best.unlink()
    os.link(last, best)  # as the run itself left them
    return cli.folder / "x"


def rounds(run: Path) -> list[str]:
    with open(run / "metrics.csv") as file:
        return [row["round"] for row in csv.DictReader(file)]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


@pytest.mark.parametrize("damage", ["missing", "cut short"])
def test_without_last_the_advised_checkpoint_goes_on(cli: Cli, run: Path, damage: str) -> None:
    last = run / "checkpoints" / "last.ckpt"
    shutil.copy(last, run / "checkpoints" / "kept.ckpt")
    (run / "checkpoints" / "best.ckpt").unlink()
    whole = last.read_bytes()
    last.unlink()
    if damage == "cut short":
        last.write_bytes(whole[:3000])
    before = snapshot(run)
    result = cli("fit", "x", "--trainer.max_epochs", 3)
    assert result.returncode == 2 and "last.ckpt" in result.stderr
    assert snapshot(run) == before
    advice = "--ckpt_path x/checkpoints/kept.ckpt"
    assert advice in result.stderr
    result = cli("fit", "x", "--trainer.max_epochs", 3, *advice.split())
    assert result.returncode == 0, result.stderr
    assert rounds(run) == ["0", "1", "2"]


def test_a_failing_resume_leaves_the_config(cli: Cli, run: Path) -> None:
    config, metrics = (run / "config.yaml").read_text(), (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text("garbage\n1,2,3\n")
    result = cli("fit", "x", "--trainer.max_epochs", 3)
    assert result.returncode == 2 and "metrics.csv" in result.stderr
    (run / "metrics.csv").write_text(metrics)
    other = ("--model.server_optimizer", "Adam", "--model.server_optimizer.lr", "0.1")
    assert cli("fit", "x", "--trainer.max_epochs", 3, *other).returncode == 2
    assert (run / "config.yaml").read_text() == config
    assert cli("fit", "x", "--trainer.max_epochs", 3).returncode == 0
    assert "max_epochs: 3" in (run / "config.yaml").read_text(), (
        "a resume that worked writes its config"
    )
    assert sorted(os.listdir(run / "checkpoints")) == ["best.ckpt", "last.ckpt"]


def test_what_stopped_in_round_0_can_be_tried_again(cli: Cli) -> None:
    result = cli(*FIT, *X, "--trainer.max_epochs", 2, "--monitor", "val/accc")
    assert result.returncode == 2 and "'val/acc'" in result.stderr
    result = cli(*FIT, *X, "--trainer.max_epochs", 2)
    assert result.returncode == 0, result.stderr
    assert rounds(cli.folder / "x") == ["0", "1"]


DIES = """
import os
from pytorch_lightning import Callback
class Dies(Callback):
    def on_train_epoch_start(self, *_):
        os._exit(9)
"""


def test_a_resume_that_completes_no_round_keeps_later_rounds(cli: Cli) -> None:
    lowest = ("--monitor", "val/acc", "--monitor_mode", "min")
    assert cli(*FIT, *X, *lowest, "--trainer.max_epochs", 3).returncode == 0
    best = cli.folder / "x/checkpoints/best.ckpt"
    assert torch.load(best, weights_only=True)["callbacks"]["RunCheckpoint"]["best_round"] == 0
    (cli.folder / "dies.py").write_text(DIES)
    result = cli("fit", "x", "--ckpt_path", best, "--trainer.callbacks+", "dies.Dies")
    assert result.returncode == 9, result.stderr
    result = cli("fit", "x", "--trainer.max_epochs", 4)
    assert result.returncode == 0, result.stderr
    assert rounds(cli.folder / "x") == ["0", "1", "2", "3"]
    result = cli("fit", "x", "--trainer.max_epochs", 2, "--ckpt_path", best)
    assert result.returncode == 0, result.stderr
    assert rounds(cli.folder / "x") == ["0", "1"]


DIES_IN_VALIDATION = DIES.replace("on_train_epoch_start", "on_validation_start")


def test_a_kill_before_a_resumed_round_has_its_checkpoint_leaves_no_round_without_a_row(
    cli: Cli,
) -> None:
    lowest = ("--monitor", "val/acc", "--monitor_mode", "min")
    assert cli(*FIT, *X, *lowest, "--trainer.max_epochs", 3).returncode == 0
    (cli.folder / "dies.py").write_text(DIES_IN_VALIDATION)
    best = cli.folder / "x/checkpoints/best.ckpt"
    result = cli("fit", "x", "--ckpt_path", best, "--trainer.callbacks+", "dies.Dies")
    assert result.returncode == 9, result.stderr
    result = cli("fit", "x", "--trainer.max_epochs", 4)
    assert result.returncode == 0, result.stderr
    assert rounds(cli.folder / "x") == ["0", "1", "2", "3"]


def test_a_monitored_metric_may_be_measured_for_the_first_time_in_a_later_round(cli: Cli) -> None:
    logger = ("--method+", "GlobalLossLogger", "--method.every_n_rounds", 2)
    result = cli(*FIT, *X, *logger, "--monitor", "global/train_loss", "--trainer.max_epochs", 3)
    assert result.returncode == 0, result.stderr
    assert "best.ckpt is not kept" not in result.stdout
    best = torch.load(cli.folder / "x/checkpoints/best.ckpt", weights_only=True)
    assert best["callbacks"]["RunCheckpoint"]["best_round"] in (1, 2)
    other = ("--trainer.default_root_dir", "y", "--monitor", "global/train_los")
    result = cli(*FIT, *other, *logger, "--trainer.max_epochs", 3)
    assert result.returncode == 2 and "'global/train_loss'" in result.stderr


@pytest.mark.parametrize("number", [1, 2])
def test_a_run_without_checkpoints_is_not_overwritten(cli: Cli, number: int) -> None:
    off = ("--trainer.enable_checkpointing", "false")
    assert cli(*FIT, *X, *off, "--trainer.max_epochs", number).returncode == 0
    before = snapshot(cli.folder)
    for argv in ((*FIT, *X), ("fit", "x")):
        result = cli(*argv)
        assert result.returncode == 2 and "another folder" in result.stderr
    assert snapshot(cli.folder) == before


@pytest.mark.parametrize("more", [(), ("--trainer.max_epochs", 1), ("--trainer.max_epochs", 0)])
def test_a_finished_run_says_that_nothing_is_left(
    cli: Cli, run: Path, more: tuple[object, ...]
) -> None:
    before = snapshot(run)
    result = cli("fit", "x", *more)
    assert result.returncode == 0, result.stderr
    told = "2 rounds are done already; --trainer.max_epochs above 2 goes on"
    assert told in result.stdout
    # And what it has reached, as its closing table did.
    assert re.search(r"^accuracy: last 0\.\d+", result.stdout, re.MULTILINE)
    assert snapshot(run) == before


@pytest.mark.parametrize("status", ["running", "failed"])
def test_killed_after_its_last_round_is_done(cli: Cli, run: Path, status: str) -> None:
    record = json.loads((run / "run.json").read_text())
    # As a kill just before the end leaves it; a sweep then writes "failed".
    (run / "run.json").write_text(json.dumps(record | {"status": status, "ended": None}))
    result = cli("fit", "x")
    assert result.returncode == 0 and "recorded as done now" in result.stdout
    now = json.loads((run / "run.json").read_text())
    assert now.pop("ended") and now == {key: record[key] for key in now}
    assert set(now) == set(record) - {"ended"}


@pytest.mark.parametrize(
    "there",
    [
        {"status": "failed"},  # by an error, which has a time
        {"status": "running", "ended": None, "rounds": 3},  # killed before its last round
        {"status": "running", "ended": None, "rounds": -1},  # without end
    ],
)
def test_what_lacks_rounds_or_failed_is_not_called_done(
    cli: Cli, run: Path, there: dict[str, object]
) -> None:
    record = json.loads((run / "run.json").read_text()) | there
    (run / "run.json").write_text(json.dumps(record))
    assert cli("fit", "x", "--trainer.max_epochs", 2).returncode == 0
    assert json.loads((run / "run.json").read_text()) == record


@pytest.mark.parametrize(
    ("option", "other", "told"),
    [
        (
            "--model.learner.network.sizes",
            "[64,5,10]",
            "model.learner.network.sizes.1: 64 then, 5 now",
        ),
        ("--data.val_fraction", 0.25, "data.val_fraction: 0.0 then, 0.25 now"),
        ("--data.augment", "true", "data.augment: False then, True now"),
        ("--data.partition", "Contiguous", "data's partition: "),
        ("--trainer.precision", "64-true", "precision: 32-true then, 64-true now"),
    ],
)
def test_other_settings_are_refused(
    cli: Cli, run: Path, option: str, other: object, told: str
) -> None:
    before = snapshot(run)
    more = ("--trainer.max_epochs", 3, option, other)
    result = cli("fit", "x", *more)
    assert result.returncode == 2 and told in result.stderr, result.stderr
    assert snapshot(run) == before
    if option in ("--data.augment", "--trainer.precision"):
        assert cli("fit", "x", *more, "--model.strict_resume", "false").returncode == 0


def test_where_data_and_classes_lie_may_change(cli: Cli, run: Path) -> None:
    more = ("--data.root", cli.folder / "elsewhere", "--data.eval_batch_size", 10)
    # Another path of the same class, and the partition and seed that are the default.
    more += ("--model.learner.network", "fl_lightning.models.mlp.MLP")
    more += ("--model.learner.network.sizes", "[64,64,10]")
    more += ("--data.partition", "IID", "--data.seed", 0)
    result = cli("fit", "x", "--trainer.max_epochs", 3, *more)
    assert result.returncode == 0, result.stderr
    assert rounds(run) == ["0", "1", "2"]


def test_going_on_with_other_settings_is_of_one_command(cli: Cli, run: Path) -> None:
    other = ("--data.augment", "true", "--model.strict_resume", "false")
    assert cli("fit", "x", "--trainer.max_epochs", 3, *other).returncode == 0
    result = cli("fit", "x", "--trainer.max_epochs", 4, "--data.augment", "false")
    assert result.returncode == 2 and "data.augment: True then" in result.stderr


def test_a_run_is_found_from_within_and_through_links(cli: Cli, run: Path) -> None:
    link = cli.folder / "link.ckpt"
    link.symlink_to(run / "checkpoints/last.ckpt")
    new = ("--trainer.default_root_dir", "y", "--trainer.max_epochs", 3)
    result = cli(*FIT, *new, "--ckpt_path", link, "--data.augment", "true")
    assert result.returncode == 2 and "data.augment: False then" in result.stderr
    # A config.yaml that lies above a checkpoint, and is no run's.
    (cli.folder / "kept").mkdir()
    shutil.copy(run / "checkpoints/last.ckpt", cli.folder / "kept")
    (cli.folder / "config.yaml").write_text("data: {class_path: Digits}")
    result = cli(*FIT, *new, "--ckpt_path", "kept/last.ckpt")
    assert result.returncode == 0, result.stderr


def test_a_table_may_move_and_be_no_other(cli: Cli) -> None:
    rows = "".join(f"{i % 7},{i % 5},{'ab'[i % 2]}\n" for i in range(200))
    (cli.folder / "other").mkdir()
    for place in ("t.csv", "test.csv", "t2.csv", "other/t.csv"):
        (cli.folder / place).write_text("u,v,y\n" + rows)
    table = ("--data", "FromTable", "--data.target", "y", "--data.num_clients", 5)
    table += ("--data.path", "t.csv", "--data.test", "test.csv")
    first = cli(*FIT, *X, "--trainer.max_epochs", 1, *table)
    assert first.returncode == 0, first.stderr
    moved = ("--data.path", "other/t.csv", "--data.test", "./test.csv")
    assert cli("fit", "x", "--trainer.max_epochs", 2, *moved).returncode == 0
    result = cli("fit", "x", "--trainer.max_epochs", 3, "--data.path", "t2.csv")
    assert result.returncode == 2 and "data.path: t.csv then, t2.csv now" in result.stderr


BORED = """
trainer:
  max_epochs: 9
  callbacks:
    - class_path: EarlyStopping
      init_args: {monitor: val/acc, mode: max, LIMIT}
"""


@pytest.mark.parametrize(
    "limit",
    ["patience: 2, min_delta: 1.0", "stopping_threshold: 0.8", "stopping_threshold: 0.0"],
)
def test_a_run_that_early_stopping_ended_stays_ended(cli: Cli, limit: str) -> None:
    (cli.folder / "bored.yaml").write_text(BORED.replace("LIMIT", limit))
    assert cli(*FIT, "-c", "bored.yaml", *X).returncode == 0
    run = cli.folder / "x"
    there = rounds(run)
    record = json.loads((run / "run.json").read_text())
    assert 0 < len(there) < 9 and record["status"] == "done"
    # As a kill after its last checkpoint leaves it.
    (run / "run.json").write_text(json.dumps(record | {"status": "running", "ended": None}))
    again = cli("fit", "x")
    assert again.returncode == 0 and rounds(run) == there
    assert f"EarlyStopping ended this run by val/acc after {len(there)} rounds" in again.stderr
    assert "It was killed after its last round. This fit wrote what the end" in again.stdout
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    on = cli("fit", "x", "--trainer.callbacks", "null")
    assert on.returncode == 0 and len(rounds(run)) == 9


def test_an_argument_without_a_text_does_not_end_a_run(cli: Cli) -> None:
    """StochasticWeightAveraging has a device as default, which no config can spell."""
    averaging = ("--trainer.callbacks+", "StochasticWeightAveraging")
    averaging += ("--trainer.callbacks.swa_lrs", "0.1", "--trainer.callbacks.swa_epoch_start", "1")
    assert cli(*FIT, *X, "--trainer.max_epochs", 2, *averaging).returncode == 0
    on = cli("fit", "x", "--trainer.max_epochs", 3)
    assert on.returncode == 0, on.stderr
    assert rounds(cli.folder / "x") == ["0", "1", "2"]


@pytest.mark.parametrize("limit", ["patience: 0", "patience: 9"])
def test_a_run_that_early_stopping_did_not_end_goes_on(cli: Cli, limit: str) -> None:
    (cli.folder / "bored.yaml").write_text(BORED.replace("LIMIT", limit))
    assert cli(*FIT, "-c", "bored.yaml", *X, "--trainer.max_epochs", 1).returncode == 0
    on = cli("fit", "x", "--trainer.max_epochs", 2)
    assert on.returncode == 0 and "EarlyStopping" not in on.stderr
    assert rounds(cli.folder / "x") == ["0", "1"]


def test_early_stopping_waits_for_min_epochs_after_a_resume_too(cli: Cli) -> None:
    (cli.folder / "bored.yaml").write_text(BORED.replace("LIMIT", "stopping_threshold: 0.0"))
    least = ("--trainer.min_epochs", 3)
    assert cli(*FIT, "-c", "bored.yaml", *X, *least, "--trainer.max_epochs", 2).returncode == 0
    on = cli("fit", "x", "--trainer.max_epochs", 9)
    assert on.returncode == 0 and "EarlyStopping" not in on.stderr
    assert rounds(cli.folder / "x") == ["0", "1", "2"]
    again = cli("fit", "x")
    assert "EarlyStopping ended this run by val/acc after 3 rounds" in again.stderr
    assert rounds(cli.folder / "x") == ["0", "1", "2"]


def test_nothing_left_to_do_makes_no_run_elsewhere(cli: Cli, run: Path) -> None:
    there = ("--trainer.default_root_dir", "y", "--ckpt_path", run / "checkpoints/last.ckpt")
    assert cli(*FIT, *there, "--trainer.max_epochs", 2).returncode == 0
    assert not (cli.folder / "y/checkpoints").exists()


def test_a_run_that_was_killed_on_its_way_says_how_far_it_was_to_go(cli: Cli, run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    killed = {"status": "running", "ended": None, "rounds": 5}
    (run / "run.json").write_text(json.dumps(record | killed))
    assert "on its way to 5 rounds" in cli("fit", "x").stdout


def test_resume_goes_on_as_fit_does(cli: Cli, run: Path) -> None:
    result = cli("resume", "x", "--trainer.max_epochs", 3)
    assert result.returncode == 0 and rounds(run) == ["0", "1", "2"], result.stderr
    for wrong in ([], ["--trainer.max_epochs", 3]):
        refused = cli("resume", *wrong)
        assert refused.returncode == 2 and "give the folder of a run" in refused.stderr
