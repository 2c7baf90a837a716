"""The run's part of a checkpoint, besides Lightning's own, and how a run goes on from it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning.engines import configured_optimizer
from fl_lightning.engines.plan import EnginePlan
from fl_lightning.errors import UserError
from fl_lightning.learner.layout import all_finite
from fl_lightning.machine.processes import gathered
from fl_lightning.methods import Methods
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.storage import forged
from fl_lightning.storage.apart import is_plain, read_plain
from fl_lightning.storage.checkpoint_io import AtomicCheckpointIO
from fl_lightning.storage.lock import RunLock, held_by_all
from fl_lightning.storage.rows import ClientRows
from fl_lightning.storage.run_state import RunState, Versions, unpacked
from fl_lightning.storage.secret import Secret
from fl_lightning.storage.segments import Index, merge_indices

KEY = "federated"
VERSION = 1  # of what lies there


@dataclass
class Identity:
    """The settings that have to be the same when a run is resumed.

    Args:
        arguments: the settings that decide what a round does, as text, by name.
        methods: stateful callbacks with their arguments, by name.
        partition: the partition's hash; empty where there is none.
    """

    seed: int
    arguments: dict[str, str]
    methods: dict[str, str]
    partition: str

    @classmethod
    def of(cls, seed: int, arguments: dict[str, str], methods: Methods, data: Any) -> Identity:
        """The identity of a run; the data's and methods' arguments are added to ``arguments``."""
        of_data = {
            "batch_size": repr(getattr(data, "batch_size", None)),
            "biases": repr([(type(b).__name__, vars(b)) for b in getattr(data, "biases", ())]),
            "drop_last": repr(bool(getattr(data, "drop_last", False))),
        }
        partition = str(getattr(data, "partition_hash", ""))
        compared = {**arguments, **of_data, "methods without state": methods.stateless()}
        return cls(seed, compared, methods.fingerprint(), partition)

    def check_same(self, held: dict[str, Any]) -> None:
        """Refuse a checkpoint of a run with other settings.

        Raises:
            UserError: with what differs.
        """
        # A checkpoint names these only where they are used.
        unsaid = {"client_scheduler": "ignore", "asynchronous": "None"}
        now = {**unsaid, **self.arguments}
        then = {**unsaid, **held["arguments"]}
        differing = []
        for key in filter(then.__contains__, now):
            if key in ("client_optimizer", "server_optimizer"):
                differing += configured_optimizer.differing(key, then[key], now[key])
            elif then[key] != now[key]:
                differing.append(f"{key}: {then[key]} then, {now[key]} now")
        methods_then = held["methods"]
        for name in sorted(set(self.methods) | set(methods_then)):
            method_then = methods_then.get(name, "absent")
            method_now = self.methods.get(name, "absent")
            if method_then != method_now:
                differing.append(f"method {name}: {method_then} then, {method_now} now")
        if held["seed"] != self.seed:
            differing.append(f"seed={held['seed']} then, {self.seed} now")
        if held["partition"] and held["partition"] != self.partition:
            differing.append(f"data's partition: {held['partition']} then, {self.partition} now")
        if differing:
            raise other_settings(differing)


def other_settings(differing: Iterable[str]) -> UserError:
    """What is said where a run would go on with other settings; ``differing``: then and now."""
    shown = "; ".join(list(differing)[:4])
    return UserError(
        f"the checkpoint is of a run with other settings ({shown}), so resuming would mix "
        "two runs. Give the settings of the run's config.yaml, or "
        "model.strict_resume=false to go on all the same."
    )


def ended_early(trainer: Any) -> tuple[bool, str]:
    """Whether EarlyStopping ended the resumed run, and what is said of it.

    Lightning restores that the callback stopped, and goes on for a round all the same. Up to the
    Trainer's ``min_epochs`` there are rounds left to do, and nothing is said.
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


