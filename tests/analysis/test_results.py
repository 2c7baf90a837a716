"""What a run shows and leaves: bar, card, closing table, and the folder read back."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import struct
import subprocess
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.__main__ import main
from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks.loggers.progress_bar import FederatedProgressBar
from fl_lightning.callbacks.loggers.run_card import RunCard
from fl_lightning.errors import UserError
from fl_lightning.lab.analysis import results
from fl_lightning.machine.lightning import LOGGERS
from fl_lightning.metrics import Metrics
from fl_lightning.record.metrics_csv import MetricsCSV
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from fl_lightning.storage.client_store import ClientStore
from tests.helpers.commands import typed

torch.set_num_threads(1)


class Pull(FederatedCallback):
    def __init__(self, beta: float = 0.5) -> None:
        super().__init__()
        self.beta = beta


class Rounds(pl.LightningModule):
    """Stands for the federated module."""

    run_seed = 7
    accuracies = (0.1, 0.6, 0.4, 0.5)

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.notes = ["participation=1 is one client a round"]
        self.engine_facts = {"engine": "sequential"}

    def describe(self) -> str:
        return "FedAvg · 2 of 4 clients"

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        t = self.current_epoch
        for done in (1, 2):
            for callback in self.trainer.callbacks:
                if hasattr(callback, "on_client_end"):
                    callback.on_client_end(self.trainer, self, done, 2)
        metrics = {"train/loss": 1 / (t + 1), "divergence/participants": 0.25, "time/round": 0.125}
        metrics |= {
            "communication/total_parameters": 1.5e6 * (t + 1),
            "communication/total_bytes": 6e6 * (t + 1),
        }
        self.trainer.callback_metrics.update({k: torch.tensor(v) for k, v in metrics.items()})
        for logger in self.loggers:
            logger.log_metrics(metrics, step=t)
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/acc", self.accuracies[self.current_epoch % 4])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/acc", 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader

    def card(self) -> dict[str, str]:
        return {"clients": "4", "partition": "Dirichlet(0.1)"}

    def plot_partition(self) -> Figure:
        figure = Figure(figsize=(2, 2))
        figure.add_subplot().imshow(np.eye(4))
        return figure


def trainer_in(
    folder: Path, rounds: int, *callbacks: pl.Callback, csv: bool = True, board: bool = False
) -> pl.Trainer:
    loggers: list[Any] = [MetricsCSV(folder)] if csv else []
    if board:
        loggers.append(TensorBoardLogger(str(folder), name="", version=""))
    bar = any(isinstance(c, FederatedProgressBar) for c in callbacks)
    return pl.Trainer(
        max_epochs=rounds,
        default_root_dir=folder,
        logger=loggers,
        callbacks=list(callbacks),
        accelerator="cpu",
        enable_progress_bar=bar,
        enable_model_summary=False,
        enable_checkpointing=False,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        plugins=[AtomicCheckpointIO()],
    )


@pytest.mark.parametrize("csv", [True, False])
def test_plain_lines_and_the_closing_table(tmp_path: Path, capsys: Any, csv: bool) -> None:
    trainer = trainer_in(tmp_path, 47, FederatedProgressBar(), csv=csv, board=True)
    trainer.fit(Rounds(), Data())
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("round ")]
    assert 10 <= len(lines) <= 21 and "\r" not in err
    assert lines[0].startswith("round 3/47 · loss 0.3333 · accuracy 0.4000 · Δ 0.25 · ")
    assert lines[-1].startswith("round 47/47 · loss 0.0213 · accuracy 0.4000 ")
    assert lines[-1].endswith("00:00 left")
    table = [" ".join(line.split()) for line in out.splitlines() if line.startswith("  ")]
    # Without metrics.csv the table has only the last round.
    best = "0.6000 (round 2)" if csv else "0.4000 (round 47)"
    assert table == [
        "rounds 47",
        f"accuracy last 0.4000, best {best}",
        "training loss 0.0213",
        "divergence Δ 0.25",
        "seconds per round 0.125 (median)",
        "communicated 70.5 M parameters, 282 MB",
        f"results in {tmp_path}",
        f"curves tensorboard --logdir {tmp_path}",
        "note participation=1 is one client a round",
    ]


class StopAfterTwo(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch == 1


def test_the_last_round_is_said_when_the_run_stops_early(tmp_path: Path, capsys: Any) -> None:
    trainer_in(tmp_path, 100, FederatedProgressBar(), StopAfterTwo()).fit(Rounds(), Data())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("round ")]
    assert [line.split(" · ")[0] for line in lines] == ["round 2/100"]


ON_A_TERMINAL = """
import sys, time
from pathlib import Path
from tests.analysis.test_results import Data, FederatedProgressBar, Rounds, trainer_in
class Slow(Rounds):
    def on_train_epoch_start(self):
        time.sleep(0.12)
