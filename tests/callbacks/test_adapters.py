"""Methods for adapters agree with NumPy's calculation to 1e-9: models, bases, ranks and what was
sent. Three of seven clients of unequal size and step count, two adapters of ranks 3 and 2, SGD and
AdamW with weight decay; one client, and all of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import Base, FederatedCallback, InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.lab.contracts.federation import fit as tiny
from fl_lightning.lab.contracts.federation import quiet
from fl_lightning.sampling import generator
from fl_lightning.systems import Buffered, Devices, LogNormal, SystemHeterogeneity, VirtualClock
from tests.helpers.federation import Run, fit
from tests.helpers.low_rank import Adapted, LowRank
from tests.oracles import adapters as oracle
from tests.oracles.adapters import Network, Rule, Training

SIZES = [1, 5, 9, 4, 12, 7, 10]
NET = Network([(3, 5, 3, 0.7), (5, 4, 2, 1.5)])
ROUNDS = 5
TRAININGS = {
    "sgd": Training(),
    "adamw": Training(lr=0.05, weight_decay=0.1, adamw=True, weighting="samples"),
}
A_NUMBERS = sum(layer.rank * layer.d_in for layer in NET.layers)
RANKS = [1, 2, 3, 1, 3, 2, 2]


def federation(d_in: int = 3) -> InMemoryDataModule:
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.normal(size=(n, d_in)) + rng.normal(size=d_in) for n in SIZES])
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
        for i, rank in run.record.rows[t].get("PaddedRanks.rank", {}).items():
            assert rank == theirs.kept["ranks"][i]
    for weight, theirs in zip(base_of(run.module.learner), expected[-1].base, strict=True):
        assert np.abs(weight - theirs).max() < 1e-9
    return expected


def drawn(t: int, i: int | None = None) -> Any:
    """FLoRA's draws: of a round, or of each client in it."""
    keyed = generator(1, "flora", t) if i is None else generator(1, "flora client", t, i)
    return keyed.random(A_NUMBERS)


def by_shares() -> dict[int, int]:
    order = generator(1, "ranks").permutation(7)
    return {int(i): 1 if place < 4 else 3 for place, i in enumerate(order)}


def halves(t: int, i: int) -> Any:
    """Half of the coordinates, others for each client and round; the last one is nobody's."""
    mask = np.random.default_rng([7, t, i]).random(NET.size) < 0.5
    mask[0] = True
    mask[-1] = False
    return mask


class Halves(FederatedCallback):
    def trained(self, clients: Any) -> Tensor:
        rows = [halves(clients.round, i) for i in clients.client_ids]
        return torch.from_numpy(np.stack(rows))


def masked(untrained: Any, over: Any) -> list[Any]:
    method = Halves()
    method.untrained, method.averaged_over = untrained, over
    return [method]


ALL, UNEQUAL = dict.fromkeys(range(7), 3), dict(enumerate(RANKS))
CASES: dict[str, tuple[Callable[[], list[Any]], Callable[[], Rule]]] = {
    "FedIT": (lambda: [], lambda: Rule(NET)),
    "FedIT by turns": (lambda: [c.FactorSchedule(["AB"])], lambda: Rule(NET)),
    "FFA-LoRA": (lambda: [c.FactorSchedule(["B"])], lambda: oracle.Turns(NET, ["B"])),
    "RoLoRA": (lambda: [c.FactorSchedule(["B", "A"])], lambda: oracle.Turns(NET, ["B", "A"])),
    "three turns": (
        lambda: [c.FactorSchedule(["A", "AB", "B"])],
        lambda: oracle.Turns(NET, ["A", "AB", "B"]),
    ),
    "FlexLoRA": (lambda: [c.TruncatedProduct()], lambda: oracle.Flex(NET, ALL)),
    "FlexLoRA, ranks": (lambda: [c.TruncatedProduct(RANKS)], lambda: oracle.Flex(NET, UNEQUAL)),
    "FlexLoRA, shares": (
        lambda: [c.TruncatedProduct({1: 0.5, 3: 0.5})],
        lambda: oracle.Flex(NET, by_shares()),
    ),
    "LoRA-FAIR": (lambda: [c.CorrectedFactor(0.01)], lambda: oracle.Fair(NET, 0.01)),
    "LoRA-FAIR, 0": (lambda: [c.CorrectedFactor(0.0)], lambda: oracle.Fair(NET, 0.0)),
    "LoRA-FAIR, 2": (lambda: [c.CorrectedFactor(2.0)], lambda: oracle.Fair(NET, 2.0)),
}
for rank in (None, 0, 1, 2, 5):
    CASES[f"FedEx-LoRA, {rank}"] = (
        lambda rank=rank: [c.ResidualMerge(rank)],
        lambda rank=rank: oracle.Residual(NET, rank),
    )
