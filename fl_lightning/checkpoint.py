"""The run's part of a checkpoint, in addition to Lightning's own, and resuming from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.client import run_optimizers
from fl_lightning.engines.engine_plan import EnginePlan
from fl_lightning.errors import UserError
from fl_lightning.introspection.init_args import (
    Difference,
    NotKnown,
    described_object,
    differences,
    settings_of,
)
from fl_lightning.round.global_model import GlobalModel, set_buffers
from fl_lightning.storage.client_rows import ClientRows
from fl_lightning.storage.lock import RunLock, held_by_all
from fl_lightning.storage.rows_on_disk import KEY, RowsOnDisk, find_folder
from fl_lightning.storage.run_state import RunState, Versions
from fl_lightning.storage.secret import Secret
from fl_lightning.storage.segments import Index

VERSION = 1  # version of the run's part of a checkpoint
# Settings of the data that may change at a resume: where files lie and how they are read.
FREE = ("root", "download", "num_workers", "pin_memory", "eval_batch_size", "cache_dir")
# Files may move to another folder, but another file name means another file.
FILES = ("path", "file", "test", "val", "folder", "data_dir", "tokenizer")
# If no value is given, the run's seed and the partition's hash decide these.
BY_HASH = ("partition", "seed")


@dataclass
class Identity:
    """The settings that have to be the same when a run is resumed.

    Args:
        arguments: the settings that decide what a round does, as text, by name.
        methods: stateful callbacks with their arguments, by name.
        partition: the partition's hash; empty if there is none.
    """

    seed: int
    arguments: dict[str, str]
    methods: dict[str, str]
    partition: str

    @classmethod
    def of(cls, run: Any, trainer: Any) -> Identity:
        """Return a run's identity, with a learner that a config describes."""
        data = trainer.datamodule
        compared = {
            **run.settings.compared(),
            **run.optimizers.accounts,
            "precision": str(trainer.precision),
            "batch_size": repr(getattr(data, "batch_size", None)),
            "biases": repr([(type(b).__name__, vars(b)) for b in getattr(data, "biases", ())]),
            "drop_last": repr(bool(getattr(data, "drop_last", False))),
            "labels": str(getattr(data, "label_hash", "")),
        }
        if data is not None:
            with suppress(NotKnown):
                compared |= settings_of("data", _same_data(described_object(data)[0]))
        if run.model.described:
            compared |= settings_of("model.learner", run.model.described)
        compared["methods without state"] = run.methods.stateless()
        partition = str(getattr(data, "partition_hash", ""))
        return cls(run.seed(trainer), compared, run.methods.fingerprint(), partition)

    def check_same(self, held: SavedRun) -> None:
        """Refuse a checkpoint of a run with other settings.

        Raises:
            UserError: it names the settings that differ.
        """
        differing = self.differing(held)
        differing += [("seed", held.seed, self.seed)] * (held.seed != self.seed)
        if held.partition and held.partition != self.partition:
            differing.append(("data's partition", held.partition, self.partition))
        if differing:
            raise other_settings(differing)

    def differing(self, then: SavedRun | Identity) -> list[Difference]:
        # A checkpoint has these entries only if the run used them.
        unsaid = {"client_scheduler": "ignore", "asynchronous": "None", "accumulate": "1"}
        one, other = {**unsaid, **then.arguments}, {**unsaid, **self.arguments}
        found: list[Difference] = []
        for key, before, now in differences(one, other):
            if None in (before, now):
                continue
            if key in ("client_optimizer", "server_optimizer"):
                found += run_optimizers.differing(key, before, now)
            else:
                found.append((key, before, now))
        methods = differences(then.methods, self.methods, "absent")
        return found + [(f"method {name}", before, now) for name, before, now in sorted(methods)]


def _same_data(config: dict[str, Any]) -> dict[str, Any]:
    """Return the data's config without settings that change no result, and files by their names."""
    kept = {}
    for name, value in config["init_args"].items():
        if name in FILES and isinstance(value, str):
            kept[name] = Path(value).name
        elif name not in FREE and not (name in BY_HASH and value is None):
            kept[name] = value
    return {**config, "init_args": kept}