def content(
    identity: Identity,
    state: RunState,
    model: GlobalModel,
    named: Collection[str],
    plan: EnginePlan,
    disk: RowsOnDisk,
) -> dict[str, Any]:
    """The part under :data:`KEY` of a checkpoint; every process calls it, to write its rows.

    ``named``: names in the checkpoint's ``state_dict``, which holds the learner as it is evaluated.
    """
    committed = model.committed()
    return {
        "version": VERSION,
        "seed": identity.seed,
        **state.progress(),
        "w": None if committed.evaluated is None else committed.w.clone(),
        "w0": state.initial_vector,
        "buffers": {name: value for name, value in committed.buffers.items() if name not in named},
        "server": {key: value.clone() for key, value in state.server.items()},
        # "clients": the segment of each row, and "folders": where segments lie.
        **disk.flushed(state.rows),
        "arguments": identity.arguments,
        "methods": identity.methods,
        # The rows' partition: a fit on other data, which is refused, may save a checkpoint too.
        "partition": state.partition,
        "engine": plan.as_dict(),
    }


def restored(
    held: dict[str, Any], rows: ClientRows, model: GlobalModel, ckpt_path: str | Path | None
) -> RunState:
    """The run's state from a checkpoint, whose rows are read when needed; sets w and buffers too.

    Raises:
        UserError: the rows are not where the checkpoint says.
    """
    if held["clients"]:
        rows.store.load(held["clients"], find_folder(ckpt_path, held["folders"]))
    w = model.w.detach()
    forged.check_alike(held["buffers"], model.buffers(), "federated.buffers")
    if held["w0"] is not None:
        check_vector(held["w0"], w)
    if held["w"] is None:
        model.set_buffers(held["buffers"])
    else:
        # Under partial averaging the weights that were loaded by name are what is evaluated, and
        # w lies beside them.
        check_vector(held["w"], w)
        model.move_to(held["w"], w.clone(), held["buffers"])
    versions: Versions = {}
    for number, entry in held.get("versions", {}).items():
        check_vector(entry["w"], w)
        forged.check_alike(entry["buffers"], model.buffers(), f"federated.versions.{number}")
        buffers = {name: value.to(w.device) for name, value in entry["buffers"].items()}
        versions[int(number)] = entry["w"].to(w.device), buffers
    return RunState(
        rows=rows,
        server={k: v.to(w.device) for k, v in held["server"].items()},
        initial_vector=None if held["w0"] is None else held["w0"].to(w.device),
        rounds=held.get("rounds", 0),
        logged=held.get("logged", {}),
        chosen=unpacked(held["chosen"]) if "chosen" in held else {},
        versions=versions,
    )


def begin_round_again(loops: dict[str, Any], rounds: int, interrupted: bool) -> None:
    """Let a checkpoint that is written within a round resume at the round's beginning.

    Lightning resumes in the middle, which leaves out the round (saved in ``on_train_epoch_start``)
    or its validation. A committed round is not trained again. Only where validation is over, and
    nothing failed, there is nothing to repeat.

    Args:
        loops: the state of Lightning's loops, changed in place.
        rounds: how many are committed.
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


class RowsOnDisk:
    """The places of a run's client rows on disk, and which of them its checkpoints need.

    Args:
        folder: where their segments lie: ``state/`` of the run.
        checkpoints: the folders of the run's checkpoints.
    """

    def __init__(self, folder: Path, checkpoints: list[Path]) -> None:
        self.folder = folder
        self.checkpoints = checkpoints
        self._known: dict[Any, Any] = {}  # indices of checkpoint files that were looked at

    @classmethod
    def of(cls, trainer: Any) -> RowsOnDisk:
        """The places beside the run's checkpoints."""
        root = Path(trainer.default_root_dir)
        folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        checkpoints = [Path(folder) for folder in folders if folder]
        # The run's own folder comes first: checkpoints of the user's may lie with a logger.
        own = (root / "checkpoints").resolve()
        checkpoints.sort(key=lambda folder: folder.resolve() != own)
        if not checkpoints:
            return cls(root / "state", [])
        first = checkpoints[0]
        beside = first.parent if first.name == "checkpoints" else first
        return cls(beside / "state", checkpoints)

    def flushed(self, rows: ClientRows) -> dict[str, Any]:
        """Write the rows that changed, and return where they lie; every process calls it."""
        store = rows.store
        if store.names():
            store.flush(self.folder)
        index = merge_indices(gathered(store.index())) if rows.world > 1 else store.index()
        # The checkpoint that is being written is no file yet, so its index is given beside those
        # of the files.
        if store.names():
            store.collect(self.folder, chain([index], self._indices()))
        folders = [str(self.folder.resolve())]
        if self.checkpoints:
            folders.insert(0, os.path.relpath(str(self.folder), str(self.checkpoints[0])))
        return {"clients": index, "folders": folders}

    def tidy(self, rows: ClientRows) -> None:
        """After the last checkpoint: delete what only those before it needed."""
        if rows.store.names():
            rows.store.collect(self.folder, self._indices(), last=True)

    def _indices(self) -> Iterator[Index]:
        """The indices of the checkpoints in these folders; each file is opened once."""
        present: dict[Any, Any] = {}
        for directory in self.checkpoints:
            for path in sorted(directory.glob("*.ckpt")) if directory.is_dir() else ():
                # A link to nothing, or a pipe, has that name too.
                if not path.is_file():
                    continue
                # A file that was written again has another inode, time or size.
                stat = path.stat()
                file = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                if file in self._known:
                    present[file] = self._known[file]
                else:
                    present[file] = index_in(path)
        self._known = present
        yield from present.values()


