"""The methods added in 2026 agree with NumPy's calculation to 1e-9: models, states, what was sent.
Three of eight clients of unequal size and step count, decaying rate, weight decay, clipping; alone
and beside what perturbs, corrects and moves starts; one client, everybody, nobody."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import FederatedCallback, InMemoryDataModule
from fl_lightning import callbacks as c
from fl_lightning.callbacks.directions.soap_direction import eigenbasis
from fl_lightning.errors import Diverged
from fl_lightning.lab.contracts.federation import Learner, quiet
from fl_lightning.lab.contracts.federation import fit as tiny
from fl_lightning.models import MultiHead
from fl_lightning.systems import SystemHeterogeneity
from tests.callbacks.test_adapters import federation as federation_of_adapters
from tests.helpers import federation
from tests.helpers.compositions import Function
from tests.helpers.federation import Quadratics, Run, fit
from tests.helpers.low_rank import Adapted
from tests.oracles import methods_2026 as oracle
from tests.oracles.methods_2026 import Method, Outcome, Setting
from tests.oracles.problems import Quadratic, Schedule, Vector

PLAIN = oracle.Plain(3, 4, 3)
ENGINES: dict[str, dict[str, Any]] = {
    "sequential": {"engine": "sequential"},
    # Its bits are the sequential engine's, by tests of their own.
    "concurrent": {"engine": "concurrent", "workers": 2},
    "stacked": {"engine": "stacked"},
    # In some rounds nobody takes part.
    "poisson": {"engine": "sequential", "sampling": "poisson", "participation": 0.15, "rounds": 12},
    "one client": {"engine": "sequential", "participation": 1, "rounds": 4},
    "everybody": {"engine": "sequential", "participation": "all", "rounds": 3},
}


@dataclass
class Case:
    """The callbacks, the same of the oracle, and what a run has beside them."""

    ours: Callable[[], list[Any]]
    theirs: Callable[[], list[Method]]
    how: Setting = field(default_factory=Setting)
    options: dict[str, Any] = field(default_factory=dict)
    stacks: bool = True


def callbacks(case: Case) -> list[Any]:
    made: list[Any] = [c.CommunicationLogger(), *case.ours()]
    if case.how.radius is not None:
        made.append(c.SharpnessAwareMinimization(case.how.radius))
    if case.how.beta is not None:
        made.append(c.RelaxedInitialization(case.how.beta))
    return made


def settings(how: Setting) -> dict[str, Any]:
    decay: Any = how.lr_decay
    return {
        "lr_decay": Function(decay) if callable(decay) else decay,
        "clip_norm": how.clip_norm,
        "weighting": how.weighting,
        "server_optimizer": lambda w: torch.optim.SGD(
            w, how.server_rate, momentum=how.server_momentum
        ),
    }


def both(case: Case, **options: Any) -> tuple[Run, list[Outcome]]:
    how, given = case.how, {**case.options, **options}
    ours = federation.network(
        callbacks(case),
        given.pop("rounds", 4),
        lr=how.lr,
        weight_decay=how.weight_decay,
        momentum=how.momentum,
        **settings(how),
        **given,
    )
    rounds = len(ours.record.w)
    return ours, oracle.run(PLAIN, case.theirs(), how, rounds, ours.start, ours.schedule)


def near(ours: Any, theirs: Any, what: str) -> None:
    ours, theirs = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    assert ours.shape == theirs.shape, what
    assert np.abs(ours - theirs).max(initial=0.0) < 1e-9, what


def agree(ours: Run, theirs: list[Outcome], counted: bool = True) -> None:
    """Every round: the model, all states that the oracle has, and what was sent."""
    record, down, up = ours.record, 0, 0
    for t, expected in enumerate(theirs):
        near(record.w[t], expected.w, f"w in round {t}")
        for name, rows in expected.clients.items():
            kept = record.rows[t].get(name, {}) if rows else {}
            # Where the rate is 0 a client may write the 0 that it had.
            assert not any(kept[i].any() for i in set(kept) - set(rows)), f"{name} in round {t}"
            for i, row in rows.items():
                near(record.rows[t][name][i], row, f"{name} of {i} in round {t}")
        begun = any(ours.schedule.rounds[: t + 1])
        for name, value in expected.server.items() if begun else ():  # nothing is kept before
            near(record.server[t][name], value, f"{name} in round {t}")
        down, up = down + expected.down, up + expected.up
        if counted and ours.schedule.rounds[t]:
            sent = record.metrics[t]
            assert sent["communication/down_parameters"] == down, f"down in round {t}"
            assert sent["communication/up_parameters"] == up, f"up in round {t}"


SAM = {"radius": 0.05}
RI = {"beta": 0.1}
CASES: dict[str, Case] = {}


def add(name: str, ours: Any, theirs: Any, *, how: Any = None, **more: Any) -> None:
    CASES[name] = Case(ours, theirs, Setting(**(how or {})), **more)


def late(t: int) -> float:
    return 1.0 if t < 2 else 0.5


def grows(t: int) -> float:
    return 0.1 + 0.1 * t


# ------------------------------------------------------------------ A-FedPD, FedADMM

for label, how in {
    "": {},
    " with SAM": SAM,
    " with SAM, RI": {**SAM, **RI},
    " with server momentum": {"server_rate": 0.5, "server_momentum": 0.9, "weighting": "samples"},
    ", client's momentum": {"momentum": 0.9, "weighting": "samples", "clip_norm": None},
}.items():
    add(f"A-FedPD{label}", lambda: [c.AlignedDuals()], lambda: [oracle.Aligned(0.1)], how=how)
add(
    "A-FedPD, schedule",
    lambda: [c.AlignedDuals(Function(grows))],
    lambda: [oracle.Aligned(grows)],
    how={"weighting": "samples"},
)
add(
    "A-FedPD, SCAFFOLD, FedProx",
    lambda: [c.AlignedDuals(0.5), c.ControlVariates(), c.ProximalTerm(0.1)],
    lambda: [oracle.Aligned(0.5), oracle.Variates(), oracle.Proximal(0.1)],
)
for previous in ("received", "own"):
    for label, how in {
        "": {},
        " by samples": {"weighting": "samples"},
        " with SAM, RI": {**SAM, **RI},
        " with server momentum": {"server_rate": 0.5, "server_momentum": 0.9},
    }.items():
        add(
            f"FedADMM, {previous}{label}",
            lambda previous=previous: [c.AugmentedModels(previous=previous)],
            lambda previous=previous: [oracle.Augmented(0.01, 1.0, previous)],
            how=how,
        )
    add(
        f"FedADMM, {previous}, as its code is run",
        lambda previous=previous: [
            c.AugmentedModels(0.2, Function(late), previous),
            c.RandomEpochs(1, 3),
        ],
        lambda previous=previous: [oracle.Augmented(0.2, late, previous)],
        how={"momentum": 0.5, "clip_norm": None},
    )
    add(
        f"FedADMM, {previous}, penalty's schedule, SCAFFOLD",
        lambda previous=previous: [
            c.AugmentedModels(Function(grows), 3 / 8, previous),
            c.ControlVariates(),
        ],
        lambda previous=previous: [oracle.Augmented(grows, 3 / 8, previous), oracle.Variates()],
    )

# ------------------------------------------------------------------ FedVARP, MIFA


def resting(t: int) -> float:
    """Where the rate is 0 nothing changes."""
    return 0.0 if t == 2 else 0.9**t


for estimator in ("saga", "sag"):
    for units in ("update", "rate"):
        for label, how in {"": {}, ", a silent round": {"lr_decay": resting}}.items():
            add(
                f"memory, {estimator}, {units}{label}",
                lambda estimator=estimator, units=units: [c.UpdateMemory(estimator, units)],
                lambda estimator=estimator, units=units: [oracle.Memory(estimator, units)],
                how=how,
            )
        add(
            f"memory, {estimator}, {units}, by samples, SAM, RI, FedProx",
            lambda estimator=estimator, units=units: [
                c.UpdateMemory(estimator, units),
                c.ProximalTerm(0.1),
            ],
            lambda estimator=estimator, units=units: [
                oracle.Memory(estimator, units),
                oracle.Proximal(0.1),
            ],
            how={**SAM, **RI, "weighting": "samples", "server_rate": 0.7, "server_momentum": 0.5},
        )

# ------------------------------------------------------------------ FedDecorr, FedGMT

for label, how in {
    "": {},
    " with SAM, RI": {**SAM, **RI},
    " by samples": {"momentum": 0.9},
}.items():
    if "samples" in label:
        how = {**how, "weighting": "samples", "clip_norm": None}
    add(
        f"FedDecorr{label}",
        lambda: [c.DecorrelatedFeatures()],
        lambda: [oracle.Decorrelated(0.1)],
        how=how,
        stacks=False,
    )
    add(
        f"distillation{label}",
        lambda: [c.TrajectoryDistillation()],
        lambda: [oracle.Trajectory(0.95, 1.0, 3.0)],
        how=how,
        stacks=False,
    )
    add(
        f"FedGMT{label}",
        lambda: [c.TrajectoryDistillation(), c.DynamicRegularization(0.1, pull=False)],
        lambda: [oracle.Trajectory(0.95, 1.0, 3.0), oracle.Duals(0.1, pull=False)],
        how=how,
        stacks=False,
    )
add(
    "FedDecorr, another tap",
    lambda: [c.DecorrelatedFeatures(0.5, "net.0")],
    lambda: [oracle.Decorrelated(0.5, hidden=True)],
    stacks=False,
)
add(
    "distillation, all of it",
    lambda: [c.TrajectoryDistillation(0.3, Function(grows), 1.5), c.ProximalTerm(0.1)],
    lambda: [oracle.Trajectory(0.3, grows, 1.5), oracle.Proximal(0.1)],
    stacks=False,
)
add(
    "distillation, from w",
    lambda: [c.TrajectoryDistillation(0.0, 2.0, 1.0)],
    lambda: [oracle.Trajectory(0.0, 2.0, 1.0)],
    stacks=False,
)
add(
    "FedDyn, without pull",
    lambda: [c.DynamicRegularization(0.3, pull=False)],
    lambda: [oracle.Duals(0.3, pull=False)],
    how={"weighting": "samples"},
)

# ------------------------------------------------------------------ FedDisco

for metric in ("kl", "l1", "l2", "cosine"):
    for weighting in ("uniform", "samples"):
        add(
            f"FedDisco, {metric}, {weighting}",
            lambda metric=metric: [c.DiscrepancyWeights(metric=metric)],
            lambda metric=metric: [oracle.Discrepancy(0.5, 0.1, metric)],
            how={"weighting": weighting},
        )
    add(
        f"FedDisco, {metric}, target, SAM, RI, SCAFFOLD",
        lambda metric=metric: [
            c.DiscrepancyWeights(0.3, 0.02, metric, [0.5, 0.3, 0.2]),
            c.ControlVariates(),
        ],
        lambda metric=metric: [
            oracle.Discrepancy(0.3, 0.02, metric, [0.5, 0.3, 0.2]),
            oracle.Variates(),
        ],
        how={**SAM, **RI, "weighting": "samples", "server_rate": 0.7, "server_momentum": 0.5},
    )
AWAY = [0.9, 0.05, 0.05]  # from every client
for label, a in (("nobody counts", 1e6), ("some do not", 0.5), ("neutral", 0.0)):
    add(
        f"FedDisco, {label}",
        lambda a=a: [c.DiscrepancyWeights(a, 0.0, target=AWAY)],
        lambda a=a: [oracle.Discrepancy(a, 0.0, "kl", AWAY)],
        how={"weighting": "samples"},
    )

# ------------------------------------------------------------------ SOAP

EXACT: dict[str, Any] = {"epsilon": 1e-4, "frequency": 2}
SMALL = {"lr": 0.02}
SOAP: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    ", every step": ({"frequency": 1}, {"frequency": 1}),
    ", seldom": ({"frequency": 10}, {"frequency": 10}),
    ", other numbers": (
        {"betas": (0.8, 0.9), "shampoo_beta": 0.7, "frequency": 3},
        {"betas": (0.8, 0.9), "shampoo": 0.7, "frequency": 3},
    ),
    ", narrow": ({"max_dim": 3}, {"max_dim": 3}),
    ", without one": ({"exclude": "net.0.*"}, {"excluded": (0, 1)}),
}
for label, (ours, theirs) in SOAP.items():
    add(
        f"Local SOAP{label}",
        lambda ours=ours: [c.SoapDirection(**{**EXACT, **ours})],
        lambda theirs=theirs: [oracle.Soap(PLAIN.shapes, **theirs)],
        how=SMALL,
    )
    add(
        f"FedPAC SOAP{label}",
        lambda ours=ours: [
            c.SoapDirection(**{**EXACT, **ours}, start="averaged"),
            c.GlobalDirection(0.5, "mix"),
        ],
        lambda theirs=theirs: [
            oracle.Soap(PLAIN.shapes, averaged=True, **theirs),
            oracle.MeanDirection(0.5),
        ],
        how={**SMALL, "weighting": "samples"},
    )
add(
    "averaged SOAP without a global direction",
    lambda: [c.SoapDirection(**EXACT, start="averaged")],
    lambda: [oracle.Soap(PLAIN.shapes, averaged=True)],
    how=SMALL,
)
add(
    "FedPAC SOAP with SAM, RI, FedDyn",
    lambda: [
        c.SoapDirection(**EXACT, start="averaged"),
        c.GlobalDirection(0.5, "mix"),
        c.DynamicRegularization(0.1),
    ],
    lambda: [
        oracle.Soap(PLAIN.shapes, averaged=True),
        oracle.MeanDirection(0.5),
        oracle.Duals(0.1),
    ],
    how={**SMALL, **SAM, **RI},
)

for label, epochs in (("some of one step", 1), ("many steps", 5)):
    add(
        f"FedPAC SOAP, {label}",
        lambda: [c.SoapDirection(epsilon=1e-4, start="averaged"), c.GlobalDirection(0.5, "mix")],
        lambda: [oracle.Soap(PLAIN.shapes, frequency=10, averaged=True), oracle.MeanDirection(0.5)],
        how=SMALL,
        options={"local_epochs": epochs},
    )
    add(
        f"A-FedPD, {label}",
        lambda: [c.AlignedDuals()],
        lambda: [oracle.Aligned(0.1)],
        options={"local_epochs": epochs},
    )

UNSTACKED = [name for name, case in CASES.items() if not case.stacks]
ALONE = (
    "A-FedPD",
    "FedADMM, received",
    "FedADMM, own",
    "memory, saga, update",
    "memory, sag, rate",
    "FedDecorr",
    "FedGMT",
    "FedDisco, kl, samples",
    "FedDisco, cosine, uniform",
    "Local SOAP",
    "FedPAC SOAP",
)
MATRIX = [("sequential", name) for name in CASES]
MATRIX += [(engine, name) for engine in ENGINES if engine != "sequential" for name in ALONE]
MATRIX = [pair for pair in MATRIX if pair[0] != "stacked" or pair[1] not in UNSTACKED]


@pytest.mark.parametrize(("engine", "name"), MATRIX, ids=[f"{e}-{name}" for e, name in MATRIX])
def test_a_method_agrees_with_numpy(engine: str, name: str) -> None:
    agree(*both(CASES[name], **ENGINES[engine]))


class Finished(FederatedCallback):
    role = "measurement"

    def __init__(self) -> None:
        super().__init__()
        self.rounds: dict[int, list[int]] = {}

    def on_round_end(self, server: Any) -> None:
        self.rounds[server.round] = [int(i) for i in server.ids]


def without_dropouts(ours: Run, finished: Finished) -> tuple[Schedule, list[list[int]]]:
    """What the oracle is told, and who was given w."""
    table = [
        {i: mine for i, mine in batches.items() if i in finished.rounds.get(t, [])}
        for t, batches in enumerate(ours.schedule.rounds)
    ]
    assert sum(map(len, table)) < sum(map(len, ours.schedule.rounds)), "somebody dropped out"
    chosen = [list(batches) for batches in ours.schedule.rounds]
    return replace(ours.schedule, rounds=table), chosen


@pytest.mark.parametrize("name", ALONE)
def test_clients_that_drop_out_change_nothing(name: str) -> None:
    case, finished = CASES[name], Finished()
    beside = [finished, SystemHeterogeneity(dropout=0.5)]
    ours, _ = both(replace(case, ours=lambda: [*case.ours(), *beside]), participation=5, rounds=6)
    schedule, chosen = without_dropouts(ours, finished)
    methods = case.theirs()
    expected = oracle.run(PLAIN, methods, case.how, 6, ours.start, schedule, chosen)
    agree(replace(ours, schedule=schedule), expected)


# ------------------------------------------------------------------ SOAP's edges


class Steep(Learner):
    """Its gradients are finite, and their squares are not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return 1e200 * super().training_step(batch, batch_idx)


