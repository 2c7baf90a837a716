"""States of k rows of D numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fl_lightning.callback import ClientState, FederatedCallback, ServerState, Upload
from fl_lightning.callbacks import CommunicationLogger, PartialAveraging
from fl_lightning.testing import tiny_run
from tests.helpers.learners import client_rows


class Kept(FederatedCallback):
    """The latest k models, by the server and by each client, newest first."""

    server = ServerState("initial_model", sent=True, synchronised=True, shape=("k", "D"))
    own = ClientState("current_model", synchronised=True, shape=("k", "D"))
    seen = Upload(shape=("k", "D"))

    def __init__(self, k: int = 3) -> None:
        super().__init__()
        self.k = k

    def on_local_end(self, clients: Any) -> None:
        rows = self.own[clients]
        self.own[clients] = torch.cat([clients.x[:, None], rows[:, :-1]], dim=1)
        self.seen[clients] = self.own[clients]

    def on_server_update(self, server: Any) -> None:
        rows = torch.cat([(server.w + server.update)[None], self.server[:-1]])
        self.server[:] = rows  # in place
        server.log("kept/mean", self.seen.mean()[0].norm())

    def on_local_gradient(self, clients: Any, gradient: Tensor) -> Tensor:
        return gradient + 0.1 * (self.server[0] - self.server[-1]) + 0.01 * self.own[clients][:, 0]


def test_each_row_begins_alike_and_is_kept() -> None:
    models: list[Tensor] = []
    for rounds in (1, 2, 3, 4):
        module = tiny_run(Kept(), rounds=rounds)
        models.append(module.global_vector.detach().clone())
    rows = module.server_states["Kept.server"]
    assert rows.shape == (3, 31)
    assert all(torch.equal(a, b) for a, b in zip(rows, models[:0:-1], strict=True))
    (i, *_) = module.participants(0)
    own = tiny_run(Kept(2), rounds=1).client_rows.read("Kept.own", i)
    start = tiny_run(PartialAveraging({"*": 2}), rounds=1).global_vector
    assert own.shape == (2, 31) and torch.equal(own[1], start) and not torch.equal(own[0], start)


def test_rows_that_are_sent_are_counted_each() -> None:
    logged = tiny_run(Kept(3), CommunicationLogger(), rounds=2).trainer.callback_metrics
    assert logged["communication/down_parameters"] == 2 * 3 * (1 + 3) * 31
    assert logged["communication/up_parameters"] == 2 * 3 * (1 + 3) * 31
    assert logged["cost/kept_vectors"] == 3


def test_parts_that_are_not_averaged_keep_each_row() -> None:
    """In round 0 the first layer is not averaged, so its columns stay as they were."""
    module = tiny_run(Kept(), PartialAveraging({"first.*": 2}), rounds=1)
    start = tiny_run(PartialAveraging({"*": 2}), rounds=1).global_vector
    first = slice(0, 16)
    rows = module.server_states["Kept.server"]
    assert torch.equal(rows[:, first], start[first].expand(3, -1))
    assert not torch.equal(rows[0, 16:], start[16:])
    own = module.client_rows.read("Kept.own", module.participants(0)[0])
    assert torch.equal(own[:, first], start[first].expand(3, -1))
    assert not torch.equal(own[0, 16:], start[16:])


class Count(ClientState):
    """A kind of state of one's own: a whole number per client, from 1 on, which goes up."""

    def __init__(self) -> None:
        super().__init__(lambda w: 1, synchronised=False, shape=(), dtype=torch.int32)

    def goes_up(self, known: Any) -> bool:
        return True


class Counting(FederatedCallback):
    """Each client counts the rounds that it took part in, and the server logs the most."""

    rounds = Count()

    def on_local_end(self, clients: Any) -> None:
        self.rounds[clients] += 1

    def on_round_end(self, server: Any) -> None:
        server.log("most", max(int(rows.max()) for _, rows in self.rounds.staged(server)))


def test_a_new_kind_of_state_is_one_class() -> None:
    counted = tiny_run(Counting(), CommunicationLogger(), rounds=3, participation="all")
    metrics = counted.trainer.callback_metrics
    assert float(metrics["most"]) == 4
    plain = tiny_run(CommunicationLogger(), rounds=3, participation="all")
    clients = counted.trainer.datamodule.num_clients
    for name, each in (("up_parameters", 1), ("up_bytes", 4), ("down_bytes", 0)):
        more = metrics[f"communication/{name}"]
        more = more - plain.trainer.callback_metrics[f"communication/{name}"]
        assert float(more) == 3 * clients * each, "one number per client and round"
    rows = client_rows(counted)
    assert [int(row) for row in rows.values()] == [4] * clients
    assert {row.dtype for row in rows.values()} == {torch.int32}


class Deviation(FederatedCallback):
    """Each participant keeps how far it moved from the mean, which the server takes out."""

    deviation = ClientState(synchronised=False)
    moved = Upload(sent=False)

    def on_local_end(self, clients: Any) -> None:
        self.moved[clients] = clients.x - clients.w
        self.deviation[clients] = clients.x - clients.w

    def on_round_end(self, server: Any) -> None:
        mean = self.moved.mean()
        for _, rows in self.deviation.staged(server):
            rows -= mean


def test_the_server_may_change_the_rows_of_a_round_before_they_are_committed() -> None:
    run = tiny_run(Deviation(), rounds=1, participation=3)
    rows = list(client_rows(run).values())
    assert len(rows) == 3 and all(row.abs().max() > 1e-3 for row in rows)
    assert sum(rows).abs().max() < 1e-12


class HalvedByTheServer(FederatedCallback):
    """Clients train all but the first parameter, and the server halves that one."""

    alike = True
    server_moves = True

    def trained(self, clients: Any) -> Tensor:
        mask = torch.ones_like(clients.x, dtype=torch.bool)
        mask[:, next(iter(clients.layout.values()))[0]] = False
        return mask

    def on_server_update(self, server: Any) -> None:
        where, _ = next(iter(server.layout.values()))
        server.update[where] -= server.w[where] / 2


class Unmoved(HalvedByTheServer):
    server_moves = False


def test_the_server_moves_what_no_client_trains_only_if_the_method_says_so() -> None:
    moved, unmoved, one = (
        tiny_run(method(), rounds=rounds)
        for method, rounds in ((HalvedByTheServer, 2), (Unmoved, 2), (Unmoved, 1))
    )
    where, _ = next(iter(moved.layout.values()))
    start = one.global_vector[where]
    torch.testing.assert_close(moved.global_vector[where], start / 4)
    assert unmoved.global_vector[where].equal(start)
    assert not unmoved.global_vector.equal(one.global_vector)