class CheckpointFolder:
    """The folder of a run's checkpoints: who may write there, and what is written."""

    def __init__(self) -> None:
        self._lock: RunLock | None = None
        self._rows: RowsOnDisk | None = None

    def claim(self, trainer: Any, begins: bool) -> None:
        """Make the folder this run's own, before a checkpoint in it is read.

        ``begins``: make the folder, to write there.

        Raises:
            UserError: another process writes there.
        """
        # The command line claims a run's folder by a callback, earlier than we could.
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
        """Let other processes write there."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def tidy(self, rows: ClientRows) -> None:
        """After the last round: keep on disk what the checkpoints there need, and no more."""
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
        """Add the run's part to a checkpoint, and write what lies beside it."""
        self._rows = self._rows or RowsOnDisk.of(trainer)
        saved[KEY] = content(identity, state, model, saved["state_dict"], plan, self._rows)
        secret.keep(saved[KEY], self._rows.folder if trainer.is_global_zero else None)
        begin_round_again(saved.get("loops", {}), state.rounds, trainer.interrupted)
        for logger in trainer.loggers:
            logger.save()


def check_savable(trainer: Any) -> None:
    """Refuse a checkpoint that processes cannot write together.

    Raises:
        UserError: one of several fails.
    """
    if trainer.interrupted and trainer.world_size > 1:
        raise UserError(
            "a run of several processes cannot save a checkpoint as an exception passes: the "
            "other processes are elsewhere. Resume from the last checkpoint of a round."
        )


def index_in(path: Path) -> Index:
    """A checkpoint's index of rows, copied out of the file; empty if it is damaged or no run's."""
    # Reading a pipe would wait for ever.
    if not path.is_file():
        return {}
    # The user may keep files of any content there, and each fails in a way of its own.
    try:
        loaded = read_plain(path, map_location="cpu", mmap=True)
    except Exception:
        return {}
    held = loaded.get(KEY) if isinstance(loaded, dict) else None
    entries = held.get("clients") if isinstance(held, dict) else None
    if not forged.is_index(entries):
        return {}
    assert isinstance(entries, dict)
    index: Index = {}
    for name, entry in entries.items():
        index[name] = {column: tensor.clone() for column, tensor in entry.items()}
    return index


def find_folder(ckpt_path: str | Path | None, folders: Iterable[str]) -> Path:
    """The folder of the segments: beside the checkpoint, or where they were."""
    beside = Path(ckpt_path).parent if ckpt_path else Path()
    tried = [(beside / f) if not os.path.isabs(f) else Path(f) for f in folders]
    for folder in tried:
        if folder.is_dir():
            return folder
    raise UserError(
        f"the checkpoint's client state lies in {tried[0]}, which is not there. Move the run's "
        "folder as a whole (checkpoints/ and state/ together), or put it back."
    )


