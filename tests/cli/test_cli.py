"""The command line as a user meets it: what it prints, its exit status, what it leaves."""

from __future__ import annotations

import json
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
from fl_lightning.lab.cli.compose import merge, packaged, read
from fl_lightning.models import Classifier
from tests.helpers.commands import QUIET_FIT, done, rounds, said, table, typed
from tests.helpers.zygote import Cli, Zygote

SKEWED = (
    *QUIET_FIT,
    *typed("-c method/fedinit --model.participation 1 --data.partition Dirichlet"),
    *typed("--data.partition.alpha 0.1"),
)
X = ("--trainer.default_root_dir", "x")
LEARNER = """
import time, torch, pytorch_lightning as pl
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
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        return loss * float("nan") if self.fault == "nan" else loss
    def validation_step(self, batch, batch_idx):
        self.log("val/quality", -torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""


# --------------------------------------------------------------------------- light commands


@pytest.mark.parametrize(
    "argv", [["--help"], ["--version"], ["configs"], ["configs", "base"], ["fit", "-c", "bas"]]
)
def test_light_commands_import_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys; from fl_lightning.__main__ import main; main(sys.argv[1:]); "
        "print({'torch', 'pytorch_lightning', 'numpy', 'jsonargparse'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "set()"


def test_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(packaged())
    assert all(len(line.split()) > 2 for line in lines), "each config says what it is"
    assert main(["configs", "method/scaffold"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == read("method/scaffold")
    assert main(["configs", "method/scafold"]) == 2
    assert "'method/scaffold'" in capsys.readouterr().err


def test_every_method_config_sets_all_that_belongs_to_methods() -> None:
    own = {"client_optimizer", "server_optimizer", "keep_optimizer_state", "buffers"}
    for name in packaged():
        config = read(name) if name.startswith("method/") else {"method+": []}
        assert "method+" in config or own <= set(config["model"]), name


# --------------------------------------------------------------------------- composition

BASE = packaged()["base"].read_text("utf-8")
FILES = {  # what a user's folder holds
    "mine.yaml": "trainer: {max_epochs: 7}\nmodel: {lr_decay: 1e-1}\ndata: {class_path: MNIST}",
    "base.yaml": BASE.replace("max_epochs: 50", "max_epochs: 3"),
    "x.csv": "x,y\n" + "1,0\n2,1\n" * 20,
}
TWO = "-c base --method [RelaxedInitialization] --method+=ControlVariates"
TABLE = "-c base --data FromTable --data.path x.csv --data.target y --data.test 0.2"
PRINTED: list[tuple[str, dict[str, Any]]] = [  # what is typed → values of the config that would run
    (
        "-c base -c mine.yaml --model.participation 0.25",
        {"trainer.max_epochs": 7, "model.lr_decay": 0.1, "model.participation": 0.25}
        # The arguments of the digits must not linger.
        | {"data": "MNIST", "data.batch_size": 50},
    ),
    ("-c mine.yaml -c base", {"trainer.max_epochs": 50}),
    ("-c base.yaml", {"trainer.max_epochs": 3}),  # a file beats a packaged name
    ("-c base -c logger/tensorboard", {"trainer.logger": True}),
    ("-c base -c logger/csv", {"trainer.logger": False}),
    ("-c base -c logger/csv -c logger/tensorboard", {"trainer.logger": True}),
    ("-c base -c logger/mlflow", {"trainer.logger": ["MLFlowLogger"]}),
    (
        "-c base -c logger/mlflow -c logger/tensorboard -c logger/wandb",
        {"trainer.logger": ["RunEvents", "MLFlowLogger", "WandbLogger"]},
    ),
    ("-c base -c logger/mlflow -c logger/csv", {"trainer.logger": False}),
    (
        "-c base --trainer.logger+=CSVLogger --trainer.logger.save_dir=.",
        {"trainer.logger": ["RunEvents", "CSVLogger"]},
    ),
    (TWO, {"method": ["RelaxedInitialization", "ControlVariates"]}),
    (
        f"{TWO} --method.beta Exponential --method.beta.gamma 0.9",
        {"method.0.beta": "Exponential", "method.0.beta.gamma": 0.9},
    ),
    (f"{TWO} --method.RelaxedInitialization.beta=0.3", {"method.0.beta": 0.3}),
    ("-c base -c method/fedexp --method.epsilon .inf", {"method.0.epsilon": float("inf")}),
    # A number of an argument that takes texts, too, is a number.
    (f"{TABLE} --trainer.val_check_interval 1.0", {"data.test": 0.2}),
    ("-c base --trainer.strategy.timeout 4 -c trainer/ddp", {"trainer.strategy.timeout": 4}),
    ("-c base --data.batch_size null", {"data.batch_size": None}),
]


def at(config: Any, place: str) -> Any:
    """The value at a place, below ``init_args`` too; classes by their names."""
    for part in place.split("."):
        node = config[int(part)] if isinstance(config, list) else config
        config = node if node is not config else node.get("init_args", node)[part]
    if isinstance(config, list):
        return [at({"x": item}, "x") for item in config]
    named = config.get("class_path") if isinstance(config, dict) else None
    return named.rpartition(".")[2] if named else config


@pytest.mark.parametrize(("argv", "expected"), PRINTED)
def test_the_config_that_would_run(cli: Cli, argv: str, expected: dict[str, Any]) -> None:
    for name, text in FILES.items():
        (cli.folder / name).write_text(text)
    result = done(cli("fit", *typed(argv), "--print_config"))
    config = yaml.safe_load(result.stdout)
    assert {place: at(config, place) for place in expected} == expected


def test_methods_are_replaced_with_a_line_and_added_to(cli: Cli) -> None:
    methods = typed("-c base -c method/fedinit -c method/scaffold -c method/sam")
    result = done(cli("fit", *methods, "--method.radius", "0.5", "--print_config"))
    config = yaml.safe_load(result.stdout)
    assert at(config, "method") == ["ControlVariates", "SharpnessAwareMinimization"]
    assert at(config, "method.1.radius") == 0.5
    assert result.stderr.strip() == (
        "method/scaffold replaces the method list (RelaxedInitialization) by (ControlVariates)"
    )


def test_two_spellings_of_a_class_keep_its_arguments() -> None:
    skewed = {"class_path": "CIFAR10", "init_args": {"batch_size": 20}}
    elsewhere = {"class_path": "fl_lightning.datamodules.CIFAR10", "init_args": {"root": "d"}}
    for first, second in ((skewed, elsewhere), (elsewhere, skewed)):
        merged = merge({"data": first}, {"data": second})["data"]["init_args"]
        assert merged == {"batch_size": 20, "root": "d"}
    assert merge(skewed, {"class_path": "my.CIFAR10"}) == {"class_path": "my.CIFAR10"}


# --------------------------------------------------------------------------- a run and its folder


@pytest.fixture(scope="module")
def finished(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Cli:
    runner = Cli(zygote, tmp_path_factory.mktemp("finished"), tmp_path_factory.mktemp("files"))
    result = runner(*SKEWED, "--trainer.max_epochs", 4)
    done(result, "FedInit · 1 of 10 clients · 5 epochs", "→ runs/digits-fedinit-1")
    return runner


def test_folder(finished: Cli) -> None:
    run = finished.folder / "runs/digits-fedinit-1"
    names = {path.name.split(".")[0] for path in run.iterdir() if path.name != ".lock"}
    assert names == set(typed("config checkpoints state metrics partition events card run"))
    assert rounds(run) == ["0", "1", "2", "3"]
    # The logger that every fit has keeps no client's model.
    columns = table(run / "metrics.csv")[0]
    assert "divergence/participants" in columns and "divergence/all" not in columns
    accuracies = [float(row["val/acc"]) for row in table(run / "metrics.csv")]
    best = torch.load(run / "checkpoints/best.ckpt", weights_only=True)
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert max(accuracies) > accuracies[-1], "needs a run whose best round is not its last"
    assert best["epoch"] == accuracies.index(max(accuracies)) and last["epoch"] == 3
    assert best["callbacks"]["RunCheckpoint"]["best"] == pytest.approx(max(accuracies))
    learner = Classifier.load_from_checkpoint(run / "checkpoints/best.ckpt")
    for name, value in learner.state_dict().items():
        assert torch.equal(value.cpu(), best["state_dict"][name])


def test_evaluating_writes_nothing_but_what_was_asked(finished: Cli) -> None:
    run = finished.folder / "runs/digits-fedinit-1"
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    for command, metric in (("test", "test/acc"), ("validate", "val/acc")):
        done(finished(command, "runs/digits-fedinit-1"), metric, "last.ckpt")
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == before
    done(finished("predict", "runs/digits-fedinit-1", "-o", "p.pt"))
    predictions = torch.load(finished.folder / "p.pt", weights_only=True)
    assert sum(len(batch) for batch in predictions) == 359
    done(finished("export", "runs/digits-fedinit-1", "-o", "m.pt"))
    exported = torch.load(finished.folder / "m.pt", weights_only=True)["state_dict"]
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert exported.keys() == last.keys() and all(torch.equal(exported[k], last[k]) for k in last)


@pytest.mark.slow
def test_a_run_of_several_processes_predicts_every_test_sample_in_order(cli: Cli) -> None:
    several = typed("-c trainer/ddp --trainer.accelerator cpu --trainer.max_epochs 1")
    done(cli("fit", "-c", "base", *several, "--trainer.enable_progress_bar", "false", *X))
    done(cli("predict", "x"))
    predicted = torch.cat(torch.load(cli.folder / "x/predictions.pt", weights_only=True))
    assert len(predicted) == 359
    run = load(cli.folder / "x")
    with torch.no_grad():
        outputs = [run.learner(images) for images, _ in run.data.test_dataloader()]
    torch.testing.assert_close(predicted, torch.cat(outputs).softmax(1))


def test_resumed_equals_uninterrupted(finished: Cli, cli: Cli) -> None:
    fit = (*SKEWED, *X, "--ckpt_path", "last")
    done(cli(*fit, "--trainer.max_epochs", 2))  # last with nothing there: it starts
    os.rename(cli.folder / "x", cli.folder / "moved")
    done(cli("fit", "moved", "--trainer.max_epochs", 4), "going on with round 3")
    assert not (cli.folder / "x").exists()
    values = []
    for folder in (cli.folder / "moved", finished.folder / "runs/digits-fedinit-1"):
        rows = table(folder / "metrics.csv")
        values.append([{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows])
    assert values[0] == values[1]
    config = yaml.safe_load((cli.folder / "moved/config.yaml").read_text())
    assert at(config, "trainer.max_epochs") == 4 and at(config, "data.partition.alpha") == 0.1


def test_names_of_folders(cli: Cli) -> None:
    """Two at once get one each; what only measures is no part of the name."""
    short = (*QUIET_FIT, "-c", "debug/tiny", "--trainer.max_epochs", 1)
    both = [cli.start(*short, *typed("-c method/scaffold -c method/ri")) for _ in range(2)]
    assert [process.wait().returncode for process in both] == [0, 0]
    share = ("--data.client_test_fraction", "0.25")
    done(cli(*short, *share, *typed("--method ProximalTerm --method+ PerClientEvaluation")))
    done(cli(*short, "--method", "DriftLogger"))
    done(cli("fit", "-c", "base", "-c", "debug/fast"))  # which writes nothing
    found = sorted(path.name for path in (cli.folder / "runs").iterdir())
    names = ["fedavg-1", "proximalterm-1", "scaffold+ri-1", "scaffold+ri-2"]
    assert found == [f"digits-{name}" for name in names] and os.listdir(cli.folder) == ["runs"]


@pytest.mark.slow
def test_events_beside_another_logger_lie_in_the_runs_folder_and_go_on_there(cli: Cli) -> None:
    own = "trainer: {logger+: {class_path: CSVLogger, init_args: {save_dir: mine}}}"
    (cli.folder / "own.yaml").write_text(own)
    tiny = typed("-c debug/tiny -c logger/tensorboard -c own.yaml")
    done(cli(*QUIET_FIT, *tiny, *X))
    assert len(list((cli.folder / "x").glob("events.out.*"))) == 1
    assert len(list((cli.folder / "mine").rglob("metrics.csv"))) == 1
    done(cli("fit", "x", "--trainer.max_epochs", 3))
    assert len(list((cli.folder / "x").glob("events.out.*"))) == 2
    assert len(rounds(cli.folder / "x")) == 3


def test_partition(cli: Cli) -> None:
    # A run's own options have no effect on its split.
    of_a_run = "--model.local_epochs=3 --ckpt_path last --monitor val/loss"
    split = "partition -c data/digits --data.partition Pathological --data.partition.classes 2"
    done(cli(*typed(split, of_a_run)), "10 clients", "hash")
    assert {"partition.png", "partition.npz"} == set(os.listdir(cli.folder))
    # The seed of the model is the run's, and the run's split depends on it.
    seeds = ("--seed_everything 3", "--model.seed 3", "--model.seed=3 --seed_everything 7", "")
    skewed = "partition -c data/digits --data.partition Dirichlet --data.partition.alpha 0.3"
    hashes = [re.findall(r"hash (\w+)", cli(*typed(skewed, seed)).stdout)[0] for seed in seeds]
    assert len(set(hashes[:3])) == 1 and hashes[3] != hashes[0]


# --------------------------------------------------------------------------- learners from the
# current directory


def own(cli: Cli, *argv: object, **options: object) -> tuple[object, ...]:
    (cli.folder / "my_learner.py").write_text(LEARNER)
    settings = [f"--model.learner.{name}={value}" for name, value in options.items()]
    return (*QUIET_FIT, *X, "--model.learner", "my_learner.Lit", *settings, *argv)


MONITORED = [
    ("--monitor val/quality", "val/quality is not known (by its name). Give --monitor_mode"),
    ("--monitor val/quality --monitor_mode highest", "--monitor_mode='highest'"),
    ("--monitor val/qualitty --monitor_mode max", "Did you mean 'val/quality'"),
]


def test_own_learner_and_monitor(cli: Cli) -> None:
    for argv, words in MONITORED:
        said(cli(*own(cli, "--trainer.max_epochs", 1, *typed(argv), width=5)), words)
    quality = typed("--trainer.max_epochs 2 --monitor val/quality --monitor_mode max")
    done(cli(*own(cli, *quality, width=5)))
    best = torch.load(cli.folder / "x/checkpoints/best.ckpt", weights_only=True)
    assert best["state_dict"]["net.1.weight"].shape == (5, 64)


def test_an_error_in_the_learner_is_told_with_its_line(cli: Cli) -> None:
    argv = own(cli, "--trainer.max_epochs", 1, fault="raise")
    result = cli(*argv)
    (told,) = [line for line in result.stderr.splitlines() if line.startswith("fl-lightning: ")]
    assert result.returncode == 1 and "Traceback" not in result.stderr, result.stderr
    for words in ("KeyError", "my_learner.py, line ", 'in training_step: raise KeyError("mine")'):
        assert words in told
    assert "first batch ((20, 1, 8, 8)" in told and "--debug" in told
    result = cli(*argv, "--debug")
    assert result.returncode == 1 and "Traceback" in result.stderr
    assert 'raise KeyError("mine")' in result.stderr


def test_diverged(cli: Cli) -> None:
    result = cli(*own(cli, "--trainer.max_epochs", 1, fault="nan"))
    assert result.returncode == 3 and "Traceback" not in result.stderr, result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_run_after_its_round(cli: Cli, number: signal.Signals) -> None:
    options = typed("--trainer.max_epochs 9 --model.local_epochs=null --model.local_steps=8")
    process = cli.start(*own(cli, *options, sleep=0.05))
    process.wait_for(cli.folder / "training")
    process.kill(number)
    result = process.wait()
    assert result.returncode == 128 + number, result.stderr
    rows = table(cli.folder / "x/metrics.csv")
    many = len(rows)
    assert f"stopped after {many} of 9 rounds; this goes on: fl-lightning fit x" in result.stdout
    assert 1 <= many < 9 and rows[-1]["val/quality"]
    last = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    assert last["epoch"] == many - 1


WAITING = """

