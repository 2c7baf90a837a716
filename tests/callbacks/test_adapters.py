"""Methods for adapters agree with NumPy's calculation to 1e-9: models, bases, ranks and what was
sent.

Three of seven clients of unequal size and step count, two adapters of ranks 3 and 2, SGD and AdamW
with weight decay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fl_lightning import FederatedCallback, InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.sampling import generator
from fl_lightning.systems import Buffered, Devices, LogNormal
from tests.helpers.federation import Run, fit, network
from tests.helpers.low_rank import Adapted
from tests.oracles import adapters as oracle
from tests.oracles.adapters import Network, Rule, Training

SIZES = [1, 5, 9, 4, 12, 7, 10]
NET = Network([(3, 5, 3, 0.7), (5, 4, 2, 1.5)])
ROUNDS = 5
TRAININGS = {
    "sgd": Training(),
    "adamw": Training(lr=0.05, weight_decay=0.1, adamw=True, weighting="samples"),
}


def federation() -> InMemoryDataModule:
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.normal(size=(n, 3)) + rng.normal(size=3) for n in SIZES])
    y = np.concatenate([rng.integers(0, 4, n) for n in SIZES])
    ends = np.cumsum(SIZES)
    clients = [np.arange(end - n, end) for end, n in zip(ends, SIZES, strict=True)]
    return InMemoryDataModule(
        (torch.from_numpy(x), torch.from_numpy(y)), clients=clients, batch_size=4
    )


def optimizer(how: Training) -> Callable[[Any], Any]:
    kind = torch.optim.AdamW if how.adamw else torch.optim.SGD
    return lambda p: kind(p, lr=how.lr, weight_decay=how.weight_decay)


def ours(
    callbacks: list[Any], how: Training, rounds: int = ROUNDS, learner: Any = None, **options: Any
) -> Run:
    settings = {"participation": 3, "local_epochs": 1.5, "weighting": how.weighting, **options}
    return fit(
        learner or Adapted(),
        federation(),
        [*callbacks, c.CommunicationLogger()],
        rounds,
        client_optimizer=optimizer(how),
        **settings,
    )


def base_of(learner: Any) -> list[Any]:
    weights = (learner.first.weight, learner.head.weight)
    return [weight.detach().numpy().copy() for weight in weights]


def agree(run: Run, rule: Rule, how: Training) -> list[oracle.Outcome]:
    rounds = len(run.record.w)
    start = base_of(Adapted())
    expected = oracle.run(rule, run.start, start, run.schedule, rounds, how)
    down = up = 0
    for t, theirs in enumerate(expected):
        # What is logged of communication is a sum over rounds.
        down, up = down + theirs.down, up + theirs.up
        assert np.abs(run.record.w[t] - theirs.w).max() < 1e-9, f"w in round {t}"
        sent = run.record.metrics[t]
        assert sent["communication/down_parameters"] == down, f"down in round {t}"
        assert sent["communication/up_parameters"] == up, f"up in round {t}"
        assert sent["communication/down_bytes"] == 8 * down
        assert sent["communication/up_bytes"] == 8 * up
    for weight, theirs in zip(base_of(run.module.learner), expected[-1].base, strict=True):
        assert np.abs(weight - theirs).max() < 1e-9
    return expected


@pytest.fixture(params=TRAININGS)
def how(request: Any) -> Training:
    return TRAININGS[request.param]


# --------------------------------------------------------------------------- masks of a user's own


def drawn(t: int, i: int) -> Any:
    """Half of the coordinates, others for each client and round; the last one is nobody's."""
    mask = np.random.default_rng([7, t, i]).random(NET.size) < 0.5
    mask[0] = True
    mask[-1] = False
    return mask


class Halves(FederatedCallback):
    def trained(self, clients: Any) -> Tensor:
        rows = [drawn(clients.round, i) for i in clients.client_ids]
        return torch.from_numpy(np.stack(rows))


@pytest.mark.parametrize("over", ["holders", "all", "zeros"])
@pytest.mark.parametrize("untrained", ["given", "zero"])
def test_masks(how: Training, untrained: Any, over: Any) -> None:
    method = Halves()
    method.untrained, method.averaged_over = untrained, over
    run = ours([method], how)
    agree(run, oracle.Given(NET, drawn, untrained, over), how)