def with_hyper_parameters(saved: dict[str, Any], model: GlobalModel) -> None:
    """Put the learner's hyper-parameters into a checkpoint, and the data's where plain."""
    saved.update(model.hyper_parameters())
    of_data = dict(saved.get("datamodule_hyper_parameters", {}))
    saved["datamodule_hyper_parameters"] = {
        name: value for name, value in of_data.items() if is_plain(value)
    }


def federated_part(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The part of a checkpoint under :data:`KEY`.

    Raises:
        UserError: the checkpoint is no federated run's.
    """
    held: dict[str, Any] | None = checkpoint.get(KEY)
    if held is not None and forged.version_of(held, VERSION) > VERSION:
        raise UserError(
            f"ckpt_path: the checkpoint has version {held['version']} of the format, and this "
            f"fl-lightning reads up to {VERSION}. Resume with the newer fl-lightning that wrote "
            "it."
        )
    if held is None:
        raise UserError(
            "ckpt_path: the checkpoint was not written by a federated run, so it cannot be "
            "resumed. To start from its weights, give it as model.init_from."
        )
    return held


def check_vector(held: Any, own: Tensor) -> None:
    """Refuse a global vector that cannot be the run's."""
    if (
        not isinstance(held, Tensor)
        or held.shape != own.shape
        or forged.kind(held) != forged.kind(own)
        or not all_finite(held)
    ):
        raise UserError(
            "ckpt_path: the checkpoint is damaged: the server's model in it is not a finite "
            f"vector of {own.numel()} numbers of {own.dtype}. Take another checkpoint, or start "
            "anew."
        )


def check_weights(learner: Any, weights: Any, given: str = "ckpt_path") -> None:
    """Refuse weights of another model than the learner, and damaged ones.

    Raises:
        UserError: with the first that is missing, unknown, of another shape or kind of number, or
            not finite.
    """
    own = learner.state_dict()
    difference = _differs(own, weights, learner.strict_loading)
    if difference:
        raise UserError(
            f"{given}: the checkpoint is of another model than {type(learner).__name__}: "
            f"{difference}. Use the learner (class and sizes) that the run was started with; its "
            "config.yaml has it."
        )
    for name, _ in learner.named_parameters():
        if name in weights and all_finite(own[name]) and not all_finite(weights[name]):
            raise UserError(
                f"{given}: the checkpoint is damaged: the weights {name} hold values that are "
                "not finite, which no run saves. Take another checkpoint (such as "
                "checkpoints/best.ckpt of the same run), or start anew."
            )


def _differs(own: dict[str, Tensor], weights: Any, strict: bool) -> str:
    """The first difference of weights from the learner's own, in name, shape or kind of number.

    It is empty where there is none.
    """
    if not isinstance(weights, dict):
        return f"its state_dict is a {type(weights).__name__}"
    for name, tensor in weights.items():
        if name not in own:
            if strict:
                return f"it has {name}, which the learner has not"
        elif not isinstance(tensor, Tensor) or not isinstance(own[name], Tensor):
            if type(tensor) is not type(own[name]):
                there = type(tensor).__name__
                return f"{name} is a {there} there and a {type(own[name]).__name__} here"
        elif own[name].shape != tensor.shape:
            return f"{name} has shape {tuple(tensor.shape)} there and {tuple(own[name].shape)} here"
        elif forged.kind(own[name]) != forged.kind(tensor):
            return f"{name} holds {tensor.dtype} there and {own[name].dtype} here"
    missing = [name for name in own if name not in weights]
    return f"it lacks {missing[0]}" if strict and missing else ""


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """The learner's weights by name from a checkpoint or an exported file.

    Raises:
        UserError: missing, damaged, or without weights.
    """
    if Path(path).is_dir():
        raise UserError(
            f"init_from={str(path)!r} is a folder; give a file, such as a run's "
            "checkpoints/best.ckpt."
        )
    try:
        loaded = AtomicCheckpointIO().load_checkpoint(path)
    except UserError as error:
        raise UserError(f"init_from={str(path)!r}: {error}") from error
    weights = loaded.get("state_dict", loaded)
    if not isinstance(weights, dict) or not all(isinstance(v, Tensor) for v in weights.values()):
        raise UserError(
            f"init_from={str(path)!r} holds no weights; accepted are a checkpoint or an exported "
            "file."
        )
    return weights
