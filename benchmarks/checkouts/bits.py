"""A worker of ``benchmarks.checkouts``: small federated runs in a checkout, and hashes of all that
each leaves.

``bits.py FOLDER [PATTERN …]``, with the checkout as working directory and on
PYTHONPATH, prints what it found as one line of JSON; checkpoints of runs that are stopped and
resumed lie in FOLDER. Each run is a process of its own, or several, forked after the imports.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import socket
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from compositions import COMPOSITIONS, Composition, Learner, federation
from pytorch_lightning.callbacks import ModelCheckpoint

import fl_lightning
from fl_lightning import FederatedModule, FederatedStrategy, UserError

ROUNDS, STOPPED = 5, 2
PATIENCE = 300  # seconds after which a run counts as hung
Found = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """How a composition is run: the engine's arguments, in how many processes, and whether it is
    stopped half-way."""

    engine: dict[str, Any]
    processes: int = 1
    resumed: bool = False


SEQUENTIAL = {"engine": "sequential"}
CONCURRENT = {"engine": "concurrent", "workers": 2, "capture": False}
CAPTURED = {"engine": "concurrent", "workers": 2, "capture": True}
STACKED = {"engine": "stacked", "clients_at_once": 3}
KINDS = {
    "sequential": Kind(SEQUENTIAL),
    "concurrent": Kind(CONCURRENT),
    "captured": Kind(CAPTURED),
    "stacked": Kind(STACKED),
    "sequential/2": Kind(SEQUENTIAL, processes=2),
    "captured/2": Kind(CAPTURED, processes=2),
    "sequential+": Kind(SEQUENTIAL, resumed=True),
    "captured+": Kind(CAPTURED, resumed=True),
    "sequential/2+": Kind(SEQUENTIAL, processes=2, resumed=True),
}


class Hashes(pl.Callback):
    """SHA-256 by name of what a run leaves.

    Models, buffers, states, rows, and each round's metrics but times.
    """

    def __init__(self) -> None:
        self.items: dict[str, str] = {}

    def add(self, name: str, value: torch.Tensor) -> None:
        value = value.detach().cpu().contiguous()
        kind = f"{name} {value.dtype} {tuple(value.shape)} ".encode()
        self.items[name] = hashlib.sha256(kind + value.numpy().tobytes()).hexdigest()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, value in trainer.callback_metrics.items():
            if not name.startswith("time/"):
                self.add(f"round {trainer.current_epoch}: {name}", value)

    def leave(self, module: Any) -> dict[str, str]:
        self.add("w", module.global_vector)
        self.add("evaluated vector", module.evaluated_vector)
        for name, buffer in module.learner.named_buffers():
            self.add(f"buffer {name}", buffer)
        for name, value in module.server_states.items():
            self.add(f"server state {name}", value)
        rank, store = module.trainer.global_rank, module.client_rows.store
        own = (
            {f"{name} (process {rank})": digest for name, digest in self.items.items()}
            if rank
            else self.items
        )
        self.items = own
        for name in store.names():
            for client in map(int, store.clients(name)):
                self.add(f"row {name} of client {client}", store.read(name, client))
        return self.items


def fit(
    composition: Composition, kind: Kind, folder: Path | None = None, resume: bool = False
) -> Found:
    """One run, or with ``folder`` its first rounds, or with ``resume`` its last ones."""
    torch.manual_seed(0)
    settings = {
        "participation": 4,
        "local_epochs": 2,
        "lr_decay": 0.9,
        "seed": 1,
        **composition.settings,
    }
    module = FederatedModule(Learner(composition.network), **settings, **kind.engine)
    hashes = Hashes()
    watchers: list[pl.Callback] = [hashes]
    if folder is not None:
        watchers.append(
            ModelCheckpoint(folder / "checkpoints", filename="last", enable_version_counter=False)
        )
    trainer = pl.Trainer(
        max_epochs=STOPPED if folder is not None and not resume else ROUNDS,
        callbacks=[*composition.methods(), *watchers],
        accelerator="cpu",
        devices=kind.processes,
        strategy="federated" if kind.processes > 1 else "auto",
        logger=False,
        enable_checkpointing=folder is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )
    checkpoint = folder / "checkpoints" / "last.ckpt" if folder is not None and resume else None
    trainer.fit(module, federation(composition.poisoned), ckpt_path=checkpoint)
    engine, captured = module.engine_facts["engine"], module.engine_facts.get("capture", "no")
    return {"items": hashes.leave(module), "engine": engine + ", captured" * (captured == "yes")}


def outcome(composition: Composition, kind: Kind, folder: Path) -> Found:
    """The items of a run, or that it was refused, or that it failed.

    A stopped run goes on in a new process.
    """
    if not kind.resumed:
        return in_processes(kind.processes, lambda: fit(composition, kind))
    begun = in_processes(kind.processes, lambda: fit(composition, kind, folder))
    if "items" not in begun:
        return begun
    return in_processes(kind.processes, lambda: fit(composition, kind, folder, resume=True))


def in_processes(world: int, job: Callable[[], Found]) -> Found:
    """Run ``job`` in forked processes, joined by gloo where there are several.

    What they leave, taken together.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [_forked(job, rank, world, port) for rank in range(world)]
    left = []
    for child, pipe in children:
        with os.fdopen(pipe) as end:
            text = end.read()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left.append(json.loads(text) if text else {"failed": f"exit status {status}"})
    for what in ("refused", "failed"):
        for one in left:
            if what in one:
                return dict(one)
    return {
        **left[0],
        "items": {name: digest for one in left for name, digest in one["items"].items()},
    }


