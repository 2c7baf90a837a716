"""All updates at the server: whose they are, that they are the clients', and what may be done with
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import UserError
from fl_lightning.aggregation.all_updates import memory
from fl_lightning.callback import Clients, FederatedCallback
from fl_lightning.callbacks import ControlVariates, PartialAveraging
from fl_lightning.lab.contracts.federation import (
    Outcome,
    fit,
    in_processes,
    outcome,
    quiet,
    require_same,
)
from fl_lightning.testing import tiny_run
from tests.helpers.learners import Lit, blobs, federated, trainer


class Looking(FederatedCallback):
    """Looks at the updates, and leaves them alone."""

    def on_updates(self, server: Any) -> None:
        server.log("spread", server.updates.std(0).norm())


class Median(FederatedCallback):
    def aggregate(self, server: Any, updates: Tensor) -> Tensor:
        return updates.median(0).values


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"weighting": "samples"},
        {"participation": "all", "weighting": "samples"},
        {"participation": 5},
    ],
)
def test_the_mean_of_updates_that_nobody_changed_has_the_bits_of_the_mean(arguments: Any) -> None:
    plain = tiny_run(ControlVariates(), **arguments)
    looked = tiny_run(ControlVariates(), Looking(), **arguments)
    assert torch.equal(plain.global_vector, looked.global_vector)
    assert torch.equal(
        plain.server_states["ControlVariates.c"], looked.server_states["ControlVariates.c"]
    )


@pytest.mark.fast
def test_rows_are_what_each_client_transmitted_in_ascending_order() -> None:
    seen: dict[str, Any] = {}

    class Marked(FederatedCallback):
        def transmit(self, clients: Clients, update: Tensor) -> Tensor:
            return torch.ones_like(update) * (1.0 + clients.ids[:, None])

        def aggregate(self, server: Any, updates: Tensor) -> Tensor:
            seen["rows"], seen["ids"] = updates.clone(), server.ids.tolist()
            return 0 * server.update

    for engine in ("sequential", "concurrent", "stacked"):
        tiny_run(Marked(), rounds=1, participation=5, engine=engine)
        assert seen["ids"] == sorted(seen["ids"]) and len(seen["ids"]) == 5
        assert torch.equal(
            seen["rows"], (1.0 + torch.tensor(seen["ids"]))[:, None].expand_as(seen["rows"])
        )


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_what_a_hook_changes_is_what_is_averaged(weighting: str) -> None:
    class Halved(FederatedCallback):
        def on_updates(self, server: Any) -> None:
            if server.round % 2:
                server.updates = server.updates / 2
            else:
                server.updates.mul_(0.5)

        def on_server_update(self, server: Any) -> None:
            means.append((server.mean_change.clone(), server.updates.mean(0)))

    means: list[Any] = []
    halved = tiny_run(Halved(), weighting=weighting)
    slower = tiny_run(weighting=weighting, server_optimizer=lambda w: torch.optim.SGD(w, 0.5))
    assert torch.allclose(halved.global_vector, slower.global_vector, rtol=0, atol=1e-14)
    assert all(torch.allclose(mean, of_rows, rtol=0, atol=1e-15) for mean, of_rows in means)


def test_one_two_and_four_processes_have_the_same_rows() -> None:
    def job(world: int) -> Outcome:
        given = {"strategy": "federated", "devices": world}
        return outcome(fit([Median(), Looking()], participation=5, trainer=given))

    with quiet():
        alone = outcome(fit([Median(), Looking()], participation=5))
        for world in (2, 4):
            require_same(
                alone,
                in_processes(world, lambda world=world: job(world)),
                0.0,
                f"{world} processes",
                "",
            )


def test_who_diverged_has_no_row() -> None:
    class Bad(Lit):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (
                float("nan") if len(batch[1]) == 2 else 1.0
            )

    shapes: list[Any] = []

    class Told(FederatedCallback):
        def on_updates(self, server: Any) -> None:
            shapes.append(
                (len(server.updates), server.ids.tolist(), bool(server.updates.isfinite().all()))
            )

    trainer(1, [Told()]).fit(
        federated(Bad(), participation="all", on_nonfinite="skip"), blobs(clients=5)
    )
    assert shapes == [(4, [0, 1, 2, 4], True)]


def test_parts_that_are_not_averaged_stay_whatever_the_rule() -> None:
    run = tiny_run(Median(), PartialAveraging({"first.*": "never"}), rounds=2)
    first = run.layout["first.weight"][0]
    assert torch.equal(
        run.global_vector[first], type(run.learner)().first.weight.detach().flatten()
    )


@pytest.mark.parametrize(
    ("most", "numbers", "kind", "says"),
    [
        (10, 3, torch.float32, "10 × 3 numbers, 120 bytes of"),
        (128, 2, torch.float32, "128 × 2 numbers, 1 KiB of"),
        (1000, 1000, torch.float32, "1,000 × 1,000 numbers, 3.81 MiB of"),
        (1000, 1000, torch.float64, "7.63 MiB of"),
        (1000, 1000, torch.bfloat16, "3.81 MiB of"),
        (2**10, 2**18, torch.float32, "1 GiB of"),
    ],
)
def test_the_memory_is_told_in_units_of_its_size(
    most: int, numbers: int, kind: torch.dtype, says: str
) -> None:
    assert says in memory("Median", most, torch.empty(numbers, dtype=kind, device="meta"))


def test_the_memory_is_said_before_round_0_and_asking_for_too_much_is_an_error() -> None:
    module = federated()
    with pytest.warns(
        UserWarning,
        match="Median: the updates of all participants are held at once, 3 × 204 numbers",
    ):
        trainer(1, [Median()]).fit(module, blobs())
    assert not tiny_run(ControlVariates()).notes

    class Adding(FederatedCallback):
        def on_server_update(self, server: Any, updates: Tensor) -> None:
            assert updates.shape == (3, 204) and updates is server.updates
            server.update += updates.mean(0)

    trainer(1, [Adding()]).fit(federated(), blobs())

    class Asking(FederatedCallback):
        def on_round_end(self, server: Any) -> None:
            server.log("spread", server.updates.std())

    with pytest.raises(UserError, match="Write gathers = True in the class Asking"):
        trainer(1, [Asking()]).fit(federated(), blobs())

    class Shorter(FederatedCallback):
        def on_updates(self, server: Any) -> None:
            server.updates = server.updates[:1]

    with pytest.raises(ValueError, match=r"shape \(3, 204\)"):
        trainer(1, [Shorter()]).fit(federated(), blobs())


def test_what_stands_for_clients_comes_before_what_the_server_does() -> None:
    order: list[str] = []

    def hook(name: str, of_clients: bool) -> FederatedCallback:
        body = {
            "order": -1 if of_clients else 0,
            "on_updates": lambda self, server: order.append(name),
        }
        made: FederatedCallback = type(name, (FederatedCallback,), body)()
        return made

    tiny_run(hook("Server", False), hook("Attack", True), rounds=1)
    assert order == ["Attack", "Server"]
