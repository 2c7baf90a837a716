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

from fl_lightning import InMemoryDataModule
from fl_lightning import callbacks as c
from fl_lightning.callback import wire
from fl_lightning.callback_list import CallbackList
from fl_lightning.sampling import generator
from tests.helpers.compositions import POWERSGD, QSGD, RANDK, SIGN, TOPK, compressor
from tests.helpers.federation import BATCH, Run, fit, network, samples
from tests.oracles.oracle import Config, TwoLayer, run

ROUNDS = 10
SHAPE = (3, 12, 8)  # matrices of 12 × 3 and 8 × 12: of rank 2, smaller; of rank 6, sent as they are


class Wide(pl.LightningModule):
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
    values = torch.randn(20).bfloat16()
    assert torch.equal(wire.as_tensor(wire.as_array(values), values)[0], values)


def test_with_participants_ef21_has_no_message_from_which_alone_the_server_could_go_on() -> None:
    alone = c.ErrorFeedback21(None)
    assert not alone.has("encode") and not alone.has("decode")
    assert c.ErrorFeedback21(None, "all").has("encode")


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 9, 17])
def test_packed_numbers_take_their_bits_and_come_back(bits: int) -> None:
    for size in (0, 1, 7, 8, 2**20 - 1, 2**20 + 3):
        numbers = generator(0, "numbers", bits, size).integers(0, 2**bits, size)
        there = wire.packed(numbers, bits)
        assert there.dtype == np.uint8 and len(there) == math.ceil(size * bits / 8)
        assert np.array_equal(wire.unpacked(there, bits, size), numbers)


def test_a_run_resumes_with_the_same_compressor_alone() -> None:
    made = [c.TopKCompression(0.1), c.TopKCompression(0.2), c.SignUpdate(), None]
    prints = [
        CallbackList([c.ErrorFeedback21(each)]).fingerprint()["ErrorFeedback21"] for each in made
    ]
    assert prints[0] == "compressor=TopKCompression(fraction=0.1), average='participants'"
    assert len(set(prints)) == 4


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
