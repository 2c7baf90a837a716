"""Runs that are broken off by an exception at a chosen place, once, and then go on. And all that a
run leaves."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn

import fl_lightning
from fl_lightning.callback import FederatedCallback
from tests.helpers.learners import Lit, blobs, client_rows, federated, trainer

ROUNDS, BROKEN_IN = 4, 2
LOCAL = ("on_local_start", "on_local_gradient", "on_local_step_end", "on_local_end", "transmit")
AT_SERVER = ("on_round_start", "aggregate", "on_server_update", "on_round_end")
LIGHTNINGS = """
train_epoch_start train_batch_start client_end before_optimizer_step train_batch_end
validation_start validation_batch_end validation_epoch_end validation_end train_epoch_end
"""
OF_LIGHTNING = tuple(f"on_{name}" for name in LIGHTNINGS.split())
OTHERS = ("training_step", "validation_step", "first logger", "second logger", "spilling")
PLACES = (*AT_SERVER, *LOCAL, *OF_LIGHTNING, *OTHERS)
FILES = """
loop aggregation/server_update round/global_model round/transaction storage/client_rows
storage/run_state storage/client_store
"""
LINES = {f"{Path(fl_lightning.__file__).parent}/{name}.py" for name in FILES.split()}


class Broken(Exception):
    pass


class Fuse:
    """Raises at a place of round ``round``, the first time that it is reached."""

    def __init__(
        self, place: str, kind: type[BaseException] = Broken, round: int = BROKEN_IN
    ) -> None:
        self.place, self.kind, self.round, self.now, self.blown = place, kind, round, 0, False

    def __deepcopy__(self, memo: Any) -> Fuse:
        return self

    def at(self, place: str) -> None:
        if place == self.place and self.now == self.round and not self.blown:
            self.blow()

    def blow(self) -> None:
        self.blown = True
        raise self.kind(self.place)


class Interrupt(Fuse):
    """Ctrl-C at the n-th line that runs at the server, once the clients of a round are trained."""

    def __init__(self, line: int) -> None:
        super().__init__("", KeyboardInterrupt)
        self.line = line

    def at(self, place: str) -> None:
        if (
            place == "on_client_end"
            and self.now == self.round
            and not self.blown
            and sys.gettrace() is None
        ):
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                if frame.f_code.co_filename in LINES:
                    frame.f_trace = self._trace
                frame = frame.f_back
            sys.settrace(self._trace)
        if place == "on_train_batch_end":
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in LINES:
            return None
        if event == "line" and not self.blown:
            self.line -= 1
            if self.line == 0:
                sys.settrace(None)
                self.blow()
        return self._trace


class Method(FederatedCallback):
    """Changes nothing; has all the hooks that may raise."""

    moves_start = False

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self._fuse = fuse

    def transmit(self, clients: Any, update: Tensor) -> Tensor:
        self._fuse.at("transmit")
        return update

    def aggregate(self, server: Any) -> Tensor:
        self._fuse.at("aggregate")
        update: Tensor = server.update
        return update

    # A method's is called once a round; another callback's in each local step.
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._fuse.at("on_train_batch_start")
        if (
            self._fuse.place == "spilling"
            and self._fuse.now == self._fuse.round
            and not self._fuse.blown
        ):
            self._fuse.blown, pl_module.client_rows.store.budget_bytes = True, 0
            tempfile.tempdir = "/nowhere"


class Watcher(Callback):
    """All of Lightning's hooks that may raise; knows the round."""

    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._fuse.now = trainer.current_epoch
        self._fuse.at("on_train_epoch_start")


def _raising(hook: str) -> Callable[..., None]:
    def raising(self: Any, *_: Any) -> None:
        self._fuse.at(hook)

    return raising


for _hook in (*AT_SERVER, *LOCAL):
    if _hook not in vars(Method):
        setattr(Method, _hook, _raising(_hook))
for _hook in OF_LIGHTNING:
    if _hook not in {**vars(Method), **vars(Watcher)}:
        setattr(Watcher, _hook, _raising(_hook))


class Logged(Logger):
    """Keeps what was logged by step, times aside; what is logged again has to be the same."""

    name = version = "logged"  # type: ignore[assignment]  # properties of the base class

    def __init__(self, fuse: Fuse, place: str) -> None:
        super().__init__()
        self.fuse, self.place = fuse, place
        self.table: dict[int, dict[str, float]] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        values = {
            n: float(v) for n, v in metrics.items() if not n.startswith("time/") and n != "epoch"
        }
        if values:
            self.fuse.at(self.place)
        self.add({step or 0: values})

    def save(self) -> None:
        # the only place past the axis' step
        if sys._getframe(1).f_code.co_name == "_save_loggers_on_train_batch_end":
            self.fuse.at("saving logger")

    def add(self, table: dict[int, dict[str, float]]) -> None:
        for step, values in table.items():
            row = self.table.setdefault(step, {})
            assert all(row.get(n, v) == v for n, v in values.items()), (step, row, values)
            row.update(values)


