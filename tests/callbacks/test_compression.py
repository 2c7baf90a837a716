"""What clients send in fewer bits: against the oracle for ten rounds, from the bits alone, without
bias, and where it is FedAvg."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from fl_lightning import InMemoryDataModule, UserError
from fl_lightning import callbacks as c
from fl_lightning.callback import FederatedCallback
from fl_lightning.callback_list import CallbackList
from fl_lightning.sampling import generator
from tests.helpers.compositions import POWERSGD, QSGD, RANDK, SIGN, TOPK, compressor
from tests.helpers.federation import BATCH, Run, fit, network, samples
from tests.oracles import compression
from tests.oracles.oracle import Config, TwoLayer, run

ROUNDS = 10
SHAPE = (3, 12, 8)  # matrices of 12 × 3 and 8 × 12: of rank 2, smaller; of rank 6, sent as they are


class Wide(pl.LightningModule):
    """Linear, tanh, linear, as the oracle's TwoLayer has them."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        d_in, hidden, classes = SHAPE
        self.net = nn.Sequential(
            nn.Linear(d_in, hidden), nn.Tanh(), nn.Linear(hidden, classes)
        ).double()
        generator = torch.Generator().manual_seed(5)
        for p in self.parameters():
            p.data = 0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
        self.to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x.to(self.net[0].weight.dtype)).double(), y)


def wide(callbacks: list[Any], rounds: int = ROUNDS, **options: Any) -> Run:
    """Three of eight clients of unequal size, one and a half epochs of batches of four."""
    x, y, clients = samples()
    dtype = options.pop("dtype", torch.float64)
    options.setdefault("participation", 3)
    options.setdefault("local_epochs", 1.5)
    decay = options.pop("weight_decay", 0.01)
    return fit(
        Wide(dtype),
        InMemoryDataModule((x, y), clients=clients, batch_size=BATCH),
        callbacks,
        rounds,
        client_optimizer=lambda p: torch.optim.SGD(p, 0.3, weight_decay=decay),
        **options,
    )


def ef21(inner: Any, average: str) -> dict[str, Any]:
    return {"kind": "ef21", "compressor": inner, "average": average}


RULES: dict[str, dict[str, Any]] = {
    "QSGD": QSGD,
    "QSGD, two levels, max, whole": {**QSGD, "levels": 2, "norm": "max", "per_layer": False},
    "EF-signSGD": SIGN,
    "rand-k": {**RANDK, "memory": False},
    "rand-k, memory": RANDK,
    "PowerSGD, rank 1": POWERSGD,
    "PowerSGD, rank 2": {**POWERSGD, "rank": 2},
    "PowerSGD, rank 6, all raw": {**POWERSGD, "rank": 6},
    "top-k": TOPK,
    "EF21, top-k": ef21(TOPK, "participants"),
    "EF21, signs, all": ef21(SIGN, "all"),
    "EF21, rand-k, all": ef21(RANDK, "all"),
    "EF21, identity, all": ef21(None, "all"),
}
ROWS = {"SignUpdate.error": "error", "RandomK.error": "error", "LowRankUpdate.error": "error"}
ROWS |= {"TopKCompression.error": "error", "LowRankUpdate.q": "q", "ErrorFeedback21.h": "h"}


def near(ours: Any, theirs: Any) -> bool:
    return bool(np.abs(ours - theirs).max(initial=0) <= 1e-9 * np.abs(theirs).max(initial=1e-3))


# Of the others, and of rounds side by side, test_oracle_agreement has it on a smaller network.
LARGE = ["QSGD, two levels, max, whole", *(name for name in RULES if name.startswith("PowerSGD"))]


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("name", [*LARGE, "EF21, signs, all", "top-k"])
def test_ten_rounds_agree_with_the_oracle(name: str, engine: str) -> None:
    ours = wide([compressor(RULES[name]), c.CommunicationLogger()], engine=engine)
    config = Config(lr=0.3, weight_decay=0.01, compression=RULES[name])
    theirs = run(TwoLayer(*SHAPE), config, ROUNDS, ours.start, ours.schedule)
    for t, expected in enumerate(theirs):
        assert near(ours.record.w[t], expected.w), t
        for key, rows in ours.record.rows[t].items():
            assert set(rows) == set(expected.clients[ROWS[key]])
            assert all(near(row, expected.clients[ROWS[key]][i]) for i, row in rows.items()), key
        for count in ("up_parameters", "up_bytes", "total_bytes"):
            number = expected.metrics[f"communication/{count}"]
            assert ours.record.metrics[t][f"communication/{count}"] == number


