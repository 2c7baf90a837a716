"""Runs that are broken off by an exception at a chosen place, once, and then go on; and what a run leaves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.loggers import Logger
from torch import Tensor, nn

from fl_lightning.callback import FederatedCallback
from tests.helpers.learners import Lit, blobs, client_rows, federated, trainer

ROUNDS, BROKEN_IN = 4, 2
FEDERATED = ("on_round_start", "on_local_start", "on_local_gradient", "on_local_step_end", "on_local_end", "transmit")
AT_SERVER = ("aggregate", "on_server_update", "on_round_end")
BEFORE = ("on_train_epoch_start", "on_train_batch_start", "on_client_end", "on_before_optimizer_step")
AFTER = ("on_train_batch_end", "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end",
         "on_validation_end", "on_train_epoch_end")  # fmt: skip
OTHERS = ("training_step", "validation_step", "first logger", "second logger", "server optimizer", "make_room")


class Broken(Exception):
    pass


class Fuse:
    """Raises at one place of round ``BROKEN_IN``, the first time that it is reached."""

    def __init__(self, place: str, kind: type[BaseException] = Broken, round: int = BROKEN_IN) -> None:
        self.place, self.kind, self.round, self.now, self.blown = place, kind, round, 0, False

    def at(self, place: str) -> None:
        if place == self.place and self.now == self.round and not self.blown:
            self.blown = True
            raise self.kind(place)


class Method(FederatedCallback):
    """Changes nothing; has all the hooks that may raise."""

    moves_start = False

    def __init__(self, fuse: Fuse) -> None:
        super().__init__()
        self._fuse = fuse

    def on_round_start(self, server: Any) -> None:
        self._fuse.at("on_round_start")

    def on_local_start(self, clients: Any) -> None:
        self._fuse.at("on_local_start")

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> None:
        self._fuse.at("on_local_gradient")

    def on_local_step_end(self, clients: Any) -> None:
        self._fuse.at("on_local_step_end")

    def on_local_end(self, clients: Any) -> None:
        self._fuse.at("on_local_end")

    def transmit(self, clients: Any, update: Tensor) -> Tensor:
        self._fuse.at("transmit")
        return update

    def aggregate(self, server: Any) -> Tensor:
        self._fuse.at("aggregate")
        value: Tensor = server.update
        return value

    def on_server_update(self, server: Any) -> None:
        self._fuse.at("on_server_update")

    def on_round_end(self, server: Any) -> None:
        self._fuse.at("on_round_end")


class Watcher(Callback):
    """Lightning's hooks; knows the round."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.fuse.now = trainer.current_epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.fuse.now = trainer.current_epoch
        self.fuse.at("on_train_epoch_start")


def _raising(hook: str) -> Callable[..., None]:
    def raising(self: Watcher, *_: Any) -> None:
        self.fuse.at(hook)

    return raising


for _hook in (*BEFORE[1:], *AFTER):
    setattr(Watcher, _hook, _raising(_hook))


class Logged(Logger):
    """Keeps what was logged by step, times aside; what is logged again has to be the same."""

    def __init__(self, fuse: Fuse, place: str) -> None:
        super().__init__()
        self.fuse, self.place = fuse, place
        self.table: dict[int, dict[str, float]] = {}

    name = version = property(lambda self: "logged")  # type: ignore[assignment]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        assert step is not None
        if not all(name.startswith("time/") for name in metrics):
            self.fuse.at(self.place)
        values = {n: float(v) for n, v in metrics.items() if not n.startswith("time/") and n != "epoch"}
        row = self.table.setdefault(step, {})
        assert all(row.get(n, v) == v for n, v in values.items()), (step, row, values)
        row.update(values)