class Waiting(pl.Callback):
    def __init__(self, at: str):
        self.at = at
    def wait(self, at):
        if at == self.at:
            Path("waiting").touch()
            time.sleep(2)
    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            self.wait("measuring")
    def on_train_end(self, trainer, pl_module):
        self.wait("ending")
"""


@pytest.mark.parametrize(
    ("number", "at"), [(signal.SIGTERM, "measuring"), (signal.SIGKILL, "ending")]
)
def test_the_last_round_is_measured_whatever_ends_the_process(
    cli: Cli, number: signal.Signals, at: str
) -> None:
    """SIGTERM lets the measurement end; after SIGKILL a resume without a round left does it."""
    waiting = ("--trainer.callbacks+", "my_learner.Waiting", "--trainer.callbacks.at", at)
    clients = typed("--trainer.callbacks+ PerClientEvaluation --data.client_test_fraction 0.25")
    clients += ("--trainer.callbacks.modes", "{quality: max}")
    argv = own(cli, "--trainer.max_epochs", 2, *waiting, *clients)
    (cli.folder / "my_learner.py").write_text(LEARNER + WAITING)
    done(cli(*argv))
    files = ("clients.csv", "clients_rounds.csv")
    wanted = [(cli.folder / "x" / name).read_bytes() for name in files]
    rows = table(cli.folder / "x/metrics.csv")
    shutil.rmtree(cli.folder / "x")
    (cli.folder / "waiting").unlink()
    process = cli.start(*argv)
    process.wait_for(cli.folder / "waiting")
    process.kill(number)
    result = process.wait()
    if number == signal.SIGTERM:
        assert result.returncode == 0, result.stderr
    else:
        assert not (cli.folder / "x/clients.csv").exists()
        done(cli("fit", "x"), "It was killed after its last round")
    assert [(cli.folder / "x" / name).read_bytes() for name in files] == wanted
    assert json.loads((cli.folder / "x/run.json").read_text())["status"] == "done"
    again = table(cli.folder / "x/metrics.csv")
    assert len(again) == 2
    for name in rows[-1]:
        if name.startswith("clients/"):
            assert again[-1][name] == rows[-1][name]


def test_a_second_interrupt_stops_at_once(cli: Cli) -> None:
    options = typed("--trainer.max_epochs 2 --model.local_epochs=null --model.local_steps=400")
    process = cli.start(*own(cli, *options, sleep=0.05))
    process.wait_for(cli.folder / "training")
    process.kill(signal.SIGINT)
    while "stopping after this round" not in process.stderr:
        assert not process.ended()
    process.kill(signal.SIGINT)
    ended = process.wait(timeout=15)
    assert ended.returncode == 130
    assert re.search(r"stopped after 0 of \d+ rounds\n", ended.stdout)
    assert json.loads((cli.folder / "x/run.json").read_text())["status"] == "stopped"
    assert not (cli.folder / "x/checkpoints/last.ckpt").exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="only Linux forks worker processes")
@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_while_clients_train_in_worker_processes(cli: Cli, times: int) -> None:
    """One lets the round end, the second one stops at once; no process remains, and the run goes
    on to the same bits."""
    shared = set(os.listdir("/dev/shm"))
    options = typed("--model.local_epochs=null --model.local_steps=8 --trainer.max_epochs=3")
    processes = typed("--model.engine=concurrent --model.workers=2 --model.participation=4")
    argv = own(cli, *options, *processes, sleep=0.05, drop=0.5)
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
    again: tuple[object, ...] = ("fit", "x")
    if not (cli.folder / "x/checkpoints/last.ckpt").exists():
        again = argv
        shutil.rmtree(cli.folder / "x")
    done(cli(*again))
    interrupted = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    shutil.rmtree(cli.folder / "x")
    alone = typed("--model.engine=sequential --model.participation=4")
    done(cli(*own(cli, *options, *alone, drop=0.5)))
    whole = torch.load(cli.folder / "x/checkpoints/last.ckpt", weights_only=True)
    assert interrupted["epoch"] == whole["epoch"] == 2
    for name, value in whole["state_dict"].items():
        assert torch.equal(interrupted["state_dict"][name], value), name


def works_in(process: Path, folder: Path) -> bool:
    try:
        return Path(os.readlink(process / "cwd")).is_relative_to(folder)
    except OSError:
        return False
