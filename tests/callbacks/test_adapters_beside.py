"""All pairs of the page's table "What may stand beside what" run, or are refused by names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pytorch_lightning.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from fl_lightning import Base, FederatedCallback, UserError
from fl_lightning import callbacks as c
from fl_lightning.systems import Devices, LogNormal, SystemHeterogeneity, VirtualClock
from tests.callbacks.test_adapters import TRAININGS, ours

RANKS = [1, 2, 3, 2, 1, 3, 2]
# The columns of the table.
METHODS: dict[str, Callable[[], Any]] = {
    "ffa": lambda: c.FactorSchedule(["B"]),
    "rolora": lambda: c.FactorSchedule(["B", "A"]),
    "fedsa": lambda: c.PartialAveraging({"lora_B": "never"}),
    "flexlora": lambda: c.TruncatedProduct(),
    "flexlora, ranks": lambda: c.TruncatedProduct(RANKS),
    "hetlora": lambda: c.PaddedRanks(gamma=1.0),
    "hetlora, prunes": lambda: c.PaddedRanks(gamma=0.5),
    "flora": lambda: c.StackedAdapters(),
    "flora, ranks": lambda: c.StackedAdapters(RANKS),
    "fedex": lambda: c.ResidualMerge(),
    "fair": lambda: c.CorrectedFactor(),
}
RANKED = [name for name in METHODS if name.startswith(("flexlora", "hetlora", "flora"))]
UNEQUAL = ["flexlora, ranks", "hetlora, prunes", "flora, ranks"]
PRODUCTS = [*RANKED, "fedex", "fair"]
# Refused beside clients' own copies of any part: methods with a mask, and another that has parts.
MASKED = ["ffa", "rolora", "fedsa", *UNEQUAL]
# Refused beside own copies of adapters: also the methods that take products of all adapters.
PARTS = [*MASKED, *PRODUCTS]
# Refused beside averages of w over rounds: they change frozen weights, or the factors' meaning.
OTHER_FACTORS = ["flexlora", "flexlora, ranks", "flora", "flora, ranks", "fedex"]
OWN_COORDINATES = ["fedsa", "rolora"]
POISSON = {"sampling": "poisson", "participation": 0.6}
# The rows: what stands beside, with options, and the columns that refuse it.
BESIDE: dict[str, tuple[Callable[[], list[Any]], dict[str, Any], list[str]]] = {
    "fedprox": (lambda: [c.ProximalTerm(0.1)], {}, []),
    "sam": (lambda: [c.SharpnessAwareMinimization(0.05)], {}, []),
    "a loss that looks": (lambda: [c.NotTrueDistillation()], {}, []),
    "dropouts": (lambda: [SystemHeterogeneity(dropout=0.4)], {}, []),
    "deadline": (lambda: [VirtualClock(Devices(LogNormal(1.0, 0.5)), 8.0)], {}, []),
    "poisson": (lambda: [], POISSON, []),
    "scaffold": (lambda: [c.ControlVariates()], {}, ["rolora", *RANKED]),
    "feddyn": (lambda: [c.DynamicRegularization(0.1)], {}, ["rolora", *RANKED]),
    "fedcm": (lambda: [c.ClientMomentum()], {}, ["rolora", *RANKED]),
    "fedinit": (lambda: [c.RelaxedInitialization(0.1)], {}, ["rolora", *RANKED]),
    "moon": (lambda: [c.ModelContrast()], {}, ["rolora", *RANKED]),
    "median": (lambda: [c.RobustAggregation("median")], {}, PRODUCTS),
    "privacy": (
        lambda: [c.DifferentialPrivacy(1.0, noise_multiplier=1.0, noise_seed=3)],
        POISSON,
        PRODUCTS,
    ),
    "parts of adapters": (lambda: [c.PartialAveraging({"*lora*": 2})], {}, PARTS),
    "other parts": (lambda: [c.PartialAveraging({"*bias": "never"})], {}, MASKED),
    "averaged moments": (
        lambda: [c.AdamDirection(second="averaged", share="tensor")],
        {},
        ["fedsa", "rolora", *RANKED],
    ),
    "mean over all clients": (lambda: [c.MuonDirection(average="all")], {}, PRODUCTS),
    "random k": (lambda: [c.RandomK(0.5)], {}, UNEQUAL),
    "quantized": (lambda: [c.QuantizedUpdate()], {}, ["ffa", "rolora", *UNEQUAL]),
    "signs of EF21": (lambda: [c.ErrorFeedback21(c.SignUpdate())], {}, ["ffa", "rolora", *RANKED]),
    "top-k": (lambda: [c.TopKCompression(0.5)], {}, RANKED),
    "own model, APFL": (lambda: [c.MixedPersonalModel()], {}, ["rolora", *RANKED, "fedex"]),
    "own model, Ditto": (lambda: [c.ProximalPersonalModel()], {}, ["rolora", *RANKED, "fedex"]),
    "own model, pFedMe": (lambda: [c.MoreauEnvelope()], {}, ["rolora", "fedsa", *RANKED, "fedex"]),
    "own model, FedALA": (
        lambda: [c.AdaptiveLocalAggregation()],
        {},
        ["rolora", "fedsa", *RANKED, "fedex"],
    ),
    "own model, Per-FedAvg": (lambda: [c.MetaGradient()], {}, []),
    "a lookahead is sent": (lambda: [c.LookaheadMomentum()], {}, [*OWN_COORDINATES, *RANKED]),
    "an ascent is sent": (lambda: [c.ServerAscent()], {}, [*OWN_COORDINATES, *RANKED]),
    "w is sent quantised": (lambda: [c.QuantizedBroadcast(1)], {}, [*OWN_COORDINATES, *RANKED]),
    "averages": (lambda: [EMAWeightAveraging(decay=0.5)], {}, OTHER_FACTORS),
    "averages at the end": (lambda: [StochasticWeightAveraging(0.1, 1)], {}, OTHER_FACTORS),
}


@pytest.mark.parametrize("factors", [["B"], ["B", "A"]])
@pytest.mark.parametrize("product", [c.TruncatedProduct, c.StackedAdapters])
def test_rounds_of_some_factors_are_refused_beside_new_values_of_both(
    factors: list[str], product: type[FederatedCallback]
) -> None:
    for methods in ([c.FactorSchedule(factors), product()], [product(), c.FactorSchedule(factors)]):
        with pytest.raises(UserError, match=f"FactorSchedule and {product.__name__}.*both factors"):
            ours(methods, TRAININGS["sgd"], rounds=1)


class ChangesFirst(FederatedCallback):
    base = Base("first.weight")


OF_EARLIER_ROUNDS: dict[str, Callable[[], Any]] = {
    "APFL": c.MixedPersonalModel,
    "Ditto": c.ProximalPersonalModel,
    "pFedMe": c.MoreauEnvelope,
    "FedALA": c.AdaptiveLocalAggregation,
    "FedRoD": c.PersonalHead,
    "IFCA": lambda: c.ClusteredModels(k=2),
    "FedExP": c.ExtrapolatedStep,
    "FedPer of adapters": lambda: c.PartialAveraging({"lora_A": 2}),
}


@pytest.mark.parametrize("name", OF_EARLIER_ROUNDS)
def test_models_of_earlier_rounds_are_refused_where_frozen_weights_change(name: str) -> None:
    other = OF_EARLIER_ROUNDS[name]()
    with pytest.raises(UserError, match="frozen weights") as refused:
        ours([ChangesFirst(), other], TRAININGS["sgd"], rounds=1)
    assert "ChangesFirst" in str(refused.value) and type(other).__name__ in str(refused.value)


# FedSA-LoRA is PartialAveraging, whose refusals are tested with it.
PAIRS = [(column, row) for column in METHODS for row in BESIDE]


@pytest.mark.parametrize(("column", "row"), PAIRS)
def test_a_pair_runs_or_is_refused_by_names(column: str, row: str) -> None:
    method = METHODS[column]()
    others, options, refusing = BESIDE[row]
    beside = others()
    names = [type(each).__name__ for each in (method, *beside)]

    def run() -> Any:
        return ours([method, *beside], TRAININGS["sgd"], **{"rounds": 2, **options})

    sends = [
        each for each in beside if isinstance(each, FederatedCallback) and each.has("transmit")
    ]
    if column == "fedsa" and sends:
        with pytest.raises(UserError, match="PartialAveraging"):
            run()
        return
    if column not in refusing:
        made = run()
        assert np.isfinite(made.record.w[-1]).all()
        assert not np.array_equal(made.record.w[-1], made.start)
        return
    with pytest.raises(UserError) as refused:
        run()
    for name in names:
        assert name in str(refused.value), str(refused.value)