for draw in ("round", "client"):
    for ranks in (None, RANKS):
        CASES[f"FLoRA, {draw}, {'unequal' if ranks else 'equal'}"] = (
            lambda ranks=ranks, draw=draw: [c.StackedAdapters(ranks, draw)],
            lambda ranks=ranks, draw=draw: oracle.Stacked(
                NET, UNEQUAL if ranks else ALL, drawn, drawn if draw == "client" else None
            ),
        )
for over in ("zeros", "holders", "all"):
    for how in ((True, 0.5, 0.05), (False, 0.7, 0.3), (True, 1.0, 0.1)):
        CASES[f"HetLoRA, {over}, {how}"] = (
            lambda how=how, over=over: [c.PaddedRanks(RANKS, *how, over)],
            lambda how=how, over=over: oracle.Het(NET, UNEQUAL, *how, over),
        )
for untrained in ("given", "zero"):
    for over in ("holders", "all", "zeros"):
        CASES[f"masks of a user's own, {untrained}, {over}"] = (
            lambda untrained=untrained, over=over: masked(untrained, over),
            lambda untrained=untrained, over=over: oracle.Given(NET, halves, untrained, over),
        )
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("sgd", {}),
    "adamw": ("adamw", {}),
    "one client": ("sgd", {"participation": 1, "rounds": 3}),
    "everybody": ("sgd", {"participation": 7, "rounds": 3}),
}


# In these settings the first of each rule.
FEW = ["FedIT", "RoLoRA", "FlexLoRA, ranks", "LoRA-FAIR", "FedEx-LoRA, 1", "FLoRA, client, unequal"]
FEW += ["HetLoRA, holders, (True, 0.5, 0.05)", "masks of a user's own, zero, holders"]
PAIRS = [(name, how) for how in SETTINGS for name in (CASES if how in TRAININGS else FEW)]


@pytest.mark.parametrize(("name", "setting"), PAIRS)
def test_a_method_agrees_with_numpy(name: str, setting: str) -> None:
    make, rule = CASES[name]
    training, options = SETTINGS[setting]
    run, theirs = ours(make(), TRAININGS[training], **options), rule()
    agree(run, theirs, TRAININGS[training])
    if name.startswith("FLoRA"):
        for adapter in run.module.layout.adapters:
            assert not adapter.matrices(run.module.global_vector)[1].any(), "B is 0, to the bit"
    if isinstance(theirs, oracle.Het) and theirs.gamma < 1 and setting in TRAININGS:
        assert theirs.rho != UNEQUAL, "somebody prunes"


@pytest.mark.parametrize("training", TRAININGS)
def test_fedsa_lora(training: str) -> None:
    how = TRAININGS[training]
    run = ours([c.PartialAveraging({"*lora_B*": "never"})], how)
    rule = oracle.OwnFactor(NET)
    start = base_of(Adapted())
    expected = oracle.run(rule, run.start, start, run.schedule, len(run.record.w), how)
    shared = ~rule.kept
    down = up = 0
    for t, theirs in enumerate(expected):
        down, up = down + theirs.down, up + theirs.up
        assert np.abs(run.record.w[t] - theirs.w)[shared].max() < 1e-9, f"A in round {t}"
        sent = run.record.metrics[t]
        assert sent["communication/down_parameters"] == down, f"down in round {t}"
        assert sent["communication/up_parameters"] == up, f"up in round {t}"
    assert len(rule.own) > 3, "more clients than a round has"
    for i, own in rule.own.items():
        model = dict(run.module.export(client=i).named_parameters())
        factors = [model[adapter.b].detach().flatten() for adapter in run.module.layout.adapters]
        assert np.abs(torch.cat(factors).numpy() - own).max() < 1e-9, f"B of client {i}"


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


# --------------------------------------------------------------------------- factors that rest


