"""A state of one integer per client keeps each integer exactly."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback

from tests.helpers.learners import blobs, client_rows, federated, trainer
from tests.helpers.rows import NO_FLOAT, Times

ROUNDS = 5


class OnDisk(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.client_rows.store.budget_bytes = 0


def ran(rounds: int = ROUNDS, start: Path | None = None, **given: Any) -> Any:
    """A module after these rounds of half of the clients."""
    spread = {name: given.pop(name) for name in ("strategy", "devices") if name in given}
    module = federated(participation=0.5, **given)
    fitting = trainer(rounds, [Times(), OnDisk()], **spread)
    fitting.fit(module, blobs(), ckpt_path=start)
    return module


def require_exact(module: Any, rows: dict[Any, Any]) -> None:
    """Each client has the number of its rounds, as int64."""
    times = Counter(i for t in range(ROUNDS) for i in module.participants(t))
    assert max(times.values()) > 2 and len(set(times.values())) > 1
    assert {i: int(row) for (_, i), row in rows.items()} == {
        i: NO_FLOAT + number for i, number in times.items()
    }
    assert {(row.dtype, row.shape) for row in rows.values()} == {(torch.int64, ())}


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_each_engine_keeps_it(engine: str) -> None:
    module = ran(engine=engine)
    require_exact(module, client_rows(module))
    assert int(module.trainer.callback_metrics["times/most"]) > 2


def test_a_resumed_run_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where rows of clients are kept
    ran(2).trainer.save_checkpoint("middle.ckpt")
    module = ran(start=Path("middle.ckpt"))
    require_exact(module, client_rows(module))