def test_soap_of_gradients_whose_squares_overflow_has_diverged() -> None:
    with quiet(), pytest.raises(Diverged, match="not finite"):
        tiny([c.SoapDirection()], learner=Steep())


def test_soap_has_a_basis_of_gradients_whose_rows_differ_by_orders_of_magnitude() -> None:
    """As those of units that are nearly dead; in float32 LAPACK gives NaN for some of these."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 64, 784, generator=generator)
    rows *= torch.randn(200, 64, 1, generator=generator).exp() ** 3 * 1e-12
    rows[::2, 20:] = 0.0
    basis = eigenbasis(rows @ rows.mT).double()
    assert (basis.mT @ basis - torch.eye(64)).abs().max() < 1e-5


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class InTraining(federation.Network):
    def __init__(self) -> None:
        super().__init__()
        self.net.insert(2, Doubling())


@pytest.mark.parametrize("strength", [0.0, 2.0])
def test_the_trajectory_is_seen_in_evaluation_mode(strength: float) -> None:
    x, y, clients = federation.samples()
    ours = fit(
        InTraining(),
        InMemoryDataModule((x, y), clients=clients, batch_size=4),
        [c.TrajectoryDistillation(0.5, strength, 1.5)],
        3,
        participation=3,
        local_epochs=1.5,
        client_optimizer=lambda p: torch.optim.SGD(p, 0.3, weight_decay=0.01),
    )
    method = oracle.Trajectory(0.5, strength, 1.5)
    how = Setting(lr_decay=1.0, clip_norm=None)
    theirs = oracle.run(oracle.Doubled(3, 4, 3), [method], how, 3, ours.start, ours.schedule)
    agree(ours, theirs, counted=False)


# ------------------------------------------------------------------ a tensor of three dimensions


class Cube(Quadratics):
    """Quadratic losses of a parameter of shape (2, 3, 4), and of a vector of five."""

    def __init__(self, problem: Quadratic, start: Vector) -> None:
        super().__init__(problem, start)
        del self.w
        self.cube = nn.Parameter(torch.from_numpy(start[:24].reshape(2, 3, 4).copy()))
        self.vector = nn.Parameter(torch.from_numpy(start[24:].copy()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        i = int(batch[0][0, 0])
        away = torch.cat([self.cube.flatten(), self.vector]) - self.centre[i]
        return away @ self.curvature[i] @ away / 2


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("max_dim", [10000, 3])
@pytest.mark.parametrize("start", ["zeros", "averaged"])
def test_soap_of_a_tensor_of_three_dimensions(start: Any, max_dim: int, flat: bool) -> None:
    """Also where its gradient is 0."""
    rng = np.random.default_rng(2)
    roots = rng.normal(size=(5, 29, 29)) / math.sqrt(29)
    roots[:, :24] *= not flat
    problem = Quadratic(roots @ roots.transpose(0, 2, 1), rng.normal(size=(5, 29)))
    begun = rng.normal(size=29)
    number = torch.arange(5, dtype=torch.float64).reshape(5, 1)
    ours = fit(
        Cube(problem, begun),
        InMemoryDataModule(
            (number, torch.zeros(5)), clients=[[i] for i in range(5)], batch_size=None
        ),
        [c.CommunicationLogger(), c.SoapDirection(**EXACT, start=start, max_dim=max_dim)],
        4,
        participation=2,
        local_steps=6,
        lr_decay=0.9,
        client_optimizer=lambda p: torch.optim.SGD(p, 0.03, weight_decay=0.1),
    )
    how = Setting(lr=0.03, weight_decay=0.1, clip_norm=None)
    method = oracle.Soap([(2, 3, 4), (5,)], averaged=start == "averaged", max_dim=max_dim)
    agree(ours, oracle.run(oracle.Bowls(problem), [method], how, 4, begun, ours.schedule))


# ------------------------------------------------------------------ FedSVD

ADAPTERS = [(3, 5, 3, 0.7), (5, 4, 2, 1.5)]


def trained(
    learner: pl.LightningModule, d_in: int, made: list[Any], how: Setting, **more: Any
) -> Run:
    kind: Any = torch.optim.AdamW if how.adamw else torch.optim.SGD
    momentum = {} if how.adamw else {"momentum": how.momentum}
    case = Case(lambda: made, list, how)
    return fit(
        learner,
        federation_of_adapters(d_in),
        callbacks(case),
        more.pop("rounds", 6),
        client_optimizer=lambda p: kind(p, lr=how.lr, weight_decay=how.weight_decay, **momentum),
        local_epochs=1.5,
        **{"participation": 3, **settings(how), **more},
    )


SVD_SETTINGS: dict[str, tuple[Setting, dict[str, Any]]] = {
    "uniform": (Setting(), {}),
    "by samples": (Setting(weighting="samples"), {"engine": "concurrent", "workers": 2}),
    "with SAM": (Setting(radius=0.1, momentum=0.5, weighting="samples"), {}),
    "AdamW": (Setting(lr=0.05, weight_decay=0.1, adamw=True, clip_norm=0.3), {}),
    "one client": (Setting(), {"participation": 1}),
    "everybody": (Setting(clip_norm=None), {"participation": 7, "rounds": 4}),
    "poisson": (Setting(), {"sampling": "poisson", "participation": 0.2, "rounds": 12}),
    "stacked": (Setting(weighting="samples"), {"engine": "stacked"}),
}


def svd(period: int | None, setting: str, beside: bool = False) -> tuple[Run, list[Outcome], Any]:
    how, options = SVD_SETTINGS[setting]
    learner = Adapted()
    frozen = [each.weight.detach().numpy().copy() for each in (learner.first, learner.head)]
    made = [c.OrthogonalFactor(period), *([c.ProximalTerm(0.1)] if beside else [])]
    ours = trained(learner, 3, made, how, **options)
    net = oracle.Adapters(ADAPTERS, frozen)
    methods: list[Method] = [oracle.Orthogonal(net.layers, period)]
    methods += [oracle.Proximal(0.1)] if beside else []
    rounds = len(ours.record.w)
    return ours, oracle.run(net, methods, how, rounds, ours.start, ours.schedule), net


SVD_MATRIX: list[tuple[int | None, str]] = [(p, name) for p in (1, 2) for name in SVD_SETTINGS]
SVD_MATRIX += [(3, "uniform"), (None, "by samples"), (None, "AdamW"), (None, "poisson")]


@pytest.mark.parametrize(("period", "setting"), SVD_MATRIX)
def test_fedsvd(period: int | None, setting: str) -> None:
    ours, theirs, net = svd(period, setting)
    agree(ours, theirs)
    for t, w in enumerate(ours.record.w):
        for layer in net.layers:
            a, b = layer.factors(w)
            if period is None:
                assert np.array_equal(a, layer.factors(ours.start)[0]), "A rests, to the bit"
            elif (t + 1) % period == 0 and ours.schedule.rounds[t]:
                near(a @ a.T, np.eye(layer.rank), "rows of A are orthonormal")
                assert np.abs(np.triu(b.T @ b, 1)).max() < 1e-9, "columns of B are orthogonal"


@pytest.mark.parametrize("period", [1, 2])
def test_fedsvd_where_clients_drop_out(period: int) -> None:
    how, finished, learner = Setting(weighting="samples"), Finished(), Adapted()
    net = oracle.Adapters(
        ADAPTERS, [each.weight.detach().numpy().copy() for each in (learner.first, learner.head)]
    )
    made = [c.OrthogonalFactor(period), finished, SystemHeterogeneity(dropout=0.4)]
    ours = trained(learner, 3, made, how, participation=4)
    schedule, chosen = without_dropouts(ours, finished)
    assert all(schedule.rounds), "somebody finishes each round"
    method = oracle.Orthogonal(net.layers, period)
    expected = oracle.run(net, [method], how, len(ours.record.w), ours.start, schedule, chosen)
    agree(replace(ours, schedule=schedule), expected)


# ------------------------------------------------------------------ RAVAN


class TwoOfHeads(pl.LightningModule):
    """Six inputs, five hidden, four classes; two and three heads; the first bias may be trained."""

    def __init__(self, bias: bool, first: tuple[int, int] = (2, 2)) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first = MultiHead(nn.Linear(6, 5), *first)
            self.head = MultiHead(nn.Linear(5, 4), 1, 3)
        self.double()
        if bias:
            self.first.linear.bias.requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.head(torch.tanh(self.first(x))), y)


def heads_of(run: Run) -> oracle.ManyHeads:
    """The frozen matrices of the run's learner, and where its trained ones lie."""
    layout, learner = run.module.layout, run.module.learner
    layers = []
    for name in ("first", "head"):
        layer = getattr(learner, name)
        bias = layer.linear.bias
        given = (layer.linear.weight, bias, layer.heads_A, layer.heads_B)
        weight, bias_given, a, b = (each.detach().numpy().copy() for each in given)
        cores, scales = (layout[f"{name}.heads_{letter}"][0] for letter in "Hs")
        own = layout[f"{name}.linear.bias"][0] if bias.requires_grad else None
        layers.append(oracle.Heads(weight, bias_given, a, b, cores, scales, where_bias=own))
    return oracle.ManyHeads(layers, len(run.start))


