"""What a run left in its folder, for a notebook: ``fl_lightning.load("runs/x")``."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from fl_lightning.checkpoint import AtomicCheckpointIO
from fl_lightning.compose import read as read_config
from fl_lightning.errors import UserError, suggest
from fl_lightning.metrics_rows import read_rows
from fl_lightning.store import ClientStore

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from fl_lightning.cli import FederatedCLI

Column = np.ndarray[Any, np.dtype[np.float64]]


class Metrics(Mapping[str, Column]):
    """A table of metrics: ``metrics["val/acc"]`` is a column beside ``metrics.rounds``, nan where nothing was logged.

    ``pandas.DataFrame(dict(metrics), index=metrics.rounds)`` makes a frame of it.
    """

    def __init__(self, rounds: Sequence[int], columns: Mapping[str, Sequence[float]]) -> None:
        self.rounds = list(rounds)
        self._columns = {name: np.asarray(values, dtype=np.float64) for name, values in columns.items()}

    @classmethod
    def read(cls, path: Path) -> Metrics:
        """The table of a metrics.csv."""
        names, rows = read_rows(path)
        columns = {n: [float(row[n]) if row[n] else math.nan for row in rows] for n in names if n != "round"}
        return cls([int(row["round"]) for row in rows], columns)

    def __getitem__(self, name: str) -> Column:
        if name not in self._columns:
            raise KeyError(f"no metric {name!r}.{suggest(name, self._columns)}")
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"Metrics({len(self.rounds)} rounds: {', '.join(self._columns)})"

    def last(self, name: str) -> float:
        """The newest value that was logged; nan where there is none."""
        values = self._logged(name)
        return float(values[-1]) if len(values) else math.nan

    def best(self, name: str) -> tuple[float, int]:
        """The highest value and the round it was first reached in; (nan, -1) where there is none."""
        if not len(self._logged(name)):
            return math.nan, -1
        at = int(np.nanargmax(self[name]))
        return float(self[name][at]), self.rounds[at]

    def median(self, name: str) -> float:
        """Of the values that were logged; nan where there is none."""
        values = self._logged(name)
        return float(np.median(values)) if len(values) else math.nan

    def _logged(self, name: str) -> Column:
        values = self._columns.get(name, np.empty(0))
        return values[~np.isnan(values)]


class Indices(Sequence[Any]):
    """Sample indices of every client, made when asked for."""

    def __init__(self, datamodule: Any) -> None:
        self._datamodule = datamodule

    def __len__(self) -> int:
        return int(self._datamodule.num_clients)

    def __getitem__(self, client: Any) -> Any:
        if isinstance(client, slice):
            return [self[i] for i in range(len(self))[client]]
        return self._datamodule.client_indices(range(len(self))[client])


class Run:
    """A run's folder; everything is read when it is first asked for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise UserError(f"load({str(folder)!r}): there is no such folder. Give that of a run, such as runs/x.")

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r})"

    @cached_property
    def metrics(self) -> Metrics:
        """What was logged, a row a round."""
        return Metrics.read(self.folder / "metrics.csv")

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml, as nested dicts."""
        return read_config(str(self.folder / "config.yaml"))

    @cached_property
    def checkpoint(self) -> dict[str, Any]:
        """The last checkpoint (without one, the best), verified."""
        return AtomicCheckpointIO().load_checkpoint(self._checkpoint_path)

    @property
    def _checkpoint_path(self) -> Path:
        paths = [self.folder / "checkpoints" / name for name in ("last.ckpt", "best.ckpt")]
        return next((path for path in paths if path.exists()), paths[0])

    @cached_property
    def _store(self) -> ClientStore:
        held = self.checkpoint.get("federated", {"clients": {}, "folders": []})
        folders = [self._checkpoint_path.parent / folder for folder in held["folders"]]
        folders.append(self.folder / "state")
        store = ClientStore()
        store.load(held["clients"], next((f for f in folders if f.is_dir()), folders[0]))
        return store

    def client_state(self, name: str, client: int) -> Tensor | None:
        """The row of ``"ClassName.name"`` that ``client`` had at the last checkpoint; None where it had none.

        Raises UserError where no client has a row of that name.
        """
        names = self._store.names()
        if name not in names:
            raise UserError(
                f"client_state({name!r}): {self.folder} has no such state.{suggest(name, names)} "
                f"There are: {', '.join(names) or 'none'}."
            )
        row = self._store.read(name, client)
        return None if row is None else row.clone()

    @cached_property
    def learner(self) -> pl.LightningModule:
        """The learner with the global weights of the last checkpoint, on the CPU, in evaluation mode."""
        learner: pl.LightningModule = self._built.model.learner
        learner.configure_model()
        learner.load_state_dict(self.checkpoint["state_dict"])
        learner.eval()
        return learner

    @cached_property
    def partition(self) -> Sequence[Any]:
        """Indices of the training samples of each client."""
        data, held = self._built.datamodule, self.checkpoint.get("federated", {})
        if getattr(data, "seed", None) is None:
            data.seed = held.get("seed")
        data.setup("fit")
        if held.get("partition") and held["partition"] != data.partition_hash:
            raise UserError(
                f"load({str(self.folder)!r}): the data give partition {data.partition_hash}, the run had "
                f"{held['partition']}. Are the files in its --data.root still the same?"
            )
        return Indices(data)

    @cached_property
    def _built(self) -> FederatedCLI:
        """Learner and data of config.yaml; global random numbers and the environment's seed stay as they are."""
        from pytorch_lightning.utilities.seed import isolate_rng

        from fl_lightning.cli import FederatedCLI
        from fl_lightning.compose import prepare
        from fl_lightning.method_options import apply_method_options, full_paths

        before = {key: os.environ.get(key) for key in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}
        with isolate_rng():
            try:
                prepared = prepare("export", [str(self.folder)])
                prepared.config, prepared.options = full_paths(prepared.config), full_paths(prepared.options)
                apply_method_options(prepared)
                return FederatedCLI("export", prepared)
            finally:
                for key, value in before.items():
                    os.environ.pop(key, None)
                    if value is not None:
                        os.environ[key] = value


def load(folder: str | os.PathLike[str]) -> Run:
    """The run in ``folder``: ``learner``, ``metrics``, ``config``, ``partition``, ``client_state(name, client)``."""
    return Run(folder)
