"""The arguments of a federated run, checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, Literal

import numpy as np
from torch import nn
from torch.optim import Optimizer

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import Above, AtMost, PositiveInt, check
from fl_lightning.schedules import Schedule
from fl_lightning.virtual.buffered import Buffered

# The names of the engines, which `engines/registry.py` builds.
SEQUENTIAL = "sequential"
CONCURRENT = "concurrent"
STACKED = "stacked"
# It trains as the sequential engine, which its plan names; "auto" is a choice between engines.
DEBUG = "debug"
AUTO: Final = "auto"
EngineName = Literal["auto", "sequential", "concurrent", "stacked", "debug"]
Participation = Literal["all"] | PositiveInt | Annotated[float, Above(0), AtMost(1)]

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class Settings:
    """The arguments of :class:`~fl_lightning.FederatedModule`, whose docstring explains each.

    Raises:
        UserError: for each argument that cannot work.
    """

    participation: int | float | str
    sampling: str
    local_epochs: float | None
    local_steps: int | None
    client_optimizer: OptimizerFactory | None
    client_scheduler: str
    lr_decay: float | Schedule
    clip_norm: float | None
    accumulate: int
    keep_optimizer_state: bool
    server_optimizer: OptimizerFactory | None
    server_lr_decay: float | Schedule
    weighting: str
    buffers: str | Mapping[str, str]
    on_nonfinite: str
    init_from: str | None
    engine: str
    clients_at_once: int | float | str
    workers: int | float | str
    capture: bool | str
    seed: int | None
    strict_resume: bool
    asynchronous: Buffered | None

    def __post_init__(self) -> None:
        for name in ("client_optimizer", "server_optimizer"):
            check_factory(name, getattr(self, name))
        if isinstance(self.buffers, Mapping):
            words = {str(pattern): word for pattern, word in self.buffers.items()}
            object.__setattr__(self, "buffers", words)
        # Numbers of NumPy become Python's: one that is not an int would be taken for a share.
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.number):
                object.__setattr__(self, field.name, value.item())
        check("asynchronous", self.asynchronous, Buffered | None)
        if self.asynchronous is not None and self.sampling != "uniform":
            raise UserError(
                f"sampling={self.sampling!r} beside asynchronous: an asynchronous run draws the "
                "clients that start from those that are free, up to Buffered's concurrency. Leave "
                "sampling out."
            )

    def notes(self) -> list[str]:
        notes = []
        if self.local_steps is not None and self.local_epochs is not None:
            notes.append(
                f"local_steps={self.local_steps} wins over local_epochs={self.local_epochs}"
            )
        if self.participation == 1 and isinstance(self.participation, int):
            notes.append("participation=1 is one client a round; for all of them give 'all' or 1.0")
        return notes

    def compared(self) -> dict[str, str]:
        """What decides a round, as text; it has to be the same in a resumed run."""
        names = (
            "participation",
            "sampling",
            "local_epochs",
            "local_steps",
            "lr_decay",
            "clip_norm",
            "keep_optimizer_state",
            "server_lr_decay",
            "weighting",
        )
        settings = {name: repr(getattr(self, name)) for name in names}
        settings["buffer_policy"] = repr(self.buffers)
        # Checkpoints of runs without this setting do not have the entry.
        if self.accumulate != 1:
            settings["accumulate"] = repr(self.accumulate)
        if self.asynchronous is not None:
            settings["asynchronous"] = repr(self.asynchronous)
        return settings

    def cohort(self, quick: bool | int = 0) -> dict[str, Any]:
        """Who takes part, and with how many steps; ``quick``: the Trainer's ``fast_dev_run``."""
        return {
            "quick": int(quick),
            "participation": self.participation,
            "sampling": self.sampling,
            "local_epochs": self.local_epochs,
            "local_steps": self.local_steps,
            "accumulate": self.accumulate,
        }


def check_factory(name: str, given: object) -> None:
    """Refuse a value that makes no optimizer: a dict as in configs, a name, or an optimizer."""
    if given is None or (callable(given) and not isinstance(given, Optimizer)):
        return
    shown = f"a {type(given).__name__}"
    if isinstance(given, (dict, str)):
        shown = f"{given!r}"[:100]
    raise UserError(
        f"{name}={shown} is not a function. In Python give a function of the parameters, such as "
        f"{name}=lambda params: torch.optim.SGD(params, lr=0.1). A mapping with class_path and "
        "init_args belongs into a config."
    )
