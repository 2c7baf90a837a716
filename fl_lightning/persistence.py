"""What a checkpoint holds besides Lightning's own, and how a run takes it up again."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fl_lightning.client_rows import ClientRows
from fl_lightning.errors import UserError
from fl_lightning.store import ClientStore, merge_indices

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule

KEY = "federated"
COMPARED = [
    "participation",
    "sampling",
    "local_epochs",
    "local_steps",
    "lr_decay",
    "clip_norm",
    "keep_optimizer_state",
    "server_lr_decay",
    "weighting",
    "buffer_policy",
]


def state_folder(module: FederatedModule) -> Path:
    """Where segments of client rows lie: ``state/`` of the run, beside its checkpoints."""
    callback = module.trainer.checkpoint_callback
    directory = getattr(callback, "dirpath", None)
    if not directory:
        return Path(module.trainer.default_root_dir) / "state"
    directory = Path(directory)
    return (directory.parent if directory.name == "checkpoints" else directory) / "state"


def new_rows(module: FederatedModule) -> ClientRows:
    rank, world = module.trainer.global_rank, module.trainer.world_size
    return ClientRows(ClientStore(rank=rank, world_size=world), rank, world)


def save(module: FederatedModule, checkpoint: dict[str, Any]) -> None:
    """Write the rows that changed, then put into the checkpoint what finds them again (runs in every process)."""
    folder = state_folder(module)
    store = module.client_rows.store
    if store.names():
        store.flush(folder)
    index = store.index()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, index)
        index = merge_indices(everyone)
    if store.names():
        store.collect(folder, chain([index], indices_on_disk(module)))
    w, at, learner = module.global_vector.detach(), module.evaluated_vector, module.learner
    folders = [str(folder.resolve())]
    directory = getattr(module.trainer.checkpoint_callback, "dirpath", None)
    if directory:
        folders.insert(0, os.path.relpath(str(folder), str(directory)))
    checkpoint[KEY] = {
        "version": 1,
        "seed": module.run_seed,
        "w": None if at is w else w.clone(),
        "w0": module.initial_vector,
        "buffers": {n: b.clone() for n, b in learner.named_buffers() if n not in checkpoint["state_dict"]},
        "server": {k: v.clone() for k, v in module.server_states.items()},
        "clients": index,
        "folders": folders,
        "arguments": arguments(module),
        "methods": module.methods.fingerprint(),
        "partition": str(getattr(module.data, "partition_hash", "")),
        "engine": module.engine_facts,
        "loggers": [type(logger).__name__ for logger in module.trainer.loggers],
    }
    if learner.hparams:
        checkpoint["hyper_parameters"] = {k: v for k, v in dict(learner.hparams).items() if plain(v)}
    if module.learner_config:
        checkpoint["hyper_parameters"] = dict(module.learner_config)
    held_by_data = checkpoint.get("datamodule_hyper_parameters", {})
    checkpoint["datamodule_hyper_parameters"] = {k: v for k, v in dict(held_by_data).items() if plain(v)}
    for logger in module.trainer.loggers:
        logger.save()
    learner.on_save_checkpoint(checkpoint)


def indices_on_disk(module: FederatedModule) -> Iterator[Any]:
    """Which rows the checkpoints beside this run's need, looked up when asked for; each file is opened once."""
    present: dict[Any, Any] = {}
    for callback in module.trainer.checkpoint_callbacks:
        directory = getattr(callback, "dirpath", None)
        for path in sorted(Path(directory).glob("*.ckpt")) if directory and os.path.isdir(directory) else ():
            stat = path.stat()
            file = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            present[file] = module.known_indices[file] if file in module.known_indices else index_in(path)
    module.known_indices = present
    yield from present.values()


