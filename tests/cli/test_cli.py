"""The command line as a user meets it.

Real processes, their output, their exit status, what they leave.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from fl_lightning import load
from fl_lightning.__main__ import main
from fl_lightning.lab.cli.compose import merge, packaged, prepare, read
from fl_lightning.models import ImageClassifier
from tests.helpers.commands import typed
from tests.helpers.zygote import Cli, Zygote

FIT = ("fit", "-c", "base", "-c", "trainer/cpu", "--trainer.enable_progress_bar", "false")
SKEWED = (
    *FIT,
    *typed(
        "-c method/fedinit --model.participation 1 --data.partition Dirichlet",
        "--data.partition.alpha 0.1",
    ),
)
LEARNER = """
import os, signal, time, torch, pytorch_lightning as pl
from pathlib import Path

class Lit(pl.LightningModule):
    def __init__(self, width: int = 4, sleep: float = 0.0, fault: str = "", drop: float = 0.0):
        super().__init__()
        layers = torch.nn.Linear(64, width), torch.nn.Linear(width, 10)
        layers = (layers[0], torch.nn.Dropout(drop), layers[1]) if drop else layers
        self.net = torch.nn.Sequential(torch.nn.Flatten(), *layers)
        self.sleep, self.fault = sleep, fault
    def training_step(self, batch, batch_idx):
        if Path("x/config.yaml").exists():  # before that a step is tried
            Path("training").touch()
        time.sleep(self.sleep)
        if self.fault == "raise":
            raise KeyError("mine")
        if self.fault == "kill" and self.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss * float("nan") if self.fault == "nan" else loss
    def validation_step(self, batch, batch_idx):
        self.log("val/quality", -torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def printed(cli: Cli, *argv: object, **environment: str) -> Any:
    result = cli("fit", *argv, "--print_config", env=environment)
    assert result.returncode == 0, result.stderr
    return yaml.safe_load(result.stdout)


# --------------------------------------------------------------------------- light commands


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["configs"], ["configs", "base"], ["fit", "-c", "bas"]]
)
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys; from fl_lightning.__main__ import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'pytorch_lightning', 'numpy', 'jsonargparse') if m in "
        "sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(packaged())
    assert all(len(line.split()) > 2 for line in lines), "each config says what it is"
    assert "add-on" in next(line for line in lines if line.startswith("method/ri"))
    assert main(["configs", "method/scaffold"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == read("method/scaffold")
    assert main(["configs", "method/scafold"]) == 2
    assert "'method/scaffold'" in capsys.readouterr().err


def test_every_method_config_sets_all_that_belongs_to_methods() -> None:
    for name in packaged():
        if name.startswith("method/"):
            config = read(name)
            if "method" in config:
                own = {"client_optimizer", "server_optimizer", "keep_optimizer_state", "buffers"}
                assert own <= set(config["model"]), name
            else:
                assert "method+" in config, name


# --------------------------------------------------------------------------- composition


def test_later_configs_and_options_win(cli: Cli) -> None:
    mine = "trainer: {max_epochs: 7}\nmodel: {lr_decay: 1e-1}\ndata: {class_path: MNIST}"
    (cli.folder / "mine.yaml").write_text(mine)
    config = printed(cli, "-c", "base", "-c", "mine.yaml", "--model.participation", 0.25)
    assert config["trainer"]["max_epochs"] == 7
    assert config["model"]["lr_decay"] == 0.1 and float(config["model"]["participation"]) == 0.25
    assert config["data"]["class_path"].endswith(".MNIST")
    assert config["data"]["init_args"]["batch_size"] != 20, "digits' arguments must not linger"
    assert printed(cli, "-c", "mine.yaml", "-c", "base")["trainer"]["max_epochs"] == 50


def test_a_file_beats_a_packaged_name(cli: Cli) -> None:
    (cli.folder / "base").write_text(read_text("base").replace("max_epochs: 50", "max_epochs: 3"))
    assert printed(cli, "-c", "base")["trainer"]["max_epochs"] == 3


LOGGERS = {
    (): None,
    ("tensorboard",): True,
    ("csv",): False,
    ("csv", "tensorboard"): True,
    ("mlflow",): ["MLFlowLogger"],
    ("tensorboard", "mlflow"): ["RunEvents", "MLFlowLogger"],
    ("mlflow", "tensorboard", "wandb"): ["RunEvents", "MLFlowLogger", "WandbLogger"],
    ("csv", "mlflow", "mlflow"): ["MLFlowLogger"],
    ("mlflow", "csv"): False,
}


@pytest.mark.parametrize("given", LOGGERS, ids="+".join)
def test_loggers_of_several_configs_log_side_by_side(cli: Cli, given: tuple[str, ...]) -> None:
    configs = [text for name in given for text in ("-c", f"logger/{name}")]
    logger = printed(cli, "-c", "base", *configs)["trainer"]["logger"]
    if isinstance(logger, list):
        logger = [item["class_path"].rsplit(".", 1)[-1] for item in logger]
    assert logger == LOGGERS[given]


@pytest.mark.slow
@pytest.mark.parametrize("config", [(), ("-c", "logger/tensorboard")])
def test_a_logger_added_by_an_option_leaves_tensorboard(cli: Cli, config: tuple[str, ...]) -> None:
    added = ("--trainer.logger+=CSVLogger", "--trainer.logger.save_dir=.")
    loggers = printed(cli, "-c", "base", *config, *added)["trainer"]["logger"]
    names = [item["class_path"].rsplit(".", 1)[-1] for item in loggers]
    assert names == ["RunEvents", "CSVLogger"]


@pytest.mark.slow
def test_events_beside_another_logger_lie_in_the_runs_folder_and_go_on_there(cli: Cli) -> None:
    own = "trainer: {logger+: {class_path: CSVLogger, init_args: {save_dir: mine}}}"
    (cli.folder / "own.yaml").write_text(own)
    tiny = ("-c", "debug/tiny", "--trainer.default_root_dir", "x")
    assert cli(*FIT, *tiny, "-c", "logger/tensorboard", "-c", "own.yaml").returncode == 0
    assert len(list((cli.folder / "x").glob("events.out.*"))) == 1
    assert len(list((cli.folder / "mine").rglob("metrics.csv"))) == 1
    assert cli("fit", "x", "--trainer.max_epochs", 3).returncode == 0
    assert len(list((cli.folder / "x").glob("events.out.*"))) == 2
    assert len(rows(cli.folder / "x")) == 3


@pytest.mark.slow
def test_what_only_measures_is_no_part_of_the_folders_name(cli: Cli) -> None:
    tiny = ("-c", "base", "-c", "debug/tiny")
    for method in ("ConsensusDistanceLogger", "PerClientEvaluation"):
        share = ("--data.client_test_fraction", "0.25")
        result = cli("fit", *tiny, *share, "--method", "ProximalTerm", "--method+", method)
        assert result.returncode == 0, result.stderr
    assert cli("fit", *tiny, "--method", "DriftLogger").returncode == 0
    found = sorted(path.name for path in (cli.folder / "runs").iterdir())
    assert found == ["digits-fedavg-1", "digits-proximalterm-1", "digits-proximalterm-2"]


def read_text(name: str) -> str:
    return packaged()[name].read_text("utf-8")


def methods(config: Any) -> dict[str, dict[str, Any]]:
    return {m["class_path"].rsplit(".", 1)[-1]: m.get("init_args", {}) for m in config["method"]}


def test_methods_are_replaced_with_a_line_and_added_to(cli: Cli) -> None:
    argv = ("-c", "base", "-c", "method/fedinit", "-c", "method/scaffold", "-c", "method/sam")
    result = cli("fit", *argv, "--method.radius", "0.5", "--print_config")
    assert list(methods(yaml.safe_load(result.stdout))) == [
        "ControlVariates",
        "SharpnessAwareMinimization",
    ]
    assert methods(yaml.safe_load(result.stdout))["SharpnessAwareMinimization"]["radius"] == 0.5
    assert result.stderr.strip() == (
        "method/scaffold replaces the method list (RelaxedInitialization) by (ControlVariates)"
    )


def test_method_options(cli: Cli) -> None:
    two = ("-c", "base", "--method", "[RelaxedInitialization]", "--method+=ControlVariates")
    assert list(methods(printed(cli, *two))) == ["RelaxedInitialization", "ControlVariates"]
    beta = methods(printed(cli, *two, "--method.beta", "Exponential", "--method.beta.gamma", 0.9))
    schedule = beta["RelaxedInitialization"]["beta"]
    assert "Exponential" in schedule["class_path"] and schedule["init_args"]["gamma"] == 0.9
    infinite = ("-c", "base", "-c", "method/fedexp", "--method.epsilon", ".inf")
    assert methods(printed(cli, *infinite))["ExtrapolatedStep"]["epsilon"] == float("inf")
    named = methods(printed(cli, *two, "--method.RelaxedInitialization.beta=0.3"))
    assert named["RelaxedInitialization"]["beta"] == 0.3


def test_environment(cli: Cli) -> None:
    config = printed(
        cli, "-c", "base", FL_TRAINER__MAX_EPOCHS="9", FL_FIT__MODEL__PARTICIPATION="3"
    )
    assert config["trainer"]["max_epochs"] == 9 and int(config["model"]["participation"]) == 3
    assert printed(cli, FL_CONFIG="base")["trainer"]["max_epochs"] == 50


def test_help(cli: Cli) -> None:
    result = cli("fit", "--help")
    assert result.returncode == 0
    assert "--model.participation" in result.stdout and "--trainer.max_epochs" in result.stdout


# --------------------------------------------------------------------------- a run and its folder


@pytest.fixture(scope="module")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    runner = Cli(zygote, tmp_path_factory.mktemp("finished"), tmp_path_factory.mktemp("files"))
    result = runner(*SKEWED, "--trainer.max_epochs", 4)
    assert result.returncode == 0, result.stderr
    assert "FedInit · 1 of 10 clients · 5 epochs" in result.stdout
    assert "→ runs/digits-fedinit-1" in result.stdout
    return runner


def test_folder(finished: Cli) -> None:
    run = finished.folder / "runs/digits-fedinit-1"
    names = {path.name.split(".")[0] for path in run.iterdir() if path.name != ".lock"}
    assert names == {
        "config",
        "checkpoints",
        "state",
        "metrics",
        "partition",
        "events",
        "card",
        "run",
    }
    assert [row["round"] for row in rows(run)] == ["0", "1", "2", "3"]
    accuracies = [float(row["val/acc"]) for row in rows(run)]
    best = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert max(accuracies) > accuracies[-1], (
        "this test needs a run whose best round is not its last"
    )
    assert best["epoch"] == accuracies.index(max(accuracies)) and last["epoch"] == 3
    assert best["callbacks"]["RunCheckpoint"]["best"] == pytest.approx(max(accuracies))
    learner = ImageClassifier.load_from_checkpoint(run / "checkpoints/best.ckpt")
    assert all(
        torch.equal(value.cpu(), best["state_dict"][name])
        for name, value in learner.state_dict().items()
    )


def test_evaluating_writes_nothing_but_what_was_asked(finished: Cli) -> None:
    run = finished.folder / "runs/digits-fedinit-1"
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    for command, metric in (("test", "test/acc"), ("validate", "val/acc")):
        result = finished(command, "runs/digits-fedinit-1")
        assert result.returncode == 0, result.stderr
        assert metric in result.stdout and "last.ckpt" in result.stdout
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before
    assert finished("predict", "runs/digits-fedinit-1", "-o", "p.pt").returncode == 0
    predictions = torch.load(finished.folder / "p.pt", weights_only=True)
    assert sum(len(batch) for batch in predictions) == 359
    assert finished("export", "runs/digits-fedinit-1", "-o", "m.pt").returncode == 0
    exported = torch.load(finished.folder / "m.pt", weights_only=True)["state_dict"]
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert exported.keys() == last.keys() and all(torch.equal(exported[k], last[k]) for k in last)


def test_a_run_of_several_processes_predicts_every_test_sample_in_order(cli: Cli) -> None:
    several = typed("-c trainer/ddp --trainer.accelerator cpu --trainer.max_epochs 1")
    quiet = ("--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", "x")
    fitted = cli("fit", "-c", "base", *several, *quiet)
    assert fitted.returncode == 0, fitted.stderr
    result = cli("predict", "x")
    assert result.returncode == 0, result.stderr
    predicted = torch.cat(torch.load(cli.folder / "x/predictions.pt", weights_only=True))
    assert len(predicted) == 359
    run = load(cli.folder / "x")
    with torch.no_grad():
        outputs = [run.learner(images) for images, _ in run.data.test_dataloader()]
    expected = torch.cat(outputs).softmax(1)
    torch.testing.assert_close(predicted, expected)


def test_resumed_equals_uninterrupted(finished: Cli, cli: Cli) -> None:
    fit = (*SKEWED, "--trainer.default_root_dir", "x", "--ckpt_path", "last")
    assert cli(*fit, "--trainer.max_epochs", 2).returncode == 0, "last with nothing there: starts"
    os.rename(cli.folder / "x", cli.folder / "moved")
    result = cli("fit", "moved", "--trainer.max_epochs", 4)
    assert result.returncode == 0, result.stderr
    assert "going on with round 3" in result.stdout and not (cli.folder / "x").exists()

    def values(folder: Path) -> list[dict[str, str]]:
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(folder)]

    assert values(cli.folder / "moved") == values(finished.folder / "runs/digits-fedinit-1")
    config = yaml.safe_load((cli.folder / "moved/config.yaml").read_text())
    assert (
        config["trainer"]["max_epochs"] == 4
        and config["data"]["init_args"]["partition"]["init_args"]["alpha"] == 0.1
    )


def test_null_survives_the_saved_config(cli: Cli) -> None:
    assert cli(*FIT, "--trainer.max_epochs", 1, "--data.batch_size", "null").returncode == 0
    config = yaml.safe_load((cli.folder / "runs/digits-fedavg-1/config.yaml").read_text())
    assert config["data"]["init_args"]["batch_size"] is None


def test_two_at_once_get_folders_of_their_own(cli: Cli) -> None:
    both = [
        cli.start(*FIT, "-c", "method/scaffold", "-c", "method/ri", "--trainer.max_epochs", 1)
        for _ in range(2)
    ]
    assert [process.wait().returncode for process in both] == [0, 0]
    for number in (1, 2):
        assert len(rows(cli.folder / f"runs/digits-scaffold+ri-{number}")) == 1


def test_fast_dev_run_writes_nothing(cli: Cli) -> None:
    assert cli("fit", "-c", "base", "-c", "debug/fast").returncode == 0
    assert os.listdir(cli.folder) == []


def test_partition(cli: Cli) -> None:
    # A run's own options have no effect on its split.
    of_a_run = "--model.local_epochs=3 --ckpt_path last --monitor val/loss"
    split = "partition -c data/digits --data.partition Pathological --data.partition.classes 2"
    result = cli(*typed(split, of_a_run))
    assert result.returncode == 0, result.stderr
    assert "10 clients" in result.stdout and "hash" in result.stdout
    assert {"partition.png", "partition.npz"} == set(os.listdir(cli.folder))
    # The seed of the model is the run's, and the run's split depends on it.
    seeds = ("--seed_everything 3", "--model.seed 3", "--model.seed=3 --seed_everything 7", "")
    hashes = []
    skewed = "partition -c data/digits --data.partition Dirichlet --data.partition.alpha 0.3"
    for seed in seeds:
        told = cli(*typed(skewed, seed)).stdout
        hashes += re.findall(r"hash (\w+)", told)
    assert len(hashes) == 4 and len(set(hashes[:3])) == 1 and hashes[3] != hashes[0]


def test_two_spellings_of_a_class_keep_its_arguments() -> None:
    skewed = {"class_path": "CIFAR10", "init_args": {"batch_size": 20}}
    elsewhere = {"class_path": "fl_lightning.datamodules.CIFAR10", "init_args": {"root": "d"}}
    for first, second in ((skewed, elsewhere), (elsewhere, skewed)):
        merged = merge({"data": first}, {"data": second})["data"]["init_args"]
        assert merged == {"batch_size": 20, "root": "d"}
    assert merge(skewed, {"class_path": "my.CIFAR10"}) == {"class_path": "my.CIFAR10"}


# --------------------------------------------------------------------------- learners from the
# current directory


def own(cli: Cli, *argv: object, **options: object) -> tuple[object, ...]:
    (cli.folder / "my_learner.py").write_text(LEARNER)
    settings = [f"--model.learner.{name}={value}" for name, value in options.items()]
    return (
        *FIT,
        *typed("--trainer.default_root_dir x --model.learner my_learner.Lit"),
        *settings,
        *argv,
    )


def test_own_learner_and_monitor(cli: Cli) -> None:
    result = cli(*own(cli, "--trainer.max_epochs", 2, "--monitor", "val/quality", width=5))
    assert (
        result.returncode == 2
        and "val/quality is not known (by its name). Give --monitor_mode" in result.stderr
    )
    result = cli(*own(cli, "--monitor", "val/quality", "--monitor_mode", "highest", width=5))
    assert (
        result.returncode == 2
        and "--monitor_mode 'highest'" in result.stderr
        and "Accepted: max" in result.stderr
    )
    assert not (cli.folder / "x").exists()
    quality = ("--monitor", "val/quality", "--monitor_mode", "max")
    result = cli(*own(cli, "--trainer.max_epochs", 2, *quality, width=5))
    assert result.returncode == 0, result.stderr
    best = torch.load(cli.folder / "x/checkpoints/best.ckpt", weights_only=True)
    assert best["state_dict"]["net.1.weight"].shape == (5, 64)
    result = cli(
        *own(
            cli,
            *typed("--trainer.max_epochs 3 --ckpt_path last"),
            *quality[2:],
            "--monitor",
            "val/qualitty",
            width=5,
        )
    )
    assert result.returncode == 2 and "'val/quality'" in result.stderr


def test_a_config_that_replaces_loggers_says_so() -> None:
    def notes(*names: str) -> list[str]:
        return prepare("fit", [f"-clogger/{name}" for name in names]).notes

    assert notes("csv", "tensorboard") == notes("csv", "csv") == notes("mlflow", "wandb") == []
    assert notes("tensorboard", "mlflow", "csv") == [
        "logger/csv replaces the loggers (TensorBoard, MLFlowLogger) by (only metrics.csv)"
    ]


def test_an_error_in_the_learner_is_told_with_its_line(cli: Cli) -> None:
    argv = own(cli, "--trainer.max_epochs", 1, fault="raise")
    result = cli(*argv)
    (said,) = [line for line in result.stderr.splitlines() if line.startswith("fl-lightning: ")]
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    for words in ("KeyError", "my_learner.py, line ", 'in training_step: raise KeyError("mine")'):
        assert words in said
    assert "first batch ((20, 1, 8, 8)" in said and "--debug" in said
    result = cli(*argv, "--debug")
    assert result.returncode == 1 and "Traceback" in result.stderr
    assert 'raise KeyError("mine")' in result.stderr and "in training_step" in result.stderr


def test_a_worker_process_that_is_killed_ends_the_command_with_one_paragraph(cli: Cli) -> None:
    forked = typed("--trainer.max_epochs 2 --model.engine concurrent --model.workers 2")
    result = cli(*own(cli, *forked, fault="kill", drop=0.5))
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert "in round 1 was ended by SIGKILL" in result.stderr


def test_diverged(cli: Cli) -> None:
    result = cli(*own(cli, "--trainer.max_epochs", 1, fault="nan"))
    assert result.returncode == 3 and "Traceback" not in result.stderr, result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_round(cli: Cli, number: signal.Signals) -> None:
    argv = own(
        cli,
        *typed("--trainer.max_epochs 9 --model.local_epochs=null --model.local_steps=8"),
        sleep=0.05,
    )
    process = cli.start(*argv)
    process.wait_for(cli.folder / "training")
    process.kill(number)
    result = process.wait()
    assert result.returncode == 128 + number, result.stderr
    done = len(rows(cli.folder / "x"))
    assert f"stopped after {done} of 9 rounds; this goes on: fl-lightning fit x" in result.stdout
    assert 1 <= done < 9 and rows(cli.folder / "x")[-1]["val/quality"]
    assert (
        torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)["epoch"] == done - 1
    )


