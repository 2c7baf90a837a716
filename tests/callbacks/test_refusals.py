"""What a method does not accept, or cannot run with, is refused by name before round 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fl_lightning import UserError
from fl_lightning import callbacks as c
from fl_lightning.optim import FedAdagrad, FedAdam, FedYogi
from fl_lightning.schedules import Linear
from fl_lightning.systems import Buffered, Constant, Devices, SystemHeterogeneity, VirtualClock
from tests.helpers.federation import network

Made = Callable[[], list[Any]]


def sgd(rate: float = 1.0, **options: Any) -> dict[str, Any]:
    return {"server_optimizer": lambda w: torch.optim.SGD(w, rate, **options)}


ADAM = {"server_optimizer": lambda w: torch.optim.Adam(w, 0.1)}
POISSON = {"sampling": "poisson", "participation": 0.4}
DELAYED = {"asynchronous": Buffered(Devices(Constant(1.0)), size=2, concurrency=3)}


def private(**given: Any) -> Any:
    return c.DifferentialPrivacy(**{"clip": 1.0, "noise_multiplier": 1.0, **given})


# What is made, and the words of the refusal.
ARGUMENTS: list[tuple[Made, str]] = [
    (lambda: [c.DynamicRegularization(0.0)], "penalty=0.0"),
    (lambda: [c.ProximalTerm("much")], "mu='much'"),  # type: ignore[arg-type]
    (lambda: [c.ProximalTerm(-1.0)], "mu=-1.0 is not accepted; it has to be a number from 0"),
    (
        lambda: [c.SharpnessAwareMinimization(1e300)],
        r"radius=1e\+300 is not accepted; .* up to 3\.4",
    ),
    (lambda: [c.ModelContrast(temperature=0.0)], "temperature=0.0"),
    (lambda: [c.AlternatingHead(0)], "head_epochs=0"),
    (lambda: [c.AlternatingHead(head="haed")], "AlternatingHead: no parameter is called 'haed'"),
    (lambda: [c.AlternatingHead(head=["last", 1])], "is called '1'"),  # type: ignore[list-item]
    (lambda: [c.FixedHead([])], r"FixedHead: no parameter is called '\[\]'"),
    (lambda: [c.AdaptiveLocalAggregation(None)], "is called 'None'"),  # type: ignore[arg-type]
    (lambda: [c.ProximalPersonalModel(-1.0)], "strength=-1"),
    (lambda: [c.MoreauEnvelope(inner_steps=0)], "inner_steps=0"),
    (lambda: [c.PrototypePull(2, 4)], "the data have 3 classes. Give classes=3"),
    (lambda: [c.PrototypePull(3, 5)], "Give features=4"),
    (lambda: [c.MuonDirection(variates=True)], "start='own' and"),
    (lambda: [c.MuonDirection(exclude="haed.*")], "exclude: no parameter is called 'haed"),
    (lambda: [c.GlobalDirection(1.5, "mix")], "alpha=1.5 is not accepted"),
    (lambda: [c.MomentumGuidedPerturbation(lower=0.9, upper=0.1)], "above upper"),
    (lambda: [c.ErrorFeedback21(c.QuantizedUpdate())], "QuantizedUpdate.*needs a contraction"),
    (lambda: [c.ErrorFeedback21(c.RandomK(0.5))], "memory=False.*needs a contraction"),
    (lambda: [c.ErrorFeedback21("top-k")], "'top-k'.*needs a contr"),  # type: ignore[arg-type]
    (lambda: [private(clip=float("inf"))], "clip=inf"),
    (lambda: [private(noise_multiplier=None)], "noise_multiplier or target_epsilon"),
    (lambda: [private(target_quantile=1.5)], r"target_quantile=1\.5"),
    (lambda: [c.ClusteredModels(1)], "k=1 is not accepted; it has to be an integer from 2"),
    (lambda: [c.AlignedDuals(0.0)], "penalty=0.0"),
    (lambda: [c.AugmentedModels(-1.0)], "penalty=-1.0"),
    (lambda: [c.DiscrepancyWeights(b=-0.1)], "b=-0.1"),
    (lambda: [c.DiscrepancyWeights(target=[0.5, 0.6])], "with sum 1"),
    (lambda: [c.DiscrepancyWeights(target=[0.0, 1.0])], "above 0 with sum 1"),
    (lambda: [c.DiscrepancyWeights(target=[0.5, 0.5])], "2 numbers, and the data have 3"),
    (lambda: [c.DecorrelatedFeatures(-0.1)], "strength=-0.1"),
    (lambda: [c.TrajectoryDistillation(decay=1.0)], "decay=1.0"),
    (lambda: [c.OrthogonalFactor(0)], "period=0"),
    (lambda: [c.OrthogonalFactor()], "for adapters .LoRA., but the learner has none"),
    (lambda: [c.ScaledHeads()], r"the learner has no heads.*--model\.learner\.heads"),
    (lambda: [c.ScaledHeads("*.bias", "*.bias")], r"shape \(4,\).* have to be \(h, r, r\) and"),
    (lambda: [c.SoapDirection(start="averaged", max_dim=1)], "no parameter has one"),
]
# What stands beside each other, the run's options, and the words of the refusal.
TOGETHER: list[tuple[Made, dict[str, Any], str]] = [
    (lambda: [c.ClientMomentum(), c.ClientMomentum()], {}, "ClientMomentum.*once"),
    (
        lambda: [c.SharpnessAwareMinimization(), c.GlobalSharpnessAwareMinimization()],
        {},
        "SharpnessAwareMinimization and GlobalSharpnessAwareMinimization both decide",
    ),
    (
        lambda: [c.RelaxedInitialization(average="updates"), c.TopKCompression()],
        {},
        "RelaxedInitialization and TopKCompression both decide what clients send",
    ),
    (lambda: [c.FairAggregation(), c.RobustAggregation()], {}, "both decide how updates are comb"),
    (lambda: [c.AdamDirection()], {"momentum": 0.9}, "AdamDirection decides in which direction"),
    (lambda: [c.DecayWithinRound(), c.NormalizedAveraging()], {}, "cannot run"),
    (lambda: [c.AdaptiveLocalAggregation(), c.RelaxedInitialization()], {}, "cannot run together"),
    (lambda: [c.LookaheadMomentum()], sgd(momentum=0.9), "server_optimizer=null"),
    (
        lambda: [c.MoreauEnvelope(), c.SharpnessAwareMinimization()],
        {},
        "MoreauEnvelope and SharpnessAwareMinimization",
    ),
    (lambda: [c.MoreauEnvelope(), c.ClientMomentum()], {}, "MoreauEnvelope and ClientMomentum"),
    (lambda: [c.MoreauEnvelope(), c.ProximalPersonalModel()], {}, "what a client uses itself"),
    (lambda: [c.ExtrapolatedStep()], sgd(momentum=0.9), "ExtrapolatedStep.*momentum"),
    (lambda: [c.ExtrapolatedStep()], sgd(weight_decay=0.1), "ExtrapolatedStep.*decay"),
    (lambda: [c.ExtrapolatedStep()], ADAM, "given is Adam"),
    (
        lambda: [c.RobustAggregation("krum", byzantine=1)],
        {},
        r"= 5 clients.* participation gives 3",
    ),
    (lambda: [c.RobustAggregation("krum", byzantine=1)], {"participation": 4}, "gives 4"),
    (lambda: [c.RobustAggregation("multi_krum", byzantine=0, keep=4)], {}, "keep=4 is more than"),
    (lambda: [c.RobustAggregation(mixing=True)], {}, "mixing with byzantine=1 needs"),
    (lambda: [c.RobustAggregation("bulyan")], {}, r"byzantine=1 needs 4 · 1 \+ 3 = 7 clients"),
    (lambda: [private()], {}, "holds only with sampling='poisson'"),
    (lambda: [private(), c.ControlVariates()], POISSON, "ControlVariates cannot run together"),
    (lambda: [private(), c.TopKCompression()], POISSON, "both decide what clients send"),
    (lambda: [private(), c.PartialAveraging()], POISSON, "neither clipped nor noised"),
    (lambda: [private(target_epsilon=0.1)], POISSON, "round 0 would bring"),
    *(
        (lambda made=made: [made()], DELAYED, f"{made.__name__} does not say that it tolerates")
        for made in (c.AlignedDuals, c.AugmentedModels, c.UpdateMemory, c.DiscrepancyWeights)
    ),
    (
        lambda: [c.TrajectoryDistillation()],
        DELAYED,
        "TrajectoryDistillation does not say that it tol",
    ),
    (
        lambda: [c.SoapDirection(start="averaged")],
        DELAYED,
        "SoapDirection does not say that it tol",
    ),
    (lambda: [c.SoapDirection()], {"momentum": 0.9}, "SoapDirection decides in which direction"),
    (lambda: [c.AugmentedModels(), c.QuantizedUpdate()], {}, "both decide what clients send"),
    (lambda: [c.UpdateMemory(), c.QuantizedUpdate()], {}, "UpdateMemory.*QuantizedUpdate"),
    (lambda: [c.UpdateMemory(), c.RobustAggregation()], {}, "both decide how updates are combined"),
    (lambda: [c.UpdateMemory(), private()], POISSON, "both decide|cannot run together"),
    (lambda: [c.DiscrepancyWeights(), c.RobustAggregation()], {}, "both decide how updates are c"),
    (lambda: [c.DiscrepancyWeights(), private()], POISSON, "both decide|cannot run together"),
    (lambda: [c.DecorrelatedFeatures()], {"engine": "stacked"}, "stacked"),
    (lambda: [c.TrajectoryDistillation()], {"engine": "stacked"}, "stacked"),
    (lambda: [private(target_quantile=0.5)], POISSON, r"count_stddev=0\.16.*than 10 clients"),
]
# Not beside parts that are not averaged.
WITHOUT_PARTS: list[Callable[[], Any]] = [
    c.NormalizedAveraging,
    c.GlobalSharpnessAwareMinimization,
    c.MoreauEnvelope,
    c.ExtrapolatedStep,
    c.AlternatingHead,
    lambda: c.AdamDirection(second="averaged"),
    lambda: c.RelaxedInitialization(offset="mean"),
    lambda: c.ClusteredModels(2),
    *(c.AlignedDuals, c.AugmentedModels, c.UpdateMemory, c.DiscrepancyWeights),
    c.TrajectoryDistillation,
    lambda: c.SoapDirection(start="averaged"),
]
SENDING: list[Callable[[], Any]] = [
    *(c.QuantizedUpdate, c.SignUpdate, c.LowRankUpdate, c.TopKCompression),
    lambda: c.RandomK(0.5),
]
for made in (*WITHOUT_PARTS, *SENDING, c.QuantizedBroadcast):
    TOGETHER.append(
        (
            lambda made=made: [made(), c.PartialAveraging()],
            {},
            r"both decide|PartialAveraging cannot run together|PartialAveraging.*cannot run",
        )
    )
for made in SENDING:
    both = lambda made=made: [made(), c.ErrorFeedback21(None)]  # noqa: E731
    TOGETHER.append((both, {}, "both decide what clients send"))
# IFCA: there is a model for each cluster.
for made, says in (
    (c.ProximalTerm, "uses clients.w"),
    (c.DynamicRegularization, "uses clients.w"),
    (c.LocallyEstimatedPerturbation, "uses clients.w"),
    (c.RelaxedInitialization, "goes by clients.w"),
    (c.TopKCompression, "cannot run together"),
    (c.RobustAggregation, "cannot run together"),
    (c.ExtrapolatedStep, "cannot run together"),
):
    beside = lambda made=made: [c.ClusteredModels(2), made()]  # noqa: E731
    TOGETHER.append((beside, {}, f"{made.__name__}.*{says}"))
for server in (sgd(0.5), ADAM):
    TOGETHER.append((lambda: [c.ClusteredModels(2)], server, "SGD at the constant rate 1"))
# Scaffnew: all clients, uniform weights, plain steps at one rate.
for options, says in (
    ({"participation": 3}, "3 of 8.*participation='all'"),
    ({"sampling": "poisson"}, "sampling='poisson'"),
    ({"weighting": "samples"}, "weighting='uniform'"),
    ({"clip_norm": 10.0}, "clip_norm=None"),
    ({"momentum": 0.9}, "without momentum"),
    (sgd(0.5), "rate 1"),
    ({"server_lr_decay": 0.9}, "rate 1"),
    ({"on_nonfinite": "skip"}, "every client to finish"),
):
    given = {"participation": "all", **options}
    TOGETHER.append((lambda: [c.RandomSkips()], given, f"RandomSkips.*{says}"))
for other, says in (
    (lambda: SystemHeterogeneity(min_work=0.5), "SystemHeterogeneity cannot run together"),
    (lambda: VirtualClock(Devices(Constant(1.0)), deadline=9.0), "no deadline"),
    (c.QuantizedUpdate, "QuantizedUpdate cannot run together.*the clients' mean"),
    (c.ByzantineClients, "ByzantineClients cannot run together"),
    (c.DynamicRegularization, "DynamicRegularization cannot run together"),
    (c.AdamDirection, "AdamDirection cannot run together.*times the rate"),
):
    beside = lambda other=other: [c.RandomSkips(), other()]  # noqa: E731
    TOGETHER.append((beside, {"participation": "all"}, f"RandomSkips.*{says}"))


@pytest.mark.parametrize(("make", "says"), ARGUMENTS)
def test_an_argument_is_refused(make: Made, says: str) -> None:
    options = POISSON if "private" in make.__code__.co_names else {}
    with pytest.raises(UserError, match=says):
        network(make(), 1, **options)


@pytest.mark.parametrize(("make", "options", "says"), TOGETHER)
def test_what_cannot_run_together_is_refused(
    make: Made, options: dict[str, Any], says: str
) -> None:
    for turn in (1, -1):
        with pytest.raises(UserError, match=says) as refused:
            network(make()[::turn], 1, **options)
        assert "\n" not in str(refused.value)
        if " and " in says:
            break  # the names come in the order of the callbacks


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda w: FedAdam(w, -1.0), "lr=-1.0"),
        (lambda w: FedYogi(w, 0.1, betas=(0.9, 1.0)), "beta2=1.0"),
        (lambda w: FedAdagrad(w, 0.1, tau=0.0), "tau=0.0"),
    ],
)
def test_a_server_optimizer_is_refused(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make([torch.nn.Parameter(torch.zeros(2))])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: c.LogitCalibration(Linear(1.0, -1.0, 2)), "in round 2, tau=-1.0 is not acc"),
        (lambda: c.GlobalDirection(Linear(0.0, 2.0, 2), "mix"), "in round 2, alpha=2.0 is not acc"),
    ],
)
def test_a_schedule_that_leaves_the_bounds_is_refused_in_that_round(make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        network([make()], 3)


@pytest.mark.parametrize("shape", [(7, 1), (1, 7, 4), (7,)])
def test_features_that_cannot_be_correlated_are_refused(shape: tuple[int, ...]) -> None:
    method: Any = c.DecorrelatedFeatures()
    with pytest.raises(UserError, match="at least two features per sample"):
        method.local_loss(None, torch.zeros(()), {"features": torch.zeros(shape)}, None)