HEADS: dict[str, tuple[Setting, dict[str, Any]]] = {
    "uniform": (Setting(), {}),
    "by samples": (
        Setting(weighting="samples", momentum=0.5),
        {"engine": "concurrent", "workers": 2},
    ),
    "AdamW": (Setting(lr=0.05, weight_decay=0.1, adamw=True, clip_norm=0.3), {}),
    "with SAM, RI": (Setting(radius=0.05, beta=0.1, weighting="samples"), {}),
    "server momentum": (Setting(server_rate=0.5, server_momentum=0.9), {}),
    "one client": (Setting(), {"participation": 1}),
    "everybody": (Setting(), {"participation": 7, "rounds": 4}),
    "poisson": (Setting(), {"sampling": "poisson", "participation": 0.2, "rounds": 9}),
    "stacked": (Setting(weighting="samples"), {"engine": "stacked"}),
}
HEADS_MATRIX = [(name, False) for name in HEADS]
HEADS_MATRIX += [(name, True) for name in ("by samples", "AdamW", "with SAM, RI", "stacked")]


@pytest.mark.parametrize(("setting", "bias"), HEADS_MATRIX)
def test_ravan(setting: str, bias: bool) -> None:
    how, options = HEADS[setting]
    run = trained(TwoOfHeads(bias), 6, [c.ScaledHeads()], how, **options)
    net = heads_of(run)
    expected = oracle.run(
        net, [oracle.Scaled(net.layers)], how, len(run.record.w), run.start, run.schedule
    )
    agree(run, expected)
    assert np.abs(run.record.w[-1] - run.start).max() > 0.01
    for layer in net.layers:
        for w in run.record.w:
            assert (w[layer.scales] == 1).all(), "scales stay 1"


def test_a_layer_of_heads_as_it_begins() -> None:
    run = trained(TwoOfHeads(False), 6, [c.ScaledHeads()], Setting(), rounds=1)
    net = heads_of(run)
    assert len(run.start) == 2 * 4 + 2 + 3 * 1 + 3, "cores and scales are trained"
    for layer in net.layers:
        assert not run.start[layer.cores].any() and (run.start[layer.scales] == 1).all()
        rows = layer.a.reshape(-1, layer.a.shape[2])
        columns = layer.b.transpose(1, 0, 2).reshape(layer.b.shape[1], -1)
        # drawn in float32
        assert np.abs(rows @ rows.T - np.eye(len(rows))).max() < 1e-5
        assert np.abs(columns.T @ columns - np.eye(columns.shape[1])).max() < 1e-5
