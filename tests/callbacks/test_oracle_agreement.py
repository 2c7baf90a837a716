"""Our runs agree with the oracle's to 1e-9: model, client state, server state, and what was counted.

Minibatches, three of eight clients of unequal size and step count, decaying rate, weight decay, clipping.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from federation import Run, network
from oracles.oracle import Config, Round, TwoLayer, run

from fl_lightning import callbacks as c

ROUNDS, CLIP = 7, 0.9
# The oracle's name of a state: ours, the sign with which it is kept.
CLIENT = {"ControlVariates.c_i": "c_i", "RelaxedInitialization.last": "last_i"}
SERVER = {"ControlVariates.c": "c"}


def methods(config: Config) -> list[Any]:
    """The callbacks that a configuration of the oracle stands for."""
    made: list[Any] = [c.DivergenceLogger(), c.CommunicationLogger()]
    if config.beta is not None:
        made.append(c.RelaxedInitialization(config.beta, config.aggregate))
    if config.scaffold is not None:
        made.append(c.ControlVariates(config.scaffold))
    if config.sam is not None:
        made.append(c.SharpnessAwareMinimization(config.sam))
    return made


def settings(weighting: str, **components: Any) -> Config:
    """Components of the oracle with what all runs here share."""
    return Config(lr=0.3, lr_decay=0.9, weight_decay=0.01, clip_norm=CLIP, weighting=weighting, **components)


def both(config: Config, **options: Any) -> tuple[Run, list[Round]]:
    ours = network(
        methods(config),
        ROUNDS,
        lr_decay=config.lr_decay,
        clip_norm=config.clip_norm,
        weighting=config.weighting,
        **options,
    )
    return ours, run(TwoLayer(3, 4, 3), config, ROUNDS, ours.start, ours.schedule)


def agree(ours: Run, theirs: list[Round]) -> None:
    """Every round, every quantity that both have."""
    record = ours.record
    for t, expected in enumerate(theirs):
        near(record.w[t], expected.w, f"w in round {t}")
        near(record.evaluated[t], expected.evaluated, f"evaluated in round {t}")
        for name, rows in record.rows[t].items():
            if name in CLIENT:
                assert set(rows) == set(expected.clients[CLIENT[name]]), name
                for i, row in rows.items():
                    near(row, expected.clients[CLIENT[name]][i], f"{name} of {i} in round {t}")
        for name, value in record.server[t].items():
            if name in SERVER:
                near(value, expected.server[SERVER[name]], f"{name} in round {t}")
        for name, number in expected.metrics.items():
            if name in record.metrics[t]:
                assert record.metrics[t][name] == pytest.approx(number, rel=1e-6, abs=1e-9), f"{name} in round {t}"


def near(ours: Any, theirs: Any, what: str) -> None:
    assert np.abs(ours - theirs).max() < 1e-9, what


METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedInit": {"beta": 0.1},
    "FedInit, updates": {"beta": 0.1, "aggregate": "updates"},
    "SCAFFOLD": {"scaffold": "displacement"},
    "SCAFFOLD, gradient": {"scaffold": "gradient"},
    "SCAFFOLD + RI": {"scaffold": "displacement", "beta": 0.1},
    "FedSAM": {"sam": 0.05},
    "FedGamma": {"sam": 0.05, "scaffold": "displacement"},
}


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("name", METHODS)
def test_method_agrees_with_the_oracle(name: str, weighting: str) -> None:
    agree(*both(settings(weighting, **METHODS[name])))


def test_clipping_is_active_in_about_a_third_of_the_steps() -> None:
    ours, theirs = both(settings("uniform"))
    steps = sum(len(batches) for table in ours.schedule.rounds for batches in table.values())
    assert 0.2 < sum(r.clipped_steps for r in theirs) / steps < 0.5
    shares = [len({len(b) for b in table.values()}) for table in ours.schedule.rounds]
    assert max(shares) > 1, "unequal K_i"
