"""A run is gone on with, or left as it was: no completed round is lost, no advice leads nowhere."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.commands import QUIET_FIT, done, rounds, said, snapshot, typed
from tests.helpers.zygote import Cli, Zygote

FIT = (*QUIET_FIT, "--model.participation", "1")
X = ("--trainer.default_root_dir", "x")
MORE = ("--trainer.max_epochs", 3)


@pytest.fixture(scope="module")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runner = Cli(zygote, tmp_path_factory.mktemp("finished"), tmp_path_factory.mktemp("files"))
    done(runner(*FIT, *X, "--trainer.max_epochs", 2))
    return runner.folder / "x"


@pytest.fixture
def run(cli: Cli, finished: Path) -> Path:
    """A run of two rounds in ``x``, the second its best."""
    shutil.copytree(finished, cli.folder / "x")
    last, best = (cli.folder / "x/checkpoints" / name for name in ("last.ckpt", "best.ckpt"))
    assert best_round(last) == 1
    best.unlink()
    os.link(last, best)  # as the run itself left them
    return cli.folder / "x"


def best_round(checkpoint: Path) -> int:
    saved = torch.load(checkpoint, weights_only=True)["callbacks"]["RunCheckpoint"]
    return int(saved["best_round"])


def edited(run: Path, **changes: Any) -> dict[str, Any]:
    """A run.json with other entries, as a kill leaves it."""
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | changes))
    return dict(record | changes)


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
    advice = "--ckpt_path x/checkpoints/kept.ckpt"
    said(cli("fit", "x", *MORE), "last.ckpt", advice)
    assert snapshot(run) == before
    done(cli("fit", "x", *MORE, *advice.split()))
    assert rounds(run) == ["0", "1", "2"]


def test_a_failing_resume_leaves_the_config(cli: Cli, run: Path) -> None:
    config, metrics = (run / "config.yaml").read_text(), (run / "metrics.csv").read_text()
    (run / "metrics.csv").write_text("garbage\n1,2,3\n")
    said(cli("fit", "x", *MORE), "metrics.csv")
    (run / "metrics.csv").write_text(metrics)
    other = ("--model.server_optimizer", "Adam", "--model.server_optimizer.lr", "0.1")
    said(cli("fit", "x", *MORE, *other), "other settings")
    assert (run / "config.yaml").read_text() == config
    done(cli("fit", "x", *MORE))
    # A resume that worked writes its config.
    assert "max_epochs: 3" in (run / "config.yaml").read_text()
    assert sorted(os.listdir(run / "checkpoints")) == ["best.ckpt", "last.ckpt"]


def test_what_stopped_in_round_0_can_be_tried_again(cli: Cli) -> None:
    said(cli(*FIT, *X, *MORE, "--monitor", "val/accc"), "'val/acc'")
    done(cli(*FIT, *X, *MORE))
    assert rounds(cli.folder / "x") == ["0", "1", "2"]


DIES = """
import os
from pytorch_lightning import Callback
class Dies(Callback):
    def HOOK(self, *_):
        os._exit(9)