def test_stacked_clients_agree_to_rounding(how: Training) -> None:
    one, other = (ours([Halves()], how, engine=name) for name in ("sequential", "stacked"))
    for a, b in zip(one.record.w, other.record.w, strict=True):
        assert np.abs(a - b).max() < 1e-9


# --------------------------------------------------------------------------- factors in turn


@pytest.mark.parametrize("factors", [["B"], ["B", "A"], ["A", "AB", "B"]])
def test_factors_in_turn(how: Training, factors: list[str]) -> None:
    run = ours([c.FactorSchedule(factors)], how)
    agree(run, oracle.Turns(NET, factors), how)


def test_both_factors_are_fedavg(how: Training) -> None:
    one, other = ours([c.FactorSchedule(["AB"])], how), ours([], how)
    assert np.array_equal(one.record.w, other.record.w)
    agree(other, Rule(NET), how)


def test_ffa_is_a_learner_that_freezes_a_itself(how: Training) -> None:
    """To rounding: kernels treat the end of a vector otherwise, and the vectors' lengths differ."""
    frozen = Adapted()
    frozen.first.lora_A.requires_grad_(False)
    frozen.head.lora_A.requires_grad_(False)
    one, other = ours([c.FactorSchedule(["B"])], how), ours([], how, learner=frozen)
    trained = one.module.layout
    for name, (where, _) in other.module.layout.items():
        away = one.record.w[-1][trained[name][0]] - other.record.w[-1][where]
        assert np.abs(away).max() < 1e-12, name
    for adapter in trained.adapters:
        where = trained[adapter.a][0]
        assert np.array_equal(one.record.w[-1][where], one.start[where])


# --------------------------------------------------------------------------- beside others


@pytest.mark.parametrize(
    "beside",
    [
        [c.ProximalTerm(0.1)],
        [c.SharpnessAwareMinimization(0.05)],
        [c.ControlVariates()],
        [c.RobustAggregation("median")],
        [c.MixedAscent(0.2, 0.5, 0.1)],
    ],
    ids=lambda beside: type(beside[0]).__name__,
)
def test_what_rests_keeps_its_bits_whatever_stands_beside(beside: list[Any]) -> None:
    options = {"clip_norm": 0.2, "server_optimizer": lambda p: torch.optim.SGD(p, 0.7, 0.9)}
    run = ours([c.FactorSchedule(["B"]), *beside], TRAININGS["adamw"], **options)
    layout = run.module.layout
    for adapter in layout.adapters:
        where = layout[adapter.a][0]
        assert np.array_equal(run.record.w[-1][where], run.start[where])
    assert not np.array_equal(run.record.w[-1], run.start)


def test_the_norm_that_is_clipped_is_that_of_trained_coordinates() -> None:
    """With A frozen by the learner itself, the same clipping leaves the same model."""
    frozen = Adapted()
    frozen.first.lora_A.requires_grad_(False)
    frozen.head.lora_A.requires_grad_(False)
    sam = c.SharpnessAwareMinimization
    one = ours([c.FactorSchedule(["B"]), sam(0.3)], TRAININGS["sgd"], clip_norm=0.2)
    other = ours([sam(0.3)], TRAININGS["sgd"], clip_norm=0.2, learner=frozen)
    layout = one.module.layout
    for name, (where, _) in other.module.layout.items():
        away = one.record.w[-1][layout[name][0]] - other.record.w[-1][where]
        assert np.abs(away).max() < 1e-12


def test_noise_of_privacy_is_on_trained_coordinates_alone() -> None:
    private = c.DifferentialPrivacy(clip=0.5, noise_multiplier=1.0, noise_seed=3)
    run = ours(
        [c.FactorSchedule(["B", "A"]), private],
        TRAININGS["sgd"],
        sampling="poisson",
        participation=0.4,
        rounds=1,
    )
    layout = run.module.layout
    moved = run.record.w[-1] != run.start
    for adapter in layout.adapters:
        assert not moved[layout[adapter.a][0]].any() and moved[layout[adapter.b][0]].all()