def test_a_direction_that_a_client_does_not_have_is_zero_from_then_on() -> None:
    """One step on one sample moves a matrix along one direction, so of two one is rounding."""
    rule = RULES["PowerSGD, rank 2"]
    one_step = {"participation": "all", "local_steps": 1, "weight_decay": 0.0}
    ours = wide([compressor(rule)], 4, **one_step)
    config = Config(lr=0.3, compression=rule)
    theirs = run(TwoLayer(*SHAPE), config, 4, ours.start, ours.schedule)
    for t, expected in enumerate(theirs):
        assert near(ours.record.w[t], expected.w)
        q = ours.record.rows[t]["LowRankUpdate.q"][0]
        assert near(q, expected.clients["q"][0])
        first, second = q[:6].reshape(3, 2), q[6:].reshape(12, 2)
        assert first[:, 0].all() and not first[:, 1].any()
        assert second[:, 0].all() and not second[:, 1].any()


@pytest.mark.parametrize("levels", [1, 127])
def test_ten_rounds_of_a_quantised_broadcast_agree_with_the_oracle(levels: int) -> None:
    methods = [c.QuantizedBroadcast(levels), c.QuantizedUpdate(), c.CommunicationLogger()]
    ours = wide(methods)
    config = Config(lr=0.3, weight_decay=0.01, compression=QSGD, broadcast=levels)
    theirs = run(TwoLayer(*SHAPE), config, ROUNDS, ours.start, ours.schedule)
    bits = 4 * 32 + 152 * math.ceil(math.log2(2 * levels + 1))
    for t, expected in enumerate(theirs):
        assert near(ours.record.w[t], expected.w), t
        logged = ours.record.metrics[t]
        assert logged["communication/down_bytes"] == (t + 1) * 3 * math.ceil(bits / 8)
        assert logged["communication/total_bytes"] == expected.metrics["communication/total_bytes"]


class Given(FederatedCallback):
    """What clients get as w, in each round."""

    def __init__(self) -> None:
        super().__init__()
        self.w: dict[int, list[Any]] = {}

    def on_local_end(self, clients: Any) -> None:
        self.w.setdefault(clients.round, []).append(clients.w.numpy().copy())


def test_a_broadcast_is_the_same_for_all_and_w0_plus_levels_of_a_scale() -> None:
    """So w^0, four scales and 152 whole numbers from -3 to 3 are all that a client needs."""
    given = Given()
    ours = wide([c.QuantizedBroadcast(3), given], 6)
    assert np.array_equal(given.w[0][0], ours.start), "in round 0 that is w^0"
    layers = [slice(0, 36), slice(36, 48), slice(48, 144), slice(144, 152)]
    for t in range(1, 6):
        assert all(np.array_equal(w, given.w[t][0]) for w in given.w[t])
        moved = ours.record.w[t - 1] - ours.start
        for layer in layers:
            scale = compression.upwards(float(np.linalg.norm(moved[layer])))
            levels = (given.w[t][0] - ours.start)[layer] * 3 / scale
            assert np.abs(levels - np.rint(levels)).max() < 1e-6
            assert np.abs(levels).max() < 3.5 and len(np.unique(np.rint(levels))) > 1


class Ends(FederatedCallback):
    """Where clients of round 1 end."""

    def __init__(self) -> None:
        super().__init__()
        self.x: list[Any] = []

    def on_local_end(self, clients: Any) -> None:
        if clients.round == 1:
            self.x.append(clients.x[0].numpy().copy())


