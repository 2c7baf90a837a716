"""Power-of-Choice against the paper's rule in NumPy. Who has the largest last loss among the
candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning.callbacks import CommunicationLogger, PowerOfChoice
from fl_lightning.systems import SystemHeterogeneity
from fl_lightning.testing import tiny_run
from tests.helpers.federation import SIZES, network
from tests.helpers.learners import Lit, blobs, federated, trainer
from tests.oracles.problems import TwoLayer

ROUNDS = 8


def test_a_round_in_which_no_client_is_available_has_no_participants() -> None:
    kinds = []

    class Noted(PowerOfChoice):
        def select(self, server: Any, available: Any, n: int) -> Any:
            kinds.append((available.dtype, len(available) > 0))
            return super().select(server, available, n)

    module = tiny_run(Noted(), SystemHeterogeneity(availability=0.1), rounds=5)
    taking_part = [len(module.participants(t)) for t in range(5)]
    assert 0 in taking_part and max(taking_part) > 0
    assert set(kinds) == {(torch.int64, True)}


class Watched(PowerOfChoice):
    def select(self, server: Any, available: Any, n: int) -> Any:
        draw, notes = server.generator, vars(self).setdefault("_drawn", [])

        class Told:
            def choice(self, m: int, d: int, replace: bool, p: Any) -> Any:
                notes.append((draw("power of choice").choice(m, d, replace=replace, p=p), p))
                return notes[-1][0]

        server.generator = lambda purpose: Told()
        return super().select(server, available, n)


@pytest.mark.parametrize("candidates", [8, 5, 3, None])
def test_those_with_the_largest_known_loss_take_part(candidates: int | None) -> None:
    method = Watched(candidates)
    ours = network([method], ROUNDS)
    problem, losses = TwoLayer(3, 4, 3), dict[int, float]()
    for t, ((drawn, p), cohort) in enumerate(
        zip(vars(method)["_drawn"], ours.schedule.rounds, strict=True)
    ):
        assert len(set(drawn)) == (candidates or 6) and np.allclose(p, np.array(SIZES) / sum(SIZES))
        # stable, so of equal ones the first drawn
        known = sorted(drawn, key=lambda i: -losses.get(i, np.inf))
        assert set(cohort) == set(map(int, known[:3])) == set(ours.module.participants(t))
        for i, batches in cohort.items():
            x, seen = ours.start if t == 0 else ours.record.w[t - 1], []
            for batch in batches:
                loss, g = problem.loss_and_gradient(x, *batch)
                x, seen = x - 0.3 * (g + 0.01 * x), [*seen, loss]
            losses[i] = float(np.mean(seen))
        rows = ours.record.rows[t][
            "PowerOfChoice.last" if type(method) is PowerOfChoice else "Watched.last"
        ]
        assert (
            set(rows) == set(losses) and max(abs(float(rows[i]) - losses[i]) for i in rows) < 1e-9
        )


def test_a_loss_is_sent_beside_the_update() -> None:
    run = tiny_run(PowerOfChoice(), CommunicationLogger(), rounds=1)
    sent = float(run.trainer.callback_metrics["communication/up_parameters"])
    assert sent == len(run.participants(0)) * (run.layout.size + 1)


class Undefined(Lit):
    """Client 1's loss is no number in its first round, client 2's is infinite. Their gradients
    are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        odd = (
            {22: torch.nan, 20: torch.inf}.get(len(batch[0]), 0.0)
            if self.current_epoch < 2
            else 0.0
        )
        return loss + odd


@pytest.mark.parametrize("engine", ["sequential", "concurrent"])
@pytest.mark.filterwarnings("ignore:engine=")
def test_a_loss_that_is_no_number_comes_after_all_that_are(engine: str) -> None:
    """Not before them, which would let one client take part in every round."""
    method = PowerOfChoice(candidates=4)
    module = federated(Undefined(), participation=2, engine=engine)
    trainer(4, [method]).fit(module, blobs(clients=4, batch_size=24))
    assert sorted(module.participants(0) + module.participants(1)) == [0, 1, 2, 3]
    assert module.participants(2) == module.participants(3) == (0, 3)
    assert float(module.client_rows.read("PowerOfChoice.last", 1)) == -np.inf
    assert float(module.client_rows.read("PowerOfChoice.last", 2)) == -np.inf