"""


@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_validation_start"])
def test_a_kill_in_a_resumed_round_leaves_no_round_without_a_row(cli: Cli, hook: str) -> None:
    lowest = ("--monitor", "val/acc", "--monitor_mode", "min")
    done(cli(*FIT, *X, *lowest, *MORE))
    best = cli.folder / "x/checkpoints/best.ckpt"
    assert best_round(best) == 0
    (cli.folder / "dies.py").write_text(DIES.replace("HOOK", hook))
    result = cli("fit", "x", "--ckpt_path", best, "--trainer.callbacks+", "dies.Dies")
    assert result.returncode == 9, result.stderr
    done(cli("fit", "x", "--trainer.max_epochs", 4))
    assert rounds(cli.folder / "x") == ["0", "1", "2", "3"]
    done(cli("fit", "x", "--trainer.max_epochs", 2, "--ckpt_path", best))
    assert rounds(cli.folder / "x") == ["0", "1"]


def test_a_monitored_metric_may_be_measured_for_the_first_time_in_a_later_round(cli: Cli) -> None:
    logger = ("--method+", "GlobalLossLogger", "--method.every_n_rounds", 2, *MORE)
    result = done(cli(*FIT, *X, *logger, "--monitor", "global/train_loss"))
    assert "best.ckpt is not kept" not in result.stdout
    assert best_round(cli.folder / "x/checkpoints/best.ckpt") in (1, 2)
    other = ("--trainer.default_root_dir", "y", "--monitor", "global/train_los")
    said(cli(*FIT, *other, *logger), "'global/train_loss'")


def test_a_run_without_checkpoints_is_not_overwritten(cli: Cli) -> None:
    off = ("--trainer.enable_checkpointing", "false")
    done(cli(*FIT, *X, *off, "--trainer.max_epochs", 1))
    before = snapshot(cli.folder)
    for argv in ((*FIT, *X), ("fit", "x")):
        said(cli(*argv), "another folder")
    assert snapshot(cli.folder) == before


def test_a_finished_run_says_that_nothing_is_left(cli: Cli, run: Path) -> None:
    before = snapshot(run)
    for more in ((), ("--trainer.max_epochs", 1), ("--trainer.max_epochs", 0)):
        told = done(cli("fit", "x", *more))
        assert "2 rounds are done already; --trainer.max_epochs above 2 goes on" in told.stdout
    assert snapshot(run) == before
    there = ("--trainer.default_root_dir", "y", "--ckpt_path", run / "checkpoints/last.ckpt")
    done(cli(*FIT, *there, "--trainer.max_epochs", 2))
    assert not (cli.folder / "y/checkpoints").exists()


@pytest.mark.parametrize("status", ["running", "failed"])
def test_killed_after_its_last_round_is_done(cli: Cli, run: Path, status: str) -> None:
    # As a kill just before the end leaves it; a sweep then writes "failed".
    record = edited(run, status=status, ended=None)
    assert "It was killed after its last round" in done(cli("fit", "x")).stdout
    now = json.loads((run / "run.json").read_text())
    again = {name: now[name] for name in ("ended", "command")}
    assert now["ended"] and now == record | {"status": "done"} | again


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
    record = edited(run, **there)
    done(cli("fit", "x", "--trainer.max_epochs", 2))
    assert json.loads((run / "run.json").read_text()) == record


OTHER = [
    ("--data.augment true", "data.augment: False then, True now"),
    ("--data.partition Contiguous", "data's partition: "),
    ("--model.learner.lr 0.3", "model.learner.lr: 0.1 then, 0.3 now"),
    ("--trainer.precision 64-true", "precision: 32-true then, 64-true now"),
    ("--model.learner.network.sizes [64,5,10]", "size mismatch for network.layers.0.weight"),
]


@pytest.mark.parametrize(("argv", "told"), OTHER)
def test_other_settings_are_refused(cli: Cli, run: Path, argv: str, told: str) -> None:
    before = snapshot(run)
    result = cli("fit", "x", *MORE, *typed(argv))
    assert result.returncode == 2 and told in result.stderr, result.stderr
    assert snapshot(run) == before
    if "augment" in argv:
        # Going on with other settings is of one command.
        done(cli("fit", "x", *MORE, *typed(argv, "--model.strict_resume false")))
        back = cli("fit", "x", "--trainer.max_epochs", 4, "--data.augment", "false")
        assert back.returncode == 2 and "data.augment: True then" in back.stderr


def test_where_data_and_classes_lie_may_change(cli: Cli, run: Path) -> None:
    more = ("--data.root", cli.folder / "elsewhere", "--data.eval_batch_size", 10)
    # Another path of the same class, and the partition and seed that are the default.
    more += ("--model.learner.network", "fl_lightning.models.small.MLP")
    more += ("--model.learner.network.sizes", "[64,64,10]")
    more += ("--data.partition", "IID", "--data.seed", 0)
    done(cli("fit", "x", *MORE, *more))
    assert rounds(run) == ["0", "1", "2"]
    # A checkpoint knows its settings itself, wherever it lies.
    (cli.folder / "kept").mkdir()  # FedAvg has no states beside it
    shutil.copy(run / "checkpoints/last.ckpt", cli.folder / "kept/last.ckpt")
    new = (*FIT, "--trainer.default_root_dir", "y", "--trainer.max_epochs", 4, "--ckpt_path")
    result = cli(*new, "kept/last.ckpt", "--data.augment", "true")
    assert result.returncode == 2 and "data.augment: False then" in result.stderr
    done(cli(*new, "kept/last.ckpt"))


def test_a_table_may_move_and_be_no_other(cli: Cli) -> None:
    rows = "".join(f"{i % 7},{i % 5},{'ab'[i % 2]}\n" for i in range(200))
    (cli.folder / "other").mkdir()
    for place in ("t.csv", "test.csv", "t2.csv", "other/t.csv"):
        (cli.folder / place).write_text("u,v,y\n" + rows)
    table = typed("--data FromTable --data.target y --data.num_clients 5")
    table += typed("--data.path t.csv --data.test test.csv")
    done(cli(*FIT, *X, "--trainer.max_epochs", 1, *table))
    moved = ("--data.path", "other/t.csv", "--data.test", "./test.csv")
    done(cli("fit", "x", "--trainer.max_epochs", 2, *moved))
    result = cli("fit", "x", *MORE, "--data.path", "t2.csv")
    assert result.returncode == 2 and "data.path: t.csv then, t2.csv now" in result.stderr


BORED = """
trainer:
  max_epochs: 9
  callbacks:
    - class_path: EarlyStopping
      init_args: {monitor: val/acc, mode: max, LIMIT}