@pytest.mark.parametrize(
    ("beside", "options", "tolerance"),
    [
        (lambda: [], {}, 1e-12),
        (lambda: [c.SharpnessAwareMinimization(0.3)], {"clip_norm": 0.2}, 1e-12),
        (lambda: [c.TopKCompression(0.3)], {}, 0.0),
        (lambda: [c.RandomK(0.3)], {}, 0.0),
        (lambda: [c.RandomK(0.3, memory=True)], {}, 0.0),
    ],
)
def test_ffa_is_a_learner_that_freezes_a_itself(
    beside: Any, options: dict[str, Any], tolerance: float
) -> None:
    """What is clipped, perturbed and sent is of the trained coordinates. To rounding: kernels treat
    the end of a vector otherwise, and the vectors' lengths differ."""
    frozen = Adapted()
    frozen.first.lora_A.requires_grad_(False)
    frozen.head.lora_A.requires_grad_(False)
    how = TRAININGS["sgd"]
    one = ours([c.FactorSchedule(["B"]), *beside()], how, **options)
    other = ours(beside(), how, learner=frozen, **options)
    trained = one.module.layout
    for name, (where, _) in other.module.layout.items():
        away = one.record.w[-1][trained[name][0]] - other.record.w[-1][where]
        assert np.abs(away).max() <= tolerance, name
    for adapter in trained.adapters:
        where = trained[adapter.a][0]
        assert np.array_equal(one.record.w[-1][where], one.start[where])
    for name in ("communication/up_parameters", "communication/up_bytes"):
        assert one.record.metrics[-1][name] == other.record.metrics[-1][name]


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


# --------------------------------------------------------------------------- a base that changes


class AddsNoise(FederatedCallback):
    base = Base("*first.weight")

    def on_server_update(self, server: Any) -> None:
        drawn = server.generator("noise").standard_normal((5, 4))
        left = torch.from_numpy(drawn).to(server.w.dtype)
        self.base.add("first.weight", left[:, :1], left[:3, 1:2].T)
        self.base.add("first.weight", torch.full((5, 3), 0.25, dtype=left.dtype))


def noisy(rounds: int, start: Any) -> Any:
    value = start.copy()
    for t in range(rounds):
        drawn = generator(1, "method: noise", t).standard_normal((5, 4))
        value = value + drawn[:, :1] @ drawn[:3, 1:2].T
        value = value + 0.25
    return value


def test_a_users_base() -> None:
    run = ours([AddsNoise()], TRAININGS["sgd"], rounds=3)
    expected = noisy(3, base_of(Adapted())[0])
    assert np.abs(base_of(run.module.learner)[0] - expected).max() < 1e-12
    assert np.array_equal(run.module.base["first.weight"].numpy(), base_of(run.module.learner)[0])
    assert np.array_equal(base_of(run.module.export())[0], base_of(run.module.learner)[0])
    sent = [record["communication/down_parameters"] for record in run.record.metrics]
    # Round 0 needs nothing; later a client lacks at most the whole weight of 15 numbers: each
    # round adds min(1 · 8, 15) + 15.
    assert sent[0] == 3 * NET.size and sent[2] - sent[1] <= 3 * (NET.size + 15)


class InFloat32(LowRank):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.float(), self.weight.float(), self.bias)


def test_bfloat16_weights_have_a_copy_in_float32() -> None:
    def low() -> Adapted:
        learner = Adapted(torch.float32)
        learner.first.weight.data = learner.first.weight.data.bfloat16()
        learner.first.__class__ = InFloat32
        return learner

    class Small(FederatedCallback):
        base = Base("first.weight")

        def on_server_update(self, server: Any) -> None:
            self.base.add("first.weight", torch.full((5, 3), 1e-3))

    learner = low()
    start = learner.first.weight.float()
    numbers = torch.randn(8, 3), torch.arange(8) % 4
    data = InMemoryDataModule(numbers, clients=[[0, 1, 2, 3], [4, 5, 6, 7]], batch_size=4)
    run = fit(learner, data, [Small()], 4, participation="all", local_steps=1)
    copy = run.module.base["first.weight"]
    assert copy.dtype == torch.float32 and torch.allclose(copy, start + 4e-3, atol=1e-6)
    assert learner.first.weight.dtype == torch.bfloat16
    assert torch.equal(learner.first.weight.data, copy.bfloat16())