class Learner(Lit):
    """With or without normalisation."""

    def __init__(self, fuse: Fuse, normed: bool) -> None:
        super().__init__()
        self.fuse = [fuse]
        if normed:
            self.net.insert(1, nn.BatchNorm1d(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.fuse[0].at("training_step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fuse[0].at("validation_step")
        super().validation_step(batch, batch_idx)


class SavedOnException(Callback):
    """An own way of keeping what there is."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(self.path)


def leavings(module: Any, run: pl.Trainer, table: dict[int, dict[str, float]]) -> dict[str, Any]:
    """All that a run leaves, by name."""
    (state,) = module.run.server.state.values() or [{}]
    return {
        "w": module.global_vector.detach().clone(),
        "evaluated": module.evaluated_vector.detach().clone(),
        **{f"buffer {name}": value.clone() for name, value in module.learner.named_buffers()},
        **{f"server {name}": value.clone() for name, value in module.server_states.items()},
        **{f"row {name}": value.clone() for name, value in client_rows(module).items()},
        **{f"optimizer {name}": copy.deepcopy(value) for name, value in state.items()},
        "global_step": run.global_step,
        "rounds": module.run.state.rounds,
        "logged": {t: dict(sorted(row.items())) for t, row in sorted(table.items())},
        "callback_metrics": {k: float(v) for k, v in run.callback_metrics.items() if not k.startswith("time/")},
    }


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """In what two runs' leavings differ."""

    def same(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)

    return sorted(n for n in {**ours, **theirs} if n not in ours or n not in theirs or not same(ours[n], theirs[n]))


class Case:
    """A run of four rounds: ``settings`` of the module, ``methods`` made anew for each fit."""

    def __init__(
        self, settings: dict[str, Any], methods: Callable[[], list[Any]], normed: bool = True, device: str = "cpu"
    ) -> None:
        self.settings, self.methods, self.normed = settings, methods, normed

    def begin(self, fuse: Fuse, *callbacks: Callback, **given: Any) -> tuple[Any, pl.Trainer, list[Logged]]:
        torch.manual_seed(0)
        module = federated(Learner(fuse, self.normed), **{"participation": 0.4, "local_epochs": 1.5, **self.settings})
        loggers = [Logged(fuse, "first logger"), Logged(fuse, "second logger")]
        quiet = {"logger": loggers, "enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
        methods = [*self.methods(), Method(fuse), Watcher(fuse)]
        return module, trainer(ROUNDS, [*methods, *callbacks], **{**quiet, **given}), loggers

    def uninterrupted(self) -> dict[str, Any]:
        module, run, loggers = self.begin(Fuse(""))
        run.fit(module, blobs())
        return leavings(module, run, loggers[0].table)

    def fitted_again(self, fuse: Fuse) -> dict[str, Any]:
        """Broken, then fitted again with the same objects."""
        module, run, loggers = self.begin(fuse)
        self.broken(module, run, fuse)
        run.fit(module, blobs())
        return leavings(module, run, loggers[0].table)

    def resumed(self, fuse: Fuse, folder: Path, lightnings: bool) -> dict[str, Any]:
        """Broken, saved as the exception passes (by Lightning's callback, or by an own one), and resumed anew."""
        keep: Callback = SavedOnException(folder / "own.ckpt")
        if lightnings:
            keep = ModelCheckpoint(folder, "last", enable_version_counter=False, save_on_exception=True, save_top_k=1,
                                   monitor=None, save_on_train_epoch_end=True)  # fmt: skip
        module, run, (logged, _) = self.begin(fuse, keep, default_root_dir=folder)
        self.broken(module, run, fuse)
        del module, run
        (path,) = folder.glob("*.ckpt")
        module, run, (after, _) = self.begin(Fuse(""), default_root_dir=folder)
        run.fit(module, blobs(), ckpt_path=path)
        for t, row in after.table.items():
            before = logged.table.setdefault(t, {})
            assert all(before.get(n, v) == v for n, v in row.items()), (t, before, row)
            before.update(row)
        return leavings(module, run, logged.table)

    def broken(self, module: Any, run: pl.Trainer, fuse: Fuse) -> None:
        try:
            run.fit(module, blobs())
        except (fuse.kind, SystemExit):
            pass
        assert fuse.blown, f"{fuse.place} was never reached"