def test_a_second_interrupt_stops_at_once(cli: Cli) -> None:
    argv = own(
        cli,
        *typed("--trainer.max_epochs 2 --model.local_epochs=null --model.local_steps=400"),
        sleep=0.05,
    )
    process = cli.start(*argv)
    process.wait_for(cli.folder / "training")
    process.kill(signal.SIGINT)
    while "stopping after this round" not in process.stderr:
        assert not process.ended()
    process.kill(signal.SIGINT)
    ended = process.wait(timeout=15)
    assert ended.returncode == 130
    assert re.search(r"stopped after 0 of \d+ rounds\n", ended.stdout)
    assert not (cli.folder / "x/checkpoints/last.ckpt").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux forks worker processes")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_while_clients_train_in_worker_processes(cli: Cli, times: int) -> None:
    """One lets the round end, the second one stops at once; no process remains, and the run goes
    on to the same bits."""
    shared = set(os.listdir("/dev/shm"))
    options = ("--model.local_epochs=null", "--model.local_steps=8", "--trainer.max_epochs=3")
    processes = ("--model.engine=concurrent", "--model.workers=2", "--model.participation=4")
    settings = {"sleep": 0.05, "drop": 0.5}
    argv = own(cli, *options, *processes, **settings)
    process = cli.start(*argv)
    process.wait_for(cli.folder / "training")
    process.kill(signal.SIGINT)
    while times == 2 and "stopping after this round" not in process.stderr:
        assert not process.ended()
    if times == 2:
        process.kill(signal.SIGINT)
    ended = process.wait()
    assert ended.returncode == 130, ended.stderr
    # A second interrupt may meet a lock of Python's logging, which then says so.
    assert times == 2 or "Traceback" not in ended.stderr, ended.stderr
    assert "2 processes" in ended.stdout + ended.stderr
    assert not [pid for pid in Path("/proc").glob("[0-9]*") if works_in(pid, cli.folder)]
    assert set(os.listdir("/dev/shm")) <= shared
    again = ("fit", "x") if (cli.folder / "x/checkpoints/last.ckpt").exists() else argv
    if again is argv:
        shutil.rmtree(cli.folder / "x")
    assert cli(*again).returncode == 0
    interrupted = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    shutil.rmtree(cli.folder / "x")
    alone = ("--model.engine=sequential", "--model.participation=4")
    assert cli(*own(cli, *options, *alone, drop=0.5)).returncode == 0
    whole = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    assert interrupted["epoch"] == whole["epoch"] == 2
    for name, value in whole["state_dict"].items():
        assert torch.equal(interrupted["state_dict"][name], value), name