def test_additions_come_at_the_servers_update_alone() -> None:
    class Early(FederatedCallback):
        base = Base("first.weight")

        def on_round_end(self, server: Any) -> None:
            self.base.add("first.weight", torch.ones(5, 3))

    with pytest.raises(RuntimeError, match="from on_updates to on_server_update"):
        ours([Early()], TRAININGS["sgd"], rounds=1)


def test_a_checkpoint_of_another_base_is_refused() -> None:
    class Other(FederatedCallback):
        base = Base("*.weight")

        def on_server_update(self, server: Any) -> None:
            self.base.add("head.weight", torch.ones(3, 4))

    first = Other.base
    with quiet(), tempfile.TemporaryDirectory() as folder:
        tiny([Other()], rounds=1, folder=folder, adapters=True)
        Other.base = Base("head.weight")  # type: ignore[misc]
        with pytest.raises(UserError, match="the checkpoint has another base"):
            tiny([Other()], rounds=2, folder=folder, resume=True, adapters=True)
        Other.base = first  # type: ignore[misc]


def sent_in_rounds(run: Any) -> list[float]:
    """Numbers down, by round; what is logged is a sum over rounds."""
    sums = [record["communication/down_parameters"] for record in run.record.metrics]
    return [float(number) for number in np.diff([0, *sums])]


FACTOR = {"A": A_NUMBERS, "B": sum(layer.rank * layer.out for layer in NET.layers)}
OTHERS = NET.size - sum(FACTOR.values())


def test_a_client_that_dropped_out_was_sent_the_factor_of_its_round() -> None:
    options: dict[str, Any] = {"participation": "all", "rounds": 4}
    beside = SystemHeterogeneity(dropout=0.6)
    run = ours([c.FactorSchedule(["B", "A"]), beside], TRAININGS["sgd"], **options)
    expected = [NET.size, *(OTHERS + FACTOR[letter] for letter in "BAB")]
    assert sent_in_rounds(run) == [7 * number for number in expected]


@pytest.mark.parametrize("clock", ["late", "asynchronous"])
def test_a_late_client_is_not_sent_a_factor_that_no_round_trains(clock: str) -> None:
    devices = Devices(compute=LogNormal(1.0, 0.5))
    beside, options = [], {}
    if clock == "late":
        beside = [VirtualClock(devices, over_selection=1.7)]
    else:
        options = {"asynchronous": Buffered(devices=devices, size=2, concurrency=4)}
    run = ours([c.FactorSchedule(["B"]), *beside], TRAININGS["sgd"], **options)
    clients = [number / (OTHERS + FACTOR["B"]) for number in sent_in_rounds(run)]
    if clock == "late":
        assert clients == [6.0] * len(clients), "six are sent the model, three are awaited"
    assert all(number == int(number) and number >= 0 for number in clients)


