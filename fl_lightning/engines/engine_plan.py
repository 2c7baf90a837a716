"""Which engine trains the clients, and how, as each checkpoint holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fl_lightning.round.settings import CONCURRENT, STACKED

AS_BEFORE = "as when the run began"

# What a checkpoint keeps. Whether steps are captured is tried again, because that depends on the
# machine.
KEPT = (
    *("engine", "workers", "processes", "at_once", "threads", "server_threads"),
    *("channels_last", "fused", "as_buffers"),
)


@dataclass(frozen=True)
class EnginePlan:
    """Decided once, in one process for all.

    Args:
        engine: its name in `registry.py`.
        why: the reason, for a reader.
        workers: clients side by side in a process; 0: as many as there is room for.
        processes: whether workers are forked processes, not threads or streams.
        at_once: how many clients the stacked engine stacks; 0: as many as fit into a gigabyte.
        threads: intra-op threads for a client; ``server_threads``: for everything else.
        captured: whether local steps are recorded and replayed; ``not_captured``: why not.
        channels_last: whether images lie in channels-last memory.
        fused: whether Adam or AdamW steps by torch's fused kernel.
        as_buffers: frozen parameters that the learner's steps write, by name: buffers to the run.
    """

    engine: str
    why: str = ""
    workers: int = 0
    processes: bool = False
    at_once: int = 0
    threads: int = 1
    server_threads: int = 1
    captured: bool = False
    not_captured: str = ""
    channels_last: bool = False
    fused: bool = False
    as_buffers: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As plain data, for a checkpoint."""
        return {name: getattr(self, name) for name in KEPT}

    @classmethod
    def from_dict(cls, held: dict[str, Any] | None) -> EnginePlan | None:
        """The plan of a checkpoint; None where it holds none."""
        return cls(**held, why=AS_BEFORE) if held else None

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