"""


@pytest.mark.parametrize("limit", ["patience: 2, min_delta: 1.0", "stopping_threshold: 0.0"])
def test_a_run_that_early_stopping_ended_stays_ended(cli: Cli, limit: str) -> None:
    (cli.folder / "bored.yaml").write_text(BORED.replace("LIMIT", limit))
    done(cli(*FIT, "-c", "bored.yaml", *X))
    run = cli.folder / "x"
    there = rounds(run)
    assert 0 < len(there) < 9
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    edited(run, status="running", ended=None)
    again = done(cli("fit", "x"), "It was killed after its last round")
    assert rounds(run) == there
    assert f"EarlyStopping ended this run by val/acc after {len(there)} rounds" in again.stderr
    assert json.loads((run / "run.json").read_text())["status"] == "done"
    done(cli("fit", "x", "--trainer.callbacks", "null"))
    assert len(rounds(run)) == 9


def test_a_run_that_early_stopping_did_not_end_goes_on(cli: Cli) -> None:
    (cli.folder / "bored.yaml").write_text(BORED.replace("LIMIT", "patience: 0"))
    done(cli(*FIT, "-c", "bored.yaml", *X, "--trainer.max_epochs", 1))
    on = done(cli("fit", "x", "--trainer.max_epochs", 2))
    assert "EarlyStopping" not in on.stderr and rounds(cli.folder / "x") == ["0", "1"]


def test_early_stopping_waits_for_min_epochs_after_a_resume_too(cli: Cli) -> None:
    (cli.folder / "bored.yaml").write_text(BORED.replace("LIMIT", "stopping_threshold: 0.0"))
    least = ("--trainer.min_epochs", 3, "--trainer.max_epochs", 2)
    done(cli(*FIT, "-c", "bored.yaml", *X, *least))
    on = done(cli("fit", "x", "--trainer.max_epochs", 9))
    assert "EarlyStopping" not in on.stderr and rounds(cli.folder / "x") == ["0", "1", "2"]
    done(cli("fit", "x"), "EarlyStopping ended this run by val/acc after 3 rounds")
    assert rounds(cli.folder / "x") == ["0", "1", "2"]


def test_an_argument_without_a_text_does_not_end_a_run(cli: Cli) -> None:
    """StochasticWeightAveraging has a device as default, Timer a member of an Enum."""
    averaging = typed("--trainer.callbacks+ StochasticWeightAveraging")
    averaging += typed("--trainer.callbacks.swa_lrs 0.1 --trainer.callbacks.swa_epoch_start 1")
    done(cli(*FIT, *X, "--trainer.max_epochs", 2, *averaging, "--trainer.callbacks+", "Timer"))
    assert "interval: step" in (cli.folder / "x/config.yaml").read_text()
    done(cli("fit", "x", *MORE))
    assert rounds(cli.folder / "x") == ["0", "1", "2"]


def test_resume_goes_on_as_fit_does(cli: Cli, run: Path) -> None:
    done(cli("resume", "x", *MORE))
    assert rounds(run) == ["0", "1", "2"]
    for wrong in ((), MORE):
        said(cli("resume", *wrong), "give the folder of a run")