trainer_in(Path(sys.argv[1]), 3, FederatedProgressBar()).fit(Slow(), Data())
"""


def test_on_a_terminal_one_line_is_drawn_again(python: str, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    command = [python, "-c", ON_A_TERMINAL, str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    cwd = Path(__file__).parents[2]
    process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.PIPE, env=env, cwd=cwd)
    os.close(theirs)
    drawn = b""
    while True:
        try:
            block = os.read(ours, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not block:
            break
        drawn += block
    os.close(ours)
    assert process.wait() == 0 and process.stdout is not None
    assert "accuracy           last 0.4000, best 0.6000 (round 2)" in process.stdout.read().decode()
    process.stdout.close()
    text = drawn.decode()
    assert "round 2/3 · clients 1/2 · loss 1.0000 · accuracy 0.1000 · Δ 0.25" in text
    last = text.replace("\n", "\r").split("\r")
    final = [line for line in last if "round 3/3" in line][-1]
    assert "loss 0.3333 · accuracy 0.4000 · Δ 0.25 |██████████|" in final and "clients" not in final


def test_the_card_says_what_ran_and_what_came_out_once(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, 2, RunCard(), Pull(beta=0.25), board=True)
    trainer.fit(Rounds(), Data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer_in(tmp_path, 4, RunCard(), Pull(beta=0.25), board=True).fit(
        Rounds(), Data(), ckpt_path=tmp_path / "x.ckpt"
    )
    card = (tmp_path / "card.md").read_text()
    assert card.startswith("# FedAvg · 2 of 4 clients\n")
    for line in [
        "| seed | 7 |",
        "| Pull | beta=0.25 |",
        "| partition | Dirichlet(0.1) |",
        "| engine | sequential |",
        f"| torch | {torch.__version__.split('+')[0]}",
        "| rounds | 4 |",
        "| accuracy | last 0.5000, best 0.6000 (round 2) |",
        "| note | participation=1 is one client a round |",
    ]:
        assert line in card
    assert card.count("## Result") == card.count("# FedAvg") == card.count("## Data") == 1
    assert (tmp_path / "partition.png").read_bytes().startswith(b"\x89PNG")
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Tensors("run card/text_summary")) == len(events.Images("partition")) == 1
    assert (
        "FedAvg" in events.Tensors("run card/text_summary")[0].tensor_proto.string_val[0].decode()
    )


def test_a_run_is_read_back(tmp_path: Path) -> None:
    logger = MetricsCSV(tmp_path)
    logger.log_metrics({"train/loss": 0.1 + 0.2}, 0)
    logger.log_metrics({"train/loss": 0.2, "val/acc": 0.9}, 1)
    (tmp_path / "config.yaml").write_text("seed_everything: 3\nmodel: {participation: 0.1}\n")
    store = ClientStore()
    store.commit({"Pull.last": {4: torch.arange(3.0)}})
    store.flush(tmp_path / "state")
    checkpoint = {
        "state_dict": {},
        "federated": {"clients": store.index(), "folders": ["../state"]},
    }
    AtomicCheckpointIO().save_checkpoint(checkpoint, tmp_path / "checkpoints" / "last.ckpt")
    run = results.load(tmp_path)
    assert run.metrics["train/loss"].tolist() == [0.1 + 0.2, 0.2] and run.metrics.rounds == [0, 1]
    assert np.isnan(run.metrics["val/acc"][0]) and run.metrics.best("val/acc") == (0.9, 1)
    assert list(run.metrics) == ["train/loss", "val/acc"]
    assert run.config["model"] == {"participation": 0.1}
    row = run.client_state("Pull.last", 4)
    assert row is not None and row.tolist() == [0, 1, 2]
    assert run.client_state("Pull.last", 5) is None
    with pytest.raises(UserError, match=r"Did you mean 'Pull.last'"):
        run.client_state("Pull.lost", 4)
    with pytest.raises(KeyError, match="Did you mean 'val/acc'"):
        run.metrics["val/ac"]
    for name in ("none", "checkpoints"):
        with pytest.raises(UserError, match=r"not a run's folder.*RunFolder"):
            results.load(tmp_path / name)


def test_a_real_run_gives_back_its_learner_and_partition(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = str(tmp_path / "x")
    fit = list(typed("fit -c base -c data/digits -c method/scaffold --trainer.max_epochs 1"))
    assert main([*fit, "--trainer.default_root_dir", folder, "--seed_everything", "5"]) == 0
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    run = results.load(folder)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        # As in a notebook, where no command has made them quiet.
        logger.setLevel(logging.INFO)
        logger.addHandler(caplog.handler)
    learner, data = run.learner, run.built.datamodule
    for logger in loggers:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == [] and all(each.level == logging.INFO for each in loggers)
    assert torch.rand(1) == wanted  # the caller's random numbers are left alone
    m = len(run.partition)
    indices = np.concatenate([run.partition[i] for i in range(m)])
    assert sorted(indices) == list(range(len(indices))) and len(indices) == sum(data.client_sizes())
    right = [(learner(x).argmax(1) == y).float() for x, y in data.val_dataloader()]
    assert float(torch.cat(right).mean()) == pytest.approx(run.metrics.last("val/acc"), abs=1e-6)


def test_metrics_become_a_frame(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("round,val/acc,train/loss\n0,0.5,1.0\n2,,0.5\n")
    metrics = Metrics.read(path)
    assert isinstance(metrics, dict) and list(metrics) == ["val/acc", "train/loss"]
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(metrics, index=metrics.rounds)
    assert list(frame.index) == [0, 2] and frame["train/loss"].tolist() == [1.0, 0.5]


def test_a_run_without_a_bar_of_its_own_has_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pytorch_lightning.callbacks import TQDMProgressBar

    from tests.helpers.learners import blobs, federated, trainer

    monkeypatch.chdir(tmp_path)
    run = trainer(2, enable_progress_bar=True)
    run.fit(federated(engine="sequential"), blobs())
    assert isinstance(run.progress_bar_callback, FederatedProgressBar)
    said = capsys.readouterr()
    assert "round 2/2" in said.err and "Epoch" not in said.err + said.out
    own = TQDMProgressBar(refresh_rate=7)
    run = trainer(1, [own], enable_progress_bar=True)
    run.fit(federated(engine="sequential"), blobs())
    assert run.progress_bar_callback is own
    run = trainer(1)
    run.fit(federated(engine="sequential"), blobs())
    assert run.progress_bar_callback is None
