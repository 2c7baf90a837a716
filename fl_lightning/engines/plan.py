"""Which engine trains the clients, and how, as each checkpoint holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

AS_BEFORE = "as when the run began"
# What a resumed run goes on with, beside the names of the parameters that are buffers to it.
RESUMED = (
    "engine",
    "workers",
    "processes",
    "at_once",
    "threads",
    "server_threads",
    "channels_last",
    "fused",
)


@dataclass(frozen=True)
class EnginePlan:
    """Decided once, in one process for all.

    Args:
        engine: ``"sequential"``, ``"concurrent"`` or ``"stacked"``.
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
        """As plain data, for a checkpoint, where ``as_buffers`` is called ``written``."""
        plain = asdict(self)
        plain["written"] = plain.pop("as_buffers")
        return plain

    @classmethod
    def from_dict(cls, held: Mapping[str, Any]) -> EnginePlan | None:
        """The plan of a checkpoint; None where it holds none.

        Whether steps are captured is tried again: that depends on the machine.
        """
        if not held.get("engine"):
            return None
        settings = {name: held[name] for name in RESUMED if name in held}
        return cls(why=AS_BEFORE, **settings, as_buffers=tuple(held.get("written") or ()))

    def card(self) -> dict[str, str]:
        """What the run's card says of it."""
        entries = {
            "engine": self.engine,
            "threads": str(self.threads),
            "server_threads": str(self.server_threads),
        }
        if self.engine == "concurrent":
            entries["workers"] = (
                f"{self.workers} processes" if self.processes else str(self.workers)
            )
            if not self.processes:
                entries["capture"] = "yes" if self.captured else f"no: {self.not_captured}"
        if self.engine == "stacked":
            entries["clients"] = str(self.at_once)
        if self.channels_last:
            entries["memory"] = "channels_last"
        if self.as_buffers:
            entries["as buffers"] = ", ".join(self.as_buffers)
        return {**entries, "why": self.why}

    def __str__(self) -> str:
        if self.engine != "concurrent":
            return self.engine
        return f"concurrent × {self.workers}" + (" processes" if self.processes else "")
