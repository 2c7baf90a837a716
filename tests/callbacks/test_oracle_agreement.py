"""Our runs agree with NumPy's to 1e-9: models, rows, states, personal models, and what is counted.
Minibatches, three of eight clients of unequal size and step count, decaying rate, weight decay,
clipping. One matrix: each method alone and beside what perturbs, corrects and moves starts, by
settings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fl_lightning import UserError
from fl_lightning.callback import FederatedCallback
from fl_lightning.callbacks import ByzantineClients
from fl_lightning.evaluation import personal_models
from fl_lightning.sampling import generator
from tests.helpers.compositions import METHODS, MODERN, methods, server, settings
from tests.helpers.federation import Run, network
from tests.oracles.oracle import Config, Round, TwoLayer, run

# Our name of a state: the oracle's.
NAMES = """
ControlVariates.c_i:c_i RelaxedInitialization.last:last_i
DynamicRegularization.lambda_i:lambda_i GlobalSharpnessAwareMinimization.mu_i:mu_i
TopKCompression.error:e_i SignUpdate.error:error RandomK.error:error LowRankUpdate.error:error
LowRankUpdate.q:q ErrorFeedback21.h:h ProximalPersonalModel.v:v_i MoreauEnvelope.theta:theta_i
LocallyEstimatedPerturbation.received:o_i MixedAscent.dual:dual_i ModelContrast.last:last_i
RandomSkips.h:h_i RandomSkips.last:last_i optimizer.0.momentum_buffer:momentum_i
ControlVariates.c:c DynamicRegularization.lambda_mean:lambda ClientMomentum.delta:Delta
MixedAscent.dual_mean:dual ClusteredModels.centres:centres ErrorFeedback21.mean:H
GlobalSharpnessAwareMinimization.s:s MuonDirection.M:M MomentumGuidedPerturbation.c_i:c_i
MixedPersonalModel.v:v MixedPersonalModel.alpha_i:alpha_i AdaptiveLocalAggregation.last:last_i
AdaptiveLocalAggregation.W:W PersonalHead.P:P AdamDirection.first_mean:first
AdamDirection.second_mean:second AdamDirection.first_share:q AdamDirection.second_share:r
GlobalDirection.delta:delta LookaheadMomentum.m:m ServerAscent.last:last MuonDirection.C:C
MomentumGuidedPerturbation.delta:delta MomentumGuidedPerturbation.c:c
MomentumGuidedPerturbation.mixing:mixing GlobalUpdateGuidance.delta:toga PrototypePull.P:P
PrototypePull.a:a
"""
STATES = dict(pair.split(":") for pair in NAMES.split())
ENGINES: dict[str, dict[str, Any]] = {
    "uniform": {"engine": "sequential", "rounds": 5},
    # Its bits are the sequential engine's, by tests of their own.
    "samples": {"engine": "concurrent", "workers": 2, "rounds": 6},
    "stacked": {"engine": "stacked", "rounds": 5},
    # In some rounds nobody takes part.
    "poisson": {"engine": "sequential", "sampling": "poisson", "participation": 0.15, "rounds": 8},
}


UNSTACKED = ("FedProto", "FedRoD", "FedRoD, plain, + SCAFFOLD")


def both(name: str, setting: str = "uniform", **options: Any) -> tuple[Run, list[Round]]:
    weighting = "samples" if setting in ("samples", "stacked") else "uniform"
    config = settings(weighting, **{**METHODS, **MODERN}[name])
    if name in MODERN:
        config = replace(config, lr=0.2)
    if setting in ("stacked", "poisson"):
        config = replace(config, clip_norm=None)
    return of_config(config, **{**ENGINES[setting], **options})


def of_config(config: Config, rounds: int = 10, **options: Any) -> tuple[Run, list[Round]]:
    ours = network(
        methods(config),
        rounds,
        lr=config.lr,
        lr_decay=config.lr_decay,
        clip_norm=config.clip_norm,
        weighting=config.weighting,
        server_optimizer=server(config),
        momentum=config.momentum,
        keep_optimizer_state=config.keep_momentum,
        **options,
    )
    if config.attack is not None:  # who attacks, and what is drawn, is given, as the batches are
        callbacks: list[Any] = vars(ours.module.trainer)["callbacks"]
        (attack,) = (each for each in callbacks if isinstance(each, ByzantineClients))
        assert len(attack.attackers) == 3
        config = replace(config, attackers=attack.attackers, noise=noise)
    return ours, run(TwoLayer(3, 4, 3), config, rounds, ours.start, ours.schedule)


def noise(t: int, client: int, size: int) -> Any:
    return generator(1, "method: byzantine noise", t, client).standard_normal(size)


def agree(ours: Run, theirs: list[Round]) -> None:
    """Every round, every quantity that both have."""
    record = ours.record
    callbacks: list[Any] = vars(ours.module.trainer)["callbacks"]
    declared = set()
    for method in callbacks:
        if isinstance(method, FederatedCallback):
            declared |= {each.key(method) for each in method.declarations().values()}
    for t, expected in enumerate(theirs):
        near(record.w[t], expected.w, f"w in round {t}")
        near(record.evaluated[t], expected.evaluated, f"evaluated in round {t}")
        for name, rows in record.rows[t].items():
            if name in STATES:
                assert set(rows) == set(expected.clients[STATES[name]]), name
                for i, row in rows.items():
                    near(row, expected.clients[STATES[name]][i], f"{name} of {i} in round {t}")
        for name, value in record.server[t].items():
            if name in STATES:
                near(value, expected.server[STATES[name]], f"{name} in round {t}")
        for name, value in record.optimizer[t].items():
            if name in expected.server:
                near(value, expected.server[name], f"server optimizer's {name} in round {t}")
        # Without participants the last logged values stay.
        for name, number in expected.metrics.items() if ours.schedule.rounds[t] else ():
            if name in record.metrics[t]:
                logged = record.metrics[t][name]
                assert logged == pytest.approx(number, rel=1e-6, abs=1e-9), f"{name} in round {t}"
    found = {name for rows in record.rows for name in rows} | set(record.server[-1])
    assert declared & set(STATES) <= found, "what is declared is kept"
    if ours.module.run.methods.owner("personal") is not None:
        agree_personally(ours, theirs[-1])


def agree_personally(ours: Run, theirs: Round) -> None:
    models = personal_models.of_run(ours.module.run, ours.module.trainer)
    for i, model in theirs.personal.items():
        if i in theirs.clients.get("last_i", {}):
            near(models.of(i)[0].numpy(), model, f"the personal model of {i}")


def near(ours: Any, theirs: Any, what: str) -> None:
    largest = max(1.0, np.abs(theirs).max())
    assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() < 1e-9 * largest, what


# Clients that are stacked have the weights of their samples, too.
MATRIX = [("uniform", name) for name in (*METHODS, *MODERN)]
MATRIX += [("samples", name) for name in (*METHODS, *UNSTACKED)]
MATRIX += [("stacked", name) for name in MODERN if name not in UNSTACKED]
MATRIX += [("poisson", name) for name in MODERN]


@pytest.mark.parametrize(("setting", "name"), MATRIX, ids=[f"{s}-{name}" for s, name in MATRIX])
def test_method_agrees_with_the_oracle(setting: str, name: str) -> None:
    agree(*both(name, setting))


def test_a_round_without_clients_averages_nothing_and_copies_stay_valid() -> None:
    """Poisson rounds may be empty, also those in which a part is due."""
    ours, theirs = both("FedALS", "poisson", rounds=40, participation=0.12)
    agree(ours, theirs)
    assert [t for t in range(2, 40, 3) if not ours.schedule.rounds[t]]


@pytest.mark.parametrize("engine", ["uniform", "samples"])
@pytest.mark.parametrize("beside", [{}, {"beta": 0.1, "sam": 0.05}])
def test_scaffnew_agrees_with_the_oracle(beside: dict[str, Any], engine: str) -> None:
    """It takes all clients, uniform weights and no clipping."""
    config = Config(lr=0.3, lr_decay=0.95, weight_decay=0.01, scaffnew=0.4, **beside)
    ours, theirs = of_config(config, participation="all", **ENGINES[engine])
    agree(ours, theirs)
    steps = [{len(batches) for batches in table.values()} for table in ours.schedule.rounds]
    drawn = [int(generator(1, "scaffnew", t).geometric(0.4)) for t in range(len(steps))]
    assert steps == [{k} for k in drawn] and max(drawn) > 2, "one K for all clients of a round"
    for rows in ours.record.rows:
        assert np.abs(sum(rows["RandomSkips.h"].values())).max() < 1e-12
    assert ours.record.metrics[-1].get("cost/kept_vectors", 2) == 2 + len(set(beside) - {"sam"})


def test_clipping_is_active_in_about_a_third_of_the_steps() -> None:
    ours, theirs = of_config(settings("uniform"))
    steps = sum(len(batches) for table in ours.schedule.rounds for batches in table.values())
    assert 0.2 < sum(r.clipped_steps for r in theirs) / steps < 0.5
    shares = [len({len(b) for b in table.values()}) for table in ours.schedule.rounds]
    assert max(shares) > 1, "unequal K_i"


@pytest.mark.parametrize("name", UNSTACKED)
def test_what_reads_the_layers_of_one_client_is_refused_where_clients_are_stacked(
    name: str,
) -> None:
    with pytest.raises(UserError, match="stacked"):
        both(name, "stacked")


def test_in_some_of_the_rounds_nobody_takes_part() -> None:
    ours, _ = both("FedSWA", "poisson")
    taking_part = [len(table) for table in ours.schedule.rounds]
    assert 0 in taking_part[1:-1] and max(taking_part) > 1


D, B = 31, 9  # numbers of the model, and its rows and vectors
SENT: dict[str, tuple[int, int]] = {
    "Local AdamW": (D, D),
    "FedAdamW": (2 * D + B + 1, D + B),
    "FedLADA": (3 * D + 1, 2 * D),
    "averaged AdamW": (2 * D + B + 2, 2 * D + B),
    "FedMuon": (3 * D, 2 * D),
    "FedMuon-LMO": (2 * D, 2 * D),
    "FedACG": (D, D),
    "FedWMSAM": (3 * D + 1, D),
    "FedWMSAM, fixed, + RI": (3 * D + 1, 2 * D + 1),
    "FedSWA": (D, D),
    "FedMoSWA": (2 * D, 2 * D),
    "FedGloSS": (D, D),
    "FedTOGA": (2 * D, D),
    "FedTOGA alone + RI": (2 * D, 2 * D),
    "APFL": (D, D),
    "FedALA": (D, D),
    "FedRoD": (D, D),
    "Per-FedAvg": (D, D),
    "q-FedAvg": (D, D + 1),
}


@pytest.mark.parametrize("name", SENT)
def test_a_participant_is_sent_and_sends_so_many_numbers(name: str) -> None:
    ours, _ = both(name, rounds=3)
    counted = ours.record.metrics[-1]
    per_participant = tuple(
        counted[f"communication/{way}_parameters"] / (3 * 3) for way in ("down", "up")
    )
    assert per_participant == SENT[name]