def _forked(job: Callable[[], Found], rank: int, world: int, port: int) -> tuple[int, int]:
    ours, theirs = os.pipe()
    child = os.fork()
    if child:
        os.close(theirs)
        return child, ours
    try:
        signal.alarm(PATIENCE)
        if world > 1:
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
                "GROUP_RANK": 0,
            }
            os.environ.update({name: str(value) for name, value in place.items()})
            os.environ.update(
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="checkouts"
            )
        try:
            left = job()
        except UserError as error:
            left = {"refused": str(error)}
        except BaseException as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            left = {
                "failed": f"{type(error).__name__}: {error} "
                f"({Path(where.filename).name}:{where.lineno})"
            }
        with os.fdopen(theirs, "w") as end:
            json.dump(left, end)
    finally:
        os._exit(0)


def chosen(patterns: list[str]) -> list[str]:
    """The compositions that match one of the patterns, each of which has to match something.

    Without any: all.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in COMPOSITIONS):
            raise SystemExit(
                f"{pattern!r} matches none of the compositions: {', '.join(COMPOSITIONS)}"
            )
    return [
        name for name in COMPOSITIONS if not patterns or any(fnmatchcase(name, p) for p in patterns)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("patterns", nargs="*", help="of compositions")
    given = parser.parse_args()
    if not Path(fl_lightning.__file__).resolve().is_relative_to(Path.cwd().resolve()):
        raise SystemExit(
            f"{fl_lightning.__file__} was imported, which does not lie in the checkout {Path.cwd()}"
        )
    assert FederatedStrategy.strategy_name == "federated"  # imported, so registered
    tell = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints does not get into the answer
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    names = chosen(given.patterns)
    # imports what is imported late, once for all that are forked
    fit(COMPOSITIONS["FedAvg"], KINDS["sequential"])
    found: dict[str, dict[str, Found]] = {name: {} for name in names}
    for name in names:
        for kind, how in KINDS.items():
            case = f"{name}.{kind.replace('/', 'x')}"
            found[name][kind] = outcome(COMPOSITIONS[name], how, given.folder / case)
    print(json.dumps(found), file=tell, flush=True)


if __name__ == "__main__":
    main()
