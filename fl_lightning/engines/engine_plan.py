"""Which engine trains the clients, and how, as each checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fl_lightning.round.settings import CONCURRENT, PLANNED, STACKED
from fl_lightning.storage.schema import COUNT, TEXT, entry, record, texts, that, written

AS_BEFORE = "as when the run began"


_YES_OR_NO = that(lambda value: isinstance(value, bool))
_ENGINE = that(lambda value: value in PLANNED)


@dataclass(frozen=True)
class EnginePlan:
    """Decided once, in one process for all.

    Args:
        engine: its name (``planned_as`` in `registry.py`).
        why: the reason, for a reader.
        workers: clients side by side in a process; 0: as many as there is room for.
        processes: whether workers are forked processes, not threads or streams.
        at_once: how many clients the stacked engine stacks; 0: as many as fit into a gigabyte.
        threads: intra-op threads for a client; ``server_threads``: for everything else.
        captured: whether local steps are recorded and replayed; ``not_captured``: why not.
        channels_last: whether images lie in channels-last memory.
        fused: whether Adam or AdamW steps by torch's fused kernel.
        as_buffers: frozen parameters that the learner's steps write, by name: buffers to the run.
        kernels: what torch chose its kernels by in the rounds so far: the processor's instructions,
            and the GPU's name.
    """

    # A resumed run keeps the entries that have a kind. Whether steps are captured is tried again,
    # because that depends on the machine.
    engine: str = entry(_ENGINE)
    why: str = ""
    workers: int = entry(COUNT, 0)
    processes: bool = entry(_YES_OR_NO, False)
    at_once: int = entry(COUNT, 0)
    threads: int = entry(COUNT, 1)
    server_threads: int = entry(COUNT, 1)
    captured: bool = False
    not_captured: str = ""
    channels_last: bool = entry(_YES_OR_NO, False)
    fused: bool = entry(_YES_OR_NO, False)
    as_buffers: tuple[str, ...] = entry(
        lambda value, place: tuple(texts(value or (), place)), (), name="written"
    )
    kernels: str = entry(TEXT, "")

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for a checkpoint."""
        return written(self)

    @classmethod
    def from_dict(cls, held: Any, place: str = "engine") -> EnginePlan | None:
        """The plan of a checkpoint; None where it holds none.

        Raises:
            UserError: no run writes it so; ``place``: where it stands there.
        """
        if held is None or (isinstance(held, Mapping) and not held.get("engine")):
            return None
        return replace(record(cls)(held, place), why=AS_BEFORE)

    def card(self) -> dict[str, str]:
        """The plan's entries in the run's card."""
        entries = {
            "engine": self.engine,
            "threads": str(self.threads),
            "server_threads": str(self.server_threads),
        }
        if self.engine == CONCURRENT:
            entries["workers"] = (
                f"{self.workers} processes" if self.processes else str(self.workers)
            )
            if not self.processes:
                entries["capture"] = "yes" if self.captured else f"no: {self.not_captured}"
        if self.engine == STACKED:
            entries["clients"] = str(self.at_once)
        if self.channels_last:
            entries["memory"] = "channels_last"
        if self.as_buffers:
            entries["as buffers"] = ", ".join(self.as_buffers)
        return {**entries, "why": self.why}

    def __str__(self) -> str:
        if self.engine != CONCURRENT:
            return self.engine
        return f"{self.engine} × {self.workers}" + (" processes" if self.processes else "")