def test_a_recorded_step_has_the_same_bits() -> None:
    how = TRAININGS["sgd"]
    options = {"local_epochs": 8, "rounds": 2}
    one = ours([c.FactorSchedule(["B", "A"])], how, **options)
    other = ours([c.FactorSchedule(["B", "A"])], how, engine="concurrent", capture=True, **options)
    assert other.module.engine_facts["capture"].startswith("yes")
    assert np.array_equal(one.record.w, other.record.w)


def test_optimizer_state_of_what_rests_stays() -> None:
    """RoLoRA with kept states: A's second round goes on with the moments of its first."""
    how = TRAININGS["adamw"]
    for groups in (1, 2):

        def made(p: Any, groups: int = groups) -> Any:
            p = list(p)
            parts = [p] if groups == 1 else [p[:2], p[2:]]
            return torch.optim.AdamW([{"params": part} for part in parts], lr=0.05)

        run = fit(
            Adapted(),
            federation(),
            [c.FactorSchedule(["B", "A"])],
            2,
            client_optimizer=made,
            keep_optimizer_state=True,
            participation="all",
            weighting=how.weighting,
            local_steps=2,
        )
        layout = run.module.layout
        after = run.record.rows
        for adapter in layout.adapters:
            place = list(layout).index(adapter.b)
            key = "optimizer.0.exp_avg" if groups == 1 else f"optimizer.{place}.exp_avg"
            one, two = (rows[key][3].ravel() for rows in after)
            if groups == 1:
                one, two = (row[layout[adapter.b][0]] for row in (one, two))
            assert np.array_equal(one, two) and one.any()


@pytest.mark.parametrize(
    "compression",
    [
        lambda: c.TopKCompression(0.3),
        lambda: c.RandomK(0.3),
        lambda: c.RandomK(0.3, memory=True),
    ],
)
def test_compression_is_of_trained_coordinates(compression: Any) -> None:
    """With A frozen by the learner itself it sends the same numbers."""
    frozen = Adapted()
    frozen.first.lora_A.requires_grad_(False)
    frozen.head.lora_A.requires_grad_(False)
    how = TRAININGS["sgd"]
    one = ours([c.FactorSchedule(["B"]), compression()], how)
    other = ours([compression()], how, learner=frozen)
    layout = one.module.layout
    for name, (where, _) in other.module.layout.items():
        assert np.array_equal(one.record.w[-1][layout[name][0]], other.record.w[-1][where]), name
    for name in ("communication/up_parameters", "communication/up_bytes"):
        assert one.record.metrics[-1][name] == other.record.metrics[-1][name]


def test_what_compression_did_not_send_of_a_factor_rests_with_it() -> None:
    run = ours(
        [c.FactorSchedule(["B", "A"]), c.TopKCompression(0.3)],
        TRAININGS["sgd"],
        participation="all",
        rounds=2,
    )
    before, after = (rows["TopKCompression.error"] for rows in run.record.rows)
    for adapter in run.module.layout.adapters:
        where = run.module.layout[adapter.b][0]
        assert all(np.array_equal(before[i][where], after[i][where]) for i in before)
    assert any(before[i].any() for i in before)


class NormOfOnes(FederatedCallback):
    """‖(1, …, 1)‖² is the number of coordinates over which a norm goes."""

    def __init__(self) -> None:
        super().__init__()
        self.over: list[tuple[float, int]] = []

    def on_local_step_end(self, clients: Any) -> None:
        squared = clients.norm(torch.ones_like(clients.x)).square()
        self.over.append((round(float(squared)), int(clients.trained.sum())))


def test_a_norm_goes_over_the_coordinates_that_a_client_trains() -> None:
    seen = NormOfOnes()
    ours([Halves(), seen], TRAININGS["sgd"], rounds=1, engine="sequential")
    assert seen.over and all(number == trained < 51 for number, trained in seen.over)


# --------------------------------------------------------------------------- refused


