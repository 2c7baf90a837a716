"""A budget of bytes ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fl_lightning import UserError
from fl_lightning.callbacks import CommunicationLogger
from tests.helpers.learners import blobs, federated, trainer

ROUNDS = 6


def fitted(budget: Any, path: Path | None = None) -> Any:
    module = federated()
    run = trainer(ROUNDS, [CommunicationLogger(budget=budget)])
    run.fit(module, blobs(), ckpt_path=path)
    return module, run


def test_the_run_ends_after_the_round_that_reaches_it(tmp_path: Path) -> None:
    whole, run = fitted(None)
    each = int(run.callback_metrics["communication/total_bytes"]) // ROUNDS
    for budget, rounds in ((2 * each, 2), (2 * each + 1, 3), (f"{each} B", 1)):
        module, run = fitted(budget)
        assert run.current_epoch == rounds
        assert int(run.callback_metrics["communication/total_bytes"]) == rounds * each
        assert any("budget" in note for note in module.notes)
    path = tmp_path / "x.ckpt"
    run.save_checkpoint(path)
    _, run = fitted(f"{each} B", path)
    assert run.current_epoch == 1
    module, run = fitted(3 * each, path)
    assert run.current_epoch == 3
    module, run = fitted(None, path)
    assert run.current_epoch == ROUNDS
    assert module.global_vector.equal(whole.global_vector)


@pytest.mark.parametrize("budget", [0, -1, "2 XB", "GB", "1.2.3 MB", True, "nan"])
def test_no_number_of_bytes_is_refused(budget: Any) -> None:
    with pytest.raises(UserError, match=r"budget=.*0\.2 GB"):
        CommunicationLogger(budget=budget)