class Learner(Lit):
    """With or without normalisation."""

    def __init__(self, fuse: Fuse, normed: bool) -> None:
        super().__init__()
        self.fuse = fuse
        if normed:
            self.net.insert(1, nn.BatchNorm1d(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.fuse.place == "training_step":  # a captured step would be refused for its index
            self.fuse.at("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fuse.at("validation_step")
        super().validation_step(batch, batch_idx)


class SavedOnException(Callback):
    """A user's own way of keeping what there is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def leavings(module: Any, run: pl.Trainer, logged: Logged) -> dict[str, Any]:
    """All that a run leaves, by name."""
    (optimizer,) = module.run.optimizers.server.state.values() or [{}]
    return {
        "w": module.global_vector.detach().clone(),
        "evaluated": module.evaluated_vector.detach().clone(),
        **{f"buffer {name}": value.clone() for name, value in module.learner.named_buffers()},
        **{f"server {name}": value.clone() for name, value in module.server_states.items()},
        **{f"row {name}": value.clone() for name, value in client_rows(module).items()},
        **{f"optimizer {name}": copy.deepcopy(value) for name, value in optimizer.items()},
        **{f"logged in round {t}": dict(sorted(row.items())) for t, row in logged.table.items()},
        "monitored": {
            k: float(v) for k, v in run.callback_metrics.items() if not k.startswith("time/")
        },
        "global_step": run.global_step,
        "rounds": module.run.state.rounds,
    }


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """In what two runs' leavings differ."""

    def same(a: Any, b: Any) -> bool:
        return (
            torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)
        )

    return sorted(
        n
        for n in {**ours, **theirs}
        if n not in ours or n not in theirs or not same(ours[n], theirs[n])
    )


class Case:
    """A run of four rounds with these settings of the module. ``methods`` are made anew for each
    Trainer."""

    def __init__(
        self, methods: Callable[[], list[Any]], normed: bool = True, **settings: Any
    ) -> None:
        self.methods, self.normed, self.settings = methods, normed, settings

    def begun(
        self, fuse: Fuse, *callbacks: Callback, **given: Any
    ) -> tuple[Any, pl.Trainer, Logged]:
        torch.manual_seed(0)
        settings = {"participation": 0.4, "local_epochs": 1.5, **self.settings}
        module = federated(Learner(fuse, self.normed), **settings)
        loggers = [Logged(fuse, "first logger"), Logged(fuse, "second logger")]
        watching = [*self.methods(), Method(fuse), Watcher(fuse), *callbacks]
        rounds = given.pop("rounds", ROUNDS)
        checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        return (
            module,
            trainer(rounds, watching, logger=loggers, enable_checkpointing=checkpoints, **given),
            loggers[0],
        )

    def uninterrupted(self) -> dict[str, Any]:
        module, run, logged = self.begun(Fuse(""))
        run.fit(module, blobs())
        return leavings(module, run, logged)

    def fitted_again(self, fuse: Fuse, **given: Any) -> dict[str, Any]:
        """Broken, then fitted again by the same Trainer."""
        module, run, logged = self.begun(fuse, **given)
        broken(module, run, fuse)
        run.fit(module, blobs())
        return leavings(module, run, logged)

    def resumed(self, fuse: Fuse, folder: Path, lightnings: bool) -> dict[str, Any]:
        """Broken, saved as the exception passes, by Lightning's callback or by an own one. And
        resumed by others."""
        keep: Callback = SavedOnException(folder / "own.ckpt")
        if lightnings:
            keep = ModelCheckpoint(
                folder, "last", save_top_k=1, enable_version_counter=False, save_on_exception=True,
                save_on_train_epoch_end=True,
            )  # fmt: skip
        module, run, before = self.begun(fuse, keep, default_root_dir=folder)
        broken(module, run, fuse)
        (path,) = folder.glob("*.ckpt")
        module, run, logged = self.begun(Fuse(""), default_root_dir=folder)
        run.fit(module, blobs(), ckpt_path=path)
        logged.add(before.table)
        return leavings(module, run, logged)


def broken(module: Any, run: pl.Trainer, fuse: Fuse) -> None:
    """Fit until the fuse blows."""
    kind = (
        SystemExit
        if fuse.kind is KeyboardInterrupt
        else OSError
        if fuse.place == "spilling"
        else fuse.kind
    )
    folder = tempfile.tempdir
    try:
        with pytest.raises(kind):
            run.fit(module, blobs())
    finally:
        sys.settrace(None)
        tempfile.tempdir = folder
    assert fuse.blown