def test_a_quantised_broadcast_leaves_out_a_factor_that_no_round_trains() -> None:
    run = ours([c.FactorSchedule(["B"]), c.QuantizedBroadcast(7)], TRAININGS["sgd"])
    numbers = OTHERS + FACTOR["B"]
    assert sent_in_rounds(run) == [3.0 * numbers] * len(run.record.metrics)
    tensors = len(run.module.layout) - len(run.module.layout.adapters)
    total = len(run.record.metrics) * 3 * -(-(4 * numbers + 32 * tensors) // 8)
    assert run.record.metrics[-1]["communication/down_bytes"] == total
    whole = ours([c.FactorSchedule(["AB"]), c.QuantizedBroadcast(7)], TRAININGS["sgd"])
    assert sent_in_rounds(whole) == [3.0 * NET.size] * len(run.record.metrics)


# --------------------------------------------------------------------------- edges


METHODS: dict[str, Callable[[], Any]] = {
    "ffa": lambda: c.FactorSchedule(["B"]),
    "rolora": lambda: c.FactorSchedule(["B", "A"]),
    "fedsa": lambda: c.PartialAveraging({"*lora_B*": "never"}),
    "flexlora": lambda: c.TruncatedProduct(RANKS),
    "hetlora": lambda: c.PaddedRanks(gamma=0.5),
    "flora": lambda: c.StackedAdapters(RANKS),
    "fedex": lambda: c.ResidualMerge(),
    "fair": lambda: c.CorrectedFactor(),
}


class Nobody(FederatedCallback):
    def on_local_end(self, clients: Any) -> None:
        if clients.round == 1:
            clients.x = torch.full_like(clients.x, torch.nan)


@pytest.mark.parametrize("name", METHODS)
def test_where_nobody_finishes_model_and_base_stay(name: str) -> None:
    how = TRAININGS["sgd"]
    run = ours([METHODS[name](), Nobody()], how, rounds=2, on_nonfinite="skip")
    once = ours([METHODS[name]()], how, rounds=1)
    assert np.array_equal(run.record.w[1], once.record.w[0])
    for one, other in zip(base_of(run.module.learner), base_of(once.module.learner), strict=True):
        assert np.array_equal(one, other)


class Twice(nn.Module):
    """Two named adapters, of ranks 2 and 1, on one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 3), requires_grad=False)
        sizes = {"one": 2, "two": 1}
        self.lora_A = nn.ParameterDict(
            {k: nn.Parameter(torch.randn(r, 3)) for k, r in sizes.items()}
        )
        self.lora_B = nn.ParameterDict(
            {k: nn.Parameter(torch.zeros(6, r)) for k, r in sizes.items()}
        )
        self.scaling = {"one": 0.5, "two": 2.0}

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        for name, scale in self.scaling.items():
            out = out + scale * (x @ self.lora_A[name].T) @ self.lora_B[name].T
        return out


class Own(pl.LightningModule):
    """A user's own module around such a network."""

    def __init__(self, network: Callable[[], nn.Module]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.inner = network()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)


def trained(network: Callable[[], nn.Module], method: list[Any], **options: Any) -> Any:
    settings = {"participation": 1, "local_epochs": 2, **options}
    rate = torch.optim.SGD
    return fit(
        Own(network), federation(), method, 1, client_optimizer=lambda p: rate(p, 0.3), **settings
    ).module


def test_products_of_two_adapters_on_one_weight_are_both_added() -> None:
    """Everything is linear: the mean of the clients' outputs is the new model's."""
    options = {"participation": "all"}
    x = torch.randn(9, 3, dtype=torch.float64)
    seen: dict[int, Tensor] = {}

    class Outputs(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            learner = Own(Twice)
            parameters = dict(learner.named_parameters())
            for name, view in zip(clients.layout, clients.layout.views(clients.x[0]), strict=True):
                parameters[name].data.copy_(view)
            seen[clients.client_ids[0]] = learner(x).detach()

    for method in (c.StackedAdapters(), c.ResidualMerge()):
        run = trained(Twice, [method, Outputs()], **options)
        mean = torch.stack(list(seen.values())).mean(0)
        assert (run.export()(x) - mean).abs().max() < 1e-12


class Renamed(Adapted):
    """`lora_A` is also a part of the names of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_Adapter, self.lora_A = self.first, self.head
        del self.first, self.head

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_A(torch.tanh(self.lora_Adapter(x)))


def test_ffa_lets_each_a_rest_and_fedsa_each_b() -> None:
    """FFA-LoRA's A keeps its bits, FedSA-LoRA's server never moves B; all else moves."""
    begun = {name: p for name, p in Renamed().named_parameters() if p.requires_grad}
    methods = {"A": c.FactorSchedule(["B"]), "B": c.PartialAveraging({"lora_B": "never"})}
    for rests, method in methods.items():
        resting = [f"lora_Adapter.lora_{rests}", f"lora_A.lora_{rests}"]
        run = ours([method], TRAININGS["sgd"], 3, Renamed())
        layout, w = run.module.layout, torch.from_numpy(run.record.w[-1])
        for name, view in zip(layout, layout.views(w), strict=True):
            assert view.equal(begun[name]) == (name in resting), name


# --------------------------------------------------------------------------- refused


class Masks(FederatedCallback):
    def __init__(self, mask: Any, alike: bool = False) -> None:
        super().__init__()
        self.mask, self.alike = mask, alike

    def trained(self, clients: Any) -> Any:
        return self.mask(clients)


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
        (lambda k: torch.arange(51)[None] % (2 + k.client_ids[0]) == 0, True, r"alike = True"),
    ],
)
def test_masks_that_are_none(mask: Any, alike: bool, says: str) -> None:
    with pytest.raises(UserError, match=rf"Masks.*{says}"):
        ours([Masks(mask, alike)], TRAININGS["sgd"], rounds=1)


class Restarting(FederatedCallback):
    restarts = True


class Adds(FederatedCallback):
    base = Base("first.weight")

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.call = call

    def on_server_update(self, server: Any) -> None:
        self.call(self)


class Nothing(FederatedCallback):
    base = Base("nothing.*")


def tied() -> Adapted:
    learner = Adapted()
    learner.twin = torch.nn.Linear(5, 4).double()
    learner.twin.bias.requires_grad_(False)
    learner.twin.weight = learner.head.weight
    return learner


def begun() -> Adapted:
    learner = Adapted()
    learner.first.lora_B.data.fill_(0.1)
    return learner


def convolution() -> Adapted:
    learner = Adapted()
    learner.first.lora_A = nn.Parameter(torch.zeros(3, 3, 1, 1, dtype=torch.float64))
    return learner


def plain() -> Any:
    return Own(lambda: nn.Linear(3, 4))


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
        ([c.PaddedRanks(), c.TruncatedProduct()], {}, "PaddedRanks and TruncatedProduct both"),
        ([c.TruncatedProduct()], {"keep_optimizer_state": True}, "keep_optimizer_state"),
        (
            [c.PaddedRanks()],
            {"server_optimizer": lambda p: torch.optim.SGD(p, 1.0, 0.9)},
            "PaddedRanks sets the server's model.*server optimizer",
        ),
        ([Nothing()], {}, r"Nothing: Base\('nothing\.\*'\) matches no frozen parameter"),
        (
            [Adds(lambda own: own.base.add("first.weight", torch.ones(2, 3)))],
            {},
            r"first.weight is \(5, 3\): give left",
        ),
        ([c.StackedAdapters(), AddsNoise()], {}, "StackedAdapters and AddsNoise both change"),
        ([c.StackedAdapters()], {"learner": tied}, "StackedAdapters changes.*head.weight.*twin"),
        ([c.StackedAdapters()], {"learner": begun}, "first.lora_B does not start at 0"),
        ([c.StackedAdapters(), c.ControlVariates()], {}, "StackedAdapters and ControlVariates"),
        ([c.StackedAdapters()], {"keep_optimizer_state": True}, "keep_optimizer_state"),
        ([c.StackedAdapters(), c.ResidualMerge()], {}, "both decide"),
        (
            [c.ResidualMerge()],
            {"server_optimizer": lambda p: torch.optim.SGD(p, 0.5)},
            "ResidualMerge sets the server's model.*learning rate is not 1",
        ),
        (
            [c.ResidualMerge()],
            {"asynchronous": Buffered(devices=Devices(compute=LogNormal(1.0, 0.5)), size=2)},
            "ResidualMerge does not say that it tolerates staleness",
        ),
        (
            [c.FactorSchedule(["B", "A"])],
            {"asynchronous": Buffered(devices=Devices(compute=LogNormal(1.0, 0.5)), size=2)},
            "FactorSchedule does not say that it tolerates",
        ),
        (
            [c.FactorSchedule(["B"])],
            {"learner": plain},
            r"FactorSchedule is for adapters.*peft_model",
        ),
        ([c.TruncatedProduct()], {"learner": convolution}, r"computes with B·A.*first.lora_A"),
        ([c.PaddedRanks()], {"learner": convolution}, r"computes with B·A.*first.lora_A"),
    ],
)
def test_what_is_not_defined_is_refused(
    callbacks: list[Any], options: dict[str, Any], says: str
) -> None:
    if "learner" in options:
        options = {**options, "learner": options["learner"]()}
    with pytest.raises(UserError, match=says):
        ours(callbacks, TRAININGS["sgd"], rounds=1, **options)


@pytest.mark.parametrize("factors", [[], ["C"], "BA", ["BA"]])
def test_factors_that_are_none(factors: Any) -> None:
    with pytest.raises(UserError, match="FactorSchedule: factors="):
        c.FactorSchedule(factors)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([1, 2], "2 numbers, and the data have 7 clients"),
        ([0] * 7, "a list, each an integer from 1"),
        ({4: 1.0}, "ranks has 4.*accepted are 1 to 3"),
        ({1: 0.5}, "the shares sum to 0.5"),
        ("many", "ranks='many' is not accepted"),
        ([1.5] * 7, "a list, each an integer from 1"),
        ({1.5: 1.0}, "a list, each an integer from 1"),
    ],
)
def test_ranks_that_are_none(ranks: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        ours([c.TruncatedProduct(ranks)], TRAININGS["sgd"], rounds=1)
