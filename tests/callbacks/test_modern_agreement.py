"""The methods of 2023 to 2026 agree with their oracle to 1e-9: models, rows, states, personal
models.

Minibatches, three of eight clients of unequal size and step count, decaying rate, weight decay,
clipping; each alone and beside what perturbs, corrects and moves starts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.evaluation import personal_models
from fl_lightning.systems import Buffered, Constant, Devices
from tests.helpers.federation import BATCH, Network, Run, fit, network, samples
from tests.oracles.modern import Federation, Round
from tests.oracles.problems import TwoLayer

ROUNDS = 5
SETTINGS: dict[str, Any] = {"lr": 0.2, "weight_decay": 0.01}
CLIENT = {
    "ControlVariates.c_i": "c_i",
    "DynamicRegularization.lambda_i": "lambda_i",
    "RelaxedInitialization.last": "x",
    "MuonDirection.M": "M",
    "MomentumGuidedPerturbation.c_i": "c_i",
    "MixedPersonalModel.v": "v",
    "MixedPersonalModel.alpha_i": "alpha_i",
    "AdaptiveLocalAggregation.last": "x",
    "AdaptiveLocalAggregation.W": "W",
    "PersonalHead.P": "P",
}
SERVER = {
    "AdamDirection.first_mean": "first",
    "AdamDirection.second_mean": "second",
    "AdamDirection.first_share": "q",
    "AdamDirection.second_share": "r",
    "GlobalDirection.delta": "delta",
    "LookaheadMomentum.m": "m",
    "ServerAscent.last": "last",
    "MuonDirection.M": "M",
    "MuonDirection.C": "C",
    "MomentumGuidedPerturbation.delta": "delta",
    "MomentumGuidedPerturbation.c": "c",
    "MomentumGuidedPerturbation.mixing": "mixing",
    "GlobalUpdateGuidance.delta": "toga",
    "PrototypePull.P": "P",
    "PrototypePull.a": "a",
    "ControlVariates.c": "c",
    "DynamicRegularization.lambda_mean": "lambda",
}


def adam(**given: Any) -> Any:
    """AdamDirection, whose ε is large enough that its derivative is moderate."""
    return c.AdamDirection(epsilon=1e-3, **given), {"adam": {"epsilon": 1e-3, **given}}


def muon(**given: Any) -> Any:
    return c.MuonDirection(**given), {"muon": given}


def direction(alpha: float, mode: str) -> Any:
    return c.GlobalDirection(alpha, mode), {"direction": (alpha, mode)}  # type: ignore[arg-type]


def scaffold(momentum: float | None = None) -> Any:
    return c.ControlVariates(momentum=momentum), {"scaffold": {"momentum": momentum}}


LMO: dict[str, Any] = {
    "momentum": 0.3,
    "nesterov": False,
    "start": "own",
    "variates": True,
    "average": "all",
    "vectors": "unit",
    "orthogonaliser": "svd",
    "adjust": "none",
}


def sam() -> Any:
    return c.SharpnessAwareMinimization(0.05), {"sam": 0.05}


def ri() -> Any:
    return c.RelaxedInitialization(0.1), {"ri": 0.1}


def feddyn() -> Any:
    return c.DynamicRegularization(0.1), {"feddyn": 0.1}


def prox() -> Any:
    return c.ProximalTerm(0.1), {"mu": 0.1}


def decay(end: float = 0.1) -> Any:
    return c.DecayWithinRound(end), {"decay": end}


def lookahead() -> Any:
    return c.LookaheadMomentum(0.6), {"lookahead": 0.6}


def ascent() -> Any:
    return c.ServerAscent(0.1), {"ascent": 0.1}


def toga() -> Any:
    given = {"radius": 0.05, "kappa": 2.0, "beta": 0.9}
    return c.GlobalUpdateGuidance(**given), {"toga": given}


def wmsam(**changed: Any) -> Any:
    given = {"radius": 0.05, "alpha": 0.3, "rate": 0.4, "lower": 0.2, "upper": 0.8, **changed}
    return c.MomentumGuidedPerturbation(**given), {"wmsam": given}


def apfl(alpha: float = 0.4, adaptive: bool = True) -> Any:
    return c.MixedPersonalModel(alpha, adaptive), {"mixed": (alpha, adaptive)}


def ala() -> Any:
    return c.AdaptiveLocalAggregation("last", 2.0, 3), {"ala": (2.0, 3)}


def meta(hessian: str) -> Any:
    return c.MetaGradient(0.1, hessian, 1e-2), {  # type: ignore[arg-type]
        "meta": (0.1, hessian, 1e-2)
    }


def rod(gamma: float = 1.0) -> Any:
    return c.PersonalHead(gamma), {"rod": gamma}


def proto(strength: float = 0.7) -> Any:
    return c.PrototypePull(3, 4, strength), {"proto": strength}


def fair(q: float) -> Any:
    return c.FairAggregation(q), {"fair": q}


def head() -> Any:
    return c.FixedHead(), {"fixed_head": True}


def als() -> Any:
    """The first layer is averaged every third round, the last bias never."""
    periods: dict[str, Any] = {"net.0.*": 3, "net.2.bias": "never"}
    return c.PartialAveraging(periods), {"als": {0: 3, 1: 3, 3: None}}


# What is beside what; made anew for each run.
CASES: dict[str, Any] = {
    "FedSWA": lambda: [decay()],
    "FedSWA, rising, + FedProx + RI": lambda: [decay(1.5), prox(), ri()],
    "FedMoSWA": lambda: [decay(), scaffold(0.4)],
    "SCAFFOLD with momentum + SAM": lambda: [scaffold(0.4), sam()],
    "FedSWA + SCAFFOLD + RI": lambda: [decay(0.3), scaffold(), ri()],
    "Local AdamW": lambda: [adam()],
    "Local AdamW, uncorrected": lambda: [adam(bias_correction=False)],
    "averaged AdamW": lambda: [adam(first="averaged", second="averaged")],
    "averaged AdamW, tensors, betas": lambda: [
        adam(first="averaged", second="averaged", share="tensor", betas=(0.8, 0.9))
    ],
    "averaged first, uncorrected": lambda: [adam(first="averaged", bias_correction=False)],
    "FedAdamW": lambda: [adam(second="averaged"), direction(0.5, "add")],
    "FedAdamW + SAM + SCAFFOLD + RI": lambda: [
        adam(second="averaged"),
        direction(0.5, "add"),
        sam(),
        scaffold(),
        ri(),
    ],
    "FedLADA": lambda: [adam(second="averaged", share="full"), direction(0.9, "mix")],
    "FedLADA + decay": lambda: [
        adam(second="averaged", share="full"),
        direction(0.9, "mix"),
        decay(),
    ],
    "global direction alone": lambda: [direction(0.5, "add")],
    "Local Muon": lambda: [muon()],
    "Local Muon, svd, rms, excluded": lambda: [
        (
            c.MuonDirection(orthogonaliser="svd", adjust="match_rms_adamw", exclude="net.2.weight"),
            {
                "muon": {
                    "orthogonaliser": "svd",
                    "adjust": "match_rms_adamw",
                    "exclude": (2,),
                }
            },
        )
    ],
    "Local Muon, unit, + SAM": lambda: [muon(vectors="unit", nesterov=False), sam()],
    "FedMuon": lambda: [
        muon(momentum=0.8, start="averaged", matrix_lr_scale=2.0),
        direction(0.5, "mix"),
    ],
    "FedMuon + SCAFFOLD + RI": lambda: [
        muon(momentum=0.8, start="averaged"),
        direction(0.5, "mix"),
        scaffold(),
        ri(),
    ],
    "own Muon": lambda: [muon(start="own")],
    "FedMuon-LMO": lambda: [muon(**LMO)],
    "FedACG": lambda: [lookahead(), prox()],
    "FedNSAM": lambda: [lookahead(), sam()],
    "FedACG + RI + SCAFFOLD": lambda: [prox(), ri(), lookahead(), scaffold()],
    "FedWMSAM": lambda: [wmsam()],
    "FedWMSAM, fixed, + RI": lambda: [wmsam(rate=0.0), ri()],
    "FedGloSS": lambda: [feddyn(), ascent(), sam()],
    "FedGloSS alone + RI": lambda: [ascent(), ri()],
    "FedTOGA": lambda: [toga(), feddyn()],
    "FedTOGA alone + RI": lambda: [toga(), ri()],
    "APFL": lambda: [apfl()],
    "APFL, fixed, + SAM + RI": lambda: [apfl(0.7, False), sam(), ri()],
    "FedALA": lambda: [ala()],
    "FedALA + SCAFFOLD": lambda: [ala(), scaffold()],
    "FedBABU": lambda: [head()],
    "FedBABU + FedAdamW's directions": lambda: [head(), adam(), direction(0.5, "add")],
    "FedProto": lambda: [proto()],
    "FedRoD": lambda: [rod()],
    "FedRoD, plain, + SCAFFOLD": lambda: [rod(0.0), scaffold()],
    "Per-FedAvg": lambda: [meta("none")],
    "Per-FedAvg, Hessian-free, + FedProx": lambda: [meta("free"), prox()],
    "q-FedAvg": lambda: [fair(0.5)],
    "q-FedAvg, 2, + SAM": lambda: [fair(2.0), sam()],
    "Local AdamW + FedALS": lambda: [adam(), als()],
    "Local Muon + FedALS + RI": lambda: [muon(), als(), ri()],
    "global direction + FedALS": lambda: [direction(0.5, "add"), als()],
    "mixed direction + FedALS + SAM": lambda: [direction(0.7, "mix"), als(), sam()],
    "FedSWA + SCAFFOLD + FedALS": lambda: [decay(0.3), scaffold(), als()],
    "FedMoSWA + FedALS": lambda: [decay(), scaffold(0.4), als()],
    "Local AdamW + FedDyn + FedALS": lambda: [adam(), feddyn(), als()],
}
ENGINES: dict[str, dict[str, Any]] = {
    "uniform": {"engine": "sequential", "weighting": "uniform", "clip_norm": 0.9},
    "samples": {"engine": "concurrent", "workers": 2, "weighting": "samples", "clip_norm": 0.9},
    "stacked": {"engine": "stacked", "weighting": "samples"},
    # In some rounds nobody takes part.
    "poisson": {
        "engine": "sequential",
        "sampling": "poisson",
        "participation": 0.15,
        "rounds": 8,
    },
}
UNSTACKED = ("FedProto", "FedRoD", "FedRoD, plain, + SCAFFOLD")


def both(name: str, **options: Any) -> tuple[Run, list[Round]]:
    made = CASES[name]()
    parts: dict[str, Any] = {}
    for _, components in made:
        parts |= components
    rounds = options.pop("rounds", ROUNDS)
    methods = [method for method, _ in made]
    ours = network([*methods, c.CommunicationLogger()], rounds, lr_decay=0.9, **SETTINGS, **options)
    theirs = Federation(
        TwoLayer(3, 4, 3),
        ours.schedule,
        ours.start,
        parts,
        lr=SETTINGS["lr"],
        decay=0.9,
        weight_decay=SETTINGS["weight_decay"],
        clip=options.get("clip_norm"),
        weighting=options.get("weighting", "uniform"),
    )
    return ours, theirs.run()


def near(ours: Any, theirs: Any, what: str) -> None:
    assert np.abs(np.asarray(ours) - np.asarray(theirs)).max() < 1e-9, what


def agree(ours: Run, theirs: list[Round]) -> None:
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
            for i, row in rows.items() if name in CLIENT else ():
                near(row, expected.clients[CLIENT[name]][i], f"{name} of {i} in round {t}")
        for name, value in record.server[t].items():
            if name in SERVER:
                near(value, expected.server[SERVER[name]], f"{name} in round {t}")
    known = set(CLIENT) | set(SERVER)
    found = {name for rows in record.rows for name in rows} | set(record.server[-1])
    assert declared & known <= found, "what is declared is kept"
    models = personal_models.of_run(ours.module.run, ours.module.trainer)
    owns = ours.module.run.methods.owner("personal") is not None
    for i, model in theirs[-1].personal.items():
        if owns and i in theirs[-1].clients.get("x", {}):
            near(models.of(i)[0].numpy(), model, f"the personal model of {i}")


RUNS = [(e, name) for e in ENGINES for name in CASES if e != "stacked" or name not in UNSTACKED]


@pytest.mark.parametrize(("setting", "name"), RUNS, ids=[f"{e}-{name}" for e, name in RUNS])
def test_method_agrees_with_the_oracle(setting: str, name: str) -> None:
    agree(*both(name, **ENGINES[setting]))


@pytest.mark.parametrize("name", UNSTACKED)
def test_what_reads_the_layers_of_one_client_is_refused_where_clients_are_stacked(
    name: str,
) -> None:
    with pytest.raises(UserError, match="stacked"):
        both(name, **ENGINES["stacked"])


def test_in_some_of_the_rounds_nobody_takes_part() -> None:
    ours, _ = both("FedSWA", **ENGINES["poisson"])
    taking_part = [len(table) for table in ours.schedule.rounds]
    assert 0 in taking_part[1:-1] and max(taking_part) > 1


# ------------------------------------------------------------------ what travels

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


# ------------------------------------------------------------------ identities


def test_mixing_over_plain_sgd_is_fedcm() -> None:
    options = {**SETTINGS, "lr_decay": 0.9}
    ours = network([c.GlobalDirection(0.7, "mix")], 4, **options)
    theirs = network([c.ClientMomentum(0.3)], 4, **options)
    near(ours.record.w[-1], theirs.record.w[-1], "w")


def test_mixing_beside_kept_parts_is_fedcm_beside_them() -> None:
    options = {**SETTINGS, "lr_decay": 0.9, "weighting": "samples"}
    parts = {"net.0.*": 3, "net.2.bias": "never"}
    ours, theirs = (
        network([method, c.PartialAveraging(parts)], 6, **options)
        for method in (c.GlobalDirection(0.7, "mix"), c.ClientMomentum(0.3))
    )
    near(ours.record.w[-1], theirs.record.w[-1], "w")
    near(ours.record.evaluated[-1], theirs.record.evaluated[-1], "evaluated")


def test_one_step_a_round_has_the_whole_rate_also_beside_kept_parts() -> None:
    """Σ η of a part that clients keep adds up over rounds."""
    options = {**SETTINGS, "local_steps": 1, "lr_decay": 0.9, "participation": "all"}
    ours, theirs = (
        network([*more, c.ControlVariates(), c.PartialAveraging({"net.0.*": 3})], 7, **options)
        for more in ([c.DecayWithinRound(0.1)], [])
    )
    assert np.array_equal(ours.record.w[-1], theirs.record.w[-1])
    for i, row in theirs.record.rows[-1]["ControlVariates.c_i"].items():
        assert np.array_equal(ours.record.rows[-1]["ControlVariates.c_i"][i], row)


def test_dilocos_first_step_goes_nearly_twice_as_far_as_its_rate() -> None:
    """b = -d in the first round, so that w moves by 0.7 (1 + 0.9) d."""

    def adamw(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)

    def nesterov(w: Any) -> Any:
        return torch.optim.SGD(w, lr=0.7, momentum=0.9, nesterov=True)

    options = {"local_steps": 5, "keep_optimizer_state": True}
    mean = fitted(adamw, 1, **options)
    ours = fitted(adamw, 1, server_optimizer=nesterov, **options)
    moved = mean.record.w[0] - mean.start
    near(ours.record.w[0], ours.start + 0.7 * 1.9 * moved, "w")


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_fresh_moments_are_torchs_adamw(weight_decay: float) -> None:
    given = {"lr_decay": 0.9, "clip_norm": 0.9, "local_epochs": 1.5}
    data = {"lr": 0.02, "weight_decay": weight_decay}
    ours = network([c.AdamDirection()], 4, **data, **given)

    def adamw(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.02, weight_decay=weight_decay)

    theirs = fitted(adamw, 4, **given)
    near(ours.record.w[-1], theirs.record.w[-1], "w")


def fitted(optimizer: Any, rounds: int, **options: Any) -> Run:
    """Like ``network``, with another client optimizer and no methods."""
    x, y, clients = samples()
    data = InMemoryDataModule((x, y), clients=clients, batch_size=BATCH)
    return fit(Network(), data, [], rounds, participation=3, client_optimizer=optimizer, **options)


def test_equal_steps_make_the_share_of_zeros_adams_global_step() -> None:
    """With K steps in each round q after t rounds is β^{tK}: the paper's global step index."""
    run = network(
        [c.AdamDirection(first="averaged", second="averaged")], 3, local_steps=4, **SETTINGS
    )
    states = run.record.server[-1]
    near(states["AdamDirection.first_share"], 0.9**12, "q")
    near(states["AdamDirection.second_share"], 0.999**12, "r")


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        (lambda: c.MuonDirection(variates=True), None, "start='own' and"),
        (lambda: c.MomentumGuidedPerturbation(lower=0.9, upper=0.1), None, "above upper"),
        (
            lambda: c.LookaheadMomentum(),
            {"server_optimizer": lambda w: torch.optim.SGD(w, 1.0, momentum=0.9)},
            "server_optimizer=null",
        ),
        (lambda: c.AdamDirection(), {"momentum": 0.9}, "AdamDirection decides in which direction"),
        (lambda: c.DecayWithinRound(), {"beside": [c.NormalizedAveraging()]}, "cannot run"),
        (
            lambda: c.AdamDirection(second="averaged"),
            {"beside": [c.PartialAveraging(period=2)]},
            "cannot run together",
        ),
        (
            lambda: c.AdaptiveLocalAggregation(),
            {"beside": [c.RelaxedInitialization()]},
            "cannot run together",
        ),
        (
            lambda: c.FairAggregation(),
            {"beside": [c.RobustAggregation()]},
            "both decide how updates are combined",
        ),
    ],
)
def test_what_a_method_cannot_do_is_refused(
    method: Any, options: dict[str, Any] | None, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        made = method()
        given = dict(options or {})
        network([made, *given.pop("beside", [])], 1, **{**SETTINGS, **given})


def test_averaged_moments_run_beside_no_kept_parts_and_fresh_ones_do() -> None:
    methods = [c.AdamDirection(), c.PartialAveraging({"net.0.*": 3})]
    run = network(methods, 3, **SETTINGS)
    assert np.isfinite(run.record.w[-1]).all()


def test_methods_that_step_by_the_rounds_rate_are_noted() -> None:
    run = network([c.DecayWithinRound(), c.ProximalPersonalModel()], 1, **SETTINGS)
    assert any("steps of its own at the round's learning" in note for note in run.module.notes)


def asynchronously(*methods: FederatedCallback) -> Run:
    devices = Devices(Constant(1.0))
    settings = {"participation": 1.0, "asynchronous": Buffered(devices, size=2, concurrency=4)}
    return network(methods, 3, **SETTINGS, **settings)


@pytest.mark.parametrize(
    "make",
    [c.AdamDirection, c.MuonDirection, c.DecayWithinRound, c.MetaGradient],
    ids=lambda make: make.__name__,
)
def test_methods_whose_clients_read_nothing_that_is_sent_run_asynchronously(make: Any) -> None:
    run = asynchronously(make())
    assert np.isfinite(run.record.w[-1]).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: c.AdamDirection(second="averaged"),
        lambda: c.MuonDirection(start="own"),
        lambda: c.LookaheadMomentum(),
        lambda: c.MixedPersonalModel(),
        lambda: c.FixedHead(),
    ],
)
def test_the_others_are_refused_asynchronously(make: Any) -> None:
    with pytest.raises(UserError, match="asynchronous"):
        asynchronously(make())


def test_an_uncorrected_fresh_start_is_noted() -> None:
    run = network([c.AdamDirection(bias_correction=False)], 1, **SETTINGS)
    assert any("= 3.16 times Adam's" in note for note in run.module.notes)