def index_in(path: Path) -> dict[str, Any]:
    """A checkpoint's index of rows, copied out of the file; of a file that is not ours or damaged: none."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        entries = loaded[KEY]["clients"]
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, pickle.UnpicklingError):
        return {}
    return {name: {what: tensor.clone() for what, tensor in entry.items()} for name, entry in entries.items()}


def load(module: FederatedModule, checkpoint: dict[str, Any]) -> None:
    """Before the weights are restored: see that the checkpoint is this run's.

    Raises:
        UserError: it is no federated run's, or of another model.
    """
    module.learner.on_load_checkpoint(checkpoint)
    check_weights(module, checkpoint["state_dict"])
    if module.trainer.state.fn != "fit":
        return
    held = checkpoint.get(KEY)
    if held is None:
        raise UserError(
            "ckpt_path: the checkpoint was not written by a federated run, so it cannot be resumed. To start from its "
            "weights, give it as model.init_from."
        )
    module.resume_from = held


def resume(module: FederatedModule, held: dict[str, Any]) -> None:
    """After the weights are restored: server state, w where it is not what is evaluated, and the index of rows.

    Raises:
        UserError: the checkpoint is of a run with other settings.
    """
    if module.strict_resume:
        check_same(module, held)
    device = module.global_vector.device
    for name, buffer in module.learner.named_buffers():
        if name in held["buffers"]:
            buffer.copy_(held["buffers"][name])
    if held["w"] is not None:
        at = module.evaluated_vector.clone()
        module.global_vector.data.copy_(held["w"])
        module.set_evaluated(at)
    if held["w0"] is not None:
        module.initial_vector = held["w0"].to(device)
    module.server_states = {k: v.to(device) for k, v in held["server"].items()}
    index = held["clients"]
    if index:
        module.client_rows.store.load(index, find_folder(module, held["folders"]))


def find_folder(module: FederatedModule, folders: list[str]) -> Path:
    beside = Path(str(module.trainer.ckpt_path)).parent if module.trainer.ckpt_path else Path()
    tried = [(beside / f) if not os.path.isabs(f) else Path(f) for f in folders]
    for folder in tried:
        if folder.is_dir():
            return folder
    raise UserError(
        f"the checkpoint's client state lies in {tried[0]}, which is not there. Move the run's folder as a whole "
        "(checkpoints/ and state/ together), or put it back."
    )


def check_weights(module: FederatedModule, weights: dict[str, torch.Tensor]) -> None:
    own = module.learner.state_dict()
    missing = [k for k in own if k not in weights]
    other = [k for k in weights if k not in own]
    shapes = [k for k in own if k in weights and own[k].shape != weights[k].shape]
    if not (missing or other or shapes):
        return
    what = (
        f"{shapes[0]} has shape {tuple(weights[shapes[0]].shape)} there and {tuple(own[shapes[0]].shape)} here"
        if shapes
        else f"it lacks {missing[0]}"
        if missing
        else f"it has {other[0]}, which the learner has not"
    )
    raise UserError(
        f"ckpt_path: the checkpoint is of another model than {type(module.learner).__name__}: {what}. Use the learner "
        "(class and sizes) that the run was started with; its config.yaml has it."
    )


def check_same(module: FederatedModule, held: dict[str, Any]) -> None:
    now, then = arguments(module), held["arguments"]
    differing = [f"{k}: {then[k]} then, {now[k]} now" for k in now if then.get(k, now[k]) != now[k]]
    methods, before = module.methods.fingerprint(), held["methods"]
    for name in sorted(set(methods) | set(before)):
        if methods.get(name) != before.get(name):
            differing.append(f"method {name}: {before.get(name, 'absent')} then, {methods.get(name, 'absent')} now")
    if held["seed"] != module.run_seed:
        differing.append(f"seed={held['seed']} then, {module.run_seed} now")
    partition = str(getattr(module.data, "partition_hash", ""))
    if held["partition"] and held["partition"] != partition:
        differing.append(f"data's partition: {held['partition']} then, {partition} now")
    if differing:
        shown = "; ".join(differing[:4])
        raise UserError(
            f"the checkpoint is of a run with other settings ({shown}), so resuming would mix two runs. Give the "
            "settings of the run's config.yaml, or model.strict_resume=false to go on all the same."
        )


def arguments(module: FederatedModule) -> dict[str, str]:
    """The arguments that decide what a round does, as text."""
    facts = {name: repr(getattr(module, name)) for name in COMPARED}
    facts["batch_size"] = repr(getattr(module.data, "batch_size", None))
    facts["biases"] = repr([(type(b).__name__, vars(b)) for b in getattr(module.data, "biases", ())])
    return facts | {"client_optimizer": module.client_account, "server_optimizer": module.server_account}


def account(optimizer: Optimizer) -> str:
    """An optimizer's class and settings as text."""
    groups = [{k: v for k, v in g.items() if k not in ("params", "initial_lr")} for g in optimizer.param_groups]
    return f"{type(optimizer).__name__} {groups}"


def plain(value: object) -> bool:
    """Whether ``torch.load(weights_only=True)`` can read a value back."""
    if isinstance(value, (list, tuple)):
        return all(plain(v) for v in value)
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, str)


def load_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """The learner's weights by name from a checkpoint or an exported file.

    Raises:
        UserError: missing, damaged, or without weights.
    """
    from fl_lightning.checkpoint import AtomicCheckpointIO

    loaded = AtomicCheckpointIO().load_checkpoint(path)
    weights = loaded.get("state_dict", loaded)
    if not isinstance(weights, dict) or not all(isinstance(v, torch.Tensor) for v in weights.values()):
        raise UserError(f"init_from={str(path)!r} holds no weights; accepted are a checkpoint or an exported file.")
    return weights


def atomic_checkpoints(trainer: Any) -> None:
    """Checkpoints are written aside and renamed, unless the user chose an own CheckpointIO."""
    from pytorch_lightning.plugins.io import TorchCheckpointIO

    from fl_lightning.checkpoint import AtomicCheckpointIO

    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()