def works_in(process: Path, folder: Path) -> bool:
    try:
        return Path(os.readlink(process / "cwd")).is_relative_to(folder)
    except OSError:
        return False


def test_a_schedule_of_a_method_on_the_command_line(cli: Cli) -> None:
    options = typed("--method.mu Exponential --method.mu.gamma 0.5 --trainer.max_epochs 2")
    result = cli("fit", "-c", "base", "-c", "data/digits", "-c", "method/fedprox", *options)
    assert result.returncode == 0, result.stderr
    card = (cli.folder / "runs/digits-fedprox-1/card.md").read_text(encoding="utf-8")
    assert "| ProximalTerm | mu=Exponential(gamma=0.5) |" in card


def test_a_number_of_an_argument_that_takes_texts_too_is_a_number(cli: Cli) -> None:
    (cli.folder / "x.csv").write_text("x,y\n" + "1,0\n2,1\n" * 20)
    table = ("--data", "FromTable", "--data.path", "x.csv", "--data.target", "y")
    options = ("--data.test", "0.2", "--trainer.val_check_interval", "1.0")
    printed = cli("fit", "-c", "base", *table, *options, "--print_config")
    config = yaml.safe_load(printed.stdout)
    assert config["data"]["init_args"]["test"] == 0.2, printed.stderr
    assert config["trainer"]["val_check_interval"] == 1.0
