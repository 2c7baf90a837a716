"""Our runs agree with the oracle's to 1e-9: model, client state, server state, and what was
counted.

Minibatches, three of eight clients of unequal size and step count, decaying rate, weight decay,
clipping.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import ByzantineClients
from fl_lightning.sampling import generator
from tests.helpers.compositions import METHODS, methods, server, settings
from tests.helpers.federation import Run, network
from tests.oracles.oracle import Config, Round, TwoLayer, run

ROUNDS = 10
# Our name of a state: the oracle's.
CLIENT = {
    "ControlVariates.c_i": "c_i",
    "RelaxedInitialization.last": "last_i",
    "DynamicRegularization.lambda_i": "lambda_i",
    "GlobalSharpnessAwareMinimization.mu_i": "mu_i",
    "TopKCompression.error": "e_i",
    "SignUpdate.error": "error",
    "RandomK.error": "error",
    "LowRankUpdate.error": "error",
    "LowRankUpdate.q": "q",
    "ErrorFeedback21.h": "h",
    "ProximalPersonalModel.v": "v_i",
    "MoreauEnvelope.theta": "theta_i",
    "LocallyEstimatedPerturbation.received": "o_i",
    "MixedAscent.dual": "dual_i",
    "ModelContrast.last": "last_i",
    "RandomSkips.h": "h_i",
    "RandomSkips.last": "last_i",
    "optimizer.0.momentum_buffer": "momentum_i",
}
SERVER = {
    "ControlVariates.c": "c",
    "DynamicRegularization.lambda_mean": "lambda",
    "ClientMomentum.delta": "Delta",
    "MixedAscent.dual_mean": "dual",
    "ClusteredModels.centres": "centres",
    "ErrorFeedback21.mean": "H",
    "GlobalSharpnessAwareMinimization.s": "s",
}


def both(config: Config, rounds: int = ROUNDS, **options: Any) -> tuple[Run, list[Round]]:
    ours = network(
        methods(config),
        rounds,
        lr_decay=config.lr_decay,
        clip_norm=config.clip_norm,
        weighting=config.weighting,
        server_optimizer=server(config),
        momentum=config.momentum,
        keep_optimizer_state=config.keep_momentum,
        **options,
    )
    if config.attack is not None:  # who attacks, and what is drawn, is given, as the batches are
        (attack,) = (
            method
            for method in ours.module.trainer.callbacks
            if isinstance(method, ByzantineClients)
        )
        assert len(attack.attackers) == 3
        config = replace(config, attackers=attack.attackers, noise=noise)
    return ours, run(TwoLayer(3, 4, 3), config, rounds, ours.start, ours.schedule)


def noise(t: int, client: int, size: int) -> Any:
    return generator(1, "method: byzantine noise", t, client).standard_normal(size)


def agree(ours: Run, theirs: list[Round]) -> None:
    """Every round, every quantity that both have."""
    record, callbacks = (
        ours.record,
        [c for c in ours.module.trainer.callbacks if isinstance(c, FederatedCallback)],
    )
    declared = {d.key(method) for method in callbacks for d in method.declarations().values()}
    for t, expected in enumerate(theirs):
        near(record.w[t], expected.w, f"w in round {t}")
        near(record.evaluated[t], expected.evaluated, f"evaluated in round {t}")
        assert declared & set(CLIENT) <= set(record.rows[t]), "what is declared is kept"
        assert declared & set(SERVER) <= set(record.server[t])
        for name, rows in record.rows[t].items():
            if name in CLIENT:
                assert set(rows) == set(expected.clients[CLIENT[name]]), name
                for i, row in rows.items():
                    near(row, expected.clients[CLIENT[name]][i], f"{name} of {i} in round {t}")
        for name, value in record.server[t].items():
            if name in SERVER:
                near(value, expected.server[SERVER[name]], f"{name} in round {t}")
        for name, value in record.optimizer[t].items():
            if name in expected.server:
                near(value, expected.server[name], f"server optimizer's {name} in round {t}")
        for name, number in expected.metrics.items():
            if name in record.metrics[t]:
                assert record.metrics[t][name] == pytest.approx(number, rel=1e-6, abs=1e-9), (
                    f"{name} in round {t}"
                )


def near(ours: Any, theirs: Any, what: str) -> None:
    assert np.abs(ours - theirs).max() < 1e-9, what


ENGINES: dict[str, dict[str, Any]] = {
    "uniform": {"engine": "sequential", "rounds": 5},
    # Its bits are the sequential engine's, by tests of their own.
    "samples": {"engine": "concurrent", "workers": 2},
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("weighting", ENGINES)
def test_method_agrees_with_the_oracle(name: str, weighting: str) -> None:
    agree(*both(settings(weighting, **METHODS[name]), **ENGINES[weighting]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("beside", [{}, {"beta": 0.1, "sam": 0.05}])
def test_scaffnew_agrees_with_the_oracle(beside: dict[str, Any], engine: str) -> None:
    """It takes all clients, uniform weights and no clipping."""
    config = Config(lr=0.3, lr_decay=0.95, weight_decay=0.01, scaffnew=0.4, **beside)
    ours, theirs = both(config, participation="all", **ENGINES[engine])
    agree(ours, theirs)
    steps = [{len(batches) for batches in table.values()} for table in ours.schedule.rounds]
    drawn = [int(generator(1, "scaffnew", t).geometric(0.4)) for t in range(len(steps))]
    assert steps == [{k} for k in drawn] and max(drawn) > 2, "one K for all clients of a round"
    for rows in ours.record.rows:
        assert np.abs(sum(rows["RandomSkips.h"].values())).max() < 1e-12
    assert ours.record.metrics[-1].get("cost/kept_vectors", 2) == 2 + len(set(beside) - {"sam"})


def test_clipping_is_active_in_about_a_third_of_the_steps() -> None:
    ours, theirs = both(settings("uniform"))
    steps = sum(len(batches) for table in ours.schedule.rounds for batches in table.values())
    assert 0.2 < sum(r.clipped_steps for r in theirs) / steps < 0.5
    shares = [len({len(b) for b in table.values()}) for table in ours.schedule.rounds]
    assert max(shares) > 1, "unequal K_i"
