"""One round, from the token to the commit: what is told, logged, noted and left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import callbacks as c
from fl_lightning.callback import ClientState, FederatedCallback, Scratch, ServerState
from fl_lightning.testing import tiny_run
from tests.helpers.learners import InPlace, Lit, blobs, client_rows, federated, momentum, trainer


class Diverging(Lit):
    """The clients of 18 samples, 3 and 8, whose last batch has two, have no finite loss in round
    1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        bad = self.current_epoch == 1 and len(batch[1]) == 2
        return super().training_step(batch, batch_idx) * (float("nan") if bad else 1.0)


def sized(clients: int = 5) -> Any:
    return blobs(clients=clients, per_client=24)


def test_a_client_that_diverged_leaves_neither_rows_nor_logs_nor_buffers() -> None:
    class Counted(FederatedCallback):
        rounds = ClientState(synchronised=False, shape=())
        number = ServerState(synchronised=False, shape=())

        def on_local_end(self, clients: Any) -> None:
            self.rounds[clients] += 1
            clients.log("one", clients.ids.double())

        def on_round_end(self, server: Any) -> None:
            self.number += server.n

    class Both(Diverging, InPlace):
        pass

    module = federated(Both(), participation="all", on_nonfinite="skip")
    run = trainer(2, [Counted()])
    run.fit(module, sized())
    rows = {client: int(row) for (_, client), row in client_rows(module).items()}
    assert rows == {0: 2, 1: 2, 2: 2, 3: 1, 4: 2}
    assert int(module.server_states["Counted.number"]) == 9
    assert float(run.callback_metrics["one"]) == (0 + 1 + 2 + 4) / 4
    assert bool(module.learner.running_mean.isfinite().all())
    assert bool(module.learner.running_mean.any())


class Losing(FederatedCallback):
    """Every other client's model is lost on the way."""

    def on_local_step_end(self, clients: Any) -> None:
        clients.x *= torch.where(clients.ids[:, None] % 2 == 0, torch.inf, 1.0)


@pytest.mark.parametrize(
    "method",
    [
        lambda: [],
        lambda: [c.ControlVariates()],
        lambda: [c.QuantizedUpdate(levels=1)],
        lambda: [c.ErrorFeedback21(c.TopKCompression(0.2))],
        lambda: [c.LowRankUpdate(1)],
    ],
    ids=["FedAvg", "SCAFFOLD", "QSGD", "EF21", "PowerSGD"],
)
def test_a_client_that_diverged_has_communicated_all_the_same(method: Any) -> None:
    options: dict[str, Any] = {"participation": "all", "on_nonfinite": "skip", "buffers": "keep"}
    counted = []
    for losing in ([], [Losing()]):
        run = tiny_run(*method(), *losing, c.CommunicationLogger(), rounds=2, **options).trainer
        logged = {name: float(value) for name, value in run.callback_metrics.items()}
        counted.append({k: v for k, v in logged.items() if k.startswith("communication/")})
    assert counted[0]["communication/up_bytes"] > 0
    assert counted[1] == counted[0]


def test_hooks_see_the_round_as_it_stands() -> None:
    seen: dict[str, Any] = {}

    class Watching(FederatedCallback):
        def on_round_start(self, server: Any) -> None:
            seen["start"] = server.w.clone()

        def on_server_update(self, server: Any) -> None:
            seen["before"] = server.w.clone()

        def on_round_end(self, server: Any) -> None:
            evaluated = server.evaluated.clone()
            seen.update(w=server.w.clone(), w_before=server.w_before.clone(), evaluated=evaluated)
            seen.update(sent=dict(server.communication), round=server.round)

    module = federated(participation="all")
    trainer(2, [Watching()]).fit(module, sized())
    assert torch.equal(seen["start"], seen["before"])
    assert torch.equal(seen["start"], seen["w_before"])
    assert torch.equal(seen["w"], module.global_vector)
    assert torch.equal(seen["evaluated"], seen["w"])
    assert not torch.equal(seen["w"], seen["w_before"]) and seen["round"] == 1
    assert seen["sent"]["down_parameters"] == 5 * module.layout.size