def test_distances_are_from_the_server_to_where_clients_end_not_by_way_of_what_they_got() -> None:
    ends = Ends()
    loggers = [c.DivergenceLogger(), c.ConsensusDistanceLogger(), ends]
    ours = wide([c.QuantizedBroadcast(1), *loggers], 2).record
    x, logged = np.array(ends.x), ours.metrics[-1]
    away = ((x - ours.w[-1]) ** 2).sum(1).mean()
    assert logged["divergence/participants"] == pytest.approx(away, rel=1e-6)
    centre, spread = x.mean(0), ((x - x.mean(0)) ** 2).mean(0)
    relative = spread[:48].sum() / (centre[:48] ** 2).sum()
    assert logged["consensus_relative/net.0"] == pytest.approx(relative, rel=1e-6)


class Message:
    """A file between a client and the server: arrays by name, and what they weigh."""

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        self.parts = {n: (a.dtype.str, a.shape, a.tobytes()) for n, a in arrays.items()}
        self.weight = sum(len(content) for _, _, content in self.parts.values())

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        read = {}
        for name, (dtype, shape, content) in self.parts.items():
            read[name] = np.frombuffer(content, dtype).reshape(shape)
        return read


def encoding(rule: dict[str, Any], letters: dict[Any, Message], order: str) -> Any:
    """The rule's callback, whose messages are kept, and decoded where they are made."""
    made = compressor(rule)
    cls: Any = type(made)

    def transmit(self: Any, clients: Any, update: Tensor) -> Tensor:
        sent = cls.transmit(self, clients, update) if order == "transmit first" else None
        message = Message(self.encode(clients, update))
        sent = cls.transmit(self, clients, update) if sent is None else sent
        (client,) = clients.client_ids
        letters[clients.round, client] = message
        assert torch.equal(self.decode(message.arrays(), clients.round, client), sent[0])
        return sent

    made.__class__ = type(cls.__name__, (cls,), {"transmit": transmit})
    return made


def decoding(rule: dict[str, Any], letters: dict[Any, Message]) -> Any:
    """The rule's callback at a server that has the letters, and nothing else of the clients."""
    made = compressor(rule)
    cls: Any = type(made)

    def transmit(self: Any, clients: Any, update: Tensor) -> Tensor:
        (client,) = clients.client_ids
        received: Tensor = self.decode(
            letters[clients.round, client].arrays(), clients.round, client
        )
        return received[None]

    made.__class__ = type(cls.__name__, (cls,), {"transmit": transmit})
    return made


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", [name for name in RULES if name != "EF21, top-k"])
def test_a_server_needs_the_counted_bytes_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    letters: dict[Any, Message] = {}
    order = "encode first" if dtype == torch.float32 else "transmit first"
    beside = [c.CommunicationLogger()]
    plain = wide([compressor(RULES[name]), *beside], 3, dtype=dtype)
    there = wide([encoding(RULES[name], letters, order), *beside], 3, dtype=dtype)
    here = wide([decoding(RULES[name], letters)], 3, dtype=dtype)
    assert len(letters) == 9
    counted = plain.record.metrics[-1]["communication/up_bytes"]
    assert sum(letter.weight for letter in letters.values()) == counted
    assert np.array_equal(plain.record.w, there.record.w)
    assert np.array_equal(plain.record.w, here.record.w)


def test_numbers_that_numpy_does_not_have_travel_as_their_bits() -> None:
    from fl_lightning.callback import as_array, as_tensor

    values = torch.randn(20).bfloat16()
    assert torch.equal(as_tensor(as_array(values), values)[0], values)


def test_with_participants_ef21_has_no_message_from_which_alone_the_server_could_go_on() -> None:
    alone = c.ErrorFeedback21(None)
    assert not alone.has("encode") and not alone.has("decode")
    assert c.ErrorFeedback21(None, "all").has("encode")


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 9, 17])
def test_packed_numbers_take_their_bits_and_come_back(bits: int) -> None:
    from fl_lightning.callback import packed, unpacked

    for size in (0, 1, 7, 8, 2**20 - 1, 2**20 + 3):
        numbers = generator(0, "numbers", bits, size).integers(0, 2**bits, size)
        there = packed(numbers, bits)
        assert there.dtype == np.uint8 and len(there) == math.ceil(size * bits / 8)
        assert np.array_equal(unpacked(there, bits, size), numbers)


