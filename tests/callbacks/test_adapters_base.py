"""Methods that change the base, and LoRA-FAIR, agree with NumPy's calculation to 1e-9."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import Base, FederatedCallback, InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.lab.contracts.federation import fit as tiny
from fl_lightning.lab.contracts.federation import in_processes, outcome, quiet, require_same
from fl_lightning.sampling import generator
from fl_lightning.systems import Buffered, Devices, LogNormal, SystemHeterogeneity, VirtualClock
from tests.callbacks.test_adapters import (
    NET,
    RANKS,
    TRAININGS,
    agree,
    base_of,
    ours,
)
from tests.helpers.federation import fit
from tests.helpers.low_rank import Adapted, LowRank
from tests.oracles import adapters as oracle
from tests.oracles.adapters import Training

A_NUMBERS = sum(layer.rank * layer.d_in for layer in NET.layers)


@pytest.fixture(params=TRAININGS)
def how(request: Any) -> Training:
    return TRAININGS[request.param]


@pytest.mark.parametrize("draw", ["round", "client"])
@pytest.mark.parametrize("ranks", [None, RANKS], ids=["equal", "unequal"])
def test_flora(how: Training, ranks: Any, draw: Any) -> None:
    run = ours([c.StackedAdapters(ranks, draw)], how)
    own = None
    if draw == "client":

        def own(t: int, i: int) -> Any:
            return generator(1, "flora client", t, i).random(A_NUMBERS)

    rule = oracle.Stacked(
        NET,
        dict(enumerate(ranks or [3] * 7)),
        lambda t: generator(1, "flora", t).random(A_NUMBERS),
        own,
    )
    agree(run, rule, how)
    for adapter in run.module.layout.adapters:
        assert not adapter.matrices(run.module.global_vector)[1].any(), "B is 0, to the bit"


@pytest.mark.parametrize("rank", [None, 0, 1, 2, 5])
def test_fedex_lora(how: Training, rank: Any) -> None:
    agree(ours([c.ResidualMerge(rank)], how), oracle.Residual(NET, rank), how)


@pytest.mark.parametrize("penalty", [0.01, 0.0, 2.0])
def test_lora_fair(how: Training, penalty: float) -> None:
    agree(ours([c.CorrectedFactor(penalty)], how), oracle.Fair(NET, penalty), how)


def test_one_client_leaves_fedex_fedavg_and_flora_its_product(how: Training) -> None:
    alone = {"participation": 1, "rounds": 1}
    average = ours([], how, **alone)
    fedex = ours([c.ResidualMerge()], how, **alone)
    assert np.array_equal(fedex.record.w, average.record.w)
    for one, other in zip(base_of(fedex.module.learner), base_of(Adapted()), strict=True):
        assert np.array_equal(one, other)
    flora = ours([c.StackedAdapters()], how, **alone)
    w = torch.from_numpy(average.record.w[0])
    before = base_of(Adapted())
    pairs = zip(average.module.layout.adapters, before, base_of(flora.module.learner), strict=True)
    for adapter, old, new in pairs:
        a, b = adapter.matrices(w)
        assert np.abs(new - old - adapter.scale * (b @ a).numpy()).max() < 1e-12


def test_dense_weights_move_by_the_mean_of_the_products(how: Training) -> None:
    run = ours([c.ResidualMerge()], how, rounds=1)
    expected = oracle.Residual(NET, None)
    (theirs,) = oracle.run(expected, run.start, base_of(Adapted()), run.schedule, 1, how)
    for layer, frozen in zip(NET.layers, theirs.base, strict=True):
        a, b = layer.factors(theirs.w)
        mine_a, mine_b = layer.factors(run.record.w[0])
        own = base_of(run.module.learner)[NET.layers.index(layer)]
        dense = own + layer.scale * mine_b @ mine_a
        assert np.abs(dense - frozen - layer.scale * b @ a).max() < 1e-9


class Updates(FederatedCallback):
    """Keeps what the server received: weights and updates of each round."""

    role = "measurement"
    gathers = True

    def __init__(self) -> None:
        super().__init__()
        self.rounds: list[Any] = []

    def on_server_update(self, server: Any) -> None:
        self.rounds.append((server.weights.numpy().copy(), server.updates.numpy().copy()))


@pytest.mark.parametrize(
    "beside", [None, c.QuantizedBroadcast(1), c.LookaheadMomentum(), c.ServerAscent()]
)
def test_the_residual_is_the_spread_of_the_updates_whatever_clients_begin_at(beside: Any) -> None:
    updates = Updates()
    method = c.ResidualMerge()
    callbacks = [method, updates, *([beside] if beside else [])]
    run = ours(callbacks, TRAININGS["adamw"], rounds=3)
    expected = base_of(Adapted())
    for p, rows in updates.rounds:
        for k, layer in enumerate(NET.layers):
            pairs = [layer.factors(row - p @ rows) for row in rows]
            spread = sum(weight * b @ a for weight, (a, b) in zip(p, pairs, strict=True))
            expected[k] = expected[k] + layer.scale * spread
    for own, theirs in zip(base_of(run.module.learner), expected, strict=True):
        assert np.abs(own - theirs).max() < 1e-9


def test_the_correction_is_of_what_the_server_received_whatever_clients_begin_at() -> None:
    updates = Updates()
    callbacks = [c.CorrectedFactor(0.1), updates, c.QuantizedBroadcast(1)]
    run = ours(callbacks, TRAININGS["adamw"], rounds=3)
    w = run.start
    for t, (p, rows) in enumerate(updates.rounds):
        mean = w + p @ rows
        for layer in NET.layers:
            pairs = [layer.factors(w + row) for row in rows]
            a, b = layer.factors(mean)
            rest = sum(weight * b_i @ a_i for weight, (a_i, b_i) in zip(p, pairs, strict=True))
            ridge = a @ a.T + 0.1 * np.eye(layer.rank)
            mean[layer.b] = (b + (rest - b @ a) @ a.T @ np.linalg.inv(ridge)).ravel()
        w = run.record.w[t]
        assert np.abs(w - mean).max() < 1e-9, f"in round {t}"


# --------------------------------------------------------------------------- a user's own base


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


METHODS: dict[str, Any] = {
    "flora": lambda: c.StackedAdapters([1, 2, 2, 1, 2, 1]),
    "flora, client": lambda: c.StackedAdapters(draw="client"),
    "fedex": lambda: c.ResidualMerge(),
    "fair": lambda: c.CorrectedFactor(),
    "flexlora": lambda: c.TruncatedProduct([1, 2, 2, 1, 2, 1]),
    "hetlora": lambda: c.PaddedRanks([1, 2, 2, 1, 2, 1], gamma=0.5),
    "rolora": lambda: c.FactorSchedule(["B", "A"]),
}


def left(module: Any) -> dict[str, Any]:
    named = {f"base {name}": value for name, value in module.base.items()}
    return {**outcome(module), **{name: value.clone() for name, value in named.items()}}


@pytest.mark.parametrize("name", METHODS)
def test_resumed_after_each_round_it_has_the_same_bits(name: str) -> None:
    def run(**given: Any) -> Any:
        return tiny([METHODS[name](), c.CommunicationLogger()], **given)

    with quiet():
        whole = left(run(rounds=4))
        for t in (1, 2, 3):
            with tempfile.TemporaryDirectory() as folder:
                run(rounds=t, folder=folder)
                resumed = left(run(rounds=4, folder=folder, resume=True))
            require_same(whole, resumed, 0.0, f"resumed after {t} rounds", "")


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_have_the_bits_of_one(name: str) -> None:
    def run(**given: Any) -> Any:
        return left(tiny([METHODS[name](), c.CommunicationLogger()], rounds=3, **given))

    with quiet():
        one = run()
        two = in_processes(2, lambda: run(trainer={"strategy": "federated", "devices": 2}))
    require_same(one, two, 0.0, "one and two processes", "")


# --------------------------------------------------------------------------- refused


class Wrong(FederatedCallback):
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


@pytest.mark.parametrize(
    ("callbacks", "options", "says"),
    [
        ([Nothing()], {}, r"Nothing: Base\('nothing\.\*'\) matches no frozen parameter"),
        (
            [Wrong(lambda own: own.base.add("head.weight", torch.ones(4, 5)))],
            {},
            "Wrong.base.add: the base has no 'head.weight'",
        ),
        (
            [Wrong(lambda own: own.base.add("first.weight", torch.ones(2, 3)))],
            {},
            r"first.weight is \(5, 3\), but was given \(2, 3\)",
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
    ],
)
def test_what_a_base_is_refused_with(
    callbacks: list[Any], options: dict[str, Any], says: str
) -> None:
    if "learner" in options:
        options = {**options, "learner": options["learner"]()}
    with pytest.raises(UserError, match=says):
        ours(callbacks, TRAININGS["sgd"], rounds=1, **options)


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


def cost(columns: int) -> int:
    """The numbers of additions of so many columns per rank, or the weights themselves."""
    return sum(
        min(columns * layer.rank * (layer.d_in + layer.out), layer.d_in * layer.out)
        for layer in NET.layers
    )


FACTOR = {
    "A": A_NUMBERS,
    "B": sum(layer.rank * layer.out for layer in NET.layers),
}
OTHERS = NET.size - sum(FACTOR.values())


@pytest.mark.parametrize(
    ("make", "later", "less"),
    [(c.StackedAdapters, OTHERS, 0), (c.ResidualMerge, NET.size, 1)],
    ids=["flora", "fedex"],
)
def test_a_client_that_dropped_out_was_sent_the_additions(make: Any, later: int, less: int) -> None:
    options: dict[str, Any] = {"participation": "all", "rounds": 6}
    run = ours([make(), SystemHeterogeneity(dropout=0.6)], TRAININGS["sgd"], **options)
    finished = [7 - int(record["system/dropped"]) for record in run.record.metrics]
    assert len(set(finished)) > 2
    assert sent_in_rounds(run) == [7 * NET.size] + [
        7 * (later + cost(max(n - less, 0))) for n in finished[:-1]
    ]


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