def single_numbers(metrics: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the metrics that are one number; callbacks may put anything else among them."""
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, float):
            numbers[name] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, int) or (isinstance(value, Tensor) and value.numel() == 1):
            numbers[name] = torch.as_tensor(value).detach().cpu()
    return numbers


def other_settings(differing: Sequence[Difference]) -> UserError:
    shown = "; ".join(f"{name}: {then} then, {now} now" for name, then, now in differing[:4])
    return UserError(
        f"the checkpoint is of a run with other settings ({shown}), so resuming would mix "
        "two runs. To begin another run with the new settings, add --trainer.default_root_dir "
        "with a new folder. To go on with the old run, give the settings of its config.yaml. To "
        "go on with the new settings all the same, add --model.strict_resume false."
    )


def ended_early(trainer: Any) -> tuple[bool, str]:
    """Return whether EarlyStopping ended the resumed run, and the note about it.

    Lightning restores that the callback stopped, but still goes on for a round. Until the Trainer's
    ``min_epochs`` there are rounds left to do, and no note is given.
    """
    for callback in trainer.early_stopping_callbacks if trainer.ckpt_path else ():
        done = trainer.current_epoch
        first = callback.stopped_epoch + 1
        last = max(first, trainer.min_epochs or 0)
        if callback.stopping_reason.value and first <= done <= last:
            said = (
                f"EarlyStopping ended this run by {callback.monitor} after {done} rounds, whatever "
                "its limits are now; without this callback it goes on"
            )
            return True, said if done == last else ""
    return False, ""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """The run's part of a checkpoint: it is written, checked and read back by this class.

    Args:
        versions: models and buffers from which clients of an asynchronous run are still training.
        chosen: the participants by round, if a method chose them.
        w: the server's model, if another model is evaluated; None: the checkpoint's weights are w.
        w0: w^0, if a state starts from it.
        buffers: buffers that the checkpoint's ``state_dict`` does not have.
        clients: the segment of each client row; ``folders``: the folders of the segments.
        arguments, methods, partition: as in :class:`Identity`. The partition is that of the rows,
            because a fit on other data, which is refused, may also save a checkpoint.
        secret: the name of the run's secret; empty if it has none.
        sent: the last round in which each client was sent w, if a method depends on it.
        monitored: the Trainer's ``callback_metrics``, which an epoch without validation reads.
        base: frozen weights that methods changed, if the checkpoint's weights have fewer bits;
            ``base_costs``: costs by round and weight; ``base_kinds``: shape and dtype by name.
    """

    seed: int
    rounds: int
    logged: dict[str, float]
    versions: Versions
    chosen: dict[int, tuple[int, ...]]
    w: Tensor | None
    w0: Tensor | None
    buffers: dict[str, Tensor]
    server: dict[str, Tensor]
    clients: Index
    folders: list[str]
    arguments: dict[str, str]
    methods: dict[str, str]
    partition: str | None
    engine: EnginePlan | None
    secret: str
    sent: dict[int, int]
    monitored: dict[str, Tensor]
    base: dict[str, Tensor]
    base_costs: list[list[int]]
    base_kinds: dict[str, str]

    @classmethod
    def of(
        cls,
        identity: Identity,
        state: RunState,
        model: GlobalModel,
        named: Collection[str],
        plan: EnginePlan,
        disk: RowsOnDisk,
        secret: Secret,
        trainer: Any,
    ) -> SavedRun:
        """Collect what a run holds now; every process calls it, to write its rows.

        ``named``: names in the checkpoint's ``state_dict``, which holds the learner with the
        evaluated model.
        """
        committed = model.committed()
        buffers = committed.buffers.items()
        index, folders = disk.flushed(state.rows)
        return cls(
            seed=identity.seed,
            rounds=state.rounds,
            logged=state.logged,
            versions={v: (w, dict(buffers)) for v, (w, buffers) in state.versions.items()},
            chosen=dict(state.chosen),
            w=None if committed.evaluated is None else committed.w.clone(),
            w0=state.initial_vector,
            buffers={name: value for name, value in buffers if name not in named},
            server={key: value.clone() for key, value in state.server.items()},
            clients=index,
            folders=folders,
            arguments=identity.arguments,
            methods=identity.methods,
            partition=state.partition,
            engine=plan,
            secret=secret.name,
            sent=dict(state.sent),
            monitored=single_numbers(trainer.callback_metrics),
            base={} if state.base is None else state.base.kept(),
            base_costs=[] if state.base is None else state.base.costs,
            base_kinds={} if state.base is None else state.base.kinds(),
        )

    def entries(self) -> dict[str, Any]:
        plan = None if self.engine is None else self.engine.as_dict()
        return {"version": VERSION, **vars(self), "engine": plan}

    def without_optimizers(self) -> SavedRun:
        clients = {k: v for k, v in self.clients.items() if not k.startswith("optimizer.")}
        return replace(self, clients=clients)

    def restore(
        self, rows: ClientRows, model: GlobalModel, ckpt_path: str | Path | None
    ) -> RunState:
        """Return the run's state, whose rows are read when needed; also set w and the buffers.

        Raises:
            UserError: rows are missing at the checkpoint's place.
        """
        if self.clients:
            rows.store.load(self.clients, find_folder(ckpt_path, self.folders, self.clients))
        w = model.w.detach()
        if self.w is None:
            # A model that was trained before may have evaluated another one than w, and then
            # Lightning has loaded the weights into that one.
            model.move_to(model.evaluated.detach(), None, self.buffers)
        else:
            # Under partial averaging the weights loaded by name are the evaluated model. The
            # checkpoint holds w separately.
            model.move_to(self.w, w.clone(), self.buffers)
        versions: Versions = {}
        for number, (vector, buffers) in self.versions.items():
            here = {name: value.to(w.device) for name, value in buffers.items()}
            versions[number] = vector.to(w.device), here
        return RunState(
            rows=rows,
            server={key: value.to(w.device) for key, value in self.server.items()},
            initial_vector=None if self.w0 is None else self.w0.to(w.device),
            rounds=self.rounds,
            logged=self.logged,
            chosen=self.chosen,
            versions=versions,
            sent=dict(self.sent),
        )


def resumed(saved: dict[str, Any]) -> SavedRun:
    """Return the run's part of a checkpoint to resume from.

    Raises:
        UserError: there is none, or it holds weights only.
    """
    held = federated_part(saved)
    if "optimizer_states" not in saved:
        raise UserError(
            "ckpt_path: the checkpoint holds weights only (save_weights_only=True), so it cannot "
            "be resumed. To start from its weights, give it as model.init_from."
        )
    return held


def keep_settings(
    held: list[Any], optimizer: Optimizer, then: str, note: Callable[[str], None]
) -> None:
    """Let the run's settings of the server optimizer take the place of other ones in ``held``, the
    checkpoint's states of optimizers, which Lightning loads next.

    Args:
        then: the account of the checkpoint's server optimizer.
    """
    fresh = optimizer.state_dict()
    now = run_optimizers.account(optimizer)
    if run_optimizers.differing("server_optimizer", then, now):
        if run_optimizers.state_fits(then, now):
            fresh["state"] = held[0]["state"]
        elif any(held[0]["state"].values()):
            note(
                "server_optimizer has other settings than the checkpoint's, to which its state "
                "does not fit, so the server's optimizer begins anew"
            )
        held[0] = fresh


def begin_round_again(loops: dict[str, Any], rounds: int, interrupted: bool) -> None:
    """Let a checkpoint that is written within a round resume at the beginning of the round.

    Lightning resumes in the middle. That would leave out the round (if saved in
    ``on_train_epoch_start``) or its validation. A committed round is not trained again. Only if
    validation is over, and nothing failed, is there nothing to repeat.

    Args:
        loops: the state of Lightning's loops, which is changed in place.
        rounds: number of committed rounds.
        interrupted: whether this is the checkpoint of an exception.
    """
    if "fit_loop" not in loops:
        return
    fit = loops["fit_loop"]
    epochs = fit["epoch_progress"]
    batches = fit["epoch_loop.batch_progress"]
    t = epochs["current"]["processed"]
    validated = fit["epoch_loop.val_loop.batch_progress"]
    total = validated["total"]
    over = validated["is_last_batch"] and total["completed"] == total["ready"] > 0
    if epochs["current"]["ready"] == t or (rounds > t and over and not interrupted):
        return
    for count in (epochs["total"], epochs["current"], batches["total"]):
        count.update(dict.fromkeys(count, t))
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = t


class CheckpointFolder:
    """The folder of a run's checkpoints: its lock and its files."""

    def __init__(self) -> None:
        self._lock: RunLock | None = None
        self._rows: RowsOnDisk | None = None

    def claim(self, trainer: Any, begins: bool) -> None:
        """Lock the folder for this run, before a checkpoint in it is read.

        ``begins``: also make the folder, to write to it.

        Raises:
            UserError: another process writes to it.
        """
        if not begins:
            self._rows = None  # an earlier fit may have been another Trainer's, elsewhere
        # On the command line a callback claims the run's folder, earlier than this module could.
        claimed = any(hasattr(callback, "claims_folder") for callback in trainer.callbacks)
        if claimed or not trainer.checkpoint_callbacks:
            return
        folder = RowsOnDisk.of(trainer).folder.parent
        if begins:
            folder.mkdir(parents=True, exist_ok=True)
        if self._lock is None and folder.is_dir():
            self._lock = held_by_all(folder, trainer)
        if begins and self._lock is not None:
            self._lock.use()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def tidy(self, rows: ClientRows) -> None:
        if self._rows is not None:
            self._rows.tidy(rows)

    def save(
        self,
        saved: dict[str, Any],
        trainer: Any,
        identity: Identity,
        state: RunState,
        model: GlobalModel,
        plan: EnginePlan,
        secret: Secret,
    ) -> None:
        self._rows = self._rows or RowsOnDisk.of(trainer)
        named = saved["state_dict"]
        held = SavedRun.of(identity, state, model, named, plan, self._rows, secret, trainer)
        saved[KEY] = held.entries()
        if trainer.is_global_zero:
            secret.keep(self._rows.folder)
        begin_round_again(saved.get("loops", {}), state.rounds, trainer.interrupted)
        for logger in trainer.loggers:
            logger.save()


def check_savable(trainer: Any) -> None:
    """Refuse a checkpoint that several processes cannot write together.

    Raises:
        UserError: an exception occurred in one of several processes.
    """
    if trainer.interrupted and trainer.world_size > 1:
        raise UserError(
            "a run of several processes cannot save a checkpoint after an exception, because the "
            "other processes do not take part. Resume from the last checkpoint of a round."
        )


def with_hyper_parameters(saved: dict[str, Any], model: GlobalModel) -> None:
    """Put the learner's hyper-parameters into a checkpoint."""
    saved.update(model.hyper_parameters())


def federated_part(checkpoint: dict[str, Any]) -> SavedRun:
    """Return the run's part of a checkpoint.

    Raises:
        UserError: no federated run wrote the checkpoint, or another version of this package did.
    """
    held = checkpoint.get(KEY)
    if held is None:
        raise UserError(
            "ckpt_path: the checkpoint was not written by a federated run, so it cannot be "
            "resumed. To start from its weights, give it as model.init_from."
        )
    version = held.get("version")
    if version != VERSION:
        raise UserError(
            f"ckpt_path: the checkpoint has version {version} of the format, and this "
            f"fl-lightning reads {VERSION}. Resume with the fl-lightning that wrote it."
        )
    entries = {name: value for name, value in held.items() if name != "version"}
    return SavedRun(**{**entries, "engine": EnginePlan.from_dict(held["engine"])})


def load_buffers(learner: Any, checkpoint: dict[str, Any]) -> None:
    """Load the run's buffers that are not persistent, which a ``state_dict`` leaves out."""
    set_buffers(learner, checkpoint.get(KEY, {}).get("buffers", {}), ())