class Drawn(pl.LightningModule):
    """Its only client moves from 0 to the same v in every round: to one step of learning rate 1."""

    v = torch.tensor([0.3, -1.7, 0.0, 1e-3, 2.9, -0.01, 0.4], dtype=torch.float64).repeat(50)

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(350, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return -(self.w * self.v).sum()


def draws(method: Any, rounds: int, clients: int) -> np.ndarray[Any, Any]:
    """What the hook makes of v for so many rounds and clients, rows."""
    kept: list[Tensor] = []
    cls: Any = type(method)

    def transmit(self: Any, there: Any, update: Tensor) -> Tensor:
        sent: Tensor = cls.transmit(self, there, update)
        kept.append(sent[0].clone())
        return sent

    method.__class__ = type(cls.__name__, (cls,), {"transmit": transmit})
    data = InMemoryDataModule(
        (torch.zeros(clients, 1), torch.zeros(clients)),
        clients=[[i] for i in range(clients)],
        batch_size=1,
    )
    options: dict[str, Any] = {"participation": "all", "local_steps": 1}
    options["client_optimizer"] = lambda p: torch.optim.SGD(p, 1.0)
    # Every round begins at 0, so that each client's update is v.
    fit(Drawn(), data, [method], rounds, server_optimizer=still, **options)
    return np.array([sent.numpy() for sent in kept])


def still(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, 0.0)


@pytest.mark.parametrize(
    "method",
    [lambda: c.QuantizedUpdate(1), lambda: c.QuantizedUpdate(7, "max"), lambda: c.RandomK(0.3)],
    ids=["QSGD, one level", "QSGD, max", "rand-k"],
)
def test_ten_thousand_draws_have_the_update_as_their_mean(method: Any) -> None:
    made = draws(method(), 20, 10)
    assert len(np.unique(made, axis=0)) == 200, "each round and client draws anew"
    made = made.reshape(10_000, 7)
    error = np.abs(made.mean(0) - Drawn.v.numpy()[:7])
    # Five standard errors of the mean; a scale in float32 is up to 1e-7 too large.
    assert (error <= 5 * made.std(0) / 100 + 1e-6).all(), error
    assert made.std(0).max() > 0.01


def test_the_sign_of_nothing_is_plus_as_it_has_one_bit() -> None:
    v = Drawn.v.numpy()
    scale = np.float32(np.abs(v).mean())
    assert np.array_equal(draws(c.SignUpdate(), 1, 1)[0], np.where(v >= 0, scale, -scale))


def test_a_run_resumes_with_the_same_compressor_alone() -> None:
    made = [c.TopKCompression(0.1), c.TopKCompression(0.2), c.SignUpdate(), None]
    prints = [
        CallbackList([c.ErrorFeedback21(each)]).fingerprint()["ErrorFeedback21"] for each in made
    ]
    assert prints[0] == "compressor=TopKCompression(fraction=0.1), average='participants'"
    assert len(set(prints)) == 4


@pytest.mark.parametrize("levels", [1, 2, 7, 127, 2**20])
@pytest.mark.parametrize("norm", ["l2", "max"])
def test_levels_stay_within_their_bits(levels: int, norm: Any) -> None:
    letters: dict[Any, Message] = {}
    rule = {**QSGD, "levels": levels, "norm": norm}
    wide([encoding(rule, letters, "transmit first")], 2)
    bits = math.ceil(math.log2(2 * levels + 1))
    seen = []
    for letter in letters.values():
        arrays = letter.arrays()
        assert arrays["scales"].dtype == np.float32 and len(arrays["scales"]) == 4
        digits = np.unpackbits(arrays["levels"], bitorder="little")[: 152 * bits]
        seen.append(digits.reshape(152, bits) @ (1 << np.arange(bits)) - levels)
    assert np.abs(seen).max() <= levels
    assert np.abs(seen).max() == levels or norm == "l2"


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(
    "method",
    [lambda: c.QuantizedUpdate(None), lambda: c.RandomK(1.0), lambda: c.QuantizedBroadcast(None)],
    ids=["no levels", "every coordinate", "no levels down"],
)
def test_neutral_settings_are_fedavg_to_the_bit_and_in_bytes(method: Any, weighting: str) -> None:
    options = {"weighting": weighting, "clip_norm": 0.9}
    ours = network([method(), c.CommunicationLogger()], 5, **options).record
    average = network([c.CommunicationLogger()], 5, **options).record
    assert np.array_equal(ours.w, average.w)
    for name, value in average.metrics[-1].items():
        if not name.startswith("time/"):
            assert ours.metrics[-1][name] == value, name


def test_without_levels_the_server_knows_what_it_knows_in_fedavg() -> None:
    """FedCM's velocity follows from the model, so it is not sent."""
    name = "communication/up_parameters"
    beside = [
        network([method, c.ClientMomentum(0.3), c.CommunicationLogger()], 1).record.metrics[-1]
        for method in (c.QuantizedUpdate(None), c.ProximalTerm(0.0), c.QuantizedUpdate(3))
    ]
    assert [sent[name] for sent in beside] == [3 * 31, 3 * 31, 2 * 3 * 31]


def test_what_others_add_to_the_update_is_no_part_of_ef21s_mean() -> None:
    """FedDyn changes the update in place, and the server's mean of all is what EF21 returned."""
    method = c.ErrorFeedback21(c.TopKCompression(0.2), "all")
    record = network([method, c.DynamicRegularization(0.1)], 6).record
    mean = sum(record.rows[-1]["ErrorFeedback21.h"].values()) / 8
    assert np.abs(record.server[-1]["ErrorFeedback21.mean"] - mean).max() < 1e-15


def test_small_tensors_of_powersgd_travel_as_they_are() -> None:
    """Biases, and matrices of which two factors would be no fewer numbers."""
    counted = "communication/up_parameters"
    sizes = {1: (12 + 3) + (8 + 12), 2: 2 * (12 + 3) + 2 * (8 + 12), 3: 36 + 3 * (8 + 12), 6: 132}
    for rank, matrices in sizes.items():
        sent = wide([c.LowRankUpdate(rank), c.CommunicationLogger()], 1).record
        assert sent.metrics[-1][counted] == 3 * (matrices + 12 + 8)
        for row in sent.rows[-1]["LowRankUpdate.error"].values():
            assert not row[36:48].any() and not row[144:].any()
    raw = wide([c.LowRankUpdate(6)], 3).record.w
    assert np.array_equal(raw, wide([], 3).record.w)


REFUSED: list[tuple[Any, str]] = [
    (lambda: c.ErrorFeedback21(c.QuantizedUpdate()), "QuantizedUpdate.*needs a contraction"),
    (lambda: c.ErrorFeedback21(c.RandomK(0.5)), "memory=False.*needs a contraction"),
    (lambda: c.ErrorFeedback21(c.LowRankUpdate()), "LowRankUpdate.*needs a contraction"),
    (lambda: c.ErrorFeedback21("top-k"), "'top-k'.*needs a contraction"),
]


@pytest.mark.parametrize(("make", "named"), REFUSED)
def test_what_cannot_work_is_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(UserError, match=named) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "make",
    [c.QuantizedUpdate, c.SignUpdate, lambda: c.RandomK(0.5), c.LowRankUpdate, c.TopKCompression],
)
def test_one_compression_a_run_and_none_beside_parts(make: Any) -> None:
    for other in (c.ErrorFeedback21(None), c.PartialAveraging()):
        with pytest.raises(UserError, match=r"both decide what clients send|cannot run together"):
            network([make(), other], 1)


def test_no_quantised_broadcast_beside_parts() -> None:
    with pytest.raises(UserError, match="cannot run together"):
        network([c.QuantizedBroadcast(), c.PartialAveraging()], 1)
