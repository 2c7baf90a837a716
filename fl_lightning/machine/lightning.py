"""The Lightning of this process: ``pytorch_lightning`` or ``lightning.pytorch``.

The process uses the one that was imported first, or the one that FL_LIGHTNING_NAMESPACE names. Both
packages are the same code under two names, but their classes differ: a Trainer of one refuses a
module of the other. So all imports of Lightning are in this file, and no other file of the package
imports either package.
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from fl_lightning.errors import UserError

NAMESPACES = ("pytorch_lightning", "lightning.pytorch")
_HOMES = {
    "AttributeDict": "utilities.parsing",
    "Checkpoint": "callbacks",
    "DDPStrategy": "strategies",
    "DummyLogger": "loggers.logger",
    "LightningArgumentParser": "cli",
    "LightningCLI": "cli",
    "LightningOptimizer": "core.optimizer",
    "Logger": "loggers",
    "MisconfigurationException": "utilities.exceptions",
    "ModelCheckpoint": "callbacks",
    "Precision": "plugins.precision",
    "ProgressBar": "callbacks",
    "StrategyRegistry": "strategies",
    "TensorBoardLogger": "loggers",
    "Timer": "callbacks",
    "TorchCheckpointIO": "plugins.io",
    "Tqdm": "callbacks.progress.tqdm_progress",
    "extract_batch_size": "utilities.data",
    "instantiate_class": "cli",
    "isolate_rng": "utilities.seed",
    "rank_zero_only": "utilities",
    "rank_zero_warn": "utilities",
    "_configure_optimizers": "core.optimizer",
    "_sync_module_states": "overrides.distributed",
}


# Functions that reach a worker through cloudpickle cannot choose a namespace by the order of
# imports.
VARIABLE = "FL_LIGHTNING_NAMESPACE"


def _chosen() -> str:
    named = os.environ.get(VARIABLE)
    if named:
        if named not in NAMESPACES:
            raise UserError(
                f"the environment variable {VARIABLE} is {named!r}. Accepted: "
                f"{' and '.join(NAMESPACES)}."
            )
        return named
    imported = [name for name in sys.modules if name in NAMESPACES]
    installed = [name for name in NAMESPACES if find_spec(name.split(".")[0]) is not None]
    return (imported or installed or [NAMESPACES[0]])[0]


NAMESPACE = _chosen()

if TYPE_CHECKING:
    import pytorch_lightning
    from lightning_fabric.utilities.exceptions import (
        MisconfigurationException as MisconfigurationException,
    )
    from pytorch_lightning.callbacks import Checkpoint as Checkpoint
    from pytorch_lightning.callbacks import ModelCheckpoint as ModelCheckpoint
    from pytorch_lightning.callbacks import ProgressBar as ProgressBar
    from pytorch_lightning.callbacks import Timer as Timer
    from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm as Tqdm
    from pytorch_lightning.cli import LightningArgumentParser as LightningArgumentParser
    from pytorch_lightning.cli import LightningCLI as LightningCLI
    from pytorch_lightning.cli import instantiate_class as instantiate_class
    from pytorch_lightning.core.optimizer import LightningOptimizer as LightningOptimizer
    from pytorch_lightning.core.optimizer import _configure_optimizers as _configure_optimizers
    from pytorch_lightning.loggers import Logger as Logger
    from pytorch_lightning.loggers import TensorBoardLogger as TensorBoardLogger
    from pytorch_lightning.loggers.logger import DummyLogger as DummyLogger
    from pytorch_lightning.overrides.distributed import _sync_module_states as _sync_module_states
    from pytorch_lightning.plugins.io import TorchCheckpointIO as TorchCheckpointIO
    from pytorch_lightning.plugins.precision import Precision as Precision
    from pytorch_lightning.strategies import DDPStrategy as DDPStrategy
    from pytorch_lightning.strategies import StrategyRegistry as StrategyRegistry
    from pytorch_lightning.utilities import rank_zero_only as rank_zero_only
    from pytorch_lightning.utilities import rank_zero_warn as rank_zero_warn
    from pytorch_lightning.utilities.data import extract_batch_size as extract_batch_size
    from pytorch_lightning.utilities.parsing import AttributeDict as AttributeDict
    from pytorch_lightning.utilities.seed import isolate_rng as isolate_rng

    pl = pytorch_lightning
else:
    pl = import_module(NAMESPACE)
FABRIC = import_module("lightning_fabric" if NAMESPACES[0] == NAMESPACE else "lightning.fabric")
LOGGERS = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric", "lightning.fabric")
"""Names of Lightning's own loggers, for code that wants to silence them."""
OWN = ("pytorch_lightning", "lightning", "fl_lightning")
"""The packages whose hooks know that a round is a batch to the Trainer."""


def is_foreign(hook: Any) -> bool:
    """Return whether a hook is a user's or another package's, and not Lightning's or ours."""
    home = getattr(hook, "__module__", None) or ""
    return hook is not None and home.split(".")[0] not in OWN


def explain_to_other_trainers(kind: type) -> None:
    """Let a Trainer of the other Lightning explain why it refuses our ``kind``.

    Another package may have imported that Trainer. Lightning's own error would be that a module has
    to be a LightningModule, although ours is one.
    """
    for name in NAMESPACES:
        other = getattr(sys.modules.get(name), "Trainer", None)
        if name != NAMESPACE and other not in (None, pl.Trainer) and "_explains" not in vars(other):
            other._explains = True
            for command in ("fit", "validate", "test", "predict"):
                setattr(other, command, _explaining(getattr(other, command), kind, name))


def _explaining(command: Any, kind: type, other: str) -> Any:
    @wraps(command)
    def explained(trainer: Any, model: Any = None, *given: Any, **named: Any) -> Any:
        if isinstance(model, kind):
            raise UserError(
                f"this Trainer is of {other}, and {kind.__name__} of {NAMESPACE}: fl_lightning "
                "uses the one that the process imports first, and another package may have "
                "imported it. "
                f"Use its Trainer and callbacks, import {NAMESPACE} as pl; or import {other} "
                "before everything else."
            )
        return command(trainer, model, *given, **named)

    return explained


def is_default_bar(callback: Any) -> bool:
    """Return whether this is a progress bar that a Trainer makes by default."""
    kind = type(callback)
    if kind.__module__.split(".")[0] != NAMESPACE.split(".")[0]:
        return False
    if kind.__name__ not in ("TQDMProgressBar", "RichProgressBar"):
        return False
    fresh = vars(kind())
    return all(vars(callback).get(name) == fresh[name] for name in fresh if name != "_trainer")


def __getattr__(name: str) -> Any:
    """Return Lightning's own object of this name, imported at first use."""
    # A script does not need the command line's parser, which is slow to import.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{NAMESPACE}.{_HOMES[name]}"), name)