class Wrong(FederatedCallback):
    def __init__(self, mask: Any, alike: bool = False) -> None:
        super().__init__()
        self.mask, self.alike = mask, alike

    def trained(self, clients: Any) -> Any:
        return self.mask(clients)


class Restarting(FederatedCallback):
    restarts = True


@pytest.mark.parametrize(
    ("mask", "alike", "says"),
    [
        (lambda k: torch.ones(3, dtype=torch.bool), False, r"shape \(1, 51\), it|\(n, D\)"),
        (lambda k: torch.ones_like(k.x), False, r"type torch.float64"),
        (lambda k: None, False, r"round 0, client \d, it returned None"),
        (
            lambda k: torch.zeros_like(k.x, dtype=torch.bool),
            False,
            r"gives client \d nothing to train in round 0",
        ),
        (
            lambda k: torch.arange(51)[None] % (2 + k.client_ids[0]) == 0,
            True,
            r"alike = True",
        ),
    ],
)
def test_masks_that_are_none(mask: Any, alike: bool, says: str) -> None:
    with pytest.raises(UserError, match=rf"Wrong.*{says}"):
        ours([Wrong(mask, alike)], TRAININGS["sgd"], rounds=1)


@pytest.mark.parametrize(
    ("callbacks", "options", "says"),
    [
        ([Halves(), c.PartialAveraging(period=2)], {}, "Halves and PartialAveraging"),
        ([Halves(), c.RobustAggregation("median")], {}, "Halves and RobustAggregation"),
        ([Halves(), c.TopKCompression()], {}, "Halves and TopKCompression"),
        ([Halves(), c.ControlVariates()], {}, "Halves and ControlVariates"),
        (
            [Halves(), c.DifferentialPrivacy(1.0, noise_multiplier=1.0, noise_seed=1)],
            {"sampling": "poisson", "participation": 0.5},
            "Halves and DifferentialPrivacy",
        ),
        ([c.FactorSchedule(["B"]), c.SignUpdate()], {}, "and SignUpdate"),
        ([Restarting(), c.ClientMomentum()], {}, "Restarting and ClientMomentum"),
        ([Restarting()], {"keep_optimizer_state": True}, "Restarting.*keep_optimizer_state"),
        (
            [Restarting()],
            {"server_optimizer": lambda p: torch.optim.SGD(p, 0.5)},
            "Restarting.*server optimizer",
        ),
    ],
)
def test_what_is_not_defined_together_is_refused(
    callbacks: list[Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        ours(callbacks, TRAININGS["sgd"], rounds=1, **options)


@pytest.mark.parametrize("factors", [[], ["C"], "BA", ["BA"]])
def test_factors_that_are_none(factors: Any) -> None:
    with pytest.raises(UserError, match="FactorSchedule: factors="):
        c.FactorSchedule(factors)


def test_a_learner_without_adapters_is_refused_before_round_0() -> None:
    with pytest.raises(UserError, match=r"FactorSchedule is for adapters.*get_peft_model"):
        network([c.FactorSchedule(["B"])], rounds=1)


def test_unknown_declarations_are_refused() -> None:
    method = Halves()
    method.averaged_over = "holder"  # type: ignore[assignment]
    with pytest.raises(
        UserError, match=r"Halves.averaged_over is 'holder'; accepted are 'holders'"
    ):
        ours([method], TRAININGS["sgd"], rounds=1)


@pytest.mark.parametrize("factors", [["B"], ["B", "A"]])
def test_asynchronous_with_one_factor_alone(factors: list[str]) -> None:
    asynchronous = Buffered(devices=Devices(compute=LogNormal(1.0, 0.5)), size=2)
    arguments = {"asynchronous": asynchronous, "rounds": 3}
    if factors == ["B"]:
        run = ours([c.FactorSchedule(factors)], TRAININGS["sgd"], **arguments)
        where = run.module.layout["first.lora_A"][0]
        assert np.array_equal(run.record.w[-1][where], run.start[where])
        return
    with pytest.raises(UserError, match="FactorSchedule does not say that it tolerates"):
        ours([c.FactorSchedule(factors)], TRAININGS["sgd"], **arguments)


# --------------------------------------------------------------------------- unequal ranks

RANKS = [1, 2, 3, 1, 3, 2, 2]


@pytest.mark.parametrize("ranks", [None, RANKS], ids=["equal", "unequal"])
def test_flexlora(how: Training, ranks: Any) -> None:
    run = ours([c.TruncatedProduct(ranks)], how)
    given = dict(enumerate(ranks or [3] * 7))
    agree(run, oracle.Flex(NET, given), how)


@pytest.mark.parametrize("over", ["zeros", "holders", "all"])
@pytest.mark.parametrize(
    ("norm_weighted", "gamma", "penalty"), [(True, 0.5, 0.05), (False, 0.7, 0.3), (True, 1.0, 0.1)]
)
def test_hetlora(
    how: Training, norm_weighted: bool, gamma: float, penalty: float, over: Any
) -> None:
    method = c.PaddedRanks(RANKS, norm_weighted, gamma, penalty, over)
    run = ours([method], how)
    rule = oracle.Het(NET, dict(enumerate(RANKS)), norm_weighted, gamma, penalty, over)
    expected = agree(run, rule, how)
    for t, rows in enumerate(run.record.rows):
        for i, rank in rows["PaddedRanks.rank"].items():
            assert rank == expected[t].kept["ranks"][i]
    if gamma < 1:
        assert rule.rho != dict(enumerate(RANKS)), "somebody prunes"


def test_one_clients_product_stays(how: Training) -> None:
    one, other = (
        ours(method, how, participation=1, rounds=1) for method in ([c.TruncatedProduct()], [])
    )
    for adapter in one.module.layout.adapters:
        a, b = adapter.matrices(torch.from_numpy(one.record.w[0]))
        theirs_a, theirs_b = adapter.matrices(torch.from_numpy(other.record.w[0]))
        assert (b @ a - theirs_b @ theirs_a).abs().max() < 1e-12


def test_shares_of_ranks_are_drawn_from_the_seed() -> None:
    how = TRAININGS["sgd"]
    run = ours([c.TruncatedProduct({1: 0.5, 3: 0.5})], how)
    order = generator(1, "ranks").permutation(7)
    ranks = {int(i): 1 if place < 4 else 3 for place, i in enumerate(order)}
    agree(run, oracle.Flex(NET, ranks), how)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([1, 2], "2 numbers, and the data have 7 clients"),
        ([0] * 7, "ranks has 0.*accepted are 1 to 3"),
        ({4: 1.0}, "ranks has 4.*accepted are 1 to 3"),
        ({1: 0.5}, "the shares sum to 0.5"),
        ("many", "ranks='many' is neither a list"),
        ([1.5] * 7, "is neither a list"),
    ],
)
@pytest.mark.parametrize("method", [c.TruncatedProduct, c.PaddedRanks])
def test_ranks_that_are_none(method: Any, ranks: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ours([method(ranks)], TRAININGS["sgd"], rounds=1)


@pytest.mark.parametrize(
    ("callbacks", "options", "says"),
    [
        ([c.PaddedRanks(), c.TruncatedProduct()], {}, "PaddedRanks and TruncatedProduct both"),
        ([c.TruncatedProduct()], {"keep_optimizer_state": True}, "keep_optimizer_state"),
        (
            [c.PaddedRanks()],
            {"server_optimizer": lambda p: torch.optim.SGD(p, 1.0, 0.9)},
            "PaddedRanks sets the server's model.*server optimizer",
        ),
    ],
)
def test_what_cannot_stand_beside_unequal_ranks(
    callbacks: list[Any], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        ours(callbacks, TRAININGS["sgd"], rounds=1, **options)


@pytest.mark.parametrize("method", [c.TruncatedProduct, c.PaddedRanks])
def test_a_convolution_is_refused_before_round_0(method: Any) -> None:
    learner = Adapted()
    learner.first.lora_A = torch.nn.Parameter(torch.zeros(3, 3, 1, 1, dtype=torch.float64))
    with pytest.raises(UserError, match=rf"{method.__name__} computes with B·A.*first.lora_A"):
        ours([method()], TRAININGS["sgd"], rounds=1, learner=learner)
