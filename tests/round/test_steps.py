"""K_i by a method: known before the round, the same to everybody, and refused where it is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.record.description import line
from fl_lightning.sampling import generator
from fl_lightning.testing import tiny_run
from tests.helpers.agreement import Run, near, same_bits, trained
from tests.helpers.federation import Network

BATCHES = [1, 2, 3, 1, 3, 2]  # of the tiny federation's clients an epoch


@pytest.mark.parametrize("engine", ["sequential", "concurrent", "stacked"])
def test_random_epochs_are_taken_and_known_beforehand(engine: str) -> None:
    module = tiny_run(c.RandomEpochs(2, 4), rounds=2, engine=engine)
    for t in range(6):
        for i in range(6):
            epochs = int(generator(1, "epochs", t, i).integers(2, 5))
            assert module.steps(t, i) == epochs * BATCHES[i], "known of rounds to come, too"
    taken = sum(module.steps(1, i) for i in module.participants(1))
    assert float(module.trainer.callback_metrics["cost/gradients"]) == taken
    assert "steps by RandomEpochs" in line(module.run)
    seen = {module.steps(t, 0) for t in range(60)}
    assert seen == {2, 3, 4}, "both ends are included"


def test_scaffnew_in_every_engine() -> None:
    def scaffnew(engine: str, **options: Any) -> Run:
        given = {"participation": "all"}
        methods = [c.RandomSkips(0.3)]
        return trained((methods, given), engine, learner=Network, rounds=4, **options)

    reference = scaffnew("sequential")
    same_bits(scaffnew("concurrent", workers=2), reference)
    captured = scaffnew("concurrent", workers=2, capture=True)
    assert captured.module.engine_facts["capture"] == "yes"
    same_bits(captured, reference)
    near(scaffnew("stacked", clients_at_once=3), reference)


class Given(FederatedCallback):
    def __init__(self, steps: Any) -> None:
        super().__init__()
        self.given = steps

    def steps(self, t: int, ids: torch.Tensor) -> Any:
        assert ids.dtype == torch.int64 and ids.device.type == "cpu" and ids.ndim == 1
        return self.given(ids)


@pytest.mark.parametrize(
    "steps, says",
    [
        (lambda ids: ids * 0, "an integer from 1; to client . in round 0 it gave 0"),
        (lambda ids: ids + 1.0, "in round 0 it gave .\\.0"),
        (lambda ids: [True] * len(ids), "it gave True"),
        (lambda ids: [1], "for 3 of them in round 0 it gave \\[1\\]"),
        (lambda ids: 2, "it gave 2"),
    ],
)
def test_what_is_no_number_of_steps_is_refused(steps: Any, says: str) -> None:
    with pytest.raises(UserError, match=f"Given.steps has to give each client .*{says}"):
        tiny_run(Given(steps), engine="sequential")