def test_what_was_logged_is_what_hooks_and_clients_said_and_how_long_it_took() -> None:
    class Saying(FederatedCallback):
        def on_local_end(self, clients: Any) -> None:
            clients.log("client", clients.ids.double())

        def on_round_end(self, server: Any) -> None:
            server.log("server", server.w.sum() * 0 + 7)

    run = trainer(1, [Saying()])
    run.fit(federated(participation="all", lr_decay=0.5), sized())
    logged = run.callback_metrics
    assert float(logged["client"]) == 2.0 and float(logged["server"]) == 7.0
    assert 0 < float(logged["time/round"]) < 600
    assert float(logged["client_lr"]) == pytest.approx(0.1)


def test_what_a_hook_of_the_server_notes_is_a_warning_once() -> None:
    class Noting(FederatedCallback):
        def on_round_end(self, server: Any) -> None:
            server.note("half of them were asleep")

    module = federated()
    with pytest.warns(UserWarning, match="half of them were asleep") as warned:
        trainer(3, [Noting()]).fit(module, sized())
    assert sum("asleep" in str(warning.message) for warning in warned) == 1
    assert [note for note in module.notes if "asleep" in note] == ["half of them were asleep"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"client_optimizer": momentum}, "up to 10 times that"),
        (
            {"client_optimizer": lambda parameters: torch.optim.Adam(parameters, 0.01)},
            "a step of Adam is not",
        ),
        ({"clip_norm": 1e-3}, "where clipping is active (clip_norm=0.001)"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("reads", [True, False])
def test_a_mean_gradient_that_is_none_is_said_where_a_method_reads_it(
    arguments: Any, words: Any, reads: bool
) -> None:
    module = federated(**arguments)
    method = c.ControlVariates("displacement" if reads else "gradient")
    trainer(1, [method]).fit(module, sized())
    notes = [note for note in module.notes if "for the mean gradient" in note]
    assert len(notes) == int(reads and words is not None) and all(words in note for note in notes)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_weights_are_sizes_or_ones_and_rows_come_back_in_the_next_round(weighting: str) -> None:
    met: dict[tuple[int, int], list[float]] = {}

    class Rows(FederatedCallback):
        last = ClientState(synchronised=False, shape=())

        def on_local_start(self, clients: Any) -> None:
            found = [float(self.last[clients]), float(clients.weights)]
            met[clients.round, clients.client_ids[0]] = found
            self.last[clients] = clients.round + 1.0

    trainer(2, [Rows()]).fit(
        federated(participation="all", weighting=weighting, engine="sequential"), sized()
    )
    sizes = [24, 22, 20, 18, 16]
    share = [n / sum(sizes) for n in sizes] if weighting == "samples" else [0.2] * 5
    assert met == {(t, i): [float(t), pytest.approx(share[i])] for t in range(2) for i in range(5)}


def test_a_state_may_start_from_the_first_model_in_any_round() -> None:
    met: list[bool] = []

    class First(FederatedCallback):
        first = ServerState(initial="initial_model", synchronised=False)

        def on_round_end(self, server: Any) -> None:
            met.append(torch.equal(server.initial_model, start) and torch.equal(self.first, start))

    module = federated()
    start = module.global_vector.detach().clone()
    trainer(3, [First()]).fit(module, sized())
    assert met == [True] * 3


class Keeping(FederatedCallback):
    """Reads a state, changes another in place, and has scratch."""

    read = ClientState(synchronised=False, shape=())
    in_place = ClientState(synchronised=False, shape=())
    scratch = Scratch(shape=())

    def on_local_end(self, clients: Any) -> None:
        self.in_place[clients].add_(1 + self.read[clients])
        self.scratch[clients] += 1
        clients.log("scratch", self.scratch[clients])


def test_rows_that_were_written_are_kept_and_scratch_is_not() -> None:
    module, run = federated(participation="all"), trainer(2, [Keeping()])
    run.fit(module, sized())
    rows = client_rows(module)
    assert {name for name, _ in rows} == {"Keeping.in_place"}
    assert [int(row) for row in rows.values()] == [2] * 5
    assert float(run.callback_metrics["scratch"]) == 1
